//! Operations that move or convert elements, or number positions.

use super::{Candle, Handle, Scalar, at, elements, run::Node};
use crate::{Op, Result, TensorType, Value, op::RelativeBuckets};
use candle_core::Tensor;
use merak_mpu::DType;

impl Node<'_> {
    pub(super) fn positions(&self, first: usize, len: usize) -> Result<Vec<Value>> {
        let positions = (first..first + len)
            .map(|i| i64::try_from(i).expect("a position fits an i64"))
            .collect();
        Ok(vec![self.backend.wrap_once::<i64>(self.ty(0), positions)?])
    }

    /// The number of each position among those of its row that are not 0.
    pub(super) fn seen_positions(&self, seen: &Value, first: usize) -> Result<Vec<Value>> {
        let before = i64::try_from(first).expect("a position fits an i64") - 1;
        let number = |last: &mut i64, &seen: &i64| {
            *last += i64::from(seen != 0);
            Some(if seen == 0 { before } else { *last })
        };
        let seen = elements::<i64>(seen)?;
        let rows = seen.chunks(self.ty(0).last_dim().max(1));
        let positions = rows.flat_map(|row| row.iter().scan(before, number));
        let positions = positions.collect();
        Ok(vec![self.backend.wrap_once::<i64>(self.ty(0), positions)?])
    }

    pub(super) fn relative_buckets(&self, spec: &RelativeBuckets) -> Result<Vec<Value>> {
        let mut indices = self.backend.result(self.ty(0));
        spec.write_indices(&mut indices);
        Ok(vec![self.backend.wrap::<i64>(self.ty(0), indices)?])
    }

    pub(super) fn reshape(&self, x: &Value) -> Result<Vec<Value>> {
        let handle = Handle::of(x)?;
        let tensor = handle
            .tensor
            .reshape(self.ty(0).shape.as_slice())
            .map_err(at(self.call.name))?;
        Ok(vec![handle.view(tensor).into_value(self.ty(0).clone())])
    }

    pub(super) fn transpose(&self, x: &Value, perm: &[usize]) -> Result<Vec<Value>> {
        let handle = Handle::of(x)?;
        let permuted = handle.tensor.permute(perm).map_err(at(self.call.name))?;
        if permuted.is_contiguous() {
            // Only dimensions of size 1 moved: the storage stays the operand's.
            return Ok(vec![handle.view(permuted).into_value(self.ty(0).clone())]);
        }
        self.wrap_candle(permuted.contiguous())
    }

    pub(super) fn cast(&self, x: &Value, dtype: DType) -> Result<Vec<Value>> {
        if x.ty().dtype == dtype {
            return Ok(vec![x.clone()]);
        }
        self.wrap_candle(Handle::of(x)?.tensor.to_dtype(dtype.into()))
    }

    /// Wraps the result of an operation of candle's own, in its own memory.
    fn wrap_candle(&self, tensor: candle_core::Result<Tensor>) -> Result<Vec<Value>> {
        let tensor = tensor.map_err(at(self.call.name))?;
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let (wide, lease) = (self.backend.pool.clone(), self.backend.memory.lease(bytes));
        // An operation that only moves narrow elements gives narrow elements.
        Ok(vec![
            Handle::narrow(tensor, wide, Some(lease)).into_value(self.ty(0).clone()),
        ])
    }

    /// Splits, joins and zeros, of any element type.
    pub(super) fn moved(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        let pooled = self.backend;
        match self.ty(0).dtype {
            DType::F32 => self.moved_in::<f32>(inputs, |ty| pooled.result(ty), Candle::wrap),
            DType::F64 => self.moved_in::<f64>(inputs, |ty| pooled.result(ty), Candle::wrap),
            DType::BF16 => self.moved_once::<half::bf16>(inputs),
            DType::F16 => self.moved_once::<half::f16>(inputs),
            DType::I64 => self.moved_once::<i64>(inputs),
            DType::U32 => self.moved_once::<u32>(inputs),
            DType::U8 => self.moved_once::<u8>(inputs),
        }
    }

    /// [`Self::moved`] in memory that is freed after its last use.
    fn moved_once<T: Scalar>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        self.moved_in::<T>(inputs, |ty| vec![T::zero(); ty.numel()], Candle::wrap_once)
    }

    /// [`Self::moved`] in one element type: `memory` allocates a result, `wrap` makes it a value.
    fn moved_in<T: Scalar>(
        &self,
        inputs: &[Value],
        memory: impl Fn(&TensorType) -> Vec<T>,
        wrap: impl Fn(&Candle, &TensorType, Vec<T>) -> Result<Value>,
    ) -> Result<Vec<Value>> {
        let wrap = |ty: &TensorType, data| wrap(self.backend, ty, data);
        let threads = &self.backend.threads;
        match self.call.op {
            Op::Split { dim, .. } => {
                let outer = inputs[0].ty().outer(*dim);
                let x = elements::<T>(&inputs[0])?;
                let x: &[T] = &x;
                let row = x.len() / outer.max(1);
                let mut start = 0;
                let mut pieces = Vec::with_capacity(self.call.results.len());
                for ty in self.call.results {
                    let len = ty.numel() / outer.max(1);
                    let mut piece = memory(ty);
                    let rows = rows_per_chunk(len);
                    let chunks = piece.chunks_mut((rows * len).max(1)).enumerate();
                    threads.for_each(chunks, |(chunk, out)| {
                        for (i, out) in out.chunks_exact_mut(len).enumerate() {
                            let from = (chunk * rows + i) * row + start;
                            out.copy_from_slice(&x[from..][..len]);
                        }
                    });
                    start += len;
                    pieces.push(wrap(ty, piece)?);
                }
                Ok(pieces)
            }
            Op::Concat { dim } => {
                let outer = self.ty(0).outer(*dim).max(1);
                let pieces = inputs
                    .iter()
                    .map(elements::<T>)
                    .collect::<Result<Vec<_>>>()?;
                let pieces: Vec<(&[T], usize)> = pieces
                    .iter()
                    .map(|piece| (&**piece, piece.len() / outer))
                    .collect();
                let len = self.ty(0).numel() / outer;
                let mut joined = memory(self.ty(0));
                let rows = rows_per_chunk(len);
                let chunks = joined.chunks_mut((rows * len).max(1)).enumerate();
                threads.for_each(chunks, |(chunk, out)| {
                    for (i, mut out) in out.chunks_exact_mut(len).enumerate() {
                        for &(piece, len) in &pieces {
                            let (to, rest) = out.split_at_mut(len);
                            to.copy_from_slice(&piece[(chunk * rows + i) * len..][..len]);
                            out = rest;
                        }
                    }
                });
                Ok(vec![wrap(self.ty(0), joined)?])
            }
            Op::Zeros { .. } => {
                let mut zeros = memory(self.ty(0));
                zeros.fill(T::zero());
                Ok(vec![wrap(self.ty(0), zeros)?])
            }
            _ => Err(self.unsupported(inputs)),
        }
    }
}

/// Rows of `len` elements that one thread moves at a time.
fn rows_per_chunk(len: usize) -> usize {
    (16 * 1024 / len.max(1)).max(1)
}
