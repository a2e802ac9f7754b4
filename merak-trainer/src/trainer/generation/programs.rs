//! Forward programs, by size.

use crate::{error::Result, plan::Forward, stage::RankStages};
use merak_trace::Interpreter;
use std::{collections::BTreeMap, sync::Arc};

/// Programs that are kept; those of prompts have many sizes.
const MAX_PROGRAMS: usize = 32;

/// Forward programs by what they are made for.
#[derive(Debug, Default)]
pub(in crate::trainer) struct Programs {
    built: BTreeMap<Forward, Arc<[Interpreter]>>,
}

impl Programs {
    /// The programs of the rank's stages, built at their first use.
    pub(in crate::trainer) fn get(
        &mut self,
        stages: &RankStages,
        forward: Forward,
    ) -> Result<Arc<[Interpreter]>> {
        if let Some(found) = self.built.get(&forward) {
            return Ok(Arc::clone(found));
        }
        let numbers = stages.stages.iter().map(|stage| stage.number);
        let programs = stages.plan.inference_programs(numbers, forward)?;
        let interpreter = |program| {
            let backend = Arc::clone(&stages.backend);
            Interpreter::new(Arc::new(program), backend, Arc::clone(&stages.mpu) as _)
        };
        let interpreters: Arc<[_]> = programs.into_iter().map(interpreter).collect();
        if self.built.len() >= MAX_PROGRAMS {
            self.built.clear();
        }
        self.built.insert(forward, Arc::clone(&interpreters));
        Ok(interpreters)
    }
}
