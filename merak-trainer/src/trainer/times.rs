//! The times of a step's instructions, and the actions of a window of steps.

use super::{MerakTrainer, StepRecord, run_progress::Instruction};
use crate::error::Result;
use merak_pipe::{Kind, Span, Timeline, trace};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::{
    fmt,
    time::{Duration, Instant},
};

/// Where the time of some steps went, by rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Breakdown {
    /// Steps done.
    pub step: usize,
    /// Number of steps, up to that one, that the means are over.
    pub steps: usize,
    /// Each rank of the world.
    pub ranks: Vec<RankTimes>,
}

/// Mean seconds of a rank's instructions in a step, by its own clock. A device that computes on its
/// own counts where the rank waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RankTimes {
    /// Waiting for batches: `LoadMicroBatch`.
    pub load: f64,
    /// `ForwardPass`.
    pub forward: f64,
    /// `Recompute`, where it is an action of its own.
    pub recompute: f64,
    /// `BackwardPass`, recomputation within it included.
    pub backward: f64,
    /// `BackwardInput`.
    pub input_grad: f64,
    /// `BackwardWeight`.
    pub weight_grad: f64,
    /// `ReduceTiedGrads` and `ReduceGrads`, as far as the backward has not done it.
    pub reduce: f64,
    /// `OptimizerStep`.
    pub update: f64,
    /// The rest: waiting for messages of other ranks and for a core.
    pub wait: f64,
    /// The whole step.
    pub step: f64,
}

impl RankTimes {
    /// Adds a step.
    fn add(&mut self, record: &StepRecord) {
        let mut known = 0.0;
        for span in &record.spans {
            let seconds = span.end - span.start;
            known += seconds;
            *match span.action.kind {
                Kind::Forward => &mut self.forward,
                Kind::Recompute => &mut self.recompute,
                Kind::Backward => &mut self.backward,
                Kind::InputGrad => &mut self.input_grad,
                Kind::WeightGrad => &mut self.weight_grad,
            } += seconds;
        }
        for lap in &record.laps {
            let seconds = lap.time.as_secs_f64();
            known += seconds;
            *match lap.instruction {
                Instruction::LoadMicroBatch => &mut self.load,
                Instruction::ReduceGrads => &mut self.reduce,
                Instruction::OptimizerStep => &mut self.update,
            } += seconds;
        }
        let whole = record.time.as_secs_f64();
        // Two actions that run at once count twice.
        self.wait += (whole - known).max(0.0);
        self.step += whole;
    }

    fn columns(&mut self) -> [&mut f64; 10] {
        [
            &mut self.load,
            &mut self.forward,
            &mut self.recompute,
            &mut self.backward,
            &mut self.input_grad,
            &mut self.weight_grad,
            &mut self.reduce,
            &mut self.update,
            &mut self.wait,
            &mut self.step,
        ]
    }
}

/// The names of [`RankTimes::columns`].
const COLUMNS: [&str; 10] = [
    "load", "F", "R", "B", "I", "W", "reduce", "update", "wait", "step",
];

/// A line that tells the steps, and a table in milliseconds; columns without time are left out.
impl fmt::Display for Breakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranks = self.ranks.clone();
        let rows: Vec<_> = ranks
            .iter_mut()
            .map(|rank| rank.columns().map(|seconds| 1e3 * *seconds))
            .collect();
        let shown: Vec<_> = (0..COLUMNS.len())
            .filter(|&column| rows.iter().any(|row| row[column] > 0.0))
            .collect();
        let steps = match self.steps {
            1 => "of one step".to_owned(),
            steps => format!("a step, mean of {steps}"),
        };
        write!(
            f,
            "times of each rank up to step {}, ms {steps}\nrank",
            self.step
        )?;
        for &column in &shown {
            write!(f, "{:>8}", COLUMNS[column])?;
        }
        for (rank, row) in rows.iter().enumerate() {
            write!(f, "\n{rank:>4}")?;
            for &column in &shown {
                write!(f, "{:>8.1}", row[column])?;
            }
        }
        Ok(())
    }
}

/// What every rank of the world ran in a window of steps, on one time axis.
#[derive(Debug, Clone, PartialEq)]
pub struct StepProfile {
    /// For each rank its steps.
    ranks: Vec<Vec<ProfiledStep>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ProfiledStep {
    step: usize,
    spans: Vec<Span>,
    /// The step itself, and its instructions besides the actions.
    others: Vec<(String, f64, f64)>,
}

impl StepProfile {
    /// A trace for `chrome://tracing` and [Perfetto](https://ui.perfetto.dev): a track for each
    /// rank, on it an event for each step and within these an event for each action, under its name
    /// in the schedule, such as `0F3`, and for each other instruction.
    pub fn to_trace(&self) -> String {
        let spans = |steps: &Vec<ProfiledStep>| {
            let spans = steps.iter().flat_map(|step| &step.spans);
            spans.copied().collect()
        };
        let timeline = Timeline {
            ranks: self.ranks.iter().map(spans).collect(),
        };
        let text = trace(&timeline);
        let Ok(mut document) = serde_json::from_str::<Value>(&text) else {
            return text;
        };
        if let Some(events) = document["traceEvents"].as_array_mut() {
            for (rank, steps) in self.ranks.iter().enumerate() {
                for step in steps {
                    let others = step.others.iter().map(|(name, start, end)| {
                        json!({
                            "ph": "X", "name": name, "cat": "step", "pid": 0, "tid": rank,
                            "ts": 1e6 * start, "dur": 1e6 * (end - start),
                            "args": { "step": step.step },
                        })
                    });
                    events.extend(others);
                }
            }
        }
        document.to_string()
    }
}

/// What a trainer has gathered for its reports of times.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// Sums over the steps since the last breakdown.
    sums: RankTimes,
    steps: usize,
    profiled: Vec<(usize, StepRecord)>,
}

impl MerakTrainer {
    /// Reports the times of the step that was done, where the arguments ask for it. `is_last` says
    /// that no step follows in this call.
    ///
    /// # Communication
    /// A message from each rank to the first, after a logged step with `wall_clock_breakdown` and
    /// at the end of a profile. None otherwise.
    pub(super) fn report_times(&mut self, is_last: bool) -> Result<()> {
        let step = self.progress.global_step;
        if self.args.wall_clock_breakdown {
            self.report_breakdown(step)?;
        }
        let Some(first) = self.args.profile_start_step else {
            return Ok(());
        };
        let window = first..first.saturating_add(self.args.profile_steps);
        if window.contains(&step)
            && let Some(record) = self.records.last()
        {
            self.times.profiled.push((step, record.clone()));
        }
        if !self.times.profiled.is_empty() && (step + 1 >= window.end || is_last) {
            self.report_profile()?;
        }
        Ok(())
    }

    fn report_breakdown(&mut self, step: usize) -> Result<()> {
        if let Some(record) = self.records.last() {
            self.times.sums.add(record);
            self.times.steps += 1;
        }
        let (first, total) = (self.progress.first_step, self.progress.length.total_steps);
        if !self.args.logs_after(step, first, total) {
            return Ok(());
        }
        let mut own = std::mem::take(&mut self.times.sums);
        let steps = std::mem::take(&mut self.times.steps);
        for seconds in own.columns() {
            *seconds /= steps.max(1) as f64;
        }
        let ranks = self.gather(&own)?;
        if !ranks.is_empty() {
            let breakdown = Breakdown { step, steps, ranks };
            for callback in &mut self.parts.callbacks {
                callback.on_breakdown(&breakdown);
            }
        }
        Ok(())
    }

    fn report_profile(&mut self) -> Result<()> {
        let profiled = std::mem::take(&mut self.times.profiled);
        let epoch = self.stages.mpu.member().epoch();
        let steps: Vec<_> = profiled
            .iter()
            .map(|(step, record)| ProfiledStep::new(*step, record, epoch))
            .collect();
        let ranks = self.gather(&steps)?;
        if !ranks.is_empty() {
            let profile = StepProfile { ranks };
            for callback in &mut self.parts.callbacks {
                callback.on_profile(&profile);
            }
        }
        Ok(())
    }

    /// What each rank of the world has, on the first rank; nothing elsewhere.
    fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>> {
        let own = serde_json::to_vec(own).expect("plain data");
        let ranks = self.stages.mpu.world_group().gather_bytes(own, 0)?;
        let ranks = ranks.iter().map(|bytes| serde_json::from_slice(bytes));
        Ok(ranks
            .collect::<serde_json::Result<_>>()
            .expect("what a rank wrote"))
    }
}

impl ProfiledStep {
    /// A step's record, whose spans count from `epoch` already.
    fn new(step: usize, record: &StepRecord, epoch: Instant) -> Self {
        let since = |at: Instant| at.saturating_duration_since(epoch).as_secs_f64();
        let event = |name: String, start: Instant, time: Duration| {
            (name, since(start), since(start) + time.as_secs_f64())
        };
        let laps = record.laps.iter();
        let laps = laps.map(|lap| event(format!("{:?}", lap.instruction), lap.start, lap.time));
        let whole = event(format!("step {step}"), record.start, record.time);
        Self {
            step,
            spans: record.spans.clone(),
            others: std::iter::once(whole).chain(laps).collect(),
        }
    }
}
