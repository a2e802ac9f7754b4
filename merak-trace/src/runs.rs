//! Which indices of a whole dimension a slice of it has.

use std::ops::Range;

/// One run of neighbouring indices of a whole dimension, or two: the slice begins with those from
/// `first` on. From its own index `turn` on it has those from `second` on, which lie after the
/// first run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    first: usize,
    turn: usize,
    second: usize,
}

impl Runs {
    /// The indices from `first` on.
    pub const fn one(first: usize) -> Self {
        Self {
            first,
            turn: usize::MAX,
            second: usize::MAX,
        }
    }

    /// As many indices as `turn` from `first` on, then those from `second` on.
    pub const fn two(first: usize, turn: usize, second: usize) -> Self {
        Self {
            first,
            turn,
            second,
        }
    }

    /// The index in the whole dimension of a local one.
    pub fn at(&self, local: usize) -> usize {
        if local < self.turn {
            self.first + local
        } else {
            self.second + (local - self.turn)
        }
    }

    /// How many of the first `len` local indices lie before an index of the whole dimension.
    pub fn before(&self, index: usize, len: usize) -> usize {
        let turn = self.turn.min(len);
        let in_first = index.saturating_sub(self.first).min(turn);
        in_first + index.saturating_sub(self.second).min(len - turn)
    }

    /// How many of the local indices from `local` up to `len` are neighbours in the whole
    /// dimension.
    pub fn neighbours(&self, local: usize, len: usize) -> usize {
        let end = if local < self.turn { self.turn } else { len };
        end.min(len).saturating_sub(local)
    }

    /// The same without the first `count` local indices.
    #[must_use]
    pub fn skip(self, count: usize) -> Self {
        match self.turn.checked_sub(count) {
            Some(turn @ 1..) => Self {
                first: self.first + count,
                turn,
                ..self
            },
            _ => Self::one(self.at(count)),
        }
    }

    /// The parts of a local range that have neighbouring indices, each with its first index.
    pub fn parts(self, local: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let turn = self.turn.clamp(local.start, local.end.max(local.start));
        [local.start..turn, turn..local.end]
            .into_iter()
            .filter(|part| !part.is_empty())
            .map(move |part| (part.clone(), self.at(part.start)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_counts_what_lies_before_an_index() {
        for runs in [Runs::one(5), Runs::two(2, 3, 9), Runs::two(0, 4, 4)] {
            for len in 0..8 {
                let held: Vec<_> = (0..len).map(|local| runs.at(local)).collect();
                for index in 0..20 {
                    let before = held.iter().filter(|&&held| held < index).count();
                    assert_eq!(runs.before(index, len), before, "{runs:?} {len} {index}");
                }
                for start in 0..len {
                    let parts = runs.parts(start..len);
                    let listed = parts.flat_map(|(local, first)| first..first + local.len());
                    assert_eq!(listed.collect::<Vec<_>>(), held[start..]);
                    let rest = runs.skip(start);
                    let rest = (0..len - start).map(|local| rest.at(local));
                    assert_eq!(rest.collect::<Vec<_>>(), held[start..]);
                }
            }
        }
    }
}
