//! L1 to L3 of adapters: they train alike on every topology, and nothing else is trained.

mod tied; // tables that two layers share

use std::{collections::BTreeSet, path::Path};

use merak_ckpt::{Adapter, Checkpoint, GenerateOptions, Kind, Store};
use merak_mpu::{
    Call, ReduceOp,
    testing::{Moment, Record},
    threads,
};
use merak_trainer::{MerakTrainer, Workload, run_on};
use serde_json::{Value, json};

use super::encoders;
use crate::support::{Case, assert_close_losses, assert_close_tensors, assert_same_bits, numbers};

/// Fused and plain, column and row layers of a GPT-2, a table, biases and a module that is trained
/// whole. Both factors are random, so that both have gradients from the start.
pub(crate) fn everything() -> Value {
    json!({
        "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "init_lora_weights": false, "bias": "lora_only",
        "target_modules": ["c_attn", "c_proj", "c_fc", "wpe"], "modules_to_save": ["ln_f"],
        "rank_pattern": { "h.1.attn.c_attn": 2 }, "alpha_pattern": { "c_fc": 3 },
    })
}

fn gpt2(folder: &Path) -> Case {
    let case = Case::gpt2().with_dropout(0.1);
    case.with_lora(folder, &everything())
}

fn llama(folder: &Path) -> Case {
    let lora = json!({ "target_modules": "all-linear", "init_lora_weights": false, "r": 2, "lora_alpha": 1, "use_rslora": true });
    Case::llama().with_lora(folder, &lora)
}

/// Magnitudes beside column and row layers, fused and plain, with and without dropout.
fn dora(folder: &Path) -> Case {
    let lora = json!({ "use_dora": true, "target_modules": ["c_attn", "c_proj"], "r": 3, "lora_alpha": 3,
        "lora_dropout": 0.1, "init_lora_weights": false });
    Case::gpt2().with_lora(folder, &lora)
}

fn llama_dora(folder: &Path) -> Case {
    let lora = json!({ "use_dora": true, "target_modules": "all-linear", "r": 2, "lora_alpha": 1 });
    Case::llama().with_lora(folder, &lora)
}

/// The same where ranks that share a key head keep it whole, and the layer's matrix is used twice.
fn llama_dropout(folder: &Path) -> Case {
    let lora = json!({ "use_dora": true, "target_modules": ["k_proj", "v_proj", "o_proj"], "r": 2, "lora_alpha": 1,
        "lora_dropout": 0.1, "init_lora_weights": false });
    Case::llama().with_lora(folder, &lora)
}

/// The convolution of patches beside linear layers, with an adapter rank of its own.
pub(crate) fn vit(folder: &Path) -> Case {
    let lora = json!({ "target_modules": ["query", "projection"], "rank_pattern": { "projection": 3 }, "r": 2,
        "lora_alpha": 3, "lora_dropout": 0.1, "bias": "lora_only", "modules_to_save": ["classifier"],
        "init_lora_weights": false });
    encoders::vit(0.1).with_lora(folder, &lora)
}

fn vit_dora(folder: &Path) -> Case {
    let lora = json!({ "use_dora": true, "target_modules": ["output.dense", "projection"], "r": 2, "lora_alpha": 3,
        "init_lora_weights": false });
    encoders::vit(0.0).with_lora(folder, &lora)
}

/// The convolution cut over ranks, along its outputs.
fn vit_columns(folder: &Path) -> Case {
    let case = vit(folder).with(
        "col_para_list",
        r#"["query", "key", "value", "projection"]"#,
    );
    case.with("row_para_list", r#"["attention.output"]"#)
}

/// The same along its inputs, with magnitudes.
fn vit_rows(folder: &Path) -> Case {
    let case = vit_dora(folder).with("col_para_list", r#"["query", "key", "value"]"#);
    case.with("row_para_list", r#"["attention.output", "projection"]"#)
}

#[test]
fn adapters_train_on_every_topology_like_on_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let of_text = [gpt2, llama, dora, llama_dora, llama_dropout];
    let of_images = [vit, vit_dora, vit_columns, vit_rows];
    for make in of_text.into_iter().chain(of_images) {
        let case = make(folder.path());
        let (first, all) = (case.run(0), case.run(12));
        assert_ne!(all.weights, first.weights, "it is trained");
        for degrees in [(2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 2), (1, 4, 1)] {
            let case = case.clone().on(degrees);
            let what = format!("{degrees:?}");
            assert_close_tensors(&case.run(0).gradients, &first.gradients, 1e-5, &what);
            let run = case.run(12);
            assert_close_losses(&run.reports[..1], &all.reports[..1], 1e-6, &what);
            assert_close_losses(&run.reports, &all.reports, 1e-4, &what);
        }
    }
}

#[test]
fn no_stage_begins_within_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let case = llama_dora(folder.path()).with("split_method", "nearest_min_deps");
    let alone = case.run(4);
    for degrees in [(1, 2, 2), (1, 2, 3), (1, 2, 4)] {
        let run = case.clone().on(degrees).run(4);
        assert_close_losses(&run.reports, &alone.reports, 1e-4, &format!("{degrees:?}"));
    }
}

#[test]
fn stages_recomputation_and_zero_change_no_bit_of_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let case = gpt2(folder.path());
    let alone = case.run(4);
    for (stages, chunk) in [(1, 0), (2, 0), (2, 1), (4, 2)] {
        let case = case
            .clone()
            .on((1, 1, stages))
            .with("checkpoint_num_layers", chunk);
        assert_same_bits(&case.run(4), &alone, &format!("{stages} stages, {chunk}"));
    }
    let replicas = case.on((2, 1, 2));
    let whole = replicas.clone().with("zero_stage", 0).run(4);
    let divided = |stage: u8| replicas.clone().with("zero_stage", stage).run(4);
    assert_same_bits(&divided(1), &whole, "zero 1");
    for stage in [2, 3] {
        let what = format!("zero {stage}");
        assert_close_losses(&divided(stage).reports, &whole.reports, 1e-5, &what);
    }
}

#[test]
fn a_stage_without_adapters_has_nothing_to_train() {
    let folder = tempfile::tempdir().unwrap();
    let lora = json!({ "layers_to_transform": 3, "init_lora_weights": false });
    let case = Case::gpt2().with_lora(folder.path(), &lora);
    let alone = case.run(4);
    let names: Vec<_> = alone.gradients.keys().map(String::as_str).collect();
    insta::assert_snapshot!(names.join("\n"), @r"
    transformer.h.3.attn.c_attn.lora_A.default.weight
    transformer.h.3.attn.c_attn.lora_B.default.weight
    ");
    for stages in [2, 4] {
        assert_same_bits(&case.clone().on((1, 1, stages)).run(4), &alone, "stages");
    }
}

#[test]
fn what_is_frozen_stays_and_has_no_gradient_and_no_state() {
    let folder = tempfile::tempdir().unwrap();
    let case = gpt2(folder.path())
        .on((2, 2, 2))
        .writing(&folder.path().join("run"))
        .with("save", true);
    let (before, after) = (case.run(0), case.run(4));
    let trained = |name: &str| {
        let bias = [".c_attn.bias", ".c_proj.bias", ".c_fc.bias"];
        name.contains(".lora_")
            || name.contains(".ln_f.")
            || bias.iter().any(|end| name.ends_with(end))
    };
    for (name, values) in &after.weights {
        assert_eq!(values != &before.weights[name], trained(name), "{name}");
    }
    assert!(after.gradients.keys().all(|name| trained(name)));
    case.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.save_checkpoint()
    });
    let saved = Checkpoint::open(folder.path().join("run")).unwrap();
    let manifest = saved.manifest();
    assert_eq!(
        manifest.tensors_of(&Kind::Parameter).count(),
        after.weights.len()
    );
    for kind in ["exp_avg", "exp_avg_sq"] {
        let kind = Kind::optimizer(kind);
        let names: Vec<_> = manifest.tensors_of(&kind).map(|t| &t.name).collect();
        assert_eq!(names.len(), after.gradients.len());
        assert!(names.into_iter().all(|name| trained(name)));
    }
}

#[test]
fn a_rank_holds_what_the_plan_says_and_nothing_for_what_is_frozen() {
    let folder = tempfile::tempdir().unwrap();
    let lora = json!({ "target_modules": ["c_attn"], "r": 2 });
    let case = Case::gpt2().with_lora(folder.path(), &lora);
    let plan = case.plan();
    let expected = plan.memory(&case.arguments(), &[Workload::Training]);
    let expected = expected.unwrap()[0];
    let held = case.on_ranks(|trainer| {
        trainer.train_step()?;
        Ok(trainer.memory())
    });
    let (weights, gradients, optimizer) = (held[0].weights, held[0].gradients, held[0].optimizer);
    assert_eq!(
        (weights, gradients, optimizer),
        (expected.weights, expected.gradients, expected.optimizer)
    );
    // Four layers, 32 features, rank 2: A [2, 32], B [96, 2].
    let factors = 4 * (2 * 32 + 96 * 2);
    assert_eq!((gradients, optimizer), (4 * factors, 8 * factors));
    assert_eq!(weights, 4 * plan.graph.num_elements());
}

#[test]
fn replicas_exchange_nothing_of_what_is_frozen() {
    let folder = tempfile::tempdir().unwrap();
    let lora = json!({ "target_modules": ["c_attn"], "r": 2 });
    let case = Case::gpt2().with_lora(folder.path(), &lora);
    let case = case.on((2, 1, 1)).with_microbatches(2);
    // Four layers, 32 features, rank 2: A [2, 32], B [96, 2], in f32.
    let factors = 4 * 4 * (2 * 32 + 96 * 2);
    for stage in 1..=3 {
        let case = case.clone().with("zero_stage", stage);
        let plan = case.plan();
        let members = threads::world(2, threads::WorldOptions::default());
        let ranks = run_on(members, |member| {
            let record = Record::default();
            let mut trainer = case.trainer(&plan, record.of(&member))?;
            record.take();
            trainer.train_step()?;
            Ok(record.take())
        });
        let events = ranks.expect("a healthy training").concat();
        let bytes = |call: Call| -> usize {
            let started = events.iter().filter(|e| e.moment == Moment::Started);
            let of_call = started.filter(|e| e.group == "data_sequence" && e.call == call);
            of_call.map(|event| event.bytes).sum()
        };
        // Each rank brings all gradients, and its part of the parameters or room for all of them.
        let reduced = bytes(Call::ReduceScatterInPlace(ReduceOp::Sum));
        assert_eq!(reduced, 2 * factors, "stage {stage}");
        if stage == 3 {
            let gathered = bytes(Call::AllGatherInPlace);
            assert!(gathered > 0 && gathered.is_multiple_of(2 * factors));
        } else {
            assert_eq!(bytes(Call::AllGather), factors, "stage {stage}");
        }
    }
}

#[test]
fn a_resumed_adapter_goes_on_where_it_stood() {
    let folder = tempfile::tempdir().unwrap();
    let case = gpt2(folder.path())
        .on((1, 2, 2))
        .writing(&folder.path().join("run"));
    let unbroken = case.run(4);
    case.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.train_step()?;
        trainer.save_checkpoint()
    });
    let resumed = case.clone().with("resume_from_checkpoint", "latest");
    let run = resumed.run(2);
    assert_eq!(numbers(&run.reports), numbers(&unbroken.reports[2..]));
    assert!(run.weights == unbroken.weights && run.gradients == unbroken.gradients);
    // On another topology the sums run in another order.
    let elsewhere = resumed.on((2, 1, 1)).run(2);
    assert_close_losses(
        &elsewhere.reports,
        &unbroken.reports[2..],
        1e-5,
        "elsewhere",
    );
}

/// A checkpoint has the trained parameters in files of its own, and refers to a base for the rest.
fn assert_depends_on_base(saved: &Checkpoint, trained: &[String], all: usize) {
    let tensors = saved.manifest().tensors_of(&Kind::Parameter);
    let (own, shared): (Vec<_>, Vec<_>) =
        tensors.partition(|tensor| trained.contains(&tensor.name));
    let counts = (own.len(), shared.len());
    assert_eq!(counts, (trained.len(), all - trained.len()));
    let is_in_base = |file: &str| file.starts_with("../base-00001/");
    let mut own = own.iter().flat_map(|tensor| &tensor.slices);
    assert!(own.all(|slice| !is_in_base(&slice.file)));
    let mut shared = shared.iter().flat_map(|tensor| &tensor.slices);
    assert!(shared.all(|slice| is_in_base(&slice.file)));
}

#[test]
fn checkpoints_of_an_adapter_keep_what_is_not_trained_once() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let case = gpt2(folder.path()).on((1, 2, 2)).writing(&run);
    case.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.save_checkpoint()?;
        trainer.train_step()?;
        trainer.save_later()?;
        trainer.finish_save()
    });
    let store = Store::in_output_dir(&run);
    // The first checkpoint is not needed.
    std::fs::remove_dir_all(store.path_of(1)).unwrap();
    for degrees in [(1, 2, 2), (2, 1, 1)] {
        let resumed = case.clone().on(degrees);
        let resumed = resumed.with("resume_from_checkpoint", "latest");
        resumed.on_ranks(|trainer| {
            trainer.train_step()?;
            trainer.save_checkpoint()
        });
    }
    assert_eq!(store.bases().unwrap(), [1]);
    let (_, base) = store.base(1).unwrap();
    let trained: Vec<_> = case
        .plan()
        .trained_params()
        .map(|p| p.name.clone())
        .collect();
    let all = case.plan().graph.params().len();
    assert_eq!(base.manifest().tensors.len(), all - trained.len());
    for step in 2..=4 {
        let saved = Checkpoint::open(store.path_of(step)).unwrap();
        assert_depends_on_base(&saved, &trained, all);
    }

    // Other weights below the same adapter do not use this base.
    let other = case.clone().with("seed", 4321);
    other.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.save_checkpoint()
    });
    assert_eq!(store.bases().unwrap(), [1, 2]);
    let bases = [1, 4].map(|step| {
        let saved = Checkpoint::open(store.path_of(step)).unwrap();
        saved.manifest().base.clone().unwrap().folder
    });
    assert_eq!(bases, ["base-00002", "base-00001"]);

    std::fs::remove_dir_all(store.folder().join("base-00001")).unwrap();
    let resumed = case.with("resume_from_checkpoint", store.path_of(4).display());
    let error = resumed
        .try_on_ranks(|_| Ok(()))
        .expect_err("the base is gone");
    let error = merak_trainer::chain(&error);
    assert!(
        error.contains("the folder is gone: put it back beside the checkpoint"),
        "{error}"
    );
}

#[test]
fn a_base_outlives_a_crash_before_its_first_checkpoint_and_not_its_last_one() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let case = gpt2(folder.path()).writing(&run);
    let save = |case: Case| {
        case.on_ranks(|trainer| {
            trainer.train_step()?;
            trainer.save_checkpoint()
        });
    };
    // Two replicas that divide their state write it.
    save(case.clone().on((2, 1, 2)).with("zero_stage", 1));
    let store = Store::in_output_dir(&run);
    let (base, _) = store.base(1).unwrap();
    // What a kill leaves after the base and before the checkpoint, or while a base is written.
    std::fs::remove_dir_all(store.path_of(1)).unwrap();
    std::fs::remove_file(store.folder().join("latest")).unwrap();
    for unfinished in [".tmp-base-00002", ".tmp-step-00000001"] {
        std::fs::create_dir(store.folder().join(unfinished)).unwrap();
    }
    let again = case.clone().on((1, 2, 1));
    save(again.with("resume_from_checkpoint", "auto"));
    let names = || {
        let entries = std::fs::read_dir(store.folder()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect::<Vec<_>>()
    };
    assert_eq!(names(), ["base-00001", "latest", "step-00000001"]);
    let saved = Checkpoint::open(&run).unwrap();
    assert_eq!(saved.manifest().base.as_ref(), Some(&base));
    assert!(saved.verify().damage.is_empty());

    // The checkpoint that takes the last one's place has another base.
    save(case.with("seed", 4321));
    assert_eq!(names(), ["base-00002", "latest", "step-00000001"]);
}

#[test]
fn weights_with_another_adapter_merged_into_them_are_saved_whole() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let case = llama(folder.path()).on((1, 2, 1)).writing(&run);
    case.on_ranks(MerakTrainer::save_checkpoint);
    let saved = Checkpoint::open(&run).unwrap();
    let tensors = &saved.manifest().tensors;
    let adapter = Adapter::open(run.join("adapter"), &case.model, tensors).unwrap();
    let found = case.on_ranks(|trainer| {
        let adapters = [None, Some(&adapter), None].into_iter();
        let found = adapters.map(|adapter| {
            trainer.set_adapter(adapter)?;
            let path = trainer.save_checkpoint()?;
            let saved = Checkpoint::open(path)?;
            let tensors = saved.manifest().tensors_of(&Kind::Parameter).count();
            Ok((saved.manifest().base.is_some(), tensors))
        });
        found.collect::<merak_trainer::Result<Vec<_>>>()
    });
    let all = case.plan().graph.params().len();
    assert_eq!(found[0], [(true, all), (false, all), (true, all)]);
}

#[test]
fn a_run_goes_on_with_the_adapter_that_its_checkpoint_has() {
    let folder = tempfile::tempdir().unwrap();
    let plain = Case::gpt2().writing(&folder.path().join("run"));
    let case = plain
        .clone()
        .with_lora(folder.path(), &json!({ "modules_to_save": ["ln_f"] }));
    case.on_ranks(MerakTrainer::save_checkpoint);
    let other = folder.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let refusal = |case: Case| {
        let case = case.with("resume_from_checkpoint", "latest");
        let error = case.try_on_ranks(|_| Ok(())).expect_err("another adapter");
        let error = merak_trainer::chain(&error);
        let error = error.replace(&folder.path().display().to_string(), "FOLDER");
        error
            .split(" is of another model: ")
            .last()
            .unwrap_or_default()
            .to_owned()
    };
    let with = |lora: Value| plain.clone().with_lora(&other, &lora);
    let saved = || json!({ "modules_to_save": ["ln_f"] });
    let messages = [
        refusal(with(json!({ "modules_to_save": "ln_f", "lora_alpha": 16 }))),
        // As for an evaluation.
        refusal(with(json!({ "use_rslora": true })).with("finetune", true)),
        refusal(with(json!({ "bias": "all", "modules_to_save": ["ln_f"] }))),
        refusal(with(json!({}))),
        refusal(with(json!({ "r": 4 }))),
        refusal(with(json!({ "target_modules": ["c_fc"] }))),
        refusal(with(saved()).with("adapter_name", "mine")),
        refusal(plain.clone()),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
    the `lora_alpha` of its adapter is 8.0, but 16 in "lora_config": take FOLDER/run/checkpoints/step-00000000/adapter_config.json, or fold the adapter into the weights with `merak-ckpt export-hf` and start another on them
    the `use_rslora` of its adapter is null, but true in "lora_config": take FOLDER/run/checkpoints/step-00000000/adapter_config.json, or fold the adapter into the weights with `merak-ckpt export-hf` and start another on them
    the `bias` of its adapter is "none", but "all" in "lora_config": take FOLDER/run/checkpoints/step-00000000/adapter_config.json, or fold the adapter into the weights with `merak-ckpt export-hf` and start another on them
    the `modules_to_save` of its adapter is ["ln_f"], but null in "lora_config": take FOLDER/run/checkpoints/step-00000000/adapter_config.json, or fold the adapter into the weights with `merak-ckpt export-hf` and start another on them
    the `r` of its adapter is 8, but 4 in "lora_config": take FOLDER/run/checkpoints/step-00000000/adapter_config.json, or fold the adapter into the weights with `merak-ckpt export-hf` and start another on them
    the `target_modules` of its adapter is ["c_attn"], but ["c_fc"] in "lora_config": take FOLDER/run/checkpoints/step-00000000/adapter_config.json, or fold the adapter into the weights with `merak-ckpt export-hf` and start another on them
    its adapter is `default`, but "adapter_name" is `mine`
    it has the adapter `default`: set "lora_config" to FOLDER/run/checkpoints/step-00000000/adapter_config.json, or fold it into the weights with `merak-ckpt export-hf`
    "#);
    let same = with(saved()).with("resume_from_checkpoint", "latest");
    same.on_ranks(|_| Ok(()));
}

#[test]
fn what_is_saved_whole_has_no_factors_and_is_what_peft_finds() {
    let folder = tempfile::tempdir().unwrap();
    let lora =
        json!({ "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["norm", "v_proj"] });
    let plan = Case::llama().with_lora(folder.path(), &lora).plan();
    let params = plan.graph.params();
    assert!(
        params
            .iter()
            .all(|param| !param.name.contains("v_proj.lora_"))
    );
    let trained = plan.trained_params().map(|param| param.name.clone());
    let mut trained: Vec<_> = trained.filter(|name| !name.contains(".lora_")).collect();
    trained.sort();
    let ends = [
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.v_proj",
    ];
    let layers =
        (0..4).flat_map(|layer| ends.map(|end| format!("model.layers.{layer}.{end}.weight")));
    let mut expected: Vec<_> = layers.chain(["model.norm.weight".to_owned()]).collect();
    expected.sort();
    assert_eq!(trained, expected);
    let config = plan
        .draft
        .lora
        .as_ref()
        .expect("there is one")
        .config
        .to_json();
    assert_eq!(config["modules_to_save"], lora["modules_to_save"]);
}

#[test]
fn an_adapter_starts_on_a_base_and_leaves_its_logits_alone() {
    let folder = tempfile::tempdir().unwrap();
    let base = Case::gpt2().writing(&folder.path().join("base"));
    let loss = base.on_ranks(|trainer| {
        for _ in 0..3 {
            trainer.train_step()?;
        }
        trainer.save_checkpoint()?;
        trainer.gradients().map(|(loss, _)| loss)
    });
    let adapted = base
        .writing(&folder.path().join("run"))
        .with_lora(folder.path(), &json!({ "lora_dropout": 0.0 }))
        .with(
            "resume_from_checkpoint",
            folder.path().join("base").display(),
        )
        .with("finetune", true);
    let run = adapted.run(1);
    // Another batch than the base's next one, but the weights of a model that has learned.
    assert!(run.reports[0].loss < loss[0] * 1.2, "{run:?}");
    let error = adapted.with("finetune", false).try_on_ranks(|_| Ok(()));
    let error = merak_trainer::chain(&error.expect_err("a run without an adapter"));
    let end = error.split(": ").last();
    insta::assert_snapshot!(end.unwrap_or_default(), @r#"it has no adapter; with "finetune", one starts on its weights"#);
}

#[test]
fn an_adapter_beside_the_layers_makes_way_for_another_and_for_none() {
    let folder = tempfile::tempdir().unwrap();
    let factors = |lora: Value| Case::gpt2().with_lora(folder.path(), &lora);
    let greedy = GenerateOptions {
        max_new_tokens: 6,
        temperature: 0.0,
        ..GenerateOptions::default()
    };
    let prompts = [vec![5, 17, 3]];
    let base = Case::gpt2().on_ranks(|trainer| trainer.generate(&prompts, &greedy));
    for (name, lora) in [
        (
            "plain",
            json!({ "target_modules": ["c_attn", "wpe"], "init_lora_weights": false, "lora_alpha": 64 }),
        ),
        (
            "dora",
            json!({ "target_modules": ["c_attn", "c_proj"], "init_lora_weights": false, "lora_alpha": 64, "use_dora": true }),
        ),
    ] {
        let run = folder.path().join(name);
        let case = factors(lora).writing(&run);
        let own = case.on_ranks(|trainer| {
            trainer.train_step()?;
            trainer.save_checkpoint()?;
            trainer.generate(&prompts, &greedy)
        });
        assert_ne!(own, base, "{name}");
        let saved = Checkpoint::open(&run).unwrap();
        let tensors = &saved.manifest().tensors;
        let mut adapter = Adapter::open(run.join("adapter"), &case.model, tensors).unwrap();
        adapter.measure(&saved).unwrap();
        for degrees in [(1, 1, 1), (1, 2, 2)] {
            let case = case
                .clone()
                .on(degrees)
                .with("resume_from_checkpoint", run.display());
            let found = case.on_ranks(|trainer| {
                let adapters = [None, Some(&adapter), None].into_iter();
                let found = adapters.map(|adapter| {
                    trainer.set_adapter(adapter)?;
                    trainer.generate(&prompts, &greedy)
                });
                found.collect::<merak_trainer::Result<Vec<_>>>()
            });
            assert_eq!(
                found[0],
                [&base[0], &own[0], &base[0]].map(Clone::clone),
                "{name} {degrees:?}"
            );
        }
    }
}

#[test]
fn a_convolution_has_the_factors_of_peft_unless_all_linear_layers_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let adapted = |lora: Value| {
        let plan = encoders::vit(0.0).with_lora(folder.path(), &lora).plan();
        let params = plan.graph.params().iter();
        let own = params.filter(|param| param.name.contains(".projection.lora_"));
        let lines =
            own.map(|param| format!("{} {:?} {:?}", param.name, param.full.shape, param.init));
        lines.collect::<Vec<_>>().join("\n")
    };
    let lora = json!({ "target_modules": ["projection"], "r": 3, "use_dora": true });
    insta::assert_snapshot!(adapted(lora), @r"
    vit.embeddings.patch_embeddings.projection.lora_A.default.weight [3, 2, 4, 4] Uniform(0.17677669529663687)
    vit.embeddings.patch_embeddings.projection.lora_B.default.weight [32, 3, 1, 1] Constant(0.0)
    vit.embeddings.patch_embeddings.projection.lora_magnitude_vector.default.weight [1, 32, 1, 1] Constant(1.0)
    ");
    let gaussian =
        json!({ "target_modules": ["projection"], "r": 2, "init_lora_weights": "gaussian" });
    insta::assert_snapshot!(adapted(gaussian), @r"
    vit.embeddings.patch_embeddings.projection.lora_A.default.weight [2, 2, 4, 4] Normal(0.5)
    vit.embeddings.patch_embeddings.projection.lora_B.default.weight [32, 2, 1, 1] Constant(0.0)
    ");
    assert_eq!(adapted(json!({ "target_modules": "all-linear" })), "");
}

#[test]
fn an_adapter_of_a_convolution_is_worth_the_same_beside_it_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    for (name, use_dora) in [("plain", false), ("dora", true)] {
        let lora = json!({ "target_modules": ["query", "projection"], "init_lora_weights": false, "lora_alpha": 64,
            "use_dora": use_dora });
        let (run, base) = (folder.path().join(name), encoders::vit(0.0));
        let case = base.clone().with_lora(folder.path(), &lora).writing(&run);
        let loss = |trainer: &mut MerakTrainer| trainer.gradients().map(|(loss, _)| loss);
        let [base, own] = [&base, &case].map(|case| case.on_ranks(loss)[0]);
        assert!((base - own).abs() > 1e-3 * base, "{name}: {base}, {own}");
        case.on_ranks(MerakTrainer::save_checkpoint);
        let saved = Checkpoint::open(&run).unwrap();
        let tensors = &saved.manifest().tensors;
        let mut adapter = Adapter::open(run.join("adapter"), &case.model, tensors).unwrap();
        adapter.measure(&saved).unwrap();
        let case = case.with("resume_from_checkpoint", run.display());
        for degrees in [(1, 1, 1), (1, 2, 1)] {
            let found = case.clone().on(degrees).on_ranks(|trainer| {
                let adapters = [None, Some(&adapter), None].into_iter();
                let found = adapters.map(|adapter| {
                    trainer.set_adapter(adapter)?;
                    loss(trainer)
                });
                found.collect::<merak_trainer::Result<Vec<_>>>()
            });
            for (found, expected) in found[0].iter().zip([base, own, base]) {
                let gap = (found - expected).abs();
                assert!(gap < 1e-5 * expected, "{name}: {found}, {expected}");
            }
        }
    }
}

#[test]
fn targets_that_no_layer_has_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let t5 = Case::of(json!({
        "model_type": "t5", "vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
        "num_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 0,
    }));
    let neox = Case::of(json!({
        "model_type": "gpt_neox", "vocab_size": 101, "max_position_embeddings": 16, "hidden_size": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    }));
    let refusal_of = |case: &Case, config: Value| {
        let case = case.clone().with_lora(folder.path(), &config);
        let error = case.try_plan().unwrap_err();
        let place = folder.path().display().to_string();
        merak_trainer::chain(&error).replace(&place, "FOLDER")
    };
    let refusal = |config: Value| refusal_of(&Case::gpt2(), config);
    let messages = [
        refusal(json!({ "target_modules": ["q_proj"] })),
        refusal(json!({ "target_modules": "c_attn" })),
        refusal(json!({ "rank": 4 })),
        refusal(json!({ "r": 0 })),
        refusal(json!({ "lora_dropout": 1 })),
        refusal(json!({ "init_lora_weights": "eva" })),
        refusal(json!({ "layers_to_transform": 9 })),
        refusal(json!({ "modules_to_save": ["ln_f", "score"] })),
        refusal(json!({ "rank_pattern": { "c_attn": 0 } })),
        refusal(json!({ "exclude_modules": "transformer.*" })),
        refusal(json!({ "layers_to_transform": [0], "layers_pattern": ["blocks"] })),
        refusal(json!({ "target_modules": ["c_attn", "ln_1"] })),
        refusal(json!({ "modules_to_save": ["wte"] })),
        refusal(json!({ "modules_to_save": ["lm_head"] })),
        refusal_of(&t5, json!({ "target_modules": ["shared", "q"] })),
        refusal_of(&t5, json!({ "target_modules": ["embed_tokens", "q"] })),
        refusal_of(
            &neox,
            json!({ "target_modules": ["query_key_value", "lm_head"] }),
        ),
        refusal_of(&neox, json!({ "modules_to_save": ["embed_out"] })),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
    FOLDER/lora.json: no layer is one of the `target_modules` ["q_proj"]: the model's layers are c_attn, c_fc, c_proj, lm_head, wpe, wte
    FOLDER/lora.json: no layer is one of the `target_modules` "c_attn": the model's layers are c_attn, c_fc, c_proj, lm_head, wpe, wte
    cannot read FOLDER/lora.json: `rank` is 4, which is not supported; did you mean "r"? ("lora_config")
    cannot read FOLDER/lora.json: `r` is 0, expected a whole number from 1 on ("lora_config")
    cannot read FOLDER/lora.json: `lora_dropout` is 1, expected a number from 0 to less than 1 ("lora_config")
    FOLDER/lora.json: `init_lora_weights` is "eva", expected true, false or gaussian for a new adapter
    FOLDER/lora.json: `layers_to_transform` is 9, which leaves none of the `target_modules` ["c_attn"]
    FOLDER/lora.json: no parameter that can be saved whole belongs to `score` of `modules_to_save`
    cannot read FOLDER/lora.json: `rank_pattern` is {"c_attn":0}, expected patterns and whole numbers from 1 on ("lora_config")
    FOLDER/lora.json: `exclude_modules` is "transformer.*", which leaves none of the `target_modules` ["c_attn"]
    FOLDER/lora.json: `layers_pattern` is ["blocks"], which leaves none of the `target_modules` ["c_attn"]
    FOLDER/lora.json: `transformer.h.0.ln_1` is one of the `target_modules`, but can have no adapter: the model's layers that can are c_attn, c_fc, c_proj, lm_head, wpe, wte
    FOLDER/lora.json: `modules_to_save` has `transformer.wte.weight`, which lm_head and transformer.wte share: with "no_tie_modules" each has its own
    FOLDER/lora.json: `modules_to_save` has `transformer.wte.weight`, which lm_head and transformer.wte share: with "no_tie_modules" each has its own
    FOLDER/lora.json: `shared` is one of the `target_modules`, but can have no adapter: the model's layers that can are k, lm_head, o, q, v, wi, wo
    FOLDER/lora.json: `encoder.embed_tokens` is one of the `target_modules`, but can have no adapter: the model's layers that can are k, lm_head, o, q, v, wi, wo
    FOLDER/lora.json: `lm_head` is one of the `target_modules`, but can have no adapter: the model's layers that can are dense, dense_4h_to_h, dense_h_to_4h, embed_in, query_key_value
    FOLDER/lora.json: no parameter that can be saved whole belongs to `embed_out` of `modules_to_save`
    "#);
}

#[test]
fn all_linear_that_is_misspelled_or_in_a_list_is_answered_with_how_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let hint = |targets: Value| {
        let case = Case::gpt2().with_lora(folder.path(), &json!({ "target_modules": targets }));
        let error = merak_trainer::chain(&case.try_plan().unwrap_err());
        let (_, hint) = error.split_once("lm_head, wpe, wte").unwrap();
        hint.to_owned()
    };
    for text in ["all_linear", "all-liner", "All-Linera"] {
        assert_eq!(
            hint(json!(text)),
            "; did you mean \"all-linear\"?",
            "{text}"
        );
    }
    for list in [json!(["all-linear"]), json!(["nothing", "all_linear"])] {
        let said = "; did you mean \"all-linear\" in place of the list?";
        assert_eq!(hint(list.clone()), said, "{list}");
    }
    assert_eq!(hint(json!(["nothing"])), "");
    assert_eq!(hint(json!("linear.*")), "");
}

#[test]
fn a_target_that_no_layer_has_beside_others_is_told_with_the_nearest_name() {
    let folder = tempfile::tempdir().unwrap();
    let told = |targets: Value| {
        let lora = json!({ "target_modules": targets });
        let plan = Case::gpt2().with_lora(folder.path(), &lora).plan();
        let unmatched = plan.draft.unmatched_targets.iter();
        unmatched
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n")
    };
    insta::assert_snapshot!(told(json!(["c_attn", "c_fcc", "atn.c_proj", "nothing"])), @r#"
    no layer is "c_fcc" of the `target_modules`; did you mean "c_fc"?
    no layer is "atn.c_proj" of the `target_modules`; did you mean "attn.c_proj"?
    no layer is "nothing" of the `target_modules`
    "#);
    let names = json!(["c_attn", "attn.c_proj", "transformer.h.3.mlp.c_fc"]);
    for targets in [names, json!(".*c_attn"), json!("all-linear"), Value::Null] {
        assert_eq!(told(targets.clone()), "", "{targets}");
    }
}

#[test]
fn a_run_in_which_everything_is_frozen_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let case = Case::gpt2().with_lora(folder.path(), &json!({ "inference_mode": true }));
    let outcome = case.on((1, 1, 2)).try_on_ranks(MerakTrainer::train);
    let error = outcome.expect_err("nothing to train");
    insta::assert_snapshot!(merak_trainer::chain(&error), @r#"every parameter is frozen, and nothing is left to train: a factor of 0 in "lr_scales" freezes, as does `inference_mode` in "lora_config""#);
}
