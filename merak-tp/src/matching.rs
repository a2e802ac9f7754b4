//! Which linear layers of a model the lists split, and into which parts.

use crate::{Error, LayerLists, Result, SplitKind, report::KeptWhole};
use merak_trace::{Graph, Node, NodeId, Op, ParamRole, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// How one linear layer is split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Role {
    pub(crate) kind: SplitKind,
    /// The entry that matched, as messages show it.
    pub(crate) list: String,
    /// Sizes of the parts of the output features; several in a fused projection.
    pub(crate) parts: Vec<usize>,
}

/// What the lists say about a model.
#[derive(Debug, Default)]
pub(crate) struct Matches {
    pub(crate) roles: BTreeMap<NodeId, Role>,
    pub(crate) kept_whole: Vec<KeptWhole>,
    /// Entries that match no layer.
    pub(crate) unmatched: Vec<String>,
}

/// One entry of a list.
struct Entry<'a> {
    kind: SplitKind,
    shown: String,
    test: Test<'a>,
}

enum Test<'a> {
    Name(&'a str),
    Ratio { input: usize, output: usize },
}

/// A linear layer of the model.
struct Layer<'a> {
    id: NodeId,
    node: &'a Node,
    inputs: usize,
    outputs: usize,
    is_head: bool,
}

/// Matches the layers of `model` against `lists`.
///
/// # Errors
/// [`Error::BothKinds`] for a layer that two entries split differently, [`Error::NothingMatched`].
pub(crate) fn find(model: &Graph, lists: &LayerLists, degree: usize) -> Result<Matches> {
    let entries = entries(lists);
    let users = model.users();
    let mut matches = Matches::default();
    let mut used = BTreeSet::new();
    for layer in layers(model, &users) {
        if let Some((kind, list)) = match_layer(&layer, &entries, &mut used)? {
            let parts = parts(model, &users, &layer);
            matches.roles.insert(layer.id, Role { kind, list, parts });
        }
    }
    if matches.roles.is_empty() {
        let patterns: Vec<_> = entries.into_iter().map(|entry| entry.shown).collect();
        return Err(Error::NothingMatched {
            degree,
            patterns: patterns.join(", "),
        });
    }
    let unused = entries
        .into_iter()
        .enumerate()
        .filter(|(index, _)| !used.contains(index));
    matches.unmatched = unused.map(|(_, entry)| entry.shown).collect();
    keep_shared_heads_whole(model, degree, &mut matches);
    Ok(matches)
}

/// The entries of all lists, names before ratios.
fn entries(lists: &LayerLists) -> Vec<Entry<'_>> {
    let mut entries = named(SplitKind::Col, "col_para_list", &lists.col_para_list);
    entries.extend(named(SplitKind::Row, "row_para_list", &lists.row_para_list));
    entries.extend(lists.input_output_mapping.iter().map(|mapping| Entry {
        kind: mapping.kind,
        shown: format!(
            "input_output_mapping ({}, {}, {})",
            mapping.input, mapping.output, mapping.kind
        ),
        test: Test::Ratio {
            input: mapping.input,
            output: mapping.output,
        },
    }));
    entries
}

fn named<'a>(kind: SplitKind, list: &str, names: &'a [String]) -> Vec<Entry<'a>> {
    let entry = |name: &'a String| Entry {
        kind,
        shown: format!("{list} {name:?}"),
        test: Test::Name(name),
    };
    names.iter().map(entry).collect()
}

/// All linear layers, in order.
fn layers<'a>(model: &'a Graph, users: &[Vec<NodeId>]) -> Vec<Layer<'a>> {
    let mut layers = Vec::new();
    for id in model.node_ids() {
        let node = model.node(id);
        if let Op::Linear { layout, .. } = node.op {
            let shape = &model.ty(node.inputs[1]).shape;
            let (inputs, outputs) = (shape[layout.in_dim()], shape[layout.out_dim()]);
            layers.push(Layer {
                id,
                node,
                inputs,
                outputs,
                is_head: is_head(model, users, node),
            });
        }
    }
    layers
}

/// The way in which the entries split a layer, and the entry that says so.
///
/// Several names of one kind split a layer once; of the ratios only the first that matches counts.
fn match_layer(
    layer: &Layer<'_>,
    entries: &[Entry<'_>],
    used: &mut BTreeSet<usize>,
) -> Result<Option<(SplitKind, String)>> {
    let mut found: Option<&Entry<'_>> = None;
    let mut by_ratio = false;
    for (index, entry) in entries.iter().enumerate() {
        let is_ratio = matches!(entry.test, Test::Ratio { .. });
        if !entry.test.accepts(layer) || (is_ratio && by_ratio) {
            continue;
        }
        by_ratio |= is_ratio;
        used.insert(index);
        match found {
            None => found = Some(entry),
            Some(first) if first.kind == entry.kind => {}
            Some(first) => {
                let (col, row) = if first.kind == SplitKind::Col {
                    (first, entry)
                } else {
                    (entry, first)
                };
                return Err(Error::BothKinds {
                    module: layer.node.scope.to_string(),
                    col: col.shown.clone(),
                    row: row.shown.clone(),
                });
            }
        }
    }
    Ok(found.map(|entry| (entry.kind, entry.shown.clone())))
}

impl Test<'_> {
    fn accepts(&self, layer: &Layer<'_>) -> bool {
        match *self {
            Self::Name(name) => layer.node.scope.contains(name),
            Self::Ratio { input, output } => {
                !layer.is_head && layer.inputs * output == layer.outputs * input
            }
        }
    }
}

/// Whether a layer makes the logits: what it computes reaches a loss or the model's outputs with nothing but
/// changes of shape, type or scale between, or its matrix is a tied embedding table.
fn is_head(model: &Graph, users: &[Vec<NodeId>], node: &Node) -> bool {
    let tied = model
        .param_of(node.inputs[1])
        .is_some_and(|param| model.param(param).role == ParamRole::Embedding);
    tied || ends_model(model, users, node.outputs[0])
}

fn ends_model(model: &Graph, users: &[Vec<NodeId>], value: ValueId) -> bool {
    model.outputs().iter().any(|port| port.value == value)
        || users[value.index()]
            .iter()
            .map(|&user| model.node(user))
            .any(|user| match user.op {
                Op::CrossEntropy { .. } => true,
                Op::Reshape { .. } | Op::Cast { .. } | Op::Scale { .. } | Op::Identity => {
                    ends_model(model, users, user.outputs[0])
                }
                _ => false,
            })
}

/// The parts of a layer's output features: where its only user cuts them into pieces, those.
fn parts(model: &Graph, users: &[Vec<NodeId>], layer: &Layer<'_>) -> Vec<usize> {
    let output = layer.node.outputs[0];
    if let [user] = users[output.index()][..]
        && let Op::Split { dim, sizes } = &model.node(user).op
        && dim + 1 == model.ty(output).ndim()
    {
        return sizes.clone();
    }
    vec![layer.outputs]
}

/// Takes the column layers out that make key or value heads of which there are fewer than ranks: each rank
/// computes all of them and attention then picks the one that its query heads share.
fn keep_shared_heads_whole(model: &Graph, degree: usize, matches: &mut Matches) {
    for node in model.nodes() {
        let Op::Attention(spec) = &node.op else {
            continue;
        };
        if spec.kv_heads >= degree || !degree.is_multiple_of(spec.kv_heads) {
            continue;
        }
        for operand in [node.inputs[1], node.inputs[2]] {
            let Some(layer) = made_by(model, operand) else {
                continue;
            };
            if matches
                .roles
                .get(&layer)
                .is_some_and(|role| role.kind == SplitKind::Col && role.parts.len() == 1)
            {
                matches.roles.remove(&layer);
                matches.kept_whole.push(KeptWhole {
                    module: model.node(layer).scope.to_string(),
                    kv_heads: spec.kv_heads,
                });
            }
        }
    }
}

/// The linear layer that makes a value, with nothing between that mixes heads.
fn made_by(model: &Graph, value: ValueId) -> Option<NodeId> {
    let id = model.producer(value)?;
    let node = model.node(id);
    match &node.op {
        Op::Linear { .. } => Some(id),
        Op::Rope(_)
        | Op::Reshape { .. }
        | Op::RmsNorm { .. }
        | Op::Scale { .. }
        | Op::Cast { .. }
        | Op::Identity => made_by(model, node.inputs[0]),
        _ => None,
    }
}
