//! A timeline as a picture.

use crate::{Action, Kind, Schedule, Simulation, Span};
use std::fmt::Write as _;

const LEFT: f64 = 70.0;
const TOP: f64 = 64.0;
const ROW: f64 = 34.0;
const BAR: f64 = 26.0;
/// Narrower bars carry no text.
const MIN_LABEL: f64 = 22.0;

/// Draws a simulated schedule as an SVG document: a row for each rank, time to the right, a bar for each
/// action, the critical path outlined, the figures above. Chunks of a rank differ in shade.
///
/// Stands alone: no fonts, scripts or files are needed to show it. Every bar has a title with its times.
///
/// ```
/// use merak_pipe::{Costs, ScheduleKind, Size, UnitCosts, simulate, svg};
/// let schedule = ScheduleKind::ZbH1.generate(Size::new(3, 6))?;
/// let simulation = simulate(&schedule, &Costs::uniform(UnitCosts::default(), 3))?;
/// let picture = svg(&schedule, &simulation);
/// assert!(picture.starts_with("<svg") && picture.contains("<title>1I2: "));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn svg(schedule: &Schedule, simulation: &Simulation) -> String {
    let ranks = simulation.timeline.ranks.len() as f64;
    let scale = scale(simulation);
    let width = LEFT + simulation.makespan * scale + 20.0;
    let width = width.max(760.0);
    let height = TOP + ranks * ROW + 44.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    header(&mut out, schedule, simulation);
    let mut critical = simulation.critical_path.clone();
    critical.sort_unstable();
    for (rank, spans) in simulation.timeline.ranks.iter().enumerate() {
        let y = TOP + rank as f64 * ROW;
        let idle = simulation.makespan * scale;
        line(
            &mut out,
            format_args!(
                "<text x=\"10\" y=\"{:.1}\">rank {rank}</text><rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{idle:.2}\" height=\"{BAR}\" fill=\"#f1f3f5\"/>",
                y + 17.0,
            ),
        );
        for span in spans {
            let is_critical = critical.binary_search(&span.action).is_ok();
            bar(&mut out, schedule, span, y, scale, is_critical);
        }
    }
    legend(&mut out, TOP + ranks * ROW + 14.0);
    out.push_str("</svg>\n");
    out
}

/// Pixels for a unit of time: the shortest action that takes any has room for its name, but the picture
/// stays below 20,000 pixels.
fn scale(simulation: &Simulation) -> f64 {
    let spans = simulation.timeline.ranks.iter().flatten();
    let times = spans
        .map(|span| span.end - span.start)
        .filter(|time| *time > 0.0);
    let shortest = times.fold(f64::INFINITY, f64::min);
    let makespan = simulation.makespan;
    if makespan > 0.0 && shortest.is_finite() {
        (28.0 / shortest).min(20_000.0 / makespan)
    } else {
        1.0
    }
}

fn header(out: &mut String, schedule: &Schedule, simulation: &Simulation) {
    let peaks = simulation.peak_activations.iter().map(ToString::to_string);
    line(
        out,
        format_args!(
            "<text x=\"10\" y=\"22\" font-size=\"16\" font-weight=\"bold\">{}</text>",
            escape(&schedule.name),
        ),
    );
    line(
        out,
        format_args!(
            "<text x=\"10\" y=\"44\">P {}, M {}, chunks {}: makespan {}, bubble {:.1} %, longest rank {}, peak activations {}</text>",
            schedule.size.ranks,
            schedule.size.microbatches,
            schedule.size.chunks,
            round(simulation.makespan),
            100.0 * simulation.bubble(),
            round(simulation.longest_rank_time()),
            peaks.collect::<Vec<_>>().join(" "),
        ),
    );
}

fn bar(out: &mut String, schedule: &Schedule, span: &Span, y: f64, scale: f64, is_critical: bool) {
    let (x, width) = (LEFT + span.start * scale, (span.end - span.start) * scale);
    let Action {
        stage,
        kind,
        microbatch,
    } = span.action;
    let chunk = stage.0 / schedule.size.ranks.max(1);
    let shade = if chunk.is_multiple_of(2) { 1.0 } else { 0.6 };
    let stroke = if is_critical { "#c92a2a" } else { "#ffffff" };
    line(
        out,
        format_args!(
            "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{BAR}\" fill=\"{}\" fill-opacity=\"{shade}\" stroke=\"{stroke}\"><title>{}: {} to {}</title></rect>",
            colour(kind),
            span.action,
            round(span.start),
            round(span.end),
        ),
    );
    if width >= MIN_LABEL {
        line(
            out,
            format_args!(
                "<text x=\"{:.2}\" y=\"{:.1}\" text-anchor=\"middle\" pointer-events=\"none\">{}{microbatch}</text>",
                x + width / 2.0,
                y + 17.0,
                kind.letter(),
            ),
        );
    }
}

fn legend(out: &mut String, y: f64) {
    let entries = [
        (Kind::Forward, "F forward"),
        (Kind::Backward, "B backward"),
        (Kind::InputGrad, "I input gradient"),
        (Kind::WeightGrad, "W weight gradients"),
        (Kind::Recompute, "R recompute"),
    ];
    for (place, (kind, text)) in entries.into_iter().enumerate() {
        let x = 10.0 + place as f64 * 150.0;
        line(
            out,
            format_args!(
                "<rect x=\"{x}\" y=\"{y:.1}\" width=\"14\" height=\"14\" fill=\"{}\"/><text x=\"{}\" y=\"{:.1}\">{text}</text>",
                colour(kind),
                x + 19.0,
                y + 11.5,
            ),
        );
    }
}

const fn colour(kind: Kind) -> &'static str {
    match kind {
        Kind::Forward => "#74c0fc",
        Kind::Recompute => "#ffd43b",
        Kind::Backward => "#69db7c",
        Kind::InputGrad => "#a9e34b",
        Kind::WeightGrad => "#d0a9f5",
    }
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("a String takes every write");
}

/// Up to three decimals.
fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Names may come from a user's file.
fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}
