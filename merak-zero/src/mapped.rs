//! Numbers in files that are mapped into memory.
#![expect(unsafe_code, reason = "maps files that nothing else has open")]

use crate::{Error, Result};
use memmap2::MmapMut;
use merak_mpu::{Buffer, DType, Memory};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use std::{
    any::Any,
    fs::File,
    io::{self, Read, Write},
    ops::{Deref, DerefMut},
    path::Path,
};

/// `f32` numbers in a file that is mapped into memory: the system writes pages to the disk that
/// memory is short of, and reads them again when they are used.
///
/// The file has no name in its folder, so no other program changes it, and its room is free again
/// when the numbers are dropped or the process ends, however it ends.
///
/// ```
/// use merak_zero::MappedFloats;
/// let mut moments = MappedFloats::zeros(&std::env::temp_dir(), 3)?;
/// moments[1] = 0.5;
/// assert_eq!(moments[..], [0.0, 0.5, 0.0]);
/// # Ok::<(), merak_zero::Error>(())
/// ```
#[derive(Debug)]
pub struct MappedFloats {
    map: MmapMut,
    len: usize,
}

impl MappedFloats {
    /// Zeros in a file of a folder, which is made where it is missing. The room on the disk is
    /// taken at once.
    ///
    /// # Errors
    /// [`Error::StateFile`] when the folder cannot be made or written, or has no room.
    pub fn zeros(folder: &Path, len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(size_of::<f32>());
        let map = reserved(folder, bytes as u64).and_then(|file| {
            // SAFETY: the file has no name, and its only handle is dropped here: nothing else can
            // change or shorten it while it is mapped.
            unsafe { MmapMut::map_mut(&file) }
        });
        let failed = |source| Error::StateFile {
            folder: folder.to_owned(),
            bytes,
            source,
        };
        Ok(Self {
            map: map.map_err(failed)?,
            len,
        })
    }
}

/// A file without a name that has room for some bytes, all zero.
fn reserved(folder: &Path, bytes: u64) -> io::Result<File> {
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::tempfile_in(folder)?;
    // Without room of its own, a page that the disk has no room for would end the process.
    match fallocate(&file, FallocateFlags::empty(), 0, bytes.max(1)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
            io::copy(&mut io::repeat(0).take(bytes.max(1)), &mut file)?;
            file.flush()?;
        }
        outcome => outcome?,
    }
    Ok(file)
}

impl Deref for MappedFloats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        bytemuck::cast_slice(&self.map[..self.len * size_of::<f32>()])
    }
}

impl DerefMut for MappedFloats {
    fn deref_mut(&mut self) -> &mut [f32] {
        let bytes = self.len * size_of::<f32>();
        bytemuck::cast_slice_mut(&mut self.map[..bytes])
    }
}

impl Buffer for MappedFloats {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        f(bytemuck::cast_slice(self));
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        f(bytemuck::cast_slice_mut(self));
    }

    fn memory(&mut self) -> Memory {
        Memory::Host(self.map.as_mut_ptr())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

/// Numbers in memory or in a file.
///
/// A copy lies in memory.
#[derive(Debug)]
pub(crate) enum Floats {
    InMemory(Vec<f32>),
    InFile(MappedFloats),
}

impl Clone for Floats {
    fn clone(&self) -> Self {
        Self::InMemory(self.to_vec())
    }
}

impl PartialEq for Floats {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::InMemory(values) => values,
            Self::InFile(values) => values,
        }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::InMemory(values) => values,
            Self::InFile(values) => values,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_a_file_leave_nothing_in_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("made/here");
        let mut values = MappedFloats::zeros(&place, 5000).unwrap();
        assert!(values.iter().all(|&x| x == 0.0));
        values[4999] = 2.0;
        assert_eq!((values[4998], values[4999]), (0.0, 2.0));
        assert_eq!(place.read_dir().unwrap().count(), 0);
        assert!(MappedFloats::zeros(&place, 0).unwrap().is_empty());
    }

    #[test]
    fn a_folder_that_cannot_be_one_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = MappedFloats::zeros(file.path(), 3).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("12 bytes"), "{text}");
        assert!(text.contains(&file.path().display().to_string()), "{text}");
    }
}
