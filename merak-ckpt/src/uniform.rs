//! Random numbers that are a function of where they are used.

use merak_mpu::philox::{block, halves};

/// A number in `[0, 1)`, evenly spread, for the token at `position` of a prompt: 53 bits of
/// Philox under the key `seed` at the counter (`position`, `prompt`).
pub(crate) fn uniform(seed: u64, prompt: u64, position: u64) -> f64 {
    let ([a, b], [c, d]) = (halves(position), halves(prompt));
    let [first, second, ..] = block(halves(seed), [a, b, c, d]);
    let bits = u64::from(second) << 32 | u64::from(first);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_lie_in_the_unit_interval_and_depend_on_all_three_numbers() {
        let draws: Vec<f64> = (0..1000)
            .map(|i| uniform(i % 10, i / 10 % 10, i / 100))
            .collect();
        assert!(draws.iter().all(|draw| (0.0..1.0).contains(draw)));
        let mut sorted = draws.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.dedup();
        assert_eq!(sorted.len(), draws.len());
        let mean = draws.iter().sum::<f64>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.05, "{mean}");
    }
}
