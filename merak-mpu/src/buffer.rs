//! The memory that collectives and sends move.

use crate::{DType, Element, Error, Result, pages::zeroed};
use std::{any::Any, fmt, ops::Range};

/// The memory of the elements of a [`Buffer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Memory {
    /// Host memory that begins here.
    Host(*mut u8),
    /// Memory of a device that begins here.
    Device {
        /// The number of the device on its host.
        ordinal: usize,
        /// The address in the device's memory.
        address: u64,
    },
}

/// Flat memory of one element type that a collective can read and write.
///
/// The trait is what this crate, `merak-zero` and the tensor backends share: a backend implements
/// it for its own storage, so that a gradient bucket is reduced where it lies. Host memory is
/// reached inside a closure, so that an implementation holds the lock of its storage for just that
/// long.
///
/// An engine may hold the buffers of several ranks open at once, one within the other in ascending
/// rank, on the thread of any of them or on one of its own, from the moment in which the last rank
/// starts the collective. A lock is therefore per rank at most, and no closure of `read` or `write`
/// waits for a collective, or starts one with a buffer under the same lock.
///
/// `Vec<T>` is a buffer for every [`Element`] type.
///
/// ```
/// use merak_mpu::{Buffer, DType};
/// let buffer: Box<dyn Buffer> = Box::new(vec![1.0_f32, 2.0]);
/// assert_eq!((buffer.dtype(), buffer.len()), (DType::F32, 2));
/// assert_eq!(merak_mpu::into_vec::<f32>(buffer)?, [1.0, 2.0]);
/// # Ok::<(), merak_mpu::Error>(())
/// ```
pub trait Buffer: Any + Send + Sync + fmt::Debug {
    /// The type of the elements.
    fn dtype(&self) -> DType;

    /// The number of elements.
    fn len(&self) -> usize;

    /// Whether the buffer has no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes that the elements take.
    fn size_bytes(&self) -> usize {
        self.len() * self.dtype().size_bytes()
    }

    /// Calls `f` once with the bytes of the buffer, aligned for the element type.
    fn read(&self, f: &mut dyn FnMut(&[u8]));

    /// Calls `f` once with the bytes of the buffer for writing, aligned for the element type.
    fn write(&mut self, f: &mut dyn FnMut(&mut [u8]));

    /// The same with some of the bytes, where whole elements lie.
    fn write_part(&mut self, bytes: Range<usize>, f: &mut dyn FnMut(&mut [u8])) {
        self.write(&mut |all| f(&mut all[bytes.clone()]));
    }

    /// Replaces the elements by those of these bytes, of which there are as many.
    fn set_bytes(&mut self, bytes: &[u8]) {
        self.write(&mut |all| all.copy_from_slice(bytes));
    }

    /// Whether the elements lie in the memory of a device, so that the host sees copies of them.
    fn lies_on_device(&self) -> bool {
        false
    }

    /// The address of the elements until the buffer is dropped or turned into another type,
    /// wherever the box is moved. An engine gives this address to a library that works on while the
    /// engine does other things; meanwhile it calls no other method of the buffer.
    fn memory(&mut self) -> Memory;

    /// The queue of the device, by its address as CUDA's `CUstream`, in which work on the elements
    /// was put last; 0 is the default one. An engine for devices begins after that work.
    fn stream(&self) -> u64 {
        0
    }

    /// Called after the elements were written through [`Buffer::memory`].
    fn written(&mut self) {}

    /// A zeroed buffer of `len` elements of this type, on this buffer's device.
    fn zeros_like(&self, len: usize) -> Box<dyn Buffer> {
        zeros(self.dtype(), len)
    }

    /// Sets every element to zero, where the memory lies.
    fn clear(&mut self) {
        self.write(&mut |bytes| bytes.fill(0));
    }

    /// Turns the box into one that can be downcast to the implementing type.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync>;
}

impl<T: Element> Buffer for Vec<T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        f(bytemuck::cast_slice(self));
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        f(bytemuck::cast_slice_mut(self));
    }

    fn memory(&mut self) -> Memory {
        Memory::Host(self.as_mut_ptr().cast())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

/// Adjacent elements that a step of an optimizer updates alike, by their places in flat buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRange {
    /// Where they lie in the parameters.
    pub params: Range<usize>,
    /// Where they lie in the gradients.
    pub grads: Range<usize>,
    /// Where they lie in the state.
    pub state: Range<usize>,
    /// Whether weight decay applies to them.
    pub decays: bool,
}

/// Copies parts of a buffer, end to end, into host memory.
///
/// # Panics
/// When the buffer has no such part.
pub fn copy_parts(from: &dyn Buffer, parts: &[Range<usize>]) -> Box<dyn Buffer> {
    let mut copy = zeros(from.dtype(), parts.iter().map(Range::len).sum());
    let size = from.dtype().size_bytes();
    from.read(&mut |from| {
        copy.write(&mut |to| {
            let mut rest = to;
            for part in parts {
                let (own, behind) = rest.split_at_mut(part.len() * size);
                own.copy_from_slice(&from[part.start * size..part.end * size]);
                rest = behind;
            }
        });
    });
    copy
}

/// Replaces parts of a buffer by values of its element type that lie end to end.
///
/// # Panics
/// When the buffer has no such part, or there are fewer values.
pub fn put_parts(values: &dyn Buffer, to: &mut dyn Buffer, parts: &[Range<usize>]) {
    let size = to.dtype().size_bytes();
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
}

/// Takes the elements out of a buffer, without a copy when it is a `Vec<T>`.
///
/// # Errors
/// [`Error::DTypeMismatch`] when the elements are not of type `T`, [`Error::UnreadBuffer`] when a
/// device does not give them out.
pub fn into_vec<T: Element>(buffer: Box<dyn Buffer>) -> Result<Vec<T>> {
    let mismatch = Error::DTypeMismatch {
        expected: T::DTYPE,
        found: buffer.dtype(),
    };
    if buffer.dtype() != T::DTYPE {
        return Err(mismatch);
    }
    let any: &dyn Any = &*buffer;
    if any.is::<Vec<T>>() {
        return match buffer.into_any().downcast::<Vec<T>>() {
            Ok(vec) => Ok(*vec),
            Err(_) => Err(mismatch),
        };
    }
    let mut out = Vec::new();
    buffer.read(&mut |bytes| out = bytemuck::cast_slice(bytes).to_vec());
    let (len, found) = (buffer.len(), out.len());
    if found == len {
        Ok(out)
    } else {
        let dtype = T::DTYPE;
        Err(Error::UnreadBuffer { dtype, len, found })
    }
}

/// Makes a zeroed host buffer of `len` elements.
pub fn zeros(dtype: DType, len: usize) -> Box<dyn Buffer> {
    match dtype {
        DType::F64 => Box::new(zeroed::<f64>(len)),
        DType::F32 => Box::new(zeroed::<f32>(len)),
        DType::BF16 => Box::new(zeroed::<half::bf16>(len)),
        DType::F16 => Box::new(zeroed::<half::f16>(len)),
        DType::I64 => Box::new(zeroed::<i64>(len)),
        DType::U32 => Box::new(zeroed::<u32>(len)),
        DType::U8 => Box::new(zeroed::<u8>(len)),
    }
}
