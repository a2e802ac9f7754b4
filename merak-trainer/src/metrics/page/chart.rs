//! Lines over the steps of a run.

use std::fmt::Write as _;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 26.0;
/// The most points of a line; more are joined to their means.
const MOST_POINTS: usize = 600;
/// The classes of the first and of the second line.
const CLASSES: [&str; 2] = ["first", "second"];

/// A line: a number at some steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Series {
    pub(super) name: &'static str,
    /// Steps and numbers, ascending.
    pub(super) points: Vec<(f64, f64)>,
}

/// A figure with up to two lines; nothing where no line has a point. `from_zero` begins the axis at
/// 0.
pub(super) fn chart(title: &str, unit: &str, series: &[Series], from_zero: bool) -> String {
    let all = || series.iter().flat_map(|series| &series.points);
    if all().next().is_none() {
        return String::new();
    }
    let bound = |fold: fn(f64, f64) -> f64, start, of: fn(&(f64, f64)) -> f64| {
        all().map(of).fold(start, fold)
    };
    let [first, last] = [
        bound(f64::min, f64::INFINITY, |point| point.0),
        bound(f64::max, f64::NEG_INFINITY, |point| point.0),
    ];
    let least = bound(f64::min, f64::INFINITY, |point| point.1);
    let low = if from_zero { least.min(0.0) } else { least };
    let high = bound(f64::max, f64::NEG_INFINITY, |point| point.1);
    let across = Axis::new(first, last, [LEFT, WIDTH - RIGHT], 6.0);
    let up = Axis::new(low, high, [HEIGHT - BOTTOM, TOP], 4.0).between_ticks();
    let mut out = String::new();
    let _ = write!(out, "<figure><figcaption>{title} <small>{unit}</small>");
    if series.len() > 1 {
        for (series, class) in series.iter().zip(CLASSES) {
            let _ = write!(
                out,
                "<i class=\"key {class}\"></i><small>{}</small>",
                series.name
            );
        }
    }
    let _ = write!(
        out,
        "</figcaption><svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">"
    );
    for tick in up.ticks() {
        let y = up.place(tick);
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{:.0}\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0,
            number(tick, up.step),
        );
    }
    for tick in across.ticks().filter(|tick| tick.fract() == 0.0) {
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{tick}</text>",
            across.place(tick),
            HEIGHT - 8.0,
        );
    }
    for (series, class) in series.iter().zip(CLASSES) {
        out += &line(&series.points, class, [&across, &up]);
    }
    out += "</svg></figure>";
    out
}

/// A line, with dots where its points are few.
fn line(points: &[(f64, f64)], class: &str, [across, up]: [&Axis; 2]) -> String {
    let points = thinned(points);
    let place = |&(step, value): &(f64, f64)| (across.place(step), up.place(value));
    let mut out = String::new();
    let mut path = String::new();
    for point in &points {
        let (x, y) = place(point);
        let _ = write!(
            path,
            "{}{x:.1} {y:.1}",
            if path.is_empty() { 'M' } else { 'L' }
        );
    }
    let _ = write!(out, "<path class=\"line {class}\" d=\"{path}\"/>");
    if points.len() <= 60 {
        for point in &points {
            let (x, y) = place(point);
            let _ = write!(
                out,
                "<circle class=\"dot {class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"><title>step {}: {}</title></circle>",
                point.0,
                number(point.1, point.1.abs() / 1e3),
            );
        }
    }
    out
}

/// The means of equal runs of points.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let run = points.len().div_ceil(MOST_POINTS).max(1);
    let mean = |points: &[(f64, f64)]| {
        let share = 1.0 / points.len() as f64;
        let sum = points
            .iter()
            .fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 * share, sum.1 * share)
    };
    points.chunks(run).map(mean).collect()
}

/// Numbers on a line of pixels.
struct Axis {
    low: f64,
    high: f64,
    pixels: [f64; 2],
    /// Between two ticks: 1, 2 or 5 times a power of ten.
    step: f64,
}

impl Axis {
    fn new(low: f64, high: f64, pixels: [f64; 2], ticks: f64) -> Self {
        // A single number gets room around it.
        let (low, high) = if high > low {
            (low, high)
        } else {
            let room = (0.1 * low.abs()).max(1e-9);
            (low - room, high + room)
        };
        let least = (high - low) / ticks;
        let power = 10_f64.powf(least.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
        let fits = steps.into_iter().find(|step| *step >= least * (1.0 - 1e-9));
        Self {
            low,
            high,
            pixels,
            step: fits.unwrap_or(10.0 * power),
        }
    }

    /// This axis, extended to the tick below and the tick above.
    fn between_ticks(mut self) -> Self {
        self.low = (self.low / self.step).floor() * self.step;
        self.high = (self.high / self.step).ceil() * self.step;
        self
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let (first, last) = (self.low / self.step, self.high / self.step);
        let (first, last) = ((first - 1e-6).ceil() as i64, (last + 1e-6).floor() as i64);
        let step = self.step;
        (first..=last).map(move |tick| tick as f64 * step)
    }

    fn place(&self, value: f64) -> f64 {
        let share = (value - self.low) / (self.high - self.low);
        self.pixels[0] + share * (self.pixels[1] - self.pixels[0])
    }
}

/// A number with the decimals that ticks `step` apart need.
fn number(value: f64, step: f64) -> String {
    let decimals = (-step.abs().max(1e-12).log10().floor()).clamp(0.0, 12.0) as usize;
    match value.abs() {
        size if size >= 1e6 => format!("{}M", trimmed(value / 1e6, 3)),
        size if size >= 1e4 => format!("{}k", trimmed(value / 1e3, 2)),
        size if size < 1e-3 && size > 0.0 => format!("{value:.1e}"),
        _ => format!("{value:.decimals$}"),
    }
}

/// A number without zeros at its end.
fn trimmed(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_around_the_points() {
        let axis = Axis::new(2.38, 5.46, [0.0, 100.0], 4.0).between_ticks();
        let ticks: Vec<_> = axis.ticks().map(|tick| number(tick, axis.step)).collect();
        assert_eq!(ticks, ["2", "3", "4", "5", "6"]);
        let axis = Axis::new(0.0, 31_000.0, [0.0, 100.0], 4.0).between_ticks();
        let ticks: Vec<_> = axis.ticks().map(|tick| number(tick, axis.step)).collect();
        assert_eq!(ticks, ["0", "10k", "20k", "30k", "40k"]);
        let middle = Axis::new(0.02, 0.02, [0.0, 1.0], 4.0).place(0.02);
        assert!((middle - 0.5).abs() < 1e-12, "{middle}");
    }

    #[test]
    fn a_long_line_keeps_its_shape_in_few_points() {
        let points: Vec<_> = (0..5000)
            .map(|i| (f64::from(i), f64::from(i % 10)))
            .collect();
        let few = thinned(&points);
        assert!(few.len() <= MOST_POINTS && few.iter().all(|point| point.1 > 3.0));
        let series = Series {
            name: "loss",
            points,
        };
        assert!(chart("Loss", "", &[series], false).len() < 20_000);
        assert_eq!(chart("Loss", "", &[Series::default()], true), "");
    }
}
