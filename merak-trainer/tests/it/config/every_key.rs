//! Laws of every key, and the defaults.

use insta::assert_snapshot;
use merak_trainer::{Config, MerakArguments, keys};
use serde_json::{Value, json};

use super::{load_environment, load_file, load_line, message};

/// A legal value of a key other than its default.
#[expect(clippy::too_many_lines, reason = "a table of keys")]
fn other_value(name: &str) -> Value {
    match name {
        "train_schedule" => json!("gpipe"),
        "partition_method" => json!("parameters"),
        "custom_partition" => json!([0, 3, 6]),
        "split_method" => json!("layer_split"),
        "recompute" => json!("selective"),
        "activation_checkpoint_ratio" => json!([0.5, 0.25]),
        "recompute_ops" => json!(["norm"]),
        "optim" => json!("sgd"),
        "zero_stage" => json!(0),
        "offload_optimizer" => json!("host"),
        "half_precision_backend" => json!("amp"),
        "no_decay_names" => json!(["wpe"]),
        "lr_scales" => json!({"wte": 0.5}),
        "adafactor_decay_rate" => json!(-0.5),
        "lr_scheduler_type" => json!("constant"),
        "lr_scheduler_kwargs" => json!({"num_cycles": 1.5}),
        "resume_from_checkpoint" => json!("latest"),
        "data.format" => json!("tensors"),
        "data.tokenizer" => json!("/data/tokenizer.json"),
        "cost_model" => json!("counted"),
        "autopipe.comm_cost" | "ema_decay" | "peak_flops" => json!(0.25),
        "output_dir"
        | "cost_cache"
        | "data.path"
        | "data.validation_path"
        | "data.chat_template"
        | "model.config"
        | "model.hf_dir"
        | "lora_config"
        | "logging_dir"
        | "distributed.nccl_library" => {
            json!("/data/some")
        }
        "data.mixture" => json!([{ "path": "/data/some", "weight": 0.7 }]),
        "adapter_name" => json!("mine"),
        "metric_for_best_model" => json!("eval_accuracy"),
        "trace_model" => json!("Qwen2ForCausalLM,BertForMaskedLM"),
        "custom_split_points"
        | "leaf_modules"
        | "tp_layer_lists.col_para_list"
        | "tp_layer_lists.row_para_list"
        | "tp_layer_lists.tp_attr_list"
        | "tp_layer_lists.conv_para_list" => {
            json!(["c_attn", "c_fc"])
        }
        "tp_layer_lists.input_output_mapping" => json!([[1, 3, "col"], [4, 1, "row"]]),
        "tp_layer_lists.weight_change_list" => json!([["wpe", 1]]),
        "report_to" => json!("tensorboard"),
        "sp_method" => json!("all_gather"),
        "tp_overlapping_level" => json!(2),
        "save" | "greater_is_better" => json!(true),
        "stop_strings" => json!(["end"]),
        "distributed.engine" => json!("threads"),
        "compute.backend" => json!("tch"),
        "compute.device" => json!("cuda"),
        "compute.threads_per_rank" => json!(3),
        "compute.units" => json!("vector"),
        _ => {
            let key = keys().find(|key| key.name == name).expect("a known key");
            match (key.default)() {
                Value::Bool(flag) => json!(!flag),
                Value::Number(number) if number.is_f64() => json!(0.25),
                _ => json!(7),
            }
        }
    }
}

/// Keys with a single choice in this version: there is no other value to set.
const SINGLE_CHOICE: &[&str] = &["trace_method"];

#[test]
fn every_key_is_reached_from_file_environment_and_command_line() {
    for key in keys().filter(|key| !SINGLE_CHOICE.contains(&key.name)) {
        let value = other_value(key.name);
        assert_ne!(value, (key.default)(), "{} needs another value", key.name);
        let nested = match key.name.split_once('.') {
            Some((section, name)) => json!({ section: { name: value } }),
            None => json!({ key.name: value }),
        };
        let text = value.as_str().map_or_else(|| value.to_string(), Into::into);
        let variable = format!("MERAK_{}", key.name.replace('.', "__").to_uppercase());
        let option = format!("--{}", key.name.replace('_', "-"));
        let set = format!("{}={text}", key.name);
        let configs = [
            load_file("merak.json", &nested.to_string()),
            load_file("merak.yaml", &nested.to_string()),
            load_environment(&variable, &text),
            Config::load(None, [], &[option, text.clone()]),
            Config::load(None, [], &["--set".into(), set]),
        ];
        for config in configs {
            let config = config.unwrap_or_else(|error| panic!("{}: {error}", key.name));
            let explained = &config.to_json()[key.name];
            assert_eq!(explained["value"], value, "{}", key.name);
            assert_ne!(explained["origin"], "default", "{}", key.name);
            assert_ne!(
                config.arguments(),
                &MerakArguments::default(),
                "{}",
                key.name
            );
        }
    }
}

#[test]
fn processes_compare_all_keys_but_those_of_one_host() {
    let common = Config::load(None, [], &[]).unwrap().to_common_toml();
    let ignored = keys().filter(|key| !SINGLE_CHOICE.contains(&key.name));
    let ignored = ignored.filter(|key| {
        let value = other_value(key.name);
        let text = value.as_str().map_or_else(|| value.to_string(), Into::into);
        let other = Config::load(None, [], &[format!("--{}", key.name), text]);
        other.unwrap().to_common_toml() == common
    });
    let ignored: Vec<_> = ignored.map(|key| key.name).collect();
    assert_eq!(
        ignored,
        [
            "cost_cache",
            "lora_config",
            "model.config",
            "model.hf_dir",
            "data.path",
            "data.mixture",
            "data.validation_path",
            "data.tokenizer",
            "data.chat_template",
            "distributed.nccl_library"
        ]
    );
}

#[test]
fn the_resolved_file_gives_the_same_arguments() {
    let mut line = Vec::new();
    for key in keys().filter(|key| !SINGLE_CHOICE.contains(&key.name)) {
        let value = other_value(key.name);
        line.push(format!("--{}", key.name));
        line.push(value.as_str().map_or_else(|| value.to_string(), Into::into));
    }
    let config = Config::load(None, [], &line).unwrap();
    let again = load_file("config.resolved.toml", &config.to_toml()).unwrap();
    assert_eq!(again.arguments(), config.arguments());
    assert_eq!(again.to_toml(), config.to_toml());
}

#[test]
#[expect(clippy::too_many_lines, reason = "a line per key")]
fn defaults_are_the_documented_ones() {
    let defaults: Vec<String> = keys()
        .map(|key| format!("{} = {}", key.name, (key.default)()))
        .collect();
    assert_snapshot!(defaults.join("\n"), @r#"
output_dir = null
overwrite_output_dir = false
dp = 1
tp = 1
sequence_parallel = false
sequence_dim = 1
tp_overlapping_level = 0
sp = 1
sp_method = "ulysses"
pp = 1
train_schedule = "1f1b"
virtual_stages = 1
partition_method = "uniform"
custom_partition = null
cost_model = "measured"
cost_cache = null
split_method = "farthest_min_deps"
custom_split_points = null
leaf_modules = null
shard_count = null
trace_method = "fx"
trace_model = ""
init_method_std = 0.02
activation_checkpointing = true
checkpoint_num_layers = 1
recompute = "full"
activation_checkpoint_ratio = null
recompute_ops = null
activation_memory_budget = null
num_layers = null
seq_length = null
hidden_size = null
num_heads = null
bf16 = false
fp16 = false
half_precision_backend = null
loss_scale = 0.0
initial_scale_power = 32
loss_scale_window = 1000
hysteresis = 2
min_loss_scale = 1
no_tie_modules = false
parallel_vocab = false
zero_stage = 1
zero_allow_untested_optimizer = false
zero_allgather_bucket_size = 500000000
zero_reduce_bucket_size = 500000000
offload_optimizer = null
prescale_gradients = false
gradient_predivide_factor = 1.0
save = null
save_steps = 500
async_save = false
save_total_limit = -1
load_best_model_at_end = false
metric_for_best_model = "eval_loss"
greater_is_better = null
early_stopping_patience = null
early_stopping_threshold = 0.0
finetune = false
no_save_rng = false
no_save_optim = false
no_load_rng = false
no_load_optim = false
resume_from_checkpoint = null
ignore_data_skip = false
lora_config = null
adapter_name = "default"
do_train = false
do_eval = false
do_predict = false
return_logits = false
eval_steps = null
eval_iters = null
seed = 42
data_seed = null
per_device_train_batch_size = 8
per_device_eval_batch_size = 8
gradient_accumulation_steps = 1
dataloader_num_workers = 0
split_inputs = false
dataloader_drop_last = false
num_train_epochs = 3.0
max_steps = -1
optim = "adamw_torch"
adafactor = false
learning_rate = 0.00005
weight_decay = 0.0
no_decay_names = null
lr_scales = {}
layerwise_lr_decay = 1.0
adam_beta1 = 0.9
adam_beta2 = 0.999
adam_epsilon = 1e-8
sgd_momentum = 0.0
nesterov = false
lion_beta1 = 0.9
lion_beta2 = 0.99
adafactor_decay_rate = -0.8
adafactor_clip_threshold = 1.0
adafactor_epsilon = 1e-30
muon_momentum = 0.95
muon_nesterov = true
muon_ns_steps = 5
muon_epsilon = 1e-7
max_grad_norm = 1.0
ema_decay = null
max_skipped_steps = 50
divergence_guard = false
divergence_window = 50
divergence_factor = 3.0
divergence_max_rollbacks = 3
lr_scheduler_type = "linear"
lr_scheduler_kwargs = {}
warmup_steps = 0
warmup_ratio = 0.0
shift_labels = false
label_smoothing_factor = 0.0
logging_steps = 500
report_to = "none"
logging_dir = null
peak_flops = null
wall_clock_breakdown = false
profile_start_step = null
profile_steps = 3
dealloc_pipeoutput = false
text_generation = false
out_seq_length = 1024
max_new_tokens = null
temperature = 0.9
top_k = 0
top_p = 0.9
min_p = 0.0
use_cache = true
repetition_penalty = 1.0
no_repeat_ngram_size = 0
min_new_tokens = null
num_beams = 1
length_penalty = 1.0
early_stopping = false
stop_strings = null
eos_token_id = null
pad_token_id = null
model.config = null
model.hf_dir = null
model.ignore_mismatched_sizes = false
data.path = null
data.mixture = null
data.validation_path = null
data.format = "text"
data.tokenizer = "bytes"
data.chat_template = null
data.packing = false
data.streaming = false
data.shuffle_buffer = 1000
data.validation_fraction = 0.05
data.max_bytes = null
data.skip_binary = false
data.mlm_probability = 0.15
data.mask_replace_prob = 0.8
data.random_replace_prob = 0.1
data.mean_noise_span_length = 3.0
distributed.engine = "auto"
distributed.nccl_library = null
distributed.timeout_s = 600.0
compute.backend = "candle"
compute.device = "cpu"
compute.threads_per_rank = "auto"
compute.units = "matrix"
autopipe.micro_batches = null
autopipe.comm_cost = null
autopipe.memory_limit = null
tp_layer_lists.auto = false
tp_layer_lists.col_para_list = null
tp_layer_lists.row_para_list = null
tp_layer_lists.input_output_mapping = null
tp_layer_lists.weight_change_list = null
tp_layer_lists.tp_attr_list = null
tp_layer_lists.conv_para_list = null
"#);
}

/// Whether a short message says which key, where, and what would be right.
fn check_words(text: &str, key: &str, place: &str) {
    assert!(text.contains(place), "{key} without {place}: {text}");
    let last = key.rsplit('.').next().unwrap_or(key);
    assert!(text.contains(last), "{key}: {text}");
    assert!(text.chars().count() < 1000, "{key}: {text}");
    assert!(!text.contains(char::is_control), "{key}: {text:?}");
    let helps = ["expects", "must be", "did you mean", "choose", "is not set"];
    assert!(
        helps.iter().any(|word| text.contains(word)),
        "{key}: {text}"
    );
}

#[test]
fn every_wrong_value_of_every_key_is_refused_with_key_and_place_in_every_layer() {
    let wrong = [
        json!(-7),
        json!(0),
        json!(1e300),
        json!(2.5),
        json!(""),
        json!("wrong \u{1b}[2J value"),
        json!("x".repeat(5000)),
        json!([1, "x"]),
        json!({"a": 1}),
        json!(true),
        json!(null),
    ];
    let mut refused = 0;
    for key in keys() {
        let full = key.name;
        for value in &wrong {
            let text = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            let table = match full.split_once('.') {
                Some((section, name)) => json!({ section: { name: value } }),
                None => json!({ full: value }),
            };
            let variable = format!("MERAK_{}", full.to_uppercase().replace('.', "__"));
            let line = [format!("--{full}={text}")];
            let layers = [
                (
                    load_file("merak.json", &table.to_string()),
                    "merak.json:1".to_owned(),
                ),
                (
                    load_file("merak.yaml", &table.to_string()),
                    "merak.yaml:1".to_owned(),
                ),
                (
                    load_environment(&variable, &text),
                    format!("environment {variable}"),
                ),
                (
                    Config::load(None, [], &line),
                    format!("command line --{full}"),
                ),
            ];
            for (loaded, place) in layers {
                if let Err(error) = loaded.and_then(|config| config.check()) {
                    refused += 1;
                    check_words(&error.to_string(), full, &place);
                }
            }
        }
        let name = format!("{full}q");
        check_words(
            &message(load_line(&format!("--{name}=1"))),
            full,
            &format!("command line --{name}"),
        );
    }
    assert!(refused > 4000, "only {refused}");
}
