//! `merak doctor`: what this machine and this build can do.

use super::{Outcome, environment, output, world};
use clap::Args as ClapArgs;
use merak_ckpt::words::Bytes;
use merak_mpu::Member;
use merak_pipe::ScheduleKind;
use merak_trace::{Units, models};
use merak_trainer::{
    Config, MerakTrainer, Plan, PlanInputs, Result, TrainerParts, available_bytes, chain,
    data::{Dataset, TokenDataset, Tokens},
    keys, run_on,
};
use serde_json::{Value, json};
use std::{
    env::{self, consts},
    fmt::Write as _,
    io::{self, BufRead, BufReader},
    process::{Child, Command, ExitCode, Stdio},
    sync::Arc,
    thread,
};

/// What a trial says that found nothing wrong.
const PASSED: &str = "passed";

/// Prints what this machine and this build can do, after a trial of two ranks.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
    /// Makes the trial alone, and prints as a JSON string what came of it.
    #[arg(long, hide = true)]
    trial: bool,
}

pub(crate) fn run(args: &Args) -> Outcome {
    if args.trial {
        let tried = world::of_environment([]).and_then(|config| trial(&config));
        let told = tried.map_or_else(|error| chain(&error), |()| PASSED.to_owned());
        output::print(json!(told).to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    let (told, process) = match trial_apart() {
        Ok((told, process)) => (told, Some(process)),
        Err(error) => (format!("it cannot be started: {error}"), None),
    };
    let document = examine(&told);
    output::print(&if args.json {
        format!("{document:#}")
    } else {
        output::fitted(&table(&document))
    })?;
    if let Some(mut process) = process {
        // One that failed may stay for a moment, until other ranks have heard of it.
        process.wait()?;
    }
    Ok(if told == PASSED {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Makes the trial in a process of its own, and says what came of it. A library beneath an engine
/// may end a process instead of returning an error, as Open MPI does where it cannot start.
fn trial_apart() -> io::Result<(String, Child)> {
    let mut process = Command::new(env::current_exe()?)
        .args(env::args_os().skip(1))
        .arg("--trial")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = process.stdout.take().expect("it is piped");
    let told = match told_in(BufReader::new(stdout)) {
        Some(told) => told,
        None => format!(
            "its process has ended before it was done ({}): standard error may say why",
            process.wait()?
        ),
    };
    Ok((told, process))
}

/// The first line that is a JSON string. A library may print lines of its own, of any bytes.
fn told_in(output: impl BufRead) -> Option<String> {
    let mut lines = output.split(b'\n').map_while(io::Result::ok);
    lines.find_map(|line| serde_json::from_slice(&line).ok())
}

fn examine(trial: &str) -> Value {
    let build = if cfg!(debug_assertions) {
        "debug: training is much slower than with --release"
    } else {
        "release"
    };
    let schedules = ScheduleKind::ALL.iter().map(|kind| kind.as_str());
    let schedules: Vec<_> = schedules.chain(["auto"]).collect();
    let mut document = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "build": build,
        "system": format!("{} {}", consts::OS, consts::ARCH),
        "cores": thread::available_parallelism().map_or(1, std::num::NonZero::get),
        "vector_instructions": vector_instructions(),
        "memory_bytes": available_bytes(),
        "engines": usable("distributed.engine"),
        "backends": usable("compute.backend"),
        "devices": usable("compute.device"),
        "optimizers": choices("optim"),
        "schedules": schedules,
        "model_types": models::known_families().collect::<Vec<_>>(),
        "checkpoint_format": merak_ckpt::format::VERSION,
        "default_text": default_text(),
    });
    let mut add = |name: &str, value| document[name] = value;
    let config = world::of_environment([]);
    for (name, value) in world::describe(&config) {
        add(name, value);
    }
    add("trial", trial.into());
    document
}

/// The names that a key of this build takes.
fn choices(name: &str) -> Vec<String> {
    let key = keys().find(|key| key.name == name);
    let expected = key.map(|key| (key.expected)()).unwrap_or_default();
    let names = expected.replace(" or ", ", ");
    names.split(", ").map(str::to_owned).collect()
}

/// The names of a key that work with this build on this machine.
fn usable(name: &str) -> Vec<String> {
    let is_taken = |choice: &String| {
        let device = name == "compute.device" && choice == "cuda";
        let mut line = vec![format!("--{name}={choice}")];
        line.extend(device.then(|| "--compute.backend=tch".to_owned()));
        let checked = Config::load(None, [], &line).and_then(|config| config.check());
        checked.is_ok() && (!device || has_cuda())
    };
    choices(name).into_iter().filter(is_taken).collect()
}

/// Whether libtorch finds a CUDA device.
#[cfg(feature = "tch")]
fn has_cuda() -> bool {
    merak_trace::backend::tch::Tch::num_cuda_devices() > 0
}

/// Without libtorch no device is found.
#[cfg(not(feature = "tch"))]
fn has_cuda() -> bool {
    false
}

/// The vector instructions of this processor that kernels can use.
fn vector_instructions() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let found = [
        ("avx", std::arch::is_x86_feature_detected!("avx")),
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
        ("avx512bw", std::arch::is_x86_feature_detected!("avx512bw")),
        (
            "avx512bf16",
            std::arch::is_x86_feature_detected!("avx512bf16"),
        ),
        ("amx-bf16", Units::of_processor() == Units::Matrix),
    ];
    #[cfg(target_arch = "aarch64")]
    let found = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let found: [(&str, bool); 0] = [];
    found
        .into_iter()
        .filter_map(|(name, is_there)| is_there.then_some(name))
        .collect()
}

/// Where a run without `data.path` finds text.
fn default_text() -> String {
    match environment::crate_sources(None).registry {
        Some(registry) if registry.is_dir() => registry.display().to_string(),
        _ => "none: set \"data.path\" to a file or folder of text".to_owned(),
    }
}

/// Trains a model of a few hundred weights for a step on the engine of a configuration, which uses
/// every part of the stack: on two ranks, or on those that a launcher has started for it, and on
/// the devices that the configuration names.
fn trial(config: &Config) -> Result<()> {
    let members = world::trial_members(config)?;
    let asked = config.check()?;
    let ranks = members.first().map_or(1, Member::world_size);
    let degree = if ranks == 2 {
        "--pp=2".to_owned()
    } else {
        format!("--dp={ranks}")
    };
    let line = [
        degree,
        "--gradient_accumulation_steps=2".to_owned(),
        "--per_device_train_batch_size=1".to_owned(),
        format!("--compute.backend={}", asked.compute.backend),
        format!("--compute.device={}", asked.compute.device),
    ];
    let args = Config::load(None, [], &line)?.check()?;
    let model = models::from_config(
        &json!({ "model_type": "gpt2", "vocab_size": 8, "n_positions": 4,
        "n_embd": 4, "n_layer": 2, "n_head": 2 }),
    )?;
    let plan = Arc::new(Plan::new(&PlanInputs::read(model.into(), &args)?, &args)?);
    let tokens = 32 * ranks.max(2) as u32;
    let tokens: Tokens = (0..tokens).map(|token| token % 8).collect();
    let data: Arc<dyn Dataset> = Arc::new(TokenDataset::new(
        tokens,
        plan.draft.seq_length,
        "training",
    )?);
    run_on(members, |member| {
        let mpu = merak_mpu::Mpu::new(member, plan.draft.degrees)?;
        let parts = TrainerParts {
            train_data: Some(Arc::clone(&data)),
            ..TrainerParts::default()
        };
        MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?.train_step()
    })
    .map(drop)
}

fn table(document: &Value) -> String {
    let mut text = String::new();
    for (name, value) in document.as_object().into_iter().flatten() {
        let value = match value {
            Value::Array(names) => {
                let names: Vec<_> = names.iter().filter_map(Value::as_str).collect();
                names.join(", ")
            }
            Value::String(words) => words.clone(),
            Value::Number(bytes) if name == "memory_bytes" => {
                Bytes(bytes.as_u64().unwrap_or_default()).to_string()
            }
            other => other.to_string(),
        };
        let _ = writeln!(text, "{:20}  {value}", name.replace('_', " "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_trial_tells_is_found_after_lines_of_a_library() {
        let output = b"\xff\xfe no UTF-8\n12\nNCCL version 2\n\"passed\"\n";
        assert_eq!(told_in(&output[..]).as_deref(), Some(PASSED));
        assert_eq!(told_in(&output[..30]), None);
    }
}
