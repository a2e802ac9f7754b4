//! Pipeline schedules as data: generate, prove, simulate and draw them, and bring your own
//! (merak-pipe).
//!
//! `cargo run -p merak-examples --example 02-schedules [RANKS [MICROBATCHES]]`, 4 and 8 by default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_examples::count;
use merak_pipe::{Costs, GridStyle, Schedule, ScheduleKind, Size, UnitCosts, grid, simulate};

fn main() -> Result<()> {
    let size = Size::new(count(1, "RANKS", 4)?, count(2, "MICROBATCHES", 8)?);
    compare_all(size)?;
    read_back(size)?;
    if size.ranks > 1 {
        refuse_a_wrong_one(size)?;
        postpone_weight_gradients()?;
    }
    Ok(())
}

/// Every schedule, with full recomputation: F = I = W = R = 1. One that does not take the size says
/// why.
fn compare_all(size: Size) -> Result<()> {
    let costs = Costs::uniform(UnitCosts::default(), size.stages());
    println!("schedule                    time  bubble  peak activations by rank");
    for kind in ScheduleKind::ALL {
        let schedule = match kind.generate(size) {
            Ok(schedule) => schedule,
            Err(error) => {
                println!("{:<24} {error}", kind.as_str());
                continue;
            }
        };
        schedule.validate()?;
        let simulation = simulate(&schedule, &costs)?;
        let (time, bubble) = (simulation.makespan, 100.0 * simulation.bubble());
        let peak = &simulation.peak_activations;
        println!("{:<24} {time:>7} {bubble:>6.1}%  {peak:?}", kind.as_str());
    }

    // The formulas of the papers: both take 4 (M + P - 1) units, 1F1B keeps at most P activations.
    let (ranks, microbatches) = (size.ranks as f64, size.microbatches as f64);
    let gpipe = simulate(&ScheduleKind::Gpipe.generate(size)?, &costs)?;
    let one_f_one_b = simulate(&ScheduleKind::OneFOneB.generate(size)?, &costs)?;
    let formula = 4.0 * (microbatches + ranks - 1.0);
    ensure!((gpipe.makespan - formula).abs() < 1e-9);
    ensure!((one_f_one_b.makespan - formula).abs() < 1e-9);
    let peaks = &one_f_one_b.peak_activations;
    ensure!(peaks.iter().all(|&peak| peak <= ranks));
    let picture = grid(&one_f_one_b.timeline, GridStyle::default());
    println!("\n1f1b:\n{picture}");
    Ok(())
}

/// A schedule is text, one line per rank, and the same schedule again.
fn read_back(size: Size) -> Result<()> {
    let schedule = ScheduleKind::OneFOneB.generate(size)?;
    let again = Schedule::from_csv("from a file", &schedule.to_csv(), size)?;
    ensure!(
        again.actions == schedule.actions,
        "a schedule reads back as it was"
    );
    Ok(())
}

/// Actions in the wrong order, as a hand-written file may have them: the proof says where and why.
fn refuse_a_wrong_one(size: Size) -> Result<()> {
    let mut wrong = ScheduleKind::OneFOneB.generate(size)?;
    wrong.actions[0].reverse();
    match wrong.validate() {
        Ok(()) => anyhow::bail!("a schedule that runs backwards must be refused"),
        Err(error) => println!("reversed: {error}\n"),
    }
    Ok(())
}

/// A schedule of one's own: the backward cut in halves, the weight gradients (W) moved into the
/// bubble.
fn postpone_weight_gradients() -> Result<()> {
    let text = "\
0F0,0F1,0I0,0W0,0I1,0W1
1F0,1I0,1F1,1I1,1W0,1W1
";
    let size = Size::new(2, 2);
    let own = Schedule::from_csv("own", text, size)?;
    own.validate()?;
    let costs: UnitCosts = "F=1,I=1,W=1,R=0,C=0".parse()?;
    let costs = Costs::uniform(costs, 2);
    let own = simulate(&own, &costs)?;
    let whole = simulate(&ScheduleKind::OneFOneB.generate(size)?, &costs)?;
    println!("own, {} instead of {}:", own.makespan, whole.makespan);
    print!("{}", grid(&own.timeline, GridStyle::default()));
    ensure!(
        own.makespan < whole.makespan,
        "postponed halves fill the bubble"
    );
    Ok(())
}
