//! The calls on a real device.
#![expect(unsafe_code, reason = "calls a C library")]

use super::{
    calls::{Calls, Comm, UniqueId},
    cuda::{Device, Event, Stream, address, pointer},
    plan::Step,
    raw::{LEAST, Nccl, is_success},
};
use crate::{Buffer, DType, ReduceOp, Result};
use cudarc::nccl::sys::{ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use std::{
    ffi::{c_char, c_int, c_uint},
    ptr,
};

/// A device, and NCCL's library.
#[derive(Debug)]
pub(super) struct Gpu {
    device: Device,
    nccl: Nccl,
}

impl Gpu {
    pub(super) fn new(device: Device, nccl: Nccl) -> Self {
        Self { device, nccl }
    }
}

/// The settings of a communicator whose calls return at once; all others are the library's.
///
/// The library reads as much of the settings as the version says that wrote them.
fn settings() -> ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    const MAGIC: c_uint = 0xcafe_beef;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: MAGIC,
        version: LEAST.cast_unsigned(),
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: ptr::null(),
        splitShare: UNDEFINED,
    }
}

/// NCCL has every element type of this crate.
fn type_of(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::U8 => ncclDataType_t::ncclUint8,
    }
}

fn op_of(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
    }
}

fn int(rank: usize) -> c_int {
    c_int::try_from(rank).expect("a world has fewer ranks")
}

impl Calls for Gpu {
    fn ordinal(&self) -> usize {
        self.device.ordinal()
    }

    fn uuid(&self) -> [u8; 16] {
        self.device.uuid()
    }

    fn enter(&self) -> Result<()> {
        self.device.enter()
    }

    fn zeros(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>> {
        self.device.zeros(dtype, len)
    }

    fn stream(&self) -> Result<Stream> {
        self.device.stream()
    }

    fn drop_stream(&self, stream: Stream) -> Result<()> {
        self.device.drop_stream(stream)
    }

    fn mark(&self, stream: Stream) -> Result<Event> {
        self.device.mark(stream)
    }

    fn follow(&self, stream: Stream, event: Event) -> Result<()> {
        self.device.follow(stream, event)
    }

    fn is_past(&self, event: Event) -> Result<bool> {
        self.device.is_past(event)
    }

    fn drop_event(&self, event: Event) {
        self.device.drop_event(event);
    }

    fn unique_id(&self) -> Result<UniqueId> {
        let id = self.nccl.unique_id()?;
        Ok(id.internal.map(c_char::cast_unsigned))
    }

    fn init(&self, n: usize, id: &UniqueId, rank: usize) -> Result<Comm> {
        let id = ncclUniqueId {
            internal: id.map(u8::cast_signed),
        };
        let (mut comm, mut settings) = (ptr::null_mut(), settings());
        let (n, rank) = (int(n), int(rank));
        let init = self.nccl.functions.comm_init;
        // SAFETY: the function reads the settings and writes one pointer; the calling thread has
        // entered the device.
        let code = unsafe { init(&raw mut comm, n, id, rank, &raw mut settings) };
        self.nccl.check("ncclCommInitRankConfig", code)?;
        Ok(Comm(address(comm)))
    }

    fn is_settled(&self, comm: Comm) -> Result<bool> {
        let mut state = 0;
        // SAFETY: the communicator is alive, and the function writes one number.
        let code = unsafe { (self.nccl.functions.async_error)(pointer(comm.0), &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", code)?;
        self.nccl.check("a communicator of NCCL", state)?;
        Ok(is_success(state))
    }

    fn group_start(&self) -> Result<()> {
        // SAFETY: the function takes nothing.
        let code = unsafe { (self.nccl.functions.group_start)() };
        self.nccl.check("ncclGroupStart", code)
    }

    fn group_end(&self) -> Result<()> {
        // SAFETY: the function takes nothing.
        let code = unsafe { (self.nccl.functions.group_end)() };
        self.nccl.check("ncclGroupEnd", code)
    }

    fn step(&self, comm: Comm, stream: Stream, dtype: DType, step: Step<u64>) -> Result<()> {
        let (call, code) = self.ask(comm, stream, type_of(dtype), step);
        self.nccl.check(call, code)
    }

    fn finalize(&self, comm: Comm) -> Result<()> {
        // SAFETY: the communicator is alive.
        let code = unsafe { (self.nccl.functions.finalize)(pointer(comm.0)) };
        self.nccl.check("ncclCommFinalize", code)
    }

    fn destroy(&self, comm: Comm) -> Result<()> {
        // SAFETY: the communicator is alive, and its owner gives it up.
        let code = unsafe { (self.nccl.functions.destroy)(pointer(comm.0)) };
        self.nccl.check("ncclCommDestroy", code)
    }

    fn abort(&self, comm: Comm) -> Result<()> {
        // SAFETY: the communicator is alive, and its owner gives it up.
        let code = unsafe { (self.nccl.functions.abort)(pointer(comm.0)) };
        self.nccl.check("ncclCommAbort", code)
    }
}

impl Gpu {
    /// Calls the function of a step, and names it. The memory at the step's addresses is that of
    /// buffers which the caller holds until the queue is past the step.
    fn ask(
        &self,
        comm: Comm,
        stream: Stream,
        ty: ncclDataType_t,
        step: Step<u64>,
    ) -> (&'static str, c_int) {
        let (calls, comm, queue) = (&self.nccl.functions, pointer(comm.0), pointer(stream.0));
        match step.map(pointer) {
            Step::AllReduce { at, len, op } => {
                // SAFETY: `len` elements lie there.
                let code = unsafe { (calls.all_reduce)(at, at, len, ty, op_of(op), comm, queue) };
                ("ncclAllReduce", code)
            }
            Step::ReduceScatter { from, to, len, op } => {
                let call = calls.reduce_scatter;
                // SAFETY: `len` elements for each member lie at `from`, and `len` at `to`.
                let code = unsafe { call(from, to, len, ty, op_of(op), comm, queue) };
                ("ncclReduceScatter", code)
            }
            Step::Reduce {
                from,
                to,
                len,
                op,
                root,
            } => {
                let (call, root) = (calls.reduce, int(root));
                // SAFETY: `len` elements lie at `from`, and on the root at `to`.
                let code = unsafe { call(from, to, len, ty, op_of(op), root, comm, queue) };
                ("ncclReduce", code)
            }
            Step::AllGather { from, to, len } => {
                // SAFETY: `len` elements lie at `from`, and `len` for each member at `to`.
                let code = unsafe { (calls.all_gather)(from, to, len, ty, comm, queue) };
                ("ncclAllGather", code)
            }
            Step::Broadcast {
                from,
                to,
                len,
                root,
            } => {
                // SAFETY: `len` elements lie at `to`, and on the root at `from`.
                let code = unsafe { (calls.broadcast)(from, to, len, ty, int(root), comm, queue) };
                ("ncclBroadcast", code)
            }
            Step::Send { from, len, peer } => {
                // SAFETY: `len` elements lie there.
                let code = unsafe { (calls.send)(from, len, ty, int(peer), comm, queue) };
                ("ncclSend", code)
            }
            Step::Recv { to, len, peer } => {
                // SAFETY: `len` elements lie there.
                let code = unsafe { (calls.recv)(to, len, ty, int(peer), comm, queue) };
                ("ncclRecv", code)
            }
        }
    }
}
