//! L1: schedule, cut, recomputation and compute threads change no bit.

use merak_pipe::{Action, Kind};
use merak_trainer::{Error, NamedTensors, PlanError};

use crate::support::{Case, Run, assert_same_bits};

/// With M = 5 microbatches each of them fits 2 and 4 stages, and no number of stages divides M.
/// Several stages per rank: see `stages.rs`.
const SCHEDULES: [&str; 8] = [
    "gpipe",
    "1f1b",
    "ds_default",
    "pre_recompute_1f1b",
    "last_no_recompute_1f1b",
    "shifted_critical_path",
    "zb_h1",
    "zb_h2",
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

/// One rank that keeps every activation: the reference for all others.
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
fn searched_stages_change_no_bit() {
    let case = Case::gpt2().with_microbatches(4);
    let expected = reference(&case);
    for method in ["autopipe", "exact"] {
        for (schedule, comm_cost) in [("1f1b", 0.0), ("zb_h1", 0.1), ("interleaved_1f1b", 0.0)] {
            let stages = if schedule == "interleaved_1f1b" { 2 } else { 1 };
            let case = case
                .clone()
                .on((1, 1, 2))
                .with("partition_method", method)
                .with("autopipe.comm_cost", comm_cost)
                .with("train_schedule", schedule)
                .with("virtual_stages", stages);
            let what = format!("{method} {schedule}");
            assert_same_bits(&case.run(STEPS), &expected, &what);
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
    let cuts: [&[(&str, &str)]; 7] = [
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
        &[("leaf_modules", "transformer.h.{i}.mlp,transformer.h.0")],
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
                let whole = count(Kind::Backward);
                assert_eq!(count(Kind::Forward), 1);
                assert_eq!(whole + count(Kind::InputGrad), 1);
                assert_eq!(whole + count(Kind::WeightGrad), 1);
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
        trainer.parameters()
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

#[test]
fn no_choice_of_what_is_recomputed_changes_a_bit() {
    let choices: [&[(&str, &str)]; 8] = [
        &[("activation_checkpoint_ratio", "0.6")],
        &[("activation_checkpoint_ratio", "0.4,0.9")],
        &[
            ("activation_checkpoint_ratio", "0.5"),
            ("checkpoint_num_layers", "2"),
        ],
        &[("recompute", "selective")],
        &[
            ("recompute", "selective"),
            ("recompute_ops", "norm,dropout"),
        ],
        &[("recompute", "selective"), ("recompute_ops", "activation")],
        &[
            ("recompute", "budget"),
            ("activation_memory_budget", "1000000000"),
        ],
        &[
            ("recompute", "budget"),
            ("activation_memory_budget", "250000"),
        ],
    ];
    for (family, case) in [("gpt2", Case::gpt2()), ("llama", Case::llama())] {
        let case = case.with_dropout(0.1).with_microbatches(5);
        let expected = reference(&case);
        for (schedule, pp) in [
            ("1f1b", 1),
            ("1f1b", 2),
            ("pre_recompute_1f1b", 4),
            ("shifted_critical_path", 4),
            ("zb_h1", 2),
            ("zb_v", 2),
        ] {
            for keys in choices {
                if pp == 1 && keys[0].1.starts_with("0.4,") {
                    continue; // one stage takes one ratio
                }
                let mut case = case.clone().on((1, 1, pp)).with("train_schedule", schedule);
                for (key, value) in keys {
                    case = case.with(key, value);
                }
                let what = format!("{family} {schedule} on {pp}: {keys:?}");
                assert_same_bits(&case.run(STEPS), &expected, &what);
            }
        }
    }
}

/// The most bytes of activations on each rank.
fn peaks(case: &Case) -> Vec<usize> {
    case.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.train_step()?;
        Ok(trainer.peak_activation_bytes())
    })
}

/// The case with a budget, or the least budget that would do.
fn within(case: &Case, budget: usize) -> Result<Case, usize> {
    let case = case
        .clone()
        .with("recompute", "budget")
        .with("activation_memory_budget", budget);
    match case.try_plan() {
        Err(Error::Plan(PlanError::ActivationBudget { least, .. })) => Err(least),
        _ => Ok(case),
    }
}

#[test]
fn activations_stay_inside_their_budget() {
    for (schedule, pp, chunks) in BUDGETED {
        let (case, most) = budgeted(schedule, pp, chunks);
        let mut used = Vec::new();
        for percent in [400, 200, 150, 120, 100, 85, 70, 55, 40] {
            let budget = most * percent / 100;
            if let Ok(case) = within(&case, budget) {
                let peaks = peaks(&case);
                let what = format!("{schedule} on {pp}, budget {budget}: {peaks:?}");
                assert!(peaks.iter().all(|peak| *peak <= budget), "{what}");
                used.extend(peaks.into_iter().max());
            }
        }
        // A smaller budget never uses more memory. Where the halves of backwards lie apart, what
        // the weight half reads lies between them, recomputed or not, and may be the peak.
        let what = format!("{schedule} on {pp}: {used:?} of {most}");
        assert!(used.windows(2).all(|pair| pair[1] <= pair[0]), "{what}");
        let is_split = schedule.starts_with("zb") || schedule == "auto";
        assert!(used.len() >= 4, "{what}");
        assert!(is_split || used.last() < used.first(), "{what}");
    }
}

/// A case for a budget, and the bytes of activations that its worst rank keeps where nothing is
/// recomputed.
fn budgeted(schedule: &str, pp: usize, chunks: usize) -> (Case, usize) {
    let case = Case::gpt2()
        .with_microbatches(6)
        .on((1, 1, pp))
        .with("train_schedule", schedule)
        .with("virtual_stages", chunks);
    let without = peaks(&case.clone().with("activation_checkpointing", false));
    (case, without.into_iter().max().unwrap_or_default())
}

/// Schedules under a budget, with ranks and stages per rank.
const BUDGETED: [(&str, usize, usize); 10] = [
    ("1f1b", 2, 1),
    ("1f1b", 4, 1),
    ("gpipe", 2, 1),
    ("shifted_critical_path", 4, 1),
    ("interleaved_1f1b", 2, 2),
    ("zb_h1", 2, 1),
    ("zb_h2", 2, 1),
    ("zb_v", 2, 1),
    ("auto", 2, 1),
    ("auto", 2, 2),
];

#[test]
fn a_budget_that_what_was_measured_would_keep_is_not_refused_by_far() {
    for (schedule, pp, chunks) in BUDGETED {
        let (case, most) = budgeted(schedule, pp, chunks);
        let budget = most + most / 5;
        let what = format!("{schedule} on {pp}, {chunks} stages per rank: {most} measured");
        let case = within(&case, budget);
        assert!(case.is_ok(), "{what}, at least {case:?}");
    }
}

#[test]
fn a_budget_that_nothing_keeps_is_refused_with_the_least_that_would_do() {
    for (schedule, pp, chunks) in BUDGETED {
        let case = Case::gpt2()
            .on((1, 1, pp))
            .with("train_schedule", schedule)
            .with("virtual_stages", chunks);
        let what = format!("{schedule} on {pp}, {chunks} stages per rank");
        let mut budget = 1000;
        // The first rank over its budget is reported first, then the others.
        while let Err(least) = within(&case, budget) {
            assert!(least > budget, "{what}: {least} is more than {budget}");
            assert!(within(&case, least - 1).is_err(), "{what}: {least}");
            budget = least;
        }
        let peaks = peaks(&within(&case, budget).unwrap());
        assert!(
            peaks.iter().all(|peak| *peak <= budget),
            "{what}: {peaks:?} of {budget}"
        );
    }
}

#[test]
fn selective_recomputation_holds_less_than_none_and_a_ratio_between_none_and_all() {
    let case = Case::gpt2().on((1, 1, 2));
    let none = peaks(&case.clone().with("activation_checkpointing", false))[0];
    let selective = peaks(&case.clone().with("recompute", "selective"))[0];
    let part = peaks(&case.clone().with("activation_checkpoint_ratio", 0.5))[0];
    let all = peaks(&case)[0];
    assert!(selective < none, "{selective} {none}");
    assert!(all < part && part < none, "{all} {part} {none}");
}
