//! The gradient of each operation.

use super::{Contributions, Tape};
use crate::{
    Error, Node, Op, Result, ValueId,
    op::{Attention, AttentionOptions, AxisSlice, JoinedGrad, Reduction, Rope, WeightLayout},
    placement::Shard,
};
use merak_mpu::Axis;

/// Adds the nodes that compute the gradients of the operands of `node` that need one.
pub(super) fn gradient(
    tape: &mut Tape<'_>,
    node: &Node,
    douts: &[Option<ValueId>],
) -> Result<Contributions> {
    let rule = Rule { tape, node };
    if let Op::Split { dim, sizes } = &node.op {
        return rule.split(*dim, sizes, douts);
    }
    // The other results are statistics, and what a loss makes of one would be left out.
    if let Some(result) = douts.iter().skip(1).position(Option::is_some) {
        return Err(Error::NoGradient {
            scope: node.scope.to_string(),
            op: node.op.name(),
            result: result + 1,
        });
    }
    let Some(dy) = douts[0] else {
        return Ok(Vec::new());
    };
    rule.of_first_result(dy)
}

/// The rule of one node.
struct Rule<'a, 't> {
    tape: &'a mut Tape<'t>,
    node: &'a Node,
}

impl Rule<'_, '_> {
    /// The gradient of an operation of which only the first result is differentiable.
    #[expect(
        clippy::too_many_lines,
        reason = "a table with one entry per operation"
    )]
    fn of_first_result(mut self, dy: ValueId) -> Result<Contributions> {
        let x = |i: usize| self.node.inputs[i];
        let y = |i: usize| self.node.outputs[i];
        match &self.node.op {
            Op::Linear { layout, bias } => self.linear(*layout, *bias, dy),
            Op::MatMul {
                transpose_a,
                transpose_b,
            } => self.matmul(*transpose_a, *transpose_b, dy),
            Op::Embedding { padding, slice } => {
                let op = Op::EmbeddingGrad {
                    rows: self.shape(x(1))[0],
                    padding: *padding,
                    slice: *slice,
                };
                self.one(1, op, &[x(0), dy])
            }
            Op::LayerNorm { .. } => self.layer_norm(dy),
            Op::RmsNorm { .. } => {
                let mut out = self.one(0, Op::RmsNormGradInput, &[dy, x(0), x(1), y(1)])?;
                out.extend(self.one(1, Op::RmsNormGradParams, &[dy, x(0), y(1)])?);
                Ok(out)
            }
            Op::Attention(spec) => self.attention(spec, dy),
            Op::Rope(rope) => {
                let op = Op::Rope(Rope {
                    inverse: !rope.inverse,
                    ..rope.clone()
                });
                self.one(0, op, &[dy, x(1)])
            }
            Op::Activation(kind) => self.one(0, Op::ActivationGrad(*kind), &[x(0), dy]),
            Op::SiluMul => self.several(&[0, 1], Op::SiluMulGrad, &[x(0), x(1), dy]),
            op if op.stops_gradient() => Ok(Vec::new()),
            Op::Softmax => self.one(0, Op::SoftmaxGrad, &[y(0), dy]),
            Op::CrossEntropy { label_smoothing } => self.loss(dy, *label_smoothing, None),
            Op::VocabLoss {
                label_smoothing,
                slice,
            } => self.loss(dy, *label_smoothing, Some(*slice)),
            Op::Add => {
                let mut out = self.pass(0, dy);
                out.extend(self.repeated(1, dy)?);
                Ok(out)
            }
            Op::Mul => self.product(dy),
            // Linear maps that are their own transpose, or that pass the incoming gradient on.
            Op::Dropout(_) | Op::Scale { .. } => self.one(0, self.node.op.clone(), &[dy]),
            Op::Identity | Op::AllReduce { .. } => Ok(self.pass(0, dy)),
            Op::ShareGrad { ranks } => {
                let factor = 1.0 / *ranks as f64;
                self.one(0, Op::Scale { factor }, &[dy])
            }
            Op::CopyTo { axis } => {
                let op = Reduction::Sum;
                self.one(0, Op::AllReduce { axis: *axis, op }, &[dy])
            }
            Op::AllGather { axis, shard, grad } => {
                let local = self.shape(x(0))[shard.dim];
                let (axis, shard) = (*axis, shard.clone());
                let op = match grad {
                    JoinedGrad::Whole => Op::Scatter { axis, shard, local },
                    JoinedGrad::Summand => Op::ReduceScatter { axis, shard, local },
                };
                self.one(0, op, &[dy])
            }
            Op::Scatter { axis, shard, .. } => {
                self.join(*axis, shard.clone(), JoinedGrad::Whole, dy)
            }
            Op::ReduceScatter { axis, shard, .. } => {
                self.join(*axis, shard.clone(), JoinedGrad::Summand, dy)
            }
            Op::AllToAll { axis, from, to } => {
                let (axis, from, to) = (*axis, to.clone(), from.clone());
                self.one(0, Op::AllToAll { axis, from, to }, &[dy])
            }
            Op::SumLeading { .. } => self.repeat(dy),
            Op::SumAll => self.one(0, Op::SumAllGrad, &[x(0), dy]),
            Op::Cast { .. } => {
                let dtype = self.tape.graph.ty(x(0)).dtype;
                self.one(0, Op::Cast { dtype }, &[dy])
            }
            Op::Reshape { .. } => {
                let shape = self.shape(x(0));
                self.one(0, Op::Reshape { shape }, &[dy])
            }
            Op::Transpose { perm } => {
                let mut inverse = vec![0; perm.len()];
                perm.iter()
                    .enumerate()
                    .for_each(|(to, &from)| inverse[from] = to);
                self.one(0, Op::Transpose { perm: inverse }, &[dy])
            }
            Op::Concat { dim } => self.pieces(*dim, dy),
            Op::Positions { .. }
            | Op::SeenPositions { .. }
            | Op::DocumentPositions { .. }
            | Op::RelativeBuckets(_)
            | Op::Zeros { .. }
            | Op::Split { .. }
            | Op::LinearGradInput { .. }
            | Op::LinearGradWeight { .. }
            | Op::EmbeddingGrad { .. }
            | Op::LayerNormGradInput
            | Op::LayerNormGradParams
            | Op::RmsNormGradInput
            | Op::RmsNormGradParams
            | Op::AttentionGrad(_)
            | Op::JoinAttention
            | Op::ActivationGrad(_)
            | Op::SiluMulGrad
            | Op::SoftmaxGrad
            | Op::CrossEntropyGrad { .. }
            | Op::InverseRoot
            | Op::VocabMax { .. }
            | Op::VocabSums { .. }
            | Op::SumAllGrad => Err(Error::NoGradient {
                scope: self.node.scope.to_string(),
                op: self.node.op.name(),
                result: 0,
            }),
        }
    }

    fn linear(
        &mut self,
        layout: WeightLayout,
        has_bias: bool,
        dy: ValueId,
    ) -> Result<Contributions> {
        let (x, w) = (self.node.inputs[0], self.node.inputs[1]);
        let mut out = self.one(0, Op::LinearGradInput { layout }, &[dy, w])?;
        out.extend(self.one(1, Op::LinearGradWeight { layout }, &[x, dy])?);
        if has_bias {
            let shape = self.shape(self.node.inputs[2]);
            out.extend(self.one(2, Op::SumLeading { shape }, &[dy])?);
        }
        Ok(out)
    }

    fn layer_norm(&mut self, dy: ValueId) -> Result<Contributions> {
        let (x, w) = (self.node.inputs[0], self.node.inputs[1]);
        let (mean, rstd) = (self.node.outputs[1], self.node.outputs[2]);
        let mut out = self.one(0, Op::LayerNormGradInput, &[dy, x, w, mean, rstd])?;
        out.extend(self.several(&[1, 2], Op::LayerNormGradParams, &[dy, x, mean, rstd])?);
        Ok(out)
    }

    fn attention(&mut self, spec: &Attention, dy: ValueId) -> Result<Contributions> {
        let (qkv, options) = self.node.inputs.split_at(3);
        let types = self.node.inputs.iter().map(|&x| self.tape.graph.ty(x));
        let table = AttentionOptions::find(types, 3).table;
        let operands: Vec<_> = (0..3).chain(table).collect();
        let inputs = [&[dy], qkv, &self.node.outputs[..2], options].concat();
        self.several(&operands, Op::AttentionGrad(spec.clone()), &inputs)
    }

    /// The gradient of what was cut of an operand, joined again.
    fn join(
        &mut self,
        axis: Axis,
        shard: Shard,
        grad: JoinedGrad,
        dy: ValueId,
    ) -> Result<Contributions> {
        self.one(0, Op::AllGather { axis, shard, grad }, &[dy])
    }

    /// The gradient of a sum over leading dimensions.
    fn repeat(&mut self, dy: ValueId) -> Result<Contributions> {
        let ty = self.tape.graph.ty(self.node.inputs[0]).clone();
        let zeros = self.tape.zeros(&self.node.scope, ty)?;
        self.one(0, Op::Add, &[zeros, dy])
    }

    /// The gradients of the operands that were joined.
    fn pieces(&mut self, dim: usize, dy: ValueId) -> Result<Contributions> {
        let inputs = self.node.inputs.iter();
        let sizes: Vec<_> = inputs.map(|&piece| self.shape(piece)[dim]).collect();
        let operands: Vec<_> = (0..sizes.len()).collect();
        self.several(&operands, Op::Split { dim, sizes }, &[dy])
    }

    /// The gradient of a loss of logits that are cut as `slice` says.
    fn loss(
        &mut self,
        dy: ValueId,
        label_smoothing: f64,
        slice: Option<AxisSlice>,
    ) -> Result<Contributions> {
        let op = Op::CrossEntropyGrad {
            label_smoothing,
            slice,
        };
        let (logits, labels) = (self.node.inputs[0], self.node.inputs[1]);
        self.one(0, op, &[logits, labels, self.node.outputs[1], dy])
    }

    fn matmul(&mut self, ta: bool, tb: bool, dy: ValueId) -> Result<Contributions> {
        let (a, b) = (self.node.inputs[0], self.node.inputs[1]);
        let op = |transpose_a, transpose_b| Op::MatMul {
            transpose_a,
            transpose_b,
        };
        let mut out = if ta {
            self.one(0, op(tb, true), &[b, dy])?
        } else {
            self.one(0, op(false, !tb), &[dy, b])?
        };
        out.extend(if tb {
            self.one(1, op(true, ta), &[dy, a])?
        } else {
            self.one(1, op(!ta, false), &[a, dy])?
        });
        Ok(out)
    }

    fn product(mut self, dy: ValueId) -> Result<Contributions> {
        let (a, b) = (self.node.inputs[0], self.node.inputs[1]);
        let mut out = self.one(0, Op::Mul, &[dy, b])?;
        if self.needs(1) {
            let full = self.tape.emit(&self.node.scope, Op::Mul, vec![dy, a])?[0];
            out.extend(self.repeated(1, full)?);
        }
        Ok(out)
    }

    /// The gradient of an operand that was repeated over leading dimensions: the sum over them.
    fn repeated(&mut self, operand: usize, dy: ValueId) -> Result<Contributions> {
        let shape = self.shape(self.node.inputs[operand]);
        if self.tape.graph.ty(dy).shape == shape {
            return Ok(self.pass(operand, dy));
        }
        self.one(operand, Op::SumLeading { shape }, &[dy])
    }

    fn split(
        self,
        dim: usize,
        sizes: &[usize],
        douts: &[Option<ValueId>],
    ) -> Result<Contributions> {
        if !self.needs(0) {
            return Ok(Vec::new());
        }
        let ty = self.tape.graph.ty(self.node.inputs[0]).clone();
        let mut pieces = Vec::with_capacity(sizes.len());
        for (&size, dout) in sizes.iter().zip(douts) {
            pieces.push(match dout {
                Some(grad) => *grad,
                None => self.tape.zeros(&self.node.scope, ty.with_dim(dim, size))?,
            });
        }
        let dx = self
            .tape
            .emit(&self.node.scope, Op::Concat { dim }, pieces)?[0];
        Ok(vec![(0, dx)])
    }

    fn needs(&self, operand: usize) -> bool {
        self.tape.needs[self.node.inputs[operand].index()]
    }

    fn shape(&self, value: ValueId) -> Vec<usize> {
        self.tape.graph.ty(value).shape.clone()
    }

    /// The gradient of an operand is `value` itself.
    fn pass(&self, operand: usize, value: ValueId) -> Contributions {
        if self.needs(operand) {
            vec![(operand, value)]
        } else {
            Vec::new()
        }
    }

    /// The gradient of one operand is the result of `op`, if it needs one.
    fn one(&mut self, operand: usize, op: Op, inputs: &[ValueId]) -> Result<Contributions> {
        self.several(&[operand], op, inputs)
    }

    /// The gradients of several operands are the results of `op`, if any of them needs one.
    fn several(&mut self, operands: &[usize], op: Op, inputs: &[ValueId]) -> Result<Contributions> {
        if !operands.iter().any(|&operand| self.needs(operand)) {
            return Ok(Vec::new());
        }
        let results = self.tape.emit(&self.node.scope, op, inputs.to_vec())?;
        Ok(operands
            .iter()
            .zip(results)
            .filter(|(operand, _)| self.needs(**operand))
            .map(|(&operand, value)| (operand, value))
            .collect())
    }
}
