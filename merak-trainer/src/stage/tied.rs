//! Gradients of weights that are used more than once.
//!
//! Each use accumulates apart, and the uses are added in model order at the end of a step, on one
//! rank as on many: so neither the cut into stages nor the schedule changes a bit of the sum.

use crate::{error::Result, plan::Plan};
use merak_mpu::{Buffer, Group, Mpu, ReduceOp};
use merak_partition::RankPrograms;
use merak_trace::{Backend, Call, GradStore, Op, RunContext, TensorType, TiedParam};

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
            let mut uses: Vec<_> = weight.slots.iter().map(|&slot| take(grads, slot)).collect();
            let sum = if owners.iter().copied().eq(0..group.world_size()) {
                group.all_reduce_vec(uses.swap_remove(0), ReduceOp::Sum)?
            } else {
                let mut own = uses.into_iter();
                let mut all = Vec::with_capacity(owners.len());
                for &owner in owners {
                    let len = grads.slots[weight.slots[0]].len;
                    let mine = if owner == group.rank() {
                        own.next()
                    } else {
                        None
                    };
                    all.push(group.broadcast_vec(mine.unwrap_or_else(|| vec![0.0; len]), owner)?);
                }
                fold(all)
            };
            put(grads, weight.slots[0], &sum);
            // The uses are in the sum now: a second call must not add them again.
            for &slot in &weight.slots[1..] {
                put(grads, slot, &vec![0.0; sum.len()]);
            }
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
        let slot = grads.slots[slot];
        let none: Box<dyn Buffer> = Box::new(Vec::<f32>::new());
        let buffer = std::mem::replace(&mut grads.buffers[slot.buffer], none);
        let ty = TensorType::new([slot.len], buffer.dtype());
        let call = Call {
            name: "tied weight",
            op: &Op::Identity,
            results: std::slice::from_ref(&ty),
            context: &RunContext::default(),
        };
        let value = backend.from_buffer(&ty, buffer)?;
        backend.accumulate(call, vec![value.clone()], grads, &slots[..1])?;
        let mut buffer = backend.into_buffer(value)?;
        buffer.clear();
        grads.buffers[slot.buffer] = buffer;
    }
    Ok(())
}

/// `((u0 + u1) + u2) + ..`
fn fold(uses: Vec<Vec<f32>>) -> Vec<f32> {
    let mut uses = uses.into_iter();
    let mut sum = uses.next().unwrap_or_default();
    for next in uses {
        sum.iter_mut().zip(next).for_each(|(sum, x)| *sum += x);
    }
    sum
}

fn take(grads: &GradStore, slot: usize) -> Vec<f32> {
    let slot = grads.slots[slot];
    let mut out = Vec::new();
    let buffer: &dyn Buffer = &*grads.buffers[slot.buffer];
    buffer.read(&mut |bytes| {
        out = bytemuck::cast_slice::<u8, f32>(bytes)[slot.offset..slot.offset + slot.len].to_vec();
    });
    out
}

fn put(grads: &mut GradStore, slot: usize, values: &[f32]) {
    let slot = grads.slots[slot];
    grads.buffers[slot.buffer].write(&mut |bytes| {
        bytemuck::cast_slice_mut::<u8, f32>(bytes)[slot.offset..slot.offset + slot.len]
            .copy_from_slice(values);
    });
}
