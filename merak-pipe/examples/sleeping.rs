//! How well the simulator predicts the engine: stages that sleep for a known time, under every
//! schedule.
//!
//! `cargo run --release -p merak-pipe --example sleeping [RANKS] [MILLISECONDS]`, 4 ranks and 4 ms
//! by default.
//!
//! Sleeping ranks need no core, so that as many ranks as wished run on two. The makespan is counted
//! from the first start of any rank, and each schedule takes the best of five runs: other programs
//! only make a run longer. The simulator is fed with the mean times of the actions of that run.
#![expect(clippy::print_stdout, reason = "an example prints")]

use merak_mpu::{Message, Packet, threads};
use merak_pipe::{
    Action, Costs, GroupLink, Kind, MicrobatchId, PipelineEngine, Result, Schedule, ScheduleKind,
    Size, StageId, StageModule, Timeline, run_threads, simulate,
};
use std::{
    collections::BTreeSet,
    convert::Infallible,
    env,
    error::Error,
    thread,
    time::{Duration, Instant},
};

const RUNS: usize = 5;
const DEADLINE: Duration = Duration::from_mins(1);

/// The stages of a rank: an action takes a time that depends on its kind and stage, and sends a
/// small message.
struct Sleeper {
    stages: usize,
    /// One action of a whole rank.
    unit: Duration,
    chunks: u32,
    /// Stages that recompute: within their backwards, except where an `R` came before.
    recomputing: BTreeSet<StageId>,
    recomputed: BTreeSet<(StageId, MicrobatchId)>,
}

impl Sleeper {
    fn sleep(&self, action: Action) {
        let unit = self.unit / self.chunks;
        let Action {
            stage,
            kind,
            microbatch,
        } = action;
        let inside = kind.moves_gradient()
            && self.recomputing.contains(&stage)
            && !self.recomputed.contains(&(stage, microbatch));
        let units = if kind == Kind::Backward { 2 } else { 1 } + u32::from(inside);
        // Every other stage is a quarter slower.
        let extra = if action.stage.0 % 2 == 1 {
            unit / 4
        } else {
            Duration::ZERO
        };
        thread::sleep(units * (unit + extra));
    }

    fn message(&self, action: Action) -> Option<Message> {
        let data = Box::new(vec![0.0_f32; 256]);
        action.output(self.stages).map(|_| {
            vec![Packet {
                shape: vec![256],
                data,
            }]
        })
    }
}

impl StageModule for Sleeper {
    type Payload = Message;
    type Error = Infallible;

    fn forward(&mut self, at: Action, _: Option<Message>) -> Result<Option<Message>, Infallible> {
        self.sleep(at);
        Ok(self.message(at))
    }

    fn backward_input(
        &mut self,
        at: Action,
        _: Option<Message>,
    ) -> Result<Option<Message>, Infallible> {
        self.sleep(at);
        Ok(self.message(at))
    }

    fn backward_weight(&mut self, at: Action) -> Result<(), Infallible> {
        self.sleep(at);
        Ok(())
    }

    fn backward(&mut self, at: Action, _: Option<Message>) -> Result<Option<Message>, Infallible> {
        self.sleep(at);
        Ok(self.message(at))
    }

    fn recompute(&mut self, at: Action) -> Result<(), Infallible> {
        self.sleep(at);
        self.recomputed.insert((at.stage, at.microbatch));
        Ok(())
    }
}

fn sleeper(schedule: &Schedule, unit: Duration) -> Sleeper {
    let actions = schedule.actions.iter().flatten();
    let separate = actions.filter(|action| action.kind == Kind::Recompute);
    Sleeper {
        stages: schedule.size.stages(),
        unit,
        chunks: u32::try_from(schedule.size.chunks).unwrap_or(1),
        recomputing: separate.map(|action| action.stage).collect(),
        recomputed: BTreeSet::new(),
    }
}

/// One run over links between threads.
fn over_threads(schedule: &Schedule, unit: Duration) -> Result<Timeline, Box<dyn Error>> {
    let ranks = 0..schedule.size.ranks;
    let mut modules: Vec<_> = ranks.map(|_| sleeper(schedule, unit)).collect();
    Ok(run_threads(schedule, &mut modules, DEADLINE)?)
}

/// One run over a process group of merak-mpu.
fn over_groups(schedule: &Schedule, unit: Duration) -> Result<Timeline, Box<dyn Error>> {
    let epoch = Instant::now();
    let options = threads::WorldOptions::default();
    let ranks = threads::run(schedule.size.ranks, options, |member| {
        let mut link = GroupLink::new(member.world_group()?);
        let engine = PipelineEngine::new(schedule, member.rank().0)?.with_epoch(epoch);
        let spans = engine.run(&mut sleeper(schedule, unit), &mut link)?;
        Ok::<_, Box<dyn Error + Send + Sync>>(spans)
    })?;
    Ok(Timeline { ranks })
}

/// Seconds from the first start to the last end.
fn makespan(timeline: &Timeline) -> f64 {
    let starts = timeline.ranks.iter().filter_map(|spans| spans.first());
    timeline.makespan() - starts.map(|span| span.start).fold(f64::INFINITY, f64::min)
}

/// Executed and predicted makespan of the best run, in seconds.
fn measure(
    schedule: &Schedule,
    run: impl Fn() -> Result<Timeline, Box<dyn Error>>,
) -> Result<(f64, f64), Box<dyn Error>> {
    let mut best = (f64::INFINITY, 0.0);
    for _ in 0..RUNS {
        let timeline = run()?;
        let executed = makespan(&timeline);
        if executed < best.0 {
            let costs = Costs::measured(schedule, &timeline)?;
            best = (executed, simulate(schedule, &costs)?.makespan);
        }
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut given = env::args().skip(1);
    let ranks: usize = given.next().map_or(Ok(4), |text| text.parse())?;
    let unit = Duration::from_millis(given.next().map_or(Ok(4), |text| text.parse())?);
    println!("| schedule | links | executed, ms | simulated, ms | ratio |\n|---|---|---|---|---|");
    for kind in ScheduleKind::ALL {
        let size = Size::new(ranks, 2 * ranks).with_chunks(kind.fixed_chunks().unwrap_or(2));
        let schedule = kind.generate(size)?;
        let outcomes = [
            (
                "threads",
                measure(&schedule, || over_threads(&schedule, unit))?,
            ),
            (
                "groups",
                measure(&schedule, || over_groups(&schedule, unit))?,
            ),
        ];
        for (links, (executed, simulated)) in outcomes {
            let (ms, ratio) = (1e3 * executed, executed / simulated);
            println!(
                "| `{kind}` | {links} | {ms:.1} | {:.1} | {ratio:.3} |",
                1e3 * simulated
            );
        }
    }
    Ok(())
}
