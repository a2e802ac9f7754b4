//! Reading the wanted elements of one slice, block by block, checking it on the way.

use crate::common_runs::{Side, advance, for_each_run};
use crate::crc32::Sums;
use crate::error::Problem;
use crate::layout::PartRange;
use crate::manifest::SliceEntry;
use crate::{Checksum, Piece, Region};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use xxhash_rust::xxh3::Xxh3;

/// Most bytes that are read at once into a block.
const BLOCK_BYTES: usize = 1 << 20;
/// Fewest bytes that are read directly to their place.
const DIRECT_BYTES: usize = 1 << 16;
/// Most bytes that are read to their place before they are hashed, so that they are still in the
/// processor's cache.
const HASHED_BYTES: usize = 1 << 18;

/// A slice and where its bytes are.
pub(crate) struct SliceReader<'a> {
    pub(crate) file: &'a File,
    pub(crate) entry: &'a SliceEntry,
    /// Bytes of an element.
    pub(crate) width: usize,
    /// Whether the checksum has been found right before.
    pub(crate) verified: &'a AtomicBool,
    /// Checksums of the file's own, where it has some.
    pub(crate) sums: Option<&'a Sums>,
}

/// A walk through the bytes of a slice, forwards, one block in memory at a time.
struct Blocks<'a> {
    slice: &'a SliceReader<'a>,
    block: Vec<u8>,
    /// Offset of the block in the slice.
    begin: usize,
    /// Present while the slice has yet to be checked: then no block is skipped.
    hasher: Option<Box<Xxh3>>,
}

/// Copies what the slice and the wanted part have in common to its place in `out`.
pub(crate) fn read_slice(
    slice: &SliceReader<'_>,
    part: &PartRange<'_>,
    piece: &Piece<'_>,
    out: &mut [u8],
) -> Result<(), Problem> {
    let stored = slice.entry.region();
    let Some(common) = stored.intersection(&part.part.region) else {
        return Ok(());
    };
    if let Some(strides) = &slice.entry.strides {
        return Lines::new(slice, strides, &common, part, piece).read(&common, out);
    }
    let from_start: Vec<_> = difference(&common.offset, &stored.offset).collect();
    let to_start: Vec<_> = difference(&common.offset, &part.part.region.offset)
        .zip(&part.part.local_offset)
        .map(|(within, offset)| within + offset)
        .collect();
    let from = Side {
        shape: &stored.size,
        start: &from_start,
        window: slice.entry.flat_range(),
    };
    let to = Side {
        shape: piece.layout.local_shape(),
        start: &to_start,
        window: piece.flat_range(),
    };
    let mut blocks = None;
    for_each_run(&common.size, &from, &to, &mut |from, to, len| {
        let blocks = blocks.get_or_insert_with(|| Blocks::new(slice));
        let [from, to, len] = [from, to, len].map(|elements| elements * slice.width);
        blocks.copy(from, &mut out[to..to + len])
    })?;
    blocks.map_or(Ok(()), Blocks::finish)
}

/// A box of a slice that is not in row-major order, as lines of adjacent elements.
struct Lines<'a> {
    slice: &'a SliceReader<'a>,
    strides: &'a [usize],
    /// The dim of the lines.
    dim: usize,
    /// The first element of the box, in the slice's bytes and in the wanted array.
    from: usize,
    to: usize,
    /// Elements of the wanted array from one index to the next of each dim.
    to_strides: Vec<usize>,
    /// Elements of that array that are wanted.
    window: Range<usize>,
    block: Vec<u8>,
}

impl<'a> Lines<'a> {
    fn new(
        slice: &'a SliceReader<'a>,
        strides: &'a [usize],
        common: &Region,
        part: &PartRange<'_>,
        piece: &Piece<'_>,
    ) -> Self {
        let local = piece.layout.local_shape();
        let mut to_strides = vec![1; local.len()];
        for dim in (1..local.len()).rev() {
            to_strides[dim - 1] = to_strides[dim] * local[dim];
        }
        let long = (0..strides.len()).filter(|&dim| common.size[dim] > 1);
        let within = difference(&common.offset, &slice.entry.offset);
        let wanted = difference(&common.offset, &part.part.region.offset);
        let wanted = wanted.zip(&part.part.local_offset).map(|(a, b)| a + b);
        Self {
            dim: long.min_by_key(|&dim| strides[dim]).unwrap_or(0),
            from: within
                .zip(strides)
                .map(|(index, stride)| index * stride)
                .sum(),
            to: wanted
                .zip(&to_strides)
                .map(|(index, stride)| index * stride)
                .sum(),
            window: piece.flat_range(),
            block: Vec::new(),
            slice,
            strides,
            to_strides,
        }
    }

    /// Copies the lines of the box to their places.
    fn read(mut self, common: &Region, out: &mut [u8]) -> Result<(), Problem> {
        let mut outer = common.size.clone();
        let length = std::mem::replace(&mut outer[self.dim], 1);
        let mut index = vec![0; outer.len()];
        loop {
            let at = |strides: &[usize]| -> usize {
                index
                    .iter()
                    .zip(strides)
                    .map(|(index, stride)| index * stride)
                    .sum()
            };
            let (from, to) = (self.from + at(self.strides), self.to + at(&self.to_strides));
            self.line(from, to, length, out)?;
            if !advance(&mut index, &outer) {
                return Ok(());
            }
        }
    }

    /// Copies the wanted elements of the line that begins at these elements.
    fn line(
        &mut self,
        from: usize,
        to: usize,
        length: usize,
        out: &mut [u8],
    ) -> Result<(), Problem> {
        let (width, step) = (self.slice.width, self.to_strides[self.dim]);
        let stride = self.strides[self.dim].max(1);
        let first = |bound: usize| bound.saturating_sub(to).div_ceil(step).min(length);
        let mut next = first(self.window.start);
        let end = first(self.window.end);
        let at_once = (BLOCK_BYTES / width / stride).max(1);
        while next < end {
            let count = at_once.min(end - next);
            let bytes = ((count - 1) * stride + 1) * width;
            self.block.resize(bytes, 0);
            read(self.slice, (from + next * stride) * width, &mut self.block)?;
            for (nth, element) in self.block.chunks(stride * width).enumerate() {
                let place = (to + (next + nth) * step - self.window.start) * width;
                out[place..place + width].copy_from_slice(&element[..width]);
            }
            next += count;
        }
        Ok(())
    }
}

impl SliceReader<'_> {
    /// Length in bytes.
    fn len(&self) -> usize {
        (self.entry.bytes[1] - self.entry.bytes[0]) as usize
    }
}

impl<'a> Blocks<'a> {
    fn new(slice: &'a SliceReader<'a>) -> Self {
        let verified = slice.verified.load(Ordering::Relaxed);
        Self {
            slice,
            block: Vec::new(),
            begin: 0,
            hasher: (!verified).then(|| Box::new(Xxh3::new())),
        }
    }

    /// Copies the slice's bytes from `at` on; `at` never decreases from call to call.
    fn copy(&mut self, mut at: usize, mut out: &mut [u8]) -> Result<(), Problem> {
        while !out.is_empty() {
            let n = self.read_to(at, out)?;
            at += n;
            out = &mut out[n..];
        }
        Ok(())
    }

    /// Copies some of the bytes from `at` on, at least one; says how many.
    fn read_to(&mut self, at: usize, out: &mut [u8]) -> Result<usize, Problem> {
        let end = self.begin + self.block.len();
        let is_next = at == end || at > end && self.hasher.is_none();
        if is_next && out.len() >= DIRECT_BYTES {
            let n = match self.hasher {
                Some(_) => out.len().min(HASHED_BYTES),
                None => out.len(),
            };
            read(self.slice, at, &mut out[..n])?;
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&out[..n]);
            }
            self.block.clear();
            self.begin = at + n;
            return Ok(n);
        }
        let available = self.seek(at)?;
        let n = available.len().min(out.len());
        out[..n].copy_from_slice(&available[..n]);
        Ok(n)
    }

    /// Reads the remaining blocks where the slice has yet to be checked, and checks it.
    fn finish(mut self) -> Result<(), Problem> {
        if self.hasher.is_some() {
            while self.begin + self.block.len() < self.slice.len() {
                self.load(self.begin + self.block.len())?;
            }
        }
        let Some(hasher) = self.hasher else {
            return Ok(());
        };
        let (expected, found) = (self.slice.entry.checksum, Checksum(hasher.digest()));
        if expected != found {
            return Err(Problem::Checksum { expected, found });
        }
        mark(self.slice.verified);
        Ok(())
    }

    /// The bytes from `at` to the end of its block.
    fn seek(&mut self, at: usize) -> Result<&[u8], Problem> {
        while at >= self.begin + self.block.len() {
            let next = self.begin + self.block.len();
            let skips = self.hasher.is_none();
            self.load(if skips {
                at / BLOCK_BYTES * BLOCK_BYTES
            } else {
                next
            })?;
        }
        Ok(&self.block[at - self.begin..])
    }

    fn load(&mut self, begin: usize) -> Result<(), Problem> {
        self.begin = begin;
        self.block
            .resize(BLOCK_BYTES.min(self.slice.len() - begin), 0);
        read(self.slice, begin, &mut self.block)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&self.block);
        }
        Ok(())
    }
}

/// Marks a slice, or a header, as checked.
pub(crate) fn mark(flag: &AtomicBool) {
    flag.store(true, Ordering::Relaxed);
}

/// Fills `out` with the slice's bytes from `at` on.
fn read(slice: &SliceReader<'_>, at: usize, out: &mut [u8]) -> Result<(), Problem> {
    let offset = slice.entry.bytes[0] + at as u64;
    slice
        .file
        .read_exact_at(out, offset)
        .map_err(|error: io::Error| Problem::Unreadable {
            reason: error.to_string(),
        })?;
    let passed = slice
        .sums
        .map_or(Ok(()), |sums| sums.pass(slice.file, offset, out));
    passed.map_err(|reason| Problem::Malformed { reason })
}

fn difference<'a>(a: &'a [usize], b: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    a.iter().zip(b).map(|(a, b)| a - b)
}
