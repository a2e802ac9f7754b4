//! Whether the tensors of a folder are the whole model of its configuration.

use crate::error::foreign;
use crate::family::{EMBEDDING, Family, Module, Size, Stack, family_of, number};
use crate::format::CONFIG;
use crate::{Result, TensorEntry};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Keeps the tensors of the configuration's layers, and checks a model whose family is known by
/// names and shapes: its parameters are floating-point numbers; it has those that every model of
/// the family has, in the sizes that the configuration states; it has its head, unless that is tied
/// to the embedding; all layers have the same tensors. Loading the weights into a model's graph
/// checks the rest.
pub(super) fn check(
    folder: &Path,
    config: &Value,
    mut tensors: Vec<TensorEntry>,
) -> Result<Vec<TensorEntry>> {
    let Some(family) = family_of(config) else {
        return Ok(tensors);
    };
    if let Some(tensor) = tensors.iter().find(|tensor| !tensor.dtype.is_float()) {
        let reason = format!(
            "tensor `{}` has elements of type {}, expected a floating-point type",
            tensor.name, tensor.dtype
        );
        return Err(foreign(folder, reason));
    }
    let root = root(family, &tensors);
    let stacks = stacks(folder, config, family, root, &tensors)?;
    let is_beyond = |tensor: &TensorEntry| {
        let of = |(before, _, count): &(String, _, usize)| {
            layer(before, &tensor.name).is_some_and(|(number, _)| number >= *count)
        };
        stacks.iter().any(of)
    };
    let beyond: Vec<_> = tensors.extract_if(.., |tensor| is_beyond(tensor)).collect();
    let model = Model {
        folder,
        config,
        family,
        tensors: tensors
            .iter()
            .map(|tensor| (tensor.name.as_str(), tensor))
            .collect(),
    };
    model.check_modules(root, family.parts.outside)?;
    model.check_head()?;
    for (before, stack, count) in &stacks {
        for number in 0..*count {
            for (group, modules) in stack.layer {
                model.check_modules(&format!("{before}{number}.{group}"), modules)?;
            }
        }
        model.check_layers_are_alike(before, *count)?;
    }
    if let Some(first) = beyond.first() {
        tracing::warn!(
            first = first.name,
            num_tensors = beyond.len(),
            "tensors of layers that the model of config.json does not have are left out"
        );
    }
    Ok(tensors)
}

/// The error about a model whose head is neither stored nor tied to the embedding.
pub(super) fn without_head(folder: &Path, head: &str) -> crate::Error {
    let reason =
        format!("it lacks tensor `{head}`, which its config.json does not tie to the embedding");
    foreign(folder, reason)
}

fn missing(folder: &Path, name: &str) -> crate::Error {
    foreign(folder, format!("it lacks tensor `{name}`"))
}

/// The prefix of all modules' names: the classifiers of T5 have the model in a module.
fn root(family: &Family, tensors: &[TensorEntry]) -> &'static str {
    const MODULE: &str = "transformer.";
    let stacks = family.parts.stacks;
    let is_within = |tensor: &TensorEntry| {
        let rest = tensor.name.strip_prefix(MODULE);
        rest.is_some_and(|rest| stacks.iter().any(|stack| rest.starts_with(stack.before)))
    };
    if tensors.iter().any(is_within) {
        MODULE
    } else {
        ""
    }
}

/// The stacks of the configuration's model: the prefix before a layer's number, the stack, the
/// number of layers.
fn stacks(
    folder: &Path,
    config: &Value,
    family: &Family,
    root: &str,
    tensors: &[TensorEntry],
) -> Result<Vec<(String, &'static Stack, usize)>> {
    let stacks = family
        .parts
        .stacks
        .iter()
        .filter(|stack| (stack.has)(config));
    let known = stacks.map(|stack| {
        let before = format!("{root}{}", stack.before);
        let stated = number(config, stack.count);
        let stated = stated.map_err(|reason| foreign(&folder.join(CONFIG), reason))?;
        let there = || {
            let numbers = tensors
                .iter()
                .filter_map(|tensor| layer(&before, &tensor.name));
            numbers.map(|(number, _)| number).max().unwrap_or(0)
        };
        let count = stated.unwrap_or_else(|| there().saturating_add(1));
        Ok((before, stack, count))
    });
    known.collect()
}

/// The number of a layer, and the name within the layer, of a tensor of the stack.
fn layer<'a>(before: &str, name: &'a str) -> Option<(usize, &'a str)> {
    let (number, within) = name.strip_prefix(before)?.split_once('.')?;
    Some((number.parse().ok()?, within))
}

/// The tensors of a model, by name.
struct Model<'a> {
    folder: &'a Path,
    config: &'a Value,
    family: &'a Family,
    tensors: BTreeMap<&'a str, &'a TensorEntry>,
}

impl Model<'_> {
    /// Checks that the model has these modules, whose names follow `before`, in their sizes.
    fn check_modules(&self, before: &str, modules: &[Module]) -> Result<()> {
        for module in modules {
            for (name, sizes) in module.parameters(self.config) {
                let name = [before, &name].concat();
                let tensor = self.tensors.get(name.as_str());
                let tensor = tensor.ok_or_else(|| missing(self.folder, &name))?;
                self.check_shape(tensor, sizes)?;
            }
        }
        Ok(())
    }

    fn check_head(&self) -> Result<()> {
        if let Some(name) = self.family.own_head(self.config)
            && !self.tensors.contains_key(name)
        {
            return Err(without_head(self.folder, name));
        }
        if let Some(name) = self.family.head_bias(self.config) {
            let bias = self.tensors.get(name);
            let bias = bias.ok_or_else(|| missing(self.folder, name))?;
            self.check_shape(bias, &EMBEDDING[..1])?;
        }
        let head = self.family.tie(self.config).map(|tie| tie.head);
        match head.and_then(|name| self.tensors.get(name)) {
            Some(head) => self.check_shape(head, EMBEDDING),
            None => Ok(()),
        }
    }

    /// Checks a shape where the configuration states it.
    fn check_shape(&self, tensor: &TensorEntry, sizes: &[Size]) -> Result<()> {
        let mut sizes = sizes.to_vec();
        if self.family.is_transposed(&tensor.name) {
            sizes.reverse();
        }
        let expected = sizes.iter().map(|size| size.of(self.config));
        let expected: Vec<_> = expected
            .collect::<Result<_, _>>()
            .map_err(|reason| foreign(&self.folder.join(CONFIG), reason))?;
        let fits =
            |(found, expected): (&usize, &Option<usize>)| expected.is_none_or(|n| n == *found);
        if tensor.shape.len() == expected.len() && tensor.shape.iter().zip(&expected).all(fits) {
            return Ok(());
        }
        let expected = expected
            .iter()
            .map(|size| size.map_or("?".to_owned(), |n| n.to_string()));
        let mut reason = format!(
            "tensor `{}` has shape {:?}, expected [{}]",
            tensor.name,
            tensor.shape,
            expected.collect::<Vec<_>>().join(", ")
        );
        let mut stated: Vec<String> = Vec::new();
        for name in sizes.iter().flat_map(|size| size.fields()) {
            let value = self.config.get(name).filter(|value| !value.is_null());
            let text = value.map(|value| format!("{name} {value}"));
            stated.extend(text.filter(|text| !stated.contains(text)));
        }
        if !stated.is_empty() {
            reason = format!("{reason}: config.json has {}", stated.join(", "));
        }
        Err(foreign(self.folder, reason))
    }

    /// Checks that each layer has what another has, in the same shape.
    fn check_layers_are_alike(&self, before: &str, count: usize) -> Result<()> {
        let mut firsts: BTreeMap<&str, &TensorEntry> = BTreeMap::new();
        for (name, tensor) in self.tensors.range(before..) {
            if let Some((_, within)) = layer(before, name).filter(|_| !self.family.is_table(name)) {
                firsts.entry(within).or_insert(tensor);
            }
        }
        for (within, first) in firsts {
            for number in 0..count {
                let name = format!("{before}{number}.{within}");
                let tensor = self.tensors.get(name.as_str());
                let tensor = tensor.ok_or_else(|| missing(self.folder, &name))?;
                if tensor.shape != first.shape {
                    let reason = format!(
                        "tensor `{name}` has shape {:?}, that of another layer {:?}",
                        tensor.shape, first.shape
                    );
                    return Err(foreign(self.folder, reason));
                }
            }
        }
        Ok(())
    }
}
