//! What operations move between ranks.

use super::{Op, Ring};
use crate::{Graph, Node, TensorType};

/// What a node exchanges between the ranks of its axis, or its gradient where the node itself is no
/// collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// The name in reports: that of the operation, or `ring` where keys and values go round.
    pub name: &'static str,
    /// Number of collectives, or of tensors that go round.
    pub count: usize,
    /// Bytes of the whole values that are summed, joined or turned, or that go round.
    pub whole_bytes: usize,
    /// Bytes of the rank's operand or result, whichever has more; those of one pair of keys and
    /// values where they go round.
    pub rank_bytes: usize,
}

impl Exchange {
    /// The exchange of a node that is a border between whole and sharded work, or whose keys and
    /// values go round.
    pub fn of(graph: &Graph, node: &Node) -> Option<Self> {
        if let Some(ring) = node.op.ring() {
            return Some(Self::ring(graph, node, &ring));
        }
        node.op.region()?;
        let [operand, result] = [node.inputs[0], node.outputs[0]].map(|value| graph.ty(value));
        let rank_bytes = operand.size_bytes().max(result.size_bytes());
        let whole_bytes = match &node.op {
            Op::AllToAll { from, .. } => {
                let whole = from.parts.iter().sum();
                operand.with_dim(from.dim, whole).size_bytes()
            }
            _ => rank_bytes,
        };
        Some(Self {
            name: node.op.name(),
            count: 1,
            whole_bytes,
            rank_bytes,
        })
    }

    /// The keys and values of an attention that go round, and in its gradient theirs too.
    fn ring(graph: &Graph, node: &Node, ring: &Ring<'_>) -> Self {
        let (slice, pairs) = (ring.slice, ring.direction.pairs());
        let pair = || {
            node.inputs[ring.keys.clone()]
                .iter()
                .map(|&value| graph.ty(value))
        };
        let whole = |ty: &TensorType| ty.with_dim(slice.dim, slice.full).size_bytes();
        Self {
            name: "ring",
            count: 2 * pairs,
            whole_bytes: pairs * pair().map(whole).sum::<usize>(),
            rank_bytes: pair().map(TensorType::size_bytes).sum(),
        }
    }
}
