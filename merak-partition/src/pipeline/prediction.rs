//! How long a step will take.

use super::Pipeline;
use crate::{Result, StepCosts};
use merak_pipe::{Costs, Simulation, Timeline, simulate_on};
use std::fmt;

/// The time of a step that its costs predict.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// Seconds of each stage's phases on a core of their own, and of messages between stages.
    pub costs: Costs,
    /// The cores that the ranks of a pipeline share.
    pub cores: f64,
    /// The pipeline on these cores.
    pub simulation: Simulation,
    /// Seconds of the optimizer step, reduction of gradients included.
    pub update: f64,
}

impl Prediction {
    /// Seconds of the whole step.
    pub fn step(&self) -> f64 {
        self.simulation.makespan + self.update
    }
}

impl fmt::Display for Prediction {
    /// One line: the step and its parts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.1} ms a step predicted: {:.1} ms of pipeline, of which ranks wait {:.1} %, and {:.1} ms of update",
            1e3 * self.step(),
            1e3 * self.simulation.makespan,
            100.0 * self.simulation.bubble(),
            1e3 * self.update,
        )
    }
}

impl Pipeline {
    /// How long a step will take by these costs; `None` where nothing was measured.
    ///
    /// # Errors
    /// When an operation has no gradient.
    pub fn predict(&self, costs: &dyn StepCosts) -> Result<Option<Prediction>> {
        let mut updates = Vec::new();
        let tied = self.tied_across_ranks();
        for rank in 0..self.schedule.size.ranks {
            let params = self.rank_programs(rank)?.params;
            let trained = params.iter().filter(|param| param.trainable);
            let numel = trained.clone().map(|param| param.local.numel()).sum();
            let shared = trained.filter(|param| tied.iter().any(|(t, _)| t.name == param.name));
            let shared = shared.map(|param| param.local.numel()).sum();
            updates.extend(costs.update(numel, shared));
        }
        if updates.is_empty() {
            return Ok(None);
        }
        let by_stage = self.stage_costs(costs)?;
        let cores = costs.cores();
        // All ranks update at once, each at most at the speed of a core of its own.
        let longest = updates.iter().copied().fold(0.0, f64::max);
        let update = longest.max(updates.iter().sum::<f64>() / cores);
        Ok(Some(Prediction {
            simulation: simulate_on(&self.schedule, &by_stage, cores)?,
            costs: by_stage,
            cores,
            update,
        }))
    }

    /// A table of the times of each stage's phases in a run, per microbatch, beside the prediction.
    ///
    /// # Errors
    /// When the timeline is of another schedule.
    pub fn compare_stages(
        &self,
        prediction: &Prediction,
        ran: &Timeline,
    ) -> Result<Vec<StageTimes>> {
        let measured = Costs::measured(&self.schedule, ran)?;
        // On the share of a core that an action gets in the simulation.
        let predicted = Costs::measured(&self.schedule, &prediction.simulation.timeline)?;
        let backward = |costs: &Costs, stage: usize| {
            costs.input_grad[stage] + costs.weight_grad[stage] + costs.recompute[stage]
        };
        let stage = |stage| StageTimes {
            stage,
            rank: self.rank_of(stage),
            forward: [measured.forward[stage], predicted.forward[stage]],
            backward: [backward(&measured, stage), backward(&predicted, stage)],
        };
        Ok((0..self.cuts.num_stages()).map(stage).collect())
    }
}

/// Seconds of a microbatch on a stage: measured, and predicted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageTimes {
    /// The stage.
    pub stage: usize,
    /// The rank of the pipeline that runs it.
    pub rank: usize,
    /// Its forward.
    pub forward: [f64; 2],
    /// Its backward, recomputation included.
    pub backward: [f64; 2],
}

impl fmt::Display for StageTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stage, rank, .. } = self;
        let [forward, backward] = [self.forward, self.backward].map(|[measured, predicted]| {
            format!("{:.2} ms, predicted {:.2}", 1e3 * measured, 1e3 * predicted)
        });
        write!(
            f,
            "stage {stage} on rank {rank} of the pipeline: forward {forward}; backward {backward}"
        )
    }
}
