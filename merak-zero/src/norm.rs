//! The global gradient norm.

use crate::{
    Block, Error, FlatLayout, GlobalParams, Result, exchange::Exchange, flat, sum_of_squares,
};
use merak_mpu::{Group, ReduceOp};
use std::ops::Range;

/// The norm of all gradients of the model, the same bits on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct GradNorm {
    /// Square root of the sum of the squares over each logical element once.
    pub norm: f64,
    /// The first parameter, in model order, with a gradient that is infinite or not a number.
    pub non_finite: Option<String>,
}

impl GradNorm {
    /// The factor that brings the norm down to `max_grad_norm`, at most 1; 1 when that is 0 or
    /// less.
    ///
    /// ```
    /// use merak_zero::GradNorm;
    /// let norm = GradNorm { norm: 4.0, non_finite: None };
    /// assert!((norm.clip_factor(1.0) - 0.25).abs() < 1e-6);
    /// assert_eq!((norm.clip_factor(5.0), norm.clip_factor(0.0)), (1.0, 1.0));
    /// ```
    pub fn clip_factor(&self, max_grad_norm: f64) -> f64 {
        if max_grad_norm <= 0.0 {
            return 1.0;
        }
        (max_grad_norm / (self.norm + 1e-6)).min(1.0)
    }

    /// The norm of gradients that were multiplied by `scale`, before that.
    pub(crate) fn unscaled(self, scale: f64) -> Self {
        Self {
            norm: self.norm / scale,
            ..self
        }
    }
}

/// The sum of squares of each range of `values`, on up to `threads` threads.
pub fn sums_of_squares(
    values: &[f32],
    ranges: impl ExactSizeIterator<Item = Range<usize>>,
    threads: usize,
) -> Vec<f64> {
    let mut sums = vec![0.0; ranges.len()];
    let jobs = sums.iter_mut().zip(ranges).collect();
    flat::for_each(threads, jobs, |(sum, range): (&mut f64, Range<usize>)| {
        *sum = sum_of_squares(&values[range]);
    });
    sums
}

/// The sums of this rank's `blocks`, each at its place among the blocks of the whole model. Of
/// those that do not count, a sum that is not finite stands there nevertheless, so that all ranks
/// learn of it.
pub(crate) fn in_model_order(
    layout: &FlatLayout,
    model: &GlobalParams,
    blocks: &[Block],
    own: Vec<f64>,
) -> Vec<f64> {
    let mut all = vec![0.0; model.num_blocks()];
    for (sum, block) in own.into_iter().zip(blocks) {
        let spec = &layout.params()[block.param];
        if spec.counts_in_norm || !sum.is_finite() {
            all[model.first_block(spec.global_index) + block.index()] = sum;
        }
    }
    all
}

/// Adds the vectors of block sums of all ranks of the model; places that one rank alone fills stay
/// exact.
pub(crate) fn sum_over_ranks(
    exchange: &Exchange,
    model_group: &Group,
    mut sums: Vec<f64>,
) -> Result<Vec<f64>> {
    if exchange.is_sharded() {
        sums = sum_over(exchange.group(), sums)?;
    }
    sum_over(model_group, sums)
}

fn sum_over(group: &Group, sums: Vec<f64>) -> Result<Vec<f64>> {
    group
        .all_reduce_vec(sums, ReduceOp::Sum)
        .map_err(Error::communication("sum of a norm"))
}

/// Adds the blocks of each parameter, then the parameters, in model order.
pub(crate) fn combine(model: &GlobalParams, sums: &[f64]) -> GradNorm {
    let total: f64 = model
        .block_ranges()
        .map(|blocks| sums[blocks].iter().sum::<f64>())
        .sum();
    let bad = sums.iter().position(|sum| !sum.is_finite());
    GradNorm {
        norm: total.sqrt(),
        non_finite: bad.map(|block| model.param_of_block(block).to_owned()),
    }
}
