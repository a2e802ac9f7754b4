//! Segments to stages: which consecutive segments each stage takes.

use crate::{Error, Result, Segments, StageMethod};

/// The boundaries of the stages, in segments: stage `s` has segments `bounds[s]..bounds[s + 1]`.
///
/// They rise strictly from 0 to the number of segments, so no stage is empty.
///
/// | method | rule | 26 segments, 4 stages | 10 segments, 4 stages |
/// |---|---|---|---|
/// | `uniform` | equal counts; the first stages take one more | 0, 7, 14, 20, 26 | 0, 3, 6, 8, 10 |
/// | `uniform_floor` | the same, from stage 1 on | 0, 6, 13, 20, 26 | 0, 2, 5, 8, 10 |
/// | `parameters` | smallest maximum of [`Segments::params`], then lexicographic order | | |
/// | `custom` | as given | | |
///
/// # Errors
/// [`Error::NoStages`], [`Error::TooFewSegments`], and [`Error::Boundaries`] for given
/// boundaries that are no partition.
pub fn stages(segments: &Segments, method: &StageMethod, num_stages: usize) -> Result<Vec<usize>> {
    let found = segments.len();
    check_counts(found, num_stages)?;
    match method {
        StageMethod::Uniform => Ok(uniform(found, num_stages, 0)),
        StageMethod::UniformFloor => Ok(uniform(found, num_stages, 1)),
        StageMethod::Parameters => Ok(min_max(&segments.params, num_stages)),
        StageMethod::Custom(bounds) => {
            let spans =
                bounds.len() == num_stages + 1 && bounds[0] == 0 && bounds[num_stages] == found;
            if !spans || !bounds.is_sorted_by(|a, b| a < b) {
                return Err(Error::Boundaries {
                    bounds: bounds.clone(),
                    segments: found,
                    num_stages,
                });
            }
            Ok(bounds.clone())
        }
    }
}

/// Checks that no stage would be empty.
pub(crate) fn check_counts(segments: usize, num_stages: usize) -> Result<()> {
    if num_stages == 0 {
        return Err(Error::NoStages);
    }
    if segments < num_stages {
        return Err(Error::TooFewSegments {
            method: "the split method",
            segments,
            num_stages,
        });
    }
    Ok(())
}

/// Equal counts; the stages from `first_extra` on take one more each until nothing is left over.
fn uniform(num_segments: usize, num_stages: usize, first_extra: usize) -> Vec<usize> {
    let (count, extra) = (num_segments / num_stages, num_segments % num_stages);
    (0..=num_stages)
        .map(|stage| stage * count + stage.saturating_sub(first_extra).min(extra))
        .collect()
}

/// The lexicographically smallest bounds with the smallest possible maximum.
///
/// The maximum is found by bisection: `O(n log(sum))`.
pub(crate) fn min_max(weights: &[usize], num_stages: usize) -> Vec<usize> {
    let num_segments = weights.len();
    let mut sums = vec![0];
    sums.extend(weights.iter().scan(0, |sum, weight| {
        *sum += weight;
        Some(*sum)
    }));
    let (mut low, mut high) = (
        weights.iter().copied().max().unwrap_or(0),
        sums[num_segments],
    );
    while low < high {
        let middle = low + (high - low) / 2;
        if stages_needed(&sums, middle)[0] <= num_stages {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let needed = stages_needed(&sums, low);
    let mut bounds = vec![0];
    for stages_left in (1..num_stages).rev() {
        let first = bounds[bounds.len() - 1] + 1;
        // The earliest bound after which the stages that are left can take all segments. Weights
        // are not negative, so no later bound makes this stage lighter, and it is within the
        // maximum.
        let bound = (first..num_segments)
            .find(|&bound| needed[bound] <= stages_left)
            .unwrap_or(first);
        bounds.push(bound);
    }
    bounds.push(num_segments);
    bounds
}

/// For each segment, the fewest stages that take it and all after it, none above `limit`.
fn stages_needed(sums: &[usize], limit: usize) -> Vec<usize> {
    let num_segments = sums.len() - 1;
    let mut needed = vec![0; num_segments + 1];
    let mut end = num_segments;
    for start in (0..num_segments).rev() {
        while sums[end] - sums[start] > limit {
            end -= 1;
        }
        needed[start] = needed[end] + 1;
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn uniform_gives_the_extra_segments_to_the_first_stages() {
        assert_eq!(uniform(26, 4, 0), [0, 7, 14, 20, 26]);
        assert_eq!(uniform(10, 4, 0), [0, 3, 6, 8, 10]);
    }

    #[test]
    fn uniform_floor_spares_the_first_stage() {
        assert_eq!(uniform(26, 4, 1), [0, 6, 13, 20, 26]);
        assert_eq!(uniform(10, 4, 1), [0, 2, 5, 8, 10]);
    }

    /// All partitions into nonempty stages, in lexicographic order.
    fn all_partitions(num_segments: usize, num_stages: usize) -> Vec<Vec<usize>> {
        if num_stages == 1 {
            return vec![vec![0, num_segments]];
        }
        let mut all = Vec::new();
        for last in num_stages - 1..num_segments {
            all.extend(
                all_partitions(last, num_stages - 1)
                    .into_iter()
                    .map(|mut bounds| {
                        bounds.push(num_segments);
                        bounds
                    }),
            );
        }
        all.sort();
        all
    }

    proptest! {
        #[test]
        fn parameters_equals_exhaustive_search(weights in prop::collection::vec(0_usize..9, 1..9), num_stages in 1_usize..6) {
            prop_assume!(weights.len() >= num_stages);
            let maximum = |bounds: &Vec<usize>| bounds.windows(2).map(|b| weights[b[0]..b[1]].iter().sum::<usize>()).max();
            // `min_by_key` keeps the first of equal ones, which is the lexicographically smallest.
            let best = all_partitions(weights.len(), num_stages).into_iter().min_by_key(maximum).unwrap();
            prop_assert_eq!(min_max(&weights, num_stages), best);
        }

        #[test]
        fn uniform_counts_differ_by_at_most_one(num_stages in 1_usize..20, more in 0_usize..50, first in 0_usize..2) {
            let bounds = uniform(num_stages + more, num_stages, first);
            let counts: Vec<_> = bounds.windows(2).map(|b| b[1] - b[0]).collect();
            prop_assert_eq!((bounds[0], bounds[num_stages]), (0, num_stages + more));
            prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
        }
    }
}
