//! From a block to the order of every rank.

use super::block::{Block, Part};
use crate::generate::Stage;
use crate::{Action, Size};
use std::collections::VecDeque;

/// What a play gives, in units: every action takes one, and messages none.
#[derive(Debug)]
pub(super) struct Played {
    pub(super) actions: Vec<Vec<Action>>,
    pub(super) makespan: usize,
    /// The longest time from a rank's first start to its last end.
    pub(super) longest: usize,
}

/// Lets the ranks work unit by unit: each does its next ready forward or input gradient, and a
/// weight gradient when there is none. At most `limit` activations of stages are kept on a rank.
///
/// Forwards and input gradients keep the block's order. Ends where the block fits into the limit.
pub(super) fn play(block: &Block, size: Size, limit: usize) -> Played {
    let mut board = Board::new(block, size, limit);
    let total = 6 * size.ranks * size.microbatches;
    let (mut done, mut now) = (0, 0);
    while done < total {
        // All ranks choose from the state before this unit.
        let choices: Vec<_> = (0..size.ranks)
            .map(|rank| board.choose(rank, now))
            .collect();
        for (rank, choice) in choices.into_iter().enumerate() {
            done += usize::from(choice.is_some());
            board.carry_out(rank, choice, now);
        }
        now += 1;
    }
    let spans = board.spans.iter();
    Played {
        makespan: now,
        longest: spans.map(|(first, end)| end - first).max().unwrap_or(0),
        actions: board.actions,
    }
}

/// What a rank does next.
#[derive(Debug, Clone, Copy)]
enum Choice {
    Part(Part),
    Weight,
}

struct Board<'a> {
    block: &'a Block,
    size: Size,
    limit: usize,
    /// By rank and part: the next microbatch.
    next: Vec<[usize; 4]>,
    /// By part, rank and microbatch: when it ended.
    ends: Vec<Option<usize>>,
    /// By rank: weight gradients to do, in order.
    weights: Vec<VecDeque<Action>>,
    /// By rank: activations of stages that are kept.
    live: Vec<usize>,
    /// By rank: first start and last end.
    spans: Vec<(usize, usize)>,
    actions: Vec<Vec<Action>>,
}

impl<'a> Board<'a> {
    fn new(block: &'a Block, size: Size, limit: usize) -> Self {
        Self {
            block,
            size,
            limit,
            next: vec![[0; 4]; size.ranks],
            ends: vec![None; 4 * size.ranks * size.microbatches],
            weights: vec![VecDeque::new(); size.ranks],
            live: vec![0; size.ranks],
            spans: vec![(usize::MAX, 0); size.ranks],
            actions: vec![Vec::with_capacity(6 * size.microbatches); size.ranks],
        }
    }

    fn choose(&self, rank: usize, now: usize) -> Option<Choice> {
        let left = Part::ALL
            .into_iter()
            .filter(|part| self.next[rank][*part as usize] < self.size.microbatches);
        let next = left.min_by_key(|part| {
            self.block
                .start(rank, *part, self.next[rank][*part as usize])
        });
        let part = next.filter(|part| self.is_ready(rank, *part, now));
        let weight = || (!self.weights[rank].is_empty()).then_some(Choice::Weight);
        part.map(Choice::Part).or_else(weight)
    }

    fn is_ready(&self, rank: usize, part: Part, now: usize) -> bool {
        let microbatch = self.next[rank][part as usize];
        let last = self.size.ranks - 1;
        let done = |part: Part, rank: usize| {
            self.ends[self.index(part, rank, microbatch)].is_some_and(|end| end <= now)
        };
        match part {
            Part::ForwardDown => {
                self.live[rank] < self.limit && (rank == 0 || done(part, rank - 1))
            }
            Part::ForwardBack => {
                let before = if rank == last {
                    done(Part::ForwardDown, rank)
                } else {
                    done(part, rank + 1)
                };
                before && self.live[rank] < self.limit
            }
            Part::InputBack => done(Part::ForwardBack, rank) && (rank == 0 || done(part, rank - 1)),
            Part::InputDown => {
                if rank == last {
                    done(Part::InputBack, rank)
                } else {
                    done(part, rank + 1)
                }
            }
        }
    }

    fn carry_out(&mut self, rank: usize, choice: Option<Choice>, now: usize) {
        let action = match choice {
            None => return,
            Some(Choice::Weight) => {
                self.live[rank] -= 1;
                self.weights[rank].pop_front()
            }
            Some(Choice::Part(part)) => Some(self.part(rank, part, now)),
        };
        self.actions[rank].extend(action);
        let (first, end) = &mut self.spans[rank];
        *first = now.min(*first);
        *end = now + 1;
    }

    fn part(&mut self, rank: usize, part: Part, now: usize) -> Action {
        let microbatch = self.next[rank][part as usize];
        let index = self.index(part, rank, microbatch);
        self.ends[index] = Some(now + 1);
        self.next[rank][part as usize] += 1;
        let down = Stage(rank);
        let back = Stage(2 * self.size.ranks - 1 - rank);
        let stage = if matches!(part, Part::ForwardDown | Part::InputDown) {
            down
        } else {
            back
        };
        if matches!(part, Part::ForwardDown | Part::ForwardBack) {
            self.live[rank] += 1;
            return stage.forward(microbatch);
        }
        self.weights[rank].push_back(stage.weight_grad(microbatch));
        stage.input_grad(microbatch)
    }

    fn index(&self, part: Part, rank: usize, microbatch: usize) -> usize {
        (part as usize * self.size.ranks + rank) * self.size.microbatches + microbatch
    }
}
