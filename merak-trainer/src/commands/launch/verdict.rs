//! Which rank is to blame, and what the command returns.

use std::{fmt, os::unix::process::ExitStatusExt, process::ExitStatus};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1},
    low_level::signal_name,
};

/// The exit status of a rank that ends because another one has failed.
const SURVIVOR: i32 = 3;

/// The exit status of wrong input, which all ranks meet alike.
const WRONG_INPUT: i32 = 2;

/// The signals that ask a training to end.
const STOPS: [i32; 4] = [SIGHUP, SIGINT, SIGTERM, SIGUSR1];

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub(super) rank: usize,
    pub(super) how: How,
    /// Whether the rank was told to end because of another one.
    pub(super) asked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Status(i32),
    Signal(i32),
}

impl From<ExitStatus> for How {
    fn from(status: ExitStatus) -> Self {
        match status.signal() {
            Some(signal) => Self::Signal(signal),
            None => Self::Status(status.code().unwrap_or(1)),
        }
    }
}

impl How {
    /// The status of a command that ends as this rank did.
    pub(super) fn exit_status(self) -> u8 {
        match self {
            Self::Status(status) => status as u8,
            Self::Signal(signal) => (128 + signal) as u8,
        }
    }

    /// Whether the rank ended as it was asked to by this signal.
    fn is_by(self, signal: i32) -> bool {
        self == Self::Signal(signal) || self == Self::Status(128 + signal)
    }

    /// Whether the others may end by themselves, or tell more than this rank: wrong input ends all,
    /// a survivor has a culprit, and a training that a signal to one rank ends is saved by all.
    pub(super) fn lets_others_end(self) -> bool {
        let by_request = |status| STOPS.iter().any(|signal| status == 128 + signal);
        match self {
            Self::Status(status) => matches!(status, WRONG_INPUT | SURVIVOR) || by_request(status),
            Self::Signal(_) => false,
        }
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Status(status) => write!(f, "ended with status {status}"),
            Self::Signal(signal) => match signal_name(signal) {
                Some(name) => write!(f, "was ended by {name}"),
                None => write!(f, "was ended by signal {signal}"),
            },
        }
    }
}

impl End {
    /// Whether the rank failed. It did not where it ended by the signal that the command passed on.
    pub(super) fn is_failure(&self, passed_on: &[i32]) -> bool {
        let by_request = passed_on.iter().any(|&signal| self.how.is_by(signal));
        self.how != How::Status(0) && !by_request
    }
}

/// How all ranks ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Done,
    /// The ranks ended by a signal that was passed on to them.
    Stopped(u8),
    /// The rank that failed first.
    Failed(End),
}

/// The verdict on ranks in the order of their ends. The first that failed by itself is to blame; of
/// several with wrong input the lowest, and a survivor only where there is nobody else.
pub(super) fn verdict(ends: &[End], passed_on: &[i32]) -> Verdict {
    let failed = || ends.iter().filter(|end| end.is_failure(passed_on));
    let is_survivor = |end: &&End| end.how == How::Status(SURVIVOR);
    let own = || failed().filter(|end| !end.asked && !is_survivor(end));
    let culprit = match own().next() {
        Some(first) if first.how == How::Status(WRONG_INPUT) => {
            let same = own().filter(|end| end.how == first.how);
            same.min_by_key(|end| end.rank)
        }
        first => first,
    };
    // An error that came out after the request to end.
    let late = || failed().find(|end| matches!(end.how, How::Status(1 | WRONG_INPUT)));
    // What did not end by itself, while others knew of a failure.
    let stuck = || failed().find(|end| !is_survivor(end));
    if let Some(end) = culprit
        .or_else(late)
        .or_else(stuck)
        .or_else(|| failed().next())
    {
        return Verdict::Failed(*end);
    }
    let stopped = ends.iter().find(|end| end.how != How::Status(0));
    stopped.map_or(Verdict::Done, |end| Verdict::Stopped(end.how.exit_status()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::SIGKILL;

    fn end(rank: usize, how: How) -> End {
        let asked = false;
        End { rank, how, asked }
    }

    fn asked(rank: usize, how: How) -> End {
        let asked = true;
        End { rank, how, asked }
    }

    fn culprit(ends: &[End]) -> (usize, u8) {
        match verdict(ends, &[]) {
            Verdict::Failed(end) => (end.rank, end.how.exit_status()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_that_failed_by_itself_is_to_blame() {
        use How::{Signal, Status};
        for (ends, expected) in [
            (vec![end(1, Status(0)), end(0, Status(1))], (0, 1)),
            (vec![end(1, Status(1)), end(0, Status(1))], (1, 1)),
            // Survivors that end sooner.
            (
                vec![
                    end(0, Status(3)),
                    end(2, Signal(SIGKILL)),
                    end(1, Status(3)),
                ],
                (2, 137),
            ),
            // What was told to end is not to blame.
            (
                vec![
                    end(2, Status(7)),
                    asked(0, Status(143)),
                    asked(1, Signal(SIGKILL)),
                ],
                (2, 7),
            ),
            (
                vec![
                    end(0, Status(3)),
                    asked(1, Signal(SIGTERM)),
                    asked(2, Status(1)),
                ],
                (2, 1),
            ),
            (vec![end(0, Status(3)), asked(1, Signal(SIGKILL))], (1, 137)),
            (vec![end(1, Status(3)), end(0, Status(3))], (1, 3)),
        ] {
            assert_eq!(culprit(&ends), expected, "{ends:?}");
        }
    }

    #[test]
    fn ranks_may_end_by_themselves_after_one_that_ends_as_asked() {
        for (how, expected) in [
            (How::Status(2), true),
            (How::Status(3), true),
            (How::Status(130), true),
            (How::Status(138), true),
            (How::Status(137), false),
            (How::Status(1), false),
            (How::Signal(SIGTERM), false),
        ] {
            assert_eq!(how.lets_others_end(), expected, "{how}");
        }
    }

    #[test]
    fn wrong_input_is_told_by_the_lowest_rank() {
        let wrong = |rank| end(rank, How::Status(2));
        assert_eq!(culprit(&[wrong(2), wrong(0), wrong(1)]), (0, 2));
    }

    #[test]
    fn ranks_that_end_as_asked_from_outside_have_not_failed() {
        let stopped = [end(0, How::Status(130)), end(1, How::Signal(SIGINT))];
        assert_eq!(verdict(&stopped, &[SIGINT]), Verdict::Stopped(130));
        assert_eq!(verdict(&[end(0, How::Status(0))], &[SIGINT]), Verdict::Done);
        let failed = [end(0, How::Status(130)), end(1, How::Status(1))];
        assert_eq!(verdict(&failed, &[SIGINT]), Verdict::Failed(failed[1]));
        assert_eq!(culprit(&stopped), (0, 130), "nobody has asked");
    }
}
