//! Whether the memory of this process is enough for a run.

use super::{
    MemoryNeed, RunMemory, Workload, of_host, of_ranks,
    threads::{mapped_bytes, touched_bytes},
};
use crate::{
    config::CheckedArguments,
    error::{Error, Result},
    machine::{free_addresses, memory_bytes, product_addresses},
    plan::Plan,
};
use merak_ckpt::words::Bytes;
use std::iter;

/// The memory that this process may use.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Bytes that it may fill.
    memory: u64,
    /// Bytes that it may reserve.
    addresses: u64,
    /// Least and most bytes that a thread reserves for products.
    products: [u64; 2],
}

impl Room {
    /// The room at this moment.
    pub fn of_process() -> Self {
        Self {
            memory: memory_bytes(),
            addresses: free_addresses(),
            products: product_addresses(),
        }
    }
}

/// Why a run does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the run needs at least {} of {what}, but this process may use {}: {needed}; choose {advice}",
    Bytes(needed.total()), Bytes(*available)
)]
pub struct MemoryShortage {
    /// What it needs; of threads their whole stacks where addresses are short, otherwise the
    /// touched part.
    pub needed: RunMemory,
    /// The resource that is short: `memory`, or `addresses` under a limit of the process.
    pub what: &'static str,
    /// Bytes that the process may use.
    pub available: u64,
    /// A choice that would need less.
    pub advice: &'static str,
}

/// Names of the resource that is short.
const MEMORY: &str = "memory";
const ADDRESSES: &str = "addresses (RLIMIT_AS, `ulimit -v`)";
const ADDRESSES_OF_EACH: &str = "addresses in each process (RLIMIT_AS, `ulimit -v`)";

/// What a limit on addresses is short of: each process has its own limit.
fn addresses(args: &CheckedArguments) -> &'static str {
    if args.are_processes() {
        ADDRESSES_OF_EACH
    } else {
        ADDRESSES
    }
}

impl Plan {
    /// Refuses a run whose ranks on this host need more memory than it has, or one of whose
    /// processes there needs more addresses than this one may reserve.
    ///
    /// # Errors
    /// [`Error::Memory`] with the figures.
    pub fn check_memory(&self, args: &CheckedArguments, workloads: &[Workload]) -> Result<()> {
        self.check_memory_beside(args, workloads, 0)
    }

    /// As [`Plan::check_memory`], beside `data` bytes of data that are held in memory.
    ///
    /// # Errors
    /// As [`Plan::check_memory`].
    pub fn check_memory_beside(
        &self,
        args: &CheckedArguments,
        workloads: &[Workload],
        data: u64,
    ) -> Result<()> {
        self.check_memory_in(args, workloads, data, Room::of_process())
    }

    /// As [`Plan::check_memory_beside`], in the room that there was once the data were read: the
    /// run takes what an earlier use of the process has left reserved.
    ///
    /// # Errors
    /// As [`Plan::check_memory`].
    pub fn check_memory_in(
        &self,
        args: &CheckedArguments,
        workloads: &[Workload],
        data: u64,
        room: Room,
    ) -> Result<()> {
        let ranks = self.memory(args, workloads)?;
        let in_memory = of_host(&ranks, args, data);
        let process = neediest_process(&ranks, args);
        let values = of_ranks(&ranks, &process, 0, 0);
        let reserved = room.products.map(|products| {
            let threads = mapped_bytes(args, values.total(), products);
            let mut needed = of_ranks(&ranks, &process, threads, data);
            // Files of state are mapped.
            needed.optimizer = needed.optimizer.saturating_add(needed.files);
            (needed, addresses(args), room.addresses.saturating_add(data))
        });
        let needs = iter::once((in_memory, MEMORY, room.memory)).chain(reserved);
        let mut shortages = needs.filter(|(needed, _, available)| needed.total() > *available);
        let Some((needed, what, available)) = shortages.next() else {
            return Ok(());
        };
        let largest = ranks.iter().max_by_key(|need| need.activations);
        let advice = needed.advice(largest.and_then(|need| need.largest));
        Err(Error::Memory(Box::new(MemoryShortage {
            needed,
            what,
            available,
            advice,
        })))
    }
}

/// How many ranks of each place of a pipeline the process has that needs most: one rank where each
/// is a process, otherwise all of them.
fn neediest_process(pipeline: &[MemoryNeed], args: &CheckedArguments) -> Vec<usize> {
    let here = args.pipeline_ranks_here();
    if !args.are_processes() {
        return here;
    }
    let places = (0..here.len()).filter(|&place| here[place] > 0);
    let neediest = places.max_by_key(|&place| {
        pipeline[place]
            .total()
            .saturating_add(pipeline[place].files)
    });
    (0..here.len())
        .map(|place| usize::from(Some(place) == neediest))
        .collect()
}

/// What the ranks would need to do something else than to train, of a resource that is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    /// Bytes that they need.
    pub(crate) needed: u64,
    /// The resource, for people.
    pub(crate) what: &'static str,
    /// Bytes that this process may use.
    pub(crate) available: u64,
}

/// What this process lacks where the ranks on its host may not use `bytes` bytes of values beside
/// their threads, `of_process` of them its own.
pub(crate) fn shortage_beside_threads(
    args: &CheckedArguments,
    bytes: u64,
    of_process: u64,
) -> Option<Shortage> {
    let room = Room::of_process();
    let reserved = room.products.map(|products| Shortage {
        needed: of_process.saturating_add(mapped_bytes(args, of_process, products)),
        what: addresses(args),
        available: room.addresses,
    });
    let in_memory = Shortage {
        needed: bytes.saturating_add(touched_bytes(args)),
        what: MEMORY,
        available: room.memory,
    };
    let mut shortages = iter::once(in_memory).chain(reserved);
    shortages.find(|shortage| shortage.needed > shortage.available)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{
        tests::plan,
        threads::{
            GAPS, GUARD_BYTES, HEAP_BYTES, OTHER_THREADS, PAIR_BYTES, PROCESS_BYTES, STACK_BYTES,
        },
    };

    fn room(memory: u64, addresses: u64) -> Room {
        Room {
            memory,
            addresses,
            products: [4 << 20, 8 << 20],
        }
    }

    #[test]
    fn what_cannot_fit_is_refused_with_the_figures() {
        let (plan, args) = plan(&["dp=2", "per_device_train_batch_size=640"]);
        let check = |memory| {
            let room = room(memory, u64::MAX);
            plan.check_memory_in(&args, &[Workload::Training], 0, room)
        };
        assert!(check(1 << 40).is_ok());
        let text = check(1 << 20).unwrap_err().to_string();
        let (start, middle, end) = (
            "the run needs at least ",
            " of memory, but this process may use 1.00 MiB: of all ranks (2) weights take ",
            "; choose a smaller \"per_device_train_batch_size\" or \"seq_length\"",
        );
        assert!(text.starts_with(start) && text.contains(middle), "{text}");
        assert!(text.ends_with(end), "{text}");
        assert!(crate::machine::available_bytes() > 1 << 20);
    }

    #[test]
    fn threads_and_data_need_room_too() {
        let (plan, args) = plan(&[
            "dp=4",
            "dataloader_num_workers=3",
            "compute.threads_per_rank=1",
        ]);
        let check = |data, memory, addresses| {
            plan.check_memory_in(&args, &[Workload::Training], data, room(memory, addresses))
        };
        let enough = 1 << 30;
        check(0, enough, enough).unwrap();
        check(enough, enough, enough).unwrap_err();
        // Four stacks of 8 MiB, three of 2 MiB beside each, the memory of products, and 384 KiB
        // beside the tensors; a helper's stack and three of other threads; and what lies around
        // stacks and in the heap.
        let stacks = (115 << 19) + 4 * (4 << 20) + (8 << 20) + OTHER_THREADS * STACK_BYTES;
        let guards = (4 * 4 + 1 + OTHER_THREADS) * GUARD_BYTES;
        let values = plan.run_memory(&args, &[Workload::Training], 0).unwrap();
        let values = values.total() - values.threads;
        let heap = 4 * HEAP_BYTES + PROCESS_BYTES + values / GAPS;
        let threads = stacks + guards + heap + 4 * 4 * PAIR_BYTES;
        let text = check(0, enough, 50 << 20).unwrap_err().to_string();
        let figures = [
            " of addresses (RLIMIT_AS, `ulimit -v`), but ".to_owned(),
            format!(" threads and programs {}, the data 0 B", Bytes(threads)),
        ];
        assert!(figures.iter().all(|part| text.contains(part)), "{text}");
        let text = check(enough, 100 << 20, enough).unwrap_err().to_string();
        let figures = [
            " of memory, but ",
            " threads and programs 2.50 MiB, the data 1.00 GiB",
        ];
        assert!(figures.iter().all(|part| text.contains(part)), "{text}");
        assert!(text.ends_with("; choose less data"), "{text}");
    }

    #[test]
    fn state_in_files_takes_addresses_and_no_memory() {
        let needed = |limits: fn(u64) -> Room, disk: &[&str]| {
            let (plan, args) = plan(disk);
            let refused = plan.check_memory_in(&args, &[Workload::Training], 0, limits(0));
            let Err(Error::Memory(shortage)) = refused else {
                unreachable!("{refused:?}");
            };
            let shortage = shortage.downcast_ref::<MemoryShortage>();
            shortage.expect("it is one of memory").needed.total()
        };
        let files: [&str; 2] = ["offload_optimizer=disk", "output_dir=run"];
        let state = |limits| needed(limits, &files[1..]) - needed(limits, &files);
        let params = plan(&[]).0.graph.num_elements() as u64;
        assert_eq!(state(|few| room(few, u64::MAX)), 8 * params);
        // What the heap keeps around values it does not keep around files.
        assert_eq!(state(|few| room(u64::MAX, few)), 8 * params / GAPS);
    }

    #[test]
    fn too_many_ranks_for_a_machine_are_refused() {
        let check = |dp: &str| {
            let keys = [
                dp,
                "compute.threads_per_rank=1",
                "per_device_train_batch_size=1",
            ];
            let (plan, args) = plan(&keys);
            let room = room(200 << 20, u64::MAX);
            plan.check_memory_in(&args, &[Workload::Training], 0, room)
        };
        check("dp=100").unwrap();
        let text = check("dp=1000").unwrap_err().to_string();
        assert!(text.contains(": of all ranks (1000) "), "{text}");
        assert!(
            text.ends_with("; choose fewer ranks on this machine"),
            "{text}"
        );
    }
}
