//! Data of which nothing can be learned: tensors that are not read, labels that do not count, NaN.

use std::fs;

use insta::assert_snapshot;
use safetensors::Dtype;
use serde_json::Value;

use super::{
    Workplace,
    families::{Tensors, bert, gpt2, i64s, images, losses, place, t5, vit, write_tensors},
    model,
};

fn refused(model: &Value, tensors: &Tensors<'_>) -> String {
    let place = place(model, "tensors", "a.safetensors");
    write_tensors(&place.path("a.safetensors"), tensors);
    place.mistake("train merak.toml")
}

#[test]
fn a_tensor_that_no_part_of_the_model_reads_is_refused_with_the_nearest() {
    let ids = |name| (name, Dtype::I64, vec![20, 4], i64s((0..80).map(|i| i % 61)));
    // Without labels, they would be made of the tokens, and the mistake would go unnoticed.
    assert_snapshot!(refused(&gpt2(), &[ids("input_ids"), ids("lables")]), @r#"error: the data give "lables", which this gpt2 model does not read: leave it out of the files, which may have input_ids, labels, attention_mask; did you mean "labels"?"#);
    assert_snapshot!(refused(&gpt2(), &[ids("input_ids"), ids("token_type_ids")]), @r#"error: the data give "token_type_ids", which this gpt2 model does not read: leave it out of the files, which may have input_ids, labels, attention_mask"#);
    let masked = bert("BertForMaskedLM");
    assert_snapshot!(refused(&masked, &[ids("input_ids"), ids("labels"), ids("atention_mask")]), @r#"error: the data give "atention_mask", which this bert model does not read: leave it out of the files, which may have input_ids, token_type_ids, attention_mask, labels; did you mean "attention_mask"?"#);
}

/// One label for each of twenty images.
fn labelled(label: impl Fn(usize) -> i64) -> Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)> {
    let mut tensors = images(20);
    let labels = (0..20).flat_map(|row| label(row).to_le_bytes());
    tensors[1] = ("labels", Dtype::I64, vec![20], labels.collect());
    tensors
}

#[test]
fn samples_that_all_are_without_labels_are_refused() {
    assert_snapshot!(refused(&vit(), &labelled(|_| -100)), @"error: none of the 14 training samples of a.safetensors has a label other than -100: there is nothing to learn from");
    // The last 30 % are for validation.
    assert_snapshot!(refused(&vit(), &labelled(|row| if row < 14 { -100 } else { 1 })), @"error: none of the 14 training samples of a.safetensors has a label other than -100: there is nothing to learn from");
    assert_snapshot!(refused(&vit(), &labelled(|row| if row < 14 { 1 } else { -100 })), @r#"error: none of the 6 evaluation samples of a.safetensors has a label other than -100: there is nothing to measure: choose another "data.validation_fraction" (0 for no validation)"#);
    let none = ("input_ids", Dtype::I64, vec![20, 0], vec![]);
    assert_snapshot!(refused(&gpt2(), &[none]), @r#"error: cannot use the tensors of a.safetensors: the tensor "input_ids" has the shape [0] per sample, which is empty ("data.path", merak.toml:15)"#);
    let ids = ("input_ids", Dtype::I64, vec![20, 1], i64s(0..20));
    assert_snapshot!(refused(&gpt2(), &[ids]), @"error: none of the 14 training samples of a.safetensors has a label other than -100: there is nothing to learn from");
}

#[test]
fn a_step_without_labels_is_told_with_its_samples() {
    let place = place(&vit(), "tensors", "a.safetensors");
    let one = labelled(|row| if row == 3 || row == 17 { 1 } else { -100 });
    write_tensors(&place.path("a.safetensors"), &one);
    let ended = place.merak("train merak.toml --tp 2 --pp 2");
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let told = ended.stderr.matches("no sample of the step has a label");
    assert!((2..=3).contains(&told.count()), "{}", ended.stderr);
}

/// Images as floats, with NaN in those that `is_bad` names.
fn with_nan(is_bad: impl Fn(usize) -> bool) -> Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)> {
    let mut tensors = images(20);
    let pixels = (0..20 * 128).flat_map(|i| {
        let nan = is_bad(i / 128) && i % 128 == 77;
        let pixel = if nan { f32::NAN } else { (i % 9) as f32 / 9.0 };
        pixel.to_le_bytes()
    });
    tensors[0] = (
        "pixel_values",
        Dtype::F32,
        vec![20, 2, 8, 8],
        pixels.collect(),
    );
    tensors
}

#[test]
fn gradients_that_are_never_finite_end_a_run() {
    let place = place(&vit(), "tensors", "a.safetensors");
    write_tensors(&place.path("a.safetensors"), &with_nan(|_| true));
    let failed = |line: &str| {
        let ended = place.merak(line);
        assert_eq!(ended.status, Some(1), "{}", ended.stderr);
        let last = ended.stderr.lines().last().unwrap_or_default().to_owned();
        (last, ended.stderr)
    };
    let (message, log) = failed("train merak.toml --max_steps 9 --max_skipped_steps 4");
    assert_snapshot!(message, @r#"error: 4 steps in a row changed nothing, from step 1 on, and step 4 because the gradient of "vit.embeddings.cls_token" is not finite: look for numbers in the data or the starting weights that are not finite or very large, or choose a smaller "learning_rate" ("max_skipped_steps" is 4)"#);
    for step in 1..=4 {
        let told = format!(
            "step skipped: gradient is not finite param=vit.embeddings.cls_token step={step}"
        );
        assert!(log.contains(&told), "{told}: {log}");
    }
    // Each event names the rank and the step whose it is.
    let source = "WARN rank{rank=0}:step{step=1 part=Train}: merak_zero::";
    assert!(log.contains(source), "{log}");
    assert!(log.contains("tensor=\"pixel_values\" so_far=1"), "{log}");
    // Of at least 16 samples that were read, the first ones and the tenth.
    let told = log.matches("a sample has numbers that are not finite");
    assert_eq!(told.count(), 4, "{log}");
    // All steps of a run that is shorter than the limit.
    let (message, log) = failed(
        "train merak.toml --overwrite_output_dir --max_steps 2 --dp 2 --gradient_accumulation_steps 2",
    );
    assert_snapshot!(message, @r#"error: 2 steps in a row changed nothing, from step 1 on, and step 2 because the gradient of "vit.embeddings.cls_token" is not finite: look for numbers in the data or the starting weights that are not finite or very large, or choose a smaller "learning_rate" ("max_skipped_steps" is 50)"#);
    let told = log.matches("step skipped").count();
    assert_eq!(told, 2, "one rank tells of each step: {log}");

    // One bad sample among many costs a step, which is reported and left out of the average.
    write_tensors(
        &place.path("a.safetensors"),
        &with_nan(|row| row == 17 || row == 5),
    );
    let shown = place.succeed("train merak.toml --overwrite_output_dir");
    let skipped = "skipped   1 of the 3 steps, as a gradient was not finite";
    assert!(shown.contains(skipped), "{shown}");
    assert!(
        !shown.contains("mean loss NaN") && shown.contains("validated loss NaN"),
        "{shown}"
    );
    let (message, log) = failed("evaluate merak.toml run --pp 2");
    assert_snapshot!(message, @"error: the evaluation loss is NaN: the weights, or samples of the data, have numbers that are not finite or very large");
    assert!(
        log.contains("the loss of these samples is not finite samples=[2, 3]"),
        "{log}"
    );
    let config = fs::read_to_string(place.path("merak.toml")).unwrap();
    place.write(
        "none.toml",
        &config.replace("max_steps", "max_skipped_steps = 0\nmax_steps"),
    );
    assert_snapshot!(place.mistake("train none.toml"), @r#"error: "max_skipped_steps" is 0 (none.toml:2), but must be at least 1"#);
}

/// The lines of a log about returns to a checkpoint, without the losses in them.
fn returns(log: &str) -> String {
    let lines = log.lines().filter(|line| line.contains(": back to step "));
    let lines = lines.map(|line| line.split_once(" of ").map_or(line, |(line, _)| line));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_guarded_run_goes_back_from_data_that_are_not_finite_and_says_so() {
    let place = place(&vit(), "tensors", "a.safetensors");
    write_tensors(&place.path("a.safetensors"), &with_nan(|row| row == 5));
    let ended = place.merak(
        "train merak.toml --max_steps 9 --save_steps 1 --max_skipped_steps 1 --divergence_guard true",
    );
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    assert_snapshot!(returns(&ended.stderr), @r"
    step 3: back to step 2, as the loss is not finite
    step 4: back to step 3, as the loss is not finite
    step 6: back to step 5, as the loss is not finite
    step 7: back to step 6, as the loss is not finite
    ");
    for (step, to_step) in [(3, 2), (4, 3), (6, 5), (7, 6)] {
        let told = format!(
            "training goes back to a checkpoint, and on after these data step={step} loss=NaN to_step={to_step}"
        );
        assert!(ended.stderr.contains(&told), "{told}: {}", ended.stderr);
    }
    let told = "returned  4 times to the last checkpoint, and on after the data that diverged\n";
    assert!(ended.stdout.contains(told), "{}", ended.stdout);
    // Each step was made once with data that are finite.
    assert_eq!(losses(&place).len(), 9);
    assert!(!ended.stdout.contains("NaN"), "{}", ended.stdout);
}

#[test]
fn a_guarded_run_goes_back_from_a_spike_and_takes_its_data_no_more() {
    let place = Workplace::new();
    let noise = (0..64).map(|i| char::from(33 + u8::try_from((7 * i * i + 31 * i) % 90).unwrap()));
    let same = "ab".repeat(320);
    let text = [same.as_str(), &noise.collect::<String>(), &same].concat();
    place.write("text/a.txt", &text);
    let mut plain = model();
    for dropout in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        plain[dropout] = 0.into();
    }
    place.write("model.json", &plain.to_string());
    let ended = place.merak(
        "train merak.toml --gradient_accumulation_steps 1 --max_steps 24 --save_steps 5 --learning_rate 0.02 \
         --lr_scheduler_type constant --divergence_guard true --divergence_window 4",
    );
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    assert_snapshot!(returns(&ended.stderr), @r"
    step 17: back to step 15, as the loss is far above the median
    step 16: back to step 15, as the loss is far above the median
    step 21: back to step 20, as the loss is far above the median
    ");
    let told = "returned  3 times to the last checkpoint, and on after the data that diverged\n";
    assert!(ended.stdout.contains(told), "{}", ended.stdout);
    // The text that spoils a step is met once for each return.
    let losses = losses(&place);
    let learned = losses
        .iter()
        .position(|loss| *loss < 1.0)
        .expect("it learns");
    let spikes = losses[learned..].iter().filter(|loss| **loss > 4.0);
    assert_eq!(spikes.count(), 3, "{losses:?}");
}

#[test]
fn records_that_are_longer_than_the_sequence_are_counted_and_told() {
    let told = |model: &Value, line: &str, keys: &str| {
        let place = place(model, "jsonl", "a.jsonl");
        let lines: Vec<_> = (0..20)
            .map(|i| line.replace("LONG", &"ab".repeat(i)))
            .collect();
        place.write("a.jsonl", &lines.join("\n"));
        let ended = place.merak(&format!("train merak.toml --max_steps 1 {keys}"));
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        let lines = ended.stderr.lines().filter(|line| line.contains("are cut"));
        let lines = lines.map(|line| line.split_once("WARN").map_or(line, |(_, line)| line));
        lines.map(str::trim).collect::<Vec<_>>().join("\n")
    };
    let classifier = bert("BertForSequenceClassification");
    let text = "{\"text\": \"LONG\", \"label\": 1}";
    assert_snapshot!(told(&classifier, text, "--seq_length 24"), @r#"merak_trainer::data::samples: records are longer than seq_length and are cut field="text" cut=8 of=20 longest=40 seq_length=24"#);
    let pair = "{\"source\": \"LONG\", \"target\": \"short\"}";
    assert_snapshot!(told(&t5(), pair, "--seq_length 24,8"), @r#"merak_trainer::data::samples: records are longer than seq_length and are cut field="source" cut=8 of=20 longest=39 seq_length=24"#);
    assert_snapshot!(told(&t5(), pair, "--seq_length 39,4"), @r#"merak_trainer::data::samples: records are longer than seq_length and are cut field="target" cut=20 of=20 longest=6 seq_length=4"#);
    assert_eq!(told(&t5(), pair, "--seq_length 39,6"), "");
}

#[test]
fn records_that_are_no_utf8_are_refused_by_file_and_offset_or_passed_over() {
    let place = place(&bert("BertForMaskedLM"), "jsonl", "text");
    fs::remove_dir_all(place.path("text")).unwrap();
    let records = "{\"text\": \"every rank waits for its peer\"}\n".repeat(20);
    place.write("text/b.jsonl", &records);
    fs::write(place.path("text/a.jsonl"), b"{\"text\": \"caf\xe9\"}\n").unwrap();
    assert_snapshot!(place.mistake("train merak.toml"), @r#"error: cannot read text/a.jsonl as text: byte 0xe9 in line 1 is no UTF-8 (offset 13): convert it to UTF-8, or set "data.skip_binary" to true to pass over such files ("data.path", merak.toml:15)"#);
    let shown = place.succeed("train merak.toml --max_steps 1 --data.skip_binary true");
    assert!(
        shown.contains("1 file (1 passed over as no text), 20 records"),
        "{shown}"
    );
    let tensors = super::families::place(&vit(), "tensors", "a.safetensors");
    write_tensors(&tensors.path("a.safetensors"), &images(20));
    assert_snapshot!(tensors.mistake("train merak.toml --data.skip_binary"), @r#"error: "data.skip_binary" is true (command line --data.skip_binary), but must be false under "data.format" tensors, whose files are no text"#);
}

#[test]
fn the_byte_vocabulary_keeps_bytes_that_are_no_utf8_from_files_to_generated_text() {
    let place = Workplace::new();
    let latin: Vec<u8> = b"caf\xe9 cr\xe8me ".repeat(300);
    fs::write(place.path("text/a.txt"), &latin).unwrap();
    place.succeed("train merak.toml --max_steps 1");
    fs::write(place.path("prompts"), b"caf\xe9\n").unwrap();
    for option in ["", "--stream"] {
        let line = format!(
            "generate run --prompt-file prompts --max-new-tokens 2 --temperature 0 {option}"
        );
        let output = place.command(&line).output().expect("the command starts");
        assert!(output.stdout.starts_with(b"caf\xe9"), "{:?}", output.stdout);
    }
}

#[test]
fn labels_of_hugging_face_are_shifted_when_asked_and_end_with_their_document() {
    let place = place(&gpt2(), "tensors", "a.safetensors");
    let of = |name, values: Vec<usize>| (name, Dtype::I64, vec![24, 8], i64s(values));
    let ids = of("input_ids", (0..192).map(|i| i * i % 61).collect());
    let labels = of("labels", (0..192).map(|i| i * i % 61).collect());
    let documents = of("document_ids", (0..192).map(|i| i % 8 / 3).collect());
    let trained = |tensors: &Tensors<'_>, keys: &str| {
        write_tensors(&place.path("a.safetensors"), tensors);
        let keys = format!("--overwrite_output_dir --max_steps 2 {keys}");
        place.succeed(&format!("train merak.toml {keys}"));
        losses(&place)
    };
    let shifts = "--shift_labels true";
    let made = trained(std::slice::from_ref(&ids), "");
    assert_eq!(trained(&[ids.clone(), labels.clone()], shifts), made);
    let parted = trained(&[ids.clone(), documents.clone()], "");
    assert_ne!(parted, made);
    assert_eq!(trained(&[ids.clone(), labels, documents], shifts), parted);

    write_tensors(&place.path("a.safetensors"), &[ids]);
    assert_snapshot!(place.mistake("train merak.toml --shift_labels true"), @r#"error: "shift_labels" moves the "labels" of the data, which have none: leave it out, and labels are made of "input_ids""#);
}
