//! Folders of Hugging Face models: weights under global names beside a `config.json`.

mod archive;
mod completeness;
mod dcp;
mod import;
mod merak;
mod nan;
mod pickle;
mod safetensors_file;
mod torch;
mod untie;
mod write;

pub use dcp::import_dcp;
pub use import::{ImportOptions, import_hf};
pub use merak::import_merak;
pub use safetensors_file::stored_tensors;
pub use write::ExportOptions;
use write::is_same;
pub(crate) use write::{Content, exported, make};

use crate::crc32::Stretch;
use crate::disk::{not_read, open_regular, read_json};
use crate::error::{foreign, io_error};
use crate::family::{self, Family, set_tie};
use crate::format::CONFIG;
use crate::manifest::{FileEntry, check_tensor_name};
use crate::recognize::{self, what_it_is, what_of_others};
use crate::rewrite::DEFAULT_MAX_MEMORY;
use crate::weight_files::{FileKind, WeightFile, has_weights, weight_files};
use crate::{
    Checkpoint, Checksum, DType, Error, Header, Kind, Manifest, Piece, Result, SliceEntry,
    StoredTensor, TensorEntry, format, path_hint,
};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Files beside the weights that belong to the model.
const COMPANIONS: [&str; 18] = [
    CONFIG,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
];

/// An open folder of a Hugging Face model, from which any rank reads its slices.
///
/// The weights are, in this order of preference, `model.safetensors`, the files of
/// `model.safetensors.index.json`, `pytorch_model.bin`, the files of
/// `pytorch_model.bin.index.json`. The last two are pickles: they are read by an interpreter that
/// knows tensors and plain containers, runs nothing, and refuses everything else by name.
///
/// A `pytorch_model.bin` since PyTorch 1.6 is a zip archive with a CRC32 for each storage, which
/// torch does not check. Here it is checked while a storage is read: once all of its bytes have
/// passed through this handle, in parts of any order. An import, and the merging of an adapter,
/// read what no tensor wanted of such a storage at their end, so that they check each storage that
/// they touch. Not checked are a storage of which a caller of [`HfFolder::read_as`] reads only some
/// bytes, as a rank of several under tensor parallelism does, and what has no checksums: files of
/// before 1.6, archives that `torch.save` wrote without computing any, and safetensors.
///
/// Names are those of the model with its head: where a folder holds the bare model (`wte.weight`),
/// the prefix of its `model_type` is added (`transformer.wte.weight`). Causal masks and other
/// buffers that models compute themselves are left out. So is a head that the configuration ties to
/// the embedding, if the two are equal. Where both are there and differ, the configuration is wrong
/// (version 5 of `transformers` saves such a one for T5 1.1), and they stay apart, as when
/// `transformers` loads such a folder.
#[derive(Debug)]
pub struct HfFolder {
    /// The weights as slices of files, without checksums.
    weights: Checkpoint,
    config: Value,
    /// Whether head and embedding differ though `config.json` ties them.
    is_untied: bool,
    left_out: Vec<String>,
}

/// The weights of a folder, as its files have them.
#[derive(Default)]
struct Stored {
    files: Vec<FileEntry>,
    /// Each tensor with the name of its file.
    tensors: Vec<(String, StoredTensor)>,
    /// The parts of archives that have checksums, by file.
    stretches: BTreeMap<String, Vec<Stretch>>,
}

impl Stored {
    /// Reads the headers of files; the table of a pickle takes `max_memory` bytes at most.
    fn read(folder: &Path, files: Vec<WeightFile>, max_memory: usize) -> Result<Self> {
        let mut stored = Self::default();
        for (name, kind, wanted) in files {
            let file = folder.join(&name);
            let mut tensors = match kind {
                FileKind::Safetensors => stored_tensors(&file)?,
                FileKind::Torch => {
                    let (tensors, stretches) = torch::tensors(&file, max_memory)?;
                    stored.stretches.insert(name.clone(), stretches);
                    tensors
                }
            };
            if let Some(wanted) = wanted {
                tensors.retain(|tensor| wanted.contains(&tensor.name));
                let there: BTreeSet<_> = tensors.iter().map(|t| t.name.as_str()).collect();
                let missing = wanted.iter().find(|name| !there.contains(name.as_str()));
                if let Some(missing) = missing {
                    let reason = format!("it lacks tensor `{missing}` of the index");
                    return Err(foreign(&file, reason));
                }
            }
            stored.files.push(file_entry(folder, &file)?);
            let tensors = tensors.into_iter().map(|tensor| (name.clone(), tensor));
            stored.tensors.extend(tensors);
        }
        if stored.tensors.is_empty() {
            return Err(foreign(folder, "its weights hold no tensors"));
        }
        Ok(stored)
    }
}

impl HfFolder {
    /// Opens a folder: reads its `config.json` and the headers of its weights.
    ///
    /// # Errors
    /// [`Error::Foreign`] where the folder does not exist, lacks `config.json` or weights, or a
    /// file is not what it should be; [`Error::OwnFormat`] for a checkpoint.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_within(path, DEFAULT_MAX_MEMORY)
    }

    /// The same, with a limit for the bytes of memory that the table of a `pytorch_model.bin` may
    /// take.
    ///
    /// # Errors
    /// As for [`HfFolder::open`], and where a table takes more.
    pub fn open_within(path: impl AsRef<Path>, max_memory: usize) -> Result<Self> {
        let path = path.as_ref();
        check_is_folder(path)?;
        if !has_weights(path) {
            Self::refuse_others(path)?;
        }
        let files_of_weights = weight_files(path);
        let mut config = read_json(&path.join(CONFIG))?;
        let model_type = config.get("model_type").and_then(Value::as_str);
        let model_type = model_type.ok_or_else(|| {
            let expected = "it is no object with a `model_type`, expected a name as in \"gpt2\"";
            foreign(&path.join(CONFIG), expected)
        })?;
        check_is_plain(&config).map_err(|reason| foreign(&path.join(CONFIG), reason))?;
        let family = family::of(model_type);
        let Stored {
            mut files,
            tensors: mut found,
            stretches,
        } = Stored::read(path, files_of_weights?, max_memory)?;
        let (mut left_out, mut is_untied) = (Vec::new(), false);
        if let Some(family) = family {
            family.rename(&config, &mut found);
            if let Some(tie) = family.tie(&config).filter(|tie| tie.is_one(&config)) {
                is_untied = are_apart(path, &files, &found, [tie.head, tie.embedding])?;
            }
            if is_untied {
                set_tie(&mut config, false);
            }
            family.leave_out(&config, &mut found, &mut left_out);
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let manifest = Manifest {
            base: None,
            header: Header::default(),
            files,
            tensors: table(path, found, family)?,
        };
        Ok(Self {
            weights: Checkpoint::over(path, manifest, true).with_sums(stretches),
            config,
            is_untied,
            left_out,
        })
    }

    /// Whether this is a folder of a model and no checkpoint: it has a `config.json` or weights,
    /// and no manifest.
    pub fn is_one(path: impl AsRef<Path>) -> bool {
        let path = path.as_ref();
        let has = |name: &str| path.join(name).is_file();
        (has(CONFIG) || weight_files(path).is_ok()) && !has(format::MANIFEST)
    }

    /// Refuses a folder or file in another format: another program's, or a checkpoint or output
    /// folder of Merak. The error says what it is and how to use it.
    ///
    /// # Errors
    /// [`Error::OwnFormat`] for a checkpoint or output folder, [`Error::Foreign`] for another
    /// program's folder or file.
    pub fn refuse_others(path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if let Some(what) = recognize::own(path) {
            let path = path.to_owned();
            return Err(Error::OwnFormat { path, what });
        }
        what_of_others(path).map_or(Ok(()), |reason| Err(foreign(path, reason)))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.weights.path()
    }

    /// The content of `config.json`; where it ties a head to an embedding that differs from it,
    /// `tie_word_embeddings` is false here.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Unties head and embedding in a configuration of the folder's model, with a warning, where
    /// `config.json` ties them although the weights differ. Returns whether they differ.
    pub fn correct(&self, config: &mut Value) -> bool {
        if self.is_untied {
            tracing::warn!(
                folder = %self.path().display(),
                "config.json ties head and embedding, but the weights have both and they differ: they stay apart"
            );
            set_tie(config, false);
        }
        self.is_untied
    }

    /// The tensors, by name; all are of kind [`Kind::Parameter`]. Their slices have no checksums.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.weights.manifest().tensors
    }

    /// Names of tensors that no model needs: buffers, and a tied head.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Reads a piece, converting it where the folder has another floating-point type: see
    /// [`Checkpoint::read_as`]. Only the byte ranges that hold some of it are read.
    ///
    /// # Errors
    /// As for [`Checkpoint::read`]; [`Error::Foreign`] where a storage of a `pytorch_model.bin` has
    /// another checksum than its archive says.
    pub fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        self.weights.read_as(piece, out)
    }

    /// The weights as an open checkpoint.
    pub(crate) fn weights(&self) -> &Checkpoint {
        &self.weights
    }

    /// The weights as an open checkpoint, without the rest of the folder.
    pub(crate) fn into_weights(self) -> Checkpoint {
        self.weights
    }

    /// Names of the files of the weights, in ascending order.
    pub fn weight_files(&self) -> Vec<&str> {
        let files = self.weights.manifest().files.iter();
        files.map(|file| file.name.as_str()).collect()
    }

    /// Names of the files beside the weights that belong to the model.
    pub fn companions(&self) -> Vec<&'static str> {
        let is_there = |name: &&str| self.path().join(name).is_file();
        COMPANIONS.into_iter().filter(is_there).collect()
    }
}

impl Checkpoint {
    /// Opens the checkpoint at `path`, or the Hugging Face folder there as one that holds weights
    /// only: its state is `null`, and its slices have no checksums.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`] and [`HfFolder::open`].
    pub fn open_weights(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if HfFolder::is_one(path) {
            return Ok(HfFolder::open(path)?.into_weights());
        }
        Self::open(path)
    }
}

fn check_is_folder(path: &Path) -> Result<()> {
    Err(match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => foreign(path, what_it_is(path).unwrap_or("it is no folder")),
        Err(error) if error.kind() == ErrorKind::NotFound => foreign(
            path,
            format!("the folder does not exist{}", path_hint(path)),
        ),
        Err(error) => io_error("look at", path)(error),
    })
}

/// Refuses a folder of another program that lacks the needed file, with what the folder is.
fn check_is_none_of_others(needed: &Path, folder: &Path) -> Result<()> {
    if needed.exists() {
        return Ok(());
    }
    HfFolder::refuse_others(folder)
}

/// Checks that the weights are not quantized.
fn check_is_plain(config: &Value) -> Result<(), String> {
    let quantization = config.get("quantization_config");
    let Some(fields) = quantization.and_then(Value::as_object) else {
        return Ok(());
    };
    let flags = fields
        .iter()
        .filter(|(name, _)| name.starts_with("load_in_"));
    let mut flags = flags.map(|(_, value)| value == true).peekable();
    let is_active = match flags.peek() {
        Some(_) => flags.any(|is_set| is_set),
        None => !fields.is_empty(),
    };
    if !is_active {
        return Ok(());
    }
    let method = fields.get("quant_method").and_then(Value::as_str);
    let method = method.map_or_else(String::new, |method| format!(" by {method}"));
    Err(format!(
        "its `quantization_config` says that the weights are quantized{method}, which cannot be read"
    ))
}

/// Whether a folder has both of these tensors and they differ.
fn are_apart(
    folder: &Path,
    files: &[FileEntry],
    found: &[(String, StoredTensor)],
    names: [&str; 2],
) -> Result<bool> {
    let find = |name| found.iter().find(|(_, tensor)| tensor.name == name);
    let [Some(first), Some(second)] = names.map(find) else {
        return Ok(false);
    };
    // Old files store a tied weight once, under both names.
    let place = |(file, tensor): &(String, StoredTensor)| {
        (file.clone(), tensor.bytes, tensor.strides.clone())
    };
    if place(first) == place(second) {
        return Ok(false);
    }
    let manifest = Manifest {
        base: None,
        header: Header::default(),
        tensors: table(folder, vec![first.clone(), second.clone()], None)?,
        files: files.to_vec(),
    };
    let both = Checkpoint::over(folder, manifest, true);
    Ok(!is_same(&both, names[0], names[1])?)
}

/// The weights of a PEFT folder: their file, where its tensors are, and the members of an archive
/// that they lie in.
pub(crate) fn adapter_tensors(folder: &Path) -> Result<(PathBuf, torch::Found)> {
    let (safetensors, torch) = ("adapter_model.safetensors", "adapter_model.bin");
    let file = folder.join(safetensors);
    if file.is_file() {
        let found = stored_tensors(&file)?;
        return Ok((file, (found, Vec::new())));
    }
    let file = folder.join(torch);
    if file.is_file() {
        let found = torch::tensors(&file, DEFAULT_MAX_MEMORY)?;
        return Ok((file, found));
    }
    Err(foreign(
        folder,
        format!("it has no {safetensors} or {torch}"),
    ))
}

/// A handle on the tensors of one file, under the names that they have there.
pub(crate) fn as_checkpoint(
    folder: &Path,
    file: &Path,
    (found, members): torch::Found,
) -> Result<Checkpoint> {
    let entry = file_entry(folder, file)?;
    let members = [(entry.name.clone(), members)].into();
    let found = found.into_iter().map(|tensor| (entry.name.clone(), tensor));
    let manifest = Manifest {
        base: None,
        header: Header::default(),
        tensors: table(folder, found.collect(), None)?,
        files: vec![entry],
    };
    Ok(Checkpoint::over(folder, manifest, true).with_sums(members))
}

/// A file of a folder, without a checksum.
fn file_entry(folder: &Path, file: &Path) -> Result<FileEntry> {
    let length = fs::metadata(file).map_err(io_error("look at", file))?.len();
    let name = file.strip_prefix(folder).unwrap_or(file);
    Ok(FileEntry {
        name: name.to_string_lossy().into_owned(),
        length,
        checksum: Checksum(0),
    })
}

/// The table of a manifest for tensors that are each one stretch of a file.
fn table(
    folder: &Path,
    found: Vec<(String, StoredTensor)>,
    family: Option<&Family>,
) -> Result<Vec<TensorEntry>> {
    let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
    for (file, tensor) in found {
        check_tensor_name(&tensor.name)
            .map_err(|error| foreign(&folder.join(&file), error.to_string()))?;
        let whole = SliceEntry {
            offset: vec![0; tensor.shape.len()],
            size: tensor.shape.clone(),
            range: None,
            file,
            bytes: tensor.bytes,
            checksum: Checksum(0),
            strides: tensor.strides,
        };
        let is_empty = tensor.shape.contains(&0);
        let entry = TensorEntry {
            kind: Kind::Parameter,
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            cut: family.and_then(|family| family.cut(&tensor.name, &tensor.shape)),
            shape: tensor.shape,
            slices: if is_empty { Vec::new() } else { vec![whole] },
        };
        if tensors.insert(tensor.name.clone(), entry).is_some() {
            return Err(foreign(
                folder,
                format!("tensor `{}` is there twice", tensor.name),
            ));
        }
    }
    Ok(tensors.into_values().collect())
}

/// Whether weights can be converted to this type.
fn check_float(dtype: Option<DType>) -> Result<()> {
    match dtype.filter(|dtype| !dtype.is_float()) {
        None => Ok(()),
        Some(dtype) => Err(Error::InvalidOption {
            key: "dtype",
            found: dtype.to_string(),
            expected: "f64, f32, bf16 or f16",
        }),
    }
}

/// Opens a file of weights.
fn open_weights(path: &Path) -> Result<File> {
    const POINTER: &[u8] = b"version https://git-lfs";
    let (file, _) = open_regular(path).map_err(|error| not_read(path, error))?;
    let mut start = [0; POINTER.len()];
    if file.read_exact_at(&mut start, 0).is_ok() && start == POINTER {
        let reason =
            "it only points to the weights, which Git LFS has: fetch them with `git lfs pull`";
        return Err(foreign(path, reason));
    }
    Ok(file)
}
