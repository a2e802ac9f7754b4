//! The `merak` command.

mod commands;

use clap::{CommandFactory, Parser, Subcommand};
use commands::Outcome;
use merak_ckpt::{cli, words::message};
use merak_trainer::metrics::Screen;
use std::{
    ffi::OsString,
    io::{IsTerminal, Write as _},
    process::ExitCode,
    thread,
    time::Duration,
};
use tracing_subscriber::EnvFilter;

/// How long a rank that leaves a message to rank 0 goes on: a launcher ends all ranks as soon as
/// one has ended.
const HEAD_START: Duration = Duration::from_secs(1);

/// Trains and fine-tunes transformer models with data, tensor and pipeline parallelism.
#[derive(Debug, Parser)]
#[command(name = "merak", version, max_term_width = 100)]
struct Cli {
    /// What to log, as a tracing filter: `info`, `merak_trainer=debug`.
    #[arg(
        long,
        global = true,
        env = "MERAK_LOG",
        default_value = "warn,merak_mpu=error",
        value_name = "FILTER"
    )]
    log: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(commands::train::Args),
    Launch(commands::launch::Args),
    Evaluate(commands::evaluate::Args),
    Trace(commands::trace::Args),
    Schedule(commands::schedule::Args),
    Config(commands::config::Args),
    Generate(commands::generate::Args),
    Doctor(commands::doctor::Args),
    /// Measures this machine.
    #[command(subcommand)]
    Bench(commands::bench::Bench),
    /// Ends what the ranks of a launch have started, once the launch is gone.
    #[command(name = commands::launch::guard::NAME, hide = true)]
    GuardRanks,
    /// Prints a completion script.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    let cli: Cli = cli::parse(arguments()).unwrap_or_else(|error| error.exit());
    let screen = Screen::default();
    let filter = EnvFilter::try_from_env("RUST_LOG").or_else(|_| EnvFilter::try_new(&cli.log));
    let filter = match filter {
        Ok(filter) => filter,
        Err(error) => {
            let is_option = |word: OsString| word.to_string_lossy().starts_with("--log");
            let source = if std::env::args_os().any(is_option) {
                "--log"
            } else {
                "MERAK_LOG"
            };
            eprint_line(&format!("error: {source} \"{}\": {error}", cli.log));
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .with_writer({
            let screen = screen.clone();
            move || screen.clone()
        })
        .init();
    let mut rank = None;
    let outcome = run(cli, &screen, &mut rank);
    outcome.unwrap_or_else(|failure| {
        match failure.message(rank) {
            Some(message) => eprint_line(&format!("error: {message}")),
            None => thread::sleep(HEAD_START),
        }
        ExitCode::from(failure.exit_status(rank))
    })
}

/// Runs the command; notes the rank of this process where it is one of several.
fn run(cli: Cli, screen: &Screen, rank: &mut Option<usize>) -> Outcome {
    if cli.command.runs_ranks() {
        let launch = commands::launched()?;
        *rank = (launch.world_size > 1).then_some(launch.rank);
    }
    match cli.command {
        Command::Train(args) => commands::train::run(args, screen),
        Command::Launch(args) => commands::launch::run(args, &cli.log),
        Command::Evaluate(args) => commands::evaluate::run(args, screen),
        Command::Trace(args) => commands::trace::run(args),
        Command::Schedule(args) => commands::schedule::run(&args),
        Command::Config(args) => commands::config::run(args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Bench(bench) => commands::bench::run(&bench),
        Command::GuardRanks => Ok(commands::launch::guard::run()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "merak", &mut script);
            commands::print_bytes(&script)
        }
    }
}

impl Command {
    /// Whether the ranks of a launcher are to run it together.
    fn runs_ranks(&self) -> bool {
        match self {
            Self::Train(_) | Self::Evaluate(_) | Self::Generate(_) | Self::Bench(_) => true,
            Self::Launch(_)
            | Self::Trace(_)
            | Self::Schedule(_)
            | Self::Config(_)
            | Self::Doctor(_)
            | Self::GuardRanks
            | Self::Completions { .. } => false,
        }
    }
}

/// The command line with `--log FILTER` moved to the front, since every option behind CONFIG is a
/// configuration key. Behind `--`, which parts a command from what it launches, words stay.
fn arguments() -> Vec<OsString> {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    let end = words.iter().position(|word| word == "--");
    let end = end.unwrap_or(words.len());
    if let Some(at) = words[..end].iter().position(|word| word == "--log")
        && at + 1 < end
    {
        let log: Vec<_> = words.drain(at..at + 2).collect();
        words.splice(1..1, log);
    }
    words
}

/// Writes a message to standard error; a closed one is not an error.
fn eprint_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", message(line));
}
