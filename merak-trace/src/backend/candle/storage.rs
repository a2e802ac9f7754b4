//! candle tensors as values: access to their elements, reuse of their memory, and flat parameters.

use super::{super::misplaced, pool::Pool};
use crate::{
    Error, Param, ParamStore, Result, TensorType, Value,
    kernels::{Threads, narrow, widen},
    value::Lease,
};
use candle_core::{CpuStorage, Device, Storage, Tensor, WithDType};
use half::bf16;
use merak_mpu::{
    Buffer, DType, Element, Memory,
    candle::{TensorBuffer, replace_storage},
};
use std::{
    any::Any,
    marker::PhantomData,
    ops::{Deref, Range},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// An element type of both candle and this crate.
pub(super) trait Scalar: Element + WithDType {}
impl<T: Element + WithDType> Scalar for T {}

/// A value of this backend: a contiguous tensor, and the allocation that it is a view of.
///
/// The tensor's elements may be narrower than the value's type: in a parameter that is kept in bf16,
/// and in results that only move such elements. Readers get them [widened](elements).
///
/// The tensor is declared first, so it is dropped before the last handle gives the allocation back.
#[derive(Debug, Clone)]
pub(super) struct Handle {
    pub(super) tensor: Tensor,
    root: Arc<Root>,
}

/// An allocation; its memory goes back to the pool with the last view.
#[derive(Debug)]
struct Root {
    tensor: Tensor,
    pool: Option<Pool>,
    /// Memory for reading the elements in a wider type.
    wide: Option<Pool>,
    /// Whether a tensor over the memory was handed out, so that its end is not known here.
    is_handed_out: AtomicBool,
    _lease: Option<Arc<Lease>>,
}

impl Root {
    /// The pool that the memory goes back to.
    fn pool(&self) -> Option<&Pool> {
        let is_handed_out = self.is_handed_out.load(Ordering::Relaxed);
        self.pool.as_ref().filter(|_| !is_handed_out)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if let Some(pool) = self.pool() {
            pool.put(take_storage(&self.tensor));
        }
    }
}

/// Takes the storage of a tensor that is not read again.
fn take_storage(tensor: &Tensor) -> CpuStorage {
    let none = || CpuStorage::F32(Vec::new());
    // A tensor of the CPU always gives its storage; if not, its memory is simply freed.
    replace_storage(tensor, none()).unwrap_or_else(|_| none())
}

impl Handle {
    /// The handle of a value of this backend.
    pub(super) fn of(value: &Value) -> Result<&Self> {
        value.data::<Self>().ok_or_else(|| foreign(value.ty()))
    }

    /// Wraps fresh memory; `pool` gets it back, `lease` accounts for it.
    pub(super) fn new(tensor: Tensor, pool: Option<Pool>, lease: Option<Arc<Lease>>) -> Self {
        Self::with_root(tensor, pool, None, lease)
    }

    /// Wraps memory of elements narrower than the value's; `wide` provides memory to widen them.
    pub(super) fn narrow(tensor: Tensor, wide: Pool, lease: Option<Arc<Lease>>) -> Self {
        Self::with_root(tensor, None, Some(wide), lease)
    }

    fn with_root(
        tensor: Tensor,
        pool: Option<Pool>,
        wide: Option<Pool>,
        lease: Option<Arc<Lease>>,
    ) -> Self {
        let root = Arc::new(Root {
            tensor: tensor.clone(),
            pool,
            wide,
            is_handed_out: AtomicBool::new(false),
            _lease: lease,
        });
        Self { tensor, root }
    }

    /// Another tensor over the same allocation.
    pub(super) fn view(&self, tensor: Tensor) -> Self {
        Self {
            tensor,
            root: Arc::clone(&self.root),
        }
    }

    pub(super) fn into_value(self, ty: TensorType) -> Value {
        Value::new(ty, Arc::new(self))
    }

    /// The tensor for other code, which may keep it: from now on the memory is candle's to free.
    fn hand_out(&self) -> Tensor {
        self.root.is_handed_out.store(true, Ordering::Relaxed);
        self.tensor.clone()
    }
}

/// The tensor of a value; narrower elements are copied.
pub(super) fn tensor_of(value: &Value) -> Result<Tensor> {
    let handle = Handle::of(value)?;
    if narrow_pool(value).is_some() {
        let wide = handle.tensor.to_dtype(value.ty().dtype.into());
        return wide.map_err(at("tensor"));
    }
    Ok(handle.hand_out())
}

/// The type of a tensor, and the tensor as values have it: contiguous, on the CPU and outside of
/// candle's graphs.
pub(super) fn admitted(tensor: &Tensor) -> Result<(TensorType, Tensor)> {
    let own = tensor.detach().contiguous().map_err(at("tensor"))?;
    let buffer = TensorBuffer::new(&own).map_err(at("tensor"))?;
    Ok((TensorType::new(own.dims(), buffer.dtype()), own))
}

/// The elements of a value while it is borrowed.
pub(super) struct Elements<G, T> {
    source: Source<G>,
    range: Range<usize>,
    element: PhantomData<T>,
}

/// Where elements lie.
enum Source<G> {
    /// In the memory of the value.
    Own(G),
    /// In a copy of another type; the pool gets its memory back.
    Wide(CpuStorage, Pool),
}

impl<G: Deref<Target = Storage>, T: Scalar> Deref for Elements<G, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let storage = match &self.source {
            Source::Own(guard) => match &**guard {
                Storage::Cpu(storage) => storage,
                _ => return &[],
            },
            Source::Wide(storage, _) => storage,
        };
        &storage
            .as_slice::<T>()
            .expect("the type was checked when borrowed")[self.range.clone()]
    }
}

impl<G> Drop for Source<G> {
    fn drop(&mut self) {
        if let Source::Wide(storage, pool) = self {
            pool.put(std::mem::replace(storage, CpuStorage::F32(Vec::new())));
        }
    }
}

/// Borrows the elements of a value; narrower ones are copied.
pub(super) fn elements<T: Scalar>(
    value: &Value,
) -> Result<Elements<impl Deref<Target = Storage> + '_, T>> {
    if value.ty().dtype != <T as Element>::DTYPE {
        return Err(foreign(value.ty()));
    }
    let handle = Handle::of(value)?;
    if let Some(pool) = narrow_pool(value) {
        let mut wide = pool.take::<f32>(value.ty().numel());
        widen(&own_elements::<bf16>(value, handle)?, &mut wide);
        return Ok(Elements {
            range: 0..wide.len(),
            source: Source::Wide(CpuStorage::F32(wide), pool.clone()),
            element: PhantomData,
        });
    }
    own_elements(value, handle)
}

/// The elements of a value as they are kept.
pub(super) enum Kept<W, N> {
    /// In the value's type.
    Wide(W),
    /// In a narrower one.
    Narrow(N),
}

/// Borrows the elements of a value for an operation that also reads narrower ones.
pub(super) fn kept<T: Scalar, N: Scalar>(
    value: &Value,
) -> Result<
    Kept<
        Elements<impl Deref<Target = Storage> + '_, T>,
        Elements<impl Deref<Target = Storage> + '_, N>,
    >,
> {
    if narrow_pool(value).is_some() {
        return Ok(Kept::Narrow(own_elements(value, Handle::of(value)?)?));
    }
    Ok(Kept::Wide(elements(value)?))
}

/// Borrows elements as they are kept.
fn own_elements<'a, T: Scalar>(
    value: &'a Value,
    handle: &'a Handle,
) -> Result<Elements<impl Deref<Target = Storage> + 'a, T>> {
    if handle.tensor.dtype() != <T as Element>::DTYPE.into() {
        return Err(foreign(value.ty()));
    }
    let (guard, layout) = handle.tensor.storage_and_layout();
    let start = layout.start_offset();
    Ok(Elements {
        source: Source::Own(guard),
        range: start..start + value.ty().numel(),
        element: PhantomData,
    })
}

/// The pool for widening the elements of a value, if they are narrower than its type.
fn narrow_pool(value: &Value) -> Option<&Pool> {
    let handle = value.data::<Handle>()?;
    let is_narrow = handle.tensor.dtype() != value.ty().dtype.into();
    handle.root.wide.as_ref().filter(|_| is_narrow)
}

/// Takes the memory of a value that nothing else shares; gives the value back otherwise.
pub(super) fn steal<T: Scalar>(value: Value) -> Result<Vec<T>, Value> {
    let stealable = value.ty().dtype == <T as Element>::DTYPE
        && value.data::<Handle>().is_some_and(|handle| {
            Arc::strong_count(&handle.root) == 1 && handle.root.pool().is_some()
        });
    if !stealable {
        return Err(value);
    }
    let (ty, data) = value.into_data();
    match Arc::try_unwrap(
        data.downcast::<Handle>()
            .map_err(|data| Value::new(ty.clone(), data))?,
    ) {
        Ok(handle) => {
            let storage = take_storage(&handle.root.tensor);
            Ok(T::cpu_storage_data(storage).expect("the type was just checked"))
        }
        Err(shared) => Err(Value::new(ty, shared)),
    }
}

fn foreign(ty: &TensorType) -> Error {
    Error::Backend {
        node: ty.to_string(),
        reason: "is no value of this backend and element type".to_owned(),
    }
}

/// An error of candle, at a node.
pub(super) fn at<E: ToString>(node: &str) -> impl Fn(E) -> Error + '_ {
    move |error| Error::Backend {
        node: node.to_owned(),
        reason: error.to_string(),
    }
}

/// Parameters that are views of a flat value.
pub(super) fn param_values(
    params: &[Param],
    offsets: &[usize],
    flat: &Value,
) -> Result<Vec<Value>> {
    let (whole, len) = (Handle::of(flat)?, flat.ty().numel());
    let value = |(param, &offset): (&Param, &usize)| {
        let ty = &param.local;
        let is_kept = [ty.dtype, param.kept_dtype()].contains(&flat.ty().dtype);
        if !is_kept || offset + ty.numel() > len {
            return Err(misplaced(param, offset, flat));
        }
        let view = (whole.tensor)
            .narrow(0, offset, ty.numel())
            .and_then(|view| view.reshape(ty.shape.as_slice()));
        let view = whole.view(view.map_err(at(&param.name))?);
        Ok(view.into_value(ty.clone()))
    };
    params.iter().zip(offsets).map(value).collect()
}

/// Lays out parameters in one flat tensor. Those of f32 may be kept in bf16, trained ones as copies
/// of f32 masters; `wide` provides memory for reading them in f32, the threads round masters.
pub(super) fn param_store(
    params: &[Param],
    offsets: &[usize],
    len: usize,
    (wide, threads): (&Pool, &Threads),
) -> Result<ParamStore> {
    let (dtype, kept) = store_types(params)?;
    let zeros =
        |dtype: DType| Tensor::zeros(len, dtype.into(), &Device::Cpu).map_err(at("parameters"));
    let read = zeros(kept)?;
    let buffer = TensorBuffer::new(&read).map_err(at("parameters"))?;
    let flat: Box<dyn Buffer> = if kept != dtype && params.iter().any(|param| param.trainable) {
        Box::new(Masters {
            flat: TensorBuffer::new(&zeros(dtype)?).map_err(at("parameters"))?,
            copy: buffer,
            threads: threads.clone(),
        })
    } else {
        Box::new(buffer)
    };
    let whole = if kept == dtype {
        Handle::new(read.clone(), None, None)
    } else {
        Handle::narrow(read.clone(), wide.clone(), None)
    };
    let mut views = Vec::with_capacity(params.len());
    for (param, &offset) in params.iter().zip(offsets) {
        let ty = &param.local;
        let is_same = ty.dtype == dtype && param.kept_dtype() == kept;
        if !is_same || offset + ty.numel() > len {
            return Err(refused(
                &param.name,
                format!("of type {ty} at {offset} does not fit {len} elements of {dtype}"),
            ));
        }
        let view = read
            .narrow(0, offset, ty.numel())
            .and_then(|view| view.reshape(ty.shape.as_slice()));
        views.push(
            whole
                .view(view.map_err(at(&param.name))?)
                .into_value(ty.clone()),
        );
    }
    Ok(ParamStore { flat, views })
}

/// The element type of parameters, and the one in which nodes find them.
fn store_types(params: &[Param]) -> Result<(DType, DType)> {
    let (dtype, kept) = params.first().map_or((DType::F32, DType::F32), |param| {
        (param.local.dtype, param.kept_dtype())
    });
    match (dtype, kept) {
        (DType::F32 | DType::F64, same) if same == dtype => Ok((dtype, kept)),
        (DType::F32, DType::BF16) => Ok((dtype, kept)),
        _ => {
            let how = if kept == dtype {
                String::new()
            } else {
                format!(", kept in {kept}")
            };
            Err(refused(
                "parameters",
                format!(
                    "are of type {dtype}{how}; the candle backend trains in f32 or f64, or in f32 with parameters that \
                     are kept in bf16"
                ),
            ))
        }
    }
}

fn refused(name: &str, reason: String) -> Error {
    Error::Backend {
        node: name.to_owned(),
        reason,
    }
}

/// f32 parameters of which nodes read a copy in bf16. The copy follows each change.
#[derive(Debug)]
struct Masters {
    flat: TensorBuffer,
    copy: TensorBuffer,
    threads: Threads,
}

impl Masters {
    /// Brings some elements of the copy up to date.
    fn renew(&mut self, elements: Range<usize>) {
        let Self {
            flat,
            copy,
            threads,
        } = self;
        flat.read(&mut |wide| {
            let wide = &bytemuck::cast_slice(wide)[elements.clone()];
            copy.write(&mut |bytes| {
                let copy = &mut bytemuck::cast_slice_mut(bytes)[elements.clone()];
                narrow(threads, wide, copy);
            });
        });
    }
}

impl Buffer for Masters {
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
