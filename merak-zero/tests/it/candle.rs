use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use merak_mpu::{Member, candle::vars_by_name, testing::world};
use merak_zero::{
    Error, OptimizerConfig, ParamSpec, TensorOptimizer, ZeroConfig, ZeroGroups, ZeroStage,
};
use std::collections::BTreeMap;

const STEPS: usize = 12;
const ROWS: usize = 4;
const INPUTS: usize = 3;

fn numbers(seed: f32, shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    let values = (0..count).map(|i: usize| (seed + 1.7 * i as f32).sin());
    Tensor::from_vec(values.collect(), shape, &Device::Cpu).expect("the numbers of a test fit")
}

/// A model in a `VarMap`, with weights that depend on their names.
struct Model {
    layers: [candle_nn::Linear; 2],
    vars: BTreeMap<String, Var>,
}

impl Model {
    fn new() -> Self {
        let weights = VarMap::new();
        let vb = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
        let up = linear(INPUTS, 5, vb.pp("up")).expect("the numbers of a test fit");
        let down = linear(5, 1, vb.pp("down")).expect("the numbers of a test fit");
        let vars = vars_by_name(weights.data());
        for (name, var) in &vars {
            let seed: f32 = name.bytes().map(f32::from).sum();
            var.set(&numbers(seed, var.dims()))
                .expect("the numbers of a test fit");
        }
        Self {
            layers: [up, down],
            vars,
        }
    }

    /// The mean loss over some rows of a step's batch.
    fn loss(&self, step: usize, rows: std::ops::Range<usize>) -> Result<Tensor> {
        let batch = numbers(step as f32, &[ROWS, INPUTS]).narrow(0, rows.start, rows.len())?;
        let [up, down] = &self.layers;
        let target = batch.sum_keepdim(1)?.sin()?;
        let output = down.forward(&up.forward(&batch)?.tanh()?)?;
        (output - target)?.sqr()?.mean_all()
    }

    fn values(&self) -> Vec<f32> {
        let values = |var: &Var| {
            var.flatten_all()
                .expect("the numbers of a test fit")
                .to_vec1::<f32>()
                .expect("the numbers of a test fit")
        };
        self.vars.values().flat_map(values).collect()
    }
}

fn groups(member: &Member) -> ZeroGroups {
    ZeroGroups {
        data_sequence: member.world_group().expect("the numbers of a test fit"),
        model: member
            .group("model", &[member.rank()])
            .expect("the numbers of a test fit"),
    }
}

fn config(stage: ZeroStage) -> ZeroConfig {
    ZeroConfig {
        stage,
        max_grad_norm: 0.0,
        optimizer: OptimizerConfig {
            weight_decay: 0.01,
            ..OptimizerConfig::default()
        },
        ..ZeroConfig::default()
    }
}

/// The weights of each rank after some steps on its share of the rows.
fn train(ranks: usize, stage: ZeroStage) -> Vec<Vec<f32>> {
    world(ranks, |member| {
        let model = Model::new();
        let params = model.vars.clone();
        let optimizer = TensorOptimizer::new(params, config(stage), groups(&member), |spec| spec);
        let mut optimizer = optimizer.expect("the numbers of a test fit");
        let share = ROWS / ranks;
        let first = share * member.rank().0;
        for step in 0..STEPS {
            let loss = model
                .loss(step, first..first + share)
                .expect("the numbers of a test fit");
            optimizer
                .step(&loss.backward().expect("the numbers of a test fit"), 1e-2)
                .expect("the numbers of a test fit");
        }
        model.values()
    })
}

#[test]
fn variables_are_stepped_as_candle_nn_steps_them() {
    let model = Model::new();
    let params = ParamsAdamW {
        lr: 1e-2,
        weight_decay: 0.01,
        ..ParamsAdamW::default()
    };
    let mut reference = AdamW::new(model.vars.values().cloned().collect(), params).unwrap();
    for step in 0..STEPS {
        let loss = model.loss(step, 0..ROWS).unwrap();
        reference.backward_step(&loss).unwrap();
    }
    let found = train(1, ZeroStage::OptimizerState).remove(0);
    merak_mpu::testing::assert_close(&found, &model.values(), 0.0, 1e-6);
}

#[test]
fn both_stages_on_two_ranks_give_the_weights_of_one() {
    let one = train(1, ZeroStage::Replicated).remove(0);
    let sharded = train(2, ZeroStage::OptimizerState);
    assert_eq!(sharded, train(2, ZeroStage::Replicated), "the same bits");
    assert_eq!(sharded[0], sharded[1]);
    merak_mpu::testing::assert_close(&sharded[0], &one, 0.0, 1e-6);
}

#[test]
fn the_norm_is_that_of_the_variables_of_all_stages() {
    let reports = world(2, |member| {
        let groups = ZeroGroups {
            data_sequence: member.group("data", &[member.rank()]).unwrap(),
            model: member.world_group().unwrap(),
        };
        // The rank of the first stage has the name that comes last.
        let name = ["z", "a"][member.rank().0];
        let var = Var::from_tensor(&numbers(0.0, &[2])).unwrap();
        let params = BTreeMap::from([(name.to_owned(), var.clone())]);
        let config = config(ZeroStage::OptimizerState);
        let mut optimizer = TensorOptimizer::new(params, config, groups, |spec| spec).unwrap();
        let grad = [3.0, 4.0][member.rank().0];
        let loss = (var.narrow(0, 0, 1).unwrap().sum_all().unwrap() * grad).unwrap();
        optimizer.step(&loss.backward().unwrap(), 0.1).unwrap()
    });
    for report in reports {
        assert!((report.grad_norm - 5.0).abs() < 1e-12, "{report:?}");
    }
}

#[test]
fn a_variable_that_no_rank_used_only_decays() {
    let values = world(1, |member| {
        let var = Var::new(&[1.0_f32], &Device::Cpu).unwrap();
        let other = Var::new(&[1.0_f32], &Device::Cpu).unwrap();
        let params = [("used", other.clone()), ("unused", var.clone())];
        let params = params.map(|(name, var)| (name.to_owned(), var)).into();
        let config = config(ZeroStage::OptimizerState);
        let adapt = |spec: ParamSpec| match spec.name.as_str() {
            "used" => spec.without_decay(),
            _ => spec,
        };
        let mut optimizer = TensorOptimizer::new(params, config, groups(&member), adapt).unwrap();
        let loss = other.sum_all().unwrap();
        optimizer.step(&loss.backward().unwrap(), 0.5).unwrap();
        [var, other].map(|var| var.to_vec1::<f32>().unwrap()[0])
    });
    let [unused, used] = values[0];
    assert!((unused - 0.995).abs() < 1e-6 && (used - 0.5).abs() < 1e-6);
}

#[test]
fn a_variable_that_cannot_be_stepped_is_named() {
    world(1, |member| {
        let make = |var: &Var| {
            let params = BTreeMap::from([("w".to_owned(), var.clone())]);
            let config = ZeroConfig::default();
            TensorOptimizer::new(params, config, groups(&member), |spec| spec)
        };
        let half = Var::zeros(2, DType::F16, &Device::Cpu).unwrap();
        let error = make(&half).unwrap_err();
        assert_eq!(error.to_string(), "parameter `w` cannot be stepped");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "expected elements of type f32, found f16");
        let whole = Var::zeros(2, DType::F32, &Device::Cpu).unwrap();
        let part = |_: &str, var: &Var| Some(var.narrow(0, 0, 1).unwrap());
        let error = make(&whole).unwrap().step_with(0.1, part).unwrap_err();
        assert!(matches!(
            error,
            Error::GradientLength {
                expected: 2,
                found: 1,
                ..
            }
        ));
    });
}
