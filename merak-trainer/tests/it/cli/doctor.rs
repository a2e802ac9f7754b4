//! What this machine and this build can do.

use serde_json::Value;

use super::Workplace;

#[test]
fn the_doctor_tells_what_there_is_and_tries_it() {
    let place = Workplace::new();
    let found = place.document("doctor --json");
    assert_eq!(found["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(found["trial"], "passed");
    assert!(found["cores"].as_u64() >= Some(1) && found["memory_bytes"].as_u64() > Some(1 << 20));
    let names = |key: &str| {
        let names = found[key].as_array().expect("a list").iter();
        names
            .filter_map(|name| name.as_str().map(str::to_owned))
            .collect::<Vec<_>>()
    };
    for (key, name) in [
        ("engines", "threads"),
        ("backends", "candle"),
        ("devices", "cpu"),
        ("optimizers", "adamw_torch"),
        ("schedules", "1f1b"),
        ("schedules", "auto"),
        ("model_types", "gpt2"),
    ] {
        assert!(names(key).contains(&name.to_owned()), "{key}: {found}");
    }
    assert_eq!(found["launcher"], "none: ranks are threads of this process");
    assert_eq!(found["engine"], "threads");
    // Abilities of other builds are not listed.
    let has_nccl = cfg!(feature = "nccl");
    assert_eq!(names("engines").contains(&"nccl".to_owned()), has_nccl);
    assert_eq!(found.get("nccl").is_some(), has_nccl);
    let has_tch = cfg!(feature = "tch");
    assert_eq!(names("backends").contains(&"tch".to_owned()), has_tch);
    assert!(has_tch || !names("devices").contains(&"cuda".to_owned()));
    let table = place.succeed("doctor");
    assert!(
        table.contains("\nengines               auto, threads"),
        "{table}"
    );
    assert!(
        table
            .lines()
            .any(|line| line.starts_with("trial") && line.ends_with("passed"))
    );
}

#[test]
fn the_doctor_tells_what_a_launcher_has_told() {
    let place = Workplace::new();
    let launched = |variables: &[(&str, &str)]| {
        let mut command = place.command("doctor --json");
        command.envs(variables.iter().copied());
        let ended = place.ended(&command.output().expect("the command starts"));
        let found: Value = serde_json::from_str(&ended.stdout).expect("one document");
        let of = |name: &str| found[name].to_string().replace('"', "");
        let trial = of("trial");
        assert_eq!(ended.status, Some(i32::from(trial != "passed")), "{trial}");
        let names = [
            "launcher",
            "engine",
            "rank",
            "world_size",
            "address_of_rank_0",
        ];
        (names.map(of).join("; "), trial)
    };
    let by_torchrun = |host| {
        launched(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("MASTER_ADDR", host),
            ("MASTER_PORT", "29500"),
        ])
    };
    let (found, trial) = by_torchrun("127.0.0.1");
    assert_eq!(found, "torchrun; tcp; 1; 4; 127.0.0.1:29500");
    assert_eq!(trial, "passed");
    let (found, trial) = by_torchrun("999.1.1.1");
    assert_eq!(found, "torchrun; tcp; 1; 4; 999.1.1.1:29500");
    let told = "rank 0 is on 999.1.1.1, as MASTER_ADDR says, which this host does not find: ";
    assert!(trial.starts_with(told), "{trial}");
    // What a run refuses, the trial refuses too.
    let (_, trial) = launched(&[("MERAK_COMPUTE__DEVICE", "cuda")]);
    let told = "is cuda (environment MERAK_COMPUTE__DEVICE), but must be cpu unless";
    assert!(trial.contains(told), "{trial}");
    let (pmi, trial) = launched(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]);
    if cfg!(feature = "mpi") {
        assert_eq!(pmi, "MPICH or Intel MPI; mpi; 1; 2; none");
        // No mpirun has started it. Open MPI ends a process that cannot start its helper.
        let told = [
            "MPI says that this process is rank 0 of 1",
            "its process has ended before it was done (",
        ];
        assert!(told.iter().any(|told| trial.contains(told)), "{trial}");
        return;
    }
    assert!(trial.starts_with("the engine tcp does not fit: PMI_SIZE asks"));
    assert!(
        pmi.starts_with("MPICH or Intel MPI; the engine tcp does not fit: PMI_SIZE asks")
            && pmi.ends_with("; 1; 2; none"),
        "{pmi}"
    );
}
