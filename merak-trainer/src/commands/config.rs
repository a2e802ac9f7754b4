//! `merak config`: the resolved configuration.

use super::{Outcome, environment, output};
use clap::Args as ClapArgs;
use merak_trainer::Config;
use std::{path::PathBuf, process::ExitCode};

/// Prints the resolved configuration and where each value came from.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
    /// Keys as `--set KEY=VALUE` or `--KEY VALUE`.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "KEYS"
    )]
    keys: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut keys = args.keys.clone();
    // Whatever follows the first key lands in the list, flags of this command too.
    let json = args.json || take_flag(&mut keys, "--json");
    let config = Config::load(Some(&args.config), environment::variables(), &keys)?;
    config.check()?;
    output::print(&if json {
        format!("{:#}", config.to_json())
    } else {
        config.explain()
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Removes a flag from a list of options and says whether it was there.
pub(crate) fn take_flag(options: &mut Vec<String>, flag: &str) -> bool {
    let before = options.len();
    options.retain(|option| option != flag);
    options.len() < before
}
