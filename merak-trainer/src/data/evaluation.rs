//! Which sample goes where in evaluation.

use super::order::{BatchShape, Microbatch};
use crate::error::Result;

/// The order of evaluation: the data set's own order, each sample once.
///
/// As in training, microbatch m of replica d of iteration i takes b samples from
/// iG + (m·D + d)·b on. At the end microbatches run short or empty; their rows are then filled up
/// with padding that has no labels, and rounds that would be empty on all replicas are left out, so
/// that every replica makes the same number of steps.
#[derive(Debug, Clone, Copy)]
pub struct EvaluationOrder {
    samples: usize,
    shape: BatchShape,
}

impl EvaluationOrder {
    /// Deals `samples` samples in at most `iterations` iterations; `drop_last` leaves out the last
    /// partial global batch.
    ///
    /// # Errors
    ///
    /// [`TooFewSamples`](crate::DataError::TooFewSamples) when nothing is left to evaluate,
    /// [`OutOfRange`](crate::DataError::OutOfRange) for a batch without samples.
    pub fn new(
        samples: usize,
        shape: BatchShape,
        iterations: Option<usize>,
        drop_last: bool,
    ) -> Result<Self> {
        shape.check()?;
        let global_batch = shape.global_batch();
        let mut dealt = samples;
        if drop_last {
            dealt -= samples % global_batch;
        }
        if let Some(iterations) = iterations {
            dealt = dealt.min(iterations.saturating_mul(global_batch));
        }
        if dealt == 0 {
            return Err(shape.too_few("evaluation", samples));
        }
        Ok(Self {
            samples: dealt,
            shape,
        })
    }

    /// Samples that are evaluated, over all replicas.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Iterations.
    pub fn iterations(&self) -> usize {
        self.samples.div_ceil(self.shape.global_batch())
    }

    /// Microbatches of an iteration, the same on every replica: M, or fewer in the last one.
    pub fn microbatches(&self, iteration: usize) -> usize {
        let rest = self
            .samples
            .saturating_sub(iteration * self.shape.global_batch());
        rest.div_ceil(self.shape.batch * self.shape.dp)
            .min(self.shape.microbatches)
    }

    /// The samples of one microbatch of one replica in one iteration, all counted from 0.
    pub fn microbatch(&self, iteration: usize, dp_rank: usize, microbatch: usize) -> Microbatch {
        let BatchShape {
            batch: rows, dp, ..
        } = self.shape;
        let first_position =
            iteration * self.shape.global_batch() + (microbatch * dp + dp_rank) * rows;
        let indices = (first_position..(first_position + rows).min(self.samples)).collect();
        Microbatch {
            first_position,
            indices,
            rows,
            epoch: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn evaluation_deals_each_sample_once(
            (batch, microbatches, dp) in (1_usize..4, 1_usize..4, 1_usize..4),
            samples in 1_usize..60,
        ) {
            let shape = BatchShape { batch, microbatches, dp };
            let order = EvaluationOrder::new(samples, shape, None, false).expect("a sample");
            let mut dealt = Vec::new();
            for iteration in 0..order.iterations() {
                prop_assert!(order.microbatches(iteration) >= 1);
                for microbatch in 0..order.microbatches(iteration) {
                    for rank in 0..shape.dp {
                        let part = order.microbatch(iteration, rank, microbatch);
                        prop_assert!(part.indices.len() <= part.rows);
                        dealt.extend(part.indices);
                    }
                }
            }
            prop_assert_eq!(dealt, (0..samples).collect::<Vec<_>>());
        }
    }

    #[test]
    fn evaluation_may_be_cut_short() {
        let shape = BatchShape {
            batch: 2,
            microbatches: 2,
            dp: 2,
        };
        let samples = |iterations, drop_last| {
            EvaluationOrder::new(13, shape, iterations, drop_last).map(|order| order.samples())
        };
        assert_eq!(samples(None, false).unwrap(), 13);
        assert_eq!(samples(None, true).unwrap(), 8);
        assert_eq!(samples(Some(1), false).unwrap(), 8);
        let order = EvaluationOrder::new(13, shape, None, false).unwrap();
        assert_eq!(
            (
                order.iterations(),
                order.microbatches(0),
                order.microbatches(1)
            ),
            (2, 2, 2)
        );
        assert_eq!(order.microbatch(1, 0, 1).indices, [12]);
        assert_eq!(order.microbatch(1, 1, 1).indices, [0_usize; 0]);
    }

    #[test]
    fn nothing_left_to_evaluate_is_refused_with_the_arithmetic() {
        let shape = BatchShape {
            batch: 8,
            microbatches: 4,
            dp: 2,
        };
        insta::assert_snapshot!(EvaluationOrder::new(63, shape, None, true).unwrap_err(), @"63 evaluation samples are fewer than one global batch of 64 (8 per microbatch x 4 microbatches x dp 2): give more data or a smaller batch");
    }
}
