//! Which processors a thread may run on, where the system lets a program say so.

#[cfg(target_os = "linux")]
pub(super) use linux::{Thread, processors};
#[cfg(not(target_os = "linux"))]
pub(super) use other::{Thread, processors};

#[cfg(target_os = "linux")]
mod linux {
    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};

    /// A thread of this process.
    #[derive(Debug, Clone, Copy)]
    pub(in super::super) struct Thread(Pid);

    impl Thread {
        pub(in super::super) fn current() -> Self {
            Self(gettid())
        }

        /// Lets the thread run on these processors alone. Where the system refuses, it runs where
        /// it did.
        pub(in super::super) fn run_on(self, processors: &[usize]) {
            let mut set = CpuSet::new();
            for number in processors {
                set.set(*number);
            }
            if let Err(error) = sched_setaffinity(Some(self.0), &set) {
                tracing::debug!(%error, ?processors, "a thread stays where it is");
            }
        }
    }

    /// The processors on which the calling thread may run; empty where the system does not tell.
    pub(in super::super) fn processors() -> Vec<usize> {
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
    pub(in super::super) struct Thread;

    impl Thread {
        pub(in super::super) fn current() -> Self {
            Self
        }

        /// Does nothing: this system moves threads as it likes.
        pub(in super::super) fn run_on(self, _processors: &[usize]) {}
    }

    /// Empty, as this system offers no choice.
    pub(in super::super) fn processors() -> Vec<usize> {
        Vec::new()
    }
}
