//! Parts of messages.

use super::{ConfigError, Error};
use merak_ckpt::words::{file, sentence};
use std::{fmt, path::Path};

/// The part of a step in which a rank failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPart {
    /// The step itself.
    Train,
    /// Its evaluation.
    Evaluate,
    /// Its checkpoint.
    Save,
}

impl fmt::Display for StepPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Train => "in",
            Self::Evaluate => "to evaluate",
            Self::Save => "to save",
        })
    }
}

/// Why an epoch of a stream, and an evaluation on one, has no number of steps of its own.
pub(crate) const NO_LENGTH: &str = "a stream has no known length";

/// The place of a value among others.
pub(super) fn at_position(position: Option<usize>) -> String {
    let text = |position| format!(" at position {position}");
    position.map(text).unwrap_or_default()
}

/// The stages of a rank.
pub(super) fn stages_of(stages: &[usize]) -> String {
    let numbers: Vec<_> = stages.iter().map(usize::to_string).collect();
    let plural = if stages.len() == 1 { "" } else { "s" };
    format!("stage{plural} {}", numbers.join(", "))
}

/// The advice to resume a run by `--resume auto`.
pub(super) fn resume_auto_advice(has_checkpoint: bool) -> &'static str {
    if has_checkpoint {
        "go on with it by --resume auto"
    } else {
        "keep it aside and begin anew by --resume auto"
    }
}

/// Where another run lies that is not replaced yet.
pub(super) fn replaced_run(aside: Option<&Path>) -> String {
    let text = |aside: &Path| {
        format!(
            "; the run that it was to replace lies in {} until there is a checkpoint",
            file(aside)
        )
    };
    aside.map(text).unwrap_or_default()
}

/// Steps in a row, with the last one as what the sentence goes on about.
pub(super) fn last_of(first: usize, last: usize) -> String {
    if first == last {
        format!("step {last}")
    } else {
        format!("from step {first} on, and step {last}")
    }
}

/// The loss scale at which a step was skipped.
pub(super) fn at_scale(scale: Option<(f64, &str)>) -> String {
    let text = |(scale, _)| format!(" at the loss scale {scale}");
    scale.map(text).unwrap_or_default()
}

/// The key of the loss scale, as one more to lower.
pub(super) fn or_scale(scale: Option<(f64, &str)>) -> String {
    let text = |(_, key)| format!(" or \"{key}\"");
    scale.map(text).unwrap_or_default()
}

/// The lengths of sequences, a checkpoint's and the run's.
pub(super) fn other_length(lengths: Option<[u64; 2]>) -> String {
    let text = |[saved, now]: [u64; 2]| format!(" (\"seq_length\" is {now}, and was {saved})");
    lengths.map(text).unwrap_or_default()
}

/// The data of a checkpoint.
pub(super) fn saved_with(data: Option<&str>) -> String {
    data.map(|data| format!(" ({data})")).unwrap_or_default()
}

/// Advice, as the end of a message: another way to give a part of the data more tokens.
pub(super) fn other_share(part: &str) -> &'static str {
    match part {
        "validation" => ", or choose another \"data.validation_fraction\" (0 for no validation)",
        _ => "",
    }
}

/// The content that a file of records needs.
pub(super) fn records_of(format: &str) -> &'static str {
    match format {
        "jsonl" => "a JSON object in each line",
        "parquet" => "a row for each record, in files that end in .parquet",
        _ => "a line with the names of the columns and a line for each record",
    }
}

/// A note on files that were passed over because they are not text.
pub(super) fn passed_over(files: usize) -> String {
    match files {
        0 => String::new(),
        1 => ", and the one file there is was passed over as no text".to_owned(),
        files => format!(", and all {files} files were passed over as no text"),
    }
}

/// The place of the data, as the end of a noun.
pub(super) fn of_path(path: Option<&Path>) -> String {
    path.map(|path| format!(" of {}", file(path)))
        .unwrap_or_default()
}

/// The use of a part's samples, and advice where evaluation needs others.
pub(super) fn purpose_of_samples(part: &str) -> &'static str {
    match part {
        "evaluation" => {
            "measure: choose another \"data.validation_fraction\" (0 for no validation)"
        }
        _ => "learn from",
    }
}

/// What is wrong with a model's configuration, after the name of its file.
pub(super) fn of_model_file(error: &merak_trace::Error) -> String {
    match error {
        merak_trace::Error::ModelConfig { field, reason } => {
            sentence(&format!("\"{field}\" {reason}"))
        }
        other => sentence(&other.to_string()),
    }
}

/// Messages one after the other.
pub(super) fn all_of(errors: &[ConfigError]) -> String {
    let messages: Vec<_> = errors.iter().map(ToString::to_string).collect();
    messages.join(" and ")
}

/// The key and its place, as the end of a message. A key that the message names already is not
/// repeated.
pub(super) fn with_key_and_place(key: &str, place: Option<&str>, error: &Error) -> String {
    let key = format!("\"{key}\"");
    let is_named = error.to_string().contains(&key);
    match (is_named, place) {
        (true, None) => String::new(),
        (true, Some(place)) => format!(" ({place})"),
        (false, None) => format!(" ({key})"),
        (false, Some(place)) => format!(" ({key}, {place})"),
    }
}

/// What each side of a torn run has.
pub(super) fn sides_of(sides: &[(String, String)]) -> String {
    let side = |(ranks, line): &(String, String)| {
        let verb = if ranks.starts_with("ranks") {
            "have"
        } else {
            "has"
        };
        format!("{ranks} {verb} \"{line}\"")
    };
    sides.iter().map(side).collect::<Vec<_>>().join(", ")
}

/// What a configuration has to do about a refusal to split.
pub(super) fn of_a_split(error: &merak_tp::Error) -> &'static str {
    use merak_tp::Error as E;
    match error {
        E::IncompleteLists { .. } | E::NoLists { .. } | E::NothingToSplit { .. } => {
            "; a configuration has the lists in its table [tp_layer_lists], and tp_layer_lists = \"auto\" for `auto_lists`"
        }
        E::Heads {
            is_bound: false, ..
        }
        | E::KvHeads {
            is_bound: false, ..
        } => ", or \"sp_method\" = \"ring\" or \"all_gather\", which share no heads",
        _ => "",
    }
}

/// What to do about tokens of another tokenizer.
pub(super) fn own_tokenizer(own: Option<&Path>) -> String {
    match own {
        Some(own) => format!(
            "set \"data.tokenizer\" to {}, or tokenize the text again",
            file(own)
        ),
        None => "tokenize the text again".to_owned(),
    }
}
