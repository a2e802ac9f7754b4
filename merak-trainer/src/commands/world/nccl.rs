//! Processes with a CUDA device each.

use merak_mpu::{
    DType, Error as Met, Launch, Member,
    nccl::{self, JoinOptions, Library},
};
use merak_trainer::{Config, Error, Result, network::Make};
use std::{path::Path, time::Duration};

/// Joins the processes of a launch. What comes from other devices comes into memory of the backend.
pub(super) fn join(launch: &Launch, timeout: Duration, config: Option<&Config>) -> Result<Member> {
    let mut options = JoinOptions::new(launch.meeting(timeout)?);
    options.library = library(config).map(Path::to_path_buf);
    #[cfg(feature = "tch")]
    {
        options.allocate = Some(device_memory());
    }
    nccl::join(&options).map_err(|met| match met {
        // All processes meet this alike, or hear of it; rank 0 tells it.
        Met::NoLibrary { .. } | Met::UnfitLibrary { .. } | Met::UnfitEngine { .. }
            if launch.rank > 0 =>
        {
            Error::Told(Box::new(met.into()))
        }
        met => super::unjoined(launch.rank, met),
    })
}

/// Makes numbers on the device of a rank.
pub(super) fn numbers(member: &Member) -> Result<Box<Make>> {
    let place = member.locality();
    let device = nccl::Device::open(place.device(nccl::Device::count()?))?;
    Ok(Box::new(move |len| device.zeros(DType::F32, len)))
}

/// The file of the library that a configuration names.
fn library(config: Option<&Config>) -> Option<&Path> {
    config.and_then(|config| config.arguments().distributed.nccl_library.as_deref())
}

/// The library that a run would use, in a line for people.
pub(super) fn describe(config: Option<&Config>) -> String {
    let found = Library::find(library(config));
    found.map_or_else(|error| error.to_string(), |library| library.to_string())
}

/// Memory of libtorch; no other backend has memory on a device.
#[cfg(feature = "tch")]
fn device_memory() -> nccl::Allocate {
    use merak_mpu::Buffer;
    use merak_trace::{
        Backend,
        backend::tch::{Tch, TchDevice},
    };
    use std::sync::{Arc, OnceLock};
    let backend = OnceLock::new();
    let allocate = move |ordinal, dtype, len| -> merak_mpu::Result<Box<dyn Buffer>> {
        let failed = |reason| Met::Device {
            call: "libtorch",
            reason,
        };
        let open = || Tch::new(TchDevice::Cuda(ordinal), 1).map_err(|error| error.to_string());
        let backend = backend.get_or_init(open).as_ref();
        let backend = backend.map_err(|reason| failed(reason.clone()))?;
        let memory = backend.grad_buffer(dtype, len);
        memory.map_err(|error| failed(error.to_string()))
    };
    Arc::new(allocate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_the_one_that_the_configuration_names() {
        let line = ["--distributed.nccl_library=/own/libnccl.so".to_owned()];
        let config = Config::load(None, [], &line).unwrap();
        assert_eq!(library(Some(&config)), Some(Path::new("/own/libnccl.so")));
        assert_eq!(library(None), None);
    }
}
