//! What crosses each border between two nodes, and which borders may be cut.

use merak_trace::{
    Axis, Graph, Node, Source, ValueId,
    op::{Class, Collective},
};
use std::collections::BTreeMap;

/// A value with more users than this is not counted: stages hand it along.
const MAX_COUNTED_USERS: usize = 5;

/// The borders of a graph: border `b` lies before node `b`, so the inner ones are `1..num_nodes`.
#[derive(Debug)]
pub(crate) struct Borders {
    /// For each node, elements of the parameters that it is the first to read.
    pub(crate) params: Vec<usize>,
    /// For each node, whether it reads a parameter.
    pub(crate) reads_params: Vec<bool>,
    /// For each border, how many counted values cross it.
    pub(crate) counted: Vec<usize>,
    /// For each border, the bytes of these values.
    pub(crate) bytes: Vec<usize>,
    /// For each border, whether it may be cut: only complete values cross it, and it lies in no
    /// module or adapter that stays whole.
    pub(crate) legal: Vec<bool>,
    /// For each border, whether it directly follows an embedding lookup.
    pub(crate) after_lookup: Vec<bool>,
}

impl Borders {
    /// Looks at every node and value once.
    pub(crate) fn of(graph: &Graph) -> Self {
        let uses = Uses::of(graph);
        let from_inputs = functions_of_inputs(graph);
        let open = open_values(graph);
        let num_nodes = graph.nodes().len();
        let mut counted = Steps::new(num_nodes);
        let mut bytes = Steps::new(num_nodes);
        let mut unfinished = Steps::new(num_nodes);
        for (index, node) in graph.nodes().iter().enumerate() {
            for value in &node.outputs {
                let Some(last) = uses.last[value.index()] else {
                    continue;
                };
                if open[value.index()] {
                    unfinished.add(index + 1, last, 1);
                }
                if !from_inputs[value.index()] && uses.count[value.index()] <= MAX_COUNTED_USERS {
                    counted.add(index + 1, last, 1);
                    bytes.add(index + 1, last, graph.ty(*value).size_bytes());
                }
            }
        }
        for [first, last] in adapters(graph) {
            unfinished.add(first + 1, last, 1);
        }
        let (params, reads_params) = params_of_nodes(graph);
        Self {
            params,
            reads_params,
            counted: counted.sums(),
            bytes: bytes.sums(),
            legal: unfinished
                .sums()
                .into_iter()
                .map(|open| open == 0)
                .collect(),
            after_lookup: borders_after_lookups(graph, &from_inputs),
        }
    }

    /// The number of nodes.
    pub(crate) fn num_nodes(&self) -> usize {
        self.params.len()
    }

    /// Whether a dependency method may cut here: complete values cross, and no lookup was just
    /// made.
    pub(crate) fn allows(&self, border: usize) -> bool {
        self.legal[border] && !self.after_lookup[border]
    }
}

/// How many nodes use each value, and the last of them.
struct Uses {
    /// Distinct nodes that use each value.
    count: Vec<usize>,
    /// The last of them.
    last: Vec<Option<usize>>,
}

impl Uses {
    fn of(graph: &Graph) -> Self {
        let mut uses = Self {
            count: vec![0; graph.num_values()],
            last: vec![None; graph.num_values()],
        };
        for (index, node) in graph.nodes().iter().enumerate() {
            for input in node.inputs.iter().map(|input| input.index()) {
                if uses.last[input] != Some(index) {
                    uses.count[input] += 1;
                    uses.last[input] = Some(index);
                }
            }
        }
        uses
    }
}

/// Numbers per border, as sums over ranges of borders.
struct Steps {
    rises: Vec<usize>,
    falls: Vec<usize>,
}

impl Steps {
    fn new(num_nodes: usize) -> Self {
        Self {
            rises: vec![0; num_nodes + 2],
            falls: vec![0; num_nodes + 2],
        }
    }

    /// Adds `amount` to the borders `first..=last`.
    fn add(&mut self, first: usize, last: usize, amount: usize) {
        self.rises[first] += amount;
        self.falls[last + 1] += amount;
    }

    fn sums(self) -> Vec<usize> {
        let mut sum = 0;
        let steps = self.rises.into_iter().zip(self.falls);
        let mut sums: Vec<_> = steps
            .map(|(rise, fall)| {
                sum = sum + rise - fall;
                sum
            })
            .collect();
        sums.pop();
        sums
    }
}

/// For each value, whether it is computed without parameters (masks, position tables).
fn functions_of_inputs(graph: &Graph) -> Vec<bool> {
    let mut free = vec![false; graph.num_values()];
    for port in graph.inputs() {
        free[port.value.index()] = true;
    }
    for node in graph.nodes() {
        let all = node.inputs.iter().all(|input| free[input.index()]);
        for output in &node.outputs {
            free[output.index()] = all;
        }
    }
    free
}

/// For each value, whether it is a summand that a sum over ranks completes, or its gradient is one.
fn open_values(graph: &Graph) -> Vec<bool> {
    let mut partial = vec![false; graph.num_values()];
    for node in graph.nodes() {
        let region = node.op.region().map(|region| region.kind);
        if region.is_some_and(|kind| kind.forward().is_some_and(Collective::reduces)) {
            partial[node.inputs[0].index()] = true;
        }
        let starts = makes_partial_sum(graph, node);
        let passes = node.op.communicates().is_none()
            && node.inputs.iter().any(|input| partial[input.index()]);
        for output in &node.outputs {
            partial[output.index()] |= starts || passes;
        }
    }
    // The gradient at the begin of a split region is a summand until it has left the region.
    for node in graph.nodes() {
        let region = node.op.region().map(|region| region.kind);
        if region.is_some_and(|kind| kind.backward().is_some_and(Collective::reduces)) {
            partial[node.outputs[0].index()] = true;
        }
    }
    partial
}

/// The first and the last node of each layer that read one parameter of an adapter. Beside a
/// magnitude, factors are read once more for a norm that no gradient flows into: a stage with that
/// use alone would hold a trained parameter without a gradient.
fn adapters(graph: &Graph) -> impl Iterator<Item = [usize; 2]> {
    let mut ends: BTreeMap<_, [usize; 2]> = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        let params = node
            .inputs
            .iter()
            .filter_map(|&input| graph.param_of(input));
        for param in params.filter(|&param| graph.param(param).beside.is_some()) {
            let ends = ends.entry((param, node.layer())).or_insert([index, index]);
            ends[1] = index;
        }
    }
    ends.into_values()
}

/// Whether a node multiplies with, or looks up in, a table whose summed dimension is split over
/// ranks.
fn makes_partial_sum(graph: &Graph, node: &Node) -> bool {
    let Some(summed) = node.op.summed_dim() else {
        return false;
    };
    let table = graph.param_of(node.inputs[1]).map(|id| graph.param(id));
    let cut = table.and_then(|table| table.placements.on(Axis::Tensor).as_shard());
    cut.is_some_and(|shard| shard.dim == summed)
}

fn params_of_nodes(graph: &Graph) -> (Vec<usize>, Vec<bool>) {
    let mut seen = vec![false; graph.params().len()];
    let mut elements = vec![0; graph.nodes().len()];
    let mut reads = vec![false; graph.nodes().len()];
    for (index, node) in graph.nodes().iter().enumerate() {
        for id in node
            .inputs
            .iter()
            .filter_map(|&input| graph.param_of(input))
        {
            reads[index] = true;
            if !std::mem::replace(&mut seen[id.index()], true) {
                elements[index] += graph.param(id).full.numel();
            }
        }
    }
    (elements, reads)
}

/// A border follows a lookup when only its collectives and functions of inputs lie between them.
fn borders_after_lookups(graph: &Graph, from_inputs: &[bool]) -> Vec<bool> {
    let mut after = vec![false; graph.nodes().len() + 1];
    for (index, node) in graph.nodes().iter().enumerate() {
        let only_inputs = node
            .outputs
            .iter()
            .all(|output| from_inputs[output.index()]);
        let passes = only_inputs || node.op.communicates().is_some();
        after[index + 1] = node.op.class() == Class::Lookup || (passes && after[index]);
    }
    after
}

/// For each border, the values made before it and used after it.
pub(crate) fn crossing(graph: &Graph, borders: &[usize]) -> Vec<Vec<ValueId>> {
    let uses = Uses::of(graph);
    let mut crossing = vec![Vec::new(); borders.len()];
    for value in (0..graph.num_values())
        .map(|index| ValueId(u32::try_from(index).expect("ids have 32 bits")))
    {
        let (Source::Node { node, .. }, Some(last)) =
            (graph.value(value).source, uses.last[value.index()])
        else {
            continue;
        };
        let first = borders.partition_point(|&border| border <= node.index());
        let end = borders.partition_point(|&border| border <= last);
        for values in &mut crossing[first..end] {
            values.push(value);
        }
    }
    crossing
}
