//! Saving and loading a run.

use super::{
    BestModel, EarlyStopping, MerakTrainer,
    divergence::RecentLosses,
    early_stopping::Waiting,
    resume::{self, Candidates},
    run_length::batch_shape,
    shards::{ShardSource, state_layout},
};
use crate::{
    config::CheckedArguments,
    data::{DataFingerprint, DataPosition, TrainingOrder},
    error::{Error, PlanError, Result, StepPart, Teller},
    folder::{ADAPTER, ADAPTER_CONFIG, AUTO},
    plan::{BASE_NAME, Plan},
};
use merak_ckpt::{
    Adapter, Checkpoint, DType, Draft, Header, Kind, Layout, Part, Piece, Region, Shard, Store,
    Topology, replace_lora,
};
use merak_mpu::{Rank, ReduceOp};
use merak_trace::Param;
use merak_zero::{OptimizerKind, Progress, ScalerState};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What a resumed run needs besides tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RunState {
    global_step: usize,
    /// Tokens of the global batches of these steps.
    tokens: u64,
    /// Updates done and skipped, which set the learning rate and the optimizer's time.
    progress: Progress,
    /// Where a loss scale stands that changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scaler: Option<ScalerState>,
    pub(super) position: DataPosition,
    pub(super) seed: u64,
    pub(super) data_seed: u64,
    pub(super) global_batch: usize,
    /// Whether the random state above is to be trusted, and whether there is optimizer state.
    pub(super) has_rng: bool,
    pub(super) has_optimizer: bool,
    /// The optimizer of that state; absent in checkpoints of earlier versions.
    #[serde(default)]
    pub(super) optim: Option<OptimizerKind>,
    /// The name of its rule: that of `optim`, or of the program's own rule in its place; absent in
    /// checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rule: Option<String>,
    /// The best checkpoint so far, this one included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    best: Option<BestModel>,
    /// With `early_stopping_patience`, how long an improvement is waited for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    early_stopping: Option<Waiting>,
    /// With `divergence_guard`, the losses that the next one is compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    divergence: Option<RecentLosses>,
    /// The training data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<DataFingerprint>,
}

/// The state of a checkpoint that was imported from another program's run.
#[derive(Debug, Deserialize)]
struct Imported {
    /// Updates done.
    step: usize,
    /// The optimizer, where the other program's files tell.
    optimizer: Option<OptimizerKind>,
}

impl RunState {
    /// Reads the state of a checkpoint; `None` for a release. An imported run knows its updates
    /// only: it takes the given seeds, and begins with the first sample of the data.
    pub(super) fn read(
        state: &serde_json::Value,
        args: &CheckedArguments,
    ) -> serde_json::Result<Option<Self>> {
        let Some(imported) = state.get("imported") else {
            return serde_json::from_value(state.clone());
        };
        let Imported { step, optimizer } = serde_json::from_value(imported.clone())?;
        let progress = Progress {
            steps: step as u64,
            ..Progress::default()
        };
        // Made from field names, so that missing fields are read as in states of earlier versions.
        let fields = serde_json::json!({
            "global_step": step, "tokens": 0, "progress": progress, "position": DataPosition::default(),
            "seed": args.seed, "data_seed": args.data_seed(), "global_batch": args.global_batch(),
            "has_rng": true, "has_optimizer": true, "optim": optimizer,
        });
        serde_json::from_value(fields).map(Some)
    }
}

/// A rank's part of a checkpoint, before anything changes.
struct ReadState {
    /// The bytes of each parameter of this rank; `None` leaves it as it is.
    weights: Vec<Option<Vec<u8>>>,
    optimizer: Option<Vec<Vec<f32>>>,
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
    /// The degrees that saved it.
    pub topology: Topology,
    /// Parameters of the model that the checkpoint lacks, which start at random: those of a new
    /// classifier. Without those of an adapter.
    pub fresh: Vec<String>,
    /// Parameters of the checkpoint that the model does not use.
    pub unused: Vec<String>,
}

impl LoadedCheckpoint {
    pub(super) fn of(
        checkpoint: &Checkpoint,
        state: Option<&RunState>,
        plan: &Plan,
        args: &CheckedArguments,
    ) -> Self {
        let header = &checkpoint.manifest().header;
        let fresh = resume::Fresh::of(checkpoint, plan, args, state.is_none());
        Self {
            path: checkpoint.path().to_owned(),
            global_step: header.step as usize,
            consumed_samples: state.map_or(0, |state| state.position.samples),
            topology: header.topology,
            fresh: fresh.names(plan),
            unused: fresh.unused(plan),
        }
    }
}

impl MerakTrainer {
    /// Writes a checkpoint of the run as it stands; returns its folder.
    ///
    /// Each element is written by one rank. A crash leaves the older checkpoints as they were.
    ///
    /// # Communication
    /// Two barriers, and the gathering of the shards' tables over the world. Beside an adapter,
    /// some numbers to agree on the base as well, and at the first save the same for writing it.
    ///
    /// # Errors
    /// When a file cannot be written on some rank.
    ///
    /// # Panics
    /// Never: the tables of slices are plain data.
    pub fn save_checkpoint(&mut self) -> Result<PathBuf> {
        self.within(StepPart::Save, self.progress.global_step, Self::save_now)
    }

    fn save_now(&mut self) -> Result<PathBuf> {
        let (draft, shards, header) = self.draft_of(ShardSource::write)?;
        let path = self.commit(&draft, &shards, header)?;
        self.finish_rotation()?;
        Ok(path)
    }

    /// Waits for the save under way, then makes a draft of the run as it stands. Returns with it
    /// the result of `write` for each shard that this rank owns.
    pub(super) fn draft_of<T>(
        &mut self,
        write: impl Fn(ShardSource, &Draft) -> merak_ckpt::Result<T>,
    ) -> Result<(Draft, Vec<T>, Header)> {
        self.stages.settle()?;
        self.finish_save()?;
        self.finish_rotation()?;
        let step = self.progress.global_step;
        self.tell(|callback, _| callback.on_save_start(step));
        let base = self.settle_base()?;
        let sources = self.shard_sources(base.is_some())?.into_iter();
        let draft = self.begin_draft()?.with_base(base);
        let shards = sources
            .map(|source| write(source, &draft))
            .collect::<merak_ckpt::Result<_>>()?;
        let header = self.header();
        Ok((draft, shards, header))
    }

    /// A draft of this step's checkpoint, on every rank.
    fn begin_draft(&self) -> Result<Draft> {
        let store = Store::in_output_dir(self.args.run_folder()?);
        let step = self.progress.global_step as u64;
        let begun = self.stages.mpu.is_rank_0().then(|| store.begin(step));
        let begun = begun.transpose()?;
        self.stages.mpu.world_group().barrier()?;
        Ok(begun.unwrap_or_else(|| store.draft(step)))
    }

    /// The shards that all ranks have written, on rank 0; none elsewhere.
    pub(super) fn gather_shards(&self, own: &[Shard]) -> Result<Vec<Shard>> {
        let encoded = serde_json::to_vec(own).expect("a table of slices is plain data");
        let gathered = self.stages.mpu.world_group().gather_bytes(encoded, 0)?;
        let decode = |bytes: &Vec<u8>| {
            serde_json::from_slice::<Vec<Shard>>(bytes).expect("a rank's own table")
        };
        Ok(gathered.iter().flat_map(decode).collect())
    }

    /// Makes a checkpoint of the shards that all ranks have written.
    pub(super) fn commit(
        &mut self,
        draft: &Draft,
        shards: &[Shard],
        header: Header,
    ) -> Result<PathBuf> {
        let store = Store::in_output_dir(self.args.run_folder()?);
        let mpu = Arc::clone(&self.stages.mpu);
        let world = mpu.world_group();
        let path = store.path_of(draft.step());
        let shards = self.gather_shards(shards)?;
        if mpu.is_rank_0() {
            let adapter = self.stages.plan.draft.lora.as_ref().map(|lora| {
                let mut config = lora.config.to_json();
                if let Some(base) = &self.saving.adapter_base {
                    config[BASE_NAME] = base.clone();
                }
                format!("{config:#}\n")
            });
            let files = self.parts.model_files.iter();
            let files = files.map(|(name, content)| (name.as_str(), content.as_slice()));
            let adapter_file = adapter.iter().map(|json| (ADAPTER_CONFIG, json.as_bytes()));
            let files: Vec<_> = files.chain(adapter_file).collect();
            draft.commit(shards, header, &files)?;
            self.name_best(&store)?;
            let best = self.best.filter(|_| self.args.load_best_model_at_end);
            let keep = best.map(|best| best.step as u64);
            self.saving
                .start_rotation(store, self.args.save_total_limit, keep)?;
            if adapter.is_some() {
                let saved = Checkpoint::open(&path)?;
                replace_lora(&saved, self.args.run_folder()?.join(ADAPTER))?;
            }
        }
        world.barrier()?;
        self.saving.last_step = Some(draft.step() as usize);
        self.tell(|callback, control| callback.on_save(&path, control));
        Ok(path)
    }

    pub(super) fn header(&self) -> Header {
        let args = &self.args;
        let state = RunState {
            global_step: self.progress.global_step,
            tokens: self.progress.tokens,
            progress: self.stages.optimizer.progress(),
            scaler: self.stages.optimizer.scaler_state(),
            position: self.progress.position(),
            // The seeds in use: a resumed run goes on with the seeds that it began with.
            seed: self.stages.seed,
            data_seed: self
                .progress
                .length
                .order
                .as_ref()
                .map_or_else(|| args.data_seed(), TrainingOrder::seed),
            global_batch: args.global_batch(),
            has_rng: !args.no_save_rng,
            has_optimizer: !args.no_save_optim,
            optim: Some(args.optim),
            rule: Some(resume::rule_name(args, &self.parts).to_owned()),
            best: self.best,
            early_stopping: self.early_stopping.as_ref().map(EarlyStopping::state),
            divergence: self.divergence.as_ref().map(|guard| guard.recent.clone()),
            data: self.parts.fingerprint,
        };
        let info = &self.stages.plan.draft.info;
        Header {
            step: self.progress.global_step as u64,
            topology: Topology {
                dp: args.dp,
                tp: args.tp,
                pp: args.pp,
                sp: args.sp,
                zero_stage: u8::from(args.zero_stage).into(),
            },
            model: serde_json::json!({
                "family": info.family, "num_layers": info.num_layers, "hidden_size": info.hidden_size,
                "num_heads": info.num_heads, "vocab_size": info.vocab_size, "max_seq": info.max_seq,
                "seq_length": self.stages.plan.draft.seq_length,
                "adapter_name": self.stages.plan.draft.lora.as_ref().map(|lora| &lora.name),
            }),
            state: serde_json::to_value(state).expect("plain numbers"),
        }
    }

    /// Merges a PEFT adapter into this rank's slices of the weights, in place of the adapter that
    /// was merged before. With `None`, the weights have the bits of the base again, which are kept
    /// meanwhile. The factors of an adapter beside the layers (`lora_config`) are removed for good.
    /// Modules and biases that it trained themselves keep their trained values.
    ///
    /// # Communication
    /// None, except for the norms of layers with magnitudes (`use_dora`) in `lora_config`: for each
    /// whose inputs are cut over tensor-parallel ranks, an all-reduce of a number per output.
    ///
    /// # Errors
    /// When a merged weight is not finite, or several layers share it. The weights then are those
    /// of the base.
    pub fn set_adapter(&mut self, adapter: Option<&Adapter>) -> Result<()> {
        let tied = adapter.and_then(Adapter::tied_target);
        if let Some((param, layers)) = tied.and_then(|name| self.stages.plan.shared_layers(name)) {
            self.set_adapter(None)?;
            return Err(Error::Plan(PlanError::SharedTarget { param, layers }));
        }
        let params = &self.stages.table;
        let layouts = params
            .iter()
            .map(|param| self.layout(param))
            .collect::<Result<Vec<_>>>()?;
        let targets: BTreeSet<_> = adapter
            .iter()
            .flat_map(|adapter| adapter.targets())
            .collect();
        let base = &mut self.base_values;
        let dtypes: Vec<_> = (0..params.len()).map(|i| self.stages.stored(i)).collect();
        let mut outcome = Ok(());
        self.stages.settle()?;
        self.stages.params.write(&mut |index, values| {
            if params[index].beside.is_some() {
                values.fill(0);
            }
            if let Some(own) = base.remove(&index) {
                values.copy_from_slice(&own);
            }
            let is_target = targets.contains(params[index].name.as_str());
            if let Some(adapter) = adapter.filter(|_| is_target && outcome.is_ok()) {
                base.insert(index, values.to_vec());
                let piece = Piece {
                    dtype: dtypes[index],
                    ..piece(&Kind::Parameter, &params[index], &layouts[index], None)
                };
                outcome = adapter.merge(&piece, values);
            }
        });
        if let Err(error) = outcome {
            self.set_adapter(None)?;
            return Err(error.into());
        }
        // With zero factors, magnitudes are the norms of the present weights, so nothing is scaled.
        self.stages.start_magnitudes()
    }

    /// This rank's slice of a parameter, in the element type in which it is kept.
    fn parameter<'a>(&'a self, index: usize, layout: &'a Layout) -> Piece<'a> {
        Piece {
            dtype: self.stages.stored(index),
            ..piece(&Kind::Parameter, &self.stages.table[index], layout, None)
        }
    }

    /// How this rank's slice of a parameter lies in the whole.
    pub(super) fn layout(&self, param: &Param) -> Result<Layout> {
        let place = self.stages.mpu.coord();
        let boxes = param.placements.local_boxes(&param.full, place).into_iter();
        let parts = boxes.map(|piece| Part {
            region: Region {
                offset: piece.offset,
                size: piece.size,
            },
            local_offset: piece.local,
        });
        let (full, local) = (&param.full.shape, &param.local.shape);
        Ok(Layout::new(full, local, parts.collect())?)
    }

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
        let words = |error| resume::with_words(error, from);
        while let Some(opened) = self.next_candidate(candidates.as_mut()).map_err(words)? {
            let read = match opened {
                Ok(checkpoint) => {
                    let checkpoint = resume::untied(checkpoint, &self.args)?;
                    let (plan, parts) = (&self.stages.plan, &self.parts);
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
        let checkpoint = resume::untied(Checkpoint::open_weights(path)?, &self.args)?;
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
            Some(self.read_optimizer(checkpoint)?)
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
        if let Some(values) = optimizer {
            self.stages.optimizer.edit_state(|state| {
                for (slice, values) in state.slices_mut().zip(values) {
                    slice.values.copy_from_slice(&values);
                }
            })?;
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
        Ok(LoadedCheckpoint::of(checkpoint, state, plan, &self.args))
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
        let Some(data) = &self.parts.train_data else {
            return Ok(());
        };
        let data_seed = if self.args.no_load_rng {
            self.args.data_seed()
        } else {
            state.data_seed
        };
        let data = data.reseeded(data_seed).unwrap_or_else(|| Arc::clone(data));
        let mut order = TrainingOrder::of(&*data, batch_shape(&self.args), data_seed)?;
        let mut position = state.position;
        if self.args.ignore_data_skip {
            position.samples = 0;
        }
        let unused = order.resume(state.global_step, position);
        if unused > 0 && self.stages.mpu.is_rank_0() {
            tracing::warn!(
                unused,
                "the global batch changed: training goes on at the next whole one"
            );
        }
        self.progress.length.order = Some(order);
        self.parts.train_data = Some(data);
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

    /// The optimizer state that this rank owns, in the order of its slices.
    fn read_optimizer(&self, checkpoint: &Checkpoint) -> Result<Vec<Vec<f32>>> {
        let state = self.stages.optimizer.state();
        let params = &self.stages.table;
        let trained = self.stages.trained();
        let read = |slice: merak_zero::StateSlice<&[f32]>| {
            let param = &params[trained[slice.param]];
            let place = state_layout(&self.layout(param)?, slice.without)?;
            let kind = Kind::optimizer(slice.name);
            let mut values = vec![0.0_f32; slice.values.len()];
            checkpoint.read(
                &piece(&kind, param, &place, Some(slice.local)),
                bytemuck::cast_slice_mut(&mut values),
            )?;
            Ok(values)
        };
        state.slices().map(read).collect()
    }
}

/// A rank's slice of a parameter, or of the optimizer state that belongs to it.
fn piece<'a>(
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
