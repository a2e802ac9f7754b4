//! Configuration: keys, their layers, and the checks that make them agree.
//!
//! ```text
//! defaults < file < environment MERAK_* < command line      one value and one origin per key
//!                         │ Config::check
//!                         ▼
//!                 CheckedArguments
//! ```

mod check;
mod checked;
mod choice;
mod file;
mod folders;
mod foreign;
mod help;
mod idle;
mod inputs;
mod key;
mod keys;
mod layer;
mod lines;
mod lists;
mod names;
mod nearest;
mod numbers;
mod origin;
mod range;
mod refusal;
mod reserved;
mod setting;
mod sources;
mod strict;

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use ::config::Map;
use merak_ckpt::words::{brief, file, folded, row};
use serde_json::Value;

pub(crate) use self::checked::Host;
pub(crate) use self::choice::one_of;
pub(crate) use self::file::read_table;
pub(crate) use self::folders::RESOLVED;
pub(crate) use self::keys::given_list;
use self::nearest::nearest_key;
pub(crate) use self::setting::whole;
pub(crate) use self::strict::json;
pub use self::{
    checked::CheckedArguments,
    choice::{
        BackendChoice, CostSource, DataFormat, Device, EarlyStop, HalfPrecision, Offload,
        RecomputeMode, ReportTo, TraceMethod,
    },
    help::{key_help, key_page},
    inputs::{InputPaths, Mixture, MixturePart},
    key::Key,
    keys::{
        AutopipeArguments, ComputeArguments, DataArguments, DistributedArguments, MerakArguments,
        ModelArguments, TpLayerListArguments, keys,
    },
    layer::{Given, VARIABLES},
    lists::{SplitRatio, WeightSlice},
    names::{AdapterName, MetricName, ModelClasses},
    numbers::{Boundaries, LrScales, Ratios, SeqLength, Temperature, ThreadsPerRank, TokenIds},
    origin::Origin,
    range::Range,
    setting::InputPath,
    sources::{TemplateSource, TokenizerSource},
};
use self::{
    key::Raw,
    layer::Layer,
    refusal::Refusal,
    reserved::{NO_EFFECT, RESERVED, is_true, sets_nothing},
};
use crate::error::{ConfigError, Error, Result};

/// The arguments of a run, and where each value came from.
///
/// # Examples
///
/// ```
/// let line = ["--tp", "2", "--learning-rate=3e-4", "--save"].map(String::from);
/// let environment = [("MERAK_PP".to_owned(), "2".to_owned())];
/// let config = merak_trainer::Config::load(None, environment, &line)?;
/// assert_eq!((config.arguments().tp, config.arguments().pp), (2, 2));
/// assert_eq!(config.origin("pp").to_string(), "environment MERAK_PP");
/// # Ok::<(), merak_trainer::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Config {
    arguments: MerakArguments,
    /// The values that layers set, each with its origin.
    values: Map<String, ::config::Value>,
    file: Option<PathBuf>,
}

/// Keys that name a file of one host: a library, what the first rank knows of its machine's speed,
/// and inputs, which are compared by their contents since they may lie elsewhere on another host.
const OF_A_HOST: [&str; 10] = [
    "cost_cache",
    "lora_config",
    "model.config",
    "model.hf_dir",
    "data.path",
    "data.mixture",
    "data.validation_path",
    "data.chat_template",
    "data.tokenizer",
    "distributed.nccl_library",
];

impl Config {
    /// Resolves the layers: defaults, then `file`, then the `MERAK_*` of `environment`, then the
    /// options of `command_line`.
    ///
    /// # Errors
    ///
    /// An unreadable file, an unknown key, a value of the wrong type, and a key or value that this
    /// version lacks, each with its place.
    pub fn load(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        command_line: &[String],
    ) -> Result<Self> {
        Self::load_with(file, environment, command_line, [])
    }

    /// As [`Config::load`], with the command's own values above all layers.
    ///
    /// # Errors
    ///
    /// As [`Config::load`].
    pub fn load_with(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        command_line: &[String],
        given: impl IntoIterator<Item = Given>,
    ) -> Result<Self> {
        let mut config = Self {
            file: file.map(Path::to_path_buf),
            ..Self::default()
        };
        let layers = [
            file.map_or_else(|| Ok(Layer::default()), file::read),
            layer::from_environment(environment),
            layer::from_command_line(command_line),
            Ok(layer::from_command(given)),
        ];
        let mut read = Vec::new();
        for layer in layers {
            let layer = layer?;
            // A wrong value is refused even where a later layer replaces it.
            config.read(layer.0.iter().map(|(name, value)| (name, value)))?;
            read.push(layer);
        }
        config.values = layer::merged(&read);
        config.arguments = config.read(&config.values)?;
        config.look_into_folders();
        Ok(config)
    }

    /// The values.
    pub fn arguments(&self) -> &MerakArguments {
        &self.arguments
    }

    /// The configuration file, if there was one.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Where the value of a key came from, by the key's full name.
    pub fn origin(&self, key: &str) -> Origin<'_> {
        self.values.get(key).map_or(Origin::Default, Origin::of)
    }

    /// Adds to an error the key that is to blame, with its place where a layer set it.
    #[must_use]
    pub fn locate(&self, error: Error) -> Error {
        let mut keys = error.keys();
        keys.extend(self.key_of_weights(&error));
        // `max_by_key` takes the last of equals: reversed, that is the first key.
        let likeliest = keys.into_iter().rev();
        let Some(key) = likeliest.max_by_key(|key| self.origin(key).suspicion()) else {
            return error;
        };
        let source = match error {
            Error::Blamed { source, .. } => source,
            other => Box::new(other),
        };
        let origin = self.origin(key);
        let place = (origin != Origin::Default).then(|| origin.to_string());
        Error::Blamed { key, place, source }
    }

    /// The key that names the weights which cannot be read.
    fn key_of_weights(&self, error: &Error) -> Option<&'static str> {
        use merak_ckpt::Error as E;
        let Error::Checkpoint(error) = error else {
            return None;
        };
        if self.arguments.resume_from_checkpoint.is_some() {
            let is_none = match **error {
                E::NotFound { .. } | E::NotACheckpoint { .. } => true,
                E::Io { .. } => error.is_user_error(),
                _ => false,
            };
            return is_none.then_some("resume_from_checkpoint");
        }
        let folder = file(&self.arguments.model.hf_dir.as_ref()?.0);
        let is_there = error.is_user_error() && error.to_string().contains(&folder);
        is_there.then_some("model.hf_dir")
    }

    /// Checks the values against each other.
    ///
    /// # Errors
    ///
    /// The first illegal value, with its place and the legal ones.
    pub fn check(&self) -> Result<CheckedArguments> {
        self.check_use_cpu()?;
        check::check(&self.arguments, &|key| self.origin(key).to_string())
            .map_err(|error| self.locate(error))
    }

    /// As [`Config::check`], whatever engines, backends and readers are in this build: for a plan
    /// of other machines.
    ///
    /// # Errors
    ///
    /// As [`Config::check`].
    pub fn check_to_plan(&self) -> Result<CheckedArguments> {
        self.check_use_cpu()?;
        check::check_to_plan(&self.arguments, &|key| self.origin(key).to_string())
            .map_err(|error| self.locate(error))
    }

    /// `use_cpu`, which is no argument, agrees with the device.
    fn check_use_cpu(&self) -> Result<()> {
        let key = "use_cpu";
        let asks = self.values.get(key).map(layer::raw);
        let device = self.arguments.compute.device;
        if device == Device::Cpu || !asks.is_some_and(|raw| is_true(&raw)) {
            return Ok(());
        }
        Err(Error::Config(ConfigError::IllegalValue {
            key,
            found: "true".to_owned(),
            place: self.origin(key).to_string(),
            expected: format!(
                "false while \"compute.device\" is \"{device}\" ({})",
                self.origin("compute.device")
            ),
        }))
    }

    /// The content of `config.resolved.toml`: every key that has a value. Loading it gives the same
    /// arguments.
    pub fn to_toml(&self) -> String {
        self.toml_of(keys())
    }

    /// The part of [`Config::to_toml`] that the processes of a run must have alike: without the
    /// keys that name a file of one host. What the inputs among them hold is to be compared too.
    pub fn to_common_toml(&self) -> String {
        self.toml_of(keys().filter(|key| !OF_A_HOST.contains(&key.name)))
    }

    fn toml_of(&self, keys: impl Iterator<Item = &'static Key>) -> String {
        let mut text = String::new();
        let mut section = "";
        for key in keys {
            let value = self.arguments.get(key.name).unwrap_or_default();
            let (prefix, name) = key.name.rsplit_once('.').unwrap_or(("", key.name));
            let Some(value) = toml_of_json(&value) else {
                continue;
            };
            if prefix != section {
                section = prefix;
                let _ = writeln!(text, "\n[{section}]");
            }
            let _ = writeln!(text, "{name} = {value}");
        }
        text
    }

    /// The resolved configuration as a table for people: key, value, origin. Where a row exceeds
    /// `columns`, its origin gets a line of its own.
    pub fn explain(&self, columns: Option<usize>) -> String {
        let rows: Vec<_> = keys()
            .map(|key| {
                let value = self.arguments.get(key.name).unwrap_or_default();
                let origin = self.origin(key.name).to_string();
                (key.name, brief(&shown(&value)), origin)
            })
            .collect();
        let width = |column: fn(&(&str, String, String)) -> usize| rows.iter().map(column).max();
        let names = width(|row| row.0.len()).unwrap_or(0);
        let values = width(|row| row.1.chars().count().min(40)).unwrap_or(0);
        let mut text = String::new();
        for (name, value, origin) in rows {
            let row = row([name, &value, &origin], [names, values], columns);
            let _ = writeln!(text, "{row}");
        }
        // A value may be longer than a line.
        text = folded(&text, columns);
        text
    }

    /// The resolved configuration as data: `{"tp": {"value": 2, "origin": "merak.toml:3"}, ..}`.
    pub fn to_json(&self) -> Value {
        let entry = |key: &'static Key| {
            let value = self.arguments.get(key.name).unwrap_or_default();
            let origin = self.origin(key.name).to_string();
            (
                key.name.to_owned(),
                serde_json::json!({"value": value, "origin": origin}),
            )
        };
        Value::Object(keys().map(entry).collect())
    }

    /// The arguments that these values make.
    fn read<'a>(
        &self,
        values: impl IntoIterator<Item = (&'a String, &'a ::config::Value)>,
    ) -> Result<MerakArguments> {
        let mut arguments = MerakArguments::default();
        let mut unknown = Vec::new();
        for (name, value) in values {
            match self.read_one(&mut arguments, name, value) {
                Err(Error::Config(error @ ConfigError::UnknownKey { .. })) => unknown.push(error),
                outcome => outcome?,
            }
        }
        match unknown.len() {
            0 | 1 => unknown
                .pop()
                .map_or(Ok(arguments), |error| Err(error.into())),
            _ => Err(Error::Config(ConfigError::UnknownKeys(unknown))),
        }
    }

    fn read_one(
        &self,
        arguments: &mut MerakArguments,
        name: &str,
        value: &::config::Value,
    ) -> Result<()> {
        let (raw, origin) = (layer::raw(value), Origin::of(value));
        let place = || origin.to_string();
        if let Some(key) = keys().find(|key| key.name == name) {
            let base = match (origin, &self.file) {
                (Origin::File(_), Some(file)) => file.parent().unwrap_or(file),
                _ => Path::new(""),
            };
            let set = arguments.set(key.name, &raw, base).unwrap_or(Ok(()));
            let refused = |refusal| refused(key.name, refusal, (key.expected)(), &raw, place());
            return set.map_err(refused);
        }
        if let Some(key) = RESERVED.iter().find(|key| key.name == name) {
            let refused = |refusal| refused(key.name, refusal, String::new(), &raw, place());
            return key.check(&raw).map_err(refused);
        }
        if let Some((key, instead)) = NO_EFFECT.iter().find(|(key, _)| *key == name) {
            if sets_nothing(&raw) {
                return Ok(());
            }
            let advice = match *instead {
                "" => "remove it".to_owned(),
                instead => format!("see {instead}"),
            };
            return Err(Error::Config(ConfigError::WithoutEffect {
                key,
                place: place(),
                advice,
            }));
        }
        Err(Error::Config(ConfigError::UnknownKey {
            key: name.to_owned(),
            place: place(),
            nearest: nearest_key(name).map(Into::into),
        }))
    }
}

impl MerakArguments {
    /// Checks the values against each other, for arguments that were set in code.
    ///
    /// # Errors
    ///
    /// The first illegal value, with the legal ones.
    pub fn check(&self) -> Result<CheckedArguments> {
        check::check(self, &|_| "set in code".into())
    }

    /// As [`MerakArguments::check`], whatever is in this build; `place` says where the values are
    /// from.
    pub(crate) fn check_to_plan(&self, place: &str) -> Result<CheckedArguments> {
        check::check_to_plan(self, &|_| place.into())
    }
}

/// A refusal with its key, value and place.
fn refused(
    key: &'static str,
    refusal: Refusal,
    expected: String,
    raw: &Raw,
    place: String,
) -> Error {
    let found = match raw {
        Raw::Typed(value) => shown(value),
        // Text is quoted unless it is a number or a flag.
        Raw::Text(text) => match serde_json::from_str(text) {
            Ok(Value::Number(_) | Value::Bool(_)) => text.trim().to_owned(),
            _ => format!("\"{text}\""),
        },
    };
    let wrong = |entry: &str, expected, found| ConfigError::WrongType {
        key: format!("{key}{entry}"),
        expected,
        found,
        place: place.clone(),
    };
    let found_with = |reason: String| format!("{}{reason}", brief(&found));
    Error::Config(match refusal {
        Refusal::Type => wrong("", expected, found),
        Refusal::Beyond { most } => {
            let reason = format!(", which is beyond the largest, {most}");
            wrong("", expected, found_with(reason))
        }
        Refusal::Syntax { reason } => {
            wrong("", expected, found_with(format!(" ({})", brief(&reason))))
        }
        Refusal::Entry {
            name,
            expected,
            found,
        } => wrong(&format!(".{name}"), expected, shown(&found)),
        Refusal::Choice { choices, nearest } => ConfigError::UnknownChoice {
            key,
            choices,
            found,
            place,
            nearest,
        },
        Refusal::NotAvailable { instead } => ConfigError::NotAvailable {
            key,
            found,
            place,
            instead,
        },
    })
}

/// A value as people read it.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        value => value.to_string(),
    }
}

/// A value in TOML's spelling; `None` where it is absent, for which TOML has no word.
fn toml_of_json(value: &Value) -> Option<toml::Value> {
    Some(match value {
        Value::Null => return None,
        Value::Bool(flag) => toml::Value::Boolean(*flag),
        Value::Number(number) => match number.as_i64() {
            Some(number) => toml::Value::Integer(number),
            None => toml::Value::Float(number.as_f64()?),
        },
        Value::String(text) => toml::Value::String(text.clone()),
        Value::Array(items) => toml::Value::Array(items.iter().filter_map(toml_of_json).collect()),
        Value::Object(table) => toml::Value::Table(
            table
                .iter()
                .filter_map(|(key, value)| Some((key.clone(), toml_of_json(value)?)))
                .collect(),
        ),
    })
}
