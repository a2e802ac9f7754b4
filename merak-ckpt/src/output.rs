//! Files that are written from beginning to end and synced.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Bytes after which those written are sent on to the disk.
const STEP_BYTES: u64 = 8 << 20;
/// Bytes before the end of what was written that may still be on their way.
const TRAIL_BYTES: u64 = 4 * STEP_BYTES;

/// A new file that goes to the disk while it is written, and leaves the page cache on the way.
///
/// The disk then works while the next bytes are made, and the page cache takes 32 MiB or so instead
/// of the size of the file: memory that was not in use before costs more than the copy, and what
/// others have in the page cache stays there. A file of less than 8 MiB stays in the page cache.
#[derive(Debug)]
pub(crate) struct OutputFile {
    file: File,
    written: u64,
    /// How many of these bytes were sent on.
    sent: u64,
}

impl OutputFile {
    /// Makes the file, which must not exist.
    pub(crate) fn create_new(path: &Path) -> io::Result<Self> {
        Ok(Self {
            file: File::create_new(path)?,
            written: 0,
            sent: 0,
        })
    }

    /// Brings all bytes to the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()?;
        if self.sent > 0 {
            release(&self.file, 0);
        }
        Ok(())
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self
            .file
            .write(&bytes[..bytes.len().min(STEP_BYTES as usize)])?;
        self.written += n as u64;
        if self.written - self.sent >= STEP_BYTES {
            release(&self.file, self.written.saturating_sub(TRAIL_BYTES));
            self.sent = self.written;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Sends the bytes from `begin` on to the disk without waiting for it, and lets go of those that
/// have arrived.
#[cfg(target_os = "linux")]
fn release(file: &File, begin: u64) {
    // A file system without such advice keeps the bytes, which is correct too.
    let _ = rustix::fs::fadvise(file, begin, None, rustix::fs::Advice::DontNeed);
}

/// The system decides when bytes go to the disk.
#[cfg(not(target_os = "linux"))]
fn release(_file: &File, _begin: u64) {}
