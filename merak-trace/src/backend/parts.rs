//! Parts of flat buffers in host memory.

use crate::{Error, Result};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use merak_mpu::{Buffer, DType};
use std::ops::Range;

/// What was asked for, in errors.
pub(super) const NODE: &str = "parts of a buffer";

/// Copies parts of an `f32` buffer, end to end, rounded to the nearest numbers of a type.
pub(super) fn copy(
    from: &dyn Buffer,
    parts: &[Range<usize>],
    dtype: DType,
) -> Result<Box<dyn Buffer>> {
    check_copy(from, parts, dtype)?;
    if dtype == DType::F32 {
        return Ok(merak_mpu::copy_parts(from, parts));
    }
    let mut copy: Option<Box<dyn Buffer>> = None;
    from.read(&mut |bytes| {
        let wide = bytemuck::cast_slice(bytes);
        let parts = parts.iter().map(|part| &wide[part.clone()]);
        copy = Some(if dtype == DType::BF16 {
            Box::new(narrowed(parts, bf16::ZERO, |from, to| {
                to.convert_from_f32_slice(from);
            }))
        } else {
            Box::new(narrowed(parts, f16::ZERO, |from, to| {
                to.convert_from_f32_slice(from);
            }))
        });
    });
    Ok(copy.expect("a buffer calls the closure once"))
}

/// Replaces parts of an `f32` buffer by values that lie end to end.
pub(super) fn put(values: &dyn Buffer, to: &mut dyn Buffer, parts: &[Range<usize>]) -> Result<()> {
    check_put(values, to, parts)?;
    merak_mpu::put_parts(values, to, parts);
    Ok(())
}

/// Refuses parts that a buffer does not have, and types between which none are copied.
pub(super) fn check_copy(from: &dyn Buffer, parts: &[Range<usize>], to: DType) -> Result<()> {
    check_types(from.dtype(), to)?;
    check_ends(from, parts)
}

/// Refuses values that are not those of these parts of a buffer.
pub(super) fn check_put(
    values: &dyn Buffer,
    to: &dyn Buffer,
    parts: &[Range<usize>],
) -> Result<()> {
    for found in [values.dtype(), to.dtype()] {
        if found != DType::F32 {
            return Err(Error::backend(NODE, format!("are f32, found {found}")));
        }
    }
    check_ends(to, parts)?;
    let expected: usize = parts.iter().map(Range::len).sum();
    let reason = || format!("of {expected} elements got {}", values.len());
    (values.len() == expected)
        .then_some(())
        .ok_or_else(|| Error::backend(NODE, reason()))
}

fn check_types(from: DType, to: DType) -> Result<()> {
    let fits = from == DType::F32 && matches!(to, DType::F32 | DType::BF16 | DType::F16);
    let reason = || format!("of {from} do not become {to}");
    fits.then_some(())
        .ok_or_else(|| Error::backend(NODE, reason()))
}

fn check_ends(buffer: &dyn Buffer, parts: &[Range<usize>]) -> Result<()> {
    let len = buffer.len();
    match parts
        .iter()
        .find(|part| part.start > part.end || part.end > len)
    {
        None => Ok(()),
        Some(Range { start, end }) => {
            let reason = format!("of {len} elements have no {start}..{end}");
            Err(Error::backend(NODE, reason))
        }
    }
}

fn narrowed<'a, T: Copy>(
    parts: impl Iterator<Item = &'a [f32]> + Clone,
    zero: T,
    narrow: impl Fn(&[f32], &mut [T]),
) -> Vec<T> {
    let mut all = vec![zero; parts.clone().map(<[f32]>::len).sum()];
    let mut rest = all.as_mut_slice();
    for part in parts {
        let (own, behind) = rest.split_at_mut(part.len());
        narrow(part, own);
        rest = behind;
    }
    all
}
