//! The crate from outside.
//!
//! - `support`: a small made-up model, saved by any topology
//! - `topologies`: what any topology saves, any other reads back
//! - `hf`: Hugging Face folders in and out
//! - `hf_hostile`: Hugging Face folders that are damaged or made to harm
//! - `hf_whole`: Hugging Face folders that lack something or do not fit their configuration
//! - `lora`: adapters of PEFT, merged
//! - `named`: folders and files of other programs are named for what they are
//! - `merak`: weights of the original Merak, imported
//! - `reshard`: files rewritten for other topologies, there and back
//! - `store`: names, `latest`, rotation, leftovers
//! - `tensors`: parameters in and out of other libraries' variables: `candle`, `tch`
//! - `command`: what `merak-ckpt` prints, and its exit status
//! - `terminal`: what a command writes to a terminal
//! - `crash`: killed processes and full disks lose nothing
//! - `dcp`: folders of torch.distributed.checkpoint
//! - `dcp_hostile`: indexes of such folders that are made to cost time and memory
//! - `damage`: damaged files give errors that name them, on loading too
//! - `forged`: hostile manifests and headers with right checksums
//! - `generation`: the decode loop over toy models

#[cfg(feature = "candle")]
mod candle;
#[cfg(feature = "cli")]
mod command;
#[cfg(feature = "cli")]
mod crash;
mod damage;
mod dcp;
mod dcp_hostile;
mod forged;
mod generation;
mod hf;
mod hf_hostile;
mod hf_whole;
mod lora;
mod merak;
mod named;
mod reshard;
mod store;
mod support;
#[cfg(feature = "tch")]
mod tch;
// `cfg(test)` tells clippy that its functions are bodies of tests.
#[cfg(test)]
#[cfg(any(feature = "candle", feature = "tch"))]
mod tensors;
#[cfg(feature = "cli")]
mod terminal;
mod topologies;
