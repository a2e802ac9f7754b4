//! A timeline as a picture.

use super::colour::{CRITICAL, INK, LEGEND, fill};
use crate::{Action, Schedule, Simulation, Span, timeline::groups};
use std::{collections::BTreeMap, fmt::Write as _};

const LEFT: f64 = 70.0;
const TOP: f64 = 84.0;
const ROW: f64 = 34.0;
const BAR: f64 = 26.0;
/// Room of a letter in a bar.
const LETTER: f64 = 6.6;
/// The most actions that get bars of their own, with titles; more actions are drawn as one shape
/// for each kind.
const MOST_TITLED: usize = 4_000;

/// Draws a simulated schedule as an SVG document: a row for each rank, time to the right, a bar for
/// each action, the critical path outlined, the figures above. The stages of a rank differ in
/// shade, and by their number where there is room. The halves of one bar run at once; a line joins
/// two actions that would run at once if that gained anything.
///
/// Stands alone: no fonts, scripts or files are needed to show it, and it is dark where its reader
/// prefers that. Every bar has a title with its times, up to 4,000 of them. The picture of the
/// largest schedule that can be looked at, some 25,000 actions, stays below a megabyte.
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
    Picture::new(schedule, simulation).draw()
}

/// The picture while it is drawn.
struct Picture<'a> {
    schedule: &'a Schedule,
    simulation: &'a Simulation,
    /// Pixels for a unit of time.
    scale: f64,
    /// Space between bars: thinner where they are narrow.
    gap: f64,
    /// By stage: its index among its rank's.
    chunks: Vec<usize>,
    titled: bool,
    out: String,
}

/// Where a bar lies in its row.
#[derive(Clone, Copy)]
struct Place {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

impl<'a> Picture<'a> {
    fn new(schedule: &'a Schedule, simulation: &'a Simulation) -> Self {
        let spans = simulation.timeline.ranks.iter().flatten();
        let titled = spans.clone().count() <= MOST_TITLED;
        let times = spans.map(|span| span.end - span.start);
        let shortest = times
            .filter(|time| *time > 0.0)
            .fold(f64::INFINITY, f64::min);
        let makespan = simulation.makespan;
        // The shortest action that takes time has room for its name, as far as the picture can
        // still be shown.
        let widest = if titled { 20_000.0 } else { 5_000.0 };
        let scale = if makespan > 0.0 && shortest.is_finite() {
            (32.0 / shortest).min(widest / makespan)
        } else {
            1.0
        };
        Self {
            schedule,
            simulation,
            scale,
            gap: (0.1 * shortest * scale).min(1.0),
            chunks: chunks(schedule),
            titled,
            out: String::new(),
        }
    }

    fn draw(mut self) -> String {
        let ranks = self.simulation.timeline.ranks.len() as f64;
        let width = (LEFT + self.simulation.makespan * self.scale + 20.0).max(900.0);
        let height = TOP + ranks * ROW + 44.0;
        self.line(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\">"
        ));
        self.line(format_args!(
            "<style>.p{{fill:#fff}}.t{{fill:{INK}}}.i{{fill:#f1f3f5}}.a{{stroke:#ced4da}}.l{{fill:{INK};text-anchor:middle;pointer-events:none}}\
             .c{{fill:none;stroke:{CRITICAL}}}.o{{fill:none;stroke:#495057;stroke-width:2}}\
             @media (prefers-color-scheme:dark){{.p{{fill:#16191d}}.t{{fill:#e9ecef}}.i{{fill:#24292f}}.a{{stroke:#495057}}.o{{stroke:#adb5bd}}}}</style>"
        ));
        self.line(format_args!(
            "<rect class=\"p\" width=\"100%\" height=\"100%\"/>"
        ));
        self.header();
        self.axis(TOP + ranks * ROW);
        for rank in 0..self.simulation.timeline.ranks.len() {
            self.row(rank);
        }
        self.legend(TOP + ranks * ROW + 14.0);
        self.out.push_str("</svg>\n");
        self.out
    }

    fn header(&mut self) {
        let (schedule, simulation) = (self.schedule, self.simulation);
        let peaks = simulation.peak_activations.iter();
        let peaks: Vec<_> = peaks.map(|peak| round(*peak).to_string()).collect();
        self.line(format_args!(
            "<text class=\"t\" x=\"10\" y=\"22\" font-size=\"16\" font-weight=\"bold\">{}</text>",
            escape(&schedule.name),
        ));
        self.line(format_args!(
            "<text class=\"t\" x=\"10\" y=\"44\">P {}, M {}, chunks {}: makespan {}, bubble {:.1} %, longest rank {}, peak activations {}</text>",
            schedule.size.ranks,
            schedule.size.microbatches,
            schedule.size.chunks,
            round(simulation.makespan),
            100.0 * simulation.bubble(),
            round(simulation.longest_rank_time()),
            peaks.join(" "),
        ));
    }

    /// Times above the rows, with a line through all of them.
    fn axis(&mut self, bottom: f64) {
        let step = tick(70.0 / self.scale);
        let count = (self.simulation.makespan / step) as usize;
        for time in (0..=count).map(|tick| tick as f64 * step) {
            let x = LEFT + time * self.scale;
            self.line(format_args!(
                "<path class=\"a\" d=\"M{x:.1} {:.0}V{bottom:.0}\"/><text class=\"t\" x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\" font-size=\"11\">{}</text>",
                TOP - 6.0,
                TOP - 10.0,
                round(time),
            ));
        }
    }

    fn row(&mut self, rank: usize) {
        let simulation = self.simulation;
        let y = TOP + rank as f64 * ROW;
        let idle = simulation.makespan * self.scale;
        self.line(format_args!(
            "<text class=\"t\" x=\"10\" y=\"{:.0}\">rank {rank}</text><g transform=\"translate({LEFT} {y:.0})\"><rect class=\"i\" width=\"{idle:.1}\" height=\"{BAR}\"/>",
            y + 17.0,
        ));
        let spans = &simulation.timeline.ranks[rank];
        let mut bars: Vec<(Span, Place)> = Vec::with_capacity(spans.len());
        for (span, other) in groups(spans) {
            let height = if other.is_some() { BAR / 2.0 } else { BAR };
            bars.push((span, self.place(span, 0.0, height)));
            bars.extend(other.map(|other| (other, self.place(other, BAR / 2.0, height))));
        }
        if self.titled {
            for (span, place) in &bars {
                self.bar(*span, *place);
            }
        } else {
            self.shapes(&bars);
        }
        let several = self.schedule.size.chunks > 1;
        for (span, place) in &bars {
            self.label(span.action, *place, several);
        }
        self.joins(rank);
        self.outlines(&bars);
        self.line(format_args!("</g>"));
    }

    fn place(&self, span: Span, y: f64, height: f64) -> Place {
        let width = (span.end - span.start) * self.scale;
        Place {
            x: span.start * self.scale,
            y,
            width: (width - self.gap).max(0.0),
            height,
        }
    }

    fn fill(&self, action: Action) -> String {
        let chunk = self.chunks.get(action.stage.0).copied().unwrap_or(0);
        fill(action.kind, chunk, self.schedule.size.chunks)
    }

    fn bar(&mut self, span: Span, place: Place) {
        let Place {
            x,
            y,
            width,
            height,
        } = place;
        let fill = self.fill(span.action);
        self.line(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{fill}\"><title>{}: {} to {}</title></rect>",
            span.action,
            round(span.start),
            round(span.end),
        ));
    }

    /// The bars of a row, one shape for each colour.
    fn shapes(&mut self, bars: &[(Span, Place)]) {
        let mut shapes: BTreeMap<String, String> = BTreeMap::new();
        for (span, place) in bars {
            let shape = shapes.entry(self.fill(span.action)).or_default();
            outline(shape, *place);
        }
        for (fill, shape) in shapes {
            self.line(format_args!("<path fill=\"{fill}\" d=\"{shape}\"/>"));
        }
    }

    fn label(&mut self, action: Action, place: Place, with_stage: bool) {
        let Action {
            stage,
            kind,
            microbatch,
        } = action;
        let short = format!("{}{microbatch}", kind.letter());
        let text = if with_stage {
            format!("{stage}{short}")
        } else {
            short
        };
        if place.width >= LETTER * text.len() as f64 + 2.0 {
            self.line(format_args!(
                "<text class=\"l\" x=\"{:.1}\" y=\"{:.0}\"{}>{text}</text>",
                place.x + place.width / 2.0,
                place.y + place.height / 2.0 + 4.0,
                if place.height < BAR {
                    " font-size=\"11\""
                } else {
                    ""
                },
            ));
        }
    }

    /// A line below two actions that could run at once and run one after the other.
    fn joins(&mut self, rank: usize) {
        let spans = &self.simulation.timeline.ranks[rank];
        let mut path = String::new();
        let own = self.schedule.pairs.range((rank, 0)..(rank + 1, 0));
        for &(_, position) in own {
            if let (Some(first), Some(second)) = (spans.get(position), spans.get(position + 1))
                && second.start >= first.end
            {
                let (from, to) = (first.start * self.scale, second.end * self.scale);
                write!(
                    path,
                    "M{:.1} {}H{:.1}",
                    from + 1.0,
                    BAR + 2.5,
                    to - self.gap - 1.0
                )
                .expect("a String takes every write");
            }
        }
        if !path.is_empty() {
            self.line(format_args!("<path class=\"o\" d=\"{path}\"/>"));
        }
    }

    /// The critical path, inside its bars, so that no other bar covers it.
    fn outlines(&mut self, bars: &[(Span, Place)]) {
        let critical = &self.simulation.critical_path;
        let of_rank: std::collections::BTreeSet<Action> = critical.iter().copied().collect();
        let mut shape = String::new();
        let mut narrowest = f64::INFINITY;
        for (_, place) in bars
            .iter()
            .filter(|(span, _)| of_rank.contains(&span.action))
        {
            narrowest = narrowest.min(place.width);
        }
        let stroke = (narrowest / 4.0).clamp(0.1, 2.0);
        for (_, place) in bars
            .iter()
            .filter(|(span, _)| of_rank.contains(&span.action))
        {
            let inside = Place {
                x: place.x + stroke / 2.0,
                y: place.y + stroke / 2.0,
                width: (place.width - stroke).max(0.0),
                height: place.height - stroke,
            };
            outline(&mut shape, inside);
        }
        if !shape.is_empty() {
            self.line(format_args!(
                "<path class=\"c\" stroke-width=\"{stroke:.1}\" d=\"{shape}\"/>"
            ));
        }
    }

    fn legend(&mut self, y: f64) {
        for (place, (kind, text)) in LEGEND.into_iter().enumerate() {
            let x = 10.0 + place as f64 * 150.0;
            let fill = fill(kind, 0, 1);
            self.line(format_args!(
                "<rect x=\"{x}\" y=\"{y:.1}\" width=\"14\" height=\"14\" fill=\"{fill}\"/><text class=\"t\" x=\"{}\" y=\"{:.1}\">{text}</text>",
                x + 19.0,
                y + 11.5,
            ));
        }
        self.line(format_args!(
            "<rect class=\"c\" stroke-width=\"2\" x=\"761\" y=\"{:.1}\" width=\"12\" height=\"12\"/><text class=\"t\" x=\"779\" y=\"{:.1}\">critical path</text>",
            y + 1.0,
            y + 11.5,
        ));
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        writeln!(self.out, "{text}").expect("a String takes every write");
    }
}

/// For each stage its index among its rank's.
fn chunks(schedule: &Schedule) -> Vec<usize> {
    let stages = schedule.size.stages();
    let Ok(placement) = schedule.placement() else {
        return vec![0; stages];
    };
    let before = |stage: usize| {
        let earlier = placement[..stage].iter();
        earlier.filter(|rank| **rank == placement[stage]).count()
    };
    (0..stages).map(before).collect()
}

fn outline(shape: &mut String, place: Place) {
    let Place {
        x,
        y,
        width,
        height,
    } = place;
    let (y, height) = (round(y), round(height));
    write!(shape, "M{x:.1} {y}h{width:.1}v{height}h-{width:.1}z")
        .expect("a String takes every write");
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `least`.
pub(super) fn tick(least: f64) -> f64 {
    let power = 10_f64.powf(least.max(f64::MIN_POSITIVE).log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    let fits = steps.into_iter().find(|step| *step >= least * (1.0 - 1e-9));
    fits.unwrap_or(10.0 * power)
}

/// Up to three decimals.
pub(super) fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Names may come from a user's file. XML has no control characters.
pub(super) fn escape(text: &str) -> String {
    let text = text.replace(char::is_control, "");
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}
