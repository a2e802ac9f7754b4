//! Ranks that share fewer cores than there are ranks.
//!
//! ```text
//! two ranks, one core     rank 0  F0 ........ F1 ..      both compute: each at half speed
//!                         rank 1        F0 ...... ..     one computes: at full speed
//! ```
//!
//! All running actions slow down alike, so they are kept by the *work* at which they end: the time that has passed
//! for an action that runs from the beginning. It grows by `min(1, cores / running)` for each unit of time.

use super::Clock;
use crate::{Action, Span};
use std::{cmp::Reverse, collections::BinaryHeap};

/// Lets the clock's actions run; the schedule has no deadlock.
pub(super) fn run(clock: &mut Clock<'_>, cores: f64) {
    let ranks = clock.schedule.actions.len();
    let mut machine = Machine {
        clock,
        cores,
        now: 0.0,
        work: 0.0,
        running: BinaryHeap::new(),
        arrivals: BinaryHeap::new(),
        begun: vec![None; ranks],
    };
    (0..ranks).for_each(|rank| machine.begin(rank));
    while machine.advance() {}
}

/// What happens next: when, as bits that ascend with positive numbers, and on which rank.
type Event = Reverse<(u64, usize)>;

struct Machine<'c, 'a> {
    clock: &'c mut Clock<'a>,
    cores: f64,
    now: f64,
    work: f64,
    /// By the work at which they end.
    running: BinaryHeap<Event>,
    /// Messages on their way, by the time of their arrival.
    arrivals: BinaryHeap<Event>,
    /// By rank: the action that runs, its start, and whether it waited for its message.
    begun: Vec<Option<(Action, f64, bool)>>,
}

impl Machine<'_, '_> {
    /// Begins the next action of a rank that is free, if its message is there.
    fn begin(&mut self, rank: usize) {
        let position = self.clock.spans[rank].len();
        if self.begun[rank].is_some() {
            return;
        }
        let Some(&action) = self.clock.schedule.actions[rank].get(position) else {
            return;
        };
        let input = action.input(self.clock.placement.len());
        let arrival = input.map(|tag| self.clock.messages[self.clock.slots.of(tag)].0);
        if arrival.is_some_and(|arrival| arrival > self.now) {
            return;
        }
        let free = self.clock.spans[rank].last().map_or(0.0, |span| span.end);
        let waited = arrival.is_some_and(|arrival| arrival > free || position == 0);
        self.begun[rank] = Some((action, self.now, waited));
        let end = self.work + self.clock.cost(action);
        self.running.push(Reverse((end.to_bits(), rank)));
    }

    /// Goes on to the next end or arrival; whether there was one.
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
        self.begin(rank);
        true
    }

    fn finish(&mut self, rank: usize) {
        let Some((action, start, waited)) = self.begun[rank].take() else {
            return;
        };
        let end = self.now;
        if let Some((tag, arrival)) = self.clock.record(rank, Span { action, start, end }, waited) {
            let receiver = self.clock.placement[tag.to.0];
            self.arrivals.push(Reverse((arrival.to_bits(), receiver)));
        }
        self.begin(rank);
    }
}
