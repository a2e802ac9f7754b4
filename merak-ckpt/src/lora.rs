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
mod extract;
#[cfg(feature = "graph")]
mod graph;
mod merge;

pub(crate) use config::FILE as ADAPTER_CONFIG;
pub use config::LoraConfig;
pub use extract::{extract_lora, has_lora, replace_lora};
pub(crate) use extract::{has_adapter, is_factor};
#[cfg(feature = "graph")]
pub use graph::{AdaptError, Adapted, adapt};
pub use merge::merge_lora;
pub(crate) use merge::{copy_companions, merge_own};

use crate::hf::{self, foreign};
use crate::layout::PartRange;
use crate::{Checkpoint, DType, Kind, Layout, Piece, Result, TensorEntry};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What PEFT puts before the names of a model's modules.
const PREFIX: &str = "base_model.model.";

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

/// A product that is added to a parameter, seen as a matrix of its first dim by all others.
#[derive(Debug)]
struct LowRank {
    rank: usize,
    columns: usize,
    /// `[rows, rank]`, scaled.
    left: Vec<f32>,
    /// `[rank, columns]`.
    right: Vec<f32>,
    /// Its magnitudes, if any (`use_dora`), and from [`Adapter::measure`] on the factors that give
    /// each output its magnitude.
    magnitudes: Option<Magnitudes>,
}

#[derive(Debug)]
struct Magnitudes {
    wanted: Vec<f32>,
    factors: Option<Vec<f64>>,
    /// Whether an output is a column of the matrix, else a row.
    of_columns: bool,
}

/// Refuses a folder or file of another program that is no adapter, with what it is.
fn check_is_adapter(path: &Path) -> Result<()> {
    let is_other = !path.join(config::FILE).exists();
    // The text behind the colon says how to import a model.
    let what = hf::what_it_is(path).filter(|_| is_other);
    let what = what.map(|what| what.split_once(": ").map_or(what, |(what, _)| what));
    match what {
        Some(what) => Err(foreign(
            path,
            format!(
                "{what}, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with {} and \
                 adapter_model.safetensors",
                config::FILE
            ),
        )),
        None => Ok(()),
    }
}

/// The names of the two factors of a module, as far as they have been seen.
#[derive(Debug, Default)]
struct Factors {
    a: Option<String>,
    b: Option<String>,
    magnitude: Option<String>,
    is_embedding: bool,
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
        let config = LoraConfig::of_adapter(&path.join(config::FILE))?;
        let (file, found) = hf::adapter_tensors(path)?;
        let tensors = hf::as_checkpoint(path, &file, found)?;
        let prefix = hf::family_of(base_config).map_or("", |family| family.prefix());
        let contents = Contents::of(&tensors.manifest().tensors, &file)?;
        if let Some(missing) = contents.first_missing(&config, base, prefix) {
            return Err(foreign(&file, missing));
        }
        Self::of(&file, &config, tensors, base_config, base)
    }

    /// The adapter that a checkpoint trained, for its own weights.
    fn of_checkpoint(source: &Checkpoint, base_config: &Value) -> Result<Self> {
        let config = LoraConfig::read(&source.path().join(config::FILE))?;
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
        let family = hf::family_of(base_config);
        let mut parameters: BTreeMap<_, _> = base
            .iter()
            .filter(|tensor| tensor.kind == Kind::Parameter)
            .map(|tensor| (tensor.name.as_str(), Cow::Borrowed(tensor)))
            .collect();
        // PEFT wraps modules: of two that share a tensor, the one that is not wrapped keeps it
        // unchanged.
        let tie = family
            .filter(|family| family.has_head(base_config))
            .and_then(|family| family.tie(base_config))
            .filter(|tie| tie.is_one(base_config) && !parameters.contains_key(tie.head));
        if let Some(tie) = tie
            && let Some(embedding) = parameters.get(tie.embedding)
        {
            let mut head = TensorEntry::clone(embedding);
            tie.head.clone_into(&mut head.name);
            parameters.insert(tie.head, Cow::Owned(head));
        }
        let prefix = family.map_or("", |family| family.prefix());
        let resolve = |name: &str| {
            let longer = format!("{prefix}{name}");
            let shorter = name.strip_prefix(prefix).unwrap_or(name);
            let other = family.and_then(|family| family.other_name(base_config, name));
            let names = [Some(name), Some(&longer), Some(shorter), other];
            names
                .into_iter()
                .flatten()
                .find_map(|name| parameters.get(name))
                .map(Cow::as_ref)
        };
        let contents = Contents::of(&tensors.manifest().tensors, file)?;
        let mut updates = BTreeMap::new();
        let unknown = |name: &str| foreign(file, format!("the base has no parameter for `{name}`"));
        for (module, factors) in &contents.modules {
            if !config.may_adapt(module) {
                let reason =
                    format!("it has factors for `{module}`, which is none of the `target_modules`");
                return Err(foreign(file, reason));
            }
            let weight = format!("{module}.weight");
            let base = resolve(&weight).ok_or_else(|| unknown(&weight))?;
            // As in PEFT, the layer decides, since the configuration may be wrong.
            let transposed = family.map_or(config.fan_in_fan_out, |family| {
                family.is_transposed(&base.name)
            });
            if factors.magnitude.is_some() != config.use_dora {
                let (is, has) = (config.use_dora, if config.use_dora { "no" } else { "a" });
                let reason =
                    format!("`{module}` has {has} magnitude vector, but `use_dora` is {is}");
                return Err(foreign(file, reason));
            }
            let rank = config.rank(module);
            let scale = config.scale(module, rank);
            let update = LowRank::read(&tensors, file, factors, base, transposed, (rank, scale))?;
            updates.insert(base.name.clone(), Update::LowRank(update));
        }
        for (name, key) in contents.wholes {
            let base = resolve(&name).ok_or_else(|| unknown(&name))?;
            let entry = tensors.tensor(&Kind::Parameter, &key)?;
            if entry.shape != base.shape {
                let reason = format!("`{key}` is {:?}, in the base {:?}", entry.shape, base.shape);
                return Err(foreign(file, reason));
            }
            updates.insert(base.name.clone(), Update::Whole(key));
        }
        let untied = tie.map(|tie| [tie.head, tie.embedding]);
        let untied = untied.filter(|pair| pair.iter().any(|name| updates.contains_key(*name)));
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

/// The tensors of an adapter, by their use.
#[derive(Debug, Default)]
struct Contents {
    /// Factors by module.
    modules: BTreeMap<String, Factors>,
    /// Tensors that replace those of the base: the name in the base, and the adapter's own.
    wholes: BTreeMap<String, String>,
}

impl Contents {
    fn of(tensors: &[TensorEntry], file: &Path) -> Result<Self> {
        if tensors.is_empty() {
            return Err(foreign(file, "it has no tensor"));
        }
        let mut contents = Self::default();
        for TensorEntry { name, .. } in tensors {
            let Some(place) = name.strip_prefix(PREFIX) else {
                let reason = format!("`{name}` does not begin with `{PREFIX}`");
                return Err(foreign(file, reason));
            };
            if !contents.add_factor(place, name) && !contents.add_whole(place, name) {
                return Err(foreign(file, format!("`{name}` is not supported")));
            }
        }
        // A weight beside factors is the base's own; PEFT saves it where a vocabulary may have
        // grown.
        contents.wholes.retain(|name, _| {
            let module = name.strip_suffix(".weight");
            module.is_none_or(|module| !contents.modules.contains_key(module))
        });
        Ok(contents)
    }

    /// The message about the first tensor that the configuration names and the base has, but the
    /// file lacks. Targets and biases count only in numbered layers: a base may have more around
    /// these than the model that was adapted.
    fn first_missing(
        &self,
        config: &LoraConfig,
        base: &[TensorEntry],
        prefix: &str,
    ) -> Option<String> {
        let mut names = self.modules.keys().chain(self.wholes.keys());
        let is_bare = !names.any(|name| name.starts_with(prefix));
        for TensorEntry { name, .. } in base.iter().filter(|tensor| tensor.kind == Kind::Parameter)
        {
            let name = if is_bare {
                name.strip_prefix(prefix)
            } else {
                Some(name.as_str())
            };
            let Some((name, (module, end))) =
                name.and_then(|name| Some((name, name.rsplit_once('.')?)))
            else {
                continue;
            };
            let is_numbered = module.split('.').any(|part| part.parse::<usize>().is_ok());
            let is_target = end == "weight" && is_numbered && config.is_target(module);
            if is_target && !self.modules.contains_key(module) {
                return Some(format!(
                    "it has no factors for `{module}` of the `target_modules`"
                ));
            }
            let is_whole =
                config.saves(module) || is_numbered && config.trains_whole(name, |_| false);
            if is_whole && !self.wholes.contains_key(name) {
                return Some(format!(
                    "it has no `{name}`, which it has by its configuration"
                ));
            }
        }
        None
    }

    /// Notes a factor; returns whether the tensor is one.
    fn add_factor(&mut self, place: &str, name: &str) -> bool {
        if let Some(module) = place.strip_suffix(".lora_magnitude_vector") {
            let factors = self.modules.entry(module.to_owned()).or_default();
            factors.magnitude = Some(name.to_owned());
            return true;
        }
        let ends = [
            (".lora_A.weight", true, false),
            (".lora_B.weight", false, false),
            (".lora_embedding_A", true, true),
            (".lora_embedding_B", false, true),
        ];
        let found = ends.into_iter().find_map(|(end, is_a, is_embedding)| {
            Some((place.strip_suffix(end)?, is_a, is_embedding))
        });
        let Some((module, is_a, is_embedding)) = found else {
            return false;
        };
        let factors = self.modules.entry(module.to_owned()).or_default();
        factors.is_embedding |= is_embedding;
        let slot = if is_a { &mut factors.a } else { &mut factors.b };
        *slot = Some(name.to_owned());
        true
    }

    /// Notes a tensor that replaces one of the base; returns false for a tensor of an unknown kind
    /// of adapter.
    fn add_whole(&mut self, place: &str, name: &str) -> bool {
        // Biases of adapted layers and of modules that are saved whole come with their wrappers'
        // names; tensors that such a wrapper replaced are not used.
        if place.contains(".original_module.") {
            return true;
        }
        let mut plain = place.replace(".base_layer.", ".");
        if let Some((module, part)) = plain.split_once(".modules_to_save.") {
            // PEFT leaves the adapter's name in the names of a module's parts.
            let part = part.split_once('.').map_or(part, |(_, part)| part);
            plain = format!("{module}.{part}");
        }
        if plain == place {
            self.wholes.insert(plain, name.to_owned());
        } else {
            self.wholes.entry(plain).or_insert_with(|| name.to_owned());
        }
        !place.contains(".lora_")
    }
}

impl LowRank {
    /// Reads the factors of a module and lays them as the base weight lies.
    fn read(
        tensors: &Checkpoint,
        file: &Path,
        factors: &Factors,
        base: &TensorEntry,
        transposed: bool,
        (expected_rank, scale): (usize, f64),
    ) -> Result<Self> {
        let (Some(a), Some(b)) = (&factors.a, &factors.b) else {
            let name = &base.name;
            return Err(foreign(file, format!("one factor of `{name}` is missing")));
        };
        let shape = |name: &str| Ok(tensors.tensor(&Kind::Parameter, name)?.shape.clone());
        let (a_shape, b_shape) = (shape(a)?, shape(b)?);
        let misfit = || {
            let shape = &base.shape;
            let reason =
                format!("`{a}` {a_shape:?} and `{b}` {b_shape:?} do not fit the base's {shape:?}");
            foreign(file, reason)
        };
        let rows = *base.shape.first().ok_or_else(misfit)?;
        let columns: usize = base.shape[1..].iter().product();
        let (rank, into) = matrix(&a_shape).ok_or_else(misfit)?;
        let (out, same) = matrix(&b_shape).ok_or_else(misfit)?;
        let transposed = transposed || factors.is_embedding;
        let fits = |transposed: bool| {
            let expected = if transposed { (into, out) } else { (out, into) };
            rank == same && rank > 0 && expected == (rows, columns)
        };
        // If only one orientation fits, it is used: configurations are not always right about it.
        let transposed = if fits(transposed) {
            transposed
        } else {
            !transposed
        };
        if !fits(transposed) || !base.dtype.is_float() {
            return Err(misfit());
        }
        if rank != expected_rank {
            let reason =
                format!("`{a}` has rank {rank}, in the configuration it is {expected_rank}");
            return Err(foreign(file, reason));
        }
        let (a, mut b) = (
            read_f32(tensors, a, &a_shape)?,
            read_f32(tensors, b, &b_shape)?,
        );
        for b in &mut b {
            *b = (f64::from(*b) * scale) as f32;
        }
        let (left, right) = if transposed {
            (turned(&a, rank), turned(&b, out))
        } else {
            (b, a)
        };
        let magnitudes = factors.magnitude.as_ref().map(|name| {
            let found = shape(name)?;
            let expected = match base.shape.len() {
                ..=2 => vec![out],
                // Those of a convolution have the shape of its output channels.
                ndim => [&[1, out], &vec![1; ndim - 2][..]].concat(),
            };
            if found != expected {
                let reason = format!("`{name}` is {found:?}, expected {expected:?}");
                return Err(foreign(file, reason));
            }
            Ok(Magnitudes {
                wanted: read_f32(tensors, name, &found)?,
                factors: None,
                of_columns: transposed,
            })
        });
        Ok(Self {
            rank,
            columns,
            left,
            right,
            magnitudes: magnitudes.transpose()?,
        })
    }

    fn is_unmeasured(&self) -> bool {
        let magnitudes = self.magnitudes.as_ref();
        magnitudes.is_some_and(|magnitudes| magnitudes.factors.is_none())
    }

    /// Computes the factor of each output: its magnitude, divided by the norm of its updated
    /// weights.
    fn measure(&mut self, base: &Checkpoint, name: &str) -> Result<()> {
        const BLOCK_ELEMENTS: usize = 1 << 18;
        let Some(magnitudes) = &self.magnitudes else {
            return Ok(());
        };
        let shape = &base.tensor(&Kind::Parameter, name)?.shape;
        let layout = Layout::whole(shape);
        let rows: usize = shape[0];
        let step = (BLOCK_ELEMENTS / self.columns.max(1)).max(1);
        let mut squares = vec![0.0_f64; magnitudes.wanted.len()];
        let (mut values, mut product) = (Vec::new(), Vec::new());
        for first in (0..rows).step_by(step) {
            let block = first..rows.min(first + step);
            values.resize(block.len() * self.columns * 4, 0);
            let piece = Piece {
                kind: &Kind::Parameter,
                name,
                dtype: DType::F32,
                layout: &layout,
                range: Some(block.start * self.columns..block.end * self.columns),
            };
            base.read_as(&piece, &mut values)?;
            for (row, values) in block.zip(values.chunks_exact(self.columns * 4)) {
                self.row(row, 0, self.columns, &mut product);
                let values = values.chunks_exact(4).zip(&product);
                for (column, (value, product)) in values.enumerate() {
                    let value = f32::from_le_bytes(value.try_into().expect("chunks of four"));
                    let output = if magnitudes.of_columns { column } else { row };
                    squares[output] += (f64::from(value) + f64::from(*product)).powi(2);
                }
            }
        }
        let factors = magnitudes.wanted.iter().zip(squares);
        let factors = factors.map(|(wanted, squares)| f64::from(*wanted) / squares.sqrt());
        let factors = Some(factors.collect());
        if let Some(magnitudes) = &mut self.magnitudes {
            magnitudes.factors = factors;
        }
        Ok(())
    }

    /// The factor of the updated weight at a place.
    fn factor(&self, row: usize, column: usize) -> f64 {
        let magnitudes = self.magnitudes.as_ref();
        magnitudes.map_or(1.0, |magnitudes| {
            let output = if magnitudes.of_columns { column } else { row };
            magnitudes.factors.as_ref().map_or(1.0, |all| all[output])
        })
    }

    /// Adds the product to the values of one part of a piece.
    fn add(&self, piece: &Piece<'_>, part: &PartRange<'_>, values: &mut [u8]) {
        let region = &part.part.region;
        let inner: usize = piece.layout.shape()[2.min(region.size.len())..]
            .iter()
            .product();
        // Boxes are seen as matrices too, so they must hold all of the dims after the second.
        let width = region.size.get(1).map_or(1, |size| size * inner);
        let first = region.offset.get(1).map_or(0, |offset| offset * inner);
        let size = piece.dtype.size_bytes();
        let mut product = Vec::new();
        part.for_each_run(
            piece.layout.local_shape(),
            &piece.flat_range(),
            |mut local, run, mut len| {
                let mut flat = part.range.start + run;
                while len > 0 {
                    let (row, column) = (flat / width, flat % width);
                    let count = len.min(width - column);
                    let (at_row, at_column) = (region.offset[0] + row, first + column);
                    self.row(at_row, at_column, count, &mut product);
                    let out = &mut values[local * size..(local + count) * size];
                    let changed = out.chunks_exact_mut(size).zip(&product).enumerate();
                    for (place, (value, product)) in changed {
                        let sum =
                            piece.dtype.to_f64(value).unwrap_or(f64::NAN) + f64::from(*product);
                        let sum = sum * self.factor(at_row, at_column + place);
                        piece.dtype.put_f64(sum, value);
                    }
                    (flat, local, len) = (flat + count, local + count, len - count);
                }
            },
        );
    }

    /// `count` elements of a row of the product, from `column` on.
    fn row(&self, row: usize, column: usize, count: usize, product: &mut Vec<f32>) {
        product.clear();
        product.resize(count, 0.0);
        for (k, factor) in self.left[row * self.rank..][..self.rank].iter().enumerate() {
            let right = &self.right[k * self.columns + column..][..count];
            for (sum, right) in product.iter_mut().zip(right) {
                *sum += factor * right;
            }
        }
    }
}

/// A factor's shape as a matrix: convolutions have further dims, which belong to the inputs.
fn matrix(shape: &[usize]) -> Option<(usize, usize)> {
    let (first, rest) = shape.split_first()?;
    (!rest.is_empty()).then(|| (*first, rest.iter().product()))
}

fn read_f32(tensors: &Checkpoint, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let layout = Layout::whole(shape);
    let mut bytes = vec![0; layout.num_local_elements() * 4];
    let piece = Piece {
        kind: &Kind::Parameter,
        name,
        dtype: DType::F32,
        layout: &layout,
        range: None,
    };
    tensors.read_as(&piece, &mut bytes)?;
    let values = bytes.chunks_exact(4);
    Ok(values
        .map(|b| f32::from_le_bytes(b.try_into().expect("chunks of four")))
        .collect())
}

/// The transpose of a matrix of `rows` rows.
fn turned(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows.max(1);
    (0..values.len())
        .map(|i| values[i % rows * columns + i / rows])
        .collect()
}
