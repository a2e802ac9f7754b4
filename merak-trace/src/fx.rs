//! Symbolic tracing: ordinary Rust code runs once on values that have a type and no storage.
//!
//! ```
//! use merak_trace::{DType, Init, ParamRole, TensorType, fx, op::{Activation, WeightLayout}};
//!
//! let graph = fx::trace(DType::F32, |module| {
//!     let x = module.input("x", TensorType::new([4, 8], DType::F32));
//!     let hidden =
//!         module.sub("up").linear(&x, 16, WeightLayout::OutIn, true, Init::Normal(0.02))?;
//!     let hidden = module.activation(&hidden, Activation::GeluTanh)?;
//!     let y =
//!         module.sub("down").linear(&hidden, 8, WeightLayout::OutIn, true, Init::Normal(0.02))?;
//!     module.output("y", &y);
//!     Ok(())
//! })?;
//! assert_eq!(graph.params()[0].name, "up.weight");
//! assert_eq!(graph.num_elements(), 8 * 16 + 16 + 16 * 8 + 8);
//! # Ok::<(), merak_trace::Error>(())
//! ```

use crate::{
    Graph, Init, Op, Param, ParamRole, Result, TensorType, ValueId,
    op::{Activation, Attention, DropoutSpec, RelativeBuckets, Rope, WeightLayout},
};
use merak_mpu::{DType, hash::fnv1a};
use std::{
    cell::{OnceCell, RefCell},
    iter,
    rc::Rc,
    sync::Arc,
};

mod extend;

pub use extend::{Copied, Original, extend};

/// Runs `model` once on symbolic values and returns the graph of its operations.
///
/// `dtype` is the element type of the parameters and float constants.
///
/// # Errors
/// Those of `model`: operands that do not fit, with the path of the module.
pub fn trace(dtype: DType, model: impl FnOnce(&Module) -> Result<()>) -> Result<Graph> {
    let graph = Rc::new(RefCell::new(Graph::new()));
    model(&Module {
        graph: Rc::clone(&graph),
        path: "".into(),
        dtype,
        hidden: Rc::default(),
    })?;
    Ok(graph.take())
}

/// A value while the model is traced: it has a type, and no elements to branch on.
#[derive(Debug, Clone)]
pub struct Symbol {
    id: ValueId,
    ty: TensorType,
}

impl Symbol {
    /// Its place in the graph.
    pub fn id(&self) -> ValueId {
        self.id
    }

    /// Shape and element type.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.ty.shape
    }
}

/// Terms that may be added to the scores of an attention.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionTerms<'a> {
    /// `[B, Sk]` i64, 0 for keys that no query sees.
    pub seen: Option<&'a Symbol>,
    /// A table `[R, heads]` and its row for each query and key, `[Sq, Sk]` i64.
    pub bias: Option<[&'a Symbol; 2]>,
}

/// A module that is being traced: a path below which parameters and nodes are named.
#[derive(Debug, Clone)]
pub struct Module {
    graph: Rc<RefCell<Graph>>,
    path: Arc<str>,
    dtype: DType,
    /// What hides keys from an attention by default.
    hidden: Rc<OnceCell<Hidden>>,
}

/// What hides keys from the attentions of a model, `[B, S]` i64.
#[derive(Debug)]
enum Hidden {
    /// Keys where it is 0, from all queries.
    Unseen(Symbol),
    /// Keys of other documents, which have other ids.
    Documents(Symbol),
}

impl Module {
    /// The submodule of that name; dots make further levels.
    #[must_use]
    pub fn sub(&self, name: &str) -> Self {
        Self {
            graph: Rc::clone(&self.graph),
            path: self.qualified(name).into(),
            dtype: self.dtype,
            hidden: Rc::clone(&self.hidden),
        }
    }

    /// Hides the keys where `seen`, `[B, Sk]` i64, is 0 from every later [`Module::attention`] of
    /// the model.
    pub fn hide_unseen(&self, seen: &Symbol) {
        // The first mask stays.
        let _ = self.hidden.set(Hidden::Unseen(seen.clone()));
    }

    /// Parts the sequences of the model into documents, which are runs of equal `ids`, `[B, S]`
    /// i64: every later [`Module::attention`] sees its own document alone, and
    /// [`Module::positions`] count from the start of each.
    pub fn part_documents(&self, ids: &Symbol) {
        // The first mask stays.
        let _ = self.hidden.set(Hidden::Documents(ids.clone()));
    }

    /// The mask that hides keys from every attention, if there is one.
    pub fn seen(&self) -> Option<&Symbol> {
        match self.hidden.get()? {
            Hidden::Unseen(seen) => Some(seen),
            Hidden::Documents(_) => None,
        }
    }

    /// The same module with parameters of another element type.
    #[must_use]
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Self {
            dtype,
            ..self.clone()
        }
    }

    /// The path from the root, with dots.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Changes a parameter of the graph, except its name and type.
    pub fn declare(&self, param: &Symbol, change: impl FnOnce(&mut Param)) {
        let mut graph = self.graph.borrow_mut();
        if let Some(id) = graph.param_of(param.id) {
            change(graph.param_mut(id));
        }
    }

    /// `x` in another element type; adds no node if it has that type already.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn cast(&self, x: &Symbol, dtype: DType) -> Result<Symbol> {
        if x.ty.dtype == dtype {
            return Ok(x.clone());
        }
        self.apply1(Op::Cast { dtype }, &[x])
    }

    /// The element type of parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Declares an input of the whole model.
    pub fn input(&self, name: &str, ty: TensorType) -> Symbol {
        let id = self.graph.borrow_mut().add_input(name, ty.clone());
        Symbol { id, ty }
    }

    /// Declares an output of the whole model.
    pub fn output(&self, name: &str, value: &Symbol) {
        self.graph.borrow_mut().add_output(name, value.id);
    }

    /// A parameter of this module.
    ///
    /// # Errors
    /// When it was declared before with another type or initialiser.
    pub fn param(
        &self,
        name: &str,
        shape: &[usize],
        init: Init,
        role: ParamRole,
    ) -> Result<Symbol> {
        let ty = TensorType::new(shape, self.dtype);
        let id = self.graph.borrow_mut().add_param(Param::new(
            self.qualified(name),
            ty.clone(),
            init,
            role,
        ))?;
        Ok(Symbol { id, ty })
    }

    /// Notes that a parameter is also known as `alias`, a path from the root (a tied weight).
    pub fn alias(&self, param: &Symbol, alias: &str) {
        let mut graph = self.graph.borrow_mut();
        if let Some(id) = graph.param_of(param.id) {
            graph.param_mut(id).aliases.push(alias.to_owned());
        }
    }

    /// Adds any operation.
    ///
    /// # Errors
    /// When the operands do not fit it.
    pub fn apply(&self, op: Op, inputs: &[&Symbol]) -> Result<Vec<Symbol>> {
        let mut graph = self.graph.borrow_mut();
        let ids = graph.add_node(
            &self.path,
            op,
            inputs.iter().map(|symbol| symbol.id).collect(),
        )?;
        Ok(ids
            .into_iter()
            .map(|id| Symbol {
                id,
                ty: graph.ty(id).clone(),
            })
            .collect())
    }

    fn apply1(&self, op: Op, inputs: &[&Symbol]) -> Result<Symbol> {
        Ok(self.apply(op, inputs)?.swap_remove(0))
    }

    fn qualified(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// Adds an operation that draws a dropout mask; the mask's key is the hash of the node's name.
    fn apply_random(
        &self,
        op: impl Fn(Option<DropoutSpec>) -> Op,
        p: f64,
        inputs: &[&Symbol],
    ) -> Result<Symbol> {
        let plain = op(None);
        if p <= 0.0 {
            return self.apply1(plain, inputs);
        }
        let mut graph = self.graph.borrow_mut();
        let name = graph.unique_name(&self.path, plain.name());
        let op = op(Some(DropoutSpec {
            p,
            key: fnv1a(name.bytes()),
            slice: None,
            nested: None,
        }));
        let ids = graph.add_named_node(
            name,
            &self.path,
            op,
            inputs.iter().map(|symbol| symbol.id).collect(),
        )?;
        Ok(Symbol {
            id: ids[0],
            ty: graph.ty(ids[0]).clone(),
        })
    }
}

/// Layers: the parameters of this module and the operation that uses them.
impl Module {
    /// `y = x W (+ b)` with parameters `weight` and `bias`; `x: [.., in]`, `y: [.., out]`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn linear(
        &self,
        x: &Symbol,
        out: usize,
        layout: WeightLayout,
        bias: bool,
        init: Init,
    ) -> Result<Symbol> {
        let mut shape = [0; 2];
        shape[layout.in_dim()] = x.ty.last_dim();
        shape[layout.out_dim()] = out;
        let weight = self.param("weight", &shape, init, ParamRole::Weight)?;
        if bias {
            let bias = self.param("bias", &[out], Init::Constant(0.0), ParamRole::Bias)?;
            self.apply1(Op::Linear { layout, bias: true }, &[x, &weight, &bias])
        } else {
            self.apply1(
                Op::Linear {
                    layout,
                    bias: false,
                },
                &[x, &weight],
            )
        }
    }

    /// Rows of the parameter `weight`, `[rows, width]`, and that parameter, so that another layer
    /// can tie to it.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn embedding(
        &self,
        ids: &Symbol,
        rows: usize,
        width: usize,
        init: Init,
    ) -> Result<(Symbol, Symbol)> {
        self.padded_embedding(ids, rows, width, None, init)
    }

    /// As [`Module::embedding`], but lookups do not train the row `padding`.
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn padded_embedding(
        &self,
        ids: &Symbol,
        rows: usize,
        width: usize,
        padding: Option<usize>,
        init: Init,
    ) -> Result<(Symbol, Symbol)> {
        let table = self.param("weight", &[rows, width], init, ParamRole::Embedding)?;
        let slice = None;
        let lookup = Op::Embedding { padding, slice };
        Ok((self.apply1(lookup, &[ids, &table])?, table))
    }

    /// Layer normalisation over the last dimension, with parameters `weight` and `bias`
    /// ([Ba et al.](https://arxiv.org/abs/1607.06450)).
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn layer_norm(&self, x: &Symbol, eps: f64) -> Result<Symbol> {
        let width = x.ty.last_dim();
        let weight = self.param("weight", &[width], Init::Constant(1.0), ParamRole::Norm)?;
        let bias = self.param("bias", &[width], Init::Constant(0.0), ParamRole::Norm)?;
        self.apply1(Op::LayerNorm { eps }, &[x, &weight, &bias])
    }

    /// Root-mean-square normalisation over the last dimension, with parameter `weight`
    /// ([Zhang and Sennrich](https://arxiv.org/abs/1910.07467)).
    ///
    /// # Errors
    /// As [`Module::apply`].
    pub fn rms_norm(&self, x: &Symbol, eps: f64) -> Result<Symbol> {
        let weight = self.param(
            "weight",
            &[x.ty.last_dim()],
            Init::Constant(1.0),
            ParamRole::Norm,
        )?;
        self.apply1(Op::RmsNorm { eps }, &[x, &weight])
    }
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
    use super::*;

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
