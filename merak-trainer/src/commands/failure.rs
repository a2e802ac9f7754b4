//! How a command ends when it does not succeed.

use super::{launch::RankFailed, world::ByRank0};
use merak_trainer::{Error as RunError, chain};
use std::{error::Error, io, process::ExitCode};

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Box<dyn Error + Send + Sync>);

/// How a command ended.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// The exit status where another rank has failed.
const SURVIVED: u8 = 3;

impl Failure {
    /// 2 where the command line, the configuration or an input is at fault, 1 where the run failed,
    /// 3 where another of several processes did; of launched ranks, that of the one that failed.
    pub(crate) fn exit_status(&self, rank: Option<usize>) -> u8 {
        if let Some(failed) = self.0.downcast_ref::<RankFailed>() {
            return failed.exit_status();
        }
        if self.culprit(rank).is_some() {
            return SURVIVED;
        }
        let run_failed = match (self.run_error(), self.0.downcast_ref::<io::Error>()) {
            (Some(error), _) => !error.is_user_error(),
            (None, io) => io.is_some(),
        };
        if run_failed { 1 } else { 2 }
    }

    /// What the command says of it; nothing where another process does.
    pub(crate) fn message(&self, rank: Option<usize>) -> Option<String> {
        if self.0.downcast_ref::<ByRank0>().is_some() {
            return None;
        }
        Some(match self.culprit(rank) {
            Some(culprit) => culprit,
            None => chain(self.0.as_ref()),
        })
    }

    /// What happened on another rank, where that has ended this one; `rank` is that of this
    /// process, if it is one of several.
    fn culprit(&self, rank: Option<usize>) -> Option<String> {
        let (rank, error) = rank.zip(self.run_error())?;
        error.aborted_by_other(rank)
    }

    fn run_error(&self) -> Option<&RunError> {
        let by_rank_0 = || Some(&self.0.downcast_ref::<ByRank0>()?.0);
        self.0.downcast_ref().or_else(by_rank_0)
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}
