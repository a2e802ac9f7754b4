//! What can go wrong with an optimizer.

use merak_mpu::DType;
use std::{fmt, io, path::PathBuf};

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a device.
pub type DeviceError = Box<dyn std::error::Error + Send + Sync>;

/// A setting that cannot be used, a buffer that does not fit, or a failed group.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number outside its legal range.
    #[error("`{setting}` is {found}, expected {expected}")]
    OutOfRange {
        /// The setting.
        setting: &'static str,
        /// The value that was given.
        found: String,
        /// The legal values, in words.
        expected: &'static str,
    },
    /// A name that is not one of the known ones.
    #[error("`{setting}` has no value \"{found}\": choose one of {known}")]
    UnknownName {
        /// The setting.
        setting: &'static str,
        /// The name that was given.
        found: String,
        /// Every known name.
        known: String,
    },
    /// The decay of `wsd` begins before the run.
    #[error("`num_decay_steps` is {decay_steps}, expected at most the {total} steps of the run")]
    LongDecay {
        /// Steps of the decay.
        decay_steps: u64,
        /// Steps of the run.
        total: u64,
    },
    /// A schedule was given a keyword argument that it does not take.
    #[error("the {schedule} schedule takes {takes}, found `{kwarg}`")]
    ForeignKwarg {
        /// The keyword argument.
        kwarg: &'static str,
        /// Name of the schedule.
        schedule: &'static str,
        /// What that schedule takes.
        takes: &'static str,
    },
    /// A parameter of this rank is not in the table of the whole model.
    #[error(
        "parameter `{param}` has global index {index}, but the model has {num_params} parameters"
    )]
    UnknownParam {
        /// Name of the parameter.
        param: String,
        /// Its global index.
        index: usize,
        /// Length of the table.
        num_params: usize,
    },
    /// The table of the whole model has another parameter at this index.
    #[error(
        "parameter `{param}` with {found} elements does not match entry {index} of the model, `{expected_param}` with {expected} elements"
    )]
    ParamMismatch {
        /// Name of the parameter.
        param: String,
        /// Its number of local elements.
        found: usize,
        /// Its global index.
        index: usize,
        /// Name in the table.
        expected_param: String,
        /// Number of local elements in the table.
        expected: usize,
    },
    /// A parameter is to be cut along a dimension that it does not have.
    #[error("parameter `{param}` of shape {shape:?} has no dimension {dim} to be cut along")]
    NoSuchDim {
        /// Name of the parameter.
        param: String,
        /// The dimension of its cut, from 0.
        dim: usize,
        /// Shape of the local tensor.
        shape: Vec<usize>,
    },
    /// A parameter that is to be a hidden matrix has another number of dimensions.
    #[error("parameter `{param}` has shape {shape:?}, expected two dimensions for a hidden matrix")]
    NoMatrix {
        /// Name of the parameter.
        param: String,
        /// Shape of the local tensor.
        shape: Vec<usize>,
    },
    /// One rank lists a parameter twice.
    #[error("parameter `{param}` is listed twice on one rank")]
    DuplicateParam {
        /// Name of the parameter.
        param: String,
    },
    /// A rule needs all of a parameter, but the ranks that it may ask do not hold all pieces.
    #[error(
        "`{param}` is not cut into {num_ranks} piece(s): the rule needs the group of the ranks that hold its pieces"
    )]
    OtherPieces {
        /// Name of the parameter.
        param: String,
        /// The ranks of the tensor group.
        num_ranks: usize,
    },
    /// A tensor of another library cannot be stepped.
    #[error("parameter `{param}` cannot be stepped")]
    Tensor {
        /// Name of the parameter.
        param: String,
        /// Why not.
        source: merak_mpu::Error,
    },
    /// A gradient has another number of elements than its parameter.
    #[error("the gradient of `{param}` has {found} elements, expected {expected}")]
    GradientLength {
        /// Name of the parameter.
        param: String,
        /// Number of elements of the parameter.
        expected: usize,
        /// Number of elements of the gradient.
        found: usize,
    },
    /// A flat buffer has another length than the layout.
    #[error("the {what} buffer has {found} elements, the layout has {expected}")]
    BufferLength {
        /// Which buffer.
        what: &'static str,
        /// Length of the layout.
        expected: usize,
        /// Length of the buffer.
        found: usize,
    },
    /// A flat buffer has another element type than this version can step.
    #[error("the {what} buffer has elements of type {found}, expected f32")]
    BufferType {
        /// Which buffer.
        what: &'static str,
        /// Type of the buffer.
        found: DType,
    },
    /// A bucket was started twice in one step, or does not exist.
    #[error("bucket {bucket} of {num_buckets} cannot be started now: {reason}")]
    BucketOrder {
        /// The bucket.
        bucket: usize,
        /// Number of buckets.
        num_buckets: usize,
        /// Why not.
        reason: &'static str,
    },
    /// The gradients of one step were reduced a second time.
    #[error("the gradients of this step are averages already: step before the next reduction")]
    ReducedTwice,
    /// State that was to lie on a device, and in files as well.
    #[error(
        "the state of an optimizer lies on a device or in files: choose `on_device` or `on_disk`"
    )]
    TwoPlaces,
    /// A rule of another program came when the state had its place already.
    #[error(
        "the rule `{rule}` comes when the state lies on a device or in files already: call `with_rule` before `on_device` and `on_disk`"
    )]
    LateRule {
        /// Name of the rule.
        rule: String,
    },
    /// The device on which the optimizer steps failed.
    #[error("the device failed at the {what}")]
    Device {
        /// What was being done, or made.
        what: &'static str,
        /// What the device reports.
        source: DeviceError,
    },
    /// A file for optimizer state or masters cannot be had.
    #[error("a file of {bytes} bytes for optimizer state or masters cannot be made in {}", folder.display())]
    StateFile {
        /// The folder.
        folder: PathBuf,
        /// The size of the file.
        bytes: usize,
        /// Why not.
        source: io::Error,
    },
    /// A collective failed.
    #[error("{during} failed")]
    Communication {
        /// What was being done.
        during: &'static str,
        /// What the group reports.
        source: merak_mpu::Error,
    },
}

impl Error {
    pub(crate) fn out_of_range(
        setting: &'static str,
        found: impl fmt::Display,
        expected: &'static str,
    ) -> Self {
        Self::OutOfRange {
            setting,
            found: found.to_string(),
            expected,
        }
    }

    pub(crate) fn number_out_of_range(
        setting: &'static str,
        found: f64,
        expected: &'static str,
    ) -> Self {
        let is_short = found == 0.0 || (1e-5..1e16).contains(&found.abs());
        if is_short || !found.is_finite() {
            Self::out_of_range(setting, found, expected)
        } else {
            Self::out_of_range(setting, format_args!("{found:e}"), expected)
        }
    }

    pub(crate) fn device(what: &'static str) -> impl Fn(DeviceError) -> Self {
        move |source| Self::Device { what, source }
    }

    pub(crate) fn communication(during: &'static str) -> impl FnOnce(merak_mpu::Error) -> Self {
        move |source| Self::Communication { during, source }
    }
}
