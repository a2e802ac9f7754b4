//! The processes that a launcher has started together with this one.

use super::Failure;
use merak_mpu::{Built, EngineKind, Launch};
use merak_trainer::Error;

/// What the launcher says, for a command that runs ranks.
///
/// # Errors
/// Where the environment cannot be read, or asks for more processes than this build connects: ranks
/// are threads of one process as yet. The latter meets all processes alike, and rank 0 tells it.
pub(crate) fn launched() -> Result<Launch, Failure> {
    let launch = Launch::from_env().map_err(Error::from)?;
    let chosen = EngineKind::Auto.choose(&launch, Built::here(), false);
    match chosen.map_err(Error::from) {
        Ok(_) => Ok(launch),
        Err(error) if launch.rank > 0 => {
            tracing::info!(rank = launch.rank, "{error}");
            Err(ByRank0(error).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// An error that all ranks meet, of which rank 0 tells.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct ByRank0(pub(crate) Error);

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
