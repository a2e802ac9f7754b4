//! What language models that predict the next token have in common.

use super::{
    Head, TraceOptions, Visible,
    fields::{Fields, error},
};
use crate::{
    ParamRole, Result, TensorType,
    fx::{Module, Symbol},
    op::WeightLayout,
    param::Init,
};
use merak_mpu::DType;
use serde_json::json;

/// Refuses a configuration that names another class than these, as of another family or of another
/// task than predicting the next token.
pub(super) fn check_architecture(f: &Fields<'_>, classes: &[&str]) -> Result<()> {
    f.refuse("is_encoder_decoder", &[json!(false)])?;
    for name in f.strings("architectures")? {
        // The first Llamas are of class LLaMAForCausalLM.
        if !classes.iter().any(|class| name.eq_ignore_ascii_case(class)) {
            let reason = format!("names {name}, expected {}", classes.join(" or "));
            return Err(error("architectures", &reason));
        }
    }
    Ok(())
}

/// The row of the embedding that lookups do not train: `pad_token_id`, as in `torch.nn.Embedding`.
pub(super) fn padding(
    f: &Fields<'_>,
    default: Option<usize>,
    vocab: usize,
) -> Result<Option<usize>> {
    token(f, "pad_token_id", default, vocab)
}

/// A token of the vocabulary: the default where the field is absent, none where it is null.
pub(super) fn token(
    f: &Fields<'_>,
    name: &str,
    default: Option<usize>,
    vocab: usize,
) -> Result<Option<usize>> {
    let token = f.count_unless_null(name, default)?;
    match token {
        Some(id) if id >= vocab => {
            let reason = format!("is {id}, which is no token of {vocab}");
            Err(error(name, &reason))
        }
        _ => Ok(token),
    }
}

/// Declares the input `input_ids: [B, S]` of a model that predicts tokens, and `attention_mask` or
/// `document_ids` where the options ask for it.
pub fn input_ids(root: &Module, options: &TraceOptions) -> Symbol {
    let ty = TensorType::new([options.batch, options.seq], DType::I64);
    let ids = root.input("input_ids", ty.clone());
    match options.visible {
        Visible::All => {}
        Visible::Unpadded => root.hide_unseen(&root.input("attention_mask", ty)),
        Visible::Document => root.part_documents(&root.input("document_ids", ty)),
    }
    ids
}

/// The output projection `name` from `x: [.., H]` to logits `[.., V]`: its own weight, or the
/// embedding table `tied: [V, H]`.
///
/// # Errors
/// As [`Module::apply`].
pub fn lm_head(
    root: &Module,
    name: &str,
    x: &Symbol,
    tied: Option<&Symbol>,
    vocab: usize,
    std: f64,
) -> Result<Symbol> {
    let head = root.sub(name);
    let weight = if let Some(table) = tied {
        root.alias(table, &format!("{name}.weight"));
        table.clone()
    } else {
        head.param(
            "weight",
            &[vocab, x.ty().last_dim()],
            Init::Normal(std),
            ParamRole::Weight,
        )?
    };
    head.linear_with(x, &weight, WeightLayout::OutIn)
}

/// Declares the labels of a loss, `labels: [B, S]`; labels of -100 do not count.
pub fn labels(root: &Module, options: &TraceOptions) -> Symbol {
    labels_of(root, &[options.batch, options.seq])
}

fn labels_of(root: &Module, shape: &[usize]) -> Symbol {
    root.input("labels", TensorType::new(shape, DType::I64))
}

/// Declares the output that the options ask for: `logits`, or `loss`, the cross-entropy of the
/// logits against `labels`.
///
/// # Errors
/// As [`Module::apply`].
pub fn finish(root: &Module, logits: &Symbol, options: &TraceOptions) -> Result<()> {
    finish_with(root, logits, &[options.batch, options.seq], options)
}

/// The same with labels of another shape.
pub(super) fn finish_with(
    root: &Module,
    logits: &Symbol,
    labels: &[usize],
    options: &TraceOptions,
) -> Result<()> {
    match options.head {
        Head::Logits => root.output("logits", logits),
        Head::Loss { label_smoothing } => {
            let labels = labels_of(root, labels);
            let loss = root
                .sub("loss")
                .cross_entropy(logits, &labels, label_smoothing)?;
            root.output("loss", &loss);
        }
    }
    Ok(())
}
