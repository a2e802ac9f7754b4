//! Parts of flat buffers in host memory.

use crate::{Error, Result};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use merak_mpu::{Buffer, DType, zeros};
use std::{mem, ops::Range, slice};

/// What was asked for, in errors.
pub(super) const NODE: &str = "parts of a buffer";

/// Copies parts of an `f32` buffer, end to end, rounded to the nearest numbers of a type.
pub(super) fn copy(
    from: &dyn Buffer,
    parts: &[Range<usize>],
    dtype: DType,
) -> Result<Box<dyn Buffer>> {
    check_copy(from, parts, dtype)?;
    let mut copy = zeros(dtype, parts.iter().map(Range::len).sum());
    convert(from, parts, &mut *copy, 0);
    Ok(copy)
}

/// Copies parts of an `f32` buffer, end to end, to the elements of `to` from number `at` on,
/// rounded to the nearest numbers of its type. The caller has checked them.
pub(super) fn convert(from: &dyn Buffer, parts: &[Range<usize>], to: &mut dyn Buffer, at: usize) {
    let (dtype, num_elements) = (to.dtype(), parts.iter().map(Range::len).sum::<usize>());
    let size = dtype.size_bytes();
    from.read(&mut |bytes| {
        let from = bytemuck::cast_slice::<u8, f32>(bytes);
        to.write_part(at * size..(at + num_elements) * size, &mut |to| {
            let mut rest = to;
            for part in parts {
                let (own, behind) = mem::take(&mut rest).split_at_mut(part.len() * size);
                let from = &from[part.clone()];
                match dtype {
                    DType::BF16 => {
                        bytemuck::cast_slice_mut::<_, bf16>(own).convert_from_f32_slice(from);
                    }
                    DType::F16 => {
                        bytemuck::cast_slice_mut::<_, f16>(own).convert_from_f32_slice(from);
                    }
                    // The types were checked, so this is `f32`.
                    _ => own.copy_from_slice(bytemuck::cast_slice(from)),
                }
                rest = behind;
            }
        });
    });
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

/// As [`check_copy`]; also refuses a part that ends behind the `len` elements of a buffer, in which
/// it begins with number `at`.
pub(super) fn check_place(
    from: &dyn Buffer,
    part: &Range<usize>,
    to: DType,
    (at, len): (usize, usize),
) -> Result<()> {
    check_copy(from, slice::from_ref(part), to)?;
    let reason = || format!("{part:?} do not fit at {at} of {len} elements");
    (at <= len && part.len() <= len - at)
        .then_some(())
        .ok_or_else(|| Error::backend(NODE, reason()))
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
