//! Each test starts this test binary again, once for each rank; the child runs `a_rank_of_a_test`.

use merak_mpu::{Locality, Member, Rank, ReduceOp, Result, tcp};
use rustix::process::{Pid, Signal, getpid, kill_process};
#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::{
    convert::Infallible,
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener},
    path::Path,
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
const SCENARIO: &str = "TEST_SCENARIO";
const PLACE: &str = "TEST_PLACE";

/// What rank 0 says when sums go on.
const SUMMING: &str = "SUMMING\n";

/// Processes that end with the test, however it ends.
pub(crate) struct Ranks(Vec<(usize, Child)>);

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
        Self::start_at(scenario, n, ranks, ("127.0.0.1", port), |_, own| {
            Command::new(own)
        })
    }

    /// [`Ranks::start`], where rank 0 is at an address and `command` makes the command of a rank
    /// that runs this binary.
    pub(crate) fn start_at(
        scenario: &str,
        n: usize,
        ranks: impl IntoIterator<Item = usize>,
        (host, port): (&str, u16),
        command: impl Fn(usize, &Path) -> Command,
    ) -> Self {
        let own = std::env::current_exe().expect("a test has a binary");
        let run = format!("{scenario}-{}", std::process::id());
        let start = |rank| {
            let child = command(rank, &own)
                .args([
                    "processes::a_rank_of_a_test",
                    "--exact",
                    "--ignored",
                    "--nocapture",
                ])
                .env(SCENARIO, scenario)
                .env(PLACE, format!("{rank} {n} {host} {port} {run}"))
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn();
            (rank, child.expect("a test can start its own binary"))
        };
        Self(ranks.into_iter().map(start).collect())
    }

    /// Waits until rank 0 says that it has summed for a while.
    pub(crate) fn wait_for_sums(&mut self) {
        let stdout = self.0[0].1.stdout.as_mut().expect("it is piped");
        let mut said = Vec::new();
        while !said.ends_with(SUMMING.as_bytes()) {
            let mut byte = [0];
            assert_eq!(stdout.read(&mut byte).ok(), Some(1), "rank 0 has ended");
            said.push(byte[0]);
        }
    }

    /// Sends a signal to some ranks.
    fn signal(&self, ranks: &[usize], signal: Signal) {
        for (_, child) in self.0.iter().filter(|(rank, _)| ranks.contains(rank)) {
            kill_process(Pid::from_child(child), signal).expect("it is a child of ours");
        }
    }

    /// Waits until some ranks have ended.
    fn wait_for_end(&mut self, ranks: &[usize]) {
        let start = Instant::now();
        for (rank, child) in self.0.iter_mut().filter(|(rank, _)| ranks.contains(rank)) {
            while child.try_wait().expect("it is a child").is_none() {
                assert!(start.elapsed() < DEADLINE, "rank {rank} hangs");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// What each rank has said, by rank, once all but `stopped` have ended.
    pub(crate) fn results(mut self, stopped: Option<usize>) -> Vec<(usize, String)> {
        let ranks = self.0.iter().map(|(rank, _)| *rank);
        let ending: Vec<_> = ranks.filter(|rank| Some(*rank) != stopped).collect();
        self.wait_for_end(&ending);
        let mut results = Vec::new();
        for (rank, child) in &mut self.0 {
            if Some(*rank) == stopped {
                continue;
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

pub(crate) fn free_port() -> u16 {
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
    let [rank, n, port] = [0, 1, 3].map(|index| place[index].parse::<usize>().unwrap());
    let options = tcp::JoinOptions {
        run: place[4].to_owned(),
        beat_timeout: if ["stop", "stop0", "nap0", "pause", "doze", "cut"].contains(&&*scenario) {
            SILENCE
        } else {
            TIMEOUT / 2
        },
        timeout: if ["absent", "doze"].contains(&&*scenario) {
            2 * SILENCE
        } else {
            TIMEOUT
        },
        ..tcp::JoinOptions::new(rank, n, place[2], port as u16)
    };
    if scenario == "bound" {
        bind(rank);
    }
    let start = Instant::now();
    let outcome = tcp::join(&options).and_then(|member| {
        let culprit = usize::from(!scenario.ends_with('0'));
        match &*scenario {
            "cut" => sum_until_it_fails(&member).map(|never| match never {}),
            "where" | "bound" => place_and_sum(&member),
            "pause" => sum_for_a_while(&member).map(|()| "well".to_owned()),
            "doze" => wait_for_a_sleeper(&member).map(|()| "well".to_owned()),
            _ => play(&scenario, &member, culprit).map(|sum| format!("sum {sum}")),
        }
    });
    assert!(start.elapsed() < DEADLINE);
    match outcome {
        Ok(said) => println!("RESULT {said}"),
        Err(error) => println!("RESULT {error}"),
    }
}

/// Sends this process a signal that ends or stops it.
fn signal(signal: Signal) -> ! {
    kill_process(getpid(), signal).expect("a process may signal itself");
    // The system may give the signal to another thread, so this one can run for a while.
    loop {
        thread::park();
    }
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
                "nap" => {
                    kill_process(getpid(), Signal::STOP).expect("a process may signal itself");
                    // Another thread may get the signal, a little later.
                    thread::sleep(SILENCE / 2);
                }
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

/// Sums without end.
fn sum_until_it_fails(member: &Member) -> Result<Infallible> {
    let world = member.world_group()?;
    for step in 0.. {
        if step == 20 && member.rank() == 0 {
            let said = io::stdout().write_all(SUMMING.as_bytes());
            said.expect("the test reads it");
        }
        world.all_reduce_vec(vec![1.0_f32; 30_000], ReduceOp::Sum)?;
    }
    unreachable!("numbers have no end")
}

/// Sums for a second or more.
fn sum_for_a_while(member: &Member) -> Result<()> {
    let world = member.world_group()?;
    for step in 0..200 {
        if step == 20 && member.rank() == 0 {
            let said = io::stdout().write_all(SUMMING.as_bytes());
            said.expect("the test reads it");
        }
        thread::sleep(Duration::from_millis(5));
        world.all_reduce_vec(vec![1.0_f32; 100], ReduceOp::Sum)?;
    }
    member.end();
    Ok(())
}

/// Waits for rank 1, which sleeps for longer than any wait may take.
fn wait_for_a_sleeper(member: &Member) -> Result<()> {
    let world = member.world_group()?;
    world.barrier()?;
    if member.rank().0 == 0 {
        let said = io::stdout().write_all(SUMMING.as_bytes());
        said.expect("the test reads it");
    }
    if member.rank().0 == 1 {
        thread::sleep(6 * SILENCE);
    }
    world.barrier()
}

/// Two processors on which this thread may run, if there are as many.
#[cfg(target_os = "linux")]
fn two_processors() -> Option<[usize; 2]> {
    let set = sched_getaffinity(None).ok()?;
    let mut own = (0..CpuSet::MAX_CPU).filter(|number| set.is_set(*number));
    Some([own.next()?, own.next()?])
}

/// Binds this thread, and those that it starts, to one processor, as a launcher does.
#[cfg(target_os = "linux")]
fn bind(rank: usize) {
    let mut set = CpuSet::new();
    let processors = two_processors().expect("the test has looked");
    set.set(processors[rank % 2]);
    sched_setaffinity(None, &set).expect("a thread may leave a processor");
}

#[cfg(not(target_os = "linux"))]
fn bind(_: usize) {}

/// Says where the rank is, and sums.
fn place_and_sum(member: &Member) -> Result<String> {
    let Locality {
        host,
        local_rank,
        local_size,
        core_sharers,
    } = member.locality();
    let sum = play("where", member, usize::MAX)?;
    Ok(format!(
        "host {host}, place {local_rank} of {local_size}, cores of {core_sharers}, sum {sum}"
    ))
}

/// Runs a scenario on three ranks, checks what the survivors say, and returns it by rank.
fn survivors_say(scenario: &str, culprit: usize, words: &[&str]) -> Vec<(usize, String)> {
    let stopped = scenario.starts_with("stop").then_some(culprit);
    let ranks = Ranks::start(scenario, 3, 0..3, free_port());
    let mut results = ranks.results(stopped);
    results.retain(|(rank, _)| *rank != culprit);
    for (rank, said) in &results {
        for word in words {
            assert!(said.contains(word), "{scenario}: rank {rank} says: {said}");
        }
    }
    results
}

#[test]
fn processes_sum_and_end() {
    let results = Ranks::start("sum", 3, 0..3, free_port()).results(None);
    assert_eq!(results, [0, 1, 2].map(|rank| (rank, "sum 12".to_owned())));
}

#[test]
#[cfg(target_os = "linux")]
fn processes_share_the_cores_that_they_are_bound_to() {
    if two_processors().is_none() {
        return println!("skipped: there is one processor");
    }
    let results = Ranks::start("bound", 3, 0..3, free_port()).results(None);
    let expected = [2, 1, 2].into_iter().enumerate().map(|(rank, sharers)| {
        let said = format!("host 0, place {rank} of 3, cores of {sharers}, sum 12");
        (rank, said)
    });
    assert_eq!(results, expected.collect::<Vec<_>>());
}

/// [`survivors_say`], where the culprit is lost in the middle of the sums: each survivor names
/// itself and the sum that it waits in, or is about to call where the news is faster.
fn survivors_of_a_loss_say(scenario: &str, culprit: usize, words: &[&str]) {
    for (rank, said) in survivors_say(scenario, culprit, words) {
        let names_a_sum = ["waits in", "calls"].iter().any(|doing| {
            let sum = format!("(rank {rank} {doing} all_reduce ");
            let rest = said.split_once(&sum).map(|(_, rest)| rest);
            rest.is_some_and(|rest| rest[1..].starts_with(" of group world [0, 1, 2]"))
        });
        assert!(names_a_sum, "{scenario}: rank {rank} says: {said}");
    }
}

#[test]
fn a_killed_process_is_missed_at_once() {
    let gone = "its process ended without a goodbye";
    survivors_of_a_loss_say("kill", 1, &["rank 1 failed", gone]);
    survivors_of_a_loss_say("kill0", 0, &["rank 0 failed", gone]);
}

#[test]
fn a_stopped_process_is_missed_when_its_heart_is_silent() {
    let silent = "no heartbeat within 2s";
    survivors_of_a_loss_say("stop", 1, &["rank 1 failed", silent]);
    survivors_of_a_loss_say("stop0", 0, &["rank 0 failed", silent]);
}

#[test]
fn a_rank_0_that_wakes_up_blames_itself() {
    let mut ranks = Ranks::start("nap0", 3, 0..3, free_port());
    ranks.wait_for_end(&[1, 2]);
    ranks.signal(&[0], Signal::CONT);
    let results = ranks.results(None);
    let asleep = "rank 0 failed: its process was stopped, or had no processor, for ";
    assert!(results[0].1.contains(asleep), "{results:?}");
    for (_, said) in &results[1..] {
        let silent = "rank 0 failed: no heartbeat within 2s";
        assert!(said.contains(silent), "{results:?}");
    }
}

#[test]
fn ranks_that_are_all_stopped_go_on_together() {
    let mut ranks = Ranks::start("pause", 3, 0..3, free_port());
    ranks.wait_for_sums();
    ranks.signal(&[0, 1, 2], Signal::STOP);
    thread::sleep(2 * SILENCE);
    ranks.signal(&[0, 1, 2], Signal::CONT);
    let results = ranks.results(None);
    assert_eq!(results, [0, 1, 2].map(|rank| (rank, "well".to_owned())));
}

#[test]
fn ranks_that_were_all_stopped_for_longer_than_a_wait_say_so() {
    let mut ranks = Ranks::start("doze", 3, 0..3, free_port());
    ranks.wait_for_sums();
    // Rank 0 has yet to get from its words into the wait.
    thread::sleep(SILENCE / 2);
    ranks.signal(&[0, 1, 2], Signal::STOP);
    thread::sleep(2 * SILENCE + SILENCE / 4);
    ranks.signal(&[0, 1, 2], Signal::CONT);
    let results = ranks.results(None);
    // A rank that got no processor before the stop may be the one that is waited for.
    let late = "failed: no answer within 4s";
    let asleep = "meanwhile the process of rank 0 was stopped, or had no processor, for ";
    let said = &results[1].1;
    assert!(said.contains(late) && said.contains(asleep), "{results:?}");
}

#[test]
fn a_process_that_exits_in_the_middle_is_missed_at_once() {
    let gone = "its process ended without a goodbye";
    survivors_of_a_loss_say("exit", 1, &["rank 1 failed", gone]);
}

#[test]
fn a_panic_and_an_error_reach_the_other_processes() {
    survivors_of_a_loss_say("panic", 1, &["rank 1 failed: panicked"]);
    survivors_of_a_loss_say("abort", 1, &["rank 1 failed: disk full"]);
    survivors_of_a_loss_say("abort0", 0, &["rank 0 failed: disk full"]);
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
            said.contains("no answer within 4s: rank 0 of the world of 3 at 127.0.0.1:"),
            "{rank}: {said}"
        );
        let told = " waits for the first word of rank 1";
        assert!(said.ends_with(told), "{rank}: {said}");
        let blamed = said.starts_with("rank 1 failed: ");
        assert_eq!(blamed, rank == 2, "{rank}: {said}");
    }
}

#[test]
fn where_another_program_holds_the_port_the_next_one_is_found() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    let results = Ranks::start("sum", 2, 0..2, port).results(None);
    assert_eq!(results, [0, 1].map(|rank| (rank, "sum 8".to_owned())));
}
