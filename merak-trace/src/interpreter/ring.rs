//! Ring attention: keys and values go round the ranks that share a sequence
//! ([Liu et al. 2023](https://arxiv.org/abs/2310.01889)).
//!
//! ```text
//!           rank 0     rank 1     rank 2     rank 3
//! round 0   k0 v0      k1 v1      k2 v2      k3 v3    queries meet the keys of their own rank,
//! round 1   k3 v3      k0 v0      k1 v1      k2 v2    then those of the rank before,
//! round 2   k2 v2      k3 v3      k0 v0      k1 v1    and so on
//! ```
//!
//! In the backward, the gradients of keys and values follow them: each rank adds its summand, and
//! the last one sends the sum to the owner. A rank computes with the keys of one rank at a time,
//! and messages pass meanwhile; those of ranks that are ahead wait for it.

use super::{Interpreter, regions::failed};
use crate::{
    Error, Op, Result, TensorType, Value,
    backend::Call,
    op::{self, Attention, Direction, Keys},
};
use merak_mpu::{Communicator, Group, Message, Packet, Pending};

/// Tags of the messages.
const KEYS: u64 = 0;
const GRADS: u64 = 1;

/// Keys and values, or their gradients.
type Pair = [Value; 2];

/// An attention that runs in a ring.
struct Ring<'a> {
    /// The ranks, unless there is one.
    group: Option<Group>,
    call: Call<'a>,
    spec: &'a Attention,
}

impl Ring<'_> {
    fn degree(&self) -> usize {
        self.group.as_ref().map_or(1, Group::world_size)
    }

    /// The attention to the keys that come in a round, if one of `local` queries sees one of them.
    fn met(&self, round: usize, local: usize) -> Option<Attention> {
        let rank = self.group.as_ref().map_or(0, Group::rank);
        let owner = (rank + self.degree() - round) % self.degree();
        let spec = Attention {
            keys: Keys::OfRank(owner),
            ..self.spec.clone()
        };
        spec.meets(self.call.context.place, local).then_some(spec)
    }

    fn error(&self, source: merak_mpu::Error) -> Error {
        failed(self.call, source)
    }
}

impl Interpreter {
    /// Runs an attention, or its gradient, whose keys and values go round.
    ///
    /// # Communication
    /// Of N ranks, each sends keys and values to the next one N - 1 times, and gradients N times.
    pub(super) fn around(
        &self,
        call: Call<'_>,
        ring: &op::Ring<'_>,
        inputs: Vec<Value>,
    ) -> Result<Vec<Value>> {
        let op::Ring {
            spec, direction, ..
        } = *ring;
        let group = self.groups.along(ring.slice.axis);
        let ring = Ring { group, call, spec };
        match direction {
            Direction::Forward => self.ring(&ring, inputs),
            Direction::Gradient => self.ring_grad(&ring, inputs),
        }
    }

    /// `q, k, v, (seen) -> out, lse`.
    fn ring(&self, ring: &Ring<'_>, mut inputs: Vec<Value>) -> Result<Vec<Value>> {
        let (call, local) = (ring.call, inputs[0].ty().shape[1]);
        let run = |op: &Op, inputs| self.backend.run(Call { op, ..call }, inputs);
        let mut joined: Option<Vec<Value>> = None;
        for round in 0..ring.degree() {
            let next = self.next_keys(ring, round, &inputs[1..3])?;
            if let Some(spec) = ring.met(round, local) {
                let part = run(&Op::Attention(spec), inputs.clone())?;
                joined = Some(match joined {
                    Some(others) => run(&Op::JoinAttention, [others, part].concat())?,
                    None => part,
                });
            }
            if let Some(next) = next {
                let pair = self.received(ring, next, &inputs[1].ty().clone())?;
                inputs.splice(1..3, pair);
            }
        }
        joined.ok_or_else(|| met_none(call))
    }

    /// `dout, q, k, v, out, lse, (seen) -> dq, dk, dv`.
    fn ring_grad(&self, ring: &Ring<'_>, mut inputs: Vec<Value>) -> Result<Vec<Value>> {
        let (call, local) = (ring.call, inputs[1].ty().shape[1]);
        let ty = inputs[2].ty().clone();
        let (mut dq, mut on_their_way, mut own) = (None, None, None);
        for round in 0..ring.degree() {
            let next = self.next_keys(ring, round, &inputs[2..4])?;
            let mut part = None;
            if let Some(spec) = ring.met(round, local) {
                let op = Op::AttentionGrad(spec);
                let results = self.backend.run(Call { op: &op, ..call }, inputs.clone())?;
                let [of_queries, of_keys, of_values] =
                    <[Value; 3]>::try_from(results).map_err(|_| met_none(call))?;
                dq = Some(self.sum(call, dq, of_queries)?);
                part = Some([of_keys, of_values]);
            }
            let earlier = match on_their_way.take() {
                Some(pending) => Some(self.received(ring, pending, &ty)?),
                None => None,
            };
            let grads = match (earlier, part) {
                (Some([dk, dv]), Some([of_keys, of_values])) => [
                    self.sum(call, Some(dk), of_keys)?,
                    self.sum(call, Some(dv), of_values)?,
                ],
                (one, other) => one.or(other).ok_or_else(|| met_none(call))?,
            };
            match &ring.group {
                Some(group) => on_their_way = Some(self.go_on(ring, group, GRADS, grads)?),
                None => own = Some(grads),
            }
            if let Some(next) = next {
                inputs.splice(2..4, self.received(ring, next, &ty)?);
            }
        }
        let own = match on_their_way {
            Some(pending) => Some(self.received(ring, pending, &ty)?),
            None => own,
        };
        let (Some(dq), Some([dk, dv])) = (dq, own) else {
            return Err(met_none(call));
        };
        Ok(vec![dq, dk, dv])
    }

    /// Hands on the keys and values of a round, unless it is the last, and awaits those of the
    /// next.
    fn next_keys(
        &self,
        ring: &Ring<'_>,
        round: usize,
        pair: &[Value],
    ) -> Result<Option<Pending<Message>>> {
        match &ring.group {
            Some(group) if round + 1 < ring.degree() => {
                let pair = [pair[0].clone(), pair[1].clone()];
                self.go_on(ring, group, KEYS, pair).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Sends a pair to the next rank, and awaits one from the rank before.
    fn go_on(
        &self,
        ring: &Ring<'_>,
        group: &Group,
        tag: u64,
        pair: Pair,
    ) -> Result<Pending<Message>> {
        let packet = |value: Value| {
            let shape = value.ty().shape.clone();
            let data = self.backend.into_buffer(value)?;
            Ok(Packet { shape, data })
        };
        let message = pair.into_iter().map(packet).collect::<Result<_>>()?;
        let (rank, degree) = (group.rank(), group.world_size());
        let sent = group.send((rank + 1) % degree, tag, message);
        let before = (rank + degree - 1) % degree;
        sent.and_then(|()| group.start_recv(before, tag))
            .map_err(|source| ring.error(source))
    }

    /// The pair of a message, each value of this type.
    fn received(
        &self,
        ring: &Ring<'_>,
        pending: Pending<Message>,
        ty: &TensorType,
    ) -> Result<Pair> {
        let message = pending.wait().map_err(|source| ring.error(source))?;
        let values = message
            .into_iter()
            .map(|packet| self.backend.from_buffer(ty, packet.data));
        let values = values.collect::<Result<Vec<_>>>()?;
        <[Value; 2]>::try_from(values).map_err(|_| met_none(ring.call))
    }

    /// The sum of two values, the first of which may be overwritten.
    fn sum(&self, call: Call<'_>, first: Option<Value>, second: Value) -> Result<Value> {
        let Some(first) = first else {
            return Ok(second);
        };
        let ty = second.ty().clone();
        self.run_one(call, &Op::Add, &ty, vec![first, second])
    }
}

/// The error of a ring whose parts do not fit together.
fn met_none(call: Call<'_>) -> Error {
    Error::backend(call.name, "its queries met no keys and values")
}
