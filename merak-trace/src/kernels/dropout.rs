//! Dropout whose masks any rank can draw for its own slice.
#![expect(
    clippy::inline_always,
    reason = "the mask vectorises only where it is inlined into a dispatched loop"
)]

use super::philox::{self, Key};
use super::{Float, Threads};
use crate::Runs;

/// Elements per unit of parallel work.
const CHUNK: usize = 16 * 1024;

/// Together with the sample and the element, determines the mask of a dropout node in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskKey {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Hash of the node's name.
    pub node: u64,
}

/// Dropout with probability `p`: an element becomes zero, or is kept and divided by `1 - p`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutMask {
    /// Where the mask comes from.
    pub key: MaskKey,
    /// Probability of zero; zero keeps everything and one (or more) nothing.
    pub p: f64,
}

/// Where a slice lies in its logical tensor `[samples, outer, dim, inner]`.
///
/// The slice holds whole samples, or some of their rows, and `dim_local` of the `dim_full` indices
/// of one dimension. Element `(s, o, d, i)` of the slice is drawn as element
/// `(rows(o) dim_full + runs(d)) inner + i` of sample `first_sample + s`, so slices of one tensor
/// draw the matching pieces of one mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleSlice {
    /// Global index of the first sample.
    pub first_sample: u64,
    /// Product of the dimensions between sample and `dim`.
    pub outer: usize,
    /// Where the rows that these number lie in the logical tensor.
    pub rows: Runs,
    /// Size of the divided dimension in the logical tensor.
    pub dim_full: usize,
    /// Where the indices of that dimension in the slice lie in the logical tensor.
    pub runs: Runs,
    /// Number of indices of that dimension in the slice.
    pub dim_local: usize,
    /// Product of the dimensions after it.
    pub inner: usize,
}

impl SampleSlice {
    /// Whole samples of `elements` elements each.
    pub fn whole(first_sample: u64, elements: usize) -> Self {
        Self {
            first_sample,
            outer: 1,
            rows: Runs::one(0),
            dim_full: elements,
            runs: Runs::one(0),
            dim_local: elements,
            inner: 1,
        }
    }

    /// Calls `f(sample, first element, range)` for the contiguous runs of `start .. start + len`.
    #[inline(always)]
    fn for_each_run(&self, start: usize, len: usize, mut f: impl FnMut(u64, u64, (usize, usize))) {
        let run_len = self.dim_local * self.inner;
        let mut done = 0;
        while done < len {
            let (run, skip) = ((start + done) / run_len, (start + done) % run_len);
            let (sample, outer) = (run / self.outer, run % self.outer);
            let (dim, inner) = (skip / self.inner, skip % self.inner);
            let element =
                (self.rows.at(outer) * self.dim_full + self.runs.at(dim)) * self.inner + inner;
            let neighbours = self.runs.neighbours(dim, self.dim_local) * self.inner - inner;
            let count = neighbours.min(len - done);
            let sample = self.first_sample + sample as u64;
            f(sample, element as u64, (done, done + count));
            done += count;
        }
    }
}

/// Applies dropout to a slice; the same call on the output's gradient gives the input's.
///
/// A dropped NaN or infinity becomes NaN, as zero times it is NaN.
///
/// # Shapes
///
/// `x` and `y`: `[samples, outer, dim_local, inner]` of `slice`.
///
/// # Panics
///
/// If the lengths differ or are not a whole number of samples.
pub fn dropout<T: Float>(
    threads: &Threads,
    dropout: DropoutMask,
    slice: SampleSlice,
    x: &[T],
    y: &mut [T],
) {
    assert_eq!(x.len(), y.len(), "dropout keeps the length");
    let sample_len = slice.outer * slice.dim_local * slice.inner;
    assert!(
        x.is_empty() || (sample_len > 0 && x.len().is_multiple_of(sample_len)),
        "{} elements are no whole number of samples of {sample_len}",
        x.len()
    );
    let mask = Mask::new(dropout);
    let chunks = x.chunks(CHUNK).zip(y.chunks_mut(CHUNK)).enumerate();
    threads.for_each(chunks, |(chunk, (x, y))| {
        T::vectorize(
            #[inline(always)]
            || {
                y.copy_from_slice(x);
                slice.for_each_run(
                    chunk * CHUNK,
                    y.len(),
                    #[inline(always)]
                    |sample, element, (from, to)| mask.apply(sample, element, &mut y[from..to]),
                );
            },
        );
    });
}

/// A dropout with its constants computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mask<T> {
    key: Key,
    /// An element whose random word is below it is kept; `None` keeps all elements and draws no
    /// words.
    threshold: Option<u32>,
    scale: T,
}

impl<T: Float> Mask<T> {
    pub(super) fn new(dropout: DropoutMask) -> Self {
        let MaskKey { seed, step, node } = dropout.key;
        let keep = (1.0 - dropout.p).clamp(0.0, 1.0);
        let threshold = (keep * 4_294_967_296.0).round() as u64;
        Self {
            key: Key::derive(seed, step, node),
            threshold: u32::try_from(threshold).ok(),
            scale: T::from_f64(if threshold == 0 { 0.0 } else { 1.0 / keep }),
        }
    }

    /// Multiplies elements of a sample, from element `first` on, by their mask.
    #[inline(always)]
    pub(super) fn apply(&self, sample: u64, first: u64, values: &mut [T]) {
        let Some(threshold) = self.threshold else {
            return;
        };
        philox::for_each_run(self.key, sample, first, values.len(), |start, words| {
            for (value, &word) in values[start..].iter_mut().zip(words) {
                *value *= if word < threshold {
                    self.scale
                } else {
                    T::ZERO
                };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::on_any_threads;
    use super::*;

    const KEY: MaskKey = MaskKey {
        seed: 1,
        step: 2,
        node: 3,
    };

    fn mask_of(p: f64, slice: SampleSlice, len: usize) -> Vec<f32> {
        on_any_threads(|threads| {
            let mut y = vec![0.0; len];
            dropout(
                threads,
                DropoutMask { key: KEY, p },
                slice,
                &vec![1.0; len],
                &mut y,
            );
            y
        })
    }

    #[test]
    fn keeps_the_right_share_and_scales_it() {
        let n = 200_000;
        let y = mask_of(0.1, SampleSlice::whole(0, n), n);
        let kept = y.iter().filter(|&&y| y > 0.0).count() as f64;
        // Four standard deviations.
        let deviation = (n as f64 * 0.09).sqrt();
        assert!((kept - 0.9 * n as f64).abs() < 4.0 * deviation, "{kept}");
        assert!(y.iter().all(|&y| y == 0.0 || (y - 1.0 / 0.9).abs() < 1e-6));
    }

    #[test]
    fn slices_draw_the_matching_piece_of_the_whole_mask() {
        let (samples, outer, dim, inner) = (3, 4, 10, 3);
        let slice = |first_sample, dim_start, dim_local| SampleSlice {
            first_sample,
            outer,
            rows: Runs::one(0),
            dim_full: dim,
            runs: Runs::one(dim_start),
            dim_local,
            inner,
        };
        let whole = mask_of(0.5, slice(5, 0, dim), samples * outer * dim * inner);
        let flat = SampleSlice::whole(5, outer * dim * inner);
        assert_eq!(whole, mask_of(0.5, flat, whole.len()));
        for (sample, start, local) in [(0, 0, 4), (1, 4, 5), (2, 9, 1)] {
            let part = mask_of(
                0.5,
                slice(5 + sample as u64, start, local),
                outer * local * inner,
            );
            for (i, &value) in part.iter().enumerate() {
                let (o, rest) = (i / (local * inner), i % (local * inner));
                let at = ((sample * outer + o) * dim + start) * inner + rest;
                assert_eq!(value, whole[at]);
            }
        }
        // The first row and the last, of the first sample.
        let rows = SampleSlice {
            outer: 2,
            rows: Runs::two(0, 1, outer - 1),
            ..slice(5, 4, 5)
        };
        for (i, &value) in mask_of(0.5, rows, 2 * 5 * inner).iter().enumerate() {
            let (row, rest) = ([0, outer - 1][i / (5 * inner)], i % (5 * inner));
            assert_eq!(value, whole[(row * dim + 4) * inner + rest]);
        }
    }

    proptest! {
        #[test]
        fn any_cut_of_any_dimension_joins_to_the_whole_mask(
            (outer, dim, inner) in (1_usize..5, 2_usize..40, 1_usize..40),
            (cut, samples, p) in (0.0..1.0, 1_usize..4, 0.1..0.9),
        ) {
            let cut = ((dim as f64 * cut) as usize).clamp(1, dim - 1);
            let place = |runs, dim_local| SampleSlice {
                first_sample: 7,
                outer,
                rows: Runs::one(0),
                dim_full: dim,
                runs,
                dim_local,
                inner,
            };
            let draw = |slice: SampleSlice| {
                let len = samples * outer * slice.dim_local * inner;
                let mut y = vec![0.0_f64; len];
                dropout(&Threads::one(), DropoutMask { key: KEY, p }, slice, &vec![1.0; len], &mut y);
                y
            };
            let whole = draw(place(Runs::one(0), dim));
            let (low, high) = (Runs::one(0), Runs::one(cut));
            let (low, high) = (draw(place(low, cut)), draw(place(high, dim - cut)));
            let rows = low.chunks(cut * inner).zip(high.chunks((dim - cut) * inner));
            let joined: Vec<f64> = rows.flat_map(|(low, high)| [low, high].concat()).collect();
            prop_assert_eq!(&joined, &whole);
            // The indices around the cut are those of another rank.
            let ends = (cut / 2, dim - (dim - cut) / 2);
            let len = ends.0 + dim - ends.1;
            let around = draw(place(Runs::two(0, ends.0, ends.1), len));
            let rows = around.chunks((len * inner).max(1)).zip(whole.chunks(dim * inner));
            for (own, all) in rows {
                prop_assert_eq!(&own[..ends.0 * inner], &all[..ends.0 * inner]);
                prop_assert_eq!(&own[ends.0 * inner..], &all[ends.1 * inner..]);
            }
        }
    }

    #[test]
    fn another_step_node_seed_or_sample_draws_another_mask() {
        let whole = SampleSlice::whole(0, 256);
        let draw = |key, slice| {
            let mut y = vec![0.0_f64; 256];
            dropout(
                &Threads::one(),
                DropoutMask { key, p: 0.5 },
                slice,
                &[1.0; 256],
                &mut y,
            );
            y
        };
        let first = draw(KEY, whole);
        assert_ne!(first, draw(MaskKey { seed: 2, ..KEY }, whole));
        assert_ne!(first, draw(MaskKey { step: 3, ..KEY }, whole));
        assert_ne!(first, draw(MaskKey { node: 4, ..KEY }, whole));
        assert_ne!(first, draw(KEY, SampleSlice::whole(1, 256)));
    }

    #[test]
    fn the_ends_of_the_range_keep_all_or_nothing() {
        let whole = SampleSlice::whole(0, 100);
        assert_eq!(mask_of(0.0, whole, 100), [1.0; 100]);
        assert_eq!(mask_of(1.0, whole, 100), [0.0; 100]);
        assert!(mask_of(0.5, whole, 0).is_empty());
    }

    #[test]
    fn a_dropped_nan_stays_nan() {
        let mut y = [0.0_f32; 64];
        let all = DropoutMask { key: KEY, p: 1.0 };
        let slice = SampleSlice::whole(0, 64);
        dropout(&Threads::one(), all, slice, &[f32::NAN; 64], &mut y);
        assert!(y.iter().all(|y| y.is_nan()));
    }
}
