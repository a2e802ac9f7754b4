//! Turns at computing, in a world with more ranks than cores.
//!
//! ```text
//! core 0   rank 0  0F0 0F1 0F2 │ rank 1  1B0 │ ..      a turn lasts until it is dropped; while all
//! core 1   rank 1  1F0 │ rank 2  2F0 │ rank 3  ..      cores are taken, turns wait in a queue
//! ```
//!
//! A turn is that of a whole group: it comes when all members have asked for it, and ends when the
//! last one has ended it. So members may wait for each other within a turn, before it for anybody,
//! and a turn that has come needs nothing of other turns to end.
//!
//! While its turn lasts, a thread stays on a core of its own, if it can the one of its last turn.
//! Left to itself, an operating system wakes a thread now and then on a core where another one
//! computes, and lets both share it for some milliseconds while the other core idles.

use crate::affinity::{Thread, processors};
use crate::{
    Rank,
    bell::{Bell, lock},
};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// The number of a group in its world, and how many turns it had before.
pub(super) type Key = (usize, u64);

/// The turns that compute, and those that wait for a core.
#[derive(Debug)]
pub(super) struct Turns {
    cores: usize,
    /// Where threads without a turn run; empty where threads are not moved.
    processors: Vec<usize>,
    /// By rank, whether it has a turn and with it a core.
    computing: Vec<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Cores of the turns that have come.
    taken: usize,
    /// Processors that no turn has.
    free: Vec<usize>,
    /// By rank the processor of its last turn.
    last: BTreeMap<Rank, usize>,
    queue: VecDeque<Key>,
    turns: BTreeMap<Key, Turn>,
}

#[derive(Debug)]
struct Turn {
    has_come: bool,
    /// Whether there was a core for each member when it came.
    fits: bool,
    cores: usize,
    /// The members that have not ended it yet.
    members: Vec<Member>,
    bell: Arc<Bell>,
}

#[derive(Debug)]
struct Member {
    rank: Rank,
    /// Its thread, once it has asked.
    thread: Option<Thread>,
    /// Its processor, once the turn has come.
    processor: Option<usize>,
}

impl Turns {
    /// Turns of `ranks` ranks on `cores` cores. Threads are moved where each core is a processor of
    /// this process.
    pub(super) fn new(ranks: usize, cores: usize) -> Self {
        let mut processors = processors();
        if processors.len() != cores {
            processors.clear();
        }
        let state = State {
            free: processors.clone(),
            ..State::default()
        };
        Self {
            cores: cores.max(1),
            processors,
            computing: (0..ranks).map(|_| AtomicBool::new(false)).collect(),
            state: Mutex::new(state),
        }
    }

    /// Where threads without a turn run; empty where threads are not moved.
    pub(super) fn processors(&self) -> &[usize] {
        &self.processors
    }

    /// Whether a rank has a core that no other rank needs.
    pub(super) fn has_core(&self, rank: Rank) -> bool {
        self.computing.len() <= self.cores || self.computing[rank.0].load(Ordering::Relaxed)
    }

    /// Asks for a turn on the calling thread; the bell rings when it comes.
    pub(super) fn ask(&self, key: Key, members: &[Rank], rank: Rank) -> Arc<Bell> {
        let mut state = lock(&self.state);
        let turn = state.turns.entry(key).or_insert_with(|| Turn::of(members));
        let bell = Arc::clone(&turn.bell);
        if let Some(member) = turn.members.iter_mut().find(|member| member.rank == rank) {
            member.thread = Some(Thread::current());
        }
        if turn.absent().next().is_none() {
            state.queue.push_back(key);
            let bells = state.admit(self.cores);
            drop(state);
            ring(bells);
        }
        bell
    }

    pub(super) fn has_come(&self, key: Key) -> bool {
        let state = lock(&self.state);
        state.turns.get(&key).is_some_and(|turn| turn.has_come)
    }

    /// Notes that a rank begins to compute with the other members of its group.
    pub(super) fn begin(&self, key: Key, rank: Rank) {
        let fits = lock(&self.state)
            .turns
            .get(&key)
            .is_some_and(|turn| turn.fits);
        self.computing[rank.0].store(fits, Ordering::Relaxed);
    }

    /// Ends a member's part in its turn.
    pub(super) fn end(&self, key: Key, rank: Rank) {
        self.computing[rank.0].store(false, Ordering::Relaxed);
        let bells = {
            let mut state = lock(&self.state);
            state.leave(key, rank, &self.processors);
            state.admit(self.cores)
        };
        ring(bells);
    }

    /// The ranks that a turn waits for: its members that have not asked for it, or else all whose
    /// turn has come and has not ended.
    pub(super) fn awaited(&self, key: Key) -> Vec<Rank> {
        let state = lock(&self.state);
        let absent: Vec<_> = state
            .turns
            .get(&key)
            .into_iter()
            .flat_map(Turn::absent)
            .collect();
        if !absent.is_empty() {
            return absent;
        }
        let turns = state.turns.values().filter(|turn| turn.has_come);
        let members = turns.flat_map(|turn| &turn.members);
        let mut holders: Vec<_> = members.map(|member| member.rank).collect();
        holders.sort_unstable();
        holders.dedup();
        holders
    }

    /// Wakes all ranks that wait for a turn.
    pub(super) fn wake_all(&self) {
        let bells: Vec<_> = {
            let state = lock(&self.state);
            let turns = state.turns.values();
            turns.map(|turn| Arc::clone(&turn.bell)).collect()
        };
        ring(bells);
    }
}

/// Rings bells while no state is held: a sleeper looks at the state while it holds its bell.
fn ring(bells: Vec<Arc<Bell>>) {
    for bell in bells {
        bell.ring();
    }
}

impl State {
    /// Grants turns while a core is free, even if the last turn needs more cores than are free.
    /// Returns their bells.
    fn admit(&mut self, cores: usize) -> Vec<Arc<Bell>> {
        let mut bells = Vec::new();
        while let Some(turn) = self.queue.front().and_then(|key| self.turns.get_mut(key)) {
            if self.taken >= cores {
                break;
            }
            self.taken += turn.cores;
            turn.has_come = true;
            turn.fits = self.taken <= cores;
            if turn.cores <= self.free.len() {
                for member in &mut turn.members {
                    let last = self.last.get(&member.rank);
                    let at = self.free.iter().position(|free| Some(free) == last);
                    member.processor = Some(self.free.swap_remove(at.unwrap_or(0)));
                    member.settle();
                }
            }
            bells.push(Arc::clone(&turn.bell));
            self.queue.pop_front();
        }
        bells
    }

    /// Takes a member out of its turn, and removes a turn that has no more members.
    fn leave(&mut self, key: Key, rank: Rank, processors: &[usize]) {
        let Some(turn) = self.turns.get_mut(&key) else {
            return;
        };
        let Some(at) = turn.members.iter().position(|member| member.rank == rank) else {
            return;
        };
        let member = turn.members.swap_remove(at);
        if let Some(processor) = member.processor {
            if let Some(thread) = member.thread {
                thread.run_on(processors);
            }
            self.free.push(processor);
            self.last.insert(rank, processor);
        }
        if turn.members.is_empty() {
            if turn.has_come {
                self.taken -= turn.cores;
            } else {
                self.queue.retain(|other| *other != key);
            }
            self.turns.remove(&key);
        }
    }
}

impl Turn {
    fn of(members: &[Rank]) -> Self {
        let member = |rank: &Rank| Member {
            rank: *rank,
            thread: None,
            processor: None,
        };
        Self {
            has_come: false,
            fits: false,
            cores: members.len(),
            members: members.iter().map(member).collect(),
            bell: Arc::default(),
        }
    }

    /// The members that have not asked for it.
    fn absent(&self) -> impl Iterator<Item = Rank> {
        let absent = self.members.iter().filter(|member| member.thread.is_none());
        absent.map(|member| member.rank)
    }
}

impl Member {
    /// Moves the thread to its processor, when both are known.
    fn settle(&self) {
        if let (Some(thread), Some(processor)) = (self.thread, self.processor) {
            thread.run_on(&[processor]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// All members ask.
    fn ask(turns: &Turns, key: Key, members: &[Rank]) {
        for &rank in members {
            turns.ask(key, members, rank);
        }
    }

    #[test]
    fn turns_come_in_the_order_in_which_they_were_asked_for() {
        let turns = Turns::new(4, 2);
        let keys = [(0, 0), (1, 0), (2, 0), (3, 0)];
        for (rank, key) in keys.into_iter().enumerate() {
            ask(&turns, key, &[Rank(rank)]);
        }
        let come = || keys.map(|key| turns.has_come(key));
        assert_eq!(come(), [true, true, false, false]);
        assert_eq!(turns.awaited(keys[3]), [Rank(0), Rank(1)]);
        turns.end(keys[1], Rank(1));
        assert_eq!(come(), [true, false, true, false]);
        // A turn that gives up its place leaves no gap.
        turns.end(keys[3], Rank(3));
        turns.end(keys[0], Rank(0));
        turns.end(keys[2], Rank(2));
        assert!(turns.awaited(keys[3]).is_empty());
        assert_eq!(lock(&turns.state).taken, 0);
    }

    #[test]
    fn no_core_idles_while_a_group_waits_that_needs_more() {
        let turns = Turns::new(6, 3);
        for first in [0, 2, 4] {
            ask(&turns, (first, 0), &[Rank(first), Rank(first + 1)]);
            turns.begin((first, 0), Rank(first));
        }
        let come = [0, 2, 4].map(|first| turns.has_come((first, 0)));
        assert_eq!(come, [true, true, false]);
        assert_eq!([0, 2].map(|rank| turns.has_core(Rank(rank))), [true, false]);
    }

    #[test]
    fn a_group_larger_than_the_machine_keeps_others_out_until_its_last_member_is_done() {
        let turns = Turns::new(4, 2);
        let members = [Rank(0), Rank(1), Rank(2)];
        ask(&turns, (0, 0), &members);
        ask(&turns, (1, 0), &[Rank(3)]);
        assert!(turns.has_come((0, 0)));
        turns.end((0, 0), Rank(1));
        turns.ask((0, 1), &members, Rank(1));
        turns.end((0, 0), Rank(0));
        assert!(!turns.has_come((1, 0)) && !turns.has_come((0, 1)));
        turns.end((0, 0), Rank(2));
        assert!(turns.has_come((1, 0)));
        // The other members do not want the next one yet.
        assert_eq!(turns.awaited((0, 1)), [Rank(0), Rank(2)]);
        for rank in [Rank(0), Rank(2)] {
            assert!(!turns.has_come((0, 1)));
            turns.ask((0, 1), &members, rank);
        }
        // One core is free beside that of the other rank.
        assert!(turns.has_come((0, 1)));
    }

    #[test]
    fn a_member_that_waits_for_another_group_keeps_no_core_from_it() {
        let turns = Turns::new(4, 2);
        let [one, other] = [[Rank(0), Rank(1)], [Rank(2), Rank(3)]];
        // Rank 0 waits for what rank 2 computes before it asks for the turn that rank 1 wants.
        turns.ask((0, 0), &one, Rank(1));
        ask(&turns, (1, 0), &other);
        assert!(turns.has_come((1, 0)) && !turns.has_come((0, 0)));
        for rank in other {
            turns.end((1, 0), rank);
        }
        turns.ask((0, 0), &one, Rank(0));
        assert!(turns.has_come((0, 0)));
    }

    #[test]
    fn while_its_turn_lasts_a_thread_stays_on_a_core_of_its_own() {
        let all = processors();
        let turns = Turns::new(all.len() + 1, all.len());
        let inside = |rank: usize, turn: u64| {
            let key = (rank, turn);
            ask(&turns, key, &[Rank(rank)]);
            let found = processors();
            turns.end(key, Rank(rank));
            assert_eq!(processors(), all, "afterwards it runs anywhere");
            found
        };
        thread::scope(|scope| {
            let first = scope.spawn(|| [inside(0, 0), inside(0, 1)]).join();
            let [one, again] = first.expect("it asserts nothing that fails");
            assert_eq!(one, again, "where it was before");
            assert_eq!(one.len(), all.len().min(1));
        });
        // Ranks of several threads are left to the system, which knows how to spread these.
        let wide = Turns::new(all.len() + 2, all.len() + 1);
        ask(&wide, (0, 0), &[Rank(0)]);
        assert_eq!(processors(), all);
    }
}
