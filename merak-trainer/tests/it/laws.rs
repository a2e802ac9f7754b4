//! What no topology, schedule or interruption may change.

pub(crate) mod agreement; // L2 over 30 steps, in every stage and precision
mod averages; // L1, L3: averages of weights
mod best; // the best model of a run
mod bf16; // L1 to L3: weights of bf16
mod control; // callbacks that act
mod data; // samples: their order, their names, their evaluation
mod divergence; // back to the last checkpoint, and on after the data
mod early; // gradients are reduced while the backward goes on
pub(crate) mod encoders; // L1, L2: masked tokens, classes, translations, images
pub(crate) mod generation; // N20: the same tokens from every topology
pub(crate) mod lora;
pub(crate) mod memory; // what each ZeRO stage holds
pub(crate) mod narrow; // adapters beside weights in bf16
mod offload; // optimizer state and masters in files
mod optimizers; // L2, L3: every rule of the optimizer
mod other_rule; // an optimizer that the program brings along
mod overlap; // L2: what runs while sums over tensor-parallel ranks pass
mod own_parts; // models, losses, rates and collators of the caller's own
mod pipeline; // L1: the pipeline changes no bit
mod prediction; // predictions of samples
mod resume; // L3, L5: resumed runs and equal bytes
mod sequence; // L2, N1, N2: slices of the sequence between split regions
mod sp; // L2, N5: ranks that share each sequence
mod stages; // L1, L3: several stages per rank
mod timeline; // ranks share an axis of time
mod topology; // L2: the degrees change the order of summation only
mod update; // N18: what a step may touch
mod visible; // L2: padding and documents in sequences that ranks share
mod vocab; // N9: a cut vocabulary

use crate::support::Case;

/// Every family, with dropout.
pub(crate) fn families() -> Vec<(&'static str, Case)> {
    let decoders = [
        ("gpt2", Case::gpt2().with_tied(true)),
        ("llama", Case::llama()),
    ];
    let relatives = decoders.into_iter().chain(Case::relatives());
    relatives
        .map(|(family, case)| (family, case.with_dropout(0.1)))
        .chain(encoders::models())
        .collect()
}
