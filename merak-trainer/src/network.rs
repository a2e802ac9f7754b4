//! How fast the ranks of a run exchange data: for `merak bench collectives` and the cost
//! model.

use crate::{
    config::CheckedArguments,
    error::Result,
    world::{World, ranks_at_once, run_on},
};
use merak_mpu::{
    Axis, Buffer, Group, GroupKind, Member, Memory, Packet, ReduceOp, Topology, threads,
};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Numbers of a rank, in its host's memory or on its device.
pub type Numbers = Box<dyn Buffer>;

/// Runs an operation on a rank's numbers, and returns numbers for the next run; the last argument
/// is memory that stays with the rank.
type Run = fn(&Group, Numbers, &mut Vec<u8>) -> merak_mpu::Result<Numbers>;

/// Makes `f32` numbers, as many as it is told, where a rank has those that it exchanges.
pub type Make = dyn Fn(usize) -> merak_mpu::Result<Numbers>;

/// [`Make`] in memory of the host.
///
/// # Errors
/// None of its own; a device may lack the memory.
pub fn on_host(len: usize) -> merak_mpu::Result<Numbers> {
    Ok(Box::new(vec![1.0_f32; len]))
}

/// An operation between ranks that can be timed.
#[derive(Debug, Clone, Copy)]
pub struct Exchange {
    /// Its name.
    pub name: &'static str,
    run: Run,
    share: fn(f64) -> f64,
}

/// All exchanges that are timed.
pub const EXCHANGES: [Exchange; 6] = [
    ALL_REDUCE,
    Exchange {
        name: "reduce_scatter",
        run: |group, data, _| group.reduce_scatter(data, ReduceOp::Max),
        share: |n| (n - 1.0) / n,
    },
    Exchange {
        name: "all_gather",
        run: |group, data, _| group.all_gather(data),
        share: |n| n - 1.0,
    },
    Exchange {
        name: "broadcast",
        run: |group, data, _| group.broadcast(data, 0),
        share: |_| 1.0,
    },
    Exchange {
        name: "all_to_all",
        run: |group, data, _| group.all_to_all(data),
        share: |n| (n - 1.0) / n,
    },
    SEND_RECV,
];

const ALL_REDUCE: Exchange = Exchange {
    name: "all_reduce",
    run: |group, data, _| group.all_reduce(data, ReduceOp::Max),
    share: |n| 2.0 * (n - 1.0) / n,
};

/// Every rank sends to the next one, receives from the one before, and copies what it received into
/// memory of its own: between threads a message alone is a pointer at any size. On a device it has
/// come into memory of the rank.
const SEND_RECV: Exchange = Exchange {
    name: "send_recv",
    run: |group, data, own| {
        let mut received = hand_over(group, data)?;
        if matches!(received.memory(), Memory::Host(_)) {
            received.read(&mut |bytes| {
                own.resize(bytes.len(), 0);
                own.copy_from_slice(bytes);
            });
        }
        Ok(received)
    },
    share: |_| 1.0,
};

/// A message without the copy, as stages exchange: the first nodes that read a value bring it to
/// their core, as part of their measured time.
const HAND_OVER: Exchange = Exchange {
    name: "hand_over",
    run: |group, data, _| hand_over(group, data),
    share: |_| 1.0,
};

impl Exchange {
    /// Bytes over the busiest link of a ring of `world` ranks, per byte that a rank hands in.
    pub fn share(&self, world: usize) -> f64 {
        (self.share)(world as f64)
    }

    /// The median time of `steps` runs, at least one, on this rank, all ranks of the group starting
    /// together. Each hands in `bytes` bytes of its host's memory, with the same whole number of
    /// elements for each rank.
    ///
    /// # Communication
    /// The runs and one more, each after a barrier.
    ///
    /// # Errors
    /// When a rank fails.
    pub fn median(&self, group: &Group, bytes: usize, steps: usize) -> Result<Duration> {
        Ok(median(self.times(group, bytes, steps, &on_host)?))
    }

    /// The median over the runs of the time of the slowest rank, the same on every rank: a sender
    /// may be done before its bytes have arrived. Ranks exchange what `make` makes.
    ///
    /// # Communication
    /// As [`Exchange::median`], and an all-reduce of 8 bytes for each run.
    ///
    /// # Errors
    /// When a rank fails.
    pub fn median_of_slowest(
        &self,
        group: &Group,
        bytes: usize,
        steps: usize,
        make: &Make,
    ) -> Result<Duration> {
        let own = self.times(group, bytes, steps, make)?;
        let own = own.iter().map(Duration::as_secs_f64).collect();
        let slowest = group.all_reduce_vec(own, ReduceOp::Max)?;
        Ok(median(
            slowest.into_iter().map(Duration::from_secs_f64).collect(),
        ))
    }

    /// The times of the runs on this rank.
    fn times(
        &self,
        group: &Group,
        bytes: usize,
        steps: usize,
        make: &Make,
    ) -> Result<Vec<Duration>> {
        let len = bytes / size_of::<f32>();
        let steps = steps.max(1);
        let mut times = Vec::with_capacity(steps);
        let (mut data, mut own) = (make(len)?, Vec::new());
        // The first run wakes threads and touches memory.
        for _ in 0..=steps {
            if data.len() != len {
                data = make(len)?;
            }
            group.barrier()?;
            let start = Instant::now();
            data = (self.run)(group, data, &mut own)?;
            times.push(start.elapsed());
        }
        times.remove(0);
        Ok(times)
    }

    /// [`Exchange::median`] on the first of `world` ranks that are threads of this process.
    fn median_of_threads(&self, world: usize, bytes: usize, steps: usize) -> Result<Duration> {
        let members = threads::world(world, threads::WorldOptions::default());
        let times = run_on(members, |member| {
            self.median(&member.world_group()?, bytes, steps)
        })?;
        Ok(times[0])
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn hand_over(group: &Group, data: Numbers) -> merak_mpu::Result<Numbers> {
    let (rank, world) = (group.rank(), group.world_size());
    let packet = Packet {
        shape: vec![data.len()],
        data,
    };
    group.send((rank + 1) % world, 0, vec![packet])?;
    let received = group.recv((rank + world - 1) % world, 0)?;
    let packet = received.into_iter().next();
    packet.map_or_else(|| on_host(0), |packet| Ok(packet.data))
}

/// Seconds of an exchange: a latency, and a time for each byte.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Line {
    latency: f64,
    per_byte: f64,
}

/// Sizes, in bytes, between which a [`Line`] is drawn for few ranks, and how often each is timed.
const SIZES: [usize; 2] = [4 << 10, 4 << 20];
const STEPS: usize = 7;

/// Most bytes that all ranks hand in together, unless there are thousands of ranks.
const MOST_TOGETHER: usize = 64 << 20;

/// The sizes for some ranks, with a whole number of elements for every rank.
fn sizes(world: usize) -> [usize; 2] {
    let unit = world * size_of::<f32>();
    let small = SIZES[0].next_multiple_of(unit);
    let large = SIZES[1].min(MOST_TOGETHER / world).max(2 * small);
    [small, large.next_multiple_of(unit)]
}

impl Line {
    /// The line through the times of two sizes, for some ranks.
    fn through(ranks: usize, time: impl Fn(usize) -> Result<Duration>) -> Result<Self> {
        let [small, large] = sizes(ranks);
        let (short, long) = (time(small)?.as_secs_f64(), time(large)?.as_secs_f64());
        let per_byte = ((long - short) / (large - small) as f64).max(0.0);
        Ok(Self {
            latency: (short - per_byte * small as f64).max(0.0),
            per_byte,
        })
    }

    /// Among ranks that are threads of this process.
    fn of_threads(exchange: &Exchange, ranks: usize) -> Result<Self> {
        Self::through(ranks, |bytes| {
            exchange.median_of_threads(ranks, bytes, STEPS)
        })
    }

    /// Among the ranks of a group, which are processes.
    fn of_group(exchange: &Exchange, group: &Group) -> Result<Self> {
        Self::through(group.world_size(), |bytes| {
            exchange.median_of_slowest(group, bytes, STEPS, &on_host)
        })
    }

    /// The part of it that each of some ranks works on a core of its own, where `at_once` of them
    /// have cores at a time: the rest of the time it waits for others.
    fn of_each(self, ranks: usize, at_once: usize) -> Self {
        let part = at_once.min(ranks) as f64 / ranks as f64;
        Self {
            latency: part * self.latency,
            per_byte: part * self.per_byte,
        }
    }

    /// The larger of each number among the ranks of a group.
    fn of_slowest(self, group: &Group) -> Result<Self> {
        let own = vec![self.latency, self.per_byte];
        let slowest = group.all_reduce_vec(own, ReduceOp::Max)?;
        Ok(Self {
            latency: slowest[0],
            per_byte: slowest[1],
        })
    }

    pub(crate) fn seconds(self, bytes: usize) -> f64 {
        self.latency + self.per_byte * bytes as f64
    }
}

/// Times of exchanges between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Network {
    /// A message from stage to stage.
    pub(crate) send: Line,
    /// A sum over the ranks that share a layer, on a core for each.
    pub(crate) tensor: Line,
    /// A sum over the ranks that share a sequence, on a core for each.
    pub(crate) sequence: Line,
    /// A sum over the copies of a parameter, on a core for each.
    pub(crate) copies: Line,
}

impl Network {
    /// Its seconds, each under its key.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (String, f64)> + use<> {
        let lines = [
            ("send", self.send),
            ("tensor", self.tensor),
            ("sequence", self.sequence),
            ("copies", self.copies),
        ];
        lines.into_iter().flat_map(|(name, line)| {
            let numbers = [("latency", line.latency), ("per_byte", line.per_byte)];
            numbers.map(|(key, number)| (format!("network.{name}.{key}"), number))
        })
    }

    /// A sum over the ranks along an axis.
    pub(crate) fn sum_over(&self, axis: Axis) -> Line {
        match axis {
            Axis::Tensor => self.tensor,
            Axis::Sequence => self.sequence,
            Axis::Data | Axis::Pipeline => self.copies,
        }
    }

    /// Times the exchanges of a run over what connects its ranks.
    ///
    /// # Communication
    /// Between processes, messages and all-reduces over groups of the run, all groups of a kind at
    /// the same time, and all-reduces over all ranks. Each rank has the times of the slowest group
    /// of each kind, for which a step waits.
    ///
    /// # Errors
    /// When a rank fails.
    pub(crate) fn measure(args: &CheckedArguments, world: &World) -> Result<Self> {
        match world.together(|member| Self::of_process(member, args))? {
            Some(network) => Ok(network),
            None => Self::of_threads(args),
        }
    }

    /// Among ranks that are threads. What one rank would sum alone takes no time.
    fn of_threads(args: &CheckedArguments) -> Result<Self> {
        let at_once = ranks_at_once(args);
        let sum = |ranks: usize| -> Result<Line> {
            if ranks < 2 {
                return Ok(Line::default());
            }
            Ok(Line::of_threads(&ALL_REDUCE, ranks)?.of_each(ranks, at_once))
        };
        Ok(Self {
            send: Line::of_threads(&HAND_OVER, 2)?,
            tensor: sum(args.tp)?,
            sequence: sum(args.sp)?,
            // Stages have copies of tied weights.
            copies: sum(args.replicas().max(args.pp.min(2)))?,
        })
    }

    /// Among processes, of which this one is `member`.
    fn of_process(member: &Member, args: &CheckedArguments) -> Result<Self> {
        use GroupKind::{DataSequence, Pipeline, Sequence, Tensor};
        let topology = Topology::new(args.degrees())?;
        let everybody = member.world_group()?;
        let (sharers, at_once) = (args.core_sharers(), ranks_at_once(args));
        // The times of the first group with several ranks, and whether it has several hosts. What
        // no group of the run exchanges takes no time.
        let first = |exchange: &Exchange, kinds: &[GroupKind]| -> Result<(Line, bool)> {
            for &kind in kinds {
                let ranks = topology.group_of(kind, member.rank())?;
                if ranks.len() > 1 {
                    let group = member.group("exchanges", &ranks)?;
                    let line = Line::of_group(exchange, &group)?;
                    return Ok((line, args.crosses_hosts(kind)));
                }
            }
            Ok((Line::default(), false))
        };
        // On one host sums are work of the cores; on several, ranks wait for the network.
        let sum = |kinds: &[GroupKind]| -> Result<Line> {
            let (line, waits) = first(&ALL_REDUCE, kinds)?;
            let work = if waits {
                line
            } else {
                line.of_each(sharers, at_once)
            };
            work.of_slowest(&everybody)
        };
        let (send, _) = first(&HAND_OVER, &[Pipeline, Sequence])?;
        Ok(Self {
            send: send.of_slowest(&everybody)?,
            tensor: sum(&[Tensor])?,
            sequence: sum(&[Sequence])?,
            // Stages have copies of tied weights.
            copies: sum(&[DataSequence, Pipeline])?,
        })
    }

    /// Bytes that [`Network::measure`] needs on this host.
    pub(crate) fn needed_bytes(args: &CheckedArguments) -> u64 {
        let largest = args.tp.max(args.replicas());
        // All groups of processes are timed at once. A rank holds what it sums and what comes in.
        let processes = args.are_processes().then(|| 2 * args.ranks_here());
        let bytes = |group: usize| {
            let together = processes.unwrap_or(group) as u64;
            together.saturating_mul(sizes(group)[1] as u64)
        };
        bytes(2).max(bytes(largest.max(2)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Host, MerakArguments};
    use merak_mpu::{ChosenEngine, testing};

    #[test]
    fn a_sum_of_more_ranks_than_cores_counts_no_waiting_as_work() {
        let whole = Line {
            latency: 64.0,
            per_byte: 32.0,
        };
        let part = whole.of_each(64, 2);
        assert_eq!((part.latency, part.per_byte), (2.0, 1.0));
        assert_eq!(whole.of_each(2, 8), whole, "each has a core");
    }

    /// What each of some processes measures, which threads play.
    fn of_processes([dp, tp, pp, sp]: [usize; 4]) -> Vec<Network> {
        let arguments = MerakArguments {
            dp,
            tp,
            sp,
            pp,
            ..MerakArguments::default()
        };
        let args = arguments.check().unwrap();
        testing::world(args.world_size(), |member| {
            let world = World::of_process(member, ChosenEngine::Tcp).unwrap();
            Network::measure(&world.place(args.clone()), &world).unwrap()
        })
    }

    #[test]
    fn processes_time_the_exchanges_of_the_groups_of_a_run_and_no_others() {
        let took = |line: Line| line.seconds(1 << 20) > 0.0;
        for (degrees, expected) in [
            ([2, 2, 1, 1], [false, true, false, true]),
            ([1, 2, 1, 1], [false, true, false, false]),
            ([1, 1, 2, 1], [true, false, false, true]),
            ([1, 1, 1, 2], [true, false, true, true]),
        ] {
            let networks = of_processes(degrees);
            let network = networks[0];
            let lines = [
                network.send,
                network.tensor,
                network.sequence,
                network.copies,
            ];
            assert_eq!(lines.map(took), expected, "{degrees:?}: {network:?}");
            // Every rank has the times of the slowest group.
            assert!(networks.iter().all(|other| *other == network));
        }
    }

    #[test]
    fn a_step_waits_for_the_slowest_group() {
        let slowest = testing::world(3, |member| {
            let rank = member.rank().0 as f64;
            let own = Line {
                latency: rank,
                per_byte: 2.0 - rank,
            };
            own.of_slowest(&member.world_group().unwrap()).unwrap()
        });
        let expected = Line {
            latency: 2.0,
            per_byte: 2.0,
        };
        assert_eq!(slowest, [expected; 3]);
    }

    #[test]
    fn a_sum_takes_the_time_of_the_ranks_along_its_axis() {
        let line = |latency| Line {
            latency,
            per_byte: 0.0,
        };
        let network = Network {
            send: line(1.0),
            tensor: line(2.0),
            sequence: line(3.0),
            copies: line(4.0),
        };
        for (axis, expected) in [(Axis::Tensor, 2.0), (Axis::Sequence, 3.0)] {
            assert_eq!(network.sum_over(axis), line(expected), "{axis:?}");
        }
    }

    #[test]
    fn many_ranks_are_timed_with_little_memory_together() {
        for world in [2, 3, 16, 64, 129, 512, 5000] {
            let [small, large] = sizes(world);
            assert!(small < large && large <= SIZES[1] + 4 * world, "{world}");
            assert!([small, large].iter().all(|bytes| bytes % (4 * world) == 0));
        }
        assert_eq!(sizes(2), SIZES);
        let [few, many] = [16, 512].map(|dp| Network::needed_bytes(&replicas(dp)));
        assert!(many <= few + (4 * 512 * 512), "{few} {many}");
    }

    fn replicas(dp: usize) -> CheckedArguments {
        let arguments = MerakArguments {
            dp,
            ..MerakArguments::default()
        };
        arguments.check().unwrap()
    }

    #[test]
    fn processes_need_memory_for_all_ranks_of_their_host_at_once() {
        let processes = replicas(4).on(Host::of_processes(&[0, 0, 0, 1], 3));
        let of_rank = 2 * SIZES[1] as u64;
        assert_eq!(Network::needed_bytes(&processes), 3 * of_rank);
    }
}
