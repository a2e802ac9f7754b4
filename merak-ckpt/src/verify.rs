//! Checking all of a checkpoint.

use crate::error::{Damage, Problem};
use crate::file_check::{Place, check_content, check_length};
use crate::format;
use crate::manifest::SliceEntry;
use crate::{Checkpoint, Checksum};
use xxhash_rust::xxh3::Xxh3;

/// The files and tensors that a full check has read, and the damage that it has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// Files besides the manifest.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Slices.
    pub slices: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// The damage, in order of files, then tensors; empty for a good checkpoint.
    pub damage: Vec<Damage>,
}

impl Checkpoint {
    /// Checks every byte: the checksum of each file and each slice, and that the headers of the
    /// safetensors files say what the manifest says. (The manifest itself was checked on opening.)
    ///
    /// All damage is reported and none is returned as an error, so that a user sees what can be
    /// saved. Of a file that cannot be read, only that is reported. In a Hugging Face folder
    /// nothing is checked, since it has no checksums. Each file is read once; memory stays below a
    /// few MiB plus the largest header.
    pub fn verify(&self) -> VerifyReport {
        let manifest = self.manifest();
        let (mut damage, mut wrong_slices) = (Vec::new(), Vec::new());
        if self.has_checksums() {
            for index in 0..manifest.files.len() {
                if let Err(problem) = self.verify_file(index, &mut wrong_slices) {
                    damage.push(Damage::of_file(&manifest.files[index].name, problem));
                }
            }
        }
        wrong_slices.sort_unstable_by_key(|&(place, _)| place);
        damage.extend(wrong_slices.into_iter().map(|((tensor, slice), found)| {
            let tensor = &manifest.tensors[tensor];
            let SliceEntry { file, checksum, .. } = &tensor.slices[slice];
            let expected = *checksum;
            Damage {
                file: file.clone(),
                tensor: Some(tensor.name.clone()),
                problem: Problem::Checksum { expected, found },
            }
        }));
        VerifyReport {
            files: manifest.files.len(),
            tensors: manifest.tensors.len(),
            slices: manifest
                .tensors
                .iter()
                .map(|tensor| tensor.slices.len())
                .sum(),
            bytes: manifest.files.iter().map(|file| file.length).sum(),
            damage,
        }
    }

    /// Reads a file once for its own checksum and those of its slices; `wrong` gets the slices that
    /// have another one, unless the file cannot be read.
    fn verify_file(&self, index: usize, wrong: &mut Vec<(Place, Checksum)>) -> Result<(), Problem> {
        let manifest = self.manifest();
        let entry = &manifest.files[index];
        check_length(self.path(), entry).map_err(|damage| damage.problem)?;
        let slice_of = |&(tensor, slice): &Place| &manifest.tensors[tensor].slices[slice];
        let mut places = self.slices_in(index).to_vec();
        places.sort_unstable_by_key(|place| slice_of(place).bytes);
        let mut hashes = StretchHashes::new(places.iter().map(|place| slice_of(place).bytes));
        let content = check_content(self.path(), entry, &mut |block| hashes.update(block));
        if matches!(content, Err(Problem::Unreadable { .. })) {
            return content;
        }
        for (place, found) in places.into_iter().zip(hashes.finish()) {
            if found == slice_of(&place).checksum {
                self.mark_verified(place.0, place.1);
            } else {
                wrong.push((place, found));
            }
        }
        content?;
        if format::is_tensor_file(&entry.name) {
            self.check_header(index)?;
        }
        Ok(())
    }
}

/// The checksums of stretches of a file that is read from its beginning.
struct StretchHashes {
    /// Where they begin and end, in order, apart from each other.
    stretches: Vec<[u64; 2]>,
    /// The checksums of those that lie before `at`.
    done: Vec<Checksum>,
    /// The hasher of the next one, fed with its bytes before `at`.
    hasher: Xxh3,
    /// Bytes read.
    at: u64,
}

impl StretchHashes {
    fn new(stretches: impl Iterator<Item = [u64; 2]>) -> Self {
        Self {
            stretches: stretches.collect(),
            done: Vec::new(),
            hasher: Xxh3::new(),
            at: 0,
        }
    }

    fn update(&mut self, block: &[u8]) {
        let (begin, end) = (self.at, self.at + block.len() as u64);
        while let Some(&[first, last]) = self.stretches.get(self.done.len()) {
            let within = |at: u64| (at.clamp(begin, end) - begin) as usize;
            self.hasher.update(&block[within(first)..within(last)]);
            if last > end {
                break;
            }
            self.next();
        }
        self.at = end;
    }

    fn next(&mut self) {
        self.done.push(Checksum(self.hasher.digest()));
        self.hasher.reset();
    }

    /// One checksum per stretch, of those of its bytes that were there.
    fn finish(mut self) -> Vec<Checksum> {
        while self.done.len() < self.stretches.len() {
            self.next();
        }
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stretches_have_their_checksums_wherever_blocks_end(
            lengths in prop::collection::vec((0_usize..3, 0_usize..9), 0..8),
            block in 1_usize..12,
            missing in 0_usize..4,
        ) {
            let mut stretches = Vec::new();
            let mut at = 0;
            for (gap, length) in lengths {
                stretches.push([at + gap, at + gap + length]);
                at += gap + length;
            }
            // The file may end before the last stretch does.
            let bytes: Vec<_> = (0..at.saturating_sub(missing)).map(|i| i as u8).collect();
            let within = stretches.iter().map(|stretch| stretch.map(|at| at as u64));
            let mut hashes = StretchHashes::new(within);
            bytes.chunks(block).for_each(|block| hashes.update(block));
            let expected = stretches.iter().map(|stretch| {
                let [begin, end] = stretch.map(|at| at.min(bytes.len()));
                Checksum::of(&bytes[begin..end])
            });
            prop_assert_eq!(hashes.finish(), expected.collect::<Vec<_>>());
        }
    }
}
