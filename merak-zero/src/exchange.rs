//! The reduction of a step's gradients, bucket by bucket.

use crate::{
    Bucket, Error, FlatLayout, Result, ZeroConfig, ZeroStage,
    copies::Copies,
    flat,
    gathering::{Arrivals, GatheredBucket, Gatherer},
    layout::Extent,
};
use merak_mpu::{Buffer, Communicator, DType, Group, Pending, ReduceOp, into_vec};
use std::{collections::VecDeque, ops::Range};

/// The operation, for errors.
const REDUCTION: &str = "gradient reduction";

/// Most buckets whose sums are under way at once: each has a copy of its gradients.
pub(crate) const MOST_IN_FLIGHT: usize = 4;
/// The same where gradients are divided: most gradients that a rank holds are then these copies.
pub(crate) const MOST_APART: usize = 2;

/// Reduces gradients over the data x sequence group, and starts to gather parameters.
///
/// A collective works on a copy of its bucket, so the backward pass may go on writing the others.
#[derive(Debug)]
pub(crate) struct Exchange {
    group: Group,
    copies: Copies,
    sharded: bool,
    /// Which elements the buffer of gradients has.
    grads: Extent,
    /// Which elements the buffer of parameters has.
    params: Extent,
    /// Where the own part of each bucket begins among the elements that this rank owns.
    owned_starts: Vec<usize>,
    scale_before: f32,
    scale_after: f32,
    allgather_bucket_size: usize,
    /// Sums under way, in the order in which they were started.
    in_flight: VecDeque<(usize, Pending<Box<dyn Buffer>>)>,
    /// Buckets that wait for their start, in the order in which all ranks start them.
    ready: VecDeque<usize>,
    /// The buckets that were given to start in this step.
    given: Vec<bool>,
    /// Memory of finished collectives, for the next ones.
    spare: Vec<Vec<f32>>,
    /// The most elements that copies under way and such memory had at once.
    most_elements: usize,
}

impl Exchange {
    pub(crate) fn new(group: Group, config: &ZeroConfig, layout: &FlatLayout) -> Self {
        let n = group.world_size() as f64;
        let (before, after) = match config.gradient_predivide_factor {
            _ if !config.prescale_gradients => (1.0, 1.0 / n),
            1.0 => (1.0 / n, 1.0),
            factor => (1.0 / factor, factor / n),
        };
        let is_divided = |from| config.divides_from(from, group.world_size());
        let extent = |from| {
            if is_divided(from) {
                Extent::Owned
            } else {
                Extent::All
            }
        };
        let mut end = 0;
        let start = |bucket: &Bucket| {
            let start = end;
            end += layout.part(bucket, group.rank()).flat.len();
            start
        };
        Self {
            owned_starts: layout.buckets().iter().map(start).collect(),
            sharded: is_divided(ZeroStage::OptimizerState),
            grads: extent(ZeroStage::Gradients),
            params: extent(config.params_divided_from()),
            group,
            copies: Copies::default(),
            scale_before: before as f32,
            scale_after: after as f32,
            allgather_bucket_size: config.gather_bucket_size,
            in_flight: VecDeque::new(),
            ready: VecDeque::new(),
            given: vec![false; layout.buckets().len()],
            spare: Vec::new(),
            most_elements: 0,
        }
    }

    /// How parts of the flat buffers are copied.
    pub(crate) fn copies(&self) -> &Copies {
        &self.copies
    }

    pub(crate) fn set_copies(&mut self, copies: Copies) {
        self.copies = copies;
    }

    /// Whether each rank owns one part of each bucket, instead of every rank owning all.
    pub(crate) fn is_sharded(&self) -> bool {
        self.sharded
    }

    /// Which elements the buffer of gradients has.
    pub(crate) fn grads(&self) -> Extent {
        self.grads
    }

    /// Which elements the buffer of parameters has.
    pub(crate) fn params(&self) -> Extent {
        self.params
    }

    /// Gathers buckets of divided parameters.
    pub(crate) fn gatherer(&self, layout: &FlatLayout) -> Gatherer {
        let bucket = |(bucket, &start): (&Bucket, &usize)| {
            let lengths: Vec<_> = layout.parts(bucket).map(|part| part.flat.len()).collect();
            let own = start..start + lengths[self.group.rank()];
            GatheredBucket { own, lengths }
        };
        let buckets = layout.buckets().iter().zip(&self.owned_starts);
        Gatherer::new(self.group.clone(), buckets.map(bucket).collect())
    }

    /// The parameters that other ranks own, where the buffer has them too; none unless they were
    /// `stepped`.
    pub(crate) fn arrivals(&self, layout: &FlatLayout, stepped: bool) -> Arrivals {
        if stepped && self.sharded && self.params == Extent::All {
            let copies = self.copies.clone();
            Arrivals::new(&self.group, copies, layout, self.allgather_bucket_size)
        } else {
            Arrivals::none(&self.group)
        }
    }

    /// Whether the group has a single rank, so that nothing needs to be sent.
    pub(crate) fn is_alone(&self) -> bool {
        self.group.world_size() == 1
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// The most bytes of copies of gradients that this rank has had at once.
    pub(crate) fn most_bytes(&self) -> usize {
        self.most_elements * size_of::<f32>()
    }

    /// Whether a bucket was given to start in this step.
    pub(crate) fn is_given(&self, bucket: usize) -> bool {
        self.given[bucket]
    }

    /// Lets a bucket start after those that were given before.
    pub(crate) fn give(&mut self, bucket: usize) {
        self.given[bucket] = true;
        self.ready.push_back(bucket);
    }

    /// Starts the sums of given buckets. With `waits`, one that finds too many under way waits for
    /// the oldest, and none is under way in the end. Without it nothing waits. Either way the ranks
    /// start the buckets in one order.
    pub(crate) fn advance(
        &mut self,
        layout: &FlatLayout,
        grads: &mut dyn Buffer,
        waits: bool,
    ) -> Result<()> {
        while let Some(&bucket) = self.ready.front() {
            if self.in_flight.len() < MOST_IN_FLIGHT {
                self.ready.pop_front();
                self.start_reduce(bucket, layout, grads)?;
            } else if waits || self.in_flight[0].1.is_done() {
                self.finish_oldest(layout, grads)?;
            } else {
                return Ok(());
            }
        }
        while waits && !self.in_flight.is_empty() {
            self.finish_oldest(layout, grads)?;
        }
        Ok(())
    }

    /// Starts the sum of a bucket's gradients, which are added to those that this rank keeps. Of
    /// those under way, waits for the oldest.
    pub(crate) fn add(
        &mut self,
        bucket: usize,
        layout: &FlatLayout,
        mut all: Box<dyn Buffer>,
        kept: &mut dyn Buffer,
    ) -> Result<()> {
        if self.in_flight.len() >= MOST_APART {
            self.finish_oldest(layout, kept)?;
        }
        self.copies
            .multiply(&mut *all, self.scale_before, REDUCTION)?;
        self.start_sum(bucket, layout, all)
    }

    /// Makes the next step begin with no bucket given.
    pub(crate) fn end_step(&mut self) {
        self.given.fill(false);
    }

    /// Starts the sum of one bucket.
    fn start_reduce(
        &mut self,
        index: usize,
        layout: &FlatLayout,
        grads: &dyn Buffer,
    ) -> Result<()> {
        let part = layout.buckets()[index].flat.clone();
        let mut copy: Box<dyn Buffer> = if self.copies.device_of(grads).is_some() {
            self.copies.take(grads, &[part], REDUCTION)?
        } else {
            let mut copy = self.spare.pop().unwrap_or_default();
            copy.clear();
            // Memory that grows by doubling would take more than its bucket.
            copy.reserve_exact(part.len());
            flat::read(grads, |g| copy.extend_from_slice(&g[part]));
            Box::new(copy)
        };
        self.copies
            .multiply(&mut *copy, self.scale_before, REDUCTION)?;
        self.start_sum(index, layout, copy)
    }

    fn start_sum(
        &mut self,
        index: usize,
        layout: &FlatLayout,
        copy: Box<dyn Buffer>,
    ) -> Result<()> {
        let bucket = &layout.buckets()[index];
        let pending = if self.sharded {
            let lengths = layout.parts(bucket).map(|part| part.flat.len()).collect();
            self.group
                .start_reduce_scatter_parts_in_place(copy, lengths, ReduceOp::Sum)
        } else {
            self.group.start_all_reduce(copy, ReduceOp::Sum)
        };
        let pending = pending.map_err(Error::communication(REDUCTION))?;
        self.in_flight.push_back((index, pending));
        let under_way = self.in_flight.iter();
        let under_way = under_way.map(|(bucket, _)| layout.buckets()[*bucket].flat.len());
        let spare = self.spare.iter().map(Vec::capacity);
        let elements = under_way.chain(spare).sum();
        self.most_elements = self.most_elements.max(elements);
        Ok(())
    }

    /// Waits for the sum that was started first, and writes its average.
    fn finish_oldest(&mut self, layout: &FlatLayout, grads: &mut dyn Buffer) -> Result<()> {
        let Some((index, pending)) = self.in_flight.pop_front() else {
            return Ok(());
        };
        let sum = pending.wait().map_err(Error::communication(REDUCTION))?;
        let bucket = &layout.buckets()[index];
        let own = if self.sharded {
            let own = layout.part(bucket, self.group.rank()).flat;
            own.start - bucket.flat.start..own.end - bucket.flat.start
        } else {
            0..bucket.flat.len()
        };
        let start = match self.grads {
            Extent::Owned => self.owned_starts[index],
            Extent::All => bucket.flat.start + own.start,
        };
        self.finish_reduce(sum, own, grads, start)
    }

    /// Writes the average of what this rank owns of a bucket into its gradients, or adds it to
    /// them. `own` is where it lies in the sums, `start` where it begins in the gradients.
    fn finish_reduce(
        &mut self,
        mut sum: Box<dyn Buffer>,
        own: Range<usize>,
        grads: &mut dyn Buffer,
        start: usize,
    ) -> Result<()> {
        let (factor, adds) = (self.scale_after, self.grads == Extent::Owned);
        let owned = start..start + own.len();
        if let Some(device) = self.copies.device_of(grads) {
            if own.len() < sum.len() {
                sum = self.copies.take(&*sum, &[own], REDUCTION)?;
            }
            self.copies.multiply(&mut *sum, factor, REDUCTION)?;
            let placed = if adds {
                device.add(&*sum, grads, &[owned])
            } else {
                device.put(&*sum, grads, &[owned])
            };
            return placed.map_err(Error::device(REDUCTION));
        }
        let found = flat::read(&*sum, |all| {
            if let Some(sums) = all.get(own) {
                flat::write_part(grads, owned, |owned| {
                    let owned = owned.iter_mut().zip(sums);
                    if adds {
                        owned.for_each(|(g, x)| *g += x * factor);
                    } else {
                        owned.for_each(|(g, x)| *g = x * factor);
                    }
                });
            }
            all.len()
        });
        let (dtype, len) = (DType::F32, sum.len());
        if found != len {
            let unread = merak_mpu::Error::UnreadBuffer { dtype, len, found };
            return Err(Error::communication(REDUCTION)(unread));
        }
        if !adds {
            self.spare
                .push(into_vec(sum).map_err(Error::communication(REDUCTION))?);
        }
        Ok(())
    }
}
