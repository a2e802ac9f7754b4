//! The programs and parameters with which one rank of the pipeline trains.

use super::Plan;
use crate::Result;
use merak_trace::{Param, StageProgram};
use std::sync::Arc;

/// The programs of a rank's stages, in model order, and the parameters that they hold together.
#[derive(Debug, Clone)]
pub(crate) struct RankPrograms {
    /// Number and program of each stage.
    pub(crate) stages: Vec<(usize, Arc<StageProgram>)>,
    /// The parameters of all of them, each once, by first use.
    pub(crate) params: Vec<Param>,
}

/// A use of a parameter, with a gradient of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParamUse {
    /// Index among the rank's parameters.
    pub(crate) param: usize,
    /// Whether the rank has no earlier use of it.
    pub(crate) is_first: bool,
}

impl RankPrograms {
    /// The programs that `rank` of the pipeline trains with.
    ///
    /// # Errors
    /// When an operation has no gradient.
    pub(crate) fn new(plan: &Plan, rank: usize) -> Result<Self> {
        let program = |stage| Ok((stage, Arc::new(plan.training_program(stage)?)));
        Ok(Self::of(
            plan.stages_of(rank).map(program).collect::<Result<_>>()?,
        ))
    }

    /// Numbered programs as the stages of one rank.
    pub(crate) fn of(stages: Vec<(usize, Arc<StageProgram>)>) -> Self {
        let mut params: Vec<Param> = Vec::new();
        for param in stages.iter().flat_map(|(_, program)| program.params()) {
            if !params.iter().any(|known| known.name == param.name) {
                params.push(param.clone());
            }
        }
        Self { stages, params }
    }

    /// Where each parameter of a program stands among the rank's.
    pub(crate) fn places(&self, program: &StageProgram) -> Vec<usize> {
        let place = |param: &Param| {
            let mut known = self.params.iter();
            known
                .position(|known| known.name == param.name)
                .expect("the rank has the parameters of its stages")
        };
        program.params().iter().map(place).collect()
    }

    /// The uses of all stages in model order, which is that of the slots of their gradients.
    pub(crate) fn uses(&self) -> Vec<ParamUse> {
        let mut uses: Vec<ParamUse> = Vec::new();
        for (_, program) in &self.stages {
            let places = self.places(program);
            for port in &program.grads {
                let param = places[port.param.index()];
                let is_first = !uses.iter().any(|known| known.param == param);
                uses.push(ParamUse { param, is_first });
            }
        }
        uses
    }
}
