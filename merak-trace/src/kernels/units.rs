//! The units of a processor that multiply bf16.

merak_mpu::named_enum! {
    /// Which units that multiply bf16 a product may use; the fastest of them is taken.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
    pub enum Units {
        /// None of them: multiply-adds of `f32`.
        None = "none",
        /// Vectors of bf16 pairs (AVX-512-BF16).
        Vector = "vector",
        /// Matrix units (AMX) too.
        #[default]
        Matrix = "matrix",
    }
}

impl Units {
    /// The fastest units that this processor has.
    pub fn of_processor() -> Self {
        #[cfg(target_arch = "x86_64")]
        let found = super::gemm::units();
        #[cfg(not(target_arch = "x86_64"))]
        let found = Self::None;
        found
    }
}
