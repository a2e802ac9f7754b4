//! The attention bias from a table of relative positions, and the gradient of the table.

use super::{Float, KernelError, Threads};

/// `bias[h, q, k] = table[index[q, k], h]`.
///
/// # Shapes
///
/// `table`: `[R, H]`; `index`: `[Sq, Sk]`; `bias`: `[H, Sq, Sk]`.
///
/// # Errors
///
/// [`KernelError::Id`] for an index without a row.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn relative_bias<T: Float>(
    threads: &Threads,
    heads: usize,
    table: &[T],
    index: &[i64],
    bias: &mut [T],
) -> Result<(), KernelError> {
    assert_eq!(
        bias.len(),
        heads * index.len(),
        "one value per head and pair"
    );
    check_rows(index, table.len() / heads.max(1))?;
    let items = bias.chunks_mut(index.len().max(1)).enumerate();
    threads.for_each(items, |(head, bias)| {
        for (bias, &id) in bias.iter_mut().zip(index) {
            *bias = table[row(id) * heads + head];
        }
    });
    Ok(())
}

/// `dtable[r, h] = sum of dbias[h, q, k] over all pairs with index[q, k] = r`, first within each
/// query, then over the queries.
///
/// # Shapes
///
/// As in [`relative_bias`], `k_len` being Sk.
///
/// # Errors
///
/// [`KernelError::Id`] for an index without a row.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn relative_bias_grad<T: Float>(
    threads: &Threads,
    (heads, k_len): (usize, usize),
    dbias: &[T],
    index: &[i64],
    dtable: &mut [T],
) -> Result<(), KernelError> {
    assert_eq!(
        dbias.len(),
        heads * index.len(),
        "one value per head and pair"
    );
    dtable.fill(T::ZERO);
    if dtable.is_empty() || index.is_empty() {
        return Ok(());
    }
    let num_rows = dtable.len() / heads;
    check_rows(index, num_rows)?;
    let mut by_head = vec![T::ZERO; dtable.len()];
    let items = by_head.chunks_mut(num_rows).zip(dbias.chunks(index.len()));
    threads.for_each_with(
        items,
        || vec![T::ZERO; num_rows],
        |of_query, (sums, dbias)| {
            for (dbias, index) in dbias.chunks(k_len).zip(index.chunks(k_len)) {
                of_query.fill(T::ZERO);
                for (&dbias, &id) in dbias.iter().zip(index) {
                    of_query[row(id)] += dbias;
                }
                for (sum, &part) in sums.iter_mut().zip(&*of_query) {
                    *sum += part;
                }
            }
        },
    );
    for (row, dtable) in dtable.chunks_exact_mut(heads).enumerate() {
        for (head, dtable) in dtable.iter_mut().enumerate() {
            *dtable = by_head[head * num_rows + row];
        }
    }
    Ok(())
}

/// Refuses indices without a row.
fn check_rows(index: &[i64], num_rows: usize) -> Result<(), KernelError> {
    let is_row = |id: i64| usize::try_from(id).is_ok_and(|row| row < num_rows);
    match index.iter().position(|&id| !is_row(id)) {
        None => Ok(()),
        Some(position) => Err(KernelError::Id {
            id: index[position],
            position,
            rows: num_rows,
        }),
    }
}

/// The number of a row of an index that was checked.
fn row(id: i64) -> usize {
    id.cast_unsigned() as usize
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_gradient, noise, on_any_threads};
    use super::*;

    const INDEX: [i64; 6] = [2, 0, 2, 1, 2, 0];

    #[test]
    fn each_pair_reads_its_row_and_the_gradient_adds_it_up() {
        let (heads, table) = (2, noise::<f64>(1, 4 * 2));
        let bias = |threads: &Threads, table: &[f64]| {
            let mut bias = vec![0.0; 2 * 6];
            relative_bias(threads, heads, table, &INDEX, &mut bias).unwrap();
            bias
        };
        let found = on_any_threads(|threads| bias(threads, &table));
        for head in 0..heads {
            for (pair, &row) in INDEX.iter().enumerate() {
                assert_eq!(
                    found[head * 6 + pair],
                    table[usize::try_from(row).unwrap() * 2 + head]
                );
            }
        }
        let dbias = noise::<f64>(2, 2 * 6);
        let dtable = on_any_threads(|threads| {
            let mut dtable = vec![1.0; 8];
            relative_bias_grad(threads, (heads, 3), &dbias, &INDEX, &mut dtable).unwrap();
            dtable
        });
        assert_gradient(&table, &dbias, |t| bias(&Threads::one(), t), &dtable);
    }

    #[test]
    fn an_index_without_a_row_is_named() {
        let error = relative_bias(&Threads::one(), 1, &[0.0; 2], &INDEX, &mut [0.0; 6]);
        insta::assert_snapshot!(error.unwrap_err(), @"id 2 at position 0 is out of range, expected 0 to 1");
    }
}
