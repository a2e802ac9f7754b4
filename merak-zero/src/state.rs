//! What an optimizer keeps for the elements that its rank owns.

use crate::{
    Block, EMA, FlatLayout, OptimizerConfig, ParamSpec, Result,
    average::Place,
    flat,
    layout::Extent,
    mapped::{Floats, MappedFloats},
    optimizer::{MAX_STATES, StateKind},
};
use std::{ops::Range, path::Path, sync::Arc};

/// The optimizer state of one rank: the values that the rule keeps for what the rank owns.
///
/// Checkpoints see it as slices of logical tensors beside the parameters, which do not depend on
/// the topology.
///
/// A clone shares the values until one of the two changes, so that a snapshot for a writer costs
/// nothing. A change of values that are still shared copies them first.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnedState {
    blocks: Vec<Block>,
    runs: Vec<Run>,
    /// Those of the rule, then [`EMA`] where averages of the weights are kept.
    names: Vec<&'static str>,
    /// One vector per name, of the owned elements in flat order.
    values: Vec<Arc<Floats>>,
}

/// Adjacent blocks of one parameter, and what is kept for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) param: usize,
    flat: Range<usize>,
    /// Its place among the elements that the rank owns.
    packed: Range<usize>,
    local: Range<usize>,
    /// In the order of [`OptimizerConfig::state_of`], then the average.
    kept: Vec<Kept>,
}

/// Where the values of one kind lie.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kept {
    kind: StateKind,
    /// Elements of the local tensor of these values.
    local: Range<usize>,
    /// Elements of the vector of the kind's name.
    packed: Range<usize>,
}

/// A piece of the state of one parameter.
#[derive(Debug, PartialEq)]
pub struct StateSlice<V> {
    /// Position of the parameter in the layout.
    pub param: usize,
    /// Which of the kept values, as in `exp_avg`.
    pub name: &'static str,
    /// The dimension of the parameter that the tensor of these values lacks, as it has one value
    /// for all along it.
    pub without: Option<usize>,
    /// Elements of the local tensor of these values, in row-major order.
    pub local: Range<usize>,
    /// Their values.
    pub values: V,
}

impl OwnedState {
    /// Zeroed state for what lies in `blocks`.
    pub(crate) fn new(blocks: Vec<Block>, layout: &FlatLayout, config: &OptimizerConfig) -> Self {
        let kinds = |spec: &ParamSpec| config.state_of(spec);
        Self::of_kinds(blocks, layout, config.state_names(), kinds)
    }

    /// Zeroed state of these names, of which `kinds` gives those of a parameter.
    pub(crate) fn of_kinds(
        blocks: Vec<Block>,
        layout: &FlatLayout,
        names: &'static [&'static str],
        kinds: impl Fn(&ParamSpec) -> Vec<StateKind>,
    ) -> Self {
        let mut runs = join(&blocks);
        let mut ends = vec![0; names.len()];
        for run in &mut runs {
            let spec = &layout.params()[run.param];
            let is_whole = run.local == (0..spec.numel());
            let kept = |kind: StateKind| {
                debug_assert!(is_whole || kind.without.is_none());
                let name = names.iter().position(|name| *name == kind.name);
                let end = &mut ends[name.expect("`state_names` has every name of `state_of`")];
                let local = match kind.without {
                    None => run.local.clone(),
                    Some(_) => 0..kind.numel(&spec.shape),
                };
                let start = *end;
                *end += local.len();
                Kept {
                    kind,
                    local,
                    packed: start..*end,
                }
            };
            run.kept = kinds(spec).into_iter().map(kept).collect();
        }
        Self {
            values: ends.iter().map(|&len| in_memory(vec![0.0; len])).collect(),
            blocks,
            runs,
            names: names.to_vec(),
        }
    }

    /// The same with averages of the owned elements, all zero.
    pub(crate) fn with_average(mut self) -> Self {
        for run in &mut self.runs {
            run.kept.push(Kept {
                kind: StateKind::of(EMA),
                local: run.local.clone(),
                packed: run.packed.clone(),
            });
        }
        self.names.push(EMA);
        self.values.push(in_memory(vec![0.0; self.num_owned()]));
        self
    }

    /// Whether averages are kept, as the last of the names.
    pub(crate) fn keeps_average(&self) -> bool {
        self.names.last() == Some(&EMA)
    }

    /// The averages, in flat order; `None` where none are kept here.
    pub(crate) fn averages_mut(&mut self) -> Option<&mut [f32]> {
        if !self.keeps_average() {
            return None;
        }
        let averages: &mut [f32] = &mut *Arc::make_mut(self.values.last_mut()?);
        Some(averages)
    }

    /// Where the owned elements lie in a buffer of parameters, and among their averages.
    pub(crate) fn places_of_averages(&self, params: Extent) -> Vec<Place> {
        let places = self.runs.iter();
        places
            .map(|run| [run.place(params), run.packed.clone()])
            .collect()
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
            values: values.into_iter().map(in_memory).collect(),
            ..self.clone()
        }
    }

    /// Moves values that are in memory into files of a folder. Those in a file that a snapshot has
    /// too go on in a file of their own: a change would move them into memory.
    pub(crate) fn keep_in_files(&mut self, folder: &Path) -> Result<()> {
        for values in &mut self.values {
            let is_alone = Arc::get_mut(values).is_some();
            if is_alone && matches!(**values, Floats::InFile(_)) {
                continue;
            }
            let mut file = MappedFloats::zeros(folder, values.len())?;
            // Zeros that were never written take no memory, and the file has them already.
            if values.iter().any(|value| value.to_bits() != 0) {
                file.copy_from_slice(values);
            }
            *values = Arc::new(Floats::InFile(file));
        }
        Ok(())
    }

    /// The number of values that lie in files.
    pub fn num_in_files(&self) -> usize {
        let in_file = |values: &&Arc<Floats>| matches!(&***values, Floats::InFile(_));
        let files = self.values.iter().filter(in_file);
        files.map(|values| values.len()).sum()
    }

    pub(crate) fn values(&self) -> &[Arc<Floats>] {
        &self.values
    }

    /// The names of the kept values, in the order of PyTorch's state dicts; [`EMA`] comes last.
    pub fn names(&self) -> &[&'static str] {
        &self.names
    }

    /// The blocks that this rank owns, in flat order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The number of elements that this rank owns.
    pub fn num_owned(&self) -> usize {
        self.runs.iter().map(|run| run.local.len()).sum()
    }

    /// The owned pieces of the layout's parameters, as (position in the layout, elements of the
    /// local tensor).
    pub fn owned(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.runs.iter().map(|run| (run.param, run.local.clone()))
    }

    /// Where the blocks lie in a flat buffer.
    pub(crate) fn places(&self, extent: Extent) -> Vec<Range<usize>> {
        match extent {
            Extent::All => self.blocks.iter().map(|block| block.flat.clone()).collect(),
            Extent::Owned => flat::packed(&self.blocks).collect(),
        }
    }

    /// Every piece of the state, one kind of value after the other, in flat order.
    pub fn slices(&self) -> impl Iterator<Item = StateSlice<&[f32]>> + '_ {
        let kinds = self.names.iter().zip(&self.values);
        kinds.flat_map(|(name, values)| {
            let kept = kept_as(&self.runs, name);
            kept.map(|(run, kept)| kept.slice(run, &values[kept.packed.clone()]))
        })
    }

    /// As [`OwnedState::slices`], for writing.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = StateSlice<&mut [f32]>> + '_ {
        let runs = &self.runs;
        let kinds = self.names.iter().zip(&mut self.values);
        kinds.flat_map(move |(name, values)| {
            let ranges = kept_as(runs, name).map(|(_, kept)| kept.packed.clone());
            let values: &mut [f32] = &mut *Arc::make_mut(values);
            let pieces = flat::carve(values, ranges);
            let kept = kept_as(runs, name).zip(pieces);
            kept.map(|((run, kept), values)| kept.slice(run, values))
        })
    }

    /// The owned runs beside the values of each that the rule keeps, in the order of
    /// [`OptimizerConfig::state_of`]; kinds that its rule does not keep are empty.
    pub(crate) fn runs_and_values(
        &mut self,
    ) -> impl Iterator<Item = (&Run, [&mut [f32]; MAX_STATES])> {
        let runs = &self.runs;
        let mut all: Vec<[&mut [f32]; MAX_STATES]> =
            runs.iter().map(|_| Default::default()).collect();
        let names = self.names.iter().filter(|name| **name != EMA);
        for (name, values) in names.zip(&mut self.values) {
            let slot_of = |run: &Run| run.kept.iter().position(|kept| kept.kind.name == *name);
            let ranges = kept_as(runs, name).map(|(_, kept)| kept.packed.clone());
            let values: &mut [f32] = &mut *Arc::make_mut(values);
            let mut pieces = flat::carve(values, ranges).into_iter();
            for (run, slots) in runs.iter().zip(&mut all) {
                if let Some(slot) = slot_of(run) {
                    slots[slot] = pieces.next().expect("a piece for each run with the name");
                }
            }
        }
        runs.iter().zip(all)
    }
}

fn in_memory(values: Vec<f32>) -> Arc<Floats> {
    Arc::new(Floats::InMemory(values))
}

impl Run {
    /// The place of its first element among those of the parameter on this rank.
    pub(crate) fn first(&self) -> usize {
        self.local.start
    }

    /// Where it lies in a flat buffer.
    pub(crate) fn place(&self, extent: Extent) -> Range<usize> {
        match extent {
            Extent::All => self.flat.clone(),
            Extent::Owned => self.packed.clone(),
        }
    }
}

impl Kept {
    fn slice<V>(&self, run: &Run, values: V) -> StateSlice<V> {
        StateSlice {
            param: run.param,
            name: self.kind.name,
            without: self.kind.without,
            local: self.local.clone(),
            values,
        }
    }
}

/// The runs that keep values of this name.
fn kept_as<'a>(runs: &'a [Run], name: &'a str) -> impl Iterator<Item = (&'a Run, &'a Kept)> {
    runs.iter().filter_map(move |run| {
        let kept = run.kept.iter().find(|kept| kept.kind.name == name)?;
        Some((run, kept))
    })
}

/// Joins adjacent blocks of one parameter.
fn join(blocks: &[Block]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (block, packed) in blocks.iter().zip(flat::packed(blocks)) {
        match runs.last_mut() {
            Some(run) if run.param == block.param && run.local.end == block.local.start => {
                run.local.end = block.local.end;
                run.flat.end = block.flat.end;
                run.packed.end = packed.end;
            }
            _ => runs.push(Run {
                param: block.param,
                flat: block.flat.clone(),
                packed,
                local: block.local.clone(),
                kept: Vec::new(),
            }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OptimizerKind;

    #[test]
    fn a_clone_keeps_its_values_when_the_original_goes_on() {
        let layout = FlatLayout::new(vec![ParamSpec::new("w", &[4], 0)], 1, 1).unwrap();
        let config = OptimizerConfig {
            optim: OptimizerKind::Lion,
            ..OptimizerConfig::default()
        };
        let mut state = OwnedState::new(layout.blocks().to_vec(), &layout, &config);
        let shared = |a: &OwnedState, b: &OwnedState| Arc::ptr_eq(&a.values[0], &b.values[0]);
        let snapshot = state.clone();
        assert!(shared(&state, &snapshot));
        let (_, [values, ..]) = state.runs_and_values().next().unwrap();
        values.fill(1.0);
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
