//! Which sample goes where in training.

use super::{dataset::Dataset, permutation::Permutation};
use crate::error::{DataError, Error, Result};

/// How a global batch is cut: `batch` samples x `microbatches` x `dp` replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Samples of one microbatch of one replica, b.
    pub batch: usize,
    /// Microbatches of a step and replica, M.
    pub microbatches: usize,
    /// Replicas, D.
    pub dp: usize,
}

impl BatchShape {
    /// Samples of a step, G = b · M · D.
    pub fn global_batch(&self) -> usize {
        self.batch
            .saturating_mul(self.microbatches)
            .saturating_mul(self.dp)
    }

    /// Refuses a batch without samples.
    pub(super) fn check(&self) -> Result<()> {
        for (setting, found) in [
            ("batch", self.batch),
            ("microbatches", self.microbatches),
            ("dp", self.dp),
        ] {
            if found == 0 {
                return Err(Error::Data(DataError::out_of_range(
                    setting,
                    found,
                    "at least 1",
                )));
            }
        }
        Ok(())
    }

    pub(super) fn too_few(&self, split: &'static str, samples: usize) -> Error {
        let Self {
            batch,
            microbatches,
            dp,
        } = *self;
        let global_batch = self.global_batch();
        Error::Data(DataError::TooFewSamples {
            split,
            samples,
            global_batch,
            batch,
            microbatches,
            dp,
        })
    }
}

/// The samples of one microbatch of one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Microbatch {
    /// Position of the first sample in the epoch's order; the others follow it. Equal on every
    /// topology with the same global batch, so dropout masks may depend on it.
    pub first_position: usize,
    /// The samples' indices in the data set.
    pub indices: Vec<usize>,
    /// Rows of the batch, b; those beyond `indices` are padding without labels.
    pub rows: usize,
    /// The pass over the data, on which what is drawn in a sample depends; 0 in evaluation.
    pub epoch: u64,
}

impl Microbatch {
    /// Position of each row in the epoch's order, padding included.
    pub fn positions(&self) -> std::ops::Range<usize> {
        self.first_position..self.first_position + self.rows
    }
}

/// How far a run has come in its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct DataPosition {
    /// Epochs finished.
    pub epoch: usize,
    /// Samples used of the epoch after them.
    pub samples: usize,
}

/// The order of training: which samples each step, replica and microbatch takes.
///
/// An epoch is a permutation of the data set from (seed, epoch). Its k-th global batch takes the
/// positions kG..(k+1)G of it, and microbatch m of replica d takes b of them from kG + (m·D + d)·b
/// on. The last partial global batch of an epoch is dropped.
///
/// # Examples
///
/// ```
/// use merak_trainer::data::{BatchShape, TrainingOrder};
///
/// // 10 samples, 4 of them per step: 2 steps per epoch, whatever the replicas.
/// let two = TrainingOrder::new(10, BatchShape { batch: 2, microbatches: 1, dp: 2 }, 42)?;
/// let one = TrainingOrder::new(10, BatchShape { batch: 2, microbatches: 2, dp: 1 }, 42)?;
/// assert_eq!(two.steps_per_epoch(), 2);
/// assert_eq!(two.microbatch(3, 1, 0), one.microbatch(3, 0, 1));
/// # Ok::<(), merak_trainer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TrainingOrder {
    samples: usize,
    is_stream: bool,
    shape: BatchShape,
    seed: u64,
    /// Where the run was resumed: at this step, and at this global batch counted over epochs.
    start_step: usize,
    start_batch: usize,
}

impl TrainingOrder {
    /// The order over `samples` samples, starting at step 0.
    ///
    /// # Errors
    ///
    /// [`DataError::TooFewSamples`] when they do not fill one global batch,
    /// [`DataError::OutOfRange`] for one without samples.
    pub fn new(samples: usize, shape: BatchShape, seed: u64) -> Result<Self> {
        shape.check()?;
        if samples < shape.global_batch() {
            return Err(shape.too_few("training", samples));
        }
        Ok(Self {
            samples,
            is_stream: false,
            shape,
            seed,
            start_step: 0,
            start_batch: 0,
        })
    }

    /// The order over a data set, starting at step 0. A stream is taken in its order, as one epoch
    /// that does not end.
    ///
    /// # Errors
    ///
    /// As [`TrainingOrder::new`].
    pub fn of(data: &dyn Dataset, shape: BatchShape, seed: u64) -> Result<Self> {
        Ok(Self {
            is_stream: data.is_stream(),
            ..Self::new(data.len(), shape, seed)?
        })
    }

    /// Goes on from `position` at `step`. Returns how many samples of the epoch are left out
    /// because `position` lies inside a global batch, as it does when the global batch has changed.
    pub fn resume(&mut self, step: usize, position: DataPosition) -> usize {
        let global_batch = self.shape.global_batch();
        let batch = position
            .samples
            .div_ceil(global_batch)
            .min(self.steps_per_epoch());
        self.start_step = step;
        // A stream has no end, so an epoch before it was one of other data.
        let epoch = if self.is_stream { 0 } else { position.epoch };
        self.start_batch = epoch
            .saturating_mul(self.steps_per_epoch())
            .saturating_add(batch);
        (batch * global_batch).saturating_sub(position.samples)
    }

    /// The seed of the order.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Whole global batches of an epoch, E.
    pub fn steps_per_epoch(&self) -> usize {
        self.samples / self.shape.global_batch()
    }

    /// The epoch of a step and the number of its global batch in it.
    ///
    /// # Panics
    ///
    /// If `step` is before the one that the order was resumed at.
    pub fn locate(&self, step: usize) -> (usize, usize) {
        assert!(
            step >= self.start_step,
            "step {step} is before the first, {}",
            self.start_step
        );
        let batch = self.batches_after(step);
        (
            batch / self.steps_per_epoch(),
            batch % self.steps_per_epoch(),
        )
    }

    /// Global batches of this size, counted over epochs, that a run of `steps` steps has behind it.
    pub(crate) fn batches_after(&self, steps: usize) -> usize {
        self.start_batch.saturating_add(steps - self.start_step)
    }

    /// The position of a run that has done `steps` steps.
    pub fn position_after(&self, steps: usize) -> DataPosition {
        let (epoch, batch) = self.locate(steps);
        DataPosition {
            epoch,
            samples: batch * self.shape.global_batch(),
        }
    }

    /// Epochs that a run of `steps` steps has seen, with a fraction; 0 of a stream.
    pub fn epochs_after(&self, steps: usize) -> f64 {
        let (epoch, batch) = self.locate(steps);
        epoch as f64 + batch as f64 / self.steps_per_epoch() as f64
    }

    /// Whether step `step` is the last of its epoch.
    pub fn ends_epoch(&self, step: usize) -> bool {
        self.locate(step).1 + 1 == self.steps_per_epoch()
    }

    /// The samples of one microbatch of one replica in one step, all counted from 0.
    pub fn microbatch(&self, step: usize, dp_rank: usize, microbatch: usize) -> Microbatch {
        let (epoch, batch) = self.locate(step);
        let BatchShape {
            batch: rows, dp, ..
        } = self.shape;
        let first_position = batch * self.shape.global_batch() + (microbatch * dp + dp_rank) * rows;
        let positions = first_position..first_position + rows;
        let indices = if self.is_stream {
            positions.collect()
        } else {
            let order = Permutation::new(self.samples, self.seed, epoch as u64);
            positions.filter_map(|place| order.get(place)).collect()
        };
        Microbatch {
            first_position,
            indices,
            rows,
            epoch: epoch as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shapes() -> impl Strategy<Value = BatchShape> {
        (1_usize..4, 1_usize..4, 1_usize..4).prop_map(|(batch, microbatches, dp)| BatchShape {
            batch,
            microbatches,
            dp,
        })
    }

    fn step_samples(order: &TrainingOrder, step: usize) -> Vec<usize> {
        let shape = order.shape;
        (0..shape.microbatches)
            .flat_map(|m| (0..shape.dp).map(move |d| (m, d)))
            .flat_map(|(m, d)| order.microbatch(step, d, m).indices)
            .collect()
    }

    proptest! {
        #[test]
        fn an_epoch_uses_each_sample_at_most_once(shape in shapes(), extra in 0_usize..40, seed: u64) {
            let samples = shape.global_batch() + extra;
            let order = TrainingOrder::new(samples, shape, seed).expect("enough samples");
            let steps = order.steps_per_epoch();
            let mut used: Vec<_> = (0..steps).flat_map(|step| step_samples(&order, step)).collect();
            prop_assert_eq!(used.len(), steps * shape.global_batch());
            used.sort_unstable();
            used.dedup();
            prop_assert_eq!(used.len(), steps * shape.global_batch());
            prop_assert!(used.last().is_some_and(|last| *last < samples));
        }

        #[test]
        fn every_topology_takes_the_same_samples_at_the_same_positions(seed: u64, step in 0_usize..20) {
            let take = |microbatches, dp| {
                let shape = BatchShape { batch: 2, microbatches, dp };
                let order = TrainingOrder::new(50, shape, seed).expect("enough samples");
                step_samples(&order, step)
            };
            prop_assert_eq!(take(4, 1), take(1, 4));
            prop_assert_eq!(take(4, 1), take(2, 2));
        }

        #[test]
        fn a_resumed_order_goes_on_where_it_stopped(shape in shapes(), stop in 0_usize..30, seed: u64) {
            let samples = 3 * shape.global_batch() + 1;
            let whole = TrainingOrder::new(samples, shape, seed).expect("enough samples");
            let mut resumed = whole.clone();
            prop_assert_eq!(resumed.resume(stop, whole.position_after(stop)), 0);
            for step in stop..stop + 7 {
                prop_assert_eq!(step_samples(&resumed, step), step_samples(&whole, step));
                prop_assert_eq!(resumed.position_after(step), whole.position_after(step));
            }
        }

    }

    #[test]
    fn epochs_and_seeds_have_different_orders() {
        let shape = BatchShape {
            batch: 8,
            microbatches: 1,
            dp: 1,
        };
        let order = |seed| TrainingOrder::new(64, shape, seed).unwrap();
        assert_ne!(step_samples(&order(1), 0), step_samples(&order(1), 8));
        assert_ne!(step_samples(&order(1), 0), step_samples(&order(2), 0));
        assert_eq!(order(1).locate(8), (1, 0));
        assert!(order(1).ends_epoch(7) && !order(1).ends_epoch(8));
        assert!((order(1).epochs_after(12) - 1.5).abs() < 1e-12);
    }

    #[test]
    fn batches_without_samples_are_refused_and_positions_of_no_run_are_survived() {
        let shape = BatchShape {
            batch: 4,
            microbatches: 0,
            dp: 1,
        };
        let error = TrainingOrder::new(64, shape, 1).unwrap_err().to_string();
        assert_eq!(error, "`microbatches` is 0, expected at least 1");
        assert!(crate::data::EvaluationOrder::new(64, shape, None, true).is_err());
        let shape = BatchShape {
            microbatches: 1,
            ..shape
        };
        let mut order = TrainingOrder::new(64, shape, 1).unwrap();
        let position = DataPosition {
            epoch: usize::MAX,
            samples: 8,
        };
        assert_eq!(order.resume(3, position), 0);
        assert_eq!(order.microbatch(4, 0, 0).indices.len(), 4);
    }

    #[test]
    fn a_changed_global_batch_starts_at_the_next_whole_one() {
        let order = |batch| {
            TrainingOrder::new(
                100,
                BatchShape {
                    batch,
                    microbatches: 1,
                    dp: 1,
                },
                0,
            )
            .unwrap()
        };
        let position = order(10).position_after(3);
        assert_eq!(
            position,
            DataPosition {
                epoch: 0,
                samples: 30
            }
        );
        let mut changed = order(16);
        assert_eq!(changed.resume(3, position), 2);
        assert_eq!(changed.microbatch(3, 0, 0).first_position, 32);
        // Behind the last whole global batch the next epoch begins.
        assert_eq!(
            changed.resume(
                9,
                DataPosition {
                    epoch: 0,
                    samples: 97
                }
            ),
            0
        );
        assert_eq!(changed.locate(9), (1, 0));
    }

    #[test]
    fn too_few_samples_are_refused_with_the_arithmetic() {
        let shape = BatchShape {
            batch: 8,
            microbatches: 4,
            dp: 2,
        };
        insta::assert_snapshot!(TrainingOrder::new(63, shape, 0).unwrap_err(), @"63 training samples are fewer than one global batch of 64 (8 per microbatch x 4 microbatches x dp 2): give more data or a smaller batch");
    }
}
