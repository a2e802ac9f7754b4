//! Random numbers that are a function of their index: any rank finds any of them, in any order.
//!
//! Philox 4x32 with ten rounds ([Random123](https://doi.org/10.1145/2063384.2063405), section 3.3)
//! maps a key of 64 bits and a counter of 128 bits to 128 random bits, without state. Weights,
//! masks and tokens depend on it, so it never changes.
#![expect(
    clippy::inline_always,
    reason = "the rounds vectorise only where they are inlined into a caller's loop"
)]

/// Rounds of a block.
pub const ROUNDS: usize = 10;

/// The random bits of a counter under a key.
///
/// ```
/// use merak_mpu::philox::block;
/// assert_eq!(block([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
/// ```
pub fn block(mut key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let mut words = counter.map(u64::from);
    for _ in 0..ROUNDS {
        words = round(words, key);
        key = next_key(key);
    }
    words.map(|word| word as u32)
}

/// One round of a block, on the low halves of four words. The high halves do not matter.
#[inline(always)]
pub fn round([a, b, c, d]: [u64; 4], key: [u32; 2]) -> [u64; 4] {
    let product_a = u64::from(a as u32) * 0xd251_1f53;
    let product_c = u64::from(c as u32) * 0xcd9e_8d57;
    [
        product_c >> 32 ^ b ^ u64::from(key[0]),
        product_c,
        product_a >> 32 ^ d ^ u64::from(key[1]),
        product_a,
    ]
}

/// The key of the round after one with this key.
#[inline(always)]
pub fn next_key([k0, k1]: [u32; 2]) -> [u32; 2] {
    [k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85)]
}

/// The low and the high half of a number, as words of a key or of a counter.
#[inline(always)]
pub fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_match_the_known_answers_of_random123() {
        assert_eq!(
            block([u32::MAX; 2], [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            block(
                [0xa409_3822, 0x299f_31d0],
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
