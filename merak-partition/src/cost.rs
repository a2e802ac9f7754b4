//! What an operation costs: a model of flops and bytes from the operation and the types of its operands.
//!
//! A fused multiply-add counts as two flops. Products are exact; the few flops per element of norms and
//! activations are rounded to what a plain implementation does. Bytes are what must pass through memory
//! when nothing is cached: operands read and results written, and nothing for views.
//!
//! ```
//! use merak_partition::cost;
//! use merak_trace::models::{self, TraceOptions};
//!
//! let model = models::from_config(&serde_json::json!({ "model_type": "gpt2", "n_layer": 1 }))?;
//! let graph = model.trace(&TraceOptions::training(2, 64))?;
//! let head = graph.nodes().iter().find(|node| &*node.scope == "lm_head").ok_or("a head")?;
//! assert_eq!(cost::node(&graph, head).flops, 2 * (2 * 64) * 768 * 50_257);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use merak_trace::{
    Graph, Node, Op,
    op::{Activation, Attention},
};
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
            flops: self.flops + other.flops,
            bytes: self.bytes + other.bytes,
        }
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), Add::add)
    }
}

/// The cost of one node.
pub fn node(graph: &Graph, node: &Node) -> Cost {
    let shapes = Shapes { graph, node };
    Cost {
        flops: shapes.flops() as u64,
        bytes: shapes.bytes() as u64,
    }
}

struct Shapes<'a> {
    graph: &'a Graph,
    node: &'a Node,
}

impl Shapes<'_> {
    /// Elements of an operand.
    fn x(&self, operand: usize) -> usize {
        self.graph.ty(self.node.inputs[operand]).numel()
    }

    /// Elements of the first result.
    fn y(&self) -> usize {
        self.graph.ty(self.node.outputs[0]).numel()
    }

    /// The last dimension of an operand.
    fn columns(&self, operand: usize) -> usize {
        self.graph.ty(self.node.inputs[operand]).last_dim()
    }

    fn flops(&self) -> usize {
        match &self.node.op {
            Op::Positions { .. }
            | Op::RelativeBuckets(_)
            | Op::Embedding { .. }
            | Op::Identity
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
            | Op::Scatter { .. } => 0,
            Op::Linear { bias, .. } => {
                2 * self.y() * self.columns(0) + if *bias { self.y() } else { 0 }
            }
            Op::LinearGradInput { .. } => 2 * self.y() * self.columns(0),
            Op::LinearGradWeight { .. } => 2 * self.x(0) * self.columns(1),
            Op::MatMul { transpose_a, .. } => {
                let a = &self.graph.ty(self.node.inputs[0]).shape;
                2 * self.y() * a[a.len() - if *transpose_a { 2 } else { 1 }]
            }
            Op::EmbeddingGrad { .. } => self.x(1),
            // Two products forward, five backward, and the softmax of each score.
            Op::Attention(spec) => self.scores(spec, 0) * (4 * spec.head_dim + 5),
            Op::AttentionGrad(spec) => self.scores(spec, 1) * (10 * spec.head_dim + 8),
            // From here on, per element of the first operand.
            Op::Activation(kind) => per_element(*kind) * self.x(0),
            Op::ActivationGrad(kind) => 2 * per_element(*kind) * self.x(0),
            Op::Add | Op::Mul | Op::Scale { .. } | Op::SumLeading { .. } | Op::SumAll => self.x(0),
            Op::Dropout(_) => 2 * self.x(0),
            Op::Rope(_) | Op::RmsNormGradParams => 3 * self.x(0),
            Op::RmsNorm { .. }
            | Op::Softmax
            | Op::SoftmaxGrad
            | Op::CrossEntropy { .. }
            | Op::CrossEntropyGrad { .. } => 4 * self.x(0),
            Op::LayerNormGradParams | Op::SiluMul => 5 * self.x(0),
            Op::LayerNorm { .. } | Op::RmsNormGradInput => 8 * self.x(0),
            Op::SiluMulGrad => 10 * self.x(0),
            Op::LayerNormGradInput => 11 * self.x(0),
        }
    }

    /// Scores that queries and keys have in all heads; the queries are operand `q`, the keys the next.
    fn scores(&self, spec: &Attention, q: usize) -> usize {
        let queries = &self.graph.ty(self.node.inputs[q]).shape;
        let keys = self.graph.ty(self.node.inputs[q + 1]).shape[1];
        let seen = |query: usize| {
            let back = if spec.causal {
                (query + 1 + keys).saturating_sub(queries[1]).min(keys)
            } else {
                keys
            };
            spec.window.map_or(back, |window| back.min(window))
        };
        queries[0] * spec.heads * (0..queries[1]).map(seen).sum::<usize>()
    }

    fn bytes(&self) -> usize {
        let size = |values: &[merak_trace::ValueId]| {
            values
                .iter()
                .map(|&value| self.graph.ty(value).size_bytes())
                .sum::<usize>()
        };
        let (read, written) = (size(&self.node.inputs), size(&self.node.outputs));
        match self.node.op {
            Op::Identity | Op::Reshape { .. } | Op::CopyTo { .. } => 0,
            // Only the rows that are looked up.
            Op::Embedding { .. } => size(&self.node.inputs[..1]) + 2 * written,
            _ => read + written,
        }
    }
}

fn per_element(kind: Activation) -> usize {
    match kind {
        Activation::GeluTanh | Activation::GeluErf => 10,
        Activation::Silu | Activation::Tanh => 4,
        Activation::Relu => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use merak_trace::{DType, TensorType};

    /// The flops of attention over `[1, queries, 4]` and `[1, keys, 4]`, two heads of size 2.
    fn attention(queries: usize, keys: usize, causal: bool, window: Option<usize>) -> u64 {
        let mut graph = Graph::new();
        let mut input = |name, len| graph.add_input(name, TensorType::new([1, len, 4], DType::F32));
        let operands = vec![input("q", queries), input("k", keys), input("v", keys)];
        let spec = Attention {
            heads: 2,
            kv_heads: 2,
            head_dim: 2,
            scale: 1.0,
            causal,
            window,
            dropout: None,
        };
        graph
            .add_node(&"".into(), Op::Attention(spec), operands)
            .unwrap();
        node(&graph, &graph.nodes()[0]).flops
    }

    #[test]
    fn attention_costs_by_the_scores_that_a_query_sees() {
        let per_score = 4 * 2 + 5;
        assert_eq!(attention(4, 4, false, None), 2 * 16 * per_score);
        assert_eq!(attention(4, 4, true, None), 2 * (1 + 2 + 3 + 4) * per_score);
        assert_eq!(
            attention(4, 4, true, Some(2)),
            2 * (1 + 2 + 2 + 2) * per_score
        );
    }

    #[test]
    fn views_move_nothing_and_a_lookup_reads_only_its_rows() {
        let mut graph = Graph::new();
        let ids = graph.add_input("ids", TensorType::new([3], DType::I64));
        let table = graph.add_input("table", TensorType::new([1000, 4], DType::F32));
        let rows = graph
            .add_node(
                &"".into(),
                Op::Embedding { padding: None },
                vec![ids, table],
            )
            .unwrap()[0];
        graph
            .add_node(&"".into(), Op::Reshape { shape: vec![12] }, vec![rows])
            .unwrap();
        let bytes: Vec<_> = graph
            .nodes()
            .iter()
            .map(|node| super::node(&graph, node).bytes)
            .collect();
        assert_eq!(bytes, [3 * 8 + 2 * 3 * 4 * 4, 0]);
    }
}
