//! Stochastic gradient descent.

use crate::OptimizerConfig;

/// The scalars of one SGD step.
///
/// With learning rate `a`, decay `w`, momentum `u` and gradient `g`, as PyTorch orders the
/// operations:
///
/// ```text
/// g <- g + w p
/// b <- u b + g                  only with momentum
/// g <- g + u b  (Nesterov), b   only with momentum
/// p <- p - a g
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdStep {
    grad_scale: f32,
    grad_decay: f32,
    momentum: f32,
    nesterov: bool,
    lr: f32,
}

impl SgdStep {
    /// Prepares a step with learning rate `lr`; gradients are multiplied by `grad_scale`, the clip
    /// factor over the loss scale, as they are read.
    pub fn new(config: &OptimizerConfig, lr: f64, grad_scale: f64) -> Self {
        Self {
            grad_scale: grad_scale as f32,
            grad_decay: config.weight_decay as f32,
            momentum: config.sgd_momentum as f32,
            nesterov: config.nesterov,
            lr: lr as f32,
        }
    }

    /// The same step for parameters without weight decay.
    #[must_use]
    pub fn without_decay(self) -> Self {
        Self {
            grad_decay: 0.0,
            ..self
        }
    }
}

/// Updates `param`, and its momentum when the step has one, in one pass over memory.
///
/// Each element is updated by itself, so any cut of the slices, over any threads, gives the same
/// bits.
///
/// # Panics
/// When the slices differ in length; `momentum` is empty for a step without momentum.
///
/// # Examples
/// ```
/// use merak_zero::{OptimizerConfig, SgdStep, sgd_update};
/// let mut param = [1.0];
/// let step = SgdStep::new(&OptimizerConfig::default(), 0.5, 1.0);
/// sgd_update(&mut param, &[0.5], &mut [], &step);
/// assert_eq!(param, [0.75]);
/// ```
pub fn sgd_update(param: &mut [f32], grad: &[f32], momentum: &mut [f32], step: &SgdStep) {
    assert_eq!(grad.len(), param.len(), "one gradient per element");
    let s = *step;
    if s.momentum == 0.0 {
        assert!(momentum.is_empty(), "no state without momentum");
        for (p, &g) in param.iter_mut().zip(grad) {
            *p -= s.lr * (g * s.grad_scale + s.grad_decay * *p);
        }
        return;
    }
    assert_eq!(momentum.len(), param.len(), "one momentum per element");
    let (ahead, carried) = if s.nesterov {
        (1.0, s.momentum)
    } else {
        (0.0, 1.0)
    };
    for ((p, &g), b) in param.iter_mut().zip(grad).zip(momentum) {
        let g = g * s.grad_scale + s.grad_decay * *p;
        *b = s.momentum * *b + g;
        *p -= s.lr * (ahead * g + carried * *b);
    }
}
