//! Programs of collectives and messages between any ranks, which every engine runs alike.

use half::{bf16, f16};
use merak_mpu::{
    Buffer, Communicator, DType, Group, Member, Message, Packet, Pending, Rank, ReduceOp, Result,
};
use proptest::prelude::*;
use std::ops::RangeInclusive;

/// What all ranks of a world run.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) ranks: usize,
    steps: Vec<Step>,
    /// What a rank waits for after its starts: it reads this list from a place of its own, round
    /// and round.
    waits: Vec<usize>,
}

/// One step of a program, which all members of a group start.
#[derive(Debug, Clone)]
struct Step {
    /// Bit `r` is set where rank `r` takes part.
    members: usize,
    kind: usize,
    dtype: DType,
    op: ReduceOp,
    len: usize,
}

/// How many kinds of steps there are.
const KINDS: usize = 14;

/// Programs for worlds of `ranks` ranks.
pub(crate) fn programs(ranks: RangeInclusive<usize>) -> impl Strategy<Value = Program> {
    let len = prop_oneof![Just(0), Just(1), 1..50_usize, 5_000..30_000_usize];
    let dtype = prop::sample::select(DType::ALL.as_slice());
    let op = prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min]);
    let step = (1..32_usize, 0..KINDS, dtype, op, len);
    let step = step.prop_map(|(members, kind, dtype, op, len)| Step {
        members,
        kind,
        dtype,
        op,
        len,
    });
    let steps = prop::collection::vec(step, 1..10);
    let waits = prop::collection::vec(0..12_usize, 1..12);
    (ranks, steps, waits).prop_map(|(ranks, steps, waits)| Program {
        ranks,
        steps,
        waits,
    })
}

/// What a rank has started, or the bytes of its result.
enum Work {
    Started(Pending<Vec<u8>>),
    Done(Vec<u8>),
}

impl Work {
    fn finish(&mut self) {
        let done = match std::mem::replace(self, Self::Done(Vec::new())) {
            Self::Started(pending) => pending.wait().expect("all members have started it"),
            Self::Done(bytes) => bytes,
        };
        *self = Self::Done(done);
    }
}

impl Program {
    /// Runs the part of a rank, and returns the bytes of its results by step.
    ///
    /// All ranks start the steps in one order. After any start a rank may wait for any step that it
    /// has started. A rank that is waited for waits for earlier steps alone, so none waits for
    /// ever.
    pub(crate) fn results(&self, member: &Member) -> Vec<Vec<u8>> {
        let mut work: Vec<Work> = Vec::new();
        let mut waits = self.waits.iter().cycle().skip(member.rank().0);
        for (number, step) in self.steps.iter().enumerate() {
            let takes_part = |rank: &usize| step.members >> rank & 1 == 1;
            let members: Vec<_> = (0..self.ranks).filter(takes_part).map(Rank).collect();
            if !members.contains(&member.rank()) {
                continue;
            }
            let started = step.start(number, member, &members);
            work.push(Work::Started(started.expect("the world is healthy")));
            // A place that is not there yet: the rank goes on.
            if let Some(place) = waits.next().and_then(|&place| work.get_mut(place)) {
                place.finish();
            }
        }
        // The rest in an order of the rank's own.
        for _ in 0..work.len() {
            let place = waits.next().copied().unwrap_or_default() % work.len();
            work[place].finish();
        }
        work.iter_mut().for_each(Work::finish);
        let bytes = work.into_iter().filter_map(|work| match work {
            Work::Done(bytes) => Some(bytes),
            Work::Started(_) => None,
        });
        bytes.collect()
    }
}

impl Step {
    /// Starts this rank's part.
    fn start(&self, number: usize, member: &Member, members: &[Rank]) -> Result<Pending<Vec<u8>>> {
        let group = member.group("some", members)?;
        let (n, rank, own) = (group.world_size(), group.rank(), member.rank().0);
        let fresh = |len: usize, seed: usize| self.fresh(len, seed);
        let seed = own * 31 + number;
        let (len, op) = (self.len, self.op);
        let few = |to: usize| self.few(to);
        let pending = match self.kind {
            0 => group.start_all_reduce(fresh(len, seed), op),
            1 => group.start_reduce_scatter(fresh(len * n, seed), op),
            2 => {
                let lengths: Vec<_> = (0..n).map(few).collect();
                let whole = fresh(lengths.iter().sum(), seed);
                group.start_reduce_scatter_parts(whole, lengths, op)
            }
            3 => group.start_all_gather(fresh(len, seed)),
            4 => group.start_gather(fresh(len, seed), n - 1),
            5 => group.start_broadcast(fresh(len, seed), n / 2),
            6 => {
                let of = |from: usize| if from == n - 1 { len } else { 0 };
                let lengths = (0..n).map(of).collect();
                group.start_all_gather_parts(fresh(of(rank), number), lengths)
            }
            7 => group.start_all_to_all(fresh(len * n, seed)),
            8 => {
                let lengths: Vec<_> = (0..n).map(few).collect();
                let parts = fresh(lengths.iter().sum(), own + number);
                group.start_all_to_all_parts(parts, lengths.repeat(n))
            }
            9..13 => return self.start_in_place(&group, seed),
            _ => {
                let tag = (number % 2) as u64;
                let packet = |len: usize| Packet {
                    shape: vec![1, len],
                    data: fresh(len, seed),
                };
                if rank == 0 {
                    let sent = group.start_send(n - 1, tag, vec![packet(len), packet(3)])?;
                    if n > 1 {
                        return Ok(sent.map(|()| Ok(Vec::new())));
                    }
                    sent.wait()?;
                }
                if rank < n - 1 {
                    return Ok(Pending::ready(Vec::new()));
                }
                return Ok(group
                    .start_recv(0, tag)?
                    .map(|message| Ok(of_message(&message))));
            }
        };
        Ok(pending?.map(|buffer| Ok(bytes(&*buffer))))
    }

    /// Starts what works in buffers that have the parts of all members.
    fn start_in_place(&self, group: &Group, seed: usize) -> Result<Pending<Vec<u8>>> {
        let (n, rank) = (group.world_size(), group.rank());
        let (is_sum, is_listed) = (self.kind.is_multiple_of(2), self.kind > 10);
        let lengths: Vec<_> = if is_listed {
            (0..n).map(|member| self.few(member)).collect()
        } else {
            vec![self.len; n]
        };
        let whole: usize = lengths.iter().sum();
        let start: usize = lengths[..rank].iter().sum();
        let size = self.dtype.size_bytes();
        let part = if is_sum {
            start * size..(start + lengths[rank]) * size
        } else {
            0..whole * size
        };
        let buffer = self.fresh(whole, seed);
        let pending = match (is_sum, is_listed) {
            (false, false) => group.start_all_gather_in_place(buffer),
            (true, false) => group.start_reduce_scatter_in_place(buffer, self.op),
            (false, true) => group.start_all_gather_parts_in_place(buffer, lengths),
            (true, true) => group.start_reduce_scatter_parts_in_place(buffer, lengths, self.op),
        };
        Ok(pending?.map(|buffer| Ok(bytes(&*buffer)[part].to_vec())))
    }

    fn fresh(&self, len: usize, seed: usize) -> Box<dyn Buffer> {
        let mut buffer = merak_mpu::zeros(self.dtype, len);
        fill(&mut *buffer, seed);
        buffer
    }

    /// The length of a member's part where parts differ.
    fn few(&self, member: usize) -> usize {
        (member * 7 + self.len) % 11
    }
}

fn bytes(buffer: &dyn Buffer) -> Vec<u8> {
    let mut out = Vec::new();
    buffer.read(&mut |bytes| out = bytes.to_vec());
    out
}

fn of_message(message: &Message) -> Vec<u8> {
    let packets = message.iter().flat_map(|packet| {
        let shape = format!("{:?}", packet.shape).into_bytes();
        [shape, bytes(&*packet.data)].concat()
    });
    packets.collect()
}

/// Fills a buffer with small numbers whose sums depend on the order of the terms.
fn fill(buffer: &mut dyn Buffer, seed: usize) {
    let value = |index: usize| ((index * 7 + seed) % 97) as f32 * 0.37 + 1.0;
    let dtype = buffer.dtype();
    buffer.write(&mut |bytes| {
        let elements = bytes.chunks_exact_mut(dtype.size_bytes()).enumerate();
        for (index, element) in elements {
            let x = value(index);
            match dtype {
                DType::F64 => element.copy_from_slice(&f64::from(x).to_le_bytes()),
                DType::F32 => element.copy_from_slice(&x.to_le_bytes()),
                DType::BF16 => element.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
                DType::F16 => element.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
                DType::I64 => element.copy_from_slice(&(x as i64).to_le_bytes()),
                DType::U32 => element.copy_from_slice(&(x as u32).to_le_bytes()),
                DType::U8 => element.copy_from_slice(&[x as u8]),
            }
        }
    });
}
