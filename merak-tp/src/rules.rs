//! What each operation does with operands that are split.
//!
//! A rule reads the whole types and the placements of a node's operands and answers with a
//! [`NodePlacement`]: how it needs each operand, the operation that a rank runs on its part, and
//! how the results lie. It does not choose the conversion from a placement to a need.

mod attention;
mod elementwise;
mod linear;
mod norm;
mod regions;
mod sequence;
mod shape;
mod vocab;

use crate::{Options, Result, layers::Role};
use merak_trace::{
    Node, Op, Placement, Shard, TensorType,
    op::{Class, Region, RegionKind},
};

/// How a node needs an operand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Need {
    /// The whole value, for the same work on every rank.
    Whole,
    /// The whole value, for a different part of the work on each rank: gradients are summed, those
    /// of a parameter once per step under sequence parallelism.
    Copied,
    /// A slice per rank.
    Cut(Shard),
    /// One of this many equal pieces of the last dimension per rank, each on neighbouring ranks.
    Spread(usize),
}

/// A node that is to be placed.
#[derive(Debug)]
pub(crate) struct Site<'a> {
    pub(crate) node: &'a Node,
    /// Whole types of the operands.
    pub(crate) types: Vec<&'a TensorType>,
    /// How the operands lie; never partial.
    pub(crate) placements: Vec<&'a Placement>,
    /// Whether each operand is cut along the sequence, which never has padding.
    pub(crate) along_sequence: Vec<bool>,
    /// Whether each operand is a weight, no dimension of which is a sequence.
    pub(crate) are_weights: Vec<bool>,
    /// Whole types of the results.
    pub(crate) results: Vec<&'a TensorType>,
    /// Whether each result is used.
    pub(crate) used: Vec<bool>,
    /// How the lists split the node.
    pub(crate) role: Option<&'a Role>,
    pub(crate) degree: usize,
    pub(crate) options: &'a Options,
}

/// How a node is placed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NodePlacement {
    pub(crate) needs: Vec<Need>,
    /// What a rank runs.
    pub(crate) op: Op,
    /// How the results lie; a partial one is reduced at once.
    pub(crate) results: Vec<Placement>,
    /// Whether the last operand is added to the reduced result instead of going to `op`.
    pub(crate) adds_last: bool,
    /// Whether it is the first to cut the sequence.
    pub(crate) cuts_sequence: bool,
    /// The cut that the first result turns to at once.
    pub(crate) turns: Option<Shard>,
}

impl NodePlacement {
    fn new(needs: impl Into<Vec<Need>>, op: Op, results: impl Into<Vec<Placement>>) -> Self {
        Self {
            needs: needs.into(),
            op,
            results: results.into(),
            adds_last: false,
            cuts_sequence: false,
            turns: None,
        }
    }
}

impl Site<'_> {
    /// How an operand is cut, if it is.
    fn shard(&self, operand: usize) -> Option<&Shard> {
        self.placements[operand].as_shard()
    }

    /// Whether the cut of an operand leaves padding on the last ranks.
    fn pads(&self, operand: usize) -> bool {
        let divides = |part: &usize| part.is_multiple_of(self.degree);
        let shard = self
            .shard(operand)
            .filter(|_| !self.along_sequence[operand]);
        shard.is_some_and(|shard| !shard.parts.iter().all(divides))
    }

    /// Whether nothing cuts the node: no operand is cut, no list names it, and it is none of those
    /// that are the first to cut a sequence.
    fn stays_whole(&self) -> bool {
        let op = &self.node.op;
        let is_scatter = |region: Region<'_>| matches!(region.kind, RegionKind::Scatter(_));
        let may_cut = op.class() == Class::Lookup || op.region().is_some_and(is_scatter);
        let all_whole = (0..self.types.len()).all(|operand| self.shard(operand).is_none());
        all_whole && self.role.is_none() && !may_cut
    }

    /// Every rank computes the same from whole operands.
    fn whole(&self) -> NodePlacement {
        let needs = vec![Need::Whole; self.types.len()];
        NodePlacement::new(
            needs,
            self.node.op.clone(),
            vec![Placement::Replicate; self.results.len()],
        )
    }
}

/// Decides how a node is placed. An operation without a rule gets whole operands.
///
/// # Errors
/// When a size cannot be split as the lists ask for.
pub(crate) fn plan(site: &Site<'_>) -> Result<NodePlacement> {
    if site.stays_whole() {
        return Ok(site.whole());
    }
    Ok(match &site.node.op {
        Op::Linear { layout, bias } => linear::linear(site, *layout, *bias)?,
        Op::MatMul {
            transpose_a,
            transpose_b,
        } => linear::matmul(site, *transpose_a, *transpose_b),
        Op::Attention(spec) => attention::attention(site, spec)?,
        Op::Rope(rope) => attention::rope(site, rope),
        Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax => norm::over_last_dim(site),
        Op::Activation(_)
        | Op::Scale { .. }
        | Op::InverseRoot
        | Op::Identity
        | Op::ShareGrad { .. }
        | Op::Cast { .. } => elementwise::unary(site),
        Op::Dropout(dropout) => elementwise::dropout(site, dropout)?,
        Op::Add | Op::Mul | Op::SiluMul => elementwise::binary(site),
        Op::Reshape { shape } => shape::reshape(site, shape),
        Op::Transpose { perm } => shape::transpose(site, perm),
        Op::Split { dim, sizes } => shape::split(site, *dim, sizes),
        Op::Concat { dim } => shape::concat(site, *dim),
        Op::SumLeading { .. } => shape::sum_leading(site),
        Op::SumAll => shape::sum_all(site),
        Op::Embedding { padding, .. } => vocab::embedding(site, *padding)?,
        Op::CrossEntropy { label_smoothing } => vocab::cross_entropy(site, *label_smoothing),
        Op::VocabMax { .. } | Op::VocabSums { .. } | Op::VocabLoss { .. } => vocab::of_slice(site),
        Op::CopyTo { .. }
        | Op::AllReduce { .. }
        | Op::AllGather { .. }
        | Op::Scatter { .. }
        | Op::ReduceScatter { .. }
        | Op::AllToAll { .. } => regions::region(site)?,
        Op::Positions { .. }
        | Op::SeenPositions { .. }
        | Op::DocumentPositions { .. }
        | Op::RelativeBuckets(_)
        | Op::Zeros { .. }
        // Gradients are added after the rewrite.
        | Op::LinearGradInput { .. }
        | Op::LinearGradWeight { .. }
        | Op::EmbeddingGrad { .. }
        | Op::LayerNormGradInput
        | Op::LayerNormGradParams
        | Op::RmsNormGradInput
        | Op::RmsNormGradParams
        | Op::AttentionGrad(_)
        | Op::JoinAttention
        | Op::ActivationGrad(_)
        | Op::SiluMulGrad
        | Op::SoftmaxGrad
        | Op::CrossEntropyGrad { .. }
        | Op::SumAllGrad => site.whole(),
    })
}
