//! Runs a graph forward and backward, on one rank or as slices on several.

use merak_mpu::{
    Call, Degrees, Mpu, Rank, ReduceOp, Topology, into_vec,
    testing::{Event, Moment, Record, world},
};
use merak_trace::{
    Axis, AxisGroups, Batch, Coord, DType, GradSlot, GradStore, Graph, Init, Interpreter, Overlap,
    Param, RecomputePlan, RunContext, SharedBackend, SingleRank, StageCuts, StageProgram,
    TensorType, backend::candle::Candle,
};
use std::{collections::BTreeMap, sync::Arc};

/// The results of one rank for one microbatch, dropout on.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) loss: f64,
    /// The gradient of the rank's slice of each parameter, all uses together.
    pub(crate) grads: BTreeMap<String, Vec<f64>>,
}

/// Runs a graph that nothing is split in.
pub(crate) fn on_one_rank(graph: &Graph) -> Step {
    step(graph, Coord::default(), &(Arc::new(SingleRank) as _))
}

/// Runs a graph that is split over the tensor axis on `degree` ranks.
pub(crate) fn on_ranks(graph: &Graph, degree: usize) -> Vec<Step> {
    on_mesh(graph, tensor(degree))
}

/// `degree` ranks of the tensor axis.
pub(crate) fn tensor(degree: usize) -> Degrees {
    Degrees {
        tp: degree,
        ..Degrees::default()
    }
}

/// Runs a split graph on the ranks of a mesh.
pub(crate) fn on_mesh(graph: &Graph, degrees: Degrees) -> Vec<Step> {
    world(degrees.world_size(), |member| {
        let mpu = Mpu::new(member, degrees).expect("the degrees fill the world");
        step(graph, mpu.coord(), &(Arc::new(mpu) as _))
    })
}

/// What each rank of a mesh exchanges in the passes of a microbatch.
pub(crate) fn recorded(graph: &Graph, degrees: Degrees, plan: &RecomputePlan) -> Vec<Record> {
    world(degrees.world_size(), |member| {
        let record = Record::default();
        let member = record.of(&member);
        let mpu = Mpu::new(member, degrees).expect("the degrees fill the world");
        passes(graph, mpu.coord(), &(Arc::new(mpu) as _), plan);
        record
    })
}

/// Bytes of the whole values that a rank has begun to exchange in a group of `ranks`, by
/// collective.
pub(crate) fn whole_bytes(
    events: &[Event],
    group: &str,
    ranks: usize,
) -> BTreeMap<&'static str, usize> {
    let mut bytes = BTreeMap::new();
    let is_start = |event: &&Event| event.group == group && event.moment == Moment::Started;
    for event in events.iter().filter(is_start) {
        // Others take a value that the rank has whole.
        let parts = match event.call {
            Call::AllGather | Call::AllToAll => ranks,
            _ => 1,
        };
        *bytes.entry(event.call.name()).or_default() += parts * event.bytes;
    }
    bytes
}

/// Asserts that all ranks of the tensor axis compute the same as one rank on the whole graph.
#[track_caller]
pub(crate) fn assert_same(whole: &Graph, split: &Graph, degree: usize) {
    assert_same_on(whole, split, tensor(degree));
}

fn norm(grad: &[f64]) -> f64 {
    grad.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Asserts that all ranks of a split graph compute the same as one rank on the whole graph,
/// whatever runs while collectives pass.
///
/// In f64 sums in another order differ by some 1e-15 of the largest summand. A gradient that
/// cancels out is held against the norm of all gradients.
#[track_caller]
pub(crate) fn assert_same_on(whole: &Graph, split: &Graph, degrees: Degrees) {
    let topology = Topology::new(degrees).expect("no degree is 0");
    let expected = on_one_rank(whole);
    let all: Vec<_> = expected.grads.values().flatten().copied().collect();
    let floor = 1e-4 * norm(&all);
    for overlap in [
        Overlap::None,
        Overlap::Linear,
        Overlap::Block,
        Overlap::Blocks,
    ] {
        let overlapping = split.clone().with_overlap(overlap);
        let steps = on_mesh(&overlapping, degrees);
        assert_steps(&steps, &expected, split, (&topology, floor), overlap);
    }
}

#[track_caller]
fn assert_steps(
    steps: &[Step],
    expected: &Step,
    split: &Graph,
    (topology, floor): (&Topology, f64),
    overlap: Overlap,
) {
    for (rank, step) in steps.iter().enumerate() {
        let place = topology.coord_of(Rank(rank)).expect("it is a rank");
        let off = (step.loss - expected.loss).abs() / expected.loss.abs();
        assert!(
            off < 1e-10,
            "rank {rank}, {overlap:?}: loss {}, expected {}",
            step.loss,
            expected.loss
        );
        for param in split.params() {
            let wanted = slice(param, &expected.grads[&param.name], place);
            let found = &step.grads[&param.name];
            let difference: Vec<_> = found.iter().zip(&wanted).map(|(a, b)| a - b).collect();
            let off = norm(&difference) / norm(&wanted).max(floor);
            assert!(
                off < 1e-9 && found.len() == wanted.len(),
                "rank {rank}, {overlap:?}: gradient of {} is off by {off:e}",
                param.name
            );
        }
    }
}

/// The passes of a microbatch, and what an optimizer does with their gradients before a step.
fn step(graph: &Graph, place: Coord, groups: &Arc<dyn AxisGroups>) -> Step {
    let mut step = passes(graph, place, groups, &RecomputePlan::default());
    sum_over_ranks(graph, &**groups, &mut step.grads);
    step
}

/// The forward and the backward of a microbatch.
fn passes(graph: &Graph, place: Coord, groups: &Arc<dyn AxisGroups>, plan: &RecomputePlan) -> Step {
    let backend: SharedBackend = Arc::new(Candle::new(1).expect("threads start"));
    let program = StageProgram::training(graph, &StageCuts::whole(graph), 0, plan);
    let runner = Interpreter::new(
        Arc::new(program.expect("differentiable")),
        Arc::clone(&backend),
        Arc::clone(groups),
    );
    let program = runner.program();
    let params: Vec<_> = program
        .params()
        .iter()
        .map(|param| {
            let data = slice(param, &start(param), place);
            backend
                .from_bytes(&param.local, &bytes_of(&data))
                .expect("as many as the type needs")
        })
        .collect();
    let mut store = GradStore::default();
    for (buffer, grad) in program.grads.iter().enumerate() {
        let len = program.graph.param(grad.param).local.numel();
        let memory = backend.grad_buffer(DType::F64, len);
        store.buffers.push(memory.expect("room for it"));
        store.slots.push(GradSlot {
            buffer,
            offset: 0,
            len,
        });
    }
    let context = RunContext {
        seed: 1234,
        step: 3,
        sample_base: 4,
        training: true,
        place,
    };
    let mut forwarded = runner
        .forward(&params, &batch(&backend, graph), Vec::new(), context)
        .expect("runs forward");
    let loss = backend
        .into_buffer(forwarded.outputs.swap_remove(0))
        .expect("a value of this backend");
    let loss = into_vec::<f64>(loss).expect("f64")[0];
    runner
        .backward(&mut forwarded.frame, &params, Vec::new(), 1.0, &mut store)
        .expect("runs backward");

    let mut grads = BTreeMap::new();
    for (grad, buffer) in program.grads.iter().zip(store.buffers) {
        let own = into_vec::<f64>(buffer).expect("f64");
        let sum: &mut Vec<f64> = grads
            .entry(program.graph.param(grad.param).name.clone())
            .or_insert_with(|| vec![0.0; own.len()]);
        sum.iter_mut().zip(own).for_each(|(sum, x)| *sum += x);
    }
    Step { loss, grads }
}

/// Sums gradients of which each rank has a summand, those of all parameters over the sequence axis.
fn sum_over_ranks(graph: &Graph, groups: &dyn AxisGroups, grads: &mut BTreeMap<String, Vec<f64>>) {
    for axis in [Axis::Sequence, Axis::Tensor] {
        let Some(group) = groups.along(axis) else {
            continue;
        };
        let is_summed = |param: &&Param| param.summed || axis == Axis::Sequence;
        for param in graph.params().iter().filter(is_summed) {
            if let Some(grad) = grads.get_mut(&param.name) {
                let sum = group.all_reduce_vec(std::mem::take(grad), ReduceOp::Sum);
                *grad = sum.expect("all ranks sum");
            }
        }
    }
}

/// The whole of a parameter: noise of its name around its initial constant.
fn start(param: &Param) -> Vec<f64> {
    let seed = param.name.bytes().fold(7_u64, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(u64::from(byte))
    });
    let shift = if let Init::Constant(value) = param.init {
        value
    } else {
        0.0
    };
    noise(seed, param.full.numel())
        .into_iter()
        .map(|x| shift + 0.4 * x)
        .collect()
}

/// A rank's slice of a whole parameter, or of its gradient.
fn slice(param: &Param, whole: &[f64], place: Coord) -> Vec<f64> {
    let mut local = vec![0.0; param.local.numel()];
    for part in param.placements.local_boxes(&param.full, place) {
        let from = part.full_ranges(&param.full.shape).flatten();
        let to = part.local_ranges(&param.local.shape).flatten();
        to.zip(from).for_each(|(to, from)| local[to] = whole[from]);
    }
    local
}

/// Token ids and labels, or noise for float inputs.
fn batch(backend: &SharedBackend, graph: &Graph) -> Batch {
    let value = |name: &str, ty: &TensorType| {
        let noise = noise(name.len() as u64, ty.numel());
        let bytes = match ty.dtype {
            DType::I64 => noise
                .iter()
                .enumerate()
                .map(|(i, x)| match i % 5 {
                    // Some labels do not count.
                    3 if name == "labels" => -100,
                    // Some keys are hidden.
                    residue if name == "attention_mask" => i64::from(residue != 2),
                    // Documents of three tokens.
                    _ if name == "document_ids" => i64::from(i as u32 / 3),
                    _ => ((x + 1.0) * 50.0) as i64,
                })
                .flat_map(i64::to_ne_bytes)
                .collect(),
            _ => bytes_of(&noise),
        };
        backend
            .from_bytes(ty, &bytes)
            .expect("as many as the type needs")
    };
    graph
        .inputs()
        .iter()
        .map(|port| (port.name.clone(), value(&port.name, graph.ty(port.value))))
        .collect()
}

fn bytes_of(data: &[f64]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

/// Numbers in [-1, 1) that depend on a seed alone.
fn noise(seed: u64, len: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..len).map(|_| 2.0 * next() - 1.0).collect()
}
