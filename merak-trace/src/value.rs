//! Tensors with storage: a type, a backend's tensor, and an account of its bytes.

use crate::TensorType;
use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A tensor held by a backend. Cloning shares the storage.
#[derive(Clone)]
pub struct Value {
    ty: TensorType,
    data: Arc<dyn Any + Send + Sync>,
}

impl Value {
    /// Wraps a backend's tensor of the given type.
    pub fn new(ty: TensorType, data: Arc<dyn Any + Send + Sync>) -> Self {
        Self { ty, data }
    }

    /// Shape and element type.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// The backend's tensor, if it is of type `T`.
    pub fn data<T: 'static>(&self) -> Option<&T> {
        self.data.downcast_ref()
    }

    /// Takes the value apart.
    pub fn into_data(self) -> (TensorType, Arc<dyn Any + Send + Sync>) {
        (self.ty, self.data)
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Value({})", self.ty)
    }
}

/// Counts the bytes of activations that are alive, and their peak.
#[derive(Debug, Clone, Default)]
pub struct MemoryMeter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl MemoryMeter {
    /// Opens an account of `bytes` that closes when the lease is dropped.
    pub fn lease(&self, bytes: usize) -> Arc<Lease> {
        let live = self.0.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.peak.fetch_max(live, Ordering::Relaxed);
        Arc::new(Lease {
            bytes,
            meter: self.clone(),
        })
    }

    /// Bytes that are alive now.
    pub fn live_bytes(&self) -> usize {
        self.0.live.load(Ordering::Relaxed)
    }

    /// The most bytes that were alive at once.
    pub fn peak_bytes(&self) -> usize {
        self.0.peak.load(Ordering::Relaxed)
    }
}

/// The account of one allocation.
#[derive(Debug)]
pub struct Lease {
    bytes: usize,
    meter: MemoryMeter,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.meter.0.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
