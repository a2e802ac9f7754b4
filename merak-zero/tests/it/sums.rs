//! Parameters of whose gradients each tensor rank has a summand.

use crate::fixture::{config, grads, group, len, lr, model, noises, params};
use merak_mpu::testing::world;
use merak_zero::{ParamSpec, ZeroGroups, ZeroOptimizer, ZeroStage};

/// The weights of each rank after some steps of two replicas of `tp` tensor ranks, and the norms.
/// Every other parameter has summands.
fn train(tp: usize, stage: ZeroStage) -> Vec<(Vec<u32>, Vec<u64>)> {
    world(2 * tp, |member| {
        let (data, tensor) = (member.rank().0 / tp, member.rank().0 % tp);
        let replicas = [tensor, tp + tensor];
        let replica: Vec<_> = (0..tp).map(|tensor| data * tp + tensor).collect();
        let spec = |spec: ParamSpec| {
            let spec = spec.with_norm(tensor == 0);
            if spec.global_index.is_multiple_of(2) {
                spec.with_sum()
            } else {
                spec
            }
        };
        let specs: Vec<_> = params().into_iter().map(spec).collect();
        let groups = ZeroGroups {
            data_sequence: group(&member, "data", &replicas),
            model: group(&member, "model", &replica),
        };
        let optimizer = ZeroOptimizer::new(specs.clone(), model(), config(stage), groups);
        let mut optimizer = optimizer
            .expect("a legal configuration")
            .in_tensor_group(group(&member, "tensor", &replica));
        let mut weights = noises(1, len());
        let mut norms = Vec::new();
        for step in 0..3 {
            let mut grads = grads(step, data);
            for (index, _) in specs.iter().enumerate().filter(|(_, spec)| spec.summed) {
                // Exact for powers of two.
                let own = &mut grads[optimizer.layout().range(index)];
                for x in own.iter_mut() {
                    *x /= tp as f32;
                }
            }
            let report = optimizer.step(&mut weights, &mut grads, lr(step));
            norms.push(report.expect("the ranks step together").grad_norm.to_bits());
        }
        (weights.iter().map(|x| x.to_bits()).collect(), norms)
    })
}

#[test]
fn summands_of_tensor_ranks_step_like_their_sum() {
    for stage in [ZeroStage::Replicated, ZeroStage::OptimizerState] {
        let alone = train(1, stage).swap_remove(0);
        for tp in [2, 4] {
            for (rank, found) in train(tp, stage).iter().enumerate() {
                assert!(*found == alone, "rank {rank} of tp {tp}, {stage:?}");
            }
        }
    }
}
