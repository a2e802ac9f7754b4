//! What ran when, planned or recorded.

use crate::Action;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// One action and its time: seconds when it was recorded, units of the costs when it was simulated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// When its computation began, after its message had come.
    pub start: f64,
    /// When its computation ended.
    pub end: f64,
}

/// The spans of every rank, in execution order, on one time axis.
///
/// The simulator and the engine both make it, so that plan and fact can be drawn one above the
/// other.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Timeline {
    /// For each rank its spans, first to last.
    pub ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// When the last action of all ends.
    pub fn makespan(&self) -> f64 {
        let ends = self.ranks.iter().filter_map(|spans| spans.last());
        ends.map(|span| span.end).fold(0.0, f64::max)
    }

    /// For each rank the time from its first start to its last end.
    pub fn rank_times(&self) -> Vec<f64> {
        let time = |spans: &Vec<Span>| match (spans.first(), spans.last()) {
            (Some(first), Some(last)) => last.end - first.start,
            _ => 0.0,
        };
        self.ranks.iter().map(time).collect()
    }

    /// For each rank the time that it computes; what runs at once counts once.
    pub fn busy_times(&self) -> Vec<f64> {
        let busy = |spans: &Vec<Span>| {
            let mut until = f64::NEG_INFINITY;
            let alone = spans.iter().map(|span| {
                let start = span.start.max(until);
                until = until.max(span.end);
                (span.end - start).max(0.0)
            });
            alone.sum()
        };
        self.ranks.iter().map(busy).collect()
    }

    /// The spans of all ranks, each with the one that ran at once with it.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (Span, Option<Span>)> {
        self.ranks.iter().flat_map(|spans| groups(spans))
    }

    /// The idle share of all ranks over the makespan, from 0 to 1.
    pub fn bubble(&self) -> f64 {
        let whole = self.makespan() * self.ranks.len() as f64;
        idle_share(whole, self.busy_times().iter().sum())
    }

    /// For each rank the idle share between its own first start and last end, from 0 to 1: what is
    /// left when a rank need not wait for the others at the end of a step.
    pub fn bubble_by_rank(&self) -> Vec<f64> {
        let times = self.rank_times().into_iter().zip(self.busy_times());
        times.map(|(whole, busy)| idle_share(whole, busy)).collect()
    }
}

/// The spans of a rank, each with the one that ran at once with it.
pub(crate) fn groups(spans: &[Span]) -> Vec<(Span, Option<Span>)> {
    let mut groups: Vec<(Span, Option<Span>)> = Vec::with_capacity(spans.len());
    for &span in spans {
        match groups.last_mut() {
            Some((before, other @ None)) if span.start < before.end => *other = Some(span),
            _ => groups.push((span, None)),
        }
    }
    groups
}

fn idle_share(whole: f64, busy: f64) -> f64 {
    if whole > 0.0 {
        (1.0 - busy / whole).max(0.0)
    } else {
        0.0
    }
}

/// Records one rank's spans; the only reader of the clock in this crate.
#[derive(Debug)]
pub(crate) struct Recorder {
    epoch: Instant,
    begun: f64,
    spans: Vec<Span>,
}

impl Recorder {
    pub(crate) fn new(epoch: Option<Instant>, actions: usize) -> Self {
        Self {
            epoch: epoch.unwrap_or_else(Instant::now),
            begun: 0.0,
            spans: Vec::with_capacity(actions),
        }
    }

    pub(crate) fn begin(&mut self) {
        self.begun = self.epoch.elapsed().as_secs_f64();
    }

    /// Records the end of the action that began last, or of the two that ran at once.
    pub(crate) fn end(&mut self, actions: impl IntoIterator<Item = Action>) {
        let (start, end) = (self.begun, self.epoch.elapsed().as_secs_f64());
        let spans = actions
            .into_iter()
            .map(|action| Span { action, start, end });
        self.spans.extend(spans);
    }

    pub(crate) fn into_spans(self) -> Vec<Span> {
        self.spans
    }
}
