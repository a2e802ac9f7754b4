//! A timeline as a trace that browsers and Perfetto show.

use crate::{Kind, Pair, Span, Timeline, timeline::groups};
use serde::Serialize;

/// The document, in the [Trace Event Format][format].
///
/// [format]: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    trace_events: Vec<Event>,
    display_time_unit: &'static str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Event {
    Name {
        ph: char,
        name: &'static str,
        pid: usize,
        tid: usize,
        args: Name,
    },
    Span {
        ph: char,
        name: String,
        cat: &'static str,
        pid: usize,
        tid: usize,
        ts: f64,
        dur: f64,
        args: Place,
    },
}

#[derive(Serialize)]
struct Name {
    name: String,
}

#[derive(Serialize)]
struct Place {
    stage: usize,
    microbatch: usize,
    /// The action that runs at once with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    with: Option<String>,
}

/// Writes a timeline as JSON for `chrome://tracing` and [Perfetto](https://ui.perfetto.dev): a
/// track for each rank, an event for each action under its name in the schedule, such as `0F3`, and
/// one for two that run at once.
///
/// Times are taken for seconds and written in microseconds, so that a unit of a simulation is a
/// second.
///
/// ```
/// use merak_pipe::{Costs, ScheduleKind, Size, UnitCosts, simulate, trace};
/// let schedule = ScheduleKind::Gpipe.generate(Size::new(2, 1))?;
/// let simulation = simulate(&schedule, &Costs::uniform(UnitCosts::default(), 2))?;
/// let text = trace(&simulation.timeline);
/// let event = concat!(
///     r#"{"ph":"X","name":"1F0","cat":"forward","pid":0,"tid":1,"#,
///     r#""ts":1000000.0,"dur":1000000.0,"#,
/// );
/// assert!(text.contains(event));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[expect(
    clippy::missing_panics_doc,
    reason = "numbers and names are always JSON"
)]
pub fn trace(timeline: &Timeline) -> String {
    let mut trace_events = Vec::new();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        trace_events.push(Event::Name {
            ph: 'M',
            name: "thread_name",
            pid: 0,
            tid: rank,
            args: Name {
                name: format!("rank {rank}"),
            },
        });
        for (span, other) in groups(spans) {
            let pair = other.and_then(|other| Pair::new(span.action, other.action));
            trace_events.push(event(rank, span, pair));
            trace_events.extend(
                other
                    .filter(|_| pair.is_none())
                    .map(|other| event(rank, other, None)),
            );
        }
    }
    let document = Document {
        trace_events,
        display_time_unit: "ms",
    };
    serde_json::to_string(&document).expect("numbers and names are JSON")
}

/// The event of an action, or of the pair that begins with it.
fn event(rank: usize, span: Span, pair: Option<Pair>) -> Event {
    let name = pair.map_or_else(|| span.action.to_string(), |pair| pair.to_string());
    Event::Span {
        ph: 'X',
        name,
        cat: pair.map_or(category(span.action.kind), |_| "overlapped"),
        pid: 0,
        tid: rank,
        ts: span.start * 1e6,
        dur: (span.end - span.start) * 1e6,
        args: Place {
            stage: span.action.stage.0,
            microbatch: span.action.microbatch.0,
            with: pair.map(|pair| pair.backward.to_string()),
        },
    }
}

const fn category(kind: Kind) -> &'static str {
    match kind {
        Kind::Forward => "forward",
        Kind::Recompute => "recompute",
        Kind::Backward => "backward",
        Kind::InputGrad => "input gradient",
        Kind::WeightGrad => "weight gradients",
    }
}
