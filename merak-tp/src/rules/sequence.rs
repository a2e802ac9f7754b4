//! Operations at both ends of a model, where each rank may have a slice of the sequence.

use super::{Need, NodePlacement, Site};
use crate::Result;
use merak_trace::Placement;

/// Looks up the ids of the own slice of the sequence.
pub(super) fn lookup(site: &Site<'_>) -> Result<NodePlacement> {
    let (shard, cuts_sequence) = match site.shard(0) {
        Some(shard) => (shard.clone(), false),
        None => match site.first_cut()? {
            Some(shard) => (shard, true),
            None => return Ok(site.whole()),
        },
    };
    Ok(NodePlacement {
        cuts_sequence,
        ..NodePlacement::new(
            [Need::Cut(shard.clone()), Need::Copied],
            site.node.op.clone(),
            [Placement::Shard(shard)],
        )
    })
}

/// Sums the losses of the own tokens, whose logits are whole.
pub(super) fn cross_entropy(site: &Site<'_>) -> NodePlacement {
    let last = site.types[0].ndim() - 1;
    match site.shard(0) {
        Some(shard) if shard.dim < last && shard.is_of_one() && !site.used[1] => {
            let rows = site.results[1].numel();
            NodePlacement::new(
                [Need::Cut(shard.clone()), Need::Cut(shard.clone())],
                site.node.op.clone(),
                [Placement::Partial, Placement::shard(0, rows)],
            )
        }
        _ => site.whole(),
    }
}
