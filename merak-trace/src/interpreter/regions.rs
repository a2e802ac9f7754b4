//! Collectives that cut and join: a backend's splits and joins around an exchange between ranks.

use super::Interpreter;
use crate::{
    Error, Op, Result, TensorType, Value,
    backend::Call,
    op::{Reduction, RegionKind},
    placement::Shard,
};
use merak_mpu::{Buffer, Group, ReduceOp};
use std::slice;

impl Interpreter {
    /// Takes a value over the border of a region whose work is split over a group.
    pub(super) fn cross(
        &self,
        call: Call<'_>,
        value: Value,
        group: &Group,
        kind: RegionKind<'_>,
    ) -> Result<Value> {
        let degree = group.world_size();
        match kind {
            RegionKind::CopyTo => Ok(value),
            RegionKind::AllReduce(reduction) => {
                let op = match reduction {
                    Reduction::Sum => ReduceOp::Sum,
                    Reduction::Max => ReduceOp::Max,
                };
                let reduced = self.exchange(call, value, |buffer| group.all_reduce(buffer, op))?;
                self.backend.from_buffer(&call.results[0], reduced)
            }
            // The slices of all ranks arrive in rank order.
            RegionKind::AllGather { shard, .. } => {
                let local = value.ty().clone();
                let gathered = self.exchange(call, value, |buffer| group.all_gather(buffer))?;
                let slices = self.by_rank(call, &local, gathered, degree)?;
                self.join(call, slices, shard)
            }
            RegionKind::Scatter(shard) => {
                let pieces = self.pieces(call, value, shard, degree)?;
                self.slice(call, &pieces, shard, (group.rank(), degree))
            }
            RegionKind::ReduceScatter(shard) => {
                let stacked = self.stacked_slices(call, value, shard, degree)?;
                let sum = |buffer| group.reduce_scatter(buffer, ReduceOp::Sum);
                let own = self.exchange(call, stacked, sum)?;
                self.backend.from_buffer(&call.results[0], own)
            }
            RegionKind::AllToAll { from, to } => {
                let piece = value.ty().with_dim(to.dim, to.local_size(degree));
                let stacked = self.stacked_slices(call, value, to, degree)?;
                let received = self.exchange(call, stacked, |buffer| group.all_to_all(buffer))?;
                let pieces = self.by_rank(call, &piece, received, degree)?;
                self.join(call, pieces, from)
            }
        }
    }

    /// Hands a value to the other ranks as `send` does.
    fn exchange(
        &self,
        call: Call<'_>,
        value: Value,
        send: impl FnOnce(Box<dyn Buffer>) -> merak_mpu::Result<Box<dyn Buffer>>,
    ) -> Result<Box<dyn Buffer>> {
        let buffer = self.backend.into_buffer(value)?;
        send(buffer).map_err(|source| Error::Collective {
            node: call.name.to_owned(),
            source,
        })
    }

    /// The values of type `local` of `degree` ranks, which lie one behind the other.
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

    /// The slices of all `degree` ranks, one behind the other in memory.
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

    /// The slice of one rank of `degree`, of its pieces of all parts and the padding behind them.
    fn slice(
        &self,
        call: Call<'_>,
        pieces: &[Value],
        shard: &Shard,
        (rank, degree): (usize, usize),
    ) -> Result<Value> {
        let mut own = Vec::with_capacity(2 * shard.parts.len());
        let local = pieces.iter().skip(rank).step_by(degree);
        for (piece, room) in local.zip(shard.local_parts(degree)) {
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

    /// For each part of a cut dimension the pieces of all `degree` ranks.
    fn pieces(
        &self,
        call: Call<'_>,
        value: Value,
        shard: &Shard,
        degree: usize,
    ) -> Result<Vec<Value>> {
        let parts = 0..shard.parts.len();
        let of_part = |part| move |rank| shard.own_of_part(part, rank, degree).len();
        let sizes: Vec<_> = parts
            .flat_map(|part| (0..degree).map(of_part(part)))
            .collect();
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
            for (rank, parts) in by_rank.iter().enumerate() {
                let own = shard.own_of_part(part, rank, degree).len();
                let piece = parts[part].clone();
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
    fn run_one(
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
