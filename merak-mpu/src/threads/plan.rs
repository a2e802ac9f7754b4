//! What a collective does, cut into chunks that touch different memory.

use super::copy::copy_uncached;
use crate::{
    call::{Call, Fingerprint, Parts},
    fold,
};
use std::ops::Range;

/// Bytes of one chunk in each buffer: small enough that a few of them stay in a core's cache.
const CHUNK_BYTES: usize = 32 << 10;

/// Chunks from which on a collective copies past the caches: 32 MiB, which few of them hold.
const UNCACHED_CHUNKS: usize = (32 << 20) / CHUNK_BYTES;

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
    /// In the order of their chunks.
    Listed(Vec<Block>),
}

/// A block of a length of its own.
#[derive(Debug)]
struct Block {
    /// Its first chunk.
    first: usize,
    /// Its bytes in the buffer where it is cut out, or where a buffer has all blocks.
    bytes: Range<usize>,
    /// Where it begins in the buffer that it goes to.
    target: usize,
}

impl Blocks {
    /// The number of a chunk's block, the block, and the chunk's bytes within it.
    fn find(&self, chunk: usize) -> (usize, Block, Range<usize>) {
        let (number, block) = match self {
            Self::Equal { bytes, chunks } => {
                let number = chunk / chunks;
                let block = Block {
                    first: number * chunks,
                    bytes: number * bytes..(number + 1) * bytes,
                    target: number * bytes,
                };
                (number, block)
            }
            Self::Listed(blocks) => {
                // Blocks without a chunk share their first one with the block after them.
                let number = blocks.partition_point(|block| block.first <= chunk) - 1;
                let Block {
                    first,
                    ref bytes,
                    target,
                } = blocks[number];
                let bytes = bytes.clone();
                let block = Block {
                    first,
                    bytes,
                    target,
                };
                (number, block)
            }
        };
        let start = (chunk - block.first) * CHUNK_BYTES;
        let range = start..(start + CHUNK_BYTES).min(block.bytes.len());
        (number, block, range)
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
                    Call::ReduceScatter(_)
                    | Call::ReduceScatterInPlace(_)
                    | Call::AllGatherInPlace
                    | Call::GatherInPlace { .. } => (n, len / n),
                    Call::AllGather | Call::Gather { .. } => (n, *len),
                    Call::AllToAll => (n * (n - 1) / 2, len / n),
                    Call::Barrier => (0, 0),
                };
                let bytes = block_len * size;
                let chunks = bytes.div_ceil(CHUNK_BYTES);
                (Blocks::Equal { bytes, chunks }, blocks * chunks)
            }
            Parts::Listed(lengths) => {
                let exchange = fingerprint.call == Call::AllToAll;
                let (mut chunks, mut end) = (0, 0);
                // By receiver, where in its buffer the next part from a sender lies.
                let mut targets = vec![0; n];
                let blocks = lengths.iter().enumerate().map(|(number, len)| {
                    if exchange && number.is_multiple_of(n) {
                        end = 0;
                    }
                    let (first, start, bytes) = (chunks, end, len * size);
                    end += bytes;
                    chunks += bytes.div_ceil(CHUNK_BYTES);
                    let target = if exchange {
                        targets[number % n] += bytes;
                        targets[number % n] - bytes
                    } else {
                        start
                    };
                    Block {
                        first,
                        bytes: start..end,
                        target,
                    }
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
            (Call::Gather { root }, _) if root != rank => Some(0),
            (Call::AllGather | Call::Gather { .. }, Parts::Equal(len)) => Some(len * n),
            (Call::AllGather | Call::Gather { .. }, Parts::Listed(lengths)) => {
                Some(lengths.iter().sum())
            }
            (Call::AllToAll, Parts::Listed(lengths)) => {
                Some(lengths.iter().skip(rank).step_by(n).sum())
            }
            (
                Call::AllReduce(_)
                | Call::ReduceScatterInPlace(_)
                | Call::AllGatherInPlace
                | Call::GatherInPlace { .. }
                | Call::Broadcast { .. }
                | Call::AllToAll
                | Call::Barrier,
                _,
            ) => None,
        }
    }

    pub(super) fn num_chunks(&self) -> usize {
        self.num_chunks
    }

    /// The memory of a chunk. Footprints of two chunks never overlap, nor do the parts of one.
    pub(super) fn footprint(&self, chunk: usize) -> Footprint {
        let n = self.n;
        let (number, Block { bytes, target, .. }, range) = self.blocks.find(chunk);
        let at = |offset: usize| offset + range.start..offset + range.end;
        match self.fingerprint.call {
            Call::AllReduce(_) | Call::ReduceScatterInPlace(_) => {
                (0..n).map(|rank| (rank, at(bytes.start))).collect()
            }
            Call::ReduceScatter(_) => {
                let inputs = (0..n).map(|rank| (rank, at(bytes.start)));
                inputs.chain([(n + number, at(0))]).collect()
            }
            Call::AllGather => {
                let outputs = (0..n).map(|rank| (n + rank, at(bytes.start)));
                [(number, at(0))].into_iter().chain(outputs).collect()
            }
            Call::Gather { root } => vec![(number, at(0)), (n + root, at(bytes.start))],
            Call::AllGatherInPlace => self.to_all(number, &at(bytes.start)),
            // The root's own part is in its place.
            Call::GatherInPlace { root } if root == number => Footprint::new(),
            Call::GatherInPlace { root } => {
                vec![(number, at(bytes.start)), (root, at(bytes.start))]
            }
            Call::Broadcast { root } => self.to_all(root, &at(0)),
            Call::AllToAll if self.exchanges_parts() => {
                let (from, to) = (number / n, number % n);
                vec![(from, at(bytes.start)), (n + to, at(target))]
            }
            Call::AllToAll => {
                let (low, high) = pair(number, n);
                let part = |number: usize| at(number * bytes.len());
                vec![(low, part(high)), (high, part(low))]
            }
            Call::Barrier => Footprint::new(),
        }
    }

    /// A range of all inputs, first that of the member whose bytes the others get.
    fn to_all(&self, source: usize, range: &Range<usize>) -> Footprint {
        let others = (0..self.n).filter(|&rank| rank != source);
        let inputs = [source].into_iter().chain(others);
        inputs.map(|rank| (rank, range.clone())).collect()
    }

    /// Computes a chunk, given the memory of its footprint.
    pub(super) fn compute(&self, chunk: usize, memory: &mut [&mut [u8]]) {
        let Fingerprint { call, dtype, .. } = self.fingerprint;
        match call {
            Call::AllReduce(op) => fold::reduce(dtype, op, self.n, memory, 0..self.n),
            Call::ReduceScatter(op) => {
                fold::reduce(dtype, op, self.n, memory, self.n..self.n + 1);
            }
            Call::ReduceScatterInPlace(op) => {
                let (owner, ..) = self.blocks.find(chunk);
                fold::reduce(dtype, op, self.n, memory, owner..owner + 1);
            }
            Call::AllToAll if !self.exchanges_parts() => {
                if let [low, high] = memory {
                    low.swap_with_slice(high);
                }
            }
            Call::AllGather
            | Call::AllGatherInPlace
            | Call::Gather { .. }
            | Call::GatherInPlace { .. }
            | Call::Broadcast { .. }
            | Call::AllToAll => {
                if let Some((source, targets)) = memory.split_first_mut() {
                    for target in targets {
                        if self.num_chunks < UNCACHED_CHUNKS {
                            target.copy_from_slice(source);
                        } else {
                            copy_uncached(target, source);
                        }
                    }
                }
            }
            Call::Barrier => {}
        }
    }

    /// Whether the parts of an exchange have lengths of their own, so that it needs room for them.
    fn exchanges_parts(&self) -> bool {
        matches!(self.fingerprint.parts, Parts::Listed(_))
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
    use crate::{DType, ReduceOp};
    use proptest::prelude::*;

    fn calls(n: usize) -> impl Strategy<Value = Call> {
        prop_oneof![
            Just(Call::AllReduce(ReduceOp::Sum)),
            Just(Call::ReduceScatter(ReduceOp::Max)),
            Just(Call::AllGather),
            Just(Call::ReduceScatterInPlace(ReduceOp::Min)),
            Just(Call::AllGatherInPlace),
            (0..n).prop_map(|root| Call::Gather { root }),
            (0..n).prop_map(|root| Call::GatherInPlace { root }),
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
            let cuts = matches!(
                call,
                Call::ReduceScatter(_)
                    | Call::ReduceScatterInPlace(_)
                    | Call::AllGatherInPlace
                    | Call::GatherInPlace { .. }
            );
            let joins = matches!(call, Call::AllGather | Call::Gather { .. });
            let exchanges = call == Call::AllToAll;
            let len = if cuts || call == Call::AllToAll { part * n } else { part };
            let lengths: Vec<usize> = (0..n).map(|rank| rank % 3 * part / 2).collect();
            let matrix: Vec<usize> = (0..n * n).map(|pair| pair % 5 * part / 3).collect();
            let (parts, inputs) = match uneven && (cuts || joins || exchanges) {
                true if exchanges => {
                    let inputs = matrix.chunks(n).map(|row| row.iter().sum());
                    (Parts::Listed(matrix.as_slice().into()), inputs.collect())
                }
                false => (Parts::Equal(len), vec![len; n]),
                true if cuts => (Parts::Listed(lengths.as_slice().into()), vec![lengths.iter().sum(); n]),
                true => (Parts::Listed(lengths.as_slice().into()), lengths),
            };
            let fingerprint = Fingerprint { call, dtype, parts };
            let plan = ChunkPlan::new(fingerprint.clone(), n);
            let outputs = (0..n).filter_map(|rank| ChunkPlan::output_len(&fingerprint, rank, n));
            let sizes: Vec<_> = inputs.into_iter().chain(outputs).map(|len| len * dtype.size_bytes()).collect();
            let touched: usize = (0..plan.num_chunks()).flat_map(|chunk| plan.footprint(chunk)).map(|(_, range)| range.len()).sum();
            let expected = match call {
                // The root's own part stays, and those of the others are in one other buffer.
                Call::GatherInPlace { root } => {
                    let own = if uneven { root % 3 * part / 2 } else { part };
                    2 * (sizes[0] - own * dtype.size_bytes())
                }
                _ => sizes.iter().sum(),
            };
            if call != Call::Barrier && (uneven || !exchanges) {
                prop_assert_eq!(touched, expected);
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
