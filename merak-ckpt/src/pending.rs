//! Saving while training goes on.

use crate::error::{WithCauses, io_error};
use crate::shard::{self, Shard, ShardKind};
use crate::{Draft, OwnedPiece, Piece, Result};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

/// A shard that a thread is writing, from a copy of the tensors.
///
/// Dropping it waits for the thread as well, so that no file appears after the draft is gone.
#[must_use = "the shard's entry is needed to commit the checkpoint"]
#[derive(Debug)]
pub struct PendingShard {
    /// Present until [`PendingShard::wait`] takes it.
    writer: Option<JoinHandle<Result<Shard>>>,
    /// Set once the copy is made.
    copied: Arc<OnceLock<()>>,
}

/// Dropping it, also by a panic, says that the copy is made.
struct Copying(Arc<OnceLock<()>>);

impl Drop for Copying {
    fn drop(&mut self) {
        // It is set only here.
        let _ = self.0.set(());
    }
}

/// A callback that is shown the pieces of a shard, each with its bytes.
pub type Look<'a> = dyn FnMut(&[(Piece<'_>, &[u8])]) + 'a;

/// Memory for the copy of a shard, kept for the next one: getting fresh memory from the operating
/// system takes longer than copying.
///
/// Clones share the memory, so one serves one shard at a time.
#[derive(Debug, Clone, Default)]
pub struct Staging(Arc<Mutex<Vec<u8>>>);

impl Draft {
    /// Writes a rank's pieces as [`Draft::write_shard`] does, on a thread of its own, from a copy
    /// that the thread makes in `staging`. Returns as soon as the pieces are in sight, so that the
    /// caller stalls for neither the disk nor the copy, which takes as much memory as the pieces.
    ///
    /// `source` runs on the thread and shows the pieces once. What it shows must not change until
    /// the call that it makes returns: it holds a lock, say, that every change of the tensors takes
    /// first, or values that are copied on change (`Arc::make_mut`).
    ///
    /// A draft may have any number of pending shards; wait for all of them before
    /// [`Draft::commit`] or [`Draft::abandon`].
    ///
    /// # Errors
    /// [`Error::BufferLength`](crate::Error::BufferLength) and
    /// [`Error::InvalidLayout`](crate::Error::InvalidLayout) for pieces that do not fit their
    /// buffers, [`Error::Io`](crate::Error::Io) where no thread can be started.
    /// [`PendingShard::wait`] returns the errors of the file.
    ///
    /// # Examples
    /// ```
    /// use merak_ckpt::{
    ///     Checkpoint, DType, Header, Kind, Layout, Piece, ShardKind, Staging, Store,
    /// };
    /// use std::sync::{Arc, RwLock};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let folder = tempfile::tempdir()?;
    /// let draft = Store::new(folder.path()).begin(1)?;
    /// let weights = Arc::new(RwLock::new(vec![1_u8; 4]));
    /// let shared = Arc::clone(&weights);
    /// let staging = Staging::default();
    /// let pending = draft.write_shard_later(ShardKind::Model, 0, &staging, move |look| {
    ///     let weights = shared.read().expect("nobody panicked");
    ///     let layout = Layout::whole(&[4]);
    ///     look(&[(Piece::parameter("w", DType::U8, &layout), &weights)]);
    /// })?;
    /// // Waits for the copy, not for the disk.
    /// weights.write().expect("nobody panicked").fill(2);
    /// let path = draft.commit(vec![pending.wait()?], Header::default(), &[])?;
    /// assert_eq!(Checkpoint::open(path)?.read_whole(&Kind::Parameter, "w")?, [1; 4]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn write_shard_later(
        &self,
        kind: ShardKind,
        index: usize,
        staging: &Staging,
        source: impl FnOnce(&mut Look<'_>) + Send + 'static,
    ) -> Result<PendingShard> {
        let (folder, file) = (self.path(), kind.file_name(index));
        let path = folder.join(&file);
        let (shown, in_sight) = mpsc::sync_channel(1);
        let copied = Arc::new(OnceLock::new());
        let (copying, staging) = (Copying(Arc::clone(&copied)), staging.clone());
        let write = move || {
            let (mut own, mut ends) = (Vec::new(), Vec::new());
            // The content that an earlier thread left there does not matter.
            let mut memory = staging.0.lock().unwrap_or_else(PoisonError::into_inner);
            memory.clear();
            source(&mut |pieces| {
                let checked = pieces
                    .iter()
                    .try_for_each(|(piece, bytes)| piece.check_buffer(bytes.len()));
                let is_sound = checked.is_ok();
                // Only the caller receives; if it is gone, the copy is made nevertheless.
                let _ = shown.send(checked);
                if is_sound {
                    memory.reserve_exact(pieces.iter().map(|(_, bytes)| bytes.len()).sum());
                    for (piece, bytes) in pieces {
                        memory.extend_from_slice(bytes);
                        own.push(OwnedPiece::from(piece));
                        ends.push(memory.len());
                    }
                }
            });
            drop((shown, copying));
            let mut begin = 0;
            let lent = own.iter().zip(ends).map(|(own, end)| {
                let bytes = &memory[begin..end];
                begin = end;
                (own.piece(), bytes)
            });
            shard::write(&folder, &file, &lent.collect::<Vec<_>>())
        };
        let writer = thread::Builder::new()
            .name("merak-ckpt".to_owned())
            .spawn(write)
            .map_err(io_error("start a thread to write", &path))?;
        let pending = PendingShard {
            writer: Some(writer),
            copied,
        };
        // A source that shows nothing, or panics, has nothing to wait for.
        in_sight.recv().unwrap_or(Ok(())).map(|()| pending)
    }
}

impl PendingShard {
    /// Waits until the copy is made, which is before the file is written.
    pub fn wait_copied(&self) {
        self.copied.wait();
    }

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
            tracing::warn!(error = %WithCauses(&error), "a shard that nobody waited for could not be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Checkpoint, DType, Error, Header, Kind, Layout, Store};
    use std::sync::{Arc, RwLock};

    fn piece(layout: &Layout) -> Piece<'_> {
        Piece::parameter("w", DType::U8, layout)
    }

    /// Shows one buffer as the tensor `w`.
    fn shows(layout: &Layout, bytes: Vec<u8>) -> impl FnOnce(&mut Look<'_>) + Send + 'static {
        let layout = layout.clone();
        move |look| look(&[(piece(&layout), &bytes)])
    }

    #[test]
    fn what_is_saved_is_what_was_there_at_the_call() {
        let folder = tempfile::tempdir().unwrap();
        let draft = Store::new(folder.path()).begin(1).unwrap();
        let layout = Layout::whole(&[1 << 20]);
        let weights = Arc::new(RwLock::new(vec![1_u8; 1 << 20]));
        let (shared, own_layout) = (Arc::clone(&weights), layout.clone());
        let pending = draft
            .write_shard_later(ShardKind::Model, 0, &Staging::default(), move |look| {
                look(&[(piece(&own_layout), &shared.read().unwrap())]);
            })
            .unwrap();
        weights.write().unwrap().fill(2);
        pending.wait_copied();
        assert_eq!(Arc::strong_count(&weights), 1);
        let shard = pending.wait().unwrap();
        let path = draft.commit(vec![shard], Header::default(), &[]).unwrap();
        let checkpoint = Checkpoint::open(path).unwrap();
        let saved = checkpoint.read_whole(&Kind::Parameter, "w").unwrap();
        assert!(saved.iter().all(|&byte| byte == 1));
    }

    #[test]
    fn wrong_buffers_fail_at_once_and_the_disk_when_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let draft = Store::new(folder.path()).begin(1).unwrap();
        let layout = Layout::whole(&[4]);
        let staging = Staging::default();
        let later = |bytes: Vec<u8>| {
            draft.write_shard_later(ShardKind::Model, 0, &staging, shows(&layout, bytes))
        };
        let error = later(vec![0; 3]).unwrap_err();
        assert!(matches!(error, Error::BufferLength { .. }), "{error}");
        // Dropped: the file is there nevertheless when the next statement runs.
        drop(later(vec![0; 4]).unwrap());
        assert!(draft.path().join("model-00000.safetensors").exists());
        let error = later(vec![0; 4]).unwrap().wait().unwrap_err();
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

    #[test]
    fn a_source_that_shows_nothing_writes_nothing_and_its_panic_reaches_who_waits() {
        let folder = tempfile::tempdir().unwrap();
        let draft = Store::new(folder.path()).begin(1).unwrap();
        let staging = Staging::default();
        let nothing = draft.write_shard_later(ShardKind::Model, 0, &staging, |_| ());
        assert_eq!(nothing.unwrap().wait().unwrap(), Shard::default());
        let panics = |_: &mut Look<'_>| panic!("no tensors");
        let pending = draft.write_shard_later(ShardKind::Model, 0, &staging, panics);
        let pending = pending.unwrap();
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pending.wait()));
        assert!(waited.is_err());
        // The memory serves again.
        let again = shows(&Layout::whole(&[4]), vec![7; 4]);
        let again = draft.write_shard_later(ShardKind::Model, 0, &staging, again);
        assert_eq!(again.unwrap().wait().unwrap().tensors.len(), 1);
    }
}
