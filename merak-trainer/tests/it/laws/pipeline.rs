//! L1: schedule, cut, recomputation and compute threads change no bit.

use merak_pipe::{Action, Kind};
use merak_trainer::NamedTensors;

use crate::support::{Case, Run, assert_same_bits};

/// With M = 5 microbatches each of them fits 2 and 4 stages, and no number of stages divides M.
const SCHEDULES: [&str; 6] = [
    "gpipe",
    "1f1b",
    "ds_default",
    "pre_recompute_1f1b",
    "last_no_recompute_1f1b",
    "shifted_critical_path",
];

const STEPS: usize = 3;

/// Both families with and without dropout and a tied head.
fn models() -> Vec<(String, Case)> {
    let mut models = Vec::new();
    for (family, case) in [("gpt2", Case::gpt2()), ("llama", Case::llama())] {
        for (dropout, tied) in [(0.0, true), (0.0, false), (0.1, true), (0.1, false)] {
            let case = case.clone().with_dropout(dropout).with_tied(tied);
            models.push((
                format!("{family} dropout {dropout} tied {tied}"),
                case.with_microbatches(5),
            ));
        }
    }
    models
}

/// One rank that keeps every activation: what all others are held against.
fn reference(case: &Case) -> Run {
    let run = case
        .clone()
        .with("activation_checkpointing", false)
        .run(STEPS);
    assert!(run.reports[0].loss.is_finite() && run.reports[0].grad_norm > 0.0);
    assert!(
        run.reports
            .windows(2)
            .all(|pair| pair[0].loss.to_bits() != pair[1].loss.to_bits())
    );
    run
}

#[test]
fn no_schedule_cut_or_recomputation_changes_a_bit() {
    for (model, case) in models() {
        let expected = reference(&case);
        for pp in [2, 4] {
            for schedule in SCHEDULES {
                for recompute in [false, true] {
                    let case = case
                        .clone()
                        .on((1, 1, pp))
                        .with("train_schedule", schedule)
                        .with("activation_checkpointing", recompute);
                    let what = format!("{model} pp {pp} {schedule} recompute {recompute}");
                    assert_same_bits(&case.run(STEPS), &expected, &what);
                }
            }
        }
    }
}

#[test]
fn no_number_of_stages_changes_a_bit_of_any_family() {
    for (family, case) in Case::relatives() {
        let case = case.with_dropout(0.1);
        let expected = reference(&case);
        for pp in [2, 4] {
            let what = format!("{family} pp {pp}");
            assert_same_bits(&case.clone().on((1, 1, pp)).run(STEPS), &expected, &what);
        }
    }
}

#[test]
fn one_rank_has_the_same_bits_under_every_schedule_and_recomputation() {
    let case = Case::gpt2().with_dropout(0.1).with_microbatches(5);
    let expected = reference(&case);
    for schedule in SCHEDULES {
        for chunk in [1, 2, 3, 100] {
            let case = case
                .clone()
                .with("train_schedule", schedule)
                .with("checkpoint_num_layers", chunk);
            let what = format!("{schedule} chunks of {chunk}");
            assert_same_bits(&case.run(STEPS), &expected, &what);
        }
    }
}

#[test]
fn no_cut_into_segments_and_stages_changes_a_bit() {
    let case = Case::gpt2().with_dropout(0.1).with_microbatches(5);
    let expected = reference(&case);
    let cuts: [&[(&str, &str)]; 6] = [
        &[("partition_method", "uniform_floor")],
        &[("partition_method", "parameters")],
        // The widest stage that there is, and three of one segment.
        &[
            ("shard_count", "8"),
            ("partition_method", "custom"),
            ("custom_partition", "0,1,2,3,10"),
        ],
        &[("split_method", "layer_split")],
        &[
            ("split_method", "layer_split"),
            (
                "custom_split_points",
                "transformer.h.0.mlp,transformer.h.1.attn.c_proj,transformer.ln_f",
            ),
        ],
        &[("shard_count", "4")],
    ];
    for keys in cuts {
        let mut case = case.clone().on((1, 1, 4));
        for (key, value) in keys {
            case = case.with(key, value);
        }
        assert_same_bits(&case.run(STEPS), &expected, &format!("{keys:?}"));
    }
}

#[test]
fn compute_threads_change_no_bit() {
    // Wide enough that every kernel has work for several threads.
    let case = Case::gpt2()
        .with_model("n_embd", 128)
        .with("per_device_train_batch_size", 6)
        .with_dropout(0.1);
    let expected = case.run(2);
    for (threads, pp) in [(2, 1), (3, 1), (2, 2), (5, 4)] {
        let case = case.clone().with_threads(threads).on((1, 1, pp));
        let what = format!("{threads} threads, pp {pp}");
        assert_same_bits(&case.run(2), &expected, &what);
    }
    let tensor = case.clone().on((2, 2, 1));
    let what = "threads under tensor parallelism";
    assert_same_bits(&tensor.clone().with_threads(3).run(2), &tensor.run(2), what);
}

#[test]
fn each_microbatch_runs_forward_once_and_backward_once_on_every_stage() {
    for schedule in SCHEDULES {
        let case = Case::gpt2()
            .on((1, 1, 4))
            .with_microbatches(5)
            .with("train_schedule", schedule);
        let planned = &case.plan().schedule;
        let ran = case.on_ranks(|trainer| {
            trainer.train_step()?;
            let actions = trainer.timeline().iter().map(|span| span.action);
            Ok(actions.collect::<Vec<_>>())
        });
        assert_eq!(ran, planned.actions, "{schedule} runs as planned");
        for actions in &ran {
            for microbatch in 0..5 {
                let count = |kind| {
                    let of =
                        |action: &&Action| action.microbatch.0 == microbatch && action.kind == kind;
                    actions.iter().filter(of).count()
                };
                assert_eq!((count(Kind::Forward), count(Kind::Backward)), (1, 1));
                assert!(count(Kind::Recompute) <= 1);
            }
        }
    }
}

#[test]
fn recomputation_holds_fewer_activations() {
    let peak = |recompute| {
        let case = Case::gpt2()
            .on((1, 1, 2))
            .with("activation_checkpointing", recompute);
        case.on_ranks(|trainer| {
            trainer.train_step()?;
            Ok(trainer.peak_activation_bytes())
        })
    };
    let (kept, recomputed) = (peak(false), peak(true));
    assert!(recomputed[0] < kept[0], "{recomputed:?} against {kept:?}");
}

#[test]
fn a_tied_weight_is_the_same_on_both_its_stages_and_an_untied_one_drifts_apart() {
    let case = Case::gpt2().on((1, 1, 2));
    let name = "transformer.wte.weight";
    let of = |name: &str, stage: &NamedTensors| {
        let found = stage.iter().find(|(other, _)| other == name);
        found.map(|(_, values)| values.clone())
    };
    let stages = case.on_ranks(|trainer| {
        for _ in 0..5 {
            trainer.train_step()?;
        }
        Ok(trainer.parameters())
    });
    let copies = [of(name, &stages[0]), of(name, &stages[1])];
    assert!(copies[0].is_some() && copies[0] == copies[1]);
    assert!(of("lm_head.weight", &stages[1]).is_none());

    // The same model without the tie: two weights of one shape.
    let untied = case.with("no_tie_modules", true).run(5);
    let (embedding, head) = (&untied.weights[name], &untied.weights["lm_head.weight"]);
    assert_eq!(embedding.len(), head.len());
    assert_ne!(embedding, head);
}
