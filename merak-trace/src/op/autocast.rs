//! The precision of each operation where weights are `f32` and products multiply 16 bits.
//!
//! The rules are PyTorch's: products and attention compute in 16 bits, norms, softmax, sums and
//! losses in `f32`, and all else in the types of its operands. Its lists for CUDA devices decide,
//! since those for the processor leave norms and softmax to their operands; the sum of two values
//! is `f32` here, where PyTorch lets two of 16 bits stay so.

use super::Op;

/// In which type an operation takes an operand of `f32` or of 16 bits under autocast. Operands of
/// other types stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Autocast {
    /// Rounded to 16 bits.
    Narrow,
    /// Widened to `f32`.
    Wide,
    /// In `f32` if one of the operands under this rule is `f32`, else in 16 bits.
    Widest,
    /// As it comes: the operation moves elements or treats each alone, or its kernel computes in
    /// `f32` whatever it reads.
    AsIs,
}

/// The operand of [`Op::AttentionGrad`] that holds a statistic.
const LSE: usize = 5;

impl Op {
    /// The rule for an operand, by its position.
    pub fn autocast(&self, operand: usize) -> Autocast {
        match self {
            // A statistic is always `f32`.
            Self::AttentionGrad(_) if operand == LSE => Autocast::AsIs,
            Self::Linear { .. }
            | Self::LinearGradInput { .. }
            | Self::LinearGradWeight { .. }
            | Self::MatMul { .. }
            | Self::Attention(_)
            | Self::AttentionGrad(_) => Autocast::Narrow,

            Self::EmbeddingGrad { .. }
            | Self::LayerNorm { .. }
            | Self::LayerNormGradInput
            | Self::LayerNormGradParams
            | Self::RmsNorm { .. }
            | Self::RmsNormGradInput
            | Self::RmsNormGradParams
            | Self::Softmax
            | Self::SoftmaxGrad
            | Self::InverseRoot
            | Self::Add
            | Self::SumLeading { .. } => Autocast::Wide,

            Self::ActivationGrad(_)
            | Self::SiluMul
            | Self::SiluMulGrad
            | Self::Mul
            | Self::Concat { .. } => Autocast::Widest,

            // Losses and `SumAll` add up in f32 or f64. Widened logits would be the largest value
            // of a step once more.
            Self::CrossEntropy { .. }
            | Self::CrossEntropyGrad { .. }
            | Self::VocabMax { .. }
            | Self::VocabSums { .. }
            | Self::VocabLoss { .. }
            | Self::SumAll
            | Self::SumAllGrad
            | Self::Positions { .. }
            | Self::SeenPositions { .. }
            | Self::DocumentPositions { .. }
            | Self::RelativeBuckets(_)
            | Self::Embedding { .. }
            | Self::Rope(_)
            | Self::JoinAttention
            | Self::Activation(_)
            | Self::Dropout(_)
            | Self::Scale { .. }
            | Self::Identity
            | Self::ShareGrad { .. }
            | Self::Cast { .. }
            | Self::Reshape { .. }
            | Self::Transpose { .. }
            | Self::Split { .. }
            | Self::Zeros { .. }
            | Self::CopyTo { .. }
            | Self::AllReduce { .. }
            | Self::AllGather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter { .. }
            | Self::AllToAll { .. } => Autocast::AsIs,
        }
    }
}
