//! A page on which schedules can be tried out.

use super::colour::{CRITICAL, fill};
use crate::{
    Action, ActivationBytes, Costs, Error, Kind, Result, Schedule, ScheduleKind, Size, StageId,
    action::Cell,
};
use serde::Serialize;
use std::collections::BTreeMap;

/// Sizes that the page can show, from 1.
const MAX_RANKS: usize = 8;
const MAX_MICROBATCHES: usize = 16;

/// What the page of [`html`] shows besides a schedule and its costs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PageOptions {
    /// What a microbatch keeps on each stage.
    pub bytes: Option<ActivationBytes>,
    /// For each rank the most microbatches whose activations it may keep; empty for no limit.
    pub peak_activations: Vec<f64>,
    /// For each rank the most bytes of activations that it may keep; empty for no limit.
    pub peak_bytes: Vec<u64>,
    /// Whether the cost of a recompute, `R`, applies to every schedule of the page; otherwise only
    /// to the given one, and the others have their [own](ScheduleKind::default_costs).
    pub is_recompute_named: bool,
}

impl PageOptions {
    fn check(&self, size: Size) -> Result<()> {
        if let Some(bytes) = &self.bytes {
            bytes.check(size)?;
        }
        for found in [self.peak_activations.len(), self.peak_bytes.len()] {
            if found != 0 && found != size.ranks {
                return Err(Error::LimitCount {
                    expected: size.ranks,
                    found,
                });
            }
        }
        Ok(())
    }
}

/// The data of the page's script.
#[derive(Serialize)]
struct Data<'a> {
    name: &'a str,
    ranks: usize,
    microbatches: usize,
    costs: &'a Costs,
    options: &'a PageOptions,
    /// The actions of each rank of the given schedule, and the stages that never recompute.
    given: (Vec<Vec<Cell>>, &'a [StageId]),
    /// By kind the colours of the first and of the last stage of a rank.
    colours: BTreeMap<char, [String; 2]>,
    critical: &'static str,
    /// By name the default cost of a recompute.
    recomputes: BTreeMap<&'static str, f64>,
    /// By name and `ranks,microbatches`.
    schedules: BTreeMap<&'static str, BTreeMap<String, Stored>>,
}

/// Stages of each rank, a letter for each action and a plus sign before two that run at once,
/// stages that never recompute.
type Stored = (Vec<Vec<StageId>>, Vec<String>, Vec<StageId>);

/// Writes a page on which the given schedule and every named one, for up to 8 ranks and 16
/// microbatches, can be tried under other costs: it shows bubble, memory and critical path on a
/// time axis that can be zoomed. A given schedule can be seen with fewer microbatches too. It
/// stands alone, in one file, and is dark where its reader prefers that.
///
/// Costs and bytes may differ from stage to stage: a slider moves all stages alike, and the field
/// beside it takes one number, or one for each stage with colons in between. Stages of a schedule
/// that has another number of them take the mean over their part of the list.
///
/// The script has no generators of its own: the page carries the schedules that this crate
/// generated, with a letter for each action. Its simulator is that of
/// [`simulate`](fn@crate::simulate) in another language, and gives the same figures.
///
/// # Errors
/// When the schedule's actions do not fit its size, a cost is not legal, or a list has another
/// length.
///
/// ```
/// use merak_pipe::{Costs, PageOptions, ScheduleKind, Size, UnitCosts, html};
/// let schedule = ScheduleKind::OneFOneB.generate(Size::new(4, 8))?;
/// let costs = Costs::parse("F=1:1:2:1", UnitCosts::default(), 4)?;
/// assert!(html(&schedule, &costs, &PageOptions::default())?.contains("[1.0,1.0,2.0,1.0]"));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[expect(
    clippy::missing_panics_doc,
    reason = "numbers, names and lists are always JSON"
)]
pub fn html(schedule: &Schedule, costs: &Costs, options: &PageOptions) -> Result<String> {
    schedule.placement()?;
    costs.check(schedule.size)?;
    options.check(schedule.size)?;
    let mut schedules = BTreeMap::new();
    for kind in ScheduleKind::ALL {
        let by_size: &mut BTreeMap<String, Stored> = schedules.entry(kind.as_str()).or_default();
        for ranks in 1..=MAX_RANKS {
            for microbatches in kind.min_microbatches(ranks)..=MAX_MICROBATCHES {
                let size = Size::new(ranks, microbatches).with_chunks(kind.default_chunks());
                let stored = stored(&kind.generate(size)?)?;
                by_size.insert(format!("{ranks},{microbatches}"), stored);
            }
        }
    }
    let data = Data {
        name: &schedule.name,
        ranks: schedule.size.ranks,
        microbatches: schedule.size.microbatches,
        costs,
        options,
        given: (
            (0..schedule.actions.len())
                .map(|rank| schedule.cells(rank).collect())
                .collect(),
            &schedule.no_recompute,
        ),
        colours: Kind::ALL
            .map(|kind| (kind.letter(), [fill(kind, 0, 2), fill(kind, 1, 2)]))
            .into(),
        critical: CRITICAL,
        recomputes: ScheduleKind::ALL
            .map(|kind| (kind.as_str(), kind.default_costs().recompute))
            .into(),
        schedules,
    };
    let data = serde_json::to_string(&data).expect("numbers, names and lists are JSON");
    // A name from a user's file must not end the script.
    let data = data.replace('<', "\\u003c");
    Ok(include_str!("page.html").replacen("/*DATA*/null", &data, 1))
}

/// The schedule without its microbatches: on each stage they ascend for forwards, for input
/// gradients and for weight gradients, and an `R` belongs to the next `B`.
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
    let letters = stages.iter().enumerate().map(|(rank, stages)| {
        let mut text = String::new();
        for cell in schedule.cells(rank) {
            text.extend(cell.second().map(|_| '+'));
            text.extend(cell.actions().map(|action| letter(stages, action)));
        }
        text
    });
    let letters = letters.collect();
    Ok((stages, letters, schedule.no_recompute.clone()))
}

/// The letter of an action on a rank with these stages.
fn letter(stages: &[StageId], action: Action) -> char {
    let chunk = stages.iter().position(|stage| *stage == action.stage);
    let kind = Kind::ALL.iter().position(|kind| *kind == action.kind);
    let code = chunk.unwrap_or(0) * Kind::ALL.len() + kind.unwrap_or(0);
    ('A'..).nth(code).unwrap_or('?')
}
