//! What the parts of a step cost, and the costs of stages that follow.

mod clocks;

use merak_pipe::Costs;
use merak_trace::{Graph, Hop, Node, Overlap, Phase, StageProgram, op::Cost};
use std::{fmt, ops::Add};

/// The costs of the parts of a step, in any one unit of time.
///
/// A plan is a function of these numbers, so ranks that plan alone need the same ones.
pub trait StepCosts: fmt::Debug {
    /// A node of a graph on one rank.
    fn node(&self, graph: &Graph, node: &Node) -> f64;

    /// A message of `bytes` between two stages.
    fn message(&self, bytes: usize) -> f64;

    /// Whether collectives pass without a core of their ranks, as over a network: then those that
    /// overlap with nodes cost what no node hides.
    fn collectives_pass_alone(&self) -> bool {
        false
    }

    /// Number of ranks of a pipeline that compute at once.
    fn cores(&self) -> f64 {
        f64::INFINITY
    }

    /// An optimizer step on a rank with `trained` elements of trained parameters, reduction of
    /// gradients included; other ranks of the pipeline use `tied` of them too. `None` where it is
    /// not known.
    fn update(&self, _trained: usize, _tied: usize) -> Option<f64> {
        None
    }

    /// The unit of the costs, for people.
    fn unit(&self) -> &'static str;
}

/// Floating-point operations, in billions, on ranks that each have a core; messages are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted;

impl StepCosts for Counted {
    fn node(&self, graph: &Graph, node: &Node) -> f64 {
        Cost::of(graph, node).flops as f64 * 1e-9
    }

    fn message(&self, _: usize) -> f64 {
        0.0
    }

    fn unit(&self) -> &'static str {
        "operation counts"
    }
}

/// The costs of the phases of one microbatch on a part of the model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PhaseCosts {
    /// The forward.
    pub forward: f64,
    /// The recomputation.
    pub recompute: f64,
    /// The gradients of inputs.
    pub input_grad: f64,
    /// The gradients of weights.
    pub weight_grad: f64,
}

impl PhaseCosts {
    /// The costs of a program.
    pub fn of(program: &StageProgram, costs: &dyn StepCosts) -> Self {
        if program.overlap > Overlap::None && costs.collectives_pass_alone() {
            return Self::overlapping(program, costs);
        }
        let mut sums = Self::default();
        let nodes = program.graph.nodes().iter().zip(&program.phases);
        for (node, phase) in nodes {
            let place = match phase {
                Phase::Forward => &mut sums.forward,
                Phase::Recompute => &mut sums.recompute,
                Phase::BackwardInput => &mut sums.input_grad,
                Phase::BackwardWeight => &mut sums.weight_grad,
            };
            *place += costs.node(&program.graph, node);
        }
        sums
    }

    /// The costs of a program whose collectives pass while nodes run. The weight half of its
    /// backward has none; what the whole backward hides counts for the input half.
    fn overlapping(program: &StageProgram, costs: &dyn StepCosts) -> Self {
        let of = |phases: &[Phase]| {
            let nodes = program.forward.iter().chain(&program.backward).copied();
            let nodes = nodes.filter(|node| phases.contains(&program.phases[node.index()]));
            clocks::run(program, &nodes.collect::<Vec<_>>(), costs)
        };
        let (recompute, weight_grad) = (of(&[Phase::Recompute]), of(&[Phase::BackwardWeight]));
        let whole = [
            Phase::Recompute,
            Phase::BackwardInput,
            Phase::BackwardWeight,
        ];
        Self {
            forward: of(&[Phase::Forward]),
            recompute,
            input_grad: (of(&whole) - recompute - weight_grad).max(0.0),
            weight_grad,
        }
    }

    /// The whole backward, recomputation included.
    pub fn backward(self) -> f64 {
        self.recompute + self.input_grad + self.weight_grad
    }
}

impl Add for PhaseCosts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            forward: self.forward + other.forward,
            recompute: self.recompute + other.recompute,
            input_grad: self.input_grad + other.input_grad,
            weight_grad: self.weight_grad + other.weight_grad,
        }
    }
}

/// A message between stages with these values.
pub(crate) fn hop(values: &[Hop], costs: &dyn StepCosts) -> f64 {
    costs.message(values.iter().map(|hop| hop.ty.size_bytes()).sum())
}

/// The costs of stages with these phases; `hop` has a message over each border between two of them.
pub(crate) fn of_stages(phases: &[PhaseCosts], hop: Vec<f64>) -> Costs {
    let of = |part: fn(&PhaseCosts) -> f64| phases.iter().map(part).collect();
    Costs {
        forward: of(|costs| costs.forward),
        input_grad: of(|costs| costs.input_grad),
        weight_grad: of(|costs| costs.weight_grad),
        recompute: of(|costs| costs.recompute),
        hop,
        overlap: 1.0,
    }
}
