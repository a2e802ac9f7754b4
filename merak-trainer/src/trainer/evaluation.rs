//! The loss on held-out samples.

use super::MerakTrainer;
use crate::{
    config::CheckedArguments,
    data::{BatchShape, Dataset, EvaluationOrder, collate},
    error::{ConfigError, Result, StepPart},
    plan::{Forward, Plan},
    stage::{StepInputs, StepModule, count_labels},
};
use merak_mpu::{Buffer, Communicator, Group, Pending, ReduceOp};
use merak_trace::Interpreter;
use serde::Serialize;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Instant,
};

/// What an evaluation reports.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct EvaluationMetrics {
    /// Optimizer steps done.
    pub step: usize,
    /// Validation loss in nats per token.
    pub eval_loss: f64,
    /// Samples evaluated.
    pub eval_samples: usize,
    /// Seconds that the evaluation took.
    pub eval_runtime: f64,
    /// Samples per second.
    pub eval_samples_per_second: f64,
    /// All other metrics, by names that begin with `eval_`.
    #[serde(flatten)]
    pub metrics: BTreeMap<String, f64>,
}

impl EvaluationMetrics {
    /// The loss, by its name as a metric.
    const LOSS: &str = "eval_loss";

    /// What models can be judged by.
    pub fn names(&self) -> Vec<&str> {
        let others = self.metrics.keys().map(String::as_str);
        std::iter::once(Self::LOSS).chain(others).collect()
    }

    /// The metric of a name.
    pub fn get(&self, name: &str) -> Option<f64> {
        let loss = (name == Self::LOSS).then_some(self.eval_loss);
        loss.or_else(|| self.metrics.get(name).copied())
    }
}

/// The metrics that evaluations of a plan's model give by themselves.
pub(super) fn built_in(_plan: &Plan) -> Vec<&'static str> {
    vec![EvaluationMetrics::LOSS]
}

impl MerakTrainer {
    /// The mean loss over the evaluation data, each sample once; the same on every rank. Where it
    /// is not finite, the log names the first samples whose loss is not.
    ///
    /// # Communication
    /// Per microbatch the pipeline's forward hops, per iteration an all-reduce of 8 bytes over the
    /// pipeline, which is waited for some iterations later; at the end an all-reduce over the data
    /// group and a broadcast over the pipeline.
    ///
    /// # Errors
    /// When there are no samples to evaluate or a rank fails.
    pub fn evaluate(&mut self) -> Result<EvaluationMetrics> {
        self.within(
            StepPart::Evaluate,
            self.progress.global_step,
            Self::evaluate_all,
        )
    }

    fn evaluate_all(&mut self) -> Result<EvaluationMetrics> {
        let start = Instant::now();
        let Some(data) = self.parts.eval_data.clone() else {
            return Err(crate::error::Error::Config(ConfigError::MissingKey {
                key: "data.path",
                advice: "evaluation needs data".to_owned(),
            }));
        };
        let order = order(&self.args, data.len())?;
        let batch = self.args.evaluation_batch(data.len());
        let forward = Forward::loss(batch, self.stages.plan.draft.seq_length);
        let programs = self.programs.get(&self.stages, forward)?;
        let mpu = Arc::clone(&self.stages.mpu);
        let mut pace = Pace::new(mpu.pipeline_parallel_group());
        let mut sums = Sums::default();
        self.tell_evaluation(0, order.iterations());
        for iteration in 0..order.iterations() {
            self.evaluate_iteration(&*data, &order, &programs, iteration, &mut sums)?;
            pace.ended()?;
            self.tell_evaluation(iteration + 1, order.iterations());
        }
        pace.finish()?;
        let eval_loss = self.mean_over_ranks(&sums)?;
        let (eval_samples, eval_runtime) = (order.samples(), start.elapsed().as_secs_f64());
        let metrics = EvaluationMetrics {
            step: self.progress.global_step,
            eval_loss,
            eval_samples,
            eval_runtime,
            eval_samples_per_second: eval_samples as f64 / eval_runtime.max(f64::MIN_POSITIVE),
            metrics: BTreeMap::new(),
        };
        self.tell(|callback, control| callback.on_evaluate(&metrics, control));
        Ok(metrics)
    }

    /// Adds the losses and labels of this rank's microbatches of an iteration.
    fn evaluate_iteration(
        &mut self,
        data: &dyn Dataset,
        order: &EvaluationOrder,
        programs: &[Interpreter],
        iteration: usize,
        sums: &mut Sums,
    ) -> Result<()> {
        let (dp_rank, microbatches) = (
            self.stages.mpu.data_parallel_rank(),
            order.microbatches(iteration),
        );
        let taken = |microbatch| order.microbatch(iteration, dp_rank, microbatch);
        let engine = self.stages.forward_engine(microbatches)?;
        let batches = if self.stages.reads_data() {
            let read = |microbatch| collate(data, taken(microbatch));
            (0..microbatches).map(read).collect::<Result<Vec<_>>>()?
        } else {
            Vec::new()
        };
        sums.labels += batches.iter().map(count_labels).sum::<i64>();
        let inputs = StepInputs {
            contexts: vec![self.stages.context(0, 0, false); microbatches],
            batches,
            loss_grad: 0.0,
        };
        let mut module = StepModule::inference(&mut self.stages, programs, inputs);
        engine.run(&mut module, &mut self.link)?;
        let result = module.finish();
        for (microbatch, loss) in self.losses(&result)?.into_iter().enumerate() {
            sums.loss += loss;
            let is_first = !sums.has_infinite && !loss.is_finite();
            if is_first && self.stages.mpu.tensor_parallel_rank() == 0 {
                sums.has_infinite = true;
                let samples = taken(microbatch).indices;
                tracing::warn!(?samples, loss, "the loss of these samples is not finite");
            }
        }
        Ok(())
    }

    /// The mean loss over the labels of all ranks, on every rank.
    fn mean_over_ranks(&self, sums: &Sums) -> Result<f64> {
        let mut mean = 0.0;
        if self.stages.has_last() {
            let group = self.stages.mpu.data_sequence_parallel_group();
            let loss = group.all_reduce_scalar(sums.loss, ReduceOp::Sum)?;
            let labels = group.all_reduce_scalar(sums.labels, ReduceOp::Sum)?;
            if labels == 0 {
                tracing::warn!("no sample of the evaluation has a label: its loss is 0");
            } else {
                mean = loss / labels as f64;
            }
        }
        self.of_last_stage(mean)
    }

    fn tell_evaluation(&mut self, done: usize, total: usize) {
        self.tell(|callback, _| callback.on_evaluation_step(done, total));
    }
}

/// Sums over the microbatches of an evaluation on one rank.
#[derive(Debug, Default)]
struct Sums {
    loss: f64,
    labels: i64,
    /// Whether the log has named samples whose loss is not finite.
    has_infinite: bool,
}

/// Keeps the first stages of a pipeline from running ahead of the last ones, which would have to
/// hold all that they are sent.
struct Pace<'a> {
    group: &'a Group,
    /// Iterations that this rank has ended and others may not have.
    ended: VecDeque<Pending<Box<dyn Buffer>>>,
}

impl<'a> Pace<'a> {
    fn new(group: &'a Group) -> Self {
        Self {
            group,
            ended: VecDeque::new(),
        }
    }

    /// Reports the end of an iteration on this rank. With P ranks, waits until all have ended the
    /// iteration P before it: each has work as long as the pipeline is full.
    fn ended(&mut self) -> Result<()> {
        let nothing: Box<dyn Buffer> = Box::new(vec![0_i64]);
        let pending = self.group.start_all_reduce(nothing, ReduceOp::Sum)?;
        self.ended.push_back(pending);
        if self.ended.len() > self.group.world_size()
            && let Some(first) = self.ended.pop_front()
        {
            first.wait()?;
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        for pending in self.ended {
            pending.wait()?;
        }
        Ok(())
    }
}

/// The order of the samples.
pub(super) fn order(args: &CheckedArguments, samples: usize) -> Result<EvaluationOrder> {
    let shape = BatchShape {
        batch: args.evaluation_batch(samples),
        microbatches: args.gradient_accumulation_steps,
        dp: args.dp,
    };
    EvaluationOrder::new(samples, shape, args.eval_iters, args.dataloader_drop_last)
}
