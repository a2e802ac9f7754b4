//! L1: schedule, cut, recomputation and compute threads change no bit.

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
            .all(|pair| pair[0].loss != pair[1].loss)
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
