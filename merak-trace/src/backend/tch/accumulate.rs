//! Gradients of parameters, added straight to the flat buffer that holds them.

use super::{
    Tch,
    run::{Node, Outcome, same_kind},
    shim,
    storage::{TchBuffer, int, shape_of, tensor},
};
use crate::{Call, Error, GradSlot, GradStore, Op, Result, Value};
use merak_mpu::DType;
use std::any::Any;
use tch::{Kind, Tensor};

/// Runs a node and adds its results to slots of the store.
pub(super) fn accumulate(
    backend: &Tch,
    call: Call<'_>,
    inputs: Vec<Value>,
    store: &mut GradStore,
    slots: &[usize],
) -> Result<()> {
    let node = Node { backend, call };
    let targets: Vec<GradSlot> = slots.iter().map(|&slot| store.slots[slot]).collect();
    if let [target] = targets[..]
        && add_in_place(&node, &inputs, store, target)?
    {
        return Ok(());
    }
    let values = super::run::run(backend, call, inputs)?;
    for (value, target) in values.iter().zip(targets) {
        let mut sum = flat(&node, store, target)?;
        let grad = node.at(tensor(value)?.f_reshape(-1))?;
        let _ = node.at(sum.f_add_(&grad))?;
    }
    Ok(())
}

/// Runs an operation whose kernel adds to its output; false if no kernel fits these types.
fn add_in_place(
    node: &Node<'_>,
    inputs: &[Value],
    store: &GradStore,
    target: GradSlot,
) -> Result<bool> {
    let x = |i: usize| tensor(&inputs[i]);
    match node.call.op {
        Op::LinearGradWeight { layout } => {
            let (a, b) = node.weight_factors(*layout, x(0)?, x(1)?)?;
            let dtype = store.buffers[target.buffer].dtype();
            if !same_kind(&a, dtype) {
                if !node.backend.is_cpu() || a.kind() != Kind::BFloat16 || dtype != DType::F32 {
                    return Ok(false);
                }
                let a = node.at(a.f_transpose(0, 1).and_then(|a| a.f_contiguous()))?;
                let b = node.at(b.f_contiguous())?;
                let mut sum = matrix(node, store, target)?;
                if (node.backend).add_on_vectors(node.call.name, &a, &b, &mut sum)? {
                    return Ok(true);
                }
                return shim::add_product(node.call.name, &a, &b, &mut sum);
            }
            let mut sum = matrix(node, store, target)?;
            let _ = node.at(sum.f_addmm_(&a, &b))?;
            Ok(true)
        }
        // On a device `index_add` uses any order; the kernel of the gradient sorts the rows.
        Op::EmbeddingGrad {
            padding: None,
            slice: None,
            ..
        } if node.backend.is_cpu() => {
            let (ids, dy) = (x(0)?, x(1)?);
            let mut sum = matrix(node, store, target)?;
            let mut added = || -> Outcome {
                let rows = dy.f_reshape([-1, sum.size()[1]])?.f_to_kind(sum.kind())?;
                sum.f_index_add_(0, &ids.f_reshape(-1)?, &rows)
            };
            let _ = node.at(added())?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// The range of a slot, shaped as the node's only result.
fn matrix(node: &Node<'_>, store: &GradStore, target: GradSlot) -> Result<Tensor> {
    let range = flat(node, store, target)?;
    node.at(range.f_reshape(shape_of(node.ty(0))))
}

/// The range of a slot, over the memory of its buffer.
fn flat(node: &Node<'_>, store: &GradStore, target: GradSlot) -> Result<Tensor> {
    let buffer: &dyn Any = &*store.buffers[target.buffer];
    let buffer = buffer
        .downcast_ref::<TchBuffer>()
        .ok_or_else(|| Error::Backend {
            node: node.call.name.to_owned(),
            reason: "adds to a gradient buffer of another backend".to_owned(),
        })?;
    node.at(buffer.flat.f_narrow(0, int(target.offset), int(target.len)))
}
