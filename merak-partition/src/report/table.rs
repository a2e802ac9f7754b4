//! The report as text.

use super::{HopBytes, PartitionReport, StageReport};
use std::fmt::{self, Write as _};

const HEADER: [&str; 13] = [
    "stage",
    "rank",
    "segments",
    "parameters",
    "forward",
    "backward",
    "sent (act + grad)",
    "received (act + grad)",
    "kept",
    "live",
    "memory",
    "inputs",
    "modules",
];

/// What the column of memory counts.
const MEMORY: &str = "memory: weights, gradients, optimizer state and kept values; batches and values within a \
    phase come on top";

/// The column that is left out where each rank runs the stage of its number.
const RANK: usize = 1;

/// Columns from here on are aligned to the left.
const FIRST_LEFT: usize = 11;

impl fmt::Display for PartitionReport {
    /// One row per stage and lines that say why; work, traffic and kept values are per microbatch.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(None))
    }
}

impl PartitionReport {
    /// The report as it prints, in lines of at most `columns` characters if given. Columns without
    /// room follow in further tables, and long lists take several lines.
    pub fn to_text(&self, columns: Option<usize>) -> String {
        let mut text = String::new();
        for table in self.tables(columns.unwrap_or(usize::MAX)) {
            for row in table {
                text.push_str(row.trim_end());
                text.push('\n');
            }
        }
        let _ = writeln!(
            text,
            "{MEMORY}\nsegments by {}\nstages by {}",
            self.split, self.layout
        );
        for tied in &self.tied {
            let _ = write!(text, "tied {}: stage {} owns it", tied.name, tied.owner);
            for (what, stages) in [("shared with", &tied.shared), ("copies on", &tied.copies)] {
                if !stages.is_empty() {
                    let stages: Vec<_> = stages.iter().map(ToString::to_string).collect();
                    let _ = write!(text, ", {what} {}", stages.join(", "));
                }
            }
            text.push('\n');
        }
        text
    }

    /// The rows of each table, in tables at most `width` characters wide. Each begins with the
    /// column of stages.
    fn tables(&self, width: usize) -> Vec<Vec<String>> {
        let mut rows = vec![HEADER.map(str::to_owned)];
        rows.extend(self.stages.iter().map(cells));
        let widths: [usize; HEADER.len()] = std::array::from_fn(|column| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        });
        let in_turn = self.stages.iter().all(|stage| stage.rank == stage.stage);
        let shown = (1..HEADER.len()).filter(|column| *column != RANK || !in_turn);
        let mut groups = vec![Vec::new()];
        let mut used = widths[0];
        for column in shown {
            let last = groups.last_mut().expect("there is one from the start");
            if used + GAP.len() + widths[column] <= width || last.is_empty() {
                last.push(column);
            } else {
                groups.push(vec![column]);
                used = widths[0];
            }
            used += GAP.len() + widths[column];
        }
        let table = |columns: &Vec<usize>| {
            let rows = rows.iter();
            rows.flat_map(|row| lines(row, columns, &widths, width))
                .collect()
        };
        groups.iter().map(table).collect()
    }
}

/// The gap between two columns.
const GAP: &str = "  ";

/// A row of a table: its stage and these columns. The last one goes on in further lines if it lacks
/// room.
fn lines(
    row: &[String; HEADER.len()],
    columns: &[usize],
    widths: &[usize; HEADER.len()],
    width: usize,
) -> Vec<String> {
    let mut line = format!("{:>1$}", row[0], widths[0]);
    let mut lines = Vec::new();
    for (place, &column) in columns.iter().enumerate() {
        let (cell, own) = (&row[column], widths[column]);
        line.push_str(GAP);
        let indent = line.chars().count();
        if column < FIRST_LEFT {
            let _ = write!(line, "{cell:>own$}");
        } else if place + 1 < columns.len() || indent + own <= width {
            let _ = write!(line, "{cell:<own$}");
        } else {
            let mut room = width.saturating_sub(indent);
            for (i, item) in cell.split_inclusive(", ").enumerate() {
                let length = item.trim_end().chars().count();
                if i > 0 && length > room {
                    lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
                    room = width.saturating_sub(indent);
                }
                line.push_str(item);
                room = room.saturating_sub(item.chars().count());
            }
        }
    }
    lines.push(line);
    lines
}

fn cells(stage: &StageReport) -> [String; HEADER.len()] {
    let backward = (stage.backward + stage.recompute).flops;
    [
        stage.stage.to_string(),
        stage.rank.to_string(),
        stage.segments.to_string(),
        count(stage.parameters as f64).trim_end().to_owned(),
        format!("{}FLOP", count(stage.forward.flops as f64)),
        format!("{}FLOP", count(backward as f64)),
        traffic(stage.sent),
        traffic(stage.received),
        bytes(stage.kept_bytes),
        stage.live_microbatches.to_string(),
        bytes(stage.memory_bytes),
        if stage.inputs.is_empty() {
            "-".to_owned()
        } else {
            stage.inputs.join(", ")
        },
        stage.modules.join(", "),
    ]
}

fn traffic(traffic: HopBytes) -> String {
    match (traffic.activation_bytes, traffic.gradient_bytes) {
        (0, 0) => "-".to_owned(),
        (activation, gradient) => format!("{} + {}", bytes(activation), bytes(gradient)),
    }
}

/// A count with three digits and a decimal prefix: `3.54 M`.
fn count(count: f64) -> String {
    scaled(count, 1000.0, &["", "k", "M", "G", "T", "P", "E"])
}

/// A size with three digits and a binary prefix: `1.50 MiB`.
fn bytes(bytes: usize) -> String {
    scaled(
        bytes as f64,
        1024.0,
        &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"],
    )
}

fn scaled(mut number: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while number >= 999.5 && unit + 1 < units.len() {
        number /= step;
        unit += 1;
    }
    let decimals = match number {
        _ if unit == 0 => 0,
        n if n < 9.995 => 2,
        n if n < 99.95 => 1,
        _ => 0,
    };
    format!("{number:.decimals$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_without_room_goes_on_below_itself() {
        let mut row: [String; HEADER.len()] = std::array::from_fn(|_| "x".to_owned());
        row[12] = "transformer.wte, transformer.wpe, transformer.h.0-3".to_owned();
        let mut widths = [5; HEADER.len()];
        widths[12] = row[12].len();
        assert_eq!(
            lines(&row, &[2, 12], &widths, 47),
            [
                "    x      x  transformer.wte, transformer.wpe, ",
                "              transformer.h.0-3",
            ]
        );
        assert_eq!(lines(&row, &[2, 12], &widths, usize::MAX).len(), 1);
    }

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        assert_eq!(
            [0.0, 12.0, 999.4, 999.6, 3_544_000.0].map(count),
            ["0 ", "12 ", "999 ", "1.00 k", "3.54 M"]
        );
        assert_eq!(
            [0, 1000, 1536, 1 << 30].map(bytes),
            ["0 B", "0.98 KiB", "1.50 KiB", "1.00 GiB"]
        );
    }
}
