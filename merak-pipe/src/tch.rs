//! Autograd of libtorch (feature `tch`).

use crate::{Autograd, BoxError};
use merak_mpu::tch::reason_of;
use tch::{Kind, TchError, Tensor};

/// Stages of a model that is written for libtorch. A variable is a tensor that requires a gradient;
/// its own [`grad`](Tensor::grad) stays as it is.
///
/// ```
/// use merak_mpu::tch::vars_by_name;
/// use merak_pipe::{
///     MicrobatchId, ScheduleKind, Size, StageId, TensorModel, TensorStages, run_threads,
/// };
/// use std::time::Duration;
/// use tch::{Device, Kind, TchError, Tensor, nn::VarStore};
///
/// /// Each stage multiplies by a weight of its own.
/// struct Product(Tensor);
///
/// impl TensorModel for Product {
///     type Tensor = Tensor;
///     type Error = TchError;
///
///     fn input(&self, microbatch: MicrobatchId) -> Result<Tensor, TchError> {
///         Tensor::f_from_slice(&[microbatch.0 as f32, 1.0])
///     }
///     fn forward(&self, _: StageId, input: &Tensor) -> Result<Tensor, TchError> {
///         input.f_mul(&self.0)
///     }
///     fn loss(&self, output: &Tensor, _: MicrobatchId) -> Result<Tensor, TchError> {
///         output.f_square()?.f_sum(Kind::Float)
///     }
/// }
///
/// let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 4))?;
/// let mut ranks = Vec::new();
/// for stage in 0..2 {
///     let store = VarStore::new(Device::Cpu);
///     let weight = store.root().var_copy(&stage.to_string(), &Tensor::from_slice(&[2.0_f32]));
///     ranks.push(TensorStages::new(Product(weight), 2, vars_by_name(&store)));
/// }
/// run_threads(&schedule, &mut ranks, Duration::from_secs(10))?;
/// // Each microbatch adds (2 * 2 * m)^2 + (2 * 2)^2.
/// assert_eq!(ranks[1].take_loss(), 16.0 * (0.0 + 1.0 + 4.0 + 9.0) + 4.0 * 16.0);
/// assert!(ranks[0].take_grads().contains_key("0"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Autograd for Tensor {
    type Var = Self;

    fn into_variable(self) -> Result<Self, BoxError> {
        self.f_set_requires_grad(true).map_err(boxed)
    }

    fn of_variable(var: &Self) -> &Self {
        var
    }

    fn gradients(&self, vars: &[&Self]) -> Result<Vec<Option<Self>>, BoxError> {
        // libtorch refuses a frozen variable, and takes no variables for all of the graph.
        let is_wanted = |var: &&&Self| self.requires_grad() && var.requires_grad();
        let wanted: Vec<&Self> = vars.iter().filter(is_wanted).copied().collect();
        let mut found = Vec::new();
        if !wanted.is_empty() {
            found = Self::f_run_backward(&[self], &wanted, false, false).map_err(boxed)?;
        }
        let mut found = found.into_iter();
        let all = vars.iter().map(|var| {
            let grad = if is_wanted(&var) { found.next() } else { None };
            grad.filter(Self::defined)
        });
        Ok(all.collect())
    }

    fn product_sum(&self, other: &Self) -> Result<Self, BoxError> {
        let product = self.f_mul(other).map_err(boxed)?;
        product.f_sum(product.kind()).map_err(boxed)
    }

    fn plus(&self, other: &Self) -> Result<Self, BoxError> {
        self.f_add(other).map_err(boxed)
    }

    fn elements(&self) -> Result<Vec<f64>, BoxError> {
        let wide = self.f_detach().and_then(|own| own.f_to_kind(Kind::Double));
        let flat = wide.and_then(|wide| wide.f_reshape([-1])).map_err(boxed)?;
        flat.try_into().map_err(boxed)
    }
}

fn boxed(error: TchError) -> BoxError {
    match error {
        TchError::Torch(_) => reason_of(&error).into(),
        other => other.into(),
    }
}
