//! Layers, keys, messages and checks of the configuration.

use std::{fs, path::PathBuf};

use insta::assert_snapshot;
use merak_trainer::{Config, Error, MerakArguments, Range, TokenizerSource, key_help, keys};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A configuration file in a folder of its own.
struct ConfigFile {
    _folder: TempDir,
    path: PathBuf,
}

fn file(name: &str, text: &str) -> ConfigFile {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    fs::write(&path, text).expect("a writable folder");
    ConfigFile {
        _folder: folder,
        path,
    }
}

fn load_file(name: &str, text: &str) -> Result<Config, Error> {
    Config::load(Some(&file(name, text).path), [], &[])
}

fn load_line(line: &str) -> Result<Config, Error> {
    let words: Vec<String> = line.split_whitespace().map(Into::into).collect();
    Config::load(None, [], &words)
}

fn load_environment(variable: &str, value: &str) -> Result<Config, Error> {
    Config::load(None, [(variable.to_owned(), value.to_owned())], &[])
}

/// The error of a configuration, with the folder of its file left out.
fn message(result: Result<Config, Error>) -> String {
    let Err(error) = result.and_then(|config| config.check()) else {
        return "no error".into();
    };
    assert!(error.is_user_error());
    let text = error.to_string();
    let Some(start) = text.find("/tmp") else {
        return text;
    };
    let end = text.rfind('/').expect("a slash at least there");
    format!("{}{}", &text[..start], &text[end + 1..])
}

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
        "autopipe.comm_cost" | "peak_flops" => json!(0.25),
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
        "custom_split_points"
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
shard_count = null
trace_method = "fx"
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

#[test]
fn a_later_layer_wins_and_each_value_keeps_its_origin() {
    let file = file(
        "merak.toml",
        "# comment\ntp = 2\npp = 2\ndp = 2\n\n[data]\nmax_bytes = 5e8\n",
    );
    let environment = [
        ("MERAK_PP", "4"),
        ("MERAK_TP", "4"),
        ("MERAK_LOG", "debug"),
        ("PATH", "/bin"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()));
    let line = ["--tp=8", "--save"].map(String::from);
    let config = Config::load(Some(&file.path), environment, &line).unwrap();
    let arguments = config.arguments();
    assert_eq!(
        (arguments.dp, arguments.pp, arguments.tp, arguments.save),
        (2, 4, 8, Some(true))
    );
    assert_eq!(arguments.data.max_bytes, Some(500_000_000));
    let origin = |key| config.origin(key).to_string();
    assert!(origin("dp").ends_with("merak.toml:4"));
    assert!(origin("data.max_bytes").ends_with("merak.toml:7"));
    assert_eq!(origin("pp"), "environment MERAK_PP");
    assert_eq!(origin("tp"), "command line --tp");
    assert_eq!(origin("seed"), "default");
    assert!(
        config
            .explain(None)
            .lines()
            .any(|line| line.starts_with("pp ") && line.ends_with("MERAK_PP"))
    );
}

#[test]
fn a_later_table_replaces_the_earlier_one_whole() {
    let file = file("merak.toml", "[lr_scales]\nwte = 0.5\nwpe = 0.5\n");
    let environment = [("MERAK_LR_SCALES".to_owned(), r#"{"h": 2}"#.to_owned())];
    let config = Config::load(Some(&file.path), environment, &[]).unwrap();
    let explained = &config.to_json()["lr_scales"];
    assert_eq!(explained["value"], json!({"h": 2.0}));
    assert_eq!(explained["origin"], "environment MERAK_LR_SCALES");
    let alone = Config::load(Some(&file.path), [], &[]).unwrap();
    assert!(alone.origin("lr_scales").to_string().ends_with(":1"));
    // A section of the command line gives typed tables, as a file does.
    let file = self::file("merak.toml", "data.tokenizer.train_bpe = 1\n");
    let line = [r#"--data={"tokenizer": "bytes"}"#.to_owned()];
    assert_snapshot!(message(Config::load(Some(&file.path), [], &line)), @r#""data.tokenizer.train_bpe" expects an integer from 257 to 1048576, found 1 (merak.toml:1)"#);
}

#[test]
fn a_wrong_value_is_refused_though_a_later_one_replaces_it() {
    let file = file("merak.toml", "tp = 1.5\n");
    let line = ["--tp=2".to_owned()];
    assert_snapshot!(message(Config::load(Some(&file.path), [], &line)), @r#""tp" expects an integer of at least 1, found 1.5 (merak.toml:1)"#);
    assert_snapshot!(message(load_line("--tp true --tp 2")), @r#""tp" expects an integer of at least 1, found true (command line --tp)"#);
    assert_snapshot!(message(load_line("--data={\"max_bytes\":\"5\"}")), @r#""data.max_bytes" expects an integer of at least 1 or none, found "5" (command line --data)"#);
}

#[test]
fn yaml_values_keep_their_types_lines_and_aliases() {
    let text = "lr_scales: &scales {wte: 0.5}\ndata: {max_bytes: 0x10}\nseed: !!int 7\nlayerwise_lr_decay: .inf\n";
    assert_snapshot!(message(load_file("merak.yaml", text)), @r#""layerwise_lr_decay" expects a number of more than 0 and at most 1, found ".inf" (merak.yaml:4)"#);
    let text = text.replace(".inf", "1.0") + "lr_scheduler_kwargs: *scales\n";
    assert_snapshot!(message(load_file("merak.yaml", &text)).split(',').next_back().expect("a place"), @r#" found {"wte":0.5} (merak.yaml:5)"#);
    assert_snapshot!(message(load_file("merak.yaml", "tp: 1\n---\ntp: 2\n")), @"cannot parse the configuration merak.yaml: more than one YAML document");
    assert_snapshot!(message(load_file("merak.yaml", "tp: 1\n[a]: 2\n")), @"cannot parse the configuration merak.yaml: the key with parts at line 2 is no string: put it in quotes");
    assert_snapshot!(message(load_file("merak.yaml", "? &k tp\n: 2\n? *k\n: 3\n")), @r#"cannot parse the configuration merak.yaml: duplicate key "tp" at line 3"#);
}

#[test]
fn input_paths_are_relative_to_the_file_that_names_them() {
    let text = "output_dir = 'runs'\n[data]\npath = 'text'\ntokenizer = 'tokenizer.json'\n";
    let file = file("merak.toml", text);
    let folder = file.path.parent().unwrap().to_path_buf();
    let config = Config::load(Some(&file.path), [], &[]).unwrap();
    let arguments = config.arguments();
    assert_eq!(
        arguments.data.path.as_ref().unwrap().first(),
        folder.join("text")
    );
    assert_eq!(
        arguments.data.tokenizer,
        TokenizerSource::File(folder.join("tokenizer.json"))
    );
    assert_eq!(arguments.output_dir, Some("runs".into()));
    let line = load_line("--data.path text").unwrap();
    let expected = std::path::absolute("text").unwrap();
    assert_eq!(
        line.arguments().data.path.as_ref().unwrap().first(),
        expected
    );
}

#[test]
fn bare_flags_and_lists_are_read_from_the_command_line() {
    let config = load_line(
        "--save --do-eval false --max_steps -1 --custom-split-points h.1,h.2 --col_para_list=[\"c_fc\"]",
    )
    .unwrap();
    let arguments = config.arguments();
    assert!(arguments.save == Some(true) && !arguments.do_eval);
    assert_eq!(arguments.max_steps, -1);
    assert_eq!(
        arguments.custom_split_points,
        Some(vec!["h.1".into(), "h.2".into()])
    );
    assert_eq!(
        arguments.tp_layer_lists.col_para_list,
        Some(vec!["c_fc".into()])
    );
}

#[test]
fn an_unknown_key_names_its_place_and_the_nearest_key() {
    assert_snapshot!(message(load_file("merak.toml", "\n\ntrain_shedule = '1f1b'\n")), @r#"unknown key "train_shedule" (merak.toml:3); did you mean "train_schedule"?"#);
    assert_snapshot!(message(load_file("merak.toml", "[data]\npth = 'x'\n")), @r#"unknown key "data.pth" (merak.toml:2); did you mean "data.path"?"#);
    assert_snapshot!(message(load_file("merak.yaml", "learning_rat: 1e-3\n")), @r#"unknown key "learning_rat" (merak.yaml:1); did you mean "learning_rate"?"#);
    assert_snapshot!(message(load_environment("MERAK_ZERO_STAGES", "1")), @r#"unknown key "zero_stages" (environment MERAK_ZERO_STAGES); did you mean "zero_stage"?"#);
    assert_snapshot!(message(load_line("--weigth-decay 0.1")), @r#"unknown key "weigth_decay" (command line --weigth-decay); did you mean "weight_decay"?"#);
    assert_snapshot!(message(load_line("--full-speed --tp 2")), @r#"unknown key "full_speed" (command line --full-speed)"#);
    assert_snapshot!(message(load_line("--set xyzzy=1")), @r#"unknown key "xyzzy" (command line --set xyzzy)"#);
}

#[test]
fn a_wrong_type_names_the_expected_one() {
    assert_snapshot!(message(load_file("merak.toml", "tp = 'two'\n")), @r#""tp" expects an integer of at least 1, found "two" (merak.toml:1)"#);
    assert_snapshot!(message(load_file("merak.toml", "tp = 1.5\n")), @r#""tp" expects an integer of at least 1, found 1.5 (merak.toml:1)"#);
    assert_snapshot!(message(load_file("merak.toml", "learning_rate = inf\n")), @r#""learning_rate" expects a number of at least 0, found "inf" (merak.toml:1)"#);
    assert_snapshot!(message(load_file("merak.json", r#"{"save": "yes"}"#)), @r#""save" expects true or false or none, found "yes" (merak.json:1)"#);
    assert_snapshot!(message(load_line("--tp_layer_lists=atuo")), @r#""tp_layer_lists" expects "auto" or a table of "tp_layer_lists.auto", "tp_layer_lists.col_para_list", .., found "atuo" (command line --tp_layer_lists)"#);
    assert_snapshot!(message(load_file("merak.toml", "data = 3\n")), @r#""data" expects a table of "data.path", "data.mixture", .., found 3 (merak.toml:1)"#);
    assert_snapshot!(message(load_environment("MERAK_PP", "many")), @r#""pp" expects an integer of at least 1, found "many" (environment MERAK_PP)"#);
    assert_snapshot!(message(load_line("--optim adamw")), @r#""optim" expects adamw_torch, adam, sgd, adafactor, lamb, lion or muon, found "adamw" (command line --optim); did you mean "adamw_torch"?"#);
    assert_snapshot!(message(load_line("--train-schedule 1f1")), @r#""train_schedule" expects gpipe, 1f1b, ds_default, pre_recompute_1f1b, last_no_recompute_1f1b, shifted_critical_path, interleaved_1f1b, zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v or auto, found "1f1" (command line --train-schedule); did you mean "1f1b"?"#);
}

#[test]
fn adafactor_has_a_short_form() {
    let args = load_line("--adafactor").unwrap().check().unwrap();
    assert_eq!(args.optim.as_str(), "adafactor");
    assert_snapshot!(message(load_line("--adafactor --optim lion")), @r#""adafactor" is true (command line --adafactor), but must be false while "optim" is lion"#);
}

#[test]
fn what_only_recomputation_reads_is_refused_without_it() {
    let without = |keys: &str| {
        message(load_line(&format!(
            "--activation-checkpointing false {keys}"
        )))
    };
    assert_snapshot!(without("--recompute selective"), @r#""recompute" is selective (command line --recompute), but must be "full" unless "activation_checkpointing" is true"#);
    assert_snapshot!(without("--pp 2 --activation-checkpoint-ratio 0.5"), @r#""activation_checkpoint_ratio" is [0.5] (command line --activation-checkpoint-ratio), but must be unset unless "activation_checkpointing" is true"#);
    assert_snapshot!(without(""), @"no error");
}

#[test]
fn what_only_a_search_for_stages_reads_is_refused_elsewhere() {
    assert_snapshot!(message(load_line("--partition-method exact --autopipe.micro-batches 0")), @r#""autopipe.micro_batches" is 0 (command line --autopipe.micro-batches), but must be from 1 to 100000"#);
    assert_snapshot!(message(load_line("--partition-method autopipe --autopipe.comm-cost=-1")), @r#""autopipe.comm_cost" is -1 (command line --autopipe.comm-cost), but must be from 0 to 1e15"#);
    assert_snapshot!(message(load_file("merak.toml", "autopipe.comm_cost = 1.5\n")), @r#""autopipe.comm_cost" is 1.5 (merak.toml:1), but must be unset unless "partition_method" is "autopipe" or "exact""#);
    assert_snapshot!(message(load_file("merak.toml", "[autopipe]\nmicrobatches = 4\n")), @r#"unknown key "autopipe.microbatches" (merak.toml:2); did you mean "autopipe.micro_batches"?"#);
    assert_snapshot!(message(load_line("--partition-method autopipe --autopipe.micro-batches 4")), @"no error");
    // A schedule is searched within the same limit.
    assert_snapshot!(message(load_line("--autopipe.memory-limit 9")), @r#""autopipe.memory_limit" is 9 (command line --autopipe.memory-limit), but must be unset unless "partition_method" is "autopipe" or "exact", or "train_schedule" is "auto""#);
    assert_snapshot!(message(load_line("--pp 2 --train-schedule auto --autopipe.memory-limit 9")), @"no error");
}

#[test]
fn a_feature_of_a_later_version_is_refused_by_name() {
    assert_snapshot!(message(load_file("merak.toml", "zero_stage = 4\n")), @r#""zero_stage" expects 0, 1, 2 or 3, found 4 (merak.toml:1)"#);
    assert_snapshot!(message(load_line("--tp-overlapping-level 4")), @r#""tp_overlapping_level" expects 0, 1, 2 or 3, found 4 (command line --tp-overlapping-level)"#);
    assert_snapshot!(message(load_line("--trace-method dynamo")), @r#""trace_method" "dynamo" (command line --trace-method) is not available in this version: choose fx, which runs the model's own code: that is Rust, and there is no Python for dynamo to watch"#);
    assert_snapshot!(message(load_line("--trace-method none")), @r#""trace_method" "none" (command line --trace-method) is not available in this version: choose fx, which traces the modules of a list too: a model of your own calls them in their order"#);
    assert_snapshot!(message(load_line("--leaf_modules Attention")), @r#""leaf_modules" "Attention" (command line --leaf_modules) is not available in this version: choose none: a graph is traced operation by operation; a module of one's own becomes a few of them, see docs/OWN-MODEL.md"#);
    assert_snapshot!(message(load_file("merak.toml", "data.tokenizer.train_bpe = 4096\n")), @"no error");
    assert_snapshot!(message(load_line("--data.format tensors --data.tokenizer {\"train_bpe\":4096}")), @r#""data.tokenizer" is {"train_bpe":4096} (command line --data.tokenizer), but must be "bytes" or a file under "data.format" tensors, whose files hold no text to train on"#);
    assert_snapshot!(message(load_line("--sp 1 --bf16 false --virtual-stages 1 --lora-config none")), @"no error");
}

#[test]
fn bf16_is_taken_with_and_without_an_adapter() {
    assert_snapshot!(message(load_line("--bf16")), @"no error");
    assert_snapshot!(message(load_line("--bf16 --lora-config lora.json")), @"no error");
}

#[test]
fn f16_is_refused_on_the_default_backend_which_names_bf16() {
    assert_snapshot!(message(load_line("--fp16")), @r#""fp16" is true (command line --fp16), but must be false unless "compute.backend" is "tch"; "bf16" is a type of 16 bits too, and needs no loss scale"#);
    assert_snapshot!(message(load_line("--fp16 --bf16")), @r#""fp16" is true (command line --fp16), but must be false while "bf16" is true: weights have one type"#);
    assert_snapshot!(message(load_line("--initial_scale_power 101")), @r#""initial_scale_power" is 101 (command line --initial_scale_power), but must be from 0 to 100"#);
    assert_snapshot!(message(load_line("--loss-scale=-1")), @r#""loss_scale" is -1 (command line --loss-scale), but must be at least 0"#);
    assert_snapshot!(message(load_line("--hysteresis 0")), @r#""hysteresis" is 0 (command line --hysteresis), but must be at least 1"#);
    // Without `fp16` nothing is scaled.
    assert_snapshot!(message(load_line("--loss_scale 128 --hysteresis 3")), @"no error");
}

#[test]
fn a_hugging_face_argument_that_asks_for_what_happens_anyway_is_taken() {
    assert_snapshot!(message(load_line("--use_cpu")), @"no error");
    assert_snapshot!(message(load_line("--dataloader_pin_memory=false")), @"no error");
    assert_snapshot!(message(load_line("--dataloader_pin_memory=maybe")), @r#""dataloader_pin_memory" "maybe" (command line --dataloader_pin_memory) is not available in this version: choose true or false"#);
    assert_snapshot!(message(load_line("--use_cpu --compute.device cuda")), @r#""use_cpu" is true (command line --use_cpu), but must be false while "compute.device" is "cuda" (command line --compute.device)"#);
    let told = message(load_line("--use_cpu false --compute.device cuda"));
    assert!(!told.contains("use_cpu"), "{told}");
}

#[test]
fn a_hugging_face_argument_without_effect_is_refused_when_set() {
    assert_snapshot!(message(load_file("merak.toml", "deepspeed = 'ds.json'\n")), @r#""deepspeed" (merak.toml:1) is a Hugging Face argument without effect here: see "zero_stage""#);
    assert_snapshot!(message(load_line("--push_to_hub")), @r#""push_to_hub" (command line --push_to_hub) is a Hugging Face argument without effect here: remove it"#);
    assert_snapshot!(message(load_line("--push_to_hub=false")), @"no error");
}

#[test]
fn a_damaged_command_line_or_file_is_one_clear_message() {
    assert_snapshot!(message(load_line("--tp")), @"the option --tp has no value: write --tp VALUE");
    assert_snapshot!(message(load_line("--tp --pp 2")), @"the option --tp has no value: write --tp VALUE");
    assert_snapshot!(message(load_line("--set tp")), @"the option --set tp has no value: write --set tp=VALUE");
    assert_snapshot!(message(load_line("tp=2")), @r#"unexpected argument "tp=2": keys are given as --KEY VALUE or --set KEY=VALUE"#);
    assert_snapshot!(message(load_file("merak.ini", "tp=2")), @"cannot tell the format of the configuration merak.ini: name it .toml, .yaml, .yml or .json");
    assert_snapshot!(message(load_file("merak.toml", "tp = 2\npp = \n")), @"cannot parse the configuration merak.toml: line 2: string values must be quoted, expected literal string");
    assert_snapshot!(message(load_file("merak.toml", "tp = 2\ntp = 3\n")), @r#"cannot parse the configuration merak.toml: line 2: duplicate key "tp""#);
    assert_snapshot!(message(load_file("merak.json", "[1]")), @"cannot parse the configuration merak.json: the file holds no table of keys");
    for (name, text) in [
        ("merak.yaml", "\u{feff}tp: 2\n"),
        ("merak.json", "\u{feff}{\"tp\": 2}"),
    ] {
        assert!(
            load_file(name, text).is_ok(),
            "{name} with a byte-order mark"
        );
    }
    assert_snapshot!(message(load_file("merak.yaml", "tp: [1\n")), @"cannot parse the configuration merak.yaml: while parsing a flow sequence, expected ',' or ']' at byte 7 line 2 column 1");
    assert_snapshot!(message(Config::load(Some("/nowhere/merak.toml".as_ref()), [], &[])), @"cannot read /nowhere/merak.toml");
}

#[test]
fn the_range_of_a_key_is_what_the_check_the_help_and_the_message_say() {
    let help = key_help(None);
    let numbers = ["-1", "0", "1", "2", "1025", "100001", "2e15"];
    let with_range = keys().filter(|key| key.range != Range::ANY);
    for key in with_range {
        let (name, words) = (key.name, key.range.to_string());
        let expected = (key.expected)();
        assert!(expected.contains(&words), "{name}: {expected}, not {words}");
        let entry = help
            .split(&format!("\n{name} = "))
            .nth(1)
            .expect("an entry");
        let says = entry.lines().nth(2).expect("what it expects");
        assert_eq!(says, format!("    Expects {expected}."));
        for number in numbers {
            let told = message(load_line(&format!("--{name}={number}")));
            let is_inside = key.range.contains(number.parse().expect("a number"));
            let beyond = format!("but must be {words}");
            let is_refused =
                told.ends_with(&beyond) || told.contains(&format!("expects {expected}"));
            assert_eq!(is_refused, !is_inside, "{name} = {number}: {told}");
        }
    }
    assert!(keys().filter(|key| key.range != Range::ANY).count() > 40);
    let mut broken = MerakArguments::default();
    broken.learning_rate = f64::NAN;
    let told = broken.check().expect_err("it is no number").to_string();
    assert_snapshot!(told, @r#""learning_rate" is NaN (set in code), but must be at least 0"#);
}

#[test]
fn an_illegal_value_names_the_legal_ones() {
    assert_snapshot!(message(load_file("merak.toml", "\ntp = 0\n")), @r#""tp" is 0 (merak.toml:2), but must be at least 1"#);
    assert_snapshot!(message(load_line("--init_method_std 0")), @r#""init_method_std" is 0 (command line --init_method_std), but must be more than 0"#);
    assert_snapshot!(message(load_line("--num_heads 6 --tp 4")), @r#""num_heads" is 6 (command line --num_heads), but must be a multiple of "tp", which is 4"#);
    assert_snapshot!(message(load_line("--shard_count 2 --pp 4")), @r#""shard_count" is 2 (command line --shard_count), but must be at least "pp", which is 4"#);
    assert_snapshot!(message(load_line("--gradient_predivide_factor 2")), @r#""gradient_predivide_factor" is 2 (command line --gradient_predivide_factor), but must be 1 unless "prescale_gradients" is true"#);
    assert_snapshot!(message(load_line("--gradient_predivide_factor 2 --prescale_gradients")), @"no error");
    assert_snapshot!(message(load_line("--gradient_predivide_factor 0.5 --prescale_gradients")), @"no error");
    assert_snapshot!(message(load_line("--offload_optimizer disk")), @r#""output_dir" is not set: "offload_optimizer" disk keeps optimizer state in files under it"#);
    assert_snapshot!(message(load_line("--offload_optimizer disc")), @r#""offload_optimizer" expects host or disk, found "disc" (command line --offload_optimizer); did you mean "disk"?"#);
    assert_snapshot!(message(load_line("--offload_optimizer none")), @"no error");
    assert_snapshot!(message(load_line("--half_precision_backend cpu_amp --bf16")), @"no error");
    assert_snapshot!(message(load_line("--half_precision_backend apex --bf16")), @r#""half_precision_backend" "apex" (command line --half_precision_backend) is not available in this version: choose amp, or "fp16" alone for weights of 16 bits with f32 masters"#);
    assert_snapshot!(message(load_line("--half_precision_backend amp")), @r#""half_precision_backend" is amp (command line --half_precision_backend), but must be unset unless "bf16" or "fp16" is true, the type of products"#);
    assert_snapshot!(message(load_line("--custom_split_points h.1")), @r#""custom_split_points" is ["h.1"] (command line --custom_split_points), but must be unset unless "split_method" is "layer_split""#);
    assert_snapshot!(message(load_line("--partition_method custom")), @r#""custom_partition" is not set: "partition_method" custom needs the boundaries, such as [0, 6, 12]"#);
    assert_snapshot!(message(load_line("--custom_partition 0,2")), @r#""custom_partition" is [0, 2] (command line --custom_partition), but must be unset unless "partition_method" is "custom""#);
    let custom = |text| {
        message(load_line(&format!(
            "--pp 2 --partition_method custom {text}"
        )))
    };
    assert_snapshot!(custom("--custom_partition 0,2"), @r#""custom_partition" is [0, 2] (command line --custom_partition), but must be 3 boundaries, because "pp" is 2"#);
    assert_snapshot!(custom("--custom_partition 0,4,2"), @r#""custom_partition" is [0, 4, 2] (command line --custom_partition), but must be strictly rising from 0"#);
    assert_snapshot!(custom("--custom_partition 0,2,4"), @"no error");
    assert_snapshot!(message(load_line("--pp 2 --activation_checkpoint_ratio 1.5")), @r#""activation_checkpoint_ratio" is 1.5 (command line --activation_checkpoint_ratio), but must be from 0 to 1"#);
    assert_snapshot!(message(load_line("--pp 2 --activation_checkpoint_ratio 0.5,0.4,0.3")), @r#""activation_checkpoint_ratio" is [0.5, 0.4, 0.3] (command line --activation_checkpoint_ratio), but must be at most 2 values, because "pp" is 2"#);
    assert_snapshot!(message(load_line("--recompute selective --recompute_ops atention")), @r#""recompute_ops" expects attention, activation, norm, dropout or gather, found "atention" (command line --recompute_ops); did you mean "attention"?"#);
    assert_snapshot!(message(load_line("--recompute_ops norm")), @r#""recompute_ops" is ["norm"] (command line --recompute_ops), but must be unset unless "recompute" is "selective""#);
    assert_snapshot!(message(load_line("--recompute budget")), @r#""activation_memory_budget" is not set: "recompute" budget needs the bytes that a rank's activations may take"#);
    assert_snapshot!(message(load_line("--train_schedule zb_v --virtual_stages 3")), @r#""virtual_stages" is 3 (command line --virtual_stages), but must be 2 under "train_schedule" zb_v"#);
    assert_snapshot!(message(load_line("--virtual_stages 2")), @r#""virtual_stages" is 2 (command line --virtual_stages), but must be 1 under "train_schedule" 1f1b"#);
    assert_snapshot!(message(load_line("--train_schedule interleaved_1f1b --virtual_stages 0")), @r#""virtual_stages" is 0 (command line --virtual_stages), but must be at least 1"#);
    assert_snapshot!(message(load_line("--train_schedule zb_v --pp 2 --shard_count 3")), @r#""shard_count" is 3 (command line --shard_count), but must be at least "pp" times 2 stages per rank, which is 4"#);
    assert_snapshot!(message(load_line("--train_schedule zb_v --pp 2 --partition_method custom --custom_partition 0,4,8")), @r#""custom_partition" is [0, 4, 8] (command line --custom_partition), but must be 5 boundaries, because "pp" times 2 stages per rank is 4"#);
    assert_snapshot!(message(load_line("--train_schedule shifted_critical_path --pp 2 --gradient_accumulation_steps 3")), @r#"shifted_critical_path needs gradient_accumulation_steps >= 4 (max of pp 2 and 4), got 3 ("gradient_accumulation_steps", command line --gradient_accumulation_steps)"#);
    assert_snapshot!(message(load_line("--lr_scheduler_kwargs={\"power\":2}")), @r#"the linear schedule takes none, found `power` ("lr_scheduler_kwargs", command line --lr_scheduler_kwargs)"#);
    assert_snapshot!(message(load_line("--lr_scheduler_type polynomial --lr_scheduler_kwargs={\"power\":0}")), @r#""lr_scheduler_kwargs.power" expects a number of more than 0, found 0 (command line --lr_scheduler_kwargs)"#);
    assert_snapshot!(message(load_line("--lr_scheduler_kwargs={\"cycles\":2}")), @r#""lr_scheduler_kwargs" expects num_cycles, power, lr_end, timescale, num_decay_steps, min_lr_ratio or decay_type, found "{"cycles":2}" (command line --lr_scheduler_kwargs)"#);
    assert_snapshot!(message(load_line("--num_train_epochs 0")), @r#""num_train_epochs" is 0 (command line --num_train_epochs), but must be more than 0 unless "max_steps" is"#);
    assert_snapshot!(message(load_line("--num_train_epochs 0 --max_steps 5")), @"no error");
    assert_snapshot!(message(load_line("--top_p 0")), @r#""top_p" is 0 (command line --top_p), but must be more than 0 and at most 1"#);
    assert_snapshot!(message(load_line("--adam_beta2 1")), @r#""adam_beta2" is 1 (command line --adam_beta2), but must be at least 0 and less than 1"#);
    assert_snapshot!(message(load_line("--data.validation_fraction 1")), @r#""data.validation_fraction" is 1 (command line --data.validation_fraction), but must be at least 0 and less than 1"#);
    assert_snapshot!(message(load_line("--dp 99999999999 --tp 99999999999")), @r#""dp" is 99999999999 (command line --dp), but must be so small that "dp" x "tp" x "pp" x "sp", the ranks, is at most 4294967295"#);
}

#[test]
fn degrees_that_do_not_fill_the_world_are_refused() {
    let checked = load_line("--dp 2 --tp 2 --pp 2").unwrap().check().unwrap();
    checked.check_world(8).unwrap();
    assert_snapshot!(checked.check_world(4).unwrap_err(), @"dp 2 x tp 2 x pp 2 x sp 1 = 8, but the world has 4 ranks; nearest that fits: dp 1 x tp 2 x pp 2 x sp 1");
}

#[test]
fn derived_values_follow_the_formulas() {
    let checked = load_line(
        "--dp 2 --per_device_train_batch_size 3 --gradient_accumulation_steps 4 --num_train_epochs 2.5 --seed 7",
    )
    .unwrap()
    .check()
    .unwrap();
    assert_eq!(checked.global_batch(), 24);
    assert_eq!(checked.data_seed(), 7);
    assert_eq!(checked.total_steps(3), 8);
    let fixed = load_line("--max_steps 5 --warmup_ratio 0.3")
        .unwrap()
        .check()
        .unwrap();
    assert_eq!(fixed.total_steps(3), 5);
    assert_eq!(fixed.lr_schedule(5).unwrap().warmup(), 2);
}

#[test]
fn a_key_that_a_file_has_twice_is_named_with_its_line() {
    assert_snapshot!(message(load_file("merak.json", "{\n \"tp\": 1,\n \"tp\": 2\n}")), @r#"cannot parse the configuration merak.json: duplicate key "tp" at line 3 column 5"#);
    assert_snapshot!(message(load_file("merak.json", "{\"data\": {\n \"path\": \"a\",\n \"path\": \"b\"}}")), @r#"cannot parse the configuration merak.json: duplicate key "path" at line 3 column 7"#);
    assert_snapshot!(message(load_file("merak.json", "{\"data.path\": \"a\",\n \"data\": {\"path\": \"b\"}}")), @r#"cannot parse the configuration merak.json: duplicate key "data.path", in its section and beside it"#);
    assert_snapshot!(message(load_file("merak.yaml", "tp: 1\npp: 1\ntp: 2\n")), @r#"cannot parse the configuration merak.yaml: duplicate key "tp" at line 3"#);
    assert_snapshot!(message(load_file("merak.yaml", "data:\n  path: a\n  path: b\n")), @r#"cannot parse the configuration merak.yaml: duplicate key "path" at line 3"#);
    assert_snapshot!(message(load_file("merak.yaml", "lr_scheduler_kwargs: {power: 1, power: 2}\n")), @r#"cannot parse the configuration merak.yaml: duplicate key "power" at line 1"#);
    assert_snapshot!(message(load_file("merak.toml", "[data]\npath = 'a'\npath = 'b'\n")), @r#"cannot parse the configuration merak.toml: line 3: duplicate key "path""#);
    assert_snapshot!(message(load_line("--lr_scheduler_kwargs={\"power\":1,\"power\":2}")), @r#""lr_scheduler_kwargs" expects a table of `num_cycles` (a number of more than 0, under cosine_with_restarts a whole one), `power` (a number of more than 0), `lr_end` (a number of at least 0 and below the learning rate), `timescale` (an integer of at least 1), `num_decay_steps` (an integer of at least 0), `min_lr_ratio` (a number from 0 to 1), `decay_type` (cosine, linear or 1-sqrt), found "{"power":1,"power":2}" (duplicate key "power" at line 1 column 18) (command line --lr_scheduler_kwargs)"#);
    assert_snapshot!(message(load_line("--tp 1 --tp 2")), @"no error");
}

#[test]
fn numbers_of_many_digits_are_shown_short_and_are_no_text() {
    assert_snapshot!(message(load_line("--adam_beta1 1e300")), @r#""adam_beta1" is 1e300 (command line --adam_beta1), but must be at least 0 and less than 1"#);
    assert_snapshot!(message(load_line("--top_p=-1e-300")), @r#""top_p" is -1e-300 (command line --top_p), but must be more than 0 and at most 1"#);
    assert_snapshot!(message(load_line("--top_p 1.5")), @r#""top_p" is 1.5 (command line --top_p), but must be more than 0 and at most 1"#);
    assert_snapshot!(message(load_file("merak.toml", "output_dir = 99999999999999999999999\n")), @r#""output_dir" expects a path or none, found 1e+23 (merak.toml:1)"#);
    assert_snapshot!(message(load_file("merak.toml", "seed = 18446744073709551615\n")), @r#""seed" expects an integer from 0 to 9223372036854775807, found 18446744073709551615 (merak.toml:1)"#);
    assert_snapshot!(message(load_file("merak.json", "{\"model_type\": \"gpt2\"}")), @r#"unknown key "model_type" (merak.json:1); did you mean "model.config"?"#);
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
