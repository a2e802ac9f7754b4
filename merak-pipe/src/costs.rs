//! What actions and messages cost.

use crate::{
    Action, Error, Figure, Kind, Result, Schedule, Size, Span, Timeline, limits::MAX_COST,
};
use serde::{Serialize, Serializer, ser::SerializeMap};
use std::{collections::BTreeSet, fmt, str::FromStr};

/// Costs that are the same on every stage, in any unit of time.
///
/// ```
/// let costs: merak_pipe::UnitCosts = "F=1,W=0.5".parse()?;
/// assert_eq!((costs.forward, costs.weight_grad, costs.input_grad), (1.0, 0.5, 1.0));
/// assert!("F=1,X=2".parse::<merak_pipe::UnitCosts>().is_err());
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnitCosts {
    /// `F`: a forward.
    pub forward: f64,
    /// `I`: an input gradient.
    pub input_grad: f64,
    /// `W`: the weight gradients.
    pub weight_grad: f64,
    /// `R`: a recompute, on its own or within a backward.
    pub recompute: f64,
    /// `C`: a message between two ranks.
    pub hop: f64,
    /// `O`: the time of a forward and a backward that run at once, as a share of the sum of their
    /// times.
    pub overlap: f64,
}

impl Default for UnitCosts {
    /// One for every kind of computation, free communication, and no gain from actions that run at
    /// once.
    fn default() -> Self {
        Self {
            forward: 1.0,
            input_grad: 1.0,
            weight_grad: 1.0,
            recompute: 1.0,
            hop: 0.0,
            overlap: 1.0,
        }
    }
}

impl FromStr for UnitCosts {
    type Err = Error;

    /// Reads `F=1,I=1,W=1,R=1,C=0,O=1`; what is not named keeps its default.
    fn from_str(text: &str) -> Result<Self> {
        Self::default().with(text)
    }
}

impl UnitCosts {
    /// These costs, with the values of a text such as `F=1,W=0.5` in place of theirs.
    ///
    /// # Errors
    /// When the text has another form, names a cost twice or gives an illegal value.
    pub fn with(self, text: &str) -> Result<Self> {
        let mut costs = self;
        let mut seen = BTreeSet::new();
        for entry in text.split(',') {
            let error = || Error::ParseCosts {
                found: entry.into(),
            };
            let (key, value) = entry.split_once('=').ok_or_else(error)?;
            let value: f64 = value.trim().parse().map_err(|_| error())?;
            let (letter, place) = match key.trim() {
                "F" => ('F', &mut costs.forward),
                "I" => ('I', &mut costs.input_grad),
                "W" => ('W', &mut costs.weight_grad),
                "R" => ('R', &mut costs.recompute),
                "C" => ('C', &mut costs.hop),
                "O" => ('O', &mut costs.overlap),
                _ => return Err(error()),
            };
            check(letter, value)?;
            if !seen.insert(letter) {
                return Err(Error::CostTwice { key: letter });
            }
            *place = value;
        }
        Ok(costs)
    }
}

/// Costs by stage and by hop, in any unit of time.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// For each stage its forward, `F`.
    pub forward: Vec<f64>,
    /// For each stage its input gradient, `I`.
    pub input_grad: Vec<f64>,
    /// For each stage its weight gradients, `W`.
    pub weight_grad: Vec<f64>,
    /// For each stage its recompute, `R`; zero where it keeps all activations.
    pub recompute: Vec<f64>,
    /// For each hop between stages `s` and `s + 1` the time of a message, either way: latency plus
    /// size over bandwidth. A hop within a rank is free.
    pub hop: Vec<f64>,
    /// The time of a forward and a backward that run at once, as a share of the sum of their times,
    /// `O`. With 1 they run one after the other; with less they begin when both messages have come,
    /// and end together.
    pub overlap: f64,
}

impl Costs {
    /// The same costs on all `stages` and hops.
    pub fn uniform(costs: UnitCosts, stages: usize) -> Self {
        Self {
            forward: vec![costs.forward; stages],
            input_grad: vec![costs.input_grad; stages],
            weight_grad: vec![costs.weight_grad; stages],
            recompute: vec![costs.recompute; stages],
            hop: vec![costs.hop; stages.saturating_sub(1)],
            overlap: costs.overlap,
        }
    }

    /// Costs from a timeline: the mean time of each kind on each stage, and free hops.
    ///
    /// On a stage with full backwards, all of their time counts as `I`; where some of them follow
    /// an `R`, only those count. Of actions that ran at once only the sum counts, towards the
    /// overlap.
    ///
    /// # Errors
    /// When an action does not fit the schedule's size.
    ///
    /// ```
    /// use merak_pipe::{Costs, ScheduleKind, Size, simulate};
    /// let schedule = ScheduleKind::ZbV.generate(Size::new(2, 4).with_chunks(2))?;
    /// let costs = Costs::uniform("F=1,I=1.5,W=0.5,R=0".parse()?, 4);
    /// let played = simulate(&schedule, &costs)?;
    /// assert_eq!(Costs::measured(&schedule, &played.timeline)?, costs);
    /// # Ok::<(), merak_pipe::Error>(())
    /// ```
    pub fn measured(schedule: &Schedule, timeline: &Timeline) -> Result<Self> {
        let stages = schedule.placement()?.len();
        let groups: Vec<_> = timeline.groups().collect();
        let means = Means::of(schedule, stages, &groups)?;
        let of = |kind| (0..stages).map(|stage| means.mean(stage, kind)).collect();
        let input_grad = |stage| {
            let kind = if means.has(stage, Kind::InputGrad) {
                Kind::InputGrad
            } else {
                Kind::Backward
            };
            means.mean(stage, kind)
        };
        Ok(Self {
            forward: of(Kind::Forward),
            input_grad: (0..stages).map(input_grad).collect(),
            weight_grad: of(Kind::WeightGrad),
            recompute: of(Kind::Recompute),
            hop: vec![0.0; stages - 1],
            overlap: means.overlap(&groups),
        })
    }

    /// Reads `F=1:2:1,I=1,W=0.5,C=0` for `stages` stages: one number for all stages, or a list with
    /// colons, with one number for each stage and for `C` one for each hop. Costs that are not
    /// named keep their defaults.
    ///
    /// # Errors
    /// When the text has another form, names a cost twice, gives an illegal value, or has a list of
    /// another length.
    ///
    /// ```
    /// use merak_pipe::{Costs, UnitCosts};
    /// let costs = Costs::parse("F=1:1:2,W=0.5", UnitCosts::default(), 3)?;
    /// assert_eq!((costs.forward, costs.weight_grad), (vec![1.0, 1.0, 2.0], vec![0.5; 3]));
    /// assert!(Costs::parse("F=1:1", UnitCosts::default(), 3).is_err());
    /// # Ok::<(), merak_pipe::Error>(())
    /// ```
    pub fn parse(text: &str, defaults: UnitCosts, stages: usize) -> Result<Self> {
        let mut costs = Self::uniform(defaults, stages);
        let mut overlap = vec![costs.overlap];
        let error = |found: &str| Error::ParseCosts {
            found: found.into(),
        };
        by_stage(text, error, |key, values: Vec<f64>| {
            let (letter, what, list) = match key {
                "F" => ('F', "stages", &mut costs.forward),
                "I" => ('I', "stages", &mut costs.input_grad),
                "W" => ('W', "stages", &mut costs.weight_grad),
                "R" => ('R', "stages", &mut costs.recompute),
                "C" => ('C', "hops", &mut costs.hop),
                "O" => ('O', "overlaps", &mut overlap),
                _ => return Ok(false),
            };
            values.iter().try_for_each(|value| check(letter, *value))?;
            fill("costs", (letter, what), list, values)?;
            Ok(true)
        })?;
        Ok(Self {
            overlap: overlap[0],
            ..costs
        })
    }

    fn lists(&self) -> [(char, &[f64]); 5] {
        [
            ('F', &self.forward),
            ('I', &self.input_grad),
            ('W', &self.weight_grad),
            ('R', &self.recompute),
            ('C', &self.hop),
        ]
    }

    /// Checks that there is one legal cost for everything in a schedule of this size.
    pub(crate) fn check(&self, size: Size) -> Result<()> {
        let stages = size.stages();
        for (key, list) in self.lists() {
            let (what, expected) = if key == 'C' {
                ("hops", stages - 1)
            } else {
                ("stages", stages)
            };
            if list.len() != expected {
                return Err(Error::CostCount {
                    list: format!("costs {key}"),
                    what,
                    expected,
                    found: list.len(),
                });
            }
            list.iter().try_for_each(|value| check(key, *value))?;
        }
        check('O', self.overlap)
    }

    /// Whether a forward and a backward that stand together run at once.
    pub(crate) fn overlaps(&self) -> bool {
        self.overlap < 1.0
    }

    /// The cost of an action; `recomputes` says whether its recompute is charged within it.
    pub(crate) fn of(&self, action: Action, recomputes: bool) -> f64 {
        let stage = action.stage.0;
        let recompute = if recomputes {
            self.recompute[stage]
        } else {
            0.0
        };
        match action.kind {
            Kind::Forward => self.forward[stage],
            Kind::Recompute => self.recompute[stage],
            Kind::Backward => recompute + self.input_grad[stage] + self.weight_grad[stage],
            Kind::InputGrad => recompute + self.input_grad[stage],
            Kind::WeightGrad => self.weight_grad[stage],
        }
    }
}

/// For each stage and kind the sum of the times of its actions, and their number.
struct Means(Vec<[(f64, f64); Kind::ALL.len()]>);

/// An action that ran, with the one that ran at once with it.
type Group = (Span, Option<Span>);

impl Means {
    /// Of the actions that ran alone.
    fn of(schedule: &Schedule, stages: usize, groups: &[Group]) -> Result<Self> {
        let lists = schedule.actions.iter().flatten();
        let separate: BTreeSet<Action> = lists
            .filter(|a| a.kind == Kind::Recompute)
            .copied()
            .collect();
        let has_separate: BTreeSet<_> = separate.iter().map(|action| action.stage).collect();
        let mut sums = vec![[(0.0, 0.0); Kind::ALL.len()]; stages];
        for &(span, _) in groups.iter().filter(|(_, other)| other.is_none()) {
            let Action { stage, kind, .. } = span.action;
            let of_stage = sums.get_mut(stage.0).ok_or(Error::CostCount {
                list: "costs".into(),
                what: "stages",
                expected: stages,
                found: stage.0 + 1,
            })?;
            let recompute = Action {
                kind: Kind::Recompute,
                ..span.action
            };
            // A backward with its recompute inside says nothing about the backward alone.
            let is_mixed = kind.moves_gradient()
                && has_separate.contains(&stage)
                && !separate.contains(&recompute);
            if !is_mixed {
                let (sum, count) = &mut of_stage[kind as usize];
                *sum += span.end - span.start;
                *count += 1.0;
            }
        }
        Ok(Self(sums))
    }

    fn has(&self, stage: usize, kind: Kind) -> bool {
        self.0[stage][kind as usize].1 > 0.0
    }

    /// The mean time of an action, 0 where none ran.
    fn mean(&self, stage: usize, kind: Kind) -> f64 {
        let (sum, count) = self.0[stage][kind as usize];
        if count > 0.0 { sum / count } else { 0.0 }
    }

    /// The time of the pairs that ran at once, as a share of the times of their parts alone. Such a
    /// pair says nothing about its parts.
    fn overlap(&self, groups: &[Group]) -> f64 {
        let (mut together, mut apart) = (0.0, 0.0);
        for &(forward, backward) in groups {
            let Some(backward) = backward else { continue };
            let (first, second) = (forward.action.stage.0, backward.action.stage.0);
            if first.max(second) < self.0.len() {
                let halves =
                    self.mean(second, Kind::InputGrad) + self.mean(second, Kind::WeightGrad);
                let whole = if halves > 0.0 {
                    halves
                } else {
                    self.mean(second, Kind::Backward)
                };
                together += forward.end.max(backward.end) - forward.start;
                apart += self.mean(first, Kind::Forward) + whole;
            }
        }
        if apart > 0.0 {
            (together / apart).min(1.0)
        } else {
            1.0
        }
    }
}

impl fmt::Display for Costs {
    /// As in `F=1,I=1,W=1,R=0,C=0,O=1`: one number for a cost that is the same everywhere,
    /// otherwise one for each stage or hop with colons in between.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, list) in self.lists() {
            write!(f, "{key}=")?;
            match list {
                [] => f.write_str("0")?,
                [first, rest @ ..] if rest.iter().all(|value| value.total_cmp(first).is_eq()) => {
                    write!(f, "{}", Figure(*first))?;
                }
                list => {
                    let texts: Vec<_> = list.iter().map(|cost| Figure(*cost).to_string()).collect();
                    f.write_str(&texts.join(":"))?;
                }
            }
            f.write_str(",")?;
        }
        write!(f, "O={}", Figure(self.overlap))
    }
}

impl Serialize for Costs {
    /// One number for a cost that is the same everywhere, a list otherwise.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(6))?;
        for (key, list) in self.lists() {
            match list {
                [] => map.serialize_entry(&key, &0.0)?,
                [first, rest @ ..] if rest.iter().all(|value| value.total_cmp(first).is_eq()) => {
                    map.serialize_entry(&key, first)?;
                }
                list => map.serialize_entry(&key, list)?,
            }
        }
        map.serialize_entry(&'O', &self.overlap)?;
        map.end()
    }
}

/// Reads entries such as `F=1:2,W=1`, and hands each key with its numbers to `take`, which says
/// whether it knows it.
///
/// # Errors
/// The `error` of an entry of another form or an unknown key, [`Error::CostTwice`], and those of
/// `take`.
pub(crate) fn by_stage<T: FromStr>(
    text: &str,
    error: impl Fn(&str) -> Error,
    mut take: impl FnMut(&str, Vec<T>) -> Result<bool>,
) -> Result<()> {
    let mut seen = BTreeSet::new();
    let mut read = |entry: &str| {
        let (key, values) = entry.split_once('=').ok_or_else(|| error(entry))?;
        let values = values.split(':').map(|value| value.trim().parse());
        let values: Vec<T> = values.collect::<Result<_, _>>().map_err(|_| error(entry))?;
        if !take(key.trim(), values)? {
            return Err(error(entry));
        }
        if !seen.insert(key.trim().to_owned()) {
            let key = key.trim().chars().next().unwrap_or_default();
            return Err(Error::CostTwice { key });
        }
        Ok(())
    };
    let has_lines = text.trim().contains('\n');
    let lines = text.lines().map(str::trim).enumerate();
    for (index, line) in lines.filter(|(_, line)| !line.is_empty()) {
        // The end of a line ends an entry, with or without a comma.
        let whole = if has_lines {
            line.strip_suffix(',')
        } else {
            None
        };
        let mut entries = whole.unwrap_or(line).split(',').map(str::trim);
        let outcome = entries.try_for_each(&mut read);
        outcome.map_err(|source| {
            if has_lines {
                Error::Line {
                    line: index + 1,
                    source: Box::new(source),
                }
            } else {
                source
            }
        })?;
    }
    Ok(())
}

/// Sets every entry to a single number, or the list to one of the same length.
///
/// # Errors
/// [`Error::CostCount`].
pub(crate) fn fill<T: Clone>(
    name: &str,
    (key, what): (char, &'static str),
    list: &mut Vec<T>,
    values: Vec<T>,
) -> Result<()> {
    match &values[..] {
        [all] => list.fill(all.clone()),
        _ if values.len() == list.len() => *list = values,
        _ => {
            return Err(Error::CostCount {
                list: format!("{name} {key}"),
                what,
                expected: list.len(),
                found: values.len(),
            });
        }
    }
    Ok(())
}

fn check(key: char, found: f64) -> Result<()> {
    if key == 'O' && !(0.0..=1.0).contains(&found) {
        Err(Error::OverlapValue { found })
    } else if (0.0..=MAX_COST).contains(&found) {
        Ok(())
    } else {
        Err(Error::CostValue { key, found })
    }
}
