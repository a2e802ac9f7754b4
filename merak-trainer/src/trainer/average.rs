//! Evaluations of the averages of the weights (`ema_decay`).

use super::{EvaluationMetrics, MerakTrainer};
use crate::{config::MetricName, error::Result};
use std::collections::BTreeMap;

/// The name of a metric where it is one of the averages: `eval_ema_loss` for `eval_loss`.
pub(super) fn of_averages(name: &str) -> String {
    let bare = name.strip_prefix(MetricName::PREFIX).unwrap_or(name);
    format!("{}ema_{bare}", MetricName::PREFIX)
}

impl MerakTrainer {
    /// What `measure` finds with the averages in the place of the weights, under names of their
    /// own; nothing where none are kept. The weights have their bits again after it.
    ///
    /// # Communication
    /// That of `measure`, and twice that of [`RankStages::swap_average`].
    ///
    /// [`RankStages::swap_average`]: crate::stage::RankStages::swap_average
    pub(super) fn measure_averages(
        &mut self,
        measure: impl FnOnce(&mut Self) -> Result<EvaluationMetrics>,
    ) -> Result<BTreeMap<String, f64>> {
        if !self.stages.keeps_average() {
            return Ok(BTreeMap::new());
        }
        // Threads of a save may still be copying the weights.
        self.saving.wait_copied();
        self.stages.swap_average()?;
        // A trainer that has failed is not used again, so it needs its weights no more.
        let metrics = measure(self)?;
        self.stages.swap_average()?;
        let names = metrics.names().into_iter();
        let renamed = names.filter_map(|name| Some((of_averages(name), metrics.get(name)?)));
        Ok(renamed.collect())
    }
}
