//! Integration tests of merak-trainer.

mod cli; // the merak command: statuses, messages, documents
mod config; // layers, keys, messages, checks
mod costs; // measured times, predictions, limits of memory
mod data; // text sources, corpora, loaders
mod docs; // links of the documents, and what else they name
mod faults; // failing ranks, damaged files
mod files; // graphs and files have the same parameters
mod laws; // what no topology, schedule or interruption may change
mod layers; // no circles between modules
mod parity; // numbers of transformers
mod soak; // memory that long runs hold
mod speed; // operations of a token, waiting for data
mod support; // small trainings on any topology
#[cfg(feature = "tch")]
mod tch; // the libtorch backend against the default one
