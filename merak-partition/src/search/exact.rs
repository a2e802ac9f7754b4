//! Tries every partition that may be better than the best so far.

use super::{Best, Found, SegmentCosts, StepTime, Stopped, check_objective};
use crate::{
    Error, Result,
    stages::{check_counts, min_max},
};

/// How long [`exact`] searches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExactOptions {
    /// Partitions whose step may be simulated.
    pub limit: usize,
}

impl Default for ExactOptions {
    /// All of up to 100,000 partitions.
    fn default() -> Self {
        Self { limit: 100_001 }
    }
}

/// The partition with the shortest step, by branch and bound, for any objective: another schedule
/// than 1F1B, limits of memory.
///
/// Borders are set from first to last. The lower bound of a beginning is the time of its longest
/// stage over all microbatches, or of the mean of the stages to come, after one forward of the
/// stages before. Of equal partitions the first is taken: the most even one comes first, then
/// lexicographic order.
///
/// # Errors
/// As [`autopipe`](fn@crate::autopipe).
///
/// ```
/// use merak_partition::{ExactOptions, OneFOneB, SegmentCosts, StageLoad, StepTime, exact};
///
/// /// 1F1B on ranks that hold three segments at most.
/// struct Small(OneFOneB);
///
/// impl StepTime for Small {
///     fn step_time(&self, stages: &[StageLoad]) -> Option<f64> {
///         let fits = stages.iter().all(|stage| stage.segments.len() <= 3);
///         fits.then(|| self.0.step_time(stages)).flatten()
///     }
///
///     fn num_microbatches(&self) -> usize {
///         self.0.num_microbatches()
///     }
/// }
///
/// let costs = SegmentCosts::new(vec![1.0, 1.0, 1.0, 1.0, 4.0], vec![2.0, 2.0, 2.0, 2.0, 8.0])?;
/// let step = Small(OneFOneB { num_microbatches: 8, comm_cost: 0.0 });
/// let found = exact(&costs, 2, &step, &ExactOptions::default())?;
/// assert_eq!(found.bounds, [0, 3, 5]);
/// # Ok::<(), merak_partition::Error>(())
/// ```
pub fn exact(
    costs: &SegmentCosts,
    num_stages: usize,
    objective: &impl StepTime,
    options: &ExactOptions,
) -> Result<Found> {
    check_counts(costs.len(), num_stages)?;
    check_objective(objective, num_stages)?;
    let mut search = Search {
        costs,
        num_stages,
        objective,
        limit: options.limit.max(1),
        best: Best::new(),
    };
    let even = min_max(&costs.weights(), num_stages);
    search.best.offer(costs, &even, objective)?;
    let complete = search.descend(&mut vec![0], Beginning::default())?;
    let best = search.best;
    if best.bounds.is_empty() {
        return Err(Error::NoPartition { tried: best.tried });
    }
    let stopped = if complete {
        Stopped::Proven
    } else {
        Stopped::Limit
    };
    Ok(best.found(stopped))
}

struct Search<'a, O> {
    costs: &'a SegmentCosts,
    num_stages: usize,
    objective: &'a O,
    limit: usize,
    best: Best,
}

/// The stages whose borders are set.
#[derive(Debug, Clone, Copy, Default)]
struct Beginning {
    /// One forward of all of them.
    forward: f64,
    /// Lower bound on the step time because of them.
    bound: f64,
}

impl<O: StepTime> Search<'_, O> {
    /// Tries all partitions that begin with these borders; returns whether the limit allowed it.
    ///
    /// # Errors
    /// [`Error::NotAStepTime`].
    fn descend(&mut self, bounds: &mut Vec<usize>, before: Beginning) -> Result<bool> {
        let (stage, start, end) = (bounds.len() - 1, bounds[bounds.len() - 1], self.costs.len());
        let behind = self.num_stages - stage - 1;
        if behind == 0 {
            if self.best.tried >= self.limit {
                return Ok(false);
            }
            bounds.push(end);
            self.best.offer(self.costs, bounds, self.objective)?;
            bounds.pop();
            return Ok(true);
        }
        for border in start + 1..=end - behind {
            let beginning = self.with_stage(before, start..border);
            let rest = self.costs.load(border..end).total() / behind as f64;
            let bound = beginning.bound.max(beginning.forward + self.all(rest));
            // Rounding must not cut off an equally good partition.
            if bound * (1.0 - 1e-9) > self.best.step_time {
                continue;
            }
            bounds.push(border);
            let complete = self.descend(bounds, beginning)?;
            bounds.pop();
            if !complete {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn with_stage(&self, before: Beginning, segments: std::ops::Range<usize>) -> Beginning {
        let load = self.costs.load(segments);
        Beginning {
            forward: before.forward + load.forward,
            bound: before.bound.max(before.forward + self.all(load.total())),
        }
    }

    /// The time of all microbatches that take `work` each.
    fn all(&self, work: f64) -> f64 {
        work * self.objective.num_microbatches() as f64
    }
}
