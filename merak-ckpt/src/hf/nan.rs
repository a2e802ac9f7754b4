//! Telling which weights of an import are not numbers.

use crate::rewrite::Values;
use crate::words::brief;
use crate::{DType, Kind, Piece, Result};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Names that the warning has at most.
const NAMES: usize = 3;

/// Counts NaN while values are read: a checksum cannot show that a NaN was not intended.
pub(super) struct Watched<'a> {
    values: &'a dyn Values,
    /// For each weight that has some, how many.
    found: Mutex<BTreeMap<String, usize>>,
}

impl<'a> Watched<'a> {
    pub(super) fn new(values: &'a dyn Values) -> Self {
        let found = Mutex::default();
        Self { values, found }
    }

    /// Says in one line which weights have NaN, if any has.
    pub(super) fn warn(&self) {
        let found = self.found.lock();
        let found = found.expect("no thread panics while it holds the lock");
        if found.is_empty() {
            return;
        }
        let named = found.iter().take(NAMES);
        let named = named.map(|(name, count)| format!("{count} in {}", brief(name)));
        let rest = (found.len() > NAMES).then(|| "..".to_owned());
        let named: Vec<_> = named.chain(rest).collect();
        tracing::warn!(
            tensors = found.len(),
            "weights are NaN: {}",
            named.join(", ")
        );
    }
}

impl Values for Watched<'_> {
    fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        self.values.read_as(piece, out)?;
        if *piece.kind == Kind::Parameter {
            let count = count_nan(piece.dtype, out);
            if count > 0 {
                let found = self.found.lock();
                let mut found = found.expect("no thread panics while it holds the lock");
                *found.entry(piece.name.to_owned()).or_default() += count;
            }
        }
        Ok(())
    }

    fn check_rest(&self) -> Result<()> {
        self.values.check_rest()
    }
}

/// How many of the elements are NaN.
fn count_nan(dtype: DType, bytes: &[u8]) -> usize {
    match dtype {
        DType::F64 => count(bytes, |bits| f64::from_le_bytes(bits).is_nan()),
        DType::F32 => count(bytes, |bits| f32::from_le_bytes(bits).is_nan()),
        // Bits without the sign that are beyond those of infinity.
        DType::BF16 => count(bytes, |bits| i16::from_le_bytes(bits) & i16::MAX > 0x7f80),
        DType::F16 => count(bytes, |bits| i16::from_le_bytes(bits) & i16::MAX > 0x7c00),
        _ => 0,
    }
}

/// How many elements of `N` bytes are NaN by `is_nan`, which reads their bytes.
fn count<const N: usize>(bytes: &[u8], is_nan: impl Fn([u8; N]) -> bool) -> usize {
    let (elements, _) = bytes.as_chunks();
    // Without a branch for each element the compiler looks at several at once.
    let has_some = |block: &&[[u8; N]]| {
        block
            .iter()
            .fold(false, |found, element| found | is_nan(*element))
    };
    let blocks = elements.chunks(4096).filter(has_some);
    blocks.flatten().filter(|element| is_nan(**element)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_that_are_no_number_are_counted_in_every_type() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let width = dtype.size_bytes();
            let mut bytes = vec![0; 10_000 * width];
            let values = [f64::NAN, -f64::NAN, f64::INFINITY, -1.5, f64::NEG_INFINITY];
            for (at, value) in [0, 5000, 6000, 7000, 9999].into_iter().zip(values) {
                dtype.put_f64(value, &mut bytes[at * width..][..width]);
            }
            assert_eq!(count_nan(dtype, &bytes), 2, "{dtype}");
        }
        assert_eq!(count_nan(DType::I32, &[0xff; 8]), 0);
    }
}
