//! The predictions of samples on their way to rank 0.

use super::{Predicted, PredictionKind, SamplePrediction};
use crate::{data::IGNORED_LABEL, error::Result};
use merak_mpu::Group;
use std::collections::VecDeque;

/// Predictions and labels of some samples, by their place in the data set.
#[derive(Debug, Clone, Default)]
pub(in crate::trainer) struct Rows(Vec<SamplePrediction>);

/// What rank 0 does with the prediction of a sample.
pub(in crate::trainer) type Take<'a> = dyn FnMut(SamplePrediction) -> Result<()> + 'a;

/// Predictions of a kind on their way to rank 0, which takes them in the order of the data set.
pub(in crate::trainer) struct Delivery<'a> {
    kind: PredictionKind,
    take: &'a mut Take<'a>,
    /// The rows of iterations whose gathering this rank has not met.
    waiting: VecDeque<Rows>,
}

impl<'a> Delivery<'a> {
    pub(in crate::trainer) fn new(kind: PredictionKind, take: &'a mut Take<'a>) -> Self {
        Self {
            kind,
            take,
            waiting: VecDeque::new(),
        }
    }

    pub(in crate::trainer) fn kind(&self) -> PredictionKind {
        self.kind
    }

    /// Sends this rank's rows of an iteration. Rank 0 takes the samples of the iteration `lag`
    /// before it, so that it has work while the rest of the pipeline ends this one.
    ///
    /// # Communication
    /// A gathering over the world, in which rank 0 alone waits.
    pub(in crate::trainer) fn send(&mut self, rows: Rows, world: &Group, lag: usize) -> Result<()> {
        self.waiting.push_back(rows);
        let lag = if world.rank() == 0 { lag } else { 0 };
        while self.waiting.len() > lag {
            self.gather_first(world)?;
        }
        Ok(())
    }

    /// Takes the samples of the last iterations.
    pub(in crate::trainer) fn finish(mut self, world: &Group) -> Result<()> {
        while !self.waiting.is_empty() {
            self.gather_first(world)?;
        }
        Ok(())
    }

    fn gather_first(&mut self, world: &Group) -> Result<()> {
        let rows = self.waiting.pop_front().unwrap_or_default();
        rows.gather(world)?
            .into_iter()
            .try_for_each(&mut *self.take)
    }
}

impl Rows {
    /// Adds the samples of a microbatch. `labels` are those of all its rows; `seen` tells of each
    /// sample which positions are no padding, where the data tell.
    pub(in crate::trainer) fn add(
        &mut self,
        kind: PredictionKind,
        samples: &[usize],
        predicted: &Predicted,
        (labels, seen): (&[i64], &[Option<Vec<i64>>]),
    ) {
        let rows = predicted.shape[0];
        let (size, width) = (predicted.of_sample(), predicted.width());
        let of_labels = labels.len() / rows;
        // Rows after the samples are filled up.
        for (row, &sample) in samples.iter().enumerate() {
            let values = &predicted.values[row * size..][..size];
            let labels = &labels[row * of_labels..][..of_labels];
            let seen = seen.get(row).and_then(Option::as_deref);
            self.0.push(SamplePrediction {
                sample,
                predictions: reduced(kind, values, width, (labels, seen)),
                labels: labels.to_vec(),
            });
        }
    }

    /// The predictions and labels of all members' samples, in the order of the data set, on member
    /// 0; empty elsewhere.
    ///
    /// # Communication
    /// A gathering.
    fn gather(self, world: &Group) -> Result<Vec<SamplePrediction>> {
        let parts = world.gather_bytes(self.to_bytes(), 0)?;
        let mut rows: Vec<_> = parts.iter().flat_map(|part| from_bytes(part)).collect();
        rows.sort_by_key(|row| row.sample);
        Ok(rows)
    }

    /// For each row its place, its two lengths and its numbers.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for row in &self.0 {
            for number in [row.sample, row.predictions.len(), row.labels.len()] {
                bytes.extend_from_slice(&(number as u64).to_le_bytes());
            }
            let predictions = row.predictions.iter();
            bytes.extend(predictions.flat_map(|value| value.to_le_bytes()));
            bytes.extend(row.labels.iter().flat_map(|label| label.to_le_bytes()));
        }
        bytes
    }
}

/// The rows that a member has written.
fn from_bytes(bytes: &[u8]) -> Vec<SamplePrediction> {
    let mut rest = bytes;
    let mut rows = Vec::new();
    while !rest.is_empty() {
        let [sample, predictions, labels] =
            std::array::from_fn(|_| u64::from_le_bytes(taken(&mut rest)) as usize);
        let predictions = (0..predictions)
            .map(|_| f32::from_le_bytes(taken(&mut rest)))
            .collect();
        let labels = (0..labels)
            .map(|_| i64::from_le_bytes(taken(&mut rest)))
            .collect();
        rows.push(SamplePrediction {
            sample,
            predictions,
            labels,
        });
    }
    rows
}

/// Takes `N` bytes from the front of a member's own encoding.
fn taken<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (front, rest) = bytes.split_first_chunk().expect("a rank's own rows");
    *bytes = rest;
    *front
}

/// What is kept of a sample's values, whose last axis is `width` wide.
fn reduced(
    kind: PredictionKind,
    values: &[f32],
    width: usize,
    (labels, seen): (&[i64], Option<&[i64]>),
) -> Vec<f32> {
    let positions = values.chunks(width);
    match kind {
        PredictionKind::Logits => values.to_vec(),
        PredictionKind::Probabilities => positions.flat_map(softmax).collect(),
        PredictionKind::Losses => positions.zip(labels).map(loss).collect(),
        PredictionKind::Embeddings => mean(positions, seen, width),
    }
}

/// The logarithm of the sum of the exponentials.
fn log_sum(logits: &[f32]) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let top = f64::from(top);
    let exponentials = logits.iter().map(|&logit| (f64::from(logit) - top).exp());
    top + exponentials.sum::<f64>().ln()
}

fn softmax(logits: &[f32]) -> impl Iterator<Item = f32> {
    let log_sum = log_sum(logits);
    let probability = move |&logit: &f32| (f64::from(logit) - log_sum).exp() as f32;
    logits.iter().map(probability)
}

fn loss((logits, &label): (&[f32], &i64)) -> f32 {
    let target = usize::try_from(label)
        .ok()
        .filter(|_| label != IGNORED_LABEL);
    let logit = target.and_then(|target| logits.get(target));
    logit.map_or(f32::NAN, |&logit| {
        (log_sum(logits) - f64::from(logit)) as f32
    })
}

/// The mean over the positions that are seen; over all where nothing tells of padding, or all are.
fn mean<'a>(
    positions: impl Iterator<Item = &'a [f32]>,
    seen: Option<&[i64]>,
    width: usize,
) -> Vec<f32> {
    let seen = seen.filter(|seen| seen.iter().any(|&mask| mask != 0));
    let (mut sum, mut count) = (vec![0.0_f64; width], 0_usize);
    for (place, position) in positions.enumerate() {
        let mask = seen.and_then(|seen| seen.get(place));
        if mask.is_none_or(|&mask| mask != 0) {
            count += 1;
            for (sum, &value) in sum.iter_mut().zip(position) {
                *sum += f64::from(value);
            }
        }
    }
    let count = count.max(1) as f64;
    sum.into_iter().map(|sum| (sum / count) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_their_encoding() {
        let row = |sample, predictions: &[f32], labels: &[i64]| SamplePrediction {
            sample,
            predictions: predictions.to_vec(),
            labels: labels.to_vec(),
        };
        let rows = Rows(vec![
            row(7, &[0.5, f32::INFINITY], &[-100]),
            row(0, &[], &[1, 2]),
        ]);
        assert_eq!(from_bytes(&rows.to_bytes()), rows.0);
    }

    #[test]
    fn a_sample_is_reduced_by_the_kind_of_its_prediction() {
        let (values, labels) = ([0.0, 0.0, 3.0, 1.0], [1, IGNORED_LABEL]);
        let of = |kind, seen| reduced(kind, &values, 2, (&labels, seen));
        assert_eq!(of(PredictionKind::Logits, None), values);
        let probabilities = of(PredictionKind::Probabilities, None);
        assert_eq!(probabilities[..2].to_vec(), [0.5, 0.5]);
        assert!((probabilities[2] - 0.880_797).abs() < 1e-6);
        let losses = of(PredictionKind::Losses, None);
        assert!((losses[0] - std::f32::consts::LN_2).abs() < 1e-6 && losses[1].is_nan());
        assert_eq!(of(PredictionKind::Embeddings, None), [1.5, 0.5]);
        let seen: &[i64] = &[0, 1];
        assert_eq!(of(PredictionKind::Embeddings, Some(seen)), [3.0, 1.0]);
        // A sample without labels has an embedding too.
        let none: &[i64] = &[0, 0];
        assert_eq!(of(PredictionKind::Embeddings, Some(none)), [1.5, 0.5]);
    }
}
