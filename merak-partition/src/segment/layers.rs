//! `layer_split`: cut before the first node of each layer.

use super::{
    MovedPoint, SegmentOptions, SplitRule,
    paths::{first_nodes, modules, nearest},
};
use crate::{Error, Result, borders::Borders};
use merak_trace::{
    Graph,
    models::{self, Family},
};
use std::{collections::BTreeSet, ops::RangeInclusive};

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
    // A layer whose first node stands before the end of an all-reduce begins after it.
    let legal = |first: usize| (first..num_nodes).find(|&border| borders.legal[border]);
    for first in found {
        bounds.extend(legal(first).filter(|&border| border > bounds[bounds.len() - 1]));
    }
    bounds.push(num_nodes);
    let moved = moved(graph, options, legal);
    Ok((bounds, SplitRule::LayerSplit { points, moved }))
}

/// The given points that lie within leaf modules, with the border that is cut instead: for a point
/// with `{i}`, that of the first number.
fn moved(
    graph: &Graph,
    options: &SegmentOptions,
    border: impl Fn(usize) -> Option<usize>,
) -> Vec<MovedPoint> {
    let mut leaves = Vec::new();
    for name in &options.leaf_modules {
        leaves.extend(modules(graph, name).into_iter().map(|nodes| (name, nodes)));
    }
    let moved = |point: &String| {
        first_nodes(graph, point).into_iter().find_map(|first| {
            let is_within =
                |nodes: &RangeInclusive<usize>| *nodes.start() < first && first <= *nodes.end();
            let (leaf, _) = leaves.iter().find(|(_, nodes)| is_within(nodes))?;
            let node = border(first).map(|border| &graph.nodes()[border]);
            Some(MovedPoint {
                point: point.clone(),
                leaf: (*leaf).clone(),
                before: node.map(|node| node.name.to_string()),
            })
        })
    };
    options.split_points.iter().filter_map(moved).collect()
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
            return Err(Error::UnknownSplitPoint {
                point: point.to_owned(),
                nearest: nearest(graph, point),
            });
        }
        found.extend(nodes);
    }
    Ok(found)
}
