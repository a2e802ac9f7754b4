//! The engine: carries out one rank's actions.

mod cancel;
mod compare;
mod link;
mod module;
#[cfg(feature = "mpu")]
mod mpu;
mod observer;
mod threads;

pub use cancel::{Cancel, Interrupter};
pub use compare::{Comparison, compare_with_unpipelined};
pub use link::Link;
pub use module::StageModule;
#[cfg(feature = "mpu")]
pub use mpu::GroupLink;
pub use observer::Observer;
pub use threads::{ThreadLink, run_threads, run_threads_until, threads};

use crate::{Action, Error, Kind, Result, Schedule, Span, Tag, error::at_once, timeline::Recorder};
use std::{collections::BTreeMap, time::Instant};

/// Receives that are posted ahead of the one that the rank waits for.
const POSTED_AHEAD: usize = 2;

/// One rank's part of a schedule, ready to run any number of steps.
///
/// The engine keeps the order of the rank's actions. Before an action it takes the message that the
/// action needs, from the link or, between two stages of one rank, from its own hands; after the
/// action it passes on what the stage returned. Sends do not wait, and the next receives are posted
/// ahead, so that communication runs under the computation. Where ranks share cores, the link lets
/// them compute by turns. What the validator proves is not checked again: a schedule that it would
/// refuse ends in an error here, at the latest when the link's deadline passes.
///
/// A forward and a backward that stand as a [pair](crate::Pair) run at once where the module [can
/// do that](StageModule::overlaps), after both their messages have come; elsewhere one after the
/// other.
///
/// Schedules without backwards run in the same way, for evaluation and generation, by
/// [`StageModule::forward_only`].
///
/// # Communication
/// One message for each microbatch, direction and pair of neighbouring stages on different ranks.
#[derive(Debug, Clone)]
pub struct PipelineEngine {
    rank: usize,
    steps: Vec<Step>,
    /// The messages from other ranks, in the order in which the actions take them.
    receives: Vec<(usize, Tag)>,
    /// No rank has a backward.
    is_forward_only: bool,
    epoch: Option<Instant>,
    cancel: Cancel,
}

/// An action and where its messages come from and go to.
#[derive(Debug, Clone, Copy)]
struct Step {
    action: Action,
    input: Option<Route>,
    output: Option<Route>,
    /// Whether the next step is the backward that may run at once with this forward.
    is_paired: bool,
}

/// A message and the rank at its other end, which can be the rank itself.
#[derive(Debug, Clone, Copy)]
struct Route {
    tag: Tag,
    peer: usize,
}

impl PipelineEngine {
    /// Prepares the actions of `rank`.
    ///
    /// # Errors
    /// When the rank does not exist, or the schedule's actions do not fit its size.
    pub fn new(schedule: &Schedule, rank: usize) -> Result<Self> {
        let placement = schedule.placement()?;
        let actions = schedule.actions.get(rank).ok_or(Error::NoSuchRank {
            rank,
            ranks: schedule.size.ranks,
        })?;
        let mut engine = Self::of_actions(actions, &placement, rank);
        engine.is_forward_only = schedule.is_forward_only();
        for (position, step) in engine.steps.iter_mut().enumerate() {
            step.is_paired = schedule.pair(rank, position).is_some();
        }
        Ok(engine)
    }

    /// Prepares some actions of `rank`, one after the other, where `placement` tells the rank of
    /// every stage. Backwards may follow in later actions, so forwards keep what they need.
    ///
    /// # Panics
    /// When an action is of a stage beside these.
    pub fn of_actions(actions: &[Action], placement: &[usize], rank: usize) -> Self {
        let stages = placement.len();
        let steps: Vec<Step> = actions
            .iter()
            .map(|&action| Step {
                action,
                input: action.input(stages).map(|tag| Route {
                    tag,
                    peer: placement[tag.from.0],
                }),
                output: action.output(stages).map(|tag| Route {
                    tag,
                    peer: placement[tag.to.0],
                }),
                is_paired: false,
            })
            .collect();
        let inputs = steps.iter().filter_map(|step| step.input);
        let remote = inputs.filter(|route| route.peer != rank);
        Self {
            rank,
            receives: remote.map(|route| (route.peer, route.tag)).collect(),
            steps,
            is_forward_only: false,
            epoch: None,
            cancel: Cancel::new(),
        }
    }

    /// Records times since `epoch` instead of the start of each run, so that ranks share one time
    /// axis.
    #[must_use]
    pub fn with_epoch(mut self, epoch: Instant) -> Self {
        self.epoch = Some(epoch);
        self
    }

    /// Lets a handle end the runs from outside.
    #[must_use]
    pub fn with_cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = cancel;
        self
    }

    /// Runs every action once and returns when each one started and ended, in seconds.
    ///
    /// # Errors
    /// When the stage or the link fails, or the run is [cancelled](PipelineEngine::with_cancel).
    /// The link's other ranks are then made to fail too, and the module is
    /// [reset](StageModule::reset), so that it can begin a step anew over another link.
    pub fn run<M, L>(&self, module: &mut M, link: &mut L) -> Result<Vec<Span>>
    where
        M: StageModule,
        L: Link<M::Payload>,
    {
        self.run_observed(module, link, &mut ())
    }

    /// The same, telling an observer of every action.
    ///
    /// # Errors
    /// As [`PipelineEngine::run`].
    pub fn run_observed<M, L>(
        &self,
        module: &mut M,
        link: &mut L,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Span>>
    where
        M: StageModule,
        L: Link<M::Payload>,
    {
        let watch = self.cancel.watch(link.interrupter());
        let outcome = Run {
            engine: self,
            local: BTreeMap::new(),
            posted: 0,
            taken: 0,
        }
        .all(module, link, observer);
        drop(watch);
        // The echo of a cancelled run tells less than the handle does.
        let outcome = match outcome {
            Err(Error::Aborted { by, reason }) => {
                let echo = Error::Aborted { by, reason };
                Err(self.cancel.check().err().unwrap_or(echo))
            }
            outcome => outcome,
        };
        match &outcome {
            Ok(_) | Err(Error::Aborted { .. }) => {}
            Err(error) => link.abort(&reason(error)),
        }
        if outcome.is_err() {
            module.reset();
        }
        outcome
    }
}

/// Runs one rank of a schedule once; [`PipelineEngine`] is cheaper for many steps.
///
/// # Errors
/// As [`PipelineEngine::new`] and [`PipelineEngine::run`].
pub fn run<M, L>(
    schedule: &Schedule,
    rank: usize,
    module: &mut M,
    link: &mut L,
) -> Result<Vec<Span>>
where
    M: StageModule,
    L: Link<M::Payload>,
{
    PipelineEngine::new(schedule, rank)?.run(module, link)
}

/// The state of one run.
struct Run<'a, P> {
    engine: &'a PipelineEngine,
    /// Messages between two stages of this rank.
    local: BTreeMap<Tag, P>,
    /// Receives that were posted and taken so far.
    posted: usize,
    taken: usize,
}

impl<P: Send> Run<'_, P> {
    fn all<M, L>(
        mut self,
        module: &mut M,
        link: &mut L,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Span>>
    where
        M: StageModule<Payload = P>,
        L: Link<P>,
    {
        let steps = &self.engine.steps;
        let mut recorder = Recorder::new(self.engine.epoch, steps.len());
        self.post(link)?;
        let mut left = steps.as_slice();
        while let Some((&step, behind)) = left.split_first() {
            self.engine.cancel.check()?;
            left = behind;
            let input = self.take(step, link)?;
            let pair = (step.is_paired && module.overlaps()).then(|| left.split_first());
            let Some((&backward, behind)) = pair.flatten() else {
                link.begin()?;
                observer.begin(step.action);
                recorder.begin();
                let output = self.compute(step.action, input, module);
                recorder.end([step.action]);
                observer.end(step.action);
                link.end();
                self.pass_on(step, output?, link)?;
                continue;
            };
            left = behind;
            let grad = self.take(backward, link)?;
            let actions = [step.action, backward.action];
            link.begin()?;
            for action in actions {
                observer.begin(action);
            }
            recorder.begin();
            let outputs = self.compute_both(actions, input, grad, module);
            recorder.end(actions);
            for action in actions {
                observer.end(action);
            }
            link.end();
            let (output, input_grad) = outputs?;
            self.pass_on(step, output, link)?;
            self.pass_on(backward, input_grad, link)?;
        }
        link.finish()?;
        Ok(recorder.into_spans())
    }

    fn post<L: Link<P>>(&mut self, link: &mut L) -> Result<()> {
        let until = (self.taken + POSTED_AHEAD).min(self.engine.receives.len());
        for &(peer, tag) in &self.engine.receives[self.posted.min(until)..until] {
            link.post(peer, tag)?;
        }
        self.posted = self.posted.max(until);
        Ok(())
    }

    fn take<L: Link<P>>(&mut self, step: Step, link: &mut L) -> Result<Option<P>> {
        let Some(Route { tag, peer }) = step.input else {
            return Ok(None);
        };
        let rank = self.engine.rank;
        if peer == rank {
            let message = self.local.remove(&tag);
            return message.map(Some).ok_or(Error::NotYetComputed {
                rank,
                action: step.action,
                tag,
            });
        }
        self.taken += 1;
        self.post(link)?;
        link.recv(peer, tag).map(Some)
    }

    fn compute<M>(&self, action: Action, input: Option<P>, module: &mut M) -> Result<Option<P>>
    where
        M: StageModule<Payload = P>,
    {
        let rank = self.engine.rank;
        let (stage, microbatch) = (action.stage.0, action.microbatch.0);
        let kind = action.kind.letter();
        let _span = tracing::error_span!("microbatch", stage, microbatch, %kind).entered();
        tracing::trace!(rank, "action");
        let outcome = match action.kind {
            Kind::Forward if self.engine.is_forward_only => module.forward_only(action, input),
            Kind::Forward => module.forward(action, input),
            Kind::Backward => module.backward(action, input),
            Kind::InputGrad => module.backward_input(action, input),
            Kind::WeightGrad => module.backward_weight(action).map(|()| None),
            Kind::Recompute => module.recompute(action).map(|()| None),
        };
        outcome.map_err(|source| Error::Stage {
            rank,
            action,
            with: None,
            source: source.into(),
        })
    }

    fn compute_both<M>(
        &self,
        [forward, backward]: [Action; 2],
        input: Option<P>,
        grad: Option<P>,
        module: &mut M,
    ) -> Result<(Option<P>, Option<P>)>
    where
        M: StageModule<Payload = P>,
    {
        let rank = self.engine.rank;
        let _span = tracing::error_span!("microbatches", %forward, %backward).entered();
        tracing::trace!(rank, "actions at once");
        let outcome = module.forward_and_backward(forward, input, backward, grad);
        outcome.map_err(|source| Error::Stage {
            rank,
            action: forward,
            with: Some(backward),
            source: source.into(),
        })
    }

    fn pass_on<L: Link<P>>(&mut self, step: Step, output: Option<P>, link: &mut L) -> Result<()> {
        let Step { action, .. } = step;
        let rank = self.engine.rank;
        match (step.output, output) {
            (Some(Route { tag, peer }), Some(payload)) if peer == rank => {
                self.local.insert(tag, payload);
                Ok(())
            }
            (Some(Route { tag, peer }), Some(payload)) => link.send(peer, tag, payload),
            (Some(Route { tag, .. }), None) => Err(Error::NoOutput { rank, action, tag }),
            (None, Some(_)) => Err(Error::UnexpectedOutput { rank, action }),
            (None, None) => Ok(()),
        }
    }
}

/// The error and its sources in one line for the other ranks, which are told the rank as well.
fn reason(error: &Error) -> String {
    let mut text = match error {
        Error::Stage { action, with, .. } => at_once(*action, *with),
        other => other.to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(below) = cause {
        text.push_str(": ");
        text.push_str(&below.to_string());
        cause = below.source();
    }
    text
}

/// The message of a panic, from the payload that it left.
///
/// ```
/// let payload = std::panic::catch_unwind(|| panic!("no room")).unwrap_err();
/// assert_eq!(merak_pipe::panic_message(&*payload), "no room");
/// ```
pub fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").into()
}
