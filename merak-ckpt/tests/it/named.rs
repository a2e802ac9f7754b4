//! Folders and files of other programs are named for what they are.

use merak_ckpt::{Checkpoint, HfFolder};
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

#[test]
fn what_other_programs_wrote_is_said_with_the_way_in() {
    let mut messages = Vec::new();
    for (names, path) in [
        (&[".metadata", "__0_0.distcp"][..], ""),
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
        (&["weights.pth"], ""),
        (&["consolidated.00.pt"], "consolidated.00.pt"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        make(folder.path(), names);
        let path = folder.path().join(path);
        let message = |error: merak_ckpt::Error| {
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
    insta::assert_snapshot!(messages.join("\n"));
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
