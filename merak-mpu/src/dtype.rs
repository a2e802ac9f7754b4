//! Element types of buffers and tensors.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::fmt;

crate::named_enum! {
    /// The element type of a buffer or a tensor.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
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
        /// 32-bit unsigned integer.
        U32 = "u32",
        /// 8-bit unsigned integer.
        U8 = "u8",
    }
}

impl DType {
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
