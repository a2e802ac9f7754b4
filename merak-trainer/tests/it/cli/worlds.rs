//! Processes that do not make a world, that speak of the engine in use, or that leave a world of
//! real ranks.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use insta::assert_snapshot;

use super::{
    Ended, MERAK, Workplace,
    launch::{end, kill},
    processes::{end_all, free_port, rank_in, tell_place},
};

/// A command on some processes, each of which believes in its own number of processes.
fn in_worlds(place: &Workplace, line: &str, sizes: &[usize]) -> Vec<Ended> {
    let port = free_port();
    let command = |(rank, size): (usize, &usize)| {
        let mut command = place.command(line);
        tell_place(&mut command, rank, *size, port);
        command
    };
    end_all(place, sizes.iter().enumerate().map(command).collect())
}

#[test]
fn an_engine_that_is_not_built_in_is_refused_by_every_command() {
    let place = Workplace::new();
    for engine in ["mpi", "nccl"] {
        let has_mpi = cfg!(feature = "mpi") && engine == "mpi";
        let is_built = has_mpi || cfg!(feature = "nccl") && engine == "nccl";
        if is_built {
            continue;
        }
        let told = format!(
            "error: the engine {engine} is not in this build: build with --features {engine}, or \
             choose threads"
        );
        let line = format!("train merak.toml --dp 2 --distributed.engine {engine}");
        let alone = place.mistake(&line);
        assert!(alone.starts_with(&told), "{alone}");
        // Printed once, by the first of two processes.
        let launched = end(&place, place.command(&format!("launch -n 2 -- {line}")));
        assert_eq!(launched.status, Some(2), "{}", launched.stderr);
        assert_eq!(
            launched.stderr.matches(&told).count(),
            1,
            "{}",
            launched.stderr
        );
        // What the environment says holds for the commands without a file too.
        for line in ["generate run --prompt fn", "bench collectives --bytes 48"] {
            let mut command = place.command(line);
            command.env("MERAK_DISTRIBUTED__ENGINE", engine);
            let ended = end(&place, command);
            assert_eq!(ended.status, Some(2), "{line}: {}", ended.stderr);
            assert!(ended.stderr.starts_with(&told), "{line}: {}", ended.stderr);
        }
    }
    assert!(!place.path("run").exists());
}

#[test]
#[cfg(feature = "nccl")]
fn the_bench_of_nccl_says_what_it_lacks() {
    let place = Workplace::new();
    let told = "error: no NCCL library: /nowhere/libnccl.so.2: ";
    for starter in ["", "launch -n 2 -- "] {
        let mut command = place.command(&format!("{starter}bench collectives --engine nccl"));
        command.env("MERAK_DISTRIBUTED__NCCL_LIBRARY", "/nowhere/libnccl.so.2");
        let ended = end(&place, command);
        assert_eq!(ended.status, Some(2), "{}", ended.stderr);
        assert_eq!(ended.stderr.matches(told).count(), 1, "{}", ended.stderr);
        assert_eq!(ended.stdout, "");
    }
    assert_snapshot!(place.mistake("bench collectives --engine nccl --world 2"), @"error: the ranks of the engine nccl are processes, but one process was started for 2 ranks: write `merak launch -n 2 -- bench collectives --engine nccl --world 2`, or choose threads or tcp");
}

#[test]
fn generation_reads_the_engine_from_the_environment() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let line = "generate run --prompt fn --tp 2 --json";
    let alone = |value: &str| {
        let mut command = place.command(line);
        command.env("MERAK_DISTRIBUTED__ENGINE", value);
        end(&place, command)
    };
    let by_threads = place.succeed(line);
    assert_eq!(alone("threads").stdout, by_threads);
    assert_snapshot!(alone("tcp").stderr, @r#"error: "distributed.engine" is tcp (environment MERAK_DISTRIBUTED__ENGINE), whose ranks are processes, but one process was started for 2 ranks: write `merak launch -n 2 -- generate run --prompt fn --tp 2 --json`, or choose auto, whose ranks are then threads"#);
    let mut command = place.command(&format!("launch -n 2 -- {line}"));
    command.env("MERAK_DISTRIBUTED__ENGINE", "tcp");
    let launched = end(&place, command);
    assert_eq!(launched.status, Some(0), "{}", launched.stderr);
    assert_eq!(launched.stdout, by_threads);
    // One rank waits for the other as long as the environment says.
    let mut command = place.command(line);
    tell_place(&mut command, 0, 2, free_port());
    command.env("MERAK_DISTRIBUTED__TIMEOUT_S", "0.5");
    let ended = end(&place, command);
    assert_eq!(ended.status, Some(3), "{}", ended.stderr);
    let told = "error: no answer within 500ms: rank 0 of the world of 2 at 127.0.0.1:";
    assert!(ended.stderr.starts_with(told), "{}", ended.stderr);
    let told = " waits for the first word of rank 1: start all ranks within \
                \"distributed.timeout_s\", or raise it\n";
    assert!(ended.stderr.ends_with(told), "{}", ended.stderr);
    let mut command = place.command("bench collectives --bytes 48");
    tell_place(&mut command, 0, 2, free_port());
    command.env("MERAK_DISTRIBUTED__TIMEOUT_S", "0.5");
    let ended = end(&place, command);
    assert_eq!(ended.status, Some(3), "{}", ended.stderr);
    let told = "error: no answer within 500ms: ";
    assert!(ended.stderr.starts_with(told), "{}", ended.stderr);
    let mut command = place.command(line);
    command.env("MERAK_DISTRIBUTED__ENGIN", "tcp");
    let ended = end(&place, command);
    assert_eq!(ended.status, Some(2), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("MERAK_DISTRIBUTED__ENGIN"),
        "{}",
        ended.stderr
    );
}

#[test]
fn the_doctor_speaks_of_the_engine_in_use_and_tries_it() {
    let place = Workplace::new();
    let asked = |name: &str, value: &str| {
        let mut command = place.command("doctor --json");
        command.env(name, value);
        let ended = end(&place, command);
        let found: serde_json::Value = serde_json::from_str(&ended.stdout).expect("a document");
        let of = |name: &str| found[name].as_str().expect("a text").to_owned();
        (ended.status, of("engine"), of("trial"))
    };
    let (passed, of) = ("passed".to_owned(), |engine: &str| engine.to_owned());
    let engine = "MERAK_DISTRIBUTED__ENGINE";
    assert_eq!(
        asked(engine, "auto"),
        (Some(0), of("threads"), passed.clone())
    );
    assert_eq!(asked(engine, "tcp"), (Some(0), of("tcp"), passed));
    let (status, found, trial) = asked(engine, "gloo");
    assert_eq!(status, Some(1));
    assert!(found.contains(engine) && found == trial, "{found}, {trial}");
    if !cfg!(feature = "nccl") {
        let (status, found, trial) = asked(engine, "nccl");
        assert_eq!(status, Some(1));
        assert!(
            found.starts_with("the engine nccl is not in this build"),
            "{found}"
        );
        assert_eq!(found, trial);
    }
}

#[test]
fn processes_with_other_numbers_of_processes_are_named_by_rank_0() {
    let place = Workplace::new();
    let line = "train merak.toml --dp 2 --max_steps 1";
    let ended = in_worlds(&place, line, &[2, 3]);
    let told = &ended[0].stderr;
    assert!(
        told.starts_with("error: rank 0 cannot meet the others")
            && told.ends_with("says that the world has 3 ranks, rank 0 that it has 2\n"),
        "{told}"
    );
    for ended in &ended {
        assert_eq!(ended.status, Some(2), "{}", ended.stderr);
    }
    assert!(!place.path("run").exists());
}

/// Waits until as many processes are connected with a port of this machine.
fn wait_for_connections(port: u16, num: usize) {
    let own = format!(":{port:04X}");
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let table = fs::read_to_string("/proc/net/tcp").expect("Linux lists its sockets");
        let is_connected = |line: &&str| {
            let mut words = line.split_whitespace().skip(1);
            let here = words.next().is_some_and(|here| here.ends_with(&own));
            here && words.nth(1) == Some("01")
        };
        if table.lines().filter(is_connected).count() == num {
            return;
        }
        assert!(Instant::now() < deadline, "nobody has come to port {port}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_0_that_is_killed_while_the_ranks_meet_is_named_by_the_others_which_end_with_3() {
    let place = Workplace::new();
    let port = free_port();
    let line = "train merak.toml --dp 4 --distributed.timeout_s 60";
    // Rank 3 never comes.
    let commands = (0..3).map(|rank| {
        let mut command = place.command(line);
        tell_place(&mut command, rank, 4, port);
        command
    });
    let start = Instant::now();
    let ended = thread::scope(|scope| {
        let ended = scope.spawn(|| end_all(&place, commands.collect()));
        wait_for_connections(port, 2);
        // Both hear who listens there at once.
        thread::sleep(Duration::from_millis(500));
        kill("KILL", rank_in(place.folder.path(), 0));
        ended.join().expect("they end")
    });
    assert!(start.elapsed() < Duration::from_secs(50));
    for (rank, ended) in ended.iter().enumerate().skip(1) {
        let told = format!(
            "[rank {rank}] error: rank 0 failed: its process ended before all ranks had come (rank \
             {rank} waits for them at 127.0.0.1:{port})\n"
        );
        assert_eq!((ended.status, &*ended.stderr), (Some(3), &*told));
    }
    assert!(!place.path("run").exists());
}

#[test]
fn a_rank_that_does_not_come_is_named_by_the_others_which_end_with_3() {
    let place = Workplace::new();
    let port = free_port();
    let commands = (0..2).map(|rank| {
        let mut command = place.command("train merak.toml --dp 3 --distributed.timeout_s 3");
        tell_place(&mut command, rank, 3, port);
        command
    });
    let ended = end_all(&place, commands.collect());
    let late = format!(
        "no answer within 3s: rank 0 of the world of 3 at 127.0.0.1:{port} waits for the first \
         word of rank 2"
    );
    let told = [
        format!("error: {late}: start all ranks within \"distributed.timeout_s\", or raise it\n"),
        format!("[rank 1] error: rank 2 failed: {late}\n"),
    ];
    for (ended, told) in ended.iter().zip(told) {
        assert_eq!((ended.status, &*ended.stderr), (Some(3), &*told));
    }
}

#[test]
fn a_second_run_on_a_port_is_refused_and_the_first_one_goes_on() {
    let place = Workplace::new();
    let port = free_port();
    let start = |line: &str| {
        [0, 1].map(|rank| {
            let mut command = place.command(line);
            tell_place(&mut command, rank, 2, port);
            command
        })
    };
    let first = start("train merak.toml --dp 2 --max_steps 100000 --output_dir first");
    let ended = thread::scope(|scope| {
        let first = scope.spawn(|| end_all(&place, first.into()));
        let records = place.path("first/metrics.jsonl");
        while !fs::read(&records).is_ok_and(|records| !records.is_empty()) {
            thread::sleep(Duration::from_millis(5));
        }
        let [second, _] = start("train merak.toml --dp 2 --max_steps 1 --output_dir second");
        let second = end(&place, second);
        let told = format!("holds port {port}: give each run a port of its own");
        assert!(second.stderr.contains(&told), "{}", second.stderr);
        assert_eq!(
            second.stderr.matches("error: ").count(),
            1,
            "{}",
            second.stderr
        );
        assert!(matches!(second.status, Some(1 | 2)));
        kill("INT", rank_in(place.folder.path(), 0));
        first.join().expect("it ends")
    });
    for ended in ended {
        assert_eq!(ended.status, Some(130), "{}", ended.stderr);
    }
    assert!(!place.path("second").exists());
}

#[test]
fn a_stranger_at_the_port_of_a_run_is_dropped_and_the_run_goes_on() {
    let place = Workplace::new();
    let port = free_port();
    let [first, second] = [0, 1].map(|rank| {
        let mut command = place.command("train merak.toml --dp 2 --max_steps 1");
        tell_place(&mut command, rank, 2, port);
        command
    });
    let ended = thread::scope(|scope| {
        let first = scope.spawn(|| end(&place, first));
        let mut stranger = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                // Until rank 0 listens, a socket may have the port itself, and be its own peer.
                Ok(stranger) if stranger.local_addr().ok() != stranger.peer_addr().ok() => {
                    break stranger;
                }
                _ => thread::sleep(Duration::from_millis(5)),
            }
        };
        let patience = stranger.set_read_timeout(Some(Duration::from_mins(1)));
        patience.expect("it is longer than none");
        let sent = stranger.write_all(b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n");
        sent.expect("rank 0 listens");
        let mut answer = Vec::new();
        // It is dropped with words of its own unread, which may count as a broken connection.
        let dropped = stranger.read_to_end(&mut answer).err();
        let dropped = dropped.is_none_or(|error| error.kind() != ErrorKind::WouldBlock);
        assert!(dropped && answer.len() < 200, "a stranger learns little");
        let second = end(&place, second);
        [first.join().expect("it ends"), second]
    });
    for ended in ended {
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        assert!(!ended.stderr.contains("error"), "{}", ended.stderr);
    }
}

#[test]
fn a_folder_of_a_run_that_is_another_one_for_a_rank_is_refused_before_the_training() {
    let place = Workplace::new();
    for name in ["merak.toml", "model.json", "text/a.txt"] {
        let content = fs::read_to_string(place.path(name)).expect("our file");
        place.write(&format!("elsewhere/{name}"), &content);
    }
    let port = free_port();
    let commands = [".", "elsewhere"].into_iter().enumerate();
    let commands = commands.map(|(rank, folder)| {
        let mut command = place.command("train merak.toml --dp 2 --distributed.timeout_s 8");
        command.current_dir(place.path(folder));
        tell_place(&mut command, rank, 2, port);
        command
    });
    let ended = end_all(&place, commands.collect());
    let [first, second] = [&ended[0], &ended[1]];
    assert_eq!(second.status, Some(2), "{}", second.stderr);
    let told = "run, which \"output_dir\" names, is not shared: on host ";
    let own = format!("[rank 1] error: {told}");
    assert!(second.stderr.starts_with(&own), "{}", second.stderr);
    assert_eq!(first.status, Some(3), "{}", first.stderr);
    let named = format!("error: rank 1 failed: {told}");
    assert!(first.stderr.starts_with(&named), "{}", first.stderr);
    for folder in ["run", "elsewhere/run"] {
        assert!(!place.path(folder).exists(), "{folder}");
    }
}

/// A command that hears of files that may not grow as of a full disk.
const HEARS: &str = "trap '' XFSZ; exec \"$0\" \"$@\"";

/// Lets no file of rank 1 grow any more, once a run has written its first record.
fn fill_disk_of_rank_1(place: &Workplace, run: &str) {
    let records = place.path(run).join("metrics.jsonl");
    while !fs::read(&records).is_ok_and(|records| !records.is_empty()) {
        thread::sleep(Duration::from_millis(5));
    }
    let rank = rank_in(place.folder.path(), 1).to_string();
    let limit = Command::new("prlimit")
        .args(["--fsize=512:512", "--pid", &rank])
        .status();
    assert!(limit.expect("util-linux has prlimit").success());
}

#[test]
fn of_real_ranks_the_culprit_ends_with_1_the_others_with_3_and_the_launch_with_1() {
    let place = Workplace::new();
    let line = "train merak.toml --pp 2 --tp 2 --save_steps 1 --save_total_limit 2 \
                --max_steps 100000 --output_dir";
    let port = free_port();
    let commands = (0..4).map(|rank| {
        let mut command = Command::new("sh");
        command.args(["-c", HEARS, MERAK]);
        let mut command = place.with(command, &format!("{line} by-hand"));
        tell_place(&mut command, rank, 4, port);
        command
    });
    let commands = commands.collect();
    let ended = thread::scope(|scope| {
        scope.spawn(|| fill_disk_of_rank_1(&place, "by-hand"));
        end_all(&place, commands)
    });
    let statuses: Vec<_> = ended.iter().map(|ended| ended.status).collect();
    let told: Vec<_> = ended.iter().map(|ended| &ended.stderr).collect();
    assert_eq!(statuses, [Some(3), Some(1), Some(3), Some(3)], "{told:?}");
    assert!(told[0].contains("error: rank 1 failed: "), "{told:?}");
    assert!(told[1].contains("File too large"), "{told:?}");
    // The others leave the telling to the first, and note it in their logs.
    for rank in [2, 3] {
        let log = place.path(&format!("by-hand/logs/rank-{rank}.log"));
        let log = fs::read_to_string(log).expect("a log");
        assert!(log.contains("error: rank 1 failed: "), "{log}");
    }

    let mut command = place.command("launch -n 4 -- sh -c");
    command.arg(HEARS).arg(MERAK);
    command.args(format!("{line} launched").split_whitespace());
    let launched = thread::scope(|scope| {
        scope.spawn(|| fill_disk_of_rank_1(&place, "launched"));
        end(&place, command)
    });
    assert_eq!(launched.status, Some(1), "{}", launched.stderr);
    let last = launched.stderr.lines().last();
    assert_eq!(
        last,
        Some("error: rank 1 ended with status 1"),
        "{}",
        launched.stderr
    );
}

#[test]
fn a_prediction_of_processes_is_that_of_threads_and_its_mistakes_are_told_once() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    place.succeed("predict merak.toml run --tp 2 -o threads.jsonl");
    let launched = |rest: &str| {
        let line = format!("launch -n 2 -- predict merak.toml run --tp 2 {rest}");
        end(&place, place.command(&line))
    };
    let predicted = launched("-o processes.jsonl");
    assert_eq!(predicted.status, Some(0), "{}", predicted.stderr);
    let lines = |name: &str| fs::read_to_string(place.path(name)).expect("predictions");
    assert_eq!(lines("processes.jsonl"), lines("threads.jsonl"));
    for (rest, told) in [
        ("", "-o FILE is missing: it names the file"),
        (
            "-o never --what loses",
            "--what is \"loses\", expected one of",
        ),
        ("-o run", "cannot write run, which -o names: Is a directory"),
    ] {
        let ended = launched(rest);
        assert_eq!(ended.status, Some(2), "{}", ended.stderr);
        let first = format!("[rank 0] error: {told}");
        assert!(ended.stderr.contains(&first), "{}", ended.stderr);
        assert!(!ended.stderr.contains("[rank 1]"), "{}", ended.stderr);
    }
    assert!(!place.path("never").exists());
    let swapped = "launch -n 2 -- evaluate run merak.toml";
    let ended = end(&place, place.command(swapped));
    let told = ended.stderr.matches("stands where CONFIG belongs").count();
    assert_eq!((ended.status, told), (Some(2), 1), "{}", ended.stderr);
}

#[test]
fn a_rank_0_that_cannot_print_tells_the_others_why() {
    let place = Workplace::new();
    let line = "train merak.toml --dp 2 --max_steps 1";
    let port = free_port();
    let mut first = Command::new("sh");
    first.args(["-c", "exec \"$0\" \"$@\" >/dev/full", MERAK]);
    let commands = [place.with(first, line), place.command(line)];
    let commands = commands.into_iter().enumerate().map(|(rank, mut command)| {
        tell_place(&mut command, rank, 2, port);
        command
    });
    let ended = end_all(&place, commands.collect());
    let statuses: Vec<_> = ended.iter().map(|ended| ended.status).collect();
    assert_eq!(statuses, [Some(1), Some(3)], "{}", ended[1].stderr);
    let told = "cannot write standard output: No space left on device (os error 28)\n";
    assert_eq!(ended[0].stderr, format!("error: {told}"));
    let log = fs::read_to_string(place.path("run/logs/rank-1.log")).expect("a log");
    assert!(log.contains(&format!("rank 0 failed: {told}")), "{log}");
}

#[test]
fn an_evaluation_keeps_what_other_ranks_say_in_the_folder_of_the_run() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    assert!(!place.path("run/logs").exists(), "threads have one voice");
    let line = "launch -n 2 -- evaluate merak.toml run --pp 2";
    let evaluated = end(&place, place.command(line));
    assert_eq!(evaluated.status, Some(0), "{}", evaluated.stderr);
    let log = place.path("run/logs/rank-1.log");
    assert_eq!(fs::read_to_string(&log).expect("a log"), "");
    // A folder that is not there is not made for it.
    let elsewhere = format!("{line} --output_dir nowhere");
    assert_eq!(end(&place, place.command(&elsewhere)).status, Some(0));
    assert!(!place.path("nowhere").exists());
    // What fails before a training has its folder stands in the log of a run that is there.
    let line =
        "launch -n 2 -- train merak.toml --dp 2 --resume latest --max_steps 2 --data.path no";
    let failed = end(&place, place.command(line));
    assert_eq!(failed.status, Some(2), "{}", failed.stderr);
    let log = fs::read_to_string(&log).expect("a log");
    assert!(
        log.contains("error: ") && log.contains("data.path"),
        "{log}"
    );
}
