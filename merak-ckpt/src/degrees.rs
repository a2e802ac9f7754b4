//! Whether a run can have the degrees that a checkpoint is written for.
//!
//! Any run reads any checkpoint, whatever degrees wrote it. So degrees that no run has cost a
//! warning only.

use crate::family::{Heads, family_of};
use crate::plan::PlannedFile;
use crate::words::brief;
use crate::{Kind, TensorEntry, Topology};
use serde_json::Value;
use std::collections::BTreeSet;

/// Most degrees that a warning proposes.
const MAX_PROPOSED: usize = 8;
/// Largest degree that is proposed.
const MAX_DEGREE: usize = 1 << 16;

/// Warns where no run has the tensor-parallel degree, and of pipeline stages without tensors.
/// `config` is the model's `config.json`, where there is one.
pub(crate) fn warn(
    config: Option<&Value>,
    tensors: &[TensorEntry],
    topology: Topology,
    files: &[PlannedFile],
) {
    let Topology { tp, pp, .. } = topology;
    if let Some((reason, possible)) = misfit(config, tensors, tp) {
        tracing::warn!(
            tp,
            reason,
            possible,
            "no run has this tensor-parallel degree; a run of any other reads the checkpoint"
        );
    }
    let empty = empty_stages(topology, files);
    if let Some(first) = empty.first() {
        tracing::warn!(
            pp,
            num_stages = empty.len(),
            first,
            "pipeline stages without tensors get no files: tensors are dealt out whole, evenly by their bytes; \
             a run of any degree reads the checkpoint"
        );
    }
}

/// Why no run has a tensor-parallel degree, and degrees that a run may have.
fn misfit(config: Option<&Value>, tensors: &[TensorEntry], tp: usize) -> Option<(String, String)> {
    let config = config.filter(|config| family_of(config).is_some());
    let heads = config.and_then(Heads::of);
    let key_size = heads.and_then(|heads| heads.key_size);
    let cuts = tensors
        .iter()
        .filter(|tensor| tensor.kind == Kind::Parameter)
        .filter_map(|tensor| Some((tensor.name.as_str(), tensor.cut.as_ref()?)));
    let sizes = cuts.flat_map(|(name, cut)| cut.parts.iter().map(move |size| (name, *size)));
    // Their heads decide.
    let sizes: Vec<_> = sizes.filter(|(_, size)| Some(*size) != key_size).collect();
    let found = reason(heads, &sizes, tp)?;
    let queries = heads.map(|heads| heads.queries);
    let least = sizes.iter().map(|(_, size)| *size).chain(queries).min();
    let possible = (1..=least.unwrap_or(1).min(MAX_DEGREE))
        .filter(|&tp| reason(heads, &sizes, tp).is_none())
        .map(|tp| tp.to_string());
    let possible: Vec<_> = possible.take(MAX_PROPOSED).collect();
    Some((found, possible.join(", ")))
}

/// Why heads and sizes, by their tensors' names, cannot be shared out over `tp` ranks.
fn reason(heads: Option<Heads>, sizes: &[(&str, usize)], tp: usize) -> Option<String> {
    if let Some(Heads { queries, keys, .. }) = heads {
        if !queries.is_multiple_of(tp) {
            return Some(format!("it does not divide {queries} attention heads"));
        }
        // Ranks share a head where there are more ranks than heads.
        if !keys.is_multiple_of(tp) && !tp.is_multiple_of(keys) {
            return Some(format!(
                "it neither divides {keys} key/value heads nor is a multiple of them"
            ));
        }
    }
    let (name, size) = sizes.iter().find(|(_, size)| !size.is_multiple_of(tp))?;
    Some(format!(
        "it does not divide {size}, a size of `{}`",
        brief(name)
    ))
}

/// The stages that get no tensor.
fn empty_stages(topology: Topology, files: &[PlannedFile]) -> Vec<usize> {
    let ranks = topology.dp * topology.sp * topology.tp;
    let filled: BTreeSet<_> = files.iter().map(|file| file.rank / ranks).collect();
    (0..topology.pp)
        .filter(|stage| !filled.contains(stage))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::plan;
    use crate::{Cut, DType, Stages};
    use serde_json::json;

    fn tensor(name: &str, size: usize) -> TensorEntry {
        TensorEntry {
            kind: Kind::Parameter,
            name: name.to_owned(),
            dtype: DType::F32,
            shape: vec![size],
            cut: Some(Cut::new(0, [size])),
            slices: Vec::new(),
        }
    }

    #[test]
    fn a_degree_divides_heads_and_sizes_and_shares_the_heads_of_keys() {
        let config = json!({
            "model_type": "llama",
            "hidden_size": 72,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
        });
        // Keys of 4 heads of 6; more ranks have them whole.
        let keys = [tensor("k_proj.weight", 24)];
        let with = |tensors: &[TensorEntry], tp| misfit(Some(&config), tensors, tp);
        for tp in [1, 2, 4, 12] {
            assert_eq!(with(&keys, tp), None, "{tp}");
        }
        let inner = [tensor("up_proj.weight", 20)];
        let unknown = misfit(None, &inner, 8);
        let told = [with(&keys, 5), with(&keys, 6), with(&inner, 12), unknown];
        let told = told.map(|told| {
            let (reason, possible) = told.expect("no run has it");
            format!("{reason}: {possible}")
        });
        insta::assert_snapshot!(told.join("\n"), @"
        it does not divide 12 attention heads: 1, 2, 4, 12
        it neither divides 4 key/value heads nor is a multiple of them: 1, 2, 4, 12
        it does not divide 20, a size of `up_proj.weight`: 1, 2, 4
        it does not divide 20, a size of `up_proj.weight`: 1, 2, 4, 5, 10, 20
        ");
        let gpt2 = json!({"model_type": "gpt2", "n_head": 12});
        assert!(misfit(Some(&gpt2), &[], 5).is_some());
        assert_eq!(
            misfit(Some(&json!({"model_type": "novel", "n_head": 12})), &[], 5),
            None
        );
    }

    #[test]
    fn a_stage_without_tensors_is_found_whatever_the_other_degrees() {
        let tensors = [tensor("a", 100), tensor("b", 1), tensor("c", 100)];
        let empty = |tensors: &[TensorEntry], pp| {
            let topology = Topology {
                dp: 2,
                tp: 2,
                pp,
                ..Topology::default()
            };
            let files = plan(tensors, topology, &Stages::Even).unwrap();
            empty_stages(topology, &files)
        };
        assert_eq!(empty(&tensors, 3), [0; 0]);
        assert_eq!(empty(&tensors, 5), [0, 4]);
        assert_eq!(empty(&tensors[..1], 2), [0]);
    }
}
