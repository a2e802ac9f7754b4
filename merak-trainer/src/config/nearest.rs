//! The nearest known name to one that was mistyped.

use super::{
    keys::{SECTIONS, keys},
    reserved::RESERVED,
};
use crate::error::{ConfigError, Error};
use merak_mpu::names::nearest;

/// Names that other programs have for a key.
const SYNONYMS: &[(&str, &str)] = &[
    ("accumulation_steps", "gradient_accumulation_steps"),
    ("attention_heads", "num_heads"),
    ("batch", "per_device_train_batch_size"),
    ("batch_size", "per_device_train_batch_size"),
    ("beta1", "adam_beta1"),
    ("beta2", "adam_beta2"),
    ("betas", "adam_beta1"),
    ("checkpoint", "resume_from_checkpoint"),
    ("clip_grad", "max_grad_norm"),
    ("cuda", "compute.device"),
    ("dataset", "data.path"),
    ("epochs", "num_train_epochs"),
    ("eps", "adam_epsilon"),
    ("epsilon", "adam_epsilon"),
    ("eval_batch_size", "per_device_eval_batch_size"),
    ("eval_interval", "eval_steps"),
    ("gradient_accumulation", "gradient_accumulation_steps"),
    ("gpu", "compute.device"),
    ("gpu_id", "compute.device"),
    ("gpus", "compute.device"),
    ("grad_accum", "gradient_accumulation_steps"),
    ("grad_accum_steps", "gradient_accumulation_steps"),
    ("grad_clip", "max_grad_norm"),
    ("heads", "num_heads"),
    ("hidden", "hidden_size"),
    ("iterations", "max_steps"),
    ("layers", "num_layers"),
    ("log_interval", "logging_steps"),
    ("lora", "lora_config"),
    ("lr", "learning_rate"),
    ("lr_scheduler", "lr_scheduler_type"),
    ("max_epochs", "num_train_epochs"),
    ("max_iters", "max_steps"),
    ("max_length", "seq_length"),
    ("max_seq_length", "seq_length"),
    ("micro_batch_size", "per_device_train_batch_size"),
    ("microbatches", "gradient_accumulation_steps"),
    ("model", "model.config"),
    ("model_dir", "model.hf_dir"),
    ("model_name_or_path", "model.hf_dir"),
    ("model_path", "model.hf_dir"),
    ("model_type", "model.config"),
    ("momentum", "sgd_momentum"),
    ("num_workers", "dataloader_num_workers"),
    ("optimizer", "optim"),
    ("out", "output_dir"),
    ("out_dir", "output_dir"),
    ("output", "output_dir"),
    ("pipeline_parallel_size", "pp"),
    ("resume", "resume_from_checkpoint"),
    ("save_interval", "save_steps"),
    ("schedule", "train_schedule"),
    ("scheduler", "lr_scheduler_type"),
    ("seq", "seq_length"),
    ("seq_len", "seq_length"),
    ("sequence_length", "seq_length"),
    ("steps", "max_steps"),
    ("tensor_parallel_size", "tp"),
    ("threads", "compute.threads_per_rank"),
    ("timeout", "distributed.timeout_s"),
    ("train_batch_size", "per_device_train_batch_size"),
    ("train_data", "data.path"),
    ("train_steps", "max_steps"),
    ("warmup", "warmup_steps"),
    ("wd", "weight_decay"),
    ("workers", "dataloader_num_workers"),
    ("zero", "zero_stage"),
];

/// The key or section that an unknown name probably means: one that other programs call so, a
/// section's key named by its last word alone, else the one with the most similar spelling.
pub(super) fn nearest_key(name: &str) -> Option<&'static str> {
    let known = || {
        let reserved = RESERVED.iter().map(|key| key.name);
        keys().map(|key| key.name).chain(reserved)
    };
    let written = name.to_lowercase().replace('-', "_");
    let last = written.rsplit('.').next().unwrap_or_default();
    let synonym = SYNONYMS.iter().find(|(other, _)| *other == last);
    let of_section = |key: &&str| key.rsplit_once('.').is_some_and(|(_, key)| key == last);
    // A name with a section is first compared with full names.
    let is_bare = !written.contains('.');
    let of_a_section = if is_bare {
        None
    } else {
        nearest(name, known())
    };
    let same_end = || known().find(|key| *key == last || (is_bare && of_section(key)));
    let meant = of_a_section.or(synonym.map(|(_, key)| *key));
    let similar = || {
        let ends = known().filter_map(|key| Some(key.rsplit_once('.')?.1));
        let (sections, ends) = (SECTIONS.iter().copied(), ends.filter(|_| is_bare));
        let found = nearest(name, known().chain(sections).chain(ends))?;
        let is_end = |key: &&str| key.rsplit_once('.').is_some_and(|(_, end)| end == found);
        let is_whole = known()
            .chain(SECTIONS.iter().copied())
            .any(|key| key == found);
        if is_whole {
            Some(found)
        } else {
            known().find(is_end)
        }
    };
    meant.or_else(same_end).or_else(similar)
}

impl Error {
    /// Adds to options of the command line that are no key, and resemble none, the option of the
    /// command that they probably mean; `options` are spelled with dashes.
    #[must_use]
    pub fn or_option(self, options: &[&str]) -> Self {
        match self {
            Self::Config(error) => Self::Config(error.or_option(options)),
            other => other,
        }
    }
}

impl ConfigError {
    fn or_option(self, options: &[&str]) -> Self {
        let hint = |place: &str| {
            // The word after `--set` is a key and no option.
            let written = place.strip_prefix("command line --")?;
            let written = Some(written.replace('_', "-")).filter(|word| !word.contains(' '))?;
            let names = options.iter().map(|option| option.trim_start_matches('-'));
            nearest(&written, names).map(|name| format!("--{name}"))
        };
        match self {
            Self::UnknownKey {
                key,
                place,
                nearest,
            } => Self::UnknownKey {
                nearest: nearest.or_else(|| hint(&place)),
                key,
                place,
            },
            Self::UnknownKeys(keys) => {
                let hinted = keys.into_iter().map(|key| key.or_option(options));
                Self::UnknownKeys(hinted.collect())
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_proposed_for_an_option_alone() {
        let unknown = |place: &str| {
            Error::Config(ConfigError::UnknownKey {
                key: "jsn".to_owned(),
                place: place.to_owned(),
                nearest: None,
            })
        };
        let told = |place: &str| unknown(place).or_option(&["--json"]).to_string();
        assert!(told("command line --jsn").ends_with("did you mean \"--json\"?"));
        for place in [
            "command line --set jsn",
            "a.toml:1",
            "environment MERAK_JSN",
        ] {
            assert!(!told(place).contains("did you mean"), "{place}");
        }
    }

    #[test]
    fn names_of_other_programs_and_last_words_find_their_key() {
        for (name, key) in [
            ("lr", "learning_rate"),
            ("batch_size", "per_device_train_batch_size"),
            ("Batch-Size", "per_device_train_batch_size"),
            ("path", "data.path"),
            ("tokenizer", "data.tokenizer"),
            ("model.tp", "tp"),
            ("backend", "compute.backend"),
            ("data.pth", "data.path"),
            ("learning_rat", "learning_rate"),
            ("modle", "model"),
            ("confg", "model.config"),
        ] {
            assert_eq!(nearest_key(name), Some(key), "{name}");
        }
        assert_eq!(nearest_key("zzzzzz"), None);
    }

    #[test]
    fn every_synonym_is_no_key_and_means_one() {
        for (name, key) in SYNONYMS {
            assert!(keys().any(|known| known.name == *key), "{key}");
            assert!(!keys().any(|known| known.name == *name), "{name}");
        }
    }
}
