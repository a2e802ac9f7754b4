//! Pipeline schedules as data: generate, validate, simulate, draw and run them.

mod action;
mod engine;
mod error;
mod generate;
mod kind;
mod schedule;
mod timeline;

pub use action::{Action, Kind, MicrobatchId, StageId, Tag};
pub use engine::{Engine, Link, StageModule, ThreadLink, run, run_threads, threads};
pub use error::{BoxError, Error, Result, Violation};
pub use kind::ScheduleKind;
pub use schedule::{Exchanges, Schedule, Size};
pub use timeline::{Span, Timeline};
