//! What happens to the collectives of a rank, in order, and what it sends.

use crate::{
    Call, Member, Started,
    bell::lock,
    wrapped::{Between, Start},
};
use std::sync::{Arc, Mutex};

/// What has happened to a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// The rank has started it.
    Started,
    /// The rank has waited for it.
    Ended,
}

/// Something that happened to a collective of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The name of its group.
    pub group: String,
    /// Which collective it is.
    pub call: Call,
    /// Bytes of the buffer that the rank brings.
    pub bytes: usize,
    /// What happened.
    pub moment: Moment,
}

/// A message of a rank to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// The name of their group.
    pub group: String,
    /// Bytes of its tensors.
    pub bytes: usize,
}

/// What has happened to the collectives of one rank, in order, and what it has sent.
///
/// ```
/// use merak_mpu::{
///     Call, ReduceOp,
///     testing::{self, Moment, Record},
/// };
///
/// testing::world(2, |member| {
///     let record = Record::default();
///     let group = record.of(&member).world_group().expect("the world is new");
///     group.all_reduce_scalar(1.0_f32, ReduceOp::Sum).expect("all ranks come");
///     let [started, ended] = record.take().try_into().expect("two events");
///     assert_eq!((&*started.group, started.moment), ("world", Moment::Started));
///     assert_eq!((ended.call, ended.moment), (Call::AllReduce(ReduceOp::Sum), Moment::Ended));
///     assert_eq!((started.bytes, record.take_sent()), (4, vec![]));
/// });
/// ```
#[derive(Debug, Clone, Default)]
pub struct Record(Arc<Mutex<Log>>);

#[derive(Debug, Default)]
struct Log {
    events: Vec<Event>,
    sent: Vec<Sent>,
}

impl Record {
    /// The member, with its collectives and messages on record.
    pub fn of(&self, member: &Member) -> Member {
        member.behind(self.clone())
    }

    /// Takes the events so far.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut lock(&self.0).events)
    }

    /// Takes the messages so far.
    pub fn take_sent(&self) -> Vec<Sent> {
        std::mem::take(&mut lock(&self.0).sent)
    }

    fn note(&self, event: Event) {
        lock(&self.0).events.push(event);
    }
}

impl Between for Record {
    fn start(&self, start: Start<'_>) -> Started {
        let started = Event {
            group: start.group.to_owned(),
            call: start.call,
            bytes: start.bytes(),
            moment: Moment::Started,
        };
        let ended = Event {
            moment: Moment::Ended,
            ..started.clone()
        };
        self.note(started);
        let (pending, record) = (start.go()?, self.clone());
        Ok(pending.map(move |buffer| {
            record.note(ended);
            Ok(buffer)
        }))
    }

    fn sees_message(&self, group: &str, bytes: usize) {
        let group = group.to_owned();
        lock(&self.0).sent.push(Sent { group, bytes });
    }
}
