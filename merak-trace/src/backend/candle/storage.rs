//! candle tensors as values: access to their elements, reuse of their memory, and flat parameters.

use super::pool::Pool;
use crate::{Error, Param, ParamStore, Result, TensorType, Value, kernels::widen, value::Lease};
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Storage, Tensor, WithDType};
use half::bf16;
use merak_mpu::{Buffer, DType, Element};
use std::{
    any::Any,
    marker::PhantomData,
    ops::{Deref, Range},
    sync::{Arc, Mutex, PoisonError},
};

/// An element type of both candle and this crate.
pub(super) trait Scalar: Element + WithDType {}
impl<T: Element + WithDType> Scalar for T {}

/// The candle name of an element type.
pub(super) fn candle_dtype(dtype: DType) -> candle_core::DType {
    match dtype {
        DType::F64 => candle_core::DType::F64,
        DType::F32 => candle_core::DType::F32,
        DType::BF16 => candle_core::DType::BF16,
        DType::F16 => candle_core::DType::F16,
        DType::I64 => candle_core::DType::I64,
        DType::U32 => candle_core::DType::U32,
        DType::U8 => candle_core::DType::U8,
    }
}

/// A value of this backend: a contiguous tensor, and the allocation that it is a view of.
///
/// The tensor's elements may be narrower than the value's type: in a frozen parameter that is kept
/// in bf16, and in results that only move such elements. Readers get them [widened](elements).
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
    _lease: Option<Arc<Lease>>,
}

impl Drop for Root {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.put(take_storage(&self.tensor));
        }
    }
}

/// Takes the storage of a tensor that is not read again.
fn take_storage(tensor: &Tensor) -> CpuStorage {
    struct Take(Mutex<CpuStorage>);
    impl InplaceOp1 for Take {
        fn name(&self) -> &'static str {
            "take"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
            std::mem::swap(
                storage,
                &mut self.0.lock().unwrap_or_else(PoisonError::into_inner),
            );
            Ok(())
        }
    }
    let take = Take(Mutex::new(CpuStorage::F32(Vec::new())));
    // A tensor of the CPU always accepts an operation for the CPU; if not, its memory is simply
    // freed.
    let _ = tensor.inplace_op1(&take);
    take.0.into_inner().unwrap_or_else(PoisonError::into_inner)
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
    if handle.tensor.dtype() != candle_dtype(<T as Element>::DTYPE) {
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
    let is_narrow = handle.tensor.dtype() != candle_dtype(value.ty().dtype);
    handle.root.wide.as_ref().filter(|_| is_narrow)
}

/// Takes the memory of a value that nothing else shares; gives the value back otherwise.
pub(super) fn steal<T: Scalar>(value: Value) -> Result<Vec<T>, Value> {
    let stealable = value.ty().dtype == <T as Element>::DTYPE
        && value.data::<Handle>().is_some_and(|handle| {
            Arc::strong_count(&handle.root) == 1 && handle.root.pool.is_some()
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
pub(super) fn at(node: &str) -> impl Fn(candle_core::Error) -> Error + '_ {
    move |error| Error::Backend {
        node: node.to_owned(),
        reason: error.to_string(),
    }
}

/// The flat memory of parameters; its views are parameters.
#[derive(Debug)]
struct FlatParams {
    tensor: Tensor,
    dtype: DType,
}

impl Buffer for FlatParams {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.tensor.elem_count()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        let (guard, _) = self.tensor.storage_and_layout();
        match &*guard {
            Storage::Cpu(CpuStorage::F32(data)) => f(bytemuck::cast_slice(data)),
            Storage::Cpu(CpuStorage::F64(data)) => f(bytemuck::cast_slice(data)),
            Storage::Cpu(CpuStorage::BF16(data)) => f(bytemuck::cast_slice(data)),
            _ => f(&[]),
        }
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        type Writer<'a> = &'a mut dyn FnMut(&mut [u8]);
        struct Write<'a>(Mutex<Writer<'a>>);
        impl InplaceOp1 for Write<'_> {
            fn name(&self) -> &'static str {
                "write"
            }
            fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
                let mut f = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                match storage {
                    CpuStorage::F32(data) => f(bytemuck::cast_slice_mut(data)),
                    CpuStorage::F64(data) => f(bytemuck::cast_slice_mut(data)),
                    CpuStorage::BF16(data) => f(bytemuck::cast_slice_mut(data)),
                    _ => f(&mut []),
                }
                Ok(())
            }
        }
        self.tensor
            .inplace_op1(&Write(Mutex::new(f)))
            .expect("flat parameters lie in memory of the CPU");
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

/// Lays out parameters in one flat tensor. Frozen ones of f32 may be kept in bf16; `wide` provides
/// memory for reading them in f32.
pub(super) fn param_store(
    params: &[Param],
    offsets: &[usize],
    len: usize,
    wide: &Pool,
) -> Result<ParamStore> {
    let (dtype, kept) = params.first().map_or((DType::F32, DType::F32), |param| {
        (param.local.dtype, param.kept_dtype())
    });
    let refuse = |name: &str, reason: String| Error::Backend {
        node: name.to_owned(),
        reason,
    };
    let is_frozen = params.iter().all(|param| !param.trainable);
    let is_known = match (dtype, kept) {
        (DType::F32 | DType::F64, kept) if kept == dtype => true,
        (DType::F32, DType::BF16) => is_frozen,
        _ => false,
    };
    if !is_known {
        let how = if kept == dtype {
            String::new()
        } else {
            format!(", kept in {kept}")
        };
        return Err(refuse(
            "parameters",
            format!(
                "are of type {dtype}{how}; the candle backend trains in f32 or f64, beside frozen parameters of f32 \
                 that are kept in bf16"
            ),
        ));
    }
    let flat = Tensor::zeros(len, candle_dtype(kept), &Device::Cpu).map_err(at("parameters"))?;
    let whole = if kept == dtype {
        Handle::new(flat.clone(), None, None)
    } else {
        Handle::narrow(flat.clone(), wide.clone(), None)
    };
    let mut views = Vec::with_capacity(params.len());
    for (param, &offset) in params.iter().zip(offsets) {
        let ty = &param.local;
        let is_same = ty.dtype == dtype && param.kept_dtype() == kept;
        if !is_same || offset + ty.numel() > len {
            return Err(refuse(
                &param.name,
                format!("of type {ty} at {offset} does not fit {len} elements of {dtype}"),
            ));
        }
        let view = flat
            .narrow(0, offset, ty.numel())
            .and_then(|view| view.reshape(ty.shape.as_slice()));
        views.push(
            whole
                .view(view.map_err(at(&param.name))?)
                .into_value(ty.clone()),
        );
    }
    Ok(ParamStore {
        flat: Box::new(FlatParams {
            tensor: flat,
            dtype: kept,
        }),
        views,
    })
}
