//! One node at a time: which kernel computes which operation.

use super::{Candle, Handle, Pooled, Scalar, at, elements, steal};
use crate::{
    Call, Error, Op, Result, TensorType, Value,
    kernels::{self, Float, KernelError, MatMut, MatRef, TableRows, Turn, Write},
    op::{Activation, WeightLayout},
};
use candle_core::Tensor;
use merak_mpu::DType;

/// An element type that the kernels compute with.
pub(super) trait Number: Float + Pooled {}
impl<T: Float + Pooled> Number for T {}

/// Runs a node.
pub(super) fn run(backend: &Candle, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>> {
    let node = Node { backend, call };
    match call.op {
        Op::Positions { len, first } => {
            let start = *first;
            let positions = (start..start + len)
                .map(|i| i64::try_from(i).expect("a position fits an i64"))
                .collect();
            return Ok(vec![backend.wrap_once::<i64>(&call.results[0], positions)?]);
        }
        Op::SeenPositions { first } => {
            let positions = seen_positions(&elements::<i64>(&inputs[0])?, &call, *first);
            return Ok(vec![backend.wrap_once::<i64>(&call.results[0], positions)?]);
        }
        Op::RelativeBuckets(spec) => {
            let indices = spec.indices();
            return Ok(vec![backend.wrap_once::<i64>(&call.results[0], indices)?]);
        }
        Op::Identity | Op::CopyTo { .. } => return Ok(inputs),
        Op::Reshape { .. } => return node.reshape(&inputs[0]),
        Op::Transpose { perm } => return node.transpose(&inputs[0], perm),
        Op::Cast { dtype } => return node.cast(&inputs[0], *dtype),
        Op::AllReduce { .. } | Op::AllGather { .. } | Op::Scatter { .. } => {
            return Err(node.unsupported(&inputs));
        }
        _ => {}
    }
    let float = match call.op {
        // The loss is always f64; its operands decide.
        Op::CrossEntropy { .. } | Op::SumAll => inputs[0].ty().dtype,
        _ => call.results[0].dtype,
    };
    match float {
        DType::F32 => node.run::<f32>(inputs),
        DType::F64 => node.run::<f64>(inputs),
        DType::I64 => node.move_data::<i64>(
            &inputs,
            |ty| vec![0; ty.numel()],
            |ty, data| backend.wrap_once(ty, data),
        ),
        DType::BF16 | DType::F16 | DType::U32 | DType::U8 => Err(node.unsupported(&inputs)),
    }
}

/// The number of each position among those of its row that are not 0.
fn seen_positions(seen: &[i64], call: &Call<'_>, first: usize) -> Vec<i64> {
    let before = i64::try_from(first).expect("a position fits an i64") - 1;
    let number = |last: &mut i64, &seen: &i64| {
        *last += i64::from(seen != 0);
        Some(if seen == 0 { before } else { *last })
    };
    let rows = seen.chunks(call.results[0].last_dim().max(1));
    rows.flat_map(|row| row.iter().scan(before, number))
        .collect()
}

/// A node being computed.
pub(super) struct Node<'a> {
    pub(super) backend: &'a Candle,
    pub(super) call: Call<'a>,
}

impl Node<'_> {
    pub(super) fn unsupported(&self, inputs: &[Value]) -> Error {
        let types: Vec<_> = inputs.iter().map(|value| value.ty().to_string()).collect();
        Error::Unsupported {
            backend: "candle",
            op: self.call.op.name(),
            types: types.join(", "),
        }
    }

    pub(super) fn kernel_error(&self, source: KernelError) -> Error {
        Error::Kernel {
            node: self.call.name.to_owned(),
            source,
        }
    }

    fn ty(&self, result: usize) -> &TensorType {
        &self.call.results[result]
    }

    pub(super) fn out<T: Number>(&self, result: usize) -> Vec<T> {
        self.backend.result(self.ty(result))
    }

    /// Wraps the results, in their order.
    pub(super) fn done<T: Number, const N: usize>(
        &self,
        results: [Vec<T>; N],
    ) -> Result<Vec<Value>> {
        results
            .into_iter()
            .zip(self.call.results)
            .map(|(data, ty)| self.backend.wrap(ty, data))
            .collect()
    }

    #[expect(
        clippy::too_many_lines,
        reason = "a table of operations and their kernels"
    )]
    fn run<T: Number>(&self, inputs: Vec<Value>) -> Result<Vec<Value>> {
        let threads = &self.backend.threads;
        let x = |i: usize| elements::<T>(&inputs[i]);
        match self.call.op {
            Op::Zeros { .. } => {
                let mut zeros = self.out::<T>(0);
                zeros.fill(T::ZERO);
                self.done([zeros])
            }
            Op::Linear { layout, bias } => {
                let mut y = self.out::<T>(0);
                let bias = if *bias { Some(x(2)?) } else { None };
                self.linear(*layout, &inputs[0], &inputs[1], bias.as_deref(), &mut y)?;
                self.done([y])
            }
            Op::LinearGradInput { layout } => {
                let mut dx = self.out::<T>(0);
                self.linear(flip(*layout), &inputs[0], &inputs[1], None, &mut dx)?;
                self.done([dx])
            }
            Op::LinearGradWeight { layout } => {
                let mut dw = self.out::<T>(0);
                self.weight_gradient(*layout, &inputs[0], &inputs[1], Write::Replace, &mut dw)?;
                self.done([dw])
            }
            Op::MatMul {
                transpose_a,
                transpose_b,
            } => self.matmul::<T>(*transpose_a, *transpose_b, &inputs),
            Op::Embedding { .. } => {
                let ids = elements::<i64>(&inputs[0])?;
                let mut y = self.out::<T>(0);
                kernels::embedding(
                    threads,
                    &TableRows::all(inputs[1].ty().shape[0]),
                    &x(1)?,
                    &ids,
                    &mut y,
                )
                .map_err(|e| self.kernel_error(e))?;
                self.done([y])
            }
            Op::LayerNorm { eps } => {
                let (mut y, mut mean, mut rstd) = (self.out(0), self.out(1), self.out(2));
                kernels::layer_norm::<T>(
                    threads,
                    &x(0)?,
                    &x(1)?,
                    Some(&x(2)?),
                    *eps,
                    &mut y,
                    &mut mean,
                    &mut rstd,
                );
                self.done([y, mean, rstd])
            }
            Op::LayerNormGradInput => {
                let mut dx = self.out::<T>(0);
                kernels::layer_norm_grad_input(
                    threads,
                    &x(0)?,
                    &x(1)?,
                    &x(2)?,
                    &x(3)?,
                    &x(4)?,
                    &mut dx,
                );
                self.done([dx])
            }
            Op::RmsNorm { eps } => {
                let (mut y, mut rstd) = (self.out(0), self.out(1));
                kernels::rms_norm::<T>(threads, &x(0)?, &x(1)?, *eps, &mut y, &mut rstd);
                self.done([y, rstd])
            }
            Op::RmsNormGradInput => {
                let mut dx = self.out::<T>(0);
                kernels::rms_norm_grad_input(threads, &x(0)?, &x(1)?, &x(2)?, &x(3)?, &mut dx);
                self.done([dx])
            }
            Op::Activation(kind) => {
                let mut y = self.out::<T>(0);
                kernels::activation(threads, kernel_of(*kind), &x(0)?, &mut y);
                self.done([y])
            }
            Op::ActivationGrad(kind) => {
                let mut dx = self.out::<T>(0);
                kernels::activation_grad(threads, kernel_of(*kind), &x(0)?, &x(1)?, &mut dx);
                self.done([dx])
            }
            Op::SiluMul => {
                let mut y = self.out::<T>(0);
                kernels::silu_mul(threads, &x(0)?, &x(1)?, &mut y);
                self.done([y])
            }
            Op::SiluMulGrad => {
                let (mut dgate, mut dup) = (self.out::<T>(0), self.out::<T>(1));
                kernels::silu_mul_grad(threads, &x(0)?, &x(1)?, &x(2)?, &mut dgate, &mut dup);
                self.done([dgate, dup])
            }
            Op::Dropout(spec) => {
                if !self.call.context.training {
                    return Ok(inputs);
                }
                let mut y = self.out::<T>(0);
                let context = self.call.context;
                let slice = context.sample_slice(spec, &self.ty(0).shape);
                kernels::dropout(threads, context.dropout(spec), slice, &x(0)?, &mut y);
                self.done([y])
            }
            Op::Attention(spec) => self.attention::<T>(spec, &inputs),
            Op::AttentionGrad(spec) => self.attention_grad::<T>(spec, &inputs),
            Op::Softmax => {
                let mut y = self.out::<T>(0);
                kernels::softmax(threads, self.ty(0).last_dim(), &x(0)?, &mut y);
                self.done([y])
            }
            Op::SoftmaxGrad => {
                let mut dx = self.out::<T>(0);
                kernels::softmax_grad(threads, self.ty(0).last_dim(), &x(0)?, &x(1)?, &mut dx);
                self.done([dx])
            }
            Op::Rope(rope) => {
                let positions = elements::<i64>(&inputs[1])?;
                let mut y = self.out::<T>(0);
                kernels::rope(
                    threads,
                    rope.head_dim,
                    &Turn {
                        inv_freq: &rope.inv_freq,
                        scale: rope.scale,
                        inverse: rope.inverse,
                    },
                    &positions,
                    self.ty(0).last_dim(),
                    &x(0)?,
                    &mut y,
                );
                self.done([y])
            }
            Op::CrossEntropy { label_smoothing } => {
                let labels = elements::<i64>(&inputs[1])?;
                let mut lse = self.out::<T>(1);
                let loss =
                    kernels::cross_entropy(threads, &x(0)?, &labels, *label_smoothing, &mut lse);
                let loss = loss.map_err(|e| self.kernel_error(e))?;
                Ok(vec![
                    self.backend.wrap(self.ty(0), vec![loss])?,
                    self.backend.wrap(self.ty(1), lse)?,
                ])
            }
            Op::CrossEntropyGrad { label_smoothing } => {
                let (labels, scale) = (
                    elements::<i64>(&inputs[1])?,
                    <T as Float>::from_f64(elements::<f64>(&inputs[3])?[0]),
                );
                let mut dlogits = self.out::<T>(0);
                kernels::cross_entropy_grad(
                    threads,
                    &x(0)?,
                    &labels,
                    *label_smoothing,
                    &x(2)?,
                    scale,
                    &mut dlogits,
                )
                .map_err(|e| self.kernel_error(e))?;
                self.done([dlogits])
            }
            Op::Add => self.add::<T>(inputs),
            Op::Mul => {
                let mut y = self.out::<T>(0);
                let (a, b) = (x(0)?, x(1)?);
                if a.len() == b.len() {
                    kernels::mul(threads, &a, &b, &mut y);
                } else {
                    let repeats = y
                        .chunks_exact_mut(b.len().max(1))
                        .zip(a.chunks_exact(b.len().max(1)));
                    repeats.for_each(|(y, a)| kernels::mul(threads, a, &b, y));
                }
                self.done([y])
            }
            Op::InverseRoot => {
                let root = |&x: &T| <T as Float>::from_f64(1.0 / Float::to_f64(x).sqrt());
                self.done([x(0)?.iter().map(root).collect()])
            }
            Op::Scale { factor } => {
                let mut y = self.out::<T>(0);
                kernels::scale(threads, <T as Float>::from_f64(*factor), &x(0)?, &mut y);
                self.done([y])
            }
            Op::SumAll => {
                let sum = x(0)?.iter().map(|&x| Float::to_f64(x)).sum::<f64>();
                Ok(vec![self.backend.wrap(self.ty(0), vec![sum])?])
            }
            Op::SumAllGrad => {
                let dy = elements::<f64>(&inputs[1])?[0];
                self.done([vec![<T as Float>::from_f64(dy); self.ty(0).numel()]])
            }
            // Sums that accumulate start from zero here.
            Op::LayerNormGradParams
            | Op::RmsNormGradParams
            | Op::SumLeading { .. }
            | Op::EmbeddingGrad { .. } => {
                let mut sums: Vec<_> = self
                    .call
                    .results
                    .iter()
                    .map(|ty| self.backend.result::<T>(ty))
                    .collect();
                for sum in &mut sums {
                    sum.fill(T::ZERO);
                }
                let mut parts: Vec<_> = sums.iter_mut().map(Vec::as_mut_slice).collect();
                self.add_to::<T>(&inputs, &mut parts)?;
                sums.into_iter()
                    .zip(self.call.results)
                    .map(|(data, ty)| self.backend.wrap(ty, data))
                    .collect()
            }
            Op::Split { .. } | Op::Concat { .. } => self.move_data::<T>(
                &inputs,
                |ty| self.backend.result(ty),
                |ty, data| self.backend.wrap(ty, data),
            ),
            Op::Positions { .. }
            | Op::SeenPositions { .. }
            | Op::RelativeBuckets(_)
            | Op::Identity
            | Op::Cast { .. }
            | Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::CopyTo { .. }
            | Op::AllReduce { .. }
            | Op::AllGather { .. }
            | Op::Scatter { .. } => Err(self.unsupported(&inputs)),
        }
    }

    /// `y = x W (+ bias)` for any layout of `W`; `x: [.., in]`, `y: [.., out]`.
    fn linear<T: Number>(
        &self,
        layout: WeightLayout,
        x: &Value,
        w: &Value,
        bias: Option<&[T]>,
        y: &mut [T],
    ) -> Result<()> {
        let (rows, width) = (x.ty().rows(), x.ty().last_dim());
        let (w_rows, w_cols) = (w.ty().shape[0], w.ty().shape[1]);
        let (x, w) = (elements::<T>(x)?, elements::<T>(w)?);
        let w = MatRef::new(&w, w_rows, w_cols);
        let w = match layout {
            WeightLayout::OutIn => w.transposed(),
            WeightLayout::InOut => w,
        };
        let (x, y) = (MatRef::new(&x, rows, width), MatMut::new(y, rows, w.cols()));
        let threads = &self.backend.threads;
        match bias {
            Some(bias) => kernels::gemm_bias(threads, x, w, bias, y),
            None => kernels::gemm(threads, T::ONE, x, w, Write::Replace, y),
        }
        Ok(())
    }

    /// `dw (+)= xᵀ dy`, laid out as `w` is.
    pub(super) fn weight_gradient<T: Number>(
        &self,
        layout: WeightLayout,
        x: &Value,
        dy: &Value,
        write: Write,
        dw: &mut [T],
    ) -> Result<()> {
        let (rows, n_in, n_out) = (x.ty().rows(), x.ty().last_dim(), dy.ty().last_dim());
        let (x, dy) = (elements::<T>(x)?, elements::<T>(dy)?);
        let (x, dy) = (MatRef::new(&x, rows, n_in), MatRef::new(&dy, rows, n_out));
        let threads = &self.backend.threads;
        match layout {
            WeightLayout::OutIn => kernels::gemm(
                threads,
                T::ONE,
                dy.transposed(),
                x,
                write,
                MatMut::new(dw, n_out, n_in),
            ),
            WeightLayout::InOut => kernels::gemm(
                threads,
                T::ONE,
                x.transposed(),
                dy,
                write,
                MatMut::new(dw, n_in, n_out),
            ),
        }
        Ok(())
    }

    fn matmul<T: Number>(&self, ta: bool, tb: bool, inputs: &[Value]) -> Result<Vec<Value>> {
        let shape_of = |value: &Value| {
            let shape = &value.ty().shape;
            (shape[shape.len() - 2], shape[shape.len() - 1])
        };
        let ((a_rows, a_cols), (b_rows, b_cols)) = (shape_of(&inputs[0]), shape_of(&inputs[1]));
        let (a, b) = (elements::<T>(&inputs[0])?, elements::<T>(&inputs[1])?);
        let mut c = self.out::<T>(0);
        let (rows, cols) = (
            if ta { a_cols } else { a_rows },
            if tb { b_rows } else { b_cols },
        );
        if !c.is_empty() {
            let outs = c
                .chunks_exact_mut(rows * cols)
                .map(|c| MatMut::new(c, rows, cols))
                .collect();
            let a = |i: usize| oriented(MatRef::new(&a[i * a_rows * a_cols..], a_rows, a_cols), ta);
            let b = |i: usize| oriented(MatRef::new(&b[i * b_rows * b_cols..], b_rows, b_cols), tb);
            kernels::gemm_batched(&self.backend.threads, T::ONE, a, b, Write::Replace, outs);
        }
        self.done([c])
    }

    /// Adds in place where the first operand may be overwritten.
    fn add<T: Number>(&self, mut inputs: Vec<Value>) -> Result<Vec<Value>> {
        let threads = &self.backend.threads;
        let (b, a) = (inputs.swap_remove(1), inputs.swap_remove(0));
        let same = a.ty() == b.ty();
        match steal::<T>(a) {
            Ok(mut sum) if same => {
                kernels::add_assign(threads, &elements::<T>(&b)?, &mut sum);
                self.done([sum])
            }
            Ok(a) => {
                let mut sum = self.out::<T>(0);
                kernels::add_suffix(threads, &a, &elements::<T>(&b)?, &mut sum);
                drop(self.backend.wrap(self.ty(0), a)?);
                self.done([sum])
            }
            Err(a) => {
                let mut sum = self.out::<T>(0);
                let (a, b) = (elements::<T>(&a)?, elements::<T>(&b)?);
                if same {
                    kernels::add(threads, &a, &b, &mut sum);
                } else {
                    kernels::add_suffix(threads, &a, &b, &mut sum);
                }
                self.done([sum])
            }
        }
    }

    fn reshape(&self, x: &Value) -> Result<Vec<Value>> {
        let handle = Handle::of(x)?;
        let tensor = handle
            .tensor
            .reshape(self.ty(0).shape.as_slice())
            .map_err(at(self.call.name))?;
        Ok(vec![handle.view(tensor).into_value(self.ty(0).clone())])
    }

    fn transpose(&self, x: &Value, perm: &[usize]) -> Result<Vec<Value>> {
        let handle = Handle::of(x)?;
        let permuted = handle.tensor.permute(perm).map_err(at(self.call.name))?;
        if permuted.is_contiguous() {
            // Only dimensions of size 1 moved: the storage stays the operand's.
            return Ok(vec![handle.view(permuted).into_value(self.ty(0).clone())]);
        }
        self.wrap_candle(permuted.contiguous())
    }

    fn cast(&self, x: &Value, dtype: DType) -> Result<Vec<Value>> {
        if x.ty().dtype == dtype {
            return Ok(vec![x.clone()]);
        }
        self.wrap_candle(
            Handle::of(x)?
                .tensor
                .to_dtype(super::storage::candle_dtype(dtype)),
        )
    }

    /// The result of an operation of candle's own, in memory of its own.
    fn wrap_candle(&self, tensor: candle_core::Result<Tensor>) -> Result<Vec<Value>> {
        let tensor = tensor.map_err(at(self.call.name))?;
        let lease = self.backend.memory.lease(self.ty(0).size_bytes());
        Ok(vec![
            Handle::new(tensor, None, Some(lease)).into_value(self.ty(0).clone()),
        ])
    }

    /// Splits and joins, for any element type: `memory` gives room for a result, `wrap` makes it a value.
    fn move_data<T: Scalar>(
        &self,
        inputs: &[Value],
        memory: impl Fn(&TensorType) -> Vec<T>,
        wrap: impl Fn(&TensorType, Vec<T>) -> Result<Value>,
    ) -> Result<Vec<Value>> {
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

fn oriented<T: Float>(m: MatRef<'_, T>, transpose: bool) -> MatRef<'_, T> {
    if transpose { m.transposed() } else { m }
}

/// The layout in which the transposed matrix multiplies.
fn flip(layout: WeightLayout) -> WeightLayout {
    match layout {
        WeightLayout::OutIn => WeightLayout::InOut,
        WeightLayout::InOut => WeightLayout::OutIn,
    }
}

fn kernel_of(kind: Activation) -> kernels::Activation {
    match kind {
        Activation::GeluTanh => kernels::Activation::GeluTanh,
        Activation::GeluErf => kernels::Activation::GeluErf,
        Activation::Silu => kernels::Activation::Silu,
        Activation::Relu => kernels::Activation::Relu,
        Activation::Tanh => kernels::Activation::Tanh,
    }
}
