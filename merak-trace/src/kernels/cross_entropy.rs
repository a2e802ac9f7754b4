//! Cross entropy of rows of logits.
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its dispatch"
)]

use std::ops::Range;

use super::simd::{max, sum};
use super::{Float, IGNORED_LABEL, KernelError, Threads};

/// Elements per unit of parallel work.
const CHUNK: usize = 32 * 1024;

/// Computes the sum of the losses of the rows that count.
///
/// With `lse = ln(sum exp(x))` and smoothing e, a row's loss is
/// `lse - (1 - e) x[label] - e mean(x)`. Losses are summed in f64 in the order of rows. The caller
/// divides by the number of rows that count, which is a sum over ranks as well.
///
/// # Shapes
///
/// `logits`: `[R, V]`; `labels`, `lse`: `[R]`, the latter kept for [`cross_entropy_grad`].
///
/// # Errors
///
/// A label is neither below V nor [`IGNORED_LABEL`].
///
/// # Panics
///
/// If the lengths do not fit.
pub fn cross_entropy<T: Float>(
    threads: &Threads,
    logits: &[T],
    labels: &[i64],
    smoothing: f64,
    lse: &mut [T],
) -> Result<f64, KernelError> {
    let classes = check(logits.len(), labels)?;
    assert_eq!(lse.len(), labels.len(), "one sum per row");
    let rows = rows_per_chunk(classes);
    let mut losses = vec![0.0; labels.len()];
    let inputs = logits
        .chunks((rows * classes).max(1))
        .zip(labels.chunks(rows));
    let outputs = lse.chunks_mut(rows).zip(losses.chunks_mut(rows));
    threads.for_each(inputs.zip(outputs), |((logits, labels), (lse, losses))| {
        T::vectorize(
            #[inline(always)]
            || {
                let rows = logits.chunks_exact(classes).zip(labels);
                for ((logits, &label), (lse, loss)) in rows.zip(lse.iter_mut().zip(&mut *losses)) {
                    *lse = log_sum_exp(logits);
                    let Ok(label) = usize::try_from(label) else {
                        continue;
                    };
                    let mut target = logits[label].to_f64();
                    if smoothing != 0.0 {
                        let mean = sum([logits], |[x]| x).to_f64() / classes as f64;
                        target = (1.0 - smoothing) * target + smoothing * mean;
                    }
                    *loss = lse.to_f64() - target;
                }
            },
        );
    });
    Ok(losses.iter().sum())
}

/// What the rows of logits are to predict, and which of the classes they have.
#[derive(Debug, Clone)]
pub struct Targets<'a> {
    /// A class for each row, or [`IGNORED_LABEL`].
    pub labels: &'a [i64],
    /// Share of probability that is spread over all classes.
    pub smoothing: f64,
    /// Number of classes: labels must be below it.
    pub total: usize,
    /// The classes of which there are logits. A row of logits may be longer: padding follows, which
    /// is no class.
    pub own: Range<usize>,
}

impl<'a> Targets<'a> {
    /// Of rows that have the logits of all classes.
    pub fn all(labels: &'a [i64], smoothing: f64, classes: usize) -> Self {
        Self {
            labels,
            smoothing,
            total: classes,
            own: 0..classes,
        }
    }

    /// Checks each label.
    pub(super) fn check(&self) -> Result<(), KernelError> {
        let is_class = |label| usize::try_from(label).is_ok_and(|label| label < self.total);
        let wrong = |&(_, &label): &(usize, &i64)| label != IGNORED_LABEL && !is_class(label);
        match self.labels.iter().enumerate().find(wrong) {
            Some((position, &label)) => Err(KernelError::Label {
                label,
                position,
                classes: self.total,
                ignored: IGNORED_LABEL,
            }),
            None => Ok(()),
        }
    }

    /// Logits of a row, padding included.
    pub(super) fn width(&self, num_logits: usize) -> usize {
        let width = num_logits / self.labels.len().max(1);
        assert_eq!(
            num_logits,
            width * self.labels.len(),
            "a whole number of logits per label"
        );
        assert!(
            num_logits == 0 || self.own.len() <= width,
            "a logit for each class here"
        );
        width
    }

    /// Where the logit of a label lies in a row, if it is there.
    #[inline(always)]
    pub(super) fn column(&self, label: i64) -> Option<usize> {
        let label = usize::try_from(label).ok()?;
        let column = label.checked_sub(self.own.start)?;
        (column < self.own.len()).then_some(column)
    }
}

/// Computes `scale` times the gradient of [`cross_entropy`] with respect to the logits. Without
/// `logits` it replaces those in `dlogits`, for callers that no longer need them.
///
/// That is `scale (exp(x - lse) - (1 - e) [class = label] - e / V)`, and zeros where a label is
/// ignored and in padding.
///
/// # Shapes
///
/// `logits`, `dlogits`: `[R, own classes and padding]`; `lse`: `[R]`.
///
/// # Errors
///
/// A label is neither below V nor [`IGNORED_LABEL`].
///
/// # Panics
///
/// If the lengths do not fit.
pub fn cross_entropy_grad<T: Float>(
    threads: &Threads,
    targets: &Targets<'_>,
    logits: Option<&[T]>,
    lse: &[T],
    scale: T,
    dlogits: &mut [T],
) -> Result<(), KernelError> {
    targets.check()?;
    let width = targets.width(dlogits.len());
    if let Some(logits) = logits {
        assert_eq!(dlogits.len(), logits.len(), "a gradient per logit");
    }
    let Targets {
        labels, smoothing, ..
    } = *targets;
    assert_eq!(lse.len(), labels.len(), "one sum per row");
    if width == 0 {
        return Ok(());
    }
    let own = targets.own.len();
    let rows = rows_per_chunk(width);
    let at_label = scale * T::from_f64(1.0 - smoothing);
    let everywhere = scale * T::from_f64(smoothing / targets.total as f64);
    let inputs = labels.chunks(rows).zip(lse.chunks(rows)).enumerate();
    let items = inputs.zip(dlogits.chunks_mut(rows * width));
    threads.for_each(items, |((chunk, (labels, lse)), dlogits)| {
        let first_row = chunk * rows;
        T::vectorize(
            #[inline(always)]
            || {
                let grads = dlogits.chunks_exact_mut(width).enumerate();
                for ((row, dlogits), (&label, &lse)) in grads.zip(labels.iter().zip(lse)) {
                    if label < 0 {
                        dlogits.fill(T::ZERO);
                        continue;
                    }
                    let (dlogits, padding) = dlogits.split_at_mut(own);
                    padding.fill(T::ZERO);
                    let grad = |logit: T| Float::exp(logit - lse).fma(scale, -everywhere);
                    if let Some(logits) = logits {
                        let logits = &logits[(first_row + row) * width..][..own];
                        for (dlogit, &logit) in dlogits.iter_mut().zip(logits) {
                            *dlogit = grad(logit);
                        }
                    } else {
                        for logit in &mut *dlogits {
                            *logit = grad(*logit);
                        }
                    }
                    if let Some(column) = targets.column(label) {
                        dlogits[column] -= at_label;
                    }
                }
            },
        );
    });
    Ok(())
}

/// Logarithm of the sum of exponentials; minus infinity if all elements are.
#[inline(always)]
fn log_sum_exp<T: Float>(x: &[T]) -> T {
    let largest = max(x);
    let shift = if largest == T::NEG_INFINITY {
        T::ZERO
    } else {
        largest
    };
    shift + Float::ln(sum([x], |[x]| Float::exp(x - shift)))
}

/// Checks each label and returns the number of classes.
fn check(num_logits: usize, labels: &[i64]) -> Result<usize, KernelError> {
    if labels.is_empty() {
        assert_eq!(num_logits, 0, "logits without labels");
        return Ok(0);
    }
    assert!(
        num_logits.is_multiple_of(labels.len()),
        "{num_logits} logits are no whole number per label"
    );
    let classes = num_logits / labels.len();
    Targets::all(labels, 0.0, classes).check()?;
    Ok(classes)
}

pub(super) fn rows_per_chunk(classes: usize) -> usize {
    (CHUNK / classes.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_gradient, noise, on_any_threads, to_f64};
    use super::*;

    fn labels(rows: usize, classes: usize) -> Vec<i64> {
        (0..rows)
            .map(|row| match row % 5 {
                3 => IGNORED_LABEL,
                _ => ((row * 7 + 3) % classes) as i64,
            })
            .collect()
    }

    fn definition(logits: &[f64], labels: &[i64], smoothing: f64) -> f64 {
        let classes = logits.len() / labels.len();
        let rows = logits.chunks(classes).zip(labels);
        rows.filter(|&(_, &label)| label != IGNORED_LABEL)
            .map(|(row, &label)| {
                let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
                let mean = row.iter().sum::<f64>() / classes as f64;
                lse - (1.0 - smoothing) * row[label as usize] - smoothing * mean
            })
            .sum()
    }

    const SHAPES: [(usize, usize); 5] = [(1, 1), (1, 3), (7, 130), (300, 65), (9, 40_000)];

    #[test]
    fn losses_match_the_definition() {
        for (rows, classes) in SHAPES {
            for smoothing in [0.0, 0.1] {
                let logits: Vec<f32> = noise(1, rows * classes);
                let labels = labels(rows, classes);
                let loss = on_any_threads(|threads| {
                    let mut lse = vec![0.0; rows];
                    vec![cross_entropy(threads, &logits, &labels, smoothing, &mut lse).unwrap()]
                });
                let expected = definition(&to_f64(&logits), &labels, smoothing);
                assert_close(&loss, &[expected], 1e-6);
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for (rows, classes) in [(1, 1), (1, 3), (7, 130), (300, 65), (2, 33_000)] {
            for smoothing in [0.0, 0.1] {
                let logits: Vec<f64> = noise(1, rows * classes);
                let labels = labels(rows, classes);
                let mut lse = vec![0.0; rows];
                cross_entropy(&Threads::one(), &logits, &labels, smoothing, &mut lse).unwrap();
                let targets = Targets::all(&labels, smoothing, classes);
                let grad = on_any_threads(|threads| {
                    let mut grad = vec![f64::NAN; logits.len()];
                    let given = Some(logits.as_slice());
                    cross_entropy_grad(threads, &targets, given, &lse, 0.25, &mut grad).unwrap();
                    grad
                });
                let mut in_place = logits.clone();
                let one = Threads::one();
                cross_entropy_grad(&one, &targets, None, &lse, 0.25, &mut in_place).unwrap();
                assert_eq!(in_place, grad);
                let f = |logits: &[f64]| vec![0.25 * definition(logits, &labels, smoothing)];
                assert_gradient(&logits, &[1.0], f, &grad);
            }
        }
    }

    #[test]
    fn huge_logits_do_not_overflow_and_nan_is_kept() {
        let logits = [1000.0_f32, 999.0, f32::NEG_INFINITY, -1000.0];
        let mut lse = [0.0];
        let loss = cross_entropy(&Threads::one(), &logits, &[1], 0.0, &mut lse).unwrap();
        assert!((loss - 1.313_261_7).abs() < 1e-4, "{loss}");
        let logits = [0.0_f32, f32::NAN];
        let loss = cross_entropy(&Threads::one(), &logits, &[0], 0.0, &mut lse).unwrap();
        assert!(loss.is_nan());
    }

    #[test]
    fn a_label_that_is_no_class_is_named_with_its_position() {
        let wrong = |label| {
            let labels = [0, IGNORED_LABEL, label];
            cross_entropy(&Threads::one(), &[0.0_f32; 12], &labels, 0.0, &mut [0.0; 3])
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            wrong(4),
            "label 4 at position 2 is out of range, expected 0 to 3 or -100 to ignore it"
        );
        assert!(wrong(-1).starts_with("label -1 at position 2"));
    }

    #[test]
    fn no_rows_have_no_loss() {
        let loss = cross_entropy::<f32>(&Threads::one(), &[], &[], 0.0, &mut []).unwrap();
        assert_eq!(loss, 0.0);
        let targets = Targets::all(&[], 0.0, 0);
        let none = cross_entropy_grad::<f32>(&Threads::one(), &targets, None, &[], 1.0, &mut []);
        assert!(none.is_ok());
    }
}
