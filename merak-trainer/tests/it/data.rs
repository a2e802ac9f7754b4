//! Text sources, corpora and loaders.

use std::{fs, path::Path, sync::Arc};

use insta::assert_snapshot;
use merak_trace::models;
use merak_trainer::{
    Config, DataArguments, DataFormat, Error, MerakArguments, SeqLength, TokenizerSource,
    data::{
        BatchShape, Corpus, CrateSources, DataPosition, DataTokens, Dataset, EvaluationOrder,
        Joined, Loader, ModelInputs, Purpose, Sample, Source, TokenDataset, Tokenizer,
        TrainingOrder,
    },
};
use serde_json::json;
use tempfile::{TempDir, tempdir};

fn folder_with(files: &[(&str, &str)]) -> TempDir {
    let folder = tempdir().expect("a temporary folder");
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a writable folder");
        fs::write(path, text).expect("a writable folder");
    }
    folder
}

fn arguments(path: &Path) -> DataArguments {
    let mut arguments = DataArguments::default();
    arguments.path = Some(path.to_path_buf().into());
    arguments.validation_fraction = 0.0;
    arguments
}

fn text_of(corpus: &Corpus) -> String {
    let bytes = |token: &u32| u8::try_from(*token).map_or('|', char::from);
    let tokens = corpus.train.read(0..corpus.train.len());
    tokens
        .expect("tokens in memory")
        .iter()
        .map(bytes)
        .collect()
}

fn message(result: Result<Corpus, Error>, folder: &Path) -> String {
    let error = result.expect_err("an error");
    assert!(error.is_user_error());
    error
        .to_string()
        .replace(&folder.display().to_string(), "FOLDER")
}

#[test]
fn a_folder_is_read_in_the_order_of_its_paths() {
    let folder = folder_with(&[
        ("b.txt", "bb"),
        ("a/z.txt", "az"),
        ("a/b/c.txt", "abc"),
        (".git/config", "hidden"),
        ("empty.txt", ""),
    ]);
    let corpus = Corpus::load(&arguments(folder.path()), &CrateSources::default()).unwrap();
    assert_eq!(text_of(&corpus), "abc|az|bb|");
    let single = Corpus::load(
        &arguments(&folder.path().join("b.txt")),
        &CrateSources::default(),
    );
    assert_eq!(text_of(&single.unwrap()), "bb|");
}

#[test]
fn the_byte_limit_and_the_validation_part_cut_at_the_end() {
    let folder = folder_with(&[("a.txt", "0123456789"), ("b.txt", "0123456789")]);
    let mut arguments = arguments(folder.path());
    arguments.max_bytes = Some(14);
    arguments.validation_fraction = 0.25;
    let corpus = Corpus::load(&arguments, &CrateSources::default()).unwrap();
    assert_eq!(text_of(&corpus), "0123456789|0");
    assert_eq!(*corpus.validation.read(0..4).unwrap(), [49, 50, 51, 256]);
    assert!(corpus.description.ends_with("2 files, 14 B"));
}

#[test]
fn a_tokenizer_file_gives_its_own_tokens() {
    let folder = folder_with(&[("text/a.txt", "hello")]);
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, Tokenizer::bytes().to_json().unwrap()).unwrap();
    let mut arguments = arguments(&folder.path().join("text"));
    arguments.tokenizer = TokenizerSource::File(path);
    let corpus = Corpus::load(&arguments, &CrateSources::default()).unwrap();
    assert_eq!(text_of(&corpus), "hello|");
}

#[test]
fn missing_or_empty_data_is_one_clear_message() {
    let folder = folder_with(&[("empty/a.txt", ""), ("lock/Cargo.lock", "version = 4\n")]);
    let load = |path: &str| {
        let arguments = arguments(&folder.path().join(path));
        message(
            Corpus::load(&arguments, &CrateSources::default()),
            folder.path(),
        )
    };
    assert_snapshot!(load("none"), @r#"cannot read FOLDER/none, which "data.path" names"#);
    assert_snapshot!(load("empty"), @r#"no text in FOLDER/empty: "data.path" needs a file or folder with text"#);
    let by_default = |crates: CrateSources| {
        message(
            Corpus::load(&DataArguments::default(), &crates),
            folder.path(),
        )
    };
    let search = vec![folder.path().join("lock")];
    let registry = Some(folder.path().join("registry"));
    assert_snapshot!(by_default(CrateSources::default()), @r#"no text to train on, because there is no Cargo.lock: set "data.path" to a file or folder of text"#);
    assert_snapshot!(by_default(CrateSources { registry: None, search: search.clone() }), @r#"no text to train on, because cargo's home folder is not known: set "data.path" to a file or folder of text"#);
    assert_snapshot!(by_default(CrateSources { registry, search: search.clone() }), @r#"no text to train on, because FOLDER/registry cannot be listed: set "data.path" to a file or folder of text"#);
    let registry = Some(folder.path().to_path_buf());
    assert_snapshot!(by_default(CrateSources { registry, search }), @r#"no text to train on, because FOLDER/lock/Cargo.lock: it names no packages: set "data.path" to a file or folder of text"#);
}

const LOCK: &str = r#"
version = 4
[[package]]
name = "zebra"
version = "1.0.0"
source = "registry+https://example.org"
[[package]]
name = "apple"
version = "0.2.0"
source = "registry+https://example.org"
[[package]]
name = "libc"
version = "0.2.0"
source = "registry+https://example.org"
[[package]]
name = "ours"
version = "0.1.0"
[[package]]
name = "elsewhere"
version = "0.1.0"
source = "registry+https://example.org"
"#;

#[test]
fn the_default_text_is_the_sources_of_the_locked_crates() {
    let big = "x".repeat(200 << 10);
    let folder = folder_with(&[
        ("project/Cargo.lock", LOCK),
        ("project/examples/configs/quickstart.toml", ""),
        ("src/index/apple-0.2.0/src/lib.rs", "apple lib"),
        ("src/index/apple-0.2.0/src/a/tables.rs", &big),
        ("src/index/apple-0.2.0/src/a/core.rs", "apple core"),
        ("src/index/apple-0.2.0/src/data.txt", "data"),
        ("src/index/apple-0.2.0/tests/it.rs", "test"),
        ("src/index/apple-0.3.0/src/lib.rs", "another version"),
        ("src/index/libc-0.2.0/src/lib.rs", "bindings"),
        ("src/index/ours-0.1.0/src/lib.rs", "ours"),
        ("src/index/zebra-1.0.0/src/lib.rs", "zebra"),
    ]);
    let crates = CrateSources {
        registry: Some(folder.path().join("src")),
        search: vec![folder.path().join("project/examples/configs")],
    };
    let mut arguments = DataArguments::default();
    arguments.validation_fraction = 0.0;
    let corpus = Corpus::load(&arguments, &crates).unwrap();
    assert_eq!(text_of(&corpus), "apple core|apple lib|zebra|");
    arguments.max_bytes = Some(16);
    assert_eq!(
        text_of(&Corpus::load(&arguments, &crates).unwrap()),
        "apple lib|zebra|"
    );
}

fn numbers(samples: usize) -> Arc<dyn Dataset> {
    let tokens = (0..=u32::try_from(4 * samples).expect("small")).collect();
    Arc::new(TokenDataset::new(tokens, 4, "training").expect("enough tokens"))
}

#[test]
fn workers_change_no_batch() {
    let shape = BatchShape {
        batch: 3,
        microbatches: 2,
        dp: 2,
    };
    let order = TrainingOrder::new(40, shape, 7).unwrap();
    let load = |workers| -> Vec<_> {
        let order = order.clone();
        let requests = Arc::new(move |n| (n < 14).then(|| order.microbatch(n / 2, 1, n % 2)));
        Loader::new(numbers(40), requests, workers)
            .unwrap()
            .map(Result::unwrap)
            .collect()
    };
    let alone = load(0);
    assert_eq!(alone.len(), 14);
    for workers in [1, 2, 3, 20] {
        assert_eq!(load(workers), alone, "{workers} workers");
    }
}

#[test]
fn a_loader_that_is_dropped_early_ends_its_workers() {
    let dataset = numbers(40);
    let order = TrainingOrder::new(
        40,
        BatchShape {
            batch: 1,
            microbatches: 1,
            dp: 1,
        },
        7,
    )
    .unwrap();
    let requests = Arc::new(move |n| Some(order.microbatch(n, 0, 0)));
    let mut loader = Loader::new(Arc::clone(&dataset), requests, 3).unwrap();
    loader.next().unwrap().unwrap();
    drop(loader);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while Arc::strong_count(&dataset) > 1 {
        assert!(
            std::time::Instant::now() < deadline,
            "workers still hold the data set"
        );
        std::thread::yield_now();
    }
}

#[derive(Debug)]
struct Failing;

impl Dataset for Failing {
    fn len(&self) -> usize {
        8
    }

    fn get(&self, index: usize) -> Result<Sample, Error> {
        if index == 5 {
            let source = std::io::Error::other("the disk is gone");
            return Err(Error::Read {
                path: "sample-5".into(),
                source,
            });
        }
        Ok(Sample::new())
    }
}

#[test]
fn a_sample_that_cannot_be_read_fails_its_own_batch() {
    for workers in [0, 2] {
        let order = EvaluationOrder::new(
            8,
            BatchShape {
                batch: 2,
                microbatches: 1,
                dp: 1,
            },
            None,
            false,
        )
        .unwrap();
        let requests =
            Arc::new(move |n| (n < order.iterations()).then(|| order.microbatch(n, 0, 0)));
        let results: Vec<bool> = Loader::new(Arc::new(Failing), requests, workers)
            .unwrap()
            .map(|batch| batch.is_ok())
            .collect();
        assert_eq!(results, [true, true, false, true]);
    }
}

#[test]
fn a_data_position_is_stored_as_plain_numbers() {
    let position = DataPosition {
        epoch: 1,
        samples: 24,
    };
    let text = serde_json::to_string(&position).unwrap();
    assert_eq!(text, r#"{"epoch":1,"samples":24}"#);
    assert_eq!(
        serde_json::from_str::<DataPosition>(&text).unwrap(),
        position
    );
}

/// A folder with a text, a text in Latin-1 and an image.
fn mixed() -> TempDir {
    let folder = folder_with(&[("a.txt", "\u{feff}hello")]);
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes);
    write("b.txt", b"caf\xe9").expect("a writable folder");
    write("c.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR").expect("a writable folder");
    folder
}

#[test]
fn files_that_are_no_text_are_refused_by_name_and_offset_or_passed_over_and_counted() {
    let folder = mixed();
    let mut arguments = arguments(folder.path());
    let load = |arguments: &DataArguments| Corpus::load(arguments, &CrateSources::default());
    assert_snapshot!(message(load(&arguments), folder.path()), @r#"cannot read FOLDER/c.png as text: it is a PNG image (offset 0): leave it out of "data.path", or set "data.skip_binary" to true to pass over such files"#);
    arguments.skip_binary = true;
    let corpus = load(&arguments).unwrap();
    assert!(
        corpus
            .description
            .ends_with("2 files (1 passed over as no text), 9 B"),
        "{}",
        corpus.description
    );
    let bytes = b"hello|caf\xe9|".map(|byte| if byte == b'|' { 256 } else { u32::from(byte) });
    assert_eq!(
        *corpus.train.read(0..bytes.len()).unwrap(),
        bytes,
        "other encodings stay as they are"
    );

    // A tokenizer file reads UTF-8 alone.
    let elsewhere = tempdir().expect("a temporary folder");
    let path = elsewhere.path().join("tokenizer.json");
    let json = Tokenizer::bytes().to_json().unwrap();
    fs::write(
        &path,
        json.replace("\"use_regex\":false", "\"use_regex\":true"),
    )
    .unwrap();
    arguments.tokenizer = TokenizerSource::File(path);
    let corpus = load(&arguments).unwrap();
    assert_eq!(text_of(&corpus), "hello|");
    arguments.skip_binary = false;
    assert_snapshot!(message(load(&arguments), folder.path()), @r#"cannot read FOLDER/b.txt as text: byte 0xe9 in line 1 is no UTF-8 (offset 3): convert it, or set "data.tokenizer" to "bytes", which keeps such bytes as they are, or set "data.skip_binary" to true to pass over such files"#);
    fs::remove_file(folder.path().join("a.txt")).unwrap();
    arguments.skip_binary = true;
    assert_snapshot!(message(load(&arguments), folder.path()), @r#"no text in FOLDER: "data.path" needs a file or folder with text, and all 2 files were passed over as no text"#);
}

/// Samples of data for a model: those of a run on all of them, or on a stream.
fn samples_of(model: &serde_json::Value, data: &DataArguments, packing: bool) -> Arc<dyn Dataset> {
    let mut data = data.clone();
    data.packing = packing;
    samples_by(model, &data, 42)
}

/// Samples to train on that are drawn by a seed, where they are drawn.
fn samples_by(model: &serde_json::Value, data: &DataArguments, seed: u64) -> Arc<dyn Dataset> {
    let model = models::from_config(model).expect("a known family");
    let mut arguments = MerakArguments::default();
    arguments.data = data.clone();
    arguments.data_seed = Some(seed);
    arguments.seq_length = Some(SeqLength::from(8));
    arguments.do_eval = false;
    arguments.max_steps = 1;
    let args = arguments.check().expect("legal arguments");
    let source =
        Source::load(&args.data, &*model, &CrateSources::default()).expect("readable data");
    let lengths = source.lengths(&args, &*model).expect("one length");
    let inputs = ModelInputs::of(&*model, lengths).expect("short sequences");
    let tokens = DataTokens::default();
    let (datasets, _) = source
        .datasets(&inputs, &args, &tokens, Purpose::Training)
        .expect("enough data");
    datasets.train.expect("samples to train on")
}

#[test]
fn a_stream_has_the_samples_of_its_files_in_their_order() {
    let words = |i: usize| format!("{} words about {}", i * i, i % 7);
    let text: String = (0..400).map(|i| words(i) + "\n").collect();
    let lines = |record: &dyn Fn(usize) -> serde_json::Value| -> String {
        (0..200).map(|i| record(i).to_string() + "\n").collect()
    };
    let texts = lines(&|i| json!({ "text": words(i) }));
    let chats =
        lines(&|i| json!({ "prompt": format!("{i}"), "completion": format!(" {}", i % 3) }));
    let classes = lines(&|i| json!({ "text": words(i), "label": i % 2 }));
    let folder = folder_with(&[
        ("text/a", &text),
        ("text/b", &text[500..4000]),
        ("texts.jsonl", &texts),
        ("chats.jsonl", &chats),
        ("classes.jsonl", &classes),
    ]);
    let gpt = json!({ "model_type": "gpt2", "vocab_size": 258, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1 });
    let bert = json!({ "model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 258,
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
        "max_position_embeddings": 8, "num_labels": 2 });
    for (model, name, format, packing) in [
        (&gpt, "text", DataFormat::Text, false),
        (&gpt, "text", DataFormat::Text, true),
        (&gpt, "texts.jsonl", DataFormat::Jsonl, false),
        (&gpt, "chats.jsonl", DataFormat::Jsonl, false),
        (&bert, "classes.jsonl", DataFormat::Jsonl, false),
    ] {
        let mut data = arguments(&folder.path().join(name));
        data.format = format;
        let whole = samples_of(model, &data, packing);
        data.streaming = true;
        data.shuffle_buffer = 1;
        let stream = samples_of(model, &data, packing);
        assert!(stream.is_stream() && !whole.is_stream());
        assert!(whole.len() > 100, "{name}: {}", whole.len());
        for index in 0..2 * whole.len() {
            let (found, expected) = (stream.get(index), whole.get(index % whole.len()));
            assert_eq!(found.unwrap(), expected.unwrap(), "{name}, sample {index}");
        }
    }
}

#[test]
fn samples_by_another_seed_are_those_that_were_made_with_it() {
    let line = |i: usize| format!("{} and {}\n", i * i, i % 7);
    let text: String = (0..300).map(line).collect();
    let folder = folder_with(&[("a", &text), ("b", &text[900..])]);
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    let gpt = json!({ "model_type": "gpt2", "vocab_size": 258, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1 });
    let bert = json!({ "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 258,
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
        "max_position_embeddings": 8 });
    let t5 = json!({ "model_type": "t5", "vocab_size": 270, "d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1,
        "num_heads": 1, "n_positions": 8 });
    let mut mixture = arguments(&a);
    mixture.path = None;
    let parts = json!([{ "path": a, "weight": 3 }, { "path": b, "weight": 1 }]);
    let line = [format!("--data.mixture={parts}")];
    let config = Config::load(None, [], &line).expect("a mixture");
    mixture.mixture.clone_from(&config.arguments().data.mixture);
    let mut spans = arguments(&a);
    spans.mlm_probability = 0.5;
    spans.mean_noise_span_length = 1.0;
    let mut stream = arguments(&a);
    stream.streaming = true;
    let mut in_order = stream.clone();
    in_order.shuffle_buffer = 1;
    for (name, model, data) in [
        ("masks", &bert, &arguments(&a)),
        ("spans", &t5, &spans),
        ("a mixture", &gpt, &mixture),
        ("masks of a mixture", &bert, &mixture),
        ("a stream", &gpt, &stream),
        ("masks of a stream", &bert, &stream),
        ("masks of a stream in order", &bert, &in_order),
    ] {
        let [first, second] = [1, 2].map(|seed| samples_by(model, data, seed));
        let samples = |data: &dyn Dataset| {
            let samples = (0..40).map(|index| data.get_in_epoch(index, 0).expect("a sample"));
            samples.collect::<Vec<_>>()
        };
        let expected = samples(&*second);
        assert!(samples(&*first) != expected, "{name}");
        let joined: Arc<dyn Dataset> = Arc::new(Joined::new([Arc::clone(&first)]).expect("a set"));
        for data in [first, joined] {
            let other = data.reseeded(2).expect("it draws");
            assert!(samples(&*other) == expected, "{name}");
            assert!(other.reseeded(2).is_none(), "{name}");
        }
    }
    let plain = samples_by(&gpt, &arguments(&a), 1);
    assert!(plain.reseeded(2).is_none());
}
