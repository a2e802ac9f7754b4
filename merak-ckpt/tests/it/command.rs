//! The `merak-ckpt` command: what it prints and its exit status.

use crate::support::{save, topology};
use crate::terminal;
use merak_ckpt::{DType, Header, Kind, Layout, Piece, ShardKind, Store};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Exit status, standard output and standard error, without the temporary folder's name.
fn run(folder: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_merak-ckpt"))
        .current_dir(folder)
        .args(arguments)
        .output()
        .expect("the command starts");
    let text = |bytes| String::from_utf8(bytes).expect("it prints text");
    (
        output.status.code().expect("it ends by itself"),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn inspect_prints_a_table_and_json() {
    let folder = tempfile::tempdir().unwrap();
    save(&Store::in_output_dir(folder.path()), 3, topology(1, 2, 1)).unwrap();
    let (status, table, errors) = run(folder.path(), &["inspect", "."]);
    assert_eq!((status, errors.as_str()), (0, ""));
    let head: Vec<_> = table.lines().take(12).collect();
    insta::assert_snapshot!(head.join("\n"), @r"
    checkpoint  ./checkpoints/step-00000003
    step        3
    written by  dp=1 tp=2 pp=1 sp=1 zero_stage=0
    files       7, 10.2 KiB
    parameter                    8 tensors            367 elements  1.43 KiB
    adamw.exp_avg                8 tensors            367 elements  1.43 KiB
    adamw.exp_avg_sq             8 tensors            367 elements  1.43 KiB

    kind              name                    type  shape        slices     size
    parameter         empty                   f32   [0, 3]            0      0 B
    parameter         h.0.attn.c_attn.bias    f32   [24]              6     96 B
    parameter         h.0.attn.c_attn.weight  f32   [6, 24]           6    576 B
    ");
    let (status, json, _) = run(folder.path(), &["inspect", ".", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (status, &json["step"], &json["topology"]["tp"]),
        (0, &3.into(), &2.into())
    );
    assert_eq!(
        json["kinds"]["parameter"]["elements"],
        48 + 144 + 24 + 48 + 96 + 6 + 1
    );
    assert_eq!(json["tensors"].as_array().unwrap().len(), 24);
}

#[test]
fn an_export_of_averages_says_where_there_are_none() {
    let folder = tempfile::tempdir().unwrap();
    save(&Store::in_output_dir(folder.path()), 1, topology(1, 1, 1)).unwrap();
    let (status, _, errors) = run(folder.path(), &["export-hf", ".", "out", "--ema"]);
    assert_eq!(status, 2, "{errors}");
    let expected = "it has no averages of its weights: its run kept none";
    assert!(errors.contains(expected), "{errors}");
    assert!(!folder.path().join("out").exists());
}

#[test]
fn verify_names_what_is_damaged_and_a_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::in_output_dir(folder.path());
    save(&store, 1, topology(1, 1, 1)).unwrap();
    let path = save(&store, 2, topology(1, 1, 1)).unwrap();
    let (status, text, _) = run(folder.path(), &["verify", "."]);
    assert_eq!(status, 0, "{text}");
    let file = path.join("optim-00000.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    let (status, text, _) = run(folder.path(), &["verify", "."]);
    assert_eq!(status, 2);
    insta::assert_snapshot!(text, @"
    ./checkpoints/step-00000002: damaged
      optim-00000.safetensors: checksum 2a051b43eeabf745, expected d19aedbc675f0d62
      optim-00000.safetensors, tensor `wte.weight`: checksum 3cd8d3572df804f3, expected 6a96231cc156e991
    the newest complete older one is ./checkpoints/step-00000001
    ");
}

#[test]
fn a_checkpoint_is_whole_beside_its_base_and_refused_with_the_way_out_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::in_output_dir(folder.path().join("run"));
    // A base is an ordinary checkpoint except for its name; this one has all tensors.
    let saved = save(&store, 5, topology(1, 2, 1)).unwrap();
    fs::rename(saved, store.folder().join("base-00001")).unwrap();
    let (base, _) = store.base(1).unwrap();
    let draft = store.begin(5).unwrap().with_base(Some(base));
    let step = draft.commit(Vec::new(), Header::default(), &[]).unwrap();

    let step_name = "run/checkpoints/step-00000005";
    for whole in ["run", step_name, "run/checkpoints/base-00001"] {
        let (status, text, errors) = run(folder.path(), &["verify", whole]);
        assert_eq!(status, 0, "{text}{errors}");
    }
    let (_, text, _) = run(folder.path(), &["inspect", "run"]);
    assert!(text.contains("\nbase        ../base-00001\n"), "{text}");
    let (_, json, _) = run(folder.path(), &["inspect", "run", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["base"]["folder"], "base-00001");

    let degrees = ["--dp", "1", "--tp", "1", "--pp", "1"];
    let reshard = |from, to| [&["reshard", from, to][..], &degrees].concat();
    let (status, _, errors) = run(folder.path(), &reshard("run", "alone"));
    assert_eq!(status, 0, "{errors}");
    let (status, text, _) = run(folder.path(), &["diff", "run", "alone"]);
    assert_eq!(status, 0, "{text}");
    let alone = folder.path().join("alone/checkpoints");
    assert!(!alone.join("base-00001").exists());

    let copy = folder.path().join("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(step).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let (status, _, expected) = run(folder.path(), &["verify", "copy"]);
    assert_eq!(status, 2);
    insta::assert_snapshot!(expected, @"merak-ckpt: checkpoint copy is damaged: ../base-00001/manifest.json: the parameters that the checkpoint does not train lay there, and the folder is gone: put it back beside the checkpoint, or take what `merak-ckpt reshard` writes where both are; there is no complete older one");
    let others = [
        vec!["inspect", "copy"],
        vec!["diff", "copy", "alone"],
        vec!["export-hf", "copy", "hf"],
        reshard("copy", "again"),
    ];
    for arguments in others {
        let (status, _, errors) = run(folder.path(), &arguments);
        assert_eq!((status, &errors), (2, &expected), "{arguments:?}");
    }
    // The checkpoint that was resharded beside the base needs no base.
    let (status, _, errors) = run(folder.path(), &reshard("alone", "again"));
    assert_eq!(status, 0, "{errors}");
}

#[test]
fn log_lines_and_errors_are_folded_on_a_terminal_and_whole_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/hf/gpt2-safetensors");
    let (status, _, _) = run(
        folder.path(),
        &["import-hf", golden.to_str().unwrap(), "run"],
    );
    assert_eq!(status, 0);
    let reshard = |to| vec!["reshard", "run", to, "--tp", "3", "--pp", "64"];
    let lone = || {
        vec![
            "export-hf",
            "run",
            "run/checkpoints/step-00000000/model-00000.safetensors",
        ]
    };
    for (arguments, again) in [(reshard("a"), reshard("b")), (lone(), lone())] {
        let (status, output, whole) = run(folder.path(), &arguments);
        assert!(whole.lines().any(|line| line.len() > 80), "{whole}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_merak-ckpt"));
        command.current_dir(folder.path()).args(again);
        let (ended, shown) = terminal::shown(command, 80, true);
        assert_eq!(ended.code(), Some(status));
        // Colours take no columns.
        let shown: Vec<&str> = shown.split('\u{1b}').collect();
        let shown: String = shown
            .iter()
            .enumerate()
            .map(|(at, part)| {
                if at == 0 {
                    part
                } else {
                    part.split_once('m').unwrap().1
                }
            })
            .collect();
        assert_eq!(shown.lines().find(|line| line.chars().count() > 80), None);
        assert!(shown.contains(&format!("\n{:10}", "")), "{shown}");
        let words = |text: &str| text.split_whitespace().count();
        assert_eq!(words(&shown), words(&whole) + words(&output));
    }
}

#[test]
fn an_import_says_which_weights_are_nan() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["a", "b", "c", "d"];
    let weights = names.map(|name| (name, &[2, 3][..], f32::NAN));
    let weights = [&weights[..], &[("e", &[4], 1.0)]].concat();
    let source = crate::hf::filled(&serde_json::json!({"model_type": "grid"}), &weights);
    let source = source.path().to_str().unwrap();
    for dtype in ["f32", "bf16"] {
        let arguments = ["import-hf", source, dtype, "--dtype", dtype];
        let (status, _, errors) = run(folder.path(), &arguments);
        assert_eq!(status, 0, "{errors}");
        let expected = "weights are NaN: 1 in a, 1 in b, 1 in c, .. tensors=4\n";
        assert!(errors.ends_with(expected), "{errors}");
    }
}

/// Saves step 9 with two vectors of these values, `w` and another.
fn save_vectors(store: &Store, values: &[f32], other: &str) {
    let draft = store.begin(9).expect("it begins");
    let layout = Layout::whole(&[values.len()]);
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let piece = |name| Piece::parameter(name, DType::F32, &layout);
    let pieces = [(piece("w"), bytes.as_slice()), (piece(other), &bytes)];
    let shard = draft.write_shard(ShardKind::Model, 0, &pieces);
    let shards = vec![shard.expect("it is written")];
    let committed = draft.commit(shards, Header::default(), &[]);
    committed.expect("it is whole");
}

#[test]
fn diff_begins_with_a_summary_and_compares_values_whatever_the_topology() {
    let folder = tempfile::tempdir().unwrap();
    let stores = ["a", "b", "c"].map(|name| Store::in_output_dir(folder.path().join(name)));
    save(&stores[0], 1, topology(1, 1, 1)).unwrap();
    save(&stores[1], 1, topology(2, 2, 2)).unwrap();
    let (status, text, _) = run(folder.path(), &["diff", "a", "b"]);
    assert_eq!(
        (status, text.as_str()),
        (
            0,
            "24 tensors equal, 0 different, 0 only in A, 0 only in B\n"
        )
    );
    save_vectors(&stores[0], &[1.0, 2.0, 3.0], "old");
    save_vectors(&stores[1], &[1.0, 2.5, 3.0], "new");
    save_vectors(&stores[2], &[1.0], "old");
    let (status, text, _) = run(folder.path(), &["diff", "a", "b"]);
    assert_eq!(status, 1);
    insta::assert_snapshot!(text, @"
    0 tensors equal, 1 different, 1 only in A, 1 only in B
    largest difference 5.000e-1 in parameter `w` at [1]
    A  a/checkpoints/step-00000009
    B  b/checkpoints/step-00000009

    kind       name  difference
    parameter  new   only in B
    parameter  old   only in A
    parameter  w     1 of 3 elements, at most 5.000e-1 absolute, 2.000e-1 relative
    ");
    let (status, json, _) = run(folder.path(), &["diff", "a", "b", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (status, &json["summary"]),
        (
            1,
            &serde_json::json!({
                "equal": 0,
                "different": 1,
                "only_in_first": 1,
                "only_in_second": 1,
                "largest": {"kind": "parameter", "name": "w", "index": [1], "absolute": 0.5},
            })
        )
    );
    assert_eq!(json["tensors"][2]["beyond"], 1);
    let (_, text, _) = run(
        folder.path(),
        &["diff", "a", "b", "--rtol", "0.1", "--atol", "0.25"],
    );
    assert!(
        text.starts_with("1 tensors equal, 0 different, 1 only in A, 1 only in B\nA  a/"),
        "{text}"
    );
    let (_, text, _) = run(folder.path(), &["diff", "a", "c"]);
    assert!(
        text.contains("parameter  w     shape [3] and [1]\n"),
        "{text}"
    );
}

#[test]
fn reshard_prints_where_the_new_checkpoint_is() {
    let folder = tempfile::tempdir().unwrap();
    save(&Store::in_output_dir(folder.path()), 3, topology(1, 2, 1)).unwrap();
    let arguments = "reshard . new --dp 2 --tp 2 --pp 2 --zero 1 --max-memory 8MiB";
    let arguments: Vec<_> = arguments.split(' ').collect();
    let (status, text, errors) = run(folder.path(), &arguments);
    assert_eq!((status, errors.as_str()), (0, ""));
    assert_eq!(text, "new/checkpoints/step-00000003\n");
    let (status, text, _) = run(folder.path(), &["diff", ".", "new"]);
    assert_eq!(
        (status, text.as_str()),
        (
            0,
            "24 tensors equal, 0 different, 0 only in A, 0 only in B\n"
        )
    );
    let (status, text, errors) = run(folder.path(), &arguments);
    assert_eq!((status, text.as_str()), (2, ""));
    insta::assert_snapshot!(errors, @"merak-ckpt: new/checkpoints/step-00000003 exists already: name another destination, or remove it");
}

#[test]
fn hugging_face_folders_come_in_and_go_out() {
    let folder = tempfile::tempdir().unwrap();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/hf/gpt2-zip");
    let arguments = ["import-hf", golden, "run", "--tp", "2", "--pp", "2"];
    let (status, text, errors) = run(folder.path(), &arguments);
    assert_eq!((status, errors.as_str()), (0, ""));
    assert_eq!(text, "run/checkpoints/step-00000000\n");
    let export = "export-hf run out --dtype bf16 --max-shard-size 1KB";
    let (status, text, errors) = run(folder.path(), &export.split(' ').collect::<Vec<_>>());
    assert_eq!((status, text.as_str(), errors.as_str()), (0, "out\n", ""));
    let config = fs::read_to_string(folder.path().join("out/config.json")).unwrap();
    assert!(config.contains("\"dtype\": \"bfloat16\""), "{config}");
    let evil = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/hf/evil");
    let (status, _, errors) = run(folder.path(), &["import-hf", evil, "no"]);
    assert_eq!(status, 2);
    assert!(errors.contains("it asks for `posix.system`"), "{errors}");
}

#[test]
fn verify_goes_on_after_a_missing_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(&Store::in_output_dir(folder.path()), 1, topology(1, 2, 1)).unwrap();
    fs::remove_file(path.join("model-00000.safetensors")).unwrap();
    fs::write(path.join("config.json"), "").unwrap();
    fs::write(path.join("optim-00001.safetensors"), "short").unwrap();
    let (status, text, _) = run(folder.path(), &["verify", "."]);
    assert_eq!(status, 2);
    insta::assert_snapshot!(text, @"
    ./checkpoints/step-00000001: damaged
      config.json: the file has 0 bytes, expected 14
      model-00000.safetensors: the file is missing
      optim-00001.safetensors: the file has 5 bytes, expected 1680
    there is no complete older one
    ");
}

#[test]
fn what_is_no_regular_file_is_called_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(&Store::in_output_dir(folder.path()), 1, topology(1, 2, 1)).unwrap();
    let pipe = |at: &Path| {
        let made = Command::new("mkfifo").arg(at).status();
        assert!(made.unwrap().success());
    };
    fs::remove_file(path.join("model-00000.safetensors")).unwrap();
    pipe(&path.join("model-00000.safetensors"));
    fs::remove_file(path.join("config.json")).unwrap();
    fs::create_dir(path.join("config.json")).unwrap();
    let (status, text, _) = run(folder.path(), &["verify", "."]);
    assert_eq!(status, 2);
    let mut messages = vec![text];
    fs::remove_file(path.join("manifest.json")).unwrap();
    pipe(&path.join("manifest.json"));
    pipe(&folder.path().join("pipe"));
    for (command, path) in [
        ("verify", "."),
        ("inspect", "."),
        ("inspect", "pipe"),
        ("verify", "/dev/null"),
    ] {
        let (status, _, errors) = run(folder.path(), &[command, path]);
        assert_eq!(status, 2);
        messages.push(errors);
    }
    insta::assert_snapshot!(messages.concat(), @"
    ./checkpoints/step-00000001: damaged
      config.json: it is no regular file
      model-00000.safetensors: it is no regular file
    there is no complete older one
    merak-ckpt: checkpoint ./checkpoints/step-00000001 is damaged: manifest.json: it is no regular file; there is no complete older one
    merak-ckpt: checkpoint ./checkpoints/step-00000001 is damaged: manifest.json: it is no regular file; there is no complete older one
    merak-ckpt: cannot read pipe: it is neither a folder nor a regular file
    merak-ckpt: cannot read /dev/null: it is neither a folder nor a regular file
    ");
}

#[test]
fn output_that_is_lost_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    save(&Store::in_output_dir(folder.path()), 1, topology(1, 1, 1)).unwrap();
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_merak-ckpt"))
        .current_dir(folder.path())
        .args(["inspect", "--json", "."])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        errors.starts_with("merak-ckpt: cannot write the output: "),
        "{errors}"
    );
}

#[test]
fn warnings_are_shown_unless_they_are_not_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("hf");
    fs::create_dir(&source).unwrap();
    let golden = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/goldens/hf/gpt2-safetensors"
    );
    let name = "model.safetensors";
    fs::copy(Path::new(golden).join(name), source.join(name)).unwrap();
    fs::write(source.join("config.json"), r#"{"model_type": "novel"}"#).unwrap();
    let (status, _, errors) = run(folder.path(), &["import-hf", "hf", "a"]);
    assert_eq!(status, 0, "{errors}");
    assert!(errors.contains("not cut over tp"), "{errors}");
    let mut config: serde_json::Value =
        serde_json::from_slice(&fs::read(Path::new(golden).join("config.json")).unwrap()).unwrap();
    config["n_layer"] = 1.into();
    fs::write(source.join("config.json"), config.to_string()).unwrap();
    let (status, _, errors) = run(folder.path(), &["import-hf", "hf", "short"]);
    let first = r#"first="transformer.h.1.attn.c_attn.bias" num_tensors=12"#;
    assert!(status == 0 && errors.contains(first), "{errors}");
    let (status, _, errors) = run(folder.path(), &["--log", "error", "import-hf", "hf", "b"]);
    assert_eq!((status, errors.as_str()), (0, ""));
    let (status, _, errors) = run(folder.path(), &["--log", "=?", "import-hf", "hf", "c"]);
    assert_eq!(status, 2, "{errors}");
    let (status, script, _) = run(folder.path(), &["completions", "bash"]);
    assert!(status == 0 && script.contains("extract-lora"));
}

#[test]
fn degrees_that_no_run_has_are_written_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let [gpt2, llama, config] = ["hf/gpt2-safetensors", "dcp/llama", "dcp/llama.json"];
    let place = |name: &str| golden.join(name).display().to_string();
    let (gpt2, llama, config) = (place(gpt2), place(llama), place(config));
    let dcp = [
        "import-dcp",
        &llama,
        "c",
        "--config",
        &config,
        "--prefix",
        "app.net",
    ];
    let mut told = Vec::new();
    let mut warned = |arguments: &[&str], degrees: &[&str]| {
        let arguments = [arguments, degrees].concat();
        let (status, _, errors) = run(folder.path(), &arguments);
        assert_eq!(status, 0, "{errors}");
        let lines = errors
            .lines()
            .filter_map(|line| line.split_once("degrees: "));
        let lines = lines.map(|(_, line)| format!("{}: {line}", arguments[0]));
        told.extend(lines);
    };
    let hf = ["import-hf", &gpt2];
    let tp = |tp| ["--dp", "1", "--tp", tp, "--pp", "1"];
    warned(&[&hf[..], &["a"]].concat(), &tp("2"));
    warned(&["reshard", "a", "b"], &tp("3"));
    warned(
        &["reshard", "a", "d"],
        &["--dp", "1", "--tp", "1", "--pp", "64"],
    );
    warned(&[&hf[..], &["e"]].concat(), &tp("4"));
    warned(&dcp, &tp("2"));
    insta::assert_snapshot!(told.join("\n"), @r#"
    reshard: no run has this tensor-parallel degree; a run of any other reads the checkpoint tp=3 reason="it does not divide 2 attention heads" possible="1, 2"
    reshard: pipeline stages without tensors get no files: tensors are dealt out whole, evenly by their bytes; a run of any degree reads the checkpoint pp=64 num_stages=43 first=1
    import-hf: no run has this tensor-parallel degree; a run of any other reads the checkpoint tp=4 reason="it does not divide 2 attention heads" possible="1, 2"
    import-dcp: no run has this tensor-parallel degree; a run of any other reads the checkpoint tp=2 reason="it does not divide 3 attention heads" possible="1, 3"
    "#);
}

#[test]
fn what_an_import_does_without_is_said_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/dcp/tensors");
    fs::write(folder.path().join("grid.json"), r#"{"model_type": "grid"}"#).unwrap();
    let source = source.to_str().expect("a path");
    let arguments = [
        "import-dcp",
        source,
        "out",
        "--config",
        "grid.json",
        "--prefix",
        "model.",
    ];
    let (status, _, errors) = run(folder.path(), &arguments);
    assert_eq!(status, 0, "{errors}");
    let lines: Vec<_> = errors
        .lines()
        .filter_map(|line| line.split_once("dcp: "))
        .collect();
    let lines: Vec<_> = lines.into_iter().map(|(_, line)| line).collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    a field of a parameter group is left out group="1" name="weight_decay" reason="asks for `numpy._core.multiarray.scalar`, which no table of tensors needs (byte 2 of the pickle)"
    state that no optimizer of Merak keeps is left out: a run that goes on does without it num_items=4 first="optim.state.rows.weight.max_exp_avg_sq" of="AMSGrad"
    "#);
}

#[test]
fn looking_at_what_others_wrote_says_what_it_is_and_the_way_in() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let mut messages = Vec::new();
    for path in [
        "hf/gpt2-safetensors",
        "hf/gpt2-safetensors/config.json",
        "hf/gpt2-old/pytorch_model.bin",
        "dcp/grid",
        "dcp/parts",
        "lora/gpt2",
    ] {
        let (status, output, errors) = run(&folder, &["inspect", path]);
        assert_eq!((status, output.as_str()), (2, ""), "{errors}");
        assert_eq!(
            run(&folder, &["verify", path]),
            (status, output.clone(), errors.clone())
        );
        assert_eq!(
            run(&folder, &["diff", path, path]),
            (status, output, errors.clone())
        );
        messages.push(errors);
    }
    insta::assert_snapshot!(messages.concat(), @"
    merak-ckpt: cannot read hf/gpt2-safetensors: it is a Hugging Face folder and no checkpoint: `merak-ckpt import-hf DIR DST` makes one of it
    merak-ckpt: cannot read hf/gpt2-safetensors/config.json: it is a file of a Hugging Face folder: name the folder, of which `merak-ckpt import-hf DIR DST` makes a checkpoint
    merak-ckpt: cannot read hf/gpt2-old/pytorch_model.bin: it is a file of a Hugging Face folder: name the folder, of which `merak-ckpt import-hf DIR DST` makes a checkpoint
    merak-ckpt: cannot read dcp/grid: it is a folder of torch.distributed.checkpoint: import it with `merak-ckpt import-dcp DIR DST --config config.json`
    merak-ckpt: cannot read dcp/parts: it is a folder of torch.distributed.checkpoint in its safetensors format, each file with a part of each tensor: save again with HuggingFaceStorageWriter(HF_DIR, save_distributed=True, enable_consolidation=True), or put the parts together with `consolidate_safetensors_files(DIR, HF_DIR, {name: 1 for name in model.state_dict()})` of torch.distributed.checkpoint._consolidate_hf_safetensors, put the model's config.json into HF_DIR, then use that
    merak-ckpt: cannot read lora/gpt2: it is an adapter of PEFT: fold it into its base model with `merak-ckpt merge-lora BASE DIR HF_DIR`
    ");
}

#[test]
fn a_destination_that_cannot_be_is_named() {
    let folder = tempfile::tempdir().unwrap();
    save(&Store::in_output_dir(folder.path()), 1, topology(1, 1, 1)).unwrap();
    fs::create_dir(folder.path().join("taken")).unwrap();
    fs::write(folder.path().join("taken/checkpoints"), "").unwrap();
    let inner = "checkpoints/step-00000001/inner";
    let mut messages = String::new();
    for arguments in [
        ["reshard", ".", inner],
        ["export-hf", ".", inner],
        ["reshard", ".", "taken"],
    ] {
        let (status, output, errors) = run(folder.path(), &arguments);
        assert_eq!((status, output.as_str()), (2, ""), "{errors}");
        messages += &errors;
    }
    insta::assert_snapshot!(messages, @"
    merak-ckpt: invalid destination `checkpoints/step-00000001/inner`: expected a folder outside the checkpoint that is read
    merak-ckpt: invalid destination `checkpoints/step-00000001/inner`: expected a folder outside the checkpoint that is read
    merak-ckpt: cannot create taken/checkpoints: File exists (os error 17)
    ");
    let (status, _, errors) = run(folder.path(), &["diff", ".", ".", "--rtol", "-1"]);
    assert_eq!(status, 2);
    assert!(errors.contains("expected 0 or more, found -1"), "{errors}");
}

#[test]
fn a_destination_keeps_its_checkpoints_and_which_of_them_is_the_latest() {
    let folder = tempfile::tempdir().unwrap();
    let golden = |name: &str| format!("{}/tests/goldens/{name}", env!("CARGO_MANIFEST_DIR"));
    let store = Store::in_output_dir(folder.path().join("run"));
    for step in [1, 3] {
        save(&store, step, topology(1, 1, 1)).unwrap();
    }
    let (hf, dcp, config) = (
        golden("hf/gpt2-safetensors"),
        golden("dcp/gpt2"),
        golden("dcp/gpt2.json"),
    );
    assert_eq!(run(folder.path(), &["import-hf", &hf, "other"]).0, 0);
    let dcp = [
        "import-dcp",
        &dcp,
        "--config",
        &config,
        "--prefix",
        "model.",
    ];
    let taken = ["run", "run/checkpoints"].into_iter().flat_map(|to| {
        [
            vec!["import-hf", &hf, to],
            [&dcp[..], &[to]].concat(),
            vec!["reshard", "other", to],
        ]
    });
    let mut messages = Vec::new();
    for arguments in taken {
        let arguments = [&["--log", "error"], &arguments[..]].concat();
        let (status, output, errors) = run(folder.path(), &arguments);
        assert_eq!((status, output.as_str()), (2, ""), "{errors}");
        messages.push(errors);
        assert_eq!(store.latest().unwrap(), Some(store.path_of(3)));
        let expected = ["latest", "step-00000001", "step-00000003"];
        assert_eq!(store.entries().unwrap().0, expected);
    }
    assert_eq!(messages[..3], messages[3..]);
    assert_eq!(messages[0], messages[1]);
    insta::assert_snapshot!(messages[1..3].concat(), @"
    merak-ckpt: run/checkpoints has checkpoints already, the last of them step-00000003, and `latest` would name the new one instead: expected a destination without any; name another, or move these away
    merak-ckpt: run/checkpoints has checkpoints already, the last of them step-00000003, and `latest` would name the new one instead: expected a destination without any, or with earlier ones of the same run that `merak-ckpt reshard` wrote; name another, or move these away
    ");
}

#[test]
fn later_checkpoints_of_a_run_are_resharded_beside_its_earlier_ones() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::in_output_dir(folder.path().join("run"));
    for step in [1, 2, 3] {
        save(&store, step, topology(1, 1, 1)).unwrap();
    }
    let reshard = |step: u64, to: &str| {
        let path = store.path_of(step).display().to_string();
        run(folder.path(), &["reshard", &path, to, "--tp", "2"])
    };
    let to = Store::in_output_dir(folder.path().join("to"));
    for step in [1, 3] {
        assert_eq!(reshard(step, "to").0, 0);
        assert_eq!(to.latest().unwrap(), Some(to.path_of(step)));
    }
    // An earlier one would be the latest in place of a later one.
    let (status, _, errors) = reshard(2, "to");
    assert_eq!(status, 2);
    assert!(
        errors.contains("the last of them step-00000003"),
        "{errors}"
    );
    assert_eq!(to.latest().unwrap(), Some(to.path_of(3)));
    // A run that goes on there has checkpoints of its own.
    fs::remove_dir_all(to.path_of(3)).unwrap();
    fs::write(folder.path().join("to/config.resolved.toml"), "").unwrap();
    let (status, _, errors) = reshard(2, "to");
    assert_eq!(status, 2);
    assert!(
        errors.contains("the last of them step-00000001"),
        "{errors}"
    );
}

#[test]
fn mistakes_end_with_status_two_and_one_message() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in [
        &["verify", "nowhere"][..],
        &["inspect", "."],
        &["diff", ".", ".", "--rtol", "-1"],
        &["frobnicate"],
        &[],
    ] {
        let (status, output, errors) = run(folder.path(), arguments);
        assert_eq!((status, output.as_str()), (2, ""), "{arguments:?}");
        assert!(
            !errors.is_empty() && !errors.contains("panicked"),
            "{errors}"
        );
    }
    insta::assert_snapshot!(run(folder.path(), &["verify", "nowhere"]).2, @"merak-ckpt: no checkpoint at nowhere: the path does not exist");
    fs::create_dir(folder.path().join("quickstart")).unwrap();
    let lost = ["verify quikstart", "import-hf quikstart/hf to"].map(|line| {
        let words: Vec<_> = line.split(' ').collect();
        run(folder.path(), &words).2
    });
    insta::assert_snapshot!(lost.concat(), @r#"
    merak-ckpt: no checkpoint at quikstart: the path does not exist; did you mean "quickstart"?
    merak-ckpt: cannot read quikstart/hf: the folder does not exist; there is no folder quikstart; did you mean "quickstart"?
    "#);
}

#[test]
fn options_are_taken_with_dashes_and_with_underscores_and_names_are_harmless() {
    let folder = tempfile::tempdir().unwrap();
    save(&Store::in_output_dir(folder.path()), 3, topology(1, 2, 1)).unwrap();
    for (option, to) in [("--max-memory", "a"), ("--max_memory", "b")] {
        let (status, _, errors) = run(folder.path(), &["reshard", ".", to, option, "64MiB"]);
        assert_eq!((status, errors.as_str()), (0, ""));
    }
    let hostile = "no\u{1b}[31m\u{7}where";
    for line in [["inspect", hostile], ["verify", hostile], [hostile, "."]] {
        let (status, _, errors) = run(folder.path(), &line);
        assert_eq!(status, 2);
        assert!(
            !errors.contains('\u{1b}') && !errors.contains('\u{7}'),
            "{errors:?}"
        );
    }
    let (_, _, errors) = run(folder.path(), &["inspect", &"x".repeat(20_000)]);
    assert!(errors.len() < 2048, "{errors}");
}

#[test]
fn a_memory_limit_below_the_least_is_refused_as_such_whatever_is_imported() {
    let folder = tempfile::tempdir().unwrap();
    let golden = |name: &str| {
        let goldens = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/");
        format!("{goldens}{name}")
    };
    let (dcp, config, hf) = (
        golden("dcp/gpt2"),
        golden("dcp/gpt2.json"),
        golden("hf/gpt2-zip"),
    );
    let dcp = ["import-dcp", &dcp, "to", "--config", &config];
    let hf = ["import-hf", &hf, "to"];
    for arguments in [&dcp[..], &hf] {
        let arguments = [arguments, &["--max-memory", "1"]].concat();
        let (status, _, errors) = run(folder.path(), &arguments);
        assert_eq!(status, 2, "{errors}");
        assert!(errors.contains("expected 4 MiB or more"), "{errors}");
    }
}

#[test]
fn a_destination_that_is_a_link_to_nowhere_is_called_so() {
    let folder = tempfile::tempdir().unwrap();
    save(
        &Store::in_output_dir(folder.path().join("run")),
        1,
        topology(1, 1, 1),
    )
    .unwrap();
    std::os::unix::fs::symlink("gone", folder.path().join("link")).unwrap();
    for command in ["reshard", "export-hf"] {
        let (status, _, errors) = run(folder.path(), &[command, "run", "link"]);
        assert_eq!(status, 2, "{errors}");
        let expected = "cannot create link: it is a link to gone, where nothing lies";
        assert!(errors.contains(expected), "{errors}");
        assert!(!folder.path().join("gone").exists());
    }
}

#[test]
fn damage_of_a_shared_base_leaves_no_checkpoint_on_it_to_propose() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::in_output_dir(folder.path());
    save(&store, 1, topology(1, 1, 1)).unwrap();
    let layout = Layout::whole(&[4]);
    let piece = |name| Piece::parameter(name, DType::U8, &layout);
    let base = store.begin_base(1, 2).unwrap();
    let shard = base.write_shard(ShardKind::Model, 0, &[(piece("frozen"), &[1; 4])]);
    base.commit(vec![shard.unwrap()], Header::default(), &[])
        .unwrap();
    let (base, _) = store.base(1).unwrap();
    for step in [2, 3, 4] {
        let draft = store.begin(step).unwrap().with_base(Some(base.clone()));
        let shard = draft.write_shard(ShardKind::Model, 0, &[(piece("w"), &[2; 4])]);
        draft
            .commit(vec![shard.unwrap()], Header::default(), &[])
            .unwrap();
    }
    let path = store.folder().join("base-00001/model-00000.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let proposed = "the newest complete older one is ./checkpoints/step-00000001";
    let (status, text, _) = run(folder.path(), &["verify", "."]);
    assert_eq!(status, 2);
    assert!(text.contains(proposed), "{text}");
    let error = merak_ckpt::Checkpoint::open(store.path_of(4)).unwrap();
    let error = error.read_whole(&Kind::Parameter, "frozen").unwrap_err();
    let error = error.to_string();
    assert!(error.ends_with("step-00000001"), "{error}");
}
