//! Every key of a configuration has an effect: on what a run is built from, or in a test by a run.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

use merak_trace::render;
use merak_trainer::{Callback, EvaluationMetrics, MerakTrainer, TrainerControl, keys};

use super::{Workplace, model};
use crate::support::Case;

/// Where the effect of a key shows.
enum Shown {
    /// In what is built from the arguments, beside other keys: another value of the key changes it.
    Built(Probe, &'static [(&'static str, &'static str)], &'static str),
    /// In what a command prints, for keys that commands read.
    Printed(&'static str, &'static str),
    /// In a test by a run: its file within the crate, and its name.
    Run(&'static str, &'static str),
    /// Nowhere, as the key's own text says.
    SameEitherWay,
}

use Shown::{Built, Printed, Run, SameEitherWay};

type Probe = fn(&Case) -> String;

/// How gradients are reduced and weights updated.
const UPDATE: Probe = |case| format!("{:?}", case.arguments().zero_config(1));

/// The learning rate over a hundred steps.
const RATE: Probe = |case| {
    let schedule = case.arguments().lr_schedule(100);
    let schedule = schedule.expect("a legal schedule");
    let rates = (0..100).step_by(7).map(|step| schedule.lr(step));
    format!("{:?}", rates.collect::<Vec<_>>())
};

/// Numbers that follow from the arguments alone.
const COUNTS: Probe = |case| {
    let args = case.arguments();
    let samples = (args.global_batch(), args.data_seed());
    let steps = (args.total_steps(10), args.pipeline_size());
    let kept = (args.saves(), args.run_folder().ok());
    let other = (args.greater_is_better(), args.new_token_limit());
    format!("{samples:?} {steps:?} {kept:?} {other:?}")
};

/// What the ranks run, and the parameters that they hold.
const PLAN: Probe = |case| {
    let plan = case.plan();
    let graph = render::graph(&plan.graph, render::Format::Text);
    let report = plan.partition_report().expect("a plan of a test");
    let schedule = plan.schedule.to_csv();
    let degrees = plan.draft.degrees;
    let params = plan.graph.params();
    format!("{report:?}\n{schedule}\n{graph}\n{degrees:?} {params:?}")
};

/// What searches for stages and for a schedule found.
const SEARCH: Probe = |case| {
    let plan = case.plan();
    format!("{:?} {:?}", plan.partition, plan.search)
};

/// The layers that tensor parallelism splits.
const LISTS: Probe = |case| format!("{:?}", case.inputs().lists);

/// How many samples an evaluation takes.
const EVALUATED: Probe = |case| {
    let samples = case.on_ranks(|trainer| Ok(trainer.evaluate()?.eval_samples));
    format!("{samples:?}")
};

/// Whether a model can be trained so.
const PLANNED: Probe = |case| format!("{:?}", case.try_plan().map(|_| ()));

/// The steps of a training that are evaluated.
const EVALUATIONS: Probe = |case| {
    let evaluated = Evaluated::default();
    let told = |_| [Box::new(evaluated.clone()) as Box<dyn Callback>];
    let ended = case.try_on_ranks_told(told, MerakTrainer::train);
    ended.expect("a training of a test");
    format!("{evaluated:?}")
};

/// Notes the steps that are evaluated.
#[derive(Debug, Clone, Default)]
struct Evaluated(Arc<Mutex<Vec<usize>>>);

impl Callback for Evaluated {
    fn on_evaluate(&mut self, metrics: &EvaluationMetrics, _: &mut TrainerControl) {
        let mut steps = self.0.lock().expect("nobody panics here");
        steps.push(metrics.step);
    }
}

/// A dry run, which prints the plan.
const DRY_RUN: &str = "train merak.toml --dry-run";

const MUON: &[(&str, &str)] = &[("optim", "muon")];
const LION: &[(&str, &str)] = &[("optim", "lion")];
const ADAFACTOR: &[(&str, &str)] = &[("optim", "adafactor")];
const STAGES: &[(&str, &str)] = &[("pp", "2")];
const SEARCHED: &[(&str, &str)] = &[
    ("pp", "4"),
    ("partition_method", "exact"),
    ("train_schedule", "auto"),
];

const OPTIONS: Shown = Run(
    "src/commands/model.rs",
    "every_option_of_generation_follows_its_key_and_has_the_default_of_merak_ckpt",
);
const SEARCHES: Shown = Run(
    "tests/it/parity/search.rs",
    "decoders_search_as_transformers_does",
);
const MASKS: Shown = Run(
    "tests/it/cli/families.rs",
    "bert_fills_in_the_words_of_a_text",
);
const GUARD: Shown = Run(
    "tests/it/laws/divergence.rs",
    "a_spike_takes_the_run_back_past_the_data_on_every_topology",
);
const PARTS: Shown = Run(
    "tests/it/faults.rs",
    "a_missing_part_names_the_flag_that_excuses_it",
);
const EVENTS: Shown = Run(
    "tests/it/cli/reports.rs",
    "event_files_go_where_logging_dir_says_and_move_with_their_run_elsewhere",
);
const PROFILE: Shown = Run(
    "tests/it/cli/reports.rs",
    "a_profile_has_the_actions_of_its_steps_on_a_track_for_each_rank",
);
const SCALES: Shown = Run(
    "src/config/keys.rs",
    "the_scale_of_the_loss_follows_its_keys",
);

/// Each key, and where its effect shows.
#[rustfmt::skip]
const ROWS: &[(&str, Shown)] = &[
    ("output_dir", Built(COUNTS, &[], "some")),
    ("overwrite_output_dir", Run("tests/it/cli/runs.rs", "the_same_command_twice_is_refused_and_changes_nothing")),
    ("dp", Built(PLAN, &[], "2")),
    ("tp", Built(PLAN, &[], "2")),
    ("sequence_parallel", Built(PLAN, &[("tp", "2")], "true")),
    ("sequence_dim", Built(PLANNED, &[("tp", "2"), ("sequence_parallel", "true")], "0")),
    ("tp_overlapping_level", Run("tests/it/laws/overlap.rs", "all_other_degrees_and_recomputation_train_like_one_rank")),
    ("sp", Built(PLAN, &[], "2")),
    ("sp_method", Built(PLAN, &[("sp", "2")], "ring")),
    ("pp", Built(PLAN, &[], "2")),
    ("train_schedule", Built(PLAN, STAGES, "gpipe")),
    ("virtual_stages", Built(PLAN, &[("pp", "2"), ("train_schedule", "interleaved_1f1b")], "2")),
    ("partition_method", Built(PLAN, STAGES, "parameters")),
    ("custom_partition", Run("tests/it/laws/pipeline.rs", "no_cut_into_segments_and_stages_changes_a_bit")),
    ("cost_model", Run("tests/it/costs.rs", "operations_are_counted_where_nothing_is_to_be_measured")),
    ("cost_cache", Run("tests/it/cli/effects.rs", "measured_times_are_kept_in_the_file_that_is_named")),
    ("split_method", Built(PLAN, STAGES, "nearest_min_deps")),
    ("custom_split_points", Run("tests/it/laws/pipeline.rs", "no_cut_into_segments_and_stages_changes_a_bit")),
    ("leaf_modules", Built(PLAN, STAGES, r#"["transformer.h.{i}"]"#)),
    ("shard_count", Built(PLAN, STAGES, "2")),
    ("trace_method", Run("tests/it/config/checks.rs", "a_feature_of_a_later_version_is_refused_by_name")),
    ("trace_model", Run("tests/it/config/checks.rs", "a_class_that_cannot_be_traced_is_refused_with_all_that_can")),
    ("init_method_std", Built(PLAN, &[], "0.3")),
    ("activation_checkpointing", Built(PLAN, &[], "false")),
    ("checkpoint_num_layers", Built(PLAN, &[], "3")),
    ("recompute", Built(PLAN, &[], "selective")),
    ("activation_checkpoint_ratio", Built(PLAN, &[], "0.5")),
    ("recompute_ops", Built(PLAN, &[("recompute", "selective")], "norm")),
    ("activation_memory_budget", Run("tests/it/laws/pipeline.rs", "activations_stay_inside_their_budget")),
    ("num_layers", Printed(DRY_RUN, "2")),
    ("seq_length", Built(PLAN, &[], "4")),
    ("hidden_size", Printed(DRY_RUN, "32")),
    ("num_heads", Printed("trace merak.toml", "1")),
    ("bf16", Built(UPDATE, &[], "true")),
    ("fp16", Run("tests/it/tch.rs", "all_stages_and_topologies_train_like_one_rank_for_thirty_steps_in_16_bits")),
    ("half_precision_backend", Built(UPDATE, &[("bf16", "true")], "amp")),
    ("loss_scale", SCALES),
    ("initial_scale_power", SCALES),
    ("loss_scale_window", SCALES),
    ("hysteresis", SCALES),
    ("min_loss_scale", SCALES),
    ("no_tie_modules", Built(PLAN, &[], "true")),
    ("parallel_vocab", Built(PLAN, &[("tp", "2")], "true")),
    ("zero_stage", Built(UPDATE, &[], "3")),
    ("zero_allow_untested_optimizer", Run("tests/it/laws/other_rule.rs", "zero_takes_an_untested_rule_with_the_key_alone_and_its_state_is_resumed")),
    ("zero_allgather_bucket_size", Built(UPDATE, &[], "100")),
    ("zero_reduce_bucket_size", Built(UPDATE, &[], "100")),
    ("offload_optimizer", Run("tests/it/laws/offload.rs", "the_plan_says_what_lies_in_files_and_what_stays_in_memory")),
    ("prescale_gradients", Built(UPDATE, &[], "true")),
    ("gradient_predivide_factor", Built(UPDATE, &[("prescale_gradients", "true")], "2")),
    ("save", Built(COUNTS, &[], "true")),
    ("save_steps", Run("tests/it/cli/runs.rs", "a_run_saves_at_its_interval_at_epochs_ends_and_at_its_own")),
    ("async_save", Run("tests/it/laws/resume.rs", "a_checkpoint_written_while_training_goes_on_is_the_one_written_at_once")),
    ("save_total_limit", Run("tests/it/laws/best.rs", "the_best_model_is_kept_and_loaded_on_any_topology")),
    ("load_best_model_at_end", Run("tests/it/laws/best.rs", "the_best_model_is_kept_and_loaded_on_any_topology")),
    ("metric_for_best_model", Built(COUNTS, &[], "eval_accuracy")),
    ("greater_is_better", Built(COUNTS, &[], "true")),
    ("early_stopping_patience", Run("tests/it/laws/control.rs", "early_stopping_ends_a_run_on_every_topology_and_goes_on_waiting_when_resumed")),
    ("early_stopping_threshold", Run("src/trainer/early_stopping.rs", "small_improvements_move_the_best_and_do_not_count")),
    ("finetune", Run("tests/it/laws/resume.rs", "order_goes_on_where_it_stopped_and_finetuning_starts_anew")),
    ("no_save_rng", PARTS),
    ("no_save_optim", PARTS),
    ("no_load_rng", PARTS),
    ("no_load_optim", PARTS),
    ("resume_from_checkpoint", Run("tests/it/laws/resume.rs", "a_resumed_run_has_the_bits_of_an_unbroken_one")),
    ("ignore_data_skip", Run("tests/it/laws/resume.rs", "order_goes_on_where_it_stopped_and_finetuning_starts_anew")),
    ("lora_config", Run("tests/it/laws/lora.rs", "what_is_frozen_stays_and_has_no_gradient_and_no_state")),
    ("adapter_name", Run("tests/it/laws/lora.rs", "a_run_goes_on_with_the_adapter_that_its_checkpoint_has")),
    ("do_train", Run("tests/it/cli/settings.rs", "a_training_that_do_train_switches_off_and_a_warmup_beyond_the_run_are_told")),
    ("do_eval", Built(EVALUATIONS, &[("max_steps", "3")], "true")),
    ("do_predict", Run("tests/it/cli/families.rs", "predictions_are_json_lines_in_the_order_of_the_data")),
    ("return_logits", Run("tests/it/laws/prediction.rs", "embeddings_and_logits_have_the_shapes_of_the_model")),
    ("eval_steps", Built(EVALUATIONS, &[("max_steps", "3"), ("do_eval", "true")], "2")),
    ("eval_iters", Built(EVALUATED, &[], "1")),
    ("seed", Built(COUNTS, &[], "7")),
    ("data_seed", Built(COUNTS, &[], "7")),
    ("per_device_train_batch_size", Built(COUNTS, &[], "3")),
    ("per_device_eval_batch_size", Built(EVALUATED, &[("eval_iters", "1")], "3")),
    ("gradient_accumulation_steps", Built(COUNTS, &[], "3")),
    ("dataloader_num_workers", Run("tests/it/laws/data.rs", "prefetching_changes_no_bit")),
    ("split_inputs", Run("tests/it/laws/data.rs", "stages_ask_for_the_tensors_that_they_read_alone")),
    ("dataloader_drop_last", Built(EVALUATED, &[], "true")),
    ("num_train_epochs", Built(COUNTS, &[("max_steps", "-1")], "7")),
    ("max_steps", Built(COUNTS, &[], "7")),
    ("optim", Built(UPDATE, &[], "sgd")),
    ("adafactor", Built(UPDATE, &[], "true")),
    ("learning_rate", Built(RATE, &[], "0.5")),
    ("weight_decay", Built(UPDATE, &[], "0.5")),
    ("no_decay_names", Run("src/plan/groups.rs", "names_choose_what_decays_and_how_fast_it_learns")),
    ("lr_scales", Run("src/plan/groups.rs", "names_choose_what_decays_and_how_fast_it_learns")),
    ("layerwise_lr_decay", Run("src/plan/groups.rs", "each_layer_below_the_top_learns_more_slowly")),
    ("adam_beta1", Built(UPDATE, &[], "0.5")),
    ("adam_beta2", Built(UPDATE, &[], "0.5")),
    ("adam_epsilon", Built(UPDATE, &[], "0.5")),
    ("sgd_momentum", Built(UPDATE, &[("optim", "sgd")], "0.5")),
    ("nesterov", Built(UPDATE, &[("optim", "sgd"), ("sgd_momentum", "0.5")], "true")),
    ("lion_beta1", Built(UPDATE, LION, "0.5")),
    ("lion_beta2", Built(UPDATE, LION, "0.5")),
    ("adafactor_decay_rate", Built(UPDATE, ADAFACTOR, "-0.5")),
    ("adafactor_clip_threshold", Built(UPDATE, ADAFACTOR, "0.5")),
    ("adafactor_epsilon", Built(UPDATE, ADAFACTOR, "0.5")),
    ("muon_momentum", Built(UPDATE, MUON, "0.5")),
    ("muon_nesterov", Built(UPDATE, MUON, "false")),
    ("muon_ns_steps", Built(UPDATE, MUON, "3")),
    ("muon_epsilon", Built(UPDATE, MUON, "0.5")),
    ("max_grad_norm", Built(UPDATE, &[], "0.5")),
    ("ema_decay", Built(UPDATE, &[], "0.5")),
    ("max_skipped_steps", Run("tests/it/cli/samples.rs", "gradients_that_are_never_finite_end_a_run")),
    ("divergence_guard", GUARD),
    ("divergence_window", GUARD),
    ("divergence_factor", GUARD),
    ("divergence_max_rollbacks", Run("tests/it/laws/divergence.rs", "a_run_that_cannot_be_saved_ends_with_what_was_tried")),
    ("lr_scheduler_type", Built(RATE, &[], "cosine")),
    ("lr_scheduler_kwargs", Built(RATE, &[("lr_scheduler_type", "cosine")], r#"{"num_cycles": 1.5}"#)),
    ("warmup_steps", Built(RATE, &[], "30")),
    ("warmup_ratio", Built(RATE, &[("warmup_steps", "0")], "0.3")),
    ("shift_labels", Run("tests/it/cli/samples.rs", "labels_of_hugging_face_are_shifted_when_asked_and_end_with_their_document")),
    ("label_smoothing_factor", Run("tests/it/laws/update.rs", "evaluation_reports_the_loss_without_label_smoothing")),
    ("logging_steps", Run("tests/it/laws/control.rs", "logged_steps_are_told_to_callbacks_once")),
    ("report_to", EVENTS),
    ("logging_dir", EVENTS),
    ("peak_flops", Run("src/metrics/peak.rs", "the_peak_is_measured_or_given_for_each_rank")),
    ("wall_clock_breakdown", Run("tests/it/cli/reports.rs", "a_table_of_each_ranks_instructions_is_logged_where_it_is_asked_for")),
    ("profile_start_step", PROFILE),
    ("profile_steps", PROFILE),
    ("dealloc_pipeoutput", SameEitherWay),
    ("text_generation", Run("tests/it/cli/settings.rs", "text_generation_continues_lines_until_one_says_stop")),
    ("out_seq_length", OPTIONS),
    ("max_new_tokens", OPTIONS),
    ("temperature", OPTIONS),
    ("top_k", OPTIONS),
    ("top_p", OPTIONS),
    ("min_p", OPTIONS),
    ("use_cache", Run("tests/it/laws/generation.rs", "the_cache_changes_no_token")),
    ("repetition_penalty", OPTIONS),
    ("no_repeat_ngram_size", OPTIONS),
    ("min_new_tokens", SEARCHES),
    ("num_beams", OPTIONS),
    ("length_penalty", OPTIONS),
    ("early_stopping", OPTIONS),
    ("stop_strings", Run("tests/it/cli/settings.rs", "text_generation_continues_lines_until_one_says_stop")),
    ("eos_token_id", Run("tests/it/cli/settings.rs", "the_sample_at_the_end_of_a_training_ends_at_the_given_token")),
    ("pad_token_id", Run("tests/it/cli/settings.rs", "special_tokens_are_checked_against_the_vocabulary")),
    ("model.config", Printed(DRY_RUN, "other.json")),
    ("model.hf_dir", Run("tests/it/cli/weights.rs", "training_starts_from_a_hugging_face_folder_on_any_topology")),
    ("model.ignore_mismatched_sizes", Run("tests/it/cli/weights.rs", "a_classifier_starts_on_the_weights_of_another_task")),
    ("data.path", Run("tests/it/cli/inputs.rs", "a_list_of_paths_is_one_text")),
    ("data.mixture", Run("tests/it/cli/inputs.rs", "a_mixture_is_the_same_on_every_topology_and_after_a_resume")),
    ("data.validation_path", Run("tests/it/cli/streams.rs", "a_run_on_a_stream_evaluates_and_predicts_on_data_of_their_own")),
    ("data.format", Run("tests/it/cli/tokens.rs", "training_on_token_files_is_training_on_their_text")),
    ("data.tokenizer", Run("tests/it/cli/tokens.rs", "a_tokenizer_that_is_trained_on_the_text_is_the_same_everywhere")),
    ("data.chat_template", Run("tests/it/cli/chats.rs", "chats_are_learned_alike_on_every_topology_and_by_an_adapter")),
    ("data.packing", Run("tests/it/cli/chats.rs", "packed_chats_learn_as_each_on_its_own_on_every_topology")),
    ("data.streaming", Run("tests/it/cli/streams.rs", "a_stream_is_learned_alike_by_every_topology_and_by_processes")),
    ("data.shuffle_buffer", Run("tests/it/cli/streams.rs", "a_stream_is_learned_alike_by_every_topology_and_by_processes")),
    ("data.validation_fraction", Printed(DRY_RUN, "0.5")),
    ("data.max_bytes", Printed(DRY_RUN, "1000")),
    ("data.skip_binary", Run("tests/it/cli/samples.rs", "records_that_are_no_utf8_are_refused_by_file_and_offset_or_passed_over")),
    ("data.mlm_probability", MASKS),
    ("data.mask_replace_prob", MASKS),
    ("data.random_replace_prob", MASKS),
    ("data.mean_noise_span_length", Run("tests/it/cli/families.rs", "t5_writes_what_is_left_out_of_a_text")),
    ("distributed.engine", Run("tests/it/cli/launch.rs", "an_engine_of_processes_for_one_process_is_refused_with_the_launch_to_write")),
    ("distributed.nccl_library", Run("src/commands/world/nccl.rs", "the_library_is_the_one_that_the_configuration_names")),
    ("distributed.timeout_s", Run("tests/it/faults.rs", "a_rank_that_never_comes_is_named_when_the_deadline_has_passed")),
    ("compute.backend", Run("tests/it/tch.rs", "all_stages_and_topologies_train_like_one_rank_for_thirty_steps_in_16_bits")),
    ("compute.device", Run("tests/it/tch/state.rs", "state_and_masters_of_a_device_train_in_host_memory_like_beside_the_weights")),
    ("compute.threads_per_rank", Run("src/world.rs", "a_process_that_is_bound_to_cores_has_them_for_itself")),
    ("compute.units", Run("src/trainer/warnings.rs", "bf16_without_units_is_said_to_save_what_it_saves")),
    ("autopipe.micro_batches", Built(SEARCH, SEARCHED, "1")),
    ("autopipe.comm_cost", Built(SEARCH, SEARCHED, "1000")),
    ("autopipe.memory_limit", Run("tests/it/costs.rs", "a_limit_of_memory_moves_the_stages_or_says_what_would_do")),
    ("tp_layer_lists.auto", Run("tests/it/laws/topology.rs", "layers_that_are_chosen_or_named_in_other_lists_train_like_one_rank")),
    ("tp_layer_lists.col_para_list", Built(LISTS, &[], "c_attn")),
    ("tp_layer_lists.row_para_list", Built(LISTS, &[], "c_proj")),
    ("tp_layer_lists.input_output_mapping", Built(LISTS, &[], r#"[[1, 3, "col"]]"#)),
    ("tp_layer_lists.weight_change_list", Built(LISTS, &[], r#"[["wpe", 1]]"#)),
    ("tp_layer_lists.tp_attr_list", Built(LISTS, &[], "heads")),
    ("tp_layer_lists.conv_para_list", Built(LISTS, &[], "conv")),
];

/// A small case with these keys.
fn with(keys: &[(&str, &str)]) -> Case {
    let case = Case::gpt2();
    keys.iter()
        .fold(case, |case, (key, value)| case.with(key, value))
}

/// Whether a test of a file of this crate has this name, in a file that knows the key.
fn is_test(key: &str, file: &str, name: &str) -> bool {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let text = fs::read_to_string(path).unwrap_or_default();
    let last = key.rsplit('.').next().unwrap_or(key);
    let mut words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    text.contains(&format!("fn {name}(")) && words.any(|word| word == last)
}

#[test]
fn every_key_has_an_effect_that_is_shown() {
    let has_row = |name: &str| ROWS.iter().any(|(key, _)| *key == name);
    let names = keys().map(|key| key.name);
    let without: Vec<_> = names.filter(|name| !has_row(name)).collect();
    assert!(without.is_empty(), "no row shows the effect of {without:?}");
    let place = Workplace::new();
    let mut other = model();
    other["n_layer"] = 1.into();
    place.write("other.json", &other.to_string());
    let plan = place.succeed(DRY_RUN);
    assert_eq!(place.succeed(DRY_RUN), plan, "a plan is the same each time");
    let is_shown = |name: &str, shown: &Shown| match shown {
        Built(probe, beside, other) => {
            let changed = [*beside, &[(name, *other)]].concat();
            probe(&with(beside)) != probe(&with(&changed))
        }
        Printed(command, other) => {
            place.succeed(&format!("{command} --{name} {other}")) != place.succeed(command)
        }
        Run(file, test) => is_test(name, file, test),
        SameEitherWay => {
            let mut same = keys().filter(|key| key.doc.ends_with("both values do the same."));
            same.any(|key| key.name == name)
        }
    };
    let silent = ROWS.iter().filter(|(name, shown)| !is_shown(name, shown));
    let silent: Vec<_> = silent.map(|(name, _)| *name).collect();
    assert!(silent.is_empty(), "nothing shows the effect of {silent:?}");
}

#[test]
fn measured_times_are_kept_in_the_file_that_is_named() {
    let place = Workplace::new();
    let keys = "--max_steps 1 --cost_model measured --cost_cache own/costs.json";
    fs::create_dir(place.path("own")).unwrap();
    place.succeed(&format!("train merak.toml {keys}"));
    let kept = fs::read_to_string(place.path("own/costs.json")).unwrap();
    assert!(kept.starts_with('{'), "{kept}");
    // Processes have times of what connects them.
    place.succeed(&format!(
        "launch -n 2 -- train merak.toml {keys} --tp 2 --output_dir processes"
    ));
    let kept = fs::read_to_string(place.path("own/costs.json")).unwrap();
    assert!(kept.contains("by tcp on hosts 2 x 0"), "{kept}");
}
