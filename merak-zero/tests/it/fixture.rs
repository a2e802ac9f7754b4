//! A small model, its numbers, and a naive optimizer to compare with.

use merak_mpu::{Group, Member, Rank, into_vec};
use merak_zero::{
    AdamStep, FlatLayout, GlobalParams, OptimizerConfig, ParamSpec, PendingBucket, Result,
    UpdateReport, ZeroConfig, ZeroGroups, ZeroOptimizer, ZeroStage, adam_update,
};

/// All stages.
pub(crate) const STAGES: [ZeroStage; 4] = [
    ZeroStage::Replicated,
    ZeroStage::OptimizerState,
    ZeroStage::Gradients,
    ZeroStage::Parameters,
];

/// Parameters of one and of several norm blocks, of odd sizes, with and without decay.
pub(crate) fn params() -> Vec<ParamSpec> {
    vec![
        ParamSpec::new("wte", &[301, 67], 0),
        ParamSpec::new("ln.weight", &[67], 1).without_decay(),
        ParamSpec::new("fc.weight", &[67, 513], 2),
        ParamSpec::new("fc.bias", &[513], 3).without_decay(),
        ParamSpec::new("proj.weight", &[129, 67], 4),
        ParamSpec::new("scale", &[1], 5),
    ]
}

pub(crate) fn model() -> GlobalParams {
    GlobalParams::new(params().into_iter().map(|p| (p.name.clone(), p.numel())))
}

pub(crate) fn len() -> usize {
    params().iter().map(ParamSpec::numel).sum()
}

/// A number in [-1, 1) that depends on both arguments alone.
pub(crate) fn noise(stream: u64, index: usize) -> f32 {
    let mut x = (stream << 32 | index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ x >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 32).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
}

pub(crate) fn noises(stream: u64, len: usize) -> Vec<f32> {
    (0..len).map(|i| noise(stream, i)).collect()
}

/// The gradients of one data rank in one step.
pub(crate) fn grads(step: u64, rank: usize) -> Vec<f32> {
    noises(100 + 10 * step + rank as u64, len())
}

/// Learning rates that differ from step to step.
pub(crate) fn lr(step: u64) -> f64 {
    0.01 / (step + 1) as f64
}

pub(crate) fn config(stage: ZeroStage) -> ZeroConfig {
    ZeroConfig {
        stage,
        optimizer: OptimizerConfig {
            weight_decay: 0.1,
            ..OptimizerConfig::default()
        },
        max_grad_norm: 3.0,
        reduce_bucket_size: 25_000,
        ..ZeroConfig::default()
    }
}

/// A group of this rank alone.
pub(crate) fn alone(member: &Member) -> Group {
    let me = [member.rank()];
    member.group("model", &me).expect("a rank is in its group")
}

/// A group of the ranks with these numbers.
pub(crate) fn group(member: &Member, name: &str, ranks: &[usize]) -> Group {
    let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
    member.group(name, &ranks).expect("this rank is among them")
}

/// An optimizer whose model is whole on each rank of a data-parallel world.
pub(crate) fn data_parallel(member: &Member, config: ZeroConfig) -> ZeroOptimizer {
    let groups = ZeroGroups {
        data_sequence: member.world_group().expect("a fresh world"),
        model: alone(member),
    };
    ZeroOptimizer::new(params(), model(), config, groups).expect("a legal configuration")
}

/// Reduces the gradients of a step, given bucket by bucket where they are divided; what this rank
/// keeps of them.
pub(crate) fn reduced(optimizer: &mut ZeroOptimizer, mut grads: Vec<f32>) -> Result<Vec<f32>> {
    if optimizer.divides_gradients() {
        let mut kept = vec![0.0_f32; optimizer.num_gradients()];
        for bucket in (0..optimizer.layout().buckets().len()).rev() {
            let own = grads[optimizer.layout().buckets()[bucket].flat.clone()].to_vec();
            optimizer.add_bucket(bucket, Box::new(own), &mut kept)?;
        }
        grads = kept;
    }
    optimizer.reduce_gradients(&mut grads)?;
    Ok(grads)
}

/// What this rank keeps of parameters with these values.
pub(crate) fn held(optimizer: &ZeroOptimizer, all: &[f32]) -> Vec<f32> {
    if !optimizer.divides_params() {
        return all.to_vec();
    }
    let state = optimizer.state();
    let owned = state.blocks().iter().map(|block| block.flat.clone());
    owned.flat_map(|range| all[range].to_vec()).collect()
}

/// All parameters, gathered where they are divided.
pub(crate) fn whole(optimizer: &ZeroOptimizer, held: Vec<f32>) -> Vec<f32> {
    if !optimizer.divides_params() {
        return held;
    }
    let gatherer = optimizer.gatherer();
    let bucket = |bucket: usize| {
        let own = &held[gatherer.own_part(bucket)];
        let (at, len) = gatherer.place(bucket);
        let mut all = vec![f32::NAN; len];
        all[at..at + own.len()].copy_from_slice(own);
        let gathered = gatherer
            .start(bucket, Box::new(all))
            .and_then(PendingBucket::wait);
        into_vec::<f32>(gathered.expect("all ranks gather")).expect("f32")
    };
    (0..optimizer.layout().buckets().len())
        .flat_map(bucket)
        .collect()
}

/// A step on the gradients of this rank.
pub(crate) fn step(
    optimizer: &mut ZeroOptimizer,
    weights: &mut Vec<f32>,
    grads: Vec<f32>,
    lr: f64,
) -> Result<UpdateReport> {
    let mut grads = reduced(optimizer, grads)?;
    optimizer.step(weights, &mut grads, lr)
}

/// What `num_ranks` data-parallel ranks come to after `steps` steps, computed on one thread from
/// whole tensors, with the norm as one plain f64 sum over blocks.
pub(crate) fn serial(num_ranks: usize, steps: u64, config: &ZeroConfig) -> Vec<f32> {
    let layout = FlatLayout::new(params(), usize::MAX, 1).expect("legal parameters");
    let mut weights = noises(1, len());
    let (mut exp_avg, mut exp_avg_sq) = (vec![0.0; len()], vec![0.0; len()]);
    for t in 0..steps {
        let mut sum = grads(t, 0);
        for rank in 1..num_ranks {
            for (s, g) in sum.iter_mut().zip(grads(t, rank)) {
                *s += g;
            }
        }
        let mean: Vec<f32> = sum.iter().map(|s| s * (1.0 / num_ranks as f32)).collect();
        let clip = (config.max_grad_norm / (norm(&layout, &mean) + 1e-6)).min(1.0);
        let step = AdamStep::new(&config.optimizer, lr(t), t + 1, clip);
        for (i, spec) in layout.params().iter().enumerate() {
            let r = layout.range(i);
            let step = if spec.decay {
                step
            } else {
                step.without_decay()
            };
            adam_update(
                &mut weights[r.clone()],
                &mean[r.clone()],
                &mut exp_avg[r.clone()],
                &mut exp_avg_sq[r],
                &step,
            );
        }
    }
    weights
}

/// Blocks to parameters to one number, in order.
fn norm(layout: &FlatLayout, grads: &[f32]) -> f64 {
    let of_param = |param: usize| -> f64 {
        let blocks = grads[layout.range(param)].chunks(merak_zero::NORM_BLOCK);
        blocks.map(merak_zero::sum_of_squares).sum()
    };
    (0..layout.params().len()).map(of_param).sum::<f64>().sqrt()
}
