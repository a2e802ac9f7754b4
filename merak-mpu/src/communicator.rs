//! What every engine offers to the members of a group.

use crate::{Buffer, Call, DType, Rank, ReduceOp, Result};
use std::{
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// One tensor of a point-to-point [`Message`]: its shape travels with it.
#[derive(Debug)]
pub struct Packet {
    /// Sizes of the dimensions, slowest first.
    pub shape: Vec<usize>,
    /// The elements in row-major order.
    pub data: Box<dyn Buffer>,
}

impl Packet {
    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }
}

/// All tensors of one hop, sent as one batch.
pub type Message = Vec<Packet>;

/// A started operation that owns its buffer until [`Pending::wait`] gives it back.
///
/// Dropping it does not cancel the operation: the peers still complete it, and its result is lost.
/// It can be waited for once:
///
/// ```compile_fail,E0382
/// let pending = merak_mpu::Pending::ready(1);
/// pending.wait()?;
/// pending.wait()?; // use of moved value
/// # Ok::<(), merak_mpu::Error>(())
/// ```
#[must_use = "a started operation must be waited for"]
pub struct Pending<T> {
    is_done: Box<dyn Fn() -> bool + Send>,
    finish: Box<dyn FnOnce() -> Result<T> + Send>,
}

impl<T> Pending<T> {
    /// Wraps the blocking half of an operation that is never known to be done before it is waited
    /// for.
    pub fn new(finish: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        Self::polled(|| false, finish)
    }

    /// Wraps the blocking half of an operation, and what tells whether it would still block.
    pub fn polled(
        is_done: impl Fn() -> bool + Send + 'static,
        finish: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Self {
        Self {
            is_done: Box::new(is_done),
            finish: Box::new(finish),
        }
    }

    /// An operation that is complete already.
    pub fn ready(value: T) -> Self
    where
        T: Send + 'static,
    {
        Self::polled(|| true, move || Ok(value))
    }

    /// Whether [`Pending::wait`] waits for no other rank any more: the peers have done their part,
    /// or the operation has failed.
    pub fn is_done(&self) -> bool {
        (self.is_done)()
    }

    /// Applies `f` to the result, on the thread that waits.
    pub fn map<U>(self, f: impl FnOnce(T) -> Result<U> + Send + 'static) -> Pending<U>
    where
        T: 'static,
    {
        let Self { is_done, finish } = self;
        Pending {
            is_done,
            finish: Box::new(move || f(finish()?)),
        }
    }

    /// The same operation, which takes at least until a moment; `waited` gets how long its end was
    /// waited for because of that.
    pub(crate) fn delayed_until(
        self,
        moment: Instant,
        waited: impl FnOnce(Duration) + Send + 'static,
    ) -> Self
    where
        T: 'static,
    {
        let Self { is_done, finish } = self;
        Self {
            is_done: Box::new(move || is_done() && Instant::now() >= moment),
            finish: Box::new(move || {
                let value = finish()?;
                let delay = moment.saturating_duration_since(Instant::now());
                thread::sleep(delay);
                waited(delay);
                Ok(value)
            }),
        }
    }

    /// Blocks until the operation is complete and returns its result.
    ///
    /// # Errors
    /// [`Error::Aborted`](crate::Error::Aborted) when the group was poisoned,
    /// [`Error::Timeout`](crate::Error::Timeout) when a peer did not come before the deadline.
    pub fn wait(self) -> Result<T> {
        (self.finish)()
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}

/// The pending result of a collective.
pub type Started = Result<Pending<Box<dyn Buffer>>>;

/// A rank's turn at computing, which ends when it is dropped; see [`Communicator::turn`].
#[must_use = "a turn ends when it is dropped"]
#[derive(Default)]
pub struct Turn {
    end: Option<Box<dyn FnOnce() + Send>>,
}

impl Turn {
    /// A turn that calls `end` when it is dropped; the default one calls nothing.
    pub fn new(end: impl FnOnce() + Send + 'static) -> Self {
        Self {
            end: Some(Box::new(end)),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end();
        }
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").finish_non_exhaustive()
    }
}

/// One rank's handle on a group of ranks, offered by every engine.
///
/// Every member must start the same collectives in the same order; they may be waited for in any
/// order. Group ranks count from 0 in ascending world rank. A reduction has one fixed order of
/// summation, so every member gets the same bits, however many threads run. `N` is the world size
/// of the group.
pub trait Communicator: Send + Sync + fmt::Debug {
    /// This member's rank within the group.
    fn rank(&self) -> usize;

    /// The members as world ranks, ascending.
    fn members(&self) -> &[Rank];

    /// The number of members.
    fn world_size(&self) -> usize {
        self.members().len()
    }

    /// Starts a collective, which [`Group`](crate::Group) has checked: each of the methods below is
    /// this one with a call of its own.
    ///
    /// `lengths` are those of the parts where the caller lists them, as in
    /// [`Communicator::start_all_gather_parts`]; without them all members bring buffers of one
    /// length, which are cut evenly.
    ///
    /// # Errors
    /// When the group is poisoned, or the members call different operations;
    /// [`Error::BadBuffer`](crate::Error::BadBuffer) where a buffer did not open as it should, as
    /// an engine may find out when the last member starts.
    fn start(&self, call: Call, buffer: Box<dyn Buffer>, lengths: Option<Arc<[usize]>>) -> Started;

    /// Reduces `[L]` element by element; every member gets the `[L]` result in its own buffer.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    fn start_all_reduce(&self, buffer: Box<dyn Buffer>, op: ReduceOp) -> Started {
        self.start(Call::AllReduce(op), buffer, None)
    }

    /// Reduces `[N * L]`; member `r` gets the `r`-th `[L]`.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when the length is no multiple of `N`.
    fn start_reduce_scatter(&self, buffer: Box<dyn Buffer>, op: ReduceOp) -> Started {
        self.start(Call::ReduceScatter(op), buffer, None)
    }

    /// Reduces `[L]`, which is cut into parts of `lengths`; member `r` gets the `r`-th part.
    ///
    /// A part may be empty. No part is padded to the length of another.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when there is not one length for each member, or they do
    /// not add up to `L`.
    fn start_reduce_scatter_parts(
        &self,
        buffer: Box<dyn Buffer>,
        lengths: Vec<usize>,
        op: ReduceOp,
    ) -> Started {
        self.start(Call::ReduceScatter(op), buffer, Some(lengths.into()))
    }

    /// Reduces `[N * L]` where it lies: the `r`-th `[L]` in the buffer of member `r` becomes the
    /// result. What the rest of the buffer holds afterwards is left open.
    ///
    /// # Errors
    /// As [`Communicator::start_reduce_scatter`].
    fn start_reduce_scatter_in_place(&self, buffer: Box<dyn Buffer>, op: ReduceOp) -> Started {
        self.start(Call::ReduceScatterInPlace(op), buffer, None)
    }

    /// [`Communicator::start_reduce_scatter_in_place`] of `[L]`, which is cut into parts of
    /// `lengths`; the `r`-th part in the buffer of member `r` becomes the result.
    ///
    /// # Errors
    /// As [`Communicator::start_reduce_scatter_parts`].
    fn start_reduce_scatter_parts_in_place(
        &self,
        buffer: Box<dyn Buffer>,
        lengths: Vec<usize>,
        op: ReduceOp,
    ) -> Started {
        self.start(Call::ReduceScatterInPlace(op), buffer, Some(lengths.into()))
    }

    /// Joins one `[L]` of each member, in rank order, to `[N * L]` on every member.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    fn start_all_gather(&self, buffer: Box<dyn Buffer>) -> Started {
        self.start(Call::AllGather, buffer, None)
    }

    /// Joins one part of each member, in rank order, on every member; that of member `r` has
    /// `lengths[r]` elements.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when there is not one length for each member, or this
    /// member's is not that of its buffer.
    fn start_all_gather_parts(&self, buffer: Box<dyn Buffer>, lengths: Vec<usize>) -> Started {
        self.start(Call::AllGather, buffer, Some(lengths.into()))
    }

    /// Copies the `r`-th `[L]` in the `[N * L]` of member `r` to its place in the buffers of all,
    /// each of which has all parts then.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when the length is no multiple of `N`.
    fn start_all_gather_in_place(&self, buffer: Box<dyn Buffer>) -> Started {
        self.start(Call::AllGatherInPlace, buffer, None)
    }

    /// [`Communicator::start_all_gather_in_place`] of `[L]`, in which the part of member `r` has
    /// `lengths[r]` elements.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when there is not one length for each member, or they do
    /// not add up to `L`.
    fn start_all_gather_parts_in_place(
        &self,
        buffer: Box<dyn Buffer>,
        lengths: Vec<usize>,
    ) -> Started {
        self.start(Call::AllGatherInPlace, buffer, Some(lengths.into()))
    }

    /// Joins one `[L]` of each member, in rank order, to `[N * L]` on member `root`; the others get
    /// an empty buffer.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when `root` is not a member.
    fn start_gather(&self, buffer: Box<dyn Buffer>, root: usize) -> Started {
        self.start(Call::Gather { root }, buffer, None)
    }

    /// Copies the `r`-th `[L]` in the `[N * L]` of member `r` to its place in the buffer of member
    /// `root`, which has all parts then. The buffers of the others stay as they are.
    ///
    /// # Errors
    /// As [`Communicator::start_all_gather_in_place`]; also when `root` is not a member.
    fn start_gather_in_place(&self, buffer: Box<dyn Buffer>, root: usize) -> Started {
        self.start(Call::GatherInPlace { root }, buffer, None)
    }

    /// Copies the `[L]` of member `root` to every member.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when `root` is not a member.
    fn start_broadcast(&self, buffer: Box<dyn Buffer>, root: usize) -> Started {
        self.start(Call::Broadcast { root }, buffer, None)
    }

    /// Sends the `p`-th `[L]` of `[N * L]` to member `p`, and gets `[N * L]` with one `[L]` from
    /// each.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when the length is no multiple of `N`.
    fn start_all_to_all(&self, buffer: Box<dyn Buffer>) -> Started {
        self.start(Call::AllToAll, buffer, None)
    }

    /// Cuts this member's buffer into one part for each member, sends them, and joins the parts
    /// that come, both in rank order. Member `p` sends `lengths[p * N + q]` elements to member `q`.
    ///
    /// # Errors
    /// As [`Communicator::start`]; also when there are not `N * N` lengths, or those of this member
    /// do not add up to its buffer's.
    fn start_all_to_all_parts(&self, buffer: Box<dyn Buffer>, lengths: Vec<usize>) -> Started {
        self.start(Call::AllToAll, buffer, Some(lengths.into()))
    }

    /// Waits until every member has come here.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    fn barrier(&self) -> Result<()> {
        let nothing: Box<dyn Buffer> = Box::new(Vec::<u8>::new());
        self.start(Call::Barrier, nothing, None)?.wait().map(drop)
    }

    /// Sends a message to member `to`; never waits for the receiver. Messages with one
    /// `(from, to, tag)` arrive in the order in which they were sent. The engine owns the message,
    /// and may read it after the send is done.
    ///
    /// # Errors
    /// When the group is poisoned or `to` is not a member.
    fn start_send(&self, to: usize, tag: u64, message: Message) -> Result<Pending<()>>;

    /// Posts the receipt of the next message of `(from, tag)`.
    ///
    /// # Errors
    /// When the group is poisoned or `from` is not a member.
    fn start_recv(&self, from: usize, tag: u64) -> Result<Pending<Message>>;

    /// Waits until this group may compute, where there are fewer cores than ranks; elsewhere
    /// returns at once.
    ///
    /// The n-th turn of a group is that of all its members: it comes when all have asked and a core
    /// is free, in the order in which the last members asked, and ends when every member has
    /// dropped it. Between asking and dropping, members may wait for each other but for no other
    /// rank, since others may need their cores. Each turn that a member takes, the others take too.
    ///
    /// # Errors
    /// When the group is poisoned, or no turn came before the deadline.
    fn turn(&self) -> Result<Turn> {
        Ok(Turn::default())
    }

    /// Poisons the group and the world it belongs to: each pending and later call of every member
    /// returns [`Error::Aborted`](crate::Error::Aborted) with this rank and `reason`.
    fn abort(&self, reason: &str);
}
