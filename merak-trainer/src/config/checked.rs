//! Arguments that passed the checks, and what follows from them.

use std::{
    ops::Deref,
    path::{Path, PathBuf},
};

use merak_mpu::{ChosenEngine, DType, Degrees, GroupKind, Rank, Topology};
use merak_partition::ScheduleChoice;
use merak_pipe::Size;
use merak_trace::{Overlap, backend::candle::Products};
use merak_zero::{LrSchedule, OptimizerConfig, ZeroConfig, warmup_steps};

use super::{
    choice::{BackendChoice, Device, Offload, RecomputeMode},
    idle::without_effect,
    inputs::{InputPaths, Mixture},
    keys::MerakArguments,
    numbers::SeqLength,
    setting::InputPath,
    sources::{TemplateSource, TokenizerSource},
};
use crate::error::{ConfigError, Error, Result};

/// Arguments whose values agree with each other.
///
/// They are read like [`MerakArguments`] and cannot be changed. Conditions on the model, the data
/// or the world are checked where those are known.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedArguments {
    arguments: MerakArguments,
    /// Where not all ranks are threads of this process.
    host: Option<Host>,
}

/// The host of a process that runs one of several ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// What connects the ranks.
    pub(crate) engine: ChosenEngine,
    /// The number of the host.
    pub(crate) number: u32,
    /// The numbers of the hosts of all ranks; each rank is a process.
    pub(crate) of_ranks: Vec<u32>,
    /// The names of the hosts, by their numbers.
    pub(crate) names: Vec<String>,
    /// How many ranks there may run on the cores of this process, its own included.
    pub(crate) core_sharers: usize,
    /// Bytes of the memory through which these processes move data, all of them together.
    pub(crate) shared_bytes: usize,
}

impl Host {
    /// The ranks there, ascending.
    fn ranks(&self) -> impl Iterator<Item = usize> {
        let ranks = self.of_ranks.iter().enumerate();
        let here = ranks.filter(|&(_, host)| *host == self.number);
        here.map(|(rank, _)| rank)
    }
}

#[cfg(test)]
impl Host {
    /// The first of the hosts of processes, where a number of ranks may run on a process's cores.
    pub(crate) fn of_processes(of_ranks: &[u32], core_sharers: usize) -> Self {
        Self {
            engine: ChosenEngine::Tcp,
            number: 0,
            of_ranks: of_ranks.into(),
            names: Vec::new(),
            core_sharers,
            shared_bytes: 0,
        }
    }
}

impl Deref for CheckedArguments {
    type Target = MerakArguments;

    fn deref(&self) -> &MerakArguments {
        &self.arguments
    }
}

impl CheckedArguments {
    /// Wraps arguments that passed the checks.
    pub(crate) fn of(arguments: MerakArguments) -> Self {
        Self {
            arguments,
            host: None,
        }
    }

    /// The same arguments for a run that goes on from its own checkpoint, with all that it holds:
    /// without the keys that are about the checkpoint of another run, which it began with.
    pub(crate) fn resuming(&self) -> Self {
        let mut own = self.clone();
        own.arguments.finetune = false;
        own.arguments.no_load_rng = false;
        own.arguments.no_load_optim = false;
        own.arguments.ignore_data_skip = false;
        own
    }

    /// The same arguments for a run that goes back to a checkpoint and draws on as it did.
    pub(crate) fn going_back(&self) -> Self {
        let mut own = self.resuming();
        own.arguments.no_load_rng = true;
        own
    }

    /// The keys that change where a run that is started again goes on from its own checkpoint, with
    /// their new values.
    pub fn keys_to_resume(&self) -> Vec<(&'static str, String)> {
        let own = self.resuming();
        let names = MerakArguments::KEYS.iter().map(|key| key.name);
        let changed = names.filter(|name| self.get(name) != own.get(name));
        let keys = changed.filter_map(|name| Some((name, own.get(name)?.to_string())));
        keys.collect()
    }

    /// The same arguments with another seed of the data.
    pub(crate) fn with_data_seed(&self, seed: u64) -> Self {
        let mut own = self.clone();
        own.arguments.data_seed = Some(seed);
        own
    }

    /// The same arguments for a program that continues prompts: it takes the weights of a
    /// checkpoint alone.
    pub(crate) fn generating(&self) -> Self {
        let mut own = self.clone();
        own.arguments.finetune = own.arguments.resume_from_checkpoint.is_some();
        own
    }

    /// Warning for each key whose value is not its default and has no effect, because of the value
    /// of another key.
    pub fn without_effect(&self) -> Vec<String> {
        let mut told = without_effect(&self.arguments);
        let asks = self.tp > 1 && self.tp_overlapping_level > Overlap::None;
        if let Some(reason) = self.without_overlap().filter(|_| asks) {
            told.push(format!("\"tp_overlapping_level\" 0 is used: {reason}"));
        }
        told
    }

    /// The arguments with the lengths of samples that the data decide on.
    ///
    /// # Errors
    /// Where the lengths do not agree with the other values.
    pub fn with_lengths(self, lengths: SeqLength) -> Result<Self> {
        let mut arguments = self.arguments;
        arguments.seq_length = Some(lengths);
        Ok(Self {
            host: self.host,
            ..arguments.check_to_plan("from the data and the model")?
        })
    }

    /// The arguments as they were given.
    pub fn into_arguments(self) -> MerakArguments {
        self.arguments
    }

    /// The same arguments in a process on a host.
    pub(crate) fn on(self, host: Host) -> Self {
        Self {
            host: Some(host),
            ..self
        }
    }

    /// Whether each rank is a process.
    pub(crate) fn are_processes(&self) -> bool {
        self.host.is_some()
    }

    /// The number of ranks on this host.
    pub(crate) fn ranks_here(&self) -> usize {
        self.host
            .as_ref()
            .map_or_else(|| self.world_size(), |host| host.ranks().count())
    }

    /// The number of ranks that the cores of this process are divided among.
    pub(crate) fn core_sharers(&self) -> usize {
        self.host
            .as_ref()
            .map_or_else(|| self.world_size(), |host| host.core_sharers)
    }

    /// The number of processes on this host that run these ranks.
    pub(crate) fn processes_here(&self) -> usize {
        self.host.as_ref().map_or(1, |host| host.ranks().count())
    }

    /// What connects the ranks and on which hosts these are, where they are processes, as
    /// `tcp on hosts 2 x 0 (n1), 2 x 1 (n2)`. One host is told by its number alone: no network lies
    /// between its ranks.
    pub(crate) fn connection(&self) -> Option<String> {
        let host = self.host.as_ref()?;
        let is_alone = host.of_ranks.iter().all(|other| *other == host.number);
        let runs = host.of_ranks.chunk_by(|one, next| one == next);
        let run = |run: &[u32]| {
            let (len, number) = (run.len(), run[0]);
            let name = host.names.get(number as usize).filter(|_| !is_alone);
            let name = name.map_or_else(String::new, |name| format!(" ({name})"));
            format!("{len} x {number}{name}")
        };
        let runs: Vec<_> = runs.map(run).collect();
        Some(format!("{} on hosts {}", host.engine, runs.join(", ")))
    }

    /// Whether ranks of one group of a kind are on several hosts, so that what they exchange passes
    /// over a network.
    pub(crate) fn crosses_hosts(&self, kind: GroupKind) -> bool {
        let (Some(host), Ok(topology)) = (&self.host, Topology::new(self.degrees())) else {
            return false;
        };
        let on = |rank: &Rank| host.of_ranks.get(rank.0);
        let groups = topology.groups(kind);
        groups
            .iter()
            .any(|group| group.iter().any(|rank| on(rank) != on(&group[0])))
    }

    /// Whether samples are predicted and not measured, so that they need no labels.
    pub(crate) fn only_predicts(&self) -> bool {
        self.do_predict && !self.do_train
    }

    /// Bytes of the memory through which the processes on this host move data.
    pub(crate) fn shared_bytes_here(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.shared_bytes)
    }

    /// Of the same, bytes that two processes have at addresses of their own each: those that they
    /// share. Under MPI each process has its own.
    pub(crate) fn twice_mapped_bytes_here(&self) -> usize {
        let host = self.host.as_ref();
        let host = host.filter(|host| host.engine != ChosenEngine::Mpi);
        host.map_or(0, |host| host.shared_bytes)
    }

    /// By place in the pipeline, how many of its ranks are on this host.
    pub(crate) fn pipeline_ranks_here(&self) -> Vec<usize> {
        let degrees = self.degrees();
        let Some(host) = &self.host else {
            return vec![degrees.world_size() / degrees.pp; degrees.pp];
        };
        let mut counts = vec![0; degrees.pp];
        let topology = Topology::new(degrees);
        for rank in host.ranks() {
            let place = topology
                .as_ref()
                .map(|topology| topology.coord_of(Rank(rank)));
            if let Ok(Ok(place)) = place {
                counts[place.pp] += 1;
            }
        }
        counts
    }

    /// The parallel degrees.
    pub fn degrees(&self) -> Degrees {
        Degrees {
            dp: self.dp,
            tp: self.tp,
            pp: self.pp,
            sp: self.sp,
        }
    }

    /// The files and folders that a run with these arguments reads, each behind what names it;
    /// `named` are those that no key names.
    pub fn inputs<'a>(
        &'a self,
        named: impl IntoIterator<Item = (&'static str, &'a Path)>,
    ) -> Vec<(&'static str, &'a Path)> {
        let path = |path: &'a Option<InputPath>| path.iter().map(|path| &*path.0);
        let paths = |paths: &'a Option<InputPaths>| paths.iter().flat_map(InputPaths::iter);
        let data = &self.data;
        let parts = data.mixture.iter().flat_map(Mixture::parts);
        let tokenizer = match &data.tokenizer {
            TokenizerSource::File(path) => Some(&**path),
            TokenizerSource::Bytes | TokenizerSource::TrainBpe(_) => None,
        };
        let template = match &data.chat_template {
            Some(TemplateSource::File(path)) => Some(&**path),
            Some(TemplateSource::Name(_)) | None => None,
        };
        let mut all: Vec<(&'static str, &Path)> = named.into_iter().collect();
        all.extend(path(&self.model.config).map(|path| ("model.config", path)));
        all.extend(path(&self.model.hf_dir).map(|path| ("model.hf_dir", path)));
        all.extend(paths(&data.path).map(|path| ("data.path", path)));
        all.extend(paths(&data.validation_path).map(|path| ("data.validation_path", path)));
        all.extend(parts.flat_map(|part| part.path.iter().map(|path| ("data.mixture", path))));
        all.extend(tokenizer.map(|path| ("data.tokenizer", path)));
        all.extend(template.map(|path| ("data.chat_template", path)));
        all.extend(path(&self.lora_config).map(|path| ("lora_config", path)));
        all
    }

    /// Ranks that hold the same parameters: replicas, and within each those that share a sequence.
    pub fn replicas(&self) -> usize {
        self.dp * self.sp
    }

    /// Ranks that the degrees ask for: their product.
    pub fn world_size(&self) -> usize {
        self.degrees().world_size()
    }

    /// Checks that the degrees fill a world of `world` ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] where they do not, with the nearest degrees that do.
    pub fn check_world(&self, world: usize) -> Result<()> {
        Ok(self.degrees().check_world(world)?)
    }

    /// Ranks, microbatches and stages per rank of the pipeline.
    pub fn pipeline_size(&self) -> Size {
        Size::new(self.pp, self.gradient_accumulation_steps).with_chunks(self.chunks())
    }

    /// Stages of the pipeline, over all its ranks.
    pub fn num_stages(&self) -> usize {
        self.pipeline_size().stages()
    }

    /// Samples of a step: microbatch · microbatches · dp.
    pub fn global_batch(&self) -> usize {
        self.per_device_train_batch_size * self.gradient_accumulation_steps * self.dp
    }

    /// Rows of a microbatch of an evaluation: at most the samples of a replica, as the rest would
    /// be padding. With `dataloader_drop_last` the configured size stays, as it decides which
    /// samples are dropped.
    pub(crate) fn evaluation_batch(&self, samples: usize) -> usize {
        if self.dataloader_drop_last {
            return self.per_device_eval_batch_size;
        }
        let most = samples.div_ceil(self.dp).max(1);
        self.per_device_eval_batch_size.min(most)
    }

    /// The folder that the run writes.
    ///
    /// # Errors
    ///
    /// [`ConfigError::MissingKey`] where `output_dir` is not set.
    pub fn run_folder(&self) -> Result<PathBuf> {
        self.output_dir.clone().ok_or_else(|| {
            Error::Config(ConfigError::MissingKey {
                key: "output_dir",
                advice: "name the folder that the run writes".to_owned(),
            })
        })
    }

    /// Whether keys ask for recomputation of particular shards or operations.
    pub fn asks_for_recomputation(&self) -> bool {
        let is_part = |ratio: &f64| *ratio > 0.0;
        let ratios = self.activation_checkpoint_ratio.as_ref();
        let by_ratio = ratios.is_some_and(|ratios| ratios.0.iter().any(is_part));
        self.activation_checkpointing && (by_ratio || self.recompute == RecomputeMode::Selective)
    }

    /// Whether planning uses the costs of the work.
    pub fn searches(&self) -> bool {
        self.partition_method.searches() || self.train_schedule == ScheduleChoice::Searched
    }

    /// Seed of the order of samples.
    pub fn data_seed(&self) -> u64 {
        self.data_seed.unwrap_or(self.seed)
    }

    /// Steps of the whole run, when an epoch has `steps_per_epoch`: `max_steps` if it is more than
    /// 0, else ceil(`num_train_epochs` · `steps_per_epoch`).
    pub fn total_steps(&self, steps_per_epoch: usize) -> usize {
        match usize::try_from(self.max_steps) {
            Ok(steps) if steps > 0 => steps,
            _ => (self.num_train_epochs * steps_per_epoch as f64).ceil() as usize,
        }
    }

    /// The learning rate over a run of `total` steps.
    ///
    /// # Errors
    ///
    /// When its parameters do not fit a run of that length.
    pub fn lr_schedule(&self, total: usize) -> Result<LrSchedule> {
        let total = total as u64;
        let warmup = warmup_steps(self.warmup_steps as u64, self.warmup_ratio, total);
        let kwargs = &self.lr_scheduler_kwargs;
        Ok(LrSchedule::new(
            self.lr_scheduler_type,
            kwargs,
            self.learning_rate,
            warmup,
            total,
        )?)
    }

    /// The type of 16 bits that weights have or, on the default backend, are kept in.
    pub(crate) fn narrow(&self) -> Option<DType> {
        if self.half_precision_backend.is_some() {
            return None;
        }
        self.half()
    }

    /// The type of 16 bits in which libtorch computes over weights of `f32`, by operation.
    pub(crate) fn autocast(&self) -> Option<DType> {
        let is_tch = self.compute.backend == BackendChoice::Tch;
        let applies = is_tch && self.half_precision_backend.is_some();
        self.half().filter(|_| applies)
    }

    /// The type of 16 bits that the run asks for.
    fn half(&self) -> Option<DType> {
        match (self.bf16, self.fp16) {
            (true, _) => Some(DType::BF16),
            (_, true) => Some(DType::F16),
            _ => None,
        }
    }

    /// How exact the default backend's products are. Beside an adapter `bf16` alone is a matter of
    /// memory.
    pub(crate) fn products(&self) -> Products {
        let is_own = self.compute.backend == BackendChoice::Candle;
        let of_products = self.half_precision_backend.is_some() || self.lora_config.is_none();
        if is_own && self.bf16 && of_products {
            Products::Rounded
        } else {
            Products::Full
        }
    }

    /// Whether trained weights have 16 bits and masters of `f32`. Beside an adapter, which is of
    /// `f32`, only frozen ones have 16 bits.
    fn has_masters(&self) -> bool {
        self.narrow().is_some() && self.lora_config.is_none()
    }

    /// Where optimizer state and masters lie, if not where the weights do.
    pub(crate) fn offload(&self) -> Option<Offload> {
        let changes =
            |offload: &Offload| *offload != Offload::Host || self.compute.device != Device::Cpu;
        self.offload_optimizer.filter(changes)
    }

    /// The work that runs while sums over tensor-parallel ranks pass. There is none without such
    /// sums, for microbatches of one sample, which have no halves, and where the sequence comes
    /// before the samples.
    pub(crate) fn overlap(&self) -> Overlap {
        match self.without_overlap() {
            Some(_) => Overlap::None,
            None => self.tp_overlapping_level,
        }
    }

    /// Why nothing runs while sums over tensor-parallel ranks pass, whatever the level.
    pub(crate) fn without_overlap(&self) -> Option<&'static str> {
        if self.tp == 1 {
            Some("\"tp\" is 1, so that no sums pass between ranks")
        } else if self.sequence_dim == 0 {
            Some("\"sequence_dim\" is 0, and halves of a microbatch are of samples that come first")
        } else if self.per_device_train_batch_size < 2 {
            Some(
                "\"per_device_train_batch_size\" is 1, and a microbatch of one sample has no halves",
            )
        } else {
            None
        }
    }

    /// Whether a rank waits within a pass for others that hold the same parameters.
    pub(crate) fn waits_for_replicas(&self) -> bool {
        self.zero_config(1).waits_in_passes(self.replicas())
    }

    /// How gradients are reduced and weights updated, with `threads` compute threads on each rank.
    pub fn zero_config(&self, threads: usize) -> ZeroConfig {
        ZeroConfig {
            stage: self.zero_stage,
            optimizer: OptimizerConfig {
                optim: self.optim,
                weight_decay: self.weight_decay,
                adam_beta1: self.adam_beta1,
                adam_beta2: self.adam_beta2,
                adam_epsilon: self.adam_epsilon,
                sgd_momentum: self.sgd_momentum,
                nesterov: self.nesterov,
                lion_beta1: self.lion_beta1,
                lion_beta2: self.lion_beta2,
                adafactor_decay_rate: self.adafactor_decay_rate,
                adafactor_clip_threshold: self.adafactor_clip_threshold,
                adafactor_epsilon: self.adafactor_epsilon,
                muon_momentum: self.muon_momentum,
                muon_nesterov: self.muon_nesterov,
                muon_ns_steps: self.muon_ns_steps,
                muon_epsilon: self.muon_epsilon,
            },
            max_grad_norm: self.max_grad_norm,
            loss_scaling: self.loss_scaling(),
            reduce_bucket_size: self.zero_reduce_bucket_size,
            gather_bucket_size: self.zero_allgather_bucket_size,
            prescale_gradients: self.prescale_gradients,
            gradient_predivide_factor: self.gradient_predivide_factor,
            ema_decay: self.ema_decay,
            has_masters: self.has_masters(),
            threads,
        }
    }

    /// Most new tokens per prompt.
    pub fn new_token_limit(&self) -> usize {
        self.max_new_tokens.unwrap_or(self.out_seq_length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_counts_the_ranks_of_its_host_alone() {
        let arguments = MerakArguments {
            dp: 2,
            tp: 2,
            pp: 2,
            ..MerakArguments::default()
        };
        let here = |args: &CheckedArguments| {
            let by_place = args.pipeline_ranks_here();
            let counts = [
                args.ranks_here(),
                args.processes_here(),
                args.core_sharers(),
            ];
            (counts, by_place)
        };
        let threads = CheckedArguments::of(arguments);
        assert_eq!(here(&threads), ([8, 1, 8], vec![4, 4]));
        // The ranks of a stage stand side by side.
        let processes = threads.on(Host::of_processes(&[0, 0, 0, 1, 1, 0, 1, 1], 2));
        assert_eq!(here(&processes), ([4, 4, 2], vec![3, 1]));
    }

    #[test]
    fn a_connection_names_several_hosts_and_not_one() {
        let arguments = MerakArguments {
            dp: 4,
            ..MerakArguments::default()
        };
        let threads = CheckedArguments::of(arguments);
        let on = |of_ranks: [u32; 4], names: [&str; 2]| {
            let processes = threads.clone().on(Host {
                names: names.map(str::to_owned).into(),
                ..Host::of_processes(&of_ranks, 2)
            });
            processes.connection().unwrap()
        };
        let two = "tcp on hosts 2 x 0 (n1), 1 x 1 (n2), 1 x 0 (n1)";
        assert_eq!(on([0, 0, 1, 0], ["n1", "n2"]), two);
        assert_ne!(on([0, 0, 1, 0], ["n1", "n3"]), two);
        assert_eq!(on([0; 4], ["n1", ""]), "tcp on hosts 4 x 0");
        assert_eq!(threads.connection(), None);
    }

    #[test]
    fn a_group_crosses_hosts_where_its_ranks_are_on_several() {
        let arguments = MerakArguments {
            dp: 2,
            tp: 2,
            ..MerakArguments::default()
        };
        let on = |of_ranks: [u32; 4]| {
            let args = CheckedArguments::of(arguments.clone()).on(Host::of_processes(&of_ranks, 1));
            [GroupKind::Tensor, GroupKind::Data].map(|kind| args.crosses_hosts(kind))
        };
        assert_eq!(on([0, 0, 0, 0]), [false, false]);
        assert_eq!(on([0, 0, 1, 1]), [false, true]);
        assert_eq!(on([0, 1, 0, 1]), [true, false]);
        assert_eq!(on([0, 1, 2, 3]), [true, true]);
        let threads = CheckedArguments::of(arguments.clone());
        assert!(!threads.crosses_hosts(GroupKind::World));
    }
}
