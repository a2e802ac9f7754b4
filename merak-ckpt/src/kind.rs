//! What a stored tensor is.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The role of a stored tensor in the model.
///
/// One name may occur once per kind: a parameter and its optimizer state share the name.
/// In files a kind is a string: `parameter`, or the name of the optimizer state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A parameter of the model (or a buffer that is saved with it).
    Parameter,
    /// State that an optimizer keeps for the parameter, as in `adamw.exp_avg` or `master`.
    Optimizer(String),
}

impl Kind {
    /// Optimizer state of this name.
    pub fn optimizer(name: impl Into<String>) -> Self {
        Self::Optimizer(name.into())
    }

    /// The least stage of ZeRO whose ranks divide tensors of this kind (`merak-zero` states it for
    /// a run; checkpoints that are resharded are laid out alike).
    pub fn divided_from(&self) -> usize {
        match self {
            Self::Parameter => 3,
            Self::Optimizer(_) => 1,
        }
    }

    /// The kind as files spell it.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Parameter => PARAMETER,
            Self::Optimizer(name) => name,
        }
    }

    /// Whether the name can be told apart from others: `a-z`, `0-9`, `_`, `.`, and not `parameter`.
    pub(crate) fn is_valid(&self) -> bool {
        match self {
            Self::Parameter => true,
            Self::Optimizer(name) => is_state_name(name),
        }
    }
}

const PARAMETER: &str = "parameter";

fn is_state_name(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '.');
    !name.is_empty() && name.len() <= 64 && name != PARAMETER && name.chars().all(legal)
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.as_str() {
            PARAMETER => Ok(Self::Parameter),
            name if is_state_name(name) => Ok(Self::Optimizer(text)),
            _ => Err(D::Error::custom(format!("`{text}` is no kind of tensor"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_strings_and_parameters_sort_first() {
        let state = Kind::optimizer("adamw.exp_avg");
        assert!(Kind::Parameter < state);
        for kind in [Kind::Parameter, state] {
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(serde_json::from_str::<Kind>(&json).unwrap(), kind);
        }
        assert!(serde_json::from_str::<Kind>("\"Exp Avg\"").is_err());
        assert!(!Kind::optimizer("parameter").is_valid());
    }
}
