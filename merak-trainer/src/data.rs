//! Data: text, tokens, samples, and which rank takes which sample when.
//!
//! ```text
//! files ── Corpus ──► tokens ── TokenDataset ──► samples ── Loader ──► batches
//!            │                                                ▲
//!         Tokenizer                     TrainingOrder, EvaluationOrder
//! ```
//!
//! The order is computed from (seed, epoch) on each rank alone and does not depend on the topology:
//! with the same global batch every topology trains on the same samples in the same step.
//!
//! # Examples
//!
//! ```
//! use std::sync::Arc;
//! use merak_trainer::data::{BatchShape, Dataset, Loader, TokenDataset, TrainingOrder};
//!
//! let data = TokenDataset::new((0..1000).collect(), 16, "training")?;
//! let shape = BatchShape { batch: 4, microbatches: 2, dp: 2 };
//! let order = TrainingOrder::new(data.len(), shape, 42)?;
//! // Replica 1 of 2 in the first 3 steps, 2 microbatches each.
//! let requests = Arc::new(move |n| (n < 6).then(|| order.microbatch(n / 2, 1, n % 2)));
//! let batches: Vec<_> = Loader::new(Arc::new(data), requests, 1).collect::<Result<_, _>>()?;
//! assert_eq!(batches[0].tensors["input_ids"].shape(), [4, 16]);
//! # Ok::<(), merak_trainer::Error>(())
//! ```

mod bigram;
mod corpus;
mod crates;
mod dataset;
mod evaluation;
mod loader;
mod order;
mod permutation;
mod rng;
mod text;
mod tokenizer;
mod tokens;

pub use self::{
    bigram::bigram_loss,
    corpus::Corpus,
    crates::CrateSources,
    dataset::{Batch, Dataset, IGNORED_LABEL, LABELS, Sample, SampleTensor, collate},
    evaluation::EvaluationOrder,
    loader::{Loader, Requests},
    order::{BatchShape, DataPosition, Microbatch, TrainingOrder},
    permutation::Permutation,
    tokenizer::Tokenizer,
    tokens::TokenDataset,
};
