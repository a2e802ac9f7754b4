//! Sequences that pass piece by piece, with the keys and values of their attentions.

mod attended;

use super::{Batch, Forwarded, Frame, Interpreter, Params};
use crate::{
    Call, Error, NodeId, Op, Past, Result, RunContext, TensorType, Value, ValueId, op::Class,
};
use merak_mpu::DType;
use std::collections::{BTreeMap, BTreeSet};

/// Keys and values of the positions that have passed, for each sequence and each attention of a
/// stage of a model that generates.
///
/// A prompt passes once and fills it; then one position at a time passes, and every attention sees
/// the keys before it too. Sequences come and go, and have lengths of their own. A rank of the
/// tensor axis keeps the keys and values of its own heads, a stage those of its own layers.
///
/// Of an encoder-decoder, the positions of a sequence are the decoder's. The encoder's pass with
/// the first of them, and each attention to the encoder's output keeps its keys and values of them.
///
/// # Shapes
/// After `n` positions, keys and values of a sequence are `[n, kv_heads * head_dim]`.
#[derive(Debug, Default)]
pub struct KvCache {
    sequences: BTreeMap<u64, Passed>,
}

/// The past of one sequence.
#[derive(Debug, Clone, Default)]
struct Passed {
    positions: usize,
    bytes: usize,
    /// In the order of the attentions.
    pasts: Vec<Past>,
}

/// The next positions of some sequences. They pass end to end, as one sequence of a batch of one,
/// so that sequences of any lengths share a pass without padding.
#[derive(Debug)]
pub struct Continuation<'a> {
    /// Holds the positions before these; these are added to it.
    pub cache: &'a mut KvCache,
    /// The positions of each sequence that pass.
    pub pieces: &'a [NextPositions],
    /// Set if only some of the positions are needed after the last attention.
    pub tail: Option<Tail<'a>>,
}

/// The next positions of one sequence, which has one piece in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextPositions {
    /// The number that the caller gave the sequence.
    pub sequence: u64,
    /// How many positions follow, at least one; in a model with an encoder, of the decoder.
    pub positions: usize,
    /// The positions of its encoder: all of them in the first piece of a sequence, none later.
    pub source: usize,
}

/// The rest of a stage for some of the positions.
#[derive(Debug, Clone, Copy)]
pub struct Tail<'a> {
    /// The same stage for as many positions as are left.
    pub interpreter: &'a Interpreter,
    /// Their indices in the pass.
    pub positions: &'a [usize],
}

impl KvCache {
    /// Positions of a sequence that have passed.
    pub fn positions(&self, sequence: u64) -> usize {
        self.sequences
            .get(&sequence)
            .map_or(0, |passed| passed.positions)
    }

    /// Forgets a sequence.
    pub fn remove(&mut self, sequence: u64) {
        self.sequences.remove(&sequence);
    }

    /// Gives sequences the pasts of others, all at once: in each pair the second one goes on from
    /// what the first one had before. Sequences that no pair names stay.
    pub fn follow(&mut self, pairs: &[(u64, u64)]) {
        let named = pairs.iter().flat_map(|&(from, to)| [from, to]);
        let mut before: BTreeMap<u64, Passed> = named
            .filter_map(|sequence| Some((sequence, self.sequences.remove(&sequence)?)))
            .collect();
        let mut uses: BTreeMap<u64, usize> = BTreeMap::new();
        for (from, _) in pairs {
            *uses.entry(*from).or_default() += 1;
        }
        for &(from, to) in pairs {
            let left = uses.entry(from).or_insert(1);
            *left -= 1;
            // The last one takes it, the others copy it.
            let past = match *left {
                0 => before.remove(&from),
                _ => before.get(&from).cloned(),
            };
            if let Some(past) = past {
                self.sequences.insert(to, past);
            }
        }
    }

    /// Bytes of the keys and values.
    pub fn size_bytes(&self) -> usize {
        self.sequences.values().map(|passed| passed.bytes).sum()
    }
}

impl Interpreter {
    /// Runs the forward of the positions that follow in some sequences, and adds them to the cache.
    /// The program is an inference program for a single sequence of this number of positions,
    /// without padding. Values that are sent or output belong to the tail's positions, if there is
    /// a tail. Nothing is dropped, whatever [`RunContext::training`] says. Otherwise as
    /// [`Interpreter::forward`].
    ///
    /// # Errors
    /// When two pieces are of one sequence. As for [`Interpreter::forward`], and when an attention
    /// has other positions than the pieces or hides keys, or positions are counted from masks or
    /// documents; the cache then loses the sequences.
    pub fn forward_cached(
        &self,
        params: &dyn Params,
        batch: &Batch,
        received: Vec<Value>,
        context: RunContext,
        next: Continuation<'_>,
    ) -> Result<Forwarded> {
        let Continuation {
            cache,
            pieces,
            tail,
        } = next;
        check_sequences(pieces)?;
        let context = RunContext {
            training: false,
            ..context
        };
        let mut passed: Vec<_> = pieces
            .iter()
            .map(|piece| cache.sequences.remove(&piece.sequence).unwrap_or_default())
            .collect();
        let mut frame = self.begin(batch, received, context)?;
        let nodes = &self.program.forward;
        let own = match tail {
            Some(_) => nodes
                .iter()
                .rposition(|&node| self.is_attention(node))
                .map_or(0, |last| last + 1),
            None => nodes.len(),
        };
        self.pass(&mut frame, params, &nodes[..own], (pieces, &mut passed))?;
        let forwarded = match tail {
            None => self.end(frame, params)?,
            Some(Tail {
                interpreter,
                positions,
            }) => {
                let mut frame = self.narrow(frame, interpreter, positions)?;
                for &node in &nodes[own..] {
                    interpreter.step(&mut frame, params, node)?;
                }
                interpreter.end(frame, params)?
            }
        };
        for (piece, mut passed) in pieces.iter().zip(passed) {
            passed.positions += piece.positions;
            cache.sequences.insert(piece.sequence, passed);
        }
        Ok(forwarded)
    }

    /// Runs nodes on the pieces, which follow what has passed of their sequences.
    fn pass(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        nodes: &[NodeId],
        (pieces, passed): (&[NextPositions], &mut [Passed]),
    ) -> Result<()> {
        let follow = passed.iter().zip(pieces);
        let positions: Vec<usize> = follow
            .flat_map(|(passed, piece)| passed.positions..passed.positions + piece.positions)
            .collect();
        let mut attentions = 0;
        for &node in nodes {
            if self.is_empty(node) {
                self.skip(frame, params, node)?;
            } else if self.is_attention(node) {
                self.attend(frame, params, node, (attentions, pieces, &mut *passed))?;
            } else if self.op(node).class() == Class::Source {
                self.source(frame, params, node, &positions)?;
            } else {
                self.step(frame, params, node)?;
            }
            attentions += usize::from(self.is_attention(node));
        }
        Ok(())
    }

    fn is_attention(&self, node: NodeId) -> bool {
        self.op(node).class() == Class::Attention
    }

    fn op(&self, node: NodeId) -> &Op {
        &self.program.graph.node(node).op
    }

    /// Whether a node has nothing to compute, as those of an encoder that has passed.
    fn is_empty(&self, node: NodeId) -> bool {
        let types = &self.result_types[node.index()];
        types.iter().all(|ty| ty.numel() == 0)
    }

    /// Goes past a node without elements. It reads what it would, so that others find their turn.
    fn skip(&self, frame: &mut Frame, params: &dyn Params, id: NodeId) -> Result<()> {
        self.operands(frame, params, id)?;
        let types = self.result_types[id.index()].iter();
        let empty = types.map(|ty| self.backend.from_bytes(ty, &[]));
        self.keep(frame, id, empty.collect::<Result<_>>()?);
        Ok(())
    }

    /// Runs a source. Those that depend on the place in a sequence count from its positions that
    /// have passed; one that has no rule here would count within the piece, and is refused.
    fn source(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        id: NodeId,
        positions: &[usize],
    ) -> Result<()> {
        match self.op(id) {
            Op::Positions { first, .. } => self.place(frame, id, *first, positions),
            Op::Zeros { .. } => self.step(frame, params, id),
            // Each sequence has its own distances, which its attention works out.
            Op::RelativeBuckets(_) => {
                let none = TensorType::new([0], DType::I64);
                self.keep(frame, id, vec![self.backend.from_bytes(&none, &[])?]);
                Ok(())
            }
            other => {
                let name = other.name();
                let reason = format!("`{name}` covers whole sequences, which pass in pieces here");
                Err(Error::backend(self.call(id, &frame.context).name, reason))
            }
        }
    }

    /// Gives a node of positions the positions within the sequences as its result.
    fn place(
        &self,
        frame: &mut Frame,
        id: NodeId,
        first: usize,
        positions: &[usize],
    ) -> Result<()> {
        let bytes = numbers(positions.iter().map(|position| position + first));
        let ty = &self.result_types[id.index()][0];
        let value = self.backend.from_bytes(ty, &bytes)?;
        self.keep(frame, id, vec![value]);
        Ok(())
    }

    /// The frame of a program that differs from this one only in the number of positions: each live
    /// value is narrowed to some positions.
    fn narrow(&self, frame: Frame, to: &Self, positions: &[usize]) -> Result<Frame> {
        let ids = numbers(positions.iter().copied());
        let ids_ty = TensorType::new([positions.len()], DType::I64);
        let ids = self.backend.from_bytes(&ids_ty, &ids)?;
        let narrow = |(index, value): (usize, Option<Value>)| {
            let ty = to.program.graph.ty(ValueId::at(index));
            match value {
                Some(value) if value.ty() != ty => self.rows(&value, &ids, ty).map(Some),
                other => Ok(other),
            }
        };
        let slots = frame.slots.into_iter().enumerate().map(narrow);
        Ok(Frame {
            slots: slots.collect::<Result<_>>()?,
            ..frame
        })
    }

    /// Rows `ids` of `[.., N, W]`, as a value of the given type.
    fn rows(&self, value: &Value, ids: &Value, ty: &TensorType) -> Result<Value> {
        let (context, width) = (RunContext::default(), ty.last_dim());
        let rows = value.ty().with_shape([value.ty().rows(), width]);
        let run = |op: &Op, results: &TensorType, inputs| {
            let call = Call {
                name: "the positions that matter",
                op,
                results: std::slice::from_ref(results),
                context: &context,
            };
            Ok::<_, Error>(self.backend.run(call, inputs)?.swap_remove(0))
        };
        let reshape = |ty: &TensorType| Op::Reshape {
            shape: ty.shape.clone(),
        };
        let table = run(&reshape(&rows), &rows, vec![value.clone()])?;
        let picked_ty = rows.with_dim(0, ids.ty().numel());
        let embedding = Op::Embedding {
            padding: None,
            slice: None,
        };
        let picked = run(&embedding, &picked_ty, vec![ids.clone(), table])?;
        run(&reshape(ty), ty, vec![picked])
    }
}

/// Refuses a sequence with two pieces: neither would see the other.
fn check_sequences(pieces: &[NextPositions]) -> Result<()> {
    let mut seen = BTreeSet::new();
    match pieces.iter().find(|piece| !seen.insert(piece.sequence)) {
        None => Ok(()),
        Some(NextPositions { sequence, .. }) => {
            let reason = "has several pieces in one pass; its next positions are one piece";
            Err(Error::backend(format!("sequence {sequence}"), reason))
        }
    }
}

/// Positions as the bytes of an `i64` tensor.
fn numbers(positions: impl Iterator<Item = usize>) -> Vec<u8> {
    let number = |position| i64::try_from(position).expect("a position fits an i64");
    positions
        .flat_map(|position| number(position).to_ne_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(positions: &[usize]) -> KvCache {
        let passed = positions.iter().map(|&positions| Passed {
            positions,
            ..Passed::default()
        });
        KvCache {
            sequences: (0..).zip(passed).collect(),
        }
    }

    #[test]
    fn sequences_follow_what_others_had_before() {
        let mut cache = cache(&[10, 11, 12, 13]);
        cache.follow(&[(1, 0), (0, 1), (1, 2)]);
        let found = [0, 1, 2, 3].map(|sequence| cache.positions(sequence));
        assert_eq!(found, [11, 10, 11, 13]);
        cache.follow(&[(2, 0)]);
        assert_eq!([0, 2].map(|sequence| cache.positions(sequence)), [11, 0]);
    }
}
