//! Initial values of parameters that any rank can make for its own slice.
#![expect(
    clippy::inline_always,
    reason = "numbers are made in registers only where that is inlined into its dispatch"
)]

use super::philox::{self, GROUP, Key};
use super::simd::vectorize;
use super::trig::{ln_of_normal, sin_cos};
use super::{Float, Threads};

/// About this many elements per unit of parallel work; a unit takes whole rows.
const CHUNK: usize = 16 * 1024;

/// Together with the index of an element, determines its initial value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitKey {
    /// Seed of the run.
    pub seed: u64,
    /// Hash of the parameter's name.
    pub name: u64,
}

/// How values are distributed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Distribution {
    /// The same value everywhere.
    Constant(f64),
    /// Normal, by the method of Box and Muller; no value is further than 6.7 deviations out.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        std: f64,
    },
    /// Uniform between two values.
    Uniform {
        /// Lower end.
        low: f64,
        /// Upper end.
        high: f64,
    },
}

/// A box of a tensor: along dimension d, the indices `start[d] .. start[d] + local[d]` of
/// `full[d]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorBox<'a> {
    /// Shape of the whole tensor.
    pub full: &'a [usize],
    /// First index in the box.
    pub start: &'a [usize],
    /// Shape of the box.
    pub local: &'a [usize],
}

impl TensorBox<'_> {
    fn check(&self) {
        let dims = self.full.iter().zip(self.start).zip(self.local);
        assert!(
            self.start.len() == self.full.len()
                && self.local.len() == self.full.len()
                && dims
                    .clone()
                    .all(|((full, start), local)| start + local <= *full),
            "{self:?} is no part of its tensor"
        );
    }

    /// Index in the whole tensor of the first element of a row (along the last dimension) of the
    /// box.
    fn row_start(&self, mut row: usize) -> u64 {
        let Some((last, outer)) = self.start.split_last() else {
            return 0;
        };
        let (mut index, mut stride) = (*last as u64, self.full[outer.len()] as u64);
        for dim in (0..outer.len()).rev() {
            let coordinate = self.start[dim] + row % self.local[dim];
            row /= self.local[dim];
            index += coordinate as u64 * stride;
            stride *= self.full[dim] as u64;
        }
        index
    }
}

/// Fills a slice of a parameter with its initial values.
///
/// An element depends only on key, distribution and its index in the whole tensor, with the same
/// bits on every host. So all shardings of a parameter start from the same tensor.
///
/// # Shapes
///
/// `out`: the shape `place.local`, row-major.
///
/// # Panics
///
/// If the box is not part of the tensor, or `out` has another length.
pub fn init<T: Float>(
    threads: &Threads,
    key: InitKey,
    distribution: Distribution,
    place: TensorBox<'_>,
    out: &mut [T],
) {
    place.check();
    let len: usize = place.local.iter().product();
    assert_eq!(out.len(), len, "one value per element of the box");
    if len == 0 {
        return;
    }
    let key = Key::derive(key.seed, key.name, 0);
    let cols = place.local.last().copied().unwrap_or(1);
    let rows = (CHUNK / cols).max(1);
    let chunks = out.chunks_mut(rows * cols).enumerate();
    threads.for_each(chunks, |(chunk, out)| {
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            let first = place.row_start(chunk * rows + row);
            vectorize(
                #[inline(always)]
                || fill(key, distribution, first, out),
            );
        }
    });
}

/// Fills the elements `first ..` of a tensor.
#[inline(always)]
fn fill<T: Float>(key: Key, distribution: Distribution, first: u64, out: &mut [T]) {
    match distribution {
        Distribution::Constant(value) => out.fill(T::from_f64(value)),
        Distribution::Uniform { low, high } => {
            philox::for_each_run(key, 0, first, out.len(), |start, words| {
                for (out, &word) in out[start..].iter_mut().zip(words) {
                    *out = T::from_f64((high - low).mul_add(unit(word), low));
                }
            });
        }
        Distribution::Normal { mean, std } => {
            let mut done = 0;
            while done < out.len() {
                let position = first + done as u64;
                let skip = (position % GROUP as u64) as usize;
                let normals = normal_group(key, position / GROUP as u64);
                let count = (GROUP - skip).min(out.len() - done);
                let run = &mut out[done..done + count];
                for (out, &normal) in run.iter_mut().zip(&normals[skip..]) {
                    *out = T::from_f64(std.mul_add(normal, mean));
                }
                done += count;
            }
        }
    }
}

/// Normal numbers from a group of words: radius and angle come from the words of the first and
/// second quarter, and of the third and fourth.
#[inline(always)]
fn normal_group(key: Key, index: u64) -> [f64; GROUP] {
    const QUARTER: usize = GROUP / 4;
    let words = philox::group(key, 0, index);
    let mut normals = [0.0; GROUP];
    for first in [0, 2 * QUARTER] {
        for lane in first..first + QUARTER {
            let radius = (-2.0 * ln_of_normal(unit(words[lane]))).sqrt();
            let (sin, cos) = sin_cos(std::f64::consts::TAU * unit(words[lane + QUARTER]));
            (normals[lane], normals[lane + QUARTER]) = (radius * cos, radius * sin);
        }
    }
    normals
}

/// A number strictly between zero and one.
#[inline(always)]
fn unit(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::on_any_threads;
    use super::*;

    const KEY: InitKey = InitKey { seed: 1, name: 2 };
    const NORMAL: Distribution = Distribution::Normal {
        mean: 3.0,
        std: 0.5,
    };
    const UNIFORM: Distribution = Distribution::Uniform {
        low: -1.0,
        high: 3.0,
    };

    fn moments(x: &[f32]) -> [f64; 4] {
        let n = x.len() as f64;
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let central = |p| {
            x.iter()
                .map(|&x| (f64::from(x) - mean).powi(p))
                .sum::<f64>()
                / n
        };
        let std = central(2).sqrt();
        [
            mean,
            std,
            central(3) / std.powi(3),
            central(4) / std.powi(4),
        ]
    }

    fn draw(distribution: Distribution, place: TensorBox<'_>) -> Vec<f32> {
        on_any_threads(|threads| {
            let mut out = vec![0.0; place.local.iter().product()];
            init(threads, KEY, distribution, place, &mut out);
            out
        })
    }

    /// All of a tensor; `start` is zeros of the same length.
    fn whole<'a>(full: &'a [usize], start: &'a [usize]) -> TensorBox<'a> {
        TensorBox {
            full,
            start,
            local: full,
        }
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let n = 400_000;
        let place = whole(&[400_000], &[0]);
        let tolerance = 5.0 / f64::from(n).sqrt();
        let close = |actual: [f64; 4], expected: [f64; 4]| {
            let factors = [1.0, 1.0, 2.5, 5.0];
            for ((actual, expected), factor) in actual.into_iter().zip(expected).zip(factors) {
                assert!(
                    (actual - expected).abs() < factor * tolerance,
                    "{actual} {expected}"
                );
            }
        };
        close(moments(&draw(NORMAL, place)), [3.0, 0.5, 0.0, 3.0]);
        close(
            moments(&draw(UNIFORM, place)),
            [1.0, 4.0 / 12_f64.sqrt(), 0.0, 1.8],
        );
    }

    #[test]
    fn boxes_get_their_part_of_the_whole_tensor() {
        let full = [5, 7, 33];
        for distribution in [NORMAL, UNIFORM, Distribution::Constant(2.0)] {
            let whole = draw(distribution, whole(&full, &[0; 3]));
            for (start, local) in [
                ([0, 0, 0], [5, 7, 33]),
                ([1, 2, 10], [3, 4, 20]),
                ([4, 6, 32], [1; 3]),
            ] {
                let place = TensorBox {
                    full: &full,
                    start: &start,
                    local: &local,
                };
                let part = draw(distribution, place);
                for (i, value) in part.iter().enumerate() {
                    let index = [
                        i / local[2] / local[1],
                        i / local[2] % local[1],
                        i % local[2],
                    ];
                    let [a, b, c] = [0, 1, 2].map(|d| start[d] + index[d]);
                    assert_eq!(*value, whole[(a * 7 + b) * 33 + c]);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_cut_of_any_dimension_joins_to_the_whole_tensor(
            full in proptest::collection::vec(2_usize..12, 1..4),
            (dim, cut, normal) in (0_usize..3, 0.0..1.0, any::<bool>()),
        ) {
            let dim = dim % full.len();
            let cut = ((full[dim] as f64 * cut) as usize).clamp(1, full[dim] - 1);
            let fill = |from: usize, len: usize| {
                let (mut start, mut local) = (vec![0; full.len()], full.clone());
                (start[dim], local[dim]) = (from, len);
                let place = TensorBox { full: &full, start: &start, local: &local };
                let mut out = vec![0.0_f64; local.iter().product()];
                let distribution = if normal { NORMAL } else { UNIFORM };
                init(&Threads::one(), KEY, distribution, place, &mut out);
                out
            };
            let inner: usize = full[dim + 1..].iter().product();
            let (low, high) = (fill(0, cut), fill(cut, full[dim] - cut));
            let rows = low.chunks(cut * inner).zip(high.chunks((full[dim] - cut) * inner));
            let joined: Vec<f64> = rows.flat_map(|(low, high)| [low, high].concat()).collect();
            prop_assert_eq!(joined, fill(0, full[dim]));
        }
    }

    #[test]
    fn a_scalar_and_an_empty_box_are_fine() {
        assert_eq!(draw(Distribution::Constant(4.0), whole(&[], &[])), [4.0]);
        assert!(draw(NORMAL, whole(&[0, 3], &[0, 0])).is_empty());
    }

    #[test]
    fn another_name_or_seed_draws_other_values() {
        let values = |key| {
            let mut out = [0.0_f64; 8];
            init(&Threads::one(), key, NORMAL, whole(&[8], &[0]), &mut out);
            out
        };
        assert_ne!(values(KEY), values(InitKey { seed: 2, ..KEY }));
        assert_ne!(values(KEY), values(InitKey { name: 3, ..KEY }));
    }

    #[test]
    fn values_are_the_same_everywhere() {
        let mut out = [0.0_f32; 3];
        init(&Threads::one(), KEY, NORMAL, whole(&[3], &[0]), &mut out);
        let expected = [1_075_873_576, 1_079_815_502, 1_077_174_142];
        assert_eq!(out.map(f32::to_bits), expected);
    }
}
