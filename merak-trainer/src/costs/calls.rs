//! The calls of a backend that a node is, and what decides how long they take.

use merak_trace::{
    Coord, Graph, Node, Op, TensorType, ValueId,
    op::{Attention, Direction, Keys, Ring},
};

/// What decides the time of a node: its operation and the types of its operands and results.
pub(super) fn signature<'a>(
    op: &Op,
    operands: impl Iterator<Item = &'a TensorType>,
    results: impl Iterator<Item = &'a TensorType>,
) -> String {
    let types = |types: &mut dyn Iterator<Item = &'a TensorType>| {
        let texts: Vec<_> = types.map(ToString::to_string).collect();
        texts.join(" ")
    };
    let operands = types(&mut { operands });
    format!(
        "{:?}: {operands} -> {}",
        without_key(op),
        types(&mut { results })
    )
}

/// The signature of a node of a graph.
pub(super) fn of_node(graph: &Graph, node: &Node) -> String {
    let ty = |value: &ValueId| graph.ty(*value);
    signature(
        &node.op,
        node.inputs.iter().map(ty),
        node.outputs.iter().map(ty),
    )
}

/// The calls of a backend that a node is, by their signatures, and how many of each: one for most
/// nodes; in a ring, those of the rounds in which queries meet keys, in the mean of the ranks.
pub(super) fn calls(graph: &Graph, node: &Node) -> Vec<(String, f64)> {
    let Some(ring) = node.op.ring() else {
        let own = node.op.has_kernel().then(|| (of_node(graph, node), 1.0));
        return own.into_iter().collect();
    };
    let (operands, results) = (types(graph, &node.inputs), types(graph, &node.outputs));
    let (slice, ranks) = (ring.slice, ranks_of(graph, node, &ring));
    let local = slice.full / ranks;
    let meets = |rank: usize, owner: usize| {
        let keys = Keys::OfRank(owner);
        let place = Coord::default().with(slice.axis, rank);
        Attention {
            keys,
            ..ring.spec.clone()
        }
        .meets(place, local)
    };
    let pairs = (0..ranks).flat_map(|rank| (0..ranks).map(move |owner| (rank, owner)));
    let met = pairs.filter(|&(rank, owner)| meets(rank, owner)).count();
    let met = met as f64 / ranks as f64;
    let of_one = Attention {
        keys: Keys::OfRank(0),
        ..ring.spec.clone()
    };
    let call = |op: &Op, operands: &[&TensorType], results: &[&TensorType]| {
        signature(op, operands.iter().copied(), results.iter().copied())
    };
    let sum = |ty| call(&Op::Add, &[ty, ty], &[ty]);
    let mut calls = match ring.direction {
        Direction::Forward => {
            let joined = [results[0], results[1], results[0], results[1]];
            vec![
                (call(&Op::Attention(of_one), &operands, &results), met),
                (call(&Op::JoinAttention, &joined, &results), met - 1.0),
            ]
        }
        Direction::Gradient => vec![
            (call(&Op::AttentionGrad(of_one), &operands, &results), met),
            (sum(results[0]), met - 1.0),
            (sum(results[1]), 2.0 * (met - 1.0)),
        ],
    };
    calls.retain(|(_, count)| *count > 0.0);
    calls
}

/// The ranks of a ring, at least one.
pub(super) fn ranks_of(graph: &Graph, node: &Node, ring: &Ring<'_>) -> usize {
    let keys = graph.ty(node.inputs[ring.keys.start]);
    (ring.slice.full / keys.shape[ring.slice.dim].max(1)).max(1)
}

fn types<'a>(graph: &'a Graph, values: &[ValueId]) -> Vec<&'a TensorType> {
    values.iter().map(|&value| graph.ty(value)).collect()
}

/// The operation without the fields that tell nodes of one kind apart.
fn without_key(op: &Op) -> Op {
    let mut op = op.clone();
    if let Some(dropout) = op.dropout_mut() {
        dropout.key = 0;
    }
    if let Op::Attention(spec) | Op::AttentionGrad(spec) = &mut op
        && let Keys::OfRank(rank) = &mut spec.keys
    {
        *rank = 0;
    }
    op
}
