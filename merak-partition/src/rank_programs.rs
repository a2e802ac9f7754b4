//! The programs and parameters with which one rank of the pipeline trains.

use merak_trace::{Param, StageProgram};
use std::sync::Arc;

/// The programs of a rank's stages, in model order, and the parameters that they hold together.
#[derive(Debug, Clone)]
pub struct RankPrograms {
    /// Number and program of each stage.
    pub stages: Vec<(usize, Arc<StageProgram>)>,
    /// The parameters of all of them, each once, by first use.
    pub params: Vec<Param>,
}

/// A use of a parameter, with a gradient of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamUse {
    /// Index among the rank's parameters.
    pub param: usize,
    /// Whether the rank has no earlier use of it.
    pub is_first: bool,
}

impl RankPrograms {
    /// Numbered programs as the stages of one rank.
    pub fn of(stages: Vec<(usize, Arc<StageProgram>)>) -> Self {
        let mut params: Vec<Param> = Vec::new();
        for param in stages.iter().flat_map(|(_, program)| program.params()) {
            if !params.iter().any(|known| known.name == param.name) {
                params.push(param.clone());
            }
        }
        Self { stages, params }
    }

    /// Where each parameter of a program stands among the rank's.
    ///
    /// # Panics
    /// If the program is not one of the rank's.
    pub fn places(&self, program: &StageProgram) -> Vec<usize> {
        let place = |param: &Param| {
            let mut known = self.params.iter();
            known
                .position(|known| known.name == param.name)
                .expect("the rank has the parameters of its stages")
        };
        program.params().iter().map(place).collect()
    }

    /// The uses of all stages in model order, which is that of the slots of their gradients.
    pub fn uses(&self) -> Vec<ParamUse> {
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
