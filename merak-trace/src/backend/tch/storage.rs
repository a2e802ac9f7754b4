//! libtorch tensors as values and buffers, and flat parameters.
#![expect(
    unsafe_code,
    reason = "reads and writes the memory of libtorch tensors as slices"
)]

use super::{
    super::{
        foreign,
        masters::{Masters, NarrowCopy},
        misplaced,
    },
    at, shim,
};
use crate::{Error, Param, ParamStore, Result, TensorType, Value, value::Lease};
pub(super) use merak_mpu::tch::kind_of as kind;
use merak_mpu::{Buffer, DType, Element, Memory, zeros};
use std::{
    any::Any,
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};
use tch::{Device, Kind, TchError, Tensor};

/// libtorch's name of an element type.
pub(super) fn kind_of(ty: &TensorType) -> Result<Kind> {
    kind(ty.dtype).ok_or_else(|| {
        let reason = format!("libtorch has no element type {}", ty.dtype);
        Error::backend(ty.to_string(), reason)
    })
}

/// A size as libtorch counts.
pub(super) fn int(size: usize) -> i64 {
    i64::try_from(size).expect("a size fits an i64")
}

/// A shape as libtorch writes it.
pub(super) fn ints(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&size| int(size)).collect()
}

pub(super) fn shape_of(ty: &TensorType) -> Vec<i64> {
    ints(&ty.shape)
}

/// The bytes of a tensor's elements.
pub(super) fn size_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// A value of this backend: a tensor, which may be a strided view, and the account of its memory.
/// Under autocast its elements may be narrower than the value's type says.
#[derive(Debug)]
pub(super) struct Handle {
    tensor: Tensor,
    /// None where the memory is a parameter's.
    lease: Option<Arc<Lease>>,
    /// Where parameters keep a copy of another type.
    kept: Option<Kept>,
}

/// The copy of a parameter in another element type, made for the first node that asks for it and
/// good until the parameters change.
#[derive(Debug)]
struct Kept {
    changes: Changes,
    /// The copy, and the number of changes before it was made.
    copy: Mutex<Option<(u64, Tensor)>>,
}

/// Counts the changes of flat parameters.
#[derive(Debug, Clone, Default)]
struct Changes(Arc<AtomicU64>);

impl Changes {
    fn add(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

// SAFETY: a shared handle gives out `&Tensor` only, on which every operation that this backend
// calls reads; libtorch allows concurrent reads of a tensor, and its reference counts are atomic.
unsafe impl Sync for Handle {}

impl Handle {
    pub(super) fn new(tensor: Tensor, lease: Option<Arc<Lease>>) -> Self {
        Self {
            tensor,
            lease,
            kept: None,
        }
    }

    /// A parameter's tensor, over memory whose changes are counted.
    fn of_param(tensor: Tensor, changes: Changes) -> Self {
        let copy = Mutex::new(None);
        Self {
            kept: Some(Kept { changes, copy }),
            ..Self::new(tensor, None)
        }
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The type of the elements in memory.
    pub(super) fn kind(&self) -> Kind {
        self.tensor.kind()
    }

    /// The copy in another element type that a parameter keeps; none of other values.
    pub(super) fn kept(&self, kind: Kind) -> Result<Option<Tensor>, TchError> {
        let Some(kept) = &self.kept else {
            return Ok(None);
        };
        let now = kept.changes.count();
        let mut copy = kept.copy.lock().unwrap_or_else(PoisonError::into_inner);
        if copy
            .as_ref()
            .is_none_or(|(then, copy)| *then != now || copy.kind() != kind)
        {
            // The memory of the old one serves the new one.
            *copy = None;
            *copy = Some((now, self.tensor.f_to_kind(kind)?));
        }
        Ok(copy.as_ref().map(|(_, copy)| copy.shallow_clone()))
    }

    /// The handle of a value of this backend.
    pub(super) fn of(value: &Value) -> Result<&Self> {
        value.data::<Self>().ok_or_else(|| foreign(value.ty()))
    }

    /// Another tensor over the same memory.
    pub(super) fn view(&self, tensor: Tensor) -> Self {
        Self::new(tensor, self.lease.clone())
    }

    pub(super) fn into_value(self, ty: TensorType) -> Value {
        Value::new(ty, Arc::new(self))
    }
}

/// The tensor of a value.
pub(super) fn tensor(value: &Value) -> Result<&Tensor> {
    Handle::of(value).map(|handle| &handle.tensor)
}

/// Takes the tensor of a value whose memory nothing else shares; gives the value back otherwise.
pub(super) fn steal(value: Value) -> Result<Tensor, Value> {
    let (ty, data) = value.into_data();
    let handle = match data.downcast::<Handle>() {
        Ok(handle) => handle,
        Err(data) => return Err(Value::new(ty, data)),
    };
    match Arc::try_unwrap(handle) {
        Ok(handle)
            if handle
                .lease
                .as_ref()
                .is_some_and(|lease| Arc::strong_count(lease) == 1) =>
        {
            Ok(handle.tensor)
        }
        Ok(handle) => Err(handle.into_value(ty)),
        Err(shared) => Err(Value::new(ty, shared)),
    }
}

/// The elements of a contiguous tensor in host memory.
///
/// # Panics
/// When the tensor is on a device, strided, or of another element type.
pub(super) fn elements<T: Element>(tensor: &Tensor) -> &[T] {
    bytemuck::cast_slice(bytes(tensor, T::DTYPE))
}

/// The elements of a contiguous tensor in host memory, for writing.
///
/// # Panics
/// As [`elements`].
pub(super) fn elements_mut<T: Element>(tensor: &mut Tensor) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes_mut(tensor, T::DTYPE))
}

fn bytes(tensor: &Tensor, dtype: DType) -> &[u8] {
    let (start, len) = memory(tensor, dtype);
    if len == 0 {
        // Aligned like the memory of a tensor, so it casts to a slice of any numbers.
        return bytemuck::cast_slice::<u64, u8>(&[]);
    }
    // SAFETY: `memory` checked that `len` bytes of initialised numbers lie there, which the tensor
    // keeps alive; this backend writes a tensor's memory only where it holds it alone (see
    // `bytes_mut`).
    unsafe { std::slice::from_raw_parts(start, len) }
}

fn bytes_mut(tensor: &mut Tensor, dtype: DType) -> &mut [u8] {
    let (start, len) = memory(tensor, dtype);
    if len == 0 {
        return bytemuck::cast_slice_mut::<u64, u8>(&mut []);
    }
    // SAFETY: as in `bytes`; callers pass a tensor of their own making, a buffer that they own, or
    // the flat parameters, which are written between steps, when no node that reads a view of them
    // runs.
    unsafe { std::slice::from_raw_parts_mut(start, len) }
}

/// Where the bytes of a contiguous tensor in host memory lie.
fn memory(tensor: &Tensor, dtype: DType) -> (*mut u8, usize) {
    assert!(
        tensor.device() == Device::Cpu && tensor.is_contiguous(),
        "only contiguous tensors in host memory are slices"
    );
    assert_eq!(Some(tensor.kind()), kind(dtype), "element types agree");
    (
        tensor.data_ptr().cast(),
        tensor.numel() * dtype.size_bytes(),
    )
}

/// A flat tensor as a buffer: in place on the processor, through a host copy from a device.
#[derive(Debug)]
pub(super) struct TchBuffer {
    pub(super) flat: Tensor,
    dtype: DType,
    /// 16-bit copy of the buffer that is renewed whenever it is written.
    copy: Option<Tensor>,
    /// Tells parameters, which are views of the buffer, that it was written.
    changes: Changes,
}

// SAFETY: a shared buffer only reads its tensors, like `Handle`.
unsafe impl Sync for TchBuffer {}

impl TchBuffer {
    /// A buffer over the memory of a flat tensor.
    pub(super) fn new(flat: Tensor, dtype: DType) -> Self {
        Self {
            flat,
            dtype,
            copy: None,
            changes: Changes::default(),
        }
    }

    pub(super) fn zeros(dtype: DType, len: usize, device: Device) -> Result<Self> {
        let ty = TensorType::new([len], dtype);
        let flat = Tensor::f_zeros(int(len), (kind_of(&ty)?, device));
        let flat = flat.map_err(at(&ty.to_string()))?;
        Ok(Self::new(flat, dtype))
    }

    /// The elements of a value, without a copy where nothing else shares its memory.
    pub(super) fn from_value(value: Value) -> Result<Self> {
        let ty = value.ty().clone();
        let node = ty.to_string();
        let kind = kind_of(&ty)?;
        let flat = match steal(value) {
            Ok(own) => own.f_to_kind(kind).and_then(|own| own.f_reshape(-1)),
            Err(shared) => {
                let shared = tensor(&shared)?;
                let flat = shared.f_to_kind(kind).and_then(|flat| flat.f_reshape(-1));
                let flat = flat.map_err(at(&node))?;
                if flat.data_ptr() == shared.data_ptr() {
                    flat.f_empty_like().and_then(|mut own| {
                        own.f_copy_(&flat)?;
                        Ok(own)
                    })
                } else {
                    Ok(flat)
                }
            }
        };
        Ok(Self::new(flat.map_err(at(&node))?, ty.dtype))
    }

    /// The elements as a tensor of a type, over the same memory.
    pub(super) fn tensor(&self, device: Device, ty: &TensorType) -> Result<Tensor> {
        let node = ty.to_string();
        let shaped = self.flat.f_reshape(shape_of(ty)).map_err(at(&node))?;
        shaped.f_to_device(device).map_err(at(&node))
    }

    /// Brings 16-bit copies up to date.
    pub(super) fn renew(&mut self) -> Result<()> {
        self.changes.add();
        match &mut self.copy {
            Some(copy) => copy.f_copy_(&self.flat).map_err(at("16-bit weights")),
            None => Ok(()),
        }
    }

    /// Brings the 16-bit copies of some elements up to date.
    pub(super) fn renew_part(&mut self, elements: Range<usize>) -> Result<()> {
        self.changes.add();
        let Some(copy) = &self.copy else {
            return Ok(());
        };
        let (start, len) = (int(elements.start), int(elements.len()));
        let renewed = copy
            .f_narrow(0, start, len)
            .and_then(|mut copy| copy.f_copy_(&self.flat.f_narrow(0, start, len)?));
        renewed.map_err(at("16-bit weights"))
    }

    fn is_host(&self) -> bool {
        self.flat.device() == Device::Cpu
    }
}

impl Buffer for TchBuffer {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.flat.numel()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        if self.is_host() {
            f(bytes(&self.flat, self.dtype));
        } else {
            f(bytes(&self.flat.to_device(Device::Cpu), self.dtype));
        }
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        if self.is_host() {
            f(bytes_mut(&mut self.flat, self.dtype));
        } else {
            let mut host = self.flat.to_device(Device::Cpu);
            f(bytes_mut(&mut host, self.dtype));
            self.flat.copy_(&host);
        }
        self.written();
    }

    fn write_part(&mut self, bytes: Range<usize>, f: &mut dyn FnMut(&mut [u8])) {
        if !self.is_host() {
            return self.write(&mut |all| f(&mut all[bytes.clone()]));
        }
        f(&mut bytes_mut(&mut self.flat, self.dtype)[bytes.clone()]);
        let size = self.dtype.size_bytes();
        self.renew_part(bytes.start / size..bytes.end / size)
            .expect("libtorch copies elements between tensors of one length");
    }

    fn set_bytes(&mut self, bytes: &[u8]) {
        let kind = self.flat.kind();
        let host = Tensor::from_data_size(bytes, &[int(self.len())], kind);
        self.flat.copy_(&host);
        self.written();
    }

    fn lies_on_device(&self) -> bool {
        !self.is_host()
    }

    fn memory(&mut self) -> Memory {
        // The user of the address knows nothing of strides.
        if !self.flat.is_contiguous() {
            self.flat = self.flat.contiguous();
        }
        let start = self.flat.data_ptr();
        match self.flat.device() {
            Device::Cuda(ordinal) => Memory::Device {
                ordinal,
                address: start.addr() as u64,
            },
            _ => Memory::Host(start.cast()),
        }
    }

    fn stream(&self) -> u64 {
        match self.flat.device() {
            Device::Cuda(ordinal) => shim::current_stream(ordinal).unwrap_or_default(),
            _ => 0,
        }
    }

    fn written(&mut self) {
        self.changes.add();
        if let Some(copy) = &mut self.copy {
            copy.copy_(&self.flat);
        }
    }

    fn zeros_like(&self, len: usize) -> Box<dyn Buffer> {
        match Tensor::f_zeros(int(len), (self.flat.kind(), self.flat.device())) {
            Ok(flat) => Box::new(Self::new(flat, self.dtype)),
            Err(error) => {
                tracing::error!(%error, "a buffer of a device becomes one of the host");
                zeros(self.dtype, len)
            }
        }
    }

    fn clear(&mut self) {
        let _ = self.flat.zero_();
        self.changes.add();
        if let Some(copy) = &mut self.copy {
            let _ = copy.zero_();
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

/// Parameters that are views of a flat value, or copies in another element type.
pub(super) fn param_values(
    params: &[Param],
    offsets: &[usize],
    flat: &Value,
) -> Result<Vec<Value>> {
    let (whole, len) = (Handle::of(flat)?, flat.ty().numel());
    let value = |(param, &offset): (&Param, &usize)| {
        let ty = &param.local;
        if offset + ty.numel() > len {
            return Err(misplaced(param, offset, flat));
        }
        let kind = kind_of(ty)?;
        let view = (whole.tensor)
            .f_narrow(0, int(offset), int(ty.numel()))
            .and_then(|view| view.f_reshape(shape_of(ty))?.f_to_kind(kind));
        let view = whole.view(view.map_err(at(&param.name))?);
        Ok(view.into_value(ty.clone()))
    };
    params.iter().zip(offsets).map(value).collect()
}

/// Lays out parameters in one flat tensor. 16-bit parameters are views of a 16-bit copy of `f32`
/// masters. There are no masters if all parameters are frozen and of one type.
pub(super) fn param_store(
    device: Device,
    params: &[Param],
    offsets: &[usize],
    len: usize,
) -> Result<ParamStore> {
    let (dtype, narrow) = store_types(params)?;
    let mut flat = TchBuffer::zeros(dtype, len, device)?;
    if let Some(narrow) = narrow {
        flat.copy = Some(TchBuffer::zeros(narrow, len, device)?.flat);
    }
    let memory = |ty: &TensorType| match &flat.copy {
        Some(copy) if narrow == Some(ty.dtype) => Some(copy),
        _ => (ty.dtype == dtype).then_some(&flat.flat),
    };
    Ok(ParamStore {
        views: views(params, offsets, len, &flat.changes, memory)?,
        flat: Box::new(flat),
    })
}

/// Lays out 16-bit parameters as views of a copy, on the device, of masters in host memory.
pub(super) fn param_copies(
    device: Device,
    params: &[Param],
    offsets: &[usize],
    masters: Box<dyn Buffer>,
) -> Result<ParamStore> {
    let (_, narrow) = store_types(params)?;
    let Some(narrow) = narrow.filter(|_| masters.dtype() == DType::F32) else {
        return Err(Error::backend(
            "parameters",
            format!(
                "have no masters of {}: they are not trained in 16 bits",
                masters.dtype()
            ),
        ));
    };
    let len = masters.len();
    let copy = TchBuffer::zeros(narrow, len, device)?.flat;
    let memory = |ty: &TensorType| (ty.dtype == narrow).then_some(&copy);
    Ok(ParamStore {
        views: views(params, offsets, len, &Changes::default(), memory)?,
        flat: Box::new(Masters {
            flat: masters,
            copy: OnDevice(copy),
        }),
    })
}

/// The parameters at the given offsets of flat tensors of `len` elements; `memory` gives the one
/// for a type.
fn views<'a>(
    params: &[Param],
    offsets: &[usize],
    len: usize,
    changes: &Changes,
    memory: impl Fn(&TensorType) -> Option<&'a Tensor>,
) -> Result<Vec<Value>> {
    let view = |(param, &offset): (&Param, &usize)| {
        let ty = &param.local;
        let Some(memory) = memory(ty).filter(|_| offset + ty.numel() <= len) else {
            return Err(Error::backend(
                &param.name,
                format!("of type {ty} at {offset} does not fit {len} elements"),
            ));
        };
        let view = memory
            .f_narrow(0, int(offset), int(ty.numel()))
            .and_then(|view| view.f_reshape(shape_of(ty)));
        let view = view.map_err(at(&param.name))?;
        Ok(Handle::of_param(view, changes.clone()).into_value(ty.clone()))
    };
    params.iter().zip(offsets).map(view).collect()
}

/// Elements of masters that are copied to the device at once.
const RENEWED_AT_ONCE: usize = 1 << 24;

/// A 16-bit copy on the device of masters in host memory.
#[derive(Debug)]
struct OnDevice(Tensor);

// SAFETY: a shared buffer only reads its tensor, like `Handle`.
unsafe impl Sync for OnDevice {}

impl NarrowCopy for OnDevice {
    fn renew(&mut self, wide: &[f32], elements: Range<usize>) {
        for start in elements.clone().step_by(RENEWED_AT_ONCE) {
            let len = RENEWED_AT_ONCE.min(elements.end - start);
            let values = Tensor::from_slice(&wide[start..start + len]);
            self.0.narrow(0, int(start), int(len)).copy_(&values);
        }
    }
}

/// The element type of the flat memory of parameters and, if 16-bit parameters have masters, that
/// of their copy.
fn store_types(params: &[Param]) -> Result<(DType, Option<DType>)> {
    if let Some(param) = params
        .iter()
        .find(|param| param.kept_dtype() != param.local.dtype)
    {
        let (kept, ty) = (param.kept_dtype(), &param.local);
        return Err(Error::backend(
            &param.name,
            format!(
                "is to be kept in {kept} and read as {ty}; the tch backend keeps what nodes read"
            ),
        ));
    }
    let mut types = params.iter().map(|param| param.local.dtype);
    let first = types.clone().next().unwrap_or(DType::F32);
    let are_alike = types.clone().all(|dtype| dtype == first);
    let has_masters = !are_alike || params.iter().any(|param| param.trainable);
    let (dtype, narrow) = match types.find(|dtype| matches!(dtype, DType::BF16 | DType::F16)) {
        Some(narrow) if has_masters => (DType::F32, Some(narrow)),
        _ => (first, None),
    };
    if !dtype.is_float() {
        return Err(Error::backend(
            "parameters",
            format!("are of type {dtype}; the tch backend trains in f32, f64, bf16 or f16"),
        ));
    }
    Ok((dtype, narrow))
}

#[cfg(test)]
mod tests {
    use crate::{
        Backend, DType,
        backend::tch::{Tch, TchDevice},
    };

    #[test]
    fn an_empty_buffer_is_a_slice_of_any_numbers() {
        let backend = Tch::new(TchDevice::Cpu, 1).unwrap();
        let mut buffer = backend.grad_buffer(DType::F32, 0).unwrap();
        let mut seen = 0;
        buffer.read(&mut |bytes| seen += 1 + bytemuck::cast_slice::<u8, f64>(bytes).len());
        buffer.write(&mut |bytes| seen += 1 + bytemuck::cast_slice_mut::<u8, f64>(bytes).len());
        assert_eq!(seen, 2);
    }

    #[test]
    fn a_buffer_that_libtorch_does_not_make_is_an_error() {
        let backend = Tch::new(TchDevice::Cpu, 1).unwrap();
        let refused = backend.grad_buffer(DType::U32, 3).unwrap_err();
        let expected = "u32[3]: libtorch has no element type u32";
        assert_eq!(refused.to_string(), expected);
    }
}
