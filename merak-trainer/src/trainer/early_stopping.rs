//! The end of a run whose evaluations get no better.

use super::{Callback, EvaluationMetrics, TrainerControl, best::is_better};
use crate::config::CheckedArguments;
use serde::{Deserialize, Serialize};

/// Ends training after a number of evaluations without improvement, as the callback of that name
/// in transformers does.
///
/// An evaluation improves on the best one so far if it is better by more than the threshold. The
/// best one is the best by any margin. A metric that is not finite never improves.
///
/// With the key `early_stopping_patience` every trainer has one, whose state is saved and resumed.
#[derive(Debug, Clone, PartialEq)]
pub struct EarlyStopping {
    metric: String,
    greater_is_better: bool,
    patience: usize,
    threshold: f64,
    state: Waiting,
}

/// How long an improvement is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Waiting {
    /// The best value so far.
    best: Option<f64>,
    /// Evaluations since the last improvement.
    evaluations: usize,
}

impl EarlyStopping {
    /// Waits for `patience` evaluations in which `metric` does not improve by more than
    /// `threshold`; `metric` is the name of a metric with its prefix `eval_`.
    pub fn new(metric: &str, greater_is_better: bool, patience: usize, threshold: f64) -> Self {
        Self {
            metric: metric.to_owned(),
            greater_is_better,
            patience,
            threshold,
            state: Waiting::default(),
        }
    }

    /// As the arguments say; `None` without `early_stopping_patience`.
    pub(super) fn of(args: &CheckedArguments) -> Option<Self> {
        let metric = &args.metric_for_best_model.0;
        let greater = args.greater_is_better();
        let new = |patience| Self::new(metric, greater, patience, args.early_stopping_threshold);
        args.early_stopping_patience.map(new)
    }

    /// Evaluations since the last improvement.
    pub fn waited(&self) -> usize {
        self.state.evaluations
    }

    pub(super) fn state(&self) -> Waiting {
        self.state
    }

    pub(super) fn restore(&mut self, state: Waiting) {
        self.state = state;
    }

    /// Whether the patience is over.
    pub(super) fn is_over(&self) -> bool {
        self.state.evaluations >= self.patience
    }

    fn judge(&mut self, value: f64) {
        let Waiting { best, evaluations } = &mut self.state;
        let is_better = is_better(value, *best, self.greater_is_better);
        let is_enough = best.is_none_or(|best| (value - best).abs() > self.threshold);
        if is_better {
            *best = Some(value);
        }
        if is_better && is_enough {
            *evaluations = 0;
        } else {
            *evaluations += 1;
        }
    }
}

impl Callback for EarlyStopping {
    fn on_evaluate(&mut self, metrics: &EvaluationMetrics, control: &mut TrainerControl) {
        let Some(value) = metrics.get(&self.metric) else {
            tracing::warn!(
                metric = self.metric,
                "the evaluation has no such metric: early stopping does not count it"
            );
            return;
        };
        self.judge(value);
        if self.is_over() {
            tracing::info!(
                metric = self.metric,
                evaluations = self.state.evaluations,
                best = self.state.best,
                "training ends early: the evaluations got no better"
            );
            control.should_training_stop = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of the evaluation after which training ends.
    fn stops_after(
        values: &[f64],
        (greater, patience, threshold): (bool, usize, f64),
    ) -> Option<usize> {
        let mut stopping = EarlyStopping::new("eval_loss", greater, patience, threshold);
        let mut ends = |&eval_loss: &f64| {
            let mut control = TrainerControl::default();
            let metrics = EvaluationMetrics {
                eval_loss,
                ..EvaluationMetrics::default()
            };
            stopping.on_evaluate(&metrics, &mut control);
            control.should_training_stop
        };
        values.iter().position(&mut ends).map(|index| index + 1)
    }

    #[test]
    fn patience_counts_evaluations_in_a_row_without_improvement() {
        let values = [3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 1.95, 1.0];
        assert_eq!(stops_after(&values, (false, 1, 0.0)), Some(3));
        assert_eq!(stops_after(&values, (false, 2, 0.0)), Some(6));
        assert_eq!(stops_after(&values, (false, 4, 0.0)), None);
        assert_eq!(stops_after(&values, (true, 1, 0.0)), Some(2));
    }

    #[test]
    fn small_improvements_move_the_best_and_do_not_count() {
        // As in transformers, each is compared with the best by any margin.
        let values = [3.0, 2.95, 2.9, 2.85];
        assert_eq!(stops_after(&values, (false, 2, 0.1)), Some(3));
        assert_eq!(stops_after(&values, (false, 2, 0.01)), None);
    }

    #[test]
    fn what_is_not_finite_never_improves() {
        let values = [f64::NAN, f64::INFINITY, f64::NAN];
        assert_eq!(stops_after(&values, (false, 3, 0.0)), Some(3));
        assert_eq!(stops_after(&values, (true, 2, 0.0)), Some(2));
    }
}
