//! Steps of libtorch's variables (feature `tch`).

use crate::{Result, TensorOptimizer, UpdateReport};
use tch::Tensor;

/// An optimizer over libtorch's variables: those of a `VarStore` are
/// [`vars_by_name`](merak_mpu::tch::vars_by_name), without the ones that require no gradient.
///
/// ```
/// use merak_mpu::{tch::vars_by_name, threads};
/// use merak_zero::{TensorOptimizer, ZeroConfig, ZeroGroups};
/// use std::error::Error;
/// use tch::{Device, Kind, Tensor, nn::VarStore};
///
/// let weights = threads::run(2, threads::WorldOptions::default(), |member| {
///     let groups = ZeroGroups {
///         data_sequence: member.world_group()?,
///         model: member.group("model", &[member.rank()])?,
///     };
///     let store = VarStore::new(Device::Cpu);
///     let weight = store.root().var_copy("weight", &Tensor::from_slice(&[1.0_f32, -1.0]));
///     let config = ZeroConfig::default();
///     let mut optimizer =
///         TensorOptimizer::new(vars_by_name(&store), config, groups, |spec| spec)?;
///     for _ in 0..50 {
///         optimizer.zero_grad();
///         weight.square().sum(Kind::Float).backward();
///         optimizer.step(0.1)?;
///     }
///     Ok::<_, Box<dyn Error + Send + Sync>>(Vec::<f32>::try_from(weight)?)
/// })?;
/// assert!(weights[0] == weights[1] && weights[0][0].abs() < 0.1);
/// # Ok::<(), Box<dyn Error>>(())
/// ```
impl TensorOptimizer<Tensor> {
    /// Reduces, clips and applies what `backward` has summed in the variables'
    /// [`grad`](Tensor::grad) with learning rate `lr`. A variable without a gradient has zeros.
    ///
    /// Gradients that lie elsewhere go through [`TensorOptimizer::step_with`].
    ///
    /// # Communication
    /// As [`ZeroOptimizer::step`](crate::ZeroOptimizer::step).
    ///
    /// # Errors
    /// As [`TensorOptimizer::step_with`].
    pub fn step(&mut self, lr: f64) -> Result<UpdateReport> {
        self.step_with(lr, |_, var| Some(var.grad()).filter(Tensor::defined))
    }

    /// Sets the gradients of the variables to zero, as a step does not.
    pub fn zero_grad(&mut self) {
        for tensor in self.tensors_mut() {
            tensor.zero_grad();
        }
    }
}
