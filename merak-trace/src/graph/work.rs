//! What the nodes of a graph cost, and what they exchange between ranks.

use super::{Graph, Node, ValueId};
use crate::{
    TensorType,
    op::{Cost, Exchange},
};

impl Cost {
    /// The cost of one node; counts saturate at 64 bits.
    ///
    /// ```
    /// use merak_trace::{models::{self, TraceOptions}, op::Cost};
    ///
    /// let config = serde_json::json!({ "model_type": "gpt2", "n_layer": 1 });
    /// let model = models::from_config(&config)?;
    /// let graph = model.trace(&TraceOptions::training(2, 64))?;
    /// let head = graph.nodes().iter().find(|node| &*node.scope == "lm_head").ok_or("a head")?;
    /// assert_eq!(Cost::of(&graph, head).flops, 2 * (2 * 64) * 768 * 50_257);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(graph: &Graph, node: &Node) -> Self {
        let [operands, results] = graph.types(node);
        Self::of_op(&node.op, &operands, &results)
    }
}

impl Exchange {
    /// The exchange of a node that is a border between whole and sharded work, or whose keys and
    /// values go round.
    pub fn of(graph: &Graph, node: &Node) -> Option<Self> {
        let [operands, results] = graph.types(node);
        Self::of_op(&node.op, &operands, &results)
    }
}

impl Graph {
    /// The types of the operands and of the results of a node.
    fn types(&self, node: &Node) -> [Vec<&TensorType>; 2] {
        let types = |values: &[ValueId]| values.iter().map(|&value| self.ty(value)).collect();
        [types(&node.inputs), types(&node.outputs)]
    }
}
