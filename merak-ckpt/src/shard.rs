//! Writing one rank's tensors.

use crate::checksum::HashingWriter;
use crate::error::io_error;
use crate::format;
use crate::layout::PartRange;
use crate::manifest::{FileEntry, SliceEntry, TensorEntry, check_tensor_name};
use crate::output::OutputFile;
use crate::{Checksum, Error, Piece, Result};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Bytes that are written at once.
const BLOCK_BYTES: usize = 1 << 18;

/// Which of a checkpoint's files a shard is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardKind {
    /// `model-00000.safetensors`: parameters.
    Model,
    /// `optim-00000.safetensors`: optimizer state.
    Optimizer,
}

/// The files and slices that a rank has written: they travel to the rank that commits.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    pub(crate) files: Vec<FileEntry>,
    pub(crate) tensors: Vec<TensorEntry>,
}

/// A slice on its way into a file.
pub(crate) struct Outgoing<'a> {
    /// Position of the piece.
    pub(crate) index: usize,
    pub(crate) piece: &'a Piece<'a>,
    pub(crate) part: PartRange<'a>,
    slice: SliceEntry,
}

/// Where the bytes of slices come from.
pub(crate) trait Supply {
    /// Passes all bytes of all slices to `sink`, in order, in as many calls as it likes.
    fn supply(&self, slices: &[Outgoing<'_>], sink: &mut Sink<'_>) -> Result<()>;

    /// Whether the checksums are needed.
    fn has_checksums(&self) -> bool {
        true
    }
}

/// A callback that takes bytes, with the position of the slice that they belong to.
pub(crate) type Sink<'a> = dyn FnMut(usize, &[u8]) -> Result<()> + 'a;

/// Supplies slices from buffers that hold the pieces, in the order of the pieces.
struct Buffers<'a>(Vec<&'a [u8]>);

impl ShardKind {
    /// The file name of the shard with this index.
    pub fn file_name(self, index: usize) -> String {
        match self {
            Self::Model => format!("model-{index:05}.safetensors"),
            Self::Optimizer => format!("optim-{index:05}.safetensors"),
        }
    }
}

impl Shard {
    /// Adds the files and tensors that another call has written.
    pub fn append(&mut self, mut other: Self) {
        self.files.append(&mut other.files);
        self.tensors.append(&mut other.tensors);
    }
}

/// Writes pieces that lie in memory into `folder/file` and brings them to the disk.
pub(crate) fn write(folder: &Path, file: &str, pieces: &[(Piece<'_>, &[u8])]) -> Result<Shard> {
    for (piece, bytes) in pieces {
        piece.check_buffer(bytes.len())?;
    }
    let buffers = Buffers(pieces.iter().map(|(_, bytes)| *bytes).collect());
    let pieces: Vec<_> = pieces.iter().map(|(piece, _)| piece).collect();
    write_from(folder, file, &pieces, &buffers)
}

/// Writes pieces into `folder/file`, as their bytes are supplied, and brings them to the disk.
pub(crate) fn write_from(
    folder: &Path,
    file: &str,
    pieces: &[&Piece<'_>],
    supply: &dyn Supply,
) -> Result<Shard> {
    pieces.iter().try_for_each(|piece| check(piece))?;
    if pieces.is_empty() {
        return Ok(Shard::default());
    }
    let mut outgoing = slices(file, pieces);
    let header = place(&mut outgoing)?;
    let path = folder.join(file);
    let (length, checksum) = write_file(&path, &header, &mut outgoing, supply)?;
    let mut tensors: Vec<TensorEntry> = pieces.iter().map(|piece| entry(piece)).collect();
    for Outgoing { index, slice, .. } in outgoing {
        tensors[index].slices.push(slice);
    }
    let files = vec![FileEntry {
        name: file.to_owned(),
        length,
        checksum,
    }];
    Ok(Shard { files, tensors })
}

fn check(piece: &Piece<'_>) -> Result<()> {
    if !piece.kind.is_valid() {
        return Err(Error::InvalidName {
            what: "kind of optimizer state",
            name: piece.kind.to_string(),
            rule: "expected 1 to 64 of the characters a-z, 0-9, `_` and `.`, other than `parameter`",
        });
    }
    check_tensor_name(piece.name)
}

fn entry(piece: &Piece<'_>) -> TensorEntry {
    TensorEntry {
        kind: piece.kind.clone(),
        name: piece.name.to_owned(),
        dtype: piece.dtype,
        shape: piece.layout.shape().to_vec(),
        cut: piece.layout.cut().cloned(),
        slices: Vec::new(),
    }
}

/// Cuts pieces into slices, in file order: widest elements first, so that all are aligned.
pub(crate) fn slices<'a>(file: &str, pieces: &[&'a Piece<'a>]) -> Vec<Outgoing<'a>> {
    let mut outgoing = Vec::new();
    for (index, &piece) in pieces.iter().enumerate() {
        for part in piece.layout.part_ranges(&piece.flat_range()) {
            let region = &part.part.region;
            let volume = region.num_elements().unwrap_or(usize::MAX);
            let is_all = part.range == (0..volume);
            let slice = SliceEntry {
                offset: region.offset.clone(),
                size: region.size.clone(),
                range: (!is_all).then_some([part.range.start, part.range.end]),
                file: file.to_owned(),
                bytes: [0, 0],
                checksum: Checksum(0),
                strides: None,
            };
            outgoing.push(Outgoing {
                index,
                piece,
                part,
                slice,
            });
        }
    }
    outgoing.sort_by_cached_key(|Outgoing { piece, slice, .. }| {
        let order = (slice.offset.clone(), slice.size.clone(), slice.range);
        (
            std::cmp::Reverse(piece.dtype.size_bytes()),
            piece.kind,
            piece.name,
            order,
        )
    });
    outgoing
}

/// Gives each slice its bytes of the file; returns the file's header.
fn place(outgoing: &mut [Outgoing<'_>]) -> Result<Vec<u8>> {
    let mut infos = Vec::with_capacity(outgoing.len());
    let mut keys = BTreeSet::new();
    let mut end = 0;
    for Outgoing {
        piece, part, slice, ..
    } in outgoing.iter_mut()
    {
        let begin = end;
        end += part.range.len() * piece.dtype.size_bytes();
        slice.bytes = [begin as u64, end as u64];
        let key = slice.key(piece.kind, piece.name, piece.layout.shape());
        if !keys.insert(key.clone()) {
            return Err(Error::InvalidName {
                what: "shard, since it holds twice the slice",
                name: key,
                rule: "each slice has one owner",
            });
        }
        let dtype = piece.dtype.to_safetensors();
        let shape = slice.stored_shape();
        infos.push((
            key,
            TensorInfo {
                dtype,
                shape,
                data_offsets: (begin, end),
            },
        ));
    }
    let metadata = Metadata::new(
        Some([format::METADATA.map(str::to_owned).into()].into()),
        infos,
    )
    .expect("offsets follow one another and agree with shapes");
    let mut header = serde_json::to_vec(&metadata).expect("a header has text keys");
    let data_start = (8 + header.len()).next_multiple_of(format::ALIGNMENT);
    header.resize(data_start - 8, b' ');
    for Outgoing { slice, .. } in outgoing {
        slice.bytes = slice.bytes.map(|offset| offset + data_start as u64);
    }
    Ok(header)
}

fn write_file(
    path: &Path,
    header: &[u8],
    outgoing: &mut [Outgoing<'_>],
    supply: &dyn Supply,
) -> Result<(u64, Checksum)> {
    let file = OutputFile::create_new(path).map_err(io_error("create", path))?;
    let file = BufWriter::with_capacity(BLOCK_BYTES, file);
    let has_checksums = supply.has_checksums();
    let mut writer = if has_checksums {
        HashingWriter::new(file)
    } else {
        HashingWriter::without_hash(file)
    };
    let mut write = |bytes: &[u8]| writer.write_all(bytes).map_err(io_error("write", path));
    write(&(header.len() as u64).to_le_bytes())?;
    write(header)?;
    let mut checksums = SliceChecksums::new(outgoing.len());
    supply.supply(outgoing, &mut |slice, bytes| {
        // Each block is hashed twice and written while it is in the processor's cache.
        for block in bytes.chunks(BLOCK_BYTES) {
            if has_checksums {
                checksums.update(slice, block);
            }
            write(block)?;
        }
        Ok(())
    })?;
    for (item, checksum) in outgoing.iter_mut().zip(checksums.finish()) {
        item.slice.checksum = checksum;
    }
    let (writer, length, checksum) = writer.finish();
    let file = writer
        .into_inner()
        .map_err(|error| io_error("write", path)(error.into_error()))?;
    file.sync().map_err(io_error("sync", path))?;
    Ok((length, checksum))
}

/// The checksums of slices whose bytes come one slice after the other.
struct SliceChecksums {
    done: Vec<Checksum>,
    /// Position of the current slice.
    slice: usize,
    hasher: Xxh3,
}

impl SliceChecksums {
    fn new(slices: usize) -> Self {
        Self {
            done: vec![Checksum::of(&[]); slices],
            slice: 0,
            hasher: Xxh3::new(),
        }
    }

    fn update(&mut self, slice: usize, bytes: &[u8]) {
        if slice != self.slice {
            self.close();
            self.slice = slice;
        }
        self.hasher.update(bytes);
    }

    fn close(&mut self) {
        if let Some(checksum) = self.done.get_mut(self.slice) {
            *checksum = Checksum(self.hasher.digest());
        }
        self.hasher.reset();
    }

    fn finish(mut self) -> Vec<Checksum> {
        self.close();
        self.done
    }
}

impl Supply for Buffers<'_> {
    fn supply(&self, slices: &[Outgoing<'_>], sink: &mut Sink<'_>) -> Result<()> {
        let mut each = slices.iter().enumerate();
        each.try_for_each(|(index, slice)| sink(index, &slice.gathered(self.0[slice.index])))
    }
}

impl Outgoing<'_> {
    /// The bytes of the slice in those of its piece, copied only where they lie apart.
    pub(crate) fn gathered<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        let Self { piece, part, .. } = self;
        let width = piece.dtype.size_bytes();
        let total = part.range.len() * width;
        let mut gathered = Vec::new();
        let mut single = None;
        part.for_each_run(
            piece.layout.local_shape(),
            &piece.flat_range(),
            |local, _, len| {
                let run = &bytes[local * width..(local + len) * width];
                if run.len() == total {
                    single = Some(run);
                } else {
                    gathered.extend_from_slice(run);
                }
            },
        );
        single.map_or(Cow::Owned(gathered), Cow::Borrowed)
    }
}
