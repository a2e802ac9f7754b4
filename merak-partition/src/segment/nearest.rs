//! `nearest_min_deps`: cut in every valley of the number of crossing values.

use super::SplitRule;
use crate::borders::Borders;
use std::ops::Range;

/// The bounds of the segments and the rule that made them.
pub(super) fn cut(borders: &Borders) -> (Vec<usize>, SplitRule) {
    let valleys = valleys(&borders.counted[1..borders.num_nodes()]);
    let mut bounds = vec![0];
    for valley in &valleys {
        // `counted[1..]` starts at border 1.
        cut_valley(borders, valley.start + 1..valley.end + 1, &mut bounds);
    }
    let holds_params =
        |bounds: &[usize]| borders.reads_params[bounds[bounds.len() - 1]..].contains(&true);
    if bounds.len() > 1 && !holds_params(&bounds) {
        bounds.pop();
    }
    bounds.push(borders.num_nodes());
    (
        bounds,
        SplitRule::NearestMinDeps {
            valleys: valleys.len(),
        },
    )
}

/// Cuts one valley before each node that reads parameters, or else at its last border, wherever the
/// segment that ends there holds parameters.
fn cut_valley(borders: &Borders, valley: Range<usize>, bounds: &mut Vec<usize>) {
    let before = bounds.len();
    let mut start = bounds[before - 1];
    let mut holds_params = borders.reads_params[start..valley.start - 1].contains(&true);
    let mut last = None;
    for border in valley {
        holds_params |= borders.reads_params[border - 1];
        if !holds_params || !borders.allows(border) {
            continue;
        }
        last = Some(border);
        if borders.reads_params[border] {
            bounds.push(border);
            start = border;
            holds_params = false;
        }
    }
    if bounds.len() == before
        && let Some(border) = last
    {
        debug_assert!(border > start);
        bounds.push(border);
    }
}

/// Maximal runs of equal numbers between larger ones; both ends of the list count as larger.
fn valleys(live: &[usize]) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut start = 0;
    for end in 1..=live.len() {
        if end < live.len() && live[end] == live[start] {
            continue;
        }
        let falls = start == 0 || live[start - 1] > live[start];
        let rises = end == live.len() || live[end] > live[start];
        if falls && rises {
            found.push(start..end);
        }
        start = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valleys_are_lower_than_both_sides_and_ends_count_as_walls() {
        let ends = |live| {
            valleys(live)
                .iter()
                .map(|run| (run.start, run.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(ends(&[1, 1, 2, 1, 3, 2, 2, 4]), [(0, 2), (3, 4), (5, 7)]);
        assert_eq!(ends(&[1, 1, 1]), [(0, 3)]);
        assert_eq!(ends(&[1, 2, 3]), [(0, 1)]);
        assert_eq!(ends(&[]), []);
    }
}
