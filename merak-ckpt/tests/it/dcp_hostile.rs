//! Indexes of torch.distributed.checkpoint that are made to cost time and memory.

use merak_ckpt::{Checkpoint, Error, ImportOptions, import_dcp};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

const MODULE: &str = "torch.distributed.checkpoint.metadata";
/// Upper bound on the time of each case, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(20);

fn text(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).expect("a short text");
    [&b"X"[..], &length.to_le_bytes(), text.as_bytes()].concat()
}

fn number(number: u64) -> Vec<u8> {
    [&b"\x8a\x08"[..], &number.to_le_bytes()].concat()
}

fn list(items: &[Vec<u8>]) -> Vec<u8> {
    [&b"]("[..], &items.concat()[..], b"e"].concat()
}

fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [&b"("[..], &items.concat()[..], b"t"].concat()
}

fn dict(entries: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let entries: Vec<_> = entries
        .iter()
        .map(|(key, value)| [&key[..], value].concat())
        .collect();
    [&b"}("[..], &entries.concat()[..], b"u"].concat()
}

fn object(module: &str, class: &str, state: &[u8]) -> Vec<u8> {
    [
        format!("c{module}\n{class}\n)").as_bytes(),
        b"\x81",
        state,
        b"b",
    ]
    .concat()
}

fn fields(fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let fields: Vec<_> = fields
        .iter()
        .map(|(name, value)| (text(name), value.clone()))
        .collect();
    dict(&fields)
}

/// A value that the pickle stores under a number, and the opcode that recalls it.
fn remembered(number: u8, value: &[u8]) -> Vec<u8> {
    [value, b"q", &[number]].concat()
}

fn recalled(number: u8) -> Vec<u8> {
    vec![b'h', number]
}

fn key(name: &str, offset: Option<u64>) -> Vec<u8> {
    let offset = offset.map_or(b"N".to_vec(), |offset| tuple(&[number(offset)]));
    object(
        MODULE,
        "MetadataIndex",
        &fields(&[("fqn", text(name)), ("offset", offset)]),
    )
}

fn place(stretch: &Range<u64>) -> Vec<u8> {
    let attributes = [
        ("relative_path", text("__0_0.distcp")),
        ("offset", number(stretch.start)),
        ("length", number(stretch.end - stretch.start)),
    ];
    object(
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo",
        &fields(&attributes),
    )
}

/// A tensor of one dim and one element type, in boxes from these offsets on.
fn tensor(size: u64, boxes: &[u64]) -> Vec<u8> {
    let chunk = |&offset: &u64| {
        let attributes = [
            ("offsets", tuple(&[number(offset)])),
            ("sizes", tuple(&[number(1)])),
        ];
        object(MODULE, "ChunkStorageMetadata", &fields(&attributes))
    };
    let chunks: Vec<_> = boxes.iter().map(chunk).collect();
    let properties = tuple(&[b"ctorch\nfloat32\n".to_vec()]);
    let attributes = [
        (
            "properties",
            object(MODULE, "TensorProperties", &properties),
        ),
        ("size", tuple(&[number(size)])),
        ("chunks", list(&chunks)),
    ];
    object(MODULE, "TensorStorageMetadata", &fields(&attributes))
}

fn value() -> Vec<u8> {
    object(MODULE, "BytesStorageMetadata", &dict(&[]))
}

/// An index of these items and places.
fn index(items: &[(Vec<u8>, Vec<u8>)], places: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let attributes = [
        ("state_dict_metadata", dict(items)),
        ("storage_data", dict(places)),
    ];
    let metadata = object(MODULE, "Metadata", &fields(&attributes));
    [&b"\x80\x02"[..], &metadata[..], b"."].concat()
}

/// A zip archive of members that are not compressed.
fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    let word = |number: usize| u32::try_from(number).expect("a small file").to_le_bytes();
    for (name, content) in members {
        let at = file.len();
        // From the method on: no compression, no time, checksum, sizes, lengths of name and extra.
        let checksum = crc32fast::hash(content).to_le_bytes();
        let size = word(content.len());
        let length = word(name.len());
        let what = [&[0; 6][..], &checksum, &size, &size, &length[..2], &[0; 2]].concat();
        file.extend(
            [
                &b"PK\x03\x04\x14\0\0\0"[..],
                &what,
                name.as_bytes(),
                content,
            ]
            .concat(),
        );
        let entry = [
            &b"PK\x01\x02\x14\0\x14\0\0\0"[..],
            &what,
            &[0; 10],
            &word(at),
            name.as_bytes(),
        ];
        directory.extend(entry.concat());
    }
    let count = u8::try_from(members.len()).expect("a few members");
    let counts = [0, 0, 0, 0, count, 0, count, 0];
    let end = [
        &b"PK\x05\x06"[..],
        &counts,
        &word(directory.len()),
        &word(file.len()),
        &[0; 2],
    ];
    [&file[..], &directory, &end.concat()].concat()
}

/// What `torch.save` writes of a tensor of one element.
fn saved_tensor() -> Vec<u8> {
    let table = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ\
        K\0K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR.";
    zip(&[("a/data.pkl", table), ("a/data/0", &1.0_f32.to_le_bytes())])
}

/// Imports a folder of one file and an index.
fn import(folder: &Path, items: &[u8], index: &[u8]) -> Result<Checkpoint, Error> {
    fs::write(folder.join("__0_0.distcp"), items).expect("it can be written");
    fs::write(folder.join(".metadata"), index).expect("it can be written");
    let config = folder.join("config.json");
    fs::write(&config, r#"{"model_type": "unknown"}"#).expect("it can be written");
    let options = ImportOptions::default();
    let begun = Instant::now();
    let outcome = import_dcp(folder, folder.join("to"), config, "", &options);
    assert!(begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
    outcome.and_then(Checkpoint::open)
}

fn refusal(items: &[u8], index: &[u8]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let error = import(folder.path(), items, index).expect_err("it is refused");
    assert!(error.is_user_error(), "{error}");
    error
        .to_string()
        .replace(&folder.path().display().to_string(), "DCP")
}

#[test]
fn a_stretch_that_many_names_stand_for_is_read_once() {
    let tensor_item = saved_tensor();
    // A table that pushes eight million values and takes them off, for a number.
    let table = [
        &b"\x80\x02"[..],
        &b"N0".repeat(4 << 20),
        b"G\x3f\xd0\0\0\0\0\0\0.",
    ]
    .concat();
    let slow = zip(&[("a/data.pkl", &table)]);
    let [first, second] = [0, tensor_item.len()].map(|at| at as u64);
    let places = [first..second, second..second + slow.len() as u64].map(|range| place(&range));
    let names: Vec<_> = (0..2000)
        .map(|nth| format!("param_groups.0.field_{nth}"))
        .collect();
    let twins = ["weight", "state.weight.exp_avg"].map(|name| (text(name), tensor(1, &[0])));
    let step = "state.weight.step".to_owned();
    let names: Vec<_> = names.into_iter().chain([step]).collect();
    let mut items = twins.to_vec();
    items.extend(names.iter().map(|name| (text(name), value())));
    let mut all = vec![
        (key("weight", Some(0)), places[0].clone()),
        (key("state.weight.exp_avg", Some(0)), places[0].clone()),
    ];
    all.extend(
        names
            .iter()
            .map(|name| (key(name, None), places[1].clone())),
    );
    // The step is an item of its own.
    let count = zip(&[("a/data.pkl", b"\x80\x02K\x03.")]);
    let at = (tensor_item.len() + slow.len()) as u64;
    all.last_mut().expect("there are some").1 = place(&(at..at + count.len() as u64));
    let file = [tensor_item, slow, count].concat();
    let folder = tempfile::tempdir().unwrap();
    let imported = import(folder.path(), &file, &index(&items, &all)).unwrap();
    let header = &imported.manifest().header;
    let group = &header.state["imported"]["param_groups"]["0"];
    assert_eq!(group.as_object().map(serde_json::Map::len), Some(2000));
    assert_eq!((&group["field_1999"], header.step), (&0.25.into(), 3));
    for kind in imported.manifest().kinds() {
        assert_eq!(
            imported.read_whole(kind, "weight").unwrap(),
            1.0_f32.to_le_bytes()
        );
    }
}

#[test]
fn items_that_overlap_and_boxes_that_come_again_are_refused() {
    let item = saved_tensor();
    let whole = 0..item.len() as u64;
    let weight = (text("weight"), tensor(1, &[0]));
    let at = (key("weight", Some(0)), place(&whole));
    let inner = (key("param_groups.0.lr", None), place(&(1..whole.end)));
    let overlap = index(
        &[weight.clone(), (text("param_groups.0.lr"), value())],
        &[at.clone(), inner],
    );
    let again = index(
        &[(text("weight"), tensor(2, &[0, 0]))],
        std::slice::from_ref(&at),
    );
    let twice = index(&[weight.clone(), weight], &[at]);
    let messages = [overlap, again, twice].map(|index| refusal(&item, &index));
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read DCP/.metadata: the items at the bytes 0 and 1 of __0_0.distcp overlap
    cannot read DCP/.metadata: tensor `weight` has two chunks from [0] on
    cannot read DCP/.metadata: `weight` is there twice
    ");
}

#[test]
fn what_an_index_names_again_and_again_takes_no_time_again() {
    let item = saved_tensor();
    let stretch = 0..item.len() as u64;
    // A place with 250,000 attributes, for 100,000 items; the one that is asked for is the first.
    let wide = [
        &b"}("[..],
        &text("relative_path"),
        &text("__0_0.distcp"),
        &b"NN".repeat(1 << 18),
        b"u",
    ]
    .concat();
    let wide = object(
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo",
        &wide,
    );
    let mut places = vec![(key("k0", None), remembered(0, &wide))];
    places.extend((1..100_000).map(|nth| (key(&format!("k{nth}"), None), recalled(0))));
    // A name of 4 MiB, for 100,000 boxes.
    let long = "n".repeat(4 << 20);
    let first = fields(&[
        ("fqn", remembered(1, &text(&long))),
        ("offset", tuple(&[number(0)])),
    ]);
    let mut named = vec![(
        object(MODULE, "MetadataIndex", &first),
        remembered(2, &place(&stretch)),
    )];
    named.extend((1..100_000).map(|nth| {
        let attributes = fields(&[("fqn", recalled(1)), ("offset", tuple(&[number(nth)]))]);
        (object(MODULE, "MetadataIndex", &attributes), recalled(2))
    }));
    // A tensor with 4,000 boxes at two places, for 10,000 names.
    let boxes: Vec<_> = (0..4000).map(|nth| nth % 2).collect();
    let mut tensors = vec![(text("t0"), remembered(3, &tensor(2, &boxes)))];
    tensors.extend((1..10_000).map(|nth| (text(&format!("t{nth}")), recalled(3))));
    let boxed = (0..10_000).flat_map(|nth| [0, 1].map(|offset| (format!("t{nth}"), offset)));
    let boxed: Vec<_> = boxed
        .map(|(name, at)| (key(&name, Some(at)), place(&stretch)))
        .collect();
    let indexes = [
        index(&[], &places),
        index(&[], &named),
        index(&tensors, &boxed),
    ];
    let messages = indexes.map(|index| refusal(&item, &index));
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read DCP/.metadata: an item has no file
    cannot read DCP/.metadata: an item has no name
    cannot read DCP/.metadata: tensor `t0` has two chunks from [0] on
    ");
}
