//! Hostile manifests and headers, whose checksums are right, give errors that say what is wrong.

use crate::damage::{message, read_all, victim};
use merak_ckpt::{Checkpoint, Checksum, Error, Kind};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Changes the manifest and gives it a right checksum again, as a forger would.
fn forge(path: &Path, change: impl FnOnce(&mut Value)) {
    let file = path.join("manifest.json");
    let mut manifest: Value =
        serde_json::from_slice(&fs::read(&file).expect("it is there")).expect("it is JSON");
    manifest
        .as_object_mut()
        .expect("an object")
        .remove("checksum");
    change(&mut manifest);
    let text = manifest.to_string();
    sign(&file, &text[..text.len() - 1]);
}

fn sign(file: &Path, body: &str) {
    let body = format!("{body},\n");
    let checksum = Checksum::of(body.as_bytes());
    fs::write(file, format!("{body}\"checksum\": \"{checksum}\"\n}}\n"))
        .expect("it can be written");
}

/// A name and what is done to the manifest.
type Attack = (&'static str, fn(&mut Value));

const ATTACKS: &[Attack] = &[
    ("newer version", |m| m["version"] = json!(3)),
    ("older version", |m| m["version"] = json!(0)),
    ("no ranks", |m| m["topology"]["dp"] = json!(0)),
    ("no such stage", |m| m["topology"]["zero_stage"] = json!(9)),
    ("null for a cut", |m| m["tensors"][3]["cut"] = json!(null)),
    ("null for a range", |m| {
        m["tensors"][3]["slices"][0]["range"] = json!(null);
    }),
    ("box of too many dims", |m| {
        m["tensors"][3]["slices"][0]["size"] = json!(vec![1; 100_000]);
    }),
    ("other format", |m| m["format"] = json!("torch")),
    ("unknown field", |m| m["extra"] = json!(1)),
    ("negative step", |m| m["step"] = json!(-1)),
    ("fractional offset", |m| {
        m["tensors"][7]["slices"][0]["offset"][0] = json!(0.5);
    }),
    ("enormous shape", |m| {
        m["tensors"][3]["shape"] = json!([u64::MAX, u64::MAX]);
    }),
    ("too many dims", |m| {
        m["tensors"][3]["shape"] = json!(vec![1; 17]);
    }),
    ("shape of other ndim", |m| {
        m["tensors"][3]["shape"] = json!([48]);
    }),
    ("cut of a dim that is not there", |m| {
        m["tensors"][3]["cut"]["dim"] = json!(2);
    }),
    ("cut that overflows", |m| {
        m["tensors"][3]["cut"]["parts"] = json!([u64::MAX, 9]);
    }),
    ("cut into too many parts", |m| {
        m["tensors"][3]["cut"]["parts"] = json!(vec![0; 100_000]);
    }),
    ("box beyond the tensor", |m| {
        m["tensors"][3]["slices"][0]["offset"] = json!([1, 0]);
    }),
    ("box that overflows", |m| {
        m["tensors"][3]["slices"][0]["offset"] = json!([u64::MAX, 1]);
    }),
    ("slice twice", |m| {
        let slice = m["tensors"][7]["slices"][0].clone();
        m["tensors"][7]["slices"]
            .as_array_mut()
            .expect("a list")
            .push(slice);
    }),
    ("slice missing", |m| {
        m["tensors"][7]["slices"]
            .as_array_mut()
            .expect("a list")
            .pop();
    }),
    ("slices out of order", |m| {
        m["tensors"][7]["slices"]
            .as_array_mut()
            .expect("a list")
            .reverse();
    }),
    ("empty range", |m| {
        m["tensors"][7]["slices"][0]["range"] = json!([3, 3]);
    }),
    ("range beyond the box", |m| {
        m["tensors"][7]["slices"][0]["range"] = json!([0, u64::MAX]);
    }),
    ("range with a gap", |m| {
        m["tensors"][7]["slices"][0]["range"] = json!([1, 24]);
    }),
    ("range with a gap, right length", |m| {
        m["tensors"][7]["slices"][0]["range"] = json!([1, 24]);
        let begin = m["tensors"][7]["slices"][0]["bytes"][0]
            .as_u64()
            .expect("a number");
        m["tensors"][7]["slices"][0]["bytes"] = json!([begin, begin + 92]);
    }),
    ("bytes beyond the file", |m| {
        m["tensors"][7]["slices"][0]["bytes"] = json!([1_000_000, 1_000_096]);
    }),
    ("bytes backwards", |m| {
        m["tensors"][7]["slices"][0]["bytes"] = json!([96, 0]);
    }),
    ("bytes of another length", |m| {
        m["tensors"][7]["slices"][0]["bytes"] = json!([64, 72]);
    }),
    ("bytes of another slice", |m| {
        m["tensors"][7]["slices"][1]["bytes"] = m["tensors"][7]["slices"][0]["bytes"].clone();
        m["tensors"][7]["slices"][1]["file"] = m["tensors"][7]["slices"][0]["file"].clone();
    }),
    ("unlisted file", |m| {
        m["tensors"][7]["slices"][0]["file"] = json!("model-00009.safetensors");
    }),
    ("slice in config.json", |m| {
        m["tensors"][7]["slices"][0]["file"] = json!("config.json");
    }),
    ("parent folder", |m| {
        m["files"][0]["name"] = json!("../config.json");
    }),
    ("absolute path", |m| {
        m["files"][0]["name"] = json!("/etc/passwd");
    }),
    ("absurd length", |m| {
        m["files"][0]["length"] = json!(u64::MAX);
    }),
    ("absurd lengths of files without tensors", |m| {
        for at in [0, 1] {
            m["files"][at] = m["files"][0].clone();
            m["files"][at]["name"] = json!(["a.json", "b.json"][at]);
            m["files"][at]["length"] = json!(1_u64 << 63);
        }
    }),
    ("file twice", |m| m["files"][1] = m["files"][0].clone()),
    ("tensor twice", |m| {
        m["tensors"][1] = m["tensors"][0].clone();
    }),
    ("unknown kind", |m| {
        m["tensors"][0]["kind"] = json!("Exp Avg");
    }),
    ("unknown type", |m| m["tensors"][0]["dtype"] = json!("f8")),
    ("name with a bracket", |m| {
        m["tensors"][0]["name"] = json!("a[0:1]");
    }),
    ("state that takes much more memory than its text", |m| {
        m["state"] = json!(vec![0; 600_000]);
    }),
    ("short checksum", |m| {
        m["tensors"][7]["slices"][0]["checksum"] = json!("12ab");
    }),
];

#[test]
fn forged_manifests_are_refused() {
    let (folder, path) = victim();
    let good = fs::read(path.join("manifest.json")).unwrap();
    let mut messages = Vec::new();
    for (name, attack) in ATTACKS {
        fs::write(path.join("manifest.json"), &good).unwrap();
        forge(&path, attack);
        let message = message(read_all(&path), folder.path());
        let start = message.find("damaged: ").map_or(0, |at| at + 9);
        let short = message[start..]
            .trim_end_matches("; the newest complete older one is OUT/step-00000001");
        messages.push(format!("{name}: {short}"));
    }
    insta::assert_snapshot!(messages.join("\n"), @"
    newer version: OUT/step-00000002/manifest.json has format version 3, this program reads versions up to 2
    older version: manifest.json: the version is 0, expected 1 or more
    no ranks: manifest.json: the topology is dp=0 tp=2 pp=1 sp=1 zero_stage=0, expected degrees from 1 on and a stage of 0 to 3
    no such stage: manifest.json: the topology is dp=1 tp=2 pp=1 sp=1 zero_stage=9, expected degrees from 1 on and a stage of 0 to 3
    null for a cut: manifest.json: invalid type: null, expected struct Cut at line 1 column 2485
    null for a range: manifest.json: invalid type: null, expected an array of length 2 at line 1 column 2637
    box of too many dims: manifest.json, tensor `h.0.mlp.c_proj.weight`: 100000 dims, the limit is 16
    other format: manifest.json: the format is `torch`, expected `merak-checkpoint`
    unknown field: manifest.json: unknown field `extra`, expected one of `format`, `version`, `step`, `topology`, `model`, `state`, `base`, `files`, `tensors`, `checksum` at line 1 column 10022
    negative step: manifest.json: invalid value: integer `-1`, expected u64 at line 1 column 50
    fractional offset: manifest.json: invalid type: floating point `0.5`, expected usize at line 1 column 3587
    enormous shape: manifest.json, tensor `h.0.mlp.c_proj.weight`: shape [18446744073709551615, 18446744073709551615] is too large
    too many dims: manifest.json, tensor `h.0.mlp.c_proj.weight`: 17 dims, the limit is 16
    shape of other ndim: manifest.json, tensor `h.0.mlp.c_proj.weight`: box [0:4,0:6] is out of bounds of shape [48]
    cut of a dim that is not there: manifest.json, tensor `h.0.mlp.c_proj.weight`: cut of dim 2 as 8, but it has no dim 2
    cut that overflows: manifest.json, tensor `h.0.mlp.c_proj.weight`: cut of dim 0 as 18446744073709551615+9, expected at most 64 parts with the sum 8
    cut into too many parts: manifest.json, tensor `h.0.mlp.c_proj.weight`: cut of dim 0 as 0+0+0+0+.., expected at most 64 parts with the sum 8
    box beyond the tensor: manifest.json, tensor `h.0.mlp.c_proj.weight`: slices [1:5,0:6] and [4:8,0:6] overlap
    box that overflows: manifest.json, tensor `h.0.mlp.c_proj.weight`: box [18446744073709551615:18446744073709551615,1:7] is out of bounds of shape [8, 6]
    slice twice: manifest.json, tensor `wte.weight`: slices are not in order
    slice missing: manifest.json, tensor `wte.weight`: the slices hold 24 of 48 elements
    slices out of order: manifest.json, tensor `wte.weight`: slices are not in order
    empty range: manifest.json, tensor `wte.weight`: range 3..3 is no proper part of box [0:4,0:6]
    range beyond the box: manifest.json, tensor `wte.weight`: range 0..18446744073709551615 is no proper part of box [0:4,0:6]
    range with a gap: manifest.json, tensor `wte.weight`: bytes 1612..1708 do not hold 92 bytes of model-00000.safetensors (1708 bytes)
    range with a gap, right length: manifest.json, tensor `wte.weight`: elements 0..1 of box [0:4,0:6] are in no slice
    bytes beyond the file: manifest.json, tensor `wte.weight`: bytes 1000000..1000096 do not hold 96 bytes of model-00000.safetensors (1708 bytes)
    bytes backwards: manifest.json, tensor `wte.weight`: bytes 96..0 do not hold 96 bytes of model-00000.safetensors (1708 bytes)
    bytes of another length: manifest.json, tensor `wte.weight`: bytes 64..72 do not hold 96 bytes of model-00000.safetensors (1708 bytes)
    bytes of another slice: model-00000.safetensors, tensor `wte.weight`: slices 1612..1708 and 1612..1708 overlap
    unlisted file: manifest.json, tensor `wte.weight`: `model-00009.safetensors` is no tensor file of the checkpoint
    slice in config.json: manifest.json, tensor `wte.weight`: `config.json` is no tensor file of the checkpoint
    parent folder: manifest.json: invalid file name `../config.json`: expected 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`, not starting with a dot, other than manifest.json
    absolute path: manifest.json: invalid file name `/etc/passwd`: expected 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`, not starting with a dot, other than manifest.json
    absurd length: manifest.json: with the 1708 bytes of `model-00000.safetensors`, the files have more than 2^64 - 1
    absurd lengths of files without tensors: manifest.json: with the 9223372036854775808 bytes of `b.json`, the files have more than 2^64 - 1
    file twice: config.json: files are not in order, or not unique
    tensor twice: manifest.json, tensor `empty`: tensors are not in order, or not unique
    unknown kind: manifest.json: `Exp Avg` is no kind of tensor at line 1 column 767
    unknown type: manifest.json: unknown variant `f8`, expected one of `f64`, `f32`, `bf16`, `f16`, `i64`, `i32`, `i16`, `i8`, `u64`, `u32`, `u16`, `u8`, `bool` at line 1 column 797
    name with a bracket: manifest.json, tensor `a[0:1]`: invalid tensor name `a[0:1]`: expected 1 to 1024 bytes without control characters, `[`, `#` and `/`
    state that takes much more memory than its text: manifest.json: 1200001 bytes of `state`, the limit is 1048576
    short checksum: manifest.json: checksum `12ab` is not 16 hexadecimal digits at line 1 column 3673
    ");
}

#[test]
fn texts_that_are_no_manifest_are_refused() {
    let (_folder, path) = victim();
    let file = path.join("manifest.json");
    let deep = format!("{{\"format\": {}", "[".repeat(100_000));
    let texts: [&[u8]; 6] = [b"", b"{}", b"[1, 2", b"\xff\xfe", b"null", deep.as_bytes()];
    for text in texts {
        fs::write(&file, text).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        assert!(
            matches!(&error, Error::Damaged { damage, .. } if damage.file == "manifest.json"),
            "{error}"
        );
    }
    let sparse = fs::File::create(&file).unwrap();
    sparse.set_len(1 << 40).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("1.00 TiB, the limit is 256 MiB"), "{error}");
}

/// A name and what is done to the file.
type FileAttack = (&'static str, fn(&mut Vec<u8>));

/// Changes a file and enters its new length and checksum in the manifest.
fn forge_file(path: &Path, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path.join(name)).expect("it is there");
    change(&mut bytes);
    fs::write(path.join(name), &bytes).expect("it can be written");
    forge(path, |manifest| {
        let files = manifest["files"].as_array_mut().expect("a list");
        let entry = files
            .iter_mut()
            .find(|entry| entry["name"] == name)
            .expect("it is listed");
        entry["length"] = json!(bytes.len());
        entry["checksum"] = json!(Checksum::of(&bytes));
    });
}

#[test]
fn headers_that_contradict_the_manifest_are_found() {
    let attacks: [FileAttack; 5] = [
        ("absurd header length", |bytes| bytes[7] = 0x7F),
        ("no JSON", |bytes| bytes[8] = b'!'),
        ("other name", |bytes| {
            let at = bytes
                .windows(3)
                .position(|w| w == b"wte")
                .expect("it is named");
            bytes[at] = b'x';
        }),
        ("other type", |bytes| {
            let at = bytes
                .windows(3)
                .position(|w| w == b"F32")
                .expect("it is typed");
            bytes[at] = b'I';
        }),
        ("other offsets", |bytes| {
            let at = bytes
                .windows(3)
                .position(|w| w == b"[0,")
                .expect("it begins");
            bytes[at + 1] = b'1';
        }),
    ];
    let mut messages = Vec::new();
    for (name, attack) in attacks {
        let (_folder, path) = victim();
        forge_file(&path, "model-00000.safetensors", attack);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let report = checkpoint.verify();
        assert_eq!(report.damage.len(), 1, "{name}");
        // Loading says the same.
        let error = checkpoint
            .read_whole(&Kind::Parameter, "wte.weight")
            .unwrap_err();
        let found = report.damage[0].to_string();
        assert!(error.to_string().contains(&found), "{error}");
        messages.push(format!("{name}: {}", report.damage[0]));
    }
    let (_folder, path) = victim();
    forge_file(&path, "model-00000.safetensors", |bytes| {
        bytes.extend([0; 8]);
    });
    let report = Checkpoint::open(&path).unwrap().verify();
    messages.push(format!("longer: {}", report.damage[0]));
    insta::assert_snapshot!(messages.join("\n"), @"
    absurd header length: model-00000.safetensors: the header's length is 9151314442816848824
    no JSON: model-00000.safetensors: the header is wrong: expected value at line 1 column 1
    other name: model-00000.safetensors: the header and the manifest differ about `wte.weight[0:4,0:6]`
    other type: model-00000.safetensors: the header and the manifest differ about `h.0.attn.c_attn.bias[0:4]`
    other offsets: model-00000.safetensors: the header is wrong: invalid offset for tensor `h.0.attn.c_attn.bias[0:4]`
    longer: model-00000.safetensors: the file has bytes that belong to no tensor
    ");
}

/// Replaces the `nth` number of a text.
fn replace_number(text: &str, nth: usize, number: &str) -> String {
    let is_digit = |b: &u8| b.is_ascii_digit();
    let bytes = text.as_bytes();
    let starts: Vec<usize> = (1..bytes.len())
        .filter(|&at| is_digit(&bytes[at]) && !bytes[at - 1].is_ascii_alphanumeric())
        .collect();
    let start = starts[nth % starts.len()];
    let length = bytes[start..].iter().take_while(|&b| is_digit(b)).count();
    [&text[..start], number, &text[start + length..]].concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn any_forged_manifest_gives_an_answer(
        numbers in prop::collection::vec((0_usize..2000, 0_usize..8), 0..3),
        line in 0_usize..200,
        line_change in 0_usize..3,
    ) {
        let (_folder, path) = FORGED.get_or_init(victim);
        let file = path.join("manifest.json");
        let good = GOOD.get_or_init(|| fs::read_to_string(&file).expect("it is there"));
        let mut body = good[..good.rfind(",\n\"checksum\"").expect("it is signed")].to_owned();
        for (nth, extreme) in numbers {
            let extremes = ["0", "1", "2", "17", "2147483648", "9223372036854775807", "18446744073709551615", "[]"];
            body = replace_number(&body, nth, extremes[extreme]);
        }
        let mut lines: Vec<&str> = body.lines().collect();
        let line = line % lines.len();
        match line_change {
            0 => {}
            1 => drop(lines.remove(line)),
            _ => lines.insert(line, lines[line]),
        }
        sign(&file, &lines.join("\n"));
        // Either way it must come to an end without a panic; what opens is sound.
        if let Ok(checkpoint) = Checkpoint::open(path) {
            let report = checkpoint.verify();
            for tensor in &checkpoint.manifest().tensors {
                let read = checkpoint.read_whole(&tensor.kind, &tensor.name);
                prop_assert!(read.is_ok() || !report.damage.is_empty());
            }
        }
    }
}

static FORGED: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
static GOOD: OnceLock<String> = OnceLock::new();

#[test]
fn shapes_without_elements_may_have_enormous_dims() {
    let (_folder, path) = victim();
    forge(&path, |manifest| {
        let empty = &mut manifest["tensors"][0];
        assert_eq!(empty["name"], "empty");
        empty["shape"] = json!([u64::MAX, u64::MAX, 0]);
    });
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert!(
        checkpoint
            .read_whole(&Kind::Parameter, "empty")
            .unwrap()
            .is_empty()
    );
    assert!(checkpoint.verify().damage.is_empty());
}
