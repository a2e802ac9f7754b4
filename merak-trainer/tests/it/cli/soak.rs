//! Processes that are killed again and again: the run ends on the curve of an uninterrupted one.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use serde_json::Value;

use super::{
    Workplace, files,
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

/// Kills a rank of a run in each `interval` of its steps, until it has ended.
fn kill_ranks(place: &Workplace, (kills, interval): (usize, usize), has_ended: &AtomicBool) {
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
    let ended = thread::scope(|scope| {
        scope.spawn(|| kill_ranks(&place, (kills, interval), &has_ended));
        let ended = end_within(deadline, &place, command);
        has_ended.store(true, Ordering::Relaxed);
        ended
    });
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let restarts = ended.stderr.matches("all ranks are started again").count();
    assert!(restarts > 0, "{}", ended.stderr);
    assert_eq!(steps(&place, "broken"), steps(&place, "whole"));
    let [found, expected] = ["broken", "whole"].map(|run| {
        let step = format!("checkpoints/step-{total:08}");
        files(&place.path(run).join(step))
    });
    assert!(found == expected, "the same checkpoint");
}

#[test]
fn a_run_of_processes_with_three_kills_ends_on_its_curve() {
    soak(60, 15, 5);
}

/// Takes minutes: `cargo test -p merak-trainer --test it -- --ignored cli::soak`.
#[test]
#[ignore = "takes minutes"]
fn two_thousand_steps_of_processes_with_a_kill_every_hundred_end_on_their_curve() {
    soak(2000, 100, 20);
}
