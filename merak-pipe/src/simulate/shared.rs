//! Ranks that share fewer cores than there are ranks.
//!
//! ```text
//! two ranks, one core     rank 0  F0 F1 .. ..      an action that finds no core waits,
//!                         rank 1  .. .. F0 F1      first come, first served, then runs to its end
//! ```
//!
//! On a share of a core actions run at that share of their speed. All running actions slow down
//! alike, so they are sorted by the *work* at which they end: the time that would have passed at
//! full speed. It grows by `min(1, cores / running)` for each unit of time.

use super::Clock;
use crate::action::Cell;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

/// Lets the clock's actions run; the schedule has no deadlock.
pub(super) fn run(clock: &mut Clock<'_>, cores: f64) {
    let ranks = clock.schedule.actions.len();
    let mut machine = Machine {
        clock,
        cores,
        now: 0.0,
        work: 0.0,
        running: BinaryHeap::new(),
        queue: VecDeque::new(),
        arrivals: BinaryHeap::new(),
        begun: vec![None; ranks],
    };
    (0..ranks).for_each(|rank| machine.ask(rank));
    while machine.advance() {}
}

/// What happens next: when, as bits that ascend with positive numbers, and on which rank.
type Event = Reverse<(u64, usize)>;

/// An action that waits for a core or runs.
#[derive(Clone, Copy)]
struct Begun {
    cell: Cell,
    /// When it asked for a core, and then when it got one.
    since: f64,
    /// The rank and position of the action after which it could begin.
    after: Option<(usize, usize)>,
}

struct Machine<'c, 'a> {
    clock: &'c mut Clock<'a>,
    cores: f64,
    now: f64,
    work: f64,
    /// By the work at which they end.
    running: BinaryHeap<Event>,
    /// Ranks that wait for a core.
    queue: VecDeque<usize>,
    /// Messages on their way, by the time of their arrival.
    arrivals: BinaryHeap<Event>,
    /// By rank.
    begun: Vec<Option<Begun>>,
}

impl Machine<'_, '_> {
    /// Asks for a core for the next action of a rank that is free, if its message is there.
    fn ask(&mut self, rank: usize) {
        if self.begun[rank].is_some() {
            return;
        }
        let Some(cell) = self.clock.next(rank) else {
            return;
        };
        let arrival = self.clock.arrival(cell);
        if arrival.is_some_and(|arrival| arrival > self.now) {
            return;
        }
        self.begun[rank] = Some(Begun {
            cell,
            since: self.now,
            after: self.clock.cause(rank, cell),
        });
        self.queue.push_back(rank);
        self.admit(None);
    }

    /// Begins waiting actions while cores are free; `left` is the action that has just left one.
    fn admit(&mut self, left: Option<(usize, usize)>) {
        while (self.running.len() as f64) < self.cores {
            let Some(rank) = self.queue.pop_front() else {
                return;
            };
            let Some(begun) = &mut self.begun[rank] else {
                continue;
            };
            if begun.since < self.now && left.is_some() {
                begun.after = left;
            }
            begun.since = self.now;
            let end = self.work + self.clock.cost(begun.cell);
            self.running.push(Reverse((end.to_bits(), rank)));
        }
    }

    /// Goes on to the next end or arrival. Returns whether there was one.
    fn advance(&mut self) -> bool {
        let speed = (self.cores / self.running.len().max(1) as f64).min(1.0);
        let end = self.running.peek().map(|Reverse((bits, _))| {
            let left = f64::from_bits(*bits) - self.work;
            self.now + left.max(0.0) / speed
        });
        let arrival = self.arrivals.peek();
        let arrival = arrival.map(|Reverse((bits, _))| f64::from_bits(*bits));
        if let Some(end) = end.filter(|end| arrival.is_none_or(|arrival| *end <= arrival)) {
            let Reverse((bits, rank)) = self.running.pop().expect("it was just looked at");
            (self.now, self.work) = (end, f64::from_bits(bits));
            self.finish(rank);
            return true;
        }
        let (Some(arrival), Some(Reverse((_, rank)))) = (arrival, self.arrivals.pop()) else {
            return false;
        };
        self.work += (arrival - self.now).max(0.0) * speed;
        self.now = self.now.max(arrival);
        self.ask(rank);
        true
    }

    fn finish(&mut self, rank: usize) {
        let Some(Begun {
            cell,
            since: start,
            after,
        }) = self.begun[rank].take()
        else {
            return;
        };
        let (position, end) = (self.clock.spans[rank].len(), self.now);
        let sent = self.clock.record(rank, cell, (start, end), after);
        for (tag, arrival) in sent.into_iter().flatten() {
            let receiver = self.clock.placement[tag.to.0];
            self.arrivals.push(Reverse((arrival.to_bits(), receiver)));
        }
        self.admit(Some((rank, position)));
        self.ask(rank);
    }
}
