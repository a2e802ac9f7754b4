//! Whether the values of the keys are legal, each by itself and beside the others.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
};

use merak_ckpt::words::file;
use merak_mpu::{Built, EngineKind};
use merak_partition::{PartitionMethod, ScheduleChoice, SplitMethod};
use merak_pipe::Size;
use merak_zero::{LrSchedule, OptimizerKind};

use super::{
    checked::CheckedArguments,
    choice::{BackendChoice, CostSource, DataFormat, Device, Offload, RecomputeMode, ReportTo},
    keys::{MerakArguments, SHUFFLE_BUFFER, VALIDATION_FRACTION, keys},
    numbers::{Ratios, SeqLength},
    range::Number,
    setting::Setting,
    sources::TokenizerSource,
};
use crate::error::{ConfigError, Error, NO_LENGTH, Result};

/// The checks, with the places of keys for their messages.
struct Checker<'a> {
    place: &'a dyn Fn(&str) -> String,
}

impl Checker<'_> {
    fn require(
        &self,
        legal: bool,
        key: &'static str,
        found: impl Display,
        expected: impl Display,
    ) -> Result<()> {
        if legal {
            return Ok(());
        }
        Err(Error::Config(ConfigError::IllegalValue {
            key,
            found: found.to_string(),
            place: (self.place)(key),
            expected: expected.to_string(),
        }))
    }
}

/// Checks the arguments; `place` tells where a key was set.
pub(crate) fn check(
    arguments: &MerakArguments,
    place: &dyn Fn(&str) -> String,
) -> Result<CheckedArguments> {
    check_built(arguments, &Checker { place })?;
    check_to_plan(arguments, place)
}

/// As [`check`], whatever is in this build, for a plan of other machines.
pub(crate) fn check_to_plan(
    arguments: &MerakArguments,
    place: &dyn Fn(&str) -> String,
) -> Result<CheckedArguments> {
    let checker = Checker { place };
    check_ranges(arguments, &checker)?;
    check_degrees(arguments, &checker)?;
    check_folders(arguments, &checker)?;
    check_graph(arguments, &checker)?;
    check_optimization(arguments, &checker)?;
    check_schedule(arguments, &checker)?;
    check_recompute(arguments, &checker)?;
    check_intervals(arguments, &checker)?;
    check_early_stopping(arguments, &checker)?;
    check_prediction(arguments, &checker)?;
    check_divergence(arguments, &checker)?;
    check_generation(arguments, &checker)?;
    check_compute(arguments, &checker)?;
    check_precision(arguments, &checker)?;
    check_data(arguments, &checker)?;
    let mut arguments = arguments.clone();
    if arguments.adafactor {
        arguments.optim = OptimizerKind::Adafactor;
    }
    let checked = CheckedArguments::of(arguments);
    // merak-zero knows the ranges and words the error.
    checked.zero_config(1).validate()?;
    Ok(checked)
}

/// The numbers of each key lie in the key's range.
fn check_ranges(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    keys().try_for_each(|key| match a.outside(key) {
        Some(found) => checker.require(false, key.name, found, key.range),
        None => Ok(()),
    })
}

fn check_degrees(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let product = |factors: &[usize]| {
        let mut factors = factors.iter();
        factors.try_fold(1_usize, |product, factor| product.checked_mul(*factor))
    };
    // When a product is too large, its largest factor is to blame.
    let largest = |factors: &[(&'static str, usize)]| {
        let larger = |a: (_, usize), b: &(_, usize)| if b.1 > a.1 { *b } else { a };
        factors.iter().fold(factors[0], larger)
    };
    let degrees = [("dp", a.dp), ("tp", a.tp), ("pp", a.pp), ("sp", a.sp)];
    let ranks = product(&degrees.map(|(_, degree)| degree));
    let (key, degree) = largest(&degrees);
    let most = u32::MAX;
    checker.require(
        ranks.is_some_and(|ranks| u32::try_from(ranks).is_ok()),
        key,
        degree,
        format_args!(
            "so small that \"dp\" x \"tp\" x \"pp\" x \"sp\", the ranks, is at most {most}"
        ),
    )?;
    for (key, batch) in [
        ("per_device_train_batch_size", a.per_device_train_batch_size),
        ("per_device_eval_batch_size", a.per_device_eval_batch_size),
    ] {
        let steps = ("gradient_accumulation_steps", a.gradient_accumulation_steps);
        let factors = [(key, batch), steps, ("dp", a.dp)];
        let (key, found) = largest(&factors);
        checker.require(
            product(&factors.map(|(_, factor)| factor)).is_some(),
            key,
            found,
            "so small that the samples of a step, microbatch x microbatches x \"dp\", can be counted",
        )?;
    }
    let given = super::keys::given_list(&a.tp_layer_lists);
    checker.require(
        !a.tp_layer_lists.auto || given.is_none(),
        "tp_layer_lists.auto",
        true,
        format_args!("false where \"{}\" is set", given.unwrap_or_default()),
    )?;
    if let Some(heads) = a.num_heads {
        checker.require(
            heads.is_multiple_of(a.tp),
            "num_heads",
            heads,
            format_args!("a multiple of \"tp\", which is {}", a.tp),
        )?;
    }
    check_sequence(a, checker)
}

/// The ranks that share a sequence divide its length.
fn check_sequence(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let of_tensor = if a.sequence_parallel { a.tp } else { 1 };
    let ranks = of_tensor * a.sp;
    let is_divided = |length: usize| length.is_multiple_of(ranks);
    let odd = a
        .seq_length
        .filter(|lengths| !is_divided(lengths.input) || !lengths.target.is_none_or(is_divided));
    let Some(lengths) = odd else {
        return Ok(());
    };
    // A model that takes an input takes a shorter one. A target keeps its tokens in a longer one.
    let such = SeqLength {
        input: ranks * (lengths.input / ranks).max(1),
        target: lengths.target.map(|length| length.next_multiple_of(ranks)),
    };
    let what = match (of_tensor, a.sp) {
        (tp, 1) => format!("\"tp\", which is {tp}, while \"sequence_parallel\" is true"),
        (1, sp) => format!("\"sp\", which is {sp}"),
        (tp, sp) => format!(
            "\"tp\" x \"sp\", which is {}, while \"sequence_parallel\" is true",
            tp * sp
        ),
    };
    let multiple = match lengths.target {
        None => "a multiple",
        Some(_) => "multiples",
    };
    let [found, such] = [lengths, such].map(|lengths| lengths.to_value());
    let expected = format_args!("{multiple} of {what}, such as {such}");
    checker.require(false, "seq_length", found, expected)
}

fn check_folders(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let is_named = |folder: &PathBuf| !folder.as_os_str().is_empty();
    checker.require(
        a.output_dir.as_ref().is_none_or(is_named),
        "output_dir",
        "empty",
        "the name of a folder",
    )?;
    checker.require(
        !a.model.ignore_mismatched_sizes || a.model.hf_dir.is_some(),
        "model.ignore_mismatched_sizes",
        true,
        "false unless \"model.hf_dir\" is set",
    )?;
    checker.require(
        !a.do_eval || a.data.validation_fraction > 0.0 || a.data.validation_path.is_some(),
        "do_eval",
        a.do_eval,
        "false while \"data.validation_fraction\" is 0, which leaves nothing to evaluate",
    )
}

fn check_divergence(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let is_whole = a.saves() && !a.no_save_optim && !a.no_save_rng;
    checker.require(
        !a.divergence_guard || is_whole,
        "divergence_guard",
        a.divergence_guard,
        "false unless \"save\" is true, \"no_save_optim\" and \"no_save_rng\" are false: a run goes back to its checkpoints",
    )
}

fn check_prediction(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    checker.require(
        !(a.do_predict && a.do_train)
            || a.data.validation_fraction > 0.0
            || a.data.validation_path.is_some(),
        "do_predict",
        a.do_predict,
        "false while \"data.validation_fraction\" is 0, which leaves nothing to predict",
    )
}

fn check_graph(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    checker.require(
        !a.finetune || a.resume_from_checkpoint.is_some(),
        "finetune",
        a.finetune,
        "false unless \"resume_from_checkpoint\" names the weights to start from",
    )?;
    if let Some(shards) = a.shard_count {
        let stages = num_stages(a);
        let expected = format_args!("at least {}, which is {stages}", stages_key(a));
        checker.require(shards >= stages, "shard_count", shards, expected)?;
    }
    if let Some(points) = &a.custom_split_points {
        checker.require(
            a.split_method == SplitMethod::LayerSplit,
            "custom_split_points",
            format_args!("{points:?}"),
            format_args!(
                "unset unless \"split_method\" is \"{}\"",
                SplitMethod::LayerSplit
            ),
        )?;
        checker.require(
            !points.is_empty(),
            "custom_split_points",
            "[]",
            "a list with a name in it",
        )?;
    }
    check_boundaries(a, checker)?;
    check_autopipe(a, checker)
}

fn check_autopipe(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let options = &a.autopipe;
    let searches = a.partition_method.searches();
    let expected = "unset unless \"partition_method\" is \"autopipe\" or \"exact\"";
    if let Some(found) = options.micro_batches {
        checker.require(searches, "autopipe.micro_batches", found, expected)?;
    }
    if let Some(found) = options.memory_limit {
        let searches = searches || a.train_schedule == ScheduleChoice::Searched;
        let expected = format!("{expected}, or \"train_schedule\" is \"auto\"");
        checker.require(searches, "autopipe.memory_limit", found, expected)?;
    }
    if let Some(found) = options.comm_cost {
        checker.require(searches, "autopipe.comm_cost", Number(found), expected)?;
    }
    checker.require(
        a.cost_cache.is_none() || a.cost_model == CostSource::Measured,
        "cost_cache",
        file(a.cost_cache.as_deref().unwrap_or(Path::new(""))),
        "unset unless \"cost_model\" is \"measured\"",
    )
}

fn check_boundaries(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let wants_custom = a.partition_method == PartitionMethod::Custom;
    let Some(boundaries) = &a.custom_partition else {
        if wants_custom {
            let advice =
                "\"partition_method\" custom needs the boundaries, such as [0, 6, 12]".into();
            return Err(Error::Config(ConfigError::MissingKey {
                key: "custom_partition",
                advice,
            }));
        }
        return Ok(());
    };
    let boundaries = &boundaries.0;
    let require = |legal, expected: &dyn Display| {
        checker.require(
            legal,
            "custom_partition",
            format_args!("{boundaries:?}"),
            expected,
        )
    };
    require(
        wants_custom,
        &"unset unless \"partition_method\" is \"custom\"",
    )?;
    let stages = num_stages(a);
    let length = stages.saturating_add(1);
    require(
        boundaries.len() == length,
        &format_args!("{length} boundaries, because {} is {stages}", stages_key(a)),
    )?;
    let rises = boundaries.windows(2).all(|pair| pair[0] < pair[1]);
    require(boundaries[0] == 0 && rises, &"strictly rising from 0")
}

/// Stages of the pipeline.
fn num_stages(a: &MerakArguments) -> usize {
    a.pp.saturating_mul(a.chunks())
}

/// The keys that decide the number of stages, for messages.
fn stages_key(a: &MerakArguments) -> String {
    match a.chunks() {
        1 => "\"pp\"".to_owned(),
        chunks => format!("\"pp\" times {chunks} stages per rank"),
    }
}

/// The engine, the backend and the reader of the data are in this build.
fn check_built(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let (engine, backend, format) = (a.distributed.engine, a.compute.backend, a.data.format);
    let built = Built::here();
    let of_engine = match engine {
        EngineKind::Mpi if !built.mpi => Some("mpi"),
        EngineKind::Nccl if !built.nccl => Some("nccl"),
        _ => None,
    };
    let lacks_tch = backend == BackendChoice::Tch && !cfg!(feature = "tch");
    let of_data = match format {
        DataFormat::Parquet if !cfg!(feature = "parquet") => Some(("parquet", "jsonl")),
        DataFormat::Images if !cfg!(feature = "images") => Some(("images", "tensors")),
        _ => None,
    };
    let (key, found, feature, instead) = match (of_engine, of_data) {
        (Some(feature), _) => ("distributed.engine", engine.to_string(), feature, "tcp"),
        _ if lacks_tch => ("compute.backend", backend.to_string(), "tch", "candle"),
        (_, Some((feature, instead))) => ("data.format", format.to_string(), feature, instead),
        (None, None) => return Ok(()),
    };
    Err(Error::Config(ConfigError::NotBuilt {
        key,
        found: format!("\"{found}\""),
        place: (checker.place)(key),
        feature,
        instead,
    }))
}

fn check_compute(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let compute = &a.compute;
    checker.require(
        compute.device == Device::Cpu || compute.backend == BackendChoice::Tch,
        "compute.device",
        compute.device,
        "cpu unless \"compute.backend\" is \"tch\"",
    )
}

fn check_precision(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let is_tch = a.compute.backend == BackendChoice::Tch;
    checker.require(
        !(a.fp16 && a.bf16),
        "fp16",
        a.fp16,
        "false while \"bf16\" is true: weights have one type",
    )?;
    checker.require(
        !a.fp16 || is_tch,
        "fp16",
        a.fp16,
        "false unless \"compute.backend\" is \"tch\"; \"bf16\" is a type of 16 bits too, and needs no loss scale",
    )?;
    if let Some(amp) = a.half_precision_backend {
        checker.require(
            a.bf16 || a.fp16,
            "half_precision_backend",
            amp,
            "unset unless \"bf16\" or \"fp16\" is true, the type of products",
        )?;
    }
    Ok(())
}

fn check_schedule(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let (schedule, chunks) = (a.train_schedule, a.virtual_stages);
    let fixed = schedule.fixed_chunks().unwrap_or(chunks);
    checker.require(
        chunks == 1 || chunks == fixed,
        "virtual_stages",
        chunks,
        format_args!("{fixed} under \"train_schedule\" {schedule}"),
    )?;
    if let ScheduleChoice::Named(kind) = schedule
        && a.gradient_accumulation_steps < kind.min_microbatches(a.pp)
    {
        // merak-pipe knows the condition and words the error.
        let size = Size::new(a.pp, a.gradient_accumulation_steps);
        kind.generate(size.with_chunks(a.chunks()))?;
    }
    LrSchedule::new(
        a.lr_scheduler_type,
        &a.lr_scheduler_kwargs,
        a.learning_rate,
        a.warmup_steps as u64,
        // The length of the run depends on the data; the decay steps are checked once it is known.
        u64::MAX,
    )?;
    Ok(())
}

fn check_recompute(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let mode = a.recompute;
    if !a.activation_checkpointing {
        let expected = "\"full\" unless \"activation_checkpointing\" is true";
        checker.require(mode == RecomputeMode::Full, "recompute", mode, expected)?;
    }
    check_recompute_ratios(a, checker)?;
    if let Some(ops) = &a.recompute_ops {
        let names: Vec<_> = ops.iter().map(|op| op.as_str()).collect();
        let found = format!("{names:?}");
        let needed = RecomputeMode::Selective;
        let key = "recompute_ops";
        checker.require(mode == needed, key, &found, unset_unless(needed))?;
        checker.require(
            !ops.is_empty(),
            key,
            &found,
            "a list with an operation in it",
        )?;
    }
    match a.activation_memory_budget {
        Some(budget) => checker.require(
            mode == RecomputeMode::Budget,
            "activation_memory_budget",
            budget,
            unset_unless(RecomputeMode::Budget),
        ),
        None if mode == RecomputeMode::Budget => Err(Error::Config(ConfigError::MissingKey {
            key: "activation_memory_budget",
            advice: "\"recompute\" budget needs the bytes that a rank's activations may take"
                .into(),
        })),
        None => Ok(()),
    }
}

fn check_recompute_ratios(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let Some(Ratios(ratios)) = &a.activation_checkpoint_ratio else {
        return Ok(());
    };
    let found = format!("{ratios:?}");
    let require = |legal, expected: &dyn Display| {
        checker.require(legal, "activation_checkpoint_ratio", &found, expected)
    };
    require(
        a.activation_checkpointing,
        &"unset unless \"activation_checkpointing\" is true",
    )?;
    let needed = RecomputeMode::Full;
    require(a.recompute == needed, &unset_unless(needed))?;
    require(!ratios.is_empty(), &"a list with a number in it")?;
    let stages = num_stages(a);
    require(
        ratios.len() <= stages,
        &format_args!(
            "at most {stages} values, because {} is {stages}",
            stages_key(a)
        ),
    )
}

fn unset_unless(needed: RecomputeMode) -> String {
    format!("unset unless \"recompute\" is \"{needed}\"")
}

fn check_optimization(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    checker.require(
        !a.nesterov || a.sgd_momentum > 0.0,
        "nesterov",
        a.nesterov,
        "false unless \"sgd_momentum\" is more than 0",
    )?;
    if a.offload_optimizer == Some(Offload::Disk) && a.output_dir.is_none() {
        return Err(Error::Config(ConfigError::MissingKey {
            key: "output_dir",
            advice: "\"offload_optimizer\" disk keeps optimizer state in files under it".into(),
        }));
    }
    let is_free = matches!(a.optim, OptimizerKind::AdamW | OptimizerKind::Adafactor);
    checker.require(
        !a.adafactor || is_free,
        "adafactor",
        a.adafactor,
        format_args!("false while \"optim\" is {}", a.optim),
    )?;
    let undivided = (a.gradient_predivide_factor - 1.0).abs() < f64::EPSILON;
    checker.require(
        undivided || a.prescale_gradients,
        "gradient_predivide_factor",
        Number(a.gradient_predivide_factor),
        "1 unless \"prescale_gradients\" is true",
    )
}

fn check_format(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let data = &a.data;
    let is_text = data.format == DataFormat::Text;
    checker.require(
        is_text || data.max_bytes.is_none(),
        "data.max_bytes",
        data.max_bytes.unwrap_or_default(),
        "unset unless \"data.format\" is \"text\"",
    )?;
    checker.require(
        data.format.is_plain() || !data.skip_binary,
        "data.skip_binary",
        data.skip_binary,
        format_args!(
            "false under \"data.format\" {}, whose files are no text",
            data.format
        ),
    )?;
    let trains = matches!(data.tokenizer, TokenizerSource::TrainBpe(_));
    checker.require(
        !matches!(data.format, DataFormat::Tensors | DataFormat::Images) || !trains,
        "data.tokenizer",
        data.tokenizer.to_value(),
        format_args!(
            "\"bytes\" or a file under \"data.format\" {}, whose files hold no text to train on",
            data.format
        ),
    )
}

fn check_data(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    check_format(a, checker)?;
    let data = &a.data;
    let (path, mixture) = (data.path.as_ref(), data.mixture.as_ref());
    checker.require(
        path.is_none() || mixture.is_none(),
        "data.mixture",
        format_args!(
            "a list of {}",
            mixture.map_or(0, |mixture| mixture.parts().len())
        ),
        format_args!(
            "unset while \"data.path\" ({}) is set",
            (checker.place)("data.path")
        ),
    )?;
    let fraction = data.validation_fraction;
    let is_open = [0.0, VALIDATION_FRACTION].contains(&fraction);
    checker.require(
        data.validation_path.is_none() || is_open,
        "data.validation_fraction",
        Number(fraction),
        format_args!(
            "unset while \"data.validation_path\" ({}) is set",
            (checker.place)("data.validation_path")
        ),
    )?;
    check_stream(a, checker)?;
    let (masked, random) = (data.mask_replace_prob, data.random_replace_prob);
    checker.require(
        masked + random <= 1.0,
        "data.random_replace_prob",
        Number(random),
        format_args!("at least 0 and, with \"data.mask_replace_prob\" {masked}, at most 1"),
    )
}

/// A stream has no known end, and is no mixture.
fn check_stream(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let data = &a.data;
    if !data.streaming {
        return checker.require(
            data.shuffle_buffer == SHUFFLE_BUFFER,
            "data.shuffle_buffer",
            data.shuffle_buffer,
            "unset unless \"data.streaming\" is true: all other samples are shuffled as a whole",
        );
    }
    let require =
        |legal, expected: &dyn Display| checker.require(legal, "data.streaming", true, expected);
    require(
        data.format.is_text(),
        &format_args!(
            "false while \"data.format\" is \"{}\", whose files are read as they are needed anyway",
            data.format
        ),
    )?;
    require(
        data.mixture.is_none(),
        &"false while \"data.mixture\" is set",
    )?;
    require(
        a.max_steps > 0 || !a.do_train,
        &format_args!("false unless \"max_steps\" is set: {NO_LENGTH}"),
    )?;
    require(
        data.validation_path.is_some() || !(a.do_eval || a.do_predict),
        &"false unless \"data.validation_path\" is set, or \"do_eval\" and \"do_predict\" are false: a stream has no end to validate on",
    )
}

fn check_intervals(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    checker.require(
        a.max_steps > 0 || a.num_train_epochs > 0.0,
        "num_train_epochs",
        Number(a.num_train_epochs),
        "more than 0 unless \"max_steps\" is",
    )?;
    checker.require(
        !a.load_best_model_at_end || (a.saves() && a.do_eval),
        "load_best_model_at_end",
        a.load_best_model_at_end,
        "false unless \"save\" and \"do_eval\" are true: the best model is a checkpoint whose evaluation was best",
    )?;
    let folder = a.logging_dir.as_deref().map(file).unwrap_or_default();
    checker.require(
        a.logging_dir.is_none() || a.report_to == ReportTo::Tensorboard,
        "logging_dir",
        folder,
        "unset unless \"report_to\" is \"tensorboard\"",
    )
}

fn check_early_stopping(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    if let Some(patience) = a.early_stopping_patience {
        let expected = "unset unless \"do_eval\" is true: it counts evaluations during training";
        checker.require(a.do_eval, "early_stopping_patience", patience, expected)?;
    }
    checker.require(
        a.early_stopping_threshold <= 0.0 || a.early_stopping_patience.is_some(),
        "early_stopping_threshold",
        Number(a.early_stopping_threshold),
        "0 unless \"early_stopping_patience\" is set",
    )
}

fn check_generation(a: &MerakArguments, checker: &Checker<'_>) -> Result<()> {
    let mut stops = a.stop_strings.iter().flatten();
    checker.require(
        stops.all(|stop| !stop.is_empty()),
        "stop_strings",
        "an empty string",
        "strings of at least one character: every text ends in an empty one",
    )
}
