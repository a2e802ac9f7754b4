//! What a rank keeps on libtorch, and where.

use merak_trace::backend::tch::Tch;

use super::on_tch;
use crate::laws::memory;
use crate::support::{Case, assert_close_losses, assert_same_bits};

/// The element types, and the relative tolerance of losses between two orders of summation.
const TYPES: [(&str, f64); 3] = [("f32", 1e-5), ("bf16", 4e-3), ("fp16", 1e-3)];

fn in_type(case: &Case, key: &str) -> Case {
    let case = on_tch(case).with("initial_scale_power", 14);
    match key {
        "f32" => case,
        key => case.with(key, true),
    }
}

#[test]
fn model_state_takes_what_its_stage_says_in_every_type() {
    let types = [
        ("", memory::BYTES),
        ("bf16", memory::SHORT_BYTES),
        ("fp16", memory::SHORT_BYTES),
    ];
    memory::takes_what_its_stage_says(&on_tch(&memory::case()), &types);
}

#[test]
fn state_and_masters_in_host_memory_or_files_train_like_those_beside_the_weights() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = Case::gpt2().with_model("n_embd", 64).on((2, 1, 1));
    for (key, tolerance) in TYPES {
        for stage in [0, 1, 3] {
            let case = in_type(&case, key).with("zero_stage", stage);
            let beside = case.run(3);
            let what = format!("{key}, stage {stage}");
            // The weights of the processor lie in host memory already.
            let host = case.clone().with("offload_optimizer", "host");
            assert_same_bits(&host.run(3), &beside, &what);
            // The step on host memory is not libtorch's, nor in its order.
            let files = case
                .writing(folder.path())
                .with("offload_optimizer", "disk");
            let files = files.run(3);
            assert_close_losses(&files.reports, &beside.reports, tolerance, &what);
        }
    }
}

#[test]
fn state_and_masters_of_a_device_train_in_host_memory_like_beside_the_weights() {
    // Where a device must be, the run says why it is not.
    if std::env::var_os("TEST_CUDA").is_none() && Tch::num_cuda_devices() == 0 {
        return;
    }
    for (key, tolerance) in TYPES {
        for stage in [0, 1, 3] {
            let case = in_type(&Case::gpt2(), key).with("compute.device", "cuda");
            let case = case.on((2, 1, 1)).with("zero_stage", stage);
            let host = case.clone().with("offload_optimizer", "host").run(3);
            let what = format!("{key}, stage {stage}");
            assert_close_losses(&host.reports, &case.run(3).reports, tolerance, &what);
        }
    }
}
