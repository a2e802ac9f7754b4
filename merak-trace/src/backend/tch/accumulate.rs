//! Gradients of parameters, added straight to the flat buffer that holds them.

use super::{
    Tch,
    run::{Node, Outcome, is_half, run, same_kind, stat_kind},
    shim,
    storage::{TchBuffer, int, shape_of, tensor},
};
use crate::{Call, Error, GradSlot, GradStore, Result, Value};
use merak_mpu::DType;
use std::any::Any;
use tch::{Device, Kind, Tensor};

/// Where a node's only result is added.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sum<'a> {
    store: &'a GradStore,
    target: GradSlot,
}

/// Runs a node and adds its results to slots of the store.
pub(super) fn accumulate(
    backend: &Tch,
    call: Call<'_>,
    inputs: Vec<Value>,
    store: &GradStore,
    slots: &[usize],
) -> Result<()> {
    let targets = store.targets(call, slots)?;
    let sums = targets.into_iter().map(|target| Sum { store, target });
    let sums: Vec<_> = sums.collect();
    let only = match sums[..] {
        [sum] => Some(sum),
        _ => None,
    };
    let node = Node { backend, call };
    for (value, sum) in run(backend, call, inputs, only)?.iter().zip(sums) {
        let mut sum = node.flat(sum)?;
        let grad = node.at(tensor(value)?.f_reshape(-1))?;
        let _ = node.at(sum.f_add_(&grad))?;
    }
    Ok(())
}

impl Node<'_> {
    /// Adds a product of matrices; false if no kernel fits these types.
    pub(super) fn add_product(&self, a: &Tensor, b: &Tensor, sum: Sum<'_>) -> Result<bool> {
        let dtype = sum.store.buffers[sum.target.buffer].dtype();
        if same_kind(a, dtype) {
            let mut sum = self.shaped(sum)?;
            let _ = self.at(sum.f_addmm_(a, b))?;
            return Ok(true);
        }
        if dtype != DType::F32 || !is_half(a.kind()) {
            return Ok(false);
        }
        if !self.backend.is_cpu() {
            let sum = self.shaped(sum)?;
            let _ = self.at(sum.f_addmm_dtype_out(&sum, a, b, Kind::Float))?;
            return Ok(true);
        }
        if a.kind() != Kind::BFloat16 {
            return Ok(false);
        }
        let a = self.at(a.f_transpose(0, 1).and_then(|a| a.f_contiguous()))?;
        let b = self.at(b.f_contiguous())?;
        let mut sum = self.shaped(sum)?;
        if (self.backend).add_on_vectors(self.call.name, &a, &b, &mut sum)? {
            return Ok(true);
        }
        shim::add_product(self.call.name, &a, &b, &mut sum)
    }

    /// Adds rows to those of the given numbers.
    pub(super) fn add_rows(&self, ids: &Tensor, rows: &Tensor, sum: Sum<'_>) -> Result<()> {
        let mut sum = self.shaped(sum)?;
        self.at(add_rows(&mut sum, ids, rows))
    }

    /// The range of a slot, shaped as the node's only result.
    fn shaped(&self, sum: Sum<'_>) -> Result<Tensor> {
        let range = self.flat(sum)?;
        self.at(range.f_reshape(shape_of(self.ty(0))))
    }

    /// The range of a slot, over the memory of its buffer.
    fn flat(&self, Sum { store, target }: Sum<'_>) -> Result<Tensor> {
        let buffer: &dyn Any = &*store.buffers[target.buffer];
        let buffer = buffer.downcast_ref::<TchBuffer>().ok_or_else(|| {
            let reason = "adds to a gradient buffer of another backend";
            Error::backend(self.call.name, reason)
        })?;
        self.at(buffer.flat.f_narrow(0, int(target.offset), int(target.len)))
    }
}

/// Adds rows to those of the given numbers, in an order that depends on nothing else.
fn add_rows(sum: &mut Tensor, ids: &Tensor, rows: &Tensor) -> Outcome<()> {
    let ids = ids.f_reshape(-1)?;
    let rows = rows.f_reshape([-1, sum.size()[1]])?.f_to_kind(sum.kind())?;
    let _ = if sum.device() == Device::Cpu {
        sum.f_index_add_(0, &ids, &rows)?
    } else {
        // On a device `index_add` uses any order, and this one sorts the rows.
        sum.f_index_put_(&[Some(ids)], &rows, true)?
    };
    Ok(())
}

/// `dy [.., W], ids [..] -> [rows, W]`: the rows of `dy` added up by their numbers. Row `padding`
/// stays 0.
pub(super) fn rows_by_number(dy: &Tensor, ids: &Tensor, rows: i64, padding: i64) -> Outcome {
    if dy.device() == Device::Cpu {
        return Tensor::f_embedding_dense_backward(dy, ids, rows, padding, false);
    }
    // In libtorch 2.11 that kernel has a race on devices: for 1,025 to 3,072 ids. The one for
    // additions rounds each sum to the type of the table.
    let (kind, width) = (dy.kind(), dy.size().last().copied().unwrap_or(1));
    let mut sum = Tensor::f_zeros([rows, width], (stat_kind(kind), dy.device()))?;
    let hidden = ids.f_eq(padding)?.f_unsqueeze(-1)?;
    add_rows(&mut sum, ids, &dy.f_masked_fill(&hidden, 0.0)?)?;
    sum.f_to_kind(kind)
}
