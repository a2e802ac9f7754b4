//! Whether a checkpoint fits a run: its model, its adapter, its optimizer, its place in the data.

use super::{
    super::{TrainerParts, run_state::RunState},
    fresh::{Fresh, lacks_adapter, stored_name},
    rule_name,
};
use crate::{
    config::CheckedArguments,
    data::{DataFingerprint, Tokenizer, TokenizerFingerprint},
    error::{Error, Result, ResumeError},
    plan::{ParamGroups, Plan},
};
use merak_ckpt::{ADAPTER_CONFIG, Checkpoint, Kind, LoraConfig, Manifest};
use merak_trace::{Param, models::ModelInfo};
use merak_zero::{EMA, OptimizerKind};
use std::collections::BTreeSet;

/// Checks what the manifest tells: the model, the parts, the optimizer. Returns the state of the
/// run that saved it; `None` where it is a release, weights without a run.
pub(in crate::trainer) fn check(
    checkpoint: &Checkpoint,
    plan: &Plan,
    args: &CheckedArguments,
    parts: &TrainerParts,
) -> Result<Option<RunState>> {
    let path = || checkpoint.path().to_owned();
    let header = &checkpoint.manifest().header;
    let state = RunState::read(&header.state, args).map_err(|error| {
        Error::Resume(ResumeError::OtherModel {
            path: path(),
            difference: format!("its run state cannot be read: {error}"),
        })
    })?;
    check_adapter(checkpoint, plan, state.is_none(), args.finetune)?;
    check_model(checkpoint, plan, state.is_none(), args)?;
    if let Some(state) = state.as_ref().filter(|_| !args.finetune) {
        if !args.no_load_rng && !state.has_rng {
            return Err(Error::Resume(ResumeError::MissingPart {
                path: path(),
                part: "random state".to_owned(),
                flag: "no_load_rng",
            }));
        }
        if let Some([saved, now]) = other_tokenizer(parts, Some(state), checkpoint) {
            return Err(Error::Resume(ResumeError::OtherTokenizer {
                path: path(),
                saved: saved.to_string(),
                now: now.to_string(),
            }));
        }
        if !args.no_load_optim {
            check_optimizer(checkpoint, plan, (args, parts), state)?;
        }
        check_position(checkpoint, plan, args, parts, state)?;
    }
    Ok(state)
}

/// Compares the sizes that a checkpoint's header has of its model with those of a model that is not
/// planned yet. A release has none, and may be of another size.
pub(super) fn check_sizes(checkpoint: &Checkpoint, model: &ModelInfo) -> Result<()> {
    let header = &checkpoint.manifest().header;
    if header.state.is_null() {
        return Ok(());
    }
    let sizes = [
        ("num_layers", model.num_layers),
        ("hidden_size", model.hidden_size),
        ("vocab_size", model.vocab_size),
    ];
    for (name, now) in sizes {
        if let Some(saved) = header.model[name].as_u64()
            && saved != now as u64
        {
            return Err(Error::Resume(ResumeError::OtherModel {
                path: checkpoint.path().to_owned(),
                difference: format!("`{name}` is {saved} there, but {now} in the model"),
            }));
        }
    }
    Ok(())
}

/// Compares the checkpoint's adapter with that of the run: what it computes and, for a run that
/// goes on, what it trains.
fn check_adapter(
    checkpoint: &Checkpoint,
    plan: &Plan,
    is_release: bool,
    is_base: bool,
) -> Result<()> {
    let path = checkpoint.path();
    let other = |difference: String| {
        let path = path.to_owned();
        Err(Error::Resume(ResumeError::OtherModel { path, difference }))
    };
    let manifest = checkpoint.manifest();
    let saved_name = manifest.header.model["adapter_name"]
        .as_str()
        .unwrap_or("default");
    let lora = match (&plan.draft.lora, lacks_adapter(manifest)) {
        (Some(lora), false) => lora,
        (Some(_), true) if !is_release && !is_base => {
            return other(
                "it has no adapter; with \"finetune\", one starts on its weights".to_owned(),
            );
        }
        (None, false) if !is_release => {
            return other(format!(
                "it has the adapter `{saved_name}`: set \"lora_config\" to {}, or fold it into the weights with `merak-ckpt export-hf`",
                path.join(ADAPTER_CONFIG).display()
            ));
        }
        _ => return Ok(()),
    };
    if lora.name != saved_name {
        let name = &lora.name;
        return other(format!(
            "its adapter is `{saved_name}`, but \"adapter_name\" is `{name}`"
        ));
    }
    let file = path.join(ADAPTER_CONFIG);
    if !file.is_file() {
        return Ok(());
    }
    let has_same = has_same_factors(manifest, plan);
    let fields: &[&'static str] = match (has_same, is_base) {
        (false, _) => &SHAPE,
        (true, false) => &MEANING,
        (true, true) => &MEANING[..3],
    };
    let Some((field, there, here)) = LoraConfig::read(&file)?.difference(&lora.config, fields)
    else {
        return Ok(());
    };
    other(format!(
        "the `{field}` of its adapter is {there}, but {here} in \"lora_config\": take {}, or fold the adapter into \
         the weights with `merak-ckpt export-hf` and start another on them",
        file.display()
    ))
}

/// Whether a checkpoint has the factors of the plan's adapter, and no others.
fn has_same_factors(manifest: &Manifest, plan: &Plan) -> bool {
    let params = plan.graph.params().iter();
    let factors: Vec<_> = params.filter(|param| param.beside.is_some()).collect();
    let saved = manifest.tensors_of(&Kind::Parameter);
    let saved = saved.filter(|entry| entry.is_of_adapter());
    let is_there = |param: &&Param| {
        let entry = manifest.tensor(&Kind::Parameter, &param.name);
        entry.is_some_and(|entry| entry.shape == param.full.shape)
    };
    factors.len() == saved.count() && factors.iter().all(is_there)
}

/// Fields of an adapter that decide which factors it has.
const SHAPE: [&str; 8] = [
    "r",
    "target_modules",
    "rank_pattern",
    "use_dora",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
];

/// Fields that decide the effect of the factors, then those that decide what else is trained.
const MEANING: [&str; 5] = [
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "modules_to_save",
];

/// Compares the checkpoint's parameters with the whole model's; floats may have any size. A release
/// may have more parameters.
fn check_model(
    checkpoint: &Checkpoint,
    plan: &Plan,
    is_release: bool,
    args: &CheckedArguments,
) -> Result<()> {
    let other = |difference: String| {
        Error::Resume(ResumeError::OtherModel {
            path: checkpoint.path().to_owned(),
            difference,
        })
    };
    let manifest = checkpoint.manifest();
    let fresh = Fresh::of(checkpoint, plan, args, is_release);
    for param in plan.graph.params() {
        if fresh.has(param) {
            continue;
        }
        let name = stored_name(manifest, &param.name, is_release);
        let Some(entry) = manifest.tensor(&Kind::Parameter, &name) else {
            let advice = if args.lora_config.is_some() && fresh.in_classifier(param) {
                "; its module in the adapter's `modules_to_save` is trained, from random values"
            } else {
                ""
            };
            return Err(other(format!("it has no parameter {}{advice}", param.name)));
        };
        if entry.shape != param.full.shape {
            let found = format!("{} has shape {:?} there", param.name, entry.shape);
            let advice = if fresh.may_resize(param) {
                "; \"model.ignore_mismatched_sizes\" starts it at random"
            } else {
                ""
            };
            let expected = format!("{:?} in the model{advice}", param.full.shape);
            return Err(other(format!("{found}, but {expected}")));
        }
        if !entry.dtype.is_float() {
            return Err(other(format!("{} is {} there", param.name, entry.dtype)));
        }
    }
    match &*fresh.unused(plan) {
        [first, others @ ..] if is_release => {
            let num_tensors = 1 + others.len();
            tracing::warn!(
                first,
                num_tensors,
                "tensors of the checkpoint that the model does not have are left out"
            );
            Ok(())
        }
        [extra, ..] => Err(other(format!("the model has no parameter {extra}"))),
        [] => Ok(()),
    }
}

/// Checks that the optimizer finds its state.
fn check_optimizer(
    checkpoint: &Checkpoint,
    plan: &Plan,
    (args, parts): (&CheckedArguments, &TrainerParts),
    saved: &RunState,
) -> Result<()> {
    let path = || checkpoint.path().to_owned();
    let kept = state_names(plan, args, parts);
    // As a checkpoint lists them.
    let names: BTreeSet<_> = plan.trained_params().flat_map(&kept).collect();
    let names: Vec<_> = names.into_iter().collect();
    let lacks = |part: String| {
        Err(Error::Resume(ResumeError::MissingPart {
            path: path(),
            part,
            flag: "no_load_optim",
        }))
    };
    if !saved.has_optimizer {
        if names.is_empty() {
            return Ok(());
        }
        return lacks("optimizer state".to_owned());
    }
    let kinds = checkpoint.manifest().kinds().into_iter();
    let found: Vec<_> = kinds
        // Averages of weights stand beside every rule.
        .filter(|kind| **kind != Kind::Parameter && kind.as_str() != EMA)
        .map(Kind::as_str)
        .collect();
    let rule = rule_name(args, parts);
    let is_same = match &saved.rule {
        Some(saved) => saved == rule,
        None => saved.optim.is_none_or(|optim| optim == args.optim),
    };
    if is_same && found.is_empty() && !names.is_empty() {
        return lacks(format!("optimizer state ({})", names.join(", ")));
    }
    // The run that was saved may have trained what this one freezes.
    let of_all: BTreeSet<_> = plan.graph.params().iter().flat_map(&kept).collect();
    let is_known = found.iter().all(|kind| of_all.contains(kind));
    let has_more = names.iter().all(|name| found.contains(name)) && is_known;
    if is_same && (found == names || has_more) {
        return match missing_state(checkpoint, plan, &kept) {
            Some((param, name)) => lacks(format!("optimizer state `{name}` of `{param}`")),
            None => Ok(()),
        };
    }
    let described = |optim: &str, kept: &[&str]| match kept {
        [] => format!("{optim} (which keeps nothing)"),
        kept => format!("{optim} ({})", kept.join(", ")),
    };
    let optim = saved.optim.map(OptimizerKind::as_str);
    let saved = saved.rule.as_deref().or(optim);
    Err(Error::Resume(ResumeError::OtherOptimizer {
        path: path(),
        found: described(saved.unwrap_or("another optimizer"), &found),
        chosen_by: match parts.rule {
            Some(_) => "the program's rule",
            None => "\"optim\"",
        },
        expected: described(rule, &names),
    }))
}

/// The first trained parameter without all that the optimizer keeps for it, and what is missing.
fn missing_state<'a>(
    checkpoint: &Checkpoint,
    plan: &'a Plan,
    kept: impl Fn(&Param) -> Vec<&'static str>,
) -> Option<(&'a str, &'static str)> {
    let manifest = checkpoint.manifest();
    plan.trained_params().find_map(|param| {
        let is_missing = |name: &&str| {
            let kind = Kind::optimizer(*name);
            manifest.tensor(&kind, &param.name).is_none()
        };
        Some((&*param.name, kept(param).into_iter().find(is_missing)?))
    })
}

/// The names of what the optimizer keeps for a parameter.
fn state_names<'a>(
    plan: &'a Plan,
    args: &'a CheckedArguments,
    parts: &'a TrainerParts,
) -> impl Fn(&Param) -> Vec<&'static str> + 'a {
    let optimizer = args.zero_config(1).optimizer;
    let groups = ParamGroups::new(args, &plan.graph);
    move |param| {
        if let Some(rule) = &parts.rule {
            return rule.state_names().to_vec();
        }
        let kinds = optimizer.state_of(&groups.spec(param, 0)).into_iter();
        kinds.map(|kind| kind.name).collect()
    }
}

/// Checks that the data reach the position at which the run goes on.
fn check_position(
    checkpoint: &Checkpoint,
    plan: &Plan,
    args: &CheckedArguments,
    parts: &TrainerParts,
    saved: &RunState,
) -> Result<()> {
    let position = saved.position.samples;
    match &parts.train_data {
        Some(data) if position > data.len() && !args.ignore_data_skip => {
            Err(Error::Resume(ResumeError::PositionBehindEnd {
                path: checkpoint.path().to_owned(),
                position,
                samples: data.len(),
                length: other_length(plan, checkpoint),
                saved: saved.data.map(|data| data.to_string()),
            }))
        }
        _ => Ok(()),
    }
}

/// The lengths of a checkpoint's sequences and of the run's, where they differ.
pub(super) fn other_length(plan: &Plan, checkpoint: &Checkpoint) -> Option<[u64; 2]> {
    let saved = checkpoint.manifest().header.model["seq_length"].as_u64()?;
    let now = plan.draft.seq_length as u64;
    (saved != now).then_some([saved, now])
}

/// The tokenizers of a checkpoint and of the run, where texts become other tokens than those that
/// the weights have learned. The file in the checkpoint is the same one, also where another
/// version of this program has written it; of a release it alone tells.
pub(super) fn other_tokenizer(
    parts: &TrainerParts,
    saved: Option<&RunState>,
    checkpoint: &Checkpoint,
) -> Option<[TokenizerFingerprint; 2]> {
    let tokenizer = |data: Option<DataFingerprint>| data?.tokenizer;
    let now = tokenizer(parts.fingerprint)?;
    let saved = match saved {
        Some(saved) => Some(tokenizer(saved.data)?),
        None => None,
    };
    if saved == Some(now) {
        return None;
    }
    let own = Tokenizer::from_file(&checkpoint.path().join("tokenizer.json"));
    let own = own.and_then(|own| TokenizerFingerprint::of(&own)).ok();
    let saved = saved.or(own)?;
    (own != Some(now)).then_some([saved, now])
}
