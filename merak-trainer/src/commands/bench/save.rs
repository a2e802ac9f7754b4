//! `merak bench save`: how long saving stops training.

use clap::Args as ClapArgs;
use merak_trainer::{
    CheckedArguments, MerakTrainer, Plan, Result, TrainerParts, Workload, data::Dataset, run_world,
};
use serde_json::{Value, json};
use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Gpt2Shape, MadeUp};

/// Times checkpoints of a GPT that are written at once and while training goes on; prints one JSON line.
#[derive(Debug, ClapArgs)]
pub(crate) struct Save {
    /// Folder for the checkpoints, on the disk that is measured.
    folder: PathBuf,
    /// Data-parallel replicas.
    #[arg(long, default_value_t = 1)]
    dp: usize,
    #[command(flatten)]
    shape: Gpt2Shape,
    /// Checkpoints of each kind; the median counts.
    #[arg(long, default_value_t = 3)]
    steps: usize,
}

impl Save {
    pub(super) fn run(&self) -> Result<Value, super::super::Failure> {
        const SEQ: usize = 16;
        if self.steps == 0 {
            return Err("--steps is 0, expected at least 1".into());
        }
        let args = self.arguments()?;
        let model = self.shape.model(SEQ)?;
        let plan = Arc::new(Plan::new(model.into(), &args)?);
        plan.check_memory(&args, &[Workload::Training])?;
        let data: Arc<dyn Dataset> = Arc::new(MadeUp {
            samples: 4 * self.dp * self.steps,
            seq: SEQ,
            vocab: self.shape.vocab,
        });
        let times = run_world(&args, |member| {
            let mpu = merak_mpu::Mpu::new(member, plan.degrees)?;
            let parts = TrainerParts {
                train_data: Some(Arc::clone(&data)),
                ..TrainerParts::default()
            };
            let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?;
            let timed = |work: &mut dyn FnMut() -> Result<()>| {
                let start = Instant::now();
                work().map(|()| start.elapsed())
            };
            let mut all = Vec::new();
            for _ in 0..self.steps {
                trainer.train_step()?;
                let whole = timed(&mut || trainer.save_checkpoint().map(drop))?;
                trainer.train_step()?;
                let stall = timed(&mut || trainer.save_later())?;
                trainer.finish_save()?;
                all.push((whole, stall));
            }
            Ok(all)
        })?;
        let median = |of: &dyn Fn(&(Duration, Duration)) -> Duration| {
            let mut all: Vec<_> = times[0].iter().map(of).collect();
            all.sort();
            all[all.len() / 2].as_secs_f64()
        };
        let (whole, stall) = (median(&|(whole, _)| *whole), median(&|(_, stall)| *stall));
        Ok(json!({
            "bytes": 12 * plan.graph.num_elements(),
            "save_ms": whole * 1e3,
            "stall_ms": stall * 1e3,
            "stall_share": stall / whole,
        }))
    }

    fn arguments(&self) -> Result<CheckedArguments, super::super::Failure> {
        super::checked(vec![
            ("dp", self.dp.to_string()),
            ("output_dir", self.folder.display().to_string()),
            ("per_device_train_batch_size", "1".to_owned()),
            ("save_total_limit", "1".to_owned()),
            ("max_steps", (2 * self.steps).to_string()),
        ])
    }
}
