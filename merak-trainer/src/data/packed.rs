//! Documents side by side in one sequence, none of which sees another.

use std::collections::BTreeSet;

use super::sample_tensor::SampleTensor;

/// The name of the tensor with the document of each token: a run of equal numbers is one.
pub(crate) const DOCUMENT_IDS: &str = "document_ids";

/// Sequences of at most `room` tokens, each as the documents in it. Empty documents are left out,
/// and longer ones count as `room` tokens.
///
/// Best fit of decreasing lengths ([Ding et al. 2024](https://arxiv.org/abs/2404.10830), section
/// 3.2): the longest document comes first, each into the fullest sequence that has room for it; the
/// one that began first, where several are as full. Documents of a sequence are in ascending order.
///
/// ```text
///   lengths 3 5 2 4 1, room 6:   |5 . . . . 1|  |4 . . . 2 .|  |3 . . _ _ _|
/// ```
pub(super) fn sequences(lengths: &[usize], room: usize) -> Vec<Vec<usize>> {
    let length = |document: usize| lengths[document].min(room);
    let mut documents: Vec<_> = (0..lengths.len()).filter(|&i| length(i) > 0).collect();
    documents.sort_by_key(|&document| (usize::MAX - length(document), document));
    let mut sequences: Vec<Vec<usize>> = Vec::new();
    // The room left in each sequence, and its number.
    let mut open = BTreeSet::new();
    for document in documents {
        let fullest = open.range((length(document), 0)..).next().copied();
        let (left, sequence) = fullest.unwrap_or_else(|| {
            sequences.push(Vec::new());
            (room, sequences.len() - 1)
        });
        open.remove(&(left, sequence));
        open.insert((left - length(document), sequence));
        sequences[sequence].push(document);
    }
    for sequence in &mut sequences {
        sequence.sort_unstable();
    }
    sequences.sort_unstable();
    sequences
}

/// The number of each token's document, where the tokens `end` end one.
pub(super) fn documents_of(tokens: &[u32], end: u32) -> SampleTensor {
    let mut number = 0;
    let numbers = tokens.iter().map(|&token| {
        let own = number;
        number += i64::from(token == end);
        own
    });
    SampleTensor::vector(numbers.collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_comes_first_into_the_fullest_sequence() {
        let packed = sequences(&[3, 5, 2, 4, 0, 1, 9], 6);
        assert_eq!(packed, [vec![0], vec![1, 5], vec![2, 3], vec![6]]);
        assert!(sequences(&[0, 0], 6).is_empty());
    }

    #[test]
    fn a_token_that_ends_a_document_belongs_to_it() {
        let numbers = documents_of(&[7, 0, 5, 5, 0, 0, 3], 0);
        assert_eq!(numbers.ints(), [0, 0, 1, 1, 1, 2, 3]);
    }

    proptest! {
        #[test]
        fn each_document_is_in_one_sequence_that_has_room(
            lengths in prop::collection::vec(0_usize..40, 0..60),
            room in 1_usize..32,
        ) {
            let packed = sequences(&lengths, room);
            let mut all = packed.concat();
            all.sort_unstable();
            let expected: Vec<_> = (0..lengths.len()).filter(|&i| lengths[i] > 0).collect();
            prop_assert_eq!(all, expected);
            for sequence in &packed {
                let total: usize = sequence.iter().map(|&i| lengths[i].min(room)).sum();
                prop_assert!(total <= room);
            }
            // No two sequences fit into one.
            let mut totals: Vec<usize> = packed
                .iter()
                .map(|sequence| sequence.iter().map(|&i| lengths[i].min(room)).sum())
                .collect();
            totals.sort_unstable();
            prop_assert!(totals.len() < 2 || totals[0] + totals[1] > room);
        }
    }
}
