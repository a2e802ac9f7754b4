//! Several paths, mixtures with weights, and data to validate on.

use std::fs;

use super::{
    Workplace,
    families::{assert_close, losses, trained},
    text,
};

/// A workplace with two texts and jsonl of two kinds of words.
fn place() -> Workplace {
    let place = Workplace::new();
    place.write("b.txt", &text().replace("rank", "node").repeat(2));
    place.write("held/c.txt", &text().replace("peer", "pier"));
    let config = fs::read_to_string(place.path("merak.toml")).expect("a configuration");
    place.write("merak.toml", &config.replace("path = \"text\"\n", ""));
    place
}

const MIXTURE: &str =
    "mixture = [{ path = \"text\", weight = 3 }, { path = \"b.txt\", weight = 1 }]";

/// Adds lines to the section of the data.
fn with_data(place: &Workplace, lines: &str) {
    let config = fs::read_to_string(place.path("merak.toml")).expect("a configuration");
    place.write(
        "merak.toml",
        &config.replace("[data]\n", &format!("[data]\n{lines}\n")),
    );
}

#[test]
fn a_mixture_is_the_same_on_every_topology_and_after_a_resume() {
    let place = place();
    with_data(&place, &format!("{MIXTURE}\nvalidation_path = \"held\""));
    let keys = "--max_steps 8 --save_steps 4 --dp";
    let alone = trained(&place, &format!("{keys} 1"));
    assert_eq!(alone.len(), 8);
    let evaluated = place.document("evaluate merak.toml run --json");
    let shared = trained(&place, &format!("{keys} 2 --gradient_accumulation_steps 2"));
    assert_close(&shared, &alone, 1e-4, "dp 2");
    assert_eq!(trained(&place, &format!("{keys} 1 --pp 2")), alone);
    place.succeed("train merak.toml --max_steps 8 --resume run/checkpoints/step-00000004");
    assert_eq!(losses(&place)[4..], alone[4..]);
    // Evaluation takes the data for it alone.
    let samples = evaluated["eval_samples"].as_u64();
    let tokens = fs::metadata(place.path("held/c.txt"))
        .expect("a file")
        .len();
    assert_eq!(samples, Some(tokens / 16));
    // Other weights are other data.
    let other = trained(
        &place,
        "--max_steps 8 --data.mixture [{\"path\":\"text\",\"weight\":1},{\"path\":\"b.txt\",\"weight\":9}]",
    );
    assert_ne!(other, alone);
}

#[test]
fn a_prediction_takes_the_parts_of_a_mixture_in_turn_and_each_sample_once() {
    let place = place();
    place.succeed("train merak.toml --max_steps 1 --data.path text");
    let predicted = |keys: &str| {
        place.succeed(&format!("predict merak.toml run -o lines {keys}"));
        let lines = fs::read_to_string(place.path("lines")).expect("lines");
        let lines = lines
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        lines.collect::<Vec<serde_json::Value>>()
    };
    let parts = ["text", "b.txt"].map(|path| predicted(&format!("--data.path {path}")));
    let mut expected = parts.concat();
    for (number, line) in expected.iter_mut().enumerate() {
        line["sample"] = number.into();
    }
    with_data(&place, &MIXTURE.replace("weight = 3", "weight = 40"));
    assert_eq!(predicted(""), expected);
}

#[test]
fn a_list_of_paths_is_one_text() {
    let place = place();
    place.write("all/a.txt", &text());
    place.write("all/b.txt", &text().replace("rank", "node").repeat(2));
    let whole = trained(&place, "--data.path all");
    let listed = trained(&place, "--data.path [\"all/a.txt\",\"all/b.txt\"]");
    let commas = trained(&place, "--data.path all/a.txt,all/b.txt");
    assert_eq!(listed, commas);
    assert_eq!(listed, whole);
    let parts = place.succeed(
        "train merak.toml --dry-run --overwrite_output_dir --data.path [\"text\",\"b.txt\"]",
    );
    assert!(parts.contains("data      text, b.txt: 2 files"), "{parts}");
}

#[test]
fn wrong_mixtures_and_paths_are_refused_by_their_key() {
    let place = place();
    let refused = |keys: &str, words: &[&str]| {
        let message = place.mistake(&format!("train merak.toml {keys}"));
        for word in words {
            assert!(message.contains(word), "{keys}: {message} without {word}");
        }
    };
    place.write("empty.txt", "");
    let text = "{\"path\":\"text\",\"weight\":1}";
    refused(
        &format!("--data.path text --data.mixture [{text}]"),
        &[
            "\"data.mixture\" is a list of 1",
            "must be unset while \"data.path\"",
        ],
    );
    refused(
        "--data.mixture [{\"path\":\"text\",\"weight\":0}]",
        &["data.mixture", "weight", "a number of more than 0"],
    );
    refused(
        "--data.mixture [{\"path\":\"text\",\"wieght\":1}]",
        &["data.mixture", "path or weight"],
    );
    refused(
        "--data.mixture text=0.7,b.txt=0.3",
        &[
            "found \"text=0.7,b.txt=0.3\"",
            r#"outside of a file [{"path":"a.txt","weight":0.7}]"#,
        ],
    );
    refused(
        "--data.mixture [{\"path\":\"none.txt\",\"weight\":1}]",
        &["cannot read none.txt", "data.mixture"],
    );
    refused(
        &format!("--data.mixture [{text},{{\"path\":\"b.txt\",\"weight\":1e-9}}]"),
        &["part 2 of the mixture", "a larger weight"],
    );
    refused(
        "--data.path text --data.validation_path nowhere",
        &["cannot read nowhere", "data.validation_path"],
    );
    refused(
        "--data.path text --data.validation_path empty.txt",
        &["no text in empty.txt", "data.validation_path"],
    );
    refused(
        "--data.path [\"text\",\"empty.txt\"]",
        &["no text in empty.txt"],
    );
    refused(
        "--data.path text --data.validation_path held --data.validation_fraction 0.5",
        &[
            "\"data.validation_fraction\" is 0.5",
            "unset while \"data.validation_path\"",
        ],
    );
}

#[test]
fn commands_do_not_write_over_what_they_read() {
    let place = place();
    with_data(&place, "path = \"b.txt\"");
    place.succeed("train merak.toml --max_steps 1");
    std::os::unix::fs::symlink("b.txt", place.path("link")).expect("a link");
    let files = || super::files(&place.path("."));
    let before = files();
    for (line, named_by) in [
        ("predict merak.toml run -o b.txt", "\"data.path\""),
        ("predict merak.toml run -o link", "\"data.path\""),
        ("predict merak.toml run -o merak.toml", "CONFIG"),
        (
            "predict merak.toml run -o run/checkpoints/latest",
            "CHECKPOINT",
        ),
        ("predict merak.toml run -o run/metrics.jsonl", "CHECKPOINT"),
        ("plan merak.toml --html merak.toml", "CONFIG"),
        ("plan merak.toml --html model.json", "\"model.config\""),
    ] {
        let told = place.mistake(line);
        let advice = format!("which {named_by} names: name another file");
        assert!(told.ends_with(&advice), "{line}: {told}");
        assert!(files() == before, "{line}");
    }
    // Files of others are replaced, those of an earlier call among them.
    for _ in 0..2 {
        place.succeed("predict merak.toml run -o run/lines.jsonl");
        place.succeed("plan merak.toml --html page.html");
    }
    let told = place.mistake("plan merak.toml --html none/page.html");
    assert!(told.contains("which --html names"), "{told}");
}

#[test]
fn an_output_folder_within_the_data_is_refused() {
    let place = place();
    for line in [
        "train merak.toml --data.path held --output_dir held/a/run",
        "train merak.toml --data.path held --output_dir held/a/run --dry-run",
        "tokenize merak.toml --data.path held -o held/tokens",
    ] {
        let told = place.mistake(line);
        assert!(
            told.contains("its files would be read as data"),
            "{line}: {told}"
        );
        assert_eq!(super::files(&place.path("held")).len(), 1, "{line}");
    }
}
