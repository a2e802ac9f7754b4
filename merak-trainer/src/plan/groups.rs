//! What the optimizer is told of each parameter: whether it decays, how fast it learns, and whether
//! it is a hidden matrix.

use crate::{
    config::CheckedArguments,
    error::{Error, PlanError, Result},
};
use merak_mpu::names::nearest;
use merak_partition::head_params;
use merak_trace::{Graph, Param, ParamRole};
use merak_zero::ParamSpec;
use std::collections::BTreeSet;

/// The groups of a model's parameters: what its optimizer does differently with each.
#[derive(Debug)]
pub(crate) struct ParamGroups<'a> {
    args: &'a CheckedArguments,
    /// The weights of output heads.
    heads: BTreeSet<&'a str>,
    /// The parameters that precede the first layer.
    below_layers: BTreeSet<&'a str>,
    num_layers: usize,
}

impl<'a> ParamGroups<'a> {
    /// The groups of all parameters of a model.
    pub(crate) fn new(args: &'a CheckedArguments, model: &'a Graph) -> Self {
        let names = || model.params().iter().map(|param| param.name.as_str());
        let last = names().filter_map(layer_of).max();
        let below = names().take_while(|name| layer_of(name).is_none());
        Self {
            args,
            heads: head_params(model),
            below_layers: below.collect(),
            num_layers: last.map_or(0, |last| last.saturating_add(1)),
        }
    }

    /// What the optimizer knows of a parameter, of which a rank trains its slice.
    pub(crate) fn spec(&self, param: &Param, global_index: usize) -> ParamSpec {
        let (args, name) = (self.args, param.name.as_str());
        let mut spec = ParamSpec::new(name, &param.local.shape, global_index);
        let named = |parts: &[String]| parts.iter().any(|part| name.contains(part.as_str()));
        spec.decay = param.decays() && !args.no_decay_names.as_deref().is_some_and(named);
        let is_matrix = param.role == ParamRole::Weight && param.full.shape.len() == 2;
        spec.hidden_matrix = is_matrix && !self.heads.contains(name);
        spec.lr_scale = self.lr_scale(name);
        spec
    }

    /// The factor of a parameter's learning rate.
    fn lr_scale(&self, name: &str) -> f64 {
        let above = self.layers_above(name) as f64;
        self.args.lr_scales.of(name) * self.args.layerwise_lr_decay.powf(above)
    }

    /// The layers above a parameter. What precedes the first layer of a model lies below all of
    /// them; what else belongs to none, such as a last norm and a head, lies above.
    fn layers_above(&self, name: &str) -> usize {
        match layer_of(name) {
            Some(layer) => self.num_layers - layer,
            None if self.num_layers > 0 && self.below_layers.contains(name) => {
                self.num_layers.saturating_add(1)
            }
            None => 0,
        }
    }
}

/// Freezes what has a learning rate of 0: it gets no gradient, no optimizer state and no traffic.
pub(super) fn freeze(args: &CheckedArguments, model: &mut Graph) {
    let groups = ParamGroups::new(args, model);
    let params = model.params().iter();
    let rests = params.filter(|param| param.trainable && groups.lr_scale(&param.name) == 0.0);
    let rests: Vec<_> = rests
        .filter_map(|param| model.find_param(&param.name))
        .collect();
    for id in rests {
        model.param_mut(id).trainable = false;
    }
}

/// Checks that each part of a name that the arguments give is in the name of a parameter of the
/// whole model, frozen ones included: a rank has those of its stages only.
///
/// # Errors
/// [`PlanError::UnknownPart`].
pub(super) fn check(args: &CheckedArguments, model: &Graph) -> Result<()> {
    let names: Vec<&str> = model.params().iter().map(|p| p.name.as_str()).collect();
    let scaled = args.lr_scales.0.keys().map(|part| ("lr_scales", part));
    let kept = args.no_decay_names.iter().flatten();
    let mut given = scaled.chain(kept.map(|part| ("no_decay_names", part)));
    let is_known = |part: &str| names.iter().any(|name| name.contains(part));
    let Some((key, part)) = given.find(|(_, part)| !is_known(part)) else {
        return Ok(());
    };
    Err(Error::Plan(PlanError::UnknownPart {
        key,
        found: part.clone(),
        example: names.first().copied().unwrap_or_default().to_owned(),
        nearest: nearest_part(part, &names),
    }))
}

/// The most similar part of a name with as many words.
fn nearest_part(part: &str, names: &[&str]) -> Option<String> {
    let num_words = part.trim_matches('.').split('.').count();
    let parts_of = |name: &&str| -> Vec<String> {
        let words: Vec<_> = name.split('.').collect();
        words.windows(num_words).map(|run| run.join(".")).collect()
    };
    let parts: BTreeSet<String> = names.iter().flat_map(parts_of).collect();
    nearest(part, parts.iter().map(String::as_str)).map(str::to_owned)
}

/// The first number in the path of a parameter.
fn layer_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use merak_trace::models::{self, TraceOptions};

    fn specs(keys: &[&str]) -> Vec<(String, ParamSpec)> {
        let model = serde_json::json!({
            "model_type": "gpt2", "vocab_size": 17, "n_positions": 8, "n_embd": 16, "n_layer": 2,
            "n_head": 2, "tie_word_embeddings": false,
        });
        let model = models::from_config(&model).unwrap();
        let graph = model.trace(&TraceOptions::training(1, 8)).unwrap();
        let keys = keys.iter().flat_map(|key| ["--set", key]);
        let keys: Vec<_> = keys.map(str::to_owned).collect();
        let args = Config::load(None, [], &keys).unwrap().check().unwrap();
        let groups = ParamGroups::new(&args, &graph);
        let spec = |param: &Param| (param.name.clone(), groups.spec(param, 0));
        graph.params().iter().map(spec).collect()
    }

    fn spec(keys: &[&str], name: &str) -> ParamSpec {
        let found = specs(keys).into_iter().find(|(found, _)| found == name);
        found.unwrap().1
    }

    #[test]
    fn hidden_matrices_are_neither_embeddings_nor_the_head() {
        let specs = specs(&[]);
        let hidden = specs.iter().filter(|(_, spec)| spec.hidden_matrix);
        let hidden: Vec<_> = hidden.map(|(name, _)| name.as_str()).collect();
        let names = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"];
        let expected = [0, 1].map(|i| names.map(|name| format!("transformer.h.{i}.{name}.weight")));
        assert_eq!(hidden, expected.concat());
    }

    #[test]
    fn names_choose_what_decays_and_how_fast_it_learns() {
        let (fc, proj) = (
            "transformer.h.1.mlp.c_fc.weight",
            "transformer.h.1.mlp.c_proj.weight",
        );
        let keys = [
            "no_decay_names=[\"c_fc\"]",
            "lr_scales={\"mlp\": 0.5, \"h.1.mlp.c_p\": 3}",
        ];
        assert!(!spec(&keys, fc).decay && spec(&keys, proj).decay && spec(&[], fc).decay);
        let scale = |name| spec(&keys, name).lr_scale;
        assert!((scale(fc) - 0.5).abs() < 1e-12 && (scale(proj) - 3.0).abs() < 1e-12);
        assert!((scale("transformer.wte.weight") - 1.0).abs() < 1e-12);
    }

    #[test]
    fn each_layer_below_the_top_learns_more_slowly() {
        let of = |name: &str| spec(&["layerwise_lr_decay=0.5"], name).lr_scale;
        for (name, expected) in [
            ("lm_head.weight", 1.0),
            ("transformer.ln_f.weight", 1.0),
            ("transformer.h.1.ln_1.weight", 0.5),
            ("transformer.h.0.ln_1.weight", 0.25),
            ("transformer.wpe.weight", 0.125),
        ] {
            assert!((of(name) - expected).abs() < 1e-12, "{name}");
        }
    }
}
