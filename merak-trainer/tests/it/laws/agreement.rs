//! L2 over 30 steps: every ZeRO stage, precision and topology agrees with one rank.

use crate::support::{Case, Run, assert_close_losses};

/// dp2, dp4, dp2 x tp2, dp2 x pp2, all three axes.
const TOPOLOGIES: [(usize, usize, usize); 5] =
    [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)];
const STEPS: usize = 30;
/// The norm of the gradients is above it in every step.
const MAX_NORM: f64 = 0.2;

/// An element type, by the keys that choose it, and the relative error of losses that it allows.
pub(crate) struct Precision {
    pub(crate) keys: &'static [(&'static str, &'static str)],
    pub(crate) tolerance: f64,
}

/// Sums in another order.
pub(crate) const WIDE: Precision = Precision {
    keys: &[],
    tolerance: 1e-4,
};

/// Roundings of the layers mostly cancel out in the mean over the tokens: two of bf16 are left.
pub(crate) const BF16: Precision = Precision {
    keys: &[("bf16", "true")],
    tolerance: 2.0 / 256.0,
};

fn run(case: &Case, what: &str) -> Run {
    let run = case.run(STEPS);
    let clipped = run.reports.iter().all(|r| r.grad_norm > MAX_NORM);
    assert!(clipped, "{what}: clipping is active");
    assert!(run.reports.iter().all(|r| r.skipped.is_none()), "{what}");
    run
}

/// Trains with both optimizers in these precisions on every topology in every ZeRO stage.
pub(crate) fn holds(backend: &str, precisions: &[Precision]) {
    for (optim, lr) in [("adamw_torch", 1e-3), ("muon", 2e-3)] {
        for Precision { keys, tolerance } in precisions {
            let case = Case::gpt2().with_dropout(0.1).with_tied(true);
            let case = case
                .with("compute.backend", backend)
                .with("optim", optim)
                .with("learning_rate", lr)
                .with("max_steps", STEPS + 1)
                .with("max_grad_norm", MAX_NORM);
            let case = keys
                .iter()
                .fold(case, |case, (key, value)| case.with(key, value));
            let what = format!("{optim} {keys:?}");
            let one = run(&case, &what);
            assert!(
                one.reports[STEPS - 1].loss < one.reports[0].loss,
                "{what} learns"
            );
            for degrees in TOPOLOGIES {
                for stage in 0..=3 {
                    let many = case.clone().on(degrees).with("zero_stage", stage);
                    let what = format!("{what} on {degrees:?}, stage {stage}");
                    let many = run(&many, &what);
                    let norms = [&many, &one].map(|run| run.reports[0].grad_norm);
                    let gap = (norms[0] / norms[1] - 1.0).abs();
                    assert!(gap <= *tolerance, "{what}: first norms {norms:?}");
                    assert_close_losses(&many.reports, &one.reports, *tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn all_stages_and_topologies_train_like_one_rank_for_thirty_steps() {
    holds("candle", &[WIDE, BF16]);
}
