//! Integration tests of merak-trainer.

mod config; // layers, keys, messages, checks
mod data; // text sources, corpora, loaders
