//! Products of packed operands: how a product is cut into blocks of the cache.
//!
//! ```text
//! for each block of k                     512 at most: a panel of a stays in the first-level cache
//!   pack a: panels of 14 rows             once, for everybody
//!   for each block of rows                in parallel: its panels of a stay in the second level
//!     for each block of 64 columns        in parallel
//!       pack b: panels of 32 columns      by the thread that uses them
//!       for each panel of a, of b: tile   the inner kernel
//! ```
//!
//! An element is the sum over the blocks of k of sums in the order of k: nothing but K decides its
//! bits.

use std::cell::Cell;

use super::avx512::{Avx512, COLS, ROWS, as_f32, as_f32_mut};
use super::{Float, MatMut, MatRef, Start, Threads};

/// Steps over k whose operands are packed together.
const DEPTH: usize = 512;
/// Rows of a whose panels stay in the second-level cache.
const HEIGHT: usize = 40 * ROWS;
/// Rows below which packing b costs more than the kernel saves.
const FEWEST_ROWS: usize = 8;
/// Columns of a unit of parallel work.
const WIDTH: usize = 2 * COLS;

thread_local! {
    static PACKED_A: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static PACKED_B: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Computes `c = start + alpha a b`; gives `c` back where this processor, the element type or the
/// shape has no kernel here.
pub(super) fn product<'c, T: Float>(
    threads: &Threads,
    alpha: T,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    start: Start<'_, T>,
    c: MatMut<'c, T>,
) -> Option<MatMut<'c, T>> {
    let shape_fits = a.rows() >= FEWEST_ROWS && a.cols() > 0 && b.cols() > 0;
    let (Some(kernel), true) = (Avx512::detect(), shape_fits) else {
        return Some(c);
    };
    let (Some(a), Some(b)) = (as_f32(a), as_f32(b)) else {
        return Some(c);
    };
    let start = match start {
        Start::Zero => Start::Zero,
        Start::Output => Start::Output,
        Start::Row(row) => match as_f32(MatRef::new(row, 1, row.len())) {
            Some(row) => Start::Row(row.row(0)),
            None => return Some(c),
        },
    };
    match as_f32_mut(c) {
        Ok(c) => {
            blocks(
                threads,
                kernel,
                Float::to_f64(alpha) as f32,
                (a, b),
                start,
                c,
            );
            None
        }
        Err(c) => Some(c),
    }
}

fn blocks(
    threads: &Threads,
    kernel: Avx512,
    alpha: f32,
    (a, b): (MatRef<'_, f32>, MatRef<'_, f32>),
    start: Start<'_, f32>,
    mut c: MatMut<'_, f32>,
) {
    let mut packed_a = PACKED_A.take();
    let height = even_block(a.rows().div_ceil(ROWS), HEIGHT / ROWS) * ROWS;
    let depth = even_block(a.cols(), DEPTH);
    for k in (0..a.cols()).step_by(depth) {
        let depth = depth.min(a.cols() - k);
        let (a, b) = (a.sub_cols(k, depth), b.sub_rows(k, depth));
        let start = if k == 0 { start } else { Start::Output };
        let packed_a = grown(&mut packed_a, a.rows() * depth);
        let panels = packed_a.chunks_mut(ROWS * depth).enumerate();
        threads.for_each(groups(panels), |panels| {
            for (panel, out) in panels {
                let rows = out.len() / depth;
                kernel.pack(a.sub_rows(panel * ROWS, rows), rows, out);
            }
        });
        let packed_a = &*packed_a;
        let blocks = c
            .reborrow()
            .row_blocks(height)
            .enumerate()
            .flat_map(|(i, rows)| {
                let blocks = rows.col_blocks(WIDTH).enumerate();
                blocks.map(move |(j, out)| (i * height * depth, j * WIDTH, out))
            });
        threads.for_each(blocks, |(first, col, out)| {
            let a = &packed_a[first..][..out.rows() * depth];
            let start = start.columns(col, out.cols());
            block(kernel, alpha, a, b.sub_cols(col, out.cols()), start, out);
        });
    }
    PACKED_A.set(packed_a);
}

/// One block of the output: b is packed, then goes past all panels of a.
fn block(
    kernel: Avx512,
    alpha: f32,
    a: &[f32],
    b: MatRef<'_, f32>,
    start: Start<'_, f32>,
    c: MatMut<'_, f32>,
) {
    let (depth, cols) = (b.rows(), b.cols());
    let mut packed_b = PACKED_B.take();
    let panels_b = grown(&mut packed_b, cols.div_ceil(COLS) * COLS * depth);
    for (panel, out) in panels_b.chunks_exact_mut(COLS * depth).enumerate() {
        let col = panel * COLS;
        let lanes = b.sub_cols(col, COLS.min(cols - col)).transposed();
        kernel.pack(lanes, COLS, out);
    }
    for (a, rows) in a.chunks(ROWS * depth).zip(c.row_blocks(ROWS)) {
        let tiles = rows.col_blocks(COLS).enumerate();
        for ((panel, out), b) in tiles.zip(panels_b.chunks_exact(COLS * depth)) {
            let start = start.columns(panel * COLS, out.cols());
            kernel.tile(alpha, a, b, start, out);
        }
    }
    PACKED_B.set(packed_b);
}

/// The size of blocks that split `len` evenly into as few as `most` allows.
fn even_block(len: usize, most: usize) -> usize {
    len.div_ceil(len.div_ceil(most))
}

/// The first `len` elements of a buffer that grows when it must.
fn grown(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Panels in units of parallel work.
fn groups<I: Iterator>(items: I) -> impl Iterator<Item = Vec<I::Item>> {
    const PANELS: usize = 10;
    let mut items = items.fuse();
    std::iter::from_fn(move || {
        let group: Vec<_> = items.by_ref().take(PANELS).collect();
        (!group.is_empty()).then_some(group)
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::noise;
    use super::*;

    #[test]
    fn an_element_has_the_same_bits_in_products_of_any_height_and_width() {
        let (rows, depth, cols) = (45, 700, 70);
        let (a, b) = (noise::<f32>(5, rows * depth), noise::<f32>(6, depth * cols));
        let product = |rows: usize, width: usize| {
            let mut c = vec![0.0; rows * width];
            let a = MatRef::new(&a[..rows * depth], rows, depth);
            let b = MatRef::new(&b, depth, cols).sub_cols(0, width);
            let out = MatMut::new(&mut c, rows, width);
            product(&Threads::one(), 1.0, a, b, Start::Zero, out)
                .is_none()
                .then_some(c)
        };
        // None: a processor without this kernel.
        if let (Some(all), Some(some)) = (product(rows, cols), product(20, 33)) {
            for (all, some) in all.chunks(cols).zip(some.chunks(33)) {
                assert_eq!(all[..33], *some);
            }
        }
    }

    #[test]
    fn blocks_split_a_length_evenly() {
        assert_eq!(
            [37, 41, 80, 81].map(|panels| even_block(panels, 40)),
            [37, 21, 40, 27]
        );
    }
}
