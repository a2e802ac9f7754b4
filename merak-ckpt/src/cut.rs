//! How tensor parallelism cuts a tensor, whatever the degree.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Most parts of a cut.
const MAX_PARTS: usize = 64;

/// How tensor parallelism cuts a tensor, whatever the degree: along a dim that is the
/// concatenation of parts, each of which is cut evenly.
///
/// Rank `r` of `n` holds the indices `size * r / n .. size * (r + 1) / n` of every part (rounded
/// down), one after the other. One part is the usual slice; a fused `[q k v]` weight has three.
///
/// ```
/// use merak_ckpt::Cut;
///
/// # fn main() -> Result<(), merak_ckpt::Error> {
/// // Rank 1 of tp = 2 of a fused q, k, v weight [8, 12]: columns 2..4, 6..8 and 10..12.
/// let layout = Cut::new(1, [4, 4, 4]).layout(&[8, 12], 1, 2)?;
/// assert_eq!(layout.local_shape(), [8, 6]);
/// assert_eq!(layout.parts()[1].region.to_string(), "[0:8,6:8]");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// The dim.
    pub dim: usize,
    /// Sizes of the parts; their sum is the size of the dim.
    pub parts: Vec<usize>,
}

impl Cut {
    /// A cut of `dim`, the concatenation of parts of these sizes.
    pub fn new(dim: usize, parts: impl Into<Vec<usize>>) -> Self {
        Self {
            dim,
            parts: parts.into(),
        }
    }

    /// Checks that the cut fits a tensor of this shape; returns the reason why not.
    pub(crate) fn check(&self, shape: &[usize]) -> Result<(), String> {
        let Some(&size) = shape.get(self.dim) else {
            return Err(format!("{self}, but it has no dim {}", self.dim));
        };
        let sum = self
            .parts
            .iter()
            .try_fold(0_usize, |sum, &part| sum.checked_add(part));
        if self.parts.len() > MAX_PARTS || sum != Some(size) {
            return Err(format!(
                "{self}, expected at most {MAX_PARTS} parts with the sum {size}"
            ));
        }
        Ok(())
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> = self.parts.iter().take(4).map(usize::to_string).collect();
        let more = if self.parts.len() > 4 { "+.." } else { "" };
        write!(f, "cut of dim {} as {}{more}", self.dim, shown.join("+"))
    }
}

/// The `rank`-th of `degree` shares of `n` things: they differ by one at most.
pub(crate) fn share(n: usize, rank: usize, degree: usize) -> Range<usize> {
    let before = |rank: usize| (n as u128 * rank as u128 / degree.max(1) as u128) as usize;
    before(rank)..before(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_one_another_and_end_at_the_end() {
        for (n, degree) in [(10, 4), (3, 5), (0, 2), (usize::MAX, 7)] {
            let mut end = 0;
            for rank in 0..degree {
                let share = share(n, rank, degree);
                assert_eq!(share.start, end);
                end = share.end;
            }
            assert_eq!(end, n);
        }
    }
}
