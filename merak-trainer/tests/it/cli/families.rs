//! Every family trains and is evaluated by command, on data of its kind, the same on every
//! topology.

use std::{fs, path::Path};

use insta::assert_snapshot;
use merak_ckpt::{Checkpoint, ExportOptions, HfFolder, ImportOptions, Kind, export_hf, import_hf};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

use super::{Workplace, text};

/// A configuration whose model stands in `model.json` and whose data are `format` at `path`.
pub(super) fn place(model: &Value, format: &str, path: &str) -> Workplace {
    let place = Workplace::new();
    place.write("model.json", &model.to_string());
    place.write(
        "merak.toml",
        &format!(
            "output_dir = \"run\"\nmax_steps = 3\nper_device_train_batch_size = 1\n\
             per_device_eval_batch_size = 2\ngradient_accumulation_steps = 4\nlogging_steps = 1\n\
             learning_rate = 0.01\nwarmup_steps = 1\nsave = true\n\n[model]\nconfig = \"model.json\"\n\n\
             [data]\npath = \"{path}\"\nformat = \"{format}\"\nvalidation_fraction = 0.3\n\n\
             [compute]\nthreads_per_rank = 1\n\n[distributed]\ntimeout_s = 20\n"
        ),
    );
    place
}

pub(super) fn bert(architecture: &str) -> Value {
    json!({ "model_type": "bert", "architectures": [architecture], "vocab_size": 258, "hidden_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 24,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        "id2label": {"0": "short", "1": "long", "2": "other"}, "label2id": {"short": 0, "long": 1, "other": 2} })
}

pub(super) fn t5() -> Value {
    json!({ "model_type": "t5", "vocab_size": 270, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
        "num_heads": 2, "n_positions": 24, "dropout_rate": 0.1, "initializer_factor": 0.5,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6 })
}

pub(super) fn vit() -> Value {
    json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1 })
}

pub(super) fn gpt2() -> Value {
    json!({ "model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2 })
}

/// Words of a text, a few at a time.
fn phrases() -> Vec<String> {
    let text = text();
    let words: Vec<_> = text.split(' ').take(120).collect();
    words.chunks(4).map(|words| words.join(" ")).collect()
}

fn lines(record: impl Fn(usize, &str) -> Value) -> String {
    let phrases = phrases();
    let records = phrases.iter().enumerate();
    let lines: Vec<_> = records
        .map(|(i, phrase)| record(i, phrase).to_string())
        .collect();
    lines.join("\n")
}

fn labelled(i: usize, phrase: &str) -> Value {
    let label = if i.is_multiple_of(2) {
        json!(i % 3)
    } else {
        json!(["short", "long", "other"][i % 3])
    };
    json!({ "text": phrase, "label": label })
}

/// Tensors by name: type, shape and bytes.
pub(super) type Tensors<'a> = [(&'a str, Dtype, Vec<usize>, Vec<u8>)];

pub(super) fn write_tensors(path: &Path, tensors: &Tensors<'_>) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes);
        (*name, view.expect("as many bytes as the shape says"))
    });
    fs::create_dir_all(path.parent().expect("a parent")).expect("a writable folder");
    safetensors::serialize_to_file(views, None, path).expect("it can be written");
}

pub(super) fn i64s(values: impl IntoIterator<Item = usize>) -> Vec<u8> {
    let values = values.into_iter();
    values
        .flat_map(|value| i64::try_from(value).expect("small").to_le_bytes())
        .collect()
}

/// `rows` images of bytes, with their classes.
pub(super) fn images(rows: usize) -> Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)> {
    let pixels = (0..rows * 2 * 8 * 8).map(|i| u8::try_from(i * i / 7 % 256).expect("a byte"));
    let labels = (0..rows).flat_map(|i| i32::try_from(i % 3).expect("small").to_le_bytes());
    vec![
        (
            "pixel_values",
            Dtype::U8,
            vec![rows, 2, 8, 8],
            pixels.collect(),
        ),
        ("labels", Dtype::I32, vec![rows], labels.collect()),
    ]
}

/// The steps that a run has recorded in its folder, with their losses.
pub(super) fn records(place: &Workplace, folder: &str) -> Vec<(u64, f64)> {
    let records = objects(place, &format!("{folder}/metrics.jsonl")).into_iter();
    let step = |record: Value| Some((record["step"].as_u64()?, record["loss"].as_f64()?));
    records.filter_map(step).collect()
}

pub(super) fn losses(place: &Workplace) -> Vec<f64> {
    let records = records(place, "run").into_iter();
    records.map(|(_, loss)| loss).collect()
}

/// The losses of a run from the start.
pub(super) fn trained(place: &Workplace, keys: &str) -> Vec<f64> {
    let _ = fs::remove_dir_all(place.path("run"));
    place.succeed(&format!("train merak.toml {keys}"));
    losses(place)
}

pub(super) fn assert_close(actual: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (actual, expected) in actual.iter().zip(expected) {
        let gap = (actual / expected - 1.0).abs();
        assert!(gap <= tolerance, "{actual} against {expected}: {what}");
    }
}

/// Trains on one rank and on several, and evaluates the result on one rank and on several.
fn same_everywhere(place: &Workplace) -> Vec<f64> {
    let alone = trained(place, "");
    assert_eq!(alone.len(), 3);
    assert!(
        alone.iter().all(|loss| loss.is_finite() && *loss > 0.0),
        "{alone:?}"
    );
    let evaluated = |ranks: &str| {
        let found = place.document(&format!("evaluate merak.toml run --json {ranks}"));
        found["eval_loss"].as_f64().expect("a loss")
    };
    let loss = evaluated("");
    for ranks in [
        "--tp 2 --pp 2",
        "--dp 2 --gradient_accumulation_steps 2",
        "--dp 2 --pp 2",
    ] {
        assert_close(&[evaluated(ranks)], &[loss], 1e-5, ranks);
    }
    assert_eq!(trained(place, "--pp 2"), alone, "pp 2");
    for ranks in [
        "--tp 2",
        "--dp 2 --gradient_accumulation_steps 2",
        "--dp 2 --tp 2 --pp 2 --gradient_accumulation_steps 2",
    ] {
        let losses = trained(place, ranks);
        assert_close(&losses[..1], &alone[..1], 1e-6, ranks);
        assert_close(&losses, &alone, 1e-4, ranks);
    }
    alone
}

#[test]
fn bert_fills_in_the_words_of_a_text() {
    let place = place(&bert("BertForMaskedLM"), "text", "text");
    let losses = same_everywhere(&place);
    let prefetched = trained(&place, "--dataloader_num_workers 2");
    assert_eq!(prefetched, losses, "workers draw alike");
    assert_ne!(trained(&place, "--data_seed 7"), losses);
    assert_ne!(trained(&place, "--data.mlm_probability 0.5"), losses);
    assert_ne!(trained(&place, "--data.mask_replace_prob 0.1"), losses);
    assert_ne!(trained(&place, "--data.random_replace_prob 0.2"), losses);
    place.write("text.jsonl", &lines(|_, phrase| json!({ "text": phrase })));
    let keys = "--data.format jsonl --data.path text.jsonl";
    assert_eq!(trained(&place, keys).len(), 3);
    // A resumed run draws the numbers of the unbroken one.
    trained(&place, "--max_steps 2 --lr_scheduler_type constant");
    place.succeed("train merak.toml --resume latest --lr_scheduler_type constant");
    let resumed = self::losses(&place);
    assert_eq!(resumed, trained(&place, "--lr_scheduler_type constant"));
}

#[test]
fn bert_tells_texts_apart() {
    let place = place(
        &bert("BertForSequenceClassification"),
        "jsonl",
        "texts.jsonl",
    );
    place.write("texts.jsonl", &lines(labelled));
    let losses = same_everywhere(&place);
    for (format, delimiter) in [("csv", ","), ("tsv", "\t")] {
        let rows: Vec<_> = phrases()
            .iter()
            .enumerate()
            .map(|(i, phrase)| format!("{phrase}{delimiter}{}", i % 3))
            .collect();
        let table = format!("text{delimiter}label\n{}\n", rows.join("\n"));
        place.write(&format!("texts.{format}"), &table);
        let keys = format!("--data.format {format} --data.path texts.{format}");
        assert_eq!(trained(&place, &keys), losses, "{format}");
    }
    let pairs = lines(|i, phrase| json!({ "text": phrase, "text_pair": phrase, "label": i % 2 }));
    place.write("pairs.jsonl", &pairs);
    assert_ne!(trained(&place, "--data.path pairs.jsonl"), losses);
}

/// The objects of a file of JSON lines.
pub(super) fn objects(place: &Workplace, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(place.path(name)).expect("it was written");
    let object = |line| serde_json::from_str(line).expect("one object a line");
    text.lines().map(object).collect()
}

/// The figures of the predictions in `all.jsonl`, beside them or as a document; the same lines go
/// to standard output.
fn check_figures(place: &Workplace, told: &str, all: &[Value]) {
    let wrote = format!("wrote     probabilities of {} samples to", all.len());
    assert!(
        told.starts_with(&format!("{wrote} all.jsonl\n")) && told.contains("\neval_accuracy "),
        "{told}"
    );
    let document = place.document("predict merak.toml run -o again.jsonl --json");
    let text = fs::read_to_string(place.path("all.jsonl")).expect("predictions");
    let again = fs::read_to_string(place.path("again.jsonl"));
    assert_eq!(again.expect("predictions"), text);
    assert_eq!(document["eval_samples"], all.len());
    assert_eq!(document["output"], "again.jsonl");
    let right = all.iter().filter(|row| row["class"] == row["label"]);
    let right = right.count() as f64 / all.len() as f64;
    let accuracy = document["eval_accuracy"].as_f64().expect("a number");
    assert!((accuracy - right).abs() < 1e-12, "{document}");
    let printed = place.merak("predict merak.toml run --output -");
    assert_eq!((printed.status, printed.stdout), (Some(0), text));
    let wrote = format!("{wrote} standard output\n");
    assert!(printed.stderr.contains(&wrote), "{}", printed.stderr);
}

#[test]
fn predictions_are_json_lines_in_the_order_of_the_data() {
    let classifier = bert("BertForSequenceClassification");
    let place = place(&classifier, "jsonl", "texts.jsonl");
    place.write("texts.jsonl", &lines(labelled));
    trained(
        &place,
        "--do_predict --do_eval --metric_for_best_model accuracy",
    );
    let of_run = objects(&place, "run/predictions.jsonl");
    let evaluated = place.document("evaluate merak.toml run --json");
    let right = of_run
        .iter()
        .filter(|row| row["class"] == row["label"])
        .count();
    let accuracy = evaluated["eval_accuracy"].as_f64().expect("a number");
    assert!(
        (accuracy - right as f64 / of_run.len() as f64).abs() < 1e-12,
        "{evaluated}"
    );
    assert!(evaluated["eval_f1_macro"].is_f64() && evaluated["eval_f1_weighted"].is_f64());
    let told = place.succeed("predict merak.toml run -o all.jsonl");
    let all = objects(&place, "all.jsonl");
    check_figures(&place, &told, &all);
    assert_eq!(all.len(), lines(labelled).lines().count());
    assert!(all.iter().enumerate().all(|(i, row)| row["sample"] == i));
    // The validation part is the end of the data.
    let end = all[all.len() - of_run.len()..]
        .iter()
        .map(|row| &row["probabilities"]);
    assert!(end.eq(of_run.iter().map(|row| &row["probabilities"])));
    place.succeed("predict merak.toml run --dp 2 --gradient_accumulation_steps 2 -o dp.jsonl");
    for (found, expected) in objects(&place, "dp.jsonl").iter().zip(&all) {
        let [found, expected] = [found, expected].map(|row| row["probabilities"][0].as_f64());
        assert!((found.expect("a number") - expected.expect("a number")).abs() < 1e-5);
    }
    let of_dp = objects(&place, "dp.jsonl");
    assert_eq!(of_dp.len(), all.len());
    assert!(of_dp.iter().enumerate().all(|(i, row)| row["sample"] == i));
    place.succeed("predict merak.toml run --what embeddings --part validation -o e.jsonl");
    let embeddings = objects(&place, "e.jsonl");
    assert_eq!(embeddings.len(), of_run.len());
    assert_eq!(
        embeddings[0]["embedding"].as_array().map(Vec::len),
        classifier["hidden_size"]
            .as_u64()
            .map(|width| width as usize)
    );
    assert_snapshot!(place.mistake("predict merak.toml run"), @"error: -o FILE is missing: it names the file that the predictions go to");
    assert_snapshot!(place.mistake("predict merak.toml run --json -o -"), @"error: --json prints one document to standard output, where -o - writes the lines: name a file");
    assert_snapshot!(place.mistake("predict merak.toml run --dp 1 --what loses -o a"), @r#"error: --what is "loses", expected one of probabilities, losses, embeddings, logits"#);
    assert_snapshot!(place.mistake("train merak.toml --dry-run --metric_for_best_model acuracy"), @r#"error: "metric_for_best_model" is eval_acuracy, but an evaluation gives eval_loss, eval_accuracy, eval_f1_macro or eval_f1_weighted; did you mean "eval_accuracy"? (command line --metric_for_best_model)"#);
    assert_snapshot!(place.mistake("predict merak.toml run -o nowhere/a.jsonl"), @"error: cannot write nowhere/a.jsonl, which -o names: No such file or directory (os error 2)");
}

#[test]
fn what_is_only_predicted_needs_no_labels() {
    let place = place(
        &bert("BertForSequenceClassification"),
        "jsonl",
        "labelled.jsonl",
    );
    place.write("labelled.jsonl", &lines(labelled));
    let told = place.succeed(
        "train merak.toml --do_eval --eval_steps 1 --load_best_model_at_end --metric_for_best_model accuracy",
    );
    assert!(told.contains("\nbest      accuracy "), "{told}");
    place.succeed("predict merak.toml run -o all.jsonl");
    let all = objects(&place, "all.jsonl");
    let no_label = [json!(null), json!(""), json!(-1)];
    let some = lines(|i, phrase| match i % 3 {
        0 => json!({ "text": phrase }),
        1 => json!({ "text": phrase, "label": no_label[i % 9 / 3] }),
        _ => labelled(i, phrase),
    });
    let none = some.lines().next().unwrap_or_default().to_owned();
    for (name, records) in [("some.jsonl", some), ("none.jsonl", none)] {
        place.write(name, &records);
        place.succeed(&format!(
            "predict merak.toml run --data.path {name} -o found.jsonl"
        ));
        let found = objects(&place, "found.jsonl");
        assert_eq!(found.len(), records.lines().count());
        for (i, (row, known)) in found.iter().zip(&all).enumerate() {
            assert_eq!(row["class"], known["class"], "{name}");
            let label = if i % 3 == 2 {
                &known["label"]
            } else {
                &Value::Null
            };
            assert_eq!(&row["label"], label, "{name}");
        }
    }
    // A configuration that trains or predicts changes neither.
    let line = "predict merak.toml run --do_train --data.path none.jsonl -o found.jsonl";
    place.succeed(line);
    let line = "evaluate merak.toml run --do_predict --data.path some.jsonl";
    let refused = place.mistake(line);
    assert!(
        refused.contains("some.jsonl:1: the record has no \"label\""),
        "{refused}"
    );
}

#[test]
fn a_language_model_predicts_the_losses_of_its_tokens() {
    let place = Workplace::new();
    place.succeed("train merak.toml");
    place.succeed("predict merak.toml run --part validation --output losses.jsonl");
    let rows = objects(&place, "losses.jsonl");
    let means = rows.iter().map(|row| row["loss"].as_f64().expect("a mean"));
    let mean = means.sum::<f64>() / rows.len() as f64;
    let evaluated = place.document("evaluate merak.toml run --json");
    let loss = evaluated["eval_loss"].as_f64().expect("a loss");
    assert!((mean / loss - 1.0).abs() < 1e-5, "{mean} {loss}");
    assert_eq!(rows[0]["losses"].as_array().map(Vec::len), Some(16));
}

#[test]
fn samples_of_records_count_in_the_memory_of_a_run() {
    let classes = bert("BertForSequenceClassification");
    let pair = |_: usize, phrase: &str| json!({ "source": phrase, "target": phrase });
    for (model, records) in [(classes, lines(labelled)), (t5(), lines(pair))] {
        let place = place(&model, "jsonl", "records.jsonl");
        place.write("records.jsonl", &records);
        let plan = place.succeed("train merak.toml --dry-run");
        let (_, data) = plan.rsplit_once(", the data ").expect("the memory's line");
        assert_ne!(data.trim(), "0 B", "{plan}");
    }
}

#[test]
fn t5_writes_what_is_left_out_of_a_text() {
    let place = place(&t5(), "text", "text");
    let losses = same_everywhere(&place);
    assert_ne!(trained(&place, "--data.mean_noise_span_length 1.5"), losses);
    let shown = place.succeed("train merak.toml --dry-run");
    // 25 tokens, 4 of them left out in one piece.
    assert!(shown.contains("of 24 tokens and 6 to write"), "{shown}");
}

#[test]
fn t5_learns_pairs_of_texts() {
    let place = place(&t5(), "jsonl", "pairs.jsonl");
    let pair =
        |_: usize, phrase: &str| json!({ "source": phrase, "target": phrase.split(' ').next() });
    place.write("pairs.jsonl", &lines(pair));
    same_everywhere(&place);
    // The answer alone is text of its own; ids go on with the prompt in no model of this kind.
    let ask = "generate run --temperature 0 --max-new-tokens 4 --prompt abc";
    let answer = place.document(&format!("{ask} --json"))[0]["text"].clone();
    let shown = [ask.to_owned(), format!("{ask} --stream")].map(|line| place.succeed(&line));
    for shown in shown {
        assert_eq!(Some(shown.trim_end_matches('\n')), answer.as_str());
    }
    // Less padding after the target changes nothing but the order of sums; masks of dropout know
    // positions.
    let mut without_dropout = t5();
    without_dropout["dropout_rate"] = 0.into();
    place.write("model.json", &without_dropout.to_string());
    let [wide, narrow] = ["", "--seq_length 24,10"].map(|keys| trained(&place, keys));
    assert_close(&narrow, &wide, 1e-5, "a shorter target");
}

#[test]
fn vit_learns_images_of_bytes_and_of_floats() {
    let place = place(&vit(), "tensors", "images.safetensors");
    let images = images(20);
    write_tensors(&place.path("images.safetensors"), &images);
    let losses = same_everywhere(&place);
    let floats = images[0]
        .3
        .iter()
        .flat_map(|&pixel| (f32::from(pixel) / 127.5 - 1.0).to_le_bytes());
    let floats = (
        "pixel_values",
        Dtype::F32,
        vec![20, 2, 8, 8],
        floats.collect(),
    );
    write_tensors(
        &place.path("floats.safetensors"),
        &[floats, images[1].clone()],
    );
    assert_eq!(trained(&place, "--data.path floats.safetensors"), losses);
    // The same samples in two files of a folder.
    for (name, rows) in [
        ("parts/a.safetensors", 0..7),
        ("parts/b.safetensors", 7..20),
    ] {
        let part: Vec<_> = images
            .iter()
            .map(|(name, dtype, shape, bytes)| {
                let row = bytes.len() / 20;
                let bytes = bytes[rows.start * row..rows.end * row].to_vec();
                let shape = [&[rows.len()], &shape[1..]].concat();
                (*name, *dtype, shape, bytes)
            })
            .collect();
        write_tensors(&place.path(name), &part);
    }
    assert_eq!(trained(&place, "--data.path parts"), losses);
}

#[test]
fn a_file_of_tensors_feeds_any_family() {
    let ids = |rows: usize, len: usize| i64s((0..rows * len).map(|i| i * i % 61));
    let causal = place(&gpt2(), "tensors", "ids.safetensors");
    write_tensors(
        &causal.path("ids.safetensors"),
        &[("input_ids", Dtype::I64, vec![20, 12], ids(20, 12))],
    );
    let losses = same_everywhere(&causal);
    // The same with its labels: the next token, none after the last.
    let labels = (0..20 * 12).flat_map(|i: i64| {
        let label = if i % 12 == 11 {
            -100
        } else {
            (i + 1) * (i + 1) % 61
        };
        label.to_le_bytes()
    });
    write_tensors(
        &causal.path("labelled.safetensors"),
        &[
            ("input_ids", Dtype::I64, vec![20, 12], ids(20, 12)),
            ("labels", Dtype::I64, vec![20, 12], labels.collect()),
        ],
    );
    assert_eq!(trained(&causal, "--data.path labelled.safetensors"), losses);

    let pairs = place(&t5(), "tensors", "pairs.safetensors");
    write_tensors(
        &pairs.path("pairs.safetensors"),
        &[
            ("input_ids", Dtype::I64, vec![20, 12], ids(20, 12)),
            ("labels", Dtype::I64, vec![20, 5], ids(20, 5)),
        ],
    );
    same_everywhere(&pairs);
    let shown = pairs.succeed("train merak.toml --dry-run");
    assert!(shown.contains("of 12 tokens and 5 to write"), "{shown}");

    let masked = place(&bert("BertForMaskedLM"), "tensors", "ids.safetensors");
    let mask = (0..20 * 12).map(|i| u8::from(i % 12 < 9 + i / 12 % 3));
    write_tensors(
        &masked.path("ids.safetensors"),
        &[
            ("input_ids", Dtype::I64, vec![20, 12], ids(20, 12)),
            ("labels", Dtype::I64, vec![20, 12], ids(20, 12)),
            ("attention_mask", Dtype::BOOL, vec![20, 12], mask.collect()),
        ],
    );
    same_everywhere(&masked);
}

/// Twenty samples of eight positions: with padding after five tokens or before them, and with
/// another token there.
fn padded(model: &Value) -> Workplace {
    let place = place(model, "tensors", "behind.safetensors");
    // Five tokens of eight positions, the rest of which is padding of one kind or another.
    let token = |sample: usize, t: usize| (sample + t * t) % 61;
    let write = |name: &str, first: usize, pad: usize| {
        let of = |value: &dyn Fn(usize, usize) -> usize, filler: usize| {
            i64s(
                (0..20 * 8).map(|i: usize| match (i % 8).checked_sub(first) {
                    Some(t) if t < 5 => value(i / 8, t),
                    _ => filler,
                }),
            )
        };
        write_tensors(
            &place.path(name),
            &[
                ("input_ids", Dtype::I64, vec![20, 8], of(&token, pad)),
                ("attention_mask", Dtype::I64, vec![20, 8], of(&|_, _| 1, 0)),
            ],
        );
    };
    write("behind.safetensors", 0, 7);
    write("other.safetensors", 0, 9);
    write("before.safetensors", 3, 7);
    write("before-other.safetensors", 3, 9);
    place
}

#[test]
fn positions_of_opt_count_tokens_alone() {
    let opt = json!({ "model_type": "opt", "vocab_size": 64, "hidden_size": 16, "ffn_dim": 16, "dropout": 0,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32 });
    let place = padded(&opt);
    let losses = |name: &str| trained(&place, &format!("--data.path {name}.safetensors"));
    let behind = losses("behind");
    for keys in ["", " --tp 2", " --pp 2"] {
        let before = trained(&place, &format!("--data.path before.safetensors{keys}"));
        assert_close(&before, &behind, 1e-5, keys);
    }
}

#[test]
fn padding_before_or_after_the_tokens_is_hidden() {
    let place = padded(&gpt2());
    let losses = |name: &str| trained(&place, &format!("--data.path {name}.safetensors"));
    assert_eq!(losses("behind"), losses("other"), "the token of padding");
    let before = losses("before");
    assert_eq!(before, losses("before-other"), "the token of padding");
    assert_ne!(before, losses("behind"), "positions count from the first");
    place.write(
        "merak.toml",
        &fs::read_to_string(place.path("merak.toml"))
            .unwrap()
            .replace("behind", "before"),
    );
    assert_eq!(same_everywhere(&place), before);
}

#[test]
fn encoders_go_out_to_hugging_face_folders_and_come_in_again() {
    let classifier = bert("BertForSequenceClassification");
    let cases = [
        (bert("BertForMaskedLM"), "text", "text"),
        (classifier, "jsonl", "texts.jsonl"),
        (t5(), "text", "text"),
        (vit(), "tensors", "images.safetensors"),
    ];
    for (model, format, path) in cases {
        let place = place(&model, format, path);
        place.write("texts.jsonl", &lines(labelled));
        write_tensors(&place.path("images.safetensors"), &images(20));
        place.succeed("train merak.toml");
        let trained = Checkpoint::open(place.path("run")).unwrap();
        export_hf(&trained, place.path("hf"), &ExportOptions::default()).unwrap();
        let folder = HfFolder::open(place.path("hf")).unwrap();
        assert_eq!(folder.left_out(), [""; 0]);
        let options = ImportOptions::default();
        let imported = import_hf(&folder, place.path("imported"), &options).unwrap();
        // The tables of files and of tensor parallelism agree on how parameters are cut.
        let cuts = |checkpoint: &Checkpoint| -> Vec<_> {
            let tensors = checkpoint.manifest().tensors_of(&Kind::Parameter);
            tensors.map(|t| (t.name.clone(), t.cut.clone())).collect()
        };
        assert_eq!(cuts(&Checkpoint::open(imported).unwrap()), cuts(&trained));

        let evaluated = |from: &str| {
            let found = place.document(&format!("evaluate merak.toml {from} --json"));
            found["eval_loss"].as_f64().expect("a loss")
        };
        let loss = evaluated("run");
        for from in ["hf", "imported", "hf --tp 2 --pp 2"] {
            assert_close(&[evaluated(from)], &[loss], 1e-5, from);
        }
        let config = fs::read_to_string(place.path("merak.toml")).unwrap();
        let config = config.replace("config = \"model.json\"", "hf_dir = \"hf\"");
        place.write("hf.toml", &config.replace("\"run\"", "\"tuned\""));
        place.succeed("train hf.toml --max_steps 1 --learning_rate 0 --tp 2");
        assert_close(&[evaluated("tuned")], &[loss], 1e-5, "tuned");
    }
}

#[test]
fn models_that_continue_no_text_do_not_generate() {
    let place = place(&bert("BertForMaskedLM"), "text", "text");
    let shown = place.succeed("train merak.toml --max_steps 1");
    assert!(!shown.contains("merak generate"), "{shown}");
    assert_snapshot!(place.mistake("generate run --prompt-ids 1"), @"error: text generation needs a model for causal language modelling or sequence-to-sequence learning, but this bert model is for masked language modelling");
}

#[test]
fn a_family_fed_with_another_kind_of_data_says_what_it_learns() {
    let refused = |model: &Value, format: &str, keys: &str| {
        place(model, format, "text").mistake(&format!("train merak.toml {keys}"))
    };
    let classifier = bert("BertForSequenceClassification");
    assert_snapshot!(refused(&classifier, "text", ""), @r#"error: this bert model is for sequence classification, for which "data.format" text has nothing: choose jsonl, csv, tsv, parquet or tensors (merak.toml:16)"#);
    assert_snapshot!(refused(&vit(), "jsonl", ""), @r#"error: this vit model is for image classification, for which "data.format" jsonl has nothing: choose images or tensors (merak.toml:16)"#);
    assert_snapshot!(refused(&gpt2(), "tensors", "--data.path none"), @r#"error: "data.path" is not set: "data.format" tensors needs a file or folder"#);
    assert_snapshot!(refused(&gpt2(), "tensors", ""), @r#"error: cannot use the tensors of text: the folder has no .safetensors file ("data.path", merak.toml:15)"#);
    assert_snapshot!(refused(&gpt2(), "tensors", "--data.path model.json"), @"error: cannot read model.json: it begins with text, and is no safetensors file");
    assert_snapshot!(refused(&gpt2(), "text", "--seq_length 8,8"), @r#"error: the tokenizer bytes has 257 tokens, but the model's vocabulary only 64: use a model configuration with "vocab_size" of at least 257, or another tokenizer ("model.config", merak.toml:12)"#);
    assert_snapshot!(refused(&bert("BertForMaskedLM"), "text", "--seq_length 8,8"), @r#"error: "seq_length" has two lengths, but this bert model has no decoder: give one (command line --seq_length)"#);
    assert_snapshot!(refused(&t5(), "text", "--seq_length 24,5"), @r#"error: "seq_length" gives the decoder 5 positions, but span corruption of an input of 24 needs 6 (command line --seq_length)"#);
    assert_snapshot!(refused(&t5(), "text", "--seq_length 2"), @r#"error: "seq_length" is 2, but span corruption needs at least 3 (command line --seq_length)"#);
    let mut narrow = bert("BertForMaskedLM");
    narrow["vocab_size"] = 257.into();
    assert_snapshot!(refused(&narrow, "text", ""), @r#"error: the tokenizer has no token for what is hidden, [MASK] or <mask>, and the model's vocabulary of 257 leaves no room after its 257 tokens: use a tokenizer that has them, or a "vocab_size" of at least 258 ("model.config", merak.toml:12)"#);
    let mut narrow = t5();
    narrow["vocab_size"] = 259.into();
    assert_snapshot!(refused(&narrow, "text", "--data.mean_noise_span_length 1"), @r#"error: the tokenizer has no tokens for 3 left-out pieces, <extra_id_0> and so on, and the model's vocabulary of 259 leaves no room after its 257 tokens: use a tokenizer that has them, or a "vocab_size" of at least 260 ("model.config", merak.toml:12)"#);
    assert_snapshot!(refused(&t5(), "text", "--data.mlm_probability 1"), @r#"error: "data.mlm_probability" is 1 (command line --data.mlm_probability), but must be more than 0 and less than 1"#);
    assert_snapshot!(refused(&t5(), "text", "--data.random_replace_prob 0.3"), @r#"error: "data.random_replace_prob" is 0.3 (command line --data.random_replace_prob), but must be at least 0 and, with "data.mask_replace_prob" 0.8, at most 1"#);
    assert_snapshot!(refused(&gpt2(), "text", "--data.mlm_probability 0.2"), @r#"error: "data.mlm_probability" is 0.2 (command line --data.mlm_probability), but must be 0.15, its default: it does nothing for this gpt2 model for causal language modelling on such data"#);
    assert_snapshot!(refused(&t5(), "tensors", "--data.mean_noise_span_length 2"), @r#"error: "data.mean_noise_span_length" is 2.0 (command line --data.mean_noise_span_length), but must be 3.0, its default: it does nothing for this t5 model for sequence-to-sequence learning on such data"#);
    assert_snapshot!(refused(&t5(), "jsonl", "--data.max_bytes 9"), @r#"error: "data.max_bytes" is 9 (command line --data.max_bytes), but must be unset unless "data.format" is "text""#);
}

#[test]
fn records_that_do_not_fit_are_named_by_line() {
    let refused = |model: &Value, record: Value| {
        let place = place(model, "jsonl", "a.jsonl");
        place.write("a.jsonl", &format!("{record}\n"));
        place.mistake("train merak.toml")
    };
    let classifier = bert("BertForSequenceClassification");
    assert_snapshot!(refused(&classifier, json!({ "text": "a", "label": 3 })), @r#"error: a.jsonl:1: the label is 3, expected a class from 0 to 2 or one of long, other, short ("data.path", merak.toml:15)"#);
    assert_snapshot!(refused(&classifier, json!({ "sentence": "a", "label": 1 })), @r#"error: a.jsonl:1: the record has no "text": it has "sentence", "label", but records of sequence classification need "text" and "label" and may have "text_pair" ("data.path", merak.toml:15)"#);
    assert_snapshot!(refused(&t5(), json!({ "source": "a", "label": 1 })), @r#"error: a.jsonl:1: the record has no "target": it has "source", "label", but records of sequence-to-sequence learning need "source" and "target", or "text" for span corruption ("data.path", merak.toml:15)"#);
    assert_snapshot!(refused(&bert("BertForMaskedLM"), json!({ "text": 3 })), @r#"error: a.jsonl:1: the field "text" is 3, expected a text ("data.path", merak.toml:15)"#);
}

#[test]
fn tensors_that_do_not_fit_are_named_with_what_the_model_reads() {
    let refused = |model: &Value, tensors: &Tensors<'_>| {
        let place = place(model, "tensors", "a.safetensors");
        write_tensors(&place.path("a.safetensors"), tensors);
        place.mistake("train merak.toml")
    };
    let images = images(20);
    assert_snapshot!(refused(&vit(), &images[..1]), @r#"error: this vit model for image classification reads "labels" (integers of shape [] per sample, -100 where there is none), but the data give only: pixel_values"#);
    let mut wide = vit();
    wide["image_size"] = 16.into();
    assert_snapshot!(refused(&wide, &images), @r#"error: the data give "pixel_values" as u8 of shape [2, 8, 8] per sample, but this vit model reads floats of shape [2, 16, 16] per sample"#);
    let mut few = vit();
    few["num_labels"] = 2.into();
    assert_snapshot!(refused(&few, &images), @r#"error: "labels" of sample 2 has the value 2, but this vit model takes 0 to 1, or -100 for none"#);
    assert_snapshot!(refused(&gpt2(), &images), @r#"error: this gpt2 model for causal language modelling reads "input_ids" (integers of shape [32] per sample), but the data give only: labels, pixel_values"#);
    let of = |name, values: Vec<usize>| (name, Dtype::I64, vec![4, values.len() / 4], i64s(values));
    let ids = of("input_ids", (0..16).collect());
    assert_snapshot!(refused(&gpt2(), &[of("input_ids", vec![64; 16])]), @r#"error: "input_ids" of sample 0 has the value 64 at position 0, but this gpt2 model takes 0 to 63"#);
    assert_snapshot!(refused(&gpt2(), &[ids.clone(), of("labels", (0..16).collect())]), @r#"error: "labels" repeat "input_ids", but a label of this gpt2 model stands at the position that predicts it, one to the left: leave "labels" out, and they are made of "input_ids", or set "shift_labels""#);
    let twos = of("attention_mask", vec![2; 16]);
    assert_snapshot!(refused(&gpt2(), &[ids.clone(), twos]), @r#"error: "attention_mask" of sample 0 has the value 2 at position 0, but this gpt2 model takes 0 to 1"#);
    assert_snapshot!(refused(&gpt2(), &[ids.clone(), of("position_ids", (0..16).collect())]), @r#"error: the data give "position_ids", which this gpt2 model does not read: leave it out of the files, which may have input_ids, labels, attention_mask"#);
    let floats = ("input_ids", Dtype::F32, vec![4, 2], vec![0; 32]);
    assert_snapshot!(refused(&gpt2(), &[floats]), @r#"error: the data give "input_ids" as f32 of shape [2] per sample, but this gpt2 model reads integers of shape [2] per sample"#);
    let three = ("labels", Dtype::I64, vec![3, 4], vec![0; 96]);
    assert_snapshot!(refused(&gpt2(), &[ids.clone(), three]), @r#"error: cannot use the tensors of a.safetensors: the tensor "labels" has 3 samples, but "input_ids" has 4 ("data.path", merak.toml:15)"#);
    let masked = bert("BertForMaskedLM");
    let mask = of("attention_mask", vec![2; 16]);
    assert_snapshot!(refused(&masked, &[ids.clone(), of("labels", vec![1; 16]), mask]), @r#"error: "attention_mask" of sample 0 has the value 2 at position 0, but this bert model takes 0 to 1"#);
    let place = place(&gpt2(), "tensors", "a.safetensors");
    write_tensors(&place.path("a.safetensors"), &[ids]);
    assert_snapshot!(place.mistake("train merak.toml --seq_length 8"), @r#"error: the data give "input_ids" as i64 of shape [4] per sample, but this gpt2 model reads integers of shape [8] per sample"#);
}
