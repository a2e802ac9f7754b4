//! Copies of parts of flat buffers, made where the buffers lie.

use crate::{Error, Result, StepDevice};
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
}
