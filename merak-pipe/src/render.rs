//! Schedules and timelines as text and pictures.

mod colour;
mod grid;
mod html;
mod json;
mod rows;
mod svg;
mod trace;

pub use grid::{GridStyle, grid};
pub use html::{PageOptions, html};
pub use json::{json, json_with_bytes};
pub use rows::timelines;
pub use svg::svg;
pub use trace::trace;
