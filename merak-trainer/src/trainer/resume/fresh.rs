//! Which parameters start anew beside the weights of a checkpoint, and how the others are named
//! there.

use crate::{config::CheckedArguments, plan::Plan};
use merak_ckpt::{Checkpoint, Kind, Manifest, TensorEntry};
use merak_trace::{Param, models};
use std::{borrow::Cow, collections::BTreeSet};

/// The parameters that start anew beside the weights of a checkpoint.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own about the run or the checkpoint"
)]
pub(in crate::trainer) struct Fresh<'a> {
    manifest: &'a Manifest,
    is_release: bool,
    /// Whether an adapter starts on a release or another base without an adapter.
    has_adapter: bool,
    /// Modules of the classifier that starts on a release of another task.
    classifier: &'static [&'static str],
    resizes: bool,
    /// Whether what is not trained is so by a rate of 0, and not as an adapter's base or where
    /// nothing is trained.
    freezes: bool,
}

impl<'a> Fresh<'a> {
    pub(in crate::trainer) fn of(
        checkpoint: &'a Checkpoint,
        plan: &Plan,
        args: &CheckedArguments,
        is_release: bool,
    ) -> Self {
        let manifest = checkpoint.manifest();
        let family = models::family(plan.draft.info.family).filter(|_| is_release);
        Self {
            manifest,
            is_release,
            has_adapter: (is_release || args.finetune) && lacks_adapter(manifest),
            classifier: family.map_or(&[], |family| family.classifier),
            resizes: args.model.ignore_mismatched_sizes,
            freezes: plan.draft.lora.is_none() && !plan.is_frozen(),
        }
    }

    /// Whether a parameter starts anew.
    pub(in crate::trainer) fn has(&self, param: &Param) -> bool {
        if param.beside.is_some() {
            return self.has_adapter;
        }
        let name = stored_name(self.manifest, &param.name, self.is_release);
        let stored = self.manifest.tensor(&Kind::Parameter, &name);
        let fits = |entry: &TensorEntry| entry.shape == param.full.shape || !self.resizes;
        self.is_of_classifier(param) && !stored.is_some_and(fits)
    }

    /// The names of the parameters that start anew, those of adapters left out.
    pub(in crate::trainer) fn names(&self, plan: &Plan) -> Vec<String> {
        let params = plan.graph.params().iter();
        let fresh = params.filter(|param| param.beside.is_none() && self.has(param));
        fresh.map(|param| param.name.clone()).collect()
    }

    /// The names of the checkpoint's parameters that the model does not use.
    pub(in crate::trainer) fn unused(&self, plan: &Plan) -> Vec<String> {
        let params = plan.graph.params().iter();
        let used: BTreeSet<_> = params
            .filter(|param| !self.has(param))
            .map(|param| stored_name(self.manifest, &param.name, self.is_release))
            .collect();
        let stored = self.manifest.tensors_of(&Kind::Parameter);
        let names = stored.map(|entry| &entry.name);
        names
            .filter(|name| !used.contains(name.as_str()))
            .cloned()
            .collect()
    }

    /// Whether a parameter of another size may start anew.
    pub(super) fn may_resize(&self, param: &Param) -> bool {
        self.is_of_classifier(param) && !self.resizes
    }

    /// Whether a parameter is one of a classifier that the run trains or freezes.
    fn is_of_classifier(&self, param: &Param) -> bool {
        (param.trainable || self.freezes) && self.in_classifier(param)
    }

    /// Whether a parameter is one of the classifier of the model's family.
    pub(super) fn in_classifier(&self, param: &Param) -> bool {
        let is_within = |module: &&str| {
            let rest = param.name.strip_prefix(*module);
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        self.classifier.iter().any(is_within)
    }
}

/// Whether a checkpoint has no parameters of adapters.
pub(in crate::trainer) fn lacks_adapter(manifest: &Manifest) -> bool {
    let mut params = manifest.tensors_of(&Kind::Parameter);
    !params.any(TensorEntry::is_of_adapter)
}

/// The name that a parameter has in a checkpoint. Only releases may leave the model's base prefix
/// out, as in `wte.weight` for `transformer.wte.weight`, or have one more.
pub(in crate::trainer) fn stored_name<'a>(
    manifest: &'a Manifest,
    name: &'a str,
    is_release: bool,
) -> Cow<'a, str> {
    let has = |name: &str| manifest.tensor(&Kind::Parameter, name).is_some();
    if !is_release || has(name) {
        return name.into();
    }
    let without_first = |name: &'a str| name.split_once('.').map(|(_, rest)| rest);
    if let Some(bare) = without_first(name).filter(|bare| has(bare)) {
        return bare.into();
    }
    let longer = manifest
        .tensors_of(&Kind::Parameter)
        .find(|entry| without_first(&entry.name) == Some(name));
    longer.map_or(name, |entry| &entry.name).into()
}
