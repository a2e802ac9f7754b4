//! Ranks that `mpirun` of Open MPI starts, over the engine `mpi`.

use std::{
    env,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use super::{
    MERAK, Workplace, files,
    hosts::newest,
    launch::{end, kill},
    processes::find_process,
};

/// How long a checkpoint may take to come, and a process to go.
const DEADLINE: Duration = Duration::from_secs(30);

/// A command on four ranks.
fn on_four_ranks(place: &Workplace, line: &str) -> Command {
    let line = format!("-n 4 {MERAK} {line} --distributed.engine mpi");
    let mut command = place.with(Command::new("mpirun"), &line);
    command
        .env("PATH", env::var_os("PATH").unwrap_or_default())
        // What Open MPI asks for where ranks share cores, and where root tests.
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

/// The process of a rank that runs in a folder, if there is one.
fn find_rank(folder: &Path, rank: usize) -> Option<u32> {
    find_process(folder, &format!("OMPI_COMM_WORLD_RANK={rank}"))
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < DEADLINE, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_killed_rank_ends_the_job_and_a_second_one_goes_on_from_the_last_checkpoint() {
    let place = Workplace::new();
    let always = "--dp 2 --tp 2 --gradient_accumulation_steps 2 --save_steps 5 \
                  --lr_scheduler_type constant";
    let line = format!("train merak.toml {always}");
    let command = on_four_ranks(&place, &format!("{line} --max_steps 100000"));
    let folder = place.folder.path();
    let killed = thread::scope(|scope| {
        scope.spawn(|| {
            let second = place.path("run/checkpoints/step-00000010");
            wait_until("no checkpoint comes", || second.exists());
            kill("KILL", find_rank(folder, 3).expect("it trains"));
        });
        end(&place, command)
    });
    // What the others say may be cut off, as Open MPI ends the job at once.
    assert_eq!(killed.status, Some(137), "{}", killed.stderr);
    let told = "exited on signal 9 (Killed)";
    assert!(killed.stderr.contains(told), "{}", killed.stderr);
    for rank in 0..4 {
        wait_until("a rank is left over", || find_rank(folder, rank).is_none());
    }

    // It ends where a run does that nothing has disturbed.
    let run = place.path("run");
    let last = newest(&run);
    let step: usize = last["step-".len()..].parse().expect("a number");
    let line = format!("{line} --max_steps {}", step + 10);
    let resumed = end(
        &place,
        on_four_ranks(&place, &format!("{line} --resume latest")),
    );
    assert_eq!(resumed.status, Some(0), "{}", resumed.stderr);
    place.succeed(&format!("{line} --output_dir undisturbed"));
    let end = format!("checkpoints/{}", newest(&run));
    assert_eq!(end, format!("checkpoints/step-{:08}", step + 10));
    let undisturbed = place.path("undisturbed");
    assert_eq!(files(&run.join(&end)), files(&undisturbed.join(&end)));
}
