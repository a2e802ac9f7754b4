//! Fingerprints that tell the data of runs apart.

use std::{
    fmt::{self, Write as _},
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
};

use merak_ckpt::Checksum;
use serde::{Deserialize, Serialize};

use super::{
    chat,
    crates::CrateSources,
    images,
    input::Input,
    parquet,
    plain::TextKind,
    source::count,
    tensor_files,
    text::{Candidate, files_of},
    texts::check_text,
    token_file,
    tokenizer::Tokenizer,
};
use crate::{
    config::{DataArguments, DataFormat},
    error::{Error, Result},
};

/// Fingerprint of a run's data files and tokenizer. It does not depend on the place of their folder
/// or on the ranks. Checkpoints keep it, so that a resumed run can report other data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFingerprint {
    /// How many files there are.
    pub files: u64,
    /// Their bytes, of those to train on up to `data.max_bytes`.
    pub bytes: u64,
    /// Checksum of their names below the folder and their sizes, in order.
    pub names: Checksum,
    /// Checksum of their contents: of all bytes up to 64 MiB, else of 1024 evenly spread blocks of
    /// 64 KiB. Absent in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contents: Option<Checksum>,
    /// Samples to train on.
    pub samples: u64,
    /// The tokenizer, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<TokenizerFingerprint>,
}

/// Fingerprint of a tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerFingerprint {
    /// Size of its vocabulary.
    pub tokens: u64,
    /// Checksum of its `tokenizer.json`.
    pub checksum: Checksum,
}

impl DataFingerprint {
    /// Takes the fingerprint of the files that `arguments` name; reads only some blocks of large
    /// ones.
    ///
    /// # Errors
    ///
    /// When they cannot be listed or read, or the tokenizer cannot be written as JSON.
    pub fn of(
        arguments: &DataArguments,
        crates: &CrateSources,
        tokenizer: Option<&Tokenizer>,
        samples: usize,
    ) -> Result<Self> {
        let kind = tokenizer.map_or(TextKind::Utf8, Tokenizer::text_kind);
        let files = all_named(arguments, crates, kind)?;
        Ok(Self {
            samples: samples as u64,
            tokenizer: tokenizer.map(TokenizerFingerprint::of).transpose()?,
            ..Self::of_candidates(files)?
        })
    }

    /// Takes the fingerprint of files of text. With it come the times at which they were last
    /// changed on this machine, in lines, where the checksum of contents leaves some bytes out.
    pub(super) fn of_texts(
        arguments: &DataArguments,
        crates: &CrateSources,
        kind: TextKind,
    ) -> Result<(Self, String)> {
        let files = all_named(arguments, crates, kind)?;
        let print = Self::of_candidates(files.clone())?;
        let mut times = String::new();
        for (_, file) in files.iter().filter(|_| print.bytes > BLOCK * BLOCKS) {
            let found = fs::metadata(&file.path).map_err(Error::reading(&file.path))?;
            let _ = writeln!(times, "{}.{:09}", found.mtime(), found.mtime_nsec());
        }
        Ok((print, times))
    }

    /// Takes the fingerprint of some files of a folder.
    ///
    /// # Errors
    ///
    /// When they cannot be read.
    pub fn of_files(folder: &Path, names: &[&str]) -> Result<Self> {
        let file = |name: &&str| {
            let path = folder.join(name);
            let metadata = fs::metadata(&path).map_err(Error::reading(&path))?;
            let bytes = metadata.len();
            Ok(((*name).to_owned(), Candidate { path, bytes }))
        };
        let files = names.iter().map(file).collect::<Result<_>>()?;
        Self::of_candidates(files)
    }

    /// The fingerprint of files.
    fn of_candidates(files: Vec<(String, Candidate)>) -> Result<Self> {
        let mut found = Self {
            files: 0,
            bytes: 0,
            names: Checksum(0),
            contents: None,
            samples: 0,
            tokenizer: None,
        };
        let mut names = String::new();
        let mut taken = Vec::new();
        for (name, file) in files.into_iter().filter(|(_, file)| file.bytes > 0) {
            found.files += 1;
            found.bytes += file.bytes;
            // A name has no NUL in it.
            let _ = writeln!(names, "{name}\0{}", file.bytes);
            taken.push(file);
        }
        found.names = Checksum::of(names.as_bytes());
        found.contents = Some(contents(&taken, found.bytes)?);
        Ok(found)
    }

    /// Whether the files and the tokenizer are the same, as far as both tell. The samples may
    /// differ.
    pub fn is_of_same_files(&self, other: &Self) -> bool {
        let of_files = |print: &Self, partner: &Self| Self {
            samples: 0,
            contents: print.contents.filter(|_| partner.contents.is_some()),
            ..*print
        };
        of_files(self, other) == of_files(other, self)
    }
}

impl TokenizerFingerprint {
    pub(crate) fn of(tokenizer: &Tokenizer) -> Result<Self> {
        Ok(Self {
            tokens: tokenizer.vocab_size() as u64,
            checksum: Checksum::of(tokenizer.to_json()?.as_bytes()),
        })
    }
}

impl fmt::Display for TokenizerFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tokenizer {} of {} tokens", self.checksum, self.tokens)
    }
}

impl fmt::Display for DataFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = count(usize::try_from(self.files).unwrap_or(usize::MAX), "file");
        let (bytes, names, samples) = (self.bytes, self.names, self.samples);
        write!(f, "{files} of {bytes} bytes, names and sizes {names}")?;
        if let Some(contents) = self.contents {
            write!(f, ", contents {contents}")?;
        }
        write!(f, ", {samples} training samples")?;
        match &self.tokenizer {
            Some(tokenizer) => write!(f, ", {tokenizer}"),
            None => Ok(()),
        }
    }
}

/// All files of the data by name, as far as they are read: one path alone gives the names below it,
/// several their number too, a mixture also the weights, since samples follow from them. `kind` is
/// that of text.
fn all_named(
    arguments: &DataArguments,
    crates: &CrateSources,
    kind: TextKind,
) -> Result<Vec<(String, Candidate)>> {
    let mut files = Vec::new();
    let passed_over = arguments.skip_binary.then_some(kind);
    let mut add = |prefix: &str, input: Input<'_>| -> Result<()> {
        let mut left = input.most_bytes(arguments).map(|bytes| bytes as u64);
        for (number, path) in input.iter().enumerate() {
            let mut below = named(input.key, path, arguments)?;
            if let Some(left) = &mut left {
                below = first_bytes(below, left, passed_over)?;
            }
            let prefix = match number {
                0 => prefix.to_owned(),
                number => format!("{prefix}{number}:"),
            };
            files.extend(
                below
                    .into_iter()
                    .map(|(name, file)| (format!("{prefix}{name}"), file)),
            );
        }
        Ok(())
    };
    match (&arguments.mixture, &arguments.path) {
        (Some(mixture), _) => {
            for (number, part) in mixture.parts().iter().enumerate() {
                let prefix = format!("part {number} of weight {}:", part.weight);
                add(&prefix, Input::mixture(&part.path))?;
            }
        }
        (None, Some(path)) => add("", Input::data(path))?,
        (None, None) => {}
    }
    if let Some(path) = &arguments.validation_path {
        add("validation:", Input::validation(path))?;
    }
    for written in chat::templates_in_use(arguments)? {
        let (name, path) = (written.name(), written.path);
        let bytes = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        files.push((name, Candidate { path, bytes }));
    }
    if arguments.mixture.is_none() && arguments.path.is_none() {
        files.splice(0..0, crates.named(arguments.max_bytes)?);
    }
    Ok(files)
}

/// Files until `left` bytes are read of them. With a kind of text, files of another kind are passed
/// over, as where they are read.
fn first_bytes(
    files: Vec<(String, Candidate)>,
    left: &mut u64,
    kind: Option<TextKind>,
) -> Result<Vec<(String, Candidate)>> {
    let mut taken = Vec::new();
    for (name, mut file) in files {
        let most = file.bytes.min(*left);
        if most == 0 {
            continue;
        }
        if let Some(kind) = kind
            && check_text(&file, kind, most)?.is_err()
        {
            continue;
        }
        *left -= most;
        file.bytes = most;
        taken.push((name, file));
    }
    Ok(taken)
}

/// The files of a data path by their names below it.
fn named(
    key: &'static str,
    path: &Path,
    arguments: &DataArguments,
) -> Result<Vec<(String, Candidate)>> {
    let takes = |path: &Path| match arguments.format {
        DataFormat::Tensors => tensor_files::is_one(path),
        DataFormat::Tokens => token_file::is_one(path),
        DataFormat::Parquet => parquet::is_one(path),
        DataFormat::Images => images::is_one(path),
        _ => true,
    };
    let files = files_of(key, path, &takes)?;
    let root = if path.is_dir() {
        path
    } else {
        path.parent().unwrap_or(path)
    };
    Ok(names_below(root, files))
}

/// Files by their names below a folder.
pub(super) fn names_below(root: &Path, files: Vec<Candidate>) -> Vec<(String, Candidate)> {
    let name = |file: Candidate| {
        let name = file.path.strip_prefix(root).unwrap_or(&file.path);
        (name.to_string_lossy().into_owned(), file)
    };
    files.into_iter().map(name).collect()
}

/// Bytes of a block in the checksum of contents.
const BLOCK: u64 = 64 << 10;
/// The most blocks of all files together.
const BLOCKS: u64 = 1024;

/// Where the blocks begin in `bytes` bytes: one after the other where they cover all, else the
/// first at the beginning, the last at the end and the others evenly between them.
fn blocks(bytes: u64) -> impl Iterator<Item = u64> {
    let count = bytes.div_ceil(BLOCK).min(BLOCKS);
    let room = u128::from(bytes.saturating_sub(BLOCK));
    let begin = move |index: u64| {
        if bytes <= BLOCK * BLOCKS {
            return index * BLOCK;
        }
        // At most `room`.
        (u128::from(index) * room / u128::from(BLOCKS - 1)) as u64
    };
    (0..count).map(begin)
}

/// Checksum of the contents of files that have `bytes` bytes in all.
fn contents(files: &[Candidate], bytes: u64) -> Result<Checksum> {
    let mut checksums = Vec::new();
    let (mut begin, mut at, mut opened) = (0, 0, None);
    for block in blocks(bytes) {
        let (mut from, end) = (block, (block + BLOCK).min(bytes));
        while let Some(file) = files.get(at).filter(|_| from < end) {
            if from >= begin + file.bytes {
                begin += file.bytes;
                at += 1;
                opened = None;
                continue;
            }
            let to = end.min(begin + file.bytes);
            let mut piece = vec![0; (to - from) as usize];
            let unread = Error::reading(&file.path);
            if opened.is_none() {
                opened = Some(merak_ckpt::open_regular(&file.path).map_err(unread)?.0);
            }
            let opened = opened.as_ref().expect("it was just opened");
            opened
                .read_exact_at(&mut piece, from - begin)
                .map_err(unread)?;
            checksums.extend(Checksum::of(&piece).0.to_le_bytes());
            from = to;
        }
    }
    Ok(Checksum::of(&checksums))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{TemplateSource, TokenizerSource};

    fn print(folder: &Path, path: &str, format: DataFormat) -> DataFingerprint {
        let arguments = DataArguments {
            path: Some(folder.join(path).into()),
            format,
            ..DataArguments::default()
        };
        let bytes = Tokenizer::bytes();
        let found = DataFingerprint::of(&arguments, &CrateSources::default(), Some(&bytes), 7);
        found.expect("files that can be listed")
    }

    #[test]
    fn a_fingerprint_tells_files_and_sizes_and_not_where_they_lie() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for place in ["here", "else/where"] {
            write(&format!("{place}/a.txt"), "abc");
            write(&format!("{place}/b/c.txt"), "defg");
            write(&format!("{place}/empty.txt"), "");
        }
        let text = |path: &str| print(folder.path(), path, DataFormat::Text);
        let here = text("here");
        assert_eq!(text("else/where"), here);
        assert_eq!((here.files, here.bytes), (2, 7));
        insta::assert_snapshot!(here, @"2 files of 7 bytes, names and sizes 03146ffdcd970346, contents 8893a3e09617c1b3, 7 training samples, tokenizer 10501b8994605a29 of 257 tokens");
        assert_eq!(text("here/a.txt").files, 1);
        assert_ne!(text("here/a.txt").names, here.names);
        write("here/a.txt", "abd");
        assert_eq!(text("here").names, here.names);
        assert!(!text("here").is_of_same_files(&here), "other contents");
        let earlier = DataFingerprint {
            contents: None,
            samples: 8,
            ..here
        };
        assert!(text("here").is_of_same_files(&earlier), "what is not known");
        let json = serde_json::to_value(earlier).unwrap();
        assert!(json.get("contents").is_none());
        assert_eq!(
            serde_json::from_value::<DataFingerprint>(json).unwrap(),
            earlier
        );
        write("here/a.txt", "abcd");
        assert_ne!(text("here"), here);
        write("here/a.txt", "abc");
        fs::rename(
            folder.path().join("here/a.txt"),
            folder.path().join("here/z.txt"),
        )
        .unwrap();
        assert_ne!(
            text("here"),
            here,
            "another name is another place in the data"
        );
        assert_eq!(print(folder.path(), "here", DataFormat::Tensors).files, 0);
    }

    #[test]
    fn a_limit_of_bytes_holds_for_training_alone_and_not_for_files_that_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let arguments = |max_bytes: usize| DataArguments {
            path: Some(at("train").into()),
            validation_path: Some(at("held.txt").into()),
            max_bytes: Some(max_bytes),
            skip_binary: true,
            ..DataArguments::default()
        };
        let print = |max_bytes| {
            let bytes = Tokenizer::bytes();
            let crates = CrateSources::default();
            DataFingerprint::of(&arguments(max_bytes), &crates, Some(&bytes), 7).unwrap()
        };
        fs::create_dir(at("train")).unwrap();
        fs::write(at("train/a.bin"), [0; 6]).unwrap();
        fs::write(at("train/b.txt"), "abcdef").unwrap();
        fs::write(at("held.txt"), "held out").unwrap();
        let first = print(4);
        assert_eq!((first.files, first.bytes), (2, 4 + 8));
        fs::write(at("train/b.txt"), "abcdxx").unwrap();
        assert_eq!(print(4), first, "it is not read so far");
        fs::write(at("train/b.txt"), "abxdxx").unwrap();
        assert!(!print(4).is_of_same_files(&first));
        fs::write(at("train/b.txt"), "abcdef").unwrap();
        fs::write(at("held.txt"), "held off").unwrap();
        assert!(!print(4).is_of_same_files(&first));
    }

    #[test]
    fn chat_templates_in_use_are_told_apart_within_a_file_too() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let print = |name: Option<&str>| {
            let arguments = DataArguments {
                path: Some(at("a.txt").into()),
                tokenizer: TokenizerSource::File(at("tokenizer.json")),
                chat_template: name.map(|name| TemplateSource::Name(name.to_owned())),
                ..DataArguments::default()
            };
            DataFingerprint::of(&arguments, &CrateSources::default(), None, 7).unwrap()
        };
        fs::write(at("a.txt"), "abc").unwrap();
        let config = r#"{ "chat_template": [
            { "name": "default", "template": "a" }, { "name": "rag", "template": "b" }
        ] }"#;
        fs::write(at("tokenizer_config.json"), config).unwrap();
        assert_eq!(print(Some("rag")), print(Some("rag")));
        assert!(!print(Some("rag")).is_of_same_files(&print(Some("default"))));
        fs::create_dir(at("additional_chat_templates")).unwrap();
        let tool_use = |text: &str| {
            fs::write(at("additional_chat_templates/tool_use.jinja"), text).unwrap();
            print(None)
        };
        fs::write(at("chat_template.jinja"), "a").unwrap();
        assert_ne!(print(None), tool_use("b"));
        assert_ne!(tool_use("b"), tool_use("c"));
    }

    #[test]
    fn files_of_a_folder_are_told_by_what_they_hold_and_others_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("pytorch_model.bin", "abc");
        let print = || DataFingerprint::of_files(folder.path(), &["pytorch_model.bin"]).unwrap();
        let first = print();
        assert_eq!((first.files, first.bytes), (1, 3));
        write("notes", "of this host");
        assert_eq!(print(), first);
        write("pytorch_model.bin", "abd");
        assert_ne!(print(), first);
        assert!(DataFingerprint::of_files(folder.path(), &["nothing"]).is_err());
    }

    #[test]
    fn much_data_are_told_by_blocks_from_the_first_to_the_last() {
        for bytes in [0, 1, BLOCK, BLOCK + 1, BLOCK * BLOCKS] {
            let expected: Vec<_> = (0..bytes.div_ceil(BLOCK)).map(|i| i * BLOCK).collect();
            assert_eq!(blocks(bytes).collect::<Vec<_>>(), expected);
        }
        for bytes in [BLOCK * BLOCKS + 1, 10 << 40, u64::MAX] {
            let begins: Vec<_> = blocks(bytes).collect();
            assert_eq!((begins.len() as u64, begins[0]), (BLOCKS, 0));
            assert_eq!(begins.last(), Some(&(bytes - BLOCK)));
            assert!(begins.windows(2).all(|pair| pair[0] + BLOCK <= pair[1]));
        }
        // A sparse file of 64 GiB takes a moment, and its last byte counts.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        let file = fs::File::create(&path).unwrap();
        let large = [Candidate {
            path,
            bytes: 1 << 36,
        }];
        file.set_len(1 << 36).unwrap();
        let zeros = contents(&large, 1 << 36).unwrap();
        file.write_all_at(b"x", (1 << 36) - 1).unwrap();
        assert_ne!(contents(&large, 1 << 36).unwrap(), zeros);
        file.set_len(1 << 35).unwrap();
        assert!(contents(&large, 1 << 36).is_err());
    }
}
