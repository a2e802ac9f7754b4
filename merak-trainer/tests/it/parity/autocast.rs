//! `amp` on libtorch trains as PyTorch trains under `torch.autocast`.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;
use tempfile::tempdir;

use super::Golden;
use crate::support::assert_close_tensors;

/// What PyTorch gave under autocast.
#[derive(Debug, Deserialize)]
struct Autocast {
    base: String,
    dtype: String,
    losses: Vec<f64>,
    gradients: BTreeMap<String, Vec<f32>>,
}

/// Compares a training with its golden; `rounding` is half the distance from 1 to the next number
/// of the short type.
fn check(name: &str, rounding: f64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/autocast");
    let text = fs::read(folder.join(format!("{name}.json"))).expect("the golden is there");
    let golden: Autocast = serde_json::from_slice(&text).expect("it is as the script writes it");
    let base = Golden::read(&golden.base);
    let folder = tempdir().expect("a temporary folder");
    let start = base.start(folder.path());
    let case = base
        .case()
        .with("resume_from_checkpoint", start.display())
        .with("finetune", true)
        .with("compute.backend", "tch")
        .with("half_precision_backend", "amp")
        .with("initial_scale_power", 14)
        .with(&golden.dtype, true);
    let gradients = case.run(0).gradients;
    // Both round the same factors of a product; what differs are sums, and roundings on the way.
    assert_close_tensors(&gradients, &golden.gradients, 8.0 * rounding, name);
    for degrees in [(1, 1, 1), (1, 2, 2)] {
        let run = case.clone().on(degrees).run(golden.losses.len());
        for (report, expected) in run.reports.iter().zip(&golden.losses) {
            let (step, loss) = (report.step, report.loss);
            assert!(
                (loss / expected - 1.0).abs() <= 2.0 * rounding,
                "{name} {degrees:?}: loss {loss} in step {step}, expected {expected}"
            );
        }
    }
}

#[test]
fn amp_in_bf16_has_the_losses_and_gradients_of_autocast() {
    for name in ["gpt2-bf16", "llama-bf16"] {
        check(name, 1.0 / 256.0);
    }
}

#[test]
fn amp_in_f16_has_the_losses_and_gradients_of_autocast() {
    for name in ["gpt2-fp16", "llama-fp16"] {
        check(name, 1.0 / 2048.0);
    }
}
