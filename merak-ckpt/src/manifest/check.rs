//! What makes a manifest sound.

use super::{
    FileEntry, Manifest, SliceEntry, TensorEntry, Topology, check_file_name, check_tensor_name,
};
use crate::error::{Damage, Problem};
use crate::format;
use crate::region::{Region, num_elements};
use std::fmt;
use std::ops::Range;

impl Manifest {
    /// Checks the manifest against itself: order, names, limits, bounds, coverage, overlaps.
    pub(crate) fn check(&self) -> Result<(), Damage> {
        self.check_header()?;
        self.check_files()?;
        limit("tensors", self.tensors.len(), format::MAX_TENSORS)?;
        self.check_order()?;
        for tensor in &self.tensors {
            self.check_tensor(tensor)
                .map_err(|problem| damage(tensor, problem))?;
        }
        self.check_bytes_are_apart()
    }

    /// Checks that each tensor is there once, in its place.
    pub(crate) fn check_order(&self) -> Result<(), Damage> {
        let out_of_order = |pair: &&[TensorEntry]| {
            (&pair[0].kind, &pair[0].name) >= (&pair[1].kind, &pair[1].name)
        };
        let found = self.tensors.windows(2).find(out_of_order);
        found.map_or(Ok(()), |pair| {
            let problem = malformed("tensors are not in order, or not unique");
            Err(damage(&pair[1], problem))
        })
    }

    fn check_header(&self) -> Result<(), Damage> {
        for (member, value) in [
            ("bytes of `model`", &self.header.model),
            ("bytes of `state`", &self.header.state),
        ] {
            limit(member, value.to_string().len(), format::MAX_STATE_BYTES)?;
        }
        if let Some(base) = &self.base
            && format::parse_base_name(&base.folder).is_none()
        {
            let name: String = base.folder.chars().take(80).collect();
            let reason = format!("the base is `{name}`, expected a folder like base-00001");
            return Err(in_manifest(malformed(reason)));
        }
        let Topology {
            dp,
            tp,
            pp,
            sp,
            zero_stage,
        } = self.header.topology;
        if [dp, tp, pp, sp].contains(&0) || zero_stage > 3 {
            let reason = format!(
                "the topology is dp={dp} tp={tp} pp={pp} sp={sp} zero_stage={zero_stage}, expected degrees from 1 on and \
                 a stage of 0 to 3"
            );
            return Err(in_manifest(malformed(reason)));
        }
        Ok(())
    }

    fn check_files(&self) -> Result<(), Damage> {
        limit("files", self.files.len(), format::MAX_FILES)?;
        for file in &self.files {
            check_file_name(&file.name)
                .map_err(|error| in_manifest(malformed(error.to_string())))?;
        }
        self.check_total()?;
        match self
            .files
            .windows(2)
            .find(|pair| pair[0].name >= pair[1].name)
        {
            Some(pair) => {
                let problem = malformed("files are not in order, or not unique");
                Err(Damage::of_file(&pair[1].name, problem))
            }
            None => Ok(()),
        }
    }

    /// Checks that the bytes of all files can be counted.
    pub(crate) fn check_total(&self) -> Result<(), Damage> {
        let total = self.files.iter().try_fold(0_u64, |sum, file| {
            sum.checked_add(file.length).ok_or_else(|| {
                let FileEntry { name, length, .. } = file;
                let reason = format!(
                    "with the {length} bytes of `{name}`, the files have more than 2^64 - 1"
                );
                in_manifest(malformed(reason))
            })
        });
        total.map(|_| ())
    }

    fn check_tensor(&self, tensor: &TensorEntry) -> Result<(), Problem> {
        check_tensor_name(&tensor.name).map_err(|error| malformed(error.to_string()))?;
        check_ndim(tensor.shape.len())?;
        let too_large = || malformed(format!("shape {:?} is too large", tensor.shape));
        num_elements(&tensor.shape)
            .filter(|&n| n <= isize::MAX as usize / 16)
            .ok_or_else(too_large)?;
        for slice in &tensor.slices {
            self.check_slice(tensor, slice)?;
        }
        if let Some(cut) = &tensor.cut {
            cut.check(&tensor.shape).map_err(malformed)?;
        }
        check_coverage(tensor)
    }

    fn check_slice(&self, tensor: &TensorEntry, slice: &SliceEntry) -> Result<(), Problem> {
        check_ndim(slice.offset.len().max(slice.size.len()))?;
        let region = slice.region();
        let shape = &tensor.shape;
        let volume = region
            .is_within(shape)
            .then(|| region.num_elements())
            .flatten()
            .ok_or_else(|| {
                malformed(format!("box {region} is out of bounds of shape {shape:?}"))
            })?;
        let range = match slice.range {
            None => 0..volume,
            Some([begin, end]) => begin..end,
        };
        if range.start >= range.end
            || range.end > volume
            || slice.range.is_some_and(|r| r == [0, volume])
        {
            return Err(malformed(format!(
                "range {range:?} is no proper part of box {region}"
            )));
        }
        let length = self
            .file_index(&slice.file)
            .filter(|_| format::is_tensor_file(&slice.file))
            .map(|index| self.files[index].length)
            .ok_or_else(|| {
                malformed(format!(
                    "`{}` is no tensor file of the checkpoint",
                    slice.file
                ))
            })?;
        let [begin, end] = slice.bytes;
        let size = (range.len() * tensor.dtype.size_bytes()) as u64;
        if begin > end || end > length || end - begin != size {
            let reason = format!(
                "bytes {begin}..{end} do not hold {size} bytes of {} ({length} bytes)",
                slice.file
            );
            return Err(malformed(reason));
        }
        Ok(())
    }

    /// Checks that no byte of a file belongs to two slices.
    fn check_bytes_are_apart(&self) -> Result<(), Damage> {
        let mut stretches = Vec::new();
        for tensor in &self.tensors {
            stretches.extend(
                tensor
                    .slices
                    .iter()
                    .map(|slice| (&slice.file, slice.bytes, tensor)),
            );
        }
        limit("slices", stretches.len(), format::MAX_SLICES)?;
        stretches.sort_unstable_by_key(|&(file, bytes, _)| (file, bytes));
        let overlap = stretches
            .windows(2)
            .find(|pair| pair[0].0 == pair[1].0 && pair[0].1[1] > pair[1].1[0]);
        match overlap {
            Some(&[(file, a, _), (_, b, tensor)]) => Err(Damage {
                file: file.clone(),
                tensor: Some(tensor.name.clone()),
                problem: Problem::Overlap {
                    first: format!("{}..{}", a[0], a[1]),
                    second: format!("{}..{}", b[0], b[1]),
                },
            }),
            _ => Ok(()),
        }
    }
}

/// Checks that the boxes of a tensor's slices are within it, do not overlap and hold all of it.
pub(crate) fn check_coverage(tensor: &TensorEntry) -> Result<(), Problem> {
    let shape = &tensor.shape;
    if let Some(slice) = tensor
        .slices
        .iter()
        .find(|slice| !slice.region().is_within(shape))
    {
        let region = slice.region();
        return Err(malformed(format!(
            "box {region} is out of bounds of shape {shape:?}"
        )));
    }
    let expected = tensor.num_elements();
    let found = boxes(tensor)?
        .iter()
        .try_fold(0_usize, |n, region| n.checked_add(region.num_elements()?));
    match found {
        Some(found) if found == expected => Ok(()),
        _ => Err(Problem::Incomplete {
            expected,
            found: found.unwrap_or(usize::MAX),
        }),
    }
}

/// Checks the number of dims; it comes first, since messages list the dims.
fn check_ndim(found: usize) -> Result<(), Problem> {
    if found <= format::MAX_NDIM {
        return Ok(());
    }
    Err(Problem::TooLarge {
        what: "dims",
        found: found as u64,
        limit: format::MAX_NDIM as u64,
    })
}

/// The distinct boxes of a tensor, after checking that slices are in order, that the ranges of
/// each box follow one another to its end, and that no two boxes overlap.
fn boxes(tensor: &TensorEntry) -> Result<Vec<Region>, Problem> {
    let mut boxes: Vec<Region> = Vec::new();
    let mut rest = tensor.slices.as_slice();
    while let Some(first) = rest.first() {
        let region = first.region();
        let count = rest
            .iter()
            .take_while(|slice| slice.region() == region)
            .count();
        check_ranges(&region, rest[..count].iter().map(SliceEntry::flat_range))?;
        rest = &rest[count..];
        if boxes.last().is_some_and(|last| *last >= region) {
            return Err(malformed("slices are not in order"));
        }
        boxes.push(region);
    }
    if boxes.len() > format::MAX_BOXES_PER_TENSOR {
        return Err(Problem::TooLarge {
            what: "boxes",
            found: boxes.len() as u64,
            limit: format::MAX_BOXES_PER_TENSOR as u64,
        });
    }
    for (j, second) in boxes.iter().enumerate() {
        if let Some(first) = boxes[..j]
            .iter()
            .find(|first| first.intersection(second).is_some())
        {
            return Err(overlap(first, second));
        }
    }
    Ok(boxes)
}

fn check_ranges(
    region: &Region,
    ranges: impl Iterator<Item = Range<usize>>,
) -> Result<(), Problem> {
    let expected = region.num_elements().unwrap_or(usize::MAX);
    let mut end = 0;
    for range in ranges {
        if range.start < end {
            let first = format!("{region} up to {end}");
            let second = format!("{region} from {}", range.start);
            return Err(overlap(&first, &second));
        }
        if range.start > end {
            return Err(malformed(format!(
                "elements {end}..{} of box {region} are in no slice",
                range.start
            )));
        }
        end = range.end;
    }
    if end < expected {
        return Err(malformed(format!(
            "elements {end}..{expected} of box {region} are in no slice"
        )));
    }
    Ok(())
}

fn overlap(first: &dyn fmt::Display, second: &dyn fmt::Display) -> Problem {
    Problem::Overlap {
        first: first.to_string(),
        second: second.to_string(),
    }
}

fn malformed(reason: impl Into<String>) -> Problem {
    Problem::Malformed {
        reason: reason.into(),
    }
}

fn in_manifest(problem: Problem) -> Damage {
    Damage::of_file(format::MANIFEST, problem)
}

fn damage(tensor: &TensorEntry, problem: Problem) -> Damage {
    Damage {
        tensor: Some(tensor.name.clone()),
        ..in_manifest(problem)
    }
}

pub(super) fn limit(what: &'static str, found: usize, limit: usize) -> Result<(), Damage> {
    if found <= limit {
        return Ok(());
    }
    Err(in_manifest(Problem::TooLarge {
        what,
        found: found as u64,
        limit: limit as u64,
    }))
}
