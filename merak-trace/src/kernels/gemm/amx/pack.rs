//! Operands of a product, split into bf16 parts or rounded to bf16, and laid out as the matrix
//! units read them.
#![expect(
    clippy::inline_always,
    reason = "values are split in registers only where that is inlined into its dispatch"
)]

use std::array;

use bytemuck::Pod;
use pulp::{NullaryFnOnce, Simd, cast, f32x16, u32x16, x86::V4};

use super::super::super::MatRef;
use super::super::{
    Operand, halves::Halves, pack::turn_square, pairs::Pairs, prefetch::prefetch_along,
};

/// Rows of a left operand, or columns of a right one, that are multiplied together: two tiles.
pub(super) const LINES: usize = 2 * SIDE;

/// Depth of a tile.
pub(super) const GROUP: usize = 2 * SIDE;

/// Parts of an f32 that is split; one that is rounded has a single part.
pub(in super::super) const SPLIT: usize = 3;

/// Elements of a packed panel per depth of [`GROUP`]: the parts of two tiles.
pub(super) const fn group_len(parts: usize) -> usize {
    parts * 2 * TILE
}

/// Lines of a tile, and pairs of bf16 along k in it.
const SIDE: usize = 16;

/// Elements of a tile: pairs of bf16.
const TILE: usize = SIDE * SIDE;

/// Mask of the upper half of an f32, which is a bf16.
const UPPER: u32 = 0xffff_0000;

/// Layout of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Line by line, as the left operand is read.
    Lines,
    /// Pair by pair, as the right operand is read.
    Pairs,
}

/// Largest number of panels that one call packs.
pub(super) const MAX_PANELS: usize = 24;

/// The instructions that make parts of elements.
pub(in super::super) trait Packing: Copy + Send + Sync {
    /// The elements of a group that make one of its pairs, in both operands of a product.
    fn pair(index: usize) -> [usize; 2];

    /// Runs a function that is compiled for these instructions where it is inlined.
    fn vectorize<F: NullaryFnOnce>(self, f: F) -> F::Output;

    /// The instructions for registers of `f32`.
    fn wide(self) -> V4;
}

/// How elements of type `W` become parts that the units multiply, in registers of pairs. `check`
/// becomes NaN where the parts do not make the element.
pub(in super::super) trait Parts<W, const PARTS: usize>: Packing {
    /// The parts of a group of a line, as its pairs.
    fn along(self, x: &[W; GROUP], check: &mut f32x16) -> [u32x16; PARTS];

    /// The parts of some elements of two lines, each element as a pair with that of the other line.
    fn across(self, lines: [&[W; SIDE]; 2], check: &mut f32x16) -> [u32x16; PARTS];
}

/// Pairs of elements k and k + 16 of a group, so that whole registers are split.
impl Packing for V4 {
    #[inline(always)]
    fn pair(index: usize) -> [usize; 2] {
        [index, index + SIDE]
    }

    #[inline(always)]
    fn vectorize<F: NullaryFnOnce>(self, f: F) -> F::Output {
        Simd::vectorize(self, f)
    }

    #[inline(always)]
    fn wide(self) -> V4 {
        self
    }
}

/// Three parts, whose sum is the element unless it is an infinity or a NaN.
impl<W: Operand<f32>> Parts<W, SPLIT> for V4 {
    #[inline(always)]
    fn along(self, x: &[W; GROUP], check: &mut f32x16) -> [u32x16; SPLIT] {
        let groups = W::groups::<V4>(x);
        let registers = [groups[0], groups[1]].map(
            #[inline(always)]
            |x| W::widen(self, x),
        );
        split(self, registers, check)
    }

    #[inline(always)]
    fn across(self, lines: [&[W; SIDE]; 2], check: &mut f32x16) -> [u32x16; SPLIT] {
        let registers = lines.map(
            #[inline(always)]
            |x| W::widen(self, W::groups::<V4>(x)[0]),
        );
        split(self, registers, check)
    }
}

/// Pairs of neighbours, as the instructions that round make them.
impl Packing for Pairs {
    #[inline(always)]
    fn pair(index: usize) -> [usize; 2] {
        [2 * index, 2 * index + 1]
    }

    #[inline(always)]
    fn vectorize<F: NullaryFnOnce>(self, f: F) -> F::Output {
        self.vectorize(f)
    }

    #[inline(always)]
    fn wide(self) -> V4 {
        self.wide
    }
}

/// A single part, the nearest bf16.
impl<W: Halves> Parts<W, 1> for Pairs {
    #[inline(always)]
    fn along(self, x: &[W; GROUP], _: &mut f32x16) -> [u32x16; 1] {
        [W::along(self, x)]
    }

    #[inline(always)]
    fn across(self, [x, next]: [&[W; SIDE]; 2], _: &mut f32x16) -> [u32x16; 1] {
        [W::across(self, x, next)]
    }
}

/// Packs lines of an operand (its rows on the left, its columns on the right) as parts, with zeros
/// past the edges, into panels of [`LINES`]. Returns for each panel whether its parts make its
/// elements: three parts of an infinity or a NaN do not.
///
/// # Shapes
///
/// `x: [lines, depth]`; `out`: for each panel, each [`GROUP`] of the depth, each of the parts and
/// each of two tiles, `[16, 16]`.
#[inline(always)]
pub(super) fn pack<W: Pod, S: Parts<W, PARTS>, const PARTS: usize>(
    simd: S,
    x: MatRef<'_, W>,
    layout: Layout,
    out: &mut [u32],
) -> [bool; MAX_PANELS] {
    let panel_len = x.cols().div_ceil(GROUP) * group_len(PARTS);
    let mut checks = [simd.wide().splat_f32x16(0.0); MAX_PANELS];
    if x.has_contiguous_rows() {
        let panels = out.chunks_exact_mut(panel_len).zip(&mut checks);
        for (panel, (out, check)) in panels.enumerate() {
            let lines = LINES.min(x.rows() - panel * LINES);
            let x = x.sub_rows(panel * LINES, lines);
            along(simd, x, layout, out, check);
        }
    } else {
        across(simd, x.transposed(), layout, (out, panel_len), &mut checks);
    }
    if PARTS == 1 {
        return [true; MAX_PANELS];
    }
    let mut are_whole = [true; MAX_PANELS];
    for (is_whole, check) in are_whole.iter_mut().zip(&checks) {
        *is_whole = is_zero(check);
    }
    are_whole
}

/// Whether all lanes are zero. Once for all packings, since it is as long as they are.
#[inline(never)]
fn is_zero(check: &f32x16) -> bool {
    cast::<_, [f32; SIDE]>(*check).iter().all(|&x| x == 0.0)
}

/// Packs a panel whose lines are contiguous.
#[inline(always)]
fn along<W: Pod, S: Parts<W, PARTS>, const PARTS: usize>(
    simd: S,
    x: MatRef<'_, W>,
    layout: Layout,
    out: &mut [u32],
    check: &mut f32x16,
) {
    for half in 0..2 {
        let lines = SIDE.min(x.rows().saturating_sub(half * SIDE));
        let mut rows = [&[][..]; SIDE];
        for (i, row) in rows[..lines].iter_mut().enumerate() {
            *row = x.row(half * SIDE + i);
        }
        for (group, out) in out.chunks_exact_mut(group_len(PARTS)).enumerate() {
            let k = group * GROUP..x.cols().min((group + 1) * GROUP);
            tile(
                simd.wide(),
                #[inline(always)]
                |i| {
                    let row = rows[i].get(k.clone()).unwrap_or_default();
                    for line in [0, SIDE] {
                        prefetch_along(&x, rows[i], k.start + line, SIDE);
                    }
                    match row.try_into() {
                        Ok(row) => simd.along(row, check),
                        Err(_) => simd.along(&padded(row), check),
                    }
                },
                layout == Layout::Pairs,
                half,
                out,
            );
        }
    }
}

/// Packs all panels of an operand whose lines are interleaved: `x: [depth, lines]`.
#[inline(always)]
fn across<W: Pod, S: Parts<W, PARTS>, const PARTS: usize>(
    simd: S,
    x: MatRef<'_, W>,
    layout: Layout,
    (out, panel_len): (&mut [u32], usize),
    checks: &mut [f32x16; MAX_PANELS],
) {
    for group in 0..x.rows().div_ceil(GROUP) {
        let depth = GROUP.min(x.rows() - group * GROUP);
        let mut rows = [&[][..]; GROUP];
        for (i, row) in rows[..depth].iter_mut().enumerate() {
            *row = x.row(group * GROUP + i);
        }
        let panels = out.chunks_exact_mut(panel_len).zip(&mut *checks);
        for (panel, (out, check)) in panels.enumerate() {
            let out = &mut out[group * group_len(PARTS)..][..group_len(PARTS)];
            for half in 0..2 {
                let first = panel * LINES + half * SIDE;
                let lines = first.min(x.cols())..x.cols().min(first + SIDE);
                tile(
                    simd.wide(),
                    #[inline(always)]
                    |i| {
                        let rows = S::pair(i).map(
                            #[inline(always)]
                            |k| {
                                prefetch_along(&x, rows[k], lines.start, GROUP);
                                rows[k].get(lines.clone()).unwrap_or_default()
                            },
                        );
                        if let [Ok(x), Ok(next)] = rows.map(<&[W; SIDE]>::try_from) {
                            simd.across([x, next], check)
                        } else {
                            let [x, next] = rows.map(padded);
                            simd.across([&x, &next], check)
                        }
                    },
                    layout == Layout::Lines,
                    half,
                    out,
                );
            }
        }
    }
}

/// Too few elements, filled up with zeros.
#[cold]
fn padded<W: Pod, const LEN: usize>(x: &[W]) -> [W; LEN] {
    let mut filled = [W::zeroed(); LEN];
    filled[..x.len()].copy_from_slice(x);
    filled
}

/// Writes the parts of the registers of a tile, transposed if `turned`.
#[inline(always)]
fn tile<const PARTS: usize>(
    simd: V4,
    mut parts_of: impl FnMut(usize) -> [u32x16; PARTS],
    turned: bool,
    half: usize,
    out: &mut [u32],
) {
    let (out, _) = pulp::as_arrays_mut::<SIDE, _>(out);
    let mut parts = [[simd.splat_u32x16(0); SIDE]; PARTS];
    for i in 0..SIDE {
        let made = parts_of(i);
        for part in 0..PARTS {
            if turned {
                parts[part][i] = made[part];
            } else {
                out[(2 * part + half) * SIDE + i] = cast(made[part]);
            }
        }
    }
    if turned {
        for (part, rows) in parts.iter_mut().enumerate() {
            let rows: &mut [f32x16; SIDE] = bytemuck::cast_mut(rows);
            turn_square::<V4, f32>(simd, rows);
            for i in 0..SIDE {
                out[(2 * part + half) * SIDE + i] = cast(rows[i]);
            }
        }
    }
}

/// The bf16 parts of two registers, as pairs; `check` becomes NaN where an element is not finite.
#[inline(always)]
fn split(simd: V4, [low, high]: [f32x16; 2], check: &mut f32x16) -> [u32x16; SPLIT] {
    let (low, high) = (parts(simd, low, check), parts(simd, high, check));
    array::from_fn(
        #[inline(always)]
        |part| pair(simd, low[part], high[part]),
    )
}

/// The bf16 parts of a register, in the upper halves of f32.
#[inline(always)]
fn parts(simd: V4, x: f32x16, check: &mut f32x16) -> [u32x16; SPLIT] {
    let upper = simd.splat_u32x16(UPPER);
    let first = simd.and_u32x16(cast(x), upper);
    let rest = simd.sub_f32x16(x, cast(first));
    let second = simd.and_u32x16(cast(rest), upper);
    let third = simd.sub_f32x16(rest, cast(second));
    // Infinity minus infinity is NaN, and so is NaN times zero.
    *check = simd.mul_add_f32x16(third, simd.splat_f32x16(0.0), *check);
    [first, second, cast(third)]
}

/// The upper halves of two registers, the first below the second.
#[inline(always)]
fn pair(simd: V4, low: u32x16, high: u32x16) -> u32x16 {
    let low = simd.avx512f._mm512_srli_epi32::<16>(cast(low));
    let pair = simd
        .avx512bw
        ._mm512_mask_blend_epi16(0xaaaa_aaaa, low, cast(high));
    cast(pair)
}
