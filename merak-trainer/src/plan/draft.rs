//! The part of a plan that does not depend on costs: the graph of a rank, in segments.

use crate::{
    BackendChoice, CheckedArguments, Error, InputPath, Result, SplitMethod,
    plan::{BASE_NAME, Lora},
};
use merak_ckpt::{AdaptError, LoraConfig, adapt};
use merak_mpu::{DType, Degrees};
use merak_partition::{SegmentOptions, Segments, segment};
use merak_tp::{LayerLists, rewrite};
use merak_trace::{
    Graph,
    models::{Head, Model, ModelInfo, TraceOptions},
};
use std::sync::Arc;

/// A model that was traced, adapted, rewritten for the tensor axis and cut into segments.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(super) model: Arc<dyn Model>,
    pub(super) info: ModelInfo,
    pub(super) degrees: Degrees,
    pub(super) seq_length: usize,
    pub(super) target_length: Option<usize>,
    pub(super) trace: TraceOptions,
    pub(super) lists: LayerLists,
    pub(super) lora: Option<Lora>,
    pub(super) frozen: Option<DType>,
    pub(crate) graph: Graph,
    pub(super) tensor: merak_tp::Report,
    pub(crate) segments: Segments,
}

impl Draft {
    /// Traces, rewrites and segments a model as the arguments say.
    ///
    /// # Errors
    /// When the model cannot be split or cut that way.
    pub(crate) fn new(model: Arc<dyn Model>, args: &CheckedArguments) -> Result<Self> {
        let info = model.info();
        check(&info, args)?;
        let lengths = args.seq_length.unwrap_or_else(|| info.max_seq.into());
        // Kernels of the default backend compute in f32; frozen weights may be kept in another
        // type.
        let (dtype, frozen) = match (args.bf16, args.compute.backend) {
            (false, _) => (DType::F32, None),
            (true, BackendChoice::Tch) => (DType::BF16, None),
            (true, BackendChoice::Candle) => (DType::F32, Some(DType::BF16)),
        };
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
        let lists = layer_lists(args, info.family)?;
        let adapted = with_adapter(model.trace(&trace)?, lora(args)?, info.family, frozen);
        let (graph, lora) = adapted.map_err(|error| match (error, &args.lora_config) {
            (Error::Adapter(reason), Some(InputPath(path))) if !is_of_name(&reason) => {
                let path = path.clone();
                Error::AdapterFile { path, reason }
            }
            (error, _) => error,
        })?;
        let rewritten = rewrite(&graph, &lists, args.tp)?;
        let options = SegmentOptions {
            method: split_method(args.split_method),
            shard_count: args.shard_count,
            custom_split_points: args.custom_split_points.clone().unwrap_or_default(),
            num_layers: args.num_layers.or(Some(info.num_layers)),
            ..SegmentOptions::for_model(&info, args.num_stages())
        };
        let segments = segment(&rewritten.graph, &options)?;
        Ok(Self {
            model,
            info,
            degrees: args.degrees(),
            seq_length: lengths.input,
            target_length: lengths.target,
            trace,
            lists,
            lora,
            frozen,
            graph: rewritten.graph,
            tensor: rewritten.report,
            segments,
        })
    }
}

/// Checks what the arguments say about the model.
fn check(info: &ModelInfo, args: &CheckedArguments) -> Result<()> {
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
    Ok(())
}

/// Whether the adapter's name is at fault, which is no part of its description.
fn is_of_name(error: &AdaptError) -> bool {
    matches!(error, AdaptError::Name { .. })
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

/// A model's graph with an adapter in it, and the adapter with its open fields filled in. The
/// model's frozen weights are kept in the type `frozen`, if there is one.
pub(super) fn with_adapter(
    graph: Graph,
    lora: Option<Lora>,
    family: &str,
    frozen: Option<DType>,
) -> Result<(Graph, Option<Lora>)> {
    let Some(Lora { name, config }) = lora else {
        return Ok((graph, None));
    };
    let adapted = adapt(&graph, &config, &name, family)?;
    let (mut graph, config) = (adapted.graph, adapted.config);
    let ids = graph.params().iter().filter_map(|param| {
        // Parameters that an adapter adds keep their type, trained or not.
        let is_of_base = !param.trainable && param.beside.is_none();
        is_of_base.then(|| graph.find_param(&param.name)).flatten()
    });
    for id in ids.collect::<Vec<_>>() {
        graph.param_mut(id).kept = frozen;
    }
    Ok((graph, Some(Lora { name, config })))
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
