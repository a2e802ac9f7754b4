//! The collectives of one step: gradients are reduced bucket by bucket, parameters gathered.

use crate::{Bucket, Error, FlatLayout, Result, ZeroConfig, ZeroStage};
use merak_mpu::{Buffer, Communicator, Group, Pending, ReduceOp, into_vec};
use std::ops::Range;

/// Reduces gradients and gathers parameters over the data x sequence group.
///
/// A collective works on a copy of its bucket, so the backward pass may go on writing the others.
#[derive(Debug)]
pub(crate) struct Exchange {
    group: Group,
    sharded: bool,
    scale_before: f32,
    scale_after: f32,
    allgather_bucket_size: usize,
    in_flight: Vec<Option<Pending<Box<dyn Buffer>>>>,
    /// Memory of finished collectives, for the next ones.
    spare: Vec<Vec<f32>>,
}

impl Exchange {
    pub(crate) fn new(group: Group, config: &ZeroConfig, num_buckets: usize) -> Self {
        let n = group.world_size() as f64;
        let (before, after) = match config.gradient_predivide_factor {
            _ if !config.prescale_gradients => (1.0, 1.0 / n),
            1.0 => (1.0 / n, 1.0),
            factor => (1.0 / factor, factor / n),
        };
        Self {
            sharded: config.zero_stage == ZeroStage::OptimizerState && group.world_size() > 1,
            group,
            scale_before: before as f32,
            scale_after: after as f32,
            allgather_bucket_size: config.zero_allgather_bucket_size,
            in_flight: (0..num_buckets).map(|_| None).collect(),
            spare: Vec::new(),
        }
    }

    /// Whether each rank owns one part of each bucket, instead of every rank owning all.
    pub(crate) fn is_sharded(&self) -> bool {
        self.sharded
    }

    /// Whether the group has a single rank, so that nothing needs to be sent.
    pub(crate) fn is_alone(&self) -> bool {
        self.group.world_size() == 1
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    pub(crate) fn is_started(&self, bucket: usize) -> bool {
        self.in_flight[bucket].is_some()
    }

    /// Starts the sum of one bucket.
    pub(crate) fn start_reduce(
        &mut self,
        index: usize,
        bucket: &Bucket,
        grads: &[f32],
    ) -> Result<()> {
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        let scale = self.scale_before;
        let pending = if self.sharded {
            let capacity = bucket.part_capacity();
            for (rank, part) in bucket.parts.iter().enumerate() {
                append_scaled(&mut copy, &grads[part.flat.clone()], scale);
                copy.resize((rank + 1) * capacity, 0.0);
            }
            self.group
                .start_reduce_scatter(Box::new(copy), ReduceOp::Sum)
        } else {
            append_scaled(&mut copy, &grads[bucket.flat.clone()], scale);
            self.group.start_all_reduce(Box::new(copy), ReduceOp::Sum)
        };
        self.in_flight[index] = Some(pending.map_err(Error::communication("gradient reduction"))?);
        Ok(())
    }

    /// Waits for the sum of a started bucket.
    pub(crate) fn wait(&mut self, bucket: usize) -> Result<Vec<f32>> {
        let pending = self.in_flight[bucket].take();
        pending
            .expect("the bucket was started")
            .wait()
            .and_then(into_vec)
            .map_err(Error::communication("gradient reduction"))
    }

    /// Writes the average of what this rank owns of the bucket into its gradients.
    pub(crate) fn finish_reduce(&mut self, bucket: &Bucket, sum: Vec<f32>, grads: &mut [f32]) {
        let owned = self.owned(bucket);
        for (g, &x) in grads[owned].iter_mut().zip(&sum) {
            *g = x * self.scale_after;
        }
        self.spare.push(sum);
    }

    /// What this rank owns of a bucket.
    fn owned(&self, bucket: &Bucket) -> Range<usize> {
        if self.sharded {
            bucket.parts[self.group.rank()].flat.clone()
        } else {
            bucket.flat.clone()
        }
    }

    /// Copies each rank's parts of the parameters to all the others.
    pub(crate) fn gather_params(&self, layout: &FlatLayout, params: &mut dyn Buffer) -> Result<()> {
        if !self.sharded {
            return Ok(());
        }
        let chunk = (self.allgather_bucket_size / self.group.world_size()).max(1);
        for bucket in layout.buckets() {
            let capacity = bucket.part_capacity();
            for start in (0..capacity).step_by(chunk) {
                self.gather_chunk(bucket, start..capacity.min(start + chunk), params)?;
            }
        }
        Ok(())
    }

    /// Gathers the elements `chunk` of every part.
    fn gather_chunk(
        &self,
        bucket: &Bucket,
        chunk: Range<usize>,
        params: &mut dyn Buffer,
    ) -> Result<()> {
        let piece_of = |rank: usize| {
            let part = &bucket.parts[rank].flat;
            let at = |offset: usize| part.end.min(part.start + offset);
            at(chunk.start)..at(chunk.end)
        };
        let mut own = crate::flat::read(params, |p| p[piece_of(self.group.rank())].to_vec());
        own.resize(chunk.len(), 0.0);
        let all = self
            .group
            .all_gather_vec(own)
            .map_err(Error::communication("gathering of parameters"))?;
        crate::flat::write(params, |p| {
            for (rank, values) in all.chunks_exact(chunk.len()).enumerate() {
                let piece = piece_of(rank);
                let len = piece.len();
                p[piece].copy_from_slice(&values[..len]);
            }
        });
        Ok(())
    }
}

fn append_scaled(copy: &mut Vec<f32>, values: &[f32], scale: f32) {
    #[expect(
        clippy::float_cmp,
        reason = "the exact factor of an unscaled reduction"
    )]
    if scale == 1.0 {
        copy.extend_from_slice(values);
    } else {
        copy.extend(values.iter().map(|x| x * scale));
    }
}
