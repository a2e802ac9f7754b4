//! The scale of the loss under f16.

use crate::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, de};

/// The scaling of the gradient of the loss, so that small gradients do not vanish in f16.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScaling {
    /// By one scale throughout.
    Fixed(f64),
    /// By a scale that falls after overflows and rises after steps without.
    Dynamic(DynamicScaling),
}

/// The numbers of a scale that changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DynamicScaling {
    /// The first scale is 2 to this power.
    pub initial_power: u32,
    /// Steps without overflow after which the scale doubles.
    pub window: u64,
    /// The overflow, counted since the scale last doubled, that halves it for the first time.
    pub hysteresis: u64,
    /// The lowest scale.
    pub min_scale: u64,
}

impl Default for DynamicScaling {
    fn default() -> Self {
        Self {
            initial_power: 32,
            window: 1000,
            hysteresis: 2,
            min_scale: 1,
        }
    }
}

impl DynamicScaling {
    /// The largest scale is 2 to this power. Gradients that are not zero overflow f16 long before,
    /// so it only ends the growth where all of them are.
    pub const MAX_POWER: u32 = 100;
}

impl LossScaling {
    /// Checks the range of every number.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first bad one.
    pub fn validate(&self) -> Result<()> {
        let largest = power(DynamicScaling::MAX_POWER);
        let (setting, found, expected) = match *self {
            Self::Fixed(scale) if !(1.0 / largest..=largest).contains(&scale) => {
                ("scale", scale, "from 2^-100 to 2^100")
            }
            Self::Dynamic(dynamic) if dynamic.initial_power > DynamicScaling::MAX_POWER => (
                "initial_power",
                f64::from(dynamic.initial_power),
                "from 0 to 100",
            ),
            Self::Dynamic(DynamicScaling { window: 0, .. }) => ("window", 0.0, "at least 1"),
            Self::Dynamic(DynamicScaling { hysteresis: 0, .. }) => {
                ("hysteresis", 0.0, "at least 1")
            }
            Self::Dynamic(dynamic)
                if !(1.0..=self.initial()).contains(&(dynamic.min_scale as f64)) =>
            {
                (
                    "min_scale",
                    dynamic.min_scale as f64,
                    "at least 1 and at most the first scale, 2^`initial_power`",
                )
            }
            _ => return Ok(()),
        };
        Err(Error::out_of_range(setting, found, expected))
    }

    /// The first scale.
    fn initial(&self) -> f64 {
        match self {
            Self::Fixed(scale) => *scale,
            Self::Dynamic(dynamic) => power(dynamic.initial_power),
        }
    }
}

fn power(exponent: u32) -> f64 {
    2_f64.powi(exponent.cast_signed())
}

/// The state of a dynamic scale, as a checkpoint keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ScalerState {
    /// The scale.
    #[serde(deserialize_with = "scale")]
    pub scale: f64,
    /// The overflow, counted from here, that halves the scale next.
    pub hysteresis: u64,
    /// Steps without overflow since the last overflow or doubling.
    pub clean_steps: u64,
}

/// Reads a scale, which is more than 0 and finite.
fn scale<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let scale = f64::deserialize(from)?;
    if scale > 0.0 && scale.is_finite() {
        Ok(scale)
    } else {
        let expected = &"a finite loss scale of more than 0";
        Err(de::Error::invalid_value(
            de::Unexpected::Float(scale),
            expected,
        ))
    }
}

/// The scale of the loss, in the same state on every rank, since all of them see the same
/// overflows.
///
/// With hysteresis `h`, which begins with that of the settings, and `clean` steps:
///
/// ```text
/// overflow   clean <- 0; if h = 1: scale <- max(scale / 2, min_scale), otherwise h <- h - 1
/// clean      clean <- clean + 1; if clean = window: scale <- 2 scale, h and clean as at first
/// ```
///
/// ```
/// use merak_zero::{DynamicScaling, LossScaler, LossScaling};
/// let mut scaler = LossScaler::new(LossScaling::Dynamic(DynamicScaling::default()));
/// let mut scale_after_overflow = || {
///     scaler.after_overflow();
///     scaler.scale().log2()
/// };
/// assert_eq!([scale_after_overflow(), scale_after_overflow()], [32.0, 31.0]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaler {
    scaling: LossScaling,
    state: ScalerState,
}

impl LossScaler {
    /// A scaler at its first scale.
    pub fn new(scaling: LossScaling) -> Self {
        let hysteresis = match scaling {
            LossScaling::Fixed(_) => 0,
            LossScaling::Dynamic(dynamic) => dynamic.hysteresis,
        };
        Self {
            scaling,
            state: ScalerState {
                scale: scaling.initial(),
                hysteresis,
                clean_steps: 0,
            },
        }
    }

    /// The scale of the step in hand.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// The state that a checkpoint keeps; `None` of a fixed scale.
    pub fn state(&self) -> Option<ScalerState> {
        matches!(self.scaling, LossScaling::Dynamic(_)).then_some(self.state)
    }

    /// Continues from a checkpoint. A fixed scale stays, and one below the lowest becomes that.
    pub fn restore(&mut self, state: ScalerState) {
        if let LossScaling::Dynamic(dynamic) = self.scaling {
            let scale = state
                .scale
                .clamp(dynamic.min_scale as f64, power(DynamicScaling::MAX_POWER));
            self.state = ScalerState { scale, ..state };
        }
    }

    /// Whether no overflow can bring the scale down.
    pub fn is_at_floor(&self) -> bool {
        match self.scaling {
            LossScaling::Fixed(_) => true,
            LossScaling::Dynamic(dynamic) => self.state.scale <= dynamic.min_scale as f64,
        }
    }

    /// Notes a step that was skipped because a gradient was not finite.
    pub fn after_overflow(&mut self) {
        let (LossScaling::Dynamic(dynamic), state) = (self.scaling, &mut self.state) else {
            return;
        };
        state.clean_steps = 0;
        if state.hysteresis <= 1 {
            state.scale = (state.scale / 2.0).max(dynamic.min_scale as f64);
        } else {
            state.hysteresis -= 1;
        }
    }

    /// Notes a step whose gradients were finite.
    pub fn after_clean(&mut self) {
        let (LossScaling::Dynamic(dynamic), state) = (self.scaling, &mut self.state) else {
            return;
        };
        state.clean_steps += 1;
        if state.clean_steps >= dynamic.window {
            state.scale = (state.scale * 2.0).min(power(DynamicScaling::MAX_POWER));
            state.hysteresis = dynamic.hysteresis;
            state.clean_steps = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes steps, and returns the scale after each: `o` overflows, `c` is clean.
    fn note(scaler: &mut LossScaler, steps: &str) -> Vec<f64> {
        let step = |step| {
            match step {
                'o' => scaler.after_overflow(),
                _ => scaler.after_clean(),
            }
            scaler.scale()
        };
        steps.chars().map(step).collect()
    }

    fn scales(scaling: LossScaling, steps: &str) -> Vec<f64> {
        note(&mut LossScaler::new(scaling), steps)
    }

    /// A dynamic scale from 2^power on.
    fn from(initial_power: u32, window: u64, hysteresis: u64, min_scale: u64) -> LossScaling {
        LossScaling::Dynamic(DynamicScaling {
            initial_power,
            window,
            hysteresis,
            min_scale,
        })
    }

    #[test]
    fn the_scale_follows_the_table() {
        let table: [(LossScaling, &str, &[f64]); 8] = [
            // The first overflow takes the hysteresis, each further one halves.
            (from(4, 1000, 2, 1), "oooo", &[16., 8., 4., 2.]),
            (from(4, 1000, 1, 1), "oo", &[8., 4.]),
            (from(4, 1000, 3, 1), "oooo", &[16., 16., 8., 4.]),
            // Clean steps give no hysteresis back before the scale doubles.
            (from(4, 3, 2, 1), "occo", &[16., 16., 16., 8.]),
            (from(4, 3, 2, 1), "cccoo", &[16., 16., 32., 32., 16.]),
            // An overflow starts the window again.
            (from(4, 3, 2, 1), "ccoccc", &[16., 16., 16., 16., 16., 32.]),
            // The floor holds, and need not be a power of two.
            (from(4, 1, 1, 3), "oooocc", &[8., 4., 3., 3., 6., 12.]),
            (LossScaling::Fixed(7.0), "ooccoo", &[7.; 6]),
        ];
        for (scaling, steps, expected) in table {
            assert_eq!(scales(scaling, steps), expected, "{steps} of {scaling:?}");
        }
    }

    #[test]
    fn a_doubled_scale_has_its_hysteresis_again() {
        let found = scales(from(4, 2, 2, 1), "ooccoo");
        assert_eq!(found, [16., 8., 8., 16., 16., 8.]);
    }

    #[test]
    fn with_the_defaults_the_second_overflow_halves_the_scale() {
        let default = LossScaling::Dynamic(DynamicScaling::default());
        let found = scales(default, "oo");
        assert_eq!(found, [2_f64.powi(32), 2_f64.powi(31)]);
        let clean = scales(default, &"c".repeat(1000));
        assert_eq!(clean[998..], [2_f64.powi(32), 2_f64.powi(33)]);
    }

    #[test]
    fn a_scale_never_ceases_to_be_a_number_of_f32() {
        let found = scales(from(99, 1, 1, 1), "cccc");
        assert_eq!(found, [2_f64.powi(100); 4]);
    }

    #[test]
    fn a_restored_scaler_goes_on_as_if_it_had_not_stopped() {
        let (scaling, steps) = (from(5, 3, 2, 3), "occoccccoo");
        let mut unbroken = LossScaler::new(scaling);
        note(&mut unbroken, steps);
        for cut in 0..steps.len() {
            let [mut saved, mut resumed] = [LossScaler::new(scaling); 2];
            note(&mut saved, &steps[..cut]);
            let state = serde_json::to_string(&saved.state().unwrap()).unwrap();
            resumed.restore(serde_json::from_str(&state).unwrap());
            note(&mut resumed, &steps[cut..]);
            assert_eq!(resumed, unbroken, "cut at {cut}");
        }
    }

    #[test]
    fn a_restored_scale_keeps_to_the_settings_in_use() {
        let low = ScalerState {
            scale: 2.0,
            hysteresis: 1,
            clean_steps: 7,
        };
        let mut scaler = LossScaler::new(from(4, 9, 2, 4));
        scaler.restore(low);
        assert_eq!(scaler.state(), Some(ScalerState { scale: 4.0, ..low }));
        let mut fixed = LossScaler::new(LossScaling::Fixed(64.0));
        fixed.restore(low);
        assert_eq!((fixed.scale(), fixed.state()), (64.0, None));
    }

    #[test]
    fn a_state_without_a_usable_scale_is_refused() {
        for scale in ["0.0", "-2.0", "1e999"] {
            let text = format!(r#"{{"scale":{scale},"hysteresis":1,"clean_steps":0}}"#);
            assert!(
                serde_json::from_str::<ScalerState>(&text).is_err(),
                "{scale}"
            );
        }
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let cases = [
            (
                LossScaling::Fixed(0.0),
                "`scale` is 0, expected from 2^-100 to 2^100",
            ),
            (
                LossScaling::Fixed(f64::NAN),
                "`scale` is NaN, expected from 2^-100 to 2^100",
            ),
            (
                from(101, 1, 1, 1),
                "`initial_power` is 101, expected from 0 to 100",
            ),
            (from(0, 0, 1, 1), "`window` is 0, expected at least 1"),
            (from(0, 1, 0, 1), "`hysteresis` is 0, expected at least 1"),
            (
                from(3, 1, 1, 9),
                "`min_scale` is 9, expected at least 1 and at most the first scale, 2^`initial_power`",
            ),
        ];
        for (scaling, expected) in cases {
            assert_eq!(scaling.validate().unwrap_err().to_string(), expected);
        }
        assert!(from(100, 1, 1, 1).validate().is_ok());
        assert!(LossScaling::Fixed(0.5).validate().is_ok());
    }
}
