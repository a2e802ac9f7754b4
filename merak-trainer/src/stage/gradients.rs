//! The memory of gradients, and their reduction, which starts while the backward goes on: a
//! bucket's as soon as the last microbatch has added to all that lies in it; where gradients are
//! divided, as soon as each microbatch has.

use merak_mpu::{Buffer, DType};
use merak_partition::{ParamUse, RankPrograms};
use merak_trace::{
    Backend, Error as TraceError, GradSink, GradSlot, GradStore, Param, Result as TraceResult,
};
use merak_zero::{Bucket, FlatLayout, ZeroOptimizer};
use std::ops::Range;

/// Where the gradients of a rank's parameters accumulate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// In the first buffer of the store, from step to step.
    Whole,
    /// In a buffer for each bucket, after the first one, which has what the rank keeps of them. A
    /// bucket's buffer is empty from its reduction to the next addition.
    ByBucket,
}

/// Which additions complete each bucket.
#[derive(Debug)]
pub(super) struct Completion {
    memory: Memory,
    /// For each slot of the store, the buckets that its range lies in.
    buckets_of: Vec<Range<usize>>,
    /// For each bucket the slots that lie in it; none where a part of it is a sum over the uses of
    /// a weight, which is made after the backward.
    slots_in: Vec<Option<usize>>,
    /// The elements of each bucket.
    lens: Vec<usize>,
}

impl Completion {
    /// `summed_later` are the slots whose gradients are not complete with the backward.
    pub(super) fn new(
        optimizer: &ZeroOptimizer,
        slots: &[GradSlot],
        summed_later: &[usize],
    ) -> Self {
        let buckets = optimizer.layout().buckets();
        let memory = if optimizer.divides_gradients() {
            Memory::ByBucket
        } else {
            Memory::Whole
        };
        let mut slots_in = vec![Some(0); buckets.len()];
        let buckets_of = |(index, slot): (usize, &GradSlot)| {
            let within = match memory {
                _ if slot.len == 0 => 0..0,
                Memory::ByBucket => bucket_of(slot, buckets).map_or(0..0, |at| at..at + 1),
                // Further uses of a weight lie in buffers of their own.
                Memory::Whole if slot.buffer != 0 => 0..0,
                Memory::Whole => {
                    let first = buckets.partition_point(|bucket| bucket.flat.end <= slot.offset);
                    let end = slot.offset + slot.len;
                    first..buckets.partition_point(|bucket| bucket.flat.start < end)
                }
            };
            for count in &mut slots_in[within.clone()] {
                let is_later = summed_later.contains(&index);
                *count = count.filter(|_| !is_later).map(|count| count + 1);
            }
            within
        };
        Self {
            memory,
            buckets_of: slots.iter().enumerate().map(buckets_of).collect(),
            slots_in,
            lens: buckets.iter().map(|bucket| bucket.flat.len()).collect(),
        }
    }

    /// The additions that each bucket waits for before its next reduction, in a step of some
    /// microbatches.
    pub(super) fn additions(&self, microbatches: usize) -> Vec<Option<usize>> {
        let times = match self.memory {
            Memory::Whole => microbatches,
            Memory::ByBucket => 1,
        };
        let slots_in = self.slots_in.iter();
        slots_in.map(|slots| Some((*slots)? * times)).collect()
    }

    /// Gives the buckets that were not reduced during the backward to the optimizer, and ends the
    /// reduction of all.
    pub(super) fn end_step(
        &self,
        grads: &mut GradStore,
        optimizer: &mut ZeroOptimizer,
    ) -> merak_zero::Result<()> {
        let (kept, rest) = split(grads);
        if self.memory == Memory::ByBucket {
            for bucket in (0..self.lens.len()).rev() {
                if !rest[bucket].is_empty() {
                    optimizer.add_bucket(bucket, take(&mut rest[bucket]), kept)?;
                }
            }
        }
        optimizer.reduce_gradients(kept)
    }
}

/// The bucket in whose buffer a slot lies, if it is not a further use of a weight.
fn bucket_of(slot: &GradSlot, buckets: &[Bucket]) -> Option<usize> {
    let bucket = slot.buffer.checked_sub(1)?;
    (bucket < buckets.len()).then_some(bucket)
}

/// Memory for the gradients of all uses. The first use of a parameter accumulates with the others,
/// in a flat buffer or in that of its bucket; further ones accumulate apart.
///
/// # Errors
/// As [`Backend::grad_buffer`].
pub(crate) fn grad_store(
    programs: &RankPrograms,
    optimizer: &ZeroOptimizer,
    backend: &dyn Backend,
) -> TraceResult<GradStore> {
    let layout = optimizer.layout();
    let mut buffers = vec![backend.grad_buffer(DType::F32, optimizer.num_gradients())?];
    if optimizer.divides_gradients() {
        buffers.extend(layout.buckets().iter().map(|_| nothing()));
    }
    let mut slots = Vec::new();
    let positions = trained_positions(&programs.params);
    for ParamUse { param, is_first } in programs.uses() {
        let len = programs.params[param].local.numel();
        let (buffer, offset) = if !is_first {
            buffers.push(backend.grad_buffer(DType::F32, len)?);
            (buffers.len() - 1, 0)
        } else if optimizer.divides_gradients() {
            place_by_bucket(layout, layout.range(positions[param]).start)
        } else {
            (0, layout.range(positions[param]).start)
        };
        slots.push(GradSlot {
            buffer,
            offset,
            len,
        });
    }
    Ok(GradStore { buffers, slots })
}

/// The buffer of the bucket that has an element of the layout, and the element's place in it.
fn place_by_bucket(layout: &FlatLayout, element: usize) -> (usize, usize) {
    let buckets = layout.buckets();
    let bucket = buckets.partition_point(|bucket| bucket.flat.end <= element);
    let start = buckets.get(bucket).map_or(element, |b| b.flat.start);
    (1 + bucket, element - start)
}

/// For each parameter of a rank, how many trained parameters precede it.
fn trained_positions(table: &[Param]) -> Vec<usize> {
    let mut next = 0;
    let position = |param: &Param| {
        let position = next;
        next += usize::from(param.trainable);
        position
    };
    table.iter().map(position).collect()
}

/// Shows the gradients of the parameter at a position of the layout, before they are reduced.
pub(super) fn read_gradient(
    grads: &GradStore,
    optimizer: &ZeroOptimizer,
    param: usize,
) -> Vec<f32> {
    let range = optimizer.layout().range(param);
    let (buffer, offset) = if optimizer.divides_gradients() {
        place_by_bucket(optimizer.layout(), range.start)
    } else {
        (0, range.start)
    };
    let mut out = vec![0.0; range.len()];
    // A bucket without additions has no memory, and its gradients are zero.
    if !grads.buffers[buffer].is_empty() {
        grads.buffers[buffer].read(&mut |bytes| {
            let all = bytemuck::cast_slice::<u8, f32>(bytes);
            out.copy_from_slice(&all[offset..offset + range.len()]);
        });
    }
    out
}

/// Makes the next step start from zero.
pub(super) fn clear(grads: &mut GradStore, optimizer: &ZeroOptimizer) {
    if optimizer.divides_gradients() {
        let buckets = optimizer.layout().buckets().len();
        grads.buffers[1..=buckets].fill_with(nothing);
    }
    grads.buffers.iter_mut().for_each(|buffer| buffer.clear());
}

fn nothing() -> Box<dyn Buffer> {
    Box::new(Vec::<f32>::new())
}

fn take(buffer: &mut Box<dyn Buffer>) -> Box<dyn Buffer> {
    std::mem::replace(buffer, nothing())
}

/// The first buffer of a store, and the others.
fn split(grads: &mut GradStore) -> (&mut dyn Buffer, &mut [Box<dyn Buffer>]) {
    let (first, rest) = grads
        .buffers
        .split_first_mut()
        .expect("a store has a buffer for what the rank keeps");
    (&mut **first, rest)
}

/// The gradients of a step, whose complete buckets are given to the optimizer at once.
#[derive(Debug)]
pub(super) struct Reduction<'a> {
    pub(super) grads: &'a mut GradStore,
    pub(super) optimizer: &'a mut ZeroOptimizer,
    pub(super) backend: &'a dyn Backend,
    pub(super) completion: &'a Completion,
    /// The additions that each bucket still waits for; empty where every bucket waits for the end
    /// of the backward.
    pub(super) missing: &'a mut [Option<usize>],
}

impl Reduction<'_> {
    /// Gives a complete bucket to the optimizer.
    fn reduce(&mut self, bucket: usize) -> merak_zero::Result<()> {
        let (kept, rest) = split(self.grads);
        match self.completion.memory {
            Memory::Whole => self.optimizer.start_bucket(bucket, kept),
            Memory::ByBucket => {
                self.missing[bucket] = self.completion.slots_in[bucket];
                let all = take(&mut rest[bucket]);
                self.optimizer.add_bucket(bucket, all, kept)
            }
        }
    }
}

impl GradSink for Reduction<'_> {
    fn store(&mut self) -> &mut GradStore {
        self.grads
    }

    fn open(&mut self, slot: usize) -> TraceResult<()> {
        if self.completion.memory == Memory::ByBucket {
            for bucket in self.completion.buckets_of[slot].clone() {
                let buffer = &mut self.grads.buffers[1 + bucket];
                if buffer.is_empty() {
                    let len = self.completion.lens[bucket];
                    *buffer = self.backend.bucket_buffer(len)?;
                }
            }
        }
        Ok(())
    }

    fn written(&mut self, slot: usize) -> TraceResult<()> {
        for bucket in self.completion.buckets_of[slot].clone() {
            let Some(Some(missing)) = self.missing.get_mut(bucket) else {
                continue;
            };
            *missing -= 1;
            if *missing == 0 {
                let reduced = self.reduce(bucket);
                reduced.map_err(|error| TraceError::Sink(Box::new(error)))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use merak_mpu::{Member, threads};
    use merak_trace::backend::candle::Candle;
    use merak_zero::{GlobalParams, ParamSpec, ZeroConfig, ZeroGroups, ZeroStage};
    use std::error::Error;

    type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

    /// An optimizer of weights of one length over two replicas.
    fn optimizer(
        member: &Member,
        names: &[&'static str],
        len: usize,
        stage: ZeroStage,
    ) -> Outcome<ZeroOptimizer> {
        let groups = ZeroGroups {
            data_sequence: member.world_group()?,
            model: member.group("model", &[member.rank()])?,
        };
        let specs = names.iter().enumerate();
        let specs = specs.map(|(i, name)| ParamSpec::new(*name, &[len], i));
        let model = GlobalParams::new(names.iter().map(|name| (*name, len)));
        let config = ZeroConfig {
            stage,
            reduce_bucket_size: 1 << 20,
            ..ZeroConfig::default()
        };
        Ok(ZeroOptimizer::new(specs.collect(), model, config, groups)?)
    }

    #[test]
    fn a_bucket_waits_for_all_that_lies_in_it_and_never_for_a_later_sum() {
        // Three weights in buckets of 1 Mi elements: the second lies in two of them.
        let rows = 3 << 19;
        let slot = |index: usize| GradSlot {
            buffer: 0,
            offset: index * rows,
            len: rows,
        };
        let slots = [slot(0), slot(1), slot(2)];
        let ran = threads::run(
            2,
            threads::WorldOptions::default(),
            |member| -> Outcome<()> {
                let stage = ZeroStage::OptimizerState;
                let optimizer = optimizer(&member, &["a", "b", "c"], rows, stage)?;
                let buckets = optimizer.layout().buckets();
                assert!(buckets.len() > 3);
                let all = Completion::new(&optimizer, &slots, &[]);
                for (bucket, additions) in buckets.iter().zip(all.additions(4)) {
                    let inside = slots.iter().filter(|slot| {
                        slot.offset < bucket.flat.end && bucket.flat.start < slot.offset + slot.len
                    });
                    assert_eq!(additions, Some(4 * inside.count()));
                }
                let later = Completion::new(&optimizer, &slots, &[2]);
                let late = later.additions(4);
                assert_eq!(late.last(), Some(&None));
                assert_eq!(late.first(), Some(&Some(4)));
                Ok(())
            },
        );
        ran.unwrap();
    }

    #[test]
    fn the_last_addition_to_a_bucket_starts_its_reduction() {
        let started = threads::run(2, threads::WorldOptions::default(), |member| {
            let mut optimizer = optimizer(&member, &["weight"], 4, ZeroStage::OptimizerState)?;
            let mut grads = GradStore {
                buffers: vec![Box::new(vec![1.0_f32; 4])],
                slots: vec![GradSlot {
                    buffer: 0,
                    offset: 0,
                    len: 4,
                }],
            };
            let completion = Completion::new(&optimizer, &grads.slots, &[]);
            let mut missing = completion.additions(2);
            let mut is_started = Vec::new();
            for _ in 0..2 {
                let mut reduction = Reduction {
                    grads: &mut grads,
                    optimizer: &mut optimizer,
                    backend: &Candle::new(1)?,
                    completion: &completion,
                    missing: &mut missing,
                };
                reduction.written(0)?;
                is_started.push(optimizer.is_started(0));
            }
            optimizer.reduce_gradients(&mut *grads.buffers[0])?;
            Ok::<_, Box<dyn Error + Send + Sync>>(is_started)
        });
        assert_eq!(started.unwrap(), vec![vec![false, true]; 2]);
    }

    #[test]
    fn divided_gradients_of_a_bucket_have_memory_from_the_first_addition_to_the_last() {
        let slot = |index: usize| GradSlot {
            buffer: 1,
            offset: 4 * index,
            len: 4,
        };
        let kept = threads::run(2, threads::WorldOptions::default(), |member| {
            let mut optimizer = optimizer(&member, &["a", "b"], 4, ZeroStage::Gradients)?;
            let kept: Box<dyn Buffer> = Box::new(vec![0.0_f32; optimizer.num_gradients()]);
            let mut grads = GradStore {
                buffers: vec![kept, nothing()],
                slots: vec![slot(0), slot(1)],
            };
            let completion = Completion::new(&optimizer, &grads.slots, &[]);
            let mut missing = completion.additions(3);
            let mut lens = Vec::new();
            for _ in 0..3 {
                for slot in [1, 0] {
                    let mut reduction = Reduction {
                        grads: &mut grads,
                        optimizer: &mut optimizer,
                        backend: &Candle::new(1)?,
                        completion: &completion,
                        missing: &mut missing,
                    };
                    reduction.open(slot)?;
                    let place = reduction.grads.slots[slot];
                    reduction.grads.buffers[1].write(&mut |bytes| {
                        let all = bytemuck::cast_slice_mut::<u8, f32>(bytes);
                        all[place.offset..][..4].fill(1.0 + member.rank().0 as f32);
                    });
                    reduction.written(slot)?;
                    lens.push(grads.buffers[1].len());
                }
            }
            completion.end_step(&mut grads, &mut optimizer)?;
            assert_eq!(lens, [8, 0, 8, 0, 8, 0]);
            let mut values = Vec::new();
            grads.buffers[0].read(&mut |bytes| values = bytemuck::cast_slice(bytes).to_vec());
            Ok::<Vec<f32>, Box<dyn Error + Send + Sync>>(values)
        });
        // Three microbatches with a mean of 1.5 over both replicas.
        assert_eq!(kept.unwrap().concat(), [4.5; 8]);
    }
}
