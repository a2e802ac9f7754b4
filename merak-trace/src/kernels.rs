//! Fused CPU kernels as pure functions on slices.
//!
//! The `candle` backend runs the nodes of a graph with these functions. A kernel reads slices,
//! writes slices that the caller owns, and has the same result for any number of threads.
//!
//! | group | functions |
//! |---|---|
//! | products | [`gemm`], [`gemm_bias`], [`gemm_batched`], [`gemm_of_halves`] |
//! | attention | [`attention`], [`attention_grad`], [`attention_newest`], [`join_attention`] |
//! | positions | [`rope`], [`relative_bias`] and its gradient |
//! | norms | [`layer_norm`], [`rms_norm`] and their gradients for input and parameters |
//! | rows | [`softmax`], [`cross_entropy`], [`embedding`] and their gradients, [`sum_rows`] |
//! | rows cut over ranks | [`vocab_max`], [`vocab_sums`], [`vocab_loss`] |
//! | activations | [`activation`], [`silu_mul`] and their gradients |
//! | arithmetic | [`add`], [`mul`], [`scale`], [`add_suffix`] |
//! | order | [`transpose`] |
//! | random | [`dropout`], [`init`] |
//!
//! Letters in shapes: B samples, S positions (Sq of queries, Sk of keys), H heads (Hq, Hkv), D
//! width of a head, V vocabulary, R rows and C columns of a matrix whose rows are contiguous.
//!
//! # Guarantees
//!
//! - **Bits.** Work is cut into pieces by constants of each kernel, sums run over lanes and blocks
//!   of fixed size in a fixed order, and no sum is shared between threads. The thread count changes
//!   no bit of a result; neither does the instruction set, products apart.
//! - **NaN and infinity** propagate as in PyTorch.
//! - Lengths that do not fit each other are a caller's bug and panic; invalid values in a user's
//!   data (labels, token ids) are a [`KernelError`].
#![expect(unreachable_pub, reason = "the benches reach these functions")]
#![cfg_attr(
    feature = "bench",
    expect(unnameable_types, reason = "the traits behind `Float` stay in here")
)]
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
mod transpose;
mod trig;
mod units;
mod vocab_loss;

pub use crate::{
    KernelError,
    op::{Activation, IGNORED_LABEL},
};
pub use activation::{activation, activation_grad, silu_mul, silu_mul_grad};
pub use attention::{
    AttentionDropout, AttentionGrads, AttentionMask, AttentionShape, AttentionSpec, Newest,
    Strided, attention, attention_grad, attention_newest, join_attention,
};
pub use cross_entropy::{Targets, cross_entropy, cross_entropy_grad};
pub use dropout::{DropoutMask, MaskKey, SampleSlice, dropout};
pub use elementwise::{add, add_assign, add_suffix, mul, scale};
pub use embedding::{TableRows, embedding, embedding_grad};
pub use float::Float;
#[cfg(feature = "tch")]
pub use gemm::Vectors;
pub use gemm::{
    Factor, Operand, Start, Write, gemm, gemm_batched, gemm_bias, gemm_of_halves, multiply, narrow,
    take_product_scratch, widen,
};
pub use init::{Distribution, InitKey, TensorBox, init};
pub use layer_norm::{layer_norm, layer_norm_grad_input, layer_norm_grad_params};
pub use mat::{MatMut, MatRef};
pub use relative_bias::{relative_bias, relative_bias_grad};
pub use rms_norm::{rms_norm, rms_norm_grad_input, rms_norm_grad_params};
pub use rope::{Turn, rope};
pub use rows::sum_rows;
pub use softmax::{softmax, softmax_grad};
pub use threads::Threads;
pub use transpose::transpose;
pub use units::Units;
pub use vocab_loss::{vocab_loss, vocab_max, vocab_sums};
