//! How a command ends when it does not succeed.

use super::launched;
use merak_ckpt::cli;
use merak_mpu::{Error as GroupError, Launch};
use merak_trainer::{Error as RunError, Teller, chain, metrics::Screen};
use std::{error::Error, io, process::ExitCode, thread, time::Duration};

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Box<dyn Error + Send + Sync>);

/// How a command ended.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// A rank that `merak launch` has started and that has ended the run.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank} {how}{}", after(*restarts))]
pub(crate) struct RankFailed {
    pub(crate) rank: usize,
    /// As in `ended with status 1`.
    pub(crate) how: String,
    pub(crate) restarts: u32,
    /// The status of the rank, which is the command's.
    pub(crate) status: u8,
}

fn after(restarts: u32) -> String {
    match restarts {
        0 => String::new(),
        1 => ", after 1 restart".to_owned(),
        restarts => format!(", after {restarts} restarts"),
    }
}

/// How long a rank that leaves a message to another goes on: a launcher ends all ranks as soon as
/// one has ended.
pub(crate) const HEAD_START: Duration = Duration::from_secs(1);

/// How long a process that cannot join looks for rank 0 to say so, after its own message.
const REPORT: Duration = Duration::from_secs(3);

/// Whether rank 0 surely tells what this process of a launch meets before it has met the others:
/// those that `merak launch` starts are alike. Elsewhere rank 0 gets the time to say it first,
/// which ends the others under most launchers.
pub(crate) fn rank_0_tells(launch: &Launch) -> bool {
    if launch.rank == 0 {
        return false;
    }
    let tells = launched::has_started(launch);
    if !tells {
        thread::sleep(HEAD_START);
    }
    tells
}

/// [`rank_0_tells`] before this process knows what it is to do; rank 0 has then had the time to.
pub(crate) fn rank_0_tells_alone() -> bool {
    let tells = Launch::from_env().is_ok_and(|launch| rank_0_tells(&launch));
    if tells {
        thread::sleep(HEAD_START);
    }
    tells
}

/// Whether `merak launch` has started this process as another rank than the first, which prints the
/// same. Under another launcher each process may be on a host of its own, and answers for it.
pub(crate) fn is_another_rank() -> bool {
    Launch::from_env().is_ok_and(|launch| launch.rank > 0 && launched::has_started(&launch))
}

impl Failure {
    /// 2 where the command line, the configuration or an input is at fault, 1 where the run failed,
    /// 3 where another of several processes did; of launched ranks, that of the one that failed.
    pub(crate) fn exit_status(&self) -> u8 {
        if let Some(failed) = self.0.downcast_ref::<RankFailed>() {
            return failed.status;
        }
        match (self.run_error(), self.0.downcast_ref::<io::Error>()) {
            (Some(RunError::Rank { teller, .. }), _) if *teller != Teller::Here => 3,
            (Some(RunError::Absent(_)), _) => 3,
            (Some(error), _) if !error.is_user_error() => 1,
            (None, Some(_)) => 1,
            _ => 2,
        }
    }

    /// Says what happened. What another process tells stands in this rank's log alone.
    pub(crate) fn tell(&self, screen: &Screen) {
        let line = format!("error: {}", chain(self.0.as_ref()));
        match self.run_error() {
            Some(RunError::Rank {
                teller: Teller::Other,
                ..
            }) if screen.is_of_rank() => {
                screen.note(&line);
            }
            Some(RunError::Told(_)) => {
                screen.note(&line);
                thread::sleep(HEAD_START);
            }
            _ => {
                screen.note(&line);
                cli::report(&screen.marked(&line));
            }
        }
        if let Some(RunError::Group(error)) = self.run_error()
            && matches!(
                **error,
                GroupError::BadVariable { .. } | GroupError::MissingVariable { .. }
            )
        {
            Launch::report(error, REPORT);
        }
    }

    fn run_error(&self) -> Option<&RunError> {
        self.0.downcast_ref()
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
    fn a_process_that_another_rank_has_ended_has_an_exit_status_of_its_own() {
        let failed = |error: RunError| Failure::from(error).exit_status();
        let told_by = |teller| {
            failed(RunError::Rank {
                rank: 2,
                cause: "no space left".to_owned(),
                teller,
            })
        };
        let tellers = [Teller::Other, Teller::HereForOther, Teller::Here];
        assert_eq!(tellers.map(told_by), [3, 3, 1]);
        let usage = || RunError::CommandLine("--stream needs a tokenizer".to_owned());
        assert_eq!(failed(usage()), 2);
        assert_eq!(failed(RunError::Told(Box::new(usage()))), 2);
    }
}
