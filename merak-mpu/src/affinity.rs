//! Which processors a thread may run on, where the system lets a program say so.

#[cfg(target_os = "linux")]
pub(crate) use linux::{Thread, processors};
#[cfg(not(target_os = "linux"))]
pub(crate) use other::{Thread, processors};

#[cfg(target_os = "linux")]
mod linux {
    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};

    /// A thread of this process.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Thread(Pid);

    impl Thread {
        pub(crate) fn current() -> Self {
            Self(gettid())
        }

        /// Lets the thread run on these processors alone. Where the system refuses, it runs where
        /// it did.
        pub(crate) fn run_on(self, processors: &[usize]) {
            let mut set = CpuSet::new();
            for number in processors {
                set.set(*number);
            }
            if let Err(error) = sched_setaffinity(Some(self.0), &set) {
                tracing::debug!(%error, ?processors, "a thread stays where it is");
            }
        }
    }

    /// The processors on which the calling thread may run, ascending; empty where the system does
    /// not tell.
    pub(crate) fn processors() -> Vec<usize> {
        let Ok(set) = sched_getaffinity(None) else {
            return Vec::new();
        };
        let all = 0..CpuSet::MAX_CPU;
        all.filter(|number| set.is_set(*number)).collect()
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    /// A thread of this process.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Thread;

    impl Thread {
        pub(crate) fn current() -> Self {
            Self
        }

        /// Does nothing: this system moves threads as it likes.
        pub(crate) fn run_on(self, _processors: &[usize]) {}
    }

    /// Empty, as this system offers no choice.
    pub(crate) fn processors() -> Vec<usize> {
        Vec::new()
    }
}

/// By rank, how many ranks of its host may run on a processor that it may run on, itself included.
/// A rank without processors is one whose system does not tell: it may run on all.
pub(crate) fn num_sharers(hosts: &[usize], processors: &[&[usize]]) -> Vec<usize> {
    let meet = |a: &[usize], b: &[usize]| {
        a.is_empty() || b.is_empty() || a.iter().any(|one| b.contains(one))
    };
    let ranks = || hosts.iter().zip(processors);
    let sharers = ranks().map(|(host, own)| {
        let all = ranks();
        all.filter(|(other, theirs)| *other == host && meet(own, theirs))
            .count()
    });
    sharers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_cores_that_both_may_use() {
        let here = |processors: &[&[usize]]| num_sharers(&vec![0; processors.len()], processors);
        assert_eq!(here(&[&[0, 1], &[0, 1], &[0, 1]]), [3, 3, 3], "unbound");
        assert_eq!(here(&[&[0, 1], &[2, 3], &[4]]), [1, 1, 1], "bound to cores");
        let sockets: [&[usize]; 4] = [&[0, 1], &[0, 1], &[2, 3], &[2, 3]];
        assert_eq!(here(&sockets), [2, 2, 2, 2], "bound to sockets");
        assert_eq!(here(&[&[0, 1], &[1, 2], &[2, 3]]), [2, 3, 2]);
        assert_eq!(
            here(&[&[0], &[], &[1]]),
            [2, 3, 2],
            "a system that does not tell"
        );
        let alike: [&[usize]; 3] = [&[0, 1], &[0, 1], &[0, 1]];
        assert_eq!(num_sharers(&[0, 1, 0], &alike), [2, 1, 2], "two hosts");
    }
}
