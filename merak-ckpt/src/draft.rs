//! Writing a checkpoint under a temporary name, and giving it its own.

use crate::disk::{Lock, create_folders, remove, rename, sync_folder, write_synced};
use crate::error::{Damage, Problem, io_error};
use crate::file_check::check_length;
use crate::manifest::{FileEntry, Header, Manifest, TensorEntry, check_file_name};
use crate::shard::{self, Shard, ShardKind};
use crate::store::{ASIDE, DRAFT};
use crate::{Base, Checksum, Cut, Error, Kind, Piece, Result, Store, format};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A checkpoint that is being written, under a temporary name.
///
/// The crate page shows which rank calls what.
#[derive(Debug, Clone)]
pub struct Draft {
    store: Store,
    step: u64,
    /// The folder's final name.
    name: String,
    /// The base, which holds the tensors that are not written again.
    base: Option<Base>,
    /// Present on the rank that began the draft.
    folder: Option<Arc<DraftFolder>>,
}

/// The folder of a draft. Dropping it removes the folder, unless that has its final name, and those
/// around it that were made for it and are empty.
#[derive(Debug)]
struct DraftFolder {
    path: PathBuf,
    /// The folders around it that were made for it, innermost first.
    made: Vec<PathBuf>,
    is_named: AtomicBool,
    /// Shows other processes that the folder is being written.
    #[expect(
        dead_code,
        reason = "it ends when it is dropped, after the folder is removed"
    )]
    lock: Lock,
}

impl Drop for DraftFolder {
    fn drop(&mut self) {
        if *self.is_named.get_mut() {
            return;
        }
        if self.path.exists()
            && let Err(error) = remove(&self.path)
        {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "what a failed save has written could not be removed");
        }
        for folder in &self.made {
            // The system keeps one that holds something else.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// The operations that give a written draft its name, in order; a crash between any two loses no
/// checkpoint.
const NAMING: [fn(&Draft) -> Result<()>; 4] = [
    Draft::set_predecessor_aside,
    Draft::take_name,
    Draft::become_latest,
    Draft::remove_predecessor,
];

impl Store {
    /// Starts a checkpoint: removes what a crashed save has left, and makes an empty folder under a
    /// temporary name. One rank calls it and keeps the draft until the commit, since dropping it
    /// before removes the folder; the others call [`Store::draft`] afterwards.
    ///
    /// # Errors
    /// [`Error::InUse`] where this step is being saved already, [`Error::Io`] where the folder
    /// cannot be changed.
    pub fn begin(&self, step: u64) -> Result<Draft> {
        self.begin_draft(self.draft(step))
    }

    /// Makes the folder of a draft.
    pub(crate) fn begin_draft(&self, draft: Draft) -> Result<Draft> {
        let made = create_folders(self.folder())?;
        let _lock = self.lock()?;
        self.recover()?;
        let path = draft.path();
        fs::create_dir(&path).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => Error::InUse {
                path: path.clone(),
                holder: "another save".to_owned(),
            },
            _ => io_error("create", &path)(error),
        })?;
        let lock = Lock::of(&path)?;
        Ok(draft.begun(lock, made))
    }

    /// The checkpoint that [`Store::begin`] has started; touches nothing.
    pub fn draft(&self, step: u64) -> Draft {
        Draft::new(self.clone(), step)
    }
}

impl Draft {
    fn new(store: Store, step: u64) -> Self {
        Self {
            store,
            step,
            name: format::step_name(step),
            base: None,
            folder: None,
        }
    }

    /// The draft of a base.
    pub(crate) fn of_base(store: Store, number: u64, step: u64) -> Self {
        Self {
            name: format::base_name(number),
            ..Self::new(store, step)
        }
    }

    /// Sets the base, whose tensors the checkpoint has besides those that are written.
    #[must_use]
    pub fn with_base(self, base: Option<Base>) -> Self {
        Self { base, ..self }
    }

    /// The draft on the rank that made its folder.
    fn begun(self, lock: Lock, made: Vec<PathBuf>) -> Self {
        let folder = DraftFolder {
            path: self.path(),
            made,
            is_named: AtomicBool::new(false),
            lock,
        };
        Self {
            folder: Some(Arc::new(folder)),
            ..self
        }
    }

    /// The folder under its temporary name.
    pub fn path(&self) -> PathBuf {
        let name = &self.name;
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
    /// it), row-major, little-endian. Where several ranks hold a tensor, one of them writes it.
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

    /// Completes the checkpoint: writes `files` (name and content: `config.json` and the like) and
    /// the manifest, gives the folder its name, and makes `latest` name it (except for a base). One
    /// rank calls it with the shards of all ranks; returns the checkpoint's folder.
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
        self.write_manifest(shards, header, files)?;
        let _lock = self.store.lock()?;
        NAMING.iter().try_for_each(|step| step(self))?;
        Ok(self.named())
    }

    /// Removes the draft.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be removed.
    pub fn abandon(&self) -> Result<()> {
        remove(&self.path())
    }

    /// The folder under its own name.
    fn named(&self) -> PathBuf {
        self.store.folder().join(&self.name)
    }

    /// Where an older checkpoint of the same step goes while this one takes its name.
    fn aside(&self) -> PathBuf {
        let name = &self.name;
        self.store.folder().join(format!("{ASIDE}{name}"))
    }

    fn set_predecessor_aside(&self) -> Result<()> {
        let path = self.named();
        if path.is_dir() {
            return rename(&path, &self.aside());
        }
        if path.exists() {
            return Err(Error::AlreadyExists { path });
        }
        Ok(())
    }

    fn take_name(&self) -> Result<()> {
        rename(&self.path(), &self.named())?;
        if let Some(folder) = &self.folder {
            folder.is_named.store(true, Ordering::Relaxed);
        }
        sync_folder(self.store.folder())
    }

    fn become_latest(&self) -> Result<()> {
        if format::parse_base_name(&self.name).is_some() {
            return Ok(());
        }
        self.store.write_pointer(format::LATEST, self.step)
    }

    fn remove_predecessor(&self) -> Result<()> {
        if self.aside().exists() {
            remove(&self.aside())
        } else {
            Ok(())
        }
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
        manifest.base.clone_from(&self.base);
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
        let text = manifest.to_text();
        if text.len() as u64 > format::MAX_MANIFEST_BYTES {
            let problem = Problem::TooLarge {
                what: "bytes",
                found: text.len() as u64,
                limit: format::MAX_MANIFEST_BYTES,
            };
            return Err(incomplete(Damage::of_file(format::MANIFEST, problem)));
        }
        write_synced(&path.join(format::MANIFEST), text.as_bytes())?;
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
            if let Some(reason) = disagreement(known, &tensor) {
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
        base: None,
        files,
        tensors,
    })
}

/// The difference between two ranks' entries of one tensor.
fn disagreement(first: &TensorEntry, second: &TensorEntry) -> Option<String> {
    if (first.dtype, &first.shape) != (second.dtype, &second.shape) {
        return Some(format!(
            "ranks disagree: {} {:?} and {} {:?}",
            first.dtype, first.shape, second.dtype, second.shape
        ));
    }
    let text = |cut: &Option<Cut>| {
        let cut = cut.as_ref();
        cut.map_or_else(|| "no cut".to_owned(), ToString::to_string)
    };
    (first.cut != second.cut).then(|| {
        let (first, second) = (text(&first.cut), text(&second.cut));
        format!("ranks disagree: {first} and {second}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Checkpoint, DType, Layout};
    use std::fs;

    fn write(store: &Store, step: u64, value: u8) -> (Draft, Vec<Shard>) {
        let draft = store.begin(step).unwrap();
        let layout = Layout::whole(&[4]);
        let piece = Piece::parameter("w", DType::U8, &layout);
        let shard = draft
            .write_shard(ShardKind::Model, 0, &[(piece, &[value; 4])])
            .unwrap();
        (draft, vec![shard])
    }

    /// Ends like a killed process: locks end, files stay.
    fn crash(draft: Draft) {
        let folder = Arc::into_inner(draft.folder.unwrap()).unwrap();
        folder.is_named.store(true, Ordering::Relaxed);
    }

    /// The values that a new run finds in the latest and in the newest checkpoint.
    fn found(store: &Store) -> (u8, u8) {
        let latest = Checkpoint::open(store.folder()).unwrap();
        let newest = Checkpoint::open_newest(store.folder()).unwrap().unwrap();
        let value =
            |checkpoint: Checkpoint| checkpoint.read_whole(&Kind::Parameter, "w").unwrap()[0];
        (value(latest), value(newest))
    }

    #[test]
    fn a_crash_between_any_two_operations_leaves_a_good_checkpoint() {
        for (step, replaces) in [(2, false), (1, true)] {
            for done in 0..=NAMING.len() {
                let folder = tempfile::tempdir().unwrap();
                let store = Store::new(folder.path());
                let (draft, shards) = write(&store, 1, 10);
                draft.commit(shards, Header::default(), &[]).unwrap();
                let (draft, shards) = write(&store, step, 20);
                draft
                    .write_manifest(shards, Header::default(), &[("config.json", b"{}")])
                    .unwrap();
                for operation in &NAMING[..done] {
                    operation(&draft).unwrap();
                }
                let new = if done >= 2 { 20 } else { 10 };
                let latest = if replaces || done >= 3 { new } else { 10 };
                assert_eq!(
                    found(&store),
                    (latest, new),
                    "step {step}, {done} operations done"
                );

                // The next save removes the leftovers and works as usual.
                crash(draft);
                let (draft, shards) = write(&store, 3, 30);
                draft.commit(shards, Header::default(), &[]).unwrap();
                assert_eq!(found(&store), (30, 30));
                let hidden =
                    |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with('.');
                let left = fs::read_dir(folder.path())
                    .unwrap()
                    .filter(|e| hidden(e.as_ref().unwrap()));
                assert_eq!(left.count(), 0, "step {step}, {done} operations done");
                let survivor = Checkpoint::open(store.path_of(1)).unwrap();
                survivor.read_whole(&Kind::Parameter, "w").unwrap();
            }
        }
    }

    #[test]
    fn a_crash_while_files_are_written_leaves_the_older_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let (draft, shards) = write(&store, 1, 10);
        draft.commit(shards, Header::default(), &[]).unwrap();
        let (draft, shards) = write(&store, 2, 20);
        draft
            .write_manifest(shards, Header::default(), &[])
            .unwrap();
        let contents = ["model-00000.safetensors", format::MANIFEST].map(|name| {
            let path = draft.path().join(name);
            let content = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            (path, content)
        });
        for (path, content) in contents {
            for length in 0..=content.len() {
                fs::write(&path, &content[..length]).unwrap();
                assert_eq!(found(&store), (10, 10));
            }
        }
    }

    #[test]
    fn a_save_that_fails_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let (draft, shards) = write(&store, 1, 10);
        // Other ranks hold handles of the same draft.
        let other = store.draft(1);
        drop(draft.clone());
        assert!(other.path().exists());
        let failed = draft.commit(Vec::new(), Header::default(), &[("../up", b"")]);
        assert!(failed.is_err());
        drop((draft, shards));
        assert!(!other.path().exists());
        let (draft, shards) = write(&store, 1, 20);
        draft
            .commit(shards.clone(), Header::default(), &[])
            .unwrap();
        // A committed draft leaves alone what another save writes under the same name.
        let next = store.begin(1).unwrap();
        drop(draft);
        assert!(next.path().exists());
        drop(next);
        assert_eq!(found(&store), (20, 20));
    }

    #[test]
    fn shards_that_do_not_fit_together_are_not_committed() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let mut rank = 0;
        let mut shard = |draft: &Draft, region: (usize, usize), dtype: DType| {
            rank += 1;
            let layout = Layout::shard(&[4], 0, region.0..region.1).unwrap();
            let bytes = vec![0; layout.num_local_elements() * dtype.size_bytes()];
            let piece = Piece::parameter("w", dtype, &layout);
            draft
                .write_shard(ShardKind::Model, rank, &[(piece, &bytes)])
                .unwrap()
        };
        let draft = store.begin(1).unwrap();
        let halves = [
            shard(&draft, (0, 2), DType::U8),
            shard(&draft, (2, 4), DType::U8),
        ];
        let middle = shard(&draft, (1, 3), DType::U8);
        let other_type = shard(&draft, (2, 4), DType::I8);
        let message = |shards: &[&Shard]| {
            let shards = shards.iter().copied().cloned().collect();
            draft
                .commit(shards, Header::default(), &[])
                .unwrap_err()
                .to_string()
        };
        let messages = [
            message(&[&halves[0]]),
            message(&[&halves[0], &halves[1], &middle]),
            message(&[&halves[0], &halves[0]]),
            message(&[&halves[0], &other_type]),
        ];
        insta::assert_snapshot!(messages.join("\n"), @"
        the shards of step 1 make no complete checkpoint: manifest.json, tensor `w`: the slices hold 2 of 4 elements
        the shards of step 1 make no complete checkpoint: manifest.json, tensor `w`: slices [0:2] and [1:3] overlap
        the shards of step 1 make no complete checkpoint: model-00001.safetensors: files are not in order, or not unique
        the shards of step 1 make no complete checkpoint: manifest.json, tensor `w`: ranks disagree: u8 [4] and i8 [4]
        ");
        assert!(store.steps().unwrap().is_empty());
        draft
            .commit(halves.to_vec(), Header::default(), &[])
            .unwrap();
        assert_eq!(store.steps().unwrap(), [1]);
    }
}
