//! The model parallel unit: one rank's place on the axes and its groups.

use crate::{
    Axis, Coord, Degrees, Error, Group, GroupKind, Locality, Member, Rank, Result, Topology,
};
use std::collections::BTreeMap;

/// The key of the tied group that [`Mpu::embedding_group`] returns.
pub const EMBEDDING: &str = "embedding";

/// One rank's place in a parallel run: its coordinates, its neighbours and all its groups.
///
/// Every rank makes it with the same degrees and then the same tied groups in the same order.
/// Making it does not communicate. Here `model_parallel` always means tensor x pipeline.
///
/// ```
/// use merak_mpu::{Degrees, EMBEDDING, Mpu, ReduceOp, threads};
/// let degrees = Degrees { tp: 2, pp: 2, ..Degrees::default() };
/// threads::run(4, threads::WorldOptions::default(), |member| {
///     let mpu = Mpu::new(member, degrees)?.with_tied(EMBEDDING, &[0, 1])?;
///     assert_eq!(mpu.next_stage_rank().is_none(), mpu.is_last_stage());
///     let tensor = mpu.tensor_parallel_group();
///     assert_eq!(tensor.all_reduce_scalar(1_i64, ReduceOp::Sum)?, 2);
///     let tied = mpu.embedding_group()?.expect("both stages own the embedding");
///     assert_eq!(tied.members(), mpu.pipeline_parallel_group().members());
///     Ok::<_, merak_mpu::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Mpu {
    member: Member,
    topology: Topology,
    coord: Coord,
    /// In the order of [`GroupKind::ALL`].
    groups: Vec<Group>,
    /// By key; `None` where this rank's stage does not own the weight.
    tied: BTreeMap<String, Option<Group>>,
}

impl Mpu {
    /// Takes this member's place in a world of the given degrees and joins its groups.
    ///
    /// # Communication
    /// None.
    ///
    /// # Errors
    /// [`Error::ZeroDegree`], [`Error::WorldSize`]; [`Error::OtherDegrees`] when this member was
    /// set up with other degrees and that was not [destroyed](Mpu::destroy); [`Error::Aborted`].
    pub fn new(member: Member, degrees: Degrees) -> Result<Self> {
        degrees.check_world(member.world_size())?;
        let first = *member.degrees().get_or_insert(degrees);
        if first != degrees {
            return Err(Error::OtherDegrees {
                first,
                second: degrees,
            });
        }
        let topology = Topology::new(degrees)?;
        let coord = topology.coord_of(member.rank())?;
        let groups = GroupKind::ALL
            .into_iter()
            .map(|kind| member.group(kind.as_str(), &topology.group_of(kind, member.rank())?))
            .collect::<Result<_>>()?;
        Ok(Self {
            member,
            topology,
            coord,
            groups,
            tied: BTreeMap::new(),
        })
    }

    /// Adds the group of a weight that `stages` own copies of; every rank calls this, owner or not.
    ///
    /// # Communication
    /// None.
    ///
    /// # Errors
    /// [`Error::NoSuchCoordinate`] for a stage that does not exist, [`Error::TiedGroupExists`],
    /// [`Error::Aborted`].
    pub fn with_tied(mut self, key: &str, stages: &[usize]) -> Result<Self> {
        if self.tied.contains_key(key) {
            return Err(Error::TiedGroupExists {
                key: key.to_owned(),
            });
        }
        let mine = self
            .topology
            .tied_groups(stages)?
            .into_iter()
            .find(|members| members.contains(&self.rank()));
        let name = format!("tied {key}");
        let group = mine
            .map(|members| self.member.group(&name, &members))
            .transpose()?;
        self.tied.insert(key.to_owned(), group);
        Ok(self)
    }

    /// This rank of the world.
    pub fn rank(&self) -> Rank {
        self.member.rank()
    }

    /// The host and the place there that this rank runs on.
    pub fn locality(&self) -> Locality {
        self.member.locality()
    }

    /// Whether memory of devices goes to other ranks without the host.
    pub fn moves_device_memory(&self) -> bool {
        self.member.moves_device_memory()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.topology.world_size()
    }

    /// This rank's place on the axes.
    pub fn coord(&self) -> Coord {
        self.coord
    }

    /// The layout of all ranks.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The degrees of all axes.
    pub fn degrees(&self) -> Degrees {
        self.topology.degrees()
    }

    /// This rank's membership of the world, to join further groups.
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// This rank's group of a kind.
    pub fn group(&self, kind: GroupKind) -> &Group {
        &self.groups[kind as usize]
    }

    /// The group along one axis.
    pub fn axis_group(&self, axis: Axis) -> &Group {
        self.group(match axis {
            Axis::Pipeline => GroupKind::Pipeline,
            Axis::Data => GroupKind::Data,
            Axis::Sequence => GroupKind::Sequence,
            Axis::Tensor => GroupKind::Tensor,
        })
    }

    /// The ranks that hold different parameters of one model: tensor x pipeline.
    pub fn model_parallel_group(&self) -> &Group {
        self.group(GroupKind::Model)
    }

    /// The ranks that work on the same samples: tensor x pipeline x sequence.
    pub fn replica_group(&self) -> &Group {
        self.group(GroupKind::Replica)
    }

    /// The ranks of the same stage: tensor x data x sequence.
    pub fn stage_group(&self) -> &Group {
        self.group(GroupKind::Stage)
    }

    /// All ranks.
    pub fn world_group(&self) -> &Group {
        self.group(GroupKind::World)
    }

    /// The group of a tied weight, or `None` where this rank's stage does not own it.
    ///
    /// # Errors
    /// [`Error::UnknownTiedGroup`] when no such group was made.
    pub fn tied_group(&self, key: &str) -> Result<Option<&Group>> {
        match self.tied.get(key) {
            Some(group) => Ok(group.as_ref()),
            None => Err(Error::UnknownTiedGroup {
                key: key.to_owned(),
                known: self.tied.keys().cloned().collect(),
            }),
        }
    }

    /// The group of the input embedding, made with the key [`EMBEDDING`].
    ///
    /// # Errors
    /// [`Error::UnknownTiedGroup`] when the embedding is not tied.
    pub fn embedding_group(&self) -> Result<Option<&Group>> {
        self.tied_group(EMBEDDING)
    }

    /// The first rank of this tensor group, `rank / T * T`: where its input comes from.
    pub fn tensor_parallel_src_rank(&self) -> Rank {
        let tp = self.degrees().tp;
        Rank(self.rank().0 / tp * tp)
    }

    /// The rank with this one's other coordinates on the previous stage, if there is one.
    pub fn prev_stage_rank(&self) -> Option<Rank> {
        let stage = self.coord.pp.checked_sub(1)?;
        self.stage_to_global(stage).ok()
    }

    /// The rank with this one's other coordinates on the next stage, if there is one.
    pub fn next_stage_rank(&self) -> Option<Rank> {
        self.stage_to_global(self.coord.pp + 1).ok()
    }

    /// Whether this rank has the first stage.
    pub fn is_first_stage(&self) -> bool {
        self.coord.pp == 0
    }

    /// Whether this rank has the last stage.
    pub fn is_last_stage(&self) -> bool {
        self.coord.pp + 1 == self.degrees().pp
    }

    /// The rank with this one's other coordinates on a stage.
    ///
    /// # Errors
    /// [`Error::NoSuchCoordinate`].
    pub fn stage_to_global(&self, stage: usize) -> Result<Rank> {
        self.topology
            .rank_of(self.coord.with(Axis::Pipeline, stage))
    }

    /// Whether this is the rank that reports progress.
    pub fn is_rank_0(&self) -> bool {
        self.rank() == 0
    }

    /// Logs a message on rank 0 alone.
    pub fn print_rank_0(&self, message: &str) {
        if self.is_rank_0() {
            tracing::info!(rank = 0, "{message}");
        }
    }

    /// Leaves all groups; the member may then be set up with other degrees.
    pub fn destroy(self) {
        *self.member.degrees() = None;
    }
}

/// `<axis>_parallel_rank`, `_world_size` and `_group` for the axes that have all three.
macro_rules! axis_methods {
    ($($what:literal $kind:ident: $rank:ident $size:ident $group:ident),* $(,)?) => {
        impl Mpu {$(
            #[doc = concat!("This rank's place in its ", $what, " group.")]
            pub fn $rank(&self) -> usize {
                self.group(GroupKind::$kind).rank()
            }

            #[doc = concat!("The number of ranks in a ", $what, " group.")]
            pub fn $size(&self) -> usize {
                self.group(GroupKind::$kind).world_size()
            }

            #[doc = concat!("This rank's ", $what, " group; [`GroupKind::", stringify!($kind), "`].")]
            pub fn $group(&self) -> &Group {
                self.group(GroupKind::$kind)
            }
        )*}
    };
}
axis_methods!(
    "data parallel" Data: data_parallel_rank data_parallel_world_size data_parallel_group,
    "tensor parallel" Tensor: tensor_parallel_rank tensor_parallel_world_size tensor_parallel_group,
    "pipeline parallel" Pipeline: pipeline_parallel_rank pipeline_parallel_world_size pipeline_parallel_group,
    "sequence parallel" Sequence: sequence_parallel_rank sequence_parallel_world_size sequence_parallel_group,
    "data x sequence parallel" DataSequence: data_sequence_parallel_rank data_sequence_parallel_world_size data_sequence_parallel_group,
    "sequence x tensor parallel" SequenceTensor: sequence_tensor_parallel_rank sequence_tensor_parallel_world_size sequence_tensor_parallel_group,
);
