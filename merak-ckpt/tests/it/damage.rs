//! Damaged files give errors that name them, when they are loaded and when they are verified.

use crate::support::{save, topology};
use merak_ckpt::{Checkpoint, DType, Error, Header, Kind, Layout, Piece, Result, ShardKind, Store};
use proptest::prelude::*;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// An output folder with a good checkpoint of step 1 and one of step 2 to be damaged.
pub(crate) fn victim() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = Store::new(folder.path());
    save(&store, 1, topology(1, 1, 1)).expect("it saves");
    let path = save(&store, 2, topology(1, 2, 1)).expect("it saves");
    (folder, path)
}

/// Reads everything; the first error.
pub(crate) fn read_all(path: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(path)?;
    for tensor in &checkpoint.manifest().tensors {
        checkpoint.read_whole(&tensor.kind, &tensor.name)?;
    }
    Ok(())
}

/// An error's text without the temporary folder's name.
pub(crate) fn message(result: Result<()>, folder: &Path) -> String {
    let error = result.expect_err("it is damaged");
    assert!(error.is_user_error(), "{error}");
    error
        .to_string()
        .replace(&folder.display().to_string(), "OUT")
}

#[test]
fn a_flipped_byte_anywhere_is_found_and_its_file_is_named() {
    let (_folder, path) = victim();
    let mut names: Vec<_> = fs::read_dir(&path)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 8);
    for name in names {
        let file = path.join(&name);
        let good = fs::read(&file).unwrap();
        // Every byte of small files; of large ones, enough to hit every header field and slice.
        for at in (0..good.len()).step_by(good.len() / 200 + 1) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            fs::write(&file, &bad).unwrap();
            let found = match Checkpoint::open(&path) {
                Ok(checkpoint) => checkpoint.verify().damage,
                Err(Error::Damaged { damage, .. }) => vec![*damage],
                Err(Error::NewerVersion { .. }) => continue,
                Err(error) => panic!("{name} at {at}: {error}"),
            };
            assert!(!found.is_empty(), "{name} at {at}");
            assert!(
                found.iter().all(|damage| damage.file == name),
                "{name} at {at}: {found:?}"
            );
        }
        fs::write(&file, &good).unwrap();
    }
    assert!(Checkpoint::open(&path).unwrap().verify().damage.is_empty());
}

/// A checkpoint that some test damages and mends again, and the content of its files.
struct Patient {
    _folder: tempfile::TempDir,
    path: PathBuf,
    files: Vec<(String, Vec<u8>)>,
}

impl Patient {
    fn new() -> Self {
        let (folder, path) = victim();
        let mut files: Vec<_> = fs::read_dir(&path)
            .expect("a folder")
            .map(|entry| {
                let entry = entry.expect("an entry");
                let name = entry.file_name().into_string().expect("a plain name");
                (name, fs::read(entry.path()).expect("it is readable"))
            })
            .collect();
        files.sort();
        Self {
            _folder: folder,
            path,
            files,
        }
    }

    /// Loads everything with `content` in the place of a file; returns all bytes, and the run's
    /// state.
    fn load_with(&self, name: &str, content: &[u8]) -> Result<(Vec<Vec<u8>>, String)> {
        fs::write(self.path.join(name), content).expect("it can be written");
        let loaded = self.load();
        let (_, good) = self
            .files
            .iter()
            .find(|(n, _)| n == name)
            .expect("it is there");
        fs::write(self.path.join(name), good).expect("it can be written");
        loaded
    }

    fn load(&self) -> Result<(Vec<Vec<u8>>, String)> {
        let checkpoint = Checkpoint::open(&self.path)?;
        let manifest = checkpoint.manifest();
        let mut values = Vec::new();
        for tensor in &manifest.tensors {
            values.push(checkpoint.read_whole(&tensor.kind, &tensor.name)?);
        }
        let config = fs::read(self.path.join("config.json")).expect("it is readable");
        values.push(config);
        Ok((values, format!("{:?}", manifest.header)))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    #[test]
    fn what_is_loaded_is_what_was_saved_whatever_byte_changes(
        file in any::<prop::sample::Index>(),
        // Half of the places are at the beginning, where lengths and headers are.
        at in prop_oneof![(0_usize..200), any::<prop::sample::Index>().prop_map(|at| at.index(1 << 20))],
        change in 1_u8..=255,
    ) {
        static PATIENT: OnceLock<Patient> = OnceLock::new();
        let patient = PATIENT.get_or_init(Patient::new);
        let (name, good) = file.get(&patient.files);
        let mut bad = good.clone();
        let at = at % bad.len();
        bad[at] ^= change;
        match patient.load_with(name, &bad) {
            // Blanks after a header may turn into other blanks.
            Ok(loaded) => prop_assert_eq!(loaded, patient.load()?, "{} at {}", name, at),
            Err(Error::NewerVersion { .. }) => prop_assert_eq!(name, "manifest.json"),
            Err(Error::Damaged { damage, .. }) => prop_assert_eq!(&damage.file, name),
            Err(error) => prop_assert!(false, "{name} at {at}: {error}"),
        }
    }
}

#[test]
fn the_end_of_a_manifest_is_what_it_says_to_the_last_blank() {
    let patient = Patient::new();
    let name = "manifest.json";
    let file = patient.files.iter().find(|(n, _)| n == name);
    let good = &file.expect("it is there").1;
    for from_end in 1..=40 {
        let mut bad = good.clone();
        let at = bad.len() - from_end;
        bad[at] = if bad[at] == b' ' { b'\t' } else { b' ' };
        let error = patient.load_with(name, &bad).unwrap_err();
        assert!(
            matches!(error, Error::Damaged { .. }),
            "{from_end}: {error}"
        );
    }
}

#[test]
fn loading_refuses_edits_that_keep_the_length() {
    let patient = Patient::new();
    let good = |name: &str| {
        let found = patient.files.iter().find(|(n, _)| n == name);
        found.expect("it is there").1.clone()
    };
    let mut messages = Vec::new();
    let mut note = |name: &str, content: &[u8]| {
        assert_eq!(content.len(), good(name).len());
        let loaded = patient.load_with(name, content).map(|_| ());
        let folder = patient.path.parent().expect("a store");
        messages.push(message(loaded, folder));
    };
    note("config.json", b"{\"n_layer\":3}\n");
    let name = "model-00000.safetensors";
    let mut header = good(name);
    let at = header
        .windows(4)
        .position(|w| w == b"F32\"")
        .expect("a type");
    header[at..at + 3].copy_from_slice(b"I32");
    note(name, &header);
    // Two slices of one file change places: `c_proj` and `wte` have the same shape on each rank.
    let checkpoint = Checkpoint::open(&patient.path).unwrap();
    let bytes_of = |tensor: &str| {
        let tensor = checkpoint.manifest().tensor(&Kind::Parameter, tensor);
        let slices = &tensor.expect("it is there").slices;
        let slice = slices.iter().find(|slice| slice.file == name);
        slice.expect("it has one").bytes.map(|at| at as usize)
    };
    let [a, b] = ["h.0.mlp.c_proj.weight", "wte.weight"].map(bytes_of);
    let (mut swapped, whole) = (good(name), good(name));
    swapped[a[0]..a[1]].copy_from_slice(&whole[b[0]..b[1]]);
    swapped[b[0]..b[1]].copy_from_slice(&whole[a[0]..a[1]]);
    note(name, &swapped);
    insta::assert_snapshot!(messages.join("\n"), @"
    checkpoint OUT/step-00000002 is damaged: config.json: checksum 3bac1903c84aae9f, expected 825b778442943ea8; the newest complete older one is OUT/step-00000001
    checkpoint OUT/step-00000002 is damaged: model-00000.safetensors: the header and the manifest differ about `h.0.attn.c_attn.bias[0:4]`; the newest complete older one is OUT/step-00000001
    checkpoint OUT/step-00000002 is damaged: model-00000.safetensors, tensor `h.0.mlp.c_proj.weight`: checksum 213b7a2b3b04962d, expected 2e3adc09bc216943; the newest complete older one is OUT/step-00000001
    ");
}

#[test]
fn reading_finds_damage_in_the_slices_that_it_touches_and_names_an_older_checkpoint() {
    let (folder, path) = victim();
    let file = path.join("model-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, &bytes).unwrap();
    insta::assert_snapshot!(message(read_all(&path), folder.path()), @"checkpoint OUT/step-00000002 is damaged: model-00001.safetensors, tensor `wte.weight`: checksum 6e401e1a8817d0f8, expected 81b51451d5eff066; the newest complete older one is OUT/step-00000001");
    let checkpoint = Checkpoint::open(&path).unwrap();
    let untouched = Layout::shard(&[8, 6], 0, 0..4).unwrap();
    let kind = Kind::Parameter;
    let piece = Piece {
        kind: &kind,
        name: "wte.weight",
        dtype: DType::F32,
        layout: &untouched,
        range: None,
    };
    checkpoint.read(&piece, &mut [0; 4 * 6 * 4]).unwrap();
    // The same damage again: a slice that failed is not taken for checked.
    for _ in 0..2 {
        assert!(checkpoint.read_whole(&kind, "wte.weight").is_err());
    }
}

/// A piece of the tensor `w`.
fn piece(layout: &Layout, range: Option<Range<usize>>) -> Piece<'_> {
    Piece {
        kind: &Kind::Parameter,
        name: "w",
        dtype: DType::U8,
        layout,
        range,
    }
}

#[test]
fn damage_of_a_large_slice_is_found_whatever_is_read_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path());
    let (rows, columns) = (5, 120_000);
    let whole = Layout::whole(&[rows, columns]);
    let bytes: Vec<u8> = (0..rows * columns).map(|at| (at % 251) as u8).collect();
    let draft = store.begin(1).unwrap();
    let pieces = [(piece(&whole, None), bytes.as_slice())];
    let shard = draft.write_shard(ShardKind::Model, 0, &pieces).unwrap();
    let path = draft.commit(vec![shard], Header::default(), &[]).unwrap();
    let layouts = [
        whole.clone(),
        Layout::shard(&[rows, columns], 0, 1..4).unwrap(),
        Layout::shard(&[rows, columns], 1, 30_000..100_000).unwrap(),
        Layout::shard(&[rows, columns], 1, 0..9).unwrap(),
    ];
    let read = |layout: &Layout, range: Option<Range<usize>>| {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let piece = piece(layout, range);
        let mut out = vec![0; piece.num_bytes()];
        // The second time, its checksum has been found right.
        checkpoint.read(&piece, &mut out)?;
        out.fill(0);
        checkpoint.read(&piece, &mut out).map(|()| out)
    };
    let from_columns = |columns: Range<usize>| {
        let rows = bytes.chunks(120_000);
        rows.flat_map(|row| row[columns.clone()].to_vec()).collect()
    };
    let expected = [
        bytes.clone(),
        bytes[columns..4 * columns].to_vec(),
        from_columns(30_000..100_000),
        from_columns(0..9),
    ];
    for (layout, expected) in layouts.iter().zip(&expected) {
        assert!(read(layout, None).unwrap() == *expected);
    }
    assert!(read(&whole, Some(70_000..400_001)).unwrap() == bytes[70_000..400_001]);

    let file = path.join("model-00000.safetensors");
    let good = fs::read(&file).unwrap();
    let data = good.len() - bytes.len();
    for at in [0, 65_536, 262_143, 262_144, 400_000, bytes.len() - 1] {
        let mut bad = good.clone();
        bad[data + at] ^= 4;
        fs::write(&file, bad).unwrap();
        for layout in &layouts {
            let error = read(layout, None).unwrap_err();
            assert!(matches!(error, Error::Damaged { .. }), "{at}: {error}");
        }
    }
}

#[test]
fn missing_truncated_grown_and_swapped_files_are_named() {
    let (folder, path) = victim();
    let first = path.join("model-00000.safetensors");
    let a = fs::read(&first).unwrap();
    let mut messages = Vec::new();
    let note = |messages: &mut Vec<String>| messages.push(message(read_all(&path), folder.path()));
    fs::write(&first, &a[..a.len() - 1]).unwrap();
    note(&mut messages);
    fs::write(&first, [a.as_slice(), b"x"].concat()).unwrap();
    note(&mut messages);
    fs::remove_file(&first).unwrap();
    note(&mut messages);
    fs::create_dir(&first).unwrap();
    note(&mut messages);
    fs::remove_dir(&first).unwrap();
    fs::write(&first, &a).unwrap();
    let [first, second] =
        ["optim-00000.safetensors", "optim-00100.safetensors"].map(|name| path.join(name));
    let swap = path.join("swap");
    fs::rename(&first, &swap).unwrap();
    fs::rename(&second, &first).unwrap();
    fs::rename(&swap, &second).unwrap();
    note(&mut messages);
    insta::assert_snapshot!(messages.join("\n"), @"
    checkpoint OUT/step-00000002 is damaged: model-00000.safetensors: the file has 1707 bytes, expected 1708; the newest complete older one is OUT/step-00000001
    checkpoint OUT/step-00000002 is damaged: model-00000.safetensors: the file has 1709 bytes, expected 1708; the newest complete older one is OUT/step-00000001
    checkpoint OUT/step-00000002 is damaged: model-00000.safetensors: the file is missing; the newest complete older one is OUT/step-00000001
    checkpoint OUT/step-00000002 is damaged: model-00000.safetensors: it is no regular file; the newest complete older one is OUT/step-00000001
    checkpoint OUT/step-00000002 is damaged: optim-00000.safetensors: the file has 1900 bytes, expected 1836; the newest complete older one is OUT/step-00000001
    ");
}

#[test]
fn a_checkpoint_of_another_model_is_refused_by_name() {
    let (folder, path) = victim();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let refusal = |kind: Kind, name: &str, dtype: DType, shape: &[usize], bytes: usize| {
        let layout = Layout::whole(shape);
        let piece = Piece {
            kind: &kind,
            name,
            dtype,
            layout: &layout,
            range: None,
        };
        let error = checkpoint.read(&piece, &mut vec![0; bytes]).unwrap_err();
        let text = error.to_string();
        text.replace(&folder.path().display().to_string(), "OUT")
    };
    let weight = |dtype: DType, shape: &[usize], bytes: usize| {
        refusal(Kind::Parameter, "wte.weight", dtype, shape, bytes)
    };
    let unknown = Kind::optimizer("sgd.momentum");
    let messages = [
        refusal(Kind::Parameter, "h.1.cov.weight", DType::F32, &[8, 6], 192),
        refusal(unknown, "wte.weight", DType::F32, &[8, 6], 192),
        weight(DType::F32, &[8, 7], 224),
        weight(DType::BF16, &[8, 6], 96),
        weight(DType::F32, &[8, 6], 191),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
    checkpoint OUT/step-00000002 has no parameter `h.1.cov.weight`; did you mean "h.1.conv.weight"?
    checkpoint OUT/step-00000002 has no sgd.momentum `wte.weight`
    parameter `wte.weight` in OUT/step-00000002 has shape [8, 6], expected [8, 7]
    parameter `wte.weight` in OUT/step-00000002 has elements of type f32, expected bf16
    the buffer of parameter `wte.weight` has 191 bytes, expected 192
    "#);
}
