//! The parameters of a rank's stages: those that are trained, as the optimizer lays them out, and
//! the frozen ones.

use crate::error::Result;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use merak_mpu::{Buffer, DType};
use merak_trace::{Backend, Param, Value};
use merak_zero::FlatLayout;
use std::{
    borrow::Cow,
    ops::Range,
    sync::{Arc, PoisonError, RwLock},
};

/// The parameters of a rank's stages.
#[derive(Debug)]
pub(crate) struct StageParams {
    memory: ParamMemory,
    /// One value per parameter, in the order in which they were given.
    pub(crate) views: Vec<Value>,
}

/// A handle with which other threads read the memory of parameters; writers wait for its readers.
///
/// Frozen parameters lie apart: no optimizer, gradient or collective touches them.
#[derive(Debug, Clone)]
pub(crate) struct ParamMemory {
    /// First the trained parameters, end to end, with `f32` masters for 16-bit ones; then the
    /// frozen parameters, a buffer per element type.
    buffers: Arc<RwLock<Vec<Box<dyn Buffer>>>>,
    places: Arc<[Place]>,
}

/// A parameter as it is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Floats<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

impl<'a> Floats<'a> {
    /// The values, converted where they are kept in another type.
    pub(crate) fn values(self) -> Cow<'a, [f32]> {
        floats(self.dtype, self.bytes)
    }
}

/// Takes an index in a parameter, and values from that element on.
type Put<'a> = dyn FnMut(usize, &[f32]) + 'a;

/// The buffer of the trained parameters.
const TRAINED: usize = 0;

/// Where a parameter lies.
#[derive(Debug, Clone)]
struct Place {
    /// Which of the buffers has it.
    buffer: usize,
    /// The type of the buffer's elements.
    dtype: DType,
    /// Elements of the buffer.
    range: Range<usize>,
}

impl Place {
    /// The parameter's bytes.
    fn bytes(&self) -> Range<usize> {
        let size = self.dtype.size_bytes();
        self.range.start * size..self.range.end * size
    }
}

impl StageParams {
    /// Makes room for parameters; `layout` is that of the trained ones among them.
    pub(crate) fn new(
        backend: &dyn Backend,
        params: &[Param],
        layout: &FlatLayout,
    ) -> Result<Self> {
        // Elements of each buffer; frozen parameters have a buffer per element type.
        let mut lens = vec![layout.len()];
        let mut frozen: Vec<DType> = Vec::new();
        let mut next_trained = 0;
        let place = |param: &Param| {
            let dtype = param.kept_dtype();
            if param.trainable {
                next_trained += 1;
                let range = layout.range(next_trained - 1);
                return Place {
                    buffer: TRAINED,
                    dtype,
                    range,
                };
            }
            let known = frozen.iter().position(|known| *known == dtype);
            let index = known.unwrap_or_else(|| {
                frozen.push(dtype);
                lens.push(0);
                frozen.len() - 1
            });
            let buffer = TRAINED + 1 + index;
            let start = lens[buffer];
            lens[buffer] += param.local.numel();
            Place {
                buffer,
                dtype,
                range: start..lens[buffer],
            }
        };
        let mut places: Vec<_> = params.iter().map(place).collect();
        let mut views = vec![None; params.len()];
        let mut buffers = Vec::with_capacity(lens.len());
        for (buffer, len) in lens.into_iter().enumerate() {
            let own = (0..params.len()).filter(|&index| places[index].buffer == buffer);
            let own: Vec<_> = own.collect();
            let of_buffer: Vec<_> = own.iter().map(|&i| params[i].clone()).collect();
            let offsets: Vec<_> = own.iter().map(|&i| places[i].range.start).collect();
            let store = backend.param_store(&of_buffer, &offsets, len)?;
            for (index, view) in own.into_iter().zip(store.views) {
                views[index] = Some(view);
                places[index].dtype = store.flat.dtype();
            }
            buffers.push(store.flat);
        }
        Ok(Self {
            views: views
                .into_iter()
                .collect::<Option<_>>()
                .expect("a store has a view for each parameter"),
            memory: ParamMemory {
                buffers: Arc::new(RwLock::new(buffers)),
                places: places.into(),
            },
        })
    }

    /// A handle for reading the parameters on another thread.
    pub(crate) fn memory(&self) -> ParamMemory {
        self.memory.clone()
    }

    /// The element type in which a parameter is kept: `f32` for a trained one, even if nodes read
    /// another.
    pub(crate) fn dtype(&self, index: usize) -> DType {
        self.memory.places[index].dtype
    }

    /// Bytes of all of them, with the 16-bit copies of masters.
    pub(crate) fn num_bytes(&self) -> usize {
        let buffers = self.memory.buffers.read();
        let buffers = buffers.unwrap_or_else(PoisonError::into_inner);
        let kept: usize = buffers
            .iter()
            .map(|b| b.len() * b.dtype().size_bytes())
            .sum();
        let mut seen = self.memory.places.iter().zip(&self.views);
        let copied =
            seen.find(|(place, view)| place.buffer == TRAINED && view.ty().dtype != place.dtype);
        let copy = copied.map_or(0, |(place, view)| {
            buffers[place.buffer].len() * view.ty().dtype.size_bytes()
        });
        kept + copy
    }

    /// Shows the values of every parameter in `f32`, in the program's order.
    pub(crate) fn read_floats(&self, look: &mut dyn FnMut(&[Floats<'_>])) {
        self.memory.read(&mut |all| {
            let all = all.iter().zip(&*self.memory.places);
            let all = all.map(|(bytes, place)| Floats {
                dtype: place.dtype,
                bytes,
            });
            look(&all.collect::<Vec<_>>());
        });
    }

    /// Lets `change` see and change the bytes of each parameter as it is kept, given with its
    /// position in the program.
    pub(crate) fn write(&mut self, change: &mut dyn FnMut(usize, &mut [u8])) {
        let places = Arc::clone(&self.memory.places);
        self.change(|buffers| {
            for (number, buffer) in buffers.iter_mut().enumerate() {
                buffer.write(&mut |bytes| {
                    let all = places.iter().enumerate();
                    for (index, place) in all.filter(|(_, place)| place.buffer == number) {
                        change(index, &mut bytes[place.bytes()]);
                    }
                });
            }
        });
    }

    /// The same with values in `f32`, which are rounded where they are kept in 16 bits.
    pub(crate) fn write_floats(&mut self, change: &mut dyn FnMut(usize, &mut [f32])) {
        let places = Arc::clone(&self.memory.places);
        self.write(&mut |index, bytes| match places[index].dtype {
            dtype @ (DType::BF16 | DType::F16) => {
                let mut values = floats(dtype, bytes).into_owned();
                change(index, &mut values);
                narrow(dtype, &values, bytes);
            }
            _ => change(index, bytemuck::cast_slice_mut(bytes)),
        });
    }

    /// Lets `values` write new values of each parameter, a few at a time; they are rounded where
    /// they are kept in 16 bits.
    pub(crate) fn fill(&mut self, values: &mut dyn FnMut(usize, &mut Put<'_>)) {
        let places = Arc::clone(&self.memory.places);
        self.write(&mut |index, bytes| {
            let dtype = places[index].dtype;
            values(index, &mut |first, values| {
                let size = dtype.size_bytes();
                let bytes = &mut bytes[first * size..][..values.len() * size];
                match dtype {
                    DType::BF16 | DType::F16 => narrow(dtype, values, bytes),
                    _ => bytemuck::cast_slice_mut(bytes).copy_from_slice(values),
                }
            });
        });
    }

    /// Hands the memory of the trained parameters to `update`.
    pub(crate) fn update<R>(&mut self, update: impl FnOnce(&mut dyn Buffer) -> R) -> R {
        self.change(|buffers| update(&mut *buffers[TRAINED]))
    }

    fn change<R>(&mut self, change: impl FnOnce(&mut [Box<dyn Buffer>]) -> R) -> R {
        let buffers = self.memory.buffers.write();
        change(&mut buffers.unwrap_or_else(PoisonError::into_inner))
    }
}

impl ParamMemory {
    /// Shows the bytes of every parameter as it is kept, in the program's order.
    pub(crate) fn read(&self, look: &mut dyn FnMut(&[&[u8]])) {
        let buffers = self.buffers.read();
        let buffers = buffers.unwrap_or_else(PoisonError::into_inner);
        read_together(&buffers, &[], &mut |bytes| {
            let of = |place: &Place| &bytes[place.buffer][place.bytes()];
            let all: Vec<_> = self.places.iter().map(of).collect();
            look(&all);
        });
    }
}

/// Shows the bytes of some buffers at once, after those that were `seen`.
fn read_together(buffers: &[Box<dyn Buffer>], seen: &[&[u8]], look: &mut dyn FnMut(&[&[u8]])) {
    let Some((first, rest)) = buffers.split_first() else {
        return look(seen);
    };
    first.read(&mut |bytes| {
        let seen: Vec<_> = seen.iter().copied().chain([bytes]).collect();
        read_together(rest, &seen, look);
    });
}

/// Floats of any size as `f32`.
pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Cow<'_, [f32]> {
    match dtype {
        DType::BF16 => bytemuck::cast_slice::<_, bf16>(bytes).to_f32_vec().into(),
        DType::F16 => bytemuck::cast_slice::<_, f16>(bytes).to_f32_vec().into(),
        _ => bytemuck::cast_slice(bytes).into(),
    }
}

fn narrow(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    match dtype {
        DType::BF16 => {
            bytemuck::cast_slice_mut::<_, bf16>(bytes).convert_from_f32_slice(values);
        }
        _ => bytemuck::cast_slice_mut::<_, f16>(bytes).convert_from_f32_slice(values),
    }
}
