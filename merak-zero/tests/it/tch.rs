use crate::tensors::{INPUTS, LR, Model, ROWS, STEPS, WEIGHT_DECAY, laws, numbers, start};
use merak_mpu::tch::vars_by_name;
use merak_zero::{TensorOptimizer, UpdateReport};
use std::{collections::BTreeMap, ops::Range};
use tch::{
    Kind, Reduction, Tensor,
    nn::{self, Linear, Module, OptimizerConfig, VarStore},
};

/// A model in a `VarStore`.
struct Net {
    layers: [Linear; 2],
    store: VarStore,
}

impl Net {
    fn loss(&self, step: usize, rows: Range<usize>) -> Tensor {
        let batch: Tensor = numbers(step as f32, &[ROWS, INPUTS]);
        let [start, len] = [rows.start, rows.len()].map(int);
        let batch = batch.narrow(0, start, len);
        let [up, down] = &self.layers;
        let target = batch.sum_dim_intlist(1_i64, true, Kind::Float).sin();
        let output = down.forward(&up.forward(&batch).tanh());
        output.mse_loss(&target, Reduction::Mean)
    }
}

fn int(size: usize) -> i64 {
    i64::try_from(size).expect("a size of a test")
}

impl Model for Net {
    type Var = Tensor;

    fn new() -> Self {
        let store = VarStore::new(tch::Device::Cpu);
        let root = store.root();
        let inputs = int(INPUTS);
        let layers = [
            nn::linear(&root / "up", inputs, 5, nn::LinearConfig::default()),
            nn::linear(&root / "down", 5, 1, nn::LinearConfig::default()),
        ];
        for (name, mut var) in vars_by_name(&store) {
            let sizes = merak_mpu::HostTensor::sizes(&var);
            tch::no_grad(|| var.copy_(&start(&name, &sizes)));
        }
        Self { layers, store }
    }

    fn vars(&self) -> BTreeMap<String, Tensor> {
        vars_by_name(&self.store)
    }

    fn var(values: &[f32]) -> Tensor {
        Tensor::from_slice(values).set_requires_grad(true)
    }

    fn again(var: &Tensor) -> Tensor {
        var.shallow_clone()
    }

    fn step(&self, optimizer: &mut TensorOptimizer<Tensor>, step: usize, rows: Range<usize>) {
        optimizer.zero_grad();
        self.loss(step, rows).backward();
        optimizer.step(LR).expect("the numbers of a test fit");
    }

    fn train_by_the_library(&self) {
        let config = nn::AdamW::default().wd(WEIGHT_DECAY);
        let mut own = config
            .build(&self.store, LR)
            .expect("the numbers of a test fit");
        for step in 0..STEPS {
            own.backward_step(&self.loss(step, 0..ROWS));
        }
    }

    fn step_on_sum(
        optimizer: &mut TensorOptimizer<Tensor>,
        var: &Tensor,
        factor: f64,
        lr: f64,
    ) -> UpdateReport {
        (var.sum(Kind::Float) * factor).backward();
        optimizer.step(lr).expect("the numbers of a test fit")
    }
}

laws!(Net);

#[test]
fn gradients_are_summed_until_they_are_set_to_zero() {
    let norms = merak_mpu::testing::world(1, |member| {
        let groups = merak_zero::ZeroGroups {
            data_sequence: member.world_group().unwrap(),
            model: member.group("model", &[member.rank()]).unwrap(),
        };
        let var = Net::var(&[1.0]);
        let params = [("w".to_owned(), var.shallow_clone())].into();
        let config = merak_zero::ZeroConfig::default();
        let mut optimizer = TensorOptimizer::new(params, config, groups, |spec| spec).unwrap();
        let mut norm = || Net::step_on_sum(&mut optimizer, &var, 3.0, 0.1).grad_norm;
        let summed = [norm(), norm()];
        optimizer.zero_grad();
        let zeroed = optimizer.step(0.1).unwrap().grad_norm;
        [summed[0], summed[1], zeroed]
    });
    assert_eq!(norms, [[3.0, 6.0, 0.0]]);
}
