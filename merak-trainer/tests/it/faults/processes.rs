//! Ranks in processes of their own: this test binary is started again for each.

use std::{
    io::Read,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use merak_mpu::tcp;
use merak_trainer::{chain, run_on};
use tempfile::tempdir;

use super::{Case, Fault, Faulty, expect_good_checkpoint, sample_of_step, steps};

/// Tells a child its fault, rank, port and folder.
const PLACE: &str = "TEST_OF_PROCESSES";

/// Silence after which a stopped process counts as lost.
const SILENCE: Duration = Duration::from_secs(2);

/// How long the survivor may take.
const DEADLINE: Duration = Duration::from_secs(30);

/// A process that ends with the test.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        // One that has ended cannot be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(fault: &str, rank: usize, port: u16, folder: &Path) -> Rank {
    let own = std::env::current_exe().expect("it runs");
    let child = Command::new(own)
        .args([
            "--ignored",
            "--exact",
            "faults::processes::a_rank_of_two",
            "--nocapture",
        ])
        .env(PLACE, format!("{fault} {rank} {port} {}", folder.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    Rank(child.expect("it runs again"))
}

fn case(folder: &str) -> Case {
    let case = Case::gpt2().with_dropout(0.1).on((2, 1, 1));
    case.writing(folder.as_ref())
}

#[test]
#[ignore = "the tests of this module start it"]
#[expect(
    clippy::disallowed_methods,
    reason = "a child of a test is told its part"
)]
fn a_rank_of_two() {
    let Ok(place) = std::env::var(PLACE) else {
        return;
    };
    let words: Vec<&str> = place.splitn(4, ' ').collect();
    let fault = match words[0] {
        "exit" => Fault::Exit,
        "stop" => Fault::Stop,
        _ => Fault::Panic,
    };
    let (rank, port) = (words[1].parse().unwrap(), words[2].parse().unwrap());
    let case = case(words[3]);
    let options = tcp::JoinOptions {
        beat_timeout: SILENCE,
        ..tcp::JoinOptions::new(rank, 2, "127.0.0.1", port).with_timeout(DEADLINE)
    };
    let member = tcp::join(&options).unwrap();
    let bad = sample_of_step(&case, 2);
    let (plan, case) = (case.plan(), case.with_data(Faulty { fault, bad }));
    let outcome = run_on(vec![member], |member| {
        let mut trainer = case.trainer(&plan, member)?;
        steps(&mut trainer, 2)?;
        trainer.save_checkpoint()?;
        steps(&mut trainer, 3)
    });
    let error = outcome.expect_err("a rank fails");
    println!("RESULT {}", chain(&error));
}

/// What rank 0 says when the fault happens on rank 1 in step 3, after a checkpoint of step 2, which
/// must be good.
fn survivor_says(fault: &str) -> String {
    let folder = tempdir().expect("a temporary folder");
    let port = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = port.local_addr().expect("an address").port();
    let [mut survivor, culprit] = [0, 1].map(|rank| start(fault, rank, port, folder.path()));
    let mut stdout = survivor.0.stdout.take().expect("a pipe");
    let (sender, said) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        let read = stdout.read_to_string(&mut text);
        sender.send(read.map(|_| text))
    });
    let said = said
        .recv_timeout(DEADLINE)
        .expect("it ends before its deadline");
    drop(culprit);
    expect_good_checkpoint(&case(&folder.path().display().to_string()), folder.path());
    let said = said.expect("it is text");
    let result = said.lines().find_map(|line| line.split_once("RESULT "));
    result.map_or_else(|| said.clone(), |(_, text)| text.to_owned())
}

#[test]
fn a_process_that_exits_leaves_a_good_checkpoint() {
    let said = survivor_says("exit");
    let gone = "rank 1 failed: its process ended without a goodbye";
    assert!(said.starts_with(gone), "{said}");
}

#[test]
fn a_process_that_is_stopped_leaves_a_good_checkpoint() {
    let said = survivor_says("stop");
    assert!(
        said.starts_with("rank 1 failed: no heartbeat within 2s"),
        "{said}"
    );
}

#[test]
fn a_process_that_panics_leaves_a_good_checkpoint() {
    let said = survivor_says("panic");
    assert!(
        said.starts_with("rank 1 failed: rank 1 (stage 0)"),
        "{said}"
    );
    assert!(said.contains("is cursed"), "{said}");
}
