//! Attentions of positions that pass piece by piece.

use super::{
    super::{Frame, Interpreter, Params},
    NextPositions, Passed,
};
use crate::{Error, Following, NodeId, Op, Past, RelativeBias, Result, Value, op::Attention};

/// The operands of an attention, and whose they are.
struct Attended {
    line: Line,
    qkv: [Value; 3],
    bias: Option<RelativeBias>,
}

/// Whose queries and keys an attention has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// A decoder's, to itself.
    Decoder,
    /// A decoder's queries to the output of an encoder.
    Cross,
    /// An encoder's, to itself. It passes at once, so nothing looks at its keys later.
    Encoder,
}

impl Line {
    fn of(spec: &Attention) -> Self {
        match (spec.cross, spec.causal) {
            (true, _) => Self::Cross,
            (false, true) => Self::Decoder,
            (false, false) => Self::Encoder,
        }
    }

    fn queries(self, piece: &NextPositions) -> usize {
        match self {
            Self::Decoder | Self::Cross => piece.positions,
            Self::Encoder => piece.source,
        }
    }

    fn keys(self, piece: &NextPositions) -> usize {
        match self {
            Self::Decoder => piece.positions,
            Self::Cross | Self::Encoder => piece.source,
        }
    }

    fn is_kept(self) -> bool {
        self != Self::Encoder
    }
}

impl Interpreter {
    /// Runs an attention over past keys and values and its own.
    pub(super) fn attend(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        id: NodeId,
        (attention, pieces, passed): (usize, &[NextPositions], &mut [Passed]),
    ) -> Result<()> {
        let operands = self.operands(frame, params, id)?;
        let context = frame.context;
        let call = self.call(id, &context);
        let Some(Attended { line, qkv, bias }) = self.attended(id, operands, pieces) else {
            let reason = "cannot pass in pieces: it hides keys, or its queries and keys are not \
                          those of the sequences";
            return Err(Error::backend(call.name, reason));
        };
        let bytes = qkv[1].ty().size_bytes() + qkv[2].ty().size_bytes();
        let all = qkv[1].ty().shape[1].max(1);
        let following = passed.iter_mut().zip(pieces).map(|(passed, piece)| {
            let keys = line.keys(piece);
            if line.is_kept() {
                passed.bytes += bytes / all * keys;
            }
            let pasts = &mut passed.pasts;
            pasts.resize_with(pasts.len().max(attention + 1), Past::default);
            Following {
                queries: line.queries(piece),
                keys,
                past: &mut pasts[attention],
            }
        });
        let mut following: Vec<_> = following.filter(|next| next.queries > 0).collect();
        let out = self
            .backend
            .attend(call, qkv, bias.as_ref(), &mut following)?;
        if !line.is_kept() {
            for next in &mut following {
                *next.past = Past::default();
            }
        }
        self.keep(frame, id, vec![out]);
        Ok(())
    }

    /// What an attention works on, if each sequence has its part of it.
    fn attended(
        &self,
        id: NodeId,
        operands: Vec<Value>,
        pieces: &[NextPositions],
    ) -> Option<Attended> {
        let node = self.program.graph.node(id);
        let Op::Attention(spec) = &node.op else {
            return None;
        };
        // A mask, which would cover whole sequences, makes other numbers of operands.
        let (qkv, bias) = match <[Value; 3]>::try_from(operands) {
            Ok(qkv) => (qkv, None),
            Err(more) => {
                let [q, k, v, table, _] = <[Value; 5]>::try_from(more).ok()?;
                let maker = self.program.graph.producer(node.inputs[4])?;
                let &Op::RelativeBuckets(buckets) = self.op(maker) else {
                    return None;
                };
                ([q, k, v], Some(RelativeBias { table, buckets }))
            }
        };
        let line = Line::of(spec);
        let queries: usize = pieces.iter().map(|piece| line.queries(piece)).sum();
        let keys: usize = pieces.iter().map(|piece| line.keys(piece)).sum();
        let fits = [queries, keys] == [0, 1].map(|operand: usize| qkv[operand].ty().shape[1]);
        fits.then_some(Attended { line, qkv, bias })
    }
}
