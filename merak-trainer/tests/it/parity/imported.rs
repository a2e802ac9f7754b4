//! Runs of PyTorch go on: weights and optimizer from a folder of `torch.distributed.checkpoint`.

use std::{fs, path::Path};

use merak_ckpt::{ImportOptions, import_dcp};
use serde_json::Value;
use tempfile::tempdir;

use super::{BatchShape, Samples, TOLERANCE};
use crate::support::Case;

/// Steps that torch did before it saved, and after.
const STEPS: usize = 5;

/// `merak-ckpt/tests/goldens/dcp/make.py` trained a GPT-2 with AdamW, saved it, and trained on with
/// its first batches.
#[test]
fn a_run_that_torch_began_goes_on_with_the_losses_of_torch() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../merak-ckpt/tests/goldens/dcp");
    let read = |name: &str| -> Value {
        let text = fs::read(goldens.join(name)).expect("the golden is there");
        serde_json::from_slice(&text).expect("the golden is JSON")
    };
    let losses = read("expected.json")["gpt2"]["losses"].clone();
    let losses: Vec<f64> = serde_json::from_value(losses).expect("losses are numbers");
    let config = goldens.join("gpt2.json");
    let folder = tempdir().expect("a temporary folder");
    let options = ImportOptions::default();
    let imported = import_dcp(
        goldens.join("gpt2"),
        folder.path(),
        &config,
        "model.",
        &options,
    );

    let shape = BatchShape {
        batch: 2,
        microbatches: 2,
        dp: 1,
    };
    let case = Case::of(read("gpt2.json"))
        .with_data(Samples::new(STEPS, shape, 1234, 8, 0))
        .with_microbatches(2)
        .with("seq_length", 8)
        .with("max_steps", 2 * STEPS + 1)
        .with("learning_rate", 3e-3)
        .with("lr_scheduler_type", "constant")
        .with("warmup_steps", 0)
        .with(
            "resume_from_checkpoint",
            imported.expect("it imports").display(),
        );
    for degrees in [(1, 1, 1), (1, 2, 1)] {
        let run = case.clone().on(degrees).run(STEPS);
        let steps: Vec<_> = run.reports.iter().map(|report| report.step).collect();
        assert_eq!(steps, [6, 7, 8, 9, 10]);
        for (report, expected) in run.reports.iter().zip(&losses) {
            let gap = (report.loss / expected - 1.0).abs();
            assert!(
                gap < TOLERANCE,
                "{degrees:?}: {} is off by {gap}",
                report.step
            );
        }
    }
}
