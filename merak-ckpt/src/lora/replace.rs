//! Whether the adapter of a checkpoint can be taken out of its weights.

use super::extract::{Trained, has_adapter};
use super::{Adapter, Update};
use crate::{Checkpoint, Error, Result};

/// Checks that a checkpoint without the adapter that it trained, and with `adapter` in its place if
/// one is given, is the model that this one was trained for. The factors can be left out; of biases
/// and modules that were trained beside them (`bias`, `modules_to_save`) a checkpoint has the
/// trained values alone, so `adapter` has to bring values of its own for them. A checkpoint without
/// an adapter passes, and is not read.
///
/// # Errors
/// [`Error::TrainedWhole`] with the parameters that would keep their trained values,
/// [`Error::Foreign`] where the description of the adapter cannot be read.
pub fn check_replaceable(source: &Checkpoint, adapter: Option<&Adapter>) -> Result<()> {
    if !has_adapter(source) {
        return Ok(());
    }
    let trained = Trained::of(source)?;
    let brings = |name: &str| adapter.is_some_and(|adapter| adapter.brings(name));
    let kept = trained.wholes(source).filter(|name| !brings(name));
    let params: Vec<_> = kept.map(str::to_owned).collect();
    if params.is_empty() {
        return Ok(());
    }
    let described = trained.config.to_json();
    let base = described["base_model_name_or_path"].as_str();
    Err(Error::TrainedWhole {
        path: source.path().to_owned(),
        params,
        base: base.map(str::to_owned),
    })
}

impl Adapter {
    /// Whether it has a tensor of its own for this parameter of the base.
    fn brings(&self, param: &str) -> bool {
        matches!(self.updates.get(param), Some(Update::Whole(_)))
    }
}
