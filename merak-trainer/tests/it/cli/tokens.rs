//! Token files: `merak tokenize`, and training on what it writes.

use std::{
    fs::{self, File},
    io::{Seek, SeekFrom, Write},
    time::{Duration, Instant},
};

use insta::assert_snapshot;
use merak_ckpt::Checksum;
use serde_json::json;

use super::{Workplace, families::trained, files, model, text};

const TOKENS: &str = "--data.format tokens --data.path text.tokens";

/// A workplace with two texts and a model of `vocab` tokens.
fn place_of(vocab: usize) -> Workplace {
    let place = Workplace::new();
    let mut model = model();
    model["vocab_size"] = json!(vocab);
    place.write("model.json", &model.to_string());
    place.write("text/b/c.txt", &text().replace("rank", "node"));
    place
}

#[test]
fn training_on_token_files_is_training_on_their_text() {
    let place = place_of(257);
    let of_text = trained(&place, "");
    let said = place.succeed("tokenize merak.toml");
    assert!(said.contains("wrote     text.tokens"), "{said}");
    assert!(
        said.contains("of 2 documents, as u16; 1.00 bytes each"),
        "{said}"
    );
    assert_eq!(trained(&place, TOKENS), of_text);
    assert_eq!(
        trained(
            &place,
            &format!("{TOKENS} --dp 2 --gradient_accumulation_steps 2")
        )
        .len(),
        5
    );
    // Behind the same steps the same checkpoint, which tells its data apart from the text's.
    let said = place.merak(&format!(
        "train merak.toml {TOKENS} --resume latest --max_steps 6"
    ));
    assert_eq!(said.status, Some(0), "{}", said.stderr);
    // Records of the same texts have the same tokens.
    let lines = ["text/a.txt", "text/b/c.txt"].map(|name| {
        let text = fs::read_to_string(place.path(name)).expect("text");
        json!({ "text": text }).to_string()
    });
    place.write("lines.jsonl", &lines.join("\n"));
    place.succeed("tokenize merak.toml --data.path lines.jsonl --data.format jsonl -o records");
    let [text, records] = ["text.tokens/data.tokens", "records/data.tokens"].map(|name| {
        let bytes = fs::read(place.path(name)).expect("tokens");
        bytes[64..].to_vec()
    });
    assert_eq!(records, text);
    assert_eq!(
        trained(&place, "--data.format tokens --data.path [\"records\"]"),
        of_text
    );
}

#[test]
fn a_tokenizer_that_is_trained_on_the_text_is_the_same_everywhere() {
    let place = place_of(300);
    let bpe = "--data.tokenizer {\"train_bpe\":280}";
    for folder in ["one", "two"] {
        let said = place.document(&format!("tokenize merak.toml -o {folder} --json {bpe}"));
        assert_eq!(
            (&said["vocab_size"], &said["documents"]),
            (&json!(280), &json!(2))
        );
        assert!(said["tokens"].as_u64() < said["bytes"].as_u64().map(|bytes| bytes / 2));
    }
    assert_eq!(files(&place.path("one")), files(&place.path("two")));
    let of_text = trained(&place, bpe);
    let tokens = "--data.format tokens --data.path one";
    // The file's own tokenizer, the one that was trained with it, and its file.
    for tokenizer in [
        "",
        bpe,
        "--data.tokenizer one",
        "--data.tokenizer two/tokenizer.json",
    ] {
        assert_eq!(
            trained(&place, &format!("{tokens} {tokenizer}")),
            of_text,
            "{tokenizer}"
        );
    }
    // Other data do not make another tokenizer for a model that is there.
    let first = place.document(&format!("evaluate merak.toml run --json {bpe}"));
    place.write("other.txt", &"zebras yawn at xylophones. ".repeat(40));
    let other = place.document(&format!(
        "evaluate merak.toml run --json {bpe} --data.path other.txt"
    ));
    assert!(other["eval_loss"].as_f64() > first["eval_loss"].as_f64());
    let kept = fs::read(place.path("run/checkpoints/step-00000005/tokenizer.json"));
    assert_eq!(
        kept.expect("a file"),
        fs::read(place.path("one/tokenizer.json")).expect("a file")
    );
}

#[test]
fn tokens_of_the_same_text_stay_and_others_are_replaced() {
    let place = place_of(257);
    let written = || fs::metadata(place.path("text.tokens")).and_then(|found| found.modified());
    place.succeed("tokenize merak.toml");
    let first = written().expect("a folder");
    let said = place.succeed("tokenize merak.toml");
    assert_snapshot!(said.trim_end(), @"text.tokens is up to date: 3914 tokens of 2 documents, as u16");
    assert_eq!(written().expect("a folder"), first);
    place.write("text/b/c.txt", "short");
    let said = place.succeed("tokenize merak.toml");
    assert!(said.contains("wrote     text.tokens"), "{said}");
    // What an attempt that was killed has left is in nobody's way.
    place.write(".merak-tmp-text.tokens/data.tokens", "half");
    place.write("text/b/c.txt", "shorter");
    place.succeed("tokenize merak.toml");
    let names: Vec<_> = files(&place.path(""))
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert!(!names.iter().any(|name| name.starts_with('.')), "{names:?}");
}

#[test]
fn wrong_token_files_and_places_for_them_are_refused() {
    let place = place_of(300);
    place.succeed("tokenize merak.toml");
    place.succeed("tokenize merak.toml -o bpe --data.tokenizer {\"train_bpe\":280}");
    let train =
        |keys: &str| place.mistake(&format!("train merak.toml --data.format tokens {keys}"));
    let tokenize = |keys: &str| place.mistake(&format!("tokenize merak.toml {keys}"));
    assert_snapshot!(train("--data.path text.tokens --data.tokenizer bpe"), @r#"error: the tokens of text.tokens/data.tokens were made with another tokenizer (CHECKSUM of 257 tokens) than bpe/tokenizer.json (CHECKSUM of 280 tokens): set "data.tokenizer" to text.tokens/tokenizer.json, or tokenize the text again (command line --data.tokenizer)"#);
    assert_snapshot!(train("--data.path bpe --data.tokenizer bytes"), @r#"error: the tokens of bpe/data.tokens were made with another tokenizer (CHECKSUM of 280 tokens) than bytes (CHECKSUM of 257 tokens): set "data.tokenizer" to bpe/tokenizer.json, or tokenize the text again (command line --data.tokenizer)"#);
    assert_snapshot!(train("--data.path bpe --data.tokenizer {\"train_bpe\":290}"), @r#"error: the tokens of bpe/data.tokens were made with another tokenizer (one trained for 280 tokens) than { train_bpe = 290 } (to be trained): set "data.tokenizer" to bpe/tokenizer.json, or tokenize the text again (command line --data.tokenizer)"#);
    assert_snapshot!(train("--data.path [\"text.tokens\",\"bpe\"]"), @r#"error: the tokens of bpe/data.tokens were made with another tokenizer (CHECKSUM of 280 tokens) than bytes (CHECKSUM of 257 tokens): set "data.tokenizer" to bpe/tokenizer.json, or tokenize the text again (command line --data.path)"#);
    assert_snapshot!(train("--data.path text"), @r#"error: cannot use the tokens of text: the folder has no .tokens file ("data.path", command line --data.path)"#);
    assert_snapshot!(train("--data.path text/a.txt"), @r#"error: cannot use the tokens of text/a.txt: it is no token file: it begins with "every ra", not "MERAKTOK" ("data.path", command line --data.path)"#);
    assert_snapshot!(train("--data.path text.tokens --data.skip_binary"), @r#"error: "data.skip_binary" is true (command line --data.skip_binary), but must be false under "data.format" tokens, whose files are no text"#);
    assert_snapshot!(place.mistake("train merak.toml --data.path text.tokens/data.tokens"), @r#"error: cannot read text.tokens/data.tokens as text: it is a token file (offset 0): set "data.format" to "tokens", or set "data.skip_binary" to true to pass over such files ("data.path", command line --data.path)"#);
    assert_snapshot!(tokenize("-o text"), @r#"error: text, which -o names, lies in text, which "data.path" names, and its files would be read as data: name a folder elsewhere"#);
    assert_snapshot!(tokenize("-o merak.toml"), @"error: merak.toml is no folder of tokens, and is not overwritten: it is no folder; name a new folder");
    assert_snapshot!(tokenize("-o /"), @"error: / is no folder of tokens, and is not overwritten: it has no name of its own; name a new folder");
    assert_snapshot!(tokenize("-o new --data.path [\"text\",\"none\"]"), @r#"error: cannot read none, which "data.path" names (command line --data.path): No such file or directory (os error 2)"#);
    assert_snapshot!(tokenize("-o new --data.format tokens"), @r#"error: "data.format" is tokens (command line --data.format), but must be a format that holds text"#);
    assert_snapshot!(tokenize("-o new --data.validation_path text"), @r#"error: "data.validation_path" is text (command line --data.validation_path), but must be unset: tokenize each part alone, with --data.path and -o, and name the folders here for training"#);
    assert_snapshot!(tokenize("-o new --data.tokenizer {\"train_bpe\":200}"), @r#"error: "data.tokenizer.train_bpe" expects an integer from 257 to 1048576, found 200 (command line --data.tokenizer)"#);
    place.write("chats.jsonl", "{\"messages\": []}\n");
    assert_snapshot!(tokenize("-o new --data.path chats.jsonl --data.format jsonl"), @r#"error: chats.jsonl:1: the record has no "text": it has "messages", but records that become tokens need "text" ("data.path", command line --data.path)"#);
    assert!(!place.path("new").exists() && !place.path(".merak-tmp-new").exists());
    let file = File::options()
        .write(true)
        .open(place.path("bpe/data.tokens"));
    file.expect("a file").set_len(100).expect("a writable file");
    let cut = train("--data.path bpe");
    assert!(cut.contains("bpe/data.tokens: it is cut off: "), "{cut}");
}

#[test]
fn tokens_beyond_memory_start_at_once() {
    // 20 GB of tokens of two bytes.
    const TOKENS: u64 = 10_000_000_000;
    let place = place_of(257);
    place.succeed("tokenize merak.toml");
    let path = place.path("text.tokens/data.tokens");
    let mut header = fs::read(&path).expect("tokens")[..56].to_vec();
    header[16..24].copy_from_slice(&TOKENS.to_le_bytes());
    header.extend(Checksum::of(&header).0.to_le_bytes());
    let mut file = File::options().write(true).open(&path).expect("a file");
    // Not all file systems have room for such a length.
    if let Err(error) = file.set_len(64 + 2 * TOKENS) {
        println!("skipped: no file of 20 GB is possible here: {error}");
        return;
    }
    file.seek(SeekFrom::Start(0)).expect("a file");
    file.write_all(&header).expect("a writable file");
    let start = Instant::now();
    place.succeed(&format!("train merak.toml {} --eval_iters 1", self::TOKENS));
    let took = start.elapsed();
    assert!(took < Duration::from_mins(1), "five steps took {took:?}");
    let records = fs::read_to_string(place.path("run/metrics.jsonl")).expect("records");
    let record = |line| serde_json::from_str::<serde_json::Value>(line).expect("a record");
    let memory = records.lines().map(record);
    let memory: Vec<_> = memory
        .filter_map(|record| record["memory_bytes"].as_u64())
        .collect();
    assert_eq!(memory.len(), 5, "{records}");
    assert!(memory.iter().all(|bytes| *bytes < 200 << 20), "{memory:?}");
}
