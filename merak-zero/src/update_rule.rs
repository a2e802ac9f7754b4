//! Update rules of other programs.

use crate::{EMA, Error, ParamSpec, Result, optimizer::MAX_STATES};
use std::fmt;

/// An update rule of another program, for a [`ZeroOptimizer`](crate::ZeroOptimizer) that reduces
/// and clips gradients, divides state and saves it as under its own rules.
///
/// The optimizer keeps the state, so that it lies where the elements do, in each ZeRO stage, and
/// comes into checkpoints under its names.
///
/// ```
/// use merak_zero::{RuleStep, UpdateRule};
///
/// /// Steps along the sign of each gradient, as far as the mean of its past magnitudes.
/// #[derive(Debug)]
/// struct SignDescent;
///
/// impl UpdateRule for SignDescent {
///     fn name(&self) -> &str {
///         "sign_descent"
///     }
///
///     fn state_names(&self) -> &'static [&'static str] {
///         &["magnitude"]
///     }
///
///     fn step(
///         &self,
///         step: &RuleStep<'_>,
///         params: &mut [f32],
///         grads: &[f32],
///         state: &mut [&mut [f32]],
///     ) {
///         for ((p, g), m) in params.iter_mut().zip(grads).zip(&mut *state[0]) {
///             *m = 0.9 * *m + 0.1 * g.abs();
///             *p -= step.lr as f32 * *m * g.signum();
///         }
///     }
/// }
/// ```
pub trait UpdateRule: fmt::Debug + Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> &str;

    /// The names of the values that are kept for each element, in alphabetical order, four at most:
    /// checkpoints have them. [`EMA`] is the name of averages.
    fn state_names(&self) -> &'static [&'static str];

    /// Updates adjacent elements of a parameter; `grads` are clipped and without the loss scale.
    /// `state` has a slice for each of [`UpdateRule::state_names`], zero before the first step.
    ///
    /// With one replica, and in stage 0, these are all elements of the parameter that the rank has;
    /// from stage 1 on with several replicas, those that the rank owns. A rule that looks at more
    /// than one element then gives other weights than in stage 0.
    fn step(
        &self,
        step: &RuleStep<'_>,
        params: &mut [f32],
        grads: &[f32],
        state: &mut [&mut [f32]],
    );
}

/// What an [`UpdateRule`] is told of a step.
#[derive(Debug, Clone, Copy)]
pub struct RuleStep<'a> {
    /// The parameter.
    pub spec: &'a ParamSpec,
    /// The place of the first element among those of the parameter on this rank.
    pub first: usize,
    /// The learning rate of this parameter.
    pub lr: f64,
    /// Number of this step, 1 for the first.
    pub time: u64,
}

/// Checks the names of a rule's state.
pub(crate) fn check(rule: &dyn UpdateRule) -> Result<()> {
    let names = rule.state_names();
    let is_sorted = names.windows(2).all(|pair| pair[0] < pair[1]);
    let are_words = names.iter().all(|name| {
        let mut chars = name.chars();
        !name.is_empty() && *name != EMA && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
    });
    if is_sorted && are_words && names.len() <= MAX_STATES {
        return Ok(());
    }
    Err(Error::out_of_range(
        "state_names",
        format!("{names:?} of `{}`", rule.name()),
        "at most four different names of ASCII letters, digits and `_`, in alphabetical order, none of them `ema`",
    ))
}
