//! Text files, in an order that is the same on every machine.

use std::{
    fs, io,
    io::Read as _,
    path::{Path, PathBuf},
};

use crate::error::{Error, Result};

/// The text of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) path: PathBuf,
    pub(crate) text: Vec<u8>,
}

/// A file that may be read.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
}

/// Reads a file, or the files of a folder and its subfolders in the order of their paths, up to
/// `max_bytes` in all. Hidden files and folders (`.git`) and empty files are left out, links to
/// folders are not followed.
///
/// # Errors
///
/// An unreadable path, or one without text.
pub(crate) fn read(path: &Path, max_bytes: Option<usize>) -> Result<Vec<Document>> {
    let metadata = fs::metadata(path).map_err(|source| Error::ReadInput {
        key: "data.path",
        path: path.to_path_buf(),
        source,
    })?;
    let files = if metadata.is_dir() {
        list(path, &|_| true)?
    } else {
        vec![Candidate {
            path: path.to_path_buf(),
            bytes: metadata.len(),
        }]
    };
    let documents = read_up_to(&files, max_bytes.unwrap_or(usize::MAX))?;
    if documents.is_empty() {
        return Err(Error::NoText {
            path: path.to_path_buf(),
        });
    }
    Ok(documents)
}

/// The files under a folder that `accept` takes by their path, sorted by path.
pub(crate) fn list(folder: &Path, accept: &dyn Fn(&Path) -> bool) -> Result<Vec<Candidate>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(|source| cannot_read(&folder, source))?;
        for entry in entries {
            let entry = entry.map_err(|source| cannot_read(&folder, source))?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            let kind = entry
                .file_type()
                .map_err(|source| cannot_read(&path, source))?;
            if name.starts_with('.') {
                continue;
            }
            if kind.is_dir() {
                folders.push(path);
            } else if accept(&path) {
                // A dangling link is no file.
                let Ok(metadata) = fs::metadata(&path) else {
                    continue;
                };
                if metadata.is_file() {
                    files.push(Candidate {
                        path,
                        bytes: metadata.len(),
                    });
                }
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Reads files one after the other until `max_bytes` are read; the last one may be cut.
pub(crate) fn read_up_to(files: &[Candidate], max_bytes: usize) -> Result<Vec<Document>> {
    let mut left = max_bytes;
    let mut documents = Vec::new();
    for file in files {
        if left == 0 {
            break;
        }
        let mut text = Vec::new();
        fs::File::open(&file.path)
            .and_then(|opened| opened.take(left as u64).read_to_end(&mut text))
            .map_err(|source| cannot_read(&file.path, source))?;
        left -= text.len();
        if !text.is_empty() {
            documents.push(Document {
                path: file.path.clone(),
                text,
            });
        }
    }
    Ok(documents)
}

pub(crate) fn cannot_read(path: &Path, source: io::Error) -> Error {
    Error::Read {
        path: path.to_path_buf(),
        source,
    }
}
