//! Memory of a schedule in bytes.

use crate::{Error, Kind, Result, Schedule, costs::by_stage};
use serde::Serialize;

/// What one microbatch keeps on each stage, in bytes, told apart by what it is kept for.
///
/// Where backwards are split, an activation that only the input gradient needs is free when `I` ends, and the input
/// of a layer with weights waits for `W`. `B` ends both.
///
/// ```
/// use merak_pipe::{ActivationBytes, ScheduleKind, Size};
/// let bytes = ActivationBytes::parse("I=300,W=100", 2)?;
/// let split = ScheduleKind::ZbH2.generate(Size::new(2, 4))?;
/// let whole = ScheduleKind::OneFOneB.generate(Size::new(2, 4))?;
/// assert_eq!(whole.peak_bytes(&bytes)?, [800, 400]);
/// // Three microbatches are kept on the first rank, one of them for its weight gradients alone.
/// assert_eq!(split.peak_bytes(&bytes)?, [1200, 500]);
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ActivationBytes {
    /// For each stage what waits for the input gradient alone, `I`.
    #[serde(rename = "I")]
    pub until_input_grad: Vec<u64>,
    /// For each stage what waits for the weight gradients, `W`.
    #[serde(rename = "W")]
    pub until_weight_grad: Vec<u64>,
}

impl ActivationBytes {
    /// Reads `I=1048576,W=524288` for so many stages; a list with colons, such as `W=4096:8192`, has one number for each
    /// stage. What is not named is 0.
    ///
    /// # Errors
    /// When the text has another form, names something twice, or a list has not one number per stage.
    pub fn parse(text: &str, stages: usize) -> Result<Self> {
        let mut bytes = Self {
            until_input_grad: vec![0; stages],
            until_weight_grad: vec![0; stages],
        };
        let error = |found: &str| Error::ParseBytes {
            found: found.into(),
        };
        by_stage(text, error, |key, values| {
            let list = match key {
                "I" => &mut bytes.until_input_grad,
                "W" => &mut bytes.until_weight_grad,
                _ => return Ok(false),
            };
            crate::costs::fill("stages", list, values)?;
            Ok(true)
        })?;
        Ok(bytes)
    }
}

impl Schedule {
    /// For each rank the most bytes of activations that it keeps at once, all its stages together.
    ///
    /// # Errors
    /// When the actions do not fit the schedule's size, or the bytes are not those of its stages.
    pub fn peak_bytes(&self, bytes: &ActivationBytes) -> Result<Vec<u64>> {
        let expected = self.placement()?.len();
        for list in [&bytes.until_input_grad, &bytes.until_weight_grad] {
            if list.len() != expected {
                return Err(Error::CostCount {
                    what: "stages",
                    expected,
                    found: list.len(),
                });
            }
        }
        let forward_only = self.is_forward_only();
        let ranks = self.actions.iter().map(|actions| {
            let (mut kept, mut peak) = (0_u64, 0);
            for action in actions {
                let input = bytes.until_input_grad[action.stage.0];
                let weight = bytes.until_weight_grad[action.stage.0];
                let (takes, gives) = match action.kind {
                    Kind::Forward if forward_only => (input.saturating_add(weight), u64::MAX),
                    Kind::Forward => (input.saturating_add(weight), 0),
                    Kind::Backward => (0, input.saturating_add(weight)),
                    Kind::InputGrad => (0, input),
                    Kind::WeightGrad => (0, weight),
                    Kind::Recompute => (0, 0),
                };
                kept = kept.saturating_add(takes);
                peak = peak.max(kept);
                kept = kept.saturating_sub(gives);
            }
            peak
        });
        Ok(ranks.collect())
    }
}
