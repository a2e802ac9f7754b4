//! Text files, in an order that is the same on every machine.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use super::{
    input::Input,
    plain::{TextKind, text_of},
    source::count,
};
use crate::error::{DataError, Error, Result};

/// The text of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) path: PathBuf,
    pub(crate) text: Vec<u8>,
}

/// The documents that were read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Documents {
    pub(crate) documents: Vec<Document>,
    /// Files that were passed over because they are not text.
    pub(crate) skipped: usize,
}

impl Documents {
    /// How many files there were, for people.
    pub(crate) fn files(&self) -> String {
        let read = count(self.documents.len(), "file");
        match self.skipped {
            0 => read,
            skipped => format!("{read} ({skipped} passed over as no text)"),
        }
    }
}

/// The kind of text that files must hold, and how others are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) kind: TextKind,
    /// Whether a file that is not text is passed over instead of an error.
    pub(crate) skips: bool,
}

/// A file that may be read.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
}

/// The least memory in bytes that data take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// For each byte of a file.
    pub(crate) per_byte: u64,
    /// For each line.
    pub(crate) per_line: u64,
}

/// Reads files, and the files of folders and their subfolders in the order of their paths, up to
/// `max_bytes` in all, if the `available` bytes of memory have room for what they need. Hidden
/// files and folders (`.git`) and empty files are left out, links to folders are not followed.
///
/// # Errors
///
/// An unreadable path, one without text, a file that is not text and not to be passed over, or more
/// text than memory has room for.
pub(crate) fn read(
    input: Input<'_>,
    max_bytes: Option<usize>,
    reading: Reading,
    (need, mut available): (Need, u64),
) -> Result<Documents> {
    let mut left = max_bytes.unwrap_or(usize::MAX);
    let mut found = Documents::default();
    for path in input.iter() {
        // A path may be cut off by the limit of bytes; the first has at least one byte of it.
        if left == 0 {
            break;
        }
        let files = files_of(input.key, path, &|_| true)?;
        let (part, needed) = read_path(path, files, left, reading, (need, available))?;
        let bytes: usize = part.documents.iter().map(|part| part.text.len()).sum();
        left = left.saturating_sub(bytes);
        available = available.saturating_sub(needed);
        found.documents.extend(part.documents);
        found.skipped += part.skipped;
    }
    Ok(found)
}

/// Reads the files of one path, and returns the memory that they need at least.
fn read_path(
    path: &Path,
    files: Vec<Candidate>,
    max_bytes: usize,
    reading: Reading,
    (need, available): (Need, u64),
) -> Result<(Documents, u64)> {
    let (files, binary) = if reading.skips {
        without_binary(files, reading.kind)?
    } else {
        (files, 0)
    };
    let bytes = files.iter().map(|file| file.bytes);
    let bytes = bytes.fold(0, u64::saturating_add).min(max_bytes as u64);
    let mut needed = bytes.saturating_mul(need.per_byte);
    check_room(path, (bytes, needed), available)?;
    if need.per_line > 0 {
        let lines = files.iter().map(lines_of).sum::<Result<u64>>()?;
        needed = needed.saturating_add(lines.saturating_mul(need.per_line));
        check_room(path, (bytes, needed), available)?;
    }
    let mut found = read_up_to(&files, max_bytes, reading)?;
    found.skipped += binary;
    if found.skipped > 0 {
        tracing::warn!(files = found.skipped, path = %path.display(), "files that are no text are passed over");
    }
    if found.documents.is_empty() {
        return Err(Error::Data(DataError::NoText {
            path: path.to_path_buf(),
            skipped: found.skipped,
        }));
    }
    Ok((found, needed))
}

/// Bytes of a file that are looked at together.
const PIECE: usize = 64 << 10;

/// First bytes of a file, which decide whether it is passed over before the rest is read.
const HEAD: u64 = 8 << 10;

/// The files that begin like text, and how many others there are. The others may be too large to
/// read.
fn without_binary(files: Vec<Candidate>, kind: TextKind) -> Result<(Vec<Candidate>, usize)> {
    let all = files.len();
    let mut kept = Vec::with_capacity(all);
    for file in files {
        match check_head(&file, kind)? {
            Ok(()) => kept.push(file),
            Err(error) => tracing::info!(%error, "passed over"),
        }
    }
    let skipped = all - kept.len();
    Ok((kept, skipped))
}

/// Whether a file begins like text, else the error that says what it is.
pub(crate) fn check_head(file: &Candidate, kind: TextKind) -> Result<Result<()>> {
    let mut head = Vec::new();
    merak_ckpt::open_regular(&file.path)
        .and_then(|(opened, _)| opened.take(HEAD).read_to_end(&mut head))
        .map_err(Error::reading(&file.path))?;
    let text = text_of(head, kind, file.bytes > HEAD);
    Ok(text.map(|_| ()).map_err(|error| error.of(&file.path, kind)))
}

/// The lines of a file, of which a piece at a time is in memory.
fn lines_of(file: &Candidate) -> Result<u64> {
    let unreadable = Error::reading(&file.path);
    let (mut opened, _) = merak_ckpt::open_regular(&file.path).map_err(unreadable)?;
    let mut piece = vec![0; PIECE];
    let mut lines = 1;
    loop {
        match opened.read(&mut piece).map_err(unreadable)? {
            0 => return Ok(lines),
            read => {
                let ends = piece[..read].iter().map(|&byte| u64::from(byte == b'\n'));
                lines += ends.sum::<u64>();
            }
        }
    }
}

/// Refuses `found` bytes of text where memory has no room for the bytes that they need.
pub(super) fn check_room(path: &Path, (found, needed): (u64, u64), available: u64) -> Result<()> {
    if needed <= available {
        return Ok(());
    }
    Err(Error::Data(DataError::DataTooLarge {
        path: path.to_path_buf(),
        found,
        needed,
        available,
    }))
}

/// A file that a key names, or the files under a folder that `accept` takes by their path, sorted
/// by path.
pub(crate) fn files_of(
    key: &'static str,
    path: &Path,
    accept: &dyn Fn(&Path) -> bool,
) -> Result<Vec<Candidate>> {
    let unreadable = Error::reading_input(key, path);
    if fs::metadata(path).map_err(unreadable)?.is_dir() {
        return list(path, accept);
    }
    let (_, bytes) = merak_ckpt::open_regular(path).map_err(unreadable)?;
    Ok(vec![Candidate {
        path: path.to_path_buf(),
        bytes,
    }])
}

/// The files under a folder that `accept` takes by their path, sorted by path.
pub(crate) fn list(folder: &Path, accept: &dyn Fn(&Path) -> bool) -> Result<Vec<Candidate>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(Error::reading(&folder))?;
        for entry in entries {
            let entry = entry.map_err(Error::reading(&folder))?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            let kind = entry.file_type().map_err(Error::reading(&path))?;
            if name.starts_with('.') {
                continue;
            }
            if kind.is_dir() {
                folders.push(path);
            } else if accept(&path) {
                // A dangling link is not a file.
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
pub(crate) fn read_up_to(
    files: &[Candidate],
    max_bytes: usize,
    reading: Reading,
) -> Result<Documents> {
    let mut left = max_bytes;
    let mut found = Documents::default();
    for file in files {
        if left == 0 {
            break;
        }
        let mut text = Vec::new();
        // The file may have grown since its memory was checked.
        let most = file.bytes.min(left as u64);
        merak_ckpt::open_regular(&file.path)
            .and_then(|(opened, _)| opened.take(most).read_to_end(&mut text))
            .map_err(Error::reading(&file.path))?;
        let bytes = text.len();
        let text = match text_of(text, reading.kind, file.bytes > left as u64) {
            Ok(text) => text,
            Err(error) if reading.skips => {
                let error = error.of(&file.path, reading.kind);
                tracing::info!(%error, "passed over");
                found.skipped += 1;
                continue;
            }
            Err(error) => return Err(error.of(&file.path, reading.kind)),
        };
        left -= bytes;
        if !text.is_empty() {
            found.documents.push(Document {
                path: file.path.clone(),
                text,
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    const ANY: Reading = Reading {
        kind: TextKind::Bytes,
        skips: false,
    };

    const NEED: Need = Need {
        per_byte: 9,
        per_line: 0,
    };

    #[test]
    fn lines_need_room_beside_their_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        fs::write(&path, "ab\n".repeat(100_000)).unwrap();
        let need = Need {
            per_byte: 2,
            per_line: 100,
        };
        let read = |available| {
            read(
                Input::data(&path.clone().into()),
                None,
                ANY,
                (need, available),
            )
        };
        let all = 2 * 300_000 + 100 * 100_001;
        read(all).unwrap();
        let error = read(all - 1).unwrap_err();
        let Error::Data(DataError::DataTooLarge { found, needed, .. }) = error else {
            panic!("{error}");
        };
        assert_eq!((found, needed), (300_000, all));
    }

    #[test]
    fn text_that_memory_has_no_room_for_is_refused_by_its_size() {
        let path = Path::new("corpus");
        assert!(check_room(path, (1000, 9000), 9000).is_ok());
        let error = check_room(path, (500 << 20, 4500 << 20), 300 << 20).unwrap_err();
        insta::assert_snapshot!(error, @r#"corpus has 500 MiB of data, which take at least 4.39 GiB of memory, but this process may use 300 MiB: give less data, or read a part of text with "data.max_bytes""#);
        assert!(error.is_user_error());
    }

    #[test]
    fn a_sparse_file_beyond_memory_is_refused_before_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse.txt");
        let mut file = fs::File::create(&path).unwrap();
        file.write_all(b"0123456789").unwrap();
        // Not all file systems have room for such a length.
        if file.set_len(1 << 43).is_ok() {
            let error = read(
                Input::data(&path.clone().into()),
                None,
                ANY,
                (NEED, 1 << 40),
            )
            .unwrap_err();
            assert!(
                matches!(error, Error::Data(DataError::DataTooLarge { .. })),
                "{error}"
            );
            let part = read(Input::data(&path.into()), Some(10), ANY, (NEED, 1 << 40)).unwrap();
            assert_eq!(part.documents[0].text, b"0123456789");
        }
    }

    #[test]
    fn a_binary_file_beyond_memory_is_passed_over_by_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.txt"), "hello").unwrap();
        let file = fs::File::create(folder.path().join("b.bin")).unwrap();
        if file.set_len(1 << 43).is_ok() {
            let skips = Reading { skips: true, ..ANY };
            let found = read(
                Input::data(&folder.path().to_path_buf().into()),
                None,
                skips,
                (NEED, 1 << 40),
            )
            .unwrap();
            assert_eq!((found.documents.len(), found.skipped), (1, 1));
        }
    }

    #[test]
    fn devices_and_pipes_are_no_text() {
        let error = read(
            Input::data(&PathBuf::from("/dev/zero").into()),
            None,
            ANY,
            (NEED, 1 << 40),
        )
        .unwrap_err();
        assert_eq!(
            crate::error::chain(&error),
            "cannot read /dev/zero, which \"data.path\" names: it is no regular file"
        );
    }
}
