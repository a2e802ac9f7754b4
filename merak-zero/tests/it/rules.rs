//! Every rule against PyTorch, transformers and its paper over fifty steps, and against itself
//! under other divisions of the same model.

use crate::fixture::{alone, group, noise};
use merak_mpu::{Member, testing::world};
use merak_zero::{
    GlobalParams, NORM_BLOCK, OptimizerConfig, OptimizerKind, ParamSpec, TensorCut, ZeroConfig,
    ZeroGroups, ZeroOptimizer, ZeroStage,
};
use std::collections::BTreeMap;

const GOLDEN: &str = include_str!("../goldens/fifty_steps.txt");
const LR: f64 = 0.02;

/// The configuration that a golden case was made with.
fn golden_config(case: &str) -> OptimizerConfig {
    let (rule, _) = case
        .split_once("_m")
        .or(case.split_once("_n"))
        .unwrap_or((case, ""));
    OptimizerConfig {
        optim: rule.parse().expect("a golden names a rule"),
        weight_decay: 0.1,
        adam_beta1: 0.9,
        adam_beta2: 0.95,
        adam_epsilon: 1e-6,
        lion_beta1: 0.9,
        lion_beta2: 0.95,
        sgd_momentum: if case == rule { 0.0 } else { 0.9 },
        nesterov: case == "sgd_nesterov",
        ..OptimizerConfig::default()
    }
}

fn golden_specs() -> Vec<ParamSpec> {
    let shapes: [(&str, &[usize]); 4] = [
        ("wide", &[5, 12]),
        ("tall", &[12, 5]),
        ("vector", &[7]),
        ("conv", &[4, 3, 2, 2]),
    ];
    let specs = shapes.iter().enumerate().map(|(index, (name, shape))| {
        let spec = ParamSpec::new(*name, shape, index);
        match shape.len() {
            1 => spec.without_decay(),
            2 => spec.as_hidden_matrix(),
            _ => spec,
        }
    });
    specs.collect()
}

fn table(specs: &[ParamSpec]) -> GlobalParams {
    GlobalParams::new(specs.iter().map(|spec| (spec.name.clone(), spec.numel())))
}

#[test]
fn fifty_steps_of_every_rule_give_the_numbers_of_pytorch() {
    let lines = GOLDEN
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let mut expected: BTreeMap<&str, BTreeMap<(usize, &str), Vec<f32>>> = BTreeMap::new();
    for line in lines {
        let values = line[3..].iter().map(|x| x.parse().unwrap()).collect();
        let case = expected.entry(line[0]).or_default();
        case.insert((line[2].parse().unwrap(), line[1]), values);
    }
    let rules: std::collections::BTreeSet<_> = expected
        .keys()
        .map(|case| golden_config(case).optim.as_str())
        .collect();
    assert_eq!(rules.len(), OptimizerKind::ALL.len());
    for (case, expected) in expected {
        world(1, |member| {
            let config = ZeroConfig {
                optimizer: golden_config(case),
                max_grad_norm: 0.0,
                ..ZeroConfig::default()
            };
            let specs = golden_specs();
            let groups = ZeroGroups {
                data_sequence: alone(&member),
                model: alone(&member),
            };
            let model = table(&specs);
            let mut optimizer = ZeroOptimizer::new(specs.clone(), model, config, groups).unwrap();
            let each = |seed: u64| {
                let params = specs.iter().enumerate();
                let numbers = params.flat_map(move |(k, spec)| {
                    (0..spec.numel()).map(move |i| noise(seed + k as u64, i))
                });
                numbers.collect::<Vec<_>>()
            };
            let mut weights = each(0);
            for t in 0..50 {
                let noises = each(100 + 10 * t as u64);
                let mut grads: Vec<_> = weights
                    .iter()
                    .zip(noises)
                    .map(|(w, noise)| w / 2.0 + noise)
                    .collect();
                optimizer.step(&mut weights, &mut grads, LR).unwrap();
                for (index, spec) in specs.iter().enumerate() {
                    let Some(expected) = expected.get(&(t + 1, spec.name.as_str())) else {
                        continue;
                    };
                    let found = &weights[optimizer.layout().range(index)];
                    let place = format!("{case}, {} after step {}", spec.name, t + 1);
                    assert_near(found, expected, &place);
                }
            }
        });
    }
}

#[test]
fn a_parameter_steps_by_its_own_share_of_the_learning_rate() {
    for optim in OptimizerKind::ALL {
        let stepped = |scale: f64, lr: f64| {
            let weights = world(1, |member| {
                let config = ZeroConfig {
                    optimizer: OptimizerConfig {
                        optim,
                        weight_decay: 0.1,
                        ..OptimizerConfig::default()
                    },
                    max_grad_norm: 0.0,
                    ..ZeroConfig::default()
                };
                let specs = golden_specs();
                let specs: Vec<_> = specs
                    .into_iter()
                    .map(|spec| spec.with_lr_scale(scale))
                    .collect();
                let groups = ZeroGroups {
                    data_sequence: alone(&member),
                    model: alone(&member),
                };
                let len = specs.iter().map(ParamSpec::numel).sum::<usize>();
                let mut optimizer =
                    ZeroOptimizer::new(specs.clone(), table(&specs), config, groups).unwrap();
                let numbers = |seed: u64| (0..len).map(move |i| noise(seed, i)).collect::<Vec<_>>();
                let (mut weights, mut grads) = (numbers(1), numbers(2));
                optimizer.step(&mut weights, &mut grads, lr).unwrap();
                weights
            });
            weights.into_iter().next().unwrap()
        };
        let half = stepped(0.5, LR);
        assert_eq!(half, stepped(1.0, LR / 2.0), "{optim}");
        assert_ne!(half, stepped(1.0, LR), "{optim}");
    }
}

#[test]
fn gradients_of_zero_have_a_norm_of_zero_and_move_nothing_that_does_not_decay() {
    for optim in OptimizerKind::ALL {
        world(1, |member| {
            let specs = golden_specs().into_iter();
            let specs: Vec<_> = specs.map(ParamSpec::without_decay).collect();
            let groups = ZeroGroups {
                data_sequence: alone(&member),
                model: alone(&member),
            };
            let config = config(optim, ZeroStage::Replicated);
            let mut optimizer =
                ZeroOptimizer::new(specs.clone(), table(&specs), config, groups).unwrap();
            let len = optimizer.layout().len();
            let before: Vec<_> = (0..len).map(|i| noise(1, i)).collect();
            let mut weights = before.clone();
            for _ in 0..2 {
                let mut grads = vec![0.0_f32; len];
                let report = optimizer.step(&mut weights, &mut grads, LR).unwrap();
                let numbers = [report.grad_norm, report.clip_factor].map(f64::to_bits);
                assert_eq!(numbers, [0.0, 1.0].map(f64::to_bits), "{optim}");
                assert_eq!(report.skipped, None, "{optim}");
            }
            assert_eq!(weights, before, "{optim}");
        });
    }
}

/// Each element is as near as 1e-5 of itself, or of the root mean square of all.
fn assert_near(found: &[f32], expected: &[f32], place: &str) {
    assert_eq!(found.len(), expected.len(), "{place}");
    let squares: f32 = expected.iter().map(|x| x * x).sum();
    let usual = (squares / expected.len() as f32).sqrt();
    for (x, e) in found.iter().zip(expected) {
        assert!(
            (x - e).abs() <= 1e-5 * e.abs().max(usual),
            "{place}: {x} for {e}"
        );
    }
}

/// A model whose parameters are cut in every way, or whole, of one and of several norm blocks.
fn whole_specs() -> Vec<ParamSpec> {
    vec![
        ParamSpec::new("wte", &[240, 96], 0).with_cut(cut(0, &[240])),
        ParamSpec::new("qkv", &[48, 96], 1)
            .with_cut(cut(0, &[16, 16, 16]))
            .as_hidden_matrix(),
        ParamSpec::new("bias", &[48], 2)
            .with_cut(cut(0, &[48]))
            .without_decay(),
        ParamSpec::new("proj", &[96, 48], 3)
            .with_cut(cut(1, &[32, 16]))
            .as_hidden_matrix(),
        ParamSpec::new("ln", &[96], 4)
            .without_decay()
            .with_lr_scale(0.5),
        ParamSpec::new("up", &[256, 96], 5)
            .with_cut(cut(0, &[256]))
            .as_hidden_matrix(),
        ParamSpec::new("gate", &[24, 24], 6).as_hidden_matrix(),
        ParamSpec::new("conv", &[8, 4, 3, 3], 7).with_cut(cut(1, &[4])),
        ParamSpec::new("experts", &[4, 6, 5], 8).with_cut(cut(0, &[4])),
    ]
}

fn cut(dim: usize, parts: &[usize]) -> TensorCut {
    TensorCut {
        dim,
        parts: parts.to_vec(),
    }
}

/// The elements of a whole parameter that tensor rank `rank` of `tp` holds, in its order.
fn piece(spec: &ParamSpec, rank: usize, tp: usize) -> Vec<usize> {
    let all = 0..spec.numel();
    let Some(cut) = &spec.cut else {
        return all.collect();
    };
    let inner: usize = spec.shape[cut.dim + 1..].iter().product();
    let along = |index: usize| index / inner % spec.shape[cut.dim];
    let ranges = cut.ranges(rank, tp);
    all.filter(|&index| ranges.iter().any(|range| range.contains(&along(index))))
        .collect()
}

/// A rank's part of the model: parameters on the even stages of `pp` lie on the first of them.
struct Rank {
    specs: Vec<ParamSpec>,
    /// Elements of the whole model, in the order of the rank's flat buffer.
    elements: Vec<usize>,
    optimizer: ZeroOptimizer,
}

impl Rank {
    /// The rank of a world of `[dp, tp, pp]`, the last axis the fastest.
    fn new(member: &Member, [dp, tp, pp]: [usize; 3], config: ZeroConfig) -> Self {
        let rank = member.rank().0;
        let (data, tensor, stage) = (rank / (tp * pp), rank / pp % tp, rank % pp);
        let at = |data: usize, tensor: usize, stage: usize| (data * tp + tensor) * pp + stage;
        let replicas: Vec<_> = (0..dp).map(|data| at(data, tensor, stage)).collect();
        let holders: Vec<_> = (0..tp).map(|tensor| at(data, tensor, stage)).collect();
        let replica: Vec<_> = (0..tp * pp).map(|rank| data * tp * pp + rank).collect();
        let local = |spec: &ParamSpec| {
            let mut local = spec.clone();
            if let Some(cut) = &spec.cut {
                local.shape[cut.dim] /= tp;
            }
            local.with_norm(spec.cut.is_some() || tensor == 0)
        };
        let locals: Vec<_> = whole_specs().iter().map(local).collect();
        let (mut specs, mut elements, mut first) = (Vec::new(), Vec::new(), 0);
        for (spec, local) in whole_specs().iter().zip(&locals) {
            if spec.global_index % pp == stage {
                specs.push(local.clone());
                elements.extend(piece(spec, tensor, tp).into_iter().map(|i| first + i));
            }
            first += spec.numel();
        }
        let groups = ZeroGroups {
            data_sequence: group(member, "data", &replicas),
            model: group(member, "model", &replica),
        };
        let optimizer = ZeroOptimizer::new(specs.clone(), table(&locals), config, groups);
        Self {
            specs,
            elements,
            optimizer: optimizer
                .expect("a legal configuration")
                .in_tensor_group(group(member, "tensor", &holders)),
        }
    }

    fn of<T: Copy>(&self, whole: &[T]) -> Vec<T> {
        self.elements
            .iter()
            .map(|&element| whole[element])
            .collect()
    }

    /// The same gradients on every replica, so that averages are exact.
    fn step(&mut self, weights: &mut Vec<f32>, t: u64) {
        let mut grads = self.of(&numbers(2 + t));
        let report = self
            .optimizer
            .step(weights, &mut grads, LR)
            .expect("the ranks step together");
        assert!(report.skipped.is_none() && report.clip_factor < 1.0);
    }
}

fn numbers(seed: u64) -> Vec<f32> {
    let count = whole_specs().iter().map(ParamSpec::numel).sum();
    (0..count).map(|i| noise(seed, i)).collect()
}

fn config(optim: OptimizerKind, stage: ZeroStage) -> ZeroConfig {
    ZeroConfig {
        stage,
        optimizer: OptimizerConfig {
            optim,
            weight_decay: 0.1,
            sgd_momentum: 0.9,
            ..OptimizerConfig::default()
        },
        max_grad_norm: 3.0,
        reduce_bucket_size: NORM_BLOCK,
        ..ZeroConfig::default()
    }
}

/// The weights of the whole model after some steps, and the state by name, parameter and element.
fn train(degrees: [usize; 3], config: &ZeroConfig, steps: u64) -> Vec<f32> {
    let ranks = world(degrees.iter().product(), |member| {
        let mut rank = Rank::new(&member, degrees, config.clone());
        let mut weights = rank.of(&numbers(1));
        (0..steps).for_each(|t| rank.step(&mut weights, t));
        (rank.elements, weights)
    });
    let mut whole = vec![f32::NAN; numbers(1).len()];
    for (elements, weights) in ranks {
        for (element, weight) in elements.into_iter().zip(weights) {
            let known = whole[element];
            assert!(
                known.is_nan() || known.to_bits() == weight.to_bits(),
                "ranks that hold the same element agree on it"
            );
            whole[element] = weight;
        }
    }
    whole
}

#[test]
fn replicas_stages_and_zero_change_no_bit_of_any_rule() {
    for optim in OptimizerKind::ALL {
        let one = train([1, 1, 1], &config(optim, ZeroStage::Replicated), 3);
        assert!(one != numbers(1) && one.iter().all(|x| x.is_finite()));
        for degrees in [[2, 1, 1], [4, 1, 1], [2, 1, 2]] {
            for stage in [ZeroStage::Replicated, ZeroStage::OptimizerState] {
                let many = train(degrees, &config(optim, stage), 3);
                assert!(many == one, "{optim}, {degrees:?}, {stage:?}");
            }
        }
    }
}

#[test]
fn tensor_ranks_change_every_rule_by_the_order_of_sums_alone() {
    for optim in OptimizerKind::ALL {
        let one = train([1, 1, 1], &config(optim, ZeroStage::Replicated), 3);
        for degrees in [[1, 2, 1], [1, 4, 1], [2, 2, 2]] {
            let many = train(degrees, &config(optim, ZeroStage::OptimizerState), 3);
            let far = one.iter().zip(&many).find(|(x, y)| (*x - *y).abs() > 2e-6);
            assert_eq!(far, None, "{optim}, {degrees:?}");
        }
    }
}

#[test]
fn a_rule_that_needs_all_of_a_parameter_refuses_a_piece_of_it() {
    world(1, |member| {
        let spec = ParamSpec::new("w", &[2, 4], 0).with_cut(cut(0, &[4]));
        let groups = || ZeroGroups {
            data_sequence: alone(&member),
            model: alone(&member),
        };
        let step = |optim| {
            let config = config(optim, ZeroStage::Replicated);
            let (specs, model) = (vec![spec.clone()], table(std::slice::from_ref(&spec)));
            let mut optimizer = ZeroOptimizer::new(specs, model, config, groups()).unwrap();
            optimizer.step(&mut vec![1.0_f32; 8], &mut vec![1.0_f32; 8], LR)
        };
        assert_eq!(
            step(OptimizerKind::Adafactor).unwrap_err().to_string(),
            "`w` is not cut into 1 piece(s): the rule needs the group of the ranks that hold its pieces"
        );
        assert!(step(OptimizerKind::Lamb).is_ok());
    });
}

#[test]
fn a_cut_along_a_dimension_that_a_parameter_does_not_have_is_refused() {
    world(1, |member| {
        let spec = ParamSpec::new("w", &[2, 4], 0).with_cut(cut(2, &[4]));
        assert_eq!(spec.whole_shape(), [2, 4]);
        let groups = ZeroGroups {
            data_sequence: alone(&member),
            model: alone(&member),
        };
        let model = table(std::slice::from_ref(&spec));
        let config = config(OptimizerKind::Adafactor, ZeroStage::Replicated);
        let error = ZeroOptimizer::new(vec![spec], model, config, groups).unwrap_err();
        assert_eq!(
            error.to_string(),
            "parameter `w` of shape [2, 4] has no dimension 2 to be cut along"
        );
    });
}

#[test]
fn threads_change_no_bit_of_any_rule() {
    for optim in OptimizerKind::ALL {
        let one = config(optim, ZeroStage::OptimizerState);
        let three = ZeroConfig {
            threads: 3,
            ..one.clone()
        };
        assert!(
            train([1, 1, 1], &one, 2) == train([1, 1, 1], &three, 2),
            "{optim}"
        );
    }
}

/// State by name and parameter: the values of the whole tensor.
type Saved = BTreeMap<(&'static str, String), Vec<f32>>;

/// The elements of the whole state tensor that a rank's local one has, in its order.
fn state_piece(whole: &ParamSpec, without: Option<usize>, rank: usize, tp: usize) -> Vec<usize> {
    let mut left = whole.clone();
    if let Some(dim) = without {
        left.shape.remove(dim);
        left.cut = left.cut.filter(|cut| cut.dim != dim);
        if let Some(cut) = left.cut.as_mut().filter(|cut| cut.dim > dim) {
            cut.dim -= 1;
        }
    }
    piece(&left, rank, tp)
}

#[test]
fn every_rule_goes_on_from_its_state_on_other_ranks() {
    for optim in OptimizerKind::ALL {
        let config = config(optim, ZeroStage::OptimizerState);
        let (saving, loading) = ([2, 2, 1], [4, 1, 1]);
        let ranks = world(4, |member| {
            let mut rank = Rank::new(&member, saving, config.clone());
            let mut weights = rank.of(&numbers(1));
            (0..2).for_each(|t| rank.step(&mut weights, t));
            let state = rank.optimizer.state().into_owned();
            (rank, weights, state)
        });
        let wholes = whole_specs();
        let (mut saved, mut weights) = (Saved::new(), numbers(1));
        for (number, (rank, own, state)) in ranks.iter().enumerate() {
            for (element, weight) in rank.elements.iter().zip(own) {
                weights[*element] = *weight;
            }
            for slice in state.slices() {
                let whole = &wholes[rank.specs[slice.param].global_index];
                let piece = state_piece(whole, slice.without, number % 2, 2);
                let key = (slice.name, whole.name.clone());
                let values = saved.entry(key).or_default();
                for (element, value) in piece[slice.local].iter().zip(slice.values) {
                    values.resize(values.len().max(element + 1), f32::NAN);
                    values[*element] = *value;
                }
            }
        }
        let progress = ranks[0].0.optimizer.progress();
        assert!(
            saved.values().flatten().all(|value| !value.is_nan()),
            "{optim}"
        );
        let resumed = world(4, |member| {
            let mut rank = Rank::new(&member, loading, config.clone());
            rank.optimizer.set_progress(progress);
            rank.optimizer
                .edit_state(|state| {
                    for slice in state.slices_mut() {
                        let whole = &wholes[slice.param];
                        let all = &saved[&(slice.name, whole.name.clone())];
                        slice.values.copy_from_slice(&all[slice.local]);
                    }
                })
                .unwrap();
            let mut own = rank.of(&weights);
            (2..4).for_each(|t| rank.step(&mut own, t));
            own
        });
        let unbroken = train(saving, &config, 4);
        let far = unbroken
            .iter()
            .zip(&resumed[0])
            .find(|(x, y)| (*x - *y).abs() > 2e-6);
        assert_eq!(far, None, "{optim}");
    }
}

#[test]
fn a_rank_keeps_what_the_rule_of_each_parameter_asks() {
    let kept = |optim: OptimizerKind| {
        world(1, |member| {
            let config = config(optim, ZeroStage::Replicated);
            let rank = Rank::new(&member, [1, 1, 1], config.clone());
            let state = rank.optimizer.state().into_owned();
            let elements: usize = state.slices().map(|slice| slice.values.len()).sum();
            let stated = whole_specs();
            let stated = stated.iter().map(|spec| config.optimizer.state_numel(spec));
            assert_eq!(elements, stated.sum::<usize>());
            elements
        })[0]
    };
    let [all, hidden, vectors] = [numbers(1).len(), 2 * 48 * 96 + 256 * 96 + 24 * 24, 48 + 96];
    assert_eq!(kept(OptimizerKind::Lamb), 2 * all);
    assert_eq!(kept(OptimizerKind::Lion), all);
    assert_eq!(kept(OptimizerKind::Muon), 2 * all - hidden);
    let sides = (240 + 96) + 2 * (48 + 96) + (256 + 96) + (24 + 24);
    let rest = 8 * 4 * (3 + 3) + 4 * (6 + 5);
    assert_eq!(kept(OptimizerKind::Adafactor), vectors + sides + rest);
}
