//! Records in files of Parquet, which pyarrow wrote (`tests/goldens/parquet`).

use std::{fs, path::Path};

use super::Workplace;

const GOLDENS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/parquet");

/// A workplace with the files of some records in both formats.
fn place() -> Workplace {
    let place = Workplace::new();
    for name in [
        "texts.parquet",
        "texts.jsonl",
        "chats.parquet",
        "chats.jsonl",
    ] {
        let copied = fs::copy(Path::new(GOLDENS).join(name), place.path(name));
        copied.expect("a golden file and a writable folder");
    }
    place
}

#[cfg(not(feature = "parquet"))]
#[test]
fn a_build_without_the_feature_names_it() {
    let place = place();
    let refused = place.mistake("train merak.toml --data.format parquet --data.path texts.parquet");
    insta::assert_snapshot!(refused, @r#"error: "data.format" "parquet" (command line --data.format) is not in this build: build with --features parquet, or choose jsonl"#);
    let refused = place.mistake("train merak.toml --data.path texts.parquet");
    insta::assert_snapshot!(refused, @r#"error: cannot read texts.parquet as text: it is a Parquet file (offset 0): set "data.format" to "parquet" if it holds records, or set "data.skip_binary" to true to pass over such files ("data.path", command line --data.path)"#);
}

#[cfg(feature = "parquet")]
#[test]
fn rows_are_the_records_of_the_same_lines() {
    use super::families::losses;

    let place = place();
    place.write(
        "chat.jinja",
        "{% for message in messages %}{{ message.role[0] }}: {{ message.content }}\n{% endfor %}",
    );
    place.write("folder/notes.txt", "no rows");
    fs::copy(
        place.path("texts.parquet"),
        place.path("folder/texts.parquet"),
    )
    .expect("a folder");
    let trained = |name: &str, format: &str, keys: &str| {
        place.succeed(&format!(
            "train merak.toml --overwrite_output_dir --data.format {format} --data.path {name} {keys}"
        ));
        losses(&place)
    };
    let texts = trained("texts.jsonl", "jsonl", "");
    assert_eq!(trained("texts.parquet", "parquet", ""), texts);
    assert_eq!(trained("folder", "parquet", "--dp 1 --pp 2"), texts);
    let template = "--seq_length 32 --data.chat_template chat.jinja";
    let chats = trained("chats.jsonl", "jsonl", template);
    assert_eq!(trained("chats.parquet", "parquet", template), chats);
    for format in ["jsonl", "parquet"] {
        place.succeed(&format!(
            "tokenize merak.toml -o of-{format} --data.format {format} --data.path texts.{format}"
        ));
    }
    let ids = |folder: &str| {
        let bytes = fs::read(place.path(folder).join("data.tokens")).expect("tokens");
        bytes[64..].to_vec()
    };
    assert_eq!(ids("of-parquet"), ids("of-jsonl"));
}

#[cfg(feature = "parquet")]
#[test]
fn files_that_are_no_parquet_are_named() {
    let place = place();
    let whole = fs::read(place.path("texts.parquet")).expect("a file");
    fs::write(place.path("cut.parquet"), &whole[..whole.len() - 9]).expect("a writable folder");
    let refused = |keys: &str| {
        place.mistake(&format!(
            "train merak.toml --data.format parquet --data.path {keys}"
        ))
    };
    for (keys, words) in [
        ("cut.parquet", "cut.parquet:0: the row cannot be read: "),
        ("texts.jsonl", "texts.jsonl:0: the row cannot be read: "),
        (
            "text",
            "no records in text: parquet needs a row for each record",
        ),
        ("chats.parquet", "chats.parquet"),
        (
            "texts.parquet --data.skip_binary",
            "whose files are no text",
        ),
    ] {
        let message = refused(keys);
        assert!(message.contains(words), "{keys}: {message}");
    }
}
