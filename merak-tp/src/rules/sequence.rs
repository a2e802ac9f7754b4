//! Operations at both ends of a model, where each rank may have a slice of the sequence.

use super::{Need, NodePlacement, Site};
use crate::Result;
use merak_trace::{Placement, Shard};

impl Site<'_> {
    /// How the first operand is cut, which is whole: the ids of a lookup, `[batch, sequence]` or
    /// `[sequence, batch]`, along the sequence, and numbers of positions `[sequence]`, which are
    /// the same for all samples; other values have features after these. Weights have no sequence.
    pub(super) fn first_cut(&self) -> Result<Option<Shard>> {
        let ids = self.types[0];
        if self.are_weights[0] {
            return Ok(None);
        }
        let most = if ids.dtype.is_float() { 3 } else { 2_usize };
        let missing = most.checked_sub(ids.ndim());
        let dim = self
            .options
            .sequence_dim()
            .zip(missing)
            .and_then(|(dim, missing)| dim.checked_sub(missing));
        match dim {
            Some(dim) if dim < ids.ndim() => self.options.cut(ids, dim, &self.node.scope).map(Some),
            _ => Ok(None),
        }
    }
}

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
