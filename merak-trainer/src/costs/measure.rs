//! The profiling run: every kind of node of a model, on as many ranks as the run will have.

use super::{
    Profile, pipeline_cores,
    profile::{calls, exchanged, of_node},
    timed::Timed,
};
use crate::{
    config::CheckedArguments,
    data::{DOCUMENT_IDS, integer_limit},
    error::{Error, Result},
    machine::num_cores,
    network::Network,
    plan::{ParamGroups, param_bytes},
    stage::{Executor, Stage, StageParams, StateRoom, equipped, grad_store, stages},
    world::{World, ranks_at_once, run_ranks, threads_per_rank},
};
use merak_mpu::{Communicator, DType, Degrees, Member, Mpu, ReduceOp};
use merak_partition::RankPrograms;
use merak_trace::{
    Batch, GradStore, Graph, RunContext, SharedBackend, StageProgram, TensorType, Value,
    backend::candle::Products,
};
use merak_zero::{GlobalParams, ZeroGroups, ZeroOptimizer};
use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};
use sysinfo::{CpuRefreshKind, System};

/// How long the nodes are run, once they are warm, unless one round takes longer.
const BUDGET: Duration = Duration::from_millis(600);
/// Microbatches whose forwards run before the first backward, so that activations leave the caches
/// as in a run.
const UNDER_WAY: usize = 2;
/// How often all is measured again where the repetitions differ widely.
const FURTHER_ATTEMPTS: usize = 2;
/// Rounds of the timed run and of the plain one.
const ROUNDS: RangeInclusive<i64> = 2..=40;

/// Everything besides the nodes that changes their times, in words.
pub(super) fn conditions(args: &CheckedArguments) -> String {
    let threads = threads_per_rank(args);
    let compute = &args.compute;
    let build = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    // Another build has other kernels.
    let program = std::env::current_exe().and_then(std::fs::metadata).ok();
    let program = program.and_then(|file| {
        let written = file.modified().ok()?.duration_since(std::time::UNIX_EPOCH);
        Some(format!(
            "{} bytes of {}",
            file.len(),
            written.ok()?.as_secs()
        ))
    });
    let processor = System::new().ok().and_then(|mut system| {
        system.refresh_cpu_specifics(CpuRefreshKind::nothing());
        Some(system.cpus().first()?.brand().to_owned())
    });
    let processor = processor.unwrap_or_default();
    format!(
        "merak {} {build} {}, {} on {}, {} x {processor}, {} of {} ranks at once on {threads} threads each{}, dp {}, tp {}{}, {}{}",
        env!("CARGO_PKG_VERSION"),
        program.unwrap_or_default(),
        compute.backend,
        compute.device,
        num_cores(),
        ranks_at_once(args).min(args.world_size()),
        args.world_size(),
        args.connection().map_or_else(String::new, |connection| {
            format!(", by {connection}, {} on its cores", args.core_sharers())
        }),
        args.dp,
        args.tp,
        if args.sp > 1 {
            format!(", sp {} by {}", args.sp, args.sp_method)
        } else {
            String::new()
        },
        args.optim,
        // The types of values show neither weights that are kept in narrower elements nor rounded
        // factors of products.
        match (args.narrow(), args.autocast()) {
            (Some(narrow), _) => format!(", {narrow}"),
            (None, Some(narrow)) => format!(", autocast to {narrow}"),
            (None, None) if args.products() == Products::Rounded => ", rounded products".to_owned(),
            (None, None) => String::new(),
        },
    )
}

/// The ranks that run the nodes as threads: those that share cores in the run. They take turns
/// here too, and find the caches as the others left them.
fn degrees(args: &CheckedArguments) -> Degrees {
    Degrees {
        dp: 1,
        pp: (args.core_sharers() / (args.tp * args.sp)).max(1),
        ..args.degrees()
    }
}

/// Whether every rank is a process that has the cores of its threads while all compute. Processes
/// take no turns: where they have fewer cores, the times of one hold those of others.
///
/// # Communication
/// Between processes, an all-reduce of a byte.
pub(super) fn have_cores(args: &CheckedArguments, world: &World) -> Result<bool> {
    let has_cores = args.core_sharers() <= ranks_at_once(args);
    let all = world.together(|member| {
        let group = member.world_group()?;
        Ok(group.all_reduce_scalar(u8::from(has_cores), ReduceOp::Min)?)
    })?;
    Ok(all == Some(1))
}

/// Times the nodes of a model's segments and an optimizer step: on the ranks of the run where
/// `world` is of processes, else on threads of this process. What these ranks exchange takes the
/// times of `exchanges`, and counts to no node.
///
/// # Communication
/// Between processes, what the nodes exchange, and all-gathers of the times, whose mean all have.
///
/// # Errors
/// When a node fails.
pub(super) fn profile(
    graph: &Graph,
    programs: &[StageProgram],
    args: &CheckedArguments,
    exchanges: Network,
    world: &World,
) -> Result<Profile> {
    let threads = threads_per_rank(args);
    let kinds = Kinds::of(programs);
    let timed = |member: Member, degrees: Degrees| {
        Rank::new(member, degrees, graph, &kinds, args, threads)?.measured(&exchanges)
    };
    let measure = || {
        let all = world.together(|member| {
            let own = timed(member.clone(), args.degrees())?;
            of_all(member, &own)
        })?;
        let ranks = match all {
            Some(ranks) => ranks,
            None => of_threads(args, &timed)?,
        };
        Ok::<_, Error>(mean(&ranks))
    };
    let mut profile = measure()?;
    // Another process may have used the machine, and may have finished.
    for _ in 0..FURTHER_ATTEMPTS {
        if profile.spread <= super::WIDE_SPREAD {
            break;
        }
        let next = measure()?;
        if next.spread < profile.spread {
            profile = next;
        }
    }
    profile.cores = pipeline_cores(args);
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    profile.measured_at = since.map_or(0, |since| since.as_secs());
    Ok(profile)
}

/// What `timed` says of threads, which share the cores of this process as its ranks do in the run.
fn of_threads(
    args: &CheckedArguments,
    timed: &(impl Fn(Member, Degrees) -> Result<Profile> + Sync),
) -> Result<Vec<Profile>> {
    let degrees = degrees(args);
    let mut ranks = run_ranks(degrees.world_size(), args, |member| timed(member, degrees))?;
    // All ranks updated at once, without turns.
    let part = ranks_at_once(args).min(ranks.len()) as f64 / ranks.len() as f64;
    for rank in &mut ranks {
        rank.per_param *= part;
    }
    Ok(ranks)
}

/// The times of all ranks, which every process reads from the same JSON.
fn of_all(member: &Member, own: &Profile) -> Result<Vec<Profile>> {
    let own = serde_json::to_vec(own).expect("it is plain data");
    let all = member.world_group()?.all_gather_bytes(own)?;
    let read = |json: &Vec<u8>| serde_json::from_slice(json).expect("a rank wrote it");
    Ok(all.iter().map(read).collect())
}

/// The mean over ranks.
fn mean(ranks: &[Profile]) -> Profile {
    let mut nodes: BTreeMap<String, f64> = BTreeMap::new();
    let share = 1.0 / ranks.len() as f64;
    for (node, seconds) in ranks.iter().flat_map(|rank| &rank.nodes) {
        *nodes.entry(node.clone()).or_default() += seconds * share;
    }
    Profile {
        nodes,
        per_node: ranks.iter().map(|rank| rank.per_node * share).sum(),
        per_param: ranks.iter().map(|rank| rank.per_param * share).sum(),
        spread: ranks.iter().map(|rank| rank.spread).fold(0.0, f64::max),
        ..Profile::default()
    }
}

/// Segments whose nodes are of the same kinds count once.
struct Kinds {
    /// One segment of each kind.
    programs: RankPrograms,
    /// For each segment its kind.
    order: Vec<usize>,
}

impl Kinds {
    fn of(programs: &[StageProgram]) -> Self {
        let mut known = BTreeMap::new();
        let mut distinct = Vec::new();
        let order = programs.iter().map(|program| {
            *known.entry(shape(program)).or_insert_with(|| {
                distinct.push((distinct.len(), Arc::new(program.clone())));
                distinct.len() - 1
            })
        });
        let order = order.collect();
        Self {
            programs: RankPrograms::of(distinct),
            order,
        }
    }
}

/// The signatures of a program's nodes, the types of its hops and the names of its inputs.
fn shape(program: &StageProgram) -> Vec<String> {
    let nodes = program.graph.nodes().iter();
    let mut shape: Vec<_> = nodes.map(|node| of_node(&program.graph, node)).collect();
    let hops = program.recv.iter().chain(&program.send);
    shape.extend(hops.map(|hop| hop.ty.to_string()));
    shape.extend(program.inputs.iter().map(|port| port.name.clone()));
    shape
}

/// A rank that runs segments of every kind in turn.
struct Rank<'a> {
    mpu: Arc<Mpu>,
    kinds: &'a Kinds,
    backend: SharedBackend,
    params: StageParams,
    grads: GradStore,
    optimizer: ZeroOptimizer,
    batch: BTreeMap<String, (TensorType, Vec<u8>)>,
    context: RunContext,
}

/// A value as bytes, from which fresh values are made: a value with one owner may be overwritten,
/// as in a run.
type Bytes = (TensorType, Vec<u8>);

impl<'a> Rank<'a> {
    fn new(
        member: Member,
        degrees: Degrees,
        graph: &Graph,
        kinds: &'a Kinds,
        args: &CheckedArguments,
        threads: usize,
    ) -> Result<Self> {
        let alone = member.group("alone", &[member.rank()])?;
        let mpu = Arc::new(Mpu::new(member, degrees)?);
        let Executor {
            backend,
            optimizer_device,
        } = Executor::new(args, mpu.locality(), threads)?;
        let table = &kinds.programs.params;
        let trained: Vec<_> = table.iter().filter(|param| param.trainable).collect();
        let sizes = trained.iter();
        let model = GlobalParams::new(sizes.map(|param| (param.name.clone(), param.local.numel())));
        let groups = ParamGroups::new(args, graph);
        let specs = trained
            .iter()
            .enumerate()
            .map(|(index, param)| groups.spec(param, index));
        let groups = ZeroGroups {
            // Each rank is a replica of its own.
            data_sequence: alone,
            model: mpu.model_parallel_group().clone(),
        };
        let optimizer =
            ZeroOptimizer::new(specs.collect(), model, args.zero_config(threads), groups)?;
        let optimizer = equipped(optimizer, optimizer_device, threads)?;
        let room = StateRoom::Beside;
        let mut params = StageParams::new(&*backend, table, &optimizer, &room)?;
        params.write_floats(&mut |_, values| {
            let values = values.iter_mut().enumerate();
            values.for_each(|(index, value)| *value = small(index));
        });
        Ok(Self {
            grads: grad_store(&kinds.programs, &optimizer, &*backend)?,
            batch: batch(graph),
            context: RunContext {
                training: true,
                place: mpu.coord(),
                ..RunContext::default()
            },
            mpu,
            kinds,
            backend,
            params,
            optimizer,
        })
    }

    /// The times of the nodes in some rounds, and of an optimizer step, where exchanges take the
    /// times of `network`.
    fn measured(mut self, network: &Network) -> Result<Profile> {
        let timed = Arc::new(Timed::new(Arc::clone(&self.backend)));
        let programs = &self.kinds.programs;
        let noted = Arc::clone(&timed) as SharedBackend;
        let noted = stages(programs, (&self.params, None), &noted, &self.mpu);
        let plain = stages(programs, (&self.params, None), &self.backend, &self.mpu);
        let given = self.given(&plain)?;
        // The first round touches memory; the length of the second tells how many there can be.
        self.round(&noted, &given)?;
        let start = Instant::now();
        self.round(&plain, &given)?;
        let rounds = BUDGET.as_secs_f64() / start.elapsed().as_secs_f64().max(1e-6);
        let rounds = (rounds as i64).clamp(*ROUNDS.start(), *ROUNDS.end());
        // Ranks with collectives between them run the same rounds, and all begin together.
        let rounds = self
            .mpu
            .world_group()
            .all_reduce_scalar(rounds, ReduceOp::Max)?;
        let mut whole = Vec::new();
        for _ in 0..rounds {
            whole.push(self.round(&plain, &given)?);
        }
        timed.clear();
        for _ in 0..rounds {
            self.round(&noted, &given)?;
        }
        let nodes = timed.medians();
        Ok(Profile {
            spread: spread(whole.clone()),
            per_node: per_node(&plain, &nodes, network, median(whole)),
            nodes,
            per_param: self.update()?,
            ..Profile::default()
        })
    }

    /// The values that each kind of segment receives from the one before it.
    fn given(&mut self, stages: &[Stage]) -> Result<Vec<Vec<Bytes>>> {
        let mut given: Vec<Option<Vec<Bytes>>> = vec![None; stages.len()];
        let mut sent: Vec<Vec<Bytes>> = vec![Vec::new(); stages.len()];
        let mut last = Vec::new();
        for &kind in &self.kinds.order {
            if given[kind].is_none() {
                let stage = &stages[kind];
                let (inputs, received) = (self.inputs(stage)?, self.fresh(&last)?);
                let out =
                    stage
                        .interpreter
                        .forward(&stage.values, &inputs, received, self.context)?;
                let values = out.send.into_iter().map(|value| self.bytes(value));
                sent[kind] = values.collect::<Result<_>>()?;
                given[kind] = Some(last.clone());
            }
            last.clone_from(&sent[kind]);
        }
        Ok(given.into_iter().flatten().collect())
    }

    /// Runs the forwards of each kind of segment for some microbatches, then both halves of their
    /// backwards. Returns the seconds of all of them for one microbatch. The forwards of a
    /// microbatch are one turn and its backwards another, as the actions of a run are.
    fn round(&mut self, stages: &[Stage], given: &[Vec<Bytes>]) -> Result<f64> {
        let mut time = Duration::ZERO;
        let mut microbatches = Vec::new();
        for _ in 0..UNDER_WAY {
            let _turn = self.mpu.sequence_tensor_parallel_group().turn()?;
            let mut frames = Vec::new();
            for (stage, given) in stages.iter().zip(given) {
                let (inputs, received) = (self.inputs(stage)?, self.fresh(given)?);
                let start = Instant::now();
                let forwarded =
                    stage
                        .interpreter
                        .forward(&stage.values, &inputs, received, self.context)?;
                time += start.elapsed();
                frames.push((stage, forwarded.frame));
            }
            microbatches.push(frames);
        }
        for frames in microbatches {
            let _turn = self.mpu.sequence_tensor_parallel_group().turn()?;
            for (stage, mut frame) in frames.into_iter().rev() {
                let hops = stage.interpreter.program().send.iter();
                let back: Vec<Bytes> = hops
                    .filter(|hop| hop.grad.is_some())
                    .map(|hop| (hop.ty.clone(), pattern(&hop.ty, None)))
                    .collect();
                let back = self.fresh(&back)?;
                let (interpreter, views) = (&stage.interpreter, &stage.values);
                let start = Instant::now();
                interpreter.backward_input(&mut frame, views, back, 1e-3)?;
                interpreter.backward_weight(&mut frame, views, &mut self.grads)?;
                drop(frame);
                time += start.elapsed();
            }
        }
        Ok(time.as_secs_f64() / UNDER_WAY as f64)
    }

    /// Seconds of an optimizer step per parameter, clearing its gradient included.
    fn update(&mut self) -> Result<f64> {
        let len = self.optimizer.layout().len();
        let (optimizer, grads) = (&mut self.optimizer, &mut self.grads.buffers[0]);
        let mut times = Vec::new();
        grads.clear();
        for _ in 0..4 {
            let start = Instant::now();
            self.params
                .update(|params| optimizer.step(params, &mut **grads, 0.0))?;
            grads.clear();
            times.push(start.elapsed().as_secs_f64());
        }
        // The first one touches memory.
        times.remove(0);
        Ok(median(times) / len.max(1) as f64)
    }

    fn inputs(&self, stage: &Stage) -> Result<Batch> {
        let ports = stage.interpreter.program().inputs.iter();
        let input = |name: &String| {
            let (ty, bytes) = &self.batch[name];
            Ok((name.clone(), self.backend.from_bytes(ty, bytes)?))
        };
        ports.map(|port| input(&port.name)).collect()
    }

    fn fresh(&self, values: &[Bytes]) -> Result<Vec<Value>> {
        let make = |(ty, bytes): &Bytes| Ok(self.backend.from_bytes(ty, bytes)?);
        values.iter().map(make).collect()
    }

    fn bytes(&self, value: Value) -> Result<Bytes> {
        let ty = value.ty().clone();
        let buffer = self.backend.into_buffer(value)?;
        let mut bytes = Vec::new();
        buffer.read(&mut |all| bytes = all.to_vec());
        Ok((ty, bytes))
    }
}

/// Seconds between one node and the next, when all nodes of the stages take `whole` seconds, with
/// what they exchange.
fn per_node(stages: &[Stage], nodes: &BTreeMap<String, f64>, network: &Network, whole: f64) -> f64 {
    let all = stages.iter().flat_map(|stage| {
        let graph = &stage.interpreter.program().graph;
        graph.nodes().iter().map(move |node| (graph, node))
    });
    let (mut sum, mut count) = (0.0, 0);
    for (graph, node) in all {
        sum += exchanged(network, graph, node).unwrap_or_default();
        for (call, times) in calls(graph, node) {
            sum += times * nodes.get(&call).copied().unwrap_or_default();
            count += 1;
        }
    }
    ((whole - sum) / f64::from(count.max(1))).max(0.0)
}

/// Made-up data of a model: integers that it can look up, small floats.
fn batch(graph: &Graph) -> BTreeMap<String, Bytes> {
    let inputs = graph.inputs().iter();
    let input = inputs.map(|port| {
        let ty = graph.ty(port.value).clone();
        let limit = match &*port.name {
            // Documents as long as their sequences take most time.
            DOCUMENT_IDS => Some(1),
            name => integer_limit(graph, name, port.value),
        };
        let bytes = pattern(&ty, limit);
        (port.name.clone(), (ty, bytes))
    });
    input.collect()
}

/// Bytes of a tensor with many different small values.
fn pattern(ty: &TensorType, limit: Option<usize>) -> Vec<u8> {
    let len = ty.numel();
    match ty.dtype {
        DType::F32 => floats(len),
        DType::F64 => (0..len)
            .flat_map(|i| f64::from(small(i)).to_ne_bytes())
            .collect(),
        DType::BF16 => (0..len)
            .flat_map(|i| half::bf16::from_f32(small(i)).to_ne_bytes())
            .collect(),
        DType::F16 => (0..len)
            .flat_map(|i| half::f16::from_f32(small(i)).to_ne_bytes())
            .collect(),
        DType::I64 => {
            // A prime step visits the rows of a table far apart, as tokens do.
            let limit = limit.unwrap_or(2).max(1);
            let integers = (0..len).map(|i| ((i * 7919 % limit) as u64).cast_signed());
            integers.flat_map(i64::to_ne_bytes).collect()
        }
        DType::U32 | DType::U8 => vec![0; ty.size_bytes()],
    }
}

fn floats(len: usize) -> Vec<u8> {
    (0..len).flat_map(|i| small(i).to_ne_bytes()).collect()
}

fn small(index: usize) -> f32 {
    ((index * 31 % 17) as f32 - 8.0) * 2e-3
}

/// Width of the middle half of some times, divided by their median.
fn spread(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    let last = times.len().saturating_sub(1);
    let middle = times.get(times.len() / 2);
    match (
        times.get(last / 4),
        middle,
        times.get((3 * last).div_ceil(4)),
    ) {
        (Some(low), Some(middle), Some(high)) if *middle > 0.0 => (high - low) / middle,
        _ => 0.0,
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Bytes that a profiling run needs: weights, gradients and optimizer state of one segment of each
/// kind, and the values of some microbatches, on every rank that takes part; or what exchanges
/// between ranks need afterwards.
pub(super) fn needed_bytes(programs: &[StageProgram], args: &CheckedArguments) -> u64 {
    let kinds = Kinds::of(programs).programs;
    // Each rank is a replica of its own.
    let params = param_bytes(args, 1).held(kinds.sums()).total() as u64;
    let live = kinds.stages.iter();
    let live = live.map(|(_, program)| program.live_bytes_without_reuse().input_half as u64);
    // As threads of the first rank, or as the processes of its host.
    let ranks = degrees(args).world_size().max(args.ranks_here()) as u64;
    let nodes = ranks.saturating_mul(params.saturating_add(4 * live.sum::<u64>()));
    nodes.max(Network::needed_bytes(args))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Config, Host},
        plan::{Draft, PlanInputs, SegmentedGraph},
    };
    use merak_mpu::{ChosenEngine, testing};
    use merak_trace::{Overlap, models};
    use serde_json::json;

    #[test]
    fn processes_that_have_their_cores_time_their_own_nodes_and_have_one_mean() {
        let line = ["--tp=2", "--compute.threads_per_rank=1"].map(str::to_owned);
        let args = Config::load(None, [], &line).unwrap().check().unwrap();
        let model = models::from_config(&json!({ "model_type": "gpt2", "vocab_size": 32,
            "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2 }));
        let inputs = PlanInputs::read(model.unwrap().into(), &args).unwrap();
        let (_, SegmentedGraph { graph, segments }) = Draft::new(&inputs, &args).unwrap();
        let graph = graph.with_overlap(Overlap::None);
        let programs = segments.programs(&graph, &[]).unwrap();
        let profiles = testing::tcp_world(2, |member| {
            let world = World::of_process(member, ChosenEngine::Tcp).unwrap();
            let on = |core_sharers| {
                args.clone().on(Host {
                    engine: ChosenEngine::Tcp,
                    number: 0,
                    of_ranks: vec![0; 2],
                    names: Vec::new(),
                    core_sharers,
                    shared_bytes: 0,
                })
            };
            assert!(!have_cores(&on(num_cores() + 1), &world).unwrap());
            let args = on(1);
            assert!(have_cores(&args, &world).unwrap());
            profile(&graph, &programs, &args, Network::default(), &world).unwrap()
        });
        let [first, second] = [0, 1].map(|rank: usize| &profiles[rank]);
        assert!(!first.nodes.is_empty() && first.per_param > 0.0);
        // What each has measured differs.
        assert_eq!(first.nodes, second.nodes);
        let others = |of: &Profile| [of.per_node, of.per_param, of.spread].map(f64::to_bits);
        assert_eq!(others(first), others(second));
    }

    #[test]
    fn the_spread_of_times_is_that_of_their_middle_half() {
        let steady = [10.0, 10.0, 10.0, 10.0, 99.0].to_vec();
        let busy = [10.0, 20.0, 10.0, 30.0, 40.0].to_vec();
        let spreads = [steady, busy, vec![5.0, 6.0], vec![7.0], vec![]].map(spread);
        let expected = [0.0, 1.0, 1.0 / 6.0, 0.0, 0.0];
        for (spread, expected) in spreads.into_iter().zip(expected) {
            assert!((spread - expected).abs() < 1e-12, "{spread} for {expected}");
        }
    }
}
