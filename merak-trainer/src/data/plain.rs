//! Whether the bytes of a file are text.

use std::path::Path;

use crate::error::{DataError, Error, Result};

/// The text that files are to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextKind {
    /// For the byte vocabulary: text in any encoding that has no zero bytes.
    Bytes,
    /// For a tokenizer file: UTF-8.
    Utf8,
    /// Records, which are UTF-8 whatever the tokenizer.
    Records,
}

/// Why bytes are not text of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotText {
    /// The first byte that does not belong there.
    offset: usize,
    found: Found,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    /// A format recognised by its first bytes.
    Format(&'static str),
    /// A zero byte, which no encoding with single bytes has in text.
    Zero,
    /// A byte that is not UTF-8 at its place, and its line.
    NotUtf8 { byte: u8, line: usize },
}

/// Formats by their first bytes. Some of these are letters, so they only name files already found
/// not to be text.
const FORMATS: [(&[u8], &str); 21] = [
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"RIFF", "a RIFF file, as WebP and WAV are"),
    (b"\x1f\x8b", "a gzip file"),
    (
        b"PK\x03\x04",
        "a zip file, as .npz, .docx and PyTorch's .pt are",
    ),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"\xfd7zXZ\x00", "an xz file"),
    (b"BZh", "a bzip2 file"),
    (b"\x7fELF", "a program (ELF)"),
    (b"MZ", "a program (PE)"),
    (b"%PDF-", "a PDF file"),
    (b"MERAKTOK", TOKENS),
    (b"PAR1", PARQUET),
    (b"ARROW1", "an Arrow file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
];

const SAFETENSORS: &str = "a safetensors file";

const TOKENS: &str = "a token file";

const PARQUET: &str = "a Parquet file";

/// The most bytes that the header of a safetensors file takes.
const MAX_HEADER: u64 = 100_000_000;

/// Byte order mark that some editors put before UTF-8; it does not belong to the text.
pub(crate) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What comes before a piece of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Before {
    pub(crate) bytes: usize,
    /// Line ends.
    pub(crate) lines: usize,
}

/// Makes text of the bytes of a file, without a byte order mark at its beginning. Where the file
/// has more bytes (`is_cut`), an incomplete character at the end is dropped.
pub(crate) fn text_of(bytes: Vec<u8>, kind: TextKind, is_cut: bool) -> Result<Vec<u8>, NotText> {
    piece_of(bytes, kind, is_cut, Before::default())
}

/// [`text_of`] for a piece of a file.
pub(crate) fn piece_of(
    mut bytes: Vec<u8>,
    kind: TextKind,
    is_cut: bool,
    before: Before,
) -> Result<Vec<u8>, NotText> {
    let is_first = before.bytes == 0;
    let utf8 = std::str::from_utf8(&bytes).err();
    let is_whole = |error: &std::str::Utf8Error| !is_cut || error.error_len().is_some();
    let cut_at = utf8.filter(|error| !is_whole(error));
    let wrong = utf8.filter(is_whole).map(|error| error.valid_up_to());
    let zero = bytes.iter().position(|byte| *byte == 0);
    let first = zero.into_iter().chain(wrong).min();
    // The first bytes tell the format, wherever the first wrong byte lies.
    if let Some(format) = first.filter(|_| is_first).and_then(|_| format_of(&bytes)) {
        let found = Found::Format(format);
        return Err(NotText { offset: 0, found });
    }
    if let Some(offset) = zero {
        let (offset, found) = (before.bytes + offset, Found::Zero);
        return Err(NotText { offset, found });
    }
    if let Some(offset) = wrong.filter(|_| kind != TextKind::Bytes) {
        let byte = bytes[offset];
        let line = before.lines + bytes[..offset].split(|byte| *byte == b'\n').count();
        let (offset, found) = (before.bytes + offset, Found::NotUtf8 { byte, line });
        return Err(NotText { offset, found });
    }
    if let Some(error) = cut_at.filter(|_| kind != TextKind::Bytes) {
        bytes.truncate(error.valid_up_to());
    }
    if is_first && bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    Ok(bytes)
}

/// The format that bytes begin like.
fn format_of(bytes: &[u8]) -> Option<&'static str> {
    let header = bytes.first_chunk().map(|len| u64::from_le_bytes(*len));
    if header.is_some_and(|len| len <= MAX_HEADER) && bytes.get(8) == Some(&b'{') {
        return Some(SAFETENSORS);
    }
    let mut formats = FORMATS.iter();
    let format = formats.find(|(start, _)| bytes.starts_with(start));
    format.map(|(_, name)| *name)
}

impl NotText {
    /// The error of a file, with what can be done about it.
    pub(crate) fn of(&self, path: &Path, kind: TextKind) -> Error {
        let offset = self.offset;
        let found = match self.found {
            Found::Format(format) => format!("it is {format}"),
            Found::Zero => "it has a zero byte, which no text has".to_owned(),
            Found::NotUtf8 { byte, line } => {
                format!("byte {byte:#04x} in line {line} is no UTF-8")
            }
        };
        let instead = match (&self.found, kind) {
            (Found::Format(SAFETENSORS), TextKind::Bytes | TextKind::Utf8) => {
                "set \"data.format\" to \"tensors\" if it holds samples"
            }
            (Found::Format(PARQUET), _) => "set \"data.format\" to \"parquet\" if it holds records",
            (Found::Format(TOKENS), _) => "set \"data.format\" to \"tokens\"",
            (Found::Format(_) | Found::Zero, _) => "leave it out of \"data.path\"",
            (_, TextKind::Utf8) => {
                "convert it, or set \"data.tokenizer\" to \"bytes\", which keeps such bytes as they are"
            }
            (..) => "convert it to UTF-8",
        };
        Error::Data(DataError::NotText {
            path: path.to_path_buf(),
            offset,
            found,
            instead,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(bytes: &[u8], kind: TextKind) -> String {
        match text_of(bytes.to_vec(), kind, false) {
            Ok(text) => format!("text of {} bytes", text.len()),
            Err(error) => error.of(Path::new("a"), kind).to_string(),
        }
    }

    #[test]
    fn formats_are_named_where_bytes_are_no_text() {
        let png = found(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", TextKind::Bytes);
        insta::assert_snapshot!(png, @r#"cannot read a as text: it is a PNG image (offset 0): leave it out of "data.path", or set "data.skip_binary" to true to pass over such files"#);
        let safetensors = found(b"\x10\0\0\0\0\0\0\0{\"a\":{}}        ", TextKind::Utf8);
        insta::assert_snapshot!(safetensors, @r#"cannot read a as text: it is a safetensors file (offset 0): set "data.format" to "tensors" if it holds samples, or set "data.skip_binary" to true to pass over such files"#);
        let zero = found(b"some words\0", TextKind::Bytes);
        insta::assert_snapshot!(zero, @r#"cannot read a as text: it has a zero byte, which no text has (offset 10): leave it out of "data.path", or set "data.skip_binary" to true to pass over such files"#);
        for (start, name) in FORMATS {
            let file = [start, &b"\0\xff"[..]].concat();
            for kind in [TextKind::Bytes, TextKind::Utf8, TextKind::Records] {
                let message = found(&file, kind);
                let expected = format!("it is {name} (offset 0)");
                assert!(message.contains(&expected), "{message}");
            }
        }
        // Words are words, whatever they begin with.
        for text in ["GGUF is a format", "PAR1", "%PDF-", "BZh", "MZ", "RIFF"] {
            let whole = format!("text of {} bytes", text.len());
            assert_eq!(found(text.as_bytes(), TextKind::Utf8), whole);
        }
    }

    #[test]
    fn bytes_that_are_no_utf8_are_text_for_the_byte_vocabulary_alone() {
        let latin = b"line\ncaf\xe9\n";
        assert_eq!(found(latin, TextKind::Bytes), "text of 10 bytes");
        insta::assert_snapshot!(found(latin, TextKind::Utf8), @r#"cannot read a as text: byte 0xe9 in line 2 is no UTF-8 (offset 8): convert it, or set "data.tokenizer" to "bytes", which keeps such bytes as they are, or set "data.skip_binary" to true to pass over such files"#);
        insta::assert_snapshot!(found(latin, TextKind::Records), @r#"cannot read a as text: byte 0xe9 in line 2 is no UTF-8 (offset 8): convert it to UTF-8, or set "data.skip_binary" to true to pass over such files"#);
        // A character cut by the limit of bytes is not an error.
        let cut = "größe".as_bytes()[..3].to_vec();
        let text = |kind| text_of(cut.clone(), kind, true).unwrap();
        assert_eq!(text(TextKind::Utf8), b"gr");
        assert_eq!(text(TextKind::Bytes), cut);
        assert!(text_of(cut.clone(), TextKind::Utf8, false).is_err());
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_text() {
        for kind in [TextKind::Bytes, TextKind::Utf8, TextKind::Records] {
            let text = text_of(b"\xef\xbb\xbfhi \xef\xbb\xbf".to_vec(), kind, false);
            assert_eq!(text.unwrap(), b"hi \xef\xbb\xbf");
        }
    }
}
