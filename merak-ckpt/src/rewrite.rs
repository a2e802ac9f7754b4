//! Writing planned files from an open checkpoint, a bounded number of bytes in memory at a time.

use crate::checksum::HashingWriter;
use crate::disk::{not_read, open_regular};
use crate::error::{Damage, Problem, io_error};
use crate::format;
use crate::manifest::FileEntry;
use crate::output::OutputFile;
use crate::plan::PlannedFile;
use crate::shard::{Outgoing, Sink, Supply, write_from};
use crate::{Checkpoint, Error, Layout, Piece, Result, Shard, TensorEntry};
use std::cell::RefCell;
use std::io::{Read, Write};
use std::panic;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

/// Bytes that rewriting a checkpoint holds in memory by default.
pub const DEFAULT_MAX_MEMORY: usize = 256 << 20;
/// The least memory that a rewrite needs.
pub(crate) const MIN_MEMORY: usize = 4 << 20;
/// Most files that are written at a time: one is synced while others are copied.
const MAX_WORKERS: usize = 4;
/// What a worker needs besides its buffers: a block that is read, a block that is written.
const WORKER_BYTES: usize = 2 << 20;
/// Most bytes of a buffer.
const MAX_BUFFER_BYTES: usize = 4 << 20;

/// How much a rewrite takes: memory, threads, and the time for checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    workers: usize,
    buffer_bytes: usize,
    has_checksums: bool,
}

impl Budget {
    /// Divides `max_memory` bytes; the tables of tensors and slices come on top.
    pub(crate) fn new(max_memory: usize) -> Result<Self> {
        if max_memory < MIN_MEMORY {
            return Err(Error::InvalidOption {
                key: "max_memory",
                found: format!("{max_memory} bytes"),
                expected: "4 MiB or more",
            });
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let workers = (max_memory / MIN_MEMORY).min(MAX_WORKERS).min(cores.max(2));
        // One more buffer of this size may hold values before they are converted.
        let buffer_bytes = (max_memory / workers - WORKER_BYTES) / (NUM_BATCHES + 1);
        let buffer_bytes = buffer_bytes.min(MAX_BUFFER_BYTES);
        Ok(Self {
            workers,
            buffer_bytes,
            has_checksums: true,
        })
    }

    /// For files whose checksums are not noted.
    pub(crate) fn without_checksums(self) -> Self {
        Self {
            has_checksums: false,
            ..self
        }
    }
}

/// Where the values of planned pieces come from.
pub(crate) trait Values: Sync {
    /// Reads a piece, in the type that it is to be written in.
    fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()>;

    /// Checks what can be checked only once everything that is wanted has been read.
    fn check_rest(&self) -> Result<()>;
}

impl Values for Checkpoint {
    fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        Checkpoint::read_as(self, piece, out)
    }

    fn check_rest(&self) -> Result<()> {
        Checkpoint::check_rest(self)
    }
}

/// Writes the files of a plan into `folder`; `tensors` is the table that the plan was made for,
/// and its element types are those that are written.
pub(crate) fn write_planned(
    source: &dyn Values,
    tensors: &[TensorEntry],
    files: &[(String, &PlannedFile)],
    folder: &Path,
    budget: Budget,
) -> Result<Vec<Shard>> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        let supply = Stream {
            source,
            budget,
            folder,
            left: RefCell::default(),
        };
        while let Some((name, file)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            let pieces: Vec<_> = file
                .pieces
                .iter()
                .map(|piece| piece.piece(tensors))
                .collect();
            let pieces: Vec<_> = pieces.iter().collect();
            let result = write_from(folder, name, &pieces, &supply);
            if result.is_err() {
                // The others stop after the file in hand.
                next.store(files.len(), Ordering::Relaxed);
            }
            let mut results = results
                .lock()
                .expect("no thread panics while it holds the lock");
            results.push((name, result));
        }
    };
    thread::scope(|scope| {
        for _ in 1..budget.workers.min(files.len()) {
            // If a thread cannot start, the others write its files.
            if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let mut results = results.into_inner().expect("the threads have ended");
    results.sort_by_key(|(name, _)| *name);
    let shards: Result<_> = results.into_iter().map(|(_, result)| result).collect();
    let shards = shards?;
    source.check_rest()?;
    Ok(shards)
}

/// Supplies slices from an open checkpoint: a thread reads them while those before are written.
struct Stream<'a> {
    source: &'a dyn Values,
    budget: Budget,
    /// The folder that is written to.
    folder: &'a Path,
    /// Batches that an earlier file has left.
    left: RefCell<Vec<Batch>>,
}

/// Bytes of slices, on their way from the thread that reads to the one that writes.
struct Batch {
    memory: Vec<u8>,
    /// For each slice that has bytes here: its position, and the number of bytes.
    stretches: Vec<(usize, usize)>,
    filled: usize,
}

/// Bytes that are read or written while the next are made.
const NUM_BATCHES: usize = 2;

impl Supply for Stream<'_> {
    fn has_checksums(&self) -> bool {
        self.budget.has_checksums
    }

    fn supply(&self, slices: &[Outgoing<'_>], sink: &mut Sink<'_>) -> Result<()> {
        let (spare, empty) = mpsc::channel();
        let (full, read) = mpsc::sync_channel(NUM_BATCHES);
        let mut left = self.left.take();
        left.resize_with(NUM_BATCHES, || Batch::new(self.budget.buffer_bytes));
        for batch in left {
            // The reader has not started yet, so this cannot fail.
            let _ = spare.send(batch);
        }
        let (source, left) = (self.source, &self.left);
        let reader = move || {
            if let Err(error) = read_all(source, slices, &empty, &full) {
                // The writer may have failed before.
                let _ = full.send(Err(error));
            }
            empty
        };
        // The side that ends first drops its ends of the channels, so that the other side ends too.
        thread::scope(move |scope| {
            let reader = thread::Builder::new()
                .name("merak-ckpt".to_owned())
                .spawn_scoped(scope, reader)
                .map_err(io_error("start a thread to read for", self.folder))?;
            for batch in read {
                let mut batch: Batch = batch?;
                batch.pour(sink)?;
                // The reader may have ended.
                let _ = spare.send(batch);
            }
            let empty = reader
                .join()
                .unwrap_or_else(|panic| panic::resume_unwind(panic));
            left.replace(empty.try_iter().collect());
            Ok(())
        })
    }
}

/// Reads all slices into batches, unless the writer ends before.
fn read_all(
    source: &dyn Values,
    slices: &[Outgoing<'_>],
    empty: &Receiver<Batch>,
    full: &SyncSender<Result<Batch>>,
) -> Result<()> {
    let Ok(mut batch) = empty.recv() else {
        return Ok(());
    };
    for (index, slice) in slices.iter().enumerate() {
        let Outgoing { piece, part, .. } = slice;
        let layout = Layout::region(piece.layout.shape(), part.part.region.clone())?;
        let (width, mut range) = (piece.dtype.size_bytes(), part.range.clone());
        while !range.is_empty() {
            let len = batch.room_for(range.len() * width) / width;
            if len == 0 {
                let (Ok(()), Ok(next)) = (full.send(Ok(batch)), empty.recv()) else {
                    return Ok(());
                };
                batch = next;
                continue;
            }
            let block = Piece {
                layout: &layout,
                range: Some(range.start..range.start + len),
                ..(*piece).clone()
            };
            source.read_as(&block, batch.take(index, len * width))?;
            range.start += len;
        }
    }
    // The writer may have failed.
    let _ = full.send(Ok(batch));
    Ok(())
}

impl Batch {
    fn new(bytes: usize) -> Self {
        Self {
            memory: vec![0; bytes],
            stretches: Vec::new(),
            filled: 0,
        }
    }

    /// How many of the `wanted` bytes of a slice to take now. A slice is divided only where it
    /// would leave half of the batch empty, since finding a part may cost as much as finding the
    /// whole.
    fn room_for(&self, wanted: usize) -> usize {
        let room = self.memory.len() - self.filled;
        if wanted <= room || room >= self.memory.len() / 2 {
            wanted.min(room)
        } else {
            0
        }
    }

    /// The next bytes of the batch, to be filled from a slice.
    fn take(&mut self, slice: usize, bytes: usize) -> &mut [u8] {
        let begin = self.filled;
        self.filled += bytes;
        self.stretches.push((slice, bytes));
        &mut self.memory[begin..self.filled]
    }

    /// Passes everything on, and is empty then.
    fn pour(&mut self, sink: &mut Sink<'_>) -> Result<()> {
        let mut rest = &self.memory[..self.filled];
        for (slice, bytes) in self.stretches.drain(..) {
            let (head, tail) = rest.split_at(bytes);
            sink(slice, head)?;
            rest = tail;
        }
        self.filled = 0;
        Ok(())
    }
}

/// Copies the files of a checkpoint that hold no tensors and that are wanted, checking them on the
/// way.
pub(crate) fn copy_other_files(
    source: &Checkpoint,
    folder: &Path,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Vec<FileEntry>> {
    let files = source.manifest().files.iter();
    let others = files.filter(|file| !format::is_tensor_file(&file.name) && is_wanted(&file.name));
    let mut copied = Vec::new();
    for expected in others {
        let found = copy_file(source.path(), folder, &expected.name)?;
        if found.checksum != expected.checksum {
            let problem = Problem::Checksum {
                expected: expected.checksum,
                found: found.checksum,
            };
            return Err(Error::Damaged {
                path: source.path().to_owned(),
                damage: Box::new(Damage::of_file(&expected.name, problem)),
                older: source.older()?.map(|older| older.path().to_owned()),
            });
        }
        copied.push(found);
    }
    Ok(copied)
}

/// Copies one file from folder to folder and syncs it.
pub(crate) fn copy_file(from: &Path, to: &Path, name: &str) -> Result<FileEntry> {
    let from = from.join(name);
    let (reader, _) = open_regular(&from).map_err(|error| not_read(&from, error))?;
    write_file(reader, &from, to, name)
}

/// Writes a file with what a reader of `from` gives and syncs it.
pub(crate) fn write_file(
    mut reader: impl Read,
    from: &Path,
    to: &Path,
    name: &str,
) -> Result<FileEntry> {
    let to = to.join(name);
    let file = OutputFile::create_new(&to).map_err(io_error("create", &to))?;
    let mut writer = HashingWriter::new(file);
    let mut block = vec![0; 1 << 18];
    loop {
        match reader.read(&mut block).map_err(io_error("read", from))? {
            0 => break,
            n => writer
                .write_all(&block[..n])
                .map_err(io_error("write", &to))?,
        }
    }
    let (file, length, checksum) = writer.finish();
    file.sync().map_err(io_error("sync", &to))?;
    Ok(FileEntry {
        name: name.to_owned(),
        length,
        checksum,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::shard::{ShardKind, slices};
    use proptest::prelude::*;
    use std::time::Duration;

    /// Values that count from 0 in each tensor, and say when a read begins.
    struct Counting(Option<mpsc::Sender<()>>);

    impl Values for Counting {
        fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
            self.0.iter().for_each(|begins| begins.send(()).unwrap());
            let values = piece.flat_range().map(|value| value as u8);
            out.iter_mut()
                .zip(values)
                .for_each(|(out, value)| *out = value);
            Ok(())
        }

        fn check_rest(&self) -> Result<()> {
            Ok(())
        }
    }

    /// Streams tensors of these sizes to `sink`, through batches of `buffer_bytes`.
    fn stream(
        source: &dyn Values,
        sizes: &[usize],
        buffer_bytes: usize,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let layouts: Vec<_> = sizes.iter().map(|size| Layout::whole(&[*size])).collect();
        let names: Vec<_> = (0..sizes.len())
            .map(|index| format!("{index:02}"))
            .collect();
        let pieces: Vec<_> = names
            .iter()
            .zip(&layouts)
            .map(|(name, layout)| Piece::parameter(name, DType::U8, layout))
            .collect();
        let supply = Stream {
            source,
            budget: Budget {
                workers: 1,
                buffer_bytes,
                has_checksums: true,
            },
            folder: Path::new(""),
            left: RefCell::default(),
        };
        let pieces: Vec<_> = pieces.iter().collect();
        let file = ShardKind::Model.file_name(0);
        supply.supply(&slices(&file, &pieces), sink)
    }

    proptest! {
        #[test]
        fn slices_pass_in_order_and_whole_whatever_the_batches(
            sizes in prop::collection::vec(1_usize..40, 0..9),
            buffer_bytes in 1_usize..50,
        ) {
            let mut passed = vec![Vec::new(); sizes.len()];
            stream(&Counting(None), &sizes, buffer_bytes, &mut |index, bytes| {
                assert!(passed[index + 1..].iter().all(Vec::is_empty));
                passed[index].extend_from_slice(bytes);
                Ok(())
            }).unwrap();
            let expected = sizes.iter().map(|size| (0..*size as u8).collect::<Vec<_>>());
            prop_assert_eq!(passed, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_next_bytes_are_read_while_those_before_are_written() {
        let (begins, begun) = mpsc::channel();
        let mut written = 0;
        let source = Counting(Some(begins));
        stream(&source, &[12], 4, &mut |_, _| {
            written += 1;
            // There are three reads; each write sees the read of the next bytes begin.
            let reads = if written == 1 {
                2
            } else {
                usize::from(written == 2)
            };
            for _ in 0..reads {
                begun
                    .recv_timeout(Duration::from_mins(1))
                    .expect("a read begins");
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(written, 3);
    }

    #[test]
    fn a_failed_write_ends_the_reading() {
        let refuse = |_: usize, _: &[u8]| {
            let path = Path::new("file");
            Err(io_error("write", path)(
                std::io::ErrorKind::StorageFull.into(),
            ))
        };
        let error = stream(&Counting(None), &[1 << 12], 4, &mut { refuse }).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Io {
                    action: "write",
                    ..
                }
            ),
            "{error}"
        );
    }
}
