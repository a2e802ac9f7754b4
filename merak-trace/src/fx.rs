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

mod extend;
mod functions;
mod layers;

use crate::{Graph, Init, Op, Param, ParamRole, Result, TensorType, ValueId, op::DropoutSpec};
use merak_mpu::{DType, hash::fnv1a};
use std::{
    cell::{OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
};

pub use extend::{Copied, Original, extend};
pub use functions::AttentionTerms;

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

    fn of(graph: &Graph, id: ValueId) -> Self {
        let ty = graph.ty(id).clone();
        Self { id, ty }
    }
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
        let ids = graph.add_node(&self.path, op, ids_of(inputs))?;
        Ok(ids.into_iter().map(|id| Symbol::of(&graph, id)).collect())
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
        let results = graph.add_named_node(name, &self.path, op, ids_of(inputs))?;
        Ok(Symbol::of(&graph, results[0]))
    }
}

fn ids_of(symbols: &[&Symbol]) -> Vec<ValueId> {
    symbols.iter().map(|symbol| symbol.id).collect()
}
