//! What operations move between ranks.

use super::{Op, Ring};
use crate::TensorType;

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
    /// The exchange of an operation that is a border between whole and sharded work, or whose keys
    /// and values go round, by the types of its operands and results.
    pub(crate) fn of_op(
        op: &Op,
        operands: &[&TensorType],
        results: &[&TensorType],
    ) -> Option<Self> {
        if let Some(ring) = op.ring() {
            return Some(Self::ring(&ring, operands));
        }
        op.region()?;
        let [operand, result] = [operands[0], results[0]];
        let rank_bytes = operand.size_bytes().max(result.size_bytes());
        let whole_bytes = match op {
            Op::AllToAll { from, .. } => {
                let whole = from.parts.iter().sum();
                operand.with_dim(from.dim, whole).size_bytes()
            }
            _ => rank_bytes,
        };
        Some(Self {
            name: op.name(),
            count: 1,
            whole_bytes,
            rank_bytes,
        })
    }

    /// The keys and values of an attention that go round, and in its gradient theirs too.
    fn ring(ring: &Ring<'_>, operands: &[&TensorType]) -> Self {
        let (slice, pairs) = (ring.slice, ring.direction.pairs());
        let pair = || operands[ring.keys.clone()].iter();
        let whole = |ty: &&TensorType| ty.with_dim(slice.dim, slice.full).size_bytes();
        Self {
            name: "ring",
            count: 2 * pairs,
            whole_bytes: pairs * pair().map(whole).sum::<usize>(),
            rank_bytes: pair().map(|ty| ty.size_bytes()).sum(),
        }
    }
}
