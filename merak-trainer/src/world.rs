//! Starting the ranks of a run.

use crate::{
    config::{CheckedArguments, Host, ThreadsPerRank},
    error::{Error, Result, Teller, chain},
    machine::{host_name, num_cores},
};
use merak_ckpt::Checksum;
use merak_mpu::{
    Axis, ChosenEngine, Group, Member, Mpu, Rank, RunError, Sides, Topology, in_words, run_members,
    threads,
};
use serde::{Serialize, de::DeserializeOwned};
use std::{collections::BTreeMap, fmt, time::Duration};

/// Upper bound on ranks as threads of one process: beyond it a system runs out of threads, and no
/// machine has the cores.
const MAX_RANKS: usize = 1024;

/// Most texts that an error shows where ranks have several.
const MOST_SIDES: usize = 4;

/// The ranks of a run, as this process sees them.
///
/// They are threads of this process, or processes of which this is one. The first rank prints, and
/// writes the files that all share.
#[derive(Debug)]
pub struct World(Ranks);

#[derive(Debug)]
enum Ranks {
    Threads,
    Process {
        member: Member,
        group: Group,
        host: Host,
    },
}

impl World {
    /// Ranks that are threads of this process.
    pub fn of_threads() -> Self {
        Self(Ranks::Threads)
    }

    /// Ranks that are processes which `engine` connects, and of which this one is `member`.
    ///
    /// # Communication
    /// All-gathers of the hosts' numbers and names.
    ///
    /// # Errors
    /// [`Error::Rank`] when another rank has failed.
    pub fn of_process(member: Member, engine: ChosenEngine) -> Result<Self> {
        let met = |error| of_other_at_start(&member, error);
        let group = member.group("run", &everybody(&member)).map_err(met)?;
        let place = member.locality();
        let number = place.host as u32;
        let of_ranks = group.all_gather_vec(vec![number]).map_err(met)?;
        let names = group.all_gather_bytes(host_name().into_bytes());
        let names = names.map_err(met)?;
        let host = Host {
            engine,
            number,
            names: by_number(&of_ranks, &names),
            of_ranks,
            core_sharers: place.core_sharers,
            shared_bytes: member.shared_bytes(),
        };
        Ok(Self(Ranks::Process {
            member,
            group,
            host,
        }))
    }

    /// The arguments of a run of these ranks, which share this host's cores and memory with those
    /// that are here alone.
    #[must_use]
    pub fn place(&self, args: CheckedArguments) -> CheckedArguments {
        match &self.0 {
            Ranks::Threads => args,
            Ranks::Process { host, .. } => args.on(host.clone()),
        }
    }

    /// Whether the first rank is one of this process.
    pub fn has_first(&self) -> bool {
        match &self.0 {
            Ranks::Threads => true,
            Ranks::Process { member, .. } => member.rank().0 == 0,
        }
    }

    /// Checks that the degrees of the arguments fill the world. Threads are as many as these say.
    ///
    /// # Errors
    /// [`Error::Group`] with the nearest degrees that do.
    pub fn check_size(&self, args: &CheckedArguments) -> Result<()> {
        match &self.0 {
            Ranks::Threads => Ok(()),
            Ranks::Process { member, .. } => args.check_world(member.world_size()),
        }
    }

    /// The value of `prepared` where every process has one.
    ///
    /// # Communication
    /// Between processes, an all-gather of the errors' texts.
    ///
    /// # Errors
    /// This process's own error; [`Error::Told`] with it where a lower rank has the same error;
    /// [`Error::Rank`] with the first rank that has one where this process has none.
    pub fn agree<T>(&self, prepared: Result<T>) -> Result<T> {
        let Ranks::Process { member, group, .. } = &self.0 else {
            return prepared;
        };
        let own = prepared.as_ref().err().map(|error| chain(error));
        let texts = group.all_gather_bytes(own.clone().unwrap_or_default().into_bytes());
        let texts = texts.map_err(|error| of_other(member, error))?;
        let first_with = |text: &dyn Fn(&[u8]) -> bool| texts.iter().position(|found| text(found));
        match (prepared, own) {
            (Err(error), Some(own)) => {
                let told = first_with(&|text| text == own.as_bytes());
                Err(if told.is_some_and(|rank| rank < member.rank().0) {
                    Error::Told(Box::new(error))
                } else {
                    error
                })
            }
            (prepared, _) => match first_with(&|text| !text.is_empty()) {
                None => prepared,
                Some(rank) => Err(Error::Rank {
                    rank,
                    cause: String::from_utf8_lossy(&texts[rank]).into_owned(),
                    teller: Teller::Other,
                }),
            },
        }
    }

    /// What the first rank makes, on every process. All read it from the same JSON, the first rank
    /// too; its numbers must be finite.
    ///
    /// # Communication
    /// Between processes, as [`World::agree`], and a broadcast of the JSON.
    ///
    /// # Errors
    /// As [`World::agree`], where `make` fails; [`Error::Rank`] where this process cannot read what
    /// the first one has made, as when it is another build.
    ///
    /// # Panics
    /// Where what was made has no JSON.
    pub fn share<T: Serialize + DeserializeOwned>(
        &self,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let made = self.agree(self.has_first().then(make).transpose())?;
        let made = made.map(|made| serde_json::to_vec(&made).expect("it is plain data"));
        let mut made = made.unwrap_or_default();
        if let Ranks::Process { member, group, .. } = &self.0 {
            let told = group.broadcast_bytes(made, 0);
            made = told.map_err(|error| of_other(member, error))?;
        }
        serde_json::from_slice(&made).map_err(|error| Error::Rank {
            rank: 0,
            cause: format!("it has made what this process cannot read: {error}"),
            teller: Teller::HereForOther,
        })
    }

    /// What the ranks find out together, each in its process; nothing where they are threads. A
    /// process that fails ends the world.
    ///
    /// # Errors
    /// That of `find`; [`Error::Rank`] in the processes of the ranks that did not fail.
    pub(crate) fn together<T>(&self, find: impl FnOnce(&Member) -> Result<T>) -> Result<Option<T>> {
        let Ranks::Process { member, .. } = &self.0 else {
            return Ok(None);
        };
        let found = find(member).inspect_err(|error| member.abort(&chain(error)));
        let found = found.map_err(|error| {
            let of_other = failure_of_other(member, &[member.rank()]);
            of_other.unwrap_or(error)
        });
        found.map(Some)
    }

    /// Checks that every process has the same text, which says `what`.
    ///
    /// # Communication
    /// Between processes, an all-gather of checksums. Where they differ, broadcasts of the texts,
    /// and as [`World::agree`].
    ///
    /// # Errors
    /// Where most have the same text: [`Error::OtherRun`] on the ranks with another one, with the
    /// first line that differs, and [`Error::Rank`] on the others. Where nobody can say who
    /// is right: [`Error::TornRun`] with both sides.
    pub fn check_same(&self, what: &'static str, text: &str) -> Result<()> {
        let Ranks::Process { member, group, .. } = &self.0 else {
            return Ok(());
        };
        let met = |error| of_other(member, error);
        let own = Checksum::of(text.as_bytes()).0.to_le_bytes().to_vec();
        let checksums = group.all_gather_bytes(own).map_err(met)?;
        let sides = Sides::of((0..).map(Rank).zip(checksums));
        let odd = sides.odd();
        if odd.as_ref().is_some_and(Vec::is_empty) {
            return Ok(());
        }
        let mut texts = Vec::new();
        for side in sides.iter().take(MOST_SIDES) {
            let is_own = side[0] == member.rank();
            let sent = if is_own { text } else { "" }.as_bytes().to_vec();
            let sent = group.broadcast_bytes(sent, side[0].0).map_err(met)?;
            texts.push(String::from_utf8_lossy(&sent).into_owned());
        }
        let names: Vec<_> = sides.iter().take(MOST_SIDES).map(in_words).collect();
        self.agree(match odd {
            None => Err(Error::TornRun {
                what,
                sides: names.into_iter().zip(lines_apart(&texts)).collect(),
            }),
            Some(odd) if !odd.contains(&member.rank()) => Ok(()),
            Some(_) => {
                let mut lines = lines_apart(&[text, &texts[0]]).into_iter();
                Err(Error::OtherRun {
                    what,
                    here: lines.next().unwrap_or_default(),
                    there: lines.next().unwrap_or_default(),
                    most: names[0].clone(),
                })
            }
        })
    }

    /// Runs `body` on every rank; returns the result of the lowest rank of this process.
    ///
    /// # Errors
    /// As [`run_world`]; [`Error::Rank`] in the processes of the ranks that did not fail.
    ///
    /// # Panics
    /// Never: a process has a rank.
    pub fn run<T: Send>(
        &self,
        args: &CheckedArguments,
        body: impl Fn(Member) -> Result<T> + Sync,
    ) -> Result<T> {
        let results = match &self.0 {
            Ranks::Threads => run_world(args, body)?,
            Ranks::Process { member, .. } => {
                self.agree(self.check_size(args))?;
                run_on(vec![member.clone()], body)?
            }
        };
        let lowest = results.into_iter().next();
        Ok(lowest.expect("a process has a rank"))
    }
}

/// The end of the process's part in the world; the peers of one that ends too early fail at once.
impl Drop for World {
    fn drop(&mut self) {
        if let Ranks::Process { member, .. } = &self.0 {
            member.end();
        }
    }
}

/// The first line of each text that is not the same in all of them.
fn lines_apart(texts: &[impl AsRef<str>]) -> Vec<String> {
    let mut texts: Vec<_> = texts.iter().map(|text| text.as_ref().lines()).collect();
    loop {
        let lines: Vec<_> = texts.iter_mut().map(Iterator::next).collect();
        let differ = lines.windows(2).any(|pair| pair[0] != pair[1]);
        if differ || lines.iter().all(Option::is_none) {
            let line = |line: Option<&str>| line.unwrap_or("its end").to_owned();
            return lines.into_iter().map(line).collect();
        }
    }
}

/// The names of hosts by their numbers, which count from 0 in the order of their first ranks, from
/// the numbers and the names that the ranks tell.
fn by_number(of_ranks: &[u32], names: &[Vec<u8>]) -> Vec<String> {
    let mut found = Vec::new();
    for (number, name) in of_ranks.iter().zip(names) {
        if *number as usize == found.len() {
            found.push(String::from_utf8_lossy(name).into_owned());
        }
    }
    found
}

fn everybody(member: &Member) -> Vec<Rank> {
    (0..member.world_size()).map(Rank).collect()
}

/// Runs `body` on every rank of the arguments' world, as threads of this process, and returns the
/// results by rank.
///
/// # Errors
/// [`Error::Rank`] with the rank that failed first and its cause, or the cause itself where it
/// names its rank ([`Error::Step`]), or the configuration or an input is at fault; all other ranks
/// were ended.
pub fn run_world<T: Send>(
    args: &CheckedArguments,
    body: impl Fn(Member) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    run_ranks(args.world_size(), args, body)
}

/// As [`run_world`], on any number of ranks.
pub(crate) fn run_ranks<T: Send>(
    world: usize,
    args: &CheckedArguments,
    body: impl Fn(Member) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if world > MAX_RANKS {
        let limit = MAX_RANKS;
        return Err(Error::TooManyRanks { world, limit });
    }
    let options = threads::WorldOptions {
        timeout: Duration::from_secs_f64(args.distributed.timeout_s),
        cores: ranks_at_once(args),
        ..Default::default()
    };
    let outcome = threads::run(world, options, |member| named(member, &body));
    of_ranks(world, outcome)
}

/// Runs `body` on the ranks of this process, and returns the results in their order.
///
/// # Errors
/// As [`run_world`]; [`Error::Rank`] where a rank of another process failed.
pub fn run_on<T: Send>(
    members: Vec<Member>,
    body: impl Fn(Member) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let Some(first) = members.first().cloned() else {
        return Ok(Vec::new());
    };
    let here: Vec<Rank> = members.iter().map(Member::rank).collect();
    let stack = threads::WorldOptions::default().stack_bytes;
    let outcome = run_members(members, stack, |member| named(member, &body));
    match (failure_of_other(&first, &here), outcome) {
        // What the ranks of this process met follows from what another did, and says where they
        // were.
        (Some(error), Err(own)) => {
            if here.contains(&Rank(0)) {
                let error = match own {
                    RunError::Failed { cause, .. } => cause.to_string(),
                    own => own.to_string(),
                };
                tracing::warn!(error, "another rank has failed, and ended this one");
            }
            Err(error)
        }
        (_, outcome) => of_ranks(first.world_size(), outcome),
    }
}

/// Runs `body` on a rank, whose number stands on each event of its thread. The span has the level
/// of errors, so that no filter that shows an event leaves it out.
fn named<T>(member: Member, body: impl Fn(Member) -> Result<T>) -> Result<T, Cause> {
    let span = tracing::error_span!("rank", rank = member.rank().0);
    let _entered = span.entered();
    body(member).map_err(Cause)
}

/// The error of a call of the engine, or the failure of another process that ended it.
fn of_other(member: &Member, error: merak_mpu::Error) -> Error {
    failure_of_other(member, &[member.rank()]).unwrap_or_else(|| error.into())
}

/// [`of_other`] while no rank has a log yet: each tells what has ended it.
fn of_other_at_start(member: &Member, error: merak_mpu::Error) -> Error {
    match of_other(member, error) {
        Error::Rank { rank, cause, .. } => Error::Rank {
            rank,
            cause,
            teller: Teller::HereForOther,
        },
        own => own,
    }
}

/// [`Error::Rank`] where a rank that is not `here` failed the world of a member.
fn failure_of_other(member: &Member, here: &[Rank]) -> Option<Error> {
    let failure = member.failure()?;
    // A first rank that is lost tells nothing.
    let is_told = failure.culprit.0 != 0 || failure.reporter == failure.culprit;
    (!here.contains(&failure.culprit)).then(|| Error::Rank {
        rank: failure.culprit.0,
        cause: failure.reason,
        teller: if is_told {
            Teller::Other
        } else {
            Teller::HereForOther
        },
    })
}

/// The results of ranks, with the failure of one as an error of this crate.
fn of_ranks<T>(world: usize, outcome: Result<Vec<T>, RunError<Cause>>) -> Result<Vec<T>> {
    outcome.map_err(|error| match error {
        // The rank is left out where it is the only one, where the error concerns all ranks, and
        // where the error names its rank.
        RunError::Failed {
            cause: Cause(cause),
            ..
        } if world == 1 || cause.says_whose() => cause,
        RunError::Failed { rank, cause } => Error::Rank {
            rank: rank.0,
            cause: cause.to_string(),
            teller: Teller::Here,
        },
        RunError::Panicked { rank, message } => Error::Rank {
            rank: rank.0,
            cause: format!("panicked: {message}"),
            teller: Teller::Here,
        },
        other => Error::Rank {
            rank: other.rank().0,
            cause: other.to_string(),
            teller: Teller::Here,
        },
    })
}

/// Compute threads of each rank: as configured, or the cores of this process divided among the
/// ranks that share them.
pub fn threads_per_rank(args: &CheckedArguments) -> usize {
    match args.compute.threads_per_rank {
        ThreadsPerRank::Count(count) => count.get(),
        ThreadsPerRank::Auto => (num_cores() / args.core_sharers()).max(1),
    }
}

/// Cores of all ranks on this host together, where the others are bound as this process is.
pub(crate) fn cores_here(args: &CheckedArguments) -> usize {
    num_cores() * args.ranks_here() / args.core_sharers()
}

/// How many ranks this process has cores for.
pub(crate) fn ranks_at_once(args: &CheckedArguments) -> usize {
    (num_cores() / threads_per_rank(args)).max(1)
}

/// An error with its causes in one line, as other ranks will read it.
#[derive(Debug)]
struct Cause(Error);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&chain(&self.0))
    }
}

/// The layout of all ranks.
pub fn get_topo(mpu: &Mpu) -> &Topology {
    mpu.topology()
}

/// This rank's groups along one axis of the layout, by the axis.
pub fn get_grid(mpu: &Mpu) -> BTreeMap<Axis, &Group> {
    let axes = [Axis::Pipeline, Axis::Data, Axis::Sequence, Axis::Tensor];
    axes.into_iter()
        .map(|axis| (axis, mpu.axis_group(axis)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::MerakArguments, error::ConfigError};
    use merak_mpu::testing;

    /// What `body` returns in each of some processes, played by threads.
    fn processes<T: Send>(num: usize, body: impl Fn(&World, usize) -> T + Sync) -> Vec<T> {
        testing::world(num, |member| {
            let rank = member.rank().0;
            let world = World::of_process(member, ChosenEngine::Tcp).unwrap();
            body(&world, rank)
        })
    }

    fn no_key(key: &'static str) -> Error {
        Error::Config(ConfigError::MissingKey {
            key,
            advice: "set it".to_owned(),
        })
    }

    #[test]
    fn a_rank_that_is_lost_in_the_first_collectives_is_named_by_each_of_the_others() {
        let told = testing::world(3, |member| {
            if member.rank().0 == 1 {
                member.abort("its process ended");
            }
            World::of_process(member, ChosenEngine::Tcp).unwrap_err()
        });
        assert!(matches!(told[1], Error::Group(_)), "{:?}", told[1]);
        for survivor in [&told[0], &told[2]] {
            assert_eq!(survivor.to_string(), "rank 1 failed: its process ended");
            assert!(matches!(
                survivor,
                Error::Rank {
                    teller: Teller::HereForOther,
                    ..
                }
            ));
        }
    }

    #[test]
    fn an_error_of_all_processes_is_told_by_the_first() {
        let errors = processes(3, |world, _| {
            world.agree::<()>(Err(no_key("data.path"))).unwrap_err()
        });
        assert!(matches!(
            errors[0],
            Error::Config(ConfigError::MissingKey { .. })
        ));
        for error in &errors[1..] {
            assert!(matches!(error, Error::Told(_)), "{error:?}");
            assert_eq!(error.is_user_error(), errors[0].is_user_error());
        }
    }

    #[test]
    fn processes_without_an_error_hear_the_first_one_of_the_others() {
        let outcomes = processes(4, |world, rank| {
            let prepared = match rank {
                2 => Err(no_key("data.path")),
                3 => Err(no_key("output_dir")),
                rank => Ok(rank),
            };
            world.agree(prepared).unwrap_err()
        });
        let own: Vec<_> = outcomes.iter().map(|error| chain(error)).collect();
        assert!(matches!(
            outcomes[2],
            Error::Config(ConfigError::MissingKey { .. })
        ));
        assert!(matches!(
            outcomes[3],
            Error::Config(ConfigError::MissingKey { .. })
        ));
        assert_eq!(own[0], format!("rank 2 failed: {}", own[2]));
        assert_eq!(own[0], own[1]);
        assert!(matches!(outcomes[0], Error::Rank { rank: 2, .. }));
    }

    #[test]
    fn all_processes_have_what_the_first_one_makes() {
        let shared = processes(3, |world, rank| {
            world.share(|| Ok(format!("made by {rank}"))).unwrap()
        });
        assert_eq!(shared, ["made by 0"; 3]);
    }

    /// What processes say whose configurations have these degrees.
    fn told_of(degrees: &[usize]) -> Vec<String> {
        processes(degrees.len(), |world, rank| {
            let text = format!("dp = 4\ntp = {}\n", degrees[rank]);
            let same = world.check_same("the configuration", &text);
            same.map_or_else(|error| chain(&error), |()| "same".to_owned())
        })
    }

    #[test]
    fn the_process_with_another_text_than_most_names_the_line_also_where_it_is_the_first() {
        assert_eq!(told_of(&[1, 1, 1]), ["same"; 3]);
        for (odd, most) in [(1, "ranks 0 and 2"), (0, "ranks 1 and 2")] {
            let mut degrees = [1; 3];
            degrees[odd] = 2;
            let differs = format!(
                "the configuration differs from that of {most}: here \"tp = 2\", there \"tp = 1\""
            );
            let mut expected = [0; 3].map(|_| format!("rank {odd} failed: {differs}"));
            expected[odd] = differs;
            assert_eq!(told_of(&degrees), expected);
        }
    }

    #[test]
    fn a_tie_of_texts_names_both_sides() {
        let differs = "the configuration differs: rank 0 has \"tp = 1\", rank 1 has \"tp = 2\"";
        assert_eq!(told_of(&[1, 2]), [differs; 2]);
        let differs = "the configuration differs: ranks 0 and 3 have \"tp = 1\", ranks 1 and 2 \
                       have \"tp = 2\"";
        assert_eq!(told_of(&[1, 2, 2, 1]), [differs; 4]);
    }

    #[test]
    fn hosts_have_the_names_that_their_first_ranks_tell() {
        let names = ["n7", "n3", "n7", "n1"].map(|name| name.as_bytes().to_vec());
        assert_eq!(by_number(&[0, 1, 0, 2], &names), ["n7", "n3", "n1"]);
    }

    #[test]
    fn a_process_that_is_bound_to_cores_has_them_for_itself() {
        let args = MerakArguments {
            dp: 3,
            ..MerakArguments::default()
        };
        let args = args.check().unwrap();
        let bound = |core_sharers| args.clone().on(Host::of_processes(&[0; 3], core_sharers));
        let cores = num_cores();
        assert_eq!(threads_per_rank(&bound(1)), cores);
        assert_eq!(cores_here(&bound(1)), 3 * cores);
        assert_eq!(threads_per_rank(&bound(3)), (cores / 3).max(1));
        assert_eq!(cores_here(&bound(3)), cores);
        assert_eq!(cores_here(&args), cores);
    }

    #[test]
    fn a_process_that_fails_while_all_find_out_something_ends_the_others_at_once() {
        let told = processes(3, |world, rank| {
            let found = world.together(|member| {
                let group = member.world_group()?;
                // Every process has its world before one fails.
                group.barrier()?;
                if rank == 1 {
                    return Err(no_key("data.path"));
                }
                Ok(group.barrier()?)
            });
            found.unwrap_err()
        });
        assert!(matches!(told[1], Error::Config(_)));
        for survivor in [&told[0], &told[2]] {
            assert!(matches!(
                survivor,
                Error::Rank {
                    rank: 1,
                    teller: Teller::Other,
                    ..
                }
            ));
        }
        let threads = World::of_threads().together(|_| Ok(()));
        assert!(threads.unwrap().is_none());
    }

    #[test]
    fn a_rank_that_fails_has_its_own_error_and_the_others_name_it() {
        let mut arguments = MerakArguments {
            dp: 3,
            ..MerakArguments::default()
        };
        arguments.distributed.timeout_s = 20.0;
        let args = arguments.check().unwrap();
        let told = processes(3, |world, _| {
            let outcome = world.run(&args, |member| {
                let group = member.world_group()?;
                if member.rank().0 == 1 {
                    return Err(no_key("data.path"));
                }
                Ok(group.barrier()?)
            });
            outcome.unwrap_err()
        });
        assert!(matches!(
            told[1],
            Error::Config(ConfigError::MissingKey { .. })
        ));
        for survivor in [&told[0], &told[2]] {
            assert_eq!(
                chain(survivor),
                format!("rank 1 failed: {}", chain(&told[1]))
            );
            assert!(matches!(survivor, Error::Rank { rank: 1, .. }));
        }
    }
}
