//! Mistakes of users: status 2, one message that names the key or file, and what would be right.

use std::fs;

use insta::assert_snapshot;

use super::{Workplace, model};

#[test]
fn degrees_that_do_not_fit_the_model_are_refused() {
    let place = Workplace::new();
    let train = |keys: &str| place.mistake(&format!("train merak.toml --dry-run {keys}"));
    assert_snapshot!(train("--tp 4"), @r#"error: transformer.h.0.attn: 2 attention heads cannot be split over tp = 4: choose "tp" among 1, 2 (command line --tp)"#);
    assert_snapshot!(train("--pp 400"), @r#"error: the model has 4 layers, fewer than the 400 stages that "pp" asks for: choose at most 4 (command line --pp)"#);
    assert_snapshot!(train("--shard_count 4 --pp 8"), @r#"error: "shard_count" is 4 (command line --shard_count), but must be at least "pp", which is 8"#);
    assert_snapshot!(train("--pp 2 --train_schedule shifted_critical_path --gradient_accumulation_steps 3"), @r#"error: shifted_critical_path needs gradient_accumulation_steps >= 4 (max of pp 2 and 4), got 3 ("gradient_accumulation_steps", command line --gradient_accumulation_steps)"#);
    assert_snapshot!(train("--pp 4 --train_schedule pre_recompute_1f1b --gradient_accumulation_steps 2"), @r#"error: pre_recompute_1f1b needs gradient_accumulation_steps >= 4 (pp 4), got 2 ("gradient_accumulation_steps", command line --gradient_accumulation_steps)"#);
    assert_snapshot!(train("--dp 0"), @r#"error: "dp" is 0 (command line --dp), but must be at least 1"#);
    assert_snapshot!(train("--seq_length 64"), @r#"error: "n_positions" of the model's configuration allows sequences of 1 to 32 tokens, not 64 ("seq_length", command line --seq_length)"#);
}

#[test]
fn unknown_and_ill_typed_keys_name_the_nearest_in_every_layer() {
    let place = Workplace::new();
    place.write(
        "bad.toml",
        "output_dir = \"run\"\ngradient_acumulation_steps = 4\n",
    );
    place.write("typed.toml", "tp = \"two\"\n");
    assert_snapshot!(place.mistake("train bad.toml"), @r#"error: unknown key "gradient_acumulation_steps" (bad.toml:2); did you mean "gradient_accumulation_steps"?"#);
    assert_snapshot!(place.mistake("config typed.toml"), @r#"error: "tp" expects an integer of at least 1, found "two" (typed.toml:1)"#);
    assert_snapshot!(place.mistake("train merak.toml --learing_rate 1"), @r#"error: unknown key "learing_rate" (command line --learing_rate); did you mean "learning_rate"?"#);
    assert_snapshot!(place.mistake("train merak.toml --Train_Schedule gpipe"), @r#"error: unknown key "Train_Schedule" (command line --Train_Schedule); did you mean "train_schedule"?"#);
    assert_snapshot!(place.mistake("train merak.toml --set data.pth=x"), @r#"error: unknown key "data.pth" (command line --set data.pth); did you mean "data.path"?"#);
    assert_snapshot!(place.mistake("config merak.toml --max_steps many"), @r#"error: "max_steps" expects an integer, found "many" (command line --max_steps)"#);
    let schedule = place.mistake("train merak.toml --train_schedule 1f1c");
    let (start, end) = (
        "error: \"train_schedule\" expects gpipe, 1f1b, ",
        "found \"1f1c\" (command line --train_schedule); did you mean \"1f1b\"?",
    );
    assert!(
        schedule.starts_with(start) && schedule.ends_with(end),
        "{schedule}"
    );
    assert_snapshot!(place.mistake("train merak.toml --resume"), @"error: the option --resume has no value: write --resume VALUE");
    let environment = place
        .command("train merak.toml")
        .env("MERAK_SEQ_LENGHT", "8")
        .output()
        .unwrap();
    let ended = place.ended(&environment);
    assert_eq!(ended.status, Some(2));
    assert_snapshot!(ended.stderr, @r#"error: unknown key "seq_lenght" (environment MERAK_SEQ_LENGHT); did you mean "seq_length"?"#);
}

#[test]
fn slips_of_spelling_are_told_with_what_to_write() {
    let place = Workplace::new();
    let train = |keys: &str| place.mistake(&format!("train merak.toml {keys}"));
    assert_snapshot!(train("--set tp:2"), @"error: the option --set tp:2 has no value: write --set tp=2");
    assert_snapshot!(train("--model gpt2"), @r#"error: "model" expects a table of "model.config", "model.hf_dir", .., found "gpt2" (command line --model)"#);
    assert_snapshot!(train("--gpu 4"), @r#"error: unknown key "gpu" (command line --gpu); did you mean "compute.device"?"#);
    assert_snapshot!(train("-\u{2013}tp 2"), @r#"error: "-–tp" begins with an en dash: write "--tp""#);
    assert_snapshot!(train("\u{2014}tp 2"), @r#"error: "—tp" begins with an em dash: write "--tp""#);
}

#[test]
fn numbers_outside_of_their_range_blame_the_key_or_its_entry() {
    let place = Workplace::new();
    let config = |keys: &str| place.mistake(&format!("config merak.toml {keys}"));
    assert_snapshot!(config("--sgd_momentum 1"), @r#"error: "sgd_momentum" is 1 (command line --sgd_momentum), but must be at least 0 and less than 1"#);
    assert_snapshot!(config("--prescale_gradients --gradient_predivide_factor 1e-300"), @r#"error: "gradient_predivide_factor" is 1e-300 (command line --gradient_predivide_factor), but must be from 1e-9 to 1e9"#);
    assert_snapshot!(config("--adam_epsilon 1e-50"), @r#"error: "adam_epsilon" is 1e-50 (command line --adam_epsilon), but must be from 1e-37 to 1e37"#);
    assert_snapshot!(config("--muon_epsilon 1e-40"), @r#"error: "muon_epsilon" is 1e-40 (command line --muon_epsilon), but must be from 1e-37 to 1e37"#);
    assert_snapshot!(config("--save_total_limit 9223372036854775808"), @r#"error: "save_total_limit" expects an integer, found 9223372036854775808, which is beyond the largest, 9223372036854775807 (command line --save_total_limit)"#);
    assert_snapshot!(config("--activation_memory_budget 18446744073709551616"), @r#"error: "activation_memory_budget" expects an integer of at least 0 or none, found 18446744073709551616, which is beyond the largest, 18446744073709551615 (command line --activation_memory_budget)"#);
    let kwargs = |kwargs: &str| config(&format!("--lr_scheduler_kwargs {kwargs}"));
    assert_snapshot!(kwargs(r#"{"timescale":-5}"#), @r#"error: "lr_scheduler_kwargs.timescale" expects an integer of at least 1, found -5 (command line --lr_scheduler_kwargs)"#);
    assert_snapshot!(kwargs(r#"{"num_decay_steps":2.5}"#), @r#"error: "lr_scheduler_kwargs.num_decay_steps" expects an integer of at least 0, found 2.5 (command line --lr_scheduler_kwargs)"#);
    assert_snapshot!(kwargs(r#"{"min_lr_ratio":2}"#), @r#"error: "lr_scheduler_kwargs.min_lr_ratio" expects a number from 0 to 1, found 2 (command line --lr_scheduler_kwargs)"#);
}

#[test]
fn parts_of_names_that_no_parameter_has_are_refused() {
    let place = Workplace::new();
    let train = |keys: &str| place.mistake(&format!("train merak.toml --dry-run {keys}"));
    assert_snapshot!(train(r#"--lr_scales {"c_fc":2,"c_fcc":0}"#), @r#"error: "lr_scales" has "c_fcc", expected a part of a parameter's name such as "transformer.wte.weight"; did you mean "c_fc"? (command line --lr_scales)"#);
    assert_snapshot!(train(r#"--no_decay_names ["wpe","transformer.h.9.mlp."]"#), @r#"error: "no_decay_names" has "transformer.h.9.mlp.", expected a part of a parameter's name such as "transformer.wte.weight"; did you mean "transformer.h.0.mlp"? (command line --no_decay_names)"#);
    // Parameters of all stages count, whichever of them a rank has.
    place.succeed(r#"train merak.toml --dry-run --pp 2 --lr_scales {"wte":0,"ln_f":2}"#);
}

#[test]
fn missing_and_unusable_files_are_named() {
    let place = Workplace::new();
    place.write("empty/a.txt", "");
    place.write("short/a.txt", "0123456789");
    place.write("broken.json", "{\"model_type\": ");
    place.write("other.json", "{\"model_type\": \"gpt9\"}");
    let mut small = model();
    small["vocab_size"] = 100.into();
    place.write("small.json", &small.to_string());
    let train = |keys: &str| place.mistake(&format!("train merak.toml {keys}"));
    assert_snapshot!(train("--data.path nowhere"), @r#"error: cannot read nowhere, which "data.path" names (command line --data.path): No such file or directory (os error 2)"#);
    assert_snapshot!(train("--data.path empty"), @r#"error: no text in empty: "data.path" needs a file or folder with text (command line --data.path)"#);
    assert_snapshot!(train("--data.path short"), @r#"error: the training part of the data has 11 tokens, but one sample needs 17: give more data or a smaller "seq_length" ("data.path", command line --data.path)"#);
    assert_snapshot!(train("--model.config nowhere.json"), @r#"error: cannot read nowhere.json, which "model.config" names (command line --model.config): No such file or directory (os error 2)"#);
    assert_snapshot!(train("--model.config broken.json"), @r#"error: cannot parse the model configuration broken.json: EOF while parsing a value at line 1 column 15 ("model.config", command line --model.config)"#);
    let unknown = train("--model.config other.json");
    assert!(
        unknown.starts_with(r#"error: other.json: model type "gpt9" is not known; known are "#),
        "{unknown}"
    );
    assert_snapshot!(train("--model.config small.json"), @r#"error: the tokenizer bytes has 257 tokens, but the model's vocabulary only 100: use a model configuration with "vocab_size" of at least 257, or another tokenizer ("model.config", command line --model.config)"#);
    assert_snapshot!(train("--data.tokenizer model.json"), @r#"error: cannot use the tokenizer model.json: it is no tokenizer.json: it has no "model" ("data.tokenizer", command line --data.tokenizer)"#);
    assert_snapshot!(train("--per_device_train_batch_size 1000"), @r#"error: 116 training samples are fewer than one global batch of 4000 (1000 per microbatch x 4 microbatches x dp 1): give more data or a smaller batch ("per_device_train_batch_size", command line --per_device_train_batch_size)"#);
    assert_snapshot!(place.mistake("train nowhere.toml"), @"error: cannot read nowhere.toml: No such file or directory (os error 2)");
    place.write("bare.toml", "max_steps = 1\n");
    assert_snapshot!(place.mistake("train bare.toml"), @r#"error: "model.config" is not set: name a Hugging Face config.json"#);
}

#[test]
fn a_path_that_is_not_there_is_told_with_its_nearest_neighbour() {
    let place = Workplace::new();
    place.write("runs/quickstart/notes", "");
    let train = |keys: &str| place.mistake(&format!("train merak.toml {keys}"));
    assert_snapshot!(train("--data.path txt"), @r#"error: cannot read txt, which "data.path" names (command line --data.path): No such file or directory (os error 2); did you mean "text"?"#);
    assert_snapshot!(train("--data.validation_path text/a.text"), @r#"error: cannot read text/a.text, which "data.validation_path" names (command line --data.validation_path): No such file or directory (os error 2); did you mean "text/a.txt"?"#);
    assert_snapshot!(train("--model.config modle.json"), @r#"error: cannot read modle.json, which "model.config" names (command line --model.config): No such file or directory (os error 2); did you mean "model.json"?"#);
    assert_snapshot!(train("--model.config none --model.hf_dir runs/quikstart"), @r#"error: cannot read runs/quikstart/config.json, which "model.hf_dir" names (command line --model.hf_dir): No such file or directory (os error 2); there is no folder runs/quikstart; did you mean "runs/quickstart"?"#);
    assert_snapshot!(train("--data.tokenizer modle.json"), @r#"error: cannot read modle.json, which "data.tokenizer" names (command line --data.tokenizer): No such file or directory (os error 2); did you mean "model.json"?"#);
    assert_snapshot!(train("--resume runs/quikstart"), @r#"error: no checkpoint at runs/quikstart: the path does not exist, expected a checkpoint, an output folder, latest or auto; did you mean "runs/quickstart"? ("resume_from_checkpoint", command line --resume)"#);
    assert_snapshot!(place.mistake("train merk.toml"), @r#"error: cannot read merk.toml: No such file or directory (os error 2); did you mean "merak.toml"?"#);
    assert_snapshot!(place.mistake("generate runs/quikstart --prompt a"), @r#"error: no checkpoint at runs/quikstart: the path does not exist; did you mean "runs/quickstart"?"#);
}

#[test]
fn checkpoints_that_do_not_fit_are_refused() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 2");
    let mut wider = model();
    wider["n_embd"] = 32.into();
    place.write("wider.json", &wider.to_string());
    let resume = |keys: &str| place.mistake(&format!("train merak.toml --max_steps 4 {keys}"));
    assert_snapshot!(resume("--resume latest --model.config wider.json"), @"error: the checkpoint run/checkpoints/step-00000002 is of another model: `hidden_size` is 16 there, but 32 in the model");
    assert_snapshot!(resume("--resume nowhere"), @r#"error: no checkpoint at nowhere: the path does not exist, expected a checkpoint, an output folder, latest or auto ("resume_from_checkpoint", command line --resume)"#);
    // A step that is not there: by its name, its number, its path.
    for step in ["step-00000400", "400", "run/checkpoints/step-00000001"] {
        assert_eq!(
            resume(&format!("--resume {step}")),
            format!(
                "error: no checkpoint at {step}: the path does not exist, expected a checkpoint, an output folder, \
                 latest or auto; did you mean \"run/checkpoints/step-00000002\"? (\"resume_from_checkpoint\", \
                 command line --resume)"
            )
        );
    }
    assert_snapshot!(place.mistake("generate nowhere --prompt a"), @"error: no checkpoint at nowhere: the path does not exist");
    assert_snapshot!(place.mistake("generate text --prompt a"), @"error: no checkpoint at text: expected a folder with a manifest.json, or one whose checkpoints folder has a `latest`");

    assert_snapshot!(resume("--resume latest --optim sgd"), @r#"error: the checkpoint run/checkpoints/step-00000002 has the optimizer state of adamw_torch (exp_avg, exp_avg_sq), but "optim" is sgd (which keeps nothing): choose the same one, or set "no_load_optim" to start with fresh state"#);
    assert_snapshot!(resume("--resume latest --optim adam"), @r#"error: the checkpoint run/checkpoints/step-00000002 has the optimizer state of adamw_torch (exp_avg, exp_avg_sq), but "optim" is adam (exp_avg, exp_avg_sq): choose the same one, or set "no_load_optim" to start with fresh state"#);
    place.succeed(
        "train merak.toml --max_steps 3 --resume latest --optim sgd --no_load_optim --save false",
    );

    let weights = place.path("run/checkpoints/step-00000002/model-00000.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x40;
    fs::write(&weights, bytes).unwrap();
    assert_snapshot!(resume("--resume latest"), @"error: checkpoint run/checkpoints/step-00000002 is damaged: model-00000.safetensors, tensor `transformer.wte.weight`: checksum CHECKSUM, expected CHECKSUM; there is no complete older one");
    let several = resume("--resume latest --tp 2 --pp 2");
    assert!(several.contains("model-00000.safetensors"), "{several}");
    assert_snapshot!(place.mistake("generate run --prompt-ids 1"), @"error: checkpoint run/checkpoints/step-00000002 is damaged: model-00000.safetensors, tensor `transformer.wte.weight`: checksum CHECKSUM, expected CHECKSUM; there is no complete older one");
}

#[test]
fn generation_options_are_checked() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let generate = |options: &str| place.mistake(&format!("generate run {options}"));
    assert_snapshot!(generate("--prompt-ids 5,x"), @r#"error: "x" is no token id: write ids as 5,17,3"#);
    assert_snapshot!(generate("--prompt-ids 5 --adapter nowhere"), @"error: cannot read nowhere/adapter_config.json: the file is missing; there is no folder nowhere");
    assert_snapshot!(generate("--prompt-ids 5 --top-p 2"), @r#"error: "top_p" is 2 (command line --top-p), but must be more than 0 and at most 1"#);
    assert_snapshot!(generate("--prompt-ids 5 --temperature -1"), @r#"error: "temperature" is -1 (command line --temperature), but must be at least 0"#);
    assert_snapshot!(generate("--prompt-ids 5 --min-p -1"), @r#"error: "min_p" is -1 (command line --min-p), but must be from 0 to 1"#);
    for (option, start) in [
        (
            "--temperature cold",
            "error: \"temperature\" expects a number of at least 0 or \"greedy\", found \"cold\" (command line --temperature)",
        ),
        ("--top-k -1", "error: invalid value '-1' for '--top-k <K>'"),
        ("--stop=", "error: a value is required for '--stop <TEXT>'"),
        (
            "--dp 18446744073709551615",
            "error: \"dp\" is 18446744073709551615 (command line --dp), but must be so small",
        ),
    ] {
        let refused = generate(&format!("--prompt-ids 5 {option}"));
        assert!(refused.starts_with(start), "{refused}");
    }
    assert_snapshot!(generate("--prompt-ids 300"), @"error: prompt 0 has the token 300, but the model knows 0 to 256 only");
    place.write("blank.txt", "\n\n");
    assert_snapshot!(generate("--prompt-file blank.txt"), @"error: no prompt in blank.txt: write one prompt per line");
    assert_snapshot!(generate("--prompt-file nowhere"), @"error: cannot read nowhere: No such file or directory (os error 2)");
    assert_snapshot!(generate("--prompt-ids 5 --tp 4"), @r#"error: transformer.h.0.attn: 2 attention heads cannot be split over tp = 4: choose "tp" among 1, 2 (command line --tp)"#);
}

#[test]
fn other_commands_check_their_arguments() {
    let place = Workplace::new();
    let unknown = place.mistake("schedule 1f1c -p 2 -m 4");
    let start = "error: unknown schedule \"1f1c\" (one of gpipe, 1f1b, ";
    assert!(unknown.starts_with(start), "{unknown}");
    let end = "inference, auto); did you mean \"1f1b\"?";
    assert!(unknown.ends_with(end), "{unknown}");
    assert_snapshot!(place.mistake("schedule 1f1b -p 4 -m 100000 --format svg"), @"error: --format svg shows at most 50000 actions, and this schedule has 800000: choose fewer microbatches or ranks, or --format csv");
    assert_snapshot!(place.mistake("schedule 1f1b -p 4 -m 8 --cores 0"), @"error: ranks share 0.000001 cores or more, found 0");
    assert_snapshot!(place.mistake("schedule 1f1b -p 4 -m 8 --cores 2 --format csv"), @"error: --cores changes times, which --format grid, svg and trace show");
    assert_snapshot!(place.mistake("trace model.json --num_layers 2 --stage x"), @r#"error: --stage expects a number, found "x""#);
    assert_snapshot!(place.mistake("trace model.json --num_layer 2"), @r#"error: unknown key "num_layer" (command line --num_layer); did you mean "num_layers"?"#);
    for (options, name) in [("-p 0 -m 4", "ranks"), ("-p 2 -m four", "microbatches")] {
        let told = place.mistake(&format!("schedule 1f1b {options}"));
        let start = format!(
            "--{name} <{}>': expected a whole number of at least 1\n",
            name.to_uppercase()
        );
        assert!(told.contains(&start), "{told}");
    }
    assert_snapshot!(place.mistake("evaluate text merak.toml"), @"error: text is a folder and stands where CONFIG belongs: write merak evaluate merak.toml text");
    assert_snapshot!(place.mistake("schedule shifted_critical_path -p 4 -m 3"), @"error: shifted_critical_path needs at least 4 microbatches (max of pp 4 and 4), found 3");
    assert_snapshot!(place.mistake("schedule 1f1b -p 2 -m 4 --costs F=x"), @r#"error: expected costs such as F=1,I=1,W=1,R=1,C=0,O=1, found "F=x""#);
    assert_snapshot!(place.mistake("schedule 1f1b -p 2 -m 4 --costs F=1,F=2"), @"error: the cost F is given twice");
    assert_snapshot!(place.mistake("schedule --check nowhere.csv -p 2 -m 4"), @"error: cannot read nowhere.csv: No such file or directory (os error 2)");
    place.write("wrong.csv", "0F0,0B0\n1B0,1F0\n");
    assert_snapshot!(place.mistake("schedule --check wrong.csv -p 2 -m 1"), @"error: wrong.csv: rank 1, position 1: 1B0 comes before 1F0");
    assert_snapshot!(place.mistake("trace model.json --stage 3 --pp 2"), @"error: --stage 3 does not exist: with --pp 2 stages are 0 to 1");
    assert_snapshot!(place.mistake("trace model.json --pp 2"), @"error: --pp 2 cuts the graph, but --stage does not say which part to print: add --stage K with K from 0 to 1");
    assert_snapshot!(place.mistake("schedule 1f1b -p 2 -m 4 --costs F=1e300"), @"error: the cost F must be from 0 to 1e15, found 1e300");
    assert_snapshot!(place.mistake("trace nowhere"), @"error: cannot read nowhere: No such file or directory (os error 2)");
    let many = place.mistake(
        "bench generate --layers 1 --hidden 8 --heads 1 --vocab 16 --batch 18446744073709551615",
    );
    assert!(many.starts_with("error: the run needs at least "), "{many}");
    assert!(many.ends_with("choose fewer or shorter prompts"), "{many}");
    assert_snapshot!(place.mistake("bench gpt --batch 7 --microbatches 2"), @"error: --batch is 7, expected a multiple of --microbatches, which is 2");
    assert_snapshot!(place.mistake("bench gpt --hidden 30 --heads 4"), @"error: --heads is 4, which does not divide the width 30");
    assert_snapshot!(place.mistake("bench gpt --dtype f64"), @"error: --dtype expects f32, bf16 or f16, found f64");
    #[cfg(not(feature = "tch"))]
    assert_snapshot!(place.mistake("bench gpt --backend tch"), @r#"error: "compute.backend" "tch" (command line --backend) is not in this build: build with --features tch, or choose candle"#);
    assert_eq!(place.merak("trane").status, Some(2));
    assert_eq!(place.merak("schedule").status, Some(2));
}

#[test]
fn an_output_folder_that_cannot_be_written_is_refused() {
    let place = Workplace::new();
    place.write("file", "in the way");
    let train = |keys: &str| place.mistake(&format!("train merak.toml {keys}"));
    insta::allow_duplicates! {
        for dry in ["", "--dry-run"] {
            let to = |folder: &str| train(&format!("{dry} --output_dir{folder}"));
            assert_snapshot!(to(" file/run"), @r#"error: cannot write into file, which "output_dir" names (command line --output_dir): not a directory"#);
            let message = to(&format!(" {}", "x".repeat(300)));
            let end = "x, which \"output_dir\" names (command line --output_dir): File name too long (os error 36)";
            assert!(message.ends_with(end), "{message}");
            assert_snapshot!(to("="), @r#"error: "output_dir" is empty (command line --output_dir), but must be the name of a folder"#);
            assert_snapshot!(to(" none"), @r#"error: "output_dir" is not set: name the folder that the run writes"#);
        }
    }
}

#[test]
fn a_checkpoint_to_go_on_from_is_looked_for_before_the_data_are_read() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let mut deeper = model();
    deeper["n_layer"] = 5.into();
    place.write("deeper.json", &deeper.to_string());
    // The data are missing too, which is found as soon as they are read.
    let train = |keys: &str| place.mistake(&format!("train merak.toml --data.path nowhere {keys}"));
    assert_snapshot!(train("--resume lost"), @r#"error: no checkpoint at lost: the path does not exist, expected a checkpoint, an output folder, latest or auto ("resume_from_checkpoint", command line --resume)"#);
    assert_snapshot!(train("--resume latest --output_dir lost"), @r#"error: no checkpoint at lost: the path does not exist ("resume_from_checkpoint", command line --resume)"#);
    assert_snapshot!(train("--resume latest --model.config deeper.json"), @"error: the checkpoint run/checkpoints/step-00000001 is of another model: `num_layers` is 4 there, but 5 in the model");
    for sound in ["--resume latest", "--resume auto --output_dir lost"] {
        assert!(
            train(sound).starts_with("error: cannot read nowhere"),
            "{sound}"
        );
    }
    assert_snapshot!(place.mistake("evaluate merak.toml lost --data.path nowhere"), @r#"error: no checkpoint at lost: the path does not exist, expected a checkpoint, an output folder, latest or auto ("resume_from_checkpoint", command line CHECKPOINT)"#);
}

#[test]
fn a_dry_run_refuses_what_the_run_would_refuse() {
    let place = Workplace::new();
    let dry = |keys: &str| place.mistake(&format!("train merak.toml --dry-run {keys}"));
    assert_snapshot!(dry("--per_device_train_batch_size 1000"), @r#"error: 116 training samples are fewer than one global batch of 4000 (1000 per microbatch x 4 microbatches x dp 1): give more data or a smaller batch ("per_device_train_batch_size", command line --per_device_train_batch_size)"#);
    assert_snapshot!(dry("--data.path nowhere"), @r#"error: cannot read nowhere, which "data.path" names (command line --data.path): No such file or directory (os error 2)"#);
    assert_snapshot!(dry("--resume nowhere"), @r#"error: no checkpoint at nowhere: the path does not exist, expected a checkpoint, an output folder, latest or auto ("resume_from_checkpoint", command line --resume)"#);
    assert_snapshot!(dry("--resume latest"), @r#"error: no checkpoint at run: the path does not exist ("resume_from_checkpoint", command line --resume)"#);
    place.succeed("train merak.toml --max_steps 1");
    place.succeed("train merak.toml --max_steps 2 --resume latest");
    let plan = place.succeed("train merak.toml --dry-run --resume latest --tp 2");
    assert!(
        plan.contains("\nresumes   run/checkpoints/step-00000002\n"),
        "{plan}"
    );
    let mut wider = model();
    wider["n_embd"] = 32.into();
    place.write("wider.json", &wider.to_string());
    let other = dry("--resume latest --model.config wider.json");
    assert!(other.contains("is of another model"), "{other}");
    let weights = place.path("run/checkpoints/step-00000002/model-00000.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x40;
    fs::write(&weights, bytes).unwrap();
    let damaged = dry("--resume latest");
    assert!(
        damaged.contains("step-00000002 is damaged: model-00000.safetensors"),
        "{damaged}"
    );
    let plan = place.succeed("train merak.toml --dry-run --resume auto");
    assert!(
        plan.contains("\nresumes   run/checkpoints/step-00000001\n"),
        "{plan}"
    );
}

#[test]
fn short_validation_data_name_their_share() {
    let place = Workplace::new();
    assert_snapshot!(place.mistake("train merak.toml --data.validation_fraction 0.002"), @r#"error: the validation part of the data has 3 tokens, but one sample needs 17: give more data or a smaller "seq_length", or choose another "data.validation_fraction" (0 for no validation) (merak.toml:2)"#);
    assert_snapshot!(place.mistake("train merak.toml --do_eval --data.validation_fraction 0"), @r#"error: "do_eval" is true (command line --do_eval), but must be false while "data.validation_fraction" is 0, which leaves nothing to evaluate"#);
}

#[test]
fn the_best_model_needs_evaluations_and_checkpoints() {
    let place = Workplace::new();
    let train = |keys: &str| place.mistake(&format!("train merak.toml --dry-run {keys}"));
    assert_snapshot!(train("--load_best_model_at_end"), @r#"error: "load_best_model_at_end" is true (command line --load_best_model_at_end), but must be false unless "save" and "do_eval" are true: the best model is a checkpoint whose evaluation was best"#);
    assert_snapshot!(train("--load_best_model_at_end --do_eval --save false"), @r#"error: "load_best_model_at_end" is true (command line --load_best_model_at_end), but must be false unless "save" and "do_eval" are true: the best model is a checkpoint whose evaluation was best"#);
    assert_snapshot!(train("--metric_for_best_model eval_accuracy"), @r#"error: "metric_for_best_model" is eval_accuracy, but an evaluation gives eval_loss or eval_perplexity (command line --metric_for_best_model)"#);
    assert_snapshot!(train("--greater_is_better maybe"), @r#"error: unexpected argument "maybe": keys are given as --KEY VALUE or --set KEY=VALUE"#);
}

#[test]
fn paths_and_sizes_name_their_key_and_its_place() {
    let place = Workplace::new();
    place.write(
        "bad.toml",
        "output_dir = \"run\"\nseq_length = 16\nnum_heads = 3\n\n[model]\nconfig = \"model.json\"\n\n\
         [data]\npath = \"nowhere\"\n",
    );
    assert_snapshot!(place.mistake("train bad.toml"), @r#"error: model configuration: n_head: is 3, which does not divide the width 16 ("num_heads", bad.toml:3)"#);
    assert_snapshot!(place.mistake("train bad.toml --num_heads none"), @r#"error: cannot read nowhere, which "data.path" names (bad.toml:9): No such file or directory (os error 2)"#);
    assert_snapshot!(place.mistake("train merak.toml --hidden_size 15"), @r#"error: model configuration: n_head: is 2, which does not divide the width 15 ("hidden_size", command line --hidden_size)"#);
    assert_snapshot!(place.mistake("train merak.toml --model.config none --model.hf_dir text"), @r#"error: cannot read text/config.json, which "model.hf_dir" names (command line --model.hf_dir): No such file or directory (os error 2)"#);
    assert_snapshot!(place.mistake("trace model.json --tp 3"), @r#"error: transformer.h.0.attn.c_attn: 16 output features cannot be split over tp = 3 (default col_para_list "attn.c_attn"): choose "tp" among 1, 2 (command line --tp)"#);
    place.write(
        "lines.yaml",
        "output_dir: run\ndata:\n  path: text\n  formt: text\n",
    );
    assert_snapshot!(place.mistake("train lines.yaml"), @r#"error: unknown key "data.formt" (lines.yaml:4); did you mean "data.format"?"#);
    place.write("number.yaml", "output_dir: run\n5: text\n");
    assert_snapshot!(place.mistake("train number.yaml"), @"error: cannot parse the configuration number.yaml: the key 5 at line 2 is no string: put it in quotes");
}

#[test]
fn a_folder_stands_for_the_file_in_it_that_a_key_is_about() {
    let place = Workplace::new();
    place.write("gpt/config.json", &model().to_string());
    let dry = "train merak.toml --dry-run";
    assert_eq!(
        place.succeed(&format!("{dry} --model.config gpt")),
        place.succeed(dry)
    );
    assert_snapshot!(place.mistake(&format!("{dry} --model.config text")), @r#"error: cannot read text/config.json, which "model.config" names (command line --model.config): No such file or directory (os error 2)"#);
    assert_snapshot!(place.mistake(&format!("{dry} --data.tokenizer gpt")), @r#"error: cannot read gpt/tokenizer.json, which "data.tokenizer" names (command line --data.tokenizer): No such file or directory (os error 2)"#);
    place.succeed("train merak.toml --max_steps 1");
    place.succeed(&format!(
        "{dry} --data.tokenizer run/checkpoints/step-00000001"
    ));
}

#[test]
fn nothing_that_somebody_typed_acts_on_the_terminal() {
    let place = Workplace::new();
    let hostile = "a\u{1b}[2J\u{9b}31m\u{7}";
    let long = "x".repeat(20_000);
    let words = |key: &str, value: &str| vec![format!("--{key}"), value.to_owned()];
    let lines = [
        words("data.path", hostile),
        words("data.path", &long),
        words("model.config", hostile),
        words("tp", hostile),
        words("tp", &long),
        words("train_schedule", hostile),
        words("output_dir", &format!("merak.toml/{hostile}")),
        words(hostile, "1"),
        words(&long, "1"),
        words("set", hostile),
        vec![hostile.to_owned()],
    ];
    for line in lines {
        let output = place
            .command("train merak.toml")
            .args(&line)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{line:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!stderr.trim_end().contains(char::is_control), "{stderr:?}");
        assert!(stderr.len() < 2048, "{stderr}");
    }
    let line = ["generate", "run", hostile];
    let output = place.command("").args(line).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        !stderr.contains('\u{1b}') && !stderr.contains('\u{9b}'),
        "{stderr:?}"
    );
}

#[test]
fn slips_are_answered_with_what_was_probably_meant() {
    let place = Workplace::new();
    place.write("section.toml", "[modle]\nconfig = \"x\"\n");
    place.write("key.toml", "confg = \"x\"\n");
    place.write("colon.yaml", "tp:2\n");
    assert_snapshot!(place.mistake("config section.toml"), @r#"error: unknown key "modle" (section.toml:1); did you mean "model"?"#);
    assert_snapshot!(place.mistake("config key.toml"), @r#"error: unknown key "confg" (key.toml:1); did you mean "model.config"?"#);
    assert_snapshot!(place.mistake("config colon.yaml"), @"error: cannot parse the configuration colon.yaml: the file holds no table of keys: put a blank after each key's colon, as in tp: 2");
    let message = place.mistake("config merak.toml --set optim=adamw");
    assert!(
        message.contains("did you mean \"adamw_torch\"?"),
        "{message}"
    );
    let message = place.mistake("config --tp 2");
    assert!(
        message.starts_with("error: CONFIG is missing before '--tp'"),
        "{message}"
    );
    let help = place.succeed("schedule --help");
    assert!(help.contains("holds no costs"), "{help}");
    place.succeed("schedule 1f1b --pp 2 -m 2");

    for (variable, option, source) in [("x==", "", "MERAK_LOG"), ("warn", "--log x==", "--log")] {
        let line = format!("{option} config merak.toml");
        let output = place.command(&line).env("MERAK_LOG", variable).output();
        let stderr = String::from_utf8(output.unwrap().stderr).unwrap();
        assert!(
            stderr.starts_with(&format!("error: {source} \"x==\"")),
            "{stderr}"
        );
    }
}

#[test]
fn every_mistyped_option_after_the_file_gets_its_hint() {
    let place = Workplace::new();
    assert_snapshot!(place.mistake("train merak.toml --tp 2 --pq 3 --learning_rat 1 --dry-rum"), @r#"error: unknown key "pq" (command line --pq); did you mean "pp"? and unknown key "learning_rat" (command line --learning_rat); did you mean "learning_rate"? and unknown key "dry_rum" (command line --dry-rum); did you mean "--dry-run"?"#);
    assert_snapshot!(place.mistake("config merak.toml --tp 2 --jsn"), @r#"error: unknown key "jsn" (command line --jsn); did you mean "--json"?"#);
    assert_snapshot!(place.mistake("trace model.json --tp 2 --formt csv"), @r#"error: unknown key "formt" (command line --formt); did you mean "data.format"?"#);
    assert_snapshot!(place.mistake("evaluate merak.toml run --tp 2 --lgo info"), @r#"error: unknown key "lgo" (command line --lgo); did you mean "--log"?"#);
}

#[test]
fn keys_of_other_programs_are_found() {
    let place = Workplace::new();
    let train = |line: &str| place.mistake(&format!("train merak.toml {line}"));
    assert_snapshot!(train("--lr 1e-3"), @r#"error: unknown key "lr" (command line --lr); did you mean "learning_rate"?"#);
    assert_snapshot!(train("--path text"), @r#"error: unknown key "path" (command line --path); did you mean "data.path"?"#);
    assert_snapshot!(train("--batch-size 4"), @r#"error: unknown key "batch_size" (command line --batch-size); did you mean "per_device_train_batch_size"?"#);
}

#[test]
fn magnitudes_that_lists_part_from_their_weight_are_refused() {
    let place = Workplace::new();
    place.write(
        "dora.json",
        "{\"r\": 4, \"target_modules\": [\"lm_head\"], \"use_dora\": true}",
    );
    let mut json = model();
    json["vocab_size"] = 258.into(); // an even number, which two ranks share out
    place.write("even.json", &json.to_string());
    let adapted = "train merak.toml --dry-run --model.config even.json --lora_config dora.json \
                   --tp 2 --pp 2";
    place.succeed(&format!(r#"{adapted} --weight_change_list [["wte",1]]"#));
    assert_snapshot!(place.mistake(&format!(r#"{adapted} --weight_change_list [["wte",1],["lm_head",0]]"#)), @r#"error: `lm_head.lora_magnitude_vector.default.weight` starts at the norms of `transformer.wte.weight`, which pipeline stage 1 gets as a value from another one: choose tensor-parallel lists that cut the weight alike for all its layers, or "pp" 1 ("tp_layer_lists.weight_change_list", command line --weight_change_list)"#);
}

#[test]
fn what_does_not_fit_names_the_key_the_place_and_the_file() {
    let place = Workplace::new();
    let train = |keys: &str| place.mistake(&format!("train merak.toml --dry-run {keys}"));
    let with_model = |name: &str, field: &str, value: u32| {
        let mut json = model();
        json[field] = value.into();
        place.write(name, &json.to_string());
    };
    with_model("odd.json", "n_heads", 3);
    with_model("heads.json", "n_head", 3);
    with_model("short.json", "n_positions", 8);
    with_model("small.json", "vocab_size", 100);
    place.write("rank.json", "{\"rank\": 4}");
    place.write(
        "target.json",
        "{\"r\": 4, \"target_modules\": [\"nothing\"]}",
    );
    assert_snapshot!(train("--model.config odd.json"), @r#"error: odd.json: "n_heads" is 3, but this model has no such field; the nearest known field is "n_head" ("model.config", command line --model.config)"#);
    assert_snapshot!(train("--model.config heads.json"), @r#"error: heads.json: "n_head" is 3, which does not divide the width 16 ("model.config", command line --model.config)"#);
    assert_snapshot!(train("--model.config heads.json --num_layers 2"), @r#"error: heads.json: "n_head" is 3, which does not divide the width 16 ("model.config", command line --model.config)"#);
    assert_snapshot!(train("--num_heads 3"), @r#"error: model configuration: n_head: is 3, which does not divide the width 16 ("num_heads", command line --num_heads)"#);
    assert_snapshot!(train("--hidden_size 17"), @r#"error: model configuration: n_head: is 2, which does not divide the width 17 ("hidden_size", command line --hidden_size)"#);
    assert_snapshot!(train("--model.config short.json"), @r#"error: "n_positions" of the model's configuration allows sequences of 1 to 8 tokens, not 16 ("model.config", command line --model.config)"#);
    assert_snapshot!(train("--model.config small.json"), @r#"error: the tokenizer bytes has 257 tokens, but the model's vocabulary only 100: use a model configuration with "vocab_size" of at least 257, or another tokenizer ("model.config", command line --model.config)"#);
    assert_snapshot!(train("--model.hf_dir text"), @r#"error: cannot read text/config.json: the file is missing ("model.hf_dir", command line --model.hf_dir)"#);
    assert_snapshot!(train("--lora_config rank.json"), @r#"error: cannot read rank.json: `rank` is 4, which is not supported; did you mean "r"? ("lora_config", command line --lora_config)"#);
    assert_snapshot!(train("--lora_config target.json"), @r#"error: target.json: no layer is one of the `target_modules` ["nothing"]: the model's layers are c_attn, c_fc, c_proj, lm_head, wpe, wte ("lora_config", command line --lora_config)"#);
    // An adapter's name is checked whether or not there is an adapter.
    for name in ["lora_A", "weight", "a.b", ""] {
        let message = train(&format!("--adapter_name={name}"));
        let expected = format!(
            "error: \"adapter_name\" expects {}, found \"{name}\" (command line --adapter_name)",
            merak_ckpt::ADAPTER_NAMES
        );
        assert_eq!(message, expected);
    }
    assert_snapshot!(train("--split_method layer_split --custom_split_points transformer.h.9"), @r#"error: split point "transformer.h.9" matches no module or parameter; the nearest is "transformer.h.0" ("custom_split_points", command line --custom_split_points)"#);
    assert_snapshot!(train("--leaf_modules transformer.h.1.atn"), @r#"error: leaf module "transformer.h.1.atn" matches no module; the nearest name is "transformer.h.1.attn" ("leaf_modules", command line --leaf_modules)"#);
    assert_snapshot!(train("--tp 1000000000000 --pp 2"), @r#"error: "tp" is 1000000000000 (command line --tp), but must be so small that "dp" x "tp" x "pp" x "sp", the ranks, is at most 4294967295"#);
    assert_snapshot!(train("--gradient_accumulation_steps 9000000000000000000 --dp 2"), @r#"error: "gradient_accumulation_steps" is 9000000000000000000 (command line --gradient_accumulation_steps), but must be so small that the samples of a step, microbatch x microbatches x "dp", can be counted"#);
    assert_snapshot!(train("--dp 2000"), @r#"error: 116 training samples are fewer than one global batch of 8000 (1 per microbatch x 4 microbatches x dp 2000): give more data or a smaller batch ("dp", command line --dp)"#);
    assert_snapshot!(train("--dataloader_drop_last --per_device_eval_batch_size 50"), @r#"error: 6 evaluation samples are fewer than one global batch of 200 (50 per microbatch x 4 microbatches x dp 1): give more data or a smaller batch ("per_device_eval_batch_size", command line --per_device_eval_batch_size)"#);
    assert_snapshot!(train("--data.format jsonl"), @r#"error: text/a.txt:1: the line is no JSON: expected value at column 1 ("data.format", command line --data.format)"#);
    assert_snapshot!(train("--resume lastest"), @r#"error: no checkpoint at lastest: the path does not exist, expected a checkpoint, an output folder, latest or auto; did you mean "latest"? ("resume_from_checkpoint", command line --resume)"#);
    assert_snapshot!(train("--data.tokenizer bytess"), @r#"error: cannot use the tokenizer bytess: there is no such file; did you mean "bytes"? ("data.tokenizer", command line --data.tokenizer)"#);
    assert_snapshot!(train("--resume text/run"), @r#"error: no checkpoint at text/run: the path does not exist, expected a checkpoint, an output folder, latest or auto ("resume_from_checkpoint", command line --resume)"#);
    place.write("long.toml", "output_dir = \"run\"\nseq_length = 64\nmodel.config = \"model.json\"\ndata.path = \"text\"\n");
    assert_snapshot!(place.mistake("train long.toml --dry-run"), @r#"error: "n_positions" of the model's configuration allows sequences of 1 to 32 tokens, not 64 ("seq_length", long.toml:2)"#);
    // No system takes such a name.
    let name = "x".repeat(5000);
    for keys in [
        "--resume",
        "--lora_config",
        "--data.path",
        "--data.tokenizer",
    ] {
        let message = train(&format!("{keys} {name}"));
        assert!(
            message.len() < 1500 && message.contains("command line --"),
            "{message}"
        );
    }
}

#[test]
fn parameters_of_the_learning_rate_are_named_with_their_key() {
    let place = Workplace::new();
    let train = |keys: &str| place.mistake(&format!("train merak.toml --dry-run {keys}"));
    let wsd = |kwargs: &str| {
        train(&format!(
            "--lr_scheduler_type wsd --lr_scheduler_kwargs {kwargs}"
        ))
    };
    assert_snapshot!(wsd("{\"num_decay_steps\":99}"), @r#"error: `num_decay_steps` is 99, expected at most the 5 steps of the run ("lr_scheduler_kwargs", command line --lr_scheduler_kwargs)"#);
    assert_snapshot!(wsd("{\"num_decay_step\":9}"), @r#"error: "lr_scheduler_kwargs" expects num_cycles, power, lr_end, timescale, num_decay_steps, min_lr_ratio or decay_type, found "{"num_decay_step":9}" (command line --lr_scheduler_kwargs); did you mean "num_decay_steps"?"#);
    assert_snapshot!(wsd("{\"decay_type\":\"lineal\"}"), @r#"error: "lr_scheduler_kwargs" expects cosine, linear or 1-sqrt, found "{"decay_type":"lineal"}" (command line --lr_scheduler_kwargs); did you mean "linear"?"#);
    assert_snapshot!(wsd("{\"power\":9}"), @r#"error: the wsd schedule takes `num_decay_steps`, `min_lr_ratio` and `decay_type`, found `power` ("lr_scheduler_kwargs", command line --lr_scheduler_kwargs)"#);
}

#[test]
fn a_benchmark_names_its_options_as_they_were_typed() {
    let place = Workplace::new();
    let bench = |line: &str| place.mistake(&format!("bench {line}"));
    assert_snapshot!(bench("gpt --partition evn"), @r#"error: "partition_method" expects uniform, uniform_floor, parameters, custom, autopipe or exact, found "evn" (command line --partition)"#);
    assert_snapshot!(bench("gpt --zero 4"), @r#"error: "zero_stage" expects 0, 1, 2 or 3, found 4 (command line --zero)"#);
    assert_snapshot!(bench("gpt --threads 0"), @r#"error: "compute.threads_per_rank" expects "auto" or an integer of 1 to 1024, found 0 (command line --threads)"#);
    assert_snapshot!(bench("gpt --pp 4 --schedule shifted_critical_path --microbatches 2"), @r#"error: shifted_critical_path needs gradient_accumulation_steps >= 4 (max of pp 4 and 4), got 2 ("gradient_accumulation_steps", command line --microbatches)"#);
    assert_snapshot!(bench("gpt --virtual-stages 3"), @r#"error: "virtual_stages" is 3 (command line --virtual-stages), but must be 1 under "train_schedule" 1f1b"#);
    assert_snapshot!(bench("gpt --tp 3"), @r#"error: h.0.attn.q: 512 output features cannot be split over tp = 3 (default col_para_list "attn.q"): choose "tp" among 1, 2, 4, 8 (command line --tp)"#);
    assert_snapshot!(bench("gpt --lora-config nowhere"), @r#"error: cannot read nowhere: the file is missing ("lora_config", command line --lora-config)"#);
    assert_snapshot!(bench("gpt --vocab 0"), @"error: --vocab is 0, expected a positive integer");
    assert_snapshot!(bench("generate --heads 7"), @"error: --heads is 7, which does not divide the width 768");
    assert_snapshot!(bench("pipeline --microbatches 1"), @r#"error: pre_recompute_1f1b needs gradient_accumulation_steps >= 2 (pp 2), got 1 ("gradient_accumulation_steps", command line --microbatches)"#);
    assert_snapshot!(bench("save run --zero 7"), @r#"error: "zero_stage" expects 0, 1, 2 or 3, found 7 (command line --zero)"#);
    assert_snapshot!(bench("gpt --steps x"), @r"
    error: invalid value 'x' for '--steps <STEPS>': expected a whole number of at least 0

    Usage: merak bench gpt [OPTIONS]

    For more information, try '--help'.
    ");
    assert_snapshot!(place.mistake("evaluate merak.toml nowhere"), @r#"error: no checkpoint at nowhere: the path does not exist, expected a checkpoint, an output folder, latest or auto ("resume_from_checkpoint", command line CHECKPOINT)"#);
    assert_snapshot!(place.mistake("trace text"), @r#"error: cannot read text/config.json, which "model.config" names (command line CONFIG|HF_DIR): No such file or directory (os error 2)"#);
}

#[test]
fn sizes_are_read_with_every_unit_and_refused_with_units() {
    let place = Workplace::new();
    for bytes in ["1k", "1K", "1kib", "1024"] {
        let line = format!("bench collectives --steps 1 --bytes {bytes}");
        assert!(place.succeed(&line).contains("\"bytes\":1024"), "{bytes}");
    }
    let schedule = |bytes: &str| place.succeed(&format!("schedule 1f1b -p 2 -m 2 --bytes {bytes}"));
    assert_eq!(
        schedule("I=1MiB:2k,W=512"),
        schedule("I=1048576:2048,W=512")
    );
    assert_snapshot!(place.mistake("bench collectives --bytes 8T"), @"error: --bytes has 8.00 TiB, expected 8 B to 4.00 GiB");
    assert_snapshot!(place.mistake("bench collectives --bytes 64x"), @r"
    error: invalid value '64x' for '--bytes <BYTES>': expected a whole number of bytes below 2^64 as in 1000000, 64KiB, 256M or 5GB, found `64x`

    For more information, try '--help'.
    ");
    let file = fs::File::create(place.path("large.toml")).unwrap();
    file.set_len(3 << 30).unwrap();
    assert_snapshot!(place.mistake("train large.toml"), @"error: cannot read large.toml: it has 3.00 GiB, the limit is 4.00 MiB");
}

#[cfg(unix)]
#[test]
fn what_is_no_text_is_named_on_the_line_and_in_the_environment() {
    use std::os::unix::ffi::OsStrExt;
    let place = Workplace::new();
    let no_text = std::ffi::OsStr::from_bytes(b"2\xff");
    let mut command = place.command("config merak.toml --tp");
    let ended = place.ended(&command.arg(no_text).output().unwrap());
    assert_eq!(ended.status, Some(2));
    assert_snapshot!(ended.stderr.lines().next().unwrap(), @r#"error: argument 4, "2�" behind "--tp", is no UTF-8 text"#);
    let mut command = place.command("config merak.toml");
    let ended = place.ended(&command.env("MERAK_TP", no_text).output().unwrap());
    assert_eq!(ended.status, Some(2));
    assert_snapshot!(ended.stderr, @r#"error: the environment variable MERAK_TP is no UTF-8 text, found "2�""#);
}
