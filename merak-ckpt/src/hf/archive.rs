//! Zip archives of members that are not compressed, as `torch.save` writes them, alone in a file or
//! as a stretch of one.
//!
//! ```text
//! per member: local header (30 bytes, name, extra), the bytes
//! directory:  per member 46 bytes (method, checksum, sizes, place), name, extra, comment
//! end:        beyond 4 GiB a record of 56 bytes and its place; then 22 bytes and a comment
//! ```
//!
//! What the directory says is checked against the file before it is used; its size is limited, and
//! so is the memory.

use crate::crc32::{self, Stretch};
use crate::words::beyond;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes of a directory's end record, and maximum bytes of the comment after it.
const END: usize = 22;
const MAX_COMMENT: u64 = 0xFFFF;
/// Bytes of the long end record's locator, and of that record.
const LOCATOR: u64 = 20;
const LONG_END: usize = 56;
/// Bytes of a member's entry in the directory, and of its local header.
const ENTRY: usize = 46;
const LOCAL: usize = 30;
/// Maximum bytes of memory that a member takes for each byte of its entry.
const MEMORY_PER_BYTE: u64 = 6;
/// Marks a number that an extra field has in 64 bits.
const LONG: u32 = u32::MAX;

/// An archive whose directory has been read.
#[derive(Debug)]
pub(super) struct Archive<'a> {
    file: &'a File,
    /// Where the archive lies in the file.
    stretch: Range<u64>,
    members: BTreeMap<String, Member>,
}

/// A member as the directory describes it.
#[derive(Debug, Clone, Copy)]
struct Member {
    /// Place of its local header in the archive.
    header: u64,
    size: u64,
    checksum: u32,
    is_plain: bool,
}

impl<'a> Archive<'a> {
    /// Reads the directory of the archive in this stretch of the file, which takes `limit` bytes of
    /// memory at most.
    pub(super) fn open(file: &'a File, stretch: Range<u64>, limit: usize) -> Result<Self, String> {
        let mut archive = Self {
            file,
            stretch,
            members: BTreeMap::new(),
        };
        let directory = archive.directory()?;
        let size = directory.end - directory.start;
        if size > limit as u64 / MEMORY_PER_BYTE {
            return Err(format!(
                "the directory of its zip archive has {size} bytes, too many for {limit} bytes of memory"
            ));
        }
        let mut bytes = vec![0; size as usize];
        archive.read(&mut bytes, directory.start)?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest = archive.add(rest)?;
        }
        Ok(archive)
    }

    /// The names of the members.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.members.keys().map(String::as_str)
    }

    /// Where the bytes of a member lie in the file.
    pub(super) fn place(&self, name: &str) -> Result<[u64; 2], String> {
        let member = self.member(name)?;
        if !member.is_plain {
            return Err(format!("member `{name}` is compressed or encrypted"));
        }
        let mut local = [0; LOCAL];
        self.read(&mut local, member.header)?;
        let lengths = u64::from(short(&local, 26)) + u64::from(short(&local, 28));
        let begin = member.header + LOCAL as u64 + lengths;
        let end = begin.checked_add(member.size);
        match end.filter(|&end| end <= self.len() && local.starts_with(b"PK\x03\x04")) {
            Some(end) => Ok([begin, end].map(|at| at + self.stretch.start)),
            None => Err(format!("member `{name}` has no place in the file")),
        }
    }

    /// The bytes of a member of at most `limit` bytes.
    pub(super) fn content(&self, name: &str, limit: u64) -> Result<Vec<u8>, String> {
        let [begin, end] = self.place(name)?;
        let size = end - begin;
        if size > limit {
            return Err(format!("member `{name}` has {}", beyond(size, limit)));
        }
        let mut bytes = vec![0; size as usize];
        self.read(&mut bytes, begin - self.stretch.start)?;
        let (expected, found) = (self.member(name)?.checksum, crc32fast::hash(&bytes));
        crc32::check(name, expected, found)?;
        Ok(bytes)
    }

    /// A member's place in the file, with its checksum.
    pub(super) fn stretch(&self, name: &str) -> Result<Stretch, String> {
        Ok(Stretch {
            bytes: self.place(name)?,
            checksum: self.member(name)?.checksum,
            name: name.to_owned(),
        })
    }

    fn member(&self, name: &str) -> Result<&Member, String> {
        let member = self.members.get(name);
        member.ok_or_else(|| format!("it has no member `{name}`"))
    }

    fn len(&self) -> u64 {
        self.stretch.end - self.stretch.start
    }

    fn read(&self, out: &mut [u8], at: u64) -> Result<(), String> {
        let fits = at
            .checked_add(out.len() as u64)
            .is_some_and(|end| end <= self.len());
        if !fits {
            return Err("its zip archive ends too early".to_owned());
        }
        let read = self.file.read_exact_at(out, self.stretch.start + at);
        read.map_err(|error: io::Error| format!("it cannot be read: {error}"))
    }

    /// Where the directory lies in the archive.
    fn directory(&self) -> Result<Range<u64>, String> {
        let length = self.len();
        let tail = length.min(END as u64 + MAX_COMMENT);
        let mut bytes = vec![0; tail as usize];
        self.read(&mut bytes, length - tail)?;
        let mut ends = bytes.windows(END).rev();
        let after = ends.position(|end| {
            end.starts_with(b"PK\x05\x06") && usize::from(short(end, 20)) <= bytes.len()
        });
        let after = after.ok_or("it is no zip archive, or not all of one")?;
        let start = bytes.len() - END - after;
        let end = &bytes[start..];
        let (mut size, mut offset) = (word(end, 12).into(), word(end, 16).into());
        let at = length - tail + start as u64;
        if let Some(long) = self.long_end(at)? {
            (size, offset) = (long_word(&long, 40), long_word(&long, 48));
        }
        let end = offset.checked_add(size);
        let end = end.filter(|&end| end <= at);
        Ok(offset..end.ok_or("the directory of its zip archive lies beyond it")?)
    }

    /// The end record in 64 bits, where its locator stands before the end record at `end`.
    fn long_end(&self, end: u64) -> Result<Option<[u8; LONG_END]>, String> {
        let Some(at) = end.checked_sub(LOCATOR) else {
            return Ok(None);
        };
        let mut locator = [0; LOCATOR as usize];
        self.read(&mut locator, at)?;
        if !locator.starts_with(b"PK\x06\x07") {
            return Ok(None);
        }
        let mut long = [0; LONG_END];
        self.read(&mut long, long_word(&locator, 8))?;
        if !long.starts_with(b"PK\x06\x06") {
            return Err("the end of its zip archive is damaged".to_owned());
        }
        Ok(Some(long))
    }

    /// Adds the first member of what is left of the directory; returns what follows it.
    fn add<'b>(&mut self, rest: &'b [u8]) -> Result<&'b [u8], String> {
        let damaged = || "the directory of its zip archive is damaged".to_owned();
        let is_entry = rest.len() >= ENTRY && rest.starts_with(b"PK\x01\x02");
        let (entry, rest) = rest
            .split_at_checked(ENTRY)
            .filter(|_| is_entry)
            .ok_or_else(damaged)?;
        let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(short(entry, at)));
        let (name, rest) = rest.split_at_checked(name).ok_or_else(damaged)?;
        let (extra, rest) = rest.split_at_checked(extra).ok_or_else(damaged)?;
        let (_, rest) = rest.split_at_checked(comment).ok_or_else(damaged)?;
        let mut long = long_numbers(extra);
        let mut number = |at| match word(entry, at) {
            LONG => {
                let (first, others) = long.split_first_chunk::<8>()?;
                long = others;
                Some(u64::from_le_bytes(*first))
            }
            short => Some(short.into()),
        };
        // The extra field has them in this order, those that are there.
        let (size, packed, header) = (number(24), number(20), number(42));
        let (size, packed) = size.zip(packed).ok_or_else(damaged)?;
        let member = Member {
            header: header.ok_or_else(damaged)?,
            size,
            checksum: word(entry, 16),
            is_plain: short(entry, 10) == 0 && short(entry, 8) & 1 == 0 && size == packed,
        };
        let name = std::str::from_utf8(name).map_err(|_| damaged())?;
        self.members.insert(name.to_owned(), member);
        Ok(rest)
    }
}

/// The numbers of 64 bits in the extra fields of a member.
fn long_numbers(mut extra: &[u8]) -> &[u8] {
    while extra.len() >= 4 {
        let (head, rest) = extra.split_at(4);
        let length = usize::from(short(head, 2)).min(rest.len());
        if short(head, 0) == 1 {
            return &rest[..length];
        }
        extra = &rest[length..];
    }
    &[]
}

fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(short(bytes, at)) | u32::from(short(bytes, at + 2)) << 16
}

fn long_word(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}
