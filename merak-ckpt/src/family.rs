//! What the files of each model family do not say: names that differ, tied weights, cuts.

mod parts;

pub(crate) use parts::{EMBEDDING, Heads, Module, Size, Stack, number};

use crate::{Cut, StoredTensor};
use parts::{PAIRS, Parts, architecture};
use serde_json::Value;

/// A family of models. Modules are named by the ends of their paths.
#[derive(Debug)]
pub(crate) struct Family {
    model_types: &'static [&'static str],
    /// Module of the model without its head; empty where names are the same with and without.
    prefix: &'static str,
    /// What every model has.
    pub(crate) parts: &'static Parts,
    /// The output projection of a language model and what it may be tied to; none in other models.
    tie: Option<Tie>,
    /// Whether linear weights are stored `[in, out]`.
    is_transposed: bool,
    /// Other names that files may have, such as a model's names in memory, and the usual names.
    aliases: &'static [(&'static str, &'static str)],
    /// The differences between layer names in memory and in files: the text between the prefix and
    /// a layer's number, and the parts of a layer; each first in memory, then in files.
    in_memory: Option<[&'static str; 2]>,
    memory_parts: &'static [(&'static str, &'static str)],
    /// Linear layers whose outputs tensor parallelism cuts.
    columns: &'static [&'static str],
    /// The one of them that has several equal parts, and their number.
    fused: Option<(&'static str, usize)>,
    /// Linear layers whose inputs it cuts.
    rows: &'static [&'static str],
    /// Tables whose columns it cuts.
    tables: &'static [&'static str],
    /// Name endings of tensors that files may have but models do not use, and the architectures
    /// that do use them.
    unused: &'static [(&'static str, &'static [&'static str])],
}

/// A head that may be the input embedding.
#[derive(Debug)]
pub(crate) struct Tie {
    /// The head's weight.
    pub(crate) head: &'static str,
    /// The input embedding.
    pub(crate) embedding: &'static str,
    /// Whether they are tied where the configuration does not say.
    is_default: bool,
    /// A parameter beside the head that files may have under two names: the one in use where head
    /// and embedding are tied, and the one in use where they are not. In the second case
    /// `transformers` creates both.
    pub(crate) twin: Option<[&'static str; 2]>,
    /// A field of the configuration that says the same as `tie_word_embeddings` where it is absent.
    follower: Option<&'static str>,
}

/// The fields that most families share.
const PLAIN: Family = Family {
    model_types: &[],
    prefix: "",
    parts: &parts::UNKNOWN,
    tie: None,
    is_transposed: false,
    aliases: &[],
    in_memory: None,
    memory_parts: &[],
    columns: &[],
    fused: None,
    rows: &[],
    tables: &[],
    unused: &[],
};

/// The layers of BERT, by which those of ViT are named.
const ENCODER: Family = Family {
    columns: &["query", "key", "value", "intermediate.dense"],
    rows: &["output.dense"],
    ..PLAIN
};

/// Name prefixes of classification heads.
const TASK_HEADS: [&str; 4] = [
    "classifier.",
    "classification_head.",
    "qa_outputs.",
    "score.",
];

/// Name endings of architectures with a language model's head.
const HEADED: [&str; 5] = [
    "LMHeadModel",
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForPreTraining",
];

const FAMILIES: [Family; 7] = [
    Family {
        model_types: &["gpt2"],
        prefix: "transformer.",
        parts: &parts::GPT2,
        tie: Some(Tie::new("lm_head.weight", "transformer.wte.weight", true)),
        is_transposed: true,
        columns: &["attn.c_attn", "mlp.c_fc"],
        fused: Some(("attn.c_attn", 3)),
        rows: &["attn.c_proj", "mlp.c_proj"],
        ..PLAIN
    },
    Family {
        model_types: &["llama", "mistral", "qwen2", "qwen3"],
        prefix: "model.",
        parts: &parts::LLAMA,
        tie: Some(Tie::new(
            "lm_head.weight",
            "model.embed_tokens.weight",
            false,
        )),
        columns: &["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
        rows: &["o_proj", "down_proj"],
        ..PLAIN
    },
    Family {
        model_types: &["opt"],
        prefix: "model.",
        parts: &parts::OPT,
        tie: Some(Tie::new(
            "lm_head.weight",
            "model.decoder.embed_tokens.weight",
            true,
        )),
        columns: &["q_proj", "k_proj", "v_proj", "fc1"],
        rows: &["out_proj", "fc2"],
        ..PLAIN
    },
    // Query, key and value alternate head by head, so slices are whole heads.
    Family {
        model_types: &["gpt_neox"],
        prefix: "gpt_neox.",
        parts: &parts::GPT_NEOX,
        tie: Some(Tie::new(
            "embed_out.weight",
            "gpt_neox.embed_in.weight",
            false,
        )),
        aliases: &[("lm_head.weight", "embed_out.weight")],
        columns: &["query_key_value", "dense_h_to_4h"],
        rows: &["attention.dense", "dense_4h_to_h"],
        ..PLAIN
    },
    Family {
        model_types: &["bert"],
        prefix: "bert.",
        parts: &parts::BERT,
        tie: Some(Tie {
            twin: Some(["cls.predictions.bias", "cls.predictions.decoder.bias"]),
            ..Tie::new(
                "cls.predictions.decoder.weight",
                "bert.embeddings.word_embeddings.weight",
                true,
            )
        }),
        // Positions from 0 on, and the head for pairs of sentences.
        unused: &[
            ("embeddings.position_ids", &[]),
            ("cls.seq_relationship.weight", PAIRS),
            ("cls.seq_relationship.bias", PAIRS),
        ],
        ..ENCODER
    },
    Family {
        model_types: &["vit"],
        prefix: "vit.",
        parts: &parts::VIT,
        in_memory: Some(["layers.", "encoder.layer."]),
        memory_parts: &[
            ("attention.q_proj", "attention.attention.query"),
            ("attention.k_proj", "attention.attention.key"),
            ("attention.v_proj", "attention.attention.value"),
            ("attention.o_proj", "attention.output.dense"),
            ("mlp.fc1", "intermediate.dense"),
            ("mlp.fc2", "output.dense"),
        ],
        unused: &[
            ("vit.pooler.dense.weight", &["ViTModel"]),
            ("vit.pooler.dense.bias", &["ViTModel"]),
        ],
        ..ENCODER
    },
    Family {
        model_types: &["t5"],
        parts: &parts::T5,
        tie: Some(Tie {
            follower: Some("scale_decoder_outputs"),
            ..Tie::new("lm_head.weight", "shared.weight", true)
        }),
        columns: &[
            "Attention.q",
            "Attention.k",
            "Attention.v",
            "DenseReluDense.wi",
            "DenseReluDense.wi_0",
            "DenseReluDense.wi_1",
        ],
        rows: &["Attention.o", "DenseReluDense.wo"],
        tables: &["relative_attention_bias"],
        // Other names of the embedding, and a table that attention to the encoder never used.
        unused: &[
            ("encoder.embed_tokens.weight", &[]),
            ("decoder.embed_tokens.weight", &[]),
            ("EncDecAttention.relative_attention_bias.weight", &[]),
        ],
        ..PLAIN
    },
];

/// The family of this `model_type`.
pub(crate) fn of(model_type: &str) -> Option<&'static Family> {
    FAMILIES
        .iter()
        .find(|family| family.model_types.contains(&model_type))
}

/// The family of a configuration's model, where it is known.
pub(crate) fn family_of(config: &Value) -> Option<&'static Family> {
    of(config.get("model_type")?.as_str()?)
}

impl Family {
    /// The head of a language model and the embedding.
    pub(crate) fn tie(&self, config: &Value) -> Option<&Tie> {
        let classifies = architecture(config).is_some_and(|name| name.ends_with("Classification"));
        self.tie.as_ref().filter(|_| !classifies)
    }

    /// The head, where the configuration's model has one that is not the embedding.
    pub(crate) fn own_head(&self, config: &Value) -> Option<&'static str> {
        let tie = self.tie(config)?;
        let has_one = self.has_head(config) && !tie.is_one(config);
        has_one.then_some(tie.head)
    }

    /// Whether the configuration's model is a language model with its head; so is one that names no
    /// architecture.
    pub(crate) fn has_head(&self, config: &Value) -> bool {
        let is_headed = |name: &str| HEADED.iter().any(|end| name.ends_with(end));
        self.tie(config).is_some() && architecture(config).is_none_or(is_headed)
    }

    /// The bias of a head that the configuration names.
    pub(crate) fn head_bias(&self, config: &Value) -> Option<&'static str> {
        let tie = self.tie(config)?;
        let has_head = HEADED
            .iter()
            .any(|end| architecture(config).is_some_and(|name| name.ends_with(end)));
        let [tied, own] = tie.twin.filter(|_| has_head)?;
        Some(if tie.is_one(config) { tied } else { own })
    }

    /// Whether this is a table, which one layer may have alone.
    pub(crate) fn is_table(&self, name: &str) -> bool {
        let module = name.strip_suffix(".weight");
        module.is_some_and(|module| self.tables.iter().any(|end| module.ends_with(end)))
    }

    /// The prefix that the bare model's names get in the model with its head.
    pub(crate) fn prefix(&self) -> &'static str {
        self.prefix
    }

    /// Whether this linear weight is stored `[in, out]`.
    pub(crate) fn is_transposed(&self, name: &str) -> bool {
        let weight = name.strip_suffix(".weight");
        let is_linear = |module| self.column(module).is_some() || self.is_row(module);
        self.is_transposed && weight.is_some_and(is_linear)
    }

    /// The parts of a layer whose outputs are cut.
    fn column(&self, module: &str) -> Option<usize> {
        let is_one = self.columns.iter().any(|end| module.ends_with(end));
        let fused = self.fused.filter(|(end, _)| module.ends_with(end));
        is_one.then(|| fused.map_or(1, |(_, parts)| parts))
    }

    fn is_row(&self, module: &str) -> bool {
        self.rows.iter().any(|end| module.ends_with(end))
    }

    /// How tensor parallelism cuts a parameter.
    pub(crate) fn cut(&self, name: &str, shape: &[usize]) -> Option<Cut> {
        let (module, kind) = name.rsplit_once('.')?;
        let (dim, parts) = match (kind, self.column(module)) {
            ("weight", Some(parts)) => (usize::from(self.is_transposed), parts),
            ("bias", Some(parts)) => (0, parts),
            ("weight", None) if self.is_row(module) => (usize::from(!self.is_transposed), 1),
            ("weight", None) if self.is_table(name) => (1, 1),
            _ => return None,
        };
        let size = shape.get(dim)?;
        size.is_multiple_of(parts)
            .then(|| Cut::new(dim, vec![size / parts; parts]))
    }

    /// The name in files for this name in memory, or the other name of a parameter that has two.
    pub(crate) fn other_name(&self, config: &Value, name: &str) -> Option<&'static str> {
        let alias = self.aliases.iter().find(|(alias, _)| *alias == name);
        let twins = self.tie(config).and_then(|tie| tie.twin);
        let twin = twins.and_then(|[one, other]| match name {
            name if name == one => Some(other),
            name if name == other => Some(one),
            _ => None,
        });
        alias.map(|(_, name)| *name).or(twin)
    }

    /// The name in files for this name in memory of a layer's tensor, where the two differ.
    fn name_in_files(&self, name: &str) -> Option<String> {
        let [before, in_files] = self.in_memory?;
        let bare = name.strip_prefix(self.prefix).unwrap_or(name);
        let start = &name[..name.len() - bare.len()];
        let (number, within) = bare.strip_prefix(before)?.split_once('.')?;
        number.parse::<usize>().ok()?;
        let part = self.memory_parts.iter().find_map(|(part, in_files)| {
            let rest = within.strip_prefix(part)?;
            rest.starts_with('.').then(|| format!("{in_files}{rest}"))
        });
        let within = part.as_deref().unwrap_or(within);
        Some(format!("{start}{in_files}{number}.{within}"))
    }

    /// Gives tensors the names of the model with its head.
    pub(crate) fn rename(&self, config: &Value, found: &mut [(String, StoredTensor)]) {
        for (alias, name) in self.aliases {
            if found.iter().all(|(_, tensor)| tensor.name != *name) {
                let tensor = found.iter_mut().find(|(_, t)| t.name == *alias);
                if let Some((_, tensor)) = tensor {
                    (*name).clone_into(&mut tensor.name);
                }
            }
        }
        for (_, tensor) in found.iter_mut() {
            if let Some(name) = self.name_in_files(&tensor.name) {
                tensor.name = name;
            }
        }
        let tie = self.tie(config);
        let is_bare = found
            .iter()
            .all(|(_, tensor)| !tensor.name.starts_with(self.prefix));
        for (_, tensor) in found {
            if is_bare && tie.is_none_or(|tie| tensor.name != tie.head) {
                tensor.name.insert_str(0, self.prefix);
            }
            // The first checkpoints of BERT name the weights of their norms so.
            for (old, new) in [(".gamma", ".weight"), (".beta", ".bias")] {
                if let Some(module) = tensor.name.strip_suffix(old) {
                    tensor.name = format!("{module}{new}");
                }
            }
        }
    }

    /// Whether files may have a tensor of this name that the configuration's model does not use.
    pub(crate) fn is_unused(&self, config: &Value, name: &str) -> bool {
        let architecture = architecture(config);
        let mut all = self.unused.iter();
        all.any(|(end, users)| {
            name.ends_with(end) && !architecture.is_some_and(|name| users.contains(&name))
        })
    }

    /// Whether some model of the family has a tensor of this name, or files of its models may.
    pub(crate) fn has_place_for(&self, config: &Value, name: &str) -> bool {
        let is_named = |name: &str| self.parts.has(name);
        let tie = self.tie.as_ref();
        let is_end = tie.is_some_and(|tie| {
            name == tie.head
                || name == tie.embedding
                || tie.twin.is_some_and(|twin| twin.contains(&name))
        });
        let is_alias = self.aliases.iter().any(|(alias, _)| *alias == name);
        let is_head = TASK_HEADS.iter().any(|head| name.starts_with(head));
        is_named(name)
            || name.strip_prefix("transformer.").is_some_and(is_named)
            || is_end
            || is_alias
            || is_head
            || self.is_table(name)
            || self.is_unused(config, name)
            || is_buffer_name(name)
    }

    /// Removes tensors that are no parameters of the model; their names go to `left_out`.
    pub(crate) fn leave_out(
        &self,
        config: &Value,
        found: &mut Vec<(String, StoredTensor)>,
        left_out: &mut Vec<String>,
    ) {
        let tie = self.tie(config);
        let tied = tie.filter(|tie| {
            let is_there = |(_, tensor): &(String, StoredTensor)| tensor.name == tie.embedding;
            tie.is_one(config) && found.iter().any(is_there)
        });
        let twin = tie.and_then(|tie| tie.unused_twin(config, found));
        found.retain(|(_, tensor)| {
            let is_head = tied.is_some_and(|tie| tensor.name == tie.head);
            let is_twin = twin == Some(tensor.name.as_str());
            let is_unused = self.is_unused(config, &tensor.name);
            let is_needed = !is_head && !is_twin && !is_unused && !is_buffer(tensor);
            if !is_needed {
                left_out.push(tensor.name.clone());
            }
            is_needed
        });
    }
}

/// Sets in a `config.json` whether head and embedding are tied. A field whose default follows from
/// the tie keeps its value: whether T5 scales the input of its head.
pub fn set_tie(config: &mut Value, is_one: bool) {
    let tie = family_of(config).and_then(|family| family.tie(config));
    let follower = tie.and_then(|tie| Some((tie.follower?, tie.is_one(config))));
    let Some(fields) = config.as_object_mut() else {
        return;
    };
    if let Some((name, was_one)) = follower {
        let field = fields.entry(name).or_insert(Value::Null);
        if field.is_null() {
            *field = was_one.into();
        }
    }
    fields.insert("tie_word_embeddings".to_owned(), is_one.into());
}

impl Tie {
    const fn new(head: &'static str, embedding: &'static str, is_default: bool) -> Self {
        Self {
            head,
            embedding,
            is_default,
            twin: None,
            follower: None,
        }
    }

    /// The name of the twin that is not in use. Where a file has only that one, as version 4 of
    /// transformers writes a head of its own, the tensor gets the name in use.
    fn unused_twin(
        &self,
        config: &Value,
        found: &mut [(String, StoredTensor)],
    ) -> Option<&'static str> {
        let [mut used, mut unused] = self.twin?;
        if !self.is_one(config) {
            std::mem::swap(&mut used, &mut unused);
        }
        if found.iter().all(|(_, tensor)| tensor.name != used) {
            let only = found.iter_mut().find(|(_, tensor)| tensor.name == unused);
            if let Some((_, tensor)) = only {
                used.clone_into(&mut tensor.name);
            }
        }
        Some(unused)
    }

    /// Whether the configuration ties head and embedding.
    pub(crate) fn is_one(&self, config: &Value) -> bool {
        let said = config.get("tie_word_embeddings").and_then(Value::as_bool);
        said.unwrap_or(self.is_default)
    }
}

/// Whether a tensor is a buffer that older versions saved although the configuration determines it.
fn is_buffer(tensor: &StoredTensor) -> bool {
    let name = tensor.name.as_str();
    is_buffer_name(name) && (!is_mask_name(name) || tensor.shape.len() == 4)
}

fn is_buffer_name(name: &str) -> bool {
    is_mask_name(name) || name.ends_with(".masked_bias") || name.ends_with(".rotary_emb.inv_freq")
}

fn is_mask_name(name: &str) -> bool {
    name.ends_with(".attn.bias") || name.ends_with(".attention.bias")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_parameter_is_found_under_its_other_names() {
        let other = |model_type: &str, name: &str| {
            let config = json!({ "model_type": model_type });
            of(model_type).and_then(|family| family.other_name(&config, name))
        };
        let (tied, own) = ("cls.predictions.bias", "cls.predictions.decoder.bias");
        assert_eq!(
            other("gpt_neox", "lm_head.weight"),
            Some("embed_out.weight")
        );
        assert_eq!(other("bert", own), Some(tied));
        assert_eq!(other("bert", tied), Some(own));
        assert_eq!(other("gpt2", "lm_head.weight"), None);
    }

    #[cfg(feature = "graph")]
    #[test]
    fn classifiers_of_graphs_are_among_the_heads_of_files() {
        use merak_trace::models;
        let families = models::known_families().filter_map(|name| Some((of(name)?, name)));
        let mut heads = 0;
        for (files, name) in families {
            let family = models::family(name).unwrap();
            let outside = |module: &&&str| !module.starts_with(files.prefix);
            for module in family.classifier.iter().filter(outside) {
                let head = format!("{module}.");
                assert!(TASK_HEADS.contains(&head.as_str()), "{name}: {module}");
                heads += 1;
            }
        }
        assert!(heads > 1, "{heads}");
    }
}
