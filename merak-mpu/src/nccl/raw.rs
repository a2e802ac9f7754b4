//! The functions of NCCL's library.
#![expect(unsafe_code, reason = "calls a C library")]

use super::library::{Loaded, functions};
use crate::{Error, Result};
use cudarc::nccl::sys::{
    cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt,
    path::Path,
    ptr,
};

/// The names under which the library is installed.
pub(super) const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The first version with every function and setting that this crate uses: 2.18.
pub(super) const LEAST: c_int = 21_800;

functions! {
    /// Those that the engine calls.
    struct Functions {
        get_unique_id: ncclGetUniqueId(*mut ncclUniqueId),
        comm_init: ncclCommInitRankConfig(
            *mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t,
        ),
        async_error: ncclCommGetAsyncError(ncclComm_t, *mut c_int),
        finalize: ncclCommFinalize(ncclComm_t),
        destroy: ncclCommDestroy(ncclComm_t),
        abort: ncclCommAbort(ncclComm_t),
        group_start: ncclGroupStart(),
        group_end: ncclGroupEnd(),
        all_reduce: ncclAllReduce(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t,
            cudaStream_t,
        ),
        reduce_scatter: ncclReduceScatter(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t,
            cudaStream_t,
        ),
        reduce: ncclReduce(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t,
            cudaStream_t,
        ),
        all_gather: ncclAllGather(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t,
        ),
        broadcast: ncclBroadcast(
            *const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t,
        ),
        send: ncclSend(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t),
        recv: ncclRecv(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t),
    }
}

type TellError = unsafe extern "C" fn(c_int) -> *const c_char;
type TellLast = unsafe extern "C" fn(ncclComm_t) -> *const c_char;

/// NCCL's library.
pub(super) struct Nccl {
    pub(super) functions: Functions,
    error_string: TellError,
    last_error: TellLast,
    /// As `21802` for 2.18.2.
    pub(super) version: c_int,
    pub(super) path: String,
}

impl Nccl {
    /// Loads the library at a path, or else where the system finds it.
    pub(super) fn load(path: Option<&Path>) -> Result<Self> {
        let library = Loaded::open("NCCL", path, &NAMES)?;
        let mut version = 0;
        // SAFETY: this type is that of NCCL's header.
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_int =
            unsafe { library.function("ncclGetVersion") }?;
        // SAFETY: the function writes one number there.
        let _ = unsafe { get_version(&raw mut version) };
        // Before 2.9 a version was written with three digits after the first: 2804.
        if version < LEAST {
            return Err(library.unfit(format!(
                "its version is {}, and at least {} is needed",
                dotted(version),
                dotted(LEAST)
            )));
        }
        Ok(Self {
            functions: Functions::of(&library)?,
            // SAFETY: this type is that of NCCL's header.
            error_string: unsafe { library.function("ncclGetErrorString") }?,
            // SAFETY: this type is that of NCCL's header.
            last_error: unsafe { library.function("ncclGetLastError") }?,
            version,
            path: library.path,
        })
    }

    /// A number that no other group has.
    pub(super) fn unique_id(&self) -> Result<ncclUniqueId> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the function fills the bytes of this value.
        let code = unsafe { (self.functions.get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// The error of a call; a call that goes on by itself has none yet.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if is_success(code) || is_in_progress(code) {
            return Ok(());
        }
        // SAFETY: the function takes any number, and returns a constant string.
        let text = unsafe { (self.error_string)(code) };
        // SAFETY: a null communicator asks for this thread's last message, a string of its own.
        let last = unsafe { (self.last_error)(ptr::null_mut()) };
        let (text, last) = (text_at(text), text_at(last));
        let last = last.trim();
        let reason = if last.is_empty() || last == text {
            text
        } else {
            format!("{text}: {last}")
        };
        Err(Error::Device { call, reason })
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} of {}", dotted(self.version), self.path)
    }
}

pub(super) fn is_success(code: c_int) -> bool {
    code == ncclResult_t::ncclSuccess as c_int
}

pub(super) fn is_in_progress(code: c_int) -> bool {
    code == ncclResult_t::ncclInProgress as c_int
}

/// A version as people write it.
pub(super) fn dotted(version: c_int) -> String {
    // Versions before 2.9 have one digit for the middle number.
    let unit = if version < 10_000 { 10 } else { 100 };
    let (major, minor) = (version / (unit * 100), version / 100 % unit);
    format!("{major}.{minor}.{}", version % 100)
}

/// A string of a library, which it keeps.
pub(super) fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the libraries return null, or strings that live on and end with a zero.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_tried_in_their_order_and_the_first_that_is_there_counts() {
        assert_eq!(NAMES, ["libnccl.so.2", "libnccl.so"]);
        let missing = ["libnone-of-ours.so.2", "libnone-of-ours.so"];
        let Err(Error::NoLibrary { library, tried }) = Loaded::open("NCCL", None, &missing) else {
            unreachable!("no system has libraries of these names");
        };
        assert_eq!((library, tried.len()), ("NCCL", 2));
        for (said, name) in tried.iter().zip(missing) {
            assert!(said.starts_with(&format!("{name}: ")), "{said}");
        }
        let found = Loaded::open("libc", None, &[missing[0], "libc.so.6", "libm.so.6"]).unwrap();
        assert_eq!(found.path, "libc.so.6");
        // A path that is given is the only one that is tried.
        let given = Loaded::open("libc", Some(missing[1].as_ref()), &["libc.so.6"]);
        assert!(matches!(given, Err(Error::NoLibrary { tried, .. }) if tried.len() == 1));
    }

    #[test]
    fn versions_are_written_with_points() {
        assert_eq!(dotted(2804), "2.8.4");
        assert_eq!(dotted(LEAST), "2.18.0");
        assert_eq!(dotted(23_203), "2.32.3");
    }
}
