//! Records of Parquet files: a row for each, its columns as the fields.

use std::path::Path;

use super::records::Parsed;
#[cfg(feature = "parquet")]
use super::records::{Record, wrong};

/// Whether a folder's file is one of Parquet, by its name.
pub(super) fn is_one(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "parquet")
}

/// Reads the rows of a file one after the other, in order, a page of each column at a time.
#[cfg(feature = "parquet")]
pub(super) fn rows(path: &Path) -> Parsed<'static> {
    use parquet::file::reader::SerializedFileReader;
    use serde_json::Value;
    use std::sync::Arc;

    let path: Arc<Path> = path.into();
    let failed = |path: &Path, row, error: parquet::errors::ParquetError| {
        wrong(path, row, format!("the row cannot be read: {error}"))
    };
    let opened = merak_ckpt::open_regular(&path)
        .map_err(crate::error::Error::reading(&path))
        .and_then(|(file, _)| {
            SerializedFileReader::new(file).map_err(|error| failed(&path, 0, error))
        });
    let rows = match opened {
        Ok(reader) => reader.into_iter(),
        Err(error) => return Box::new([Err(error)].into_iter()),
    };
    Box::new((1..).zip(rows).map(move |(number, row)| {
        let row = row.map_err(|error| failed(&path, number, error))?;
        match row.to_json_value() {
            Value::Object(fields) => Ok(Record::new(&path, number, fields)),
            other => Err(wrong(
                &path,
                number,
                format!("the row is {other}, expected fields"),
            )),
        }
    }))
}

/// This build reads no such files; configurations that name them are refused.
#[cfg(not(feature = "parquet"))]
pub(super) fn rows(_: &Path) -> Parsed<'static> {
    Box::new(std::iter::empty())
}
