//! L2, N1 and N2 with slices of the sequence between the split regions: they change numbers by the
//! order of summation only.

use merak_trainer::{Workload, chain};
use serde_json::json;
use tempfile::tempdir;

use super::{
    encoders,
    generation::{generate, greedy},
    resume::{resumed, train_and_save},
    sp::check,
};
use crate::support::{Case, assert_close_losses};

fn cut(case: &Case, degrees: (usize, usize, usize)) -> Case {
    case.clone().on(degrees).with("sequence_parallel", true)
}

/// The encoder and the translator that fill in and translate texts.
fn of_encoders() -> impl Iterator<Item = Case> {
    let models = encoders::models().into_iter();
    models
        .filter(|(model, _)| ["bert", "t5"].contains(model))
        .map(|(_, case)| case)
}

#[test]
fn every_family_trains_like_one_rank() {
    let decoders = [Case::gpt2().with_model("n_embd", 64), Case::llama()];
    let dropped = decoders.clone().map(|case| case.with_dropout(0.1));
    for case in decoders.into_iter().chain(dropped).chain(of_encoders()) {
        check(&case, &[(1, 2, 1), (1, 4, 1)].map(|on| cut(&case, on)), 20);
    }
}

#[test]
fn relatives_and_other_heads_train_like_one_rank() {
    let relatives = Case::relatives().into_iter();
    let relatives = relatives.map(|(_, case)| case.with_dropout(0.1));
    // The images of these tests have five positions, which two ranks cannot share.
    let others = encoders::models().into_iter();
    let others = others.filter(|(model, _)| ["bert classifier", "gated t5"].contains(model));
    for case in relatives.chain(others.map(|(_, case)| case)) {
        check(&case, &[cut(&case, (1, 2, 1))], 2);
    }
}

#[test]
fn every_zero_stage_and_the_pipeline_train_like_one_rank() {
    for tied in [true, false] {
        let case = Case::gpt2().with_dropout(0.1).with_tied(tied);
        let on = |zero: usize| {
            let case = cut(&case, (2, 2, 2)).with("zero_stage", zero);
            // One bucket for all in two stages, many buckets in the others.
            case.with(
                "zero_reduce_bucket_size",
                if zero.is_multiple_of(2) {
                    1000
                } else {
                    500_000_000
                },
            )
        };
        check(&case, &[0, 1, 2, 3].map(on), 20);
    }
    let recomputed = |case: &Case, keys: &[(&str, &str)]| {
        let case = cut(case, (1, 2, 2));
        keys.iter()
            .fold(case, |case, (key, value)| case.with(key, value))
    };
    for case in [Case::llama().with_dropout(0.1)]
        .into_iter()
        .chain(of_encoders())
    {
        let ways: [&[(&str, &str)]; 3] = [
            &[("activation_checkpointing", "false")],
            &[("checkpoint_num_layers", "2")],
            &[("recompute", "selective"), ("recompute_ops", "norm,gather")],
        ];
        check(&case, &ways.map(|keys| recomputed(&case, keys)), 5);
    }
}

#[test]
fn adapters_and_rules_of_matrices_train_like_one_rank() {
    let folder = tempdir().expect("a temporary folder");
    let dora = json!({ "target_modules": ["c_attn", "c_proj"], "r": 4, "use_dora": true });
    let case = Case::gpt2().with_dropout(0.1);
    let adapted = case.clone().with_lora(folder.path(), &dora);
    for case in [adapted, case.with("optim", "muon")] {
        let (alone, run) = (case.run(8), cut(&case, (2, 2, 2)).run(8));
        assert_close_losses(&run.reports, &alone.reports, 1e-4, &format!("{case:?}"));
    }
}

#[test]
fn whole_parameters_stay_equal_to_the_bit_on_all_tensor_ranks() {
    let case = cut(&Case::gpt2().with_dropout(0.1), (2, 2, 1));
    let whole: Vec<_> = {
        let plan = case.plan();
        let params = plan.graph.params().iter();
        params
            .filter(|param| param.local == param.full)
            .map(|param| param.name.clone())
            .collect()
    };
    assert!(whole.iter().any(|name| name.ends_with("ln_1.weight")));
    let ranks = case.on_ranks(|trainer| {
        for _ in 0..20 {
            trainer.train_step()?;
        }
        trainer.parameters()
    });
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for rank in &ranks[1..] {
        for ((name, values), (_, first)) in rank.iter().zip(&ranks[0]) {
            if whole.contains(name) {
                assert_eq!(bits(values), bits(first), "{name}");
            }
        }
    }
}

#[test]
fn clipping_uses_the_norm_of_the_whole_model() {
    for tied in [true, false] {
        let case = Case::gpt2().with_tied(tied).with_dropout(0.1);
        let case = case.with("max_grad_norm", 0.01);
        let (alone, run) = (case.run(20), cut(&case, (1, 2, 2)).run(20));
        for (run, alone) in run.reports.iter().zip(&alone.reports) {
            let gap = (run.grad_norm / alone.grad_norm - 1.0).abs();
            let tolerance = if run.step == 1 { 1e-6 } else { 1e-3 };
            assert!(gap < tolerance, "norm of step {}: {gap:e}", run.step);
        }
        assert_close_losses(&run.reports, &alone.reports, 1e-4, "clipped");
    }
}

#[test]
fn a_run_goes_on_with_and_without_slices() {
    let whole = Case::gpt2().with_dropout(0.1);
    let sliced = cut(&whole, (2, 2, 2));
    for (from, to) in [
        (&sliced, whole.clone()),
        (&whole, sliced.clone()),
        (&sliced, cut(&whole, (1, 4, 1))),
    ] {
        let folder = tempdir().expect("a temporary folder");
        train_and_save(from, 3, folder.path());
        let straight = from.run(8);
        let rest = resumed(&to, folder.path()).run(5);
        assert_close_losses(&rest.reports, &straight.reports[3..], 1e-4, "resumed");
    }
}

#[test]
fn evaluations_and_tokens_are_those_of_one_rank() {
    let (prompts, greedy) = greedy();
    for case in [Case::gpt2(), Case::llama()] {
        let evaluated = |case: &Case| {
            let losses = case.on_ranks(|trainer| Ok(trainer.evaluate()?.eval_loss));
            losses[0]
        };
        let (tokens, loss) = (generate(&case, &prompts, &greedy), evaluated(&case));
        for degrees in [(1, 2, 1), (1, 4, 1), (2, 2, 2)] {
            let case = cut(&case, degrees);
            assert_eq!(generate(&case, &prompts, &greedy), tokens, "{degrees:?}");
            let gap = (evaluated(&case) / loss - 1.0).abs();
            assert!(gap < 1e-6, "{degrees:?}: {gap:e}");
        }
    }
}

#[test]
fn activations_take_less_as_the_plan_foretells() {
    let case = Case::gpt2().with("activation_checkpointing", false);
    let bytes = |case: &Case| {
        let held = case.on_ranks(|trainer| {
            trainer.train_step()?;
            Ok(trainer.peak_activation_bytes())
        });
        let foretold = case.plan().memory(&case.arguments(), &[Workload::Training]);
        let foretold = foretold.expect("a legal plan")[0].activations;
        (held[0] as f64, foretold as f64)
    };
    for tp in [2, 4] {
        let (whole, sliced) = (
            bytes(&case.clone().on((1, tp, 1))),
            bytes(&cut(&case, (1, tp, 1))),
        );
        let (held, foretold) = (sliced.0 / whole.0, sliced.1 / whole.1);
        let what = format!("tp {tp}: {held:.3} of it is held, {foretold:.3} foretold");
        assert!(held < 0.9 && (held / foretold - 1.0).abs() < 0.05, "{what}");
    }
    let keeps = case.with("activation_checkpointing", true);
    let keeps = cut(&keeps, (1, 4, 1)).with("recompute", "selective");
    let held = |ops: &str| bytes(&keeps.clone().with("recompute_ops", ops));
    let (kept, again) = (held("norm"), held("norm,gather"));
    let (held, foretold) = (again.0 / kept.0, again.1 / kept.1);
    let what = format!("joined again: {held:.3} of it is held, {foretold:.3} foretold");
    assert!(held < 0.9 && (held / foretold - 1.0).abs() < 0.05, "{what}");
}

#[test]
fn what_cannot_be_cut_is_refused_with_what_can() {
    let message = |case: &Case| -> String {
        let checked = case.config().check();
        let args = checked.and_then(|_| case.try_plan().map(drop));
        args.map_or_else(|error| chain(&error), |()| "no error".to_owned())
    };
    let odd = cut(&Case::gpt2(), (1, 2, 1)).with("seq_length", 7);
    insta::assert_snapshot!(message(&odd), @r#""seq_length" is 7 (command line --seq_length), but must be a multiple of "tp", which is 2, while "sequence_parallel" is true, such as 6"#);
    let dim = cut(&Case::gpt2(), (1, 2, 1)).with("sequence_dim", 0);
    insta::assert_snapshot!(message(&dim), @r#""sequence_dim" is 0, but the hidden states of a gpt2 are [batch, sequence, width]: choose 1; 0 is for models of your own with [sequence, batch, width]"#);
    let alone = cut(&Case::gpt2(), (1, 1, 1)).with("seq_length", 7);
    assert_eq!(message(&alone), "no error");
}
