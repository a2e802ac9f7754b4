//! Products of packed operands.
//!
//! Blocked as in Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008),
//! section 5: the operands are copied so that the innermost loop reads both in order. For each
//! [`DEPTH`] of k, all threads pack the left operand. For each block of columns they then pack its
//! part of the right operand, which stays in second-level caches, and each multiplies its rows by
//! it ([`Shares`]).
//!
//! Element (i, j) is a sum over k in blocks of [`DEPTH`], each in ascending order. It depends
//! neither on the other rows and columns nor on how the work is shared.
#![expect(
    clippy::inline_always,
    reason = "a tile stays in registers only where it is inlined into its dispatch"
)]

use super::super::{Float, MatMut, MatRef, Threads};
use super::pack::{Order, ROW, pack_left, pack_right};
use super::shares::{Shares, panel_groups};
use super::tile::{DEPTH, Share, Strip, Sums, columns, multiply};
use super::{Isa, Operand, Start, depths};

/// Whether packing pays: an operand is copied once and used once per row or column of the other.
pub(super) fn pays(m: usize, k: usize, n: usize) -> bool {
    m >= 48 && n >= 32 && k >= 32
}

/// Computes `c = alpha a b + start`.
pub(super) fn product<S: Isa, T: Float, W: Operand<T>, const STRIP: usize>(
    simd: S,
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    start: Start<'_, T>,
    mut c: MatMut<'_, T>,
) {
    let width = columns::<S, T>();
    let shares = Shares::new(a.rows(), threads.num_threads(), (STRIP, ROW));
    for (a, b, start) in depths(DEPTH, (a, b), start) {
        let panel_len = a.cols() * width;
        let panels = shares.block_panels(b.cols().div_ceil(width), most_panels::<S>());
        let order = Order::of(&a);
        let blocks = c.reborrow().col_blocks(panels * width).enumerate();
        threads.with_scratch(shares.packed_len(), |strips| {
            threads.for_each(shares.groups(strips), |(rows, out)| {
                pack_left::<T, STRIP>(a.sub_rows(rows.start, rows.len()), out);
            });
            threads.with_scratch(panels * panel_len, |packed| {
                for (i, out) in blocks {
                    let (col, cols) = (i * panels * width, out.cols());
                    let (b, start) = (b.sub_cols(col, cols), start.columns(col, cols));
                    let panel = (width, panel_len);
                    let groups = panel_groups(cols, threads.num_threads(), panel, packed);
                    threads.for_each(groups, |(cols, out)| {
                        pack_right(simd, b.sub_cols(cols.start, cols.len()), width, out);
                    });
                    threads.for_each(shares.of(out, width), |([strip, panel], out)| {
                        simd.vectorize(Share::<_, _, _, STRIP> {
                            simd,
                            alpha,
                            strip: NumberStrip::<_, STRIP> {
                                order,
                                numbers: shares.strip(strips, strip),
                            },
                            panels: &packed[panel * panel_len..],
                            panel_len,
                            start: start.columns(panel * width, out.cols()),
                            out,
                        });
                    });
                }
            });
        });
    }
}

/// Most panels that a share is multiplied by: half of a second-level cache, 1 MiB with AVX-512.
/// With AVX2 panels are half as wide and caches smaller: 256 KiB.
fn most_panels<S: Isa>() -> usize {
    S::REGISTER_COUNT / 2
}

/// A packed strip of numbers.
struct NumberStrip<'a, T, const STRIP: usize> {
    order: Order,
    numbers: &'a [T],
}

impl<S: Isa, T: Float, const STRIP: usize> Strip<S, T> for NumberStrip<'_, T, STRIP> {
    type Packed = T;

    #[inline(always)]
    fn sums<const R: usize>(&self, simd: S, row: usize, panel: &[T]) -> Sums<S, T, R> {
        let numbers = &self.numbers[self.order.offset(row)..];
        multiply::<S, T, STRIP, R>(simd, self.order, numbers, panel)
    }
}
