//! The engine over devices of a test's own, and as far as a machine has them over real ones.

use super::{
    calls::Calls,
    engine,
    fake::{Fake, FakeMemory, World, to_host},
    raw::{LEAST, Nccl},
    *,
};
use crate::{
    Call, Communicator, Engine, Failure, Group, Locality, Message, Packet, Pending, Rank, ReduceOp,
    Started, Turn,
    bell::lock,
    run_members,
    testing::{DEADLINE, suite},
    threads,
};
use proptest::prelude::*;
use std::{
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// What joining gave a rank, and its device.
type Joined = (Result<Member>, Arc<Fake>);

/// A world of `n` ranks of this process over sockets, each on the device that `make` gives.
fn world_on(
    n: usize,
    timeout: Duration,
    make: impl Fn(&Arc<World>, usize) -> Fake + Sync,
) -> (Arc<World>, Vec<Joined>) {
    let world = Arc::<World>::default();
    let inner = tcp::world(n, timeout).expect("there are sockets");
    let members = thread::scope(|scope| {
        let joins: Vec<_> = inner
            .into_iter()
            .zip(0..)
            .map(|(inner, rank)| {
                let fake = Arc::new(make(&world, rank));
                scope.spawn(move || {
                    let calls: Arc<dyn Calls> = Arc::<Fake>::clone(&fake);
                    (engine::start(inner, calls, None, timeout), fake)
                })
            })
            .collect();
        let joined = joins.into_iter().map(|join| join.join().unwrap());
        joined.collect()
    });
    (world, members)
}

fn healthy(n: usize, timeout: Duration) -> (Arc<World>, Vec<Member>, Vec<Arc<Fake>>) {
    let (world, joined) = world_on(n, timeout, Fake::new);
    let (members, fakes): (Vec<_>, Vec<_>) = joined.into_iter().unzip();
    let members = members.into_iter().map(|member| member.unwrap()).collect();
    (world, members, fakes)
}

/// Members whose every buffer lies on their device.
fn on_devices(members: Vec<Member>) -> Vec<Member> {
    let wrap = |member: Member| Member::new(Arc::new(OnDevice(Arc::clone(member.engine()))));
    members.into_iter().map(wrap).collect()
}

/// Runs `body` on each rank of a healthy world.
fn run<T: Send>(members: Vec<Member>, body: impl Fn(Member) -> Result<T> + Sync) -> Vec<T> {
    run_members(members, 2 << 20, body).unwrap()
}

#[test]
fn device_memory_passes_every_check_in_worlds_of_one_to_four() {
    for n in 1..=4 {
        let (world, members, _) = healthy(n, DEADLINE);
        run(on_devices(members), |member| {
            for (_, check) in suite::CHECKS {
                check(&member);
            }
            Ok(())
        });
        assert_eq!(world.alive(), [0; 3], "communicators, queues and events");
    }
}

#[test]
fn host_memory_passes_every_check_beside_it() {
    let (_, members, fakes) = healthy(3, DEADLINE);
    run(members, |member| {
        for (_, check) in suite::CHECKS {
            check(&member);
        }
        Ok(())
    });
    for fake in fakes {
        assert!(lock(&fake.log).is_empty(), "no device was asked");
    }
}

#[test]
fn device_memory_survives_every_fault() {
    for n in [2, 4] {
        suite::faults(n, |n, timeout| on_devices(healthy(n, timeout).1));
    }
}

/// One step of a program: its members by their bits, its kind, and a length.
type Step = (usize, u8, usize);

/// How many kinds of steps there are.
const KINDS: u8 = 7;

/// Starts this rank's part of a step. Its numbers are whole, so that any order gives one sum.
fn begin(group: &Group, own: usize, number: usize, step: Step) -> Result<Pending<Vec<f32>>> {
    let (_, kind, len) = step;
    let (n, rank) = (group.world_size(), group.rank());
    let fresh = |len: usize| -> Box<dyn Buffer> {
        let value = |index: usize| ((index * 7 + own * 31 + number) % 97) as f32;
        Box::new((0..len).map(value).collect::<Vec<_>>())
    };
    let pending = match kind {
        0 => group.start_all_reduce(fresh(len), ReduceOp::Sum),
        1 => group.start_reduce_scatter(fresh(len * n), ReduceOp::Sum),
        2 => group.start_all_gather(fresh(len)),
        3 => group.start_gather(fresh(len), n - 1),
        4 => group.start_broadcast(fresh(len), n / 2),
        5 => group.start_all_to_all(fresh(len * n)),
        _ if n > 1 && rank == 0 => {
            let packet = Packet {
                shape: vec![len],
                data: fresh(len),
            };
            let sent = group.start_send(n - 1, 0, vec![packet])?;
            return Ok(sent.map(|()| Ok(Vec::new())));
        }
        _ if n > 1 && rank == n - 1 => {
            let received = group.start_recv(0, 0)?;
            return Ok(received.map(|message| {
                let packets = message.into_iter();
                Ok(packets.flat_map(|packet| to_host(packet.data)).collect())
            }));
        }
        _ => return Ok(Pending::ready(Vec::new())),
    };
    Ok(pending?.map(|buffer| Ok(to_host(buffer))))
}

/// Runs a rank's part of a program. All ranks start the steps in one order. A rank waits for a step
/// at once where `waits` says so, and else at the end, for the last one first.
fn play(member: &Member, steps: &[Step], waits: &[bool]) -> Result<Vec<Vec<f32>>> {
    let own = member.rank();
    let mut results = vec![Vec::new(); steps.len()];
    let mut open = Vec::new();
    for (number, &step) in steps.iter().enumerate() {
        let takes_part = |rank: &usize| step.0 >> rank & 1 == 1;
        let members = (0..member.world_size()).filter(takes_part);
        let members: Vec<_> = members.map(Rank).collect();
        if !members.contains(&own) {
            continue;
        }
        let pending = begin(&member.group("some", &members)?, own.0, number, step)?;
        if waits[(number + own.0) % waits.len()] {
            results[number] = pending.wait()?;
        } else {
            open.push((number, pending));
        }
    }
    for (number, pending) in open.into_iter().rev() {
        results[number] = pending.wait()?;
    }
    member.end();
    Ok(results)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_program_gives_the_numbers_that_threads_give(
        n in 1..=4_usize,
        steps in prop::collection::vec(
            (1..16_usize, 0..KINDS, prop_oneof![Just(0), 1..40_usize, 1000..3000_usize]),
            1..10,
        ),
        waits in prop::collection::vec(any::<bool>(), 1..8),
    ) {
        let by_threads = threads::world(n, threads::WorldOptions::default());
        let expected = run(by_threads, |member| play(&member, &steps, &waits));
        let found = run(on_devices(healthy(n, DEADLINE).1), |member| {
            play(&member, &steps, &waits)
        });
        prop_assert_eq!(found, expected);
    }
}

/// A rank's buffer on its device.
fn on_device(member: &Member, elements: Vec<f32>) -> Box<dyn Buffer> {
    FakeMemory::of(Box::new(elements), member.rank().0)
}

/// What the device of each of two ranks was asked for by `body`.
fn asked(body: impl Fn(&Member, &Group) + Sync) -> Vec<Vec<String>> {
    let (_, members, fakes) = healthy(2, DEADLINE);
    run(members, |member| {
        let group = member.world_group()?;
        body(&member, &group);
        Ok(())
    });
    let logs = fakes.iter().map(|fake| lock(&fake.log).clone());
    logs.collect()
}

#[test]
fn a_collective_is_a_group_call_after_the_work_of_the_buffers_queue() {
    let logs = asked(|member, group| {
        let sum = group.all_reduce(on_device(member, vec![1.0; 5]), ReduceOp::Sum);
        assert_eq!(to_host(sum.unwrap()), [2.0; 5]);
        let buffer = on_device(member, vec![member.rank().0 as f32; 2]);
        let gathered = group.start_gather(buffer, 1).unwrap().wait().unwrap();
        let expected: &[f32] = if group.rank() == 1 {
            &[0.0, 0.0, 1.0, 1.0]
        } else {
            &[]
        };
        assert_eq!(to_host(gathered), expected);
    });
    let gather = [
        vec!["f32 send 2 at peer 1"],
        vec![
            "f32 send 2 at peer 1",
            "f32 recv 2 at peer 0",
            "f32 recv 2 at peer 1",
        ],
    ];
    for (rank, log) in logs.iter().enumerate() {
        let init = format!("init {rank} of 2");
        let mut expected = vec![
            "mark own",
            &init,
            "follow",
            "group_start",
            "f32 all_reduce(sum) 5 at",
            "group_end",
            "mark side",
            "mark own",
            "follow",
            "group_start",
        ];
        expected.extend(&gather[rank]);
        expected.extend(["group_end", "mark side", "finalize", "destroy"]);
        assert_eq!(log, &expected, "rank {rank}");
    }
}

#[test]
fn a_message_stays_on_the_device_until_its_receiver_comes() {
    let logs = asked(|member, group| {
        let device = |len| Packet {
            shape: vec![len],
            data: on_device(member, vec![member.rank().0 as f32 + 1.0; len]),
        };
        let host = || Packet {
            shape: vec![1],
            data: Box::new(vec![9_u8]),
        };
        if group.rank() == 0 {
            group
                .send(1, 4, vec![device(3), host(), device(2)])
                .unwrap();
            group.barrier().unwrap();
            return;
        }
        group.barrier().unwrap();
        let message = group.recv(0, 4).unwrap();
        let shapes: Vec<_> = message.iter().map(|packet| packet.shape[0]).collect();
        assert_eq!(shapes, [3, 1, 2]);
        let mut packets = message.into_iter();
        let mut first = packets.next().unwrap().data;
        assert!(matches!(
            first.memory(),
            crate::Memory::Device { ordinal: 1, .. }
        ));
        assert_eq!(to_host(first), [1.0; 3]);
        assert_eq!(packets.next().unwrap().dtype(), DType::U8);
        assert_eq!(to_host(packets.next().unwrap().data), [1.0; 2]);
    });
    for (rank, verb, peer) in [(0, "send", 1), (1, "recv", 0)] {
        let steps = [3, 2].map(|len| format!("f32 {verb} {len} at peer {peer}"));
        let init = format!("init {rank} of 2");
        let expected = [
            "mark own",
            &init,
            "follow",
            "group_start",
            &steps[0],
            &steps[1],
            "group_end",
            "mark side",
            "finalize",
            "destroy",
        ];
        assert_eq!(logs[rank], expected, "rank {rank}");
    }
}

/// Groups over two, three and four ranks, started in another order on each rank, and messages in
/// both directions between them.
#[test]
fn ranks_launch_what_they_share_in_one_order() {
    let (_, members, fakes) = healthy(4, DEADLINE);
    let names: Vec<Vec<Rank>> = [&[0, 1][..], &[0, 1, 2], &[1, 2, 3], &[0, 1, 2, 3], &[0, 3]]
        .map(|members| members.iter().copied().map(Rank).collect())
        .to_vec();
    run(members, |member| {
        let own = names.iter().filter(|ranks| ranks.contains(&member.rank()));
        let mut groups: Vec<Group> = own
            .map(|ranks| member.group("some", ranks).unwrap())
            .collect();
        groups.rotate_left(member.rank().0 % 2);
        for round in 0..20 {
            let length = |group: &Group| {
                // Tells the collectives of all groups and rounds apart in the log.
                let place = names
                    .iter()
                    .position(|ranks| ranks == group.members())
                    .unwrap();
                10 * (round + 1) + place
            };
            let pending: Vec<_> = groups
                .iter()
                .map(|group| {
                    let buffer = on_device(&member, vec![1.0; length(group)]);
                    group.start_all_reduce(buffer, ReduceOp::Sum).unwrap()
                })
                .collect();
            for (group, pending) in groups.iter().zip(pending) {
                let sum = to_host(pending.wait()?);
                assert_eq!(sum, vec![group.world_size() as f32; length(group)]);
            }
            groups.rotate_left(1);
        }
        Ok(())
    });
    let launches: Vec<Vec<String>> = fakes
        .iter()
        .map(|fake| {
            let log = lock(&fake.log);
            let steps = log.iter().filter(|line| line.starts_with("f32"));
            steps.cloned().collect()
        })
        .collect();
    for (rank, log) in launches.iter().enumerate() {
        assert!(log.len() >= 40);
        for other in &launches[..rank] {
            let shared = |log: &[String], other: &[String]| -> Vec<String> {
                log.iter()
                    .filter(|line| other.contains(line))
                    .cloned()
                    .collect()
            };
            assert_eq!(shared(log, other), shared(other, log));
        }
    }
}

#[test]
fn two_ranks_on_one_device_are_refused_on_every_rank() {
    let (_, joined) = world_on(3, DEADLINE, |world, rank| {
        Fake::new(world, rank).on_device_of(rank % 2)
    });
    for (member, fake) in joined {
        assert_eq!(
            member.unwrap_err().to_string(),
            "the engine nccl does not fit: ranks 0 and 2 have the same CUDA device, \
             GPU-00000000-0000-0000-0000-000000000000, and NCCL takes one rank for each: give each \
             rank a device of its own, or run ranks that share one as threads of one process, with \
             the engine threads"
        );
        assert!(lock(&fake.log).is_empty(), "no device was asked");
    }
}

#[test]
fn a_call_that_fails_ends_every_rank_and_aborts_every_communicator() {
    let (world, joined) = world_on(3, Duration::from_mins(1), |world, rank| {
        let mut fake = Fake::new(world, rank);
        fake.fails_at = (rank == 1).then_some(2);
        fake
    });
    let (members, fakes): (Vec<_>, Vec<_>) = joined.into_iter().unzip();
    let members = members.into_iter().map(|member| member.unwrap()).collect();
    let start = Instant::now();
    let heard = Mutex::new(Vec::new());
    let failure = run_members(members, 2 << 20, |member| {
        let group = member.world_group()?;
        for _ in 0..5 {
            let buffer = on_device(&member, vec![1.0; 7]);
            if let Err(error) = group.all_reduce(buffer, ReduceOp::Max) {
                lock(&heard).push((member.rank().0, error.to_string()));
                return Err(error);
            }
        }
        Ok(())
    });
    assert!(start.elapsed() < DEADLINE);
    assert_eq!(failure.unwrap_err().rank(), Rank(1));
    let mut heard = heard.into_inner().unwrap();
    heard.sort();
    let said = "ncclSend failed: unhandled cuda error";
    let others = format!("rank 1 failed: {said}");
    assert_eq!(heard.len(), 3);
    for (rank, heard) in heard {
        // The others may say what they do meanwhile.
        let expected = if rank == 1 { said } else { &others };
        assert!(heard.starts_with(expected), "rank {rank}: {heard}");
    }
    for fake in fakes {
        assert_eq!(
            lock(&fake.log).last().unwrap_or(&String::new()),
            "mark side"
        );
        assert!(lock(&fake.log).contains(&"abort".to_owned()));
    }
    assert_eq!(world.alive()[0], 0, "no communicator is left");
}

#[test]
fn a_buffer_of_another_device_is_refused_and_ends_the_others() {
    let (_, members, _) = healthy(2, Duration::from_mins(1));
    let failure = run_members(members, 2 << 20, |member| {
        let group = member.world_group()?;
        let buffer = FakeMemory::of(Box::new(vec![1.0_f32]), 0);
        group.all_reduce(buffer, ReduceOp::Sum).map(drop)
    });
    assert_eq!(
        failure.unwrap_err().to_string(),
        "rank 1 failed: a buffer lies on CUDA device 0, but this rank uses device 1"
    );
}

#[test]
fn one_member_with_host_memory_is_an_error_at_once() {
    let (_, members, _) = healthy(2, Duration::from_mins(1));
    let start = Instant::now();
    let failure = run_members(members, 2 << 20, |member| {
        let group = member.world_group()?;
        let elements = vec![1.0_f32; 4];
        let buffer: Box<dyn Buffer> = if member.rank() == 0 {
            Box::new(elements)
        } else {
            on_device(&member, elements)
        };
        group.all_reduce(buffer, ReduceOp::Sum).map(drop)
    });
    let message = failure.unwrap_err().to_string();
    assert!(
        message.contains("called all_reduce(sum) of 4 f32"),
        "{message}"
    );
    assert!(start.elapsed() < DEADLINE);
}

#[test]
fn a_library_that_is_none_of_nccl_is_a_clear_error() {
    let none = Library::find(Some("/nowhere/libnccl.so.2".as_ref())).unwrap_err();
    assert_eq!(
        none.to_string(),
        "no NCCL library: /nowhere/libnccl.so.2: cannot open shared object file: No such file or \
         directory"
    );
    let other = Library::find(Some("libc.so.6".as_ref())).unwrap_err();
    assert_eq!(
        other.to_string(),
        "libc.so.6 is no NCCL library that fits: it has no function ncclGetVersion"
    );
}

/// The variable that names a library for these tests.
const LIBRARY: &str = "TEST_NCCL";

/// The version that `.ci/run` tests with: 2.32.3, which names communicators without a driver.
const PINNED: i32 = 23_203;

/// The library to test with; none where this machine has none.
fn real() -> Option<PathBuf> {
    #[expect(clippy::disallowed_methods, reason = "says where a test's library is")]
    let named = std::env::var(LIBRARY).ok();
    named.map(PathBuf::from)
}

#[test]
fn the_real_library_tells_its_version_and_names_communicators() {
    let Some(path) = real() else {
        eprintln!("skipped: {LIBRARY} names no library of NCCL");
        return;
    };
    let nccl = Nccl::load(Some(&path)).unwrap();
    assert!(nccl.version >= LEAST, "{nccl:?}");
    let found = Library::find(Some(&path)).unwrap();
    assert_eq!(found.path, path.to_string_lossy());
    // Without a driver too; another version may ask the driver first.
    if nccl.version == PINNED || Device::count().is_ok() {
        assert_ne!(nccl.unique_id().unwrap(), nccl.unique_id().unwrap());
    } else if let Err(error) = nccl.unique_id() {
        let told = error.to_string();
        assert!(told.contains("ncclGetUniqueId"), "{told}");
        eprintln!("{nccl:?} names no communicator without a driver: {told}");
    }
}

#[test]
fn a_real_device_does_every_collective_in_a_world_of_one() {
    if let Err(error) = Device::open(0) {
        eprintln!("skipped: {error}");
        return;
    }
    let mut options = JoinOptions::new(tcp::JoinOptions::new(0, 1, "127.0.0.1", 29_600));
    options.library = real();
    let device = Device::open(0).unwrap();
    every_collective_alone(&join(&options).unwrap(), &|dtype, len| {
        device.zeros(dtype, len).unwrap()
    });
}

#[test]
fn a_device_of_a_tests_own_does_so_too() {
    let (_, mut members, _) = healthy(1, DEADLINE);
    every_collective_alone(&members.remove(0), &|dtype, len| {
        FakeMemory::of(crate::zeros(dtype, len), 0)
    });
}

/// Runs every collective in a world of one rank, whose buffers `zeros` makes.
fn every_collective_alone(member: &Member, zeros: &dyn Fn(DType, usize) -> Box<dyn Buffer>) {
    // A group of one is not asked of the engine, so that this goes around it.
    let world = member.engine().communicator("one", &[Rank(0)]).unwrap();
    for dtype in DType::ALL {
        let fresh = || {
            let mut buffer = zeros(dtype, 6);
            buffer.write(&mut |bytes| bytes.iter_mut().zip(1..).for_each(|(b, i)| *b = i));
            buffer
        };
        let bytes = |buffer: Box<dyn Buffer>| {
            let mut out = Vec::new();
            buffer.read(&mut |bytes| out = bytes.to_vec());
            out
        };
        let expected = bytes(fresh());
        let sum = ReduceOp::Sum;
        for pending in [
            world.start_all_reduce(fresh(), sum),
            world.start_reduce_scatter(fresh(), ReduceOp::Max),
            world.start_reduce_scatter_parts(fresh(), vec![6], ReduceOp::Min),
            world.start_all_gather(fresh()),
            world.start_all_gather_parts(fresh(), vec![6]),
            world.start_gather(fresh(), 0),
            world.start_broadcast(fresh(), 0),
            world.start_all_to_all(fresh()),
            world.start_all_to_all_parts(fresh(), vec![6]),
        ] {
            assert_eq!(bytes(pending.unwrap().wait().unwrap()), expected, "{dtype}");
        }
    }
    member.end();
}

/// An engine whose callers' every buffer lies on their device.
#[derive(Debug)]
struct OnDevice(Arc<dyn Engine>);

impl Engine for OnDevice {
    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn communicator(&self, name: &str, members: &[Rank]) -> Result<Arc<dyn Communicator>> {
        let communicator = self.0.communicator(name, members)?;
        Ok(Arc::new(Wrapped(communicator, self.0.rank().0)))
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }

    fn end(&self) {
        self.0.end();
    }

    fn failure(&self) -> Option<Failure> {
        self.0.failure()
    }

    fn locality(&self) -> Locality {
        self.0.locality()
    }

    fn shared_bytes(&self) -> usize {
        self.0.shared_bytes()
    }

    fn epoch(&self) -> Instant {
        self.0.epoch()
    }
}

#[derive(Debug)]
struct Wrapped(Arc<dyn Communicator>, usize);

impl Wrapped {
    fn lift(&self, buffer: Box<dyn Buffer>) -> Box<dyn Buffer> {
        FakeMemory::of(buffer, self.1)
    }
}

impl Communicator for Wrapped {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn members(&self) -> &[Rank] {
        self.0.members()
    }

    fn start(&self, call: Call, buffer: Box<dyn Buffer>, lengths: Option<Arc<[usize]>>) -> Started {
        self.0.start(call, self.lift(buffer), lengths)
    }

    fn start_send(&self, to: usize, tag: u64, message: Message) -> Result<Pending<()>> {
        let lift = |packet: Packet| Packet {
            data: self.lift(packet.data),
            ..packet
        };
        let message = message.into_iter().map(lift).collect();
        self.0.start_send(to, tag, message)
    }

    fn start_recv(&self, from: usize, tag: u64) -> Result<Pending<Message>> {
        self.0.start_recv(from, tag)
    }

    fn turn(&self) -> Result<Turn> {
        self.0.turn()
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}
