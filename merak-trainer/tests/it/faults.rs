//! Ranks that fail, files that are damaged: every run ends with a message, and what was saved stays
//! good.

#[cfg(unix)]
mod processes; // ranks that are processes

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use insta::assert_snapshot;
use merak_ckpt::{Checkpoint, Kind, Layout, Piece, ShardKind, Store, TensorEntry};
use merak_trainer::{
    Callback, Error, MerakTrainer, Result, StepReport, TrainerControl, chain,
    data::{Dataset, LABELS, Sample, SampleTensor},
};
use tempfile::{TempDir, tempdir};

use crate::support::{Case, Tokens, VOCAB, alone, numbers, without_checksums};

const TOKENS: Tokens = Tokens { samples: 37 };

/// What happens when the bad sample is read.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Unreadable,
    Panic,
    /// The process ends without a word.
    Exit,
    /// The process is stopped.
    Stop,
    LabelOutOfRange,
    TokenOutOfRange,
    OtherShape,
}

/// Samples of which one is bad.
#[derive(Debug, Clone, Copy)]
struct Faulty {
    fault: Fault,
    bad: usize,
}

#[expect(clippy::panic, reason = "a data set of a user's may do anything")]
impl Dataset for Faulty {
    fn len(&self) -> usize {
        TOKENS.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let mut sample = TOKENS.get(index)?;
        if index != self.bad {
            return Ok(sample);
        }
        let mut replace = |name: &str, values: Vec<i64>| {
            sample.insert(name.to_owned(), SampleTensor::vector(values));
        };
        let vocab = i64::try_from(VOCAB).expect("a small number");
        match self.fault {
            Fault::Unreadable => {
                return Err(Error::Read {
                    path: "sample-file".into(),
                    source: io::Error::other("the disk is gone"),
                });
            }
            Fault::Panic => panic!("sample {index} is cursed"),
            Fault::Exit => std::process::exit(0),
            Fault::Stop => {
                let own = std::process::id().to_string();
                let stop = Command::new("kill").args(["-STOP", &own]).status();
                assert!(stop.expect("a system has kill").success());
            }
            Fault::LabelOutOfRange => replace(LABELS, vec![vocab; 8]),
            Fault::TokenOutOfRange => replace("input_ids", vec![-1; 8]),
            Fault::OtherShape => replace("input_ids", vec![1; 7]),
        }
        Ok(sample)
    }
}

/// The sample that the last replica reads first in step `step`, counted from 0.
fn sample_of_step(case: &Case, step: usize) -> usize {
    let args = case.arguments();
    let shape = merak_trainer::data::BatchShape {
        batch: args.per_device_train_batch_size,
        microbatches: args.gradient_accumulation_steps,
        dp: args.dp,
    };
    let order = merak_trainer::data::TrainingOrder::new(TOKENS.len(), shape, args.data_seed());
    order
        .expect("enough samples")
        .microbatch(step, args.dp - 1, 0)
        .indices[0]
}

fn steps(trainer: &mut MerakTrainer, count: usize) -> Result<()> {
    (0..count).try_for_each(|_| trainer.train_step().map(|_| ()))
}

/// The message, without the seconds and paths that differ from run to run.
fn message(error: &Error, folder: &Path) -> String {
    without_checksums(&chain(error).replace(&folder.display().to_string(), "OUT"))
}

/// Trains with a bad sample in step 3, after a checkpoint of step 2. The run must end soon, the
/// checkpoint must be whole, and training must go on from it with good data like an unbroken run.
fn fails_in_step_3(degrees: (usize, usize, usize), fault: Fault) -> String {
    let folder = tempdir().expect("a temporary folder");
    let case = Case::gpt2()
        .with_dropout(0.1)
        .with("distributed.timeout_s", 120)
        .on(degrees)
        .writing(folder.path());
    let bad = sample_of_step(&case, 2);
    let started = Instant::now();
    let failure = case
        .clone()
        .with_data(Faulty { fault, bad })
        .try_on_ranks(|trainer| {
            steps(trainer, 2)?;
            trainer.save_checkpoint()?;
            steps(trainer, 3)
        });
    let error = failure.expect_err("a bad sample");
    assert!(
        started.elapsed() < Duration::from_mins(1),
        "it waited for its deadline"
    );
    expect_good_checkpoint(&case, folder.path());
    // The order of the samples says which it is.
    message(&error, folder.path()).replace(&format!("sample {bad} has"), "sample BAD has")
}

/// Checks that the checkpoint of step 2 is whole, and that training goes on from it like an
/// unbroken run.
fn expect_good_checkpoint(case: &Case, folder: &Path) {
    let saved = Checkpoint::open(folder).expect("a checkpoint was saved");
    let report = saved.verify();
    assert!(report.damage.is_empty(), "it is whole: {report:?}");
    assert_eq!(saved.manifest().header.step, 2);
    let rest = case.clone().with("resume_from_checkpoint", "auto").run(2);
    assert_eq!(numbers(&rest.reports), numbers(&case.run(4).reports[2..]));
}

#[test]
fn a_rank_that_cannot_read_its_sample_ends_the_run_on_all() {
    // The last replica: rank 1 of two, and of the pipelines its first stage.
    assert_snapshot!(fails_in_step_3((2, 1, 1), Fault::Unreadable), @"rank 1 (stage 0) failed in step 3: cannot read sample-file: the disk is gone");
    assert_snapshot!(fails_in_step_3((1, 1, 1), Fault::Unreadable), @"rank 0 (stage 0) failed in step 3: cannot read sample-file: the disk is gone");
    let everywhere = fails_in_step_3((2, 2, 2), Fault::Unreadable);
    assert!(
        everywhere.contains("cannot read sample-file: the disk is gone"),
        "{everywhere}"
    );
}

#[test]
fn a_rank_that_panics_ends_the_run_on_all() {
    assert_snapshot!(fails_in_step_3((2, 1, 1), Fault::Panic), @"rank 1 (stage 0) failed in step 3: panicked: sample 1 is cursed");
}

/// Panics when it is told of a step.
struct Cursed;

#[expect(clippy::panic, reason = "a callback of a user's may panic")]
impl Callback for Cursed {
    fn on_step(&mut self, report: &StepReport, _: &mut TrainerControl) {
        panic!("step {} is cursed", report.step);
    }

    fn on_save_start(&mut self, step: usize) {
        panic!("saving {step} is cursed");
    }
}

#[test]
fn a_panic_beside_the_computation_names_rank_stage_and_step_too() {
    let folder = tempdir().expect("a temporary folder");
    let case = Case::gpt2().on((1, 1, 2)).writing(folder.path());
    let failed = |save: bool| {
        let failure = case.try_on_ranks_told(
            |rank| (rank == 1).then(|| Box::new(Cursed) as Box<dyn Callback>),
            |trainer| {
                if save {
                    trainer.train_step()?;
                    trainer.save_checkpoint().map(drop)
                } else {
                    trainer.train().map(drop)
                }
            },
        );
        message(&failure.expect_err("it panics"), folder.path())
    };
    assert_snapshot!(failed(false), @"rank 1 (stage 1) failed in step 1: panicked: step 1 is cursed");
    assert_snapshot!(failed(true), @"rank 1 (stage 1) failed to save step 1: panicked: saving 1 is cursed");
}

#[test]
fn samples_that_fit_no_model_end_the_run_with_their_place() {
    assert_snapshot!(fails_in_step_3((2, 1, 1), Fault::LabelOutOfRange), @r#"rank 1 (stage 0) failed in step 3: "labels" of sample BAD has the value 101 at position 0, but this gpt2 model takes 0 to 100, or -100 for none"#);
    assert_snapshot!(fails_in_step_3((1, 1, 2), Fault::LabelOutOfRange), @r#"rank 1 (stage 1) failed in step 3: "labels" of sample BAD has the value 101 at position 0, but this gpt2 model takes 0 to 100, or -100 for none"#);
    assert_snapshot!(fails_in_step_3((1, 1, 4), Fault::TokenOutOfRange), @r#"rank 0 (stage 0) failed in step 3: "input_ids" of sample BAD has the value -1 at position 0, but this gpt2 model takes 0 to 100"#);
    let shapes = fails_in_step_3((1, 1, 1), Fault::OtherShape);
    let number = |c: char| if c.is_ascii_digit() { 'N' } else { c };
    assert_snapshot!(shapes.chars().map(number).collect::<String>(), @r#"rank N (stage N) failed in step N: the tensor "input_ids" of sample NN is iNN of shape [N], but must be iNN of shape [N] as in the batch's first sample"#);
}

#[test]
fn a_rank_that_never_comes_is_named_when_the_deadline_has_passed() {
    let case = Case::gpt2().on((2, 1, 1)).with("distributed.timeout_s", 2);
    let failure = case.try_on_ranks(|trainer| {
        trainer.train_step()?;
        let member = trainer.mpu().member();
        let started = Instant::now();
        // Rank 1 comes when rank 0 has given it up, or much later.
        while member.rank() == 1
            && member.failure().is_none()
            && started.elapsed() < Duration::from_mins(1)
        {
            std::thread::sleep(Duration::from_millis(10));
        }
        trainer.train_step()
    });
    let text = chain(&failure.expect_err("rank 1 is late"));
    for part in [
        "rank 0 (stage 0) failed in step 2: ",
        "no answer within 2s",
        "rank 1",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// A run of two steps, saved.
fn saved(case: &Case) -> TempDir {
    let folder = tempdir().expect("a temporary folder");
    case.clone().writing(folder.path()).on_ranks(|trainer| {
        steps(trainer, 2)?;
        trainer.save_checkpoint()
    });
    folder
}

fn checkpoint_file(folder: &Path, prefix: &str) -> PathBuf {
    let step = Store::in_output_dir(folder).path_of(2);
    let files = fs::read_dir(step).expect("a checkpoint");
    let mut found: Vec<_> = files
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .collect();
    found.sort();
    found.swap_remove(0)
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).expect("a readable file");
    change(&mut bytes);
    fs::write(path, bytes).expect("a writable file");
}

/// Loads into fresh trainers that must keep their weights; returns the message.
fn load_fails(case: &Case, folder: &Path) -> String {
    let path = Store::in_output_dir(folder).path_of(2);
    let before = case.run(0).weights;
    let failure = case.try_on_ranks(|trainer| {
        let fresh = trainer.parameters()?;
        let outcome = trainer.load_checkpoint(&path);
        assert!(outcome.is_err(), "no rank may load it");
        assert_eq!(trainer.parameters()?, fresh, "no weight may change");
        assert_eq!(trainer.global_step(), 0);
        outcome
    });
    assert_eq!(case.run(0).weights, before);
    message(&failure.expect_err("a bad checkpoint"), folder)
}

#[test]
fn a_damaged_checkpoint_is_refused_before_any_weight_changes() {
    let case = Case::gpt2();
    for prefix in ["model-", "optim-"] {
        let folder = saved(&case);
        edit(&checkpoint_file(folder.path(), prefix), |bytes| {
            let last = bytes.len() - 5;
            bytes[last] ^= 1;
        });
        let text = load_fails(&case, folder.path());
        match prefix {
            "model-" => {
                assert_snapshot!(text, @"checkpoint OUT/checkpoints/step-00000002 is damaged: model-00000.safetensors, tensor `transformer.wte.weight`: checksum CHECKSUM, expected CHECKSUM; there is no complete older one");
            }
            _ => {
                assert_snapshot!(text, @"checkpoint OUT/checkpoints/step-00000002 is damaged: optim-00000.safetensors, tensor `transformer.wte.weight`: checksum CHECKSUM, expected CHECKSUM; there is no complete older one");
            }
        }
        // The damage lies in one file; the ranks that read others must not go on either.
        for degrees in [(1, 1, 4), (2, 2, 1)] {
            let text = load_fails(&case.clone().on(degrees), folder.path());
            assert!(
                text.contains("is damaged") && text.contains(prefix),
                "{text}"
            );
        }
    }
}

#[test]
fn a_truncated_file_and_a_missing_one_are_named() {
    let case = Case::gpt2();
    let folder = saved(&case);
    let path = checkpoint_file(folder.path(), "model-");
    edit(&path, |bytes| bytes.truncate(bytes.len() / 2));
    assert_snapshot!(load_fails(&case, folder.path()), @"checkpoint OUT/checkpoints/step-00000002 is damaged: model-00000.safetensors: the file has 111680 bytes, expected 223360; there is no complete older one");
    fs::remove_file(path).expect("a removable file");
    assert_snapshot!(load_fails(&case, folder.path()), @"checkpoint OUT/checkpoints/step-00000002 is damaged: model-00000.safetensors: the file is missing; there is no complete older one");
    edit(&checkpoint_file(folder.path(), "manifest"), |bytes| {
        bytes.truncate(100);
    });
    assert_snapshot!(load_fails(&case, folder.path()), @"checkpoint OUT/checkpoints/step-00000002 is damaged: manifest.json: EOF while parsing a string at line 5 column 43; there is no complete older one");
}

#[test]
fn auto_goes_on_from_the_newest_complete_checkpoint_or_starts_anew() {
    let case = Case::gpt2();
    let folder = tempdir().expect("a temporary folder");
    let writing = case.clone().writing(folder.path());
    let auto = writing.clone().with("resume_from_checkpoint", "auto");
    let first_step = |case: &Case| case.on_ranks(|trainer| Ok(trainer.global_step()))[0];
    assert_eq!(first_step(&auto), 0, "nothing is saved yet");
    writing.on_ranks(|trainer| {
        for _ in 0..2 {
            steps(trainer, 1)?;
            trainer.save_checkpoint()?;
        }
        Ok(())
    });
    assert_eq!(first_step(&auto), 2);
    let newest = checkpoint_file(folder.path(), "model-");
    edit(&newest, |bytes| bytes.truncate(bytes.len() - 1));
    assert_eq!(first_step(&auto), 1, "the newest is damaged");
    let text = load_fails(&case, folder.path());
    assert!(text.contains("OUT/checkpoints/step-00000001"), "{text}");
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let folder = saved(&Case::gpt2());
    let others = [
        Case::gpt2().with_model("n_embd", 64),
        Case::gpt2().with_model("n_layer", 3),
        Case::gpt2().with_model("n_layer", 5),
        Case::gpt2().with_tied(false),
        Case::llama(),
    ];
    let texts: Vec<_> = others
        .iter()
        .map(|case| load_fails(case, folder.path()))
        .collect();
    assert_snapshot!(texts.join("\n"), @r#"
    the checkpoint OUT/checkpoints/step-00000002 is of another model: transformer.wte.weight has shape [101, 32] there, but [101, 64] in the model
    the checkpoint OUT/checkpoints/step-00000002 is of another model: the model has no parameter transformer.h.3.attn.c_attn.bias
    the checkpoint OUT/checkpoints/step-00000002 is of another model: it has no parameter transformer.h.4.ln_1.weight
    the checkpoint OUT/checkpoints/step-00000002 is of another model: it has no parameter lm_head.weight
    the checkpoint OUT/checkpoints/step-00000002 is of another model: it has no parameter model.embed_tokens.weight
    "#);
}

#[test]
fn a_missing_part_names_the_flag_that_excuses_it() {
    let case = Case::gpt2();
    let optimizer = saved(&case.clone().with("no_save_optim", true));
    assert_snapshot!(load_fails(&case, optimizer.path()), @r#"the checkpoint OUT/checkpoints/step-00000002 has no optimizer state: set "no_load_optim" to go on without it"#);
    let random = saved(&case.clone().with("no_save_rng", true));
    assert_snapshot!(load_fails(&case, random.path()), @r#"the checkpoint OUT/checkpoints/step-00000002 has no random state: set "no_load_rng" to go on without it"#);
    for (folder, flag) in [(&optimizer, "no_load_optim"), (&random, "no_load_rng")] {
        let path = folder.path().join("checkpoints/step-00000002");
        let excused = case.clone().with(flag, true);
        let loaded = excused.on_ranks(|trainer| trainer.load_checkpoint(&path));
        assert_eq!(loaded[0].global_step, 2);
    }
}

/// Writes a checkpoint again without some of its tensors.
fn rewrite(saved: &Checkpoint, to: &Path, keeps: impl Fn(&TensorEntry) -> bool) {
    let store = Store::in_output_dir(to);
    let header = saved.manifest().header.clone();
    let draft = store.begin(header.step).expect("a writable folder");
    let write = |kind: ShardKind| {
        let is_of_kind = |tensor: &&TensorEntry| {
            (tensor.kind == Kind::Parameter) == (kind == ShardKind::Model) && keeps(tensor)
        };
        let tensors = saved.manifest().tensors.iter().filter(is_of_kind);
        let tensors: Vec<_> = tensors
            .map(|tensor| {
                let bytes = saved.read_whole(&tensor.kind, &tensor.name);
                (
                    tensor,
                    Layout::whole(&tensor.shape),
                    bytes.expect("it reads"),
                )
            })
            .collect();
        let pieces = tensors.iter().map(|(tensor, layout, bytes)| {
            let piece = Piece {
                kind: &tensor.kind,
                name: &tensor.name,
                dtype: tensor.dtype,
                layout,
                range: None,
            };
            (piece, bytes.as_slice())
        });
        let pieces: Vec<_> = pieces.collect();
        draft.write_shard(kind, 0, &pieces).expect("it writes")
    };
    let shards = vec![write(ShardKind::Model), write(ShardKind::Optimizer)];
    draft.commit(shards, header, &[]).expect("it is complete");
}

#[test]
fn a_checkpoint_without_some_of_the_moments_names_the_way_on() {
    let case = Case::gpt2();
    let folder = saved(&case);
    let whole = Checkpoint::open(folder.path()).expect("it was saved");
    let refused = |keeps: &dyn Fn(&TensorEntry) -> bool| {
        let folder = tempdir().expect("a temporary folder");
        rewrite(&whole, folder.path(), keeps);
        let path = folder.path().join("checkpoints/step-00000002");
        let excused = case.clone().with("no_load_optim", true);
        let loaded = excused.on_ranks(|trainer| trainer.load_checkpoint(&path));
        assert_eq!(loaded[0].global_step, 2);
        load_fails(&case, folder.path())
    };
    assert_snapshot!(refused(&|tensor| tensor.kind == Kind::Parameter), @r#"the checkpoint OUT/checkpoints/step-00000002 has no optimizer state (exp_avg, exp_avg_sq): set "no_load_optim" to go on without it"#);
    let one = |tensor: &TensorEntry| {
        tensor.kind.as_str() != "exp_avg_sq" || tensor.name != "transformer.h.1.ln_1.bias"
    };
    assert_snapshot!(refused(&one), @r#"the checkpoint OUT/checkpoints/step-00000002 has no optimizer state `exp_avg_sq` of `transformer.h.1.ln_1.bias`: set "no_load_optim" to go on without it"#);
}

#[test]
fn a_missing_checkpoint_is_no_silent_fresh_start() {
    let folder = tempdir().expect("a temporary folder");
    let case = Case::gpt2().writing(folder.path());
    let fail = |from: &str| {
        let from = from.replace("OUT", &folder.path().display().to_string());
        let case = case.clone().with("resume_from_checkpoint", from);
        let failure = case.try_on_ranks(|trainer| Ok(trainer.global_step()));
        message(&failure.expect_err("nothing to resume"), folder.path())
    };
    assert_snapshot!(fail("latest"), @"no checkpoint at OUT: expected a folder with a manifest.json, or one whose checkpoints folder has a `latest`");
    assert_snapshot!(fail("OUT/none"), @"no checkpoint at OUT/none: the path does not exist, expected a checkpoint, an output folder, latest or auto");
}

#[test]
fn an_output_folder_that_cannot_be_written_is_named() {
    let folder = tempdir().expect("a temporary folder");
    let file = folder.path().join("file");
    fs::write(&file, "in the way").expect("a writable folder");
    for degrees in [(1, 1, 1), (1, 2, 2)] {
        let case = Case::gpt2().on(degrees).writing(&file.join("run"));
        let failure = case.try_on_ranks(MerakTrainer::save_checkpoint);
        let text = message(&failure.expect_err("a file in the way"), folder.path());
        if degrees == (1, 1, 1) {
            assert_snapshot!(text, @"cannot create OUT/file/run/checkpoints: Not a directory (os error 20)");
        } else {
            assert!(text.contains("OUT/file/run"), "{text}");
        }
    }
}

#[test]
fn a_thread_that_does_not_start_is_an_error() {
    // The ranks' own threads have stacks of a size of their own.
    let no_room = (usize::MAX / 4).to_string();
    alone("faults::without_threads", &[("RUST_MIN_STACK", &no_room)]);
}

#[test]
#[ignore = "no thread can start: alone in a process, which the test above starts"]
fn without_threads() {
    let folder = tempdir().expect("a temporary folder");
    let case = || Case::gpt2().writing(folder.path()).on((1, 1, 2));
    let failure = |case: Case, body: fn(&mut MerakTrainer) -> Result<()>| {
        let error = case.try_on_ranks(body).expect_err("it needs a thread");
        chain(&error)
    };
    let read = failure(case().with("dataloader_num_workers", 1), |trainer| {
        trainer.train_step().map(drop)
    });
    let write = failure(case(), MerakTrainer::save_later);
    let delete = failure(case().with("save_total_limit", 1), |trainer| {
        for _ in 0..3 {
            trainer.train_step()?;
            trainer.save_checkpoint()?;
        }
        Ok(())
    });
    let compute = failure(case().with_threads(2), |trainer| {
        trainer.train_step().map(drop)
    });
    for (text, refused) in [
        (read, "cannot start a thread to read data ahead: "),
        (write, "cannot start a thread to write "),
        (delete, "cannot start a thread to delete checkpoints: "),
        (compute, "could not start 2 compute threads: "),
    ] {
        assert!(
            text.contains(refused) && text.contains("(os error "),
            "{text}"
        );
    }
}
