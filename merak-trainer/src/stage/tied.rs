//! Gradients of weights that are used more than once.
//!
//! Each use accumulates apart, and the uses are added in model order at the end of a step, on one
//! rank as on many: so neither the cut into stages nor the schedule changes a bit of the sum.

use crate::{error::Result, plan::Plan};
use merak_mpu::{Buffer, DType, Group, Mpu, ReduceOp};
use merak_partition::RankPrograms;
use merak_trace::{Backend, Call, GradStore, Op, RunContext, TensorType, TiedParam};
use std::ops::Range;

/// How the uses of this rank's parameters become one gradient each.
#[derive(Debug)]
pub(super) struct TiedGrads {
    weights: Vec<TiedWeight>,
    /// Weights whose first use is on another rank.
    borrowed: Vec<String>,
}

#[derive(Debug)]
struct TiedWeight {
    /// Slots of this rank's uses, in model order; the first is the one in the flat buffer.
    slots: Vec<usize>,
    /// Where the weight spans ranks: their group, and for every use in model order the group rank
    /// that has it.
    shared: Option<(Group, Vec<usize>)>,
}

impl TiedGrads {
    /// Finds the parameters of a rank with several uses in the model.
    pub(super) fn new(plan: &Plan, programs: &RankPrograms, mpu: &Mpu) -> Result<Self> {
        let tied = plan.tied_across_ranks();
        let uses = programs.uses();
        let mut weights = Vec::new();
        let mut borrowed = Vec::new();
        // In the model's order, which all ranks share: otherwise overlapping groups would wait for
        // each other.
        let mut params: Vec<_> = programs.params.iter().enumerate().collect();
        params.sort_by_key(|(_, param)| plan.graph.find_param(&param.name));
        for (index, param) in params {
            let of_param = uses.iter().enumerate().filter(|(_, of)| of.param == index);
            let slots: Vec<_> = of_param.map(|(slot, _)| slot).collect();
            let across = tied.iter().find(|(tied, _)| tied.name == param.name);
            if let Some((tied, ranks)) = across {
                if plan.rank_of(tied.stages[0]) != mpu.pipeline_parallel_rank() {
                    borrowed.push(param.name.clone());
                }
                if !param.trainable {
                    continue;
                }
                let group = mpu
                    .tied_group(&tied.name)?
                    .expect("a rank that uses a weight is in its group")
                    .clone();
                weights.push(TiedWeight {
                    slots,
                    shared: Some((group, owners_of_uses(plan, tied, ranks))),
                });
            } else if slots.len() > 1 {
                weights.push(TiedWeight {
                    slots,
                    shared: None,
                });
            }
        }
        Ok(Self { weights, borrowed })
    }

    /// Whether the parameter counts on this rank: its first use is here.
    pub(super) fn owns(&self, name: &str) -> bool {
        !self.borrowed.iter().any(|borrowed| borrowed == name)
    }

    /// The slots of weights with several uses, which are complete with [`TiedGrads::sum`].
    pub(super) fn slots(&self) -> Vec<usize> {
        let weights = self.weights.iter();
        weights
            .flat_map(|weight| weight.slots.iter().copied())
            .collect()
    }

    /// Leaves the sum over all uses in the flat buffer, on every rank with a use.
    ///
    /// # Communication
    /// For each weight that spans ranks, an all-reduce over its group when each rank has one use
    /// and they come in the order of the ranks, else a broadcast per use.
    pub(super) fn sum(&self, backend: &dyn Backend, grads: &mut GradStore) -> Result<()> {
        for weight in &self.weights {
            let Some((group, owners)) = &weight.shared else {
                add_up(backend, grads, &weight.slots)?;
                continue;
            };
            weight.sum_over_ranks((group, owners), backend, grads)?;
        }
        Ok(())
    }
}

impl TiedWeight {
    /// Leaves the sum over the uses of all ranks in the place of this rank's first use.
    fn sum_over_ranks(
        &self,
        (group, owners): (&Group, &[usize]),
        backend: &dyn Backend,
        grads: &mut GradStore,
    ) -> Result<()> {
        let uses = self.slots.iter().map(|&slot| take(backend, grads, slot));
        let mut uses = uses.collect::<Result<Vec<_>>>()?.into_iter().peekable();
        let first = self.slots[0];
        if owners.iter().copied().eq(0..group.world_size()) {
            let use_here = uses.next().expect("each rank has one use");
            put(
                backend,
                grads,
                first,
                &*group.all_reduce(use_here, ReduceOp::Sum)?,
            )?;
        } else {
            for (number, &owner) in owners.iter().enumerate() {
                let own = uses.next_if(|_| owner == group.rank());
                let own = match own {
                    Some(own) => own,
                    None => backend.grad_buffer(DType::F32, grads.slots[first].len)?,
                };
                let of_owner = group.broadcast(own, owner)?;
                if number == 0 {
                    put(backend, grads, first, &*of_owner)?;
                } else {
                    add(backend, grads, first, of_owner)?;
                }
            }
        }
        // The uses are in the sum now: a second call must not add them again.
        for &slot in &self.slots[1..] {
            grads.buffers[grads.slots[slot].buffer].clear();
        }
        Ok(())
    }
}

/// The group rank that has each use of a weight, in model order; `ranks` are the group's.
fn owners_of_uses(plan: &Plan, tied: &TiedParam, ranks: &[usize]) -> Vec<usize> {
    let graph = &plan.graph;
    let group_rank = |stage| {
        ranks
            .binary_search(&plan.rank_of(stage))
            .expect("uses are on the weight's stages")
    };
    let nodes = graph
        .node_ids()
        .flat_map(|id| graph.node(id).inputs.iter().map(move |&input| (id, input)));
    let uses = nodes.filter(|&(_, input)| {
        graph
            .param_of(input)
            .is_some_and(|param| graph.param(param).name == tied.name)
    });
    uses.map(|(id, _)| group_rank(plan.cuts.stage_of(id)))
        .collect()
}

/// Adds the uses of one stage to the first of them where they lie, and clears the others.
fn add_up(backend: &dyn Backend, grads: &mut GradStore, slots: &[usize]) -> Result<()> {
    for &slot in &slots[1..] {
        // Each further use has a buffer of its own, which is a value during the sum.
        let place = grads.slots[slot].buffer;
        let none: Box<dyn Buffer> = Box::new(Vec::<f32>::new());
        let buffer = std::mem::replace(&mut grads.buffers[place], none);
        let mut buffer = add(backend, grads, slots[0], buffer)?;
        buffer.clear();
        grads.buffers[place] = buffer;
    }
    Ok(())
}

/// Adds values to a slot where they lie, and gives them back.
fn add(
    backend: &dyn Backend,
    grads: &mut GradStore,
    slot: usize,
    values: Box<dyn Buffer>,
) -> Result<Box<dyn Buffer>> {
    let ty = TensorType::new([values.len()], values.dtype());
    let call = Call {
        name: "tied weight",
        op: &Op::Identity,
        results: std::slice::from_ref(&ty),
        context: &RunContext::default(),
    };
    let value = backend.from_buffer(&ty, values)?;
    backend.accumulate(call, vec![value.clone()], grads, &[slot])?;
    Ok(backend.into_buffer(value)?)
}

fn take(backend: &dyn Backend, grads: &GradStore, slot: usize) -> Result<Box<dyn Buffer>> {
    let (buffer, part) = place(grads, slot);
    Ok(backend.copy_parts(&*grads.buffers[buffer], &[part], DType::F32)?)
}

fn put(
    backend: &dyn Backend,
    grads: &mut GradStore,
    slot: usize,
    values: &dyn Buffer,
) -> Result<()> {
    let (buffer, part) = place(grads, slot);
    Ok(backend.put_parts(values, &mut *grads.buffers[buffer], &[part])?)
}

/// The buffer of a slot, and the slot's elements there.
fn place(grads: &GradStore, slot: usize) -> (usize, Range<usize>) {
    let slot = grads.slots[slot];
    (slot.buffer, slot.offset..slot.offset + slot.len)
}
