//! N9: with `parallel_vocab` tables, head and loss are cut, and nothing that a run computes changes
//! by more than the order of summation.

use merak_ckpt::{Checkpoint, ExportOptions, GenerateOptions, Kind, export_hf};
use merak_mpu::{
    Call, ReduceOp,
    testing::{Moment, Record},
    threads,
};
use merak_trace::Op;
use merak_trainer::{Workload, run_on};
use std::{collections::BTreeMap, fs};
use tempfile::tempdir;

use super::{
    encoders,
    generation::{generate, greedy},
};
use crate::support::{
    Case, assert_close_losses, assert_close_tensors, assert_same_bits, assert_same_tensors,
};

/// Degrees (dp, tp, pp) over which a vocabulary of an odd size is cut.
const TOPOLOGIES: [(usize, usize, usize); 4] = [(1, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 2)];

fn check(case: &Case, topologies: &[(usize, usize, usize)], steps: usize) {
    let (first, all) = (case.run(0), case.run(steps));
    for &degrees in topologies {
        let case = case.clone().on(degrees).with("parallel_vocab", true);
        let what = format!("{degrees:?}");
        assert_close_tensors(&case.run(0).gradients, &first.gradients, 1e-5, &what);
        let run = case.run(steps);
        assert_close_losses(&run.reports[..1], &all.reports[..1], 1e-6, &what);
        assert_close_losses(&run.reports, &all.reports, 1e-4, &what);
    }
}

/// A GPT-2 with dropout and a vocabulary that no degree divides.
fn gpt2(tied: bool) -> Case {
    let case = Case::gpt2().with_model("vocab_size", 103);
    case.with_dropout(0.1).with_tied(tied)
}

#[test]
fn a_cut_vocabulary_trains_like_a_whole_one() {
    for tied in [true, false] {
        check(&gpt2(tied), &TOPOLOGIES, 8);
    }
    let smoothed = gpt2(true).with("label_smoothing_factor", 0.1);
    check(&smoothed, &[(1, 2, 2)], 4);
}

#[test]
fn every_family_trains_with_a_cut_vocabulary() {
    let decoders = Case::relatives().into_iter().chain(encoders::models());
    for (_, case) in decoders {
        check(&case, &[(1, 2, 1)], 3);
    }
}

#[test]
fn zero_has_the_bits_of_stage_0() {
    let case = gpt2(true).on((2, 2, 2)).with_microbatches(2);
    let case = case.with("parallel_vocab", true);
    let whole = case.clone().with("zero_stage", 0).run(3);
    for stage in [1, 2, 3] {
        let divided = case.clone().with("zero_stage", stage);
        let divided = divided.with("zero_reduce_bucket_size", 1000);
        assert_same_bits(&divided.run(3), &whole, &format!("stage {stage}"));
    }
}

#[test]
fn rules_that_see_whole_tensors_count_no_padding() {
    for rule in ["adafactor", "muon", "lamb"] {
        for tied in [true, false] {
            let case = gpt2(tied).with("optim", rule).with("warmup_steps", 0);
            let one = case.run(6);
            let many = case.on((2, 2, 1)).with("parallel_vocab", true).run(6);
            let what = format!("{rule}, tied {tied}");
            assert_close_losses(&many.reports, &one.reports, 1e-4, &what);
        }
    }
}

#[test]
fn checkpoints_are_unpadded_and_go_on_elsewhere() {
    for rule in ["adamw_torch", "adafactor"] {
        let case = gpt2(true).with("optim", rule);
        let cut = case.clone().with("parallel_vocab", true);
        let moves = [
            (cut.clone().on((1, 2, 2)), case.clone()),
            (case.clone(), cut.clone().on((1, 4, 1))),
            (cut.clone().on((2, 2, 1)), cut.on((1, 4, 1))),
        ];
        for (from, to) in moves {
            let folder = tempdir().expect("a temporary folder");
            let writing = from.clone().writing(folder.path());
            writing.on_ranks(|trainer| {
                trainer.train_step()?;
                trainer.train_step()?;
                trainer.save_checkpoint()
            });
            let saved = Checkpoint::open(folder.path()).expect("it is complete");
            let to = to.writing(folder.path());
            let moved = to.with("resume_from_checkpoint", "latest");
            for (name, values) in &moved.run(0).weights {
                let bytes = saved
                    .read_whole(&Kind::Parameter, name)
                    .expect("it is there");
                assert_eq!(bytes, bytemuck::cast_slice::<f32, u8>(values), "{name}");
            }
            let straight = from.run(5);
            let rest = moved.run(3);
            assert_close_losses(&rest.reports, &straight.reports[2..], 1e-4, rule);
        }
    }
}

#[test]
fn exported_files_are_those_of_one_rank() {
    let export = |case: &Case| -> BTreeMap<String, Vec<u8>> {
        let folder = tempdir().expect("a temporary folder");
        let case = case.clone().writing(folder.path());
        case.on_ranks(merak_trainer::MerakTrainer::save_checkpoint);
        let hf = folder.path().join("hf");
        let saved = Checkpoint::open(folder.path()).expect("it is complete");
        export_hf(&saved, &hf, &ExportOptions::default()).expect("its names are known");
        let files = fs::read_dir(hf).expect("a folder");
        let files = files.map(|file| file.expect("readable"));
        let read = |file: fs::DirEntry| {
            let name = file.file_name().to_string_lossy().into_owned();
            (name, fs::read(file.path()).expect("readable"))
        };
        files.map(read).collect()
    };
    for tied in [true, false] {
        let case = gpt2(tied);
        let cut = case.clone().on((1, 2, 2)).with("parallel_vocab", true);
        let (one, many) = (export(&case), export(&cut));
        assert!(one.contains_key("model.safetensors"), "{:?}", one.keys());
        assert_eq!(one["model.safetensors"], many["model.safetensors"]);
    }
}

#[test]
fn greedy_tokens_are_those_of_one_rank() {
    let (prompts, greedy) = greedy();
    for case in [gpt2(true).with_dropout(0.0), Case::llama()] {
        let alone = generate(&case, &prompts, &greedy);
        for degrees in [(1, 2, 1), (1, 4, 1), (2, 2, 2)] {
            let cut = case.clone().on(degrees).with("parallel_vocab", true);
            assert_eq!(generate(&cut, &prompts, &greedy), alone, "{degrees:?}");
        }
    }
}

#[test]
fn a_decoding_gathers_the_logits_of_the_newest_positions_alone() {
    // Their five tokens pass together, then one of each.
    let prompts = [vec![5, 17, 3], vec![80, 2]];
    let options = GenerateOptions {
        max_new_tokens: 2,
        ..greedy().1
    };
    let case = gpt2(true).on((1, 2, 1)).with("parallel_vocab", true);
    let plan = case.plan();
    let members = threads::world(2, threads::WorldOptions::default());
    let ranks = run_on(members, |member| {
        let record = Record::default();
        let mut trainer = case.trainer(&plan, record.of(&member))?;
        record.take();
        trainer.generate(&prompts, &options)?;
        Ok(record.take())
    });
    // Bytes of hidden states, and of a rank's 52 of the 103 logits, one of which may be padding.
    let sum = |positions: usize| (Call::AllReduce(ReduceOp::Sum), positions * 32 * 4);
    let logits = (Call::AllGather, 2 * 52 * 4);
    // The lookup and four layers with two sums each: the last attention is between the last two.
    let pass = |positions| [vec![sum(positions); 7], vec![sum(2); 2], vec![logits]].concat();
    for events in ranks.expect("a healthy decoding") {
        let of_tensors = events.iter().filter(|event| event.group == "tensor");
        let started = of_tensors.filter(|event| event.moment == Moment::Started);
        let found: Vec<_> = started.map(|event| (event.call, event.bytes)).collect();
        assert_eq!(found, [pass(5), pass(2)].concat());
    }
}

#[test]
fn evaluation_reports_the_loss_of_one_rank() {
    let loss = |case: &Case| {
        let ranks = case.on_ranks(|trainer| Ok(trainer.evaluate()?.eval_loss));
        assert!(
            ranks
                .iter()
                .all(|loss| loss.to_bits() == ranks[0].to_bits())
        );
        ranks[0]
    };
    let case = gpt2(true).with("label_smoothing_factor", 0.1);
    let alone = loss(&case);
    let cut = loss(&case.on((2, 2, 1)).with("parallel_vocab", true));
    assert!((alone - cut).abs() < 1e-6 * alone, "{alone} and {cut}");
}

#[test]
fn adapters_beside_a_cut_vocabulary_learn_alike() {
    let folder = tempdir().expect("a temporary folder");
    for (targets, dora) in [(["wte", "c_attn"], false), (["lm_head", "c_fc"], false)] {
        let lora = serde_json::json!({ "target_modules": targets, "r": 4, "use_dora": dora });
        let case = gpt2(false).with_lora(folder.path(), &lora);
        let one = case.run(4);
        let many = case.on((1, 2, 2)).with("parallel_vocab", true).run(4);
        assert_close_losses(&many.reports, &one.reports, 1e-4, &format!("{targets:?}"));
    }
}

#[test]
fn a_degree_of_one_changes_no_bit() {
    let case = gpt2(true).on((2, 1, 2));
    let with = case.clone().with("parallel_vocab", true);
    assert_same_bits(&with.run(2), &case.run(2), "tp 1");
    assert_same_tensors(&with.run(0).weights, &case.run(0).weights, "tp 1");
}

#[test]
fn training_gathers_no_logits_and_a_rank_holds_its_share_of_them() {
    let case = gpt2(true).on((1, 2, 2)).with_model("vocab_size", 4001);
    let held = |case: &Case| {
        let plan = case.plan();
        let gathers = plan.graph.nodes().iter();
        let gathers = gathers.filter(|node| matches!(node.op, Op::AllGather { .. }));
        assert_eq!(gathers.count(), 0);
        let measured = case.on_ranks(|trainer| {
            trainer.train_step()?;
            Ok((trainer.memory(), trainer.peak_activation_bytes()))
        });
        let needs = plan.memory(&case.arguments(), &[Workload::Training]);
        let predicted = *needs.expect("a legal plan").last().expect("a rank");
        let (held, activations) = *measured.last().expect("a rank");
        assert_eq!(
            (held.weights, held.gradients, held.optimizer),
            (predicted.weights, predicted.gradients, predicted.optimizer)
        );
        let off = activations.abs_diff(predicted.activations);
        assert!(
            20 * off <= predicted.activations,
            "{activations} and {predicted:?}"
        );
        (held.weights, activations)
    };
    let (whole, cut) = (
        held(&case),
        held(&case.clone().with("parallel_vocab", true)),
    );
    // The table of 32 columns, of which a rank has 2001 rows, in f32.
    assert_eq!(whole.0 - cut.0, (4001 - 2001) * 32 * 4);
    // The logits of 2 samples of 8 positions.
    assert!(
        whole.1 - cut.1 >= 2 * 8 * (4001 - 2001) * 4,
        "{whole:?} and {cut:?}"
    );
}

/// With slices of the sequence too.
fn both(case: &Case, degrees: (usize, usize, usize)) -> Case {
    let cut = case.clone().on(degrees).with("parallel_vocab", true);
    cut.with("sequence_parallel", true)
}

#[test]
fn slices_of_the_sequence_and_of_the_vocabulary_train_like_one_rank() {
    let relatives = [gpt2(true), gpt2(false), Case::llama().with_dropout(0.1)];
    let encoders = encoders::models().into_iter();
    let encoders = encoders.filter(|(model, _)| ["bert", "t5"].contains(model));
    for case in relatives
        .into_iter()
        .chain(encoders.map(|(_, case)| case))
        .map(|case| case.with("label_smoothing_factor", 0.1))
    {
        let (first, all) = (case.run(0), case.run(8));
        for degrees in [(1, 2, 1), (1, 4, 1)] {
            let (case, what) = (both(&case, degrees), format!("{degrees:?}"));
            assert_close_tensors(&case.run(0).gradients, &first.gradients, 1e-5, &what);
            assert_close_losses(&case.run(8).reports, &all.reports, 1e-4, &what);
        }
    }
    let case = gpt2(true);
    let alone = case.run(8);
    for stage in [0, 1, 2, 3] {
        let run = both(&case, (2, 2, 2)).with("zero_stage", stage).run(8);
        assert_close_losses(&run.reports, &alone.reports, 1e-4, &format!("ZeRO {stage}"));
    }
}

#[test]
fn slices_of_both_write_the_tokens_and_the_losses_of_one_rank() {
    let (prompts, greedy) = greedy();
    for case in [gpt2(true).with_dropout(0.0), Case::llama()] {
        let loss = |case: &Case| case.on_ranks(|trainer| Ok(trainer.evaluate()?.eval_loss))[0];
        let (tokens, alone) = (generate(&case, &prompts, &greedy), loss(&case));
        for degrees in [(1, 2, 1), (2, 2, 2)] {
            let case = both(&case, degrees);
            assert_eq!(generate(&case, &prompts, &greedy), tokens, "{degrees:?}");
            let gap = (loss(&case) / alone - 1.0).abs();
            assert!(gap < 1e-6, "{degrees:?}: {gap:e}");
        }
    }
}
