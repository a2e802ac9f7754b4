//! Opening a checkpoint and reading from it.

use crate::crc32::{Stretch, Sums};
use crate::error::{Damage, Problem, WithCauses, foreign, io_error};
use crate::file_check::{Place, check_header, complete, slices_by_file};
use crate::locate::{Complete, newest_complete, older_than, resolve};
use crate::manifest::{Manifest, TensorEntry};
use crate::read::{SliceReader, mark, read_slice};
use crate::words::brief;
use crate::{Error, Kind, Piece, Result, Store};
use merak_mpu::names::nearest;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A complete checkpoint, open for reading.
///
/// Its manifest is sound, its files have the right lengths, and those without tensors the right
/// content; a tensor file's header and a slice's content are checked when the first byte of them is
/// needed. Threads may share a handle.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    /// Whether the manifest has checksums.
    has_checksums: bool,
    /// One per file of the manifest.
    files: Vec<OpenFile>,
    /// The slices of each file, computed when a header is first checked.
    slices_by_file: OnceLock<Vec<Vec<Place>>>,
    /// For each tensor, one flag per slice: whether its checksum was found right.
    verified: Vec<Vec<AtomicBool>>,
}

/// A file, opened when it is first needed.
#[derive(Debug)]
struct OpenFile {
    file: OnceLock<File>,
    /// Whether its header was found right, or needs no check.
    has_sound_header: AtomicBool,
    /// Checksums that the file itself has for stretches of it.
    sums: Option<Arc<Sums>>,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`: a checkpoint's folder, an output folder or its
    /// `checkpoints` folder (then the one that `latest` names).
    ///
    /// # Errors
    /// [`Error::NotFound`] or [`Error::NotACheckpoint`] where there is none, [`Error::Damaged`]
    /// where it is incomplete, [`Error::NewerVersion`] where a newer version wrote it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::follow(path.as_ref(), Self::load)
    }

    /// Opens a checkpoint whose manifest is sound, without checking its files, so that
    /// [`Checkpoint::verify`] can look at all of them.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`], except for damage of files other than the manifests of the
    /// checkpoint and its base.
    pub fn open_damaged(path: impl AsRef<Path>) -> Result<Self> {
        Self::follow(path.as_ref(), Self::read_table)
    }

    /// Opens the newest complete checkpoint of an output folder or its `checkpoints` folder, or
    /// returns `None` where there is none.
    ///
    /// Completeness is that of [`Store::newest_complete`](crate::Store::newest_complete). Where
    /// reading the result uncovers damage, [`Checkpoint::older`] goes on.
    ///
    /// # Errors
    /// [`Error::Io`] where a folder exists but cannot be listed.
    pub fn open_newest(path: impl AsRef<Path>) -> Result<Option<Self>> {
        Store::within(path.as_ref()).newest_complete(None)
    }

    /// The newest complete checkpoint of a lower step beside this one.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder cannot be listed.
    pub fn older(&self) -> Result<Option<Self>> {
        self.older_without(&[])
    }

    /// The newest complete checkpoint of a lower step beside this one that shares none of its
    /// damaged files, such as those of a base.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder cannot be listed.
    pub fn older_without(&self, damage: &[Damage]) -> Result<Option<Self>> {
        Ok(older_than(&self.folder, damage)?.map(Self::found))
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
            for (slice, entry) in tensor.slices.iter().enumerate() {
                if entry.region().intersection(&part.part.region).is_none() {
                    continue;
                }
                self.check_header_once(index, slice)?;
                let reader = self.slice_reader(index, slice)?;
                read_slice(&reader, &part, piece, out)
                    .map_err(|problem| self.damaged_slice(index, slice, problem))?;
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
        let piece = Piece {
            kind,
            ..Piece::parameter(name, tensor.dtype, &layout)
        };
        self.read(&piece, &mut out)?;
        Ok(out)
    }

    /// Opens the checkpoint that a path stands for. Where the one that `latest` named cannot be
    /// opened and `latest` names another one by now, a run has deleted it meanwhile, and the other
    /// one is opened.
    fn follow(path: &Path, open: impl Fn(&Path) -> Result<Self>) -> Result<Self> {
        let folder = resolve(path)?;
        let opened = open(&folder).or_else(|error| match resolve(path) {
            Ok(newer) if newer != folder => open(&newer),
            _ => Err(error),
        });
        opened.map_err(Error::with_older)
    }

    /// Opens the checkpoint in this very folder; errors do not look for an older one.
    pub(crate) fn load(folder: &Path) -> Result<Self> {
        Ok(Self::over(folder, complete(folder)?, false))
    }

    /// Opens the checkpoint in this very folder by its manifest alone.
    fn read_table(folder: &Path) -> Result<Self> {
        Ok(Self::over(folder, Manifest::of_folder(folder)?, false))
    }

    fn found(complete: Complete) -> Self {
        Self::over(&complete.folder, complete.manifest, false)
    }

    /// A handle on the files that a sound manifest describes; `verified` says that checksums and
    /// headers need no check.
    pub(crate) fn over(folder: &Path, manifest: Manifest, verified: bool) -> Self {
        let flags = |tensor: &TensorEntry| {
            let flag = |_| AtomicBool::new(verified);
            tensor.slices.iter().map(flag).collect()
        };
        let file = || OpenFile {
            file: OnceLock::new(),
            has_sound_header: AtomicBool::new(verified),
            sums: None,
        };
        Self {
            folder: folder.to_owned(),
            files: manifest.files.iter().map(|_| file()).collect(),
            slices_by_file: OnceLock::new(),
            has_checksums: !verified,
            verified: manifest.tensors.iter().map(flags).collect(),
            manifest,
        }
    }

    /// The same, with checksums that files themselves have for stretches of them, by file name.
    pub(crate) fn with_sums(mut self, mut stretches: BTreeMap<String, Vec<Stretch>>) -> Self {
        for (open, file) in self.files.iter_mut().zip(&self.manifest.files) {
            let stretches = stretches.remove(&file.name);
            open.sums = stretches.map(|stretches| Arc::new(Sums::new(stretches)));
        }
        self
    }

    /// Checks the stretches of files with checksums of their own that were read in part, by reading
    /// the rest of them.
    pub(crate) fn check_rest(&self) -> Result<()> {
        for (open, file) in self.files.iter().zip(&self.manifest.files) {
            // Of a file that was never opened, nothing was read.
            if let (Some(sums), Some(opened)) = (&open.sums, open.file.get()) {
                let checked = sums.finish(opened);
                checked.map_err(|reason| foreign(&self.folder.join(&file.name), reason))?;
            }
        }
        Ok(())
    }

    /// A handle on some of the parameters under other names; `names` maps each new name to the
    /// parameter's own.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] where there is none, [`Error::Damaged`] where the header of its
    /// file is not that of the manifest.
    pub(crate) fn renamed(&self, names: &BTreeMap<String, String>) -> Result<Self> {
        let mut positions = Vec::with_capacity(names.len());
        for (name, own) in names {
            positions.push((self.tensor_index(&Kind::Parameter, own)?, name.clone()));
        }
        self.as_parameters(positions)
    }

    /// A handle on the tensors at these positions of the manifest, as parameters with these names,
    /// which ascend.
    ///
    /// # Errors
    /// [`Error::Damaged`] where the header of a tensor's file is not that of the manifest.
    pub(crate) fn as_parameters(&self, positions: Vec<(usize, String)>) -> Result<Self> {
        let mut tensors = Vec::with_capacity(positions.len());
        for (index, name) in positions {
            let tensor = &self.manifest.tensors[index];
            (0..tensor.slices.len()).try_for_each(|slice| self.check_header_once(index, slice))?;
            tensors.push(TensorEntry {
                kind: Kind::Parameter,
                name,
                ..tensor.clone()
            });
        }
        let manifest = Manifest {
            header: self.manifest.header.clone(),
            base: self.manifest.base.clone(),
            files: self.manifest.files.clone(),
            tensors,
        };
        let mut renamed = Self::over(&self.folder, manifest, !self.has_checksums);
        for (renamed, own) in renamed.files.iter_mut().zip(&self.files) {
            renamed.sums.clone_from(&own.sums);
        }
        // They have the tensors' own names, and were just checked.
        let headers = renamed.files.iter().map(|file| &file.has_sound_header);
        headers.for_each(mark);
        Ok(renamed)
    }

    /// Whether there are checksums to check.
    pub(crate) fn has_checksums(&self) -> bool {
        self.has_checksums
    }

    /// The slices of a file, as positions in the manifest, in its order.
    pub(crate) fn slices_in(&self, file: usize) -> &[Place] {
        let compute = || slices_by_file(&self.manifest);
        &self.slices_by_file.get_or_init(compute)[file]
    }

    /// Notes that a slice was found to be what its checksum says.
    pub(crate) fn mark_verified(&self, tensor: usize, slice: usize) {
        mark(&self.verified[tensor][slice]);
    }

    /// Compares the header of a file with the manifest.
    pub(crate) fn check_header(&self, file: usize) -> Result<(), Problem> {
        let entry = &self.manifest.files[file];
        let open = self.file(file).map_err(|error| Problem::Unreadable {
            reason: WithCauses(&error).to_string(),
        })?;
        check_header(open, entry, &self.manifest, self.slices_in(file))
    }

    /// Checks the header of a slice's file, unless that has been done.
    fn check_header_once(&self, tensor: usize, slice: usize) -> Result<()> {
        let index = self.file_of(tensor, slice);
        let flag = &self.files[index].has_sound_header;
        if flag.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.check_header(index).map_err(|problem| {
            let name = &self.manifest.files[index].name;
            self.damaged(Damage::of_file(name, problem))
        })?;
        mark(flag);
        Ok(())
    }

    fn tensor_index(&self, kind: &Kind, name: &str) -> Result<usize> {
        self.manifest.tensor_index(kind, name).ok_or_else(|| {
            let tensors = self.manifest.tensors_of(kind);
            let names = tensors.map(|tensor| tensor.name.as_str());
            Error::MissingTensor {
                path: self.folder.clone(),
                kind: kind.clone(),
                name: name.to_owned(),
                nearest: nearest(name, names).map(str::to_owned),
            }
        })
    }

    fn slice_reader(&self, tensor: usize, slice: usize) -> Result<SliceReader<'_>> {
        let entry = &self.manifest.tensors[tensor];
        Ok(SliceReader {
            file: self.file(self.file_of(tensor, slice))?,
            entry: &entry.slices[slice],
            width: entry.dtype.size_bytes(),
            verified: &self.verified[tensor][slice],
            sums: self.files[self.file_of(tensor, slice)].sums.as_deref(),
        })
    }

    /// Position of the file that holds a slice.
    fn file_of(&self, tensor: usize, slice: usize) -> usize {
        self.manifest
            .file_index(&self.manifest.tensors[tensor].slices[slice].file)
            .expect("a sound manifest lists the files of its slices")
    }

    fn file(&self, index: usize) -> Result<&File> {
        let cell = &self.files[index].file;
        if let Some(file) = cell.get() {
            return Ok(file);
        }
        let path = self.folder.join(&self.manifest.files[index].name);
        let file = File::open(&path).map_err(io_error("open", &path))?;
        Ok(cell.get_or_init(|| file))
    }

    fn damaged_slice(&self, tensor: usize, slice: usize, problem: Problem) -> Error {
        let tensor = &self.manifest.tensors[tensor];
        let file = &tensor.slices[slice].file;
        if !self.has_checksums {
            // Another program's file: there is no older checkpoint beside it.
            let reason = format!("tensor `{}`: {problem}", brief(&tensor.name));
            return foreign(&self.folder.join(file), reason);
        }
        self.damaged(Damage {
            file: file.clone(),
            tensor: Some(tensor.name.clone()),
            problem,
        })
    }

    fn damaged(&self, damage: Damage) -> Error {
        Error::damaged(&self.folder, damage).with_older()
    }
}

impl Store {
    /// The newest checkpoint (by number) that is complete: its manifest is sound, its files have
    /// the right lengths, and those without tensors the right content. With `before`, only lower
    /// steps count.
    ///
    /// Incomplete ones are passed over with a warning in the log.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder exists but cannot be listed.
    pub fn newest_complete(&self, before: Option<u64>) -> Result<Option<Checkpoint>> {
        Ok(newest_complete(self, before)?.map(Checkpoint::found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Header, format};
    use std::fs;

    #[test]
    fn a_checkpoint_that_a_run_deletes_meanwhile_is_looked_up_once_more() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::in_output_dir(folder.path());
        let save = |step| {
            let draft = store.begin(step).unwrap();
            draft.commit(Vec::new(), Header::default(), &[]).unwrap();
        };
        save(1);
        let opened = Checkpoint::follow(folder.path(), |found| {
            if found.ends_with("step-00000001") {
                save(2);
                store.rotate(1, &[]).unwrap();
            }
            Checkpoint::load(found)
        });
        assert_eq!(opened.unwrap().manifest().header.step, 2);
        // Damage stays damage.
        fs::remove_file(store.path_of(2).join(format::MANIFEST)).unwrap();
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
    }
}
