//! One rank's part of the profiling run: segments of every kind in turn, on made-up data.

use super::Kinds;
use crate::{
    config::CheckedArguments,
    costs::{Profile, calls::calls, profile::exchanged, timed::Timed},
    data::{DOCUMENT_IDS, integer_limit},
    error::Result,
    metrics::median,
    network::Network,
    plan::ParamGroups,
    stage::{Executor, Stage, StageParams, StateRoom, equipped, grad_store, stages},
};
use merak_mpu::{Communicator, DType, Degrees, Member, Mpu, ReduceOp};
use merak_trace::{Batch, GradStore, Graph, RunContext, SharedBackend, TensorType, Value};
use merak_zero::{GlobalParams, ZeroGroups, ZeroOptimizer};
use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long the nodes are run, once they are warm, unless one round takes longer.
const BUDGET: Duration = Duration::from_millis(600);
/// Microbatches whose forwards run before the first backward, so that activations leave the caches
/// as in a run.
const UNDER_WAY: usize = 2;
/// Rounds of the timed run and of the plain one.
const ROUNDS: RangeInclusive<i64> = 2..=40;

/// A rank that runs segments of every kind in turn.
pub(super) struct Rank<'a> {
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
    pub(super) fn new(
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
    pub(super) fn measured(mut self, network: &Network) -> Result<Profile> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
