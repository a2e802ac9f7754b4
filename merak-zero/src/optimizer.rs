//! Which update rule, with which hyperparameters.

pub(crate) mod adafactor;
mod adam;
mod lamb;
mod lion;
pub(crate) mod muon;
mod sgd;

pub use adam::{AdamStep, adam_update};
pub use lion::{LionStep, lion_update};
pub use sgd::{SgdStep, sgd_update};

pub(crate) use adafactor::AdafactorStep;
pub(crate) use lamb::LambStep;
pub(crate) use muon::MuonStep;

use crate::{Error, ParamSpec, Result, average};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

merak_mpu::named_enum! {
    /// The update rules of this version.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum OptimizerKind {
        /// [AdamW](https://arxiv.org/abs/1711.05101), algorithm 2: Adam with decoupled weight
        /// decay.
        #[default]
        #[serde(rename = "adamw_torch")]
        AdamW = "adamw_torch",
        /// [Adam](https://arxiv.org/abs/1412.6980), algorithm 1, with weight decay added to the
        /// gradient.
        Adam = "adam",
        /// Stochastic gradient descent, optionally with momentum, with weight decay added to the
        /// gradient.
        Sgd = "sgd",
        /// [Adafactor](https://arxiv.org/abs/1804.04235): second moments of matrices as means of
        /// their rows and columns, with decoupled weight decay.
        Adafactor = "adafactor",
        /// [LAMB](https://arxiv.org/abs/1904.00962), algorithm 2: Adam whose update of each
        /// parameter has the norm of the parameter.
        Lamb = "lamb",
        /// [Lion](https://arxiv.org/abs/2302.06675): the sign of a momentum, with decoupled weight
        /// decay.
        Lion = "lion",
        /// [Muon](https://kellerjordan.github.io/posts/muon/): hidden matrices take orthogonal
        /// steps with decoupled weight decay, all else AdamW's.
        Muon = "muon",
    }
}

impl FromStr for OptimizerKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::from_name(name).ok_or_else(|| Error::UnknownName {
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
    /// `beta1` of Adam, AdamW and LAMB.
    pub adam_beta1: f64,
    /// `beta2` of Adam, AdamW and LAMB.
    pub adam_beta2: f64,
    /// `epsilon` of Adam, AdamW and LAMB, added after the square root.
    pub adam_epsilon: f64,
    /// Momentum of SGD; 0 keeps no state.
    pub sgd_momentum: f64,
    /// Whether SGD looks ahead along the momentum.
    pub nesterov: bool,
    /// Share of the momentum in the direction of Lion.
    pub lion_beta1: f64,
    /// Decay of Lion's momentum.
    pub lion_beta2: f64,
    /// The power of the step that is the share of new squares in Adafactor's means; below 0.
    pub adafactor_decay_rate: f64,
    /// Root mean square of an update above which Adafactor scales it down.
    pub adafactor_clip_threshold: f64,
    /// What Adafactor adds to squares of gradients.
    pub adafactor_epsilon: f64,
    /// Momentum of Muon.
    pub muon_momentum: f64,
    /// Whether Muon looks ahead along the momentum.
    pub muon_nesterov: bool,
    /// Repetitions of the polynomial that makes Muon's steps orthogonal.
    pub muon_ns_steps: usize,
    /// The smallest norm that Muon divides a matrix by.
    pub muon_epsilon: f64,
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
            lion_beta1: 0.9,
            lion_beta2: 0.99,
            adafactor_decay_rate: -0.8,
            adafactor_clip_threshold: 1.0,
            adafactor_epsilon: 1e-30,
            muon_momentum: 0.95,
            muon_nesterov: true,
            muon_ns_steps: 5,
            muon_epsilon: 1e-7,
        }
    }
}

impl OptimizerConfig {
    /// The smallest epsilon, threshold and momentum of SGD that is not 0: anything smaller may be 0
    /// in `f32`.
    pub const MIN_POSITIVE: f64 = 1e-37;

    /// The largest of all numbers: anything larger may be infinite in `f32`.
    pub const MAX_NUMBER: f64 = 1e37;

    /// Upper bound on the repetitions of Muon's polynomial: each costs three products of matrices.
    pub const MAX_NS_STEPS: u32 = 100;

    /// Checks the range of every hyperparameter.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first bad one.
    pub fn validate(&self) -> Result<()> {
        type Range = (&'static str, fn(f64) -> bool);
        let unit: Range = (average::DECAYS, average::is_decay);
        let not_negative: Range = ("from 0 to 1e37", |x| (0.0..=Self::MAX_NUMBER).contains(&x));
        let positive: Range = ("from 1e-37 to 1e37", |x| {
            (Self::MIN_POSITIVE..=Self::MAX_NUMBER).contains(&x)
        });
        let none_or_positive: Range = ("0, or from 1e-37 to 1e37", |x| {
            x == 0.0 || (Self::MIN_POSITIVE..=Self::MAX_NUMBER).contains(&x)
        });
        // It decides in f64 whether there is state, and in f32 whether a step takes it.
        let none_or_share: Range = (
            "0, or at least 1e-37 and less than 1, also when rounded to f32",
            |x| x == 0.0 || x >= Self::MIN_POSITIVE && average::is_decay(x),
        );
        let negative: Range = ("a finite number below 0", |x| x < 0.0 && x.is_finite());
        let ranges = [
            ("weight_decay", self.weight_decay, not_negative),
            ("adam_beta1", self.adam_beta1, unit),
            ("adam_beta2", self.adam_beta2, unit),
            ("adam_epsilon", self.adam_epsilon, none_or_positive),
            ("sgd_momentum", self.sgd_momentum, none_or_share),
            ("lion_beta1", self.lion_beta1, unit),
            ("lion_beta2", self.lion_beta2, unit),
            ("adafactor_decay_rate", self.adafactor_decay_rate, negative),
            (
                "adafactor_clip_threshold",
                self.adafactor_clip_threshold,
                positive,
            ),
            ("adafactor_epsilon", self.adafactor_epsilon, positive),
            ("muon_momentum", self.muon_momentum, unit),
            ("muon_epsilon", self.muon_epsilon, positive),
        ];
        for (setting, found, (expected, is_legal)) in ranges {
            if !is_legal(found) {
                return Err(Error::number_out_of_range(setting, found, expected));
            }
        }
        let ns_steps = self.muon_ns_steps;
        if !(1..=Self::MAX_NS_STEPS as usize).contains(&ns_steps) {
            return Err(Error::out_of_range(
                "muon_ns_steps",
                ns_steps,
                "from 1 to 100",
            ));
        }
        if self.nesterov && self.sgd_momentum == 0.0 {
            return Err(Error::out_of_range(
                "sgd_momentum",
                "0",
                "more than 0 with `nesterov`",
            ));
        }
        Ok(())
    }

    /// The rule that steps a parameter.
    pub fn rule_of(&self, spec: &ParamSpec) -> OptimizerKind {
        match self.optim {
            OptimizerKind::Muon if !spec.hidden_matrix => OptimizerKind::AdamW,
            rule => rule,
        }
    }

    /// The state of a parameter, under the names of PyTorch's state dicts.
    pub fn state_of(&self, spec: &ParamSpec) -> Vec<StateKind> {
        let dims = spec.shape.len();
        match self.rule_of(spec) {
            OptimizerKind::AdamW | OptimizerKind::Adam | OptimizerKind::Lamb => {
                vec![StateKind::of("exp_avg"), StateKind::of("exp_avg_sq")]
            }
            OptimizerKind::Sgd if self.sgd_momentum == 0.0 => Vec::new(),
            OptimizerKind::Sgd | OptimizerKind::Muon => vec![StateKind::of("momentum_buffer")],
            OptimizerKind::Lion => vec![StateKind::of("exp_avg")],
            OptimizerKind::Adafactor if dims < 2 => vec![StateKind::of("exp_avg_sq")],
            OptimizerKind::Adafactor => vec![
                StateKind::of("exp_avg_sq_row").without(dims - 1),
                StateKind::of("exp_avg_sq_col").without(dims - 2),
            ],
        }
    }

    /// The number of values that are kept beside a parameter.
    pub fn state_numel(&self, spec: &ParamSpec) -> usize {
        let kinds = self.state_of(spec).into_iter();
        kinds.map(|kind| kind.numel(&spec.shape)).sum()
    }

    /// The most values that are kept for each element of a parameter.
    pub(crate) fn most_kept_per_element(&self) -> usize {
        match self.optim {
            OptimizerKind::AdamW
            | OptimizerKind::Adam
            | OptimizerKind::Lamb
            | OptimizerKind::Muon => 2,
            OptimizerKind::Sgd if self.sgd_momentum == 0.0 => 0,
            OptimizerKind::Sgd | OptimizerKind::Lion | OptimizerKind::Adafactor => 1,
        }
    }

    /// Every name of [`OptimizerConfig::state_of`] that a parameter may have, in alphabetical
    /// order.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self.optim {
            OptimizerKind::AdamW | OptimizerKind::Adam | OptimizerKind::Lamb => {
                &["exp_avg", "exp_avg_sq"]
            }
            OptimizerKind::Sgd if self.sgd_momentum == 0.0 => &[],
            OptimizerKind::Sgd => &["momentum_buffer"],
            OptimizerKind::Lion => &["exp_avg"],
            OptimizerKind::Adafactor => &["exp_avg_sq", "exp_avg_sq_col", "exp_avg_sq_row"],
            OptimizerKind::Muon => &["exp_avg", "exp_avg_sq", "momentum_buffer"],
        }
    }

    /// Whether one rank must own all of a parameter, as rules ask that need more of it than sums
    /// over its elements.
    pub fn needs_whole(&self, spec: &ParamSpec) -> bool {
        matches!(
            self.rule_of(spec),
            OptimizerKind::Adafactor | OptimizerKind::Muon
        )
    }

    /// Fixes the rule of a parameter for one step.
    ///
    /// `time` counts this step: 1 for the first. Gradients are multiplied by `grad_scale` as they
    /// are read.
    pub(crate) fn rule(&self, spec: &ParamSpec, lr: f64, time: u64, grad_scale: f64) -> Rule {
        let (lr, decays) = (lr * spec.lr_scale, spec.decay);
        match self.rule_of(spec) {
            OptimizerKind::AdamW | OptimizerKind::Adam => {
                let step = AdamStep::new(self, lr, time, grad_scale);
                Rule::Adam(if decays { step } else { step.without_decay() })
            }
            OptimizerKind::Sgd => {
                let step = SgdStep::new(self, lr, grad_scale);
                Rule::Sgd(if decays { step } else { step.without_decay() })
            }
            OptimizerKind::Lion => {
                let step = LionStep::new(self, lr, grad_scale);
                Rule::Lion(if decays { step } else { step.without_decay() })
            }
            OptimizerKind::Lamb => Rule::Lamb(LambStep::new(self, decays, lr, time, grad_scale)),
            OptimizerKind::Adafactor => {
                Rule::Adafactor(AdafactorStep::new(self, decays, lr, time, grad_scale))
            }
            OptimizerKind::Muon => Rule::Muon(MuonStep::new(self, spec, lr, grad_scale)),
        }
    }
}

/// A kind of value that a rule keeps for a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateKind {
    /// Its name, as in `exp_avg`.
    pub name: &'static str,
    /// The dimension of the parameter over which there is one value; `None`: one for each element.
    pub without: Option<usize>,
}

impl StateKind {
    pub(crate) const fn of(name: &'static str) -> Self {
        Self {
            name,
            without: None,
        }
    }

    const fn without(self, dim: usize) -> Self {
        Self {
            without: Some(dim),
            ..self
        }
    }

    /// The number of values beside a tensor of this shape.
    pub fn numel(self, shape: &[usize]) -> usize {
        let dims = shape.iter().enumerate();
        let kept = dims.filter(|(dim, _)| Some(*dim) != self.without);
        kept.map(|(_, len)| len).product()
    }
}

/// The most kinds of state that a rule keeps for a parameter.
pub(crate) const MAX_STATES: usize = 4;

/// An update rule of one parameter with every scalar of one step worked out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    Adam(AdamStep),
    Sgd(SgdStep),
    Lion(LionStep),
    Lamb(LambStep),
    Adafactor(AdafactorStep),
    Muon(MuonStep),
    /// That of another program.
    Other(OtherStep),
}

/// The scalars of a step by a rule of another program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OtherStep {
    pub(crate) lr: f64,
    pub(crate) time: u64,
    pub(crate) grad_scale: f64,
}

/// A parameter, or this rank's piece of it, that is stepped as a whole.
#[derive(Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) spec: &'a ParamSpec,
    pub(crate) param: &'a mut [f32],
    pub(crate) grad: &'a [f32],
    /// The place of the first element among those of the parameter on this rank.
    pub(crate) first: usize,
    /// In the order of [`OptimizerConfig::state_of`].
    pub(crate) state: [&'a mut [f32]; MAX_STATES],
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_and_bytes_of_the_state_hold_for_every_parameter() {
        let matrix = || ParamSpec::new("matrix", &[3, 4], 0);
        let specs = [
            matrix().as_hidden_matrix(),
            matrix(),
            ParamSpec::new("bias", &[5], 0),
        ];
        for optim in OptimizerKind::ALL {
            for sgd_momentum in [0.0, 0.9] {
                let config = OptimizerConfig {
                    optim,
                    sgd_momentum,
                    ..OptimizerConfig::default()
                };
                let kinds = specs.iter().flat_map(|spec| config.state_of(spec));
                let names: BTreeSet<_> = kinds.map(|kind| kind.name).collect();
                assert!(
                    names.into_iter().eq(config.state_names().iter().copied()),
                    "{optim:?}"
                );
                let most = specs.iter().map(|spec| {
                    assert!(config.state_of(spec).len() <= MAX_STATES);
                    config.state_numel(spec).div_ceil(spec.numel())
                });
                assert_eq!(
                    most.max(),
                    Some(config.most_kept_per_element()),
                    "{optim:?}"
                );
            }
        }
    }
}
