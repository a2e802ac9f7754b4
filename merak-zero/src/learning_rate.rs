//! Learning-rate schedules: pure functions of the number of steps done.

use crate::{Error, OptimizerConfig, Result};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

merak_mpu::named_enum! {
    /// The shape of a learning-rate schedule, under its name in a configuration.
    ///
    /// With `t` optimizer steps done, `w` warmup steps, `N` steps in all and
    /// `p = (t - w) / max(1, N - w)`, the factor of the learning rate is `t / max(1, w)` while
    /// `t < w` (`wsd` rises from `r` to 1 instead), and then:
    ///
    /// | shape | factor for `t >= w` | keyword arguments |
    /// |---|---|---|
    /// | `linear` | `max(0, 1 - p)` | |
    /// | `cosine` | `max(0, (1 + cos(2 pi c p)) / 2)` | `num_cycles` c, 0.5 |
    /// | `cosine_with_restarts` | `(1 + cos(pi (c p mod 1))) / 2`, 0 from `N` | `num_cycles` c, 1 |
    /// | `constant`, `constant_with_warmup` | 1, the first without warmup | |
    /// | `polynomial` | `((lr-e)(1-p)^k+e)/lr`, `e/lr` after `N` | `power` k, 1; `lr_end` e, 1e-7 |
    /// | `inverse_sqrt` | `sqrt(s / (t - w + s))` | `timescale` s, `w` or else 10000 |
    /// | `wsd` | 1, then over the last `d` steps from 1 to `r` along `decay_type` | see below |
    ///
    /// The table gives a keyword argument with its letter and its default. Those of `wsd` are
    /// `num_decay_steps` d, N/10; `min_lr_ratio` r, 0; `decay_type`, `cosine`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum LrSchedulerType {
        /// Falls in a straight line to 0 at the last step.
        #[default]
        Linear = "linear",
        /// Falls along a cosine; half a cycle ends at 0.
        Cosine = "cosine",
        /// Falls along half a cosine, several times over.
        CosineWithRestarts = "cosine_with_restarts",
        /// The learning rate itself, from the first step.
        Constant = "constant",
        /// The learning rate itself, after the warmup.
        ConstantWithWarmup = "constant_with_warmup",
        /// Falls along a power of the steps that remain.
        Polynomial = "polynomial",
        /// Falls with the square root of the steps done.
        InverseSqrt = "inverse_sqrt",
        /// Warmup, stable, decay.
        #[serde(alias = "warmup_stable_decay")]
        Wsd = "wsd",
    }
}

impl LrSchedulerType {
    /// The keyword arguments that the shape takes.
    const fn takes(self) -> &'static str {
        match self {
            Self::Linear | Self::Constant | Self::ConstantWithWarmup => "none",
            Self::Cosine | Self::CosineWithRestarts => "`num_cycles`",
            Self::Polynomial => "`power` and `lr_end`",
            Self::InverseSqrt => "`timescale`",
            Self::Wsd => "`num_decay_steps`, `min_lr_ratio` and `decay_type`",
        }
    }
}

/// How the `wsd` schedule decays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum DecayType {
    /// Half a cosine.
    #[default]
    #[serde(rename = "cosine")]
    Cosine,
    /// A straight line.
    #[serde(rename = "linear")]
    Linear,
    /// One minus the square root of the progress.
    #[serde(rename = "1-sqrt")]
    OneMinusSqrt,
}

impl DecayType {
    fn factor(self, progress: f64) -> f64 {
        match self {
            Self::Cosine => half_cosine(progress),
            Self::Linear => 1.0 - progress,
            Self::OneMinusSqrt => 1.0 - progress.sqrt(),
        }
    }
}

/// The keyword arguments of all schedules; each shape takes those of its row in
/// [`LrSchedulerType`].
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedulerKwargs {
    /// Cycles of the cosine.
    pub num_cycles: Option<f64>,
    /// Exponent of the polynomial.
    pub power: Option<f64>,
    /// Learning rate at the end of the polynomial.
    pub lr_end: Option<f64>,
    /// Time scale of the inverse square root, in steps.
    pub timescale: Option<u64>,
    /// Length of the decay of `wsd`, in steps.
    pub num_decay_steps: Option<u64>,
    /// Factor at the start of the warmup and at the end of `wsd`.
    pub min_lr_ratio: Option<f64>,
    /// How `wsd` decays.
    pub decay_type: Option<DecayType>,
}

/// A keyword argument that is a number, and what it may be.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct NumberKwarg {
    /// Its name.
    pub name: &'static str,
    /// The legal numbers, in words. The words also say what the other settings must allow.
    pub expected: &'static str,
    /// Whether it counts something.
    pub is_whole: bool,
    /// Whether a number is in range by itself.
    contains: fn(f64) -> bool,
}

impl NumberKwarg {
    /// Whether a number is legal, other settings apart.
    pub fn allows(&self, number: f64) -> bool {
        let is_of_kind = !self.is_whole || number.fract() == 0.0;
        number.is_finite() && is_of_kind && (self.contains)(number)
    }

    fn check(&self, found: f64) -> Result<()> {
        in_range(self.name, found, self.allows(found), self.expected)
    }
}

const NUM_CYCLES: NumberKwarg = NumberKwarg {
    name: "num_cycles",
    expected: "a number of more than 0, under cosine_with_restarts a whole one",
    is_whole: false,
    contains: |number| number > 0.0,
};
const POWER: NumberKwarg = NumberKwarg {
    name: "power",
    expected: "a number of more than 0",
    is_whole: false,
    contains: |number| number > 0.0,
};
const LR_END: NumberKwarg = NumberKwarg {
    name: "lr_end",
    expected: "a number of at least 0 and below the learning rate",
    is_whole: false,
    contains: |number| number >= 0.0,
};
const TIMESCALE: NumberKwarg = NumberKwarg {
    name: "timescale",
    expected: "an integer of at least 1",
    is_whole: true,
    contains: |number| number >= 1.0,
};
const NUM_DECAY_STEPS: NumberKwarg = NumberKwarg {
    name: "num_decay_steps",
    expected: "an integer of at least 0",
    is_whole: true,
    contains: |number| number >= 0.0,
};
const MIN_LR_RATIO: NumberKwarg = NumberKwarg {
    name: "min_lr_ratio",
    expected: "a number from 0 to 1",
    is_whole: false,
    contains: |number| (0.0..=1.0).contains(&number),
};

impl LrSchedulerKwargs {
    /// Every keyword argument that is a number; `decay_type` is the one that is none.
    pub const NUMBERS: [NumberKwarg; 6] = [
        NUM_CYCLES,
        POWER,
        LR_END,
        TIMESCALE,
        NUM_DECAY_STEPS,
        MIN_LR_RATIO,
    ];
}

/// A learning-rate schedule with every number filled in.
///
/// It holds no position: the caller counts the steps done, and steps that were skipped are not
/// among them.
///
/// ```
/// use merak_zero::{LrSchedule, LrSchedulerKwargs, LrSchedulerType};
/// let kwargs = LrSchedulerKwargs::default();
/// let schedule = LrSchedule::new(LrSchedulerType::Linear, &kwargs, 0.001, 2, 10)?;
/// let factors: Vec<f64> = [0, 1, 2, 6, 10].map(|t| schedule.factor(t)).to_vec();
/// assert_eq!(factors, [0.0, 0.5, 1.0, 0.5, 0.0]);
/// assert_eq!(schedule.lr(6), 0.0005);
/// # Ok::<(), merak_zero::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    shape: Shape,
    lr: f64,
    warmup: u64,
    total: u64,
}

/// A shape with its keyword arguments resolved.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    Linear,
    Cosine {
        cycles: f64,
    },
    Restarts {
        cycles: f64,
    },
    Constant,
    Polynomial {
        power: f64,
        end_ratio: f64,
    },
    InverseSqrt {
        timescale: f64,
    },
    Wsd {
        decay_steps: u64,
        min_ratio: f64,
        decay: DecayType,
    },
}

impl LrSchedule {
    /// Builds a schedule for `total` optimizer steps, of which the first `warmup` warm up, at peak
    /// learning rate `lr`.
    ///
    /// # Errors
    /// When a keyword argument is out of range or belongs to another shape, or `lr` is negative.
    pub fn new(
        kind: LrSchedulerType,
        kwargs: &LrSchedulerKwargs,
        lr: f64,
        warmup: u64,
        total: u64,
    ) -> Result<Self> {
        let legal = (0.0..=OptimizerConfig::MAX_NUMBER).contains(&lr);
        in_range("lr", lr, legal, "from 0 to 1e37")?;
        refuse_foreign_kwargs(kind, kwargs)?;
        let warmup = if kind == LrSchedulerType::Constant {
            0
        } else {
            warmup
        };
        Ok(Self {
            shape: Shape::resolve(kind, kwargs, lr, warmup, total)?,
            lr,
            warmup,
            total,
        })
    }

    /// The factor of the learning rate after `t` optimizer steps, that is, for step `t + 1`.
    pub fn factor(&self, t: u64) -> f64 {
        if t < self.warmup {
            let least = self.shape.warmup_start();
            return t as f64 / self.warmup as f64 * (1.0 - least) + least;
        }
        let after_warmup = (t - self.warmup) as f64;
        let progress = after_warmup / self.total.saturating_sub(self.warmup).max(1) as f64;
        match self.shape {
            Shape::Constant => 1.0,
            Shape::Linear => (1.0 - progress).max(0.0),
            Shape::Cosine { cycles } => half_cosine(2.0 * cycles * progress).max(0.0),
            Shape::Restarts { .. } if progress >= 1.0 => 0.0,
            Shape::Restarts { cycles } => half_cosine((cycles * progress) % 1.0),
            Shape::Polynomial { end_ratio, .. } if t > self.total => end_ratio,
            Shape::Polynomial { power, end_ratio } => {
                (1.0 - end_ratio) * (1.0 - progress).max(0.0).powf(power) + end_ratio
            }
            Shape::InverseSqrt { timescale } => (timescale / (after_warmup + timescale)).sqrt(),
            Shape::Wsd {
                decay_steps,
                min_ratio,
                decay,
            } => {
                let start = self.total.saturating_sub(decay_steps);
                match t {
                    _ if t < start => 1.0,
                    _ if t >= self.total => min_ratio,
                    _ => {
                        let shape = decay.factor((t - start) as f64 / decay_steps as f64);
                        shape * (1.0 - min_ratio) + min_ratio
                    }
                }
            }
        }
    }

    /// The learning rate after `t` optimizer steps.
    pub fn lr(&self, t: u64) -> f64 {
        self.lr * self.factor(t)
    }

    /// The number of warmup steps in use.
    pub fn warmup(&self) -> u64 {
        self.warmup
    }
}

impl Shape {
    /// The factor that the warmup rises from.
    fn warmup_start(self) -> f64 {
        match self {
            Self::Wsd { min_ratio, .. } => min_ratio,
            _ => 0.0,
        }
    }

    fn resolve(
        kind: LrSchedulerType,
        kwargs: &LrSchedulerKwargs,
        lr: f64,
        warmup: u64,
        total: u64,
    ) -> Result<Self> {
        Ok(match kind {
            LrSchedulerType::Linear => Self::Linear,
            LrSchedulerType::Constant | LrSchedulerType::ConstantWithWarmup => Self::Constant,
            LrSchedulerType::Cosine => {
                let cycles = kwargs.num_cycles.unwrap_or(0.5);
                NUM_CYCLES.check(cycles)?;
                Self::Cosine { cycles }
            }
            LrSchedulerType::CosineWithRestarts => {
                let cycles = kwargs.num_cycles.unwrap_or(1.0);
                let legal = NUM_CYCLES.allows(cycles) && cycles.fract() == 0.0;
                in_range(NUM_CYCLES.name, cycles, legal, NUM_CYCLES.expected)?;
                Self::Restarts { cycles }
            }
            LrSchedulerType::Polynomial => {
                let power = kwargs.power.unwrap_or(1.0);
                POWER.check(power)?;
                let end = kwargs.lr_end.unwrap_or(1e-7);
                let legal = LR_END.allows(end) && end < lr;
                in_range(LR_END.name, end, legal, LR_END.expected)?;
                let end_ratio = end / lr;
                Self::Polynomial { power, end_ratio }
            }
            LrSchedulerType::InverseSqrt => {
                let default = if warmup > 0 { warmup } else { 10_000 };
                let timescale = kwargs.timescale.unwrap_or(default) as f64;
                TIMESCALE.check(timescale)?;
                Self::InverseSqrt { timescale }
            }
            LrSchedulerType::Wsd => {
                let decay_steps = kwargs.num_decay_steps.unwrap_or(total / 10);
                if decay_steps > total {
                    return Err(Error::LongDecay { decay_steps, total });
                }
                let min_ratio = kwargs.min_lr_ratio.unwrap_or(0.0);
                MIN_LR_RATIO.check(min_ratio)?;
                let decay = kwargs.decay_type.unwrap_or_default();
                Self::Wsd {
                    decay_steps,
                    min_ratio,
                    decay,
                }
            }
        })
    }
}

/// The number of warmup steps: `warmup_steps` when it is positive, else `warmup_ratio` of the
/// `total`, rounded up.
///
/// ```
/// assert_eq!(merak_zero::warmup_steps(0, 0.03, 101), 4);
/// assert_eq!(merak_zero::warmup_steps(7, 0.03, 101), 7);
/// ```
pub fn warmup_steps(warmup_steps: u64, warmup_ratio: f64, total: u64) -> u64 {
    if warmup_steps > 0 {
        return warmup_steps;
    }
    (total as f64 * warmup_ratio).ceil().max(0.0) as u64
}

/// From 1 at 0 to 0 at 1.
fn half_cosine(x: f64) -> f64 {
    0.5 * (1.0 + (PI * x).cos())
}

fn in_range(setting: &'static str, found: f64, legal: bool, expected: &'static str) -> Result<()> {
    if legal && found.is_finite() {
        return Ok(());
    }
    Err(Error::number_out_of_range(setting, found, expected))
}

fn refuse_foreign_kwargs(kind: LrSchedulerType, kwargs: &LrSchedulerKwargs) -> Result<()> {
    use LrSchedulerType as T;
    let wsd = kind == T::Wsd;
    let given = [
        (
            "num_cycles",
            kwargs.num_cycles.is_some(),
            matches!(kind, T::Cosine | T::CosineWithRestarts),
        ),
        ("power", kwargs.power.is_some(), kind == T::Polynomial),
        ("lr_end", kwargs.lr_end.is_some(), kind == T::Polynomial),
        (
            "timescale",
            kwargs.timescale.is_some(),
            kind == T::InverseSqrt,
        ),
        ("num_decay_steps", kwargs.num_decay_steps.is_some(), wsd),
        ("min_lr_ratio", kwargs.min_lr_ratio.is_some(), wsd),
        ("decay_type", kwargs.decay_type.is_some(), wsd),
    ];
    match given
        .into_iter()
        .find(|&(_, is_set, taken)| is_set && !taken)
    {
        None => Ok(()),
        Some((kwarg, ..)) => Err(Error::ForeignKwarg {
            kwarg,
            schedule: kind.as_str(),
            takes: kind.takes(),
        }),
    }
}
