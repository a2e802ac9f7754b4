//! How a process finds its world: the launcher's environment, and `init`.

mod engine;
mod environment;
mod hosts;
mod hydra;
#[cfg(test)]
mod tests;

pub use engine::{Built, ChosenEngine, EngineKind};
pub use environment::{Launch, LaunchVariables, Launcher};
pub use hosts::{BadHostList, HostList};

use crate::{Degrees, Member, Mpu, Result, tcp, threads};
use std::time::Duration;

/// The long form of [`init`].
///
/// ```
/// use merak_mpu::InitOptions;
/// let tied = vec![("head".into(), vec![0])];
/// let mpu = InitOptions { tied, ..InitOptions::default() }.init()?;
/// assert!(mpu.tied_group("head")?.is_some());
/// # Ok::<(), merak_mpu::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InitOptions {
    /// Data parallel degree.
    pub dp: usize,
    /// Tensor parallel degree.
    pub tp: usize,
    /// Pipeline parallel degree.
    pub pp: usize,
    /// Sequence parallel degree.
    pub sp: usize,
    /// The engine.
    pub backend: EngineKind,
    /// Tied weights by key, with the stages that own a copy.
    pub tied: Vec<(String, Vec<usize>)>,
    /// Longest wait for a peer.
    pub timeout: Duration,
}

impl Default for InitOptions {
    fn default() -> Self {
        Self {
            dp: 1,
            tp: 1,
            pp: 1,
            sp: 1,
            backend: EngineKind::Auto,
            tied: Vec::new(),
            timeout: threads::WorldOptions::default().timeout,
        }
    }
}

impl InitOptions {
    /// Joins the world that the launcher's environment describes.
    ///
    /// # Errors
    /// As [`InitOptions::init_launched`] and [`Launch::from_env`].
    pub fn init(&self) -> Result<Mpu> {
        self.init_launched(&Launch::from_env()?)
    }

    /// Joins the world that `launch` describes.
    ///
    /// # Errors
    /// As [`EngineKind::choose`], [`Launch::join`] and [`InitOptions::init_member`].
    pub fn init_launched(&self, launch: &Launch) -> Result<Mpu> {
        let options = threads::WorldOptions {
            timeout: self.timeout,
            ..threads::WorldOptions::default()
        };
        let member = match self.backend.choose(launch, Built::here(), false)? {
            ChosenEngine::Threads => threads::world(1, options).remove(0),
            engine => launch.join(engine, self.timeout)?,
        };
        self.init_member(member)
    }

    /// Takes the place of `member` in a world that the caller made.
    ///
    /// # Errors
    /// As [`Mpu::new`] and [`Mpu::with_tied`].
    pub fn init_member(&self, member: Member) -> Result<Mpu> {
        let Self { dp, tp, pp, sp, .. } = *self;
        let mut mpu = Mpu::new(member, Degrees { dp, tp, pp, sp })?;
        for (key, stages) in &self.tied {
            mpu = mpu.with_tied(key, stages)?;
        }
        Ok(mpu)
    }
}

impl Launch {
    /// Joins the processes of this launch over an engine, with `timeout` as the longest wait for a
    /// peer: over MPI as `mpi::join` does, and over sockets as [`tcp::join`] does.
    ///
    /// # Errors
    /// [`Error::EngineNotBuilt`](crate::Error::EngineNotBuilt);
    /// [`Error::UnfitEngine`](crate::Error::UnfitEngine) where nothing says on which host rank 0
    /// is, and the engine needs it; as [`tcp::join`].
    pub fn join(&self, engine: ChosenEngine, timeout: Duration) -> Result<Member> {
        match engine {
            ChosenEngine::Mpi => {
                EngineKind::Mpi.choose(self, Built::here(), false)?;
                #[cfg(all(unix, feature = "mpi"))]
                {
                    let host = self.address.as_deref().filter(|_| !self.is_on_one_host());
                    return crate::mpi::join(&self.options(host.unwrap_or_default(), timeout));
                }
            }
            ChosenEngine::Nccl => {
                EngineKind::Nccl.choose(self, Built::here(), true)?;
                #[cfg(all(unix, feature = "nccl"))]
                {
                    let meeting = self.meeting(timeout)?;
                    return crate::nccl::join(&crate::nccl::JoinOptions::new(meeting));
                }
            }
            ChosenEngine::Threads | ChosenEngine::Tcp => {}
        }
        tcp::join(&self.meeting(timeout)?)
    }

    /// How the processes of this launch find each other, for the engines that bring no way of
    /// their own.
    ///
    /// # Errors
    /// [`Error::UnfitEngine`](crate::Error::UnfitEngine) where nothing says on which host rank 0
    /// is.
    pub fn meeting(&self, timeout: Duration) -> Result<tcp::JoinOptions> {
        EngineKind::Tcp.choose(self, Built::here(), false)?;
        Ok(self.options(self.address.as_deref().unwrap_or("127.0.0.1"), timeout))
    }

    fn options(&self, host: &str, timeout: Duration) -> tcp::JoinOptions {
        let port = self.port.unwrap_or_default();
        let options = tcp::JoinOptions {
            run: self.job.clone().unwrap_or_default(),
            ..tcp::JoinOptions::new(self.rank, self.world_size, host, port)
        };
        options.with_timeout(timeout)
    }
}

/// Joins the world that the launcher's environment describes, with the degrees in this order.
///
/// A process that no launcher started is a world of one. More ranks are threads:
/// [`threads::run`](crate::threads::run) gives each its [`Member`], for [`Mpu::new`].
///
/// # Errors
/// [`WorldSize`](crate::Error::WorldSize) when the degrees do not multiply to the world size; as
/// [`InitOptions::init`].
///
/// ```
/// assert_eq!(merak_mpu::init(1, 1, 1)?.world_size(), 1);
/// assert_eq!(
///     merak_mpu::init(2, 1, 1).unwrap_err().to_string(),
///     "dp 2 x tp 1 x pp 1 x sp 1 = 2, but the world has 1 rank; \
///      nearest that fits: dp 1 x tp 1 x pp 1 x sp 1",
/// );
/// # Ok::<(), merak_mpu::Error>(())
/// ```
pub fn init(dp: usize, tp: usize, pp: usize) -> Result<Mpu> {
    let options = InitOptions {
        dp,
        tp,
        pp,
        ..InitOptions::default()
    };
    options.init()
}
