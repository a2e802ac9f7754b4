//! `merak bench generate`: how fast a model continues prompts.

use clap::Args as ClapArgs;
use merak_ckpt::GenerateOptions;
use merak_trace::{Param, models::Model};
use merak_trainer::{
    CheckedArguments, Config, MerakTrainer, Plan, PlanInputs, Result, TrainerParts, Workload,
    metrics::{median, peak_resident_bytes},
    run_world,
};
use serde_json::{Value, json};
use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{super::degrees::DegreeOptions, Shape};

/// Seconds of one round on a rank.
struct Times {
    prefill: f64,
    decode: f64,
    /// Seconds of computation within both.
    busy: f64,
}

/// Times greedy decoding of a GPT-2 with random weights and made-up prompts; prints one JSON line.
#[derive(Debug, ClapArgs)]
pub(crate) struct Generate {
    #[command(flatten)]
    degrees: DegreeOptions,
    #[command(flatten)]
    shape: Shape,
    /// Prompts that are continued at once.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 32)]
    prompt: usize,
    /// New tokens of each prompt, at least 2.
    #[arg(long, default_value_t = 64)]
    new_tokens: usize,
    /// Times that all of it is done; the median counts.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Compute threads of each rank; unset: the cores shared out.
    #[arg(long)]
    threads: Option<usize>,
    /// Element type: f32 or bf16.
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Description of an adapter beside the model, as PEFT writes it.
    #[arg(long, value_name = "FILE")]
    lora_config: Option<String>,
}

impl Generate {
    pub(super) fn run(&self) -> Result<Value, super::super::Failure> {
        if self.new_tokens < 2 || self.prompt == 0 || self.batch == 0 || self.steps == 0 {
            return Err(
                "expected --new-tokens of at least 2, and --prompt, --batch and --steps of at least 1"
                    .into(),
            );
        }
        let length = self.prompt.saturating_add(self.new_tokens);
        let (config, args) = self.arguments(length)?;
        let model = self
            .shape
            .gpt2(length, "--prompt and --new-tokens: their sum")?;
        self.measure(model, length, &args)
            .map_err(|error| super::located(&config, error))
    }

    /// Measures a model that continues prompts to a length.
    fn measure(
        &self,
        model: Box<dyn Model>,
        length: usize,
        args: &CheckedArguments,
    ) -> Result<Value, super::super::Failure> {
        let inputs = PlanInputs::read(model.into(), args)?;
        let plan = Arc::new(Plan::new(&inputs, args)?.frozen());
        let positions = self.batch.saturating_mul(length);
        plan.check_memory(args, &[Workload::Generation { positions }])?;
        let prompts: Vec<Vec<u32>> = (0..self.batch)
            .map(|row| (0..self.prompt).map(|at| self.token(row, at)).collect())
            .collect();
        let times = run_world(args, |member| {
            let mpu = merak_mpu::Mpu::new(member, plan.draft.degrees)?;
            let parts = TrainerParts::default();
            let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, args, parts)?;
            self.timed(&mut trainer, &prompts, 2)?;
            (0..self.steps)
                .map(|_| self.timed(&mut trainer, &prompts, self.new_tokens))
                .collect::<Result<Vec<_>>>()
        })?;
        // The first replica has at least as many prompts as the others.
        let of_rank =
            |rank: usize, of: fn(&Times) -> f64| median(times[rank].iter().map(of).collect());
        let prefill = of_rank(0, |times| times.prefill);
        let step = of_rank(0, |times| times.decode) / (self.new_tokens - 1) as f64;
        let busy: Vec<_> = (0..times.len())
            .map(|rank| of_rank(rank, |times| times.busy / (times.prefill + times.decode)))
            .collect();
        let params = plan.graph.num_elements();
        let kept = |param: &Param| param.full.numel() * param.kept_dtype().size_bytes();
        let weights: usize = plan.graph.params().iter().map(kept).sum();
        Ok(json!({
            "batch": self.batch,
            "prompt": self.prompt,
            "new_tokens": self.new_tokens,
            "params": params,
            "prefill_ms": prefill * 1e3,
            "ms_per_step": step * 1e3,
            "tokens_per_s": self.batch as f64 / step,
            "weight_bytes_per_s": weights as f64 / step,
            "peak_bytes": peak_resident_bytes(),
            "busy": busy,
        }))
    }

    /// Continues the prompts once. The prefill ends with the first token of the last prompt.
    fn timed(
        &self,
        trainer: &mut MerakTrainer,
        prompts: &[Vec<u32>],
        max_new_tokens: usize,
    ) -> Result<Times> {
        let options = GenerateOptions {
            max_new_tokens,
            temperature: 0.0,
            ..GenerateOptions::default()
        };
        let start = Instant::now();
        let mut prefill = Duration::ZERO;
        trainer.generate_with(prompts, &options, &mut |token| {
            if token.position == self.prompt {
                prefill = start.elapsed();
            }
            ControlFlow::Continue(())
        })?;
        let spans = trainer.timeline().iter();
        Ok(Times {
            prefill: prefill.as_secs_f64(),
            decode: start.elapsed().saturating_sub(prefill).as_secs_f64(),
            // A replica without a prompt has no spans, whose sum would be a negative zero.
            busy: spans.fold(0.0, |busy, span| busy + (span.end - span.start)),
        })
    }

    /// The token at a place of a prompt.
    fn token(&self, row: usize, at: usize) -> u32 {
        ((7 * row + (at + row) * at) % self.shape.vocab) as u32
    }

    fn arguments(
        &self,
        length: usize,
    ) -> Result<(Config, CheckedArguments), super::super::Failure> {
        let mut options = self.degrees.options().to_vec();
        options.push((
            "--prompt and --new-tokens",
            "seq_length",
            length.to_string(),
        ));
        options.extend(super::of_dtype(&self.dtype)?);
        options.extend(super::of_ranks(self.threads, self.lora_config.as_deref()));
        super::configured(options, &[("per_device_train_batch_size", "1")])
    }
}
