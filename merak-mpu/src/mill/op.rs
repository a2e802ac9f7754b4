//! A collective of this process from its call to its result.

use super::{
    frame::GroupKey,
    moves::{Area, Extent, Fold, Moves, Relay},
    packets::Packets,
};
use crate::{
    Buffer, Error, Rank, ReduceOp, Result,
    bell::lock,
    call::{Call, Fingerprint, compare},
    fold,
    mailbox::Mailbox,
    pages::zeroed,
    rank::describe_group,
};
use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

/// Bytes that are folded at once while more arrive.
const SEGMENT_BYTES: usize = 256 << 10;

/// A group of this process.
#[derive(Debug)]
pub(super) struct GroupState {
    /// Its place among the groups of this process.
    pub(super) number: u32,
    pub(super) key: GroupKey,
    /// This process's rank in it.
    pub(super) me: usize,
    pub(super) mailbox: Mailbox,
}

impl GroupState {
    pub(super) fn members(&self) -> &[Rank] {
        &self.key.1
    }

    pub(super) fn describe(&self) -> String {
        describe_group(&self.key.0, self.members())
    }

    /// The group rank of a world rank.
    pub(super) fn rank_of(&self, rank: Rank) -> Option<usize> {
        self.members().binary_search(&rank).ok()
    }
}

/// Most bytes that are kept for later collectives.
const SPARE_BYTES: usize = 256 << 20;

/// Memory of collectives that are over, for those that come: fresh memory costs as much as what is
/// done in it.
#[derive(Debug, Default)]
pub(super) struct Spares(Vec<Vec<i64>>);

impl Spares {
    /// At least `words` words, with any content.
    fn take(&mut self, words: usize) -> Vec<i64> {
        if words == 0 {
            return Vec::new();
        }
        let fitting = self
            .0
            .iter()
            .enumerate()
            .filter(|(_, one)| one.len() >= words);
        let best = fitting.min_by_key(|(_, one)| one.len());
        match best.map(|(place, _)| place) {
            Some(place) => self.0.swap_remove(place),
            None => zeroed(words),
        }
    }

    fn put(&mut self, words: Vec<i64>) {
        let kept: usize = self.0.iter().map(Vec::len).sum();
        if !words.is_empty() && (kept + words.len()) * size_of::<i64>() <= SPARE_BYTES {
            self.0.push(words);
        }
    }
}

/// Where the thread that waits finds the result.
#[derive(Debug)]
pub(super) struct Slot {
    result: Mutex<Option<Result<Box<dyn Buffer>>>>,
    is_done: AtomicBool,
    /// Whether the mill knows of the call, so that members which called before are noted.
    has_begun: AtomicBool,
    /// By member, how far it has come.
    progress: Vec<AtomicU8>,
}

const CALLED: u8 = 1;
const ARRIVED: u8 = 2;

impl Slot {
    pub(super) fn new(me: usize, n: usize) -> Self {
        let progress = |rank| AtomicU8::new(if rank == me { ARRIVED } else { 0 });
        Self {
            result: Mutex::default(),
            is_done: AtomicBool::new(false),
            has_begun: AtomicBool::new(false),
            progress: (0..n).map(progress).collect(),
        }
    }

    /// Leaves an error for the thread that waits, before the world fails and wakes it.
    pub(super) fn leave(&self, error: Error) {
        lock(&self.result).get_or_insert(Err(error));
    }

    pub(super) fn finish(&self, result: Result<Box<dyn Buffer>>) {
        lock(&self.result).get_or_insert(result);
        self.is_done.store(true, Ordering::Release);
    }

    pub(super) fn begin(&self) {
        self.has_begun.store(true, Ordering::Release);
    }

    pub(super) fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    pub(super) fn take(&self) -> Option<Result<Box<dyn Buffer>>> {
        lock(&self.result).take()
    }

    /// The members that have not called.
    pub(super) fn absent(&self) -> Vec<usize> {
        self.below(CALLED)
    }

    /// The members that have not called, or whose data have not come.
    pub(super) fn missing(&self) -> Vec<usize> {
        self.below(ARRIVED)
    }

    fn below(&self, level: u8) -> Vec<usize> {
        let members = self.progress.iter().enumerate();
        let members = members.filter(|(_, found)| found.load(Ordering::Acquire) < level);
        members.map(|(rank, _)| rank).collect()
    }
}

/// A collective that this process has called.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) group: Arc<GroupState>,
    pub(super) sequence: u64,
    pub(super) fingerprint: Fingerprint,
    pub(super) moves: Moves,
    pub(super) slot: Arc<Slot>,
    input: Box<dyn Buffer>,
    output: Option<Box<dyn Buffer>>,
    /// Words, so that every element type is aligned; at least as many as the moves need.
    stage: Vec<i64>,
    called: Vec<bool>,
    /// Members that have called something else.
    others: Vec<(usize, Fingerprint)>,
    /// By member, the bytes of its first and its second move that have come.
    first: Vec<usize>,
    second: Vec<usize>,
    /// Bytes of this member's part that are there for all.
    folded: usize,
    /// By member, how many of them are on their way to it.
    shared: Vec<usize>,
    /// Frames of this collective on their way to a socket.
    pub(super) unsent: usize,
}

impl Op {
    pub(super) fn new(
        group: Arc<GroupState>,
        sequence: u64,
        fingerprint: Fingerprint,
        input: Box<dyn Buffer>,
        slot: Arc<Slot>,
        spares: &mut Spares,
        packets: &mut Packets,
    ) -> Result<Self> {
        let n = group.members().len();
        let moves = Moves::new(&fingerprint, group.me, n);
        let mut op = Self {
            output: moves.output_len.map(|len| packets.take_like(&*input, len)),
            stage: spares.take(moves.stage_bytes.div_ceil(size_of::<i64>())),
            called: vec![false; n],
            others: Vec::new(),
            first: vec![0; n],
            second: vec![0; n],
            folded: 0,
            shared: vec![0; n],
            unsent: 0,
            group,
            sequence,
            fingerprint,
            moves,
            slot,
            input,
        };
        op.called[op.group.me] = true;
        for (source, target) in std::mem::take(&mut op.moves.copies) {
            op.copy(&source, target)?;
        }
        Ok(op)
    }

    /// Calls `f` with some bytes of a piece.
    pub(super) fn read(
        &self,
        area: Area,
        range: Range<usize>,
        f: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        let mut outcome = Err(());
        let mut part = |bytes: &[u8]| {
            if let Some(bytes) = bytes.get(range.clone()) {
                f(bytes);
                outcome = Ok(());
            }
        };
        match (area, &self.output) {
            (Area::Input, _) => self.input.read(&mut part),
            (Area::Output, Some(output)) => output.read(&mut part),
            (Area::Output, None) => {}
            (Area::Stage, _) => part(bytemuck::cast_slice(&self.stage)),
        }
        outcome.map_err(|()| self.unopened())
    }

    /// Calls `f` with some bytes of a piece for writing.
    pub(super) fn write(
        &mut self,
        area: Area,
        range: Range<usize>,
        f: &mut dyn FnMut(&mut [u8]),
    ) -> Result<()> {
        let mut outcome = Err(());
        let mut part = |bytes: &mut [u8]| {
            if let Some(bytes) = bytes.get_mut(range.clone()) {
                f(bytes);
                outcome = Ok(());
            }
        };
        match (area, &mut self.output) {
            (Area::Input, _) => self.input.write(&mut part),
            (Area::Output, Some(output)) => output.write(&mut part),
            (Area::Output, None) => {}
            (Area::Stage, _) => part(bytemuck::cast_slice_mut(&mut self.stage)),
        }
        outcome.map_err(|()| self.unopened())
    }

    fn unopened(&self) -> Error {
        Error::BadBuffer {
            rank: self.group.members()[self.group.me].0,
            len: self.input.len(),
            dtype: self.input.dtype(),
            expected: self.input.size_bytes(),
        }
    }

    fn copy(&mut self, source: &Range<usize>, target: Extent) -> Result<()> {
        let Self {
            input,
            output,
            stage,
            ..
        } = self;
        let mut outcome = Err(());
        let range = target.start..target.start + target.len;
        input.read(&mut |from| {
            let mut put = |to: &mut [u8]| {
                if let (Some(from), Some(to)) =
                    (from.get(source.clone()), to.get_mut(range.clone()))
                {
                    to.copy_from_slice(from);
                    outcome = Ok(());
                }
            };
            match (target.area, &mut *output) {
                (Area::Output, Some(output)) => output.write(&mut put),
                (Area::Stage, _) => put(bytemuck::cast_slice_mut(stage)),
                _ => {}
            }
        });
        outcome.map_err(|()| self.unopened())
    }

    pub(super) fn has_called(&self, member: usize) -> bool {
        self.called[member]
    }

    /// Notes that a member has called the same.
    pub(super) fn note_call(&mut self, member: usize) {
        self.called[member] = true;
        self.slot.progress[member].fetch_max(CALLED, Ordering::Release);
        self.note_arrival(member);
    }

    /// Notes that a member has called something else.
    pub(super) fn note_other_call(&mut self, member: usize, fingerprint: Fingerprint) {
        self.slot.progress[member].fetch_max(CALLED, Ordering::Release);
        self.others.push((member, fingerprint));
    }

    /// Whether the calls of all members are known.
    pub(super) fn have_all_called(&self) -> bool {
        let same = self.called.iter().filter(|called| **called).count();
        same + self.others.len() == self.called.len()
    }

    /// Compares the calls that are known.
    pub(super) fn compare_calls(&self) -> Result<()> {
        let members = self.group.members();
        let same = (0..members.len()).filter(|member| self.called[*member]);
        let mut calls: Vec<_> = same
            .map(|member| (members[member], &self.fingerprint))
            .collect();
        let others = self.others.iter();
        calls.extend(others.map(|(member, other)| (members[*member], other)));
        calls.sort_by_key(|(rank, _)| *rank);
        let group = (self.group.key.0.as_str(), members);
        compare(group, self.sequence, &calls, ToString::to_string)
    }

    /// Where the next `len` bytes of a member's first or second move go.
    pub(super) fn place(
        &self,
        member: usize,
        second: bool,
        start: usize,
        len: usize,
    ) -> Option<Extent> {
        let (piece, got) = if second {
            (self.moves.sums.get(member)?, self.second[member])
        } else {
            (&self.moves.receives[member], self.first[member])
        };
        let end = start.checked_add(len)?;
        (start == got && end <= piece.len).then(|| Extent {
            area: piece.area,
            start: piece.start + start,
            len,
        })
    }

    /// Notes that bytes of a member have come.
    pub(super) fn note_bytes(&mut self, member: usize, second: bool, len: usize) {
        let got = if second {
            &mut self.second
        } else {
            &mut self.first
        };
        got[member] += len;
        self.note_arrival(member);
    }

    fn note_arrival(&self, member: usize) {
        let sum = self.moves.sums.get(member).map_or(0, |piece| piece.len);
        if self.called[member]
            && self.first[member] == self.moves.receives[member].len
            && self.second[member] == sum
        {
            self.slot.progress[member].fetch_max(ARRIVED, Ordering::Release);
        }
    }

    /// Folds what has come of all members, or takes what is to be passed on.
    pub(super) fn fold(&mut self) -> Result<()> {
        let me = self.group.me;
        let (come, whole) = match (self.moves.fold, self.moves.relay) {
            (Some(Fold { own, .. }), _) => {
                let others = (0..self.first.len()).filter(|rank| *rank != me);
                let come = others.map(|rank| self.first[rank]).min();
                (come.unwrap_or(own.len), own.len)
            }
            (None, Some(Relay { root, part })) if root == me => (part.len, part.len),
            (None, Some(Relay { root, part })) => (self.first[root], part.len),
            (None, None) => return Ok(()),
        };
        let come = come - come % self.fingerprint.dtype.size_bytes();
        if come == self.folded || (come < whole && come - self.folded < SEGMENT_BYTES) {
            return Ok(());
        }
        if let (
            Some(Fold { own, target }),
            Call::AllReduce(op) | Call::ReduceScatter(op) | Call::ReduceScatterInPlace(op),
        ) = (self.moves.fold, self.fingerprint.call)
        {
            self.fold_range(op, own, target, &(self.folded..come))?;
        }
        self.folded = come;
        Ok(())
    }

    /// Takes what goes to a member now, of what is there for all: where it begins in this member's
    /// part, and the bytes. A member that has not called has no place for it yet.
    pub(super) fn share_with(&mut self, member: usize) -> Option<(usize, Extent)> {
        let part = match (self.moves.fold, self.moves.relay) {
            (Some(fold), _) if !self.moves.sums.is_empty() => fold.target,
            (None, Some(relay)) if relay.root != member => relay.part,
            _ => return None,
        };
        let start = self.shared[member];
        if !self.called[member] || start == self.folded {
            return None;
        }
        self.shared[member] = self.folded;
        let piece = Extent {
            start: part.start + start,
            len: self.folded - start,
            ..part
        };
        Some((start, piece))
    }

    fn fold_range(
        &mut self,
        op: ReduceOp,
        own: Extent,
        target: Extent,
        range: &Range<usize>,
    ) -> Result<()> {
        let (n, me, dtype) = (self.first.len(), self.group.me, self.fingerprint.dtype);
        let Self {
            input,
            output,
            stage,
            moves,
            ..
        } = self;
        let part = |start: usize| start + range.start..start + range.end;
        let stride = moves.stage_bytes.checked_div(n - 1).unwrap_or(0).max(1);
        let mut outcome = Err(());
        let mut fold = |input: &mut [u8], output: Option<&mut [u8]>| {
            let stage: &mut [u8] = bytemuck::cast_slice_mut(stage);
            let Some(own) = input.get_mut(part(own.start)) else {
                return;
            };
            let others = stage.chunks_mut(stride).map(|one| &mut one[range.clone()]);
            let mut memory: Vec<&mut [u8]> = others.take(n - 1).collect();
            memory.insert(me, own);
            match output {
                None => fold::reduce(dtype, op, n, &mut memory, me..me + 1),
                Some(output) => {
                    let Some(output) = output.get_mut(part(target.start)) else {
                        return;
                    };
                    memory.push(output);
                    fold::reduce(dtype, op, n, &mut memory, n..n + 1);
                }
            }
            outcome = Ok(());
        };
        input.write(&mut |input| match output {
            None => fold(input, None),
            Some(output) => output.write(&mut |output| fold(input, Some(output))),
        });
        outcome.map_err(|()| self.unopened())
    }

    /// Whether all has come, is computed and is sent.
    pub(super) fn is_complete(&self) -> bool {
        let others = (0..self.called.len()).filter(|rank| *rank != self.group.me);
        let mut arrived = others.map(|rank| self.slot.progress[rank].load(Ordering::Relaxed));
        let Moves { fold, relay, .. } = &self.moves;
        self.unsent == 0
            && self.others.is_empty()
            && arrived.all(|progress| progress == ARRIVED)
            && fold.is_none_or(|fold| self.folded == fold.own.len)
            && relay.is_none_or(|relay| self.folded == relay.part.len)
    }

    /// Gives the result to the thread that waits.
    pub(super) fn finish(self, spares: &mut Spares, packets: &mut Packets) {
        let result = match self.output {
            None => self.input,
            Some(output) => {
                // The output of the next such exchange.
                if output.len() == self.input.len() {
                    packets.keep(self.input);
                }
                output
            }
        };
        self.slot.finish(Ok(result));
        spares.put(self.stage);
    }
}
