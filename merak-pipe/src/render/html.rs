//! A page on which schedules can be tried out.

use crate::{Action, Kind, Result, Schedule, ScheduleKind, Size, StageId, UnitCosts};
use serde::Serialize;
use std::collections::BTreeMap;

/// Sizes that the page can show, from 1.
const MAX_RANKS: usize = 8;
const MAX_MICROBATCHES: usize = 16;

/// What the page's script gets.
#[derive(Serialize)]
struct Data<'a> {
    name: &'a str,
    ranks: usize,
    microbatches: usize,
    costs: BTreeMap<char, f64>,
    /// The actions of each rank of the given schedule, and the stages that never recompute.
    given: (&'a [Vec<Action>], &'a [StageId]),
    /// By name and `ranks,microbatches`.
    schedules: BTreeMap<&'static str, BTreeMap<String, Stored>>,
}

/// Stages of each rank, a letter for each action, stages that never recompute.
type Stored = (Vec<Vec<StageId>>, Vec<String>, Vec<StageId>);

/// Writes a page on which the given schedule and every named one, for up to 8 ranks and 16 microbatches, can
/// be tried under other costs: it shows bubble, memory and critical path. It stands alone, in one file.
///
/// The script has no generators of its own: the page carries the schedules that this crate generated, with a
/// letter for each action. Its simulator is that of [`simulate`](fn@crate::simulate) in another language, and
/// gives the same figures.
///
/// # Errors
/// When the schedule's actions do not fit its size.
#[expect(
    clippy::missing_panics_doc,
    reason = "numbers, names and lists are always JSON"
)]
pub fn html(schedule: &Schedule, costs: UnitCosts) -> Result<String> {
    schedule.placement()?;
    let mut schedules = BTreeMap::new();
    for kind in ScheduleKind::ALL {
        let by_size: &mut BTreeMap<String, Stored> = schedules.entry(kind.as_str()).or_default();
        for ranks in 1..=MAX_RANKS {
            for microbatches in kind.min_microbatches(ranks)..=MAX_MICROBATCHES {
                let chunks = kind.fixed_chunks().unwrap_or(2);
                let size = Size::new(ranks, microbatches).with_chunks(chunks);
                let stored = stored(&kind.generate(size)?)?;
                by_size.insert(format!("{ranks},{microbatches}"), stored);
            }
        }
    }
    let data = Data {
        name: &schedule.name,
        ranks: schedule.size.ranks,
        microbatches: schedule.size.microbatches,
        costs: BTreeMap::from([
            ('F', costs.forward),
            ('I', costs.input_grad),
            ('W', costs.weight_grad),
            ('R', costs.recompute),
            ('C', costs.hop),
        ]),
        given: (&schedule.actions, &schedule.no_recompute),
        schedules,
    };
    let data = serde_json::to_string(&data).expect("numbers, names and lists are JSON");
    // A name from a user's file must not end the script.
    let data = data.replace('<', "\\u003c");
    Ok(include_str!("page.html").replacen("/*DATA*/null", &data, 1))
}

/// Microbatches are left out: on each stage those of forwards, of input gradients and of weight gradients
/// ascend, and an `R` is that of the next `B`.
fn stored(schedule: &Schedule) -> Result<Stored> {
    let placement = schedule.placement()?;
    let own = |rank| {
        let stages = placement.iter().enumerate();
        stages
            .filter(move |(_, owner)| **owner == rank)
            .map(|(stage, _)| StageId(stage))
    };
    let stages: Vec<Vec<StageId>> = (0..schedule.size.ranks)
        .map(|rank| own(rank).collect())
        .collect();
    let ranks = schedule.actions.iter().zip(&stages);
    let letters = ranks.map(|(actions, stages)| {
        let letter = |action: &Action| {
            let chunk = stages
                .iter()
                .position(|stage| *stage == action.stage)
                .unwrap_or(0);
            let kind = Kind::ALL
                .iter()
                .position(|kind| *kind == action.kind)
                .unwrap_or(0);
            ('A'..).nth(chunk * Kind::ALL.len() + kind).unwrap_or('?')
        };
        actions.iter().map(letter).collect()
    });
    let letters = letters.collect();
    Ok((stages, letters, schedule.no_recompute.clone()))
}
