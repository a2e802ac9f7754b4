//! Keys whose value is one of a few names.

use std::fmt;

use merak_mpu::EngineKind;
use merak_mpu::names::nearest;
use merak_tp::SequenceMethod;
use merak_trace::Units;
use serde_json::Value;

use super::{
    range::Range,
    setting::{Refusal, Setting},
};

/// Declares an enum whose variants are documented names, with known names that are not built, each
/// with what is said behind the built ones.
macro_rules! choices {
    (
        $(#[doc = $doc:literal])+
        $name:ident {
            $( $(#[doc = $variant_doc:literal])+ $variant:ident = $text:literal, )+
        }
        later [$($later:literal $why:literal),*]
    ) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $name {
            $( $(#[doc = $variant_doc])+ $variant, )+
        }

        impl $name {
            const BUILT: &'static [(&'static str, Self)] = &[$(($text, Self::$variant)),+];
            const LATER: &'static [(&'static str, &'static str)] = &[$(($later, $why)),*];

            /// The name that configurations use.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl Setting for $name {
            fn expected(_: Range) -> String {
                let names: Vec<_> = Self::BUILT.iter().map(|(name, _)| *name).collect();
                one_of(&names)
            }

            fn from_value(value: &Value) -> Result<Self, Refusal> {
                Self::from_text(value.as_str().ok_or(Refusal::Type)?)
            }

            fn from_text(text: &str) -> Result<Self, Refusal> {
                match Self::BUILT.iter().find(|(name, _)| *name == text) {
                    Some(&(_, choice)) => Ok(choice),
                    None => Err(refuse(text, Self::BUILT.iter().map(|(name, _)| *name), Self::LATER)),
                }
            }

            fn to_value(&self) -> Value {
                Value::from(self.as_str())
            }
        }
    };
}

choices! {
    /// The costs that searches and predictions of step times use.
    CostSource {
        /// Times of this machine, from a short run that is made once and kept.
        Measured = "measured",
        /// Floating-point operations.
        Counted = "counted",
    }
    later []
}

choices! {
    /// How the model becomes a graph.
    TraceMethod {
        /// The model's forward runs once on symbolic tensors.
        Fx = "fx",
    }
    later [
        "dynamo"
        ", which runs the model's own code: that is Rust, and there is no Python for dynamo to watch",
        "none"
        ", which traces the modules of a list too: a model of your own calls them in their order"
    ]
}

choices! {
    /// What recomputation drops and runs again in the backward.
    RecomputeMode {
        /// Everything inside chunks of `checkpoint_num_layers` shards.
        Full = "full",
        /// The results of the operations in `recompute_ops`.
        Selective = "selective",
        /// As few chunks on each rank as keep `activation_memory_budget`.
        Budget = "budget",
    }
    later []
}

choices! {
    /// How the attentions of a sequence that ranks share see what other ranks have.
    SpMethod {
        /// Each rank has its heads of all positions, between two all-to-alls.
        Ulysses = "ulysses",
        /// Each rank gathers the keys and values of all positions for the queries of its own.
        AllGather = "all_gather",
        /// Keys and values go round the ranks, each of which has the queries of its positions.
        Ring = "ring",
    }
    later []
}

impl From<SpMethod> for SequenceMethod {
    fn from(method: SpMethod) -> Self {
        match method {
            SpMethod::Ulysses => Self::Ulysses,
            SpMethod::AllGather => Self::AllGather,
            SpMethod::Ring => Self::Ring,
        }
    }
}

choices! {
    /// Where metrics go besides `metrics.jsonl`.
    ReportTo {
        /// Nowhere.
        None = "none",
        /// Event files of TensorBoard in `logging_dir`.
        Tensorboard = "tensorboard",
    }
    later []
}

choices! {
    /// What the files of `data.path` hold.
    DataFormat {
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
    later []
}

choices! {
    /// How ranks reach each other.
    EngineChoice {
        /// The best engine for the way the run was started.
        Auto = "auto",
        /// Ranks are threads of one process.
        Threads = "threads",
        /// Ranks are processes, over shared memory and sockets.
        Tcp = "tcp",
        /// Ranks are processes, over an MPI library, in builds with the feature `mpi`.
        Mpi = "mpi",
        /// Ranks are processes with a CUDA device each, in builds with the feature `nccl`.
        Nccl = "nccl",
    }
    later []
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

impl From<EngineChoice> for EngineKind {
    fn from(choice: EngineChoice) -> Self {
        match choice {
            EngineChoice::Auto => Self::Auto,
            EngineChoice::Threads => Self::Threads,
            EngineChoice::Tcp => Self::Tcp,
            EngineChoice::Mpi => Self::Mpi,
            EngineChoice::Nccl => Self::Nccl,
        }
    }
}

choices! {
    /// Which library executes the graph's nodes.
    BackendChoice {
        /// candle-core tensors with kernels of our own.
        Candle = "candle",
        /// libtorch, in builds with the feature `tch`.
        Tch = "tch",
    }
    later []
}

choices! {
    /// What the nodes are executed on.
    Device {
        /// The processor.
        Cpu = "cpu",
        /// CUDA devices, which ranks share out, through libtorch.
        Cuda = "cuda",
    }
    later []
}

choices! {
    /// Which units of the processor that multiply bf16 the default backend may use.
    ComputeUnits {
        /// All that there are: matrix units (AMX) before vectors.
        Matrix = "matrix",
        /// Vectors of bf16 pairs (AVX-512-BF16).
        Vector = "vector",
        /// None: multiply-adds of `f32`.
        None = "none",
    }
    later []
}

impl From<ComputeUnits> for Units {
    fn from(choice: ComputeUnits) -> Self {
        match choice {
            ComputeUnits::Matrix => Self::Matrix,
            ComputeUnits::Vector => Self::Vector,
            ComputeUnits::None => Self::None,
        }
    }
}

choices! {
    /// Where optimizer state and `f32` masters lie, if not beside the weights.
    Offload {
        /// In host memory, while the weights lie on a device.
        Host = "host",
        /// In files under the run's folder, which are mapped into host memory.
        Disk = "disk",
    }
    later []
}

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

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        Self::from_text(value.as_str().ok_or(Refusal::Type)?)
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

/// The refusal of a name that is not built: either one of `later`, each with what is said behind
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
