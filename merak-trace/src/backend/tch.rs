//! The libtorch backend: ATen's kernels, on the processor or on a CUDA device.
//!
//! Values are libtorch tensors, which may be strided: a transpose, a split or a reshape is a view
//! of its operand. Operations of the graph map to ATen's fused kernels, forward and backward
//! (attention, layer norm, gelu, softmax, embeddings); an operation without a kernel in libtorch is
//! composed of ATen operations. This crate's own generator draws dropout masks on the host, so all
//! backends have the same masks.
//!
//! | element type | parameters | gradients, statistics of norms, sums |
//! |---|---|---|
//! | `f32`, `f64` | the same | the same |
//! | `bf16`, `f16` | `f32` masters and a 16-bit copy that nodes read; frozen: no masters | `f32` |
//! | `f32` under autocast ([`Tch::with_autocast`]) | `f32`; products read a 16-bit copy | `f32` |
//!
//! Results do not depend on which rank computes them. libtorch does not promise the same bits for
//! different numbers of threads, so runs are compared bit by bit at equal threads. On CUDA
//! devices its deterministic algorithms are on, for the whole process.
//!
//! ```no_run
//! use merak_trace::{Backend, DType, TensorType, backend::tch::{Tch, TchDevice}};
//! let backend = Tch::new(TchDevice::Cpu, 1)?;
//! let ty = TensorType::new([2], DType::F32);
//! let value = backend.from_buffer(&ty, Box::new(vec![1.0_f32, 2.0]))?;
//! assert_eq!(merak_mpu::into_vec::<f32>(backend.into_buffer(value)?)?, [1.0, 2.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod accumulate;
mod attention;
mod autocast;
mod dropout;
mod elementwise;
mod loss;
mod norm;
mod optimizer;
mod parts;
mod products;
mod run;
mod shim;
mod storage;
mod vectors;
mod vocab;

use crate::{
    Backend, Call, Error, GradStore, Param, ParamStore, Result, TensorType, Value,
    kernels::{Threads, Vectors},
    value::MemoryMeter,
};
use merak_mpu::{Buffer, DType, tch::reason_of};
pub use optimizer::{AdamScalars, SgdScalars};
use std::{any::Any, cell::Cell, ops::Range};
use storage::{Handle, TchBuffer, kind_of, shape_of, size_bytes};
use tch::{Cuda, Device, Kind, Tensor};

/// The device that libtorch computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TchDevice {
    /// The processor.
    Cpu,
    /// A CUDA device, by its index; several ranks may share one. The ids of a whole table and
    /// the labels of whole logits are not checked there, which would take waiting for the device.
    /// One that is out of range makes the device unusable: callers check them.
    Cuda(usize),
}

/// Runs nodes on libtorch.
#[derive(Debug)]
pub struct Tch {
    device: Device,
    num_threads: usize,
    /// Draws dropout masks.
    threads: Threads,
    memory: MemoryMeter,
    /// The type of 16 bits in which operations over `f32` compute where autocast says so.
    autocast: Option<Kind>,
    /// Set where this crate's products of bf16 are the fastest.
    vectors: Option<Vectors>,
}

impl Tch {
    /// A backend that computes on a device, with `num_threads` threads per rank on the processor.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when the device does not exist; when the operating system refuses
    /// threads.
    pub fn new(device: TchDevice, num_threads: usize) -> Result<Self> {
        let device = match device {
            TchDevice::Cpu => Device::Cpu,
            TchDevice::Cuda(index) => cuda(index)?,
        };
        shim::pool_memory();
        let threads = Threads::new(num_threads).map_err(|source| Error::Kernel {
            node: "backend".to_owned(),
            source,
        })?;
        Ok(Self {
            device,
            num_threads,
            threads,
            memory: MemoryMeter::default(),
            autocast: None,
            vectors: Vectors::of_processor().filter(|_| device == Device::Cpu),
        })
    }

    /// Number of CUDA devices; 0 where libtorch has no CUDA half or finds no driver.
    pub fn num_cuda_devices() -> usize {
        match shim::load_cuda() {
            Ok(()) => usize::try_from(Cuda::device_count()).unwrap_or(0),
            Err(_) => 0,
        }
    }

    /// The most bytes that tensors of this process took at once on one of the CUDA devices; `None`
    /// where none has lain there.
    pub fn peak_cuda_bytes() -> Option<u64> {
        (0..Self::num_cuda_devices())
            .filter_map(shim::peak_bytes)
            .max()
    }

    /// Whether it computes on the processor, so that buffers lie in host memory.
    pub fn is_cpu(&self) -> bool {
        self.device == Device::Cpu
    }

    /// Sets the number of compute threads for calls from this thread. OpenMP keeps that number for
    /// each calling thread.
    fn enter(&self) {
        thread_local! {
            static NUM_THREADS: Cell<usize> = const { Cell::new(0) };
        }
        if NUM_THREADS.replace(self.num_threads) != self.num_threads {
            tch::set_num_threads(i32::try_from(self.num_threads).unwrap_or(i32::MAX));
        }
    }

    /// A value over memory of its own.
    fn wrap(&self, ty: &TensorType, tensor: Tensor) -> Value {
        let lease = self.memory.lease(size_bytes(&tensor));
        Handle::new(tensor, Some(lease)).into_value(ty.clone())
    }

    /// A tensor on the device from the bytes of its elements.
    fn upload(&self, ty: &TensorType, bytes: &[u8]) -> Result<Tensor> {
        let node = ty.to_string();
        let at = at(&node);
        let host = Tensor::f_from_data_size(bytes, &shape_of(ty), kind_of(ty)?).map_err(&at)?;
        host.f_to_device(self.device).map_err(at)
    }
}

fn cuda(index: usize) -> Result<Device> {
    let absent = |reason| Error::NoDevice {
        device: format!("cuda:{index}"),
        reason,
    };
    shim::load_cuda().map_err(absent)?;
    match Cuda::device_count() {
        count if usize::try_from(count).is_ok_and(|count| index < count) => Ok(Device::Cuda(index)),
        0 => Err(absent("libtorch finds no CUDA device".to_owned())),
        count => Err(absent(format!("libtorch finds {count} CUDA devices"))),
    }
}

/// An error of libtorch, at a node.
fn at(node: &str) -> impl Fn(tch::TchError) -> Error + '_ {
    move |error| Error::backend(node, reason_of(&error))
}

impl Backend for Tch {
    fn name(&self) -> &'static str {
        "tch"
    }

    fn memory(&self) -> &MemoryMeter {
        &self.memory
    }

    fn run(&self, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>> {
        self.enter();
        run::run(self, call, self.operands(call, inputs)?, None)
    }

    fn accumulate(
        &self,
        call: Call<'_>,
        inputs: Vec<Value>,
        store: &mut GradStore,
        slots: &[usize],
    ) -> Result<()> {
        self.enter();
        accumulate::accumulate(self, call, self.operands(call, inputs)?, store, slots)
    }

    fn from_bytes(&self, ty: &TensorType, bytes: &[u8]) -> Result<Value> {
        if bytes.len() != ty.size_bytes() {
            let reason = format!("cannot be made of {} bytes", bytes.len());
            return Err(Error::backend(ty.to_string(), reason));
        }
        Ok(self.wrap(ty, self.upload(ty, bytes)?))
    }

    fn from_buffer(&self, ty: &TensorType, buffer: Box<dyn Buffer>) -> Result<Value> {
        if buffer.dtype() != ty.dtype || buffer.len() != ty.numel() {
            let reason = format!(
                "cannot be made of {} elements of {}",
                buffer.len(),
                buffer.dtype()
            );
            return Err(Error::backend(ty.to_string(), reason));
        }
        let any: &dyn Any = &*buffer;
        let tensor = if let Some(own) = any.downcast_ref::<TchBuffer>() {
            // The buffer is given away, so nothing else writes the memory that the tensor shares
            // with it.
            own.tensor(self.device, ty)?
        } else {
            let mut tensor = None;
            buffer.read(&mut |bytes| tensor = Some(self.upload(ty, bytes)));
            tensor.expect("a buffer calls the closure once")?
        };
        Ok(self.wrap(ty, tensor))
    }

    fn into_buffer(&self, value: Value) -> Result<Box<dyn Buffer>> {
        self.enter();
        Ok(Box::new(TchBuffer::from_value(value)?))
    }

    fn grad_buffer(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(TchBuffer::zeros(dtype, len, self.device)?))
    }

    fn copy_parts(
        &self,
        from: &dyn Buffer,
        parts: &[Range<usize>],
        dtype: DType,
    ) -> Result<Box<dyn Buffer>> {
        self.copied(from, parts, dtype)
    }

    fn put_parts(
        &self,
        values: &dyn Buffer,
        to: &mut dyn Buffer,
        parts: &[Range<usize>],
    ) -> Result<()> {
        self.change_parts(values, to, parts, Tensor::f_copy_)
    }

    fn gather_buffer(
        &self,
        from: &dyn Buffer,
        part: Range<usize>,
        dtype: DType,
        at: usize,
        len: usize,
    ) -> Result<Box<dyn Buffer>> {
        self.placed(from, part, dtype, (at, len))
    }

    fn param_store(&self, params: &[Param], offsets: &[usize], len: usize) -> Result<ParamStore> {
        storage::param_store(self.device, params, offsets, len)
    }

    fn param_copies(
        &self,
        params: &[Param],
        offsets: &[usize],
        masters: Box<dyn Buffer>,
    ) -> Result<ParamStore> {
        storage::param_copies(self.device, params, offsets, masters)
    }

    fn param_values(
        &self,
        params: &[Param],
        offsets: &[usize],
        buffer: Box<dyn Buffer>,
    ) -> Result<Vec<Value>> {
        let ty = TensorType::new([buffer.len()], buffer.dtype());
        storage::param_values(params, offsets, &self.from_buffer(&ty, buffer)?)
    }
}
