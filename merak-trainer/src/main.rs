//! The `merak` command.

mod commands;

use clap::{CommandFactory, Parser, Subcommand};
use commands::Outcome;
use merak_ckpt::cli;
use merak_trainer::metrics::Screen;
use std::{ffi::OsString, process::ExitCode};

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
    Predict(commands::predict::Args),
    Tokenize(commands::tokenize::Args),
    Plan(commands::plan::Args),
    Trace(commands::trace::Args),
    Schedule(commands::schedule::Args),
    Config(commands::config::Args),
    Generate(Box<commands::generate::Args>),
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

impl Command {
    /// Whether the command gives the same result once that each process of a launch would give.
    fn needs_no_ranks(&self) -> bool {
        matches!(
            self,
            Self::Tokenize(_)
                | Self::Plan(_)
                | Self::Trace(_)
                | Self::Schedule(_)
                | Self::Config(_)
                | Self::Doctor(_)
                | Self::Completions { .. }
        )
    }
}

fn main() -> ExitCode {
    merak_trainer::keep_to_one_heap();
    let cli: Cli = match cli::parse(arguments()) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && commands::rank_0_tells_alone() => {
            return ExitCode::from(2);
        }
        Err(error) => return cli::refused(&error),
    };
    let screen = Screen::default();
    let writer = {
        let screen = screen.clone();
        move || screen.clone()
    };
    if let Err(error) = cli::log_events(&cli.log, writer) {
        let is_option = |word: OsString| word.to_string_lossy().starts_with("--log");
        let source = if std::env::args_os().any(is_option) {
            "--log"
        } else {
            "MERAK_LOG"
        };
        if !commands::rank_0_tells_alone() {
            cli::report(&format!("error: {source} \"{}\": {error}", cli.log));
        }
        return ExitCode::from(2);
    }
    if let Err(error) = cli::survive_size_limit() {
        tracing::warn!(%error, "a write beyond the limit on file sizes ends the process");
    }
    run(cli, &screen).unwrap_or_else(|failure| {
        failure.tell(&screen);
        ExitCode::from(failure.exit_status())
    })
}

fn run(cli: Cli, screen: &Screen) -> Outcome {
    if cli.command.needs_no_ranks() && commands::is_another_rank() {
        return Ok(ExitCode::SUCCESS);
    }
    match cli.command {
        Command::Train(args) => commands::train::run(args, screen),
        Command::Launch(args) => commands::launch::run(args, &cli.log),
        Command::Evaluate(args) => commands::evaluate::run(args, screen),
        Command::Predict(args) => commands::predict::run(args, screen),
        Command::Tokenize(args) => commands::tokenize::run(args, screen),
        Command::Plan(args) => commands::plan::run(args, screen),
        Command::Trace(args) => commands::trace::run(args),
        Command::Schedule(args) => commands::schedule::run(&args),
        Command::Config(args) => commands::config::run(args),
        Command::Generate(args) => commands::generate::run(&args, screen),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Bench(bench) => commands::bench::run(&bench, screen),
        Command::GuardRanks => Ok(commands::launch::guard::run()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "merak", &mut script);
            commands::print_bytes(&script)
        }
    }
}

/// The command line with `--log FILTER` moved to the front, and `--help` to its command, since
/// every option after CONFIG is a configuration key. Behind `--`, which parts a command from what
/// it launches, words stay, and behind `launch` a `--help` may be that of what it launches.
fn arguments() -> Vec<OsString> {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    let end = words.iter().position(|word| word == "--");
    let end = end.unwrap_or(words.len());
    let command = behind_command(&words);
    if let Some(at) = words[..end].iter().position(|word| word == "--help")
        && (1..at).contains(&command)
        && words[command - 1] != "launch"
    {
        let help = words.remove(at);
        words.insert(command, help);
    }
    if let Some(at) = words[..end].iter().position(|word| word == "--log")
        && at + 1 < end
    {
        let log: Vec<_> = words.drain(at..at + 2).collect();
        words.splice(1..1, log);
    }
    words
}

/// The place behind the words that name a command; 0 where options of no command come first.
fn behind_command(words: &[OsString]) -> usize {
    let (mut command, mut at) = (Cli::command(), 1);
    if words.get(at).is_some_and(|word| word == "--log") {
        at += 2;
    }
    let first = at;
    while let Some(named) = words.get(at).and_then(|word| command.find_subcommand(word)) {
        (command, at) = (named.clone(), at + 1);
    }
    if at > first { at } else { 0 }
}
