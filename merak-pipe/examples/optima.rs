//! `auto` beside the shortest schedules that a solver found.
//!
//! `cargo run --release -p merak-pipe --example optima FILE`; `tests/goldens/optima.py` writes such
//! files. Prints one line for each case that is longer than the solver's, then the longest of all.
#![expect(clippy::print_stdout, reason = "an example prints")]

use merak_pipe::{AutoLimits, Costs, Size, auto};
use std::{env, error::Error, fs};

/// A pipeline, and the makespan of the shortest schedule that is known.
#[derive(serde::Deserialize)]
struct Solved {
    ranks: usize,
    microbatches: usize,
    chunks: usize,
    limit: Option<f64>,
    #[serde(rename = "F")]
    forward: Vec<f64>,
    #[serde(rename = "I")]
    input_grad: Vec<f64>,
    #[serde(rename = "W")]
    weight_grad: Vec<f64>,
    #[serde(rename = "C")]
    hop: Vec<f64>,
    optimum: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let file = env::args().nth(1).ok_or("name a file of solved cases")?;
    let (mut cases, mut longer, mut worst) = (0, 0, f64::NEG_INFINITY);
    for line in fs::read_to_string(file)?.lines() {
        let case: Solved = serde_json::from_str(line)?;
        let size = Size::new(case.ranks, case.microbatches).with_chunks(case.chunks);
        let costs = Costs {
            forward: case.forward,
            input_grad: case.input_grad,
            weight_grad: case.weight_grad,
            recompute: vec![0.0; size.stages()],
            hop: case.hop,
            overlap: 1.0,
        };
        let limits = AutoLimits {
            peak_activations: case
                .limit
                .map_or_else(Vec::new, |limit| vec![limit; case.ranks]),
            ..AutoLimits::default()
        };
        let makespan = auto(size, &costs, &limits)?.simulation.makespan;
        let gap = makespan / case.optimum - 1.0;
        cases += 1;
        worst = gap.max(worst);
        if gap > 1e-9 {
            longer += 1;
            println!("{:.2} % above: {makespan} for {line}", 100.0 * gap);
        }
    }
    println!(
        "{longer} of {cases} are longer, at most {:.2} %",
        100.0 * worst
    );
    Ok(())
}
