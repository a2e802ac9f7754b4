//! What happens to the run in a folder, whatever begins or goes on there.

use super::*;
use crate::{
    config::{InputPath, MerakArguments},
    error::{Error, FolderError},
};
use merak_ckpt::{ADAPTER_CONFIG, ADAPTER_FOLDER, DraftFile, Header, Store, format::CHECKPOINTS};
use std::{io, path::Path};

fn args(folder: &Path, change: impl FnOnce(&mut MerakArguments)) -> CheckedArguments {
    let mut args = MerakArguments {
        output_dir: Some(folder.to_owned()),
        ..MerakArguments::default()
    };
    change(&mut args);
    args.check().expect("legal arguments")
}

fn replacing(folder: &Path) -> CheckedArguments {
    args(folder, |args| args.overwrite_output_dir = true)
}

fn resuming(folder: &Path, from: &str) -> CheckedArguments {
    args(folder, |args| {
        args.resume_from_checkpoint = Some(from.to_owned());
    })
}

fn take(args: &CheckedArguments) -> Result<Arc<RunFolder>> {
    RunFolder::take(args, "tp = 1\n".to_owned())
}

/// Leaves a run of `step` steps.
fn run(folder: &Path, step: u64) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join(METRICS_FILE), format!("{{\"step\":{step}}}\n")).unwrap();
    let draft = Store::in_output_dir(folder).begin(step).unwrap();
    draft.commit(Vec::new(), Header::default(), &[]).unwrap();
}

fn steps(folder: &Path) -> Vec<u64> {
    Store::in_output_dir(folder).steps().unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<_> = entries.map(name).collect();
    names.sort();
    names
}

#[test]
fn a_folder_with_other_files_is_no_run_and_one_with_a_run_is_refused_with_the_ways_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let fresh = args(&path, |_| ());
    RunFolder::check(&fresh).unwrap();
    assert!(!path.exists(), "looking makes no folder");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("notes.txt"), "mine").unwrap();
    fs::write(path.join(RESOLVED), "tp = 1\n").unwrap();
    fs::write(path.join(METRICS_FILE), "").unwrap();
    take(&fresh).unwrap().begin(None).unwrap();
    run(&path, 7);
    let refused = take(&fresh).unwrap_err();
    assert!(refused.is_user_error());
    let text = |error: &Error| {
        let folder = format!("{}/", folder.path().display());
        error.to_string().replace(&folder, "")
    };
    insta::assert_snapshot!(text(&refused), @r#"run, which "output_dir" names, has a run already (checkpoints up to step 7): go on with it by --resume auto, replace it by --overwrite_output_dir, or name another folder"#);
    fs::remove_dir_all(path.join(CHECKPOINTS)).unwrap();
    insta::assert_snapshot!(text(&take(&fresh).unwrap_err()), @r#"run, which "output_dir" names, has a run already (metrics.jsonl, and no checkpoint): keep it aside and begin anew by --resume auto, replace it by --overwrite_output_dir, or name another folder"#);
    // It can resume from its own checkpoints, not from those of others.
    run(&path, 7);
    let other = folder.path().join("other");
    run(&other, 9);
    for (from, goes_on) in [
        ("auto".to_owned(), true),
        ("latest".to_owned(), true),
        (path.display().to_string(), true),
        (
            format!("{}/checkpoints/step-00000007", path.display()),
            true,
        ),
        (other.display().to_string(), false),
    ] {
        let outcome = take(&resuming(&path, &from));
        assert_eq!(outcome.is_ok(), goes_on, "{from}");
    }
    let tuned = args(&path, |args| {
        args.resume_from_checkpoint = Some("latest".to_owned());
        args.finetune = true;
    });
    assert!(
        take(&tuned).is_err(),
        "a run that starts at step 0 is another run"
    );
}

#[test]
fn the_replaced_run_lies_aside_until_the_first_save() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    run(path, 7);
    fs::write(path.join("notes.txt"), "mine").unwrap();
    let new = take(&replacing(path)).unwrap();
    assert_eq!(steps(path), [7], "nothing moves before the run begins");
    new.begin(None).unwrap();
    let aside = new.replaced().expect("it lies aside");
    assert_eq!((steps(path), steps(&aside)), (vec![], vec![7]));
    assert_eq!(names(&aside), ["checkpoints", METRICS_FILE]);
    assert_eq!(names(path), [".lock", RESOLVED, "notes.txt", ASIDE]);
    run(path, 1);
    new.drop_replaced();
    assert_eq!(new.replaced(), None);
    drop(new);
    assert_eq!(
        names(path),
        ["checkpoints", RESOLVED, METRICS_FILE, "notes.txt"]
    );
    assert_eq!(steps(path), [1]);
}

#[test]
fn a_crash_before_the_first_save_loses_nothing_and_the_next_start_knows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    run(path, 7);
    let new = take(&replacing(path)).unwrap();
    new.begin(None).unwrap();
    drop(new);
    fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
    let refused = take(&args(path, |_| ())).unwrap_err().to_string();
    assert!(
        refused.contains("replaced-run until there is a checkpoint"),
        "{refused}"
    );
    // Once more: the run that saved nothing goes, the one before it stays.
    let again = take(&replacing(path)).unwrap();
    again.begin(None).unwrap();
    assert_eq!(steps(&again.replaced().unwrap()), [7]);
    assert!(!path.join(METRICS_FILE).exists());
    drop(again);
    // A crash between the first save and the removal.
    run(path, 2);
    let next = take(&resuming(path, "auto")).unwrap();
    next.begin(Some(2)).unwrap();
    assert_eq!((next.replaced(), steps(path)), (None, vec![2]));
    assert!(!path.join(ASIDE).exists());
}

#[test]
fn a_crash_while_a_run_is_set_aside_puts_it_back() {
    for moved in 0..=2 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        run(path, 7);
        fs::create_dir(path.join(MOVING)).unwrap();
        for entry in run_in(path, false).unwrap().iter().take(moved) {
            fs::rename(path.join(entry), path.join(MOVING).join(entry)).unwrap();
        }
        take(&resuming(path, "latest")).unwrap();
        assert_eq!(names(path), ["checkpoints", METRICS_FILE], "{moved}");
        assert_eq!(steps(path), [7]);
    }
    let folder = tempfile::tempdir().unwrap();
    run(&folder.path().join(REMOVED), 7);
    for name in FILES {
        let draft = DraftFile::place(&folder.path().join(name)).unwrap();
        fs::write(draft, "half").unwrap();
    }
    take(&args(folder.path(), |_| ())).unwrap();
    assert!(names(folder.path()).is_empty());
}

/// Makes `checkpoints` a link to a folder.
fn link_checkpoints(folder: &Path, there: &Path) {
    fs::create_dir(there).unwrap();
    std::os::unix::fs::symlink(there, folder.join(CHECKPOINTS)).unwrap();
}

#[test]
fn after_a_crash_the_next_start_is_predicted_as_if_the_run_were_back_already() {
    for (is_linked, later) in [(false, false), (false, true), (true, false), (true, true)] {
        let (folder, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = folder.path();
        if is_linked {
            link_checkpoints(path, &place.path().join("there"));
        }
        run(path, 5);
        run(path, 10);
        let auto = resuming(path, "auto");
        let told = || {
            let foresee = |args: &CheckedArguments, from| RunFolder::foresee(args, from).unwrap();
            let refused = RunFolder::check(&args(path, |_| ())).unwrap_err();
            let lines = [
                foresee(&replacing(path), None),
                foresee(&auto, Some(5)),
                foresee(&auto, Some(10)),
                foresee(&auto, None),
                refused.to_string(),
            ];
            let lines = lines.iter().flat_map(|text| text.lines());
            let lines = lines.filter(|line| !line.starts_with("puts back "));
            lines.map(ToOwned::to_owned).collect::<Vec<_>>()
        };
        let before = told();
        let (new, from, aside) = if later {
            (resuming(path, "auto"), Some(5), "earlier-run-1")
        } else {
            (replacing(path), None, ASIDE)
        };
        take(&new).unwrap().begin(from).unwrap();
        fs::rename(path.join(aside), path.join(MOVING)).unwrap();
        let moving = path.join(MOVING);
        for entry in run_in(&moving, true).unwrap() {
            let case = format!("linked {is_linked}, later {later}, {}", entry.display());
            let text = RunFolder::foresee(&auto, Some(10)).unwrap();
            assert!(text.starts_with("puts back the run in "), "{case}: {text}");
            assert_eq!(told(), before, "{case}");
            let contents = Contents::of(path).unwrap();
            assert_eq!(contents.steps().unwrap(), [5, 10], "{case}");
            let latest = contents.latest().unwrap().unwrap();
            let own = Store::in_output_dir(path).folder().join("step-00000010");
            assert_eq!(contents.named(&latest), own, "{case}");
            assert_eq!(contents.locate(&own), Some(latest), "{case}");
            fs::create_dir_all(path.join(CHECKPOINTS)).unwrap();
            fs::rename(moving.join(&entry), path.join(&entry)).unwrap();
        }
        take(&auto).unwrap();
        assert_eq!(told(), before);
        let left = names(path).into_iter().filter(|name| name != RESOLVED);
        assert_eq!(left.collect::<Vec<_>>(), ["checkpoints", METRICS_FILE]);
        assert_eq!(path.join(CHECKPOINTS).is_symlink(), is_linked);
    }
}

#[test]
fn checkpoints_behind_a_link_are_replaced_there_and_the_new_ones_go_there_too() {
    let (folder, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (path, there) = (folder.path(), place.path().join("there"));
    link_checkpoints(path, &there);
    run(path, 7);
    fs::create_dir(there.join(ASIDE)).unwrap();
    let told = |args: &CheckedArguments, from: Option<u64>| {
        let text = RunFolder::foresee(args, from).unwrap();
        let text = text.replace(&path.display().to_string(), "run");
        text.replace(&place.path().display().to_string(), "disk")
    };
    let auto = resuming(path, "auto");
    let text = told(&replacing(path), None) + &told(&auto, None) + &told(&auto, Some(3));
    insta::assert_snapshot!(text, @"
    replaces  the run in run, which lies in run/replaced-run until the first checkpoint
              its checkpoints lie in disk/there/replaced-run-2 then, and the new ones in disk/there
    keeps     the run in run, which has no checkpoint to go on from, as run/earlier-run-1
              its checkpoints lie in disk/there/earlier-run-1 then, and the new ones in disk/there
    keeps     the checkpoints after step 3 and a copy of the metrics in run/earlier-run-1
              its checkpoints lie in disk/there/earlier-run-1 then, and the new ones in disk/there
    ");
    let new = take(&replacing(path)).unwrap();
    new.begin(None).unwrap();
    let aside = new.replaced().unwrap();
    assert_eq!((steps(path), steps(&aside)), (vec![], vec![7]));
    // What was set aside is a run of its own.
    let old = there.join("replaced-run-2/step-00000007");
    let other = Start::of(&resuming(path, old.to_str().unwrap()), path);
    assert_eq!(other, Start::Fresh);
    new.withdraw();
    assert_eq!(steps(path), [7]);
    new.begin(None).unwrap();
    run(path, 1);
    assert!(there.join("step-00000001").is_dir() && old.is_dir());
    new.drop_replaced();
    assert_eq!(names(&there), ["latest", ASIDE, "step-00000001"]);
    assert!(path.join(CHECKPOINTS).is_symlink() && !path.join(ASIDE).exists());
    drop(new);
    // And so are those of a run that is kept for good.
    take(&auto).unwrap().begin(None).unwrap();
    let kept = path.join("earlier-run-1");
    assert_eq!((steps(path), steps(&kept)), (vec![], vec![1]));
    assert!(path.join(CHECKPOINTS).is_symlink());
}

#[test]
fn a_run_that_fails_before_its_first_record_puts_the_other_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    run(path, 7);
    let new = take(&replacing(path)).unwrap();
    new.begin(None).unwrap();
    fs::create_dir_all(path.join(CHECKPOINTS).join(".tmp-step-00000001")).unwrap();
    new.withdraw();
    assert_eq!(new.replaced(), None);
    drop(new);
    assert_eq!(steps(path), [7]);
    let new = take(&replacing(path)).unwrap();
    new.begin(None).unwrap();
    fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
    new.withdraw();
    assert_eq!(steps(&new.replaced().unwrap()), [7], "its records are kept");
}

#[test]
fn a_run_that_saves_nothing_leaves_the_other_aside() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    run(path, 7);
    let new = take(&args(path, |args| {
        args.overwrite_output_dir = true;
        args.save = Some(false);
    }));
    let new = new.unwrap();
    new.begin(None).unwrap();
    let aside = new.replaced().expect("it is set aside");
    drop(new);
    assert_eq!(steps(&aside), [7]);
}

#[test]
fn auto_without_a_checkpoint_begins_anew_and_keeps_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let metrics = |step: u64| format!("{{\"step\":{step}}}\n");
    let auto = |from: Option<u64>| {
        let auto = take(&resuming(path, "auto")).unwrap();
        auto.begin(from).unwrap();
        auto.drop_replaced();
    };
    // A run that has recorded nothing is not kept.
    fs::write(path.join(RESOLVED), "tp = 1\n").unwrap();
    auto(None);
    assert_eq!(names(path), [RESOLVED]);
    for (step, kept) in [(1, "earlier-run-1"), (2, "earlier-run-2")] {
        fs::write(path.join(METRICS_FILE), metrics(step)).unwrap();
        auto(None);
        let kept = fs::read_to_string(path.join(kept).join(METRICS_FILE));
        assert_eq!(kept.unwrap(), metrics(step));
        assert!(!path.join(METRICS_FILE).exists());
    }
    // Checkpoints that cannot be resumed from are kept as well.
    run(path, 7);
    auto(Some(7));
    assert_eq!(steps(path), [7]);
    auto(None);
    assert_eq!(
        (steps(path), steps(&path.join("earlier-run-3"))),
        (vec![], vec![7])
    );
    // And so is a run that another one was to replace.
    run(path, 8);
    take(&replacing(path)).unwrap().begin(None).unwrap();
    fs::write(path.join(METRICS_FILE), metrics(9)).unwrap();
    auto(None);
    assert_eq!(steps(&path.join("earlier-run-4")), [8]);
    assert!(path.join("earlier-run-5").join(METRICS_FILE).exists());
    assert!(!path.join(ASIDE).exists());
}

#[test]
fn going_on_from_an_earlier_step_sets_the_later_ones_aside_with_the_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    run(path, 5);
    run(path, 10);
    let on_from = |step: u64| {
        fs::write(path.join(RESOLVED), "tp = 9\n").unwrap();
        let from = Store::in_output_dir(path).path_of(step);
        let new = take(&resuming(path, from.to_str().unwrap())).unwrap();
        new.begin(Some(step)).unwrap();
    };
    on_from(10);
    assert!(!path.join("earlier-run-1").exists(), "nothing is later");
    on_from(5);
    let (store, kept) = (Store::in_output_dir(path), path.join("earlier-run-1"));
    assert_eq!((steps(path), steps(&kept)), (vec![5], vec![10]));
    assert_eq!(store.latest().unwrap(), Some(store.path_of(5)));
    let other = Store::in_output_dir(&kept);
    assert_eq!(other.latest().unwrap(), Some(other.path_of(10)));
    for folder in [path, &kept] {
        let records = fs::read_to_string(folder.join(METRICS_FILE)).unwrap();
        assert_eq!(records, "{\"step\":10}\n");
    }
    let config = |folder: &Path| fs::read_to_string(folder.join(RESOLVED)).unwrap();
    assert_eq!([config(path), config(&kept)], ["tp = 1\n", "tp = 9\n"]);
    // A crash on the way puts everything back.
    run(path, 20);
    fs::rename(&kept, path.join(MOVING)).unwrap();
    take(&resuming(path, "auto")).unwrap();
    assert_eq!(steps(path), [5, 10, 20]);
}

#[test]
fn later_checkpoints_behind_a_link_are_set_aside_where_they_lie() {
    // Another file system, where there is one.
    let places = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm")];
    for place in places.into_iter().flatten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let there = place.path().join("checkpoints of run");
        link_checkpoints(path, &there);
        let link = path.join(CHECKPOINTS);
        run(path, 5);
        run(path, 10);
        let on_from = |from: PathBuf, step: u64| {
            let new = take(&resuming(path, from.to_str().unwrap()))?;
            new.begin(Some(step))
        };
        on_from(link.join("step-00000005"), 5).unwrap();
        let kept = path.join("earlier-run-1");
        assert_eq!((steps(path), steps(&kept)), (vec![5], vec![10]));
        assert!(link.is_symlink() && there.join("earlier-run-1/step-00000010").is_dir());
        let latest = Store::in_output_dir(&kept).latest().unwrap();
        assert_eq!(latest, Some(Store::in_output_dir(&kept).path_of(10)));
        // What was set aside is a run of its own.
        let other = on_from(kept.join("checkpoints/step-00000010"), 10).unwrap_err();
        assert!(
            matches!(other, Error::Folder(FolderError::RunExists { .. })),
            "{other}"
        );
        run(path, 20);
        on_from(link.clone(), 5).unwrap();
        assert_eq!(steps(&path.join("earlier-run-2")), [20]);
        // A crash on the way puts everything back.
        fs::rename(path.join("earlier-run-2"), path.join(MOVING)).unwrap();
        take(&resuming(path, "auto")).unwrap();
        assert_eq!(steps(path), [5, 20]);
        assert!(link.is_symlink() && !there.join("earlier-run-2").exists());
        assert_eq!(steps(&kept), [10]);
    }
}

#[test]
fn a_refused_run_leaves_no_empty_folder_and_a_link_to_nowhere_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/run");
    drop(take(&args(&path, |_| ())).unwrap());
    assert!(names(folder.path()).is_empty());
    let new = take(&args(&path, |_| ())).unwrap();
    new.begin(None).unwrap();
    drop(new);
    assert_eq!(names(&path), [RESOLVED]);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    for path in [link.clone(), link.join("run")] {
        let args = args(&path, |_| ());
        for refused in [
            take(&args).unwrap_err(),
            RunFolder::check(&args).unwrap_err(),
        ] {
            assert!(refused.is_user_error(), "{refused}");
            let text = chain(&refused);
            assert!(
                text.contains("a link to nowhere, and nothing is there"),
                "{text}"
            );
        }
    }
}

#[test]
fn auto_with_leave_to_overwrite_replaces_a_run_without_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
    let both = args(path, |args| {
        args.resume_from_checkpoint = Some("auto".to_owned());
        args.overwrite_output_dir = true;
    });
    let auto = take(&both).unwrap();
    auto.begin(None).unwrap();
    assert!(auto.replaced().unwrap().join(METRICS_FILE).exists());
    auto.drop_replaced();
    drop(auto);
    assert_eq!(names(path), [RESOLVED]);
}

#[test]
fn what_becomes_of_a_run_is_told_before_it_happens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let told = |args: &CheckedArguments, from: Option<u64>| {
        let text = RunFolder::foresee(args, from).unwrap();
        text.replace(&path.display().to_string(), "run")
    };
    let auto = resuming(path, "auto");
    assert_eq!(told(&auto, None), "");
    fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
    let mut text = told(&auto, None);
    run(path, 7);
    text += &told(&auto, Some(3));
    text += &told(&auto, Some(7));
    text += &told(&replacing(path), None);
    take(&replacing(path)).unwrap().begin(None).unwrap();
    fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
    text += &told(&replacing(path), None);
    text += &told(&auto, None);
    insta::assert_snapshot!(text, @"
    keeps     the run in run, which has no checkpoint to go on from, as run/earlier-run-1
    keeps     the checkpoints after step 3 and a copy of the metrics in run/earlier-run-1
    replaces  the run in run, which lies in run/replaced-run until the first checkpoint
    removes   the run in run, which has saved nothing; the one before it stays in run/replaced-run
    keeps     the run in run/replaced-run as run/earlier-run-1
    keeps     the run in run, which has no checkpoint to go on from, as run/earlier-run-2
    ");
}

#[test]
fn what_others_have_among_the_checkpoints_stays_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    run(path, 7);
    let (notes, draft) = (
        path.join("checkpoints/notes.txt"),
        path.join("checkpoints/.tmp-notes"),
    );
    fs::write(&notes, "mine").unwrap();
    fs::write(&draft, "mine").unwrap();
    let new = take(&replacing(path)).unwrap();
    new.begin(None).unwrap();
    assert_eq!(steps(&new.replaced().unwrap()), [7]);
    assert_eq!(names(&path.join(CHECKPOINTS)), [".tmp-notes", "notes.txt"]);
    // Puts the checkpoint back among the files of others.
    new.withdraw();
    assert_eq!(steps(path), [7]);
    new.begin(None).unwrap();
    run(path, 1);
    new.drop_replaced();
    assert!(notes.exists() && draft.exists());
    assert_eq!(steps(path), [1]);
    assert!(!path.join(ASIDE).exists());
}

#[test]
fn something_else_under_a_name_of_the_run_is_refused_and_stays() {
    let names = [
        "checkpoints",
        "checkpoints/step-00000003",
        "replaced-run/notes.txt",
        ".tmp-replaced-run",
        ".lock",
    ];
    for name in names {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "mine").unwrap();
        for args in [
            args(folder.path(), |_| ()),
            replacing(folder.path()),
            resuming(folder.path(), "auto"),
        ] {
            let refused = take(&args).unwrap_err();
            assert!(refused.is_user_error(), "{name}: {refused}");
            let refused = RunFolder::check(&args).unwrap_err();
            assert!(refused.to_string().contains(&name[..5]), "{refused}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine", "{name}");
    }
    for name in [RESOLVED, METRICS_FILE, "checkpoints/latest"] {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join(name)).unwrap();
        let refused = take(&args(folder.path(), |_| ())).unwrap_err();
        assert!(refused.is_user_error(), "{name}: {refused}");
    }
}

#[test]
fn an_adapter_of_no_run_is_neither_replaced_nor_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let lora = folder.path().join("lora.json");
    let training = |name: &str, resume: Option<&str>| {
        args(path, |args| {
            args.lora_config = Some(InputPath(lora.clone()));
            args.adapter_name.0 = name.to_owned();
            args.resume_from_checkpoint = resume.map(ToOwned::to_owned);
            args.overwrite_output_dir = resume.is_none();
        })
    };
    let own = path.join(ADAPTER_FOLDER).join(ADAPTER_CONFIG);
    fs::create_dir(path.join(ADAPTER_FOLDER)).unwrap();
    fs::write(&own, "{}").unwrap();
    let refused = take(&training("default", None)).unwrap_err();
    let text = refused
        .to_string()
        .replace(&path.display().to_string(), "run");
    insta::assert_snapshot!(text, @r#"run/adapter has an adapter already, which no run of this folder has trained: move it away, or name another "output_dir" or "adapter_name""#);
    assert!(refused.is_user_error());
    take(&training("other", None)).unwrap();
    // A run without an adapter leaves it in place.
    run(path, 7);
    take(&replacing(path)).unwrap().begin(None).unwrap();
    assert!(own.exists());
    // `auto` keeps it aside instead of asking.
    take(&training("default", Some("auto")))
        .unwrap()
        .begin(None)
        .unwrap();
    assert!(
        path.join("earlier-run-2/adapter")
            .join(ADAPTER_CONFIG)
            .exists()
    );
    // An adapter that a run of the folder has trained moves with the run.
    run(path, 8);
    let step = Store::in_output_dir(path).path_of(8);
    fs::write(step.join(ADAPTER_CONFIG), "{}").unwrap();
    fs::create_dir(path.join(ADAPTER_FOLDER)).unwrap();
    fs::write(&own, "{}").unwrap();
    take(&training("default", None)).unwrap();
    let new = take(&replacing(path)).unwrap();
    new.begin(None).unwrap();
    assert!(new.replaced().unwrap().join(ADAPTER_FOLDER).exists() && !own.exists());
}

#[test]
fn a_second_process_is_told_who_writes_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let first = take(&args(folder.path(), |_| ())).unwrap();
    // The writing process is reported before the run that is there.
    run(folder.path(), 1);
    let holder = format!("is in use by process {}", std::process::id());
    for second in [args(folder.path(), |_| ()), resuming(folder.path(), "auto")] {
        for refused in [
            take(&second).unwrap_err(),
            RunFolder::check(&second).unwrap_err(),
        ] {
            assert!(
                refused.is_user_error() && refused.to_string().contains(&holder),
                "{refused}"
            );
        }
    }
    drop(first);
    take(&resuming(folder.path(), "auto")).unwrap();
}

#[test]
fn a_removed_folder_is_made_anew_and_held() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let first = take(&args(&path, |_| ())).unwrap();
    first.begin(None).unwrap();
    fs::remove_dir_all(&path).unwrap();
    first.renew();
    assert_eq!(names(&path), [".lock", RESOLVED]);
    fs::remove_file(path.join(RESOLVED)).unwrap();
    first.renew();
    assert_eq!(names(&path), [".lock", RESOLVED]);
    assert!(matches!(
        take(&resuming(&path, "auto")),
        Err(Error::Folder(FolderError::RunInUse { .. }))
    ));
}

#[test]
fn a_rank_that_sees_another_folder_than_the_first_one_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let here = args(folder.path(), |args| args.distributed.timeout_s = 0.1);
    let first = take(&here).unwrap();
    let holder = RunFolder::holder(&here).unwrap();
    RunFolder::expect_shared(&here, &holder).unwrap();
    let elsewhere = RunFolder::expect_shared(&here, "4711 on n1\n");
    let Err(Error::Folder(FolderError::NotShared { holder, host, .. })) = elsewhere else {
        panic!("{elsewhere:?}");
    };
    assert_eq!((&*holder, host), ("4711 on n1", host_name()));
    // It writes its shards there.
    fs::write(folder.path().join(CHECKPOINTS), "").unwrap();
    let holder = RunFolder::holder(&here).unwrap();
    let unfit = RunFolder::expect_shared(&here, &holder);
    assert!(
        matches!(unfit, Err(Error::Folder(FolderError::OutputDir { .. }))),
        "{unfit:?}"
    );
    drop(first);
}

#[test]
fn the_records_of_a_failed_start_are_kept_and_nothing_else_is_moved() {
    let folder = tempfile::tempdir().unwrap();
    let [path, other] = ["run", "other"].map(|name| folder.path().join(name));
    run(&other, 9);
    let begins = resuming(&path, other.to_str().unwrap());
    assert!(!RunFolder::has_run(&begins));
    RunFolder::keep_records(&begins).unwrap();
    assert!(!path.exists(), "there is nothing to keep");
    for mine in ["notes.txt", "adapter/notes.txt", "tensorboard/notes.txt"] {
        fs::create_dir_all(path.join(mine).parent().unwrap()).unwrap();
        fs::write(path.join(mine), "mine").unwrap();
    }
    RunFolder::keep_records(&begins).unwrap();
    assert_eq!(names(&path), ["adapter", "notes.txt", "tensorboard"]);
    for file in [METRICS_FILE, RESOLVED, TRACE_FILE] {
        fs::write(path.join(file), "{}\n").unwrap();
    }
    assert!(RunFolder::has_run(&begins));
    RunFolder::keep_records(&begins).unwrap();
    let left = ["adapter", "earlier-run-1", "notes.txt", "tensorboard"];
    assert_eq!(names(&path), [&left[..], &[TRACE_FILE]].concat());
    assert_eq!(names(&path.join("earlier-run-1")), [RESOLVED, METRICS_FILE]);
    take(&begins).unwrap().begin(Some(9)).unwrap();
    // A run with checkpoints is none that failed before them.
    run(&path, 4);
    RunFolder::keep_records(&begins).unwrap();
    assert_eq!((steps(&path), steps(&other)), (vec![4], vec![9]));
}
