//! Merging of adapters into the weights.

use super::{MerakTrainer, loading::piece};
use crate::error::{Error, PlanError, Result};
use merak_ckpt::{Adapter, Kind, Piece};
use std::collections::BTreeSet;

impl MerakTrainer {
    /// Merges a PEFT adapter into this rank's slices of the weights, in place of the adapter that
    /// was merged before. With `None`, the weights have the bits of the base again, which are kept
    /// meanwhile. The factors of an adapter beside the layers (`lora_config`) are removed for good.
    /// Modules and biases that it trained themselves keep their trained values.
    ///
    /// # Communication
    /// None, except for the norms of layers with magnitudes (`use_dora`) in `lora_config`: for each
    /// whose inputs are cut over tensor-parallel ranks, an all-reduce of a number per output.
    ///
    /// # Errors
    /// When a merged weight is not finite, or several layers share it. The weights then are those
    /// of the base.
    pub fn set_adapter(&mut self, adapter: Option<&Adapter>) -> Result<()> {
        let tied = adapter.and_then(Adapter::tied_target);
        if let Some((param, layers)) = tied.and_then(|name| self.stages.plan.shared_layers(name)) {
            self.set_adapter(None)?;
            return Err(Error::Plan(PlanError::SharedTarget { param, layers }));
        }
        let params = &self.stages.table;
        let layouts = params
            .iter()
            .map(|param| self.layout(param))
            .collect::<Result<Vec<_>>>()?;
        let targets: BTreeSet<_> = adapter
            .iter()
            .flat_map(|adapter| adapter.targets())
            .collect();
        let base = &mut self.base_values;
        let dtypes: Vec<_> = (0..params.len()).map(|i| self.stages.stored(i)).collect();
        let mut outcome = Ok(());
        self.stages.settle()?;
        self.stages.params.write(&mut |index, values| {
            if params[index].beside.is_some() {
                values.fill(0);
            }
            if let Some(own) = base.remove(&index) {
                values.copy_from_slice(&own);
            }
            let is_target = targets.contains(params[index].name.as_str());
            if let Some(adapter) = adapter.filter(|_| is_target && outcome.is_ok()) {
                base.insert(index, values.to_vec());
                let piece = Piece {
                    dtype: dtypes[index],
                    ..piece(&Kind::Parameter, &params[index], &layouts[index], None)
                };
                outcome = adapter.merge(&piece, values);
            }
        });
        if let Err(error) = outcome {
            self.set_adapter(None)?;
            return Err(error.into());
        }
        // With zero factors, magnitudes are the norms of the present weights, so nothing is scaled.
        self.stages.start_magnitudes()
    }
}
