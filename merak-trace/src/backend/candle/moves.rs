//! Operations that move or convert elements, or number positions.

use super::{
    Candle, Handle, Pooled, Scalar, elements, own_elements,
    run::{Node, Results},
};
use crate::{Result, TensorType, Value, kernels, op::RelativeBuckets};
use merak_mpu::DType;
use num_traits::AsPrimitive;

/// Evaluates an expression with a name for the type of some elements.
macro_rules! in_type {
    ($dtype:expr, $T:ident => $result:expr) => {
        match $dtype {
            DType::F32 => in_type!(f32 as $T => $result),
            DType::F64 => in_type!(f64 as $T => $result),
            DType::BF16 => in_type!(half::bf16 as $T => $result),
            DType::F16 => in_type!(half::f16 as $T => $result),
            DType::I64 => in_type!(i64 as $T => $result),
            DType::U32 => in_type!(u32 as $T => $result),
            DType::U8 => in_type!(u8 as $T => $result),
        }
    };
    ($type:ty as $T:ident => $result:expr) => {{
        type $T = $type;
        $result
    }};
}

/// Calls a method of a node in the element type of the first result.
macro_rules! in_memory {
    ($node:ident, $method:ident($($argument:expr),*)) => {
        match $node.ty(0).dtype {
            DType::F32 => $node.$method::<f32>($($argument,)* &Memory::POOLED),
            DType::F64 => $node.$method::<f64>($($argument,)* &Memory::POOLED),
            DType::BF16 => $node.$method::<half::bf16>($($argument,)* &Memory::ONCE),
            DType::F16 => $node.$method::<half::f16>($($argument,)* &Memory::ONCE),
            DType::I64 => $node.$method::<i64>($($argument,)* &Memory::ONCE),
            DType::U32 => $node.$method::<u32>($($argument,)* &Memory::ONCE),
            DType::U8 => $node.$method::<u8>($($argument,)* &Memory::ONCE),
        }
    };
}

impl Node<'_> {
    pub(super) fn positions(&self, first: usize, len: usize) -> Results {
        let positions = (first..first + len)
            .map(|i| i64::try_from(i).expect("a position fits an i64"))
            .collect();
        Ok(vec![self.backend.wrap_once::<i64>(self.ty(0), positions)?])
    }

    /// The number of each position among those of its row that are not 0.
    pub(super) fn seen_positions(&self, seen: &Value, first: usize) -> Results {
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

    /// The number of each position in its document.
    pub(super) fn document_positions(&self, ids: &Value, first: usize) -> Results {
        let ids = elements::<i64>(ids)?;
        let first = i64::try_from(first).expect("a position fits an i64");
        let rows = ids.chunks(self.ty(0).last_dim().max(1));
        let documents = rows.flat_map(|row| row.chunk_by(PartialEq::eq));
        let positions = documents.flat_map(|document| (first..).take(document.len()));
        let positions = positions.collect();
        Ok(vec![self.backend.wrap_once::<i64>(self.ty(0), positions)?])
    }

    pub(super) fn relative_buckets(&self, spec: &RelativeBuckets) -> Results {
        let mut indices = self.backend.result(self.ty(0));
        spec.write_indices(&mut indices);
        Ok(vec![self.backend.wrap::<i64>(self.ty(0), indices)?])
    }

    pub(super) fn reshape(&self, x: &Value) -> Results {
        Ok(vec![Handle::of(x)?.clone().into_value(self.ty(0).clone())])
    }

    pub(super) fn transpose(&self, x: &Value, perm: &[usize]) -> Results {
        let shape = &x.ty().shape;
        if perm.iter().filter(|&&dim| shape[dim] != 1).is_sorted() {
            // Only dimensions of size 1 moved: the memory stays the operand's.
            return self.reshape(x);
        }
        // An operation that only moves narrow elements gives narrow elements.
        in_type!(Handle::of(x)?.dtype(), T => self.transposed::<T>(x, perm))
    }

    fn transposed<T: Scalar>(&self, x: &Value, perm: &[usize]) -> Results {
        let mut y = vec![T::zero(); x.ty().numel()];
        let from = own_elements::<T>(x, Handle::of(x)?)?;
        kernels::transpose(&self.backend.threads, &x.ty().shape, perm, &from, &mut y);
        Ok(self.wrap_own(y))
    }

    pub(super) fn cast(&self, x: &Value, dtype: DType) -> Results {
        if x.ty().dtype == dtype {
            return Ok(vec![x.clone()]);
        }
        in_type!(Handle::of(x)?.dtype(), From => in_type!(dtype, To => self.converted::<From, To>(x)))
    }

    fn converted<From: Scalar + AsPrimitive<To>, To: Scalar>(&self, x: &Value) -> Results {
        let from = own_elements::<From>(x, Handle::of(x)?)?;
        Ok(self.wrap_own(from.iter().map(|&x| x.as_()).collect()))
    }

    /// Wraps elements, which may be narrower than the value's, in memory of their own.
    fn wrap_own<T: Scalar>(&self, data: Vec<T>) -> Vec<Value> {
        let lease = self.backend.memory.lease(size_of_val(data.as_slice()));
        let wide = self.backend.pool.clone();
        vec![Handle::narrow(data, wide, lease).into_value(self.ty(0).clone())]
    }

    pub(super) fn split(&self, x: &Value, dim: usize) -> Results {
        in_memory!(self, split_in(x, dim))
    }

    pub(super) fn concat(&self, inputs: &[Value], dim: usize) -> Results {
        in_memory!(self, concat_in(inputs, dim))
    }

    /// Zeros.
    pub(super) fn blank(&self) -> Results {
        in_memory!(self, blank_in())
    }

    fn split_in<T: Scalar>(&self, x: &Value, dim: usize, memory: &Memory<T>) -> Results {
        let outer = x.ty().outer(dim).max(1);
        let x = elements::<T>(x)?;
        let x: &[T] = &x;
        let row = x.len() / outer;
        let mut start = 0;
        let piece = |ty: &TensorType| {
            let len = ty.numel() / outer;
            let mut piece = (memory.take)(self.backend, ty);
            let rows = rows_per_chunk(len);
            let chunks = piece.chunks_mut((rows * len).max(1)).enumerate();
            self.backend.threads.for_each(chunks, |(chunk, out)| {
                for (i, out) in out.chunks_exact_mut(len).enumerate() {
                    let from = (chunk * rows + i) * row + start;
                    out.copy_from_slice(&x[from..][..len]);
                }
            });
            start += len;
            (memory.wrap)(self.backend, ty, piece)
        };
        self.call.results.iter().map(piece).collect()
    }

    fn concat_in<T: Scalar>(&self, inputs: &[Value], dim: usize, memory: &Memory<T>) -> Results {
        let outer = self.ty(0).outer(dim).max(1);
        let pieces = inputs
            .iter()
            .map(elements::<T>)
            .collect::<Result<Vec<_>>>()?;
        let pieces: Vec<(&[T], usize)> = pieces
            .iter()
            .map(|piece| (&**piece, piece.len() / outer))
            .collect();
        let len = self.ty(0).numel() / outer;
        let mut joined = (memory.take)(self.backend, self.ty(0));
        let rows = rows_per_chunk(len);
        let chunks = joined.chunks_mut((rows * len).max(1)).enumerate();
        self.backend.threads.for_each(chunks, |(chunk, out)| {
            for (i, mut out) in out.chunks_exact_mut(len).enumerate() {
                for &(piece, len) in &pieces {
                    let (to, rest) = out.split_at_mut(len);
                    to.copy_from_slice(&piece[(chunk * rows + i) * len..][..len]);
                    out = rest;
                }
            }
        });
        Ok(vec![(memory.wrap)(self.backend, self.ty(0), joined)?])
    }

    fn blank_in<T: Scalar>(&self, memory: &Memory<T>) -> Results {
        let mut zeros = (memory.take)(self.backend, self.ty(0));
        zeros.fill(T::zero());
        Ok(vec![(memory.wrap)(self.backend, self.ty(0), zeros)?])
    }
}

/// How results of an element type get their memory and become values.
struct Memory<T> {
    take: fn(&Candle, &TensorType) -> Vec<T>,
    wrap: fn(&Candle, &TensorType, Vec<T>) -> Result<Value>,
}

impl<T: Pooled> Memory<T> {
    /// Taken from the pool, which gets it back.
    const POOLED: Self = Self {
        take: Candle::result,
        wrap: Candle::wrap,
    };
}

impl<T: Scalar> Memory<T> {
    /// Freed after its last use.
    const ONCE: Self = Self {
        take: |_, ty| vec![T::zero(); ty.numel()],
        wrap: Candle::wrap_once,
    };
}

/// Rows of `len` elements that one thread moves at a time.
fn rows_per_chunk(len: usize) -> usize {
    (16 * 1024 / len.max(1)).max(1)
}
