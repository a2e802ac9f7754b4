//! Saving while training goes on: the tensors are copied, threads write them, and the ranks meet again when all have.

use super::MerakTrainer;
use crate::Result;
use merak_ckpt::{Draft, Header, PendingShard};
use merak_mpu::ReduceOp;

/// A checkpoint that threads are writing.
#[derive(Debug)]
pub(super) struct PendingSave {
    draft: Draft,
    shards: Vec<PendingShard>,
    header: Header,
}

impl MerakTrainer {
    /// Begins a checkpoint of the run as it stands and returns when the tensors have been copied, which takes as
    /// much memory as they do. It is complete after [`MerakTrainer::finish_save`]; a crash until then leaves the
    /// older ones as they were.
    ///
    /// # Communication
    /// A barrier, and what a save that is still under way needs.
    ///
    /// # Errors
    /// When the folder cannot be written, or an earlier save failed.
    pub fn save_later(&mut self) -> Result<()> {
        let (draft, shards, header) = self.draft_of(Draft::write_shard_later)?;
        self.pending_save = Some(PendingSave {
            draft,
            shards,
            header,
        });
        Ok(())
    }

    /// Waits for the save that is under way, if one is, and completes it.
    ///
    /// # Communication
    /// As [`MerakTrainer::save_checkpoint`], where one is under way.
    ///
    /// # Errors
    /// When a rank could not write its part.
    pub fn finish_save(&mut self) -> Result<()> {
        let Some(pending) = self.pending_save.take() else {
            return Ok(());
        };
        let PendingSave {
            draft,
            shards,
            header,
        } = pending;
        let shards = shards.into_iter().map(PendingShard::wait);
        let shards = shards.collect::<merak_ckpt::Result<Vec<_>>>()?;
        self.commit(&draft, &shards, header)?;
        Ok(())
    }

    /// Completes the save that is under way if every rank has written its part.
    ///
    /// # Communication
    /// An all-reduce of 8 bytes over the world, where one is under way.
    pub(super) fn finish_save_if_written(&mut self) -> Result<()> {
        let Some(pending) = &self.pending_save else {
            return Ok(());
        };
        let is_written = pending.shards.iter().all(PendingShard::is_finished);
        let world = self.stages.mpu.world_group();
        if world.all_reduce_scalar(i64::from(is_written), ReduceOp::Min)? == 1 {
            self.finish_save()?;
        }
        Ok(())
    }

    /// Saves as the arguments say: now, or while training goes on.
    pub(super) fn save_on_the_way(&mut self) -> Result<()> {
        if self.args.async_save {
            return self.save_later();
        }
        self.save_checkpoint().map(drop)
    }
}
