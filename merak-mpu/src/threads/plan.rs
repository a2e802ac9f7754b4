//! What a collective does, cut into chunks that touch different memory.

use super::kernel;
use crate::{DType, ReduceOp};
use std::{fmt, ops::Range, sync::Arc};

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

/// The lengths of what the members bring or get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Parts {
    /// Each member's buffer is of this length, and where it is cut, it is cut evenly.
    Equal(usize),
    /// By member, the length of its part: of its input where parts are joined, of its output where
    /// a buffer is cut.
    Listed(Arc<[usize]>),
}

/// What all members of a group must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub(super) call: Call,
    pub(super) dtype: DType,
    pub(super) parts: Parts,
}

/// Most lengths of parts that a message lists.
const MOST_LISTED: usize = 16;

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, dtype, parts } = self;
        f.write_str(call.name())?;
        match call {
            Call::AllReduce(op) | Call::ReduceScatter(op) => write!(f, "({op})")?,
            Call::Broadcast { root } => write!(f, "(root {root})")?,
            Call::Barrier => return Ok(()),
            Call::AllGather | Call::AllToAll => {}
        }
        match parts {
            Parts::Equal(len) => write!(f, " of {len} {dtype}"),
            Parts::Listed(lengths) => {
                let listed = &lengths[..lengths.len().min(MOST_LISTED)];
                let more = if listed.len() < lengths.len() {
                    ", .."
                } else {
                    ""
                };
                let whole: usize = lengths.iter().sum();
                let listed: Vec<_> = listed.iter().map(usize::to_string).collect();
                let listed = listed.join(", ");
                write!(f, " of {whole} {dtype} in parts of {listed}{more}")
            }
        }
    }
}

/// The chunks of one collective over `n` members.
///
/// Buffers are numbered: the inputs by group rank, then the outputs by group rank where the call
/// has them. Memory falls into blocks (the part of one rank, or the exchange of two), and these
/// into chunks.
#[derive(Debug)]
pub(super) struct ChunkPlan {
    fingerprint: Fingerprint,
    n: usize,
    blocks: Blocks,
    num_chunks: usize,
}

/// The blocks of a plan.
#[derive(Debug)]
enum Blocks {
    /// Each block has this many bytes in each buffer.
    Equal { bytes: usize, chunks: usize },
    /// By block, its first chunk, and its bytes in a buffer that has all blocks.
    Listed(Vec<(usize, Range<usize>)>),
}

impl Blocks {
    /// The block of a chunk, its bytes in a buffer that has all blocks, and the chunk's within
    /// them.
    fn find(&self, chunk: usize) -> (usize, Range<usize>, Range<usize>) {
        let (block, first, bytes) = match self {
            Self::Equal { bytes, chunks } => {
                let block = chunk / chunks;
                (block, block * chunks, block * bytes..(block + 1) * bytes)
            }
            Self::Listed(blocks) => {
                // Blocks without a chunk share their first one with the block behind them.
                let block = blocks.partition_point(|(first, _)| *first <= chunk) - 1;
                let (first, bytes) = &blocks[block];
                (block, *first, bytes.clone())
            }
        };
        let start = (chunk - first) * CHUNK_BYTES;
        let range = start..(start + CHUNK_BYTES).min(bytes.len());
        (block, bytes, range)
    }
}

/// The memory that a chunk touches, as a buffer number and a range of its bytes.
pub(super) type Footprint = Vec<(usize, Range<usize>)>;

impl ChunkPlan {
    pub(super) fn new(fingerprint: Fingerprint, n: usize) -> Self {
        let size = fingerprint.dtype.size_bytes();
        let (blocks, num_chunks) = match &fingerprint.parts {
            Parts::Equal(len) => {
                let (blocks, block_len) = match fingerprint.call {
                    Call::AllReduce(_) | Call::Broadcast { .. } => (1, *len),
                    Call::ReduceScatter(_) => (n, len / n),
                    Call::AllGather => (n, *len),
                    Call::AllToAll => (n * (n - 1) / 2, len / n),
                    Call::Barrier => (0, 0),
                };
                let bytes = block_len * size;
                let chunks = bytes.div_ceil(CHUNK_BYTES);
                (Blocks::Equal { bytes, chunks }, blocks * chunks)
            }
            Parts::Listed(lengths) => {
                let (mut chunks, mut end) = (0, 0);
                let blocks = lengths.iter().map(|len| {
                    let (first, start) = (chunks, end);
                    end += len * size;
                    chunks += (len * size).div_ceil(CHUNK_BYTES);
                    (first, start..end)
                });
                (Blocks::Listed(blocks.collect()), chunks)
            }
        };
        Self {
            fingerprint,
            n,
            blocks,
            num_chunks,
        }
    }

    /// The length of the output of member `rank`, when the call does not work in place.
    pub(super) fn output_len(fingerprint: &Fingerprint, rank: usize, n: usize) -> Option<usize> {
        match (fingerprint.call, &fingerprint.parts) {
            (Call::ReduceScatter(_), Parts::Equal(len)) => Some(len / n),
            (Call::ReduceScatter(_), Parts::Listed(lengths)) => Some(lengths[rank]),
            (Call::AllGather, Parts::Equal(len)) => Some(len * n),
            (Call::AllGather, Parts::Listed(lengths)) => Some(lengths.iter().sum()),
            (Call::AllReduce(_) | Call::Broadcast { .. } | Call::AllToAll | Call::Barrier, _) => {
                None
            }
        }
    }

    pub(super) fn num_chunks(&self) -> usize {
        self.num_chunks
    }

    /// The memory of a chunk. Footprints of two chunks never overlap, nor do the parts of one.
    pub(super) fn footprint(&self, chunk: usize) -> Footprint {
        let n = self.n;
        let (block, bytes, range) = self.blocks.find(chunk);
        let at = |offset: usize| offset + range.start..offset + range.end;
        match self.fingerprint.call {
            Call::AllReduce(_) => (0..n).map(|rank| (rank, at(0))).collect(),
            Call::ReduceScatter(_) => {
                let inputs = (0..n).map(|rank| (rank, at(bytes.start)));
                inputs.chain([(n + block, at(0))]).collect()
            }
            Call::AllGather => {
                let outputs = (0..n).map(|rank| (n + rank, at(bytes.start)));
                [(block, at(0))].into_iter().chain(outputs).collect()
            }
            Call::Broadcast { root } => {
                let others = (0..n).filter(|&rank| rank != root);
                [root]
                    .into_iter()
                    .chain(others)
                    .map(|rank| (rank, at(0)))
                    .collect()
            }
            Call::AllToAll => {
                let (low, high) = pair(block, n);
                let part = |number: usize| at(number * bytes.len());
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
            uneven: bool,
            dtype in prop::sample::select(DType::ALL.as_slice()),
        ) {
            let (cuts, joins) = (matches!(call, Call::ReduceScatter(_)), matches!(call, Call::AllGather));
            let len = if cuts || call == Call::AllToAll { part * n } else { part };
            let lengths: Vec<usize> = (0..n).map(|rank| rank % 3 * part / 2).collect();
            let (parts, inputs) = match uneven && (cuts || joins) {
                false => (Parts::Equal(len), vec![len; n]),
                true if cuts => (Parts::Listed(lengths.as_slice().into()), vec![lengths.iter().sum(); n]),
                true => (Parts::Listed(lengths.as_slice().into()), lengths),
            };
            let fingerprint = Fingerprint { call, dtype, parts };
            let plan = ChunkPlan::new(fingerprint.clone(), n);
            let outputs = (0..n).filter_map(|rank| ChunkPlan::output_len(&fingerprint, rank, n));
            let sizes: Vec<_> = inputs.into_iter().chain(outputs).map(|len| len * dtype.size_bytes()).collect();
            let touched: usize = (0..plan.num_chunks()).flat_map(|chunk| plan.footprint(chunk)).map(|(_, range)| range.len()).sum();
            if call != Call::Barrier && call != Call::AllToAll {
                prop_assert_eq!(touched, sizes.iter().sum::<usize>());
            }
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
