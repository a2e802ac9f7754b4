//! Checkpoints rewritten for other topologies.

use crate::support::{check, save, topologies, topology};
use merak_ckpt::{
    Checkpoint, Cut, DType, Error, Header, Kind, Piece, ReshardOptions, ShardKind, Stages, Store,
    Tolerance, Topology, diff, reshard,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Every file of a checkpoint and its content.
fn files(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(path).expect("a folder");
    entries
        .map(|entry| entry.expect("an entry").path())
        .map(|path| {
            let name = path.file_name().expect("a name").to_string_lossy();
            (name.into_owned(), fs::read(&path).expect("a file"))
        })
        .collect()
}

fn options(topology: Topology) -> ReshardOptions {
    ReshardOptions {
        topology,
        ..ReshardOptions::default()
    }
}

/// Reshards into a folder named for the topology.
fn rewrite(source: &Path, folder: &Path, topology: Topology) -> PathBuf {
    let Topology { dp, tp, pp, .. } = topology;
    let source = Checkpoint::open(source).expect("it opens");
    let name = format!("{dp}-{tp}-{pp}-{}", topology.zero_stage);
    reshard(&source, folder.join(name), &options(topology)).expect("it reshards")
}

/// Every topology to rewrite for, with the ZeRO stages and both degrees of the sequence axis by
/// turns.
fn targets() -> Vec<Topology> {
    let all = topologies().into_iter().enumerate();
    let target = |(number, topology): (usize, Topology)| Topology {
        zero_stage: number % 4,
        sp: 1 + number / 4 % 2,
        ..topology
    };
    all.map(target).collect()
}

#[test]
fn there_and_back_is_the_identity() {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(&Store::in_output_dir(folder.path()), 3, topology(2, 2, 1)).unwrap();
    let one = rewrite(&saved, &folder.path().join("one"), topology(1, 1, 1));
    let expected = files(&one);
    for topology in targets() {
        let there = rewrite(&one, &folder.path().join("there"), topology);
        let checkpoint = Checkpoint::open(&there).unwrap();
        check(&checkpoint, topology);
        assert_eq!(checkpoint.verify().damage, []);
        assert_eq!(checkpoint.manifest().header.topology, topology);
        let name = there.parent().unwrap().parent().unwrap().file_name();
        let back = folder.path().join("back").join(name.unwrap());
        let back = rewrite(&there, &back, Topology::default());
        assert!(files(&back) == expected, "{topology:?}");
    }
    let report = diff(
        &Checkpoint::open(&saved).unwrap(),
        &Checkpoint::open(&one).unwrap(),
        Tolerance::default(),
    )
    .unwrap();
    assert_eq!((report.equal, report.different.len()), (24, 0));
    assert_eq!(expected["config.json"], b"{\"n_layer\":2}\n");
}

#[test]
fn every_topology_is_rewritten_for_every_other_as_from_one_rank() {
    // So any way there and back is the identity too, through any topologies.
    let folder = tempfile::tempdir().unwrap();
    let saved = save(&Store::in_output_dir(folder.path()), 3, topology(1, 1, 1)).unwrap();
    let written: Vec<_> = targets()
        .into_iter()
        .map(|target| {
            let path = rewrite(&saved, folder.path(), target);
            (target, files(&path), path)
        })
        .collect();
    assert_eq!(written.len(), 17);
    for (from, _, source) in &written {
        for (to, expected, _) in &written {
            let name = format!("{}-{}-{}", from.dp, from.tp, from.pp);
            let path = rewrite(source, &folder.path().join(name), *to);
            assert!(files(&path) == *expected, "{from:?} to {to:?}");
        }
    }
}

#[test]
fn every_rank_gets_its_file_and_its_share() {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(&Store::in_output_dir(folder.path()), 3, topology(1, 1, 1)).unwrap();
    let topology = Topology {
        zero_stage: 1,
        ..topology(2, 2, 2)
    };
    let path = rewrite(&saved, folder.path(), topology);
    let manifest = Checkpoint::open(path).unwrap();
    let manifest = manifest.manifest();
    let names: Vec<_> = manifest
        .files
        .iter()
        .map(|file| file.name.as_str())
        .collect();
    let expected: Vec<String> = [
        vec!["config.json".to_owned()],
        [0, 1, 4, 5]
            .map(|rank| format!("model-{rank:05}.safetensors"))
            .into(),
        (0..8)
            .map(|rank| format!("optim-{rank:05}.safetensors"))
            .collect(),
    ]
    .concat();
    assert_eq!(names, expected);
    let state = manifest
        .tensor(&Kind::optimizer("adamw.exp_avg"), "h.0.attn.c_attn.weight")
        .unwrap();
    assert_eq!(state.cut, Some(Cut::new(1, [8, 8, 8])));
}

#[test]
fn stages_by_name_decide_who_writes() {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(&Store::in_output_dir(folder.path()), 3, topology(1, 1, 1)).unwrap();
    let source = Checkpoint::open(saved).unwrap();
    let last = |name: &str| usize::from(name == "wte.weight");
    let named = source.manifest().tensors.iter();
    let named = named.map(|tensor| (tensor.name.clone(), last(&tensor.name)));
    let options = ReshardOptions {
        stages: Stages::Named(named.collect()),
        ..options(topology(1, 1, 2))
    };
    let path = reshard(&source, folder.path().join("two"), &options).unwrap();
    for tensor in &Checkpoint::open(path).unwrap().manifest().tensors {
        for slice in &tensor.slices {
            let is_last = slice.file.ends_with("-00001.safetensors");
            assert_eq!(is_last, tensor.name == "wte.weight", "{}", slice.file);
        }
    }
}

#[test]
fn large_tensors_stream_through_small_buffers() {
    // 9 MiB under a cap of 4 MiB, cut across its rows.
    let folder = tempfile::tempdir().unwrap();
    let store = Store::in_output_dir(folder.path());
    let shape = [768, 3072];
    let bytes: Vec<u8> = (0..768_u32 * 3072).flat_map(u32::to_le_bytes).collect();
    let layout = Cut::new(1, [1024; 3]).layout(&shape, 0, 1).unwrap();
    let piece = Piece::parameter("w", DType::U32, &layout);
    let draft = store.begin(1).unwrap();
    let shard = draft
        .write_shard(ShardKind::Model, 0, &[(piece, &bytes)])
        .unwrap();
    let source = draft.commit(vec![shard], Header::default(), &[]).unwrap();
    let options = ReshardOptions {
        max_memory: 4 << 20,
        ..options(Topology {
            zero_stage: 3,
            ..topology(2, 2, 1)
        })
    };
    let four = reshard(
        &Checkpoint::open(&source).unwrap(),
        folder.path().join("four"),
        &options,
    )
    .unwrap();
    let four = Checkpoint::open(four).unwrap();
    assert_eq!(four.manifest().files.len(), 4);
    assert!(four.read_whole(&Kind::Parameter, "w").unwrap() == bytes);
    let too_little = ReshardOptions {
        max_memory: 1 << 20,
        ..options
    };
    let error = reshard(&four, folder.path().join("no"), &too_little).unwrap_err();
    insta::assert_snapshot!(error.to_string(), @"`max_memory` is 1048576 bytes, expected 4 MiB or more");
}

#[test]
fn a_failed_reshard_leaves_nothing_and_nothing_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(&Store::in_output_dir(folder.path()), 3, topology(1, 1, 1)).unwrap();
    let source = Checkpoint::open(&saved).unwrap();
    for taken in [folder.path(), saved.as_path(), saved.parent().unwrap()] {
        let error = reshard(&source, taken, &ReshardOptions::default()).unwrap_err();
        assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    }
    let wrong_name = folder.path().join("step-00000004");
    let error = reshard(&source, wrong_name, &ReshardOptions::default()).unwrap_err();
    assert!(matches!(error, Error::InvalidName { .. }), "{error}");
    for degrees in [topology(0, 1, 1), topology(1 << 40, 1 << 40, 1)] {
        let error = reshard(&source, folder.path().join("no"), &options(degrees)).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { .. }), "{error}");
    }

    let file = saved.join("optim-00000.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = reshard(
        &source,
        folder.path().join("new"),
        &options(topology(1, 2, 1)),
    )
    .unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("optim-00000.safetensors, tensor `wte.weight`"),
        "{error}"
    );
    assert!(!folder.path().join("new").exists());
    fs::write(saved.join("config.json"), b"{\"n_layer\":3}\n").unwrap();
}
