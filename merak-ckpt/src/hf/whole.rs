//! Whether the tensors of a folder are a whole model.

use super::{family::Family, family_of, foreign};
use crate::{Result, TensorEntry};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// One parameter of every layer, by the layers' numbers.
type Column<'a> = BTreeMap<usize, &'a TensorEntry>;

/// Checks what names and shapes tell of a model whose family is known: its parameters are floating-point numbers, it has
/// its embedding and the head that is not tied to it, as many layers as the configuration says, and each of these the
/// same parameters. The graph of a model knows the rest, when weights are loaded into one.
pub(super) fn check(folder: &Path, config: &Value, tensors: &[TensorEntry]) -> Result<()> {
    let Some(family) = family_of(config) else {
        return Ok(());
    };
    if let Some(tensor) = tensors.iter().find(|tensor| !tensor.dtype.is_float()) {
        let reason = format!(
            "tensor `{}` has elements of type {}, expected a floating-point type",
            tensor.name, tensor.dtype
        );
        return Err(foreign(folder, reason));
    }
    let lacks = |name: &str| tensors.iter().all(|tensor| tensor.name != name);
    let embedding = family.tie(config).map(|tie| tie.embedding);
    if let Some(name) = embedding.filter(|name| lacks(name)) {
        return Err(missing(folder, name));
    }
    if let Some(name) = family.own_head(config).filter(|name| lacks(name)) {
        return Err(without_head(folder, name));
    }
    let layers = layers(tensors, family);
    layers.iter().try_for_each(|(before, columns)| {
        let known = columns.values().flat_map(Column::keys).max();
        let count = num_layers(config, before).or(known.map(|last| last.saturating_add(1)));
        check_layers(folder, before, columns, count.unwrap_or(0))
    })
}

/// The error about a model whose head is neither there nor the embedding.
pub(super) fn without_head(folder: &Path, head: &str) -> crate::Error {
    let reason =
        format!("it lacks tensor `{head}`, which its config.json does not tie to the embedding");
    foreign(folder, reason)
}

fn missing(folder: &Path, name: &str) -> crate::Error {
    foreign(folder, format!("it lacks tensor `{name}`"))
}

/// The parameters of stacks of layers: by what comes before a layer's number, then by what comes after it.
fn layers<'a>(
    tensors: &'a [TensorEntry],
    family: &Family,
) -> BTreeMap<&'a str, BTreeMap<&'a str, Column<'a>>> {
    let mut stacks: BTreeMap<_, BTreeMap<_, Column<'_>>> = BTreeMap::new();
    for tensor in tensors.iter().filter(|t| !family.is_table(&t.name)) {
        if let Some((before, number, after)) = numbered(&tensor.name) {
            let columns = stacks.entry(before).or_default();
            columns.entry(after).or_default().insert(number, tensor);
        }
    }
    // Those of other modules, as of a head that somebody has added, may be anything.
    let is_cut = |column: &Column<'_>| column.values().any(|tensor| tensor.cut.is_some());
    stacks.retain(|_, columns| columns.values().any(is_cut));
    stacks
}

/// A name around its first number.
fn numbered(name: &str) -> Option<(&str, usize, &str)> {
    let mut begin = 0;
    for word in name.split('.') {
        let (before, rest) = name.split_at(begin);
        if let Ok(number) = word.parse() {
            return Some((before, number, &rest[word.len()..]));
        }
        begin += word.len() + 1;
    }
    None
}

/// How many layers the configuration says that a stack has.
fn num_layers(config: &Value, before: &str) -> Option<usize> {
    let decoder = before
        .starts_with("decoder.")
        .then_some("num_decoder_layers");
    let keys = ["num_hidden_layers", "n_layer", "num_layers"];
    let number = |key| usize::try_from(config.get(key)?.as_u64()?).ok();
    decoder.into_iter().chain(keys).find_map(number)
}

fn check_layers(
    folder: &Path,
    before: &str,
    columns: &BTreeMap<&str, Column<'_>>,
    count: usize,
) -> Result<()> {
    for (after, column) in columns {
        let (_, first) = column.first_key_value().expect("it was made for one");
        for number in 0..count {
            let name = || format!("{before}{number}{after}");
            let tensor = column.get(&number);
            let tensor = tensor.ok_or_else(|| missing(folder, &name()))?;
            if tensor.shape != first.shape {
                let reason = format!(
                    "tensor `{}` has shape {:?}, that of another layer {:?}",
                    name(),
                    tensor.shape,
                    first.shape
                );
                return Err(foreign(folder, reason));
            }
        }
    }
    Ok(())
}
