//! What an optimizer keeps for the elements that its rank owns.

use crate::{Block, flat, optimizer::MAX_STATES};
use std::{ops::Range, sync::Arc};

/// The optimizer state of one rank: a value of each kind for each element that the rank owns.
///
/// Checkpoints see it as slices of logical parameters, which do not depend on the topology.
///
/// A clone shares the values until one of the two changes, so that a snapshot for a writer costs
/// nothing. A change of values that are still shared copies them first.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnedState {
    blocks: Vec<Block>,
    runs: Vec<Run>,
    names: &'static [&'static str],
    /// One vector per name, of the owned elements in flat order.
    values: Vec<Arc<Vec<f32>>>,
}

/// Adjacent blocks of one parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    param: usize,
    local: Range<usize>,
    packed: Range<usize>,
}

/// A piece of the state of one parameter.
#[derive(Debug, PartialEq)]
pub struct StateSlice<V> {
    /// Position of the parameter in the layout.
    pub param: usize,
    /// Which of the kept values, as in `exp_avg`.
    pub name: &'static str,
    /// Elements of the local tensor, in row-major order.
    pub local: Range<usize>,
    /// Their values.
    pub values: V,
}

impl OwnedState {
    pub(crate) fn new(blocks: Vec<Block>, names: &'static [&'static str]) -> Self {
        let runs = join(&blocks);
        let len = runs.last().map_or(0, |run| run.packed.end);
        Self {
            values: names.iter().map(|_| Arc::new(vec![0.0; len])).collect(),
            blocks,
            runs,
            names,
        }
    }

    /// The same without room for values, which lie elsewhere.
    pub(crate) fn without_values(self) -> Self {
        Self {
            values: Vec::new(),
            ..self
        }
    }

    /// The same with values, one vector per name.
    pub(crate) fn with_values(&self, values: Vec<Vec<f32>>) -> Self {
        Self {
            values: values.into_iter().map(Arc::new).collect(),
            ..self.clone()
        }
    }

    pub(crate) fn values(&self) -> &[Arc<Vec<f32>>] {
        &self.values
    }

    /// The names of the kept values, in the order of PyTorch's state dicts.
    pub fn names(&self) -> &'static [&'static str] {
        self.names
    }

    /// The blocks that this rank owns, in flat order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The number of elements that this rank owns.
    pub fn num_owned(&self) -> usize {
        self.runs.last().map_or(0, |run| run.packed.end)
    }

    /// The owned pieces of the layout's parameters, as (position in the layout, elements of the
    /// local tensor).
    pub fn owned(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.runs.iter().map(|run| (run.param, run.local.clone()))
    }

    /// Every piece of the state, one kind of value after the other, in flat order.
    pub fn slices(&self) -> impl Iterator<Item = StateSlice<&[f32]>> + '_ {
        let kinds = self.names.iter().zip(&self.values);
        kinds.flat_map(|(&name, values)| {
            self.runs.iter().map(move |run| StateSlice {
                param: run.param,
                name,
                local: run.local.clone(),
                values: &values[run.packed.clone()],
            })
        })
    }

    /// As [`OwnedState::slices`], for writing.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = StateSlice<&mut [f32]>> + '_ {
        let runs = &self.runs;
        let kinds = self.names.iter().zip(&mut self.values);
        kinds.flat_map(move |(&name, values)| {
            let values = Arc::make_mut(values);
            let pieces = flat::carve(values, runs.iter().map(|run| run.packed.clone()));
            runs.iter()
                .zip(pieces)
                .map(move |(run, values)| StateSlice {
                    param: run.param,
                    name,
                    local: run.local.clone(),
                    values,
                })
        })
    }

    /// The blocks beside the values of each; kinds that the rule does not keep are empty.
    pub(crate) fn blocks_and_values(&mut self) -> (&[Block], Vec<[&mut [f32]; MAX_STATES]>) {
        let blocks = &self.blocks;
        let mut values: Vec<[&mut [f32]; MAX_STATES]> =
            blocks.iter().map(|_| Default::default()).collect();
        for (kind, kept) in self.values.iter_mut().enumerate() {
            let kept = Arc::make_mut(kept);
            let pieces = flat::carve(kept, flat::packed(blocks));
            for (slots, piece) in values.iter_mut().zip(pieces) {
                slots[kind] = piece;
            }
        }
        (blocks, values)
    }
}

/// Joins adjacent blocks of one parameter.
fn join(blocks: &[Block]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (block, packed) in blocks.iter().zip(flat::packed(blocks)) {
        match runs.last_mut() {
            Some(run) if run.param == block.param && run.local.end == block.local.start => {
                run.local.end = block.local.end;
                run.packed.end = packed.end;
            }
            _ => runs.push(Run {
                param: block.param,
                local: block.local.clone(),
                packed,
            }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_keeps_its_values_when_the_original_goes_on() {
        let block = Block {
            param: 0,
            flat: 0..4,
            local: 0..4,
        };
        let mut state = OwnedState::new(vec![block], &["exp_avg"]);
        let shared = |a: &OwnedState, b: &OwnedState| Arc::ptr_eq(&a.values[0], &b.values[0]);
        let snapshot = state.clone();
        assert!(shared(&state, &snapshot));
        let (_, mut values) = state.blocks_and_values();
        values[0][0].fill(1.0);
        assert!(!shared(&state, &snapshot));
        let first = |state: &OwnedState| state.slices().next().unwrap().values.to_vec();
        assert_eq!(
            (first(&state), first(&snapshot)),
            (vec![1.0; 4], vec![0.0; 4])
        );
        // Without a clone, the state changes its values where they lie.
        let place = Arc::as_ptr(&state.values[0]);
        for slice in state.slices_mut() {
            slice.values.fill(2.0);
        }
        assert_eq!(Arc::as_ptr(&state.values[0]), place);
    }
}
