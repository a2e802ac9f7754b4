//! Gradients of parameters, added straight to the flat buffer that holds them.

use super::{
    Candle, elements,
    run::{Node, Number, run},
};
use crate::{
    Call, GradSlot, GradStore, Op, Result, Value,
    kernels::{self, TableRows, Write},
    op::ResultMemory,
};
use merak_mpu::DType;
use std::ops::Range;

/// Runs a node and adds its results to slots of the store.
pub(super) fn accumulate(
    backend: &Candle,
    call: Call<'_>,
    inputs: Vec<Value>,
    store: &mut GradStore,
    slots: &[usize],
) -> Result<()> {
    let targets: Vec<GradSlot> = slots.iter().map(|&slot| store.slots[slot]).collect();
    let one_buffer = targets
        .windows(2)
        .all(|pair| pair[0].buffer == pair[1].buffer);
    if !one_buffer
        || call.op.result_memory() != ResultMemory::Sum
        || targets.len() != call.results.len()
    {
        return add_results(backend, &run(backend, call, inputs)?, store, &targets);
    }
    let Some(buffer) = targets.first().map(|target| target.buffer) else {
        return Ok(());
    };
    let ranges: Vec<_> = targets
        .iter()
        .map(|target| target.offset..target.offset + target.len)
        .collect();
    let node = Node { backend, call };
    let mut outcome = Ok(());
    store.buffers[buffer].write(&mut |bytes| {
        outcome = match call.results[0].dtype {
            DType::F64 => add::<f64>(&node, &inputs, bytes, &ranges),
            DType::F32 => add::<f32>(&node, &inputs, bytes, &ranges),
            _ => Err(node.unsupported(&inputs)),
        };
    });
    outcome
}

fn add<T: Number>(
    node: &Node<'_>,
    inputs: &[Value],
    bytes: &mut [u8],
    ranges: &[Range<usize>],
) -> Result<()> {
    let all = bytemuck::cast_slice_mut::<u8, T>(bytes);
    match ranges {
        [one] => node.add_to(inputs, &mut [&mut all[one.clone()]]),
        [first, second] => {
            let parts = all
                .get_disjoint_mut([first.clone(), second.clone()])
                .expect("gradients of two parameters do not overlap");
            node.add_to(inputs, &mut parts.map(|part| part))
        }
        _ => Err(node.unsupported(inputs)),
    }
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
    /// Adds the results of a summing operation to `out`, one slice per result.
    pub(super) fn add_to<T: Number>(&self, inputs: &[Value], out: &mut [&mut [T]]) -> Result<()> {
        let threads = &self.backend.threads;
        let x = |i: usize| elements::<T>(&inputs[i]);
        match (self.call.op, out) {
            (Op::LinearGradWeight { layout }, [dw]) => {
                self.weight_gradient(*layout, &inputs[0], &inputs[1], Write::Add, dw)?;
            }
            (Op::SumLeading { .. }, [sum]) => kernels::sum_rows(threads, &x(0)?, sum),
            (Op::LayerNormGradParams, [dw, db]) => {
                kernels::layer_norm_grad_params(
                    threads,
                    &x(0)?,
                    &x(1)?,
                    &x(2)?,
                    &x(3)?,
                    dw,
                    Some(db),
                );
            }
            (Op::RmsNormGradParams, [dw]) => {
                kernels::rms_norm_grad_params(threads, &x(0)?, &x(1)?, &x(2)?, dw);
            }
            (
                Op::EmbeddingGrad {
                    rows,
                    padding,
                    slice,
                },
                [table],
            ) => {
                let ids = elements::<i64>(&inputs[0])?;
                let rows = TableRows {
                    padding: *padding,
                    ..self.table_rows(*rows, *slice)
                };
                kernels::embedding_grad(threads, &rows, &x(1)?, &ids, table)
                    .map_err(|e| self.kernel_error(e))?;
            }
            _ => return Err(self.unsupported(inputs)),
        }
        Ok(())
    }
}
