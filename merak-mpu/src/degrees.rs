//! The four parallel degrees.

use crate::Axis;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Number of parts of the work along each axis; their product is the number of ranks.
///
/// ```
/// use merak_mpu::Degrees;
/// let degrees = Degrees { tp: 2, pp: 2, ..Degrees::default() };
/// assert_eq!(degrees.world_size(), 4);
/// assert_eq!(degrees.to_string(), "dp 1 x tp 2 x pp 2 x sp 1");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Degrees {
    /// Data parallel degree: replicas of the model that see different samples.
    pub dp: usize,
    /// Tensor parallel degree: ranks that share each layer.
    pub tp: usize,
    /// Pipeline parallel degree: stages.
    pub pp: usize,
    /// Sequence parallel degree: ranks that share each sample.
    pub sp: usize,
}

impl Default for Degrees {
    fn default() -> Self {
        Self {
            dp: 1,
            tp: 1,
            pp: 1,
            sp: 1,
        }
    }
}

impl Degrees {
    /// The number of ranks, `dp * tp * pp * sp`; saturates.
    pub fn world_size(&self) -> usize {
        [self.tp, self.pp, self.sp]
            .into_iter()
            .fold(self.dp, usize::saturating_mul)
    }

    /// The degree along one axis.
    pub fn get(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pipeline => self.pp,
            Axis::Data => self.dp,
            Axis::Sequence => self.sp,
            Axis::Tensor => self.tp,
        }
    }

    /// The degrees of `world_size` ranks that change the fewest of these, by the smallest factor,
    /// and data before pipeline before tensor before sequence parallelism.
    ///
    /// A model that these degrees can split is split by the new ones too: there are no more stages,
    /// and tensor and sequence parallelism change to a divisor.
    pub fn nearest(&self, world_size: usize) -> Option<Self> {
        let fitting = Self::filling(world_size).into_iter();
        let fitting = fitting.filter(|fitting| self.outsplits(fitting));
        // The first of equal ones.
        fitting.min_by_key(|fitting| self.distance(fitting))
    }

    /// All degrees of `world_size` ranks, by rising dp, then tp, then pp.
    ///
    /// ```
    /// use merak_mpu::Degrees;
    /// assert_eq!(Degrees::filling(6).len(), 16);
    /// assert!(Degrees::filling(6).iter().all(|degrees| degrees.world_size() == 6));
    /// ```
    pub fn filling(world_size: usize) -> Vec<Self> {
        let mut all = Vec::new();
        for dp in divisors(world_size) {
            for tp in divisors(world_size / dp) {
                for pp in divisors(world_size / dp / tp) {
                    let sp = world_size / dp / tp / pp;
                    all.push(Self { dp, tp, pp, sp });
                }
            }
        }
        all
    }

    /// Whether these degrees split the model, its layers and samples at least as far as the others.
    fn outsplits(&self, other: &Self) -> bool {
        other.pp <= self.pp && self.tp.is_multiple_of(other.tp) && self.sp.is_multiple_of(other.sp)
    }

    /// Number of changed degrees, the factors by which they change, and how unwelcome each change
    /// is.
    fn distance(&self, other: &Self) -> (usize, u64, usize) {
        let unwelcome = [
            (Axis::Data, 1),
            (Axis::Pipeline, 2),
            (Axis::Tensor, 4),
            (Axis::Sequence, 8),
        ];
        let mut distance = (0, 0, 0);
        for (axis, weight) in unwelcome {
            let (from, to) = (self.get(axis), other.get(axis));
            if from != to {
                let log_factor = (to as f64 / from as f64).ln().abs();
                distance.0 += 1;
                distance.1 += (log_factor * 1e6).round() as u64;
                distance.2 += weight;
            }
        }
        distance
    }
}

impl fmt::Display for Degrees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dp, tp, pp, sp } = self;
        write!(f, "dp {dp} x tp {tp} x pp {pp} x sp {sp}")
    }
}

/// The divisors of a number, ascending; none of 0.
///
/// ```
/// assert_eq!(merak_mpu::divisors(12), [1, 2, 3, 4, 6, 12]);
/// ```
pub fn divisors(n: usize) -> Vec<usize> {
    let small: Vec<_> = (1..=n.isqrt()).filter(|d| n.is_multiple_of(*d)).collect();
    let large = small.iter().rev().map(|d| n / d);
    let large: Vec<_> = large.filter(|d| d * d > n).collect();
    [small, large].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn degrees(dp: usize, tp: usize, pp: usize, sp: usize) -> Degrees {
        Degrees { dp, tp, pp, sp }
    }

    #[test]
    fn the_nearest_degrees_keep_as_many_as_possible() {
        let cases = [
            (degrees(2, 2, 2, 1), 4, degrees(1, 2, 2, 1)),
            (degrees(1, 2, 2, 1), 8, degrees(2, 2, 2, 1)),
            (degrees(1, 8, 1, 1), 4, degrees(1, 4, 1, 1)),
            (degrees(1, 2, 3, 1), 8, degrees(2, 2, 2, 1)),
            // A model need not have heads or layers for more.
            (degrees(1, 2, 1, 1), 3, degrees(3, 1, 1, 1)),
            (degrees(2, 4, 1, 1), 6, degrees(3, 2, 1, 1)),
            (degrees(1, 1, 2, 1), 5, degrees(5, 1, 1, 1)),
        ];
        for (asked, world, expected) in cases {
            assert_eq!(asked.nearest(world), Some(expected), "{asked} in {world}");
        }
        assert_eq!(degrees(1, 1, 1, 1).nearest(0), None);
    }
}
