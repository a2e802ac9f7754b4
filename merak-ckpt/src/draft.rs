//! Writing a checkpoint under a temporary name, and giving it its own.

use crate::disk::{check_length, remove, rename, sync_folder, write_synced};
use crate::error::{Damage, Problem};
use crate::manifest::{FileEntry, Header, Manifest, TensorEntry, check_file_name};
use crate::shard::{self, Piece, Shard, ShardKind};
use crate::store::{ASIDE, DRAFT};
use crate::{Checksum, Error, Kind, Result, Store, format};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A checkpoint that is being written, under a temporary name.
///
/// See the crate page for who calls what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Draft {
    store: Store,
    step: u64,
}

/// How far a commit goes, in order; a crash after any of them loses no checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CommitStep {
    /// The caller's files and the manifest are on the disk, under the temporary name.
    Written,
    /// An older checkpoint of the same step is set aside.
    SetAside,
    /// The checkpoint has its name.
    Named,
    /// `latest` names it.
    Latest,
    /// What was set aside is removed.
    Cleaned,
}

impl Draft {
    pub(crate) fn new(store: Store, step: u64) -> Self {
        Self { store, step }
    }

    /// The folder under its temporary name.
    pub fn path(&self) -> PathBuf {
        let name = format::step_name(self.step);
        self.store.folder().join(format!("{DRAFT}{name}"))
    }

    /// The step to be saved.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Writes a rank's pieces as one file and brings it to the disk. Ranks write in parallel,
    /// each under an index of its own; without pieces nothing is written.
    ///
    /// Each piece comes with its bytes: the elements of the local tensor (or of the flat range of
    /// it), row-major, little-endian. Of a tensor that several ranks hold, one rank writes.
    ///
    /// # Errors
    /// [`Error::Io`] where the file exists or cannot be written; [`Error::BufferLength`],
    /// [`Error::InvalidLayout`] and [`Error::InvalidName`] for pieces that cannot be stored.
    pub fn write_shard(
        &self,
        kind: ShardKind,
        index: usize,
        pieces: &[(Piece<'_>, &[u8])],
    ) -> Result<Shard> {
        shard::write(&self.path(), &kind.file_name(index), pieces)
    }

    /// Completes the checkpoint: writes `files` (name and content: `config.json` and the like)
    /// and the manifest, gives the folder its name, and makes `latest` name it. One rank calls
    /// it with the shards of all ranks; returns the checkpoint's folder.
    ///
    /// The step of `header` is set to the draft's. A checkpoint of the same step is replaced.
    ///
    /// # Errors
    /// [`Error::IncompleteShards`] where the shards overlap or leave elements out,
    /// [`Error::InvalidName`] for a file name that is not allowed, [`Error::Io`] where the disk
    /// refuses. In every case the older checkpoints stay as they were.
    pub fn commit(
        &self,
        shards: Vec<Shard>,
        header: Header,
        files: &[(&str, &[u8])],
    ) -> Result<PathBuf> {
        self.commit_until(CommitStep::Cleaned, shards, header, files)
    }

    /// Removes the draft.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be removed.
    pub fn abandon(&self) -> Result<()> {
        remove(&self.path())
    }

    fn commit_until(
        &self,
        last: CommitStep,
        shards: Vec<Shard>,
        header: Header,
        files: &[(&str, &[u8])],
    ) -> Result<PathBuf> {
        let folder = self.store.folder();
        let name = format::step_name(self.step);
        let (named, aside) = (folder.join(&name), folder.join(format!("{ASIDE}{name}")));
        self.write_manifest(shards, header, files)?;
        if last >= CommitStep::SetAside && named.exists() {
            rename(&named, &aside)?;
        }
        if last >= CommitStep::Named {
            rename(&self.path(), &named)?;
            sync_folder(folder)?;
        }
        if last >= CommitStep::Latest {
            self.store.write_pointer(format::LATEST, self.step)?;
        }
        if last >= CommitStep::Cleaned && aside.exists() {
            remove(&aside)?;
        }
        Ok(named)
    }

    fn write_manifest(
        &self,
        shards: Vec<Shard>,
        header: Header,
        files: &[(&str, &[u8])],
    ) -> Result<()> {
        let path = self.path();
        let header = Header {
            step: self.step,
            ..header
        };
        let incomplete = |damage| Error::IncompleteShards {
            step: self.step,
            damage: Box::new(damage),
        };
        let mut manifest = merge(shards, header).map_err(incomplete)?;
        for entry in &manifest.files {
            check_length(&path, entry).map_err(incomplete)?;
        }
        for &(name, content) in files {
            check_file_name(name)?;
            write_synced(&path.join(name), content)?;
            let (length, checksum) = (content.len() as u64, Checksum::of(content));
            manifest.files.push(FileEntry {
                name: name.to_owned(),
                length,
                checksum,
            });
        }
        manifest.files.sort_by(|a, b| a.name.cmp(&b.name));
        manifest.check().map_err(incomplete)?;
        write_synced(&path.join(format::MANIFEST), manifest.to_text().as_bytes())?;
        sync_folder(&path)
    }
}

/// The manifest of what all ranks have written.
fn merge(shards: Vec<Shard>, header: Header) -> Result<Manifest, Damage> {
    let mut files = Vec::new();
    let mut tensors: BTreeMap<(Kind, String), TensorEntry> = BTreeMap::new();
    for shard in shards {
        files.extend(shard.files);
        for mut tensor in shard.tensors {
            let key = (tensor.kind.clone(), tensor.name.clone());
            let Some(known) = tensors.get_mut(&key) else {
                tensors.insert(key, tensor);
                continue;
            };
            if (known.dtype, &known.shape) != (tensor.dtype, &tensor.shape) {
                let reason = format!(
                    "ranks disagree: {} {:?} and {} {:?}",
                    known.dtype, known.shape, tensor.dtype, tensor.shape
                );
                return Err(Damage {
                    file: format::MANIFEST.to_owned(),
                    tensor: Some(tensor.name),
                    problem: Problem::Malformed { reason },
                });
            }
            known.slices.append(&mut tensor.slices);
        }
    }
    let mut tensors: Vec<TensorEntry> = tensors.into_values().collect();
    for tensor in &mut tensors {
        tensor
            .slices
            .sort_by_cached_key(|slice| (slice.region(), slice.range));
    }
    Ok(Manifest {
        header,
        files,
        tensors,
    })
}
