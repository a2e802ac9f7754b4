//! The layers of the configuration as sources of the crate `config`, which merges them: the values
//! that a file, the environment, the command line or the command gives.

use ::config::{ConfigError as Never, Map, Source, Value, ValueKind};
use merak_ckpt::words::pasted_dash;

use super::{
    key::Raw,
    keys::{SECTIONS, keys},
    origin::{COMMAND, in_environment, on_command_line},
    reserved::RESERVED,
    setting::Setting,
    strict,
};
use crate::error::{ConfigError, Error, Result};

/// A layer: names of keys with their values, in its order. Names are full ones with underscores
/// (`data.path`), not yet looked up.
///
/// A text whose key is to tell its type is a string. A value with a type of its own is the one item
/// of a list: `config` replaces lists, but would merge the tables of two layers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Layer(pub(crate) Vec<(String, Value)>);

/// The table of all keys. Inside it names are taken as they are, not as paths.
const KEYS: &str = "keys";

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, Never> {
        let keys: Map<_, _> = self.0.iter().cloned().collect();
        Ok(Map::from([(KEYS.to_owned(), keys.into())]))
    }
}

/// The values of all layers, of which the later wins.
pub(crate) fn merged(layers: &[Layer]) -> Map<String, Value> {
    let sources = layers.iter().cloned();
    let builder = sources.fold(::config::Config::builder(), |all, layer| {
        all.add_source(layer)
    });
    let all = builder.build().and_then(|all| all.get_table(KEYS));
    all.expect("sources in memory do not fail")
}

/// A value of a layer as its key reads it.
pub(crate) fn raw(value: &Value) -> Raw {
    match &value.kind {
        ValueKind::String(text) => Raw::Text(text.clone()),
        ValueKind::Array(one) => Raw::Typed(one.first().map(strict::json).unwrap_or_default()),
        _ => Raw::Typed(strict::json(value)),
    }
}

/// A value that the command itself gives a key, besides the layers: from one of the command's own
/// options or arguments, or always.
#[derive(Debug, Clone)]
pub struct Given(String, Value);

impl Given {
    /// The value of a key that has another name on the command, such as `--schedule` or
    /// `CHECKPOINT`. Messages use that name.
    pub fn by(option: impl AsRef<str>, key: &'static str, text: impl Into<String>) -> Self {
        let origin = on_command_line(option.as_ref());
        Self(key.to_owned(), Value::new(Some(&origin), text.into()))
    }

    /// The value that a key always has under this command.
    pub fn always(key: &'static str, text: impl Into<String>) -> Self {
        let origin = COMMAND.to_owned();
        Self(key.to_owned(), Value::new(Some(&origin), text.into()))
    }
}

/// The command's own values.
pub(crate) fn from_command(given: impl IntoIterator<Item = Given>) -> Layer {
    let values = given.into_iter().map(|Given(key, value)| (key, value));
    Layer(values.collect())
}

/// Prefix of the environment variables that set keys.
pub const VARIABLES: &str = "MERAK_";

/// The layer of the environment: `MERAK_TP`, `MERAK_DATA__PATH`; `MERAK_LOG` is the log filter.
pub(crate) fn from_environment(
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Layer> {
    let mut variables: Vec<_> = environment
        .into_iter()
        .filter(|(variable, _)| variable.starts_with(VARIABLES) && variable != "MERAK_LOG")
        .collect();
    // The operating system decides the order of the environment.
    variables.sort();
    let mut layer = Layer::default();
    for (variable, text) in variables {
        let name = variable[VARIABLES.len()..]
            .to_ascii_lowercase()
            .replace("__", ".");
        layer.add_text(name, text, &in_environment(&variable))?;
    }
    Ok(layer)
}

/// The layer of the command line: `--key value`, `--key=value`, `--set key=value`, a bare `--flag`.
pub(crate) fn from_command_line(arguments: &[String]) -> Result<Layer> {
    let mut layer = Layer::default();
    let mut rest = arguments.iter().peekable();
    while let Some(argument) = rest.next() {
        let Some(option) = argument
            .strip_prefix("--")
            .filter(|option| !option.is_empty())
        else {
            return Err(Error::Config(match pasted_dash(argument) {
                Some(message) => ConfigError::PastedDash { message },
                None => ConfigError::UnexpectedArgument {
                    argument: argument.clone(),
                },
            }));
        };
        let (key, attached) = match option.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (option, None),
        };
        let is_word = |next: &&String| !next.starts_with("--");
        if key == "set" {
            let pair = attached.or_else(|| rest.next_if(is_word).cloned());
            let (key, value) = split_pair(pair)?;
            let origin = on_command_line(&format!("--set {key}"));
            layer.add_text(spelled(&key), value, &origin)?;
            continue;
        }
        let (name, option) = (spelled(key), format!("--{key}"));
        let is_choice = |next: &str| Option::<bool>::from_text(next).is_ok();
        let belongs =
            |next: &&String| is_word(next) && (is_flag(&name) != Some(true) || is_choice(next));
        let text = match attached.or_else(|| rest.next_if(belongs).cloned()) {
            Some(text) => text,
            None if is_flag(&name) == Some(false) => {
                let example = format!("{option} VALUE");
                return Err(Error::Config(ConfigError::MissingValue { option, example }));
            }
            None => "true".into(),
        };
        layer.refuse_second_list(&name, &text, &option)?;
        layer.add_text(name, text, &on_command_line(&option))?;
    }
    Ok(layer)
}

/// Key and value of the word after `--set`.
fn split_pair(pair: Option<String>) -> Result<(String, String)> {
    let Some(pair) = pair else {
        return Err(Error::Config(ConfigError::MissingValue {
            option: "--set".into(),
            example: "--set tp=2".into(),
        }));
    };
    if let Some((key, value)) = pair.split_once('=') {
        return Ok((key.to_owned(), value.to_owned()));
    }
    let example = match pair.split_once(':') {
        Some((key, value)) => format!("--set {key}={value}"),
        None => format!("--set {pair}=VALUE"),
    };
    let option = format!("--set {pair}");
    Err(Error::Config(ConfigError::MissingValue { option, example }))
}

/// Short names that keys have on the command line.
const SHORT: [(&str, &str); 1] = [("resume", "resume_from_checkpoint")];

/// The full name of a key on the command line, with underscores.
fn spelled(key: &str) -> String {
    let key = key.replace('-', "_");
    let short = SHORT.iter().find(|(short, _)| *short == key);
    short.map_or(key, |(_, name)| (*name).to_owned())
}

/// The keys that this version knows, and whether each is a flag.
fn known() -> impl Iterator<Item = (&'static str, bool)> {
    let reserved = RESERVED.iter().map(|key| (key.name, key.is_flag()));
    keys().map(|key| (key.name, key.is_flag)).chain(reserved)
}

/// Whether a key is a flag; `None` for an unknown one, which gets its own error.
fn is_flag(name: &str) -> Option<bool> {
    let sections = SECTIONS.iter().map(|section| (*section, false));
    let mut known = known().chain(sections);
    known
        .find(|(key, _)| *key == name)
        .map(|(_, is_flag)| is_flag)
}

impl Layer {
    /// Refuses a list for a key that an option before this one has given another. Lists are not
    /// joined: items of the first one would be lost unseen.
    fn refuse_second_list(&self, name: &str, text: &str, option: &str) -> Result<()> {
        let name = full_name(name.to_owned());
        let Some(key) = keys().find(|key| key.name == name && key.is_list) else {
            return Ok(());
        };
        let set = on_command_line("--set ");
        let by_option = |value: &Value| !value.origin().unwrap_or_default().starts_with(&set);
        let first = self.0.iter().find_map(|(found, value)| match &value.kind {
            ValueKind::String(first) if *found == name && by_option(value) => {
                Some(first).filter(|first| *first != text && text != "none")
            }
            _ => None,
        });
        let Some(first) = first else {
            return Ok(());
        };
        let is_json = |text: &str| text.trim_start().starts_with('[');
        let instead = if is_json(first) || is_json(text) {
            "one list of all items".to_owned()
        } else {
            format!("{option} {first},{text}")
        };
        Err(Error::Config(ConfigError::SecondList {
            key: key.name,
            place: on_command_line(option),
            instead,
        }))
    }

    /// Adds a value as text; that of a whole section is a JSON object.
    fn add_text(&mut self, name: String, text: String, origin: &String) -> Result<()> {
        if SECTIONS.contains(&name.as_str()) {
            let section = strict::parse(&text).unwrap_or_else(|_| text.into());
            return self.add_typed(name, Value::new(Some(origin), section.kind));
        }
        self.0
            .push((full_name(name), Value::new(Some(origin), text)));
        Ok(())
    }

    /// Adds a value that has a type, a section key by key.
    pub(crate) fn add_typed(&mut self, name: String, value: Value) -> Result<()> {
        let origin = value.origin().unwrap_or_default().to_owned();
        if !SECTIONS.contains(&name.as_str()) {
            let one = Value::new(Some(&origin), vec![value]);
            self.0.push((full_name(name), one));
            return Ok(());
        }
        // The one word that stands for a table.
        let is_auto = matches!(&value.kind, ValueKind::String(word) if word == "auto");
        if name == "tp_layer_lists" && is_auto {
            return self.add_typed(format!("{name}.auto"), Value::new(Some(&origin), true));
        }
        let ValueKind::Table(table) = value.kind else {
            return Err(Error::Config(ConfigError::WrongType {
                expected: table_of(&name),
                key: name,
                found: strict::json(&value).to_string(),
                place: origin,
            }));
        };
        for (key, value) in table {
            let origin = value.origin().unwrap_or(&origin).to_owned();
            self.add_typed(
                format!("{name}.{key}"),
                Value::new(Some(&origin), value.kind),
            )?;
        }
        Ok(())
    }
}

/// A section, with the keys that it begins with.
fn table_of(section: &str) -> String {
    const NAMES: usize = 2;
    let is_within = |name: &&str| name.rsplit_once('.').is_some_and(|(of, _)| of == section);
    let mut names = keys().map(|key| key.name).filter(is_within);
    let first: Vec<_> = names.by_ref().take(NAMES).collect();
    let rest = names.next().map_or("", |_| ", ..");
    let table = format!("a table of \"{}\"{rest}", first.join("\", \""));
    match section {
        "tp_layer_lists" => format!("\"auto\" or {table}"),
        _ => table,
    }
}

/// The full name of a key: the tensor-parallel lists may stand outside their table.
fn full_name(name: String) -> String {
    let full = format!("tp_layer_lists.{name}");
    let is_list = known().any(|(key, _)| key == full);
    if is_list { full } else { name }
}
