//! Folders of `torch.distributed.checkpoint` as checkpoints.
//!
//! ```text
//! .metadata         a pickle: type, shape, boxes of each tensor; file and stretch of each item
//! __0_0.distcp …    items in sequence, each as `torch.save` writes it: a box of a tensor, a value
//! ```
//!
//! | key | here |
//! |---|---|
//! | `model.transformer.wte.weight`, prefix `model.` | the parameter `transformer.wte.weight` |
//! | `optim.state.transformer.wte.weight.exp_avg` | its optimizer state `exp_avg` |
//! | `optim.state.transformer.wte.weight.step` | the step of the checkpoint |
//! | `optim.param_groups.0.lr` | a number in the state of the run |
//!
//! The index is run by the interpreter of tables of tensors, with a list of classes whose objects
//! are attributes and nothing else. Boxes are read where they lie, so an import streams as any
//! other.

mod index;
mod items;

use super::import::{Origin, import};
use super::{
    COMPANIONS, ImportOptions, check_is_folder, check_is_none_of_others, check_is_plain, is_same,
};
use crate::disk::read_json;
use crate::error::foreign;
use crate::family::{Family, family_of, set_tie};
use crate::format::CONFIG;
use crate::recognize::{DCP_INDEX, TORCHTITAN};
use crate::{Checkpoint, DType, Header, Kind, Manifest, Result, StoredTensor, TensorEntry};
use index::{Index, Indexed, Place};
use items::Found;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Optimizer state that is imported, by the names that PyTorch and Merak have for it.
const KINDS: [&str; 3] = ["exp_avg", "exp_avg_sq", "momentum_buffer"];
/// The optimizer's count of updates.
const STEP: &str = "step";
/// State of `amsgrad` that no optimizer of Merak has.
const AMSGRAD: &str = "max_exp_avg_sq";
/// Most parts of a name that are taken for a prefix.
const MAX_PREFIX_PARTS: usize = 16;
/// Most names that a warning lists.
const MAX_LISTED: usize = 12;

/// Makes a checkpoint of a folder of `torch.distributed.checkpoint`: the weights under `prefix`,
/// and the optimizer state that belongs to them. `config`, a `config.json` of Hugging Face,
/// describes the model and thus the names. Returns the checkpoint's folder.
///
/// Its step is that of the optimizer, 0 without one. The state of the run is
/// `{"imported": {"step": …, "optimizer": …, "param_groups": …}}`, from which a run goes on with
/// seeds and data of its own; without optimizer state it is `null`. Names that the model has no
/// place for are left out with a warning that lists them. Files of tokenizers beside `config` come
/// along. Otherwise as [`import_hf`](crate::import_hf).
///
/// # Errors
/// As [`import_hf`](crate::import_hf); [`Error::Foreign`](crate::Error::Foreign) where the index or
/// an item is not what it should be, and where no tensor's name begins with the prefix.
pub fn import_dcp(
    folder: impl AsRef<Path>,
    destination: impl AsRef<Path>,
    config: impl AsRef<Path>,
    prefix: &str,
    options: &ImportOptions,
) -> Result<PathBuf> {
    let (folder, config_path) = (folder.as_ref(), config_file(config.as_ref()));
    options.check()?;
    check_is_folder(folder)?;
    check_is_none_of_others(&folder.join(DCP_INDEX), folder)?;
    let prefix = match prefix {
        "" => String::new(),
        prefix => format!("{}.", prefix.trim_end_matches('.')),
    };
    let mut config = read_json(&config_path)?;
    check_is_plain(&config).map_err(|reason| foreign(&config_path, reason))?;
    let index = Index::read(&folder.join(DCP_INDEX), options.max_memory)?;
    let mut run = Run::of(folder, &index, &config, &prefix, options.max_memory)?;
    if run.settle_head(&config)? {
        tracing::warn!(
            folder = %folder.display(),
            "the configuration ties head and embedding, but the weights have both and they differ: they stay apart"
        );
        set_tie(&mut config, false);
    }
    run.take_state(&config);
    let header = run.header(&config, options)?;
    let all: Vec<_> = run.params.iter().chain(&run.state).collect();
    let checkpoint = run.checkpoint(&all)?;
    let mut tensors = checkpoint.manifest().tensors.clone();
    run.warn(&tensors);
    for tensor in tensors
        .iter_mut()
        .filter(|tensor| tensor.kind != Kind::Parameter)
    {
        // Optimizers of Merak keep this type.
        tensor.dtype = DType::F32;
    }
    let companions = companions(&config_path);
    let origin = Origin {
        folder,
        config: &config,
        config_file: None,
        companions: &companions,
        header,
    };
    import(&origin, &checkpoint, tensors, destination.as_ref(), options)
}

/// The file at this path, or the `config.json` in a folder.
fn config_file(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(CONFIG)
    } else {
        path.to_owned()
    }
}

/// The files of a tokenizer and the like beside a configuration, as in a model's folder.
fn companions(config: &Path) -> Vec<PathBuf> {
    let folder = config.parent().unwrap_or(Path::new(""));
    let beside = COMPANIONS.into_iter().filter(|name| *name != CONFIG);
    let beside = beside.map(|name| folder.join(name));
    beside.filter(|path| path.is_file()).collect()
}

/// A tensor of the folder that is taken.
#[derive(Debug)]
struct Taken<'a> {
    stored: &'a Indexed,
    kind: Kind,
    name: String,
}

/// What is taken of a folder.
#[derive(Debug)]
struct Run<'a> {
    folder: &'a Path,
    index: &'a Index,
    family: Option<&'static Family>,
    prefix: &'a str,
    max_memory: usize,
    params: Vec<Taken<'a>>,
    /// The names of parameters by the names that the folder has after the prefix, without those
    /// left out.
    names: BTreeMap<&'a str, String>,
    state: Vec<Taken<'a>>,
    /// The items that count the optimizer's updates.
    steps: Vec<&'a Place>,
    /// The fields of groups of parameters.
    fields: Vec<(Field<'a>, &'a Place)>,
    /// Keys of the optimizer's state that no optimizer of Merak has.
    without_use: Vec<&'a str>,
    /// Keys of tensors that are no parameters of the model, such as a head that is the embedding.
    unused: Vec<&'a str>,
    left_out: Vec<&'a str>,
}

impl<'a> Run<'a> {
    /// Sorts out which tensors are parameters.
    fn of(
        folder: &'a Path,
        index: &'a Index,
        config: &Value,
        prefix: &'a str,
        max_memory: usize,
    ) -> Result<Self> {
        let family = family_of(config);
        let within = index.tensors.iter().filter_map(|stored| {
            let name = stored.key.strip_prefix(prefix)?;
            (!is_state(name)).then_some((name, stored))
        });
        let mut found: Vec<_> = within
            .map(|(name, stored)| (name.to_owned(), stored.as_tensor(name)))
            .collect();
        let mut names = BTreeMap::new();
        if let Some(family) = family {
            family.rename(config, &mut found);
            let has_place =
                |(_, tensor): &(String, StoredTensor)| family.has_place_for(config, &tensor.name);
            found.retain(has_place);
        }
        if found.is_empty() {
            return Err(foreign(folder, other_names(index, family, config, prefix)));
        }
        let by_key: BTreeMap<_, _> = index.tensors.iter().map(|t| (t.key.as_str(), t)).collect();
        let mut params = Vec::with_capacity(found.len());
        for (name, tensor) in found {
            let key = format!("{prefix}{name}");
            let Some(stored) = by_key.get(key.as_str()) else {
                continue;
            };
            names.insert(&stored.key[prefix.len()..], tensor.name.clone());
            params.push(Taken {
                stored,
                kind: Kind::Parameter,
                name: tensor.name,
            });
        }
        Ok(Self {
            folder,
            index,
            family,
            prefix,
            max_memory,
            params,
            names,
            state: Vec::new(),
            steps: Vec::new(),
            fields: Vec::new(),
            without_use: Vec::new(),
            unused: Vec::new(),
            left_out: Vec::new(),
        })
    }

    /// Leaves out tensors that are no parameters of the model, such as a head that is the
    /// embedding. Returns whether head and embedding differ although the configuration ties them.
    fn settle_head(&mut self, config: &Value) -> Result<bool> {
        let Some(family) = self.family else {
            return Ok(false);
        };
        let mut config = config.clone();
        let tie = family.tie(&config).filter(|tie| tie.is_one(&config));
        let ends = tie.map(|tie| [tie.head, tie.embedding]);
        let mut is_untied = false;
        if let Some([head, embedding]) = ends
            && let Some(first) = self.param(head)
            && let Some(second) = self.param(embedding)
        {
            let both = self.checkpoint(&[first, second])?;
            is_untied = !is_same(&both, head, embedding)?;
        }
        if is_untied {
            set_tie(&mut config, false);
        }
        let mut found: Vec<_> = self
            .params
            .iter()
            .map(|taken| (String::new(), taken.stored.as_tensor(&taken.name)))
            .collect();
        family.leave_out(&config, &mut found, &mut Vec::new());
        let needed: BTreeSet<_> = found.iter().map(|(_, t)| t.name.as_str()).collect();
        let is_needed = |taken: &Taken<'_>| needed.contains(taken.name.as_str());
        let unused = self.params.extract_if(.., |taken| !is_needed(taken));
        self.unused = unused.map(|taken| taken.stored.key.as_str()).collect();
        Ok(is_untied)
    }

    fn param(&self, name: &str) -> Option<&Taken<'a>> {
        self.params.iter().find(|taken| taken.name == name)
    }

    /// Finds the state of the optimizer and the fields of its groups; the rest is left out.
    fn take_state(&mut self, config: &Value) {
        let params = self.params.iter().map(|taken| taken.stored.key.as_str());
        let known: BTreeSet<_> = params.chain(self.unused.iter().copied()).collect();
        let params: BTreeMap<_, _> = self
            .params
            .iter()
            .map(|p| (p.name.as_str(), p.stored))
            .collect();
        let tie = self.family.and_then(|family| family.tie(config));
        let tie = tie.filter(|tie| tie.is_one(config));
        for stored in &self.index.tensors {
            let key = stored.key.as_str();
            let found = state_of(key, self.prefix, &self.names);
            // The optimizer may know a tied weight by its other name.
            let found = found.map(|(name, what)| match tie {
                Some(tie) if name == tie.head => (tie.embedding, what),
                _ => (name, what),
            });
            match found {
                _ if known.contains(key) => {}
                Some((_, STEP)) => self
                    .steps
                    .extend(stored.chunks.first().map(|chunk| &chunk.place)),
                Some((name, what))
                    if KINDS.contains(&what)
                        && params
                            .get(name)
                            .is_some_and(|param| param.shape == stored.shape) =>
                {
                    self.state.push(Taken {
                        stored,
                        kind: Kind::optimizer(what),
                        name: name.to_owned(),
                    });
                }
                Some((_, what)) if KINDS.contains(&what) => self.left_out.push(key),
                Some(_) => self.without_use.push(key),
                None => match (Field::of(key), &stored.chunks[..]) {
                    // A number that a script keeps in a tensor, such as the learning rate of a
                    // compiled step.
                    (Some(field), [chunk]) => self.fields.push((field, &chunk.place)),
                    _ => self.left_out.push(key),
                },
            }
        }
        for (key, place) in &self.index.values {
            match (state_of(key, self.prefix, &self.names), Field::of(key)) {
                (Some((_, STEP)), _) => self.steps.push(place),
                (Some(_), _) => self.without_use.push(key),
                (None, Some(field)) => self.fields.push((field, place)),
                (None, None) => self.left_out.push(key),
            }
        }
    }

    /// Step and state of the run.
    fn header(&self, config: &Value, options: &ImportOptions) -> Result<Header> {
        let model_type = config.get("model_type");
        let mut header = Header {
            topology: options.topology,
            model: json!({"model_type": model_type, "source": "torch_distributed_checkpoint"}),
            ..Header::default()
        };
        let mut counts: Vec<u64> = Vec::new();
        let mut reader = items::Reader::new(self.folder, self.max_memory);
        let groups = self.groups(&mut reader)?;
        // SGD without momentum keeps nothing.
        let is_stateless = !groups.is_empty()
            && groups.values().all(|group| {
                group.get("dampening").is_some() && group["momentum"].as_f64() == Some(0.0)
            });
        if self.state.is_empty() && self.steps.is_empty() && !is_stateless {
            return Ok(header);
        }
        for place in &self.steps {
            counts.push(reader.count(place)?);
        }
        let step = counts.iter().copied().max().unwrap_or(0);
        if counts.iter().any(|&count| count != step) {
            tracing::warn!(
                step,
                "parameters have seen different numbers of updates: the largest counts"
            );
        }
        let has = |name: &str| self.state.iter().any(|taken| taken.kind.as_str() == name);
        let decouples = groups
            .values()
            .find_map(|group| group["decoupled_weight_decay"].as_bool());
        let optimizer = match (has(KINDS[0]), has(KINDS[2]), decouples) {
            (true, false, Some(true)) => Some("adamw_torch"),
            (true, false, Some(false)) => Some("adam"),
            (false, true, _) => Some("sgd"),
            (false, false, _) if is_stateless => Some("sgd"),
            _ => None,
        };
        header.step = step;
        header.state = json!({
            "imported": {"step": step, "optimizer": optimizer, "param_groups": groups},
        });
        Ok(header)
    }

    /// The numbers of the groups of parameters, by group and field.
    fn groups(&self, reader: &mut items::Reader<'_>) -> Result<Map<String, Value>> {
        let mut groups = Map::new();
        let mut lists: BTreeMap<(&str, &str), BTreeMap<usize, Value>> = BTreeMap::new();
        for (Field { group, name, nth }, place) in &self.fields {
            let value = match reader.number(place)? {
                Found::Number(value) => value,
                // The names of a group's parameters, or an unset field.
                Found::NoNumber => continue,
                Found::Other(reason) => {
                    tracing::warn!(
                        group,
                        name,
                        reason,
                        "a field of a parameter group is left out"
                    );
                    continue;
                }
            };
            if let Some(nth) = nth {
                lists.entry((group, name)).or_default().insert(*nth, value);
                continue;
            }
            let group = groups.entry(*group).or_insert_with(|| json!({}));
            group[*name] = value;
        }
        for ((group, name), list) in lists {
            let group = groups.entry(group).or_insert_with(|| json!({}));
            group[name] = list.into_values().collect();
        }
        Ok(groups)
    }

    /// Tensors that were taken, as an open checkpoint.
    fn checkpoint(&self, taken: &[&Taken<'_>]) -> Result<Checkpoint> {
        let mut reader = items::Reader::new(self.folder, self.max_memory);
        let mut tensors = Vec::with_capacity(taken.len());
        for Taken { stored, kind, name } in taken {
            let cut = self
                .family
                .and_then(|family| family.cut(name, &stored.shape));
            tensors.push(reader.entry(stored, kind, name, cut)?);
        }
        tensors.sort_by(|a, b| (&a.kind, &a.name).cmp(&(&b.kind, &b.name)));
        let twice = tensors
            .windows(2)
            .find(|pair| (&pair[0].kind, &pair[0].name) == (&pair[1].kind, &pair[1].name));
        if let Some([first, _]) = twice {
            let reason = format!("{} `{}` is there twice", first.kind, first.name);
            return Err(foreign(self.folder, reason));
        }
        let manifest = Manifest {
            base: None,
            header: Header::default(),
            files: reader.files()?,
            tensors,
        };
        Ok(Checkpoint::over(self.folder, manifest, true).with_sums(reader.into_members()))
    }

    /// Warns about what the checkpoint leaves out.
    fn warn(&self, tensors: &[TensorEntry]) {
        if !self.left_out.is_empty() {
            let names = self.left_out.iter().take(MAX_LISTED).copied();
            let rest = self.left_out.len().saturating_sub(MAX_LISTED);
            let rest = (rest > 0).then(|| format!(".. and {rest} more"));
            let names: Vec<_> = names.map(str::to_owned).chain(rest).collect();
            tracing::warn!(
                num_items = self.left_out.len(),
                names = names.join(", "),
                "left out, for the model of the configuration has no place for it"
            );
        }
        if let Some(first) = self.without_use.first() {
            let kept = first.rsplit('.').next();
            let of = kept.filter(|kept| *kept == AMSGRAD).map(|_| "AMSGrad");
            tracing::warn!(
                num_items = self.without_use.len(),
                first,
                of,
                "state that no optimizer of Merak keeps is left out: a run that goes on does without it"
            );
        }
        if self.left_out.iter().any(|key| is_numbered(key)) {
            tracing::warn!(
                "the state of the optimizer has numbers instead of names: save what get_optimizer_state_dict gives"
            );
        }
        let kinds = tensors
            .iter()
            .filter(|tensor| tensor.kind != Kind::Parameter);
        let mut kinds: Vec<_> = kinds.map(|tensor| &tensor.kind).collect();
        kinds.dedup();
        for kind in kinds {
            let of_kind = tensors.iter().filter(|tensor| tensor.kind == *kind);
            let have: BTreeSet<_> = of_kind.map(|tensor| tensor.name.as_str()).collect();
            let mut params = self.params.iter();
            let without = params.find(|param| !have.contains(param.name.as_str()));
            if let Some(Taken { name, .. }) = without {
                tracing::warn!(%kind, name, "some parameters have no state of the optimizer");
            }
        }
    }
}

/// The message for a folder that has no name of the model after the prefix.
fn other_names(index: &Index, family: Option<&Family>, config: &Value, prefix: &str) -> String {
    if index.is_of_torchtitan() {
        return TORCHTITAN.to_owned();
    }
    let keys = index.tensors.iter().map(|tensor| tensor.key.as_str());
    let keys = keys.filter(|key| !is_state(key));
    let starts = keys.clone().filter_map(|key| {
        let family = family?;
        let is_one = |name: &str| {
            let long = [family.prefix(), name].concat();
            family.has_place_for(config, name) || family.has_place_for(config, &long)
        };
        let starts = key.match_indices('.').take(MAX_PREFIX_PARTS);
        let mut starts = starts.map(|(at, _)| at + 1);
        let start = starts.find(|&at| is_one(&key[at..]))?;
        Some(&key[..start])
    });
    if let Some(found) = starts.min_by_key(|start| start.len()) {
        return format!("the names of its weights begin with `{found}`: name --prefix {found}");
    }
    let some: Vec<_> = keys.take(3).map(|name| format!("`{name}`")).collect();
    let some = some.join(", ");
    if !some.is_empty() {
        return format!(
            "no tensor of the model has a name that begins with `{prefix}`; there is {some}: name another --prefix or --config"
        );
    }
    if !index.tensors.is_empty() {
        return "it has state of an optimizer and no weights: save the model's state_dict beside it".to_owned();
    }
    // Each value is then a dictionary of its own.
    let values = index.values.keys().take(3).map(|name| format!("`{name}`"));
    let values = values.collect::<Vec<_>>().join(", ");
    if values.is_empty() {
        return "it is empty".to_owned();
    }
    format!(
        "it has no tensors, only the values {values}, as a planner with flatten_state_dict=False saves them: \
         flatten it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR FILE`, then `.. torch_to_dcp FILE DIR2`, \
         then import DIR2"
    )
}

/// Whether a name is one of optimizer state; its parameter need not be known.
fn is_state(name: &str) -> bool {
    let known = |what: &str| KINDS.contains(&what) || what == STEP || what == AMSGRAD;
    let last = name.rsplit_once('.');
    last.is_some_and(|(before, what)| {
        known(what) && (before.starts_with("state.") || before.contains(".state."))
    })
}

/// The parameter's name in the checkpoint, and the name of its optimizer state, that a key stands
/// for.
fn state_of<'a, 'b>(
    key: &'b str,
    prefix: &str,
    names: &'a BTreeMap<&str, String>,
) -> Option<(&'a str, &'b str)> {
    const STATE: &str = "state.";
    let mut starts = key.match_indices(STATE).map(|(at, _)| at);
    starts.find_map(|at| {
        let is_start = at == 0 || key[..at].ends_with('.');
        let (name, what) = key[at + STATE.len()..]
            .rsplit_once('.')
            .filter(|_| is_start)?;
        let bare = name.strip_prefix(prefix).and_then(|name| names.get(name));
        Some((names.get(name).or(bare)?.as_str(), what))
    })
}

/// Whether a key names optimizer state by the parameter's number.
fn is_numbered(key: &str) -> bool {
    let rest = key.split_once("state.").map(|(_, rest)| rest);
    let number = rest.and_then(|rest| rest.split_once('.'));
    number.is_some_and(|(number, _)| number.parse::<u32>().is_ok())
}

/// A field of a group of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Field<'a> {
    /// The group's number, or the name of its one parameter.
    group: &'a str,
    name: &'a str,
    /// The index in a list whose members have keys of their own, such as a list of tensors.
    nth: Option<usize>,
}

impl<'a> Field<'a> {
    /// The field that a key names.
    fn of(key: &'a str) -> Option<Self> {
        const GROUPS: &str = "param_groups.";
        let at = key.find(GROUPS)?;
        let is_start = at == 0 || key[..at].ends_with('.');
        let within = Some(&key[at + GROUPS.len()..]).filter(|_| is_start)?;
        let (group, name) = within.rsplit_once('.')?;
        let whole = Self {
            group,
            name,
            nth: None,
        };
        let list = || {
            let (group, list) = group.rsplit_once('.')?;
            Some(Self {
                group,
                name: list,
                nth: Some(name.parse().ok()?),
            })
        };
        Some(list().unwrap_or(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_a_parameter_group_tells_group_field_and_member() {
        let field = |key| Field::of(key).map(|field| (field.group, field.name, field.nth));
        assert_eq!(field("optim.param_groups.0.lr"), Some(("0", "lr", None)));
        assert_eq!(
            field("param_groups.h.0.weight.lr"),
            Some(("h.0.weight", "lr", None))
        );
        assert_eq!(
            field("optim.param_groups.0.betas.1"),
            Some(("0", "betas", Some(1)))
        );
        assert_eq!(
            field("param_groups.h.0.weight.betas.1"),
            Some(("h.0.weight", "betas", Some(1)))
        );
        for key in ["optim.my_param_groups.0.lr", "param_groups.0", "lr"] {
            assert_eq!(field(key), None, "{key}");
        }
    }
}
