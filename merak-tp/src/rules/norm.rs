//! Operations that need the whole of the last dimension.

use super::{Need, NodePlacement, Site};
use merak_trace::Placement;

/// Layer norm, RMS norm, softmax: other dimensions may be split, and parameters then get a part of
/// their gradient from each rank.
///
/// Further results (statistics per row) have no split form unless whole leading dimensions are cut,
/// so they may then not be used outside the gradient.
pub(super) fn over_last_dim(site: &Site<'_>) -> NodePlacement {
    let last = site.types[0].ndim() - 1;
    let statistics_used = site.used[1..].contains(&true);
    match site.shard(0) {
        Some(shard) if shard.dim < last && !statistics_used => {
            let mut needs = vec![Need::Copied; site.types.len()];
            needs[0] = Need::Cut(shard.clone());
            let statistics = site.results[1..]
                .iter()
                .map(|rows| Placement::shard(0, rows.numel()));
            let results: Vec<_> = std::iter::once(Placement::Shard(shard.clone()))
                .chain(statistics)
                .collect();
            NodePlacement::new(needs, site.node.op.clone(), results)
        }
        _ => site.whole(),
    }
}
