//! The options of a rewrite.

use crate::LayerLists;
use merak_trace::Axis;

/// The placement of values between the split regions on the ranks of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sequence {
    /// Every rank has all of them.
    #[default]
    Whole,
    /// Each rank has a slice of the dimension that holds the sequence: 1 for hidden states
    /// `[batch, sequence, width]`, 0 for `[sequence, batch, width]`.
    Cut {
        /// The dimension.
        dim: usize,
    },
    /// Every rank has all of them, in a graph with the nodes of [`Sequence::Cut`] one for one: for
    /// sequences of any length, which take the stages of a training as they are.
    WholeLikeCut {
        /// The dimension that is cut there.
        dim: usize,
    },
}

merak_trace::named_enum! {
    /// How the attentions of a cut sequence see what other ranks have.
    ///
    /// Under a causal mask, later queries see more keys. Where ranks keep their queries, and twice
    /// their number `N` divides the sequence (the second dimension), the sequence is cut into `2N`
    /// slices: rank `r` has the `r`-th from the beginning and the `r`-th from the end. All ranks do
    /// the same work then.
    ///
    /// Attentions with a table of biases, or with keys of another length, share out their heads by
    /// every method.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum SequenceMethod {
        /// The heads are shared out between an all-to-all before and one after each attention
        /// ([Jacobs et al. 2023](https://arxiv.org/abs/2309.14509)): at most as many ranks as
        /// heads.
        #[default]
        Ulysses = "ulysses",
        /// Each rank gathers the keys and values of all positions for the queries of its own
        /// ([Dubey et al. 2024](https://arxiv.org/abs/2407.21783), section 3.3.2): any number of
        /// ranks.
        AllGather = "all_gather",
        /// Keys and values go round the ranks, each of which meets them with the queries of its own
        /// ([Liu et al. 2023](https://arxiv.org/abs/2310.01889)): any number of ranks, which
        /// compute with the keys of one at a time.
        Ring = "ring",
    }
}

/// The layers that are split, the ranks that share them, and the values between the split regions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The axis of the mesh: that of tensors, whose ranks share the layers of the lists, or that of
    /// sequences, whose ranks share all work along them.
    pub(crate) axis: Axis,
    /// Ranks of the axis.
    pub degree: usize,
    /// Layers that are split.
    pub lists: LayerLists,
    /// Entries of a vocabulary that is split too: tables with as many rows in which ids of an input
    /// are looked up, and output layers with as many features. Every rank has room for the same
    /// number of entries; padding makes up where the degree does not divide them.
    pub vocab: Option<usize>,
    /// The placement of values between the split regions.
    pub sequence: Sequence,
    /// How the attentions of a cut sequence see what other ranks have.
    pub(crate) method: SequenceMethod,
}

impl Options {
    /// A split over `degree` ranks of the tensor axis: of no layer yet, nor of a vocabulary, with
    /// whole values between the regions.
    pub fn new(degree: usize) -> Self {
        Self {
            axis: Axis::Tensor,
            degree,
            lists: LayerLists::default(),
            vocab: None,
            sequence: Sequence::Whole,
            method: SequenceMethod::Ulysses,
        }
    }

    /// A cut of all work along the sequence over `degree` ranks of the sequence axis. A split over
    /// the tensor axis comes first.
    pub fn along_sequence(degree: usize, sequence: Sequence, method: SequenceMethod) -> Self {
        Self {
            axis: Axis::Sequence,
            sequence,
            method,
            ..Self::new(degree)
        }
    }

    /// The same by [`SequenceMethod::Ulysses`].
    pub fn ulysses(degree: usize, sequence: Sequence) -> Self {
        Self::along_sequence(degree, sequence, SequenceMethod::Ulysses)
    }

    /// The same with the layers of these lists.
    #[must_use]
    pub fn with_lists(self, lists: LayerLists) -> Self {
        Self { lists, ..self }
    }

    /// The same with the number of entries of the vocabulary, if there is one.
    #[must_use]
    pub fn with_vocab(self, vocab: impl Into<Option<usize>>) -> Self {
        let vocab = vocab.into();
        Self { vocab, ..self }
    }

    /// The same with another placement of the values between the regions.
    #[must_use]
    pub fn with_sequence(self, sequence: Sequence) -> Self {
        Self { sequence, ..self }
    }

    /// The same over another number of ranks.
    #[must_use]
    pub fn with_degree(self, degree: usize) -> Self {
        Self { degree, ..self }
    }
}
