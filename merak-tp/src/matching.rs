//! Which linear layers of a model the lists split, and into which parts.

use crate::{
    Error, LayerLists, Options, Result, SplitKind,
    layers::{Layer, Matches, Role, beside, layers, made_by, shared_heads},
    report::KeptWhole,
    slices, vocab,
};
use merak_trace::{Graph, NodeId, Op, op::Class};
use std::collections::{BTreeMap, BTreeSet};

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
                parts: layer.parts(model, &users),
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
            Some(first) => return Err(layer.both_kinds((first.kind, &first.shown), &entry.shown)),
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
