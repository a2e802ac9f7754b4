//! The engine `mpi` under `mpirun`: the suite of all engines, and ranks that fail.
//!
//! ```text
//! cargo test -p merak-mpu --features mpi --test mpi            all scenarios
//! mpirun -n 4 target/debug/deps/mpi-* suite                    one of them
//! ```
//!
//! Unless `mpirun` has started it, this program starts itself by `mpirun` (or what `MPIRUN` names),
//! once for each scenario, and checks what the ranks say, the status of the job, and that no
//! process is left over. For MPICH: `MPICC=mpicc.mpich` to build, `MPIRUN=mpirun.mpich` to run.
#![expect(clippy::print_stdout, reason = "ranks report on standard output")]
#![expect(clippy::panic, reason = "a test reports by panicking")]

#[path = "it/program.rs"]
mod program;

use merak_mpu::{
    Error, Launch, Member, Packet, Rank, ReduceOp, Result, mpi, run_members,
    testing::{suite::CHECKS, world},
    threads,
};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use rustix::process::{Pid, Signal, getpid, kill_process, test_kill_process};
use std::{
    env,
    ffi::OsString,
    io::Read,
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Longest wait of a rank for another.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Silence after which a stopped process counts as lost.
const SILENCE: Duration = Duration::from_secs(2);

/// How long all processes of a scenario may take; far less than a wait that nobody ends.
const DEADLINE: Duration = Duration::from_mins(2);

/// The rank that does what a scenario says.
const CULPRIT: usize = 1;

fn main() -> ExitCode {
    let is_launched = Launch::from_env().is_ok_and(|launch| launch.has_mpi);
    if let Some(scenario) = env::args().nth(1).filter(|_| is_launched) {
        return rank(&scenario);
    }
    run_all();
    ExitCode::SUCCESS
}

// The ranks.

fn rank(scenario: &str) -> ExitCode {
    println!("PROCESS {}", getpid().as_raw_nonzero());
    let launch = Launch::from_env().expect("mpirun tells each process its rank");
    let member = join(scenario, &launch);
    let (outcome, failure) = match member {
        Ok(member) => {
            let outcome = run_members(vec![member.clone()], 8 << 20, |member| {
                play(scenario, &member)
            });
            let outcome = outcome.map(drop).map_err(|error| error.to_string());
            (outcome, member.failure().map(|failure| failure.culprit))
        }
        Err(error) => (Err(error.to_string()), None),
    };
    match outcome {
        Ok(()) => {
            println!("RESULT {} well", launch.rank);
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("RESULT {} {error}", launch.rank);
            let here = failure.is_none_or(|culprit| culprit == launch.rank);
            ExitCode::from(if here { 7 } else { 3 })
        }
    }
}

fn join(scenario: &str, launch: &Launch) -> Result<Member> {
    let size = match scenario {
        "size" => launch.world_size + 1,
        _ => launch.world_size,
    };
    let options = mpi::JoinOptions {
        beat_timeout: if scenario == "stop" {
            SILENCE
        } else {
            TIMEOUT / 2
        },
        timeout: if scenario == "late" { SILENCE } else { TIMEOUT },
        digests: match (scenario, launch.rank) {
            ("digest", CULPRIT) => vec![("plan".to_owned(), vec![2])],
            ("digest", _) => vec![("plan".to_owned(), vec![1])],
            _ => Vec::new(),
        },
        ..mpi::JoinOptions::new(launch.rank, size, "", 0)
    };
    match scenario {
        // No power of two, no multiple of an element, shorter than a header.
        "slots" => mpi::join_in_slots(&options, 29),
        _ => mpi::join(&options),
    }
}

fn play(scenario: &str, member: &Member) -> Result<()> {
    match scenario {
        "suite" => {
            for (_, check) in CHECKS {
                check(member);
            }
            large(member)?;
            sums_have_the_bits_of_threads(member)?;
            // A slot for each other process at least, in every process of this host.
            let n = member.world_size();
            assert_eq!(member.shared_bytes(), n * (n - 1) * (128 << 10));
        }
        "slots" => {
            // All of it would take long at so few bytes at once.
            for (name, check) in CHECKS {
                if *name != "collectives_of_all_types" {
                    check(member);
                }
            }
            sums_have_the_bits_of_threads(member)?;
        }
        "programs" => programs_have_the_bits_of_threads(member),
        "uneven" => ends_at_different_times(member)?,
        _ => fail(scenario, member)?,
    }
    member.end();
    let again = mpi::join(&mpi::JoinOptions::new(0, 1, "", 0));
    assert!(matches!(again, Err(Error::UnfitEngine { .. })), "{again:?}");
    Ok(())
}

/// Messages and sums of more bytes than a link takes at once.
fn large(member: &Member) -> Result<()> {
    const LEN: usize = 3_000_001;
    let world = member.world_group()?;
    let (n, rank) = (world.world_size(), world.rank());
    let data = vec![rank as f32 + 1.0; LEN];
    let packet = Packet {
        shape: vec![LEN],
        data: Box::new(data.clone()),
    };
    world.send((rank + 1) % n, 5, vec![packet])?;
    let sum = world.all_reduce_vec(data, ReduceOp::Sum)?;
    assert_eq!(sum, vec![(n * (n + 1) / 2) as f32; LEN]);
    let message = world.recv((rank + n - 1) % n, 5)?;
    assert_eq!(message[0].shape, [LEN]);
    Ok(())
}

/// Numbers whose sum depends on the order in which they are added.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32.wrapping_mul(rank as u32 + 1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let scale = [1e8, 1.0, 1e-6, -1e8][(state >> 30) as usize];
        scale * ((state >> 8) & 0xffff) as f32
    };
    (0..len).map(|_| next()).collect()
}

fn sums_have_the_bits_of_threads(member: &Member) -> Result<()> {
    let world = member.world_group()?;
    for len in [1, 1000, 50_003] {
        let sum = |group: &merak_mpu::Group| {
            let sum = group.all_reduce_vec(numbers(group.rank(), len), ReduceOp::Sum)?;
            let bits: Vec<u32> = sum.into_iter().map(f32::to_bits).collect();
            Ok::<_, Error>(bits)
        };
        let own = sum(&world)?;
        let options = threads::WorldOptions::default();
        let there = threads::run(world.world_size(), options, |member| {
            sum(&member.world_group()?)
        });
        assert!(own == there.expect("threads do not fail")[world.rank()]);
    }
    Ok(())
}

/// Programs of collectives and messages, the same on all ranks, which threads of each run too.
fn programs_have_the_bits_of_threads(member: &Member) {
    const PROGRAMS: usize = 24;
    let ranks = member.world_size();
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[ranks as u8; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for number in 0..PROGRAMS {
        let tree = program::programs(ranks..=ranks).new_tree(&mut runner);
        let program = tree.expect("nothing is rejected").current();
        let own = program.results(member);
        let threads = world(ranks, |member| program.results(&member));
        assert!(own == threads[member.rank().0], "{number}: {program:?}");
    }
}

/// A rank that has ended waits for those that have not, and answers them.
fn ends_at_different_times(member: &Member) -> Result<()> {
    let world = member.world_group()?;
    world.barrier()?;
    if member.rank() == 0 || member.rank() == CULPRIT {
        return Ok(());
    }
    let rest: Vec<Rank> = world.members()[2..].to_vec();
    let rest = member.group("rest", &rest)?;
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(100));
        rest.barrier()?;
    }
    Ok(())
}

/// Sums, until the culprit does its deed.
#[expect(clippy::exit, reason = "a culprit does what no rank should")]
fn fail(scenario: &str, member: &Member) -> Result<()> {
    let world = member.world_group()?;
    for step in 0..4 {
        let mut len = 30_000;
        if step == 3 && member.rank() == CULPRIT {
            match scenario {
                "kill" => signal(Signal::KILL),
                "stop" => signal(Signal::STOP),
                "exit" => std::process::exit(5),
                "panic" => panic!("this panic is part of a test"),
                "abort" => {
                    member.abort("disk full");
                    world.barrier()?;
                }
                "length" => len = 7,
                "collective" => {
                    world.broadcast_vec(vec![0.0_f32; len], 0)?;
                }
                "late" => thread::sleep(4 * SILENCE),
                _ => panic!("no scenario is named {scenario}"),
            }
        }
        world.all_reduce_vec(vec![1.0_f32; len], ReduceOp::Sum)?;
    }
    panic!("no rank has failed");
}

/// Sends this process a signal, after which it does nothing more.
fn signal(signal: Signal) {
    kill_process(getpid(), signal).expect("a process may signal itself");
    thread::sleep(DEADLINE);
}

// The scenarios.

/// How a job of `mpirun` has ended.
struct Ended {
    status: Option<i32>,
    said: String,
}

impl Ended {
    /// What each rank has said.
    fn results(&self) -> Vec<(usize, &str)> {
        let lines = self.said.lines();
        let results = lines.filter_map(|line| line.strip_prefix("RESULT ")?.split_once(' '));
        let results = results.filter_map(|(rank, text)| Some((rank.parse().ok()?, text)));
        results.collect()
    }

    /// Checks how a job has ended that failed.
    fn expect_status(&self, scenario: &str, status: i32) {
        // MPICH kills what is left of the job, and often returns the status of what it has killed.
        let by_kill = (mpirun_is_of_mpich() && self.status == Some(9)).then_some(9);
        let expected = by_kill.unwrap_or(status);
        assert_eq!(self.status, Some(expected), "{scenario}:\n{}", self.said);
    }
}

/// The program that starts the ranks.
fn mpirun_program() -> OsString {
    env::var_os("MPIRUN").unwrap_or_else(|| "mpirun".into())
}

fn mpirun_is_of_mpich() -> bool {
    let told = Command::new(mpirun_program()).arg("--version").output();
    let told = told.expect("mpirun is installed").stdout;
    String::from_utf8_lossy(&told).starts_with("HYDRA")
}

fn mpirun(n: usize, scenario: &str) -> Ended {
    let child = Command::new(mpirun_program())
        .args(["-n", &n.to_string()])
        .arg(env::current_exe().expect("a test has a binary"))
        .arg(scenario)
        // What Open MPI asks for where ranks share cores, and where root tests.
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.expect("mpirun is installed");
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let reader = thread::spawn(move || {
        let mut said = String::new();
        if let Some(pipe) = &mut stdout {
            pipe.read_to_string(&mut said).expect("it is text");
        }
        said
    });
    let complaints = thread::spawn(move || {
        let mut said = String::new();
        if let Some(pipe) = &mut stderr {
            pipe.read_to_string(&mut said).expect("it is text");
        }
        said
    });
    let status = wait(&mut child, scenario);
    let said = reader.join().expect("no reader panics");
    let complaints = complaints.join().expect("no reader panics");
    println!("-- {scenario} on {n} ranks: status {status:?}");
    if env::var_os("VERBOSE").is_some() {
        println!("{said}{complaints}");
    }
    nobody_is_left(&said, scenario);
    Ended { status, said }
}

fn wait(child: &mut Child, scenario: &str) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it is a child") {
            return status.code();
        }
        if start.elapsed() > DEADLINE {
            // It ends its ranks.
            let pid = Pid::from_child(child);
            let _ = kill_process(pid, Signal::TERM);
            let _ = child.wait();
            panic!("{scenario} hangs");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Checks that the processes of a job have ended with it.
fn nobody_is_left(said: &str, scenario: &str) {
    let numbers = said
        .lines()
        .filter_map(|line| line.strip_prefix("PROCESS "));
    for number in numbers.filter_map(|number| number.parse().ok()) {
        let Some(pid) = Pid::from_raw(number) else {
            continue;
        };
        let start = Instant::now();
        while test_kill_process(pid).is_ok() {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{scenario}: process {number} is left over"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Runs a scenario that ends well.
fn succeeds(n: usize, scenario: &str) {
    let ended = mpirun(n, scenario);
    let mut results = ended.results();
    results.sort_unstable();
    let well: Vec<_> = (0..n).map(|rank| (rank, "well")).collect();
    assert_eq!(results, well, "{}", ended.said);
    assert_eq!(ended.status, Some(0), "{}", ended.said);
}

/// Runs a scenario that fails on four ranks, and checks the status and what each survivor says.
fn fails(scenario: &str, status: i32, words: &[&str]) {
    let ended = mpirun(4, scenario);
    let said = &ended.said;
    let results = ended.results();
    for rank in (0..4).filter(|rank| *rank != CULPRIT) {
        let result = results.iter().find(|(of, _)| *of == rank);
        let Some((_, result)) = result else {
            panic!("{scenario}: rank {rank} says nothing:\n{said}");
        };
        for word in words {
            assert!(result.contains(word), "{scenario}: {word:?} in:\n{said}");
        }
    }
    ended.expect_status(scenario, status);
}

fn run_all() {
    for n in [1, 2, 4, 5] {
        succeeds(n, "suite");
    }
    for n in [2, 3, 4, 5] {
        succeeds(n, "programs");
    }
    succeeds(3, "slots");
    succeeds(4, "uneven");
    let sum = " all_reduce ";
    fails("abort", 7, &["rank 1 failed: disk full", sum]);
    fails("panic", 7, &["rank 1 failed: panicked", sum]);
    let right = "all_reduce(sum) of 30000 f32";
    let differs = "operation 3 of group world [0, 1, 2, 3] differs";
    let wrong = "rank 1 called all_reduce(sum) of 7 f32";
    fails("length", 7, &[differs, right, wrong]);
    let wrong = "rank 1 called broadcast(root 0) of 30000 f32";
    fails("collective", 7, &[differs, right, wrong]);
    fails(
        "late",
        3,
        &["no answer within 2s", "waits in all_reduce 3 of group"],
    );
    fails("stop", 3, &["rank 1 failed", "no heartbeat within 2s"]);
    fails("digest", 7, &["rank 1 has another plan than ranks"]);
    fails("size", 7, &["MPI says that this process is rank", "of 5"]);
    // The runtime ends the job at once, so that nobody may have been able to say anything.
    for (scenario, status) in [("kill", 137), ("exit", 5)] {
        mpirun(4, scenario).expect_status(scenario, status);
    }
}
