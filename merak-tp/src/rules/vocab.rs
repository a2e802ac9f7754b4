//! Lookups in a table whose rows are cut, and the loss of logits whose classes are cut, after
//! [Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3.

use super::{Need, NodePlacement, Site, sequence};
use crate::Result;
use merak_trace::{Op, Placement, Shard, op::AxisSlice};

/// Each rank looks up the ids of its rows, and has zeros for others: the result is a sum. Where the
/// rows are not cut, the sequence may be.
pub(super) fn embedding(site: &Site<'_>, padding: Option<usize>) -> Result<NodePlacement> {
    let rows = site.types[1].shape[0];
    let of_rows = Shard::new(0, vec![rows]);
    if site.role.is_none() && site.shard(1) != Some(&of_rows) {
        return sequence::lookup(site);
    }
    let slice = Some(AxisSlice::new(site.options.axis, 0, rows));
    Ok(NodePlacement::new(
        [Need::Whole, Need::Cut(of_rows)],
        Op::Embedding { padding, slice },
        [Placement::Partial],
    ))
}

/// Every rank computes the loss from sums over the classes of all, which the rewriter adds before
/// it. Where each has all classes of its tokens, it sums their losses.
pub(super) fn cross_entropy(site: &Site<'_>, label_smoothing: f64) -> NodePlacement {
    let last = site.types[0].ndim() - 1;
    let Some(shard) = site.shard(0) else {
        return site.whole();
    };
    if shard.dim != last {
        return sequence::cross_entropy(site);
    }
    let [full] = shard.parts[..] else {
        return site.whole();
    };
    let slice = AxisSlice::new(site.options.axis, last, full);
    let op = Op::VocabLoss {
        label_smoothing,
        slice,
    };
    NodePlacement::new(
        [Need::Cut(shard.clone()), Need::Whole],
        op,
        [Placement::Replicate, Placement::Replicate],
    )
}

/// The same numbers of each row of the own slice of the sequence, where the classes are split over
/// the tensor axis; the loss is summed over the slices.
pub(super) fn of_slice(site: &Site<'_>) -> NodePlacement {
    let last = site.types[0].ndim() - 1;
    let Some(shard) = site.shard(0).filter(|shard| shard.dim < last) else {
        return site.whole();
    };
    // Numbers per row lie in the order of the slice's rows.
    let of_rows = |rows: usize| Shard::new(0, vec![rows]);
    let rows = of_rows(site.types[0].numel() / site.types[0].last_dim());
    let mut needs = vec![Need::Cut(rows.clone()); site.types.len()];
    needs
        .iter_mut()
        .take(2)
        .for_each(|need| *need = Need::Cut(shard.clone()));
    let results = match site.node.op {
        Op::VocabLoss { .. } => vec![Placement::Partial, Placement::Shard(rows)],
        _ => vec![Placement::Shard(rows)],
    };
    NodePlacement::new(needs, site.node.op.clone(), results)
}
