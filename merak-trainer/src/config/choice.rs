//! Keys whose value is one of a few names.

use std::fmt;

use merak_ckpt::EarlyStopping;
use merak_mpu::{named_enum, names::nearest};
use serde_json::Value;

use super::{range::Range, refusal::Refusal, setting::Setting};

/// Reads and writes a key by the names of an enum. Messages tell `$names` in their order; `$later`
/// are known names that are not built, each with what is said after the built ones.
macro_rules! named_setting {
    ($type:ty: $names:expr, $parse:expr, $later:expr) => {
        impl Setting for $type {
            fn expected(_: Range) -> String {
                one_of(&$names)
            }

            fn from_text(text: &str) -> Result<Self, Refusal> {
                let parsed: Option<Self> = $parse(text);
                parsed.ok_or_else(|| refuse(text, $names.into_iter(), $later))
            }

            fn to_value(&self) -> Value {
                Value::from(self.as_str())
            }
        }
    };
    ($($type:ty),+) => {
        $(named_setting!($type: Self::ALL.map(Self::as_str), Self::from_name, &[]);)+
    };
}

pub(super) use named_setting;

named_enum! {
    /// The costs that searches and predictions of step times use.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum CostSource {
        /// Times of this machine, from a short run that is made once and kept.
        Measured = "measured",
        /// Floating-point operations.
        Counted = "counted",
    }
}

named_enum! {
    /// How the model becomes a graph.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum TraceMethod {
        /// The model's forward runs once on symbolic tensors.
        Fx = "fx",
    }
}

named_setting!(
    TraceMethod: Self::ALL.map(Self::as_str),
    Self::from_name,
    &[
        (
            "dynamo",
            ", which runs the model's own code: that is Rust, and there is no Python for dynamo to watch",
        ),
        (
            "none",
            ", which traces the modules of a list too: a model of your own calls them in their order",
        ),
    ]
);

named_enum! {
    /// What recomputation drops and runs again in the backward.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum RecomputeMode {
        /// Everything inside chunks of `checkpoint_num_layers` shards.
        Full = "full",
        /// The results of the operations in `recompute_ops`.
        Selective = "selective",
        /// As few chunks on each rank as keep `activation_memory_budget`.
        Budget = "budget",
    }
}

named_enum! {
    /// Where metrics go besides `metrics.jsonl`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum ReportTo {
        /// Nowhere.
        None = "none",
        /// Event files of TensorBoard in `logging_dir`.
        Tensorboard = "tensorboard",
    }
}

named_enum! {
    /// What the files of `data.path` hold.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum DataFormat {
        /// Text, read as bytes.
        Text = "text",
        /// A JSON object a line: `text`; `text` and `label`; `source` and `target`; `messages`;
        /// `prompt` and `completion`.
        Jsonl = "jsonl",
        /// The same as a table with a header, cells parted by commas.
        Csv = "csv",
        /// The same, parted by tabs.
        Tsv = "tsv",
        /// The same as Parquet files, in builds with the feature `parquet`.
        Parquet = "parquet",
        /// Safetensors files: the inputs of the model by name, their first dimension counting
        /// samples.
        Tensors = "tensors",
        /// Token files, as `merak tokenize` writes them.
        Tokens = "tokens",
        /// Folders of PNG and JPEG files, one folder for each class, in builds with the feature
        /// `images`.
        Images = "images",
    }
}

impl DataFormat {
    /// Whether the files are text themselves.
    pub fn is_plain(self) -> bool {
        self.is_text() && self != Self::Parquet
    }

    /// Whether the files hold text, which a tokenizer turns into tokens.
    pub fn is_text(self) -> bool {
        !matches!(self, Self::Tensors | Self::Tokens | Self::Images)
    }
}

named_enum! {
    /// Which library executes the graph's nodes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum BackendChoice {
        /// candle-core tensors with kernels of our own.
        Candle = "candle",
        /// libtorch, in builds with the feature `tch`.
        Tch = "tch",
    }
}

named_enum! {
    /// What the nodes are executed on.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Device {
        /// The processor.
        Cpu = "cpu",
        /// CUDA devices, which ranks share out, through libtorch.
        Cuda = "cuda",
    }
}

named_enum! {
    /// Where optimizer state and `f32` masters lie, if not beside the weights.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Offload {
        /// In host memory, while the weights lie on a device.
        Host = "host",
        /// In files under the run's folder, which are mapped into host memory.
        Disk = "disk",
    }
}

named_setting!(
    BackendChoice,
    CostSource,
    DataFormat,
    Device,
    Offload,
    RecomputeMode,
    ReportTo
);

/// How numbers of 16 bits come into a run, if not as weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HalfPrecision {
    /// Weights are `f32`, and products multiply 16 bits.
    Amp,
}

impl HalfPrecision {
    /// Names that mean the same; the first is the one that configurations are written with.
    const NAMES: [&str; 3] = ["amp", "cuda_amp", "cpu_amp"];
}

impl Setting for HalfPrecision {
    fn expected(_: Range) -> String {
        one_of(&Self::NAMES)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        if Self::NAMES.contains(&text) {
            return Ok(Self::Amp);
        }
        if text == "apex" {
            let instead = "amp, or \"fp16\" alone for weights of 16 bits with f32 masters";
            return Err(Refusal::NotAvailable {
                instead: instead.to_owned(),
            });
        }
        Err(refuse(text, Self::NAMES.into_iter(), &[]))
    }

    fn to_value(&self) -> Value {
        Value::from(Self::NAMES[0])
    }
}

impl fmt::Display for HalfPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Self::NAMES[0])
    }
}

/// When a beam search ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlyStop(pub EarlyStopping);

impl Setting for EarlyStop {
    fn expected(_: Range) -> String {
        r#"true, false or "never""#.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match value {
            Value::Bool(true) => Ok(Self(EarlyStopping::Yes)),
            Value::Bool(false) => Ok(Self(EarlyStopping::No)),
            Value::String(text) => Self::from_text(text),
            _ => Err(Refusal::Type),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match text {
            "never" => Ok(Self(EarlyStopping::Never)),
            flag => Self::from_value(&Value::Bool(bool::from_text(flag)?)),
        }
    }

    fn to_value(&self) -> Value {
        match self.0 {
            EarlyStopping::No => Value::Bool(false),
            EarlyStopping::Yes => Value::Bool(true),
            EarlyStopping::Never => Value::from("never"),
        }
    }
}

/// The refusal of a name that is not built: either one of `later`, each with what is said after
/// the built ones, or an unknown one.
pub(crate) fn refuse<'a>(
    text: &str,
    built: impl Iterator<Item = &'a str>,
    later: &[(&str, &str)],
) -> Refusal {
    let built: Vec<&str> = built.collect();
    if let Some((_, why)) = later.iter().find(|(name, _)| *name == text) {
        return Refusal::NotAvailable {
            instead: one_of(&built) + why,
        };
    }
    Refusal::Choice {
        choices: one_of(&built),
        nearest: nearest(text, built.iter().copied()).map(Into::into),
    }
}

/// `a`, `a or b`, `a, b or c`.
pub(crate) fn one_of(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [head @ .., last] => format!("{} or {last}", head.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use merak_partition::PartitionMethod;
    use serde_json::json;

    #[test]
    fn names_of_mixed_precision_mean_the_same_and_apex_names_two_ways_on() {
        for name in ["amp", "cuda_amp", "cpu_amp"] {
            assert_eq!(HalfPrecision::from_text(name), Ok(HalfPrecision::Amp));
        }
        let Err(Refusal::NotAvailable { instead }) = HalfPrecision::from_text("apex") else {
            panic!("apex is refused");
        };
        assert!(instead.contains("amp") && instead.contains("fp16"));
        let nearest = HalfPrecision::from_text("amp_cpu");
        assert!(matches!(nearest, Err(Refusal::Choice { .. })));
    }

    #[test]
    fn a_name_is_built_or_later_or_unknown() {
        assert_eq!(
            PartitionMethod::from_text("custom"),
            Ok(PartitionMethod::Custom)
        );
        for name in ["dynamo", "none"] {
            let Err(Refusal::NotAvailable { instead }) = TraceMethod::from_text(name) else {
                panic!("{name} is refused");
            };
            assert!(instead.starts_with("fx, which "), "{instead}");
        }
        let choices = "uniform, uniform_floor, parameters, custom, autopipe or exact".to_owned();
        assert_eq!(
            PartitionMethod::from_text("unifrom"),
            Err(Refusal::Choice {
                choices,
                nearest: Some("uniform".into())
            })
        );
        assert_eq!(PartitionMethod::from_value(&json!(3)), Err(Refusal::Type));
    }
}
