//! Training, resuming and generating by command.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    thread,
};

use merak_ckpt::Checkpoint;
use serde_json::Value;

use super::{Workplace, files};

/// The files that a run leaves, but for the records of its times.
fn artefacts(place: &Workplace) -> Vec<(String, Vec<u8>)> {
    let mut found = files(&place.path("run"));
    found.retain(|(name, _)| name != "metrics.jsonl");
    found
}

fn losses(place: &Workplace) -> Vec<(u64, f64)> {
    let text = fs::read_to_string(place.path("run/metrics.jsonl")).expect("the records of a run");
    let records = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("one object a line"));
    let loss = |record: Value| Some((record["step"].as_u64()?, record["loss"].as_f64()?));
    records.filter_map(loss).collect()
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
        losses(&place)
            .iter()
            .map(|(step, _)| *step)
            .collect::<Vec<_>>(),
        [1, 2, 3, 4, 5]
    );
    fs::remove_dir_all(place.path("run")).unwrap();
    place.succeed(line);
    assert!(artefacts(&place) == first, "the same bytes again");
    // What was resolved says it all.
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
fn a_run_goes_on_from_its_checkpoint() {
    let place = Workplace::new();
    place.succeed("train merak.toml --lr_scheduler_type constant");
    let unbroken = losses(&place);
    fs::remove_dir_all(place.path("run")).unwrap();
    place.succeed("train merak.toml --lr_scheduler_type constant --max_steps 3 --resume auto");
    place.succeed("train merak.toml --lr_scheduler_type constant --resume auto");
    assert_eq!(losses(&place), unbroken);
    // Once more, elsewhere: the same curve.
    fs::remove_dir_all(place.path("run/checkpoints/step-00000005")).unwrap();
    fs::write(place.path("run/checkpoints/latest"), "step-00000003\n").unwrap();
    place.succeed("train merak.toml --lr_scheduler_type constant --dp 2 --pp 2 --gradient_accumulation_steps 2 --resume latest");
    for ((step, loss), (_, expected)) in losses(&place).iter().zip(&unbroken) {
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
    place.write("prompts.txt", "every rank\nnone\n");
    let text =
        place.succeed("generate run --prompt-file prompts.txt --max-new-tokens 3 --temperature 0");
    assert!(text.starts_with("every rank"), "{text}");
}

#[test]
fn an_interrupt_saves_and_ends_with_status_130() {
    let place = Workplace::new();
    let mut child = place
        .command("train merak.toml --max_steps 10000000 --tp 2 --pp 2")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let first = lines.next().expect("a line of progress").expect("text");
    assert!(first.contains('1'), "{first}");
    // Whoever stops reading would block the command.
    let rest = thread::spawn(move || lines.count());
    let killed = Command::new("sh")
        .arg("-c")
        .arg(format!("kill -INT {}", child.id()))
        .status();
    assert!(killed.expect("a shell").success());
    assert_eq!(child.wait().expect("the command ends").code(), Some(130));
    rest.join().unwrap();

    let saved = Checkpoint::open(place.path("run")).unwrap();
    assert!(saved.verify().damage.is_empty());
    let step = saved.manifest().header.step;
    assert!(step >= 1);
    let more = step + 2;
    place.succeed(&format!(
        "train merak.toml --max_steps {more} --resume latest"
    ));
    assert_eq!(losses(&place).last().unwrap().0, more);
}
