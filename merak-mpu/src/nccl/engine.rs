//! One process's membership of a world whose ranks have a device each.

use super::{
    Allocate, calls::Calls, communicator::Handle, conductor::Conductor, core::Core, job::Crew,
};
use crate::{Communicator, Engine, Error, Failure, Locality, Member, Rank, Result, bell::lock};
use std::{
    fmt::{self, Write as _},
    panic,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// The thread of this process, and what it shares with the others. It ends with them.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) core: Arc<Core>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The number of groups that this process has joined.
    groups: AtomicU64,
}

impl Session {
    fn end(&self) {
        self.core.drain();
        self.core.inner.end();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
        self.core.stop();
        if let Some(thread) = lock(&self.thread).take() {
            // A thread that panics has failed the world.
            let _ = thread.join();
        }
    }
}

/// Joins a world whose ranks are those of `inner`, with a device for this one.
pub(super) fn start(
    inner: Member,
    calls: Arc<dyn Calls>,
    allocate: Option<Allocate>,
    timeout: Duration,
) -> Result<Member> {
    check_devices(&inner, &*calls)?;
    let rank = inner.rank();
    let core = Arc::new(Core::new(inner, calls, allocate, timeout));
    let conductor = Conductor::new(Arc::clone(&core));
    let watched = Arc::clone(&core);
    let builder = thread::Builder::new().name(format!("nccl-{rank}"));
    let thread = builder.spawn(move || {
        // The world fails with its conductor, so no broken invariant is seen.
        let run = panic::AssertUnwindSafe(|| conductor.run());
        if panic::catch_unwind(run).is_err() {
            watched
                .inner
                .abort("the thread that launches its collectives panicked");
        }
    });
    let thread = thread.map_err(|error| Error::NoResource {
        rank: rank.0,
        what: "thread",
        reason: error.to_string(),
    })?;
    let session = Session {
        core,
        thread: Mutex::new(Some(thread)),
        groups: AtomicU64::new(0),
    };
    Ok(Member::new(Arc::new(NcclRank(Arc::new(session)))))
}

/// Refuses two ranks on one device, of which NCCL takes one.
fn check_devices(inner: &Member, calls: &dyn Calls) -> Result<()> {
    let world = inner.group("devices", &everybody(inner))?;
    let devices = world.all_gather_bytes(calls.uuid().to_vec())?;
    for (rank, device) in devices.iter().enumerate() {
        if let Some(first) = devices[..rank].iter().position(|other| other == device) {
            return Err(Error::UnfitEngine {
                engine: "nccl",
                reason: format!(
                    "ranks {first} and {rank} have the same CUDA device, GPU-{}, and NCCL takes \
                     one rank for each: give each rank a device of its own, or run ranks that \
                     share one as threads of one process, with the engine threads",
                    uuid_text(device)
                ),
            });
        }
    }
    Ok(())
}

/// The bytes of a device's number as `nvidia-smi -L` writes them.
fn uuid_text(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (place, byte) in bytes.iter().enumerate() {
        if matches!(place, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn everybody(member: &Member) -> Vec<Rank> {
    (0..member.world_size()).map(Rank).collect()
}

/// One rank's handle on its world.
struct NcclRank(Arc<Session>);

impl NcclRank {
    fn inner(&self) -> &Arc<dyn Engine> {
        self.0.core.inner.engine()
    }
}

impl fmt::Debug for NcclRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, size) = (self.rank(), self.world_size());
        write!(f, "nccl rank {rank} of {size}")
    }
}

impl Engine for NcclRank {
    fn rank(&self) -> Rank {
        self.inner().rank()
    }

    fn world_size(&self) -> usize {
        self.inner().world_size()
    }

    fn communicator(&self, name: &str, members: &[Rank]) -> Result<Arc<dyn Communicator>> {
        let inner = |name: &str| self.inner().communicator(name, members);
        let crew = Crew {
            number: self.0.groups.fetch_add(1, Ordering::Relaxed),
            name: name.to_owned(),
            plain: inner(name)?,
            ready: inner(&format!("{name} (ready)"))?,
            order: inner(&format!("{name} (order)"))?,
        };
        Ok(Arc::new(Handle::new(Arc::clone(&self.0), crew)))
    }

    fn abort(&self, reason: &str) {
        self.inner().abort(reason);
    }

    fn end(&self) {
        self.0.end();
    }

    fn failure(&self) -> Option<Failure> {
        self.inner().failure()
    }

    fn locality(&self) -> Locality {
        self.inner().locality()
    }

    fn shared_bytes(&self) -> usize {
        self.inner().shared_bytes()
    }

    fn moves_device_memory(&self) -> bool {
        true
    }

    fn epoch(&self) -> Instant {
        self.inner().epoch()
    }
}
