//! Norm blocks: the fixed pieces whose sums of squares make up the global norm.

use std::ops::Range;

/// Elements of one norm block: 64 KiB of f32.
///
/// Blocks count from the start of each local tensor, so the cut of the model into stages, buckets
/// and ZeRO parts never changes what one block holds. Small enough that parts made of whole blocks
/// are nearly equal, large enough that a model with 175 billion parameters over 8 tensor ranks
/// exchanges 11 MB for its norm.
pub const NORM_BLOCK: usize = 16 * 1024;

/// The number of norm blocks of a local tensor with `numel` elements.
pub(crate) fn num_norm_blocks(numel: usize) -> usize {
    numel.div_ceil(NORM_BLOCK)
}

/// One norm block of one parameter of this rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Position of the parameter in the layout.
    pub param: usize,
    /// Elements of the flat buffer.
    pub flat: Range<usize>,
    /// Elements of the local tensor, in row-major order.
    pub local: Range<usize>,
}

impl Block {
    /// The number of the block within its parameter.
    pub fn index(&self) -> usize {
        self.local.start / NORM_BLOCK
    }
}

/// The sum of the squares of a slice in f64, in an order that depends on its length alone.
///
/// Sixteen running sums take every sixteenth element each, which the compiler turns into vector
/// instructions, and are added from the first to the last at the end.
///
/// ```
/// assert_eq!(merak_zero::sum_of_squares(&[3.0, 4.0]), 25.0);
/// ```
pub fn sum_of_squares(values: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut sums = [0.0_f64; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(x) * f64::from(x);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(x) * f64::from(x);
    }
    sums.iter().sum()
}
