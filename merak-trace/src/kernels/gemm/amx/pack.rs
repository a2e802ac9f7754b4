//! Operands of a product, split into bf16 parts or rounded to bf16, and laid out as the matrix
//! units read them.
#![expect(
    clippy::inline_always,
    reason = "values are split in registers only where that is inlined into its dispatch"
)]

use std::array;

use pulp::{cast, f32x16, u32x16, x86::V4};

use super::super::super::MatRef;
use super::super::Operand;
use super::super::pack::turn_square;

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
pub(super) const MAX_PANELS: usize = 8;

/// Packs lines of an operand (its rows on the left, its columns on the right), widened, with zeros
/// past the edges, into panels of [`LINES`]. Returns for each panel whether all its elements are
/// finite, or whether a single part is all that is wanted.
///
/// A pair holds elements k and k + 16 of its group, in both operands alike, so whole registers can
/// be split.
///
/// # Shapes
///
/// `x: [lines, depth]`; `out`: for each panel, each [`GROUP`] of the depth, each of the parts and
/// each of two tiles, `[16, 16]`.
#[inline(always)]
pub(super) fn pack<W: Operand<f32>, const PARTS: usize>(
    simd: V4,
    x: MatRef<'_, W>,
    layout: Layout,
    out: &mut [u32],
) -> [bool; MAX_PANELS] {
    let panel_len = x.cols().div_ceil(GROUP) * group_len(PARTS);
    let mut checks = [simd.splat_f32x16(0.0); MAX_PANELS];
    if x.has_contiguous_rows() {
        let panels = out.chunks_exact_mut(panel_len).zip(&mut checks);
        for (panel, (out, check)) in panels.enumerate() {
            let lines = LINES.min(x.rows() - panel * LINES);
            let x = x.sub_rows(panel * LINES, lines);
            along::<W, PARTS>(simd, x, layout, out, check);
        }
    } else {
        across::<W, PARTS>(simd, x.transposed(), layout, (out, panel_len), &mut checks);
    }
    checks.map(|check| cast::<_, [f32; SIDE]>(check).iter().all(|&x| x == 0.0))
}

/// Packs a panel whose lines are contiguous.
#[inline(always)]
fn along<W: Operand<f32>, const PARTS: usize>(
    simd: V4,
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
            let load = |i: usize| match rows[i].get(k.clone()) {
                Some(row) if row.len() == GROUP => {
                    let row = W::groups::<V4>(row);
                    [W::widen(simd, row[0]), W::widen(simd, row[1])]
                }
                row => padded(row.unwrap_or_default()),
            };
            tile::<PARTS>(simd, load, layout == Layout::Pairs, half, out, check);
        }
    }
}

/// Packs all panels of an operand whose lines are interleaved: `x: [depth, lines]`.
#[inline(always)]
fn across<W: Operand<f32>, const PARTS: usize>(
    simd: V4,
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
                let load = |k: usize| match rows[k].get(lines.clone()) {
                    Some(row) if row.len() == SIDE => W::widen(simd, W::groups::<V4>(row)[0]),
                    row => padded(row.unwrap_or_default())[0],
                };
                let load = |k: usize| [load(k), load(k + SIDE)];
                tile::<PARTS>(simd, load, layout == Layout::Lines, half, out, check);
            }
        }
    }
}

/// Two registers from too few elements, filled up with zeros.
#[cold]
fn padded<W: Operand<f32>>(row: &[W]) -> [f32x16; 2] {
    let mut values = [0.0; GROUP];
    for (value, element) in values.iter_mut().zip(row) {
        *value = element.wide();
    }
    cast(values)
}

/// Writes the parts of a tile, transposed if `turned`.
#[inline(always)]
fn tile<const PARTS: usize>(
    simd: V4,
    load: impl Fn(usize) -> [f32x16; 2],
    turned: bool,
    half: usize,
    out: &mut [u32],
    check: &mut f32x16,
) {
    let (out, _) = pulp::as_arrays_mut::<SIDE, _>(out);
    let mut parts = [[simd.splat_u32x16(0); SIDE]; PARTS];
    for i in 0..SIDE {
        let split: [_; PARTS] = split(simd, load(i), check);
        for part in 0..PARTS {
            if turned {
                parts[part][i] = split[part];
            } else {
                out[(2 * part + half) * SIDE + i] = cast(split[part]);
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
fn split<const PARTS: usize>(
    simd: V4,
    [low, high]: [f32x16; 2],
    check: &mut f32x16,
) -> [u32x16; PARTS] {
    if PARTS == 1 {
        return [pair(simd, rounded(simd, low), rounded(simd, high)); PARTS];
    }
    let (low, high) = (parts(simd, low, check), parts(simd, high, check));
    array::from_fn(
        #[inline(always)]
        |part| pair(simd, low[part], high[part]),
    )
}

/// The nearest bf16 of each element, ties to even, in the upper half; a NaN stays one.
#[inline(always)]
fn rounded(simd: V4, x: f32x16) -> u32x16 {
    const QUIET: u32 = 0x0040_0000;
    let bits: u32x16 = cast(x);
    let odd = simd.and_u32x16(simd.shr_const_u32x16::<16>(bits), simd.splat_u32x16(1));
    let half = simd.wrapping_add_u32x16(odd, simd.splat_u32x16(0x7fff));
    let quiet = simd.or_u32x16(bits, simd.splat_u32x16(QUIET));
    simd.select_u32x16(
        simd.is_nan_f32x16(x),
        quiet,
        simd.wrapping_add_u32x16(bits, half),
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
