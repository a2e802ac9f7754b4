//! Random numbers that are a function of where they are used.

/// Philox 4x32 with 10 rounds ([Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
/// SC 2011](https://doi.org/10.1145/2063384.2063405), section 4): 128 random bits from a counter
/// and a key, without state.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let left = u64::from(counter[0]) * 0xD251_1F53;
        let right = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            high(right) ^ counter[1] ^ key[0],
            low(right),
            high(left) ^ counter[3] ^ key[1],
            low(left),
        ];
        key = [
            key[0].wrapping_add(0x9E37_79B9),
            key[1].wrapping_add(0xBB67_AE85),
        ];
    }
    counter
}

/// A number in `[0, 1)`, evenly spread, for the token at `position` of a prompt: 53 bits of
/// Philox under the key `seed` at the counter (`position`, `prompt`).
pub(crate) fn uniform(seed: u64, prompt: u64, position: u64) -> f64 {
    let counter = [low(position), high(position), low(prompt), high(prompt)];
    let [first, second, ..] = philox(counter, [low(seed), high(seed)]);
    let bits = u64::from(second) << 32 | u64::from(first);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_numbers_that_its_authors_publish() {
        let zeros = philox([0; 4], [0; 2]);
        assert_eq!(zeros, [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        let ones = philox([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
    }

    #[test]
    fn draws_lie_in_the_unit_interval_and_depend_on_all_three_numbers() {
        let draws: Vec<f64> = (0..1000)
            .map(|i| uniform(i % 10, i / 10 % 10, i / 100))
            .collect();
        assert!(draws.iter().all(|draw| (0.0..1.0).contains(draw)));
        let mut sorted = draws.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.dedup();
        assert_eq!(sorted.len(), draws.len());
        let mean = draws.iter().sum::<f64>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.05, "{mean}");
    }
}
