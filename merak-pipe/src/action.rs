//! Actions: what a rank does next, as a few characters.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Number of a stage in model order, from 0; prints as the bare number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StageId(pub usize);

/// Number of a microbatch within a step, from 0; prints as the bare number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MicrobatchId(pub usize);

impl fmt::Display for StageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for MicrobatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The work of an [`Action`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `F`: the forward pass.
    Forward,
    /// `R`: the forward pass again, so that its activations are there when the gradient comes.
    Recompute,
    /// `B`: the full backward pass, [`Kind::InputGrad`] and [`Kind::WeightGrad`] in one.
    Backward,
    /// `I`: the gradient of the stage's input, which earlier stages wait for.
    InputGrad,
    /// `W`: the gradients of the weights, which no other rank waits for.
    WeightGrad,
}

impl Kind {
    /// Every kind, in the order in which one microbatch can meet them.
    pub const ALL: [Self; 5] = [
        Self::Forward,
        Self::Recompute,
        Self::Backward,
        Self::InputGrad,
        Self::WeightGrad,
    ];

    /// The letter in the printed form.
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Recompute => 'R',
            Self::Backward => 'B',
            Self::InputGrad => 'I',
            Self::WeightGrad => 'W',
        }
    }

    pub(crate) fn from_letter(letter: char) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.letter() == letter)
    }

    /// Whether the action waits for a gradient and passes one on: `B` and `I`.
    pub const fn moves_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::InputGrad)
    }

    /// Whether the action adds to the gradients of the weights, and so ends its microbatch: `B` and
    /// `W`.
    pub const fn ends_microbatch(self) -> bool {
        matches!(self, Self::Backward | Self::WeightGrad)
    }
}

/// One computation of one stage on one microbatch, written `<stage><kind><microbatch>`.
///
/// ```
/// use merak_pipe::{Action, Kind, MicrobatchId, StageId};
/// let action: Action = "1I3".parse()?;
/// assert_eq!(action, Action::new(StageId(1), Kind::InputGrad, MicrobatchId(3)));
/// assert_eq!(action.to_string(), "1I3");
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage that computes.
    pub stage: StageId,
    /// Its work.
    pub kind: Kind,
    /// The microbatch it computes on.
    pub microbatch: MicrobatchId,
}

impl Action {
    /// Makes an action from its three parts.
    pub const fn new(stage: StageId, kind: Kind, microbatch: MicrobatchId) -> Self {
        Self {
            stage,
            kind,
            microbatch,
        }
    }

    /// The message that the action waits for, in a pipeline of `stages`.
    ///
    /// A forward waits for the activation of the stage before, a backward or input gradient for the
    /// gradient of the stage after. The ends of the pipeline and the other kinds wait for nothing.
    pub fn input(self, stages: usize) -> Option<Tag> {
        let stage = self.stage.0;
        let from = match self.kind {
            Kind::Forward => stage.checked_sub(1)?,
            Kind::Backward | Kind::InputGrad => Some(stage + 1).filter(|next| *next < stages)?,
            Kind::Recompute | Kind::WeightGrad => return None,
        };
        Some(Tag {
            from: StageId(from),
            to: self.stage,
            microbatch: self.microbatch,
        })
    }

    /// The message that the action produces, in a pipeline of `stages`.
    pub fn output(self, stages: usize) -> Option<Tag> {
        let stage = self.stage.0;
        let to = match self.kind {
            Kind::Forward => Some(stage + 1).filter(|next| *next < stages)?,
            Kind::Backward | Kind::InputGrad => stage.checked_sub(1)?,
            Kind::Recompute | Kind::WeightGrad => return None,
        };
        Some(Tag {
            from: self.stage,
            to: StageId(to),
            microbatch: self.microbatch,
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.microbatch)
    }
}

/// A forward and a full backward of one rank that run at once, written as PyTorch does.
///
/// Each of them uses the time in which the other waits, above all for communication. Both are
/// actions of a schedule's list, the forward before the backward;
/// [`Schedule::pairs`](crate::Schedule::pairs) says which belong together.
///
/// ```
/// use merak_pipe::Pair;
/// let pair: Pair = "(0F7;7B3)OVERLAP_F_B".parse()?;
/// assert_eq!((pair.forward.to_string(), pair.backward.to_string()), ("0F7".into(), "7B3".into()));
/// assert_eq!(pair.to_string(), "(0F7;7B3)OVERLAP_F_B");
/// # Ok::<(), merak_pipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    /// The forward.
    pub forward: Action,
    /// The full backward, of another stage or microbatch.
    pub backward: Action,
}

impl Pair {
    /// The pair of two actions, if they are a forward and a full backward, in this order.
    pub fn new(forward: Action, backward: Action) -> Option<Self> {
        let fits = forward.kind == Kind::Forward && backward.kind == Kind::Backward;
        fits.then_some(Self { forward, backward })
    }

    /// What follows the two actions in the printed form.
    pub(crate) const SUFFIX: &str = "OVERLAP_F_B";
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({};{}){}", self.forward, self.backward, Self::SUFFIX)
    }
}

impl Serialize for Pair {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A cell of a rank's list: one action, or a forward with the backward that runs at once with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum Cell {
    Alone(Action),
    Paired(Pair),
}

impl Cell {
    /// The first action, or the only one.
    pub(crate) fn first(self) -> Action {
        match self {
            Self::Alone(action) => action,
            Self::Paired(pair) => pair.forward,
        }
    }

    /// The backward of a pair.
    pub(crate) fn second(self) -> Option<Action> {
        match self {
            Self::Alone(_) => None,
            Self::Paired(pair) => Some(pair.backward),
        }
    }

    /// The actions, in the order of the list.
    pub(crate) fn actions(self) -> impl Iterator<Item = Action> {
        [Some(self.first()), self.second()].into_iter().flatten()
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone(action) => action.fmt(f),
            Self::Paired(pair) => pair.fmt(f),
        }
    }
}

impl Serialize for Action {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The address of one message between stages: an activation when it goes to a later stage, a
/// gradient when it goes to an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag {
    /// The stage that computed the message.
    pub from: StageId,
    /// The stage that needs it.
    pub to: StageId,
    /// The microbatch it belongs to.
    pub microbatch: MicrobatchId,
}

impl Tag {
    /// Whether the message is an activation, on its way to a later stage.
    pub fn is_activation(self) -> bool {
        self.from < self.to
    }

    /// The tag as one number: 16 bits for each stage, 32 for the microbatch, so that it is distinct
    /// for pipelines of up to 65,536 stages.
    pub fn to_u64(self) -> u64 {
        let stage = |id: StageId| (id.0 as u64) & 0xffff;
        stage(self.from) << 48 | stage(self.to) << 32 | (self.microbatch.0 as u64) & 0xffff_ffff
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_activation() {
            "activation"
        } else {
            "gradient"
        };
        write!(
            f,
            "{what} of microbatch {} from stage {} to stage {}",
            self.microbatch, self.from, self.to
        )
    }
}
