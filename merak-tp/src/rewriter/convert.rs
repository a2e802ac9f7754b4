//! Conversions from a value's placement to the form that a node needs.
//!
//! | from | to | forward | backward |
//! |---|---|---|---|
//! | whole | work of each rank's own | identity (`copy_to`) | all-reduce |
//! | partial | whole | all-reduce | identity |
//! | partial | slices | reduce-scatter | all-gather |
//! | slices | whole | all-gather | own slice |
//! | slices | work of each rank's own | all-gather | reduce-scatter |
//! | slices | slices of another dimension | all-to-all | all-to-all |
//! | whole | slices | own slice (`scatter`) | all-gather |
//! | a weight | the same work of all ranks of a sequence | identity (`share_grad`) | own share |
//!
//! Each form of a value is made once and shared by all of its users, so the query, key and value
//! projections of a layer have one `copy_to` and one all-reduce backward.
//!
//! In a graph with whole sequences that has the nodes of one with cuts
//! ([`Sequence::WholeLikeCut`](crate::Sequence::WholeLikeCut)), a conversion to or from a slice of
//! the sequence is the one node that leaves it whole.

use super::{Placed, Rewriter};
use crate::{Result, report::Gather, rules::Need};
use merak_trace::{Axis, Op, Placement, Shard, Source, ValueId, op::JoinedGrad};
use std::sync::Arc;

impl Rewriter<'_> {
    /// The value of the new graph that holds `value` in the form `need`; `user` asks for it.
    /// `along_sequence` says that a slice is one of the sequence.
    ///
    /// A parameter that is cut at its first use is placed that way: a rank holds only its slice.
    pub(super) fn convert(
        &mut self,
        value: ValueId,
        need: &Need,
        along_sequence: bool,
        scope: &Arc<str>,
        user: &str,
    ) -> Result<ValueId> {
        if let Some(summed) = self.as_summed(value, need) {
            return Ok(summed);
        }
        self.place_param(value, need, along_sequence)?;
        let shares = self.options.axis == Axis::Sequence && self.is_weight(value);
        let placed = self.placed_mut(value);
        let as_it_lies = match (&placed.placement, need) {
            (Placement::Replicate, Need::Whole) => !shares,
            (Placement::Shard(have), Need::Cut(shard)) => have == shard,
            _ => false,
        };
        if as_it_lies {
            placed.is_fixed = true;
            return Ok(placed.value);
        }
        if let Some(made) = self.form(value, need) {
            return Ok(made);
        }
        let made = match need {
            Need::Whole if shares => self.shared(value, scope)?,
            Need::Whole => self.gather(value, JoinedGrad::Whole, scope, user)?,
            Need::Copied => self.copied(value, scope, user)?,
            Need::Cut(shard) => self.cut(value, shard, along_sequence, scope, user)?,
            Need::Spread(pieces) => self.spread(value, *pieces, scope, user)?,
        };
        // Layers that use one weight may belong to several stages: each has a form of its own.
        if !shares {
            self.placed_mut(value).forms.push((need.clone(), made));
        }
        Ok(made)
    }

    fn placed_mut(&mut self, value: ValueId) -> &mut Placed {
        self.placed
            .get_mut(&value)
            .expect("a graph assigns values before it uses them")
    }

    /// A form that was made before.
    fn form(&self, value: ValueId, need: &Need) -> Option<ValueId> {
        let mut forms = self.placed[&value].forms.iter();
        forms.find(|(form, _)| form == need).map(|(_, made)| *made)
    }

    /// A whole parameter for a different part of the work on each rank, where its gradient is
    /// summed once per step. Notes the other uses of a parameter too.
    fn as_summed(&mut self, value: ValueId, need: &Need) -> Option<ValueId> {
        self.options.sequence_dim()?;
        if !self.is_weight(value) {
            return None;
        }
        let is_whole = self.placed[&value].placement == Placement::Replicate;
        if *need == Need::Copied && is_whole && !self.copied.contains(&value) {
            self.summed.insert(value);
            let placed = self.placed_mut(value);
            placed.is_fixed = true;
            return Some(placed.value);
        }
        self.unsummed.insert(value);
        None
    }

    /// Places a parameter as its first use cuts it. A cut of the sequence is none of the parameter:
    /// it has all positions on every rank. Along the sequence axis every rank has all parameters.
    fn place_param(&mut self, value: ValueId, need: &Need, along_sequence: bool) -> Result<()> {
        let is_param = self.model.param_of(value).is_some();
        let (axis, degree) = (self.options.axis, self.degree);
        let placed = self.placed_mut(value);
        let is_free =
            is_param && axis == Axis::Tensor && !placed.is_fixed && placed.forms.is_empty();
        if let (true, Need::Cut(shard)) = (is_free && !along_sequence, need) {
            placed.placement = Placement::Shard(shard.clone());
            let (value, placement) = (placed.value, placed.placement.clone());
            let id = self
                .graph
                .param_of(value)
                .expect("parameters of the model are parameters here");
            self.graph.place_param(id, axis, placement, degree)?;
        }
        Ok(())
    }

    /// A weight that all ranks of a sequence use alike: each takes a share of its gradient, since
    /// gradients of these ranks are summed.
    fn shared(&mut self, value: ValueId, scope: &Arc<str>) -> Result<ValueId> {
        let (whole, ranks) = (self.placed[&value].value, self.degree);
        Ok(self.add(scope, Op::ShareGrad { ranks }, vec![whole])?[0])
    }

    /// The whole of a value, as the operand of a conversion.
    fn whole(&mut self, value: ValueId, scope: &Arc<str>, user: &str) -> Result<ValueId> {
        let whole = self.convert(value, &Need::Whole, false, scope, user)?;
        self.not_param(whole, scope)
    }

    /// `value`, or a copy of it if it is a parameter. The gradient of a conversion may communicate,
    /// but the weight half of the backward, which computes the gradients of parameters directly,
    /// waits for no other rank.
    fn not_param(&mut self, value: ValueId, scope: &Arc<str>) -> Result<ValueId> {
        match self.graph.param_of(value) {
            Some(_) => Ok(self.add(scope, Op::Identity, vec![value])?[0]),
            None => Ok(value),
        }
    }

    /// Whether a value that is cut, along the sequence or not, is whole nevertheless. Along the
    /// sequence axis all cuts belong to that of the sequence.
    pub(super) fn is_whole_sequence(&self, along_sequence: bool) -> bool {
        let belongs = along_sequence || self.options.axis == Axis::Sequence;
        belongs && self.options.is_whole()
    }

    /// The whole value for the same work on every rank, or for a part of it on each.
    fn gather(
        &mut self,
        value: ValueId,
        grad: JoinedGrad,
        scope: &Arc<str>,
        user: &str,
    ) -> Result<ValueId> {
        let placed = &self.placed[&value];
        let along_sequence = placed.along_sequence;
        let Some(shard) = placed.placement.as_shard().cloned() else {
            return Ok(placed.value);
        };
        let local = self.not_param(placed.value, scope)?;
        // Split regions begin with a join of the sequence: it is no work of an operation that
        // cannot do with slices.
        if !(along_sequence && grad == JoinedGrad::Summand) {
            let ty = self.model.ty(value);
            let of_vocab = self
                .options
                .vocab
                .is_some_and(|vocab| shard.parts == [vocab]);
            let is_last = shard.dim + 1 == ty.ndim();
            self.gathered.push(value);
            self.report.gathers.push(Gather {
                value: self.name_of(value),
                needed_by: user.to_owned(),
                bytes: ty.size_bytes(),
                is_logits: of_vocab && is_last && self.model.param_of(value).is_none(),
            });
        }
        let axis = self.options.axis;
        let op = match grad {
            JoinedGrad::Whole if self.is_whole_sequence(along_sequence) => Op::Identity,
            JoinedGrad::Summand if self.is_whole_sequence(along_sequence) => Op::CopyTo { axis },
            grad => Op::AllGather { axis, shard, grad },
        };
        Ok(self.add(scope, op, vec![local])?[0])
    }

    /// The whole value for a different part of the work on each rank.
    fn copied(&mut self, value: ValueId, scope: &Arc<str>, user: &str) -> Result<ValueId> {
        let is_cut = self.placed[&value].placement.as_shard().is_some();
        if is_cut && self.form(value, &Need::Whole).is_none() {
            return self.gather(value, JoinedGrad::Summand, scope, user);
        }
        let whole = self.whole(value, scope, user)?;
        let axis = self.options.axis;
        Ok(self.add(scope, Op::CopyTo { axis }, vec![whole])?[0])
    }

    /// A slice of a value that is whole or cut otherwise.
    fn cut(
        &mut self,
        value: ValueId,
        shard: &Shard,
        along_sequence: bool,
        scope: &Arc<str>,
        user: &str,
    ) -> Result<ValueId> {
        let placed = &self.placed[&value];
        let from = match placed.placement.as_shard() {
            Some(have)
                if have.dim != shard.dim && self.can_turn(value, have, (shard, along_sequence)) =>
            {
                (have.clone(), placed.along_sequence, placed.value)
            }
            _ => {
                let whole = self.whole(value, scope, user)?;
                return self.scatter(whole, shard, along_sequence, scope);
            }
        };
        let (have, was_along_sequence, local) = from;
        let local = self.not_param(local, scope)?;
        let to = (shard, along_sequence);
        self.turn(local, (&have, was_along_sequence), to, scope)
    }

    /// Slices of one dimension as slices of another; each cut says whether it is along the
    /// sequence.
    pub(super) fn turn(
        &mut self,
        local: ValueId,
        (have, was_along_sequence): (&Shard, bool),
        (shard, along_sequence): (&Shard, bool),
        scope: &Arc<str>,
    ) -> Result<ValueId> {
        if self.is_whole_sequence(was_along_sequence) {
            return self.scatter(local, shard, along_sequence, scope);
        }
        let axis = self.options.axis;
        let op = if self.is_whole_sequence(along_sequence) {
            let (shard, grad) = (have.clone(), JoinedGrad::Whole);
            Op::AllGather { axis, shard, grad }
        } else {
            let (from, to) = (have.clone(), shard.clone());
            Op::AllToAll { axis, from, to }
        };
        Ok(self.add(scope, op, vec![local])?[0])
    }

    /// Whether slices of one dimension become slices of another without the whole value: unless it
    /// is there already, or padding is among them, which a sequence never has.
    fn can_turn(&self, value: ValueId, from: &Shard, to: (&Shard, bool)) -> bool {
        let pads = |shard: &Shard| !shard.parts.iter().all(|n| n.is_multiple_of(self.degree));
        let from = (from, self.placed[&value].along_sequence);
        let mut cuts = [from, to].into_iter();
        self.form(value, &Need::Whole).is_none()
            && cuts.all(|(shard, along_sequence)| along_sequence || !pads(shard))
    }

    fn scatter(
        &mut self,
        whole: ValueId,
        shard: &Shard,
        along_sequence: bool,
        scope: &Arc<str>,
    ) -> Result<ValueId> {
        let op = if self.is_whole_sequence(along_sequence) {
            Op::Identity
        } else {
            Op::Scatter {
                axis: self.options.axis,
                shard: shard.clone(),
                local: shard.local_size(self.degree),
            }
        };
        Ok(self.add(scope, op, vec![whole])?[0])
    }

    /// Repeats each piece for its ranks, then every rank takes its own. Slices of the sequence turn
    /// to the pieces without the whole value.
    fn spread(
        &mut self,
        value: ValueId,
        pieces: usize,
        scope: &Arc<str>,
        user: &str,
    ) -> Result<ValueId> {
        let placed = &self.placed[&value];
        let last = self.model.ty(value).ndim() - 1;
        let cut = placed
            .placement
            .as_shard()
            .filter(|shard| self.options.axis == Axis::Sequence && shard.dim != last);
        let (cut, along_sequence, local) = (cut.cloned(), placed.along_sequence, placed.value);
        let operand = match cut {
            Some(_) => local,
            None => self.whole(value, scope, user)?,
        };
        let size = self.graph.ty(operand).last_dim() / pieces;
        let all = self.repeated(operand, pieces, scope)?;
        let spread = Shard::new(last, vec![size * self.degree]);
        match cut {
            Some(have) => self.turn(all, (&have, along_sequence), (&spread, false), scope),
            None => self.scatter(all, &spread, false, scope),
        }
    }

    /// Each of `pieces` equal pieces of the last dimension as often as ranks share it; once where
    /// every rank has all of them.
    fn repeated(&mut self, value: ValueId, pieces: usize, scope: &Arc<str>) -> Result<ValueId> {
        let ty = self.graph.ty(value).clone();
        let (dim, size) = (ty.ndim() - 1, ty.last_dim() / pieces);
        let times = if self.is_whole_sequence(false) {
            1
        } else {
            self.degree / pieces
        };
        let split = Op::Split {
            dim,
            sizes: vec![size; pieces],
        };
        let heads = self.add(scope, split, vec![value])?;
        let repeated = heads.iter().flat_map(|&head| vec![head; times]);
        let repeated = repeated.collect();
        Ok(self.add(scope, Op::Concat { dim }, repeated)?[0])
    }

    /// The name of a value of the model for messages.
    pub(super) fn name_of(&self, value: ValueId) -> String {
        match self.model.value(value).source {
            Source::Input(index) => format!("input {}", self.model.inputs()[index].name),
            Source::Param(id) => self.model.param(id).name.clone(),
            Source::Node { node, .. } => self.model.node(node).name.to_string(),
        }
    }
}
