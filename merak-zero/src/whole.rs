//! What rules that need whole tensors exchange with the other ranks that hold pieces of them.

use crate::{Error, ParamSpec, Result};
use merak_mpu::{Group, ReduceOp};

/// The ranks that hold the pieces of the same parameters; `None` where no parameter is cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PieceHolders<'a> {
    pub(crate) group: Option<&'a Group>,
}

impl PieceHolders<'_> {
    pub(crate) fn num_ranks(self) -> usize {
        self.group.map_or(1, Group::world_size)
    }

    /// Checks that these ranks together hold all of a parameter.
    pub(crate) fn check(self, spec: &ParamSpec) -> Result<()> {
        let num_ranks = self.num_ranks();
        let is_whole = spec.cut.as_ref().is_none_or(|cut| {
            let own: usize = cut.rooms(num_ranks).sum();
            spec.shape.get(cut.dim) == Some(&own)
        });
        if is_whole {
            return Ok(());
        }
        Err(Error::OtherPieces {
            param: spec.name.clone(),
            num_ranks,
        })
    }

    /// Adds up sums over the pieces of parameters, where they lie.
    pub(crate) fn sum(self, sums: Vec<&mut [f64]>) -> Result<()> {
        let own: Vec<f64> = sums.iter().flat_map(|sums| sums.iter().copied()).collect();
        let Some(group) = self.group.filter(|_| !own.is_empty()) else {
            return Ok(());
        };
        let all = group
            .all_reduce_vec(own, ReduceOp::Sum)
            .map_err(Error::communication("sum over the pieces of parameters"))?;
        let mut rest = all.as_slice();
        for sums in sums {
            let (values, behind) = rest.split_at(sums.len());
            sums.copy_from_slice(values);
            rest = behind;
        }
        Ok(())
    }

    /// Lets one rank each change whole tensors, of which every rank has a piece, at most one tensor
    /// for each rank: rank `i` gets the pieces of the `i`-th, calls `change` with `i` and the whole
    /// tensor, and returns the pieces. Returns the changed pieces of this rank.
    pub(crate) fn change_whole(
        self,
        specs: &[&ParamSpec],
        mut pieces: Vec<Vec<f32>>,
        change: impl Fn(usize, &mut Vec<f32>),
    ) -> Result<Vec<Vec<f32>>> {
        let Some(group) = self.group else {
            for (index, whole) in pieces.iter_mut().enumerate() {
                change(index, whole);
            }
            return Ok(pieces);
        };
        let (rank, num_ranks) = (group.rank(), group.world_size());
        let at = Error::communication("exchange of pieces of parameters");
        let mut lengths: Vec<usize> = pieces.iter().map(Vec::len).collect();
        lengths.resize(num_ranks, 0);
        let received = group.all_to_all_parts_vec(pieces.concat(), &lengths);
        let mut parts = received.map_err(at)?;
        if let Some(spec) = specs.get(rank) {
            let mut whole = vec![0.0; spec.whole_numel()];
            for (holder, part) in parts.iter().enumerate() {
                each_run(spec, holder, num_ranks, |at, local, len| {
                    whole[at..at + len].copy_from_slice(&part[local..local + len]);
                });
            }
            change(rank, &mut whole);
            for (holder, part) in parts.iter_mut().enumerate() {
                each_run(spec, holder, num_ranks, |at, local, len| {
                    part[local..local + len].copy_from_slice(&whole[at..at + len]);
                });
            }
        }
        let back: Vec<usize> = parts.iter().map(Vec::len).collect();
        let at = Error::communication("exchange of pieces of parameters");
        let mut changed = group
            .all_to_all_parts_vec(parts.concat(), &back)
            .map_err(at)?;
        changed.truncate(specs.len());
        Ok(changed)
    }
}

/// Calls `f` for adjacent elements of a rank's piece of a cut parameter: their place in the whole,
/// their place in the piece, and their number.
fn each_run(
    spec: &ParamSpec,
    rank: usize,
    num_ranks: usize,
    mut f: impl FnMut(usize, usize, usize),
) {
    let Some(cut) = &spec.cut else { return };
    let whole = cut.whole(&spec.shape);
    let inner: usize = whole[cut.dim + 1..].iter().product();
    let outer: usize = whole[..cut.dim].iter().product();
    let ranges = cut.ranges(rank, num_ranks);
    let mut local = 0;
    for outer in 0..outer {
        for (range, room) in ranges.iter().zip(cut.rooms(num_ranks)) {
            let at = (outer * whole[cut.dim] + range.start) * inner;
            f(at, local, range.len() * inner);
            // Padding may follow.
            local += room * inner;
        }
    }
}
