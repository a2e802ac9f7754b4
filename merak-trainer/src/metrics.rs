//! What a run reports: records on disk, progress on the screen.

mod file;
mod memory;
mod progress;
mod reporter;
mod screen;
mod times;

pub use self::{
    file::{MetricsFile, StepMetrics},
    memory::{peak_resident_bytes, resident_bytes},
    progress::Progress,
    reporter::Reporter,
    screen::{EvaluationProgress, Screen},
    times::{Readable, StepTimes},
};
pub use crate::{folder::METRICS_FILE, trainer::EvaluationMetrics};
