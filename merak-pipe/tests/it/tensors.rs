//! What stages over the tensors of every library do.

use crate::engine::DEADLINE;
use merak_mpu::testing;
use merak_pipe::{
    Autograd, BoxError, GroupLink, MicrobatchId, PipelineEngine, Schedule, ScheduleKind, Size,
    StageId, StageModule, TensorModel, TensorStages, compare_with_unpipelined, run_threads,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

const WIDTH: usize = 3;

/// A tensor library under test.
pub(crate) trait Library: Autograd<Var: Send> + Send {
    /// `x + tanh(x weight + bias)`.
    fn layer(x: &Self, weight: &Self, bias: &Self) -> Result<Self, BoxError>;

    /// The mean of the squares of all elements.
    fn mean_of_squares(&self) -> Result<Self, BoxError>;

    /// The same variable once more.
    fn again(var: &Self::Var) -> Self::Var;
}

/// Makes a test of every law here for a library.
macro_rules! laws {
    ($tensor:ty: $($law:ident)*) => {
        $(#[test]
        fn $law() {
            $crate::tensors::$law::<$tensor>();
        })*
    };
    ($tensor:ty) => {
        $crate::tensors::laws!($tensor:
            every_schedule_gives_a_model_the_gradients_of_a_step_without_a_pipeline
            a_model_runs_over_process_groups
            a_step_after_a_failed_one_has_its_own_gradients_alone
            an_evaluation_keeps_nothing_and_adds_to_the_loss_alone
            a_loss_that_is_no_scalar_is_refused
            a_weight_that_no_stage_used_has_no_gradient
        );
    };
}
pub(crate) use laws;

/// Each stage has a matrix and a bias; the last one sums squares.
pub(crate) struct Chain<T: Library> {
    vars: BTreeMap<String, T::Var>,
    fails: Arc<AtomicBool>,
    /// The loss of the last stage is its output.
    has_wide_loss: bool,
}

impl<T: Library> TensorModel for Chain<T> {
    type Tensor = T;
    type Error = BoxError;

    fn input(&self, microbatch: MicrobatchId) -> Result<T, BoxError> {
        Ok(numbers(microbatch.0 as f64, &[2, WIDTH]))
    }

    fn forward(&self, stage: StageId, input: &T) -> Result<T, BoxError> {
        let [weight, bias] = ["weight", "bias"].map(|name| &self.vars[&format!("{stage}.{name}")]);
        T::layer(input, T::of_variable(weight), T::of_variable(bias))
    }

    fn loss(&self, output: &T, microbatch: MicrobatchId) -> Result<T, BoxError> {
        if microbatch.0 == 2 && self.fails.load(Ordering::Relaxed) {
            return Err("no target".into());
        }
        if self.has_wide_loss {
            return Ok(numbers(0.0, &[2]));
        }
        output.mean_of_squares()
    }
}

fn numbers<T: Library>(seed: f64, shape: &[usize]) -> T {
    let count = shape.iter().product();
    let values = (0..count).map(|i: usize| (seed + 1.3 * i as f64).sin());
    let values = Box::new(values.collect::<Vec<f64>>());
    T::from_buffer(shape, values).expect("the numbers of a test fit")
}

fn stages<T: Library>(
    own: &[StageId],
    schedule: &Schedule,
) -> Result<TensorStages<Chain<T>>, BoxError> {
    let mut vars = BTreeMap::new();
    for stage in own {
        let seed = stage.0 as f64;
        let weight = numbers::<T>(seed, &[WIDTH, WIDTH]).into_variable()?;
        let bias = numbers::<T>(seed + 0.5, &[WIDTH]).into_variable()?;
        vars.insert(format!("{stage}.weight"), weight);
        vars.insert(format!("{stage}.bias"), bias);
    }
    let own = vars.iter();
    let model = Chain {
        vars: own
            .map(|(name, var)| (name.clone(), T::again(var)))
            .collect(),
        fails: Arc::new(AtomicBool::new(false)),
        has_wide_loss: false,
    };
    Ok(TensorStages::new(model, schedule.size.stages(), vars))
}

fn schedule(kind: ScheduleKind) -> Schedule {
    let size = Size::new(2, 4).with_chunks(kind.default_chunks());
    kind.generate(size).expect("the numbers of a test fit")
}

/// The stages of all ranks.
fn ranks<T: Library>(schedule: &Schedule) -> Vec<TensorStages<Chain<T>>> {
    let make = |rank| {
        let own = schedule.stages_of(rank).expect("the numbers of a test fit");
        stages(&own, schedule).expect("the numbers of a test fit")
    };
    (0..schedule.size.ranks).map(make).collect()
}

pub(crate) fn every_schedule_gives_a_model_the_gradients_of_a_step_without_a_pipeline<
    T: Library,
>() {
    for kind in [
        ScheduleKind::OneFOneB,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
    ] {
        let schedule = schedule(kind);
        let make = |own: &[StageId]| stages::<T>(own, &schedule);
        let comparison =
            compare_with_unpipelined(&schedule, make, TensorStages::results, 0.0, DEADLINE);
        let values = 1 + schedule.size.stages() * (WIDTH * WIDTH + WIDTH);
        assert_eq!(comparison.unwrap().values, values, "{kind}");
    }
}

pub(crate) fn a_model_runs_over_process_groups<T: Library>() {
    let schedule = schedule(ScheduleKind::ZbV);
    let mut expected = ranks::<T>(&schedule);
    run_threads(&schedule, &mut expected, DEADLINE).unwrap();
    let found = testing::world(2, |member| {
        let mut module = ranks::<T>(&schedule).swap_remove(member.rank().0);
        let mut link = GroupLink::new(member.world_group().unwrap());
        let engine = PipelineEngine::new(&schedule, member.rank().0).unwrap();
        engine.run(&mut module, &mut link).unwrap();
        module.results().unwrap()
    });
    for (found, expected) in found.into_iter().zip(expected) {
        assert_eq!(found, expected.results().unwrap());
    }
}

pub(crate) fn a_step_after_a_failed_one_has_its_own_gradients_alone<T: Library>() {
    let schedule = schedule(ScheduleKind::OneFOneB);
    let (mut expected, mut found) = (ranks::<T>(&schedule), ranks::<T>(&schedule));
    run_threads(&schedule, &mut expected, DEADLINE).unwrap();
    let fails = Arc::clone(&found[1].model().fails);
    fails.store(true, Ordering::Relaxed);
    let error = run_threads(&schedule, &mut found, DEADLINE).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.starts_with("no target"), "{error}: {source}");
    assert!(found[0].take_grads().is_empty());
    fails.store(false, Ordering::Relaxed);
    run_threads(&schedule, &mut found, DEADLINE).unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.results().unwrap(), expected.results().unwrap());
    }
    assert!(found[1].take_loss() > 0.0 && found[1].take_loss() == 0.0);
}

pub(crate) fn an_evaluation_keeps_nothing_and_adds_to_the_loss_alone<T: Library>() {
    let schedule = schedule(ScheduleKind::OneFOneB);
    let (mut expected, mut found) = (ranks::<T>(&schedule), ranks::<T>(&schedule));
    run_threads(&schedule, &mut expected, DEADLINE).unwrap();
    run_threads(&schedule, &mut found, DEADLINE).unwrap();
    assert!(found[1].take_loss() > 0.0);
    let forwards = schedule.forwards(schedule.size.microbatches).unwrap();
    run_threads(&forwards, &mut found, DEADLINE).unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.results().unwrap(), expected.results().unwrap());
    }
    // A graph that was kept could be walked back.
    let late = found[1].backward_input("1I0".parse().unwrap(), None);
    assert_eq!(late.unwrap_err().to_string(), "no forward came before");
}

pub(crate) fn a_loss_that_is_no_scalar_is_refused<T: Library>() {
    let schedule = schedule(ScheduleKind::OneFOneB);
    let mut ranks = ranks::<T>(&schedule);
    let Chain { vars, fails, .. } = chain(&ranks[1]);
    let model = Chain {
        vars,
        fails,
        has_wide_loss: true,
    };
    ranks[1] = TensorStages::new(model, 2, BTreeMap::new());
    let error = run_threads(&schedule, &mut ranks, DEADLINE).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(source, "the loss is a scalar, found a tensor of [2]");
}

pub(crate) fn a_weight_that_no_stage_used_has_no_gradient<T: Library>() {
    let schedule = schedule(ScheduleKind::OneFOneB);
    let mut ranks = ranks::<T>(&schedule);
    let model = chain(&ranks[0]);
    let mut vars = chain(&ranks[0]).vars;
    let idle = numbers::<T>(0.0, &[1]).into_variable();
    vars.insert("idle".to_owned(), idle.unwrap());
    ranks[0] = TensorStages::new(model, 2, vars);
    run_threads(&schedule, &mut ranks, DEADLINE).unwrap();
    let results: BTreeMap<_, _> = ranks[0].results().unwrap().into_iter().collect();
    assert_eq!(results["idle"], [0.0; 0]);
    assert!(ranks[0].take_grads().keys().eq(["0.bias", "0.weight"]));
}

/// The model of a rank once more.
fn chain<T: Library>(stages: &TensorStages<Chain<T>>) -> Chain<T> {
    let vars = stages.vars().iter();
    Chain {
        vars: vars
            .map(|(name, var)| (name.clone(), T::again(var)))
            .collect(),
        fails: Arc::clone(&stages.model().fails),
        has_wide_loss: false,
    }
}
