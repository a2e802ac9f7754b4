//! Cross entropy of rows of logits whose classes are cut over ranks.
//!
//! Each rank finds the largest logit of its classes, then, with that of all ranks, its part of the
//! sums; with these sums of all ranks, every rank computes the loss. Logits are never moved.
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its dispatch"
)]

use super::cross_entropy::{Targets, rows_per_chunk};
use super::simd::{max, sum};
use super::{Float, KernelError, Threads};

/// Finds the largest logit of each row, minus infinity where this rank has no class.
///
/// # Shapes
///
/// `logits`: `[R, own and padding]`; `largest`: `[R]`.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn vocab_max<T: Float>(threads: &Threads, own: usize, logits: &[T], largest: &mut [T]) {
    let width = logits.len() / largest.len().max(1);
    assert_eq!(logits.len(), width * largest.len(), "one result per row");
    assert!(own <= width, "a logit for each class here");
    let rows = rows_per_chunk(width);
    let chunks = logits.chunks((rows * width).max(1));
    let items = chunks.zip(largest.chunks_mut(rows));
    threads.for_each(items, |(logits, largest)| {
        T::vectorize(
            #[inline(always)]
            || {
                for (logits, largest) in logits.chunks_exact(width).zip(&mut *largest) {
                    *largest = max(&logits[..own]);
                }
            },
        );
    });
}

/// Computes what this rank's classes add to the loss of each row: the logit of the label, the sum
/// of `exp(x - largest)`, and where a share of probability is spread, the sum of logits.
///
/// # Shapes
///
/// `logits`: `[R, own and padding]`; `largest`: `[R]`, over the classes of all ranks; `sums`:
/// `[R, 2]`, or `[R, 3]` with smoothing.
///
/// # Errors
///
/// A label is neither a class nor the ignored one.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn vocab_sums<T: Float>(
    threads: &Threads,
    targets: &Targets<'_>,
    logits: &[T],
    largest: &[T],
    sums: &mut [T],
) -> Result<(), KernelError> {
    targets.check()?;
    let (width, own) = (targets.width(logits.len()), targets.own.len());
    let per_row = num_sums(targets.smoothing);
    assert_eq!(largest.len(), targets.labels.len(), "one maximum per row");
    assert_eq!(sums.len(), per_row * largest.len(), "the sums of each row");
    let rows = rows_per_chunk(width);
    let inputs = logits.chunks((rows * width).max(1));
    let inputs = inputs.zip(targets.labels.chunks(rows).zip(largest.chunks(rows)));
    let items = inputs.zip(sums.chunks_mut(rows * per_row));
    threads.for_each(items, |((logits, (labels, largest)), sums)| {
        T::vectorize(
            #[inline(always)]
            || {
                let rows = logits.chunks_exact(width).zip(labels.iter().zip(largest));
                for ((logits, (&label, &largest)), sums) in rows.zip(sums.chunks_exact_mut(per_row))
                {
                    let (logits, shift) = (&logits[..own], finite(largest));
                    sums[0] = targets.column(label).map_or(T::ZERO, |at| logits[at]);
                    sums[1] = sum([logits], |[x]| Float::exp(x - shift));
                    if let Some(of_logits) = sums.get_mut(2) {
                        *of_logits = sum([logits], |[x]| x);
                    }
                }
            },
        );
    });
    Ok(())
}

/// Computes the sum of the losses of the rows that count, as
/// [`cross_entropy`](super::cross_entropy) does of whole rows.
///
/// # Shapes
///
/// `largest`, `lse`: `[R]`; `sums`: `[R, 2]`, or `[R, 3]` with smoothing, both of all ranks.
///
/// # Errors
///
/// A label is neither a class nor the ignored one.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn vocab_loss<T: Float>(
    targets: &Targets<'_>,
    largest: &[T],
    sums: &[T],
    lse: &mut [T],
) -> Result<f64, KernelError> {
    targets.check()?;
    let per_row = num_sums(targets.smoothing);
    assert_eq!(largest.len(), targets.labels.len(), "one maximum per row");
    assert_eq!(lse.len(), targets.labels.len(), "one sum per row");
    assert_eq!(sums.len(), per_row * largest.len(), "the sums of each row");
    let mut loss = 0.0;
    let rows = sums.chunks_exact(per_row).zip(targets.labels);
    for ((sums, &label), (&largest, lse)) in rows.zip(largest.iter().zip(lse)) {
        *lse = finite(largest) + Float::ln(sums[1]);
        if label < 0 {
            continue;
        }
        let mut target = sums[0].to_f64();
        if let Some(of_logits) = sums.get(2) {
            let mean = of_logits.to_f64() / targets.total as f64;
            target = (1.0 - targets.smoothing) * target + targets.smoothing * mean;
        }
        loss += lse.to_f64() - target;
    }
    Ok(loss)
}

/// Sums of a row that ranks add up.
fn num_sums(smoothing: f64) -> usize {
    if smoothing == 0.0 { 2 } else { 3 }
}

/// What is taken from the logits of a row before they are exponents: nothing if all are minus
/// infinity.
#[inline(always)]
fn finite<T: Float>(largest: T) -> T {
    if largest == T::NEG_INFINITY {
        T::ZERO
    } else {
        largest
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, noise, to_f64};
    use super::super::{IGNORED_LABEL, cross_entropy, cross_entropy_grad};
    use super::*;
    use std::ops::Range;

    /// The columns of a rank, with padding of a large number.
    fn columns(x: &[f64], total: usize, own: &Range<usize>, width: usize) -> Vec<f64> {
        let rows = x.chunks(total);
        let padded = rows.flat_map(|row| {
            let padding = vec![1e9; width - own.len()];
            [&row[own.clone()], &padding].concat()
        });
        padded.collect()
    }

    /// Rows of logits with labels, and the ranks that divide their classes.
    struct Case {
        rows: usize,
        total: usize,
        ranks: usize,
        smoothing: f64,
        logits: Vec<f64>,
        labels: Vec<i64>,
    }

    impl Case {
        fn new([rows, total, ranks]: [usize; 3], smoothing: f64) -> Self {
            let label = |row: usize| match row % 3 {
                1 => IGNORED_LABEL,
                _ => ((row * 5 + 2) % total) as i64,
            };
            Self {
                rows,
                total,
                ranks,
                smoothing,
                logits: noise::<f64>(3, rows * total),
                labels: (0..rows).map(label).collect(),
            }
        }

        fn width(&self) -> usize {
            self.total.div_ceil(self.ranks)
        }

        fn own(&self, rank: usize) -> Range<usize> {
            let (start, width) = (rank * self.width(), self.width());
            start.min(self.total)..(start + width).min(self.total)
        }

        fn targets(&self, rank: usize) -> Targets<'_> {
            Targets {
                labels: &self.labels,
                smoothing: self.smoothing,
                total: self.total,
                own: self.own(rank),
            }
        }

        fn local(&self, rank: usize) -> Vec<f64> {
            columns(&self.logits, self.total, &self.own(rank), self.width())
        }

        /// The loss of one rank that has all classes, its `lse` and its gradient.
        fn whole(&self) -> (f64, Vec<f64>, Vec<f64>) {
            let (threads, rows) = (Threads::one(), self.rows);
            let (mut lse, mut dx) = (vec![0.0; rows], vec![0.0; rows * self.total]);
            let (logits, labels) = (&self.logits, &self.labels);
            let loss = cross_entropy(&threads, logits, labels, self.smoothing, &mut lse).unwrap();
            let targets = Targets::all(labels, self.smoothing, self.total);
            cross_entropy_grad(&threads, &targets, Some(logits), &lse, 0.5, &mut dx).unwrap();
            (loss, lse, dx)
        }

        /// The largest logit of each row and the sums over all ranks.
        fn reduced(&self) -> (Vec<f64>, Vec<f64>) {
            let threads = Threads::one();
            let mut largest = vec![f64::NEG_INFINITY; self.rows];
            for rank in 0..self.ranks {
                let mut of_rank = vec![0.0; self.rows];
                vocab_max(
                    &threads,
                    self.own(rank).len(),
                    &self.local(rank),
                    &mut of_rank,
                );
                for (all, one) in largest.iter_mut().zip(of_rank) {
                    *all = all.max(one);
                }
            }
            let mut sums = vec![0.0; self.rows * num_sums(self.smoothing)];
            for rank in 0..self.ranks {
                let mut of_rank = vec![0.0; sums.len()];
                let (targets, local) = (self.targets(rank), self.local(rank));
                vocab_sums(&threads, &targets, &local, &largest, &mut of_rank).unwrap();
                for (all, one) in sums.iter_mut().zip(of_rank) {
                    *all += one;
                }
            }
            (largest, sums)
        }

        fn assert_ranks_agree(&self) {
            let threads = Threads::one();
            let (expected, lse, dx) = self.whole();
            let (largest, sums) = self.reduced();
            for rank in 0..self.ranks {
                let (targets, local) = (self.targets(rank), self.local(rank));
                let mut of_rank = vec![0.0; self.rows];
                let loss = vocab_loss(&targets, &largest, &sums, &mut of_rank).unwrap();
                assert_close(&[loss], &[expected], 1e-12);
                assert_close(&of_rank, &lse, 1e-12);
                let mut grad = vec![7.0; local.len()];
                let given = Some(local.as_slice());
                cross_entropy_grad(&threads, &targets, given, &of_rank, 0.5, &mut grad).unwrap();
                let mut in_place = local.clone();
                cross_entropy_grad(&threads, &targets, None, &of_rank, 0.5, &mut in_place).unwrap();
                assert_eq!(in_place, grad);
                for (row, whole) in grad.chunks(self.width()).zip(dx.chunks(self.total)) {
                    let (real, padding) = row.split_at(targets.own.len());
                    assert_close(&to_f64(real), &whole[targets.own.clone()], 1e-12);
                    assert!(padding.iter().all(|&x| x == 0.0));
                }
            }
        }
    }

    #[test]
    fn ranks_with_their_classes_agree_with_one_that_has_all() {
        for sizes in [[1, 1, 1], [9, 101, 2], [9, 101, 3], [5, 7, 4], [4, 5, 4]] {
            for smoothing in [0.0, 0.1] {
                Case::new(sizes, smoothing).assert_ranks_agree();
            }
        }
    }

    #[test]
    fn a_label_beyond_the_whole_vocabulary_is_refused_on_every_rank() {
        let threads = Threads::one();
        for own in [0..2, 2..3] {
            let targets = Targets {
                labels: &[2, 3],
                smoothing: 0.0,
                total: 3,
                own,
            };
            let sums = vocab_sums(&threads, &targets, &[0.0_f32; 4], &[0.0; 2], &mut [0.0; 4]);
            let reason = sums.unwrap_err().to_string();
            assert!(reason.contains('3'), "{reason}");
        }
    }
}
