//! Ranks as processes with a CUDA device each (feature `nccl`).
//!
//! Memory of devices goes through [NCCL](https://docs.nvidia.com/deeplearning/nccl/); host memory,
//! barriers, messages and byte strings in host memory go through the engine [`tcp`], which
//! the processes join first, and which tells of ranks that fail. [`Buffer::memory`] says where a
//! buffer lies, and so which way it goes; all members of a collective bring buffers of one kind.
//!
//! ```text
//!              Buffer::memory
//! Group ──┬── Host ────────────────────> tcp
//!         └── Device ─> what is called ─> tcp: all members the same?
//!                       stamps ────────> tcp: one order of launches for all ranks
//!                       launch ────────> NCCL, on a queue of the communicator's own
//! ```
//!
//! - **Order of summation**: NCCL's own, which depends on the devices, their links and the length.
//!   A run on the same devices mostly repeats its bits, and the bits are not those of the engines
//!   `threads`, `tcp` and `mpi`. Maxima and minima of floats may lose a NaN.
//! - **Launches**: ranks launch what they share in one order, also over several groups, as NCCL
//!   needs it, whatever order they were started in. Nothing is launched before all members have
//!   called, so no kernel waits on a device for a rank that computes.
//! - **Queues**: an operation begins after the work that [`Buffer::stream`] holds when it is
//!   started, and runs beside what is put there later. [`Pending::wait`](crate::Pending::wait)
//!   returns when the device is done with it.
//! - **Parts of different lengths**, gathers and exchanges are group calls of sends, receipts,
//!   reductions and broadcasts. NCCL has all element types of this crate.
//! - **Messages**: packets on a device stay there until the receiver has come, and come into memory
//!   that [`JoinOptions::allocate`] gives; their shapes, and other packets, travel by `tcp`.
//! - **Failures**: communicators do not block. A communicator that fails, or a rank that fails
//!   anywhere in the world, aborts all communicators of all ranks, and each wait returns
//!   [`Error::Aborted`](crate::Error::Aborted) with the culprit.
//! - **One rank per device**: [`join`] refuses two ranks on one device, as NCCL would later. Ranks
//!   that share one are threads, of the engine [`threads`](crate::threads).
//!
//! NCCL's library is loaded when the first rank joins: a given file, else `libnccl.so.2`, else
//! `libnccl.so`, from version 2.18 on. [`Library::find`] says which it would be. The types of the
//! functions of CUDA and NCCL are those of the crate `cudarc`; its own loading is not used, since
//! it never looks for `libnccl.so.2`, and panics where it finds no library or function.
//!
//! ```no_run
//! use merak_mpu::{DType, ReduceOp, nccl, tcp};
//! let meeting = tcp::JoinOptions::new(0, 2, "n1", 29_500);
//! let member = nccl::join(&nccl::JoinOptions::new(meeting))?;
//! let device = member.locality().device(nccl::Device::count()?);
//! let buffer = nccl::Device::open(device)?.zeros(DType::F32, 1 << 20)?;
//! let sum = member.world_group()?.all_reduce(buffer, ReduceOp::Sum)?;
//! # Ok::<(), merak_mpu::Error>(())
//! ```

mod arrival;
mod calls;
mod communicator;
mod conductor;
mod core;
mod cuda;
mod engine;
#[cfg(test)]
mod fake;
mod gpu;
mod job;
mod letter;
mod library;
mod order;
mod plan;
mod raw;
#[cfg(test)]
mod tests;

pub use cuda::Device;

use crate::{Buffer, DType, Locality, Member, Result, tcp};
use gpu::Gpu;
use raw::{Nccl, dotted};
use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Makes a zeroed buffer from the number of a device, an element type and a number of elements.
pub type Allocate = Arc<dyn Fn(usize, DType, usize) -> Result<Box<dyn Buffer>> + Send + Sync>;

/// Which world a process joins, as what, and on which device.
#[derive(Clone)]
pub struct JoinOptions {
    /// How the processes find each other.
    pub meeting: tcp::JoinOptions,
    /// The number of this process's CUDA device; where there is none, that of the rank's place
    /// among those of its host, as [`Locality::device`] has it.
    pub device: Option<usize>,
    /// The file of NCCL's library; where there is none, the system's loader finds one.
    pub library: Option<PathBuf>,
    /// Makes the buffers for messages that come from other devices; where there is none, they are
    /// those of [`Device::zeros`].
    pub allocate: Option<Allocate>,
}

impl JoinOptions {
    /// The options for a process that meets the others; what else there is to choose is left to
    /// [`join`].
    pub fn new(meeting: tcp::JoinOptions) -> Self {
        Self {
            meeting,
            device: None,
            library: None,
            allocate: None,
        }
    }
}

impl fmt::Debug for JoinOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinOptions")
            .field("meeting", &self.meeting)
            .field("device", &self.device)
            .field("library", &self.library)
            .finish_non_exhaustive()
    }
}

/// Joins the world of these options with this process, and returns when all ranks have come.
///
/// # Errors
/// [`NoLibrary`](crate::Error::NoLibrary) and [`UnfitLibrary`](crate::Error::UnfitLibrary) with
/// what was looked for and found, [`Device`](crate::Error::Device) where there is no such device,
/// [`UnfitEngine`](crate::Error::UnfitEngine) where two ranks have one; as [`tcp::join`].
pub fn join(options: &JoinOptions) -> Result<Member> {
    // A process that meets the others tells them why it goes no further.
    let inner = tcp::join(&options.meeting)?;
    let gpu = open(options, inner.locality());
    let gpu = gpu.inspect_err(|error| inner.abort(&error.to_string()))?;
    let allocate = options.allocate.clone();
    let timeout = options.meeting.bounded().timeout;
    engine::start(inner, Arc::new(gpu), allocate, timeout)
}

fn open(options: &JoinOptions, place: Locality) -> Result<Gpu> {
    let nccl = Nccl::load(options.library.as_deref())?;
    let device = match options.device {
        Some(device) => device,
        None => place.device(Device::count()?),
    };
    Ok(Gpu::new(Device::open(device)?, nccl))
}

/// NCCL's library, as [`join`] would load it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Library {
    /// Its version, as `2.18.3`.
    pub version: String,
    /// The file, by the name under which it was found.
    pub path: String,
}

impl Library {
    /// Loads the library at a path, or else where the system's loader finds it.
    ///
    /// # Errors
    /// [`NoLibrary`](crate::Error::NoLibrary) with each file that was tried,
    /// [`UnfitLibrary`](crate::Error::UnfitLibrary) for one that is too old or none of NCCL's.
    ///
    /// ```
    /// use merak_mpu::nccl::Library;
    /// let error = Library::find(Some("/nowhere/libnccl.so.2".as_ref())).unwrap_err();
    /// assert!(error.to_string().starts_with("no NCCL library: /nowhere/libnccl.so.2: "));
    /// ```
    pub fn find(path: Option<&Path>) -> Result<Self> {
        let Nccl { version, path, .. } = Nccl::load(path)?;
        Ok(Self {
            version: dotted(version),
            path,
        })
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.version, self.path)
    }
}
