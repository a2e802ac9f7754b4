//! A random order that is computed position by position, without a table.

use super::rng::hash;

/// Rounds of the network; four already give a pseudorandom permutation of a large set
/// ([Luby and Rackoff 1988](https://doi.org/10.1137/0217022)), small sets want some more.
const ROUNDS: u64 = 8;

/// A permutation of `0..len`, the same on every rank and machine for the same key.
///
/// A Feistel network permutes the smallest even power of two that is at least `len`; a value that
/// falls outside `0..len` is permuted again until it falls inside (cycle walking, on average at
/// most four turns), which leaves a permutation of `0..len`.
///
/// ```text
/// (left, right) -> (right, left ^ hash(key, round, right))      eight times
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// The permutation of `0..len` that belongs to (`seed`, `epoch`).
    pub fn new(len: usize, seed: u64, epoch: u64) -> Self {
        let len = len as u64;
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Self {
            len,
            half_bits: bits.div_ceil(2).max(1),
            key: hash(&[seed, epoch]),
        }
    }

    /// Where `position` leads; `None` outside `0..len`.
    pub fn get(&self, position: usize) -> Option<usize> {
        let position = position as u64;
        if position >= self.len {
            return None;
        }
        let mut value = self.turn(position);
        while value >= self.len {
            value = self.turn(value);
        }
        Some(value as usize)
    }

    fn turn(&self, value: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (hash(&[self.key, round, right]) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_index_comes_once(len in 0_usize..2000, seed: u64, epoch in 0_u64..5) {
            let permutation = Permutation::new(len, seed, epoch);
            let mut seen: Vec<_> = (0..len).map(|i| permutation.get(i).expect("inside")).collect();
            prop_assert_eq!(permutation.get(len), None);
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn each_place_takes_each_value_about_equally_often() {
        let mut counts = [[0_u32; 5]; 5];
        for seed in 0..5000 {
            let permutation = Permutation::new(5, seed, 0);
            for (place, row) in counts.iter_mut().enumerate() {
                row[permutation.get(place).unwrap()] += 1;
            }
        }
        // A count is binomial with mean 1000 and standard deviation 28.
        assert!(
            counts
                .iter()
                .flatten()
                .all(|count| (850..1150).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn the_largest_set_has_an_order_too() {
        let permutation = Permutation::new(usize::MAX, 1, 2);
        assert_ne!(permutation.get(0), permutation.get(usize::MAX - 1));
    }
}
