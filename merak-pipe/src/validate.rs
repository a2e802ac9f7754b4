//! The proof that a schedule can be carried out and gives the right result.

use crate::{
    Action, Error, Kind, MicrobatchId, Pair, Result, Schedule, StageId, Violation, blocking_sends,
    dataflow, lower,
};

impl Schedule {
    /// Proves the schedule:
    ///
    /// - every stage belongs to one rank, and every rank has the same number of stages;
    /// - every microbatch has on every stage one `F`, then one `B` or one `I` and later one `W`,
    ///   and an `R` at most once between its `F` and its backward (a schedule of forwards alone has
    ///   one `F` each);
    /// - actions that run at once are a forward and a full backward that does not need it;
    /// - the weight gradients of a stage come in ascending order of the microbatches, so that every
    ///   schedule adds them up to the same bits;
    /// - no microbatch enters a buffer that another one still needs;
    /// - both ends of a hop order its messages alike;
    /// - no ranks wait for each other, whether sends are buffered or wait for their receiver.
    ///
    /// Takes time proportional to the number of actions.
    ///
    /// # Errors
    /// The first rule that does not hold, with rank, position and action.
    ///
    /// ```
    /// use merak_pipe::{Schedule, Size};
    /// let csv = "0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1\n";
    /// let error = Schedule::from_csv("mine", csv, Size::new(2, 2))?.validate().unwrap_err();
    /// assert_eq!(error.to_string(), "rank 1, position 3: 1B1 comes before 1F1");
    /// # Ok::<(), merak_pipe::Error>(())
    /// ```
    pub fn validate(&self) -> Result<()> {
        let placement = self.placement()?;
        check_stages_per_rank(self, &placement)?;
        check_actions(self, &placement)?;
        check_message_order(self)?;
        dataflow::walk(self, &placement, |_| ())?;
        let streams = lower::lower(self, &placement, &[])?;
        blocking_sends::check(self, &placement, &streams)
    }
}

fn check_stages_per_rank(schedule: &Schedule, placement: &[usize]) -> Result<()> {
    let mut counts = vec![0; schedule.size.ranks];
    for &rank in placement {
        counts[rank] += 1;
    }
    let expected = schedule.size.chunks;
    match counts.iter().position(|found| *found != expected) {
        Some(rank) => Err(Error::StagesOfRank {
            rank,
            expected,
            found: counts[rank],
        }),
        None => Ok(()),
    }
}

/// Checks what can be seen on each stage alone: order, completeness, weight gradients and buffers.
pub(crate) fn check_actions(schedule: &Schedule, placement: &[usize]) -> Result<()> {
    check_pairs(schedule)?;
    let forward_only = schedule.is_forward_only();
    let microbatches = schedule.size.microbatches;
    let buffers = |stage| schedule.buffers.get(stage).copied().unwrap_or(0);
    let mut stages: Vec<StageState> = (0..placement.len())
        .map(|stage| StageState {
            seen: vec![Seen::default(); microbatches],
            last_weight: None,
            buffers: buffers(stage),
            ring: vec![None; buffers(stage).min(microbatches)],
            recomputes: !schedule.no_recompute.contains(&StageId(stage)),
            forward_only,
        })
        .collect();
    for (rank, actions) in schedule.actions.iter().enumerate() {
        for (position, &action) in actions.iter().enumerate() {
            let outcome = stages[action.stage.0].take(action);
            outcome.map_err(|rule| Error::Invalid {
                rank,
                position: schedule.cell_index(rank, position),
                action,
                rule,
            })?;
        }
    }
    for (stage, state) in stages.iter().enumerate() {
        for (microbatch, seen) in state.seen.iter().enumerate() {
            if let Some(kind) = seen.missing(forward_only) {
                let action = Action::new(StageId(stage), kind, MicrobatchId(microbatch));
                let rank = placement[stage];
                return Err(Error::MissingAction { rank, action });
            }
        }
    }
    Ok(())
}

/// Checks that the actions of each pair can run at once.
fn check_pairs(schedule: &Schedule) -> Result<()> {
    for &(rank, position) in &schedule.pairs {
        let list = schedule.actions.get(rank);
        let Some(&action) = list.and_then(|list| list.get(position)) else {
            continue;
        };
        let rule = match schedule.pair(rank, position) {
            Some(Pair { backward, .. })
                if (action.stage, action.microbatch) == (backward.stage, backward.microbatch) =>
            {
                Violation::PairedWithItself { backward }
            }
            Some(_) => continue,
            None => Violation::NoPair,
        };
        return Err(Error::Invalid {
            rank,
            position: schedule.cell_index(rank, position),
            action,
            rule,
        });
    }
    Ok(())
}

/// The kinds that one microbatch has met on one stage.
#[derive(Debug, Clone, Copy, Default)]
struct Seen(u8);

impl Seen {
    fn has(self, kind: Kind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }

    fn add(&mut self, kind: Kind) {
        self.0 |= 1 << kind as u8;
    }

    /// The first of these kinds that the microbatch has met.
    fn any_of(self, kinds: &[Kind]) -> Option<Kind> {
        kinds.iter().copied().find(|kind| self.has(*kind))
    }

    fn missing(self, forward_only: bool) -> Option<Kind> {
        if !self.has(Kind::Forward) {
            Some(Kind::Forward)
        } else if forward_only || self.any_of(&[Kind::Backward, Kind::WeightGrad]).is_some() {
            None
        } else if self.has(Kind::InputGrad) {
            Some(Kind::WeightGrad)
        } else {
            Some(Kind::Backward)
        }
    }
}

/// The state of a stage at a place in its rank's list.
#[derive(Debug)]
struct StageState {
    seen: Vec<Seen>,
    last_weight: Option<MicrobatchId>,
    buffers: usize,
    /// The live microbatch of each buffer; at most as long as there are microbatches.
    ring: Vec<Option<MicrobatchId>>,
    recomputes: bool,
    forward_only: bool,
}

impl StageState {
    fn take(&mut self, action: Action) -> Result<(), Violation> {
        self.check_order(action)?;
        self.seen[action.microbatch.0].add(action.kind);
        if action.kind == Kind::Recompute && !self.recomputes {
            return Err(Violation::NeverRecomputes);
        }
        if action.kind == Kind::Forward && !self.forward_only {
            self.occupy(action.microbatch)?;
        }
        if action.kind.ends_microbatch() {
            if let Some(after) = self.last_weight.filter(|last| *last > action.microbatch) {
                return Err(Violation::WeightOrder { after });
            }
            self.last_weight = Some(action.microbatch);
            let buffer = action.microbatch.0 % self.buffers;
            self.ring[buffer] = None;
        }
        Ok(())
    }

    fn check_order(&self, action: Action) -> Result<(), Violation> {
        let seen = self.seen[action.microbatch.0];
        let of_kind = |kind| Action { kind, ..action };
        if seen.has(action.kind) {
            return Err(Violation::Repeated);
        }
        let (needs, same_part, later): (_, &[Kind], &[Kind]) = match action.kind {
            Kind::Forward => return Ok(()),
            Kind::Recompute => (Kind::Forward, &[], &[Kind::Backward, Kind::InputGrad]),
            Kind::Backward => (Kind::Forward, &[Kind::InputGrad, Kind::WeightGrad], &[]),
            Kind::InputGrad => (Kind::Forward, &[Kind::Backward], &[]),
            Kind::WeightGrad => (Kind::InputGrad, &[Kind::Backward], &[]),
        };
        if let Some(kind) = seen.any_of(same_part) {
            let other = of_kind(kind);
            return Err(Violation::BackwardTwice { other });
        }
        if let Some(kind) = seen.any_of(later) {
            let backward = of_kind(kind);
            return Err(Violation::TooLate { backward });
        }
        if !seen.has(needs) {
            let needs = of_kind(needs);
            return Err(Violation::TooEarly { needs });
        }
        Ok(())
    }

    fn occupy(&mut self, microbatch: MicrobatchId) -> Result<(), Violation> {
        let buffers = self.buffers;
        if buffers == 0 {
            return Err(Violation::NoBuffers);
        }
        let buffer = microbatch.0 % buffers;
        match self.ring[buffer].replace(microbatch) {
            None => Ok(()),
            Some(live) => Err(Violation::BufferInUse {
                live,
                buffer,
                buffers,
            }),
        }
    }
}

/// Checks that neighbouring stages meet activations, and gradients, in the same order.
fn check_message_order(schedule: &Schedule) -> Result<()> {
    let stages = schedule.size.stages();
    // By stage: (position, action) of what moves an activation, and of what moves a gradient.
    let mut forwards = vec![Vec::new(); stages];
    let mut gradients = vec![Vec::new(); stages];
    for (rank, actions) in schedule.actions.iter().enumerate() {
        for (position, action) in actions.iter().enumerate() {
            if action.kind == Kind::Forward {
                forwards[action.stage.0].push((rank, position, *action));
            } else if action.kind.moves_gradient() {
                gradients[action.stage.0].push((rank, position, *action));
            }
        }
    }
    let hops = |stage: usize| {
        [
            (&forwards[stage], &forwards[stage + 1]),
            (&gradients[stage + 1], &gradients[stage]),
        ]
    };
    for (senders, receivers) in (1..stages).flat_map(|stage| hops(stage - 1)) {
        for ((_, _, sender), &(rank, position, action)) in senders.iter().zip(receivers) {
            let tags = sender.output(stages).zip(action.input(stages));
            if let Some((expected, found)) = tags.filter(|(sent, taken)| sent != taken) {
                return Err(Error::Invalid {
                    rank,
                    position: schedule.cell_index(rank, position),
                    action,
                    rule: Violation::MessageOrder { expected, found },
                });
            }
        }
    }
    Ok(())
}
