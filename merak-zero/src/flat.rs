//! Views of flat f32 buffers, and the work on their blocks.

use crate::{Block, Error, Result};
use merak_mpu::{Buffer, DType};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Fewer jobs than this run on the calling thread.
const MIN_PARALLEL_JOBS: usize = 16;

/// Checks that a caller's buffer is the flat f32 buffer of the layout.
pub(crate) fn check(what: &'static str, buffer: &dyn Buffer, len: usize) -> Result<()> {
    if buffer.dtype() != DType::F32 {
        return Err(Error::BufferType {
            what,
            found: buffer.dtype(),
        });
    }
    if buffer.len() != len {
        return Err(Error::BufferLength {
            what,
            expected: len,
            found: buffer.len(),
        });
    }
    Ok(())
}

/// Calls `f` with the elements of an f32 buffer.
pub(crate) fn read<R>(buffer: &dyn Buffer, f: impl FnOnce(&[f32]) -> R) -> R {
    let (mut f, mut out) = (Some(f), None);
    buffer.read(&mut |bytes| {
        let f = f.take().expect("a buffer calls back once");
        out = Some(f(bytemuck::cast_slice(bytes)));
    });
    out.expect("a buffer calls back once")
}

/// Calls `f` with the elements of an f32 buffer for writing.
pub(crate) fn write<R>(buffer: &mut dyn Buffer, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let (mut f, mut out) = (Some(f), None);
    buffer.write(&mut |bytes| {
        let f = f.take().expect("a buffer calls back once");
        out = Some(f(bytemuck::cast_slice_mut(bytes)));
    });
    out.expect("a buffer calls back once")
}

/// Calls `f` with these elements of an f32 buffer for writing.
pub(crate) fn write_part(buffer: &mut dyn Buffer, part: Range<usize>, f: impl FnOnce(&mut [f32])) {
    let mut f = Some(f);
    let size = DType::F32.size_bytes();
    let bytes = part.start * size..part.end * size;
    buffer.write_part(bytes, &mut |bytes| {
        let f = f.take().expect("a buffer calls back once");
        f(bytemuck::cast_slice_mut(bytes));
    });
}

/// Cuts ascending, disjoint ranges out of a slice.
pub(crate) fn carve(
    slice: &mut [f32],
    ranges: impl Iterator<Item = Range<usize>>,
) -> Vec<&mut [f32]> {
    let mut rest = slice;
    let mut rest_start = 0;
    ranges
        .map(|range| {
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(range.start - rest_start);
            let (piece, tail) = tail.split_at_mut(range.len());
            (rest, rest_start) = (tail, range.end);
            piece
        })
        .collect()
}

/// Where blocks lie when nothing but them is kept, one after the other.
pub(crate) fn packed(blocks: &[Block]) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut end = 0;
    blocks.iter().map(move |block| {
        let start = end;
        end += block.flat.len();
        start..end
    })
}

/// Runs independent jobs on up to `threads` threads, the calling one among them.
pub(crate) fn for_each<J: Send>(threads: usize, mut jobs: Vec<J>, f: impl Fn(J) + Sync) {
    if threads <= 1 || jobs.len() < MIN_PARALLEL_JOBS {
        return jobs.into_iter().for_each(f);
    }
    let share = jobs.len().div_ceil(threads);
    let mut runs = Vec::new();
    while jobs.len() > share {
        runs.push(jobs.split_off(jobs.len() - share));
    }
    runs.push(jobs);
    let helpers = runs.len() - 1;
    let runs = Mutex::new(runs);
    let next = || runs.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let work = || {
        while let Some(run) = next() {
            run.into_iter().for_each(&f);
        }
    };
    thread::scope(|scope| {
        for _ in 0..helpers {
            // Without a thread, those that there are do its share.
            if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
}
