//! Fused CPU kernels as pure functions on slices.
//!
//! The `candle` backend runs the nodes of a graph with these functions. They know nothing of graphs:
//! a kernel reads slices, writes slices that the caller owns, and has the same result for any number
//! of threads.
//!
//! | group | functions |
//! |---|---|
//! | products | [`gemm`], [`gemm_bias`], [`gemm_batched`] |
//! | attention | [`attention`], [`attention_grad`], [`attention_newest`], [`rope`], [`relative_bias`] and its gradient |
//! | norms | [`layer_norm`], [`rms_norm`] and their gradients by input and by parameters |
//! | rows | [`softmax`], [`cross_entropy`], [`embedding`] and their gradients, [`sum_rows`] |
//! | elements | [`activation`], [`silu_mul`] and their gradients, [`add`], [`mul`], [`scale`], [`add_suffix`], [`transpose_middle`] |
//! | random | [`dropout`], [`init`] |
//!
//! Letters in shapes: B samples, S positions (Sq of queries, Sk of keys), H heads (Hq, Hkv), D width
//! of a head, V vocabulary, R rows and C columns of a matrix whose rows are contiguous.
//!
//! # Guarantees
//!
//! - **Bits.** Work is cut into pieces by constants of each kernel, sums run over lanes and blocks of
//!   fixed size in a fixed order, and no sum is shared between threads. The thread count changes no
//!   bit of a result; neither does the instruction set, products apart.
//! - **NaN and infinity** go where PyTorch lets them go.
//! - Lengths that do not fit each other are a caller's bug and panic; what a user's data can get
//!   wrong (labels, token ids) is a [`KernelError`].
#![cfg_attr(
    test,
    expect(
        clippy::float_cmp,
        clippy::cast_possible_wrap,
        reason = "tests compare numbers that must be exact, and count in small ones"
    )
)]

mod activation;
mod attention;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod float;
mod gemm;
mod init;
mod layer_norm;
mod mat;
mod philox;
mod relative_bias;
mod rms_norm;
mod rope;
mod rows;
mod simd;
mod softmax;
#[cfg(test)]
mod testing;
mod threads;
mod trig;

pub use activation::{Activation, activation, activation_grad, silu_mul, silu_mul_grad};
pub use attention::{
    AttentionDropout, AttentionGrads, AttentionMask, AttentionShape, AttentionSpec, Newest,
    Strided, attention, attention_grad, attention_newest,
};
pub use cross_entropy::{
    IGNORED_LABEL, cross_entropy, cross_entropy_grad, cross_entropy_grad_in_place,
};
pub use dropout::{Dropout, DropoutKey, SampleSlice, dropout};
pub use elementwise::{add, add_assign, add_suffix, mul, scale, transpose_middle};
pub use embedding::{TableRows, embedding, embedding_grad};
pub use float::Float;
#[cfg(target_arch = "x86_64")]
pub use gemm::Isa;
pub use gemm::{Lanes, Operand, Start, Write, gemm, gemm_batched, gemm_bias, widen};
pub use init::{Distribution, InitKey, TensorBox, init};
pub use layer_norm::{layer_norm, layer_norm_grad_input, layer_norm_grad_params};
pub use mat::{MatMut, MatRef};
pub use relative_bias::{relative_bias, relative_bias_grad};
pub use rms_norm::{rms_norm, rms_norm_grad_input, rms_norm_grad_params};
pub use rope::{Turn, rope};
pub use rows::sum_rows;
pub use softmax::{softmax, softmax_grad};
pub use threads::Threads;

/// What a caller's data can get wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The operating system refused to start compute threads.
    #[error("could not start {num_threads} compute threads")]
    StartThreads {
        /// Number of threads asked for.
        num_threads: usize,
        /// What it said.
        source: std::io::Error,
    },
    /// A label is no class and does not say "ignore" either.
    #[error(
        "label {label} at position {position} is out of range, expected 0 to {} or {ignored} to ignore it",
        classes.saturating_sub(1)
    )]
    Label {
        /// The label found.
        label: i64,
        /// Its index in the labels.
        position: usize,
        /// Number of classes.
        classes: usize,
        /// The label that is skipped.
        ignored: i64,
    },
    /// A token id has no row in the table.
    #[error(
        "id {id} at position {position} is out of range, expected 0 to {}",
        rows.saturating_sub(1)
    )]
    Id {
        /// The id found.
        id: i64,
        /// Its index in the ids.
        position: usize,
        /// Number of rows of the table.
        rows: usize,
    },
}
