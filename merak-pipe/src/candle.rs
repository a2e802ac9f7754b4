//! Autograd of candle (feature `candle`).

use crate::{Autograd, BoxError};
use candle_core::{DType, Tensor, Var};

/// Stages of a model that is written for candle:
///
/// ```
/// use candle_core::{Device, Error, Result, Tensor, Var};
/// use merak_pipe::{
///     MicrobatchId, ScheduleKind, Size, StageId, TensorModel, TensorStages, run_threads,
/// };
/// use std::{collections::BTreeMap, time::Duration};
///
/// /// Each stage multiplies by a weight of its own.
/// struct Product(BTreeMap<String, Var>);
///
/// impl TensorModel for Product {
///     type Tensor = Tensor;
///     type Error = Error;
///
///     fn input(&self, microbatch: MicrobatchId) -> Result<Tensor> {
///         Tensor::new(&[microbatch.0 as f32, 1.0], &Device::Cpu)
///     }
///     fn forward(&self, stage: StageId, input: &Tensor) -> Result<Tensor> {
///         input.broadcast_mul(&self.0[&stage.to_string()])
///     }
///     fn loss(&self, output: &Tensor, _: MicrobatchId) -> Result<Tensor> {
///         output.sqr()?.sum_all()
///     }
/// }
///
/// let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 4))?;
/// let mut ranks = Vec::new();
/// for stage in 0..2 {
///     let weight = Var::new(&[2.0_f32], &Device::Cpu)?;
///     let vars = BTreeMap::from([(stage.to_string(), weight)]);
///     ranks.push(TensorStages::new(Product(vars.clone()), 2, vars));
/// }
/// run_threads(&schedule, &mut ranks, Duration::from_secs(10))?;
/// // Each microbatch adds (2 * 2 * m)^2 + (2 * 2)^2.
/// assert_eq!(ranks[1].take_loss(), 16.0 * (0.0 + 1.0 + 4.0 + 9.0) + 4.0 * 16.0);
/// assert!(ranks[0].take_grads().contains_key("0"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Autograd for Tensor {
    type Var = Var;

    fn into_variable(self) -> Result<Var, BoxError> {
        Ok(Var::from_tensor(&self)?)
    }

    fn of_variable(var: &Var) -> &Self {
        var
    }

    fn gradients(&self, vars: &[&Var]) -> Result<Vec<Option<Self>>, BoxError> {
        let mut grads = self.backward()?;
        Ok(vars.iter().map(|var| grads.remove(var)).collect())
    }

    fn product_sum(&self, other: &Self) -> Result<Self, BoxError> {
        Ok((self * other)?.sum_all()?)
    }

    fn plus(&self, other: &Self) -> Result<Self, BoxError> {
        Ok((self + other)?.detach())
    }

    fn elements(&self) -> Result<Vec<f64>, BoxError> {
        Ok(self.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
    }
}
