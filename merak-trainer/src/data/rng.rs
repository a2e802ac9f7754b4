//! A counter-based generator: each value is a function of its key and counter alone.

/// Mixes 64 bits so that each input bit reaches each output bit (the finaliser of `SplitMix64`;
/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// The bits that belong to a list of words; their order matters.
pub(crate) fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0, |state, word| mix(state ^ mix(*word)))
}

/// A number from 0 up to 1, the end excluded.
pub(crate) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// A number below `bound`, each about equally likely.
pub(crate) fn below(bits: u64, bound: usize) -> usize {
    ((u128::from(bits) * bound as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_depend_on_each_word_and_on_their_order() {
        let all = [
            hash(&[1, 2]),
            hash(&[2, 1]),
            hash(&[1, 3]),
            hash(&[1]),
            hash(&[1, 2, 0]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b));
        }
    }

    #[test]
    fn draws_stay_in_their_range() {
        assert!(unit(u64::MAX) < 1.0 && unit(0).abs() < f64::EPSILON);
        assert_eq!([0, u64::MAX].map(|bits| below(bits, 10)), [0, 9]);
        let drawn: Vec<_> = (0..1000).map(|i| below(mix(i), 4)).collect();
        for value in 0..4 {
            // Binomial with mean 250 and standard deviation 14.
            let count = drawn.iter().filter(|&&x| x == value).count();
            assert!((190..310).contains(&count), "{value}: {count}");
        }
    }

    #[test]
    fn the_stream_never_changes_between_versions() {
        // Checkpoints of earlier versions resume at a position of this very order.
        assert_eq!(mix(0), 0xE220_A839_7B1D_CDAF);
    }
}
