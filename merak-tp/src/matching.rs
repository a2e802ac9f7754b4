//! Which linear layers of a model the lists split, and into which parts.

use crate::{Error, LayerLists, Options, Result, SplitKind, report::KeptWhole, slices, vocab};
use merak_trace::{Beside, Graph, Node, NodeId, Op, ParamId, Shard, ValueId, op::Class};
use std::collections::{BTreeMap, BTreeSet};

/// How one linear layer is split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Role {
    pub(crate) kind: SplitKind,
    /// The entry that matched, as messages show it.
    pub(crate) list: String,
    /// Sizes of the parts of the output features; several in a fused projection.
    pub(crate) parts: Vec<usize>,
    /// Whether padding makes up for a degree that does not divide the features.
    pub(crate) pads: bool,
}

/// The layers of a model that the lists match.
#[derive(Debug, Default)]
pub(crate) struct Matches {
    pub(crate) roles: BTreeMap<NodeId, Role>,
    pub(crate) kept_whole: Vec<KeptWhole>,
    /// Entries that match nothing.
    pub(crate) unmatched: Vec<String>,
    /// Parameters of which each rank keeps a slice, whatever uses them.
    pub(crate) slices: BTreeMap<ParamId, Shard>,
}

/// One entry of a list.
struct Entry<'a> {
    kind: SplitKind,
    shown: String,
    test: Test<'a>,
}

enum Test<'a> {
    Name(&'a str),
    /// A convolution by its name.
    Convolution(&'a str),
    Ratio {
        input: usize,
        output: usize,
    },
}

/// A linear layer of the model.
pub(crate) struct Layer<'a> {
    pub(crate) id: NodeId,
    pub(crate) node: &'a Node,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) is_head: bool,
    /// The kernel, of a convolution of patches that do not overlap.
    pub(crate) kernel: Option<ParamId>,
}

/// Matches the layers of `model` against the lists, and where a vocabulary is split, its tables and
/// output layers.
///
/// # Errors
/// [`Error::BothKinds`] for a layer that two entries split differently, [`Error::NothingMatched`],
/// [`Error::Heads`] for query heads that the ranks cannot share;
/// those of [`vocab::split`].
pub(crate) fn find(model: &Graph, options: &Options) -> Result<Matches> {
    let degree = options.degree;
    let entries = entries(&options.lists);
    let users = model.users();
    let mut matches = Matches::default();
    let mut used = BTreeSet::new();
    let mut cut = BTreeMap::new();
    let layers = layers(model, &users);
    for layer in &layers {
        // A matrix is cut one way, however often it is used.
        let matrix = layer.node.inputs[1];
        let role = match cut.get(&matrix) {
            Some(role) => Some(Role::clone(role)),
            None => match_layer(layer, &entries, &mut used)?.map(|(kind, list)| Role {
                kind,
                list,
                parts: parts(model, &users, layer),
                pads: false,
            }),
        };
        if let Some(role) = role {
            cut.insert(matrix, role.clone());
            matches.roles.insert(layer.id, role);
        }
    }
    slices::find(model, &options.lists, degree, &layers, &mut matches)?;
    if matches.roles.is_empty() && matches.slices.is_empty() {
        let patterns = entries.into_iter().map(|entry| entry.shown);
        let patterns: Vec<_> = patterns.chain(matches.unmatched).collect();
        return Err(Error::NothingMatched {
            degree,
            kinds: kinds(&options.lists),
            patterns: patterns.join(", "),
        });
    }
    let unused = entries
        .into_iter()
        .enumerate()
        .filter(|(index, _)| !used.contains(index));
    matches
        .unmatched
        .extend(unused.map(|(_, entry)| entry.shown));
    check_heads(model, options, &matches)?;
    keep_shared_heads_whole(model, degree, &mut matches);
    if let Some(vocab) = options.vocab {
        vocab::split(model, &layers, vocab, degree, &mut matches)?;
    }
    follow(model, &mut matches);
    Ok(matches)
}

/// What the entries of all lists can match, in words.
fn kinds(lists: &LayerLists) -> String {
    let has_slices = !lists.weight_change_list.is_empty();
    let has_convolutions = !lists.conv_para_list.is_empty();
    let has_layers = !lists.col_para_list.is_empty()
        || !lists.row_para_list.is_empty()
        || !lists.input_output_mapping.is_empty();
    let kinds = [
        (has_layers || has_slices, "linear layer"),
        (has_convolutions, "convolution"),
        (has_slices, "parameter"),
    ];
    let kinds = kinds.into_iter().filter(|(has, _)| *has);
    kinds.map(|(_, kind)| kind).collect::<Vec<_>>().join(" or ")
}

/// The entries of all lists, names before ratios.
fn entries(lists: &LayerLists) -> Vec<Entry<'_>> {
    let mut entries = named(SplitKind::Col, "col_para_list", &lists.col_para_list);
    entries.extend(named(SplitKind::Row, "row_para_list", &lists.row_para_list));
    entries.extend(lists.conv_para_list.iter().map(|name| Entry {
        kind: SplitKind::Row,
        shown: format!("conv_para_list {name:?}"),
        test: Test::Convolution(name),
    }));
    let ratios = (1..).zip(&lists.input_output_mapping);
    entries.extend(ratios.map(|(number, mapping)| Entry {
        kind: mapping.kind,
        shown: format!(
            "input_output_mapping, entry {number}: inputs to outputs {}:{}, {}-parallel",
            mapping.input,
            mapping.output,
            mapping.kind.in_words()
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
pub(crate) fn layers<'a>(model: &'a Graph, users: &[Vec<NodeId>]) -> Vec<Layer<'a>> {
    let mut layers = Vec::new();
    for id in model.node_ids() {
        let node = model.node(id);
        if let Class::Linear(layout) = node.op.class()
            && beside(model, node).is_none()
        {
            let shape = &model.ty(node.inputs[1]).shape;
            let (inputs, outputs) = (shape[layout.in_dim()], shape[layout.out_dim()]);
            layers.push(Layer {
                id,
                node,
                inputs,
                outputs,
                is_head: is_head(model, users, node),
                kernel: slices::kernel(model, node),
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
            Self::Convolution(name) => layer.kernel.is_some() && layer.node.scope.contains(name),
            Self::Ratio { input, output } => {
                !layer.is_head && layer.inputs * output == layer.outputs * input
            }
        }
    }
}

/// Whether a layer, with its adapters, makes the logits.
fn is_head(model: &Graph, users: &[Vec<NodeId>], node: &Node) -> bool {
    model.is_tied_head(node) || model.ends_model(users, adapted(model, users, node))
}

/// The output of a layer together with its adapters: sums and products within its own module.
fn adapted(model: &Graph, users: &[Vec<NodeId>], layer: &Node) -> ValueId {
    let mut value = layer.outputs[0];
    while let [user] = users[value.index()][..] {
        let node = model.node(user);
        let is_glue =
            matches!(node.op.class(), Class::Add | Class::Mul) && node.scope == layer.scope;
        if !is_glue || node.inputs[0] != value {
            break;
        }
        value = node.outputs[0];
    }
    value
}

/// The [`Beside`] of a linear layer's matrix, if the layer is half of an adapter.
fn beside<'a>(model: &'a Graph, node: &Node) -> Option<&'a Beside> {
    let weight = model.weight_of(node)?;
    model.param(weight).beside.as_ref()
}

/// Splits the halves of adapters as their layers: a factor is cut where the features that it shares
/// with the layer's matrix are cut, and into their parts.
fn follow(model: &Graph, matches: &mut Matches) {
    let mut cuts = BTreeMap::new();
    for (id, role) in &matches.roles {
        let node = model.node(*id);
        if let (Class::Linear(layout), Some(weight)) = (node.op.class(), model.weight_of(node)) {
            let mut role = role.clone();
            let dim = match role.kind {
                SplitKind::Col => layout.out_dim(),
                SplitKind::Row => layout.in_dim(),
            };
            if role.kind == SplitKind::Row {
                role.parts = vec![model.ty(node.inputs[1]).shape[dim]];
            }
            cuts.insert(model.param(weight).name.as_str(), (dim, role));
        }
    }
    for id in model.node_ids() {
        let node = model.node(id);
        let (Class::Linear(layout), Some(beside)) = (node.op.class(), beside(model, node)) else {
            continue;
        };
        let Some((_, role)) = cuts
            .get(beside.param.as_str())
            .filter(|(dim, _)| *dim == beside.of)
        else {
            continue;
        };
        let kind = if beside.dim == layout.out_dim() {
            SplitKind::Col
        } else {
            SplitKind::Row
        };
        let role = Role {
            kind,
            ..role.clone()
        };
        matches.roles.insert(id, role);
    }
}

/// The parts of a layer's output features: the pieces that its only user cuts them into, if it
/// does.
pub(crate) fn parts(model: &Graph, users: &[Vec<NodeId>], layer: &Layer<'_>) -> Vec<usize> {
    let output = adapted(model, users, layer.node);
    if let [user] = users[output.index()][..]
        && let Op::Split { dim, sizes } = &model.node(user).op
        && dim + 1 == model.ty(output).ndim()
    {
        return sizes.clone();
    }
    vec![layer.outputs]
}

/// Refuses to cut query heads that the ranks cannot share, whether an operation between the layer
/// and the attention would need them whole or not.
fn check_heads(model: &Graph, options: &Options, matches: &Matches) -> Result<()> {
    for node in model.nodes() {
        let Op::Attention(spec) = &node.op else {
            continue;
        };
        let layer = made_by(model, node.inputs[0]).and_then(|layer| matches.roles.get(&layer));
        let is_cut = layer.is_some_and(|role| role.kind == SplitKind::Col);
        // Features that do not divide are told of the layer.
        let features = model.ty(node.inputs[0]).last_dim();
        let divides = |count: usize| count.is_multiple_of(options.degree);
        if is_cut && divides(features) && !divides(spec.heads) {
            return Err(Error::heads(
                &node.scope,
                spec,
                (options.axis, options.degree),
                true,
            ));
        }
    }
    Ok(())
}

/// The layers that make fewer key or value heads than there are ranks, each with its heads.
pub(crate) fn shared_heads(model: &Graph, degree: usize) -> Vec<(NodeId, usize)> {
    let mut layers = Vec::new();
    for node in model.nodes() {
        let Op::Attention(spec) = &node.op else {
            continue;
        };
        if spec.kv_heads >= degree || !degree.is_multiple_of(spec.kv_heads) {
            continue;
        }
        let made = [node.inputs[1], node.inputs[2]].map(|operand| made_by(model, operand));
        layers.extend(
            made.into_iter()
                .flatten()
                .map(|layer| (layer, spec.kv_heads)),
        );
    }
    layers
}

/// Removes the column layers that make key or value heads if these are fewer than ranks: each rank
/// computes all of them, and attention then picks the one that its query heads share.
fn keep_shared_heads_whole(model: &Graph, degree: usize, matches: &mut Matches) {
    for (layer, kv_heads) in shared_heads(model, degree) {
        let role = matches.roles.get(&layer);
        if role.is_some_and(|role| role.kind == SplitKind::Col && role.parts.len() == 1) {
            // An adapter may use the matrix a second time.
            let matrix = |id: NodeId| model.weight_of(model.node(id));
            matches.roles.retain(|id, _| matrix(*id) != matrix(layer));
            matches.kept_whole.push(KeptWhole {
                module: model.node(layer).scope.to_string(),
                kv_heads,
            });
        }
    }
}

/// The linear layer that makes a value, with nothing between that mixes heads.
fn made_by(model: &Graph, value: ValueId) -> Option<NodeId> {
    let id = model.producer(value)?;
    let node = model.node(id);
    match node.op.class() {
        Class::Linear(_) => Some(id),
        Class::Rope | Class::RmsNorm | Class::Form | Class::Identity => {
            made_by(model, node.inputs[0])
        }
        Class::Add | Class::Mul => {
            made_by(model, node.inputs[0]).filter(|&made| model.node(made).scope == node.scope)
        }
        Class::Source
        | Class::Lookup
        | Class::LayerNorm
        | Class::Attention
        | Class::Activation
        | Class::Dropout
        | Class::Loss(_)
        | Class::Transpose
        | Class::Total
        | Class::Function
        | Class::Constant
        | Class::Gradient
        | Class::Region(_) => None,
    }
}
