//! Gradients become averages over the replicas, bucket by bucket.

use super::ZeroOptimizer;
use crate::{Error, NORM_BLOCK, Result, flat};
use merak_mpu::{Buffer, ReduceOp};
use std::ops::Range;

/// The operation, for errors.
const TENSOR_SUM: &str = "sum over the tensor group";

impl ZeroOptimizer {
    /// Starts the reduction of one bucket while the backward pass works on others.
    ///
    /// The gradients of the bucket must be complete, and stay as they are until
    /// [`ZeroOptimizer::reduce_gradients`], which starts the other buckets. Every rank of the data
    /// x sequence group gives the same buckets in the same order. Four are under way at most: a
    /// further one starts with the next call that finds the oldest done. Nothing waits here, so the
    /// group is used for nothing else until [`ZeroOptimizer::reduce_gradients`].
    ///
    /// # Communication
    /// As [`ZeroOptimizer::reduce_gradients`], for one bucket.
    ///
    /// # Errors
    /// When the bucket was started before, `grads` does not fit the layout, or the group fails.
    pub fn start_bucket(&mut self, bucket: usize, grads: &mut dyn Buffer) -> Result<()> {
        flat::check("gradient", grads, self.num_gradients())?;
        self.check_bucket(bucket, |this| {
            if this.divides_gradients() {
                Some("gradients are divided: `add_bucket` takes them")
            } else if this.exchange.is_given(bucket) {
                Some("it was started before")
            } else {
                None
            }
        })?;
        if self.exchange.is_alone() {
            return Ok(());
        }
        self.exchange.give(bucket);
        self.exchange.advance(&self.layout, grads, false)
    }

    /// Starts the reduction of a bucket's gradients of one or more microbatches where gradients are
    /// divided; what this rank owns of the average is added to `kept`.
    ///
    /// The gradients are those of all elements of the bucket. Each further bucket of a step is
    /// complete in `kept` no later than with [`ZeroOptimizer::reduce_gradients`]. Every rank of the
    /// data x sequence group gives the same buckets in the same order; two are under way at most,
    /// so the caller may have to wait for the others.
    ///
    /// # Communication
    /// A reduce-scatter of 4 bytes for each element of the bucket.
    ///
    /// # Errors
    /// When gradients are not divided or reduced already, a buffer is of another length, or the
    /// group fails.
    pub fn add_bucket(
        &mut self,
        bucket: usize,
        gradients: Box<dyn Buffer>,
        kept: &mut dyn Buffer,
    ) -> Result<()> {
        flat::check("gradient", kept, self.num_gradients())?;
        self.check_bucket(bucket, |this| {
            let is_whole = !this.divides_gradients();
            is_whole.then_some("gradients are not divided: `start_bucket` takes them")
        })?;
        let expected = self.layout.buckets()[bucket].flat.len();
        flat::check("bucket of gradients", &*gradients, expected)?;
        self.exchange.add(bucket, &self.layout, gradients, kept)
    }

    /// Refuses a bucket that cannot be reduced now, or for what `refusal` says.
    fn check_bucket(
        &self,
        bucket: usize,
        refusal: impl FnOnce(&Self) -> Option<&'static str>,
    ) -> Result<()> {
        let num_buckets = self.layout.buckets().len();
        let reason = match bucket {
            _ if self.reduced => Some("the gradients of this step are reduced already"),
            _ if bucket >= num_buckets => Some("there is no such bucket"),
            _ => refusal(self),
        };
        reason.map_or(Ok(()), |reason| {
            Err(Error::BucketOrder {
                bucket,
                num_buckets,
                reason,
            })
        })
    }

    /// Whether [`ZeroOptimizer::start_bucket`] was called for a bucket in this step.
    ///
    /// # Panics
    /// When the layout has no such bucket.
    pub fn is_started(&self, bucket: usize) -> bool {
        self.exchange.is_given(bucket)
    }

    /// Replaces the gradients of what this rank owns by their average over the data x sequence
    /// group.
    ///
    /// Elements of other ranks stay as they were. [`ZeroOptimizer::step`] calls this when the
    /// caller did not.
    ///
    /// Gradients of which each rank of the tensor group has a summand are summed over it then.
    ///
    /// # Communication
    /// With `L` elements over `N` ranks: an all-reduce of `4 L` bytes in stage 0, a reduce-scatter
    /// of `4 L` bytes in stage 1, bucket by bucket from the last, up to four under way. None where
    /// gradients are divided, whose reductions this waits for. For what this rank owns of
    /// parameters that are [summed](crate::ParamSpec::summed), an all-reduce of 4 bytes per element
    /// over the tensor group.
    ///
    /// # Errors
    /// When the gradients of this step were reduced before, `grads` does not fit the layout, or the
    /// group fails.
    pub fn reduce_gradients(&mut self, grads: &mut dyn Buffer) -> Result<()> {
        flat::check("gradient", grads, self.num_gradients())?;
        if self.reduced {
            return Err(Error::ReducedTwice);
        }
        if self.divides_gradients() {
            self.exchange.advance(&self.layout, grads, true)?;
        } else if !self.exchange.is_alone() {
            for bucket in (0..self.layout.buckets().len()).rev() {
                if !self.exchange.is_given(bucket) {
                    self.exchange.give(bucket);
                }
            }
            self.exchange.advance(&self.layout, grads, true)?;
            self.exchange.end_step();
        }
        self.sum_over_tensor(grads)?;
        self.reduced = true;
        Ok(())
    }

    /// Sums what this rank owns of the gradients of which each tensor rank has a summand; not many
    /// more elements than a bucket has at once.
    fn sum_over_tensor(&self, grads: &mut dyn Buffer) -> Result<()> {
        let Some(group) = &self.tensor_group else {
            return Ok(());
        };
        let params = self.layout.params();
        let places = self.state.places(self.exchange.grads());
        let owned = self.state.blocks().iter().zip(places);
        let summed = owned.filter(|(block, _)| params[block.param].summed);
        let summed: Vec<_> = summed.map(|(_, place)| place).collect();
        let blocks_at_once = (self.config.reduce_bucket_size / NORM_BLOCK).max(1);
        let copies = self.exchange.copies();
        for places in summed.chunks(blocks_at_once) {
            let places = joined(places);
            let own = copies.take(grads, &places, TENSOR_SUM)?;
            let sum = group.all_reduce(own, ReduceOp::Sum);
            let sum = sum.map_err(Error::communication(TENSOR_SUM))?;
            copies.put(&*sum, grads, &places, TENSOR_SUM)?;
        }
        Ok(())
    }
}

/// Ascending places, adjacent ones as one.
fn joined(places: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for place in places {
        match joined.last_mut() {
            Some(last) if last.end == place.start => last.end = place.end,
            _ => joined.push(place.clone()),
        }
    }
    joined
}
