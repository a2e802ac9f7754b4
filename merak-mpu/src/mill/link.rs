//! The connection to one other process: frames that wait to be sent, and what is being received.

use super::{
    frame::{HEADER_BYTES, Header, Kind},
    moves::Area,
    op::{GroupState, Op},
    wire::Wire,
};
use crate::{Buffer, Message, control::wire::Malformed};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::{self, ErrorKind},
    sync::Arc,
};

/// Bytes that are read at once where they are not data for a buffer.
const READ_BYTES: usize = 64 << 10;

/// Bytes that a link moves before another one has its turn.
const TURN_BYTES: usize = 4 << 20;

/// A collective by the number of its group and its place there.
pub(super) type OpKey = (u32, u64);

/// What follows the head of a frame that waits to be sent.
#[derive(Debug)]
pub(super) enum Body {
    None,
    /// Bytes of a collective's memory.
    Extent {
        op: OpKey,
        area: Area,
        start: usize,
        len: usize,
    },
    /// All elements of a packet.
    Packet(Box<dyn Buffer>),
}

/// A frame that waits to be sent.
#[derive(Debug)]
struct Frame {
    /// The header, and what travels with it.
    head: Vec<u8>,
    body: Body,
    sent: usize,
}

/// What the bytes that come next are.
#[derive(Debug)]
pub(super) enum Reading {
    /// A header, or a payload that is read as a whole.
    Frame,
    /// Bytes for a collective's memory.
    Data {
        op: OpKey,
        member: usize,
        second: bool,
        area: Area,
        /// Where the rest goes.
        start: usize,
        left: usize,
    },
    /// The elements of a message's packets.
    Packets {
        group: Arc<GroupState>,
        member: usize,
        tag: u64,
        message: Message,
        /// Which packet comes next, and how many of its bytes have come.
        packet: usize,
        got: usize,
        /// The header of the packet has come.
        begun: bool,
    },
}

/// The connection to one other process.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) wire: Box<dyn Wire>,
    queue: VecDeque<Frame>,
    pub(super) reading: Reading,
    incoming: Vec<u8>,
    /// Bytes of `incoming` that are used up.
    used: usize,
    /// The peer's groups by its numbers.
    pub(super) groups: BTreeMap<u32, Arc<GroupState>>,
    /// Groups of this process that the peer knows.
    pub(super) told: BTreeSet<u32>,
    /// The peer starts nothing more.
    pub(super) has_ended: bool,
    /// The peer has read all that was sent before this process's end.
    pub(super) has_acked: bool,
    pub(super) is_open: bool,
    /// Packets that have left.
    pub(super) sent: Vec<Box<dyn Buffer>>,
}

impl Link {
    pub(crate) fn new(wire: impl Wire + 'static) -> Self {
        Self {
            wire: Box::new(wire),
            queue: VecDeque::new(),
            reading: Reading::Frame,
            incoming: Vec::new(),
            used: 0,
            groups: BTreeMap::new(),
            told: BTreeSet::new(),
            has_ended: false,
            has_acked: false,
            is_open: true,
            sent: Vec::new(),
        }
    }

    /// Queues a frame; `payload` travels with the header.
    pub(super) fn push(&mut self, header: Header, payload: &[u8], body: Body) {
        if !self.is_open {
            return;
        }
        let mut head = Vec::with_capacity(HEADER_BYTES + payload.len());
        head.extend(header.encode());
        head.extend(payload);
        self.queue.push_back(Frame {
            head,
            body,
            sent: 0,
        });
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Forgets all that is queued, and returns the collectives that it was of.
    pub(super) fn drop_queue(&mut self) -> Vec<OpKey> {
        let frames = std::mem::take(&mut self.queue).into_iter();
        let ops = frames.filter_map(|frame| match frame.body {
            Body::Extent { op, .. } => Some(op),
            Body::None | Body::Packet(_) => None,
        });
        ops.collect()
    }

    /// Writes what the wire takes. Returns the collectives one of whose frames has left.
    pub(super) fn write(&mut self, ops: &BTreeMap<OpKey, Op>) -> io::Result<Vec<OpKey>> {
        let mut left = Vec::new();
        let mut moved = 0;
        while let Some(frame) = self.queue.front_mut() {
            let head = frame.head.len();
            let (written, len) = match &frame.body {
                Body::None => (self.wire.write(&frame.head[frame.sent..])?, 0),
                body if frame.sent < head => {
                    (self.wire.write(&frame.head[frame.sent..])?, body.len())
                }
                Body::Extent {
                    op,
                    area,
                    start,
                    len,
                } => {
                    let done = frame.sent - head;
                    let range = start + done..start + len;
                    let mut written = Ok(None);
                    let op = ops.get(op).ok_or(ErrorKind::NotFound)?;
                    op.read(*area, range, &mut |bytes| {
                        written = self.wire.write(bytes);
                    })
                    .map_err(io::Error::other)?;
                    (written?, *len)
                }
                Body::Packet(data) => {
                    let done = frame.sent - head;
                    let mut written = Ok(None);
                    data.read(&mut |bytes| {
                        written = match bytes.get(done..) {
                            Some(bytes) => self.wire.write(bytes),
                            None => Err(ErrorKind::InvalidInput.into()),
                        };
                    });
                    (written?, frame.body.len())
                }
            };
            let Some(written) = written else {
                break;
            };
            frame.sent += written;
            moved += written;
            if frame.sent == head + len {
                match self.queue.pop_front().map(|frame| frame.body) {
                    Some(Body::Extent { op, .. }) => left.push(op),
                    Some(Body::Packet(data)) => self.sent.push(data),
                    Some(Body::None) | None => {}
                }
            }
            if moved > TURN_BYTES {
                break;
            }
        }
        self.wire.flush();
        Ok(left)
    }

    /// Bytes that were read and not yet used.
    pub(super) fn buffered(&mut self) -> &[u8] {
        &self.incoming[self.used..]
    }

    pub(super) fn use_up(&mut self, len: usize) {
        self.used += len;
        if self.used == self.incoming.len() {
            self.incoming.clear();
            self.used = 0;
        }
    }

    /// The next whole frame that is buffered.
    pub(super) fn next_frame(&mut self) -> Result<Option<(Header, Vec<u8>)>, Malformed> {
        let Some(head) = self.buffered().get(..HEADER_BYTES) else {
            return Ok(None);
        };
        let header = Header::decode(head)?;
        let payload = match header.kind {
            Kind::First | Kind::Second | Kind::Packet => 0,
            _ => header.len,
        };
        let Some(bytes) = self.buffered().get(HEADER_BYTES..HEADER_BYTES + payload) else {
            return Ok(None);
        };
        let bytes = bytes.to_vec();
        self.use_up(HEADER_BYTES + payload);
        Ok(Some((header, bytes)))
    }

    /// Reads some bytes to be buffered. Returns their number, 0 where none are there, and none at
    /// the end of the stream.
    pub(super) fn fill(&mut self) -> io::Result<Option<usize>> {
        self.incoming.drain(..self.used);
        self.used = 0;
        let len = self.incoming.len();
        self.incoming.resize(len + READ_BYTES, 0);
        let read = self.wire.read(&mut self.incoming[len..]);
        let got = match &read {
            Ok(Some(got)) => *got,
            Ok(None) | Err(_) => 0,
        };
        self.incoming.truncate(len + got);
        read
    }
}

impl Body {
    fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Extent { len, .. } => *len,
            Self::Packet(data) => data.size_bytes(),
        }
    }
}
