//! The parameters of a rank's stages: those that are trained, as the optimizer lays them out, and the frozen ones.

use crate::Result;
use merak_mpu::Buffer;
use merak_trace::{Backend, Param, Value};
use merak_zero::FlatLayout;
use std::{
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

/// A handle on the memory of parameters, by which other threads read it: who changes it waits for who reads it here.
///
/// What is frozen lies apart: no optimizer, no gradient and no collective knows it.
#[derive(Debug, Clone)]
pub(crate) struct ParamMemory {
    buffers: Arc<RwLock<Buffers>>,
    places: Arc<[Place]>,
}

#[derive(Debug)]
struct Buffers {
    /// The parameters that are trained, end to end.
    trained: Box<dyn Buffer>,
    frozen: Box<dyn Buffer>,
}

/// Where a parameter lies.
#[derive(Debug, Clone)]
struct Place {
    is_trained: bool,
    /// Elements of its buffer.
    range: Range<usize>,
}

impl Place {
    /// The parameter's bytes; those that are left in `f32` too.
    fn bytes(&self) -> Range<usize> {
        self.range.start * 4..self.range.end * 4
    }
}

impl StageParams {
    /// Makes room for parameters; `layout` is that of the trained ones among them.
    pub(crate) fn new(
        backend: &dyn Backend,
        params: &[Param],
        layout: &FlatLayout,
    ) -> Result<Self> {
        let (mut next_trained, mut frozen_len) = (0, 0);
        let place = |param: &Param| {
            let range = if param.trainable {
                next_trained += 1;
                layout.range(next_trained - 1)
            } else {
                let start = frozen_len;
                frozen_len += param.local.numel();
                start..frozen_len
            };
            Place {
                is_trained: param.trainable,
                range,
            }
        };
        let places: Vec<_> = params.iter().map(place).collect();
        let store = |is_trained: bool, len: usize| {
            let of_kind = params.iter().zip(&places);
            let of_kind = of_kind.filter(|(_, place)| place.is_trained == is_trained);
            let (own, offsets): (Vec<_>, Vec<_>) = of_kind
                .map(|(param, place)| (param.clone(), place.range.start))
                .unzip();
            backend.param_store(&own, &offsets, len)
        };
        let (trained, frozen) = (store(true, layout.len())?, store(false, frozen_len)?);
        let mut views = [frozen.views.into_iter(), trained.views.into_iter()];
        let views = places
            .iter()
            .map(|place| views[usize::from(place.is_trained)].next());
        let buffers = Buffers {
            trained: trained.flat,
            frozen: frozen.flat,
        };
        Ok(Self {
            views: views
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

    /// Shows the bytes of every parameter, in the program's order.
    pub(crate) fn read(&self, look: &mut dyn FnMut(&[&[u8]])) {
        self.memory.read(look);
    }

    /// Lets `change` see and change the bytes of each parameter, given with its position in the program.
    pub(crate) fn write(&mut self, change: &mut dyn FnMut(usize, &mut [u8])) {
        let places = Arc::clone(&self.memory.places);
        self.change(|buffers| {
            for is_trained in [true, false] {
                let flat = if is_trained {
                    &mut buffers.trained
                } else {
                    &mut buffers.frozen
                };
                flat.write(&mut |bytes| {
                    let all = places.iter().enumerate();
                    for (index, place) in all.filter(|(_, place)| place.is_trained == is_trained) {
                        change(index, &mut bytes[place.bytes()]);
                    }
                });
            }
        });
    }

    /// Hands the memory of the trained parameters to who updates it.
    pub(crate) fn update<R>(&mut self, update: impl FnOnce(&mut dyn Buffer) -> R) -> R {
        self.change(|buffers| update(&mut *buffers.trained))
    }

    fn change<R>(&mut self, change: impl FnOnce(&mut Buffers) -> R) -> R {
        let buffers = self.memory.buffers.write();
        change(&mut buffers.unwrap_or_else(PoisonError::into_inner))
    }
}

impl ParamMemory {
    /// Shows the bytes of every parameter, in the program's order.
    pub(crate) fn read(&self, look: &mut dyn FnMut(&[&[u8]])) {
        let buffers = self.buffers.read();
        let buffers = buffers.unwrap_or_else(PoisonError::into_inner);
        buffers.trained.read(&mut |trained| {
            buffers.frozen.read(&mut |frozen| {
                let of = |place: &Place| {
                    let flat = if place.is_trained { trained } else { frozen };
                    &flat[place.bytes()]
                };
                let all: Vec<_> = self.places.iter().map(of).collect();
                look(&all);
            });
        });
    }
}
