//! Which tables and output layers of a model a split vocabulary cuts.

use crate::{
    Error, Result, SplitKind,
    error::{SPLIT_VOCABULARY, divisors},
    layers::{Layer, Matches, Role},
};
use merak_trace::{Graph, NodeId, ParamId, Source, op::Class};
use std::collections::BTreeMap;

/// Adds the roles of lookups in tables with a row for each of `vocab` entries, if ids of a model
/// input are looked up there, and of output layers with as many features. Lists of the user that
/// split such an output layer by input features win.
///
/// # Errors
/// [`Error::Indivisible`] where an adapter scales each output of such a layer by its norm, so that
/// there can be no padding.
pub(crate) fn split(
    model: &Graph,
    layers: &[Layer<'_>],
    vocab: usize,
    degree: usize,
    matches: &mut Matches,
) -> Result<()> {
    let tables = tables(model, layers, vocab);
    for id in model.node_ids() {
        let node = model.node(id);
        let weight = node
            .inputs
            .get(1)
            .and_then(|&weight| model.param_of(weight));
        let kind = match node.op.class() {
            Class::Lookup => SplitKind::Row,
            Class::Linear(_) => SplitKind::Col,
            _ => continue,
        };
        let Some(param) = weight.filter(|param| tables.get(param).is_some_and(Option::is_some))
        else {
            continue;
        };
        if by_rows(model, matches, param) {
            continue;
        }
        let param = model.param(param);
        if !vocab.is_multiple_of(degree) && has_magnitude(model, &param.name) {
            return Err(Error::Indivisible {
                module: node.scope.to_string(),
                size: vocab,
                what: "vocabulary entries with magnitudes",
                degree,
                list: SPLIT_VOCABULARY.to_owned(),
                legal: divisors(vocab),
            });
        }
        let role = Role {
            kind,
            list: SPLIT_VOCABULARY.to_owned(),
            parts: vec![vocab],
            pads: true,
        };
        matches.roles.insert(id, role);
    }
    Ok(())
}

/// For each parameter with an entry of the vocabulary in a dimension, that dimension; `None` where
/// two uses have it in different ones.
fn tables(model: &Graph, layers: &[Layer<'_>], vocab: usize) -> BTreeMap<ParamId, Option<usize>> {
    let mut tables = BTreeMap::new();
    let mut note = |param, dim| {
        let known = tables.entry(param).or_insert(Some(dim));
        if *known != Some(dim) {
            *known = None;
        }
    };
    for layer in layers {
        let Class::Linear(layout) = layer.node.op.class() else {
            continue;
        };
        if let Some(param) = model.weight_of(layer.node)
            && layer.is_head
            && layer.outputs == vocab
        {
            note(param, layout.out_dim());
        }
    }
    for node in model.nodes() {
        if node.op.class() == Class::Lookup
            && let Some(param) = model.param_of(node.inputs[1])
            && let Source::Input(_) = model.value(node.inputs[0]).source
            && model.param(param).full.shape[0] == vocab
        {
            note(param, 0);
        }
    }
    tables
}

/// Whether the lists split a matrix by input features.
fn by_rows(model: &Graph, matches: &Matches, param: ParamId) -> bool {
    let splits = |(id, role): (&NodeId, &Role)| {
        let node = model.node(*id);
        role.kind == SplitKind::Row
            && matches!(node.op.class(), Class::Linear(_))
            && model.weight_of(node) == Some(param)
    };
    matches.roles.iter().any(splits)
}

/// Whether an adapter has a magnitude for each output of a matrix.
fn has_magnitude(model: &Graph, matrix: &str) -> bool {
    model.params().iter().any(|param| {
        let beside = param.beside.as_ref();
        param.full.ndim() == 1 && beside.is_some_and(|beside| beside.param == matrix)
    })
}
