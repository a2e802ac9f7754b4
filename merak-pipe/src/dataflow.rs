//! The order in which actions can run.

use crate::{Action, Error, Result, Schedule, Tag};

/// An action as [`walk`] meets it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Visit {
    pub(crate) rank: usize,
    pub(crate) action: Action,
}

/// Where the messages of a schedule stand in a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slots {
    stages: usize,
    microbatches: usize,
}

impl Slots {
    pub(crate) fn new(schedule: &Schedule) -> Self {
        Self {
            stages: schedule.size.stages(),
            microbatches: schedule.size.microbatches,
        }
    }

    /// Entries of a table over all messages.
    pub(crate) fn count(self) -> usize {
        2 * self.stages * self.microbatches
    }

    /// Entry of a message.
    pub(crate) fn of(self, tag: Tag) -> usize {
        let first = if tag.is_activation() { 0 } else { self.stages };
        (first + tag.to.0) * self.microbatches + tag.microbatch.0
    }
}

/// Visits every action once, each after those of its rank that come before it and after the one that
/// makes its message; in time `O(actions)`. Sends are buffered: they wait for nobody.
///
/// # Errors
/// When some ranks wait for each other; the first of them is named.
pub(crate) fn walk(
    schedule: &Schedule,
    placement: &[usize],
    visit: impl FnMut(Visit),
) -> Result<()> {
    let stages = placement.len();
    walk_with(schedule, placement, |action| action.input(stages), visit)
}

/// [`walk`] for actions that wait for the messages that `input` says.
///
/// # Errors
/// As [`walk`].
pub(crate) fn walk_with(
    schedule: &Schedule,
    placement: &[usize],
    input: impl Fn(Action) -> Option<Tag>,
    mut visit: impl FnMut(Visit),
) -> Result<()> {
    let stages = placement.len();
    let slots = Slots::new(schedule);
    let mut arrived = vec![false; slots.count()];
    let mut cursors = vec![0; schedule.actions.len()];
    let mut queue = Worklist::all(schedule.actions.len());
    let missing =
        |action: Action, arrived: &[bool]| input(action).filter(|tag| !arrived[slots.of(*tag)]);
    while let Some(rank) = queue.pop() {
        while let Some(&action) = schedule.actions[rank].get(cursors[rank]) {
            if missing(action, &arrived).is_some() {
                break;
            }
            visit(Visit { rank, action });
            cursors[rank] += 1;
            if let Some(tag) = action.output(stages) {
                arrived[slots.of(tag)] = true;
                queue.push(placement[tag.to.0]);
            }
        }
    }
    for (rank, (actions, &position)) in schedule.actions.iter().zip(&cursors).enumerate() {
        if let Some(&action) = actions.get(position)
            && let Some(needs) = missing(action, &arrived)
        {
            return Err(Error::Deadlock {
                rank,
                position,
                action,
                needs,
            });
        }
    }
    Ok(())
}

/// Ranks to look at again, each at most once at a time.
#[derive(Debug)]
pub(crate) struct Worklist {
    ranks: Vec<usize>,
    waiting: Vec<bool>,
}

impl Worklist {
    pub(crate) fn all(ranks: usize) -> Self {
        Self {
            ranks: (0..ranks).rev().collect(),
            waiting: vec![true; ranks],
        }
    }

    pub(crate) fn push(&mut self, rank: usize) {
        if !self.waiting[rank] {
            self.waiting[rank] = true;
            self.ranks.push(rank);
        }
    }

    pub(crate) fn pop(&mut self) -> Option<usize> {
        let rank = self.ranks.pop()?;
        self.waiting[rank] = false;
        Some(rank)
    }
}
