//! The inner kernel of f32 products on x86 processors with AVX-512, and the packing that feeds it.
//!
//! A tile of 14 x 32 sums lives in 28 of the 32 registers; each step over k loads 32 elements of b
//! and multiplies them with 14 elements of a, one at a time. That is 28 fused multiply-adds for 16
//! loads, so the multipliers never wait for memory while both operands lie packed in the first two
//! levels of the cache.
#![expect(
    unsafe_code,
    reason = "vector loads and stores, and calls behind a check of the processor"
)]

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_storeu_ps, _mm512_unpackhi_pd,
    _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

use std::any::TypeId;

use super::{Float, MatMut, MatRef, Start};

/// Rows of a tile.
pub(super) const ROWS: usize = 14;
/// Columns of a tile.
pub(super) const COLS: usize = 32;
const LANES: usize = 16;

/// Proof that this processor has AVX-512.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

#[expect(
    clippy::unused_self,
    reason = "having the proof is what makes the calls sound"
)]
impl Avx512 {
    /// The proof, where it holds.
    pub(super) fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }

    /// Lays out `src: [lanes, K]` as `out: [K, width]`, with zeros behind the lanes.
    pub(super) fn pack(self, src: MatRef<'_, f32>, width: usize, out: &mut [f32]) {
        // SAFETY: the processor has AVX-512F, as `self` proves.
        unsafe { pack(src, width, out) }
    }

    /// Computes `c = start + alpha a b` for packed `a: [K, rows of c]` and `b: [K, 32]`; `c` has at
    /// most 14 rows and 32 columns.
    pub(super) fn tile(
        self,
        alpha: f32,
        a: &[f32],
        b: &[f32],
        start: Start<'_, f32>,
        c: MatMut<'_, f32>,
    ) {
        // SAFETY: the processor has AVX-512F, as `self` proves.
        unsafe { tile(alpha, a, b, start, c) }
    }
}

/// The view of a matrix whose elements are f32.
pub(super) fn as_f32<T: Float>(matrix: MatRef<'_, T>) -> Option<MatRef<'_, f32>> {
    let view = matrix.into_faer();
    let (rows, cols) = (view.nrows(), view.ncols());
    let (row_stride, col_stride) = (view.row_stride(), view.col_stride());
    (TypeId::of::<T>() == TypeId::of::<f32>()).then(|| {
        let data = view.as_ptr().cast::<f32>();
        // SAFETY: T is f32, and pointer, shape and strides are those of a view that is alive.
        let view =
            unsafe { faer::MatRef::from_raw_parts(data, rows, cols, row_stride, col_stride) };
        MatRef::from_faer(view)
    })
}

/// The mutable view of a matrix whose elements are f32; the matrix if they are not.
pub(super) fn as_f32_mut<T: Float>(
    matrix: MatMut<'_, T>,
) -> Result<MatMut<'_, f32>, MatMut<'_, T>> {
    if TypeId::of::<T>() != TypeId::of::<f32>() {
        return Err(matrix);
    }
    let view = matrix.into_faer();
    let (rows, cols) = (view.nrows(), view.ncols());
    let (row_stride, col_stride) = (view.row_stride(), view.col_stride());
    let data = view.as_ptr_mut().cast::<f32>();
    // SAFETY: T is f32, and pointer, shape and strides are those of a view that was just given up.
    let view =
        unsafe { faer::MatMut::from_raw_parts_mut(data, rows, cols, row_stride, col_stride) };
    Ok(MatMut::from_faer(view))
}

#[target_feature(enable = "avx512f")]
fn tile(alpha: f32, a: &[f32], b: &[f32], start: Start<'_, f32>, c: MatMut<'_, f32>) {
    match c.rows() {
        1 => rows::<1>(alpha, a, b, start, c),
        2 => rows::<2>(alpha, a, b, start, c),
        3 => rows::<3>(alpha, a, b, start, c),
        4 => rows::<4>(alpha, a, b, start, c),
        5 => rows::<5>(alpha, a, b, start, c),
        6 => rows::<6>(alpha, a, b, start, c),
        7 => rows::<7>(alpha, a, b, start, c),
        8 => rows::<8>(alpha, a, b, start, c),
        9 => rows::<9>(alpha, a, b, start, c),
        10 => rows::<10>(alpha, a, b, start, c),
        11 => rows::<11>(alpha, a, b, start, c),
        12 => rows::<12>(alpha, a, b, start, c),
        13 => rows::<13>(alpha, a, b, start, c),
        ROWS => rows::<ROWS>(alpha, a, b, start, c),
        other => unreachable!("a tile of {other} rows"),
    }
}

#[target_feature(enable = "avx512f")]
fn rows<const R: usize>(
    alpha: f32,
    a: &[f32],
    b: &[f32],
    start: Start<'_, f32>,
    mut c: MatMut<'_, f32>,
) {
    for row in 0..R {
        let row = c.row_mut(row);
        let last = &row[row.len() - 1..];
        _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().cast());
        _mm_prefetch::<_MM_HINT_T0>(last.as_ptr().cast());
    }
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (a, b) in a.as_chunks::<R>().0.iter().zip(b.as_chunks::<COLS>().0) {
        let [b0, b1] = [load(&b[..LANES]), load(&b[LANES..])];
        for (sums, &a) in sums.iter_mut().zip(a) {
            let a = _mm512_set1_ps(a);
            sums[0] = _mm512_fmadd_ps(a, b0, sums[0]);
            sums[1] = _mm512_fmadd_ps(a, b1, sums[1]);
        }
    }
    if alpha.to_bits() != 1.0_f32.to_bits() {
        let alpha = _mm512_set1_ps(alpha);
        for pair in &mut sums {
            for sum in pair {
                *sum = _mm512_mul_ps(alpha, *sum);
            }
        }
    }
    for (row, pair) in sums.iter().enumerate() {
        let out = c.row_mut(row);
        let (low, high) = out.split_at_mut(out.len().min(LANES));
        for (half, (out, &sum)) in [low, high].into_iter().zip(pair).enumerate() {
            let sum = match start {
                Start::Zero => sum,
                Start::Output => _mm512_add_ps(load(out), sum),
                Start::Row(row) => {
                    _mm512_add_ps(load(row.get(half * LANES..).unwrap_or_default()), sum)
                }
            };
            store(sum, out);
        }
    }
}

#[target_feature(enable = "avx512f")]
fn pack(src: MatRef<'_, f32>, width: usize, out: &mut [f32]) {
    let lanes = src.rows();
    assert!(lanes <= width && out.len() == width * src.cols());
    if src.has_contiguous_cols() {
        let columns = src.transposed();
        for (k, out) in out.chunks_exact_mut(width).enumerate() {
            let (used, padding) = out.split_at_mut(lanes);
            copy(columns.row(k), used);
            padding.fill(0.0);
        }
        return;
    }
    for first in (0..width).step_by(LANES) {
        let stored = LANES.min(width - first);
        let mut sources: [&[f32]; LANES] = [&[]; LANES];
        for (lane, source) in sources.iter_mut().enumerate().take(stored) {
            if first + lane < lanes {
                *source = src.row(first + lane);
            }
        }
        for (block, out) in out.chunks_mut(LANES * width).enumerate() {
            let from = block * LANES;
            let mut rows = [_mm512_setzero_ps(); LANES];
            for (row, source) in rows.iter_mut().zip(&sources) {
                *row = load(source.get(from..).unwrap_or_default());
            }
            let columns = transpose(&rows);
            for (&column, out) in columns.iter().zip(out.chunks_exact_mut(width)) {
                store(column, &mut out[first..first + stored]);
            }
        }
    }
}

/// Copies up to 32 elements.
#[inline]
#[target_feature(enable = "avx512f")]
fn copy(from: &[f32], to: &mut [f32]) {
    for (from, to) in from.chunks(LANES).zip(to.chunks_mut(LANES)) {
        store(load(from), to);
    }
}

/// Up to 16 elements, zeros behind them.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(from: &[f32]) -> __m512 {
    if from.len() >= LANES {
        // SAFETY: the slice has 16 elements.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    } else {
        // SAFETY: the mask has a bit for each element of the slice alone.
        unsafe { _mm512_maskz_loadu_ps((1 << from.len()) - 1, from.as_ptr()) }
    }
}

/// Stores as many lanes as the slice has elements, 16 at most.
#[inline]
#[target_feature(enable = "avx512f")]
fn store(value: __m512, to: &mut [f32]) {
    if to.len() >= LANES {
        // SAFETY: the slice has 16 elements.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
    } else {
        // SAFETY: the mask has a bit for each element of the slice alone.
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), (1 << to.len()) - 1, value) }
    }
}

/// Rows of a 16 x 16 matrix to its columns: pairs, fours, then quarters of registers change places.
/// Loops only: a closure given to the standard library would be compiled without AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: &[__m512; LANES]) -> [__m512; LANES] {
    let mut fours = *rows;
    for i in (0..LANES).step_by(4) {
        let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
        let low_ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        let low_cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
        let high_ab = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        let high_cd = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_ab, low_cd));
        fours[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_ab, low_cd));
        fours[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_ab, high_cd));
        fours[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_ab, high_cd));
    }
    let mut columns = fours;
    for j in 0..4 {
        let [a, b, c, d] = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
        let even_ab = _mm512_shuffle_f32x4::<0x88>(a, b);
        let even_cd = _mm512_shuffle_f32x4::<0x88>(c, d);
        let odd_ab = _mm512_shuffle_f32x4::<0xdd>(a, b);
        let odd_cd = _mm512_shuffle_f32x4::<0xdd>(c, d);
        columns[j] = _mm512_shuffle_f32x4::<0x88>(even_ab, even_cd);
        columns[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd_ab, odd_cd);
        columns[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even_ab, even_cd);
        columns[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd_ab, odd_cd);
    }
    columns
}
