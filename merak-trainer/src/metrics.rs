//! What a run reports: records on disk, progress on the screen.

mod file;
mod memory;
mod page;
mod peak;
mod progress;
mod reporter;
mod screen;
mod tensorboard;
mod times;
mod tokenizing;

pub use self::{
    file::{MetricsFile, StepMetrics},
    memory::{peak_device_bytes, peak_resident_bytes, resident_bytes},
    page::{Page, Ran},
    peak::{Flops, Peak, Percent, Rates},
    progress::Progress,
    reporter::Reporter,
    screen::{EvaluationProgress, Screen},
    tensorboard::EventFile,
    times::{Readable, StepTimes, median},
    tokenizing::TokenizingProgress,
};
pub use crate::{folder::METRICS_FILE, trainer::EvaluationMetrics};
