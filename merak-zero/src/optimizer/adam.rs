//! Adam and AdamW, in memory of the host; on devices libtorch has a step of its own.

use crate::{OptimizerConfig, OptimizerKind};

/// The scalars of one Adam or AdamW step, worked out in f64 and rounded once.
///
/// With learning rate `a`, decay `w`, step `t` from 1 and gradient `g`, as PyTorch orders the
/// operations:
///
/// ```text
/// AdamW: p <- p * (1 - a w)          Adam: g <- g + w p
/// m <- m + (1 - beta1) (g - m)
/// v <- beta2 v + (1 - beta2) g^2
/// p <- p - a / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamStep {
    grad_scale: f32,
    grad_decay: f32,
    param_scale: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    inverse_root_correction: f32,
    epsilon: f32,
    step_size: f32,
}

impl AdamStep {
    /// Prepares step number `time` (1 for the first) with learning rate `lr`; gradients are
    /// multiplied by `grad_scale`, the clip factor over the loss scale, as they are read.
    pub fn new(config: &OptimizerConfig, lr: f64, time: u64, grad_scale: f64) -> Self {
        let decoupled = config.optim != OptimizerKind::Adam;
        let decay = config.weight_decay;
        let correction = |beta: f64| 1.0 - beta.powf(time as f64);
        Self {
            grad_scale: grad_scale as f32,
            grad_decay: if decoupled { 0.0 } else { decay as f32 },
            param_scale: if decoupled {
                (1.0 - lr * decay) as f32
            } else {
                1.0
            },
            one_minus_beta1: (1.0 - config.adam_beta1) as f32,
            beta2: config.adam_beta2 as f32,
            one_minus_beta2: (1.0 - config.adam_beta2) as f32,
            inverse_root_correction: (1.0 / correction(config.adam_beta2).sqrt()) as f32,
            epsilon: config.adam_epsilon as f32,
            step_size: (lr / correction(config.adam_beta1)) as f32,
        }
    }

    /// The same step for parameters without weight decay.
    #[must_use]
    pub fn without_decay(self) -> Self {
        Self {
            grad_decay: 0.0,
            param_scale: 1.0,
            ..self
        }
    }
}

/// Updates `param` and its two moments in one pass over memory.
///
/// Each element is updated by itself, so any cut of the slices, over any threads, gives the same
/// bits.
///
/// # Panics
/// When the slices differ in length.
///
/// # Examples
/// ```
/// use merak_zero::{AdamStep, OptimizerConfig, adam_update};
/// let (mut param, mut exp_avg, mut exp_avg_sq) = ([1.0], [0.0], [0.0]);
/// let step = AdamStep::new(&OptimizerConfig::default(), 0.1, 1, 1.0);
/// adam_update(&mut param, &[0.5], &mut exp_avg, &mut exp_avg_sq, &step);
/// // The first step of Adam has the length of the learning rate.
/// assert!((param[0] - 0.9).abs() < 1e-6);
/// ```
pub fn adam_update(
    param: &mut [f32],
    grad: &[f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    step: &AdamStep,
) {
    let lengths = [grad.len(), exp_avg.len(), exp_avg_sq.len()];
    assert_eq!(lengths, [param.len(); 3], "one value per element");
    let s = *step;
    for (((p, &g), m), v) in param.iter_mut().zip(grad).zip(exp_avg).zip(exp_avg_sq) {
        let g = g * s.grad_scale + s.grad_decay * *p;
        *m += s.one_minus_beta1 * (g - *m);
        *v = s.beta2 * *v + s.one_minus_beta2 * g * g;
        let denominator = v.sqrt() * s.inverse_root_correction + s.epsilon;
        *p = *p * s.param_scale - s.step_size * *m / denominator;
    }
}
