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
/// Every border lies on a norm-block border, and inside no parameter that must stay whole. Between
/// such borders lies a unit: a norm block or a whole parameter. A bucket is the most units within
/// the bucket size and an eighth of the buffer (or 1 Mi elements, when that is more), but at least
/// one; with [`FlatLayout::with_whole_buckets`] it is as many whole parameters. Its parts are as
/// equal as units allow, and follow from the bucket and the rank, so that the layout holds no list
/// of ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct FlatLayout {
    params: Vec<ParamSpec>,
    offsets: Vec<usize>,
    blocks: Vec<Block>,
    /// Positions of the blocks of each unit.
    units: Vec<Range<usize>>,
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
        Self::with_whole(params, bucket_size, num_parts, |_| false)
    }

    /// The same, where the parameters that `is_whole` selects stay whole: one bucket and one part
    /// has all of such a parameter.
    ///
    /// # Errors
    /// As [`FlatLayout::new`].
    pub fn with_whole(
        params: Vec<ParamSpec>,
        bucket_size: usize,
        num_parts: usize,
        is_whole: impl Fn(&ParamSpec) -> bool,
    ) -> Result<Self> {
        Self::laid_out(params, (bucket_size, num_parts), is_whole, |_| false)
    }

    /// The same, where one bucket has all of each parameter, so that a bucket can come and go as a
    /// whole.
    ///
    /// # Errors
    /// As [`FlatLayout::new`].
    pub fn with_whole_buckets(
        params: Vec<ParamSpec>,
        bucket_size: usize,
        num_parts: usize,
        is_whole: impl Fn(&ParamSpec) -> bool,
    ) -> Result<Self> {
        Self::laid_out(params, (bucket_size, num_parts), is_whole, |_| true)
    }

    /// `is_whole` selects the parameters that one part has all of, `in_one_bucket` those that one
    /// bucket has all of.
    fn laid_out(
        params: Vec<ParamSpec>,
        (bucket_size, num_parts): (usize, usize),
        is_whole: impl Fn(&ParamSpec) -> bool,
        in_one_bucket: impl Fn(&ParamSpec) -> bool,
    ) -> Result<Self> {
        for (setting, found) in [("bucket size", bucket_size), ("number of parts", num_parts)] {
            if found == 0 {
                return Err(Error::out_of_range(setting, found, "at least 1"));
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
        let units = units(&blocks, |param| is_whole(&params[param]));
        let lumps = self::units(&blocks, |param| {
            is_whole(&params[param]) || in_one_bucket(&params[param])
        });
        let buckets = cut_into_buckets(&blocks, &lumps, max_len);
        Ok(Self {
            params,
            offsets,
            blocks,
            units,
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

    /// What one rank of the group owns of a bucket: the units whose middle would lie in its part if
    /// all parts were exactly equal. Parts of successive ranks are adjacent, together they are the
    /// bucket, and some may be empty.
    pub fn part(&self, bucket: &Bucket, rank: usize) -> Part {
        let unit_of = |block: usize| self.units.partition_point(|unit| unit.start < block);
        let own = &self.units[unit_of(bucket.blocks.start)..unit_of(bucket.blocks.end)];
        let first_of = |part: usize| {
            own.partition_point(|unit| {
                let flat = flat(&self.blocks, unit);
                let twice_middle = flat.start + flat.end - 2 * bucket.flat.start;
                twice_middle * self.num_parts < 2 * part * bucket.flat.len()
            })
        };
        let block_of = |unit: usize| own.get(unit).map_or(bucket.blocks.end, |u| u.start);
        let start_of = |unit: usize| match own.get(unit) {
            Some(unit) => flat(&self.blocks, unit).start,
            None => bucket.flat.end,
        };
        let (first, end) = (first_of(rank), first_of(rank + 1));
        Part {
            flat: start_of(first)..start_of(end),
            blocks: block_of(first)..block_of(end),
        }
    }

    /// What each rank of the group owns of a bucket, in rank order.
    pub fn parts(&self, bucket: &Bucket) -> impl ExactSizeIterator<Item = Part> {
        (0..self.num_parts).map(|rank| self.part(bucket, rank))
    }
}

/// Which elements of a layout a flat buffer has, in flat order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of them.
    All,
    /// Those that the rank owns.
    Owned,
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

/// The blocks of each unit.
fn units(blocks: &[Block], is_whole: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut units: Vec<Range<usize>> = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        match units.last_mut() {
            Some(unit) if block.local.start > 0 && is_whole(block.param) => unit.end = index + 1,
            _ => units.push(index..index + 1),
        }
    }
    units
}

/// The elements of adjacent blocks, of which there is one at least.
fn flat(blocks: &[Block], range: &Range<usize>) -> Range<usize> {
    blocks[range.start].flat.start..blocks[range.end - 1].flat.end
}

/// Stretches of units with at most `max_len` elements each, but at least one unit.
fn cut_into_buckets(blocks: &[Block], units: &[Range<usize>], max_len: usize) -> Vec<Bucket> {
    let bucket = |range: Range<usize>| Bucket {
        flat: flat(blocks, &range),
        blocks: range,
    };
    let mut buckets = Vec::new();
    let mut first = 0;
    for unit in units {
        if unit.start > first && flat(blocks, &(first..unit.end)).len() > max_len {
            buckets.push(bucket(first..unit.start));
            first = unit.start;
        }
    }
    if first < blocks.len() {
        buckets.push(bucket(first..blocks.len()));
    }
    buckets
}
