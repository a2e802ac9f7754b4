//! One optimizer step.

use super::{MerakTrainer, callback::Told, run_progress::Instruction};
use crate::{
    data::{
        ATTENTION_MASK, Batch, Collation, DOCUMENT_IDS, Dataset, LABELS, Loader, Names, Requests,
    },
    error::{DataError, Error, Result, StepPart},
    stage::{NamedTensors, StepInputs, StepModule, StepResult, count},
};
use merak_mpu::{ReduceOp, into_vec};
use merak_pipe::panic_message;
use merak_trace::Value;
use std::{
    panic::{self, AssertUnwindSafe},
    sync::Arc,
    time::{Duration, Instant},
};

/// What a step did, the same on every rank except for the times.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// Steps done with this one.
    pub step: usize,
    /// Mean loss over the labels of the global batch.
    pub loss: f64,
    /// Norm of the averaged gradients before clipping, without the loss scale.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// What the gradient of the loss was multiplied by, under `fp16`.
    pub loss_scale: Option<f64>,
    /// Tokens of the global batch.
    pub tokens: u64,
    /// The first parameter with a gradient that is not finite, because of which nothing was
    /// updated.
    pub skipped: Option<String>,
    /// Steps of the run that changed nothing because a gradient was not finite, this one included.
    pub skipped_steps: u64,
    /// How much of the step this rank waited for its batches; zero on a rank that reads none.
    pub data_wait: Duration,
    /// How long the step took on this rank.
    pub time: Duration,
}

impl MerakTrainer {
    /// Makes one optimizer step.
    ///
    /// # Communication
    /// The pipeline's hops, the collectives of the tensor-parallel graph, those of the optimizer,
    /// an all-reduce of the count of labels over the data group and a broadcast of the loss over
    /// the pipeline.
    ///
    /// # Errors
    /// When a rank fails.
    pub fn train_step(&mut self) -> Result<StepReport> {
        self.progress.order()?;
        let step = self.progress.global_step + 1;
        self.within(StepPart::Train, step, Self::step)
    }

    /// Runs a part of a step, whose number stands on each event: no filter that shows one leaves
    /// out a span of errors. A failure, also by a panic, names its place.
    pub(super) fn within<T>(
        &mut self,
        part: StepPart,
        step: usize,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let _span = tracing::error_span!("step", step, ?part).entered();
        // A trainer that has failed is not used again, so no broken invariant is seen.
        let outcome = panic::catch_unwind(AssertUnwindSafe(|| work(self)));
        let outcome = outcome.unwrap_or_else(|payload| {
            let message = panic_message(&*payload);
            Err(Error::Panicked { message })
        });
        self.placed(part, step, outcome)
    }

    /// Adds rank, stages and the part of the step to a failure. Before the first step, a mistake of
    /// the user stays as it is.
    pub(super) fn placed<T>(&self, part: StepPart, step: usize, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| match error {
            error @ (Error::Step { .. } | Error::SkippedSteps { .. } | Error::Diverged { .. }) => {
                error
            }
            error if step == 0 && error.is_user_error() => error,
            error => Error::Step {
                rank: self.stages.mpu.rank().0,
                stages: self
                    .stages
                    .stages
                    .iter()
                    .map(|stage| stage.number)
                    .collect(),
                part,
                step,
                source: Box::new(error),
            },
        })
    }

    fn step(&mut self) -> Result<StepReport> {
        let start = Instant::now();
        self.records.begin();
        let (loss, tokens) = self.backward_step(self.progress.global_step, true)?;
        self.saving.wait_copied();
        let updates = self.stages.optimizer.progress().steps;
        let lr = self.lr(updates)?;
        let update_start = Instant::now();
        let update = self.stages.update(lr)?;
        self.progress.advance(tokens);
        self.records.lap(Instruction::OptimizerStep, update_start);
        let time = start.elapsed();
        self.records.note(start, time);
        Ok(StepReport {
            step: self.progress.global_step,
            loss,
            grad_norm: update.grad_norm,
            lr,
            loss_scale: update.loss_scale,
            tokens,
            skipped: update.skipped,
            skipped_steps: self.stages.optimizer.progress().skipped,
            data_wait: self.records.data_wait(),
            time,
        })
    }

    /// The learning rate after some updates.
    fn lr(&self, updates: u64) -> Result<f64> {
        let length = &self.progress.length;
        let Some(schedule) = &self.parts.lr_scheduler else {
            return Ok(length.schedule.lr(updates));
        };
        let lr = schedule(updates, length.total_steps);
        if lr.is_finite() && lr >= 0.0 {
            Ok(lr)
        } else {
            Err(Error::LearningRate { lr, updates })
        }
    }

    /// The gradients of the next step's global batch, summed over the uses of tied weights and not
    /// yet reduced over replicas; the loss beside them. The run then stands where it stood before.
    /// For tests and tools.
    ///
    /// # Errors
    /// When a rank fails.
    pub fn gradients(&mut self) -> Result<(f64, NamedTensors)> {
        let (loss, _) = self.backward_step(self.progress.global_step, false)?;
        let gradients = self.stages.gradients()?;
        // The step itself is still to come: its batches are read again, its gradients start from
        // zero.
        self.loader = None;
        self.stages.clear_gradients();
        Ok((loss, gradients))
    }

    /// This rank's slices of the parameters. For tests and tools.
    ///
    /// # Communication
    /// In ZeRO stage 3 an all-gather over the replicas, which all call it together.
    ///
    /// # Errors
    /// When a rank fails.
    pub fn parameters(&self) -> Result<NamedTensors> {
        self.stages.parameters()
    }

    /// Runs the schedule over a global batch. Returns loss and tokens; the gradients stay in the
    /// store, averaged over the replicas if `reduces`.
    fn backward_step(&mut self, step: usize, reduces: bool) -> Result<(f64, u64)> {
        let start = Instant::now();
        let batches = self.next_batches(step)?;
        self.records.lap(Instruction::LoadMicroBatch, start);
        let (labels, loss_grad) = self.loss_grad(&batches)?;
        self.warn_of_no_labels(&batches, labels);
        let dp_rank = self.stages.mpu.data_parallel_rank();
        let order = self.progress.order()?;
        let first_samples = (0..self.args.gradient_accumulation_steps)
            .map(|m| order.microbatch(step, dp_rank, m).first_position);
        let contexts = first_samples
            .map(|first| self.stages.context(step, first, true))
            .collect();
        let inputs = StepInputs {
            contexts,
            batches,
            loss_grad,
        };
        let mut module = StepModule::training(&mut self.stages, inputs);
        if reduces {
            module = module.reducing_early();
        }
        let mut told = Told(&mut self.parts.callbacks);
        let spans = self
            .engine
            .run_observed(&mut module, &mut self.link, &mut told)?;
        self.records.timeline = spans;
        let result = module.finish();
        let start = Instant::now();
        if reduces {
            self.stages.reduce_gradients()?;
        }
        self.records.lap(Instruction::ReduceGrads, start);
        let loss = self.mean_loss(&result, labels)?;
        let tokens = self.args.global_batch() * self.stages.plan.draft.seq_length;
        Ok((loss, tokens as u64))
    }

    /// The step's batches, where a stage of the rank reads data.
    fn next_batches(&mut self, step: usize) -> Result<Vec<Batch>> {
        if !self.stages.reads_data() {
            return Ok(Vec::new());
        }
        let microbatches = self.args.gradient_accumulation_steps;
        if self.loader.is_none() {
            let order = self.progress.order()?.clone();
            let dp_rank = self.stages.mpu.data_parallel_rank();
            let total = self.progress.length.total_steps;
            let request = move |n: usize| {
                let step = step + n / microbatches;
                (step < total).then(|| order.microbatch(step, dp_rank, n % microbatches))
            };
            let data = Arc::clone(
                self.parts
                    .train_data
                    .as_ref()
                    .expect("an order is made of training data"),
            );
            self.warn_of_whole_samples(&*data);
            self.loader = Some(Loader::with_collation(
                data,
                Arc::new(request) as Requests,
                self.args.dataloader_num_workers,
                self.collation(),
            )?);
        }
        let loader = self.loader.as_mut().expect("it was just made");
        let batches = loader.take(microbatches).collect::<Result<Vec<_>>>()?;
        let checked = batches.into_iter().map(|batch| self.check_batch(batch));
        checked.collect()
    }

    /// Warns where `split_inputs` saves nothing.
    fn warn_of_whole_samples(&self, data: &dyn Dataset) {
        let reads_whole = self.parts.data_collator.is_some() || !data.reads_tensors();
        if self.args.split_inputs && reads_whole && self.stages.mpu.is_rank_0() {
            tracing::warn!("\"split_inputs\" does nothing: these data are read in whole samples");
        }
    }

    /// Refuses documents that the model would take for one, and integers that this rank's stages
    /// cannot look up.
    pub(super) fn check_batch(&self, batch: Batch) -> Result<Batch> {
        let plan = &self.stages.plan;
        let mut inputs = plan.graph.inputs().iter();
        if batch.tensors.contains_key(DOCUMENT_IDS)
            && !inputs.any(|input| input.name == DOCUMENT_IDS)
        {
            return Err(Error::Data(DataError::UnreadDocuments {
                family: plan.draft.info.family,
            }));
        }
        let is_read = |name: &str| self.stages.inputs().any(|input| input == name);
        self.inputs.check_batch(&batch, is_read)?;
        Ok(batch)
    }

    /// How samples become microbatches.
    pub(super) fn collation(&self) -> Collation {
        Collation {
            collator: self.parts.data_collator.clone(),
            shift_labels: self.args.shift_labels,
            names: self
                .args
                .split_inputs
                .then(|| Arc::new(self.needed_tensors())),
        }
    }

    /// The tensors of a sample that this rank needs: those that its stages read, and of the last
    /// stage what losses and predictions are counted and cut by.
    fn needed_tensors(&self) -> Names {
        let counted = [LABELS, ATTENTION_MASK, DOCUMENT_IDS];
        let counted = counted.into_iter().filter(|_| self.stages.has_last());
        let read = self.stages.inputs();
        read.chain(counted).map(str::to_owned).collect()
    }

    /// Labels of the global batch, and the gradient of each loss that makes the average over the
    /// `N` ranks with the same parameters the mean over all labels, `N / labels`, times the loss
    /// scale. Ranks that share a sequence read the same labels and have summands of its gradients.
    /// Zero on ranks without labels, which need neither.
    fn loss_grad(&self, batches: &[Batch]) -> Result<(f64, f64)> {
        let mpu = &self.stages.mpu;
        if !self.stages.has_last() {
            return Ok((0.0, 0.0));
        }
        let replicas = mpu.data_sequence_parallel_world_size();
        let own = count(batches, self.stages.plan.draft.loss_count);
        let labels = mpu.data_parallel_group();
        let labels = labels.all_reduce_scalar(own, ReduceOp::Sum)? as f64;
        let grad = if labels == 0.0 {
            0.0
        } else {
            self.stages.optimizer.loss_scale() * replicas as f64 / labels
        };
        Ok((labels, grad))
    }

    /// Warns where no sample of a step has a label, on one of the ranks that know.
    fn warn_of_no_labels(&self, batches: &[Batch], labels: f64) {
        let mpu = &self.stages.mpu;
        let tells = mpu.data_parallel_rank() == 0 && mpu.sequence_tensor_parallel_rank() == 0;
        if labels == 0.0 && self.stages.has_last() && tells {
            let indices = batches.iter().map(|batch| &batch.microbatch.indices);
            let samples: Vec<_> = indices.flatten().copied().collect();
            tracing::warn!(
                ?samples,
                "no sample of the step has a label: its loss is 0 and its gradients are zero"
            );
        }
    }

    /// The mean loss, on every rank.
    fn mean_loss(&self, result: &StepResult, labels: f64) -> Result<f64> {
        let mpu = &self.stages.mpu;
        let mut loss = 0.0;
        if self.stages.has_last() {
            let sum: f64 = self.losses(result)?.into_iter().sum();
            let sum = mpu
                .data_parallel_group()
                .all_reduce_scalar(sum, ReduceOp::Sum)?;
            loss = if labels == 0.0 { 0.0 } else { sum / labels };
        }
        self.of_last_stage(loss)
    }

    /// A number of the rank with the last stage, on every rank of the pipeline.
    fn of_last_stage(&self, number: f64) -> Result<f64> {
        Ok(self.all_of_last_stage(vec![number])?[0])
    }

    /// Numbers of the rank with the last stage, on every rank of the pipeline; all ranks give as
    /// many.
    pub(super) fn all_of_last_stage(&self, numbers: Vec<f64>) -> Result<Vec<f64>> {
        let last = self.stages.plan.last_rank();
        let group = self.stages.mpu.pipeline_parallel_group();
        Ok(group.broadcast_vec(numbers, last)?)
    }

    /// The losses of this rank's microbatches, in their order.
    pub(super) fn losses(&self, result: &StepResult) -> Result<Vec<f64>> {
        let outputs = result.outputs.values();
        outputs.map(|outputs| self.scalar(&outputs[0])).collect()
    }

    fn scalar(&self, value: &Value) -> Result<f64> {
        let buffer = self.stages.backend.into_buffer(value.clone())?;
        Ok(into_vec::<f64>(buffer)?[0])
    }
}
