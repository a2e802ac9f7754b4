//! Muon.

use super::Tensor;
use crate::{
    Matrix, MatrixProducts, OptimizerConfig, ParamSpec, Result, sum_of_squares, whole::PieceHolders,
};

/// Coefficients of the quintic whose repetition moves singular values towards 1.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// The scalars of one [Muon](https://kellerjordan.github.io/posts/muon/) step, as
/// `torch.optim.Muon` with `adjust_lr_fn` "original" takes it, in f32.
///
/// With learning rate `a`, decay `w`, momentum `u`, gradient `g` of `R` rows and `C` columns:
///
/// ```text
/// b <- u b + (1 - u) g
/// x <- g + u (b - g)  (Nesterov), b
/// x <- x / max(|x|, epsilon), transposed if it has more rows than columns
/// x <- 3.4445 x + (-4.7750 x x' + 2.0315 (x x')^2) x        several times, then transposed back
/// p <- p (1 - a w) - a sqrt(max(1, R / C)) x
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MuonStep {
    grad_scale: f32,
    momentum: f32,
    nesterov: bool,
    repetitions: usize,
    epsilon: f64,
    param_scale: f32,
    step_size: f32,
}

impl MuonStep {
    pub(crate) fn new(
        config: &OptimizerConfig,
        spec: &ParamSpec,
        lr: f64,
        grad_scale: f64,
    ) -> Self {
        let decay = if spec.decay { config.weight_decay } else { 0.0 };
        let [rows, cols] = sides(spec);
        let adjusted = lr * (rows as f64 / cols as f64).max(1.0).sqrt();
        Self {
            grad_scale: grad_scale as f32,
            momentum: config.muon_momentum as f32,
            nesterov: config.muon_nesterov,
            repetitions: config.muon_ns_steps,
            epsilon: config.muon_epsilon,
            param_scale: (1.0 - lr * decay) as f32,
            step_size: adjusted as f32,
        }
    }

    /// Updates the momentum, and returns what is made orthogonal.
    fn direction(&self, tensor: &mut Tensor<'_>) -> Vec<f32> {
        let [buffer, ..] = &mut tensor.state;
        let blend = |(b, &g): (&mut f32, &f32)| {
            let g = g * self.grad_scale;
            *b += (1.0 - self.momentum) * (g - *b);
            if self.nesterov {
                *b - (1.0 - self.momentum) * (*b - g)
            } else {
                *b
            }
        };
        buffer.iter_mut().zip(tensor.grad).map(blend).collect()
    }

    fn update(&self, param: &mut [f32], direction: &[f32]) {
        for (p, &x) in param.iter_mut().zip(direction) {
            *p = *p * self.param_scale - self.step_size * x;
        }
    }
}

/// Rows and columns of a whole matrix.
fn sides(spec: &ParamSpec) -> [usize; 2] {
    let whole = spec.whole_shape();
    [whole[0], whole[1]]
}

/// Steps matrices, or this rank's pieces of them.
///
/// # Communication
/// For every `T` divided matrices, one for each rank of the tensor group: two exchanges of pieces,
/// in which a rank sends and receives about as much as such a matrix has.
pub(crate) fn step(
    tensors: Vec<(Tensor<'_>, MuonStep)>,
    holders: PieceHolders<'_>,
    products: &dyn MatrixProducts,
) -> Result<()> {
    let is_divided = |(tensor, _): &(Tensor<'_>, MuonStep)| tensor.spec.cut.is_some();
    let (mut divided, whole): (Vec<_>, Vec<_>) = tensors.into_iter().partition(is_divided);
    for (mut tensor, step) in whole {
        let mut direction = step.direction(&mut tensor);
        step.orthogonalize(&mut direction, sides(tensor.spec), products);
        step.update(tensor.param, &direction);
    }
    for round in divided.chunks_mut(holders.num_ranks()) {
        let directions = round
            .iter_mut()
            .map(|(tensor, step)| step.direction(tensor))
            .collect();
        let cuts: Vec<_> = round.iter().map(|(tensor, _)| tensor.spec).collect();
        let changed = holders.change_whole(&cuts, directions, |index, whole| {
            let (tensor, step) = &round[index];
            step.orthogonalize(whole, sides(tensor.spec), products);
        })?;
        for ((tensor, step), direction) in round.iter_mut().zip(changed) {
            step.update(tensor.param, &direction);
        }
    }
    Ok(())
}

impl MuonStep {
    /// Brings the singular values of a matrix near 1, by Newton and Schulz.
    fn orthogonalize(&self, x: &mut Vec<f32>, sides: [usize; 2], products: &dyn MatrixProducts) {
        let [rows, cols] = sides;
        let is_tall = rows > cols;
        if is_tall {
            *x = transposed(x, sides);
        }
        let (short, long) = (rows.min(cols), rows.max(cols));
        let norm = sum_of_squares(x).sqrt().max(self.epsilon);
        for x in x.iter_mut() {
            *x /= norm as f32;
        }
        let [a, b, c] = COEFFICIENTS;
        let (mut gram, mut square) = (vec![0.0; short * short], vec![0.0; short * short]);
        let mut product = vec![0.0; short * long];
        for _ in 0..self.repetitions {
            let x_view = Matrix::new(x, [short, long]);
            products.multiply(x_view, x_view.transposed(), &mut gram);
            let gram_view = Matrix::new(&gram, [short, short]);
            products.multiply(gram_view, gram_view, &mut square);
            for (square, gram) in square.iter_mut().zip(&gram) {
                *square = b * gram + c * *square;
            }
            products.multiply(Matrix::new(&square, [short, short]), x_view, &mut product);
            for (x, product) in x.iter_mut().zip(&product) {
                *x = a * *x + product;
            }
        }
        if is_tall {
            *x = transposed(x, [short, long]);
        }
    }
}

fn transposed(x: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
    let at = |index: usize| x[index % rows * cols + index / rows];
    (0..x.len()).map(at).collect()
}
