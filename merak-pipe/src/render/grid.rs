//! A timeline as a text grid, one row per rank.

use crate::{Action, Figure, Kind, Span, Timeline, timeline::groups};
use std::fmt::Write as _;

/// How [`grid`] draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridStyle {
    /// Whether actions get ANSI background colours by kind.
    pub colour: bool,
    /// Most cells of a row; a longer timeline is drawn with more time per cell.
    pub max_cells: usize,
    /// Most columns of a line; longer rows are folded into blocks, each of a window of time.
    pub columns: Option<usize>,
}

impl Default for GridStyle {
    fn default() -> Self {
        Self {
            colour: false,
            max_cells: 400,
            columns: None,
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
    let rows = timeline.ranks.iter().map(|spans| {
        let mut row = Row::default();
        for group in groups(spans) {
            let (span, other) = group;
            // Rounding must not hide an action, so each has a cell of its own.
            let start = cells(span.start).max(row.at);
            let end = cells(span.end).max(start + 1);
            row.idle(start, width);
            let (first, second) = labels(&group);
            let len = (end - start) * width - 1;
            match other {
                None => row.bar(&first, len, span.action.kind),
                Some(other) => {
                    row.bar(&first, first.len(), span.action.kind);
                    let rest = len.saturating_sub(first.len());
                    row.bar(&second, rest, other.action.kind);
                }
            }
            row.text.push((' ', None));
            row.at = end;
        }
        row.idle(cells(timeline.makespan()), width);
        row
    });
    let rows: Vec<_> = rows.collect();
    blocks(&rows, cell, width, style)
}

/// A row of the grid: characters with the kind of their action.
#[derive(Default)]
struct Row {
    text: Vec<(char, Option<Kind>)>,
    /// Cells so far.
    at: usize,
}

impl Row {
    /// Idle cells up to this one.
    fn idle(&mut self, until: usize, width: usize) {
        for _ in self.at..until {
            let cell = format!("{:<width$}", ".");
            self.text.extend(cell.chars().map(|c| (c, None)));
        }
        self.at = self.at.max(until);
    }

    /// A label, filled up to this length.
    fn bar(&mut self, label: &str, len: usize, kind: Kind) {
        let bar = format!("{label:-<len$}");
        self.text.extend(bar.chars().map(|c| (c, Some(kind))));
    }
}

/// The rows, with the ranks before them, in blocks that fit the style's columns. `cell` is the time
/// of a cell and `width` its characters.
fn blocks(rows: &[Row], cell: f64, width: usize, style: GridStyle) -> String {
    let digits = rows.len().saturating_sub(1).to_string().len();
    let total = rows.iter().map(|row| row.at).max().unwrap_or_default();
    let prefix = "rank   ".len() + digits;
    let room = style.columns.unwrap_or(usize::MAX).saturating_sub(prefix);
    let per_block = (room / width).max(1);
    let mut text = String::new();
    for start in (0..total.max(1)).step_by(per_block) {
        if per_block < total {
            let gap = if start == 0 { "" } else { "\n" };
            let end = start.saturating_add(per_block).min(total);
            let [from, to] = [start, end].map(|at| Figure(at as f64 * cell));
            writeln!(text, "{gap}time {from} to {to}").expect("a String takes every write");
        }
        for (rank, row) in rows.iter().enumerate() {
            let begin = (start * width).min(row.text.len());
            let end = begin.saturating_add(per_block.saturating_mul(width));
            let part = painted(&row.text[begin..end.min(row.text.len())], style.colour);
            let line = format!("rank {rank:<digits$}  {part}");
            text.push_str(line.trim_end());
            text.push('\n');
        }
    }
    text
}

/// The characters, those of one kind that stand together in one bar.
fn painted(text: &[(char, Option<Kind>)], colour: bool) -> String {
    let bars = text.chunk_by(|(_, kind), (_, next)| kind == next);
    let bars = bars.map(|bar| {
        let text: String = bar.iter().map(|(c, _)| c).collect();
        match bar.first() {
            Some((_, Some(kind))) => paint(&text, *kind, colour),
            _ => text,
        }
    });
    bars.collect()
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
