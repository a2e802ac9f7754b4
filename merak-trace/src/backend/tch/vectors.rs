//! Products of bf16 by this crate's kernels for AVX-512-BF16.
//!
//! They take the place of MKL's where a processor has these instructions and no matrix units
//! (AMX): on processors of other makers than Intel, MKL computes such products without either.

use super::{
    Tch, shim,
    storage::{elements, elements_mut},
};
use crate::{
    Result,
    kernels::{MatMut, MatRef, Start, Vectors},
};
use half::bf16;
use tch::Tensor;

/// Fewest rows or columns of a thread's part of a product.
const LEAST: usize = 64;

impl Tch {
    /// Adds `a^T b` to `sum [M, N]` of f32, for `a [K, M]` and `b [K, N]` of bf16, all without gaps
    /// in host memory; false where no kernel of this crate pays.
    pub(super) fn add_on_vectors(
        &self,
        node: &str,
        a: &Tensor,
        b: &Tensor,
        sum: &mut Tensor,
    ) -> Result<bool> {
        let ([k, m], [_, n]) = (sides(a), sides(b));
        let Some(vectors) = self.vectors.filter(|_| Vectors::pays([m, k, n])) else {
            return Ok(false);
        };
        let a = MatRef::new(elements::<bf16>(a), k, m).transposed();
        let b = MatRef::new(elements::<bf16>(b), k, n);
        let sum = MatMut::new(elements_mut::<f32>(sum), m, n);
        self.add(node, vectors, (a, b), sum)?;
        Ok(true)
    }

    /// Computes `c += a b`, each of libtorch's threads a part of the longer side of `c`. Each
    /// element is the same sum, however many parts there are.
    fn add(
        &self,
        node: &str,
        vectors: Vectors,
        (a, b): (MatRef<'_, bf16>, MatRef<'_, bf16>),
        c: MatMut<'_, f32>,
    ) -> Result<()> {
        let alone = self.threads.alone();
        let is_high = c.rows() > c.cols();
        let side = c.rows().max(c.cols());
        let len = side.div_ceil(self.num_threads).max(LEAST);
        let parts: Vec<_> = if is_high {
            c.row_blocks(len).collect()
        } else {
            c.col_blocks(len).collect()
        };
        shim::for_each_item(node, parts, &|i, part| {
            let operands = if is_high {
                (a.sub_rows(i * len, part.rows()), b)
            } else {
                (a, b.sub_cols(i * len, part.cols()))
            };
            vectors.product(&alone, operands, Start::Output, part);
        })
    }
}

/// The sides of a matrix.
fn sides(x: &Tensor) -> [usize; 2] {
    let size = x.size();
    [size[0], size[1]].map(|side| usize::try_from(side).expect("a size is not negative"))
}
