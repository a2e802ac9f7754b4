//! Writing a checkpoint: the shards of all ranks, the header, the files beside them.

use super::{EarlyStopping, MerakTrainer, resume, run_state::RunState, shards::ShardSource};
use crate::{
    error::{Result, StepPart},
    plan::BASE_NAME,
};
use merak_ckpt::{
    ADAPTER_CONFIG, ADAPTER_FOLDER, Checkpoint, Draft, Header, Shard, Store, Topology, replace_lora,
};
use std::{path::PathBuf, sync::Arc};

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
                replace_lora(&saved, self.args.run_folder()?.join(ADAPTER_FOLDER))?;
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
            data_seed: self.progress.length.data_seed(args),
            global_batch: args.global_batch(),
            extra_steps: self.progress.length.extra_steps,
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
}
