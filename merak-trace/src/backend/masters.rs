//! `f32` parameters of which nodes read a narrower copy.

use merak_mpu::{Buffer, DType, Memory};
use std::{any::Any, fmt, ops::Range};

/// The copy of [`Masters`] that nodes read.
pub(super) trait NarrowCopy: fmt::Debug + Send + Sync + 'static {
    /// Brings some elements up to date with `wide`, the values of all.
    fn renew(&mut self, wide: &[f32], elements: Range<usize>);
}

/// `f32` parameters in host memory of which nodes read a narrower copy. The copy follows each
/// change.
#[derive(Debug)]
pub(super) struct Masters<C> {
    pub(super) flat: Box<dyn Buffer>,
    pub(super) copy: C,
}

impl<C: NarrowCopy> Masters<C> {
    fn renew(&mut self, elements: Range<usize>) {
        let Self { flat, copy } = self;
        flat.read(&mut |wide| copy.renew(bytemuck::cast_slice(wide), elements.clone()));
    }
}

impl<C: NarrowCopy> Buffer for Masters<C> {
    fn dtype(&self) -> DType {
        self.flat.dtype()
    }

    fn len(&self) -> usize {
        self.flat.len()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        self.flat.read(f);
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        self.flat.write(f);
        self.written();
    }

    fn write_part(&mut self, bytes: Range<usize>, f: &mut dyn FnMut(&mut [u8])) {
        self.flat.write_part(bytes.clone(), f);
        let size = self.flat.dtype().size_bytes();
        self.renew(bytes.start / size..bytes.end.div_ceil(size));
    }

    fn memory(&mut self) -> Memory {
        self.flat.memory()
    }

    fn written(&mut self) {
        self.renew(0..self.flat.len());
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}
