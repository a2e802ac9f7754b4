//! Token files: the ids of a stream of tokens, which training reads by range.
//!
//! ```text
//! data.tokens   magic "MERAKTOK" | version u32 | bytes of an id u32 | ids u64 | documents u64
//!               | checksum of the tokenizer u64 | checksum of the source u64 | vocabulary u32
//!               | size that was trained for u32 | checksum of these 56 bytes u64 | ids
//! data.index    magic "MERAKIDX" | version u32 | 0 u32 | documents u64
//!               | checksum of the header of data.tokens u64 | ends of documents u64
//! tokenizer.json
//! ```
//!
//! Numbers are little-endian. Ids have two bytes where the vocabulary allows. An end of a document
//! is the number of ids up to it, the token that ends it included.

use std::{
    borrow::Cow,
    fs::File,
    io::{self, BufWriter, Seek as _, SeekFrom, Write as _},
    ops::Range,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use merak_ckpt::{Checksum, words::file};

use super::{
    fingerprint::TokenizerFingerprint, input::Input, store::TokenStore, text::files_of,
    tokenizer::Tokenizer,
};
use crate::error::{DataError, Error, Result};

/// The extension of a token file.
const EXTENSION: &str = "tokens";

/// The token file of a folder.
pub(super) const TOKENS: &str = "data.tokens";

/// The ends of its documents.
pub(super) const INDEX: &str = "data.index";

/// The tokenizer that made it.
pub(super) const TOKENIZER: &str = "tokenizer.json";

const MAGIC: [u8; 8] = *b"MERAKTOK";
const INDEX_MAGIC: [u8; 8] = *b"MERAKIDX";
const VERSION: u32 = 1;

/// Bytes before the ids.
const HEADER: usize = 64;

/// Bytes before the ends of documents.
const INDEX_HEADER: usize = 32;

/// Whether a folder's file has tokens, by its name.
pub(super) fn is_one(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == EXTENSION)
}

/// What a token file says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TokenHeader {
    /// Bytes of an id, 2 or 4.
    width: u32,
    /// Ids.
    pub(super) tokens: u64,
    /// Documents.
    pub(super) documents: u64,
    /// The tokenizer that made them.
    pub(super) tokenizer: Checksum,
    /// What was tokenized.
    pub(super) source: Checksum,
    /// Tokens of the tokenizer; ids are smaller.
    pub(super) vocab: u32,
    /// The size that the tokenizer was trained for with the file; 0 if it was given.
    pub(super) trained: u32,
}

impl TokenHeader {
    /// The header of a file without ids.
    pub(super) fn new(print: TokenizerFingerprint, source: Checksum, trained: u32) -> Self {
        let ids_fit = print.tokens <= 1 << u16::BITS;
        Self {
            width: if ids_fit { 2 } else { 4 },
            tokens: 0,
            documents: 0,
            tokenizer: print.checksum,
            source,
            vocab: u32::try_from(print.tokens).unwrap_or(u32::MAX),
            trained,
        }
    }

    /// The type of an id, for people.
    pub(super) fn dtype(&self) -> &'static str {
        if self.width == 2 { "u16" } else { "u32" }
    }

    fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend(MAGIC);
        bytes.extend([VERSION, self.width].map(u32::to_le_bytes).concat());
        let [tokenizer, source] = [self.tokenizer.0, self.source.0];
        let numbers = [self.tokens, self.documents, tokenizer, source];
        bytes.extend(numbers.map(u64::to_le_bytes).concat());
        bytes.extend([self.vocab, self.trained].map(u32::to_le_bytes).concat());
        bytes.extend(Checksum::of(&bytes).0.to_le_bytes());
        bytes.try_into().expect("the fields have 64 bytes")
    }

    /// Reads a header, or says what the bytes are instead.
    fn from_bytes(bytes: &[u8; HEADER]) -> Result<Self, String> {
        if bytes[..8] != MAGIC {
            return Err(format!(
                "it is no token file: it begins with {:?}, not {:?}",
                String::from_utf8_lossy(&bytes[..8]),
                String::from_utf8_lossy(&MAGIC)
            ));
        }
        let narrow = |at| u32_at(bytes, at);
        let wide = |at| u64_at(bytes, at);
        if narrow(8) != VERSION {
            return Err(format!(
                "it has version {}, and this program reads version {VERSION}",
                narrow(8)
            ));
        }
        if Checksum::of(&bytes[..56]).0 != wide(56) {
            return Err("its header is damaged: the checksum is another one".to_owned());
        }
        if ![2, 4].contains(&narrow(12)) {
            return Err(format!(
                "its ids have {} bytes, expected 2 or 4",
                narrow(12)
            ));
        }
        Ok(Self {
            width: narrow(12),
            tokens: wide(16),
            documents: wide(24),
            tokenizer: Checksum(wide(32)),
            source: Checksum(wide(40)),
            vocab: narrow(48),
            trained: narrow(52),
        })
    }

    /// The header of a token file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let (opened, length) = merak_ckpt::open_regular(path).map_err(Error::reading(path))?;
        Self::read_from(&opened, path, length)
    }

    fn read_from(opened: &File, path: &Path, length: u64) -> Result<Self> {
        let mut bytes = [0; HEADER];
        if length < HEADER as u64 {
            let reason = format!("it is no token file: it has {length} bytes, its header {HEADER}");
            return Err(unusable(path, reason));
        }
        opened
            .read_exact_at(&mut bytes, 0)
            .map_err(Error::reading(path))?;
        let header = Self::from_bytes(&bytes).map_err(|reason| unusable(path, reason))?;
        let expected = u128::from(header.tokens) * u128::from(header.width) + HEADER as u128;
        if u128::from(length) != expected {
            let (tokens, dtype) = (header.tokens, header.dtype());
            let cut = if u128::from(length) < expected {
                "it is cut off"
            } else {
                "it is too long"
            };
            let reason = format!(
                "{cut}: {tokens} ids of {dtype} take {expected} bytes, and it has {length}"
            );
            return Err(unusable(path, reason));
        }
        Ok(header)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Writes a token file, and the ends of its documents, into a folder.
#[derive(Debug)]
pub(super) struct TokenWriter {
    header: TokenHeader,
    tokens: BufWriter<File>,
    index: BufWriter<File>,
}

/// Bytes that are written together.
const WRITTEN: usize = 1 << 20;

impl TokenWriter {
    /// Begins the files.
    pub(super) fn create(folder: &Path, header: TokenHeader) -> io::Result<Self> {
        let begin = |name: &str, header: usize| {
            let mut file = BufWriter::with_capacity(WRITTEN, File::create(folder.join(name))?);
            // The header is written in the end.
            file.write_all(&vec![0; header])?;
            Ok::<_, io::Error>(file)
        };
        Ok(Self {
            header,
            tokens: begin(TOKENS, HEADER)?,
            index: begin(INDEX, INDEX_HEADER)?,
        })
    }

    /// Adds ids, and the numbers of them at which documents end.
    pub(super) fn add(&mut self, ids: &[u32], ends: &[usize]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(ids.len() * self.header.width as usize);
        if self.header.width == 2 {
            bytes.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes()));
        } else {
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        self.tokens.write_all(&bytes)?;
        for &end in ends {
            let end = self.header.tokens + end as u64;
            self.index.write_all(&end.to_le_bytes())?;
        }
        self.header.tokens += ids.len() as u64;
        self.header.documents += ends.len() as u64;
        Ok(())
    }

    /// Writes the headers, and all of it to the disk.
    pub(super) fn finish(self) -> io::Result<TokenHeader> {
        let end = |file: BufWriter<File>, header: &[u8]| {
            let mut file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(header)?;
            file.sync_all()
        };
        let header = self.header.to_bytes();
        end(self.tokens, &header)?;
        end(self.index, &index_header(&self.header))?;
        Ok(self.header)
    }
}

/// The header of the index that belongs to a token file.
fn index_header(header: &TokenHeader) -> Vec<u8> {
    let mut bytes = INDEX_MAGIC.to_vec();
    bytes.extend([VERSION, 0].map(u32::to_le_bytes).concat());
    let print = Checksum::of(&header.to_bytes()).0;
    bytes.extend([header.documents, print].map(u64::to_le_bytes).concat());
    bytes
}

/// One token file.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
    header: TokenHeader,
    /// The place of its first id among those of all parts.
    first: usize,
}

/// The ids of one or several token files, end to end. They are read from the files as they are
/// asked for.
///
/// # Examples
///
/// ```no_run
/// use merak_trainer::data::{TokenFiles, TokenStore, Tokenizer};
///
/// let tokenizer = Tokenizer::from_file("corpus.tokens/tokenizer.json".as_ref())?;
/// let tokens = TokenFiles::open("corpus.tokens".as_ref(), &tokenizer)?;
/// println!("{} tokens, the first are {:?}", tokens.len(), tokens.read(0..10)?);
/// # Ok::<(), merak_trainer::Error>(())
/// ```
#[derive(Debug)]
pub struct TokenFiles {
    parts: Vec<Part>,
    len: usize,
}

impl TokenFiles {
    /// Opens a token file, or those of a folder in the order of their paths, which `tokenizer` must
    /// have made. Their headers are read.
    ///
    /// # Errors
    ///
    /// A file that is no token file, is cut off or has the tokens of another tokenizer.
    pub fn open(path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        Self::open_all(Input::data(&path.to_path_buf().into()), tokenizer)
    }

    /// [`TokenFiles::open`] for several paths, which follow each other.
    pub(super) fn open_all(input: Input<'_>, tokenizer: &Tokenizer) -> Result<Self> {
        let print = TokenizerFingerprint::of(tokenizer)?;
        let mut files = Self {
            parts: Vec::new(),
            len: 0,
        };
        for path in input.iter() {
            let found = files_of(input.key, path, &is_one)?;
            if found.is_empty() {
                let reason = format!("the folder has no .{EXTENSION} file");
                return Err(unusable(path, reason));
            }
            for candidate in found {
                let part = Part::open(input.key, &candidate.path, files.len)?;
                part.check_tokenizer(tokenizer, print)?;
                let len = usize::try_from(part.header.tokens).ok();
                let len = len.and_then(|len| files.len.checked_add(len));
                files.len =
                    len.ok_or_else(|| unusable(&part.path, "it has more ids than addresses"))?;
                files.parts.push(part);
            }
        }
        Ok(files)
    }

    /// How many files there are.
    pub(super) fn num_files(&self) -> usize {
        self.parts.len()
    }

    /// How many documents there are.
    pub fn num_documents(&self) -> u64 {
        self.parts.iter().map(|part| part.header.documents).sum()
    }

    /// The ends of the documents, each as the number of tokens up to it. They are read from the
    /// indices beside the files.
    ///
    /// # Errors
    ///
    /// An index that is missing, or belongs to another token file.
    pub fn document_ends(&self) -> Result<Vec<u64>> {
        let mut ends = Vec::new();
        for part in &self.parts {
            let first = part.first as u64;
            ends.extend(part.document_ends()?.iter().map(|end| first + end));
        }
        Ok(ends)
    }
}

impl TokenStore for TokenFiles {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, range: Range<usize>) -> Result<Cow<'_, [u32]>> {
        let mut ids = Vec::with_capacity(range.len());
        // The last part that begins at or before the range.
        let first = self.parts.partition_point(|part| part.first <= range.start);
        for part in &self.parts[first.saturating_sub(1)..] {
            if part.first >= range.end {
                break;
            }
            let within = |place: usize| place.saturating_sub(part.first).min(part.len());
            part.read(within(range.start)..within(range.end), &mut ids)?;
        }
        Ok(Cow::Owned(ids))
    }
}

impl Part {
    fn open(key: &'static str, path: &Path, first: usize) -> Result<Self> {
        let (file, length) =
            merak_ckpt::open_regular(path).map_err(Error::reading_input(key, path))?;
        let header = TokenHeader::read_from(&file, path, length)?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            header,
            first,
        })
    }

    fn len(&self) -> usize {
        self.header.tokens as usize
    }

    fn check_tokenizer(&self, tokenizer: &Tokenizer, print: TokenizerFingerprint) -> Result<()> {
        let header = &self.header;
        if header.tokenizer == print.checksum {
            return Ok(());
        }
        let own = self.path.with_file_name(TOKENIZER);
        Err(Error::Data(DataError::OtherTokenizer {
            path: self.path.clone(),
            made_with: format!("{} of {} tokens", header.tokenizer, header.vocab),
            given: tokenizer.name(),
            found: format!("{} of {} tokens", print.checksum, print.tokens),
            own: own.is_file().then_some(own),
        }))
    }

    /// Adds the ids of a range of this file.
    fn read(&self, range: Range<usize>, ids: &mut Vec<u32>) -> Result<()> {
        let width = self.header.width as usize;
        let mut bytes = vec![0; range.len() * width];
        self.file
            .read_exact_at(&mut bytes, (HEADER + range.start * width) as u64)
            .map_err(Error::reading(&self.path))?;
        let before = ids.len();
        if width == 2 {
            let read = bytes.chunks_exact(2);
            ids.extend(read.map(|id| u32::from(u16::from_le_bytes([id[0], id[1]]))));
        } else {
            ids.extend(bytes.chunks_exact(4).map(|id| u32_at(id, 0)));
        }
        let wrong = ids[before..].iter().position(|id| *id >= self.header.vocab);
        match wrong {
            None => Ok(()),
            Some(at) => Err(unusable(
                &self.path,
                format!(
                    "it is damaged: id {} is {}, and its tokenizer has {} tokens",
                    range.start + at,
                    ids[before + at],
                    self.header.vocab
                ),
            )),
        }
    }

    fn document_ends(&self) -> Result<Vec<u64>> {
        let path = self.path.with_extension("index");
        let most = (self.header.documents)
            .saturating_mul(8)
            .saturating_add(INDEX_HEADER as u64);
        let bytes = merak_ckpt::read_regular(&path, most).map_err(Error::reading(&path))?;
        let header = bytes.get(..INDEX_HEADER);
        if bytes.len() as u64 != most || header != Some(&index_header(&self.header)) {
            let tokens = file(&self.path);
            return Err(unusable(&path, format!("it is no index of {tokens}")));
        }
        let ends = bytes[INDEX_HEADER..].chunks_exact(8);
        Ok(ends.map(|end| u64_at(end, 0)).collect())
    }
}

/// The size that the tokenizer of the first token file of a path was trained for, and the
/// tokenizer's file.
pub(super) fn trained_beside(input: Input<'_>) -> Result<(PathBuf, u32, PathBuf)> {
    let path = input.paths.first();
    let found = files_of(input.key, path, &is_one)?;
    let Some(first) = found.first() else {
        let reason = format!("the folder has no .{EXTENSION} file");
        return Err(unusable(path, reason));
    };
    let header = TokenHeader::read(&first.path)?;
    let tokenizer = first.path.with_file_name(TOKENIZER);
    Ok((first.path.clone(), header.trained, tokenizer))
}

pub(super) fn unusable(path: &Path, reason: impl Into<String>) -> Error {
    Error::Data(DataError::TokenFile {
        path: path.to_path_buf(),
        reason: reason.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn header(tokens: u64) -> TokenHeader {
        let checksum = Checksum::of(Tokenizer::bytes().to_json().unwrap().as_bytes());
        TokenHeader::new(TokenizerFingerprint { tokens, checksum }, Checksum(7), 0)
    }

    fn write(folder: &Path, vocab: u64, documents: &[&[u32]]) {
        fs::create_dir_all(folder).unwrap();
        let mut writer = TokenWriter::create(folder, header(vocab)).unwrap();
        for document in documents {
            writer.add(document, &[document.len()]).unwrap();
        }
        let header = writer.finish().unwrap();
        assert_eq!(header, TokenHeader::read(&folder.join(TOKENS)).unwrap());
    }

    fn open(path: &Path) -> Result<TokenFiles> {
        TokenFiles::open(path, &Tokenizer::bytes())
    }

    fn message(result: Result<impl std::fmt::Debug>, folder: &Path) -> String {
        let error = result.unwrap_err();
        assert!(error.is_user_error());
        error
            .to_string()
            .replace(&format!("{}/", folder.display()), "")
    }

    #[test]
    fn ids_of_both_widths_come_back_by_range_over_several_files() {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<u32> = (0..30).map(|id| id * 8).collect();
        for vocab in [65_536, 65_537] {
            write(&folder.path().join("a"), vocab, &[&all[..7], &all[7..10]]);
            write(&folder.path().join("b"), vocab, &[]);
            write(&folder.path().join("c"), vocab, &[&all[10..]]);
            let files = open(folder.path()).unwrap();
            let counts = (files.len(), files.num_files(), files.num_documents());
            assert_eq!(counts, (30, 3, 3));
            assert_eq!(files.held_bytes(), 0);
            assert_eq!(files.document_ends().unwrap(), [7, 10, 30]);
            for start in 0..=30 {
                for end in start..=30 {
                    assert_eq!(*files.read(start..end).unwrap(), all[start..end]);
                }
            }
            let bytes = fs::metadata(folder.path().join("a/data.tokens"))
                .unwrap()
                .len();
            assert_eq!(bytes, 64 + 10 * if vocab == 65_536 { 2 } else { 4 });
        }
    }

    #[test]
    fn what_is_no_whole_token_file_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.tokens");
        let told = |change: &dyn Fn(&mut Vec<u8>)| {
            write(folder.path(), 257, &[&[1, 2, 3, 256]]);
            let mut bytes = fs::read(&path).unwrap();
            change(&mut bytes);
            fs::write(&path, bytes).unwrap();
            let read = open(folder.path()).and_then(|files| files.read(0..4).map(|ids| ids.len()));
            message(read, folder.path())
        };
        insta::assert_snapshot!(told(&|bytes| bytes.truncate(71)), @"cannot use the tokens of data.tokens: it is cut off: 4 ids of u16 take 72 bytes, and it has 71");
        insta::assert_snapshot!(told(&|bytes| bytes.push(0)), @"cannot use the tokens of data.tokens: it is too long: 4 ids of u16 take 72 bytes, and it has 73");
        insta::assert_snapshot!(told(&|bytes| bytes.truncate(9)), @"cannot use the tokens of data.tokens: it is no token file: it has 9 bytes, its header 64");
        insta::assert_snapshot!(told(&|bytes| bytes[0] = b'?'), @r#"cannot use the tokens of data.tokens: it is no token file: it begins with "?ERAKTOK", not "MERAKTOK""#);
        insta::assert_snapshot!(told(&|bytes| bytes[8] = 9), @"cannot use the tokens of data.tokens: it has version 9, and this program reads version 1");
        insta::assert_snapshot!(told(&|bytes| bytes[16] = 3), @"cannot use the tokens of data.tokens: its header is damaged: the checksum is another one");
        insta::assert_snapshot!(told(&|bytes| bytes[70] = 2), @"cannot use the tokens of data.tokens: it is damaged: id 3 is 258, and its tokenizer has 257 tokens");
        let none = folder.path().join("none");
        fs::create_dir(&none).unwrap();
        insta::assert_snapshot!(message(open(&none), folder.path()), @"cannot use the tokens of none: the folder has no .tokens file");
    }

    #[test]
    fn an_index_of_another_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
        write(&a, 257, &[&[1, 2], &[3]]);
        write(&b, 257, &[&[1, 2, 3], &[4]]);
        fs::copy(b.join(INDEX), a.join(INDEX)).unwrap();
        let told = message(open(&a).unwrap().document_ends(), folder.path());
        insta::assert_snapshot!(told, @"cannot use the tokens of a/data.index: it is no index of a/data.tokens");
        fs::remove_file(a.join(INDEX)).unwrap();
        assert!(open(&a).unwrap().document_ends().is_err());
    }
}
