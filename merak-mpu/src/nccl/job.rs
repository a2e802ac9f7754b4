//! An operation on device memory from its call to its launch.

use super::{
    arrival::Arrival,
    calls::UniqueId,
    conductor::Conductor,
    cuda::{Event, Stream},
    letter::{self, Part},
    order::{Agreement, Stamp},
    plan::Step,
};
use crate::{
    Buffer, Communicator, DType, Error, Memory, Message, Packet, Rank, Result, bell::lock,
};
use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// A group as the operations on its members' devices see it.
#[derive(Debug)]
pub(super) struct Crew {
    /// Its place among the groups of this process.
    pub(super) number: u64,
    pub(super) name: String,
    /// Carries host memory, and what members say of their calls.
    pub(super) plain: Arc<dyn Communicator>,
    /// Tells senders that their receiver has come.
    pub(super) ready: Arc<dyn Communicator>,
    /// Carries stamps.
    pub(super) order: Arc<dyn Communicator>,
}

impl Crew {
    pub(super) fn me(&self) -> usize {
        self.plain.rank()
    }

    pub(super) fn members(&self) -> &[Rank] {
        self.plain.members()
    }
}

/// The ranks of a communicator of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Link {
    /// Those of a group, by its number.
    Group(u64),
    /// Two ranks of the world, the lower one first.
    Pair(Rank, Rank),
}

/// Operations of one lane are agreed on in the order in which they were started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    Collectives(u64),
    To(u64, usize, u64),
    From(u64, usize, u64),
}

/// What an operation gives.
#[derive(Debug)]
pub(super) enum Outcome {
    Buffer(Box<dyn Buffer>),
    Message(Message),
    Nothing,
}

/// Where the thread that waits finds the result.
#[derive(Debug, Default)]
pub(super) struct Slot {
    result: Mutex<Option<Result<Outcome>>>,
    is_done: AtomicBool,
}

impl Slot {
    /// Leaves an error for the thread that waits, before the world fails and wakes it.
    pub(super) fn leave(&self, error: Error) {
        lock(&self.result).get_or_insert(Err(error));
    }

    pub(super) fn finish(&self, result: Result<Outcome>) {
        lock(&self.result).get_or_insert(result);
        self.is_done.store(true, Ordering::Release);
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    pub(super) fn take(&self) -> Option<Result<Outcome>> {
        lock(&self.result).take()
    }
}

/// What is launched, with the memory that it uses.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) steps: Vec<(DType, Step<u64>)>,
    /// The points of other queues from which on the memory can be used.
    pub(super) start: Vec<Event>,
    pub(super) buffers: Vec<Box<dyn Buffer>>,
}

/// Makes the outcome of the buffers that a work has used.
pub(super) type Finish = Box<dyn FnOnce(Vec<Box<dyn Buffer>>) -> Outcome + Send>;

/// An operation that was started.
pub(super) struct Job {
    pub(super) crew: Arc<Crew>,
    pub(super) lane: Lane,
    pub(super) link: Link,
    pub(super) talk: Talk,
    pub(super) agreement: Agreement,
    /// The name of the communicator, where a member has given one.
    pub(super) id: Option<UniqueId>,
    pub(super) work: Work,
    pub(super) finish: Finish,
    pub(super) slot: Arc<Slot>,
}

/// What the members of an operation tell each other before its launch.
pub(super) enum Talk {
    /// Members have called; then stamps come.
    Collective {
        sequence: u64,
        calls: Arc<Arrival<Box<dyn Buffer>>>,
        stamps: Option<Arrival<Box<dyn Buffer>>>,
    },
    /// The receiver has come, with its proposal.
    Send {
        to: usize,
        tag: u64,
        ready: Arrival<Message>,
    },
    /// The message has come; then its stamp.
    Receive {
        from: usize,
        tag: u64,
        message: Arc<Arrival<Message>>,
        stamp: Option<Arrival<Message>>,
    },
}

/// How an operation's talk went on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Nothing has come.
    None,
    Some,
    /// There is nothing to launch.
    Over,
}

impl Job {
    /// Goes on with the talk as far as it goes without a wait.
    pub(super) fn advance(&mut self, conductor: &mut Conductor) -> Result<Progress> {
        match self.agreement {
            Agreement::Open => self.open(conductor),
            Agreement::Proposed(_) => self.agree(conductor),
            Agreement::Agreed(_) => Ok(Progress::None),
        }
    }

    /// Proposes a stamp when all members have called.
    fn open(&mut self, conductor: &mut Conductor) -> Result<Progress> {
        let crew = Arc::clone(&self.crew);
        match &mut self.talk {
            Talk::Collective {
                sequence,
                calls,
                stamps,
            } => {
                let Some(said) = calls.take_if(|_| true) else {
                    return Ok(Progress::None);
                };
                let mut compared = Ok(());
                said?.read(&mut |said| {
                    compared = letter::compare(said, &crew.name, crew.members(), *sequence);
                });
                compared?;
                let own = conductor.clock.propose();
                let offers = crew.me() == 0 && !conductor.has(self.link);
                let id = offers.then(|| conductor.offer(self.link)).transpose()?;
                let letter = letter::stamp(own, id.as_ref());
                let pending = crew.order.start_all_gather(Box::new(letter))?;
                *stamps = Some(Arrival::new(pending));
                self.agreement = Agreement::Proposed(own);
                Ok(Progress::Some)
            }
            Talk::Send { to, tag, ready } => {
                let Some(ready) = ready.take_if(|_| true) else {
                    return Ok(Progress::None);
                };
                let (to, tag) = (*to, *tag);
                let (theirs, _) = letter::posted_stamp(ready?, crew.members()[to])?;
                let stamp = conductor.clock.propose().max(theirs);
                let offers = !conductor.has(self.link);
                self.id = offers.then(|| conductor.offer(self.link)).transpose()?;
                let letter = letter::post(letter::stamp(stamp, self.id.as_ref()));
                crew.order.start_send(to, tag, letter)?.wait()?;
                Ok(self.settle(conductor, stamp))
            }
            Talk::Receive { message, .. } => {
                if message.is_taken() {
                    return Ok(Progress::Over);
                }
                match message.take_if(|_| true) {
                    None => Ok(Progress::None),
                    Some(message) => self.receive(conductor, message?),
                }
            }
        }
    }

    /// Makes room for what a message leaves on the sender's device, and tells the sender.
    fn receive(&mut self, conductor: &mut Conductor, message: Message) -> Result<Progress> {
        let Talk::Receive {
            from, tag, stamp, ..
        } = &mut self.talk
        else {
            return Ok(Progress::None);
        };
        let (from, tag) = (*from, *tag);
        let parts = letter::parts(message, self.crew.members()[from])?;
        let peer = usize::from(self.crew.members()[from] > self.crew.members()[self.crew.me()]);
        let mut packets = Vec::new();
        for part in parts {
            packets.push(match part {
                Part::Here(packet) => (packet.shape, Some(packet.data)),
                Part::Device { shape, dtype } => {
                    let len = shape.iter().product();
                    let mut buffer = conductor.allocate(dtype, len)?;
                    let to = conductor.address_of(&mut *buffer)?;
                    let step = Step::Recv { to, len, peer };
                    self.work.steps.push((dtype, step));
                    self.work.buffers.push(buffer);
                    (shape, None)
                }
            });
        }
        let joins = move |buffers: Vec<Box<dyn Buffer>>| {
            let mut buffers = buffers.into_iter();
            let packets = packets.into_iter().map(|(shape, data)| Packet {
                shape,
                data: data
                    .or_else(|| buffers.next())
                    .expect("there is a buffer for each packet that is not here"),
            });
            Outcome::Message(packets.collect())
        };
        if self.work.buffers.is_empty() {
            self.slot.finish(Ok(joins(Vec::new())));
            return Ok(Progress::Over);
        }
        self.work.steps.retain(|(_, step)| step.len() > 0);
        self.work.start = conductor.mark(&self.work.buffers)?;
        self.finish = Box::new(joins);
        let own = conductor.clock.propose();
        let letter = letter::post(letter::stamp(own, None));
        self.crew.ready.start_send(from, tag, letter)?.wait()?;
        let pending = self.crew.order.start_recv(from, tag)?;
        *stamp = Some(Arrival::new(pending));
        self.agreement = Agreement::Proposed(own);
        Ok(Progress::Some)
    }

    /// Takes the stamp that the members agree on.
    fn agree(&mut self, conductor: &mut Conductor) -> Result<Progress> {
        let members = self.crew.members();
        let come = match &self.talk {
            Talk::Collective {
                stamps: Some(stamps),
                ..
            } => stamps
                .take_if(|_| true)
                .map(|letters| letter::stamps(letters?, members[0])),
            Talk::Receive {
                from,
                stamp: Some(stamp),
                ..
            } => stamp
                .take_if(|_| true)
                .map(|message| letter::posted_stamp(message?, members[*from])),
            _ => None,
        };
        let Some(come) = come else {
            return Ok(Progress::None);
        };
        let (stamp, id) = come?;
        self.id = id;
        Ok(self.settle(conductor, stamp))
    }

    fn settle(&mut self, conductor: &mut Conductor, stamp: Stamp) -> Progress {
        conductor.clock.see(stamp);
        self.agreement = Agreement::Agreed(stamp);
        Progress::Some
    }

    /// The number of members of the communicator, and this rank's place among them.
    pub(super) fn place(&self) -> (usize, usize) {
        match self.link {
            Link::Group(_) => (self.crew.members().len(), self.crew.me()),
            Link::Pair(low, _) => (2, usize::from(self.crew.members()[self.crew.me()] != low)),
        }
    }

    /// Gives the result to the thread that waits.
    pub(super) fn end(self, result: Result<()>) {
        let finish = self.finish;
        let buffers = self.work.buffers;
        self.slot.finish(result.map(|()| finish(buffers)));
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.lane, self.agreement)
    }
}

/// Where a buffer's elements lie on a device; none where they lie on the host.
pub(super) fn device_address(buffer: &mut dyn Buffer, own: usize) -> Result<Option<u64>> {
    match buffer.memory() {
        Memory::Device { ordinal, address } if ordinal == own => Ok(Some(address)),
        Memory::Device { ordinal, .. } => Err(Error::OtherDevice {
            expected: own,
            found: ordinal,
        }),
        Memory::Host(_) => Ok(None),
    }
}

/// The queue that a buffer's elements come from.
pub(super) fn queue_of(buffer: &dyn Buffer) -> Stream {
    Stream(buffer.stream())
}
