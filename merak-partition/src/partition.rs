//! A graph cut into stages, and what each stage recomputes.

use crate::{Error, Found, Result, SegmentOptions, Segments, StageMethod, segment, stages};
use merak_trace::{Graph, Node, RecomputePlan, StageCuts, op::Class};
use std::ops::Range;

/// Which nodes each stage runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The pieces that stages are made of.
    pub segments: Segments,
    /// Stage `s` has segments `stage_bounds[s]..stage_bounds[s + 1]`.
    pub stage_bounds: Vec<usize>,
    /// The method that laid the segments out, as a report names it.
    pub method: String,
}

impl Partition {
    /// Cuts a graph into segments and lays them out over stages.
    ///
    /// # Errors
    /// Those of [`segment`] and [`stages`].
    pub fn new(graph: &Graph, options: &SegmentOptions, method: &StageMethod) -> Result<Self> {
        let segments = segment(graph, options)?;
        let stage_bounds = stages(&segments, method, options.num_stages)?;
        Ok(Self {
            segments,
            stage_bounds,
            method: method.to_string(),
        })
    }

    /// The stages that the search of this name found.
    pub fn found(segments: Segments, search: &str, found: Found) -> Self {
        let Found { tried, stopped, .. } = found;
        Self {
            segments,
            stage_bounds: found.bounds,
            method: format!("{search} ({tried} tried, {stopped})"),
        }
    }

    /// The number of stages.
    pub fn num_stages(&self) -> usize {
        self.stage_bounds.len() - 1
    }

    /// The segments of one stage.
    pub fn segments_of(&self, stage: usize) -> Range<usize> {
        self.stage_bounds[stage]..self.stage_bounds[stage + 1]
    }

    /// The nodes of one stage.
    pub fn nodes_of(&self, stage: usize) -> Range<usize> {
        let segments = self.segments_of(stage);
        self.segments.bounds[segments.start]..self.segments.bounds[segments.end]
    }

    /// Elements of the parameters of one stage; a tied one counts at its first use.
    pub fn params_of(&self, stage: usize) -> usize {
        self.segments.params[self.segments_of(stage)].iter().sum()
    }

    /// The same cuts in the form that stage programs are made from.
    ///
    /// # Errors
    /// [`Error::OtherGraph`] when the partition was made for another graph.
    pub fn cuts(&self, graph: &Graph) -> Result<StageCuts> {
        let bounds: Vec<_> = self
            .stage_bounds
            .iter()
            .map(|&segment| self.segments.bounds[segment])
            .collect();
        let bound = bounds[bounds.len() - 1];
        StageCuts::new(graph, bounds).map_err(|_| Error::OtherGraph {
            bound,
            num_nodes: graph.nodes().len(),
        })
    }
}

/// The chunks that a stage recomputes in its backward: `chunk` segments each, counted from
/// the stage's first. Only the values that enter a chunk are kept ([Chen et al.
/// 2016](https://arxiv.org/abs/1604.06174)).
///
/// Not recomputed: a chunk without parameters, a chunk with an embedding lookup, and the last chunk
/// of the last stage, whose backward starts at once. Of the other segments the first `most` are
/// recomputed, or none when `chunk` is 0.
///
/// `graph` is the graph that `partition` was made for.
pub fn recompute_plan(
    graph: &Graph,
    partition: &Partition,
    stage: usize,
    chunk: usize,
    most: usize,
) -> RecomputePlan {
    if chunk == 0 {
        return RecomputePlan::default();
    }
    let segments: Vec<_> = partition.segments_of(stage).collect();
    let bounds = &partition.segments.bounds;
    let mut chunks: Vec<_> = segments.chunks(chunk).collect();
    if stage + 1 == partition.num_stages() {
        chunks.pop();
    }
    chunks.retain(|chunk| {
        let nodes = &graph.nodes()[bounds[chunk[0]]..bounds[chunk[chunk.len() - 1] + 1]];
        nodes.iter().any(|node| reads_params(graph, node))
            && !nodes.iter().any(|node| node.op.class() == Class::Lookup)
    });
    let mut left = most;
    let limited = chunks.into_iter().filter_map(|chunk| {
        let taken = &chunk[..chunk.len().min(left)];
        left -= taken.len();
        let (first, last) = (taken.first()?, taken.last()?);
        Some(bounds[*first]..bounds[last + 1])
    });
    RecomputePlan {
        chunks: limited.collect(),
        nodes: Vec::new(),
    }
}

fn reads_params(graph: &Graph, node: &Node) -> bool {
    node.inputs
        .iter()
        .any(|&input| graph.param_of(input).is_some())
}
