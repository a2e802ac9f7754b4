//! The starting magnitudes of an adapter that has them (`DoRA`): the norms of the weights as they
//! are.

use super::RankStages;
use super::params::Floats;
use crate::error::Result;
use merak_ckpt::{FactorName, FactorRole};
use merak_mpu::ReduceOp;
use merak_trace::{Axis, Beside, Param};
use std::collections::BTreeMap;

/// The local values of a parameter by its name.
type Values<'a> = BTreeMap<&'a str, Floats<'a>>;

impl RankStages {
    /// Sets each magnitude to the norm of the updated weights of its output, so that an adapter
    /// starts without changing them.
    ///
    /// # Communication
    /// For each layer whose inputs are cut over tensor-parallel ranks, an all-reduce of a number
    /// per output; that of [`RankStages::read_floats`].
    pub(crate) fn start_magnitudes(&mut self) -> Result<()> {
        let params = &self.table;
        if !params.iter().any(|param| magnitude(param).is_some()) {
            return Ok(());
        }
        let mut sums = BTreeMap::new();
        self.read_floats(&mut |all| {
            let named = params.iter().zip(all);
            let values: Values<'_> = named
                .map(|(param, values)| (param.name.as_str(), *values))
                .collect();
            for (index, param) in params.iter().enumerate() {
                if let Some(squares) = self.squares(param, &values) {
                    sums.insert(index, squares);
                }
            }
        })?;
        let group = self.mpu.tensor_parallel_group();
        for (&index, squares) in &mut sums {
            let beside = params[index].beside.as_ref();
            let matrix = params
                .iter()
                .find(|param| beside.is_some_and(|beside| beside.param == param.name));
            let (Some(beside), Some(matrix)) = (beside, matrix) else {
                continue;
            };
            let cut = matrix.placements.on(Axis::Tensor).as_shard();
            if cut.is_some_and(|shard| shard.dim != beside.of) {
                *squares = group.all_reduce_vec(std::mem::take(squares), ReduceOp::Sum)?;
            }
        }
        self.params.write_floats(&mut |index, values| {
            if let Some(squares) = sums.get(&index) {
                for (value, squares) in values.iter_mut().zip(squares) {
                    *value = squares.sqrt() as f32;
                }
            }
        });
        Ok(())
    }

    /// For a magnitude, the sum of squares of each output's updated weights, over this rank's
    /// inputs.
    fn squares(&self, param: &Param, values: &Values<'_>) -> Option<Vec<f64>> {
        let (name, beside) = magnitude(param)?;
        let of = |name: &str| values.get(name).map(|floats| floats.values());
        let factor = |role| of(&FactorName { role, ..name }.to_string());
        let (a, b) = (factor(FactorRole::A)?, factor(FactorRole::B)?);
        let scale = self.plan.draft.lora.as_ref()?.config.scale_of(name.layer);
        Some(merak_ckpt::squares_of_outputs(
            &of(&beside.param)?,
            [&a, &b],
            param.local.numel(),
            scale,
            beside.of != 0,
        ))
    }
}

/// The name of a magnitude, and the weight that it stands beside; `None` for other parameters.
fn magnitude(param: &Param) -> Option<(FactorName<'_>, &Beside)> {
    let beside = param.beside.as_ref()?;
    let name = FactorName::parse(&param.name)?;
    (name.role == FactorRole::Magnitude).then_some((name, beside))
}
