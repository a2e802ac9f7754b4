//! Ranks in processes of their own do what ranks as threads do.

use std::{collections::BTreeMap, fs, path::Path, thread, time::Duration};

use serde_json::Value;

use super::{
    Ended, Workplace,
    launch::{end, kill},
};

/// Runs a command on processes, one per rank.
fn launched(place: &Workplace, processes: usize, line: &str) -> Ended {
    end(
        place,
        place.command(&format!("launch -n {processes} -- {line}")),
    )
}

fn succeed(ended: &Ended) -> &str {
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    &ended.stdout
}

/// The records of a run without what the clock and the memory say.
fn records(place: &Workplace, run: &str) -> Vec<Value> {
    const MEASURED: [&str; 6] = [
        "time_s",
        "tokens_per_s",
        "tflops",
        "memory_bytes",
        "eval_runtime",
        "eval_samples_per_second",
    ];
    let text = fs::read_to_string(place.path(run).join("metrics.jsonl")).expect("records");
    let record = |line: &str| {
        let mut record: Value = serde_json::from_str(line).expect("a record");
        let fields = record.as_object_mut().expect("an object");
        fields.retain(|name, _| !MEASURED.contains(&name.as_str()));
        record
    };
    text.lines().map(record).collect()
}

/// The files of a folder, by their names within it.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder).expect("a file of it");
            found.insert(
                name.display().to_string(),
                fs::read(&path).expect("its bytes"),
            );
        }
    }
    found
}

/// The process of a rank that runs in a folder.
fn rank_in(folder: &Path, rank: usize) -> u32 {
    let variable = format!("RANK={rank}");
    let is_it = |process: &Path| {
        let cwd = fs::read_link(process.join("cwd"));
        let variables = fs::read(process.join("environ")).unwrap_or_default();
        let mut variables = variables.split(|byte| *byte == 0);
        cwd.is_ok_and(|cwd| cwd == folder) && variables.any(|it| it == variable.as_bytes())
    };
    let processes = fs::read_dir("/proc").expect("processes");
    let mut paths = processes.map(|entry| entry.expect("an entry").path());
    let found = paths
        .find(|path| is_it(path))
        .expect("a process of the rank");
    let name = found.file_name().expect("its number").to_string_lossy();
    name.parse().expect("a number")
}

#[test]
fn processes_write_the_records_and_checkpoints_of_threads() {
    let place = Workplace::new();
    let degrees = "--dp 2 --tp 2 --gradient_accumulation_steps 2";
    place.succeed(&format!("train merak.toml {degrees} --output_dir threads"));
    let line = format!("train merak.toml {degrees} --output_dir processes");
    let trained = launched(&place, 4, &line);
    // The first rank alone prints, and writes what all share.
    assert_eq!(succeed(&trained).matches("trained   5 steps").count(), 1);
    assert_eq!(records(&place, "processes"), records(&place, "threads"));
    let checkpoints = |run: &str| files(&place.path(run).join("checkpoints"));
    assert_eq!(checkpoints("processes"), checkpoints("threads"));
    for rank in 1..4 {
        let log = format!("processes/logs/rank-{rank}.log");
        assert_eq!(fs::read_to_string(place.path(&log)).expect("a log"), "");
    }

    // What they have saved, either goes on with, evaluates and generates from.
    let go_on = format!("{line} --max_steps 7 --resume latest");
    succeed(&launched(&place, 4, &go_on));
    let by_threads = go_on.replace("processes", "threads");
    place.succeed(&by_threads);
    assert_eq!(checkpoints("processes"), checkpoints("threads"));
    let evaluate = "evaluate merak.toml processes --pp 2 --json";
    let loss = |text: &str| {
        let document: Value = serde_json::from_str(text).expect("one document");
        document["eval_loss"].clone()
    };
    let evaluated = launched(&place, 2, evaluate);
    assert_eq!(
        loss(succeed(&evaluated)),
        loss(&place.succeed(evaluate)),
        "{}",
        evaluated.stderr
    );
    let generate = "generate processes --prompt fn --tp 2 --json";
    let generated = launched(&place, 2, generate);
    assert_eq!(succeed(&generated), place.succeed(generate));
}

#[test]
fn a_killed_rank_is_named_and_the_ranks_go_on_from_their_checkpoint() {
    let place = Workplace::new();
    let degrees = "--dp 2 --tp 2 --pp 2 --gradient_accumulation_steps 2";
    let line = format!("train merak.toml {degrees} --max_steps 300 --save_steps 5");
    let killer = {
        let checkpoint = place.path("run/checkpoints/step-00000010");
        let folder = place.folder.path().to_owned();
        thread::spawn(move || {
            while !checkpoint.exists() {
                thread::sleep(Duration::from_millis(5));
            }
            kill("KILL", rank_in(&folder, 5));
        })
    };
    let command = place.command(&format!("launch -n 8 --max-restarts 1 -- {line}"));
    let ended = end(&place, command);
    killer.join().expect("the killer");
    succeed(&ended);
    assert!(
        ended
            .stderr
            .contains("rank 5 failed: its process ended without a goodbye"),
        "{}",
        ended.stderr
    );
    assert!(
        ended.stderr.contains("resumed from step"),
        "{}",
        ended.stderr
    );

    // It ends where a run ends that nothing has disturbed.
    let undisturbed = line.replace("merak.toml", "merak.toml --output_dir undisturbed");
    place.succeed(&undisturbed);
    let last = |run: &str| files(&place.path(run).join("checkpoints/step-00000300"));
    assert_eq!(last("run"), last("undisturbed"));
}
