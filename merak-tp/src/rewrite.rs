//! Splits a model for the ranks of an axis, and says how its parameters are cut.

use crate::{
    Error, LayerLists, Options, Report, Result, Rewritten,
    error::{MOST_LISTED, shares_of_heads},
    layers::Matches,
    matching,
    rewriter::Rewriter,
};
use merak_trace::{Axis, Graph, Node, Op, Placement, Shard};
use std::collections::{BTreeMap, BTreeSet};

/// Splits a model over `degree` ranks of the tensor axis by the given lists.
///
/// Names, scopes and random keys of the model's nodes stay; parameters keep their names, full types
/// and initialisers and get a placement. Inputs and outputs are whole on every rank. A `degree` of
/// 1 returns the graph unchanged.
///
/// # Communication
/// Per microbatch and split region, forward one all-reduce (after the row layer) and backward one
/// (before the column layers), each of the bytes of one activation; [`Report::collectives`] has the
/// sums.
///
/// # Errors
/// When the lists are incomplete, ask for what is not available, match nothing or one layer both
/// ways; when features or heads are no multiple of `degree`; when the model was rewritten before.
pub fn rewrite(model: &Graph, lists: &LayerLists, degree: usize) -> Result<Rewritten> {
    rewrite_with(model, &Options::new(degree).with_lists(lists.clone()))
}

/// [`rewrite`] with further [`Options`].
///
/// # Communication
/// As of [`rewrite`]. Where the vocabulary is split, forward an all-reduce after each lookup, and
/// two of some numbers per row in the loss, which takes the place of the gathered logits.
///
/// With [`Sequence::Cut`](crate::Sequence::Cut) instead, per microbatch and split region, forward
/// an all-gather and a reduce-scatter, and backward as many, each of the bytes of one whole
/// activation. The caller sums the gradients of parameters that are
/// [`summed`](merak_trace::Param::summed) over the ranks, once per step. The sum of a lookup in a
/// split vocabulary is then a reduce-scatter, and an all-gather precedes its output layer.
///
/// # Errors
/// As [`rewrite`], and when a sequence that is to be cut is no multiple of the degree.
pub fn rewrite_with(model: &Graph, options: &Options) -> Result<Rewritten> {
    match options.degree {
        0 => return Err(Error::ZeroDegree { axis: options.axis }),
        1 => {
            return Ok(Rewritten {
                graph: model.clone(),
                report: Report::new(options.axis, 1),
            });
        }
        degree => match options.axis {
            Axis::Tensor => options.lists.check(degree)?,
            Axis::Sequence | Axis::Data | Axis::Pipeline => {}
        },
    }
    refuse_rewritten(model, options.axis)?;
    split(model, options).map_err(|mut error| {
        if let Some(legal) = error.legal_mut() {
            // Key heads may be repeated on more ranks than their features divide.
            legal.extend(model.nodes().iter().flat_map(|node| match &node.op {
                Op::Attention(spec) => shares_of_heads(spec),
                _ => Vec::new(),
            }));
            legal.sort_unstable();
            legal.dedup();
            // What suits one layer may not suit the others.
            let suits = |&degree: &usize| {
                degree == 1 || split(model, &options.clone().with_degree(degree)).is_ok()
            };
            *legal = legal
                .iter()
                .copied()
                .filter(suits)
                .take(MOST_LISTED + 1)
                .collect();
        }
        error
    })
}

/// The rewrite itself, for a degree above 1.
fn split(model: &Graph, options: &Options) -> Result<Rewritten> {
    let matches = match options.axis {
        Axis::Sequence => Matches::default(),
        Axis::Tensor | Axis::Data | Axis::Pipeline => matching::find(model, options)?,
    };
    let report = Report {
        kept_whole: matches.kept_whole.clone(),
        unmatched: matches.unmatched.clone(),
        ..Report::new(options.axis, options.degree)
    };
    let mut copied = BTreeSet::new();
    loop {
        let mut rewriter = Rewriter::new(model, options, report.clone())?;
        rewriter.copied.clone_from(&copied);
        rewriter.place_all(&matches)?;
        // A gradient is a sum of summands alone, or of whole gradients alone.
        let mixed: Vec<_> = rewriter.mixed_params().collect();
        if mixed.is_empty() || options.axis == Axis::Sequence {
            return rewriter.finish();
        }
        copied.extend(mixed);
    }
}

/// How the lists cut each parameter, for any degree: the dimension and the sizes of its parts.
/// Parameters that every rank keeps whole are left out. For writers of checkpoints that another
/// degree reads.
///
/// # Errors
/// As [`rewrite`], except that lists that are empty or match nothing cut nothing.
pub fn cuts(model: &Graph, lists: &LayerLists) -> Result<BTreeMap<String, Shard>> {
    cuts_with(model, &Options::new(1).with_lists(lists.clone()))
}

/// [`cuts`] with further [`Options`], whose degree and sequence do not matter.
///
/// # Errors
/// As of [`cuts`].
pub fn cuts_with(model: &Graph, options: &Options) -> Result<BTreeMap<String, Shard>> {
    if options.lists == LayerLists::default() {
        return Ok(BTreeMap::new());
    }
    options.lists.check(1)?;
    refuse_rewritten(model, Axis::Tensor)?;
    let options = Options::new(1)
        .with_lists(options.lists.clone())
        .with_vocab(options.vocab);
    let matches = match matching::find(model, &options) {
        Err(Error::NothingMatched { .. }) => return Ok(BTreeMap::new()),
        matches => matches?,
    };
    // Degree 1 divides every size.
    let mut rewriter = Rewriter::new(model, &options, Report::new(options.axis, 1))?;
    rewriter.place_all(&matches)?;
    let params = rewriter.graph.params().iter();
    Ok(params
        .filter_map(|param| {
            let shard = param.placements.on(Axis::Tensor).as_shard()?;
            Some((param.name.clone(), shard.clone()))
        })
        .collect())
}

/// Refuses a model that was rewritten for the axis: a second rewrite would split it again.
fn refuse_rewritten(model: &Graph, axis: Axis) -> Result<()> {
    let param = model
        .params()
        .iter()
        .find(|param| *param.placements.on(axis) != Placement::Replicate)
        .map(|param| param.name.clone());
    let is_split = |node: &&Node| {
        let region = node.op.region().map(|region| region.axis);
        region.or(node.op.communicates()) == Some(axis)
    };
    let node = model.nodes().iter().find(is_split);
    match param.or_else(|| node.map(|node| node.name.to_string())) {
        Some(place) => Err(Error::AlreadySplit { place, axis }),
        None => Ok(()),
    }
}
