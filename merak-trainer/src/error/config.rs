//! Errors of configurations: the frame around what a value must be, which its type, its range or
//! `config/check.rs` words.

use super::words::all_of;
use merak_ckpt::words::{brief, file, sentence};
use merak_mpu::names::did_you_mean;
use std::path::PathBuf;

/// What is wrong with a configuration, whatever the model and the data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A key that no version knows.
    #[error("unknown key \"{}\" ({place}){}", brief(key), did_you_mean(nearest.as_deref()))]
    UnknownKey {
        /// The key as it was written.
        key: String,
        /// Where it stands.
        place: String,
        /// The most similar known key.
        nearest: Option<String>,
    },
    /// Several keys of a layer that no version knows, each an [`ConfigError::UnknownKey`].
    #[error("{}", all_of(.0))]
    UnknownKeys(Vec<Self>),
    /// A value of another type than its key's.
    #[error(
        "\"{}\" expects {expected}, found {} ({place})",
        brief(key),
        brief(found)
    )]
    WrongType {
        /// The key.
        key: String,
        /// What the key accepts.
        expected: String,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
    },
    /// A name that is none of a key's choices.
    #[error("\"{key}\" expects {choices}, found {} ({place}){}", brief(found), did_you_mean(nearest.as_deref()))]
    UnknownChoice {
        /// The key.
        key: &'static str,
        /// The names it knows.
        choices: String,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
        /// The most similar choice.
        nearest: Option<String>,
    },
    /// A legal value whose feature this version lacks.
    #[error(
        "\"{key}\" {} ({place}) is not available in this version: choose {instead}",
        brief(found)
    )]
    NotAvailable {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
        /// What is available.
        instead: String,
    },
    /// A legal value whose feature this build lacks.
    #[error(
        "\"{key}\" {found} ({place}) is not in this build: build with --features {feature}, or choose {instead}"
    )]
    NotBuilt {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
        /// The feature of the crate that has it.
        feature: &'static str,
        /// What is in this build.
        instead: &'static str,
    },
    /// A Hugging Face training argument that has no meaning here.
    #[error("\"{key}\" ({place}) is a Hugging Face argument without effect here: {advice}")]
    WithoutEffect {
        /// The key.
        key: &'static str,
        /// Where it stands.
        place: String,
        /// What to do instead.
        advice: String,
    },
    /// A value that has the right type, and is not legal by itself or beside the others.
    #[error("\"{key}\" is {} ({place}), but must be {expected}", brief(found))]
    IllegalValue {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
        /// The legal values.
        expected: String,
    },
    /// A metric that evaluations of the model do not give.
    #[error("\"{key}\" is {}, but an evaluation gives {known}{}", brief(found), did_you_mean(nearest.as_deref()))]
    UnknownMetric {
        /// The key.
        key: &'static str,
        /// The metric.
        found: String,
        /// The metrics there are.
        known: String,
        /// The most similar one.
        nearest: Option<String>,
    },
    /// A key that the command needs and no layer sets.
    #[error("\"{key}\" is not set: {advice}")]
    MissingKey {
        /// The key.
        key: &'static str,
        /// How to set it.
        advice: String,
    },
    /// An optimizer of the program under a ZeRO stage that divides its state.
    #[error(
        "the optimizer \"{name}\" of this program was not tested with ZeRO, which divides its state in stage {stage} \
         over {replicas} replicas: set \"zero_allow_untested_optimizer\" to true, or \"zero_stage\" to 0"
    )]
    UntestedOptimizer {
        /// Its name.
        name: String,
        /// The stage.
        stage: u8,
        /// The replicas.
        replicas: usize,
    },
    /// An option at the end of the command line.
    #[error("the option {} has no value: write {}", brief(option), brief(example))]
    MissingValue {
        /// The option.
        option: String,
        /// How it is written.
        example: String,
    },
    /// A second list for a key, by the same option.
    #[error(
        "\"{key}\" is given twice ({place}), and the second list would replace the first one: write {}, or --set {key}=.. to replace it",
        brief(instead)
    )]
    SecondList {
        /// The key.
        key: &'static str,
        /// Where the second one stands.
        place: String,
        /// One list in place of the two.
        instead: String,
    },
    /// A word on the command line that belongs to no option.
    #[error(
        "unexpected argument \"{}\": keys are given as --KEY VALUE or --set KEY=VALUE",
        brief(argument)
    )]
    UnexpectedArgument {
        /// The word.
        argument: String,
    },
    /// An option that begins with another dash than `-`.
    #[error("{message}")]
    PastedDash {
        /// The option, its dash, and how it is written.
        message: String,
    },
    /// A folder given in place of a configuration file.
    #[error("the configuration {} is a folder: {advice}", file(path))]
    ConfigFolder {
        /// The folder.
        path: PathBuf,
        /// The way on.
        advice: String,
    },
    /// A configuration file whose name tells no format.
    #[error(
        "cannot tell the format of the configuration {}: name it .toml, .yaml, .yml or .json",
        file(path)
    )]
    ConfigFormat {
        /// The file.
        path: PathBuf,
    },
    /// A configuration file that its parser refuses.
    #[error("cannot parse the configuration {}: {}", file(path), sentence(message))]
    ConfigSyntax {
        /// The file.
        path: PathBuf,
        /// What the parser says, with the line where it knows it.
        message: String,
    },
    /// A variable or argument that is not UTF-8.
    #[error("{place} is no UTF-8 text, found \"{}\"", brief(found))]
    NotUtf8 {
        /// Where it stands.
        place: String,
        /// The value, as far as it is text.
        found: String,
    },
}
