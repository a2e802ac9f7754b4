//! Memory of a schedule in bytes.

use crate::{Error, Kind, Result, Schedule, Size, costs::by_stage};
use serde::Serialize;

/// The bytes that one microbatch keeps on each stage, by the gradient that needs them.
///
/// Where backwards are split, an activation that only the input gradient needs is free when `I`
/// ends, and the input of a layer with weights waits for `W`. `B` ends both.
///
/// Gradients that `I` leaves for `W`, of the outputs of layers with weights, belong to `W`'s part.
/// They exist from `I` on only, but count from `F` on, so that a peak is never too low.
///
/// ```
/// use merak_pipe::{ActivationBytes, ScheduleKind, Size};
/// let bytes = ActivationBytes::parse("I=300,W=100", 2)?;
/// let split = ScheduleKind::ZbH2.generate(Size::new(2, 4))?;
/// let whole = ScheduleKind::OneFOneB.generate(Size::new(2, 4))?;
/// assert_eq!(whole.peak_bytes(&bytes)?, [800, 400]);
/// // The first rank keeps three microbatches whole. The second keeps one of three whole: two wait
/// // for their weight gradients alone.
/// assert_eq!(split.peak_bytes(&bytes)?, [1200, 600]);
/// let second = split.peak_bytes_by_grad(&bytes)?[1];
/// assert_eq!((second.until_input_grad, second.until_weight_grad), (300, 300));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ActivationBytes {
    /// By stage: the bytes that wait for the input gradient alone, `I`.
    #[serde(rename = "I")]
    pub until_input_grad: Vec<u64>,
    /// By stage: the bytes that wait for the weight gradients, `W`.
    #[serde(rename = "W")]
    pub until_weight_grad: Vec<u64>,
}

impl ActivationBytes {
    /// Reads `I=1048576,W=524288` for `stages` stages; a list with colons, such as `W=4096:8192`,
    /// has one number for each stage. A part that is not named is 0.
    ///
    /// # Errors
    /// When the text has another form, names a part twice, or a list does not have one number per
    /// stage.
    pub fn parse(text: &str, stages: usize) -> Result<Self> {
        let mut bytes = Self {
            until_input_grad: vec![0; stages],
            until_weight_grad: vec![0; stages],
        };
        let error = |found: &str| Error::ParseBytes {
            found: found.into(),
        };
        by_stage(text, error, |key, values| {
            let (letter, list) = match key {
                "I" => ('I', &mut bytes.until_input_grad),
                "W" => ('W', &mut bytes.until_weight_grad),
                _ => return Ok(false),
            };
            crate::costs::fill("bytes", (letter, "stages"), list, values)?;
            Ok(true)
        })?;
        Ok(bytes)
    }

    /// Checks that each stage has its numbers, and that their sums stay in range.
    pub(crate) fn check(&self, size: Size) -> Result<()> {
        let lists = [&self.until_input_grad, &self.until_weight_grad];
        for list in lists {
            if list.len() != size.stages() {
                return Err(Error::CostCount {
                    list: "bytes".into(),
                    what: "stages",
                    expected: size.stages(),
                    found: list.len(),
                });
            }
        }
        let mut all = lists.into_iter().flatten();
        let sum = all.try_fold(0_u64, |sum, bytes| sum.checked_add(*bytes));
        let most = sum.and_then(|sum| sum.checked_mul(size.microbatches as u64));
        most.map_or(Err(Error::TooManyBytes), |_| Ok(()))
    }

    /// The bytes that a microbatch keeps on a stage at first.
    pub(crate) fn of_stage(&self, stage: usize) -> u64 {
        self.until_input_grad[stage].saturating_add(self.until_weight_grad[stage])
    }
}

/// The most bytes of activations that a rank keeps at once, by the gradient that ends them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PeakBytes {
    /// The bytes that wait for the input gradient, `I`.
    #[serde(rename = "I")]
    pub until_input_grad: u64,
    /// The bytes that wait for the weight gradients, `W`.
    #[serde(rename = "W")]
    pub until_weight_grad: u64,
}

impl PeakBytes {
    /// All bytes.
    pub const fn total(self) -> u64 {
        self.until_input_grad.saturating_add(self.until_weight_grad)
    }
}

impl Schedule {
    /// For each rank the most bytes of activations that it keeps at once, all its stages together.
    ///
    /// # Errors
    /// When the actions do not fit the schedule's size, the bytes are not those of its stages, or
    /// [`Error::TooManyBytes`].
    pub fn peak_bytes(&self, bytes: &ActivationBytes) -> Result<Vec<u64>> {
        let peaks = self.peak_bytes_by_grad(bytes)?.into_iter();
        Ok(peaks.map(PeakBytes::total).collect())
    }

    /// [`Schedule::peak_bytes`] by the gradient that the bytes wait for, at the first moment of the
    /// peak.
    ///
    /// # Errors
    /// As [`Schedule::peak_bytes`].
    pub fn peak_bytes_by_grad(&self, bytes: &ActivationBytes) -> Result<Vec<PeakBytes>> {
        self.placement()?;
        bytes.check(self.size)?;
        let forward_only = self.is_forward_only();
        let ranks = self.actions.iter().map(|actions| {
            let mut live = PeakBytes::default();
            let mut peak = PeakBytes::default();
            for action in actions {
                live.begin(bytes, action.stage.0, action.kind);
                if live.total() > peak.total() {
                    peak = live;
                }
                let ends = if forward_only {
                    Kind::Backward
                } else {
                    action.kind
                };
                live.end(bytes, action.stage.0, ends);
            }
            peak
        });
        Ok(ranks.collect())
    }
}

impl PeakBytes {
    /// Adds the bytes that an action of this kind makes.
    pub(crate) fn begin(&mut self, bytes: &ActivationBytes, stage: usize, kind: Kind) {
        if kind == Kind::Forward {
            let (input, weight) = (&mut self.until_input_grad, &mut self.until_weight_grad);
            *input = input.saturating_add(bytes.until_input_grad[stage]);
            *weight = weight.saturating_add(bytes.until_weight_grad[stage]);
        }
    }

    /// Frees the bytes that nothing needs after an action of this kind.
    pub(crate) fn end(&mut self, bytes: &ActivationBytes, stage: usize, kind: Kind) {
        let (input, weight) = (&mut self.until_input_grad, &mut self.until_weight_grad);
        if kind.moves_gradient() {
            *input = input.saturating_sub(bytes.until_input_grad[stage]);
        }
        if kind.ends_microbatch() {
            *weight = weight.saturating_sub(bytes.until_weight_grad[stage]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScheduleKind;

    #[test]
    fn bytes_that_cannot_be_added_up_are_refused() {
        let size = Size::new(2, 4);
        let schedule = ScheduleKind::OneFOneB.generate(size).unwrap();
        let peaks = |text: &str| {
            let bytes = ActivationBytes::parse(text, 2).unwrap();
            schedule.peak_bytes(&bytes)
        };
        let eighth = u64::MAX / 8;
        assert_eq!(peaks(&format!("I={eighth}")).unwrap()[0], 2 * eighth);
        let error = peaks(&format!("I={eighth}:{eighth},W=0:2")).unwrap_err();
        insta::assert_snapshot!(error, @"the activations of all stages and microbatches together are more than 18446744073709551615 bytes");
        assert!(peaks(&format!("W={}", u64::MAX)).is_err());
    }
}
