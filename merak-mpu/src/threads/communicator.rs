//! The communicator of a group of threads.

use super::{
    collective::Collective,
    helper::{Helper, Share},
    wait,
    world::World,
};
use crate::{
    Buffer, Communicator, Error, Message, Pending, Rank, Result, Started, Turn, Wait,
    bell::{Bell, lock},
    call::{self, Call, Fingerprint, grace},
    mailbox::Mailbox,
    rank::describe_group,
};
use std::{
    collections::BTreeMap,
    fmt,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// The most bytes of all buffers together that the last member computes when it comes. This takes
/// it some microseconds; to wake another thread takes longer, and to share the work gains nothing.
const AT_ONCE_BYTES: usize = 64 << 10;

/// Shared by the members of a group.
pub(super) struct GroupState {
    /// Its place among the groups of the world.
    number: usize,
    name: String,
    members: Vec<Rank>,
    /// Rings when a collective is full, and when it is done.
    bell: Bell,
    /// Collectives that still miss members, by number.
    gathering: Mutex<BTreeMap<u64, Arc<Collective>>>,
    /// By the group rank of the receiver.
    mailboxes: Vec<Mailbox>,
}

impl GroupState {
    pub(super) fn new(number: usize, name: &str, members: &[Rank]) -> Self {
        Self {
            number,
            name: name.to_owned(),
            members: members.to_vec(),
            bell: Bell::default(),
            gathering: Mutex::default(),
            mailboxes: members.iter().map(|_| Mailbox::default()).collect(),
        }
    }

    /// Its place among the groups of the world.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Wakes every sleeping member.
    pub(super) fn wake_all(&self) {
        self.bell.ring();
        for mailbox in &self.mailboxes {
            mailbox.bell.ring();
        }
    }
}

/// One member's place in a group.
struct Seat {
    world: Arc<World>,
    group: Arc<GroupState>,
    /// Group rank.
    rank: usize,
}

/// One member's handle on a group.
pub(super) struct Handle {
    seat: Arc<Seat>,
    /// Apart from the seat, which the helper's thread holds too.
    helper: Arc<Share>,
    /// The number of collectives that this member has started.
    started: AtomicU64,
    /// The number of turns that this member has asked for.
    turns: AtomicU64,
}

impl Handle {
    pub(super) fn new(
        world: Arc<World>,
        helper: Arc<Helper>,
        group: Arc<GroupState>,
        rank: usize,
    ) -> Self {
        Self {
            seat: Arc::new(Seat { world, group, rank }),
            helper: Arc::new(Share(helper)),
            started: AtomicU64::new(0),
            turns: AtomicU64::new(0),
        }
    }

    /// Sees to it that a collective that all members have started is computed, whether or not one
    /// of them waits for it.
    fn set_going(&self, collective: &Arc<Collective>, num_bytes: usize) -> Result<()> {
        if num_bytes > AT_ONCE_BYTES {
            self.seat.group.bell.ring();
            let seat = Arc::clone(&self.seat);
            let lead = move |collective: &Collective| seat.lead_unasked(collective);
            if self.helper.0.offer(collective, lead) {
                return Ok(());
            }
        }
        self.seat.lead(collective)?;
        Ok(())
    }
}

impl Seat {
    fn world_rank(&self) -> Rank {
        self.group.members[self.rank]
    }

    fn describe_group(&self) -> String {
        describe_group(&self.group.name, &self.group.members)
    }

    /// Fails the world when members call different operations.
    fn compare(&self, collective: &Collective, sequence: u64, own: &Fingerprint) -> Result<()> {
        if collective.is_called(own) {
            return Ok(());
        }
        collective.note_other_call(self.rank, own.clone());
        let deadline = Instant::now() + grace(self.world.timeout());
        let is_settled = || self.world.check().is_err() || collective.have_all_called();
        self.group.bell.sleep(deadline, &is_settled);
        let members = &self.group.members;
        let calls = collective.calls().into_iter();
        let calls: Vec<_> = calls.map(|(rank, call)| (members[rank], call)).collect();
        let group = (self.group.name.as_str(), members.as_slice());
        let compared = call::compare(group, sequence, &calls, Fingerprint::to_string);
        compared.inspect_err(|error| self.fail(error))
    }

    fn fail(&self, error: &Error) {
        let rank = self.world_rank();
        let culprit = error.culprit().unwrap_or(rank);
        self.world.fail(culprit.0, rank.0, &error.to_string());
    }

    /// Computes a collective that all members have started, unless another thread has begun to.
    /// Returns whether it did.
    fn lead(&self, collective: &Collective) -> Result<bool> {
        if !collective.claim_lead() {
            return Ok(false);
        }
        if let Err(unopened) = collective.lead() {
            let error = Error::BadBuffer {
                rank: self.group.members[unopened.rank].0,
                len: unopened.len,
                dtype: unopened.dtype,
                expected: unopened.len * unopened.dtype.size_bytes(),
            };
            self.fail(&error);
            return Err(error);
        }
        self.group.bell.ring();
        Ok(true)
    }

    /// The same on the helper. A failure there is one of the world, of which all members hear.
    fn lead_unasked(&self, collective: &Collective) {
        if self.world.check().is_err() {
            return;
        }
        // A collective is not used again after a panic, so no broken invariant is seen.
        let led = panic::catch_unwind(AssertUnwindSafe(|| self.lead(collective)));
        if led.is_err() {
            let (own, members) = (self.world_rank(), &self.group.members);
            let (culprit, reason) = match collective.panicked_at(members.len()) {
                Some(rank) => (members[rank], "its buffer panicked"),
                None => (own, "its helper panicked"),
            };
            self.world.fail(culprit.0, own.0, reason);
        }
    }

    fn finish(&self, collective: &Collective, sequence: u64) -> Result<Box<dyn Buffer>> {
        self.wait_for(collective, sequence, &|| collective.is_full())?;
        if !self.lead(collective)? {
            self.wait_for(collective, sequence, &|| collective.can_help())?;
            collective.help();
            self.wait_for(collective, sequence, &|| collective.is_done())?;
        }
        Ok(collective
            .take(self.rank)
            .expect("a pending value is waited for once, and the results are there"))
    }

    fn wait_for(
        &self,
        collective: &Collective,
        sequence: u64,
        ready: &dyn Fn() -> bool,
    ) -> Result<()> {
        wait::wait(
            &self.world,
            self.world_rank(),
            &self.group.bell,
            ready,
            &|| {
                let missing = collective.missing();
                Wait {
                    rank: self.world_rank(),
                    op: collective.name().to_owned(),
                    group: self.describe_group(),
                    sequence,
                    missing: missing
                        .into_iter()
                        .map(|rank| self.group.members[rank])
                        .collect(),
                }
            },
        )
    }

    fn receive(&self, from: usize, tag: u64, number: u64) -> Result<Message> {
        let mailbox = &self.group.mailboxes[self.rank];
        let ready = || mailbox.has(from, tag, number);
        wait::wait(
            &self.world,
            self.world_rank(),
            &mailbox.bell,
            &ready,
            &|| Wait {
                rank: self.world_rank(),
                op: format!("recv(tag {tag})"),
                group: self.describe_group(),
                sequence: number,
                missing: vec![self.group.members[from]],
            },
        )?;
        Ok(mailbox
            .take(from, tag, number)
            .expect("the number of a receipt is its own, and the message is there"))
    }

    /// Waits for a turn, which ends when the returned value is dropped.
    fn take_turn(self: &Arc<Self>, number: u64) -> Result<Turn> {
        let key = (self.group.number, number);
        let turns = self.world.turns();
        let bell = turns.ask(key, &self.group.members, self.world_rank());
        let seat = Arc::clone(self);
        let turn = Turn::new(move || seat.world.turns().end(key, seat.world_rank()));
        let ready = || turns.has_come(key);
        wait::wait(&self.world, self.world_rank(), &bell, &ready, &|| Wait {
            rank: self.world_rank(),
            op: "turn".to_owned(),
            group: self.describe_group(),
            sequence: number,
            missing: turns.awaited(key),
        })?;
        turns.begin(key, self.world_rank());
        Ok(turn)
    }
}

impl Communicator for Handle {
    fn rank(&self) -> usize {
        self.seat.rank
    }

    fn members(&self) -> &[Rank] {
        &self.seat.group.members
    }

    /// Deposits the buffer. The last member sets the work going, and waits share it.
    fn start(&self, call: Call, buffer: Box<dyn Buffer>, lengths: Option<Arc<[usize]>>) -> Started {
        let Seat { world, group, rank } = &*self.seat;
        world.check()?;
        let sequence = self.started.fetch_add(1, Ordering::Relaxed);
        let fingerprint = Fingerprint::new(call, &*buffer, lengths);
        let collective = {
            let mut gathering = lock(&group.gathering);
            let collective = gathering.entry(sequence).or_insert_with(|| {
                let n = group.members.len();
                Arc::new(Collective::new(fingerprint.clone(), *rank, n))
            });
            Arc::clone(collective)
        };
        self.seat.compare(&collective, sequence, &fingerprint)?;
        if let Some(num_bytes) = collective.deposit(*rank, buffer) {
            lock(&group.gathering).remove(&sequence);
            self.set_going(&collective, num_bytes)?;
        }
        let (seat, other) = (Arc::clone(&self.seat), Arc::clone(&self.seat));
        let (watched, helper) = (Arc::clone(&collective), Arc::clone(&self.helper));
        Ok(Pending::polled(
            move || watched.is_full() || other.world.check().is_err(),
            move || {
                let result = seat.finish(&collective, sequence);
                // It lives as long as the operation is pending, even if no handle is left.
                drop(helper);
                result
            },
        ))
    }

    fn start_send(&self, to: usize, tag: u64, message: Message) -> Result<Pending<()>> {
        self.seat.world.check()?;
        self.seat.group.mailboxes[to].put(self.seat.rank, tag, message);
        Ok(Pending::ready(()))
    }

    fn start_recv(&self, from: usize, tag: u64) -> Result<Pending<Message>> {
        self.seat.world.check()?;
        let number = self.seat.group.mailboxes[self.seat.rank].post(from, tag);
        let (seat, other) = (Arc::clone(&self.seat), Arc::clone(&self.seat));
        let has_come = move || {
            let mailbox = &other.group.mailboxes[other.rank];
            mailbox.has(from, tag, number) || other.world.check().is_err()
        };
        Ok(Pending::polled(has_come, move || {
            seat.receive(from, tag, number)
        }))
    }

    fn turn(&self) -> Result<Turn> {
        self.seat.world.check()?;
        if self.seat.world.turns().has_core(self.seat.world_rank()) {
            return Ok(Turn::default());
        }
        let number = self.turns.fetch_add(1, Ordering::Relaxed);
        self.seat.take_turn(number)
    }

    fn abort(&self, reason: &str) {
        let rank = self.seat.world_rank().0;
        self.seat.world.fail(rank, rank, reason);
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group = self.seat.describe_group();
        write!(f, "member {} of {group}", self.seat.rank)
    }
}
