//! Dropout masks, drawn on the host by the generator that all backends share.
//!
//! A mask costs one pass of the host's threads over its elements and, for a device, its transfer.

use super::{
    run::{Node, stat_kind},
    storage::{elements, elements_mut, ints},
};
use crate::{
    Result,
    kernels::{self, Float, SampleSlice},
    op,
};
use merak_mpu::Element;
use tch::{Device, Kind, Tensor};

impl Node<'_> {
    /// Zeroes elements of `x` and rescales the others.
    pub(super) fn dropout(&self, spec: &op::DropoutSpec, x: &Tensor) -> Result<Tensor> {
        let slice = self.call.context.sample_slice(spec, &self.ty(0).shape);
        if self.backend.is_cpu() && x.kind() == Kind::Float {
            let x = self.at(x.f_contiguous())?;
            let mut y = self.at(x.f_empty_like())?;
            self.draw::<f32>(spec, slice, &x, &mut y);
            return Ok(y);
        }
        let mask = self.mask(spec, slice, &self.ty(0).shape, stat_kind(x.kind()))?;
        let y = self.at(x.f_mul(&mask))?;
        self.at(y.f_to_kind(x.kind()))
    }

    /// The factors of a dropout, 0 or `1 / (1 - p)`, as `f64` or `f32`.
    pub(super) fn mask(
        &self,
        spec: &op::DropoutSpec,
        slice: SampleSlice,
        shape: &[usize],
        kind: Kind,
    ) -> Result<Tensor> {
        let ones = self.at(Tensor::f_ones(ints(shape), (kind, Device::Cpu)))?;
        let mut mask = self.at(ones.f_empty_like())?;
        if kind == Kind::Double {
            self.draw::<f64>(spec, slice, &ones, &mut mask);
        } else {
            self.draw::<f32>(spec, slice, &ones, &mut mask);
        }
        self.at(mask.f_to_device(self.backend.device))
    }

    fn draw<T: Float + Element>(
        &self,
        spec: &op::DropoutSpec,
        slice: SampleSlice,
        x: &Tensor,
        y: &mut Tensor,
    ) {
        let dropout = self.call.context.dropout(spec);
        kernels::dropout::<T>(
            &self.backend.threads,
            dropout,
            slice,
            elements(x),
            elements_mut(y),
        );
    }
}
