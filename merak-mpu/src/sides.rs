//! Which ranks hold the same value, and which ones hold another.

use crate::Rank;
use std::collections::BTreeMap;

/// Ranks by what they hold, where all should hold the same.
///
/// ```
/// use merak_mpu::{Rank, Sides};
/// let plans = ["a", "b", "b", "b"];
/// let sides = Sides::of((0..).map(Rank).zip(plans));
/// assert_eq!(sides.odd(), Some(vec![Rank(0)]));
///
/// let sides = Sides::of((0..).map(Rank).zip(["a", "b"]));
/// assert_eq!(sides.odd(), None);
/// assert_eq!(sides.iter().count(), 2);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sides(Vec<Vec<Rank>>);

impl Sides {
    /// The sides of ranks with their values, given in ascending rank.
    pub fn of<T: Ord>(values: impl IntoIterator<Item = (Rank, T)>) -> Self {
        let mut ranks: BTreeMap<T, Vec<Rank>> = BTreeMap::new();
        for (rank, value) in values {
            ranks.entry(value).or_default().push(rank);
        }
        let mut sides: Vec<_> = ranks.into_values().collect();
        sides.sort_by_key(|side| (usize::MAX - side.len(), side[0]));
        Self(sides)
    }

    /// The ranks that hold the same value, side by side: the largest first, and of equal ones that
    /// with the lowest rank.
    pub fn iter(&self) -> impl Iterator<Item = &[Rank]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// The ranks outside of the largest side, in ascending order: nobody where all agree. None
    /// where two sides are equally large, so that nobody can say who is right.
    pub fn odd(&self) -> Option<Vec<Rank>> {
        if let [first, second, ..] = &*self.0
            && first.len() == second.len()
        {
            return None;
        }
        let mut odd: Vec<_> = self.0.iter().skip(1).flatten().copied().collect();
        odd.sort_unstable();
        Some(odd)
    }
}

/// Ranks in ascending order as a sentence has them: `rank 1`, `ranks 0, 2 and 5-9`.
///
/// ```
/// use merak_mpu::{Rank, in_words};
/// assert_eq!(in_words(&[Rank(1)]), "rank 1");
/// assert_eq!(in_words(&[0, 2, 5, 6, 7].map(Rank)), "ranks 0, 2 and 5-7");
/// ```
pub fn in_words(ranks: &[Rank]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &Rank(rank) in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let words = runs
        .into_iter()
        .flat_map(|(first, last)| match last - first {
            0 => vec![first.to_string()],
            1 => vec![first.to_string(), last.to_string()],
            _ => vec![format!("{first}-{last}")],
        });
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    match words.collect::<Vec<_>>().as_slice() {
        [] => "no rank".to_owned(),
        [one] => format!("{noun} {one}"),
        [head @ .., last] => format!("{noun} {} and {last}", head.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sides(values: &str) -> Sides {
        Sides::of((0..).map(Rank).zip(values.chars()))
    }

    #[test]
    fn the_largest_side_is_right_and_a_tie_has_none() {
        for (values, odd) in [
            ("aaa", Some(vec![])),
            ("abb", Some(vec![0])),
            ("bba", Some(vec![2])),
            ("abbc", Some(vec![0, 3])),
            ("ab", None),
            ("aabbc", None),
            ("", Some(vec![])),
        ] {
            let odd: Option<Vec<_>> = odd.map(|ranks| ranks.into_iter().map(Rank).collect());
            assert_eq!(sides(values).odd(), odd, "{values}");
        }
    }

    #[test]
    fn the_largest_side_comes_first_and_of_equal_ones_that_of_the_lowest_rank() {
        let sides = sides("cbbac");
        let ranks: Vec<Vec<_>> = sides
            .iter()
            .map(|side| side.iter().map(|rank| rank.0).collect())
            .collect();
        assert_eq!(ranks, [vec![0, 4], vec![1, 2], vec![3]]);
    }

    #[test]
    fn ranks_in_words_are_short_in_a_large_world() {
        let many: Vec<_> = (0..4096).map(Rank).collect();
        assert_eq!(in_words(&many), "ranks 0-4095");
        assert_eq!(in_words(&[0, 1].map(Rank)), "ranks 0 and 1");
        assert_eq!(in_words(&[]), "no rank");
    }
}
