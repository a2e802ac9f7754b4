//! Attention in blocks, forward and backward.
//!
//! Per head: `out = softmax(scale q k^T + mask) v`, computed as in
//! [FlashAttention-2](https://arxiv.org/abs/2307.08691), sections 3.1 and 3.2:
//!
//! ```text
//!            keys -> 256 at a time                 per block of 64 queries
//!          +--------+--------+--------+     forward:  s = scale q k^T (+ mask)
//! queries  |  tile  |  tile  | tile   |               m, l = running maximum and sum of exp(s - m)
//! 64 rows  |        |        |   skip |               out = out exp(m_old - m) + exp(s - m) v
//!          +--------+--------+--------+     backward: p = exp(s - lse), recomputed from s
//! ```
//!
//! Only one tile of scores exists per thread. Tiles that a causal mask or a window hides whole are
//! skipped. The unit of parallel work is a block of queries forward, and a key-value head of a
//! sample backward; key blocks go in ascending order, so nothing depends on the threads.

mod backward;
mod forward;
mod join;
mod newest;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use backward::{AttentionGrads, attention_grad};
pub use forward::attention;
pub use join::join_attention;
pub use newest::{Newest, attention_newest};

use super::dropout::Mask;
use super::gemm::{Write, gemm_inline};
use super::{DropoutMask, Float, MatMut, MatRef, Threads};
use crate::op::Places;

/// Queries per block and keys per tile, a multiple of 64.
const QUERIES: usize = 64;
const KEYS: usize = 256;

/// A view of `[B, S, width]` in a larger tensor: element (b, s, c) is
/// `data[offset + b * batch_stride + s * row_stride + c]`, so that queries, keys and values packed
/// side by side are read in place.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a, T> {
    /// The larger tensor.
    pub data: &'a [T],
    /// Elements from a sample to the next.
    pub batch_stride: usize,
    /// Elements from a position to the next.
    pub row_stride: usize,
    /// Elements before the first one.
    pub offset: usize,
}

impl<'a, T: Float> Strided<'a, T> {
    /// A tensor `[B, rows, width]` without gaps.
    pub fn contiguous(data: &'a [T], rows: usize, width: usize) -> Self {
        Self {
            data,
            batch_stride: rows * width,
            row_stride: width,
            offset: 0,
        }
    }

    fn block(&self, batch: usize, rows: Range<usize>, col: usize, width: usize) -> MatRef<'a, T> {
        let start = self.offset + batch * self.batch_stride + rows.start * self.row_stride + col;
        MatRef::with_row_stride(&self.data[start..], rows.len(), width, self.row_stride)
    }

    fn row(&self, batch: usize, row: usize, col: usize, width: usize) -> &'a [T] {
        let start = self.offset + batch * self.batch_stride + row * self.row_stride + col;
        &self.data[start..start + width]
    }
}

/// Sizes of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// B, number of samples.
    pub batch: usize,
    /// Sq, queries per sample.
    pub q_len: usize,
    /// Sk, keys per sample.
    pub k_len: usize,
    /// Hq, heads of the queries.
    pub q_heads: usize,
    /// Hkv, heads of the keys; each serves `q_heads / kv_heads` heads of queries in a row.
    pub kv_heads: usize,
    /// D, width of a head.
    pub head_dim: usize,
}

impl AttentionShape {
    fn check(&self) {
        assert!(
            self.kv_heads > 0 && self.q_heads.is_multiple_of(self.kv_heads),
            "{} query heads do not share {} key heads evenly",
            self.q_heads,
            self.kv_heads
        );
    }

    fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }

    fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Values added to the scores: `data[b * batch_stride + h * head_stride + q * row_stride + k]`,
/// where a stride of zero repeats along its dimension. Minus infinity hides a key.
#[derive(Debug, Clone, Copy)]
pub struct AttentionMask<'a, T> {
    /// The values.
    pub data: &'a [T],
    /// Elements from a sample to the next.
    pub batch_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
    /// Elements from a query to the next.
    pub row_stride: usize,
}

impl<'a, T> AttentionMask<'a, T> {
    fn row(&self, batch: usize, head: usize, query: usize, keys: Range<usize>) -> &'a [T] {
        let start = batch * self.batch_stride + head * self.head_stride + query * self.row_stride;
        &self.data[start + keys.start..start + keys.end]
    }
}

/// Dropout of the probabilities. The probability of (head, query, key) is element
/// `(head Sq + query) Sk + key` of its sample; samples and heads have their global numbers, and
/// with [`AttentionSpec::places`] so have queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDropout {
    /// Key and probability.
    pub dropout: DropoutMask,
    /// Global index of the first sample.
    pub first_sample: u64,
    /// Global index of the first query head.
    pub first_head: u64,
}

/// Sizes and options of an attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpec<'a, T> {
    /// Sizes.
    pub shape: AttentionShape,
    /// Factor of the scores, usually `head_dim^(-1/2)`.
    pub scale: f64,
    /// Where queries and keys lie in their sequence; unset: the last query lies at the last key.
    pub places: Option<Places>,
    /// Query i sees the keys up to its own place.
    pub causal: bool,
    /// Query i sees keys less than this far before its own place (unless causal, also after it).
    pub window: Option<usize>,
    /// The positions of the document at each position, `[B, S]`; they begin and end no earlier for
    /// a later one. A query sees keys of the one at its own place.
    pub documents: Option<&'a [Range<usize>]>,
    /// Added to the scores.
    pub mask: Option<AttentionMask<'a, T>>,
    /// Added to the scores as well; [`attention_grad`] can give its gradient.
    pub bias: Option<AttentionMask<'a, T>>,
    /// Dropout of the probabilities.
    pub dropout: Option<AttentionDropout>,
    /// Whether the factors of products are rounded to bf16 if they are `f32`: queries, keys,
    /// values, probabilities and gradients. [`attention_newest`] rounds nothing.
    pub rounds: bool,
}

/// How the products of a tile are computed, on the thread that has it.
#[derive(Clone, Copy)]
struct Products<'a> {
    alone: &'a Threads,
    rounds: bool,
}

impl Products<'_> {
    /// Computes `c = alpha a b`, or adds it to c. Once for all products, since it is long.
    #[inline(never)]
    fn write<T: Float>(
        self,
        alpha: T,
        a: MatRef<'_, T>,
        b: MatRef<'_, T>,
        write: Write,
        c: MatMut<'_, T>,
    ) {
        if self.rounds {
            T::product_of_halves(self.alone, alpha, (a, b), write.into(), c);
        } else {
            gemm_inline(alpha, a, b, write, c);
        }
    }
}

#[cfg(any(test, feature = "bench"))]
impl<T: Float> AttentionSpec<'_, T> {
    /// Attention with this shape where every query sees every key, scaled by `head_dim^(-1/2)`.
    pub fn full(shape: AttentionShape) -> Self {
        Self {
            shape,
            scale: 1.0 / (shape.head_dim as f64).sqrt(),
            places: None,
            causal: false,
            window: None,
            documents: None,
            mask: None,
            bias: None,
            dropout: None,
            rounds: false,
        }
    }

    /// The same where no query sees later keys.
    pub fn causal(shape: AttentionShape) -> Self {
        Self {
            causal: true,
            ..Self::full(shape)
        }
    }
}

impl<T: Float> AttentionSpec<'_, T> {
    /// Keys that a query of a sample sees, without regard to the additive mask.
    fn visible(&self, batch: usize, query: usize) -> Range<usize> {
        let AttentionShape { q_len, k_len, .. } = self.shape;
        // One past the place of the query, plus `before`; and the number of places.
        let (shifted, before, len) = match &self.places {
            Some(places) => (places.queries.at(query) + 1, 0, places.len),
            None => (query + 1 + k_len, q_len, k_len),
        };
        let past_self = shifted.saturating_sub(before);
        let window = self.window.unwrap_or(usize::MAX);
        let end = if self.causal {
            past_self
        } else {
            shifted.saturating_add(window).saturating_sub(before + 1)
        };
        let end = end.min(len);
        let start = past_self.saturating_sub(window).min(end);
        let (start, end) = match self.documents {
            None => (start, end),
            Some(documents) => {
                let document = &documents[batch * len + past_self - 1];
                let end = end.min(document.end);
                (start.max(document.start).min(end), end)
            }
        };
        match &self.places {
            // The visible places are neighbours, and so are the keys at them.
            Some(places) => {
                let before = |place| places.keys.before(place, k_len);
                before(start)..before(end)
            }
            None => start..end,
        }
    }

    /// Adds mask and bias to the scores of a query for `keys`.
    #[expect(
        clippy::inline_always,
        reason = "vectorises only inside a dispatched loop"
    )]
    #[inline(always)]
    fn add_terms(
        &self,
        (batch, head, query): (usize, usize, usize),
        keys: &Range<usize>,
        scores: &mut [T],
    ) {
        for term in [self.mask, self.bias].into_iter().flatten() {
            let row = term.row(batch, head, query, keys.clone());
            for (score, &term) in scores.iter_mut().zip(row) {
                *score += term;
            }
        }
    }

    /// Tiles of the keys that any of these queries of a sample sees.
    fn tiles(
        &self,
        batch: usize,
        queries: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<T> {
        let first = self.visible(batch, queries.start).start;
        let end = self.visible(batch, queries.end - 1).end;
        let starts = (first..end.max(first)).step_by(KEYS);
        starts.map(move |start| start..end.min(start + KEYS))
    }

    fn mask_draw(&self) -> Option<(Mask<T>, AttentionDropout)> {
        self.dropout
            .map(|dropout| (Mask::new(dropout.dropout), dropout))
    }

    /// Applies dropout to the probabilities of a row, which begins with key `first_key`.
    #[expect(
        clippy::inline_always,
        reason = "vectorises only inside a dispatched loop"
    )]
    #[inline(always)]
    fn drop_row(
        &self,
        (mask, place): &(Mask<T>, AttentionDropout),
        (batch, head, query): (usize, usize, usize),
        first_key: usize,
        row: &mut [T],
    ) {
        let AttentionShape { q_len, k_len, .. } = self.shape;
        let (sample, head) = (
            place.first_sample + batch as u64,
            place.first_head + head as u64,
        );
        let element = |(queries, query): (usize, usize), (keys, key): (usize, usize)| {
            (head * queries as u64 + query as u64) * keys as u64 + key as u64
        };
        let Some(places) = &self.places else {
            let element = element((q_len, query), (k_len, first_key));
            return mask.apply(sample, element, row);
        };
        let query = (places.len, places.queries.at(query));
        for (keys, key) in places.keys.parts(first_key..first_key + row.len()) {
            let part = &mut row[keys.start - first_key..keys.end - first_key];
            mask.apply(sample, element(query, (places.len, key)), part);
        }
    }
}

/// The part of `row` (of a tile that starts at `tile.start`) which the query sees.
fn clip(visible: &Range<usize>, tile: &Range<usize>) -> Range<usize> {
    let end = visible.end.clamp(tile.start, tile.end);
    let start = visible.start.clamp(tile.start, end);
    start - tile.start..end - tile.start
}

/// Length of a row of scores, padded with hidden ones so that loops over rows have no remainder.
fn padded(len: usize) -> usize {
    len.next_multiple_of(64)
}

/// Cuts `[B * S, H * D]` into one block per (sample, head), in this order.
fn per_head<T: Float>(
    x: MatMut<'_, T>,
    rows: usize,
    head_dim: usize,
) -> impl Iterator<Item = MatMut<'_, T>> {
    x.row_blocks(rows)
        .flat_map(move |sample| sample.col_blocks(head_dim))
}
