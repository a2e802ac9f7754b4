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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_another_ranks_failure_ends_says_whose_with_a_status_of_its_own() {
        let aborted = || merak_mpu::Error::Aborted {
            by: 2,
            reason: "no space left".to_owned(),
        };
        let failure = Failure::from(RunError::Step {
            rank: 0,
            stages: vec![0],
            part: merak_trainer::StepPart::Save,
            step: 7,
            source: Box::new(aborted().into()),
        });
        assert_eq!(failure.exit_status(Some(0)), 3);
        let told = failure.message(Some(0));
        assert_eq!(told.as_deref(), Some("rank 2 failed: no space left"));
        // The rank itself, and a process whose ranks are threads, have the failure.
        for rank in [Some(2), None] {
            assert_eq!(failure.exit_status(rank), 1);
            let told = failure.message(rank).unwrap();
            assert!(
                told.starts_with("rank 0 (stage 0) failed to save step 7"),
                "{told}"
            );
        }
    }

    #[test]
    fn what_all_ranks_meet_is_told_by_rank_0_alone() {
        let refused = || {
            RunError::from(merak_mpu::Error::NoProcessEngine {
                variable: "WORLD_SIZE",
                world_size: 2,
            })
        };
        let (first, other) = (Failure::from(refused()), Failure::from(ByRank0(refused())));
        assert!(first.message(None).is_some() && other.message(None).is_none());
        assert_eq!((first.exit_status(None), other.exit_status(None)), (2, 2));
    }
}
