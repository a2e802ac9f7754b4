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
/// Its parts are as equal as whole blocks allow; a collective pads each to the longest, so that its
/// length is a multiple of the group's world size while the buffer itself stays free of holes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatLayout {
    params: Vec<ParamSpec>,
    offsets: Vec<usize>,
    blocks: Vec<Block>,
    buckets: Vec<Bucket>,
}

/// A stretch of the flat buffer that one collective reduces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Elements of the flat buffer.
    pub flat: Range<usize>,
    /// What each rank of the group owns: ascending, adjacent, together `flat`, some may be empty.
    pub parts: Vec<Part>,
}

/// What one rank owns of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Elements of the flat buffer.
    pub flat: Range<usize>,
    /// Positions in [`FlatLayout::blocks`].
    pub blocks: Range<usize>,
}

impl Bucket {
    /// The length of the longest part, to which a collective pads all.
    pub fn part_capacity(&self) -> usize {
        self.parts.iter().map(|p| p.flat.len()).max().unwrap_or(0)
    }
}

impl FlatLayout {
    /// Lays out `params` in the given order for a group of `num_parts` ranks.
    ///
    /// # Errors
    /// When a parameter is listed twice, or `bucket_size` or `num_parts` is 0.
    pub fn new(params: Vec<ParamSpec>, bucket_size: usize, num_parts: usize) -> Result<Self> {
        for (key, found) in [("bucket size", bucket_size), ("number of parts", num_parts)] {
            if found == 0 {
                return Err(Error::OutOfRange {
                    key,
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
        let buckets = cut_into_buckets(&blocks, max_len)
            .into_iter()
            .map(|range| cut_into_parts(&blocks, range, num_parts))
            .collect();
        Ok(Self {
            params,
            offsets,
            blocks,
            buckets,
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

/// Ranges of blocks with at most `max_len` elements each, but at least one block.
fn cut_into_buckets(blocks: &[Block], max_len: usize) -> Vec<Range<usize>> {
    let mut buckets = Vec::new();
    let mut first = 0;
    for (i, block) in blocks.iter().enumerate() {
        if i > first && block.flat.end - blocks[first].flat.start > max_len {
            buckets.push(first..i);
            first = i;
        }
    }
    if first < blocks.len() {
        buckets.push(first..blocks.len());
    }
    buckets
}

/// Gives each block to the part in which its middle would lie if the parts were exactly equal.
fn cut_into_parts(blocks: &[Block], bucket: Range<usize>, num_parts: usize) -> Bucket {
    let own = &blocks[bucket.clone()];
    let flat = own[0].flat.start..own[own.len() - 1].flat.end;
    let first_of = |part: usize| {
        own.partition_point(|b| {
            let twice_middle = b.flat.start + b.flat.end - 2 * flat.start;
            twice_middle * num_parts < 2 * part * flat.len()
        })
    };
    let start_of = |block: usize| own.get(block).map_or(flat.end, |b| b.flat.start);
    let parts = (0..num_parts)
        .map(|part| {
            let (first, end) = (first_of(part), first_of(part + 1));
            Part {
                flat: start_of(first)..start_of(end),
                blocks: bucket.start + first..bucket.start + end,
            }
        })
        .collect();
    Bucket { flat, parts }
}
