//! The colours of pictures and pages.

use crate::Kind;

/// Text on a bar, in the light and in the dark.
pub(super) const INK: &str = "#212529";
/// The outline of the critical path.
pub(super) const CRITICAL: &str = "#c92a2a";
/// The entries of a legend, in their order.
pub(super) const LEGEND: [(Kind, &str); 5] = [
    (Kind::Forward, "F forward"),
    (Kind::Backward, "B backward"),
    (Kind::InputGrad, "I input gradient"),
    (Kind::WeightGrad, "W weight gradients"),
    (Kind::Recompute, "R recompute"),
];

/// Red, green and blue of a kind.
pub(super) const fn colour(kind: Kind) -> [u8; 3] {
    match kind {
        Kind::Forward => [0x74, 0xc0, 0xfc],
        Kind::Recompute => [0xff, 0xd4, 0x3b],
        Kind::Backward => [0x69, 0xdb, 0x7c],
        Kind::InputGrad => [0xc0, 0xeb, 0x75],
        Kind::WeightGrad => [0xd0, 0xa9, 0xf5],
    }
}

/// The colour of a kind on the stage of a rank that is its `chunk`-th of `chunks`: paler from stage
/// to stage, so that text stays readable on each.
pub(super) fn fill(kind: Kind, chunk: usize, chunks: usize) -> String {
    let share = chunk as f64 / chunks.saturating_sub(1).max(1) as f64;
    let paler = |value: u8| {
        let value = f64::from(value);
        (value + (255.0 - value) * 0.6 * share).round() as u8
    };
    let [red, green, blue] = colour(kind).map(paler);
    format!("#{red:02x}{green:02x}{blue:02x}")
}
