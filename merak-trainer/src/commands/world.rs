//! The processes that a launcher has started together with this one.

#[cfg(feature = "nccl")]
mod nccl;

use super::{environment, failure::rank_0_tells};
use merak_mpu::{
    Built, ChosenEngine, EngineKind, Error as Met, Group, Launch, Member, Wait, tcp, threads,
};
use merak_trainer::{
    Config, Device, Error, Given, Result, Teller, World, chain,
    metrics::Screen,
    network::{Make, on_host},
};
use serde_json::{Value, json};
use std::{env, iter, net::ToSocketAddrs, time::Duration};

/// Longest wait for the other processes where the configuration cannot be read.
const RENDEZVOUS: Duration = Duration::from_mins(1);

/// Folder, within a run's, of the logs of the ranks in processes of their own.
const LOGS: &str = "logs";

/// The configuration of a command without a file: what the environment says, and what the command
/// gives.
///
/// # Errors
/// As [`Config::load_with`], for the environment's variables.
pub(crate) fn of_environment(given: impl IntoIterator<Item = Given>) -> Result<Config> {
    Config::load_with(None, environment::variables()?, &[], given)
}

/// The engine that a configuration asks for, and whether its tensors lie on CUDA devices.
fn asked(config: Option<&Config>) -> (EngineKind, bool) {
    config.map_or((EngineKind::Auto, false), |config| {
        let arguments = config.arguments();
        let on_cuda = arguments.compute.device == Device::Cuda;
        (arguments.distributed.engine, on_cuda)
    })
}

/// How long a process waits for the others.
fn timeout(config: Option<&Config>) -> Duration {
    let timeout = config.map(|config| config.arguments().distributed.timeout_s);
    // A wait that is none is refused when the processes have met, once for all.
    let timeout = timeout.and_then(|wait| Duration::try_from_secs_f64(wait).ok());
    let timeout = timeout.filter(|wait| !wait.is_zero());
    timeout.unwrap_or(RENDEZVOUS)
}

/// The ranks of a command, as the launcher and `distributed.engine` say. Where the configuration
/// cannot be read, the launcher decides alone.
///
/// # Errors
/// Where the environment cannot be read, asks for what this build has no engine for, or the ranks
/// do not come together.
pub(crate) fn join(config: Option<&Config>, screen: &Screen) -> Result<World> {
    let launch = launch(screen)?;
    let (kind, on_cuda) = asked(config);
    match choose(kind, &launch, on_cuda)? {
        ChosenEngine::Threads => Ok(World::of_threads()),
        engine => {
            if let (1, Some(config)) = (launch.world_size, config) {
                expect_single_rank(engine, config)?;
            }
            let member = join_by(engine, &launch, timeout(config), config)?;
            World::of_process(member, engine)
        }
    }
}

/// What the launcher says; lines of another rank than the first are marked from here on.
///
/// # Errors
/// Where the environment cannot be read.
pub(crate) fn launch(screen: &Screen) -> Result<Launch> {
    let launch = Launch::from_env()?;
    if launch.rank > 0 {
        screen.of_rank(launch.rank);
    }
    Ok(launch)
}

/// The engine for a launch in this build.
fn choose(kind: EngineKind, launch: &Launch, on_cuda: bool) -> Result<ChosenEngine> {
    let chosen = kind.choose(launch, Built::here(), on_cuda);
    told_once(launch, chosen.map_err(Error::from))
}

/// What a process meets before it has met the others; rank 0 tells it where all meet it alike.
pub(crate) fn told_once<T>(launch: &Launch, outcome: Result<T>) -> Result<T> {
    outcome.map_err(|error| {
        if rank_0_tells(launch) {
            Error::Told(Box::new(error))
        } else {
            error
        }
    })
}

/// Refuses an engine between processes for a process alone that is to be several ranks.
fn expect_single_rank(engine: ChosenEngine, config: &Config) -> Result<()> {
    // What is wrong with the degrees themselves is told later.
    let Ok(args) = config.check() else {
        return Ok(());
    };
    let ranks = args.world_size();
    if ranks == 1 {
        return Ok(());
    }
    let command = command_by(engine, ranks);
    let key = "distributed.engine";
    Err(Error::CommandLine(format!(
        "\"{key}\" is {engine} ({}), whose ranks are processes, but one process was started for \
         {ranks} ranks: write `{command}`, or choose auto, whose ranks are then threads",
        config.origin(key),
    )))
}

/// A word of a command line as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// The engine of a command without a file, and its configuration. Without a `kind` the environment
/// says which engine.
///
/// # Errors
/// As [`join`].
pub(crate) fn engine(kind: Option<EngineKind>, launch: &Launch) -> Result<(ChosenEngine, Config)> {
    let config = told_once(launch, of_environment([]))?;
    let (in_environment, on_cuda) = asked(Some(&config));
    let engine = choose(kind.unwrap_or(in_environment), launch, on_cuda)?;
    Ok((engine, config))
}

/// The ranks of this process in a world of `ranks` ranks: all of them where it was started alone,
/// else the one that the launcher says.
///
/// # Errors
/// As [`join`]; for an engine whose ranks are processes, of which one was started for several.
pub(crate) fn members(
    engine: ChosenEngine,
    config: &Config,
    launch: &Launch,
    ranks: usize,
) -> Result<Vec<Member>> {
    let alone = launch.world_size == 1;
    Ok(match engine {
        ChosenEngine::Threads => threads::world(ranks, threads::WorldOptions::default()),
        ChosenEngine::Tcp if alone => tcp::world(ranks, timeout(Some(config)))?,
        engine if alone && ranks > 1 => {
            let command = command_by(engine, ranks);
            return Err(Error::CommandLine(format!(
                "the ranks of the engine {engine} are processes, but one process was started for \
                 {ranks} ranks: write `{command}`, or choose threads or tcp"
            )));
        }
        engine => vec![join_by(
            engine,
            launch,
            timeout(Some(config)),
            Some(config),
        )?],
    })
}

/// This command after what starts the processes of an engine.
fn command_by(engine: ChosenEngine, ranks: usize) -> String {
    let starter = match engine {
        ChosenEngine::Mpi => format!("mpirun -n {ranks} merak"),
        _ => format!("merak launch -n {ranks} --"),
    };
    let words = env::args_os().skip(1);
    let words = words.map(|word| quoted(&word.to_string_lossy()));
    iter::once(starter)
        .chain(words)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The group of all ranks, and what makes the numbers that they exchange when their engine is
/// timed: on their devices under `nccl`, else in memory of the host.
///
/// # Errors
/// Where the world has failed, or the rank has no device.
pub(crate) fn timed(engine: ChosenEngine, member: &Member) -> Result<(Group, Box<Make>)> {
    let group = member.world_group()?;
    #[cfg(feature = "nccl")]
    if engine == ChosenEngine::Nccl {
        return Ok((group, nccl::numbers(member)?));
    }
    let _ = engine;
    Ok((group, Box::new(on_host)))
}

/// Ranks for a trial of the engine that a run would have, as far as this process can have them:
/// two of this process, else the one that the launcher says, in the world of all its processes.
///
/// # Errors
/// As [`join`].
pub(crate) fn trial_members(config: &Config) -> Result<Vec<Member>> {
    let launch = Launch::from_env()?;
    let (kind, on_cuda) = asked(Some(config));
    let timeout = timeout(Some(config));
    Ok(match kind.choose(&launch, Built::here(), on_cuda)? {
        ChosenEngine::Threads => threads::world(2, threads::WorldOptions::default()),
        ChosenEngine::Tcp => {
            expect_host_of_rank_0(&launch)?;
            tcp::world(2, timeout)?
        }
        engine => vec![join_by(engine, &launch, timeout, Some(config))?],
    })
}

/// Refuses a name of the host of rank 0 that this host cannot look up.
fn expect_host_of_rank_0(launch: &Launch) -> Result<()> {
    let (Some(host), Some(port)) = (launch.address.as_deref(), launch.port) else {
        return Ok(());
    };
    let found = (host, port).to_socket_addrs();
    found.map(drop).map_err(|error| {
        let name = launch.variables.address.unwrap_or("MASTER_ADDR");
        Error::CommandLine(format!(
            "rank 0 is on {host}, as {name} says, which this host does not find: {error}"
        ))
    })
}

/// Keeps the lines of this process in the folder of a run, where it is there; with `makes`, it is
/// made. Does nothing in the process of the first rank, and without `output_dir`.
pub(crate) fn keep_log(config: &Config, screen: &Screen, makes: bool) {
    let Some(folder) = config.arguments().output_dir.as_deref() else {
        return;
    };
    if !makes && !folder.is_dir() {
        return;
    }
    if let Err(error) = screen.keep_log(&folder.join(LOGS)) {
        tracing::warn!(%error, "this rank's log cannot be kept");
    }
}

/// Joins the processes of a launch by the engine that was chosen.
fn join_by(
    engine: ChosenEngine,
    launch: &Launch,
    timeout: Duration,
    config: Option<&Config>,
) -> Result<Member> {
    #[cfg(feature = "nccl")]
    if engine == ChosenEngine::Nccl {
        return nccl::join(launch, timeout, config);
    }
    let _ = config;
    launch
        .join(engine, timeout)
        .map_err(|met| unjoined(launch.rank, met))
}

/// Why a process has not met the others. Where some have not come, it says what to do. A rank that
/// was lost is named by each of the others: none has a log yet, and the lost one may tell nothing.
fn unjoined(rank: usize, met: Met) -> Error {
    let lost = |rank, cause| Error::Rank {
        rank,
        cause,
        teller: Teller::HereForOther,
    };
    match met {
        Met::Timeout { ref wait, .. } if wait.op == Wait::JOIN => Error::Absent(Box::new(met)),
        Met::Timeout { ref wait, .. } => match wait.missing.first() {
            Some(missing) => lost(missing.0, met.to_string()),
            None => met.into(),
        },
        Met::Aborted { by, reason } if by != rank => lost(by, reason),
        met => met.into(),
    }
}

/// The configuration of a command and its ranks, whose number fits the degrees. With `logs`, other
/// ranks than the first keep their lines as [`keep_log`] does.
///
/// # Errors
/// As [`join`]; where a process cannot read its configuration.
pub(crate) fn join_with(
    config: Result<Config>,
    screen: &Screen,
    logs: bool,
) -> Result<(Config, World)> {
    let world = join(config.as_ref().ok(), screen)?;
    if let Some(config) = config.as_ref().ok().filter(|_| logs) {
        keep_log(config, screen, false);
    }
    let checked = config.and_then(|config| {
        let args = config.check()?;
        let located = |error| config.locate(error);
        world.check_size(&args).map_err(located)?;
        Ok(config)
    });
    Ok((world.agree(checked)?, world))
}

/// Refuses to run as one of several processes.
///
/// # Errors
/// Where the environment cannot be read, or a launcher has started several processes.
pub(crate) fn expect_one(command: &str) -> Result<()> {
    let launch = Launch::from_env()?;
    if launch.world_size == 1 {
        return Ok(());
    }
    let error = Error::CommandLine(format!(
        "{command} runs its ranks as threads of one process, but {} says that {} were started: start one",
        launch.variables.world_size.unwrap_or("the launcher"),
        launch.world_size
    ));
    told_once(&launch, Err(error))
}

/// What the launcher says, and the engine that a run would have which the environment configures,
/// by name. What cannot be read or does not fit says so in its place.
pub(crate) fn describe(config: &Result<Config>) -> Vec<(&'static str, Value)> {
    let launch = match Launch::from_env() {
        Ok(launch) => launch,
        Err(error) => return vec![("launcher", json!(error.to_string()))],
    };
    let launcher = launch.launcher.map(|launcher| launcher.to_string());
    let none = "none: ranks are threads of this process".to_owned();
    let engine = config
        .as_ref()
        .map_err(|error| chain(error))
        .and_then(|config| {
            let (kind, on_cuda) = asked(Some(config));
            let chosen = kind.choose(&launch, Built::here(), on_cuda);
            chosen.map_err(|error| error.to_string())
        });
    let engine = engine.map_or_else(|error| error, |engine| engine.to_string());
    let address = launch.address.as_deref().map_or_else(
        || "none".to_owned(),
        |host| match launch.port {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        },
    );
    #[cfg_attr(
        not(feature = "nccl"),
        expect(unused_mut, reason = "no library is looked for")
    )]
    let mut found = vec![
        ("engine", json!(engine)),
        ("launcher", json!(launcher.unwrap_or(none))),
        ("rank", json!(launch.rank)),
        ("world_size", json!(launch.world_size)),
        ("address_of_rank_0", json!(address)),
    ];
    #[cfg(feature = "nccl")]
    found.push(("nccl", json!(nccl::describe(config.as_ref().ok()))));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::failure::Failure;
    use merak_mpu::Rank;

    #[test]
    fn a_rank_that_is_lost_while_the_ranks_meet_ends_the_others_with_3_and_a_wrong_launch_with_2() {
        let status = |met| Failure::from(unjoined(1, met)).exit_status();
        let late = |op: &str| Met::Timeout {
            after: RENDEZVOUS,
            wait: Box::new(Wait {
                rank: Rank(1),
                op: op.to_owned(),
                group: "world of 3".to_owned(),
                sequence: 0,
                missing: vec![Rank(2)],
            }),
            others: Vec::new(),
        };
        let aborted = |by| Met::Aborted {
            by,
            reason: "its process ended".to_owned(),
        };
        for lost in [aborted(0), aborted(2), late(Wait::JOIN), late("connect")] {
            assert_eq!(status(lost), 3);
        }
        assert_eq!(status(aborted(1)), 1);
        let named = unjoined(1, late("connect")).to_string();
        assert!(
            named.starts_with("rank 2 failed: no answer within "),
            "{named}"
        );
        let reason = || "the world has 3 ranks".to_owned();
        let refused = Met::Refused {
            rank: 1,
            reason: reason(),
        };
        let unmet = Met::Rendezvous {
            rank: 1,
            address: "n1:29500".to_owned(),
            reason: reason(),
        };
        assert_eq!([refused, unmet].map(status), [2, 2]);
    }
}
