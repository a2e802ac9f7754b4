//! `auto`: a schedule built for given costs and a limit of memory.
//!
//! The search starts from the shortest schedules within the limit, one for each placement of the
//! stages: named ones, and those that list scheduling and beam search make for these costs. It
//! splits their backwards. Then it moves single actions along their rank's list where the critical
//! path passes:
//!
//! ```text
//! named schedules ─┐
//! list scheduling ─┤
//! beam search ─────┴► the best within the limit, by placement ──► B = I, W
//!                                                                   │
//!            ┌──── keep it if hardly longer ◄── time it ◄── move an action on the critical path
//!            └────────────────────────────────────────────────────────┘   until bound or budget
//!                                                                   │
//!                     beam search for what is shorter still ◄───────┘
//! ```
//!
//! In list scheduling a free rank runs the first of its ready actions. Several rules say which one
//! is first: input gradients or forwards, how many microbatches may be live, how long weight
//! gradients wait for a message that is about to come. Stages are placed in turn and, where a rank
//! has several, there and back (a V for two); in small pipelines also where the lower bound is
//! least.
//!
//! Beam search lets the lists of all ranks grow side by side and keeps the most promising
//! beginnings. It finds what moves of single actions do not lead to: where memory is short, which
//! of its stages a rank begins a microbatch on decides what other ranks can do long before. Of
//! beginnings with the same number of actions of each stage and kind the best stays. After the
//! moves, where all that counts is what is shorter than their result, several of these stay, unless
//! another one has all ranks free and all messages there no later.
//!
//! Where memory is limited in bytes, a whole backward may need less than its halves: between them,
//! gradients and recomputed values wait for `W`. Then all searches also choose, microbatch by
//! microbatch, between `B` and the two halves.
//!
//! The budget counts timed orders and the draws come from a fixed seed, so the same input always
//! gives the same schedule.

mod beam;
mod bound;
mod descent;
mod greedy;
mod job_shop;
mod search;

use crate::{
    ActivationBytes, Costs, Error, Result, Schedule, ScheduleKind, Simulation, Size, StageBytes,
    StageId,
    memory::{check_count, sum},
    simulate,
};
use bound::{Bounds, all_placements};
use greedy::Problem;
use search::{FIRST_BEAMS, LAST_BEAMS, Search};

/// The limits of a search by [`auto`](fn@auto): memory and timed orders.
#[derive(Debug, Clone, PartialEq)]
pub struct AutoLimits {
    /// For each rank the most microbatches whose activations it may keep, as in
    /// [`Simulation::peak_activations`]; empty for no limit.
    pub peak_activations: Vec<f64>,
    /// The most bytes of activations that each rank may keep, if they are limited.
    pub bytes: Option<ByteLimits>,
    /// The most orders that are timed. Large schedules get fewer, which bounds the time of the
    /// search.
    pub moves: usize,
}

impl Default for AutoLimits {
    /// No limit of memory, and 200,000 moves.
    fn default() -> Self {
        Self {
            peak_activations: Vec::new(),
            bytes: None,
            moves: 200_000,
        }
    }
}

/// Limits of memory in bytes, as in [`Schedule::peak_bytes_of`].
///
/// ```
/// use merak_pipe::{ActivationBytes, ByteLimits};
/// let limits = ByteLimits::new(&ActivationBytes::parse("I=300,W=100", 2)?, vec![800; 2]);
/// assert_eq!((limits.stages[1].kept, limits.stages[1].between_halves), (400, 100));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByteLimits {
    /// By stage: the bytes of a microbatch.
    pub stages: Vec<StageBytes>,
    /// The same under schedules whose [`Schedule::no_recompute`] names the stage; empty if stages
    /// recompute nothing.
    pub without_recompute: Vec<StageBytes>,
    /// By stage: the bytes that its rank needs all the time, such as those of its weights; empty
    /// for none.
    pub fixed: Vec<u64>,
    /// For each rank the most bytes that its stages may take.
    pub peaks: Vec<u64>,
}

impl ByteLimits {
    /// Limits for stages that keep these bytes and need nothing besides.
    pub fn new(kept: &ActivationBytes, peaks: Vec<u64>) -> Self {
        Self {
            stages: kept.by_stage(),
            without_recompute: Vec::new(),
            fixed: Vec::new(),
            peaks,
        }
    }

    fn check(&self, size: Size) -> Result<()> {
        check_count(self.stages.len(), size)?;
        for list in [self.without_recompute.len(), self.fixed.len()] {
            if list > 0 {
                check_count(list, size)?;
            }
        }
        if self.peaks.len() != size.ranks {
            return Err(Error::LimitCount {
                expected: size.ranks,
                found: self.peaks.len(),
            });
        }
        let all = self.stages.iter().chain(&self.without_recompute);
        let most = sum(all.map(StageBytes::most)).saturating_mul(size.microbatches as u64);
        if sum(self.fixed.iter().copied()).saturating_add(most) == u64::MAX {
            return Err(Error::TooManyBytes);
        }
        Ok(())
    }

    /// The limits for schedules that never recompute on some stages.
    fn keeping(&self, no_recompute: &[StageId]) -> Bytes {
        let stages = self.stages.iter().enumerate();
        let of = |(stage, bytes): (usize, &StageBytes)| {
            let instead = self.without_recompute.get(stage);
            let instead = instead.filter(|_| no_recompute.contains(&StageId(stage)));
            *instead.unwrap_or(bytes)
        };
        let stages: Vec<_> = stages.map(of).collect();
        Bytes {
            fuses: stages.iter().any(|stage| stage.backward < stage.halves()),
            stages,
            fixed: self.fixed.clone(),
            peaks: self.peaks.clone(),
        }
    }

    /// Whether a schedule keeps the limits.
    fn fit(&self, schedule: &Schedule) -> Result<bool> {
        let bytes = self.keeping(&schedule.no_recompute);
        let fixed = bytes.fixed_on(&schedule.placement()?);
        let peaks = schedule.peak_bytes_of(&bytes.stages)?.into_iter();
        let needed = peaks
            .zip(fixed)
            .map(|(peak, fixed)| peak.saturating_add(fixed));
        Ok(needed
            .zip(&self.peaks)
            .all(|(needed, limit)| needed <= *limit))
    }
}

/// The limits that every schedule of a search keeps.
#[derive(Debug, Clone)]
struct Memory {
    /// For each rank the most activations of stages.
    activations: Vec<usize>,
    bytes: Option<Bytes>,
}

/// Limits of bytes for schedules that recompute on the same stages.
#[derive(Debug, Clone, PartialEq)]
struct Bytes {
    /// By stage: the bytes of a microbatch, and those that its rank needs all the time (or empty).
    stages: Vec<StageBytes>,
    fixed: Vec<u64>,
    /// For each rank its limit.
    peaks: Vec<u64>,
    /// Whether a whole backward needs less than its halves on some stage.
    fuses: bool,
}

impl Bytes {
    /// For each rank the bytes that its stages need all the time.
    fn fixed_on(&self, placement: &[usize]) -> Vec<u64> {
        let mut fixed = vec![0_u64; self.peaks.len()];
        for (&rank, bytes) in placement.iter().zip(&self.fixed) {
            fixed[rank] = fixed[rank].saturating_add(*bytes);
        }
        fixed
    }

    /// For each rank the bytes that it has for microbatches.
    fn room(&self, placement: &[usize]) -> Vec<u64> {
        let fixed = self.fixed_on(placement).into_iter();
        let ranks = fixed.zip(&self.peaks);
        ranks
            .map(|(fixed, peak)| peak.saturating_sub(fixed))
            .collect()
    }

    /// An upper bound on the microbatches that wait for an input gradient on one stage, and on the
    /// activations of stages on one rank that do, for any placement.
    fn most_before_input(&self) -> usize {
        let least = self
            .stages
            .iter()
            .map(|stage| stage.kept.min(stage.recomputed));
        let most = self.peaks.iter().max();
        let count = most.and_then(|most| most.checked_div(least.min()?));
        count.map_or(usize::MAX, |count| {
            usize::try_from(count).unwrap_or(usize::MAX)
        })
    }

    /// The first rank that has no room for one microbatch on all of its stages, and what it needs.
    fn without_room(&self, placement: &[usize]) -> Option<Error> {
        let mut kept = self.fixed_on(placement);
        let mut besides = vec![0_u64; self.peaks.len()];
        for (&rank, stage) in placement.iter().zip(&self.stages) {
            kept[rank] = kept[rank].saturating_add(stage.kept);
            besides[rank] = besides[rank].max(stage.besides());
        }
        let needed = kept.iter().zip(besides);
        let needed = needed.map(|(kept, besides)| kept.saturating_add(besides));
        let mut ranks = needed.zip(&self.peaks).enumerate();
        ranks.find_map(|(rank, (expected, &found))| {
            (found < expected).then_some(Error::ByteLimit {
                rank,
                expected,
                found,
            })
        })
    }
}

/// The most actions that moves may time: one or two seconds.
const TIMED_ACTIONS: usize = 150_000_000;

/// The most placements that list scheduling tries besides the usual ones, and the most actions of
/// their schedules for each of its rules.
const MOST_PLACEMENTS: usize = 60;
const LISTED_ACTIONS: usize = 200_000;

impl AutoLimits {
    /// For each rank the most activations of stages that it may keep.
    ///
    /// # Errors
    /// [`Error::LimitCount`], and [`Error::MemoryLimit`] for a limit that no schedule keeps.
    fn activations(&self, size: Size) -> Result<Vec<usize>> {
        if self.peak_activations.is_empty() {
            return Ok(vec![
                size.stages().saturating_mul(size.microbatches);
                size.ranks
            ]);
        }
        if self.peak_activations.len() != size.ranks {
            return Err(Error::LimitCount {
                expected: size.ranks,
                found: self.peak_activations.len(),
            });
        }
        let limits = self.peak_activations.iter().enumerate();
        let whole = |(rank, &found): (usize, &f64)| {
            let kept = (found * size.chunks as f64 + ROUNDING) as usize;
            // A microbatch needs room on all stages of a rank at once. Then one after the other
            // fits.
            if kept < size.chunks {
                return Err(Error::MemoryLimit { rank, found });
            }
            Ok(kept)
        };
        limits.map(whole).collect()
    }
}

/// Tolerance of the limits of memory, for rounding.
const ROUNDING: f64 = 1e-9;

/// A schedule that [`auto`](fn@auto) found, and how.
#[derive(Debug, Clone)]
pub struct Auto {
    /// The schedule, under the name `auto`.
    pub schedule: Schedule,
    /// Its figures.
    pub simulation: Simulation,
    /// The best named schedule that keeps the limits, and its makespan; some limits are kept by
    /// none.
    pub start: Option<(ScheduleKind, f64)>,
    /// A lower bound on the makespan of every schedule of this size, for any placement of the
    /// stages, that recomputes on the same stages and keeps on no rank more than the largest of the
    /// limits.
    pub bound: f64,
    /// Orders that were timed.
    pub moves: usize,
    /// Why the search ended.
    pub stopped: Stopped,
}

/// Why a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The makespan is the lower bound: no schedule is shorter, for any placement of the stages.
    Optimal,
    /// All moves of the budget were made.
    Budget,
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Optimal => "the lower bound is reached",
            Self::Budget => "the budget of moves is spent",
        })
    }
}

/// Searches for a short schedule within the limits, for the given costs. The result is at least as
/// short as every named training schedule of the same size within the limits when no two actions
/// run at once: the search makes no pairs, and gains nothing by [`Costs::overlap`]. Every limit of
/// one microbatch or more has a schedule. So has every limit of bytes into which a microbatch fits
/// on all stages of a rank, with the most that any one of these stages needs besides.
///
/// # Errors
/// When the size, the costs or the limits are not legal, and [`Error::ByteLimit`] when no
/// microbatch fits into the bytes.
///
/// ```
/// use merak_pipe::{AutoLimits, Costs, Size, UnitCosts, auto};
/// // A slow last stage: the search fits the schedule to it.
/// let mut costs = Costs::uniform("F=1,I=1,W=1,R=0".parse()?, 3);
/// costs.forward[2] = 2.0;
/// let found = auto(Size::new(3, 6), &costs, &AutoLimits::default())?;
/// assert!(found.bound <= found.simulation.makespan);
/// assert!(found.start.is_none_or(|(_, named)| found.simulation.makespan <= named));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn auto(size: Size, costs: &Costs, limits: &AutoLimits) -> Result<Auto> {
    size.check()?;
    costs.check(size)?;
    let costs = &Costs {
        overlap: 1.0,
        ..costs.clone()
    };
    let activations = limits.activations(size)?;
    let bytes = limits.bytes.as_ref();
    bytes.map_or(Ok(()), |bytes| bytes.check(size))?;
    let named = best_named(size, costs, limits)?;
    let no_recompute = named
        .as_ref()
        .map_or_else(Vec::new, |(_, schedule, _)| schedule.no_recompute.clone());
    let memory = Memory {
        activations,
        bytes: bytes.map(|bytes| bytes.keeping(&no_recompute)),
    };
    let costs_kept = without_recompute(costs, &no_recompute);
    let (bound, best_placements) = least_bound(size, &costs_kept, &memory);
    let placements = placements(size, best_placements);
    let problems = placements.iter();
    let problems: Vec<_> = problems
        .map(|placement| Problem::new(size, placement, &costs_kept, &memory))
        .collect();
    let mut search = Search {
        costs,
        memory: &memory,
        bound,
        moves: limits.moves.min(TIMED_ACTIONS / most_actions(size)),
        found: Vec::new(),
    };
    search.begin(named.as_ref(), &problems, &no_recompute)?;
    if search.found.is_empty() {
        return Err(without_room(&memory, &placements));
    }
    search.look_ahead(&FIRST_BEAMS, &problems, &no_recompute)?;
    let moves = search.improve();
    search.look_ahead(&[LAST_BEAMS], &problems, &no_recompute)?;
    let start = named
        .as_ref()
        .map(|(kind, _, simulation)| (*kind, simulation.makespan));
    let (schedule, simulation) = or_whole(search.shortest()?, named);
    let stopped = if is_optimal(simulation.makespan, bound) {
        Stopped::Optimal
    } else {
        Stopped::Budget
    };
    Ok(Auto {
        schedule,
        simulation,
        start,
        bound,
        moves,
        stopped,
    })
}

/// Upper bound on the actions of a schedule: the forwards and both halves of the backwards.
fn most_actions(size: Size) -> usize {
    3 * size.stages() * size.microbatches
}

/// A lower bound on every makespan, and the placements of the stages with the lowest bounds.
fn least_bound(size: Size, costs: &Costs, memory: &Memory) -> (f64, Vec<Vec<usize>>) {
    let bounds = Bounds {
        size,
        costs,
        limit: memory.activations.iter().copied().max().unwrap_or(0),
        before_input: memory
            .bytes
            .as_ref()
            .map_or(usize::MAX, Bytes::most_before_input),
    };
    let wanted = MOST_PLACEMENTS.min(LISTED_ACTIONS / most_actions(size));
    all_placements(bounds, wanted)
}

/// The schedule that was found, or the named one where splitting its backwards gained nothing.
fn or_whole(found: (Schedule, Simulation), named: Option<Named>) -> (Schedule, Simulation) {
    match named {
        Some((_, mut schedule, simulation))
            if simulation.makespan <= found.1.makespan * (1.0 + 1e-12) =>
        {
            schedule.name = "auto".into();
            (schedule, simulation)
        }
        _ => found,
    }
}

/// The error when no schedule was found. Legal counts always have room for one microbatch after the
/// other, so some rank has too few bytes.
fn without_room(memory: &Memory, placements: &[Vec<usize>]) -> Error {
    let bytes = memory.bytes.as_ref().zip(placements.first());
    let short = bytes.and_then(|(bytes, in_turn)| bytes.without_room(in_turn));
    short.expect("list scheduling keeps every legal limit")
}

fn is_optimal(makespan: f64, bound: f64) -> bool {
    makespan <= bound * (1.0 + 1e-12)
}

/// The placements to try: in turn, there and back, and those with the least bounds.
fn placements(size: Size, best: Vec<Vec<usize>>) -> Vec<Vec<usize>> {
    let Size { ranks, .. } = size;
    let in_turn: Vec<_> = (0..size.stages()).map(|stage| stage % ranks).collect();
    let there_and_back = |stage: usize| match (stage / ranks) % 2 {
        0 => stage % ranks,
        _ => ranks - 1 - stage % ranks,
    };
    let mut placements = vec![in_turn, (0..size.stages()).map(there_and_back).collect()];
    placements.extend(best);
    let mut distinct: Vec<Vec<usize>> = Vec::new();
    for placement in placements {
        if !distinct.contains(&placement) {
            distinct.push(placement);
        }
    }
    distinct
}

/// The costs without the recompute of these stages.
fn without_recompute(costs: &Costs, stages: &[StageId]) -> Costs {
    let mut costs = costs.clone();
    for stage in stages {
        costs.recompute[stage.0] = 0.0;
    }
    costs
}

/// A named schedule, and its step by the costs of the search.
type Named = (ScheduleKind, Schedule, Simulation);

/// The shortest named schedule that keeps the limits, if there is one.
fn best_named(size: Size, costs: &Costs, limits: &AutoLimits) -> Result<Option<Named>> {
    let mut best: Option<Named> = None;
    let kinds = ScheduleKind::ALL.into_iter().filter(|kind| {
        let chunks = kind.fixed_chunks().unwrap_or(size.chunks);
        kind.is_training()
            && chunks == size.chunks
            && size.microbatches >= kind.min_microbatches(size.ranks)
    });
    for kind in kinds {
        let schedule = kind.generate(size)?;
        let simulation = simulate(&schedule, costs)?;
        let shorter = best
            .as_ref()
            .is_none_or(|(_, _, b)| simulation.makespan < b.makespan);
        let peaks = simulation.peak_activations.iter();
        let mut pairs = peaks.zip(&limits.peak_activations);
        let fits = limits.bytes.as_ref().map(|bytes| bytes.fit(&schedule));
        let fits = fits.unwrap_or(Ok(true))?;
        if shorter && fits && pairs.all(|(peak, limit)| *peak <= *limit + ROUNDING) {
            best = Some((kind, schedule, simulation));
        }
    }
    Ok(best)
}
