//! What an operation costs: a model of flops and bytes from the operation and the types of its
//! operands.
//!
//! A fused multiply-add counts as two flops. Products are exact; the few flops per element of norms
//! and activations are rounded to what a plain implementation does. Bytes are what must pass
//! through memory when nothing is cached: operands read and results written, and nothing for views.

use super::{Activation, Attention, Class, Op, ResultMemory};
use crate::{Graph, Node, ValueId};
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
    /// The cost of one node; counts saturate at 64 bits.
    ///
    /// ```
    /// use merak_trace::{models::{self, TraceOptions}, op::Cost};
    ///
    /// let config = serde_json::json!({ "model_type": "gpt2", "n_layer": 1 });
    /// let model = models::from_config(&config)?;
    /// let graph = model.trace(&TraceOptions::training(2, 64))?;
    /// let head = graph.nodes().iter().find(|node| &*node.scope == "lm_head").ok_or("a head")?;
    /// assert_eq!(Cost::of(&graph, head).flops, 2 * (2 * 64) * 768 * 50_257);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(graph: &Graph, node: &Node) -> Self {
        let shapes = Shapes { graph, node };
        let saturated = |count: u128| u64::try_from(count).unwrap_or(u64::MAX);
        Self {
            flops: saturated(shapes.flops()),
            bytes: saturated(shapes.bytes()),
        }
    }
}

/// Counts in 128 bits, so that products of the sizes of two tensors fit.
struct Shapes<'a> {
    graph: &'a Graph,
    node: &'a Node,
}

impl Shapes<'_> {
    /// Elements of an operand.
    fn x(&self, operand: usize) -> u128 {
        self.graph.ty(self.node.inputs[operand]).numel() as u128
    }

    /// Elements of the first result.
    fn y(&self) -> u128 {
        self.graph.ty(self.node.outputs[0]).numel() as u128
    }

    /// The last dimension of an operand.
    fn columns(&self, operand: usize) -> u128 {
        self.graph.ty(self.node.inputs[operand]).last_dim() as u128
    }

    #[expect(clippy::too_many_lines, reason = "an entry per operation")]
    fn flops(&self) -> u128 {
        match &self.node.op {
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
                let a = &self.graph.ty(self.node.inputs[0]).shape;
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
        let size = |operand: usize, dim: usize| {
            self.graph.ty(self.node.inputs[operand]).shape[dim] as u128
        };
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

    fn bytes(&self) -> u128 {
        let size = |values: &[ValueId]| {
            values
                .iter()
                .map(|&value| self.graph.ty(value).size_bytes() as u128)
                .sum::<u128>()
        };
        let (inputs, written) = (&self.node.inputs, size(&self.node.outputs));
        if self.node.op.result_memory() == ResultMemory::View {
            return 0;
        }
        let read = match self.node.op.class() {
            // Only the rows that are looked up.
            Class::Lookup => size(&inputs[..1]) + written,
            // The logits are not read: their sums are operands.
            Class::Loss(Some(_)) => size(&inputs[1..]),
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
            | Class::Region(_) => size(inputs),
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
    use crate::{DType, TensorType};

    /// The flops of attention over `[1, queries, 4]` and `[1, keys, 4]`, two heads of size 2.
    fn attention(queries: usize, keys: usize, causal: bool, window: Option<usize>) -> u64 {
        let mut graph = Graph::new();
        let mut input = |name, len| graph.add_input(name, TensorType::new([1, len, 4], DType::F32));
        let operands = vec![input("q", queries), input("k", keys), input("v", keys)];
        let spec = Attention {
            causal,
            window,
            ..Attention::of_heads(2, 2)
        };
        graph
            .add_node(&"".into(), Op::Attention(spec), operands)
            .unwrap();
        Cost::of(&graph, &graph.nodes()[0]).flops
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
        let mut graph = Graph::new();
        let ids = graph.add_input("ids", TensorType::new([3], DType::I64));
        let table = graph.add_input("table", TensorType::new([1000, 4], DType::F32));
        let rows = graph
            .add_node(
                &"".into(),
                Op::Embedding {
                    padding: None,
                    slice: None,
                },
                vec![ids, table],
            )
            .unwrap()[0];
        graph
            .add_node(&"".into(), Op::Reshape { shape: vec![12] }, vec![rows])
            .unwrap();
        let bytes: Vec<_> = graph
            .nodes()
            .iter()
            .map(|node| Cost::of(&graph, node).bytes)
            .collect();
        assert_eq!(bytes, [3 * 8 + 2 * 3 * 4 * 4, 0]);
    }
}
