//! The processes that a launcher has started together with this one.

use merak_mpu::{Built, ChosenEngine, EngineKind, Launch};
use merak_trainer::{Config, Device, EngineChoice, Error, Result, World, metrics::Screen};
use std::time::Duration;

/// Longest wait for the other processes where the configuration cannot be read.
const RENDEZVOUS: Duration = Duration::from_mins(1);

/// The ranks of a command, as the launcher and `distributed.engine` say. Where the configuration
/// cannot be read, the launcher decides alone.
///
/// # Errors
/// Where the environment cannot be read, asks for what this build has no engine for, or the ranks
/// do not come together.
pub(crate) fn join(config: Option<&Config>, screen: &Screen) -> Result<World> {
    let launch = Launch::from_env()?;
    if launch.rank > 0 {
        screen.of_rank(launch.rank);
    }
    let (engine, on_cuda) = config.map_or((EngineChoice::Auto, false), |config| {
        let arguments = config.arguments();
        let on_cuda = arguments.compute.device == Device::Cuda;
        (arguments.distributed.engine, on_cuda)
    });
    match EngineKind::from(engine).choose(&launch, Built::here(), on_cuda) {
        Ok(ChosenEngine::Threads) => Ok(World::of_threads()),
        Ok(_) => {
            let timeout = config.map_or(RENDEZVOUS, |config| {
                Duration::from_secs_f64(config.arguments().distributed.timeout_s)
            });
            World::of_process(launch.join(timeout)?)
        }
        // All processes meet this alike, and rank 0 tells it.
        Err(error) if launch.rank > 0 => Err(Error::Told(Box::new(error.into()))),
        Err(error) => Err(error.into()),
    }
}

/// The configuration of a command and its ranks, whose number fits the degrees.
///
/// # Errors
/// As [`join`]; where a process cannot read its configuration.
pub(crate) fn join_with(config: Result<Config>, screen: &Screen) -> Result<(Config, World)> {
    let world = join(config.as_ref().ok(), screen)?;
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
        "{command} runs its ranks as threads of one process, but {} processes were started: start one",
        launch.world_size
    ));
    Err(if launch.rank > 0 {
        Error::Told(Box::new(error))
    } else {
        error
    })
}

/// What the launcher says, in a line for people.
pub(crate) fn describe() -> String {
    let launch = match Launch::from_env() {
        Ok(launch) => launch,
        Err(error) => return error.to_string(),
    };
    let Some(launcher) = launch.launcher else {
        return "none: ranks are threads of this process".to_owned();
    };
    let process = format!(
        "{launcher}, process {} of {}",
        launch.rank, launch.world_size
    );
    match EngineKind::Auto.choose(&launch, Built::here(), false) {
        Ok(engine) => format!("{process}, engine {engine}"),
        Err(error) => format!("{process}: {error}"),
    }
}
