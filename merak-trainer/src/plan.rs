//! The plan of a run: the graph, the cut, the schedule. Every rank makes the same plan on its own,
//! before anything runs.

mod bounds;
mod draft;
mod groups;
mod loss;
mod magnitudes;
mod outputs;

pub(crate) use draft::SegmentedGraph;
pub use draft::{Draft, PlanInputs};
pub(crate) use groups::ParamGroups;
pub use loss::{CustomLoss, LossCount, LossFn};
pub(crate) use magnitudes::magnitude;
pub use merak_partition::{FasterSchedule, Prediction, StageTimes};
pub use outputs::ForwardOutput;

use crate::{
    config::{CheckedArguments, Offload, RecomputeMode},
    error::{ConfigError, Error, PlanError, Result},
};
use bounds::bounds_in;
use draft::with_adapter;
use merak_ckpt::LoraConfig;
use merak_partition::{
    Counted, ParamBytes, PartitionMethod, PartitionReport, Pipeline, PipelineOptions, Recompute,
    RecomputeOp, Share, StageLayout, StageMethod, StepCosts, ValueWidth,
};
use merak_tp::{Options, Sequence, rewrite_with};
use merak_trace::{
    Axis, Node, Param, Shard, StageCuts, StageProgram,
    models::{Head, Model, Objective, TraceOptions},
    op::Class,
};
use merak_zero::{KeptBytes, ZeroConfig};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
};

/// A model, cut over the ranks of a run.
///
/// Making a plan reads no clock, no environment and no file, and stores no weights: every rank
/// makes the same one.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The model, rewritten for the tensor and the sequence axis.
    pub draft: Draft,
    /// The graph of a rank, laid out over the ranks of the pipeline.
    pipeline: Pipeline,
}

impl Deref for Plan {
    type Target = Pipeline;

    fn deref(&self) -> &Pipeline {
        &self.pipeline
    }
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
    /// Positions of each sequence that pass; of the encoder's where there is one.
    pub seq: usize,
    /// Positions of a decoder beside an encoder; unset: as in training.
    pub target: Option<usize>,
    /// The length by which positions are scaled
    /// ([`Model::scaling_length`](merak_trace::models::Model::scaling_length)).
    pub context: usize,
    /// What it ends in.
    pub output: ForwardOutput,
}

impl Forward {
    /// The loss of whole sequences.
    pub(crate) fn loss(batch: usize, seq: usize) -> Self {
        Self {
            batch,
            seq,
            target: None,
            context: seq,
            output: ForwardOutput::Loss,
        }
    }

    /// The logits of positions that follow others; `source` is how many positions of an encoder
    /// pass before those of its decoder.
    pub(crate) fn next(positions: usize, source: Option<usize>) -> Self {
        Self {
            target: source.map(|_| positions),
            output: ForwardOutput::Logits,
            ..Self::loss(1, source.unwrap_or(positions))
        }
    }
}

impl Plan {
    /// Traces, rewrites and cuts a model as the arguments say. Searches count operations.
    ///
    /// # Errors
    /// When the model cannot be split or cut that way, or the schedule needs other sizes.
    pub fn new(inputs: &PlanInputs, args: &CheckedArguments) -> Result<Self> {
        Self::with_costs(inputs, args, &Counted)
    }

    /// As [`Plan::new`], with searches by `costs`. All ranks of a run take one plan, as their
    /// measurements differ.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_costs(
        inputs: &PlanInputs,
        args: &CheckedArguments,
        costs: &dyn StepCosts,
    ) -> Result<Self> {
        let (draft, SegmentedGraph { graph, segments }) = Draft::new(inputs, args)?;
        let pipeline = Pipeline::new(graph, segments, pipeline_options(args)?, costs)?;
        let plan = Self { draft, pipeline };
        magnitudes::check(&plan)?;
        Ok(plan)
    }

    /// The same plan for a run that trains nothing: no rank keeps gradients, optimizer state or
    /// `f32` masters.
    #[must_use]
    pub fn frozen(mut self) -> Self {
        let params = self.graph.params().iter();
        let names: Vec<_> = params.map(|param| param.name.clone()).collect();
        for name in names {
            if let Some(id) = self.graph.find_param(&name) {
                self.pipeline.graph.param_mut(id).trainable = false;
            }
        }
        self
    }

    /// Whether a run of this plan trains nothing.
    pub(crate) fn is_frozen(&self) -> bool {
        self.trained_params().next().is_none()
    }

    /// Whether an encoder reads the prompts and a decoder writes the texts.
    pub fn has_encoder(&self) -> bool {
        self.draft.model.objective() == Objective::SequenceToSequence
    }

    /// The stage with the model's last attention; after it, positions do not depend on each other.
    pub(crate) fn last_attention(&self) -> usize {
        let is_attention = |node: &Node| node.op.class() == Class::Attention;
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

    /// The forwards of stages alone, for other sizes, with their parameters as in training.
    ///
    /// # Errors
    /// When the sequence is longer than the model takes.
    pub fn inference_programs(
        &self,
        stages: impl IntoIterator<Item = usize>,
        forward: Forward,
    ) -> Result<Vec<StageProgram>> {
        let head = if forward.output.has_loss() {
            Head::Loss {
                label_smoothing: 0.0,
            }
        } else {
            Head::Logits
        };
        let trace = self.draft.trace.clone().with_head(head);
        let options = TraceOptions {
            batch: forward.batch,
            seq: forward.seq,
            target_seq: forward.target.or(trace.target_seq),
            context: Some(forward.context),
            unpadded: !forward.output.has_loss(),
            ..trace
        };
        let draft = &self.draft;
        let traced = draft.model.trace(&options)?;
        let (family, lora) = (draft.info.family, draft.lora.clone());
        let (mut adapted, ..) = with_adapter(traced, lora, family, draft.kept)?;
        forward.output.add_logits_to(&mut adapted)?;
        // Batches of evaluations and the positions of a decoding have any length: they pass whole.
        let passing_whole = |options: &Options| {
            let sequence = match options.sequence {
                Sequence::Cut { dim } => Sequence::WholeLikeCut { dim },
                whole => whole,
            };
            options.clone().with_sequence(sequence)
        };
        // The ranks of a sequence share that of an evaluation as in training.
        let is_shared = forward.output == ForwardOutput::Loss
            && forward.seq == draft.seq_length
            && options.target_seq == draft.target_length;
        let sequence = if is_shared {
            draft.sequence.clone()
        } else {
            passing_whole(&draft.sequence)
        };
        let split = rewrite_with(&adapted, &passing_whole(&draft.split))?.graph;
        let mut graph = rewrite_with(&split, &sequence)?.graph;
        forward.output.add_hidden_to(&mut graph)?;
        let bounds = bounds_in(&self.cuts, &self.graph, &adapted, &graph);
        let cuts = StageCuts::new(&graph, bounds)?;
        let program = |stage| Ok(StageProgram::inference(&graph, &cuts, stage)?);
        stages.into_iter().map(program).collect()
    }

    /// The logits of a model, traced in the sizes of this plan.
    ///
    /// # Errors
    /// When the model takes no sequences of that length.
    pub(crate) fn logits_of(&self, model: &dyn Model) -> merak_trace::Result<merak_trace::Graph> {
        model.trace(&self.draft.trace.clone().with_head(Head::Logits))
    }

    /// The work, memory and messages of each stage.
    ///
    /// # Errors
    /// When a stage cannot be differentiated.
    pub fn partition_report(&self) -> Result<PartitionReport> {
        Ok(self.report()?)
    }

    /// The decisions of the plan as text: plans that run alike have the same text.
    ///
    /// # Errors
    /// As [`Plan::partition_report`].
    pub fn digest(&self) -> Result<String> {
        let report = self.partition_report()?.to_text(None);
        Ok(format!("{report}\n{}", self.schedule.to_csv()))
    }

    /// The cuts of parameters by tensor parallelism, also with one tensor-parallel rank.
    pub(crate) fn param_cuts(&self) -> Result<BTreeMap<String, Shard>> {
        if self.draft.degrees.tp == 1 {
            return Ok(merak_tp::cuts_with(&self.graph, &self.draft.split)?);
        }
        let params = self.graph.params().iter();
        let cuts = params.filter_map(|param| {
            let shard = param.placements.on(Axis::Tensor).as_shard()?;
            Some((param.name.clone(), shard.clone()))
        });
        Ok(cuts.collect())
    }

    /// Checks that the model writes texts, which `what` needs.
    ///
    /// # Errors
    /// [`PlanError::OtherObjective`] for a model that learns something else.
    pub fn expect_generative(&self, what: &'static str) -> Result<()> {
        match self.draft.model.objective() {
            Objective::CausalLm | Objective::SequenceToSequence => Ok(()),
            objective => Err(Error::Plan(PlanError::OtherObjective {
                what,
                family: self.draft.info.family,
                objective: objective.to_string(),
            })),
        }
    }

    /// The parameters that are trained, in the order of the graph.
    pub fn trained_params(&self) -> impl Iterator<Item = &Param> {
        let params = self.graph.params().iter();
        params.filter(|param| param.trainable)
    }

    /// Floating-point operations per token of the input, forward and backward, by the usual rule:
    /// `6 N + 12 layers hidden seq`. `N` are the parameters without those that are only looked up:
    /// embeddings of tokens and positions count no product, while a table that is the output head
    /// too counts. A frozen parameter has no gradient and counts 4 in place of 6. Scores and values
    /// of attention count over the whole sequence, also where half of it is masked. Recomputation
    /// does not count.
    pub fn flops_per_token(&self) -> f64 {
        let nodes = self.graph.nodes().iter();
        let nodes = nodes.filter(|node| node.op.class() != Class::Lookup);
        let read = nodes.flat_map(|node| &node.inputs);
        let multiplied: BTreeSet<_> = read
            .filter_map(|&value| self.graph.param_of(value))
            .collect();
        let each = multiplied.into_iter().map(|id| {
            let param = self.graph.param(id);
            let passes = if param.trainable { 6.0 } else { 4.0 };
            passes * param.full.numel() as f64
        });
        let info = &self.draft.info;
        let attention = 12.0 * (info.num_layers * info.hidden_size) as f64;
        each.sum::<f64>() + attention * self.draft.seq_length as f64
    }
}

/// The settings of the pipeline among the arguments.
fn pipeline_options(args: &CheckedArguments) -> Result<PipelineOptions> {
    let method = StageLayout::Method;
    Ok(PipelineOptions {
        size: args.pipeline_size(),
        virtual_stages: args.virtual_stages,
        schedule: args.train_schedule,
        layout: match args.partition_method {
            PartitionMethod::Uniform => method(StageMethod::Uniform),
            PartitionMethod::UniformFloor => method(StageMethod::UniformFloor),
            PartitionMethod::Parameters => method(StageMethod::Parameters),
            PartitionMethod::Custom => {
                let missing = || {
                    Error::Config(ConfigError::MissingKey {
                        key: "custom_partition",
                        advice: "partition_method = \"custom\" needs its boundaries".to_owned(),
                    })
                };
                let bounds = args.custom_partition.clone().ok_or_else(missing)?;
                method(StageMethod::Custom(bounds.0))
            }
            PartitionMethod::Autopipe => StageLayout::Autopipe,
            PartitionMethod::Exact => StageLayout::Exact,
        },
        search_microbatches: args.autopipe.micro_batches,
        comm_cost: args.autopipe.comm_cost,
        memory_limit: args.autopipe.memory_limit,
        param_bytes: param_bytes(args, args.replicas()),
        value_width: value_width(args),
        recompute: recompute(args),
    })
}

/// How wide the values of a microbatch lie in memory.
pub(crate) fn value_width(args: &CheckedArguments) -> ValueWidth {
    match args.autocast() {
        Some(_) => ValueWidth::Autocast,
        None => ValueWidth::Typed,
    }
}

/// Bytes in memory of each of `replicas` ranks with the same parameters for an element of them.
pub(crate) fn param_bytes(args: &CheckedArguments, replicas: usize) -> ParamBytes {
    let kept = kept_bytes(args, replicas);
    if args.offload() != Some(Offload::Disk) {
        return kept;
    }
    ParamBytes {
        master: Share::whole(0),
        state: Share::whole(0),
        ..kept
    }
}

/// As [`param_bytes`], with the bytes that are kept in files.
pub(crate) fn kept_bytes(args: &CheckedArguments, replicas: usize) -> ParamBytes {
    kept_under(&args.zero_config(1), replicas)
}

/// Bytes that each of `replicas` ranks keeps for an element under these settings of the optimizer.
pub(crate) fn kept_under(config: &ZeroConfig, replicas: usize) -> ParamBytes {
    let kept = config.element_bytes(replicas);
    let share = |kept: KeptBytes| Share {
        bytes: kept.bytes,
        ranks: kept.ranks,
    };
    ParamBytes {
        weight_ranks: kept.weight_ranks,
        master: share(kept.master),
        gradient: share(kept.gradient),
        state: share(kept.state),
    }
}

fn recompute(args: &CheckedArguments) -> Recompute {
    let chunk = args.checkpoint_num_layers;
    match args.recompute {
        _ if !args.activation_checkpointing => Recompute::Nothing,
        RecomputeMode::Full => Recompute::Full {
            chunk,
            ratios: args
                .activation_checkpoint_ratio
                .as_ref()
                .map_or_else(Vec::new, |ratios| ratios.0.clone()),
        },
        RecomputeMode::Selective => Recompute::Selective {
            ops: match &args.recompute_ops {
                Some(ops) => ops.clone(),
                None => RecomputeOp::USUAL.to_vec(),
            },
        },
        RecomputeMode::Budget => Recompute::Budget {
            chunk,
            bytes: args.activation_memory_budget.unwrap_or(usize::MAX),
        },
    }
}
