//! Keys about data that this model or these data do not use.

use merak_trace::models::{Model, Objective};
use merak_trainer::{Config, ConfigError, DataFormat, Error, Result, keys};

/// What the data are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Given {
    /// Text, or tokens.
    Tokens,
    /// Tensors by name.
    Tensors,
}

/// Keys about data, what data they are about, and the models that use them.
const OF_DATA: [(&str, Given, &[Objective]); 6] = {
    use Given::{Tensors, Tokens};
    use Objective::{CausalLm, MaskedLm, SequenceToSequence};
    [
        ("shift_labels", Tensors, &[CausalLm]),
        ("data.packing", Tokens, &[CausalLm]),
        (
            "data.mlm_probability",
            Tokens,
            &[MaskedLm, SequenceToSequence],
        ),
        ("data.mask_replace_prob", Tokens, &[MaskedLm]),
        ("data.random_replace_prob", Tokens, &[MaskedLm]),
        ("data.mean_noise_span_length", Tokens, &[SequenceToSequence]),
    ]
};

/// Refuses values that would be ignored.
pub(super) fn check_unused(config: &Config, model: &dyn Model) -> Result<()> {
    let values = config.to_json();
    let found = match config.arguments().data.format {
        DataFormat::Tensors => Given::Tensors,
        _ => Given::Tokens,
    };
    for (name, given, users) in OF_DATA {
        let Some(key) = keys().find(|key| key.name == name) else {
            continue;
        };
        let (value, default) = (&values[name]["value"], (key.default)());
        let is_used = found == given && users.contains(&model.objective());
        if !is_used && *value != default {
            let (family, objective) = (model.info().family, model.objective());
            return Err(Error::Config(ConfigError::IllegalValue {
                key: key.name,
                found: value.to_string(),
                place: config.origin(name).to_string(),
                expected: format!(
                    "{default}, its default: it does nothing for this {family} model for {objective} on such data"
                ),
            }));
        }
    }
    Ok(())
}
