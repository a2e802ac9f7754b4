//! What a model says of each sample of a data set.

mod classes;
mod rows;

pub(super) use self::{
    classes::ClassCounts,
    rows::{Delivery, Rows},
};

use super::{EvaluationMetrics, MerakTrainer, evaluation};
use crate::{
    data::{Dataset, EvaluationOrder},
    error::{DataError, Error, Result, StepPart},
    plan::ForwardOutput,
    stage::floats,
};
use merak_trace::{Value, models::Objective};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, sync::Arc};

/// What is predicted of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PredictionKind {
    /// The probability of each class, `[C]`, or of each token at each position, `[S, V]`.
    Probabilities,
    /// The loss in nats at each position, `[S]`, NaN where there is no label; `[1]` of a class.
    Losses,
    /// The inputs of the model's head, `[H]`: the mean over the positions that are no padding, of
    /// an encoder-decoder those of the decoder with a label; over all where there is none of these.
    Embeddings,
    /// What the probabilities are made of, in the same shapes.
    Logits,
}

impl PredictionKind {
    /// What is predicted unless something else is asked for: probabilities of classes, losses of
    /// tokens.
    pub fn of(objective: Objective) -> Self {
        if has_classes(objective) {
            Self::Probabilities
        } else {
            Self::Losses
        }
    }

    /// What the forward has to give.
    pub(super) fn output(self) -> ForwardOutput {
        match self {
            Self::Embeddings => ForwardOutput::LossAndHidden,
            Self::Probabilities | Self::Losses | Self::Logits => ForwardOutput::LossAndLogits,
        }
    }
}

/// Whether a model gives each sample one class.
pub(super) fn has_classes(objective: Objective) -> bool {
    matches!(
        objective,
        Objective::SequenceClassification | Objective::ImageClassification
    )
}

/// Predictions of a data set, in its order, each sample once.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PredictionOutput {
    /// Of each sample what [`PredictionKind`] says, in row-major order; empty except on rank 0.
    pub predictions: Vec<Vec<f32>>,
    /// The labels of each sample; empty except on rank 0.
    pub label_ids: Vec<Vec<i64>>,
    /// What [`MerakTrainer::evaluate`] measures, of this data set; the same on every rank.
    pub metrics: EvaluationMetrics,
}

/// What is predicted of one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplePrediction {
    /// Its place in the data set.
    pub sample: usize,
    /// What [`PredictionKind`] says, in row-major order.
    pub predictions: Vec<f32>,
    /// Its labels.
    pub labels: Vec<i64>,
}

/// Computes metrics from the predictions of an evaluation: a name, to which `eval_` is added where
/// it does not begin so, and a value.
pub type ComputeMetrics = Arc<dyn Fn(&PredictionOutput) -> BTreeMap<String, f64> + Send + Sync>;

/// What one forward of a microbatch says of its samples.
pub(super) struct Predicted {
    /// Sizes of the values, the first that of the microbatch.
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}

impl fmt::Debug for Predicted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Predicted")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Predicted {
    /// Values per sample.
    pub(super) fn of_sample(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// The numbers of the last axis: classes, or the width.
    pub(super) fn width(&self) -> usize {
        *self.shape.last().expect("it has axes")
    }
}

impl MerakTrainer {
    /// Predicts every sample of a data set once: [`PredictionKind::of`] the model's objective, or
    /// logits with `return_logits`. Rank 0 holds all predictions in memory.
    ///
    /// # Communication
    /// As [`MerakTrainer::predict_each`].
    ///
    /// # Errors
    /// When there are no samples, or a rank fails.
    pub fn predict(&mut self, data: &dyn Dataset) -> Result<PredictionOutput> {
        let kind = self.prediction_kind();
        self.predict_as(data, kind)
    }

    /// As [`MerakTrainer::predict`], with predictions of a given kind.
    ///
    /// # Errors
    /// As [`MerakTrainer::predict`], and when the model has no logits, or no head, of its own.
    pub fn predict_as(
        &mut self,
        data: &dyn Dataset,
        kind: PredictionKind,
    ) -> Result<PredictionOutput> {
        self.predict_by(data, |trainer, order| trainer.gathered(data, order, kind))
    }

    /// As [`MerakTrainer::predict_as`], with the samples given to `take` on rank 0 as they are
    /// predicted, in the order of the data set. A rank holds the predictions of a few iterations
    /// only.
    ///
    /// # Communication
    /// That of [`MerakTrainer::evaluate`], and after each iteration a gathering of its predictions
    /// to rank 0.
    ///
    /// # Errors
    /// As [`MerakTrainer::predict_as`], and those of `take`, which end the prediction.
    pub fn predict_each(
        &mut self,
        data: &dyn Dataset,
        kind: PredictionKind,
        take: &mut dyn FnMut(SamplePrediction) -> Result<()>,
    ) -> Result<EvaluationMetrics> {
        self.predict_by(data, |trainer, order| {
            trainer.pass_over(data, order, Some(Delivery::new(kind, take)))
        })
    }

    /// Calls `predict` with the order of all samples.
    fn predict_by<T>(
        &mut self,
        data: &dyn Dataset,
        predict: impl FnOnce(&mut Self, &EvaluationOrder) -> Result<T>,
    ) -> Result<T> {
        let step = self.progress.global_step;
        self.within(StepPart::Evaluate, step, |trainer| {
            if data.is_stream() {
                let purpose = "a prediction";
                return Err(Error::Data(DataError::Endless { purpose }));
            }
            let order = evaluation::all(&trainer.args, data.len())?;
            predict(trainer, &order)
        })
    }

    /// Forwards samples in their order, and gathers all predictions on rank 0.
    pub(super) fn gathered(
        &mut self,
        data: &dyn Dataset,
        order: &EvaluationOrder,
        kind: PredictionKind,
    ) -> Result<PredictionOutput> {
        let (mut predictions, mut label_ids) = (Vec::new(), Vec::new());
        let mut take = |sample: SamplePrediction| -> Result<()> {
            predictions.push(sample.predictions);
            label_ids.push(sample.labels);
            Ok(())
        };
        let metrics = self.pass_over(data, order, Some(Delivery::new(kind, &mut take)))?;
        Ok(PredictionOutput {
            predictions,
            label_ids,
            metrics,
        })
    }

    /// What [`MerakTrainer::predict`] predicts of a sample.
    pub fn prediction_kind(&self) -> PredictionKind {
        if self.args.return_logits {
            return PredictionKind::Logits;
        }
        PredictionKind::of(self.stages.plan.draft.model.objective())
    }

    /// What a forward gave beside the loss, on the host.
    pub(super) fn predicted(&self, value: Value) -> Result<Predicted> {
        let ty = value.ty().clone();
        let buffer = self.stages.backend.into_buffer(value)?;
        let mut values = Vec::new();
        buffer.read(&mut |bytes| values = floats(ty.dtype, bytes).into_owned());
        // The backend reuses the memory.
        drop(self.stages.backend.from_buffer(&ty, buffer)?);
        let shape = ty.shape.clone();
        Ok(Predicted { shape, values })
    }
}
