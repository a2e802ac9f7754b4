//! What a collective does, cut into chunks that touch different memory.

use super::kernel;
use crate::{DType, ReduceOp};
use std::{fmt, ops::Range};

/// Bytes of one chunk in each buffer: small enough that a few of them stay in a core's cache.
const CHUNK_BYTES: usize = 32 << 10;

/// Which collective was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    AllGather,
    Broadcast { root: usize },
    AllToAll,
    Barrier,
}

impl Call {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
        }
    }
}

/// What all members of a group must agree on. `len` is the length of each member's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub(super) call: Call,
    pub(super) dtype: DType,
    pub(super) len: usize,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, dtype, len } = self;
        f.write_str(call.name())?;
        match call {
            Call::AllReduce(op) | Call::ReduceScatter(op) => write!(f, "({op})")?,
            Call::Broadcast { root } => write!(f, "(root {root})")?,
            Call::Barrier => return Ok(()),
            Call::AllGather | Call::AllToAll => {}
        }
        write!(f, " of {len} {dtype}")
    }
}

/// The chunks of one collective over `n` members.
///
/// Buffers are numbered: the inputs by group rank, then the outputs by group rank where the call
/// has them. Memory falls into blocks (the part of one rank, or the exchange of two), and these
/// into chunks.
#[derive(Debug)]
pub(super) struct Plan {
    fingerprint: Fingerprint,
    n: usize,
    /// Bytes of one block in each buffer.
    block_bytes: usize,
    chunks_per_block: usize,
    num_chunks: usize,
}

/// The memory that a chunk touches, as a buffer number and a range of its bytes.
pub(super) type Footprint = Vec<(usize, Range<usize>)>;

impl Plan {
    pub(super) fn new(fingerprint: Fingerprint, n: usize) -> Self {
        let Fingerprint { call, dtype, len } = fingerprint;
        let (blocks, block_len) = match call {
            Call::AllReduce(_) | Call::Broadcast { .. } => (1, len),
            Call::ReduceScatter(_) => (n, len / n),
            Call::AllGather => (n, len),
            Call::AllToAll => (n * (n - 1) / 2, len / n),
            Call::Barrier => (0, 0),
        };
        let block_bytes = block_len * dtype.size_bytes();
        let chunks_per_block = block_bytes.div_ceil(CHUNK_BYTES);
        Self {
            fingerprint,
            n,
            block_bytes,
            chunks_per_block,
            num_chunks: blocks * chunks_per_block,
        }
    }

    /// The length of each member's output, when the call does not work in place.
    pub(super) fn output_len(fingerprint: Fingerprint, n: usize) -> Option<usize> {
        match fingerprint.call {
            Call::ReduceScatter(_) => Some(fingerprint.len / n),
            Call::AllGather => Some(fingerprint.len * n),
            Call::AllReduce(_) | Call::Broadcast { .. } | Call::AllToAll | Call::Barrier => None,
        }
    }

    pub(super) fn num_chunks(&self) -> usize {
        self.num_chunks
    }

    /// The memory of a chunk. Footprints of two chunks never overlap, nor do the parts of one.
    pub(super) fn footprint(&self, chunk: usize) -> Footprint {
        let n = self.n;
        let block = chunk / self.chunks_per_block;
        let start = chunk % self.chunks_per_block * CHUNK_BYTES;
        let range = start..(start + CHUNK_BYTES).min(self.block_bytes);
        let part = |number: usize| {
            let offset = number * self.block_bytes;
            offset + range.start..offset + range.end
        };
        match self.fingerprint.call {
            Call::AllReduce(_) => (0..n).map(|rank| (rank, part(0))).collect(),
            Call::ReduceScatter(_) => {
                let inputs = (0..n).map(|rank| (rank, part(block)));
                inputs.chain([(n + block, part(0))]).collect()
            }
            Call::AllGather => {
                let outputs = (0..n).map(|rank| (n + rank, part(block)));
                [(block, part(0))].into_iter().chain(outputs).collect()
            }
            Call::Broadcast { root } => {
                let others = (0..n).filter(|&rank| rank != root);
                [root]
                    .into_iter()
                    .chain(others)
                    .map(|rank| (rank, part(0)))
                    .collect()
            }
            Call::AllToAll => {
                let (low, high) = pair(block, n);
                vec![(low, part(high)), (high, part(low))]
            }
            Call::Barrier => Footprint::new(),
        }
    }

    /// Computes a chunk, given the memory of its footprint.
    pub(super) fn compute(&self, memory: &mut [&mut [u8]]) {
        let Fingerprint { call, dtype, .. } = self.fingerprint;
        match call {
            Call::AllReduce(op) => kernel::reduce(dtype, op, self.n, memory, 0..self.n),
            Call::ReduceScatter(op) => {
                kernel::reduce(dtype, op, self.n, memory, self.n..self.n + 1);
            }
            Call::AllGather | Call::Broadcast { .. } => {
                if let Some((source, targets)) = memory.split_first_mut() {
                    for target in targets {
                        target.copy_from_slice(source);
                    }
                }
            }
            Call::AllToAll => {
                if let [low, high] = memory {
                    low.swap_with_slice(high);
                }
            }
            Call::Barrier => {}
        }
    }
}

/// The `index`-th of the pairs (0, 1), (0, 2), .. (n - 2, n - 1).
fn pair(index: usize, n: usize) -> (usize, usize) {
    let mut rest = index;
    for low in 0..n {
        let pairs = n - 1 - low;
        if rest < pairs {
            return (low, low + 1 + rest);
        }
        rest -= pairs;
    }
    (n, n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn calls(n: usize) -> impl Strategy<Value = Call> {
        prop_oneof![
            Just(Call::AllReduce(ReduceOp::Sum)),
            Just(Call::ReduceScatter(ReduceOp::Max)),
            Just(Call::AllGather),
            (0..n).prop_map(|root| Call::Broadcast { root }),
            Just(Call::AllToAll),
            Just(Call::Barrier),
        ]
    }

    proptest! {
        /// This is what the shared memory of `collective.rs` relies on.
        #[test]
        fn chunks_lie_within_their_buffers_and_never_overlap(
            (n, call) in (2..6_usize).prop_flat_map(|n| (Just(n), calls(n))),
            part in 0..60_000_usize,
            dtype in prop::sample::select(DType::ALL.as_slice()),
        ) {
            let len = if matches!(call, Call::ReduceScatter(_) | Call::AllToAll) { part * n } else { part };
            let fingerprint = Fingerprint { call, dtype, len };
            let plan = Plan::new(fingerprint, n);
            let bytes = |len: usize| len * dtype.size_bytes();
            let mut sizes = vec![bytes(len); n];
            sizes.extend(Plan::output_len(fingerprint, n).map(|len| vec![bytes(len); n]).unwrap_or_default());
            let mut used: Vec<(usize, Range<usize>)> = (0..plan.num_chunks()).flat_map(|chunk| plan.footprint(chunk)).collect();
            for (buffer, range) in &used {
                prop_assert!(range.end <= sizes[*buffer] && range.start < range.end);
                prop_assert!(range.start.is_multiple_of(dtype.size_bytes()));
            }
            used.sort_by_key(|(buffer, range)| (*buffer, range.start));
            for neighbours in used.windows(2) {
                let [(a, first), (b, second)] = neighbours else { unreachable!() };
                prop_assert!(a != b || first.end <= second.start);
            }
        }
    }

    #[test]
    fn pairs_are_counted_row_by_row() {
        let all: Vec<_> = (0..6).map(|index| pair(index, 4)).collect();
        assert_eq!(all, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]);
    }
}
