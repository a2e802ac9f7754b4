//! Values: access to their elements, reuse of their memory, candle tensors over it, and flat
//! parameters.

use super::{
    super::{
        foreign,
        masters::{Masters, NarrowCopy},
        misplaced,
    },
    buckets::{Buckets, InBuckets, into_elements},
    pool::Pool,
};
use crate::{
    Error, Param, ParamStore, Result, TensorType, Value,
    kernels::{Threads, narrow, widen},
    value::Lease,
};
use candle_core::{CpuStorage, Device, Storage, Tensor, WithDType, op::BackpropOp};
use half::bf16;
use merak_mpu::{Buffer, DType, Element, candle::TensorBuffer};
use std::{
    fmt,
    marker::PhantomData,
    ops::{Deref, Range},
    sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, TryLockError},
    thread,
};

/// An element type of both candle and this crate.
pub(super) trait Scalar: Element + WithDType {}
impl<T: Element + WithDType> Scalar for T {}

/// A value of this backend: contiguous elements of an allocation.
///
/// The elements may be narrower than the value's type: in a parameter that is kept in bf16, and in
/// results that only move such elements. Readers get them [widened](elements).
#[derive(Debug, Clone)]
pub(super) struct Handle {
    root: Arc<Root>,
    /// Number of the first element in the allocation.
    start: usize,
}

/// An allocation; its memory goes back to where it was taken with the last value over it.
struct Root {
    /// The elements, until a tensor has them.
    own: RwLock<Option<CpuStorage>>,
    /// All elements in one dimension, from where they are other code's too: their end is not known
    /// here.
    tensor: OnceLock<Tensor>,
    dtype: DType,
    home: Option<Home>,
    /// Memory for reading the elements in a wider type.
    wide: Option<Pool>,
    _lease: Option<Arc<Lease>>,
}

/// Where memory goes back to.
enum Home {
    /// Any value may have it next.
    Pool(Pool),
    /// It is that of a bucket, of which values are parts.
    Buckets(Buckets),
}

/// Without the elements, for which candle would bring its printing of numbers.
impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut root = f.debug_struct("Root");
        root.field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

impl Root {
    fn own(&self) -> RwLockReadGuard<'_, Option<CpuStorage>> {
        self.own.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tensor for other code, which may keep it: from now on the memory is candle's to free.
    fn hand_out(&self) -> &Tensor {
        if let Some(tensor) = self.tensor.get() {
            return tensor;
        }
        // A lock that is waited for would hold up an operation that reads the value twice.
        let mut own = loop {
            match self.own.try_write() {
                Ok(own) => break own,
                Err(TryLockError::Poisoned(own)) => break own.into_inner(),
                Err(TryLockError::WouldBlock) => thread::yield_now(),
            }
        };
        self.tensor.get_or_init(|| {
            let storage = own
                .take()
                .expect("a tensor or the allocation has the elements");
            let len = storage_len(&storage);
            if let Some(Home::Buckets(buckets)) = &self.home {
                buckets.give_away(&storage);
            }
            Tensor::from_storage(Storage::Cpu(storage), len, BackpropOp::none(), false)
        })
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let own = self.own.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let (Some(storage), Some(home)) = (own.take(), &self.home) {
            match home {
                Home::Pool(pool) => pool.put(storage),
                Home::Buckets(buckets) => buckets.put(storage),
            }
        }
    }
}

/// Number of elements, of the types that values have.
fn storage_len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::F64(data) => data.len(),
        CpuStorage::F32(data) => data.len(),
        CpuStorage::BF16(data) => data.len(),
        CpuStorage::F16(data) => data.len(),
        CpuStorage::I64(data) => data.len(),
        CpuStorage::U32(data) => data.len(),
        CpuStorage::U8(data) => data.len(),
        _ => 0,
    }
}

impl Handle {
    /// The handle of a value of this backend.
    pub(super) fn of(value: &Value) -> Result<&Self> {
        value.data::<Self>().ok_or_else(|| foreign(value.ty()))
    }

    /// Wraps fresh memory; `pool` gets it back, `lease` accounts for it.
    pub(super) fn new<T: Scalar>(data: Vec<T>, pool: Option<Pool>, lease: Arc<Lease>) -> Self {
        Self::with_root(
            T::to_cpu_storage_owned(data),
            <T as Element>::DTYPE,
            pool.map(Home::Pool),
            None,
            lease,
        )
    }

    /// Wraps a bucket of parameters, which may be narrower than they; `wide` provides memory to
    /// widen them.
    pub(super) fn of_bucket<T: InBuckets>(
        bucket: Box<dyn Buffer>,
        wide: Option<Pool>,
        lease: Arc<Lease>,
    ) -> Result<Self> {
        let (data, home) = into_elements::<T>(bucket).map_err(at("parameters"))?;
        Ok(Self::with_root(
            T::to_cpu_storage_owned(data),
            <T as Element>::DTYPE,
            home.map(Home::Buckets),
            wide,
            lease,
        ))
    }

    /// Wraps memory of elements that may be narrower than the value's; `wide` provides memory to
    /// widen them.
    pub(super) fn narrow<T: Scalar>(data: Vec<T>, wide: Pool, lease: Arc<Lease>) -> Self {
        Self::with_root(
            T::to_cpu_storage_owned(data),
            <T as Element>::DTYPE,
            None,
            Some(wide),
            lease,
        )
    }

    fn with_root(
        storage: CpuStorage,
        dtype: DType,
        home: Option<Home>,
        wide: Option<Pool>,
        lease: Arc<Lease>,
    ) -> Self {
        let root = Root {
            own: RwLock::new(Some(storage)),
            tensor: OnceLock::new(),
            dtype,
            home,
            wide,
            _lease: Some(lease),
        };
        Self {
            root: Arc::new(root),
            start: 0,
        }
    }

    /// The handle of a tensor's elements, in its own memory.
    fn of_tensor(
        flat: Tensor,
        dtype: DType,
        wide: Option<Pool>,
        lease: Option<Arc<Lease>>,
    ) -> Self {
        let root = Root {
            own: RwLock::new(None),
            tensor: OnceLock::from(flat),
            dtype,
            home: None,
            wide,
            _lease: lease,
        };
        Self {
            root: Arc::new(root),
            start: 0,
        }
    }

    /// The elements from number `start` on.
    fn from(&self, start: usize) -> Self {
        Self {
            root: Arc::clone(&self.root),
            start: self.start + start,
        }
    }

    /// The type in which the elements are kept.
    pub(super) fn dtype(&self) -> DType {
        self.root.dtype
    }

    pub(super) fn into_value(self, ty: TensorType) -> Value {
        Value::new(ty, Arc::new(self))
    }
}

/// The tensor of a value; narrower elements are copied.
pub(super) fn tensor_of(value: &Value) -> Result<Tensor> {
    let (handle, ty) = (Handle::of(value)?, value.ty());
    if narrow_pool(value).is_some() {
        let wide = elements::<f32>(value)?.to_vec();
        return Tensor::from_vec(wide, ty.shape.as_slice(), &Device::Cpu).map_err(at("tensor"));
    }
    let whole = handle.root.hand_out();
    let part = whole.narrow(0, handle.start, ty.numel());
    let tensor = part.and_then(|part| part.reshape(ty.shape.as_slice()));
    tensor.map_err(at("tensor"))
}

/// The value of a tensor as values have it: contiguous, on the CPU and outside of candle's graphs.
pub(super) fn value_of(tensor: &Tensor, lease: impl Fn(usize) -> Arc<Lease>) -> Result<Value> {
    let own = tensor.detach().contiguous().map_err(at("tensor"))?;
    let dtype = TensorBuffer::new(&own).map_err(at("tensor"))?.dtype();
    let ty = TensorType::new(own.dims(), dtype);
    let flat = own.reshape(ty.numel()).map_err(at("tensor"))?;
    let lease = lease(ty.size_bytes());
    Ok(Handle::of_tensor(flat, dtype, None, Some(lease)).into_value(ty))
}

/// The elements of a value while it is borrowed.
pub(super) struct Elements<'a, G, T> {
    source: Source<'a, G>,
    range: Range<usize>,
    element: PhantomData<T>,
}

/// Where elements lie.
enum Source<'a, G> {
    /// In the memory of the value.
    Own(RwLockReadGuard<'a, Option<CpuStorage>>),
    /// In a tensor that other code may have too.
    Tensor(G),
    /// In a copy of another type; the pool gets its memory back.
    Wide(CpuStorage, Pool),
}

impl<G: Deref<Target = Storage>, T: Scalar> Deref for Elements<'_, G, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let storage = match &self.source {
            Source::Own(guard) => guard.as_ref(),
            Source::Tensor(guard) => match &**guard {
                Storage::Cpu(storage) => Some(storage),
                _ => None,
            },
            Source::Wide(storage, _) => Some(storage),
        };
        let Some(storage) = storage else {
            return &[];
        };
        &storage
            .as_slice::<T>()
            .expect("the type was checked when borrowed")[self.range.clone()]
    }
}

impl<G> Drop for Source<'_, G> {
    fn drop(&mut self) {
        if let Source::Wide(storage, pool) = self {
            pool.put(std::mem::replace(storage, CpuStorage::F32(Vec::new())));
        }
    }
}

/// Borrows the elements of a value; narrower ones are copied.
pub(super) fn elements<T: Scalar>(
    value: &Value,
) -> Result<Elements<'_, impl Deref<Target = Storage> + '_, T>> {
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
        Elements<'_, impl Deref<Target = Storage> + '_, T>,
        Elements<'_, impl Deref<Target = Storage> + '_, N>,
    >,
> {
    if narrow_pool(value).is_some() {
        return Ok(Kept::Narrow(own_elements(value, Handle::of(value)?)?));
    }
    Ok(Kept::Wide(elements(value)?))
}

/// Borrows elements as they are kept.
pub(super) fn own_elements<'a, T: Scalar>(
    value: &'a Value,
    handle: &'a Handle,
) -> Result<Elements<'a, impl Deref<Target = Storage> + 'a, T>> {
    if handle.dtype() != <T as Element>::DTYPE {
        return Err(foreign(value.ty()));
    }
    let own = handle.root.own();
    let (source, first) = match handle.root.tensor.get() {
        Some(tensor) => {
            let (guard, layout) = tensor.storage_and_layout();
            (Source::Tensor(guard), layout.start_offset())
        }
        None => (Source::Own(own), 0),
    };
    let start = first + handle.start;
    Ok(Elements {
        source,
        range: start..start + value.ty().numel(),
        element: PhantomData,
    })
}

/// The pool for widening the elements of a value, if they are narrower than its type.
fn narrow_pool(value: &Value) -> Option<&Pool> {
    let handle = value.data::<Handle>()?;
    let is_narrow = handle.dtype() != value.ty().dtype;
    handle.root.wide.as_ref().filter(|_| is_narrow)
}

/// Takes the memory of a value that nothing else shares; gives the value back otherwise.
pub(super) fn steal<T: Scalar>(value: Value) -> Result<Vec<T>, Value> {
    let stealable = value.ty().dtype == <T as Element>::DTYPE
        && value.data::<Handle>().is_some_and(|handle| {
            let is_alone = Arc::strong_count(&handle.root) == 1;
            let is_whole = matches!(handle.root.home, Some(Home::Pool(_)));
            is_alone && is_whole && handle.root.tensor.get().is_none()
        });
    if !stealable {
        return Err(value);
    }
    let (ty, data) = value.into_data();
    let handle = match data.downcast::<Handle>().map(Arc::try_unwrap) {
        Ok(Ok(handle)) => handle,
        Ok(Err(shared)) => return Err(Value::new(ty, shared)),
        Err(data) => return Err(Value::new(ty, data)),
    };
    let mut own = handle
        .root
        .own
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    let storage = own.take().expect("no tensor has the elements");
    Ok(T::cpu_storage_data(storage).expect("the type was just checked"))
}

/// An error of candle, at a node.
pub(super) fn at<E: ToString>(node: &str) -> impl Fn(E) -> Error + '_ {
    move |error| Error::backend(node, error.to_string())
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
        Ok(whole.from(offset).into_value(ty.clone()))
    };
    params.iter().zip(offsets).map(value).collect()
}

/// Lays out parameters in one flat tensor. Those of f32 may be kept in bf16, trained ones as copies
/// of f32 masters; `wide` provides memory for reading them in f32, the threads round masters.
pub(super) fn param_store(
    params: &[Param],
    offsets: &[usize],
    len: usize,
    room: (&Pool, &Threads),
) -> Result<ParamStore> {
    let (dtype, kept) = store_types(params)?;
    let zeros = |dtype| flat_zeros(dtype, len);
    let read = zeros(kept)?;
    let flat: Box<dyn Buffer> = if kept != dtype && params.iter().any(|param| param.trainable) {
        let wide = TensorBuffer::new(&zeros(dtype)?).map_err(at("parameters"))?;
        Box::new(with_copy(Box::new(wide), &read, room.1)?)
    } else {
        Box::new(TensorBuffer::new(&read).map_err(at("parameters"))?)
    };
    let views = views(params, offsets, read, room.0)?;
    Ok(ParamStore { flat, views })
}

/// Lays out parameters that are kept in bf16 as copies of masters that lie elsewhere.
pub(super) fn param_copies(
    params: &[Param],
    offsets: &[usize],
    masters: Box<dyn Buffer>,
    (wide, threads): (&Pool, &Threads),
) -> Result<ParamStore> {
    let (dtype, kept) = store_types(params)?;
    if kept == dtype || masters.dtype() != dtype {
        let reason = format!(
            "are of type {dtype} and kept in {kept}: masters of type {} are not for them",
            masters.dtype()
        );
        return Err(Error::backend("parameters", reason));
    }
    let read = flat_zeros(kept, masters.len())?;
    let flat = Box::new(with_copy(masters, &read, threads)?);
    let views = views(params, offsets, read, wide)?;
    Ok(ParamStore { flat, views })
}

fn flat_zeros(dtype: DType, len: usize) -> Result<Tensor> {
    Tensor::zeros(len, dtype.into(), &Device::Cpu).map_err(at("parameters"))
}

/// The parameters that lie at the given offsets of a flat tensor.
fn views(params: &[Param], offsets: &[usize], read: Tensor, wide: &Pool) -> Result<Vec<Value>> {
    let (dtype, kept) = store_types(params)?;
    let len = read.elem_count();
    let wide = (kept != dtype).then(|| wide.clone());
    let whole = Handle::of_tensor(read, kept, wide, None);
    let mut views = Vec::with_capacity(params.len());
    for (param, &offset) in params.iter().zip(offsets) {
        let ty = &param.local;
        let is_same = ty.dtype == dtype && param.kept_dtype() == kept;
        if !is_same || offset + ty.numel() > len {
            return Err(Error::backend(
                &param.name,
                format!("of type {ty} at {offset} does not fit {len} elements of {dtype}"),
            ));
        }
        views.push(whole.from(offset).into_value(ty.clone()));
    }
    Ok(views)
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
            Err(Error::backend(
                "parameters",
                format!(
                    "are of type {dtype}{how}; the candle backend trains in f32 or f64, or in f32 with parameters that \
                     are kept in bf16"
                ),
            ))
        }
    }
}

/// A copy in bf16 of f32 masters, and the threads that round them.
#[derive(Debug)]
struct Rounded {
    copy: TensorBuffer,
    threads: Threads,
}

/// Masters of which `copy`, a tensor in the narrower type, follows each change.
fn with_copy(flat: Box<dyn Buffer>, copy: &Tensor, threads: &Threads) -> Result<Masters<Rounded>> {
    let copy = TensorBuffer::new(copy).map_err(at("parameters"))?;
    let threads = threads.clone();
    Ok(Masters {
        flat,
        copy: Rounded { copy, threads },
    })
}

impl NarrowCopy for Rounded {
    fn renew(&mut self, wide: &[f32], elements: Range<usize>) {
        let Self { copy, threads } = self;
        copy.write(&mut |bytes| {
            let copy = &mut bytemuck::cast_slice_mut(bytes)[elements.clone()];
            narrow(threads, &wide[elements.clone()], copy);
        });
    }
}
