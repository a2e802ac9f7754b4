//! Operands of a product, copied into the order in which the register tile reads them.
#![expect(
    clippy::inline_always,
    reason = "an operand is turned in registers only where that is inlined into its dispatch"
)]

use super::super::{Float, MatMut, MatRef, simd::Body};
use super::prefetch::{prefetch_along, prefetch_below};
use super::tile::DEPTH;
use super::{Isa, Operand};

/// Elements between two rows of a strip: the depth and a cache line, so that rows do not fall into
/// one set of the cache.
pub(super) const ROW: usize = DEPTH + 16;

/// Element order of a packed strip: the one that needs no transpose of the operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Rows, each [`ROW`] elements after the last.
    Rows,
    /// Columns, each as long as a strip has rows.
    Columns,
}

impl Order {
    pub(super) fn of<T: Float>(a: &MatRef<'_, T>) -> Self {
        if a.has_contiguous_rows() {
            Order::Rows
        } else {
            Order::Columns
        }
    }

    /// Where a row of a packed strip begins.
    pub(super) fn offset(self, row: usize) -> usize {
        match self {
            Order::Rows => row * ROW,
            Order::Columns => row,
        }
    }
}

/// Packs a right operand, widened, into panels of `width` columns, row by row, with zeros past the
/// edge.
pub(super) fn pack_right<S: Isa, T: Float, W: Operand<T>>(
    simd: S,
    b: MatRef<'_, W>,
    width: usize,
    out: &mut [T],
) {
    let panel_len = b.rows() * width;
    if b.has_contiguous_rows() {
        let mut panels = MatMut::new(out, b.cols().div_ceil(width), panel_len);
        return simd.vectorize(Body(
            #[inline(always)]
            || pack_rows::<S, T, W>(simd, b, width, panels.reborrow()),
        ));
    }
    for (i, out) in out.chunks_exact_mut(panel_len).enumerate() {
        let cols = width.min(b.cols() - i * width);
        let columns = b.sub_cols(i * width, cols).transposed();
        simd.vectorize(Body(
            #[inline(always)]
            || turn::<S, T, W>(simd, columns, width, out),
        ));
    }
}

/// Packs rows of a left operand of depth [`DEPTH`] or less into strips of `STRIP` rows of [`ROW`]
/// elements. Elements past the edges are unspecified.
pub(super) fn pack_left<T: Float, const STRIP: usize>(a: MatRef<'_, T>, out: &mut [T]) {
    match Order::of(&a) {
        Order::Rows => {
            let strips = out.chunks_mut(STRIP * ROW);
            let rows = strips.flat_map(|strip| strip.chunks_exact_mut(ROW));
            for (row, out) in rows.take(a.rows()).enumerate() {
                out[..a.cols()].copy_from_slice(a.row(row));
            }
        }
        Order::Columns => {
            for k in 0..a.cols() {
                let strips = out.chunks_mut(STRIP * ROW);
                let line = a.transposed().row(k);
                for (i, (strip, column)) in strips.zip(line.chunks(STRIP)).enumerate() {
                    prefetch_below(&a.transposed(), line, i * STRIP);
                    let out = &mut strip[k * STRIP..][..STRIP];
                    if let Ok(column) = <&[T; STRIP]>::try_from(column) {
                        out.copy_from_slice(column);
                    } else {
                        out[..column.len()].copy_from_slice(column);
                    }
                }
            }
        }
    }
}

/// Packs a right operand whose rows are contiguous, in their order: row `p` of `out` is panel p.
#[inline(always)]
fn pack_rows<S: Isa, T: Float, W: Operand<T>>(
    simd: S,
    b: MatRef<'_, W>,
    width: usize,
    mut out: MatMut<'_, T>,
) {
    for k in 0..b.rows() {
        let line = b.row(k);
        for (panel, row) in line.chunks(width).enumerate() {
            for half in [0, width / 2] {
                prefetch_below(&b, line, panel * width + half);
            }
            let out = &mut out.row_mut(panel)[k * width..][..width];
            if row.len() == width {
                // Copies by registers: a call of memcpy would take longer than this short copy.
                for (out, &group) in T::registers_mut::<S>(out)
                    .iter_mut()
                    .zip(W::groups::<S>(row))
                {
                    *out = W::widen(simd, group);
                }
            } else {
                out.fill(T::ZERO);
                for (out, value) in out.iter_mut().zip(row) {
                    *out = value.wide();
                }
            }
        }
    }
}

/// Writes the columns of a matrix of at most `width` rows as rows of `width` elements, with zeros
/// past the edge.
#[inline(always)]
fn turn<S: Isa, T: Float, W: Operand<T>>(simd: S, x: MatRef<'_, W>, width: usize, out: &mut [T]) {
    let lanes = size_of::<T::Register<S>>() / size_of::<T>();
    let (squares, rest) = (x.cols() / lanes, x.cols() % lanes);
    if x.rows() < width {
        out.fill(T::ZERO);
    }
    for first in (0..x.rows()).step_by(lanes) {
        if first + lanes > x.rows() {
            turn_one_by_one(
                x.sub_rows(first, x.rows() - first),
                width,
                &mut out[first..],
            );
            break;
        }
        let band = x.sub_rows(first, lanes);
        for square in 0..squares {
            let mut rows = [T::splat(simd, T::ZERO); 16];
            for (i, row) in rows[..lanes].iter_mut().enumerate() {
                prefetch_along(&x, band.row(i), square * lanes, lanes);
                *row = W::widen(simd, W::groups::<S>(&band.row(i)[square * lanes..])[0]);
            }
            turn_square::<S, T>(simd, &mut rows[..lanes]);
            for (i, &row) in rows[..lanes].iter().enumerate() {
                let at = (square * lanes + i) * width + first;
                T::registers_mut::<S>(&mut out[at..])[0] = row;
            }
        }
        if rest > 0 {
            let done = squares * lanes;
            turn_one_by_one(
                band.sub_cols(done, rest),
                width,
                &mut out[done * width + first..],
            );
        }
    }
}

/// Transposes a square of registers. Each round interleaves the upper half with the lower half.
#[inline(always)]
pub(super) fn turn_square<S: Isa, T: Float>(simd: S, rows: &mut [T::Register<S>]) {
    let half = rows.len() / 2;
    for _ in 0..rows.len().ilog2() {
        let mut dealt = [rows[0]; 16];
        for i in 0..half {
            [dealt[2 * i], dealt[2 * i + 1]] = T::interleave(simd, rows[i], rows[half + i]);
        }
        rows.copy_from_slice(&dealt[..2 * half]);
    }
}

fn turn_one_by_one<T: Float, W: Operand<T>>(x: MatRef<'_, W>, width: usize, out: &mut [T]) {
    for row in 0..x.rows() {
        for (value, out) in x.row(row).iter().zip(out.chunks_mut(width)) {
            out[row] = value.wide();
        }
    }
}
