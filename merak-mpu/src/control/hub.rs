//! The threads of the control plane: the hub on rank 0, and a ray on every other rank.

use super::{
    door::Door,
    note::{Note, Verdict},
    poll::{self, Waker},
    state::{LAST_WORD, State},
    wire::{Channel, MOST_BYTES},
};
use crate::{
    Error, Failure, Rank, Wait,
    bell::{culprit, lock},
};
use std::{
    mem,
    os::fd::AsFd,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How long the hub waits for a rank's own word when another one has lost it.
const GRACE: Duration = Duration::from_millis(300);

/// Notes of this process on their way, and what its control thread has done with them.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    notes: Mutex<(Vec<Note>, bool)>,
    sent: Condvar,
    pub(super) leaving: AtomicBool,
    /// Whether the rank that is to blame leaves after the others.
    pub(super) leaves_last: AtomicBool,
}

impl Outbox {
    pub(super) fn post(&self, note: Note) {
        let mut notes = lock(&self.notes);
        notes.0.push(note);
        notes.1 = false;
    }

    /// Waits until the control thread has sent what was posted, for a second at most.
    pub(super) fn flush(&self) {
        let waited = self
            .sent
            .wait_timeout_while(lock(&self.notes), LAST_WORD, |notes| !notes.1);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn take(&self) -> Vec<Note> {
        mem::take(&mut lock(&self.notes).0)
    }

    /// Notes that what was taken has been sent.
    fn note_sent(&self) {
        let mut notes = lock(&self.notes);
        notes.1 = notes.0.is_empty();
        self.sent.notify_all();
    }
}

/// What both kinds of control thread share.
pub(super) struct Desk {
    pub(super) state: Arc<State>,
    pub(super) outbox: Arc<Outbox>,
    pub(super) waker: Arc<Waker>,
    pub(super) beat_timeout: Duration,
}

impl Desk {
    /// Some beats may be late or lost before a rank counts as lost.
    fn beat(&self) -> Duration {
        let beat = (self.beat_timeout / 5).min(self.state.timeout / 10);
        beat.clamp(Duration::from_millis(5), Duration::from_secs(1))
    }

    fn away(&self, absence: Duration) -> String {
        format!(
            "its process was stopped, or had no processor, for {absence:.1?}, longer than the \
             {:?} after which the others count it as lost",
            self.beat_timeout
        )
    }

    fn silence(&self) -> String {
        format!(
            "no heartbeat within {:?}: its process is stopped or its host is cut off",
            self.beat_timeout
        )
    }

    fn is_leaving(&self) -> bool {
        self.outbox.leaving.load(Ordering::Acquire)
    }

    /// How long this process was away since the last turn: far longer than a turn takes.
    fn absence(&self, last_turn: &mut Instant) -> Option<Duration> {
        let gap = last_turn.elapsed();
        *last_turn = Instant::now();
        (gap > self.beat_timeout / 2).then_some(gap)
    }
}

/// The moment of a beat, moved on by the time in which this process did not run, but not beyond
/// now.
fn excused(beat: Instant, absence: Duration) -> Instant {
    beat.checked_add(absence)
        .unwrap_or(beat)
        .min(Instant::now())
}

const GONE: &str = "its process ended without a goodbye";

const STRANGE: &str = "it sent bytes that no rank sends";

/// Most waits of other ranks that a verdict lists.
const MOST_OTHERS: usize = 64;

/// Bytes of a wait in a verdict, which holds it twice: as it is, and in the words of the reason.
fn bytes_of(wait: &Wait) -> usize {
    2 * (wait.group.len() + wait.op.len()) + 16 * wait.missing.len() + 256
}

/// What the hub knows of another rank.
struct Spoke {
    channel: Channel,
    rank: Rank,
    last_beat: Instant,
    waits: Vec<Wait>,
    /// It has said goodbye or is lost.
    has_left: bool,
}

/// A rank that another one has lost, until it has had time for a word of its own.
struct Suspicion {
    peer: Rank,
    reporter: Rank,
    reason: String,
    due: Instant,
}

/// The center of the star, on rank 0. It alone decides who is to blame.
pub(super) struct Hub {
    desk: Desk,
    door: Door,
    spokes: Vec<Spoke>,
    suspicions: Vec<Suspicion>,
    last_turn: Instant,
    /// The last time for which this process was away, if that is longer than the others wait.
    absence: Option<Duration>,
    /// The end of that time.
    woke: Instant,
}

impl Hub {
    pub(super) fn new(desk: Desk, door: Door, channels: Vec<Channel>) -> Self {
        let spokes = channels.into_iter().zip(1..).map(|(channel, rank)| Spoke {
            channel,
            rank: Rank(rank),
            last_beat: Instant::now(),
            waits: Vec::new(),
            has_left: false,
        });
        Self {
            desk,
            door,
            spokes: spokes.collect(),
            suspicions: Vec::new(),
            last_turn: Instant::now(),
            absence: None,
            woke: Instant::now(),
        }
    }

    pub(super) fn run(mut self) {
        let mut last_beat = Instant::now();
        let mut left_at = None;
        let mut has_warned = false;
        loop {
            self.turn();
            if last_beat.elapsed() >= self.desk.beat() {
                last_beat = Instant::now();
                self.broadcast(&Note::Beat { waits: Vec::new() });
            }
            if !self.desk.is_leaving() {
                continue;
            }
            // Rank 0 leaves last, so that failures among the others still have a judge.
            let left_at = *left_at.get_or_insert_with(Instant::now);
            let there = self.spokes.iter().filter(|spoke| !spoke.has_left);
            let missing: Vec<Rank> = there.map(|spoke| spoke.rank).collect();
            let is_poisoned = self.desk.state.verdict().is_some();
            if missing.is_empty() || (is_poisoned && left_at.elapsed() > LAST_WORD) {
                break;
            }
            if !has_warned && left_at.elapsed() > self.desk.state.timeout {
                self.desk.state.warn_of_late_ends(&missing);
                has_warned = true;
            }
        }
        self.desk.outbox.note_sent();
        self.desk.state.settle();
    }

    fn turn(&mut self) {
        let open = self.spokes.iter().filter(|spoke| !spoke.has_left);
        let sockets: Vec<_> = [self.desk.waker.as_fd()]
            .into_iter()
            .chain(self.door.sockets())
            .chain(open.map(|spoke| spoke.channel.as_fd()))
            .collect();
        if poll::readable(&sockets, self.desk.beat()).is_err() {
            std::thread::sleep(self.desk.beat());
        }
        self.desk.waker.rest();
        if let Some(absence) = self.desk.absence(&mut self.last_turn) {
            for spoke in &mut self.spokes {
                spoke.last_beat = excused(spoke.last_beat, absence);
            }
            self.absence = Some(absence).filter(|absence| *absence > self.desk.beat_timeout);
            self.woke = Instant::now();
        }
        // The others first: what they have to say may be older than what this process has met.
        for number in 0..self.spokes.len() {
            self.listen(number);
        }
        for note in self.desk.outbox.take() {
            self.handle(Rank(0), note);
        }
        self.desk.outbox.note_sent();
        // The world has met without it.
        drop(self.door.take_complaint());
        let size = self.desk.state.size;
        for visitor in self.door.turn() {
            let rank = visitor.hello.rank;
            let reason = format!(
                "the {size} ranks of the world on this port have met, so rank {rank} cannot join \
                 them: give each run a port of its own"
            );
            self.door.send_away(visitor.channel, &reason, None);
        }
        self.judge();
    }

    /// Reads what a rank has sent.
    fn listen(&mut self, number: usize) {
        let spoke = &mut self.spokes[number];
        if spoke.has_left {
            return;
        }
        let rank = spoke.rank;
        let open = spoke.channel.read().unwrap_or(false);
        loop {
            let spoke = &mut self.spokes[number];
            let note = match spoke.channel.next(MOST_BYTES) {
                Ok(Some(frame)) => Note::decode(&frame),
                Ok(None) => break,
                Err(malformed) => Err(malformed),
            };
            if let Ok(note) = note {
                spoke.last_beat = Instant::now();
                self.handle(rank, note);
            } else {
                spoke.has_left = true;
                self.decide(rank, Rank(0), STRANGE, true);
                return;
            }
        }
        let spoke = &mut self.spokes[number];
        if !open && !spoke.has_left {
            spoke.has_left = true;
            self.decide(rank, Rank(0), GONE, true);
        }
    }

    fn handle(&mut self, from: Rank, note: Note) {
        match note {
            Note::Beat { waits } => {
                if let Some(spoke) = self.spoke(from) {
                    spoke.waits = waits.into_iter().filter(|wait| wait.rank == from).collect();
                }
            }
            Note::Fail { culprit, reason } => match self.absence {
                // The others have given this process up while it was away.
                Some(absence) if culprit == 0 && from != 0 => {
                    let reason = self.desk.away(absence);
                    self.decide(culprit, from, &reason, true);
                }
                _ => self.decide(culprit, from, &reason, false),
            },
            Note::Suspect { peer, reason } => self.suspicions.push(Suspicion {
                peer,
                reporter: from,
                reason,
                due: Instant::now() + GRACE,
            }),
            Note::Late { after, wait } => self.decide_late(from, after, wait),
            Note::Goodbye { last } => {
                if let Some(spoke) = self.spoke(from) {
                    spoke.has_left = true;
                    spoke.waits.clear();
                    // One that leaves last hears the end of the hub.
                    if !last {
                        spoke.channel.finish();
                    }
                }
            }
            // The hub alone decides.
            Note::Poison(_) => {}
        }
    }

    fn spoke(&mut self, rank: Rank) -> Option<&mut Spoke> {
        self.spokes.get_mut(rank.0.checked_sub(1)?)
    }

    /// Names the rank at the end of the chain of waits.
    fn decide_late(&mut self, from: Rank, after: Duration, wait: Wait) {
        let own = self.desk.state.waits();
        let all = own
            .into_iter()
            .chain(self.spokes.iter().flat_map(|spoke| spoke.waits.clone()));
        let mut others: Vec<Wait> = all.filter(|other| other.rank != from).collect();
        let culprit = culprit(&wait, &others);
        others.truncate(MOST_OTHERS);
        // The frame of a verdict has a limit in any world.
        let mut left = (MOST_BYTES / 2).saturating_sub(bytes_of(&wait));
        others.retain(|other| {
            let rest = left.checked_sub(bytes_of(other));
            left = rest.unwrap_or(left);
            rest.is_some()
        });
        let error = Error::Timeout {
            after,
            wait: Box::new(wait),
            others: others.clone(),
        };
        let absence = self.absence.filter(|_| self.woke.elapsed() < after);
        let meanwhile = absence.map(|absence| {
            format!(
                "; meanwhile the process of rank 0 was stopped, or had no processor, for \
                 {absence:.1?}, as others may have been"
            )
        });
        let reason = format!("{error}{}", meanwhile.unwrap_or_default());
        self.poison(Verdict {
            failure: Failure {
                culprit,
                reporter: from,
                reason,
            },
            lost: false,
            others,
        });
    }

    /// Blames the ranks that are silent, and those that others have lost.
    fn judge(&mut self) {
        let now = Instant::now();
        let limit = self.desk.beat_timeout;
        let silent = self
            .spokes
            .iter()
            .find(|spoke| !spoke.has_left && now.duration_since(spoke.last_beat) > limit);
        if let Some(rank) = silent.map(|spoke| spoke.rank) {
            self.decide(rank, Rank(0), &self.desk.silence(), true);
        }
        let due: Vec<_> = self
            .suspicions
            .extract_if(.., |one| one.due <= now)
            .collect();
        for Suspicion {
            peer,
            reporter,
            reason,
            ..
        } in due
        {
            self.decide(peer, reporter, &reason, true);
        }
    }

    fn decide(&mut self, culprit: Rank, reporter: Rank, reason: &str, lost: bool) {
        self.poison(Verdict {
            failure: Failure {
                culprit,
                reporter,
                reason: reason.to_owned(),
            },
            lost,
            others: Vec::new(),
        });
    }

    /// The first verdict is the one that counts.
    fn poison(&mut self, verdict: Verdict) {
        if self.desk.state.judge(verdict.clone()) {
            self.broadcast(&Note::Poison(verdict));
        }
    }

    fn broadcast(&mut self, note: &Note) {
        let frame = note.encode();
        for spoke in self.spokes.iter_mut().filter(|spoke| !spoke.has_left) {
            // A rank that is gone or stopped is found by its silence.
            let _ = spoke.channel.send(&frame);
        }
    }
}

/// The end of a ray, on every rank but 0.
pub(super) struct Ray {
    desk: Desk,
    channel: Channel,
    last_beat: Instant,
    last_turn: Instant,
    /// The connection to the hub works.
    open: bool,
}

impl Ray {
    pub(super) fn new(desk: Desk, channel: Channel) -> Self {
        Self {
            desk,
            channel,
            last_beat: Instant::now(),
            last_turn: Instant::now(),
            open: true,
        }
    }

    pub(super) fn run(mut self) {
        let mut last_sent = Instant::now();
        while !self.desk.is_leaving() {
            self.turn(self.desk.beat());
            if self.open && last_sent.elapsed() >= self.desk.beat() {
                last_sent = Instant::now();
                let waits = self.desk.state.waits();
                self.send(&Note::Beat { waits });
            }
        }
        self.turn(Duration::ZERO);
        let leaves_last = self.desk.outbox.leaves_last.load(Ordering::Acquire);
        let culprit = self.desk.state.verdict();
        let is_culprit = culprit.is_some_and(|it| it.failure.culprit == self.desk.state.rank);
        self.send(&Note::Goodbye {
            last: leaves_last && is_culprit,
        });
        self.desk.outbox.note_sent();
        self.channel.finish();
        // The hub closes its end once it has read all. Its verdict on what this rank has reported
        // comes before.
        let deadline = Instant::now() + LAST_WORD;
        while self.open {
            let Ok(Some(frame)) = self.channel.wait(MOST_BYTES, deadline) else {
                break;
            };
            if let Ok(Note::Poison(verdict)) = Note::decode(&frame) {
                self.desk.state.judge(verdict);
            }
        }
        self.desk.state.settle();
    }

    fn turn(&mut self, sleep: Duration) {
        let mut sockets = vec![self.desk.waker.as_fd()];
        if self.open {
            sockets.push(self.channel.as_fd());
        }
        if poll::readable(&sockets, sleep).is_err() {
            std::thread::sleep(self.desk.beat());
        }
        self.desk.waker.rest();
        if let Some(absence) = self.desk.absence(&mut self.last_turn) {
            self.last_beat = excused(self.last_beat, absence);
        }
        for note in self.desk.outbox.take() {
            self.send(&note);
        }
        self.desk.outbox.note_sent();
        if self.open {
            self.listen();
        }
    }

    fn send(&mut self, note: &Note) {
        if self.open && self.channel.send(&note.encode()).is_err() {
            self.listen();
        }
    }

    fn listen(&mut self) {
        let open = self.channel.read().unwrap_or(false);
        loop {
            let note = match self.channel.next(MOST_BYTES) {
                Ok(Some(frame)) => Note::decode(&frame),
                Ok(None) => break,
                Err(malformed) => Err(malformed),
            };
            self.last_beat = Instant::now();
            match note {
                Ok(Note::Poison(verdict)) => {
                    self.desk.state.judge(verdict);
                }
                Ok(_) => {}
                Err(_) => {
                    self.open = false;
                    return self.lose(STRANGE.to_owned());
                }
            }
        }
        if !open {
            self.open = false;
            self.lose(GONE.to_owned());
        } else if self.last_beat.elapsed() > self.desk.beat_timeout
            && self.desk.state.judged().is_none()
        {
            let reason = self.desk.silence();
            self.lose(reason.clone());
            // For a rank 0 that wakes up.
            self.send(&Note::Fail {
                culprit: Rank(0),
                reason,
            });
        }
    }

    /// Rank 0 is lost, and the judge with it.
    fn lose(&self, reason: String) {
        self.desk.state.judge(Verdict {
            failure: Failure {
                culprit: Rank(0),
                reporter: self.desk.state.rank,
                reason,
            },
            lost: true,
            others: Vec::new(),
        });
    }
}
