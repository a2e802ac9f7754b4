//! libtorch's tensors in collectives and messages (feature `tch`).
//!
//! [`HostTensor`] is implemented for [`Tensor`], so the `*_tensor` methods of a
//! [`Group`](crate::Group) take it. A contiguous tensor is reduced where it lies, and a message
//! between threads moves no element.
//!
//! libtorch has no locks: while a buffer of a tensor is in use, the program neither writes nor
//! resizes the tensor itself.
//!
//! ```
//! use merak_mpu::{ReduceOp, threads};
//! use std::error::Error;
//! use tch::{Device, Kind, Tensor};
//!
//! let sums = threads::run(2, threads::WorldOptions::default(), |member| {
//!     let group = member.world_group()?;
//!     let gradient = Tensor::ones([3], (Kind::Float, Device::Cpu));
//!     group.all_reduce_tensor(&gradient, ReduceOp::Sum)?;
//!     Ok::<_, Box<dyn Error + Send + Sync>>(Vec::<f32>::try_from(gradient)?)
//! })?;
//! assert_eq!(sums[1], [2.0; 3]);
//! # Ok::<(), Box<dyn Error>>(())
//! ```
#![expect(
    unsafe_code,
    reason = "reads and writes the memory of libtorch tensors as slices"
)]

use crate::lent::Lent;
use crate::tensor::{check_sizes, not_in_host_memory, unknown_elements};
use crate::{Buffer, DType, Error, HostTensor, Memory, Result, zeros};
use std::{any::Any, collections::BTreeMap, slice};
use tch::{Device, Kind, TchError, Tensor, nn::VarStore};

/// The variables of a store in the order of their names, which is the same on all ranks. The
/// tensors share the memory of the store's.
///
/// The store's buffers, such as the running mean of a batch norm, are among them; an optimizer
/// takes those that [require a gradient](Tensor::requires_grad).
///
/// ```
/// use tch::{Device, nn::VarStore};
///
/// let store = VarStore::new(Device::Cpu);
/// let _ = store.root().zeros("weight", &[2]);
/// assert!(merak_mpu::tch::vars_by_name(&store).contains_key("weight"));
/// ```
pub fn vars_by_name(store: &VarStore) -> BTreeMap<String, Tensor> {
    store.variables().into_iter().collect()
}

/// libtorch's name of an element type; it has no `u32`.
pub fn kind_of(dtype: DType) -> Option<Kind> {
    match dtype {
        DType::F64 => Some(Kind::Double),
        DType::F32 => Some(Kind::Float),
        DType::BF16 => Some(Kind::BFloat16),
        DType::F16 => Some(Kind::Half),
        DType::I64 => Some(Kind::Int64),
        DType::U8 => Some(Kind::Uint8),
        DType::U32 => None,
    }
}

/// The element type of libtorch's name, where buffers have it.
pub fn dtype_of(kind: Kind) -> Option<DType> {
    let mut all = DType::ALL.into_iter();
    all.find(|&own| kind_of(own) == Some(kind))
}

/// What libtorch says of a failure, without the trace of its stack.
pub fn reason_of(error: &TchError) -> String {
    let text = match error {
        TchError::Torch(text) => text.clone(),
        other => other.to_string(),
    };
    let line = text.lines().next().unwrap_or_default();
    let reason = line.split("Exception raised from").next().unwrap_or(line);
    reason.trim_end().to_owned()
}

/// A contiguous tensor of the CPU as a buffer over the tensor's own memory.
#[derive(Debug)]
struct TensorBuffer {
    /// Declared first: it ends while the storage that it names is alive.
    lent: Option<Lent>,
    /// Has no part in autograd's graph.
    tensor: Tensor,
    dtype: DType,
    /// The strided tensor that gets the elements in the end, if they were written.
    strided: Option<Tensor>,
    written: bool,
}

// SAFETY: a shared buffer only reads its tensors, which libtorch allows from several threads; its
// reference counts are atomic.
unsafe impl Sync for TensorBuffer {}

impl TensorBuffer {
    /// Makes a buffer of a tensor that [`detached`] gave, whose elements lie in order.
    fn new(tensor: Tensor, dtype: DType) -> Result<Self> {
        let place = tensor.data_ptr().addr();
        if !place.is_multiple_of(dtype.size_bytes()) {
            return Err(bad(&tensor, "its memory is not aligned for its elements"));
        }
        Ok(Self {
            lent: None,
            tensor,
            dtype,
            strided: None,
            written: false,
        })
    }

    /// A buffer that is the only lent one over the tensor's storage.
    fn lend(tensor: &Tensor) -> Result<Self> {
        let (own, dtype) = detached(tensor)?;
        let storage = storage_of(&own);
        let mut buffer = if lies_in_order(&own) {
            Self::new(own, dtype)?
        } else if has_shared_elements(&own) {
            let reason = "some of its elements share memory, as after a broadcast: copy it first";
            return Err(bad(&own, reason));
        } else {
            let mut buffer = Self::new(copy_of(&own)?, dtype)?;
            buffer.strided = Some(own);
            buffer
        };
        if !buffer.is_empty() {
            buffer.lent = Some(Lent::new(storage).map_err(|reason| bad(tensor, reason))?);
        }
        Ok(buffer)
    }

    /// Where its bytes begin, and how many they are; none where the tensor is empty.
    fn place(&self) -> Option<(*mut u8, usize)> {
        let bytes = self.len() * self.dtype.size_bytes();
        (bytes > 0).then(|| (self.tensor.data_ptr().cast(), bytes))
    }
}

impl Drop for TensorBuffer {
    fn drop(&mut self) {
        if let Some(strided) = self.strided.as_mut().filter(|_| self.written) {
            // It was accepted for writing when it was lent.
            let _ = strided.f_copy_(&self.tensor);
        }
    }
}

impl Buffer for TensorBuffer {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.tensor.numel()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        let Some((start, len)) = self.place() else {
            // Aligned like the memory of a tensor, so it casts to a slice of any numbers.
            return f(bytemuck::cast_slice::<u64, u8>(&[]));
        };
        // SAFETY: `new` found a contiguous tensor of the CPU, so `len` bytes of numbers lie there,
        // which the buffer keeps alive; what writes a tensor's memory holds the one lent buffer of
        // it, and the program leaves the tensor alone meanwhile (see the page of the module).
        f(unsafe { slice::from_raw_parts(start, len) });
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        self.written = true;
        let Some((start, len)) = self.place() else {
            return f(bytemuck::cast_slice_mut::<u64, u8>(&mut []));
        };
        // SAFETY: as in `read`; a buffer that is written is the one that is lent, or alone has its
        // tensor.
        f(unsafe { slice::from_raw_parts_mut(start, len) });
    }

    fn memory(&mut self) -> Memory {
        self.written = true;
        Memory::Host(self.tensor.data_ptr().cast())
    }

    /// A tensor too, so that the result of a collective becomes one without a copy.
    fn zeros_like(&self, len: usize) -> Box<dyn Buffer> {
        let size = i64::try_from(len).unwrap_or(i64::MAX);
        match Tensor::f_zeros([size], (self.tensor.kind(), Device::Cpu)) {
            Ok(tensor) => Box::new(Self {
                lent: None,
                tensor,
                dtype: self.dtype,
                strided: None,
                written: false,
            }),
            Err(_) => zeros(self.dtype, len),
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

impl HostTensor for Tensor {
    fn sizes(&self) -> Vec<usize> {
        sizes_of(self)
    }

    fn lend(&self) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(TensorBuffer::lend(self)?))
    }

    fn share(&self) -> Result<Box<dyn Buffer>> {
        let (mut own, dtype) = detached(self)?;
        let is_variable = self.requires_grad() && self.is_leaf();
        if is_variable || !lies_in_order(&own) {
            own = copy_of(&own)?;
        }
        Ok(Box::new(TensorBuffer::new(own, dtype)?))
    }

    fn from_buffer(sizes: &[usize], buffer: Box<dyn Buffer>) -> Result<Self> {
        check_sizes(sizes, &*buffer)?;
        let refused = |reason| Error::BadTensor {
            shape: sizes.to_vec(),
            reason,
        };
        let failed = |error: TchError| refused(reason_of(&error));
        let size = sizes.iter().map(|&size| i64::try_from(size));
        let size: Vec<i64> = size
            .collect::<Result<_, _>>()
            .map_err(|error| refused(error.to_string()))?;
        let any: &dyn Any = &*buffer;
        if let Some(own) = any.downcast_ref::<TensorBuffer>() {
            return own.tensor.f_reshape(size).map_err(failed);
        }
        let Some(kind) = kind_of(buffer.dtype()) else {
            return Err(refused(format!(
                "libtorch has no elements of {}",
                buffer.dtype()
            )));
        };
        let tensor = Self::f_empty(size, (kind, Device::Cpu)).map_err(failed)?;
        let mut own = TensorBuffer::new(tensor, buffer.dtype())?;
        buffer.read(&mut |from| own.write(&mut |to| to.copy_from_slice(from)));
        Ok(own.tensor.shallow_clone())
    }
}

/// The tensor without autograd's graph, over the same memory, and the type of its elements.
///
/// # Errors
/// [`Error::BadTensor`] where it is no plain tensor of the CPU, or its elements are of another
/// type.
fn detached(tensor: &Tensor) -> Result<(Tensor, DType)> {
    let failed = |error: TchError| bad(tensor, &reason_of(&error));
    if !tensor.defined() {
        return Err(bad(tensor, "it is undefined"));
    }
    if tensor.device() != Device::Cpu {
        return Err(bad(tensor, &not_in_host_memory(tensor.device())));
    }
    let kind = tensor.f_kind().map_err(failed)?;
    let dtype = dtype_of(kind).ok_or_else(|| bad(tensor, &unknown_elements(kind)))?;
    let own = tensor.f_detach().map_err(failed)?;
    // A sparse tensor has no strides.
    let _none = own.f_as_strided([0], [1], 0).map_err(failed)?;
    Ok((own, dtype))
}

/// Whether the memory holds the elements, one after the other and as they are.
fn lies_in_order(tensor: &Tensor) -> bool {
    tensor.is_contiguous() && !tensor.is_neg()
}

/// The address of the storage, which all tensors over the same memory have; 0 for an empty tensor.
fn storage_of(tensor: &Tensor) -> usize {
    let first = i64::from(tensor.numel() > 0);
    tensor.as_strided([first], [1], 0).data_ptr().addr()
}

/// Whether two elements may lie at one place.
fn has_shared_elements(tensor: &Tensor) -> bool {
    let mut dims: Vec<(i64, i64)> = tensor.stride().into_iter().zip(tensor.size()).collect();
    dims.retain(|&(_, size)| size != 1);
    dims.sort_unstable();
    if dims.iter().any(|&(_, size)| size == 0) {
        return false;
    }
    // A dim that steps over all that the dims of smaller strides reach adds places of its own.
    let mut reach = 0;
    dims.into_iter().any(|(stride, size)| {
        let shares = stride <= reach;
        reach += stride * (size - 1);
        shares
    })
}

/// A contiguous tensor of its own with the same elements.
fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    let copy = Tensor::f_empty(tensor.size(), (tensor.kind(), Device::Cpu));
    let copy = copy.and_then(|mut copy| copy.f_copy_(tensor).map(|()| copy));
    copy.map_err(|error| bad(tensor, &reason_of(&error)))
}

fn sizes_of(tensor: &Tensor) -> Vec<usize> {
    if tensor.defined() {
        tensor
            .size()
            .into_iter()
            .map(|size| size as usize)
            .collect()
    } else {
        Vec::new()
    }
}

fn bad(tensor: &Tensor, reason: &str) -> Error {
    Error::BadTensor {
        shape: sizes_of(tensor),
        reason: reason.to_owned(),
    }
}
