//! How often a model of classes is right.

use super::Predicted;
use crate::error::Result;
use merak_mpu::{Group, ReduceOp};
use std::collections::BTreeMap;

/// How often each class was predicted, was the label, and was both.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::trainer) struct ClassCounts {
    /// Of each class.
    counts: Vec<Counts>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Counts {
    right: i64,
    predicted: i64,
    labelled: i64,
}

impl ClassCounts {
    /// The metrics that come of it: the share of right predictions; the mean of the classes' F1
    /// scores, over the classes that occur as a label or a prediction (`average="macro"` of
    /// scikit-learn); and their mean by the labels of each class (`average="weighted"`).
    pub(in crate::trainer) const NAMES: [&str; 3] =
        ["eval_accuracy", "eval_f1_macro", "eval_f1_weighted"];

    /// Counts the samples of a microbatch that have a label; `predicted` gives each class of each
    /// sample a number, and the first of the largest wins.
    pub(in crate::trainer) fn add(&mut self, predicted: &Predicted, labels: &[i64]) {
        let classes = predicted.width();
        self.counts.resize(classes, Counts::default());
        for (row, &label) in predicted.values.chunks(classes).zip(labels) {
            // A label that does not count is negative.
            let Ok(label) = usize::try_from(label) else {
                continue;
            };
            let class = first_largest(row);
            self.counts[class].predicted += 1;
            if let Some(counts) = self.counts.get_mut(label) {
                counts.labelled += 1;
                counts.right += i64::from(class == label);
            }
        }
    }

    /// The counts of all members, which have the same classes.
    ///
    /// # Communication
    /// All-reduces of a number, and of three numbers a class.
    pub(in crate::trainer) fn summed(self, group: &Group) -> Result<Self> {
        let mut counts = self.counts;
        // A member without microbatches knows of no classes.
        let classes =
            group.all_reduce_scalar((counts.len() as u64).cast_signed(), ReduceOp::Max)? as usize;
        counts.resize(classes, Counts::default());
        let flat = counts
            .iter()
            .flat_map(|class| [class.right, class.predicted, class.labelled]);
        let sums = group.all_reduce_vec(flat.collect(), ReduceOp::Sum)?;
        let counts = sums.chunks_exact(3).map(|sum| Counts {
            right: sum[0],
            predicted: sum[1],
            labelled: sum[2],
        });
        Ok(Self {
            counts: counts.collect(),
        })
    }

    /// The metrics, in the order of [`ClassCounts::NAMES`]; 0 without samples.
    pub(in crate::trainer) fn metrics(&self) -> [f64; 3] {
        let share = |part: f64, whole: i64| if whole == 0 { 0.0 } else { part / whole as f64 };
        let all: i64 = self.counts.iter().map(|class| class.labelled).sum();
        let right: i64 = self.counts.iter().map(|class| class.right).sum();
        let seen = self.counts.iter().filter(|class| class.size() > 0);
        let (mut classes, mut f1, mut weighted) = (0, 0.0, 0.0);
        for class in seen {
            let score = 2.0 * class.right as f64 / class.size() as f64;
            classes += 1;
            f1 += score;
            weighted += score * class.labelled as f64;
        }
        [
            share(right as f64, all),
            share(f1, classes),
            share(weighted, all),
        ]
    }

    /// The metrics by name.
    pub(in crate::trainer) fn named(metrics: &[f64]) -> BTreeMap<String, f64> {
        let names = Self::NAMES.map(str::to_owned).into_iter();
        names.zip(metrics.iter().copied()).collect()
    }
}

impl Counts {
    /// Predictions and labels of the class together.
    fn size(self) -> i64 {
        self.predicted + self.labelled
    }
}

/// The place of the largest number, the first of equals.
fn first_largest(row: &[f32]) -> usize {
    let mut best = 0;
    for (place, &number) in row.iter().enumerate() {
        if number > row[best] {
            best = place;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_are_those_of_scikit_learn() {
        // y_true = [0, 1, 2, 0, 1, 2, 3], y_pred = [0, 2, 1, 0, 0, 1, 3]. accuracy_score: 3/7. F1
        // of the classes: 4/5, 0, 0, 1; f1_score: macro 0.45, weighted (2 * 0.8 + 1) / 7. Class 4
        // does not occur where there is a label.
        let (labels, predictions) = ([0, 1, 2, 0, 1, 2, 3, -100], [0, 2, 1, 0, 0, 1, 3, 4]);
        let mut values = vec![0.0; 8 * 5];
        for (sample, class) in predictions.into_iter().enumerate() {
            values[sample * 5 + class] = 1.0;
        }
        let predicted = Predicted {
            shape: vec![8, 5],
            values,
        };
        let mut counts = ClassCounts::default();
        counts.add(&predicted, &labels);
        let expected = [3.0 / 7.0, 0.45, (0.8 * 2.0 + 1.0) / 7.0];
        for (found, expected) in counts.metrics().into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
        assert!(ClassCounts::default().metrics().iter().all(|&m| m == 0.0));
    }

    #[test]
    fn the_first_of_equal_classes_wins() {
        assert_eq!(first_largest(&[0.5, 1.0, 1.0]), 1);
        assert_eq!(first_largest(&[f32::NAN, f32::NAN]), 0);
    }
}
