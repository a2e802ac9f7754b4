//! A step with and without its pipeline.

use super::{StageModule, run, run_threads, threads};
use crate::{Action, BoxError, Error, Kind, MicrobatchId, Result, Schedule, Size, StageId};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// The distance between a pipelined step and the same step without a pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Numbers that were compared.
    pub values: usize,
    /// The largest difference, as a share of the largest number of its list.
    pub difference: f64,
    /// The list with that difference.
    pub name: String,
}

/// Runs one step of a schedule and the same step without a pipeline, and compares their results:
/// the test for a [`StageModule`] of one's own.
///
/// Without the pipeline every stage is a module of its own, and microbatches go through all stages
/// there and back, one after the other, on this thread. A module whose results depend on the order
/// of its calls, on the other stages of its rank or on state attached to its payloads then shows a
/// difference.
///
/// `make` makes the module of some stages. The weights of a stage must not depend on the other
/// stages of the module. `results` reads from a module, after the step, lists of numbers under
/// names that do not depend on the cut: the gradients of its parameters, its loss. Lists with one
/// name in several modules are added up, so that tied weights and losses need no more.
///
/// `tolerance` is relative to the largest number of a list: 0 where all sums run in one order, as
/// in a module whose gradients are added by microbatch. A wait of the pipelined step ends by the
/// `deadline`.
///
/// # Errors
/// [`Error::Unlike`] and [`Error::UnlikeCount`] where the two differ, [`Error::NothingToCompare`]
/// where there are no lists or one is empty, [`Error::Module`] when `make` or `results` fails, and
/// as [`run_threads`].
pub fn compare_with_unpipelined<M, E>(
    schedule: &Schedule,
    mut make: impl FnMut(&[StageId]) -> Result<M, E>,
    results: impl Fn(&M) -> Result<Vec<(String, Vec<f64>)>, E>,
    tolerance: f64,
    deadline: Duration,
) -> Result<Comparison>
where
    M: StageModule + Send,
    E: Into<BoxError>,
{
    let placement = schedule.placement()?;
    let failed = |source: E| Error::Module {
        source: source.into(),
    };
    let every: Vec<StageId> = (0..placement.len()).map(StageId).collect();
    let single = every.chunks(1).map(&mut make).collect::<Result<_, E>>();
    let mut apart = Each(single.map_err(failed)?);
    let mut link = threads(1, deadline).remove(0);
    run(&unpipelined(schedule), 0, &mut apart, &mut link)?;
    let ranks = (0..schedule.size.ranks).map(|rank| {
        let own = every.iter().filter(|stage| placement[stage.0] == rank);
        make(&own.copied().collect::<Vec<_>>())
    });
    let mut together = ranks.collect::<Result<Vec<M>, E>>().map_err(failed)?;
    run_threads(schedule, &mut together, deadline)?;
    let read = |modules: &[M]| -> Result<BTreeMap<String, Vec<f64>>> {
        let mut sums = BTreeMap::new();
        for module in modules {
            for (name, list) in results(module).map_err(failed)? {
                add(&mut sums, name, list);
            }
        }
        Ok(sums)
    };
    compare(&read(&apart.0)?, &read(&together)?, tolerance)
}

/// Every microbatch through all stages there and back, on one rank.
fn unpipelined(schedule: &Schedule) -> Schedule {
    let Size { microbatches, .. } = schedule.size;
    let stages = schedule.size.stages();
    let backwards = if schedule.is_forward_only() {
        0
    } else {
        stages
    };
    let of_microbatch = |m| {
        let action = move |kind| move |s| Action::new(StageId(s), kind, MicrobatchId(m));
        let forwards = (0..stages).map(action(Kind::Forward));
        forwards.chain((0..backwards).rev().map(action(Kind::Backward)))
    };
    let actions = (0..microbatches).flat_map(of_microbatch).collect();
    let size = Size::new(1, microbatches).with_chunks(stages);
    Schedule::new("unpipelined", size, vec![actions])
}

/// A module for each stage.
struct Each<M>(Vec<M>);

impl<M: StageModule> StageModule for Each<M> {
    type Payload = M::Payload;
    type Error = M::Error;

    fn forward(
        &mut self,
        action: Action,
        input: Option<M::Payload>,
    ) -> Result<Option<M::Payload>, M::Error> {
        self.0[action.stage.0].forward(action, input)
    }

    fn forward_only(
        &mut self,
        action: Action,
        input: Option<M::Payload>,
    ) -> Result<Option<M::Payload>, M::Error> {
        self.0[action.stage.0].forward_only(action, input)
    }

    fn backward_input(
        &mut self,
        action: Action,
        grad: Option<M::Payload>,
    ) -> Result<Option<M::Payload>, M::Error> {
        self.0[action.stage.0].backward_input(action, grad)
    }

    fn backward_weight(&mut self, action: Action) -> Result<(), M::Error> {
        self.0[action.stage.0].backward_weight(action)
    }

    fn backward(
        &mut self,
        action: Action,
        grad: Option<M::Payload>,
    ) -> Result<Option<M::Payload>, M::Error> {
        self.0[action.stage.0].backward(action, grad)
    }
}

/// Adds a list to the one of its name; a longer one keeps its tail.
fn add(sums: &mut BTreeMap<String, Vec<f64>>, name: String, list: Vec<f64>) {
    let sum = sums.entry(name).or_default();
    if sum.len() < list.len() {
        sum.resize(list.len(), 0.0);
    }
    for (sum, value) in sum.iter_mut().zip(list) {
        *sum += value;
    }
}

fn compare(
    expected: &BTreeMap<String, Vec<f64>>,
    found: &BTreeMap<String, Vec<f64>>,
    tolerance: f64,
) -> Result<Comparison> {
    let mut worst = Comparison {
        values: 0,
        difference: 0.0,
        name: String::new(),
    };
    let names: BTreeSet<_> = expected.keys().chain(found.keys()).collect();
    if names.is_empty() {
        return Err(Error::NothingToCompare { name: None });
    }
    for name in names {
        let list = |of: &BTreeMap<String, Vec<f64>>| of.get(name).cloned().unwrap_or_default();
        let (expected, found) = (list(expected), list(found));
        if expected.len() != found.len() {
            return Err(Error::UnlikeCount {
                name: name.clone(),
                expected: expected.len(),
                found: found.len(),
            });
        }
        if expected.is_empty() {
            let name = Some(name.clone());
            return Err(Error::NothingToCompare { name });
        }
        let finite = expected.iter().filter(|value| value.is_finite());
        let largest = finite.map(|value| value.abs()).fold(0.0, f64::max);
        let scale = if largest > 0.0 { largest } else { 1.0 };
        for (index, (&expected, &found)) in expected.iter().zip(&found).enumerate() {
            let difference = if expected.to_bits() == found.to_bits() {
                0.0
            } else {
                (expected - found).abs() / scale
            };
            // A NaN difference is never tolerated.
            if difference.is_nan() || difference > tolerance {
                return Err(Error::Unlike {
                    name: name.clone(),
                    index,
                    expected,
                    found,
                });
            }
            if difference >= worst.difference {
                worst.difference = difference;
                worst.name.clone_from(name);
            }
        }
        worst.values += expected.len();
    }
    Ok(worst)
}
