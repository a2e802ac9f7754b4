//! What makes progress: one thread of a process moves the bytes of all its operations.

use super::{
    frame::{self, GroupKey, Header, Kind},
    groups::Groups,
    link::{Body, Link, OpKey, Reading},
    moves::{EAGER_BYTES, Piece},
    op::{GroupState, Op, Slot, Spares},
};
use crate::{
    Buffer, Error, Message, Rank, Result,
    bell::lock,
    call::Fingerprint,
    control::{
        Control, State,
        poll::{self, Interest, Waker},
        wire::Malformed,
    },
};
use std::{
    collections::BTreeMap,
    io::{self, ErrorKind},
    mem,
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
pub(super) enum Command {
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
pub(super) struct Counter {
    commands: Mutex<Vec<Command>>,
    pub(super) waker: Waker,
    pub(super) stop: AtomicBool,
    /// After the end: nothing that this process has started or sent needs it any more.
    pub(super) is_drained: AtomicBool,
}

impl Counter {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            commands: Mutex::default(),
            waker: Waker::new()?,
            stop: AtomicBool::new(false),
            is_drained: AtomicBool::new(false),
        })
    }

    pub(super) fn ask(&self, command: Command) {
        lock(&self.commands).push(command);
        self.waker.wake();
    }
}

/// A call of a peer that this process has not made yet, with the data that came with it.
type Early = (Fingerprint, Vec<u8>);

/// All connections of a process and all its collectives.
pub(super) struct Mill {
    state: Arc<State>,
    control: Arc<Control>,
    groups: Arc<Groups>,
    counter: Arc<Counter>,
    /// By world rank; none for this process itself.
    links: Vec<Option<Link>>,
    ops: BTreeMap<OpKey, Op>,
    early: BTreeMap<(OpKey, usize), Early>,
    spares: Spares,
    /// There is a core for each rank of this host.
    spins: bool,
    has_ended: bool,
}

impl Mill {
    pub(super) fn new(
        state: Arc<State>,
        control: Arc<Control>,
        groups: Arc<Groups>,
        counter: Arc<Counter>,
        links: Vec<Option<Link>>,
        spins: bool,
    ) -> Self {
        Self {
            spins,
            state,
            control,
            groups,
            counter,
            links,
            ops: BTreeMap::new(),
            early: BTreeMap::new(),
            spares: Spares::default(),
            has_ended: false,
        }
    }

    pub(super) fn control(&self) -> &Arc<Control> {
        &self.control
    }

    pub(super) fn rank(&self) -> Rank {
        self.state.rank
    }

    pub(super) fn run(mut self) {
        while !self.counter.stop.load(Ordering::Acquire) {
            self.turn(SLEEP);
        }
    }

    /// Does what can be done, after a sleep until there is something, of at most `sleep`.
    fn turn(&mut self, sleep: Duration) {
        let readable = self.poll(sleep);
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
        for (rank, readable) in readable.into_iter().enumerate() {
            let has_bytes = |link: &mut Link| link.wire.has_bytes() || !link.buffered().is_empty();
            if readable || self.links[rank].as_mut().is_some_and(has_bytes) {
                self.read(rank);
            }
        }
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
                let interest = Interest {
                    read: true,
                    write: unsent && link.wire.is_socket(),
                };
                sockets.push((link.wire.as_fd(), interest));
                ranks.push(rank);
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
                let spares = &mut self.spares;
                let op = Op::new(group, sequence, fingerprint, buffer, waiting, spares);
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
            let error = mismatch(op, member, &fingerprint);
            let slot = Arc::clone(&op.slot);
            return self.fail_op(&slot, error);
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

    fn push_piece(
        &mut self,
        key: OpKey,
        group: &Arc<GroupState>,
        member: usize,
        kind: Kind,
        start: usize,
        piece: Piece,
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
        let body = Body::Piece {
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

    /// Folds what has come, sends the sums, and ends what is complete.
    fn advance(&mut self, key: OpKey) {
        let Some(op) = self.ops.get_mut(&key) else {
            return;
        };
        let folded = op.fold();
        let (group, slot) = (Arc::clone(&op.group), Arc::clone(&op.slot));
        let (fold, shares) = (op.moves.fold, !op.moves.sums.is_empty());
        let folded = match folded {
            Ok(folded) => folded,
            Err(error) => return self.fail_op(&slot, error),
        };
        if let Some(fold) = fold.filter(|_| shares && !folded.is_empty()) {
            let piece = Piece {
                start: fold.target.start + folded.start,
                len: folded.len(),
                ..fold.target
            };
            for (member, _) in others(&group) {
                self.push_piece(key, &group, member, Kind::Second, folded.start, piece);
            }
        }
        if self.ops.get(&key).is_some_and(Op::is_complete)
            && let Some(op) = self.ops.remove(&key)
        {
            op.finish(&mut self.spares);
            self.state.bell.ring();
        }
    }

    /// An operation of this process fails, and the world with it.
    fn fail_op(&self, slot: &Slot, error: Error) {
        let culprit = match &error {
            Error::Mismatch { second, .. } => Rank(*second),
            _ => self.state.rank,
        };
        let reason = error.to_string();
        slot.finish(Err(error));
        self.control.fail_soon(culprit, &reason);
    }

    /// Queues a message; a long one sends its elements from where they lie.
    fn send(&mut self, group: &GroupState, to: usize, tag: u64, message: Message) {
        let shapes = frame::encode_shapes(&message);
        let bytes = |data: &dyn Buffer| data.len() * data.dtype().size_bytes();
        let whole: usize = message.iter().map(|packet| bytes(&*packet.data)).sum();
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
                len: bytes(&*packet.data),
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
        match link.write(&self.ops) {
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

    fn read(&mut self, rank: usize) {
        // So that a peer that never stops sending does not keep the others out.
        for _ in 0..64 {
            let Some(link) = self.links[rank].as_ref().filter(|link| link.is_open) else {
                return;
            };
            let outcome = match link.reading {
                Reading::Frame => self.read_frames(rank),
                Reading::Data { .. } => self.read_data(rank),
                Reading::Packets { .. } => self.read_packets(rank),
            };
            match outcome {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return self.lose(rank, "it was closed");
                }
                Err(error) => return self.lose(rank, &error.to_string()),
            }
        }
        // More may be there, and no poll would say so of bytes that are buffered.
        self.counter.waker.wake();
    }

    /// Handles the frames that are buffered, and reads more. False where nothing more is there.
    fn read_frames(&mut self, rank: usize) -> io::Result<bool> {
        loop {
            let Some(link) = self.links[rank].as_mut() else {
                return Ok(false);
            };
            if !link.is_open {
                return Ok(false);
            }
            if !matches!(link.reading, Reading::Frame) {
                return Ok(true);
            }
            let Some((header, payload)) = link.next_frame().map_err(io::Error::other)? else {
                break;
            };
            self.receive(rank, header, &payload)
                .map_err(io::Error::other)?;
        }
        let Some(link) = self.links[rank].as_mut() else {
            return Ok(false);
        };
        match link.fill()? {
            None => Err(ErrorKind::UnexpectedEof.into()),
            Some(read) => Ok(read > 0),
        }
    }

    fn receive(&mut self, rank: usize, header: Header, payload: &[u8]) -> Result<(), Malformed> {
        match header.kind {
            Kind::Group => {
                let key = frame::decode_group(payload)?;
                let group = self.join(rank, &key)?;
                self.link(rank)?.groups.insert(header.group, group);
            }
            Kind::Call => {
                let (call, data) = payload.split_at(header.start);
                let fingerprint = frame::decode_call(call)?;
                let (group, member) = self.place(rank, header)?;
                let key = (group.number, header.number);
                let early = (fingerprint, data.to_vec());
                match self.ops.get(&key) {
                    Some(op) if op.has_called(member) => return Err(Malformed),
                    Some(_) => {
                        self.meet(key, member, early);
                        self.advance(key);
                    }
                    None => {
                        self.early.insert((key, member), early);
                    }
                }
            }
            Kind::First | Kind::Second => {
                let (group, member) = self.place(rank, header)?;
                let op = (group.number, header.number);
                let second = header.kind == Kind::Second;
                let place = self
                    .ops
                    .get(&op)
                    .and_then(|found| found.place(member, second, header.start, header.len));
                let Some(Piece { area, start, len }) = place else {
                    // A poisoned world has forgotten its collectives.
                    return if self.state.verdict().is_some() {
                        Ok(())
                    } else {
                        Err(Malformed)
                    };
                };
                self.link(rank)?.reading = Reading::Data {
                    op,
                    member,
                    second,
                    area,
                    start,
                    left: len,
                };
            }
            Kind::Message => self.receive_message(rank, header, payload)?,
            // It follows its message alone.
            Kind::Packet => return Err(Malformed),
            Kind::End => {
                let link = self.link(rank)?;
                link.has_ended = true;
                link.push(Header::of(Kind::Ack), &[], Body::None);
                self.state.note_end(Rank(rank));
            }
            Kind::Ack => self.link(rank)?.has_acked = true,
        }
        Ok(())
    }

    fn link(&mut self, rank: usize) -> Result<&mut Link, Malformed> {
        self.links[rank].as_mut().ok_or(Malformed)
    }

    /// The group that a peer speaks of, with this process's state of it.
    fn join(&self, rank: usize, key: &GroupKey) -> Result<Arc<GroupState>, Malformed> {
        let members = &key.1;
        let is_group = members.is_sorted_by(|a, b| a < b)
            && members.last().is_some_and(|last| last.0 < self.links.len())
            && members.contains(&Rank(rank));
        if !is_group {
            return Err(Malformed);
        }
        self.groups.join(key, self.state.rank).ok_or(Malformed)
    }

    /// The group of a frame and its sender's rank there.
    fn place(
        &mut self,
        rank: usize,
        header: Header,
    ) -> Result<(Arc<GroupState>, usize), Malformed> {
        let group = self
            .link(rank)?
            .groups
            .get(&header.group)
            .ok_or(Malformed)?;
        let member = group.rank_of(Rank(rank)).ok_or(Malformed)?;
        Ok((Arc::clone(group), member))
    }

    fn receive_message(
        &mut self,
        rank: usize,
        header: Header,
        payload: &[u8],
    ) -> Result<(), Malformed> {
        let (group, member) = self.place(rank, header)?;
        let (shapes, mut data) = payload.split_at(header.start);
        let mut message = frame::decode_shapes(shapes)?;
        let bytes = |data: &dyn Buffer| data.len() * data.dtype().size_bytes();
        let whole: usize = message.iter().map(|packet| bytes(&*packet.data)).sum();
        if whole > EAGER_BYTES {
            self.link(rank)?.reading = Reading::Packets {
                group,
                member,
                tag: header.number,
                message,
                packet: 0,
                got: 0,
                begun: false,
            };
            return Ok(());
        }
        if data.len() != whole {
            return Err(Malformed);
        }
        for packet in &mut message {
            let (own, rest) = data.split_at(bytes(&*packet.data));
            packet.data.write(&mut |bytes| bytes.copy_from_slice(own));
            data = rest;
        }
        self.deliver(&group, member, header.number, message);
        Ok(())
    }

    fn deliver(&self, group: &GroupState, member: usize, tag: u64, message: Message) {
        group.mailbox.put(member, tag, message);
        self.state.bell.ring();
    }

    /// Reads bytes into a collective's memory. False where none are there.
    fn read_data(&mut self, rank: usize) -> io::Result<bool> {
        let Some(link) = self.links[rank].as_mut() else {
            return Ok(false);
        };
        let Reading::Data {
            op: key,
            member,
            second,
            area,
            start,
            left,
        } = link.reading
        else {
            return Ok(false);
        };
        let Some(op) = self.ops.get_mut(&key) else {
            return Err(io::Error::other(Malformed));
        };
        let got = match link.buffered().len().min(left) {
            0 if left == 0 => 0,
            0 => {
                let mut got = Ok(Some(0));
                op.write(area, start..start + left, &mut |bytes| {
                    got = link.wire.read(bytes);
                })
                .map_err(io::Error::other)?;
                match got? {
                    Some(0) => return Ok(false),
                    Some(got) => got,
                    None => return Err(ErrorKind::UnexpectedEof.into()),
                }
            }
            got => {
                let source = &link.buffered()[..got];
                op.write(area, start..start + got, &mut |bytes| {
                    bytes.copy_from_slice(source);
                })
                .map_err(io::Error::other)?;
                link.use_up(got);
                got
            }
        };
        link.reading = if got == left {
            Reading::Frame
        } else {
            Reading::Data {
                op: key,
                member,
                second,
                area,
                start: start + got,
                left: left - got,
            }
        };
        op.note_bytes(member, second, got);
        self.advance(key);
        Ok(true)
    }

    /// Reads the elements of a message. False where none are there.
    fn read_packets(&mut self, rank: usize) -> io::Result<bool> {
        let Some(link) = self.links[rank].as_mut() else {
            return Ok(false);
        };
        let mut reading = mem::replace(&mut link.reading, Reading::Frame);
        let more = read_packets(link, &mut reading)?;
        match reading {
            Reading::Packets {
                group,
                member,
                tag,
                message,
                packet,
                ..
            } if packet == message.len() => self.deliver(&group, member, tag, message),
            reading => link.reading = reading,
        }
        Ok(more)
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
    /// peers have read all that was sent.
    fn look_whether_drained(&self) {
        let is_hopeless = |op: &Op| {
            let absent = op.slot.absent();
            let mut absent = absent.into_iter().map(|member| op.group.members()[member]);
            absent.any(|rank| self.state.has_ended(rank))
        };
        let mut links = self.links.iter().flatten().filter(|link| link.is_open);
        if self.ops.values().all(is_hopeless)
            && links.all(|link| link.has_acked && !link.has_unsent())
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
    let Some(Piece { area, start, len }) = place else {
        return Err(Error::Aborted {
            by: op.group.members()[member].0,
            reason: "it sent more data than its call has".into(),
        });
    };
    op.write(area, start..start + len, &mut |bytes| {
        bytes.copy_from_slice(data);
    })?;
    op.note_bytes(member, second, len);
    Ok(())
}

/// The error of two members that call different operations, the lower rank first.
fn mismatch(op: &Op, member: usize, other: &Fingerprint) -> Error {
    let members = op.group.members();
    let mut sides = [
        (members[op.group.me].0, op.fingerprint.to_string()),
        (members[member].0, other.to_string()),
    ];
    sides.sort();
    let [(first, first_call), (second, second_call)] = sides;
    Error::Mismatch {
        group: op.group.describe(),
        sequence: op.sequence,
        first,
        first_call,
        second,
        second_call,
    }
}

/// Reads elements of the packets of a message, until all have come or none are there. Returns
/// whether more may be there.
fn read_packets(link: &mut Link, reading: &mut Reading) -> io::Result<bool> {
    let Reading::Packets {
        message,
        packet,
        got,
        begun,
        ..
    } = reading
    else {
        return Ok(false);
    };
    while let Some(current) = message.get_mut(*packet) {
        let len = current.data.len() * current.data.dtype().size_bytes();
        if !*begun {
            let Some((header, _)) = link.next_frame().map_err(io::Error::other)? else {
                return match link.fill()? {
                    None => Err(ErrorKind::UnexpectedEof.into()),
                    Some(read) => Ok(read > 0),
                };
            };
            if header.kind != Kind::Packet || header.len != len {
                return Err(io::Error::other(Malformed));
            }
            *begun = true;
        }
        if *got < len {
            let buffered = link.buffered().len().min(len - *got);
            let mut came = Ok(Some(buffered));
            current.data.write(&mut |bytes| {
                let bytes = &mut bytes[*got..];
                if buffered > 0 {
                    bytes[..buffered].copy_from_slice(&link.buffered()[..buffered]);
                } else {
                    came = link.wire.read(bytes);
                }
            });
            link.use_up(buffered);
            match came? {
                None => return Err(ErrorKind::UnexpectedEof.into()),
                Some(0) => return Ok(false),
                Some(came) => *got += came,
            }
        }
        if *got == len {
            (*packet, *got, *begun) = (*packet + 1, 0, false);
        }
    }
    Ok(true)
}
