//! The kernels of the default backend as the products of Muon's matrices.

use merak_trace::{Factor, Threads, multiply};
use merak_zero::{Matrix, MatrixProducts};

/// Products on a rank's threads.
#[derive(Debug)]
pub(super) struct KernelProducts(pub(super) Threads);

impl MatrixProducts for KernelProducts {
    fn multiply(&self, a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32]) {
        let ([rows, inner], [_, cols]) = (a.sides, b.sides);
        let [a, b] = [a, b].map(|matrix| Factor {
            values: matrix.values,
            is_transposed: matrix.is_transposed,
        });
        multiply(&self.0, [rows, inner, cols], a, b, out);
    }
}
