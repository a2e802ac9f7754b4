//! Chooses the layers to split, for models without lists.

use crate::{
    Choice, Error, LayerLists, Options, Report, Result, SplitKind,
    layers::{self, Layer, Role},
    rewrite::rewrite,
    rewriter::Rewriter,
};
use merak_trace::{Graph, NodeId, ValueId, op::Class};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Lists that were chosen for a model, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AutoLists {
    /// Lists that match exactly the layers that were chosen.
    pub lists: LayerLists,
    /// The choice for each kind of layer, in the order of the graph.
    pub choices: Vec<Choice>,
}

/// Chooses the linear layers that `degree` ranks split, output layers left out.
///
/// A layer is split by output features where every rank goes on with its part up to a layer that is
/// split by input features: such a pair communicates one activation forward and one backward. A
/// layer whose parts would have to be gathered stays whole, and so does one whose sizes the degree
/// does not divide. Layers whose paths differ in numbers alone are treated alike.
///
/// The choice that splits the most elements of matrices counts. Of several such, the one with the
/// fewest bytes of communication ([`Report::bytes`]).
///
/// # Errors
/// Where nothing can be split: that of the first layer whose sizes do not fit, or
/// [`Error::NothingToSplit`].
pub fn auto_lists(model: &Graph, degree: usize) -> Result<AutoLists> {
    let mut skipped = BTreeSet::new();
    let mut best = Candidate::new(model, degree, &skipped)?;
    // A pair begins at the first layer that can. Without that layer it may begin after it, whether
    // that layer was split in the end or its parts had to be gathered.
    for group in 0..best.auto.choices.len() {
        if best.auto.choices[group].kind != Some(SplitKind::Row) {
            skipped.insert(group);
            match Candidate::new(model, degree, &skipped) {
                Ok(other) if other.is_better_than(&best) => best = other,
                Ok(_) | Err(_) => {
                    skipped.remove(&group);
                }
            }
        }
    }
    Ok(best.auto)
}

/// A choice of layers, and what it is compared by.
#[derive(Debug)]
struct Candidate {
    auto: AutoLists,
    /// Elements of the matrices that are split.
    elements: usize,
    /// Bytes that a microbatch communicates.
    bytes: usize,
}

impl Candidate {
    /// Splits all layers that can be, but for some kinds.
    fn new(model: &Graph, degree: usize, skipped: &BTreeSet<usize>) -> Result<Self> {
        let mut search = Search::new(model, degree);
        for &group in skipped {
            let reason = "layers after it are split in its place";
            search.groups[group].whole.get_or_insert(reason.to_owned());
        }
        // Each attempt but the last gives up some kind of layer for good.
        while !search.attempt()? {}
        let auto = search.finish()?;
        let split = auto.choices.iter().filter(|choice| choice.kind.is_some());
        Ok(Self {
            elements: split.map(|choice| choice.elements).sum(),
            bytes: rewrite(model, &auto.lists, degree)?.report.bytes(),
            auto,
        })
    }

    fn is_better_than(&self, other: &Self) -> bool {
        let is_as_much = self.elements == other.elements && self.bytes < other.bytes;
        self.elements > other.elements || is_as_much
    }
}

/// Layers that are treated alike.
#[derive(Debug)]
struct Group {
    path: String,
    members: Vec<NodeId>,
    elements: usize,
    kind: Option<SplitKind>,
    /// Why the layers stay whole, once that is settled.
    whole: Option<String>,
}

/// The state of a search.
struct Search<'a> {
    model: &'a Graph,
    degree: usize,
    users: Vec<Vec<NodeId>>,
    groups: Vec<Group>,
    group_of: BTreeMap<NodeId, usize>,
    /// The parts of each layer's output features.
    parts: BTreeMap<NodeId, Vec<usize>>,
    /// Why the first layer that was given up for its sizes does not fit.
    misfit: Option<Error>,
}

impl<'a> Search<'a> {
    fn new(model: &'a Graph, degree: usize) -> Self {
        let users = model.users();
        let layers = layers::layers(model, &users);
        let mut search = Self {
            model,
            degree,
            groups: Vec::new(),
            group_of: BTreeMap::new(),
            parts: BTreeMap::new(),
            misfit: None,
            users,
        };
        for layer in layers.iter().filter(|layer| !layer.is_head) {
            search.add(layer);
        }
        for (layer, kv_heads) in layers::shared_heads(model, degree) {
            if let Some(&group) = search.group_of.get(&layer) {
                search.groups[group].whole =
                    Some(format!("its {kv_heads} key/value heads are repeated"));
            }
        }
        search
    }

    fn add(&mut self, layer: &Layer<'_>) {
        let path = collapsed(&layer.node.scope);
        let known = self.groups.iter().position(|group| group.path == path);
        let index = known.unwrap_or(self.groups.len());
        if known.is_none() {
            self.groups.push(Group {
                path,
                members: Vec::new(),
                elements: 0,
                kind: None,
                whole: None,
            });
        }
        let group = &mut self.groups[index];
        group.members.push(layer.id);
        group.elements += layer.inputs * layer.outputs;
        self.group_of.insert(layer.id, index);
        let parts = layer.parts(self.model, &self.users);
        self.parts.insert(layer.id, parts);
    }

    /// Places the whole model, deciding each kind of layer where its first one stands. Returns
    /// false where a kind had to be given up.
    fn attempt(&mut self) -> Result<bool> {
        let model = self.model;
        for group in &mut self.groups {
            group.kind = None;
        }
        let options = Options::new(self.degree);
        let mut rewriter = Rewriter::new(model, &options, Report::new(options.axis, self.degree))?;
        for id in model.node_ids() {
            let role = self.role(&rewriter, id);
            match rewriter.place(id, role.as_ref()) {
                Ok(()) => {}
                Err(error) if error.is_misfit() => {
                    let reason = error.to_string();
                    let own = self.group_of.get(&id).copied().filter(|_| role.is_some());
                    let blamed = match own {
                        Some(group) => BTreeSet::from([group]),
                        None => self.sources(&rewriter, &model.node(id).inputs),
                    };
                    if blamed.is_empty() {
                        return Err(error);
                    }
                    self.misfit.get_or_insert(error);
                    self.give_up(blamed, &reason);
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
            let gathered = std::mem::take(&mut rewriter.gathered);
            if self.give_up_gathered(&rewriter, &gathered) {
                return Ok(false);
            }
        }
        let outputs: Vec<_> = model.outputs().iter().map(|port| port.value).collect();
        let blamed = self.sources(&rewriter, &outputs);
        let is_done = blamed.is_empty();
        self.give_up(
            blamed,
            "its parts would be gathered for an output of the model",
        );
        Ok(is_done)
    }

    /// How a node is split: a kind of layer that is met first by input features if the features
    /// come split, else by output features.
    fn role(&mut self, rewriter: &Rewriter<'_>, id: NodeId) -> Option<Role> {
        let group = &mut self.groups[*self.group_of.get(&id)?];
        if group.whole.is_some() {
            return None;
        }
        let input = self.model.node(id).inputs[0];
        let last = self.model.ty(input).ndim() - 1;
        let shard = rewriter.placed[&input].placement.as_shard();
        let by_input = shard.is_some_and(|shard| shard.dim == last);
        let kind = *group.kind.get_or_insert(if by_input {
            SplitKind::Row
        } else {
            SplitKind::Col
        });
        Some(Role {
            kind,
            list: "auto_lists".to_owned(),
            parts: self.parts[&id].clone(),
            pads: false,
        })
    }

    /// Gives up the layers whose parts were gathered; false if none were.
    fn give_up_gathered(&mut self, rewriter: &Rewriter<'_>, gathered: &[ValueId]) -> bool {
        let blamed = self.sources(rewriter, gathered);
        let Some(gather) = rewriter
            .report
            .gathers
            .last()
            .filter(|_| !blamed.is_empty())
        else {
            return false;
        };
        let reason = format!(
            "its parts would be gathered as {} for {}",
            gather.value, gather.needed_by
        );
        self.give_up(blamed, &reason);
        true
    }

    fn give_up(&mut self, groups: BTreeSet<usize>, reason: &str) {
        for group in groups {
            self.groups[group].whole.get_or_insert(reason.to_owned());
        }
    }

    /// The kinds of layers, split by output features, whose parts make up these values.
    fn sources(&self, rewriter: &Rewriter<'_>, values: &[ValueId]) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut rest = values.to_vec();
        while let Some(value) = rest.pop() {
            let placed = rewriter.placed.get(&value);
            let is_cut = placed.is_some_and(|placed| placed.placement.as_shard().is_some());
            let Some(node) = self.model.producer(value).filter(|_| is_cut) else {
                continue;
            };
            if !seen.insert(node) {
                continue;
            }
            match self.group_of.get(&node) {
                Some(&group) if self.groups[group].kind == Some(SplitKind::Col) => {
                    found.insert(group);
                }
                _ => rest.extend(&self.model.node(node).inputs),
            }
        }
        found
    }

    fn finish(self) -> Result<AutoLists> {
        if self.groups.iter().all(|group| group.kind.is_none()) {
            let degree = self.degree;
            return Err(self.misfit.unwrap_or(Error::NothingToSplit { degree }));
        }
        let names = |kind| self.names(kind);
        let lists = LayerLists::col_row(names(SplitKind::Col), names(SplitKind::Row));
        let choices = self.groups.into_iter().map(|group| Choice {
            reason: match (group.kind, group.whole) {
                (_, Some(reason)) => reason,
                (Some(SplitKind::Row), None) => "its input comes split".to_owned(),
                (_, None) => "each rank goes on with its part".to_owned(),
            },
            layers: group.path,
            kind: group.kind,
            elements: group.elements,
        });
        Ok(AutoLists {
            lists,
            choices: choices.collect(),
        })
    }

    /// Names that match the layers of a kind and no others.
    fn names(&self, kind: SplitKind) -> Vec<String> {
        let scope = |id: &NodeId| self.model.node(*id).scope.to_string();
        let of_kind: BTreeSet<_> = self
            .groups
            .iter()
            .filter(|group| group.kind == Some(kind))
            .flat_map(|group| group.members.iter().map(scope))
            .collect();
        let linear = |id: &NodeId| matches!(self.model.node(*id).op.class(), Class::Linear(_));
        let others: BTreeSet<_> = self
            .model
            .node_ids()
            .filter(linear)
            .map(|id| scope(&id))
            .filter(|scope| !of_kind.contains(scope))
            .collect();
        let is_own = |name: &&str| !others.iter().any(|other| other.contains(*name));
        let mut names = Vec::new();
        for group in self.groups.iter().filter(|group| group.kind == Some(kind)) {
            let behind_numbers = group.path.rsplit("{i}.").next().filter(is_own);
            match behind_numbers {
                Some(name) => names.push(name.to_owned()),
                None => names.extend(group.members.iter().map(scope)),
            }
        }
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(name.clone()));
        names
    }
}

/// A path with `{i}` in place of components that are numbers.
fn collapsed(scope: &str) -> String {
    let component = |part: &str| {
        let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if is_number {
            "{i}".to_owned()
        } else {
            part.to_owned()
        }
    };
    let parts: Vec<_> = scope.split('.').map(component).collect();
    parts.join(".")
}
