//! How threads share a product, whose operands are packed for all of them.
//!
//! A share is a strip of rows, or a part of one where strips are few. A thread has about the same
//! rows in every product with as many rows, as in the kernels that work row by row, so it finds in
//! its own cache what it wrote before. One that is done early takes over shares of others. Each
//! thread has columns of its own where the rows are too few.

use std::ops::Range;

use super::super::{Float, MatMut};

/// Fewest rows of each thread: with fewer, all threads would read each panel for a strip or two.
const LEAST_ROWS: usize = 28;

/// Fewest shares of each thread, if there are as many tiles: with fewer, threads that have a share
/// more or less than others would wait.
const LEAST_SHARES: usize = 16;

/// Most groups of panels of each thread: enough that others can take some over.
const PANEL_GROUPS: usize = 4;

/// Most panels of a group, unless each thread has [`PANEL_GROUPS`].
const FEW_PANELS: usize = 2;

/// Most strips of a left operand that are packed together, as neighbours share a cache line and a
/// page.
const GROUP: usize = 8;

/// The cut of an output into shares, and of a packed left operand into groups of strips.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shares {
    rows: usize,
    num_threads: usize,
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
        let are_few = rows.div_ceil(num_threads) < LEAST_ROWS;
        Self {
            rows,
            num_threads,
            across: if are_few { num_threads } else { 1 },
            strip,
            strip_len: strip * row_len,
        }
    }

    /// Strips of all rows.
    fn strips(&self) -> usize {
        self.rows.div_ceil(self.strip)
    }

    /// Packed elements of all rows.
    pub(super) fn packed_len(&self) -> usize {
        self.strips() * self.strip_len
    }

    /// Strip `i` of the packed ones.
    pub(super) fn strip<'a, T>(&self, packed: &'a [T], i: usize) -> &'a [T] {
        &packed[i * self.strip_len..][..self.strip_len]
    }

    /// Groups of strips, each with its rows: the unit in which a left operand is packed. Each
    /// thread has as many.
    pub(super) fn groups<T>(
        self,
        packed: &mut [T],
    ) -> impl Iterator<Item = (Range<usize>, &mut [T])> {
        let groups = self.strips().div_ceil(GROUP * self.num_threads) * self.num_threads;
        cut(self.rows, groups, (self.strip, self.strip_len), packed)
    }

    /// Panels of a block of columns: at most `most` for each share, and blocks of equal size.
    pub(super) fn block_panels(&self, panels: usize, most: usize) -> usize {
        let rounds = panels.div_ceil(self.across * most).max(1);
        panels.div_ceil(rounds).max(1)
    }

    /// The shares of a block of columns, in whole panels of `width` columns, with the number of
    /// their strip and their first panel.
    pub(super) fn of<T: Float>(
        self,
        block: MatMut<'_, T>,
        width: usize,
    ) -> impl Iterator<Item = ([usize; 2], MatMut<'_, T>)> {
        let each = block.cols().div_ceil(width).div_ceil(self.across).max(1);
        let cuts = (LEAST_SHARES * self.num_threads).div_ceil(self.strips().max(1) * self.across);
        let panels = each.div_ceil(cuts);
        let parts = block.col_blocks(each * width).enumerate();
        parts.flat_map(move |(j, part)| {
            let strips = part.row_blocks(self.strip).enumerate();
            strips.flat_map(move |(i, strip)| {
                let shares = strip.col_blocks(panels * width).enumerate();
                shares.map(move |(k, out)| ([i, j * each + k * panels], out))
            })
        })
    }
}

/// Groups of panels of a block of columns, with their columns: the unit in which a right operand is
/// packed. Each thread has as many. A panel has `width` columns and `panel_len` packed elements.
pub(super) fn panel_groups<T>(
    cols: usize,
    num_threads: usize,
    (width, panel_len): (usize, usize),
    packed: &mut [T],
) -> impl Iterator<Item = (Range<usize>, &mut [T])> {
    let each = cols.div_ceil(width).div_ceil(num_threads);
    let groups = each.div_ceil(FEW_PANELS).min(PANEL_GROUPS) * num_threads;
    cut(cols, groups, (width, panel_len), packed)
}

/// Cuts lines into groups of about as many pieces of `size` lines, with the memory in which each
/// piece takes `len` packed elements.
fn cut<T>(
    lines: usize,
    groups: usize,
    (size, len): (usize, usize),
    mut packed: &mut [T],
) -> impl Iterator<Item = (Range<usize>, &mut [T])> {
    let pieces = lines.div_ceil(size);
    (0..groups).map(move |group| {
        let [first, end] = [group, group + 1].map(|group| group * pieces / groups);
        let out = packed.split_off_mut(..(end - first) * len);
        let lines = first * size..lines.min(end * size);
        (lines, out.unwrap_or_default())
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
            for (rows, cols) in [(48, 32), (57, 300), (512, 100), (513, 64), (2048, 33)] {
                let shares = Shares::new(rows, num_threads, (STRIP, ROW));
                let mut seen = vec![0.0_f32; rows * cols];
                let out = MatMut::new(&mut seen, rows, cols);
                for ([strip, panel], mut out) in shares.of(out, 32) {
                    for i in 0..out.rows() {
                        for (j, x) in out.row_mut(i).iter_mut().enumerate() {
                            *x += ((strip * STRIP + i) * cols + panel * 32 + j + 1) as f32;
                        }
                    }
                }
                let each_once = seen.iter().zip(1..).all(|(&x, i)| x == i as f32);
                assert!(each_once, "{rows} {cols} {num_threads}");
            }
        }
    }

    #[test]
    fn groups_pack_each_strip_once_and_threads_have_as_many_groups() {
        for num_threads in [1, 2, 5, 16] {
            for rows in [48, 57, 300, 512] {
                let shares = Shares::new(rows, num_threads, (STRIP, ROW));
                let mut packed = vec![usize::MAX; shares.packed_len()];
                let mut groups = 0;
                for (rows, out) in shares.groups(&mut packed) {
                    assert!(out.len() <= GROUP * STRIP * ROW);
                    for (row, out) in rows.zip(out.chunks_exact_mut(ROW)) {
                        out.fill(row);
                    }
                    groups += 1;
                }
                assert_eq!(groups % num_threads, 0);
                for row in 0..rows {
                    let strip = shares.strip(&packed, row / STRIP);
                    let held = &strip[row % STRIP * ROW..][..ROW];
                    assert_eq!(held, [row; ROW], "{rows} rows on {num_threads} threads");
                }
            }
        }
    }

    #[test]
    fn panels_are_packed_once_and_threads_have_as_many() {
        for (cols, num_threads) in [(32_usize, 4), (100, 2), (192, 2), (512, 3), (2048, 2)] {
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
            let groups = panel_groups(cols, num_threads, (32, 5), &mut packed);
            let sizes: Vec<_> = groups.map(|(_, out)| out.len() / 5).collect();
            let of_threads = sizes.chunks(sizes.len() / num_threads);
            let of_threads = of_threads.map(|sizes| sizes.iter().sum::<usize>());
            let (least, most) = (panels / num_threads, panels.div_ceil(num_threads));
            for panels in of_threads {
                assert!((least..=most).contains(&panels), "{cols} {num_threads}");
            }
        }
    }

    #[test]
    fn strips_are_cut_where_threads_have_few_of_them() {
        for (num_threads, per_strip) in [(1, 1), (2, 1), (4, 2), (16, 6)] {
            let mut out = vec![0.0_f32; 512 * 512];
            let shares = Shares::new(512, num_threads, (STRIP, ROW));
            let shares = shares.of(MatMut::new(&mut out, 512, 512), 32);
            assert_eq!(shares.count(), 37 * per_strip, "{num_threads} threads");
        }
    }

    #[test]
    fn few_rows_are_shared_by_columns() {
        assert_eq!(Shares::new(512, 2, (STRIP, ROW)).across, 1);
        assert_eq!(Shares::new(64, 4, (STRIP, ROW)).across, 4);
        assert_eq!(Shares::new(8, 1, (STRIP, ROW)).across, 1);
    }
}
