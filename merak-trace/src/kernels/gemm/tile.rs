//! The register tile: the innermost loop of a product.
#![expect(
    clippy::inline_always,
    reason = "a tile stays in registers only where it is inlined into its dispatch"
)]

use super::super::Float;
use super::pack::{Order, ROW};
use super::{Isa, Lanes, Start};

/// Rows of a register tile with AVX-512: with two registers of columns, 28 of the 32 registers hold
/// sums.
pub(super) const STRIP: usize = 14;

/// Products summed in registers before they are added to the output. Two registers of columns of
/// the right operand are then 64 KiB, which pass through the first-level cache, and a strip of the
/// left one 28 KiB, which stay in it.
pub(super) const DEPTH: usize = 512;

/// Sums of one tile: two registers per row.
pub(super) type Sums<S, T, const R: usize> = [[<T as Lanes>::Register<S>; 2]; R];

/// Sums over k of R rows of a packed strip times a packed panel.
#[inline(always)]
pub(super) fn multiply<S: Isa, T: Float, const STRIP: usize, const R: usize>(
    simd: S,
    order: Order,
    strip: &[T],
    panel: &[T],
) -> Sums<S, T, R> {
    let (panel, _) = pulp::as_arrays::<2, _>(T::registers::<S>(panel));
    let panel = &panel[..panel.len().min(DEPTH)];
    match order {
        Order::Rows => {
            let (rows, _) = pulp::as_arrays::<ROW, _>(strip);
            let rows: &[[T; ROW]; R] = rows[..R].try_into().expect("R rows were taken");
            sum(simd, panel, |k, row| rows[row][k])
        }
        Order::Columns => {
            let (columns, _) = pulp::as_arrays::<STRIP, _>(strip);
            let columns = &columns[..panel.len()];
            sum(simd, panel, |k, row| columns[k][row])
        }
    }
}

#[inline(always)]
fn sum<S: Isa, T: Float, const R: usize>(
    simd: S,
    panel: &[[T::Register<S>; 2]],
    left: impl Fn(usize, usize) -> T,
) -> Sums<S, T, R> {
    let mut sums = [[T::splat(simd, T::ZERO); 2]; R];
    for (k, &[b0, b1]) in panel.iter().enumerate() {
        for (row, [s0, s1]) in sums.iter_mut().enumerate() {
            let a = T::splat(simd, left(k, row));
            *s0 = T::mul_add(simd, a, b0, *s0);
            *s1 = T::mul_add(simd, a, b1, *s1);
        }
    }
    sums
}

/// Writes `alpha * sums + start` to a row of the output, which may end within the tile.
#[inline(always)]
pub(super) fn finish<S: Isa, T: Float>(
    simd: S,
    alpha: T,
    sums: &[T::Register<S>; 2],
    start: Start<'_, T>,
    out: &mut [T],
) {
    let width = 2 * size_of::<T::Register<S>>() / size_of::<T>();
    if out.len() < width {
        let sums: &[T] = bytemuck::cast_slice(sums);
        for (j, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
            let start = match start {
                Start::Zero => T::ZERO,
                Start::Output => *out,
                Start::Row(row) => row[j],
            };
            *out = sum.fma(alpha, start);
        }
        return;
    }
    // `black_box` keeps alpha out of the registers while the sums need them all.
    let alpha = T::splat(simd, std::hint::black_box(alpha));
    let out = T::registers_mut::<S>(out);
    let mut add = |register: usize, start| {
        out[register] = T::mul_add(simd, sums[register], alpha, start);
    };
    match start {
        Start::Zero => (0..2).for_each(|i| add(i, T::splat(simd, T::ZERO))),
        Start::Output => {
            for (out, &sum) in out.iter_mut().zip(sums) {
                *out = T::mul_add(simd, sum, alpha, *out);
            }
        }
        Start::Row(row) => {
            let row = T::registers::<S>(row);
            (0..2).for_each(|i| add(i, row[i]));
        }
    }
}
