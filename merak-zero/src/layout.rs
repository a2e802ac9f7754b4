//! Where each parameter lies in the flat buffers, and which rank owns what.

use crate::{Block, Error, NORM_BLOCK, ParamSpec, Result};
use std::{collections::BTreeSet, ops::Range};

/// The smallest bucket that is cut for the sake of overlap: 4 MiB of f32.
const MIN_OVERLAP_BUCKET: usize = 1 << 20;
/// With this many buckets, reduction and backward overlap well.
const OVERLAP_BUCKETS: usize = 8;

/// The parameters of one rank, laid end to end in one flat buffer, cut into buckets and parts.
///
/// ```text
/// flat      | wte                     | wpe   | ln | c_attn          | ..
/// blocks    |       |       |       | |       |    |       |       | | ..  borders of norm blocks
/// buckets   | 0                         | 1                            | ..  one collective each
/// parts     | rank 0       | rank 1     | rank 0       | rank 1        | ..  one for each rank
/// ```
///
/// Every border lies on a norm-block border. A bucket is the most norm blocks within the bucket
/// size and an eighth of the buffer (or 1 Mi elements, when that is more), but at least one block.
/// Its parts are as equal as whole blocks allow, and follow from the bucket and the rank, so that
/// the layout holds no list of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatLayout {
    params: Vec<ParamSpec>,
    offsets: Vec<usize>,
    blocks: Vec<Block>,
    buckets: Vec<Bucket>,
    num_parts: usize,
}

/// A stretch of the flat buffer that one collective reduces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Elements of the flat buffer.
    pub flat: Range<usize>,
    /// Positions in [`FlatLayout::blocks`].
    pub blocks: Range<usize>,
}

/// What one rank owns of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Elements of the flat buffer.
    pub flat: Range<usize>,
    /// Positions in [`FlatLayout::blocks`].
    pub blocks: Range<usize>,
}

impl FlatLayout {
    /// Lays out `params` in the given order for a group of `num_parts` ranks.
    ///
    /// # Errors
    /// When a parameter is listed twice, or `bucket_size` or `num_parts` is 0.
    pub fn new(params: Vec<ParamSpec>, bucket_size: usize, num_parts: usize) -> Result<Self> {
        for (setting, found) in [("bucket size", bucket_size), ("number of parts", num_parts)] {
            if found == 0 {
                return Err(Error::OutOfRange {
                    setting,
                    found: found.to_string(),
                    expected: "at least 1",
                });
            }
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = params.iter().find(|p| !seen.insert(p.global_index)) {
            return Err(Error::DuplicateParam {
                param: twice.name.clone(),
            });
        }
        let offsets = offsets(&params);
        let blocks = blocks(&params, &offsets);
        let len = offsets[params.len()];
        let max_len = bucket_size.min((len / OVERLAP_BUCKETS).max(MIN_OVERLAP_BUCKET));
        let buckets = cut_into_buckets(&blocks, max_len);
        Ok(Self {
            params,
            offsets,
            blocks,
            buckets,
            num_parts,
        })
    }

    /// The number of elements of the flat buffer.
    pub fn len(&self) -> usize {
        self.offsets[self.params.len()]
    }

    /// Whether this rank has no trainable element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The parameters, in the order in which they lie.
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// The elements of the flat buffer that hold the parameter at this position.
    ///
    /// # Panics
    /// When there are not that many parameters.
    pub fn range(&self, param: usize) -> Range<usize> {
        self.offsets[param]..self.offsets[param + 1]
    }

    /// The norm blocks, in the order in which they lie.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The buckets, in the order in which they lie; a backward pass completes them from the last.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// What one rank of the group owns of a bucket: the blocks whose middle would lie in its part
    /// if all parts were exactly equal. Parts of successive ranks are adjacent, together they are
    /// the bucket, and some may be empty.
    pub fn part(&self, bucket: &Bucket, rank: usize) -> Part {
        let own = &self.blocks[bucket.blocks.clone()];
        let first_of = |part: usize| {
            own.partition_point(|b| {
                let twice_middle = b.flat.start + b.flat.end - 2 * bucket.flat.start;
                twice_middle * self.num_parts < 2 * part * bucket.flat.len()
            })
        };
        let start_of = |block: usize| own.get(block).map_or(bucket.flat.end, |b| b.flat.start);
        let (first, end) = (first_of(rank), first_of(rank + 1));
        Part {
            flat: start_of(first)..start_of(end),
            blocks: bucket.blocks.start + first..bucket.blocks.start + end,
        }
    }

    /// What each rank of the group owns of a bucket, in rank order.
    pub fn parts(&self, bucket: &Bucket) -> impl ExactSizeIterator<Item = Part> {
        (0..self.num_parts).map(|rank| self.part(bucket, rank))
    }
}

/// The running sum of the lengths, from 0 to the total.
fn offsets(params: &[ParamSpec]) -> Vec<usize> {
    let mut end = 0;
    let ends = params.iter().map(|p| {
        end += p.numel();
        end
    });
    std::iter::once(0).chain(ends).collect()
}

fn blocks(params: &[ParamSpec], offsets: &[usize]) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (param, (spec, &offset)) in params.iter().zip(offsets).enumerate() {
        let numel = spec.numel();
        for start in (0..numel).step_by(NORM_BLOCK) {
            let local = start..numel.min(start + NORM_BLOCK);
            blocks.push(Block {
                param,
                flat: offset + local.start..offset + local.end,
                local,
            });
        }
    }
    blocks
}

/// Stretches of blocks with at most `max_len` elements each, but at least one block.
fn cut_into_buckets(blocks: &[Block], max_len: usize) -> Vec<Bucket> {
    let bucket = |range: Range<usize>| Bucket {
        flat: blocks[range.start].flat.start..blocks[range.end - 1].flat.end,
        blocks: range,
    };
    let mut buckets = Vec::new();
    let mut first = 0;
    for (i, block) in blocks.iter().enumerate() {
        if i > first && block.flat.end - blocks[first].flat.start > max_len {
            buckets.push(bucket(first..i));
            first = i;
        }
    }
    if first < blocks.len() {
        buckets.push(bucket(first..blocks.len()));
    }
    buckets
}
