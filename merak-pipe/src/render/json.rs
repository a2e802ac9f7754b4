//! The JSON document of a schedule.

use crate::{
    Action, ActivationBytes, Costs, Instruction, PeakBytes, Result, Schedule, action::Cell,
    simulate,
};
use serde::Serialize;

/// The document, in the order of its fields.
#[derive(Serialize)]
struct Document<'a> {
    name: &'a str,
    stages: usize,
    ranks: usize,
    microbatches: usize,
    chunks: usize,
    costs: &'a Costs,
    actions: Vec<Vec<Cell>>,
    instructions: Vec<Vec<Instruction>>,
    makespan: f64,
    bubble: f64,
    longest_rank_time: f64,
    bubble_by_rank: Vec<f64>,
    peak_activations: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    activation_bytes: Option<&'a ActivationBytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes: Option<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes_by_grad: Option<Vec<PeakBytes>>,
    critical_path: Vec<Action>,
}

/// Writes a schedule, its instruction streams and its figures under the given costs as one JSON
/// object on one line: `name`, `stages`, `ranks`, `microbatches`, `chunks`, `costs`, `actions`,
/// `instructions`, `makespan`, `bubble`, `longest_rank_time`, `bubble_by_rank`, `peak_activations`,
/// `critical_path`. Actions that run at once stand in `actions` as one [`Pair`](crate::Pair).
///
/// # Errors
/// As [`simulate`](fn@simulate).
///
/// ```
/// use merak_pipe::{Costs, ScheduleKind, Size, UnitCosts, json};
/// let schedule = ScheduleKind::Gpipe.generate(Size::new(2, 1))?;
/// let text = json(&schedule, &Costs::uniform(UnitCosts::default(), 2))?;
/// assert!(text.contains(r#""actions":[["0F0","0B0"],["1F0","1B0"]]"#));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn json(schedule: &Schedule, costs: &Costs) -> Result<String> {
    document(schedule, costs, None)
}

/// [`json`] with `activation_bytes`, by stage what a microbatch keeps for `I` and for `W`, and
/// `peak_bytes`, by rank the most bytes kept at once, with `peak_bytes_by_grad`, what of them waits
/// for `I` and what for `W`.
///
/// # Errors
/// As [`simulate`](fn@simulate) and [`Schedule::peak_bytes`].
pub fn json_with_bytes(
    schedule: &Schedule,
    costs: &Costs,
    bytes: &ActivationBytes,
) -> Result<String> {
    document(schedule, costs, Some(bytes))
}

fn document(schedule: &Schedule, costs: &Costs, bytes: Option<&ActivationBytes>) -> Result<String> {
    let simulation = simulate(schedule, costs)?;
    let document = Document {
        name: &schedule.name,
        stages: schedule.size.stages(),
        ranks: schedule.size.ranks,
        microbatches: schedule.size.microbatches,
        chunks: schedule.size.chunks,
        costs,
        actions: (0..schedule.actions.len())
            .map(|rank| schedule.cells(rank).collect())
            .collect(),
        instructions: schedule.instructions()?,
        makespan: simulation.makespan,
        bubble: simulation.bubble(),
        longest_rank_time: simulation.longest_rank_time(),
        bubble_by_rank: simulation.timeline.bubble_by_rank(),
        peak_activations: simulation.peak_activations,
        activation_bytes: bytes,
        peak_bytes: bytes.map(|bytes| schedule.peak_bytes(bytes)).transpose()?,
        peak_bytes_by_grad: bytes
            .map(|bytes| schedule.peak_bytes_by_grad(bytes))
            .transpose()?,
        critical_path: simulation.critical_path,
    };
    Ok(serde_json::to_string(&document).expect("numbers, names and lists are JSON"))
}
