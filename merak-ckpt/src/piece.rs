//! A rank's piece of a tensor.

use crate::{DType, Error, Kind, Layout, Result};
use std::ops::Range;

/// Names a rank's piece of a tensor: the whole local tensor, or a flat range of it.
#[derive(Debug, Clone)]
pub struct Piece<'a> {
    /// The kind of the tensor.
    pub kind: &'a Kind,
    /// Its name.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// The place of the local tensor in the global one.
    pub layout: &'a Layout,
    /// Flat range of the **local** tensor (a ZeRO part), where it is not all of it.
    pub range: Option<Range<usize>>,
}

impl<'a> Piece<'a> {
    /// All of a rank's part of a parameter.
    pub fn parameter(name: &'a str, dtype: DType, layout: &'a Layout) -> Self {
        Self {
            kind: &Kind::Parameter,
            name,
            dtype,
            layout,
            range: None,
        }
    }
}

/// A [`Piece`] that borrows nothing, so that another thread can take it.
#[derive(Debug, Clone)]
pub struct OwnedPiece {
    /// The kind of the tensor.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// The place of the local tensor in the global one.
    pub layout: Layout,
    /// Flat range of the **local** tensor, where it is not all of it.
    pub range: Option<Range<usize>>,
}

impl Piece<'_> {
    /// The flat range of the local tensor.
    pub fn flat_range(&self) -> Range<usize> {
        self.range
            .clone()
            .unwrap_or(0..self.layout.num_local_elements())
    }

    /// Bytes of a buffer that holds the piece.
    pub fn num_bytes(&self) -> usize {
        self.flat_range()
            .len()
            .saturating_mul(self.dtype.size_bytes())
    }

    pub(crate) fn check_buffer(&self, found: usize) -> Result<()> {
        let range = self.flat_range();
        if range.start > range.end || range.end > self.layout.num_local_elements() {
            return Err(Error::InvalidLayout {
                shape: self.layout.shape().into(),
                reason: format!(
                    "the local shape {:?} has no range {range:?}",
                    self.layout.local_shape()
                ),
            });
        }
        if found != self.num_bytes() {
            return Err(Error::BufferLength {
                kind: self.kind.clone(),
                name: self.name.to_owned(),
                expected: self.num_bytes(),
                found,
            });
        }
        Ok(())
    }
}

impl OwnedPiece {
    /// The piece, borrowed.
    pub fn piece(&self) -> Piece<'_> {
        Piece {
            kind: &self.kind,
            name: &self.name,
            dtype: self.dtype,
            layout: &self.layout,
            range: self.range.clone(),
        }
    }
}

impl From<&Piece<'_>> for OwnedPiece {
    fn from(piece: &Piece<'_>) -> Self {
        Self {
            kind: piece.kind.clone(),
            name: piece.name.to_owned(),
            dtype: piece.dtype,
            layout: piece.layout.clone(),
            range: piece.range.clone(),
        }
    }
}
