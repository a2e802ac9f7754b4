//! Products of packed operands with AVX-512.
//!
//! Blocked as in Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008),
//! section 5: the operands are copied so that the innermost loop reads both in order. For each
//! [`DEPTH`] of k, both are packed by all threads; then a thread takes blocks of the output, whose
//! part of the right operand stays in the second-level cache.
//!
//! Element (i, j) is a sum over k in blocks of [`DEPTH`], each in ascending order, whatever the
//! other rows and columns are and however the work is shared.
#![expect(
    clippy::inline_always,
    reason = "a tile stays in registers only where it is inlined into its dispatch"
)]

use std::ops::Range;

use pulp::x86::V4;

use super::super::{Float, MatMut, MatRef, Threads};
use super::pack::{Order, STRIP_LEN, pack};
use super::tile::{DEPTH, STRIP, finish, multiply};
use super::{Lanes, Start};

/// Strips of an output block, the unit of parallel work.
const BLOCK_STRIPS: usize = 2;

/// Panels of an output block: 1 MiB of the right operand.
const BLOCK_PANELS: usize = 16;

/// Whether packing pays: the copies are made once, but used once per row and column.
pub(super) fn pays(m: usize, k: usize, n: usize) -> bool {
    m >= 48 && n >= 32 && k >= 32
}

/// Computes `c = alpha a b + start`.
pub(super) fn product<T: Float>(
    simd: V4,
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, T>),
    start: Start<'_, T>,
    mut c: MatMut<'_, T>,
) {
    let width = columns::<T>();
    let (strips, panels) = (a.rows().div_ceil(STRIP), b.cols().div_ceil(width));
    for k in (0..a.cols()).step_by(DEPTH) {
        let depth = DEPTH.min(a.cols() - k);
        let (a, b) = (a.sub_cols(k, depth), b.sub_rows(k, depth));
        let start = if k == 0 { start } else { Start::Output };
        let (left_len, panel_len) = (strips * STRIP_LEN, depth * width);
        threads.with_scratch(left_len + panels * panel_len, |scratch| {
            let (left, right) = scratch.split_at_mut(left_len);
            pack(simd, threads, (a, left), (b, right, width));
            let order = Order::of(&a);
            let blocks = blocks(c.reborrow(), BLOCK_STRIPS * STRIP, BLOCK_PANELS * width);
            threads.for_each(blocks, |(row, col, out)| {
                let start = start.columns(col, out.cols());
                let strips = &left[row / STRIP * STRIP_LEN..];
                let panels = &right[col * depth..];
                simd.vectorize(
                    #[inline(always)]
                    || block(simd, order, alpha, strips, (panels, panel_len), start, out),
                );
            });
        });
    }
}

/// The blocks of an output with their first row and column, those of the same columns in a row.
fn blocks<T: Float>(
    c: MatMut<'_, T>,
    height: usize,
    width: usize,
) -> impl Iterator<Item = (usize, usize, MatMut<'_, T>)> {
    c.col_blocks(width).enumerate().flat_map(move |(j, block)| {
        let rows = block.row_blocks(height).enumerate();
        rows.map(move |(i, out)| (i * height, j * width, out))
    })
}

#[inline(always)]
fn block<T: Float>(
    simd: V4,
    order: Order,
    alpha: T,
    strips: &[T],
    (panels, panel_len): (&[T], usize),
    start: Start<'_, T>,
    out: MatMut<'_, T>,
) {
    for (strip, mut out) in strips.chunks(STRIP_LEN).zip(out.row_blocks(STRIP)) {
        let width = columns::<T>();
        for (j, panel) in panels.chunks(panel_len).enumerate() {
            let cols = j * width..out.cols().min((j + 1) * width);
            if cols.is_empty() {
                break;
            }
            let mut tile = Tile {
                simd,
                order,
                alpha,
                strip,
                panel,
                start: start.columns(cols.start, cols.len()),
                cols,
                out: out.reborrow(),
            };
            // The rows at the lower edge are done by fewer at a time.
            let mut row = 0;
            row = tile.rows::<STRIP>(row);
            row = tile.rows::<8>(row);
            row = tile.rows::<4>(row);
            row = tile.rows::<2>(row);
            tile.rows::<1>(row);
        }
    }
}

/// Columns of a panel.
#[inline(always)]
fn columns<T: Lanes>() -> usize {
    2 * size_of::<T::Register>() / size_of::<T>()
}

/// A strip times a panel.
struct Tile<'a, T> {
    simd: V4,
    order: Order,
    alpha: T,
    strip: &'a [T],
    panel: &'a [T],
    start: Start<'a, T>,
    cols: Range<usize>,
    out: MatMut<'a, T>,
}

impl<T: Float> Tile<'_, T> {
    /// Computes rows from `row` on, R at a time, as long as there are as many; gives the next row.
    #[inline(always)]
    fn rows<const R: usize>(&mut self, mut row: usize) -> usize {
        while row + R <= self.out.rows() {
            let strip = &self.strip[self.order.offset(row)..];
            let sums = multiply::<T, R>(self.simd, self.order, strip, self.panel);
            for (i, sums) in sums.iter().enumerate() {
                let out = &mut self.out.row_mut(row + i)[self.cols.clone()];
                finish(self.simd, self.alpha, sums, self.start, out);
            }
            row += R;
        }
        row
    }
}
