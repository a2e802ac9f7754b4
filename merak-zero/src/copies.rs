//! Copies of parts of flat buffers, made and scaled where the buffers lie.

use crate::{Error, Result, StepDevice, flat};
use merak_mpu::{Buffer, copy_parts, put_parts};
use std::{ops::Range, sync::Arc};

/// Copies what lies in the memory of a device there, and all else in host memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Copies(Option<Arc<dyn StepDevice>>);

impl Copies {
    pub(crate) fn on(device: Arc<dyn StepDevice>) -> Self {
        Self(Some(device))
    }

    /// The device in whose memory a buffer lies.
    pub(crate) fn device_of(&self, buffer: &dyn Buffer) -> Option<&dyn StepDevice> {
        self.0.as_deref().filter(|device| device.holds(buffer))
    }

    /// Parts of an f32 buffer, end to end; `during` is the operation, for errors.
    pub(crate) fn take(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
        during: &'static str,
    ) -> Result<Box<dyn Buffer>> {
        if let Some(device) = self.device_of(from) {
            return device.take(from, parts).map_err(Error::device(during));
        }
        Ok(copy_parts(from, parts))
    }

    /// Replaces parts of an f32 buffer by values that lie end to end.
    pub(crate) fn put(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
        during: &'static str,
    ) -> Result<()> {
        if let Some(device) = self.device_of(to) {
            let put = device.put(values, to, parts);
            return put.map_err(Error::device(during));
        }
        put_parts(values, to, parts);
        Ok(())
    }

    /// Multiplies all elements of an f32 buffer.
    pub(crate) fn multiply(
        &self,
        values: &mut dyn Buffer,
        factor: f32,
        during: &'static str,
    ) -> Result<()> {
        #[expect(
            clippy::float_cmp,
            reason = "the exact factor of an unscaled reduction"
        )]
        if factor == 1.0 {
            return Ok(());
        }
        if let Some(device) = self.device_of(values) {
            let multiplied = device.multiply(values, factor);
            return multiplied.map_err(Error::device(during));
        }
        flat::write(values, |values| {
            for x in values {
                *x *= factor;
            }
        });
        Ok(())
    }
}
