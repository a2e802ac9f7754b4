//! Runs that are killed, some again and again: they end on the curve of an uninterrupted one.

use std::{
    fs,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    Workplace, files,
    hosts::newest,
    launch::{end_within, kill},
    processes::find_rank,
};
use crate::soak::Dice;

/// The steps that a run has recorded, with their losses.
fn steps(place: &Workplace, run: &str) -> Vec<(u64, f64)> {
    let text = fs::read_to_string(place.path(run).join("metrics.jsonl")).unwrap_or_default();
    let records = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    records
        .filter_map(|record: Value| Some((record["step"].as_u64()?, record["loss"].as_f64()?)))
        .collect()
}

/// Kills a rank of a run in each `interval` of its steps, until it has ended. Returns how many it
/// killed: a run may end before the last of them.
fn kill_ranks(
    place: &Workplace,
    (kills, interval): (usize, usize),
    has_ended: &AtomicBool,
) -> usize {
    let mut dice = Dice::new(11);
    let mut killed = Vec::new();
    for number in 0..kills {
        let after = (number * interval + dice.below(interval)) as u64;
        let rank = dice.below(2);
        while !has_ended.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(2));
            let ranks = [0, 1].map(|rank| find_rank(place.folder.path(), rank));
            let is_due = steps(place, "broken")
                .last()
                .is_some_and(|(step, _)| *step > after);
            // The processes of a run that is ending are those of the last kill.
            if let [Some(first), Some(second)] = ranks
                && is_due
                && !killed.contains(&first)
                && !killed.contains(&second)
            {
                killed.extend([first, second]);
                kill("KILL", [first, second][rank]);
                break;
            }
        }
    }
    killed.len() / 2
}

/// Asserts that both runs have the same losses, and the same checkpoint of their last step.
fn expect_same(place: &Workplace, total: usize) {
    assert_eq!(steps(place, "broken"), steps(place, "whole"));
    let [found, expected] = ["broken", "whole"].map(|run| {
        let step = format!("checkpoints/step-{total:08}");
        files(&place.path(run).join(step))
    });
    assert!(found == expected, "the same checkpoint");
}

fn soak(total: usize, interval: usize, save_steps: usize) {
    let place = Workplace::new();
    // A step takes some milliseconds, and a restart about a second.
    let deadline = Duration::from_secs(40 + total as u64);
    let train = format!(
        "train merak.toml --pp 2 --gradient_accumulation_steps 8 --max_steps {total} \
         --save_steps {save_steps} --save_total_limit 2 --resume auto"
    );
    let whole = place.command(&format!("launch -n 2 -- {train} --output_dir whole"));
    let whole = end_within(deadline, &place, whole);
    assert_eq!(whole.status, Some(0), "{}", whole.stderr);
    let kills = total / interval - 1;
    let line = format!("launch -n 2 --max-restarts {kills} -- {train} --output_dir broken");
    let (command, has_ended) = (place.command(&line), AtomicBool::new(false));
    let (ended, killed) = thread::scope(|scope| {
        let killer = scope.spawn(|| kill_ranks(&place, (kills, interval), &has_ended));
        let ended = end_within(deadline, &place, command);
        has_ended.store(true, Ordering::Relaxed);
        (ended, killer.join().expect("ranks can be killed"))
    });
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let restarts = ended.stderr.matches("all ranks are started again").count();
    assert!(killed > 0, "the run ended before the first kill");
    assert_eq!(restarts, killed, "{}", ended.stderr);
    expect_same(&place, total);
}

#[test]
fn a_run_of_processes_with_three_kills_ends_on_its_curve() {
    soak(60, 15, 5);
}

#[test]
fn a_run_of_threads_that_is_killed_whole_ends_on_its_curve_when_resumed() {
    let place = Workplace::new();
    let deadline = Duration::from_mins(2);
    let train = "train merak.toml --dp 2 --pp 2 --save_steps 10 --lr_scheduler_type constant";
    let end = |keys: &str| {
        let ended = end_within(deadline, &place, place.command(&format!("{train} {keys}")));
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    };
    // It goes on until it is killed, however late that is.
    let mut command = place.command(&format!("{train} --max_steps 100000 --output_dir broken"));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let (mut child, start) = (command.spawn().expect("the command starts"), Instant::now());
    // The second checkpoint is written before the step after it is recorded.
    let has_saved_twice = || {
        steps(&place, "broken")
            .last()
            .is_some_and(|(step, _)| *step > 20)
    };
    while !has_saved_twice() && start.elapsed() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
    child.kill().expect("it can be killed");
    let status = child.wait().expect("it ends");
    let is_under_way = has_saved_twice() && status.code().is_none();
    assert!(is_under_way, "{status} at {:?}", steps(&place, "broken"));
    let last: usize = newest(&place.path("broken"))["step-".len()..]
        .parse()
        .expect("a number");
    let total = last + 20;
    end(&format!(
        "--output_dir broken --resume latest --max_steps {total}"
    ));
    end(&format!("--output_dir whole --max_steps {total}"));
    expect_same(&place, total);
}

/// Takes minutes: `cargo test -p merak-trainer --test it -- --ignored cli::soak`.
#[test]
#[ignore = "takes minutes"]
fn two_thousand_steps_of_processes_with_a_kill_every_hundred_end_on_their_curve() {
    soak(2000, 100, 20);
}
