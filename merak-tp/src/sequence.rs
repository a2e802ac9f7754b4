//! Cuts of the sequence: over the tensor axis between split regions
//! ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198)), and over the sequence axis, for
//! Ulysses, all-gathers and rings.

use crate::{Error, Options, Result, Sequence, SequenceMethod, error::divisors};
use merak_trace::{Shard, TensorType};

impl Options {
    /// The dimension of hidden states that holds the sequence, if the graph is one with cuts.
    pub(crate) fn sequence_dim(&self) -> Option<usize> {
        match self.sequence {
            Sequence::Whole => None,
            Sequence::Cut { dim } | Sequence::WholeLikeCut { dim } => Some(dim),
        }
    }

    /// Whether a rank has all of what is cut by its placement.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.sequence, Sequence::WholeLikeCut { .. })
    }

    /// The cut of dimension `dim` of a value, made for the layer at `place`.
    ///
    /// # Errors
    /// [`Error::Sequence`] when the ranks cannot share it evenly.
    pub(crate) fn cut(&self, ty: &TensorType, dim: usize, place: &str) -> Result<Shard> {
        let len = ty.shape[dim];
        if !self.is_whole() && !len.is_multiple_of(self.degree) {
            return Err(Error::Sequence {
                module: place.to_owned(),
                len,
                axis: self.axis,
                degree: self.degree,
                legal: divisors(len),
            });
        }
        Ok(self.evenly(dim, len))
    }

    /// Even slices of `len` indices, mirrored where the method balances them and they allow it.
    pub(crate) fn evenly(&self, dim: usize, len: usize) -> Shard {
        if self.mirrors(len) {
            Shard::mirrored(dim, len)
        } else {
            Shard::new(dim, vec![len])
        }
    }

    /// Whether slices of `len` indices are mirrored.
    pub(crate) fn mirrors(&self, len: usize) -> bool {
        let balances = match self.method {
            SequenceMethod::Ulysses => false,
            SequenceMethod::AllGather | SequenceMethod::Ring => true,
        };
        // Masks of dropout number the first dimension by one run.
        let is_second = self.sequence_dim() == Some(1);
        balances && is_second && !self.is_whole() && len.is_multiple_of(2 * self.degree)
    }

    /// How the sum of a layer's partial results is cut: along the sequence, if it has one before
    /// its features.
    pub(crate) fn cut_sum(&self, ty: &TensorType, place: &str) -> Result<Option<Shard>> {
        match self.sequence_dim() {
            Some(dim) if dim + 1 < ty.ndim() => self.cut(ty, dim, place).map(Some),
            _ => Ok(None),
        }
    }
}
