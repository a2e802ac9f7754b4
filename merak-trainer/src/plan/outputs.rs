//! What a forward gives beside its loss.

use super::loss::SCOPE;
use crate::error::{Error, PlanError, Result};
use merak_trace::{Graph, Node, Op, ValueId, op::Class};
use std::sync::Arc;

/// What a forward without gradients ends in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ForwardOutput {
    /// The loss.
    Loss,
    /// The logits, in a generation, whose sequences have no padding; no labels are read.
    Logits,
    /// The loss, then the logits that it is made of.
    LossAndLogits,
    /// The loss, then the hidden states that the head makes logits of.
    LossAndHidden,
}

impl ForwardOutput {
    /// Whether there is a loss, which reads labels.
    pub(crate) fn has_loss(self) -> bool {
        self != Self::Logits
    }

    /// Marks the logits of a model that is not rewritten yet, so that they are gathered where the
    /// vocabulary is split. A node is added after the others alone, so that cuts of the graph stay
    /// where they are.
    ///
    /// # Errors
    /// [`PlanError::NoLogits`] where the loss is not made of logits.
    pub(super) fn add_logits_to(self, model: &mut Graph) -> Result<()> {
        if self != Self::LossAndLogits {
            return Ok(());
        }
        let logits = logits(model)?;
        copy_out(model, "logits", logits)
    }

    /// Marks the hidden states of a rewritten graph, of which the head has all. A node is added
    /// after the others alone.
    ///
    /// # Errors
    /// [`PlanError::NoLogits`] where the loss is not made of logits, or these not by a linear
    /// layer.
    pub(super) fn add_hidden_to(self, graph: &mut Graph) -> Result<()> {
        if self != Self::LossAndHidden {
            return Ok(());
        }
        let hidden = hidden(graph)?;
        copy_out(graph, "hidden", hidden)
    }
}

/// Adds a copy of a value as an output: the value itself may be made on an earlier stage.
fn copy_out(graph: &mut Graph, name: &str, value: ValueId) -> Result<()> {
    let copies = graph.add_node(&Arc::from(name), Op::Identity, vec![value])?;
    graph.add_output(name, copies[0]);
    Ok(())
}

/// The logits of the cross-entropy, or those that a custom loss begins with.
fn logits(graph: &Graph) -> Result<ValueId> {
    let is_custom = |scope: &str| scope.rsplit('.').next() == Some(SCOPE);
    let makes_loss = |node: &&Node| match node.op.class() {
        Class::Loss(_) => true,
        class => class == Class::Identity && is_custom(&node.scope),
    };
    let loss = graph.nodes().iter().find(makes_loss);
    loss.map(|node| node.inputs[0]).ok_or_else(no_logits)
}

/// The inputs of the last linear layer before the logits.
fn hidden(graph: &Graph) -> Result<ValueId> {
    let mut value = logits(graph)?;
    while let Some(node) = maker(graph, value) {
        let Some(&first) = node.inputs.first() else {
            break;
        };
        if let Class::Linear(_) = node.op.class() {
            return Ok(first);
        }
        value = first;
    }
    Err(no_logits())
}

fn maker(graph: &Graph, value: ValueId) -> Option<&Node> {
    graph.producer(value).map(|id| graph.node(id))
}

fn no_logits() -> Error {
    Error::Plan(PlanError::NoLogits)
}
