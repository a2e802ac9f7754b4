//! Collectives that cut and join: a backend's splits and joins around an exchange between ranks.

use super::Interpreter;
use crate::{
    Error, Op, Result, TensorType, Value,
    backend::Call,
    op::{Reduction, RegionKind},
    placement::Shard,
};
use merak_mpu::{Buffer, Call as Collective, Communicator, Group, Pending, ReduceOp};
use std::slice;

/// A value on its way over the border of a region.
pub(super) enum Crossing {
    /// No other rank is needed.
    Done(Value),
    /// Other ranks are.
    Started(Started),
}

/// A collective under way.
#[derive(Debug)]
pub(super) struct Started {
    pending: Pending<Box<dyn Buffer>>,
    /// The type of what comes from each rank, or of the result.
    received: TensorType,
    degree: usize,
}

/// The error of a collective or message of a node.
pub(super) fn failed(call: Call<'_>, source: merak_mpu::Error) -> Error {
    Error::Collective {
        node: call.name.to_owned(),
        source,
    }
}

impl Interpreter {
    /// Takes a value over the border of a region whose work is split over a group, as far as that
    /// needs no other rank.
    pub(super) fn start_crossing(
        &self,
        call: Call<'_>,
        value: Value,
        group: &Group,
        kind: RegionKind<'_>,
    ) -> Result<Crossing> {
        let degree = group.world_size();
        let (value, received, collective) = match kind {
            RegionKind::CopyTo => return Ok(Crossing::Done(value)),
            RegionKind::Scatter(shard) => {
                let pieces = self.pieces(call, value, shard, degree)?;
                let own = self.slice(call, &pieces, shard, (group.rank(), degree))?;
                return Ok(Crossing::Done(own));
            }
            RegionKind::AllReduce(reduction) => {
                let op = match reduction {
                    Reduction::Sum => ReduceOp::Sum,
                    Reduction::Max => ReduceOp::Max,
                };
                (value, call.results[0].clone(), Collective::AllReduce(op))
            }
            RegionKind::AllGather { .. } => {
                let local = value.ty().clone();
                (value, local, Collective::AllGather)
            }
            RegionKind::ReduceScatter(shard) => {
                let stacked = self.stacked_slices(call, value, shard, degree)?;
                let sum = Collective::ReduceScatter(ReduceOp::Sum);
                (stacked, call.results[0].clone(), sum)
            }
            RegionKind::AllToAll { to, .. } => {
                let piece = value.ty().with_dim(to.dim, to.local_size(degree));
                let stacked = self.stacked_slices(call, value, to, degree)?;
                (stacked, piece, Collective::AllToAll)
            }
        };
        let buffer = self.backend.into_buffer(value)?;
        let started = group.start(collective, buffer, None);
        let pending = started.map_err(|source| failed(call, source))?;
        Ok(Crossing::Started(Started {
            pending,
            received,
            degree,
        }))
    }

    /// Waits for what was started, and puts the parts of all ranks together.
    pub(super) fn finish_crossing(
        &self,
        call: Call<'_>,
        started: Started,
        kind: RegionKind<'_>,
    ) -> Result<Value> {
        let Started {
            pending,
            received,
            degree,
        } = started;
        let buffer = pending.wait().map_err(|source| failed(call, source))?;
        match kind {
            // The parts of all ranks arrive in rank order.
            RegionKind::AllGather { shard, .. } | RegionKind::AllToAll { from: shard, .. } => {
                let parts = self.by_rank(call, &received, buffer, degree)?;
                self.join(call, parts, shard)
            }
            RegionKind::AllReduce(_)
            | RegionKind::ReduceScatter(_)
            | RegionKind::CopyTo
            | RegionKind::Scatter(_) => self.backend.from_buffer(&received, buffer),
        }
    }

    /// The values of type `local` of `degree` ranks, which lie one after the other.
    fn by_rank(
        &self,
        call: Call<'_>,
        local: &TensorType,
        all: Box<dyn Buffer>,
        degree: usize,
    ) -> Result<Vec<Value>> {
        let mut stacked = vec![degree];
        stacked.extend(&local.shape);
        let stacked = self.backend.from_buffer(&local.with_shape(stacked), all)?;
        let rows = self.split(call, stacked, 0, &vec![1; degree])?;
        let of_rank = |row| self.reshape(call, row, local);
        rows.into_iter().map(of_rank).collect()
    }

    /// The slices of all `degree` ranks, one after the other in memory.
    fn stacked_slices(
        &self,
        call: Call<'_>,
        value: Value,
        shard: &Shard,
        degree: usize,
    ) -> Result<Value> {
        let pieces = self.pieces(call, value, shard, degree)?;
        let row_of_rank = |rank| {
            let slice = self.slice(call, &pieces, shard, (rank, degree))?;
            let row = [&[1], &slice.ty().shape[..]].concat();
            let ty = slice.ty().with_shape(row);
            self.reshape(call, slice, &ty)
        };
        let rows = (0..degree).map(row_of_rank).collect::<Result<_>>()?;
        drop(pieces);
        self.concat(call, rows, 0)
    }

    /// The slice of one rank of `degree`, of its pieces of all parts and the padding after them.
    fn slice(
        &self,
        call: Call<'_>,
        pieces: &[Value],
        shard: &Shard,
        (rank, degree): (usize, usize),
    ) -> Result<Value> {
        let mut own = Vec::with_capacity(2 * shard.parts.len());
        for (part, room) in shard.local_parts(degree).enumerate() {
            let piece = &pieces[part * degree + shard.turned(part, rank, degree)];
            let padding = room - piece.ty().shape[shard.dim];
            own.push(piece.clone());
            if padding > 0 {
                let ty = piece.ty().with_dim(shard.dim, padding);
                let zeros = Op::Zeros {
                    shape: ty.shape.clone(),
                    dtype: ty.dtype,
                };
                own.push(self.run_one(call, &zeros, &ty, vec![])?);
            }
        }
        self.concat(call, own, shard.dim)
    }

    /// The pieces of all `degree` ranks of each part of a cut dimension, in its order.
    fn pieces(
        &self,
        call: Call<'_>,
        value: Value,
        shard: &Shard,
        degree: usize,
    ) -> Result<Vec<Value>> {
        let parts = 0..shard.parts.len();
        let of_part = |part| {
            let owner = move |index| shard.turned(part, index, degree);
            (0..degree).map(move |index| shard.own_of_part(part, owner(index), degree).len())
        };
        let sizes: Vec<_> = parts.flat_map(of_part).collect();
        self.split(call, value, shard.dim, &sizes)
    }

    /// The whole of the slices of all ranks, part by part.
    fn join(&self, call: Call<'_>, slices: Vec<Value>, shard: &Shard) -> Result<Value> {
        let degree = slices.len();
        let part_sizes: Vec<_> = shard.local_parts(degree).collect();
        let split = |slice| self.split(call, slice, shard.dim, &part_sizes);
        let by_rank = slices.into_iter().map(split).collect::<Result<Vec<_>>>()?;
        let mut pieces = Vec::with_capacity(degree * part_sizes.len());
        for (part, &size) in part_sizes.iter().enumerate() {
            for index in 0..degree {
                let rank = shard.turned(part, index, degree);
                let own = shard.own_of_part(part, rank, degree).len();
                let piece = by_rank[rank][part].clone();
                match own {
                    0 => {}
                    _ if own == size => pieces.push(piece),
                    // Padding follows.
                    _ => {
                        let sizes = [own, size - own];
                        pieces.push(self.split(call, piece, shard.dim, &sizes)?.swap_remove(0));
                    }
                }
            }
        }
        self.concat(call, pieces, shard.dim)
    }

    fn reshape(&self, call: Call<'_>, value: Value, ty: &TensorType) -> Result<Value> {
        let shape = ty.shape.clone();
        self.run_one(call, &Op::Reshape { shape }, ty, vec![value])
    }

    fn split(
        &self,
        call: Call<'_>,
        value: Value,
        dim: usize,
        sizes: &[usize],
    ) -> Result<Vec<Value>> {
        if sizes.len() == 1 {
            return Ok(vec![value]);
        }
        let of_size = |&size: &usize| value.ty().with_dim(dim, size);
        let results: Vec<_> = sizes.iter().map(of_size).collect();
        let sizes = sizes.to_vec();
        let call = Call {
            op: &Op::Split { dim, sizes },
            results: &results,
            ..call
        };
        self.backend.run(call, vec![value])
    }

    fn concat(&self, call: Call<'_>, mut pieces: Vec<Value>, dim: usize) -> Result<Value> {
        if pieces.len() == 1 {
            return Ok(pieces.swap_remove(0));
        }
        let size = pieces.iter().map(|piece| piece.ty().shape[dim]).sum();
        let whole = pieces[0].ty().with_dim(dim, size);
        self.run_one(call, &Op::Concat { dim }, &whole, pieces)
    }

    /// Runs an operation with one result.
    pub(super) fn run_one(
        &self,
        call: Call<'_>,
        op: &Op,
        result: &TensorType,
        inputs: Vec<Value>,
    ) -> Result<Value> {
        let results = slice::from_ref(result);
        let call = Call {
            op,
            results,
            ..call
        };
        Ok(self.backend.run(call, inputs)?.swap_remove(0))
    }
}
