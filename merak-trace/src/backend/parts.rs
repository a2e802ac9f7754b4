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
    check(from.dtype(), dtype)?;
    let mut copy: Option<Box<dyn Buffer>> = None;
    from.read(&mut |bytes| {
        let wide = bytemuck::cast_slice(bytes);
        copy = Some(match dtype {
            DType::BF16 => Box::new(joined(wide, parts, bf16::ZERO, |from, to| {
                to.convert_from_f32_slice(from);
            })),
            DType::F16 => Box::new(joined(wide, parts, f16::ZERO, |from, to| {
                to.convert_from_f32_slice(from);
            })),
            _ => Box::new(joined(wide, parts, 0.0_f32, |from, to| {
                to.copy_from_slice(from);
            })),
        });
    });
    Ok(copy.expect("a buffer calls the closure once"))
}

/// Refuses types between which no parts are copied.
pub(super) fn check(from: DType, to: DType) -> Result<()> {
    let fits = from == DType::F32 && matches!(to, DType::F32 | DType::BF16 | DType::F16);
    let reason = || format!("of {from} do not become {to}");
    fits.then_some(())
        .ok_or_else(|| Error::backend(NODE, reason()))
}

/// Replaces parts of an `f32` buffer by values that lie end to end.
pub(super) fn put(values: &dyn Buffer, to: &mut dyn Buffer, parts: &[Range<usize>]) -> Result<()> {
    check_values(values, to, parts)?;
    let size = DType::F32.size_bytes();
    values.read(&mut |values| {
        let mut rest = values;
        for part in parts {
            let (own, behind) = rest.split_at(part.len() * size);
            to.write_part(part.start * size..part.end * size, &mut |to| {
                to.copy_from_slice(own);
            });
            rest = behind;
        }
    });
    Ok(())
}

/// Refuses values that are not those of these parts of a buffer.
pub(super) fn check_values(
    values: &dyn Buffer,
    to: &dyn Buffer,
    parts: &[Range<usize>],
) -> Result<()> {
    check(values.dtype(), DType::F32)?;
    check(to.dtype(), DType::F32)?;
    let expected: usize = parts.iter().map(Range::len).sum();
    let reason = || format!("of {expected} elements got {}", values.len());
    (values.len() == expected)
        .then_some(())
        .ok_or_else(|| Error::backend(NODE, reason()))
}

fn joined<T: Copy>(
    wide: &[f32],
    parts: &[Range<usize>],
    zero: T,
    convert: impl Fn(&[f32], &mut [T]),
) -> Vec<T> {
    let mut all = vec![zero; parts.iter().map(Range::len).sum()];
    let mut rest = all.as_mut_slice();
    for part in parts {
        let (own, behind) = rest.split_at_mut(part.len());
        convert(&wide[part.clone()], own);
        rest = behind;
    }
    all
}
