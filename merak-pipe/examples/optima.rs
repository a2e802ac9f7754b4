//! `auto` beside the shortest schedules that a solver found.
//!
//! `cargo run --release -p merak-pipe --example optima FILE`; `tests/goldens/optima.py` writes such
//! files. Prints one line for each case that is longer than the solver's, then the longest of all.
#![expect(clippy::print_stdout, reason = "an example prints")]

use std::{env, error::Error, fs};

#[path = "../tests/it/solved.rs"]
mod solved;

fn main() -> Result<(), Box<dyn Error>> {
    let file = env::args().nth(1).ok_or("name a file of solved cases")?;
    let (mut cases, mut longer, mut worst) = (0, 0, f64::NEG_INFINITY);
    for line in fs::read_to_string(file)?.lines() {
        let case: solved::Solved = serde_json::from_str(line)?;
        let makespan = case.search()?.simulation.makespan;
        let gap = makespan / case.optimum - 1.0;
        cases += 1;
        worst = gap.max(worst);
        if gap > 1e-9 {
            longer += 1;
            println!(
                "{:.2} % above, bound {}: {makespan} for {line}",
                100.0 * gap,
                case.bound
            );
        }
    }
    println!(
        "{longer} of {cases} are longer, at most {:.2} %",
        100.0 * worst
    );
    Ok(())
}
