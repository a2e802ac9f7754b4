//! Steps of candle's variables (feature `candle`).

use crate::{Result, TensorOptimizer, UpdateReport};
use candle_core::{Var, backprop::GradStore};

/// An optimizer over candle's variables: those of a `VarMap` are
/// [`vars_by_name`](merak_mpu::candle::vars_by_name).
///
/// ```
/// use candle_core::{Device, Var};
/// use merak_mpu::threads;
/// use merak_zero::{TensorOptimizer, ZeroConfig, ZeroGroups};
/// use std::error::Error;
///
/// let weights = threads::run(2, threads::WorldOptions::default(), |member| {
///     let groups = ZeroGroups {
///         data_sequence: member.world_group()?,
///         model: member.group("model", &[member.rank()])?,
///     };
///     let weight = Var::new(&[1.0_f32, -1.0], &Device::Cpu)?;
///     let params = [("weight".to_owned(), weight.clone())].into();
///     let config = ZeroConfig::default();
///     let mut optimizer = TensorOptimizer::new(params, config, groups, |spec| spec)?;
///     for _ in 0..50 {
///         let loss = weight.sqr()?.sum_all()?;
///         optimizer.step(&loss.backward()?, 0.1)?;
///     }
///     Ok::<_, Box<dyn Error + Send + Sync>>(weight.to_vec1::<f32>()?)
/// })?;
/// assert!(weights[0] == weights[1] && weights[0][0].abs() < 0.1);
/// # Ok::<(), Box<dyn Error>>(())
/// ```
impl TensorOptimizer<Var> {
    /// Reduces, clips and applies the gradients of the variables with learning rate `lr`. A
    /// variable without a gradient has zeros.
    ///
    /// # Communication
    /// As [`ZeroOptimizer::step`](crate::ZeroOptimizer::step).
    ///
    /// # Errors
    /// As [`TensorOptimizer::step_with`].
    pub fn step(&mut self, grads: &GradStore, lr: f64) -> Result<UpdateReport> {
        self.step_with(lr, |_, var| grads.get(var).cloned())
    }
}
