//! Copies a graph and adds nodes to those of the model.

use super::{Module, Symbol};
use crate::{DType, Graph, Node, Param, Result, Source, ValueId};
use std::{cell::RefCell, collections::BTreeMap, rc::Rc, sync::Arc};

/// A node of the graph that is copied, before it has a counterpart.
#[derive(Debug)]
pub struct Original<'a> {
    /// The node in the graph that is copied.
    pub node: &'a Node,
    /// The module that called the operation; it can add nodes.
    pub module: Module,
    /// Operands of the copy.
    pub inputs: Vec<Symbol>,
}

impl<'a> Original<'a> {
    /// Adds the counterpart, under the node's name. A node that is not copied is left out.
    ///
    /// # Errors
    /// As [`Graph::add_node`].
    pub fn copy(self) -> Result<Copied<'a>> {
        let ids = self.inputs.iter().map(|symbol| symbol.id).collect();
        let op = self.node.op.clone();
        let mut new = self.module.graph.borrow_mut();
        let outputs = new.add_counterpart(self.node, op, ids)?;
        let outputs = outputs.into_iter().map(|id| Symbol::of(&new, id)).collect();
        drop(new);
        Ok(Copied {
            node: self.node,
            module: self.module,
            inputs: self.inputs,
            outputs,
        })
    }
}

/// A node of the graph that is copied, and its counterpart.
#[derive(Debug)]
pub struct Copied<'a> {
    /// The node in the graph that is copied.
    pub node: &'a Node,
    /// The module that called the operation; it can add nodes.
    pub module: Module,
    /// Operands of the copy.
    pub inputs: Vec<Symbol>,
    /// Results of the copy.
    pub outputs: Vec<Symbol>,
}

/// Copies a graph node by node; `visit` sees each node, copies it or leaves it out, may add nodes
/// after it, and returns the values that take the place of its results. `declare` may change the
/// model's parameters.
///
/// Nodes, inputs and parameters keep their names and their order, so a graph that is traced for
/// another batch and extended alike has the same new nodes at the same places.
///
/// ```
/// use merak_trace::{DType, Error, Init, Op, TensorType, fx, op::WeightLayout};
///
/// let plain = fx::trace(DType::F32, |module| {
///     let x = module.input("x", TensorType::new([4, 8], DType::F32));
///     let y = module.sub("up").linear(&x, 16, WeightLayout::OutIn, false, Init::Normal(0.02))?;
///     module.output("y", &y);
///     Ok(())
/// })?;
/// let doubled = fx::extend(
///     &plain,
///     |_| (),
///     |original| {
///         let copied = original.copy()?;
///         match copied.node.op {
///             Op::Linear { .. } => Ok(vec![copied.module.scale(&copied.outputs[0], 2.0)?]),
///             _ => Ok::<_, Error>(copied.outputs),
///         }
///     },
/// )?;
/// assert_eq!(doubled.nodes().len(), 2);
/// assert_eq!(doubled.output("y"), doubled.nodes()[1].outputs.first().copied());
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// Those of `visit`.
pub fn extend<E: From<crate::Error>>(
    graph: &Graph,
    declare: impl Fn(&mut Param),
    mut visit: impl FnMut(Original<'_>) -> Result<Vec<Symbol>, E>,
) -> Result<Graph, E> {
    let mut copy = Copy {
        graph,
        new: Rc::new(RefCell::new(Graph::new().with_overlap(graph.overlap()))),
        values: BTreeMap::new(),
        declare,
    };
    copy.inputs();
    for node in graph.nodes() {
        let results = visit(copy.original(node)?)?;
        copy.values
            .extend(node.outputs.iter().copied().zip(results));
    }
    for port in graph.outputs() {
        let value = copy.operand(port.value)?.id;
        copy.new.borrow_mut().add_output(port.name.clone(), value);
    }
    Ok(copy.new.take())
}

struct Copy<'a, D> {
    graph: &'a Graph,
    new: Rc<RefCell<Graph>>,
    /// The counterpart of each value so far.
    values: BTreeMap<ValueId, Symbol>,
    declare: D,
}

impl<'a, D: Fn(&mut Param)> Copy<'a, D> {
    fn inputs(&mut self) {
        let mut new = self.new.borrow_mut();
        for port in self.graph.inputs() {
            let ty = self.graph.ty(port.value).clone();
            let id = new.add_input(port.name.clone(), ty.clone());
            self.values.insert(port.value, Symbol { id, ty });
        }
        // Added nodes must not take the names of nodes that are copied later.
        new.reserve_names(self.graph.nodes().iter().map(|node| &node.name));
    }

    fn original(&mut self, node: &'a Node) -> Result<Original<'a>> {
        let inputs = node.inputs.iter().map(|&input| self.operand(input));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let mut floats = inputs.iter().map(|input| input.ty.dtype);
        let module = Module {
            graph: Rc::clone(&self.new),
            path: Arc::clone(&node.scope),
            dtype: floats.find(|ty| ty.is_float()).unwrap_or(DType::F32),
            hidden: Rc::default(),
        };
        Ok(Original {
            node,
            module,
            inputs,
        })
    }

    /// The counterpart of a value; a parameter gets one at its first use.
    fn operand(&mut self, value: ValueId) -> Result<Symbol> {
        if let Some(symbol) = self.values.get(&value) {
            return Ok(symbol.clone());
        }
        let Source::Param(id) = self.graph.value(value).source else {
            return Err(crate::Error::Order {
                value: value.to_string(),
            });
        };
        let mut param = self.graph.param(id).clone();
        (self.declare)(&mut param);
        let ty = param.local.clone();
        let id = self.new.borrow_mut().add_param(param)?;
        let symbol = Symbol { id, ty };
        self.values.insert(value, symbol.clone());
        Ok(symbol)
    }
}
