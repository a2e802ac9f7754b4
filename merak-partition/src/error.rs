//! What can go wrong when a model is cut into stages.

use crate::limits::MAX_COST;
use merak_mpu::names::did_you_mean;

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A model that cannot be cut as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The graph has no nodes.
    #[error("the model has no nodes, so there is nothing to cut")]
    EmptyModel,
    /// No stages were asked for.
    #[error("a pipeline has at least 1 stage, found 0")]
    NoStages,
    /// The requested number of segments is below the number of stages.
    #[error(
        "the target of {found} segments is below the {num_stages} stages, each of which takes at least one"
    )]
    TargetSegments {
        /// The requested number.
        found: usize,
        /// Stages of the pipeline.
        num_stages: usize,
    },
    /// The model has fewer segments than stages.
    #[error(
        "{method} cuts the model into {segments} segments, which is fewer than the {num_stages} stages of all ranks; use at most {segments}"
    )]
    TooFewSegments {
        /// What made the segments.
        method: &'static str,
        /// Their number.
        segments: usize,
        /// Stages of the pipeline.
        num_stages: usize,
    },
    /// No segment can be cut further.
    #[error(
        "the model has legal cuts for {segments} segments only, which is fewer than the {num_stages} stages of all ranks; use at most {segments}"
    )]
    NoLegalCut {
        /// Segments when no legal cut was left.
        segments: usize,
        /// Stages of the pipeline.
        num_stages: usize,
    },
    /// `layer_split` knows no split points of this family.
    #[error("layer_split has no split points for model type \"{found}\", only for {known}")]
    UnknownFamily {
        /// The model type, empty when it is not known.
        found: String,
        /// The families of the table.
        known: String,
    },
    /// A split point matches no module or parameter.
    #[error("split point \"{point}\" matches no module or parameter; the nearest is \"{nearest}\"")]
    UnknownSplitPoint {
        /// The split point.
        point: String,
        /// The most similar path of the model.
        nearest: String,
    },
    /// A name of a module that stays whole matches none.
    #[error("leaf module \"{name}\" matches no module; the nearest name is \"{nearest}\"")]
    UnknownLeaf {
        /// The name.
        name: String,
        /// The most similar path of the model.
        nearest: String,
    },
    /// None of a family's split points is in the model.
    #[error("none of the split points of model type \"{family}\" ({points}) is in this model")]
    NoSplitPoint {
        /// The model type.
        family: String,
        /// Its split points.
        points: String,
    },
    /// A list does not have an entry per segment.
    #[error("expected {expected} {what}, one per segment, found {found}")]
    PerSegment {
        /// What the list holds.
        what: &'static str,
        /// Segments.
        expected: usize,
        /// Entries.
        found: usize,
    },
    /// An invalid time of a segment.
    #[error("the {what} cost of segment {segment} is {found:?}, expected a number from 0 to {max:e}", max = MAX_COST)]
    NotACost {
        /// `forward` or `backward`.
        what: &'static str,
        /// The segment.
        segment: usize,
        /// The cost.
        found: f64,
    },
    /// An invalid time of a message.
    #[error("the communication cost is {found:?}, expected a number from 0 to {max:e}", max = MAX_COST)]
    NotACommCost {
        /// The cost.
        found: f64,
    },
    /// A step has no microbatches, or so many that no step can be simulated.
    #[error("expected 1 to {most} microbatches for {num_stages} stages, found {found}")]
    Microbatches {
        /// The number.
        found: usize,
        /// The largest number that is taken.
        most: usize,
        /// Stages of the pipeline.
        num_stages: usize,
    },
    /// An objective gave an invalid step time.
    #[error("the step time of partition {bounds:?} is {found:?}, expected a finite number from 0")]
    NotAStepTime {
        /// The partition.
        bounds: Vec<usize>,
        /// The time.
        found: f64,
    },
    /// There is no such schedule.
    #[error("no step can be simulated")]
    Schedule(#[from] merak_pipe::Error),
    /// The objective of a search allowed none of the partitions that were tried.
    #[error("none of {tried} partitions is within the limits")]
    NoPartition {
        /// Their number.
        tried: usize,
    },
    /// No partition that was tried leaves every rank within its memory.
    #[error(
        "a rank has {limit} bytes, but under every partition that was tried some rank needs at least {least}"
    )]
    StageMemory {
        /// The bytes that a rank has.
        limit: usize,
        /// The fewest bytes that the fullest rank needs.
        least: usize,
    },
    /// No schedule that was tried leaves every rank within its memory.
    #[error(
        "a rank has {limit} bytes, but no schedule that was tried keeps the limit, and of those with a name the least needs \
         {needed} on its fullest rank"
    )]
    ScheduleMemory {
        /// The bytes that a rank has.
        limit: usize,
        /// The fewest bytes that the fullest rank needs under a schedule with a name.
        needed: usize,
    },
    /// Activations that need more than their budget, even with everything recomputed.
    #[error(
        "activations have {budget} bytes, but those of rank {rank} need at least {least}, with everything recomputed"
    )]
    ActivationBudget {
        /// The rank of the pipeline.
        rank: usize,
        /// The bytes that it may use.
        budget: usize,
        /// The fewest bytes that it needs.
        least: usize,
    },
    /// Given boundaries do not form a partition.
    #[error("the boundaries {bounds:?} should be {} numbers that rise strictly from 0 to {segments}", num_stages + 1)]
    Boundaries {
        /// The boundaries.
        bounds: Vec<usize>,
        /// Segments of the model.
        segments: usize,
        /// Stages of the pipeline.
        num_stages: usize,
    },
    /// A list with one entry per stage has another length.
    #[error("expected one entry of {what} for each of {expected} stages, found {found}")]
    PerStage {
        /// The list.
        what: &'static str,
        /// Stages.
        expected: usize,
        /// Entries.
        found: usize,
    },
    /// The segments do not belong to this graph.
    #[error(
        "the partition ends at node {bound}, but the graph has {num_nodes} nodes; cut the graph that is run"
    )]
    OtherGraph {
        /// Last border of the partition.
        bound: usize,
        /// Nodes of the graph.
        num_nodes: usize,
    },
    /// The program of a stage cannot be made.
    #[error("stage {stage} has no training program")]
    Program {
        /// The stage.
        stage: usize,
        /// The cause.
        source: Box<merak_trace::Error>,
    },
    /// A key of a cluster's description that is not there, or that a cluster does not have.
    #[error("{}{}", if *is_missing { format!("{key} is missing") } else { format!("a cluster has no {key}") },
        did_you_mean(nearest.as_deref()))]
    ClusterKey {
        /// The key.
        key: String,
        /// Whether the description lacks it.
        is_missing: bool,
        /// What was probably meant.
        nearest: Option<String>,
    },
    /// A number of a cluster's description that no machine has.
    #[error("{key} is {found}, expected a number that is {expected}")]
    Cluster {
        /// The key.
        key: &'static str,
        /// The number.
        found: f64,
        /// The range of numbers.
        expected: &'static str,
    },
}
