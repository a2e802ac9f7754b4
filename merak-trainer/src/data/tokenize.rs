//! From the texts that a configuration names to a tokenizer and token files.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use merak_ckpt::{Checksum, DraftBeside, replace_file};

use super::{
    bpe::{WordCounts, add_words, count_words},
    crates::CrateSources,
    fingerprint::{DataFingerprint, TokenizerFingerprint},
    in_order::in_order,
    input::Input,
    pieces::TextPart,
    plain::TextKind,
    source::count as counted,
    texts::{Fields, Texts},
    token_file::{INDEX, TOKENIZER, TOKENS, TokenHeader, TokenWriter, trained_beside},
    tokenizer::Tokenizer,
};
use crate::{
    config::{DataArguments, DataFormat, TokenizerSource},
    error::{DataError, Error, Result},
    machine::num_cores,
};

/// What is done with the texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextWork {
    /// Words are counted, from which a tokenizer is made.
    Training,
    /// Tokens are written.
    Tokenizing,
}

/// How far work on texts has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextProgress {
    /// What is done.
    pub work: TextWork,
    /// Bytes of files that were read.
    pub done: u64,
    /// Bytes of all files.
    pub total: u64,
}

/// Token files that were written, or are there already.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tokenized {
    /// Tokens, those that end documents included.
    pub tokens: u64,
    /// Documents.
    pub documents: u64,
    /// Bytes of the text.
    pub bytes: u64,
    /// Tokens of the tokenizer; ids are smaller.
    pub vocab_size: u64,
    /// The type of an id: `u16` or `u32`.
    pub dtype: &'static str,
    /// Where the text came from, for people.
    pub description: String,
    /// Whether the folder had the tokens of these texts already, and stays as it is.
    pub is_current: bool,
}

/// Bytes of text that a worker takes at once.
const BATCH: usize = 512 << 10;

/// Most pieces that it takes at once: texts may be short, or empty.
const BATCH_PIECES: usize = 4096;

/// Bytes of text from which a tokenizer is trained; of more, evenly spread parts.
const TRAINED_BYTES: u64 = 256 << 20;

/// The tokenizer of text or tokens: the one that `arguments` name, or one that is trained on the
/// text.
///
/// # Errors
///
/// As [`Tokenizer::load`], and text that cannot be read; token files whose tokenizer was not
/// trained as `arguments` say.
pub(super) fn tokenizer_of(arguments: &DataArguments, crates: &CrateSources) -> Result<Tokenizer> {
    match arguments.tokenizer {
        TokenizerSource::TrainBpe(size) if arguments.format == DataFormat::Tokens => {
            trained_before(arguments, size)
        }
        TokenizerSource::TrainBpe(size) if arguments.format.is_text() => {
            let texts = Texts::of(arguments, crates, TextKind::Utf8)?;
            train(&texts, size, &mut |_| {})
        }
        _ => Tokenizer::load(&arguments.tokenizer),
    }
}

/// The tokenizer of token files, which was trained for `size` tokens with them.
fn trained_before(arguments: &DataArguments, size: usize) -> Result<Tokenizer> {
    let input = match (&arguments.mixture, &arguments.path) {
        (Some(mixture), _) => Input::mixture(&mixture.parts()[0].path),
        (None, Some(path)) => Input::data(path),
        (None, None) => return Tokenizer::load(&arguments.tokenizer),
    };
    let (path, trained, tokenizer) = trained_beside(input)?;
    if trained as usize == size {
        return Tokenizer::from_file(&tokenizer);
    }
    let made_with = match trained {
        0 => "one that was not trained with it".to_owned(),
        trained => format!("one trained for {trained} tokens"),
    };
    Err(Error::Data(DataError::OtherTokenizer {
        path,
        made_with,
        given: format!("{{ train_bpe = {size} }}"),
        found: "to be trained".to_owned(),
        own: Some(tokenizer),
    }))
}

/// Trains byte-level BPE of at most `size` tokens. The result depends on the texts alone.
fn train(texts: &Texts, size: usize, progress: &mut dyn FnMut(TextProgress)) -> Result<Tokenizer> {
    let (read, total) = (Arc::default(), texts.bytes());
    let every = total.div_ceil(TRAINED_BYTES).max(1) as usize;
    let batches = Batches(texts.pieces(Fields::All, &read)).enumerate();
    // An error counts wherever it stands.
    let batches = batches.filter(|(number, batch)| number % every == 0 || batch.is_err());
    let mut words = WordCounts::new();
    let count = |batch: Vec<TextPart>| {
        let mut counts = WordCounts::new();
        for piece in batch {
            let text = String::from_utf8_lossy(&piece.text);
            let found = count_words(&text).map_err(|error| Tokenizer::not_trained(&error))?;
            add_words(&mut counts, found);
        }
        Ok(counts)
    };
    let take = |counts| {
        add_words(&mut words, counts);
        progress(TextProgress {
            work: TextWork::Training,
            done: read.load(Ordering::Relaxed),
            total,
        });
        Ok(())
    };
    in_order(batches.map(|(_, batch)| batch), num_cores(), count, take)?;
    let tokenizer = Tokenizer::trained(&words, size)?;
    let tokens = tokenizer.vocab_size();
    if tokens < size {
        tracing::warn!(
            tokens,
            size,
            "the text has too few words for so many tokens"
        );
    }
    Ok(tokenizer)
}

/// Pieces of texts, several together.
struct Batches<I>(I);

impl<I: Iterator<Item = Result<TextPart>>> Iterator for Batches<I> {
    type Item = Result<Vec<TextPart>>;

    fn next(&mut self) -> Option<Self::Item> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while bytes < BATCH && batch.len() < BATCH_PIECES {
            match self.0.next() {
                Some(Ok(piece)) => {
                    bytes += piece.text.len();
                    batch.push(piece);
                }
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        (!batch.is_empty()).then_some(Ok(batch))
    }
}

/// The tokens of some pieces.
#[derive(Default)]
struct Encoded {
    ids: Vec<u32>,
    /// The numbers of ids at which documents end.
    ends: Vec<usize>,
    /// Bytes of the text.
    bytes: u64,
}

fn encode(tokenizer: &Tokenizer, batch: Vec<TextPart>) -> Result<Encoded> {
    let mut encoded = Encoded::default();
    for piece in batch {
        encoded.bytes += piece.text.len() as u64;
        tokenizer.encode_into(&piece.text, &mut encoded.ids)?;
        if piece.ends {
            encoded.ids.extend(tokenizer.end_of_document());
            encoded.ends.push(encoded.ids.len());
        }
    }
    Ok(encoded)
}

/// Writes the tokens of the texts that `arguments` name into `folder`, which appears when all of
/// them are written: token file, index and tokenizer. Texts are read, and tokens are written, a
/// part at a time, by all cores. A folder that has the tokens of the same texts by the same
/// tokenizer stays as it is; one with other tokens is replaced.
///
/// # Errors
///
/// Texts or a tokenizer that cannot be read, and a folder that cannot be written or has something
/// else than tokens.
pub fn tokenize(
    arguments: &DataArguments,
    crates: &CrateSources,
    folder: &Path,
    progress: &mut dyn FnMut(TextProgress),
) -> Result<Tokenized> {
    let place = TokenPlace::new(folder)?;
    let given = match arguments.tokenizer {
        TokenizerSource::TrainBpe(_) => None,
        ref source => Some(Tokenizer::load(source)?),
    };
    let kind = given.as_ref().map_or(TextKind::Utf8, Tokenizer::text_kind);
    let source = source_print(arguments, crates, kind)?;
    let texts = Texts::of(arguments, crates, kind)?;
    let trained = match arguments.tokenizer {
        TokenizerSource::TrainBpe(size) => u32::try_from(size).unwrap_or(u32::MAX),
        _ => 0,
    };
    let print = given.as_ref().map(TokenizerFingerprint::of).transpose()?;
    if let Some(there) = place.there()? {
        let is_same = print.map_or(there.trained == trained, |print| {
            print.checksum == there.tokenizer
        });
        if is_same && there.source == source {
            return Ok(described(&there, &texts, None));
        }
    }
    let tokenizer = match (given, &arguments.tokenizer) {
        (None, TokenizerSource::TrainBpe(size)) => train(&texts, *size, progress)?,
        (given, source) => given.map_or_else(|| Tokenizer::load(source), Ok)?,
    };
    let header = TokenHeader::new(TokenizerFingerprint::of(&tokenizer)?, source, trained);
    let draft = DraftBeside::begin_replacing(folder)?;
    let path = draft.path().to_path_buf();
    let mut writer = TokenWriter::create(&path, header).map_err(Error::writing(&path))?;
    let (read, total) = (Arc::<AtomicU64>::default(), texts.bytes());
    let mut bytes = 0;
    let batches = Batches(texts.pieces(Fields::Text, &read));
    in_order(
        batches,
        num_cores(),
        |batch| encode(&tokenizer, batch),
        |encoded: Encoded| {
            bytes += encoded.bytes;
            writer
                .add(&encoded.ids, &encoded.ends)
                .map_err(Error::writing(&path))?;
            progress(TextProgress {
                work: TextWork::Tokenizing,
                done: read.load(Ordering::Relaxed),
                total,
            });
            Ok(())
        },
    )?;
    let header = writer.finish().map_err(Error::writing(&path))?;
    let file = path.join(TOKENIZER);
    replace_file(&file, tokenizer.to_json()?.as_bytes()).map_err(Error::writing(&file))?;
    draft.replace()?;
    Ok(described(&header, &texts, Some(bytes)))
}

/// Tokens of texts; without the bytes of the text, they were there.
fn described(header: &TokenHeader, texts: &Texts, bytes: Option<u64>) -> Tokenized {
    let mut description = counted(texts.num_files(), "file");
    if texts.skipped > 0 {
        description = format!("{description} ({} passed over as no text)", texts.skipped);
    }
    Tokenized {
        tokens: header.tokens,
        documents: header.documents,
        bytes: bytes.unwrap_or_else(|| texts.bytes()),
        vocab_size: header.vocab.into(),
        dtype: header.dtype(),
        description,
        is_current: bytes.is_none(),
    }
}

/// The checksum of what is tokenized: the files, when those that are not read whole for it were
/// changed, and how they are read.
fn source_print(
    arguments: &DataArguments,
    crates: &CrateSources,
    kind: TextKind,
) -> Result<Checksum> {
    let (files, times) = DataFingerprint::of_texts(arguments, crates, kind)?;
    let (format, skips) = (arguments.format, arguments.skip_binary);
    let print = format!("{files} {format} {skips}{times}");
    Ok(Checksum::of(print.as_bytes()))
}

/// Where a folder of token files goes.
struct TokenPlace(PathBuf);

impl TokenPlace {
    /// Refuses a place that has something else than token files.
    fn new(folder: &Path) -> Result<Self> {
        if folder.file_name().is_none() {
            return Err(not_tokens(folder, "it has no name of its own"));
        }
        let others = match fs::symlink_metadata(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::writing(folder)(error)),
            Ok(found) if !found.is_dir() => Some("it is no folder".to_owned()),
            Ok(_) => foreign(folder)
                .map_err(Error::writing(folder))?
                .map(|name| format!("it has {name}")),
        };
        match others {
            Some(found) => Err(not_tokens(folder, found)),
            None => Ok(Self(folder.to_path_buf())),
        }
    }

    /// The header of the token file that is there, if all files can be read.
    fn there(&self) -> Result<Option<TokenHeader>> {
        let [tokens, index, tokenizer] = [TOKENS, INDEX, TOKENIZER].map(|name| self.0.join(name));
        let has_all = tokens.is_file() && index.is_file() && tokenizer.is_file();
        if !has_all || Tokenizer::from_file(&tokenizer).is_err() {
            return Ok(None);
        }
        match TokenHeader::read(&tokens) {
            Err(Error::Data(_)) => Ok(None),
            header => header.map(Some),
        }
    }
}

fn not_tokens(path: &Path, found: impl Into<String>) -> Error {
    Error::Data(DataError::NoTokenFolder {
        path: path.to_path_buf(),
        found: found.into(),
    })
}

/// The first entry of a folder that does not belong to token files; an empty folder has none.
fn foreign(folder: &Path) -> io::Result<Option<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    names.retain(|name| ![TOKENS, INDEX, TOKENIZER].contains(&name.as_str()));
    Ok(names.into_iter().next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn a_change_between_the_blocks_of_a_large_text_shows_in_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        let file = fs::File::create(&path).unwrap();
        let arguments = DataArguments {
            path: Some(path.into()),
            ..DataArguments::default()
        };
        let print = || source_print(&arguments, &CrateSources::default(), TextKind::Bytes).unwrap();
        let changed = |bytes: u64| {
            file.set_len(bytes).unwrap();
            let before = print();
            let contents = || DataFingerprint::of(&arguments, &CrateSources::default(), None, 0);
            let read = contents().unwrap();
            let time = file.metadata().unwrap().modified().unwrap();
            assert_eq!(print(), before);
            // Behind the first block and before the second one.
            file.write_all_at(b"x", 66_000).unwrap();
            file.set_modified(time + std::time::Duration::from_secs(2))
                .unwrap();
            assert_eq!(contents().unwrap() == read, bytes == 65 << 20);
            print() != before
        };
        assert!(changed(65 << 20));
        // All of a small text is read, and a new time alone is no change.
        file.set_len(0).unwrap();
        assert!(changed(70_000));
        let before = print();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH)
            .unwrap();
        assert_eq!(print(), before);
    }
}
