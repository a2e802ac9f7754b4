//! A timeline as a text grid, one row per rank.

use crate::{Action, Kind, Span, Timeline, timeline::groups};
use std::fmt::Write as _;

/// How [`grid`] draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridStyle {
    /// Whether actions get ANSI background colours by kind.
    pub colour: bool,
    /// Most cells of a row; a longer timeline is drawn with more time per cell.
    pub max_cells: usize,
}

impl Default for GridStyle {
    fn default() -> Self {
        Self {
            colour: false,
            max_cells: 400,
        }
    }
}

/// Draws a timeline: time runs to the right, an action fills as many cells as it lasts, a dot is
/// idle.
///
/// A cell lasts as long as the shortest action. Actions are named by kind and microbatch, and by
/// their stage too where a rank runs several; two that run at once share a bar, as in `F7+B3----`.
///
/// ```
/// use merak_pipe::{Costs, GridStyle, ScheduleKind, Size, UnitCosts, grid, simulate};
/// let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 2))?;
/// let costs = UnitCosts { recompute: 0.0, ..UnitCosts::default() };
/// let simulation = simulate(&schedule, &Costs::uniform(costs, 2))?;
/// let text = "\
/// rank 0  F0 F1 .  .  B0--- .  B1---
/// rank 1  .  F0 B0--- F1 B1--- .  .
/// ";
/// assert_eq!(grid(&simulation.timeline, GridStyle::default()), text);
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn grid(timeline: &Timeline, style: GridStyle) -> String {
    let with_stage = timeline.ranks.iter().any(|spans| several_stages(spans));
    let label = |action: &Action| {
        let text = action.to_string();
        let stage_digits = if with_stage {
            0
        } else {
            text.len() - short_len(action)
        };
        text[stage_digits..].to_owned()
    };
    let cell = cell_time(timeline, style.max_cells.max(1));
    let cells = |time: f64| {
        if cell > 0.0 {
            (time / cell).round() as usize
        } else {
            0
        }
    };
    let labels = |(span, other): &(Span, Option<Span>)| {
        let second = other.map(|other| format!("+{}", label(&other.action)));
        (label(&span.action), second.unwrap_or_default())
    };
    let width = timeline.groups().map(|group| {
        let (first, second) = labels(&group);
        let lasts = match group.1 {
            Some(_) => cells(group.0.end - group.0.start).max(1),
            None => 1,
        };
        (first.len() + second.len() + 1).div_ceil(lasts)
    });
    let width = width.max().unwrap_or(2);
    let total = cells(timeline.makespan());
    let digits = timeline.ranks.len().saturating_sub(1).to_string().len();
    let mut text = String::new();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let mut row = format!("rank {rank:<digits$}  ");
        let mut at = 0;
        let idle = |row: &mut String, count: usize| {
            for _ in 0..count {
                write!(row, "{:<width$}", ".").expect("a String takes every write");
            }
        };
        for group in groups(spans) {
            let (span, other) = group;
            // Rounding must not hide an action, so each has a cell of its own.
            let start = cells(span.start).max(at);
            let end = cells(span.end).max(start + 1);
            idle(&mut row, start - at);
            let (first, second) = labels(&group);
            let len = (end - start) * width - 1;
            match other {
                None => {
                    let bar = format!("{first:-<len$}");
                    row.push_str(&paint(&bar, span.action.kind, style.colour));
                }
                Some(other) => {
                    let rest = format!("{second:-<len$}", len = len.saturating_sub(first.len()));
                    row.push_str(&paint(&first, span.action.kind, style.colour));
                    row.push_str(&paint(&rest, other.action.kind, style.colour));
                }
            }
            row.push(' ');
            at = end;
        }
        idle(&mut row, total.saturating_sub(at));
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

fn several_stages(spans: &[Span]) -> bool {
    let first = spans.first().map(|span| span.action.stage);
    spans.iter().any(|span| Some(span.action.stage) != first)
}

/// Length of an action's name without its stage.
fn short_len(action: &Action) -> usize {
    1 + action.microbatch.to_string().len()
}

/// The time of one cell: that of the shortest action that takes time, or longer where that makes
/// too many cells.
fn cell_time(timeline: &Timeline, max_cells: usize) -> f64 {
    let spans = timeline.ranks.iter().flatten();
    let times = spans
        .map(|span| span.end - span.start)
        .filter(|time| *time > 0.0);
    let shortest = times.fold(f64::INFINITY, f64::min);
    let makespan = timeline.makespan();
    shortest.min(makespan).max(makespan / max_cells as f64)
}

fn paint(bar: &str, kind: Kind, colour: bool) -> String {
    if !colour {
        return bar.to_owned();
    }
    // Black on a light background of the 256-colour palette.
    let background = match kind {
        Kind::Forward => 117,
        Kind::Recompute => 222,
        Kind::Backward => 114,
        Kind::InputGrad => 150,
        Kind::WeightGrad => 182,
    };
    format!("\x1b[30;48;5;{background}m{bar}\x1b[0m")
}
