//! The memory that a rank of the pipeline needs: what it holds from step to step, and the values of
//! the microbatches that are under way.

use crate::RankPrograms;
use merak_pipe::{Action, StageBytes, StageId, rank_peak_bytes};
use merak_trace::{DType, LiveBytes, Op, Param, Port, StageProgram};
use std::collections::BTreeMap;

/// Bytes for each element, and the ranks that divide the elements among themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Bytes for each element.
    pub bytes: usize,
    /// The ranks that divide the elements; 1 where each rank keeps all of them.
    pub ranks: usize,
}

impl Share {
    /// Bytes that every rank keeps for each of its elements.
    pub const fn whole(bytes: usize) -> Self {
        Self { bytes, ranks: 1 }
    }

    /// The bytes of a rank's part of some elements.
    pub fn of(self, elements: usize) -> usize {
        elements.saturating_mul(self.bytes) / self.ranks.max(1)
    }
}

/// Bytes that a rank keeps for each element of its parameters. Frozen parameters have a weight
/// alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamBytes {
    /// The ranks that divide the trained weights, whose bytes are those of the type that they are
    /// kept in. A rank keeps its part of a master without the weight in 16 bits.
    pub weight_ranks: usize,
    /// The master beside a weight that is kept in 16 bits.
    pub master: Share,
    /// The gradient, once for each use.
    pub gradient: Share,
    /// The state of the optimizer.
    pub state: Share,
}

impl Default for ParamBytes {
    /// `f32` masters, gradients and two moments, whole on every rank.
    fn default() -> Self {
        Self {
            weight_ranks: 1,
            master: Share::whole(4),
            gradient: Share::whole(4),
            state: Share::whole(8),
        }
    }
}

/// How wide the values of a microbatch lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ValueWidth {
    /// As their types say.
    #[default]
    Typed,
    /// Half of that: under autocast a value of `f32` may have 16 bits, so they take at least this.
    Autocast,
}

impl ValueWidth {
    /// The bytes that a value takes whose type says `bytes`.
    pub const fn of(self, bytes: usize) -> usize {
        match self {
            Self::Typed => bytes,
            Self::Autocast => bytes / 2,
        }
    }

    /// The bytes of a microbatch on a stage, for the simulator.
    pub(crate) fn stage(self, live: &LiveBytes) -> StageBytes {
        let of = |bytes| self.of(bytes) as u64;
        StageBytes {
            forward: of(live.forward),
            kept: of(live.kept),
            backward: of(live.backward),
            input_half: of(live.input_half),
            between_halves: of(live.between_halves),
            weight_half: of(live.weight_half),
            recompute: of(live.recompute),
            recomputed: of(live.recomputed),
            backward_after_recompute: of(live.backward_after_recompute),
            input_half_after_recompute: of(live.input_half_after_recompute),
        }
    }

    /// Memory of freed values that a stage keeps for later values of the same length.
    pub(crate) fn pool(self, program: &StageProgram) -> usize {
        self.of(program.kept_free_bytes())
    }
}

/// Sums over some parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ParamSums {
    /// Bytes of the frozen weights, in the types that they are kept in.
    pub frozen_bytes: usize,
    /// Elements of trained weights.
    pub trained: usize,
    /// Those of them that are kept in 16 bits.
    pub narrow: usize,
    /// Bytes of the trained weights, in the types that they are kept in.
    pub trained_bytes: usize,
    /// The same with a weight counted once for each use.
    pub uses: usize,
}

impl ParamSums {
    /// One parameter with this number of uses.
    pub fn of(param: &Param, uses: usize) -> Self {
        let (elements, bytes) = (param.local.numel(), param.kept_bytes());
        if !param.trainable {
            return Self {
                frozen_bytes: bytes,
                ..Self::default()
            };
        }
        let is_narrow = matches!(param.kept_dtype(), DType::BF16 | DType::F16);
        Self {
            frozen_bytes: 0,
            trained: elements,
            narrow: if is_narrow { elements } else { 0 },
            trained_bytes: bytes,
            uses: elements.saturating_mul(uses),
        }
    }

    /// The same uses of parameters that the rank holds already.
    #[must_use]
    pub fn further(self) -> Self {
        Self {
            uses: self.uses,
            ..Self::default()
        }
    }

    /// Both sums together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            frozen_bytes: self.frozen_bytes.saturating_add(other.frozen_bytes),
            trained: self.trained.saturating_add(other.trained),
            narrow: self.narrow.saturating_add(other.narrow),
            trained_bytes: self.trained_bytes.saturating_add(other.trained_bytes),
            uses: self.uses.saturating_add(other.uses),
        }
    }
}

/// The bytes that a rank needs to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TrainingBytes {
    /// Parameters, with the masters of narrow ones.
    pub weights: usize,
    /// Their gradients, one for each use.
    pub gradients: usize,
    /// The state of the optimizer.
    pub optimizer: usize,
    /// Batches of the step, and values of the microbatches that are under way at the worst moment.
    pub activations: usize,
    /// Memory of freed values that is kept for later values of the same length.
    pub pool: usize,
}

impl TrainingBytes {
    /// The sum of all parts.
    pub fn total(&self) -> usize {
        total([
            self.weights,
            self.gradients,
            self.optimizer,
            self.activations,
            self.pool,
        ])
    }
}

impl ParamBytes {
    /// Bytes that a rank with these parameters holds from step to step; no activations.
    pub fn held(&self, params: ParamSums) -> TrainingBytes {
        let trained = match self.weight_ranks {
            0 | 1 => params.trained_bytes,
            ranks => {
                let narrow = params.narrow.saturating_mul(DType::BF16.size_bytes());
                params.trained_bytes.saturating_sub(narrow) / ranks
            }
        };
        TrainingBytes {
            weights: total([params.frozen_bytes, trained, self.master.of(params.narrow)]),
            gradients: self.gradient.of(params.uses),
            optimizer: self.state.of(params.trained),
            ..TrainingBytes::default()
        }
    }

    /// Bytes that a rank with these parameters and values needs to train by these actions.
    pub(crate) fn training(
        &self,
        params: ParamSums,
        values: &RankValues,
        actions: &[Action],
    ) -> TrainingBytes {
        let batches = values.batch.saturating_mul(values.microbatches);
        let peak = activation_bytes(actions, &values.live);
        TrainingBytes {
            activations: batches.saturating_add(peak),
            pool: values.pool,
            ..self.held(params)
        }
    }
}

/// The bytes of a rank beside those of its parameters.
pub(crate) struct RankValues {
    /// The data of a microbatch that the rank loads.
    pub(crate) batch: usize,
    /// Microbatches of a step.
    pub(crate) microbatches: usize,
    /// The values of a microbatch on each stage.
    pub(crate) live: BTreeMap<usize, StageBytes>,
    /// Memory of freed values that is kept for later values of the same length.
    pub(crate) pool: usize,
}

impl RankPrograms {
    /// The rank's parameters, each held once.
    pub fn sums(&self) -> ParamSums {
        // A parameter that nothing uses has a gradient too.
        let held = self.params.iter().map(|param| ParamSums::of(param, 1));
        let uses = self.uses().into_iter().filter(|of| !of.is_first);
        let further = uses.map(|of| ParamSums::of(&self.params[of.param], 1).further());
        held.chain(further)
            .fold(ParamSums::default(), ParamSums::and)
    }

    /// Bytes that the rank needs to train by these actions. Without actions they are those beside
    /// the values of microbatches.
    pub fn training_bytes(
        &self,
        bytes: &ParamBytes,
        width: ValueWidth,
        actions: &[Action],
        microbatches: usize,
    ) -> TrainingBytes {
        let programs = || self.stages.iter().map(|(_, program)| &**program);
        let stages = self.stages.iter();
        let live = stages.map(|(stage, program)| (*stage, width.stage(&program.live_bytes())));
        let pools = programs().map(|program| width.pool(program));
        let values = RankValues {
            batch: input_bytes(programs()),
            microbatches,
            live: live.collect(),
            pool: pools.max().unwrap_or(0),
        };
        bytes.training(self.sums(), &values, actions)
    }
}

/// Upper bound on the bytes of a microbatch on a stage, on a backend without scratch memory; under
/// autocast too, where a value may stay as wide as its type says.
/// Batches are held until their forward ends, the model's outputs until the step of `microbatches`
/// microbatches ends.
pub(crate) fn held_at_most(program: &StageProgram, microbatches: usize) -> StageBytes {
    let size = |value| program.graph.ty(value).size_bytes() as u64;
    let bytes = |ports: &[Port]| ports.iter().map(|port| size(port.value)).sum::<u64>();
    let outputs = bytes(&program.outputs).saturating_mul(microbatches as u64);
    let mut live = ValueWidth::Typed.stage(&program.live_bytes_without_reuse());
    for peak in [
        &mut live.forward,
        &mut live.backward,
        &mut live.input_half,
        &mut live.weight_half,
        &mut live.recompute,
        &mut live.backward_after_recompute,
        &mut live.input_half_after_recompute,
    ] {
        *peak = peak.saturating_add(outputs);
    }
    live.forward = live.forward.saturating_add(bytes(&program.inputs));
    live
}

/// The peak of the bytes of values under a rank's actions; `live` has the bytes of a microbatch on
/// each stage.
pub(crate) fn activation_bytes(actions: &[Action], live: &BTreeMap<usize, StageBytes>) -> usize {
    let bytes = |stage: StageId| live.get(&stage.0).copied();
    usize::try_from(rank_peak_bytes(actions, bytes)).unwrap_or(usize::MAX)
}

/// The bytes of values that a rank's forwards need, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ForwardBytes {
    /// The batch, and the values that are alive at the worst moment.
    pub activations: usize,
    /// Memory of freed values that is kept for later values of the same length.
    pub pool: usize,
}

/// Bytes that the forwards of a rank's stages need. Nothing is kept for a backward.
pub fn forward_bytes(programs: &[StageProgram], width: ValueWidth) -> ForwardBytes {
    let peaks = programs.iter().map(|program| program.live_bytes().forward);
    let peak = width.of(peaks.max().unwrap_or(0));
    let pools = programs.iter().map(|program| width.pool(program));
    ForwardBytes {
        activations: input_bytes(programs.iter()).saturating_add(peak),
        pool: pools.max().unwrap_or(0),
    }
}

/// Bytes of the keys and values of a prompt's positions, which a rank keeps to generate text. In
/// programs of a model `with_encoder`, which reads the prompts, the decoder keeps them.
pub fn cached_bytes(programs: &[StageProgram], width: ValueWidth, with_encoder: bool) -> usize {
    let of_program = |program: &StageProgram| {
        let nodes = program.graph.nodes().iter();
        let attentions = nodes
            .filter(|node| matches!(&node.op, Op::Attention(spec) if spec.cross == with_encoder));
        // Queries, keys and values, in this order.
        let kept = attentions.flat_map(|node| &node.inputs[1..3]);
        total(kept.map(|&value| program.graph.ty(value).size_bytes()))
    };
    width.of(total(programs.iter().map(of_program)))
}

/// Bytes of a microbatch as a rank loads it for its stages.
pub fn input_bytes<'a>(programs: impl Iterator<Item = &'a StageProgram>) -> usize {
    let ports = programs.flat_map(|program| {
        let size = |value| program.graph.ty(value).size_bytes();
        let sized = program.inputs.iter();
        sized.map(move |port| (port.name.as_str(), size(port.value)))
    });
    let sizes: BTreeMap<_, _> = ports.collect();
    total(sizes.into_values())
}

/// The saturating sum of sizes.
pub(crate) fn total(sizes: impl IntoIterator<Item = usize>) -> usize {
    sizes.into_iter().fold(0, usize::saturating_add)
}
