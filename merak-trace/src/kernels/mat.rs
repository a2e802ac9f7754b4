//! Matrix views: a slice with its strides.

use super::Float;

/// A view of `rows x cols` elements; element (r, c) is `data[r * row_stride + c * col_stride]`, and
/// at least one of the strides is one.
#[derive(Debug, Clone, Copy)]
pub struct MatRef<'a, T> {
    view: faer::MatRef<'a, T>,
}

impl<'a, T: Copy> MatRef<'a, T> {
    /// Views rows that begin `row_stride` elements apart.
    ///
    /// # Panics
    ///
    /// If the rows overlap or `data` ends before the last one does.
    pub fn with_row_stride(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self {
            view: column_major(data, cols, rows, row_stride).transpose(),
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
            view: self.view.transpose(),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.view.nrows()
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.view.ncols()
    }

    /// `len` rows from row `start`.
    ///
    /// # Panics
    ///
    /// If the matrix has fewer rows.
    #[must_use]
    pub fn sub_rows(self, start: usize, len: usize) -> Self {
        Self {
            view: self.view.subrows(start, len),
        }
    }

    /// `len` columns from column `start`.
    ///
    /// # Panics
    ///
    /// If the matrix has fewer columns.
    #[must_use]
    pub fn sub_cols(self, start: usize, len: usize) -> Self {
        Self {
            view: self.view.subcols(start, len),
        }
    }

    /// The elements of a row, which must be contiguous.
    pub(super) fn row(self, row: usize) -> &'a [T] {
        self.view
            .row(row)
            .try_as_row_major()
            .expect("the caller asks for contiguous rows alone")
            .as_slice()
    }

    pub(super) fn has_contiguous_rows(&self) -> bool {
        self.view.col_stride() == 1
    }

    pub(super) fn has_contiguous_cols(&self) -> bool {
        self.view.row_stride() == 1
    }

    pub(super) fn into_faer(self) -> faer::MatRef<'a, T> {
        self.view
    }
}

/// A mutable view of `rows x cols` elements whose rows are contiguous.
///
/// Splitting it gives disjoint views, so the parts of a packed tensor (queries, keys and values
/// side by side, say) can be written by one kernel, and the tiles of a matrix by several threads.
#[derive(Debug)]
pub struct MatMut<'a, T> {
    view: faer::MatMut<'a, T>,
}

impl<'a, T: Float> MatMut<'a, T> {
    /// Views rows that begin `row_stride` elements apart.
    ///
    /// # Panics
    ///
    /// If the rows overlap or `data` ends before the last one does.
    pub fn with_row_stride(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        let columns = if rows <= 1 {
            faer::MatMut::from_column_major_slice_mut(&mut data[..rows * cols], cols, rows)
        } else {
            faer::MatMut::from_column_major_slice_with_stride_mut(data, cols, rows, row_stride)
        };
        Self {
            view: columns.transpose_mut(),
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
        self.view.nrows()
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.view.ncols()
    }

    /// The first `at` rows and the others.
    ///
    /// # Panics
    ///
    /// If `at` is past the last row.
    pub fn split_rows(self, at: usize) -> (Self, Self) {
        let (top, bottom) = self.view.split_at_row_mut(at);
        (Self { view: top }, Self { view: bottom })
    }

    /// The first `at` columns and the others.
    ///
    /// # Panics
    ///
    /// If `at` is past the last column.
    pub fn split_cols(self, at: usize) -> (Self, Self) {
        let (left, right) = self.view.split_at_col_mut(at);
        (Self { view: left }, Self { view: right })
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
        self.view
            .as_mut()
            .row_mut(row)
            .try_as_row_major_mut()
            .expect("rows are contiguous by construction")
            .as_slice_mut()
    }

    /// A view for a shorter time.
    pub fn reborrow(&mut self) -> MatMut<'_, T> {
        MatMut {
            view: self.view.as_mut(),
        }
    }

    /// Sets every element.
    pub fn fill(&mut self, value: T) {
        for row in 0..self.rows() {
            self.row_mut(row).fill(value);
        }
    }

    pub(super) fn into_faer(self) -> faer::MatMut<'a, T> {
        self.view
    }
}

/// faer requires a full stride for each column but the last; a single column needs none.
fn column_major<T>(data: &[T], rows: usize, cols: usize, stride: usize) -> faer::MatRef<'_, T> {
    if cols <= 1 {
        faer::MatRef::from_column_major_slice(&data[..rows * cols], rows, cols)
    } else {
        faer::MatRef::from_column_major_slice_with_stride(data, rows, cols, stride)
    }
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
        assert_eq!(view.into_faer()[(2, 2)], 10.0);
        assert_eq!(view.transposed().into_faer()[(1, 2)], 9.0);
        assert_eq!(view.sub_rows(1, 2).sub_cols(2, 1).into_faer()[(0, 0)], 6.0);
        let row = MatRef::with_row_stride(&data, 1, 11, 100);
        assert_eq!(row.cols(), 11);
    }
}
