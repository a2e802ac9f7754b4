//! How a command ends when it does not succeed.

use std::{error::Error, process::ExitCode};

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Box<dyn Error + Send + Sync>);

/// How a command ended.
pub(crate) type Outcome = Result<ExitCode, Failure>;

impl Failure {
    /// 2 where the command line, the configuration or an input is at fault, 1 where the run failed.
    pub(crate) fn exit_status(&self) -> u8 {
        let run_failed = match (
            self.0.downcast_ref::<merak_trainer::Error>(),
            self.0.downcast_ref::<std::io::Error>(),
        ) {
            (Some(error), _) => !error.is_user_error(),
            (None, io) => io.is_some(),
        };
        if run_failed { 1 } else { 2 }
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}
