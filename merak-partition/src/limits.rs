//! What the time of something can be.

/// The largest cost: sums over all segments and microbatches stay finite.
pub(crate) const MAX_COST: f64 = 1e100;

/// Whether a number can be the time of something.
pub(crate) fn is_cost(found: f64) -> bool {
    (0.0..=MAX_COST).contains(&found)
}
