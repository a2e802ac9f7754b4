//! L2 and N5 with ranks that share each sequence: they change numbers by the order of summation
//! only.

use merak_ckpt::GenerateOptions;
use merak_trainer::{
    MerakTrainer, Result, Workload, chain,
    data::{Dataset, LABELS, Sample, SampleTensor},
};
use serde_json::json;
use tempfile::tempdir;

use super::{
    encoders,
    generation::{generate, greedy},
    resume::{resumed, train_and_save},
};
use crate::support::{Case, VOCAB, assert_close_losses, assert_close_tensors, assert_same_tensors};

/// Checks trainings against that of one rank.
pub(super) fn check(case: &Case, cases: &[Case], steps: usize) {
    let (first, all) = (case.run(0), case.run(steps));
    for (number, case) in cases.iter().enumerate() {
        let what = format!("case {number}: {case:?}");
        assert_close_tensors(&case.run(0).gradients, &first.gradients, 1e-5, &what);
        let run = case.run(steps);
        assert_close_losses(&run.reports[..1], &all.reports[..1], 1e-6, &what);
        assert_close_losses(&run.reports, &all.reports, 1e-4, &what);
    }
}

#[test]
fn every_family_trains_like_one_rank() {
    // Windows, norms of heads, positions after padding; Llama's key heads are fewer than four.
    let decoders = [("gpt2", Case::gpt2()), ("llama", Case::llama())];
    for (_, case) in decoders.into_iter().chain(Case::relatives()) {
        let case = case.with_dropout(0.1);
        check(&case, &[2, 4].map(|sp| case.clone().sharing(sp)), 8);
    }
    for case in [Case::gpt2(), Case::llama()] {
        check(&case, &[2, 4].map(|sp| case.clone().sharing(sp)), 20);
    }
}

#[test]
fn encoders_and_translations_train_like_one_rank() {
    let of_texts = encoders::models().into_iter();
    for (_, case) in of_texts.filter(|(model, _)| *model != "vit") {
        let shared = |sp: usize, method| case.clone().sharing(sp).with("sp_method", method);
        let wide = shared(2, "ulysses").on((1, 2, 2)).with("zero_stage", 3);
        let cases = [
            shared(2, "ulysses"),
            shared(4, "ulysses"),
            shared(4, "ring"),
            shared(2, "all_gather").on((2, 1, 1)).with("zero_stage", 2),
            wide,
            shared(2, "ulysses")
                .on((1, 2, 1))
                .with("sequence_parallel", true),
        ];
        check(&case, &cases, 3);
        let evaluated = |case: &Case| case.on_ranks(MerakTrainer::evaluate)[0].eval_loss;
        let gap = (evaluated(&cases[2]) / evaluated(&case) - 1.0).abs();
        assert!(gap < 1e-6, "{gap:e} in {case:?}");
    }
}

#[test]
fn muon_leaves_the_head_of_a_classifier_to_adamw_on_any_ranks() {
    let mut models = encoders::models().into_iter();
    let classifier = models.find(|(model, _)| *model == "bert classifier");
    let (_, case) = classifier.expect("it is among them");
    let case = case.with("optim", "muon").with("learning_rate", 1e-2);
    let shared = |sp: usize, method| case.clone().sharing(sp).with("sp_method", method);
    check(&case, &[shared(2, "ulysses"), shared(4, "ring")], 6);
}

#[test]
fn every_zero_stage_and_all_other_degrees_train_like_one_rank() {
    let case = Case::gpt2().with_dropout(0.1);
    let on = |degrees, zero: usize| {
        let case = case.clone().on(degrees).sharing(2);
        // One bucket for all in two stages, many buckets in the others.
        let elements = if zero.is_multiple_of(2) {
            1000
        } else {
            500_000_000
        };
        case.with("zero_stage", zero)
            .with("zero_reduce_bucket_size", elements)
    };
    let cases = [
        on((1, 1, 1), 0),
        on((1, 1, 1), 3),
        on((2, 1, 1), 1),
        on((2, 1, 1), 2),
        on((1, 2, 1), 1),
        on((1, 1, 2), 1),
        on((2, 1, 2), 3),
    ];
    check(&case, &cases, 20);
    let llama = Case::llama().with_dropout(0.1);
    let wide = llama.clone().on((2, 2, 2)).sharing(2);
    check(&llama, &[wide.with("train_schedule", "zb_h1")], 8);
}

#[test]
fn keys_and_values_gathered_or_passed_round_train_like_one_rank_whatever_the_heads() {
    for method in ["all_gather", "ring"] {
        check_method(method);
    }
}

fn check_method(method: &str) {
    let shared = |case: &Case, sp: usize| case.clone().sharing(sp).with("sp_method", method);
    let decoders = [Case::gpt2(), Case::llama()];
    for case in decoders
        .into_iter()
        .chain(Case::relatives().into_iter().map(|(_, case)| case))
    {
        let case = case.with_dropout(0.1);
        check(&case, &[2, 4].map(|sp| shared(&case, sp)), 8);
    }
    let one_head = Case::gpt2().with_model("n_head", 1).with_dropout(0.1);
    let mut cases = vec![
        shared(&one_head, 4),
        shared(&one_head, 2).on((2, 1, 2)).with("zero_stage", 3),
        shared(&one_head, 2).with("activation_checkpointing", true),
    ];
    let recomputed = cases[0].clone().with("recompute", "selective");
    cases.push(recomputed.with("recompute_ops", "gather"));
    check(&one_head, &cases, 8);
    let wide = Case::gpt2().with_dropout(0.1);
    let sliced = shared(&wide, 2).on((1, 2, 1));
    let sliced = sliced
        .with("sequence_parallel", true)
        .with("parallel_vocab", true);
    check(&wide, &[sliced], 8);
}

#[test]
fn slices_of_the_tensor_axis_and_of_the_vocabulary_train_like_one_rank() {
    for case in [Case::gpt2().with_dropout(0.1), Case::llama()] {
        let on = case.clone().on((1, 2, 1)).sharing(2);
        let sliced = on.clone().with("sequence_parallel", true);
        let cases = [
            on.with("parallel_vocab", true),
            sliced.clone(),
            sliced.with("parallel_vocab", true),
        ];
        check(&case, &cases, 8);
    }
}

#[test]
fn recomputation_and_adapters_train_like_one_rank() {
    let folder = tempdir().expect("a temporary folder");
    let dora = json!({ "target_modules": ["c_attn", "c_proj"], "r": 4, "use_dora": true });
    let case = Case::gpt2().with_dropout(0.1);
    let adapted = case.clone().with_lora(folder.path(), &dora);
    for case in [adapted, case.clone().with("optim", "muon")] {
        let (alone, run) = (case.run(8), case.clone().on((1, 2, 1)).sharing(2).run(8));
        assert_close_losses(&run.reports, &alone.reports, 1e-4, &format!("{case:?}"));
    }
    let shared = case.clone().sharing(2);
    let ways = [
        shared.clone().with("activation_checkpointing", false),
        shared.clone().with("checkpoint_num_layers", 2),
        shared.with("recompute", "selective"),
    ];
    check(&case, &ways, 5);
}

#[test]
fn weights_of_bf16_train_like_those_of_one_rank() {
    for case in [Case::gpt2(), Case::llama()] {
        let case = case.with_dropout(0.1).with("bf16", true);
        let alone = case.run(8);
        for (sp, method) in [(2, "ulysses"), (4, "ulysses"), (4, "ring")] {
            let run = case.clone().sharing(sp).with("sp_method", method).run(8);
            assert_close_losses(
                &run.reports,
                &alone.reports,
                2e-2,
                &format!("{sp} {method} {case:?}"),
            );
        }
    }
}

#[test]
fn clipping_uses_the_norm_of_the_whole_model_once() {
    let case = Case::gpt2().with_dropout(0.1).with("max_grad_norm", 0.01);
    let (alone, run) = (case.run(12), case.clone().on((1, 1, 2)).sharing(2).run(12));
    for (run, alone) in run.reports.iter().zip(&alone.reports) {
        let gap = (run.grad_norm / alone.grad_norm - 1.0).abs();
        let tolerance = if run.step == 1 { 1e-6 } else { 1e-3 };
        assert!(gap < tolerance, "norm of step {}: {gap:e}", run.step);
    }
    assert_close_losses(&run.reports, &alone.reports, 1e-4, "clipped");
}

#[test]
fn all_ranks_that_share_a_sequence_keep_the_same_bits() {
    // Comparing weights by bits is what joining them does.
    for zero in [0, 1, 3] {
        let case = Case::gpt2().with_dropout(0.1).on((2, 1, 1)).sharing(2);
        case.with("zero_stage", zero).run(10);
    }
}

#[test]
fn a_run_goes_on_with_and_without_shared_sequences() {
    let whole = Case::gpt2().with_dropout(0.1);
    let shared = whole.clone().sharing(2);
    let wide = shared.clone().on((2, 1, 1)).with("zero_stage", 2);
    let llama = Case::llama().with_dropout(0.1);
    let ring = shared.clone().with("sp_method", "ring");
    let sliced = whole.clone().on((1, 2, 1));
    let sliced = sliced
        .with("sequence_parallel", true)
        .with("parallel_vocab", true);
    for (from, to) in [
        (&shared, whole.clone()),
        (&whole, shared.clone()),
        (&wide, whole.clone().sharing(4).with("zero_stage", 3)),
        (&shared, whole.clone().on((1, 2, 1))),
        (&llama.clone().sharing(4), llama.on((1, 2, 2)).sharing(2)),
        (&shared, whole.clone().sharing(4).with("sp_method", "ring")),
        (&ring, whole.clone()),
        (&sliced, ring.clone()),
        (&ring, sliced.clone()),
    ] {
        let folder = tempdir().expect("a temporary folder");
        train_and_save(from, 3, folder.path());
        let straight = from.run(8);
        let rest = resumed(&to, folder.path()).run(5);
        assert_close_losses(&rest.reports, &straight.reports[3..], 1e-4, "resumed");
        let same = resumed(from, folder.path()).run(5);
        assert_same_tensors(&same.weights, &straight.weights, "on the same ranks");
    }
}

#[test]
fn evaluations_and_tokens_are_those_of_one_rank() {
    let (prompts, greedy) = greedy();
    let one_key_head = Case::llama().with_model("num_key_value_heads", 1);
    for case in [Case::gpt2(), Case::llama(), one_key_head] {
        let evaluated = |case: &Case| {
            let metrics = case.on_ranks(MerakTrainer::evaluate);
            assert!(
                metrics
                    .iter()
                    .all(|one| one.eval_samples == metrics[0].eval_samples)
            );
            (metrics[0].eval_loss, metrics[0].eval_samples)
        };
        let (tokens, loss) = (generate(&case, &prompts, &greedy), evaluated(&case));
        for (degrees, sp, method) in [
            ((1, 1, 1), 2, "ulysses"),
            ((1, 1, 1), 4, "ulysses"),
            ((2, 1, 2), 2, "ulysses"),
            ((1, 2, 1), 2, "ulysses"),
            ((1, 1, 1), 4, "ring"),
            ((1, 2, 2), 2, "all_gather"),
        ] {
            let case = case.clone().on(degrees).sharing(sp);
            let case = case
                .with("sp_method", method)
                .with("sequence_parallel", degrees.1 * degrees.2 > 2);
            assert_eq!(
                generate(&case, &prompts, &greedy),
                tokens,
                "{degrees:?} {sp}"
            );
            let found = evaluated(&case);
            let gap = (found.0 / loss.0 - 1.0).abs();
            assert!(gap < 1e-6 && found.1 == loss.1, "{degrees:?} {sp}: {gap:e}");
        }
    }
}

fn t5() -> Case {
    let mut models = encoders::models().into_iter();
    let t5 = models.find(|(model, _)| *model == "t5");
    t5.expect("it is there").1
}

#[test]
fn translations_have_the_tokens_of_one_rank() {
    let (prompts, greedy) = greedy();
    let options = GenerateOptions {
        decoder_start_token_id: Some(0),
        ..greedy
    };
    let alone = generate(&t5(), &prompts, &options);
    for (degrees, sp, method) in [((1, 1, 1), 4, "ulysses"), ((1, 2, 2), 2, "ring")] {
        let case = t5().on(degrees).sharing(sp);
        let tokens = generate(&case.with("sp_method", method), &prompts, &options);
        assert_eq!(tokens, alone, "{sp} {method}");
    }
}

/// Sequences of a length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Long {
    pub(super) len: usize,
}

impl Dataset for Long {
    fn len(&self) -> usize {
        16
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let token = |at: usize| i64::try_from((7 * at + index) % VOCAB).expect("a small number");
        let tokens =
            |first: usize| SampleTensor::vector((first..first + self.len).map(token).collect());
        Ok(Sample::from([
            ("input_ids".to_owned(), tokens(0)),
            (LABELS.to_owned(), tokens(1)),
        ]))
    }
}

#[test]
fn activations_take_less_than_three_tenths_over_four_ranks_as_the_plan_foretells() {
    let models = [
        Case::gpt2().with_model("n_positions", 128),
        Case::llama()
            .with_model("max_position_embeddings", 128)
            .with_model("num_key_value_heads", 4),
    ];
    for model in models {
        let case = model.with_data(Long { len: 128 }).with("seq_length", 128);
        let case = case
            .with("activation_checkpointing", false)
            .with_microbatches(1);
        let bytes = |sp: usize, method: &str| {
            let case = case.clone().sharing(sp).with("sp_method", method);
            let held = case.on_ranks(|trainer| {
                trainer.train_step()?;
                Ok(trainer.peak_activation_bytes())
            });
            let foretold = case.plan().memory(&case.arguments(), &[Workload::Training]);
            let foretold = foretold.expect("a legal plan")[0].activations;
            (held[0] as f64, foretold as f64)
        };
        let whole = bytes(1, "ulysses");
        for method in ["ulysses", "ring"] {
            let shared = bytes(4, method);
            let (held, foretold) = (shared.0 / whole.0, shared.1 / whole.1);
            let what = format!("{method}: {held:.3} of it is held, {foretold:.3} foretold");
            assert!(held < 0.3 && (held / foretold - 1.0).abs() < 0.05, "{what}");
        }
    }
}

#[test]
fn what_cannot_be_shared_is_refused_with_what_can() {
    let message = |case: &Case| -> String {
        let checked = case.config().check();
        let args = checked.and_then(|_| case.try_plan().map(drop));
        args.map_or_else(|error| chain(&error), |()| "no error".to_owned())
    };
    let shared = |sp| Case::gpt2().sharing(sp);
    insta::assert_snapshot!(message(&shared(3)), @r#""seq_length" is 8 (command line --seq_length), but must be a multiple of "sp", which is 3, such as 6"#);
    insta::assert_snapshot!(message(&shared(8)), @r#"transformer.h.0.attn: 4 attention heads of a rank cannot be split over sp = 8: choose "sp" among 1, 2, 4, or "sp_method" = "ring" or "all_gather", which share no heads"#);
    let both = shared(2).on((1, 2, 1)).with("sequence_parallel", true);
    insta::assert_snapshot!(message(&both.with("seq_length", 6)), @r#""seq_length" is 6 (command line --seq_length), but must be a multiple of "tp" x "sp", which is 4, while "sequence_parallel" is true, such as 4"#);
    insta::assert_snapshot!(message(&shared(4).on((1, 2, 1))), @r#"transformer.h.0.attn: 2 attention heads of a rank cannot be split over sp = 4: choose "sp" among 1, 2, or "sp_method" = "ring" or "all_gather", which share no heads"#);
    insta::assert_snapshot!(message(&shared(2).with("sequence_dim", 0)), @r#""sequence_dim" is 0, but the hidden states of a gpt2 are [batch, sequence, width]: choose 1; 0 is for models of your own with [sequence, batch, width]"#);
    let images = encoders::vit(0.1).sharing(5);
    insta::assert_snapshot!(message(&images), @r#"sp = 5: vit.embeddings.patch_embeddings.projection.reshape_3 is used on whole sequences, by vit.embeddings.patch_embeddings.projection.linear, which has no form for slices of a sequence: set "sp" to 1; models of texts have none of these"#);
    let t5 = t5().sharing(8);
    insta::assert_snapshot!(message(&t5.with("sp_method", "ring")), @r#"encoder.block.0.layer.0.SelfAttention: 4 attention heads of a rank cannot be split over sp = 8: choose "sp" among 1, 2, 4"#);
}
