//! Lookup of table rows by id, and the gradient of the table.

use std::ops::Range;

use super::{Float, KernelError, MatMut, Operand, Threads, widen};

/// Elements per unit of parallel work, and columns per unit of the gradient.
const CHUNK: usize = 16 * 1024;
const COLS: usize = 128;

/// Which rows of the whole table a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRows {
    /// Rows of the whole table: ids must be below it.
    pub total: usize,
    /// Rows on this rank; an id outside them gives zeros and takes no gradient.
    pub local: Range<usize>,
    /// A row that takes no gradient even if it is local.
    pub padding: Option<usize>,
}

impl TableRows {
    /// The whole table.
    pub fn all(total: usize) -> Self {
        Self {
            total,
            local: 0..total,
            padding: None,
        }
    }

    fn check(&self, ids: &[i64]) -> Result<(), KernelError> {
        let wrong =
            |&(_, &id): &(usize, &i64)| !usize::try_from(id).is_ok_and(|id| id < self.total);
        match ids.iter().enumerate().find(wrong) {
            Some((position, &id)) => Err(KernelError::Id {
                id,
                position,
                rows: self.total,
            }),
            None => Ok(()),
        }
    }

    /// Row in the local table.
    fn local_row(&self, id: i64) -> Option<usize> {
        let row = usize::try_from(id).ok()?;
        self.local.contains(&row).then(|| row - self.local.start)
    }

    /// Row in the local table, if it takes a gradient.
    fn trained_row(&self, id: i64) -> Option<usize> {
        self.local_row(id)
            .filter(|row| self.padding != Some(row + self.local.start))
    }
}

/// Copies the row of each id.
///
/// # Shapes
///
/// `table`: `[rows here, H]`; `ids`: `[N]`; `out`: `[N, H]`. The elements of the table may be
/// narrower.
///
/// # Errors
///
/// An id is not a row of the whole table.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn embedding<T: Float, W: Operand<T>>(
    threads: &Threads,
    rows: &TableRows,
    table: &[W],
    ids: &[i64],
    out: &mut [T],
) -> Result<(), KernelError> {
    rows.check(ids)?;
    let width = width(rows, table.len(), ids.len(), out.len());
    if width == 0 {
        return Ok(());
    }
    let per_chunk = (CHUNK / width).max(1);
    let items = ids.chunks(per_chunk).zip(out.chunks_mut(per_chunk * width));
    threads.for_each(items, |(ids, out)| {
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
            match rows.local_row(id) {
                Some(row) => widen(&table[row * width..][..width], out),
                None => out.fill(T::ZERO),
            }
        }
    });
    Ok(())
}

/// Adds each row of `dy` to the row of its id in `dtable`, in the order of positions. The padding
/// row gets nothing.
///
/// # Shapes
///
/// `dy`: `[N, H]`; `ids`: `[N]`; `dtable`: `[rows here, H]`.
///
/// # Errors
///
/// An id is not a row of the whole table; then nothing is added.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn embedding_grad<T: Float>(
    threads: &Threads,
    rows: &TableRows,
    dy: &[T],
    ids: &[i64],
    dtable: &mut [T],
) -> Result<(), KernelError> {
    rows.check(ids)?;
    let width = width(rows, dtable.len(), ids.len(), dy.len());
    let table = MatMut::new(dtable, rows.local.len(), width);
    threads.for_each(table.col_blocks(COLS).enumerate(), |(block, mut table)| {
        T::vectorize(
            #[inline(always)]
            || {
                for (position, &id) in ids.iter().enumerate() {
                    let Some(row) = rows.trained_row(id) else {
                        continue;
                    };
                    let dy = &dy[position * width + block * COLS..];
                    for (sum, &dy) in table.row_mut(row).iter_mut().zip(dy) {
                        *sum += dy;
                    }
                }
            },
        );
    });
    Ok(())
}

fn width(rows: &TableRows, table_len: usize, num_ids: usize, out_len: usize) -> usize {
    let width = match (rows.local.len(), num_ids) {
        (0, 0) => 0,
        (0, ids) => out_len / ids,
        (rows, _) => table_len / rows,
    };
    assert_eq!(
        table_len,
        rows.local.len() * width,
        "a whole number of rows"
    );
    assert_eq!(out_len, num_ids * width, "one row per id");
    width
}

#[cfg(test)]
mod tests {
    use super::super::testing::{noise, on_any_threads};
    use super::*;

    fn ids(len: usize, rows: usize) -> Vec<i64> {
        (0..len).map(|i| ((i * i * 7 + 3) % rows) as i64).collect()
    }

    #[test]
    fn rows_are_gathered_and_their_gradients_scattered_back() {
        for (rows, width, len) in [(1, 1, 1), (5, 3, 40), (50, 300, 200), (7, 4, 0)] {
            let (table, ids) = (noise::<f32>(1, rows * width), ids(len, rows));
            let whole = TableRows::all(rows);
            let out = on_any_threads(|threads| {
                let mut out = vec![0.0; len * width];
                embedding(threads, &whole, &table, &ids, &mut out).unwrap();
                out
            });
            let expected: Vec<f32> = ids
                .iter()
                .flat_map(|&id| table[id as usize * width..][..width].to_vec())
                .collect();
            assert_eq!(out, expected);

            let dtable = on_any_threads(|threads| {
                let mut dtable = vec![1.0; rows * width];
                embedding_grad(threads, &whole, &out, &ids, &mut dtable).unwrap();
                dtable
            });
            let mut expected = vec![1.0_f32; rows * width];
            for (i, dy) in out.iter().enumerate() {
                expected[ids[i / width] as usize * width + i % width] += dy;
            }
            assert_eq!(dtable, expected);
        }
    }

    #[test]
    fn parts_of_a_table_sum_to_the_whole() {
        let (table, ids) = (noise::<f32>(1, 10 * 6), ids(30, 10));
        let one = Threads::one();
        let run = |local: Range<usize>| {
            let rows = TableRows {
                local,
                ..TableRows::all(10)
            };
            let part = &table[rows.local.start * 6..rows.local.end * 6];
            let mut out = vec![1.0; 30 * 6];
            embedding(&one, &rows, part, &ids, &mut out).unwrap();
            let mut grad = vec![0.0; part.len()];
            embedding_grad(&one, &rows, &[1.0; 30 * 6], &ids, &mut grad).unwrap();
            (out, grad)
        };
        let (whole, whole_grad) = run(0..10);
        let (first, first_grad) = run(0..4);
        let (second, second_grad) = run(4..10);
        let sum: Vec<f32> = first.iter().zip(&second).map(|(a, b)| a + b).collect();
        assert_eq!(sum, whole);
        assert_eq!([first_grad, second_grad].concat(), whole_grad);
    }

    #[test]
    fn the_padding_row_is_looked_up_and_not_trained() {
        let ids = [2, 0, 2, 1];
        for local in [0..3, 1..3] {
            let rows = TableRows {
                local: local.clone(),
                padding: Some(2),
                ..TableRows::all(3)
            };
            let (mut out, mut grad) = ([0.0; 4], vec![0.0; local.len()]);
            let table = [5.0, 6.0, 7.0];
            embedding(&Threads::one(), &rows, &table[local], &ids, &mut out).unwrap();
            embedding_grad(&Threads::one(), &rows, &[1.0; 4], &ids, &mut grad).unwrap();
            assert_eq!((out[0], out[2]), (7.0, 7.0));
            assert_eq!(grad.split_last(), Some((&0.0, &[1.0; 2][3 - grad.len()..])));
        }
    }

    #[test]
    fn an_id_outside_the_table_is_named_with_its_position() {
        let rows = TableRows::all(3);
        for id in [3, -1] {
            let error = embedding(
                &Threads::one(),
                &rows,
                &[0.0_f32; 3],
                &[0, id],
                &mut [0.0; 2],
            );
            assert_eq!(
                error.unwrap_err().to_string(),
                format!("id {id} at position 1 is out of range, expected 0 to 2")
            );
            let error = embedding_grad(
                &Threads::one(),
                &rows,
                &[0.0; 2],
                &[0, id],
                &mut [0.0_f32; 3],
            );
            assert!(error.is_err());
        }
    }
}
