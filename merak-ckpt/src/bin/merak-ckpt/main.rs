//! The `merak-ckpt` command: looks at checkpoints, checks, compares and rewrites them.

mod compare;
mod inspect;
mod rewrite;

use clap::{CommandFactory, Parser, Subcommand};
use merak_ckpt::{
    Checkpoint, Error, Result, Tolerance, cli, diff,
    words::{Bytes, brief, file, folded, plain},
};
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

/// Looks at checkpoints, checks, compares and rewrites them.
///
/// PATH is a checkpoint's folder (checkpoints/step-00001000), the file `latest` or `best` that
/// names one, or an output folder, which stands for its latest checkpoint.
///
/// Exit status: 0 done, 1 the checkpoints differ or the run failed, 2 the command line or a
/// checkpoint is wrong.
#[derive(Parser)]
#[command(name = "merak-ckpt", version)]
struct Arguments {
    /// What to log, as a tracing filter: `info`, `merak_ckpt=debug`; the variable `RUST_LOG` comes
    /// first
    #[arg(long, global = true, default_value = "warn", value_name = "FILTER")]
    log: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows what is inside: step, topology that wrote it, tensors, shapes, element types, sizes
    Inspect {
        /// Checkpoint or output folder
        path: PathBuf,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Checks every checksum, slice and header, and names what is damaged
    Verify {
        /// Checkpoint or output folder
        path: PathBuf,
    },
    /// Compares two checkpoints tensor by tensor, whatever their topology: a summary, then what
    /// differs
    Diff {
        /// First checkpoint
        a: PathBuf,
        /// Second checkpoint
        b: PathBuf,
        /// Relative tolerance of floating-point values
        #[arg(long, allow_negative_numbers = true, default_value_t = 0.0, value_parser = tolerance)]
        rtol: f64,
        /// Absolute tolerance of floating-point values
        #[arg(long, allow_negative_numbers = true, default_value_t = 0.0, value_parser = tolerance)]
        atol: f64,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Rewrites a checkpoint for another topology, and prints the new one's folder
    Reshard(rewrite::Reshard),
    /// Makes a checkpoint of a Hugging Face folder, and prints its folder
    ImportHf(rewrite::ImportHf),
    /// Makes a checkpoint of a folder of torch.distributed.checkpoint, optimizer state included,
    /// and prints its folder
    ImportDcp(rewrite::ImportDcp),
    /// Makes a checkpoint of weights of the original Python Merak, after its conversion to
    /// safetensors
    ImportMerak(rewrite::ImportMerak),
    /// Makes a Hugging Face folder of a checkpoint
    ExportHf(rewrite::ExportHf),
    /// Makes a Hugging Face folder of a model with a PEFT adapter folded into its weights
    MergeLora(rewrite::MergeLora),
    /// Writes the adapters of a checkpoint as a PEFT folder
    ExtractLora(rewrite::ExtractLora),
    /// Prints a completion script
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// What a command prints, and its exit status.
struct Outcome {
    text: String,
    status: u8,
}

fn main() -> ExitCode {
    let arguments: Arguments = match cli::parse(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(error) => return cli::refused(&error),
    };
    if let Err(error) = cli::log_events(&arguments.log, || cli::StandardError) {
        let log = arguments.log;
        cli::report(&format!("merak-ckpt: --log \"{log}\": {error}"));
        return ExitCode::from(2);
    }
    if let Err(error) = cli::survive_size_limit() {
        tracing::warn!(%error, "a write beyond the limit on file sizes ends the process");
    }
    let outcome = match arguments.command {
        Command::Inspect { path, json } => inspect(&path, json),
        Command::Verify { path } => verify(&path),
        Command::Diff {
            a,
            b,
            rtol,
            atol,
            json,
        } => compare(&a, &b, Tolerance { rtol, atol }, json),
        Command::Reshard(command) => command.run(),
        Command::ImportHf(command) => command.run(),
        Command::ImportDcp(command) => command.run(),
        Command::ImportMerak(command) => command.run(),
        Command::ExportHf(command) => command.run(),
        Command::MergeLora(command) => command.run(),
        Command::ExtractLora(command) => command.run(),
        Command::Completions { shell } => Ok(completions(shell)),
    };
    match outcome {
        Ok(Outcome { text, status }) => match print(&text) {
            // A closed pipe (`| head`) is the reader's choice.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                cli::report(&format!("merak-ckpt: cannot write the output: {error}"));
                ExitCode::from(1)
            }
            _ => ExitCode::from(status),
        },
        Err(error) => {
            cli::report(&format!("merak-ckpt: {}", with_sources(&error)));
            ExitCode::from(if error.is_user_error() { 2 } else { 1 })
        }
    }
}

/// Writes to standard output, to the last byte.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout();
    let text = if out.is_terminal() {
        plain(text)
    } else {
        text.into()
    };
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn completions(shell: clap_complete::Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "merak-ckpt", &mut script);
    let text = String::from_utf8_lossy(&script).into_owned();
    Outcome { text, status: 0 }
}

fn inspect(path: &PathBuf, json: bool) -> Result<Outcome> {
    let checkpoint = Checkpoint::open(path)?;
    let text = if json {
        inspect::json(&checkpoint)
    } else {
        inspect::text(&checkpoint, cli::columns())
    };
    Ok(Outcome { text, status: 0 })
}

fn verify(path: &PathBuf) -> Result<Outcome> {
    let checkpoint = Checkpoint::open_damaged(path)?;
    let report = checkpoint.verify();
    if report.damage.is_empty() {
        let text = format!(
            "{}: good; {} files, {} tensors, {} slices, {}",
            file(checkpoint.path()),
            report.files,
            report.tensors,
            report.slices,
            Bytes(report.bytes)
        );
        let text = folded(&text, cli::columns());
        return Ok(Outcome { text, status: 0 });
    }
    let mut text = format!("{}: damaged\n", file(checkpoint.path()));
    for damage in &report.damage {
        line(&mut text, format_args!("  {damage}"));
    }
    match checkpoint.older_without(&report.damage)? {
        Some(older) => line(
            &mut text,
            format_args!("the newest complete older one is {}", file(older.path())),
        ),
        None => line(&mut text, format_args!("there is no complete older one")),
    }
    let text = folded(&text, cli::columns());
    Ok(Outcome { text, status: 2 })
}

fn compare(a: &PathBuf, b: &PathBuf, tolerance: Tolerance, json: bool) -> Result<Outcome> {
    let (a, b) = (Checkpoint::open(a)?, Checkpoint::open(b)?);
    let report = diff(&a, &b, tolerance)?;
    let text = if json {
        compare::json(a.path(), b.path(), &report)
    } else {
        compare::text(a.path(), b.path(), &report, cli::columns())
    };
    Ok(Outcome {
        text,
        status: u8::from(!report.different.is_empty()),
    })
}

fn tolerance(text: &str) -> Result<f64, String> {
    let value: f64 = text
        .parse()
        .map_err(|_| format!("`{}` is not a number", brief(text)))?;
    let is_legal = value.is_finite() && value >= 0.0;
    is_legal
        .then_some(value)
        .ok_or_else(|| format!("expected 0 or more, found {}", brief(text)))
}

/// Appends a line to a text in memory.
fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    writeln!(text, "{content}").expect("a string takes every text");
}

fn with_sources(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        write!(text, ": {cause}").expect("a string takes every text");
        source = cause.source();
    }
    text
}
