//! Which engine connects the ranks, by configuration, launcher and build.

use super::{Launch, Launcher};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

crate::named_enum! {
    /// Which engine is to connect the ranks.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    #[non_exhaustive]
    pub enum EngineKind {
        /// The one that fits the launch, the devices and the build.
        #[default]
        Auto = "auto",
        /// Ranks as threads of one process.
        Threads = "threads",
        /// Processes over shared memory and sockets.
        Tcp = "tcp",
        /// Processes over an MPI library.
        Mpi = "mpi",
        /// Processes with a CUDA device each.
        Nccl = "nccl",
    }
}

crate::named_enum! {
    /// The engine that was chosen.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum ChosenEngine {
        /// [`EngineKind::Threads`].
        Threads = "threads",
        /// [`EngineKind::Tcp`].
        Tcp = "tcp",
        /// [`EngineKind::Mpi`].
        Mpi = "mpi",
        /// [`EngineKind::Nccl`].
        Nccl = "nccl",
    }
}

/// The engines between processes that a build has besides `tcp`, which every build has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Built {
    /// The engine `mpi`.
    pub mpi: bool,
    /// The engine `nccl`.
    pub nccl: bool,
}

impl Built {
    /// The engines of this build.
    pub const fn here() -> Self {
        Self {
            mpi: cfg!(all(unix, feature = "mpi")),
            nccl: cfg!(all(unix, feature = "nccl")),
        }
    }

    /// Whether a build has an engine.
    pub fn has(self, engine: ChosenEngine) -> bool {
        match engine {
            ChosenEngine::Threads | ChosenEngine::Tcp => true,
            ChosenEngine::Mpi => self.mpi,
            ChosenEngine::Nccl => self.nccl,
        }
    }
}

impl EngineKind {
    /// The engine for a launch, on CUDA devices or not, in a build.
    ///
    /// `Auto` is `Threads` in a world of one process, whose ranks are threads, whatever started it.
    /// Between processes it is `Nccl` on CUDA devices, else `Mpi` where `mpirun` started them, else
    /// `Tcp`, each where it is built in.
    ///
    /// # Errors
    /// [`Error::EngineNotBuilt`], and [`Error::UnfitEngine`] for an engine that cannot connect what
    /// was launched.
    ///
    /// ```
    /// use merak_mpu::{Built, ChosenEngine, EngineKind, Launch};
    /// let alone = EngineKind::Auto.choose(&Launch::default(), Built::here(), false)?;
    /// assert_eq!(alone, ChosenEngine::Threads);
    ///
    /// let built = Built::default();
    /// let error = EngineKind::Mpi.choose(&Launch::default(), built, false).unwrap_err();
    /// let text = error.to_string();
    /// assert!(text.starts_with("the engine mpi is not in this build: build with --features mpi"));
    /// # Ok::<(), merak_mpu::Error>(())
    /// ```
    pub fn choose(self, launch: &Launch, built: Built, on_cuda: bool) -> Result<ChosenEngine> {
        let chosen = match self {
            Self::Auto if launch.world_size == 1 => ChosenEngine::Threads,
            Self::Auto if on_cuda && built.nccl => ChosenEngine::Nccl,
            Self::Auto if launch.is_by_mpirun() && built.mpi => ChosenEngine::Mpi,
            Self::Threads => ChosenEngine::Threads,
            Self::Auto | Self::Tcp => ChosenEngine::Tcp,
            Self::Mpi => ChosenEngine::Mpi,
            Self::Nccl => ChosenEngine::Nccl,
        };
        if !built.has(chosen) {
            let there = ChosenEngine::ALL.into_iter().filter(|&it| built.has(it));
            return Err(Error::EngineNotBuilt {
                engine: chosen.as_str(),
                instead: there.map(ChosenEngine::as_str).collect(),
            });
        }
        match unfit(chosen, launch, built) {
            None => Ok(chosen),
            Some(reason) => Err(Error::UnfitEngine {
                engine: chosen.as_str(),
                reason,
            }),
        }
    }
}

/// Why an engine cannot connect the processes of a launch.
fn unfit(engine: ChosenEngine, launch: &Launch, built: Built) -> Option<String> {
    let (variable, processes) = (launch.world_variable(), launch.world_size);
    if processes == 1 {
        return None;
    }
    match engine {
        ChosenEngine::Threads => Some(format!(
            "its ranks are threads of one process, but {variable} asks for {processes} processes: \
             choose auto, or start one process"
        )),
        ChosenEngine::Mpi if !launch.has_mpi => Some(format!(
            "{variable} asks for {processes} processes, but neither mpirun nor srun has started \
             them: choose auto, or start them by mpirun"
        )),
        ChosenEngine::Tcp | ChosenEngine::Nccl if launch.address.is_none() => {
            let mpi = if built.mpi {
                ", or choose the engine mpi"
            } else {
                ""
            };
            let list = match launch.launcher {
                Some(Launcher::Slurm) => ", as SLURM_STEP_NODELIST would",
                _ => "",
            };
            Some(format!(
                "{variable} asks for {processes} processes, and nothing says on which host rank 0 \
                 is{list}: set MASTER_ADDR to it{mpi}"
            ))
        }
        _ => None,
    }
}

impl Launch {
    fn is_by_mpirun(&self) -> bool {
        matches!(self.launcher, Some(Launcher::OpenMpi | Launcher::Pmi))
    }

    /// The variable that asks for processes.
    fn world_variable(&self) -> &'static str {
        self.variables.world_size.unwrap_or("WORLD_SIZE")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Built = Built {
        mpi: true,
        nccl: true,
    };
    const TCP: Built = Built {
        mpi: false,
        nccl: false,
    };

    /// Four processes that a launcher started on one host.
    fn four(launcher: Launcher) -> Launch {
        Launch {
            launcher: Some(launcher),
            world_size: 4,
            address: Some("n1".to_owned()),
            port: Some(29_500),
            has_mpi: launcher != Launcher::Torchrun,
            ..Launch::default()
        }
    }

    fn told(kind: EngineKind, launch: &Launch, built: Built) -> String {
        let error = kind.choose(launch, built, false).unwrap_err();
        error.to_string()
    }

    #[test]
    fn auto_goes_by_the_number_of_processes_the_devices_the_launcher_and_the_build() {
        use ChosenEngine::{Mpi, Nccl, Tcp, Threads};
        use Launcher::{OpenMpi, Pmi, Slurm, Torchrun};
        let auto =
            |launch: &Launch, built, on_cuda| EngineKind::Auto.choose(launch, built, on_cuda);
        let one = Launch {
            world_size: 1,
            ..four(Slurm)
        };
        for built in [TCP, ALL] {
            assert_eq!(auto(&Launch::default(), built, true).unwrap(), Threads);
            assert_eq!(auto(&one, built, false).unwrap(), Threads);
        }
        for launcher in [Torchrun, Slurm, OpenMpi, Pmi] {
            let launch = four(launcher);
            let by_mpirun = matches!(launcher, OpenMpi | Pmi);
            let on_cpu = if by_mpirun { Mpi } else { Tcp };
            assert_eq!(auto(&launch, ALL, false).unwrap(), on_cpu, "{launcher}");
            assert_eq!(auto(&launch, ALL, true).unwrap(), Nccl, "{launcher}");
            assert_eq!(auto(&launch, TCP, true).unwrap(), Tcp, "{launcher}");
        }
    }

    #[test]
    fn an_engine_by_name_is_that_engine_or_refused() {
        let launch = four(Launcher::Torchrun);
        let chosen = EngineKind::Tcp.choose(&launch, TCP, true).unwrap();
        assert_eq!(chosen, ChosenEngine::Tcp);
        let missing = told(EngineKind::Nccl, &launch, ALL_BUT_NCCL);
        assert_eq!(
            missing,
            "the engine nccl is not in this build: build with --features nccl, or choose threads, \
             tcp or mpi"
        );
        assert_eq!(
            told(EngineKind::Threads, &launch, ALL),
            "the engine threads does not fit: its ranks are threads of one process, but WORLD_SIZE \
             asks for 4 processes: choose auto, or start one process"
        );
        assert_eq!(
            told(EngineKind::Mpi, &launch, ALL),
            "the engine mpi does not fit: WORLD_SIZE asks for 4 processes, but neither mpirun nor \
             srun has started them: choose auto, or start them by mpirun"
        );
    }

    const ALL_BUT_NCCL: Built = Built {
        mpi: true,
        nccl: false,
    };

    #[test]
    fn several_hosts_of_mpirun_without_an_address_need_the_mpi_engine() {
        let launch = Launch {
            address: None,
            ..four(Launcher::OpenMpi)
        };
        let chosen = EngineKind::Auto.choose(&launch, ALL, false).unwrap();
        assert_eq!(chosen, ChosenEngine::Mpi);
        assert_eq!(
            told(EngineKind::Auto, &launch, TCP),
            "the engine tcp does not fit: WORLD_SIZE asks for 4 processes, and nothing says on \
             which host rank 0 is: set MASTER_ADDR to it"
        );
        let by_name = told(EngineKind::Tcp, &launch, ALL);
        assert!(
            by_name.ends_with("set MASTER_ADDR to it, or choose the engine mpi"),
            "{by_name}"
        );
        let step = Launch {
            launcher: Some(Launcher::Slurm),
            ..launch
        };
        assert_eq!(
            told(EngineKind::Auto, &step, TCP),
            "the engine tcp does not fit: WORLD_SIZE asks for 4 processes, and nothing says on \
             which host rank 0 is, as SLURM_STEP_NODELIST would: set MASTER_ADDR to it"
        );
    }
}
