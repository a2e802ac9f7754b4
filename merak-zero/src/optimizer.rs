//! Which update rule, with which hyperparameters.

mod adam;
mod sgd;

pub use adam::{AdamStep, adam_update};
pub use sgd::{SgdStep, sgd_update};

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The update rules of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum OptimizerKind {
    /// [AdamW](https://arxiv.org/abs/1711.05101), algorithm 2: Adam with decoupled weight decay.
    #[default]
    #[serde(rename = "adamw_torch")]
    AdamW,
    /// [Adam](https://arxiv.org/abs/1412.6980), algorithm 1, with weight decay added to the
    /// gradient.
    #[serde(rename = "adam")]
    Adam,
    /// Stochastic gradient descent, optionally with momentum, with weight decay added to the
    /// gradient.
    #[serde(rename = "sgd")]
    Sgd,
}

impl OptimizerKind {
    /// Every rule of this version.
    pub const ALL: [Self; 3] = [Self::AdamW, Self::Adam, Self::Sgd];
    /// Names that the configuration knows and later versions will have.
    const PLANNED: [&'static str; 4] = ["adafactor", "lion", "lamb", "muon"];

    /// The name in a configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AdamW => "adamw_torch",
            Self::Adam => "adam",
            Self::Sgd => "sgd",
        }
    }
}

impl fmt::Display for OptimizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for OptimizerKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        if let Some(kind) = Self::ALL.into_iter().find(|k| k.as_str() == name) {
            return Ok(kind);
        }
        if Self::PLANNED.contains(&name) {
            return Err(Error::NotAvailable {
                setting: "optimizer",
                found: name.to_owned(),
                available: "adamw_torch, adam or sgd",
            });
        }
        Err(Error::UnknownName {
            setting: "optimizer",
            found: name.to_owned(),
            known: Self::ALL.map(Self::as_str).join(", "),
        })
    }
}

/// An update rule and its hyperparameters, under their names in a configuration.
///
/// The learning rate is not among them: it changes with the step and is an argument of the update.
///
/// ```
/// use merak_zero::OptimizerConfig;
/// let config = OptimizerConfig { weight_decay: 0.01, ..OptimizerConfig::default() };
/// assert_eq!(config.state_names(), ["exp_avg", "exp_avg_sq"]);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule.
    pub optim: OptimizerKind,
    /// Weight decay `w`, for parameters that decay at all.
    pub weight_decay: f64,
    /// `beta1` of Adam and AdamW.
    pub adam_beta1: f64,
    /// `beta2` of Adam and AdamW.
    pub adam_beta2: f64,
    /// `epsilon` of Adam and AdamW, added after the square root.
    pub adam_epsilon: f64,
    /// Momentum of SGD; 0 keeps no state.
    pub sgd_momentum: f64,
    /// Whether SGD looks ahead along the momentum.
    pub nesterov: bool,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            optim: OptimizerKind::AdamW,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            sgd_momentum: 0.0,
            nesterov: false,
        }
    }
}

impl OptimizerConfig {
    /// Checks the range of every hyperparameter.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first bad one.
    pub fn validate(&self) -> Result<()> {
        let below_one = |x: f64| (0.0..1.0).contains(&x);
        let not_negative = |x: f64| x >= 0.0 && x.is_finite();
        let (unit, positive) = (
            "at least 0 and less than 1",
            "a finite number of at least 0",
        );
        for (setting, found, legal, expected) in [
            (
                "weight_decay",
                self.weight_decay,
                not_negative(self.weight_decay),
                positive,
            ),
            (
                "adam_beta1",
                self.adam_beta1,
                below_one(self.adam_beta1),
                unit,
            ),
            (
                "adam_beta2",
                self.adam_beta2,
                below_one(self.adam_beta2),
                unit,
            ),
            (
                "adam_epsilon",
                self.adam_epsilon,
                not_negative(self.adam_epsilon),
                positive,
            ),
            (
                "sgd_momentum",
                self.sgd_momentum,
                below_one(self.sgd_momentum),
                unit,
            ),
        ] {
            if !legal {
                return Err(Error::OutOfRange {
                    setting,
                    found: found.to_string(),
                    expected,
                });
            }
        }
        if self.nesterov && self.sgd_momentum == 0.0 {
            return Err(Error::OutOfRange {
                setting: "sgd_momentum",
                found: "0".to_owned(),
                expected: "more than 0 with `nesterov`",
            });
        }
        Ok(())
    }

    /// The names of the values that the rule keeps for each element, as PyTorch's state dicts have
    /// them.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self.optim {
            OptimizerKind::AdamW | OptimizerKind::Adam => &["exp_avg", "exp_avg_sq"],
            OptimizerKind::Sgd if self.sgd_momentum > 0.0 => &["momentum_buffer"],
            OptimizerKind::Sgd => &[],
        }
    }

    /// Fixes the rule for one step.
    ///
    /// `time` counts this step: 1 for the first. Gradients are multiplied by `grad_scale` as they
    /// are read.
    pub(crate) fn rule(&self, lr: f64, time: u64, grad_scale: f64) -> Rule {
        match self.optim {
            OptimizerKind::AdamW | OptimizerKind::Adam => {
                let step = AdamStep::new(self, lr, time, grad_scale);
                Rule::Adam {
                    plain: step.without_decay(),
                    decaying: step,
                }
            }
            OptimizerKind::Sgd => {
                let step = SgdStep::new(self, lr, grad_scale);
                Rule::Sgd {
                    plain: step.without_decay(),
                    decaying: step,
                }
            }
        }
    }
}

/// The most state values that a rule keeps for each element.
pub(crate) const MAX_STATES: usize = 2;

/// An update rule with every scalar of one step worked out, for parameters that decay and those
/// that do not.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    Adam { decaying: AdamStep, plain: AdamStep },
    Sgd { decaying: SgdStep, plain: SgdStep },
}

impl Rule {
    /// Updates one stretch of one parameter; unused `state` slices are empty.
    pub(crate) fn apply(
        &self,
        decay: bool,
        param: &mut [f32],
        grad: &[f32],
        state: [&mut [f32]; MAX_STATES],
    ) {
        let [first, second] = state;
        match self {
            Self::Adam { decaying, plain } => {
                let step = if decay { decaying } else { plain };
                adam_update(param, grad, first, second, step);
            }
            Self::Sgd { decaying, plain } => {
                let step = if decay { decaying } else { plain };
                sgd_update(param, grad, first, step);
            }
        }
    }
}
