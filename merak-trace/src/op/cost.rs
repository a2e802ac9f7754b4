//! What an operation costs: a model of flops and bytes from the operation and the types of its
//! operands.
//!
//! A fused multiply-add counts as two flops. Products are exact; the few flops per element of norms
//! and activations are rounded to what a plain implementation does. Bytes are what must pass
//! through memory when nothing is cached: operands read and results written, and nothing for views.

use super::{Activation, Attention, Class, Op, ResultMemory};
use crate::TensorType;
use serde::Serialize;
use std::{iter::Sum, ops::Add};

/// The work of some nodes on one rank for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            flops: self.flops.saturating_add(other.flops),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), Add::add)
    }
}

impl Cost {
    /// The cost of an operation by the types of its operands and results; counts saturate at 64
    /// bits.
    pub(crate) fn of_op(op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> Self {
        let sizes = Sizes { operands, results };
        let saturated = |count: u128| u64::try_from(count).unwrap_or(u64::MAX);
        Self {
            flops: saturated(sizes.flops(op)),
            bytes: saturated(sizes.bytes(op)),
        }
    }
}

/// Counts in 128 bits, so that products of the sizes of two tensors fit.
struct Sizes<'a> {
    operands: &'a [&'a TensorType],
    results: &'a [&'a TensorType],
}

impl Sizes<'_> {
    /// Elements of an operand.
    fn x(&self, operand: usize) -> u128 {
        self.operands[operand].numel() as u128
    }

    /// Elements of the first result.
    fn y(&self) -> u128 {
        self.results[0].numel() as u128
    }

    /// The last dimension of an operand.
    fn columns(&self, operand: usize) -> u128 {
        self.operands[operand].last_dim() as u128
    }

    #[expect(clippy::too_many_lines, reason = "an entry per operation")]
    fn flops(&self, op: &Op) -> u128 {
        match op {
            Op::Positions { .. }
            | Op::SeenPositions { .. }
            | Op::DocumentPositions { .. }
            | Op::RelativeBuckets(_)
            | Op::Embedding { .. }
            | Op::Identity
            | Op::ShareGrad { .. }
            | Op::Cast { .. }
            | Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Split { .. }
            | Op::Concat { .. }
            | Op::Zeros { .. }
            | Op::SumAllGrad
            | Op::CopyTo { .. }
            | Op::AllReduce { .. }
            | Op::AllGather { .. }
            | Op::Scatter { .. }
            | Op::ReduceScatter { .. }
            | Op::AllToAll { .. } => 0,
            Op::Linear { bias, .. } => {
                2 * self.y() * self.columns(0) + if *bias { self.y() } else { 0 }
            }
            Op::LinearGradInput { .. } => 2 * self.y() * self.columns(0),
            Op::LinearGradWeight { .. } => 2 * self.x(0) * self.columns(1),
            Op::MatMul { transpose_a, .. } => {
                let a = &self.operands[0].shape;
                2 * self.y() * a[a.len() - if *transpose_a { 2 } else { 1 }] as u128
            }
            Op::EmbeddingGrad { .. } => self.x(1),
            // Two products forward, five backward, and the softmax of each score.
            Op::Attention(spec) => {
                let per_score = 4 * spec.head_dim as u128 + 5;
                self.scores(spec, 0).saturating_mul(per_score)
            }
            Op::AttentionGrad(spec) => {
                let per_score = 10 * spec.head_dim as u128 + 8;
                self.scores(spec, 1).saturating_mul(per_score)
            }
            // From here on, per element of the first operand.
            Op::Activation(kind) => per_element(*kind) * self.x(0),
            Op::ActivationGrad(kind) => 2 * per_element(*kind) * self.x(0),
            Op::Add
            | Op::Mul
            | Op::Scale { .. }
            | Op::SumLeading { .. }
            | Op::SumAll
            | Op::VocabMax { .. } => self.x(0),
            Op::Dropout(_) | Op::InverseRoot => 2 * self.x(0),
            Op::JoinAttention | Op::Rope(_) | Op::RmsNormGradParams | Op::VocabSums { .. } => {
                3 * self.x(0)
            }
            Op::RmsNorm { .. }
            | Op::Softmax
            | Op::SoftmaxGrad
            | Op::CrossEntropy { .. }
            | Op::CrossEntropyGrad { .. } => 4 * self.x(0),
            Op::VocabLoss { .. } => 4 * self.x(2),
            Op::LayerNormGradParams | Op::SiluMul => 5 * self.x(0),
            Op::LayerNorm { .. } | Op::RmsNormGradInput => 8 * self.x(0),
            Op::SiluMulGrad => 10 * self.x(0),
            Op::LayerNormGradInput => 11 * self.x(0),
        }
    }

    /// Number of scores in all heads; the queries are operand `q`, the keys the next.
    fn scores(&self, spec: &Attention, q: usize) -> u128 {
        let size = |operand: usize, dim: usize| self.operands[operand].shape[dim] as u128;
        let (batch, own) = (size(q, 0), size(q, 1));
        let keys = match spec.ring() {
            Some(slice) => slice.full as u128,
            None => size(q + 1, 1),
        };
        // Slices of queries take their share of all: the mean, where the last ones see most keys.
        let queries = if spec.queries.is_some() { keys } else { own };
        let reach = |window: usize| {
            let one_way = window as u128;
            if spec.causal {
                one_way
            } else {
                (2 * one_way).saturating_sub(1)
            }
        };
        let most = spec.window.map_or(keys, |window| keys.min(reach(window)));
        let seen = if spec.causal {
            // Query i of Q sees keys up to K - Q + i: sums of min(n, most) over the last Q numbers
            // n up to K.
            let up_to = |n: u128| {
                let rising = n.min(most);
                rising * (rising + 1) / 2 + (n - rising) * most
            };
            up_to(keys) - up_to(keys.saturating_sub(queries))
        } else {
            queries * most
        };
        let seen = seen.saturating_mul(own) / queries.max(1);
        (batch * spec.heads as u128).saturating_mul(seen)
    }

    fn bytes(&self, op: &Op) -> u128 {
        if op.result_memory() == ResultMemory::View {
            return 0;
        }
        let size = |types: &[&TensorType]| {
            let sizes = types.iter().map(|ty| ty.size_bytes() as u128);
            sizes.sum::<u128>()
        };
        let (operands, written) = (self.operands, size(self.results));
        let read = match op.class() {
            // Only the rows that are looked up.
            Class::Lookup => size(&operands[..1]) + written,
            // The logits are not read: their sums are operands.
            Class::Loss(Some(_)) => size(&operands[1..]),
            Class::Source
            | Class::Linear(_)
            | Class::LayerNorm
            | Class::RmsNorm
            | Class::Attention
            | Class::Rope
            | Class::Activation
            | Class::Dropout
            | Class::Loss(None)
            | Class::Add
            | Class::Mul
            | Class::Identity
            | Class::Form
            | Class::Transpose
            | Class::Total
            | Class::Function
            | Class::Constant
            | Class::Gradient
            | Class::Region(_) => size(operands),
        };
        read + written
    }
}

fn per_element(kind: Activation) -> u128 {
    match kind {
        Activation::GeluTanh | Activation::GeluErf => 10,
        Activation::Silu | Activation::Tanh => 4,
        Activation::Relu => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    /// The flops of attention over `[1, queries, 4]` and `[1, keys, 4]`, two heads of size 2.
    fn attention(queries: usize, keys: usize, causal: bool, window: Option<usize>) -> u64 {
        let ty = |len| TensorType::new([1, len, 4], DType::F32);
        let (q, k) = (ty(queries), ty(keys));
        let spec = Attention {
            causal,
            window,
            ..Attention::of_heads(2, 2)
        };
        Cost::of_op(&Op::Attention(spec), &[&q, &k, &k], &[&q]).flops
    }

    #[test]
    fn attention_costs_by_the_scores_that_a_query_sees() {
        let per_score = 4 * 2 + 5;
        assert_eq!(attention(4, 4, false, None), 2 * 16 * per_score);
        assert_eq!(attention(4, 4, true, None), 2 * (1 + 2 + 3 + 4) * per_score);
        assert_eq!(attention(2, 4, true, None), 2 * (3 + 4) * per_score);
        assert_eq!(attention(2, 4, true, Some(3)), 2 * (3 + 3) * per_score);
        assert_eq!(
            attention(4, 4, true, Some(2)),
            2 * (1 + 2 + 2 + 2) * per_score
        );
        // Two keys before a query and two behind it.
        assert_eq!(attention(8, 8, false, Some(3)), 2 * 8 * 5 * per_score);
        assert_eq!(attention(4, 4, false, Some(3)), 2 * 16 * per_score);
    }

    #[test]
    fn the_cost_of_any_size_is_a_number() {
        let long = u32::MAX as usize;
        assert_eq!(attention(long, long, true, None), u64::MAX);
    }

    #[test]
    fn views_move_nothing_and_a_lookup_reads_only_its_rows() {
        let ids = TensorType::new([3], DType::I64);
        let [table, rows, flat] =
            [vec![1000, 4], vec![3, 4], vec![12]].map(|shape| TensorType::new(shape, DType::F32));
        let lookup = Op::Embedding {
            padding: None,
            slice: None,
        };
        let lookup = Cost::of_op(&lookup, &[&ids, &table], &[&rows]);
        assert_eq!(lookup.bytes, 3 * 8 + 2 * 3 * 4 * 4);
        let view = Cost::of_op(&Op::Reshape { shape: vec![12] }, &[&rows], &[&flat]);
        assert_eq!(view.bytes, 0);
    }
}
