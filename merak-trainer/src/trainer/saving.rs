//! Saving while training goes on: threads copy the tensors beside the next forward and backward
//! passes, and write the copies. The ranks complete the checkpoint together when all have written.

use super::{
    MerakTrainer,
    shards::{ShardSource, StagingMemory},
};
use crate::error::{Result, StepPart, no_thread};
use merak_ckpt::{Base, Draft, Header, PendingShard, Store};
use merak_mpu::ReduceOp;
use serde_json::Value;
use std::{
    thread::{self, JoinHandle},
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

/// The saves of a run on this rank.
#[derive(Debug, Default)]
pub(super) struct Saving {
    /// The save that is under way.
    pending: Option<PendingSave>,
    /// The time that the last save took from training.
    stall: Duration,
    /// Memory of the copies, from save to save.
    staging: StagingMemory,
    /// Deletes older checkpoints.
    rotation: Option<JoinHandle<merak_ckpt::Result<Vec<u64>>>>,
    /// The step of the last complete checkpoint.
    pub(super) last_step: Option<usize>,
    /// The saved base with the parameters that are not trained, once there is one.
    pub(super) base: Option<Base>,
    /// The name of the base in a resumed run's adapter, on rank 0.
    pub(super) adapter_base: Option<Value>,
}

impl Saving {
    /// Whether threads of this rank still write the save that is under way; `None` without one.
    fn is_writing(&self) -> Option<bool> {
        let pending = self.pending.as_ref()?;
        Some(!pending.shards.iter().all(PendingShard::is_finished))
    }

    /// Waits until the tensors of a save are copied, before an update changes them.
    pub(super) fn wait_copied(&mut self) {
        let start = Instant::now();
        if let Some(pending) = &self.pending {
            pending.shards.iter().for_each(PendingShard::wait_copied);
            self.stall += start.elapsed();
        }
    }

    /// Starts a thread that deletes the checkpoints beyond the limit, except that of the step
    /// `keep`: to free gigabytes takes a while.
    pub(super) fn start_rotation(
        &mut self,
        store: Store,
        limit: i64,
        keep: Option<u64>,
    ) -> Result<()> {
        let rotate = move || store.rotate(limit, keep.as_slice());
        let thread = thread::Builder::new().name("merak-rotation".to_owned());
        let spawned = thread.spawn(rotate);
        self.rotation = Some(spawned.map_err(no_thread("delete checkpoints"))?);
        Ok(())
    }

    /// Waits for the deletion of checkpoints to end.
    fn finish_rotation(&mut self) -> Result<()> {
        if let Some(rotation) = self.rotation.take() {
            let deleted = rotation.join();
            deleted.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(())
    }
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
        self.saving.stall = Duration::ZERO;
        self.stalled(self.progress.global_step, |trainer| {
            let staging = trainer.saving.staging.clone();
            let write = |source: ShardSource, draft: &Draft| source.write_later(draft, &staging);
            let (draft, shards, header) = trainer.draft_of(write)?;
            trainer.saving.pending = Some(PendingSave {
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
        let Some(pending) = self.saving.pending.take() else {
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

    /// Completes the save that is under way, if every rank has written its part. Returns whether a
    /// save is still under way.
    ///
    /// # Communication
    /// An all-reduce of 8 bytes over the world, where one is under way.
    ///
    /// # Errors
    /// As [`MerakTrainer::finish_save`].
    pub fn finish_save_if_written(&mut self) -> Result<bool> {
        let Some(is_writing) = self.saving.is_writing() else {
            return Ok(false);
        };
        let world = self.stages.mpu.world_group();
        if world.all_reduce_scalar(i64::from(is_writing), ReduceOp::Max)? == 1 {
            return Ok(true);
        }
        self.finish_save()?;
        Ok(false)
    }

    /// The time that the last [`MerakTrainer::save_later`] took from this rank's training: the
    /// call, the wait for the copy before an update, and the completion.
    pub fn save_stall(&self) -> Duration {
        self.saving.stall
    }

    /// Waits for the deletion of older checkpoints to end.
    pub(super) fn finish_rotation(&mut self) -> Result<()> {
        self.within(StepPart::Save, self.progress.global_step, |trainer| {
            trainer.saving.finish_rotation()
        })
    }

    /// Completes the save that is under way. Saves the last step too, where the arguments ask for
    /// checkpoints and steps were made.
    pub(super) fn end_saving(&mut self, made_steps: bool) -> Result<()> {
        self.finish_save()?;
        let is_saved = self.saving.last_step == Some(self.progress.global_step);
        if self.args.saves() && made_steps && !is_saved {
            self.save_checkpoint()?;
        }
        self.finish_rotation()
    }

    /// Runs a part of a step's save, and adds its time to [`MerakTrainer::save_stall`].
    fn stalled(&mut self, step: usize, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let outcome = self.within(StepPart::Save, step, work);
        self.saving.stall += start.elapsed();
        outcome
    }

    /// Saves before the next step, or with `async_save` while training goes on.
    pub(super) fn save_during_training(&mut self) -> Result<()> {
        if self.args.async_save {
            return self.save_later();
        }
        self.save_checkpoint().map(drop)
    }
}
