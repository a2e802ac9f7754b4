//! Lion.

use crate::OptimizerConfig;

/// The scalars of one [Lion](https://arxiv.org/abs/2302.06675) step (program 1).
///
/// With learning rate `a`, decay `w` and gradient `g`:
///
/// ```text
/// p <- p (1 - a w) - a sign(beta1 m + (1 - beta1) g)
/// m <- beta2 m + (1 - beta2) g
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionStep {
    grad_scale: f32,
    param_scale: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    lr: f32,
}

impl LionStep {
    /// Prepares a step with learning rate `lr`; gradients are multiplied by `grad_scale`, the clip
    /// factor over the loss scale, as they are read.
    pub fn new(config: &OptimizerConfig, lr: f64, grad_scale: f64) -> Self {
        Self {
            grad_scale: grad_scale as f32,
            param_scale: (1.0 - lr * config.weight_decay) as f32,
            beta1: config.lion_beta1 as f32,
            one_minus_beta1: (1.0 - config.lion_beta1) as f32,
            beta2: config.lion_beta2 as f32,
            one_minus_beta2: (1.0 - config.lion_beta2) as f32,
            lr: lr as f32,
        }
    }

    /// The same step for parameters without weight decay.
    #[must_use]
    pub fn without_decay(self) -> Self {
        Self {
            param_scale: 1.0,
            ..self
        }
    }
}

/// Updates `param` and its momentum in one pass over memory.
///
/// Each element is updated by itself, so any cut of the slices, over any threads, gives the same
/// bits.
///
/// # Panics
/// When the slices differ in length.
///
/// # Examples
/// ```
/// use merak_zero::{LionStep, OptimizerConfig, lion_update};
/// let (mut param, mut exp_avg) = ([1.0, 1.0, 1.0], [0.0; 3]);
/// let step = LionStep::new(&OptimizerConfig::default(), 0.25, 1.0);
/// lion_update(&mut param, &[0.5, -3.0, 0.0], &mut exp_avg, &step);
/// assert_eq!(param, [0.75, 1.25, 1.0]);
/// ```
pub fn lion_update(param: &mut [f32], grad: &[f32], exp_avg: &mut [f32], step: &LionStep) {
    assert_eq!(
        [grad.len(), exp_avg.len()],
        [param.len(); 2],
        "one value per element"
    );
    let s = *step;
    for ((p, &g), m) in param.iter_mut().zip(grad).zip(exp_avg) {
        let g = g * s.grad_scale;
        let direction = *m * s.beta1 + g * s.one_minus_beta1;
        // `f32::signum` of zero is one.
        let sign = f32::from(direction > 0.0) - f32::from(direction < 0.0);
        *p = *p * s.param_scale - s.lr * sign;
        *m = *m * s.beta2 + g * s.one_minus_beta2;
    }
}
