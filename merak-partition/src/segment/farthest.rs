//! `farthest_min_deps`: cut where one counted value crosses, at the border that is nearest to the
//! budget of parameters.

use super::SplitRule;
use crate::borders::Borders;
use merak_trace::{
    Graph, Node, NodeId, ValueId,
    op::{Class, Collective},
};
use std::collections::BTreeSet;

/// A border that may be cut, and the weight of all nodes before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Candidate {
    border: usize,
    weight: usize,
}

/// The bounds of the segments and the rule that made them.
pub(super) fn cut(graph: &Graph, borders: &Borders, target: usize) -> (Vec<usize>, SplitRule) {
    let (weights, budget) = weights(graph, borders, target);
    let (candidates, total) = candidates(borders, &weights);
    let mut cuts = choose(&candidates, budget);
    let rest_is_empty = cuts.last().is_some_and(|last| last.weight == total);
    if rest_is_empty {
        cuts.pop();
    }
    let mut bounds = vec![0];
    bounds.extend(cuts.iter().map(|cut| cut.border));
    bounds.push(borders.num_nodes());
    (
        bounds,
        SplitRule::FarthestMinDeps {
            target,
            budget,
            candidates: candidates.len(),
        },
    )
}

/// The weight of each node, and the budget of a segment. Lookups and the output head exceed any
/// budget.
fn weights(graph: &Graph, borders: &Borders, target: usize) -> (Vec<usize>, usize) {
    let heads = output_heads(graph);
    let stands_apart: Vec<_> = graph
        .node_ids()
        .map(|id| graph.node(id).op.class() == Class::Lookup || heads.contains(&id))
        .collect();
    let mut apart = BTreeSet::new();
    for (node, _) in graph
        .nodes()
        .iter()
        .zip(&stands_apart)
        .filter(|(_, apart)| **apart)
    {
        apart.extend(
            node.inputs
                .iter()
                .filter_map(|&input| graph.param_of(input)),
        );
    }
    let elements_apart: usize = apart.iter().map(|&id| graph.param(id).full.numel()).sum();
    let total: usize = borders.params.iter().sum();
    let budget = (total - elements_apart) / target;
    let weights = stands_apart
        .iter()
        .zip(&borders.params)
        .map(|(&apart, &params)| if apart { budget + 1 } else { params });
    (weights.collect(), budget)
}

/// The borders that one counted value crosses; of those with nothing but parameter-free nodes
/// between them, the last.
fn candidates(borders: &Borders, weights: &[usize]) -> (Vec<Candidate>, usize) {
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut weight = 0;
    for border in 1..borders.num_nodes() {
        weight += weights[border - 1];
        if borders.counted[border] == 1 && borders.allows(border) {
            candidates.pop_if(|last| last.weight == weight);
            candidates.push(Candidate { border, weight });
        }
    }
    (candidates, weight + weights[weights.len() - 1])
}

/// Walks the candidates. At the first one beyond the budget, cuts there or at the one before,
/// whichever is nearer to the budget.
fn choose(candidates: &[Candidate], budget: usize) -> Vec<Candidate> {
    let mut cuts = Vec::new();
    let mut start = 0;
    let mut earlier: Option<Candidate> = None;
    for &here in candidates {
        if here.weight - start > budget {
            let excess = here.weight - start - budget;
            let nearer =
                earlier.filter(|c| c.weight > start && budget - (c.weight - start) <= excess);
            earlier = None;
            if let Some(cut) = nearer {
                cuts.push(cut);
                start = cut.weight;
            }
            if here.weight - start > budget {
                cuts.push(here);
                start = here.weight;
                continue;
            }
        }
        earlier = Some(here);
    }
    cuts
}

/// The names of the weights of the linear layers that produce the graph's outputs, directly or as
/// the logits of a loss.
///
/// ```
/// use merak_partition::head_params;
/// use merak_trace::models::{self, TraceOptions};
///
/// let config = serde_json::json!({ "model_type": "gpt2", "vocab_size": 101, "n_positions": 32,
///     "n_embd": 16, "n_layer": 1, "n_head": 2, "tie_word_embeddings": false });
/// let graph = models::from_config(&config)?.trace(&TraceOptions::training(2, 32))?;
/// assert_eq!(head_params(&graph).into_iter().collect::<Vec<_>>(), ["lm_head.weight"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn head_params(graph: &Graph) -> BTreeSet<&str> {
    let heads = output_heads(graph).into_iter();
    let weights = heads.filter_map(|id| graph.weight_of(graph.node(id)));
    weights.map(|id| graph.param(id).name.as_str()).collect()
}

/// The linear layers that produce the graph's outputs, directly or as the logits of a loss.
fn output_heads(graph: &Graph) -> BTreeSet<NodeId> {
    graph
        .outputs()
        .iter()
        .filter_map(|port| head_of(graph, port.value))
        .collect()
}

fn head_of(graph: &Graph, mut value: ValueId) -> Option<NodeId> {
    loop {
        let id = graph.producer(value)?;
        let node = graph.node(id);
        if let Class::Linear(_) = node.op.class() {
            return Some(id);
        }
        if !keeps_meaning(graph, node) {
            return None;
        }
        value = node.inputs[0];
    }
}

/// Whether a node turns logits into another form of the same output.
fn keeps_meaning(graph: &Graph, node: &Node) -> bool {
    match node.op.class() {
        Class::Loss(_) | Class::Total | Class::Identity | Class::Form | Class::Transpose => true,
        Class::Region(region) => match region.kind.forward() {
            Some(Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter) => true,
            Some(Collective::AllToAll) | None => false,
        },
        // The bias of a head whose product was summed over ranks.
        Class::Add => graph.param_of(node.inputs[1]).is_some(),
        Class::Source
        | Class::Linear(_)
        | Class::Lookup
        | Class::LayerNorm
        | Class::RmsNorm
        | Class::Attention
        | Class::Rope
        | Class::Activation
        | Class::Dropout
        | Class::Mul
        | Class::Function
        | Class::Constant
        | Class::Gradient => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(weights: &[usize], budget: usize) -> Vec<usize> {
        let candidates: Vec<_> = weights
            .iter()
            .enumerate()
            .map(|(border, &weight)| Candidate { border, weight })
            .collect();
        choose(&candidates, budget)
            .iter()
            .map(|cut| cut.weight)
            .collect()
    }

    #[test]
    fn the_candidate_nearer_to_the_budget_wins_and_the_earlier_one_among_equals() {
        assert_eq!(chosen(&[6, 13], 10), [13]);
        assert_eq!(chosen(&[7, 13], 10), [7]);
        assert_eq!(chosen(&[8, 13], 10), [8]);
    }

    #[test]
    fn a_heavy_node_closes_the_segment_before_it_and_its_own() {
        assert_eq!(chosen(&[9, 30, 34, 52], 10), [9, 30, 34, 52]);
    }

    #[test]
    fn a_candidate_exactly_at_the_budget_is_not_yet_cut() {
        assert_eq!(chosen(&[10, 12], 10), [10]);
        assert_eq!(chosen(&[10], 10), [0; 0]);
    }
}
