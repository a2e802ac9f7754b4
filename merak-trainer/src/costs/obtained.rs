//! A profile from the file that keeps it, or measured now.

use super::{
    CostCache, Doubt, Profile,
    cache::{self, Profiles},
    conditions::conditions,
    measure, pipeline_cores,
};
use crate::{
    config::CheckedArguments,
    error::Result,
    memory::{Shortage, shortage_beside_threads},
    network::Network,
    plan::{Draft, PlanInputs, SegmentedGraph},
    world::World,
};
use merak_ckpt::words::Bytes;
use merak_trace::{Overlap, StageProgram};

/// The outcome of a run that contradicts a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing is noted: the file may not be written, or has other times by now.
    None,
    /// The next run measures again.
    Noted,
    /// A repeated measurement gave the same times.
    Settled,
}

/// Profiles that are kept for the same conditions; each model has one.
const KEPT: usize = 32;

impl Profile {
    /// The profile of a model's work under the arguments: from the first rank's file that keeps it,
    /// or measured now, unless that needs more memory than there is.
    ///
    /// # Communication
    /// Between processes, what shares the times, and the exchanges and nodes that are timed.
    pub(super) fn of(
        inputs: &PlanInputs,
        args: &CheckedArguments,
        cache: Option<&CostCache>,
        world: &World,
    ) -> Result<Option<Self>> {
        let (_, SegmentedGraph { graph, segments }) = Draft::new(inputs, args)?;
        // Times of nodes on the whole microbatch.
        let graph = graph.with_overlap(Overlap::None);
        let programs = segments.programs(&graph, &[])?;
        // What the file keeps besides, in the process of the first rank.
        let mut known = Profiles::new();
        let found = world.share(|| {
            known = cache.map_or_else(Profiles::new, |cache| cache::read(&cache.file));
            let profiles = known.entry(conditions(args)).or_default();
            let found = profiles.iter().rposition(|found| found.covers(&programs));
            Ok(found.map(|at| Self {
                cores: pipeline_cores(args),
                ..profiles.remove(at)
            }))
        })?;
        let doubt = found.as_ref().map(|found| found.doubt);
        if doubt.is_some_and(|doubt| doubt != Doubt::Open) {
            return Ok(found);
        }
        let by_all = measure::have_cores(args, world)?;
        if !has_room(&programs, args, world, by_all, doubt.is_some())? {
            return Ok(found);
        }
        let network = Network::measure(args, world)?;
        let measured = |world: &World, exchanges: Network| {
            measure::profile(&graph, &programs, args, exchanges, world)
        };
        let by_all = by_all.then(|| measured(world, network)).transpose()?;
        let profile = world.share(|| {
            let mut profile = match by_all {
                Some(profile) => profile,
                // The network lies between processes, and threads exchange in memory: what this
                // takes counts into the time between nodes.
                None if args.are_processes() => measured(&World::of_threads(), Network::default())?,
                None => measured(&World::of_threads(), network)?,
            };
            profile.network = network;
            profile.judge(found.as_ref(), &programs, args);
            let profiles = known.entry(conditions(args)).or_default();
            profiles.push(profile.clone());
            let old = profiles.len().saturating_sub(KEPT);
            profiles.drain(..old);
            if let Some(cache) = cache.filter(|cache| cache.keeps) {
                cache::write(&cache.file, &known);
            }
            Ok(profile)
        })?;
        Ok(Some(profile))
    }

    /// Notes in the profile's file that a run took another time than predicted, so that the next
    /// run measures again.
    pub(super) fn cast_doubt(&self, args: &CheckedArguments, cache: &CostCache) -> Verdict {
        if !cache.keeps {
            return Verdict::None;
        }
        // What was settled long ago, or on a busy machine, may have changed.
        if self.doubt == Doubt::Settled && !self.measurement().is_worn() {
            return Verdict::Settled;
        }
        let mut known = cache::read(&cache.file);
        let profiles = known.get_mut(&conditions(args));
        let own = profiles.and_then(|profiles| profiles.iter_mut().find(|found| *found == self));
        let Some(own) = own else {
            return Verdict::None;
        };
        own.doubt = Doubt::Open;
        cache::write(&cache.file, &known);
        Verdict::Noted
    }
}

/// Whether every process has memory for its part of a measurement: for the nodes where all time
/// their own (`by_all`), else for those of the first rank. The first process that lacks it warns,
/// and says what the run goes by instead, which are doubted times if there are any.
///
/// # Communication
/// Between processes, an all-gather of a byte.
fn has_room(
    programs: &[StageProgram],
    args: &CheckedArguments,
    world: &World,
    by_all: bool,
    has_doubted: bool,
) -> Result<bool> {
    let needed = if by_all || world.has_first() {
        measure::needed_bytes(programs, args)
    } else {
        Network::needed_bytes(args)
    };
    let holds_all = !by_all && world.has_first();
    let processes = if holds_all { 1 } else { args.processes_here() };
    let shortage = shortage_beside_threads(args, needed, needed.div_ceil(processes as u64));
    let is_short = shortage.is_some();
    // Where a process lacks memory: whether this is the first one that does.
    let is_first = world.together(|member| {
        let group = member.world_group()?;
        let all = group.all_gather_vec(vec![u8::from(is_short)])?;
        let first = all.iter().position(|is_short| *is_short == 1);
        Ok(first.map(|first| first == member.rank().0))
    })?;
    let is_first = is_first.unwrap_or(is_short.then_some(true));
    if let Some(shortage) = shortage.filter(|_| is_first == Some(true)) {
        warn_of(shortage, has_doubted);
    }
    Ok(is_first.is_none())
}

fn warn_of(shortage: Shortage, has_doubted: bool) {
    let Shortage {
        needed,
        what,
        available,
    } = shortage;
    let [needed, available] = [needed, available].map(Bytes);
    let instead = if has_doubted {
        "times that a run contradicted"
    } else {
        "counted operations"
    };
    tracing::warn!(
        %needed, of = what, %available, instead,
        "costs are not measured, as that needs more than this process may use"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Host, MerakArguments};
    use merak_mpu::{ChosenEngine, testing};

    #[test]
    fn a_process_without_room_keeps_all_from_measuring() {
        let arguments = MerakArguments {
            dp: 2,
            ..MerakArguments::default()
        };
        let args = arguments.check().unwrap();
        let rooms = testing::tcp_world(2, |member| {
            let is_last = member.rank().0 == 1;
            let world = World::of_process(member, ChosenEngine::Tcp).unwrap();
            let room = |shared_bytes, by_all| {
                let args = args.clone().on(Host {
                    shared_bytes,
                    ..Host::of_processes(&[0; 2], 1)
                });
                has_room(&[], &args, &world, by_all, false).unwrap()
            };
            // More than any machine has.
            let too_much = if is_last { 1 << 60 } else { 0 };
            [room(0, true), room(too_much, true), room(too_much, false)]
        });
        assert_eq!(rooms, [[true, false, false]; 2]);
    }
}
