//! The tensors of an adapter's file, by their use.

use super::LoraConfig;
use crate::error::foreign;
use crate::factor_name::{FactorName, FactorRole, PREFIX};
use crate::{Kind, Result, TensorEntry};
use std::collections::BTreeMap;
use std::path::Path;

/// The names of a module's factors, as far as they have been seen.
#[derive(Debug, Default)]
pub(super) struct Factors {
    pub(super) a: Option<String>,
    pub(super) b: Option<String>,
    pub(super) magnitude: Option<String>,
    pub(super) is_embedding: bool,
}

/// The tensors of an adapter, by their use.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// Factors by module.
    pub(super) modules: BTreeMap<String, Factors>,
    /// Tensors that replace those of the base: the name in the base, and the adapter's own.
    pub(super) wholes: BTreeMap<String, String>,
}

impl Contents {
    pub(super) fn of(tensors: &[TensorEntry], file: &Path) -> Result<Self> {
        if tensors.is_empty() {
            return Err(foreign(file, "it has no tensor"));
        }
        let mut contents = Self::default();
        for TensorEntry { name, .. } in tensors {
            let Some(place) = name.strip_prefix(PREFIX) else {
                let reason = format!("`{name}` does not begin with `{PREFIX}`");
                return Err(foreign(file, reason));
            };
            if !contents.add_factor(place, name) && !contents.add_whole(place, name) {
                return Err(foreign(file, format!("`{name}` is not supported")));
            }
        }
        // A weight beside factors is the base's own; PEFT saves it where a vocabulary may have
        // grown.
        contents.wholes.retain(|name, _| {
            let module = name.strip_suffix(".weight");
            module.is_none_or(|module| !contents.modules.contains_key(module))
        });
        Ok(contents)
    }

    /// The message about the first tensor that the configuration names and the base has, but the
    /// file lacks. Targets and biases count only in numbered layers: a base may have more around
    /// these than the model that was adapted.
    pub(super) fn first_missing(
        &self,
        config: &LoraConfig,
        base: &[TensorEntry],
        prefix: &str,
    ) -> Option<String> {
        let mut names = self.modules.keys().chain(self.wholes.keys());
        let is_bare = !names.any(|name| name.starts_with(prefix));
        for TensorEntry { name, .. } in base.iter().filter(|tensor| tensor.kind == Kind::Parameter)
        {
            let name = if is_bare {
                name.strip_prefix(prefix)
            } else {
                Some(name.as_str())
            };
            let Some((name, (module, end))) =
                name.and_then(|name| Some((name, name.rsplit_once('.')?)))
            else {
                continue;
            };
            let is_numbered = module.split('.').any(|part| part.parse::<usize>().is_ok());
            let is_target = end == "weight" && is_numbered && config.is_target(module);
            if is_target && !self.modules.contains_key(module) {
                return Some(format!(
                    "it has no factors for `{module}` of the `target_modules`"
                ));
            }
            let is_whole =
                config.saves(module) || is_numbered && config.trains_whole(name, |_| false);
            if is_whole && !self.wholes.contains_key(name) {
                return Some(format!(
                    "it has no `{name}`, which it has by its configuration"
                ));
            }
        }
        None
    }

    /// Notes a factor; returns whether the tensor is one.
    fn add_factor(&mut self, place: &str, name: &str) -> bool {
        let Some((module, role)) = FactorName::of_file(place) else {
            return false;
        };
        let factors = self.modules.entry(module.to_owned()).or_default();
        factors.is_embedding |= matches!(role, FactorRole::EmbeddingA | FactorRole::EmbeddingB);
        let slot = match role {
            FactorRole::A | FactorRole::EmbeddingA => &mut factors.a,
            FactorRole::B | FactorRole::EmbeddingB => &mut factors.b,
            FactorRole::Magnitude => &mut factors.magnitude,
        };
        *slot = Some(name.to_owned());
        true
    }

    /// Notes a tensor that replaces one of the base; returns false for a tensor of an unknown kind
    /// of adapter.
    fn add_whole(&mut self, place: &str, name: &str) -> bool {
        // Biases of adapted layers and of modules that are saved whole come with their wrappers'
        // names; tensors that such a wrapper replaced are not used.
        if place.contains(".original_module.") {
            return true;
        }
        let mut plain = place.replace(".base_layer.", ".");
        if let Some((module, part)) = plain.split_once(".modules_to_save.") {
            // PEFT leaves the adapter's name in the names of a module's parts.
            let part = part.split_once('.').map_or(part, |(_, part)| part);
            plain = format!("{module}.{part}");
        }
        if plain == place {
            self.wholes.insert(plain, name.to_owned());
        } else {
            self.wholes.entry(plain).or_insert_with(|| name.to_owned());
        }
        !FactorName::is_of_adapter(place)
    }
}
