//! Saving while training goes on.

use crate::error::io_error;
use crate::shard::{self, Piece, Shard, ShardKind};
use crate::{DType, Draft, Kind, Layout, Result};
use std::ops::Range;
use std::thread::{self, JoinHandle};

/// A shard that a thread is writing, from a copy of the tensors.
///
/// Dropping it waits for the thread as well, so that no file appears after the draft is gone.
#[must_use = "the shard's entry is needed to commit the checkpoint"]
#[derive(Debug)]
pub struct PendingShard {
    /// Present until somebody waits.
    writer: Option<JoinHandle<Result<Shard>>>,
}

/// A piece with a copy of its bytes.
struct OwnedPiece {
    kind: Kind,
    name: String,
    dtype: DType,
    layout: Layout,
    range: Option<Range<usize>>,
    bytes: Vec<u8>,
}

impl Draft {
    /// Copies a rank's pieces and returns; a thread writes them as [`Draft::write_shard`] does.
    /// The caller may change its tensors at once, and stalls for the copy only, which takes as
    /// much memory as the pieces.
    ///
    /// A draft may have any number of pending shards; wait for all of them before
    /// [`Draft::commit`] or [`Draft::abandon`].
    ///
    /// # Errors
    /// [`Error::BufferLength`](crate::Error::BufferLength) and
    /// [`Error::InvalidLayout`](crate::Error::InvalidLayout) for pieces that do not fit their
    /// buffers, [`Error::Io`](crate::Error::Io) where no thread can be started. What goes wrong
    /// with the file, [`PendingShard::wait`] returns.
    pub fn write_shard_later(
        &self,
        kind: ShardKind,
        index: usize,
        pieces: &[(Piece<'_>, &[u8])],
    ) -> Result<PendingShard> {
        for (piece, bytes) in pieces {
            piece.check_buffer(bytes.len())?;
        }
        let owned: Vec<_> = pieces.iter().map(OwnedPiece::copy).collect();
        let (folder, file) = (self.path(), kind.file_name(index));
        let path = folder.join(&file);
        let write = move || {
            let pieces: Vec<_> = owned.iter().map(OwnedPiece::lend).collect();
            shard::write(&folder, &file, &pieces)
        };
        let writer = thread::Builder::new()
            .name("merak-ckpt".to_owned())
            .spawn(write)
            .map_err(io_error("start a thread to write", &path))?;
        Ok(PendingShard {
            writer: Some(writer),
        })
    }
}

impl PendingShard {
    /// Whether the file is complete (or has failed), so that [`PendingShard::wait`] does not block.
    pub fn is_finished(&self) -> bool {
        self.writer.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the file is on the disk; returns its entry.
    ///
    /// # Errors
    /// As for [`Draft::write_shard`].
    pub fn wait(mut self) -> Result<Shard> {
        let writer = self.writer.take();
        let outcome = writer.map_or(Ok(Ok(Shard::default())), JoinHandle::join);
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for PendingShard {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take()
            && let Ok(Err(error)) = writer.join()
        {
            tracing::warn!(%error, "a shard that nobody waited for could not be written");
        }
    }
}

impl OwnedPiece {
    fn copy((piece, bytes): &(Piece<'_>, &[u8])) -> Self {
        Self {
            kind: piece.kind.clone(),
            name: piece.name.to_owned(),
            dtype: piece.dtype,
            layout: piece.layout.clone(),
            range: piece.range.clone(),
            bytes: bytes.to_vec(),
        }
    }

    fn lend(&self) -> (Piece<'_>, &[u8]) {
        let piece = Piece {
            kind: &self.kind,
            name: &self.name,
            dtype: self.dtype,
            layout: &self.layout,
            range: self.range.clone(),
        };
        (piece, &self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Checkpoint, Error, Header, Store};

    fn piece(layout: &Layout) -> Piece<'_> {
        Piece {
            kind: &Kind::Parameter,
            name: "w",
            dtype: DType::U8,
            layout,
            range: None,
        }
    }

    #[test]
    fn what_is_saved_is_what_was_there_at_the_call() {
        let folder = tempfile::tempdir().unwrap();
        let draft = Store::new(folder.path()).begin(1).unwrap();
        let layout = Layout::whole(&[1 << 20]);
        let mut weights = vec![1; 1 << 20];
        let pending = draft
            .write_shard_later(ShardKind::Model, 0, &[(piece(&layout), &weights)])
            .unwrap();
        weights.fill(2);
        let shard = pending.wait().unwrap();
        let path = draft.commit(vec![shard], Header::default(), &[]).unwrap();
        let checkpoint = Checkpoint::open(path).unwrap();
        let saved = checkpoint.read_whole(&Kind::Parameter, "w").unwrap();
        assert!(saved.iter().all(|&byte| byte == 1) && weights[0] == 2);
    }

    #[test]
    fn wrong_buffers_fail_at_once_and_the_disk_when_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let draft = Store::new(folder.path()).begin(1).unwrap();
        let layout = Layout::whole(&[4]);
        let later =
            |bytes: &[u8]| draft.write_shard_later(ShardKind::Model, 0, &[(piece(&layout), bytes)]);
        let error = later(&[0; 3]).unwrap_err();
        assert!(matches!(error, Error::BufferLength { .. }), "{error}");
        // Dropped: the file is there all the same when the next statement runs.
        drop(later(&[0; 4]).unwrap());
        assert!(draft.path().join("model-00000.safetensors").exists());
        let error = later(&[0; 4]).unwrap().wait().unwrap_err();
        assert!(
            matches!(
                error,
                Error::Io {
                    action: "create",
                    ..
                }
            ),
            "{error}"
        );
    }
}
