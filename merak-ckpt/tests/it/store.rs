//! Names, `latest`, rotation, leftovers.

use crate::support::{save, topology};
use merak_ckpt::{Checkpoint, Error, Header, Result, Store};
use std::fs;
use std::path::{Path, PathBuf};

fn store_with(steps: &[u64]) -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = Store::in_output_dir(folder.path());
    for &step in steps {
        save(&store, step, topology(1, 1, 1)).expect("it saves");
    }
    (folder, store)
}

/// An error's text without the temporary folder's name.
fn message<T: std::fmt::Debug>(result: Result<T>, folder: &Path) -> String {
    let error = result.expect_err("it is wrong");
    assert!(error.is_user_error(), "{error}");
    error
        .to_string()
        .replace(&folder.display().to_string(), "OUT")
}

#[test]
fn an_output_folder_stands_for_its_latest_checkpoint() {
    let (folder, store) = store_with(&[100, 200]);
    let expected = store.folder().join("step-00000200");
    for path in [folder.path(), store.folder(), &expected] {
        assert_eq!(Checkpoint::open(path).unwrap().path(), expected);
    }
    assert_eq!(
        fs::read_to_string(store.folder().join("latest")).unwrap(),
        "step-00000200\n"
    );
    let older = Checkpoint::open(folder.path())
        .unwrap()
        .older()
        .unwrap()
        .unwrap();
    assert_eq!(older.manifest().header.step, 100);
    assert!(older.older().unwrap().is_none());
}

#[test]
fn a_missing_path_is_an_error_and_only_open_newest_starts_afresh() {
    let (folder, store) = store_with(&[]);
    let empty = folder.path();
    let messages = [
        message(Checkpoint::open(empty.join("nowhere")), empty),
        message(Checkpoint::open(empty), empty),
    ];
    assert!(Checkpoint::open_newest(empty).unwrap().is_none());
    assert!(
        Checkpoint::open_newest(empty.join("nowhere"))
            .unwrap()
            .is_none()
    );
    save(&store, 5, topology(1, 1, 1)).unwrap();
    let manifest = store.path_of(5).join("manifest.json");
    let file = message(Checkpoint::open(manifest), empty);
    insta::assert_snapshot!(file, @"no checkpoint at OUT/checkpoints/step-00000005/manifest.json: expected a folder with a manifest.json, or one whose checkpoints folder has a `latest`; the newest complete one is OUT/checkpoints/step-00000005");
    fs::remove_file(store.folder().join("latest")).unwrap();
    let without_latest = message(Checkpoint::open(empty), empty);
    fs::write(store.folder().join("latest"), "../../etc\n").unwrap();
    let wrong_latest = message(Checkpoint::open(empty), empty);
    fs::write(store.folder().join("latest"), "step-00000009\n").unwrap();
    let dangling_latest = message(Checkpoint::open(empty), empty);
    insta::assert_snapshot!(
        [&messages[..], &[without_latest, wrong_latest, dangling_latest]].concat().join("\n"), @"
        no checkpoint at OUT/nowhere: the path does not exist
        no checkpoint at OUT: expected a folder with a manifest.json, or one whose checkpoints folder has a `latest`
        no checkpoint at OUT: expected a folder with a manifest.json, or one whose checkpoints folder has a `latest`; the newest complete one is OUT/checkpoints/step-00000005
        cannot read OUT/checkpoints/latest: it names `../../etc`, expected a checkpoint like step-00001000
        checkpoint OUT/checkpoints/step-00000009 is damaged: manifest.json: the file is missing; the newest complete older one is OUT/checkpoints/step-00000005
        ");
}

#[test]
fn the_newest_complete_checkpoint_passes_over_incomplete_ones() {
    let (folder, store) = store_with(&[1, 2, 3]);
    fs::remove_file(store.path_of(3).join("model-00000.safetensors")).unwrap();
    fs::write(store.path_of(2).join("manifest.json"), "{}").unwrap();
    let newest = Checkpoint::open_newest(folder.path()).unwrap().unwrap();
    assert_eq!(newest.path(), store.path_of(1));
    insta::assert_snapshot!(message(Checkpoint::open(folder.path()), folder.path()), @"checkpoint OUT/checkpoints/step-00000003 is damaged: model-00000.safetensors: the file is missing; the newest complete older one is OUT/checkpoints/step-00000001");
}

#[test]
fn rotation_keeps_the_newest_the_latest_and_those_that_are_needed() {
    let (_folder, store) = store_with(&[1, 2, 3, 4, 5]);
    assert!(store.rotate(-1, &[]).unwrap().is_empty());
    assert!(store.rotate(0, &[]).unwrap().is_empty());
    assert_eq!(store.rotate(2, &[2]).unwrap(), [1, 3]);
    assert_eq!(store.steps().unwrap(), [2, 4, 5]);
    assert_eq!(store.rotate(2, &[]).unwrap(), [2]);
    // A run that started afresh in this folder: its first checkpoint has a low number.
    save(&store, 1, topology(1, 1, 1)).unwrap();
    assert_eq!(store.rotate(1, &[]).unwrap(), [4]);
    assert_eq!(store.steps().unwrap(), [1, 5]);
}

#[test]
fn best_names_a_checkpoint_that_exists() {
    let (_folder, store) = store_with(&[1, 2]);
    assert_eq!(store.best().unwrap(), None);
    store.set_best(Some(1)).unwrap();
    assert_eq!(store.best().unwrap(), Some(store.path_of(1)));
    let refused = store.set_best(Some(7));
    assert!(matches!(refused, Err(Error::NotFound { .. })));
    assert_eq!(store.best().unwrap(), Some(store.path_of(1)));
    assert_eq!(store.latest().unwrap(), Some(store.path_of(2)));
    for (name, step) in [("best", 1), ("latest", 2)] {
        let named = Checkpoint::open(store.folder().join(name)).unwrap();
        assert_eq!(named.path(), store.path_of(step));
    }
    // It names nothing that was deleted.
    assert!(store.rotate(1, &[1]).unwrap().is_empty());
    assert_eq!(store.best().unwrap(), Some(store.path_of(1)));
    assert_eq!(store.rotate(1, &[]).unwrap(), [1]);
    assert_eq!(store.best().unwrap(), None);
    assert!(!store.folder().join("best").exists());
    store.set_best(Some(2)).unwrap();
    store.set_best(None).unwrap();
    store.set_best(None).unwrap();
    assert_eq!(store.best().unwrap(), None);
}

#[test]
fn leftovers_of_a_crashed_save_are_removed_by_the_next() {
    let (_folder, store) = store_with(&[1]);
    let draft = store.begin(2).unwrap();
    fs::write(draft.path().join("model-00000.safetensors"), "half").unwrap();
    fs::write(store.folder().join(".tmp-latest"), "step-0000").unwrap();
    let names = || -> Vec<PathBuf> {
        let mut names: Vec<_> = fs::read_dir(store.folder())
            .unwrap()
            .map(|e| e.unwrap().file_name().into())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names().len(), 4);
    // As when the process that has begun it is gone.
    drop(draft);
    save(&store, 3, topology(1, 1, 1)).unwrap();
    assert_eq!(
        names(),
        ["latest", "step-00000001", "step-00000003"].map(PathBuf::from)
    );
}

#[test]
fn a_pointer_is_a_short_file_of_text() {
    let (folder, store) = store_with(&[1]);
    let latest = store.folder().join("latest");
    let mut messages = Vec::new();
    let mut note = || {
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert!(error.is_user_error(), "{error}");
        messages.push(message::<()>(Err(error), folder.path()));
    };
    fs::write(&latest, b"step-\xff").unwrap();
    note();
    fs::write(&latest, "\x1b[31mred").unwrap();
    note();
    fs::File::create(&latest).unwrap().set_len(1 << 40).unwrap();
    note();
    fs::remove_file(&latest).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &latest).unwrap();
    note();
    insta::assert_snapshot!(messages.join("\n"), @r#"
    cannot read OUT/checkpoints/latest: it names `step-�`, expected a checkpoint like step-00001000
    cannot read OUT/checkpoints/latest: it names `\u{1b}[31mred`, expected a checkpoint like step-00001000
    cannot read OUT/checkpoints/latest: it has 1.00 TiB, the limit is 1.00 KiB
    cannot read OUT/checkpoints/latest: it is no regular file
    "#);
}

#[test]
fn a_save_that_goes_on_is_no_leftover() {
    let (folder, store) = store_with(&[1]);
    let draft = store.begin(2).unwrap();
    save(&store, 3, topology(1, 1, 1)).unwrap();
    let again = store.begin(2).unwrap_err();
    assert!(again.is_user_error());
    let again = again.to_string();
    let again = again.replace(&folder.path().display().to_string(), "OUT");
    insta::assert_snapshot!(again, @"OUT/checkpoints/.tmp-step-00000002 is being written by another save: wait until that has ended");
    draft.commit(Vec::new(), Header::default(), &[]).unwrap();
    assert_eq!(store.steps().unwrap(), [1, 2, 3]);
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_and_loses_nothing() {
    let (folder, store) = store_with(&[1]);
    // The draft's name is taken by a file that cannot be replaced by a folder while it is in use.
    let other = Store::new(folder.path().join("config.toml"));
    fs::write(other.folder(), "text").unwrap();
    let error = other.begin(2).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Io {
                action: "create",
                ..
            }
        ),
        "{error}"
    );
    let draft = store.draft(2);
    let error = draft
        .commit(Vec::new(), Header::default(), &[])
        .unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert_eq!(
        Checkpoint::open(folder.path())
            .unwrap()
            .manifest()
            .header
            .step,
        1
    );
}

#[test]
fn files_of_the_model_travel_along_but_may_not_leave_the_folder() {
    let (_folder, store) = store_with(&[1]);
    let config = fs::read(store.path_of(1).join("config.json")).unwrap();
    assert_eq!(config, b"{\"n_layer\":2}\n");
    for name in [
        "../config.json",
        "a/b",
        "",
        ".hidden",
        "manifest.json",
        "näme",
    ] {
        let draft = store.begin(2).unwrap();
        let error = draft
            .commit(Vec::new(), Header::default(), &[(name, b"")])
            .unwrap_err();
        assert!(matches!(error, Error::InvalidName { .. }), "{error}");
        draft.abandon().unwrap();
    }
}

#[test]
fn the_state_comes_back_with_every_digit() {
    let (_folder, store) = store_with(&[]);
    let state =
        serde_json::json!({"z": 0.1, "a": {"loss_scale": 65536.0, "lr": 1e-300}, "seed": u64::MAX});
    let draft = store.begin(1).unwrap();
    let header = Header {
        state: state.clone(),
        ..Header::default()
    };
    let path = draft.commit(Vec::new(), header, &[]).unwrap();
    assert_eq!(
        Checkpoint::open(path).unwrap().manifest().header.state,
        state
    );
}
