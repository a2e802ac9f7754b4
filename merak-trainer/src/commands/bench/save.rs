//! `merak bench save`: how long saving stops training.

use clap::Args as ClapArgs;
use merak_trace::models::Model;
use merak_trainer::{
    CheckedArguments, Config, MerakTrainer, Plan, PlanInputs, Result, Workload, data::Dataset,
    metrics::median, run_world,
};
use serde_json::{Value, json};
use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{MadeUp, Shape, trainer_on};

/// Times that the folder is removed before that fails.
const REMOVALS: u32 = 500;

/// Times checkpoints of a GPT that are written at once and while training goes on; prints one JSON
/// line.
#[derive(Debug, ClapArgs)]
pub(crate) struct Save {
    /// Folder on the disk that is measured; the checkpoints go into one within, which is removed.
    folder: PathBuf,
    /// Data-parallel replicas.
    #[arg(long, default_value_t = 1)]
    dp: usize,
    /// ZeRO stage.
    #[arg(long, default_value_t = 0)]
    zero: usize,
    #[command(flatten)]
    shape: Shape,
    /// Length of the sequences, of which each replica trains on one per step.
    #[arg(long, default_value_t = 512)]
    seq: usize,
    /// Checkpoints of each kind; the median counts.
    #[arg(long, default_value_t = 3)]
    steps: usize,
}

/// Times of one round on one rank.
struct Round {
    /// A step while nothing is saved.
    step: Duration,
    /// A checkpoint that is written at once.
    save: Duration,
    /// Time for which a checkpoint written during training stops the training.
    stall: Duration,
    /// Steps until that checkpoint is complete.
    steps: u32,
    /// Time that those steps and stalls take beyond the same steps while nothing is saved.
    lost: Duration,
}

impl Save {
    pub(super) fn run(&self) -> Result<Value, super::super::Failure> {
        if self.steps == 0 {
            return Err("--steps is 0, expected at least 1".into());
        }
        // What else lies in the folder stays, and nothing of this.
        let own = self.folder.join(format!(".merak-bench-{}", process::id()));
        let (config, args) = self.arguments(&own)?;
        let model = self.shape.gpt2(self.seq, "--seq")?;
        let measured = self.measure(model, &args);
        remove(&own).map_err(merak_trainer::Error::writing(&own))?;
        measured.map_err(|error| super::located(&config, error))
    }

    /// Measures the checkpoints of a model.
    fn measure(
        &self,
        model: Box<dyn Model>,
        args: &CheckedArguments,
    ) -> Result<Value, super::super::Failure> {
        let plan = Arc::new(Plan::new(&PlanInputs::read(model.into(), args)?, args)?);
        plan.check_memory(args, &[Workload::Training])?;
        let data: Arc<dyn Dataset> = Arc::new(MadeUp {
            samples: 64 * self.dp,
            seq: self.seq,
            vocab: self.shape.vocab,
        });
        let rounds = run_world(args, |member| {
            let mut trainer = trainer_on(&data, member, &plan, args)?;
            // The first step touches memory.
            trainer.train_step()?;
            (0..self.steps)
                .map(|_| round(&mut trainer))
                .collect::<Result<Vec<_>>>()
        })?;
        let median = |of: &dyn Fn(&Round) -> f64| median(rounds[0].iter().map(of).collect());
        let (save, stall) = (median(&|r| ms(r.save)), median(&|r| ms(r.stall)));
        Ok(json!({
            "bytes": 12 * plan.graph.num_elements(),
            "save_ms": save,
            "stall_ms": stall,
            "stall_share": stall / save,
            "step_ms": median(&|r| ms(r.step)),
            "steps_meanwhile": median(&|r| f64::from(r.steps)),
            "lost_ms": median(&|r| ms(r.lost)),
        }))
    }

    fn arguments(
        &self,
        folder: &Path,
    ) -> Result<(Config, CheckedArguments), super::super::Failure> {
        let options = vec![
            ("--dp", "dp", self.dp.to_string()),
            ("--zero", "zero_stage", self.zero.to_string()),
            ("FOLDER", "output_dir", folder.display().to_string()),
        ];
        let always = [
            ("per_device_train_batch_size", "1"),
            ("save_total_limit", "1"),
            ("max_steps", "1000000"),
        ];
        super::configured(options, &always)
    }
}

/// Removes a folder of checkpoints, of which a thread may still be removing an older one.
fn remove(folder: &Path) -> io::Result<()> {
    for _ in 0..REMOVALS {
        match fs::remove_dir_all(folder) {
            Ok(()) => return Ok(()),
            Err(_) if !folder.exists() => return Ok(()),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
    fs::remove_dir_all(folder)
}

/// A checkpoint at once and one while training goes on, each after a step.
fn round(trainer: &mut MerakTrainer) -> Result<Round> {
    let step = timed(|| trainer.train_step().map(drop))?;
    let save = timed(|| trainer.save_checkpoint().map(drop))?;
    // The next checkpoint is of another step, so that it replaces none.
    trainer.train_step()?;
    let mut steps = 0;
    let meanwhile = timed(|| {
        trainer.save_later()?;
        loop {
            steps += 1;
            trainer.train_step()?;
            if !trainer.finish_save_if_written()? {
                return Ok(());
            }
        }
    })?;
    Ok(Round {
        step,
        save,
        stall: trainer.save_stall(),
        steps,
        lost: meanwhile.saturating_sub(step * steps),
    })
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work().map(|()| start.elapsed())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
