//! The averages of a rank's trained parameters.

use super::RankStages;
use crate::error::Result;

impl RankStages {
    /// Whether averages of trained parameters are kept.
    pub(crate) fn keeps_average(&self) -> bool {
        self.optimizer.keeps_average() && !self.plan.is_frozen()
    }

    /// Makes the averages, if they are kept, what the parameters are.
    ///
    /// # Communication
    /// That of [`RankStages::settle`].
    pub(crate) fn start_average(&mut self) -> Result<()> {
        if self.keeps_average() {
            self.settle()?;
            let optimizer = &mut self.optimizer;
            self.params
                .update(|params| optimizer.start_average(params))?;
        }
        Ok(())
    }

    /// Exchanges the trained parameters and their averages; a second call gives both back. All
    /// replicas call it together.
    ///
    /// # Communication
    /// That of [`RankStages::settle`], and again in ZeRO stages 1 and 2 an all-gather of each
    /// bucket.
    pub(crate) fn swap_average(&mut self) -> Result<()> {
        self.settle()?;
        let optimizer = &mut self.optimizer;
        Ok(self
            .params
            .update(|params| optimizer.swap_average(params))?)
    }
}
