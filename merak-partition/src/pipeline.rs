//! A graph laid out over the ranks of a pipeline: stages, schedule, recomputation, and what follows
//! from them for memory and time.

mod faster;
mod prediction;
mod recompute;
mod schedule_search;
mod stages;

pub use faster::FasterSchedule;
pub use prediction::{Prediction, StageTimes};
pub use recompute::{Recompute, RecomputeOp};

use crate::{
    Error, ParamBytes, Partition, PartitionReport, RankPrograms, ReportOptions, Result, Segments,
    StageMethod, StepCosts, TrainingBytes, ValueWidth,
};
use merak_pipe::{Action, Auto, Schedule, ScheduleKind, Size};
use merak_trace::{Graph, RecomputePlan, StageCuts, StageProgram, TiedParam};
use std::{fmt, sync::Arc};

/// The order of the work on each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleChoice {
    /// That of a schedule with a name.
    Named(ScheduleKind),
    /// The shortest that a search finds for the costs of the stages.
    Searched,
}

impl ScheduleChoice {
    /// Every choice of a training.
    pub fn all() -> impl Iterator<Item = Self> {
        let kinds = ScheduleKind::ALL.into_iter();
        let training = kinds.filter(|kind| kind.is_training());
        training.map(Self::Named).chain([Self::Searched])
    }

    /// The name that users write.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Named(kind) => kind.as_str(),
            Self::Searched => "auto",
        }
    }

    /// The choice of a training with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        if name == Self::Searched.as_str() {
            return Some(Self::Searched);
        }
        let kind: ScheduleKind = name.parse().ok()?;
        kind.is_training().then_some(Self::Named(kind))
    }

    /// The stages per rank that it prescribes.
    pub fn fixed_chunks(self) -> Option<usize> {
        match self {
            Self::Named(kind) => kind.fixed_chunks(),
            Self::Searched => None,
        }
    }
}

impl fmt::Display for ScheduleChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The rule that gives segments to stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StageLayout {
    /// A method that looks at the segments alone.
    Method(StageMethod),
    /// The shortest simulated step of the schedule, by moves around the stage with the most work.
    Autopipe,
    /// The shortest simulated step of the schedule, by trying every partition that may be the best.
    Exact,
}

/// Settings of the layout of a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineOptions {
    /// Ranks, microbatches and stages per rank.
    pub size: Size,
    /// The stages per rank that were asked for: those of the size, or 1 where the schedule is a V,
    /// although its ranks run two.
    pub virtual_stages: usize,
    /// The order of the work.
    pub schedule: ScheduleChoice,
    /// The rule for stages.
    pub layout: StageLayout,
    /// Microbatches of the step that a search for stages simulates; unset: those of the size.
    pub search_microbatches: Option<usize>,
    /// The time of a message between stages in a search for stages; unset: that of the costs.
    pub comm_cost: Option<f64>,
    /// The most bytes that a search gives a rank.
    pub memory_limit: Option<usize>,
    /// Bytes that a rank keeps for each element of its parameters.
    pub param_bytes: ParamBytes,
    /// How wide values lie in memory.
    pub value_width: ValueWidth,
    /// The values that backwards recompute.
    pub recompute: Recompute,
}

impl PipelineOptions {
    /// The bytes that a rank with these programs needs to train by these actions.
    fn training_bytes(
        &self,
        rank: &RankPrograms,
        actions: &[Action],
        microbatches: usize,
    ) -> TrainingBytes {
        rank.training_bytes(&self.param_bytes, self.value_width, actions, microbatches)
    }
}

/// Searches for stages under a limit of memory, before those that need least are taken.
const SEARCHES: usize = 3;

/// A graph that is laid out over the ranks of a pipeline.
#[derive(Debug, Clone)]
pub struct Pipeline {
    /// The graph that one rank of the tensor axis computes for a microbatch.
    pub graph: Graph,
    /// Which part of it runs on which stage.
    pub partition: Partition,
    /// The partition in the form that programs are made from.
    pub cuts: StageCuts,
    /// The order of the microbatches on each rank.
    pub schedule: Schedule,
    /// The search that found the schedule, where there was one.
    pub search: Option<Auto>,
    options: PipelineOptions,
    /// For each stage the rank of the pipeline that runs it.
    placement: Vec<usize>,
    /// The recomputation of each stage.
    recompute: Vec<RecomputePlan>,
}

impl Pipeline {
    /// Lays the segments of a graph out over stages, orders the work of each rank, and chooses what
    /// is recomputed. Searches use `costs`.
    ///
    /// # Errors
    /// When the segments cannot be laid out that way, the schedule needs another size, a limit of
    /// memory cannot be kept, or an operation has no gradient.
    pub fn new(
        graph: Graph,
        segments: Segments,
        options: PipelineOptions,
        costs: &dyn StepCosts,
    ) -> Result<Self> {
        match (&options.layout, options.memory_limit) {
            (StageLayout::Autopipe | StageLayout::Exact, Some(limit)) => {
                Self::within(limit, &|allowed| {
                    let (graph, segments) = (graph.clone(), segments.clone());
                    Self::laid(graph, segments, options.clone(), Some(allowed), costs)
                })
            }
            _ => Self::laid(graph, segments, options, None, costs),
        }
    }

    /// The pipeline by a search for stages under which no rank needs more bytes than the limit.
    /// `search` gives the stages a number of bytes, and counts those of each segment alone, so the
    /// programs of whole stages have the last word. Where no stages keep the limit, those that need
    /// least are looked at: another schedule may keep it on them.
    ///
    /// # Errors
    /// Those of `search`, with the least limit that would suffice.
    fn within(limit: usize, search: &dyn Fn(usize) -> Result<Self>) -> Result<Self> {
        let mut allowed = limit;
        for _ in 0..SEARCHES {
            match search(allowed) {
                Ok(found) => match found.fullest_rank()?.saturating_sub(limit) {
                    0 => return Ok(found),
                    beyond => allowed = allowed.saturating_sub(beyond),
                },
                Err(Error::StageMemory { .. } | Error::ScheduleMemory { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        let smallest = match search(0) {
            Err(Error::StageMemory { least, .. }) => search(least)?,
            other => other?,
        };
        let least = smallest.fullest_rank()?;
        if least > limit {
            return Err(Error::StageMemory { limit, least });
        }
        Ok(smallest)
    }

    /// The same with stages of at most `allowed` bytes, as a search for them counts.
    fn laid(
        graph: Graph,
        segments: Segments,
        options: PipelineOptions,
        allowed: Option<usize>,
        costs: &dyn StepCosts,
    ) -> Result<Self> {
        let partition = stages::partition(&graph, segments, &options, allowed, costs)?;
        let cuts = partition.cuts(&graph)?;
        let laid_out = LaidOut {
            graph: &graph,
            partition: &partition,
            cuts: &cuts,
            options: &options,
        };
        let (schedule, recompute, search) = match options.schedule {
            ScheduleChoice::Named(kind) => {
                let schedule = kind.generate(options.size)?;
                let recompute = laid_out.recompute(&schedule)?;
                (schedule, recompute, None)
            }
            ScheduleChoice::Searched => {
                let found = schedule_search::search(laid_out, costs)?;
                (found.schedule, found.recompute, found.search)
            }
        };
        Ok(Self {
            placement: schedule.placement()?,
            graph,
            partition,
            cuts,
            schedule,
            search,
            options,
            recompute,
        })
    }

    fn laid_out<'a>(&'a self, options: &'a PipelineOptions) -> LaidOut<'a> {
        LaidOut {
            graph: &self.graph,
            partition: &self.partition,
            cuts: &self.cuts,
            options,
        }
    }

    /// The name of the schedule, for people; for a searched schedule, also the named one that it
    /// equals or started from.
    pub fn schedule_name(&self) -> String {
        let name = &self.schedule.name;
        let Some((start, _)) = self.search.as_ref().and_then(|found| found.start) else {
            return name.clone();
        };
        let is_start = start
            .generate(self.schedule.size)
            .is_ok_and(|start| start.actions == self.schedule.actions);
        if is_start {
            format!("{name} ({start})")
        } else {
            format!("{name} (from {start})")
        }
    }

    /// The stages that a rank of the pipeline runs, in model order.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> {
        let stages = self.placement.iter().enumerate();
        stages
            .filter(move |(_, owner)| **owner == rank)
            .map(|(stage, _)| stage)
    }

    /// The rank of the pipeline that runs a stage.
    ///
    /// # Panics
    /// When there is no such stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.placement[stage]
    }

    /// For each stage the rank of the pipeline that runs it.
    pub fn placement(&self) -> &[usize] {
        &self.placement
    }

    /// The rank of the pipeline that runs the last stage, which has losses and logits.
    pub fn last_rank(&self) -> usize {
        self.rank_of(self.placement.len() - 1)
    }

    /// Whether every stage keeps all values that its backward reads.
    pub fn recomputes_nothing(&self) -> bool {
        self.recompute.iter().all(RecomputePlan::is_empty)
    }

    /// The program that a stage trains with.
    ///
    /// # Errors
    /// When an operation has no gradient.
    pub fn training_program(&self, stage: usize) -> Result<StageProgram> {
        program(&self.graph, &self.cuts, stage, &self.recompute[stage])
    }

    /// The programs that a rank of the pipeline trains with.
    ///
    /// # Errors
    /// When an operation has no gradient.
    pub fn rank_programs(&self, rank: usize) -> Result<RankPrograms> {
        let program = |stage| Ok((stage, Arc::new(self.training_program(stage)?)));
        let stages = self.stages_of(rank).map(program);
        Ok(RankPrograms::of(stages.collect::<Result<_>>()?))
    }

    /// The weights that several ranks of the pipeline use, and these ranks, ascending.
    pub fn tied_across_ranks(&self) -> Vec<(TiedParam, Vec<usize>)> {
        let tied = self.cuts.tied(&self.graph).into_iter();
        let with_ranks = tied.map(|weight| {
            let mut ranks: Vec<_> = weight.stages.iter().map(|&s| self.rank_of(s)).collect();
            ranks.sort_unstable();
            ranks.dedup();
            (weight, ranks)
        });
        with_ranks.filter(|(_, ranks)| ranks.len() > 1).collect()
    }

    /// The bytes that a rank of the pipeline needs to train.
    ///
    /// # Errors
    /// When an operation has no gradient.
    pub fn training_bytes(&self, rank: usize) -> Result<TrainingBytes> {
        Ok(self.options.training_bytes(
            &self.rank_programs(rank)?,
            &self.schedule.actions[rank],
            self.schedule.size.microbatches,
        ))
    }

    /// The work, memory and messages of each stage.
    ///
    /// # Errors
    /// When a stage cannot be differentiated.
    pub fn report(&self) -> Result<PartitionReport> {
        let options = ReportOptions {
            live_microbatches: self.schedule.live_microbatches(),
            recompute: self.recompute.clone(),
            placement: self.placement.clone(),
            param_bytes: self.options.param_bytes,
            value_width: self.options.value_width,
        };
        crate::report(&self.graph, &self.partition, &options)
    }
}

/// A graph in stages, before the work of the ranks is ordered.
#[derive(Debug, Clone, Copy)]
struct LaidOut<'a> {
    graph: &'a Graph,
    partition: &'a Partition,
    cuts: &'a StageCuts,
    options: &'a PipelineOptions,
}

/// The program of a stage.
fn program(
    graph: &Graph,
    cuts: &StageCuts,
    stage: usize,
    recompute: &RecomputePlan,
) -> Result<StageProgram> {
    StageProgram::training(graph, cuts, stage, recompute).map_err(|source| Error::Program {
        stage,
        source: Box::new(source),
    })
}

impl Segments {
    /// The program of each segment, as if it were a stage, with what it recomputes; `[]` is
    /// nothing.
    ///
    /// # Errors
    /// [`Error::OtherGraph`], and [`Error::Program`] when an operation has no gradient.
    pub fn programs(
        &self,
        graph: &Graph,
        recompute: &[RecomputePlan],
    ) -> Result<Vec<StageProgram>> {
        let cuts = self.apart().cuts(graph)?;
        let nothing = RecomputePlan::default();
        let of = |segment| {
            let plan = recompute.get(segment).unwrap_or(&nothing);
            program(graph, &cuts, segment, plan)
        };
        (0..self.len()).map(of).collect()
    }

    /// Each segment as a stage of its own.
    fn apart(&self) -> Partition {
        Partition {
            stage_bounds: (0..=self.len()).collect(),
            segments: self.clone(),
            method: String::new(),
        }
    }
}
