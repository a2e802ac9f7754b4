//! Products of matrices by libraries: blocks that are packed for the caches. On x86 with AVX2 or
//! AVX-512 `private-gemm-x86`, whose blocks faer uses too, and elsewhere `gemm`. Through faer, the
//! same calls took 50 seconds longer to compile.
#![expect(
    unsafe_code,
    reason = "both libraries take matrices as addresses and strides"
)]

use super::super::{Float, MatMut, MatRef};
use super::Write;

/// An element type of the libraries.
pub trait Element: Sized {
    /// How `private-gemm-x86` names the type.
    #[cfg(target_arch = "x86_64")]
    const NAME: private_gemm_x86::DType;
}

impl Element for f32 {
    #[cfg(target_arch = "x86_64")]
    const NAME: private_gemm_x86::DType = private_gemm_x86::DType::F32;
}

impl Element for f64 {
    #[cfg(target_arch = "x86_64")]
    const NAME: private_gemm_x86::DType = private_gemm_x86::DType::F64;
}

/// Computes `c = alpha a b` (or adds it) on the calling thread, for kernels that are parallel
/// outside.
///
/// # Panics
///
/// If the shapes do not fit each other.
pub fn gemm_inline<T: Float>(
    alpha: T,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    write: Write,
    mut c: MatMut<'_, T>,
) {
    super::check_shapes(&a, &b, &c);
    if a.cols() == 0 {
        if write == Write::Replace {
            c.fill(T::ZERO);
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = instructions() {
        return on_x86(instructions, alpha, a, b, write, c);
    }
    let ([c_row, c_col], [a_row, a_col], [b_row, b_col]) = (c.strides(), a.strides(), b.strides());
    // SAFETY: each view holds all elements that its shape and strides name, the shapes fit, and
    // `c` is borrowed alone. `T` is f32 or f64, the types of `Element`, which the library takes.
    unsafe {
        ::gemm::gemm(
            c.rows(),
            c.cols(),
            a.cols(),
            c.as_mut_ptr(),
            c_col,
            c_row,
            write == Write::Add,
            a.as_ptr(),
            a_col,
            a_row,
            b.as_ptr(),
            b_col,
            b_row,
            T::ONE,
            alpha,
            false,
            false,
            false,
            ::gemm::Parallelism::None,
        );
    }
}

/// The widest vectors of this processor that the blocks are written for.
#[cfg(target_arch = "x86_64")]
fn instructions() -> Option<private_gemm_x86::InstrSet> {
    use private_gemm_x86::InstrSet::{Avx256, Avx512};

    if is_x86_feature_detected!("avx512f") {
        Some(Avx512)
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        Some(Avx256)
    } else {
        None
    }
}

#[cfg(target_arch = "x86_64")]
fn on_x86<T: Float>(
    instructions: private_gemm_x86::InstrSet,
    alpha: T,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    write: Write,
    mut c: MatMut<'_, T>,
) {
    use std::ptr;

    use private_gemm_x86::{Accum, DstKind, IType};

    let accumulate = match write {
        Write::Replace => Accum::Replace,
        Write::Add => Accum::Add,
    };
    let ([c_row, c_col], [a_row, a_col], [b_row, b_col]) = (c.strides(), a.strides(), b.strides());
    // SAFETY: each view holds all elements that its shape and strides name, the shapes fit, and
    // `c` is borrowed alone. The processor has these instructions. Null stands for no permutation
    // of rows or columns and for no diagonal.
    unsafe {
        private_gemm_x86::gemm(
            T::NAME,
            IType::U64,
            instructions,
            c.rows(),
            c.cols(),
            a.cols(),
            c.as_mut_ptr().cast(),
            c_row,
            c_col,
            ptr::null(),
            ptr::null(),
            DstKind::Full,
            accumulate,
            a.as_ptr().cast(),
            a_row,
            a_col,
            false,
            ptr::null(),
            0,
            b.as_ptr().cast(),
            b_row,
            b_col,
            false,
            (&raw const alpha).cast(),
            1,
        );
    }
}
