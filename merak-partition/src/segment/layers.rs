//! `layer_split`: cut before the first node of each layer.

use super::{SegmentOptions, SplitRule};
use crate::{Error, Result, borders::Borders};
use merak_mpu::names::closest;
use merak_trace::{
    Graph, Node,
    models::{self, Family},
};
use std::collections::BTreeSet;

/// The bounds of the segments and the rule that made them.
pub(super) fn cut(
    graph: &Graph,
    borders: &Borders,
    options: &SegmentOptions,
) -> Result<(Vec<usize>, SplitRule)> {
    let found = if options.split_points.is_empty() {
        by_family(graph, options)?
    } else {
        by_given_points(graph, options)?
    };
    let num_nodes = borders.num_nodes();
    let mut bounds = vec![0];
    let points = found.len();
    for first in found {
        // A layer whose first node stands before the end of an all-reduce begins after it.
        let legal = (first..num_nodes).find(|&border| borders.legal[border]);
        bounds.extend(legal.filter(|&border| border > bounds[bounds.len() - 1]));
    }
    bounds.push(num_nodes);
    Ok((bounds, SplitRule::LayerSplit { points }))
}

fn by_family(graph: &Graph, options: &SegmentOptions) -> Result<BTreeSet<usize>> {
    let family = options.family.as_deref().unwrap_or_default();
    let has_points = |family: &Family| !family.split_points.is_empty();
    let known = models::family(family).filter(|family| has_points(family));
    let points = known.map(|family| family.split_points);
    let points = points.ok_or_else(|| Error::UnknownFamily {
        found: family.to_owned(),
        known: models::model_types_with(has_points),
    })?;
    let found: BTreeSet<_> = points
        .iter()
        .flat_map(|point| first_nodes(graph, point))
        .collect();
    if found.is_empty() {
        return Err(Error::NoSplitPoint {
            family: family.to_owned(),
            points: points.join(", "),
        });
    }
    Ok(found)
}

fn by_given_points(graph: &Graph, options: &SegmentOptions) -> Result<BTreeSet<usize>> {
    let mut found = BTreeSet::new();
    for point in &options.split_points {
        let nodes = first_nodes(graph, point);
        if nodes.is_empty() {
            return Err(unknown_point(graph, point));
        }
        found.extend(nodes);
    }
    Ok(found)
}

/// The first node of each module or parameter that a point stands for.
fn first_nodes(graph: &Graph, point: &str) -> Vec<usize> {
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

/// Names the module or parameter that the user may have meant.
fn unknown_point(graph: &Graph, point: &str) -> Error {
    let mut names = BTreeSet::new();
    for path in graph
        .nodes()
        .iter()
        .flat_map(|node| paths(graph, node))
        .filter(|path| !path.is_empty())
    {
        names.extend(path.match_indices('.').map(|(dot, _)| &path[..dot]));
        names.insert(path);
    }
    let is_end = |name: &&str| {
        let head = name.strip_suffix(point);
        head.is_some_and(|head| head.ends_with('.'))
    };
    let end = names.iter().copied().find(is_end);
    let nearest = end.or_else(|| closest(point, names.iter().copied()));
    Error::UnknownSplitPoint {
        point: point.to_owned(),
        nearest: nearest.unwrap_or_default().to_owned(),
    }
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
