//! The random numbers behind dropout and initial values: streams of Philox, many words at once.
#![expect(
    clippy::inline_always,
    reason = "the rounds vectorise only where they are inlined into a dispatched loop"
)]

use merak_mpu::philox::{ROUNDS, block, halves, next_key, round};
use std::array;

/// Words made at once: sixteen counters side by side, four words each.
pub(super) const GROUP: usize = 64;
const LANES: usize = 16;

/// A key: each pair of key and stream gives its own endless sequence of words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key([u32; 2]);

impl Key {
    /// The key of a seed and two more numbers, as one block of Philox with the seed as its key.
    pub(super) fn derive(seed: u64, first: u64, second: u64) -> Self {
        let ([a, b], [c, d]) = (halves(first), halves(second));
        let [low, high, ..] = block(halves(seed), [a, b, c, d]);
        Self([low, high])
    }
}

/// Calls `f(start, words)` for the words `first .. first + len` of a stream, cut into runs where
/// `start` is relative to `first`. Word `i` is word `i % 64 / 16` of the block with the counter
/// `(i / 64 * 16 + i % 16, stream)`.
#[inline(always)]
pub(super) fn for_each_run(
    key: Key,
    stream: u64,
    first: u64,
    len: usize,
    mut f: impl FnMut(usize, &[u32]),
) {
    let mut start = 0;
    while start < len {
        let position = first + start as u64;
        let skip = (position % GROUP as u64) as usize;
        let words = group(key, stream, position / GROUP as u64);
        let run = &words[skip..GROUP.min(skip + len - start)];
        f(start, run);
        start += run.len();
    }
}

/// The words `64 index .. 64 (index + 1)` of a stream.
#[inline(always)]
pub(super) fn group(key: Key, stream: u64, index: u64) -> [u32; GROUP] {
    // One array per word, so that a round is the same operation on neighbouring numbers, and 64
    // bits per word, as the multiplication requires. The contents of the high halves do not matter.
    let mut a: [u64; LANES] =
        array::from_fn(|lane| index.wrapping_mul(16).wrapping_add(lane as u64));
    let mut b = a.map(|number| number >> 32);
    let (mut c, mut d) = ([stream; LANES], [stream >> 32; LANES]);
    let mut key = key.0;
    for _ in 0..ROUNDS {
        let low_words = a.iter_mut().zip(&mut b);
        for ((a, b), (c, d)) in low_words.zip(c.iter_mut().zip(&mut d)) {
            [*a, *b, *c, *d] = round([*a, *b, *c, *d], key);
        }
        key = next_key(key);
    }
    let mut words = [0; GROUP];
    for (out, word) in words.chunks_exact_mut(LANES).zip([a, b, c, d]) {
        for (out, word) in out.iter_mut().zip(word) {
            *out = word as u32;
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_depends_on_its_index_alone() {
        let key = Key::derive(7, 8, 9);
        let read = |first, len| {
            let mut out = vec![0; len];
            for_each_run(key, 3, first, len, |start, words| {
                out[start..start + words.len()].copy_from_slice(words);
            });
            out
        };
        let all = read(0, 1000);
        for (first, len) in [(0, 1), (63, 2), (64, 64), (100, 517), (999, 1)] {
            assert_eq!(read(first, len), all[first as usize..][..len]);
        }
        for i in [0, 15, 16, 64, 999] {
            let counter = [(i / 64 * 16 + i % 16) as u32, 0, 3, 0];
            assert_eq!(all[i], block(key.0, counter)[i % 64 / 16]);
        }
    }

    #[test]
    fn keys_differ_when_any_number_differs() {
        let key = Key::derive(1, 2, 3);
        for other in [(0, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2), (1 << 32, 2, 3)] {
            assert_ne!(key, Key::derive(other.0, other.1, other.2));
        }
    }
}
