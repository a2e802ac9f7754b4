//! Training, resuming and generating by command.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    thread,
};

use merak_ckpt::{
    Checkpoint, ExportOptions, HfFolder, ImportOptions, Kind, ReshardOptions, Topology, export_hf,
    import_hf, reshard,
};
use serde_json::Value;

use super::{Workplace, families::records, files};

/// The files that a run leaves, without the records of its times and the page about them.
fn artefacts(place: &Workplace) -> Vec<(String, Vec<u8>)> {
    let mut found = files(&place.path("run"));
    found.retain(|(name, _)| !["metrics.jsonl", "report.html"].contains(&name.as_str()));
    found
}

#[test]
fn a_run_leaves_its_files_and_the_same_bytes_each_time() {
    let place = Workplace::new();
    let line = "train merak.toml --tp 2 --pp 2";
    let shown = place.succeed(line);
    assert!(
        shown.contains("trained   5 steps")
            && shown.contains("saved     run/checkpoints/step-00000005"),
        "{shown}"
    );
    let first = artefacts(&place);
    let names: Vec<_> = first.iter().map(|(name, _)| name.as_str()).collect();
    for name in [
        "config.resolved.toml",
        "checkpoints/latest",
        "checkpoints/step-00000005/config.json",
        "checkpoints/step-00000005/manifest.json",
        "checkpoints/step-00000005/model-00000.safetensors",
        "checkpoints/step-00000005/optim-00003.safetensors",
        "checkpoints/step-00000005/tokenizer.json",
    ] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert_eq!(
        records(&place, "run")
            .iter()
            .map(|(step, _)| *step)
            .collect::<Vec<_>>(),
        [1, 2, 3, 4, 5]
    );
    fs::remove_dir_all(place.path("run")).unwrap();
    place.succeed(line);
    assert!(artefacts(&place) == first, "the same bytes again");
    // The resolved configuration alone describes the run.
    fs::copy(
        place.path("run/config.resolved.toml"),
        place.path("again.toml"),
    )
    .unwrap();
    fs::remove_dir_all(place.path("run")).unwrap();
    place.succeed("train again.toml");
    assert!(
        artefacts(&place) == first,
        "the same bytes from the resolved configuration"
    );
}

#[test]
fn the_shakespeare_recipe_is_planned_with_any_text_and_asks_for_its_own() {
    let place = Workplace::new();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/configs/shakespeare.toml");
    let dry = |keys: &str| {
        let mut command = place.command("train");
        command.arg(&recipe).arg("--dry-run");
        command.args(format!("--output_dir run {keys}").split_whitespace());
        place.ended(&command.output().expect("the command starts"))
    };
    for (ranks, planned) in [
        ("", "ranks     1 = dp 1 x tp 1 x pp 1"),
        ("--tp 2 --pp 2", "ranks     4 = dp 1 x tp 2 x pp 2"),
    ] {
        let ended = dry(&format!("--data.path text {ranks}"));
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        for told in [
            "gpt2: 834432 parameters, 4 layers",
            "batch     12 samples of 64 tokens",
            planned,
        ] {
            assert!(ended.stdout.contains(told), "{told}: {}", ended.stdout);
        }
    }
    let ended = dry("");
    assert_eq!(ended.status, Some(2), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("shakespeare.txt, which \"data.path\" names"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_run_goes_on_from_its_checkpoint() {
    let place = Workplace::new();
    place.succeed("train merak.toml --lr_scheduler_type constant");
    let unbroken = records(&place, "run");
    fs::remove_dir_all(place.path("run")).unwrap();
    place.succeed("train merak.toml --lr_scheduler_type constant --max_steps 3 --resume auto");
    place.succeed("train merak.toml --lr_scheduler_type constant --resume auto");
    assert_eq!(records(&place, "run"), unbroken);
    // Once more on another topology: the same curve.
    fs::remove_dir_all(place.path("run/checkpoints/step-00000005")).unwrap();
    fs::write(place.path("run/checkpoints/latest"), "step-00000003\n").unwrap();
    place.succeed("train merak.toml --lr_scheduler_type constant --dp 2 --pp 2 --gradient_accumulation_steps 2 --resume latest");
    for ((step, loss), (_, expected)) in records(&place, "run").iter().zip(&unbroken) {
        assert!(
            (loss / expected - 1.0).abs() < 1e-4,
            "step {step}: {loss} against {expected}"
        );
    }
}

#[test]
fn generation_is_the_same_on_every_topology() {
    let place = Workplace::new();
    place.succeed("train merak.toml");
    let greedy =
        "generate run --prompt every --prompt-ids 1 --max-new-tokens 12 --temperature 0 --json";
    let refused = place.merak(greedy);
    assert_eq!(refused.status, Some(2), "one kind of prompt at a time");
    let greedy =
        "generate run --prompt every --prompt rank --max-new-tokens 12 --temperature 0 --json";
    let alone = place.document(greedy);
    let entries = alone.as_array().unwrap();
    assert_eq!(entries.len(), 2);
    // A prompt to a line, its ids together.
    assert_eq!(place.succeed(greedy).lines().count(), 2 + entries.len());
    for entry in entries {
        assert_eq!(entry["ids"].as_array().unwrap().len(), 12);
        assert_eq!(entry["reason"], "length");
        assert!(entry["text"].is_string() && entry["prompt_ids"].is_array());
    }
    assert_eq!(place.document(greedy), alone);
    for ranks in ["--tp 2", "--pp 2", "--tp 2 --pp 2", "--pp 4"] {
        assert_eq!(
            place.document(&format!("{greedy} {ranks}")),
            alone,
            "{ranks}"
        );
    }
    let drawn = |seed: usize| {
        place.document(&format!(
            "generate run --prompt-ids 101,118 --max-new-tokens 12 --seed {seed} --json"
        ))
    };
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2));
    place.write("prompts.txt", "\u{feff}every rank\nnone\n");
    let text =
        place.succeed("generate run --prompt-file prompts.txt --max-new-tokens 3 --temperature 0");
    assert!(text.starts_with("every rank"), "{text}");
    let piped = |launch: &str, prompts: &str| {
        let line = format!(
            "{launch} generate run --prompt-file - --max-new-tokens 3 --temperature 0 --dp 2"
        );
        let prompts = File::open(place.path(prompts)).expect("a file");
        let output = place.command(&line).stdin(prompts).output();
        place.ended(&output.expect("the command starts"))
    };
    for launch in ["", "launch -n 2 --"] {
        assert_eq!(piped(launch, "prompts.txt").stdout, text);
    }
    place.write("blank.txt", "\n");
    let refused = "error: no prompt in standard input: write one prompt per line\n";
    assert_eq!(piped("", "blank.txt").stderr, refused);
}

/// The likeliest continuation of a text by the model at a path.
fn continued(place: &Workplace, path: &str, ranks: &str) -> Value {
    let options = "--prompt every --max-new-tokens 8 --temperature 0 --json";
    place.document(&format!("generate {path} {options} {ranks}"))
}

#[test]
fn an_evaluation_of_a_checkpoint_gives_the_loss_of_its_run() {
    let place = Workplace::new();
    let run = place.succeed("train merak.toml");
    let evaluated = place.document("evaluate merak.toml run --json");
    let loss = evaluated["eval_loss"].as_f64().unwrap();
    let line = format!(
        "validated loss {loss:.4} over {} samples",
        evaluated["eval_samples"]
    );
    assert!(run.contains(&line), "{line} in {run}");
    assert!((evaluated["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);
    for options in ["--json --tp 2 --pp 2", "--tp 2 --dp 2 --json"] {
        let elsewhere = place.document(&format!("evaluate merak.toml run {options}"));
        let other = elsewhere["eval_loss"].as_f64().unwrap();
        assert!((other / loss - 1.0).abs() < 1e-5, "{other} against {loss}");
    }
    let table = place.succeed("evaluate merak.toml run/checkpoints/step-00000005");
    assert!(
        table.starts_with(&format!("eval_loss                 {loss:.4}\n")),
        "{table}"
    );
    // A decay that fits the run is no matter of its evaluation, which makes no steps.
    let decay = r#"--lr_scheduler_type wsd --lr_scheduler_kwargs {"num_decay_steps":3}"#;
    for command in ["train", "evaluate"] {
        let checkpoint = if command == "train" { "" } else { "run" };
        let output = "--overwrite_output_dir";
        let output = if command == "train" { output } else { "" };
        place.succeed(&format!(
            "{command} merak.toml {checkpoint} {output} {decay}"
        ));
    }
    let message = place.mistake("evaluate merak.toml nowhere");
    assert!(message.contains("no checkpoint at nowhere"), "{message}");
    let message = place.mistake("evaluate merak.toml run --data.validation_fraction 0");
    assert!(message.contains("data.validation_fraction"), "{message}");
}

#[test]
fn an_imported_model_is_a_release_that_training_starts_from() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 2");
    let trained = Checkpoint::open(place.path("run")).unwrap();
    export_hf(&trained, place.path("hf"), &ExportOptions::default()).unwrap();
    let folder = HfFolder::open(place.path("hf")).unwrap();
    import_hf(&folder, place.path("imported"), &ImportOptions::default()).unwrap();
    assert_eq!(
        continued(&place, "imported", ""),
        continued(&place, "run", "")
    );
    assert_eq!(
        continued(&place, "imported", "--tp 2"),
        continued(&place, "run", "")
    );
    let train = "train merak.toml --max_steps 1 --output_dir fresh --learning_rate 0";
    let release = place.succeed(&format!("{train} --resume imported"));
    assert!(release.contains("trained   1 steps"), "{release}");
    assert_eq!(continued(&place, "fresh", ""), continued(&place, "run", ""));
}

#[test]
fn a_checkpoint_of_one_rank_is_cut_for_tensor_parallel_ranks() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 2");
    let source = Checkpoint::open(place.path("run")).unwrap();
    let topology = Topology {
        tp: 2,
        ..Topology::default()
    };
    let options = ReshardOptions {
        topology,
        ..ReshardOptions::default()
    };
    let cut = reshard(&source, place.path("cut"), &options).unwrap();
    let cut = Checkpoint::open(cut).unwrap();
    let slices = |name: &str| {
        let name = format!("transformer.h.0.{name}.weight");
        cut.tensor(&Kind::Parameter, &name).unwrap().slices.len()
    };
    // Each of q, k and v by its heads; rows of the projection after them; norms stay whole.
    assert_eq!(
        [slices("attn.c_attn"), slices("attn.c_proj"), slices("ln_1")],
        [6, 2, 1]
    );
    assert_eq!(
        continued(&place, "cut", "--tp 2"),
        continued(&place, "run", "")
    );
    // Any topology saves the same notes.
    let noted = |checkpoint: &Checkpoint| {
        let tensors = checkpoint.manifest().tensors.iter();
        tensors.map(|tensor| tensor.cut.clone()).collect::<Vec<_>>()
    };
    place.succeed("train merak.toml --max_steps 3 --tp 2 --resume latest");
    assert_eq!(
        noted(&Checkpoint::open(place.path("run")).unwrap()),
        noted(&source)
    );
}

#[test]
fn auto_follows_latest_where_higher_steps_lie_beside_it() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 4 --save_steps 2");
    // A run that was taken up again at an earlier step, so that the highest number is not the
    // latest.
    fs::write(place.path("run/checkpoints/latest"), "step-00000002\n").unwrap();
    let plan = |log: &str| {
        let ended = place.merak(&format!("train merak.toml --dry-run --resume auto{log}"));
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        let mut lines = ended.stdout.lines();
        let resumed = lines.find(|line| line.starts_with("resumes"));
        (resumed.unwrap_or_default().to_owned(), ended.stderr)
    };
    let step = |number: usize| format!("resumes   run/checkpoints/step-{number:08}");
    assert_eq!(plan("").0, step(2));
    let latest = place.path("run/checkpoints/latest");
    for content in [None, Some("no checkpoint")] {
        fs::remove_file(&latest).unwrap();
        if let Some(content) = content {
            fs::write(&latest, content).unwrap();
        }
        let (resumed, warnings) = plan("");
        assert_eq!(resumed, step(4));
        assert!(warnings.contains("the highest step counts"), "{warnings}");
        fs::write(&latest, "step-00000002\n").unwrap();
    }
    fs::remove_file(place.path("run/checkpoints/step-00000002/manifest.json")).unwrap();
    let (resumed, warnings) = plan("");
    assert_eq!(resumed, step(4));
    assert!(warnings.contains("passed over"), "{warnings}");
}

#[test]
fn an_interrupt_saves_and_ends_with_status_130() {
    let place = Workplace::new();
    let mut child = place
        .command("train merak.toml --max_steps 10000000 --tp 2 --pp 2")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let first = lines.next().expect("a line of progress").expect("text");
    assert!(first.contains('1'), "{first}");
    // Without a reader, the command would block.
    let rest = thread::spawn(move || lines.count());
    let killed = Command::new("sh")
        .arg("-c")
        .arg(format!("kill -INT {}", child.id()))
        .status();
    assert!(killed.expect("a shell").success());
    let ended = child.wait_with_output().expect("the command ends");
    assert_eq!(ended.status.code(), Some(130));
    rest.join().unwrap();

    let saved = Checkpoint::open(place.path("run")).unwrap();
    assert!(saved.verify().damage.is_empty());
    let step = saved.manifest().header.step;
    assert!(step >= 1);
    let told = String::from_utf8_lossy(&ended.stdout);
    for line in [
        format!("\nstopped   by SIGINT at step {step} of 10000000\n"),
        "\ngo on     merak train merak.toml --resume auto, with the same keys\n".to_owned(),
    ] {
        assert!(told.contains(&line), "{told}");
    }
    let more = step + 2;
    place.succeed(&format!(
        "train merak.toml --max_steps {more} --resume latest"
    ));
    assert_eq!(records(&place, "run").last().unwrap().0, more);
}

#[test]
fn a_run_ends_with_its_best_model_which_a_path_can_name() {
    let place = Workplace::new();
    // The loss falls, so its largest value is that of the first step.
    let keys = "--do_eval --eval_steps 1 --data.validation_fraction 0.2 --load_best_model_at_end \
                --greater_is_better true --save_total_limit 1";
    let shown = place.succeed(&format!("train merak.toml {keys}"));
    let best = fs::read_to_string(place.path("run/checkpoints/best")).expect("it is named");
    let best = best.trim();
    assert_eq!(best, "step-00000001", "{shown}");
    let advice = format!("continue  merak generate run/checkpoints/{best} --prompt TEXT");
    assert!(shown.contains(&advice), "{shown}");
    let generate = |path: &str| place.succeed(&format!("generate {path} --prompt-ids 1,2,3"));
    assert_eq!(
        generate("run/checkpoints/best"),
        generate(&format!("run/checkpoints/{best}"))
    );
    assert_eq!(generate("run/checkpoints/latest"), generate("run"));
    let loss = |path: &str| {
        let line = format!("evaluate merak.toml {path} --json --data.validation_fraction 0.2");
        place.document(&line)["eval_loss"]
            .as_f64()
            .expect("a number")
    };
    let (best, last) = (loss("run/checkpoints/best"), loss("run"));
    assert!(best > last, "{best} {last}");
    assert!(
        shown.contains(&format!(
            "best      loss {best:.4} at step 1, whose weights the model has now\n"
        )),
        "{shown}"
    );
    assert!(
        shown.contains(&format!("validated loss {last:.4} over ")),
        "{shown}"
    );
}
