//! L3 and L5: interrupted runs go on like unbroken ones, and equal runs write equal bytes.

use std::{path::Path, sync::Arc, thread, time::Duration};

use merak_ckpt::{Checkpoint, Tolerance, diff};
use merak_trainer::{
    Result,
    data::{Dataset, MaskedDataset, Masking, MixtureDataset, Sample},
};
use tempfile::tempdir;

use crate::support::{Case, Tokens, assert_close_losses, assert_same_tensors, files, numbers};

/// Trains and saves; the folder of the checkpoint lies in `folder`.
pub(super) fn train_and_save(case: &Case, steps: usize, folder: &Path) {
    let case = case.clone().writing(folder);
    case.on_ranks(|trainer| {
        for _ in 0..steps {
            trainer.train_step()?;
        }
        trainer.save_checkpoint()
    });
}

/// The same case, resumed from the newest checkpoint of `folder`.
pub(super) fn resumed(case: &Case, folder: &Path) -> Case {
    case.clone()
        .writing(folder)
        .with("resume_from_checkpoint", "latest")
}

fn with_dropout() -> [(&'static str, Case); 2] {
    [
        ("gpt2", Case::gpt2().with_dropout(0.1)),
        ("llama", Case::llama().with_dropout(0.1)),
    ]
}

#[test]
fn a_resumed_run_has_the_bits_of_an_unbroken_one() {
    // 37 samples are 4 steps an epoch: the run stops within the first and ends within the second.
    for (family, case) in with_dropout() {
        for degrees in [
            (1, 1, 1),
            (2, 1, 1),
            (1, 2, 1),
            (1, 1, 4),
            (2, 1, 2),
            (2, 2, 2),
        ] {
            for zero in [0, 1, 2, 3] {
                if zero > 0 && degrees.0 == 1 {
                    continue; // one replica has nothing to divide
                }
                let case = case.clone().on(degrees).with("zero_stage", zero);
                let what = format!("{family} {degrees:?} zero {zero}");
                let folder = tempdir().expect("a temporary folder");
                let straight = case.run(6);
                train_and_save(&case, 3, folder.path());
                let rest = resumed(&case, folder.path()).run(3);
                assert_eq!(rest.reports[0].step, 4);
                assert_eq!(
                    numbers(&rest.reports),
                    numbers(&straight.reports[3..]),
                    "{what}"
                );
                assert_same_tensors(&rest.weights, &straight.weights, &what);
                assert_same_tensors(&rest.gradients, &straight.gradients, &what);
            }
        }
    }
}

#[test]
fn a_run_resumed_elsewhere_follows_the_same_curve() {
    let moves = [
        ((2, 2, 2), (1, 1, 4)),
        ((2, 2, 2), (1, 1, 1)),
        ((1, 1, 1), (2, 2, 2)),
        ((1, 2, 1), (2, 1, 2)),
        ((1, 1, 4), (1, 2, 2)),
        ((4, 1, 1), (2, 2, 1)),
    ];
    for (family, case) in with_dropout() {
        for (zero, (from, to)) in moves.iter().enumerate() {
            let case = case.clone().with("zero_stage", zero % 4);
            let what = format!("{family} {from:?} to {to:?}");
            let folder = tempdir().expect("a temporary folder");
            train_and_save(&case.clone().on(*from), 3, folder.path());
            let straight = case.clone().on(*from).run(12);
            // Another ZeRO stage as well.
            let case = case.on(*to).with("zero_stage", 3 - zero % 4);
            let moved = resumed(&case, folder.path());
            let saved = Checkpoint::open(folder.path()).unwrap();
            for (name, values) in &moved.run(0).weights {
                let bytes = saved
                    .read_whole(&merak_ckpt::Kind::Parameter, name)
                    .unwrap();
                assert_eq!(
                    bytes,
                    bytemuck::cast_slice::<f32, u8>(values),
                    "{name}: {what}"
                );
            }
            assert_close_losses(&moved.run(9).reports, &straight.reports[3..], 1e-4, &what);
        }
    }
}

/// The degrees of {1, 2, 4}³ with at most 8 ranks.
fn all_degrees() -> Vec<(usize, usize, usize)> {
    let degrees = [1, 2, 4];
    let pairs = degrees.iter().flat_map(|&dp| degrees.map(|tp| (dp, tp)));
    let all = pairs.flat_map(|(dp, tp)| degrees.map(|pp| (dp, tp, pp)));
    all.filter(|(dp, tp, pp)| dp * tp * pp <= 8).collect()
}

/// Runs on `from`, interrupted and resumed on each of `to`, with the other ZeRO stage where there
/// is one.
fn check_moves(case: &Case, from: (usize, usize, usize), to: &[(usize, usize, usize)]) {
    let zero = |(dp, tp, pp): (usize, usize, usize)| usize::from(dp > 1) * ((tp + pp) % 4);
    let case = case.clone().on(from).with("zero_stage", zero(from));
    let straight = case.run(5);
    let folders = [(); 2].map(|()| tempdir().expect("a temporary folder"));
    for folder in &folders {
        train_and_save(&case, 3, folder.path());
    }
    let [saved, again] = folders.each_ref().map(|folder| files(folder.path()));
    assert!(saved == again, "a second run on {from:?}");
    for &degrees in to {
        let what = format!("{from:?} to {degrees:?}");
        let moved = resumed(&case, folders[0].path()).on(degrees);
        if degrees == from {
            let moved = moved.run(2);
            assert_eq!(
                numbers(&moved.reports),
                numbers(&straight.reports[3..]),
                "{what}"
            );
            assert_same_tensors(&moved.weights, &straight.weights, &what);
            continue;
        }
        let other = usize::from(degrees.0 > 1) * (3 - zero(from));
        let moved = moved.with("zero_stage", other).run(2);
        assert_close_losses(&moved.reports, &straight.reports[3..], 1e-4, &what);
    }
}

#[test]
fn a_run_goes_on_from_any_topology_to_any_other() {
    let all = all_degrees();
    assert_eq!(all.len(), 17);
    let case = Case::gpt2().with_dropout(0.1);
    for &from in &all {
        check_moves(&case, from, &all);
    }
}

#[test]
fn every_topology_writes_the_same_tensors_from_the_same_state() {
    let folders = [(); 3].map(|()| tempdir().expect("a temporary folder"));
    let case = Case::gpt2().with_dropout(0.1);
    train_and_save(&case, 0, folders[0].path());
    train_and_save(&case.clone().on((2, 2, 2)), 0, folders[1].path());
    let elsewhere = resumed(&case.clone().on((1, 2, 2)), folders[1].path());
    train_and_save(
        &elsewhere
            .writing(folders[2].path())
            .with("resume_from_checkpoint", folders[1].path().display()),
        0,
        folders[2].path(),
    );
    let open = |index: usize| Checkpoint::open(folders[index].path()).unwrap();
    for index in [1, 2] {
        let exact = Tolerance {
            rtol: 0.0,
            atol: 0.0,
        };
        let report = diff(&open(0), &open(index), exact).unwrap();
        assert!(report.different.is_empty(), "{:?}", report.different);
        assert_eq!(report.equal, open(0).manifest().tensors.len());
    }
}

/// Samples that come late, each by another delay.
#[derive(Debug)]
struct Late;

impl Dataset for Late {
    fn len(&self) -> usize {
        37
    }

    fn get(&self, index: usize) -> Result<Sample> {
        thread::sleep(Duration::from_micros((index as u64 * 7919) % 3000));
        Tokens { samples: 37 }.get(index)
    }
}

#[test]
fn equal_runs_write_equal_bytes_whatever_the_timing() {
    for degrees in [(1, 1, 1), (2, 2, 2)] {
        let case = Case::gpt2().with_dropout(0.1).on(degrees);
        let write = |case: &Case| {
            let folder = tempdir().expect("a temporary folder");
            train_and_save(case, 3, folder.path());
            files(folder.path())
        };
        let first = write(&case);
        let names: Vec<_> = first.iter().map(|(name, _)| name.as_str()).collect();
        assert!(
            names.contains(&"checkpoints/step-00000003/manifest.json"),
            "{names:?}"
        );
        assert!(write(&case) == first, "a second run");
        let late = case
            .clone()
            .with_data(Late)
            .with_threads(2)
            .with("dataloader_num_workers", 2);
        assert!(write(&late) == first, "late samples and more threads");
        let cut = case
            .with("train_schedule", "gpipe")
            .with("activation_checkpointing", false);
        assert!(write(&cut) == first, "another schedule");
    }
}

#[test]
fn order_goes_on_where_it_stopped_and_finetuning_starts_anew() {
    let case = Case::gpt2();
    let folder = tempdir().expect("a temporary folder");
    train_and_save(&case, 5, folder.path());
    let straight = case.run(6);
    let first_of = |case: Case| case.run(1).reports.swap_remove(0);
    let finetuned = first_of(resumed(&case, folder.path()).with("finetune", true));
    assert_eq!(finetuned.step, 1);
    assert_eq!(finetuned.lr.to_bits(), straight.reports[0].lr.to_bits());
    assert!(
        finetuned.loss < straight.reports[0].loss,
        "it starts from the trained weights"
    );
    // The first batch of the epoch in hand instead of the next one.
    let restarted = first_of(resumed(&case, folder.path()).with("ignore_data_skip", true));
    assert_eq!(restarted.step, 6);
    assert_ne!(restarted.loss.to_bits(), straight.reports[5].loss.to_bits());
    let without = first_of(resumed(&case, folder.path()).with("no_load_optim", true));
    assert_eq!(without.loss.to_bits(), straight.reports[5].loss.to_bits());
}

/// Masked sequences, and a mixture of them and of others: both are drawn by a seed.
fn drawn(seed: u64) -> [Arc<dyn Dataset>; 2] {
    let masking = Masking {
        mlm_probability: 0.3,
        mask_replace_prob: 0.8,
        random_replace_prob: 0.1,
        mask_token: 100,
        vocab_size: 100,
        kept: None,
    };
    let tokens = (0..37 * 8).map(|i| i * i % 100).collect();
    let masked = MaskedDataset::new(tokens, 8, masking, seed, "training").expect("enough tokens");
    let masked: Arc<dyn Dataset> = Arc::new(masked);
    let parts = vec![
        (Arc::clone(&masked), 3.0),
        (Arc::new(Tokens { samples: 37 }) as Arc<dyn Dataset>, 1.0),
    ];
    let mixture = MixtureDataset::new(parts, seed).expect("a share for each");
    [masked, Arc::new(mixture)]
}

#[test]
fn a_run_resumed_with_another_seed_goes_on_with_the_draws_of_its_data() {
    let of = |data: &Arc<dyn Dataset>, seed: u64| {
        let mut case = Case::gpt2().with_dropout(0.1).with("seed", seed);
        case.data = Arc::clone(data);
        case
    };
    for (first, second) in drawn(1).iter().zip(&drawn(2)) {
        let case = of(first, 1);
        let folder = tempdir().expect("a temporary folder");
        train_and_save(&case, 3, folder.path());
        let finished = |case: &Case, steps: usize| {
            let mut ends = case.on_ranks(|trainer| {
                let steps = (0..steps).map(|_| trainer.train_step());
                let reports = steps.collect::<Result<Vec<_>>>()?;
                Ok((numbers(&reports), trainer.evaluate()?.eval_loss.to_bits()))
            });
            ends.swap_remove(0)
        };
        let (straight, loss) = finished(&case, 6);
        let other = resumed(&of(second, 2), folder.path());
        assert_eq!(finished(&other, 3), (straight[3..].to_vec(), loss));
    }
}

#[test]
fn a_run_of_epochs_ends_after_them_with_another_global_batch_too() {
    // 37 samples: 4 steps of 8 an epoch, 9 of 4, 2 of 16.
    let of = |microbatches: usize, folder: &Path| {
        Case::gpt2()
            .with_microbatches(microbatches)
            .with("max_steps", -1)
            .with("num_train_epochs", 2)
            .writing(folder)
    };
    for (microbatches, last) in [(2, 3 + 3 + 9), (8, 3 + 2), (4, 8)] {
        let folder = tempdir().expect("a temporary folder");
        let case = of(4, folder.path());
        train_and_save(&case, 3, folder.path());
        let other = resumed(&of(microbatches, folder.path()), folder.path());
        // Once more, within the second epoch where the batches are small.
        train_and_save(&other, 1, folder.path());
        let ends = other.on_ranks(|trainer| {
            assert_eq!(trainer.total_steps(), last, "{microbatches} microbatches");
            let end = trainer.train()?;
            Ok((
                end.global_step,
                end.epoch,
                trainer.resumed_from().map(|from| from.total_steps),
            ))
        });
        assert_eq!(
            ends[0],
            (last, 2.0, Some(last)),
            "{microbatches} microbatches"
        );
        // Where the epochs have passed nothing is left to do.
        let shorter = resumed(&of(4, folder.path()), folder.path()).with("num_train_epochs", 0.5);
        let steps = shorter.on_ranks(|trainer| Ok(trainer.train()?.steps));
        assert_eq!(steps, [0]);
    }
}

#[test]
fn a_checkpoint_written_while_training_goes_on_is_the_one_written_at_once() {
    for degrees in [(1, 1, 1), (2, 2, 2)] {
        let folder = tempdir().expect("a temporary folder");
        let case = Case::gpt2()
            .on(degrees)
            .with("save", true)
            .with("save_steps", 2);
        let train = |name: &str, is_async: bool| {
            let place = folder.path().join(name);
            let case = case
                .clone()
                .writing(&place)
                .with("async_save", is_async)
                .with("max_steps", 5);
            case.on_ranks(merak_trainer::MerakTrainer::train);
            place.join("checkpoints")
        };
        let (at_once, later) = (train("now", false), train("later", true));
        for step in [2, 4, 5] {
            let open = |place: &Path| Checkpoint::open(place.join(format!("step-{step:08}")));
            let [a, b] = [&at_once, &later].map(|place| open(place).expect("it was saved"));
            let report = diff(&a, &b, Tolerance::default()).expect("both are sound");
            assert!(report.different.is_empty(), "{report:?}");
            assert_eq!(a.manifest().header, b.manifest().header);
        }
    }
}
