//! L2: dp, tp and ZeRO change numbers by the order of summation only.

use crate::support::{Case, assert_close_losses, assert_close_tensors};

/// Degrees (dp, tp, pp) that sum in another order than one rank.
const TOPOLOGIES: [(usize, usize, usize); 6] = [
    (2, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (1, 2, 2),
    (2, 1, 2),
    (2, 2, 2),
];

fn check(case: &Case) {
    let (first, all) = (case.run(0), case.run(20));
    assert!(all.reports[19].loss < all.reports[0].loss, "it learns");
    for degrees in TOPOLOGIES {
        let case = case.clone().on(degrees);
        let what = format!("{degrees:?}");
        assert_close_tensors(&case.run(0).gradients, &first.gradients, 1e-5, &what);
        let run = case.run(20);
        assert_close_losses(&run.reports[..1], &all.reports[..1], 1e-6, &what);
        assert_close_losses(&run.reports, &all.reports, 1e-4, &what);
    }
}

#[test]
fn every_topology_trains_a_gpt2_like_one_rank() {
    check(&Case::gpt2().with_model("n_embd", 64).with_dropout(0.1));
}

#[test]
fn every_topology_trains_a_llama_like_one_rank() {
    check(&Case::llama().with_dropout(0.1));
}
