//! LAMB.

use crate::OptimizerConfig;

/// The scalars of one [LAMB](https://arxiv.org/abs/1904.00962) step (algorithm 2), with the
/// identity for the function of the weight's norm.
///
/// With learning rate `a`, decay `w`, step `t` from 1 and gradient `g`, norms taken over the whole
/// parameter:
///
/// ```text
/// m <- beta1 m + (1 - beta1) g
/// v <- beta2 v + (1 - beta2) g^2
/// u <- m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + epsilon) + w p
/// p <- p - a |p| / |u| u        the quotient is 1 where a norm is 0
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LambStep {
    grad_scale: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    inverse_correction: f32,
    inverse_root_correction: f32,
    epsilon: f32,
    decay: f32,
    lr: f64,
}

impl LambStep {
    pub(crate) fn new(
        config: &OptimizerConfig,
        decays: bool,
        lr: f64,
        time: u64,
        grad_scale: f64,
    ) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(time as f64);
        Self {
            grad_scale: grad_scale as f32,
            beta1: config.adam_beta1 as f32,
            one_minus_beta1: (1.0 - config.adam_beta1) as f32,
            beta2: config.adam_beta2 as f32,
            one_minus_beta2: (1.0 - config.adam_beta2) as f32,
            inverse_correction: (1.0 / correction(config.adam_beta1)) as f32,
            inverse_root_correction: (1.0 / correction(config.adam_beta2).sqrt()) as f32,
            epsilon: config.adam_epsilon as f32,
            decay: if decays {
                config.weight_decay as f32
            } else {
                0.0
            },
            lr,
        }
    }

    fn direction(&self, p: f32, m: f32, v: f32) -> f32 {
        let denominator = v.sqrt() * self.inverse_root_correction + self.epsilon;
        m * self.inverse_correction / denominator + self.decay * p
    }

    /// Updates the moments of a stretch of a parameter; what it adds to the squares of the norms of
    /// the weight and of its update.
    pub(crate) fn update_moments(
        &self,
        param: &[f32],
        grad: &[f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
    ) -> [f64; 2] {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let mut sums = [0.0; 2];
        for (((&p, &g), m), v) in param.iter().zip(grad).zip(exp_avg).zip(exp_avg_sq) {
            let g = g * self.grad_scale;
            *m = self.beta1 * *m + self.one_minus_beta1 * g;
            *v = self.beta2 * *v + self.one_minus_beta2 * g * g;
            sums[0] += square(p);
            sums[1] += square(self.direction(p, *m, *v));
        }
        sums
    }

    /// The step along the direction, where the squares of the norms are these.
    pub(crate) fn step_size(&self, [weight, update]: [f64; 2]) -> f32 {
        let ratio = if weight > 0.0 && update > 0.0 {
            (weight / update).sqrt()
        } else {
            1.0
        };
        (self.lr * ratio) as f32
    }

    /// Updates a stretch of a parameter.
    pub(crate) fn update(
        &self,
        param: &mut [f32],
        exp_avg: &[f32],
        exp_avg_sq: &[f32],
        step_size: f32,
    ) {
        for ((p, &m), &v) in param.iter_mut().zip(exp_avg).zip(exp_avg_sq) {
            *p -= step_size * self.direction(*p, m, v);
        }
    }
}
