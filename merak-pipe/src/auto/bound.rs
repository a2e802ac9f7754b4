//! Lower bounds on the makespan of schedules.
//!
//! Each rank first waits for the forwards of earlier stages, and work of other ranks follows its
//! last work. These heads and tails give a bound for a placement of the stages. The least bound of
//! all placements holds for every schedule.

use crate::{Costs, Size};

/// Most placements that are tried one by one.
const PLACEMENTS: usize = 20_000;

/// The inputs of the bound of a placement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds<'a> {
    pub(super) size: Size,
    /// Costs; the recompute is zero on stages that never recompute.
    pub(super) costs: &'a Costs,
    /// Most activations of stages that a rank keeps; the largest of all ranks.
    pub(super) limit: usize,
    /// Most of them that wait for an input gradient; the largest of all ranks.
    pub(super) before_input: usize,
}

/// A bound that holds for every placement with the same number of stages on each rank, and the
/// placements with the lowest bounds, best first.
pub(super) fn all_placements(bounds: Bounds<'_>, wanted: usize) -> (f64, Vec<Vec<usize>>) {
    let Size { ranks, chunks, .. } = bounds.size;
    if chunks == 1 {
        let only: Vec<_> = (0..ranks).collect();
        return (bounds.of(&only), vec![only]);
    }
    let mut all = Vec::new();
    let complete = place(
        &mut vec![0; bounds.size.stages()],
        0,
        &mut vec![0; ranks],
        chunks,
        &mut |placement| {
            all.push((bounds.of(placement), placement.to_vec()));
            all.len() < PLACEMENTS
        },
    );
    if !complete {
        return (bounds.relaxed(), Vec::new());
    }
    // The sort is stable: equal bounds keep the order of the list.
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let least = all.first().map_or(0.0, |(bound, _)| *bound);
    let placements = all.into_iter().map(|(_, placement)| placement);
    (least, placements.take(wanted).collect())
}

/// Visits the placements in which ranks are numbered by their first stages. Returns whether it
/// visited all of them.
fn place(
    placement: &mut [usize],
    stage: usize,
    taken: &mut [usize],
    chunks: usize,
    visit: &mut impl FnMut(&[usize]) -> bool,
) -> bool {
    if stage == placement.len() {
        return visit(placement);
    }
    for rank in 0..taken.len() {
        let is_new = taken[rank] == 0;
        if taken[rank] < chunks {
            taken[rank] += 1;
            placement[stage] = rank;
            let goes_on = place(placement, stage + 1, taken, chunks, visit);
            taken[rank] -= 1;
            if !goes_on {
                return false;
            }
        }
        if is_new {
            break;
        }
    }
    true
}

impl Bounds<'_> {
    /// The bound of a placement.
    pub(super) fn of(&self, placement: &[usize]) -> f64 {
        let stages = placement.len();
        let hop = |stage: usize| {
            let crosses = placement
                .get(stage + 1)
                .is_some_and(|p| *p != placement[stage]);
            if crosses { self.costs.hop[stage] } else { 0.0 }
        };
        // By stage: when the first activation comes, and the least time from the start of a
        // microbatch's forward to the start of its input gradient. Recomputes fit into that time.
        let mut arrival = vec![0.0; stages];
        for stage in 1..stages {
            arrival[stage] = arrival[stage - 1] + self.costs.forward[stage - 1] + hop(stage - 1);
        }
        let mut round = vec![self.costs.forward[stages - 1]; stages];
        for stage in (0..stages - 1).rev() {
            let back = self.costs.input_grad[stage + 1] + 2.0 * hop(stage);
            round[stage] = self.costs.forward[stage] + round[stage + 1] + back;
        }
        // The least time after an input gradient.
        let mut tail = vec![self.costs.weight_grad[0]; stages];
        for stage in 1..stages {
            let upstream = hop(stage - 1) + self.costs.input_grad[stage - 1] + tail[stage - 1];
            tail[stage] = self.costs.weight_grad[stage].max(upstream);
        }
        let ranks = (0..self.size.ranks).map(|rank| {
            let own: Vec<_> = (0..stages)
                .filter(|stage| placement[*stage] == rank)
                .collect();
            self.of_rank(&own, &arrival, &round, &tail)
        });
        ranks.fold(0.0, f64::max)
    }

    fn of_rank(&self, own: &[usize], arrival: &[f64], round: &[f64], tail: &[f64]) -> f64 {
        let microbatches = self.size.microbatches as f64;
        let least = |part: &dyn Fn(usize) -> f64| {
            let parts = own.iter().map(|stage| part(*stage));
            parts.fold(f64::INFINITY, f64::min)
        };
        let costs = self.costs;
        let early = |stage: &usize| costs.forward[*stage] + costs.recompute[*stage];
        let early_sum: f64 = own.iter().map(early).sum();
        let inputs: f64 = own.iter().map(|stage| costs.input_grad[*stage]).sum();
        let weights: f64 = own.iter().map(|stage| costs.weight_grad[*stage]).sum();
        let head = least(&|stage| arrival[stage]);
        let urgent = microbatches * (early_sum + inputs);
        let work = urgent + microbatches * weights;
        // All weight gradients may come last.
        let behind_inputs = head + urgent + least(&|stage| tail[stage]);
        // Before its first input gradient a rank runs forwards and recomputes alone, of at most as
        // many microbatches as it keeps.
        let first_input = least(&|stage| arrival[stage] + round[stage]);
        let kept =
            self.limit.min(self.before_input) as f64 * own.iter().map(early).fold(0.0, f64::max);
        let after_first = first_input + work - kept.min(microbatches * early_sum);
        // A stage holds at most `most` microbatches at once, so they pass it in this many turns.
        let visits = |most: usize| self.size.microbatches.div_ceil(most.max(1)) as f64;
        let (whole, to_input) = (visits(self.limit), visits(self.before_input));
        let in_turn = own.iter().map(|&stage| {
            let visit = round[stage] + costs.input_grad[stage];
            let weights = costs.weight_grad[stage];
            arrival[stage] + (whole * (visit + weights)).max(to_input * visit + weights)
        });
        [head + work, behind_inputs, after_first]
            .into_iter()
            .chain(in_turn)
            .fold(0.0, f64::max)
    }

    /// A bound for all placements at once, for when they are too many to try. Ranks begin at
    /// different stages, so one of them begins late; and some rank has at least the mean of
    /// the work.
    fn relaxed(&self) -> f64 {
        let Size {
            ranks,
            chunks,
            microbatches,
        } = self.size;
        let costs = self.costs;
        let all = |stage: usize| {
            costs.forward[stage]
                + costs.recompute[stage]
                + costs.input_grad[stage]
                + costs.weight_grad[stage]
        };
        let mut behind: Vec<_> = (ranks - 1..self.size.stages()).map(all).collect();
        behind.sort_by(f64::total_cmp);
        let least: f64 = behind.iter().take(chunks).sum();
        let head: f64 = costs.forward[..ranks - 1].iter().sum();
        let mean = (0..self.size.stages()).map(all).sum::<f64>() / ranks as f64;
        (head + microbatches as f64 * least).max(microbatches as f64 * mean)
    }
}
