//! Processes that `merak launch` has started.

use merak_mpu::Launch;

/// What the names of runs that `merak launch` starts begin with.
pub(crate) const RUN: &str = "merak-";

/// Whether `merak launch` has started the processes of a launch, which then have the same command
/// line and environment.
pub(crate) fn has_started(launch: &Launch) -> bool {
    launch.job.as_ref().is_some_and(|job| job.starts_with(RUN))
}
