//! The reduction of gradients starts while the backward goes on: a bucket's as soon as the last
//! microbatch has added to all that lies in it.

use merak_trace::{Error as TraceError, GradSink, GradSlot, GradStore, Result as TraceResult};
use merak_zero::{FlatLayout, ZeroOptimizer};
use std::ops::Range;

/// Which additions complete each bucket.
#[derive(Debug)]
pub(super) struct Completion {
    /// For each slot of the store, the buckets that its range lies in.
    buckets_of: Vec<Range<usize>>,
    /// For each bucket the slots that lie in it; none where a part of it is a sum over the uses of
    /// a weight, which is made behind the backward.
    slots_in: Vec<Option<usize>>,
}

impl Completion {
    /// `summed_later` are the slots whose gradients are not complete with the backward.
    pub(super) fn new(layout: &FlatLayout, slots: &[GradSlot], summed_later: &[usize]) -> Self {
        let buckets = layout.buckets();
        let mut slots_in = vec![Some(0); buckets.len()];
        let buckets_of = |(index, slot): (usize, &GradSlot)| {
            // Further uses of a weight lie in buffers of their own.
            if slot.buffer != 0 || slot.len == 0 {
                return 0..0;
            }
            let first = buckets.partition_point(|bucket| bucket.flat.end <= slot.offset);
            let end = buckets.partition_point(|b| b.flat.start < slot.offset + slot.len);
            for count in &mut slots_in[first..end] {
                let is_later = summed_later.contains(&index);
                *count = count.filter(|_| !is_later).map(|count| count + 1);
            }
            first..end
        };
        let buckets_of = slots.iter().enumerate().map(buckets_of).collect();
        Self {
            buckets_of,
            slots_in,
        }
    }

    /// The additions of a step that each bucket waits for.
    pub(super) fn additions(&self, microbatches: usize) -> Vec<Option<usize>> {
        let slots_in = self.slots_in.iter();
        slots_in
            .map(|slots| Some((*slots)? * microbatches))
            .collect()
    }
}

/// The gradients of a step, whose complete buckets are given to the optimizer at once.
#[derive(Debug)]
pub(super) struct Reduction<'a> {
    pub(super) grads: &'a mut GradStore,
    pub(super) optimizer: &'a mut ZeroOptimizer,
    /// `None` where every bucket waits for the end of the backward.
    pub(super) completion: Option<&'a Completion>,
    /// The additions that each bucket still waits for; empty likewise.
    pub(super) missing: &'a mut [Option<usize>],
}

impl GradSink for Reduction<'_> {
    fn store(&mut self) -> &mut GradStore {
        self.grads
    }

    fn written(&mut self, slot: usize) -> TraceResult<()> {
        let buckets = self
            .completion
            .map(|completion| completion.buckets_of[slot].clone());
        for bucket in buckets.unwrap_or_default() {
            let Some(Some(missing)) = self.missing.get_mut(bucket) else {
                continue;
            };
            *missing -= 1;
            if *missing == 0 {
                let started = self
                    .optimizer
                    .start_bucket(bucket, &mut *self.grads.buffers[0]);
                started.map_err(|error| TraceError::Sink(Box::new(error)))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use merak_mpu::threads;
    use merak_zero::{GlobalParams, ParamSpec, ZeroConfig, ZeroGroups};
    use std::error::Error;

    #[test]
    fn a_bucket_waits_for_all_that_lies_in_it_and_never_for_a_later_sum() {
        // Three weights in buckets of 1 Mi elements: the second lies in two of them.
        let rows = 3 << 19;
        let params = ["a", "b", "c"].iter().enumerate();
        let params = params.map(|(i, name)| ParamSpec::new(*name, &[rows], i));
        let layout = FlatLayout::new(params.collect(), 1 << 20, 2).unwrap();
        assert!(layout.buckets().len() > 3);
        let slot = |index: usize| GradSlot {
            buffer: 0,
            offset: index * rows,
            len: rows,
        };
        let slots = [slot(0), slot(1), slot(2)];
        let all = Completion::new(&layout, &slots, &[]);
        for (bucket, additions) in layout.buckets().iter().zip(all.additions(4)) {
            let inside = slots.iter().filter(|slot| {
                slot.offset < bucket.flat.end && bucket.flat.start < slot.offset + slot.len
            });
            assert_eq!(additions, Some(4 * inside.count()));
        }
        let later = Completion::new(&layout, &slots, &[2]);
        let late = later.additions(4);
        assert_eq!(late.last(), Some(&None));
        assert_eq!(late.first(), Some(&Some(4)));
    }
    #[test]
    fn the_last_addition_to_a_bucket_starts_its_reduction() {
        let started = threads::run(2, threads::WorldOptions::default(), |member| {
            let groups = ZeroGroups {
                data_sequence: member.world_group()?,
                model: member.group("model", &[member.rank()])?,
            };
            let params = vec![ParamSpec::new("weight", &[4], 0)];
            let model = GlobalParams::new([("weight", 4)]);
            let mut optimizer = ZeroOptimizer::new(params, model, ZeroConfig::default(), groups)?;
            let mut grads = GradStore {
                buffers: vec![Box::new(vec![1.0_f32; 4])],
                slots: vec![GradSlot {
                    buffer: 0,
                    offset: 0,
                    len: 4,
                }],
            };
            let completion = Completion::new(optimizer.layout(), &grads.slots, &[]);
            let mut missing = completion.additions(2);
            let mut is_started = Vec::new();
            for _ in 0..2 {
                let mut reduction = Reduction {
                    grads: &mut grads,
                    optimizer: &mut optimizer,
                    completion: Some(&completion),
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
}
