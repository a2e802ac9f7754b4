//! Products of factors that are bf16 both, for backends whose values are.

use half::bf16;

use super::super::{MatMut, MatRef, Threads, Units};
use super::Start;
#[cfg(target_arch = "x86_64")]
use super::{blocked, dots, pairs::Pairs};

/// Shows that this processor multiplies pairs of bf16 (AVX-512-BF16) and has no matrix units.
#[derive(Debug, Clone, Copy)]
pub struct Vectors {
    #[cfg(target_arch = "x86_64")]
    simd: Pairs,
}

impl Vectors {
    /// Those of this processor, if it has them and nothing faster.
    pub fn of_processor() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        let found = Pairs::try_new().map(|simd| Self { simd });
        #[cfg(not(target_arch = "x86_64"))]
        let found = None;
        found.filter(|_| Units::of_processor() == Units::Vector)
    }

    /// Whether a product of these sizes pays for the packing of its factors.
    #[cfg(target_arch = "x86_64")]
    pub fn pays([m, k, n]: [usize; 3]) -> bool {
        blocked::pays(m, k, n)
    }

    /// None does: there is no such processor.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn pays(_: [usize; 3]) -> bool {
        false
    }

    /// Computes `c = a b + start` with sums of `f32`.
    ///
    /// # Panics
    /// If the shapes do not fit each other.
    pub fn product(
        self,
        threads: &Threads,
        (a, b): (MatRef<'_, bf16>, MatRef<'_, bf16>),
        start: Start<'_, f32>,
        c: MatMut<'_, f32>,
    ) {
        super::check_shapes(&a, &b, &c);
        #[cfg(target_arch = "x86_64")]
        dots::product(self.simd, threads, 1.0, (a, b), start, c);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (threads, start);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{assert_close, noise, on_any_threads, transposed};
    use super::*;

    #[test]
    fn products_of_bf16_in_both_layouts_are_added_up_in_f32() {
        let Some(vectors) = Vectors::of_processor() else {
            return eprintln!("skipped: no AVX-512-BF16, or AMX beside it");
        };
        for (m, k, n) in [(48, 32, 32), (113, 2050, 33), (260, 75, 300), (7, 3, 5)] {
            let numbers = |seed, len| -> Vec<bf16> {
                let wide = noise::<f32>(seed, len).into_iter();
                wide.map(bf16::from_f32).collect()
            };
            let (a, b) = (numbers(1, m * k), numbers(2, k * n));
            let turned = transposed(m, k, &a);
            let product = |a: usize, b: &dyn Fn(usize) -> f64| -> f64 {
                (0..k)
                    .map(|p| f64::from(turned[p * m + a].to_f32()) * b(p))
                    .sum()
            };
            let expected: Vec<f64> = (0..m * n)
                .map(|i| 1.0 + product(i / n, &|p| f64::from(b[p * n + i % n].to_f32())))
                .collect();
            let rows = MatRef::new(&a, m, k);
            for a in [rows, MatRef::new(&turned, k, m).transposed()] {
                let found = on_any_threads(|threads| {
                    let mut c = vec![1.0; m * n];
                    let out = MatMut::new(&mut c, m, n);
                    vectors.product(threads, (a, MatRef::new(&b, k, n)), Start::Output, out);
                    c
                });
                assert_close(&found, &expected, 1e-4);
            }
        }
    }
}
