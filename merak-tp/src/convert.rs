//! Conversions from a value's placement to the form that a node needs.
//!
//! | from | to | forward | backward |
//! |---|---|---|---|
//! | whole | work of each rank's own | identity (`copy_to`) | all-reduce |
//! | partial | whole | all-reduce | identity |
//! | slices | whole | all-gather | own slice |
//! | whole | slices | own slice (`scatter`) | all-gather |
//!
//! Each form of a value is made once and shared by all of its users, so the query, key and value
//! projections of a layer have one `copy_to` and one all-reduce backward.

use crate::{Result, report::Gather, rewriter::Rewriter, rules::Need};
use merak_trace::{Axis, Op, Placement, Shard, Source, ValueId};
use std::sync::Arc;

impl Rewriter<'_> {
    /// The value of the new graph that holds `value` in the form `need`; `user` asks for it.
    ///
    /// A parameter that is cut at its first use is placed that way: a rank holds only its slice.
    pub(crate) fn convert(
        &mut self,
        value: ValueId,
        need: &Need,
        scope: &Arc<str>,
        user: &str,
    ) -> Result<ValueId> {
        let is_param = self.model.param_of(value).is_some();
        let placed = self
            .placed
            .get_mut(&value)
            .expect("a graph assigns values before it uses them");
        if let (true, Need::Cut(shard)) = (
            is_param && !placed.is_fixed && placed.forms.is_empty(),
            need,
        ) {
            placed.placement = Placement::Shard(shard.clone());
            let id = self
                .graph
                .param_of(placed.value)
                .expect("parameters of the model are parameters here");
            let placement = placed.placement.clone();
            self.graph
                .place_param(id, Axis::Tensor, placement, self.degree);
        }
        let as_it_lies = match (&placed.placement, need) {
            (Placement::Replicate, Need::Whole) => true,
            (Placement::Shard(have), Need::Cut(shard)) => have == shard,
            _ => false,
        };
        if as_it_lies {
            placed.is_fixed = true;
            return Ok(placed.value);
        }
        if let Some((_, made)) = placed.forms.iter().find(|(form, _)| form == need) {
            return Ok(*made);
        }
        let made = match need {
            Need::Whole => self.gather(value, scope, user)?,
            Need::Copied => {
                let whole = self.whole(value, scope, user)?;
                self.add(scope, Op::CopyTo { axis: Axis::Tensor }, vec![whole])?[0]
            }
            Need::Cut(shard) => {
                let whole = self.whole(value, scope, user)?;
                self.scatter(whole, shard, scope)?
            }
            Need::Spread(pieces) => {
                let whole = self.whole(value, scope, user)?;
                self.spread(whole, *pieces, scope)?
            }
        };
        self.placed
            .entry(value)
            .and_modify(|placed| placed.forms.push((need.clone(), made)));
        Ok(made)
    }

    /// The whole of a value, as the operand of a conversion.
    fn whole(&mut self, value: ValueId, scope: &Arc<str>, user: &str) -> Result<ValueId> {
        let whole = self.convert(value, &Need::Whole, scope, user)?;
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

    fn gather(&mut self, value: ValueId, scope: &Arc<str>, user: &str) -> Result<ValueId> {
        let placed = &self.placed[&value];
        let Some(shard) = placed.placement.as_shard().cloned() else {
            return Ok(placed.value);
        };
        let local = self.not_param(placed.value, scope)?;
        self.gathered.push(value);
        let bytes = self.model.ty(value).size_bytes();
        self.report.gathers.push(Gather {
            value: self.name_of(value),
            needed_by: user.to_owned(),
            bytes,
        });
        Ok(self.add(
            scope,
            Op::AllGather {
                axis: Axis::Tensor,
                shard,
            },
            vec![local],
        )?[0])
    }

    fn scatter(&mut self, whole: ValueId, shard: &Shard, scope: &Arc<str>) -> Result<ValueId> {
        let local = shard.local_size(self.degree);
        Ok(self.add(
            scope,
            Op::Scatter {
                axis: Axis::Tensor,
                shard: shard.clone(),
                local,
            },
            vec![whole],
        )?[0])
    }

    /// Repeats each piece for its ranks, then every rank takes its own.
    fn spread(&mut self, whole: ValueId, pieces: usize, scope: &Arc<str>) -> Result<ValueId> {
        let ty = self.graph.ty(whole).clone();
        let (dim, size) = (ty.ndim() - 1, ty.last_dim() / pieces);
        let heads = self.add(
            scope,
            Op::Split {
                dim,
                sizes: vec![size; pieces],
            },
            vec![whole],
        )?;
        let repeated = heads
            .iter()
            .flat_map(|&head| vec![head; self.degree / pieces])
            .collect();
        let all = self.add(scope, Op::Concat { dim }, repeated)?[0];
        self.scatter(
            all,
            &Shard {
                dim,
                parts: vec![size * self.degree],
            },
            scope,
        )
    }

    /// The name of a value of the model for messages.
    fn name_of(&self, value: ValueId) -> String {
        match self.model.value(value).source {
            Source::Input(index) => format!("input {}", self.model.inputs()[index].name),
            Source::Param(id) => self.model.param(id).name.clone(),
            Source::Node { node, .. } => self.model.node(node).name.to_string(),
        }
    }
}
