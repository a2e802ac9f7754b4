//! What a crash leaves: killed processes, disks that are full.

use merak_ckpt::{Checkpoint, DType, Header, Layout, Piece, ShardKind, Store};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Step 2 in `source`, large enough to be written for a while.
fn write_source(folder: &Path) {
    write(&Store::in_output_dir(folder.join("source")), 2);
}

/// An output folder that has a checkpoint of step 1 of the same run.
fn write_destination(folder: &Path, name: &str) -> Store {
    let store = Store::in_output_dir(folder.join(name));
    write(&store, 1);
    store
}

/// Saves a step of the run.
fn write(store: &Store, step: u64) {
    let draft = store.begin(step).expect("a draft");
    let layout = Layout::whole(&[512, 1024]);
    let bytes: Vec<u8> = (0..512_u32 * 1024).flat_map(u32::to_le_bytes).collect();
    let names: Vec<_> = (0..8).map(|number| format!("h.{number}.w")).collect();
    let piece = |name| Piece::parameter(name, DType::U32, &layout);
    let pieces: Vec<_> = names
        .iter()
        .map(|name| (piece(name), bytes.as_slice()))
        .collect();
    let shard = draft
        .write_shard(ShardKind::Model, 0, &pieces)
        .expect("it is written");
    let config: &[u8] = b"{\"n_layer\": 8}\n";
    draft
        .commit(vec![shard], Header::default(), &[("config.json", config)])
        .expect("it is complete");
}

const RESHARD: [&str; 2] = ["reshard", "source"];
const DEGREES: [&str; 4] = ["--pp", "4", "--max-memory", "4MiB"];

/// Both what `latest` names and the newest step are sound, and they are what was there before or
/// what was written.
fn check_survivors(store: &Store) {
    let latest = Checkpoint::open(store.folder()).expect("it opens");
    let newest = Checkpoint::open_newest(store.folder())
        .expect("it lists")
        .expect("there is one");
    for checkpoint in [latest, newest] {
        assert_eq!(checkpoint.verify().damage, []);
        assert!([1, 2].contains(&checkpoint.manifest().header.step));
    }
}

#[test]
fn a_process_that_is_killed_at_any_time_leaves_good_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    write_source(folder.path());
    let start = |destination: &str| {
        Command::new(env!("CARGO_BIN_EXE_merak-ckpt"))
            .current_dir(folder.path())
            .args(RESHARD)
            .arg(destination)
            .args(DEGREES)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the command starts")
    };
    let started = Instant::now();
    assert!(start("whole").wait().unwrap().success());
    let whole = started.elapsed();
    for twentieths in 0..=24_u32 {
        let name = format!("killed-{twentieths}");
        let store = write_destination(folder.path(), &name);
        let mut child = start(&name);
        thread::sleep(whole.mul_f64(f64::from(twentieths) / 20.0));
        child.kill().unwrap();
        child.wait().unwrap();
        check_survivors(&store);
        // The next attempt finishes what was begun, or finds it done.
        let status = start(&name).wait().unwrap();
        let was_done = store.path_of(2).exists() && !status.success();
        assert!(status.success() || was_done);
        check_survivors(&store);
        fs::remove_dir_all(folder.path().join(name)).unwrap();
    }
    assert!(whole < Duration::from_mins(1), "{whole:?}");
}

#[test]
fn a_disk_without_room_is_an_error_that_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    write_source(folder.path());
    // No file may grow beyond `blocks` blocks: the first, a later, or the small files fail.
    for blocks in [0, 1, 100, 3000] {
        let name = format!("full-{blocks}");
        let store = write_destination(folder.path(), &name);
        let output = Command::new("sh")
            .current_dir(folder.path())
            .args([
                "-c",
                &format!("ulimit -f {blocks}; exec \"$0\" \"$@\""),
                env!("CARGO_BIN_EXE_merak-ckpt"),
            ])
            .args(RESHARD)
            .arg(&name)
            .args(DEGREES)
            .output()
            .expect("a shell");
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains("cannot write"), "{errors}");
        check_survivors(&store);
        let left: Vec<_> = fs::read_dir(store.folder())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }
}

#[test]
fn a_save_that_fails_takes_the_folders_along_that_it_made() {
    let folder = tempfile::tempdir().unwrap();
    write_source(folder.path());
    fs::create_dir(folder.path().join("there")).unwrap();
    for (name, stays) in [("new/run", "new"), ("there", "there/checkpoints")] {
        let output = Command::new("sh")
            .current_dir(folder.path())
            .args([
                "-c",
                "ulimit -f 1; exec \"$0\" \"$@\"",
                env!("CARGO_BIN_EXE_merak-ckpt"),
            ])
            .args(RESHARD)
            .arg(name)
            .output()
            .expect("a shell");
        assert_eq!(output.status.code(), Some(1));
        assert!(!folder.path().join(stays).exists(), "{name}");
    }
    assert!(folder.path().join("there").exists());
}
