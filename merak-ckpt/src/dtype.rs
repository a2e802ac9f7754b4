//! Element types, as files name them.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

merak_mpu::named_enum! {
    /// The element type of a stored tensor.
    ///
    /// The names are those of `merak_mpu::DType` where both have the type, so a caller converts by
    /// name: `"bf16".parse::<DType>()`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    #[non_exhaustive]
    pub enum DType {
        /// 64-bit float.
        F64 = "f64",
        /// 32-bit float.
        F32 = "f32",
        /// 16-bit brain float.
        BF16 = "bf16",
        /// 16-bit IEEE float.
        F16 = "f16",
        /// 64-bit signed integer.
        I64 = "i64",
        /// 32-bit signed integer.
        I32 = "i32",
        /// 16-bit signed integer.
        I16 = "i16",
        /// 8-bit signed integer.
        I8 = "i8",
        /// 64-bit unsigned integer.
        U64 = "u64",
        /// 32-bit unsigned integer.
        U32 = "u32",
        /// 16-bit unsigned integer.
        U16 = "u16",
        /// 8-bit unsigned integer.
        U8 = "u8",
        /// One byte, 0 or 1.
        Bool = "bool",
    }
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::BF16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::BF16 | Self::F16)
    }

    /// A floating-point element as `f64`, or `None` for other types.
    pub(crate) fn to_f64(self, bytes: &[u8]) -> Option<f64> {
        match self {
            Self::F64 => bytes.try_into().ok().map(f64::from_le_bytes),
            Self::F32 => bytes.try_into().ok().map(|b| f32::from_le_bytes(b).into()),
            Self::BF16 => bytes.try_into().ok().map(|b| bf16::from_le_bytes(b).into()),
            Self::F16 => bytes.try_into().ok().map(|b| f16::from_le_bytes(b).into()),
            Self::I64
            | Self::I32
            | Self::I16
            | Self::I8
            | Self::U64
            | Self::U32
            | Self::U16
            | Self::U8
            | Self::Bool => None,
        }
    }

    /// Writes a floating-point element, rounded to nearest, ties to even.
    pub(crate) fn put_f64(self, value: f64, out: &mut [u8]) {
        match self {
            Self::F64 => out.copy_from_slice(&value.to_le_bytes()),
            Self::F32 => out.copy_from_slice(&(value as f32).to_le_bytes()),
            Self::BF16 => out.copy_from_slice(&bf16::from_f32(to_odd(value)).to_le_bytes()),
            Self::F16 => out.copy_from_slice(&f16::from_f32(to_odd(value)).to_le_bytes()),
            Self::I64
            | Self::I32
            | Self::I16
            | Self::I8
            | Self::U64
            | Self::U32
            | Self::U16
            | Self::U8
            | Self::Bool => unreachable!("only floating-point types are converted"),
        }
    }

    /// The same type in the words of a safetensors header.
    pub(crate) const fn to_safetensors(self) -> safetensors::Dtype {
        match self {
            Self::F64 => safetensors::Dtype::F64,
            Self::F32 => safetensors::Dtype::F32,
            Self::BF16 => safetensors::Dtype::BF16,
            Self::F16 => safetensors::Dtype::F16,
            Self::I64 => safetensors::Dtype::I64,
            Self::I32 => safetensors::Dtype::I32,
            Self::I16 => safetensors::Dtype::I16,
            Self::I8 => safetensors::Dtype::I8,
            Self::U64 => safetensors::Dtype::U64,
            Self::U32 => safetensors::Dtype::U32,
            Self::U16 => safetensors::Dtype::U16,
            Self::U8 => safetensors::Dtype::U8,
            Self::Bool => safetensors::Dtype::BOOL,
        }
    }
}

/// The number as `f32`, rounded to odd: between two `f32` numbers, the one with an odd last bit.
/// Rounding the result to a type of fewer bits equals rounding once, since only a true tie remains
/// a tie.
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let bits = nearest.to_bits();
    let wide = f64::from(nearest);
    if value.is_nan() || wide.to_bits() == value.to_bits() || bits % 2 == 1 {
        return nearest;
    }
    // One step toward the value; an infinity from overflow becomes the largest number.
    let is_beyond = wide.abs() > value.abs();
    f32::from_bits(if is_beyond { bits - 1 } else { bits + 1 })
}

/// A name that is no [`DType`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown element type `{found}`, expected one of {}",
    DType::ALL.map(DType::as_str).join(", ")
)]
pub struct UnknownDType {
    /// The name.
    pub found: String,
}

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        Self::from_name(text).ok_or_else(|| UnknownDType {
            found: text.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_agree_with_parsing_and_with_safetensors() {
        for dtype in DType::ALL {
            assert_eq!(dtype.as_str().parse(), Ok(dtype));
            assert_eq!(dtype.to_safetensors().bitsize(), 8 * dtype.size_bytes());
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(json, format!("\"{dtype}\""));
        }
        assert!("F32".parse::<DType>().is_err());
    }

    #[test]
    fn a_number_just_beyond_a_tie_is_rounded_away_from_it() {
        let put = |dtype: DType, value: f64| {
            let mut out = [0; 2];
            dtype.put_f64(value, &mut out);
            u16::from_le_bytes(out)
        };
        let of = |bits: u32| f64::from(f32::from_bits(bits));
        // 1 + 2^-8 and 1 + 2^-11 lie in the middle between two numbers, and so do halves of the
        // smallest numbers.
        for (dtype, tie, one) in [
            (DType::BF16, 0x3F80_8000, 0x3F80),
            (DType::F16, 0x3F80_1000, 0x3C00),
        ] {
            let cases = [(of(tie), one), (of(tie + 1), one + 1), (of(tie - 1), one)];
            for (value, expected) in cases {
                assert_eq!(put(dtype, value), expected, "{value}");
                assert_eq!(put(dtype, -value), expected | 0x8000, "{value}");
            }
            // Less than half a step of f32: a first rounding to that type would lose it.
            let step = 1.0 + f64::EPSILON;
            assert_eq!(put(dtype, of(tie) * step), one + 1);
            assert_eq!(put(dtype, of(tie) / step), one);
        }
        let half = 2.0_f64.powi(-25);
        let smallest = [half, half * (1.0 + f64::EPSILON)].map(|value| put(DType::F16, value));
        assert_eq!(smallest, [0, 1]);
        assert_eq!(put(DType::BF16, f64::MAX), bf16::INFINITY.to_bits());
        assert_eq!(put(DType::BF16, of(0x7F7F_7FFF)), bf16::MAX.to_bits());
        assert_eq!(put(DType::BF16, f64::INFINITY), bf16::INFINITY.to_bits());
        assert_eq!(put(DType::F16, f64::MIN_POSITIVE), 0);
        assert!(bf16::from_bits(put(DType::BF16, f64::NAN)).is_nan());
    }
}
