//! What an optimizer over the tensors of every library does.

use merak_mpu::{Buffer, DType, HostTensor, Member, into_vec, testing::world, zeros};
use merak_zero::{
    EMA, Error, OptimizerConfig, ParamSpec, TensorOptimizer, UpdateReport, ZeroConfig, ZeroGroups,
    ZeroStage,
};
use std::{collections::BTreeMap, ops::Range};

pub(crate) const STEPS: usize = 12;
pub(crate) const ROWS: usize = 4;
pub(crate) const INPUTS: usize = 3;
pub(crate) const LR: f64 = 1e-2;
pub(crate) const WEIGHT_DECAY: f64 = 0.01;

/// Two linear layers, `up` and `down`, in a library under test.
pub(crate) trait Model {
    type Var: HostTensor;

    /// The model with the weights of [`start`].
    fn new() -> Self;

    fn vars(&self) -> BTreeMap<String, Self::Var>;

    /// A variable of its own.
    fn var(values: &[f32]) -> Self::Var;

    /// The same variable once more.
    fn again(var: &Self::Var) -> Self::Var;

    /// Steps on the mean squared error of some rows of a step's batch, with the learning rate
    /// [`LR`].
    fn step(&self, optimizer: &mut TensorOptimizer<Self::Var>, step: usize, rows: Range<usize>);

    /// Takes all steps, on all rows, with the library's own AdamW.
    fn train_by_the_library(&self);

    /// Steps on the sum of a variable's elements times a factor.
    fn step_on_sum(
        optimizer: &mut TensorOptimizer<Self::Var>,
        var: &Self::Var,
        factor: f64,
        lr: f64,
    ) -> UpdateReport;
}

/// Makes a test of every law here for a library's model.
macro_rules! laws {
    ($model:ty: $($law:ident)*) => {
        $(#[test]
        fn $law() {
            $crate::tensors::$law::<$model>();
        })*
    };
    ($model:ty) => {
        $crate::tensors::laws!($model:
            variables_are_stepped_as_the_library_steps_them
            both_stages_on_two_ranks_give_the_weights_of_one
            the_norm_is_that_of_the_variables_of_all_stages
            a_variable_that_no_rank_used_only_decays
            a_variable_that_cannot_be_stepped_is_named
            an_optimizer_continues_from_the_state_of_another
            averages_are_the_weights_until_the_first_step
            a_division_of_the_parameters_is_refused
        );
    };
}
pub(crate) use laws;

/// Numbers of a batch or a weight.
pub(crate) fn numbers<T: HostTensor>(seed: f32, sizes: &[usize]) -> T {
    let count = sizes.iter().product();
    let values = (0..count).map(|i: usize| (seed + 1.7 * i as f32).sin());
    T::from_buffer(sizes, Box::new(values.collect::<Vec<_>>())).expect("the numbers of a test fit")
}

/// The starting values of a weight, which depend on its name.
pub(crate) fn start<T: HostTensor>(name: &str, sizes: &[usize]) -> T {
    numbers(name.bytes().map(f32::from).sum(), sizes)
}

fn values_of<T: HostTensor>(tensor: &T) -> Vec<f32> {
    let buffer = tensor.share().expect("the numbers of a test fit");
    into_vec(buffer).expect("the numbers of a test fit")
}

fn values(model: &impl Model) -> Vec<f32> {
    model.vars().values().flat_map(values_of).collect()
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
            weight_decay: WEIGHT_DECAY,
            ..OptimizerConfig::default()
        },
        ..ZeroConfig::default()
    }
}

/// The weights of each rank after some steps on its share of the rows.
fn train<M: Model>(ranks: usize, stage: ZeroStage) -> Vec<Vec<f32>> {
    world(ranks, |member| {
        let model = M::new();
        let optimizer =
            TensorOptimizer::new(model.vars(), config(stage), groups(&member), |spec| spec);
        let mut optimizer = optimizer.expect("the numbers of a test fit");
        let share = ROWS / ranks;
        let first = share * member.rank().0;
        for step in 0..STEPS {
            model.step(&mut optimizer, step, first..first + share);
        }
        values(&model)
    })
}

pub(crate) fn variables_are_stepped_as_the_library_steps_them<M: Model>() {
    let model = M::new();
    let before = values(&model);
    model.train_by_the_library();
    let found = train::<M>(1, ZeroStage::OptimizerState).remove(0);
    assert_ne!(found, before);
    merak_mpu::testing::assert_close(&found, &values(&model), 0.0, 1e-6);
}

pub(crate) fn both_stages_on_two_ranks_give_the_weights_of_one<M: Model>() {
    let one = train::<M>(1, ZeroStage::Replicated).remove(0);
    let sharded = train::<M>(2, ZeroStage::OptimizerState);
    assert_eq!(
        sharded,
        train::<M>(2, ZeroStage::Replicated),
        "the same bits"
    );
    assert_eq!(sharded[0], sharded[1]);
    merak_mpu::testing::assert_close(&sharded[0], &one, 0.0, 1e-6);
}

pub(crate) fn the_norm_is_that_of_the_variables_of_all_stages<M: Model>() {
    let reports = world(2, |member| {
        let groups = ZeroGroups {
            data_sequence: member.group("data", &[member.rank()]).unwrap(),
            model: member.world_group().unwrap(),
        };
        // The rank of the first stage has the name that comes last.
        let name = ["z", "a"][member.rank().0];
        let var = M::var(&[0.5]);
        let params = BTreeMap::from([(name.to_owned(), M::again(&var))]);
        let config = config(ZeroStage::OptimizerState);
        let mut optimizer = TensorOptimizer::new(params, config, groups, |spec| spec).unwrap();
        let grad = [3.0, 4.0][member.rank().0];
        M::step_on_sum(&mut optimizer, &var, grad, 0.1)
    });
    for report in reports {
        assert!((report.grad_norm - 5.0).abs() < 1e-12, "{report:?}");
    }
}

pub(crate) fn a_variable_that_no_rank_used_only_decays<M: Model>() {
    let values = world(1, |member| {
        let [var, other] = [M::var(&[1.0]), M::var(&[1.0])];
        let params = [("used", &other), ("unused", &var)];
        let params = params
            .map(|(name, var)| (name.to_owned(), M::again(var)))
            .into();
        let config = config(ZeroStage::OptimizerState);
        let adapt = |spec: ParamSpec| match spec.name.as_str() {
            "used" => spec.without_decay(),
            _ => spec,
        };
        let mut optimizer = TensorOptimizer::new(params, config, groups(&member), adapt).unwrap();
        M::step_on_sum(&mut optimizer, &other, 1.0, 0.5);
        [var, other].map(|var| values_of(&var)[0])
    });
    let [unused, used] = values[0];
    assert!((unused - 0.995).abs() < 1e-6 && (used - 0.5).abs() < 1e-6);
}

pub(crate) fn a_variable_that_cannot_be_stepped_is_named<M: Model>() {
    world(1, |member| {
        let make = |var: M::Var| {
            let params = BTreeMap::from([("w".to_owned(), var)]);
            let config = ZeroConfig::default();
            TensorOptimizer::new(params, config, groups(&member), |spec| spec)
        };
        let error = make(M::Var::from_buffer(&[2], zeros(DType::F16, 2)).unwrap())
            .err()
            .unwrap();
        assert_eq!(error.to_string(), "parameter `w` cannot be stepped");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "expected elements of type f32, found f16");
        let mut optimizer = make(M::var(&[0.0; 2])).unwrap();
        let part = |_: &str, _: &M::Var| Some(M::var(&[0.0]));
        let error = optimizer.step_with(0.1, part).unwrap_err();
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

pub(crate) fn an_optimizer_continues_from_the_state_of_another<M: Model>() {
    world(1, |member| {
        let groups = groups(&member);
        let over = |model: &M| {
            let config = config(ZeroStage::OptimizerState);
            TensorOptimizer::new(model.vars(), config, groups.clone(), |spec| spec)
                .expect("the numbers of a test fit")
        };
        let train = |model: &M, optimizer: &mut TensorOptimizer<M::Var>, steps: Range<usize>| {
            for step in steps {
                model.step(optimizer, step, 0..ROWS);
            }
        };
        let (unbroken, resumed) = (M::new(), M::new());
        train(&unbroken, &mut over(&unbroken), 0..4);
        let mut first = over(&resumed);
        train(&resumed, &mut first, 0..2);
        let state = first.optimizer().state().into_owned();
        let mut second = over(&resumed);
        let continued = second.optimizer_mut();
        continued
            .edit_state(|own| *own = state)
            .expect("state lies in memory");
        continued.set_progress(first.optimizer().progress());
        train(&resumed, &mut second, 2..4);
        assert_eq!(values(&resumed), values(&unbroken), "the same bits");
    });
}

pub(crate) fn averages_are_the_weights_until_the_first_step<M: Model>() {
    world(1, |member| {
        let var = M::var(&[0.5, -2.0]);
        let params = BTreeMap::from([("w".to_owned(), M::again(&var))]);
        let config = ZeroConfig {
            ema_decay: Some(0.5),
            ..config(ZeroStage::OptimizerState)
        };
        let mut optimizer =
            TensorOptimizer::new(params, config, groups(&member), |spec| spec).unwrap();
        let averages = |optimizer: &TensorOptimizer<M::Var>| -> Vec<f32> {
            let state = optimizer.optimizer().state();
            let slices = state.slices().filter(|slice| slice.name == EMA);
            slices.flat_map(|slice| slice.values.to_vec()).collect()
        };
        assert_eq!(averages(&optimizer), [0.5, -2.0]);
        // They begin anew from what is loaded before the first step.
        let mut loaded: Box<dyn Buffer> = var.lend().unwrap();
        loaded.write(&mut |bytes| bytes.fill(0));
        drop(loaded);
        M::step_on_sum(&mut optimizer, &var, 1.0, 0.5);
        let expected: Vec<f32> = values_of(&var).iter().map(|value| value / 2.0).collect();
        merak_mpu::testing::assert_close(&averages(&optimizer), &expected, 0.0, 1e-6);
        assert!(expected[0] < -0.2, "{expected:?}");
    });
}

pub(crate) fn a_division_of_the_parameters_is_refused<M: Model>() {
    world(1, |member| {
        let refused = |stage: ZeroStage, has_masters: bool| {
            let params = BTreeMap::from([("w".to_owned(), M::var(&[0.5]))]);
            let config = ZeroConfig {
                has_masters,
                ..config(stage)
            };
            let made = TensorOptimizer::new(params, config, groups(&member), |spec| spec);
            made.err().map(|error| error.to_string())
        };
        assert_eq!(
            refused(ZeroStage::Parameters, false).as_deref(),
            Some("`stage` is 3, expected at most 2 for whole tensors")
        );
        assert_eq!(
            refused(ZeroStage::Gradients, true).as_deref(),
            Some("`has_masters` is true, expected false for whole tensors in stages 1 and 2")
        );
        assert_eq!(refused(ZeroStage::Replicated, true), None);
    });
}
