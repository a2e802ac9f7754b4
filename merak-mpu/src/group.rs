//! A group of ranks as its members use it.

use crate::{
    Buffer, Call, Communicator, Element, Engine, Error, Message, Packet, Pending, Rank, ReduceOp,
    Result, Started, Turn, into_vec, rank::describe_group,
};
use std::{ops::Range, sync::Arc};

/// The tag of the messages of [`Group::gather_bytes`].
const GATHER_TAG: u64 = u64::MAX;

/// One rank's handle on a group: its members, and every collective in blocking and pending form.
///
/// Clones are the same member. `N` is the number of members and `L` a length in elements. The
/// pending forms are those of [`Communicator`], which a group implements; `*_vec` forms take and
/// give a `Vec` of any [`Element`] type without a copy. A group of one rank returns each buffer as
/// it is, at once. A group that is dropped while its thread panics poisons the world.
///
/// ```
/// use merak_mpu::{Communicator, ReduceOp, into_vec, threads};
/// threads::run(2, threads::WorldOptions::default(), |member| {
///     let group = member.world_group()?;
///     let sum = group.start_all_reduce(Box::new(vec![1.0_f32]), ReduceOp::Sum)?;
///     let names = group.all_gather_bytes(format!("rank {}", group.rank()).into_bytes())?;
///     assert_eq!(names, [b"rank 0", b"rank 1"]);
///     assert_eq!(into_vec::<f32>(sum.wait()?)?, [2.0]);
///     Ok::<_, merak_mpu::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Group {
    name: Arc<str>,
    communicator: Arc<dyn Communicator>,
    engine: Arc<dyn Engine>,
}

impl Group {
    /// Joins a group through an engine's handle, after a check of the members.
    pub(crate) fn join(engine: &Arc<dyn Engine>, name: &str, members: &[Rank]) -> Result<Self> {
        let bad = |reason: &str| Error::BadGroup {
            name: name.to_owned(),
            members: members.iter().map(|rank| rank.0).collect(),
            reason: reason.to_owned(),
        };
        if !members.is_sorted_by(|a, b| a < b) {
            return Err(bad("members must ascend"));
        }
        if members
            .last()
            .is_some_and(|last| last.0 >= engine.world_size())
        {
            return Err(bad(&format!("the world has {} ranks", engine.world_size())));
        }
        if !members.contains(&engine.rank()) {
            return Err(bad(&format!("rank {} is not among them", engine.rank())));
        }
        let communicator = engine.communicator(name, members)?;
        Ok(Self {
            name: name.into(),
            communicator,
            engine: Arc::clone(engine),
        })
    }

    /// The name, as in `tensor`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The members as world ranks, ascending; a group rank is an index into them.
    pub fn members(&self) -> &[Rank] {
        self.communicator.members()
    }

    /// This member's rank within the group.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// The number of members.
    pub fn world_size(&self) -> usize {
        self.members().len()
    }

    /// Whether this rank is alone in the group.
    pub fn is_single(&self) -> bool {
        self.world_size() == 1
    }

    /// The group rank of a world rank, if it is a member.
    pub fn rank_of(&self, rank: Rank) -> Option<usize> {
        self.members().binary_search(&rank).ok()
    }

    /// Splits the group into one group for each color: that of the members that gave this one. It
    /// is named after both, as in `world/3`. Make it once and clone it: each one that is made is
    /// kept until the world ends.
    ///
    /// # Communication
    /// An all-gather of the colors.
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn split(&self, color: u32) -> Result<Self> {
        let colors = self.all_gather_vec(vec![color])?;
        let chosen = self.members().iter().zip(colors);
        let members: Vec<Rank> = chosen
            .filter(|(_, other)| *other == color)
            .map(|(rank, _)| *rank)
            .collect();
        Self::join(&self.engine, &format!("{}/{color}", self.name), &members)
    }

    /// Reduces `[L]` element by element; every member gets the `[L]` result in its own buffer.
    ///
    /// # Errors
    /// As [`Communicator::start_all_reduce`] and [`Pending::wait`].
    pub fn all_reduce(&self, buffer: Box<dyn Buffer>, op: ReduceOp) -> Result<Box<dyn Buffer>> {
        self.start_all_reduce(buffer, op)?.wait()
    }

    /// [`Group::all_reduce`] of a `Vec`.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn all_reduce_vec<T: Element>(&self, data: Vec<T>, op: ReduceOp) -> Result<Vec<T>> {
        into_vec(self.all_reduce(Box::new(data), op)?)
    }

    /// [`Group::all_reduce`] of one number.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn all_reduce_scalar<T: Element>(&self, value: T, op: ReduceOp) -> Result<T> {
        Ok(self.all_reduce_vec(vec![value], op)?[0])
    }

    /// Reduces `[N * L]`; member `r` gets the `r`-th `[L]`.
    ///
    /// # Errors
    /// As [`Communicator::start_reduce_scatter`] and [`Pending::wait`].
    pub fn reduce_scatter(&self, buffer: Box<dyn Buffer>, op: ReduceOp) -> Result<Box<dyn Buffer>> {
        self.start_reduce_scatter(buffer, op)?.wait()
    }

    /// [`Group::reduce_scatter`] of a `Vec`.
    ///
    /// # Errors
    /// As [`Group::reduce_scatter`].
    pub fn reduce_scatter_vec<T: Element>(&self, data: Vec<T>, op: ReduceOp) -> Result<Vec<T>> {
        into_vec(self.reduce_scatter(Box::new(data), op)?)
    }

    /// [`Communicator::start_reduce_scatter_in_place`] of a `Vec`, and the wait for it.
    ///
    /// # Errors
    /// As [`Communicator::start_reduce_scatter_in_place`] and [`Pending::wait`].
    pub fn reduce_scatter_in_place_vec<T: Element>(
        &self,
        data: Vec<T>,
        op: ReduceOp,
    ) -> Result<Vec<T>> {
        let pending = self.start_reduce_scatter_in_place(Box::new(data), op)?;
        into_vec(pending.wait()?)
    }

    /// Joins one `[L]` of each member, in rank order, to `[N * L]` on every member.
    ///
    /// # Errors
    /// As [`Communicator::start_all_gather`] and [`Pending::wait`].
    pub fn all_gather(&self, buffer: Box<dyn Buffer>) -> Result<Box<dyn Buffer>> {
        self.start_all_gather(buffer)?.wait()
    }

    /// [`Group::all_gather`] of a `Vec`.
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn all_gather_vec<T: Element>(&self, data: Vec<T>) -> Result<Vec<T>> {
        into_vec(self.all_gather(Box::new(data))?)
    }

    /// [`Communicator::start_all_gather_in_place`] of a `Vec`, and the wait for it.
    ///
    /// # Errors
    /// As [`Communicator::start_all_gather_in_place`] and [`Pending::wait`].
    pub fn all_gather_in_place_vec<T: Element>(&self, data: Vec<T>) -> Result<Vec<T>> {
        into_vec(self.start_all_gather_in_place(Box::new(data))?.wait()?)
    }

    /// Joins one `[L]` of each member, in rank order, to `[N * L]` on member `root`; the others get
    /// an empty `Vec`.
    ///
    /// # Errors
    /// As [`Communicator::start_gather`] and [`Pending::wait`].
    pub fn gather_vec<T: Element>(&self, data: Vec<T>, root: usize) -> Result<Vec<T>> {
        into_vec(self.start_gather(Box::new(data), root)?.wait()?)
    }

    /// [`Communicator::start_gather_in_place`] of a `Vec`, and the wait for it.
    ///
    /// # Errors
    /// As [`Communicator::start_gather_in_place`] and [`Pending::wait`].
    pub fn gather_in_place_vec<T: Element>(&self, data: Vec<T>, root: usize) -> Result<Vec<T>> {
        into_vec(self.start_gather_in_place(Box::new(data), root)?.wait()?)
    }

    /// Copies the `[L]` of member `root` to every member.
    ///
    /// # Errors
    /// As [`Communicator::start_broadcast`] and [`Pending::wait`].
    pub fn broadcast(&self, buffer: Box<dyn Buffer>, root: usize) -> Result<Box<dyn Buffer>> {
        self.start_broadcast(buffer, root)?.wait()
    }

    /// [`Group::broadcast`] of a `Vec`, which must be of one length on all members.
    ///
    /// # Errors
    /// As [`Group::broadcast`].
    pub fn broadcast_vec<T: Element>(&self, data: Vec<T>, root: usize) -> Result<Vec<T>> {
        into_vec(self.broadcast(Box::new(data), root)?)
    }

    /// Sends the `p`-th `[L]` of `[N * L]` to member `p`, and gets `[N * L]` with one `[L]` from
    /// each.
    ///
    /// # Errors
    /// As [`Communicator::start_all_to_all`] and [`Pending::wait`].
    pub fn all_to_all(&self, buffer: Box<dyn Buffer>) -> Result<Box<dyn Buffer>> {
        self.start_all_to_all(buffer)?.wait()
    }

    /// [`Group::all_to_all`] of a `Vec`.
    ///
    /// # Errors
    /// As [`Group::all_to_all`].
    pub fn all_to_all_vec<T: Element>(&self, data: Vec<T>) -> Result<Vec<T>> {
        into_vec(self.all_to_all(Box::new(data))?)
    }

    /// Sends the `p`-th part of the data, which has `lengths[p]` elements, to member `p`, and gets
    /// one part from each, by member. The receivers need not know the lengths.
    ///
    /// # Communication
    /// An all-gather of the lengths, then an exchange of the parts.
    ///
    /// # Errors
    /// As [`Communicator::start_all_to_all_parts`] and [`Pending::wait`].
    pub fn all_to_all_parts_vec<T: Element>(
        &self,
        data: Vec<T>,
        lengths: &[usize],
    ) -> Result<Vec<Vec<T>>> {
        let n = self.world_size();
        self.check_parts("all_to_all", lengths, (0..lengths.len(), data.len()))?;
        let own = lengths.iter().map(|&length| signed(length)).collect();
        let all = self.all_gather_vec::<i64>(own)?;
        let all: Vec<_> = all.into_iter().map(|length| length as usize).collect();
        let parts: Vec<_> = all.iter().skip(self.rank()).step_by(n).copied().collect();
        let pending = self.start_all_to_all_parts(Box::new(data), all)?;
        let joined: Vec<T> = into_vec(pending.wait()?)?;
        Ok(split(&joined, &parts))
    }

    /// [`Communicator::start_all_gather_parts`] of a `Vec`, and the wait for it.
    ///
    /// # Errors
    /// As [`Communicator::start_all_gather_parts`] and [`Pending::wait`].
    pub fn all_gather_parts_vec<T: Element>(
        &self,
        data: Vec<T>,
        lengths: Vec<usize>,
    ) -> Result<Vec<T>> {
        into_vec(
            self.start_all_gather_parts(Box::new(data), lengths)?
                .wait()?,
        )
    }

    /// Gathers one byte string of any length from each member, in rank order, on every member.
    ///
    /// # Communication
    /// An all-gather of the lengths, then one of the strings.
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let lengths = self.all_gather_vec(vec![signed(bytes.len())])?;
        let lengths: Vec<_> = lengths.into_iter().map(|length| length as usize).collect();
        let joined = self.all_gather_parts_vec(bytes, lengths.clone())?;
        Ok(split(&joined, &lengths))
    }

    /// Gathers one byte string of any length from each member, in rank order, on member `root`
    /// alone; the others get none.
    ///
    /// # Communication
    /// A message from each member to `root`, under a tag of its own.
    ///
    /// # Errors
    /// As [`Group::send`] and [`Group::recv`].
    pub fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<Vec<u8>>> {
        self.check_rank(root)?;
        let packet = Packet {
            shape: vec![bytes.len()],
            data: Box::new(bytes),
        };
        self.send(root, GATHER_TAG, vec![packet])?;
        let senders = 0..if self.rank() == root {
            self.world_size()
        } else {
            0
        };
        let strings = senders.map(|from| {
            let packets = self.recv(from, GATHER_TAG)?.into_iter();
            let strings = packets.map(|packet| into_vec(packet.data));
            Ok(strings.collect::<Result<Vec<_>>>()?.concat())
        });
        strings.collect()
    }

    /// Copies the byte string of member `root`, whose length the others need not know, to every
    /// member.
    ///
    /// # Communication
    /// A broadcast of the length, then one of the string.
    ///
    /// # Errors
    /// As [`Group::broadcast`].
    pub fn broadcast_bytes(&self, mut bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        let length = self.broadcast_vec(vec![signed(bytes.len())], root)?[0];
        if self.rank() != root {
            bytes.resize(length as usize, 0);
        }
        self.broadcast_vec(bytes, root)
    }

    /// Waits until every member has come here.
    ///
    /// # Errors
    /// As [`Communicator::barrier`].
    pub fn barrier(&self) -> Result<()> {
        Communicator::barrier(self)
    }

    /// Sends a message to group rank `to`; never waits for the receiver.
    ///
    /// # Errors
    /// As [`Communicator::start_send`].
    pub fn send(&self, to: usize, tag: u64, message: Message) -> Result<()> {
        self.start_send(to, tag, message)?.wait()
    }

    /// Waits for the next message of `tag` from group rank `from`.
    ///
    /// # Errors
    /// As [`Communicator::start_recv`] and [`Pending::wait`].
    pub fn recv(&self, from: usize, tag: u64) -> Result<Message> {
        self.start_recv(from, tag)?.wait()
    }

    /// Poisons the group and the world it belongs to, with this rank as the culprit.
    pub fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        Err(Error::NoSuchRank {
            rank,
            group: describe_group(&self.name, self.members()),
            size: self.world_size(),
        })
    }

    /// Checks the root of a call, and that its buffer of `len` elements is cut as it says.
    fn check_call(&self, call: Call, len: usize, lengths: Option<&[usize]>) -> Result<()> {
        let (n, me) = (self.world_size(), self.rank());
        match (call, lengths) {
            (Call::Gather { root } | Call::Broadcast { root }, None) => self.check_rank(root),
            (
                Call::ReduceScatter(_)
                | Call::ReduceScatterInPlace(_)
                | Call::AllGatherInPlace
                | Call::AllToAll,
                None,
            ) => self.check_even(call.name(), len),
            (Call::GatherInPlace { root }, None) => {
                self.check_rank(root)?;
                self.check_even(call.name(), len)
            }
            (Call::AllReduce(_) | Call::AllGather | Call::Barrier, None) => Ok(()),
            (
                Call::ReduceScatter(_) | Call::ReduceScatterInPlace(_) | Call::AllGatherInPlace,
                Some(lengths),
            ) => self.check_parts(call.name(), lengths, (0..lengths.len(), len)),
            (Call::AllGather, Some(lengths)) => {
                self.check_parts(call.name(), lengths, (me..me + 1, len))
            }
            (Call::AllToAll, Some(lengths)) => self.check_exchange(lengths, len),
            (
                Call::AllReduce(_)
                | Call::Gather { .. }
                | Call::GatherInPlace { .. }
                | Call::Broadcast { .. }
                | Call::Barrier,
                Some(_),
            ) => Err(Error::BadParts {
                op: call.name(),
                members: n,
                reason: "it takes no lengths of parts".to_owned(),
            }),
        }
    }

    /// Checks the lengths of an exchange, by sender and then by receiver.
    fn check_exchange(&self, lengths: &[usize], len: usize) -> Result<()> {
        let n = self.world_size();
        let op = Call::AllToAll.name();
        let reason = if lengths.len() != n * n {
            format!("there are {} lengths, expected {}", lengths.len(), n * n)
        } else if checked_sum(lengths).is_none() {
            "the sum of their lengths is too large".to_owned()
        } else {
            let own = &lengths[self.rank() * n..(self.rank() + 1) * n];
            return self.check_parts(op, own, (0..n, len));
        };
        Err(Error::BadParts {
            op,
            members: n,
            reason,
        })
    }

    /// Checks that there is one length for each member, and that they add up to `len` over
    /// `members`.
    fn check_parts(
        &self,
        op: &'static str,
        lengths: &[usize],
        (members, len): (Range<usize>, usize),
    ) -> Result<()> {
        let reason = if lengths.len() != self.world_size() {
            format!("there are {} lengths", lengths.len())
        } else if checked_sum(lengths).is_none() {
            "the sum of their lengths is too large".to_owned()
        } else {
            let expected = checked_sum(&lengths[members]).unwrap_or_default();
            if expected == len {
                return Ok(());
            }
            format!("their lengths ask for a buffer of {expected} elements, found {len}")
        };
        Err(Error::BadParts {
            op,
            members: self.world_size(),
            reason,
        })
    }

    fn check_even(&self, op: &'static str, len: usize) -> Result<()> {
        if len.is_multiple_of(self.world_size()) {
            return Ok(());
        }
        Err(Error::UnevenLength {
            op,
            len,
            parts: self.world_size(),
        })
    }
}

/// Checks the arguments, and does not call the engine in a group of one.
impl Communicator for Group {
    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn members(&self) -> &[Rank] {
        self.communicator.members()
    }

    fn start(&self, call: Call, buffer: Box<dyn Buffer>, lengths: Option<Arc<[usize]>>) -> Started {
        self.check_call(call, buffer.len(), lengths.as_deref())?;
        if self.is_single() {
            return Ok(Pending::ready(buffer));
        }
        self.communicator.start(call, buffer, lengths)
    }

    fn start_send(&self, to: usize, tag: u64, message: Message) -> Result<Pending<()>> {
        self.check_rank(to)?;
        self.communicator.start_send(to, tag, message)
    }

    fn start_recv(&self, from: usize, tag: u64) -> Result<Pending<Message>> {
        self.check_rank(from)?;
        self.communicator.start_recv(from, tag)
    }

    fn turn(&self) -> Result<Turn> {
        self.communicator.turn()
    }

    fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.communicator.abort("panicked");
        }
    }
}

fn checked_sum(lengths: &[usize]) -> Option<usize> {
    let mut lengths = lengths.iter();
    lengths.try_fold(0, |sum: usize, &length| sum.checked_add(length))
}

/// The consecutive parts of these lengths.
fn split<T: Element>(mut joined: &[T], lengths: &[usize]) -> Vec<Vec<T>> {
    let parts = lengths.iter().map(|&length| {
        let (part, rest) = joined.split_at(length);
        joined = rest;
        part.to_vec()
    });
    parts.collect()
}

fn signed(length: usize) -> i64 {
    i64::try_from(length).expect("memory is shorter than i64::MAX bytes")
}
