//! Adapters in PEFT's format: low-rank updates of weights.
//!
//! ```text
//! weight [out, in]                 W + scale · B · A        A [r, in], B [out, r]
//! weight [in, out] (Conv1D)        W + scale · (B · A)ᵀ
//! embedding [tokens, width]        W + scale · (B · A)ᵀ     A [r, tokens], B [width, r]
//! kernel [out, c, h, w]            W + scale · B · A        A [r, c, h, w], B [out, r, 1, 1]
//! with magnitudes m [out]          m / |V| · V              V one of the above, |V| per output;
//!                                                           m [1, out, 1, 1] of a kernel
//! ```

mod config;
mod contents;
mod extract;
#[cfg(feature = "graph")]
mod graph;
mod low_rank;
mod merge;
mod product;
mod replace;
#[cfg(feature = "graph")]
mod unmatched;

pub use config::LoraConfig;
pub(crate) use extract::has_adapter;
pub use extract::{extract_lora, has_lora, replace_lora};
#[cfg(feature = "graph")]
pub use graph::{ADAPTER_NAMES, AdaptError, Adapted, adapt, is_adapter_name};
pub use merge::merge_lora;
pub(crate) use merge::{copy_companions, merge_own};
pub use product::squares_of_outputs;
pub use replace::check_replaceable;
#[cfg(feature = "graph")]
pub use unmatched::UnmatchedTarget;

use crate::error::foreign;
use crate::family::{Family, family_of};
use crate::hf;
use crate::recognize::{ADAPTER_CONFIG, what_it_is};
use crate::words;
use crate::{Checkpoint, Kind, Piece, Result, TensorEntry};
use contents::Contents;
use low_rank::{Expected, LowRank};
use merak_mpu::names::did_you_mean;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// An adapter for a certain base model.
///
/// It holds the factors of its low-rank updates in `f32`; tensors that an adapter replaces (biases,
/// `modules_to_save`) stay in their file.
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    /// The adapter's tensors under their own names, without checksums.
    tensors: Checkpoint,
    updates: BTreeMap<String, Update>,
    /// Head and embedding, where the base has one tensor for both and the adapter changes one of
    /// them.
    untied: Option<[&'static str; 2]>,
}

/// What an adapter does to a parameter.
#[derive(Debug)]
enum Update {
    LowRank(LowRank),
    /// Replaces it by its own tensor of this name.
    Whole(String),
}

/// The parameters of the base that an adapter changes.
struct Base<'a> {
    config: &'a Value,
    family: Option<&'static Family>,
    parameters: BTreeMap<&'a str, Cow<'a, TensorEntry>>,
    /// Head and embedding, where they are one tensor.
    tied: Option<[&'static str; 2]>,
}

impl<'a> Base<'a> {
    fn of(config: &'a Value, tensors: &'a [TensorEntry]) -> Self {
        let family = family_of(config);
        let mut parameters: BTreeMap<_, _> = tensors
            .iter()
            .filter(|tensor| tensor.kind == Kind::Parameter)
            .map(|tensor| (tensor.name.as_str(), Cow::Borrowed(tensor)))
            .collect();
        // PEFT wraps modules: of two that share a tensor, the one that is not wrapped keeps it
        // unchanged.
        let tie = family
            .filter(|family| family.has_head(config))
            .and_then(|family| family.tie(config))
            .filter(|tie| tie.is_one(config) && !parameters.contains_key(tie.head));
        let tied = tie.map(|tie| [tie.head, tie.embedding]);
        if let Some([head, embedding]) = tied
            && let Some(embedding) = parameters.get(embedding)
        {
            let mut entry = TensorEntry::clone(embedding);
            head.clone_into(&mut entry.name);
            parameters.insert(head, Cow::Owned(entry));
        }
        Self {
            config,
            family,
            parameters,
            tied,
        }
    }

    /// The parameter that an adapter has under this name, with or without the family's prefix.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) for the adapter's file, where there is none.
    fn parameter(&self, name: &str, file: &Path) -> Result<&TensorEntry> {
        let prefix = self.family.map_or("", |family| family.prefix());
        let longer = format!("{prefix}{name}");
        let shorter = name.strip_prefix(prefix).unwrap_or(name);
        let other = |family: &Family| family.other_name(self.config, name);
        let names = [name, &longer, shorter].into_iter();
        let mut names = names.chain(self.family.and_then(other));
        let found = names.find_map(|name| self.parameters.get(name));
        let unknown = || foreign(file, format!("the base has no parameter for `{name}`"));
        found.map(Cow::as_ref).ok_or_else(unknown)
    }
}

/// The folder, within that of a run, in which training leaves the adapter, or those that have names
/// of their own.
pub const ADAPTER_FOLDER: &str = "adapter";

/// Refuses a folder or file that is no adapter, with what it is, and with the adapter of the run
/// whose folder it is.
fn check_is_adapter(path: &Path) -> Result<()> {
    if path.join(ADAPTER_CONFIG).exists() {
        return Ok(());
    }
    let within = adapter_of_run(path);
    // The text after the colon says how to import a model.
    let what = what_it_is(path);
    let what = what.map(|what| what.split_once(": ").map_or(what, |(what, _)| what));
    match what.or(within.is_some().then_some("it is the folder of a run")) {
        Some(what) => Err(foreign(
            path,
            format!(
                "{what}, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with {} and \
                 adapter_model.safetensors{}",
                ADAPTER_CONFIG,
                did_you_mean(within.as_deref())
            ),
        )),
        None => Ok(()),
    }
}

/// The adapter in the folder of a run; of several, the first by name.
fn adapter_of_run(run: &Path) -> Option<String> {
    let folder = run.join(ADAPTER_FOLDER);
    let named = fs::read_dir(&folder).into_iter().flatten();
    let named = named.filter_map(|entry| Some(entry.ok()?.path()));
    let is_adapter = |folder: &PathBuf| folder.join(ADAPTER_CONFIG).is_file();
    let found = named.chain([folder]).filter(is_adapter).min()?;
    Some(words::file(&found))
}

impl Adapter {
    /// Opens a PEFT folder: `adapter_config.json` beside `adapter_model.safetensors` (or
    /// `adapter_model.bin`), for the base model with this `config.json` and these parameters.
    ///
    /// The names of modules are those of the base, or the same without its prefix (`transformer.`).
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) where a file is missing or not what it should be,
    /// the configuration has an active field that is not supported, a tensor fits no parameter of
    /// the base, or factors are not what the configuration says.
    pub fn open(
        folder: impl AsRef<Path>,
        base_config: &Value,
        base: &[TensorEntry],
    ) -> Result<Self> {
        let path = folder.as_ref();
        check_is_adapter(path)?;
        let config = LoraConfig::of_adapter(&path.join(ADAPTER_CONFIG))?;
        let (file, found) = hf::adapter_tensors(path)?;
        let tensors = hf::as_checkpoint(path, &file, found)?;
        let prefix = family_of(base_config).map_or("", |family| family.prefix());
        let contents = Contents::of(&tensors.manifest().tensors, &file)?;
        if let Some(missing) = contents.first_missing(&config, base, prefix) {
            return Err(foreign(&file, missing));
        }
        Self::of(&file, &config, tensors, base_config, base)
    }

    /// The adapter that a checkpoint trained, for its own weights.
    fn of_checkpoint(source: &Checkpoint, base_config: &Value) -> Result<Self> {
        let config = LoraConfig::read(&source.path().join(ADAPTER_CONFIG))?;
        let tensors = extract::own_adapter(source)?;
        let base = &source.manifest().tensors;
        Self::of(source.path(), &config, tensors, base_config, base)
    }

    /// An adapter of tensors under the names of PEFT; errors name `file`.
    fn of(
        file: &Path,
        config: &LoraConfig,
        tensors: Checkpoint,
        base_config: &Value,
        base: &[TensorEntry],
    ) -> Result<Self> {
        let base = Base::of(base_config, base);
        let contents = Contents::of(&tensors.manifest().tensors, file)?;
        let mut updates = BTreeMap::new();
        for (module, factors) in &contents.modules {
            if !config.may_adapt(module) {
                let reason = format!(
                    "it has factors for `{module}`, which is not among the `target_modules`"
                );
                return Err(foreign(file, reason));
            }
            let weight = base.parameter(&format!("{module}.weight"), file)?;
            if factors.magnitude.is_some() != config.use_dora {
                let (is, has) = (config.use_dora, if config.use_dora { "no" } else { "a" });
                let reason =
                    format!("`{module}` has {has} magnitude vector, but `use_dora` is {is}");
                return Err(foreign(file, reason));
            }
            let expected = Expected {
                base: weight,
                // As in PEFT, the layer decides, since the configuration may be wrong.
                is_transposed: base.family.map_or(config.fan_in_fan_out, |family| {
                    family.is_transposed(&weight.name)
                }),
                rank: config.rank(module),
                scale: config.scale_of(module),
            };
            let update = LowRank::read(&tensors, file, factors, expected)?;
            updates.insert(weight.name.clone(), Update::LowRank(update));
        }
        for (name, key) in contents.wholes {
            let replaced = base.parameter(&name, file)?;
            let entry = tensors.tensor(&Kind::Parameter, &key)?;
            let (own, there) = (&entry.shape, &replaced.shape);
            if own != there {
                let reason = format!("`{key}` is {own:?}, in the base {there:?}");
                return Err(foreign(file, reason));
            }
            updates.insert(replaced.name.clone(), Update::Whole(key));
        }
        let is_changed =
            |pair: &[&'static str; 2]| pair.iter().any(|name| updates.contains_key(*name));
        let untied = base.tied.filter(is_changed);
        Ok(Self {
            path: tensors.path().to_owned(),
            tensors,
            updates,
            untied,
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The parameters of the base that it changes, by name.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        self.updates.keys().map(String::as_str)
    }

    /// The tensor that is head and embedding of the base, where the adapter changes one of them:
    /// merged, they are two.
    pub fn tied_target(&self) -> Option<&str> {
        self.untied.map(|[_, embedding]| embedding)
    }

    /// Checks the storages of an `adapter_model.bin` that were read in part.
    pub(crate) fn check_rest(&self) -> Result<()> {
        self.tensors.check_rest()
    }

    /// Measures the weights of the base that the adapter gives magnitudes to (`use_dora`), which
    /// [`Adapter::merge`] needs; reads nothing for other adapters.
    ///
    /// # Errors
    /// What [`Checkpoint::read_as`] says of the base.
    pub fn measure(&mut self, base: &Checkpoint) -> Result<()> {
        for (name, update) in &mut self.updates {
            if let Update::LowRank(update) = update {
                let [head, embedding] = self.untied.unwrap_or_default();
                let stored = if name == head { embedding } else { name };
                update.measure(base, stored)?;
            }
        }
        Ok(())
    }

    /// Merges the adapter into values of the base that were read for this piece. Each value is
    /// computed in `f64` from the `f32` product and rounded once.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) where a value is no longer finite, and what
    /// [`Checkpoint::read_as`] says of the adapter's own tensors.
    pub fn merge(&self, piece: &Piece<'_>, values: &mut [u8]) -> Result<()> {
        let is_parameter = *piece.kind == Kind::Parameter;
        match self.updates.get(piece.name).filter(|_| is_parameter) {
            None => return Ok(()),
            Some(Update::Whole(key)) => {
                let own = Piece {
                    name: key,
                    ..piece.clone()
                };
                self.tensors.read_as(&own, values)?;
            }
            Some(Update::LowRank(update)) => {
                if update.is_unmeasured() {
                    let reason = format!(
                        "it has magnitudes for `{}`, whose weights have to be measured first",
                        piece.name
                    );
                    return Err(foreign(&self.path, reason));
                }
                for part in piece.layout.part_ranges(&piece.flat_range()) {
                    update.add(piece, &part, values);
                }
            }
        }
        let mut values = values.chunks_exact(piece.dtype.size_bytes());
        let is_finite = |value: &[u8]| piece.dtype.to_f64(value).is_none_or(f64::is_finite);
        if values.all(is_finite) {
            return Ok(());
        }
        let reason = format!("merged with it, `{}` is not finite", piece.name);
        Err(foreign(&self.path, reason))
    }
}
