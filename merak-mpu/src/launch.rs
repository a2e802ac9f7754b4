//! How a process finds its world: the launcher's environment, and `init`.

use crate::{Degrees, Error, Member, Mpu, Result, threads};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Which engine connects the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The one that fits the launch: threads within one process.
    #[default]
    Auto,
    /// Ranks as threads of one process.
    Threads,
}

/// What a launcher told this process about its world.
///
/// Read from `RANK` and `WORLD_SIZE`, or the SLURM equivalents `SLURM_PROCID` and `SLURM_NTASKS`;
/// without them a world of one.
///
/// ```
/// use merak_mpu::Launch;
/// let launch = Launch::from_lookup(|name| (name == "WORLD_SIZE").then(|| "1".to_owned()))?;
/// assert_eq!((launch.rank, launch.world_size), (0, 1));
/// let lookup = |name: &str| (name == "RANK").then(|| "first".to_owned());
/// let error = Launch::from_lookup(lookup).unwrap_err();
/// assert_eq!(error.to_string(), r#"RANK is "first", but should be a number"#);
/// # Ok::<(), merak_mpu::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process's number.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// The variable that gave the number of processes, if one did.
    pub source: Option<&'static str>,
}

impl Launch {
    /// Reads the variables of the process environment.
    ///
    /// # Errors
    /// As [`Launch::from_lookup`].
    #[expect(
        clippy::disallowed_methods,
        reason = "the launch is where the environment is read"
    )]
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// Reads the variables through a function, as from a table in a test.
    ///
    /// # Errors
    /// [`Error::BadVariable`] for a value that is no number, a world of 0 or a rank outside the
    /// world.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let first_of = |names: [&'static str; 2]| {
            names
                .into_iter()
                .find_map(|name| Some((name, lookup(name)?)))
        };
        let size = first_of(["WORLD_SIZE", "SLURM_NTASKS"]);
        let (source, world_size) = match size {
            None => (None, 1),
            Some((name, value)) => (Some(name), number(name, &value)?),
        };
        if let (Some(variable), 0) = (source, world_size) {
            return Err(Error::BadVariable {
                variable,
                value: "0".into(),
                expected: "at least 1".into(),
            });
        }
        let rank = match first_of(["RANK", "SLURM_PROCID"]) {
            None => 0,
            Some((name, value)) => {
                let rank = number(name, &value)?;
                if rank >= world_size {
                    return Err(Error::BadVariable {
                        variable: name,
                        value,
                        expected: format!("below the world size of {world_size}"),
                    });
                }
                rank
            }
        };
        Ok(Self {
            rank,
            world_size,
            source,
        })
    }
}

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
    /// [`Error::NoProcessEngine`] when that has several processes: both backends of this build
    /// connect threads. Else as [`InitOptions::init_member`].
    pub fn init_launched(&self, launch: &Launch) -> Result<Mpu> {
        if let (Some(variable), 2..) = (launch.source, launch.world_size) {
            return Err(Error::NoProcessEngine {
                variable,
                world_size: launch.world_size,
            });
        }
        let options = threads::WorldOptions {
            timeout: self.timeout,
            ..threads::WorldOptions::default()
        };
        let member = match self.backend {
            EngineKind::Auto | EngineKind::Threads => threads::world(1, options).remove(0),
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

/// Joins the world that the launcher's environment describes, with the degrees in this order.
///
/// A process that no launcher started is a world of one. More ranks are threads:
/// [`threads::run`](crate::threads::run) gives each its [`Member`], for [`Mpu::new`].
///
/// # Errors
/// [`Error::WorldSize`] when the degrees do not multiply to the world size,
/// [`Error::NoProcessEngine`], [`Error::BadVariable`].
///
/// ```
/// assert_eq!(merak_mpu::init(1, 1, 1)?.world_size(), 1);
/// assert_eq!(
///     merak_mpu::init(2, 1, 1).unwrap_err().to_string(),
///     "dp 2 x tp 1 x pp 1 x sp 1 = 2, but the world has 1 ranks; \
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

fn number(variable: &'static str, value: &str) -> Result<usize> {
    value.trim().parse().map_err(|_| Error::BadVariable {
        variable,
        value: value.to_owned(),
        expected: "a number".into(),
    })
}
