//! The few calls of MPI that this crate needs, made safe.
//!
//! Every call returns its error ([`MPI_ERRORS_RETURN`](ffi::RSMPI_ERRORS_RETURN)), and all are made
//! by the thread that has started MPI. Counts are those of slots, which are far below 2^31.
#![expect(unsafe_code, reason = "MPI is a library in C")]

use super::lane::Slot;
use crate::Rank;
use mpi_sys as ffi;
use std::{
    ffi::{CStr, c_int, c_void},
    io,
    mem::{self, MaybeUninit},
    ptr,
};

/// The one tag: the order of messages and what they hold say the rest.
const TAG: c_int = 0;

/// Messages of [`ffi`] that this process has to and from all others, after MPI has started.
#[derive(Debug)]
pub(super) struct Library {
    /// A copy of the world's communicator, which no other part of the program uses.
    comm: ffi::MPI_Comm,
    byte: ffi::MPI_Datatype,
    pub(super) rank: Rank,
    pub(super) size: usize,
}

impl Library {
    /// Starts MPI on this thread.
    pub(super) fn start() -> io::Result<Self> {
        let mut flag = 0;
        // SAFETY: MPI allows this call at any time; it writes one number.
        check("MPI_Initialized", unsafe {
            ffi::MPI_Initialized(&raw mut flag)
        })?;
        if flag != 0 {
            return Err(io::Error::other(
                "another part of this program has started MPI",
            ));
        }
        // SAFETY: a constant of the library.
        let asked = unsafe { ffi::RSMPI_THREAD_FUNNELED };
        let mut given = 0;
        let (none, no_list) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: MPI has not been started, and takes no arguments where both pointers are null.
        let started = unsafe { ffi::MPI_Init_thread(none, no_list, asked, &raw mut given) };
        check("MPI_Init_thread", started)?;
        if given < asked {
            return Err(io::Error::other(
                "this MPI library works in a program of one thread alone",
            ));
        }
        // SAFETY: a constant of the library, valid now that it has started.
        let world = unsafe { ffi::RSMPI_COMM_WORLD };
        returns_errors(world)?;
        let mut comm = world;
        // SAFETY: the world's communicator is valid, and every rank makes this call first.
        check("MPI_Comm_dup", unsafe {
            ffi::MPI_Comm_dup(world, &raw mut comm)
        })?;
        returns_errors(comm)?;
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the communicator is valid; one number is written.
        check("MPI_Comm_rank", unsafe {
            ffi::MPI_Comm_rank(comm, &raw mut rank)
        })?;
        // SAFETY: as above.
        check("MPI_Comm_size", unsafe {
            ffi::MPI_Comm_size(comm, &raw mut size)
        })?;
        Ok(Self {
            comm,
            // SAFETY: a constant of the library.
            byte: unsafe { ffi::RSMPI_UINT8_T },
            rank: Rank(usize::try_from(rank).map_err(io::Error::other)?),
            size: usize::try_from(size).map_err(io::Error::other)?,
        })
    }

    /// A number of each rank, by rank.
    pub(super) fn all_gather(&mut self, own: u64) -> io::Result<Vec<u64>> {
        let own = own.to_le_bytes();
        let mut all = vec![[0_u8; 8]; self.size];
        let (from, to) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: 8 bytes are read, and 8 of each rank are written to as many.
        let gathered =
            unsafe { ffi::MPI_Allgather(from, 8, self.byte, to, 8, self.byte, self.comm) };
        check("MPI_Allgather", gathered)?;
        Ok(all.into_iter().map(u64::from_le_bytes).collect())
    }

    /// The bytes of rank 0 on every rank.
    pub(super) fn broadcast(&mut self, mut bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let len = self.all_gather(bytes.len() as u64)?[0];
        bytes.resize(usize::try_from(len).map_err(io::Error::other)?, 0);
        let count = int(bytes.len())?;
        let place = bytes.as_mut_ptr().cast();
        // SAFETY: every rank has room for as many bytes as rank 0 has.
        let sent = unsafe { ffi::MPI_Bcast(place, count, self.byte, 0, self.comm) };
        check("MPI_Bcast", sent)?;
        Ok(bytes)
    }

    /// Sends what a slot holds.
    pub(super) fn send(&mut self, to: Rank, slot: Slot) -> io::Result<Flight> {
        let (count, to) = (int(slot.len)?, int(to.0)?);
        let mut flight = Flight::of(slot);
        let from: *const c_void = flight.slot.bytes[..flight.slot.len].as_ptr().cast();
        let (byte, comm) = (self.byte, self.comm);
        // SAFETY: the flight keeps the bytes in their place, unused, until MPI has sent them.
        let sent =
            unsafe { ffi::MPI_Isend(from, count, byte, to, TAG, comm, &raw mut flight.request) };
        flight.has_begun("MPI_Isend", sent)
    }

    /// The sender and the length of the message that comes next from whomever, if there is one.
    pub(super) fn probe(&mut self) -> io::Result<Option<(Rank, usize)>> {
        let mut flag = 0;
        let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
        // SAFETY: a constant of the library.
        let anyone = unsafe { ffi::RSMPI_ANY_SOURCE };
        let place = status.as_mut_ptr();
        // SAFETY: the communicator is valid; a number and a status are written.
        let probed = unsafe { ffi::MPI_Iprobe(anyone, TAG, self.comm, &raw mut flag, place) };
        check("MPI_Iprobe", probed)?;
        if flag == 0 {
            return Ok(None);
        }
        // SAFETY: a status is numbers alone, and MPI has written this one.
        let status = unsafe { status.assume_init() };
        let mut count = 0;
        // SAFETY: the status is of a message of this type.
        let counted = unsafe { ffi::MPI_Get_count(&raw const status, self.byte, &raw mut count) };
        check("MPI_Get_count", counted)?;
        let from = usize::try_from(status.MPI_SOURCE).map_err(io::Error::other)?;
        let len = usize::try_from(count).map_err(io::Error::other)?;
        Ok(Some((Rank(from), len)))
    }

    /// Receives the message of a probe into a slot.
    pub(super) fn receive(&mut self, from: Rank, len: usize, mut slot: Slot) -> io::Result<Flight> {
        if len > slot.bytes.len() {
            return Err(io::Error::other(format!(
                "it sent {len} bytes at once, and {} at most may come",
                slot.bytes.len()
            )));
        }
        slot.len = len;
        let mut flight = Flight::of(slot);
        let to: *mut c_void = flight.slot.bytes[..len].as_mut_ptr().cast();
        let (byte, comm) = (self.byte, self.comm);
        let (count, from) = (int(len)?, int(from.0)?);
        // SAFETY: the flight keeps the memory in its place, unused, until MPI has filled it.
        let begun =
            unsafe { ffi::MPI_Irecv(to, count, byte, from, TAG, comm, &raw mut flight.request) };
        flight.has_begun("MPI_Irecv", begun)
    }

    /// Ends MPI, when all ranks have come here.
    pub(super) fn finish(mut self) -> io::Result<()> {
        // SAFETY: no message of this copy is under way.
        let freed = unsafe { ffi::MPI_Comm_free(&raw mut self.comm) };
        check("MPI_Comm_free", freed)?;
        // SAFETY: the library is used no more.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

/// A message on its way. What MPI still reads or writes is never freed.
#[derive(Debug)]
pub(super) struct Flight {
    request: ffi::MPI_Request,
    slot: Slot,
    is_over: bool,
}

impl Flight {
    fn of(slot: Slot) -> Self {
        Self {
            // SAFETY: a constant of the library.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
            slot,
            is_over: true,
        }
    }

    fn has_begun(mut self, call: &str, code: c_int) -> io::Result<Self> {
        check(call, code)?;
        self.is_over = false;
        Ok(self)
    }

    /// Whether the message has left or come.
    pub(super) fn is_over(&mut self) -> io::Result<bool> {
        if !self.is_over {
            let mut flag = 0;
            // SAFETY: a constant of the library.
            let no_status = unsafe { ffi::RSMPI_STATUS_IGNORE };
            // SAFETY: the request is one that MPI has given and that is not over.
            let tested = unsafe { ffi::MPI_Test(&raw mut self.request, &raw mut flag, no_status) };
            check("MPI_Test", tested)?;
            self.is_over = flag != 0;
        }
        Ok(self.is_over)
    }

    /// The slot of a message that is over.
    pub(super) fn into_slot(mut self) -> Slot {
        debug_assert!(self.is_over, "MPI still uses the slot");
        mem::take(&mut self.slot)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.is_over {
            mem::forget(mem::take(&mut self.slot));
        }
    }
}

/// A number as MPI takes it.
fn int(number: usize) -> io::Result<c_int> {
    c_int::try_from(number).map_err(io::Error::other)
}

/// Has the calls on a communicator return their errors.
fn returns_errors(comm: ffi::MPI_Comm) -> io::Result<()> {
    // SAFETY: a constant of the library.
    let handler = unsafe { ffi::RSMPI_ERRORS_RETURN };
    // SAFETY: the communicator is valid.
    let set = unsafe { ffi::MPI_Comm_set_errhandler(comm, handler) };
    check("MPI_Comm_set_errhandler", set)
}

/// The error of a call that did not succeed.
fn check(call: &str, code: c_int) -> io::Result<()> {
    if code.cast_unsigned() == ffi::MPI_SUCCESS {
        return Ok(());
    }
    let mut text = [0; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: there is room for the longest text of the library.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut len) };
    if told.cast_unsigned() != ffi::MPI_SUCCESS {
        return Err(io::Error::other(format!("{call} failed with code {code}")));
    }
    // SAFETY: the library ends its text with a zero, within the room that it has.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    let text = text.to_string_lossy();
    Err(io::Error::other(format!("{call} failed: {text}")))
}
