//! The costs that the crate works with.

/// The largest cost: sums over the largest schedule stay finite and exact to a few digits.
pub(crate) const MAX_COST: f64 = 1e15;

/// The smallest number of cores: times stay finite, and exact to a few digits.
pub(crate) const LEAST_CORES: f64 = 1e-6;
