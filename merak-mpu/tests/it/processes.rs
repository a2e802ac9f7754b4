//! Each test starts this test binary again, once for each rank; the child runs `a_rank_of_a_test`.

use merak_mpu::{Member, Rank, ReduceOp, Result, tcp};
use rustix::process::{Signal, getpid, kill_process};
use std::{
    io::Read,
    net::{Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Longest wait of a rank for another.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Silence after which a stopped process counts as lost.
const SILENCE: Duration = Duration::from_secs(2);

/// How long all processes of a test may take; far less than a wait that nobody ends.
const DEADLINE: Duration = Duration::from_secs(25);

/// The rank that does what a scenario says.
const SCENARIO: &str = "MERAK_TEST_SCENARIO";
const PLACE: &str = "MERAK_TEST_PLACE";

/// Processes that end with the test, however it ends.
struct Ranks(Vec<(usize, Child)>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for (_, child) in &mut self.0 {
            // One that has ended cannot be killed.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ranks {
    /// Starts some ranks of a world of `n` for a scenario.
    fn start(scenario: &str, n: usize, ranks: impl IntoIterator<Item = usize>, port: u16) -> Self {
        let own = std::env::current_exe().expect("a test has a binary");
        let run = format!("{scenario}-{}", std::process::id());
        let start = |rank| {
            let child = Command::new(&own)
                .args([
                    "processes::a_rank_of_a_test",
                    "--exact",
                    "--ignored",
                    "--nocapture",
                ])
                .env(SCENARIO, scenario)
                .env(PLACE, format!("{rank} {n} {port} {run}"))
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn();
            (rank, child.expect("a test can start its own binary"))
        };
        Self(ranks.into_iter().map(start).collect())
    }

    /// What each rank has said, by rank, once all but `stopped` have ended.
    fn results(mut self, stopped: Option<usize>) -> Vec<(usize, String)> {
        let start = Instant::now();
        let mut results = Vec::new();
        for (rank, child) in &mut self.0 {
            if Some(*rank) == stopped {
                continue;
            }
            while child.try_wait().expect("it is a child").is_none() {
                assert!(start.elapsed() < DEADLINE, "rank {rank} hangs");
                thread::sleep(Duration::from_millis(5));
            }
            let mut said = String::new();
            let stdout = child.stdout.as_mut().expect("it is piped");
            stdout.read_to_string(&mut said).expect("it is text");
            let result = said.lines().find_map(|line| line.split_once("RESULT "));
            results.push((
                *rank,
                result.map_or_else(String::new, |(_, text)| text.to_owned()),
            ));
        }
        results
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there is a port");
    listener.local_addr().expect("it is bound").port()
}

#[test]
#[ignore = "the tests of this module start it"]
#[expect(
    clippy::disallowed_methods,
    reason = "a child of a test is told its part"
)]
fn a_rank_of_a_test() {
    let (Ok(scenario), Ok(place)) = (std::env::var(SCENARIO), std::env::var(PLACE)) else {
        return;
    };
    let place: Vec<&str> = place.split(' ').collect();
    let [rank, n, port] = [0, 1, 2].map(|index| place[index].parse::<usize>().unwrap());
    let options = tcp::JoinOptions {
        run: place[3].to_owned(),
        beat_timeout: if scenario.starts_with("stop") {
            SILENCE
        } else {
            TIMEOUT / 2
        },
        timeout: if scenario == "absent" {
            2 * SILENCE
        } else {
            TIMEOUT
        },
        ..tcp::JoinOptions::new(rank, n, "127.0.0.1", port as u16)
    };
    let start = Instant::now();
    let outcome = tcp::join(&options).and_then(|member| {
        let culprit = usize::from(!scenario.ends_with('0'));
        play(&scenario, &member, culprit)
    });
    assert!(start.elapsed() < DEADLINE);
    match outcome {
        Ok(sum) => println!("RESULT sum {sum}"),
        Err(error) => println!("RESULT {error}"),
    }
}

/// Sends this process a signal.
fn signal(signal: Signal) {
    kill_process(getpid(), signal).expect("a process may signal itself");
}

/// Sums, until the culprit does its deed.
#[expect(
    clippy::exit,
    clippy::panic,
    reason = "a culprit does what no rank should"
)]
fn play(scenario: &str, member: &Member, culprit: usize) -> Result<f32> {
    let world = member.world_group()?;
    let mut sum = 0.0;
    for step in 0..4 {
        let mut len = 30_000;
        if step == 3 && member.rank() == culprit {
            match scenario.trim_end_matches('0') {
                "kill" => signal(Signal::KILL),
                "stop" => signal(Signal::STOP),
                "exit" => std::process::exit(0),
                "panic" => panic!("this panic is part of a test"),
                "abort" => {
                    member.abort("disk full");
                    world.barrier()?;
                }
                "length" => len = 7,
                "collective" => {
                    world.broadcast_vec(vec![0.0_f32; len], 0)?;
                }
                _ => {}
            }
        }
        sum += world.all_reduce_vec(vec![1.0_f32; len], ReduceOp::Sum)?[0];
    }
    let pair: Vec<Rank> = world.members()[..2].to_vec();
    if member.rank().0 < 2 {
        member.group("pair", &pair)?.barrier()?;
    }
    member.end();
    Ok(sum)
}

/// Runs a scenario on three ranks, and checks what the survivors say.
fn survivors_say(scenario: &str, culprit: usize, words: &[&str]) {
    let stopped = scenario.starts_with("stop").then_some(culprit);
    let ranks = Ranks::start(scenario, 3, 0..3, free_port());
    let results = ranks.results(stopped);
    for (rank, said) in results.into_iter().filter(|(rank, _)| *rank != culprit) {
        for word in words {
            assert!(said.contains(word), "{scenario}: rank {rank} says: {said}");
        }
    }
}

#[test]
fn processes_sum_and_end() {
    let results = Ranks::start("sum", 3, 0..3, free_port()).results(None);
    assert_eq!(results, [0, 1, 2].map(|rank| (rank, "sum 12".to_owned())));
}

/// A survivor names what it waits in: the sum, or the barrier before it where the news comes early.
const ANY_WAIT: &str = "waits in ";

#[test]
fn a_killed_process_is_missed_at_once() {
    let waits = ANY_WAIT;
    let gone = "its process ended without a goodbye";
    survivors_say("kill", 1, &["rank 1 failed", gone, waits]);
    survivors_say("kill0", 0, &["rank 0 failed", gone, waits]);
}

#[test]
fn a_stopped_process_is_missed_when_its_heart_is_silent() {
    let waits = ANY_WAIT;
    let silent = "no heartbeat within 2s";
    survivors_say("stop", 1, &["rank 1 failed", silent, waits]);
    survivors_say("stop0", 0, &["rank 0 failed", silent, waits]);
}

#[test]
fn a_process_that_exits_in_the_middle_is_missed_at_once() {
    let waits = ANY_WAIT;
    let gone = "its process ended without a goodbye";
    survivors_say("exit", 1, &["rank 1 failed", gone, waits]);
}

#[test]
fn a_panic_and_an_error_reach_the_other_processes() {
    survivors_say("panic", 1, &["rank 1 failed: panicked"]);
    survivors_say("abort", 1, &["rank 1 failed: disk full"]);
    survivors_say("abort0", 0, &["rank 0 failed: disk full"]);
}

#[test]
fn other_calls_are_named_on_both_sides() {
    let (right, wrong) = (
        "all_reduce(sum) of 30000 f32",
        "rank 1 called all_reduce(sum) of 7 f32",
    );
    survivors_say(
        "length",
        1,
        &["operation 3 of group world [0, 1, 2] differs", right, wrong],
    );
    survivors_say(
        "collective",
        1,
        &[
            "operation 3 of group world",
            right,
            "rank 1 called broadcast(root 0) of 30000 f32",
        ],
    );
}

#[test]
fn a_rank_that_never_comes_is_named_to_those_that_have() {
    let results = Ranks::start("absent", 3, [0, 2], free_port()).results(None);
    for (rank, said) in results {
        assert!(
            said.contains("no answer within 4s: rank 0 waits in join"),
            "{rank}: {said}"
        );
        assert!(said.ends_with("for rank 1"), "{rank}: {said}");
    }
}

#[test]
fn where_another_program_holds_the_port_the_next_one_is_found() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    let results = Ranks::start("sum", 2, 0..2, port).results(None);
    assert_eq!(results, [0, 1].map(|rank| (rank, "sum 8".to_owned())));
}
