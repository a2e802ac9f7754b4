//! Examples 13 and 15 train one model from one start, in two libraries.

use merak_ckpt::{Tolerance, diff};
use merak_examples::train_on;
use std::path::Path;

#[expect(dead_code, reason = "its main is not called")]
#[path = "../../13-pipeline-a-candle-model.rs"]
mod candle_program;
#[expect(dead_code, reason = "its main is not called")]
#[path = "../../15-pipeline-a-tch-model.rs"]
mod tch_program;

#[test]
fn candle_and_libtorch_give_the_same_losses_and_weights_on_one_rank_and_on_four() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let candle = |pp, dp, folder: &Path| train_on(pp, dp, folder, candle_program::train).unwrap();
    let tch = |pp, dp, folder: &Path| train_on(pp, dp, folder, tch_program::train).unwrap();
    let (expected, weights) = candle(1, 1, &at("candle"));
    for (name, (losses, found)) in [
        ("candle on 4", candle(2, 2, &at("candle-4"))),
        ("libtorch on 1", tch(1, 1, &at("tch"))),
        ("libtorch on 4", tch(2, 2, &at("tch-4"))),
    ] {
        merak_mpu::testing::assert_close(&losses, &expected, 0.0, 1e-5);
        let tolerance = Tolerance {
            rtol: 0.0,
            atol: 1e-3,
        };
        let report = diff(&weights, &found, tolerance).unwrap();
        assert!(report.different.is_empty(), "{name}: {report:?}");
    }
    assert!(expected[expected.len() - 1] < 0.5 * expected[0]);
}
