//! Gradients of parameters, added straight to the flat buffer that holds them.

use super::{
    Candle, elements,
    run::{Node, Number, Results, run},
};
use crate::{Call, Error, GradSlot, GradStore, Result, Value, kernels, op::ResultMemory};
use merak_mpu::DType;
use std::{array, ops::Range};

/// Ranges of a flat buffer, one for each result of a node.
pub(super) struct Slots<'a> {
    bytes: &'a mut [u8],
    ranges: &'a [Range<usize>],
}

/// Runs a node and adds its results to slots of the store.
pub(super) fn accumulate(
    backend: &Candle,
    call: Call<'_>,
    inputs: Vec<Value>,
    store: &mut GradStore,
    slots: &[usize],
) -> Result<()> {
    let targets = store.targets(call, slots)?;
    check_types(call, store, &targets)?;
    let of_range = |target: &GradSlot| target.offset..target.offset + target.len;
    let ranges: Vec<_> = targets.iter().map(of_range).collect();
    let mut buffers = targets.iter().map(|target| target.buffer);
    let buffer = buffers
        .next()
        .filter(|first| buffers.all(|other| other == *first));
    let left = match buffer {
        Some(buffer)
            if call.op.result_memory() == ResultMemory::Sum
                && targets.len() == call.results.len() =>
        {
            let (mut inputs, mut outcome) = (Some(inputs), Ok(Vec::new()));
            store.buffers[buffer].write(&mut |bytes| {
                let (inputs, ranges) = (inputs.take().unwrap_or_default(), &ranges[..]);
                outcome = run(backend, call, inputs, Some(Slots { bytes, ranges }));
            });
            outcome?
        }
        _ => run(backend, call, inputs, None)?,
    };
    add_results(backend, &left, store, &targets)
}

/// Refuses buffers of another element type than the results, whose bytes would be misread.
fn check_types(call: Call<'_>, store: &GradStore, targets: &[GradSlot]) -> Result<()> {
    for (target, ty) in targets.iter().zip(call.results) {
        let found = store.buffers[target.buffer].dtype();
        if found != ty.dtype {
            let reason = format!("adds {ty} to a buffer of {found}");
            return Err(Error::backend(call.name, reason));
        }
    }
    Ok(())
}

/// Adds computed results to their slots.
fn add_results(
    backend: &Candle,
    results: &[Value],
    store: &mut GradStore,
    targets: &[GradSlot],
) -> Result<()> {
    for (value, target) in results.iter().zip(targets) {
        let range = target.offset..target.offset + target.len;
        let mut outcome = Ok(());
        store.buffers[target.buffer].write(&mut |bytes| {
            outcome = match value.ty().dtype {
                DType::F64 => add_value::<f64>(backend, value, bytes, range.clone()),
                _ => add_value::<f32>(backend, value, bytes, range.clone()),
            };
        });
        outcome?;
    }
    Ok(())
}

fn add_value<T: Number>(
    backend: &Candle,
    value: &Value,
    bytes: &mut [u8],
    range: Range<usize>,
) -> Result<()> {
    let out = &mut bytemuck::cast_slice_mut::<u8, T>(bytes)[range];
    kernels::add_assign(&backend.threads, &elements::<T>(value)?, out);
    Ok(())
}

impl Node<'_> {
    /// Runs a kernel that adds its results to slices, one per result: to the slots, or to zeros,
    /// which are then the results.
    pub(super) fn sum<T: Number, const N: usize>(
        &self,
        slots: Option<Slots<'_>>,
        add: impl FnOnce([&mut [T]; N]) -> Result<()>,
    ) -> Results {
        if let Some(slots) = slots {
            add(slots.parts())?;
            return Ok(Vec::new());
        }
        let mut sums = array::from_fn(|result| {
            let mut zeros = self.out::<T>(result);
            zeros.fill(T::ZERO);
            zeros
        });
        add(sums.each_mut().map(Vec::as_mut_slice))?;
        self.done::<T, N>(sums)
    }
}

impl<'a> Slots<'a> {
    /// The elements of each slot.
    pub(super) fn parts<T: Number, const N: usize>(self) -> [&'a mut [T]; N] {
        let ranges: [_; N] = array::from_fn(|result| self.ranges[result].clone());
        bytemuck::cast_slice_mut::<u8, T>(self.bytes)
            .get_disjoint_mut(ranges)
            .expect("gradients of parameters do not overlap")
    }
}
