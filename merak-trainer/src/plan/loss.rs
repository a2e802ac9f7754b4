//! Models that learn by a loss of the caller's own.

use merak_trace::{
    Graph, Node, Op, Result, fx,
    fx::{Module, Symbol},
    models::{Model, ModelInfo, Objective, TraceOptions},
    op::Class,
};
use std::{fmt, sync::Arc};

/// Adds the nodes of a loss to a graph: from a module, the logits and the labels to the loss, an
/// `f64` (`[]`).
pub type LossFn = Arc<dyn Fn(&Module, &Symbol, &Symbol) -> Result<Symbol> + Send + Sync>;

/// What a microbatch's loss is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LossCount {
    /// The loss is a sum over labels: the sums of all microbatches and replicas are divided by the
    /// labels of the global batch that are not -100.
    #[default]
    Labels,
    /// The loss is a mean: those of microbatches with a sample count alike, whatever their labels.
    Microbatches,
}

/// A loss in place of the model's cross-entropy.
#[derive(Clone)]
pub struct CustomLoss {
    /// The function that adds the nodes of the loss.
    pub loss_fn: LossFn,
    /// The count that divides the loss.
    pub count: LossCount,
}

impl fmt::Debug for CustomLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomLoss")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

/// The scope of the loss's nodes, within that of the cross-entropy whose place it takes. Its first
/// node copies the logits.
pub(super) const SCOPE: &str = "custom_loss";

/// A model whose cross-entropy is replaced.
#[derive(Debug)]
pub(super) struct WithLoss {
    pub(super) model: Arc<dyn Model>,
    pub(super) loss: CustomLoss,
}

impl Model for WithLoss {
    fn info(&self) -> ModelInfo {
        self.model.info()
    }

    fn objective(&self) -> Objective {
        self.model.objective()
    }

    fn optional_inputs(&self) -> &'static [(&'static str, i64)] {
        self.model.optional_inputs()
    }

    fn scaling_length(&self, seq: usize) -> usize {
        self.model.scaling_length(seq)
    }

    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        let graph = self.model.trace(options)?;
        let Some(name) = graph.nodes().iter().find(|node| is_loss(node)) else {
            return Ok(graph);
        };
        let name = Arc::clone(&name.name);
        fx::extend(
            &graph,
            |_| (),
            |original| {
                if original.node.name != name {
                    return Ok(original.copy()?.outputs);
                }
                let module = original.module.sub(SCOPE);
                let logits = module.apply(Op::Identity, &[&original.inputs[0]])?;
                let loss = (self.loss.loss_fn)(&module, &logits[0], &original.inputs[1])?;
                Ok::<_, merak_trace::Error>(vec![loss])
            },
        )
    }
}

fn is_loss(node: &Node) -> bool {
    matches!(node.op.class(), Class::Loss(_))
}
