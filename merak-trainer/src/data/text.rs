//! Text files, in an order that is the same on every machine.

use std::{
    fs, io,
    io::Read as _,
    path::{Path, PathBuf},
};

use crate::{
    available_bytes,
    error::{Error, Result},
};

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
/// `max_bytes` in all, if memory has room for `bytes_per_byte` bytes for each. Hidden files and folders (`.git`) and empty files are left out, links to
/// folders are not followed.
///
/// # Errors
///
/// An unreadable path, one without text, or more text than memory has room for.
pub(crate) fn read(
    path: &Path,
    max_bytes: Option<usize>,
    bytes_per_byte: u64,
) -> Result<Vec<Document>> {
    let unreadable = |source| Error::ReadInput {
        key: "data.path",
        path: path.to_path_buf(),
        source,
    };
    let files = if fs::metadata(path).map_err(unreadable)?.is_dir() {
        list(path, &|_| true)?
    } else {
        let (_, bytes) = merak_ckpt::open_regular(path).map_err(unreadable)?;
        vec![Candidate {
            path: path.to_path_buf(),
            bytes,
        }]
    };
    let max_bytes = max_bytes.unwrap_or(usize::MAX);
    let found = files.iter().map(|file| file.bytes);
    let found = found.fold(0, u64::saturating_add).min(max_bytes as u64);
    check_room(path, (found, bytes_per_byte), available_bytes())?;
    let documents = read_up_to(&files, max_bytes)?;
    if documents.is_empty() {
        return Err(Error::NoText {
            path: path.to_path_buf(),
        });
    }
    Ok(documents)
}

/// Refuses more bytes of text than memory has room for.
fn check_room(path: &Path, (found, bytes_per_byte): (u64, u64), available: u64) -> Result<()> {
    let needed = found.saturating_mul(bytes_per_byte);
    if needed <= available {
        return Ok(());
    }
    Err(Error::DataTooLarge {
        path: path.to_path_buf(),
        found,
        needed,
        available,
    })
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
        // No more than it was when room was made for it.
        let most = file.bytes.min(left as u64);
        merak_ckpt::open_regular(&file.path)
            .and_then(|(opened, _)| opened.take(most).read_to_end(&mut text))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_memory_has_no_room_for_is_refused_by_its_size() {
        let path = Path::new("corpus");
        assert!(check_room(path, (1000, 9), 9000).is_ok());
        let error = check_room(path, (500 << 20, 9), 300 << 20).unwrap_err();
        insta::assert_snapshot!(error, @r#"corpus has 500.00 MiB of data, which take at least 4.39 GiB of memory, but this process may use 300.00 MiB: give less data, or read a part of text with "data.max_bytes""#);
        assert!(error.is_user_error());
        check_room(path, (u64::MAX, 9), u64::MAX - 1).unwrap_err();
    }

    #[test]
    fn a_sparse_file_beyond_memory_is_refused_before_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse.txt");
        let file = fs::File::create(&path).unwrap();
        // Not all file systems have room for such a length.
        if file.set_len(1 << 43).is_ok() {
            let error = read(&path, None, 9).unwrap_err();
            assert!(matches!(error, Error::DataTooLarge { .. }), "{error}");
            let part = read(&path, Some(10), 9).unwrap();
            assert_eq!(part[0].text, [0; 10]);
        }
    }

    #[test]
    fn devices_and_pipes_are_no_text() {
        let error = read(Path::new("/dev/zero"), None, 1).unwrap_err();
        assert_eq!(
            crate::chain(&error),
            "cannot read /dev/zero, which \"data.path\" names: it is no regular file"
        );
    }
}
