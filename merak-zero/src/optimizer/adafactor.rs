//! Adafactor.

use super::Tensor;
use crate::{OptimizerConfig, ParamSpec, Result, flat, whole::PieceHolders};

/// The scalars of one [Adafactor](https://arxiv.org/abs/1804.04235) step, without the parameter's
/// scale and with a learning rate from outside, as trainers of transformers use it.
///
/// With learning rate `a`, decay `w`, step `t` from 1, gradient `g`, and `b = 1 - t^decay_rate`, a
/// matrix keeps the means `r` of its rows and `c` of its columns:
///
/// ```text
/// r <- b r + (1 - b) mean of rows of (g^2 + epsilon)        c likewise, of columns
/// u <- g / sqrt(r c / mean of r)
/// ```
///
/// What has one dimension keeps `v <- b v + (1 - b) (g^2 + epsilon)` and takes `u <- g / sqrt(v)`.
///
/// ```text
/// u <- u / max(1, rms(u) / clip_threshold)
/// p <- p (1 - a w) - a u
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AdafactorStep {
    grad_scale: f32,
    beta2: f32,
    one_minus_beta2: f32,
    epsilon: f32,
    clip_threshold: f64,
    param_scale: f32,
    lr: f64,
}

impl AdafactorStep {
    pub(crate) fn new(
        config: &OptimizerConfig,
        decays: bool,
        lr: f64,
        time: u64,
        grad_scale: f64,
    ) -> Self {
        let one_minus_beta2 = (time as f64).powf(config.adafactor_decay_rate);
        let decay = if decays { config.weight_decay } else { 0.0 };
        Self {
            grad_scale: grad_scale as f32,
            beta2: (1.0 - one_minus_beta2) as f32,
            one_minus_beta2: one_minus_beta2 as f32,
            epsilon: config.adafactor_epsilon as f32,
            clip_threshold: config.adafactor_clip_threshold,
            param_scale: (1.0 - lr * decay) as f32,
            lr,
        }
    }

    /// The square of a gradient's element, which the means are of.
    fn square(&self, g: f32) -> f32 {
        let g = g * self.grad_scale;
        g * g + self.epsilon
    }

    fn mix(&self, kept: &mut f32, new: f64) {
        *kept = self.beta2 * *kept + self.one_minus_beta2 * new as f32;
    }
}

/// The last two dimensions of a parameter, and the others as one.
#[derive(Debug, Clone, Copy)]
struct Dims {
    batch: usize,
    rows: usize,
    cols: usize,
    /// Rows and columns of the whole parameter.
    whole: [usize; 2],
    /// Whether the ranks of the tensor group divide rows or columns.
    divides: [bool; 2],
}

impl Dims {
    /// Those of a parameter that keeps means of rows and columns.
    fn of(spec: &ParamSpec) -> Option<Self> {
        let [batch @ .., rows, cols] = spec.shape.as_slice() else {
            return None;
        };
        let cut = spec.cut.as_ref();
        let whole = spec.whole_shape();
        let divided = |dim: usize| cut.is_some_and(|cut| cut.dim == dim);
        Some(Self {
            batch: batch.iter().product(),
            rows: *rows,
            cols: *cols,
            whole: [whole[batch.len()], whole[batch.len() + 1]],
            divides: [divided(batch.len()), divided(batch.len() + 1)],
        })
    }
}

/// A parameter in the middle of its step.
struct Work<'a> {
    tensor: Tensor<'a>,
    step: AdafactorStep,
    dims: Option<Dims>,
    /// Sums of squares over each row, and over each column; then the means of the rows' means.
    rows: Vec<f64>,
    cols: Vec<f64>,
    /// Sum of the squares of the update.
    squares: f64,
}

/// Steps whole parameters, or this rank's pieces of them.
///
/// # Communication
/// Three all-reduces over the tensor group, of 8 bytes for each row or column of a parameter that
/// it divides, for each of their means, and for each parameter.
pub(crate) fn step(
    tensors: Vec<(Tensor<'_>, AdafactorStep)>,
    holders: PieceHolders<'_>,
    threads: usize,
) -> Result<()> {
    let work = |(tensor, step): (_, AdafactorStep)| Work::new(tensor, step);
    let mut all: Vec<_> = tensors.into_iter().map(work).collect();
    each(&mut all, threads, Work::sum_squares);
    let divided = all.iter_mut().filter_map(|work| match work.dims {
        Some(dims) if dims.divides[1] => Some(work.rows.as_mut_slice()),
        Some(dims) if dims.divides[0] => Some(work.cols.as_mut_slice()),
        _ => None,
    });
    holders.sum(divided.collect())?;
    each(&mut all, threads, Work::update_means);
    let divided = all
        .iter_mut()
        .filter(|work| work.dims.is_some_and(|dims| dims.divides[0]));
    holders.sum(divided.map(|work| work.rows.as_mut_slice()).collect())?;
    each(&mut all, threads, Work::sum_updates);
    let divided = all.iter_mut().filter(|work| work.tensor.spec.cut.is_some());
    let squares = divided.map(|work| std::slice::from_mut(&mut work.squares));
    holders.sum(squares.collect())?;
    each(&mut all, threads, Work::update);
    Ok(())
}

fn each<'a>(all: &mut [Work<'a>], threads: usize, f: impl Fn(&mut Work<'a>) + Sync) {
    flat::for_each(threads, all.iter_mut().collect(), f);
}

impl<'a> Work<'a> {
    fn new(tensor: Tensor<'a>, step: AdafactorStep) -> Self {
        Self {
            dims: Dims::of(tensor.spec),
            tensor,
            step,
            rows: Vec::new(),
            cols: Vec::new(),
            squares: 0.0,
        }
    }

    fn sum_squares(&mut self) {
        let step = self.step;
        let Some(dims) = self.dims else {
            let [kept, ..] = &mut self.tensor.state;
            for (v, &g) in kept.iter_mut().zip(self.tensor.grad) {
                step.mix(v, f64::from(step.square(g)));
            }
            return;
        };
        self.rows = vec![0.0; dims.batch * dims.rows];
        self.cols = vec![0.0; dims.batch * dims.cols];
        for (index, row) in self.tensor.grad.chunks(dims.cols).enumerate() {
            let first = index / dims.rows * dims.cols;
            let cols = &mut self.cols[first..first + dims.cols];
            for (&g, col) in row.iter().zip(cols) {
                let square = f64::from(step.square(g));
                self.rows[index] += square;
                *col += square;
            }
        }
    }

    /// Takes the sums into the means, and leaves sums of the rows' means.
    fn update_means(&mut self) {
        let Some(dims) = self.dims else { return };
        let [rows, cols, ..] = &mut self.tensor.state;
        for (kept, sum) in rows.iter_mut().zip(&self.rows) {
            self.step.mix(kept, sum / dims.whole[1] as f64);
        }
        for (kept, sum) in cols.iter_mut().zip(&self.cols) {
            self.step.mix(kept, sum / dims.whole[0] as f64);
        }
        let sum = |means: &[f32]| means.iter().map(|&mean| f64::from(mean)).sum();
        self.rows = rows.chunks(dims.rows).map(sum).collect();
    }

    /// Calls `f` with the elements of the parameter and of its update.
    fn with_updates(&mut self, mut f: impl FnMut(&mut f32, f32)) {
        let scale = self.step.grad_scale;
        let [first, second, ..] = &self.tensor.state;
        let (param, grad) = (&mut *self.tensor.param, self.tensor.grad);
        let Some(dims) = self.dims else {
            for ((p, &g), &v) in param.iter_mut().zip(grad).zip(first.iter()) {
                f(p, g * scale / v.sqrt());
            }
            return;
        };
        let columns: Vec<f32> = second.iter().map(|col| 1.0 / col.sqrt()).collect();
        let rows = param.chunks_mut(dims.cols).zip(grad.chunks(dims.cols));
        for (index, (param, grad)) in rows.enumerate() {
            let batch = index / dims.rows;
            let mean = (self.rows[batch] / dims.whole[0] as f64) as f32;
            let row = 1.0 / (first[index] / mean).sqrt();
            let columns = &columns[batch * dims.cols..][..dims.cols];
            for ((p, &g), &column) in param.iter_mut().zip(grad).zip(columns) {
                f(p, row * column * (g * scale));
            }
        }
    }

    fn sum_updates(&mut self) {
        let mut squares = 0.0;
        self.with_updates(|_, u| squares += f64::from(u) * f64::from(u));
        self.squares = squares;
    }

    fn update(&mut self) {
        let step = self.step;
        let numel = self.tensor.spec.whole_numel();
        let rms = (self.squares / numel as f64).sqrt();
        let step_size = (step.lr / (rms / step.clip_threshold).max(1.0)) as f32;
        self.with_updates(|p, u| *p = *p * step.param_scale - step_size * u);
    }
}
