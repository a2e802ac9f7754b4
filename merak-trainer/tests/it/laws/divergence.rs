//! The guard against divergence goes back to the last checkpoint and skips the data that led away,
//! alike on every topology.

use std::{
    fs, io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use merak_ckpt::Store;

use merak_trainer::{
    Callback, Divergence, MerakTrainer, Result, Rollback, TrainOutput,
    data::{Dataset, LABELS, Sample, SampleTensor},
    metrics::{METRICS_FILE, Progress, Reporter},
};
use merak_zero::{RuleStep, UpdateRule};
use serde_json::Value;
use tempfile::tempdir;

use super::encoders::vit;
use crate::support::{Case, SEQ};

/// Sequences that are learned at once, and a batch of noise in them.
#[derive(Debug)]
struct Spoilt {
    samples: usize,
    /// Number of the first sample of noise, and how many there are.
    noise: (usize, usize),
}

impl Dataset for Spoilt {
    fn len(&self) -> usize {
        self.samples
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let (first, count) = self.noise;
        let is_noise = (first..first + count).contains(&index);
        let token = |t: usize| {
            if is_noise {
                50 + (index * 31 + t * t * 17) % 50
            } else {
                1 + t % 2
            }
        };
        let ints = |shift: usize| {
            let tokens = (0..SEQ).map(|t| (token(t + shift) as u64).cast_signed());
            tokens.collect()
        };
        Ok(Sample::from([
            ("input_ids".to_owned(), SampleTensor::vector(ints(0))),
            (LABELS.to_owned(), SampleTensor::vector(ints(1))),
        ]))
    }
}

/// Notes the returns.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<Rollback>>>);

impl Callback for Notes {
    fn on_rollback(&mut self, rollback: &Rollback) {
        self.0
            .lock()
            .expect("nobody panics here")
            .push(rollback.clone());
    }
}

/// A step takes 2 samples, and an epoch 40 steps, of which some hold noise wherever the order puts
/// them.
fn guarded(noise: (usize, usize)) -> Case {
    Case::gpt2()
        .with_data(Spoilt { samples: 80, noise })
        .with("max_steps", 40)
        .with("per_device_train_batch_size", 1)
        .with_microbatches(2)
        .with("learning_rate", 1e-2)
        .with("warmup_steps", 0)
        .with("lr_scheduler_type", "constant")
        .with("save_steps", 5)
        .with("save", true)
        .with("divergence_guard", true)
        .with("divergence_window", 4)
        .with("divergence_factor", 3.0)
        .with("divergence_max_rollbacks", 20)
}

#[test]
fn a_spike_takes_the_run_back_past_the_data_on_every_topology() {
    let mut seen = Vec::new();
    for degrees in [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2)] {
        let folder = tempdir().expect("a temporary folder");
        let notes = Notes::default();
        let told = |rank| (rank == 0).then(|| Box::new(notes.clone()) as Box<dyn Callback>);
        let case = guarded((30, 4)).on(degrees).writing(folder.path());
        let ends = case
            .try_on_ranks_told(told, MerakTrainer::train)
            .expect("it goes on");
        let returns = notes.0.lock().unwrap().clone();
        assert!(!returns.is_empty(), "{degrees:?}");
        for end in &ends {
            assert_eq!((end.global_step, end.rollbacks), (40, returns.len()));
        }
        for Rollback {
            step,
            to_step,
            cause,
            loss,
            ..
        } in &returns
        {
            // A checkpoint is at most 5 steps old.
            assert!(to_step < step && step - to_step <= 5);
            assert!(matches!(cause, Divergence::Spike { median } if *loss > 3.0 * median));
        }
        seen.push(
            returns
                .iter()
                .map(|r| (r.step, r.to_step))
                .collect::<Vec<_>>(),
        );
    }
    assert!(seen.iter().all(|returns| *returns == seen[0]), "{seen:?}");
}

#[test]
fn a_resumed_run_goes_on_after_the_skipped_data_bit_for_bit() {
    let train = |case: &Case| {
        let ends = case.on_ranks(|trainer| Ok((trainer.train()?.rollbacks, trainer.parameters()?)));
        let (rollbacks, weights) = &ends[0];
        let values = weights.iter().flat_map(|(_, values)| values);
        let bits: Vec<_> = values.map(|value| value.to_bits()).collect();
        (*rollbacks, bits)
    };
    let case = guarded((30, 4));
    let [whole, broken] = [(); 2].map(|()| tempdir().expect("a temporary folder"));
    let (returns, expected) = train(&case.clone().writing(whole.path()));
    assert!(returns > 0);
    let broken = case.writing(broken.path());
    train(&broken.clone().with("max_steps", 30));
    let (_, resumed) = train(&broken.with("resume_from_checkpoint", "latest"));
    assert!(resumed == expected, "the same weights");
}

/// Images of which three in ten have a pixel that is no number.
#[derive(Debug)]
pub(super) struct NotNumbers;

impl Dataset for NotNumbers {
    fn len(&self) -> usize {
        80
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let pixel = |i: usize| ((index % 3 + 1) * i % 17) as f32 / 8.0 - 1.0;
        let mut pixels: Vec<_> = (0..2 * 8 * 8).map(pixel).collect();
        if index % 10 < 3 {
            pixels[77] = f32::NAN;
        }
        let pixels = SampleTensor::floats(vec![2, 8, 8], pixels);
        let class = vec![i64::from(index.is_multiple_of(3))];
        let class = SampleTensor::new(vec![], class);
        let tensors = [("pixel_values", pixels), (LABELS, class)];
        let named = tensors.map(|(name, tensor)| {
            let tensor = tensor.expect("as many values as the shape has");
            (name.to_owned(), tensor)
        });
        Ok(Sample::from(named))
    }
}

/// Trains with the records of a run, and notes of its returns.
fn recorded(case: &Case, folder: &Path) -> (Vec<TrainOutput>, Vec<Rollback>, Vec<Value>) {
    let (notes, reporter) = (Notes::default(), Reporter::default());
    let told = |rank| -> Vec<Box<dyn Callback>> {
        if rank == 0 {
            vec![Box::new(notes.clone()), Box::new(reporter.clone())]
        } else {
            Vec::new()
        }
    };
    let args = case.arguments();
    let ends = case.try_on_ranks_told(told, |trainer| {
        if trainer.mpu().rank().0 == 0 {
            let progress = Progress::lines(trainer.total_steps(), Box::new(io::sink()));
            reporter.start(trainer, &args, folder, None, progress)?;
        }
        trainer.train()
    });
    let records = fs::read_to_string(folder.join(METRICS_FILE)).expect("records");
    let records = records.lines().map(serde_json::from_str);
    let returns = notes.0.lock().expect("nobody panics here").clone();
    (
        ends.expect("it goes on"),
        returns,
        records.collect::<Result<_, _>>().expect("lines of JSON"),
    )
}

#[test]
fn numbers_that_are_not_finite_twice_in_a_row_take_the_run_back() {
    let mut seen = Vec::new();
    for degrees in [(1, 1, 1), (2, 1, 1), (1, 1, 2)] {
        let folder = tempdir().expect("a temporary folder");
        let case = vit(0.0)
            .with_data(NotNumbers)
            .with("max_steps", 24)
            .with("per_device_train_batch_size", 1)
            .with_microbatches(2)
            .with("save_steps", 1)
            .with("save_total_limit", 2)
            .with("divergence_guard", true)
            .with("divergence_factor", 1e6)
            .with("divergence_max_rollbacks", 20)
            .on(degrees)
            .writing(folder.path());
        let (ends, returns, records) = recorded(&case, folder.path());
        assert!(!returns.is_empty(), "{degrees:?}");
        for end in &ends {
            assert_eq!((end.global_step, end.rollbacks), (24, returns.len()));
            assert!(end.training_loss.is_finite());
        }
        // No step follows the last one.
        let is_second = |r: &Rollback| r.step == 24 || r.to_step + 2 == r.step;
        let is_met = |r: &Rollback| r.cause == Divergence::NotFinite && is_second(r);
        assert!(returns.iter().all(is_met), "{returns:?}");
        let steps: Vec<_> = returns.iter().map(|r| r.step as u64).collect();
        let is_return = |record: &&Value| !record["rolled_back_from"].is_null();
        let written: Vec<_> = records.iter().filter(is_return).collect();
        let from = written.iter().map(|r| r["rolled_back_from"].as_u64());
        assert_eq!(from.collect::<Option<Vec<_>>>(), Some(steps.clone()));
        assert_eq!(written[0]["cause"], "the loss is not finite");
        // The steps that a return undid count no more.
        let counts = records
            .iter()
            .filter_map(|r| Some([r["step"].as_u64()?, r["tokens"].as_u64()?]));
        let counts: Vec<_> = counts.collect();
        let [_, each] = counts[0];
        assert!(
            counts.iter().all(|[step, tokens]| *tokens == step * each),
            "{counts:?}"
        );
        seen.push(steps);
    }
    assert!(seen.iter().all(|steps| *steps == seen[0]), "{seen:?}");
}

#[test]
fn checkpoints_that_gave_finite_losses_are_kept() {
    let folder = tempdir().expect("a temporary folder");
    let case = vit(0.0)
        .with_data(NotNumbers)
        .with("max_steps", 400)
        .with("per_device_train_batch_size", 1)
        .with_microbatches(2)
        .with("save_steps", 6)
        .with("divergence_guard", true)
        .with("divergence_factor", 1e6)
        .with("divergence_max_rollbacks", 1)
        .writing(folder.path());
    let notes = Notes::default();
    let told = |_| Some(Box::new(notes.clone()) as Box<dyn Callback>);
    let failed = case.try_on_ranks_told(told, MerakTrainer::train);
    let text = merak_trainer::chain(&failed.expect_err("too many data are no numbers"));
    let returns = notes.0.lock().expect("nobody panics here").clone();
    let last = returns.last().expect("a return before the last").to_step;
    assert!(
        text.contains(&format!("training went back to step {last} ")),
        "{text}"
    );
    let steps = Store::in_output_dir(folder.path())
        .steps()
        .expect("checkpoints");
    assert_eq!(steps.last(), Some(&(last as u64)), "{steps:?} {returns:?}");
}

/// Gradient descent that breaks weights in its sixth step, as often as `times` says.
#[derive(Debug)]
struct Breaks {
    times: AtomicUsize,
}

impl UpdateRule for Breaks {
    fn name(&self) -> &'static str {
        "breaks"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn step(&self, step: &RuleStep<'_>, params: &mut [f32], grads: &[f32], _: &mut [&mut [f32]]) {
        for (param, grad) in params.iter_mut().zip(grads) {
            *param -= step.lr as f32 * grad;
        }
        let fewer = |times: usize| times.checked_sub(1);
        let order = Ordering::SeqCst;
        if step.time == 6 && self.times.fetch_update(order, order, fewer).is_ok() {
            params.fill(f32::NAN);
        }
    }
}

fn breaking(times: usize) -> Case {
    let times = AtomicUsize::new(times);
    guarded((0, 0))
        .with_rule(Breaks { times })
        .with("learning_rate", 0.01)
        .with("max_steps", 9)
        .with("save_steps", 1)
        .with("divergence_factor", 1e6)
        .with("divergence_max_rollbacks", 2)
}

#[test]
fn weights_that_always_break_end_a_run_that_has_no_way_back() {
    let folder = tempdir().expect("a temporary folder");
    let case = breaking(usize::MAX).writing(folder.path());
    let failed = case
        .try_on_ranks(MerakTrainer::train)
        .expect_err("it breaks each time");
    let text = merak_trainer::chain(&failed);
    let told = "training went back to step 1 \"divergence_max_rollbacks\" times";
    assert!(text.contains(told), "{text}");
}

#[test]
fn a_checkpoint_of_broken_weights_makes_way_for_the_one_before() {
    let folder = tempdir().expect("a temporary folder");
    let notes = Notes::default();
    let told = |_| Some(Box::new(notes.clone()) as Box<dyn Callback>);
    let case = breaking(1).writing(folder.path());
    let ends = case.try_on_ranks_told(told, |trainer| {
        let end = trainer.train()?;
        Ok((end, trainer.parameters()?))
    });
    let (end, weights) = &ends.expect("it goes on")[0];
    assert_eq!((end.global_step, end.rollbacks), (9, 3));
    let mut values = weights.iter().flat_map(|(_, values)| values);
    assert!(values.all(|value| value.is_finite()));
    let returns = notes.0.lock().expect("nobody panics here").clone();
    let steps: Vec<_> = returns.iter().map(|r| (r.step, r.to_step)).collect();
    assert_eq!(steps, [(8, 6), (8, 6), (8, 5)]);
    let store = Store::in_output_dir(folder.path());
    assert_eq!(
        store.steps().expect("checkpoints"),
        (1..=9).collect::<Vec<_>>()
    );
}

#[test]
fn a_run_that_cannot_be_saved_ends_with_what_was_tried() {
    let folder = tempdir().expect("a temporary folder");
    // At this learning rate the loss rises, and a factor of nearly 1 makes each rise a spike.
    let case = guarded((0, 0))
        .with("learning_rate", 3.0)
        .with("divergence_factor", 1.000_001)
        .with("divergence_max_rollbacks", 2)
        .with("save_steps", 100)
        .writing(folder.path());
    let failed = case
        .try_on_ranks(MerakTrainer::train)
        .expect_err("it diverges");
    let text = merak_trainer::chain(&failed);
    assert!(
        text.contains("there is no checkpoint to go back to"),
        "{text}"
    );
    assert!(!failed.is_user_error());
}
