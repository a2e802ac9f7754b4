//! The subcommands of `merak`.

pub(crate) mod bench;
pub(crate) mod config;
pub(crate) mod doctor;
pub(crate) mod evaluate;
pub(crate) mod generate;
pub(crate) mod launch;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod schedule;
mod session;
pub(crate) mod tokenize;
pub(crate) mod trace;
pub(crate) mod train;

mod degrees;
mod environment;
mod failure;
#[cfg(test)]
mod fuzz;
mod keys;
mod launched;
mod model;
mod output;
mod planned;
mod prepared;
mod prompts;
mod signals;
mod world;

pub(crate) use failure::{Failure, Outcome, is_another_rank, rank_0_tells_alone};

/// Writes a generated file to standard output.
pub(crate) fn print_bytes(bytes: &[u8]) -> Outcome {
    output::print(bytes)?;
    Ok(std::process::ExitCode::SUCCESS)
}
