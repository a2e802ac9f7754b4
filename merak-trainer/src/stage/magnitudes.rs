//! The starting magnitudes of an adapter that has them (`DoRA`): the norms of the weights as they
//! are.

use super::RankStages;
use super::params::Floats;
use crate::{error::Result, plan::magnitude};
use merak_ckpt::{FactorName, FactorRole};
use merak_mpu::ReduceOp;
use merak_trace::{Axis, Coord, Param};
use std::{collections::BTreeMap, ops::Range};

/// The whole factors of adapters, by name.
type Factors<'a> = BTreeMap<&'a str, Vec<f32>>;

impl RankStages {
    /// Sets each magnitude to the norm of the updated weights of its output, so that an adapter
    /// starts without changing them.
    ///
    /// A weight that several layers use need not lie as the factors beside one of them do. So each
    /// rank takes what it has of the weight, with whole factors.
    ///
    /// # Communication
    /// For each layer that is cut over tensor-parallel ranks, an all-reduce of its factors and of a
    /// number per output; twice that of [`RankStages::read_floats`].
    pub(crate) fn start_magnitudes(&mut self) -> Result<()> {
        if !self.table.iter().any(|param| magnitude(param).is_some()) {
            return Ok(());
        }
        let magnitudes = self.norms()?;
        self.params.write_floats(&mut |index, values| {
            if let Some(norms) = magnitudes.get(&index) {
                values.copy_from_slice(norms);
            }
        });
        Ok(())
    }

    /// For each magnitude, by its place in the table, the norms of this rank's outputs.
    fn norms(&self) -> Result<BTreeMap<usize, Vec<f32>>> {
        let place = self.mpu.coord();
        let factors = self.whole_factors(place)?;
        let mut sums = BTreeMap::new();
        self.read_floats(&mut |all| {
            for (index, param) in self.table.iter().enumerate() {
                if let Some(squares) = self.squares(param, all, &factors, place) {
                    sums.insert(index, squares);
                }
            }
        })?;
        let group = self.mpu.tensor_parallel_group();
        let mut norms = BTreeMap::new();
        for (index, mut squares) in sums {
            let param = &self.table[index];
            if self
                .weight_of(param)
                .is_some_and(|(_, weight)| is_cut(weight))
            {
                squares = group.all_reduce_vec(squares, ReduceOp::Sum)?;
            }
            let mut own = vec![0.0; param.local.numel()];
            for (first, local) in runs(param, place) {
                let squares = squares[first..].iter();
                for (norm, squares) in own[local].iter_mut().zip(squares) {
                    *norm = squares.sqrt() as f32;
                }
            }
            norms.insert(index, own);
        }
        Ok(norms)
    }

    /// The factors beside linear layers, each of which every rank gets whole.
    fn whole_factors(&self, place: Coord) -> Result<Factors<'_>> {
        let is_factor = |param: &Param| {
            let name = FactorName::parse(&param.name);
            name.is_some_and(|name| matches!(name.role, FactorRole::A | FactorRole::B))
        };
        let mut factors = Factors::new();
        self.read_floats(&mut |all| {
            let factors_of_all = self.table.iter().zip(all);
            for (param, own) in factors_of_all.filter(|(param, _)| is_factor(param)) {
                let own = own.values();
                let mut whole = vec![0.0; param.full.numel()];
                for (first, local) in runs(param, place) {
                    whole[first..][..local.len()].copy_from_slice(&own[local]);
                }
                factors.insert(&param.name, whole);
            }
        })?;
        let group = self.mpu.tensor_parallel_group();
        for param in self.table.iter().filter(|param| is_cut(param)) {
            if let Some(whole) = factors.get_mut(param.name.as_str()) {
                *whole = group.all_reduce_vec(std::mem::take(whole), ReduceOp::Sum)?;
            }
        }
        Ok(factors)
    }

    /// For a magnitude, the sum of squares of the updated weights of every output, over the weights
    /// that this rank has.
    fn squares(
        &self,
        param: &Param,
        all: &[Floats<'_>],
        factors: &Factors<'_>,
        place: Coord,
    ) -> Option<Vec<f64>> {
        let name = magnitude(param)?;
        let factor = |role| factors.get(FactorName { role, ..name }.to_string().as_str());
        let (a, b) = (factor(FactorRole::A)?, factor(FactorRole::B)?);
        let scale = self.plan.draft.lora.as_ref()?.config.scale_of(name.layer);
        let (index, weight) = self.weight_of(param)?;
        let values = all[index].values();
        let weights = runs(weight, place).into_iter();
        Some(merak_ckpt::squares_of_outputs(
            weights.map(|(first, local)| (first, &values[local])),
            [a, b],
            param.full.numel(),
            scale,
            param.beside.as_ref()?.of != 0,
        ))
    }

    /// The weight that a parameter of an adapter stands beside, and its place in the table.
    fn weight_of(&self, param: &Param) -> Option<(usize, &Param)> {
        let beside = param.beside.as_ref()?;
        let mut params = self.table.iter().enumerate();
        params.find(|(_, weight)| weight.name == beside.param)
    }
}

/// Whether tensor-parallel ranks have different parts of a parameter.
fn is_cut(param: &Param) -> bool {
    param.placements.on(Axis::Tensor).as_shard().is_some()
}

/// The adjacent elements that the rank at `place` has of a parameter: the index of the first in the
/// whole parameter, and where they lie in the local one.
fn runs(param: &Param, place: Coord) -> Vec<(usize, Range<usize>)> {
    let mut runs = Vec::new();
    for part in param.placements.local_boxes(&param.full, place) {
        let mut locals = part.local_ranges(&param.local.shape);
        let mut local = 0..0;
        for mut full in part.full_ranges(&param.full.shape) {
            while !full.is_empty() {
                if local.is_empty() {
                    local = locals.next().expect("a box has the same elements in both");
                }
                let len = full.len().min(local.len());
                runs.push((full.start, local.start..local.start + len));
                full.start += len;
                local.start += len;
            }
        }
    }
    runs
}
