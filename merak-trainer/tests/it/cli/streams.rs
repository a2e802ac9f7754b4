//! Training on text and records that are read in their order while it goes on.

use std::fs;

use insta::assert_snapshot;
use serde_json::json;

use super::{
    Workplace,
    families::{assert_close, bert, losses, place as place_of, t5, trained},
    files, text,
};

const STREAM: &str = "--data.streaming true --do_eval false";

/// A workplace with three files of text.
fn place() -> Workplace {
    let place = Workplace::new();
    place.write("text/b.txt", &text()[..900]);
    place.write("text/c/d.txt", &text()[300..]);
    place
}

#[test]
fn a_stream_is_learned_alike_by_every_topology_and_by_processes() {
    let place = place();
    let alone = trained(&place, STREAM);
    assert_eq!(alone.len(), 5);
    // The same samples as of a stream, which is one order of them, and of another buffer others.
    assert_eq!(
        trained(&place, &format!("{STREAM} --dataloader_num_workers 3")),
        alone
    );
    assert_eq!(trained(&place, &format!("{STREAM} --pp 2")), alone);
    let ordered = format!("{STREAM} --data.shuffle_buffer 1");
    assert_ne!(trained(&place, &ordered), alone);
    for ranks in ["--tp 2", "--dp 2 --gradient_accumulation_steps 2"] {
        let found = trained(&place, &format!("{STREAM} {ranks}"));
        assert_close(&found, &alone, 1e-4, ranks);
    }
    let two = format!("{STREAM} --dp 2 --gradient_accumulation_steps 2");
    let threads = trained(&place, &two);
    place.succeed(&format!(
        "launch -n 2 -- train merak.toml --overwrite_output_dir {two}"
    ));
    assert_eq!(losses(&place), threads);
}

#[test]
fn a_stream_goes_on_at_the_sample_where_a_run_stopped_and_in_a_further_pass() {
    let place = place();
    // Some 300 samples, of which a step takes 64.
    let keys = format!(
        "{STREAM} --gradient_accumulation_steps 64 --save_steps 3 --lr_scheduler_type constant"
    );
    let whole = trained(&place, &format!("{keys} --max_steps 6"));
    let kept = files(&place.path("run/checkpoints/step-00000006"));
    trained(&place, &format!("{keys} --max_steps 3"));
    place.succeed(&format!(
        "train merak.toml {keys} --max_steps 6 --resume latest"
    ));
    assert_eq!(losses(&place), whole);
    assert_eq!(files(&place.path("run/checkpoints/step-00000006")), kept);
}

#[test]
fn streams_of_every_kind_of_text_are_learned() {
    let records = |record: &dyn Fn(usize) -> serde_json::Value| {
        let lines: Vec<_> = (0..150).map(|i| record(i).to_string()).collect();
        lines.join("\n")
    };
    let labelled = records(&|i| json!({ "text": format!("text {i}"), "label": i % 3 }));
    let pairs = records(&|i| json!({ "source": format!("{i}"), "target": format!("is {i}") }));
    let texts = records(&|i| json!({ "text": format!("some words about {i} and {}", i * i) }));
    for (model, data) in [
        (bert("BertForSequenceClassification"), &labelled),
        (bert("BertForMaskedLM"), &texts),
        (t5(), &pairs),
        (t5(), &texts),
    ] {
        let place = place_of(&model, "jsonl", "data.jsonl");
        place.write("data.jsonl", data);
        let keys = format!("{STREAM} --seq_length 24 --data.shuffle_buffer 20");
        let alone = trained(&place, &keys);
        assert_eq!(alone.len(), 3);
        assert_eq!(trained(&place, &format!("{keys} --pp 2")), alone);
    }
}

#[test]
fn a_run_on_a_stream_evaluates_and_predicts_on_data_of_their_own() {
    let place = place();
    place.write("held-out.txt", &text()[..600]);
    let keys = "--data.streaming true --data.shuffle_buffer 50 --data.validation_path held-out.txt";
    let said = place.succeed(&format!("train merak.toml {keys}"));
    assert!(
        said.contains("text: 3 files, 4.41 KiB as a stream; to validate on: held-out.txt"),
        "{said}"
    );
    let evaluated = place.document(
        "evaluate merak.toml run --json --data.streaming true --data.validation_path held-out.txt",
    );
    assert!(evaluated["eval_loss"].as_f64().is_some_and(f64::is_finite));
    place.succeed(&format!(
        "predict merak.toml run {keys} --output lines.jsonl"
    ));
    let lines = fs::read_to_string(place.path("lines.jsonl")).expect("predictions");
    assert!(lines.lines().count() > 37, "{}", lines.lines().count());
}

#[test]
fn a_stream_that_cannot_be_read_is_refused() {
    let place = place();
    let mistake =
        |keys: &str| place.mistake(&format!("train merak.toml --data.streaming true {keys}"));
    assert_snapshot!(mistake("--do_eval true"), @r#"error: "data.streaming" is true (command line --data.streaming), but must be false unless "data.validation_path" is set, or "do_eval" and "do_predict" are false: a stream has no end to validate on"#);
    assert_snapshot!(mistake("--do_eval false --max_steps -1"), @r#"error: "data.streaming" is true (command line --data.streaming), but must be false unless "max_steps" is set: a stream has no known length"#);
    assert_snapshot!(mistake("--do_eval false --data.format tokens"), @r#"error: "data.streaming" is true (command line --data.streaming), but must be false while "data.format" is "tokens", whose files are read as they are needed anyway"#);
    assert_snapshot!(place.mistake("train merak.toml --data.shuffle_buffer 10"), @r#"error: "data.shuffle_buffer" is 10 (command line --data.shuffle_buffer), but must be unset unless "data.streaming" is true: all other samples are shuffled as a whole"#);
    place.write("text/a.txt", "too short");
    fs::remove_file(place.path("text/b.txt")).expect("the file is there");
    fs::remove_file(place.path("text/c/d.txt")).expect("the file is there");
    assert_snapshot!(mistake("--do_eval false"), @r#"error: the training part of the data has 10 tokens, but one sample needs 17: give more data or a smaller "seq_length" (merak.toml:2)"#);
    // An error in the midst of the stream names its place.
    let lines = "{\"text\": \"some words\"}\n".repeat(90) + "{\"txt\": \"\"}\n";
    place.write("data.jsonl", &lines);
    assert_snapshot!(mistake(
        "--do_eval false --data.path data.jsonl --data.format jsonl --data.shuffle_buffer 1 --max_steps 50"
    ), @r#"error: data.jsonl:91: the record has no "text": it has "txt", but records that become tokens need "text" ("data.path", command line --data.path)"#);
    place.write("data.jsonl", &lines.replace("\"txt\"", "\"messages\""));
    assert_snapshot!(mistake(
        "--do_eval false --data.path data.jsonl --data.format jsonl --data.shuffle_buffer 1 --max_steps 50 --overwrite_output_dir"
    ), @r#"error: data.jsonl:91: the record is a chat ("messages", or "prompt" and "completion"), but the first one, data.jsonl:1, is a text ("text" alone): all must be of one kind ("data.path", command line --data.path)"#);
}

#[test]
fn a_resumed_stream_keeps_the_order_of_its_first_seed() {
    let place = place();
    let keys = format!("{STREAM} --save_steps 3 --lr_scheduler_type constant");
    let whole = trained(&place, &format!("{keys} --max_steps 6 --seed 7"));
    trained(&place, &format!("{keys} --max_steps 3 --seed 7"));
    for ranks in ["", "--pp 2"] {
        place.succeed(&format!(
            "train merak.toml {keys} --max_steps 6 --resume run/checkpoints/step-00000003 {ranks}"
        ));
        assert_eq!(losses(&place), whole);
    }
}
