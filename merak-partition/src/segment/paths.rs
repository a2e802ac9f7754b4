//! Modules and parameters by name: a path from the root, in which `{i}` stands for any number.

use merak_mpu::names::closest;
use merak_trace::{Graph, Node};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

/// The first node of each module or parameter that a name stands for.
pub(super) fn first_nodes(graph: &Graph, point: &str) -> Vec<usize> {
    let pattern: Vec<_> = point.split('.').collect();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        let matched: Vec<_> = paths(graph, node)
            .into_iter()
            .filter_map(|path| matched(&pattern, path))
            .collect();
        for path in matched {
            if seen.insert(path) {
                found.push(index);
            }
        }
    }
    found
}

/// The nodes of each module that a name stands for, from its first to its last.
pub(super) fn modules(graph: &Graph, name: &str) -> Vec<RangeInclusive<usize>> {
    let pattern: Vec<_> = name.split('.').collect();
    let mut found = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        if let Some(path) = matched(&pattern, &node.scope) {
            found.entry(path).or_insert((index, index)).1 = index;
        }
    }
    let spans = found.into_values();
    spans.map(|(first, last)| first..=last).collect()
}

/// The module of a node and the parameters that it reads, by their names within it (aliases of tied
/// ones).
fn paths<'a>(graph: &'a Graph, node: &'a Node) -> Vec<&'a str> {
    let mut paths = vec![&*node.scope];
    for param in node
        .inputs
        .iter()
        .filter_map(|&input| graph.param_of(input))
        .map(|id| graph.param(id))
    {
        let here = param.aliases.iter().find(|alias| {
            alias
                .strip_prefix(&*node.scope)
                .is_some_and(|rest| rest.starts_with('.'))
        });
        paths.push(here.unwrap_or(&param.name));
    }
    paths
}

/// The part of `path` that a pattern matches: whole components from the start.
fn matched<'a>(pattern: &[&str], path: &'a str) -> Option<&'a str> {
    let mut end = 0;
    let mut components = path.split('.');
    for (index, expected) in pattern.iter().enumerate() {
        let component = components.next()?;
        let is_number =
            !component.is_empty() && component.bytes().all(|byte| byte.is_ascii_digit());
        let fits = if expected.starts_with('{') && expected.ends_with('}') {
            is_number
        } else {
            component == *expected && !component.is_empty()
        };
        if !fits {
            return None;
        }
        end += component.len() + usize::from(index > 0);
    }
    Some(&path[..end])
}

/// The module or parameter that a name which matches none may mean.
pub(super) fn nearest(graph: &Graph, name: &str) -> String {
    let nodes = graph.nodes().iter();
    nearest_of(name, nodes.flat_map(|node| paths(graph, node)))
}

/// The module that a name which matches none may mean.
pub(super) fn nearest_module(graph: &Graph, name: &str) -> String {
    nearest_of(name, graph.nodes().iter().map(|node| &*node.scope))
}

fn nearest_of<'a>(name: &str, paths: impl Iterator<Item = &'a str>) -> String {
    let mut known = BTreeSet::new();
    for path in paths.filter(|path| !path.is_empty()) {
        known.extend(path.match_indices('.').map(|(dot, _)| &path[..dot]));
        known.insert(path);
    }
    let is_end = |path: &&str| {
        let head = path.strip_suffix(name);
        head.is_some_and(|head| head.ends_with('.'))
    };
    let end = known.iter().copied().find(is_end);
    let nearest = end.or_else(|| closest(name, known.iter().copied()));
    nearest.unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_matches_whole_components_and_everything_below() {
        let of = |point: &str, path| {
            matched(&point.split('.').collect::<Vec<_>>(), path).map(str::to_owned)
        };
        assert_eq!(of("h.1", "h.1.attn.weight").as_deref(), Some("h.1"));
        assert_eq!(of("h.1", "h.10"), None);
        assert_eq!(of("h.1", "h"), None);
        assert_eq!(of("h.{i}", "h.10.mlp").as_deref(), Some("h.10"));
        assert_eq!(of("h.{i}", "h.first"), None);
    }
}
