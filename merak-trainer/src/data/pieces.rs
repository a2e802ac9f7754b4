//! Texts in pieces, so that long ones are tokenized without lying in memory whole.

use std::{
    fs::File,
    io::{self, Read, Take},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    plain::{Before, TextKind, piece_of},
    text::Candidate,
};
use crate::error::{Error, Result};

/// A document, or a part of one that others follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextPart {
    pub(super) text: Vec<u8>,
    /// Whether the document ends with it.
    pub(super) ends: bool,
}

/// Bytes in which a place to cut is looked for at first.
const PIECE: usize = 256 << 10;

/// Most bytes of a piece.
const MOST: usize = 16 * PIECE;

/// Length of the first piece of a text; none where that depends on what follows, unless the text
/// `ends`.
///
/// A cut comes before a line end that follows a letter or digit of ASCII: there the patterns of
/// byte-level BPE (GPT-2, Llama 3, Qwen) begin a new word, so the tokens are those of the whole
/// text. Where [`MOST`] bytes have no such place, the cut comes after a line end, else anywhere.
fn first_piece(text: &[u8], ends: bool) -> Option<usize> {
    for most in (PIECE..=MOST).step_by(PIECE) {
        if text.len() <= most {
            return ends.then_some(text.len());
        }
        let is_cut =
            |&at: &usize| text[at - 1].is_ascii_alphanumeric() && matches!(text[at], b'\r' | b'\n');
        if let Some(cut) = (most - PIECE + 1..=most).rev().find(is_cut) {
            return Some(cut);
        }
    }
    let line_end = text[..MOST].iter().rposition(|&byte| byte == b'\n');
    Some(line_end.map_or_else(|| char_end(text, MOST), |at| at + 1))
}

/// The end of the last whole character before a place, at most 3 bytes before it.
fn char_end(text: &[u8], at: usize) -> usize {
    let continues = |&at: &usize| text[at] & 0b1100_0000 == 0b1000_0000;
    let back = (at - 3..=at).rev().take_while(continues).count();
    if back > 3 { at } else { at - back }
}

/// The pieces of a text, none of an empty one.
pub(super) fn pieces(mut text: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let cut = first_piece(text, true).filter(|cut| *cut > 0)?;
        let (piece, rest) = text.split_at(cut);
        text = rest;
        Some(piece)
    })
}

/// A file that counts the bytes that are read of it.
#[derive(Debug)]
pub(super) struct Counted {
    file: Take<File>,
    count: Arc<AtomicU64>,
}

impl Counted {
    /// Opens the first `most` bytes of a file.
    pub(super) fn open(file: &Candidate, most: u64, count: &Arc<AtomicU64>) -> Result<Self> {
        let opened = merak_ckpt::open_regular(&file.path);
        let (opened, _) = opened.map_err(Error::reading(&file.path))?;
        Ok(Self {
            // The file may have grown since it was listed.
            file: opened.take(file.bytes.min(most)),
            count: Arc::clone(count),
        })
    }
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// The text of a file in pieces, the last of which ends the document. A file without text has none.
#[derive(Debug)]
pub(super) struct FileParts {
    path: PathBuf,
    file: Counted,
    kind: TextKind,
    /// Whether the file goes on after what is read of it.
    is_cut: bool,
    /// What was read and is in no piece yet.
    text: Vec<u8>,
    is_read: bool,
    before: Before,
    has_ended: bool,
}

impl FileParts {
    /// The first `most` bytes of a file.
    pub(super) fn open(
        file: &Candidate,
        kind: TextKind,
        most: u64,
        count: &Arc<AtomicU64>,
    ) -> Result<Self> {
        Ok(Self {
            path: file.path.clone(),
            file: Counted::open(file, most, count)?,
            kind,
            is_cut: file.bytes > most,
            text: Vec::new(),
            is_read: false,
            before: Before::default(),
            has_ended: false,
        })
    }

    fn piece(&mut self) -> Result<TextPart> {
        let length = loop {
            if let Some(length) = first_piece(&self.text, self.is_read) {
                break length;
            }
            let mut more = self.file.by_ref().take(PIECE as u64);
            let read = more.read_to_end(&mut self.text);
            self.is_read = read.map_err(Error::reading(&self.path))? == 0;
        };
        let bytes: Vec<_> = self.text.drain(..length).collect();
        let line_ends = bytes.iter().map(|&byte| usize::from(byte == b'\n'));
        let lines = line_ends.sum::<usize>();
        let ends = self.is_read && self.text.is_empty();
        let text = piece_of(bytes, self.kind, ends && self.is_cut, self.before);
        let text = text.map_err(|error| error.of(&self.path, self.kind))?;
        self.before.bytes += length;
        self.before.lines += lines;
        Ok(TextPart { text, ends })
    }
}

impl Iterator for FileParts {
    type Item = Result<TextPart>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        let is_first = self.before.bytes == 0;
        let piece = self.piece();
        self.has_ended = piece.as_ref().map_or(true, |piece| piece.ends);
        let is_empty = |piece: &TextPart| is_first && piece.ends && piece.text.is_empty();
        match piece {
            Ok(piece) if is_empty(&piece) => None,
            piece => Some(piece),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn file_pieces(text: &[u8], kind: TextKind, most: u64) -> Result<Vec<TextPart>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, text).unwrap();
        let bytes = text.len() as u64;
        let count = Arc::default();
        let file = Candidate { path, bytes };
        FileParts::open(&file, kind, most, &count)?.collect()
    }

    #[test]
    fn pieces_of_a_file_are_those_of_its_text() {
        let lines = "some words\nand others;\r\nmore\r\n".repeat(40_000);
        let dots = ".".repeat(3 * MOST + 1);
        let wide = format!("a{}", "\u{e9}".repeat(MOST));
        for text in ["", "one", &lines, &dots, &wide] {
            let whole: Vec<_> = pieces(text.as_bytes()).collect();
            assert_eq!(whole.concat(), text.as_bytes());
            let read = file_pieces(text.as_bytes(), TextKind::Utf8, u64::MAX).unwrap();
            let texts: Vec<_> = read.iter().map(|piece| &*piece.text).collect();
            assert_eq!(texts, whole);
            let ends: Vec<_> = read.iter().map(|piece| piece.ends).collect();
            let expected = (0..whole.len()).map(|number| number + 1 == whole.len());
            assert_eq!(ends, expected.collect::<Vec<_>>());
            assert!(whole.iter().all(|piece| piece.len() <= MOST));
        }
        assert!(pieces(lines.as_bytes()).count() > 3);
        let is_line_end = |piece: &&[u8]| matches!(piece[0], b'\r' | b'\n');
        assert!(
            pieces(lines.as_bytes())
                .skip(1)
                .all(|piece| is_line_end(&piece))
        );
    }

    #[test]
    fn a_limit_cuts_the_last_piece_at_a_character() {
        let read = |most| file_pieces("gr\u{f6}\u{df}e".as_bytes(), TextKind::Utf8, most).unwrap();
        assert_eq!(read(3)[0].text, b"gr");
        assert_eq!(read(4)[0].text, "gr\u{f6}".as_bytes());
        assert!(read(4)[0].ends);
    }

    #[test]
    fn what_is_no_text_after_the_first_piece_is_named_by_its_place_in_the_file() {
        let mut text = "line\n".repeat(100_000).into_bytes();
        text.extend(b"caf\xe9");
        let error = file_pieces(&text, TextKind::Utf8, u64::MAX).unwrap_err();
        let expected = "byte 0xe9 in line 100001 is no UTF-8 (offset 500003)";
        assert!(error.to_string().contains(expected), "{error}");
        // Nor is a byte order mark there one.
        let mut text = vec![b'\n'; 2 * PIECE];
        text[PIECE - 1] = b'a';
        let second = PIECE + 1;
        text.splice(second..second, *b"\xef\xbb\xbf");
        let read = file_pieces(&text, TextKind::Utf8, u64::MAX).unwrap();
        assert_eq!(
            read.iter().map(|piece| piece.text.len()).sum::<usize>(),
            text.len()
        );
    }
}
