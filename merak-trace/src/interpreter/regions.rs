//! Collectives that cut and join: a backend's splits and joins around an exchange between ranks.

use super::Interpreter;
use crate::{Error, Op, Result, TensorType, Value, backend::Call, placement::Shard};
use merak_mpu::{Buffer, Group, ReduceOp};

impl Interpreter {
    /// Joins the slices of all ranks part by part; they arrive in rank order.
    pub(super) fn all_gather(
        &self,
        call: Call<'_>,
        value: Value,
        group: &Group,
        shard: &Shard,
    ) -> Result<Value> {
        let local = value.ty().clone();
        let gathered = self.exchange(call, value, |buffer| group.all_gather(buffer))?;
        let slices = self.by_rank(call, &local, gathered, group.world_size())?;
        self.join(call, slices, shard)
    }

    /// The own slice of the sum over all ranks.
    pub(super) fn reduce_scatter(
        &self,
        call: Call<'_>,
        value: Value,
        group: &Group,
        shard: &Shard,
    ) -> Result<Value> {
        let slices = self.slices(call, value, shard, group.world_size())?;
        let stacked = self.stack(call, slices)?;
        let sum = |buffer| group.reduce_scatter(buffer, ReduceOp::Sum);
        let own = self.exchange(call, stacked, sum)?;
        self.backend.from_buffer(&call.results[0], own)
    }

    /// The own slice along `to` of a value that is cut along `from`.
    pub(super) fn all_to_all(
        &self,
        call: Call<'_>,
        value: Value,
        group: &Group,
        [from, to]: [&Shard; 2],
    ) -> Result<Value> {
        let degree = group.world_size();
        let piece = value.ty().with_dim(to.dim, to.local_size(degree));
        let slices = self.slices(call, value, to, degree)?;
        let stacked = self.stack(call, slices)?;
        let received = self.exchange(call, stacked, |buffer| group.all_to_all(buffer))?;
        let pieces = self.by_rank(call, &piece, received, degree)?;
        self.join(call, pieces, from)
    }

    /// The slice that rank `rank` of `degree` holds.
    pub(super) fn own_slice(
        &self,
        call: Call<'_>,
        value: Value,
        shard: &Shard,
        rank: usize,
        degree: usize,
    ) -> Result<Value> {
        let pieces = self.pieces(call, value, shard, degree)?;
        self.slice(call, &pieces, shard, (rank, degree))
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
        let reshape = Op::Reshape {
            shape: local.shape.clone(),
        };
        let of_rank = |row| {
            let results = std::slice::from_ref(local);
            Ok(self
                .run_op(call, &reshape, results, vec![row])?
                .swap_remove(0))
        };
        rows.into_iter().map(of_rank).collect()
    }

    /// The slices of all `degree` ranks, each of its pieces of all parts.
    fn slices(
        &self,
        call: Call<'_>,
        value: Value,
        shard: &Shard,
        degree: usize,
    ) -> Result<Vec<Value>> {
        let pieces = self.pieces(call, value, shard, degree)?;
        let of_rank = |rank| self.slice(call, &pieces, shard, (rank, degree));
        (0..degree).map(of_rank).collect()
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
                own.extend(self.run_op(call, &zeros, std::slice::from_ref(&ty), vec![])?);
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

    /// Values of one type, one behind the other in memory.
    fn stack(&self, call: Call<'_>, values: Vec<Value>) -> Result<Value> {
        let rows = values.into_iter().map(|value| {
            let mut row = vec![1];
            row.extend(&value.ty().shape);
            let ty = value.ty().with_shape(row.clone());
            let reshape = Op::Reshape { shape: row };
            Ok(self
                .run_op(call, &reshape, std::slice::from_ref(&ty), vec![value])?
                .swap_remove(0))
        });
        self.concat(call, rows.collect::<Result<_>>()?, 0)
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
        let types: Vec<TensorType> = sizes
            .iter()
            .map(|&size| value.ty().with_dim(dim, size))
            .collect();
        self.run_op(
            call,
            &Op::Split {
                dim,
                sizes: sizes.to_vec(),
            },
            &types,
            vec![value],
        )
    }

    fn concat(&self, call: Call<'_>, mut pieces: Vec<Value>, dim: usize) -> Result<Value> {
        if pieces.len() == 1 {
            return Ok(pieces.swap_remove(0));
        }
        let size = pieces.iter().map(|piece| piece.ty().shape[dim]).sum();
        let whole = pieces[0].ty().with_dim(dim, size);
        let results = std::slice::from_ref(&whole);
        Ok(self
            .run_op(call, &Op::Concat { dim }, results, pieces)?
            .swap_remove(0))
    }

    fn run_op(
        &self,
        call: Call<'_>,
        op: &Op,
        results: &[TensorType],
        inputs: Vec<Value>,
    ) -> Result<Vec<Value>> {
        self.backend.run(
            Call {
                op,
                results,
                ..call
            },
            inputs,
        )
    }
}
