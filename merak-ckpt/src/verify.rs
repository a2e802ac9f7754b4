//! Checking all of a checkpoint.

use crate::Checkpoint;
use crate::error::{Damage, Problem};
use crate::format;
use crate::header::check_content;
use std::collections::BTreeSet;

/// What a full check has looked at and found.
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
    /// What is wrong, in order of files, then tensors; empty for a good checkpoint.
    pub damage: Vec<Damage>,
}

impl Checkpoint {
    /// Checks every byte: the checksum of each file and each slice, and that the headers of the
    /// safetensors files say what the manifest says. (The manifest itself was checked on opening.)
    ///
    /// Damage is reported, not returned as an error: all of it, so that a user sees what can be
    /// saved; of a file that cannot be read at all, only that. Of a Hugging Face folder, which has no checksums, nothing is checked. Memory stays below a few MiB plus the largest header.
    pub fn verify(&self) -> VerifyReport {
        let manifest = self.manifest();
        let (mut damage, mut unreadable) = (Vec::new(), BTreeSet::new());
        for (index, file) in manifest.files.iter().enumerate() {
            if let Err(problem) = self.verify_file(index) {
                if matches!(problem, Problem::Unreadable { .. }) {
                    unreadable.insert(&file.name);
                }
                damage.push(Damage {
                    file: file.name.clone(),
                    tensor: None,
                    problem,
                });
            }
        }
        for (index, tensor) in manifest.tensors.iter().enumerate() {
            for (number, slice) in tensor.slices.iter().enumerate() {
                if unreadable.contains(&slice.file) {
                    continue;
                }
                if let Err(problem) = self.verify_slice(index, number) {
                    let tensor = Some(tensor.name.clone());
                    damage.push(Damage {
                        file: slice.file.clone(),
                        tensor,
                        problem,
                    });
                }
            }
        }
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

    fn verify_file(&self, index: usize) -> Result<(), Problem> {
        if !self.has_checksums() {
            return Ok(());
        }
        let entry = &self.manifest().files[index];
        check_content(self.path(), entry)?;
        if format::is_tensor_file(&entry.name) {
            self.check_header(index)?;
        }
        Ok(())
    }
}
