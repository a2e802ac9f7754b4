//! Ranks as processes: what they are told, how their output comes, how they end.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Lines},
    net::TcpListener,
    process::{self, Child, ChildStdout, Command, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use insta::assert_snapshot;
use serde_json::Value;

use super::{Ended, Workplace, processes::rank_in};

/// No launch of these tests takes so long, on a busy machine either.
const DEADLINE: Duration = Duration::from_mins(2);

/// Less than the minute for which ranks of these tests sleep that are to be ended.
const SOON: Duration = Duration::from_secs(40);

/// `merak launch` with options, and a script of the shell as the program.
fn launch(place: &Workplace, options: &str, script: &str) -> Command {
    let mut command = place.command(&format!("launch {options} -- sh -c"));
    command.arg(script);
    command
}

/// Runs a command to its end, which must come before the deadline.
pub(super) fn end(place: &Workplace, command: Command) -> Ended {
    end_within(DEADLINE, place, command)
}

/// The same with a deadline of its own.
pub(super) fn end_within(deadline: Duration, place: &Workplace, mut command: Command) -> Ended {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let (pid, (sender, ended)) = (child.id(), mpsc::channel());
    thread::spawn(move || sender.send(child.wait_with_output()));
    let output = ended.recv_timeout(deadline);
    if output.is_err() {
        kill("KILL", pid);
    }
    let output = output.expect("the command ends before the deadline");
    place.ended(&output.expect("its output is read"))
}

pub(super) fn kill(signal: &str, pid: u32) {
    kill_all(signal, &pid.to_string());
}

/// Sends a signal to some processes at once, whose numbers have blanks between them.
pub(super) fn kill_all(signal: &str, pids: &str) {
    let script = format!("kill -{signal} {pids}");
    let sent = Command::new("sh").arg("-c").arg(script).status();
    assert!(sent.expect("a shell").success());
}

/// A launch under way, whose standard output is read.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn of(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the command starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, lines }
    }

    /// The next lines, as many as there are ranks, sorted.
    fn lines(&mut self, count: usize) -> Vec<String> {
        let lines = self.lines.by_ref().take(count);
        let mut lines: Vec<_> = lines.map_while(Result::ok).collect();
        assert_eq!(lines.len(), count, "{lines:?}");
        lines.sort();
        lines
    }

    fn end(mut self) -> (Option<i32>, Vec<String>) {
        let rest = self.lines.map_while(Result::ok).collect();
        let status = self.child.wait().expect("it ends");
        (status.code(), rest)
    }
}

/// Whether a process runs; one that nobody has asked how it ended does not.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}

fn expect_none_runs(pids: impl IntoIterator<Item = u32>) {
    let start = Instant::now();
    for pid in pids {
        while runs(pid) {
            assert!(start.elapsed() < SOON, "process {pid} is left over");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Some ports in a row that nobody has. The system gives out higher ones, and other tests of this
/// process and most of other processes take others.
fn ports_in_a_row(count: u32) -> Vec<u32> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let first = 10_000 + process::id() % 500 * 20 + NEXT.fetch_add(count, Ordering::Relaxed);
        let ports: Vec<_> = (first..first + count).collect();
        let is_free = |port: &u32| TcpListener::bind(("127.0.0.1", *port as u16)).is_ok();
        if ports.iter().all(is_free) {
            return ports;
        }
    }
}

/// The numbers at the ends of lines.
fn numbers(lines: &[String]) -> Vec<u32> {
    let last = |line: &String| line.rsplit(' ').next()?.parse().ok();
    lines.iter().filter_map(last).collect()
}

#[test]
fn every_rank_is_told_its_place_and_prints_after_its_number() {
    let place = Workplace::new();
    let script = "echo $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT; \
                  echo of $RANK >&2; printf unfinished";
    let port = ports_in_a_row(1)[0].to_string();
    let options = format!("-n 3 --master-port {port}");
    let ended = end(&place, launch(&place, &options, script));
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines.join("\n")
    };
    assert_snapshot!(sorted(&ended.stdout).replace(&port, "PORT"), @r"
    [rank 0] 3 0 3 127.0.0.1 PORT
    [rank 0] unfinished
    [rank 1] 3 1 3 127.0.0.1 PORT
    [rank 1] unfinished
    [rank 2] 3 2 3 127.0.0.1 PORT
    [rank 2] unfinished
    ");
    assert_snapshot!(sorted(&ended.stderr), @r"
    [rank 0] of 0
    [rank 1] of 1
    [rank 2] of 2
    ");
}

#[test]
fn a_result_of_a_command_of_merak_comes_as_it_is() {
    let place = Workplace::new();
    for name in ["", "merak "] {
        let line = format!("launch -n 1 -- {name}schedule 1f1b -p 2 -m 2 --format json");
        let ended = end(&place, place.command(&line));
        let document: Value = serde_json::from_str(&ended.stdout).expect("one document");
        assert_eq!(document["ranks"], 2);
    }
    // Nothing but `--` parts the options.
    let bare = end(&place, place.command("launch -n 1 schedule 1f1b -p 2 -m 2"));
    assert_eq!(bare.status, Some(0), "{}", bare.stderr);
}

#[test]
fn the_status_is_that_of_the_rank_that_failed_first_and_the_others_are_ended() {
    let place = Workplace::new();
    let script = "if [ $RANK = 1 ]; then echo no >&2; exit 7; fi; sleep 60";
    let start = Instant::now();
    let ended = end(&place, launch(&place, "-n 3", script));
    assert_eq!(ended.status, Some(7));
    assert_eq!(
        ended.stderr,
        "[rank 1] no\nerror: rank 1 ended with status 7\n"
    );
    assert!(start.elapsed() < SOON);
    // A survivor of merak's ends with 3, maybe before the rank that failed.
    let script = "if [ $RANK = 1 ]; then sleep 0.3; kill -SEGV $$; fi; exit 3";
    let ended = end(&place, launch(&place, "-n 3", script));
    assert_eq!(ended.status, Some(139));
    assert_eq!(ended.stderr, "error: rank 1 was ended by SIGSEGV\n");
}

#[test]
fn a_rank_that_does_not_end_when_told_is_killed_with_what_it_has_started() {
    let place = Workplace::new();
    let script = "if [ $RANK = 1 ]; then until [ -e begun ]; do sleep 0.05; done; exit 1; fi; \
                  trap '' TERM; sleep 60 & echo $!; echo $$; : >begun; wait; sleep 60";
    let command = launch(&place, "-n 2 --grace-s 0.3", script);
    let start = Instant::now();
    let ended = end(&place, command);
    assert_eq!(ended.status, Some(1), "{}", ended.stderr);
    assert!(start.elapsed() < SOON);
    let lines: Vec<_> = ended.stdout.lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    expect_none_runs(numbers(&lines));
}

#[test]
fn signals_reach_every_rank_once() {
    let place = Workplace::new();
    for (signal, status) in [("INT", 130), ("TERM", 143), ("USR1", 138)] {
        let script = format!(
            "trap 'echo got; exit {status}' {signal}; echo ready; while :; do sleep 0.05; done"
        );
        let mut running = Running::of(launch(&place, "-n 2 --max-restarts 5", &script));
        assert_eq!(running.lines(2), ["[rank 0] ready", "[rank 1] ready"]);
        kill(signal, running.child.id());
        let (ended, mut rest) = running.end();
        rest.sort();
        assert_eq!(
            (ended, &rest[..]),
            (
                Some(status),
                &["[rank 0] got".to_owned(), "[rank 1] got".to_owned()][..]
            )
        );
    }
    // A rank that stops cleanly has not failed.
    let script = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut running = Running::of(launch(&place, "-n 2", script));
    running.lines(2);
    kill("TERM", running.child.id());
    assert_eq!(running.end().0, Some(0));
}

#[test]
fn ranks_that_ignore_every_request_are_ended_by_the_third() {
    let place = Workplace::new();
    let script = "trap '' INT TERM USR1; echo $$; while :; do sleep 0.05; done";
    let mut running = Running::of(launch(&place, "-n 2 --grace-s 0.2", script));
    let pids = numbers(&running.lines(2));
    // Signals of a kind that come at once are one.
    for signal in ["INT", "TERM", "USR1"] {
        kill(signal, running.child.id());
    }
    assert_eq!(running.end().0, Some(137));
    expect_none_runs(pids);
}

#[test]
fn nothing_is_left_over_when_the_launch_is_killed() {
    let place = Workplace::new();
    // A rank, and a process that it has started and waits for.
    let script = "trap '' TERM HUP; sleep 300 & echo $$; echo $!; wait; sleep 300";
    let mut running = Running::of(launch(&place, "-n 3", script));
    let pids = numbers(&running.lines(6));
    assert!(pids.len() == 6 && pids.iter().all(|&pid| runs(pid)));
    running.child.kill().expect("it is a child of ours");
    expect_none_runs(pids);
    assert_eq!(running.end().0, None);
}

#[test]
fn ranks_start_again_on_a_new_port_until_they_succeed_or_the_restarts_are_used() {
    let place = Workplace::new();
    let script = "echo $MASTER_PORT $TORCHELASTIC_RESTART_COUNT; \
                  if [ $TORCHELASTIC_RESTART_COUNT != 2 ]; then exit 5; fi";
    let ended = end(&place, launch(&place, "-n 1 --max-restarts 3", script));
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.lines().count(), 3);
    let ports: Vec<_> = ended.stdout.split_whitespace().skip(2).step_by(4).collect();
    assert!(ports[0] != ports[1] && ports[1] != ports[2], "{ports:?}");
    let told: Vec<_> = ended
        .stderr
        .lines()
        .map(|line| line.rsplit(": ").next())
        .collect();
    assert_eq!(
        told,
        [
            Some("all ranks are started again, restart 1 of 3"),
            Some("all ranks are started again, restart 2 of 3")
        ]
    );
    let ended = end(
        &place,
        launch(&place, "-n 2 --max-restarts 1", "sleep 0.1; exit 5"),
    );
    assert_eq!(ended.status, Some(5));
    let last = ended.stderr.lines().last().expect("an error");
    assert!(
        last.ends_with("ended with status 5, after 1 restart"),
        "{last}"
    );
    let script = "echo $MASTER_PORT; exit 1";
    let free = ports_in_a_row(3);
    let options = format!("-n 1 --max-restarts 2 --master-port {}", free[0]);
    let ended = end(&place, launch(&place, &options, script));
    let ports: Vec<_> = ended.stdout.lines().map(str::to_owned).collect();
    assert_eq!(numbers(&ports), free);
}

#[test]
fn a_restart_passes_over_ports_that_are_taken_and_none_left_keeps_the_status_of_the_rank() {
    let place = Workplace::new();
    let free = ports_in_a_row(3);
    let taken = TcpListener::bind(("127.0.0.1", free[1] as u16)).expect("a port");
    let options = format!("-n 1 --max-restarts 1 --master-port {}", free[0]);
    let command = launch(&place, &options, "echo $MASTER_PORT; exit 5");
    let ended = end(&place, command);
    drop(taken);
    assert_eq!(ended.status, Some(5), "{}", ended.stderr);
    let ports: Vec<_> = ended.stdout.lines().map(str::to_owned).collect();
    assert_eq!(numbers(&ports), [free[0], free[2]]);
    let command = launch(
        &place,
        "-n 1 --max-restarts 3 --master-port 65535",
        "exit 5",
    );
    let ended = end(&place, command);
    assert_eq!(ended.status, Some(5), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("no port of 127.0.0.1 after 65535")
            && ended
                .stderr
                .ends_with("error: rank 0 ended with status 5\n"),
        "{}",
        ended.stderr
    );
}

#[test]
fn the_rank_that_alone_got_a_signal_is_named() {
    let place = Workplace::new();
    for rank in [2, 0] {
        let line = format!(
            "launch -n 3 -- train merak.toml --dp 3 --max_steps 100000 --output_dir run-{rank}"
        );
        let command = place.command(&line);
        let ended = thread::scope(|scope| {
            scope.spawn(|| {
                let records = place.path(&format!("run-{rank}/metrics.jsonl"));
                while !fs::read(&records).is_ok_and(|records| !records.is_empty()) {
                    thread::sleep(Duration::from_millis(5));
                }
                kill("INT", rank_in(place.folder.path(), rank));
            });
            end(&place, command)
        });
        assert_eq!(ended.status, Some(130), "{}", ended.stderr);
        let last = ended.stderr.lines().last();
        let named = format!("error: rank {rank} ended with status 130");
        assert_eq!(last, Some(&*named), "{}", ended.stderr);
        assert!(!ended.stderr.contains("SIGTERM"), "{}", ended.stderr);
    }
}

/// The first step after a restart of the training by `keys`, whose only rank is killed at step 12;
/// it is ended after that step.
fn step_after_a_kill(place: &Workplace, keys: &str) -> u32 {
    let line =
        format!("launch -n 1 --max-restarts 1 -- train merak.toml --max_steps 100000 {keys}");
    let mut child = place
        .command(&line)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let launch = child.id();
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let mut read_until = |text: &str| {
        let mut seen = Vec::new();
        for line in lines.by_ref().map_while(Result::ok) {
            if line.contains(text) {
                return line;
            }
            seen.push(line);
        }
        unreachable!("no line has {text}: {seen:?}");
    };
    read_until("[rank 0] step 12");
    let children = format!("/proc/{launch}/task/{launch}/children");
    let rank = fs::read_to_string(children).expect("Linux lists children");
    // The guard comes first.
    let rank = rank.split_whitespace().last().map(str::parse);
    kill("KILL", rank.expect("a rank").expect("a number"));
    let told = read_until("all ranks are started again");
    assert!(told.contains("rank 0 was ended by SIGKILL"), "{told}");
    let first = read_until("[rank 0] step ");
    kill("TERM", launch);
    read_until("SIGTERM (`merak launch` sends it where a rank has failed, or where it is to end");
    drop(lines);
    assert_eq!(child.wait().expect("it ends").code(), Some(143));
    let number = first.trim_start_matches("[rank 0] step").trim_start();
    let digits = number.split(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).expect(&first)
}

#[test]
fn a_training_that_is_killed_goes_on_from_its_last_checkpoint() {
    let place = Workplace::new();
    let step = step_after_a_kill(&place, "--save_steps 5 --save_total_limit 2");
    assert!(step > 10, "it goes on: {step}");
    assert!(!place.path("run/earlier-run-1").exists());
}

#[test]
fn before_its_first_checkpoint_a_killed_training_begins_again_from_that_of_another_run() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 3 --output_dir other");
    let step = step_after_a_kill(&place, "--save_steps 50000 --resume other");
    assert_eq!(step, 4);
    assert!(place.path("run/earlier-run-1/metrics.jsonl").exists());
}

#[test]
fn a_command_that_cannot_be_launched_is_refused_with_what_can() {
    let place = Workplace::new();
    let told = |line: &str| place.mistake(&format!("launch {line}"));
    assert_snapshot!(told("-n 2 -- trian merak.toml"), @r#"error: "trian" is neither a command of merak nor a program that is found; did you mean "train"?"#);
    assert_snapshot!(told("-n 2 -- ./no-program"), @r#"error: "./no-program" is neither a command of merak nor a program that is found"#);
    assert_snapshot!(told("-n 2 -- launch -n 2 -- train"), @"error: `merak launch` starts other commands, not itself");
    assert_snapshot!(told("-n 2 -- merak"), @"error: no command after the options: write merak launch -n 2 -- train CONFIG");
    assert_snapshot!(told("-n 2 -- ./merak.toml"), @r#"error: cannot start rank 0 as ./merak.toml: Permission denied (os error 13)"#);
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let in_use =
        told(&format!("-n 2 --master-port {port} -- doctor")).replace(&port.to_string(), "PORT");
    assert_snapshot!(in_use, @"error: --master-port PORT: port PORT of 127.0.0.1 cannot be taken (Address already in use (os error 98)): choose another, or leave the option out for a free one");
    for (line, expected) in [
        (
            "-n 0",
            "'--processes <N>': expected a whole number from 1 to 1024",
        ),
        (
            "-n 1025",
            "'--processes <N>': expected a whole number from 1 to 1024",
        ),
        (
            "-n two",
            "'--processes <N>': expected a whole number from 1 to 1024",
        ),
        (
            "-n -1",
            "'--processes <N>': expected a whole number from 1 to 1024",
        ),
        (
            "-n 2 --max-restarts -1",
            "'--max-restarts <R>': expected a whole number from 0 to 10000",
        ),
        (
            "-n 2 --master-port 65536",
            "'--master-port <P>': expected a whole number from 1 to 65535",
        ),
        (
            "-n 2 --grace-s -1",
            "'--grace-s <SECONDS>': expected seconds from 0 to 86400",
        ),
    ] {
        let told = told(&format!("{line} -- doctor"));
        let first = told.lines().next().expect("a line");
        assert!(first.starts_with("error: invalid value '"), "{told}");
        assert!(first.ends_with(expected), "{told}");
        assert!(!told.contains("<COMMAND>"), "{told}");
    }
    told("-n 2");
    told("-- doctor");
    assert_snapshot!(told("-n 2 -- help train"), @"error: help needs no ranks: write `merak help`");
    assert_snapshot!(told("-n 2 -- merak --help"), @"error: --help needs no ranks: write `merak --help`");
}

#[test]
fn what_all_processes_meet_is_told_once() {
    let place = Workplace::new();
    for (line, told) in [
        (
            "train merak.toml --dp 2",
            "dp 2 x tp 1 x pp 1 x sp 1 = 2, but the world has 3 ranks; nearest that fits: \
             dp 3 x tp 1 x pp 1 x sp 1",
        ),
        (
            "train merak.toml --dp 3 --hidden 4",
            "unknown key \"hidden\" (command line --hidden); did you mean \"hidden_size\"?",
        ),
        (
            "train merak.toml --dp 3 --distributed.engine threads",
            "the engine threads does not fit: its ranks are threads of one process, but WORLD_SIZE \
             asks for 3 processes: choose auto, or start one process",
        ),
        (
            "bench gpt",
            "merak bench runs its ranks as threads of one process, but WORLD_SIZE says that 3 were \
             started: start one",
        ),
        (
            "train merak.toml --dp 3 --distributed.timeout_s 0",
            "\"distributed.timeout_s\" is 0 (command line --distributed.timeout_s), but must be \
             more than 0 and at most 1e9",
        ),
        (
            "train merak.toml --tp 3",
            "transformer.h.0.attn.c_attn: 16 output features cannot be split over tp = 3 \
             (default col_para_list \"attn.c_attn\"): choose \"tp\" \
             among 1, 2 (command line --tp)",
        ),
        (
            "train merak.toml --dp 3 --log x==",
            "--log \"x==\": invalid filter directive: too many '=' in filter directive, expected 0 or 1",
        ),
    ] {
        let ended = end(&place, place.command(&format!("launch -n 3 -- {line}")));
        assert_eq!(ended.status, Some(2), "{}", ended.stderr);
        let expected = format!("[rank 0] error: {told}\nerror: rank 0 ended with status 2\n");
        assert_eq!(ended.stderr, expected);
    }
    assert!(!place.path("run").exists());
}

#[test]
fn half_an_environment_is_told_and_a_world_of_one_is_a_process() {
    let place = Workplace::new();
    let half = |variables: &[(&str, &str)]| {
        let mut command = place.command("train merak.toml --max_steps 1");
        command.envs(variables.iter().copied());
        end(&place, command)
    };
    let ended = half(&[("RANK", "3"), ("WORLD_SIZE", "4")]);
    assert_eq!(ended.status, Some(2));
    assert_eq!(
        ended.stderr,
        "error: WORLD_SIZE is set, but MASTER_ADDR and MASTER_PORT are not: set MASTER_ADDR to the \
         host of rank 0 and MASTER_PORT to a free port on the host of rank 0, or unset RANK and \
         WORLD_SIZE to run this process by itself\n"
    );
    let ended = half(&[("RANK", "3")]);
    assert_eq!(
        ended.stderr,
        "error: RANK is set, but WORLD_SIZE is not: set WORLD_SIZE to the number of processes, or \
         unset RANK to run this process by itself\n"
    );
    // A world of one is a process with ranks of its own, and so is a job's script.
    assert_eq!(half(&[("RANK", "0"), ("WORLD_SIZE", "1")]).status, Some(0));
    let mut command = place.command("launch -n 2 -- train merak.toml");
    command.envs([
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
    ]);
    let nested = end(&place, command);
    assert_eq!(nested.status, Some(2));
    assert!(
        nested.stderr.contains("SLURM has started 2 processes"),
        "{}",
        nested.stderr
    );
}

#[test]
fn a_process_that_cannot_join_tells_those_that_wait_for_it() {
    let place = Workplace::new();
    let port = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = port.local_addr().expect("an address").port();
    let rank = |rank: &str| {
        let mut command = place.command("train merak.toml --dp 3 --distributed.timeout_s 100");
        command.envs([
            ("RANK", rank),
            ("WORLD_SIZE", "3"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port.to_string()),
        ]);
        command
    };
    // All end long before rank 2 could be missed.
    let told = thread::scope(|scope| {
        let ranks = ["0", "1", "7"].map(rank);
        let ends = ranks.map(|command| scope.spawn(|| end(&place, command)));
        ends.map(|end| end.join().expect("it ends"))
    });
    for ended in &told {
        assert_eq!(ended.status, Some(2), "{}", ended.stderr);
        let reason = "RANK is \"7\", but should be below the world size of 3\n";
        assert!(ended.stderr.ends_with(reason), "{}", ended.stderr);
    }
    let first = &told[0].stderr;
    assert!(
        first.starts_with("error: rank 0 cannot meet the others at 127.0.0.1:")
            && first.contains(" cannot join: RANK is"),
        "{first}"
    );
}

#[test]
fn a_rank_tells_itself_what_rank_0_may_not_meet() {
    let place = Workplace::new();
    let told = |line: &str, variables: &[(&str, &str)]| {
        let mut command = place.command(line);
        command.envs(variables.iter().copied());
        let ended = end(&place, command);
        assert_eq!(ended.status, Some(2));
        ended.stderr
    };
    let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "2")];
    assert_eq!(
        told("train merak.toml --dp 2", &pmi),
        "[rank 1] error: the engine tcp does not fit: PMI_SIZE asks for 2 processes, and nothing \
         says on which host rank 0 is: set MASTER_ADDR to it\n"
    );
    let all = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29501"),
    ];
    let by_threads = told("train merak.toml --dp 2 --distributed.engine threads", &all);
    assert!(
        by_threads.starts_with("[rank 1] error: the engine threads does not fit"),
        "{by_threads}"
    );
    let usage = told("evaluate merak.toml", &all);
    assert!(usage.contains("<CHECKPOINT>"), "{usage}");
    let filter = told("train merak.toml --log x==", &all);
    assert!(filter.contains("invalid filter directive"), "{filter}");
}

#[test]
fn what_needs_no_ranks_is_printed_once() {
    let place = Workplace::new();
    for line in [
        "config merak.toml",
        "schedule 1f1b -p 2 -m 2",
        "trace model.json",
    ] {
        let alone = place.succeed(line);
        let ended = end(&place, place.command(&format!("launch -n 3 -- {line}")));
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        assert_eq!(ended.stdout, alone);
    }
    let ended = end(&place, place.command("launch -n 3 -- doctor --json"));
    let document: Value = serde_json::from_str(&ended.stdout).expect("one document");
    assert_eq!(
        (&document["rank"], &document["world_size"]),
        (&0.into(), &3.into())
    );
    let ended = end(&place, place.command("launch -n 3 -- config no.toml"));
    assert_eq!(ended.status, Some(2));
    assert_eq!(
        ended.stderr.matches("no.toml").count(),
        1,
        "{}",
        ended.stderr
    );
}

#[test]
fn an_engine_of_processes_for_one_process_is_refused_with_the_launch_to_write() {
    let place = Workplace::new();
    let line = "train merak.toml --dp 2 --tp 2 --distributed.engine tcp --set data.path=text";
    assert_snapshot!(place.mistake(line), @r#"error: "distributed.engine" is tcp (command line --distributed.engine), whose ranks are processes, but one process was started for 4 ranks: write `merak launch -n 4 -- train merak.toml --dp 2 --tp 2 --distributed.engine tcp --set data.path=text`, or choose auto, whose ranks are then threads"#);
    // One rank is a world of its own on every engine.
    place.succeed("train merak.toml --max_steps 1 --distributed.engine tcp");
}

#[test]
fn ranks_have_a_run_of_their_own_name_and_no_agent() {
    let place = Workplace::new();
    let script = "echo $TORCHELASTIC_RUN_ID $TORCHELASTIC_USE_AGENT_STORE $GROUP_RANK";
    let ids = || {
        let mut command = launch(&place, "-n 2", script);
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        let ended = end(&place, command);
        let ids = ended
            .stdout
            .lines()
            .map(|line| line["[rank 0] ".len()..].to_owned());
        ids.collect::<BTreeSet<_>>()
    };
    let (first, second) = (ids(), ids());
    assert_eq!((first.len(), second.len()), (1, 1));
    assert_ne!(first, second);
    assert!(first.iter().all(|words| words.split(' ').count() == 2));
}
