//! Opening a checkpoint and reading from it.

use crate::disk::check_length;
use crate::error::{Damage, Problem, io_error};
use crate::format;
use crate::manifest::{Manifest, Refused, TensorEntry};
use crate::read::{SliceReader, read_slice};
use crate::{Error, Kind, Piece, Result, Store};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A complete checkpoint, open for reading.
///
/// Its manifest is sound and its files have the right lengths; the content of a slice is checked
/// when the first byte of it is read. Threads may share a handle.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    /// One per file of the manifest, opened when it is first needed.
    files: Vec<OnceLock<File>>,
    /// For each tensor, one flag per slice: its checksum was found right.
    verified: Vec<Vec<AtomicBool>>,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`: a checkpoint's folder, an output folder or its
    /// `checkpoints` folder (then the one that `latest` names).
    ///
    /// # Errors
    /// [`Error::NotFound`] or [`Error::NotACheckpoint`] where there is none, [`Error::Damaged`]
    /// where it is incomplete, [`Error::NewerVersion`] where a newer version wrote it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::load(&resolve(path.as_ref())?).map_err(Error::with_older)
    }

    /// Opens the newest complete checkpoint of an output folder or its `checkpoints` folder, or
    /// returns `None` where there is none: what `resume_from_checkpoint = "auto"` asks for.
    ///
    /// Completeness is that of [`Store::newest_complete`]. Where reading the result uncovers
    /// damage, [`Checkpoint::older`] goes on.
    ///
    /// # Errors
    /// [`Error::Io`] where a folder exists but cannot be listed.
    pub fn open_newest(path: impl AsRef<Path>) -> Result<Option<Self>> {
        store_of(path.as_ref()).newest_complete(None)
    }

    /// The newest complete checkpoint of a lower step beside this one.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder cannot be listed.
    pub fn older(&self) -> Result<Option<Self>> {
        older_than(&self.folder)
    }

    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The entry of a tensor.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], with the most similar name of the same kind.
    pub fn tensor(&self, kind: &Kind, name: &str) -> Result<&TensorEntry> {
        self.tensor_index(kind, name)
            .map(|index| &self.manifest.tensors[index])
    }

    /// Reads a piece into `out`, whichever topology wrote it: the local tensor of the piece's
    /// layout (or the flat range of it), row-major, little-endian. Only the slices that hold
    /// some of it are read. Elements of the local tensor outside the layout's parts (padding)
    /// are left as they are.
    ///
    /// After an error `out` may be partly written.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::ShapeMismatch`] and [`Error::DTypeMismatch`] where the
    /// checkpoint is of another model; [`Error::Damaged`] where a slice that was touched has
    /// another checksum than the manifest says; [`Error::BufferLength`] and
    /// [`Error::InvalidLayout`] where the caller's arguments do not agree.
    pub fn read(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        let index = self.tensor_index(piece.kind, piece.name)?;
        let tensor = &self.manifest.tensors[index];
        if tensor.shape != piece.layout.shape() {
            return Err(Error::ShapeMismatch {
                path: self.folder.clone(),
                kind: piece.kind.clone(),
                name: piece.name.to_owned(),
                expected: piece.layout.shape().into(),
                found: tensor.shape.as_slice().into(),
            });
        }
        if tensor.dtype != piece.dtype {
            return Err(Error::DTypeMismatch {
                path: self.folder.clone(),
                kind: piece.kind.clone(),
                name: piece.name.to_owned(),
                expected: piece.dtype,
                found: tensor.dtype,
            });
        }
        piece.check_buffer(out.len())?;
        for part in piece.layout.part_ranges(&piece.flat_range()) {
            for slice in 0..tensor.slices.len() {
                let reader = self.slice_reader(index, slice)?;
                read_slice(&reader, &part, piece, out)
                    .map_err(|problem| self.damaged(index, slice, problem))?;
            }
        }
        Ok(())
    }

    /// Reads a whole global tensor, row-major, little-endian.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] where there is none of the name, [`Error::Damaged`] where a slice
    /// has another checksum than the manifest says.
    pub fn read_whole(&self, kind: &Kind, name: &str) -> Result<Vec<u8>> {
        let tensor = self.tensor(kind, name)?;
        let layout = crate::Layout::whole(&tensor.shape);
        let mut out = vec![0; tensor.num_bytes()];
        let dtype = tensor.dtype;
        self.read(
            &Piece {
                kind,
                name,
                dtype,
                layout: &layout,
                range: None,
            },
            &mut out,
        )?;
        Ok(out)
    }

    /// Opens the checkpoint in this very folder; errors do not look for an older one.
    pub(crate) fn load(folder: &Path) -> Result<Self> {
        let damaged = |damage| Error::Damaged {
            path: folder.to_owned(),
            damage: Box::new(damage),
            older: None,
        };
        let text = read_manifest(folder)?;
        let manifest = Manifest::from_text(&text).map_err(|refused| match refused {
            Refused::Newer { found } => Error::NewerVersion {
                path: folder.join(format::MANIFEST),
                found,
                supported: format::VERSION,
            },
            Refused::Damaged(damage) => damaged(damage),
        })?;
        for file in &manifest.files {
            check_length(folder, file).map_err(damaged)?;
        }
        Ok(Self::over(folder, manifest, false))
    }

    /// A handle on the files that a sound manifest describes; `verified` says that its checksums
    /// are not to be looked at.
    pub(crate) fn over(folder: &Path, manifest: Manifest, verified: bool) -> Self {
        let flags = |tensor: &TensorEntry| {
            let flag = |_| AtomicBool::new(verified);
            tensor.slices.iter().map(flag).collect()
        };
        Self {
            folder: folder.to_owned(),
            files: manifest.files.iter().map(|_| OnceLock::new()).collect(),
            verified: manifest.tensors.iter().map(flags).collect(),
            manifest,
        }
    }

    /// Checks the checksum of one slice.
    pub(crate) fn verify_slice(&self, tensor: usize, slice: usize) -> Result<(), Problem> {
        let reader = self
            .slice_reader(tensor, slice)
            .map_err(|error| Problem::Unreadable {
                reason: error.to_string(),
            })?;
        reader.verify()
    }

    fn tensor_index(&self, kind: &Kind, name: &str) -> Result<usize> {
        self.manifest.tensor_index(kind, name).ok_or_else(|| {
            let names = self.manifest.tensors_of(kind).map(|tensor| &tensor.name);
            Error::MissingTensor {
                path: self.folder.clone(),
                kind: kind.clone(),
                name: name.to_owned(),
                nearest: names
                    .min_by_key(|other| strsim::levenshtein(name, other))
                    .cloned(),
            }
        })
    }

    fn slice_reader(&self, tensor: usize, slice: usize) -> Result<SliceReader<'_>> {
        let entry = &self.manifest.tensors[tensor];
        let index = self
            .manifest
            .file_index(&entry.slices[slice].file)
            .expect("a sound manifest lists the files of its slices");
        Ok(SliceReader {
            file: self.file(index)?,
            entry: &entry.slices[slice],
            width: entry.dtype.size_bytes(),
            verified: &self.verified[tensor][slice],
        })
    }

    fn file(&self, index: usize) -> Result<&File> {
        let cell = &self.files[index];
        if let Some(file) = cell.get() {
            return Ok(file);
        }
        let path = self.folder.join(&self.manifest.files[index].name);
        let file = File::open(&path).map_err(io_error("open", &path))?;
        Ok(cell.get_or_init(|| file))
    }

    fn damaged(&self, tensor: usize, slice: usize, problem: Problem) -> Error {
        let tensor = &self.manifest.tensors[tensor];
        let damage = Damage {
            file: tensor.slices[slice].file.clone(),
            tensor: Some(tensor.name.clone()),
            problem,
        };
        Error::Damaged {
            path: self.folder.clone(),
            damage: Box::new(damage),
            older: None,
        }
        .with_older()
    }
}

impl Error {
    /// Adds the newest complete older checkpoint to an error about a damaged one.
    fn with_older(mut self) -> Self {
        if let Self::Damaged { path, older, .. } = &mut self {
            let found = older_than(path).ok().flatten();
            *older = found.map(|checkpoint| checkpoint.folder);
        }
        self
    }
}

/// Marks a slice as checked.
pub(crate) fn mark(flag: &AtomicBool) {
    flag.store(true, Ordering::Relaxed);
}

/// The folder of the checkpoint that `path` stands for.
fn resolve(path: &Path) -> Result<PathBuf> {
    if !path.exists() {
        return Err(Error::NotFound {
            path: path.to_owned(),
        });
    }
    let is_step = |name: &str| format::parse_step_name(name).is_some();
    if path.join(format::MANIFEST).exists()
        || path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(is_step)
    {
        return Ok(path.to_owned());
    }
    let store = store_of(path);
    match store.latest()? {
        Some(latest) => Ok(latest),
        None => Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found: store
                .newest_complete(None)?
                .map(|checkpoint| checkpoint.folder),
        }),
    }
}

/// The store in an output folder, or in its `checkpoints` folder.
fn store_of(path: &Path) -> Store {
    let inner = path.join(format::CHECKPOINTS);
    Store::new(if inner.is_dir() {
        inner
    } else {
        path.to_owned()
    })
}

fn older_than(folder: &Path) -> Result<Option<Checkpoint>> {
    // A path like `.` has no name of its own.
    let folder = match folder.file_name() {
        Some(_) => folder.to_owned(),
        None => folder.canonicalize().map_err(io_error("find", folder))?,
    };
    let name = folder.file_name().and_then(|name| name.to_str());
    let step = name.and_then(format::parse_step_name);
    let (Some(parent), Some(step)) = (folder.parent(), step) else {
        return Ok(None);
    };
    Store::new(parent).newest_complete(Some(step))
}

fn read_manifest(folder: &Path) -> Result<Vec<u8>> {
    let path = folder.join(format::MANIFEST);
    let damaged = |problem| Error::Damaged {
        path: folder.to_owned(),
        damage: Box::new(Damage {
            file: format::MANIFEST.to_owned(),
            tensor: None,
            problem,
        }),
        older: None,
    };
    let length = match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() => metadata.len(),
        _ => return Err(damaged(Problem::Missing)),
    };
    let limit = format::MAX_MANIFEST_BYTES;
    if length > limit {
        return Err(damaged(Problem::TooLarge {
            what: "bytes",
            found: length,
            limit,
        }));
    }
    let mut text = Vec::new();
    let file = File::open(&path).map_err(io_error("open", &path))?;
    file.take(limit)
        .read_to_end(&mut text)
        .map_err(io_error("read", &path))?;
    Ok(text)
}
