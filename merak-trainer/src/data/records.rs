//! Records of texts: JSON lines, or tables with a header.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, BufRead, Read},
    iter,
    path::Path,
    sync::Arc,
};

use merak_ckpt::words::file;
use merak_trace::models::Objective;
use serde_json::{Map, Value};

use super::{
    chat,
    input::Input,
    parquet,
    plain::{BYTE_ORDER_MARK, TextKind},
    text::{self, Document, Documents, Need, Reading},
};
use crate::{
    config::{DataFormat, whole},
    error::{DataError, Error, Result},
};

/// Records as text, of which each is parsed where it is used: parsed ones take several times the
/// memory. Of a stream, a few that are parsed.
#[derive(Debug)]
pub(crate) struct Records {
    documents: Vec<Document>,
    format: DataFormat,
    parsed: Vec<Record>,
    len: usize,
}

/// What records are to a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// Documents of a stream of tokens.
    Text,
    /// Samples.
    Samples,
    /// Chats.
    Chats,
}

impl RecordKind {
    /// The kind that the first record shows.
    pub(crate) fn of(first: Option<&Record>, objective: Objective) -> Self {
        match objective {
            Objective::CausalLm if first.is_some_and(chat::is_chat) => Self::Chats,
            Objective::SequenceToSequence
                if first.is_none_or(|first| first.has("source") || !first.has("text")) =>
            {
                Self::Samples
            }
            Objective::SequenceClassification => Self::Samples,
            _ => Self::Text,
        }
    }
}

/// What the first record is to a model, and where it stands. It decides for all others.
#[derive(Debug, Clone)]
pub(super) struct FirstRecord {
    objective: Objective,
    shape: Option<&'static str>,
    place: String,
}

impl FirstRecord {
    pub(super) fn of(record: &Record, objective: Objective) -> Self {
        Self {
            objective,
            shape: record.shape(objective),
            place: record.place(),
        }
    }

    /// Checks that a record is of the same kind. One that shows no kind lacks a field, which is
    /// reported where the field is needed.
    ///
    /// # Errors
    ///
    /// Where it is of another kind.
    pub(super) fn check(&self, record: &Record) -> Result<()> {
        match (self.shape, record.shape(self.objective)) {
            (Some(first), Some(shape)) if first != shape => Err(record.wrong(format!(
                "the record is {shape}, but the first one, {}, is {first}: all must be of one kind",
                self.place
            ))),
            _ => Ok(()),
        }
    }
}

/// One record: its fields, and where it stands.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    path: Arc<Path>,
    /// Line of the file, from 1.
    line: u64,
    fields: Map<String, Value>,
}

/// Reads the records of files, and of the files of folders in the order of their paths, if memory
/// has room for what they need, and says how many files there were. With `skips`, files that are
/// not text are passed over.
///
/// # Errors
///
/// An unreadable path, one without text, a file that is not UTF-8, a line that is not a record, a
/// record of another kind than the first, or more records than memory has room for.
pub(crate) fn read(
    input: Input<'_>,
    format: DataFormat,
    skips: bool,
    room: (Need, u64),
    objective: Objective,
) -> Result<(Records, String)> {
    let none = |path: &Path| {
        Error::Data(DataError::NoRecords {
            path: path.to_path_buf(),
            format: format.as_str(),
        })
    };
    let found = if format == DataFormat::Parquet {
        list_parquet(input, room)?
    } else {
        let kind = TextKind::Records;
        let found = text::read(input, None, Reading { kind, skips }, room);
        found.map_err(|error| match error {
            Error::Data(DataError::NoText { path, skipped: 0 }) => none(&path),
            error => error,
        })?
    };
    let files = found.files();
    let mut records = Records {
        documents: found.documents,
        format,
        parsed: Vec::new(),
        len: 0,
    };
    let mut len = 0;
    let mut first = None;
    for record in records.iter() {
        let record = record?;
        let first = first.get_or_insert_with(|| FirstRecord::of(&record, objective));
        first.check(&record)?;
        len += 1;
    }
    records.len = len;
    if len == 0 {
        return Err(none(input.paths.first()));
    }
    Ok((records, files))
}

/// The files of Parquet that an input names. Their rows stay there until they are parsed, and
/// memory must have room for what is made of them.
fn list_parquet(input: Input<'_>, (need, available): (Need, u64)) -> Result<Documents> {
    let mut found = Documents::default();
    for path in input.iter() {
        let files = text::files_of(input.key, path, &parquet::is_one)?;
        let bytes = files.iter().map(|file| file.bytes).sum::<u64>();
        let needed = bytes.saturating_mul(need.per_byte);
        text::check_room(path, (bytes, needed), available)?;
        let empty = |file: text::Candidate| Document {
            path: file.path,
            text: Vec::new(),
        };
        found.documents.extend(files.into_iter().map(empty));
    }
    Ok(found)
}

/// The records of a document, one after the other.
pub(crate) type Parsed<'a> = Box<dyn Iterator<Item = Result<Record>> + Send + 'a>;

impl Records {
    /// Records that are parsed already.
    pub(crate) fn parsed(parsed: Vec<Record>) -> Self {
        Self {
            documents: Vec::new(),
            format: DataFormat::Jsonl,
            len: parsed.len(),
            parsed,
        }
    }

    /// Number of records.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Parses one record after the other, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Result<Record>> {
        let documents = self.documents.iter();
        let of_files = documents.flat_map(|Document { path, text }| match self.format {
            DataFormat::Parquet => parquet::rows(path),
            format => parse(path, text.as_slice(), format),
        });
        self.parsed.iter().cloned().map(Ok).chain(of_files)
    }
}

/// Parses the records of a file one after the other, in order.
pub(crate) fn parse<'a>(
    path: &Path,
    content: impl BufRead + Send + 'a,
    format: DataFormat,
) -> Parsed<'a> {
    let path: Arc<Path> = path.into();
    let parsed = match format {
        DataFormat::Csv => table(path, content, b','),
        DataFormat::Tsv => table(path, content, b'\t'),
        _ => Ok(json_lines(path, content)),
    };
    parsed.unwrap_or_else(|error| Box::new([Err(error)].into_iter()))
}

fn json_lines<'a>(path: Arc<Path>, content: impl BufRead + Send + 'a) -> Parsed<'a> {
    let parse = move |(number, line): (u64, io::Result<Vec<u8>>)| {
        let wrong = |reason: String| wrong(&path, number, reason);
        let line = line.map_err(Error::reading(&path))?;
        let mark = line.strip_prefix(BYTE_ORDER_MARK).filter(|_| number == 1);
        let line = mark.unwrap_or(&line);
        if line.trim_ascii().is_empty() {
            return Ok(None);
        }
        let value: Value = serde_json::from_slice(line)
            .map_err(|error| wrong(format!("the line is no JSON: {}", at_column(&error))))?;
        let Value::Object(fields) = value else {
            return Err(wrong(format!("the line is {value}, expected an object")));
        };
        Ok(Some(Record {
            path: Arc::clone(&path),
            line: number,
            fields,
        }))
    };
    let lines = (1..).zip(content.split(b'\n'));
    Box::new(lines.map(parse).filter_map(Result::transpose))
}

/// What is wrong with the JSON of a line, and where in it: the file has another number for it.
fn at_column(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 ", " at ")
}

/// A row that is put behind the last one. The parser takes the end of a file for the end of a
/// quote, so one that is still open swallows this row too.
const END: &str = "\u{4}the end of the table\u{4}";

fn is_end(row: &csv::StringRecord) -> bool {
    row.len() == 1 && &row[0] == END
}

fn has_swallowed_end(row: &csv::StringRecord) -> bool {
    row.len()
        .checked_sub(1)
        .is_some_and(|last| row[last].ends_with(END))
}

fn table<'a>(path: Arc<Path>, content: impl Read + Send + 'a, delimiter: u8) -> Result<Parsed<'a>> {
    let content = content.chain(b"\n".chain(END.as_bytes()));
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .flexible(true)
        .from_reader(content);
    let failed = |path: &Path, error: csv::Error| {
        let line = error.position().map_or(1, csv::Position::line);
        wrong(path, line, error.to_string())
    };
    let names = reader.headers().map_err(|error| failed(&path, error))?;
    let names = names.clone();
    if is_end(&names) {
        return Ok(Box::new(iter::empty()));
    }
    let unclosed = "the quote of the last cell is never closed";
    if has_swallowed_end(&names) {
        return Err(wrong(&path, 1, unclosed.to_owned()));
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.trim())) {
        return Err(wrong(
            &path,
            1,
            format!("the column \"{twice}\" stands twice"),
        ));
    }
    let rows = reader.into_records();
    let rows = rows.take_while(|row| !row.as_ref().is_ok_and(is_end));
    Ok(Box::new(rows.map(move |row| {
        let row = row.map_err(|error| failed(&path, error))?;
        let wrong = |reason| {
            let line = row.position().map_or(1, csv::Position::line);
            Err(wrong(&path, line, reason))
        };
        if has_swallowed_end(&row) {
            return wrong(unclosed.to_owned());
        }
        if row.len() != names.len() {
            let (found, expected) = (row.len(), names.len());
            let reason = format!(
                "the row has another number of cells than the header: {found}, expected {expected}"
            );
            return wrong(reason);
        }
        let fields = names.iter().zip(&row);
        let fields = fields.map(|(name, cell)| (name.trim().to_owned(), Value::from(cell)));
        Ok(Record {
            path: Arc::clone(&path),
            line: row.position().map_or(0, csv::Position::line),
            fields: fields.collect(),
        })
    })))
}

pub(super) fn wrong(path: &Path, line: u64, reason: String) -> Error {
    Error::Data(DataError::Record {
        path: path.to_path_buf(),
        line,
        reason,
    })
}

impl Record {
    /// The fields that stand in a line, or row, of a file.
    #[cfg(feature = "parquet")]
    pub(super) fn new(path: &Arc<Path>, line: u64, fields: Map<String, Value>) -> Self {
        Self {
            path: Arc::clone(path),
            line,
            fields,
        }
    }

    /// A field, if it is there.
    pub(crate) fn field(&self, name: &str) -> Option<&Value> {
        self.fields.get(name)
    }

    /// What the fields make of the record, for a model that learns several kinds.
    fn shape(&self, objective: Objective) -> Option<&'static str> {
        use Objective::{CausalLm, SequenceToSequence};
        match objective {
            CausalLm if chat::is_chat(self) => {
                Some(r#"a chat ("messages", or "prompt" and "completion")"#)
            }
            SequenceToSequence if self.has("source") => Some(r#"a pair ("source" and "target")"#),
            CausalLm | SequenceToSequence if self.has("text") => Some(r#"a text ("text" alone)"#),
            _ => None,
        }
    }

    /// The values of all fields.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Value> {
        self.fields.values()
    }

    /// Whether the record has a field.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// Whether it has no label, or what data sets write where there is none: null, a blank text, a
    /// negative number. `names` are those of classes.
    pub(crate) fn lacks_label(&self, names: &BTreeMap<String, i64>) -> bool {
        match self.fields.get("label") {
            None | Some(Value::Null) => true,
            Some(Value::String(text)) => {
                let number = text.trim().parse::<f64>();
                let is_none = text.trim().is_empty() || number.is_ok_and(|number| number < 0.0);
                is_none && !names.contains_key(text)
            }
            Some(number) => number.as_f64().is_some_and(|number| number < 0.0),
        }
    }

    /// A field of text, if it is there.
    pub(crate) fn optional_text(&self, name: &str) -> Result<Option<&str>> {
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => {
                let reason = format!("the field \"{name}\" is {other}, expected a text");
                Err(self.wrong(reason))
            }
        }
    }

    /// A field of text; `needs` are the fields that records must have.
    pub(crate) fn text(&self, name: &str, needs: &str) -> Result<&str> {
        if self.fields.get(name) == Some(&Value::Null) {
            return Err(self.wrong(format!("the field \"{name}\" is null, expected a text")));
        }
        self.optional_text(name)?
            .ok_or_else(|| self.missing(name, needs))
    }

    /// The class in the field `label`: its number, or its name in the model's `label2id`.
    pub(crate) fn label(
        &self,
        names: &BTreeMap<String, i64>,
        classes: usize,
        needs: &str,
    ) -> Result<i64> {
        let found = self.fields.get("label");
        let found = found.ok_or_else(|| self.missing("label", needs))?;
        let number = match found {
            Value::String(name) => names
                .get(name.as_str())
                .copied()
                .or_else(|| name.trim().parse().ok()),
            // 1.0 is how tables of numbers write it where some are missing.
            other => whole(other).and_then(|label| i64::try_from(label).ok()),
        };
        let is_class = |&label: &i64| usize::try_from(label).is_ok_and(|label| label < classes);
        number.filter(is_class).ok_or_else(|| {
            let mut expected = format!("a class from 0 to {}", classes.saturating_sub(1));
            if !names.is_empty() {
                let names: Vec<_> = names.keys().map(String::as_str).collect();
                expected = format!("{expected} or one of {}", names.join(", "));
            }
            self.wrong(format!("the label is {found}, expected {expected}"))
        })
    }

    pub(crate) fn missing(&self, name: &str, needs: &str) -> Error {
        let found: Vec<_> = self
            .fields
            .keys()
            .map(|name| format!("\"{name}\""))
            .collect();
        let found = if found.is_empty() {
            "no fields".to_owned()
        } else {
            found.join(", ")
        };
        self.wrong(format!(
            "the record has no \"{name}\": it has {found}, but records {needs}"
        ))
    }

    /// Its file and line, as messages name them.
    pub(super) fn place(&self) -> String {
        format!("{}:{}", file(&self.path), self.line)
    }

    pub(crate) fn wrong(&self, reason: String) -> Error {
        wrong(&self.path, self.line, reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(name: &str, text: &str, format: DataFormat) -> Result<Vec<Record>, String> {
        records_for(Objective::CausalLm, name, text, format)
    }

    fn records_for(
        objective: Objective,
        name: &str,
        text: &str,
        format: DataFormat,
    ) -> Result<Vec<Record>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let place = format!("{}/", folder.path().display());
        let need = Need {
            per_byte: 1,
            per_line: 0,
        };
        let room = (need, u64::MAX);
        let read = read(Input::data(&path.into()), format, false, room, objective);
        let read = read.and_then(|(records, _)| records.iter().collect());
        read.map_err(|error| error.to_string().replace(&place, ""))
    }

    fn message(record: &Record, result: Result<impl std::fmt::Debug>) -> String {
        let folder = format!("{}/", record.path.parent().unwrap().display());
        result.unwrap_err().to_string().replace(&folder, "")
    }

    #[test]
    fn records_that_memory_has_no_room_for_are_refused_before_they_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        // Not UTF-8: reading it whole would give another error.
        let text = [b"text\n".as_slice(), &b"a b\n".repeat(999), b"\xff"].concat();
        std::fs::write(&path, text).unwrap();
        let need = Need {
            per_byte: 9,
            per_line: 100,
        };
        let all = 9 * (5 + 4 * 999 + 1) + 100 * 1001;
        for (available, is_refused) in [(all - 1, true), (all, false)] {
            let error = read(
                Input::data(&path.clone().into()),
                DataFormat::Csv,
                false,
                (need, available),
                Objective::CausalLm,
            )
            .unwrap_err();
            let refused = matches!(error, Error::Data(DataError::DataTooLarge { needed, .. }) if needed == all);
            assert_eq!(refused, is_refused, "{error}");
            assert!(error.is_user_error());
        }
    }

    #[test]
    fn lines_and_tables_give_the_same_records() {
        let lines =
            "{\"text\": \"a, b\", \"label\": 1}\n\n{\"text\": \"c\\n\", \"label\": \"good\"}";
        let lines = records("a.jsonl", lines, DataFormat::Jsonl).unwrap();
        let commas = "text,label\n\"a, b\",1\n\"c\n\",good\n";
        let commas = records("a.csv", commas, DataFormat::Csv).unwrap();
        let tabs = "text\tlabel\na, b\t1\n\"c\n\"\tgood\n";
        let tabs = records("a.tsv", tabs, DataFormat::Tsv).unwrap();
        let names = BTreeMap::from([("good".to_owned(), 2)]);
        let marked =
            "\u{feff}{\"text\": \"a, b\", \"label\": 1}\n{\"text\": \"c\\n\", \"label\": \"good\"}";
        let marked = records("a.jsonl", marked, DataFormat::Jsonl).unwrap();
        for found in [&lines, &commas, &tabs, &marked] {
            let read: Vec<_> = found
                .iter()
                .map(|record| {
                    let text = record.text("text", "").unwrap();
                    (text, record.label(&names, 3, "").unwrap())
                })
                .collect();
            assert_eq!(read, [("a, b", 1), ("c\n", 2)]);
        }
        assert_eq!(lines[1].line, 3);
    }

    #[test]
    fn a_line_that_is_no_record_is_named() {
        let read = |name, text, format| records(name, text, format).unwrap_err();
        insta::assert_snapshot!(read("a.jsonl", "{}\n{\"a\": ", DataFormat::Jsonl), @"a.jsonl:2: the line is no JSON: EOF while parsing a value at column 6");
        insta::assert_snapshot!(read("a.jsonl", "[1]", DataFormat::Jsonl), @"a.jsonl:1: the line is [1], expected an object");
        insta::assert_snapshot!(read("a.csv", "text,label\na,1\nb\n", DataFormat::Csv), @"a.csv:3: the row has another number of cells than the header: 1, expected 2");
        let open = "text,label\na,1\n\"b,2\nc,3\n";
        insta::assert_snapshot!(read("a.csv", open, DataFormat::Csv), @"a.csv:3: the quote of the last cell is never closed");
        insta::assert_snapshot!(read("a.csv", "\"text\na\n", DataFormat::Csv), @"a.csv:1: the quote of the last cell is never closed");
        insta::assert_snapshot!(read("a.csv", "text,label\n", DataFormat::Csv), @"no records in a.csv: csv needs a line with the names of the columns and a line for each record");
        insta::assert_snapshot!(read("a.tsv", "", DataFormat::Tsv), @"no records in a.tsv: tsv needs a line with the names of the columns and a line for each record");
        insta::assert_snapshot!(read("a.jsonl", "\n\n", DataFormat::Jsonl), @"no records in a.jsonl: jsonl needs a JSON object in each line");
        insta::assert_snapshot!(read("a.jsonl", "", DataFormat::Jsonl), @"no records in a.jsonl: jsonl needs a JSON object in each line");
    }

    #[test]
    fn a_record_of_another_kind_than_the_first_is_named_with_both() {
        let read = |objective, text| records_for(objective, "a.jsonl", text, DataFormat::Jsonl);
        let causal = |text| read(Objective::CausalLm, text).unwrap_err();
        insta::assert_snapshot!(causal("{\"text\": \"a\"}\n\n{\"text\": \"b\", \"messages\": []}"), @r#"a.jsonl:3: the record is a chat ("messages", or "prompt" and "completion"), but the first one, a.jsonl:1, is a text ("text" alone): all must be of one kind"#);
        insta::assert_snapshot!(causal("{\"messages\": []}\n{\"text\": \"b\"}"), @r#"a.jsonl:2: the record is a text ("text" alone), but the first one, a.jsonl:1, is a chat ("messages", or "prompt" and "completion"): all must be of one kind"#);
        let pairs = "{\"text\": \"a\"}\n{\"text\": \"b\", \"source\": \"c\", \"target\": \"d\"}";
        let refused = read(Objective::SequenceToSequence, pairs).unwrap_err();
        insta::assert_snapshot!(refused, @r#"a.jsonl:2: the record is a pair ("source" and "target"), but the first one, a.jsonl:1, is a text ("text" alone): all must be of one kind"#);
        // Both are chats, or the model learns one kind alone.
        let chats = "{\"messages\": []}\n{\"prompt\": \"a\", \"completion\": \"b\"}";
        assert_eq!(read(Objective::CausalLm, chats).unwrap().len(), 2);
        assert_eq!(read(Objective::MaskedLm, pairs).unwrap().len(), 2);
    }

    #[test]
    fn a_field_that_is_missing_or_wrong_is_named_with_what_is_there() {
        let line = "{\"txt\": \"a\", \"label\": 7, \"text_pair\": 3}";
        let records = records("a.jsonl", line, DataFormat::Jsonl).unwrap();
        let record = &records[0];
        insta::assert_snapshot!(message(record, record.text("text", "need \"text\" and \"label\"")), @r#"a.jsonl:1: the record has no "text": it has "txt", "label", "text_pair", but records need "text" and "label""#);
        insta::assert_snapshot!(message(record, record.optional_text("text_pair")), @r#"a.jsonl:1: the field "text_pair" is 3, expected a text"#);
        insta::assert_snapshot!(message(record, record.label(&BTreeMap::new(), 2, "")), @"a.jsonl:1: the label is 7, expected a class from 0 to 1");
        let names = BTreeMap::from([("bad".to_owned(), 0), ("good".to_owned(), 1)]);
        insta::assert_snapshot!(message(record, record.label(&names, 2, "")), @"a.jsonl:1: the label is 7, expected a class from 0 to 1 or one of bad, good");
    }
}
