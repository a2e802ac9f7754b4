//! The memory that a run needs, and whether this machine has it, told before anything is allocated.

mod shortage;
mod threads;

pub use shortage::{MemoryShortage, Room};
pub(crate) use shortage::{Shortage, shortage_beside_threads};

use crate::{
    config::CheckedArguments,
    error::Result,
    plan::{Forward, ParamGroups, Plan, kept_bytes, param_bytes, value_width},
};
use merak_ckpt::words::Bytes;
use merak_partition::{ForwardBytes, cached_bytes, forward_bytes};
use merak_zero::{ExchangeBytes, ParamSpec};
use std::fmt;
use threads::touched_bytes;

/// The most buckets of divided weights that a rank has at once (`stage/gathered.rs`): that of a
/// read, that of the node's operand before it, one that is read again soon, and the next one under
/// way.
const MOST_BUCKETS: usize = 4;

/// What a run does with its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// Optimizer steps.
    Training,
    /// Losses of held-out samples.
    Evaluation {
        /// Number of these samples.
        samples: usize,
    },
    /// One token after the other.
    Generation {
        /// Lower bound on the positions, of all sequences together, whose keys and values are kept.
        positions: usize,
    },
}

/// The bytes that a rank needs at least, on any backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryNeed {
    /// Parameters.
    pub weights: usize,
    /// Optimizer state and masters that lie in files, no part of the sum: the system keeps of them
    /// in memory what there is room for.
    pub files: usize,
    /// Copies of buckets of gradients and parameters on their way between replicas, and gathered
    /// buckets of parameters that replicas divide: what they take at most, no part of the sum. The
    /// memory may be kept for later ones. A trainer reports those of gradients that there were at
    /// once.
    pub exchange: usize,
    /// The gathered buckets of parameters among these, which a run counts as activations.
    pub gathered: usize,
    /// Gradients of the parameters, with one more for each further use of a tied parameter.
    pub gradients: usize,
    /// Optimizer state.
    pub optimizer: usize,
    /// Batches and values of the graph that are alive at once, in the largest of the workloads.
    pub activations: usize,
    /// Memory of freed values that is kept for later values of the same length, in the workload
    /// that keeps most. A trainer reports 0, as it does not count what it holds.
    pub pool: usize,
    /// The workload that needs the activations.
    pub largest: Option<Workload>,
}

impl MemoryNeed {
    /// The sum of all parts.
    pub fn total(&self) -> usize {
        [
            self.weights,
            self.gradients,
            self.optimizer,
            self.activations,
            self.pool,
        ]
        .into_iter()
        .fold(0, usize::saturating_add)
    }

    /// The sum with the copies of buckets, which is what a device of the rank's own must hold.
    pub fn with_exchange(&self) -> usize {
        self.total().saturating_add(self.exchange)
    }
}

/// The bytes that all ranks of this process need at least, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunMemory {
    /// The ranks.
    pub ranks: usize,
    /// Parameters.
    pub weights: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer: u64,
    /// Optimizer state and masters that lie in files, no part of the sum.
    pub files: u64,
    /// Copies of buckets on their way between replicas, at most; no part of the sum.
    pub exchange: u64,
    /// Values of the graph, and the memory of freed ones that is kept for the next.
    pub activations: u64,
    /// Stacks of threads, and what ranks hold beside their tensors: scratch memory of kernels,
    /// programs, layouts and mailboxes, and the memory through which processes move data.
    pub threads: u64,
    /// The data that are held in memory.
    pub data: u64,
}

impl RunMemory {
    /// The sum of all parts.
    pub fn total(&self) -> u64 {
        [
            self.weights,
            self.gradients,
            self.optimizer,
            self.activations,
            self.threads,
            self.data,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }

    /// What needs most, and what would need less.
    fn advice(&self, largest: Option<Workload>) -> &'static str {
        let half = self.total() / 2;
        match largest {
            _ if self.data > half => "less data",
            _ if self.threads > half && self.ranks == 1 => {
                "a smaller \"compute.threads_per_rank\" or \"dataloader_num_workers\""
            }
            _ if self.threads > half => "fewer ranks on this machine",
            _ if self.activations <= half && self.ranks == 1 => "a smaller model",
            _ if self.activations <= half => "a smaller model or fewer ranks on this machine",
            Some(Workload::Evaluation { .. }) => {
                "a smaller \"per_device_eval_batch_size\" or \"seq_length\""
            }
            Some(Workload::Training) => {
                "a smaller \"per_device_train_batch_size\" or \"seq_length\""
            }
            Some(Workload::Generation { .. }) => "fewer or shorter prompts",
            None => "a smaller model",
        }
    }
}

impl fmt::Display for RunMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [weights, gradients, optimizer] =
            [self.weights, self.gradients, self.optimizer].map(Bytes);
        let [activations, threads, data] = [self.activations, self.threads, self.data].map(Bytes);
        write!(
            f,
            "of all ranks ({}) weights take {weights}, gradients {gradients}, optimizer state {optimizer}, \
             activations {activations}, threads and programs {threads}, the data {data}",
            self.ranks
        )?;
        if self.exchange > 0 {
            let exchange = Bytes(self.exchange);
            write!(
                f,
                "; buckets on their way between replicas take up to {exchange} more"
            )?;
        }
        if self.files > 0 {
            let files = Bytes(self.files);
            write!(
                f,
                "; {files} of optimizer state and masters lie in files under \"output_dir\""
            )?;
        }
        Ok(())
    }
}

/// The fewest tokens with which a sequence starts generation.
const FIRST_TOKENS: usize = 1;

impl Plan {
    /// The least memory that each rank of the pipeline needs for these workloads. Nothing is
    /// allocated.
    ///
    /// # Errors
    /// When a stage has no program for a workload.
    pub fn memory(
        &self,
        args: &CheckedArguments,
        workloads: &[Workload],
    ) -> Result<Vec<MemoryNeed>> {
        (0..self.draft.degrees.pp)
            .map(|rank| self.rank_memory(args, workloads, rank))
            .collect()
    }

    fn rank_memory(
        &self,
        args: &CheckedArguments,
        workloads: &[Workload],
        rank: usize,
    ) -> Result<MemoryNeed> {
        let (training, width) = (self.training_bytes(rank)?, value_width(args));
        let exchange = self.exchange_bytes(args, rank)?;
        let gathered = exchange.weight_bucket;
        let exchange = [exchange.sums, exchange.gathers, gathered].into_iter();
        let mut need = MemoryNeed {
            files: self.file_bytes(args, rank)?,
            exchange: exchange.fold(0, usize::saturating_add),
            gathered,
            weights: training.weights,
            gradients: training.gradients,
            optimizer: training.optimizer,
            ..MemoryNeed::default()
        };
        self.own_whole(args, rank, &mut need)?;
        for &workload in workloads {
            let programs = |forward| self.inference_programs(self.stages_of(rank), forward);
            let ForwardBytes { activations, pool } = match workload {
                Workload::Training => ForwardBytes {
                    activations: training.activations,
                    pool: training.pool,
                },
                Workload::Evaluation { samples } => {
                    let batch = args.evaluation_batch(samples);
                    forward_bytes(
                        &programs(Forward::loss(batch, self.draft.seq_length))?,
                        width,
                    )
                }
                Workload::Generation { positions } => {
                    let has_encoder = self.has_encoder();
                    let source = has_encoder.then_some(FIRST_TOKENS);
                    let first = programs(Forward::next(FIRST_TOKENS, source))?;
                    // Without a cache, keys and values are computed again for each token.
                    let kept = if args.use_cache { positions } else { 0 };
                    let of_position = cached_bytes(&first, width, has_encoder);
                    let cache = of_position.saturating_mul(kept.div_ceil(args.replicas()));
                    let mut bytes = forward_bytes(&first, width);
                    for more in [cache, self.gathered_bytes(args, rank)?] {
                        bytes.activations = bytes.activations.saturating_add(more);
                    }
                    bytes
                }
            };
            need.pool = need.pool.max(pool);
            if activations > need.activations {
                (need.activations, need.largest) = (activations, Some(workload));
            }
        }
        Ok(need)
    }

    /// The copies of buckets that a rank exchanges with its replicas, with all buckets of weights
    /// that it has at once.
    fn exchange_bytes(&self, args: &CheckedArguments, rank: usize) -> Result<ExchangeBytes> {
        let specs = self.trained_specs(args, rank)?;
        let mut bytes = args.zero_config(1).exchange_bytes(specs, args.replicas())?;
        let all = self.rank_programs(rank)?.sums().trained_bytes;
        bytes.weight_bucket = bytes.weight_bucket.saturating_mul(MOST_BUCKETS).min(all);
        Ok(bytes)
    }

    /// The optimizer's view of the parameters that a rank trains.
    fn trained_specs(&self, args: &CheckedArguments, rank: usize) -> Result<Vec<ParamSpec>> {
        let programs = self.rank_programs(rank)?;
        let trained = programs.params.iter().filter(|param| param.trainable);
        let groups = ParamGroups::new(args, &self.graph);
        let specs = trained.enumerate();
        let specs = specs.map(|(index, param)| groups.spec(param, index));
        Ok(specs.collect())
    }

    /// Where the optimizer needs whole parameters, a rank may own more than an equal part of them,
    /// and keeps less state for most. The need becomes that of the rank that owns most.
    fn own_whole(&self, args: &CheckedArguments, rank: usize, need: &mut MemoryNeed) -> Result<()> {
        let (config, replicas) = (args.zero_config(1), args.replicas());
        let specs = self.trained_specs(args, rank)?;
        let mut whole = specs.iter();
        if !whole.any(|spec| config.optimizer.needs_whole(spec)) {
            return Ok(());
        }
        let sums = self.rank_programs(rank)?.sums();
        let most = config.most_owned(specs, replicas)?;
        let (held, kept) = (param_bytes(args, replicas), kept_bytes(args, replicas));
        let more = most.elements.saturating_sub(sums.trained / replicas);
        let more = more.saturating_mul(size_of::<f32>());
        let owned_alone = if sums.narrow > 0 {
            held.master.ranks
        } else {
            held.weight_ranks
        };
        if owned_alone > 1 {
            need.weights += more;
        }
        if held.gradient.ranks > 1 {
            need.gradients += more;
        }
        let state = most.state.saturating_mul(size_of::<f32>());
        if held.state == kept.state {
            need.optimizer = state;
        } else {
            need.files = need.files.saturating_sub(kept.state.of(sums.trained)) + state;
        }
        Ok(())
    }

    /// The state and masters that a rank keeps in files.
    fn file_bytes(&self, args: &CheckedArguments, rank: usize) -> Result<usize> {
        let sums = self.rank_programs(rank)?.sums();
        let all = kept_bytes(args, args.replicas()).held(sums);
        let in_memory = param_bytes(args, args.replicas()).held(sums);
        Ok(all.total() - in_memory.total())
    }

    /// The weights that a rank gathers from its replicas to generate text.
    fn gathered_bytes(&self, args: &CheckedArguments, rank: usize) -> Result<usize> {
        if kept_bytes(args, args.replicas()).weight_ranks == 1 {
            return Ok(0);
        }
        let programs = self.rank_programs(rank)?;
        let trained = programs.params.iter().filter(|param| param.trainable);
        Ok(trained.map(|param| param.local.size_bytes()).sum())
    }

    /// The least memory of all ranks on this host, beside `data` bytes of data that are held in
    /// memory.
    ///
    /// # Errors
    /// As [`Plan::memory`].
    pub fn run_memory(
        &self,
        args: &CheckedArguments,
        workloads: &[Workload],
        data: u64,
    ) -> Result<RunMemory> {
        Ok(of_host(&self.memory(args, workloads)?, args, data))
    }
}

/// The needs of a pipeline's ranks for all ranks on this host. Each process holds the data.
fn of_host(pipeline: &[MemoryNeed], args: &CheckedArguments, data: u64) -> RunMemory {
    let data = data.saturating_mul(args.processes_here() as u64);
    let ranks = args.pipeline_ranks_here();
    of_ranks(pipeline, &ranks, touched_bytes(args), data)
}

/// The needs of a pipeline's ranks for so many ranks at each place of it, with threads and data.
fn of_ranks(pipeline: &[MemoryNeed], ranks: &[usize], threads: u64, data: u64) -> RunMemory {
    let of_all = |part: fn(&MemoryNeed) -> usize| {
        let parts = pipeline.iter().zip(ranks);
        let parts = parts.map(|(need, &ranks)| (part(need) as u64).saturating_mul(ranks as u64));
        parts.fold(0, u64::saturating_add)
    };
    RunMemory {
        ranks: ranks.iter().sum(),
        weights: of_all(|need| need.weights),
        gradients: of_all(|need| need.gradients),
        optimizer: of_all(|need| need.optimizer),
        files: of_all(|need| need.files),
        exchange: of_all(|need| need.exchange),
        activations: of_all(|need| need.activations.saturating_add(need.pool)),
        threads,
        data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{BackendChoice, Config, HalfPrecision, Host},
        error::{Error, PlanError},
        plan::PlanInputs,
    };
    use merak_mpu::ChosenEngine;
    use serde_json::json;
    use threads::mapped_bytes;

    pub(super) fn plan(keys: &[&str]) -> (Plan, CheckedArguments) {
        let args = arguments(keys);
        (planned(&args).unwrap(), args)
    }

    fn arguments(keys: &[&str]) -> CheckedArguments {
        let line: Vec<_> = keys.iter().map(|key| format!("--{key}")).collect();
        Config::load(None, [], &line).unwrap().check().unwrap()
    }

    fn planned(args: &CheckedArguments) -> Result<Plan> {
        let model =
            merak_trace::models::from_config(&json!({ "model_type": "gpt2", "vocab_size": 32,
            "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2 }));
        let inputs = PlanInputs::read(model.unwrap().into(), args)?;
        Plan::new(&inputs, args)
    }

    #[test]
    fn the_need_follows_the_plan() {
        let total = |keys: &[&str]| {
            let (plan, args) = plan(keys);
            plan.memory(
                &args,
                &[Workload::Training, Workload::Evaluation { samples: 2000 }],
            )
            .unwrap()[0]
        };
        let small = "per_device_eval_batch_size=1";
        let one = total(&["per_device_train_batch_size=2", "zero_stage=0", small]);
        let params = plan(&[]).0.graph.num_elements();
        assert_eq!(one.weights, 4 * params);
        assert_eq!(one.optimizer, 8 * params);
        // The tied embedding is used twice.
        assert_eq!(one.gradients, 4 * (params + 32 * 16));
        let more = total(&["per_device_train_batch_size=20", "zero_stage=0", small]);
        assert!(more.activations > 9 * one.activations, "{one:?} {more:?}");
        let divided = total(&["dp=2", "zero_stage=1", "per_device_train_batch_size=2"]);
        assert_eq!(2 * divided.optimizer, one.optimizer);
        let evaluated = total(&["per_device_eval_batch_size=1000"]);
        assert_eq!(
            evaluated.largest,
            Some(Workload::Evaluation { samples: 2000 })
        );
        let plain = total(&["optim=sgd", "zero_stage=0"]);
        assert_eq!(plain.optimizer, 0);
    }

    #[test]
    fn autocast_halves_values_in_the_dry_run_as_in_the_search_within_a_limit() {
        let keys = [
            "pp=2",
            "partition_method=exact",
            "per_device_train_batch_size=8",
        ];
        let wide = arguments(&keys);
        let narrow = |limit| {
            let mut narrow = wide.clone().into_arguments();
            narrow.compute.backend = BackendChoice::Tch;
            (narrow.bf16, narrow.half_precision_backend) = (true, Some(HalfPrecision::Amp));
            narrow.autopipe.memory_limit = limit;
            CheckedArguments::of(narrow)
        };
        let needs = |args: &CheckedArguments| {
            let plan = planned(args).unwrap();
            plan.memory(args, &[Workload::Training]).unwrap()
        };
        let halved = needs(&narrow(None));
        for (wide, narrow) in needs(&wide).iter().zip(&halved) {
            assert_eq!(narrow.weights, wide.weights);
            assert!(narrow.activations < wide.activations, "{narrow:?} {wide:?}");
        }
        let limit = halved.iter().map(MemoryNeed::total).max();
        let within = needs(&narrow(limit));
        assert!(within.iter().map(MemoryNeed::total).max() <= limit);
        let mut wide = wide.clone().into_arguments();
        wide.autopipe.memory_limit = limit;
        let refused = planned(&CheckedArguments::of(wide)).unwrap_err();
        assert!(
            matches!(refused, Error::Plan(PlanError::StageMemory { .. })),
            "{refused}"
        );
    }

    #[test]
    fn the_table_of_stages_counts_what_the_optimizer_keeps() {
        let memory = |keys: &[&str]| {
            let report = plan(keys).0.partition_report().unwrap();
            report.stages[0].memory_bytes
        };
        let params = plan(&[]).0.graph.num_elements();
        let adam = memory(&["zero_stage=0"]);
        assert_eq!(adam - memory(&["optim=sgd", "zero_stage=0"]), 8 * params);
        let momentum = memory(&["optim=sgd", "sgd_momentum=0.9", "zero_stage=0"]);
        assert_eq!(adam - momentum, 4 * params);
        assert_eq!(adam - memory(&["dp=2", "zero_stage=1"]), 4 * params);
    }

    #[test]
    fn a_run_that_trains_nothing_needs_neither_gradients_nor_optimizer_state() {
        let need = |keys: &[&str], positions| {
            let (plan, args) = plan(keys);
            let need = plan
                .frozen()
                .memory(&args, &[Workload::Generation { positions }]);
            need.unwrap()[0]
        };
        let params = plan(&[]).0.graph.num_elements();
        let few = need(&[], 1);
        assert_eq!(
            (few.weights, few.gradients, few.optimizer),
            (4 * params, 0, 0)
        );
        // Keys and values of 16 numbers in each of two layers; ranks of a sequence share out the
        // prompts.
        for (keys, positions) in [(&[][..], 1000), (&["sp=2"], 500)] {
            let cache = need(keys, 1001).activations - need(keys, 1).activations;
            assert_eq!(cache, positions * 2 * 2 * 16 * 4);
        }
        assert_eq!(need(&[], usize::MAX).total(), usize::MAX);
    }

    #[test]
    fn memory_that_processes_share_is_counted_once_and_its_addresses_in_both() {
        let (plan, args) = plan(&["dp=4", "per_device_train_batch_size=1"]);
        let threads = |engine, shared_bytes| {
            let args = args.clone().on(Host {
                engine,
                shared_bytes,
                ..Host::of_processes(&[0; 4], 4)
            });
            let memory = plan.run_memory(&args, &[Workload::Training], 0).unwrap();
            [memory.threads, mapped_bytes(&args, 0, 0)]
        };
        // Over MPI each process has memory of its own.
        for (engine, maps) in [(ChosenEngine::Tcp, 2), (ChosenEngine::Mpi, 1)] {
            let shared: u64 = 12 << 20;
            let ([touched, mapped], alone) = (threads(engine, 12 << 20), threads(engine, 0));
            assert_eq!(
                [touched, mapped],
                [alone[0] + shared, alone[1] + maps * shared / 4]
            );
        }
    }

    #[test]
    fn freed_memory_that_a_rank_keeps_is_counted() {
        let (plan, args) = plan(&["per_device_train_batch_size=2"]);
        let need = plan.memory(&args, &[Workload::Training]).unwrap()[0];
        // Values of several lengths take turns, so some memory lies idle, but less than is in use.
        assert!(need.pool > 0 && need.pool < need.activations, "{need:?}");
        assert_eq!(
            need.total(),
            need.weights + need.gradients + need.optimizer + need.activations + need.pool
        );
    }
}
