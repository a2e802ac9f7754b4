//! `merak bench`: measurements of this machine.

mod collectives;
mod generate;
mod pipeline;
mod save;

use super::{Outcome, degrees::DegreeOptions, output, world};
use clap::{ArgAction, Args as ClapArgs, Subcommand};
use merak_ckpt::cli::at_least_one;
use merak_mpu::{GroupKind, LinkSpeed, Member, Mpu, SlowLink};
use merak_trace::models;
use merak_trainer::{
    CheckedArguments, Config, Error, Given, MerakTrainer, Plan, PlanInputs, Result, StepReport,
    TrainerParts, Workload,
    data::{Dataset, LABELS, Sample, SampleTensor},
    metrics::{Screen, median, peak_device_bytes, peak_resident_bytes},
    run_world,
};
use serde_json::json;
use std::{process::ExitCode, sync::Arc, time::Duration};

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    Gpt(Box<Gpt>),
    Collectives(collectives::Collectives),
    Generate(generate::Generate),
    Pipeline(pipeline::Pipeline),
    Save(save::Save),
}

/// Times training steps of a GPT on made-up tokens and prints one JSON line.
#[derive(Debug, ClapArgs)]
#[command(
    mut_arg("layers", |arg| arg.default_value("8")),
    mut_arg("hidden", |arg| arg.default_value("512")),
    mut_arg("heads", |arg| arg.default_value("8")),
    mut_arg("vocab", |arg| arg.default_value("8192"))
)]
pub(crate) struct Gpt {
    #[command(flatten)]
    degrees: DegreeOptions,
    /// Ranks that share each sequence.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    sp: usize,
    /// ZeRO stage.
    #[arg(long, default_value_t = 0)]
    zero: usize,
    #[command(flatten)]
    shape: Shape,
    /// Length of the sequences.
    #[arg(long, default_value_t = 256)]
    seq: usize,
    /// Samples of a step over all replicas.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Microbatches of a step over all replicas.
    #[arg(long, default_value_t = 8)]
    microbatches: usize,
    /// Steps that are timed.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Steps before them.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Compute threads of each rank; unset: the cores shared out.
    #[arg(long)]
    threads: Option<usize>,
    /// Pipeline schedule, which the result names; unset: `auto`, which searches one, and `1f1b` on
    /// one rank.
    #[arg(long)]
    schedule: Option<String>,
    /// Stages per rank, under `interleaved_1f1b` and `auto`.
    #[arg(long, default_value_t = 1)]
    virtual_stages: usize,
    /// Rule that gives the model's pieces to stages.
    #[arg(long, default_value = "autopipe", value_name = "METHOD")]
    partition: String,
    /// Library that executes the graph's nodes.
    #[arg(long, default_value = "candle")]
    backend: String,
    /// What it executes them on.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Element type: f32, bf16, or f16 with backend tch.
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Units for bf16 that products may use: matrix, vector or none.
    #[arg(long, default_value = "matrix")]
    units: String,
    /// Description of an adapter that is trained in place of the model, as PEFT writes it.
    #[arg(long, value_name = "FILE")]
    lora_config: Option<String>,
    /// What runs while sums over tensor-parallel ranks pass, 0 to 3.
    #[arg(long, value_name = "LEVEL", default_value_t = 0)]
    overlap: usize,
    /// Whether tensor-parallel ranks share out the vocabulary; false: each has all of it.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    parallel_vocab: bool,
    /// Tensor-parallel ranks share out norms and residual sums by positions.
    #[arg(long)]
    sequence_parallel: bool,
    /// The backward computes each layer's activations again.
    #[arg(long)]
    recompute: bool,
    /// Megabytes in a second that each rank exchanges with its replicas, as over a slower network.
    #[arg(long, value_name = "MB", value_parser = speed)]
    replica_link: Option<f64>,
    /// Megabytes in a second that the tensor-parallel ranks of a layer exchange.
    #[arg(long, value_name = "MB", value_parser = speed)]
    tensor_link: Option<f64>,
    /// Microseconds from the start of each collective on these links to its first byte.
    #[arg(long, value_name = "MICROSECONDS", value_parser = microseconds)]
    link_latency: Option<f64>,
}

/// What a rank tells of the steps.
struct RankOutcome {
    reports: Vec<StepReport>,
    /// How long its links to the replicas and within a layer were busy, and how long it stood still
    /// for them, in the measured steps.
    on_links: [Option<[Duration; 2]>; 2],
    state_bytes: usize,
    /// Bytes of copies of gradients on their way to replicas.
    exchange_bytes: usize,
}

/// A speed that can be waited for.
fn speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (0.001..=1e9).contains(&speed) {
        Ok(speed)
    } else {
        Err("expected a number from 0.001 to 1e9".to_owned())
    }
}

/// A latency of a second at most.
fn microseconds(text: &str) -> Result<f64, String> {
    let latency: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (0.0..=1e6).contains(&latency) {
        Ok(latency)
    } else {
        Err("expected a number from 0 to 1e6".to_owned())
    }
}

pub(crate) fn run(bench: &Bench, screen: &Screen) -> Outcome {
    if !matches!(bench, Bench::Collectives(_)) {
        world::expect_one("merak bench")?;
    }
    let lines = match bench {
        Bench::Gpt(gpt) => vec![gpt.run()?],
        Bench::Collectives(collectives) => collectives.run(screen)?,
        Bench::Generate(generate) => vec![generate.run()?],
        Bench::Pipeline(pipeline) => pipeline.run()?,
        Bench::Save(save) => vec![save.run()?],
    };
    let lines: Vec<_> = lines.iter().map(ToString::to_string).collect();
    // Only the first of several processes has any.
    if !lines.is_empty() {
        output::print(lines.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Gpt {
    fn run(&self) -> Result<serde_json::Value, super::Failure> {
        if self.steps == 0 {
            return Err("--steps is 0, expected at least 1".into());
        }
        if self.link_latency.is_some() && self.replica_link.is_none() && self.tensor_link.is_none()
        {
            return Err("--link-latency goes with --replica-link or --tensor-link".into());
        }
        let (config, args) = self.arguments()?;
        let model = self.shape.gpt(self.seq)?;
        self.measure(model, &args)
            .map_err(|error| located(&config, error))
    }

    /// Measures the training steps of a model.
    fn measure(
        &self,
        model: Box<dyn models::Model>,
        args: &CheckedArguments,
    ) -> Result<serde_json::Value, super::Failure> {
        let plan = Arc::new(Plan::new(&PlanInputs::read(model.into(), args)?, args)?);
        plan.check_memory(args, &[Workload::Training])?;
        let samples = self
            .steps
            .checked_add(self.warmup)
            .and_then(|steps| steps.checked_mul(self.batch))
            .ok_or("--steps, --warmup and --batch are more samples than can be counted")?;
        let data: Arc<dyn Dataset> = Arc::new(MadeUp {
            samples,
            seq: self.seq,
            vocab: self.shape.vocab,
        });
        let results = self.train(&plan, args, &data)?;
        let RankOutcome {
            reports, on_links, ..
        } = &results[0];
        let counted = reports[self.warmup..].iter();
        let median = median(counted.map(|report| report.time.as_secs_f64()).collect());
        let needs = plan.memory(args, &[])?;
        let planned_exchange = needs.iter().map(|need| need.exchange);
        let planned = needs
            .iter()
            .map(|need| need.weights + need.gradients + need.optimizer);
        let ms_per_step = |time: Duration| time.as_secs_f64() * 1e3 / self.steps as f64;
        let [replica, tensor] = on_links.map(|on_link| on_link.map(|times| times.map(ms_per_step)));
        Ok(json!({
            "mode": self.mode(),
            "schedule": plan.schedule_name(),
            "tokens_per_s": (self.batch * self.seq) as f64 / median,
            "ms_per_step": median * 1e3,
            "params": plan.graph.num_elements(),
            "first_loss": reports[0].loss,
            "last_loss": reports[reports.len() - 1].loss,
            "peak_bytes": peak_resident_bytes(),
            "device_peak_bytes": peak_device_bytes(args),
            "state_bytes": results.iter().map(|rank| rank.state_bytes).max(),
            "planned_state_bytes": planned.max(),
            "exchange_bytes": results.iter().map(|rank| rank.exchange_bytes).max(),
            "planned_exchange_bytes": planned_exchange.max(),
            "replica_link_ms": replica.map(|[busy, _]| busy),
            "replica_wait_ms": replica.map(|[_, waited]| waited),
            "tensor_link_ms": tensor.map(|[busy, _]| busy),
            "tensor_wait_ms": tensor.map(|[_, waited]| waited),
        }))
    }

    /// Makes the steps on all ranks.
    fn train(
        &self,
        plan: &Arc<Plan>,
        args: &CheckedArguments,
        data: &Arc<dyn Dataset>,
    ) -> Result<Vec<RankOutcome>> {
        run_world(args, |member| {
            let links = self.links()?;
            let member = links
                .iter()
                .flatten()
                .fold(member, |member, link| link.joined_by(&member));
            let mut trainer = trainer_on(data, member, plan, args)?;
            let mut reports = Vec::new();
            let times = || {
                let of = |link: &SlowLink| [link.busy(), link.waited()];
                links.each_ref().map(|link| link.as_ref().map(of))
            };
            let mut before = times();
            for step in 0..self.warmup + self.steps {
                if step == self.warmup {
                    before = times();
                }
                reports.push(trainer.train_step()?);
            }
            let after = times();
            let on_links = [0, 1].map(|link| {
                let (before, after) = before[link].zip(after[link])?;
                Some([0, 1].map(|kind| after[kind].saturating_sub(before[kind])))
            });
            let need = trainer.memory();
            Ok(RankOutcome {
                reports,
                on_links,
                state_bytes: need.weights + need.gradients + need.optimizer,
                exchange_bytes: need.exchange,
            })
        })
    }

    /// The links to the replicas and within a layer that are to be slower ones.
    fn links(&self) -> Result<[Option<SlowLink>; 2]> {
        let latency = Duration::from_secs_f64(self.link_latency.unwrap_or_default() / 1e6);
        let of = |speed: Option<f64>, kind: GroupKind| {
            let speed = speed.map(|speed| LinkSpeed {
                latency,
                bytes_per_second: speed * 1e6,
            });
            speed
                .map(|speed| SlowLink::new(speed, kind.as_str()))
                .transpose()
        };
        Ok([
            of(self.replica_link, GroupKind::DataSequence)?,
            of(self.tensor_link, GroupKind::Tensor)?,
        ])
    }

    /// The run as a configuration.
    fn arguments(&self) -> Result<(Config, CheckedArguments), super::Failure> {
        let dtype = of_dtype(&self.dtype)?;
        let batches = |what: &str, number: usize, of: &str, by: usize| {
            let divides = by != 0 && number != 0 && number.is_multiple_of(by);
            if divides {
                Ok(number / by)
            } else {
                Err(format!(
                    "{what} is {number}, expected a multiple of {of}, which is {by}"
                ))
            }
        };
        let microbatches = batches("--microbatches", self.microbatches, "--dp", self.degrees.dp)?;
        let samples = batches("--batch", self.batch, "--microbatches", self.microbatches)?;
        let mut options = self.options();
        options.extend([
            ("--schedule", "train_schedule", self.schedule().to_owned()),
            (
                "--virtual-stages",
                "virtual_stages",
                self.virtual_stages.to_string(),
            ),
            ("--partition", "partition_method", self.partition.clone()),
            (
                "--microbatches",
                "gradient_accumulation_steps",
                microbatches.to_string(),
            ),
            (
                "--batch",
                "per_device_train_batch_size",
                samples.to_string(),
            ),
            ("--backend", "compute.backend", self.backend.clone()),
            ("--device", "compute.device", self.device.clone()),
            ("--units", "compute.units", self.units.clone()),
            (
                "--recompute",
                "activation_checkpointing",
                self.recompute.to_string(),
            ),
        ]);
        options.extend(dtype);
        options.extend(of_ranks(self.threads, self.lora_config.as_deref()));
        let always = [
            ("learning_rate", "3e-4"),
            ("lr_scheduler_type", "constant"),
            ("weight_decay", "0.01"),
            ("max_grad_norm", "0"),
            ("num_train_epochs", "1"),
        ];
        configured(options, &always)
    }

    /// The degrees and what ranks share out.
    fn options(&self) -> Options {
        let shared_vocab = self.parallel_vocab && self.degrees.tp > 1;
        let mut options = self.degrees.options().to_vec();
        options.extend([
            ("--sp", "sp", self.sp.to_string()),
            ("--zero", "zero_stage", self.zero.to_string()),
            (
                "--overlap",
                "tp_overlapping_level",
                self.overlap.to_string(),
            ),
            (
                "--parallel-vocab",
                "parallel_vocab",
                shared_vocab.to_string(),
            ),
            (
                "--sequence-parallel",
                "sequence_parallel",
                self.sequence_parallel.to_string(),
            ),
        ]);
        options
    }

    fn schedule(&self) -> &str {
        match &self.schedule {
            Some(schedule) => schedule,
            None if self.degrees.pp > 1 => "auto",
            None => "1f1b",
        }
    }

    fn mode(&self) -> String {
        let degrees = [
            ("dp", self.degrees.dp),
            ("tp", self.degrees.tp),
            ("pp", self.degrees.pp),
            ("sp", self.sp),
        ];
        let parts: Vec<_> = degrees
            .iter()
            .filter(|(_, degree)| *degree > 1)
            .map(|(name, degree)| format!("{name}{degree}"))
            .collect();
        if parts.is_empty() {
            "single".to_owned()
        } else {
            parts.join("x")
        }
    }
}

/// The sizes of a model, by default those of the smallest GPT-2.
#[derive(Debug, ClapArgs)]
struct Shape {
    /// Transformer layers.
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Width of the hidden states.
    #[arg(long, default_value_t = 768)]
    hidden: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 12)]
    heads: usize,
    /// Vocabulary.
    #[arg(long, default_value_t = 50257)]
    vocab: usize,
}

impl Shape {
    /// A GPT with the positions that `--seq` gives.
    fn gpt(&self, seq: usize) -> Result<Box<dyn models::Model>, super::Failure> {
        let json = json!({
            "model_type": "gpt", "vocab_size": self.vocab, "max_position_embeddings": seq, "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
        });
        models::from_config(&json).map_err(|error| of_size(error, "--seq"))
    }

    /// A GPT-2 with `positions` positions; errors name `option` for them.
    fn gpt2(
        &self,
        positions: usize,
        option: &str,
    ) -> Result<Box<dyn models::Model>, super::Failure> {
        let json = json!({
            "model_type": "gpt2", "vocab_size": self.vocab, "n_positions": positions, "n_embd": self.hidden,
            "n_layer": self.layers, "n_head": self.heads,
        });
        models::from_config(&json).map_err(|error| of_size(error, option))
    }
}

/// The options of a command that stand for keys, as option, key and value.
type Options = Vec<(&'static str, &'static str, String)>;

/// The keys of an element type. Under f16 the first scale is one that small models bear, so that
/// the steps measured are updates.
fn of_dtype(dtype: &str) -> Result<Options, super::Failure> {
    let keys: &[(&'static str, &str)] = match dtype {
        "f32" => &[],
        "bf16" => &[("bf16", "true")],
        "f16" => &[("fp16", "true"), ("initial_scale_power", "12")],
        other => return Err(format!("--dtype expects f32, bf16 or f16, found {other}").into()),
    };
    let option = |&(key, value): &(&'static str, &str)| ("--dtype", key, value.to_owned());
    Ok(keys.iter().map(option).collect())
}

/// The configuration with the keys of `options`, and with `always`, which the command sets.
fn configured(
    options: Options,
    always: &[(&'static str, &str)],
) -> Result<(Config, CheckedArguments), super::Failure> {
    let by = |(option, key, value)| Given::by(option, key, value);
    let always = always.iter().map(|&(key, value)| Given::always(key, value));
    let given: Vec<_> = options.into_iter().map(by).chain(always).collect();
    let config = Config::load_with(None, [], &[], given)?;
    let args = config.check()?;
    Ok((config, args))
}

/// The options that several commands share, where they are given.
fn of_ranks(threads: Option<usize>, lora: Option<&str>) -> Options {
    let threads =
        threads.map(|threads| ("--threads", "compute.threads_per_rank", threads.to_string()));
    let lora = lora.map(|lora| ("--lora-config", "lora_config", lora.to_owned()));
    threads.into_iter().chain(lora).collect()
}

/// Adds to a failure that is due to a key the option that set the key.
fn located(config: &Config, failure: super::Failure) -> super::Failure {
    match failure.0.downcast::<Error>() {
        Ok(error) => config.locate(*error).into(),
        Err(other) => super::Failure(other),
    }
}

/// Names the option of a size that no model can have.
fn of_size(error: merak_trace::Error, positions: &str) -> super::Failure {
    let merak_trace::Error::ModelConfig { field, reason } = &error else {
        return error.into();
    };
    let option = match field.as_str() {
        "vocab_size" => "--vocab",
        "n_positions" | "max_position_embeddings" => positions,
        "n_embd" | "hidden_size" => "--hidden",
        "n_layer" | "num_hidden_layers" => "--layers",
        "n_head" | "num_attention_heads" => "--heads",
        _ => return error.into(),
    };
    format!("{option} {reason}").into()
}

/// The trainer of a rank.
fn trainer_on(
    data: &Arc<dyn Dataset>,
    member: Member,
    plan: &Arc<Plan>,
    args: &CheckedArguments,
) -> Result<MerakTrainer> {
    let mpu = Mpu::new(member, plan.draft.degrees)?;
    let parts = TrainerParts {
        train_data: Some(Arc::clone(data)),
        ..TrainerParts::default()
    };
    MerakTrainer::new(Arc::clone(plan), mpu, args, parts)
}

/// Random tokens: sample and position decide each.
#[derive(Debug)]
struct MadeUp {
    samples: usize,
    seq: usize,
    vocab: usize,
}

impl Dataset for MadeUp {
    fn len(&self) -> usize {
        self.samples
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let token = |position: usize| {
            // SplitMix64 over the position in the data set.
            let mut z =
                ((index * (self.seq + 1) + position) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % self.vocab as u64).cast_signed()
        };
        let window =
            |start: usize| SampleTensor::vector((start..start + self.seq).map(token).collect());
        Ok(Sample::from([
            ("input_ids".to_owned(), window(0)),
            (LABELS.to_owned(), window(1)),
        ]))
    }
}
