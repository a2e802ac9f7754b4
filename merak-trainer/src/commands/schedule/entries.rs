//! Entries of costs and bytes, from an option or a file.

use super::{Failure, MAX_SCHEDULE_BYTES, of_file};
use merak_ckpt::words::file;
use std::path::PathBuf;

/// Entries such as `F=1,I=2`, and the file that they come from, if any.
#[derive(Default)]
pub(super) struct Entries {
    pub(super) text: String,
    file: Option<PathBuf>,
}

impl Entries {
    /// An option's value, or the content of the file that it names with an `@`.
    pub(super) fn read(option: &str, value: &str) -> Result<Self, Failure> {
        let entries = match value.strip_prefix('@') {
            None => Self {
                text: value.to_owned(),
                file: None,
            },
            Some(path) => {
                let path = PathBuf::from(path);
                let read = merak_ckpt::read_text(&path, MAX_SCHEDULE_BYTES);
                let read = read.map_err(merak_trainer::Error::reading(&path))?;
                Self {
                    // Some editors put a byte-order mark before a text.
                    text: read.trim_start_matches('\u{feff}').to_owned(),
                    file: Some(path),
                }
            }
        };
        if entries.text.trim().is_empty() {
            let place = entries.file.as_deref().map(file);
            let place = place.map_or_else(String::new, |file| format!("{file}, the file of "));
            return Err(format!(
                "{place}{option} is empty, expected entries such as F=1,I=1 or I=1MiB,W=512KiB"
            )
            .into());
        }
        Ok(entries)
    }

    /// What is wrong with the entries, with the file that has them.
    pub(super) fn failure(&self, error: merak_pipe::Error) -> Failure {
        match &self.file {
            Some(path) => of_file(path, &error),
            None => error.into(),
        }
    }
}

/// Whether costs such as `F=1,R=0.5` say what a recompute costs.
pub(super) fn names_recompute(costs: &str) -> bool {
    let mut entries = costs.split([',', '\n']);
    entries.any(|entry| entry.split('=').next().is_some_and(|key| key.trim() == "R"))
}

/// Entries such as `I=1MiB:64k` with their sizes as numbers of bytes; text that is not a size
/// stays, for the parser of the entries to refuse.
pub(super) fn in_bytes(text: &str) -> String {
    let size = |text: &str| {
        let size = merak_ckpt::parse_byte_size(text);
        size.map_or_else(|_| text.to_owned(), |bytes| bytes.to_string())
    };
    let entry = |entry: &str| match entry.split_once('=') {
        Some((key, sizes)) => {
            let sizes: Vec<_> = sizes.split(':').map(size).collect();
            format!("{key}={}", sizes.join(":"))
        }
        None => entry.to_owned(),
    };
    let line = |line: &str| {
        let entries: Vec<_> = line.split(',').map(entry).collect();
        entries.join(",")
    };
    let lines: Vec<_> = text.lines().map(line).collect();
    lines.join("\n")
}
