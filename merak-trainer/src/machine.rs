//! What this machine has.

use sysinfo::{MemoryRefreshKind, Process, ProcessRefreshKind, ProcessesToUpdate, System};

/// Cores that this process may use.
pub(crate) fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
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
    let sizes = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = sizes
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:"))
        .and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    limit.saturating_sub(size.unwrap_or_default().saturating_mul(1 << 10))
}

/// The limit on this process's address space, where the system has one and tells.
fn address_space() -> u64 {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max address space"))
        .and_then(|line| line.split_whitespace().next()?.parse().ok());
    limit.unwrap_or(u64::MAX)
}

/// Keeps the allocator to one heap for all threads where the address space of this process is
/// limited: glibc gives threads heaps of their own, each of which reserves 64 MiB of addresses
/// whatever is allocated there. Call it before threads start.
pub fn keep_to_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if address_space() != u64::MAX {
        #[expect(unsafe_code, reason = "only C offers the setting")]
        // SAFETY: it takes two numbers, and may be called at any time.
        let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_a_group_is_taken_without_the_swap_of_the_machine() {
        let (memory, swap) = (16 << 30, 8 << 30);
        let machine = memory + swap;
        assert_eq!(within_group(machine, memory, Some(300 << 20)), 300 << 20);
        assert_eq!(within_group(machine, memory, Some(memory)), machine);
        assert_eq!(within_group(machine, memory, None), machine);
    }
}
