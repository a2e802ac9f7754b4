//! Trains a GPT over data x tensor x pipeline ranks on data of one's own (merak-trainer as a
//! library).
//!
//! `cargo run -p merak-examples --example 11-train-3d [DP [TP [PP]]]`, each 2 by default; the
//! global batch of 16 samples and the model's 4 heads and 4 layers are divided among them.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_ckpt::GenerateOptions;
use merak_examples::count;
use merak_mpu::Mpu;
use merak_trace::models;
use merak_trainer::{
    Callback, MerakArguments, MerakTrainer, Plan, PlanInputs, StepReport, TrainOutput,
    TrainerControl, TrainerParts,
    data::{Dataset, LABELS, Sample, SampleTensor},
    run_world, threads_per_rank,
};
use std::sync::Arc;

const VOCAB: usize = 16;
const SEQ: usize = 12;

/// Made-up sequences: each counts upwards from somewhere, in steps of 1, 2 or 3.
#[derive(Debug)]
struct Counting;

impl Counting {
    fn token(sample: usize, position: usize) -> usize {
        (sample / 3 + (sample % 3 + 1) * position) % VOCAB
    }
}

impl Dataset for Counting {
    fn len(&self) -> usize {
        3 * VOCAB
    }

    /// Inputs of the model, and for each the token that follows it.
    fn get(&self, index: usize) -> merak_trainer::Result<Sample> {
        let tokens = |first: usize| {
            let tokens = (first..first + SEQ).map(|position| Self::token(index, position));
            SampleTensor::vector(tokens.map(|token| i64::from(token as u32)).collect())
        };
        Ok(Sample::from([
            ("input_ids".to_owned(), tokens(0)),
            (LABELS.to_owned(), tokens(1)),
        ]))
    }
}

/// Prints now and then.
struct Print;

impl Callback for Print {
    fn on_step(&mut self, report: &StepReport, _: &mut TrainerControl) {
        if report.step == 1 || report.step.is_multiple_of(10) {
            let StepReport {
                step,
                loss,
                grad_norm,
                lr,
                ..
            } = report;
            println!("step {step:>3}  loss {loss:.4}  gradient norm {grad_norm:.3}  lr {lr:.1e}");
        }
    }
}

fn main() -> Result<()> {
    let mut args = MerakArguments::default();
    (args.dp, args.tp, args.pp) = (count(1, "DP", 2)?, count(2, "TP", 2)?, count(3, "PP", 2)?);
    ensure!(4_usize.is_multiple_of(args.dp), "DP divides 4");
    args.per_device_train_batch_size = 4 / args.dp;
    args.gradient_accumulation_steps = 4; // microbatches, which fill the pipeline
    args.seq_length = Some(SEQ.into());
    args.max_steps = 60;
    args.learning_rate = 5e-3;
    args.warmup_steps = 5;
    let args = args.check()?;

    let config = serde_json::json!({
        "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 32, "n_layer": 4, "n_head": 4,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    });
    // The plan is data, the same on every rank: the split graph, the stages, the schedule.
    let model = models::from_config(&config)?;
    let plan = Arc::new(Plan::new(&PlanInputs::read(model.into(), &args)?, &args)?);
    println!("{}", plan.partition_report()?);

    let outputs = run_world(&args, |member| {
        let mpu = Mpu::new(member, args.degrees())?;
        let mut parts = TrainerParts {
            train_data: Some(Arc::new(Counting)),
            num_threads: threads_per_rank(&args),
            ..TrainerParts::default()
        };
        if mpu.is_rank_0() {
            parts.callbacks.push(Box::new(Print));
        }
        let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?;
        let output = trainer.train()?;
        Ok((output, continue_counting(&mut trainer)?))
    })?;

    let (
        TrainOutput {
            training_loss,
            tokens,
            ..
        },
        told,
    ) = &outputs[0];
    println!(
        "mean loss {training_loss:.4} over {tokens} tokens; 5, 7, 9, 11 goes on with {told:?}"
    );
    ensure!(*told == [13, 15, 1, 3], "it has learnt to count");
    ensure!(
        outputs.iter().all(|(_, other)| other == told),
        "every rank has the same"
    );
    Ok(())
}

/// Asks the model that is spread over all ranks; every rank calls this.
fn continue_counting(trainer: &mut MerakTrainer) -> merak_trainer::Result<Vec<u32>> {
    let options = GenerateOptions {
        max_new_tokens: 4,
        temperature: 0.0,
        ..GenerateOptions::default()
    };
    let mut completions = trainer.generate(&[vec![5, 7, 9, 11]], &options)?;
    Ok(completions.remove(0).ids)
}
