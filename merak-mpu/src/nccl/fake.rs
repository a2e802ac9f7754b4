//! A device and an NCCL of a test's own: they note what they are asked for, and move host memory.
//!
//! Calls of a communicator go on by themselves, as NCCL's do: nothing is settled at the first look.
//! A step is done when all members of its communicator have put theirs into their queues, and no
//! queue goes on before that.
#![expect(unsafe_code, reason = "moves memory by its address, as a device does")]

use super::{
    calls::{Calls, Comm, UniqueId},
    cuda::{Event, Stream},
    plan::Step,
};
use crate::{Buffer, DType, Error, Memory, ReduceOp, Result, bell::lock, fold, into_vec, zeros};
use std::{
    any::Any,
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// The devices of a world.
#[derive(Debug, Default)]
pub(super) struct World(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    circles: BTreeMap<UniqueId, Circle>,
    /// By communicator: its circle, and its member.
    comms: BTreeMap<u64, (UniqueId, usize)>,
    /// By event: the communicator's queue that it is in, and the batches before it.
    events: BTreeMap<u64, Option<(u64, usize)>>,
    /// By stream, the communicator that uses it.
    streams: BTreeMap<u64, u64>,
    /// The communicators and streams that exist, and events, by count.
    alive: [i64; 3],
}

/// The steps of a group call.
type Batch = Vec<(DType, Step<u64>)>;

/// The members of a communicator.
#[derive(Debug)]
struct Circle {
    joined: Vec<bool>,
    /// By member, the steps of its group calls.
    batches: Vec<Vec<Batch>>,
    done: usize,
    is_aborted: bool,
}

impl World {
    /// The numbers of communicators, streams and events that still exist.
    pub(super) fn alive(&self) -> [i64; 3] {
        lock(&self.0).alive
    }
}

/// The device of one rank.
#[derive(Debug)]
pub(super) struct Fake {
    world: Arc<World>,
    rank: usize,
    uuid: u8,
    /// What was asked, in words.
    pub(super) log: Mutex<Vec<String>>,
    group: Mutex<Vec<(Comm, DType, Step<u64>)>>,
    is_open: Mutex<bool>,
    /// Looks until a communicator is settled.
    looks: Mutex<BTreeMap<u64, u32>>,
    /// The step that fails, counted from 0.
    pub(super) fails_at: Option<u64>,
    steps: AtomicU64,
}

impl Fake {
    pub(super) fn new(world: &Arc<World>, rank: usize) -> Self {
        Self {
            world: Arc::clone(world),
            rank,
            uuid: rank as u8,
            log: Mutex::default(),
            group: Mutex::default(),
            is_open: Mutex::default(),
            looks: Mutex::default(),
            fails_at: None,
            steps: AtomicU64::new(0),
        }
    }

    /// The same on the device of another rank.
    pub(super) fn on_device_of(self, rank: usize) -> Self {
        Self {
            uuid: rank as u8,
            ..self
        }
    }

    fn note(&self, text: String) {
        lock(&self.log).push(text);
    }

    fn unsettle(&self, comm: Comm) {
        lock(&self.looks).insert(comm.0, 2);
    }
}

impl Calls for Fake {
    fn ordinal(&self) -> usize {
        self.rank
    }

    fn uuid(&self) -> [u8; 16] {
        [self.uuid; 16]
    }

    fn enter(&self) -> Result<()> {
        Ok(())
    }

    fn zeros(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(FakeMemory {
            ordinal: self.rank,
            elements: zeros(dtype, len),
        }))
    }

    fn stream(&self) -> Result<Stream> {
        let mut state = lock(&self.world.0);
        state.next += 1;
        state.alive[1] += 1;
        Ok(Stream(state.next))
    }

    fn drop_stream(&self, stream: Stream) -> Result<()> {
        let mut state = lock(&self.world.0);
        state.alive[1] -= 1;
        state.streams.remove(&stream.0);
        Ok(())
    }

    fn mark(&self, stream: Stream) -> Result<Event> {
        let mut state = lock(&self.world.0);
        state.next += 1;
        state.alive[2] += 1;
        let place = state.streams.get(&stream.0).and_then(|comm| {
            let (id, member) = state.comms.get(comm)?;
            Some((*comm, state.circles[id].batches[*member].len()))
        });
        let event = state.next;
        state.events.insert(event, place);
        drop(state);
        let queue = if stream.0 == 0 { "own" } else { "side" };
        self.note(format!("mark {queue}"));
        Ok(Event(event))
    }

    fn follow(&self, stream: Stream, event: Event) -> Result<()> {
        assert!(stream.0 != 0, "the caller's queue waits for nothing");
        assert!(lock(&self.world.0).events.contains_key(&event.0));
        self.note("follow".to_owned());
        Ok(())
    }

    fn is_past(&self, event: Event) -> Result<bool> {
        let state = lock(&self.world.0);
        let place = state.events.get(&event.0).expect("the event exists");
        Ok(
            place.is_none_or(|(comm, before)| match state.comms.get(&comm) {
                Some((id, _)) => state.circles[id].done >= before || state.circles[id].is_aborted,
                None => true,
            }),
        )
    }

    fn drop_event(&self, event: Event) {
        let mut state = lock(&self.world.0);
        state.alive[2] -= 1;
        state.events.remove(&event.0).expect("it exists");
    }

    fn unique_id(&self) -> Result<UniqueId> {
        let mut state = lock(&self.world.0);
        state.next += 1;
        let mut id = [self.rank as u8; 128];
        id[..8].copy_from_slice(&state.next.to_le_bytes());
        Ok(id)
    }

    fn init(&self, n: usize, id: &UniqueId, rank: usize) -> Result<Comm> {
        self.note(format!("init {rank} of {n}"));
        let mut state = lock(&self.world.0);
        let circle = state.circles.entry(*id).or_insert_with(|| Circle {
            joined: vec![false; n],
            batches: vec![Vec::new(); n],
            done: 0,
            is_aborted: false,
        });
        assert!(circle.joined.len() == n && !circle.joined[rank]);
        circle.joined[rank] = true;
        state.next += 1;
        state.alive[0] += 1;
        let comm = state.next;
        state.comms.insert(comm, (*id, rank));
        drop(state);
        self.unsettle(Comm(comm));
        Ok(Comm(comm))
    }

    fn is_settled(&self, comm: Comm) -> Result<bool> {
        if let Some(looks) = lock(&self.looks).get_mut(&comm.0) {
            *looks = looks.saturating_sub(1);
            if *looks > 0 {
                return Ok(false);
            }
        }
        let state = lock(&self.world.0);
        let (id, _) = state.comms.get(&comm.0).expect("the communicator exists");
        Ok(state.circles[id].joined.iter().all(|joined| *joined))
    }

    fn group_start(&self) -> Result<()> {
        assert!(!std::mem::replace(&mut *lock(&self.is_open), true));
        self.note("group_start".to_owned());
        Ok(())
    }

    fn step(&self, comm: Comm, stream: Stream, dtype: DType, step: Step<u64>) -> Result<()> {
        assert!(*lock(&self.is_open), "steps are in a group");
        assert!(self.is_settled(comm)?, "the last call is over");
        self.note(format!("{dtype} {}", step.map(|_| "at")));
        if self.fails_at == Some(self.steps.fetch_add(1, Ordering::Relaxed)) {
            return Err(Error::Device {
                call: "ncclSend",
                reason: "unhandled cuda error".to_owned(),
            });
        }
        let mut state = lock(&self.world.0);
        let user = *state.streams.entry(stream.0).or_insert(comm.0);
        assert_eq!(user, comm.0, "a queue belongs to one communicator");
        lock(&self.group).push((comm, dtype, step));
        Ok(())
    }

    fn group_end(&self) -> Result<()> {
        assert!(std::mem::replace(&mut *lock(&self.is_open), false));
        self.note("group_end".to_owned());
        let group = std::mem::take(&mut *lock(&self.group));
        let Some((comm, ..)) = group.first().copied() else {
            return Ok(());
        };
        assert!(group.iter().all(|(other, ..)| *other == comm));
        self.unsettle(comm);
        let mut state = lock(&self.world.0);
        let (id, member) = state.comms[&comm.0];
        let circle = state.circles.get_mut(&id).expect("it exists");
        let steps = group.into_iter().map(|(_, dtype, step)| (dtype, step));
        circle.batches[member].push(steps.collect());
        while !circle.is_aborted && circle.batches.iter().all(|all| all.len() > circle.done) {
            let batch: Vec<_> = circle.batches.iter().map(|all| &all[circle.done]).collect();
            run(&batch);
            circle.done += 1;
        }
        Ok(())
    }

    fn finalize(&self, comm: Comm) -> Result<()> {
        self.note("finalize".to_owned());
        self.unsettle(comm);
        Ok(())
    }

    fn destroy(&self, comm: Comm) -> Result<()> {
        self.note("destroy".to_owned());
        let mut state = lock(&self.world.0);
        state.alive[0] -= 1;
        state.comms.remove(&comm.0).expect("it exists");
        Ok(())
    }

    fn abort(&self, comm: Comm) -> Result<()> {
        self.note("abort".to_owned());
        let mut state = lock(&self.world.0);
        state.alive[0] -= 1;
        let (id, _) = state.comms.remove(&comm.0).expect("it exists");
        state.circles.get_mut(&id).expect("it exists").is_aborted = true;
        Ok(())
    }
}

/// Runs one group call of all members.
fn run(batch: &[&Vec<(DType, Step<u64>)>]) {
    let mut sent: BTreeMap<(usize, usize), Vec<Vec<u8>>> = BTreeMap::new();
    for (me, steps) in batch.iter().enumerate() {
        for (dtype, step) in *steps {
            if let Step::Send { from, len, peer } = *step {
                let bytes = read(from, len * dtype.size_bytes());
                sent.entry((me, peer)).or_default().push(bytes);
            }
        }
    }
    for (me, steps) in batch.iter().enumerate() {
        for (dtype, step) in *steps {
            if let Step::Recv { to, len, peer } = *step {
                let queue = sent.get_mut(&(peer, me)).expect("the peer sends");
                let bytes = queue.remove(0);
                assert_eq!(bytes.len(), len * dtype.size_bytes(), "one length");
                write(to, &bytes);
            }
        }
    }
    assert!(sent.values().all(Vec::is_empty), "all is received");
    let collectives = |steps: &[(DType, Step<u64>)]| -> Vec<(DType, Step<u64>)> {
        let is_collective =
            |step: &Step<u64>| !matches!(step, Step::Send { .. } | Step::Recv { .. });
        let steps = steps.iter().filter(|(_, step)| is_collective(step));
        steps.copied().collect()
    };
    let all: Vec<_> = batch.iter().map(|steps| collectives(steps)).collect();
    for place in 0..all[0].len() {
        let steps: Vec<_> = all.iter().map(|steps| steps[place]).collect();
        collective(&steps);
    }
}

/// Runs one collective of NCCL, whose step each member has put into its queue.
fn collective(steps: &[(DType, Step<u64>)]) {
    let (dtype, first) = steps[0];
    let size = dtype.size_bytes();
    let named = |step: &Step<u64>| step.map(|_| "").to_string();
    assert!(
        steps.iter().all(|(_, step)| named(step) == named(&first)),
        "members differ: {steps:?}"
    );
    let n = steps.len();
    let inputs = |len: usize| inputs(steps, len * size);
    match first {
        Step::AllReduce { len, op, .. } => {
            let sum = fold(dtype, op, &inputs(len));
            for (_, step) in steps {
                if let Step::AllReduce { at, .. } = *step {
                    write(at, &sum);
                }
            }
        }
        Step::ReduceScatter { len, op, .. } => {
            let sum = fold(dtype, op, &inputs(len * n));
            for ((_, step), part) in steps.iter().zip(sum.chunks(len * size)) {
                if let Step::ReduceScatter { to, .. } = *step {
                    write(to, part);
                }
            }
        }
        Step::Reduce { len, op, root, .. } => {
            let sum = fold(dtype, op, &inputs(len));
            if let (_, Step::Reduce { to, .. }) = steps[root] {
                write(to, &sum);
            }
        }
        Step::AllGather { len, .. } => {
            let joined = inputs(len).concat();
            for (_, step) in steps {
                if let Step::AllGather { to, .. } = *step {
                    write(to, &joined);
                }
            }
        }
        Step::Broadcast { len, root, .. } => {
            let (_, Step::Broadcast { from, .. }) = steps[root] else {
                return;
            };
            let bytes = read(from, len * size);
            for (_, step) in steps {
                if let Step::Broadcast { to, .. } = *step {
                    write(to, &bytes);
                }
            }
        }
        Step::Send { .. } | Step::Recv { .. } => {}
    }
}

/// The bytes of the inputs of the members' steps.
fn inputs(steps: &[(DType, Step<u64>)], bytes: usize) -> Vec<Vec<u8>> {
    let from = steps.iter().map(|(_, step)| match *step {
        Step::AllReduce { at, .. } => at,
        Step::ReduceScatter { from, .. }
        | Step::Reduce { from, .. }
        | Step::AllGather { from, .. }
        | Step::Broadcast { from, .. }
        | Step::Send { from, .. } => from,
        Step::Recv { to, .. } => to,
    });
    from.map(|from| read(from, bytes)).collect()
}

fn fold(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    // Words, so that every element type is aligned.
    let mut words: Vec<Vec<u64>> = inputs
        .iter()
        .map(|bytes| {
            let mut words = vec![0_u64; bytes.len().div_ceil(8)];
            bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
            words
        })
        .collect();
    let len = inputs[0].len();
    let n = inputs.len();
    let mut memory: Vec<&mut [u8]> = words
        .iter_mut()
        .map(|words| &mut bytemuck::cast_slice_mut::<u64, u8>(words)[..len])
        .collect();
    fold::reduce(dtype, op, n, &mut memory, 0..1);
    memory[0].to_vec()
}

fn read(from: u64, len: usize) -> Vec<u8> {
    let from: *const u8 = super::cuda::pointer(from);
    // SAFETY: the job that put the step into its queue holds the buffer until the step is done.
    unsafe { std::slice::from_raw_parts(from, len) }.to_vec()
}

fn write(to: u64, bytes: &[u8]) {
    let to: *mut u8 = super::cuda::pointer(to);
    // SAFETY: as in `read`; no other thread uses the buffer until the step is done.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// Host memory that says that it lies on a device.
#[derive(Debug)]
pub(super) struct FakeMemory {
    ordinal: usize,
    elements: Box<dyn Buffer>,
}

impl FakeMemory {
    /// A buffer as it lies on a rank's device.
    pub(super) fn of(buffer: Box<dyn Buffer>, ordinal: usize) -> Box<dyn Buffer> {
        Box::new(Self {
            ordinal,
            elements: buffer,
        })
    }
}

impl Buffer for FakeMemory {
    fn dtype(&self) -> DType {
        self.elements.dtype()
    }

    fn len(&self) -> usize {
        self.elements.len()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        self.elements.read(f);
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        self.elements.write(f);
    }

    fn lies_on_device(&self) -> bool {
        true
    }

    fn memory(&mut self) -> Memory {
        match self.elements.memory() {
            Memory::Host(start) => Memory::Device {
                ordinal: self.ordinal,
                address: super::cuda::address(start),
            },
            other => other,
        }
    }

    fn zeros_like(&self, len: usize) -> Box<dyn Buffer> {
        Self::of(self.elements.zeros_like(len), self.ordinal)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

/// A buffer of a device in host memory.
pub(super) fn to_host(buffer: Box<dyn Buffer>) -> Vec<f32> {
    into_vec(buffer).expect("the elements are f32")
}
