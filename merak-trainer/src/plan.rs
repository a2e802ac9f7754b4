//! The plan of a run: the graph, the cut, the schedule. Every rank makes the same plan on its own,
//! before anything runs.

mod draft;
mod faster;
mod prediction;
mod rank;
mod recompute;
mod room;
mod search;
mod stages;

pub(crate) use draft::Draft;
pub use faster::FasterSchedule;
pub use prediction::{Prediction, StageTimes};
pub(crate) use rank::{ParamUse, RankPrograms};

use crate::{CheckedArguments, CostModel, Error, Result, TrainSchedule};
use draft::with_adapter;
use merak_ckpt::LoraConfig;
use merak_mpu::{DType, Degrees};
use merak_partition::{Partition, PartitionReport, ReportOptions};
use merak_pipe::{Auto, Schedule};
use merak_tp::{LayerLists, rewrite};
use merak_trace::{
    Graph, Node, Op, Param, Placement, RecomputePlan, Shard, StageCuts, StageProgram, TiedParam,
    models::{Head, Model, ModelInfo, Objective, TraceOptions},
};
use merak_zero::ZeroStage;
use std::{collections::BTreeMap, sync::Arc};

/// A model, cut over the ranks of a run.
///
/// Making a plan is pure: no clock, no environment, no storage for weights. Every rank makes the
/// same one.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The model.
    pub model: Arc<dyn Model>,
    /// Its sizes.
    pub info: ModelInfo,
    /// The degrees.
    pub degrees: Degrees,
    /// Length of the training sequences.
    pub seq_length: usize,
    /// Length of the decoder's sequences, where it differs.
    pub target_length: Option<usize>,
    /// The graph that one rank of the tensor axis computes for a microbatch.
    pub graph: Graph,
    /// How tensor parallelism split it.
    pub tensor: merak_tp::Report,
    /// Which part of it runs on which stage.
    pub partition: Partition,
    /// The partition in the form that programs are made from.
    pub cuts: StageCuts,
    /// The order of the microbatches on each rank.
    pub schedule: Schedule,
    /// The adapter that is trained in place of the model, if any.
    pub lora: Option<Lora>,
    /// How the schedule was found, where it was searched.
    pub search: Option<Auto>,
    /// For each stage the rank of the pipeline that runs it.
    placement: Vec<usize>,
    lists: LayerLists,
    /// The element type in which frozen weights are kept, where nodes read another.
    frozen: Option<DType>,
    /// What each stage recomputes.
    recompute: Vec<RecomputePlan>,
    trace: TraceOptions,
}

/// The field of an adapter's description that names its base.
pub(crate) const BASE_NAME: &str = "base_model_name_or_path";

/// An adapter of a model.
#[derive(Debug, Clone)]
pub struct Lora {
    /// Its name.
    pub name: String,
    /// The layers that it stands beside; targets that were left open are filled in.
    pub config: LoraConfig,
}

/// The sizes and the output of a forward without gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Forward {
    /// Sequences.
    pub batch: usize,
    /// Positions of each sequence that pass.
    pub seq: usize,
    /// The length by which positions are scaled
    /// ([`Model::scaling_length`](merak_trace::models::Model::scaling_length)).
    pub context: usize,
    /// Whether it ends in logits, else in a loss.
    pub logits: bool,
}

impl Forward {
    /// The loss of whole sequences.
    pub(crate) fn loss(batch: usize, seq: usize) -> Self {
        Self {
            batch,
            seq,
            context: seq,
            logits: false,
        }
    }
}

impl Plan {
    /// Traces, rewrites and cuts a model as the arguments say, with the adapter that `lora_config`
    /// describes. Searches count operations.
    ///
    /// # Errors
    /// When the model cannot be split or cut that way, or the schedule needs other sizes.
    pub fn new(model: Arc<dyn Model>, args: &CheckedArguments) -> Result<Self> {
        Self::with_costs(model, args, &CostModel::Counted)
    }

    /// The same with searches by `costs`. All ranks of a run take one plan, as their measurements
    /// differ.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_costs(
        model: Arc<dyn Model>,
        args: &CheckedArguments,
        costs: &CostModel,
    ) -> Result<Self> {
        let draft = Draft::new(model, args)?;
        let size = args.pipeline_size();
        let partition = stages::partition(&draft, args, costs)?;
        let cuts = partition.cuts(&draft.graph)?;
        let recompute_under = |schedule: &Schedule| {
            let pipeline = recompute::Pipeline {
                graph: &draft.graph,
                partition: &partition,
                cuts: &cuts,
                schedule,
                placement: &schedule.placement()?,
            };
            pipeline.recompute(args)
        };
        let (schedule, recompute, search) = match args.train_schedule {
            TrainSchedule::Named(kind) => {
                let schedule = kind.generate(size)?;
                let recompute = recompute_under(&schedule)?;
                (schedule, recompute, None)
            }
            TrainSchedule::Auto => {
                let stages = search::Stages {
                    graph: &draft.graph,
                    cuts: &cuts,
                    costs,
                };
                let found = search::search(&stages, args, recompute_under)?;
                (found.schedule, found.recompute, found.search)
            }
        };
        Ok(Self {
            placement: schedule.placement()?,
            model: draft.model,
            info: draft.info,
            degrees: draft.degrees,
            seq_length: draft.seq_length,
            target_length: draft.target_length,
            graph: draft.graph,
            tensor: draft.tensor,
            partition,
            cuts,
            schedule,
            lora: draft.lora,
            search,
            lists: draft.lists,
            frozen: draft.frozen,
            recompute,
            trace: draft.trace,
        })
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

    /// The same plan for a run that trains nothing: no rank keeps gradients, optimizer state or
    /// `f32` masters.
    #[must_use]
    pub fn frozen(mut self) -> Self {
        let params = self.graph.params().iter();
        let names: Vec<_> = params.map(|param| param.name.clone()).collect();
        for name in names {
            if let Some(id) = self.graph.find_param(&name) {
                self.graph.param_mut(id).trainable = false;
            }
        }
        self
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
    pub(crate) fn placement(&self) -> &[usize] {
        &self.placement
    }

    /// The rank of the pipeline that runs the last stage, which has losses and logits.
    pub fn last_rank(&self) -> usize {
        self.rank_of(self.placement.len() - 1)
    }

    /// The stage with the model's last attention; after it, positions do not depend on each other.
    pub(crate) fn last_attention(&self) -> usize {
        let is_attention = |node: &Node| matches!(node.op, Op::Attention(_));
        let last = self.graph.nodes().iter().rposition(is_attention);
        let mut stages = (0..self.cuts.num_stages()).rev();
        let holder = last.and_then(|last| stages.find(|&s| self.cuts.nodes(s).contains(&last)));
        holder.unwrap_or(0)
    }

    /// A parameter's name and the layers that use it, if there are several.
    pub(crate) fn shared_layers(&self, param: &str) -> Option<(String, String)> {
        let reads = |node: &&Node| {
            let mut inputs = node.inputs.iter();
            inputs.any(|&input| {
                let read = self.graph.param_of(input);
                read.is_some_and(|read| self.graph.param(read).name == param)
            })
        };
        let mut layers: Vec<&str> = Vec::new();
        for node in self.graph.nodes().iter().filter(reads) {
            // What stands beside a layer, in a scope within its own, may read its weight too.
            let is_within = |layer: &&str| {
                let rest = node.scope.strip_prefix(*layer);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            if !layers.iter().any(is_within) {
                layers.push(&node.scope);
            }
        }
        (layers.len() > 1).then(|| (param.to_owned(), layers.join(" and ")))
    }

    /// The program that a stage trains with.
    ///
    /// # Errors
    /// When an operation has no gradient.
    pub fn training_program(&self, stage: usize) -> Result<StageProgram> {
        Ok(StageProgram::training(
            &self.graph,
            &self.cuts,
            stage,
            &self.recompute[stage],
        )?)
    }

    /// The forwards of stages alone, for other sizes, with their parameters as in training.
    ///
    /// # Errors
    /// When the sequence is longer than the model takes.
    pub fn inference_programs(
        &self,
        stages: impl IntoIterator<Item = usize>,
        forward: Forward,
    ) -> Result<Vec<StageProgram>> {
        let head = if forward.logits {
            Head::Logits
        } else {
            Head::Loss {
                label_smoothing: 0.0,
            }
        };
        let options = TraceOptions {
            batch: forward.batch,
            seq: forward.seq,
            context: Some(forward.context),
            ..self.trace.clone().with_head(head)
        };
        let model = self.model.trace(&options)?;
        let (model, _) = with_adapter(model, self.lora.clone(), self.info.family, self.frozen)?;
        let graph = rewrite(&model, &self.lists, self.degrees.tp)?.graph;
        // The same nodes in the same order, but for the loss at the end.
        let last = self.cuts.num_stages() - 1;
        let mut bounds: Vec<_> = (0..=last)
            .map(|stage| self.cuts.nodes(stage).start)
            .collect();
        bounds.push(graph.nodes().len());
        let cuts = StageCuts::new(&graph, bounds)?;
        let program = |stage| Ok(StageProgram::inference(&graph, &cuts, stage)?);
        stages.into_iter().map(program).collect()
    }

    /// What each stage holds, runs and exchanges.
    ///
    /// # Errors
    /// When a stage cannot be differentiated.
    pub fn partition_report(&self, args: &CheckedArguments) -> Result<PartitionReport> {
        let stages = self.cuts.num_stages();
        let divided = if args.zero_stage == ZeroStage::Replicated {
            1
        } else {
            args.dp
        };
        let options = ReportOptions {
            live_microbatches: self.schedule.live_microbatches(),
            recompute: self.recompute.clone(),
            placement: self.placement.clone(),
            optimizer_bytes_per_param: 8.0 / divided as f64,
            ..ReportOptions::one_f_one_b(stages, self.schedule.size.microbatches)
        };
        Ok(merak_partition::report(
            &self.graph,
            &self.partition,
            &options,
        )?)
    }

    /// Whether every stage keeps all values that its backward reads.
    pub fn recomputes_nothing(&self) -> bool {
        self.recompute.iter().all(RecomputePlan::is_empty)
    }

    /// How tensor parallelism cuts parameters, also with one tensor-parallel rank.
    pub(crate) fn param_cuts(&self) -> Result<BTreeMap<String, Shard>> {
        if self.degrees.tp == 1 {
            return Ok(merak_tp::cuts(&self.graph, &self.lists)?);
        }
        let params = self.graph.params().iter();
        let cuts = params.filter_map(|param| match &param.placement {
            Placement::Shard(shard) => Some((param.name.clone(), shard.clone())),
            Placement::Replicate | Placement::Partial => None,
        });
        Ok(cuts.collect())
    }

    /// Checks that the model continues texts, which `what` needs.
    ///
    /// # Errors
    /// [`Error::OtherObjective`] for a model that learns something else.
    pub fn expect_causal(&self, what: &'static str) -> Result<()> {
        match self.model.objective() {
            Objective::CausalLm => Ok(()),
            objective => Err(Error::OtherObjective {
                what,
                family: self.info.family,
                objective: objective.to_string(),
            }),
        }
    }

    /// The weights that several ranks of the pipeline use, and these ranks, ascending.
    pub(crate) fn tied_across_ranks(&self) -> Vec<(TiedParam, Vec<usize>)> {
        let tied = self.cuts.tied(&self.graph).into_iter();
        let with_ranks = tied.map(|weight| {
            let mut ranks: Vec<_> = weight.stages.iter().map(|&s| self.rank_of(s)).collect();
            ranks.sort_unstable();
            ranks.dedup();
            (weight, ranks)
        });
        with_ranks.filter(|(_, ranks)| ranks.len() > 1).collect()
    }

    /// The parameters that are trained, in the order of the graph.
    pub fn trained_params(&self) -> impl Iterator<Item = &Param> {
        let params = self.graph.params().iter();
        params.filter(|param| param.trainable)
    }

    /// Floating-point operations per token, forward and backward: six per trained parameter, and
    /// four per frozen one, which has no gradient. Attention scores are left out.
    pub fn flops_per_token(&self) -> f64 {
        let trained: usize = self.trained_params().map(|param| param.full.numel()).sum();
        4.0 * self.graph.num_elements() as f64 + 2.0 * trained as f64
    }
}
