//! The registry of schedules by name.

use crate::{Error, Result, Schedule, Size, UnitCosts, generate};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The schedules that this crate generates, under the names that users write.
///
/// Step times are for `F = 1`, `B = 2`, a recompute of 1 on every stage and free communication,
/// where the ideal is `4M`; `P` ranks, `M` microbatches.
///
/// | schedule | step time | peak live microbatches on stage `s` | needs |
/// |---|---|---|---|
/// | `gpipe` | `4(M+P-1)` | `M` | |
/// | `1f1b`, `ds_default` | `4(M+P-1)` | `min(P-s, M)` | |
/// | `pre_recompute_1f1b` | `4(M+P-1) - (P-1)` | `P-s` | `M >= P` |
/// | `last_no_recompute_1f1b` | `4(M+P-1) - (P+1)` | `P-s` | `M >= max(P, 3)` |
/// | `shifted_critical_path` | `4(M+P-1) - (P+2)` | `P-s`, 3 on stage `P-2` | `M >= max(P, 4)` |
///
/// On one rank nothing can be hidden, and the order is that of `1f1b` for any `M`: `4M`, or `3M`
/// under `last_no_recompute_1f1b` and `shifted_critical_path`, whose last stage never recomputes.
///
/// For the others, extra time over the ideal `3M` with `F = I = W = 1` on a whole rank, `M >= 2P`
/// and free communication; `v` chunks per rank. Memory is in microbatches of a whole rank.
///
/// | schedule | extra time | peak live microbatches | chunks |
/// |---|---|---|---|
/// | `interleaved_1f1b` | `3(P-1)/v` | `P + (P-1)/v` on the first rank | any |
/// | `zb_h1` | `P-1` | `P` | 1 |
/// | `zb_h2` | `P-1`, no rank waits | `2P-1` | 1 |
/// | `zb_v` | `(P-1)/2`, no rank waits | `P` | 2 |
/// | `v_half` | at most `1.5(P-1)` | `(P+2)/2` | 2 |
/// | `v_min` | `2(P-1) - 1/2` | `(P+4)/3`, rounded up to a chunk | 2 |
/// | `dualpipe_v` | `(P-1)/2`, less where [pairs](crate::Pair) save time | `P + 1/2` | 2 |
///
/// Where `P` does not divide `M`, `interleaved_1f1b` runs a smaller last round, which waits for its
/// way around the ranks: with two chunks that takes `P - M mod P` more. Megatron-LM refuses such
/// sizes.
///
/// ```
/// use merak_pipe::ScheduleKind;
/// assert_eq!("1f1b".parse::<ScheduleKind>()?, ScheduleKind::OneFOneB);
/// let error = "1fb1".parse::<ScheduleKind>().unwrap_err();
/// assert!(error.to_string().starts_with("unknown schedule \"1fb1\" (one of gpipe, 1f1b, "));
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
#[non_exhaustive]
pub enum ScheduleKind {
    /// `gpipe`: all forwards, then all backwards.
    Gpipe,
    /// `1f1b`: one forward, one backward.
    OneFOneB,
    /// `ds_default`: the computation of `1f1b`, with sends and receives kept apart.
    DsDefault,
    /// `pre_recompute_1f1b`: `1f1b` that recomputes while it waits for gradients in the cooldown.
    PreRecompute,
    /// `last_no_recompute_1f1b`: besides, the last stage keeps its activations.
    LastNoRecompute,
    /// `shifted_critical_path`: besides, the last stage but one runs three forwards first.
    ShiftedCriticalPath,
    /// `interleaved_1f1b`: `1f1b` over several chunks of the model per rank.
    Interleaved,
    /// `zb_h1`: split backwards; the memory of `1f1b`.
    ZbH1,
    /// `zb_h2`: split backwards, with enough forwards ahead that no rank waits.
    ZbH2,
    /// `zb_v`: two stages per rank in a V; the memory of `1f1b`, and no rank waits.
    ZbV,
    /// `v_half`: two stages per rank in a V; half the memory.
    VHalf,
    /// `v_min`: two stages per rank in a V; a third of the memory.
    VMin,
    /// `dualpipe_v`: two stages per rank in a V, a forward of one beside a backward of the other.
    DualPipeV,
    /// `inference`: forwards alone.
    Inference,
}

impl ScheduleKind {
    /// Every schedule, simplest first.
    pub const ALL: [Self; 14] = [
        Self::Gpipe,
        Self::OneFOneB,
        Self::DsDefault,
        Self::PreRecompute,
        Self::LastNoRecompute,
        Self::ShiftedCriticalPath,
        Self::Interleaved,
        Self::ZbH1,
        Self::ZbH2,
        Self::ZbV,
        Self::VHalf,
        Self::VMin,
        Self::DualPipeV,
        Self::Inference,
    ];

    /// Other names that users may write.
    const ALIASES: [(&'static str, Self); 1] =
        [("full_critical_path_1f1b", Self::ShiftedCriticalPath)];

    /// The name that users write.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gpipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::DsDefault => "ds_default",
            Self::PreRecompute => "pre_recompute_1f1b",
            Self::LastNoRecompute => "last_no_recompute_1f1b",
            Self::ShiftedCriticalPath => "shifted_critical_path",
            Self::Interleaved => "interleaved_1f1b",
            Self::ZbH1 => "zb_h1",
            Self::ZbH2 => "zb_h2",
            Self::ZbV => "zb_v",
            Self::VHalf => "v_half",
            Self::VMin => "v_min",
            Self::DualPipeV => "dualpipe_v",
            Self::Inference => "inference",
        }
    }

    /// Whether the schedule has backward passes.
    pub const fn is_training(self) -> bool {
        !matches!(self, Self::Inference)
    }

    /// Generates the schedule; the result passes [`Schedule::validate`].
    ///
    /// # Errors
    /// When a count is zero or the schedule needs more microbatches or fewer chunks.
    pub fn generate(self, size: Size) -> Result<Schedule> {
        size.check()?;
        if let Some(expected) = self.fixed_chunks().filter(|chunks| *chunks != size.chunks) {
            return Err(Error::Chunks {
                name: self.as_str(),
                expected,
                found: size.chunks,
            });
        }
        self.check_microbatches(size)?;
        Ok(match self {
            Self::Gpipe => generate::gpipe(size),
            Self::OneFOneB => generate::one_f_one_b(size),
            Self::DsDefault => generate::ds_default(size),
            Self::PreRecompute => generate::pre_recompute(size),
            Self::LastNoRecompute => generate::last_no_recompute(size),
            Self::ShiftedCriticalPath => generate::shifted_critical_path(size),
            Self::Interleaved => generate::interleaved(size),
            Self::ZbH1 => generate::zb_h1(size),
            Self::ZbH2 => generate::zb_h2(size),
            Self::ZbV => generate::zb_v(size),
            Self::VHalf => generate::v_half(size),
            Self::VMin => generate::v_min(size),
            Self::DualPipeV => generate::dualpipe_v(size),
            Self::Inference => generate::inference(size, &(0..size.ranks).collect::<Vec<_>>()),
        })
    }

    /// The number of stages that each rank must run: two for the V shapes, one for most others, and
    /// any number (`None`) for `interleaved_1f1b`.
    pub const fn fixed_chunks(self) -> Option<usize> {
        match self {
            Self::Interleaved => None,
            Self::ZbV | Self::VHalf | Self::VMin | Self::DualPipeV => Some(2),
            _ => Some(1),
        }
    }

    /// The default number of stages per rank: two for the V shapes and `interleaved_1f1b`, one for
    /// the others.
    pub const fn default_chunks(self) -> usize {
        match self.fixed_chunks() {
            Some(chunks) => chunks,
            None => 2,
        }
    }

    /// The default costs: those of [`UnitCosts::default`], with a recompute of 1 for the schedules
    /// that are made for recomputation, from `gpipe` to `shifted_critical_path`, and 0 for the
    /// others.
    pub fn default_costs(self) -> UnitCosts {
        let recomputes = matches!(
            self,
            Self::Gpipe
                | Self::OneFOneB
                | Self::DsDefault
                | Self::PreRecompute
                | Self::LastNoRecompute
                | Self::ShiftedCriticalPath
        );
        UnitCosts {
            recompute: f64::from(u8::from(recomputes)),
            ..UnitCosts::default()
        }
    }

    /// The smallest number of microbatches that the schedule takes on `ranks` ranks.
    pub fn min_microbatches(self, ranks: usize) -> usize {
        if ranks == 1 {
            return 1;
        }
        match self {
            Self::PreRecompute => ranks,
            Self::LastNoRecompute => ranks.max(3),
            Self::ShiftedCriticalPath => ranks.max(4),
            _ => 1,
        }
    }

    fn check_microbatches(self, size: Size) -> Result<()> {
        let needed = self.min_microbatches(size.ranks);
        if size.microbatches >= needed {
            return Ok(());
        }
        let ranks = size.ranks;
        Err(Error::TooFewMicrobatches {
            name: self.as_str(),
            needed,
            why: match self {
                Self::LastNoRecompute => format!("max of pp {ranks} and 3"),
                Self::ShiftedCriticalPath => format!("max of pp {ranks} and 4"),
                _ => format!("pp {ranks}"),
            },
            found: size.microbatches,
        })
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for ScheduleKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let names = Self::ALL.map(|kind| (kind.as_str(), kind));
        let mut names = names.into_iter().chain(Self::ALIASES);
        let found = names.find(|(known, _)| *known == name);
        found
            .map(|(_, kind)| kind)
            .ok_or_else(|| Error::UnknownSchedule {
                name: name.into(),
                known: Self::ALL.map(Self::as_str).join(", "),
            })
    }
}

impl TryFrom<String> for ScheduleKind {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl From<ScheduleKind> for &'static str {
    fn from(kind: ScheduleKind) -> Self {
        kind.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_finds_its_schedule() {
        for kind in ScheduleKind::ALL {
            assert_eq!(kind.as_str().parse::<ScheduleKind>().unwrap(), kind);
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(serde_json::from_str::<ScheduleKind>(&json).unwrap(), kind);
        }
        let alias = "full_critical_path_1f1b".parse::<ScheduleKind>().unwrap();
        assert_eq!(alias, ScheduleKind::ShiftedCriticalPath);
    }

    #[test]
    fn recomputes_cost_something_only_where_schedules_are_made_for_them() {
        let recomputes = ScheduleKind::ALL.map(|kind| kind.default_costs().recompute > 0.0);
        assert_eq!(
            recomputes,
            [
                true, true, true, true, true, true, false, false, false, false, false, false,
                false, false
            ]
        );
        assert_eq!(ScheduleKind::Interleaved.default_chunks(), 2);
        assert_eq!(ScheduleKind::Gpipe.default_chunks(), 1);
    }

    #[test]
    fn errors_say_what_would_do() {
        let unknown = "shifted_critcal_path".parse::<ScheduleKind>().unwrap_err();
        insta::assert_snapshot!(unknown, @r#"unknown schedule "shifted_critcal_path" (one of gpipe, 1f1b, ds_default, pre_recompute_1f1b, last_no_recompute_1f1b, shifted_critical_path, interleaved_1f1b, zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v, inference)"#);
        let few = ScheduleKind::ShiftedCriticalPath
            .generate(Size::new(2, 3))
            .unwrap_err();
        insta::assert_snapshot!(few, @"shifted_critical_path needs at least 4 microbatches (max of pp 2 and 4), found 3");
        let few = ScheduleKind::PreRecompute
            .generate(Size::new(4, 3))
            .unwrap_err();
        insta::assert_snapshot!(few, @"pre_recompute_1f1b needs at least 4 microbatches (pp 4), found 3");
        let chunks = ScheduleKind::OneFOneB
            .generate(Size::new(4, 8).with_chunks(2))
            .unwrap_err();
        insta::assert_snapshot!(chunks, @"1f1b runs 1 chunk per rank, found 2");
        let none = ScheduleKind::Gpipe.generate(Size::new(4, 0)).unwrap_err();
        insta::assert_snapshot!(none, @"a schedule has 1 to 16777216 microbatches, found 0");
    }
}
