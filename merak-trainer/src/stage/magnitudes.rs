//! The starting magnitudes of an adapter that has them (`DoRA`): the norms of the weights as they
//! are.

use super::RankStages;
use super::params::Floats;
use crate::Result;
use merak_mpu::ReduceOp;
use merak_trace::{Param, Placement};
use std::collections::BTreeMap;

/// The part of a parameter's name that marks a magnitude.
const MAGNITUDE: &str = ".lora_magnitude_vector.";

/// The local values of a parameter by its name.
type Values<'a> = BTreeMap<&'a str, Floats<'a>>;

impl RankStages {
    /// Sets each magnitude to the norm of the updated weights of its output, so that an adapter
    /// starts without changing them.
    ///
    /// # Communication
    /// For each layer whose inputs are cut over tensor-parallel ranks, an all-reduce of a number
    /// per output.
    pub(crate) fn start_magnitudes(&mut self) -> Result<()> {
        let params = &self.table;
        if !params.iter().any(|param| param.name.contains(MAGNITUDE)) {
            return Ok(());
        }
        let mut sums = BTreeMap::new();
        self.params.read_floats(&mut |all| {
            let named = params.iter().zip(all);
            let values: Values<'_> = named
                .map(|(param, values)| (param.name.as_str(), *values))
                .collect();
            for (index, param) in params.iter().enumerate() {
                if let Some(squares) = self.squares(param, &values) {
                    sums.insert(index, squares);
                }
            }
        });
        let group = self.mpu.tensor_parallel_group();
        for (&index, squares) in &mut sums {
            let beside = params[index].beside.as_ref();
            let matrix = params
                .iter()
                .find(|param| beside.is_some_and(|beside| beside.param == param.name));
            let (Some(beside), Some(matrix)) = (beside, matrix) else {
                continue;
            };
            let is_cut = |shard: &merak_trace::Shard| shard.dim != beside.of;
            if matches!(&matrix.placement, Placement::Shard(shard) if is_cut(shard)) {
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
    fn squares(&self, magnitude: &Param, values: &Values<'_>) -> Option<Vec<f64>> {
        let (module, adapter) = magnitude.name.split_once(MAGNITUDE)?;
        let beside = magnitude.beside.as_ref()?;
        let of = |name: &str| values.get(name).map(|floats| floats.values());
        let weights = of(&beside.param)?;
        let factor = |half: &str| of(&format!("{module}.{half}.{adapter}"));
        let (a, b) = (factor("lora_A")?, factor("lora_B")?);
        let scale = self.plan.lora.as_ref()?.config.scale_of(module);
        let outputs = magnitude.local.numel();
        let (inputs, rank) = (weights.len() / outputs, b.len() / outputs);
        let (of_output, of_input) = match beside.of {
            0 => (inputs, 1),
            _ => (1, outputs),
        };
        let square = |output: usize| {
            let weight = |input: usize| {
                let product = (0..rank).map(|k| b[output * rank + k] * a[k * inputs + input]);
                let product: f32 = product.sum();
                let weight = weights[output * of_output + input * of_input];
                (f64::from(weight) + scale * f64::from(product)).powi(2)
            };
            (0..inputs).map(weight).sum::<f64>()
        };
        Some((0..outputs).map(square).collect())
    }
}
