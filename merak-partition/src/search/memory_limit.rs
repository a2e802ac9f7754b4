//! Memory as a limit on the segments of a rank.

use super::StageLoad;
use crate::{
    ParamBytes,
    memory::{ParamSums, RankValues, ValueWidth, total},
};
use merak_pipe::{Schedule, StageBytes};
use merak_trace::StageProgram;
use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
};

/// The bytes that a segment needs on its rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SegmentBytes {
    /// The parameters that no other segment uses.
    pub params: ParamSums,
    /// The parameters that other segments use too, by number. A rank holds each once.
    pub shared: Vec<(usize, ParamSums)>,
    /// The values of a microbatch.
    pub values: StageBytes,
    /// The data of a microbatch that it reads, by number. A rank loads each once.
    pub inputs: Vec<(usize, usize)>,
    /// Memory of freed values that is kept for later values of the same length.
    pub pool: usize,
}

impl SegmentBytes {
    /// The bytes of segments with these programs.
    pub fn of(programs: &[StageProgram], width: ValueWidth) -> Vec<Self> {
        let mut users: BTreeMap<&str, usize> = BTreeMap::new();
        for param in programs.iter().flat_map(StageProgram::params) {
            *users.entry(&param.name).or_default() += 1;
        }
        let numbers = numbered(users.keys().copied());
        let ports = programs.iter().flat_map(|program| &program.inputs);
        let inputs = numbered(
            ports
                .map(|port| port.name.as_str())
                .collect::<BTreeSet<_>>(),
        );
        let segment = |program: &StageProgram| {
            let size = |value| program.graph.ty(value).size_bytes();
            let ports = program.inputs.iter();
            let mut segment = Self {
                values: width.stage(&program.live_bytes()),
                inputs: ports
                    .map(|port| (inputs[port.name.as_str()], size(port.value)))
                    .collect(),
                pool: width.pool(program),
                ..Self::default()
            };
            for (id, param) in program.params().iter().enumerate() {
                let uses = program.grads.iter().filter(|port| port.param.index() == id);
                let sums = ParamSums::of(param, uses.count().max(1));
                if users[param.name.as_str()] == 1 {
                    segment.params = segment.params.and(sums);
                } else {
                    segment.shared.push((numbers[param.name.as_str()], sums));
                }
            }
            segment
        };
        programs.iter().map(segment).collect()
    }
}

/// The place of each name among them.
fn numbered<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeMap<&'a str, usize> {
    let names = names.into_iter().enumerate();
    names.map(|(at, name)| (name, at)).collect()
}

/// The bytes of segments, and those that each rank has for weights, gradients, optimizer state,
/// batches and values.
#[derive(Debug, Clone)]
pub struct RankMemory {
    limit: usize,
    bytes: ParamBytes,
    segments: Vec<SegmentBytes>,
    /// The fewest bytes that the fullest rank needed under any partition.
    least: Cell<usize>,
}

impl RankMemory {
    /// Ranks that each have `limit` bytes for segments of these bytes.
    pub fn new(limit: usize, bytes: ParamBytes, segments: Vec<SegmentBytes>) -> Self {
        Self {
            limit,
            bytes,
            segments,
            least: Cell::new(usize::MAX),
        }
    }

    /// Segments whose bytes are known.
    pub(super) fn len(&self) -> usize {
        self.segments.len()
    }

    /// The error where no partition was found.
    pub(crate) fn refusal(&self) -> crate::Error {
        crate::Error::StageMemory {
            limit: self.limit,
            least: self.least.get(),
        }
    }

    /// Whether every rank has room for its stages.
    pub fn holds(&self, schedule: &Schedule, placement: &[usize], stages: &[StageLoad]) -> bool {
        let ranks = schedule.actions.iter().enumerate();
        let needs = ranks.map(|(rank, actions)| {
            let stages = stages.iter().zip(placement).enumerate();
            let own = stages.filter(|(_, (_, owner))| **owner == rank);
            let own = own.map(|(stage, (load, _))| (stage, &self.segments[load.segments.clone()]));
            let own: BTreeMap<_, _> = own.collect();
            let all = || own.values().copied().flatten();
            let values = RankValues {
                batch: batch(all()),
                microbatches: schedule.size.microbatches,
                live: own.iter().map(|(at, own)| (*at, together(own))).collect(),
                pool: all().map(|segment| segment.pool).max().unwrap_or(0),
            };
            self.bytes.training(sums(all()), &values, actions).total()
        });
        let fullest = needs.max().unwrap_or(0);
        self.least.set(self.least.get().min(fullest));
        fullest <= self.limit
    }
}

/// The parameters of a rank with these segments, in model order.
fn sums<'a>(segments: impl Iterator<Item = &'a SegmentBytes>) -> ParamSums {
    let (mut sums, mut known) = (ParamSums::default(), BTreeSet::new());
    for segment in segments {
        sums = sums.and(segment.params);
        for (number, shared) in &segment.shared {
            let is_first = known.insert(*number);
            sums = sums.and(if is_first { *shared } else { shared.further() });
        }
    }
    sums
}

/// The data of a microbatch that a rank with these segments loads.
fn batch<'a>(segments: impl Iterator<Item = &'a SegmentBytes>) -> usize {
    let inputs = segments.flat_map(|segment| segment.inputs.iter().copied());
    total(inputs.collect::<BTreeMap<_, _>>().into_values())
}

/// The bytes of a stage of these segments, one running after the other.
fn together(segments: &[SegmentBytes]) -> StageBytes {
    let sum = |part: fn(&StageBytes) -> u64| {
        let parts = segments.iter().map(|segment| part(&segment.values));
        parts.fold(0, u64::saturating_add)
    };
    // While one segment runs, those before it hold `before`, and those after it `after`.
    let peak = |before: fn(&StageBytes) -> u64,
                during: fn(&StageBytes) -> u64,
                after: fn(&StageBytes) -> u64| {
        let (mut held, mut most) = (sum(after), 0_u64);
        for SegmentBytes { values, .. } in segments {
            held = held.saturating_sub(after(values));
            most = most.max(held.saturating_add(during(values)));
            held = held.saturating_add(before(values));
        }
        most
    };
    StageBytes {
        forward: peak(|b| b.kept, |b| b.forward, |_| 0),
        kept: sum(|b| b.kept),
        backward: peak(|b| b.kept, |b| b.backward, |_| 0),
        input_half: peak(|b| b.kept, |b| b.input_half, |b| b.between_halves),
        between_halves: sum(|b| b.between_halves),
        weight_half: peak(|b| b.between_halves, |b| b.weight_half, |_| 0),
        recompute: peak(|b| b.recomputed, |b| b.recompute, |b| b.kept),
        recomputed: sum(|b| b.recomputed),
        backward_after_recompute: peak(|b| b.recomputed, |b| b.backward_after_recompute, |_| 0),
        input_half_after_recompute: peak(
            |b| b.recomputed,
            |b| b.input_half_after_recompute,
            |b| b.between_halves,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RankPrograms, SegmentOptions, segment};
    use merak_trace::{
        DType, RecomputePlan, StageCuts,
        models::{self, TraceOptions},
    };
    use std::sync::Arc;

    /// A rank of a V has the first and the last segments of a model with a tied embedding, in bf16.
    #[test]
    fn a_search_counts_for_a_rank_what_the_rank_holds() {
        let config = serde_json::json!({ "model_type": "gpt2", "vocab_size": 32,
            "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2 });
        let model = models::from_config(&config).unwrap();
        let options = TraceOptions {
            dtype: DType::BF16,
            ..TraceOptions::training(2, 8)
        };
        let graph = model.trace(&options).unwrap();
        let segments = segment(&graph, &SegmentOptions::for_model(&model.info(), 2)).unwrap();
        let of_segments =
            SegmentBytes::of(&segments.programs(&graph, &[]).unwrap(), ValueWidth::Typed);
        let (len, nodes) = (segments.len(), &segments.bounds);
        let cuts = StageCuts::new(&graph, vec![0, nodes[2], nodes[len - 1], nodes[len]]).unwrap();
        let program = |stage| {
            let plan = RecomputePlan::default();
            let program = StageProgram::training(&graph, &cuts, stage, &plan);
            (stage, Arc::new(program.unwrap()))
        };
        let rank = RankPrograms::of(vec![program(0), program(2)]).sums();
        let own = of_segments[..2].iter().chain(&of_segments[len - 1..]);
        assert_eq!(sums(own), rank);
        let elements = rank.trained;
        assert_eq!(rank.uses, elements + 32 * 16, "the embedding is used twice");
        let held = ParamBytes::default().held(rank);
        assert_eq!(
            held.weights,
            (2 + 4) * elements,
            "masters stand beside weights"
        );
        assert_eq!(held.optimizer, 8 * elements);
    }
}
