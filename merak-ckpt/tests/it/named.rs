//! Folders and files of other programs are named for what they are.

use merak_ckpt::{Checkpoint, Error, HfFolder, ImportOptions, import_dcp, import_merak};
use std::fs;
use std::path::Path;

/// Makes empty files, and folders where a name ends with a slash.
fn make(folder: &Path, names: &[&str]) {
    for name in names {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("it can be made");
        if name.ends_with('/') {
            fs::create_dir_all(path).expect("it can be made");
        } else {
            fs::write(path, "").expect("it can be made");
        }
    }
}

/// What other programs write, by names, and the path that is opened.
const WRITTEN: [(&[&str], &str); 13] = [
    (&[".metadata", "__0_0.distcp"], ""),
    (&[".metadata", "__0_0.distcp"], "__0_0.distcp"),
    (&["step-500/.metadata", "step-1000/.metadata"], ""),
    (
        &[
            "latest_checkpointed_iteration.txt",
            "iter_0000001/mp_rank_00/",
        ],
        "",
    ),
    (&["mp_rank_00/model_optim_rng.pt"], ""),
    (&[".metadata", "common.pt", "__0_0.distcp"], ""),
    (
        &[
            "latest",
            "global_step5/mp_rank_00_model_states.pt",
            "zero_to_fp32.py",
        ],
        "",
    ),
    (
        &[
            "mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ],
        "",
    ),
    (&["model-q4.gguf"], ""),
    (&["model-q4.gguf"], "model-q4.gguf"),
    (&["latest", "global_step5/"], "latest"),
    (&["weights.pth"], ""),
    (&["consolidated.00.pt"], "consolidated.00.pt"),
];

#[test]
fn what_other_programs_wrote_is_said_with_the_way_in() {
    let mut messages = Vec::new();
    for (names, path) in WRITTEN {
        let folder = tempfile::tempdir().unwrap();
        make(folder.path(), names);
        let path = folder.path().join(path);
        let message = |error: Error| {
            assert!(error.is_user_error(), "{error}");
            error
                .to_string()
                .replace(&folder.path().display().to_string(), "DIR")
        };
        let as_checkpoint = message(Checkpoint::open(&path).unwrap_err());
        let as_folder = message(HfFolder::open(&path).unwrap_err());
        let as_weights = message(Checkpoint::open_weights(&path).unwrap_err());
        assert_eq!(as_checkpoint, as_folder, "{names:?}");
        assert_eq!(as_checkpoint, as_weights, "{names:?}");
        messages.push(as_checkpoint);
    }
    let index = tempfile::tempdir().unwrap();
    fs::write(
        index.path().join(".metadata"),
        "layers.0.attention.wq.weight tok_embeddings.weight",
    )
    .unwrap();
    let error = Checkpoint::open(index.path()).unwrap_err().to_string();
    messages.push(error.replace(&index.path().display().to_string(), "DIR"));
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read DIR/: it is a folder of torch.distributed.checkpoint: import it with `merak-ckpt import-dcp DIR DST --config config.json`
    cannot read DIR/__0_0.distcp: it is a folder of torch.distributed.checkpoint: import it with `merak-ckpt import-dcp DIR DST --config config.json`
    cannot read DIR/: it holds folders of torch.distributed.checkpoint: import one of them with `merak-ckpt import-dcp DIR/STEP DST --config config.json`
    cannot read DIR/: it is a checkpoint of Megatron-LM: convert it to a Hugging Face folder with Megatron-Bridge or Megatron-LM's tools/checkpoint/convert.py, then use that
    cannot read DIR/: it is a checkpoint of Megatron-LM: convert it to a Hugging Face folder with Megatron-Bridge or Megatron-LM's tools/checkpoint/convert.py, then use that
    cannot read DIR/: it is a checkpoint of Megatron-LM: convert it to a Hugging Face folder with Megatron-Bridge or Megatron-LM's tools/checkpoint/convert.py, then use that
    cannot read DIR/: it is a checkpoint of DeepSpeed: run the zero_to_fp32.py that lies in it, `zero_to_fp32.py DIR HF_DIR`, put the model's config.json beside the pytorch_model.bin, then use HF_DIR
    cannot read DIR/: it is a checkpoint of DeepSpeed: run the zero_to_fp32.py that lies in it, `zero_to_fp32.py DIR HF_DIR`, put the model's config.json beside the pytorch_model.bin, then use HF_DIR
    cannot read DIR/: it is GGUF, the format of llama.cpp, which cannot be read: use the Hugging Face folder that it was made of, or load it with transformers (`from_pretrained(DIR, gguf_file=FILE)`) and save it with `save_pretrained`
    cannot read DIR/model-q4.gguf: it is GGUF, the format of llama.cpp, which cannot be read: use the Hugging Face folder that it was made of, or load it with transformers (`from_pretrained(DIR, gguf_file=FILE)`) and save it with `save_pretrained`
    cannot read DIR/latest: it is a checkpoint of DeepSpeed: run the zero_to_fp32.py that lies in it, `zero_to_fp32.py DIR HF_DIR`, put the model's config.json beside the pytorch_model.bin, then use HF_DIR
    cannot read DIR/: it is a lone file of torch.save: put it into a folder as pytorch_model.bin beside the model's config.json, and use that; it should hold the state_dict of the model
    cannot read DIR/consolidated.00.pt: it is a lone file of torch.save: put it into a folder as pytorch_model.bin beside the model's config.json, and use that; it should hold the state_dict of the model
    cannot read DIR: it is a checkpoint of torchtitan, whose names are not those of transformers: convert it with torchtitan's scripts/checkpoint_conversion/convert_to_hf.py, then use the Hugging Face folder
    ");
}

#[test]
fn imports_of_other_kinds_name_the_folder_as_well() {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path(), &["zero_to_fp32.py", "global_step5/"]);
    let to = folder.path().join("to");
    let options = ImportOptions::default();
    let dcp = import_dcp(
        folder.path(),
        &to,
        folder.path().join("config.json"),
        "",
        &options,
    );
    let merak = import_merak(folder.path(), &to, 1, &options);
    for error in [dcp.unwrap_err(), merak.unwrap_err()] {
        assert!(
            error
                .to_string()
                .contains("it is a checkpoint of DeepSpeed"),
            "{error}"
        );
    }
}

#[test]
fn an_output_folder_of_ours_stays_one_whatever_lies_in_it() {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path(), &["old.pt", "global_step5/"]);
    let draft = merak_ckpt::Store::in_output_dir(folder.path())
        .begin(3)
        .unwrap();
    draft
        .commit(
            Vec::new(),
            merak_ckpt::Header {
                step: 3,
                ..merak_ckpt::Header::default()
            },
            &[],
        )
        .unwrap();
    assert_eq!(
        Checkpoint::open(folder.path())
            .unwrap()
            .manifest()
            .header
            .step,
        3
    );
}

#[test]
fn an_unreadable_path_is_refused_with_the_reason_of_the_system() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let beyond = folder.path().join("file/checkpoint");
    for error in [
        Checkpoint::open(&beyond).unwrap_err(),
        HfFolder::open(&beyond).unwrap_err(),
    ] {
        let source = std::error::Error::source(&error).expect("the system's reason");
        assert!(
            source.to_string().contains("Not a directory"),
            "{error}: {source}"
        );
    }
}

#[test]
fn a_lone_file_is_judged_by_itself_and_not_by_the_folders_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    make(
        folder.path(),
        &[
            "x.pt",
            "step-10/.metadata",
            "global_step5/",
            "iter_0000001/",
        ],
    );
    let error = Checkpoint::open(folder.path().join("x.pt")).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("it is a lone file of torch.save"),
        "{message}"
    );
}

#[test]
fn folders_of_merak_are_named_where_a_model_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let store = merak_ckpt::Store::in_output_dir(&run);
    let step = crate::support::save(&store, 3, crate::support::topology(1, 1, 1)).unwrap();
    let to = folder.path().join("to");
    let options = ImportOptions::default();
    let config = step.join("config.json");
    for (path, what) in [
        (&run, "it is the output folder of a run of Merak: "),
        (&step, "it is a checkpoint of Merak: "),
    ] {
        for error in [
            HfFolder::open(path).unwrap_err(),
            HfFolder::refuse_others(path).unwrap_err(),
            import_dcp(path, &to, &config, "", &options).unwrap_err(),
            import_merak(path, &to, 1, &options).unwrap_err(),
        ] {
            let message = error.to_string();
            assert!(matches!(error, Error::OwnFormat { .. }), "{message}");
            assert!(message.contains(what), "{message}");
            assert!(message.contains("export-hf"), "{message}");
        }
    }
    fs::remove_file(store.folder().join("latest")).unwrap();
    let error = Checkpoint::open(&run).unwrap_err().to_string();
    assert!(error.contains("the newest complete one is"), "{error}");
}
