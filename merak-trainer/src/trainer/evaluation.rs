//! The loss on held-out samples.

use super::{
    MerakTrainer,
    average::of_averages,
    callback::Told,
    prediction::{
        ClassCounts, ComputeMetrics, Delivery, PredictionKind, PredictionOutput, Rows, has_classes,
    },
};
use crate::{
    config::{CheckedArguments, MetricName},
    data::{
        ATTENTION_MASK, Batch, BatchShape, Dataset, EvaluationOrder, IGNORED_LABEL, LABELS,
        SampleTensor,
    },
    error::{ConfigError, Result, StepPart},
    plan::{Forward, ForwardOutput, Plan},
    stage::{StepInputs, StepModule, StepResult, count},
};
use merak_mpu::{Buffer, Communicator, Group, Pending, ReduceOp};
use merak_trace::{Interpreter, models::Objective};
use serde::Serialize;
use std::{
    collections::{BTreeMap, VecDeque},
    mem,
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
    /// Seconds that the evaluation of the weights took.
    pub eval_runtime: f64,
    /// Samples per second.
    pub eval_samples_per_second: f64,
    /// All other metrics, by names that begin with `eval_`; those of averages of the weights
    /// (`ema_decay`) begin with `eval_ema_`.
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

/// The exponential of the loss of a language model, as a metric.
const PERPLEXITY: &str = "eval_perplexity";

/// The metrics that evaluations of a plan's model give by themselves.
pub(super) fn built_in(plan: &Plan, args: &CheckedArguments) -> Vec<String> {
    let others: &[_] = if has_classes(plan.draft.model.objective()) {
        &ClassCounts::NAMES
    } else {
        &[PERPLEXITY]
    };
    let names = [&[EvaluationMetrics::LOSS], others].concat();
    let averages = names.iter().filter(|_| args.ema_decay.is_some());
    let averages = averages.map(|name| of_averages(name));
    let own = names.iter().map(|name| (*name).to_owned());
    own.chain(averages).collect()
}

impl MerakTrainer {
    /// The mean loss over the evaluation data, each sample once, and the other metrics of the
    /// model; the same on every rank. With `ema_decay`, a further pass measures the averages of the
    /// weights. Where the loss is not finite, the log names the first samples whose loss is not.
    ///
    /// # Communication
    /// Per microbatch the pipeline's forward hops, per iteration an all-reduce of 8 bytes over the
    /// pipeline, which is waited for some iterations later; at the end all-reduces over the data
    /// group and a broadcast over the pipeline. With [`TrainerParts::compute_metrics`] the
    /// all-reduces of the iterations are over the world, the predictions of each iteration are
    /// gathered to rank 0, and what comes of them is broadcast.
    ///
    /// # Errors
    /// When there are no samples to evaluate or a rank fails.
    ///
    /// [`TrainerParts::compute_metrics`]: crate::TrainerParts::compute_metrics
    pub fn evaluate(&mut self) -> Result<EvaluationMetrics> {
        self.within(
            StepPart::Evaluate,
            self.progress.global_step,
            Self::evaluate_all,
        )
    }

    fn evaluate_all(&mut self) -> Result<EvaluationMetrics> {
        let Some(data) = self.parts.eval_data.clone() else {
            return Err(crate::error::Error::Config(ConfigError::MissingKey {
                key: "data.path",
                advice: "evaluation needs data".to_owned(),
            }));
        };
        let order = order(&self.args, data.len())?;
        let mut metrics = self.measure(&*data, &order)?;
        let averages = self.measure_averages(|trainer| trainer.measure(&*data, &order))?;
        metrics.metrics.extend(averages);
        self.tell(|callback, control| callback.on_evaluate(&metrics, control));
        Ok(metrics)
    }

    /// The metrics of the weights that the trainer has now.
    fn measure(
        &mut self,
        data: &dyn Dataset,
        order: &EvaluationOrder,
    ) -> Result<EvaluationMetrics> {
        let Some(compute) = self.parts.compute_metrics.clone() else {
            return self.pass_over(data, order, None);
        };
        let kind = self.prediction_kind();
        let mut output = self.gathered(data, order, kind)?;
        let computed = self.computed(&compute, &output)?;
        output.metrics.metrics.extend(computed);
        Ok(output.metrics)
    }

    /// Forwards samples in their order; delivers predictions of a kind, if one is asked for.
    pub(super) fn pass_over(
        &mut self,
        data: &dyn Dataset,
        order: &EvaluationOrder,
        mut delivery: Option<Delivery<'_>>,
    ) -> Result<EvaluationMetrics> {
        let start = Instant::now();
        let kind = delivery.as_ref().map(Delivery::kind);
        let counts_classes = has_classes(self.stages.plan.draft.model.objective());
        let output = match kind {
            Some(kind) => kind.output(),
            None if counts_classes => ForwardOutput::LossAndLogits,
            None => ForwardOutput::Loss,
        };
        let batch = self.args.evaluation_batch(data.len());
        let forward = Forward {
            output,
            ..Forward::loss(batch, self.stages.plan.draft.seq_length)
        };
        let programs = self.programs.get(&self.stages, forward)?;
        let mpu = Arc::clone(&self.stages.mpu);
        let (world, pipeline) = (mpu.world_group(), mpu.pipeline_parallel_group());
        // What rank 0 has not taken yet lies in its memory: no replica runs ahead of it.
        let mut pace = Pace::new(kind.map_or(pipeline, |_| world));
        let has_logits = output == ForwardOutput::LossAndLogits;
        let mut sums = Sums {
            classes: (counts_classes && has_logits).then(ClassCounts::default),
            rows: kind.map(|kind| (kind, Rows::default())),
            ..Sums::default()
        };
        self.tell_evaluation(0, order.iterations());
        for iteration in 0..order.iterations() {
            self.evaluate_iteration(data, order, &programs, iteration, &mut sums)?;
            if let (Some(delivery), Some((_, rows))) = (&mut delivery, &mut sums.rows) {
                delivery.send(mem::take(rows), world, pipeline.world_size())?;
            }
            pace.ended()?;
            self.tell_evaluation(iteration + 1, order.iterations());
        }
        pace.finish()?;
        if let Some(delivery) = delivery {
            delivery.finish(world)?;
        }
        let mut metrics = self.metrics_of(sums)?;
        metrics.eval_samples = order.samples();
        metrics.eval_runtime = start.elapsed().as_secs_f64();
        let seconds = metrics.eval_runtime.max(f64::MIN_POSITIVE);
        metrics.eval_samples_per_second = metrics.eval_samples as f64 / seconds;
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
            let collation = self.collation();
            let read = |microbatch| {
                let batch = collation.batch(data, taken(microbatch))?;
                self.check_batch(batch)
            };
            (0..microbatches).map(read).collect::<Result<Vec<_>>>()?
        } else {
            Vec::new()
        };
        sums.labels += count(&batches, self.stages.plan.draft.loss_count);
        let keeps = sums.keeps() && self.stages.has_last();
        let read = keeps.then(|| batches.clone());
        let inputs = StepInputs {
            contexts: vec![self.stages.context(0, 0, false); microbatches],
            batches,
            loss_grad: 0.0,
        };
        let mut module = StepModule::inference(&mut self.stages, programs, inputs);
        let mut told = Told(&mut self.parts.callbacks);
        engine.run_observed(&mut module, &mut self.link, &mut told)?;
        let mut result = module.finish();
        if let Some(batches) = read {
            self.keep_outputs(&mut result, (data, &batches), sums)?;
        }
        for (microbatch, loss) in self.losses(&result)?.into_iter().enumerate() {
            sums.loss += loss;
            let is_first = !sums.has_infinite && !loss.is_finite();
            if is_first && self.stages.mpu.sequence_tensor_parallel_rank() == 0 {
                sums.has_infinite = true;
                let samples = taken(microbatch).indices;
                tracing::warn!(?samples, loss, "the loss of these samples is not finite");
            }
        }
        Ok(())
    }

    /// Counts classes and keeps predictions of the microbatches of an iteration, on a rank with the
    /// last stage; what they were made of is dropped.
    fn keep_outputs(
        &self,
        result: &mut StepResult,
        (data, batches): (&dyn Dataset, &[Batch]),
        sums: &mut Sums,
    ) -> Result<()> {
        // Ranks that share samples have the same outputs: one of them sends.
        let sends = self.stages.mpu.sequence_tensor_parallel_rank() == 0;
        for (outputs, batch) in result.outputs.values_mut().zip(batches) {
            let predicted = self.predicted(outputs.remove(1))?;
            let labels = batch
                .tensors
                .get(LABELS)
                .map_or(&[][..], SampleTensor::ints);
            if let Some(classes) = &mut sums.classes {
                classes.add(&predicted, labels);
            }
            if let Some((kind, rows)) = sums.rows.as_mut().filter(|_| sends) {
                let seen = if *kind == PredictionKind::Embeddings {
                    self.seen(data, batch)?
                } else {
                    Vec::new()
                };
                let samples = &batch.microbatch.indices;
                rows.add(*kind, samples, &predicted, (labels, &seen));
            }
        }
        Ok(())
    }

    /// Of each sample of a batch, which positions of its hidden states are no padding: those that
    /// are not 0, or all where there is no list.
    fn seen(&self, data: &dyn Dataset, batch: &Batch) -> Result<Vec<Option<Vec<i64>>>> {
        let is_decoded = self.stages.plan.draft.model.objective() == Objective::SequenceToSequence;
        let of_row = |name: &str, row: usize| {
            let values = batch.tensors.get(name)?.ints();
            let width = values.len() / batch.microbatch.rows;
            Some(values[row * width..][..width].to_vec())
        };
        let samples = batch.microbatch.indices.iter().enumerate();
        let seen = samples.map(|(row, &index)| {
            if is_decoded {
                // The mask is of what the encoder reads; the decoder's padding has no labels.
                let labels = of_row(LABELS, row).unwrap_or_default();
                let has_label = labels
                    .iter()
                    .map(|&label| i64::from(label != IGNORED_LABEL));
                return Ok(Some(has_label.collect()));
            }
            match of_row(ATTENTION_MASK, row) {
                Some(mask) => Ok(Some(mask)),
                None => data.mask(index),
            }
        });
        seen.collect()
    }

    /// The metrics over all ranks, on every rank: the mean loss over the labels, and what follows
    /// from it or was counted.
    fn metrics_of(&self, sums: Sums) -> Result<EvaluationMetrics> {
        let counts_classes = sums.classes.is_some();
        let mut numbers = vec![
            0.0;
            if counts_classes {
                1 + ClassCounts::NAMES.len()
            } else {
                1
            }
        ];
        if self.stages.has_last() {
            let group = self.stages.mpu.data_parallel_group();
            let loss = group.all_reduce_scalar(sums.loss, ReduceOp::Sum)?;
            let labels = group.all_reduce_scalar(sums.labels, ReduceOp::Sum)?;
            if labels == 0 {
                if !self.args.only_predicts() {
                    tracing::warn!("no sample of the evaluation has a label: its loss is 0");
                }
            } else {
                numbers[0] = loss / labels as f64;
            }
            if let Some(classes) = sums.classes {
                numbers[1..].copy_from_slice(&classes.summed(group)?.metrics());
            }
        }
        let numbers = self.all_of_last_stage(numbers)?;
        let mut metrics = ClassCounts::named(&numbers[1..]);
        if !has_classes(self.stages.plan.draft.model.objective()) {
            metrics.insert(PERPLEXITY.to_owned(), numbers[0].exp());
        }
        Ok(EvaluationMetrics {
            step: self.progress.global_step,
            eval_loss: numbers[0],
            metrics,
            ..EvaluationMetrics::default()
        })
    }

    /// The caller's metrics of predictions, which rank 0 computes, on every rank.
    fn computed(
        &self,
        compute: &ComputeMetrics,
        output: &PredictionOutput,
    ) -> Result<BTreeMap<String, f64>> {
        let world = self.stages.mpu.world_group();
        let computed = self.stages.mpu.is_rank_0().then(|| compute(output));
        let (names, values): (Vec<_>, Vec<_>) = computed.into_iter().flatten().unzip();
        let names = serde_json::to_vec(&names).expect("names are text");
        let names = world.broadcast_bytes(names, 0)?;
        let names: Vec<String> = serde_json::from_slice(&names).expect("rank 0 wrote names");
        // Bits, as JSON has no infinities.
        let values = if values.is_empty() {
            vec![0.0; names.len()]
        } else {
            values
        };
        let values = world.broadcast_vec(values, 0)?;
        let prefixed = |name: String| match name.strip_prefix(MetricName::PREFIX) {
            Some(_) => name,
            None => format!("{}{name}", MetricName::PREFIX),
        };
        Ok(names.into_iter().map(prefixed).zip(values).collect())
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
    /// Counts of classes, for models of classes.
    classes: Option<ClassCounts>,
    /// Predictions of a kind, of the iteration in hand.
    rows: Option<(PredictionKind, Rows)>,
    /// Whether the log has named samples whose loss is not finite.
    has_infinite: bool,
}

impl Sums {
    /// Whether something is kept besides the loss.
    fn keeps(&self) -> bool {
        self.classes.is_some() || self.rows.is_some()
    }
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
    EvaluationOrder::new(
        samples,
        shape(args, samples),
        args.eval_iters,
        args.dataloader_drop_last,
    )
}

/// The order of all samples.
pub(super) fn all(args: &CheckedArguments, samples: usize) -> Result<EvaluationOrder> {
    EvaluationOrder::new(samples, shape(args, samples), None, false)
}

fn shape(args: &CheckedArguments, samples: usize) -> BatchShape {
    BatchShape {
        batch: args.evaluation_batch(samples),
        microbatches: args.gradient_accumulation_steps,
        dp: args.dp,
    }
}
