//! What launchers tell their processes in the environment.

use super::{
    hosts::{HostList, TaskList},
    hydra,
};
use crate::{Error, Result, control::complain, hash::fnv1a, tcp};
use std::{fmt, time::Duration};

/// The program that started this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// torchrun, `merak launch`, or a script that sets the same variables.
    Torchrun,
    /// A step of a SLURM job.
    Slurm,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// The `mpirun` of MPICH or Intel MPI, by its process management interface.
    Pmi,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Torchrun => "torchrun",
            Self::Slurm => "SLURM",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "MPICH or Intel MPI",
        })
    }
}

/// The facts about its world that a launcher gave this process.
///
/// - torchrun and `merak launch`: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`,
///   `MASTER_ADDR` and `MASTER_PORT`;
/// - Open MPI: `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK` and `_LOCAL_SIZE`;
/// - SLURM, inside a step that `SLURM_STEP_ID` names: `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or
///   `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` at `SLURM_NODEID`,
///   `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, and `SLURM_JOB_ID`;
/// - MPICH and Intel MPI: `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`.
///
/// The first launcher of this list that is seen counts, since a later one may have started an
/// earlier one; a SLURM step counts after another `mpirun` where the two differ. `MASTER_ADDR` and
/// `MASTER_PORT` count under every launcher. Without them the host of rank 0 is the first one of
/// SLURM's list, or this one where all processes are on it, and its port follows from the job's
/// number.
///
/// ```
/// use merak_mpu::{Launch, Launcher};
/// let variables = [
///     ("SLURM_STEP_ID", "0"), ("SLURM_JOB_ID", "4711"), ("SLURM_PROCID", "5"),
///     ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_LOCALID", "1"), ("SLURM_NODEID", "1"),
///     ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"), ("SLURM_STEP_NODELIST", "n[07-08]"),
/// ];
/// let lookup = |name: &str| {
///     let found = variables.iter().find(|(known, _)| *known == name);
///     found.map(|(_, value)| value.to_string())
/// };
/// let launch = Launch::from_lookup(lookup)?;
/// assert_eq!(launch.launcher, Some(Launcher::Slurm));
/// assert_eq!((launch.rank, launch.world_size), (5, 8));
/// assert_eq!((launch.local_rank, launch.local_size), (Some(1), Some(4)));
/// assert_eq!(launch.address.as_deref(), Some("n07"));
///
/// let lookup = |name: &str| (name == "RANK").then(|| "1".to_owned());
/// let error = Launch::from_lookup(lookup).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "RANK is set, but WORLD_SIZE is not: set WORLD_SIZE to the number of processes, or unset \
///      RANK to run this process by itself",
/// );
/// # Ok::<(), merak_mpu::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The launcher; none where this process was started by itself.
    pub launcher: Option<Launcher>,
    /// This process's number.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// This process's number among those of its host, where the launcher tells it.
    pub local_rank: Option<usize>,
    /// The number of processes on this host, where the launcher tells it.
    pub local_size: Option<usize>,
    /// The host of rank 0, as a name or an address, where it is known.
    pub address: Option<String>,
    /// The port where rank 0 is to be found, where there is an address.
    pub port: Option<u16>,
    /// Whether the launcher listens at that port itself, as torchrun's agent does; rank 0 then
    /// takes the next free one.
    pub port_is_taken: bool,
    /// The name of this start of the job, alike on all its processes, where the launcher has one.
    pub job: Option<String>,
    /// Whether `mpirun` or `srun` is among what started the process, so that an MPI library may
    /// find its peers.
    pub has_mpi: bool,
    /// The variables that gave these values.
    pub variables: LaunchVariables,
}

/// The variable that gave each value of a [`Launch`]; none for one that no variable gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LaunchVariables {
    /// That of the rank.
    pub rank: Option<&'static str>,
    /// That of the world size.
    pub world_size: Option<&'static str>,
    /// That of the local rank.
    pub local_rank: Option<&'static str>,
    /// That of the local size.
    pub local_size: Option<&'static str>,
    /// That of the host of rank 0.
    pub address: Option<&'static str>,
    /// That of the port, or of the job that it follows from.
    pub port: Option<&'static str>,
    /// The first one of those that name the job.
    pub job: Option<&'static str>,
}

impl Default for Launch {
    /// A process that no launcher started.
    fn default() -> Self {
        Self {
            launcher: None,
            rank: 0,
            world_size: 1,
            local_rank: None,
            local_size: None,
            address: None,
            port: None,
            port_is_taken: false,
            job: None,
            has_mpi: false,
            variables: LaunchVariables::default(),
        }
    }
}

impl Launch {
    /// Reads the variables of the process environment.
    ///
    /// # Errors
    /// As [`Launch::from_lookup`].
    pub fn from_env() -> Result<Self> {
        // A value that is no text stays a value, so that it is refused and not overlooked.
        let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
        Self::from_lookup(|name| match name {
            hydra::JOB => hydra::job(),
            name => std::env::var_os(name).map(text),
        })
    }

    /// Reads the variables through a function, as from a table in a test.
    ///
    /// # Errors
    /// [`Error::BadVariable`] for a value that cannot be read or does not fit the others,
    /// [`Error::MissingVariable`] where only some of a launcher's variables are set.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let variables = Variables(&lookup);
        let is_set = |name| variables.one_of(&[name]).is_some();
        let found = if is_set("RANK") && is_set("WORLD_SIZE") {
            // What starts several processes of its own on a host numbers them. Without that these
            // may be copies of what the launcher of this process says, or be left from elsewhere.
            if !is_set("LOCAL_RANK") && !is_set(RUN[0]) {
                let outer = by_other(&variables)?.filter(|outer| outer.world_size > 1);
                outer.map_or(Ok(()), |outer| variables.expect_copies_of(&outer))?;
            }
            Some(torchrun(&variables)?)
        } else {
            by_other(&variables)?
        };
        let Some(mut launch) = found else {
            variables.expect_none()?;
            return Ok(Self::default());
        };
        launch.has_mpi = MPI.iter().any(|name| lookup(name).is_some())
            || matches!(launch.launcher, Some(Launcher::Slurm));
        launch.check(&variables)?;
        launch.find_rank_0(&variables)?;
        Ok(launch)
    }

    /// Tells rank 0 that this process cannot join because of `error`, which [`Launch::from_env`]
    /// has returned. Its rendezvous then ends with the reason on all ranks, and nobody waits for
    /// this process until the deadline.
    ///
    /// Does nothing unless variables such as torchrun's say where rank 0 is; gives up where it is
    /// not found within `patience`.
    pub fn report(error: &Error, patience: Duration) {
        let text = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
        let host = text("MASTER_ADDR").map(without_brackets);
        let host = host.filter(|host| !host.is_empty());
        let port = text("MASTER_PORT").and_then(|port| port.trim().parse().ok());
        let is_rank = ["RANK", "WORLD_SIZE"]
            .iter()
            .any(|name| text(name).is_some());
        if let (Some(host), Some(port), true) = (host, port, is_rank) {
            let mut launch = Self::default();
            launch.name_job(&Variables(&text), &RUN);
            complain(
                &tcp::JoinOptions {
                    run: launch.job.unwrap_or_default(),
                    ..tcp::JoinOptions::new(0, 1, &host, port).with_timeout(patience)
                },
                &error.to_string(),
            );
        }
    }

    /// Whether all processes are on this host, as far as the launcher tells.
    pub fn is_on_one_host(&self) -> bool {
        self.world_size == 1 || self.local_size == Some(self.world_size)
    }

    /// Refuses numbers that contradict each other.
    fn check(&self, variables: &Variables<'_>) -> Result<()> {
        let Self {
            rank, world_size, ..
        } = *self;
        let names = &self.variables;
        let legal = (1..=MOST_RANKS).contains(&world_size);
        variables.require(names.world_size, legal, || {
            format!("from 1 to {MOST_RANKS}")
        })?;
        variables.require(names.rank, rank < world_size, || {
            format!("below the world size of {world_size}")
        })?;
        let local_size = self.local_size.unwrap_or(world_size);
        variables.require(
            names.local_size,
            (1..=world_size).contains(&local_size),
            || format!("from 1 to the world size of {world_size}"),
        )?;
        let local_rank = self.local_rank.unwrap_or_default();
        variables.require(names.local_rank, local_rank < local_size, || {
            match self.local_size {
                Some(_) => format!("below {local_size}, the number of processes on this host"),
                None => format!("below the world size of {world_size}"),
            }
        })?;
        // A script may have copied some of the numbers only.
        variables.expect_copies_of(self)
    }

    /// Adds where rank 0 is: as `MASTER_ADDR` and `MASTER_PORT` say, else as the launcher does.
    fn find_rank_0(&mut self, variables: &Variables<'_>) -> Result<()> {
        let names = &mut self.variables;
        if let Some((name, address)) = variables.one_of(&["MASTER_ADDR"]) {
            let address = without_brackets(address);
            let is_legal = |c: char| c.is_ascii_alphanumeric() || "-_.:%".contains(c);
            let legal = !address.is_empty() && address.chars().all(is_legal);
            variables.require(Some(name), legal, || "the name or address of a host".into())?;
            (self.address, names.address) = (Some(address), Some(name));
        }
        let port = variables.one_of(&["MASTER_PORT"]);
        if let Some((name, text)) = port {
            let port = text.trim().parse().ok().filter(|&port| port > 0);
            variables.require(Some(name), port.is_some(), || {
                "a port from 1 to 65535".into()
            })?;
            (self.port, names.port) = (port, Some(name));
        }
        if self.launcher == Some(Launcher::Torchrun) && self.world_size > 1 {
            let needed = [("MASTER_ADDR", names.address), ("MASTER_PORT", names.port)];
            let missing = needed.iter().filter(|(_, found)| found.is_none());
            let variables: Vec<_> = missing.map(|(name, _)| *name).collect();
            if !variables.is_empty() {
                let found = "WORLD_SIZE";
                return Err(Error::MissingVariable { variables, found });
            }
        }
        if self.port.is_none() && self.address.is_some() {
            // All jobs without a number would have one port.
            if let (Some(Launcher::Slurm), None) = (self.launcher, names.job) {
                let (variables, found) = (vec!["SLURM_JOB_ID"], "SLURM_STEP_ID");
                return Err(Error::MissingVariable { variables, found });
            }
            let job = self.job.as_deref().unwrap_or_default();
            (self.port, names.port) = (Some(port_of(job)), names.job);
        }
        Ok(())
    }
}

/// A host's name or address. One of IPv6 may stand in brackets, as it does before a port.
fn without_brackets(host: String) -> String {
    let inner = host.strip_prefix('[');
    let inner = inner.and_then(|inner| inner.strip_suffix(']'));
    match inner {
        Some(inner) => inner.to_owned(),
        None => host,
    }
}

/// The largest world: a larger number is a mistake, and rank 0 keeps an entry for every rank.
const MOST_RANKS: usize = 1 << 16;

/// The variables by which torchrun names a start of a run.
const RUN: [&str; 2] = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"];

/// Variables that an MPI library's process management sets, besides SLURM's.
const MPI: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", PMIX_RANK];

/// Variables that no launcher sets without others, which are then missing.
const HALVES: [(&str, &[&str]); 9] = [
    ("RANK", &["WORLD_SIZE"]),
    ("WORLD_SIZE", &["RANK"]),
    ("LOCAL_RANK", &["RANK"]),
    ("LOCAL_WORLD_SIZE", &["RANK"]),
    ("OMPI_COMM_WORLD_LOCAL_RANK", &["OMPI_COMM_WORLD_RANK"]),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", &["OMPI_COMM_WORLD_RANK"]),
    ("MPI_LOCALRANKID", &["PMI_RANK"]),
    ("MPI_LOCALNRANKS", &["PMI_RANK"]),
    // It says which process this is, and nothing says of how many.
    (PMIX_RANK, &["RANK", "WORLD_SIZE"]),
];

/// A process's number under an MPI library's process management, `PMIx`.
const PMIX_RANK: &str = "PMIX_RANK";

/// How the names of variables end that count processes, and number none.
const COUNTS: [&str; 3] = ["SIZE", "TASKS", "NRANKS"];

/// The launcher other than torchrun that started the process.
fn by_other(variables: &Variables<'_>) -> Result<Option<Launch>> {
    if let Some(launch) = open_mpi(variables)? {
        return Ok(Some(launch));
    }
    let (slurm, pmi) = (slurm(variables)?, pmi(variables)?);
    let is_same = |a: &Launch, b: &Launch| (a.rank, a.world_size) == (b.rank, b.world_size);
    // `srun` sets both alike; under `mpirun` within a job, the step is that of its helpers.
    let slurm = slurm.filter(|slurm| pmi.as_ref().is_none_or(|pmi| is_same(slurm, pmi)));
    Ok(slurm.or(pmi))
}

fn torchrun(variables: &Variables<'_>) -> Result<Launch> {
    let mut launch = numbers(
        Launcher::Torchrun,
        variables,
        "WORLD_SIZE",
        [
            &["RANK"],
            &["WORLD_SIZE"],
            &["LOCAL_RANK"],
            &["LOCAL_WORLD_SIZE"],
        ],
    )?;
    let agent = variables.one_of(&["TORCHELASTIC_USE_AGENT_STORE"]);
    launch.port_is_taken = agent.is_some_and(|(_, value)| value.eq_ignore_ascii_case("true"));
    launch.name_job(variables, &RUN);
    Ok(launch)
}

fn open_mpi(variables: &Variables<'_>) -> Result<Option<Launch>> {
    let names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"];
    let Some((found, _)) = variables.one_of(&names) else {
        return Ok(None);
    };
    let locals = ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    let all = [&names[..1], &names[1..], &locals[..1], &locals[1..]];
    let mut launch = numbers(Launcher::OpenMpi, variables, found, all)?;
    launch.name_job(variables, &["OMPI_MCA_ess_base_jobid"]);
    launch.name_job(variables, &["PMIX_NAMESPACE"]);
    launch.is_here();
    Ok(Some(launch))
}

fn pmi(variables: &Variables<'_>) -> Result<Option<Launch>> {
    let names = ["PMI_RANK", "PMI_SIZE"];
    let Some((found, _)) = variables.one_of(&names) else {
        return Ok(None);
    };
    let locals = ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
    let all = [&names[..1], &names[1..], &locals[..1], &locals[1..]];
    let mut launch = numbers(Launcher::Pmi, variables, found, all)?;
    launch.name_job(variables, &[hydra::JOB]);
    launch.is_here();
    Ok(Some(launch))
}

fn slurm(variables: &Variables<'_>) -> Result<Option<Launch>> {
    if !is_in_step(variables)? {
        return Ok(None);
    }
    let mut launch = numbers(
        Launcher::Slurm,
        variables,
        "SLURM_STEP_ID",
        [
            &["SLURM_PROCID"],
            &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
            &["SLURM_LOCALID"],
            &[],
        ],
    )?;
    launch.name_job(
        variables,
        &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
    );
    let names = &mut launch.variables;
    let node = variables.number(&["SLURM_NODEID"])?;
    if let Some((name, text)) = variables.one_of(&["SLURM_STEP_TASKS_PER_NODE"]) {
        let form = "the tasks of each node such as 4(x2),3";
        let tasks = TaskList::read(&text).ok_or_else(|| bad(name, &text, form.to_owned()))?;
        if let Some((_, node)) = node {
            launch.local_size = tasks.on(node);
            variables.require(Some(name), launch.local_size.is_some(), || {
                format!("{form}, up to node {node}")
            })?;
            names.local_size = Some(name);
        }
    }
    let lists = [
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
    ];
    if let Some((name, list)) = variables.one_of(&lists) {
        let hosts = list.parse::<HostList>().map_err(|reason| {
            let expected = format!("a list of hosts such as n[01-03,7],gpu1: {reason}");
            bad(name, &list, expected)
        })?;
        if hosts.num_hosts() == 1 && launch.local_size.is_none() {
            (launch.local_size, names.local_size) = (Some(launch.world_size), Some(name));
        }
        (launch.address, names.address) = (Some(hosts.first()), Some(name));
    }
    // The name of the only host need not be known to it.
    launch.is_here();
    Ok(Some(launch))
}

/// Whether the process is part of a step that `srun` started, and neither a job's script nor an
/// interactive shell.
fn is_in_step(variables: &Variables<'_>) -> Result<bool> {
    const NAMED: [&str; 4] = ["batch", "extern", "interactive", "pending"];
    /// Numbers from here on are steps that SLURM makes for itself.
    const FIRST_SPECIAL: u64 = 0xffff_fff0;
    let Some((name, step)) = variables.one_of(&["SLURM_STEP_ID"]) else {
        return Ok(false);
    };
    if NAMED.contains(&step.trim()) {
        return Ok(false);
    }
    match step.trim().parse::<u64>() {
        Ok(number) => Ok(number < FIRST_SPECIAL),
        Err(_) => Err(bad(name, &step, "the number of a step".into())),
    }
}

impl Launch {
    /// Names the job by the variables that are set, if the first one is.
    fn name_job(&mut self, variables: &Variables<'_>, names: &[&'static str]) {
        if let Some((name, _)) = variables.one_of(&names[..1]) {
            let values = names.iter().filter_map(|name| (variables.0)(name));
            self.job = Some(values.collect::<Vec<_>>().join("."));
            self.variables.job = Some(name);
        }
    }

    /// Notes that rank 0 is on this host, where all processes are.
    fn is_here(&mut self) {
        if self.is_on_one_host() {
            self.address = Some("127.0.0.1".to_owned());
            self.variables.address = self.variables.local_size;
        }
    }
}

/// A launch with the numbers of these variables: rank, world size, local rank and local size. The
/// first two are there where `found` is.
fn numbers(
    launcher: Launcher,
    variables: &Variables<'_>,
    found: &'static str,
    [rank, world_size, local_rank, local_size]: [&[&'static str]; 4],
) -> Result<Launch> {
    let needed = |names: &[&'static str]| {
        let missing = Error::MissingVariable {
            variables: vec![names[0]],
            found,
        };
        variables.number(names)?.ok_or(missing)
    };
    let (rank, world_size) = (needed(rank)?, needed(world_size)?);
    let (local_rank, local_size) = (variables.number(local_rank)?, variables.number(local_size)?);
    let name = |(name, _): (&'static str, usize)| name;
    let value = |(_, value): (&'static str, usize)| value;
    Ok(Launch {
        launcher: Some(launcher),
        rank: rank.1,
        world_size: world_size.1,
        local_rank: local_rank.map(value),
        local_size: local_size.map(value),
        variables: LaunchVariables {
            rank: Some(rank.0),
            world_size: Some(world_size.0),
            local_rank: local_rank.map(name),
            local_size: local_size.map(name),
            ..LaunchVariables::default()
        },
        ..Launch::default()
    })
}

/// The port of a job whose launcher names none: the same on all its processes, and below those that
/// systems give away by themselves.
fn port_of(job: &str) -> u16 {
    const FIRST: u16 = 20_000;
    const NUM_PORTS: u64 = 12_000;
    FIRST + (fnv1a(job.bytes()) % NUM_PORTS) as u16
}

/// Access to the environment.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// The first of these variables that is set, and its value.
    fn one_of(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().find_map(|name| Some((*name, (self.0)(name)?)))
    }

    fn number(&self, names: &[&'static str]) -> Result<Option<(&'static str, usize)>> {
        let Some((name, value)) = self.one_of(names) else {
            return Ok(None);
        };
        let Ok(number) = value.trim().parse() else {
            let counts = COUNTS.iter().any(|end| name.ends_with(end));
            let least = u8::from(counts);
            return Err(bad(name, &value, format!("a whole number from {least}")));
        };
        Ok(Some((name, number)))
    }

    /// Refuses the value of a variable that is not legal. Without a variable nobody gave a value.
    fn require(
        &self,
        name: Option<&'static str>,
        legal: bool,
        expected: impl FnOnce() -> String,
    ) -> Result<()> {
        match name {
            Some(name) if !legal => {
                let value = (self.0)(name).unwrap_or_default();
                Err(bad(name, &value, expected()))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a copy in `RANK` or `WORLD_SIZE` that contradicts what a launcher says.
    fn expect_copies_of(&self, launch: &Launch) -> Result<()> {
        let names = &launch.variables;
        for (name, found, number) in [
            ("RANK", names.rank, launch.rank),
            ("WORLD_SIZE", names.world_size, launch.world_size),
        ] {
            let copy = self.number(&[name])?;
            let agrees = copy.is_none_or(|(_, copy)| copy == number);
            self.require(Some(name), agrees, || {
                format!("{number}, as {} says", found.unwrap_or_default())
            })?;
        }
        Ok(())
    }

    /// Refuses numbers of ranks where no launcher is seen.
    fn expect_none(&self) -> Result<()> {
        for (found, missing) in HALVES {
            // A shell that SLURM starts through PMIx gives its rank on to what is typed there.
            let is_of_shell = found == PMIX_RANK && (self.0)("SLURM_STEP_ID").is_some();
            if !is_of_shell && self.number(&[found])?.is_some() {
                let variables = missing.to_vec();
                return Err(Error::MissingVariable { variables, found });
            }
        }
        Ok(())
    }
}

fn bad(variable: &'static str, value: &str, expected: String) -> Error {
    const LONGEST: usize = 100;
    let mut shown: String = value.chars().take(LONGEST).collect();
    if shown.len() < value.len() {
        shown.push_str("..");
    }
    Error::BadVariable {
        variable,
        value: shown,
        expected,
    }
}
