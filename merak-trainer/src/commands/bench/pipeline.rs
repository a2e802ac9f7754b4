//! `merak bench pipeline`: schedules as they ran, beside the simulator's predictions.

use super::{super::Failure, MadeUp, Options, Shape, configured, located, trainer_on};
use clap::Args as ClapArgs;
use merak_pipe::{Costs, ScheduleKind, Timeline, simulate_on};
use merak_trace::models::Model;
use merak_trainer::{
    CheckedArguments, Config, CostModel, Plan, PlanInputs, Prediction, Result, StageTimes,
    StepRecord, Workload, World, data::Dataset, metrics::median, run_world,
};
use serde_json::{Value, json};
use std::sync::Arc;

/// Runs pipeline schedules on a GPT and prints a JSON line for each: what was executed, what the
/// simulator makes of the action times of the same steps, and what the cost model predicted before.
#[derive(Debug, ClapArgs)]
#[command(
    mut_arg("layers", |arg| arg.default_value("4")),
    mut_arg("hidden", |arg| arg.default_value("256")),
    mut_arg("heads", |arg| arg.default_value("4")),
    mut_arg("vocab", |arg| arg.default_value("2048"))
)]
pub(crate) struct Pipeline {
    /// Ranks of the pipeline.
    #[arg(long, default_value_t = 2)]
    pp: usize,
    /// Schedules, by name; unset: all that train.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    schedules: Vec<String>,
    #[command(flatten)]
    shape: Shape,
    /// Length of the sequences.
    #[arg(long, default_value_t = 128)]
    seq: usize,
    /// Samples of a microbatch.
    #[arg(long, default_value_t = 2)]
    batch: usize,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8)]
    microbatches: usize,
    /// Steps of each schedule in a round, after one that is not counted.
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Times that all schedules are run, by turns.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Compute threads of each rank.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Recomputes all activations that may be.
    #[arg(long)]
    recompute: bool,
    /// Rule that gives the model's pieces to stages.
    #[arg(long, default_value = "autopipe", value_name = "METHOD")]
    partition: String,
}

/// Times of the steps of one schedule, in the order of the runs.
#[derive(Default)]
struct Found {
    chunks: usize,
    executed: Vec<f64>,
    simulated: Vec<f64>,
    steps: Vec<f64>,
    predicted: Vec<f64>,
    predicted_pipeline: Vec<f64>,
    stages: Vec<Vec<StageTimes>>,
}

impl Pipeline {
    /// One object for each schedule.
    pub(super) fn run(&self) -> Result<Vec<Value>, Failure> {
        if self.steps == 0 || self.rounds == 0 {
            return Err("--steps and --rounds expect at least 1".into());
        }
        let model: Arc<dyn Model> = self.shape.gpt(self.seq)?.into();
        let mut schedules = Vec::new();
        for name in self.names() {
            schedules.push((self.arguments(&name)?, name, Found::default()));
        }
        for _ in 0..self.rounds {
            for ((config, args), _, found) in &mut schedules {
                self.round(&model, args, found)
                    .map_err(|error| located(config, error))?;
            }
        }
        let lines = schedules.into_iter();
        Ok(lines
            .map(|(_, name, found)| self.line(&name, &found))
            .collect())
    }

    /// The schedules to run.
    fn names(&self) -> Vec<String> {
        if self.schedules.is_empty() {
            let kinds = ScheduleKind::ALL.into_iter();
            let training = kinds.filter(|kind| kind.is_training());
            return training.map(|kind| kind.to_string()).collect();
        }
        self.schedules.clone()
    }

    fn arguments(&self, schedule: &str) -> Result<(Config, CheckedArguments), Failure> {
        let chunks = if schedule == ScheduleKind::Interleaved.as_str() {
            "2"
        } else {
            "1"
        };
        let options: Options = vec![
            ("--pp", "pp", self.pp.to_string()),
            ("--schedules", "train_schedule", schedule.to_owned()),
            ("--partition", "partition_method", self.partition.clone()),
            (
                "--microbatches",
                "gradient_accumulation_steps",
                self.microbatches.to_string(),
            ),
            (
                "--batch",
                "per_device_train_batch_size",
                self.batch.to_string(),
            ),
            (
                "--recompute",
                "activation_checkpointing",
                self.recompute.to_string(),
            ),
            (
                "--threads",
                "compute.threads_per_rank",
                self.threads.to_string(),
            ),
        ];
        let always = [
            ("virtual_stages", chunks),
            ("lr_scheduler_type", "constant"),
            ("num_train_epochs", "1"),
        ];
        configured(options, &always)
    }

    /// Predicts, runs and simulates the steps of one schedule.
    fn round(
        &self,
        model: &Arc<dyn Model>,
        args: &CheckedArguments,
        found: &mut Found,
    ) -> Result<(), Failure> {
        // The memory is looked at first, as a measurement needs some too.
        let inputs = PlanInputs::read(Arc::clone(model), args)?;
        Plan::new(&inputs, args)?.check_memory(args, &[Workload::Training])?;
        let costs = CostModel::of(&inputs, args, None, &World::of_threads())?;
        let plan = Arc::new(Plan::with_costs(&inputs, args, &costs.under(args))?);
        let prediction = plan.predict(&costs.under(args))?;
        let ranks = self.records(&plan, args)?;
        let cores = prediction
            .as_ref()
            .map_or(f64::INFINITY, |prediction| prediction.cores);
        found.chunks = plan.schedule.size.chunks;
        for step in 0..ranks[0].len() {
            let timeline = from_first_start(&ranks, step);
            let times = Costs::measured(&plan.schedule, &timeline)?;
            found.executed.push(timeline.makespan());
            found
                .simulated
                .push(simulate_on(&plan.schedule, &times, cores)?.makespan);
            found.steps.push(ranks[0][step].time.as_secs_f64());
        }
        if let Some(prediction) = prediction {
            found.predicted.push(prediction.step());
            found
                .predicted_pipeline
                .push(prediction.simulation.makespan);
            found.stages.push(compared(&plan, &prediction, &ranks)?);
        }
        Ok(())
    }

    /// The steps of each rank.
    fn records(&self, plan: &Arc<Plan>, args: &CheckedArguments) -> Result<Vec<Vec<StepRecord>>> {
        let data: Arc<dyn Dataset> = Arc::new(MadeUp {
            samples: (self.steps + 1) * args.global_batch(),
            seq: self.seq,
            vocab: self.shape.vocab,
        });
        run_world(args, |member| {
            let mut trainer = trainer_on(&data, member, plan, args)?;
            (0..=self.steps).try_for_each(|_| trainer.train_step().map(drop))?;
            Ok(trainer.records().cloned().collect())
        })
    }

    fn line(&self, name: &str, found: &Found) -> Value {
        let ratios = |above: &[f64], below: &[f64]| {
            let pairs = above.iter().zip(below);
            median(pairs.map(|(above, below)| above / below).collect())
        };
        let mut line = json!({
            "schedule": name,
            "ranks": self.pp,
            "chunks": found.chunks,
            "microbatches": self.microbatches,
            "executed_ms": 1e3 * median(found.executed.clone()),
            "simulated_ms": 1e3 * median(found.simulated.clone()),
            "executed_by_simulated": ratios(&found.executed, &found.simulated),
            "step_ms": 1e3 * median(found.steps.clone()),
        });
        if !found.predicted.is_empty() {
            let (step, predicted) = (median(found.steps.clone()), median(found.predicted.clone()));
            line["predicted_ms"] = json!(1e3 * predicted);
            line["predicted_pipeline_ms"] = json!(1e3 * median(found.predicted_pipeline.clone()));
            line["step_by_predicted"] = json!(step / predicted);
            line["stages"] = stages(&found.stages);
        }
        line
    }
}

/// Timeline of one step on all ranks, from its first start on.
fn from_first_start(ranks: &[Vec<StepRecord>], step: usize) -> Timeline {
    let spans = || ranks.iter().map(|rank| &rank[step].spans);
    let starts = spans().filter_map(|spans| spans.first());
    let first = starts.map(|span| span.start).fold(f64::INFINITY, f64::min);
    let mut timeline = Timeline {
        ranks: spans().cloned().collect(),
    };
    for span in timeline.ranks.iter_mut().flatten() {
        span.start -= first;
        span.end -= first;
    }
    timeline
}

/// The stages of all steps of a run beside the prediction.
fn compared(
    plan: &Plan,
    prediction: &Prediction,
    ranks: &[Vec<StepRecord>],
) -> Result<Vec<StageTimes>> {
    let spans = ranks.iter().map(|rank| {
        let spans = rank.iter().flat_map(|record| &record.spans);
        spans.copied().collect()
    });
    let ran = Timeline {
        ranks: spans.collect(),
    };
    Ok(plan.compare_stages(prediction, &ran)?)
}

/// The medians of each stage over the rounds.
fn stages(rounds: &[Vec<StageTimes>]) -> Value {
    let of = |stage: usize, part: fn(&StageTimes) -> f64| {
        1e3 * median(rounds.iter().map(|stages| part(&stages[stage])).collect())
    };
    let stages = rounds.first().map_or(0, Vec::len);
    let stages = (0..stages).map(|stage| {
        json!({
            "rank": rounds[0][stage].rank,
            "forward_ms": of(stage, |times| times.forward[0]),
            "predicted_forward_ms": of(stage, |times| times.forward[1]),
            "backward_ms": of(stage, |times| times.backward[0]),
            "predicted_backward_ms": of(stage, |times| times.backward[1]),
        })
    });
    stages.collect()
}
