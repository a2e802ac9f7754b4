//! Matrix products.

#[cfg(target_arch = "x86_64")]
use super::Units;
use super::{Float, MatMut, MatRef, Threads};

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod blocked;
#[cfg(target_arch = "x86_64")]
mod dots;
mod halves;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod library;
mod operand;
#[cfg(target_arch = "x86_64")]
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod prefetch;
#[cfg(target_arch = "x86_64")]
mod rows;
#[cfg(target_arch = "x86_64")]
mod shares;
#[cfg(target_arch = "x86_64")]
mod tile;
#[cfg(feature = "tch")]
mod vectors;

#[cfg(target_arch = "x86_64")]
use pulp::x86::{V3, V4};
#[cfg(target_arch = "x86_64")]
use tile::STRIP;

pub use halves::narrow;
pub(super) use halves::product_of_halves;
#[cfg(target_arch = "x86_64")]
pub use lanes::{Isa, Lanes};
pub use library::Element;
pub(super) use library::gemm_inline;
pub use operand::{Operand, widen};
#[cfg(feature = "tch")]
pub use vectors::Vectors;

/// An element type of products; only x86 has register kernels.
#[cfg(not(target_arch = "x86_64"))]
pub trait Lanes: bytemuck::Pod {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: bytemuck::Pod> Lanes for T {}

/// Height and width of the tiles of a product: the unit of parallel work. Measured best of 128 to
/// 1024 for products of 512 to 8192: the last level of packing then stays in the second-level
/// cache.
const TILE: usize = 256;

/// Elements between two columns of a repacked left operand: the tile and a cache line, so that
/// columns do not fall into one set of the cache.
const REPACKED_STRIDE: usize = TILE + 16;

/// Whether a product replaces its output or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// `c = ..`
    Replace,
    /// `c += ..`
    Add,
}

/// What a product is added to.
#[derive(Debug, Clone, Copy)]
pub enum Start<'a, T> {
    /// Nothing.
    Zero,
    /// What the output holds.
    Output,
    /// One number per column.
    Row(&'a [T]),
}

impl<T> From<Write> for Start<'_, T> {
    fn from(write: Write) -> Self {
        match write {
            Write::Replace => Start::Zero,
            Write::Add => Start::Output,
        }
    }
}

/// The operands of each `depth` of k in turn, and what their product is added to.
#[cfg(target_arch = "x86_64")]
fn depths<'a, A, B, T>(
    depth: usize,
    (a, b): (MatRef<'a, A>, MatRef<'a, B>),
    start: Start<'a, T>,
) -> impl Iterator<Item = (MatRef<'a, A>, MatRef<'a, B>, Start<'a, T>)>
where
    A: Copy,
    B: Copy,
    T: Copy,
{
    (0..a.cols()).step_by(depth).map(move |k| {
        let len = depth.min(a.cols() - k);
        let start = if k == 0 { start } else { Start::Output };
        (a.sub_cols(k, len), b.sub_rows(k, len), start)
    })
}

impl<T> Start<'_, T> {
    /// The part for `cols` columns from `col`.
    fn columns(self, col: usize, cols: usize) -> Self {
        match self {
            Start::Row(row) => Start::Row(&row[col..][..cols]),
            other => other,
        }
    }
}

/// Computes `c = alpha a b`, or adds it to c.
///
/// Each element is one sum over k, in an order that depends on the shapes alone; tiles of c are the
/// unit of parallel work.
///
/// # Shapes
///
/// `a: [M, K]`, `b: [K, N]`, `c: [M, N]`; a product with K = 0 is zero. The elements of `b` may be
/// narrower.
///
/// # Panics
///
/// If the shapes do not fit each other.
pub fn gemm<T: Float, W: Operand<T>>(
    threads: &Threads,
    alpha: T,
    a: MatRef<'_, T>,
    b: MatRef<'_, W>,
    write: Write,
    c: MatMut<'_, T>,
) {
    check_shapes(&a, &b, &c);
    product(threads, alpha, a, b, write.into(), c);
}

/// A factor of [`multiply`].
#[derive(Debug, Clone, Copy)]
pub struct Factor<'a> {
    /// The elements, row by row.
    pub values: &'a [f32],
    /// Whether they lie column by column instead.
    pub is_transposed: bool,
}

impl<'a> Factor<'a> {
    fn view(self, rows: usize, cols: usize) -> MatRef<'a, f32> {
        if self.is_transposed {
            MatRef::new(self.values, cols, rows).transposed()
        } else {
            MatRef::new(self.values, rows, cols)
        }
    }
}

/// Computes `c = a b` in `f32`.
///
/// Each element is one sum, in an order that depends on the shapes alone.
///
/// # Shapes
///
/// `sides` are `[M, K, N]`; `a: [M, K]`, `b: [K, N]`, `c: [M, N]`.
///
/// # Panics
///
/// If a slice has fewer elements.
///
/// # Examples
///
/// ```
/// use merak_trace::{Factor, Threads, multiply};
///
/// let rows = Factor { values: &[1.0, 2.0, 3.0, 4.0], is_transposed: false };
/// let columns = Factor { is_transposed: true, ..rows };
/// let mut c = [0.0; 4];
/// multiply(&Threads::one(), [2, 2, 2], rows, columns, &mut c);
/// assert_eq!(c, [5.0, 11.0, 11.0, 25.0]);
/// ```
pub fn multiply(
    threads: &Threads,
    [m, k, n]: [usize; 3],
    a: Factor<'_>,
    b: Factor<'_>,
    c: &mut [f32],
) {
    let (a, b) = (a.view(m, k), b.view(k, n));
    gemm(threads, 1.0, a, b, Write::Replace, MatMut::new(c, m, n));
}

/// Computes `c = a b + bias` with the bias added to every row.
///
/// # Shapes
///
/// `a: [M, K]`, `b: [K, N]`, `bias: [N]`, `c: [M, N]`.
///
/// # Panics
///
/// If the shapes do not fit each other.
pub fn gemm_bias<T: Float, W: Operand<T>>(
    threads: &Threads,
    a: MatRef<'_, T>,
    b: MatRef<'_, W>,
    bias: &[T],
    c: MatMut<'_, T>,
) {
    check_shapes(&a, &b, &c);
    assert_eq!(bias.len(), c.cols(), "a bias has an element per column");
    product(threads, T::ONE, a, b, Start::Row(bias), c);
}

/// Computes `c = a b + start` as [`gemm`] does, but of operands that are rounded to bf16, with sums
/// of `f32`. Operands of `f64` are not rounded.
///
/// # Panics
///
/// If the shapes do not fit each other.
pub fn gemm_of_halves<T: Float, W: Operand<T>>(
    threads: &Threads,
    a: MatRef<'_, T>,
    b: MatRef<'_, W>,
    start: Start<'_, T>,
    c: MatMut<'_, T>,
) {
    check_shapes(&a, &b, &c);
    if let Start::Row(row) = start {
        assert_eq!(row.len(), c.cols(), "a start has an element per column");
    }
    W::product_of_halves(threads, T::ONE, (a, b), start, c);
}

/// The fastest units for bf16 that this processor has.
#[cfg(target_arch = "x86_64")]
pub(super) fn units() -> Units {
    match (amx::available(), pairs::Pairs::try_new()) {
        (true, Some(_)) => Units::Matrix,
        (_, Some(_)) => Units::Vector,
        _ => Units::None,
    }
}

pub(super) fn product<T: Float, W: Operand<T>>(
    threads: &Threads,
    alpha: T,
    a: MatRef<'_, T>,
    b: MatRef<'_, W>,
    start: Start<'_, T>,
    c: MatMut<'_, T>,
) {
    #[cfg(target_arch = "x86_64")]
    let c = match on_registers(threads, alpha, (a, b), start, c) {
        Ok(()) => return,
        Err(c) => c,
    };
    threads.for_each(tiles(0, c), |tile| {
        tile_product(threads, alpha, (a, b), start, tile);
    });
}

/// Computes a product with the register kernels for this processor.
///
/// # Errors
/// No such kernel suits the product or pays; `c` is unchanged.
#[cfg(target_arch = "x86_64")]
fn on_registers<'c, T: Float, W: Operand<T>>(
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    start: Start<'_, T>,
    c: MatMut<'c, T>,
) -> Result<(), MatMut<'c, T>> {
    let wide = V4::try_new();
    // With AVX2, the library's blocks are faster.
    if let (true, Some(simd)) = (blocked::pays(a.rows(), a.cols(), b.cols()), wide) {
        if let Err(c) = W::product_on_tiles(simd, threads, alpha, (a, b), start, c) {
            blocked::product::<_, _, _, STRIP>(simd, threads, alpha, (a, b), start, c);
        }
        return Ok(());
    }
    if !rows::pays(&a, &b) {
        return Err(c);
    }
    match (wide, V3::try_new()) {
        (Some(simd), _) => rows::product(simd, threads, alpha, (a, b), start, c),
        (None, Some(simd)) => rows::product(simd, threads, alpha, (a, b), start, c),
        (None, None) => return Err(c),
    }
    Ok(())
}

/// Computes one product per matrix of a batch, as [`gemm`] does.
///
/// # Shapes
///
/// `a` and `b` give the operands of product `i < batch`; `c` holds the outputs in this order.
///
/// # Panics
///
/// If the shapes do not fit each other.
pub fn gemm_batched<'a, T: Float>(
    threads: &Threads,
    alpha: T,
    a: impl Fn(usize) -> MatRef<'a, T> + Send + Sync,
    b: impl Fn(usize) -> MatRef<'a, T> + Send + Sync,
    write: Write,
    c: Vec<MatMut<'_, T>>,
) {
    let items = c.into_iter().enumerate().flat_map(|(i, c)| {
        check_shapes(&a(i), &b(i), &c);
        tiles(i, c)
    });
    threads.for_each(items, |tile| {
        let operands = (a(tile.batch), b(tile.batch));
        tile_product(threads, alpha, operands, write.into(), tile);
    });
}

/// Computes a small product, so that the calling thread has the scratch memory that the
/// library of products keeps for each thread until it ends. Its size follows from the caches that
/// the library finds, and goes from 4 MiB up to twice the caches of the machine; products touch a
/// small part of it.
pub fn take_product_scratch() {
    // Products of fewer elements need none.
    const SIDE: usize = 64;
    let ones = vec![1.0_f32; SIDE * SIDE];
    let mut out = vec![0.0_f32; SIDE * SIDE];
    let operand = MatRef::new(&ones, SIDE, SIDE);
    let out = MatMut::new(&mut out, SIDE, SIDE);
    gemm_inline(1.0, operand, operand, Write::Replace, out);
}

/// A piece of the output with its place.
struct Tile<'a, T> {
    batch: usize,
    row: usize,
    col: usize,
    out: MatMut<'a, T>,
}

fn tiles<T: Float>(batch: usize, c: MatMut<'_, T>) -> impl Iterator<Item = Tile<'_, T>> {
    c.row_blocks(TILE).enumerate().flat_map(move |(i, block)| {
        let (row, blocks) = (i * TILE, block.col_blocks(TILE).enumerate());
        blocks.map(move |(j, out)| Tile {
            batch,
            row,
            col: j * TILE,
            out,
        })
    })
}

fn tile_product<T: Float, W: Operand<T>>(
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    start: Start<'_, T>,
    mut tile: Tile<'_, T>,
) {
    let write = match start.columns(tile.col, tile.out.cols()) {
        Start::Zero => Write::Replace,
        Start::Output => Write::Add,
        Start::Row(row) => {
            (0..tile.out.rows()).for_each(|i| tile.out.row_mut(i).copy_from_slice(row));
            Write::Add
        }
    };
    let a = a.sub_rows(tile.row, tile.out.rows());
    W::with_wide(threads, b.sub_cols(tile.col, tile.out.cols()), |b| {
        if !a.has_contiguous_cols() || a.rows() == 1 {
            return gemm_inline(alpha, a, b, write, tile.out);
        }
        threads.with_scratch(REPACKED_STRIDE * a.cols(), |memory| {
            gemm_inline(alpha, repack(a, memory), b, write, tile.out);
        });
    });
}

/// Copies a left operand with contiguous columns to a stride that suits the cache. Columns that
/// begin a multiple of 4 KiB apart (weight gradients of a 1024 or 2048 wide layer) would halve the
/// speed.
fn repack<'a, T: Float>(a: MatRef<'_, T>, memory: &'a mut [T]) -> MatRef<'a, T> {
    let columns = a.transposed();
    for (column, out) in memory.chunks_exact_mut(REPACKED_STRIDE).enumerate() {
        out[..a.rows()].copy_from_slice(columns.row(column));
    }
    MatRef::with_row_stride(memory, a.cols(), a.rows(), REPACKED_STRIDE).transposed()
}

fn check_shapes<A: Copy, B: Copy, C: Float>(
    a: &MatRef<'_, A>,
    b: &MatRef<'_, B>,
    c: &MatMut<'_, C>,
) {
    assert!(
        a.cols() == b.rows() && c.rows() == a.rows() && c.cols() == b.cols(),
        "a product of [{}, {}] and [{}, {}] does not fit [{}, {}]",
        a.rows(),
        a.cols(),
        b.rows(),
        b.cols(),
        c.rows(),
        c.cols(),
    );
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        assert_close, noise, on_any_threads, product_of, to_f64, transposed,
    };
    use super::*;

    #[test]
    fn products_of_odd_shapes_in_every_layout_match_the_definition() {
        for (m, k, n) in [
            (1, 1, 1),
            (0, 128, 128),
            (128, 128, 0),
            (1, 300, 7),
            (5, 0, 3),
            (9, 1, 5),
            (3, 17, 1),
            (257, 33, 300),
            (513, 5, 2),
            (64, 64, 64),
            (9, 1030, 33),
            (601, 3, 65),
            (97, 75, 70),
            (130, 600, 290),
            (60, 530, 550),
            (1, 1030, 133),
            (3, 129, 300),
            (8, 500, 70),
        ] {
            let (a, b) = (noise::<f32>(1, m * k), noise::<f32>(2, k * n));
            let (at, bt) = (transposed(m, k, &a), transposed(k, n, &b));
            let expected = product_of((m, k, n), &to_f64(&a), &to_f64(&b));
            let twice_and_one: Vec<f64> = expected.iter().map(|x| 2.0 * x + 1.0).collect();
            for layout in 0..4 {
                let a = if layout & 1 == 0 {
                    MatRef::new(&a, m, k)
                } else {
                    MatRef::new(&at, k, m).transposed()
                };
                let b = if layout & 2 == 0 {
                    MatRef::new(&b, k, n)
                } else {
                    MatRef::new(&bt, n, k).transposed()
                };
                let c = on_any_threads(|threads| {
                    let mut c = vec![f32::NAN; m * n];
                    gemm(
                        threads,
                        1.0,
                        a,
                        b,
                        Write::Replace,
                        MatMut::new(&mut c, m, n),
                    );
                    c
                });
                assert_close(&c, &expected, 1e-4);
                let mut c = vec![1.0; m * n];
                let out = MatMut::new(&mut c, m, n);
                gemm(&Threads::one(), 2.0, a, b, Write::Add, out);
                assert_close(&c, &twice_and_one, 1e-4);
                let mut c = vec![f32::NAN; m * n];
                let out = MatMut::new(&mut c, m, n);
                gemm_bias(&Threads::one(), a, b, &vec![1.0; n], out);
                let and_one: Vec<f64> = expected.iter().map(|x| x + 1.0).collect();
                assert_close(&c, &and_one, 1e-4);
            }
        }
    }

    #[test]
    fn batches_read_and_write_strided_heads() {
        let (heads, rows, dim) = (3, 20, 8);
        let width = heads * dim;
        let x = noise::<f64>(3, rows * width);
        let head = |h: usize| MatRef::with_row_stride(&x[h * dim..], rows, dim, width);
        let scores = on_any_threads(|threads| {
            let mut out = vec![0.0; heads * rows * rows];
            let outputs = out
                .chunks_mut(rows * rows)
                .map(|out| MatMut::new(out, rows, rows))
                .collect();
            let keys = |h| head(h).transposed();
            gemm_batched(threads, 1.0, head, keys, Write::Replace, outputs);
            out
        });
        let expected: Vec<f64> = (0..heads * rows * rows)
            .map(|i| {
                let (h, r, c) = (i / rows / rows, i / rows % rows, i % rows);
                let at = |row: usize, d: usize| x[row * width + h * dim + d];
                (0..dim).map(|d| at(r, d) * at(c, d)).sum()
            })
            .collect();
        assert_close(&scores, &expected, 1e-12);
    }

    #[test]
    fn nan_and_infinity_reach_their_row_alone() {
        let mut a = vec![1.0_f32; 3 * 20];
        (a[5], a[25]) = (f32::NAN, f32::INFINITY);
        let b = vec![1.0_f32; 20 * 18];
        let mut c = vec![0.0; 3 * 18];
        let (a, b) = (MatRef::new(&a, 3, 20), MatRef::new(&b, 20, 18));
        let out = MatMut::new(&mut c, 3, 18);
        gemm(&Threads::one(), 1.0, a, b, Write::Replace, out);
        assert!(c[..18].iter().all(|x| x.is_nan()));
        assert!(c[18..36].iter().all(|&x| x == f32::INFINITY));
        assert!(c[36..].iter().all(|&x| x == 20.0));
    }
}
