//! What the graph engine promises, tested from outside.
//!
//! - `agreement`: runs a case on every backend and compares it with a reference.
//! - `allocations`: once warm, a step takes no fresh memory for tensors.
//! - `configs`: configurations as transformers 4 and 5 write them, and fields that tell models
//!   apart.
//! - `conformance`: every operation, forward and gradient, in every element type, on every backend.
//! - `coverage`: no operation is without a case of `conformance`.
//! - `decoding`: positions that pass one by one, with a cache, give the same as together.
//! - `documents`: documents in one sequence give the losses and gradients of each alone.
//! - `families`: configurations of model families, both spellings, every field used or refused.
//! - `gradients`: every operation's gradient against finite differences in f64.
//! - `nonfinite`: NaN and infinity go through operations as in PyTorch.
//! - `odd_sizes`: gradients at sizes that leave a tail, with hidden keys and shared heads.
//! - `parity`: the numbers of `transformers` on the same weights and data.
//! - `programs`: stage cuts, recomputation and the halves of the backward change no bit.
//! - `stores`: values, parameters and gradient stores that do not fit a program are refused.
//! - `support`: runs small graphs.

mod agreement;
mod allocations;
mod configs;
mod conformance;
mod coverage;
mod decoding;
mod documents;
mod families;
mod gradients;
mod nonfinite;
mod odd_sizes;
mod parity;
mod programs;
mod stores;
mod support;
