//! Making a checkpoint of a Hugging Face folder.

use super::{HfFolder, check_float, completeness, nan::Watched};
use crate::degrees;
use crate::family::family_of;
use crate::format::CONFIG;
use crate::manifest::FileEntry;
use crate::plan::plan;
use crate::reshard::{finish, start};
use crate::rewrite::{Budget, DEFAULT_MAX_MEMORY, Values, copy_file, write_file, write_planned};
use crate::{DType, Header, Kind, Result, Shard, Stages, TensorEntry, Topology};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// How a Hugging Face folder becomes a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportOptions {
    /// The topology to write for.
    pub topology: Topology,
    /// Which stage holds which tensor.
    pub stages: Stages,
    /// Floating-point type to convert weights to; `None` keeps theirs.
    pub dtype: Option<DType>,
    /// Bytes of tensors in memory at a time, at least 4 MiB.
    pub max_memory: usize,
}

impl ImportOptions {
    /// Checks the limit of memory and the type of weights, which an import needs before it reads.
    ///
    /// # Errors
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) for less than 4 MiB, and for a type
    /// that is no floating-point type.
    pub fn check(&self) -> Result<()> {
        Budget::new(self.max_memory)?;
        check_float(self.dtype)
    }
}

impl Default for ImportOptions {
    /// One rank, `f32`, [`DEFAULT_MAX_MEMORY`].
    fn default() -> Self {
        Self {
            topology: Topology::default(),
            stages: Stages::Even,
            dtype: Some(DType::F32),
            max_memory: DEFAULT_MAX_MEMORY,
        }
    }
}

/// Makes a checkpoint of step 0 from a Hugging Face folder: weights under the folder's names, its
/// `config.json` (see [`HfFolder::correct`]), tokenizer and the like, no optimizer state. Returns
/// the checkpoint's folder.
///
/// `destination` and the topology are those of [`reshard`](crate::reshard), but there must be no
/// checkpoint yet; tensor parallelism cuts by the rules of the configuration's `model_type` where
/// it is one of those that merak-trace knows by names of Hugging Face. The state of the run is
/// `null`, the model's description `{"model_type": …, "source": "hugging_face"}`.
///
/// # Errors
/// [`Error::Foreign`](crate::Error::Foreign) where the family is known and the weights lack a
/// parameter that every model of it has, or have one in another shape than `config.json` states
/// (tensors of layers that it does not count are left out with a warning),
/// [`Error::InvalidOption`](crate::Error::InvalidOption) for an impossible topology,
/// [`Error::AlreadyExists`](crate::Error::AlreadyExists) where the destination has a checkpoint of
/// step 0, [`Error::OtherCheckpoints`](crate::Error::OtherCheckpoints) where it has any other,
/// [`Error::Io`](crate::Error::Io) where the disk refuses.
pub fn import_hf(
    source: &HfFolder,
    destination: impl AsRef<Path>,
    options: &ImportOptions,
) -> Result<PathBuf> {
    let tensors = source.tensors().to_vec();
    import_folder(
        source,
        &source.weights,
        tensors,
        destination.as_ref(),
        options,
    )
}

/// Makes a checkpoint of these tensors, whose values may differ from the folder's.
pub(super) fn import_folder(
    source: &HfFolder,
    values: &dyn Values,
    tensors: Vec<TensorEntry>,
    destination: &Path,
    options: &ImportOptions,
) -> Result<PathBuf> {
    let mut config = source.config().clone();
    let is_corrected = source.correct(&mut config);
    let path = |name| source.path().join(name);
    let companions = source
        .companions()
        .into_iter()
        .filter(|&name| name != CONFIG);
    let companions: Vec<_> = companions.map(path).collect();
    let model_type = config.get("model_type");
    let origin = Origin {
        folder: source.path(),
        config_file: (!is_corrected).then(|| path(CONFIG)),
        companions: &companions,
        header: Header {
            topology: options.topology,
            model: json!({"model_type": model_type, "source": "hugging_face"}),
            ..Header::default()
        },
        config: &config,
    };
    warn(source);
    import(&origin, values, tensors, destination, options)
}

/// What a checkpoint is made of besides tensors.
pub(super) struct Origin<'a> {
    /// Where the tensors are from.
    pub(super) folder: &'a Path,
    pub(super) config: &'a Value,
    /// The file whose bytes are this configuration, where there is one.
    pub(super) config_file: Option<PathBuf>,
    /// Other files that belong to the model.
    pub(super) companions: &'a [PathBuf],
    pub(super) header: Header,
}

/// Makes a checkpoint of these tensors.
pub(super) fn import(
    origin: &Origin<'_>,
    values: &dyn Values,
    tensors: Vec<TensorEntry>,
    destination: &Path,
    options: &ImportOptions,
) -> Result<PathBuf> {
    let budget = Budget::new(options.max_memory)?;
    check_float(options.dtype)?;
    let mut tensors = completeness::check(origin.folder, origin.config, tensors)?;
    let is_weight =
        |tensor: &&mut TensorEntry| tensor.dtype.is_float() && tensor.kind == Kind::Parameter;
    for tensor in tensors.iter_mut().filter(is_weight) {
        tensor.dtype = options.dtype.unwrap_or(tensor.dtype);
    }
    let planned = plan(&tensors, options.topology, &options.stages)?;
    degrees::warn(Some(origin.config), &tensors, options.topology, &planned);
    let files: Vec<_> = planned
        .iter()
        .map(|file| (file.kind.file_name(file.rank), file))
        .collect();
    let draft = start(destination, origin.header.step, None)?;
    finish(&draft, || {
        let folder = draft.path();
        let watched = Watched::new(values);
        let mut shards = write_planned(&watched, &tensors, &files, &folder, budget)?;
        watched.warn();
        let mut files = Vec::with_capacity(origin.companions.len() + 1);
        files.push(if let Some(file) = &origin.config_file {
            copy_beside(file, &folder)?
        } else {
            let text = format!("{:#}\n", origin.config);
            write_file(text.as_bytes(), origin.folder, &folder, CONFIG)?
        });
        for file in origin.companions {
            files.push(copy_beside(file, &folder)?);
        }
        shards.push(Shard {
            files,
            tensors: Vec::new(),
        });
        Ok((shards, origin.header.clone()))
    })
}

/// Copies a file into a folder.
fn copy_beside(file: &Path, to: &Path) -> Result<FileEntry> {
    let name = file
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    copy_file(file.parent().unwrap_or(Path::new("")), to, name)
}

/// Warns about what a checkpoint of this folder leaves out.
fn warn(source: &HfFolder) {
    let config = source.config();
    if source.path().join("additional_chat_templates").is_dir() {
        tracing::warn!("additional_chat_templates is left out: a checkpoint has no folders");
    }
    let Some(family) = family_of(config) else {
        let model_type = config.get("model_type").and_then(Value::as_str);
        tracing::warn!(
            model_type,
            "tensors of this type of model are not cut over tp"
        );
        return;
    };
    let mut left_out = source.left_out().iter();
    if let Some(name) = left_out.find(|name| family.is_unused(config, name)) {
        tracing::warn!(
            name,
            "left out, with what else the model of config.json has no use for"
        );
    }
}
