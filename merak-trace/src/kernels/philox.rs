//! The counter-based random numbers behind dropout and initial values.
//!
//! Philox4x32 with ten rounds ([Random123](https://doi.org/10.1145/2063384.2063405), section 3.3)
//! maps a key of 64 bits and a counter of 128 bits to 128 random bits. There is no state: a number
//! is found from its index alone, by any rank, in any order.
#![expect(
    clippy::inline_always,
    reason = "the rounds vectorise only where they are inlined into a dispatched loop"
)]

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
        let [low, high, ..] = block(Self(halves(seed)), [a, b, c, d]);
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
    let [mut k0, mut k1] = key.0;
    for _ in 0..ROUNDS {
        let low_words = a.iter_mut().zip(&mut b);
        for ((a, b), (c, d)) in low_words.zip(c.iter_mut().zip(&mut d)) {
            [*a, *b, *c, *d] = round([*a, *b, *c, *d], k0, k1);
        }
        (k0, k1) = next_round_key(k0, k1);
    }
    let mut words = [0; GROUP];
    for (out, word) in words.chunks_exact_mut(LANES).zip([a, b, c, d]) {
        for (out, word) in out.iter_mut().zip(word) {
            *out = word as u32;
        }
    }
    words
}

const ROUNDS: usize = 10;

/// One block, word by word.
fn block(key: Key, counter: [u32; 4]) -> [u32; 4] {
    let mut counter = counter.map(u64::from);
    let [mut k0, mut k1] = key.0;
    for _ in 0..ROUNDS {
        counter = round(counter, k0, k1);
        (k0, k1) = next_round_key(k0, k1);
    }
    counter.map(|word| word as u32)
}

/// One round on the low halves of four words.
#[inline(always)]
fn round([a, b, c, d]: [u64; 4], k0: u32, k1: u32) -> [u64; 4] {
    let product_a = u64::from(a as u32) * 0xd251_1f53;
    let product_c = u64::from(c as u32) * 0xcd9e_8d57;
    [
        product_c >> 32 ^ b ^ u64::from(k0),
        product_c,
        product_a >> 32 ^ d ^ u64::from(k1),
        product_a,
    ]
}

#[inline(always)]
fn next_round_key(k0: u32, k1: u32) -> (u32, u32) {
    (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85))
}

/// The low and the high half.
#[inline(always)]
fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_match_the_known_answers_of_random123() {
        assert_eq!(
            block(Key([0; 2]), [0; 4]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            block(Key([u32::MAX; 2]), [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            block(
                Key([0xa409_3822, 0x299f_31d0]),
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

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
            assert_eq!(all[i], block(key, counter)[i % 64 / 16]);
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
