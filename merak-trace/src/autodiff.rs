//! Reverse-mode differentiation of a graph, once, when a program is planned.
//!
//! Gradient nodes are appended to the graph itself. The backward is cut in two: **input
//! gradients**, which earlier stages wait for, and **weight gradients**, the leaves that no stage
//! waits for ([Qi et al. 2023](https://arxiv.org/abs/2401.10241), section 2). Contributions to one
//! value are added in reverse graph order, so a graph that is cut into stages adds in the order of
//! the uncut one.

mod rules;

use crate::{Graph, NodeId, Op, ParamId, Result, Source, TensorType, ValueId};
use std::sync::Arc;

/// Which part of a training step a node belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// `F`: computes activations.
    Forward,
    /// `R`: recomputes activations that were not kept.
    Recompute,
    /// `I`: computes the gradients that lead to the stage's inputs.
    BackwardInput,
    /// `W`: computes the gradients of parameters.
    BackwardWeight,
}

/// The gradient of one use of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParamGrad {
    /// The parameter.
    pub(crate) param: ParamId,
    /// The node whose operand it was.
    pub(crate) used_by: NodeId,
    /// The value that holds the gradient.
    pub(crate) value: ValueId,
}

/// The result of [`differentiate`].
#[derive(Debug, Clone)]
pub(crate) struct Gradients {
    /// The phase of every node of the graph, the gradient nodes at the end.
    pub(crate) phases: Vec<Phase>,
    /// The gradient of each wanted value, in their order.
    pub(crate) wanted: Vec<ValueId>,
    /// The gradient of each use of a parameter, in graph order of the uses.
    pub(crate) params: Vec<ParamGrad>,
}

/// For each value of a graph, whether a gradient flows through it: it depends on a parameter that
/// is trained or on one of the `wanted` values.
pub fn needs_grad(graph: &Graph, wanted: &[ValueId]) -> Vec<bool> {
    let mut needs = vec![false; graph.num_values()];
    for id in wanted {
        needs[id.index()] = true;
    }
    for value in (0..graph.num_values()).map(ValueId::at) {
        if let Source::Param(id) = graph.value(value).source {
            needs[value.index()] = graph.param(id).trainable && graph.ty(value).dtype.is_float();
        }
    }
    for node in graph.nodes() {
        let any = !node.op.stops_gradient() && node.inputs.iter().any(|input| needs[input.index()]);
        for output in &node.outputs {
            needs[output.index()] = any && graph.ty(*output).dtype.is_float();
        }
    }
    needs
}

/// Appends the backward of `graph` to it.
///
/// `seeds` pairs values with their given gradients; `wanted` are the values whose gradients are
/// asked for (zeros where nothing depends on them).
///
/// # Errors
/// [`Error::NoGradient`](crate::Error::NoGradient) when an operation on the way has none.
pub(crate) fn differentiate(
    graph: &mut Graph,
    seeds: &[(ValueId, ValueId)],
    wanted: &[ValueId],
) -> Result<Gradients> {
    let needs = needs_grad(graph, wanted);
    let num_forward = graph.nodes().len();
    let mut tape = Tape {
        graph,
        needs,
        grads: Vec::new(),
        phases: vec![Phase::Forward; num_forward],
        params: Vec::new(),
    };
    tape.grads.resize(tape.graph.num_values(), None);
    for &(value, grad) in seeds {
        tape.grads[value.index()] = Some(grad);
    }
    for index in (0..num_forward).rev() {
        tape.visit(NodeId::at(index))?;
    }
    let wanted = wanted
        .iter()
        .map(|&value| tape.grad_or_zeros(value))
        .collect::<Result<_>>()?;
    tape.params.reverse();
    Ok(Gradients {
        phases: tape.phases,
        wanted,
        params: tape.params,
    })
}

/// The state of a differentiation.
struct Tape<'a> {
    graph: &'a mut Graph,
    needs: Vec<bool>,
    /// The gradient of each forward value so far.
    grads: Vec<Option<ValueId>>,
    phases: Vec<Phase>,
    /// In reverse order of the uses.
    params: Vec<ParamGrad>,
}

/// Gradient contributions to the operands of one node.
type Contributions = Vec<(usize, ValueId)>;

impl Tape<'_> {
    /// Adds the gradient of one forward node.
    fn visit(&mut self, id: NodeId) -> Result<()> {
        let node = self.graph.node(id).clone();
        let douts: Vec<_> = node
            .outputs
            .iter()
            .map(|value| self.grads[value.index()])
            .collect();
        let wanted = node.inputs.iter().any(|input| self.needs[input.index()]);
        if !wanted || douts.iter().all(Option::is_none) {
            return Ok(());
        }
        let first_new = self.graph.nodes().len();
        let contributions = rules::gradient(self, &node, &douts)?;
        self.mark_weight_gradients(&node.inputs, &contributions, first_new);
        // Parameters in reverse operand order, since the whole list is reversed at the end.
        for &(operand, value) in contributions.iter().rev() {
            let input = node.inputs[operand];
            if let Some(param) = self.graph.param_of(input) {
                let value = self.leaf(value, &node.scope, first_new)?;
                self.params.push(ParamGrad {
                    param,
                    used_by: id,
                    value,
                });
            }
        }
        for (operand, value) in contributions {
            let input = node.inputs[operand];
            if self.graph.param_of(input).is_none() {
                self.contribute(input, value, &node.scope)?;
            }
        }
        Ok(())
    }

    /// Puts a gradient node in the weight half if all its results are gradients of parameters.
    fn mark_weight_gradients(
        &mut self,
        inputs: &[ValueId],
        contributions: &Contributions,
        first_new: usize,
    ) {
        for index in first_new..self.graph.nodes().len() {
            let outputs = &self.graph.nodes()[index].outputs;
            let mut uses = contributions
                .iter()
                .filter(|(_, value)| outputs.contains(value))
                .peekable();
            let is_param =
                |&(operand, _): &(usize, ValueId)| self.graph.param_of(inputs[operand]).is_some();
            // A node with an unwanted result, such as that of a frozen parameter, stays in the
            // input half.
            let is_wanted =
                |value: &ValueId| contributions.iter().any(|(_, wanted)| wanted == value);
            if uses.peek().is_some() && uses.all(is_param) && outputs.iter().all(is_wanted) {
                self.phases[index] = Phase::BackwardWeight;
            }
        }
    }

    /// A value that is the gradient of one parameter only: `value`, or a copy in the weight half.
    fn leaf(&mut self, value: ValueId, scope: &Arc<str>, first_new: usize) -> Result<ValueId> {
        let is_leaf = self.graph.producer(value).is_some_and(|node| {
            node.index() >= first_new
                && self.phases[node.index()] == Phase::BackwardWeight
                && !self
                    .params
                    .iter()
                    .rev()
                    .take(8)
                    .any(|grad| grad.value == value)
        });
        if is_leaf {
            return Ok(value);
        }
        let copy = self.emit(scope, Op::Identity, vec![value])?[0];
        *self.phases.last_mut().expect("a node was just added") = Phase::BackwardWeight;
        Ok(copy)
    }

    /// Adds `value` to the gradient of `of`.
    fn contribute(&mut self, of: ValueId, value: ValueId, scope: &Arc<str>) -> Result<()> {
        let sum = match self.grads[of.index()] {
            None => value,
            Some(known) => self.emit(scope, Op::Add, vec![known, value])?[0],
        };
        self.grads[of.index()] = Some(sum);
        Ok(())
    }

    fn grad_or_zeros(&mut self, value: ValueId) -> Result<ValueId> {
        if let Some(grad) = self.grads[value.index()] {
            return Ok(grad);
        }
        let ty = self.graph.ty(value).clone();
        self.zeros(&"".into(), ty)
    }

    fn zeros(&mut self, scope: &Arc<str>, ty: TensorType) -> Result<ValueId> {
        let (shape, dtype) = (ty.shape, ty.dtype);
        Ok(self.emit(scope, Op::Zeros { shape, dtype }, vec![])?[0])
    }

    /// Appends a node of the input half.
    fn emit(&mut self, scope: &Arc<str>, op: Op, inputs: Vec<ValueId>) -> Result<Vec<ValueId>> {
        let outputs = self.graph.add_node(scope, op, inputs)?;
        self.phases.push(Phase::BackwardInput);
        Ok(outputs)
    }
}
