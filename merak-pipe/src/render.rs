//! Schedules and timelines as text.

mod grid;
mod json;

pub use grid::{GridStyle, grid};
pub use json::json;
