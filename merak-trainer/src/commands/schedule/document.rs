//! What is printed of a schedule: a document, or a picture with figures.

use super::{Args, Failure, Format, MOST_DRAWN, num_actions, output};
use merak_ckpt::words::{Bytes, folded};
use merak_pipe::{
    ActivationBytes, Costs, Figure, GridStyle, PageOptions, PeakBytes, Schedule, Simulation,
    StageId, grid, html, json, json_with_bytes, simulate_on, svg, trace,
};
use std::io::{self, IsTerminal};

/// The schedule in the format that was asked for.
pub(super) fn shown(
    args: &Args,
    schedule: &Schedule,
    costs: &Costs,
    memory: &PageOptions,
) -> Result<String, Failure> {
    let simulate = || simulate_on(schedule, costs, args.cores.unwrap_or(f64::INFINITY));
    Ok(match args.format {
        Format::Csv => {
            if let Some(lost) = lost_in_csv(schedule, costs) {
                tracing::warn!(
                    "CSV holds no cost of recomputation: the times of {} need --check FILE --costs {lost}",
                    schedule.name
                );
            }
            schedule.to_csv()
        }
        Format::Json => match &memory.bytes {
            None => format!("{:#}", json(schedule, costs)?),
            Some(bytes) => format!("{:#}", json_with_bytes(schedule, costs, bytes)?),
        },
        Format::Html => html(schedule, costs, memory)?,
        Format::Svg => {
            let simulation = simulate()?;
            let named = Schedule {
                name: format!("{} under {costs}", schedule.name),
                ..schedule.clone()
            };
            svg(&named, &simulation)
        }
        Format::Trace => trace(&simulate()?.timeline),
        Format::Grid => {
            let simulation = simulate()?;
            let is_file = args.output.is_some();
            let columns = output::columns().filter(|_| !is_file);
            let drawn = drawn(schedule, &simulation, columns, is_file);
            let mut told = format!("{}\ncosts {costs}\n", figures(schedule, &simulation));
            if let Some(bytes) = &memory.bytes {
                told.push_str(&byte_figures(schedule, bytes)?);
            }
            format!("{drawn}\n{}", folded(&told, columns))
        }
    })
}

/// The picture of a step in characters.
fn drawn(
    schedule: &Schedule,
    simulation: &Simulation,
    columns: Option<usize>,
    is_file: bool,
) -> String {
    let colour = !is_file && io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let style = GridStyle {
        colour,
        columns,
        ..GridStyle::default()
    };
    match num_actions(schedule) {
        0..=MOST_DRAWN => grid(&simulation.timeline, style),
        more => format!("(a grid shows at most {MOST_DRAWN} actions, this schedule has {more})\n"),
    }
}

/// The costs of recomputation, as `--costs` takes them, that a schedule has and its CSV does not
/// hold: PyTorch's format, whose readers refuse cells that are no action.
fn lost_in_csv(schedule: &Schedule, costs: &Costs) -> Option<String> {
    let stages = (0..).zip(&costs.recompute);
    let of_stage = |(stage, cost): (usize, &f64)| {
        let keeps = schedule.no_recompute.contains(&StageId(stage));
        if keeps { 0.0 } else { *cost }
    };
    let lost: Vec<_> = stages.map(of_stage).collect();
    let text = |cost: &f64| Figure(*cost).to_string();
    let (first, rest) = lost.split_first()?;
    if rest.iter().any(|cost| cost.total_cmp(first).is_ne()) {
        let each: Vec<_> = lost.iter().map(text).collect();
        return Some(format!("R={}", each.join(":")));
    }
    (*first > 0.0).then(|| format!("R={}", text(first)))
}

/// One line of figures; a rank's own bubble lies between its first and its last action.
fn figures(schedule: &Schedule, simulation: &Simulation) -> String {
    let bubbles = simulation.timeline.bubble_by_rank().into_iter();
    let bubbles: Vec<_> = bubbles
        .map(|share| format!("{:.1}", 100.0 * share))
        .collect();
    let peaks = simulation.peak_activations.iter();
    let peaks: Vec<_> = peaks.map(|peak| Figure(*peak).to_string()).collect();
    let forwards = if schedule.is_forward_only() {
        "forwards only, "
    } else {
        ""
    };
    format!(
        "{}: {forwards}makespan {}, bubble {:.1} %, of each rank's own time {} %, peak activations per rank {}",
        schedule.name,
        Figure(simulation.makespan),
        100.0 * simulation.bubble(),
        bubbles.join(" "),
        peaks.join(" "),
    )
}

/// The peaks of all ranks in bytes, and the parts that wait for input and for weight gradients.
fn byte_figures(schedule: &Schedule, bytes: &ActivationBytes) -> Result<String, Failure> {
    let peaks = schedule.peak_bytes_by_grad(bytes)?;
    let list = |part: fn(&PeakBytes) -> u64| {
        let texts = peaks.iter().map(|peak| Bytes(part(peak)).to_string());
        texts.collect::<Vec<_>>().join(", ")
    };
    Ok(format!(
        "peak bytes of activations per rank: {}\n  of them for I: {}\n  of them for W: {}\n",
        list(|peak| peak.total()),
        list(|peak| peak.until_input_grad),
        list(|peak| peak.until_weight_grad),
    ))
}
