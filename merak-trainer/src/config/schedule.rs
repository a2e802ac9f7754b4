//! The choice of the pipeline's schedule.

use std::fmt;

use merak_pipe::ScheduleKind;

/// What orders the work of a step on each rank of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainSchedule {
    /// A schedule with a name.
    Named(ScheduleKind),
    /// A schedule that is searched for the costs of the model's stages.
    Auto,
}

impl TrainSchedule {
    /// Every choice.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let kinds = ScheduleKind::ALL.into_iter();
        let training = kinds.filter(|kind| kind.is_training());
        training.map(Self::Named).chain([Self::Auto])
    }

    /// The name that configurations use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Named(kind) => kind.as_str(),
            Self::Auto => "auto",
        }
    }

    /// The schedule with this name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        if name == Self::Auto.as_str() {
            return Some(Self::Auto);
        }
        let kind: ScheduleKind = name.parse().ok()?;
        kind.is_training().then_some(Self::Named(kind))
    }

    /// The stages per rank that it prescribes.
    pub fn fixed_chunks(self) -> Option<usize> {
        match self {
            Self::Named(kind) => kind.fixed_chunks(),
            Self::Auto => None,
        }
    }
}

impl fmt::Display for TrainSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
