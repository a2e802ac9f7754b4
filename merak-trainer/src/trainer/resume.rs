//! Which checkpoint a run goes on from, and whether it fits: decided from files and the plan alone,
//! so that every rank comes to the same answer.

use super::{
    TrainerParts,
    checkpoint::{LoadedCheckpoint, RunState},
};
use crate::{
    config::CheckedArguments,
    data::DataFingerprint,
    error::{Error, Result, ResumeError, chain},
    folder::{ADAPTER_CONFIG, AUTO, Contents, OWN_CHECKPOINTS},
    plan::{BASE_NAME, ParamGroups, Plan},
};
use merak_ckpt::{
    Checkpoint, Error as CkptError, Kind, LoraConfig, Manifest, TensorEntry, format::CHECKPOINTS,
};
use merak_mpu::names::nearest;
use merak_trace::{Param, models};
use merak_zero::OptimizerKind;
use serde_json::Value;
use std::{
    borrow::Cow,
    collections::{BTreeSet, VecDeque},
    path::{Path, PathBuf},
};

/// The checkpoints that `resume_from_checkpoint` names, best first, each opened when it is asked
/// for.
#[derive(Debug)]
pub(super) enum Candidates {
    /// A checkpoint that the user named; no other is tried.
    Named(Option<PathBuf>),
    /// `auto`: the one that `latest` names, then the others from the highest step down; damaged
    /// ones are passed over.
    Auto(VecDeque<PathBuf>),
}

impl Candidates {
    /// Warns of a file `latest` that cannot be followed and, as they come, of damaged checkpoints.
    pub(super) fn new(from: &str, output_dir: impl FnOnce() -> Result<PathBuf>) -> Result<Self> {
        Ok(match from {
            AUTO => Self::Auto(by_preference(&output_dir()?, true)?),
            "latest" => {
                let folder = output_dir()?;
                Self::named(&folder, Ok(folder.clone()))?
            }
            path => Self::named(Path::new(path), output_dir())?,
        })
    }

    /// The checkpoint at a path, or that of the run whose folder the path names; `output_dir` is
    /// the folder of the run that goes on.
    fn named(path: &Path, output_dir: Result<PathBuf>) -> Result<Self> {
        let mut now = path.to_owned();
        if let Ok(folder) = output_dir {
            let contents = Contents::of(&folder)?;
            if let Some(place) = contents.locate(path) {
                let is_run = place == folder || place.file_name() == Some(CHECKPOINTS.as_ref());
                let newest = by_preference(&folder, false)?.pop_front();
                now = newest.filter(|_| is_run).unwrap_or(place);
            }
        }
        Ok(Self::Named(Some(now)))
    }

    /// Whether damaged checkpoints are passed over.
    pub(super) fn is_auto(&self) -> bool {
        matches!(self, Self::Auto(_))
    }
}

impl Iterator for Candidates {
    type Item = Result<Checkpoint>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Named(path) => {
                let path = path.take()?;
                Some(Checkpoint::open_weights(path).map_err(Into::into))
            }
            Self::Auto(paths) => loop {
                match Checkpoint::open(paths.pop_front()?) {
                    Ok(checkpoint) => return Some(Ok(checkpoint)),
                    Err(error) => pass_over(&error),
                }
            },
        }
    }
}

/// Warns that `auto` passes over a damaged checkpoint.
pub(super) fn pass_over(error: &dyn std::error::Error) {
    tracing::warn!(error = chain(error), "checkpoint passed over");
}

/// The checkpoints of a run's folder, best first. `tells` says whether to warn of a file `latest`
/// that cannot be followed.
fn by_preference(folder: &Path, tells: bool) -> Result<VecDeque<PathBuf>> {
    let run = Contents::of(folder)?;
    let steps = run.steps()?.into_iter().rev();
    let mut paths: VecDeque<_> = steps.map(|step| run.path_of(step)).collect();
    let reason = match run.latest() {
        Ok(Some(latest)) => {
            paths.retain(|path| *path != latest);
            paths.push_front(latest);
            return Ok(paths);
        }
        Ok(None) => "it is missing".to_owned(),
        Err(error) => error.to_string(),
    };
    if tells && !paths.is_empty() {
        let folder = run.place(CHECKPOINTS);
        let folder = folder.display();
        tracing::warn!(%folder, reason, "the file `latest` cannot be followed: the highest step counts");
    }
    Ok(paths)
}

/// The checkpoint that a run with these arguments goes on from, after every check that needs no
/// rank, each checksum included; `None` for a fresh start. Changes nothing.
///
/// # Errors
/// When a required checkpoint is missing; when it is damaged, of another model, or lacks a part
/// that no flag excuses.
pub(super) fn find(
    plan: &Plan,
    args: &CheckedArguments,
    parts: &TrainerParts,
) -> Result<Option<LoadedCheckpoint>> {
    if let Some(from) = &args.resume_from_checkpoint
        && let Some(found) =
            find_from(from, plan, args, parts).map_err(|error| with_words(error, from))?
    {
        return Ok(Some(found));
    }
    if let Some(folder) = &args.model.hf_dir {
        let release = Checkpoint::open_weights(&folder.0)?;
        check(&untied(release, args)?, plan, args, parts)?;
    }
    Ok(None)
}

/// Adds the nearest of these words to an error that a path does not exist.
pub(super) fn with_words(error: Error, from: &str) -> Error {
    match error {
        Error::Checkpoint(reason)
            if matches!(*reason, CkptError::NotFound { .. })
                && !OWN_CHECKPOINTS.contains(&from) =>
        {
            let nearest = nearest(from, OWN_CHECKPOINTS).map(Into::into);
            Error::Resume(ResumeError::NoCheckpoint { reason, nearest })
        }
        other => other,
    }
}

fn find_from(
    from: &str,
    plan: &Plan,
    args: &CheckedArguments,
    parts: &TrainerParts,
) -> Result<Option<LoadedCheckpoint>> {
    let mut candidates = Candidates::new(from, || args.run_folder())?;
    while let Some(checkpoint) = candidates.next().transpose()? {
        let checkpoint = untied(checkpoint, args)?;
        let state = check(&checkpoint, plan, args, parts)?;
        let Some(damage) = checkpoint.verify().damage.into_iter().next() else {
            warn_of_checkpoint(plan, args, parts, state.as_ref(), &checkpoint);
            if state.is_some() && !args.finetune {
                adapter_base(plan, &checkpoint);
            }
            let mut found = LoadedCheckpoint::of(&checkpoint, state.as_ref(), plan, args);
            if let Ok(folder) = args.run_folder() {
                found.path = Contents::of(&folder)?.named(&found.path);
            }
            return Ok(Some(found));
        };
        let error = CkptError::Damaged {
            path: checkpoint.path().to_owned(),
            damage: Box::new(damage),
            older: checkpoint.older()?.map(|older| older.path().to_owned()),
        };
        if !candidates.is_auto() {
            return Err(error.into());
        }
        pass_over(&error);
    }
    Ok(None)
}

/// Gives a checkpoint of which only weights are taken a head of its own, with `no_tie_modules`.
pub(super) fn untied(checkpoint: Checkpoint, args: &CheckedArguments) -> Result<Checkpoint> {
    let is_base = args.finetune || checkpoint.manifest().header.state.is_null();
    if args.no_tie_modules && is_base {
        return Ok(checkpoint.untied()?);
    }
    Ok(checkpoint)
}

/// Checks what the manifest tells: the model, the parts, the optimizer. Returns the state of the
/// run that saved it; `None` where it is a release, weights without a run.
pub(super) fn check(
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
        if !args.no_load_optim {
            check_optimizer(checkpoint, plan, (args, parts), state)?;
        }
        check_position(checkpoint, plan, args, parts, state)?;
    }
    Ok(state)
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
        [extra, ..] if is_release => {
            tracing::warn!(
                name = extra,
                "the model does not use a tensor of the checkpoint"
            );
            Ok(())
        }
        [extra, ..] => Err(other(format!("the model has no parameter {extra}"))),
        [] => Ok(()),
    }
}

/// The parameters that start anew beside the weights of a checkpoint.
pub(super) struct Fresh<'a> {
    manifest: &'a Manifest,
    is_release: bool,
    /// Whether an adapter starts on a release or another base without an adapter.
    has_adapter: bool,
    /// Modules of the classifier that starts on a release of another task.
    classifier: &'static [&'static str],
    resizes: bool,
}

impl<'a> Fresh<'a> {
    pub(super) fn of(
        checkpoint: &'a Checkpoint,
        plan: &Plan,
        args: &CheckedArguments,
        is_release: bool,
    ) -> Self {
        let manifest = checkpoint.manifest();
        let family = models::family(plan.draft.info.family).filter(|_| is_release);
        Self {
            manifest,
            is_release,
            has_adapter: (is_release || args.finetune) && lacks_adapter(manifest),
            classifier: family.map_or(&[], |family| family.classifier),
            resizes: args.model.ignore_mismatched_sizes,
        }
    }

    /// Whether a parameter starts anew.
    pub(super) fn has(&self, param: &Param) -> bool {
        if param.beside.is_some() {
            return self.has_adapter;
        }
        let name = stored_name(self.manifest, &param.name, self.is_release);
        let stored = self.manifest.tensor(&Kind::Parameter, &name);
        let fits = |entry: &TensorEntry| entry.shape == param.full.shape || !self.resizes;
        self.is_of_classifier(param) && !stored.is_some_and(fits)
    }

    /// The names of the parameters that start anew, those of adapters left out.
    pub(super) fn names(&self, plan: &Plan) -> Vec<String> {
        let params = plan.graph.params().iter();
        let fresh = params.filter(|param| param.beside.is_none() && self.has(param));
        fresh.map(|param| param.name.clone()).collect()
    }

    /// The names of the checkpoint's parameters that the model does not use.
    pub(super) fn unused(&self, plan: &Plan) -> Vec<String> {
        let params = plan.graph.params().iter();
        let used: BTreeSet<_> = params
            .filter(|param| !self.has(param))
            .map(|param| stored_name(self.manifest, &param.name, self.is_release))
            .collect();
        let stored = self.manifest.tensors_of(&Kind::Parameter);
        let names = stored.map(|entry| &entry.name);
        names
            .filter(|name| !used.contains(name.as_str()))
            .cloned()
            .collect()
    }

    /// Whether a parameter of another size may start anew.
    fn may_resize(&self, param: &Param) -> bool {
        self.is_of_classifier(param) && !self.resizes
    }

    /// Whether a parameter is one of a classifier that the run trains.
    fn is_of_classifier(&self, param: &Param) -> bool {
        param.trainable && self.in_classifier(param)
    }

    /// Whether a parameter is one of the classifier of the model's family.
    fn in_classifier(&self, param: &Param) -> bool {
        let is_within = |module: &&str| {
            let rest = param.name.strip_prefix(*module);
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        self.classifier.iter().any(is_within)
    }
}

/// Whether a checkpoint has no parameters of adapters.
pub(super) fn lacks_adapter(manifest: &Manifest) -> bool {
    let mut params = manifest.tensors_of(&Kind::Parameter);
    !params.any(TensorEntry::is_of_adapter)
}

/// The name that a parameter has in a checkpoint. Only releases may leave the model's base prefix
/// out, as in `wte.weight` for `transformer.wte.weight`, or have one more.
pub(super) fn stored_name<'a>(
    manifest: &'a Manifest,
    name: &'a str,
    is_release: bool,
) -> Cow<'a, str> {
    let has = |name: &str| manifest.tensor(&Kind::Parameter, name).is_some();
    if !is_release || has(name) {
        return name.into();
    }
    let without_first = |name: &'a str| name.split_once('.').map(|(_, rest)| rest);
    if let Some(bare) = without_first(name).filter(|bare| has(bare)) {
        return bare.into();
    }
    let longer = manifest
        .tensors_of(&Kind::Parameter)
        .find(|entry| without_first(&entry.name) == Some(name));
    longer.map_or(name, |entry| &entry.name).into()
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
        .filter(|kind| **kind != Kind::Parameter)
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
    if is_same && found == names {
        let manifest = checkpoint.manifest();
        let mut params = plan.trained_params();
        let missing = params.find_map(|param| {
            let is_missing = |name: &&str| {
                let kind = Kind::optimizer(*name);
                manifest.tensor(&kind, &param.name).is_none()
            };
            Some((&param.name, kept(param).into_iter().find(is_missing)?))
        });
        return match missing {
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

/// The name of the rule of a run.
pub(super) fn rule_name<'a>(args: &CheckedArguments, parts: &'a TrainerParts) -> &'a str {
    let other = parts.rule.as_ref().map(|rule| rule.name());
    other.unwrap_or(args.optim.as_str())
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
fn other_length(plan: &Plan, checkpoint: &Checkpoint) -> Option<[u64; 2]> {
    let saved = checkpoint.manifest().header.model["seq_length"].as_u64()?;
    let now = plan.draft.seq_length as u64;
    (saved != now).then_some([saved, now])
}

/// Warns of what a checkpoint was saved with and is not so here. A run that takes the weights alone
/// reads other data, and needs the same tokens.
pub(super) fn warn_of_checkpoint(
    plan: &Plan,
    args: &CheckedArguments,
    parts: &TrainerParts,
    saved: Option<&RunState>,
    checkpoint: &Checkpoint,
) {
    let names = Fresh::of(checkpoint, plan, args, saved.is_none()).names(plan);
    if !names.is_empty() {
        tracing::warn!(
            path = %checkpoint.path().display(),
            names = names.join(", "),
            "the weights have no classifier of this size: it starts at random"
        );
    }
    match saved {
        Some(saved) if args.finetune => warn_of_tokenizer(parts, saved, checkpoint),
        Some(saved) => {
            warn_of_data(plan, parts, saved, checkpoint);
            warn_of_batch(args, saved, checkpoint);
            warn_of_optimizer(args, checkpoint);
        }
        None => {}
    }
}

/// Warns where texts become other tokens than those that the weights have learned.
fn warn_of_tokenizer(parts: &TrainerParts, saved: &RunState, checkpoint: &Checkpoint) {
    let tokenizer = |data: Option<DataFingerprint>| data?.tokenizer;
    let (Some(saved), Some(now)) = (tokenizer(saved.data), tokenizer(parts.fingerprint)) else {
        return;
    };
    if saved != now {
        tracing::warn!(
            path = %checkpoint.path().display(),
            %saved,
            %now,
            "the tokenizer is not that of the checkpoint, whose weights know other tokens: set \"data.tokenizer\" to that of its folder"
        );
    }
}

/// Warns where the run goes on in samples other than those that the checkpoint was saved with: of
/// other data, or cut from the same data in another way.
fn warn_of_data(plan: &Plan, parts: &TrainerParts, saved: &RunState, checkpoint: &Checkpoint) {
    let path = checkpoint.path().display();
    let length = other_length(plan, checkpoint);
    if let Some([saved, now]) = length {
        tracing::warn!(
            %path,
            saved,
            now,
            "\"seq_length\" is not that of the checkpoint: training goes on behind as many samples of the new length"
        );
    }
    let (Some(saved), Some(now)) = (saved.data, parts.fingerprint) else {
        return;
    };
    if !saved.is_of_same_files(&now) {
        tracing::warn!(
            %path,
            %saved,
            %now,
            "the data are not those that the checkpoint was saved with: training goes on at its place in other data"
        );
    } else if parts
        .train_data
        .as_ref()
        .is_some_and(|data| data.is_stream())
        && saved.samples > 0
    {
        tracing::warn!(
            %path,
            "the data are a stream now: training goes on in it behind as many samples as the epoch has used"
        );
    } else if saved.samples != now.samples && now.samples > 0 && length.is_none() {
        tracing::warn!(
            %path,
            saved = saved.samples,
            now = now.samples,
            "the same data make another number of training samples: training goes on behind as many of them"
        );
    }
}

/// Warns where steps have other numbers of samples than those that have passed.
fn warn_of_batch(args: &CheckedArguments, saved: &RunState, checkpoint: &Checkpoint) {
    let (saved, now) = (saved.global_batch, args.global_batch());
    if saved != now {
        tracing::warn!(
            path = %checkpoint.path().display(),
            saved,
            now,
            "a step has another number of samples than in the checkpoint's run: training goes on behind the samples \
             that it has seen, and the learning rate behind its steps"
        );
    }
}

/// The name of the base in a checkpoint's adapter, which a resumed run keeps: its weights are those
/// of the checkpoint. Warns where the run names another base.
pub(super) fn adapter_base(plan: &Plan, checkpoint: &Checkpoint) -> Option<Value> {
    let lora = plan.draft.lora.as_ref()?;
    let saved = LoraConfig::read(&checkpoint.path().join(ADAPTER_CONFIG)).ok()?;
    let saved = saved.to_json()[BASE_NAME].clone();
    let named = &lora.config.to_json()[BASE_NAME];
    if !named.is_null() && *named != saved {
        tracing::warn!(
            %named,
            %saved,
            "the adapter's base is that of the checkpoint; the one named here is not used"
        );
    }
    Some(saved)
}

/// Warns where a run that another program began goes on with other numbers of the optimizer.
fn warn_of_optimizer(args: &CheckedArguments, checkpoint: &Checkpoint) {
    let state = &checkpoint.manifest().header.state;
    let Some(groups) = state["imported"]["param_groups"].as_object() else {
        return;
    };
    let number = |value: &Value| value.as_f64().or(value.as_bool().map(f64::from));
    let fields: [(&str, f64, &[&str]); 7] = [
        ("learning_rate", args.learning_rate, &["/initial_lr", "/lr"]),
        ("weight_decay", args.weight_decay, &["/weight_decay"]),
        ("adam_beta1", args.adam_beta1, &["/betas/0"]),
        ("adam_beta2", args.adam_beta2, &["/betas/1"]),
        ("adam_epsilon", args.adam_epsilon, &["/eps"]),
        ("sgd_momentum", args.sgd_momentum, &["/momentum"]),
        ("nesterov", f64::from(args.nesterov), &["/nesterov"]),
    ];
    for (key, given, places) in fields {
        // A learning-rate scheduler keeps its starting rate in `initial_lr`.
        let kept = |group: &Value| places.iter().find_map(|at| number(group.pointer(at)?));
        let mut kept: Vec<_> = groups.values().filter_map(kept).collect();
        // Zeros count only where all groups have them: norms may have no weight decay.
        if kept.iter().any(|&kept| kept != 0.0) {
            kept.retain(|&kept| kept != 0.0);
        }
        kept.dedup();
        let is_given = |kept: &f64| (kept - given).abs() <= 1e-6 * given.abs();
        if !kept.is_empty() && !kept.iter().any(is_given) {
            let path = checkpoint.path().display();
            tracing::warn!(
                key,
                given,
                ?kept,
                %path,
                "the run that was imported had another value, and goes on with the given one"
            );
        }
    }
}

/// Warns where the run goes on with seeds other than the given ones.
pub(super) fn warn_of_seeds(args: &CheckedArguments, saved: &RunState, path: &Path) {
    let seeds = [
        ("seed", args.seed, saved.seed),
        ("data_seed", args.data_seed(), saved.data_seed),
    ];
    for (key, given, kept) in seeds {
        if given != kept {
            tracing::warn!(
                key,
                given,
                kept,
                path = %path.display(),
                "the run goes on with the checkpoint's seed; \"no_load_rng\" would take the given one"
            );
        }
    }
}
