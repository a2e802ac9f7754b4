//! Integration tests, by what they prove:
//!
//! - `layout`: the laws of offsets, buckets and parts, over random models
//! - `kernels`: update rules against PyTorch's numbers, an f64 reference and themselves in pieces
//! - `rules`: fifty steps of every rule against PyTorch's numbers; divisions of the model
//! - `schedules`: learning-rate factors against Hugging Face's numbers
//! - `stages`: worlds of 1, 2 and 4 ranks; stage 1, stage 0 and one serial rank give the same bits
//! - `sums`: gradients of which each tensor rank has a summand
//! - `norms`: the global norm under tensor and pipeline splits; clipping; skipped steps
//! - `scaling`: the loss scale; overflows on single ranks
//! - `resume`: state out and in again, on another number of ranks too
//! - `device`: steps in the memory of a device
//! - `disk`: state in files that are mapped into memory
//! - `other_rule`: rules of other programs
//! - `averages`: averages of weights, in every stage and memory, beside every rule
//! - `allocations`: what a step asks of the allocator does not grow with the ranks
//! - `tensors`: variables of other libraries, beside the libraries' own AdamW: `candle`, `tch`
//! - `errors`: what a wrong setting or buffer says

mod allocations;
mod averages;
mod candle;
mod device;
mod disk;
mod errors;
mod fixture;
mod kernels;
mod layout;
mod norms;
mod other_rule;
mod resume;
mod rules;
mod scaling;
mod schedules;
mod stages;
mod sums;
#[cfg(feature = "tch")]
mod tch;
// `cfg(test)` tells clippy that its functions are bodies of tests.
#[cfg(test)]
mod tensors;
