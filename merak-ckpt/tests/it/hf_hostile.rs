//! Hugging Face folders that are damaged or made to harm: an error names the file, and nothing is
//! run.

use crate::hf::{copy, golden};
use merak_ckpt::{HfFolder, ImportOptions, Layout, Piece, import_hf};
use std::fs;
use std::path::Path;

fn refusal(folder: &Path) -> String {
    let error = HfFolder::open(folder).expect_err("it is wrong");
    assert!(error.is_user_error(), "{error}");
    error
        .to_string()
        .replace(&folder.display().to_string(), "HF")
}

#[test]
fn a_pickle_that_would_run_something_is_refused_by_name() {
    let folder = golden("evil");
    insta::assert_snapshot!(refusal(&folder), @"cannot read HF/pytorch_model.bin: it asks for `posix.system`, which no table of tensors needs (byte 13 of the pickle)");
    assert!(!Path::new("/tmp/merak-was-here").exists());
}

#[test]
fn a_table_of_tensors_stays_inside_the_memory_limit() {
    let folder = golden("gpt2-zip");
    assert!(HfFolder::open_within(&folder, 1 << 20).is_ok());
    let error = HfFolder::open_within(&folder, 16 << 10).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("more than") && message.contains("--max-memory"),
        "{message}"
    );
    // As `torch.save` would write four million lists, each in the next.
    let old = fs::read(golden("gpt2-old/pytorch_model.bin")).unwrap();
    let table = old
        .windows(2)
        .enumerate()
        .filter(|(_, w)| w == b"\x80\x02")
        .map(|(at, _)| at);
    let table = table.collect::<Vec<_>>()[3];
    let folder = copy("gpt2-old");
    let lists = [&b"]".repeat(2 << 20)[..], &b"a".repeat((2 << 20) - 1), b"."].concat();
    let hostile = [&old[..table], &lists].concat();
    fs::write(folder.path().join("pytorch_model.bin"), hostile).unwrap();
    let begun = std::time::Instant::now();
    assert!(refusal(folder.path()).contains("bytes of memory"));
    assert!(begun.elapsed() < std::time::Duration::from_secs(5));
}

#[test]
fn files_that_are_no_regular_ones_are_refused_at_once() {
    let folder = copy("gpt2-safetensors");
    let path = folder.path();
    let pipe = |name: &str| {
        fs::remove_file(path.join(name)).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(path.join(name))
            .status();
        assert!(made.unwrap().success());
    };
    let mut messages = Vec::new();
    let weights = path.join("model.safetensors");
    fs::write(
        &weights,
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
    )
    .unwrap();
    messages.push(refusal(path));
    let index = path.join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map": {"w": "w.safetensors"}}"#).unwrap();
    fs::remove_file(&weights).unwrap();
    fs::create_dir(path.join("w.safetensors")).unwrap();
    messages.push(refusal(path));
    fs::File::create(path.join("config.json"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    messages.push(refusal(path));
    pipe("config.json");
    messages.push(refusal(path));
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read HF/model.safetensors: it only points to the weights, which Git LFS has: fetch them with `git lfs pull`
    cannot read HF/w.safetensors: it is no regular file
    cannot read HF/config.json: it has 1.00 TiB, the limit is 4.00 MiB
    cannot read HF/config.json: it is no regular file
    ");
}

#[test]
fn folders_that_are_no_models_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let mut messages = vec![refusal(&path.join("nowhere")), refusal(path)];
    fs::write(path.join("config.json"), "{").unwrap();
    messages.push(refusal(path));
    fs::write(path.join("config.json"), "{\"model_type\": \"gpt2\"}").unwrap();
    messages.push(refusal(path));
    let index = path.join("model.safetensors.index.json");
    for text in [
        "{}",
        r#"{"weight_map": {"w": "../w"}}"#,
        r#"{"weight_map": {"w": "w.safetensors"}}"#,
    ] {
        fs::write(&index, text).unwrap();
        messages.push(refusal(path));
    }
    fs::copy(
        golden("gpt2-safetensors/model.safetensors"),
        path.join("w.safetensors"),
    )
    .unwrap();
    messages.push(refusal(path));
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read HF: the folder does not exist
    cannot read HF/config.json: the file is missing
    cannot read HF/config.json: EOF while parsing an object at line 1 column 1
    cannot read HF: it has no model.safetensors, model.safetensors.index.json, pytorch_model.bin or pytorch_model.bin.index.json
    cannot read HF/model.safetensors.index.json: it has no `weight_map`
    cannot read HF/model.safetensors.index.json: invalid file name `../w`: expected 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`, not starting with a dot, other than manifest.json
    cannot open HF/w.safetensors
    cannot read HF/w.safetensors: it lacks tensor `w` of the index
    ");
}

#[test]
fn every_truncation_and_many_flipped_bits_give_an_error_or_tensors() {
    for (name, file) in [
        ("gpt2-safetensors", "model.safetensors"),
        ("gpt2-zip", "pytorch_model.bin"),
        ("gpt2-old", "pytorch_model.bin"),
    ] {
        let folder = copy(name);
        let path = folder.path().join(file);
        let bytes = fs::read(&path).unwrap();
        for length in (0..bytes.len()).step_by(251) {
            fs::write(&path, &bytes[..length]).unwrap();
            refusal(folder.path());
        }
        let mut refused = 0;
        for at in (0..bytes.len()).step_by(97) {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&path, bytes).unwrap();
            let read_all = |folder: HfFolder| {
                let mut tensors = folder.tensors().iter();
                tensors.try_for_each(|tensor| {
                    let layout = Layout::whole(&tensor.shape);
                    let piece = Piece::parameter(&tensor.name, tensor.dtype, &layout);
                    folder.read_as(&piece, &mut vec![0; tensor.num_bytes()])
                })
            };
            match HfFolder::open(folder.path()).and_then(read_all) {
                // What is left of a table may still be sound; then all of it can be read, unless
                // the file has checksums.
                Ok(()) => {}
                Err(error) => {
                    assert!(error.is_user_error(), "{error}");
                    refused += 1;
                }
            }
        }
        assert!(refused > 3, "{name}: {refused}");
    }
}

/// Headers that say what is not so, with the bytes of data after them.
const LYING: [(&str, usize); 10] = [
    (
        r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
        4,
    ),
    (
        r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#,
        8,
    ),
    (
        r#"{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
        0,
    ),
    (
        r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"v":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#,
        6,
    ),
    (
        r#"{"w":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}"#,
        4,
    ),
    (
        r#"{"a/b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
        4,
    ),
    (
        r#"{"w":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}"#,
        8,
    ),
    (
        r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
        4,
    ),
    (
        r#"{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
        8,
    ),
    (
        r#"{"w":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}"#,
        1,
    ),
];

#[test]
fn headers_that_lie_are_refused() {
    let file = |(header, data): (&str, usize)| {
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &vec![0; data]].concat()
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join("config.json"), "{\"model_type\": \"gpt2\"}").unwrap();
    let mut messages = Vec::new();
    let endless = u64::MAX.to_le_bytes().to_vec();
    for bytes in std::iter::once(endless).chain(LYING.map(file)) {
        fs::write(path.join("model.safetensors"), bytes).unwrap();
        messages.push(refusal(path));
    }
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read HF/model.safetensors: its header has 18446744073709551615 bytes, expected at most 0
    cannot read HF/model.safetensors: it has 66 bytes, by its header it should have 70
    cannot read HF/model.safetensors: tensor `w` has bytes 8..0 of the data, expected some from 0 on
    cannot read HF/model.safetensors: tensor `w` of shape [4611686018427387904, 4] is too large
    cannot read HF/model.safetensors: tensor `v` has bytes 2..6 of the data, expected some from 4 on
    cannot read HF/model.safetensors: tensor `w` has elements of type F8_E4M3, which cannot be read
    cannot read HF/model.safetensors: invalid tensor name `transformer.a/b`: expected 1 to 1024 bytes without control characters, `[`, `#` and `/`
    cannot read HF/model.safetensors: its header is wrong: tensor `w`: unknown variant `F99`, expected one of `BOOL`, `F4`, `F6_E2M3`, `F6_E3M2`, `U8`, `I8`, `F8_E5M2`, `F8_E4M3`, `F8_E8M0`, `F8_E4M3FNUZ`, `F8_E5M2FNUZ`, `I16`, `U16`, `F16`, `BF16`, `I32`, `U32`, `F32`, `C64`, `F64`, `I64`, `U64` at line 1 column 19
    cannot read HF/model.safetensors: tensor `w` has bytes 0..4 of the data, expected some from 4 on
    cannot read HF/model.safetensors: tensor `w` of type f32 and shape [3] has 8 bytes, expected 12
    cannot read HF/model.safetensors: tensor `w` has 17 dims, the limit is 16
    ");
}

/// The names of the storages in the archives of a file, and their first bytes.
pub(crate) fn storages(file: &[u8]) -> Vec<(String, usize)> {
    let short = |at: usize| usize::from(u16::from_le_bytes([file[at], file[at + 1]]));
    let headers = file.windows(4).enumerate();
    let headers = headers.filter(|(_, window)| window == b"PK\x03\x04");
    let member = |(at, _): (usize, &[u8])| {
        let end = at + 30 + short(at + 26);
        let name = String::from_utf8(file[at + 30..end].to_vec()).expect("a name");
        (name, end + short(at + 28))
    };
    let members = headers.map(member);
    members
        .filter(|(name, _)| name.contains("/data/"))
        .collect()
}

#[test]
fn a_changed_byte_of_a_tensor_is_refused_by_the_archive_s_own_checksum() {
    for topology in [(1, 1), (2, 2)] {
        let options = ImportOptions {
            topology: crate::support::topology(1, topology.0, topology.1),
            ..ImportOptions::default()
        };
        for (name, least) in [("gpt2-zip", 28), ("gpt2-strided", 28)] {
            let folder = copy(name);
            let file = folder.path().join("pytorch_model.bin");
            let good = fs::read(&file).unwrap();
            let mut refused = 0;
            for (member, at) in storages(&good) {
                let mut bad = good.clone();
                bad[at] ^= 1;
                fs::write(&file, bad).unwrap();
                let to = tempfile::tempdir().unwrap();
                let source = HfFolder::open(folder.path()).unwrap();
                let Err(error) = import_hf(&source, to.path().join("to"), &options) else {
                    // A buffer that models compute themselves, which is not read.
                    continue;
                };
                assert!(error.is_user_error(), "{error}");
                let message = error.to_string();
                let expected = [
                    "pytorch_model.bin: ",
                    &format!("member `{member}` has the checksum"),
                ];
                let has_all = expected.iter().all(|text| message.contains(text));
                assert!(has_all, "{message}");
                assert!(!to.path().join("to").exists(), "nothing is left");
                refused += 1;
            }
            assert!(refused >= least, "{name}: {refused}");
        }
    }
}

#[test]
fn a_storage_of_which_only_a_part_is_wanted_is_checked_whole() {
    let folder = copy("parted");
    let file = folder.path().join("pytorch_model.bin");
    let good = fs::read(&file).unwrap();
    let [(member, begin)] = &storages(&good)[..] else {
        panic!("it has one storage");
    };
    let imported = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        let to = tempfile::tempdir().unwrap();
        let source = HfFolder::open(folder.path()).unwrap();
        let options = ImportOptions::default();
        import_hf(&source, to.path().join("to"), &options).map(drop)
    };
    imported(&good).unwrap();
    // Before the tensor, in it, between two of its rows, after it.
    for element in [0, 2 * 16 + 5, 3 * 16, 255] {
        let mut bad = good.clone();
        bad[begin + 4 * element] ^= 1;
        let message = imported(&bad).unwrap_err().to_string();
        let expected = format!("pytorch_model.bin: member `{member}` has the checksum");
        assert!(message.contains(&expected), "{element}: {message}");
    }
}

#[test]
fn an_expanded_tensor_is_refused_with_how_to_save_it() {
    insta::assert_snapshot!(refusal(&golden("expanded")), @"cannot read HF/pytorch_model.bin: tensor `w` is expanded: dim 0 of shape [3, 4] repeats the same elements (strides [0, 1]); save it anew as `tensor.contiguous()`");
}
