//! Ranks in processes of their own do what ranks as threads do.

use std::{fs, net::TcpListener, path::Path, process::Command, thread, time::Duration};

use serde_json::Value;

use super::{
    Ended, Workplace, files,
    launch::{end, kill},
    weights,
};

/// Runs a command on processes, one per rank.
fn launched(place: &Workplace, processes: usize, line: &str) -> Ended {
    end(
        place,
        place.command(&format!("launch -n {processes} -- {line}")),
    )
}

/// Runs a command on as many processes as there are lines, each with its own, as a script on
/// several hosts starts them.
fn by_hand(place: &Workplace, lines: &[String]) -> Vec<Ended> {
    let (port, ranks) = (free_port(), lines.len());
    let command = |(rank, line): (usize, &String)| {
        let mut command = place.command(line);
        tell_place(&mut command, rank, ranks, port);
        command
    };
    end_all(place, lines.iter().enumerate().map(command).collect())
}

/// A port that nobody has.
pub(super) fn free_port() -> u16 {
    let port = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    port.local_addr().expect("an address").port()
}

/// Tells a command its place in a world.
pub(super) fn tell_place(command: &mut Command, rank: usize, ranks: usize, port: u16) {
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string());
}

/// Runs commands side by side.
pub(super) fn end_all(place: &Workplace, commands: Vec<Command>) -> Vec<Ended> {
    thread::scope(|scope| {
        let start = |command| scope.spawn(move || end(place, command));
        let ranks: Vec<_> = commands.into_iter().map(start).collect();
        let end = |rank: thread::ScopedJoinHandle<'_, Ended>| rank.join().expect("it ends");
        ranks.into_iter().map(end).collect()
    })
}

fn succeed(ended: &Ended) -> &str {
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    &ended.stdout
}

/// The records of a run without what the clock and the memory say.
fn records(place: &Workplace, run: &str) -> Vec<Value> {
    const MEASURED: [&str; 10] = [
        "time_s",
        "tokens_per_s",
        "samples_per_s",
        "step_time_s",
        "data_wait_s",
        "tflops",
        "mfu",
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

/// The process of a rank that runs in a folder.
pub(super) fn rank_in(folder: &Path, rank: usize) -> u32 {
    find_rank(folder, rank).expect("a process of the rank")
}

/// The same, if there is one.
pub(super) fn find_rank(folder: &Path, rank: usize) -> Option<u32> {
    find_process(folder, &format!("RANK={rank}"))
}

/// A process that runs in a folder and was started with a variable.
pub(super) fn find_process(folder: &Path, variable: &str) -> Option<u32> {
    let is_it = |process: &Path| {
        let cwd = fs::read_link(process.join("cwd"));
        let variables = fs::read(process.join("environ")).unwrap_or_default();
        let mut variables = variables.split(|byte| *byte == 0);
        cwd.is_ok_and(|cwd| cwd == folder) && variables.any(|it| it == variable.as_bytes())
    };
    let processes = fs::read_dir("/proc").expect("processes");
    let mut paths = processes.filter_map(|entry| Some(entry.ok()?.path()));
    let found = paths.find(|path| is_it(path))?;
    found.file_name()?.to_string_lossy().parse().ok()
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

/// Checks that of three processes the one whose input differs names it, and the others that one.
fn expect_odd(what: &str, odd: usize, ended: &[Ended]) {
    let told: Vec<_> = ended
        .iter()
        .map(|ended| (ended.status, ended.stderr.as_str()))
        .collect();
    let most: Vec<_> = (0..3).filter(|rank| *rank != odd).collect();
    let differs = format!(
        "{what} differs from that of ranks {} and {}",
        most[0], most[1]
    );
    assert!(
        told[odd].1.contains(&format!("error: {differs}")),
        "{told:?}"
    );
    assert_eq!(told[odd].0, Some(2), "{told:?}");
    for rank in most {
        assert_eq!(told[rank].0, Some(3), "{told:?}");
    }
    assert!(
        odd == 0
            || told[0]
                .1
                .contains(&format!("error: rank {odd} failed: {differs}")),
        "{told:?}"
    );
}

#[test]
fn equal_inputs_may_lie_elsewhere_and_the_process_with_others_is_named() {
    let place = Workplace::new();
    let copy = |from: &str, to: &str| {
        let content = fs::read_to_string(place.path(from)).expect("a text");
        place.write(to, &content);
    };
    copy("text/a.txt", "other/text/a.txt");
    copy("model.json", "other/model.json");
    let line = |inputs: &str, run: &str| {
        format!(
            "train merak.toml --dp 3 --max_steps 1 --output_dir {run} \
             --data.path {inputs}text --model.config {inputs}model.json"
        )
    };
    let run =
        |inputs: [&str; 3], run: &str| by_hand(&place, &inputs.map(|inputs| line(inputs, run)));
    for ended in run(["", "other/", ""], "same") {
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    }
    let expect_odd = |what: &str, inputs: [&str; 3]| {
        let odd = inputs.iter().position(|inputs| *inputs == "other/");
        expect_odd(
            what,
            odd.expect("a rank with other inputs"),
            &run(inputs, "never"),
        );
    };
    let text = fs::read_to_string(place.path("text/a.txt")).expect("a text");
    place.write("other/text/a.txt", &text.replacen("every", "never", 1));
    expect_odd("the data", ["", "", "other/"]);
    expect_odd("the data", ["other/", "", ""]);
    copy("text/a.txt", "other/text/a.txt");
    let model = fs::read_to_string(place.path("model.json")).expect("a model");
    place.write("other/model.json", &model.replace("0.1", "0.2"));
    expect_odd("the model", ["", "other/", ""]);
    assert!(!place.path("never").exists());
}

#[test]
fn the_process_that_is_to_train_something_else_is_named_with_the_line_that_differs() {
    let place = Workplace::new();
    let usual = "train merak.toml --dp 3 --max_steps 1 --output_dir never --seed 3";
    for odd in [0, 2] {
        let mut lines = [(); 3].map(|()| usual.to_owned());
        lines[odd] = usual.replace("--seed 3", "--seed 7");
        let ended = by_hand(&place, &lines);
        expect_odd("the configuration", odd, &ended);
        let told = &ended[odd].stderr;
        let line = "here \"seed = 7\", there \"seed = 3\"";
        assert!(told.contains(line), "{told}");
    }
    assert!(!place.path("never").exists());
}

#[test]
fn weights_tokenizer_and_adapter_are_compared_by_what_they_hold() {
    let place = weights::with_folder(None);
    let adapter = r#"{"r": 2, "lora_alpha": 4, "target_modules": ["c_attn"]}"#;
    place.write("lora.json", adapter);
    fs::create_dir(place.path("other")).expect("a writable folder");
    let copy = |name: &str| {
        let (from, to) = (place.path(name), place.path("other").join(name));
        fs::create_dir_all(to.parent().expect("a folder")).expect("a writable folder");
        fs::copy(from, to).expect("our file");
    };
    let names = ["model.safetensors", "config.json", "tokenizer.json"];
    let all = names.map(|name| format!("hf/{name}"));
    let all: Vec<_> = all
        .iter()
        .map(String::as_str)
        .chain(["lora.json"])
        .collect();
    for name in &all {
        copy(name);
    }
    let run = |inputs: [&str; 3], run: &str| {
        by_hand(
            &place,
            &inputs.map(|inputs| {
                format!(
                    "train hf.toml --dp 3 --max_steps 1 --output_dir {run} --model.hf_dir {inputs}hf \
                     --data.tokenizer {inputs}hf/tokenizer.json --lora_config {inputs}lora.json"
                )
            }),
        )
    };
    for ended in run(["", "", "other/"], "same") {
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    }
    let change = |name: &str, change: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let path = place.path("other").join(name);
        let bytes = fs::read(&path).expect("our file");
        fs::write(path, change(bytes)).expect("our file");
    };
    // The last number of a weight.
    change("hf/model.safetensors", &|mut bytes| {
        *bytes.last_mut().expect("a byte") ^= 1;
        bytes
    });
    expect_odd("the model", 1, &run(["", "other/", ""], "never"));
    copy("hf/model.safetensors");
    // Two tokens change places.
    change("hf/tokenizer.json", &|bytes| {
        let mut json: Value = serde_json::from_slice(&bytes).expect("JSON");
        let vocab = json["model"]["vocab"].as_object_mut().expect("tokens");
        let ids: Vec<_> = vocab.values().cloned().collect();
        for (id, other) in vocab.values_mut().zip([&ids[1], &ids[0]]) {
            *id = other.clone();
        }
        json.to_string().into_bytes()
    });
    expect_odd("the model", 2, &run(["", "", "other/"], "never"));
    copy("hf/tokenizer.json");
    place.write("other/lora.json", &adapter.replace('4', "8"));
    expect_odd("the model", 1, &run(["", "other/", ""], "never"));
    assert!(!place.path("never").exists());
}

#[test]
fn processes_that_are_to_generate_something_else_are_named() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let run = |odd: &str| {
        let usual = "generate run --prompt fn --dp 3".to_owned();
        by_hand(&place, &[usual.clone(), usual, odd.to_owned()])
    };
    for (odd, what) in [
        ("generate run --prompt if --dp 3", "the prompts"),
        ("generate run --prompt fn --pp 3", "the configuration"),
        (
            "generate run --prompt fn --dp 3 --seed 7",
            "the configuration",
        ),
    ] {
        expect_odd(what, 2, &run(odd));
    }
}

#[test]
fn sharded_parameters_of_processes_are_those_of_threads() {
    let place = Workplace::new();
    for (stage, degrees) in [
        (2, "--dp 2 --tp 2"),
        (3, "--dp 2 --tp 2"),
        (1, "--dp 2 --sp 2"),
    ] {
        let line = |run: &str| {
            format!(
                "train merak.toml {degrees} --zero_stage {stage} --save_steps 2 \
                 --gradient_accumulation_steps 2 --output_dir {run}-{stage}"
            )
        };
        place.succeed(&line("threads"));
        succeed(&launched(&place, 4, &line("processes")));
        let [processes, threads] = ["processes", "threads"].map(|run| format!("{run}-{stage}"));
        assert_eq!(records(&place, &processes), records(&place, &threads));
        let checkpoints = |run: &str| files(&place.path(run).join("checkpoints"));
        assert_eq!(checkpoints(&processes), checkpoints(&threads));
    }
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
    // The first rank says in which step it was.
    let mut lines = ended.stderr.lines();
    let own = lines.find(|line| line.contains("another rank has failed, and ended this one"));
    assert!(
        own.is_some_and(|line| line.contains(" step ")),
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
    assert_eq!(records(&place, "run"), records(&place, "undisturbed"));
}
