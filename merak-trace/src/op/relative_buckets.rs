//! Buckets of relative positions.

use serde::{Deserialize, Serialize};

/// Buckets of relative positions: small distances have one each, larger ones share them by their
/// logarithm ([Raffel et al. 2019](https://arxiv.org/abs/1910.10683), section 2.1). The last query
/// stands at the last key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelativeBuckets {
    /// Queries.
    pub q_len: usize,
    /// Keys.
    pub k_len: usize,
    /// Number of buckets.
    pub buckets: usize,
    /// Distances from here on share the last bucket.
    pub max_distance: usize,
    /// Whether keys after the query have buckets of their own, half of them all; otherwise they
    /// share bucket 0.
    pub bidirectional: bool,
}

impl RelativeBuckets {
    /// Buckets of one direction, half of which are for single distances.
    fn of_direction(&self) -> usize {
        self.buckets / if self.bidirectional { 2 } else { 1 }
    }

    /// Whether there are buckets for single and for shared distances.
    pub fn is_valid(&self) -> bool {
        self.of_direction() >= 2 && self.max_distance > self.of_direction() / 2
    }

    /// The bucket of each query and key: `[q_len, k_len]`.
    pub fn indices(&self) -> Vec<i64> {
        let mut indices = vec![0; self.q_len * self.k_len];
        self.write_indices(&mut indices);
        indices
    }

    /// Writes the same to `indices`, `q_len * k_len` elements.
    pub(crate) fn write_indices(&self, indices: &mut [i64]) {
        // A row of all distances; each query copies its part.
        let last = self.k_len.saturating_sub(1);
        let row: Vec<_> = (0..self.q_len + self.k_len)
            .map(|key| self.bucket(key, last))
            .collect();
        let queries = indices.chunks_exact_mut(self.k_len.max(1));
        for (query, indices) in queries.enumerate() {
            let start = self.q_len - 1 - query;
            indices.copy_from_slice(&row[start..start + self.k_len]);
        }
    }

    /// The bucket of a key at `key` for a query at `query`.
    fn bucket(&self, key: usize, query: usize) -> i64 {
        let of_direction = self.of_direction();
        let (start, distance) = match key.checked_sub(query) {
            Some(ahead) if ahead > 0 && self.bidirectional => (of_direction, ahead),
            Some(_) => (0, 0),
            None => (0, query - key),
        };
        let exact = of_direction / 2;
        let within = if distance < exact {
            distance
        } else {
            // In f32, so that borders fall where PyTorch has them.
            let ratio = (distance as f32 / exact as f32).ln()
                / (self.max_distance as f64 / exact as f64).ln() as f32;
            let shared = (ratio * (of_direction - exact) as f32) as usize;
            (exact + shared).min(of_direction - 1)
        };
        i64::try_from(start + within).expect("a bucket fits an i64")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The buckets of the keys up to `reach` before and after a query.
    fn around(buckets: usize, max_distance: usize, bidirectional: bool, reach: usize) -> Vec<i64> {
        // The first query stands in the middle of the keys.
        let spec = RelativeBuckets {
            q_len: reach + 1,
            k_len: 2 * reach + 1,
            buckets,
            max_distance,
            bidirectional,
        };
        assert!(spec.is_valid());
        let mut indices = spec.indices();
        indices.truncate(spec.k_len);
        indices
    }

    #[test]
    fn near_keys_have_buckets_of_their_own_and_far_ones_share() {
        // The results of T5Attention._relative_position_bucket in transformers 5.23.
        assert_eq!(
            around(8, 6, true, 8),
            [3, 3, 3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7, 7, 7]
        );
        let behind = [7; 11]
            .into_iter()
            .chain([6; 5])
            .chain([5; 3])
            .chain([4; 2]);
        let expected: Vec<_> = behind.chain([3, 2, 1]).chain([0; 25]).collect();
        assert_eq!(around(8, 20, false, 24), expected);
        // Distances at which the usual buckets change, powers of two among them.
        let borders = |bidirectional, side: fn(&i64) -> bool| -> Vec<i64> {
            let found = around(32, 128, bidirectional, 200);
            let changes = (1..401).filter(|&i| found[i] != found[i - 1]);
            changes
                .map(|i| i64::try_from(i).unwrap() - 200)
                .filter(side)
                .collect()
        };
        assert_eq!(borders(true, |&d| d > 7), [8, 12, 16, 23, 32, 46, 64, 91]);
        assert_eq!(
            borders(false, |&d| d < -15),
            [
                -112, -98, -86, -76, -66, -58, -51, -45, -39, -34, -30, -26, -23, -20, -18
            ]
        );
    }
}
