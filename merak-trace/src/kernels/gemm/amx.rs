//! Products on the matrix units of a processor (AMX), which multiply bf16: factors that are rounded
//! to bf16 take one product of tiles, and f32 products take six.
//!
//! An f32 is the exact sum of three bf16, `a = a1 + a2 + a3`, each about 256 times smaller than the
//! one before. Of the nine products of two such sums the six largest are kept. The dropped ones are
//! about half a unit in the last place of `a b` on average, always towards zero, and less than the
//! rounding error of summing in f32. So a product is as exact as one of fused multiply-adds, at a
//! sixth of the unit's speed for bf16, which is still more than twice that of AVX-512. The idea is
//! that of Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
//! Higher-Precision Computations" (2019).
//!
//! Parts below 2^-126 count as zero, so values below 2^-110 lose digits. Infinities and NaN cannot
//! be split: a tile that depends on one is computed in f32. Rounded ones are multiplied as they
//! are.
//!
//! Element (i, j) is a sum over k in blocks of [`DEPTH`], in an order that depends only on k, not
//! on how the work is shared.
#![expect(
    clippy::inline_always,
    reason = "packing and writing use registers only where they are inlined into their dispatch"
)]

use pulp::x86::V4;

use super::super::{MatMut, MatRef, Threads, Units, simd::Body};
use super::prefetch::prefetch_tile;
use super::tile::write;
use super::{Operand, Start, Write, depths, gemm_inline};
use pack::{GROUP, LINES, Layout, MAX_PANELS, Parts, group_len, pack};
use tiles::{Sums, Tiles};

pub(super) use pack::SPLIT;
pub(super) use tiles::available;

mod pack;
mod tiles;

/// Depth of a block of k: long enough that writing the sums takes little of the time, short enough
/// that a block of packed columns, of 768 KiB, stays in the second-level cache.
const DEPTH: usize = 512;

/// Most columns of an output that a thread computes at once. Packed, they take the same memory for
/// any number of parts.
const fn block_cols(parts: usize) -> usize {
    MAX_PANELS / parts * LINES
}

/// Rows of the left operand that are packed at a time: enough that neighbours along a column share
/// pages and cache lines.
const ROWS: usize = 4 * LINES;

/// Computes `c = alpha a b + start` of numbers that are split into three parts, or rounded to one.
///
/// # Errors
/// This process has no matrix units; `c` is unchanged.
pub(super) fn product<'c, W, S, const PARTS: usize>(
    simd: S,
    threads: &Threads,
    alpha: f32,
    (a, b): (MatRef<'_, f32>, MatRef<'_, W>),
    start: Start<'_, f32>,
    c: MatMut<'c, f32>,
) -> Result<(), MatMut<'c, f32>>
where
    W: Operand<f32>,
    S: Parts<f32, PARTS> + Parts<W, PARTS>,
{
    if threads.units() < Units::Matrix || !available() {
        return Err(c);
    }
    compute(simd, threads, alpha, (a, b), start, c);
    Ok(())
}

/// The same where the units are known to be there.
fn compute<W, S, const PARTS: usize>(
    simd: S,
    threads: &Threads,
    alpha: f32,
    (a, b): (MatRef<'_, f32>, MatRef<'_, W>),
    start: Start<'_, f32>,
    mut c: MatMut<'_, f32>,
) where
    W: Operand<f32>,
    S: Parts<f32, PARTS> + Parts<W, PARTS>,
{
    let (height, width) = block_size::<PARTS>(a.rows(), b.cols(), threads.num_threads());
    for (a, b, start) in depths(DEPTH, (a, b), start) {
        let blocks = c.reborrow().row_blocks(height).enumerate();
        let blocks = blocks.flat_map(|(i, rows)| {
            let blocks = rows.col_blocks(width).enumerate();
            blocks.map(move |(j, out)| (i * height, j * width, out))
        });
        with_shared_strips::<S, PARTS>(simd, threads, a, |shared| {
            threads.for_each(blocks, |(row, col, out)| {
                let strips = shared.get(packed_len::<PARTS>(row, a.cols())..);
                let block = Block::<W, S, PARTS> {
                    simd,
                    threads,
                    alpha,
                    a: a.sub_rows(row, out.rows()),
                    b: b.sub_cols(col, out.cols()),
                    start: start.columns(col, out.cols()),
                    shared: strips.unwrap_or_default(),
                    out,
                };
                block.run();
            });
        });
    }
}

/// Whether threads share the packed left operand. Rounded, it is a third as long as split, and to
/// read it from a cache that is shared takes less than to pack it again.
const fn shares_strips(parts: usize) -> bool {
    parts == 1
}

/// Packs the whole left operand, some rows on each thread, if threads share it.
fn with_shared_strips<S: Parts<f32, PARTS>, const PARTS: usize>(
    simd: S,
    threads: &Threads,
    a: MatRef<'_, f32>,
    f: impl FnOnce(&[u32]),
) {
    if !shares_strips(PARTS) {
        return f(&[]);
    }
    threads.with_scratch(packed_len::<PARTS>(a.rows(), a.cols()), |strips| {
        let groups = strips.chunks_mut(packed_len::<PARTS>(ROWS, a.cols()));
        threads.for_each(groups.enumerate(), |(i, strips)| {
            let first = i * ROWS;
            let a = a.sub_rows(first, ROWS.min(a.rows() - first));
            simd.vectorize(Body(
                #[inline(always)]
                || {
                    pack(simd, a, Layout::Lines, strips);
                },
            ));
        });
        f(strips);
    });
}

/// Height and width of the blocks of an output, in whole panels, at least one for each thread where
/// the output is large enough. Each thread packs the columns of its block. Where it packs the rows
/// too, the longer side is cut further; where threads share them, the columns are.
fn block_size<const PARTS: usize>(rows: usize, cols: usize, num_threads: usize) -> (usize, usize) {
    let cut = |len: usize, parts: usize, of: usize| len.div_ceil(parts).next_multiple_of(of);
    let col_parts = cols.div_ceil(block_cols(PARTS));
    if rows > cols && !shares_strips(PARTS) {
        return (cut(rows, num_threads, LINES), cut(cols, col_parts, LINES));
    }
    let width = cut(cols, col_parts.next_multiple_of(num_threads), LINES);
    let row_parts = num_threads.div_ceil(cols.div_ceil(width));
    (cut(rows, row_parts, ROWS), width)
}

/// Elements of packed memory for `lines` rows or columns.
fn packed_len<const PARTS: usize>(lines: usize, depth: usize) -> usize {
    lines.div_ceil(LINES) * depth.div_ceil(GROUP) * group_len(PARTS)
}

/// A block of the output, for one thread, and what is multiplied for it.
struct Block<'a, W, S, const PARTS: usize> {
    simd: S,
    threads: &'a Threads,
    alpha: f32,
    a: MatRef<'a, f32>,
    b: MatRef<'a, W>,
    start: Start<'a, f32>,
    /// The packed rows from its first on, if threads share them.
    shared: &'a [u32],
    out: MatMut<'a, f32>,
}

impl<W, S, const PARTS: usize> Block<'_, W, S, PARTS>
where
    W: Operand<f32>,
    S: Parts<f32, PARTS> + Parts<W, PARTS>,
{
    fn run(mut self) {
        let depth = self.a.cols();
        let own_rows = if shares_strips(PARTS) { 0 } else { ROWS };
        let len = packed_len::<PARTS>;
        self.threads.with_scratch(len(own_rows, depth), |strips| {
            self.threads
                .with_scratch(len(self.b.cols(), depth), |panels| {
                    self.simd.vectorize(Body(
                        #[inline(always)]
                        || self.multiply(strips, panels),
                    ));
                });
        });
    }

    #[inline(always)]
    fn multiply(&mut self, own_strips: &mut [u32], panels: &mut [u32]) {
        let (simd, alpha) = (self.simd, self.alpha);
        let (tiles, mut sums) = (Tiles::configure(), Sums::new());
        let panel_len = packed_len::<PARTS>(1, self.a.cols());
        let finite_panels = pack(simd, self.b.transposed(), Layout::Pairs, panels);
        for (i, out) in self.out.reborrow().row_blocks(ROWS).enumerate() {
            let a = self.a.sub_rows(i * ROWS, out.rows());
            let len = packed_len::<PARTS>(out.rows(), a.cols());
            let (strips, finite_strips) = if shares_strips(PARTS) {
                let first = i * packed_len::<PARTS>(ROWS, a.cols());
                (&self.shared[first..][..len], [true; MAX_PANELS])
            } else {
                let strips = &mut own_strips[..len];
                let finite = pack(simd, a, Layout::Lines, strips);
                (&*strips, finite)
            };
            let strips = strips.chunks_exact(panel_len).zip(finite_strips);
            for (i, ((strip, finite), out)) in strips.zip(out.row_blocks(LINES)).enumerate() {
                let a = a.sub_rows(i * LINES, out.rows());
                let panels = panels.chunks_exact(panel_len).zip(finite_panels);
                let tiles_of_row = panels.zip(out.col_blocks(LINES)).enumerate();
                for (j, ((panel, finite_panel), mut out)) in tiles_of_row {
                    let start = self.start.columns(j * LINES, out.cols());
                    if finite && finite_panel {
                        prefetch_tile(&mut out);
                        tiles.multiply::<PARTS>(strip, panel, &mut sums);
                        write::<V4, f32, _>(simd.wide(), alpha, sums.rows(), start, out);
                    } else {
                        let b = self.b.sub_cols(j * LINES, out.cols());
                        W::with_wide(self.threads, b, |b| {
                            multiply_in_f32(alpha, (a, b), start, out);
                        });
                    }
                }
            }
        }
    }
}

/// Computes a tile of the output that depends on infinities or NaN.
#[cold]
fn multiply_in_f32(
    alpha: f32,
    (a, b): (MatRef<'_, f32>, MatRef<'_, f32>),
    start: Start<'_, f32>,
    mut out: MatMut<'_, f32>,
) {
    if let Start::Row(row) = start {
        (0..out.rows()).for_each(|i| out.row_mut(i).copy_from_slice(row));
    }
    let write = match start {
        Start::Zero => Write::Replace,
        Start::Output | Start::Row(_) => Write::Add,
    };
    gemm_inline(alpha, a, b, write, out);
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::super::testing::{
        assert_close, noise, on_any_threads, product_of, to_f64, transposed,
    };
    use super::super::{STRIP, blocked, pairs::Pairs};
    use super::*;

    const SHAPE: (usize, usize, usize) = (150, 1100, 330);

    /// What computes a product.
    #[derive(Clone, Copy)]
    enum By {
        SplitTiles,
        RoundedTiles,
        MultiplyAdds,
    }

    /// The product, or nothing on a processor without the instructions.
    fn run(by: By, threads: &Threads, a: &[f32], b: &[f32]) -> Option<Vec<f32>> {
        let (m, k, n) = SHAPE;
        let simd = V4::try_new()?;
        let mut c = vec![f32::NAN; m * n];
        let operands = (MatRef::new(a, m, k), MatRef::new(b, k, n));
        let out = MatMut::new(&mut c, m, n);
        match by {
            By::SplitTiles => {
                compute::<_, _, SPLIT>(simd, threads, 1.0, operands, Start::Zero, out);
            }
            By::RoundedTiles => {
                let simd = Pairs::try_new()?;
                compute::<_, _, 1>(simd, threads, 1.0, operands, Start::Zero, out);
            }
            By::MultiplyAdds => {
                blocked::product::<_, _, _, STRIP>(simd, threads, 1.0, operands, Start::Zero, out);
            }
        }
        Some(c)
    }

    fn root_mean_square(x: impl ExactSizeIterator<Item = f64>) -> f64 {
        let len = x.len() as f64;
        (x.map(|x| x * x).sum::<f64>() / len).sqrt()
    }

    #[test]
    fn products_of_split_operands_are_as_exact_as_those_of_f32() {
        let (m, k, n) = SHAPE;
        let (a, b) = (noise::<f32>(1, m * k), noise::<f32>(2, k * n));
        let exact = product_of((m, k, n), &to_f64(&a), &to_f64(&b));
        let error = |by| {
            let c = run(by, &Threads::one(), &a, &b)?;
            let errors = c.iter().zip(&exact);
            Some(root_mean_square(errors.map(|(&c, x)| f64::from(c) - x)))
        };
        let (Some(split), Some(plain)) = (error(By::SplitTiles), error(By::MultiplyAdds)) else {
            return eprintln!("skipped: no AVX-512");
        };
        assert!(split < 1.2 * plain, "{split:e} against {plain:e}");
    }

    #[test]
    fn products_of_rounded_operands_in_both_layouts_are_those_of_bf16() {
        let Some(simd) = Pairs::try_new() else {
            return eprintln!("skipped: no AVX-512-BF16");
        };
        let rounded = |x: &f32| f64::from(bf16::from_f32(*x).to_f32());
        let rounded = |x: &[f32]| -> Vec<f64> { x.iter().map(rounded).collect() };
        for (m, k, n) in [(48, 32, 32), SHAPE, (33, 513, 1590), (291, 40, 32)] {
            let (a, b) = (noise::<f32>(1, m * k), noise::<f32>(2, k * n));
            let (at, bt) = (transposed(m, k, &a), transposed(k, n, &b));
            let (row, earlier) = (noise::<f32>(3, n), noise::<f32>(4, m * n));
            let exact = product_of((m, k, n), &rounded(&a), &rounded(&b));
            let layouts = [
                (MatRef::new(&a, m, k), MatRef::new(&bt, n, k).transposed()),
                (MatRef::new(&at, k, m).transposed(), MatRef::new(&b, k, n)),
            ];
            for (a, b) in layouts {
                for start in [Start::Zero, Start::Output, Start::Row(&row)] {
                    let c = on_any_threads(|threads| {
                        let mut c = earlier.clone();
                        compute(simd, threads, 2.0, (a, b), start, MatMut::new(&mut c, m, n));
                        c
                    });
                    let begin = |i: usize| match start {
                        Start::Zero => 0.0,
                        Start::Output => f64::from(earlier[i]),
                        Start::Row(row) => f64::from(row[i % n]),
                    };
                    let expected: Vec<f64> =
                        (0..m * n).map(|i| 2.0 * exact[i] + begin(i)).collect();
                    assert_close(&c, &expected, 1e-4);
                }
            }
        }
    }

    #[test]
    fn infinities_reach_what_depends_on_them_on_any_number_of_threads() {
        let (m, k, n) = SHAPE;
        let (mut a, mut b) = (noise::<f32>(1, m * k), noise::<f32>(2, k * n));
        a[40 * k + 700] = f32::INFINITY;
        a[149 * k] = f32::NAN;
        b[20 * n + 329] = f32::NEG_INFINITY;
        for by in [By::SplitTiles, By::RoundedTiles] {
            let c = on_any_threads(|threads| run(by, threads, &a, &b).unwrap_or_default());
            for (i, c) in c.into_iter().enumerate() {
                let (row, col) = (i / n, i % n);
                let sign = |x: f32| x.signum() * f32::INFINITY;
                let expected = match (row, col) {
                    (149, _) => f32::NAN,
                    (40, 329) => sign(b[700 * n + col]) + sign(-a[row * k + 20]),
                    (40, _) => sign(b[700 * n + col]),
                    (_, 329) => sign(-a[row * k + 20]),
                    _ => {
                        assert!(c.is_finite(), "{c} at ({row}, {col})");
                        continue;
                    }
                };
                let same = c == expected || c.is_nan() && expected.is_nan();
                assert!(same, "{c} instead of {expected} at ({row}, {col})");
            }
        }
    }
}
