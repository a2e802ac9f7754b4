//! The part of a plan that does not depend on costs: the graph of a rank, in segments.

use crate::{
    config::{BackendChoice, CheckedArguments, InputPath, given_list},
    error::{Error, PlanError, Result},
    plan::{BASE_NAME, CustomLoss, Lora, LossCount, LossFn, groups, loss::WithLoss},
};
use merak_ckpt::{AdaptError, LoraConfig, UnmatchedTarget, adapt};
use merak_mpu::{DType, Degrees};
use merak_partition::{SegmentOptions, Segments, segment};
use merak_tp::{Choice, LayerLists, Options, Rewritten, Sequence, auto_lists, rewrite_with};
use merak_trace::{
    Graph, Param,
    models::{self, Head, Model, ModelInfo, TraceOptions},
};
use std::sync::Arc;

/// What a plan is made from besides the arguments. It is resolved beforehand, so that planning
/// itself reads no file and no setting of the process.
#[derive(Debug, Clone)]
pub struct PlanInputs {
    /// The model.
    pub model: Arc<dyn Model>,
    /// The adapter that is trained in place of the model, if any.
    pub lora: Option<Lora>,
    /// The layers that tensor parallelism splits; `None` takes the lists of the model's family.
    pub lists: Option<LayerLists>,
    /// The loss that takes the place of the model's cross-entropy, if any.
    pub loss: Option<CustomLoss>,
}

impl PlanInputs {
    /// These inputs with a loss of the caller's own in place of the model's cross-entropy.
    #[must_use]
    pub fn with_loss(self, loss_fn: LossFn, count: LossCount) -> Self {
        let loss = Some(CustomLoss { loss_fn, count });
        Self { loss, ..self }
    }

    /// Reads the file of `lora_config`, if it is set. Takes the lists of `tp_layer_lists`, else
    /// those of [`set_tp_layer_lists`](merak_tp::set_tp_layer_lists).
    ///
    /// # Errors
    /// When the file cannot be read, or describes no adapter.
    pub fn read(model: Arc<dyn Model>, args: &CheckedArguments) -> Result<Self> {
        Ok(Self {
            model,
            lora: lora(args)?,
            lists: given_lists(args).or_else(merak_tp::tp_layer_lists),
            loss: None,
        })
    }
}

/// A model that was traced, adapted and rewritten for the tensor and the sequence axis.
#[derive(Debug, Clone)]
pub struct Draft {
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
    /// How tensor parallelism split it.
    pub tensor: merak_tp::Report,
    /// The adapter that is trained in place of the model, if any.
    pub lora: Option<Lora>,
    /// The names among the adapter's targets that no layer has.
    pub unmatched_targets: Vec<UnmatchedTarget>,
    /// What a microbatch's loss is divided by.
    pub loss_count: LossCount,
    /// How it is split over the tensor axis.
    pub(super) split: Options,
    /// How what is left of it is cut over the sequence axis.
    pub(super) sequence: Options,
    /// The element type in which weights are kept, where nodes compute in another: under an adapter
    /// the frozen ones.
    pub(super) kept: Option<DType>,
    pub(super) trace: TraceOptions,
}

/// The graph of a rank, in segments.
#[derive(Debug)]
pub(crate) struct SegmentedGraph {
    pub(crate) graph: Graph,
    pub(crate) segments: Segments,
}

impl Draft {
    /// Traces, adapts, rewrites and segments a model as the arguments say.
    ///
    /// # Errors
    /// When the model cannot be split or cut that way.
    pub(crate) fn new(
        inputs: &PlanInputs,
        args: &CheckedArguments,
    ) -> Result<(Self, SegmentedGraph)> {
        let model = Arc::clone(&inputs.model);
        let model: Arc<dyn Model> = match inputs.loss.clone() {
            Some(loss) => Arc::new(WithLoss { model, loss }),
            None => model,
        };
        let info = model.info();
        check(&info, args)?;
        let lengths = args.seq_length.unwrap_or_else(|| info.max_seq.into());
        let (dtype, kept) = types(args);
        let trace = TraceOptions {
            head: Head::Loss {
                label_smoothing: args.label_smoothing_factor,
            },
            untie: args.no_tie_modules,
            init_std: args.init_method_std,
            dtype,
            target_seq: lengths.target,
            ..TraceOptions::training(args.per_device_train_batch_size, lengths.input)
        };
        let traced = model.trace(&trace)?;
        let (lists, choices) = chosen(&traced, inputs, args, info.family)?;
        let split = Options::new(args.tp)
            .with_lists(lists)
            .with_vocab(args.parallel_vocab.then_some(info.vocab_size))
            .with_sequence(sequence(args));
        let adapted = with_adapter(traced, inputs.lora.clone(), info.family, kept);
        let (mut graph, lora, unmatched_targets) = adapted.map_err(|error| of_file(error, args))?;
        groups::check(args, &graph)?;
        groups::freeze(args, &mut graph);
        let mut rewritten = split_layers(&graph, &split, inputs, args)?;
        rewritten.report.choices = choices;
        let sequence = Options::along_sequence(args.sp, along_sequence(args), args.sp_method);
        let graph = rewrite_with(&rewritten.graph, &sequence)?.graph;
        let graph = graph.with_overlap(args.overlap());
        let segmented = SegmentedGraph {
            segments: segment(&graph, &cutting(&info, args))?,
            graph,
        };
        let loss = inputs.loss.as_ref();
        let draft = Self {
            model,
            info,
            degrees: args.degrees(),
            seq_length: lengths.input,
            target_length: lengths.target,
            tensor: rewritten.report,
            lora,
            unmatched_targets,
            loss_count: loss.map(|loss| loss.count).unwrap_or_default(),
            split,
            sequence,
            kept,
            trace,
        };
        Ok((draft, segmented))
    }
}

/// How the arguments cut the graph of a model.
fn cutting(info: &ModelInfo, args: &CheckedArguments) -> SegmentOptions {
    SegmentOptions {
        method: args.split_method,
        target_segments: args.shard_count,
        split_points: args.custom_split_points.clone().unwrap_or_default(),
        leaf_modules: args.leaf_modules.clone().unwrap_or_default(),
        num_layers: args.num_layers.or(Some(info.num_layers)),
        ..SegmentOptions::for_model(info, args.num_stages())
    }
}

/// The type of values, and that in which weights are kept, where it differs: values of the default
/// backend are `f32`.
fn types(args: &CheckedArguments) -> (DType, Option<DType>) {
    match (args.narrow(), args.compute.backend) {
        (Some(narrow), BackendChoice::Tch) => (narrow, None),
        (kept, _) => (DType::F32, kept),
    }
}

/// Checks what the arguments say about the model.
fn check(info: &ModelInfo, args: &CheckedArguments) -> Result<()> {
    if args.pp > info.num_layers {
        return Err(Error::Plan(PlanError::FewerLayers {
            layers: info.num_layers,
            stages: args.pp,
        }));
    }
    let vocab = info.vocab_size;
    let ends = args.eos_token_id.iter().flat_map(|ends| &ends.0);
    let named = ends.map(|&token| ("eos_token_id", token));
    let pad = args.pad_token_id.map(|token| ("pad_token_id", token));
    let mut named = named.chain(pad);
    if let Some((key, token)) = named.find(|&(_, token)| token as usize >= vocab) {
        return Err(Error::Plan(PlanError::UnknownToken { key, token, vocab }));
    }
    // This program traces the known ones, and so knows the order of their dimensions.
    let is_known = models::family(info.family).is_some();
    if (args.sequence_parallel || args.sp > 1) && args.sequence_dim == 0 && is_known {
        return Err(Error::Plan(PlanError::SequenceDim {
            family: info.family,
        }));
    }
    Ok(())
}

/// Adds the file to an error of the adapter's description. The adapter's name is no part of it.
fn of_file(error: Error, args: &CheckedArguments) -> Error {
    match (error, &args.lora_config) {
        (Error::Adapter(reason), Some(InputPath(path)))
            if !matches!(*reason, AdaptError::Name { .. }) =>
        {
            let path = path.clone();
            Error::Plan(PlanError::AdapterFile { path, reason })
        }
        (error, _) => error,
    }
}

/// The adapter that `lora_config` asks for.
fn lora(args: &CheckedArguments) -> Result<Option<Lora>> {
    let Some(path) = &args.lora_config else {
        return Ok(None);
    };
    let config = LoraConfig::read(&path.0).map_err(|error| match error {
        merak_ckpt::Error::Io { path, source, .. } => Error::ReadInput {
            key: "lora_config",
            path,
            source,
        },
        other => Error::Blamed {
            key: "lora_config",
            place: None,
            source: Box::new(other.into()),
        },
    })?;
    let config = match &args.model.hf_dir {
        Some(folder) if config.to_json()[BASE_NAME].is_null() => {
            let folder = folder.0.to_string_lossy();
            let named = config.with(BASE_NAME, serde_json::json!(folder));
            named.expect("a path is a legal name of a base")
        }
        _ => config,
    };
    Ok(Some(Lora {
        name: args.adapter_name.0.clone(),
        config,
    }))
}

/// A model's graph with an adapter in it, the adapter with its open fields filled in, and those of
/// its targets that no layer has. The model's weights are kept in the type `kept`, if there is one;
/// under an adapter the frozen ones.
pub(super) fn with_adapter(
    mut graph: Graph,
    lora: Option<Lora>,
    family: &str,
    kept: Option<DType>,
) -> Result<(Graph, Option<Lora>, Vec<UnmatchedTarget>)> {
    let Some(Lora { name, config }) = lora else {
        keep(&mut graph, kept, |_| true);
        return Ok((graph, None, Vec::new()));
    };
    let adapted = adapt(&graph, &config, &name, family)?;
    let (mut graph, config) = (adapted.graph, adapted.config);
    // Parameters that an adapter adds keep their type, trained or not.
    let is_of_base = |param: &Param| !param.trainable && param.beside.is_none();
    keep(&mut graph, kept, is_of_base);
    Ok((graph, Some(Lora { name, config }), adapted.unmatched))
}

/// Has some parameters kept in a type, if there is one.
fn keep(graph: &mut Graph, kept: Option<DType>, which: impl Fn(&Param) -> bool) {
    let names = graph.params().iter().filter(|param| which(param));
    let ids = names.filter_map(|param| graph.find_param(&param.name));
    for id in ids.collect::<Vec<_>>() {
        graph.param_mut(id).kept = kept;
    }
}

/// The layers that are split: those that are chosen for the model where `tp_layer_lists` is "auto",
/// with the reasons, else those that were set, else those of its family.
fn chosen(
    model: &Graph,
    inputs: &PlanInputs,
    args: &CheckedArguments,
    family: &str,
) -> Result<(LayerLists, Vec<Choice>)> {
    if args.tp_layer_lists.auto && args.tp > 1 {
        let auto = auto_lists(model, args.tp)?;
        return Ok((auto.lists, auto.choices));
    }
    let lists = LayerLists::resolve(inputs.lists.as_ref(), family, args.tp)?;
    Ok((lists, Vec::new()))
}

/// Splits a model, or tells that the defaults of its family do not allow it.
fn split_layers(
    model: &Graph,
    split: &Options,
    inputs: &PlanInputs,
    args: &CheckedArguments,
) -> Result<Rewritten> {
    let are_defaults = inputs.lists.is_none() && !args.tp_layer_lists.auto;
    Ok(rewrite_with(model, split).map_err(|error| {
        if are_defaults {
            error.of_defaults()
        } else {
            error
        }
    })?)
}

/// How values between the split regions lie.
fn sequence(args: &CheckedArguments) -> Sequence {
    if args.sequence_parallel {
        along_sequence(args)
    } else {
        Sequence::Whole
    }
}

/// The cut of hidden states along the sequence.
fn along_sequence(args: &CheckedArguments) -> Sequence {
    Sequence::Cut {
        dim: args.sequence_dim,
    }
}

/// The lists of `tp_layer_lists`, if one of them is set.
fn given_lists(args: &CheckedArguments) -> Option<LayerLists> {
    let given = &args.tp_layer_lists;
    given_list(given)?;
    let list = |list: &Option<Vec<String>>| list.clone().unwrap_or_default();
    let mapping = given.input_output_mapping.iter().flatten();
    let slices = given.weight_change_list.iter().flatten();
    Some(LayerLists {
        input_output_mapping: mapping.map(|ratio| ratio.0).collect(),
        weight_change_list: slices.map(|slice| (slice.0.clone(), slice.1)).collect(),
        tp_attr_list: list(&given.tp_attr_list),
        conv_para_list: list(&given.conv_para_list),
        ..LayerLists::col_row(list(&given.col_para_list), list(&given.row_para_list))
    })
}
