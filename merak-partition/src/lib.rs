//! Cuts a traced model into segments and balances them over pipeline stages, with a report of why.

mod borders;
mod error;
mod method;
mod partition;
mod segment;
mod stages;

pub use error::{Error, Result};
pub use method::{SplitMethod, StageMethod};
pub use partition::{Partition, recompute_plan};
pub use segment::{SegmentOptions, Segments, SplitRule, segment};
pub use stages::stages;
