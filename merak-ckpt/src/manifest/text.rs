//! The manifest as text, and back.

use super::check::limit;
use super::{Base, FileEntry, Header, Manifest, TensorEntry, Topology, present};
use crate::Checksum;
use crate::error::{Damage, Problem};
use crate::format;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Bytes of the text after the stretch that the checksum covers.
const TAIL_BYTES: usize = "\"checksum\": \"0123456789abcdef\"\n}\n".len();

/// The digits of the checksum in these bytes.
const TAIL_DIGITS: std::ops::Range<usize> = 13..29;

/// Why a text is no manifest of ours.
#[derive(Debug)]
pub(super) enum Refused {
    Newer { found: u64 },
    Damaged(Damage),
}

/// Enough to tell the version of any manifest, also of later ones.
#[derive(Deserialize)]
struct Probe {
    format: String,
    version: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document<'a> {
    #[expect(dead_code, reason = "the probe has looked at it")]
    format: String,
    #[expect(dead_code, reason = "the probe has looked at it")]
    version: u64,
    step: u64,
    topology: Topology,
    // A value takes many times the memory of its text, so the length of the text is checked first.
    #[serde(borrow)]
    model: &'a RawValue,
    #[serde(borrow)]
    state: &'a RawValue,
    #[serde(default, deserialize_with = "present")]
    base: Option<Base>,
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
    #[expect(dead_code, reason = "it was checked with the end of the text")]
    checksum: Checksum,
}

impl Manifest {
    /// The text of `manifest.json`: one line per file and tensor, and a checksum of it all.
    pub(crate) fn to_text(&self) -> String {
        let Header {
            step,
            topology,
            model,
            state,
        } = &self.header;
        let mut text = String::from("{\n");
        text.push_str(&member("format", &format::NAME));
        text.push_str(&member("version", &version(self.base.as_ref())));
        text.push_str(&member("step", step));
        text.push_str(&member("topology", topology));
        text.push_str(&member("model", &sorted(model)));
        text.push_str(&member("state", &sorted(state)));
        if let Some(base) = &self.base {
            text.push_str(&member("base", base));
        }
        text.push_str(&list("files", &self.files));
        text.push_str(&list("tensors", &self.tensors));
        let checksum = Checksum::of(text.as_bytes());
        text + &tail(checksum)
    }

    /// Reads and checks the text of `manifest.json`.
    pub(super) fn from_text(text: &[u8]) -> Result<Self, Refused> {
        let probe: Probe = serde_json::from_slice(text).map_err(|error| malformed(&error))?;
        if probe.format != format::NAME {
            return Err(malformed(&format!(
                "the format is `{}`, expected `{}`",
                probe.format,
                format::NAME
            )));
        }
        if probe.version > format::VERSION {
            return Err(Refused::Newer {
                found: probe.version,
            });
        }
        if probe.version == 0 {
            return Err(malformed(&"the version is 0, expected 1 or more"));
        }
        check_tail(text)?;
        let document: Document<'_> =
            serde_json::from_slice(text).map_err(|error| malformed(&error))?;
        let expected = version(document.base.as_ref());
        if probe.version != expected {
            let (found, has) = (probe.version, document.base.map_or("no", |_| "a"));
            return Err(malformed(&format!(
                "the version is {found}, expected {expected} with {has} base"
            )));
        }
        let manifest = Self {
            base: document.base,
            header: Header {
                step: document.step,
                topology: document.topology,
                model: value("bytes of `model`", document.model)?,
                state: value("bytes of `state`", document.state)?,
            },
            files: document.files,
            tensors: document.tensors,
        };
        manifest.check().map_err(Refused::Damaged)?;
        Ok(manifest)
    }
}

/// The version of a manifest with this base.
fn version(base: Option<&Base>) -> u64 {
    base.map_or(1, |_| format::VERSION)
}

fn value(bytes_of: &'static str, text: &RawValue) -> Result<serde_json::Value, Refused> {
    limit(bytes_of, text.get().len(), format::MAX_STATE_BYTES).map_err(Refused::Damaged)?;
    serde_json::from_str(text.get()).map_err(|error| malformed(&error))
}

/// The end of the text.
fn tail(checksum: Checksum) -> String {
    format!("\"checksum\": \"{checksum}\"\n}}\n")
}

/// Checks the end of the text and with it all that comes before, so that damage is not taken for
/// values.
fn check_tail(text: &[u8]) -> Result<(), Refused> {
    let (body, end) = text.split_at(text.len().saturating_sub(TAIL_BYTES));
    let found = Checksum::of(body);
    if end == tail(found).as_bytes() {
        return Ok(());
    }
    let stated = || {
        let digits = str::from_utf8(end).ok()?.get(TAIL_DIGITS)?;
        let stated = serde_json::from_value(digits.into()).ok()?;
        (end == tail(stated).as_bytes()).then_some(stated)
    };
    Err(match stated() {
        Some(expected) => damaged(Problem::Checksum { expected, found }),
        None => malformed(&format!(
            "it does not end like `{}`",
            tail(found).trim_end()
        )),
    })
}

/// `"key": value,` on a line of its own.
fn member(key: &str, value: &impl Serialize) -> String {
    format!("\"{key}\": {},\n", json(value))
}

/// A list with one item a line.
fn list<T: Serialize>(key: &str, items: &[T]) -> String {
    let lines: Vec<_> = items.iter().map(json).collect();
    if lines.is_empty() {
        return format!("\"{key}\": [],\n");
    }
    format!("\"{key}\": [\n{}\n],\n", lines.join(",\n"))
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("these values have text keys and write to memory")
}

fn sorted(value: &serde_json::Value) -> serde_json::Value {
    let mut value = value.clone();
    value.sort_all_objects();
    value
}

fn malformed(reason: &impl ToString) -> Refused {
    damaged(Problem::Malformed {
        reason: reason.to_string(),
    })
}

fn damaged(problem: Problem) -> Refused {
    Refused::Damaged(Damage::of_file(format::MANIFEST, problem))
}
