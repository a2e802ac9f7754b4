//! What can go wrong with a schedule and while one runs.

use crate::{
    Action, MicrobatchId, Pair, StageId, Tag,
    figure::exact,
    limits::{LEAST_CORES, MAX_COST},
};
use std::time::Duration;

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error that a user's stage returned.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The beginning of a foreign text for a message, without anything that acts on a terminal.
fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    let more = if text.chars().nth(LONGEST).is_some() {
        ".."
    } else {
        ""
    };
    let start = text.chars().take(LONGEST);
    let escaped = start.flat_map(|c| {
        let acts = c.is_control();
        let (escape, plain) = if acts {
            (Some(c.escape_default()), None)
        } else {
            (None, Some(c))
        };
        escape.into_iter().flatten().chain(plain)
    });
    escaped.chain(more.chars()).collect()
}

/// An action, and the backward that ran at once with it.
pub(crate) fn at_once(action: Action, with: Option<Action>) -> String {
    match with {
        Some(backward) => format!("{action} with {backward}"),
        None => action.to_string(),
    }
}

/// The stage and microbatch of an action, and of the backward that ran at once with it.
fn places(action: Action, with: Option<Action>) -> String {
    let (stage, microbatch) = (action.stage, action.microbatch);
    match with {
        Some(backward) => format!(
            "stages {stage} and {}, microbatches {microbatch} and {}",
            backward.stage, backward.microbatch
        ),
        None => format!("stage {stage}, microbatch {microbatch}"),
    }
}

/// A schedule that cannot be made, read, proved or carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text is not an action.
    #[error(
        "expected an action such as 0F3 (stage, one of F R B I W, microbatch), found \"{}\"",
        shown(found)
    )]
    ParseAction {
        /// The text.
        found: String,
    },
    /// A text is not a pair of actions that run at once.
    #[error(
        "expected a forward and a full backward such as (0F7;7B3)OVERLAP_F_B, found \"{}\"",
        shown(found)
    )]
    ParsePair {
        /// The text.
        found: String,
    },
    /// A cell of a schedule file is not an action.
    #[error("line {line}, cell {cell} is no action")]
    Cell {
        /// Line of the file, from 1.
        line: usize,
        /// Cell of the line, from 1.
        cell: usize,
        /// Why not.
        source: Box<Error>,
    },
    /// A line of a list of costs or bytes is wrong.
    #[error("line {line}")]
    Line {
        /// Line of the text, from 1.
        line: usize,
        /// What is wrong with it.
        source: Box<Error>,
    },
    /// A schedule file has no actions.
    #[error("the file is empty: it has no actions")]
    EmptyFile,
    /// No schedule has this name.
    #[error("unknown schedule \"{}\" (one of {known})", shown(name))]
    UnknownSchedule {
        /// The name that was asked for.
        name: String,
        /// All names, separated by commas.
        known: String,
    },
    /// A count is zero or above its limit.
    #[error("a schedule has 1 to {max} {what}, found {found}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The largest legal count.
        max: usize,
        /// The count.
        found: usize,
    },
    /// A schedule was asked for a number of stages per rank that it cannot have.
    #[error("{name} runs {expected} {} per rank, found {found}", if *expected == 1 { "chunk" } else { "chunks" })]
    Chunks {
        /// The schedule.
        name: &'static str,
        /// Chunks that it runs.
        expected: usize,
        /// Chunks that were asked for.
        found: usize,
    },
    /// A schedule was asked for fewer microbatches than it needs.
    #[error("{name} needs at least {needed} microbatches ({why}), found {found}")]
    TooFewMicrobatches {
        /// The schedule.
        name: &'static str,
        /// The smallest legal number.
        needed: usize,
        /// Where the number comes from.
        why: String,
        /// The number that was asked for.
        found: usize,
    },
    /// Ranks cannot run on that many cores.
    #[error("ranks share {least} cores or more, found {}", exact(*found), least = LEAST_CORES)]
    Cores {
        /// The number.
        found: f64,
    },
    /// The number of memory limits is not the number of ranks.
    #[error("expected a limit of memory for each of {expected} ranks, found {found}")]
    LimitCount {
        /// Ranks of the schedule.
        expected: usize,
        /// Limits.
        found: usize,
    },
    /// No schedule keeps the limit of memory.
    #[error(
        "every rank keeps the activations of at least 1 microbatch, found a limit of {} for rank {rank}",
        exact(*found)
    )]
    MemoryLimit {
        /// The first rank with such a limit.
        rank: usize,
        /// Its limit.
        found: f64,
    },
    /// No microbatch fits into the limit of memory.
    #[error(
        "for one microbatch the stages of rank {rank} need {expected} bytes, found a limit of {found} bytes"
    )]
    ByteLimit {
        /// The first rank with such a limit.
        rank: usize,
        /// What its stages need there for one microbatch, if stages are placed in turn.
        expected: u64,
        /// Its limit.
        found: u64,
    },
    /// The number of lists of actions is not the number of ranks.
    #[error("expected one list of actions for each of {expected} ranks, found {found}")]
    RankCount {
        /// Ranks of the schedule.
        expected: usize,
        /// Lists.
        found: usize,
    },
    /// A file leaves out a stage.
    #[error(
        "the file names stage {last} but not stage {stage}: a line is missing (it has {lines} with actions, one for each rank), or stages are \
         numbered wrongly"
    )]
    StageWithoutLine {
        /// The first stage that is missing.
        stage: StageId,
        /// The last stage that is there.
        last: StageId,
        /// Lines with actions.
        lines: usize,
    },
    /// The stages of a file cannot be shared evenly between its lines.
    #[error(
        "{stages} stages on {lines} lines: every line is a rank, and all ranks run as many stages"
    )]
    UnevenStages {
        /// Stages.
        stages: usize,
        /// Lines with actions.
        lines: usize,
    },
    /// No rank runs a stage.
    #[error("no rank runs stage {stage}")]
    StageWithoutActions {
        /// The stage.
        stage: StageId,
    },
    /// An action breaks a rule.
    #[error("rank {rank}, position {}: {action} {rule}", position + 1)]
    Invalid {
        /// The rank.
        rank: usize,
        /// Index of its cell in the rank's list, from 0, where a pair is one cell; the message
        /// counts from 1.
        position: usize,
        /// The action.
        action: Action,
        /// The rule, in words that follow the action.
        rule: Violation,
    },
    /// An action that must be there is not.
    #[error("rank {rank} never runs {action}")]
    MissingAction {
        /// The rank that runs the stage.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// The lists of actions wait for each other in a circle.
    #[error(
        "deadlock: rank {rank} waits at position {} ({}) for the {needs}",
        position + 1,
        pair.map_or_else(|| action.to_string(), |pair| pair.to_string())
    )]
    Deadlock {
        /// The first rank that waits for ever.
        rank: usize,
        /// Index of the action's cell in the rank's list, from 0, where a pair is one cell; the
        /// message counts from 1.
        position: usize,
        /// The action it cannot begin.
        action: Action,
        /// The pair that the action belongs to.
        pair: Option<Pair>,
        /// What never comes.
        needs: Tag,
    },
    /// The instruction streams wait for each other when a send waits for its receiver.
    #[error(
        "deadlock with blocking sends: rank {rank} waits at instruction {} ({instruction}) to exchange the {needs}",
        position + 1
    )]
    BlockingDeadlock {
        /// The first rank that waits for ever.
        rank: usize,
        /// Index of the instruction in its stream, from 0; the message counts from 1.
        position: usize,
        /// Name of the instruction it cannot pass.
        instruction: &'static str,
        /// The message that never moves.
        needs: Tag,
    },
    /// A rank runs more or fewer stages than the others.
    #[error("rank {rank} runs {found} stages, expected {expected}: all ranks run as many")]
    StagesOfRank {
        /// The rank.
        rank: usize,
        /// Chunks of the schedule.
        expected: usize,
        /// Stages of the rank.
        found: usize,
    },
    /// A list of costs has an entry that is not one of its keys.
    #[error(
        "expected costs such as F=1,I=1,W=1,R=1,C=0,O=1, found \"{}\"",
        shown(found)
    )]
    ParseCosts {
        /// The entry.
        found: String,
    },
    /// Bytes of activations have an entry that is not one of their keys.
    #[error(
        "expected bytes such as I=1048576,W=524288, found \"{}\"",
        shown(found)
    )]
    ParseBytes {
        /// The entry.
        found: String,
    },
    /// Activations are more than can be counted.
    #[error(
        "the activations of all stages and microbatches together are more than {} bytes",
        u64::MAX
    )]
    TooManyBytes,
    /// A list of costs names one twice.
    #[error("the cost {key} is given twice")]
    CostTwice {
        /// Letter of the cost.
        key: char,
    },
    /// The overlap is not a share from 0 to 1.
    #[error("the overlap O must be from 0 to 1, found {}", exact(*found))]
    OverlapValue {
        /// Its value.
        found: f64,
    },
    /// A cost is negative, not a number or too large to be added up.
    #[error("the cost {key} must be from 0 to {max:e}, found {}", exact(*found), max = MAX_COST)]
    CostValue {
        /// Letter of the cost.
        key: char,
        /// Its value.
        found: f64,
    },
    /// A list of costs does not have one entry for each stage or hop.
    #[error("expected {list} of {expected} {what}, found {found}")]
    CostCount {
        /// The list, such as `costs F` or `bytes I`.
        list: String,
        /// `stages` or `hops`.
        what: &'static str,
        /// How many the schedule has.
        expected: usize,
        /// How many costs there are.
        found: usize,
    },
    /// A run was asked for a rank outside the schedule.
    #[error("the schedule has ranks 0 to {}, found {rank}", ranks - 1)]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Ranks of the schedule.
        ranks: usize,
    },
    /// A stage returned an error.
    #[error("rank {rank} failed in {} ({})", at_once(*action, *with), places(*action, *with))]
    Stage {
        /// The rank.
        rank: usize,
        /// What it was doing.
        action: Action,
        /// The backward that ran at once with it, which may be what failed.
        with: Option<Action>,
        /// What the stage returned.
        source: BoxError,
    },
    /// A stage returned no payload where a neighbour waits for one.
    #[error("rank {rank}: {action} returned nothing, expected the {tag}")]
    NoOutput {
        /// The rank.
        rank: usize,
        /// What it did.
        action: Action,
        /// The message that is missing.
        tag: Tag,
    },
    /// A stage at the end of the pipeline returned a payload that no stage takes.
    #[error("rank {rank}: {action} returned a payload, but no stage follows it")]
    UnexpectedOutput {
        /// The rank.
        rank: usize,
        /// What it did.
        action: Action,
    },
    /// An action takes a message between two stages of one rank before it was made.
    #[error("rank {rank}: {action} comes before the {tag}")]
    NotYetComputed {
        /// The rank.
        rank: usize,
        /// What it was about to do.
        action: Action,
        /// What it needs.
        tag: Tag,
    },
    /// Another rank failed, and this one with it.
    #[error("rank {by} failed: {reason}")]
    Aborted {
        /// The culprit.
        by: usize,
        /// What happened there.
        reason: String,
    },
    /// The run was cancelled from outside.
    #[error("the run was cancelled: {reason}")]
    Cancelled {
        /// The reason that was given.
        reason: String,
    },
    /// A message did not come in time.
    #[error("rank {rank} waited {waited:?} for the {tag} of rank {from}")]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The rank that should have sent.
        from: usize,
        /// The message.
        tag: Tag,
        /// How long it waited.
        waited: Duration,
    },
    /// A rank ended without sending what another one needs.
    #[error("rank {from} ended without sending the {tag}, for which rank {rank} waits")]
    PeerLeft {
        /// The rank that waited.
        rank: usize,
        /// The rank that ended.
        from: usize,
        /// The message.
        tag: Tag,
    },
    /// A thread of a run panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// The system gave no thread for a rank.
    #[error("no thread for rank {rank}")]
    NoThread {
        /// The rank.
        rank: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// The number of modules of a run is not the number of ranks.
    #[error("expected one stage module for each of {expected} ranks, found {found}")]
    ModuleCount {
        /// Ranks of the schedule.
        expected: usize,
        /// Modules.
        found: usize,
    },
    /// A module of a comparison could not be made or read.
    #[error("a module of the comparison could not be made or read")]
    Module {
        /// Why not.
        source: BoxError,
    },
    /// A pipelined step gives other numbers than the same step without a pipeline.
    #[error(
        "{name}[{index}] is {found} in the pipelined step and {expected} without a pipeline: the module depends on the order of its calls, on the stages of its rank or on what hangs on its payloads"
    )]
    Unlike {
        /// The list.
        name: String,
        /// Place of the number in it.
        index: usize,
        /// The number without a pipeline.
        expected: f64,
        /// The number of the pipelined step.
        found: f64,
    },
    /// A pipelined step gives more or fewer numbers than the same step without a pipeline.
    #[error("{name} has {found} numbers in the pipelined step and {expected} without a pipeline")]
    UnlikeCount {
        /// The list.
        name: String,
        /// Numbers without a pipeline.
        expected: usize,
        /// Numbers of the pipelined step.
        found: usize,
    },
    /// A comparison with an unpipelined step has no numbers.
    #[error("{} to compare: the results of a module are lists of numbers, such as its gradients", match name {
        Some(name) => format!("{name} has no numbers"),
        None => "there are no results".to_owned(),
    })]
    NothingToCompare {
        /// The list that is empty in both steps; without one, there is no list.
        name: Option<String>,
    },
    /// A rank that shares cores with others did not get one.
    #[error("rank {rank} got no turn to compute")]
    NoTurn {
        /// The rank.
        rank: usize,
        /// Why not.
        source: BoxError,
    },
    /// A link could not carry a message.
    #[error("rank {rank} could not exchange the {tag} with rank {peer}")]
    Link {
        /// The rank.
        rank: usize,
        /// The other end.
        peer: usize,
        /// The message.
        tag: Tag,
        /// Why not.
        source: BoxError,
    },
}

/// A rule that an action of a schedule breaks, in words that follow the action.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The stage does not exist.
    #[error("names a stage beyond the {stages} of the schedule")]
    StageOutOfRange {
        /// Stages of the schedule.
        stages: usize,
    },
    /// The microbatch does not exist.
    #[error("names a microbatch beyond the {microbatches} of the schedule")]
    MicrobatchOutOfRange {
        /// Microbatches of the schedule.
        microbatches: usize,
    },
    /// The stage is run by two ranks.
    #[error("belongs to a stage that rank {owner} runs")]
    StageOfAnotherRank {
        /// The rank that runs it.
        owner: usize,
    },
    /// The action comes twice.
    #[error("comes a second time")]
    Repeated,
    /// The action comes before one that it needs.
    #[error("comes before {needs}")]
    TooEarly {
        /// The earlier action.
        needs: Action,
    },
    /// A recompute comes after the backward that it was for.
    #[error("comes after {backward}, which needs it")]
    TooLate {
        /// The backward.
        backward: Action,
    },
    /// A full backward and one of its halves both exist.
    #[error("repeats a part of {other}: a full backward is an input and a weight gradient")]
    BackwardTwice {
        /// The other action.
        other: Action,
    },
    /// Weight gradients of a stage add up in another order than the microbatches'.
    #[error("adds its weight gradients after those of microbatch {after}; the order must ascend")]
    WeightOrder {
        /// The microbatch that came before.
        after: MicrobatchId,
    },
    /// A stage recomputes although it keeps its activations in this schedule.
    #[error("recomputes on a stage that keeps its activations in this schedule")]
    NeverRecomputes,
    /// The buffer of the microbatch still holds another one.
    #[error("overwrites microbatch {live} in buffer {buffer} of {buffers}")]
    BufferInUse {
        /// The microbatch that is still needed.
        live: MicrobatchId,
        /// The buffer.
        buffer: usize,
        /// Buffers of the stage.
        buffers: usize,
    },
    /// The two ends of a hop order its messages differently.
    #[error("takes the {found} where the other end sends the {expected}")]
    MessageOrder {
        /// What the sender sends at this place.
        expected: Tag,
        /// What the receiver takes.
        found: Tag,
    },
    /// Two actions that are to run at once are not a forward and a full backward.
    #[error(
        "is to run at once with the next action, but the two are not a forward and a full backward"
    )]
    NoPair,
    /// A backward is to run at once with its own forward.
    #[error("runs at once with {backward}, which needs it")]
    PairedWithItself {
        /// The backward.
        backward: Action,
    },
    /// The list of buffer counts does not fit.
    #[error("runs on a stage without buffers")]
    NoBuffers,
}
