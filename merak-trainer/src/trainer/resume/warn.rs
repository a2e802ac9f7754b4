//! Warnings of what a run that goes on has otherwise than the run that saved its checkpoint.

use super::{
    super::{TrainerParts, run_state::RunState},
    check::{other_length, other_tokenizer},
    fresh::Fresh,
};
use crate::{
    config::{CheckedArguments, TokenizerSource},
    plan::Plan,
};
use merak_ckpt::{Checkpoint, MAX_CONFIG_BYTES, format::CONFIG, read_text, words::brief};
use merak_trace::{Graph, Node, Op, models, op::Class};
use merak_zero::EMA;
use serde_json::Value;
use std::path::Path;

/// Warns of what a checkpoint was saved with and is not so here. A run that takes the weights alone
/// reads other data, and needs the same tokens.
pub(in crate::trainer) fn warn_of_checkpoint(
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
    warn_of_model(plan, checkpoint);
    match saved {
        Some(saved) if !args.finetune => {
            warn_of_data(plan, parts, saved, checkpoint);
            warn_of_batch(args, saved, checkpoint);
            warn_of_optimizer(args, checkpoint);
            warn_of_averages(args, checkpoint);
        }
        _ => warn_of_tokenizer(args, parts, saved, checkpoint),
    }
}

/// Warns where weights of the same shapes are used otherwise than by the model that they were saved
/// from, as with another number of heads.
fn warn_of_model(plan: &Plan, checkpoint: &Checkpoint) {
    let read = || {
        let text = read_text(&checkpoint.path().join(CONFIG), MAX_CONFIG_BYTES).ok()?;
        models::from_config(&serde_json::from_str(&text).ok()?).ok()
    };
    // A model of the program's own has no file that says what it computes.
    let Some(saved) = read() else { return };
    let own = plan.logits_of(&*plan.draft.model);
    let (Ok(saved), Ok(own)) = (plan.logits_of(&*saved), own) else {
        return;
    };
    if let Some((layer, saved, now)) = other_use(&saved, &own) {
        tracing::warn!(
            path = %checkpoint.path().display(),
            layer,
            saved,
            now,
            "the weights are not used as the model of the checkpoint uses them"
        );
    }
}

/// Fields of operations that change no value outside of training.
const GRADIENT_FIELDS: [&str; 2] = ["dropout", "padding"];

/// The first layer that computes otherwise in the second graph, and what it does in each. Dropout
/// counts as no difference, nor do graphs of other lengths, as of other inputs.
fn other_use(saved: &Graph, own: &Graph) -> Option<(String, String, String)> {
    let counted = |graph: &'_ Graph| -> Vec<Node> {
        let nodes = graph.nodes().iter();
        let nodes = nodes.filter(|node| node.op.class() != Class::Dropout);
        nodes.cloned().collect()
    };
    let (saved, own) = (counted(saved), counted(own));
    let mut nodes = saved.iter().zip(&own).filter(|_| saved.len() == own.len());
    nodes.find_map(|(saved, own)| {
        let told = |op: &Op| match serde_json::to_value(op).unwrap_or_default() {
            Value::Object(named) => named.into_iter().next().unwrap_or_default(),
            name => (name.as_str().unwrap_or_default().to_owned(), Value::Null),
        };
        let ((name, fields), (own_name, own_fields)) = (told(&saved.op), told(&own.op));
        if name != own_name {
            return Some((own.scope.to_string(), name, own_name));
        }
        let fields = fields.as_object()?.iter();
        let mut fields = fields.filter(|(field, value)| {
            !GRADIENT_FIELDS.contains(&field.as_str()) && own_fields.get(field) != Some(*value)
        });
        let (field, value) = fields.next()?;
        let shown = |value: &Value| brief(&format!("{name} with {field} {value}"));
        let now = shown(own_fields.get(field).unwrap_or(&Value::Null));
        Some((own.scope.to_string(), shown(value), now))
    })
}

/// Warns where texts become other tokens than those that the weights have learned.
fn warn_of_tokenizer(
    args: &CheckedArguments,
    parts: &TrainerParts,
    saved: Option<&RunState>,
    checkpoint: &Checkpoint,
) {
    let own = checkpoint.path().join("tokenizer.json");
    // Where no other one is set, a file of megabytes need not be read again.
    if args.data.tokenizer == TokenizerSource::File(own) {
        return;
    }
    if let Some([saved, now]) = other_tokenizer(parts, saved, checkpoint) {
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
            "\"seq_length\" is not that of the checkpoint: training goes on after as many samples of the new length"
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
            "the data are a stream now: training goes on in it after as many samples as the epoch has used"
        );
    } else if saved.samples != now.samples && now.samples > 0 && length.is_none() {
        tracing::warn!(
            %path,
            saved = saved.samples,
            now = now.samples,
            "the same data make another number of training samples: training goes on after as many of them"
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
            "a step has another number of samples than in the checkpoint's run: training goes on after the samples \
             that it has seen, and the learning rate after its steps"
        );
    }
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

/// Warns where averages of the weights do not go on as the checkpoint's run had them.
fn warn_of_averages(args: &CheckedArguments, checkpoint: &Checkpoint) {
    let path = checkpoint.path().display();
    let mut kinds = checkpoint.manifest().kinds().into_iter();
    let are_saved = kinds.any(|kind| kind.as_str() == EMA);
    match args.ema_decay {
        Some(_) if !are_saved => {
            tracing::warn!(
                %path,
                "the checkpoint has no averages of the weights: they start as its weights"
            );
        }
        Some(_) if args.no_load_optim => {
            tracing::warn!(
                %path,
                "\"no_load_optim\" leaves the checkpoint's averages of the weights out as well: they start as its weights"
            );
        }
        None if are_saved && !args.no_load_optim => {
            tracing::warn!(
                %path,
                "\"ema_decay\" is unset: the checkpoint's averages of the weights are dropped"
            );
        }
        _ => {}
    }
}

/// Warns where the run goes on with seeds other than the given ones.
pub(in crate::trainer) fn warn_of_seeds(args: &CheckedArguments, saved: &RunState, path: &Path) {
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
