//! Element types of buffers and tensors.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a buffer or a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit brain float.
    BF16,
    /// 16-bit IEEE float.
    F16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit unsigned integer.
    U32,
    /// 8-bit unsigned integer.
    U8,
}

impl DType {
    /// Every element type, widest float first.
    pub const ALL: [Self; 7] = [
        Self::F64,
        Self::F32,
        Self::BF16,
        Self::F16,
        Self::I64,
        Self::U32,
        Self::U8,
    ];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::U32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// The alignment of one element in memory.
    pub(crate) const fn align(self) -> usize {
        match self {
            Self::F64 | Self::I64 => align_of::<u64>(),
            Self::F32 | Self::U32 => align_of::<u32>(),
            Self::BF16 | Self::F16 => align_of::<u16>(),
            Self::U8 => 1,
        }
    }

    /// Whether the elements are floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::BF16 | Self::F16)
    }

    /// The lower-case name, as in `f32`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::I64 => "i64",
            Self::U32 => "u32",
            Self::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

mod sealed {
    #[expect(unnameable_types, reason = "so that other crates cannot implement it")]
    pub trait Sealed {}
}

/// A Rust type that can be the element of a [`Buffer`](crate::Buffer).
pub trait Element: sealed::Sealed + bytemuck::Pod + Send + Sync + fmt::Debug {
    /// The element type that this Rust type stands for.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
elements!(f64 => F64, f32 => F32, bf16 => BF16, f16 => F16, i64 => I64, u32 => U32, u8 => U8);
