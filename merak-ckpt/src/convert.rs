//! Reading a piece in another element type than it is stored in.

use crate::{Checkpoint, DType, Piece, Result};
use half::{bf16, f16};

/// Elements that are converted at once.
const BLOCK_ELEMENTS: usize = 1 << 17;

impl Checkpoint {
    /// Reads a piece as [`Checkpoint::read`] does, and converts it where it is stored in another
    /// floating-point type (rounding to nearest, ties to even).
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
            // Padding keeps the caller's values.
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

/// Converts floating-point elements.
fn convert(from: DType, values: &[u8], to: DType, out: &mut [u8]) {
    match (from, to) {
        (DType::BF16, DType::F32) => {
            each(values, out, |value| {
                bf16::from_le_bytes(value).to_f32().to_le_bytes()
            });
        }
        (DType::F16, DType::F32) => {
            each(values, out, |value| {
                f16::from_le_bytes(value).to_f32().to_le_bytes()
            });
        }
        (DType::F32, DType::BF16) => {
            each(values, out, |value| {
                bf16::from_f32(f32::from_le_bytes(value)).to_le_bytes()
            });
        }
        (DType::F32, DType::F16) => {
            each(values, out, |value| {
                f16::from_f32(f32::from_le_bytes(value)).to_le_bytes()
            });
        }
        _ => convert_any(from, values, to, out),
    }
}

/// Converts elements of `A` bytes to elements of `B` bytes.
fn each<const A: usize, const B: usize>(
    values: &[u8],
    out: &mut [u8],
    one: impl Fn([u8; A]) -> [u8; B],
) {
    let (values, _) = values.as_chunks();
    let (out, _) = out.as_chunks_mut();
    for (value, out) in values.iter().zip(out) {
        *out = one(*value);
    }
}

/// Converts floating-point elements by way of `f64`, which has all values of the others.
fn convert_any(from: DType, values: &[u8], to: DType, out: &mut [u8]) {
    let values = values.chunks_exact(from.size_bytes());
    for (value, out) in values.zip(out.chunks_exact_mut(to.size_bytes())) {
        let value = from.to_f64(value).unwrap_or(f64::NAN);
        to.put_f64(value, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    #[test]
    fn the_usual_conversions_are_those_by_way_of_f64() {
        let narrow: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        // Every sign and exponent, with last bits around the middle between two narrow numbers.
        let ends = [
            0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x1_8000,
        ];
        let wide =
            (0..1_u32 << 14).flat_map(|high| ends.map(|end| (high << 18 | end).to_le_bytes()));
        let wide: Vec<u8> = wide.flatten().collect();
        for (from, to, values) in [
            (DType::BF16, DType::F32, &narrow),
            (DType::F16, DType::F32, &narrow),
            (DType::F32, DType::BF16, &wide),
            (DType::F32, DType::F16, &wide),
        ] {
            let mut converted =
                [(); 2].map(|()| vec![0; values.len() / from.size_bytes() * to.size_bytes()]);
            convert(from, values, to, &mut converted[0]);
            convert_any(from, values, to, &mut converted[1]);
            assert!(converted[0] == converted[1], "{from} to {to}");
        }
    }
}
