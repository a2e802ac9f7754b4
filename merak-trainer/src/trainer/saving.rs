//! Saving while training goes on: threads copy the tensors beside the next forward and backward
//! passes, and write the copies. The ranks complete the checkpoint together when all have written.

use super::{MerakTrainer, shards::ShardSource};
use crate::{Result, StepPart, error::no_thread};
use merak_ckpt::{Draft, Header, PendingShard, Store};
use merak_mpu::ReduceOp;
use std::{
    thread,
    time::{Duration, Instant},
};

/// A checkpoint that threads are writing.
#[derive(Debug)]
pub(super) struct PendingSave {
    // Dropped in this order: the draft's folder is removed after all writes into it have ended.
    shards: Vec<PendingShard>,
    draft: Draft,
    header: Header,
}

impl MerakTrainer {
    /// Begins a checkpoint of the run as it stands. Threads copy the tensors while this rank
    /// computes the gradients of its next step; the update waits until the copy is made. The copy
    /// takes as much memory as the tensors, which is kept for the next save. The checkpoint is
    /// complete after [`MerakTrainer::finish_save`]; a crash until then leaves the older ones as
    /// they were.
    ///
    /// # Communication
    /// A barrier, and what a save that is still under way needs.
    ///
    /// # Errors
    /// When the folder cannot be written, or an earlier save failed.
    pub fn save_later(&mut self) -> Result<()> {
        self.finish_save()?;
        self.save_stall = Duration::ZERO;
        self.stalled(self.global_step, |trainer| {
            let staging = trainer.staging.clone();
            let write = |source: ShardSource, draft: &Draft| source.write_later(draft, &staging);
            let (draft, shards, header) = trainer.draft_of(write)?;
            trainer.pending_save = Some(PendingSave {
                shards,
                draft,
                header,
            });
            Ok(())
        })
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
        self.stalled(draft.step() as usize, |trainer| {
            let shards = shards.into_iter().map(PendingShard::wait);
            let shards = shards.collect::<merak_ckpt::Result<Vec<_>>>()?;
            trainer.commit(&draft, &shards, header)?;
            Ok(())
        })
    }

    /// Completes the save that is under way if every rank has written its part. Returns whether one
    /// is under way still.
    ///
    /// # Communication
    /// An all-reduce of 8 bytes over the world, where one is under way.
    ///
    /// # Errors
    /// As [`MerakTrainer::finish_save`].
    pub fn finish_save_if_written(&mut self) -> Result<bool> {
        let Some(pending) = &self.pending_save else {
            return Ok(false);
        };
        let is_written = pending.shards.iter().all(PendingShard::is_finished);
        let world = self.stages.mpu.world_group();
        if world.all_reduce_scalar(i64::from(is_written), ReduceOp::Min)? == 1 {
            self.finish_save()?;
        }
        Ok(self.pending_save.is_some())
    }

    /// How long the last [`MerakTrainer::save_later`] has kept this rank from training, all told:
    /// the call, the wait for the copy before an update, and the completion.
    pub fn save_stall(&self) -> Duration {
        self.save_stall
    }

    /// Starts a thread that deletes the checkpoints beyond the limit: freeing gigabytes takes a
    /// while.
    pub(super) fn start_rotation(&mut self, store: Store) -> Result<()> {
        let limit = self.args.save_total_limit;
        let best = self.best.filter(|_| self.args.load_best_model_at_end);
        let keep = best.map(|best| best.step as u64);
        let rotate = move || store.rotate(limit, keep.as_slice());
        let thread = thread::Builder::new().name("merak-rotation".to_owned());
        self.rotation = Some(
            thread
                .spawn(rotate)
                .map_err(no_thread("delete checkpoints"))?,
        );
        Ok(())
    }

    /// Waits for the deletion of checkpoints to end.
    pub(super) fn finish_rotation(&mut self) -> Result<()> {
        let Some(rotation) = self.rotation.take() else {
            return Ok(());
        };
        self.within(StepPart::Save, self.global_step, |_| {
            let deleted = rotation.join();
            deleted.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok(())
        })
    }

    /// Waits until the tensors of a save are copied, before an update changes them.
    pub(super) fn wait_copied(&mut self) {
        let start = Instant::now();
        if let Some(pending) = &self.pending_save {
            pending.shards.iter().for_each(PendingShard::wait_copied);
            self.save_stall += start.elapsed();
        }
    }

    /// Runs a part of the save of a step, and adds its time to that lost for training.
    fn stalled(&mut self, step: usize, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let outcome = self.within(StepPart::Save, step, work);
        self.save_stall += start.elapsed();
        outcome
    }

    /// Saves as the arguments say: now, or while training goes on.
    pub(super) fn save_on_the_way(&mut self) -> Result<()> {
        if self.args.async_save {
            return self.save_later();
        }
        self.save_checkpoint().map(drop)
    }
}
