//! Matrix products: column and row layers after
//! [Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3.

use super::{Need, NodePlacement, Site};
use crate::{Error, Result, SplitKind, error::divisors, layers::Role};
use merak_trace::{Op, Placement, Shard, op::WeightLayout};

pub(super) fn linear(site: &Site<'_>, layout: WeightLayout, bias: bool) -> Result<NodePlacement> {
    match site.role {
        Some(role) if role.kind == SplitKind::Col => column(site, role, layout, bias),
        Some(role) => row(site, role, layout, bias),
        None => Ok(unmatched(site, bias)),
    }
}

/// `y_r = x W_r + b_r`: the output features are split part by part.
fn column(site: &Site<'_>, role: &Role, layout: WeightLayout, bias: bool) -> Result<NodePlacement> {
    if !role.pads {
        for &part in &role.parts {
            divides(site, role, part, "output features")?;
        }
    }
    let cut = |dim| Shard::new(dim, role.parts.clone());
    let mut needs = vec![Need::Copied, Need::Cut(cut(layout.out_dim()))];
    needs.extend(bias.then(|| Need::Cut(cut(0))));
    let last = site.results[0].ndim() - 1;
    Ok(NodePlacement::new(
        needs,
        site.node.op.clone(),
        [Placement::Shard(cut(last))],
    ))
}

/// `y = Σ x_r W_r + b`: the input features are split as they come, the bias is added once, after
/// the sum.
fn row(site: &Site<'_>, role: &Role, layout: WeightLayout, bias: bool) -> Result<NodePlacement> {
    let last = site.types[0].ndim() - 1;
    let parts = match site.shard(0) {
        Some(shard) if shard.dim == last => shard.parts.clone(),
        _ => vec![site.types[0].last_dim()],
    };
    for &part in &parts {
        divides(site, role, part, "input features")?;
    }
    let cut = |dim| Need::Cut(Shard::new(dim, parts.clone()));
    let mut needs = vec![cut(last), cut(layout.in_dim())];
    needs.extend(bias.then_some(Need::Whole));
    let op = Op::Linear {
        layout,
        bias: false,
    };
    Ok(NodePlacement {
        adds_last: bias,
        ..NodePlacement::new(needs, op, [Placement::Partial])
    })
}

/// A layer that no list names: it needs whole rows, but each rank may have some of them.
fn unmatched(site: &Site<'_>, bias: bool) -> NodePlacement {
    let last = site.types[0].ndim() - 1;
    match site.shard(0) {
        Some(shard) if shard.dim < last => {
            let mut needs = vec![Need::Cut(shard.clone()), Need::Copied];
            needs.extend(bias.then_some(Need::Copied));
            NodePlacement::new(
                needs,
                site.node.op.clone(),
                [Placement::Shard(shard.clone())],
            )
        }
        _ => site.whole(),
    }
}

fn divides(site: &Site<'_>, role: &Role, size: usize, what: &'static str) -> Result<()> {
    if size.is_multiple_of(site.degree) {
        return Ok(());
    }
    Err(Error::Indivisible {
        module: site.node.scope.to_string(),
        size,
        what,
        degree: site.degree,
        list: role.list.clone(),
        legal: divisors(size),
    })
}

/// `a [.., m, k] b [.., k, n]`: batches and outer dimensions stay split, a split `k` makes partial
/// sums.
pub(super) fn matmul(site: &Site<'_>, transpose_a: bool, transpose_b: bool) -> NodePlacement {
    let n = site.types[0].ndim();
    let dims = |transposed| {
        if transposed {
            (n - 1, n - 2)
        } else {
            (n - 2, n - 1)
        }
    };
    let ((a_rows, a_inner), (b_inner, b_cols)) = (dims(transpose_a), dims(transpose_b));
    let (own, shard) = match (site.shard(0), site.shard(1)) {
        (Some(shard), _) => (0, shard),
        (None, Some(shard)) => (1, shard),
        (None, None) => return site.whole(),
    };
    let (dim, cut) = (shard.dim, |dim| shard.along(dim));
    let (outer, inner, other_inner, result) = if own == 0 {
        (a_rows, a_inner, b_inner, n - 2)
    } else {
        (b_cols, b_inner, a_inner, n - 1)
    };
    let (other, result) = if dim == outer {
        (Need::Copied, Placement::Shard(cut(result)))
    } else if dim == inner {
        (Need::Cut(cut(other_inner)), Placement::Partial)
    } else {
        (Need::Cut(cut(dim)), Placement::Shard(cut(dim)))
    };
    let own_need = Need::Cut(cut(dim));
    let needs = if own == 0 {
        [own_need, other]
    } else {
        [other, own_need]
    };
    NodePlacement::new(needs, site.node.op.clone(), [result])
}
