//! Where each rank lies on the four axes, and which ranks form a group.

use crate::{Axis, Coord, Degrees, Error, Rank, Result};

impl Degrees {
    /// Checks that every degree is at least 1.
    ///
    /// # Errors
    /// [`Error::ZeroDegree`] otherwise.
    pub fn check(&self) -> Result<()> {
        match Axis::ALL.into_iter().find(|&axis| self.get(axis) == 0) {
            Some(axis) => Err(Error::ZeroDegree { axis }),
            None => Ok(()),
        }
    }

    /// Checks that every degree is at least 1 and that they multiply to `world_size`.
    ///
    /// # Errors
    /// [`Error::ZeroDegree`] or [`Error::WorldSize`], which names the closest degrees that fit.
    ///
    /// ```
    /// use merak_mpu::Degrees;
    /// let error = Degrees { dp: 2, tp: 2, pp: 2, sp: 1 }.check_world(4).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "dp 2 x tp 2 x pp 2 x sp 1 = 8, but the world has 4 ranks; \
    ///      nearest that fits: dp 1 x tp 2 x pp 2 x sp 1",
    /// );
    /// ```
    pub fn check_world(&self, world_size: usize) -> Result<()> {
        self.check()?;
        if self.world_size() == world_size {
            return Ok(());
        }
        Err(Error::WorldSize {
            degrees: *self,
            world_size,
            nearest: self.nearest(world_size),
        })
    }
}

crate::named_enum! {
    /// A kind of group: its instances cover the world, and each rank is in one of them. Every rank
    /// creates the kinds in this order.
    ///
    /// | kind | varies | used for |
    /// |---|---|---|
    /// | `Tensor` | tp | collectives within a layer |
    /// | `Sequence` | sp | all-to-all of attention |
    /// | `Data` | dp | sharding of samples |
    /// | `Pipeline` | pp | sends between stages, broadcast of the loss |
    /// | `DataSequence` | dp, sp | gradient reduction, ZeRO, evaluation sums |
    /// | `SequenceTensor` | sp, tp | turns at computing where ranks wait for each other in a pass |
    /// | `Model` | tp, pp | global norm, overflow |
    /// | `Replica` | tp, pp, sp | generated tokens, stop flags |
    /// | `Stage` | tp, dp, sp | turns at computing where replicas wait for each other |
    /// | `World` | all | start, checkpoints |
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum GroupKind {
        /// Ranks that share each layer.
        Tensor = "tensor",
        /// Ranks that share each sample.
        Sequence = "sequence",
        /// Ranks that hold the same slice and see other samples.
        Data = "data",
        /// One rank of each stage.
        Pipeline = "pipeline",
        /// Ranks that hold the same parameters.
        DataSequence = "data_sequence",
        /// Ranks that share the work on a stage's samples.
        SequenceTensor = "sequence_tensor",
        /// Ranks that hold different parameters of one model.
        Model = "model",
        /// All ranks that work on the same samples.
        Replica = "replica",
        /// All ranks of the same stage.
        Stage = "stage",
        /// All ranks.
        World = "world",
    }
}

impl GroupKind {
    /// The axes along which members of one group differ.
    pub const fn varies(self) -> &'static [Axis] {
        match self {
            Self::Tensor => &[Axis::Tensor],
            Self::Sequence => &[Axis::Sequence],
            Self::Data => &[Axis::Data],
            Self::Pipeline => &[Axis::Pipeline],
            Self::DataSequence => &[Axis::Data, Axis::Sequence],
            Self::SequenceTensor => &[Axis::Sequence, Axis::Tensor],
            Self::Model => &[Axis::Pipeline, Axis::Tensor],
            Self::Replica => &[Axis::Pipeline, Axis::Sequence, Axis::Tensor],
            Self::Stage => &[Axis::Data, Axis::Sequence, Axis::Tensor],
            Self::World => &Axis::ALL,
        }
    }
}

/// The layout of ranks on the axes: pure arithmetic, the same on every rank.
///
/// `rank = ((pp * D + dp) * S + sp) * T + tp`, so with all degrees 2 the bits of a rank are
/// (pp, dp, sp, tp):
///
/// ```text
///              stage 0                        stage 1
///         sp 0       sp 1                sp 0       sp 1
/// dp 0    0  1       2  3        dp 0    8  9      10 11
/// dp 1    4  5       6  7        dp 1   12 13      14 15
///        tp0 tp1    tp0 tp1
/// ```
///
/// ```
/// use merak_mpu::{Axis, Degrees, GroupKind, Rank, Topology};
/// let topology = Topology::new(Degrees { dp: 2, tp: 2, pp: 2, sp: 2 })?;
/// let coord = topology.coord_of(Rank(0b1011))?;
/// assert_eq!((coord.pp, coord.dp, coord.sp, coord.tp), (1, 0, 1, 1));
/// assert_eq!(topology.axis_comm_lists(Axis::Pipeline)[3], [3, 11]);
/// assert_eq!(topology.group_of(GroupKind::Model, Rank(8))?, [0, 1, 8, 9]);
/// # Ok::<(), merak_mpu::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    degrees: Degrees,
}

impl Topology {
    /// Lays out `degrees.world_size()` ranks.
    ///
    /// # Errors
    /// [`Error::ZeroDegree`].
    pub fn new(degrees: Degrees) -> Result<Self> {
        degrees.check()?;
        Ok(Self { degrees })
    }

    /// The degrees of the axes.
    pub fn degrees(&self) -> Degrees {
        self.degrees
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.degrees.world_size()
    }

    /// The number of ranks along one axis.
    pub fn dim(&self, axis: Axis) -> usize {
        self.degrees.get(axis)
    }

    /// The rank at a place.
    ///
    /// # Errors
    /// [`Error::NoSuchCoordinate`] when an index is not below its degree.
    pub fn rank_of(&self, coord: Coord) -> Result<Rank> {
        for axis in Axis::ALL {
            self.check_index(axis, coord.get(axis))?;
        }
        Ok(self.rank_at(coord))
    }

    /// The place of a rank.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn coord_of(&self, rank: Rank) -> Result<Coord> {
        if rank.0 < self.world_size() {
            return Ok(self.place(rank));
        }
        Err(Error::NoSuchRank {
            rank: rank.0,
            group: "the world".into(),
            size: self.world_size(),
        })
    }

    /// All groups whose members differ along `axis` alone, in ascending order of their first
    /// member.
    pub fn axis_comm_lists(&self, axis: Axis) -> Vec<Vec<Rank>> {
        self.comm_lists(&[axis])
    }

    /// All groups of a kind, in ascending order of their first member.
    pub fn groups(&self, kind: GroupKind) -> Vec<Vec<Rank>> {
        self.comm_lists(kind.varies())
    }

    /// Whether a group of a kind has ranks on several hosts, where each host runs `ranks_per_host`
    /// ranks in a row.
    pub fn crosses_hosts(&self, kind: GroupKind, ranks_per_host: usize) -> bool {
        if self.world_size() <= ranks_per_host {
            return false;
        }
        // A group stays on a host where its neighbours along each axis do: in blocks of consecutive
        // ranks that hosts have a whole number of.
        kind.varies().iter().any(|&axis| {
            let block = self.stride(axis).saturating_mul(self.degrees.get(axis));
            self.degrees.get(axis) > 1 && !ranks_per_host.is_multiple_of(block)
        })
    }

    /// The distance between the ranks of neighbours along an axis.
    fn stride(&self, axis: Axis) -> usize {
        let Degrees { dp, tp, sp, .. } = self.degrees;
        match axis {
            Axis::Tensor => 1,
            Axis::Sequence => tp,
            Axis::Data => tp * sp,
            Axis::Pipeline => tp * sp * dp,
        }
    }

    /// The group of a kind that `rank` is in.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn group_of(&self, kind: GroupKind, rank: Rank) -> Result<Vec<Rank>> {
        let place = self.coord_of(rank)?;
        let fixed: Vec<_> = Axis::ALL
            .into_iter()
            .filter(|axis| !kind.varies().contains(axis))
            .map(|axis| (axis, place.get(axis)))
            .collect();
        Ok(self.filter_match(&fixed))
    }

    /// The groups of a weight that the given stages own copies of: one for each (dp, sp, tp).
    ///
    /// # Errors
    /// [`Error::NoSuchCoordinate`] when a stage does not exist; [`Error::BadGroup`] without a
    /// stage.
    pub fn tied_groups(&self, stages: &[usize]) -> Result<Vec<Vec<Rank>>> {
        for &stage in stages {
            self.check_index(Axis::Pipeline, stage)?;
        }
        if stages.is_empty() {
            return Err(Error::BadGroup {
                name: "tied".into(),
                members: Vec::new(),
                reason: "no stage owns it".into(),
            });
        }
        let mut groups = self.axis_comm_lists(Axis::Pipeline);
        for group in &mut groups {
            group.retain(|&rank| stages.contains(&self.place(rank).pp));
        }
        Ok(groups)
    }

    /// The ranks whose place has all the given indices, ascending.
    pub fn filter_match(&self, partial: &[(Axis, usize)]) -> Vec<Rank> {
        self.ranks()
            .filter(|&rank| {
                let place = self.place(rank);
                partial
                    .iter()
                    .all(|&(axis, index)| place.get(axis) == index)
            })
            .collect()
    }

    /// The ranks at one index of an axis, ascending.
    pub fn axis_list(&self, axis: Axis, index: usize) -> Vec<Rank> {
        self.filter_match(&[(axis, index)])
    }

    /// A name for files and logs, as in `pipe_00-data_01-tensor_00`, without the axes in `omit`.
    ///
    /// The sequence axis is named (`seq_00`, before `tensor`) only where it has more than one
    /// index.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn rank_repr(&self, rank: Rank, omit: &[Axis]) -> Result<String> {
        let place = self.coord_of(rank)?;
        let parts: Vec<String> = Axis::ALL
            .into_iter()
            .filter(|axis| !omit.contains(axis))
            .filter(|&axis| axis != Axis::Sequence || self.degrees.sp > 1)
            .map(|axis| {
                let name = match axis {
                    Axis::Pipeline => "pipe",
                    Axis::Data => "data",
                    Axis::Sequence => "seq",
                    Axis::Tensor => "tensor",
                };
                format!("{name}_{:02}", place.get(axis))
            })
            .collect();
        Ok(parts.join("-"))
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.world_size()).map(Rank)
    }

    fn comm_lists(&self, varies: &[Axis]) -> Vec<Vec<Rank>> {
        let mut groups = std::collections::BTreeMap::<Coord, Vec<Rank>>::new();
        for rank in self.ranks() {
            let first = varies
                .iter()
                .fold(self.place(rank), |place, &axis| place.with(axis, 0));
            groups.entry(first).or_default().push(rank);
        }
        groups.into_values().collect()
    }

    fn rank_at(&self, coord: Coord) -> Rank {
        let Degrees { dp, tp, sp, .. } = self.degrees;
        Rank(((coord.pp * dp + coord.dp) * sp + coord.sp) * tp + coord.tp)
    }

    fn place(&self, rank: Rank) -> Coord {
        let Degrees { dp, tp, sp, .. } = self.degrees;
        Coord {
            pp: rank.0 / tp / sp / dp,
            dp: rank.0 / tp / sp % dp,
            sp: rank.0 / tp % sp,
            tp: rank.0 % tp,
        }
    }

    fn check_index(&self, axis: Axis, index: usize) -> Result<()> {
        let degree = self.degrees.get(axis);
        if index < degree {
            return Ok(());
        }
        Err(Error::NoSuchCoordinate {
            axis,
            index,
            degree,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cube() -> Topology {
        let degrees = Degrees {
            dp: 2,
            tp: 2,
            pp: 2,
            sp: 2,
        };
        Topology::new(degrees).unwrap()
    }

    #[test]
    fn groups_of_sixteen_ranks_are_those_of_the_table() {
        let pairs =
            |distance: usize, firsts: [usize; 8]| firsts.map(|r| vec![r, r + distance]).to_vec();
        let expected = [
            (GroupKind::Tensor, pairs(1, [0, 2, 4, 6, 8, 10, 12, 14])),
            (GroupKind::Sequence, pairs(2, [0, 1, 4, 5, 8, 9, 12, 13])),
            (GroupKind::Data, pairs(4, [0, 1, 2, 3, 8, 9, 10, 11])),
            (GroupKind::Pipeline, pairs(8, [0, 1, 2, 3, 4, 5, 6, 7])),
            (
                GroupKind::DataSequence,
                vec![
                    vec![0, 2, 4, 6],
                    vec![1, 3, 5, 7],
                    vec![8, 10, 12, 14],
                    vec![9, 11, 13, 15],
                ],
            ),
            (
                GroupKind::Model,
                vec![
                    vec![0, 1, 8, 9],
                    vec![2, 3, 10, 11],
                    vec![4, 5, 12, 13],
                    vec![6, 7, 14, 15],
                ],
            ),
            (
                GroupKind::Replica,
                vec![
                    vec![0, 1, 2, 3, 8, 9, 10, 11],
                    vec![4, 5, 6, 7, 12, 13, 14, 15],
                ],
            ),
            (GroupKind::World, vec![(0..16).collect()]),
        ];
        for (kind, groups) in expected {
            assert_eq!(cube().groups(kind), groups, "{kind}");
        }
        assert_eq!(
            cube().tied_groups(&[0, 1]).unwrap(),
            pairs(8, [0, 1, 2, 3, 4, 5, 6, 7])
        );
    }

    #[test]
    fn a_tied_group_spans_only_the_stages_that_own_the_weight() {
        let degrees = Degrees {
            pp: 4,
            tp: 2,
            ..Degrees::default()
        };
        let topology = Topology::new(degrees).unwrap();
        assert_eq!(topology.tied_groups(&[0, 3]).unwrap(), [[0, 6], [1, 7]]);
        assert_eq!(topology.tied_groups(&[2]).unwrap(), [[4], [5]]);
        assert_eq!(
            topology.tied_groups(&[0, 4]).unwrap_err().to_string(),
            "pipeline 4 does not exist: pp is 4, so the last is 3"
        );
        assert!(topology.tied_groups(&[]).is_err());
    }

    #[test]
    fn ranks_have_names_for_files() {
        let degrees = Degrees {
            dp: 2,
            pp: 2,
            ..Degrees::default()
        };
        let topology = Topology::new(degrees).unwrap();
        let name = |rank, omit: &[Axis]| topology.rank_repr(Rank(rank), omit).unwrap();
        assert_eq!(name(1, &[]), "pipe_00-data_01-tensor_00");
        assert_eq!(name(3, &[Axis::Data]), "pipe_01-tensor_00");
        assert_eq!(
            cube().rank_repr(Rank(11), &[]).unwrap(),
            "pipe_01-data_00-seq_01-tensor_01"
        );
        assert_eq!(
            topology.rank_repr(Rank(4), &[]).unwrap_err().to_string(),
            "rank 4 does not exist in the world, which has 4 ranks"
        );
    }

    #[test]
    fn matching_ranks_are_found_by_part_of_their_place() {
        let found = cube().filter_match(&[(Axis::Pipeline, 1), (Axis::Tensor, 0)]);
        assert_eq!(found, [8, 10, 12, 14]);
        assert_eq!(cube().axis_list(Axis::Data, 0), [0, 1, 2, 3, 8, 9, 10, 11]);
    }

    proptest! {
        #[test]
        fn a_place_and_its_rank_are_inverse(dp in 1..4_usize, tp in 1..4_usize, pp in 1..4_usize, sp in 1..4_usize) {
            let topology = Topology::new(Degrees { dp, tp, pp, sp }).unwrap();
            for rank in topology.ranks() {
                let place = topology.coord_of(rank).unwrap();
                prop_assert_eq!(topology.rank_of(place).unwrap(), rank);
            }
        }

        #[test]
        fn the_groups_of_a_kind_cover_each_rank_once(dp in 1..4_usize, tp in 1..4_usize, pp in 1..4_usize, sp in 1..4_usize) {
            let topology = Topology::new(Degrees { dp, tp, pp, sp }).unwrap();
            for kind in GroupKind::ALL {
                let groups = topology.groups(kind);
                let mut all: Vec<Rank> = groups.concat();
                all.sort_unstable();
                prop_assert!(all.into_iter().eq(topology.ranks()));
                for group in groups {
                    prop_assert!(group.is_sorted());
                    prop_assert_eq!(topology.group_of(kind, group[0]).unwrap(), group);
                }
            }
        }
    }

    #[test]
    fn groups_cross_hosts_where_one_of_them_has_ranks_on_two() {
        for world in [1, 2, 6, 8, 12] {
            for degrees in Degrees::filling(world) {
                let topology = Topology::new(degrees).unwrap();
                for (kind, of_host) in GroupKind::ALL
                    .into_iter()
                    .flat_map(|kind| (1..=world).map(move |of_host| (kind, of_host)))
                {
                    let host = |rank: &Rank| rank.0 / of_host;
                    let crosses = topology.groups(kind).iter().any(|group| {
                        let first = host(&group[0]);
                        group.iter().any(|rank| host(rank) != first)
                    });
                    let found = topology.crosses_hosts(kind, of_host);
                    assert_eq!(found, crosses, "{degrees} {kind} {of_host}");
                }
            }
        }
    }

    #[test]
    fn a_zero_degree_is_named() {
        let error = Degrees {
            tp: 0,
            ..Degrees::default()
        }
        .check()
        .unwrap_err();
        assert_eq!(error.to_string(), "tp is 0, but a degree is at least 1");
    }

    #[test]
    fn a_product_too_large_for_a_number_is_still_an_error() {
        let degrees = Degrees {
            dp: usize::MAX,
            tp: 2,
            pp: 2,
            sp: 1,
        };
        assert!(degrees.check_world(4).is_err());
    }
}
