//! Rewriting a checkpoint for another topology.

use crate::degrees;
use crate::disk::read_json;
use crate::error::WithCauses;
use crate::format::CONFIG;
use crate::plan::plan;
use crate::rewrite::{Budget, DEFAULT_MAX_MEMORY, copy_other_files, write_planned};
use crate::{
    Checkpoint, Draft, Error, Header, Kind, Manifest, Result, Shard, Stages, Store, Topology,
    format,
};
use std::path::{Path, PathBuf};

/// The topology to rewrite a checkpoint for, and the means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReshardOptions {
    /// The topology: all degrees are 1 or more, the ZeRO stage at most 3.
    pub topology: Topology,
    /// Which stage holds which tensor.
    pub stages: Stages,
    /// Bytes of tensors in memory at a time, at least 4 MiB.
    pub max_memory: usize,
}

impl Default for ReshardOptions {
    /// One rank, [`DEFAULT_MAX_MEMORY`].
    fn default() -> Self {
        Self {
            topology: Topology::default(),
            stages: Stages::Even,
            max_memory: DEFAULT_MAX_MEMORY,
        }
    }
}

/// Rewrites a checkpoint as ranks of another topology would have written it: returns the folder
/// of the new one, which holds the same tensors, state and files.
///
/// Readers need no resharding, since any topology reads what any other wrote. It makes files that
/// fit a cluster: a file for each rank on its own disk, or one for all.
///
/// `destination` is an output folder, a `checkpoints` folder, or the new checkpoint's own folder
/// (`step-…`, with the step of the source). The checkpoints that it has already, if any, must be
/// earlier ones of the same run that were resharded too: `latest` there names the new one. Each
/// element is written by one rank:
///
/// - its **stage** is that of [`ReshardOptions::stages`];
/// - along **tp** a tensor is cut by its [`Cut`](crate::Cut), which the writer of the source noted
///   in the manifest; a tensor without one is written whole by the first rank;
/// - along **dp**, ZeRO 1 and 2 divide the optimizer state, ZeRO 3 the parameters as well: the
///   local tensors, in order of their names, are one flat sequence that is dealt out in even
///   ranges. Otherwise the first replica writes everything.
///
/// Degrees that no run of the model has, such as a `tp` that does not divide its attention heads,
/// and stages without tensors get a warning in the log.
///
/// So the result depends on the tensors, the notes and the options only, not on the topology of the
/// source: from one rank's checkpoint there and back gives the same bytes.
///
/// # Errors
/// [`Error::InvalidOption`] for impossible degrees or stages, [`Error::InvalidName`] for a
/// destination in the source, [`Error::AlreadyExists`] where the destination has a checkpoint of
/// this step, [`Error::OtherCheckpoints`] where it has others than the said ones,
/// [`Error::Damaged`] where the source is damaged. Nothing is left at the destination
/// then.
///
/// # Examples
/// ```
/// use merak_ckpt::{
///     Checkpoint, Cut, DType, Header, Kind, Piece, ReshardOptions, ShardKind, Store, Topology,
///     reshard,
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = tempfile::tempdir()?;
/// let store = Store::in_output_dir(folder.path().join("one"));
/// let layout = Cut::new(1, [3]).layout(&[2, 3], 0, 1)?;
/// let piece = Piece::parameter("w", DType::U8, &layout);
/// let draft = store.begin(7)?;
/// let shard = draft.write_shard(ShardKind::Model, 0, &[(piece, &[0, 1, 2, 3, 4, 5])])?;
/// let one = draft.commit(vec![shard], Header::default(), &[])?;
///
/// let options = ReshardOptions {
///     topology: Topology { tp: 3, ..Topology::default() },
///     ..ReshardOptions::default()
/// };
/// let three = reshard(&Checkpoint::open(one)?, folder.path().join("three"), &options)?;
/// let three = Checkpoint::open(three)?;
/// assert_eq!(three.manifest().files.len(), 3);
/// assert_eq!(three.read_whole(&Kind::Parameter, "w")?, [0, 1, 2, 3, 4, 5]);
/// # Ok(())
/// # }
/// ```
pub fn reshard(
    source: &Checkpoint,
    destination: impl AsRef<Path>,
    options: &ReshardOptions,
) -> Result<PathBuf> {
    let budget = Budget::new(options.max_memory)?;
    check_outside(source, destination.as_ref())?;
    let tensors = &source.manifest().tensors;
    let planned = plan(tensors, options.topology, &options.stages)?;
    let config = read_json(&source.path().join(CONFIG)).ok();
    degrees::warn(config.as_ref(), tensors, options.topology, &planned);
    let files: Vec<_> = planned
        .iter()
        .map(|file| (file.kind.file_name(file.rank), file))
        .collect();
    let header = &source.manifest().header;
    let draft = start(destination.as_ref(), header.step, Some(source))?;
    finish(&draft, || {
        let folder = draft.path();
        let mut shards = write_planned(source, tensors, &files, &folder, budget)?;
        shards.push(Shard {
            files: copy_other_files(source, &folder, |_| true)?,
            tensors: Vec::new(),
        });
        let header = Header {
            topology: options.topology,
            ..header.clone()
        };
        Ok((shards, header))
    })
}

/// Refuses a destination in the source checkpoint's folder, which must stay as it was saved.
pub(crate) fn check_outside(source: &Checkpoint, destination: &Path) -> Result<()> {
    let source = source.path().canonicalize();
    let absolute = std::path::absolute(destination);
    let (Ok(source), Ok(absolute)) = (source, absolute) else {
        return Ok(());
    };
    // The nearest existing folder around it, with links followed.
    let mut around = absolute.ancestors().skip(1);
    let existing = around.find_map(|path| path.canonicalize().ok());
    if existing.is_some_and(|existing| existing.starts_with(&source)) {
        return Err(Error::InvalidName {
            what: "destination",
            name: destination.display().to_string(),
            rule: "expected a folder outside the checkpoint that is read",
        });
    }
    Ok(())
}

/// Starts the checkpoint of a step at a destination that a user has named. With `source`, whose
/// tensors it will have, there may be earlier checkpoints of the same run, else none.
pub(crate) fn start(destination: &Path, step: u64, source: Option<&Checkpoint>) -> Result<Draft> {
    let store = store_at(destination, step)?;
    let path = store.path_of(step);
    if path.exists() {
        return Err(Error::AlreadyExists { path });
    }
    check_others(&store, step, source)?;
    store.begin(step)
}

/// The store that a destination of the checkpoint of a step is in.
fn store_at(destination: &Path, step: u64) -> Result<Store> {
    let name = destination.file_name().and_then(|name| name.to_str());
    match name.map(|name| (name, format::parse_step_name(name))) {
        Some((_, Some(named))) if named == step => {
            Ok(Store::new(destination.parent().unwrap_or(Path::new(""))))
        }
        Some((name, Some(_))) => Err(Error::InvalidName {
            what: "destination of this checkpoint",
            name: name.to_owned(),
            rule: "expected the name of its own step, or an output folder",
        }),
        Some((format::CHECKPOINTS, _)) => Ok(Store::new(destination)),
        _ => Ok(Store::in_output_dir(destination)),
    }
}

/// Refuses a store whose checkpoints a new one would take the place of: what resumes or reads
/// there would go on with another model.
fn check_others(store: &Store, step: u64, source: Option<&Checkpoint>) -> Result<()> {
    // What is no folder is refused where one is made.
    let steps = if store.folder().is_dir() {
        store.steps()?
    } else {
        Vec::new()
    };
    let Some(&last) = steps.last() else {
        return Ok(());
    };
    let is_earlier = |source: &Checkpoint| {
        last < step
            && !is_of_run(store)
            && steps
                .iter()
                .all(|&other| is_same_run(&store.path_of(other), source))
    };
    if source.is_some_and(is_earlier) {
        return Ok(());
    }
    Err(Error::OtherCheckpoints {
        path: store.folder().to_owned(),
        last: format::step_name(last),
        takes_earlier: source.is_some(),
    })
}

/// Whether a run has written into the output folder that a store is in.
fn is_of_run(store: &Store) -> bool {
    let is_in_output_dir = store.folder().ends_with(format::CHECKPOINTS);
    let beside = store.folder().with_file_name(format::RUN_CONFIG);
    is_in_output_dir && beside.exists()
}

/// Whether the checkpoint in a folder is of the run of another one, as far as they tell: model,
/// tensors, seeds and data are the same.
fn is_same_run(folder: &Path, source: &Checkpoint) -> bool {
    let Ok(other) = Checkpoint::load(folder) else {
        return false;
    };
    let (own, other) = (source.manifest(), other.manifest());
    let lasting = |manifest: &Manifest| {
        let state = &manifest.header.state;
        ["seed", "data_seed", "data"].map(|name| state.get(name).cloned())
    };
    let shapes = |manifest: &Manifest| -> Vec<(String, Vec<usize>)> {
        let parameters = manifest.tensors_of(&Kind::Parameter);
        parameters
            .map(|entry| (entry.name.clone(), entry.shape.clone()))
            .collect()
    };
    own.header.model == other.header.model
        && lasting(own) == lasting(other)
        && shapes(own) == shapes(other)
}

/// Commits what `write` has written, or removes the draft.
pub(crate) fn finish(
    draft: &Draft,
    write: impl FnOnce() -> Result<(Vec<Shard>, Header)>,
) -> Result<PathBuf> {
    let outcome = write().and_then(|(shards, header)| draft.commit(shards, header, &[]));
    if outcome.is_err()
        && let Err(error) = draft.abandon()
    {
        tracing::warn!(error = %WithCauses(&error), "an unfinished checkpoint could not be removed");
    }
    outcome
}
