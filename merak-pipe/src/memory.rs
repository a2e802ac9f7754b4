//! Memory of a schedule in bytes: the peak of the values that a rank keeps between its actions.

use crate::{Action, Error, Kind, Result, Schedule, Size, StageId, costs::by_stage};
use serde::Serialize;
use std::collections::BTreeSet;

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
            check_count(list.len(), size)?;
        }
        let mut all = lists.into_iter().flatten();
        let sum = all.try_fold(0_u64, |sum, bytes| sum.checked_add(*bytes));
        let most = sum.and_then(|sum| sum.checked_mul(size.microbatches as u64));
        most.map_or(Err(Error::TooManyBytes), |_| Ok(()))
    }

    /// The same stage by stage, with nothing besides.
    pub fn by_stage(&self) -> Vec<StageBytes> {
        let stages = self.until_input_grad.iter().zip(&self.until_weight_grad);
        let of = |(input, weight): (&u64, &u64)| {
            let kept = input.saturating_add(*weight);
            StageBytes {
                forward: kept,
                kept,
                backward: kept,
                input_half: kept,
                between_halves: *weight,
                weight_half: *weight,
                recompute: kept,
                recomputed: kept,
                backward_after_recompute: kept,
                input_half_after_recompute: kept,
            }
        };
        stages.map(of).collect()
    }
}

/// The bytes of one microbatch on one stage, measured in place of what [`ActivationBytes`] assumes.
///
/// An action needs the most while it runs, and leaves less: `F` leaves what the backward reads, `I`
/// what `W` reads, `B` and `W` nothing. Between `I` and `W` a microbatch may keep more than before:
/// gradients of layers' outputs wait for `W`, and so do values that `I` recomputed.
///
/// ```text
///   forward ─► kept ─┬─► backward ─────────────────────────────────────────────► nothing
///                    ├─► input_half ──────────────────► between_halves ─► weight_half
///                    └─► recompute ─► recomputed ─► after_recompute (either of the two)
/// ```
///
/// ```
/// use merak_pipe::{ScheduleKind, Size, StageBytes};
/// let bytes = StageBytes {
///     forward: 12, kept: 10, backward: 15,
///     input_half: 20, between_halves: 18, weight_half: 18,
///     ..StageBytes::default()
/// };
/// let peaks = |kind: ScheduleKind| kind.generate(Size::new(2, 4))?.peak_bytes_of(&[bytes; 2]);
/// // The first rank keeps 10 bytes of one microbatch while it needs the most for another.
/// assert_eq!(peaks(ScheduleKind::OneFOneB)?, [25, 15]);
/// // 30 bytes wait for the input gradients of three microbatches; the first one takes 20 for 10.
/// assert_eq!(peaks(ScheduleKind::ZbH2)?[0], 40);
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageBytes {
    /// Peak of the forward.
    pub forward: u64,
    /// After the forward.
    pub kept: u64,
    /// Peak of the full backward, recomputation included.
    pub backward: u64,
    /// Peak of the input gradient, recomputation included.
    pub input_half: u64,
    /// After the input gradient.
    pub between_halves: u64,
    /// Peak of the weight gradients.
    pub weight_half: u64,
    /// Peak of a recompute ahead of the backward.
    pub recompute: u64,
    /// After that recompute.
    pub recomputed: u64,
    /// Peak of the full backward after it.
    pub backward_after_recompute: u64,
    /// Peak of the input gradient after it.
    pub input_half_after_recompute: u64,
}

/// The bytes of a microbatch on a stage before, during and after an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Change {
    pub(crate) before: u64,
    pub(crate) during: u64,
    pub(crate) after: u64,
}

impl Change {
    /// The bytes of a rank while the action runs and after it, from those before it.
    pub(crate) fn apply(self, total: u64) -> (u64, u64) {
        let others = total.saturating_sub(self.before);
        (
            others.saturating_add(self.during),
            others.saturating_add(self.after),
        )
    }
}

impl StageBytes {
    /// What an action of a kind does; `is_ahead` says whether an `R` came before it.
    pub(crate) fn change(&self, kind: Kind, is_ahead: bool) -> Change {
        let (before, during, after) = match (kind, is_ahead) {
            (Kind::Forward, _) => (0, self.forward, self.kept),
            (Kind::Recompute, _) => (self.kept, self.recompute, self.recomputed),
            (Kind::Backward, false) => (self.kept, self.backward, 0),
            (Kind::Backward, true) => (self.recomputed, self.backward_after_recompute, 0),
            (Kind::InputGrad, false) => (self.kept, self.input_half, self.between_halves),
            (Kind::InputGrad, true) => (
                self.recomputed,
                self.input_half_after_recompute,
                self.between_halves,
            ),
            (Kind::WeightGrad, _) => (self.between_halves, self.weight_half, 0),
        };
        Change {
            before,
            during,
            after,
        }
    }

    /// The most bytes of all actions.
    pub(crate) fn most(&self) -> u64 {
        let actions = [
            self.forward,
            self.kept,
            self.backward,
            self.halves(),
            self.recompute,
            self.recomputed,
            self.backward_after_recompute,
            self.input_half_after_recompute,
        ];
        actions.into_iter().fold(0, u64::max)
    }

    /// What the halves of a backward need at most, one right after the other.
    pub(crate) fn halves(&self) -> u64 {
        self.input_half
            .max(self.weight_half)
            .max(self.between_halves)
    }

    /// What a microbatch needs at most beside what it keeps, from its forward to its end, if
    /// nothing else runs and the backward is whole or in halves, whichever needs less.
    pub(crate) fn besides(&self) -> u64 {
        let most = self.forward.max(self.backward.min(self.halves()));
        most.saturating_sub(self.kept)
    }
}

/// The most bytes that one rank's actions take at once; stages without bytes count nothing. Where
/// all actions are forwards, a microbatch is free when its forward ends. Sums stop at the largest
/// number.
pub fn rank_peak_bytes(actions: &[Action], bytes: impl Fn(StageId) -> Option<StageBytes>) -> u64 {
    let is_forward_only = actions.iter().all(|action| action.kind == Kind::Forward);
    let (mut total, mut peak) = (0, 0);
    // Microbatches that were recomputed ahead of their backward.
    let mut ahead = BTreeSet::new();
    for action in actions {
        let Some(stage) = bytes(action.stage) else {
            continue;
        };
        let microbatch = (action.stage, action.microbatch);
        let is_ahead = action.kind.moves_gradient() && ahead.remove(&microbatch);
        if action.kind == Kind::Recompute {
            ahead.insert(microbatch);
        }
        let change = stage.change(action.kind, is_ahead);
        let (during, after) = change.apply(total);
        peak = peak.max(during);
        if !is_forward_only {
            total = after;
        }
    }
    peak
}

/// The sum of bytes, which stops at the largest number.
pub(crate) fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// Checks that there are bytes of each stage.
pub(crate) fn check_count(found: usize, size: Size) -> Result<()> {
    if found == size.stages() {
        return Ok(());
    }
    Err(Error::CostCount {
        list: "bytes".into(),
        what: "stages",
        expected: size.stages(),
        found,
    })
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
    /// For each rank the most bytes that the microbatches on its stages take at once, where those
    /// of each stage are known action by action. Sums stop at the largest number.
    ///
    /// # Errors
    /// When the actions do not fit the schedule's size, or the bytes are not those of its stages.
    pub fn peak_bytes_of(&self, stages: &[StageBytes]) -> Result<Vec<u64>> {
        self.placement()?;
        check_count(stages.len(), self.size)?;
        let bytes = |stage: StageId| stages.get(stage.0).copied();
        let ranks = self.actions.iter();
        Ok(ranks
            .map(|actions| rank_peak_bytes(actions, bytes))
            .collect())
    }

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
    fn bytes_by_gradient_are_bytes_of_each_action() {
        let size = Size::new(3, 5);
        for kind in ScheduleKind::ALL {
            let chunks = kind.fixed_chunks().unwrap_or(1);
            let schedule = kind.generate(size.with_chunks(chunks)).unwrap();
            let text = ["I=1:20:3,W=4:5:60", "I=1:20:3:9:8:7,W=4:5:60:3:2:1"][chunks - 1];
            let bytes = ActivationBytes::parse(text, 3 * chunks).unwrap();
            let by_action = schedule.peak_bytes_of(&bytes.by_stage()).unwrap();
            assert_eq!(schedule.peak_bytes(&bytes).unwrap(), by_action, "{kind}");
        }
    }

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
