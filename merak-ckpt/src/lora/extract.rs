//! Writing the adapter of a checkpoint as a PEFT folder.

use super::LoraConfig;
use crate::disk::{read_json, sync_folder, write_synced};
use crate::draft_folder::DraftBeside;
use crate::error::{foreign, io_error};
use crate::factor_name::{FactorName, PREFIX};
use crate::family::family_of;
use crate::format::CONFIG;
use crate::plan::{PlannedFile, PlannedPiece, natural_order};
use crate::recognize::ADAPTER_CONFIG;
use crate::rewrite::{Budget, DEFAULT_MAX_MEMORY, write_planned};
use crate::{Checkpoint, Error, Kind, Layout, Result, ShardKind, TensorEntry};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Name of the file of an adapter's tensors.
const WEIGHTS: &str = "adapter_model.safetensors";

/// The adapter that a folder itself holds; others have subfolders.
const DEFAULT: &str = "default";

/// Writes the adapters of a checkpoint as a PEFT folder: `adapter_config.json` and
/// `adapter_model.safetensors`, for an adapter of another name than `default` in a subfolder of
/// that name. Factors are whole, whatever topology wrote them; so are the biases and modules that
/// were trained beside them.
///
/// `folder` must not exist, or be empty.
///
/// # Errors
/// [`Error::AlreadyExists`] for a folder with content, [`Error::InUse`] for one that another
/// process is writing, [`Error::Foreign`] for a checkpoint without an adapter, [`Error::Damaged`]
/// for a damaged one.
pub fn extract_lora(source: &Checkpoint, folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    let is_taken =
        fs::read_dir(folder).map_or(folder.exists(), |mut entries| entries.next().is_some());
    if is_taken {
        return Err(Error::AlreadyExists {
            path: folder.to_owned(),
        });
    }
    write(source, folder)
}

/// Writes as [`extract_lora`] does, and replaces these adapters in the folder; others stay.
///
/// # Errors
/// As [`extract_lora`], except that the folder may have content.
pub fn replace_lora(source: &Checkpoint, folder: impl AsRef<Path>) -> Result<()> {
    write(source, folder.as_ref())
}

fn write(source: &Checkpoint, folder: &Path) -> Result<()> {
    let adapters = adapters(source)?;
    let draft = DraftBeside::begin_replacing(folder)?;
    for (name, tensors) in &adapters {
        write_adapter(source, &place_of(draft.path(), name), tensors)?;
    }
    if folder.exists() {
        keep_others(folder, draft.path())?;
    }
    draft.replace()
}

/// Copies the other content of a folder.
fn keep_others(folder: &Path, draft: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(io_error("read", folder))? {
        let name = entry.map_err(io_error("read", folder))?.file_name();
        let (from, to) = (folder.join(&name), draft.join(&name));
        if to.symlink_metadata().is_ok() {
            continue;
        }
        let kind = kind_of(&from)?;
        if kind.is_dir() {
            fs::create_dir(&to).map_err(io_error("create", &to))?;
            keep_others(&from, &to)?;
        } else if kind.is_symlink() {
            let target = fs::read_link(&from).map_err(io_error("read", &from))?;
            symlink(target, &to).map_err(io_error("create", &to))?;
        } else {
            fs::copy(&from, &to).map_err(io_error("copy", &from))?;
            let copied = fs::File::open(&to).and_then(|copy| copy.sync_all());
            copied.map_err(io_error("sync", &to))?;
        }
    }
    sync_folder(draft)
}

/// The type of an entry that is to be kept: a folder, a file or a link.
fn kind_of(path: &Path) -> Result<fs::FileType> {
    let kind = path.symlink_metadata().map_err(io_error("look at", path))?;
    let kind = kind.file_type();
    if kind.is_dir() || kind.is_symlink() || kind.is_file() {
        return Ok(kind);
    }
    Err(foreign(
        path,
        "it is neither a file nor a folder nor a link, and cannot be kept: move it away",
    ))
}

/// Whether a folder has an adapter of this name, which [`replace_lora`] would replace. Changes
/// nothing.
///
/// # Errors
/// [`Error::Foreign`] for what [`replace_lora`] cannot keep: something else than a folder, or a
/// pipe or device in it.
pub fn has_lora(folder: impl AsRef<Path>, name: &str) -> Result<bool> {
    let folder = folder.as_ref();
    match fs::metadata(folder) {
        Ok(found) if found.is_dir() => check_others(folder)?,
        Ok(_) => return Err(foreign(folder, "it is no folder: move it away")),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(io_error("look at", folder)(error)),
    }
    let own = place_of(folder, name);
    Ok([ADAPTER_CONFIG, WEIGHTS]
        .iter()
        .any(|file| own.join(file).exists()))
}

fn check_others(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(io_error("read", folder))? {
        let path = entry.map_err(io_error("read", folder))?.path();
        if kind_of(&path)?.is_dir() {
            check_others(&path)?;
        }
    }
    Ok(())
}

/// Where a folder has the adapter of a name.
fn place_of(folder: &Path, name: &str) -> PathBuf {
    if name == DEFAULT {
        folder.to_owned()
    } else {
        folder.join(name)
    }
}

/// The names that tensors have in PEFT's file, with those that they have in the checkpoint.
type Tensors = BTreeMap<String, String>;

/// Whether a checkpoint holds an adapter beside its base.
pub(crate) fn has_adapter(source: &Checkpoint) -> bool {
    let mut parameters = source.manifest().tensors_of(&Kind::Parameter);
    parameters.any(TensorEntry::is_of_adapter)
}

/// The one adapter of a checkpoint, under the names of PEFT.
pub(super) fn own_adapter(source: &Checkpoint) -> Result<Checkpoint> {
    let adapters = adapters(source)?;
    if adapters.len() > 1 {
        let names: Vec<_> = adapters.keys().map(|name| format!("`{name}`")).collect();
        let reason = format!(
            "it has the adapters {}: extract them, and merge one of them",
            names.join(", ")
        );
        return Err(foreign(source.path(), reason));
    }
    let tensors = adapters.into_values().next().unwrap_or_default();
    source.renamed(&tensors)
}

/// The tensors of each adapter.
fn adapters(source: &Checkpoint) -> Result<BTreeMap<String, Tensors>> {
    let mut adapters: BTreeMap<String, Tensors> = BTreeMap::new();
    for (name, factor) in factors(source) {
        let tensors = adapters.entry(factor.adapter.to_owned()).or_default();
        tensors.insert(factor.in_file(), name.to_owned());
    }
    if adapters.is_empty() {
        return Err(foreign(source.path(), "it has no adapter"));
    }
    let trained = Trained::of(source)?;
    let model = read_json(&source.path().join(CONFIG)).unwrap_or_default();
    let family = family_of(&model);
    for name in trained.wholes(source) {
        // PEFT wraps a layer that it adapts.
        let key = match name.strip_suffix(".bias") {
            Some(module) if trained.modules.contains(module) => {
                format!("{PREFIX}{module}.base_layer.bias")
            }
            _ => format!("{PREFIX}{name}"),
        };
        // Two names of one bias belong to the module that is saved.
        let twin = family.and_then(|family| family.other_name(&model, name));
        let twin = twin.filter(|twin| trained.has(twin));
        let keys = [Some(key), twin.map(|twin| format!("{PREFIX}{twin}"))];
        for tensors in adapters.values_mut() {
            let keys = keys.iter().flatten();
            tensors.extend(keys.map(|key| (key.clone(), name.to_owned())));
        }
    }
    Ok(adapters)
}

/// The factors of a checkpoint, with their names.
fn factors(source: &Checkpoint) -> impl Iterator<Item = (&str, FactorName<'_>)> {
    let parameters = source.manifest().tensors_of(&Kind::Parameter);
    parameters.filter_map(|entry| Some((&*entry.name, FactorName::parse(&entry.name)?)))
}

/// What a checkpoint with an adapter trained.
pub(super) struct Trained<'a> {
    pub(super) config: LoraConfig,
    /// The layers that have factors.
    modules: BTreeSet<&'a str>,
}

impl<'a> Trained<'a> {
    pub(super) fn of(source: &'a Checkpoint) -> Result<Self> {
        Ok(Self {
            config: LoraConfig::read(&source.path().join(ADAPTER_CONFIG))?,
            modules: factors(source).map(|(_, factor)| factor.layer).collect(),
        })
    }

    /// Whether a parameter of the model was trained itself.
    fn has(&self, param: &str) -> bool {
        let is_adapted = |module: &str| self.modules.contains(module);
        self.config.trains_whole(param, is_adapted)
    }

    /// The parameters of the model that were trained themselves, beside the factors.
    pub(super) fn wholes(&self, source: &'a Checkpoint) -> impl Iterator<Item = &'a str> {
        let parameters = source.manifest().tensors_of(&Kind::Parameter);
        let own = parameters.filter(|entry| !entry.is_of_adapter() && self.has(&entry.name));
        own.map(|entry| entry.name.as_str())
    }
}

fn write_adapter(source: &Checkpoint, folder: &Path, names: &Tensors) -> Result<()> {
    fs::create_dir_all(folder).map_err(io_error("create", folder))?;
    let values = source.renamed(names)?;
    let mut tensors = values.manifest().tensors.clone();
    tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
    let whole = |(tensor, entry): (usize, &TensorEntry)| PlannedPiece {
        tensor,
        layout: Layout::whole(&entry.shape),
        range: None,
    };
    let file = PlannedFile {
        kind: ShardKind::Model,
        rank: 0,
        pieces: tensors.iter().enumerate().map(whole).collect(),
    };
    let files = [(WEIGHTS.to_owned(), &file)];
    write_planned(
        &values,
        &tensors,
        &files,
        folder,
        Budget::new(DEFAULT_MAX_MEMORY)?,
    )?;
    let path: PathBuf = folder.join(ADAPTER_CONFIG);
    let config = LoraConfig::read(&source.path().join(ADAPTER_CONFIG))?;
    // As PEFT saves it: a script that loads the adapter to train says so.
    let config = config.with("inference_mode", json!(true));
    let text = config.expect("a flag is legal").to_json();
    write_synced(&path, format!("{text:#}\n").as_bytes())?;
    sync_folder(folder)
}
