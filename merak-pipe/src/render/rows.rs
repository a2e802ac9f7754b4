//! Several timelines of the same ranks in one picture.

use super::{
    colour::{INK, LEGEND, fill},
    svg::{escape, round, tick},
};
use crate::{Span, Timeline, timeline::groups};
use std::{collections::BTreeSet, fmt::Write as _};

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 132.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 30.0;
const BAR: f64 = 22.0;
const ROW: f64 = BAR + 2.0;
/// Room between two ranks.
const GAP: f64 = 10.0;
/// Room of a letter in a bar.
const LETTER: f64 = 7.2;

/// Draws timelines of the same ranks one above the other on one axis, as an SVG document: for each
/// rank a row of each timeline, under its name, such as `planned` and `real`. Times are taken for
/// seconds, and the axis is in milliseconds. Timelines start where they say: move them to 0 first.
///
/// Stands alone, in a page or as a file: no fonts, scripts or files are needed to show it, it is
/// dark where its reader prefers that, and as wide as its place. The classes of its style begin
/// with `mt-`. Every bar has a title with its times.
///
/// ```
/// use merak_pipe::{Costs, ScheduleKind, Size, UnitCosts, simulate, timelines};
/// let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 4))?;
/// let simulation = simulate(&schedule, &Costs::uniform(UnitCosts::default(), 2))?;
/// let picture = timelines(&[("planned", &simulation.timeline), ("real", &simulation.timeline)]);
/// assert!(picture.starts_with("<svg") && picture.contains("rank 1 real"));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn timelines(rows: &[(&str, &Timeline)]) -> String {
    let ranks = rows.iter().map(|(_, timeline)| timeline.ranks.len());
    let ranks = ranks.max().unwrap_or(0);
    let ends = rows.iter().map(|(_, timeline)| timeline.makespan());
    let end = ends.fold(0.0, f64::max);
    let scale = if end > 0.0 {
        (WIDTH - LEFT - RIGHT) / end
    } else {
        1.0
    };
    let block = rows.len() as f64 * ROW + GAP;
    let bottom = TOP + ranks as f64 * block;
    let mut out = String::new();
    let mut line = |text: std::fmt::Arguments<'_>| {
        writeln!(out, "{text}").expect("a String takes every write");
    };
    line(format_args!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {:.0}\" width=\"100%\" font-family=\"sans-serif\" font-size=\"12\">",
        bottom + 24.0
    ));
    line(format_args!(
        "<style>.mt-t{{fill:{INK}}}.mt-i{{fill:#f1f3f5}}.mt-a{{stroke:#ced4da}}.mt-l{{fill:{INK};text-anchor:middle;pointer-events:none}}\
         @media (prefers-color-scheme:dark){{.mt-t{{fill:#e9ecef}}.mt-i{{fill:#24292f}}.mt-a{{stroke:#495057}}}}</style>"
    ));
    let step = tick(70.0 * 1e3 / scale);
    for time in (0..=(1e3 * end / step) as usize).map(|tick| tick as f64 * step) {
        let x = LEFT + time * scale / 1e3;
        line(format_args!(
            "<path class=\"mt-a\" d=\"M{x:.1} {:.0}V{bottom:.0}\"/><text class=\"mt-t\" x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\" font-size=\"11\">{} ms</text>",
            TOP - 6.0,
            TOP - 12.0,
            round(time),
        ));
    }
    for rank in 0..ranks {
        for (place, (name, timeline)) in rows.iter().enumerate() {
            let y = TOP + rank as f64 * block + place as f64 * ROW;
            let spans = timeline.ranks.get(rank).map_or(&[][..], Vec::as_slice);
            line(format_args!(
                "<text class=\"mt-t\" x=\"4\" y=\"{:.0}\">rank {rank} {}</text><rect class=\"mt-i\" x=\"{LEFT}\" y=\"{y:.0}\" width=\"{:.1}\" height=\"{BAR}\"/>{}",
                y + 15.0,
                escape(name),
                end * scale,
                bars(spans, y, scale),
            ));
        }
    }
    line(format_args!("{}</svg>", legend(rows, bottom)));
    out
}

/// The bars of a row; two that ran at once share it.
fn bars(spans: &[Span], y: f64, scale: f64) -> String {
    let stages: BTreeSet<_> = spans.iter().map(|span| span.action.stage).collect();
    let stages: Vec<_> = stages.into_iter().collect();
    let mut out = String::new();
    for (span, other) in groups(spans) {
        let height = if other.is_some() { BAR / 2.0 } else { BAR };
        let both = [(span, y), (other.unwrap_or(span), y + height)];
        for (span, y) in both.into_iter().take(1 + usize::from(other.is_some())) {
            let chunk = stages.iter().position(|stage| *stage == span.action.stage);
            let fill = fill(span.action.kind, chunk.unwrap_or(0), stages.len());
            let x = LEFT + span.start * scale;
            let width = ((span.end - span.start) * scale - 0.5).max(0.3);
            let _ = write!(
                out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\"><title>{}: {} to {} ms</title></rect>",
                span.action,
                round(1e3 * span.start),
                round(1e3 * span.end),
            );
            let text = format!("{}{}", span.action.kind.letter(), span.action.microbatch);
            if width >= LETTER * text.len() as f64 + 3.0 && height == BAR {
                let _ = write!(
                    out,
                    "<text class=\"mt-l\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
                    x + width / 2.0,
                    y + 15.0
                );
            }
        }
    }
    out
}

/// The kinds of actions that there are.
fn legend(rows: &[(&str, &Timeline)], bottom: f64) -> String {
    let spans = rows
        .iter()
        .flat_map(|(_, timeline)| timeline.ranks.iter().flatten());
    let kinds: BTreeSet<char> = spans.map(|span| span.action.kind.letter()).collect();
    let shown = LEGEND
        .into_iter()
        .filter(|(kind, _)| kinds.contains(&kind.letter()));
    let entries = shown.enumerate().map(|(place, (kind, text))| {
        let (x, fill) = (LEFT + place as f64 * 150.0, fill(kind, 0, 1));
        format!(
            "<rect x=\"{x}\" y=\"{:.0}\" width=\"14\" height=\"14\" fill=\"{fill}\"/><text class=\"mt-t\" x=\"{}\" y=\"{:.1}\">{text}</text>",
            bottom + 4.0,
            x + 19.0,
            bottom + 15.5,
        )
    });
    entries.collect()
}
