//! What this machine has.

use merak_trace::take_product_scratch;
use std::{fs, path::Path, thread};
use sysinfo::{MemoryRefreshKind, Process, ProcessRefreshKind, ProcessesToUpdate, System};

/// This process among those of all hosts that share a folder: its number, and the host's name.
pub(crate) fn this_process() -> String {
    let process = std::process::id();
    match System::host_name() {
        Ok(host) => format!("{process} on {host}"),
        Err(_) => process.to_string(),
    }
}

/// The name of this host; empty where it has none.
pub(crate) fn host_name() -> String {
    System::host_name().unwrap_or_default()
}

/// Cores that this process may use.
pub(crate) fn num_cores() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Bytes that this process may fill: memory and swap of the machine, or less under a control group
/// or a limit on the address space.
pub fn available_bytes() -> u64 {
    memory_bytes().min(free_addresses())
}

/// Memory and swap of the machine, or the memory of a control group where that has less than the
/// machine.
pub(crate) fn memory_bytes() -> u64 {
    let Ok(mut system) = System::new() else {
        // The system does not tell.
        return u64::MAX;
    };
    system.refresh_memory_specifics(MemoryRefreshKind::everything());
    let machine = system.total_memory().saturating_add(system.total_swap());
    let mut limits: Vec<_> = system.cgroup_limits().into_iter().collect();
    if let Ok(id) = sysinfo::get_current_pid() {
        let own = ProcessesToUpdate::Some(&[id]);
        system.refresh_processes_specifics(own, false, ProcessRefreshKind::nothing());
        limits.extend(system.process(id).and_then(Process::cgroup_limits));
    }
    let groups = limits.iter().map(|group| group.total_memory);
    within_group(machine, system.total_memory(), groups.min())
}

/// Bytes that a process of a group may fill on a machine with `machine` bytes, `memory` of which
/// are no swap. Whether the group may swap is unknown, so its limit is taken as it is. A group
/// without a limit reports the machine's memory.
fn within_group(machine: u64, memory: u64, group: Option<u64>) -> u64 {
    match group.filter(|&group| group < memory) {
        Some(group) => group,
        None => machine,
    }
}

/// Addresses that this process may still reserve: those that it has already, of its program and
/// what it has read, count towards the limit.
pub(crate) fn free_addresses() -> u64 {
    let limit = address_space();
    if limit == u64::MAX {
        return limit;
    }
    limit.saturating_sub(reserved_addresses())
}

/// Addresses that this process has reserved.
fn reserved_addresses() -> u64 {
    let sizes = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = sizes
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:"))
        .and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    size.unwrap_or_default().saturating_mul(1 << 10)
}

/// Least and most addresses that a thread reserves for matrix products, from its first one on; 0
/// where addresses are not limited. Both are what a thread takes that tries it, unless the most
/// could fail.
pub(crate) fn product_addresses() -> [u64; 2] {
    let free = free_addresses();
    if free == u64::MAX {
        return [0; 2];
    }
    let most = MOST_PRODUCT_SHARE
        .saturating_mul(cache_bytes(Path::new(CPUS)))
        .max(LEAST_PRODUCT_BYTES);
    let unknown = [LEAST_PRODUCT_BYTES, most];
    if free <= most.saturating_add(TRIAL_BYTES) {
        return unknown;
    }
    let trial = thread::Builder::new().spawn(|| {
        let before = reserved_addresses();
        take_product_scratch();
        reserved_addresses().saturating_sub(before)
    });
    let found = trial.ok().and_then(|trial| trial.join().ok());
    found.map_or(unknown, |found| [found; 2])
}

/// Scratch memory of products by the bytes of all caches of a level: both operands have room for
/// as much.
const MOST_PRODUCT_SHARE: u64 = 2;

/// Scratch memory of products where caches are small.
const LEAST_PRODUCT_BYTES: u64 = if cfg!(target_arch = "x86_64") {
    4 << 20
} else {
    0
};

/// What the thread that tries a product needs beside the scratch memory: its stack and operands.
const TRIAL_BYTES: u64 = 4 << 20;

/// The folder in which the system tells of cores and their caches.
const CPUS: &str = "/sys/devices/system/cpu";

/// Caches that are not told of.
const USUAL_CACHES: u64 = 32 << 20;

/// The caches of the largest level, all of the machine together.
fn cache_bytes(cpus: &Path) -> u64 {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let mut levels = [0_u64; 8];
    for cpu in entries(cpus) {
        for cache in entries(&cpu.path().join("cache")) {
            let told = |name: &str| fs::read_to_string(cache.path().join(name)).ok();
            let level = told("level").and_then(|level| level.trim().parse::<usize>().ok());
            let size = told("size").and_then(|size| size_of_cache(size.trim()));
            let shared = told("shared_cpu_list").map_or(1, |list| num_cpus(list.trim()));
            if let (Some(level), Some(size)) = (level, size)
                && let Some(sum) = levels.get_mut(level)
            {
                *sum = sum.saturating_add(size / shared.max(1));
            }
        }
    }
    let largest = levels.into_iter().max().unwrap_or(0);
    if largest == 0 { USUAL_CACHES } else { largest }
}

/// The bytes of a size such as `32768K`.
fn size_of_cache(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => 1 << 30,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// The cores of a list such as `0-3,8`.
fn num_cpus(list: &str) -> u64 {
    let cores = list.split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
        Some(last.saturating_sub(first) + 1)
    });
    cores.flatten().sum()
}

/// The limit on this process's address space, where the system has one and tells.
fn address_space() -> u64 {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max address space"))
        .and_then(|line| line.split_whitespace().next()?.parse().ok());
    limit.unwrap_or(u64::MAX)
}

/// Keeps the allocator to one heap for all threads where the address space of this process is
/// limited, with small blocks alone: glibc gives threads heaps of their own, each of which reserves
/// 64 MiB of addresses whatever is allocated there, and once large blocks were freed, it takes the
/// next ones from the heap, which keeps the gaps between them. Call it before threads start.
pub fn keep_to_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if address_space() != u64::MAX {
        for (setting, value) in [
            (libc::M_ARENA_MAX, 1),
            (libc::M_MMAP_THRESHOLD, LARGE_BLOCK),
        ] {
            #[expect(unsafe_code, reason = "only C offers the settings")]
            // SAFETY: it takes two numbers, and may be called at any time.
            let _ = unsafe { libc::mallopt(setting, value) };
        }
    }
}

/// Blocks of as many bytes are mapped apart from the heap; glibc begins with this number, and keeps
/// it where it is set.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE_BLOCK: libc::c_int = 128 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_count_once_for_the_cores_that_share_them() {
        let folder = tempfile::tempdir().unwrap();
        let tell = |cpu: usize, index: usize, facts: [&str; 3]| {
            let cache = folder.path().join(format!("cpu{cpu}/cache/index{index}"));
            fs::create_dir_all(&cache).unwrap();
            for (name, fact) in ["level", "size", "shared_cpu_list"].iter().zip(facts) {
                fs::write(cache.join(name), format!("{fact}\n")).unwrap();
            }
        };
        assert_eq!(cache_bytes(folder.path()), USUAL_CACHES);
        for cpu in 0..4 {
            tell(cpu, 0, ["1", "48K", &cpu.to_string()]);
            tell(cpu, 1, ["3", "30M", if cpu < 3 { "0-1,2" } else { "3" }]);
        }
        assert_eq!(cache_bytes(folder.path()), 60 << 20);
        assert_eq!(size_of_cache("1G"), Some(1 << 30));
        assert_eq!(size_of_cache("many"), None);
        assert_eq!(product_addresses(), [0, 0], "tests run without a limit");
    }

    #[test]
    fn the_limit_of_a_group_is_taken_without_the_swap_of_the_machine() {
        let (memory, swap) = (16 << 30, 8 << 30);
        let machine = memory + swap;
        assert_eq!(within_group(machine, memory, Some(300 << 20)), 300 << 20);
        assert_eq!(within_group(machine, memory, Some(memory)), machine);
        assert_eq!(within_group(machine, memory, None), machine);
    }
}
