//! The order in which actions can run.

use crate::{Action, Error, Result, Schedule, Tag, action::Cell};

/// An action, or two that run at once, as [`walk`] meets them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Visit {
    pub(crate) rank: usize,
    pub(crate) cell: Cell,
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

/// Visits every action once, after those of its rank that come before it and after the one that
/// makes its message; two that run at once after both messages. Takes time `O(actions)`. Sends are
/// buffered: they wait for no rank.
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

/// [`walk`] for actions that wait for the messages that `input` returns.
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
    let missing = |cell: Cell, arrived: &[bool]| {
        let mut needs = cell
            .actions()
            .filter_map(|action| Some((action, input(action)?)));
        needs.find(|(_, tag)| !arrived[slots.of(*tag)])
    };
    while let Some(rank) = queue.pop() {
        while let Some(cell) = schedule.cell(rank, cursors[rank]) {
            if missing(cell, &arrived).is_some() {
                break;
            }
            visit(Visit { rank, cell });
            cursors[rank] += cell.actions().count();
            for tag in cell.actions().filter_map(|action| action.output(stages)) {
                arrived[slots.of(tag)] = true;
                queue.push(placement[tag.to.0]);
            }
        }
    }
    for (rank, &position) in cursors.iter().enumerate() {
        if let Some(cell) = schedule.cell(rank, position)
            && let Some((action, needs)) = missing(cell, &arrived)
        {
            return Err(Error::Deadlock {
                rank,
                position: schedule.cell_index(rank, position),
                action,
                pair: schedule.pair(rank, position),
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
