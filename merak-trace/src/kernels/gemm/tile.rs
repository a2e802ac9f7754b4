//! The tiles of a share of an output: the innermost loop of a product, and how tiles are written.
#![expect(
    clippy::inline_always,
    reason = "a tile stays in registers only where it is inlined into its dispatch"
)]

use pulp::NullaryFnOnce;

use super::super::{Float, MatMut};
use super::pack::{Order, ROW};
use super::prefetch::prefetch_tile;
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

/// A packed strip of a left operand.
pub(super) trait Strip<S: Isa, T: Float> {
    /// What is packed: numbers, or pairs of them.
    type Packed;

    /// Sums over k of R rows from `row` on times a packed panel.
    fn sums<const R: usize>(&self, simd: S, row: usize, panel: &[Self::Packed]) -> Sums<S, T, R>;
}

/// A share of an output: a strip of up to `ROWS` rows times packed panels, from its first one on.
pub(super) struct Share<'a, S: Isa, T: Float, P: Strip<S, T>, const ROWS: usize> {
    pub(super) simd: S,
    pub(super) alpha: T,
    pub(super) strip: P,
    pub(super) panels: &'a [P::Packed],
    /// Packed elements of a panel.
    pub(super) panel_len: usize,
    pub(super) start: Start<'a, T>,
    pub(super) out: MatMut<'a, T>,
}

impl<S: Isa, T: Float, P: Strip<S, T>, const ROWS: usize> NullaryFnOnce
    for Share<'_, S, T, P, ROWS>
{
    type Output = ();

    /// Computes `alpha * strip * panels + start`.
    #[inline(always)]
    fn call(self) {
        let width = columns::<S, T>();
        let panels = self.panels.chunks_exact(self.panel_len);
        for (j, (panel, out)) in panels.zip(self.out.col_blocks(width)).enumerate() {
            let mut tile = Tile {
                simd: self.simd,
                alpha: self.alpha,
                strip: &self.strip,
                panel,
                start: self.start.columns(j * width, out.cols()),
                out,
            };
            // The rows left at the lower edge are computed in smaller groups.
            let mut row = 0;
            row = tile.rows::<ROWS>(row);
            row = tile.rows::<8>(row);
            row = tile.rows::<4>(row);
            row = tile.rows::<2>(row);
            tile.rows::<1>(row);
        }
    }
}

/// A strip times a panel.
struct Tile<'a, S: Isa, T: Float, P: Strip<S, T>> {
    simd: S,
    alpha: T,
    strip: &'a P,
    panel: &'a [P::Packed],
    start: Start<'a, T>,
    out: MatMut<'a, T>,
}

impl<S: Isa, T: Float, P: Strip<S, T>> Tile<'_, S, T, P> {
    /// Computes whole groups of R rows from `row` on; returns the next row.
    #[inline(always)]
    fn rows<const R: usize>(&mut self, mut row: usize) -> usize {
        while row + R <= self.out.rows() {
            let (_, out) = self.out.reborrow().split_rows(row);
            let (mut out, _) = out.split_rows(R);
            prefetch_tile(&mut out);
            let sums = self.strip.sums::<R>(self.simd, row, self.panel);
            write::<S, T, R>(self.simd, self.alpha, &sums, self.start, out);
            row += R;
        }
        row
    }
}

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

/// Columns of a tile.
#[inline(always)]
pub(super) fn columns<S: Isa, T: Lanes>() -> usize {
    2 * size_of::<T::Register<S>>() / size_of::<T>()
}

/// Writes `alpha * sums + start` to a tile of the output, which may have fewer columns than sums.
#[inline(always)]
pub(super) fn write<S: Isa, T: Float, const R: usize>(
    simd: S,
    alpha: T,
    sums: &Sums<S, T, R>,
    start: Start<'_, T>,
    out: MatMut<'_, T>,
) {
    if out.cols() < columns::<S, T>() {
        // A copy for the loops of this rare case, so that whole tiles are written without a loop.
        let sums = std::hint::black_box(*sums);
        return write_edge::<S, T>(alpha, &sums, start, out);
    }
    // `black_box` keeps alpha out of the registers while the sums need them all.
    let alpha = T::splat(simd, std::hint::black_box(alpha));
    // What differs is asked for once, not for each row.
    match start {
        Start::Zero => {
            let zeros = [T::splat(simd, T::ZERO); 2];
            write_rows(simd, alpha, sums, |_| zeros, out);
        }
        Start::Output => write_rows(simd, alpha, sums, |out| *out, out),
        Start::Row(row) => {
            let row = *T::registers::<S>(row).first_chunk().expect(ALL_COLUMNS);
            write_rows(simd, alpha, sums, |_| row, out);
        }
    }
}

const ALL_COLUMNS: &str = "the tile has all columns";

/// Writes rows that have all columns, each from a start that may depend on what is there.
#[inline(always)]
fn write_rows<S: Isa, T: Float, const R: usize>(
    simd: S,
    alpha: T::Register<S>,
    sums: &Sums<S, T, R>,
    start: impl Fn(&[T::Register<S>; 2]) -> [T::Register<S>; 2],
    mut out: MatMut<'_, T>,
) {
    for (row, &[first, second]) in (0..out.rows()).zip(sums) {
        let out = T::registers_mut::<S>(out.row_mut(row));
        let out = out.first_chunk_mut().expect(ALL_COLUMNS);
        let start = start(out);
        out[0] = T::mul_add(simd, first, alpha, start[0]);
        out[1] = T::mul_add(simd, second, alpha, start[1]);
    }
}

/// Writes rows that end within the tile.
#[inline(always)]
fn write_edge<S: Isa, T: Float>(
    alpha: T,
    sums: &[[T::Register<S>; 2]],
    start: Start<'_, T>,
    mut out: MatMut<'_, T>,
) {
    for (row, sums) in (0..out.rows()).zip(sums) {
        let sums: &[T] = bytemuck::cast_slice(sums);
        for (j, (out, sum)) in out.row_mut(row).iter_mut().zip(sums).enumerate() {
            let start = match start {
                Start::Zero => T::ZERO,
                Start::Output => *out,
                Start::Row(row) => row[j],
            };
            *out = sum.fma(alpha, start);
        }
    }
}
