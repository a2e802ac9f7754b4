//! Sums over the ranks of partial results, and those that a loss of split logits needs.

use super::{Placed, Rewriter};
use crate::Result;
use merak_trace::{Op, Placement, Shard, ValueId, op::Reduction};
use std::sync::Arc;

impl Rewriter<'_> {
    /// The sum of a partial result over all ranks, cut where it is to be. A rank that has all parts
    /// sums nothing. `once` is added to the sum, or to the rank's slice of it.
    pub(super) fn summed_up(
        &mut self,
        value: ValueId,
        cut: Option<Shard>,
        has_all: bool,
        once: Option<ValueId>,
        scope: &Arc<str>,
    ) -> Result<Placed> {
        let axis = self.options.axis;
        let op = match &cut {
            Some(shard) if !self.options.is_whole() => Op::ReduceScatter {
                axis,
                shard: shard.clone(),
                local: shard.local_size(self.degree),
            },
            _ if has_all => Op::Identity,
            _ => Op::AllReduce {
                axis,
                op: Reduction::Sum,
            },
        };
        let mut sum = self.add(scope, op, vec![value])?[0];
        if let Some(once) = once {
            sum = self.add(scope, Op::Add, vec![sum, once])?[0];
        }
        Ok(match cut {
            Some(shard) => Placed::along_sequence(sum, shard),
            None => Placed::new(sum, Placement::Replicate),
        })
    }

    /// The further operands of a loss whose classes are cut, after its logits and labels: the
    /// largest logit of each row over all ranks, and the sums of all ranks. Other operations have
    /// none.
    ///
    /// # Communication
    /// Two all-reduces over the tensor axis, of 4 bytes a row, and of 8 bytes, or of 12 under label
    /// smoothing.
    pub(super) fn sums_of_loss(
        &mut self,
        scope: &Arc<str>,
        op: &Op,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let (label_smoothing, slice) = match *op {
            Op::VocabLoss {
                label_smoothing,
                slice,
            } if slice.axis == self.options.axis => (label_smoothing, slice),
            _ => return Ok(Vec::new()),
        };
        let [logits, labels] = [operands[0], operands[1]];
        let joined = |op| Op::AllReduce {
            axis: slice.axis,
            op,
        };
        let own = self.add(scope, Op::VocabMax { slice }, vec![logits])?;
        let max = self.add(scope, joined(Reduction::Max), own)?[0];
        let sums = Op::VocabSums {
            label_smoothing,
            slice,
        };
        let own = self.add(scope, sums, vec![logits, labels, max])?;
        Ok(vec![max, self.add(scope, joined(Reduction::Sum), own)?[0]])
    }
}
