//! Named files that have no end, or whose opening would block: refused by name.

use std::{
    fs::File,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use insta::assert_snapshot;

use super::Workplace;

/// The message of a command that must end with status 2, and soon.
fn refusal(place: &Workplace, line: &str) -> String {
    let mut command = place.command(line);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    let deadline = Instant::now() + Duration::from_secs(30);
    while child.try_wait().expect("it is a child of ours").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("it is a child of ours");
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("it has ended");
    let ended = place.ended(&output);
    assert_eq!(ended.status, Some(2), "merak {line}: {}", ended.stderr);
    ended.stderr.trim_end().to_owned()
}

#[test]
fn a_folder_in_place_of_a_configuration_is_told_with_the_way_on() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let train = |folder: &str| refusal(&place, &format!("train {folder}"));
    assert_snapshot!(train("run"), @"error: the configuration run is a folder: its run has run/config.resolved.toml, and `merak train run/config.resolved.toml --resume latest` goes on with it");
    assert_snapshot!(train("run/checkpoints/step-00000001"), @"error: the configuration run/checkpoints/step-00000001 is a folder: its run has run/config.resolved.toml, and `merak train run/config.resolved.toml --resume run/checkpoints/step-00000001` goes on with it");
    assert_snapshot!(refusal(&place, "config ."), @"error: the configuration . is a folder: name a file, for example ./merak.toml");
    assert_snapshot!(train("text"), @"error: the configuration text is a folder: name a file (.toml, .yaml or .json)");
    place.write("hf/config.json", "{}");
    assert_snapshot!(refusal(&place, "config hf"), @r#"error: the configuration hf is a folder: it is that of a model: name it in a configuration file, as "model.hf_dir" to start from its weights, or as "model.config""#);
    for from in ["latest", "run/checkpoints/step-00000001"] {
        let line = format!("train run/config.resolved.toml --resume {from} --max_steps 2");
        let said = place.succeed(&line);
        assert!(said.contains("1 steps up to step 2"), "{said}");
        place.succeed(&format!("{line} --dry-run"));
    }
}

#[test]
fn pipes_and_devices_are_no_files_to_read() {
    let place = Workplace::new();
    let made = Command::new("mkfifo")
        .args(["pipe", "pipe.toml"].map(|name| place.path(name)))
        .status();
    assert!(made.expect("coreutils are there").success());
    place.succeed("train merak.toml --max_steps 1");
    let train = |flags: &str| refusal(&place, &format!("train merak.toml {flags}"));
    for file in ["pipe", "/dev/zero"] {
        for (key, flags) in [
            ("data.tokenizer", format!("--data.tokenizer {file}")),
            ("model.config", format!("--model.config {file}")),
            ("data.path", format!("--data.path {file}")),
        ] {
            assert_eq!(
                train(&flags),
                format!(
                    "error: cannot read {file}, which \"{key}\" names (command line --{key}): it is no regular file"
                )
            );
        }
        let message = train(&format!("--lora_config {file}"));
        let expected = ": it is no regular file (\"lora_config\", command line --lora_config)";
        assert!(message.ends_with(expected), "{message}");
        let message = refusal(&place, &format!("generate run --prompt-file {file}"));
        assert_eq!(
            message,
            format!("error: cannot read {file}: it is no regular file")
        );
    }
    assert_snapshot!(refusal(&place, "train pipe.toml"), @"error: cannot read pipe.toml: it is no regular file");
    assert_snapshot!(refusal(&place, "schedule --check pipe -p 2 -m 2"), @"error: cannot read pipe: it is no regular file");
}

#[test]
fn files_longer_than_any_of_their_kind_are_refused_by_their_length() {
    let place = Workplace::new();
    for name in ["tokenizer.json", "config.json", "long.toml", "prompts.txt"] {
        let file = File::create(place.path(name)).expect("a writable folder");
        file.set_len(10_000_000_000).expect("a sparse file");
    }
    place.succeed("train merak.toml --max_steps 1");
    assert_snapshot!(refusal(&place, "train merak.toml --data.tokenizer tokenizer.json"), @r#"error: cannot read tokenizer.json, which "data.tokenizer" names (command line --data.tokenizer): it has 9.31 GiB, the limit is 256 MiB"#);
    assert_snapshot!(refusal(&place, "train merak.toml --model.config config.json"), @r#"error: cannot read config.json, which "model.config" names (command line --model.config): it has 9.31 GiB, the limit is 4.00 MiB"#);
    assert_snapshot!(refusal(&place, "train long.toml"), @"error: cannot read long.toml: it has 9.31 GiB, the limit is 4.00 MiB");
    assert_snapshot!(refusal(&place, "generate run --prompt-file prompts.txt"), @"error: cannot read prompts.txt: it has 9.31 GiB, the limit is 64.0 MiB");
}

#[test]
fn what_is_no_file_where_the_run_writes_is_refused_at_the_start() {
    let place = Workplace::new();
    let mkfifo = |name: &str| {
        let path = place.path("run").join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a writable folder");
        let made = Command::new("mkfifo").arg(&path).status();
        assert!(made.expect("coreutils are there").success());
        path
    };
    place.write("lora.json", r#"{"r": 2, "target_modules": ["c_attn"]}"#);
    let mut said = Vec::new();
    for (name, flags) in [
        ("config.resolved.toml", ""),
        ("metrics.jsonl", ""),
        ("metrics.jsonl", "--resume auto"),
        (".lock", ""),
        ("checkpoints", ""),
        ("checkpoints/latest", ""),
        ("adapter/notes", "--lora_config lora.json"),
    ] {
        let pipe = mkfifo(name);
        said.push(refusal(
            &place,
            &format!("train merak.toml --max_steps 1 {flags}"),
        ));
        std::fs::remove_file(pipe).expect("it is still there");
        std::fs::remove_dir_all(place.path("run")).expect("it can be removed");
    }
    place.succeed("train merak.toml --max_steps 1");
    // Resuming removes a record of a later step.
    let metrics = place.path("run/metrics.jsonl");
    let records = std::fs::read_to_string(&metrics).expect("records");
    std::fs::write(&metrics, records + "{\"step\":9}\n").expect("a writable folder");
    mkfifo(".merak-tmp-metrics.jsonl");
    said.push(refusal(
        &place,
        "train merak.toml --max_steps 2 --resume latest",
    ));
    said.push(refusal(
        &place,
        "train merak.toml --output_dir other --lora_config /proc/self/mem",
    ));
    assert_snapshot!(said.join("\n"), @r#"
    error: cannot write into run/config.resolved.toml, which "output_dir" names (merak.toml:1): it is no regular file
    error: cannot write into run/metrics.jsonl, which "output_dir" names (merak.toml:1): it is no regular file
    error: cannot write into run/metrics.jsonl, which "output_dir" names (merak.toml:1): it is no regular file
    error: cannot read run/.lock: it is no regular file, and so no lock: move it away
    error: cannot write into run/checkpoints, which "output_dir" names (merak.toml:1): not a directory
    error: cannot read run/checkpoints/latest: it is no regular file: move it away
    error: cannot read run/adapter/notes: it is neither a file nor a folder nor a link, and cannot be kept: move it away
    error: cannot write into run/metrics.jsonl, which "output_dir" names (merak.toml:1): it is no regular file
    error: cannot read /proc/self/mem, which "lora_config" names (command line --lora_config): Input/output error (os error 5)
    "#);
}
