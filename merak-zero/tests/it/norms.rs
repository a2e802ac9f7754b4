//! The global norm under tensor and pipeline splits, clipping, and skipped steps.
#![expect(clippy::float_cmp, reason = "these values are exact")]

use crate::fixture::{
    STAGES, alone, config, data_parallel, grads, group, held, len, lr, noise, noises, params,
    reduced, serial, step, whole,
};
use merak_mpu::{Member, testing::world};
use merak_zero::{GlobalParams, ParamSpec, ZeroConfig, ZeroGroups, ZeroOptimizer, ZeroStage};

const ROWS: usize = 400;
const COLS: usize = 96;

/// A logical parameter of a model with a tied head: its slices by rows, or one whole copy per
/// tensor rank.
struct Logical {
    name: &'static str,
    rows: usize,
    sliced: bool,
    /// The stages that own it when there are two.
    stages: &'static [usize],
}

const MODEL: [Logical; 5] = [
    Logical {
        name: "wte",
        rows: ROWS,
        sliced: true,
        stages: &[0, 1],
    },
    Logical {
        name: "h.0.w",
        rows: ROWS,
        sliced: true,
        stages: &[0],
    },
    Logical {
        name: "h.0.ln",
        rows: 1,
        sliced: false,
        stages: &[0],
    },
    Logical {
        name: "h.1.w",
        rows: ROWS,
        sliced: true,
        stages: &[1],
    },
    Logical {
        name: "ln_f",
        rows: 1,
        sliced: false,
        stages: &[1],
    },
];

/// The parameters of one rank of a world of `tp * pp` ranks, and the gradients of its slices.
fn slices(tp: usize, pp: usize, rank: usize) -> (Vec<ParamSpec>, Vec<f32>) {
    let (stage, tensor) = (rank / tp, rank % tp);
    let mut specs = Vec::new();
    let mut grads = Vec::new();
    for (index, logical) in MODEL.iter().enumerate() {
        let first = if pp == 1 { 0 } else { logical.stages[0] };
        if pp > 1 && !logical.stages.contains(&stage) {
            continue;
        }
        let parts = if logical.sliced { tp } else { 1 };
        let numel = logical.rows * COLS / parts;
        let offset = if logical.sliced { tensor * numel } else { 0 };
        grads.extend((0..numel).map(|i| noise(index as u64, offset + i)));
        let counts = stage == first && (logical.sliced || tensor == 0);
        specs.push(ParamSpec::new(logical.name, &[numel], index).with_norm(counts));
    }
    (specs, grads)
}

/// The norm that every rank of `dp * tp * pp` sees, as bits.
fn norm_bits(dp: usize, tp: usize, pp: usize, stage: ZeroStage) -> Vec<u64> {
    world(dp * tp * pp, |member| {
        // Data ranks are the slowest axis here.
        let (replica, within) = (member.rank().0 / (tp * pp), member.rank().0 % (tp * pp));
        let replicas: Vec<usize> = (0..dp).map(|d| d * tp * pp + within).collect();
        let of_replica: Vec<usize> = (0..tp * pp).map(|r| replica * tp * pp + r).collect();
        let groups = ZeroGroups {
            data_sequence: group(&member, "data", &replicas),
            model: group(&member, "model", &of_replica),
        };
        let model = GlobalParams::new(MODEL.iter().map(|logical| {
            let parts = if logical.sliced { tp } else { 1 };
            (logical.name, logical.rows * COLS / parts)
        }));
        let (specs, grads) = slices(tp, pp, within);
        let config = config(stage);
        let mut optimizer =
            ZeroOptimizer::new(specs, model, config, groups).expect("a legal configuration");
        let grads = reduced(&mut optimizer, grads).expect("no rank fails");
        let norm = optimizer.grad_norm(&grads).expect("no rank fails");
        norm.norm.to_bits()
    })
}

/// The norm of the logical gradients, each once.
fn naive() -> f64 {
    let logical = MODEL.iter().enumerate();
    let squares = logical.flat_map(|(index, logical)| {
        (0..logical.rows * COLS).map(move |i| f64::from(noise(index as u64, i)).powi(2))
    });
    squares.sum::<f64>().sqrt()
}

#[test]
fn the_pipeline_cut_and_the_stage_change_no_bit_of_the_norm() {
    for tp in [1, 2] {
        let expected = norm_bits(1, tp, 1, ZeroStage::Replicated)[0];
        let divided = STAGES.map(|stage| [(2, 1, stage), (2, 2, stage)]);
        let one_replica = (1, 2, ZeroStage::Replicated);
        for (dp, pp, stage) in divided.into_iter().flatten().chain([one_replica]) {
            let found = norm_bits(dp, tp, pp, stage);
            assert_eq!(
                found,
                vec![expected; dp * tp * pp],
                "dp {dp} tp {tp} pp {pp} {stage:?}"
            );
        }
    }
}

#[test]
fn slices_replicas_and_tied_weights_count_once() {
    for (tp, pp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let found = f64::from_bits(norm_bits(1, tp, pp, ZeroStage::Replicated)[0]);
        assert!((found - naive()).abs() < 1e-12 * naive(), "tp {tp} pp {pp}");
    }
}

#[test]
fn clipping_equals_a_step_on_gradients_scaled_beforehand() {
    let step = |member: &Member, max_grad_norm: f64, scale: f32| {
        let config = ZeroConfig {
            max_grad_norm,
            ..config(ZeroStage::Replicated)
        };
        let mut optimizer = data_parallel(member, config);
        let mut weights = noises(1, len());
        let mut grads: Vec<f32> = grads(0, 0).iter().map(|g| g * scale).collect();
        let report = optimizer.step(&mut weights, &mut grads, 0.01).unwrap();
        (weights, report)
    };
    world(1, |member| {
        let (clipped, report) = step(&member, 3.0, 1.0);
        assert!(report.grad_norm > 3.0);
        assert!((report.clip_factor - 3.0 / (report.grad_norm + 1e-6)).abs() < 1e-15);
        let (scaled, unclipped) = step(&member, 0.0, report.clip_factor as f32);
        assert_eq!(unclipped.clip_factor, 1.0);
        assert!(clipped == scaled);
        assert!((unclipped.grad_norm - 3.0).abs() < 1e-4);
    });
}

#[test]
fn a_bad_gradient_on_one_rank_skips_the_step_on_all_and_leaves_no_trace() {
    for stage in STAGES {
        for bad in [f32::NAN, f32::INFINITY] {
            world(2, |member| {
                let rank = member.rank().0;
                let mut optimizer = data_parallel(&member, config(stage));
                let mut weights = held(&optimizer, &noises(1, len()));
                step(&mut optimizer, &mut weights, grads(0, rank), lr(0)).unwrap();
                let before = (weights.clone(), optimizer.state().into_owned());

                let mut worse = grads(1, rank);
                if rank == 1 {
                    let range = optimizer.layout().range(3);
                    worse[range.end - 1] = bad;
                    worse[len() - 1] = bad;
                }
                let report = step(&mut optimizer, &mut weights, worse, lr(1)).unwrap();
                assert_eq!(report.skipped.as_deref(), Some("fc.bias"));
                assert!(!report.grad_norm.is_finite());
                assert_eq!(report.grad_norm.is_nan(), bad.is_nan());
                assert!((&weights, &*optimizer.state()) == (&before.0, &before.1));
                let progress = optimizer.progress();
                assert_eq!((progress.steps, progress.skipped), (1, 1));
                assert_eq!(progress.skipped_in_a_row, 1);

                let report = step(&mut optimizer, &mut weights, grads(1, rank), lr(1)).unwrap();
                assert_eq!(report.skipped, None);
                assert_eq!(optimizer.progress().skipped_in_a_row, 0);
                assert!(whole(&optimizer, weights) == serial(2, 2, &config(stage)));
            });
        }
    }
}

#[test]
fn a_bad_gradient_of_another_pipeline_stage_skips_the_step_here_too() {
    let model = || GlobalParams::new([("first", 8), ("second", 8)]);
    let reports = world(2, |member| {
        let rank = member.rank().0;
        let groups = ZeroGroups {
            data_sequence: alone(&member),
            model: group(&member, "replica", &[0, 1]),
        };
        let spec = ParamSpec::new(["first", "second"][rank], &[8], rank);
        let mut optimizer =
            ZeroOptimizer::new(vec![spec], model(), ZeroConfig::default(), groups).unwrap();
        let mut weights = vec![1.0_f32; 8];
        let mut grads = vec![if rank == 1 { f32::NAN } else { 1.0 }; 8];
        let report = optimizer.step(&mut weights, &mut grads, 0.1).unwrap();
        assert_eq!(weights, [1.0; 8]);
        report.skipped
    });
    assert_eq!(reports, vec![Some("second".to_owned()); 2]);
}

#[test]
fn parameters_without_decay_do_not_shrink() {
    world(1, |member| {
        let mut optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        let mut weights = vec![1.0_f32; len()];
        optimizer
            .step(&mut weights, &mut vec![0.0_f32; len()], 0.5)
            .unwrap();
        for (i, spec) in params().iter().enumerate() {
            let expected = if spec.decay { 0.95 } else { 1.0 };
            let range = optimizer.layout().range(i);
            assert!(
                weights[range].iter().all(|&w| w == expected),
                "{}",
                spec.name
            );
        }
    });
}
