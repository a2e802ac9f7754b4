//! Which values are legal, each by itself and beside the others, and what their messages say.

use insta::assert_snapshot;
use merak_trainer::{MerakArguments, Range, key_help, keys};

use super::{load_environment, load_file, load_line, message};

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
    assert_snapshot!(message(load_file("merak.toml", "learning_rate = inf\n")), @r#""learning_rate" expects a number from 0 to 1e37, found "inf" (merak.toml:1)"#);
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
    assert_snapshot!(message(load_file("merak.toml", "data.tokenizer.train_bpe = 4096\n")), @"no error");
    assert_snapshot!(message(load_line("--data.format tensors --data.tokenizer {\"train_bpe\":4096}")), @r#""data.tokenizer" is {"train_bpe":4096} (command line --data.tokenizer), but must be "bytes" or a file under "data.format" tensors, whose files hold no text to train on"#);
    assert_snapshot!(message(load_line("--sp 1 --bf16 false --virtual-stages 1 --lora-config none")), @"no error");
}

#[test]
fn a_class_that_cannot_be_traced_is_refused_with_all_that_can() {
    assert_snapshot!(message(load_line("--trace_model Qwen2ForCausalLM,BertForMaskedLM")), @"no error");
    assert_snapshot!(message(load_line("--trace_model Qwen2ForCausalLM,Qwen2ForCausalLn")), @r#""trace_model" expects BertForMaskedLM, BertForSequenceClassification, GPT2LMHeadModel, GPT2Model, GPTNeoXForCausalLM, GPTNeoXModel, LlamaForCausalLM, LlamaModel, MistralForCausalLM, MistralModel, OPTForCausalLM, OPTModel, Qwen2ForCausalLM, Qwen2Model, Qwen3ForCausalLM, Qwen3Model, T5ForConditionalGeneration or ViTForImageClassification, found "Qwen2ForCausalLM,Qwen2ForCausalLn" (command line --trace_model); did you mean "Qwen2ForCausalLM"?"#);
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
    assert_snapshot!(told, @r#""learning_rate" is NaN (set in code), but must be from 0 to 1e37"#);
}

#[test]
fn an_illegal_value_names_the_legal_ones() {
    assert_snapshot!(message(load_file("merak.toml", "\ntp = 0\n")), @r#""tp" is 0 (merak.toml:2), but must be at least 1"#);
    assert_snapshot!(message(load_line("--init_method_std 0")), @r#""init_method_std" is 0 (command line --init_method_std), but must be more than 0"#);
    assert_snapshot!(message(load_line("--num_heads 6 --tp 4")), @r#""num_heads" is 6 (command line --num_heads), but must be a multiple of "tp", which is 4"#);
    assert_snapshot!(message(load_line("--seq_length 16,5 --sp 2")), @r#""seq_length" is [16,5] (command line --seq_length), but must be multiples of "sp", which is 2, such as [16,6]"#);
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
fn numbers_of_many_digits_are_shown_short_and_are_no_text() {
    assert_snapshot!(message(load_line("--adam_beta1 1e300")), @r#""adam_beta1" is 1e300 (command line --adam_beta1), but must be at least 0 and less than 1"#);
    assert_snapshot!(message(load_line("--top_p=-1e-300")), @r#""top_p" is -1e-300 (command line --top_p), but must be more than 0 and at most 1"#);
    assert_snapshot!(message(load_line("--top_p 1.5")), @r#""top_p" is 1.5 (command line --top_p), but must be more than 0 and at most 1"#);
    assert_snapshot!(message(load_file("merak.toml", "output_dir = 99999999999999999999999\n")), @r#""output_dir" expects a path or none, found 1e+23 (merak.toml:1)"#);
    assert_snapshot!(message(load_file("merak.toml", "seed = 18446744073709551615\n")), @r#""seed" expects an integer from 0 to 9223372036854775807, found 18446744073709551615 (merak.toml:1)"#);
    assert_snapshot!(message(load_file("merak.json", "{\"model_type\": \"gpt2\"}")), @r#"unknown key "model_type" (merak.json:1); did you mean "model.config"?"#);
}
