//! Operations without parameters of their own.

use super::{Hidden, Module, Symbol};
use crate::{
    Op, Result,
    op::{Activation, Attention, DropoutSpec, RelativeBuckets, Rope, WeightLayout},
};
use std::iter;

/// Terms that may be added to the scores of an attention.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionTerms<'a> {
    /// `[B, Sk]` i64, 0 for keys that no query sees.
    pub seen: Option<&'a Symbol>,
    /// A table `[R, heads]` and its row for each query and key, `[Sq, Sk]` i64.
    pub bias: Option<[&'a Symbol; 2]>,
}

/// Operations without parameters.
impl Module {
    /// `y = x W` with a parameter of another module (a tied head).
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn linear_with(&self, x: &Symbol, weight: &Symbol, layout: WeightLayout) -> Result<Symbol> {
        self.apply1(
            Op::Linear {
                layout,
                bias: false,
            },
            &[x, weight],
        )
    }

    /// The position of each element of a sequence, `[len]` i64; `[B, len]` where the sequences are
    /// parted into documents.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn positions(&self, len: usize) -> Result<Symbol> {
        self.positions_from(0, len)
    }

    /// As [`Module::positions`], counted from `first`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn positions_from(&self, first: usize, len: usize) -> Result<Symbol> {
        match self.hidden.get() {
            Some(Hidden::Documents(ids)) => self.apply1(Op::DocumentPositions { first }, &[ids]),
            _ => self.apply1(Op::Positions { len, first }, &[]),
        }
    }

    /// Numbers the positions of `seen`, `[B, S]` i64, that are not 0, from `first` on; the others
    /// get `first - 1`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn seen_positions(&self, seen: &Symbol, first: usize) -> Result<Symbol> {
        self.apply1(Op::SeenPositions { first }, &[seen])
    }

    /// Attention over packed heads, to the keys that are not hidden or of another document;
    /// `dropout` is the probability of zeroing a weight.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn attention(
        &self,
        q: &Symbol,
        k: &Symbol,
        v: &Symbol,
        spec: &Attention,
        dropout: f64,
    ) -> Result<Symbol> {
        let (seen, documents) = match self.hidden.get() {
            None => (None, false),
            Some(Hidden::Unseen(seen)) => (Some(seen), false),
            Some(Hidden::Documents(ids)) => (Some(ids), true),
        };
        let spec = Attention {
            documents,
            ..spec.clone()
        };
        self.attention_with(
            [q, k, v],
            AttentionTerms { seen, bias: None },
            &spec,
            dropout,
        )
    }

    /// The bucket of each query's distance to each key, `[Sq, Sk]` i64.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn relative_buckets(&self, spec: RelativeBuckets) -> Result<Symbol> {
        self.apply1(Op::RelativeBuckets(spec), &[])
    }

    /// Attention of `[q, k, v]` with terms that are added to the scores.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn attention_with(
        &self,
        qkv: [&Symbol; 3],
        terms: AttentionTerms<'_>,
        spec: &Attention,
        dropout: f64,
    ) -> Result<Symbol> {
        let mut inputs = qkv.to_vec();
        inputs.extend(terms.seen);
        inputs.extend(terms.bias.into_iter().flatten());
        self.apply_random(
            |dropout| {
                Op::Attention(Attention {
                    dropout,
                    ..spec.clone()
                })
            },
            dropout,
            &inputs,
        )
    }

    /// Rotary position embedding of packed heads.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn rope(&self, x: &Symbol, positions: &Symbol, rope: Rope) -> Result<Symbol> {
        self.apply1(Op::Rope(rope), &[x, positions])
    }

    /// An elementwise function.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn activation(&self, x: &Symbol, kind: Activation) -> Result<Symbol> {
        self.apply1(Op::Activation(kind), &[x])
    }

    /// `silu(gate) * up`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn silu_mul(&self, gate: &Symbol, up: &Symbol) -> Result<Symbol> {
        self.apply1(Op::SiluMul, &[gate, up])
    }

    /// Zeroes elements with probability `p`; adds no node when `p` is 0. The mask of an element
    /// follows from its sample, which dimension 0 counts; [`Module::dropout_by`] is for others.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn dropout(&self, x: &Symbol, p: f64) -> Result<Symbol> {
        if p <= 0.0 {
            return Ok(x.clone());
        }
        self.apply_random(
            |spec| {
                Op::Dropout(spec.unwrap_or(DropoutSpec {
                    p,
                    key: 0,
                    slice: None,
                    nested: None,
                }))
            },
            p,
            &[x],
        )
    }

    /// [`Module::dropout`] of a value whose dimension `batch_dim` counts the samples, as 1 does in
    /// `[S, B, H]`. The value is transposed for it, so that this dimension comes first, and back.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn dropout_by(&self, x: &Symbol, batch_dim: usize, p: f64) -> Result<Symbol> {
        if p <= 0.0 || batch_dim == 0 {
            return self.dropout(x, p);
        }
        let others = (0..x.ty.ndim()).filter(|&dim| dim != batch_dim);
        let there: Vec<_> = iter::once(batch_dim).chain(others).collect();
        let back = (1..=batch_dim).chain([0]).chain(batch_dim + 1..x.ty.ndim());
        let dropped = self.dropout(&self.transpose(x, &there)?, p)?;
        self.transpose(&dropped, &back.collect::<Vec<_>>())
    }

    /// `a + b`, `b` repeated over the leading dimensions of `a`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn add(&self, a: &Symbol, b: &Symbol) -> Result<Symbol> {
        self.apply1(Op::Add, &[a, b])
    }

    /// `a * b`, `b` repeated over the leading dimensions of `a`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn mul(&self, a: &Symbol, b: &Symbol) -> Result<Symbol> {
        self.apply1(Op::Mul, &[a, b])
    }

    /// Pieces of `x` along `dim`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn split(&self, x: &Symbol, dim: usize, sizes: &[usize]) -> Result<Vec<Symbol>> {
        self.apply(
            Op::Split {
                dim,
                sizes: sizes.to_vec(),
            },
            &[x],
        )
    }

    /// `factor * x`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn scale(&self, x: &Symbol, factor: f64) -> Result<Symbol> {
        self.apply1(Op::Scale { factor }, &[x])
    }

    /// Pieces joined along `dim`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn concat(&self, pieces: &[&Symbol], dim: usize) -> Result<Symbol> {
        self.apply1(Op::Concat { dim }, pieces)
    }

    /// The dimensions in another order: `result.shape[i] = x.shape[perm[i]]`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn transpose(&self, x: &Symbol, perm: &[usize]) -> Result<Symbol> {
        let perm = perm.to_vec();
        self.apply1(Op::Transpose { perm }, &[x])
    }

    /// `x` repeated over leading dimensions until it has this shape.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn repeated(&self, x: &Symbol, shape: &[usize]) -> Result<Symbol> {
        let (shape, dtype) = (shape.to_vec(), x.ty.dtype);
        let zeros = self.apply1(Op::Zeros { shape, dtype }, &[])?;
        self.add(&zeros, x)
    }

    /// The first position of each sequence: `[B, S, ..] -> [B, ..]`.
    ///
    /// # Errors
    /// As [`Module::apply`], and when a sequence has no position.
    pub fn first(&self, x: &Symbol) -> Result<Symbol> {
        let mut shape = x.shape().to_vec();
        let first = match shape.get(1) {
            Some(1) => x.clone(),
            // Without a position to take, the split is refused.
            len => {
                let others = len.map_or(0, |len| len.saturating_sub(1));
                self.split(x, 1, &[1, others])?.swap_remove(0)
            }
        };
        shape.remove(1);
        self.reshape(&first, &shape)
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn reshape(&self, x: &Symbol, shape: &[usize]) -> Result<Symbol> {
        self.apply1(
            Op::Reshape {
                shape: shape.to_vec(),
            },
            &[x],
        )
    }

    /// The sum of all elements, `[] f64`: the end of a custom loss.
    ///
    /// # Errors
    /// As [`Module::apply`].
    ///
    /// ```
    /// use merak_trace::{DType, TensorType, fx};
    /// let graph = fx::trace(DType::F32, |module| {
    ///     let x = module.input("x", TensorType::new([4, 8], DType::F32));
    ///     let squares = module.mul(&x, &x)?;
    ///     module.output("loss", &module.sum(&squares)?);
    ///     Ok(())
    /// })?;
    /// let loss = graph.output("loss").map(|loss| graph.ty(loss).to_string());
    /// assert_eq!(loss.as_deref(), Some("f64[]"));
    /// # Ok::<(), merak_trace::Error>(())
    /// ```
    pub fn sum(&self, x: &Symbol) -> Result<Symbol> {
        self.apply1(Op::SumAll, &[x])
    }

    /// The sum of the token losses of `logits: [.., V]` against `labels: [..]`; -100 is ignored.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn cross_entropy(
        &self,
        logits: &Symbol,
        labels: &Symbol,
        label_smoothing: f64,
    ) -> Result<Symbol> {
        self.apply1(Op::CrossEntropy { label_smoothing }, &[logits, labels])
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, TensorType, fx::trace};

    #[test]
    fn the_first_position_is_one_of_a_sequence_that_has_some() {
        let first = |shape: &[usize]| {
            let mut ty = String::new();
            trace(DType::F32, |module| {
                let x = module.input("x", TensorType::new(shape, DType::F32));
                ty = module.sub("pooler").first(&x)?.ty().to_string();
                Ok(())
            })?;
            Ok::<_, crate::Error>(ty)
        };
        for sequence in [1, 5] {
            assert_eq!(first(&[2, sequence, 4]).unwrap(), "f32[2, 4]");
        }
        assert_eq!(first(&[2, 3]).unwrap(), "f32[2]");
        let refused = |shape: &[usize]| first(shape).unwrap_err();
        insta::assert_snapshot!(refused(&[2, 0, 4]), @"pooler: split: pieces [1, 0] do not make up dimension 1 of f32[2, 0, 4]");
        insta::assert_snapshot!(refused(&[2]), @"pooler: split: f32[2] has no dimension 1");
        insta::assert_snapshot!(refused(&[]), @"pooler: split: f32[] has no dimension 1");
    }
}
