//! The scripts of `docs/launch`, with stand-ins for the programs that only clusters have.

use std::{
    fs::{self, Permissions},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{self, Command},
    thread,
    time::Duration,
};

use super::{Ended, MERAK, Workplace, files, launch};

/// Starts the tasks of one host as `srun` does.
const SRUN: &str = r#"#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_NODEID=0
export SLURM_STEP_TASKS_PER_NODE=$SLURM_NTASKS SLURM_STEP_NODELIST=n7
tasks=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" >tasks
most=0
for task in "${tasks[@]}"; do
    wait "$task"
    status=$?
    most=$((status > most ? status : most))
done
exit "$most"
"#;

/// Starts the processes of one host as torchrun does, beside an agent that holds the port.
const TORCHRUN: &str = r#"#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in
        --no-python) shift; break ;;
        --nnodes) [[ $2 == 1 ]] || exit 64 ;;
        --node-rank) [[ $2 == 0 ]] || exit 64 ;;
        --max-restarts) export TORCHELASTIC_MAX_RESTARTS=$2 ;;
        --nproc-per-node) export WORLD_SIZE=$2 LOCAL_WORLD_SIZE=$2 ;;
        --master-addr) export MASTER_ADDR=$2 ;;
        --master-port) export MASTER_PORT=$2 ;;
        *) exit 64 ;;
    esac
    shift 2
done
export TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=$$ TORCHELASTIC_RESTART_COUNT=0
tasks=()
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    RANK=$rank LOCAL_RANK=$rank "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do
    wait "$task" || exit 1
done
"#;

const SCONTROL: &str = "#!/bin/bash\necho \"$@\" >requeued\n";

/// Runs a line on a host, as `ssh` does.
const REMOTE: &str = "#!/bin/bash\nhost=$1\nshift\necho \"$host\" >>reached\necho $PPID >script\nexec bash -c \"$*\"\n";

/// A workplace whose folder `bin` has the command and the stand-ins.
fn workplace() -> Workplace {
    let place = Workplace::new();
    for (name, script) in [
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("remote", REMOTE),
        ("torchrun", TORCHRUN),
    ] {
        let name = format!("bin/{name}");
        place.write(&name, script);
        let path = place.path(&name);
        fs::set_permissions(path, Permissions::from_mode(0o755)).expect("our file");
    }
    std::os::unix::fs::symlink(MERAK, place.path("bin/merak")).expect("a link");
    place
}

/// A script of the documentation with its arguments.
fn script(place: &Workplace, name: &str, line: &str) -> Command {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/launch");
    let mut command = place.with(Command::new("bash"), "");
    let bin = place.path("bin");
    command
        .arg(folder.join(name))
        .args(line.split_whitespace())
        .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
        .env("SLURM_JOB_ID", process::id().to_string());
    command
}

fn succeed(ended: &Ended) {
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
}

const DEGREES: &str = "--dp 2 --tp 2 --gradient_accumulation_steps 2";

fn expect_checkpoints_of_threads(place: &Workplace, run: &str) {
    place.succeed(&format!("train merak.toml {DEGREES} --output_dir threads"));
    let checkpoints = |run: &str| files(&place.path(run).join("checkpoints"));
    assert_eq!(checkpoints(run), checkpoints("threads"));
}

#[test]
fn tasks_of_slurm_train_as_ranks() {
    let place = workplace();
    let mut command = script(&place, "slurm.sh", &format!("merak.toml {DEGREES}"));
    command.env("SLURM_NTASKS", "4");
    succeed(&launch::end(&place, command));
    expect_checkpoints_of_threads(&place, "run");
}

#[test]
fn keys_behind_a_script_win_over_its_own() {
    let place = workplace();
    let mut command = script(&place, "slurm.sh", "merak.toml --resume latest");
    command.env("SLURM_NTASKS", "1");
    let ended = launch::end(&place, command);
    assert_eq!(ended.status, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("no checkpoint"), "{}", ended.stderr);
}

#[test]
fn a_job_whose_time_is_up_saves_and_queues_again() {
    let place = workplace();
    for (name, tasks) in [("slurm.sh", 2), ("slurm-threads.sh", 1)] {
        let output = format!("of-{tasks}");
        let line = format!("merak.toml --dp 2 --max_steps 100000 --output_dir {output}");
        let mut command = script(&place, name, &line);
        command.env("SLURM_NTASKS", tasks.to_string());
        let ended = thread::scope(|scope| {
            scope.spawn(|| {
                let records = place.path(&format!("{output}/metrics.jsonl"));
                while !fs::read(&records).is_ok_and(|records| !records.is_empty()) {
                    thread::sleep(Duration::from_millis(5));
                }
                // SLURM signals the tasks of the step. One that hears of it ends all.
                let tasks = fs::read_to_string(place.path("tasks")).expect("numbers");
                launch::kill_all("USR1", tasks.trim());
            });
            launch::end(&place, command)
        });
        assert_eq!(ended.status, Some(138), "{name}: {}", ended.stderr);
        let requeued = fs::read_to_string(place.path("requeued")).expect("a call");
        assert_eq!(requeued, format!("requeue {}\n", process::id()));
        assert!(place.path(&format!("{output}/checkpoints")).is_dir());
        fs::remove_file(place.path("requeued")).expect("our file");
    }
}

#[test]
fn processes_of_torchrun_train_as_ranks_beside_its_agent() {
    let place = workplace();
    let agent = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = agent.local_addr().expect("an address").port();
    let mut command = script(&place, "torchrun.sh", &format!("merak.toml {DEGREES}"));
    command.env("MASTER_PORT", port.to_string());
    succeed(&launch::end(&place, command));
    expect_checkpoints_of_threads(&place, "run");
}

#[test]
fn the_script_for_nccl_starts_a_rank_for_each_device() {
    let place = workplace();
    place.write("bin/nvidia-smi", "#!/bin/bash\necho GPU 0\necho GPU 1\n");
    let path = place.path("bin/nvidia-smi");
    fs::set_permissions(path, Permissions::from_mode(0o755)).expect("our file");
    let mut command = script(&place, "nccl.sh", "merak.toml --tp 2");
    command.env_remove("SLURM_JOB_ID");
    command.env("MERAK_DISTRIBUTED__NCCL_LIBRARY", "/nowhere/libnccl.so.2");
    let ended = launch::end(&place, command);
    assert!(matches!(ended.status, Some(1 | 2)), "{}", ended.stderr);
    let told = if cfg!(feature = "nccl") {
        "error: no NCCL library: /nowhere/libnccl.so.2"
    } else {
        "error: the engine nccl is not in this build"
    };
    assert_eq!(ended.stderr.matches(told).count(), 1, "{}", ended.stderr);
}

#[test]
fn hosts_without_a_launcher_train_over_ssh() {
    let place = workplace();
    let mut command = script(&place, "ssh.sh", &format!("merak.toml {DEGREES}"));
    command
        .env("HOSTS", "127.0.0.1 127.0.0.2")
        .env("RANKS_PER_HOST", "2")
        .env("MASTER_PORT", (20_000 + process::id() % 10_000).to_string())
        .env("REMOTE", "remote");
    succeed(&launch::end(&place, command));
    let reached = fs::read_to_string(place.path("reached")).expect("calls");
    let mut reached: Vec<_> = reached.lines().collect();
    reached.sort_unstable();
    assert_eq!(
        reached,
        ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]
    );
    expect_checkpoints_of_threads(&place, "run");
}

#[test]
fn a_signal_to_the_script_over_ssh_has_every_rank_save() {
    let place = workplace();
    let mut command = script(&place, "ssh.sh", "merak.toml --dp 2 --max_steps 100000");
    command
        .env("HOSTS", "127.0.0.1 127.0.0.2")
        .env("MASTER_PORT", (30_000 + process::id() % 2_000).to_string())
        .env("REMOTE", "remote");
    let ended = thread::scope(|scope| {
        scope.spawn(|| {
            let records = place.path("run/metrics.jsonl");
            while !fs::read(&records).is_ok_and(|records| !records.is_empty()) {
                thread::sleep(Duration::from_millis(5));
            }
            let script = fs::read_to_string(place.path("script")).expect("a number");
            launch::kill_all("TERM", script.trim());
        });
        launch::end(&place, command)
    });
    assert_eq!(ended.status, Some(143), "{}", ended.stderr);
    // What stands for ssh is the rank here, and ends before the script.
    assert!(place.path("run/checkpoints/latest").is_file());
}
