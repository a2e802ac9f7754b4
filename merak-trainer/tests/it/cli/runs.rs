//! One run per folder, and how runs end: refusals, signals, full disks, removed folders.

use std::{
    fs,
    io::{BufRead, BufReader, Lines},
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use insta::assert_snapshot;
use merak_ckpt::{Checkpoint, ExportOptions, Store, export_hf};
use serde_json::Value;

use super::{Ended, Workplace, files, text};

/// A training that goes on until a signal ends it.
const ENDLESS: &str = "train merak.toml --max_steps 10000000 --save_steps 10000000";

/// A workplace with a text so long that no epoch of it ends within a test.
fn with_a_long_text() -> Workplace {
    let place = Workplace::new();
    place.write("text/a.txt", &text().repeat(500));
    place
}

/// A command under way.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
}

impl Running {
    /// Starts a command and waits until it has made a step.
    fn of(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut running = Self { child, lines };
        running.read_until("step ");
        running
    }

    fn read_until(&mut self, text: &str) {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        let found = lines.find(|line| line.starts_with(text));
        assert!(found.is_some(), "no line begins with {text}");
    }

    fn send(&self, signals: &str) {
        let kills = signals
            .split(' ')
            .map(|signal| format!("kill -{signal} {}", self.child.id()));
        let script = kills.collect::<Vec<_>>().join("; ");
        let sent = Command::new("sh").arg("-c").arg(script).status();
        assert!(sent.expect("a shell").success());
    }

    /// Waits for its end; returns its status and what it says until then.
    fn end(self) -> (ExitStatus, String) {
        let Self { mut child, lines } = self;
        let rest = thread::spawn(move || lines.map_while(Result::ok).collect::<Vec<_>>());
        let status = child.wait().expect("the command ends");
        (status, rest.join().expect("a reader").join("\n"))
    }
}

/// The command, started by a shell that prepares what it inherits; of our environment it sees
/// nothing, and so no times that were measured before.
fn under(place: &Workplace, preparation: &str, line: &str) -> Command {
    let merak = place.command(line);
    let mut shell = Command::new("sh");
    shell
        .arg("-c")
        .arg(format!("{preparation}; exec \"$0\" \"$@\""))
        .arg(merak.get_program())
        .args(merak.get_args())
        .current_dir(place.folder.path())
        .env_clear()
        .env("MERAK_COST_MODEL", "counted");
    shell
}

fn steps(place: &Workplace, folder: &str) -> Vec<u64> {
    let store = Store::in_output_dir(place.path(folder));
    store.steps().expect("a folder that can be listed")
}

fn refusal(ended: &Ended) -> &str {
    assert_eq!(ended.status, Some(2), "{}", ended.stderr);
    ended.stderr.trim_end()
}

#[test]
fn the_same_command_twice_is_refused_and_changes_nothing() {
    let place = Workplace::new();
    place.succeed("train merak.toml");
    let first = files(&place.path("run"));
    let again = place.merak("train merak.toml");
    assert_snapshot!(refusal(&again), @r#"error: run, which "output_dir" names, has a run already (checkpoints up to step 5): go on with it by --resume auto, replace it by --overwrite_output_dir, or name another folder"#);
    assert!(files(&place.path("run")) == first);
    let dry = place.merak("train merak.toml --dry-run");
    assert_eq!(dry.status, Some(0), "{}", dry.stderr);
    assert!(dry.stdout.contains("has a run already"), "{}", dry.stdout);
    assert!(files(&place.path("run")) == first);
    // Both ways to go on.
    place.succeed("train merak.toml --resume auto --max_steps 7");
    assert_eq!(steps(&place, "run"), [5, 7]);
    place.succeed("train merak.toml --overwrite_output_dir");
    let new = files(&place.path("run"));
    let names = |files: &[(String, Vec<u8>)]| {
        let names = files.iter().map(|(name, _)| name.clone());
        names.collect::<Vec<_>>()
    };
    assert_eq!(names(&new), names(&first));
    // A checkpoint of another run does not go on in this run's folder.
    let other = place.merak("train merak.toml --output_dir other --max_steps 2");
    assert_eq!(other.status, Some(0), "{}", other.stderr);
    let mixed = place.merak("train merak.toml --resume other --max_steps 3");
    assert!(refusal(&mixed).contains("--overwrite_output_dir"));
}

#[test]
fn a_second_process_is_told_who_writes_the_folder_and_readers_are_let_in() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let first = Running::of(place.command(&format!("{ENDLESS} --resume latest --logging_steps 1")));
    let second = place.merak("train merak.toml --resume auto");
    let holder = format!("is in use by process {}", first.child.id());
    assert!(refusal(&second).contains(&holder), "{}", second.stderr);
    let second = place.merak("train merak.toml");
    assert!(refusal(&second).contains(&holder), "{}", second.stderr);
    place.succeed("generate run --prompt-ids 1 --max-new-tokens 1");
    place.succeed("evaluate merak.toml run");
    place.succeed("train merak.toml --dry-run --resume auto");
    first.send("TERM");
    assert_eq!(first.end().0.code(), Some(143));
    assert!(!place.path("run/.lock").exists());
}

#[test]
fn a_run_killed_before_its_first_save_leaves_the_one_that_it_replaces() {
    let place = with_a_long_text();
    place.succeed("train merak.toml --max_steps 2");
    let before = files(&place.path("run/checkpoints"));
    let new = Running::of(place.command(&format!("{ENDLESS} --overwrite_output_dir")));
    new.send("KILL");
    new.end();
    assert!(files(&place.path("run/replaced-run/checkpoints")) == before);
    let refused = place.merak("train merak.toml");
    assert!(
        refusal(&refused).contains("lies in run/replaced-run"),
        "{}",
        refused.stderr
    );
    let elsewhere = "train merak.toml --resume run/replaced-run --output_dir other --max_steps 3";
    place.succeed(elsewhere);
    place.succeed("train merak.toml --overwrite_output_dir --max_steps 1");
    assert_eq!(steps(&place, "run"), [1]);
    assert!(!place.path("run/replaced-run").exists());
}

#[test]
fn auto_without_a_checkpoint_keeps_the_metrics_and_says_where() {
    let place = with_a_long_text();
    let mut killed = Running::of(place.command(ENDLESS));
    // A step is printed before it is recorded.
    killed.read_until("step ");
    killed.send("KILL");
    killed.end();
    let before = fs::read(place.path("run/metrics.jsonl")).expect("records");
    let auto = place.merak("train merak.toml --resume auto --max_steps 2");
    assert_eq!(auto.status, Some(0), "{}", auto.stderr);
    let told = auto
        .stderr
        .lines()
        .filter(|line| line.contains("earlier-run-1"));
    assert_eq!(told.count(), 1, "{}", auto.stderr);
    let kept = fs::read(place.path("run/earlier-run-1/metrics.jsonl"));
    assert!(kept.expect("it is kept") == before);
    assert_eq!(steps(&place, "run"), [2]);
}

#[test]
fn a_dry_run_says_what_becomes_of_the_run_in_the_folder() {
    let place = Workplace::new();
    place.succeed("train merak.toml --save_steps 2");
    let before = files(&place.path("run"));
    let told = |keys: &str| {
        let said = place.succeed(&format!("train merak.toml --dry-run {keys}"));
        let lines = said.lines().filter(|line| line.contains("run/"));
        lines.collect::<Vec<_>>().join("\n")
    };
    let lines = [
        told("--resume run/checkpoints/step-00000002"),
        told("--overwrite_output_dir"),
        told("--resume latest --max_steps 9"),
    ];
    assert_snapshot!(lines.join("\n"), @"
    resumes   run/checkpoints/step-00000002
    keeps     the checkpoints after step 2 and a copy of the metrics in run/earlier-run-1
    replaces  the run in run, which lies in run/replaced-run until the first checkpoint
    resumes   run/checkpoints/step-00000005
    ");
    assert!(files(&place.path("run")) == before);
}

#[test]
fn a_dry_run_after_a_crash_says_what_the_start_then_does() {
    let place = Workplace::new();
    place.succeed("train merak.toml --save_steps 2");
    let moving = place.path("run/.tmp-replaced-run");
    let move_out = |names: &[&str]| {
        for name in names {
            let to = moving.join(name);
            fs::create_dir_all(to.parent().expect("a parent")).expect("a folder");
            fs::rename(place.path("run").join(name), to).expect("it moves");
        }
    };
    // The later steps on their way out, then the whole run.
    let later = [
        "checkpoints/latest",
        "checkpoints/step-00000004",
        "checkpoints/step-00000005",
    ];
    for names in [&later[..], &["metrics.jsonl", "checkpoints"]] {
        move_out(names);
        let before = files(&place.path("run"));
        for from in ["auto", "latest", "run", "run/checkpoints/step-00000005"] {
            let line = format!("train merak.toml --max_steps 9 --dry-run --resume {from}");
            let said = place.succeed(&line);
            let lines = said.lines().filter(|line| line.contains("run"));
            let lines: Vec<_> = lines.filter(|line| line.contains(" run")).collect();
            assert_eq!(
                lines[..2],
                [
                    "resumes   run/checkpoints/step-00000005",
                    "puts back the run in run, which a process that was killed had begun to move"
                ],
                "{said}"
            );
        }
        let refused = place.merak("train merak.toml");
        let text = refusal(&refused);
        assert!(text.contains("(checkpoints up to step 5)"), "{text}");
        assert!(files(&place.path("run")) == before);
        place.succeed("train merak.toml --resume auto");
        assert_eq!(steps(&place, "run"), [2, 4, 5]);
    }
}

#[test]
fn two_requests_at_once_are_one_and_the_run_saves() {
    let place = Workplace::new();
    let run = Running::of(place.command(&format!("{ENDLESS} --tp 2")));
    run.send("TERM TERM INT");
    let (status, said) = run.end();
    assert!(matches!(status.code(), Some(143 | 130)), "{status} {said}");
    let saved = Checkpoint::open(place.path("run")).expect("it saved");
    assert!(saved.verify().damage.is_empty());
}

#[test]
fn a_hangup_saves_unless_it_was_ignored_at_the_start() {
    let place = with_a_long_text();
    // A test that is itself started with hangups ignored hands that on to what it starts.
    let mut heeding = Command::new("env");
    let merak = place.command(ENDLESS);
    heeding
        .arg("--default-signal=HUP")
        .arg(merak.get_program())
        .args(merak.get_args())
        .current_dir(place.folder.path())
        .env("MERAK_COST_MODEL", "counted");
    let run = Running::of(heeding);
    run.send("HUP");
    assert_eq!(run.end().0.code(), Some(129));
    assert_eq!(steps(&place, "run").len(), 1);
    let line = format!("{ENDLESS} --output_dir other");
    let run = Running::of(under(&place, "trap '' HUP", &line));
    run.send("HUP");
    thread::sleep(Duration::from_millis(200));
    run.send("TERM");
    assert_eq!(run.end().0.code(), Some(143), "the hangup was ignored");
}

#[test]
fn a_full_disk_ends_the_run_with_status_1_and_leaves_no_draft() {
    let place = Workplace::new();
    for keys in ["--tp 2 --pp 2", "--async_save"] {
        let folder = keys.len();
        // Files of 16 KiB: the shards are larger.
        let line = format!("train merak.toml --max_steps 2 {keys} --output_dir {folder}");
        let full = under(&place, "ulimit -f 32", &line).output();
        let full = place.ended(&full.expect("a shell"));
        assert_eq!(full.status, Some(1), "{}", full.stderr);
        let said = &full.stderr;
        assert!(
            said.contains("failed to save step 2: ") && said.contains(".safetensors"),
            "{said}"
        );
        let left = fs::read_dir(place.path(&folder.to_string()).join("checkpoints"));
        assert_eq!(left.map_or(0, Iterator::count), 0, "{keys}");
    }
}

#[test]
fn a_limit_of_addresses_ends_no_process_by_a_signal() {
    let place = Workplace::new();
    let line = "train merak.toml --dp 8 --gradient_accumulation_steps 1 --max_steps 1 --save false --output_dir";
    for kibibytes in [100_000, 200_000, 400_000, 600_000, 4_000_000] {
        let line = format!("{line} at-{kibibytes}");
        let output = under(&place, &format!("ulimit -v {kibibytes}"), &line).output();
        let ended = place.ended(&output.expect("the command starts"));
        let is_refused = ended.status == Some(2) && ended.stderr.contains("RLIMIT_AS");
        let trains = ended.status == Some(0);
        assert!(is_refused || trains, "{kibibytes} KiB: {}", ended.stderr);
        assert!(trains || kibibytes < 4_000_000, "{}", ended.stderr);
    }
    let line = "schedule 1f1b -p 512 -m 4096";
    let output = under(&place, "ulimit -v 120000", line).output();
    let ended = place.ended(&output.expect("the command starts"));
    let text = refusal(&ended);
    let start = "error: a schedule of 4194304 actions takes 192 MiB, but this process may use ";
    assert!(text.starts_with(start), "{text}");
}

/// The limit on addresses, in KiB, under which a run would begin, as its refusal under a lower one
/// tells.
fn told_limit(text: &str, low: f64) -> f64 {
    let figure = |before: &str| {
        let mut words = text.split(before).nth(1).expect(before).split_whitespace();
        let number = words.next().and_then(|word| word.parse::<f64>().ok());
        let unit = match words.next().expect(before).trim_end_matches(':') {
            "GiB" => 1_048_576.0,
            "MiB" => 1024.0,
            _ => unreachable!("{text}"),
        };
        number.expect(before) * unit
    };
    low + figure(" at least ") - figure(" may use ")
}

#[test]
fn a_run_that_is_not_refused_for_its_addresses_ends_well_and_tells_of_costs_not_measured() {
    let place = Workplace::new();
    let mut unmeasured = 0;
    for (dp, keys) in [
        (1, "--max_steps 3"),
        (8, "--max_steps 2 --async_save true"),
        (32, "--max_steps 1 --dataloader_num_workers 1"),
        (64, "--max_steps 1 --save false"),
    ] {
        let line = format!("train merak.toml --dp {dp} --gradient_accumulation_steps 1 {keys}");
        // What the run said, or where it was refused the limit that it asks for.
        let runs = |limit: f64, costs: &str| {
            let line = format!("{line} --output_dir {dp}-{limit}");
            let mut run = under(&place, &format!("ulimit -v {limit}"), &line);
            run.env("MERAK_COST_MODEL", costs);
            let ended = place.ended(&run.output().expect("the command starts"));
            let is_refused = ended.status == Some(2) && ended.stderr.contains("RLIMIT_AS");
            let what = format!("dp {dp}, {limit} KiB: {:?} {}", ended.status, ended.stderr);
            assert!(ended.status == Some(0) || is_refused, "{what}");
            if is_refused {
                Err(told_limit(&ended.stderr, limit))
            } else {
                Ok(ended.stderr)
            }
        };
        let (mut limit, mut refusals) = (60_000.0, 0);
        // What a thread takes for products is known where there is room to try.
        while let Err(told) = runs(limit, "counted") {
            refusals += 1;
            assert!(
                told > limit && refusals < 6,
                "dp {dp}: {told} after {limit}"
            );
            // The message has three digits.
            limit = (1.006 * told).round();
        }
        let [told, _, with_room] = [102.0, 110.0, 200.0].map(|percent| {
            let limit = (limit * percent / 100.0).round();
            let said = runs(limit, "measured").expect("it begins");
            said.contains("costs are not measured")
        });
        assert!(!with_room, "dp {dp}: {limit}");
        unmeasured += usize::from(told);
    }
    assert!(
        unmeasured > 0,
        "no run had too little room to measure costs"
    );
}

#[test]
fn the_end_compares_its_memory_with_the_larger_of_training_and_evaluation() {
    let place = Workplace::new();
    for keys in ["--pp 1", "--pp 2", "--per_device_eval_batch_size 1"] {
        let said = place.succeed(&format!("train merak.toml --overwrite_output_dir {keys}"));
        let line = said.lines().find(|line| line.starts_with("memory "));
        let words: Vec<_> = line.expect("it is told").split_whitespace().collect();
        let [measured, predicted] = [1, words.len() - 2].map(|at| {
            let unit = if words[at + 1].starts_with("MiB") {
                1024.0
            } else {
                1.0
            };
            unit * words[at].parse::<f64>().expect("a number")
        });
        let ratio = measured / predicted;
        assert!((0.9..1.02).contains(&ratio), "{keys}: {line:?}");
    }
}

#[test]
fn a_file_that_cannot_be_opened_is_named() {
    let place = Workplace::new();
    for limit in 6..12 {
        let line = format!("train merak.toml --max_steps 1 --output_dir {limit}");
        let few = under(&place, &format!("ulimit -n {limit}"), &line).output();
        let few = place.ended(&few.expect("a shell"));
        let named = [
            format!(" {limit}/checkpoints"),
            format!("cannot sync {limit}:"),
        ];
        let is_named = named.iter().any(|named| few.stderr.contains(named))
            && few.stderr.contains("Too many open files");
        assert!(few.status == Some(0) || is_named, "{limit}: {}", few.stderr);
    }
}

#[test]
fn a_removed_folder_is_made_anew_with_its_metrics() {
    let place = with_a_long_text();
    let mut run = Running::of(place.command(ENDLESS));
    // One step takes the folder from its place: a removal of file after file would meet the files
    // that the run writes meanwhile.
    fs::rename(place.path("run"), place.path("gone")).expect("it can be moved");
    fs::remove_dir_all(place.path("gone")).expect("it can be removed");
    let start = Instant::now();
    while !place.path("run/metrics.jsonl").exists() && start.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(10));
    }
    run.read_until("step ");
    run.send("TERM");
    assert_eq!(run.end().0.code(), Some(143));
    let metrics = fs::read_to_string(place.path("run/metrics.jsonl")).expect("records");
    assert!(metrics.starts_with("{\"step\":1,"), "{metrics}");
    assert!(place.path("run/config.resolved.toml").exists());
    assert_eq!(steps(&place, "run").len(), 1);
}

#[test]
fn a_failure_once_a_step_has_run_ends_with_status_1_and_its_place() {
    let place = with_a_long_text();
    let run = Running::of(place.command(&format!("{ENDLESS} --pp 2")));
    // Meanwhile the run would make its folder again.
    run.send("STOP");
    fs::rename(place.path("run"), place.path("old")).expect("it can be renamed");
    place.write("run", "in the way");
    run.send("TERM");
    run.send("CONT");
    let (status, said) = run.end();
    assert_eq!(status.code(), Some(1), "{said}");
    let error = said.lines().last().expect("an error");
    assert!(
        error.starts_with("error: rank 0 (stage 0) failed to save step ")
            && error.contains("run/checkpoints"),
        "{said}"
    );
}

#[test]
fn an_output_folder_gets_checkpoints_and_a_run_that_keeps_nothing_says_so() {
    let place = Workplace::new();
    let text = fs::read_to_string(place.path("merak.toml")).expect("a configuration");
    place.write("merak.toml", &text.replace("save = true\n", ""));
    place.succeed("train merak.toml --max_steps 2");
    assert_eq!(steps(&place, "run"), [2]);
    let nothing = place.succeed("train merak.toml --max_steps 2 --output_dir other --save false");
    assert_eq!(nothing.matches("saved     nothing").count(), 2, "{nothing}");
    assert!(steps(&place, "other").is_empty());
}

#[test]
fn a_run_saves_at_its_interval_at_epochs_ends_and_at_its_own() {
    let place = Workplace::new();
    let saved = |keys: &str| {
        let line = format!("train merak.toml --num_train_epochs 1.5 --max_steps -1 {keys}");
        place.succeed(&line);
        let saved = steps(&place, "run");
        fs::remove_dir_all(place.path("run")).expect("it can be removed");
        saved
    };
    let [epoch, last] = saved("")[..].try_into().expect("two ends");
    let interval = epoch - 1;
    let both = saved(&format!("--save_steps {interval}"));
    assert_eq!(both, [interval, epoch, last]);
}

#[test]
fn a_run_at_its_end_has_nothing_left_to_do() {
    let place = Workplace::new();
    place.succeed("train merak.toml");
    let before = files(&place.path("run"));
    for line in [
        "train merak.toml --resume latest",
        "train merak.toml --resume auto --max_steps 3",
        "train merak.toml --resume auto --dry-run",
    ] {
        let said = place.succeed(line);
        let at = said.find("nothing left to do").expect("it says so");
        assert!(!said.contains("trained "), "{said}");
        if line.ends_with("latest") {
            assert_snapshot!(&said[at..], @r#"
            nothing left to do: run/checkpoints/step-00000005 is at step 5, and "max_steps" ends the run at step 5
            go on     with a larger "max_steps", for example --max_steps 10
            continue  merak generate run/checkpoints/step-00000005 --prompt TEXT
            "#);
        }
    }
    assert!(files(&place.path("run")) == before);
}

#[test]
fn a_run_that_goes_on_in_other_data_says_so_or_is_refused() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 25");
    // The same files elsewhere are the same data.
    fs::rename(place.path("text"), place.path("moved")).expect("it can be renamed");
    let quiet = place.merak("train merak.toml --dry-run --resume auto --data.path moved");
    assert!(
        !quiet.stderr.contains("the data are not"),
        "{}",
        quiet.stderr
    );
    place.write("moved/b.txt", "one more file");
    for line in ["--dry-run --max_steps 26", "--max_steps 26 --tp 2"] {
        let line = format!("train merak.toml --resume latest --data.path moved {line}");
        let warned = place.merak(&line);
        assert_eq!(warned.status, Some(0), "{}", warned.stderr);
        let said = &warned.stderr;
        assert!(
            said.contains("the data are not those that the checkpoint was saved with")
                && said.contains("1 file of ")
                && said.contains("2 files of "),
            "{said}"
        );
    }
    place.write("short/a.txt", &"few words ".repeat(40));
    let behind = "train merak.toml --resume run/checkpoints/step-00000025 --data.path short";
    let refused = place.merak(&format!("{behind} --max_steps 27"));
    assert_snapshot!(refusal(&refused), @r#"error: the checkpoint run/checkpoints/step-00000025 stands at sample 100 of its pass over the data, but there are only 23 now: give the data that it was saved with (1 file of 1956 bytes, names and sizes CHECKSUM, contents CHECKSUM, 116 training samples, tokenizer CHECKSUM of 257 tokens), or set "ignore_data_skip" to begin a pass anew"#);
    place.succeed(&format!("{behind} --ignore_data_skip --max_steps 27"));
}

#[test]
fn a_resumed_run_tells_other_lengths_and_other_contents_apart() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 25");
    let warned = |keys: &str| {
        let line = format!("train merak.toml --resume latest --max_steps 26 --dry-run {keys}");
        let ended = place.merak(&line);
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        ended.stderr
    };
    let other_data = "the data are not those that the checkpoint was saved with";
    let said = warned("--seq_length 8");
    assert!(
        said.contains("\"seq_length\" is not that of the checkpoint")
            && said.contains("saved=16 now=8")
            && !said.contains(other_data),
        "{said}"
    );
    let said = warned("--data.validation_fraction 0");
    assert!(
        said.contains("the same data make another number of training samples")
            && !said.contains(other_data),
        "{said}"
    );
    let other_batch = "a step has another number of samples";
    assert!(!said.contains(other_batch), "{said}");
    let said = warned("--gradient_accumulation_steps 2");
    assert!(
        said.contains(other_batch) && !said.contains(other_data),
        "{said}"
    );
    let behind = place.mistake("train merak.toml --resume latest --max_steps 26 --seq_length 31");
    assert!(
        behind.contains("(\"seq_length\" is 31, and was 16)"),
        "{behind}"
    );
    // The same names and sizes.
    let text = fs::read_to_string(place.path("text/a.txt")).expect("a text");
    place.write("text/a.txt", &text.replacen("every", "never", 1));
    assert!(warned("").contains(other_data));
}

#[test]
fn weights_that_get_the_tokens_of_another_tokenizer_bring_a_warning() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 2");
    let checkpoint = "run/checkpoints/step-00000002";
    let json = fs::read_to_string(place.path(&format!("{checkpoint}/tokenizer.json")));
    let json = json.expect("a checkpoint has its tokenizer");
    let mut other: Value = serde_json::from_str(&json).expect("it is JSON");
    let vocab = &mut other["model"]["vocab"];
    let (e, t) = (vocab["e"].take(), vocab["t"].take());
    (vocab["e"], vocab["t"]) = (t, e);
    place.write("other.json", &other.to_string());
    place.write("same.json", &json);
    let warning = "the tokenizer is not that of the checkpoint";
    let opened = Checkpoint::open(place.path(checkpoint)).expect("it opens");
    export_hf(&opened, place.path("hf"), &ExportOptions::default()).expect("it exports");
    let tuned = "train merak.toml --output_dir tuned --overwrite_output_dir --max_steps 1";
    for line in [
        format!("evaluate merak.toml {checkpoint}"),
        format!("{tuned} --finetune --dry-run --resume {checkpoint}"),
        format!("{tuned} --model.hf_dir hf"),
        format!("{tuned} --model.hf_dir hf --dry-run"),
    ] {
        let warnings = |tokenizer: &str| {
            let ended = place.merak(&format!("{line} --data.tokenizer {tokenizer}"));
            assert_eq!(ended.status, Some(0), "{}", ended.stderr);
            ended.stderr.matches(warning).count()
        };
        assert_eq!(warnings("other.json"), 1, "{line}");
        assert_eq!(warnings("same.json"), 0, "{line}");
    }
    // A run that goes on would train on tokens that its weights know otherwise.
    let goes_on = format!("train merak.toml --max_steps 3 --resume {checkpoint} --data.tokenizer");
    let refused = place.merak(&format!("{goes_on} other.json"));
    assert_snapshot!(refusal(&refused), @r#"error: the checkpoint run/checkpoints/step-00000002 was trained with the tokenizer CHECKSUM of 257 tokens, but the run has the tokenizer CHECKSUM of 257 tokens: set "data.tokenizer" to run/checkpoints/step-00000002/tokenizer.json, or "finetune" to start anew with the weights alone (command line --data.tokenizer)"#);
    place.succeed(&format!("{goes_on} same.json"));
}

#[test]
fn a_resumed_run_says_what_it_trained_itself() {
    let place = Workplace::new();
    let said = place.succeed("train merak.toml");
    assert!(said.contains("\ntrained   5 steps ("), "{said}");
    let said = place.succeed("train merak.toml --max_steps 7 --resume auto");
    assert!(
        said.contains("\ntrained   2 steps up to step 7 ("),
        "{said}"
    );
}

#[test]
fn weights_that_another_model_uses_otherwise_bring_a_warning() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let model = fs::read_to_string(place.path("model.json")).expect("a model");
    let mut other: Value = serde_json::from_str(&model).expect("it is JSON");
    other["layer_norm_epsilon"] = 0.25.into();
    place.write("other.json", &other.to_string());
    let warned = |keys: &str| {
        let ended = place.merak(&format!("evaluate merak.toml run {keys}"));
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        ended.stderr
    };
    let warning = "the weights are not used as the model of the checkpoint uses them";
    assert!(!warned("--pp 2").contains(warning));
    let told = warned("--model.config other.json");
    assert!(
        told.contains(warning) && told.contains("eps 0.25"),
        "{told}"
    );
    let resumed =
        place.merak("train merak.toml --resume auto --max_steps 2 --model.config other.json");
    assert!(resumed.stderr.contains(warning), "{}", resumed.stderr);
}

#[test]
fn text_for_weights_without_a_tokenizer_is_refused_until_one_is_named() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let opened = Checkpoint::open(place.path("run/checkpoints/step-00000001")).expect("it opens");
    export_hf(&opened, place.path("hf"), &ExportOptions::default()).expect("it exports");
    fs::remove_file(place.path("hf/tokenizer.json")).expect("it is there");
    let line = "train merak.toml --output_dir tuned --max_steps 1 --model.hf_dir hf";
    let told = place.mistake(line);
    assert!(told.contains("cannot read hf/tokenizer.json"), "{told}");
    place.succeed(&format!("{line} --data.tokenizer bytes"));
}
