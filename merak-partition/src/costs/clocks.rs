//! How long nodes take while collectives pass: a clock for the core, and one for the wire.

use super::StepCosts;
use merak_trace::{NodeId, StageProgram, Step, ValueId};
use std::collections::BTreeMap;

/// The cost of a pass over some nodes of a program.
pub(super) fn run(program: &StageProgram, nodes: &[NodeId], costs: &dyn StepCosts) -> f64 {
    let mut clocks = Clocks::default();
    for step in program.steps(nodes) {
        match step {
            Step::Whole(node) => clocks.node(program, node, None, costs),
            Step::Half(node, half) => clocks.node(program, node, Some(half), costs),
            Step::Wait => clocks.core = clocks.core.max(clocks.wire),
        }
    }
    clocks.core.max(clocks.wire)
}

/// When the core and the wire are free.
#[derive(Default)]
struct Clocks {
    core: f64,
    wire: f64,
    /// When the result of a collective is there, of each half.
    there: BTreeMap<ValueId, [f64; 2]>,
}

impl Clocks {
    /// Runs a node on the whole or on one half.
    fn node(
        &mut self,
        program: &StageProgram,
        id: NodeId,
        half: Option<usize>,
        costs: &dyn StepCosts,
    ) {
        let node = program.graph.node(id);
        let cost = costs.node(&program.graph, node) * if half.is_some() { 0.5 } else { 1.0 };
        let awaited = node.inputs.iter().filter_map(|input| self.there.get(input));
        let awaited = awaited.map(|there| half.map_or(there[0].max(there[1]), |half| there[half]));
        self.core = awaited.fold(self.core, f64::max);
        if node.op.region().is_none() || node.op.communicates().is_none() {
            self.core += cost;
            return;
        }
        self.wire = self.wire.max(self.core) + cost;
        let there = self.there.entry(node.outputs[0]).or_default();
        match half {
            Some(half) => there[half] = self.wire,
            None => *there = [self.wire; 2],
        }
    }
}
