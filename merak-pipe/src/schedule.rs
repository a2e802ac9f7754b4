//! The schedule: every action of every rank, in order.

use crate::{Action, Error, Kind, MicrobatchId, Pair, Result, StageId, action::Cell};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, fmt::Write as _};

/// The extent of a schedule.
///
/// ```
/// let size = merak_pipe::Size::new(4, 8);
/// assert_eq!((size.ranks, size.microbatches, size.chunks, size.stages()), (4, 8, 1, 4));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Pipeline ranks, `P`.
    pub ranks: usize,
    /// Microbatches of one step, `M`.
    pub microbatches: usize,
    /// Stages that each rank runs, `v`.
    pub chunks: usize,
}

impl Size {
    /// Most ranks, chunks or microbatches of a schedule.
    const MAX_COUNT: usize = 1 << 24;

    /// Most pairs of a stage and a microbatch: tables over them stay within a few GiB.
    pub const MAX_MICROBATCHES_TIMES_STAGES: usize = 1 << 26;

    /// A pipeline with one stage per rank.
    pub const fn new(ranks: usize, microbatches: usize) -> Self {
        Self {
            ranks,
            microbatches,
            chunks: 1,
        }
    }

    /// The same pipeline with `chunks` stages per rank.
    #[must_use]
    pub const fn with_chunks(mut self, chunks: usize) -> Self {
        self.chunks = chunks;
        self
    }

    /// The number of stages, `P * v`.
    pub const fn stages(self) -> usize {
        self.ranks.saturating_mul(self.chunks)
    }

    /// Checks that there is something to do and that its size fits the address space.
    ///
    /// # Errors
    /// When a count is zero or above its limit.
    pub fn check(self) -> Result<()> {
        let counts = [
            ("ranks", self.ranks),
            ("microbatches", self.microbatches),
            ("chunks", self.chunks),
        ];
        for (what, found) in counts {
            if !(1..=Self::MAX_COUNT).contains(&found) {
                return Err(Error::Count {
                    what,
                    max: Self::MAX_COUNT,
                    found,
                });
            }
        }
        let actions = self.stages().saturating_mul(self.microbatches);
        if actions > Self::MAX_MICROBATCHES_TIMES_STAGES {
            return Err(Error::Count {
                what: "stages times microbatches",
                max: Self::MAX_MICROBATCHES_TIMES_STAGES,
                found: actions,
            });
        }
        Ok(())
    }
}

/// How the two directions of one hop are written in the instruction stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exchanges {
    /// A send and a receive that both neighbours do back to back become one exchange.
    Merged,
    /// Nothing is merged: activations go before gradients.
    Split,
    /// Forward only: each step sends what the previous one computed.
    Staggered,
}

/// Every action of every rank, in execution order, and what goes with it.
///
/// This is plain data: a schedule that was built or changed by hand need not be valid.
/// [`Schedule::validate`] proves it; the engine and the simulator return an error on one that
/// cannot be carried out.
///
/// ```
/// use merak_pipe::{ScheduleKind, Size};
/// let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 3))?;
/// assert_eq!(schedule.to_csv(), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Name as users write it, such as `1f1b`.
    pub name: String,
    /// Ranks, microbatches and chunks.
    pub size: Size,
    /// For each rank its actions, first to last.
    pub actions: Vec<Vec<Action>>,
    /// The pairs that run at once, each by its rank and the position of its forward; its backward
    /// is the next action.
    pub pairs: BTreeSet<(usize, usize)>,
    /// For each stage the number of activation buffers; microbatch `m` uses buffer `m` modulo that
    /// number.
    pub buffers: Vec<usize>,
    /// How the instruction stream writes exchanges.
    pub exchanges: Exchanges,
    /// Stages that keep their activations under all recomputation settings.
    pub no_recompute: Vec<StageId>,
}

impl Schedule {
    /// Makes a schedule of actions, with merged exchanges and as many buffers as the actions need.
    pub fn new(name: impl Into<String>, size: Size, actions: Vec<Vec<Action>>) -> Self {
        let forward_only = actions.iter().flatten().all(|a| a.kind == Kind::Forward);
        Self {
            name: name.into(),
            size,
            buffers: buffers_needed(size, &actions),
            actions,
            pairs: BTreeSet::new(),
            exchanges: if forward_only {
                Exchanges::Staggered
            } else {
                Exchanges::Merged
            },
            no_recompute: Vec::new(),
        }
    }

    /// The pair that begins at a position of a rank's list.
    pub fn pair(&self, rank: usize, position: usize) -> Option<Pair> {
        if !self.pairs.contains(&(rank, position)) {
            return None;
        }
        let list = self.actions.get(rank)?;
        Pair::new(*list.get(position)?, *list.get(position + 1)?)
    }

    /// The cell at a position of a rank's list: an action, with the one that runs at once with it.
    pub(crate) fn cell(&self, rank: usize, position: usize) -> Option<Cell> {
        let alone = || Some(Cell::Alone(*self.actions.get(rank)?.get(position)?));
        self.pair(rank, position).map(Cell::Paired).or_else(alone)
    }

    /// The number of cells before the one that the action at a position lies in.
    pub(crate) fn cell_index(&self, rank: usize, position: usize) -> usize {
        let pairs = self.pairs.iter();
        position
            - pairs
                .filter(|pair| pair.0 == rank && pair.1 < position)
                .count()
    }

    /// The cells of a rank's list, each an action or a pair.
    pub(crate) fn cells(&self, rank: usize) -> impl Iterator<Item = Cell> {
        let mut position = 0;
        std::iter::from_fn(move || {
            let cell = self.cell(rank, position)?;
            position += cell.actions().count();
            Some(cell)
        })
    }

    /// Whether the schedule has forwards alone, as for evaluation and generation.
    pub fn is_forward_only(&self) -> bool {
        let mut actions = self.actions.iter().flatten();
        actions.all(|action| action.kind == Kind::Forward)
    }

    /// For each stage the most microbatches at once between their forward and the end of their
    /// backward.
    pub fn live_microbatches(&self) -> Vec<usize> {
        let stages = self.buffers.len();
        let (mut live, mut peak) = (vec![0_usize; stages], vec![0; stages]);
        let forward_only = self.is_forward_only();
        for action in self.actions.iter().flatten() {
            let Some(live) = live.get_mut(action.stage.0) else {
                continue;
            };
            if action.kind == Kind::Forward {
                *live += 1;
                peak[action.stage.0] = (*live).max(peak[action.stage.0]);
            }
            if action.kind.ends_microbatch() || forward_only {
                *live = live.saturating_sub(1);
            }
        }
        peak
    }

    /// The stages that a rank runs, in model order.
    ///
    /// # Errors
    /// As [`Schedule::placement`].
    pub fn stages_of(&self, rank: usize) -> Result<Vec<StageId>> {
        let placement = self.placement()?.into_iter().enumerate();
        let own = placement.filter(|&(_, owner)| owner == rank);
        Ok(own.map(|(stage, _)| StageId(stage)).collect())
    }

    /// For each stage the rank that runs it.
    ///
    /// # Errors
    /// When the counts do not fit each other, an action lies outside them, or a stage has two ranks
    /// or none.
    pub fn placement(&self) -> Result<Vec<usize>> {
        self.size.check()?;
        let Size { ranks, .. } = self.size;
        let stages = self.size.stages();
        if self.actions.len() != ranks {
            return Err(Error::RankCount {
                expected: ranks,
                found: self.actions.len(),
            });
        }
        let mut placement = vec![None; stages];
        for (rank, actions) in self.actions.iter().enumerate() {
            for (position, &action) in actions.iter().enumerate() {
                let invalid = |rule| Error::Invalid {
                    rank,
                    position: self.cell_index(rank, position),
                    action,
                    rule,
                };
                if action.stage.0 >= stages {
                    return Err(invalid(crate::Violation::StageOutOfRange { stages }));
                }
                if action.microbatch.0 >= self.size.microbatches {
                    let microbatches = self.size.microbatches;
                    return Err(invalid(crate::Violation::MicrobatchOutOfRange {
                        microbatches,
                    }));
                }
                match placement[action.stage.0].get_or_insert(rank) {
                    owner if *owner == rank => {}
                    owner => {
                        return Err(invalid(crate::Violation::StageOfAnotherRank {
                            owner: *owner,
                        }));
                    }
                }
            }
        }
        let owners = placement.into_iter().enumerate();
        owners
            .map(|(stage, owner)| {
                owner.ok_or(Error::StageWithoutActions {
                    stage: StageId(stage),
                })
            })
            .collect()
    }

    /// Reads a schedule from comma-separated values: one line per rank, one cell per action or
    /// [`Pair`]; blank cells and blank lines are skipped, and so is a byte order mark.
    ///
    /// # Errors
    /// When a cell is no action or the lines are not one per rank. The order of the actions is
    /// checked by [`Schedule::validate`].
    pub fn from_csv(name: impl Into<String>, text: &str, size: Size) -> Result<Self> {
        size.check()?;
        Self::checked(name.into(), &read_cells(text)?, size)
    }

    /// As [`Schedule::from_csv`], with the size that the file has: a rank for each line that is not
    /// blank, and as many stages and microbatches as the largest numbers in it tell.
    ///
    /// # Errors
    /// As [`Schedule::from_csv`], and [`Error::EmptyFile`], [`Error::StageWithoutLine`] and
    /// [`Error::UnevenStages`] where lines are missing.
    ///
    /// ```
    /// use merak_pipe::{Schedule, Size};
    /// let schedule = Schedule::from_sized_csv("mine", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")?;
    /// assert_eq!(schedule.size, Size::new(2, 2));
    /// # Ok::<(), merak_pipe::Error>(())
    /// ```
    pub fn from_sized_csv(name: impl Into<String>, text: &str) -> Result<Self> {
        let cells = read_cells(text)?;
        if cells.is_empty() {
            return Err(Error::EmptyFile);
        }
        let actions = || cells.iter().flatten().flat_map(|cell| cell.actions());
        let count = |last: Option<usize>| last.map_or(0, |last| last.saturating_add(1));
        let named: BTreeSet<_> = actions().map(|action| action.stage).collect();
        let last = named.last().copied();
        let stages = count(last.map(|last| last.0));
        let missing = (0..stages)
            .map(StageId)
            .find(|stage| !named.contains(stage));
        if let Some((stage, last)) = missing.zip(last) {
            let lines = cells.len();
            return Err(Error::StageWithoutLine { stage, last, lines });
        }
        if stages % cells.len() != 0 {
            let lines = cells.len();
            return Err(Error::UnevenStages { stages, lines });
        }
        let size = Size {
            ranks: cells.len(),
            microbatches: count(actions().map(|action| action.microbatch.0).max()),
            chunks: stages.div_ceil(cells.len()),
        };
        size.check()?;
        Self::checked(name.into(), &cells, size)
    }

    fn checked(name: String, cells: &[Vec<Cell>], size: Size) -> Result<Self> {
        if cells.len() != size.ranks {
            return Err(Error::RankCount {
                expected: size.ranks,
                found: cells.len(),
            });
        }
        let schedule = Self::of_cells(name, size, cells);
        schedule.placement()?;
        Ok(schedule)
    }

    /// Makes a schedule from the cells of each rank.
    pub(crate) fn of_cells(name: impl Into<String>, size: Size, cells: &[Vec<Cell>]) -> Self {
        let mut actions = vec![Vec::new(); cells.len()];
        let mut pairs = BTreeSet::new();
        for (rank, (list, cells)) in actions.iter_mut().zip(cells).enumerate() {
            for cell in cells {
                if cell.second().is_some() {
                    pairs.insert((rank, list.len()));
                }
                list.extend(cell.actions());
            }
        }
        Self {
            pairs,
            ..Self::new(name, size, actions)
        }
    }

    /// Writes the schedule as comma-separated values, one line per rank.
    pub fn to_csv(&self) -> String {
        let mut text = String::new();
        for rank in 0..self.actions.len() {
            for (position, cell) in self.cells(rank).enumerate() {
                let comma = if position == 0 { "" } else { "," };
                write!(text, "{comma}{cell}").expect("a String takes every write");
            }
            text.push('\n');
        }
        text
    }
}

/// The cells that are not blank, of each line that is not blank.
fn read_cells(text: &str) -> Result<Vec<Vec<Cell>>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let read = |(line, row): (usize, &str)| {
        let cells = row.split(',').enumerate();
        let filled = cells.filter(|(_, cell)| !cell.trim().is_empty());
        let parsed = filled.map(|(cell, text)| {
            text.trim().parse().map_err(|source| Error::Cell {
                line: line + 1,
                cell: cell + 1,
                source: Box::new(source),
            })
        });
        parsed.collect()
    };
    let lines = text.lines().enumerate();
    let filled = lines.filter(|(_, row)| !row.trim().is_empty());
    filled.map(read).collect()
}

/// For each stage the smallest ring of buffers in which no live microbatch is overwritten, at least
/// two: the widest range of microbatches that are between their forward and their last backward
/// action.
fn buffers_needed(size: Size, actions: &[Vec<Action>]) -> Vec<usize> {
    if size.check().is_err() {
        return Vec::new();
    }
    let mut live: Vec<BTreeSet<MicrobatchId>> = vec![BTreeSet::new(); size.stages()];
    let mut needed = vec![2; size.stages()];
    // What lies beyond the size is refused later.
    let known = |action: &&Action| {
        action.stage.0 < size.stages() && action.microbatch.0 < size.microbatches
    };
    for action in actions.iter().flatten().filter(known) {
        let stage = action.stage.0;
        if action.kind == Kind::Forward {
            live[stage].insert(action.microbatch);
            if let (Some(first), Some(last)) = (live[stage].first(), live[stage].last()) {
                needed[stage] = needed[stage].max(last.0 - first.0 + 1);
            }
        } else if action.kind.ends_microbatch() {
            live[stage].remove(&action.microbatch);
        }
    }
    let forward_only = actions.iter().flatten().all(|a| a.kind == Kind::Forward);
    if forward_only {
        return vec![2; size.stages()];
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_errors_name_line_and_cell() {
        let error = Schedule::from_csv("mine", "0F0,0B0\n1F0,oops\n", Size::new(2, 1)).unwrap_err();
        assert_eq!(error.to_string(), "line 2, cell 2 is no action");
        let error = Schedule::from_csv("mine", "0F0,0B0\n", Size::new(2, 1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "expected one list of actions for each of 2 ranks, found 1"
        );
    }

    #[test]
    fn blank_cells_are_idle_slots() {
        let schedule =
            Schedule::from_csv("mine", "0F0,,0B0,\n,1F0,1B0\n", Size::new(2, 1)).unwrap();
        assert_eq!(schedule.to_csv(), "0F0,0B0\n1F0,1B0\n");
        assert_eq!(schedule.placement().unwrap(), [0, 1]);
    }

    #[test]
    fn a_byte_order_mark_is_read_over() {
        let text = "\u{feff}0F0,0B0\n1F0,1B0\n";
        let schedule = Schedule::from_csv("mine", text, Size::new(2, 1)).unwrap();
        assert_eq!(schedule.actions[0].len(), 2);
    }

    #[test]
    fn a_file_tells_its_own_size() {
        let csv = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n";
        let schedule = Schedule::from_sized_csv("mine", csv).unwrap();
        assert_eq!(schedule.size, Size::new(2, 1).with_chunks(2));
        for empty in ["", "\u{feff}", "\n\n"] {
            let error = Schedule::from_sized_csv("mine", empty).unwrap_err();
            assert!(matches!(error, Error::EmptyFile), "{error}");
        }
        let huge = format!("{}F0\n", usize::MAX);
        assert!(Schedule::from_sized_csv("mine", &huge).is_err());
    }

    #[test]
    fn blank_lines_are_skipped_and_missing_ones_told() {
        let read = |csv: &str| Schedule::from_sized_csv("mine", csv);
        let spaced = read("\n0F0,0B0\n\n  \n1F0,1B0\n\n").unwrap();
        assert_eq!(spaced.to_csv(), "0F0,0B0\n1F0,1B0\n");
        let message = |csv: &str| read(csv).unwrap_err().to_string();
        assert_eq!(message("\n0F0,oops\n"), "line 2, cell 2 is no action");
        insta::assert_snapshot!(message("0F0,0B0\n2F0,2B0\n"), @"the file names stage 2 but not stage 1: a line is missing (it has 2 with actions, one for each rank), or stages are numbered wrongly");
        insta::assert_snapshot!(message("0F0,0B0\n1F0,2F0,2B0,1B0\n"), @"3 stages on 2 lines: every line is a rank, and all ranks run as many stages");
        // A line of blank cells is a rank with nothing to do.
        insta::assert_snapshot!(message("0F0,0B0\n,,\n1F0,1B0\n"), @"2 stages on 3 lines: every line is a rank, and all ranks run as many stages");
    }

    #[test]
    fn pairs_survive_text_and_back() {
        let csv = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n";
        let schedule = Schedule::from_sized_csv("mine", csv).unwrap();
        assert_eq!(schedule.to_csv(), csv);
        assert_eq!(schedule.actions[0].len(), 6);
        assert_eq!(
            schedule.pair(0, 2).unwrap().to_string(),
            "(0F2;0B0)OVERLAP_F_B"
        );
        assert_eq!((schedule.pair(0, 1), schedule.pair(7, 0)), (None, None));
    }

    #[test]
    fn a_position_counts_a_pair_as_the_one_cell_that_it_is() {
        let message = |csv: &str| {
            let schedule = Schedule::from_sized_csv("mine", csv).unwrap();
            schedule.validate().unwrap_err().to_string()
        };
        let weights = message("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B2,0B2,0B1\n");
        assert!(weights.starts_with("rank 0, position 5: 0B2 "), "{weights}");
        let circle = message("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n");
        let start = "deadlock: rank 0 waits at position 2 ((0F1;0B0)OVERLAP_F_B) for the ";
        assert!(circle.starts_with(start), "{circle}");
    }

    #[test]
    fn buffers_follow_the_live_range() {
        let csv = "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n";
        let schedule = Schedule::from_csv("mine", csv, Size::new(2, 4)).unwrap();
        assert_eq!(schedule.buffers, [3, 2]);
    }

    #[test]
    fn a_microbatch_far_beyond_the_schedule_is_refused_as_what_it_is() {
        let csv = format!("0F0,0F{},0B0", usize::MAX);
        let error = Schedule::from_csv("mine", &csv, Size::new(1, 2)).unwrap_err();
        let error = error.to_string();
        let rule = "names a microbatch beyond the 2 of the schedule";
        assert!(error.ends_with(rule), "{error}");
    }

    #[test]
    fn absurd_sizes_are_refused_before_any_table_is_made() {
        for size in [
            Size::new(0, 1),
            Size::new(1, 0),
            Size::new(usize::MAX, 2),
            Size::new(1 << 20, 1 << 20),
        ] {
            assert!(Schedule::from_csv("mine", "0F0\n", size).is_err());
        }
    }
}
