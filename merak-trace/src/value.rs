//! Tensors that exist: a type, a backend's storage, and an account of its bytes.

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
    lease: Option<Arc<Lease>>,
}

impl Value {
    /// Wraps a backend's tensor; `lease` accounts for its bytes, and views share it.
    pub fn new(ty: TensorType, data: Arc<dyn Any + Send + Sync>, lease: Option<Arc<Lease>>) -> Self {
        Self { ty, data, lease }
    }

    /// Shape and element type.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// The backend's tensor, if it is of type `T`.
    pub fn data<T: 'static>(&self) -> Option<&T> {
        self.data.downcast_ref()
    }

    /// The account of the storage's bytes, for views.
    pub fn lease(&self) -> Option<&Arc<Lease>> {
        self.lease.as_ref()
    }

    /// Whether no other value shares the storage, so that it may be overwritten.
    pub fn is_unshared(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| Arc::strong_count(lease) == 1) && Arc::strong_count(&self.data) == 1
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
        Arc::new(Lease { bytes, meter: self.clone() })
    }

    /// Bytes that are alive now.
    pub fn live_bytes(&self) -> usize {
        self.0.live.load(Ordering::Relaxed)
    }

    /// The most bytes that were alive at once.
    pub fn peak_bytes(&self) -> usize {
        self.0.peak.load(Ordering::Relaxed)
    }

    /// Starts a new measurement of the peak.
    pub fn reset_peak(&self) {
        self.0.peak.store(self.live_bytes(), Ordering::Relaxed);
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
