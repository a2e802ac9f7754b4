//! Sizes that no machine can hold: refused before anything is allocated.

use insta::assert_snapshot;

use super::{Workplace, model};

/// The message of a command that may not start: one line, no abort.
fn refusal(place: &Workplace, line: &str) -> String {
    let message = place.mistake(line);
    assert_eq!(message.lines().count(), 1, "merak {line}: {message}");
    message
}

/// Writes a model with one field changed.
fn with_field(place: &Workplace, field: &str, value: u64) {
    let mut json = model();
    json[field] = value.into();
    place.write("huge.json", &json.to_string());
}

#[test]
fn batches_and_degrees_beyond_the_data_are_counted_not_allocated() {
    let place = Workplace::new();
    for size in ["1000000", "1000000000000", "9000000000000000000"] {
        for key in [
            "per_device_train_batch_size",
            "dp",
            "gradient_accumulation_steps",
        ] {
            for command in ["train merak.toml", "train merak.toml --dry-run"] {
                let message = refusal(&place, &format!("{command} --{key} {size}"));
                let counted = message.contains("training samples are fewer than one global batch");
                assert!(
                    counted || message.contains("must be so small that"),
                    "{message}"
                );
            }
        }
        refusal(&place, &format!("train merak.toml --tp {size}"));
        refusal(&place, &format!("train merak.toml --pp {size}"));
    }
    assert_snapshot!(refusal(&place, "train merak.toml --dp 1000000000000"), @r#"error: "dp" is 1000000000000 (command line --dp), but must be so small that "dp" x "tp" x "pp" x "sp", the ranks, is at most 4294967295"#);
    // An evaluation takes no more rows than there are samples.
    let usual = place.succeed(
        "train merak.toml --overwrite_output_dir --max_steps 1 --per_device_eval_batch_size 6",
    );
    let huge =
        place.succeed("train merak.toml --overwrite_output_dir --max_steps 1 --per_device_eval_batch_size 1000000000000");
    let loss = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("validated"));
        line.expect("a validation").to_owned()
    };
    assert_eq!(loss(&huge), loss(&usual));
}

#[test]
fn threads_and_times_beyond_any_machine_are_refused() {
    let place = Workplace::new();
    assert_snapshot!(refusal(&place, "train merak.toml --dataloader_num_workers 1000000000000"), @r#"error: "dataloader_num_workers" is 1000000000000 (command line --dataloader_num_workers), but must be from 0 to 1024"#);
    assert_snapshot!(refusal(&place, "train merak.toml --distributed.timeout_s 1e300 --dry-run"), @r#"error: "distributed.timeout_s" is 1e300 (command line --distributed.timeout_s), but must be more than 0 and at most 1e9"#);
    refusal(
        &place,
        "train merak.toml --compute.threads_per_rank 1000000000000",
    );
}

#[test]
fn models_beyond_any_memory_name_the_size() {
    let place = Workplace::new();
    let train = |field: &str, value: u64| {
        with_field(&place, field, value);
        refusal(&place, "train merak.toml --model.config huge.json")
    };
    for field in ["n_positions", "vocab_size", "n_embd", "n_layer"] {
        let message = train(field, 1_000_000_000_000);
        assert!(message.contains(field), "{message}");
    }
    assert_snapshot!(train("n_positions", 1_000_000_000_000), @r#"error: huge.json: "n_positions" is 1000000000000, expected a positive integer of at most 4294967295 ("model.config", command line --model.config)"#);
    assert_snapshot!(train("n_layer", 1_000_000_000), @r#"error: huge.json: "n_layer" is 1000000000, expected at most 16384 layers ("model.config", command line --model.config)"#);
    assert_snapshot!(train("n_embd", 4_000_000_000), @"error: parameter transformer.h.0.attn.c_attn.weight: f32[4000000000, 12000000000] is larger than any memory: choose smaller sizes");
    let message = train("vocab_size", 4_000_000_000);
    let figures = [
        "error: the run needs at least ",
        " of memory, but this process may use ",
        ": of all ranks (1) weights take 238 GiB, gradients 477 GiB, optimizer state 477 GiB, activations ",
    ];
    assert!(
        figures.iter().all(|figure| message.contains(figure)),
        "{message}"
    );
}

#[test]
fn what_this_machine_cannot_hold_can_be_planned_but_not_run() {
    let place = Workplace::new();
    with_field(&place, "n_positions", 4_000_000_000);
    let plan = place.succeed("train merak.toml --model.config huge.json --dry-run");
    assert!(plan.contains("warning: the run needs at least "), "{plan}");
    place.succeed("trace huge.json");
    refusal(&place, "train merak.toml --model.config huge.json");
    let bench = |flags: &str| refusal(&place, &format!("bench gpt {flags}"));
    bench("--vocab 4000000000");
    bench("--seq 4000000000");
    bench("--batch 1000000000000 --microbatches 1");
    bench("--batch 1000000000000 --microbatches 1000000000000");
    bench("--dp 1000000000000 --batch 1000000000000 --microbatches 1000000000000");
    bench("--steps 9000000000000000000 --batch 1000 --microbatches 1");
    bench("--layers 1000000000");
}

#[test]
fn layers_are_counted_before_a_list_is_made_of_them() {
    let place = Workplace::new();
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let model = serde_json::json!({ "model_type": family, "vocab_size": 257, "max_position_embeddings": 32,
            "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
            "num_hidden_layers": 2_147_483_648_u64 });
        place.write("huge.json", &model.to_string());
        let message = refusal(&place, "train merak.toml --model.config huge.json");
        assert_eq!(
            message,
            "error: huge.json: \"num_hidden_layers\" is 2147483648, expected at most 16384 layers \
             (\"model.config\", command line --model.config)"
        );
    }
}
