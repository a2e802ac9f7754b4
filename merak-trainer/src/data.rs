//! Data: text, tokens, samples, and which rank takes which sample when.
//!
//! ```text
//! files ── Source ──► stream, records or tensors ── Dataset ──► samples ── Loader ──► batches
//!            │                                                             ▲
//!         Tokenizer                                  TrainingOrder, EvaluationOrder
//! ```
//!
//! Samples are tensors by the names of the model's inputs ([`Dataset`]). [`Source`] says which data
//! make samples for which models; a program may bring a data set of its own for any of them.
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
//! let batches: Vec<_> = Loader::new(Arc::new(data), requests, 1)?.collect::<Result<_, _>>()?;
//! assert_eq!(batches[0].tensors["input_ids"].shape(), [4, 16]);
//! # Ok::<(), merak_trainer::Error>(())
//! ```

mod batch;
mod bigram;
mod bpe;
mod chat;
mod classes;
mod content;
mod corpus;
mod crates;
mod dataset;
mod evaluation;
mod fingerprint;
mod image_processor;
mod images;
mod in_order;
mod input;
mod inputs;
mod joined;
mod loader;
mod masked;
mod mixture;
mod order;
mod packed;
mod parquet;
mod permutation;
mod pieces;
mod plain;
mod records;
mod rng;
mod sample_tensor;
mod samples;
mod source;
mod spans;
mod store;
mod stream;
mod tensor_files;
mod tensors;
mod text;
mod text_stream;
mod texts;
mod token_file;
mod tokenize;
mod tokenizer;
mod tokens;
mod translation;

pub use self::{
    batch::{Batch, Collation, Collator, collate},
    bigram::bigram_loss,
    chat::{AnsweredTokens, ChatDataset, ChatPrompts},
    classes::{ClassDataset, LabelledText},
    corpus::Corpus,
    crates::CrateSources,
    dataset::{Dataset, IGNORED_LABEL, LABELS, Names, Sample, Subset},
    evaluation::EvaluationOrder,
    fingerprint::{DataFingerprint, TokenizerFingerprint},
    inputs::{ModelInput, ModelInputs},
    joined::Joined,
    loader::{Loader, Requests},
    masked::{MaskedDataset, Masking},
    mixture::MixtureDataset,
    order::{BatchShape, DataPosition, Microbatch, TrainingOrder},
    permutation::Permutation,
    sample_tensor::SampleTensor,
    source::{DataTokens, Datasets, Purpose, Source, lengths_without_data},
    spans::{Corruption, SpanCounts, SpanDataset, SpanTokens},
    store::{TokenStore, Tokens},
    stream::{SampleStream, Samples, StreamDataset},
    tensor_files::TensorFiles,
    tensors::TensorDataset,
    token_file::TokenFiles,
    tokenize::{TextProgress, TextWork, Tokenized, tokenize},
    tokenizer::{Encoded, Tokenizer},
    tokens::TokenDataset,
    translation::{PairDataset, PairShape},
};
pub(crate) use self::{
    dataset::{has_labels, with_seed},
    inputs::{ATTENTION_MASK, integer_limit},
    packed::DOCUMENT_IDS,
};
