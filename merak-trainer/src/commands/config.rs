//! `merak config`: the resolved configuration.

use super::{Outcome, keys::Keys, output};
use clap::Args as ClapArgs;
use std::{path::PathBuf, process::ExitCode};

/// Prints the resolved configuration and where each value came from.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    keys: Keys,
}

pub(crate) fn run(mut args: Args) -> Outcome {
    let json = args.keys.take_flag("--json") || args.json;
    let config = args.keys.load(&args.config)?;
    config.check()?;
    output::print(&if json {
        format!("{:#}", config.to_json())
    } else {
        config.explain()
    })?;
    Ok(ExitCode::SUCCESS)
}
