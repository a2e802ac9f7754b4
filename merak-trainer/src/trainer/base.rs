//! The base of a run with an adapter: the parameters that it does not train. They lie once beside
//! the run's checkpoints, which all refer to them.

use super::MerakTrainer;
use crate::error::Result;
use merak_ckpt::{Base, Checkpoint, Header, Kind, Store};
use merak_mpu::ReduceOp;
use std::collections::BTreeSet;

impl MerakTrainer {
    /// The base of the next checkpoints, found in the run's folder or written there; `None` where
    /// checkpoints hold everything themselves: without an adapter beside the layers, and while
    /// another one is merged into the weights.
    ///
    /// # Communication
    /// Beside an adapter: all-reduces of 8 bytes over the world; where the base is not known, one
    /// more for each base in the folder, and where it is written two barriers and the gathering of
    /// the shards' tables.
    pub(super) fn settle_base(&mut self) -> Result<Option<Base>> {
        let frozen = self.frozen_names();
        if self.stages.plan.draft.lora.is_none() || frozen.is_empty() {
            return Ok(None);
        }
        if self.largest(i64::from(!self.base_values.is_empty()))? == 1 {
            return Ok(None);
        }
        let store = Store::in_output_dir(self.args.run_folder()?);
        if !self.has_base(&store)? {
            self.saving.base = Some(match self.find_base(&store, &frozen)? {
                Some(base) => base,
                None => self.write_base(&store)?,
            });
        }
        Ok(self.saving.base.clone())
    }

    /// The names of the parameters that are not trained, on any rank.
    fn frozen_names(&self) -> BTreeSet<String> {
        let params = self.stages.plan.graph.params().iter();
        let frozen = params.filter(|param| !param.trainable);
        frozen.map(|param| param.name.clone()).collect()
    }

    /// Whether the base in use is known and still there: its folder may have been removed.
    fn has_base(&self, store: &Store) -> Result<bool> {
        let Some(base) = &self.saving.base else {
            return Ok(false);
        };
        let is_there = || {
            let numbers = store.bases().unwrap_or_default().into_iter();
            let mut found = numbers.filter_map(|number| store.base(number).ok());
            found.any(|(found, _)| found == *base)
        };
        let is_gone = self.stages.mpu.is_rank_0() && !is_there();
        Ok(self.largest(i64::from(is_gone))? == 0)
    }

    /// The newest base in the folder that holds the values of all ranks, as a resumed run finds it.
    fn find_base(&self, store: &Store, frozen: &BTreeSet<String>) -> Result<Option<Base>> {
        let last = self.last_base(store)?;
        let source = self.frozen_source()?;
        for number in (1..=last).rev() {
            let found = store.base(number as u64).ok();
            let found = found.filter(|(_, saved)| names(saved) == *frozen && source.is_in(saved));
            let is_missing = self.largest(i64::from(found.is_none()))? == 1;
            if let Some((base, _)) = found.filter(|_| !is_missing) {
                return Ok(Some(base));
            }
        }
        Ok(None)
    }

    fn write_base(&self, store: &Store) -> Result<Base> {
        let mpu = &self.stages.mpu;
        let (number, step) = (
            self.last_base(store)? as u64 + 1,
            self.progress.global_step as u64,
        );
        let begun = mpu.is_rank_0().then(|| store.begin_base(number, step));
        let begun = begun.transpose()?;
        mpu.world_group().barrier()?;
        let draft = begun.unwrap_or_else(|| store.base_draft(number, step));
        let written = self.frozen_source()?.write(&draft)?;
        let shards = self.gather_shards(&[written])?;
        if mpu.is_rank_0() {
            let header = Header {
                state: serde_json::Value::Null,
                ..self.header()
            };
            draft.commit(shards, header, &[])?;
        }
        mpu.world_group().barrier()?;
        Ok(store.base(number)?.0)
    }

    /// The highest number of a base in the folder, or 0.
    fn last_base(&self, store: &Store) -> Result<i64> {
        let last = store.bases()?.last().map_or(0, |&last| last.cast_signed());
        self.largest(last)
    }

    fn largest(&self, own: i64) -> Result<i64> {
        let world = self.stages.mpu.world_group();
        Ok(world.all_reduce_scalar(own, ReduceOp::Max)?)
    }
}

/// The names of a base's parameters; empty if it holds anything else.
fn names(saved: &Checkpoint) -> BTreeSet<String> {
    let tensors = saved.manifest().tensors.iter();
    let are_parameters = tensors.clone().all(|tensor| tensor.kind == Kind::Parameter);
    let names = tensors.map(|tensor| tensor.name.clone());
    names.filter(|_| are_parameters).collect()
}
