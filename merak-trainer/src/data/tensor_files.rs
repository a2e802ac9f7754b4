//! Safetensors files whose tensors have one row for each sample.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use half::{bf16, f16};
use merak_ckpt::{DType, StoredTensor, stored_tensors};

use super::{
    input::Input,
    sample_tensor::SampleTensor,
    text::{self, Candidate},
};
use crate::error::{DataError, Error, Result};

/// Named tensors `[N, ..]` in one or several files, each with a part of the N samples.
#[derive(Debug)]
pub struct TensorFiles {
    parts: Vec<Part>,
    samples: usize,
    /// How often a sample was read that has numbers which are not finite.
    not_finite: AtomicUsize,
}

/// Samples with numbers that are not finite of which each is told; then each power of ten is.
const TOLD: usize = 3;

#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
    samples: usize,
    tensors: BTreeMap<String, StoredTensor>,
}

/// Whether a folder's file holds tensors, by its name.
pub(super) fn is_one(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "safetensors")
}

impl TensorFiles {
    /// Opens a safetensors file, or those of a folder in the order of their names. Headers are
    /// read, elements are not.
    ///
    /// # Errors
    ///
    /// A file that is not in this format, or whose tensors do not agree in the number of samples,
    /// in names, types or sizes.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_all(Input::data(&path.to_path_buf().into()))
    }

    /// [`TensorFiles::open`] for several paths, which follow each other.
    pub(super) fn open_all(input: Input<'_>) -> Result<Self> {
        let mut parts = Vec::new();
        for path in input.iter() {
            let files = if path.is_dir() {
                text::list(path, &is_one)?
            } else {
                vec![Candidate {
                    path: path.to_path_buf(),
                    bytes: 0,
                }]
            };
            if files.is_empty() {
                return Err(unusable(path, "the folder has no .safetensors file"));
            }
            for file in files {
                parts.push(Part::open(input.key, &file.path)?);
            }
        }
        let first = &parts[0];
        for other in &parts[1..] {
            first.check_like(other)?;
        }
        let samples = parts.iter().map(|part| part.samples).sum();
        Ok(Self {
            parts,
            samples,
            not_finite: AtomicUsize::new(0),
        })
    }

    /// Samples of all files.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// How many files there are.
    pub(crate) fn num_files(&self) -> usize {
        self.parts.len()
    }

    /// The names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parts[0].tensors.keys().map(String::as_str)
    }

    /// The sizes of a tensor without the dimension of the samples.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.parts[0].tensors.get(name)?.shape[1..])
    }

    /// Whether a mask of integers has a zero before a one in some sample.
    pub(super) fn hides_first(&self, mask: &str) -> Result<bool> {
        let is_mask = self.dtype(mask).is_some_and(|dtype| !dtype.is_float());
        if !is_mask {
            return Ok(false);
        }
        for sample in 0..self.samples {
            let values = self.read(mask, sample, false)?;
            let rises = |pair: &[i64]| pair[0] == 0 && pair[1] != 0;
            if values.ints().windows(2).any(rises) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The type of a tensor's elements.
    pub(super) fn dtype(&self, name: &str) -> Option<DType> {
        Some(self.parts[0].tensors.get(name)?.dtype)
    }

    /// A tensor of one sample, as the model reads it.
    pub(super) fn read(&self, name: &str, index: usize, as_floats: bool) -> Result<SampleTensor> {
        let (mut part, mut row) = (0, index);
        while row >= self.parts[part].samples {
            row -= self.parts[part].samples;
            part += 1;
        }
        let part = &self.parts[part];
        let tensor = &part.tensors[name];
        let numel: usize = tensor.shape[1..].iter().product();
        let mut bytes = vec![0; numel * tensor.dtype.size_bytes()];
        let from = tensor.bytes[0] + (row * bytes.len()) as u64;
        part.file
            .read_exact_at(&mut bytes, from)
            .map_err(Error::reading(&part.path))?;
        let shape = tensor.shape[1..].to_vec();
        let tensor = if as_floats {
            let values = floats(tensor.dtype, &bytes);
            if values.iter().any(|x| !x.is_finite()) {
                self.warn_of(&part.path, row, name);
            }
            SampleTensor::floats(shape, values)
        } else {
            SampleTensor::new(shape, ints(tensor.dtype, &bytes))
        };
        Ok(tensor.expect("as many elements as the shape has"))
    }

    /// Warns of a sample with numbers that are not finite.
    fn warn_of(&self, path: &Path, row: usize, tensor: &str) {
        let so_far = self.not_finite.fetch_add(1, Ordering::Relaxed) + 1;
        if so_far <= TOLD || 10_usize.pow(so_far.ilog10()) == so_far {
            let path = path.display();
            tracing::warn!(%path, row, tensor, so_far, "a sample has numbers that are not finite");
        }
    }
}

impl Part {
    fn open(key: &'static str, path: &Path) -> Result<Self> {
        let (file, _) = merak_ckpt::open_regular(path).map_err(Error::reading_input(key, path))?;
        let tensors = stored_tensors(path)?;
        let mut samples: Option<(usize, String)> = None;
        for tensor in &tensors {
            let Some(&rows) = tensor.shape.first() else {
                let name = &tensor.name;
                let reason =
                    format!("the tensor \"{name}\" has no dimension that counts the samples");
                return Err(unusable(path, reason));
            };
            if tensor.shape[1..].contains(&0) {
                let (name, shape) = (&tensor.name, &tensor.shape[1..]);
                let reason = format!(
                    "the tensor \"{name}\" has the shape {shape:?} per sample, which is empty"
                );
                return Err(unusable(path, reason));
            }
            match &samples {
                Some((other, like)) if *other != rows => {
                    let name = &tensor.name;
                    let reason = format!(
                        "the tensor \"{name}\" has {rows} samples, but \"{like}\" has {other}"
                    );
                    return Err(unusable(path, reason));
                }
                Some(_) => {}
                None => samples = Some((rows, tensor.name.clone())),
            }
        }
        let Some((samples, _)) = samples else {
            return Err(unusable(path, "it has no tensors"));
        };
        let named = tensors
            .into_iter()
            .map(|tensor| (tensor.name.clone(), tensor));
        Ok(Self {
            path: path.to_path_buf(),
            file,
            samples,
            tensors: named.collect(),
        })
    }

    /// Checks that another file has the same tensors, whatever their number of samples.
    fn check_like(&self, other: &Self) -> Result<()> {
        let describe = |part: &Self, name: &String| {
            let tensor = part.tensors.get(name);
            tensor.map_or("absent".to_owned(), |tensor| {
                format!(
                    "{} of shape {:?} per sample",
                    tensor.dtype,
                    &tensor.shape[1..]
                )
            })
        };
        let names = self.tensors.keys().chain(other.tensors.keys());
        for name in names {
            let (expected, found) = (describe(self, name), describe(other, name));
            if expected != found {
                let reason = format!(
                    "the tensor \"{name}\" is {found}, but {expected} in {}",
                    self.path.display()
                );
                return Err(unusable(&other.path, reason));
            }
        }
        Ok(())
    }
}

fn unusable(path: &Path, reason: impl Into<String>) -> Error {
    Error::Data(DataError::TensorFile {
        path: path.to_path_buf(),
        reason: reason.into(),
    })
}

/// The elements of little-endian bytes, converted one by one.
macro_rules! decode {
    ($bytes:expr, $ty:ty, $convert:expr) => {
        $bytes
            .chunks_exact(size_of::<$ty>())
            .map(|x| <$ty>::from_le_bytes(x.try_into().expect("a chunk of that size")))
            .map($convert)
            .collect()
    };
}

/// Elements of any integer type; the caller has checked that it is one.
fn ints(dtype: DType, bytes: &[u8]) -> Vec<i64> {
    match dtype {
        DType::I64 => decode!(bytes, i64, |x| x),
        DType::I32 => decode!(bytes, i32, i64::from),
        DType::I16 => decode!(bytes, i16, i64::from),
        DType::I8 => decode!(bytes, i8, i64::from),
        // A value beyond i64 is neither a token nor a class.
        DType::U64 => decode!(bytes, u64, |x| i64::try_from(x).unwrap_or(i64::MAX)),
        DType::U32 => decode!(bytes, u32, i64::from),
        DType::U16 => decode!(bytes, u16, i64::from),
        _ => decode!(bytes, u8, i64::from),
    }
}

/// Elements of any floating-point type, and pixels.
fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F64 => decode!(bytes, f64, |x| x as f32),
        DType::F32 => decode!(bytes, f32, |x| x),
        DType::BF16 => decode!(bytes, bf16, f32::from),
        DType::F16 => decode!(bytes, f16, f32::from),
        _ => decode!(bytes, u8, |x| f32::from(x) / 127.5 - 1.0),
    }
}
