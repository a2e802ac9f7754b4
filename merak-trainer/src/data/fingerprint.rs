//! What tells the data of a run from others.

use std::{
    fmt::{self, Write as _},
    path::Path,
};

use merak_ckpt::Checksum;
use serde::{Deserialize, Serialize};

use super::{
    crates::CrateSources,
    source::count,
    text::{Candidate, files_of},
    tokenizer::Tokenizer,
};
use crate::{
    config::{DataArguments, DataFormat},
    error::Result,
};

/// The files, sizes and tokenizer of a run's data. It is the same wherever their folder lies and
/// whatever the ranks are; checkpoints keep it, so that a run that goes on in other data can say
/// so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFingerprint {
    /// How many files there are.
    pub files: u64,
    /// Their bytes, as far as `data.max_bytes` lets them be read.
    pub bytes: u64,
    /// Of their names below the folder and their sizes, in order.
    pub names: Checksum,
    /// Samples to train on.
    pub samples: u64,
    /// What turns text into tokens, where something does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<TokenizerFingerprint>,
}

/// What tells a tokenizer from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerFingerprint {
    /// Its tokens.
    pub tokens: u64,
    /// Of its `tokenizer.json`.
    pub checksum: Checksum,
}

impl DataFingerprint {
    /// Looks at the files that `arguments` name, without reading them.
    ///
    /// # Errors
    ///
    /// When they cannot be listed, or the tokenizer cannot be written as JSON.
    pub fn of(
        arguments: &DataArguments,
        crates: &CrateSources,
        tokenizer: Option<&Tokenizer>,
        samples: usize,
    ) -> Result<Self> {
        let files = match &arguments.path {
            Some(path) => named(&path.0, arguments)?,
            None => crates.named(arguments.max_bytes)?,
        };
        let tokenizer = tokenizer.map(TokenizerFingerprint::of).transpose()?;
        let mut left = arguments.max_bytes.map_or(u64::MAX, |bytes| bytes as u64);
        let mut found = Self {
            files: 0,
            bytes: 0,
            names: Checksum(0),
            samples: samples as u64,
            tokenizer,
        };
        let mut names = String::new();
        for (name, bytes) in files {
            let read = bytes.min(left);
            if read == 0 {
                continue;
            }
            left -= read;
            found.files += 1;
            found.bytes += read;
            // A name has no NUL in it.
            let _ = writeln!(names, "{name}\0{read}");
        }
        found.names = Checksum::of(names.as_bytes());
        Ok(found)
    }
}

impl TokenizerFingerprint {
    fn of(tokenizer: &Tokenizer) -> Result<Self> {
        Ok(Self {
            tokens: tokenizer.vocab_size() as u64,
            checksum: Checksum::of(tokenizer.to_json()?.as_bytes()),
        })
    }
}

impl fmt::Display for DataFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = count(usize::try_from(self.files).unwrap_or(usize::MAX), "file");
        let (bytes, names, samples) = (self.bytes, self.names, self.samples);
        write!(
            f,
            "{files} of {bytes} bytes, names and sizes {names}, {samples} training samples"
        )?;
        match &self.tokenizer {
            Some(TokenizerFingerprint { tokens, checksum }) => {
                write!(f, ", tokenizer {checksum} of {tokens} tokens")
            }
            None => Ok(()),
        }
    }
}

/// The files of a data path by their names below it, and their sizes.
fn named(path: &Path, arguments: &DataArguments) -> Result<Vec<(String, u64)>> {
    let is_tensor_file = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    let takes = |path: &Path| arguments.format != DataFormat::Tensors || is_tensor_file(path);
    let files = files_of(path, &takes)?;
    let root = if path.is_dir() {
        path
    } else {
        path.parent().unwrap_or(path)
    };
    Ok(names_below(root, files))
}

/// Files by their names below a folder.
pub(super) fn names_below(root: &Path, files: Vec<Candidate>) -> Vec<(String, u64)> {
    let name = |file: Candidate| {
        let name = file.path.strip_prefix(root).unwrap_or(&file.path);
        (name.to_string_lossy().into_owned(), file.bytes)
    };
    files.into_iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::InputPath;

    fn print(folder: &Path, path: &str, format: DataFormat) -> DataFingerprint {
        let arguments = DataArguments {
            path: Some(InputPath(folder.join(path))),
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
        insta::assert_snapshot!(here, @"2 files of 7 bytes, names and sizes 03146ffdcd970346, 7 training samples, tokenizer 10501b8994605a29 of 257 tokens");
        assert_eq!(text("here/a.txt").files, 1);
        assert_ne!(text("here/a.txt").names, here.names);
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
}
