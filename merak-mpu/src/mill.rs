//! The progress engine of ranks that are processes: one thread of a process moves the bytes of all
//! its operations.
//!
//! ```text
//! Handle ──> Command ──> Mill ──> Link ──> dyn Wire      socket or shared memory (tcp), MPI (mpi)
//!                         │                    │
//!                         └───── dyn Port ─────┘         moves the bytes of wires that do not
//! ```
//!
//! An engine brings a wire to each other process: a stream of bytes in both directions. All the
//! rest is here and alike for every engine: how calls are compared before data move, what goes
//! where, the fold in ascending rank, messages, and who is told when a wire breaks.

mod communicator;
mod frame;
mod groups;
mod link;
mod moves;
mod op;
mod packets;
mod receive;
mod session;
mod wire;

pub(crate) use link::Link;
#[cfg(feature = "mpi")]
pub(crate) use session::Outcome;
pub(crate) use session::{Grind, ProcessRank, Session, Start, Woven};
pub(crate) use wire::{NoPort, Port, Unreachable, Wire};

use crate::{
    Buffer, Error, Message, Rank, Result,
    bell::lock,
    call::{Fingerprint, grace},
    control::{
        Control, State,
        poll::{self, Interest, Waker},
    },
};
use frame::{Header, Kind};
use groups::Groups;
use link::{Body, OpKey};
use moves::{EAGER_BYTES, Extent};
use op::{GroupState, Op, Slot, Spares};
use packets::Packets;
use std::{
    collections::BTreeMap,
    io, mem,
    os::fd::AsFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Longest sleep of the thread: it looks whether it should stop.
const SLEEP: Duration = Duration::from_millis(500);

/// How long the thread looks for bytes in shared memory before it sleeps.
const SPIN: Duration = Duration::from_micros(20);

/// What a thread of this process asks for.
enum Command {
    Start {
        group: Arc<GroupState>,
        sequence: u64,
        fingerprint: Fingerprint,
        buffer: Box<dyn Buffer>,
        slot: Arc<Slot>,
    },
    Send {
        group: Arc<GroupState>,
        to: usize,
        tag: u64,
        message: Message,
    },
    /// This process starts nothing more.
    End,
}

/// Commands on their way, and what the mill says of its work.
struct Counter {
    commands: Mutex<Vec<Command>>,
    waker: Waker,
    stop: AtomicBool,
    /// After the end: nothing that this process has started or sent needs it any more.
    is_drained: AtomicBool,
}

impl Counter {
    fn new() -> io::Result<Self> {
        Ok(Self {
            commands: Mutex::default(),
            waker: Waker::new()?,
            stop: AtomicBool::new(false),
            is_drained: AtomicBool::new(false),
        })
    }

    fn ask(&self, command: Command) {
        lock(&self.commands).push(command);
        self.waker.wake();
    }
}

/// A call of a peer that this process has not made yet, with the data that came with it.
type Early = (Fingerprint, Vec<u8>);

/// All connections of a process and all its collectives.
struct Mill {
    state: Arc<State>,
    control: Arc<Control>,
    groups: Arc<Groups>,
    counter: Arc<Counter>,
    /// By world rank; none for this process itself.
    links: Vec<Option<Link>>,
    ops: BTreeMap<OpKey, Op>,
    early: BTreeMap<(OpKey, usize), Early>,
    /// Operations of which members have made different calls, and how long the others are waited
    /// for.
    disputes: Vec<(OpKey, Instant)>,
    spares: Spares,
    packets: Packets,
    spins: bool,
    ends_together: bool,
    has_ended: bool,
}

impl Mill {
    fn new(
        state: &Arc<State>,
        control: &Arc<Control>,
        groups: &Arc<Groups>,
        counter: &Arc<Counter>,
        woven: Woven,
    ) -> Self {
        Self {
            state: Arc::clone(state),
            control: Arc::clone(control),
            groups: Arc::clone(groups),
            counter: Arc::clone(counter),
            links: woven.links,
            spins: woven.spins,
            ends_together: woven.ends_together,
            ops: BTreeMap::new(),
            early: BTreeMap::new(),
            disputes: Vec::new(),
            spares: Spares::default(),
            packets: Packets::default(),
            has_ended: false,
        }
    }

    fn run(mut self, port: &mut dyn Port) {
        while !self.counter.stop.load(Ordering::Acquire) {
            self.turn(port);
        }
    }

    /// Does what can be done, after a sleep until there is something.
    fn turn(&mut self, port: &mut dyn Port) {
        let longest = port.longest_sleep().unwrap_or(SLEEP);
        let due = self.disputes.iter().map(|(_, due)| *due).min();
        let due = due.map(|due| due.saturating_duration_since(Instant::now()));
        let readable = self.poll(due.unwrap_or(longest).min(longest));
        self.counter.waker.rest();
        if self.state.verdict().is_some() {
            self.forget_all();
        }
        let commands = mem::take(&mut *lock(&self.counter.commands));
        for command in commands {
            self.handle(command);
        }
        for rank in 0..self.links.len() {
            self.write(rank);
        }
        if self.state.verdict().is_none()
            && let Err(Unreachable { rank, error }) = port.turn()
        {
            let reason = error.to_string();
            if self.links[rank.0].is_some() {
                self.lose(rank.0, &reason);
            } else {
                // All of it has failed here.
                self.control.fail_soon(rank, &reason);
            }
        }
        for (rank, readable) in readable.into_iter().enumerate() {
            let has_bytes = |link: &mut Link| link.wire.has_bytes() || !link.buffered().is_empty();
            if readable || self.links[rank].as_mut().is_some_and(has_bytes) {
                self.read(rank);
            }
        }
        self.settle_disputes();
        for rank in 0..self.links.len() {
            self.write(rank);
        }
        if self.has_ended {
            self.look_whether_drained();
        }
    }

    /// Looks for some time whether shared memory moves on, before a sleep that costs more.
    fn spin(&self) {
        let start = Instant::now();
        while start.elapsed() < SPIN {
            let mut links = self.links.iter().flatten().filter(|link| link.is_open);
            if links.any(|link| link.wire.can_move(link.has_unsent()))
                || self
                    .counter
                    .commands
                    .try_lock()
                    .is_ok_and(|asked| !asked.is_empty())
            {
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// Returns by rank whether bytes have come.
    fn poll(&self, mut sleep: Duration) -> Vec<bool> {
        let waker = Interest {
            read: true,
            write: false,
        };
        if self.spins {
            self.spin();
        }
        let mut sockets = vec![(self.counter.waker.as_fd(), waker)];
        let mut ranks = Vec::new();
        for (rank, link) in self.links.iter().enumerate() {
            if let Some(link) = link.as_ref().filter(|link| link.is_open) {
                let unsent = link.has_unsent();
                if link.wire.begin_sleep(unsent) {
                    sleep = Duration::ZERO;
                }
                if let Some((socket, tells_of_room)) = link.wire.socket() {
                    let interest = Interest {
                        read: true,
                        write: unsent && tells_of_room,
                    };
                    sockets.push((socket, interest));
                    ranks.push(rank);
                }
            }
        }
        let mut readable = vec![false; self.links.len()];
        match poll::wait(&sockets, sleep) {
            Ok(found) => {
                for (rank, found) in ranks.into_iter().zip(&found[1..]) {
                    readable[rank] = found.read;
                }
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        readable
    }

    /// A poisoned world moves nothing more.
    fn forget_all(&mut self) {
        self.ops.clear();
        self.early.clear();
        self.disputes.clear();
        for link in self.links.iter_mut().flatten() {
            link.drop_queue();
            link.is_open = false;
        }
    }

    fn handle(&mut self, command: Command) {
        if self.state.verdict().is_some() {
            return;
        }
        match command {
            Command::Start {
                group,
                sequence,
                fingerprint,
                buffer,
                slot,
            } => {
                let waiting = Arc::clone(&slot);
                let (spares, packets) = (&mut self.spares, &mut self.packets);
                let op = Op::new(
                    group,
                    sequence,
                    fingerprint,
                    buffer,
                    waiting,
                    spares,
                    packets,
                );
                match op {
                    Ok(op) => self.start(op),
                    Err(error) => self.fail_op(&slot, error),
                }
            }
            Command::Send {
                group,
                to,
                tag,
                message,
            } => self.send(&group, to, tag, message),
            Command::End => {
                self.has_ended = true;
                for link in self.links.iter_mut().flatten() {
                    link.push(Header::of(Kind::End), &[], Body::None);
                }
            }
        }
    }

    /// Calls the other members, with the data where they are few.
    fn start(&mut self, op: Op) {
        let group = Arc::clone(&op.group);
        let key = (group.number, op.sequence);
        let call = frame::encode_call(&op.fingerprint);
        let slot = Arc::clone(&op.slot);
        for (member, rank) in others(&group) {
            let mut payload = call.clone();
            let piece = op.moves.sends[member];
            if piece.len <= EAGER_BYTES && piece.len > 0 {
                let range = piece.start..piece.start + piece.len;
                if let Err(error) = op.read(piece.area, range, &mut |bytes| payload.extend(bytes)) {
                    return self.fail_op(&slot, error);
                }
            }
            let header = Header {
                group: group.number,
                number: op.sequence,
                start: call.len(),
                len: payload.len(),
                kind: Kind::Call,
            };
            if let Some(link) = self.link_of(&group, rank) {
                link.push(header, &payload, Body::None);
            }
        }
        self.ops.insert(key, op);
        for (member, _) in others(&group) {
            if let Some(early) = self.early.remove(&(key, member)) {
                self.meet(key, member, early);
            }
        }
        slot.begin();
        let is_deserted = |member: usize| self.state.has_ended(group.members()[member]);
        if slot.absent().into_iter().any(is_deserted) {
            self.state.bell.ring();
        }
        self.advance(key);
    }

    /// The link to a member, which knows the group.
    fn link_of(&mut self, group: &GroupState, rank: Rank) -> Option<&mut Link> {
        let link = self.links[rank.0].as_mut()?;
        if link.told.insert(group.number) {
            let payload = frame::encode_group(&group.key);
            let header = Header {
                group: group.number,
                len: payload.len(),
                ..Header::of(Kind::Group)
            };
            link.push(header, &payload, Body::None);
        }
        Some(link)
    }

    /// Compares a member's call with this process's, takes its data, and sends it what is too much
    /// to travel with a call.
    fn meet(&mut self, key: OpKey, member: usize, (fingerprint, data): Early) {
        let Some(op) = self.ops.get_mut(&key) else {
            return;
        };
        if op.fingerprint != fingerprint {
            op.note_other_call(member, fingerprint);
            return self
                .disputes
                .push((key, Instant::now() + grace(self.state.timeout)));
        }
        op.note_call(member);
        if !data.is_empty() {
            let taken = put(op, member, false, 0, &data);
            if let Err(error) = taken {
                let slot = Arc::clone(&op.slot);
                return self.fail_op(&slot, error);
            }
        }
        let piece = op.moves.sends[member];
        if piece.len > EAGER_BYTES {
            let group = Arc::clone(&op.group);
            self.push_piece(key, &group, member, Kind::First, 0, piece);
        }
    }

    /// Ends the operations of which members have made different calls, once all have called or have
    /// had time to.
    fn settle_disputes(&mut self) {
        let now = Instant::now();
        for (key, due) in mem::take(&mut self.disputes) {
            let Some(op) = self.ops.get(&key) else {
                continue;
            };
            if now < due && !op.have_all_called() {
                self.disputes.push((key, due));
            } else if let Err(error) = op.compare_calls() {
                let slot = Arc::clone(&op.slot);
                self.fail_op(&slot, error);
            }
        }
    }

    fn push_piece(
        &mut self,
        key: OpKey,
        group: &Arc<GroupState>,
        member: usize,
        kind: Kind,
        start: usize,
        piece: Extent,
    ) {
        let rank = group.members()[member];
        let Some(link) = self.link_of(group, rank).filter(|link| link.is_open) else {
            return;
        };
        let header = Header {
            kind,
            group: key.0,
            number: key.1,
            start,
            len: piece.len,
        };
        let body = Body::Extent {
            op: key,
            area: piece.area,
            start: piece.start,
            len: piece.len,
        };
        link.push(header, &[], body);
        if let Some(op) = self.ops.get_mut(&key) {
            op.unsent += 1;
        }
    }

    /// Folds what has come, sends what is there for all, and ends what is complete.
    fn advance(&mut self, key: OpKey) {
        let Some(op) = self.ops.get_mut(&key) else {
            return;
        };
        if let Err(error) = op.fold() {
            let slot = Arc::clone(&op.slot);
            return self.fail_op(&slot, error);
        }
        let group = Arc::clone(&op.group);
        for (member, _) in others(&group) {
            let op = self.ops.get_mut(&key);
            if let Some((start, piece)) = op.and_then(|op| op.share_with(member)) {
                self.push_piece(key, &group, member, Kind::Second, start, piece);
            }
        }
        if self.ops.get(&key).is_some_and(Op::is_complete)
            && let Some(op) = self.ops.remove(&key)
        {
            op.finish(&mut self.spares, &mut self.packets);
            self.state.bell.ring();
        }
    }

    /// An operation of this process fails, and the world with it.
    fn fail_op(&self, slot: &Slot, error: Error) {
        let culprit = error.culprit().unwrap_or(self.state.rank);
        slot.leave(error.clone());
        let reason = match &error {
            Error::Aborted { reason, .. } => reason.clone(),
            error => error.to_string(),
        };
        self.control.fail_soon(culprit, &reason);
        slot.finish(Err(error));
    }

    /// Queues a message; a long one sends its elements from where they lie.
    fn send(&mut self, group: &GroupState, to: usize, tag: u64, message: Message) {
        let shapes = frame::encode_shapes(&message);
        let whole: usize = message.iter().map(|packet| packet.data.size_bytes()).sum();
        let mut payload = shapes.clone();
        let inline = whole <= EAGER_BYTES;
        for packet in message.iter().filter(|_| inline) {
            packet.data.read(&mut |bytes| payload.extend(bytes));
        }
        let rank = group.members()[to];
        let number = group.number;
        let Some(link) = self.link_of(group, rank) else {
            return;
        };
        let header = Header {
            kind: Kind::Message,
            group: number,
            number: tag,
            start: shapes.len(),
            len: payload.len(),
        };
        link.push(header, &payload, Body::None);
        for packet in message.into_iter().filter(|_| !inline) {
            let header = Header {
                len: packet.data.size_bytes(),
                ..Header::of(Kind::Packet)
            };
            link.push(header, &[], Body::Packet(packet.data));
        }
    }

    fn write(&mut self, rank: usize) {
        let Some(link) = self.links[rank].as_mut() else {
            return;
        };
        if !link.is_open || !link.has_unsent() {
            return;
        }
        let written = link.write(&self.ops);
        for data in link.sent.drain(..) {
            self.packets.keep(data);
        }
        match written {
            Ok(left) => self.note_left(left),
            Err(error) => self.lose(rank, &error.to_string()),
        }
    }

    fn note_left(&mut self, keys: Vec<OpKey>) {
        for key in keys {
            if let Some(op) = self.ops.get_mut(&key) {
                op.unsent -= 1;
            }
            self.advance(key);
        }
    }

    /// The connection to a rank is gone, which is no failure once the rank has ended.
    fn lose(&mut self, rank: usize, reason: &str) {
        let Some(link) = self.links[rank].as_mut() else {
            return;
        };
        link.is_open = false;
        let dropped = link.drop_queue();
        let has_ended = link.has_ended;
        self.note_left(dropped);
        if !has_ended && self.state.verdict().is_none() {
            let reason = format!("the connection to it broke: {reason}");
            self.control.suspect(Rank(rank), &reason);
        }
    }

    /// What this process has started is over, or a member that it needs will never come, and the
    /// peers have read all that was sent; where processes end together, they have ended too.
    fn look_whether_drained(&self) {
        let is_hopeless = |op: &Op| {
            let absent = op.slot.absent();
            let mut absent = absent.into_iter().map(|member| op.group.members()[member]);
            absent.any(|rank| self.state.has_ended(rank))
        };
        let mut links = self.links.iter().flatten().filter(|link| link.is_open);
        if self.ops.values().all(is_hopeless)
            && links.all(|link| {
                link.has_acked && !link.has_unsent() && (link.has_ended || !self.ends_together)
            })
            && !self.counter.is_drained.swap(true, Ordering::AcqRel)
        {
            self.state.bell.ring();
        }
    }
}

/// The members but this process, with their group and world ranks.
fn others(group: &GroupState) -> impl Iterator<Item = (usize, Rank)> + use<> {
    let me = group.me;
    let members = group.members().to_vec().into_iter().enumerate();
    members.filter(move |(member, _)| *member != me)
}

/// Writes bytes of a member to their place.
fn put(op: &mut Op, member: usize, second: bool, start: usize, data: &[u8]) -> Result<()> {
    let place = op.place(member, second, start, data.len());
    let Some(Extent { area, start, len }) = place else {
        let by = op.group.members()[member];
        return Err(Error::aborted(by, "it sent more data than its call has"));
    };
    op.write(area, start..start + len, &mut |bytes| {
        bytes.copy_from_slice(data);
    })?;
    op.note_bytes(member, second, len);
    Ok(())
}
