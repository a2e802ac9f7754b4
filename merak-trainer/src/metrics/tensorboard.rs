//! Event files, as TensorBoard reads them.
//!
//! A file is a list of records in the framing of `TFRecord`, each a message `Event` of
//! `tensorflow/core/util/event.proto`. The few fields that scalars need are written here by hand.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use merak_ckpt::{lies_at, open_to_write};

use crate::error::{Error, Result};

/// What event files are called, before the time of their first event and the program.
const PREFIX: &str = "events.out.tfevents.";

/// Scalars appended to an event file, each step handed to the operating system before the next one
/// starts.
///
/// # Examples
///
/// ```
/// use merak_trainer::metrics::EventFile;
///
/// let folder = tempfile::tempdir()?;
/// let mut file = EventFile::open(folder.path(), 1)?;
/// file.append(1, &[("Train/loss".to_owned(), 5.5)])?;
/// assert!(file.path().metadata()?.len() > 50);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Makes a new event file in a folder, which is made if need be, for the steps from
    /// `first_step` on. It says at its start that the program was restarted there, by which
    /// TensorBoard forgets the same steps of earlier files in the folder.
    ///
    /// # Errors
    ///
    /// When the folder or the file cannot be written.
    pub fn open(folder: &Path, first_step: u64) -> Result<Self> {
        let made = make(folder).and_then(|(path, mut file)| {
            // file_version, then session_log { status: START }.
            let version = Message::default().bytes(3, b"brain.Event:2");
            file.write_all(&record(&event(0, version)))?;
            let restart = Message::default().number(1, 1);
            let restart = Message::default().bytes(7, &restart.0);
            file.write_all(&record(&event(first_step, restart)))?;
            Ok(Self { path, file })
        });
        made.map_err(Error::writing(folder))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the scalars of a step, by their tags. Begins a new file where this one was removed.
    ///
    /// # Errors
    ///
    /// When the record cannot be written.
    pub fn append(&mut self, step: u64, scalars: &[(String, f64)]) -> Result<()> {
        if !lies_at(&self.file, &self.path) {
            let folder = self.path.parent().unwrap_or(Path::new("."));
            *self = Self::open(folder, step)?;
        }
        let summary = scalars.iter().fold(Message::default(), |summary, scalar| {
            let (tag, value) = scalar;
            let value = Message::default()
                .bytes(1, tag.as_bytes())
                .float(2, *value as f32);
            summary.bytes(1, &value.0)
        });
        let event = event(step, Message::default().bytes(5, &summary.0));
        // One unbuffered write for each record: a run that is killed leaves whole ones.
        self.file
            .write_all(&record(&event))
            .map_err(Error::writing(&self.path))
    }
}

/// A new file in the folder. Files are read in the order of their names: a later one has a later
/// time.
fn make(folder: &Path) -> io::Result<(PathBuf, File)> {
    fs::create_dir_all(folder)?;
    let mut newest = 0;
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let time = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let time = time.and_then(|name| name.split('.').next()?.parse::<u64>().ok());
        newest = newest.max(time.unwrap_or(0));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let time = now
        .map_or(0, |now| now.as_secs())
        .max(newest.saturating_add(1));
    let path = folder.join(format!("{PREFIX}{time:010}.merak"));
    let file = open_to_write(&path, OpenOptions::new().create_new(true).append(true))?;
    Ok((path, file))
}

/// An event of a step: its time, the step, and `what` it tells.
fn event(step: u64, what: Message) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.map_or(0.0, |now| now.as_secs_f64());
    let mut event = Message::default().double(1, seconds).number(2, step);
    event.0.extend(what.0);
    event.0
}

/// The bytes of a protocol buffer's message, as far as events need it.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// A field of wire type 0.
    fn number(mut self, field: u8, value: u64) -> Self {
        self.0.push(field << 3);
        self.varint(value);
        self
    }

    /// A field of wire type 1.
    fn double(mut self, field: u8, value: f64) -> Self {
        self.0.push(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// A field of wire type 2: a string or a message.
    fn bytes(mut self, field: u8, bytes: &[u8]) -> Self {
        self.0.push(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    /// A field of wire type 5.
    fn float(mut self, field: u8, value: f32) -> Self {
        self.0.push(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// A record: its length with a checksum, its bytes with a checksum.
fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked_checksum(&length).to_le_bytes());
    record.extend(bytes);
    record.extend(masked_checksum(bytes).to_le_bytes());
    record
}

/// The CRC-32C of some bytes as `TFRecord` stores it: turned and shifted, since a checksum of data
/// that holds its own checksum says little.
fn masked_checksum(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| (sum >> 8) ^ TABLE[((sum ^ u32::from(*byte)) & 0xff) as usize];
    let sum = !bytes.iter().fold(u32::MAX, step);
    sum.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The CRC-32C of each byte, by Castagnoli's polynomial with its bits turned round.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            sum = (sum >> 1) ^ (0x82f6_3b78 * (sum & 1));
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4, without the mask.
        let plain = |bytes: &[u8]| {
            masked_checksum(bytes)
                .wrapping_sub(0xa282_ead8)
                .rotate_left(15)
        };
        assert_eq!(plain(&[0; 32]), 0x8a91_36aa);
        assert_eq!(plain(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_later_file_has_a_later_name_and_a_removed_one_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let first = EventFile::open(folder.path(), 1).unwrap();
        let mut second = EventFile::open(folder.path(), 4).unwrap();
        assert!(first.path() < second.path());
        fs::remove_file(second.path()).unwrap();
        second.append(5, &[("Train/loss".to_owned(), 1.0)]).unwrap();
        assert!(second.path().is_file());
    }
}
