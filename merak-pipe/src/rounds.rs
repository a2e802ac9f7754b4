//! Groups of microbatches that pass all stages again and again, as decoding does.

use std::ops::Range;

/// A group passes the next stages that lie on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// The rank.
    pub rank: usize,
    /// Its stages that the group passes, one after the other: several where a V turns.
    pub stages: Range<usize>,
    /// The group.
    pub group: usize,
}

/// The order in which groups visit the ranks of a pipeline when each starts at the first stage
/// again once it has left the last: the result of a round is the input of the next.
///
/// Every rank makes the same endless list and carries out its own visits. It is the order that
/// arises where all stages take equally long, messages take no time and a rank takes the group that
/// has waited longest; of two that come at once, the one that has come further. With as many groups
/// as ranks, no rank then waits: with one stage per rank, with several in turn and in a V.
///
/// A group that has ended may be left out from then on: the others stay in an order that cannot
/// deadlock. Groups visit each stage in turn, always in the same order.
///
/// ```
/// use merak_pipe::Rounds;
///
/// // Two ranks with two stages each, in turn.
/// let visits = Rounds::new(&[0, 1, 0, 1], 2).filter(|visit| visit.rank == 0).take(5);
/// let order: Vec<_> = visits.map(|visit| (visit.stages.start, visit.group)).collect();
/// assert_eq!(order, [(0, 0), (0, 1), (2, 0), (2, 1), (0, 0)]);
/// ```
#[derive(Debug, Clone)]
pub struct Rounds {
    /// Stages that lie on one rank without a hop in between, with that rank.
    hops: Vec<(usize, Range<usize>)>,
    /// When each rank is free.
    free: Vec<usize>,
    /// For each group the next hop, and when it has come there.
    groups: Vec<(usize, usize)>,
}

impl Rounds {
    /// The order of `groups` groups over stages on these ranks.
    pub fn new(placement: &[usize], groups: usize) -> Self {
        let mut hops: Vec<(usize, Range<usize>)> = Vec::new();
        for (stage, &rank) in placement.iter().enumerate() {
            match hops.last_mut() {
                Some((last, stages)) if *last == rank => stages.end = stage + 1,
                _ => hops.push((rank, stage..stage + 1)),
            }
        }
        let ranks = placement.iter().max().map_or(0, |last| last + 1);
        Self {
            groups: vec![(0, 0); if hops.is_empty() { 0 } else { groups }],
            free: vec![0; ranks],
            hops,
        }
    }
}

impl Iterator for Rounds {
    type Item = Visit;

    fn next(&mut self) -> Option<Visit> {
        let start = |&(hop, came): &(usize, usize)| came.max(self.free[self.hops[hop].0]);
        let order = |group: &usize| {
            let (hop, came) = self.groups[*group];
            (start(&(hop, came)), self.hops.len() - hop, came, *group)
        };
        let group = (0..self.groups.len()).min_by_key(order)?;
        let start = start(&self.groups[group]);
        let (next, came) = &mut self.groups[group];
        let (rank, stages) = self.hops[*next].clone();
        (*next, *came) = ((*next + 1) % self.hops.len(), start + stages.len());
        self.free[rank] = *came;
        Some(Visit {
            rank,
            stages,
            group,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn placements() -> impl Iterator<Item = Vec<usize>> {
        (1..=5).flat_map(|ranks: usize| {
            let in_turn = (1..=3).map(move |v| (0..ranks * v).map(|stage| stage % ranks).collect());
            in_turn.chain([(0..ranks).chain((0..ranks).rev()).collect()])
        })
    }

    #[test]
    fn as_many_groups_as_ranks_keep_every_rank_busy() {
        for placement in placements() {
            let ranks = placement.iter().max().unwrap() + 1;
            let rounds = Rounds::new(&placement, ranks);
            let mut clock = rounds.clone();
            let per_round = clock.hops.len() * ranks;
            clock.by_ref().take(20 * per_round).for_each(drop);
            let before = clock.free.clone();
            clock.by_ref().take(20 * per_round).for_each(drop);
            for (rank, (end, start)) in clock.free.iter().zip(before).enumerate() {
                let work = 20 * placement.len();
                let elapsed = end - start;
                assert!(
                    elapsed <= work + 1,
                    "rank {rank} of {placement:?}: {elapsed} for {work}"
                );
            }
        }
    }

    #[test]
    fn a_group_passes_the_stages_in_order_and_all_groups_each_stage_in_turn() {
        for placement in placements() {
            for groups in 1..=4 {
                let mut next = vec![0; groups];
                let mut turns: BTreeMap<usize, usize> = BTreeMap::new();
                for visit in Rounds::new(&placement, groups).take(200) {
                    assert_eq!(visit.stages.start, next[visit.group], "{placement:?}");
                    assert!(
                        visit
                            .stages
                            .clone()
                            .all(|stage| placement[stage] == visit.rank)
                    );
                    next[visit.group] = visit.stages.end % placement.len();
                    let turn = turns.entry(visit.stages.start).or_default();
                    assert_eq!(visit.group, *turn % groups, "{placement:?}");
                    *turn += 1;
                }
            }
        }
    }

    #[test]
    fn without_groups_or_stages_there_is_nothing_to_visit() {
        assert_eq!(Rounds::new(&[0, 1], 0).next(), None);
        assert_eq!(Rounds::new(&[], 3).next(), None);
    }
}
