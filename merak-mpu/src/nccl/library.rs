//! Libraries that are loaded when they are needed, and their functions.
#![expect(
    unsafe_code,
    reason = "loads libraries and takes functions out of them"
)]

use crate::{Error, Result};
use libloading::Library;
use std::{ffi::OsStr, mem::ManuallyDrop, path::Path};

/// A library that stays loaded, since its threads may run until the process ends.
#[derive(Debug)]
pub(super) struct Loaded {
    name: &'static str,
    pub(super) path: String,
    library: ManuallyDrop<Library>,
}

impl Loaded {
    /// Loads the library at a path, or else the first of `names` that the system finds.
    pub(super) fn open(name: &'static str, path: Option<&Path>, names: &[&str]) -> Result<Self> {
        let mut tried = Vec::new();
        let files: Vec<&OsStr> = match path {
            Some(path) => vec![path.as_os_str()],
            None => names.iter().map(OsStr::new).collect(),
        };
        for file in files {
            // SAFETY: CUDA's and NCCL's libraries ask nothing of the program that loads them; a
            // file that the user names is code of the user's.
            match unsafe { Library::new(file) } {
                Ok(library) => {
                    return Ok(Self {
                        name,
                        path: file.to_string_lossy().into_owned(),
                        library: ManuallyDrop::new(library),
                    });
                }
                Err(error) => tried.push(said(file, &error)),
            }
        }
        let library = name;
        Err(Error::NoLibrary { library, tried })
    }

    /// A function by its name.
    ///
    /// # Safety
    /// `F` is the type of a pointer to that function.
    pub(super) unsafe fn function<F: Copy>(&self, symbol: &str) -> Result<F> {
        // SAFETY: by this function's contract.
        let found = unsafe { self.library.get::<F>(symbol) };
        match found {
            Ok(function) => Ok(*function),
            Err(_) => Err(self.unfit(format!("it has no function {symbol}"))),
        }
    }

    pub(super) fn unfit(&self, reason: String) -> Error {
        Error::UnfitLibrary {
            library: self.name,
            path: self.path.clone(),
            reason,
        }
    }
}

/// The system's message about a file, with the name of the file.
fn said(file: &OsStr, error: &libloading::Error) -> String {
    let file = file.to_string_lossy();
    let cause =
        std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    if cause.contains(&*file) {
        cause
    } else {
        format!("{file}: {cause}")
    }
}

/// A struct of a library's functions, each of which returns a number that tells of success.
///
/// The numbers stay numbers: a newer library may return one that an enumeration does not have.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        struct $table:ident {
            $($field:ident: $symbol:ident($($argument:ty),* $(,)?),)*
        }
    ) => {
        $(#[$meta])*
        pub(super) struct $table {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> std::ffi::c_int,)*
        }

        impl $table {
            /// Takes the functions out of a library.
            pub(super) fn of(library: &$crate::nccl::library::Loaded) -> $crate::Result<Self> {
                Ok(Self {
                    $(
                        // SAFETY: the type is that of the library's header.
                        $field: unsafe { library.function(stringify!($symbol)) }?,
                    )*
                })
            }
        }
    };
}
pub(super) use functions;
