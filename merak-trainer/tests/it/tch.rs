//! The libtorch backend trains like the default one.

use crate::support::{Case, assert_close_losses, assert_close_tensors};

fn on_tch(case: &Case) -> Case {
    case.clone().with("compute.backend", "tch")
}

#[test]
fn tch_trains_like_the_default_backend() {
    for case in [Case::gpt2().with_tied(true), Case::llama()] {
        let case = case.with_dropout(0.1);
        let (first, all) = (case.run(0), case.run(20));
        for degrees in [(1, 1, 1), (1, 2, 2), (2, 1, 2)] {
            let case = on_tch(&case).on(degrees);
            let what = format!("{degrees:?}");
            assert_close_tensors(&case.run(0).gradients, &first.gradients, 1e-5, &what);
            let run = case.run(20);
            assert_close_losses(&run.reports[..1], &all.reports[..1], 1e-6, &what);
            assert_close_losses(&run.reports, &all.reports, 1e-4, &what);
        }
    }
}

#[test]
fn bf16_trains_close_to_f32_on_any_topology() {
    let wide = on_tch(&Case::gpt2().with_tied(true)).with_dropout(0.1);
    let narrow = wide.clone().with("bf16", true);
    let (wide, alone) = (wide.run(20), narrow.run(20));
    assert_close_losses(&alone.reports, &wide.reports, 2e-2, "against f32");
    for degrees in [(2, 1, 1), (1, 2, 2)] {
        let run = narrow.clone().on(degrees).run(20);
        assert_close_losses(&run.reports, &alone.reports, 1e-2, &format!("{degrees:?}"));
    }
    // The optimizer steps on f32 masters: they are no 16-bit numbers.
    let masters = alone.weights.values().flatten();
    let kept = masters.filter(|&&x| half::bf16::from_f32(x).to_f32().to_bits() != x.to_bits());
    assert!(kept.count() > 0);
}
