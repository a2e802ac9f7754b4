//! The order in which a rank starts its collectives.

use crate::{
    Buffer, Call, Communicator, Member, Message, Pending, Rank, Result, Started, Turn, bell::lock,
};
use std::sync::{Arc, Mutex};

/// The collectives that a rank has started, in order, each with the name of its group.
///
/// ```
/// use merak_mpu::{Call, ReduceOp, testing};
///
/// testing::world(2, |member| {
///     let starts = testing::Starts::default();
///     let group = starts.of(&member).world_group().expect("the world is new");
///     group.all_reduce_scalar(1.0_f32, ReduceOp::Sum).expect("all ranks come");
///     group.barrier().expect("all ranks come");
///     let expected = [Call::AllReduce(ReduceOp::Sum), Call::Barrier];
///     assert_eq!(starts.take(), expected.map(|call| ("world".to_owned(), call)));
/// });
/// ```
#[derive(Debug, Clone, Default)]
pub struct Starts(Arc<Mutex<Vec<(String, Call)>>>);

impl Starts {
    /// The member, whose collectives are noted.
    pub fn of(&self, member: &Member) -> Member {
        let starts = self.clone();
        member.wrapped(move |name, communicator| {
            Arc::new(Noted {
                communicator,
                name: name.to_owned(),
                starts: starts.clone(),
            })
        })
    }

    /// Takes what was noted.
    pub fn take(&self) -> Vec<(String, Call)> {
        std::mem::take(&mut lock(&self.0))
    }
}

/// A group whose collectives are noted.
#[derive(Debug)]
struct Noted {
    communicator: Arc<dyn Communicator>,
    name: String,
    starts: Starts,
}

impl Communicator for Noted {
    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn members(&self) -> &[Rank] {
        self.communicator.members()
    }

    fn start(&self, call: Call, buffer: Box<dyn Buffer>, lengths: Option<Arc<[usize]>>) -> Started {
        lock(&self.starts.0).push((self.name.clone(), call));
        self.communicator.start(call, buffer, lengths)
    }

    fn start_send(&self, to: usize, tag: u64, message: Message) -> Result<Pending<()>> {
        self.communicator.start_send(to, tag, message)
    }

    fn start_recv(&self, from: usize, tag: u64) -> Result<Pending<Message>> {
        self.communicator.start_recv(from, tag)
    }

    fn turn(&self) -> Result<Turn> {
        self.communicator.turn()
    }

    fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }
}
