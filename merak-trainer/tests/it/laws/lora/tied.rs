//! Adapters of a table that is the model's head too.

use merak_ckpt::{Adapter, Checkpoint, Kind};
use merak_trainer::MerakTrainer;
use serde_json::json;

use crate::{laws::sp, support::Case};

/// A model whose table of tokens, which two ranks can share, is its head.
fn tied_gpt2() -> Case {
    let case = Case::gpt2().with_tied(true).with_model("n_layer", 2);
    case.with_model("vocab_size", 102)
}

#[test]
fn magnitudes_of_a_tied_head_start_at_its_norms_however_the_lists_cut_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let lora = json!({ "use_dora": true, "target_modules": ["lm_head"], "r": 2, "lora_alpha": 4,
        "init_lora_weights": false });
    let case = tied_gpt2().with_lora(folder.path(), &lora);
    let split = case.clone().on((1, 2, 1));
    let slices = [
        r#"[["wte", 0]]"#,
        r#"[["wte", 1]]"#,
        r#"[["lm_head", 0]]"#,
        r#"[["lm_head", 1]]"#,
        r#"[["wte", 0], ["lm_head", 1]]"#,
        r#"[["wte", 1], ["lm_head", 0]]"#,
    ];
    let within = slices.map(|slices| split.clone().with("weight_change_list", slices));
    let mut cases = within.to_vec();
    cases.push(within[2].clone().sharing(2));
    cases.push(within[1].clone().on((1, 2, 2)));
    sp::check(&case, &cases, 3);
}

#[test]
fn adapters_of_a_table_train_like_one_rank_where_the_lists_cut_its_other_use() {
    let folder = tempfile::tempdir().unwrap();
    let lora = json!({ "target_modules": ["wte", "c_attn"], "r": 2, "lora_alpha": 4,
        "init_lora_weights": false });
    let case = tied_gpt2().with_lora(folder.path(), &lora);
    let by = |col: &str, row: &str| {
        let split = case.clone().on((1, 2, 1)).with("col_para_list", col);
        split.with("row_para_list", row)
    };
    let of_inputs = by(r#"["c_attn", "c_fc"]"#, r#"["c_proj", "lm_head"]"#);
    let of_outputs = by(r#"["c_attn", "c_fc", "lm_head"]"#, r#"["c_proj"]"#);
    let cases = [
        of_inputs.clone(),
        of_outputs.clone(),
        of_inputs.sharing(2),
        of_outputs.with("sequence_parallel", true).sharing(2),
    ];
    sp::check(&case, &cases, 3);
}

#[test]
fn an_adapter_of_a_shared_table_is_trained_beside_it_and_never_merged_into_it() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let base = Case::gpt2().with_tied(true).writing(&run);
    let lora = json!({ "target_modules": ["wte"], "init_lora_weights": false });
    let trained = base.clone().with_lora(folder.path(), &lora);
    let saved = trained.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.save_checkpoint()
    });
    let saved = Checkpoint::open(&saved[0]).unwrap();
    let tensors = &saved.manifest().tensors;
    let adapter = Adapter::open(run.join("adapter"), &base.model, tensors).unwrap();
    // With dropout, the head's own adapter reads the table twice more.
    let head = json!({ "target_modules": ["lm_head"], "use_dora": true, "lora_dropout": 0.1 });
    let cases = [
        base.clone(),
        base.clone().on((1, 2, 2)),
        base.clone().with_lora(folder.path(), &head),
    ];
    for case in cases {
        let outcome = case.try_on_ranks(|trainer| trainer.set_adapter(Some(&adapter)));
        let error = merak_trainer::chain(&outcome.expect_err("it is shared"));
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"the adapter changes `transformer.wte.weight`, which transformer.wte and lm_head share, for one of them: `merak-ckpt merge-lora` writes a model in which each has its own");
        }
    }
}

#[test]
fn a_tied_model_starts_untied_so_that_one_of_both_tables_can_be_saved() {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("hf");
    let base = Case::gpt2()
        .with_tied(true)
        .writing(&folder.path().join("base"));
    let saved = base.on_ranks(MerakTrainer::save_checkpoint);
    let saved = Checkpoint::open(&saved[0]).unwrap();
    merak_ckpt::export_hf(&saved, &hf, &merak_ckpt::ExportOptions::default()).unwrap();
    let loss = |case: &Case| case.on_ranks(|trainer| Ok(trainer.evaluate()?.eval_loss))[0];
    let lora = json!({ "modules_to_save": ["wte"] });
    let mut untied = Case::gpt2()
        .with_tied(false)
        .with_lora(folder.path(), &lora);
    for key in ["model.hf_dir", "resume_from_checkpoint"] {
        let case = untied
            .clone()
            .with(key, hf.display())
            .with("no_tie_modules", true);
        assert_eq!(loss(&case).to_bits(), loss(&base).to_bits(), "{key}");
    }
    untied = untied
        .with("model.hf_dir", hf.display())
        .with("no_tie_modules", true)
        .writing(&folder.path().join("run"));
    let run = untied.run(2);
    let table = |name: &str| run.weights[name].clone();
    assert_ne!(table("transformer.wte.weight"), table("lm_head.weight"));
    let params = Checkpoint::open(saved.path()).unwrap();
    let wte = params.read_whole(&Kind::Parameter, "transformer.wte.weight");
    let frozen = table("lm_head.weight");
    assert_eq!(bytemuck::cast_slice::<f32, u8>(&frozen), wte.unwrap());
}
