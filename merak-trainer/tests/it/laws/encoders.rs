//! L1 and L2 for models with other inputs than tokens and their successors.

use merak_ckpt::{Checkpoint, ExportOptions, export_hf};
use merak_trainer::{
    MerakTrainer, Result,
    data::{Dataset, IGNORED_LABEL, LABELS, Sample, SampleTensor},
};
use serde_json::{Value, json};

use crate::support::{
    Case, SEQ, VOCAB, assert_close_losses, assert_close_tensors, assert_same_bits,
};

const STEPS: usize = 3;

/// What a sample gives besides its first input.
#[derive(Debug, Clone, Copy)]
enum Task {
    /// Tokens to fill in, some of the text being padding.
    Masked,
    /// A class of the text.
    Classes,
    /// Another text.
    Translation,
    /// A class of an image of two channels and 8 x 8 pixels.
    Images,
}

#[derive(Debug)]
struct Samples(Task);

impl Dataset for Samples {
    fn len(&self) -> usize {
        37
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let token = |t: usize| ints([(7 * index + (t + index) * t) % VOCAB])[0];
        let class = || SampleTensor::new(vec![], ints([index % 3]));
        let text = || SampleTensor::vector((0..SEQ).map(token).collect());
        let seen =
            || SampleTensor::vector(ints((0..SEQ).map(|t| usize::from(t + index % 3 < SEQ))));
        let named = |tensors: Vec<(&str, SampleTensor)>| {
            tensors
                .into_iter()
                .map(|(name, tensor)| (name.to_owned(), tensor))
                .collect()
        };
        Ok(match self.0 {
            Task::Masked => {
                let sought = |t: usize| match (t + index) % 3 {
                    0 => token(t + 1),
                    _ => IGNORED_LABEL,
                };
                let labels = SampleTensor::vector((0..SEQ).map(sought).collect());
                let types = SampleTensor::vector(ints((0..SEQ).map(|t| t / 4)));
                named(vec![
                    ("input_ids", text()),
                    ("attention_mask", seen()),
                    ("token_type_ids", types),
                    (LABELS, labels),
                ])
            }
            // The model fills in mask and types.
            Task::Classes => named(vec![
                ("input_ids", text()),
                (LABELS, class().expect("a scalar has one element")),
            ]),
            Task::Translation => {
                let labels: Vec<_> = (0..SEQ).map(|t| token(SEQ - t)).collect();
                let moved = [&[0], &labels[..SEQ - 1]].concat();
                named(vec![
                    ("input_ids", text()),
                    ("attention_mask", seen()),
                    ("decoder_input_ids", SampleTensor::vector(moved)),
                    (LABELS, SampleTensor::vector(labels)),
                ])
            }
            Task::Images => {
                let pixel = |i: usize| ((index % 3 + 1) * i % 17) as f32 / 8.0 - 1.0;
                let pixels = (0..2 * 8 * 8).map(pixel).collect();
                let pixels = SampleTensor::floats(vec![2, 8, 8], pixels);
                named(vec![
                    ("pixel_values", pixels.expect("as many as the shape has")),
                    (LABELS, class().expect("a scalar has one element")),
                ])
            }
        })
    }
}

fn ints(values: impl IntoIterator<Item = usize>) -> Vec<i64> {
    let values = values.into_iter();
    values
        .map(|x| i64::try_from(x).expect("a small number"))
        .collect()
}

fn bert(architecture: &str) -> Value {
    json!({ "model_type": "bert", "architectures": [architecture], "vocab_size": VOCAB, "hidden_size": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": SEQ, "num_labels": 3, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1 })
}

fn t5(proj: &str, tied: bool) -> Value {
    json!({ "model_type": "t5", "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
        "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
        "feed_forward_proj": proj, "tie_word_embeddings": tied, "dropout_rate": 0.1,
        "initializer_factor": 0.5 })
}

/// A ViT of images of two channels, in 2 x 2 patches.
pub(crate) fn vit(dropout: f64) -> Case {
    let vit = json!({ "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 48, "image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout });
    let case = Case::of(vit).with_data(Samples(Task::Images));
    case.with("seq_length", 5)
}

/// An encoder-decoder.
pub(crate) fn translation() -> Case {
    Case::of(t5("gated-gelu", false)).with_data(Samples(Task::Translation))
}

/// Models with dropout, of every objective.
pub(crate) fn models() -> Vec<(&'static str, Case)> {
    let case = |model, task| Case::of(model).with_data(Samples(task));
    vec![
        ("bert", case(bert("BertForMaskedLM"), Task::Masked)),
        (
            "bert classifier",
            case(bert("BertForSequenceClassification"), Task::Classes),
        ),
        ("t5", case(t5("relu", true), Task::Translation)),
        ("gated t5", translation()),
        ("vit", vit(0.1)),
    ]
}

#[test]
fn no_cut_or_recomputation_changes_a_bit() {
    for (model, case) in models() {
        let expected = case
            .clone()
            .with("activation_checkpointing", false)
            .run(STEPS);
        for (pp, recompute) in [(2, true), (4, false)] {
            let case = case
                .clone()
                .on((1, 1, pp))
                .with("activation_checkpointing", recompute);
            let what = format!("{model} pp {pp} recompute {recompute}");
            assert_same_bits(&case.run(STEPS), &expected, &what);
        }
    }
}

#[test]
fn the_output_of_an_encoder_crosses_all_stages_of_the_decoder_and_tied_weights_overlap() {
    let case = Case::of(t5("gated-silu", true))
        .with_model("num_decoder_layers", 4)
        .with_data(Samples(Task::Translation));
    let expected = case.run(STEPS);
    let cut = case
        .on((1, 1, 4))
        .with("split_method", "layer_split")
        .with("num_layers", 6);
    let plan = cut.plan();
    let hops = (1..3).map(|stage| {
        let program = plan.training_program(stage).expect("differentiable");
        let encoded = |name: &str| name.starts_with("encoder.dropout");
        let sent = program.send.iter().find(|hop| encoded(&hop.name));
        sent.is_some_and(|hop| hop.grad.is_some())
    });
    assert!(hops.into_iter().all(|relays| relays));
    assert_same_bits(&cut.run(STEPS), &expected, "four stages");
}

#[test]
fn tensor_parallel_ranks_train_like_one() {
    for (model, case) in models() {
        let (first, all) = (case.run(0), case.run(5));
        assert!(all.reports.iter().all(|report| report.grad_norm > 0.0));
        for degrees in [(1, 2, 1), (2, 2, 2)] {
            let case = case.clone().on(degrees);
            let what = format!("{model} {degrees:?}");
            assert_close_tensors(&case.run(0).gradients, &first.gradients, 1e-5, &what);
            let run = case.run(5);
            assert_close_losses(&run.reports[..1], &all.reports[..1], 1e-6, &what);
            assert_close_losses(&run.reports, &all.reports, 1e-4, &what);
        }
    }
}

#[test]
fn what_a_checkpoint_lacks_and_what_it_has_beside_are_returned() {
    let folder = tempfile::tempdir().unwrap();
    let masked = Case::of(bert("BertForMaskedLM")).with_data(Samples(Task::Masked));
    let masked = masked.writing(&folder.path().join("masked"));
    let saved = masked.on_ranks(MerakTrainer::save_checkpoint);
    let again = masked.on_ranks(|trainer| trainer.load_checkpoint(&saved[0]));
    assert!(again[0].fresh.is_empty() && again[0].unused.is_empty());

    let hf = folder.path().join("hf");
    let saved = Checkpoint::open(&saved[0]).unwrap();
    export_hf(&saved, &hf, &ExportOptions::default()).unwrap();
    let classes = Case::of(bert("BertForSequenceClassification")).with_data(Samples(Task::Classes));
    for ranks in [(1, 1, 1), (1, 2, 2)] {
        let case = classes.clone().on(ranks).with("do_train", true);
        let loaded = case.on_ranks(|trainer| trainer.load_checkpoint(&hf));
        for loaded in loaded {
            let head = ["bert.pooler.dense.weight", "bert.pooler.dense.bias"];
            let classifier = ["classifier.weight", "classifier.bias"];
            assert_eq!(loaded.fresh, [head, classifier].concat());
            assert!(!loaded.unused.is_empty());
            let is_of_head = |name: &String| name.starts_with("cls.predictions.");
            assert!(loaded.unused.iter().all(is_of_head), "{:?}", loaded.unused);
        }
    }
}
