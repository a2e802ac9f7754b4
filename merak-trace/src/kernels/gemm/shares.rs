//! How threads share a product, whose operands are packed for all of them.
//!
//! A thread has the same rows in every product with as many rows, as in the kernels that work row
//! by row. So it finds in its own cache what it wrote before. Columns are shared where the rows are
//! too few.

use std::ops::Range;

use super::super::{Float, MatMut};

/// Most rows of a share of several threads, so that one that is done early finds others to take
/// over.
const MOST_ROWS: usize = 128;

/// Fewest rows of each thread: with fewer, all threads would read each panel for a strip or two.
const LEAST_ROWS: usize = 28;

/// Strips of a left operand that are packed together, as neighbours share a cache line and a page.
const GROUP: usize = 8;

/// The cut of an output into shares, and of a packed left operand into those of its rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shares {
    rows: usize,
    /// Rows of a share; the last ones may have fewer.
    height: usize,
    /// Shares side by side in a block of columns.
    across: usize,
    /// Rows of a strip.
    strip: usize,
    /// Elements of a packed strip.
    strip_len: usize,
}

impl Shares {
    /// The shares of an output of so many rows, whose strips of the left operand have `strip` rows
    /// of `row_len` packed elements.
    pub(super) fn new(rows: usize, num_threads: usize, (strip, row_len): (usize, usize)) -> Self {
        let each = rows.div_ceil(num_threads);
        let (down, across) = match num_threads {
            1 => (1, 1),
            _ if each < LEAST_ROWS => (1, num_threads),
            _ => (num_threads * each.div_ceil(MOST_ROWS), 1),
        };
        Self {
            rows,
            height: rows.div_ceil(down).max(1),
            across,
            strip,
            strip_len: strip * row_len,
        }
    }

    /// Packed elements of the rows of a share, in whole strips.
    fn share_len(&self) -> usize {
        self.height.div_ceil(self.strip) * self.strip_len
    }

    /// Packed elements of all rows.
    pub(super) fn packed_len(&self) -> usize {
        self.rows.div_ceil(self.height) * self.share_len()
    }

    /// The packed strips from those of a share's rows on.
    pub(super) fn strips<'a, T>(&self, packed: &'a [T], share: usize) -> &'a [T] {
        &packed[share * self.share_len()..]
    }

    /// Groups of strips, each with its rows: the unit in which a left operand is packed.
    pub(super) fn groups<T>(
        self,
        packed: &mut [T],
    ) -> impl Iterator<Item = (Range<usize>, &mut [T])> {
        let shares = packed.chunks_mut(self.share_len()).enumerate();
        shares.flat_map(move |(share, strips)| {
            let first = share * self.height;
            let end = self.rows.min(first + self.height);
            let starts = (first..end).step_by(GROUP * self.strip);
            let groups = starts.zip(strips.chunks_mut(GROUP * self.strip_len));
            groups.map(move |(start, out)| (start..end.min(start + GROUP * self.strip), out))
        })
    }

    /// Panels of a block of columns: at most `most` for each share, and blocks of equal size.
    pub(super) fn block_panels(&self, panels: usize, most: usize) -> usize {
        let rounds = panels.div_ceil(self.across * most).max(1);
        panels.div_ceil(rounds).max(1)
    }

    /// The shares of a block of columns, in whole panels of `width` columns, with the number of the
    /// share that their rows have, and their first panel.
    pub(super) fn of<T: Float>(
        self,
        block: MatMut<'_, T>,
        width: usize,
    ) -> impl Iterator<Item = ([usize; 2], MatMut<'_, T>)> {
        let each = block.cols().div_ceil(width).div_ceil(self.across).max(1);
        let rows = block.row_blocks(self.height).enumerate();
        rows.flat_map(move |(i, rows)| {
            let shares = rows.col_blocks(each * width).enumerate();
            shares.map(move |(j, out)| ([i, j * each], out))
        })
    }
}

/// Groups of panels of a block of columns, at most one for each thread, with their columns: the
/// unit in which a right operand is packed. A panel has `width` columns and `panel_len` packed
/// elements.
pub(super) fn panel_groups<T>(
    cols: usize,
    num_threads: usize,
    (width, panel_len): (usize, usize),
    packed: &mut [T],
) -> impl Iterator<Item = (Range<usize>, &mut [T])> {
    let each = cols.div_ceil(width).div_ceil(num_threads).max(1);
    let starts = (0..cols).step_by(each * width);
    let groups = starts.zip(packed.chunks_mut(each * panel_len));
    groups.map(move |(start, out)| {
        let cols = start..cols.min(start + each * width);
        let len = cols.len().div_ceil(width) * panel_len;
        (cols, &mut out[..len])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRIP: usize = 14;
    const ROW: usize = 3;

    #[test]
    fn every_row_and_column_is_in_one_share_for_any_number_of_threads() {
        for num_threads in [1, 2, 3, 16] {
            for (rows, cols) in [(48, 32), (512, 100), (513, 64), (2048, 33)] {
                let shares = Shares::new(rows, num_threads, (STRIP, ROW));
                let mut seen = vec![0.0_f32; rows * cols];
                let out = MatMut::new(&mut seen, rows, cols);
                for ([share, panel], mut out) in shares.of(out, 32) {
                    assert!(share * shares.height < rows && panel * 32 < cols);
                    for i in 0..out.rows() {
                        out.row_mut(i).iter_mut().for_each(|x| *x += 1.0);
                    }
                }
                assert!(
                    seen.iter().all(|&x| x == 1.0),
                    "{rows} {cols} {num_threads}"
                );
            }
        }
    }

    #[test]
    fn the_strips_of_a_share_hold_its_rows_in_their_order() {
        for num_threads in [1, 2, 5, 16] {
            for rows in [48, 57, 300, 512] {
                let shares = Shares::new(rows, num_threads, (STRIP, ROW));
                let mut packed = vec![usize::MAX; shares.packed_len()];
                for (rows, out) in shares.groups(&mut packed) {
                    for (row, out) in rows.zip(out.chunks_exact_mut(ROW)) {
                        out.fill(row);
                    }
                }
                for (share, first) in (0..rows).step_by(shares.height).enumerate() {
                    let strips = shares.strips(&packed, share).chunks_exact(ROW);
                    let expected = first..rows.min(first + shares.height);
                    for (row, held) in expected.zip(strips) {
                        assert_eq!(held, [row; ROW], "{rows} rows on {num_threads} threads");
                    }
                }
            }
        }
    }

    #[test]
    fn panels_are_packed_once_by_all_threads() {
        for (cols, num_threads) in [(32_usize, 4), (100, 2), (512, 3)] {
            let panels = cols.div_ceil(32);
            let mut packed = vec![0; panels * 5];
            let mut next = 0;
            for (cols, out) in panel_groups(cols, num_threads, (32, 5), &mut packed) {
                assert!(cols.start == next && out.len() == cols.len().div_ceil(32) * 5);
                next = cols.end;
                for x in out {
                    *x += 1;
                }
            }
            assert!(next == cols && packed.iter().all(|&x| x == 1));
        }
    }

    #[test]
    fn each_thread_has_its_rows_and_few_rows_are_shared_by_columns() {
        let shares = Shares::new(512, 2, (STRIP, ROW));
        assert_eq!((shares.height, shares.across), (128, 1));
        let shares = Shares::new(64, 4, (STRIP, ROW));
        assert_eq!((shares.height, shares.across), (64, 4));
    }
}
