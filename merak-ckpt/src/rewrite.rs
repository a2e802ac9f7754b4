//! Writing planned files from an open checkpoint, a bounded number of bytes in memory at a time.

use crate::checksum::HashingWriter;
use crate::disk::{not_read, open_regular};
use crate::error::{Damage, Problem, io_error};
use crate::format;
use crate::manifest::FileEntry;
use crate::plan::PlannedFile;
use crate::shard::{Outgoing, Sink, Supply, write_from};
use crate::{Checkpoint, Error, Layout, Piece, Result, Shard, TensorEntry};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that rewriting a checkpoint holds in memory, where nothing else is asked for.
pub const DEFAULT_MAX_MEMORY: usize = 256 << 20;
/// The least that it can do with.
pub(crate) const MIN_MEMORY: usize = 4 << 20;
/// Most files that are written at a time: one is synced while others are copied.
const MAX_WORKERS: usize = 4;
/// What a worker needs besides its two buffers: a block that is read, a block that is written.
const WORKER_BYTES: usize = 2 << 20;

/// How much memory a rewrite takes and by how many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    workers: usize,
    buffer_bytes: usize,
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
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = (max_memory / MIN_MEMORY).min(MAX_WORKERS).min(cores.max(2));
        // A second buffer of this size may hold values before they are converted.
        let buffer_bytes = ((max_memory / workers - WORKER_BYTES) / 2).min(8 << 20);
        Ok(Self {
            workers,
            buffer_bytes,
        })
    }
}

/// Where the values of planned pieces come from.
pub(crate) trait Values: Sync {
    /// Reads a piece, in the type that it is to be written in.
    fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()>;
}

impl Values for Checkpoint {
    fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        Checkpoint::read_as(self, piece, out)
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
        while let Some((name, file)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            let pieces: Vec<_> = file
                .pieces
                .iter()
                .map(|piece| piece.piece(tensors))
                .collect();
            let pieces: Vec<_> = pieces.iter().collect();
            let supply = Stream {
                source,
                buffer_bytes: budget.buffer_bytes,
            };
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
    std::thread::scope(|scope| {
        for _ in 1..budget.workers.min(files.len()) {
            // Without a thread, those that there are write its files.
            if std::thread::Builder::new()
                .spawn_scoped(scope, work)
                .is_err()
            {
                break;
            }
        }
        work();
    });
    let mut results = results.into_inner().expect("the threads have ended");
    results.sort_by_key(|(name, _)| *name);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Supplies slices from an open checkpoint.
struct Stream<'a> {
    source: &'a dyn Values,
    buffer_bytes: usize,
}

impl Supply for Stream<'_> {
    fn supply(&self, slice: &Outgoing<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let Outgoing { piece, part, .. } = slice;
        let layout = Layout::region(piece.layout.shape(), part.part.region.clone())?;
        let width = piece.dtype.size_bytes();
        let step = self.buffer_bytes / width;
        let mut buffer = vec![0; part.range.len().min(step) * width];
        for begin in part.range.clone().step_by(step) {
            let range = begin..part.range.end.min(begin + step);
            let out = &mut buffer[..range.len() * width];
            let block = Piece {
                layout: &layout,
                range: Some(range),
                ..(*piece).clone()
            };
            self.source.read_as(&block, out)?;
            sink(out)?;
        }
        Ok(())
    }
}

/// Copies the files of a checkpoint that hold no tensors and that are wanted, checking them on the way.
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
                damage: Box::new(Damage {
                    file: expected.name.clone(),
                    tensor: None,
                    problem,
                }),
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
    let file = File::create_new(&to).map_err(io_error("create", &to))?;
    let mut writer = HashingWriter::new(file);
    let mut block = vec![0; 1 << 16];
    loop {
        match reader.read(&mut block).map_err(io_error("read", from))? {
            0 => break,
            n => writer
                .write_all(&block[..n])
                .map_err(io_error("write", &to))?,
        }
    }
    let (file, length, checksum) = writer.finish();
    file.sync_all().map_err(io_error("sync", &to))?;
    Ok(FileEntry {
        name: name.to_owned(),
        length,
        checksum,
    })
}
