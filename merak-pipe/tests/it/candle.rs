//! Stages of a candle model.

use crate::engine::DEADLINE;
use candle_core::{Device, Result, Tensor, Var};
use merak_mpu::testing;
use merak_pipe::{
    GroupLink, MicrobatchId, PipelineEngine, Schedule, ScheduleKind, Size, StageId,
    candle::{CandleModel, CandleStages},
    compare_with_unpipelined, run_threads,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

const WIDTH: usize = 3;

/// Each stage has a matrix and a bias; the last one sums squares.
#[derive(Clone)]
struct Chain {
    vars: BTreeMap<String, Var>,
    fails: Arc<AtomicBool>,
}

impl CandleModel for Chain {
    fn input(&self, microbatch: MicrobatchId) -> Result<Tensor> {
        numbers(microbatch.0 as f64, &[2, WIDTH])
    }

    fn forward(&self, stage: StageId, input: &Tensor) -> Result<Tensor> {
        let [weight, bias] = ["weight", "bias"].map(|name| &self.vars[&format!("{stage}.{name}")]);
        input + input.matmul(weight)?.broadcast_add(bias)?.tanh()?
    }

    fn loss(&self, output: &Tensor, microbatch: MicrobatchId) -> Result<Tensor> {
        if microbatch.0 == 2 && self.fails.load(Ordering::Relaxed) {
            candle_core::bail!("no target");
        }
        output.sqr()?.mean_all()
    }
}

fn numbers(seed: f64, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product();
    let values = (0..count).map(|i: usize| (seed + 1.3 * i as f64).sin());
    Tensor::from_vec(values.collect::<Vec<f64>>(), shape, &Device::Cpu)
}

fn stages(own: &[StageId], schedule: &Schedule) -> Result<CandleStages<Chain>> {
    let mut vars = BTreeMap::new();
    for stage in own {
        let seed = stage.0 as f64;
        let weight = Var::from_tensor(&numbers(seed, &[WIDTH, WIDTH])?)?;
        let bias = Var::from_tensor(&numbers(seed + 0.5, &[WIDTH])?)?;
        vars.insert(format!("{stage}.weight"), weight);
        vars.insert(format!("{stage}.bias"), bias);
    }
    let fails = Arc::new(AtomicBool::new(false));
    let model = Chain {
        vars: vars.clone(),
        fails,
    };
    Ok(CandleStages::new(model, schedule.size.stages(), vars))
}

fn schedule(kind: ScheduleKind) -> Schedule {
    let size = Size::new(2, 4).with_chunks(kind.default_chunks());
    kind.generate(size).expect("the numbers of a test fit")
}

/// The stages of all ranks.
fn ranks(schedule: &Schedule) -> Vec<CandleStages<Chain>> {
    let make = |rank| {
        stages(
            &schedule.stages_of(rank).expect("the numbers of a test fit"),
            schedule,
        )
        .expect("the numbers of a test fit")
    };
    (0..schedule.size.ranks).map(make).collect()
}

#[test]
fn every_schedule_gives_a_candle_model_the_gradients_of_a_step_without_a_pipeline() {
    for kind in [
        ScheduleKind::OneFOneB,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
    ] {
        let schedule = schedule(kind);
        let make = |own: &[StageId]| stages(own, &schedule);
        let comparison =
            compare_with_unpipelined(&schedule, make, CandleStages::results, 0.0, DEADLINE);
        let values = 1 + schedule.size.stages() * (WIDTH * WIDTH + WIDTH);
        assert_eq!(comparison.unwrap().values, values, "{kind}");
    }
}

#[test]
fn a_candle_model_runs_over_process_groups() {
    let schedule = schedule(ScheduleKind::ZbV);
    let mut expected = ranks(&schedule);
    run_threads(&schedule, &mut expected, DEADLINE).unwrap();
    let found = testing::world(2, |member| {
        let mut module = ranks(&schedule).swap_remove(member.rank().0);
        let mut link = GroupLink::new(member.world_group().unwrap());
        let engine = PipelineEngine::new(&schedule, member.rank().0).unwrap();
        engine.run(&mut module, &mut link).unwrap();
        module.results().unwrap()
    });
    for (found, expected) in found.into_iter().zip(expected) {
        assert_eq!(found, expected.results().unwrap());
    }
}

#[test]
fn a_step_after_a_failed_one_has_its_own_gradients_alone() {
    let schedule = schedule(ScheduleKind::OneFOneB);
    let (mut expected, mut found) = (ranks(&schedule), ranks(&schedule));
    run_threads(&schedule, &mut expected, DEADLINE).unwrap();
    let fails = Arc::clone(&found[1].model().fails);
    fails.store(true, Ordering::Relaxed);
    let error = run_threads(&schedule, &mut found, DEADLINE).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.starts_with("no target"), "{error}: {source}");
    assert!(found[0].take_grads().is_none());
    fails.store(false, Ordering::Relaxed);
    run_threads(&schedule, &mut found, DEADLINE).unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.results().unwrap(), expected.results().unwrap());
    }
    assert!(found[1].take_loss() > 0.0 && found[1].take_loss() == 0.0);
}
