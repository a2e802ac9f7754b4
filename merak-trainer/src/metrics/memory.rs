//! The memory of this process, as the system and libtorch report it.

use crate::config::{CheckedArguments, Device};

/// The most bytes of memory that this process ever held, where the system tells.
pub fn peak_resident_bytes() -> Option<u64> {
    status("VmHWM:")
}

/// Bytes of memory that this process holds now, where the system tells.
pub fn resident_bytes() -> Option<u64> {
    status("VmRSS:")
}

/// The most bytes that tensors of this process took at once on one of the devices of a run; `None`
/// where it computes on the processor.
pub fn peak_device_bytes(args: &CheckedArguments) -> Option<u64> {
    match args.compute.device {
        Device::Cpu => None,
        Device::Cuda => of_devices(),
    }
}

#[cfg(feature = "tch")]
fn of_devices() -> Option<u64> {
    merak_trace::backend::tch::Tch::peak_cuda_bytes()
}

/// Without libtorch there is no device.
#[cfg(not(feature = "tch"))]
fn of_devices() -> Option<u64> {
    None
}

/// A line of `/proc/self/status`, which counts in KiB.
fn status(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_no_less_than_what_is_held() {
        let held = resident_bytes().unwrap();
        assert!(held > 0 && peak_resident_bytes().unwrap() >= held);
    }
}
