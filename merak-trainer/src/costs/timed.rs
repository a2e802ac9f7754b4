//! A backend that notes how long each kind of node takes.

use super::calls::signature;
use crate::metrics::median;
use merak_mpu::{Buffer, DType};
use merak_trace::{
    Backend, Call, GradStore, MemoryMeter, Param, ParamStore, Result, SharedBackend, TensorType,
    Value,
};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// Another backend, and the seconds of all calls by the signature of their nodes.
#[derive(Debug)]
pub(super) struct Timed {
    inner: SharedBackend,
    times: Mutex<BTreeMap<String, Vec<f64>>>,
}

impl Timed {
    pub(super) fn new(inner: SharedBackend) -> Self {
        Self {
            inner,
            times: Mutex::default(),
        }
    }

    /// Forgets what was noted.
    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    /// The median time of each kind of node.
    pub(super) fn medians(&self) -> BTreeMap<String, f64> {
        let times = self.lock().clone().into_iter();
        times.map(|(node, times)| (node, median(times))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Vec<f64>>> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timed<T>(
        &self,
        call: Call<'_>,
        inputs: Vec<Value>,
        run: impl FnOnce(Vec<Value>) -> Result<T>,
    ) -> Result<T> {
        let signature = signature(call.op, inputs.iter().map(Value::ty), call.results.iter());
        let start = Instant::now();
        let result = run(inputs)?;
        let seconds = start.elapsed().as_secs_f64();
        self.lock().entry(signature).or_default().push(seconds);
        Ok(result)
    }
}

impl Backend for Timed {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn memory(&self) -> &MemoryMeter {
        self.inner.memory()
    }

    fn run(&self, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>> {
        self.timed(call, inputs, |inputs| self.inner.run(call, inputs))
    }

    fn accumulate(
        &self,
        call: Call<'_>,
        inputs: Vec<Value>,
        store: &mut GradStore,
        slots: &[usize],
    ) -> Result<()> {
        self.timed(call, inputs, |inputs| {
            self.inner.accumulate(call, inputs, store, slots)
        })
    }

    fn from_bytes(&self, ty: &TensorType, bytes: &[u8]) -> Result<Value> {
        self.inner.from_bytes(ty, bytes)
    }

    fn from_buffer(&self, ty: &TensorType, buffer: Box<dyn Buffer>) -> Result<Value> {
        self.inner.from_buffer(ty, buffer)
    }

    fn into_buffer(&self, value: Value) -> Result<Box<dyn Buffer>> {
        self.inner.into_buffer(value)
    }

    fn grad_buffer(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>> {
        self.inner.grad_buffer(dtype, len)
    }

    fn bucket_buffer(&self, len: usize) -> Result<Box<dyn Buffer>> {
        self.inner.bucket_buffer(len)
    }

    fn free_buckets(&self) {
        self.inner.free_buckets();
    }

    fn copy_parts(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
        dtype: DType,
    ) -> Result<Box<dyn Buffer>> {
        self.inner.copy_parts(from, parts, dtype)
    }

    fn gather_buffer(
        &self,
        from: &dyn Buffer,
        part: Range<usize>,
        dtype: DType,
        at: usize,
        len: usize,
    ) -> Result<Box<dyn Buffer>> {
        self.inner.gather_buffer(from, part, dtype, at, len)
    }

    fn put_parts(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<()> {
        self.inner.put_parts(values, to, parts)
    }

    fn param_store(&self, params: &[Param], offsets: &[usize], len: usize) -> Result<ParamStore> {
        self.inner.param_store(params, offsets, len)
    }

    fn param_copies(
        &self,
        params: &[Param],
        offsets: &[usize],
        masters: Box<dyn Buffer>,
    ) -> Result<ParamStore> {
        self.inner.param_copies(params, offsets, masters)
    }

    fn param_values(
        &self,
        params: &[Param],
        offsets: &[usize],
        buffer: Box<dyn Buffer>,
    ) -> Result<Vec<Value>> {
        self.inner.param_values(params, offsets, buffer)
    }
}
