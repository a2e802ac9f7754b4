//! Ranks on two hosts, which network namespaces play; skipped where the system allows none.

use std::{fs, path::Path, process::Command, thread, time::Duration};

use merak_mpu::testing::hosts::{ADDRESSES, TwoHosts};

use super::{Ended, MERAK, Workplace, files, launch};

/// The host of each rank.
const HOSTS: [usize; 4] = [0, 0, 1, 1];

const DEGREES: &str = "--dp 2 --tp 2 --gradient_accumulation_steps 2";

/// One rank of a command, as a script on its host starts it.
fn rank(place: &Workplace, hosts: &TwoHosts, rank: usize, line: &str) -> Command {
    let mut command = place.with(hosts.command(HOSTS[rank], MERAK), line);
    for (name, value) in [
        ("RANK", rank),
        ("WORLD_SIZE", HOSTS.len()),
        ("LOCAL_RANK", rank % 2),
        ("LOCAL_WORLD_SIZE", 2),
        // No other world is in these namespaces.
        ("MASTER_PORT", 29_500),
    ] {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", ADDRESSES[0]);
    command
}

/// Runs a command on all ranks, and `meanwhile` beside it.
fn run(place: &Workplace, hosts: &TwoHosts, line: &str, meanwhile: impl FnOnce()) -> Vec<Ended> {
    thread::scope(|scope| {
        let start = |number| {
            let command = rank(place, hosts, number, line);
            scope.spawn(move || launch::end(place, command))
        };
        let ranks: Vec<_> = (0..HOSTS.len()).map(start).collect();
        meanwhile();
        let end = |rank: thread::ScopedJoinHandle<'_, Ended>| rank.join().expect("it ends");
        ranks.into_iter().map(end).collect()
    })
}

/// The name of the newest checkpoint of a run.
pub(super) fn newest(run: &Path) -> String {
    let checkpoints = fs::read_dir(run.join("checkpoints")).expect("a folder");
    let names = checkpoints.map(|entry| entry.expect("an entry").file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let steps = names.filter(|name| name.starts_with("step-"));
    steps.max().expect("a checkpoint")
}

#[test]
fn ranks_of_two_hosts_write_the_checkpoints_of_threads() {
    let Some(hosts) = TwoHosts::or_skipped() else {
        return;
    };
    let place = Workplace::new();
    place.succeed(&format!("train merak.toml {DEGREES} --output_dir threads"));
    let line = format!(
        "train merak.toml {DEGREES} --output_dir hosts --cost_model measured --cost_cache costs.json"
    );
    let ended = run(&place, &hosts, &line, || {});
    for (rank, ended) in ended.iter().enumerate() {
        assert_eq!(ended.status, Some(0), "rank {rank}: {}", ended.stderr);
        assert_eq!(ended.stdout.contains("trained   5 steps"), rank == 0);
    }
    let checkpoints = |run: &str| files(&place.path(run).join("checkpoints"));
    assert_eq!(checkpoints("hosts"), checkpoints("threads"));
    let costs = fs::read_to_string(place.path("costs.json")).expect("the times are kept");
    // Both namespaces are of this machine, and have its name.
    assert!(costs.contains("by tcp on hosts 2 x 0 ("), "{costs}");
    assert!(costs.contains("), 2 x 1 ("), "{costs}");
}

#[test]
fn a_cut_cable_ends_both_hosts_and_the_last_checkpoint_is_good() {
    let Some(hosts) = TwoHosts::or_skipped() else {
        return;
    };
    let place = Workplace::new();
    let always = format!("{DEGREES} --save_steps 5 --lr_scheduler_type constant");
    let line = format!("train merak.toml {always} --max_steps 100000 --distributed.timeout_s 8");
    let first = place.path("run/checkpoints/step-00000010");
    let ended = run(&place, &hosts, &line, || {
        while !first.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        hosts.cut().expect("a cable");
    });
    for (rank, ended) in ended.iter().enumerate() {
        assert_eq!(ended.status, Some(3), "rank {rank}: {}", ended.stderr);
        // Rank 0 judges for its side, and is the one that the other side misses.
        let culprits: &[usize] = if HOSTS[rank] == 0 { &[2, 3] } else { &[0] };
        let mut lost = culprits.iter().map(|culprit| {
            format!("error: rank {culprit} failed: no heartbeat within 4s: its process is stopped or its host is cut off")
        });
        let told = match rank {
            // What the first rank tells stands in the log alone.
            1 => fs::read_to_string(place.path("run/logs/rank-1.log")).expect("a log"),
            _ => ended.stderr.clone(),
        };
        assert!(
            lost.any(|lost| told.contains(&lost)),
            "rank {rank} says: {told}"
        );
    }

    // Threads go on from the last checkpoint to where a run comes that nothing has disturbed.
    let run = place.path("run");
    let last = newest(&run);
    let step: usize = last["step-".len()..].parse().expect("a number");
    let steps = format!("--max_steps {}", step + 10);
    let line = format!("train merak.toml {always} {steps}");
    place.succeed(&format!("{line} --resume latest"));
    place.succeed(&format!("{line} --output_dir undisturbed"));
    let end = format!("checkpoints/{}", newest(&run));
    let undisturbed = place.path("undisturbed");
    assert_eq!(files(&run.join(&end)), files(&undisturbed.join(&end)));
}
