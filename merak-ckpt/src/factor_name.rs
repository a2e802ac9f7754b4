//! The names of an adapter's own parameters, in a model and in PEFT's file.

use std::fmt;

/// What PEFT puts before the names of a model's modules.
pub(crate) const PREFIX: &str = "base_model.model.";

/// The name of an adapter's own parameter beside a layer of a model.
///
/// ```text
/// h.0.attn.c_attn.lora_A.default.weight             in a model and in its checkpoints
/// layer           role   adapter
/// base_model.model.h.0.attn.c_attn.lora_A.weight    in PEFT's file, which has one adapter
/// ```
///
/// ```
/// use merak_ckpt::{FactorName, FactorRole};
///
/// let name = "h.0.attn.c_attn.lora_A.default.weight";
/// let factor = FactorName::parse(name).expect("it is a factor");
/// assert_eq!((factor.layer, factor.adapter), ("h.0.attn.c_attn", "default"));
/// let second = FactorName { role: FactorRole::B, ..factor };
/// assert_eq!(second.to_string(), "h.0.attn.c_attn.lora_B.default.weight");
/// assert_eq!(FactorName::parse("h.0.attn.c_attn.weight"), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FactorName<'a> {
    /// The layer that the adapter stands beside.
    pub layer: &'a str,
    /// What the parameter is to the adapter.
    pub role: FactorRole,
    /// The adapter's name.
    pub adapter: &'a str,
}

/// What a parameter of an adapter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactorRole {
    /// The first factor of a linear layer or of a convolution, from the inputs to the rank.
    A,
    /// The second factor, from the rank to the outputs.
    B,
    /// The first factor of a table, from the rows to the rank.
    EmbeddingA,
    /// The second factor of a table, from the rank to the width.
    EmbeddingB,
    /// A magnitude for each output of a layer (`use_dora`).
    Magnitude,
}

impl<'a> FactorName<'a> {
    /// Reads the name of a parameter of a model; `None` for a parameter of no adapter. The end
    /// `.weight` may be missing.
    pub fn parse(name: &'a str) -> Option<Self> {
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let (rest, adapter) = stem.rsplit_once('.')?;
        let (layer, role) = rest.rsplit_once('.')?;
        let mut roles = FactorRole::ALL.into_iter();
        let role = roles.find(|known| known.as_str() == role)?;
        let is_whole = !layer.is_empty() && !adapter.is_empty();
        is_whole.then_some(Self {
            layer,
            role,
            adapter,
        })
    }

    /// The name in PEFT's file.
    pub(crate) fn in_file(&self) -> String {
        let Self { layer, role, .. } = self;
        format!("{PREFIX}{layer}.{}{}", role.as_str(), role.end_in_file())
    }

    /// Layer and role of a name in PEFT's file after [`PREFIX`]; `None` for no factor.
    pub(crate) fn of_file(name: &str) -> Option<(&str, FactorRole)> {
        FactorRole::ALL.into_iter().find_map(|role| {
            let stem = name.strip_suffix(role.end_in_file())?;
            let layer = stem.strip_suffix(role.as_str())?.strip_suffix('.')?;
            Some((layer, role))
        })
    }

    /// Whether a name, read or not, is that of an adapter's own parameter: kinds of adapters that
    /// are not read have other roles.
    pub(crate) fn is_of_adapter(name: &str) -> bool {
        name.contains(".lora_")
    }
}

impl fmt::Display for FactorName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.layer, self.role.in_layer(self.adapter))
    }
}

impl FactorRole {
    const ALL: [Self; 5] = [
        Self::A,
        Self::B,
        Self::EmbeddingA,
        Self::EmbeddingB,
        Self::Magnitude,
    ];

    /// Whether PEFT calls a factor's module so, in every adapter.
    #[cfg(feature = "graph")]
    pub(crate) fn is_name(name: &str) -> bool {
        Self::ALL.into_iter().any(|role| role.as_str() == name)
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::A => "lora_A",
            Self::B => "lora_B",
            Self::EmbeddingA => "lora_embedding_A",
            Self::EmbeddingB => "lora_embedding_B",
            Self::Magnitude => "lora_magnitude_vector",
        }
    }

    /// Role and adapter, as in `lora_A.default`: PEFT's module for a factor of a linear layer.
    pub(crate) fn module(self, adapter: &str) -> String {
        format!("{}.{adapter}", self.as_str())
    }

    /// The name within the layer, as in `lora_A.default.weight`.
    pub(crate) fn in_layer(self, adapter: &str) -> String {
        let end = match self {
            Self::A | Self::B | Self::Magnitude => ".weight",
            Self::EmbeddingA | Self::EmbeddingB => "",
        };
        self.module(adapter) + end
    }

    const fn end_in_file(self) -> &'static str {
        match self {
            Self::A | Self::B => ".weight",
            Self::EmbeddingA | Self::EmbeddingB | Self::Magnitude => "",
        }
    }
}

/// PEFT's module for the dropout of a layer's inputs, within the layer. It has no parameters.
#[cfg(feature = "graph")]
pub(crate) fn dropout_module(adapter: &str) -> String {
    format!("lora_dropout.{adapter}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_same_read_and_written_in_a_model_and_in_a_file() {
        let all = FactorRole::ALL.map(|role| FactorName {
            layer: "h.0.attn.c_attn",
            role,
            adapter: "mine",
        });
        let mut table = Vec::new();
        for factor in all {
            let (name, in_file) = (factor.to_string(), factor.in_file());
            assert_eq!(FactorName::parse(&name), Some(factor));
            let place = in_file.strip_prefix(PREFIX).unwrap();
            let read = FactorName::of_file(place);
            assert_eq!(read, Some((factor.layer, factor.role)));
            table.push(format!("{name}  {in_file}"));
        }
        insta::assert_snapshot!(table.join("\n"), @"
        h.0.attn.c_attn.lora_A.mine.weight  base_model.model.h.0.attn.c_attn.lora_A.weight
        h.0.attn.c_attn.lora_B.mine.weight  base_model.model.h.0.attn.c_attn.lora_B.weight
        h.0.attn.c_attn.lora_embedding_A.mine  base_model.model.h.0.attn.c_attn.lora_embedding_A
        h.0.attn.c_attn.lora_embedding_B.mine  base_model.model.h.0.attn.c_attn.lora_embedding_B
        h.0.attn.c_attn.lora_magnitude_vector.mine.weight  base_model.model.h.0.attn.c_attn.lora_magnitude_vector
        ");
    }

    #[test]
    fn names_of_a_model_and_parts_of_names_are_no_factors() {
        for name in [
            "h.0.attn.c_attn.weight",
            "h.0.attn.c_attn.base_layer.weight",
            "h.0.attn.c_attn.lora_C.default.weight",
            "lora_A.default.weight",
            "h.0.lora_A..weight",
            "h.0.lora_A.default.bias",
            "lora_A",
            "",
        ] {
            assert_eq!(FactorName::parse(name), None, "{name}");
        }
        let older = FactorName::parse("h.0.lora_magnitude_vector.default");
        assert_eq!(older.map(|name| name.role), Some(FactorRole::Magnitude));
        assert_eq!(FactorName::of_file("h.0.lora_A.default.weight"), None);
    }
}
