//! What a run leaves for people: event files, the table and the trace of its instructions, the
//! page.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use serde_json::Value;

use super::Workplace;

/// Checksum and mask as the format describes them, bit by bit.
fn masked_checksum(bytes: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            let carry = sum & 1;
            sum = (sum >> 1) ^ (0x82f6_3b78 * carry);
        }
    }
    (!sum).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The messages of a file of records, whose checksums must be right.
fn messages(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let sum = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().expect("4 bytes"));
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        assert_eq!(sum(&bytes[8..]), masked_checksum(&bytes[..8]));
        let message = &bytes[12..12 + length];
        assert_eq!(sum(&bytes[12 + length..]), masked_checksum(message));
        found.push(message.to_vec());
        bytes = &bytes[16 + length..];
    }
    found
}

/// The fields of a message: numbers as they are, bytes of strings and messages.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, Vec<u8>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let (first, rest) = bytes.split_first().expect("a byte");
            *bytes = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                break;
            }
        }
        value
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => {
                found.push((key >> 3, varint(&mut bytes), Vec::new()));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            wire_type => {
                assert_eq!(wire_type, 5, "a type that event files have");
                4
            }
        };
        found.push((key >> 3, 0, bytes[..length].to_vec()));
        bytes = &bytes[length..];
    }
    found
}

/// The scalars of a folder's event files by tag, as TensorBoard shows them: a restart at a step
/// takes that step and later ones out of what came before.
fn scalars(folder: &Path) -> BTreeMap<String, Vec<(u64, f32)>> {
    let entries = fs::read_dir(folder).expect("a folder of event files");
    let paths: BTreeSet<_> = entries.map(|entry| entry.expect("a file").path()).collect();
    let mut found: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for (n, message) in paths.iter().flat_map(|path| {
        messages(&fs::read(path).expect("a file"))
            .into_iter()
            .enumerate()
    }) {
        let event = fields(&message);
        let of = |field| event.iter().find(|(number, ..)| *number == field);
        let (_, step, _) = of(2).expect("a step");
        assert_eq!(of(1).expect("a time").2.len(), 8);
        if let Some((.., version)) = of(3) {
            assert_eq!((n, &version[..]), (0, &b"brain.Event:2"[..]));
        }
        if let Some((.., log)) = of(7) {
            assert_eq!(fields(log), [(1, 1, Vec::new())]);
            for points in found.values_mut() {
                points.retain(|(earlier, _)| earlier < step);
            }
        }
        for (_, _, summary) in event.iter().filter(|(number, ..)| *number == 5) {
            for (_, _, value) in fields(summary) {
                let value = fields(&value);
                let tag = String::from_utf8(value[0].2.clone()).expect("a tag");
                let number = value[1].2[..].try_into().expect("4 bytes");
                found
                    .entry(tag)
                    .or_default()
                    .push((*step, f32::from_le_bytes(number)));
            }
        }
    }
    found
}

/// A field of the records, as event files have it.
fn recorded(place: &Workplace, field: &str) -> Vec<(u64, f32)> {
    let text = fs::read_to_string(place.path("run/metrics.jsonl")).expect("records");
    let records = text.lines().map(serde_json::from_str::<Value>);
    let point = |record: serde_json::Result<Value>| {
        let record = record.expect("a record");
        Some((record["step"].as_u64()?, record[field].as_f64()? as f32))
    };
    records.filter_map(point).collect()
}

/// What TensorBoard's own reader finds, where a Python with it is named.
fn by_tensorboard(folder: &Path) -> Option<BTreeMap<String, Vec<(u64, f32)>>> {
    let python = std::env::var_os("TEST_TENSORBOARD")?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/read_events.py");
    let output = Command::new(python).arg(script).arg(folder).output();
    let output = output.expect("Python starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(serde_json::from_slice(&output.stdout).expect("a document"))
}

#[test]
fn event_files_have_the_series_of_the_records_also_in_a_resumed_run() {
    let place = Workplace::new();
    let line = "train merak.toml --report_to tensorboard --do_eval --eval_steps 4 --save_steps 5 --max_steps 8";
    place.succeed(line);
    fs::remove_dir_all(place.path("run/checkpoints/step-00000008")).expect("a removable folder");
    place.succeed(&format!("{line} --resume auto"));
    let folder = place.path("run/tensorboard");
    let found = scalars(&folder);
    for (tag, field) in [
        ("Train/loss", "loss"),
        ("Train/learning_rate", "lr"),
        ("Train/grad_norm", "grad_norm"),
        ("Train/tokens_per_s", "tokens_per_s"),
        ("Train/mfu", "mfu"),
        ("Train/data_wait_s", "data_wait_s"),
        ("Eval/loss", "eval_loss"),
    ] {
        assert_eq!(found[tag], recorded(&place, field), "{tag}");
    }
    let steps: Vec<_> = found["Train/loss"].iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, (1..=8).collect::<Vec<_>>());
    if let Some(theirs) = by_tensorboard(&folder) {
        assert_eq!(theirs, found);
    }
}

#[test]
fn event_files_go_where_logging_dir_says_and_move_with_their_run_elsewhere() {
    let place = Workplace::new();
    let line = "train merak.toml --max_steps 1 --report_to tensorboard";
    place.succeed(&format!("{line} --logging_dir events"));
    assert_eq!(scalars(&place.path("events"))["Train/loss"].len(), 1);
    assert!(!place.path("run/tensorboard").exists());
    // A run that replaces another leaves none of its events.
    place.succeed(&format!("{line} --overwrite_output_dir"));
    place.succeed(&format!("{line} --overwrite_output_dir"));
    let events = fs::read_dir(place.path("run/tensorboard")).expect("a folder");
    assert_eq!(events.count(), 1);
    place.write("taken", "");
    insta::assert_snapshot!(
        [
            "--logging_dir events",
            "--report_to tensorbord",
            "--report_to tensorboard --logging_dir taken",
        ]
        .map(|keys| place.mistake(&format!("train merak.toml --output_dir other {keys}")))
        .join("\n"),
        @r#"
    error: "logging_dir" is events (command line --logging_dir), but must be unset unless "report_to" is "tensorboard"
    error: "report_to" expects none or tensorboard, found "tensorbord" (command line --report_to); did you mean "tensorboard"?
    error: cannot write into taken, which "logging_dir" names (command line --logging_dir): File exists (os error 17)
    "#
    );
}

#[test]
fn a_table_of_each_ranks_instructions_is_logged_where_it_is_asked_for() {
    let place = Workplace::new();
    let line = "train merak.toml --pp 2 --dp 2 --gradient_accumulation_steps 2 --logging_steps 2 --max_steps 4";
    let said = place
        .merak(&format!("{line} --wall_clock_breakdown"))
        .stderr;
    let tables = said.split("times of each rank up to step ").skip(1);
    let tables: Vec<_> = tables.collect();
    assert_eq!(tables.len(), 3, "{said}");
    for (table, steps) in tables.iter().zip([
        "1, ms of one step",
        "2, ms of one step",
        "4, ms a step, mean of 2",
    ]) {
        let mut lines = table.lines();
        assert_eq!(lines.next(), Some(steps));
        let names = lines.next().expect("names").split_whitespace();
        let names: Vec<_> = names.collect();
        assert_eq!((names[0], names[names.len() - 1]), ("rank", "step"));
        for rank in 0..4 {
            let row = lines.next().expect("a rank").split_whitespace();
            let row: Vec<f64> = row.map(|cell| cell.parse().expect("a number")).collect();
            assert_eq!((row.len(), row[0]), (names.len(), f64::from(rank)));
            let (parts, whole) = (
                row[1..row.len() - 1].iter().sum::<f64>(),
                row[row.len() - 1],
            );
            // Each number is rounded to a tenth.
            assert!((parts - whole).abs() < 0.1 * names.len() as f64, "{table}");
        }
    }
    let said = place
        .merak(&format!("{line} --overwrite_output_dir"))
        .stderr;
    assert!(!said.contains("times of each rank"), "{said}");
}

#[test]
fn a_profile_has_the_actions_of_its_steps_on_a_track_for_each_rank() {
    let place = Workplace::new();
    let line = "train merak.toml --pp 2 --dp 2 --gradient_accumulation_steps 2";
    place.succeed(&format!("{line} --profile_start_step 2 --profile_steps 3"));
    let text = fs::read_to_string(place.path("run/trace.json")).expect("a trace");
    let trace: Value = serde_json::from_str(&text).expect("a document");
    let events = trace["traceEvents"].as_array().expect("a list");
    let on = |rank: u64| {
        events
            .iter()
            .filter(move |event| event["tid"] == rank && event["ph"] == "X")
    };
    let names = |rank: u64| on(rank).map(|event| event["name"].as_str().expect("a name"));
    for rank in 0..4 {
        // Ranks 0 and 1 are the replicas of stage 0.
        let stage = rank / 2;
        for action in ["F0", "B0", "F1", "B1"] {
            let action = format!("{stage}{action}");
            assert_eq!(
                names(rank).filter(|name| *name == action).count(),
                3,
                "{text}"
            );
        }
        for other in ["step 2", "step 3", "step 4"] {
            assert_eq!(
                names(rank).filter(|name| *name == other).count(),
                1,
                "{other}"
            );
        }
        assert_eq!(
            names(rank).filter(|name| *name == "OptimizerStep").count(),
            3
        );
        assert!(!names(rank).any(|name| name == "step 1" || name == "step 5"));
        // Actions lie within the steps.
        let ends =
            on(rank).map(|event| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap());
        let starts = on(rank).map(|event| event["ts"].as_f64().unwrap());
        assert!(starts.fold(f64::INFINITY, f64::min) >= 0.0);
        assert!(ends.fold(0.0, f64::max) < 60e6);
    }
    // The run may end before the profile does.
    place.succeed(&format!(
        "{line} --overwrite_output_dir --profile_start_step 5 --profile_steps 9"
    ));
    let text = fs::read_to_string(place.path("run/trace.json")).expect("a trace");
    assert!(text.contains("\"step 5\"") && !text.contains("\"step 4\""));
}

#[test]
fn the_page_of_a_run_stands_alone_and_tells_curves_plan_memory_and_timelines() {
    let place = Workplace::new();
    place.succeed("train merak.toml --pp 2 --tp 2 --do_eval --eval_steps 2");
    let page = fs::read_to_string(place.path("run/report.html")).expect("a page");
    let addresses: Vec<_> = page.match_indices("http").collect();
    let own = page.matches("xmlns=\"http://www.w3.org/2000/svg\"").count();
    assert_eq!(addresses.len(), own, "nothing is fetched");
    assert!(!page.contains("<script") && !page.contains("src="));
    for text in [
        "gpt2, ",
        "dp 1 × tp 2 × pp 2",
        "<figcaption>Loss",
        "validation",
        "<figcaption>Speed",
        "MFU is the share of",
        "rank 1 planned",
        "rank 1 real",
        "transformer.h.",
        "Stages by uniform",
        "measured</th>",
        "gradient_accumulation_steps = 4",
        "prefers-color-scheme: dark",
    ] {
        assert!(page.contains(text), "{text}");
    }
    for tag in [
        "figure", "svg", "table", "div", "details", "tr", "td", "th", "p", "style",
    ] {
        let opened =
            page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    // A run has a page when it ends.
    let place = Workplace::new();
    place.write(
        "bad.toml",
        &fs::read_to_string(place.path("merak.toml")).expect("a file"),
    );
    place.succeed("train bad.toml --max_steps 4 --save_steps 2");
    assert!(place.path("run/report.html").is_file());
}

#[test]
fn a_page_that_cannot_be_written_leaves_the_last_one_whole() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 2");
    let page = || fs::read_to_string(place.path("run/report.html")).expect("a page");
    let first = page();
    // Where the next page is written until it is whole.
    place.write("run/.merak-tmp-report.html/other", "");
    let ended = place.merak("train merak.toml --max_steps 3 --resume latest");
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let told = ended.stderr.matches("metrics cannot be written");
    assert!(told.count() > 0, "{}", ended.stderr);
    assert!(page() == first, "the page of the first run");
}
