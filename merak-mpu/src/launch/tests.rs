//! Environments of launchers, as tables.

use super::*;

type Table<'a> = &'a [(&'a str, &'a str)];

fn launch(table: Table<'_>) -> Result<Launch> {
    Launch::from_lookup(|name| {
        let found = table.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

/// The table with some values replaced, and without those whose new value is `-`.
fn with<'a>(table: Table<'a>, changes: Table<'a>) -> Vec<(&'a str, &'a str)> {
    let is_changed = |name: &str| changes.iter().any(|(changed, _)| *changed == name);
    let kept = table.iter().filter(|(name, _)| !is_changed(name));
    let new = changes.iter().filter(|(_, value)| *value != "-");
    kept.chain(new).copied().collect()
}

fn told(table: Table<'_>) -> String {
    launch(table).unwrap_err().to_string()
}

const TORCHRUN: Table<'_> = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "n1.cluster"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
];

const SLURM: Table<'_> = &[
    ("SLURM_STEP_ID", "3"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_PROCID", "6"),
    ("SLURM_NTASKS", "64"),
    ("SLURM_STEP_NUM_TASKS", "7"),
    ("SLURM_LOCALID", "2"),
    ("SLURM_NODEID", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "4,3"),
    ("SLURM_STEP_NODELIST", "n[08,10]"),
    ("SLURM_JOB_NODELIST", "n[07-10]"),
];

const OPEN_MPI: Table<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("PMIX_NAMESPACE", "prterun-n1-4711@1"),
];

const INTEL: Table<'_> = &[
    ("PMI_RANK", "3"),
    ("PMI_SIZE", "4"),
    ("MPI_LOCALRANKID", "1"),
    ("MPI_LOCALNRANKS", "2"),
];

#[test]
fn torchrun_says_everything() {
    let found = launch(TORCHRUN).unwrap();
    let expected = Launch {
        launcher: Some(Launcher::Torchrun),
        rank: 5,
        world_size: 8,
        local_rank: Some(1),
        local_size: Some(4),
        address: Some("n1.cluster".to_owned()),
        port: Some(29_500),
        port_is_taken: true,
        job: Some("none.2".to_owned()),
        has_mpi: false,
        variables: LaunchVariables {
            rank: Some("RANK"),
            world_size: Some("WORLD_SIZE"),
            local_rank: Some("LOCAL_RANK"),
            local_size: Some("LOCAL_WORLD_SIZE"),
            address: Some("MASTER_ADDR"),
            port: Some("MASTER_PORT"),
            job: Some("TORCHELASTIC_RUN_ID"),
        },
    };
    assert_eq!(found, expected);
    // Its own agent aside, the port is rank 0's.
    let script = with(TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]);
    assert!(!launch(&script).unwrap().port_is_taken);
    // One process needs no meeting place.
    let alone = launch(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap();
    assert_eq!((alone.world_size, alone.address), (1, None));
}

#[test]
fn a_slurm_step_says_where_its_first_host_is_and_its_job_which_port() {
    let found = launch(SLURM).unwrap();
    assert_eq!(found.launcher, Some(Launcher::Slurm));
    assert_eq!((found.rank, found.world_size), (6, 7));
    assert_eq!((found.local_rank, found.local_size), (Some(2), Some(3)));
    assert_eq!(found.address.as_deref(), Some("n08"));
    assert_eq!(found.variables.address, Some("SLURM_STEP_NODELIST"));
    assert_eq!(found.variables.world_size, Some("SLURM_STEP_NUM_TASKS"));
    assert_eq!(found.job.as_deref(), Some("4711.3"));
    let port = found.port.unwrap();
    assert!((20_000..32_000).contains(&port));
    let port_of = |changes| launch(&with(SLURM, changes)).unwrap().port.unwrap();
    assert_eq!(
        port_of(&[("SLURM_PROCID", "0")]),
        port,
        "all ranks find the same one"
    );
    assert_ne!(port_of(&[("SLURM_STEP_ID", "4")]), port);
    assert_eq!(port_of(&[("MASTER_PORT", "29500")]), 29_500);
    for (given, address) in [
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("[fd77::1]", "fd77::1"),
    ] {
        let elsewhere = launch(&with(SLURM, &[("MASTER_ADDR", given)])).unwrap();
        assert_eq!(elsewhere.address.as_deref(), Some(address));
    }
}

#[test]
fn slurm_counts_inside_a_step_only() {
    for step in [
        "-",
        "batch",
        "interactive",
        "4294967291",
        "4294967290",
        "4294967294",
    ] {
        let changes = [("SLURM_STEP_ID", step)];
        let changed = with(SLURM, &changes);
        assert_eq!(launch(&changed).unwrap(), Launch::default(), "{step}");
    }
    let empty = with(SLURM, &[("SLURM_STEP_ID", "")]);
    assert_eq!(
        told(&empty),
        r#"SLURM_STEP_ID is "", but should be the number of a step"#
    );
}

#[test]
fn older_slurm_says_it_with_the_variables_of_the_job() {
    let older = with(
        SLURM,
        &[
            ("SLURM_STEP_NUM_TASKS", "-"),
            ("SLURM_STEP_TASKS_PER_NODE", "-"),
            ("SLURM_STEP_NODELIST", "-"),
        ],
    );
    let found = launch(&older).unwrap();
    assert_eq!((found.world_size, found.local_size), (64, None));
    assert_eq!(found.address.as_deref(), Some("n07"));
    let one_host = with(&older, &[("SLURM_JOB_NODELIST", "gpu1")]);
    let found = launch(&one_host).unwrap();
    assert_eq!(found.local_size, Some(64));
    assert_eq!(found.address.as_deref(), Some("127.0.0.1"));
}

#[test]
fn mpirun_says_where_rank_0_is_on_one_host_only() {
    let found = launch(OPEN_MPI).unwrap();
    assert_eq!(found.launcher, Some(Launcher::OpenMpi));
    assert!(found.has_mpi && found.is_on_one_host());
    assert_eq!(found.address.as_deref(), Some("127.0.0.1"));
    assert_eq!(found.variables.port, Some("PMIX_NAMESPACE"));
    let found = launch(INTEL).unwrap();
    assert_eq!(found.launcher, Some(Launcher::Pmi));
    assert_eq!((found.rank, found.local_rank), (3, Some(1)));
    assert_eq!((found.address, found.port), (None, None));
    let told = with(INTEL, &[("MASTER_ADDR", "n1")]);
    let told = launch(&told).unwrap();
    assert_eq!(told.address.as_deref(), Some("n1"));
    assert!(told.port.is_some());
}

#[test]
fn the_launcher_that_started_the_process_itself_counts() {
    let both = |a: Table<'_>, b: Table<'_>| launch(&[a, b].concat()).unwrap();
    assert_eq!(both(TORCHRUN, SLURM).rank, 5);
    assert_eq!(both(TORCHRUN, OPEN_MPI).rank, 5);
    assert_eq!(both(SLURM, OPEN_MPI).launcher, Some(Launcher::OpenMpi));
    assert_eq!(both(SLURM, INTEL).launcher, Some(Launcher::Pmi));
    let by_srun = both(SLURM, &[("PMI_RANK", "6"), ("PMI_SIZE", "7")]);
    assert_eq!(by_srun.launcher, Some(Launcher::Slurm));
    assert!(both(TORCHRUN, SLURM).port.is_some());
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of variables")]
fn half_an_environment_is_refused_by_the_missing_variable() {
    let missing = |table, name| told(&with(table, &[(name, "-")]));
    let without = |found: &str, variable: &str| {
        let value = if variable.ends_with("RANK") || variable.ends_with("PROCID") {
            "the number of this process, from 0"
        } else {
            "the number of processes"
        };
        format!(
            "{found} is set, but {variable} is not: set {variable} to {value}, or unset {found} to \
             run this process by itself"
        )
    };
    for (variable, value) in [
        ("MASTER_ADDR", "the host of rank 0"),
        ("MASTER_PORT", "a free port on the host of rank 0"),
    ] {
        assert_eq!(
            missing(TORCHRUN, variable),
            format!(
                "WORLD_SIZE is set, but {variable} is not: set {variable} to {value}, or unset RANK \
                 and WORLD_SIZE to run this process by itself"
            )
        );
    }
    assert_eq!(
        told(&with(
            TORCHRUN,
            &[("MASTER_ADDR", "-"), ("MASTER_PORT", "-")]
        )),
        "WORLD_SIZE is set, but MASTER_ADDR and MASTER_PORT are not: set MASTER_ADDR to the host of \
         rank 0 and MASTER_PORT to a free port on the host of rank 0, or unset RANK and WORLD_SIZE \
         to run this process by itself"
    );
    for (table, found, variable) in [
        (TORCHRUN, "RANK", "WORLD_SIZE"),
        (TORCHRUN, "WORLD_SIZE", "RANK"),
        (SLURM, "SLURM_STEP_ID", "SLURM_PROCID"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (INTEL, "PMI_SIZE", "PMI_RANK"),
        (INTEL, "PMI_RANK", "PMI_SIZE"),
    ] {
        assert_eq!(missing(table, variable), without(found, variable));
    }
    for (found, variable) in [
        ("LOCAL_RANK", "RANK"),
        ("LOCAL_WORLD_SIZE", "RANK"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("MPI_LOCALRANKID", "PMI_RANK"),
        ("MPI_LOCALNRANKS", "PMI_RANK"),
    ] {
        assert_eq!(told(&[(found, "0")]), without(found, variable));
    }
    let neither = with(
        SLURM,
        &[("SLURM_STEP_NUM_TASKS", "-"), ("SLURM_NTASKS", "-")],
    );
    assert_eq!(
        told(&neither),
        without("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
    );
}

#[test]
fn a_rank_of_pmix_alone_is_refused_but_where_a_shell_of_slurm_has_left_it() {
    assert_eq!(
        told(&[("PMIX_RANK", "0")]),
        "PMIX_RANK is set, but RANK and WORLD_SIZE are not: set RANK to the number of this process, \
         from 0 and WORLD_SIZE to the number of processes, or unset PMIX_RANK to run this process \
         by itself"
    );
    let shell = with(
        SLURM,
        &[("SLURM_STEP_ID", "interactive"), ("PMIX_RANK", "0")],
    );
    assert_eq!(launch(&shell).unwrap(), Launch::default());
    let step = launch(&with(SLURM, &[("PMIX_RANK", "6")])).unwrap();
    assert_eq!((step.launcher, step.has_mpi), (Some(Launcher::Slurm), true));
}

#[test]
fn a_step_without_the_number_of_its_job_needs_a_port() {
    let step = with(SLURM, &[("SLURM_JOB_ID", "-")]);
    assert_eq!(
        told(&step),
        "SLURM_STEP_ID is set, but SLURM_JOB_ID is not: set SLURM_JOB_ID to the number of the job, or \
         unset SLURM_STEP_ID to run this process by itself"
    );
    let given = launch(&with(&step, &[("MASTER_PORT", "29500")])).unwrap();
    assert_eq!(given.port, Some(29_500));
}

#[test]
fn numbers_of_torchruns_names_that_contradict_the_launcher_are_its_workers_or_refused() {
    let copies: Table<'_> = &[
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "n1"),
        ("MASTER_PORT", "29500"),
    ];
    let within = |outer: Table<'_>, more: Table<'_>| launch(&[outer, copies, more].concat());
    let refused = within(SLURM, &[]).unwrap_err().to_string();
    assert_eq!(
        refused,
        r#"RANK is "0", but should be 6, as SLURM_PROCID says"#
    );
    let refused = within(OPEN_MPI, &[]).unwrap_err().to_string();
    assert_eq!(
        refused,
        r#"RANK is "0", but should be 1, as OMPI_COMM_WORLD_RANK says"#
    );
    // Workers of a task have a number of their own, and one task may start any.
    for worker in [("LOCAL_RANK", "0"), ("TORCHELASTIC_RUN_ID", "none")] {
        let found = within(SLURM, &[worker]).unwrap();
        assert_eq!(found.launcher, Some(Launcher::Torchrun), "{worker:?}");
        assert_eq!((found.rank, found.world_size), (0, 2));
    }
    let one_task = with(
        SLURM,
        &[
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_PROCID", "0"),
            ("RANK", "1"),
        ],
    );
    let found = within(&one_task, &[]).unwrap();
    assert_eq!((found.rank, found.world_size), (1, 2));
}

#[test]
fn a_copy_of_another_launchers_number_must_agree() {
    let found = launch(&with(SLURM, &[("WORLD_SIZE", "7")])).unwrap();
    assert_eq!(found.launcher, Some(Launcher::Slurm));
    assert_eq!(
        told(&with(SLURM, &[("WORLD_SIZE", "64")])),
        r#"WORLD_SIZE is "64", but should be 7, as SLURM_STEP_NUM_TASKS says"#
    );
    assert_eq!(
        told(&with(OPEN_MPI, &[("RANK", "0")])),
        r#"RANK is "0", but should be 1, as OMPI_COMM_WORLD_RANK says"#
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "an entry per value")]
fn a_value_that_cannot_be_is_refused_with_what_it_should_be() {
    for (table, name, value, expected) in [
        (TORCHRUN, "RANK", "", "a whole number from 0"),
        (TORCHRUN, "RANK", "-1", "a whole number from 0"),
        (TORCHRUN, "RANK", "8", "below the world size of 8"),
        (TORCHRUN, "WORLD_SIZE", "0", "from 1 to 65536"),
        (TORCHRUN, "WORLD_SIZE", "65537", "from 1 to 65536"),
        (TORCHRUN, "WORLD_SIZE", "2.0", "a whole number from 1"),
        (
            TORCHRUN,
            "WORLD_SIZE",
            "99999999999999999999",
            "a whole number from 1",
        ),
        (
            TORCHRUN,
            "LOCAL_RANK",
            "4",
            "below 4, the number of processes on this host",
        ),
        (TORCHRUN, "LOCAL_RANK", "first", "a whole number from 0"),
        (
            TORCHRUN,
            "LOCAL_WORLD_SIZE",
            "9",
            "from 1 to the world size of 8",
        ),
        (
            TORCHRUN,
            "LOCAL_WORLD_SIZE",
            "0",
            "from 1 to the world size of 8",
        ),
        (TORCHRUN, "MASTER_ADDR", "", "the name or address of a host"),
        (
            TORCHRUN,
            "MASTER_ADDR",
            "n1 n2",
            "the name or address of a host",
        ),
        (
            TORCHRUN,
            "MASTER_ADDR",
            "[fd77::1",
            "the name or address of a host",
        ),
        (
            TORCHRUN,
            "MASTER_ADDR",
            "[]",
            "the name or address of a host",
        ),
        (TORCHRUN, "MASTER_PORT", "0", "a port from 1 to 65535"),
        (TORCHRUN, "MASTER_PORT", "65536", "a port from 1 to 65535"),
        (TORCHRUN, "MASTER_PORT", "", "a port from 1 to 65535"),
        (SLURM, "SLURM_PROCID", "7", "below the world size of 7"),
        (
            SLURM,
            "SLURM_LOCALID",
            "3",
            "below 3, the number of processes on this host",
        ),
        (SLURM, "SLURM_NODEID", "x", "a whole number from 0"),
        (SLURM, "SLURM_STEP_NUM_TASKS", "-2", "a whole number from 1"),
        (
            SLURM,
            "SLURM_STEP_TASKS_PER_NODE",
            "7",
            "the tasks of each node such as 4(x2),3, up to node 1",
        ),
        (
            SLURM,
            "SLURM_STEP_TASKS_PER_NODE",
            "4,3,x",
            "the tasks of each node such as 4(x2),3",
        ),
        (
            SLURM,
            "SLURM_STEP_NODELIST",
            "n[08,10",
            "a list of hosts such as n[01-03,7],gpu1: a bracket is not closed",
        ),
        (
            OPEN_MPI,
            "OMPI_COMM_WORLD_SIZE",
            "four",
            "a whole number from 1",
        ),
        (INTEL, "MPI_LOCALNRANKS", "x", "a whole number from 1"),
        (INTEL, "PMI_RANK", "4", "below the world size of 4"),
    ] {
        let message = format!("{name} is {value:?}, but should be {expected}");
        assert_eq!(told(&with(table, &[(name, value)])), message);
    }
    let no_local_size = with(TORCHRUN, &[("LOCAL_WORLD_SIZE", "-"), ("LOCAL_RANK", "8")]);
    assert_eq!(
        told(&no_local_size),
        r#"LOCAL_RANK is "8", but should be below the world size of 8"#
    );
}

#[test]
fn tasks_of_nodes_that_cannot_be_read_are_refused_also_where_the_node_is_not_known() {
    let name = "SLURM_STEP_TASKS_PER_NODE";
    for value in ["", "x", "2(x0)", "2(x3", "0"] {
        for node in ["0", "-"] {
            let changes = [(name, value), ("SLURM_NODEID", node)];
            assert_eq!(
                told(&with(SLURM, &changes)),
                format!(
                    "{name} is {value:?}, but should be the tasks of each node such as 4(x2),3"
                )
            );
        }
    }
}

#[test]
fn a_list_of_a_billion_hosts_is_no_bomb_and_a_long_value_is_cut() {
    let many = with(SLURM, &[("SLURM_STEP_NODELIST", "n[0-999999999]")]);
    assert_eq!(launch(&many).unwrap().address.as_deref(), Some("n0"));
    let long = "n[".repeat(50_000);
    let told = told(&with(SLURM, &[("SLURM_STEP_NODELIST", &long)]));
    assert!(told.len() < 300, "{}", told.len());
}
