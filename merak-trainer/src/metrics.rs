//! What a run reports: records on disk, progress on the screen.

mod file;
mod progress;
mod times;

pub use self::{
    file::{EvaluationMetrics, MetricsFile, StepMetrics},
    progress::Progress,
    times::{Readable, StepTimes},
};
