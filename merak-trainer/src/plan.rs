//! What every rank decides alone and alike, before anything runs: the graph, the cut, the schedule.

mod rank;
mod recompute;
mod search;
mod stages;

pub(crate) use rank::{ParamUse, RankPrograms};

use crate::{CheckedArguments, Error, Result, SplitMethod, TrainSchedule};
use merak_ckpt::{LoraConfig, adapt};
use merak_mpu::{DType, Degrees};
use merak_partition::{Partition, PartitionReport, ReportOptions, SegmentOptions};
use merak_pipe::{Auto, Schedule, ScheduleKind};
use merak_tp::{LayerLists, rewrite};
use merak_trace::{
    Graph, Param, Placement, RecomputePlan, Shard, StageCuts, StageProgram, TiedParam,
    models::{Head, Model, ModelInfo, Objective, TraceOptions},
};
use merak_zero::ZeroStage;
use std::{collections::BTreeMap, sync::Arc};

/// A model, cut over the ranks of a run.
///
/// Making a plan is pure: no clock, no environment, no storage for weights. Every rank makes the same one.
#[derive(Debug)]
pub struct Plan {
    /// The model.
    pub model: Arc<dyn Model>,
    /// Its sizes.
    pub info: ModelInfo,
    /// The degrees.
    pub degrees: Degrees,
    /// Length of the training sequences.
    pub seq_length: usize,
    /// Length of what a decoder makes of them, where it is another.
    pub target_length: Option<usize>,
    /// What one rank of the tensor axis computes for a microbatch.
    pub graph: Graph,
    /// How tensor parallelism split it.
    pub tensor: merak_tp::Report,
    /// Which part of it runs on which stage.
    pub partition: Partition,
    /// The same in the form that programs are made from.
    pub cuts: StageCuts,
    /// The order of the microbatches on each rank.
    pub schedule: Schedule,
    /// The adapter that is trained in place of the model, if one is.
    pub lora: Option<Lora>,
    /// How it was found, where it was searched.
    pub search: Option<Auto>,
    /// For each stage the rank of the pipeline that runs it.
    placement: Vec<usize>,
    lists: LayerLists,
    /// For each stage what it computes again.
    recompute: Vec<RecomputePlan>,
    trace: TraceOptions,
}

/// An adapter of a model.
#[derive(Debug, Clone)]
pub struct Lora {
    /// Its name.
    pub name: String,
    /// Which layers it stands beside; targets that were left open are filled in.
    pub config: LoraConfig,
}

/// What a forward without gradients is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Forward {
    /// Sequences.
    pub batch: usize,
    /// Positions of each that pass.
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
    /// Traces, rewrites and cuts a model as the arguments say, with the adapter that `lora_config` describes.
    ///
    /// # Errors
    /// When the model cannot be split or cut that way, or the schedule needs other sizes.
    pub fn new(model: Arc<dyn Model>, args: &CheckedArguments) -> Result<Self> {
        let info = model.info();
        if args.pp > info.num_layers {
            return Err(Error::FewerLayers {
                layers: info.num_layers,
                stages: args.pp,
            });
        }
        for (key, token) in [
            ("eos_token_id", args.eos_token_id),
            ("pad_token_id", args.pad_token_id),
        ] {
            let vocab = info.vocab_size;
            if let Some(token) = token.filter(|&token| token as usize >= vocab) {
                return Err(Error::UnknownToken { key, token, vocab });
            }
        }
        let degrees = Degrees {
            dp: args.dp,
            tp: args.tp,
            pp: args.pp,
            sp: 1,
        };
        let lengths = args.seq_length.unwrap_or_else(|| info.max_seq.into());
        let seq_length = lengths.input;
        let trace = TraceOptions {
            head: Head::Loss {
                label_smoothing: args.label_smoothing_factor,
            },
            untie: args.no_tie_modules,
            init_std: args.init_method_std,
            dtype: if args.bf16 { DType::BF16 } else { DType::F32 },
            target_seq: lengths.target,
            ..TraceOptions::training(args.per_device_train_batch_size, seq_length)
        };
        let lists = layer_lists(args, info.family)?;
        let lora = lora(args)?;
        let (graph, lora) = with_adapter(model.trace(&trace)?, lora, info.family)?;
        let rewritten = rewrite(&graph, &lists, args.tp)?;
        let options = SegmentOptions {
            method: split_method(args.split_method),
            shard_count: args.shard_count,
            custom_split_points: args.custom_split_points.clone().unwrap_or_default(),
            num_layers: args.num_layers.or(Some(info.num_layers)),
            ..SegmentOptions::for_model(&info, args.num_stages())
        };
        let size = args.pipeline_size();
        let partition = stages::partition(&rewritten.graph, &options, args)?;
        let cuts = partition.cuts(&rewritten.graph)?;
        let recompute_under = |schedule: &Schedule| {
            let pipeline = recompute::Pipeline {
                graph: &rewritten.graph,
                partition: &partition,
                cuts: &cuts,
                schedule,
                placement: &schedule.placement()?,
            };
            pipeline.recompute(args)
        };
        let (schedule, search) = match args.train_schedule {
            TrainSchedule::Named(kind) => (kind.generate(size)?, None),
            TrainSchedule::Auto => {
                // What is recomputed decides the costs, and may in turn depend on the schedule.
                let usual = ScheduleKind::Interleaved.generate(size)?;
                let recompute = recompute_under(&usual)?;
                let found = search::search(&rewritten.graph, &cuts, &recompute, size)?;
                (found.schedule.clone(), Some(found))
            }
        };
        let placement = schedule.placement()?;
        let recompute = recompute_under(&schedule)?;
        Ok(Self {
            model,
            info,
            degrees,
            seq_length,
            target_length: lengths.target,
            graph: rewritten.graph,
            tensor: rewritten.report,
            partition,
            cuts,
            schedule,
            lora,
            search,
            placement,
            lists,
            recompute,
            trace,
        })
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

    /// The rank of the pipeline that runs the last stage, which has losses and logits.
    pub fn last_rank(&self) -> usize {
        self.rank_of(self.placement.len() - 1)
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
        let (model, _) = with_adapter(model, self.lora.clone(), self.info.family)?;
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
            optimizer_bytes_per_param: 8.0 / divided as f64,
            ..ReportOptions::one_f_one_b(stages, self.schedule.size.microbatches)
        };
        Ok(merak_partition::report(
            &self.graph,
            &self.partition,
            &options,
        )?)
    }

    /// How tensor parallelism cuts parameters, with one tensor-parallel rank too.
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

    /// Floating-point operations per token, forward and backward, by the usual count of six per parameter, of which
    /// frozen ones save the two for their gradient (attention scores left out).
    pub fn flops_per_token(&self) -> f64 {
        let trained: usize = self.trained_params().map(|param| param.full.numel()).sum();
        4.0 * self.graph.num_elements() as f64 + 2.0 * trained as f64
    }
}

/// What `lora_config` asks for.
fn lora(args: &CheckedArguments) -> Result<Option<Lora>> {
    let Some(path) = &args.lora_config else {
        return Ok(None);
    };
    Ok(Some(Lora {
        name: args.adapter_name.clone(),
        config: LoraConfig::read(&path.0)?,
    }))
}

/// A model's graph with an adapter in it, and what was left open of the adapter filled in.
fn with_adapter(graph: Graph, lora: Option<Lora>, family: &str) -> Result<(Graph, Option<Lora>)> {
    let Some(Lora { name, config }) = lora else {
        return Ok((graph, None));
    };
    let adapted = adapt(&graph, &config, &name, family)?;
    let config = adapted.config;
    Ok((adapted.graph, Some(Lora { name, config })))
}

fn layer_lists(args: &CheckedArguments, family: &str) -> Result<LayerLists> {
    let given = &args.tp_layer_lists;
    let set = (given.col_para_list.is_some() || given.row_para_list.is_some()).then(|| {
        let list = |list: &Option<Vec<String>>| list.clone().unwrap_or_default();
        LayerLists::col_row(list(&given.col_para_list), list(&given.row_para_list))
    });
    Ok(LayerLists::resolve(
        set.or_else(merak_tp::tp_layer_lists).as_ref(),
        family,
        args.tp,
    )?)
}

fn split_method(method: SplitMethod) -> merak_partition::SplitMethod {
    match method {
        SplitMethod::FarthestMinDeps => merak_partition::SplitMethod::FarthestMinDeps,
        SplitMethod::NearestMinDeps => merak_partition::SplitMethod::NearestMinDeps,
        SplitMethod::LayerSplit => merak_partition::SplitMethod::LayerSplit,
    }
}
