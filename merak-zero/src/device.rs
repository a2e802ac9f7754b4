//! Steps on buffers in the memory of a device, without a detour through host memory.

use crate::{
    DeviceError, Error, FlatLayout, OptimizerConfig, OptimizerKind, Result, average, flat,
    layout::Extent, mapped::Floats, state::OwnedState,
};
use merak_mpu::{Buffer, StepRange};
use std::{fmt, ops::Range, sync::Arc};

/// The arithmetic of a step on buffers in the memory of a device.
///
/// A [`ZeroOptimizer`](crate::ZeroOptimizer) that has one keeps its state there. Buffers are f32.
pub trait StepDevice: fmt::Debug + Send + Sync {
    /// Whether [`StepDevice::update`] has a rule. Other rules step in host memory.
    fn has(&self, rule: OptimizerKind) -> bool;

    /// A zeroed buffer in the memory of the device.
    ///
    /// # Errors
    /// When the memory does not suffice.
    fn zeros(&self, len: usize) -> Result<Box<dyn Buffer>, DeviceError>;

    /// Whether a buffer lies in the memory of the device. What is copied out of one that does not,
    /// or into it, goes through host memory.
    fn holds(&self, buffer: &dyn Buffer) -> bool;

    /// A copy of parts of a buffer, end to end, in the memory of the device.
    ///
    /// # Errors
    /// When the device fails.
    fn take(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<Box<dyn Buffer>, DeviceError>;

    /// Replaces parts of a buffer by values that lie end to end, on the device or in host memory.
    ///
    /// # Errors
    /// When the device fails.
    fn put(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<(), DeviceError>;

    /// Adds values that lie end to end, on the device or in host memory, to parts of a buffer.
    ///
    /// # Errors
    /// When the device fails.
    fn add(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<(), DeviceError>;

    /// Multiplies all elements of a buffer on the device.
    ///
    /// # Errors
    /// When the device fails.
    fn multiply(&self, values: &mut dyn Buffer, factor: f32) -> Result<(), DeviceError>;

    /// The sum of the squares of each of the ranges, in f64.
    ///
    /// # Errors
    /// When the device fails.
    fn sums_of_squares(
        &self,
        grads: &dyn Buffer,
        ranges: &[Range<usize>],
    ) -> Result<Vec<f64>, DeviceError>;

    /// Updates pieces of the parameters and of the state, one buffer per name of
    /// [`OptimizerConfig::state_names`]. The gradients of the pieces may be overwritten.
    ///
    /// # Errors
    /// When the device fails.
    fn update(
        &self,
        step: &Step<'_>,
        params: &mut dyn Buffer,
        grads: &dyn Buffer,
        state: &mut [Box<dyn Buffer>],
        pieces: &[StepRange],
    ) -> Result<(), DeviceError>;

    /// Moves the averages of pieces of the parameters towards them, as
    /// [`ZeroConfig::ema_decay`](crate::ZeroConfig::ema_decay) says; they lie as the state does.
    /// Unless a device has something better, this is done in host memory.
    ///
    /// # Errors
    /// When the device fails.
    fn average(
        &self,
        decay: f64,
        params: &dyn Buffer,
        averages: &mut dyn Buffer,
        pieces: &[StepRange],
    ) -> Result<(), DeviceError> {
        let place = |piece: &StepRange| [piece.params.clone(), piece.state.clone()];
        let places: Vec<_> = pieces.iter().map(place).collect();
        flat::read(params, |params| {
            flat::write(averages, |averages| {
                average::follow(decay, params, averages, &places, 1);
            });
        });
        Ok(())
    }
}

/// The scalars of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step<'a> {
    /// The rule and its hyperparameters.
    pub config: &'a OptimizerConfig,
    /// The learning rate.
    pub lr: f64,
    /// Number of this step, 1 for the first.
    pub time: u64,
    /// The clip factor over the loss scale, by which gradients are multiplied.
    pub grad_scale: f64,
}

/// A device, and the optimizer state in its memory.
#[derive(Debug)]
pub(crate) struct DeviceState {
    device: Arc<dyn StepDevice>,
    /// Those of the rule, then the averages.
    values: Vec<Box<dyn Buffer>>,
    keeps_average: bool,
    /// With the factor of their learning rate.
    pieces: Vec<(f64, Vec<StepRange>)>,
}

impl DeviceState {
    /// Zeroed state for the elements that the rank owns.
    pub(crate) fn new(
        device: Arc<dyn StepDevice>,
        layout: &FlatLayout,
        state: &OwnedState,
        [params, grads]: [Extent; 2],
    ) -> Result<Self> {
        let names = state.names().iter();
        let values = names.map(|_| {
            device
                .zeros(state.num_owned())
                .map_err(Error::device("optimizer state"))
        });
        Ok(Self {
            values: values.collect::<Result<_>>()?,
            keeps_average: state.keeps_average(),
            pieces: pieces(layout, state, [params, grads, Extent::Owned]),
            device,
        })
    }

    /// The sum of squares of each of the rank's blocks.
    pub(crate) fn block_sums(
        &self,
        grads: &dyn Buffer,
        blocks: &[Range<usize>],
    ) -> Result<Vec<f64>> {
        let sums = self.device.sums_of_squares(grads, blocks);
        sums.map_err(Error::device("gradient norm"))
    }

    pub(crate) fn update(
        &mut self,
        step: &Step<'_>,
        params: &mut dyn Buffer,
        grads: &dyn Buffer,
    ) -> Result<()> {
        let num_states = self.values.len() - usize::from(self.keeps_average);
        let state = &mut self.values[..num_states];
        for (lr_scale, pieces) in &self.pieces {
            let step = Step {
                lr: step.lr * lr_scale,
                ..*step
            };
            let updated = self.device.update(&step, params, grads, state, pieces);
            updated.map_err(Error::device("update"))?;
        }
        Ok(())
    }

    /// Moves the averages, if they are kept, towards parameters that were stepped.
    pub(crate) fn average(&mut self, decay: f64, params: &dyn Buffer) -> Result<()> {
        let averages = self.values.last_mut().filter(|_| self.keeps_average);
        let Some(averages) = averages else {
            return Ok(());
        };
        for (_, pieces) in &self.pieces {
            let averaged = self.device.average(decay, params, &mut **averages, pieces);
            averaged.map_err(Error::device("average of the weights"))?;
        }
        Ok(())
    }

    /// Changes the averages, if they are kept, in host memory.
    pub(crate) fn edit_averages(&mut self, edit: impl FnOnce(&mut [f32])) {
        let averages = self.values.last_mut().filter(|_| self.keeps_average);
        if let Some(averages) = averages {
            flat::write(&mut **averages, edit);
        }
    }

    /// A copy of the state in host memory.
    pub(crate) fn read(&self) -> Vec<Vec<f32>> {
        let host = |buffer: &dyn Buffer| flat::read(buffer, <[f32]>::to_vec);
        self.values.iter().map(|buffer| host(&**buffer)).collect()
    }

    /// Replaces the state by a copy of these values of host memory.
    pub(crate) fn write(&mut self, values: &[Arc<Floats>]) {
        for (buffer, values) in self.values.iter_mut().zip(values) {
            flat::write(&mut **buffer, |to| to.copy_from_slice(values));
        }
    }
}

/// The elements that the rank owns, in as few pieces as possible, by the factor of their learning
/// rate; the extents are those of the buffers of parameters, gradients and state.
fn pieces(
    layout: &FlatLayout,
    state: &OwnedState,
    extents: [Extent; 3],
) -> Vec<(f64, Vec<StepRange>)> {
    let mut groups: Vec<(f64, Vec<StepRange>)> = Vec::new();
    let blocks = state.blocks();
    let places = extents.map(|extent| state.places(extent));
    for (number, block) in blocks.iter().enumerate() {
        let [params, grads, state] = [0, 1, 2].map(|buffer: usize| places[buffer][number].clone());
        let spec = &layout.params()[block.param];
        let is_own = |group: &(f64, _)| group.0.to_bits() == spec.lr_scale.to_bits();
        let index = groups.iter().position(is_own).unwrap_or_else(|| {
            groups.push((spec.lr_scale, Vec::new()));
            groups.len() - 1
        });
        let pieces = &mut groups[index].1;
        // What is adjacent in masters need not be in gradients of all elements.
        let follows = |last: &StepRange| {
            let ends = [last.params.end, last.grads.end, last.state.end];
            last.decays == spec.decay && ends == [params.start, grads.start, state.start]
        };
        match pieces.last_mut() {
            Some(last) if follows(last) => {
                last.params.end = params.end;
                last.grads.end = grads.end;
                last.state.end = state.end;
            }
            _ => pieces.push(StepRange {
                params,
                grads,
                state,
                decays: spec.decay,
            }),
        }
    }
    groups
}
