//! What a member sends and receives in a collective, as data.

use crate::call::{Call, Fingerprint, Parts};
use std::ops::Range;

/// Most bytes that travel with the call itself, before the receiver has called.
pub(super) const EAGER_BYTES: usize = 16 << 10;

/// Most bytes that all members together receive where a reduction sends every element to everyone.
const MOST_AT_ONCE: usize = 64 << 10;

/// Least bytes of a broadcast that goes in parts over all members.
const LEAST_SPREAD: usize = 256 << 10;

/// Memory of a member in a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Area {
    Input,
    Output,
    /// Where the others' elements wait to be folded, or one's own to be sent.
    Stage,
}

/// A part of an area, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) area: Area,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Extent {
    fn new(area: Area, range: &Range<usize>) -> Self {
        Self {
            area,
            start: range.start,
            len: range.len(),
        }
    }

    fn none() -> Self {
        Self::new(Area::Input, &(0..0))
    }
}

/// The sum that a member computes between the moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fold {
    /// Its own elements of the sum.
    pub(super) own: Extent,
    /// Where the sum goes.
    pub(super) target: Extent,
}

/// The part that a member passes on to all others as it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Relay {
    /// The member that it comes from, and needs nothing.
    pub(super) root: usize,
    pub(super) part: Extent,
}

/// What one member does in a collective over `n` members.
///
/// ```text
/// reductions      first: part r of member p ──> stage of r   fold in ascending rank
///                 second: the sum of part r ──> all
/// long broadcast  first: part r of the root ──> r
///                 second: part r of r ──> all
/// the others      first: straight into the buffer where it belongs
/// ```
///
/// Each reduction moves what a ring moves: `2 (n - 1) / n` of the buffer for an all-reduce. A long
/// broadcast takes no more of any member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Moves {
    /// By member, what goes to it at first.
    pub(super) sends: Vec<Extent>,
    /// By member, where what comes from it at first goes.
    pub(super) receives: Vec<Extent>,
    pub(super) fold: Option<Fold>,
    pub(super) relay: Option<Relay>,
    /// By member, where its sum or part goes; empty where a member keeps its own.
    pub(super) sums: Vec<Extent>,
    /// What the member copies by itself: from its input, and to where.
    pub(super) copies: Vec<(Range<usize>, Extent)>,
    /// The elements of the output, where the collective does not work in place.
    pub(super) output_len: Option<usize>,
    pub(super) stage_bytes: usize,
}

impl Moves {
    /// The moves of member `me`, whose buffer fits the call.
    pub(super) fn new(fingerprint: &Fingerprint, me: usize, n: usize) -> Self {
        let size = fingerprint.dtype.size_bytes();
        let cuts = |lengths: &[usize]| ranges(lengths, size);
        // The parts of all members: of a buffer that is cut, or inputs that are joined.
        let parts = |is_cut: bool| match &fingerprint.parts {
            Parts::Equal(len) => cuts(&vec![if is_cut { len / n } else { *len }; n]),
            Parts::Listed(lengths) => cuts(lengths),
        };
        match (fingerprint.call, &fingerprint.parts) {
            (Call::AllReduce(_), Parts::Equal(len)) => {
                let bytes = len * size;
                if bytes <= EAGER_BYTES && bytes * n <= MOST_AT_ONCE {
                    return Self::reduction(&vec![0..bytes; n], me, n, Area::Input, false);
                }
                Self::reduction(&cuts(&shares(*len, n)), me, n, Area::Input, true)
            }
            (Call::ReduceScatter(_), _) => {
                let parts = parts(true);
                let mut moves = Self::reduction(&parts, me, n, Area::Output, false);
                moves.output_len = Some(parts[me].len() / size);
                moves
            }
            (Call::ReduceScatterInPlace(_), _) => {
                Self::reduction(&parts(true), me, n, Area::Input, false)
            }
            (Call::AllGather, _) => Self::gather(&parts(false), me, size, None),
            (Call::Gather { root }, _) => Self::gather(&parts(false), me, size, Some(root)),
            (Call::AllGatherInPlace, _) => Self::gather_in_place(&parts(true), me, None),
            (Call::GatherInPlace { root }, _) => {
                Self::gather_in_place(&parts(true), me, Some(root))
            }
            (Call::Broadcast { root }, Parts::Equal(len)) => {
                let bytes = len * size;
                if n == 2 || bytes < LEAST_SPREAD {
                    return Self::broadcast(bytes, me, n, root);
                }
                Self::spread(&cuts(&shares(*len, n)), me, root)
            }
            (Call::AllToAll, Parts::Equal(_)) => Self::exchange(&parts(true), me),
            (Call::AllToAll, Parts::Listed(lengths)) => {
                let sends = cuts(&lengths[me * n..(me + 1) * n]);
                let column: Vec<_> = lengths.iter().skip(me).step_by(n).copied().collect();
                let mut moves = Self::exchange_parts(&sends, &cuts(&column), me);
                moves.output_len = Some(column.iter().sum());
                moves
            }
            // No other call has parts of lengths of their own.
            (Call::Barrier, _)
            | (Call::AllReduce(_) | Call::Broadcast { .. }, Parts::Listed(_)) => Self::still(n),
        }
    }

    /// The input of `root` goes to everyone.
    fn broadcast(bytes: usize, me: usize, n: usize, root: usize) -> Self {
        let whole = Extent::new(Area::Input, &(0..bytes));
        let mut moves = Self::still(n);
        if me == root {
            moves.sends = vec![whole; n];
        } else {
            moves.receives[root] = whole;
        }
        moves
    }

    /// Part `r` of the input of `root` goes to member `r`, and from there to all others.
    fn spread(parts: &[Range<usize>], me: usize, root: usize) -> Self {
        let n = parts.len();
        let pieces = || parts.iter().map(|part| Extent::new(Area::Input, part));
        let mut moves = Self::still(n);
        moves.relay = Some(Relay {
            root,
            part: Extent::new(Area::Input, &parts[me]),
        });
        moves.sums = vec![Extent::none(); n];
        if me == root {
            moves.sends = pieces().collect();
        } else {
            moves.receives[root] = Extent::new(Area::Input, &parts[me]);
            moves.sums = pieces().collect();
            moves.sums[me] = Extent::none();
        }
        moves
    }

    /// Each member's part at `cuts` goes to it, and its own comes in its place.
    fn exchange(cuts: &[Range<usize>], me: usize) -> Self {
        let mut moves = Self::still(cuts.len());
        for (rank, range) in cuts.iter().enumerate().filter(|(rank, _)| *rank != me) {
            // What is sent has left its place before the others' parts come there.
            let start = moves.stage_bytes;
            moves.stage_bytes += range.len();
            let stage = Extent::new(Area::Stage, &(start..moves.stage_bytes));
            moves.copies.push((range.clone(), stage));
            moves.sends[rank] = stage;
            moves.receives[rank] = Extent::new(Area::Input, range);
        }
        moves
    }

    /// Each member's part of the input at `sends` goes to it, and its own to `receives` of the
    /// output.
    fn exchange_parts(sends: &[Range<usize>], receives: &[Range<usize>], me: usize) -> Self {
        let n = sends.len();
        let mut moves = Self::still(n);
        moves.copies = vec![(sends[me].clone(), Extent::new(Area::Output, &receives[me]))];
        for rank in (0..n).filter(|rank| *rank != me) {
            moves.sends[rank] = Extent::new(Area::Input, &sends[rank]);
            moves.receives[rank] = Extent::new(Area::Output, &receives[rank]);
        }
        moves
    }

    /// Nothing moves.
    fn still(n: usize) -> Self {
        Self {
            sends: vec![Extent::none(); n],
            receives: vec![Extent::none(); n],
            fold: None,
            relay: None,
            sums: Vec::new(),
            copies: Vec::new(),
            output_len: None,
            stage_bytes: 0,
        }
    }

    /// Member `r` sums up the `r`-th of `parts`; then, if `shared`, each sum goes to everyone.
    fn reduction(parts: &[Range<usize>], me: usize, n: usize, target: Area, shared: bool) -> Self {
        let mut moves = Self::still(n);
        let own = parts[me].clone();
        // The elements of each member begin at a multiple of the largest element.
        let stride = own.len().next_multiple_of(size_of::<u64>());
        for rank in (0..n).filter(|rank| *rank != me) {
            let place = rank - usize::from(rank > me);
            let stage = place * stride..place * stride + own.len();
            moves.sends[rank] = Extent::new(Area::Input, &parts[rank]);
            moves.receives[rank] = Extent::new(Area::Stage, &stage);
        }
        let start = if target == Area::Input { own.start } else { 0 };
        moves.fold = Some(Fold {
            own: Extent::new(Area::Input, &own),
            target: Extent::new(target, &(start..start + own.len())),
        });
        moves.stage_bytes = stride * (n - 1);
        if shared {
            moves.sums = parts
                .iter()
                .map(|part| Extent::new(Area::Input, part))
                .collect();
            moves.sums[me] = Extent::none();
        }
        moves
    }

    /// The parts of all members are joined, on each of them or on the root alone.
    fn gather(parts: &[Range<usize>], me: usize, size: usize, root: Option<usize>) -> Self {
        let n = parts.len();
        let mut moves = Self::still(n);
        let whole = 0..parts[me].len();
        moves.output_len = Some(0);
        if root.is_none_or(|root| root == me) {
            moves.output_len = Some(parts[n - 1].end / size);
            moves.copies = vec![(whole.clone(), Extent::new(Area::Output, &parts[me]))];
        }
        for rank in (0..n).filter(|rank| *rank != me) {
            if root.is_none_or(|root| root == rank) {
                moves.sends[rank] = Extent::new(Area::Input, &whole);
            }
            if root.is_none_or(|root| root == me) {
                moves.receives[rank] = Extent::new(Area::Output, &parts[rank]);
            }
        }
        moves
    }

    /// Each member's part of its input goes to its place in the inputs of the others, or in that
    /// of the root alone.
    fn gather_in_place(parts: &[Range<usize>], me: usize, root: Option<usize>) -> Self {
        let mut moves = Self::still(parts.len());
        for (rank, part) in parts.iter().enumerate().filter(|(rank, _)| *rank != me) {
            if root.is_none_or(|root| root == rank) {
                moves.sends[rank] = Extent::new(Area::Input, &parts[me]);
            }
            if root.is_none_or(|root| root == me) {
                moves.receives[rank] = Extent::new(Area::Input, part);
            }
        }
        moves
    }
}

/// The bytes of parts of these elements, one behind the other.
fn ranges(lengths: &[usize], size: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    let ranges = lengths.iter().map(|len| {
        end += len * size;
        end - len * size..end
    });
    ranges.collect()
}

/// The elements of each of `n` members, as even as can be.
fn shares(len: usize, n: usize) -> Vec<usize> {
    let end = |rank: usize| len * rank / n;
    (0..n).map(|rank| end(rank + 1) - end(rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, ReduceOp};

    fn moves(call: Call, parts: &Parts, n: usize) -> Vec<Moves> {
        let fingerprint = Fingerprint {
            call,
            dtype: DType::F32,
            parts: parts.clone(),
        };
        (0..n).map(|me| Moves::new(&fingerprint, me, n)).collect()
    }

    #[test]
    fn what_one_member_sends_is_what_the_other_receives() {
        let sum = ReduceOp::Sum;
        let uneven = Parts::Listed([3, 0, 7].into());
        let matrix = Parts::Listed((0..9).collect());
        for (call, parts) in [
            (Call::AllReduce(sum), Parts::Equal(2)),
            (Call::AllReduce(sum), Parts::Equal(100_001)),
            (Call::ReduceScatter(sum), Parts::Equal(12)),
            (Call::ReduceScatter(sum), uneven.clone()),
            (Call::AllGather, Parts::Equal(5)),
            (Call::AllGather, uneven.clone()),
            (Call::ReduceScatterInPlace(sum), Parts::Equal(12)),
            (Call::ReduceScatterInPlace(sum), uneven.clone()),
            (Call::AllGatherInPlace, Parts::Equal(12)),
            (Call::AllGatherInPlace, uneven),
            (Call::Gather { root: 1 }, Parts::Equal(5)),
            (Call::GatherInPlace { root: 1 }, Parts::Equal(12)),
            (Call::Broadcast { root: 2 }, Parts::Equal(5)),
            (Call::Broadcast { root: 1 }, Parts::Equal(100_001)),
            (Call::AllToAll, Parts::Equal(9)),
            (Call::AllToAll, matrix),
            (Call::Barrier, Parts::Equal(0)),
        ] {
            let all = moves(call, &parts, 3);
            for (from, to) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
                assert_eq!(
                    all[from].sends[to].len, all[to].receives[from].len,
                    "{call:?} from {from} to {to}"
                );
                if let (Some(fold), Some(sum)) = (all[from].fold, all[to].sums.get(from)) {
                    assert_eq!(fold.target.len, sum.len);
                }
                if let Some(Relay { root, part }) = all[from].relay {
                    let len = if to == root { 0 } else { part.len };
                    assert_eq!(all[to].sums[from].len, len);
                }
            }
        }
    }

    #[test]
    fn an_all_reduce_moves_what_a_ring_moves() {
        let len = 1 << 20;
        for moves in moves(Call::AllReduce(ReduceOp::Sum), &Parts::Equal(len), 4) {
            let first: usize = moves.sends.iter().map(|piece| piece.len).sum();
            let second = 3 * moves.fold.unwrap().target.len;
            assert_eq!(first + second, 2 * 3 * len);
        }
    }
}
