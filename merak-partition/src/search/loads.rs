//! Times of segments and stages.

use crate::{Error, Result, Segments, limits::is_cost};
use merak_trace::{Graph, op::Cost};
use std::ops::Range;

/// The time that each segment takes for one microbatch, in any one unit.
#[derive(Debug, Clone, PartialEq)]
pub struct SegmentCosts {
    forward: Vec<f64>,
    backward: Vec<f64>,
    /// Sums of the forwards, and of the backwards, of the segments before each border.
    sums: Vec<[f64; 2]>,
}

impl SegmentCosts {
    /// Costs that were measured: one forward and one backward per segment.
    ///
    /// # Errors
    /// [`Error::PerSegment`] when there are not as many backwards as forwards, [`Error::NotACost`]
    /// for a cost that is negative, not a number, or above 1e100, where sums may overflow.
    pub fn new(forward: Vec<f64>, backward: Vec<f64>) -> Result<Self> {
        if forward.len() != backward.len() {
            return Err(Error::PerSegment {
                what: "backward costs",
                expected: forward.len(),
                found: backward.len(),
            });
        }
        for (what, list) in [("forward", &forward), ("backward", &backward)] {
            if let Some(segment) = list.iter().position(|found| !is_cost(*found)) {
                let found = list[segment];
                return Err(Error::NotACost {
                    what,
                    segment,
                    found,
                });
            }
        }
        let mut sums = vec![[0.0, 0.0]];
        for (f, b) in forward.iter().zip(&backward) {
            let [before_f, before_b] = sums[sums.len() - 1];
            sums.push([before_f + f, before_b + b]);
        }
        Ok(Self {
            forward,
            backward,
            sums,
        })
    }

    /// Costs by counting operations: the backward takes twice the forward, and once more if the
    /// forward is recomputed.
    ///
    /// # Errors
    /// [`Error::OtherGraph`] when the segments were made for another graph.
    pub fn counted(graph: &Graph, segments: &Segments, recomputed: bool) -> Result<Self> {
        let bound = segments.bounds[segments.len()];
        if bound != graph.nodes().len() {
            return Err(Error::OtherGraph {
                bound,
                num_nodes: graph.nodes().len(),
            });
        }
        let flops = |segment: usize| {
            let nodes = &graph.nodes()[segments.nodes(segment)];
            let cost: Cost = nodes.iter().map(|node| Cost::of(graph, node)).sum();
            cost.flops as f64
        };
        let forward: Vec<_> = (0..segments.len()).map(flops).collect();
        let factor = if recomputed { 3.0 } else { 2.0 };
        let backward = forward.iter().map(|f| factor * f).collect();
        Self::new(forward, backward)
    }

    /// The number of segments.
    pub fn len(&self) -> usize {
        self.forward.len()
    }

    /// Whether there is no segment.
    pub fn is_empty(&self) -> bool {
        self.forward.is_empty()
    }

    /// The times of a partition's stages.
    ///
    /// # Panics
    /// If a border is past the last segment.
    pub fn loads(&self, bounds: &[usize]) -> Vec<StageLoad> {
        let stages = bounds.windows(2);
        stages.map(|pair| self.load(pair[0]..pair[1])).collect()
    }

    pub(super) fn load(&self, segments: Range<usize>) -> StageLoad {
        let ([f0, b0], [f1, b1]) = (self.sums[segments.start], self.sums[segments.end]);
        StageLoad {
            forward: f1 - f0,
            backward: b1 - b0,
            segments,
        }
    }

    /// Forward and backward of each segment as integers, small enough that their sum is exact.
    pub(super) fn weights(&self) -> Vec<usize> {
        let [f, b] = self.sums[self.len()];
        let scale = if f + b > 0.0 {
            2_f64.powi(50) / (f + b)
        } else {
            0.0
        };
        let sums = self.forward.iter().zip(&self.backward);
        sums.map(|(f, b)| ((f + b) * scale) as usize).collect()
    }
}

/// The times of a stage for one microbatch.
#[derive(Debug, Clone, PartialEq)]
pub struct StageLoad {
    /// Its forward.
    pub forward: f64,
    /// Its backward, recomputation included.
    pub backward: f64,
    /// Its segments.
    pub segments: Range<usize>,
}

impl StageLoad {
    pub(super) fn total(&self) -> f64 {
        self.forward + self.backward
    }
}
