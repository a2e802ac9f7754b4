//! Matrix views: where elements lie and how far rows and columns are apart.
#![expect(
    unsafe_code,
    reason = "columns of one matrix are written side by side, which slices cannot express"
)]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;

use super::Float;

/// A view of `rows x cols` elements; element (r, c) is `data[r * row_stride + c * col_stride]`, and
/// at least one of the strides is one.
#[derive(Debug, Clone, Copy)]
pub struct MatRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Copy> MatRef<'a, T> {
    /// Views rows that begin `row_stride` elements apart.
    ///
    /// # Panics
    ///
    /// If the rows overlap or `data` ends before the last one does.
    pub fn with_row_stride(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self {
            data: &data[..extent(rows, cols, row_stride)],
            rows,
            cols,
            row_stride: if rows > 1 { row_stride } else { cols },
            col_stride: 1,
        }
    }

    /// Views rows that follow each other.
    ///
    /// # Panics
    ///
    /// If `data` has fewer than `rows * cols` elements.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::with_row_stride(data, rows, cols, cols)
    }

    /// The same elements with rows and columns exchanged.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// `len` rows from row `start`.
    ///
    /// # Panics
    ///
    /// If the matrix has fewer rows.
    #[must_use]
    pub fn sub_rows(self, start: usize, len: usize) -> Self {
        assert!(
            start <= self.rows && len <= self.rows - start,
            "{len} rows from {start} of {}",
            self.rows,
        );
        let first = (start * self.row_stride).min(self.data.len());
        Self {
            data: &self.data[first..],
            rows: len,
            ..self
        }
    }

    /// `len` columns from column `start`.
    ///
    /// # Panics
    ///
    /// If the matrix has fewer columns.
    #[must_use]
    pub fn sub_cols(self, start: usize, len: usize) -> Self {
        self.transposed().sub_rows(start, len).transposed()
    }

    /// The elements of a row, which must be contiguous.
    pub(super) fn row(self, row: usize) -> &'a [T] {
        assert!(
            self.has_contiguous_rows() && row < self.rows,
            "row {row} of {} is no slice",
            self.rows,
        );
        &self.data[row * self.row_stride..][..self.cols]
    }

    /// Whether the elements of each row follow each other.
    pub(super) fn has_contiguous_rows(&self) -> bool {
        self.col_stride == 1
    }

    /// Whether the elements of each column follow each other.
    pub(super) fn has_contiguous_cols(&self) -> bool {
        self.row_stride == 1
    }

    /// Elements between the starts of two rows.
    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Elements from one row to the next, and from one column to the next.
    pub(super) fn strides(&self) -> [isize; 2] {
        [self.row_stride, self.col_stride].map(usize::cast_signed)
    }

    /// The address of element (0, 0).
    pub(super) fn as_ptr(&self) -> *const T {
        self.data.as_ptr()
    }
}

/// A mutable view of `rows x cols` elements whose rows are contiguous.
///
/// Splitting it gives disjoint views, so the parts of a packed tensor (queries, keys and values
/// side by side, say) can be written by one kernel, and the tiles of a matrix by several threads.
#[derive(Debug)]
pub struct MatMut<'a, T> {
    start: NonNull<T>,
    rows: usize,
    cols: usize,
    row_stride: usize,
    elements: PhantomData<&'a mut [T]>,
}

// SAFETY: a view is the only way to its elements, as a mutable slice is.
unsafe impl<T: Send> Send for MatMut<'_, T> {}
// SAFETY: a shared view gives no element away.
unsafe impl<T: Sync> Sync for MatMut<'_, T> {}

impl<'a, T: Float> MatMut<'a, T> {
    /// Views rows that begin `row_stride` elements apart.
    ///
    /// # Panics
    ///
    /// If the rows overlap or `data` ends before the last one does.
    pub fn with_row_stride(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        let data = &mut data[..extent(rows, cols, row_stride)];
        Self {
            start: NonNull::from(data).cast(),
            rows,
            cols,
            row_stride: if rows > 1 { row_stride } else { cols },
            elements: PhantomData,
        }
    }

    /// Views rows that follow each other.
    ///
    /// # Panics
    ///
    /// If `data` has fewer than `rows * cols` elements.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::with_row_stride(data, rows, cols, cols)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The first `at` rows and the others.
    ///
    /// # Panics
    ///
    /// If `at` is past the last row.
    pub fn split_rows(self, at: usize) -> (Self, Self) {
        assert!(at <= self.rows, "row {at} of {}", self.rows);
        // Of no rows, the address is never read: it may be that of the first element.
        let skipped = if at < self.rows {
            at * self.row_stride
        } else {
            0
        };
        let top = Self { rows: at, ..self };
        let bottom = Self {
            // SAFETY: row `at` begins within the elements of this view.
            start: unsafe { self.start.add(skipped) },
            rows: self.rows - at,
            ..self
        };
        (top, bottom)
    }

    /// The first `at` columns and the others.
    ///
    /// # Panics
    ///
    /// If `at` is past the last column.
    pub fn split_cols(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols, "column {at} of {}", self.cols);
        let skipped = if self.rows > 0 { at } else { 0 };
        let left = Self { cols: at, ..self };
        let right = Self {
            // SAFETY: the first row has `cols` elements, and `at` is not past their end.
            start: unsafe { self.start.add(skipped) },
            cols: self.cols - at,
            ..self
        };
        (left, right)
    }

    /// Blocks of `height` rows, the last one shorter.
    pub fn row_blocks(self, height: usize) -> impl Iterator<Item = Self> {
        let mut rest = Some(self);
        std::iter::from_fn(move || {
            let all = rest.take().filter(|rest| rest.rows() > 0)?;
            let at = height.min(all.rows());
            let (first, others) = all.split_rows(at);
            rest = Some(others);
            Some(first)
        })
    }

    /// Blocks of `width` columns, the last one narrower.
    pub fn col_blocks(self, width: usize) -> impl Iterator<Item = Self> {
        let mut rest = Some(self);
        std::iter::from_fn(move || {
            let all = rest.take().filter(|rest| rest.cols() > 0)?;
            let at = width.min(all.cols());
            let (first, others) = all.split_cols(at);
            rest = Some(others);
            Some(first)
        })
    }

    /// The elements of a row.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row begins within the elements of this view.
        let start = unsafe { self.start.add(row * self.row_stride) };
        // SAFETY: the row lies within the elements of this view, which is borrowed while the slice
        // lives. Views of the columns beside it hold other elements.
        unsafe { slice::from_raw_parts_mut(start.as_ptr(), self.cols) }
    }

    /// A view for a shorter time.
    pub fn reborrow(&mut self) -> MatMut<'_, T> {
        MatMut { ..*self }
    }

    /// Sets every element.
    pub fn fill(&mut self, value: T) {
        for row in 0..self.rows() {
            self.row_mut(row).fill(value);
        }
    }

    /// Elements from one row to the next, and from one column to the next.
    pub(super) fn strides(&self) -> [isize; 2] {
        [self.row_stride.cast_signed(), 1]
    }

    /// The address of element (0, 0).
    pub(super) fn as_mut_ptr(&mut self) -> *mut T {
        self.start.as_ptr()
    }
}

/// Elements from the first one of a matrix to its last one, both included.
///
/// # Panics
///
/// If its rows overlap.
fn extent(rows: usize, cols: usize, row_stride: usize) -> usize {
    let Some(before_last) = rows.checked_sub(1) else {
        return 0;
    };
    assert!(
        before_last == 0 || row_stride >= cols,
        "rows of {cols} elements overlap at a stride of {row_stride}",
    );
    before_last
        .checked_mul(row_stride)
        .and_then(|start| start.checked_add(cols))
        .expect("a matrix fits the address space")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_a_packed_matrix_without_its_neighbours() {
        let mut data = vec![0.0_f32; 5 * 7];
        let (left, right) = MatMut::new(&mut data, 5, 7).split_cols(3);
        for (i, block) in left.row_blocks(2).enumerate() {
            for (j, mut tile) in block.col_blocks(2).enumerate() {
                tile.fill((10 * i + j) as f32);
            }
        }
        assert_eq!((right.rows(), right.cols()), (5, 4));
        assert_eq!(data[..7], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(data[28..], [20.0, 20.0, 21.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn strided_rows_may_end_with_the_data() {
        let data: Vec<f64> = (0..11).map(f64::from).collect();
        let view = MatRef::with_row_stride(&data, 3, 3, 4);
        assert_eq!(view.row(2), [8.0, 9.0, 10.0]);
        assert_eq!(view.transposed().sub_cols(2, 1).transposed().row(0)[1], 9.0);
        assert_eq!(view.sub_rows(1, 2).sub_cols(2, 1).row(0), [6.0]);
        assert_eq!(view.sub_rows(3, 0).rows(), 0);
        let row = MatRef::with_row_stride(&data, 1, 11, 100);
        assert_eq!(row.cols(), 11);
    }
}
