//! The fields of operations.

use crate::{Runs, TensorType};
use merak_mpu::{Axis, Coord};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The layout of the matrix of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightLayout {
    /// `[out, in]`, as `torch.nn.Linear`: `y = x Wᵀ`.
    OutIn,
    /// `[in, out]`, as GPT-2's `Conv1D`: `y = x W`.
    InOut,
}

impl WeightLayout {
    /// The dimension of the matrix that holds the output features.
    pub fn out_dim(self) -> usize {
        match self {
            Self::OutIn => 0,
            Self::InOut => 1,
        }
    }

    /// The dimension of the matrix that holds the input features.
    pub fn in_dim(self) -> usize {
        1 - self.out_dim()
    }

    /// The layout in which the transposed matrix multiplies.
    #[must_use]
    pub fn transposed(self) -> Self {
        match self {
            Self::OutIn => Self::InOut,
            Self::InOut => Self::OutIn,
        }
    }
}

/// An elementwise function with its own gradient kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// The approximation `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))` of [`Self::GeluErf`].
    GeluTanh,
    /// `x/2 (1 + erf(x/√2))` ([GELU](https://arxiv.org/abs/1606.08415)).
    GeluErf,
    /// `x / (1 + e^-x)`, also called swish.
    Silu,
    /// `max(x, 0)`, with slope 0 at 0.
    Relu,
    /// `tanh(x)`.
    Tanh,
}

impl Activation {
    /// The names of the function and of its gradient.
    pub(super) fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::GeluTanh => ("gelu_tanh", "gelu_tanh_grad"),
            Self::GeluErf => ("gelu", "gelu_grad"),
            Self::Silu => ("silu", "silu_grad"),
            Self::Relu => ("relu", "relu_grad"),
            Self::Tanh => ("tanh", "tanh_grad"),
        }
    }
}

/// The place of a slice in the whole tensor, which is cut over the ranks of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AxisSlice {
    /// The mesh axis over which the dimension is cut.
    pub axis: Axis,
    /// The dimension.
    pub dim: usize,
    /// Its size in the whole tensor.
    pub full: usize,
    /// Whether the cut is [mirrored](crate::Shard::mirrored).
    #[serde(default)]
    pub mirrored: bool,
}

impl AxisSlice {
    /// A slice of a dimension with `full` indices, of which each rank has neighbouring ones.
    pub fn new(axis: Axis, dim: usize, full: usize) -> Self {
        Self {
            axis,
            dim,
            full,
            mirrored: false,
        }
    }

    /// Where the slice of a rank of the axis lies in the whole dimension, of which each rank's
    /// tensor has `local` indices.
    pub fn runs(&self, rank: usize, local: usize) -> Runs {
        if self.mirrored {
            let half = local / 2;
            Runs::two(
                rank * half,
                half,
                self.full.saturating_sub((rank + 1) * half),
            )
        } else {
            Runs::one(rank * local)
        }
    }

    /// The neighbouring indices of the whole dimension that the rank at `place` holds, of which
    /// each rank's tensor has room for `local`. Behind the end of the dimension lies padding.
    pub fn own(&self, place: Coord, local: usize) -> Range<usize> {
        debug_assert!(!self.mirrored, "a mirrored slice has two runs");
        let start = place.get(self.axis) * local;
        start.min(self.full)..(start + local).min(self.full)
    }
}

/// The function by which an all-reduce joins the values of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// The largest of them. No gradient passes: it counts as a constant.
    Max,
}

/// Random zeroing with rescaling; the mask is a function of the run's seed, the step, the number of
/// the sample (dimension 0), this node's key and the logical element index within the sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DropoutSpec {
    /// Probability that an element becomes zero.
    pub p: f64,
    /// Hash of the name of the node that drew the mask; its gradient uses the same.
    pub key: u64,
    /// Set when the value is a slice of a logical tensor.
    pub slice: Option<AxisSlice>,
    /// Set when that slice is cut once more, over another axis: along the same dimension, and its
    /// size is that of the slice, or along the one before it.
    #[serde(default)]
    pub nested: Option<AxisSlice>,
}

impl DropoutSpec {
    /// The dimension that is cut and its size in the logical tensor, if one is.
    pub fn cut_dim(&self) -> Option<(usize, usize)> {
        self.slice.map(|slice| (slice.dim, slice.full))
    }

    /// Where the indices of the cut dimension that the rank at `place` holds lie in the whole one;
    /// each rank has `local`.
    pub fn runs(&self, place: Coord, local: usize) -> Runs {
        let of = |slice: AxisSlice, size| slice.runs(place.get(slice.axis), size);
        match (self.slice, self.nested) {
            (None, _) => Runs::one(0),
            (Some(slice), Some(nested)) if nested.dim == slice.dim => {
                of(slice, nested.full).skip(of(nested, local).at(0))
            }
            (Some(slice), _) => of(slice, local),
        }
    }

    /// The same of the dimension before that one.
    pub fn row_runs(&self, place: Coord, local: usize) -> Runs {
        match (self.slice, self.nested) {
            (Some(slice), Some(nested)) if nested.dim != slice.dim => {
                nested.runs(place.get(nested.axis), local)
            }
            _ => Runs::one(0),
        }
    }
}

/// Which keys the operands of an attention hold, where its queries are a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keys {
    /// Those of all positions.
    #[default]
    All,
    /// Those at the places of the queries: they go round the ranks, so that queries meet all. The
    /// operation communicates.
    Ring,
    /// Those at the places of the queries of this rank of the axis.
    OfRank(usize),
}

/// An attention, or its gradient, whose keys and values go round the ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Ring<'a> {
    /// The attention.
    pub spec: &'a Attention,
    /// The slice of the sequence whose keys and values a rank brings.
    pub slice: AxisSlice,
    /// Positions of keys and values among the operands.
    pub keys: Range<usize>,
    /// What is computed on the way.
    pub direction: Direction,
}

impl Ring<'_> {
    /// Messages of a rank, one after the other: gradients come home to their owner, keys and values
    /// end one rank before it.
    pub fn messages(&self, ranks: usize) -> usize {
        self.direction.pairs() * ranks - 1
    }
}

/// Whether a ring computes an attention or its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The attention.
    Forward,
    /// Its gradient: gradients of keys and values follow them.
    Gradient,
}

impl Direction {
    /// Pairs of tensors that go round.
    pub fn pairs(self) -> usize {
        match self {
            Self::Forward => 1,
            Self::Gradient => 2,
        }
    }
}

/// The places of the queries and the keys of an attention in a sequence of `len` positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// The places of the queries.
    pub queries: Runs,
    /// The places of the keys.
    pub keys: Runs,
    /// Number of positions.
    pub len: usize,
}

/// Scaled dot-product attention over packed heads.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Attention {
    /// Query heads in the local tensors.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Factor of the scores, usually `1/√head_dim`.
    pub scale: f64,
    /// Whether a query sees only keys at its own and earlier positions.
    pub causal: bool,
    /// With a sliding window, a query sees the keys less than this far from its own place. A causal
    /// query sees `window` keys, its own included. Another one sees up to `2 * window - 1`.
    pub window: Option<usize>,
    /// Whether the keys are those of another sequence than the queries: a decoder looks at what an
    /// encoder made.
    #[serde(default)]
    pub cross: bool,
    /// Whether a query sees only keys of its own document: `seen` has an id for each position, and
    /// a run of equal ids is a document. An id of 0 hides nothing then.
    #[serde(default)]
    pub documents: bool,
    /// The slice of the sequence that the queries are, where ranks share it.
    #[serde(default)]
    pub queries: Option<AxisSlice>,
    /// Which keys the operands hold, where the queries are a slice.
    #[serde(default)]
    pub keys: Keys,
    /// Dropout of the probabilities; `slice` refers to the heads (dimension 1 of `[B, H, S, S]`).
    pub dropout: Option<DropoutSpec>,
}

/// Positions of an attention's optional operands, where present.
///
/// The required operands may be followed by `seen [B, Sk] i64` (0 hides a key from all queries of
/// its sample; or the ids of documents; where keys go round, `[B, S]` for the whole sequence), then
/// by a pair of `table [R, heads]` and `index [Sq, Sk] i64`: the score of (head, query, key) gets
/// `table[index[query, key], head]` added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionOptions {
    /// Position of `seen`.
    pub seen: Option<usize>,
    /// Position of `table`; `index` is the next.
    pub table: Option<usize>,
}

impl Attention {
    /// Attention of all queries to all keys, with as many heads of keys as of queries and scores
    /// times `1/√head_dim`.
    pub fn of_heads(heads: usize, head_dim: usize) -> Self {
        Self {
            heads,
            kv_heads: heads,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            ..Self::default()
        }
    }

    /// Where the operands lie that the rank at `place` has, `local` queries among them, if the
    /// queries are a slice; otherwise the last queries stand at the last keys.
    pub fn places(&self, place: Coord, local: usize) -> Option<Places> {
        let slice = self.queries?;
        let queries = slice.runs(place.get(slice.axis), local);
        Some(Places {
            queries,
            keys: match self.keys {
                Keys::All => Runs::one(0),
                Keys::Ring => queries,
                Keys::OfRank(rank) => slice.runs(rank, local),
            },
            len: slice.full,
        })
    }

    /// The slice whose keys go round, if they do.
    pub fn ring(&self) -> Option<AxisSlice> {
        self.queries.filter(|_| self.keys == Keys::Ring)
    }

    /// Whether some of the `local` queries of the rank at `place` are near enough to one of as many
    /// keys to see it.
    pub fn meets(&self, place: Coord, local: usize) -> bool {
        let Some(Places { queries, keys, .. }) = self.places(place, local) else {
            return true;
        };
        let window = self.window.unwrap_or(usize::MAX);
        let reaches = |late: usize, early: usize| late < early.saturating_add(window);
        let sees = |queries: &Range<usize>, keys: &Range<usize>| {
            let is_early = !self.causal || keys.start < queries.end;
            is_early && reaches(queries.start, keys.end - 1) && reaches(keys.start, queries.end - 1)
        };
        let of = |runs: Runs| {
            let parts = runs.parts(0..local);
            parts.map(|(own, first)| first..first + own.len())
        };
        of(queries).any(|queries| of(keys).any(|keys| sees(&queries, &keys)))
    }

    /// The number of positions that the ids of documents, or the marks of hidden keys, cover, where
    /// the operands have `keys` keys.
    pub(crate) fn positions(&self, keys: usize) -> usize {
        match (self.keys, self.queries) {
            (Keys::Ring | Keys::OfRank(_), Some(slice)) => slice.full,
            _ => keys,
        }
    }
}

impl AttentionOptions {
    /// Finds them by their types after the first `required` operands.
    pub fn find<'a>(types: impl IntoIterator<Item = &'a TensorType>, required: usize) -> Self {
        let mut found = Self::default();
        let mut types = types.into_iter().enumerate().skip(required).peekable();
        found.seen = types
            .next_if(|(_, ty)| !ty.dtype.is_float())
            .map(|(position, _)| position);
        found.table = types.next().map(|(position, _)| position);
        found
    }

    /// The number of optional operands that are present.
    pub fn count(self) -> usize {
        usize::from(self.seen.is_some()) + 2 * usize::from(self.table.is_some())
    }
}

/// What the gradient of a joined value is on each of the ranks that join it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JoinedGrad {
    /// The whole gradient, since all ranks do the same work: a rank keeps its own slice.
    #[default]
    Whole,
    /// A summand, since each rank does a part of the work: the slices are summed.
    Summand,
}

/// Rotary position embedding, rotate-half convention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Size of one head.
    pub head_dim: usize,
    /// Angle per position for each pair of elements; `2 * inv_freq.len()` elements of a head are
    /// rotated.
    pub inv_freq: Vec<f32>,
    /// Factor of the rotated elements, 1 for a plain turn.
    pub scale: f64,
    /// Turns the other way, which is the gradient.
    pub inverse: bool,
}
