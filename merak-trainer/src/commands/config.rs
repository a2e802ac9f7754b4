//! `merak config`: the resolved configuration.

use super::{Outcome, keys::Keys, output};
use clap::Args as ClapArgs;
use merak_trainer::key_help;
use std::{path::PathBuf, process::ExitCode};

/// Prints the resolved configuration and where each value came from.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    #[arg(required_unless_present = "help_keys")]
    config: Option<PathBuf>,
    /// Lists every key with its type, default and meaning, and stops.
    #[arg(long)]
    help_keys: bool,
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    keys: Keys,
}

pub(crate) fn run(mut args: Args) -> Outcome {
    if args.keys.take_flag("--help-keys") || args.help_keys {
        output::print(key_help(output::columns()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let json = args.keys.take_flag("--json") || args.json;
    let config = args.keys.resolve(args.config.as_deref())?;
    config.check()?;
    output::print(&if json {
        format!("{:#}", config.to_json())
    } else {
        config.explain(output::columns())
    })?;
    Ok(ExitCode::SUCCESS)
}
