//! Keys that act only beside another one.

use merak_zero::OptimizerKind;

use super::{choice::CostSource, keys::MerakArguments};

/// Keys, the condition under which they act, and the message when it does not hold.
type Idle = (
    &'static [&'static str],
    fn(&MerakArguments) -> bool,
    &'static str,
);

/// The keys that no check refuses where they have no effect: a configuration stays as it is while
/// the other key is changed for a run.
const IDLE: &[Idle] = &[
    (&["eval_steps"], |args| args.do_eval, "\"do_eval\" is false"),
    (
        &["profile_steps"],
        |args| args.profile_start_step.is_some(),
        "\"profile_start_step\" is unset",
    ),
    (
        &["adapter_name"],
        |args| args.lora_config.is_some(),
        "\"lora_config\" is unset",
    ),
    (
        &["save_steps", "save_total_limit", "async_save"],
        |args| args.save != Some(false),
        "\"save\" is false",
    ),
    (
        &["metric_for_best_model", "greater_is_better"],
        |args| args.do_eval,
        "\"do_eval\" is false",
    ),
    (
        &["metric_for_best_model", "greater_is_better"],
        |args| !args.do_eval || args.saves() || args.early_stopping_patience.is_some(),
        "no checkpoint is saved, and \"early_stopping_patience\" is unset",
    ),
    (
        &[
            "divergence_window",
            "divergence_factor",
            "divergence_max_rollbacks",
        ],
        |args| args.divergence_guard,
        "\"divergence_guard\" is false",
    ),
    (
        &[
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "min_loss_scale",
        ],
        |args| args.fp16,
        "\"fp16\" is false",
    ),
    (
        &[
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "min_loss_scale",
        ],
        |args| !args.fp16 || args.loss_scale <= 0.0,
        "\"loss_scale\" fixes the scale",
    ),
    (
        &["warmup_ratio"],
        |args| args.warmup_steps == 0,
        "\"warmup_steps\" is set",
    ),
    (
        &["checkpoint_num_layers", "activation_checkpoint_ratio"],
        |args| args.activation_checkpointing,
        "\"activation_checkpointing\" is false",
    ),
    (&["sp_method"], |args| args.sp > 1, "\"sp\" is 1"),
    (
        &["sequence_dim"],
        |args| args.tp > 1 || args.sp > 1,
        "\"tp\" and \"sp\" are 1",
    ),
    (
        &[
            "sequence_parallel",
            "parallel_vocab",
            "tp_overlapping_level",
        ],
        |args| args.tp > 1,
        "\"tp\" is 1",
    ),
    (
        &[
            "zero_allgather_bucket_size",
            "prescale_gradients",
            "gradient_predivide_factor",
        ],
        |args| args.dp > 1 || args.sp > 1,
        "\"dp\" and \"sp\" are 1",
    ),
    (
        &["zero_allgather_bucket_size"],
        |args| {
            let alone = args.dp == 1 && args.sp == 1;
            alone || (1..=2).contains(&u8::from(args.zero_stage))
        },
        "\"zero_stage\" is not 1 or 2",
    ),
    (
        &["cost_cache"],
        |args| args.cost_model == CostSource::Measured,
        "\"cost_model\" is not \"measured\"",
    ),
    (
        &["adam_beta1", "adam_beta2", "adam_epsilon"],
        |args| {
            !matches!(
                args.optim,
                OptimizerKind::Sgd | OptimizerKind::Lion | OptimizerKind::Adafactor
            )
        },
        "\"optim\" takes no step of Adam's or LAMB's",
    ),
    (
        &["sgd_momentum"],
        |args| args.optim == OptimizerKind::Sgd,
        "\"optim\" is not \"sgd\"",
    ),
    (
        &["lion_beta1", "lion_beta2"],
        |args| args.optim == OptimizerKind::Lion,
        "\"optim\" is not \"lion\"",
    ),
    (
        &[
            "muon_momentum",
            "muon_nesterov",
            "muon_ns_steps",
            "muon_epsilon",
        ],
        |args| args.optim == OptimizerKind::Muon,
        "\"optim\" is not \"muon\"",
    ),
    (
        &[
            "adafactor_decay_rate",
            "adafactor_clip_threshold",
            "adafactor_epsilon",
        ],
        |args| args.optim == OptimizerKind::Adafactor,
        "\"optim\" is not \"adafactor\"",
    ),
    (
        &["no_load_rng", "no_load_optim", "ignore_data_skip"],
        |args| args.resume_from_checkpoint.is_some(),
        "\"resume_from_checkpoint\" is unset",
    ),
    (
        &["length_penalty", "early_stopping"],
        |args| args.num_beams > 1,
        "\"num_beams\" is 1",
    ),
];

/// Warning for each key whose value is not its default and has no effect.
pub(super) fn without_effect(args: &MerakArguments) -> Vec<String> {
    let idle = IDLE.iter().filter(|(_, acts, _)| !acts(args));
    let changed = |name: &str| {
        let key = MerakArguments::KEYS.iter().find(|key| key.name == name);
        key.is_some_and(|key| args.get(name) != Some((key.default)()))
    };
    idle.flat_map(|(names, _, why)| {
        let names = names.iter().filter(|name| changed(name));
        names.map(move |name| format!("\"{name}\" has no effect: {why}"))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn told(keys: &str) -> Vec<String> {
        let line: Vec<_> = keys
            .split_whitespace()
            .map(|key| format!("--{key}"))
            .collect();
        let args = Config::load(None, [], &line).unwrap().check().unwrap();
        without_effect(&args)
    }

    #[test]
    fn every_name_of_the_table_is_a_key() {
        for (names, ..) in IDLE {
            for name in *names {
                assert!(MerakArguments::KEYS.iter().any(|key| key.name == *name));
            }
        }
    }

    #[test]
    fn a_key_is_told_of_where_what_it_needs_is_missing() {
        assert_eq!(told(""), [""; 0]);
        assert_eq!(
            told("eval_steps=5 profile_steps=3 lion_beta1=0.8"),
            [
                "\"eval_steps\" has no effect: \"do_eval\" is false",
                "\"lion_beta1\" has no effect: \"optim\" is not \"lion\"",
            ]
        );
        assert_eq!(
            told("eval_steps=5 do_eval lion_beta1=0.8 optim=lion"),
            [""; 0]
        );
        assert_eq!(
            told("adam_beta2=0.9 optim=lion no_load_optim length_penalty=2 sequence_dim=0"),
            [
                "\"sequence_dim\" has no effect: \"tp\" and \"sp\" are 1",
                "\"adam_beta2\" has no effect: \"optim\" takes no step of Adam's or LAMB's",
                "\"no_load_optim\" has no effect: \"resume_from_checkpoint\" is unset",
                "\"length_penalty\" has no effect: \"num_beams\" is 1",
            ]
        );
        let with = "resume_from_checkpoint=latest no_load_optim num_beams=2 length_penalty=2";
        assert_eq!(told(&format!("adam_beta2=0.9 optim=muon {with}")), [""; 0]);
        let buckets = "zero_allgather_bucket_size=9 zero_reduce_bucket_size=9";
        assert_eq!(
            told(buckets),
            ["\"zero_allgather_bucket_size\" has no effect: \"dp\" and \"sp\" are 1",]
        );
        assert_eq!(
            told(&format!("{buckets} dp=2 zero_stage=3")),
            ["\"zero_allgather_bucket_size\" has no effect: \"zero_stage\" is not 1 or 2"]
        );
        assert_eq!(told(&format!("{buckets} sp=2")), [""; 0]);
        assert_eq!(
            told("save=false save_total_limit=2 sp_method=ring"),
            [
                "\"save_total_limit\" has no effect: \"save\" is false",
                "\"sp_method\" has no effect: \"sp\" is 1",
            ]
        );
    }

    #[test]
    fn evaluations_judge_checkpoints_whether_or_not_the_best_one_is_loaded() {
        let metric = "metric_for_best_model=eval_accuracy";
        let judges = format!("{metric} do_eval output_dir=run");
        assert_eq!(told(&judges), [""; 0]);
        assert_eq!(
            told(metric),
            ["\"metric_for_best_model\" has no effect: \"do_eval\" is false"]
        );
        assert_eq!(
            told(&format!("{judges} save=false")),
            [
                "\"metric_for_best_model\" has no effect: no checkpoint is saved, and \"early_stopping_patience\" is unset"
            ]
        );
        let waits = format!("{judges} save=false early_stopping_patience=2");
        assert_eq!(told(&waits), [""; 0]);
    }
}
