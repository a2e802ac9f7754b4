//! Loading a checkpoint: its weights, and the state of the run that saved it.

use super::{
    MerakTrainer,
    resume::{self, Candidates},
    run_length::{RunLength, batch_shape},
    run_state::RunState,
    shards::state_layout,
};
use crate::{
    config::CheckedArguments,
    data::{TrainingOrder, with_seed},
    error::{Error, Result, Teller},
    folder::AUTO,
    plan::Plan,
};
use merak_ckpt::{Checkpoint, DType, Kind, Layout, Piece, Topology};
use merak_mpu::{Rank, ReduceOp};
use merak_trace::Param;
use merak_zero::EMA;
use std::path::{Path, PathBuf};

/// A rank's part of a checkpoint, before anything changes.
struct ReadState {
    /// The bytes of each parameter of this rank; `None` leaves it as it is.
    weights: Vec<Option<Vec<u8>>>,
    /// The values of each slice of its state; `None` leaves them as they are.
    optimizer: Option<Vec<Option<Vec<f32>>>>,
    /// The run that saved it; `None` in a release.
    state: Option<RunState>,
}

/// What was found in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedCheckpoint {
    /// The checkpoint.
    pub path: PathBuf,
    /// Steps done when it was saved.
    pub global_step: usize,
    /// Samples used of the epoch in hand.
    pub consumed_samples: usize,
    /// Steps of the whole run that goes on from it.
    pub total_steps: usize,
    /// The degrees that saved it.
    pub topology: Topology,
    /// Parameters of the model that the checkpoint lacks, which start at random: those of a new
    /// classifier. Without those of an adapter.
    pub fresh: Vec<String>,
    /// Parameters of the checkpoint that the model does not use.
    pub unused: Vec<String>,
    /// Whether it has the state of a run, and not weights alone.
    pub has_state: bool,
}

impl LoadedCheckpoint {
    pub(super) fn of(
        checkpoint: &Checkpoint,
        state: Option<&RunState>,
        plan: &Plan,
        args: &CheckedArguments,
        length: &RunLength,
    ) -> Self {
        let header = &checkpoint.manifest().header;
        let fresh = resume::Fresh::of(checkpoint, plan, args, state.is_none());
        Self {
            path: checkpoint.path().to_owned(),
            global_step: header.step as usize,
            consumed_samples: state.map_or(0, |state| state.position.samples),
            total_steps: length.total_steps,
            topology: header.topology,
            fresh: fresh.names(plan),
            unused: fresh.unused(plan),
            has_state: state.is_some(),
        }
    }
}

impl MerakTrainer {
    /// Resumes as `resume_from_checkpoint` says. Only `auto` goes on to another checkpoint where
    /// the one that `latest` names is damaged, and to a fresh start where there is none. Returns
    /// whether there was one.
    ///
    /// # Communication
    /// For each checkpoint that is tried, a broadcast of its path from the first rank, which looks
    /// for it, and an all-reduce of 8 bytes over the world.
    pub(super) fn resume(&mut self, from: &str) -> Result<bool> {
        let candidates = || Candidates::new(from, || self.args.run_folder());
        let mut candidates = self.stages.mpu.is_rank_0().then(candidates).transpose()?;
        while let Some(opened) = self
            .next_candidate(candidates.as_mut())
            .map_err(|error| resume::with_words(error, from, &self.args))?
        {
            let read = match opened {
                Ok(checkpoint) => {
                    let (plan, parts) = (&self.stages.plan, &self.parts);
                    let checkpoint = resume::as_loaded(checkpoint, &self.args, parts)?;
                    let state = resume::check(&checkpoint, plan, &self.args, parts)?;
                    let read = self.read(&checkpoint, state);
                    read.map(|read| (checkpoint, read))
                }
                Err(error) => Err(error),
            };
            let failed = self.first_failed(&read)?;
            if failed.is_none() || from != AUTO {
                let (checkpoint, read) = self.on_all_ranks(read)?;
                self.resumed_from = Some(self.apply(&checkpoint, read)?);
                return Ok(true);
            }
            if let (Err(error), true) = (read, failed == Some(self.stages.mpu.rank())) {
                resume::pass_over(&error);
            }
        }
        Ok(false)
    }

    /// The checkpoint that the first rank tries next, opened on every rank.
    fn next_candidate(
        &self,
        candidates: Option<&mut Candidates>,
    ) -> Result<Option<Result<Checkpoint>>> {
        let world = self.stages.mpu.world_group();
        let found = candidates.and_then(Iterator::next).transpose()?;
        let path = found.as_ref().map_or(Path::new(""), Checkpoint::path);
        let path = world.broadcast_bytes(path.as_os_str().as_encoded_bytes().to_vec(), 0)?;
        if path.is_empty() {
            return Ok(None);
        }
        let open = || {
            let path = String::from_utf8_lossy(&path);
            Ok(Checkpoint::open_weights(path.as_ref())?)
        };
        Ok(Some(found.map_or_else(open, Ok)))
    }

    /// Loads a checkpoint of any topology, or a Hugging Face folder; each rank reads its slices
    /// only.
    ///
    /// With `finetune`, or where it is a release without a run's state, the weights alone are
    /// loaded. No weight changes unless every rank could read its part.
    ///
    /// # Communication
    /// Two all-reduces of 8 bytes over the world.
    ///
    /// # Errors
    /// When it is damaged, of another model, or lacks a part that no flag excuses, on any rank.
    pub fn load_checkpoint(&mut self, path: &Path) -> Result<LoadedCheckpoint> {
        let checkpoint = Checkpoint::open_weights(path)?;
        let checkpoint = resume::as_loaded(checkpoint, &self.args, &self.parts)?;
        let state = resume::check(&checkpoint, &self.stages.plan, &self.args, &self.parts)?;
        let read = self.on_all_ranks(self.read(&checkpoint, state))?;
        self.apply(&checkpoint, read)
    }

    /// What this rank has read if every rank could read its part; otherwise this rank's own error,
    /// or one that names the first rank that could not.
    pub(super) fn on_all_ranks<T>(&self, read: Result<T>) -> Result<T> {
        let Some(rank) = self.first_failed(&read)? else {
            return read;
        };
        read?;
        self.stages.mpu.world_group().barrier()?;
        Err(Error::Rank {
            rank: rank.0,
            cause: "it could not read the checkpoint".to_owned(),
            teller: Teller::Here,
        })
    }

    /// The first rank that could not read its part.
    fn first_failed<T>(&self, read: &Result<T>) -> Result<Option<Rank>> {
        let none = i64::MAX;
        let own = self.stages.mpu.rank();
        let failed = if read.is_ok() {
            none
        } else {
            (own.0 as u64).cast_signed()
        };
        let world = self.stages.mpu.world_group();
        let first = world.all_reduce_scalar(failed, ReduceOp::Min)?;
        Ok((first != none).then_some(Rank(first as usize)))
    }

    /// This rank's part of a checkpoint that fits; changes nothing.
    fn read(&self, checkpoint: &Checkpoint, state: Option<RunState>) -> Result<ReadState> {
        let optimizer = if state.is_some() && !self.args.finetune && !self.args.no_load_optim {
            Some(self.read_optimizer(checkpoint, |_| true)?)
        } else {
            None
        };
        Ok(ReadState {
            weights: self.read_weights(checkpoint, state.is_none())?,
            optimizer,
            state,
        })
    }

    /// Goes on from what was read.
    fn apply(&mut self, checkpoint: &Checkpoint, read: ReadState) -> Result<LoadedCheckpoint> {
        let ReadState {
            weights,
            optimizer,
            state,
        } = read;
        self.set_weights(&weights)?;
        self.stages.start_average()?;
        if let Some(values) = optimizer {
            self.set_optimizer(values)?;
        }
        if self.stages.mpu.is_rank_0() {
            let (plan, parts) = (&self.stages.plan, &self.parts);
            resume::warn_of_checkpoint(plan, &self.args, parts, state.as_ref(), checkpoint);
        }
        if let Some(state) = state.as_ref().filter(|_| !self.args.finetune) {
            if !self.args.no_load_rng && self.stages.mpu.is_rank_0() {
                resume::warn_of_seeds(&self.args, state, checkpoint.path());
            }
            if self.stages.mpu.is_rank_0() {
                self.saving.adapter_base = resume::adapter_base(&self.stages.plan, checkpoint);
            }
            self.restore_position(state)?;
            self.restore_best(state.best, checkpoint.path())?;
            let stopping = self.early_stopping.as_mut().zip(state.early_stopping);
            if let Some((stopping, state)) = stopping {
                stopping.restore(state);
            }
            let guard = self.divergence.as_mut().zip(state.divergence.as_ref());
            if let Some((guard, recent)) = guard {
                guard.recent = recent.clone();
            }
        }
        self.loader = None;
        let (state, plan) = (state.as_ref(), &self.stages.plan);
        let (args, length) = (&self.args, &self.progress.length);
        Ok(LoadedCheckpoint::of(checkpoint, state, plan, args, length))
    }

    /// Takes weights that were read. Parameters that the checkpoint lacks are drawn, or stay as
    /// they are.
    pub(super) fn set_weights(&mut self, weights: &[Option<Vec<u8>>]) -> Result<()> {
        self.stages.settle()?;
        // The weights may differ from those of the base.
        self.saving.base = None;
        if self.stages.is_blank {
            let lacks = |index: usize| weights[index].is_none();
            self.stages.draw(self.parts.num_threads, lacks)?;
        }
        self.stages.params.write(&mut |index, bytes| {
            if let Some(values) = &weights[index] {
                bytes.copy_from_slice(values);
            }
        });
        if weights.iter().any(Option::is_none) {
            self.stages.start_magnitudes()?;
        }
        Ok(())
    }

    /// Takes the optimizer state that was read; what is `None` stays as it is.
    pub(super) fn set_optimizer(&mut self, values: Vec<Option<Vec<f32>>>) -> Result<()> {
        Ok(self.stages.optimizer.edit_state(|state| {
            for (slice, values) in state.slices_mut().zip(values) {
                if let Some(values) = values {
                    slice.values.copy_from_slice(&values);
                }
            }
        })?)
    }

    /// Restores step, loss scale, seeds and the place in the data.
    fn restore_position(&mut self, state: &RunState) -> Result<()> {
        self.stages.optimizer.set_progress(state.progress);
        if let Some(scaler) = state.scaler {
            self.stages.optimizer.restore_scaler(scaler);
        }
        self.progress.global_step = state.global_step;
        self.progress.tokens = state.tokens;
        if !self.args.no_load_rng {
            self.stages.seed = state.seed;
        }
        let in_use = self.progress.length.data_seed(&self.args);
        let data_seed = if self.args.no_load_rng {
            in_use
        } else {
            state.data_seed
        };
        // Data of a program may have seeds of their own, which stay where the run's does.
        if data_seed != in_use {
            for data in [&mut self.parts.train_data, &mut self.parts.eval_data] {
                *data = data.as_ref().map(|data| with_seed(data, data_seed));
            }
        }
        let Some(data) = &self.parts.train_data else {
            return Ok(());
        };
        let order = TrainingOrder::of(&**data, batch_shape(&self.args), data_seed)?;
        let length = &mut self.progress.length;
        length.order = Some(order);
        let unused = length.resume(&self.args, state)?;
        if unused > 0 && self.stages.mpu.is_rank_0() {
            tracing::warn!(
                unused,
                "the global batch changed: training goes on at the next whole one"
            );
        }
        Ok(())
    }

    /// Reads this rank's parameters; `None` for those that start anew beside this checkpoint.
    pub(super) fn read_weights(
        &self,
        checkpoint: &Checkpoint,
        is_release: bool,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let manifest = checkpoint.manifest();
        let fresh = resume::Fresh::of(checkpoint, &self.stages.plan, &self.args, is_release);
        let read = |(index, param): (usize, &Param)| {
            if fresh.has(param) {
                return Ok(None);
            }
            let place = self.layout(param)?;
            let name = resume::stored_name(manifest, &param.name, is_release);
            let piece = Piece {
                name: &name,
                ..self.parameter(index, &place)
            };
            let mut values = vec![0; param.local.numel() * piece.dtype.size_bytes()];
            checkpoint.read_as(&piece, &mut values)?;
            Ok(Some(values))
        };
        let params = self.stages.table.iter();
        params.enumerate().map(read).collect()
    }

    /// The optimizer state that this rank owns, in the order of its slices; `None` for names that
    /// are not wanted, and for averages that the checkpoint lacks.
    pub(super) fn read_optimizer(
        &self,
        checkpoint: &Checkpoint,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<Option<Vec<f32>>>> {
        let state = self.stages.optimizer.state();
        let params = &self.stages.table;
        let trained = self.stages.trained();
        let read = |slice: merak_zero::StateSlice<&[f32]>| {
            if !is_wanted(slice.name) {
                return Ok(None);
            }
            let param = &params[trained[slice.param]];
            let place = state_layout(&self.layout(param)?, slice.without)?;
            let kind = Kind::optimizer(slice.name);
            let stored = checkpoint.manifest().tensor(&kind, &param.name);
            if slice.name == EMA && stored.is_none() {
                return Ok(None);
            }
            let mut values = vec![0.0_f32; slice.values.len()];
            checkpoint.read(
                &piece(&kind, param, &place, Some(slice.local)),
                bytemuck::cast_slice_mut(&mut values),
            )?;
            Ok(Some(values))
        };
        state.slices().map(read).collect()
    }

    /// This rank's slice of a parameter, in the element type in which it is kept.
    fn parameter<'a>(&'a self, index: usize, layout: &'a Layout) -> Piece<'a> {
        Piece {
            dtype: self.stages.stored(index),
            ..piece(&Kind::Parameter, &self.stages.table[index], layout, None)
        }
    }
}

/// A rank's slice of a parameter, or of the optimizer state that belongs to it.
pub(super) fn piece<'a>(
    kind: &'a Kind,
    param: &'a Param,
    layout: &'a Layout,
    range: Option<std::ops::Range<usize>>,
) -> Piece<'a> {
    Piece {
        kind,
        name: &param.name,
        dtype: DType::F32,
        layout,
        range,
    }
}
