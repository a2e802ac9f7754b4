//! State in files steps as state in memory does.

use crate::{
    device::Mirror,
    fixture::{config, data_parallel, grads, held, len, lr, noises, step},
};
use merak_mpu::testing::world;
use merak_zero::{Error, OptimizerKind, ZeroStage};
use std::sync::Arc;

const STAGES: [ZeroStage; 4] = [
    ZeroStage::Replicated,
    ZeroStage::OptimizerState,
    ZeroStage::Gradients,
    ZeroStage::Parameters,
];

#[test]
fn state_in_files_has_the_bits_of_state_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    for (stage, optim) in STAGES
        .map(|stage| (stage, OptimizerKind::AdamW))
        .into_iter()
        .chain(OptimizerKind::ALL.map(|optim| (ZeroStage::OptimizerState, optim)))
    {
        let mut config = config(stage);
        config.optimizer.optim = optim;
        world(2, |member| {
            let mut memory = data_parallel(&member, config.clone());
            let files = data_parallel(&member, config.clone());
            let mut files = files.on_disk(folder.path()).unwrap();
            let mut expected = held(&memory, &noises(1, len()));
            let mut found = expected.clone();
            for t in 0..3 {
                let own = || grads(t, member.rank().0);
                step(&mut memory, &mut expected, own(), lr(t)).unwrap();
                // A snapshot keeps the values that it was made of.
                let (snapshot, before) = (files.state().into_owned(), memory_of(&files));
                step(&mut files, &mut found, own(), lr(t)).unwrap();
                assert!(snapshot.slices().map(|s| s.values.to_vec()).eq(before));
                let num: usize = files.state().slices().map(|s| s.values.len()).sum();
                assert_eq!(files.state().num_in_files(), num, "{optim}");
            }
            assert!(found == expected && files.state() == memory.state());
            let state = memory.state().into_owned();
            files.edit_state(|own| *own = state).unwrap();
            assert!(files.state() == memory.state());
            assert!(files.state().num_in_files() > 0 || optim == OptimizerKind::Sgd);
        });
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}

fn memory_of(optimizer: &merak_zero::ZeroOptimizer) -> Vec<Vec<f32>> {
    let state = optimizer.state();
    state.slices().map(|s| s.values.to_vec()).collect()
}

#[test]
fn a_folder_that_holds_no_files_is_an_error() {
    let file = tempfile::NamedTempFile::new().unwrap();
    world(1, |member| {
        let optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        let error = optimizer.on_disk(file.path()).unwrap_err();
        assert!(matches!(error, Error::StateFile { .. }), "{error}");
    });
}

#[test]
fn state_lies_on_a_device_or_on_disk_and_not_in_both() {
    let folder = tempfile::tempdir().unwrap();
    world(1, |member| {
        let made = || data_parallel(&member, config(ZeroStage::Replicated));
        let on_device = made().on_device(Arc::new(Mirror)).unwrap();
        let on_disk = made().on_disk(folder.path()).unwrap();
        for twice in [
            on_device.on_disk(folder.path()),
            on_disk.on_device(Arc::new(Mirror)),
        ] {
            let error = twice.unwrap_err();
            assert!(matches!(error, Error::TwoPlaces), "{error}");
        }
    });
}
