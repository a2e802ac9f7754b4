//! Errors of planning.

use super::words::of_model_file;
use merak_ckpt::words::{Bytes, brief, file, sentence};
use merak_mpu::names::did_you_mean;
use std::path::PathBuf;

/// Why a model cannot be planned as the arguments say.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A model whose loss is none of logits.
    #[error(
        "predictions need a model whose loss is the cross-entropy of logits from a linear layer"
    )]
    NoLogits,
    /// A schedule with fewer microbatches than it needs.
    #[error("{name} needs gradient_accumulation_steps >= {needed} ({why}), got {found}")]
    FewMicrobatches {
        /// The schedule.
        name: &'static str,
        /// The smallest legal number.
        needed: usize,
        /// Where the number comes from.
        why: String,
        /// The number that was asked for.
        found: usize,
    },
    /// Fewer layers than pipeline stages.
    #[error(
        "the model has {layers} layers, fewer than the {stages} stages that \"pp\" asks for: choose at most {layers}"
    )]
    FewerLayers {
        /// Layers of the model.
        layers: usize,
        /// Stages.
        stages: usize,
    },
    /// The model's configuration file is not JSON.
    #[error(
        "cannot parse the model configuration {}: {}",
        file(path),
        sentence(message)
    )]
    ModelSyntax {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        message: String,
    },
    /// The model's configuration file has a field that is missing or cannot be used.
    #[error("{}: {}", file(path), of_model_file(reason))]
    ModelContent {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: Box<merak_trace::Error>,
    },
    /// A file that describes no cluster.
    #[error("{} describes no cluster: {reason}", file(path))]
    Cluster {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A dimension of a known model that does not hold the sequence.
    #[error(
        "\"sequence_dim\" is 0, but the hidden states of a {family} are [batch, sequence, width]: choose 1; 0 is for models \
         of your own with [sequence, batch, width]"
    )]
    SequenceDim {
        /// The model's family.
        family: &'static str,
    },
    /// A token of the configuration that the model does not know.
    #[error("\"{key}\" is {token}, but the model knows the tokens 0 to {} only", vocab - 1)]
    UnknownToken {
        /// The key.
        key: &'static str,
        /// The token.
        token: u32,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
    /// A part of names that no parameter of the model has in its name.
    #[error(
        "\"{key}\" has \"{}\", expected a part of a parameter's name such as \"{example}\"{}",
        brief(found), did_you_mean(nearest.as_deref())
    )]
    UnknownPart {
        /// The key.
        key: &'static str,
        /// The part.
        found: String,
        /// The name of the model's first parameter.
        example: String,
        /// The most similar part of a name.
        nearest: Option<String>,
    },
    /// Activations that need more than their budget, even with everything recomputed.
    #[error(
        "\"activation_memory_budget\" is {}, but the activations of pipeline rank {rank} need at least \
         {} ({least} bytes), with every chunk of \"checkpoint_num_layers\" segments recomputed: raise it, or choose a smaller \
         \"per_device_train_batch_size\"",
        Bytes::from(*budget), Bytes::from(*least)
    )]
    ActivationBudget {
        /// The rank of the pipeline.
        rank: usize,
        /// The bytes that it may use.
        budget: usize,
        /// The fewest bytes that it needs.
        least: usize,
    },
    /// Stages that no partition makes small enough for a rank.
    #[error(
        "\"autopipe.memory_limit\" is {}, but under every partition that was tried some rank needs at least \
         {} ({least} bytes): raise it, or choose more ranks or a smaller \"per_device_train_batch_size\"",
        Bytes::from(*limit), Bytes::from(*least)
    )]
    StageMemory {
        /// The bytes that a rank may use.
        limit: usize,
        /// The fewest bytes that the fullest rank needs.
        least: usize,
    },
    /// A limit of memory that no schedule keeps.
    #[error(
        "\"autopipe.memory_limit\" is {}, but no schedule that was tried keeps it, and of those with a name the least \
         needs {} ({needed} bytes) on its fullest rank: raise it, or choose more ranks or a smaller \
         \"per_device_train_batch_size\"",
        Bytes::from(*limit), Bytes::from(*needed)
    )]
    ScheduleMemory {
        /// The bytes that a rank may use.
        limit: usize,
        /// The fewest bytes that the fullest rank needs under a schedule with a name.
        needed: usize,
    },
    /// A model that has none of the split points of its family.
    #[error("{0}: set \"custom_split_points\", or choose another \"split_method\"")]
    NoSplitPoints(Box<merak_partition::Error>),
    /// The description of an adapter that does not fit the model.
    #[error("{}: {}{}", file(path), sentence(&reason.to_string()), way_on(reason))]
    AdapterFile {
        /// The description.
        path: PathBuf,
        /// What does not fit.
        reason: Box<merak_ckpt::AdaptError>,
    },
    /// An adapter that would be merged into a weight which several layers share.
    #[error(
        "the adapter changes `{param}`, which {layers} share, for one of them: `merak-ckpt merge-lora` writes a model \
         in which each has its own"
    )]
    SharedTarget {
        /// The weight.
        param: String,
        /// The layers.
        layers: String,
    },
    /// A magnitude without the weight at whose norms it starts.
    #[error(
        "`{magnitude}` starts at the norms of `{weight}`, which pipeline stage {stage} gets as a value from another one: \
         choose tensor-parallel lists that cut the weight alike for all its layers, or \"pp\" 1"
    )]
    AbsentWeight {
        /// The magnitude.
        magnitude: String,
        /// The weight.
        weight: String,
        /// The stage of the magnitude.
        stage: usize,
    },
    /// A run in which everything is frozen.
    #[error(
        "every parameter is frozen, and nothing is left to train: a factor of 0 in \"lr_scales\" freezes, as does \
         `inference_mode` in \"lora_config\""
    )]
    NothingTrained,
    /// A model that was made for another task.
    #[error(
        "{what} needs a model for causal language modelling or sequence-to-sequence learning, but this {family} model is for {objective}"
    )]
    OtherObjective {
        /// The requested task.
        what: &'static str,
        /// The model's family.
        family: &'static str,
        /// What it learns.
        objective: String,
    },
}

/// What to do about a description that does not fit, where a key of the run helps.
fn way_on(reason: &merak_ckpt::AdaptError) -> &'static str {
    match reason {
        merak_ckpt::AdaptError::Shared { .. } => ": with \"no_tie_modules\" each has its own",
        _ => "",
    }
}
