//! The functions of CUDA's driver, and one device.
#![expect(unsafe_code, reason = "calls a C library")]

use super::{
    library::{Loaded, functions},
    raw::text_at,
};
use crate::{Buffer, DType, Error, Memory, Result};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags,
    CUuuid,
};
use std::{
    any::Any,
    ffi::{c_char, c_int, c_uint, c_void},
    fmt, ptr,
    sync::Arc,
};

functions! {
    /// Those of the driver's that this crate calls.
    struct Functions {
        init: cuInit(c_uint),
        error_string: cuGetErrorString(c_int, *mut *const c_char),
        device_count: cuDeviceGetCount(*mut c_int),
        device: cuDeviceGet(*mut CUdevice, c_int),
        uuid: cuDeviceGetUuid_v2(*mut CUuuid, CUdevice),
        name: cuDeviceGetName(*mut c_char, c_int, CUdevice),
        retain: cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice),
        release: cuDevicePrimaryCtxRelease_v2(CUdevice),
        set_context: cuCtxSetCurrent(CUcontext),
        push_context: cuCtxPushCurrent_v2(CUcontext),
        pop_context: cuCtxPopCurrent_v2(*mut CUcontext),
        stream_create: cuStreamCreate(*mut CUstream, c_uint),
        stream_destroy: cuStreamDestroy_v2(CUstream),
        stream_wait: cuStreamWaitEvent(CUstream, CUevent, c_uint),
        event_create: cuEventCreate(*mut CUevent, c_uint),
        event_record: cuEventRecord(CUevent, CUstream),
        event_query: cuEventQuery(CUevent),
        event_destroy: cuEventDestroy_v2(CUevent),
        allocate: cuMemAlloc_v2(*mut CUdeviceptr, usize),
        free: cuMemFree_v2(CUdeviceptr),
        fill: cuMemsetD8_v2(CUdeviceptr, u8, usize),
        to_host: cuMemcpyDtoH_v2(*mut c_void, CUdeviceptr, usize),
        to_device: cuMemcpyHtoD_v2(CUdeviceptr, *const c_void, usize),
    }
}

/// CUDA's driver.
struct Driver(Functions);

impl Driver {
    fn load() -> Result<Self> {
        let names = ["libcuda.so.1", "libcuda.so"];
        let library = Loaded::open("CUDA driver's", None, &names)?;
        let driver = Self(Functions::of(&library)?);
        // SAFETY: the function takes a number that must be 0, and may be called again.
        let code = unsafe { (driver.0.init)(0) };
        driver.check("cuInit", code)?;
        Ok(driver)
    }

    fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the function writes one number there.
        let code = unsafe { (self.0.device_count)(&raw mut count) };
        self.check("cuDeviceGetCount", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == CUresult::CUDA_SUCCESS as c_int {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: the function writes a constant string or null there.
        let _ = unsafe { (self.0.error_string)(code, &raw mut text) };
        let mut reason = text_at(text);
        if reason.is_empty() {
            reason = format!("error {code}");
        }
        Err(Error::Device { call, reason })
    }
}

/// One CUDA device, as programs without a tensor library use it: memory that collectives of this
/// module move.
///
/// Clones are the same device.
///
/// ```no_run
/// use merak_mpu::{DType, nccl::Device};
/// let device = Device::open(0)?;
/// let buffer = device.zeros(DType::F32, 1024)?;
/// # Ok::<(), merak_mpu::Error>(())
/// ```
#[derive(Clone)]
pub struct Device(Arc<Opened>);

struct Opened {
    driver: Driver,
    ordinal: usize,
    handle: CUdevice,
    /// The context that CUDA's runtime, hence every tensor library, uses too.
    context: usize,
    uuid: [u8; 16],
}

/// A queue of work of a device, by its address; 0 is the default one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stream(pub(super) u64);

/// A point in a queue of work, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Event(pub(super) u64);

/// The pointer of an address that a library gave.
pub(super) fn pointer<T>(address: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// The address of what a library keeps.
pub(super) fn address<T>(pointer: *mut T) -> u64 {
    pointer.expose_provenance() as u64
}

impl Device {
    /// Opens a device by its number, as `CUDA_VISIBLE_DEVICES` leaves it.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] where there is no driver, [`Error::Device`] where the driver refuses.
    pub fn open(ordinal: usize) -> Result<Self> {
        let driver = Driver::load()?;
        let count = driver.count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or_else(|| Error::Device {
            call: "cuDeviceGet",
            reason: format!("there is no device {ordinal}: the driver finds {count}"),
        })?;
        let mut handle = 0;
        // SAFETY: the function writes one number there.
        let code = unsafe { (driver.0.device)(&raw mut handle, number) };
        driver.check("cuDeviceGet", code)?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the function fills the bytes of this value.
        let code = unsafe { (driver.0.uuid)(&raw mut uuid, handle) };
        driver.check("cuDeviceGetUuid", code)?;
        let mut context = ptr::null_mut();
        // SAFETY: the function writes one pointer there; `Drop` gives the context back.
        let code = unsafe { (driver.0.retain)(&raw mut context, handle) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Self(Arc::new(Opened {
            driver,
            ordinal,
            handle,
            context: address(context) as usize,
            uuid: uuid.bytes.map(c_char::cast_unsigned),
        })))
    }

    /// How many devices the driver finds.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn count() -> Result<usize> {
        Driver::load()?.count()
    }

    /// The number of the device on this host.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// The identifier of the device: the same in all processes, whose numbers for it may differ.
    pub fn uuid(&self) -> [u8; 16] {
        self.0.uuid
    }

    /// The name of the device, as the driver has it.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn name(&self) -> Result<String> {
        let mut name = [0; 256];
        // SAFETY: the function writes a string that ends with a zero within these 256 bytes.
        let code = unsafe { (self.0.driver.0.name)(name.as_mut_ptr(), 256, self.0.handle) };
        self.check("cuDeviceGetName", code)?;
        Ok(text_at(name.as_ptr()))
    }

    /// A zeroed buffer of `len` elements in the memory of the device.
    ///
    /// # Errors
    /// [`Error::Device`], as when the memory is used up.
    pub fn zeros(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(DeviceMemory::zeros(self, dtype, len)?))
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        self.0.driver.check(call, code)
    }

    fn context(&self) -> CUcontext {
        pointer(self.0.context as u64)
    }

    /// Makes the device the one of the calling thread.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as the device is open.
        let code = unsafe { (self.0.driver.0.set_context)(self.context()) };
        self.check("cuCtxSetCurrent", code)
    }

    /// Calls `f` with the device as the one of the calling thread, whatever that was.
    fn within<T>(&self, f: impl FnOnce(&Functions) -> Result<T>) -> Result<T> {
        // SAFETY: the context lives as long as the device is open.
        let code = unsafe { (self.0.driver.0.push_context)(self.context()) };
        self.check("cuCtxPushCurrent", code)?;
        let result = f(&self.0.driver.0);
        let mut popped = ptr::null_mut();
        // SAFETY: the function writes one pointer there; it takes back what was pushed above.
        let code = unsafe { (self.0.driver.0.pop_context)(&raw mut popped) };
        self.check("cuCtxPopCurrent", code)?;
        result
    }

    /// A queue of work that waits for no other by itself.
    pub(super) fn stream(&self) -> Result<Stream> {
        self.within(|calls| {
            let mut stream = ptr::null_mut();
            let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
            // SAFETY: the function writes one pointer there.
            let code = unsafe { (calls.stream_create)(&raw mut stream, flags) };
            self.check("cuStreamCreate", code)?;
            Ok(Stream(address(stream)))
        })
    }

    pub(super) fn drop_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the stream is one that `stream` made, and its owner drops it once.
        let code = unsafe { (self.0.driver.0.stream_destroy)(pointer(stream.0)) };
        self.check("cuStreamDestroy", code)
    }

    /// The point in a queue after all that was put into it until now.
    pub(super) fn mark(&self, stream: Stream) -> Result<Event> {
        self.within(|calls| {
            let mut event = ptr::null_mut();
            let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
            // SAFETY: the function writes one pointer there.
            let code = unsafe { (calls.event_create)(&raw mut event, flags) };
            self.check("cuEventCreate", code)?;
            let event = Event(address(event));
            // SAFETY: both are alive; the default stream is that of the device, entered above.
            let code = unsafe { (calls.event_record)(pointer(event.0), pointer(stream.0)) };
            if let Err(error) = self.check("cuEventRecord", code) {
                self.drop_event(event);
                return Err(error);
            }
            Ok(event)
        })
    }

    /// Makes what comes later in a queue wait for an event.
    pub(super) fn follow(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: both are alive.
        let code = unsafe { (self.0.driver.0.stream_wait)(pointer(stream.0), pointer(event.0), 0) };
        self.check("cuStreamWaitEvent", code)
    }

    /// Whether the device has come to an event.
    pub(super) fn is_past(&self, event: Event) -> Result<bool> {
        // SAFETY: the event is alive.
        let code = unsafe { (self.0.driver.0.event_query)(pointer(event.0)) };
        if code == CUresult::CUDA_ERROR_NOT_READY as c_int {
            return Ok(false);
        }
        self.check("cuEventQuery", code)?;
        Ok(true)
    }

    pub(super) fn drop_event(&self, event: Event) {
        // SAFETY: the event is one that `mark` made, and it is given up here.
        let code = unsafe { (self.0.driver.0.event_destroy)(pointer(event.0)) };
        // An event that cannot be destroyed belongs to a device that has failed, which others tell.
        if let Err(error) = self.check("cuEventDestroy", code) {
            tracing::debug!(%error, "an event stays");
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {}", self.0.ordinal)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: `open` retained the context once. What it made there is given up by its owners,
        // which hold this device.
        let code = unsafe { (self.driver.0.release)(self.handle) };
        if let Err(error) = self.driver.check("cuDevicePrimaryCtxRelease", code) {
            tracing::debug!(%error, "a device stays open");
        }
    }
}

/// Memory of a device that this crate has allocated.
struct DeviceMemory {
    device: Device,
    address: CUdeviceptr,
    dtype: DType,
    len: usize,
}

impl DeviceMemory {
    fn zeros(device: &Device, dtype: DType, len: usize) -> Result<Self> {
        let bytes = len * dtype.size_bytes();
        let address = device.within(|calls| {
            let mut address = 0;
            // SAFETY: the function writes one address there. It refuses to allocate no bytes.
            let code = unsafe { (calls.allocate)(&raw mut address, bytes.max(1)) };
            device.check("cuMemAlloc", code)?;
            // SAFETY: the memory was allocated just now, and has `bytes` bytes.
            let code = unsafe { (calls.fill)(address, 0, bytes) };
            device.check("cuMemsetD8", code)?;
            Ok(address)
        })?;
        Ok(Self {
            device: device.clone(),
            address,
            dtype,
            len,
        })
    }

    fn size_bytes(&self) -> usize {
        self.len * self.dtype.size_bytes()
    }

    /// The elements in host memory, in words, so that they are aligned for every type.
    fn to_host(&self) -> Result<Vec<u64>> {
        let bytes = self.size_bytes();
        let mut words = vec![0_u64; bytes.div_ceil(size_of::<u64>())];
        self.device.within(|calls| {
            // SAFETY: the source has `bytes` bytes, and the target has room for them.
            let code = unsafe { (calls.to_host)(words.as_mut_ptr().cast(), self.address, bytes) };
            self.device.check("cuMemcpyDtoH", code)
        })?;
        Ok(words)
    }

    fn fill_from(&self, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len(), self.size_bytes(), "all elements come");
        self.device.within(|calls| {
            // SAFETY: the source has these bytes, and the target has as many.
            let code =
                unsafe { (calls.to_device)(self.address, bytes.as_ptr().cast(), bytes.len()) };
            self.device.check("cuMemcpyHtoD", code)
        })
    }
}

impl Buffer for DeviceMemory {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        // A buffer that does not open is an error of the operation that reads it.
        match self.to_host() {
            Ok(words) => f(&bytemuck::cast_slice(&words)[..self.size_bytes()]),
            Err(error) => tracing::error!(%error, "a buffer of a device cannot be read"),
        }
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        let bytes = self.size_bytes();
        let written = self.to_host().and_then(|mut words| {
            f(&mut bytemuck::cast_slice_mut(&mut words)[..bytes]);
            self.fill_from(&bytemuck::cast_slice(&words)[..bytes])
        });
        if let Err(error) = written {
            tracing::error!(%error, "a buffer of a device keeps its old elements");
        }
    }

    fn set_bytes(&mut self, bytes: &[u8]) {
        if let Err(error) = self.fill_from(bytes) {
            tracing::error!(%error, "a buffer of a device keeps its old elements");
        }
    }

    fn lies_on_device(&self) -> bool {
        true
    }

    fn memory(&mut self) -> Memory {
        Memory::Device {
            ordinal: self.device.ordinal(),
            address: self.address,
        }
    }

    fn zeros_like(&self, len: usize) -> Box<dyn Buffer> {
        match Self::zeros(&self.device, self.dtype, len) {
            Ok(buffer) => Box::new(buffer),
            Err(error) => {
                tracing::error!(%error, "a buffer of a device becomes one of the host");
                crate::zeros(self.dtype, len)
            }
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} on {:?}", self.len, self.dtype, self.device)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let freed = self.device.within(|calls| {
            // SAFETY: the memory was allocated by this value, and nothing uses it any more: an
            // engine that does holds the buffer.
            let code = unsafe { (calls.free)(self.address) };
            self.device.check("cuMemFree", code)
        });
        if let Err(error) = freed {
            tracing::debug!(%error, "memory of a device stays");
        }
    }
}
