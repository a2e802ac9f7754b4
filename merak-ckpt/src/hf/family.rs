//! What the families of models have in common that files do not say.

use super::Found;
use crate::Cut;
use serde_json::Value;

/// A family of causal language models.
#[derive(Debug)]
pub(crate) struct Family {
    model_type: &'static str,
    /// Module of the model without its head.
    prefix: &'static str,
    /// The input embedding.
    embedding: &'static str,
    /// The head, which may be the embedding.
    pub(crate) head: &'static str,
    /// Whether it is where the configuration does not say.
    tied: bool,
    /// Whether linear weights are stored `[in, out]`.
    is_transposed: bool,
    /// Ends of names, the dim that tensor parallelism cuts, and its equal parts.
    cuts: &'static [(&'static str, usize, usize)],
}

const LLAMA_CUTS: &[(&str, usize, usize)] = &[
    (".q_proj.weight", 0, 1),
    (".q_proj.bias", 0, 1),
    (".k_proj.weight", 0, 1),
    (".k_proj.bias", 0, 1),
    (".v_proj.weight", 0, 1),
    (".v_proj.bias", 0, 1),
    (".o_proj.weight", 1, 1),
    (".gate_proj.weight", 0, 1),
    (".gate_proj.bias", 0, 1),
    (".up_proj.weight", 0, 1),
    (".up_proj.bias", 0, 1),
    (".down_proj.weight", 1, 1),
];

const LLAMA: Family = Family {
    model_type: "llama",
    prefix: "model.",
    embedding: "model.embed_tokens.weight",
    head: "lm_head.weight",
    tied: false,
    is_transposed: false,
    cuts: LLAMA_CUTS,
};

const FAMILIES: [Family; 7] = [
    Family {
        model_type: "gpt2",
        prefix: "transformer.",
        embedding: "transformer.wte.weight",
        head: "lm_head.weight",
        tied: true,
        is_transposed: true,
        cuts: &[
            (".attn.c_attn.weight", 1, 3),
            (".attn.c_attn.bias", 0, 3),
            (".attn.c_proj.weight", 0, 1),
            (".mlp.c_fc.weight", 1, 1),
            (".mlp.c_fc.bias", 0, 1),
            (".mlp.c_proj.weight", 0, 1),
        ],
    },
    LLAMA,
    Family {
        model_type: "mistral",
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        ..LLAMA
    },
    Family {
        model_type: "opt",
        is_transposed: false,
        prefix: "model.",
        embedding: "model.decoder.embed_tokens.weight",
        head: "lm_head.weight",
        tied: true,
        cuts: &[
            (".q_proj.weight", 0, 1),
            (".q_proj.bias", 0, 1),
            (".k_proj.weight", 0, 1),
            (".k_proj.bias", 0, 1),
            (".v_proj.weight", 0, 1),
            (".v_proj.bias", 0, 1),
            (".out_proj.weight", 1, 1),
            (".fc1.weight", 0, 1),
            (".fc1.bias", 0, 1),
            (".fc2.weight", 1, 1),
        ],
    },
    // Query, key and value alternate head by head, so slices are whole heads.
    Family {
        model_type: "gpt_neox",
        is_transposed: false,
        prefix: "gpt_neox.",
        embedding: "gpt_neox.embed_in.weight",
        head: "embed_out.weight",
        tied: false,
        cuts: &[
            (".query_key_value.weight", 0, 1),
            (".query_key_value.bias", 0, 1),
            (".attention.dense.weight", 1, 1),
            (".dense_h_to_4h.weight", 0, 1),
            (".dense_h_to_4h.bias", 0, 1),
            (".dense_4h_to_h.weight", 1, 1),
        ],
    },
];

/// The family of this `model_type`.
pub(crate) fn of(model_type: &str) -> Option<&'static Family> {
    FAMILIES
        .iter()
        .find(|family| family.model_type == model_type)
}

impl Family {
    /// Whether the head is the embedding.
    pub(crate) fn is_tied(&self, config: &Value) -> bool {
        let said = config.get("tie_word_embeddings").and_then(Value::as_bool);
        said.unwrap_or(self.tied)
    }

    /// The name of the embedding.
    pub(crate) fn embedding(&self) -> &'static str {
        self.embedding
    }

    /// What the names of the model without its head begin with in the model with it.
    pub(crate) fn prefix(&self) -> &'static str {
        self.prefix
    }

    /// Whether this linear weight is stored `[in, out]`.
    pub(crate) fn is_transposed(&self, name: &str) -> bool {
        self.is_transposed && self.cuts.iter().any(|(end, ..)| name.ends_with(end))
    }

    /// How tensor parallelism cuts a parameter.
    pub(crate) fn cut(&self, name: &str, shape: &[usize]) -> Option<Cut> {
        let (_, dim, parts) = self.cuts.iter().find(|(end, ..)| name.ends_with(end))?;
        let size = shape.get(*dim)?;
        size.is_multiple_of(*parts)
            .then(|| Cut::new(*dim, vec![size / parts; *parts]))
    }

    /// Gives tensors the names of the model with its head, and takes out what it has no
    /// parameter for; the names of these go to `left_out`.
    pub(super) fn normalise(
        &self,
        config: &Value,
        found: &mut Vec<(String, Found)>,
        left_out: &mut Vec<String>,
    ) {
        let is_bare = found
            .iter()
            .all(|(_, tensor)| !tensor.name.starts_with(self.prefix));
        if is_bare {
            for (_, tensor) in found
                .iter_mut()
                .filter(|(_, tensor)| tensor.name != self.head)
            {
                tensor.name.insert_str(0, self.prefix);
            }
        }
        let has_embedding = found
            .iter()
            .any(|(_, tensor)| tensor.name == self.embedding);
        let tied_head = self.is_tied(config) && has_embedding;
        found.retain(|(_, tensor)| {
            let is_head = tied_head && tensor.name == self.head;
            let is_needed = !is_head && !is_buffer(tensor);
            if !is_needed {
                left_out.push(tensor.name.clone());
            }
            is_needed
        });
    }
}

/// Whether a tensor is one that older versions saved though it follows from the configuration.
fn is_buffer(tensor: &Found) -> bool {
    let name = tensor.name.as_str();
    let is_mask = name.ends_with(".attn.bias") || name.ends_with(".attention.bias");
    is_mask && tensor.shape.len() == 4
        || name.ends_with(".masked_bias")
        || name.ends_with(".rotary_emb.inv_freq")
}
