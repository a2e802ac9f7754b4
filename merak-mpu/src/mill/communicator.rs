//! The communicator of a group of processes.

use super::{
    Command,
    op::{GroupState, Slot},
    session::{Awaited, Session},
};
use crate::{
    Buffer, Communicator, Error, Message, Pending, Rank, Result, Started, Wait,
    call::{Call, Fingerprint},
    staged,
};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// This process's handle on a group.
pub(super) struct Handle {
    session: Arc<Session>,
    group: Arc<GroupState>,
    /// The number of collectives that this process has started.
    started: AtomicU64,
}

impl Handle {
    pub(super) fn new(session: Arc<Session>, group: Arc<GroupState>) -> Self {
        Self {
            session,
            group,
            started: AtomicU64::new(0),
        }
    }

    /// Checks that a buffer opens as the bytes that it promises.
    fn check_buffer(&self, buffer: &dyn Buffer) -> Result<()> {
        let (len, dtype) = (buffer.len(), buffer.dtype());
        let expected = len.checked_mul(dtype.size_bytes());
        let mut opened = false;
        buffer.read(&mut |bytes| {
            let aligned = bytes.as_ptr().addr().is_multiple_of(dtype.align());
            opened = Some(bytes.len()) == expected && aligned;
        });
        if opened {
            return Ok(());
        }
        let error = Error::BadBuffer {
            rank: self.session.state.rank.0,
            len,
            dtype,
            expected: expected.unwrap_or(usize::MAX),
        };
        self.abort(&error.to_string());
        Err(error)
    }

    fn check_message(&self, op: &str, peer: usize, tag: u64) -> Result<()> {
        self.session.check_start(&|| {
            let (rank, group) = (self.group.members()[peer], self.group.describe());
            format!("{op}(tag {tag}) of group {group} with rank {rank}")
        })
    }
}

/// A collective that a thread waits for.
struct AwaitedOp {
    call: Call,
    group: Arc<GroupState>,
    sequence: u64,
    slot: Arc<Slot>,
}

impl Awaited for AwaitedOp {
    fn is_ready(&self) -> bool {
        self.slot.is_done()
    }

    /// None is known to be absent before the mill has looked for calls that came early.
    fn absent(&self) -> Vec<Rank> {
        if !self.slot.has_begun() {
            return Vec::new();
        }
        let absent = self.slot.absent().into_iter();
        absent.map(|member| self.group.members()[member]).collect()
    }

    fn describe(&self) -> Wait {
        let missing = self.slot.missing().into_iter();
        let members = self.group.members();
        Wait {
            rank: members[self.group.me],
            op: self.call.name().to_owned(),
            group: self.group.describe(),
            sequence: self.sequence,
            missing: missing.map(|member| members[member]).collect(),
        }
    }
}

/// A message that a thread waits for.
struct AwaitedMessage {
    group: Arc<GroupState>,
    from: usize,
    tag: u64,
    number: u64,
}

impl Awaited for AwaitedMessage {
    fn is_ready(&self) -> bool {
        self.group.mailbox.has(self.from, self.tag, self.number)
    }

    fn absent(&self) -> Vec<Rank> {
        vec![self.group.members()[self.from]]
    }

    fn describe(&self) -> Wait {
        Wait {
            rank: self.group.members()[self.group.me],
            op: format!("recv(tag {})", self.tag),
            group: self.group.describe(),
            sequence: self.number,
            missing: self.absent(),
        }
    }
}

impl Communicator for Handle {
    fn rank(&self) -> usize {
        self.group.me
    }

    fn members(&self) -> &[Rank] {
        self.group.members()
    }

    fn start(&self, call: Call, buffer: Box<dyn Buffer>, lengths: Option<Arc<[usize]>>) -> Started {
        let session = &self.session;
        let sequence = self.started.fetch_add(1, Ordering::Relaxed);
        session.check_start(&|| {
            let group = self.group.describe();
            format!("{} {sequence} of group {group}", call.name())
        })?;
        let (buffer, device) = staged::to_host(buffer);
        self.check_buffer(&*buffer)?;
        let fingerprint = Fingerprint::new(call, &*buffer, lengths);
        let slot = Arc::new(Slot::new(self.group.me, self.group.members().len()));
        session.counter.ask(Command::Start {
            group: Arc::clone(&self.group),
            sequence,
            fingerprint,
            buffer,
            slot: Arc::clone(&slot),
        });
        let awaited = AwaitedOp {
            call,
            group: Arc::clone(&self.group),
            sequence,
            slot: Arc::clone(&slot),
        };
        let (session, watching) = (Arc::clone(session), Arc::clone(session));
        let pending = Pending::polled(
            move || slot.is_done() || watching.state.verdict().is_some(),
            move || {
                let waited = session.wait(&awaited);
                // An error of its own says more than that of the world, which follows from it.
                let result = awaited.slot.take();
                result.unwrap_or_else(|| {
                    waited?;
                    unreachable!("a pending value is waited for once, and the result is there")
                })
            },
        );
        Ok(match device {
            Some(operand) => pending.map(|result| Ok(staged::to_device(&*result, operand))),
            None => pending,
        })
    }

    fn start_send(&self, to: usize, tag: u64, message: Message) -> Result<Pending<()>> {
        self.check_message("send", to, tag)?;
        let message = staged::message_to_host(message);
        for packet in &message {
            self.check_buffer(&*packet.data)?;
        }
        if to == self.group.me {
            self.group.mailbox.put(to, tag, message);
            self.session.state.bell.ring();
        } else {
            self.session.counter.ask(Command::Send {
                group: Arc::clone(&self.group),
                to,
                tag,
                message,
            });
        }
        Ok(Pending::ready(()))
    }

    fn start_recv(&self, from: usize, tag: u64) -> Result<Pending<Message>> {
        self.check_message("recv", from, tag)?;
        let awaited = AwaitedMessage {
            group: Arc::clone(&self.group),
            from,
            tag,
            number: self.group.mailbox.post(from, tag),
        };
        let awaited = Arc::new(awaited);
        let (session, watching) = (Arc::clone(&self.session), Arc::clone(&self.session));
        let watched = Arc::clone(&awaited);
        Ok(Pending::polled(
            move || watched.is_ready() || watching.state.verdict().is_some(),
            move || {
                session.wait(&*awaited)?;
                let AwaitedMessage {
                    group,
                    from,
                    tag,
                    number,
                } = &*awaited;
                let message = group.mailbox.take(*from, *tag, *number);
                Ok(message.expect("the number of a receipt is its own, and the message is there"))
            },
        ))
    }

    fn abort(&self, reason: &str) {
        self.session.fail(self.session.state.rank, reason);
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {} of {}", self.group.me, self.group.describe())
    }
}
