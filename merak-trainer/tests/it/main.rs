//! Integration tests of merak-trainer.

mod config; // layers, keys, messages, checks
mod data; // text sources, corpora, loaders
mod laws; // what no topology, schedule or interruption may change
mod support; // small trainings on any topology
