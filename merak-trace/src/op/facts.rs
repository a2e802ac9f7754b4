//! What passes and planners ask about an operation, in one table.

use super::{
    Attention, AxisSlice, Direction, DropoutSpec, Op, Reduction, Region, RegionKind, Ring,
    WeightLayout,
};
use merak_mpu::Axis;

/// The place of the results of an operation in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultMemory {
    /// In memory of their own.
    Own,
    /// In the memory of the first operand.
    View,
    /// A backend may write them into the memory of the first operand where that has the type of the
    /// result and nothing else needs it; otherwise in memory of their own.
    Operand,
    /// Sums: a kernel can add them straight to their accumulator; otherwise in memory of their own.
    Sum,
}

/// The class of an operation in the passes over a graph. Operations of one class are treated alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class<'a> {
    /// Numbers that come from sizes or masks: no parameter enters.
    Source,
    /// A product with a matrix, the second operand, that is stored in this way.
    Linear(WeightLayout),
    /// A lookup of rows of a table, the second operand.
    Lookup,
    /// A layer norm.
    LayerNorm,
    /// An RMS norm.
    RmsNorm,
    /// Attention of queries to keys.
    Attention,
    /// A turn of pairs of features by their position.
    Rope,
    /// A function of each element that the backward needs the operands of.
    Activation,
    /// Random zeroing.
    Dropout,
    /// A loss of logits, the first operand, and labels, the second. The logits are a slice of the
    /// classes where there is one.
    Loss(Option<AxisSlice>),
    /// A sum of two operands.
    Add,
    /// An elementwise product of two operands.
    Mul,
    /// The operand itself.
    Identity,
    /// The operand's elements in order, in another shape, type or scale.
    Form,
    /// The operand's elements in another order.
    Transpose,
    /// The sum of all elements.
    Total,
    /// Another function with a gradient, which no pass treats in a way of its own.
    Function,
    /// A constant to the backward: no gradient passes to the operands.
    Constant,
    /// The gradient of another operation.
    Gradient,
    /// A border between whole and sharded work.
    Region(Region<'a>),
}

/// The name in renderings and messages, the class, and where the results lie.
type Facts<'a> = (&'static str, Class<'a>, ResultMemory);

/// The pattern of the operations that draw no random numbers. An operation that is in no pattern of
/// a match does not compile.
macro_rules! without_draws {
    () => {
        Self::Positions { .. }
            | Self::SeenPositions { .. }
            | Self::DocumentPositions { .. }
            | Self::RelativeBuckets(_)
            | Self::Linear { .. }
            | Self::LinearGradInput { .. }
            | Self::LinearGradWeight { .. }
            | Self::MatMul { .. }
            | Self::Embedding { .. }
            | Self::EmbeddingGrad { .. }
            | Self::LayerNorm { .. }
            | Self::LayerNormGradInput
            | Self::LayerNormGradParams
            | Self::RmsNorm { .. }
            | Self::RmsNormGradInput
            | Self::RmsNormGradParams
            | Self::JoinAttention
            | Self::Rope(_)
            | Self::Activation(_)
            | Self::ActivationGrad(_)
            | Self::SiluMul
            | Self::SiluMulGrad
            | Self::Softmax
            | Self::SoftmaxGrad
            | Self::InverseRoot
            | Self::CrossEntropy { .. }
            | Self::CrossEntropyGrad { .. }
            | Self::VocabMax { .. }
            | Self::VocabSums { .. }
            | Self::VocabLoss { .. }
            | Self::Add
            | Self::Mul
            | Self::Scale { .. }
            | Self::SumLeading { .. }
            | Self::SumAll
            | Self::SumAllGrad
            | Self::Identity
            | Self::ShareGrad { .. }
            | Self::Cast { .. }
            | Self::Reshape { .. }
            | Self::Transpose { .. }
            | Self::Split { .. }
            | Self::Concat { .. }
            | Self::Zeros { .. }
            | Self::CopyTo { .. }
            | Self::AllReduce { .. }
            | Self::AllGather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter { .. }
            | Self::AllToAll { .. }
    };
}

impl Op {
    #[expect(
        clippy::too_many_lines,
        reason = "a table with one entry per operation"
    )]
    fn facts(&self) -> Facts<'_> {
        let (own, view, sum) = (ResultMemory::Own, ResultMemory::View, ResultMemory::Sum);
        let operand = ResultMemory::Operand;
        match self {
            Self::Positions { .. } => ("positions", Class::Source, own),
            Self::SeenPositions { .. } => ("seen_positions", Class::Source, own),
            Self::DocumentPositions { .. } => ("document_positions", Class::Source, own),
            Self::RelativeBuckets(_) => ("relative_buckets", Class::Source, own),
            Self::Zeros { .. } => ("zeros", Class::Source, own),

            Self::Linear { layout, .. } => ("linear", Class::Linear(*layout), own),
            Self::LinearGradInput { .. } => ("linear_grad_input", Class::Gradient, own),
            Self::LinearGradWeight { .. } => ("linear_grad_weight", Class::Gradient, sum),
            Self::MatMul { .. } => ("matmul", Class::Function, own),
            Self::Embedding { .. } => ("embedding", Class::Lookup, own),
            Self::EmbeddingGrad { .. } => ("embedding_grad", Class::Gradient, sum),

            Self::LayerNorm { .. } => ("layer_norm", Class::LayerNorm, own),
            Self::LayerNormGradInput => ("layer_norm_grad_input", Class::Gradient, own),
            Self::LayerNormGradParams => ("layer_norm_grad_params", Class::Gradient, sum),
            Self::RmsNorm { .. } => ("rms_norm", Class::RmsNorm, own),
            Self::RmsNormGradInput => ("rms_norm_grad_input", Class::Gradient, own),
            Self::RmsNormGradParams => ("rms_norm_grad_params", Class::Gradient, sum),

            Self::Attention(spec) if spec.ring().is_some() => {
                ("ring_attention", Class::Attention, own)
            }
            Self::Attention(_) => ("attention", Class::Attention, own),
            Self::AttentionGrad(spec) if spec.ring().is_some() => {
                ("ring_attention_grad", Class::Gradient, own)
            }
            Self::AttentionGrad(_) => ("attention_grad", Class::Gradient, own),
            Self::JoinAttention => ("join_attention", Class::Function, own),
            Self::Rope(rope) if rope.inverse => ("rope_inverse", Class::Rope, own),
            Self::Rope(_) => ("rope", Class::Rope, own),

            Self::Activation(kind) => (kind.names().0, Class::Activation, own),
            Self::ActivationGrad(kind) => (kind.names().1, Class::Gradient, own),
            Self::SiluMul => ("silu_mul", Class::Activation, own),
            Self::SiluMulGrad => ("silu_mul_grad", Class::Gradient, own),
            Self::Softmax => ("softmax", Class::Function, own),
            Self::SoftmaxGrad => ("softmax_grad", Class::Gradient, own),
            Self::InverseRoot => ("inverse_root", Class::Constant, own),
            Self::Dropout(_) => ("dropout", Class::Dropout, own),

            Self::CrossEntropy { .. } => ("cross_entropy", Class::Loss(None), own),
            Self::CrossEntropyGrad { .. } => ("cross_entropy_grad", Class::Gradient, operand),
            Self::VocabMax { .. } => ("vocab_max", Class::Constant, own),
            Self::VocabSums { .. } => ("vocab_sums", Class::Constant, own),
            Self::VocabLoss { slice, .. } => ("vocab_loss", Class::Loss(Some(*slice)), own),

            Self::Add => ("add", Class::Add, operand),
            Self::Mul => ("mul", Class::Mul, own),
            Self::Scale { .. } => ("scale", Class::Form, own),
            Self::SumLeading { .. } => ("sum_leading", Class::Function, sum),
            Self::SumAll => ("sum_all", Class::Total, own),
            Self::SumAllGrad => ("sum_all_grad", Class::Gradient, own),
            Self::Identity => ("identity", Class::Identity, view),
            Self::ShareGrad { .. } => ("share_grad", Class::Identity, view),
            Self::Cast { .. } => ("cast", Class::Form, own),
            Self::Reshape { .. } => ("reshape", Class::Form, view),
            Self::Transpose { .. } => ("transpose", Class::Transpose, own),
            Self::Split { .. } => ("split", Class::Function, own),
            Self::Concat { .. } => ("concat", Class::Function, own),

            Self::CopyTo { axis } => ("copy_to", region(*axis, RegionKind::CopyTo), view),
            Self::AllReduce { axis, op } => {
                let name = match op {
                    Reduction::Sum => "all_reduce",
                    Reduction::Max => "all_reduce_max",
                };
                (name, region(*axis, RegionKind::AllReduce(*op)), operand)
            }
            Self::AllGather { axis, shard, grad } => {
                let kind = RegionKind::AllGather { shard, grad: *grad };
                ("all_gather", region(*axis, kind), own)
            }
            Self::Scatter { axis, shard, .. } => {
                ("scatter", region(*axis, RegionKind::Scatter(shard)), own)
            }
            Self::ReduceScatter { axis, shard, .. } => {
                let kind = RegionKind::ReduceScatter(shard);
                ("reduce_scatter", region(*axis, kind), own)
            }
            Self::AllToAll { axis, from, to } => {
                let kind = RegionKind::AllToAll { from, to };
                ("all_to_all", region(*axis, kind), own)
            }
        }
    }

    /// The name in renderings and messages.
    pub fn name(&self) -> &'static str {
        self.facts().0
    }

    /// The class in the passes over a graph.
    pub fn class(&self) -> Class<'_> {
        self.facts().1
    }

    /// The place of the results in memory.
    pub fn result_memory(&self) -> ResultMemory {
        self.facts().2
    }

    /// Its work between ranks, if it is a border between whole and sharded work.
    pub fn region(&self) -> Option<Region<'_>> {
        let Class::Region(region) = self.class() else {
            return None;
        };
        Some(region)
    }

    /// The mesh axis that this operation communicates over, forward.
    pub fn communicates(&self) -> Option<Axis> {
        if let Some(ring) = self.ring() {
            return Some(ring.slice.axis);
        }
        let region = self.region()?;
        region.kind.forward().map(|_| region.axis)
    }

    /// The keys and values that go round the ranks, if some do.
    pub fn ring(&self) -> Option<Ring<'_>> {
        let (spec, direction) = self.attends()?;
        Some(Ring {
            spec,
            slice: spec.ring()?,
            keys: match direction {
                Direction::Forward => 1..3,
                Direction::Gradient => 2..4,
            },
            direction,
        })
    }

    /// The attention that the operation computes, or whose gradient it computes.
    #[expect(
        clippy::unnested_or_patterns,
        reason = "one of the patterns is a macro's"
    )]
    fn attends(&self) -> Option<(&Attention, Direction)> {
        match self {
            Self::Attention(spec) => Some((spec, Direction::Forward)),
            Self::AttentionGrad(spec) => Some((spec, Direction::Gradient)),
            Self::Dropout(_) | without_draws!() => None,
        }
    }

    /// Whether a backend computes the results; the interpreter has those of other operations.
    pub fn has_kernel(&self) -> bool {
        let is_between_ranks = matches!(self.class(), Class::Identity | Class::Region(_));
        !is_between_ranks && self.ring().is_none()
    }

    /// Whether the results count as constants: no gradient passes to the operands.
    pub fn stops_gradient(&self) -> bool {
        let is_max = |region: Region<'_>| region.kind == RegionKind::AllReduce(Reduction::Max);
        self.class() == Class::Constant || self.region().is_some_and(is_max)
    }

    /// The dimension of its second operand, a matrix or table, that the product or lookup sums
    /// over: there, the operand holds the inputs of the layer.
    pub fn summed_dim(&self) -> Option<usize> {
        match self.class() {
            Class::Linear(layout) => Some(layout.in_dim()),
            Class::Lookup => Some(0),
            Class::Source
            | Class::LayerNorm
            | Class::RmsNorm
            | Class::Attention
            | Class::Rope
            | Class::Activation
            | Class::Dropout
            | Class::Loss(_)
            | Class::Add
            | Class::Mul
            | Class::Identity
            | Class::Form
            | Class::Transpose
            | Class::Total
            | Class::Function
            | Class::Constant
            | Class::Gradient
            | Class::Region(_) => None,
        }
    }

    /// The random zeroing that the operation does, or is the gradient of.
    pub fn dropout_mut(&mut self) -> Option<&mut DropoutSpec> {
        match self {
            Self::Dropout(dropout) => Some(dropout),
            Self::Attention(attention) | Self::AttentionGrad(attention) => {
                attention.dropout.as_mut()
            }
            without_draws!() => None,
        }
    }
}

fn region(axis: Axis, kind: RegionKind<'_>) -> Class<'_> {
    Class::Region(Region { axis, kind })
}
