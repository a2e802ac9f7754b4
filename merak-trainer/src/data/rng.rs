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
    fn the_stream_never_changes_between_versions() {
        // Checkpoints of earlier versions resume at a position of this very order.
        assert_eq!(mix(0), 0xE220_A839_7B1D_CDAF);
    }
}
