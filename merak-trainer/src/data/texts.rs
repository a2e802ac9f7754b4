//! The texts that a configuration names, one piece after the other.

use std::{
    io::BufReader,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use serde_json::Value;

use super::{
    crates::CrateSources,
    input::Input,
    parquet,
    pieces::{Counted, FileParts, TextPart},
    plain::TextKind,
    records::{self, FirstRecord, Parsed, Record},
    text::{Candidate, check_head, files_of},
};
use crate::{
    config::{DataArguments, DataFormat},
    error::{DataError, Error, Result},
};

/// The fields of a record that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fields {
    /// `text`, which each record must have.
    Text,
    /// Every text, end to end.
    All,
}

/// The files of texts, all of which together need not fit in memory.
#[derive(Debug)]
pub(super) struct Texts {
    /// Each with the bytes of it that are read at most.
    files: Vec<(Candidate, u64)>,
    /// Files that were passed over because they are not text.
    pub(super) skipped: usize,
    kind: TextKind,
    format: DataFormat,
    /// The first record, where all others must be of its kind.
    pub(super) first: Option<FirstRecord>,
}

impl Texts {
    /// Lists the files that `arguments` name to train on, or the sources of the crates where they
    /// name none.
    ///
    /// # Errors
    ///
    /// An unreadable path, one without a byte, a format that holds no text.
    pub(super) fn of(
        arguments: &DataArguments,
        crates: &CrateSources,
        kind: TextKind,
    ) -> Result<Self> {
        let format = arguments.format;
        let inputs: Vec<_> = match (&arguments.mixture, &arguments.path) {
            (Some(mixture), _) => {
                let parts = mixture.parts().iter();
                parts.map(|part| Input::mixture(&part.path)).collect()
            }
            (None, path) => path.iter().map(Input::data).collect(),
        };
        let mut texts = Self {
            files: Vec::new(),
            skipped: 0,
            kind: if format == DataFormat::Text {
                kind
            } else {
                TextKind::Records
            },
            format,
            first: None,
        };
        let mut left = arguments.max_bytes.map_or(u64::MAX, |bytes| bytes as u64);
        for input in &inputs {
            input.blamed(texts.add(*input, arguments.skip_binary, &mut left))?;
        }
        if inputs.is_empty() {
            // The user did not choose these files, so one that is not text is passed over.
            texts.add_files(crates.files(arguments.max_bytes)?, true, &mut left)?;
        }
        Ok(texts)
    }

    fn add(&mut self, input: Input<'_>, skips: bool, left: &mut u64) -> Result<()> {
        for path in input.iter() {
            let before = (self.files.len(), self.skipped);
            let takes = |path: &Path| self.format != DataFormat::Parquet || parquet::is_one(path);
            self.add_files(files_of(input.key, path, &takes)?, skips, left)?;
            if self.files.len() > before.0 || *left == 0 {
                continue;
            }
            let (path, skipped) = (path.to_path_buf(), self.skipped - before.1);
            return Err(Error::Data(
                if self.format == DataFormat::Text || skipped > 0 {
                    DataError::NoText { path, skipped }
                } else {
                    let format = self.format.as_str();
                    DataError::NoRecords { path, format }
                },
            ));
        }
        Ok(())
    }

    fn add_files(&mut self, files: Vec<Candidate>, skips: bool, left: &mut u64) -> Result<()> {
        for file in files {
            let most = file.bytes.min(*left);
            if most == 0 {
                continue;
            }
            match self.check(&file, most, skips)? {
                Ok(()) => {
                    *left -= most;
                    self.files.push((file, most));
                }
                Err(error) if skips => {
                    tracing::info!(%error, "passed over");
                    self.skipped += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether a file is text: by its beginning, and `whole` if it may be passed over.
    fn check(&self, file: &Candidate, most: u64, whole: bool) -> Result<Result<()>> {
        if !self.format.is_plain() {
            return Ok(Ok(()));
        }
        if whole {
            check_text(file, self.kind, most)
        } else {
            check_head(file, self.kind)
        }
    }

    /// The first record of all files.
    pub(super) fn first_record(&self) -> Result<Option<Record>> {
        let count = Arc::default();
        let mut records = (0..self.files.len()).flat_map(|file| self.records_of(file, &count));
        records.next().transpose()
    }

    /// How many files there are.
    pub(super) fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, most)| most).sum()
    }

    /// Reads one piece after the other, and counts the bytes of files that are read.
    pub(super) fn pieces<'a>(
        &'a self,
        fields: Fields,
        count: &'a Arc<AtomicU64>,
    ) -> impl Iterator<Item = Result<TextPart>> + Send + 'a {
        (0..self.files.len()).flat_map(move |file| self.pieces_of(file, fields, count))
    }

    /// The pieces of the file of this number.
    pub(super) fn pieces_of(&self, file: usize, fields: Fields, count: &Arc<AtomicU64>) -> Pieces {
        if self.format != DataFormat::Text {
            let records = self.records_of(file, count);
            return Box::new(records.map(move |record| piece_of(&record?, fields)));
        }
        let (file, most) = &self.files[file];
        match FileParts::open(file, self.kind, *most, count) {
            Ok(pieces) => Box::new(pieces),
            Err(error) => Box::new([Err(error)].into_iter()),
        }
    }

    /// The records of the file of this number, of a format that has some.
    pub(super) fn records_of(&self, file: usize, count: &Arc<AtomicU64>) -> Parsed<'static> {
        let (file, most) = &self.files[file];
        let records: Parsed<'static> = if self.format == DataFormat::Parquet {
            count.fetch_add(*most, Ordering::Relaxed);
            parquet::rows(&file.path)
        } else {
            match Counted::open(file, *most, count) {
                Ok(content) => records::parse(&file.path, BufReader::new(content), self.format),
                Err(error) => Box::new([Err(error)].into_iter()),
            }
        };
        let Some(first) = self.first.clone() else {
            return records;
        };
        Box::new(records.map(move |record| {
            let record = record?;
            first.check(&record).map(|()| record)
        }))
    }
}

/// Whether the first `most` bytes of a file are text, else the error that says what they are.
pub(super) fn check_text(file: &Candidate, kind: TextKind, most: u64) -> Result<Result<()>> {
    let head = check_head(file, kind)?;
    if head.is_err() {
        return Ok(head);
    }
    for piece in FileParts::open(file, kind, most, &Arc::default())? {
        match piece {
            Ok(_) => {}
            Err(error @ Error::Data(DataError::NotText { .. })) => return Ok(Err(error)),
            Err(error) => return Err(error),
        }
    }
    Ok(Ok(()))
}

type Pieces = Box<dyn Iterator<Item = Result<TextPart>> + Send>;

/// A document of a record.
fn piece_of(record: &Record, fields: Fields) -> Result<TextPart> {
    let text = match fields {
        Fields::Text => record
            .text("text", "that become tokens need \"text\"")?
            .to_owned(),
        Fields::All => {
            let mut text = String::new();
            record.values().for_each(|value| collect(value, &mut text));
            text
        }
    };
    Ok(TextPart {
        text: text.into_bytes(),
        ends: true,
    })
}

/// Adds the texts in a value, each on lines of its own.
fn collect(value: &Value, text: &mut String) {
    match value {
        Value::String(found) => {
            text.push_str(found);
            text.push('\n');
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, text)),
        Value::Object(fields) => fields.values().for_each(|field| collect(field, text)),
        _ => {}
    }
}
