//! Moves from a balanced partition that unload its critical stage.

use super::{Best, Found, SegmentCosts, StageLoad, StepTime, Stopped, check_objective, exact};
use crate::{
    Error, ExactOptions, Result,
    stages::{check_counts, min_max},
};
use std::collections::{BTreeMap, BTreeSet};

/// Up to this number of partitions, all are tried.
const EXHAUSTIVE: u64 = 100_000;

/// Work of a search, in simulated operations.
const BUDGET: usize = 4_000_000;

/// The partition with the shortest simulated step: the best of all if there are at most 100,000,
/// else the best that moves reach from the partition with the most even stages.
///
/// The critical stage is the last of those with the most work, which is never idle between its
/// first and its last microbatch: only unloading it, or the stages after it, can help. So a move
/// gives its first segment to the stages before it, or its last one to those after it, and makes
/// these even again. The partition with the shortest step is moved first.
///
/// The result is never worse than the start of the search.
///
/// # Errors
/// [`Error::NoStages`], [`Error::TooFewSegments`], [`Error::Microbatches`] and those of
/// [`StepTime::check`] for an objective that makes no sense, [`Error::NotAStepTime`] for an invalid
/// step time, and [`Error::NoPartition`] when the objective allows none of the partitions tried.
///
/// ```
/// use merak_partition::{OneFOneB, SegmentCosts, autopipe};
///
/// // The last segment is a large output head.
/// let forward = vec![1.0, 1.0, 1.0, 1.0, 1.0, 4.0];
/// let backward = vec![2.0, 2.0, 2.0, 2.0, 2.0, 8.0];
/// let costs = SegmentCosts::new(forward, backward)?;
/// let step = OneFOneB { num_microbatches: 8, comm_cost: 0.0 };
/// assert_eq!(autopipe(&costs, 2, &step)?.bounds, [0, 5, 6]);
/// # Ok::<(), merak_partition::Error>(())
/// ```
pub fn autopipe(
    costs: &SegmentCosts,
    num_stages: usize,
    objective: &impl StepTime,
) -> Result<Found> {
    check_counts(costs.len(), num_stages)?;
    check_objective(objective, num_stages)?;
    if num_partitions(costs.len(), num_stages) <= EXHAUSTIVE {
        return exact(costs, num_stages, objective, &ExactOptions::default());
    }
    let limit = most_tried(num_stages, objective);
    let weights = costs.weights();
    let mut search = Search {
        costs,
        weights: &weights,
        best: Best::new(),
        seen: BTreeSet::new(),
        queue: BTreeMap::new(),
    };
    search.offer(min_max(&weights, num_stages), objective)?;
    let mut stopped = Stopped::NoMoves;
    while let Some((_, bounds)) = search.queue.pop_first() {
        for moved in search.moves(&bounds) {
            search.offer(moved, objective)?;
        }
        if search.best.tried >= limit {
            stopped = Stopped::Limit;
            break;
        }
    }
    let best = search.best;
    if best.bounds.is_empty() {
        return Err(Error::NoPartition { tried: best.tried });
    }
    Ok(best.found(stopped))
}

/// The most partitions that a search tries that cannot try all.
pub(super) fn most_tried(num_stages: usize, objective: &impl StepTime) -> usize {
    let simulated = num_stages.saturating_mul(2 * objective.num_microbatches());
    (BUDGET / simulated.max(1)).max(2 * num_stages)
}

/// Number of ways to choose the inner borders, saturating.
pub(super) fn num_partitions(num_segments: usize, num_stages: usize) -> u64 {
    let places = num_segments as u64 - 1;
    let chosen = (num_stages as u64 - 1).min(places - (num_stages as u64 - 1));
    (0..chosen).fold(1_u64, |ways, i| {
        // Exact, as `i + 1` consecutive numbers hold a multiple of `i + 1`.
        ways.saturating_mul(places - i) / (i + 1)
    })
}

struct Search<'a> {
    costs: &'a SegmentCosts,
    weights: &'a [usize],
    best: Best,
    seen: BTreeSet<Vec<usize>>,
    /// Partitions to move, by step time (of positive floats, the bits have the same order) and age.
    queue: BTreeMap<(u64, usize), Vec<usize>>,
}

impl Search<'_> {
    /// Simulates a partition that was not seen before, and queues it.
    ///
    /// # Errors
    /// [`Error::NotAStepTime`].
    fn offer(&mut self, bounds: Vec<usize>, objective: &impl StepTime) -> Result<()> {
        if self.seen.contains(&bounds) {
            return Ok(());
        }
        let time = self.best.offer(self.costs, &bounds, objective)?;
        // A partition that is not allowed may still lead to one that is.
        let time = time.unwrap_or(f64::INFINITY).to_bits();
        self.queue.insert((time, self.best.tried), bounds.clone());
        self.seen.insert(bounds);
        Ok(())
    }

    fn moves(&self, bounds: &[usize]) -> Vec<Vec<usize>> {
        let loads = self.costs.loads(bounds);
        let longest = loads.iter().map(StageLoad::total).fold(0.0, f64::max);
        let critical = loads.iter().rposition(|load| load.total() >= longest);
        let critical = critical.unwrap_or(0);
        let mut moves = Vec::new();
        for stage in [critical.checked_sub(1), Some(critical)]
            .into_iter()
            .flatten()
        {
            moves.extend(self.shifted(bounds, stage, 1));
            moves.extend(self.shifted(bounds, stage, -1));
        }
        moves.push(self.smoothed(bounds, critical + 1));
        moves
    }

    /// The border after a stage one segment further on or back: as it is, with the stages before
    /// it made even, and with those after it made even.
    fn shifted(&self, bounds: &[usize], stage: usize, by: isize) -> Vec<Vec<usize>> {
        let border = stage + 1;
        if border + 1 >= bounds.len() {
            return Vec::new();
        }
        let moved = bounds[border].wrapping_add_signed(by);
        let num_stages = bounds.len() - 1;
        if moved < border || self.costs.len() - moved < num_stages - border {
            return Vec::new();
        }
        let mut plain = bounds.to_vec();
        plain[border] = moved;
        let mut before = plain.clone();
        before[..=border].copy_from_slice(&min_max(&self.weights[..moved], border));
        let behind = self.smoothed(&plain, border);
        let all = [plain, before, behind];
        let rises = |bounds: &Vec<usize>| bounds.is_sorted_by(|a, b| a < b);
        all.into_iter().filter(rises).collect()
    }

    /// The stages from `first` on made even.
    fn smoothed(&self, bounds: &[usize], first: usize) -> Vec<usize> {
        let mut smoothed = bounds.to_vec();
        let num_stages = bounds.len() - 1;
        if first < num_stages {
            let start = bounds[first];
            let even = min_max(&self.weights[start..], num_stages - first);
            let even = even.into_iter().map(|bound| start + bound);
            smoothed.splice(first.., even);
        }
        smoothed
    }
}
