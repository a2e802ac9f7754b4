//! The communicator of a group of processes with a device each.

use super::{
    arrival::Arrival,
    core::Core,
    engine::Session,
    job::{Crew, Job, Lane, Link, Outcome, Slot, Talk, Work, device_address},
    letter,
    order::Agreement,
    plan::{Area, Step, Steps},
};
use crate::{
    Buffer, Communicator, DType, Error, Message, Packet, Pending, Rank, Result, Started, Turn,
    Wait,
    call::{Call, Fingerprint},
    rank::describe_group,
};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// This process's handle on a group. Host memory goes the way of the engine beneath.
pub(super) struct Handle {
    session: Arc<Session>,
    crew: Arc<Crew>,
    /// The number of collectives that this process has started, as the engine beneath counts them.
    started: AtomicU64,
}

impl Handle {
    pub(super) fn new(session: Arc<Session>, crew: Crew) -> Self {
        Self {
            session,
            crew: Arc::new(crew),
            started: AtomicU64::new(0),
        }
    }

    fn core(&self) -> &Core {
        &self.session.core
    }

    /// The steps of a collective, with the output that it needs.
    fn work(&self, fingerprint: &Fingerprint, buffer: Box<dyn Buffer>, input: u64) -> Result<Work> {
        let members = self.crew.members().len();
        let plan = Steps::new(fingerprint, self.crew.me(), members);
        let mut output = plan.output_len.map(|len| buffer.zeros_like(len));
        let output_address = match &mut output {
            Some(output) if !output.is_empty() => self.core().address_of(&mut **output)?,
            _ => 0,
        };
        let size = fingerprint.dtype.size_bytes();
        let steps = plan.steps.into_iter().map(|step| {
            let step = step.map(|spot| {
                let start = match spot.area {
                    Area::Input => input,
                    Area::Output => output_address,
                };
                start + (spot.start * size) as u64
            });
            (fingerprint.dtype, step)
        });
        let steps = steps.collect();
        let buffers: Vec<_> = std::iter::once(buffer).chain(output).collect();
        Ok(Work {
            steps,
            start: self.core().mark(&buffers)?,
            buffers,
        })
    }

    fn pending(
        &self,
        call: Call,
        sequence: u64,
        calls: Arc<Arrival<Box<dyn Buffer>>>,
        slot: Arc<Slot>,
    ) -> Pending<Box<dyn Buffer>> {
        let (session, crew) = (Arc::clone(&self.session), Arc::clone(&self.crew));
        let watched = (Arc::clone(&self.session), Arc::clone(&slot));
        Pending::polled(
            move || watched.1.is_done() || watched.0.core.failure().is_some(),
            move || {
                let core = &session.core;
                let describe = || Wait {
                    rank: core.inner.rank(),
                    op: call.name().to_owned(),
                    group: describe_group(&crew.name, crew.members()),
                    sequence,
                    missing: Vec::new(),
                };
                let came = calls.block();
                core.nudge();
                came.map_err(|error| named(error, &describe()))?;
                match core.wait(&slot, &describe)? {
                    Outcome::Buffer(mut buffer) => {
                        buffer.written();
                        Ok(buffer)
                    }
                    other => unreachable!("a collective gives a buffer, found {other:?}"),
                }
            },
        )
    }

    /// Fails the world for an error of this rank before the others wait for it.
    fn guard<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.core().fail(error);
        }
        result
    }

    /// The communicator for messages with a member.
    fn pair(&self, peer: usize) -> Link {
        let (own, other) = (self.core().inner.rank(), self.crew.members()[peer]);
        Link::Pair(own.min(other), own.max(other))
    }

    /// What a message leaves on the device, as `(place, address)`.
    fn left_behind(&self, to: usize, message: &mut Message) -> Result<Vec<(usize, u64)>> {
        let mut places = Vec::new();
        if to == self.crew.me() {
            return Ok(places);
        }
        for (place, packet) in message.iter_mut().enumerate() {
            if let Some(address) = device_address(&mut *packet.data, self.core().calls.ordinal())? {
                places.push((place, address));
            }
        }
        Ok(places)
    }

    /// The steps of a message to a member, with the packets that stay here until then.
    fn sending(&self, to: usize, packets: Vec<(Packet, u64)>) -> Result<Work> {
        let peer = usize::from(self.crew.members()[to] > self.core().inner.rank());
        let step = |(packet, address): &(Packet, u64)| -> (DType, Step<u64>) {
            let (from, len) = (*address, packet.data.len());
            (packet.dtype(), Step::Send { from, len, peer })
        };
        let steps = packets.iter().map(step);
        let steps = steps.filter(|(_, step)| step.len() > 0).collect();
        let buffers: Vec<_> = packets.into_iter().map(|(packet, _)| packet.data).collect();
        Ok(Work {
            steps,
            start: self.core().mark(&buffers)?,
            buffers,
        })
    }
}

/// An error of the engine beneath, about the call that it was asked for.
fn named(error: Error, call: &Wait) -> Error {
    match error {
        Error::Timeout {
            after,
            wait,
            others,
        } => Error::Timeout {
            after,
            wait: Box::new(Wait {
                missing: wait.missing,
                ..call.clone()
            }),
            others,
        },
        other => other,
    }
}

impl Communicator for Handle {
    fn rank(&self) -> usize {
        self.crew.me()
    }

    fn members(&self) -> &[Rank] {
        self.crew.members()
    }

    /// Starts a collective on the device or, for a buffer in host memory, on the engine beneath.
    fn start(
        &self,
        call: Call,
        mut buffer: Box<dyn Buffer>,
        lengths: Option<Arc<[usize]>>,
    ) -> Started {
        let sequence = self.started.fetch_add(1, Ordering::Relaxed);
        let own = self.core().calls.ordinal();
        let Some(input) = self.guard(device_address(&mut *buffer, own))? else {
            return self.crew.plain.start(call, buffer, lengths);
        };
        if let Some(error) = self.core().failure() {
            return Err(error);
        }
        let fingerprint = Fingerprint::new(call, &*buffer, lengths);
        let work = self.guard(self.work(&fingerprint, buffer, input))?;
        let said = Box::new(letter::call(&fingerprint));
        let calls = Arc::new(Arrival::new(self.crew.plain.start_all_gather(said)?));
        let slot = Arc::<Slot>::default();
        self.core().put(Job {
            crew: Arc::clone(&self.crew),
            lane: Lane::Collectives(self.crew.number),
            link: Link::Group(self.crew.number),
            talk: Talk::Collective {
                sequence,
                calls: Arc::clone(&calls),
                stamps: None,
            },
            agreement: Agreement::Open,
            id: None,
            work,
            // The result is the last buffer: the output, or the input where there is none.
            finish: Box::new(|mut buffers| buffers.pop().map_or(Outcome::Nothing, Outcome::Buffer)),
            slot: Arc::clone(&slot),
        });
        Ok(self.pending(call, sequence, calls, slot))
    }

    fn start_send(&self, to: usize, tag: u64, mut message: Message) -> Result<Pending<()>> {
        let left = self.guard(self.left_behind(to, &mut message))?;
        let is_left = |place: usize| left.iter().any(|(other, _)| *other == place);
        let listed = message.iter().enumerate();
        let list = letter::list(listed.map(|(place, packet)| (packet, is_left(place))));
        let (mut sent, mut kept) = (vec![list], Vec::new());
        for (place, packet) in message.into_iter().enumerate() {
            match left.iter().find(|(other, _)| *other == place) {
                Some((_, address)) => kept.push((packet, *address)),
                None => sent.push(packet),
            }
        }
        if !kept.is_empty() {
            let work = self.guard(self.sending(to, kept))?;
            // It is awaited before the receiver can have come.
            let ready = Arrival::new(self.crew.ready.start_recv(to, tag)?);
            self.core().put(Job {
                crew: Arc::clone(&self.crew),
                lane: Lane::To(self.crew.number, to, tag),
                link: self.pair(to),
                talk: Talk::Send { to, tag, ready },
                agreement: Agreement::Open,
                id: None,
                work,
                finish: Box::new(|_| Outcome::Nothing),
                slot: Arc::default(),
            });
        }
        self.crew.plain.start_send(to, tag, sent)
    }

    fn start_recv(&self, from: usize, tag: u64) -> Result<Pending<Message>> {
        let pending = self.crew.plain.start_recv(from, tag)?;
        let message = Arc::new(Arrival::new(pending));
        let slot = Arc::<Slot>::default();
        self.core().put(Job {
            crew: Arc::clone(&self.crew),
            lane: Lane::From(self.crew.number, from, tag),
            link: self.pair(from),
            talk: Talk::Receive {
                from,
                tag,
                message: Arc::clone(&message),
                stamp: None,
            },
            agreement: Agreement::Open,
            id: None,
            work: Work::default(),
            finish: Box::new(|_| Outcome::Nothing),
            slot: Arc::clone(&slot),
        });
        Ok(self.receipt(from, tag, message, slot))
    }

    fn turn(&self) -> Result<Turn> {
        self.crew.plain.turn()
    }

    fn abort(&self, reason: &str) {
        self.core().inner.abort(reason);
    }
}

impl Handle {
    fn receipt(
        &self,
        from: usize,
        tag: u64,
        message: Arc<Arrival<Message>>,
        slot: Arc<Slot>,
    ) -> Pending<Message> {
        let (session, crew) = (Arc::clone(&self.session), Arc::clone(&self.crew));
        let (watching, watched, done) = (
            Arc::clone(&self.session),
            Arc::clone(&message),
            Arc::clone(&slot),
        );
        Pending::polled(
            move || {
                done.is_done() || watched.has(letter::is_whole) || watching.core.failure().is_some()
            },
            move || {
                let core = &session.core;
                let came = message.block();
                let whole = message.take_if(letter::is_whole);
                core.nudge();
                came?;
                if let Some(whole) = whole {
                    let mut whole = whole?;
                    whole.remove(0);
                    return Ok(whole);
                }
                let describe = || Wait {
                    rank: core.inner.rank(),
                    op: format!("recv(tag {tag})"),
                    group: describe_group(&crew.name, crew.members()),
                    sequence: 0,
                    missing: vec![crew.members()[from]],
                };
                match core.wait(&slot, &describe)? {
                    Outcome::Message(mut message) => {
                        for packet in &mut message {
                            packet.data.written();
                        }
                        Ok(message)
                    }
                    other => unreachable!("a receipt gives a message, found {other:?}"),
                }
            },
        )
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group = describe_group(&self.crew.name, self.crew.members());
        write!(f, "member {} of {group}", self.crew.me())
    }
}
