//! What happens to the collectives of a rank, in order.

use crate::{Call, Member, bell::lock};
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
    /// What happened.
    pub moment: Moment,
}

/// What has happened to the collectives of one rank, in order.
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
/// });
/// ```
#[derive(Debug, Clone, Default)]
pub struct Record(Arc<Mutex<Vec<Event>>>);

impl Record {
    /// The member, with its collectives on record.
    pub fn of(&self, member: &Member) -> Member {
        let record = self.clone();
        member.started_by(move |start| {
            let (record, group, call) = (record.clone(), start.group.to_owned(), start.call);
            record.note(group.clone(), call, Moment::Started);
            let pending = start.go()?;
            Ok(pending.map(move |buffer| {
                record.note(group, call, Moment::Ended);
                Ok(buffer)
            }))
        })
    }

    /// Takes the events so far.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut lock(&self.0))
    }

    fn note(&self, group: String, call: Call, moment: Moment) {
        lock(&self.0).push(Event {
            group,
            call,
            moment,
        });
    }
}
