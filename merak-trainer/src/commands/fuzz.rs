//! Made-up configurations, run as `merak train --dry-run`: none panics, and each refusal is one
//! message.
//!
//! ```text
//! export FUZZ_CASES=5000 FUZZ_SEED=1
//! cargo test -p merak-trainer --bin merak -- --ignored fuzz --nocapture
//! ```

use super::prepared::Prepared;
use merak_trainer::{Config, MerakTrainer, Result, World, chain, keys};
use serde_json::{Map, Value, json};
use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Default number of configurations in one run of the test.
const CASES: u64 = 5000;

/// The longest message, in bytes.
const LONGEST: usize = 2048;

/// No configuration takes longer than this.
const SLOWEST: Duration = Duration::from_mins(1);

/// Random numbers of a seed: `SplitMix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn one_in(&mut self, odds: usize) -> bool {
        self.below(odds) == 0
    }

    fn of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// A whole number: mostly small, at times at the edge of a type.
fn integer(random: &mut Random) -> Value {
    if random.one_in(3) {
        let edges = [
            json!(-1),
            json!(0),
            json!(255),
            json!(16_385),
            json!(65_537),
            json!(2_147_483_648_u64),
            json!(4_294_967_296_u64),
            json!(i64::MAX),
            json!(u64::MAX),
            json!(i64::MIN),
        ];
        return random.of(&edges).clone();
    }
    json!(1 + random.below(12))
}

fn float(random: &mut Random) -> Value {
    let edges = [
        0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, -0.1, 1e-300, 1e-8, 1e15, 1e300, -1e300,
    ];
    json!(random.of(&edges))
}

/// A text: a known name, or text that is unsafe to print.
fn words(random: &mut Random) -> String {
    let usual = [
        "",
        "auto",
        "none",
        "text",
        "jsonl",
        "gelu",
        "bytes",
        "model.json",
        ".",
        "nowhere",
        "true",
        "0,2,4",
        "[0, 1]",
        "{}",
        "llama",
        "linear",
        "cosine",
        "gpipe",
        "zb_h1",
        "dualpipe_v",
        "interleaved_1f1b",
        "transformer.h.1",
        "embed",
        "c_attn",
        "1e999",
        "nan",
        "-1",
        "ö",
        "日本",
    ];
    match random.below(8) {
        0 => "\u{1b}[2J\u{1b}]0;title\u{7}".to_owned(),
        1 => "a\nb\r\tc\u{9b}31m\u{202e}".to_owned(),
        2 => "x".repeat(20_000),
        3 => "\u{0}\u{7f}é".repeat(1 + random.below(300)),
        _ => (*random.of(&usual)).to_owned(),
    }
}

/// A value of any kind.
fn value(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 6 } else { 9 }) {
        0 => Value::Null,
        1 => json!(random.one_in(2)),
        2 | 3 => integer(random),
        4 => float(random),
        5 => Value::String(words(random)),
        6 | 7 => (0..random.below(4))
            .map(|_| value(random, depth - 1))
            .collect(),
        _ => {
            let entry = |random: &mut Random| (words(random), value(random, depth - 1));
            Value::Object((0..random.below(3)).map(|_| entry(random)).collect())
        }
    }
}

/// A value of the kind that stands there already, or of any.
fn like(old: &Value, random: &mut Random) -> Value {
    match old {
        _ if random.one_in(3) => value(random, 2),
        Value::Bool(flag) => json!(!flag),
        Value::Number(number) if number.is_f64() => float(random),
        Value::Number(_) => integer(random),
        Value::String(_) => Value::String(words(random)),
        Value::Array(items) if !items.is_empty() => {
            let mut items = items.clone();
            let at = random.below(items.len());
            items[at] = like(&items[at], random);
            Value::Array(items)
        }
        Value::Object(table) => {
            let mut table = table.clone();
            mutate(&mut table, random);
            Value::Object(table)
        }
        _ => value(random, 2),
    }
}

/// Changes a field, takes one away, or adds one.
fn mutate(table: &mut Map<String, Value>, random: &mut Random) {
    let names: Vec<_> = table.keys().cloned().collect();
    if names.is_empty() || random.one_in(12) {
        table.insert(words(random), value(random, 2));
        return;
    }
    let name = random.of(&names);
    if random.one_in(10) {
        table.remove(name);
    } else {
        table[name] = like(&table[name], random);
    }
}

/// Descriptions of models of every family.
fn models() -> Vec<Map<String, Value>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/families");
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        })
        .collect();
    files.sort();
    let config = |path: &PathBuf| -> Value {
        let golden: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        golden["config"].clone()
    };
    let mut models: Vec<_> = files.iter().map(config).collect();
    models.extend([
        json!({ "model_type": "gpt", "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
            "max_position_embeddings": 32 }),
        json!({ "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 24 }),
        json!({ "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
            "n_positions": 24, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6 }),
        json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3 }),
    ]);
    let known: Vec<_> = models
        .iter()
        .filter_map(|model| model["model_type"].as_str())
        .collect();
    let all = merak_trace::models::known_families().all(|family| known.contains(&family));
    assert!(all, "a family has no description here");
    models
        .into_iter()
        .map(|mut model| {
            if model["model_type"] != "vit" {
                model["vocab_size"] = json!(300);
            }
            model.as_object().unwrap().clone()
        })
        .collect()
}

/// The layers of a configuration.
struct Case {
    file: PathBuf,
    environment: Vec<(String, String)>,
    line: Vec<String>,
}

/// Writes the files of a case into a folder that has a text.
fn make(folder: &Path, models: &[Map<String, Value>], random: &mut Random) -> Case {
    let mut model = random.of(models).clone();
    for _ in 0..random.below(4) {
        mutate(&mut model, random);
    }
    fs::write(folder.join("model.json"), Value::Object(model).to_string()).unwrap();
    let mut table = json!({
        "output_dir": "run", "seq_length": 8, "max_steps": 2, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4, "model": {"config": "model.json"}, "data": {"path": "text"},
    });
    let (mut environment, mut line) = (Vec::new(), Vec::new());
    for _ in 0..random.below(7) {
        let Some((name, value)) = setting(random) else {
            continue;
        };
        let text = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        match random.below(4) {
            0 => environment.push((
                format!("MERAK_{}", name.to_uppercase().replace('.', "__")),
                text,
            )),
            1 => line.extend([format!("--{name}"), text]),
            _ => match name.split_once('.') {
                Some((section, inner))
                    if table[section].is_object() || table[section].is_null() =>
                {
                    table[section][inner] = value;
                }
                _ => table[name] = value,
            },
        }
    }
    if random.one_in(8) {
        mutate(table.as_object_mut().unwrap(), random);
    }
    if random.one_in(20) {
        line.push(format!("--{}", words(random)));
    }
    line.extend(["--cost_model", "counted"].map(String::from));
    // JSON is YAML as well.
    let file = folder.join(random.of(&["merak.json", "merak.yaml"]));
    let mut text = table.to_string();
    if random.one_in(15) {
        let at = random.below(text.len());
        text.truncate(
            (0..=at)
                .rev()
                .find(|&at| text.is_char_boundary(at))
                .unwrap_or(0),
        );
    }
    fs::write(&file, text).unwrap();
    Case {
        file,
        environment,
        line,
    }
}

/// A key and a value for it; `None` for keys that would read or write outside the folder of the
/// test.
fn setting(random: &mut Random) -> Option<(&'static str, Value)> {
    let known: Vec<_> = keys().collect();
    let key = *random.of(&known);
    let is_outside = matches!(
        key.name,
        "cost_model" | "resume_from_checkpoint" | "lora_config"
    );
    (!is_outside).then(|| (key.name, like(&(key.default)(), random)))
}

/// Does the work of `merak train --dry-run` and returns its text.
fn dry_run(case: &Case) -> Result<String> {
    let config = Config::load(Some(&case.file), case.environment.clone(), &case.line)?;
    config.explain(Some(80));
    let prepared = Prepared::to_train(&config, true, &World::of_threads())?;
    let text = prepared.describe()?;
    MerakTrainer::check_checkpoint(&prepared.plan, &prepared.args, &prepared.parts())?;
    Ok(text)
}

/// The fault in the outcome of a case, if there is one.
fn fault(outcome: std::thread::Result<Result<String>>, took: Duration) -> Option<String> {
    let message = match outcome {
        Err(_) => return Some("it panicked".to_owned()),
        Ok(Ok(text)) if text.contains(|c: char| c.is_control() && c != '\n') => {
            return Some(format!("its plan has control characters: {text:?}"));
        }
        Ok(Ok(_)) => String::new(),
        Ok(Err(error)) if !error.is_user_error() => {
            return Some(format!("it is no mistake of a user: {}", chain(&error)));
        }
        Ok(Err(error)) => chain(&error),
    };
    if message.contains(char::is_control) || message.len() > LONGEST {
        return Some(format!("{} bytes: {message:?}", message.len()));
    }
    (took > SLOWEST).then(|| format!("it took {took:?}: {message}"))
}

fn number(name: &str, default: u64) -> u64 {
    let text = std::env::var_os(name).and_then(|text| text.into_string().ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn run_cases(seed: u64, cases: u64) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("text")).unwrap();
    let text = "every rank waits for its peer and none for ever ".repeat(40);
    fs::write(folder.path().join("text/a.txt"), text).unwrap();
    let models = models();
    let mut faults = Vec::new();
    let mut planned = 0;
    for case in 0..cases {
        let mut random = Random(seed.wrapping_add(case).wrapping_mul(0x2545_f491_4f6c_dd1d));
        let made = make(folder.path(), &models, &mut random);
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| dry_run(&made)));
        planned += u64::from(matches!(outcome, Ok(Ok(_))));
        if let Some(fault) = fault(outcome, start.elapsed()) {
            let config = fs::read_to_string(&made.file).unwrap();
            let model = fs::read_to_string(folder.path().join("model.json")).unwrap();
            let cut = |text: &str| text.chars().take(1500).collect::<String>();
            faults.push(format!(
                "seed {seed}, case {case}: {fault}\n{}\n{}\n{:?} {:?}",
                cut(&config),
                cut(&model),
                cut(&format!("{:?}", made.environment)),
                cut(&made.line.join(" "))
            ));
        }
    }
    // Most of the code below the checks runs only for cases that make a plan.
    assert!(
        planned * 20 > cases,
        "only {planned} of {cases} made a plan"
    );
    faults
}

#[test]
fn some_hundred_made_up_configurations_end_in_a_plan_or_in_one_message() {
    let faults = run_cases(7, 150);
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}

#[test]
#[ignore = "takes minutes: FUZZ_CASES and FUZZ_SEED say how many and which"]
fn fuzz_of_configurations() {
    let (seed, cases) = (number("FUZZ_SEED", 1), number("FUZZ_CASES", CASES));
    let faults = run_cases(seed, cases);
    assert!(
        faults.is_empty(),
        "{} faults\n{}",
        faults.len(),
        faults.join("\n\n")
    );
}
