//! What a run reports: records on disk, progress on the screen.

mod file;
mod memory;
mod progress;
mod reporter;
mod screen;
mod times;

pub(crate) use self::file::METRICS_DRAFT;
pub use self::{
    file::{EvaluationMetrics, METRICS_FILE, MetricsFile, StepMetrics},
    memory::{peak_resident_bytes, resident_bytes},
    progress::Progress,
    reporter::Reporter,
    screen::{EvaluationProgress, Screen},
    times::{Readable, StepTimes},
};
