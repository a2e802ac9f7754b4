//! Times of steps, and what is left of a run.

use std::{collections::VecDeque, fmt, time::Duration};

/// Mean of the last few step times, and the time left that follows from it.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use merak_trainer::metrics::StepTimes;
///
/// let mut times = StepTimes::new(3);
/// for seconds in [9, 1, 2, 3] {
///     times.push(Duration::from_secs(seconds));
/// }
/// assert_eq!(times.mean(), Some(Duration::from_secs(2)));
/// assert_eq!(times.left(10), Some(Duration::from_secs(20)));
/// ```
#[derive(Debug, Clone)]
pub struct StepTimes {
    window: usize,
    times: VecDeque<Duration>,
}

impl StepTimes {
    /// The mean of the last `window` steps, at least one.
    pub fn new(window: usize) -> Self {
        Self {
            window: window.max(1),
            times: VecDeque::new(),
        }
    }

    /// Adds a step.
    pub fn push(&mut self, time: Duration) {
        if self.times.len() == self.window {
            self.times.pop_front();
        }
        self.times.push_back(time);
    }

    /// Mean time of a step; `None` before the first.
    pub fn mean(&self) -> Option<Duration> {
        let count = u32::try_from(self.times.len())
            .ok()
            .filter(|count| *count > 0)?;
        Some(self.times.iter().sum::<Duration>() / count)
    }

    /// Time that `steps` more steps take.
    pub fn left(&self, steps: usize) -> Option<Duration> {
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        self.mean().map(|mean| mean.saturating_mul(steps))
    }
}

/// The middle of the sorted numbers, the upper one of two; NaN of none.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.get(numbers.len() / 2);
    middle.copied().unwrap_or(f64::NAN)
}

/// A duration as people read it: `8s`, `3m 05s`, `2h 07m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readable(pub Duration);

impl fmt::Display for Readable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0..60 => write!(f, "{seconds}s"),
            60..3600 => write!(f, "{}m {:02}s", seconds / 60, seconds % 60),
            _ => write!(f, "{}h {:02}m", seconds / 3600, seconds / 60 % 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        let readable = |seconds| Readable(Duration::from_secs(seconds)).to_string();
        assert_eq!(
            [readable(8), readable(185), readable(7620)],
            ["8s", "3m 05s", "2h 07m"]
        );
    }

    #[test]
    fn the_median_of_an_even_count_is_the_upper_middle_one() {
        let of = |numbers: &[f64]| median(numbers.to_vec()).to_bits();
        assert_eq!(of(&[9.0, 1.0, 5.0]), 5_f64.to_bits());
        assert_eq!(of(&[4.0, 1.0, 3.0, 2.0]), 3_f64.to_bits());
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn before_the_first_step_nothing_is_known() {
        let times = StepTimes::new(0);
        assert_eq!((times.mean(), times.left(3)), (None, None));
    }
}
