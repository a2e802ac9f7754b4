//! The report as text.

use super::{PartitionReport, StageReport, Traffic};
use std::fmt;

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

/// The column that is left out where each rank runs the stage of its number.
const RANK: usize = 1;

/// Columns from here on are aligned to the left.
const FIRST_LEFT: usize = 11;

impl fmt::Display for PartitionReport {
    /// One row per stage and lines that say why; work, traffic and kept values are per microbatch.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![HEADER.map(str::to_owned)];
        rows.extend(self.stages.iter().map(cells));
        let widths: Vec<_> = (0..HEADER.len())
            .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
            .collect();
        let in_turn = self.stages.iter().all(|stage| stage.rank == stage.stage);
        for row in &rows {
            let columns = row.iter().zip(&widths).enumerate();
            let shown = columns.filter(|(column, _)| *column != RANK || !in_turn);
            let aligned = shown.map(|(column, (cell, &width))| {
                if column < FIRST_LEFT {
                    format!("{cell:>width$}")
                } else {
                    format!("{cell:<width$}")
                }
            });
            writeln!(f, "{}", aligned.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        writeln!(f, "segments by {}", self.split)?;
        writeln!(f, "stages by {}", self.layout)?;
        for tied in &self.tied {
            write!(f, "tied {}: stage {} owns it", tied.name, tied.owner)?;
            for (what, stages) in [("shared with", &tied.shared), ("copies on", &tied.copies)] {
                if !stages.is_empty() {
                    let stages: Vec<_> = stages.iter().map(ToString::to_string).collect();
                    write!(f, ", {what} {}", stages.join(", "))?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

fn cells(stage: &StageReport) -> [String; HEADER.len()] {
    let backward = stage.backward.flops + stage.recompute.flops;
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

fn traffic(traffic: Traffic) -> String {
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
