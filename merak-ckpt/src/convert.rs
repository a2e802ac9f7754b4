//! Reading a piece in another element type than it is stored in.

use crate::{Checkpoint, DType, Piece, Result};

/// Elements that are converted at once.
const BLOCK_ELEMENTS: usize = 1 << 17;

impl Checkpoint {
    /// Reads a piece as [`Checkpoint::read`] does, and where it is stored in another
    /// floating-point type converts it (rounding to nearest, ties to even).
    ///
    /// # Errors
    /// As for [`Checkpoint::read`];
    /// [`Error::DTypeMismatch`](crate::Error::DTypeMismatch) only where one of the types is no
    /// floating-point type.
    pub fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        let stored = self.tensor(piece.kind, piece.name)?.dtype;
        if stored == piece.dtype || !(stored.is_float() && piece.dtype.is_float()) {
            return self.read(piece, out);
        }
        piece.check_buffer(out.len())?;
        let (range, width) = (piece.flat_range(), stored.size_bytes());
        let mut block = vec![0; range.len().min(BLOCK_ELEMENTS) * width];
        for (part, out) in out
            .chunks_mut(BLOCK_ELEMENTS * piece.dtype.size_bytes())
            .enumerate()
        {
            let begin = range.start + part * BLOCK_ELEMENTS;
            let end = begin + out.len() / piece.dtype.size_bytes();
            // Padding keeps what the caller put there.
            let block = &mut block[..(end - begin) * width];
            convert(piece.dtype, out, stored, block);
            let native = Piece {
                dtype: stored,
                range: Some(begin..end),
                ..piece.clone()
            };
            self.read(&native, block)?;
            convert(stored, block, piece.dtype, out);
        }
        Ok(())
    }
}

/// Converts floating-point elements one by one.
fn convert(from: DType, values: &[u8], to: DType, out: &mut [u8]) {
    let values = values.chunks_exact(from.size_bytes());
    for (value, out) in values.zip(out.chunks_exact_mut(to.size_bytes())) {
        let value = from.to_f64(value).unwrap_or(f64::NAN);
        to.put_f64(value, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn widening_and_back_is_the_identity_and_narrowing_rounds_to_even() {
        let narrow = [1.0_f32, -2.5, f32::INFINITY, 1e-40].map(bf16::from_f32);
        let bytes: Vec<u8> = narrow.iter().flat_map(|v| v.to_le_bytes()).collect();
        for wide in [DType::F32, DType::F64] {
            let mut widened = vec![0; 4 * wide.size_bytes()];
            convert(DType::BF16, &bytes, wide, &mut widened);
            let mut back = vec![0; bytes.len()];
            convert(wide, &widened, DType::BF16, &mut back);
            assert_eq!(back, bytes);
        }
        // Halfway between two bf16 numbers: the one with an even last bit.
        let mut out = [0; 2];
        convert(
            DType::F32,
            &f32::from_bits(0x3F80_8000).to_le_bytes(),
            DType::BF16,
            &mut out,
        );
        assert_eq!(out, 0x3F80_u16.to_le_bytes());
    }
}
