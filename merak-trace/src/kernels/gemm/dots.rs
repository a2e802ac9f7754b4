//! Products of operands that are rounded to bf16, by AVX-512-BF16.
//!
//! Blocked as the products of `f32` in `blocked.rs`, with pairs of bf16 in the place of numbers:
//! one instruction multiplies twice as many. Sums are `f32`.
//!
//! Element (i, j) is a sum over k in blocks of [`DEPTH`], each in ascending order of pairs. It
//! depends neither on the other rows and columns nor on how the work is shared.
#![expect(
    clippy::inline_always,
    reason = "a tile stays in registers only where it is inlined into its dispatch"
)]

use std::ops::Range;

use pulp::{NullaryFnOnce, cast, u32x16, x86::V4};

use super::super::{MatMut, MatRef, Threads};
use super::halves::Halves;
use super::pack::turn_square;
use super::pairs::{PAIRED, Pairs};
use super::prefetch::{prefetch_along, prefetch_below};
use super::shares::{Shares, panel_groups};
use super::tile::{STRIP, Share, Strip, Sums};
use super::{Start, depths};

/// Elements along k that are multiplied before the sums are written.
const DEPTH: usize = 1024;

/// Pairs between two rows of a strip: the depth and a cache line, so that rows do not fall into one
/// set of the cache.
const ROW: usize = DEPTH / 2 + LANES;

/// Pairs of a register.
const LANES: usize = 16;

/// Columns of a panel: two registers.
const WIDTH: usize = 2 * LANES;

/// Most pairs of packed panels that a thread multiplies by: 512 KiB, which stay in a second-level
/// cache of 1 MiB beside what else passes it.
const BLOCK: usize = 1 << 17;

/// Order of the pairs of a packed strip: the one that needs no transpose of the operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Rows, each [`ROW`] pairs after the last.
    Rows,
    /// Columns, each as long as a strip has rows.
    Columns,
}

/// Computes `c = alpha a b + start`.
pub(super) fn product<A: Halves, W: Halves>(
    simd: Pairs,
    threads: &Threads,
    alpha: f32,
    (a, b): (MatRef<'_, A>, MatRef<'_, W>),
    start: Start<'_, f32>,
    mut c: MatMut<'_, f32>,
) {
    let shares = Shares::new(a.rows(), threads.num_threads(), (STRIP, ROW));
    let order = if a.has_contiguous_rows() {
        Order::Rows
    } else {
        Order::Columns
    };
    for (a, b, start) in depths(DEPTH, (a, b), start) {
        let panel_len = a.cols().div_ceil(2) * WIDTH;
        let panels = shares.block_panels(b.cols().div_ceil(WIDTH), BLOCK / panel_len);
        let blocks = c.reborrow().col_blocks(panels * WIDTH).enumerate();
        threads.with_scratch(shares.packed_len(), |strips| {
            threads.for_each(shares.groups(strips), |(rows, out)| {
                simd.vectorize(PackLeft {
                    simd,
                    order,
                    a,
                    rows,
                    out,
                });
            });
            threads.with_scratch(panels * panel_len, |packed| {
                for (i, out) in blocks {
                    let (col, cols) = (i * panels * WIDTH, out.cols());
                    let (b, start) = (b.sub_cols(col, cols), start.columns(col, cols));
                    let panel = (WIDTH, panel_len);
                    let groups = panel_groups(cols, threads.num_threads(), panel, packed);
                    threads.for_each(groups, |(cols, out)| {
                        simd.vectorize(PackRight {
                            simd,
                            b: b.sub_cols(cols.start, cols.len()),
                            panel_len,
                            out,
                        });
                    });
                    threads.for_each(shares.of(out, WIDTH), |([strip, panel], out)| {
                        simd.vectorize(Share::<_, _, _, STRIP> {
                            simd: simd.wide,
                            alpha,
                            strip: PairStrip {
                                simd,
                                order,
                                pairs: shares.strip(strips, strip),
                            },
                            panels: &packed[panel * panel_len..],
                            panel_len,
                            start: start.columns(panel * WIDTH, out.cols()),
                            out,
                        });
                    });
                }
            });
        });
    }
}

/// Packs some rows of a left operand into strips. Pairs past these rows are unspecified.
struct PackLeft<'a, A> {
    simd: Pairs,
    order: Order,
    a: MatRef<'a, A>,
    rows: Range<usize>,
    out: &'a mut [u32],
}

impl<A: Halves> NullaryFnOnce for PackLeft<'_, A> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self {
            simd,
            order,
            a,
            rows,
            out,
        } = self;
        match order {
            Order::Rows => {
                for (row, out) in rows.zip(out.chunks_exact_mut(ROW)) {
                    let out = pulp::as_arrays_mut::<LANES, _>(out).0;
                    let row = a.row(row).chunks(PAIRED);
                    for (x, out) in row.zip(out) {
                        *out = cast(along(simd, x));
                    }
                }
            }
            Order::Columns => {
                let lines = a.transposed();
                for pair in 0..a.cols().div_ceil(2) {
                    let lines = Neighbours::new(lines, pair);
                    let strips = out.chunks_exact_mut(STRIP * ROW);
                    for (first, strip) in rows.clone().step_by(STRIP).zip(strips) {
                        // A register is wider than a strip. The next pair overwrites the rest.
                        let out = &mut strip[pair * STRIP..][..LANES];
                        out.copy_from_slice(&lines.pairs(simd, first));
                    }
                }
            }
        }
    }
}

/// Packs some panels of a right operand.
struct PackRight<'a, W> {
    simd: Pairs,
    b: MatRef<'a, W>,
    panel_len: usize,
    out: &'a mut [u32],
}

impl<W: Halves> NullaryFnOnce for PackRight<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        pack_panels(self.simd, self.b, self.panel_len, self.out);
    }
}

/// A packed strip of pairs.
struct PairStrip<'a> {
    simd: Pairs,
    order: Order,
    pairs: &'a [u32],
}

impl Strip<V4, f32> for PairStrip<'_> {
    type Packed = u32;

    #[inline(always)]
    fn sums<const R: usize>(&self, _: V4, row: usize, panel: &[u32]) -> Sums<V4, f32, R> {
        let (panel, _) = pulp::as_arrays::<WIDTH, _>(panel);
        let panel = &panel[..panel.len().min(DEPTH / 2)];
        match self.order {
            Order::Rows => {
                let (rows, _) = pulp::as_arrays::<ROW, _>(&self.pairs[row * ROW..]);
                let rows: &[[u32; ROW]; R] = rows[..R].try_into().expect("R rows were taken");
                sums(self.simd, panel, |k, row| rows[row][k])
            }
            Order::Columns => {
                let (columns, _) = pulp::as_arrays::<STRIP, _>(&self.pairs[row..]);
                let columns = &columns[..panel.len()];
                sums(self.simd, panel, |k, row| columns[k][row])
            }
        }
    }
}

/// Sums over k of R rows times a packed panel.
#[inline(always)]
fn sums<const R: usize>(
    simd: Pairs,
    panel: &[[u32; WIDTH]],
    left: impl Fn(usize, usize) -> u32,
) -> Sums<V4, f32, R> {
    let mut sums = [[simd.wide.splat_f32x16(0.0); 2]; R];
    for (k, b) in panel.iter().enumerate() {
        let [b0, b1]: [u32x16; 2] = cast(*b);
        for (row, [s0, s1]) in sums.iter_mut().enumerate() {
            let a = simd.wide.splat_u32x16(left(k, row));
            *s0 = simd.dot(a, b0, *s0);
            *s1 = simd.dot(a, b1, *s1);
        }
    }
    sums
}

/// Packs a right operand into panels of [`WIDTH`] columns, pair by pair, with zeros past the edges.
#[inline(always)]
fn pack_panels<W: Halves>(simd: Pairs, b: MatRef<'_, W>, panel_len: usize, out: &mut [u32]) {
    if b.has_contiguous_rows() {
        for pair in 0..b.rows().div_ceil(2) {
            let lines = Neighbours::new(b, pair);
            for (i, panel) in out.chunks_exact_mut(panel_len).enumerate() {
                let out = &mut panel[pair * WIDTH..][..WIDTH];
                for (half, out) in out.chunks_exact_mut(LANES).enumerate() {
                    out.copy_from_slice(&lines.pairs(simd, i * WIDTH + half * LANES));
                }
            }
        }
        return;
    }
    let lines = b.transposed();
    for (panel, out) in out.chunks_exact_mut(panel_len).enumerate() {
        for half in 0..2 {
            let first = panel * WIDTH + half * LANES;
            turn(simd, lines, first, &mut out[half * LANES..]);
        }
    }
}

/// Writes some lines as columns of pairs, with zeros past the last line.
#[inline(always)]
fn turn<W: Halves>(simd: Pairs, lines: MatRef<'_, W>, first: usize, out: &mut [u32]) {
    let mut rows = [&[][..]; LANES];
    for (i, row) in rows
        .iter_mut()
        .take(lines.rows().saturating_sub(first))
        .enumerate()
    {
        *row = lines.row(first + i);
    }
    for (square, out) in out.chunks_mut(LANES * WIDTH).enumerate() {
        let ks = square * PAIRED..lines.cols().min((square + 1) * PAIRED);
        let mut pairs = [simd.wide.splat_f32x16(0.0); LANES];
        for (pairs, row) in pairs.iter_mut().zip(&rows) {
            for line in [0, LANES] {
                prefetch_along(&lines, row, ks.start + line, LANES);
            }
            *pairs = cast(along(simd, row.get(ks.clone()).unwrap_or_default()));
        }
        turn_square::<V4, f32>(simd.wide, &mut pairs);
        for (out, pairs) in out.chunks_mut(WIDTH).zip(pairs) {
            out[..LANES].copy_from_slice(&cast::<_, [u32; LANES]>(pairs));
        }
    }
}

/// Neighbours along k as pairs, with zeros after them if they are too few.
#[inline(always)]
fn along<W: Halves>(simd: Pairs, x: &[W]) -> u32x16 {
    match x.try_into() {
        Ok(x) => W::along(simd, x),
        Err(_) => W::along(simd, &padded(x)),
    }
}

/// Two neighbouring lines, whose elements are paired.
struct Neighbours<'a, W> {
    lines: MatRef<'a, W>,
    line: &'a [W],
    next: &'a [W],
}

impl<'a, W: Halves> Neighbours<'a, W> {
    #[inline(always)]
    fn new(lines: MatRef<'a, W>, pair: usize) -> Self {
        let next = if 2 * pair + 1 < lines.rows() {
            lines.row(2 * pair + 1)
        } else {
            &[]
        };
        Self {
            lines,
            line: lines.row(2 * pair),
            next,
        }
    }

    /// Pairs of the elements from `first` on, with zeros past the edges.
    #[inline(always)]
    fn pairs(&self, simd: Pairs, first: usize) -> [u32; LANES] {
        for line in [self.line, self.next] {
            prefetch_below(&self.lines, line, first);
        }
        let [x, next] = [self.line, self.next].map(
            #[inline(always)]
            |line| line.get(first..).unwrap_or_default(),
        );
        let pairs = match (x.first_chunk(), next.first_chunk()) {
            (Some(x), Some(next)) => W::across(simd, x, next),
            _ => W::across(simd, &padded(x), &padded(next)),
        };
        cast(pairs)
    }
}

/// An array of too few elements, filled up with zeros.
#[cold]
fn padded<W: Halves, const N: usize>(x: &[W]) -> [W; N] {
    let mut padded = [W::zeroed(); N];
    for (padded, &x) in padded.iter_mut().zip(x) {
        *padded = x;
    }
    padded
}
