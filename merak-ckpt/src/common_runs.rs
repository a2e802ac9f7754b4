//! The runs of elements that two row-major arrays of one tensor have in common.

use std::ops::Range;

/// One side of a copy: a row-major array of which only a flat window is present.
pub(crate) struct Side<'a> {
    /// Shape of the array.
    pub(crate) shape: &'a [usize],
    /// Where the box to copy begins in the array.
    pub(crate) start: &'a [usize],
    /// Flat indices of the array that are present.
    pub(crate) window: Range<usize>,
}

/// Calls `copy(from, to, len)` for each run of elements of a box of `size` that is contiguous in
/// both arrays and present in both windows, in row-major order of the box; indices count from the
/// start of the windows.
pub(crate) fn for_each_run<E>(
    size: &[usize],
    from: &Side<'_>,
    to: &Side<'_>,
    copy: &mut dyn FnMut(usize, usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    if size.contains(&0) {
        return Ok(());
    }
    let (outer, row) = contiguous_tail(size, from.shape, to.shape);
    let mut index = vec![0; outer];
    loop {
        let begin = (from.flat(&index), to.flat(&index));
        let skip = (from.window.start.saturating_sub(begin.0))
            .max(to.window.start.saturating_sub(begin.1));
        let end = row
            .min(from.window.end.saturating_sub(begin.0))
            .min(to.window.end.saturating_sub(begin.1));
        if skip < end {
            let from_index = begin.0 + skip - from.window.start;
            let to_index = begin.1 + skip - to.window.start;
            copy(from_index, to_index, end - skip)?;
        }
        if !advance(&mut index, size) {
            return Ok(());
        }
    }
}

impl Side<'_> {
    /// Flat index of the box's element at `index` (outer dims; zero in the others).
    fn flat(&self, index: &[usize]) -> usize {
        self.shape.iter().enumerate().fold(0, |flat, (dim, size)| {
            flat * size + self.start[dim] + index.get(dim).copied().unwrap_or(0)
        })
    }
}

/// Number of dims to walk, and elements per step: the trailing dims that the box fills in both
/// arrays are one run, together with the dim before them.
fn contiguous_tail(size: &[usize], from: &[usize], to: &[usize]) -> (usize, usize) {
    let (mut outer, mut row) = (size.len(), 1);
    while outer > 0 {
        outer -= 1;
        row *= size[outer];
        if size[outer] != from[outer] || size[outer] != to[outer] {
            break;
        }
    }
    (outer, row)
}

/// Steps `index` in row-major order through the leading dims of `size`; false at the end.
pub(crate) fn advance(index: &mut [usize], size: &[usize]) -> bool {
    for dim in (0..index.len()).rev() {
        index[dim] += 1;
        if index[dim] < size[dim] {
            return true;
        }
        index[dim] = 0;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn runs(size: &[usize], from: &Side<'_>, to: &Side<'_>) -> Vec<(usize, usize, usize)> {
        let mut runs = Vec::new();
        let Ok(()) = for_each_run::<Infallible>(size, from, to, &mut |a, b, n| {
            runs.push((a, b, n));
            Ok(())
        });
        runs
    }

    #[test]
    fn whole_arrays_are_one_run() {
        let side = || Side {
            shape: &[3, 4, 5],
            start: &[0, 0, 0],
            window: 0..60,
        };
        assert_eq!(runs(&[3, 4, 5], &side(), &side()), [(0, 0, 60)]);
    }

    #[test]
    fn columns_are_a_run_per_row_and_windows_clip_them() {
        let from = Side {
            shape: &[3, 4],
            start: &[0, 2],
            window: 3..12,
        };
        let to = Side {
            shape: &[3, 2],
            start: &[0, 0],
            window: 0..5,
        };
        // Elements 2, 3 | 6, 7 | 10, 11 of the source; the first and the last are cut off.
        assert_eq!(runs(&[3, 2], &from, &to), [(0, 1, 1), (3, 2, 2), (7, 4, 1)]);
    }
}
