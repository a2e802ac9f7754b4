//! Graph to segments: pieces between two cuts.

mod farthest;
mod layers;
mod nearest;
mod paths;
mod refine;

pub use farthest::head_params;

use crate::{Error, Result, SplitMethod, borders::Borders, borders::crossing};
use merak_trace::{Graph, ValueId, models::ModelInfo};
use serde::Serialize;
use std::{fmt, ops::Range};

/// Options for cutting a graph.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SegmentOptions {
    /// How to cut.
    pub method: SplitMethod,
    /// Segments that `farthest_min_deps` aims at; unset: twice the layers, or
    /// `max(3, 2 num_stages)`.
    pub target_segments: Option<usize>,
    /// For `layer_split`: module or parameter paths before which to cut, instead of the family's.
    ///
    /// `{i}` stands for any number. A point within a module of `leaf_modules` cuts behind that
    /// module ([`MovedPoint`]). Empty: the family's table.
    pub split_points: Vec<String>,
    /// Modules that no cut enters, by their paths; `{i}` stands for any number.
    ///
    /// Such a module is in one segment, from its first node to its last.
    pub leaf_modules: Vec<String>,
    /// The model type, for the table of `layer_split`.
    pub family: Option<String>,
    /// Transformer layers, where they are known.
    pub num_layers: Option<usize>,
    /// Stages of the pipeline; at least as many segments are made.
    pub num_stages: usize,
}

impl SegmentOptions {
    /// The defaults for a model and a number of stages.
    pub fn for_model(info: &ModelInfo, num_stages: usize) -> Self {
        Self {
            family: Some(info.family.to_owned()),
            num_layers: Some(info.num_layers),
            num_stages,
            ..Self::default()
        }
    }

    /// The same with another method.
    #[must_use]
    pub fn with_method(mut self, method: SplitMethod) -> Self {
        self.method = method;
        self
    }

    fn target(&self) -> usize {
        self.target_segments
            .or(self.num_layers.map(|layers| 2 * layers))
            .unwrap_or((2 * self.num_stages).max(3))
            .max(1)
    }

    fn check(&self) -> Result<()> {
        match self.target_segments {
            _ if self.num_stages == 0 => Err(Error::NoStages),
            Some(found) if found < self.num_stages => Err(Error::TargetSegments {
                found,
                num_stages: self.num_stages,
            }),
            _ => Ok(()),
        }
    }
}

/// A graph cut into consecutive pieces.
///
/// Segment `s` has nodes `bounds[s]..bounds[s + 1]`. The bounds rise strictly from 0 to the number
/// of nodes, so every node is in one segment and none is empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Segments {
    /// Borders between nodes.
    pub bounds: Vec<usize>,
    /// Elements of the parameters of each segment, in the whole model; a tied one counts at its
    /// first use.
    pub params: Vec<usize>,
    /// Why the cuts are where they are.
    pub rule: SplitRule,
    /// Cuts that were added because there were fewer segments than stages.
    pub refined: usize,
}

impl Segments {
    /// The number of segments.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Always false: a model has at least one segment.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// The nodes of one segment.
    pub fn nodes(&self, segment: usize) -> Range<usize> {
        self.bounds[segment]..self.bounds[segment + 1]
    }

    /// For each cut, the values made before it and used after it, in order.
    pub fn crossing(&self, graph: &Graph) -> Vec<Vec<ValueId>> {
        crossing(graph, &self.bounds[1..self.len()])
    }
}

/// The rule that decided the cuts; prints as a clause of a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SplitRule {
    /// `farthest_min_deps`.
    FarthestMinDeps {
        /// Segments that were aimed at.
        target: usize,
        /// Elements of parameters per segment.
        budget: usize,
        /// Places where one counted value crosses.
        candidates: usize,
    },
    /// `nearest_min_deps`.
    NearestMinDeps {
        /// Runs of borders with fewer crossing values than around them.
        valleys: usize,
    },
    /// `layer_split`.
    LayerSplit {
        /// Modules and parameters at whose first node a segment begins.
        points: usize,
        /// Those of the given points that lie within leaf modules.
        moved: Vec<MovedPoint>,
    },
}

/// A point of [`SegmentOptions::split_points`] within a module of [`SegmentOptions::leaf_modules`];
/// prints as a sentence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MovedPoint {
    /// The point, as it was given.
    pub point: String,
    /// The first leaf module that it lies within, as it was given.
    pub leaf: String,
    /// The name of the node before which the cut is instead; unset where the model ends first, so
    /// that there is no cut.
    pub before: Option<String>,
}

impl fmt::Display for MovedPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            point,
            leaf,
            before,
        } = self;
        write!(
            f,
            "the split point \"{point}\" lies within the leaf module \"{leaf}\": "
        )?;
        match before {
            Some(node) => write!(f, "the cut is behind it, before \"{node}\""),
            None => write!(f, "there is no cut, as the model ends with it"),
        }
    }
}

impl fmt::Display for SplitRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FarthestMinDeps {
                target,
                budget,
                candidates,
            } => {
                write!(
                    f,
                    "farthest_min_deps: {budget} parameters a segment for {target} segments, {candidates} candidate cuts"
                )
            }
            Self::NearestMinDeps { valleys } => {
                write!(f, "nearest_min_deps: {valleys} valleys of crossing values")
            }
            Self::LayerSplit { points, .. } => write!(f, "layer_split: {points} split points"),
        }
    }
}

/// Cuts a graph into segments.
///
/// The graph may be a whole model or its tensor-parallel rewrite. No cut separates a partial sum
/// from the all-reduce that completes it, and none enters a module of `leaf_modules`.
///
/// # Errors
/// - [`Error::EmptyModel`], [`Error::NoStages`] and [`Error::TargetSegments`] for sizes that make
///   no sense;
/// - [`Error::NoLegalCut`] or [`Error::TooFewSegments`] when there are fewer segments than stages;
/// - for `layer_split`, [`Error::UnknownFamily`], [`Error::NoSplitPoint`] and
///   [`Error::UnknownSplitPoint`];
/// - [`Error::UnknownLeaf`] for a name in `leaf_modules` that no module has.
///
/// ```
/// use merak_partition::{SegmentOptions, segment};
/// use merak_trace::models::{self, TraceOptions};
///
/// let config = serde_json::json!({ "model_type": "gpt2", "n_layer": 12 });
/// let model = models::from_config(&config)?;
/// let graph = model.trace(&TraceOptions::training(1, 1024))?;
/// let segments = segment(&graph, &SegmentOptions::for_model(&model.info(), 4))?;
/// assert_eq!(segments.len(), 26); // embeddings, 12 x (attention, MLP), final norm with head
/// assert_eq!(segments.params[1..3], [2_363_904, 4_723_968]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn segment(graph: &Graph, options: &SegmentOptions) -> Result<Segments> {
    options.check()?;
    if graph.nodes().is_empty() {
        return Err(Error::EmptyModel);
    }
    let mut borders = Borders::of(graph);
    for name in &options.leaf_modules {
        keep_whole(graph, name, &mut borders)?;
    }
    let (mut bounds, rule) = match options.method {
        SplitMethod::FarthestMinDeps => farthest::cut(graph, &borders, options.target()),
        SplitMethod::NearestMinDeps => nearest::cut(&borders),
        SplitMethod::LayerSplit => layers::cut(graph, &borders, options)?,
    };
    let found = bounds.len() - 1;
    if found < options.num_stages {
        if options.method == SplitMethod::LayerSplit {
            let method = options.method.as_str();
            return Err(Error::TooFewSegments {
                method,
                segments: found,
                num_stages: options.num_stages,
            });
        }
        refine::until(&mut bounds, &borders, options.num_stages)?;
    }
    let params = bounds
        .windows(2)
        .map(|pair| borders.params[pair[0]..pair[1]].iter().sum())
        .collect();
    Ok(Segments {
        refined: bounds.len() - 1 - found,
        bounds,
        params,
        rule,
    })
}

/// Closes the borders within each module that a name stands for.
fn keep_whole(graph: &Graph, name: &str, borders: &mut Borders) -> Result<()> {
    let modules = paths::modules(graph, name);
    if modules.is_empty() {
        return Err(Error::UnknownLeaf {
            name: name.to_owned(),
            nearest: paths::nearest_module(graph, name),
        });
    }
    for nodes in modules {
        borders.legal[nodes.start() + 1..=*nodes.end()].fill(false);
    }
    Ok(())
}
