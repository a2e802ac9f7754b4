use crate::tensors::{INPUTS, LR, Model, ROWS, STEPS, WEIGHT_DECAY, laws, numbers, start};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use merak_mpu::candle::vars_by_name;
use merak_zero::{TensorOptimizer, UpdateReport};
use std::{collections::BTreeMap, ops::Range};

/// A model in a `VarMap`.
struct Net {
    layers: [Linear; 2],
    vars: BTreeMap<String, Var>,
}

impl Net {
    fn loss(&self, step: usize, rows: Range<usize>) -> Result<Tensor> {
        let batch: Tensor = numbers(step as f32, &[ROWS, INPUTS]);
        let batch = batch.narrow(0, rows.start, rows.len())?;
        let [up, down] = &self.layers;
        let target = batch.sum_keepdim(1)?.sin()?;
        let output = down.forward(&up.forward(&batch)?.tanh()?)?;
        (output - target)?.sqr()?.mean_all()
    }
}

impl Model for Net {
    type Var = Var;

    fn new() -> Self {
        let weights = VarMap::new();
        let vb = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
        let up = linear(INPUTS, 5, vb.pp("up")).expect("the numbers of a test fit");
        let down = linear(5, 1, vb.pp("down")).expect("the numbers of a test fit");
        let vars = vars_by_name(weights.data());
        for (name, var) in &vars {
            var.set(&start(name, var.dims()))
                .expect("the numbers of a test fit");
        }
        Self {
            layers: [up, down],
            vars,
        }
    }

    fn vars(&self) -> BTreeMap<String, Var> {
        self.vars.clone()
    }

    fn var(values: &[f32]) -> Var {
        Var::new(values, &Device::Cpu).expect("the numbers of a test fit")
    }

    fn again(var: &Var) -> Var {
        var.clone()
    }

    fn step(&self, optimizer: &mut TensorOptimizer<Var>, step: usize, rows: Range<usize>) {
        let loss = self.loss(step, rows);
        let grads = loss.and_then(|loss| loss.backward());
        optimizer
            .step(&grads.expect("the numbers of a test fit"), LR)
            .expect("the numbers of a test fit");
    }

    fn train_by_the_library(&self) {
        let params = ParamsAdamW {
            lr: LR,
            weight_decay: WEIGHT_DECAY,
            ..ParamsAdamW::default()
        };
        let mut own = AdamW::new(self.vars.values().cloned().collect(), params)
            .expect("the numbers of a test fit");
        for step in 0..STEPS {
            let loss = self.loss(step, 0..ROWS);
            loss.and_then(|loss| own.backward_step(&loss))
                .expect("the numbers of a test fit");
        }
    }

    fn step_on_sum(
        optimizer: &mut TensorOptimizer<Var>,
        var: &Var,
        factor: f64,
        lr: f64,
    ) -> UpdateReport {
        let loss = var.sum_all().and_then(|sum| sum * factor);
        let grads = loss.and_then(|loss| loss.backward());
        optimizer
            .step(&grads.expect("the numbers of a test fit"), lr)
            .expect("the numbers of a test fit")
    }
}

laws!(Net);
