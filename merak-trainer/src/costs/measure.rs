//! The profiling run: every kind of node of a model, on as many ranks as the run will have.

mod rank;

use self::rank::Rank;
use super::{Profile, calls::of_node, pipeline_cores};
use crate::{
    config::CheckedArguments,
    error::{Error, Result},
    network::Network,
    plan::param_bytes,
    world::{World, ranks_at_once, run_ranks, threads_per_rank},
};
use merak_mpu::{Degrees, Member, ReduceOp};
use merak_partition::RankPrograms;
use merak_trace::{Graph, StageProgram};
use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

/// How often all is measured again where the repetitions differ widely.
const FURTHER_ATTEMPTS: usize = 2;

/// The ranks that run the nodes as threads: those that share cores in the run. They take turns
/// here too, and find the caches as the others left them.
fn degrees(args: &CheckedArguments) -> Degrees {
    Degrees {
        dp: 1,
        pp: (args.core_sharers() / (args.tp * args.sp)).max(1),
        ..args.degrees()
    }
}

/// Whether every rank is a process that has the cores of its threads while all compute. Processes
/// take no turns: where they have fewer cores, the times of one hold those of others.
///
/// # Communication
/// Between processes, an all-reduce of a byte.
pub(super) fn have_cores(args: &CheckedArguments, world: &World) -> Result<bool> {
    let has_cores = args.core_sharers() <= ranks_at_once(args);
    let all = world.together(|member| {
        let group = member.world_group()?;
        Ok(group.all_reduce_scalar(u8::from(has_cores), ReduceOp::Min)?)
    })?;
    Ok(all == Some(1))
}

/// Times the nodes of a model's segments and an optimizer step: on the ranks of the run where
/// `world` is of processes, else on threads of this process. What these ranks exchange takes the
/// times of `exchanges`, and counts to no node.
///
/// # Communication
/// Between processes, what the nodes exchange, and all-gathers of the times, whose mean all have.
///
/// # Errors
/// When a node fails.
pub(super) fn profile(
    graph: &Graph,
    programs: &[StageProgram],
    args: &CheckedArguments,
    exchanges: Network,
    world: &World,
) -> Result<Profile> {
    let threads = threads_per_rank(args);
    let kinds = Kinds::of(programs);
    let timed = |member: Member, degrees: Degrees| {
        Rank::new(member, degrees, graph, &kinds, args, threads)?.measured(&exchanges)
    };
    let measure = || {
        let all = world.together(|member| {
            let own = timed(member.clone(), args.degrees())?;
            of_all(member, &own)
        })?;
        let ranks = match all {
            Some(ranks) => ranks,
            None => of_threads(args, &timed)?,
        };
        Ok::<_, Error>(mean(&ranks))
    };
    let mut profile = measure()?;
    // Another process may have used the machine, and may have finished.
    for _ in 0..FURTHER_ATTEMPTS {
        if profile.spread <= super::WIDE_SPREAD {
            break;
        }
        let next = measure()?;
        if next.spread < profile.spread {
            profile = next;
        }
    }
    profile.cores = pipeline_cores(args);
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    profile.measured_at = since.map_or(0, |since| since.as_secs());
    Ok(profile)
}

/// What `timed` says of threads, which share the cores of this process as its ranks do in the run.
fn of_threads(
    args: &CheckedArguments,
    timed: &(impl Fn(Member, Degrees) -> Result<Profile> + Sync),
) -> Result<Vec<Profile>> {
    let degrees = degrees(args);
    let mut ranks = run_ranks(degrees.world_size(), args, |member| timed(member, degrees))?;
    // All ranks updated at once, without turns.
    let part = ranks_at_once(args).min(ranks.len()) as f64 / ranks.len() as f64;
    for rank in &mut ranks {
        rank.per_param *= part;
    }
    Ok(ranks)
}

/// The times of all ranks, which every process reads from the same JSON.
fn of_all(member: &Member, own: &Profile) -> Result<Vec<Profile>> {
    let own = serde_json::to_vec(own).expect("it is plain data");
    let all = member.world_group()?.all_gather_bytes(own)?;
    let read = |json: &Vec<u8>| serde_json::from_slice(json).expect("a rank wrote it");
    Ok(all.iter().map(read).collect())
}

/// The mean over ranks.
fn mean(ranks: &[Profile]) -> Profile {
    let mut nodes: BTreeMap<String, f64> = BTreeMap::new();
    let share = 1.0 / ranks.len() as f64;
    for (node, seconds) in ranks.iter().flat_map(|rank| &rank.nodes) {
        *nodes.entry(node.clone()).or_default() += seconds * share;
    }
    Profile {
        nodes,
        per_node: ranks.iter().map(|rank| rank.per_node * share).sum(),
        per_param: ranks.iter().map(|rank| rank.per_param * share).sum(),
        spread: ranks.iter().map(|rank| rank.spread).fold(0.0, f64::max),
        ..Profile::default()
    }
}

/// Segments whose nodes are of the same kinds count once.
struct Kinds {
    /// One segment of each kind.
    programs: RankPrograms,
    /// For each segment its kind.
    order: Vec<usize>,
}

impl Kinds {
    fn of(programs: &[StageProgram]) -> Self {
        let mut known = BTreeMap::new();
        let mut distinct = Vec::new();
        let order = programs.iter().map(|program| {
            *known.entry(shape(program)).or_insert_with(|| {
                distinct.push((distinct.len(), Arc::new(program.clone())));
                distinct.len() - 1
            })
        });
        let order = order.collect();
        Self {
            programs: RankPrograms::of(distinct),
            order,
        }
    }
}

/// The signatures of a program's nodes, the types of its hops and the names of its inputs.
fn shape(program: &StageProgram) -> Vec<String> {
    let nodes = program.graph.nodes().iter();
    let mut shape: Vec<_> = nodes.map(|node| of_node(&program.graph, node)).collect();
    let hops = program.recv.iter().chain(&program.send);
    shape.extend(hops.map(|hop| hop.ty.to_string()));
    shape.extend(program.inputs.iter().map(|port| port.name.clone()));
    shape
}

/// Bytes that a profiling run needs: weights, gradients and optimizer state of one segment of each
/// kind, and the values of some microbatches, on every rank that takes part; or what exchanges
/// between ranks need afterwards.
pub(super) fn needed_bytes(programs: &[StageProgram], args: &CheckedArguments) -> u64 {
    let kinds = Kinds::of(programs).programs;
    // Each rank is a replica of its own.
    let params = param_bytes(args, 1).held(kinds.sums()).total() as u64;
    let live = kinds.stages.iter();
    let live = live.map(|(_, program)| program.live_bytes_without_reuse().input_half as u64);
    // As threads of the first rank, or as the processes of its host.
    let ranks = degrees(args).world_size().max(args.ranks_here()) as u64;
    let nodes = ranks.saturating_mul(params.saturating_add(4 * live.sum::<u64>()));
    nodes.max(Network::needed_bytes(args))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Config, Host},
        machine::num_cores,
        plan::{Draft, PlanInputs, SegmentedGraph},
    };
    use merak_mpu::{ChosenEngine, testing};
    use merak_trace::{Overlap, models};
    use serde_json::json;

    #[test]
    fn processes_that_have_their_cores_time_their_own_nodes_and_have_one_mean() {
        let line = ["--tp=2", "--compute.threads_per_rank=1"].map(str::to_owned);
        let args = Config::load(None, [], &line).unwrap().check().unwrap();
        let model = models::from_config(&json!({ "model_type": "gpt2", "vocab_size": 32,
            "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2 }));
        let inputs = PlanInputs::read(model.unwrap().into(), &args).unwrap();
        let (_, SegmentedGraph { graph, segments }) = Draft::new(&inputs, &args).unwrap();
        let graph = graph.with_overlap(Overlap::None);
        let programs = segments.programs(&graph, &[]).unwrap();
        let profiles = testing::tcp_world(2, |member| {
            let world = World::of_process(member, ChosenEngine::Tcp).unwrap();
            let on = |core_sharers| args.clone().on(Host::of_processes(&[0; 2], core_sharers));
            assert!(!have_cores(&on(num_cores() + 1), &world).unwrap());
            let args = on(1);
            assert!(have_cores(&args, &world).unwrap());
            profile(&graph, &programs, &args, Network::default(), &world).unwrap()
        });
        let [first, second] = [0, 1].map(|rank: usize| &profiles[rank]);
        assert!(!first.nodes.is_empty() && first.per_param > 0.0);
        // What each has measured differs.
        assert_eq!(first.nodes, second.nodes);
        let others = |of: &Profile| [of.per_node, of.per_param, of.spread].map(f64::to_bits);
        assert_eq!(others(first), others(second));
    }
}
