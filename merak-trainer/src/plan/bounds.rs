//! The stages of a plan in other graphs of its model.

use merak_trace::{Graph, StageCuts};
use std::collections::{BTreeMap, BTreeSet};

/// The first nodes of the stages of `cuts` in another graph of the same model, and its length.
///
/// Each stage begins at the same node of the model as in `own`. Before that node, conversions
/// between placements may differ in kind and number. A stage takes as many of them as in `own`, if
/// there are as many.
pub(super) fn bounds_in(cuts: &StageCuts, own: &Graph, model: &Graph, other: &Graph) -> Vec<usize> {
    let of_model: BTreeSet<_> = model.nodes().iter().map(|node| &node.name).collect();
    let places = other.nodes().iter().enumerate();
    let places: BTreeMap<_, _> = places.map(|(place, node)| (&node.name, place)).collect();
    let is_conversion = |place: usize| !of_model.contains(&other.nodes()[place].name);
    let bound = |stage: usize| {
        let start = cuts.nodes(stage).start;
        let mut later = own.nodes()[start..].iter().enumerate();
        let found = later.find_map(|(before, node)| {
            let place = places
                .get(&node.name)
                .filter(|_| of_model.contains(&node.name));
            place.map(|&place| (before, place))
        });
        let (before, place) = found.unwrap_or((0, other.nodes().len()));
        let conversions = (0..place).rev().take_while(|&place| is_conversion(place));
        place - conversions.take(before).count()
    };
    let bounds = (0..cuts.num_stages()).map(|stage| if stage == 0 { 0 } else { bound(stage) });
    bounds.chain([other.nodes().len()]).collect()
}
