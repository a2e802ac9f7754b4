//! candle's tensors in collectives and messages (feature `candle`).
//!
//! [`HostTensor`] is implemented for [`Tensor`] and [`Var`], so the `*_tensor` methods of a
//! [`Group`](crate::Group) take them. A contiguous tensor is reduced where it lies, and a message
//! between threads moves no element.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use merak_mpu::{ReduceOp, threads};
//! use std::error::Error;
//!
//! let sums = threads::run(2, threads::WorldOptions::default(), |member| {
//!     let group = member.world_group()?;
//!     let gradient = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
//!     group.all_reduce_tensor(&gradient, ReduceOp::Sum)?;
//!     Ok::<_, Box<dyn Error + Send + Sync>>(gradient.to_vec2::<f32>()?)
//! })?;
//! assert_eq!(sums[1], [[2.0; 3]; 2]);
//! # Ok::<(), Box<dyn Error>>(())
//! ```

use crate::lent::Lent;
use crate::tensor::{check_sizes, not_in_host_memory, unknown_elements};
use crate::{Buffer, DType, Element, Error, HostTensor, Memory, Result, into_vec};
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Storage, Tensor, Var, WithDType};
use std::{
    any::Any,
    cell::RefCell,
    collections::BTreeMap,
    fmt,
    ops::Range,
    sync::{Mutex, PoisonError},
};

/// The variables of a candle `VarMap` in the order of their names, which is the same on all ranks.
///
/// ```
/// use candle_core::{Device, Var};
/// use std::sync::Mutex;
///
/// let weight = Var::from_slice(&[1.0_f32], 1, &Device::Cpu)?;
/// let vars = Mutex::new([("weight".to_owned(), weight)].into()); // VarMap::data
/// assert!(merak_mpu::candle::vars_by_name(&vars).contains_key("weight"));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[expect(
    clippy::disallowed_types,
    clippy::implicit_hasher,
    reason = "candle's `VarMap` is this hash map, whose order ends here"
)]
pub fn vars_by_name(vars: &Mutex<std::collections::HashMap<String, Var>>) -> BTreeMap<String, Var> {
    let vars = vars.lock().unwrap_or_else(PoisonError::into_inner);
    let named = vars.iter();
    named
        .map(|(name, var)| (name.clone(), var.clone()))
        .collect()
}

/// A contiguous tensor of the CPU as a buffer over the tensor's own memory.
///
/// A closure reads or writes under the lock of the tensor's storage.
pub struct TensorBuffer {
    /// Declared first: it ends while the storage that it names is alive.
    lent: Option<Lent>,
    tensor: Tensor,
    dtype: DType,
    /// The tensor's elements in its storage.
    range: Range<usize>,
    /// The strided tensor that gets the elements in the end, if they were written.
    strided: Option<Tensor>,
    written: bool,
}

/// Without the elements, for which candle would bring its printing of numbers.
impl fmt::Debug for TensorBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorBuffer")
            .field("dtype", &self.dtype)
            .field("range", &self.range)
            .finish_non_exhaustive()
    }
}

impl TensorBuffer {
    /// Makes a buffer of a tensor.
    ///
    /// # Errors
    /// [`Error::BadTensor`] where the tensor is not on the CPU, not contiguous, or of another type
    /// than a [`DType`].
    pub fn new(tensor: &Tensor) -> Result<Self> {
        if !tensor.device().is_cpu() {
            return Err(bad(tensor, &not_in_host_memory(tensor.device().location())));
        }
        let Some(dtype) = dtype_of(tensor.dtype()) else {
            return Err(bad(tensor, &unknown_elements(tensor.dtype())));
        };
        let Some((start, end)) = tensor.layout().contiguous_offsets() else {
            return Err(bad(tensor, "it is strided, expected a contiguous one"));
        };
        Ok(Self {
            lent: None,
            tensor: tensor.clone(),
            dtype,
            range: start..end,
            strided: None,
            written: false,
        })
    }

    /// A buffer that is the only lent one over the tensor's storage.
    fn lend(tensor: &Tensor) -> Result<Self> {
        let mut buffer = if tensor.is_contiguous() || !tensor.device().is_cpu() {
            Self::new(tensor)?
        } else {
            let failed = |error: candle_core::Error| bad(tensor, &error);
            // Elements that share memory, as after a broadcast, are refused.
            with_storage(tensor, &mut |_| ()).map_err(failed)?;
            let copy = tensor.detach().contiguous().map_err(failed)?;
            let mut buffer = Self::new(&copy)?;
            buffer.strided = Some(tensor.clone());
            buffer
        };
        if !buffer.is_empty() {
            let storage = std::ptr::from_ref(&*tensor.storage_and_layout().0).addr();
            buffer.lent = Some(Lent::new(storage).map_err(|reason| bad(tensor, reason))?);
        }
        Ok(buffer)
    }
}

impl Drop for TensorBuffer {
    fn drop(&mut self) {
        if let Some(strided) = self.strided.as_ref().filter(|_| self.written) {
            // It was accepted for writing when it was lent.
            let _ = copy_into(strided, &self.tensor);
        }
    }
}

impl Buffer for TensorBuffer {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.range.len()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        match &*self.tensor.storage_and_layout().0 {
            Storage::Cpu(storage) => f(bytes(storage, &self.range).unwrap_or_default()),
            _ => f(&[]),
        }
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        self.written = true;
        let mut write = |storage: &mut CpuStorage| match bytes_mut(storage, &self.range) {
            Some(bytes) => f(bytes),
            None => f(&mut []),
        };
        with_storage(&self.tensor, &mut write)
            .expect("a contiguous tensor of the CPU has storage to write");
    }

    fn memory(&mut self) -> Memory {
        let mut start = std::ptr::null_mut();
        self.write(&mut |bytes| start = bytes.as_mut_ptr());
        Memory::Host(start)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

impl HostTensor for Tensor {
    fn sizes(&self) -> Vec<usize> {
        self.dims().to_vec()
    }

    fn lend(&self) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(TensorBuffer::lend(self)?))
    }

    fn share(&self) -> Result<Box<dyn Buffer>> {
        let own = if self.is_variable() {
            self.detach().force_contiguous()
        } else {
            self.detach().contiguous()
        };
        let own = own.map_err(|error| bad(self, &error))?;
        Ok(Box::new(TensorBuffer::new(&own)?))
    }

    fn from_buffer(sizes: &[usize], buffer: Box<dyn Buffer>) -> Result<Self> {
        check_sizes(sizes, &*buffer)?;
        let any: &dyn Any = &*buffer;
        if any.is::<TensorBuffer>() {
            let own = buffer.into_any().downcast::<TensorBuffer>();
            let tensor = own.expect("its type was just read").tensor.detach();
            return tensor.reshape(sizes).map_err(|error| bad(&tensor, &error));
        }
        match buffer.dtype() {
            DType::F64 => from_vec::<f64>(sizes, buffer),
            DType::F32 => from_vec::<f32>(sizes, buffer),
            DType::BF16 => from_vec::<half::bf16>(sizes, buffer),
            DType::F16 => from_vec::<half::f16>(sizes, buffer),
            DType::I64 => from_vec::<i64>(sizes, buffer),
            DType::U32 => from_vec::<u32>(sizes, buffer),
            DType::U8 => from_vec::<u8>(sizes, buffer),
        }
    }
}

/// A variable is lent and shared as its tensor is; one that is made of a buffer is a copy.
impl HostTensor for Var {
    fn sizes(&self) -> Vec<usize> {
        self.as_tensor().sizes()
    }

    fn lend(&self) -> Result<Box<dyn Buffer>> {
        HostTensor::lend(self.as_tensor())
    }

    fn share(&self) -> Result<Box<dyn Buffer>> {
        self.as_tensor().share()
    }

    fn from_buffer(sizes: &[usize], buffer: Box<dyn Buffer>) -> Result<Self> {
        let tensor = Tensor::from_buffer(sizes, buffer)?;
        Self::from_tensor(&tensor).map_err(|error| bad(&tensor, &error))
    }
}

impl From<DType> for candle_core::DType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F64 => Self::F64,
            DType::F32 => Self::F32,
            DType::BF16 => Self::BF16,
            DType::F16 => Self::F16,
            DType::I64 => Self::I64,
            DType::U32 => Self::U32,
            DType::U8 => Self::U8,
        }
    }
}

/// The element type of candle's name, where buffers have it.
pub fn dtype_of(dtype: candle_core::DType) -> Option<DType> {
    let mut all = DType::ALL.into_iter();
    all.find(|&own| candle_core::DType::from(own) == dtype)
}

/// Calls `f` once with the storage of a tensor of the CPU.
fn with_storage(tensor: &Tensor, f: &mut dyn FnMut(&mut CpuStorage)) -> candle_core::Result<()> {
    struct Change<'a>(RefCell<&'a mut dyn FnMut(&mut CpuStorage)>);
    impl InplaceOp1 for Change<'_> {
        fn name(&self) -> &'static str {
            "change"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
            (self.0.borrow_mut())(storage);
            Ok(())
        }
    }
    tensor.inplace_op1(&Change(RefCell::new(f)))
}

/// The bytes of some elements, if the storage has them and a buffer has their type.
fn bytes<'a>(storage: &'a CpuStorage, range: &Range<usize>) -> Option<&'a [u8]> {
    macro_rules! of {
        ($($dtype:ident)*) => {
            match storage {
                $(CpuStorage::$dtype(data) => bytemuck::cast_slice(data.get(range.clone())?),)*
                _ => return None,
            }
        };
    }
    Some(of!(F64 F32 BF16 F16 I64 U32 U8))
}

/// [`bytes`], for writing.
fn bytes_mut<'a>(storage: &'a mut CpuStorage, range: &Range<usize>) -> Option<&'a mut [u8]> {
    macro_rules! of {
        ($($dtype:ident)*) => {
            match storage {
                $(CpuStorage::$dtype(data) => {
                    bytemuck::cast_slice_mut(data.get_mut(range.clone())?)
                })*
                _ => return None,
            }
        };
    }
    Some(of!(F64 F32 BF16 F16 I64 U32 U8))
}

/// Copies the elements of a contiguous tensor into a strided one of the same type and shape.
fn copy_into(strided: &Tensor, contiguous: &Tensor) -> candle_core::Result<()> {
    let (guard, _) = contiguous.storage_and_layout();
    let Storage::Cpu(from) = &*guard else {
        return Ok(());
    };
    let places = || strided.strided_index();
    macro_rules! copy {
        ($to:expr, $($dtype:ident)*) => {
            match (from, $to) {
                $((CpuStorage::$dtype(from), CpuStorage::$dtype(to)) => {
                    places().zip(from).for_each(|(place, &value)| to[place] = value);
                })*
                _ => {}
            }
        };
    }
    with_storage(strided, &mut |to| copy!(to, F64 F32 BF16 F16 I64 U32 U8))
}

fn from_vec<T: Element + WithDType>(sizes: &[usize], buffer: Box<dyn Buffer>) -> Result<Tensor> {
    let made = Tensor::from_vec(into_vec::<T>(buffer)?, sizes, &Device::Cpu);
    made.map_err(|error| Error::BadTensor {
        shape: sizes.to_vec(),
        reason: error.to_string(),
    })
}

fn bad(tensor: &Tensor, reason: &(impl ToString + ?Sized)) -> Error {
    Error::BadTensor {
        shape: tensor.dims().to_vec(),
        reason: reason.to_string(),
    }
}
