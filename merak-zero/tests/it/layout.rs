//! The laws of offsets, buckets and parts.

use merak_zero::{FlatLayout, NORM_BLOCK, ParamSpec};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn specs(numels: &[usize]) -> Vec<ParamSpec> {
    let named = numels.iter().enumerate();
    named
        .map(|(i, &n)| ParamSpec::new(format!("p{i}"), &[n], i))
        .collect()
}

fn numels() -> impl Strategy<Value = Vec<usize>> {
    let one = prop_oneof![0..5_usize, 1..3 * NORM_BLOCK, 1..200 * NORM_BLOCK];
    prop::collection::vec(one, 0..12)
}

proptest! {
    #[test]
    fn parameters_lie_end_to_end_in_the_given_order(numels in numels()) {
        let layout = FlatLayout::new(specs(&numels), 1000, 3)?;
        let mut end = 0;
        for (i, n) in numels.iter().enumerate() {
            prop_assert_eq!(layout.range(i), end..end + n);
            end += n;
        }
        prop_assert_eq!(layout.len(), end);
    }

    #[test]
    fn blocks_count_from_the_start_of_each_tensor_and_cover_it(numels in numels()) {
        let layout = FlatLayout::new(specs(&numels), 1000, 3)?;
        let mut end = 0;
        for block in layout.blocks() {
            let range = layout.range(block.param);
            prop_assert_eq!(block.flat.start, end);
            prop_assert_eq!(block.flat.start, range.start + block.local.start);
            prop_assert_eq!(block.local.start, block.index() * NORM_BLOCK);
            prop_assert!(block.flat.len() == NORM_BLOCK || block.flat.end == range.end);
            end = block.flat.end;
        }
        prop_assert_eq!(end, layout.len());
    }

    #[test]
    fn buckets_and_parts_cover_each_element_once_between_block_borders(
        numels in numels(), bucket_size in 1..4_000_000_usize, num_parts in 1..9_usize,
    ) {
        let layout = FlatLayout::new(specs(&numels), bucket_size, num_parts)?;
        let borders: BTreeSet<usize> = layout.blocks().iter().map(|b| b.flat.end).chain([0]).collect();
        let (mut end, mut end_block) = (0, 0);
        for bucket in layout.buckets() {
            prop_assert_eq!(bucket.flat.start, end);
            prop_assert_eq!(layout.parts(bucket).len(), num_parts);
            for part in layout.parts(bucket) {
                prop_assert_eq!((part.flat.start, part.blocks.start), (end, end_block));
                prop_assert!(borders.contains(&part.flat.end));
                let blocks = &layout.blocks()[part.blocks.clone()];
                prop_assert_eq!(blocks.iter().map(|b| b.flat.len()).sum::<usize>(), part.flat.len());
                (end, end_block) = (part.flat.end, part.blocks.end);
            }
            prop_assert_eq!(bucket.flat.end, end);
        }
        prop_assert_eq!((end, end_block), (layout.len(), layout.blocks().len()));
    }

    #[test]
    fn a_bucket_keeps_to_its_size_and_its_parts_are_nearly_equal(
        numels in numels(), bucket_size in 1..4_000_000_usize, num_parts in 1..9_usize,
    ) {
        let layout = FlatLayout::new(specs(&numels), bucket_size, num_parts)?;
        let most = bucket_size.min((layout.len() / 8).max(1 << 20));
        for bucket in layout.buckets() {
            prop_assert!(bucket.flat.len() <= most || bucket.blocks.len() == 1);
            for part in layout.parts(bucket) {
                prop_assert!(part.flat.len() <= bucket.flat.len() / num_parts + NORM_BLOCK);
            }
        }
    }
}

#[test]
fn a_parameter_that_stays_whole_lies_in_one_part() {
    let params = specs(&[3 * NORM_BLOCK + 1, 5 * NORM_BLOCK, 7, 2 * NORM_BLOCK]);
    let is_whole = |spec: &ParamSpec| spec.global_index == 1;
    for (bucket_size, num_parts) in [(1, 1), (NORM_BLOCK, 3), (4 * NORM_BLOCK, 2), (1 << 20, 4)] {
        let layout = FlatLayout::with_whole(params.clone(), bucket_size, num_parts, is_whole);
        let layout = layout.unwrap();
        let (mut end, mut holders) = (0, 0);
        for part in layout
            .buckets()
            .iter()
            .flat_map(|bucket| layout.parts(bucket))
        {
            assert_eq!(part.flat.start, end);
            let blocks = &layout.blocks()[part.blocks];
            let of_whole = blocks.iter().filter(|block| block.param == 1).count();
            assert!(of_whole == 0 || of_whole == 5);
            holders += usize::from(of_whole == 5);
            end = part.flat.end;
        }
        assert_eq!((end, holders), (layout.len(), 1));
    }
}

#[test]
fn a_large_group_is_cut_into_eighths_and_a_small_one_is_left_whole() {
    let large = FlatLayout::new(specs(&[16 << 20]), 500_000_000, 2).unwrap();
    assert_eq!(large.buckets().len(), 8);
    let small = FlatLayout::new(specs(&[1 << 20]), 500_000_000, 2).unwrap();
    assert_eq!(small.buckets().len(), 1);
}
