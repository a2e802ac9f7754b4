//! Schedules: formats, costs, limits of memory, files to check.

use insta::assert_snapshot;
use serde_json::Value;

use super::{Workplace, keys};

const SCHEDULE_KEYS: [&str; 14] = [
    "name",
    "stages",
    "ranks",
    "microbatches",
    "chunks",
    "costs",
    "actions",
    "instructions",
    "makespan",
    "bubble",
    "longest_rank_time",
    "bubble_by_rank",
    "peak_activations",
    "critical_path",
];

#[test]
fn a_schedule_is_printed_in_every_format_and_checked() {
    let place = Workplace::new();
    assert_snapshot!(place.succeed("schedule 1f1b -p 2 -m 3"), @r#"
    rank 0  F0 F1 .  .  .  B0------ F2 B1------ .  B2------
    rank 1  .  F0 B0------ F1 B1------ F2 B2------ .  .  .

    1f1b: makespan 16, bubble 25.0 %, of each rank's own time 25.0 0.0 %, peak activations per rank 2 1
    costs F=1,I=1,W=1,R=1,C=0,O=1
    "#);
    let huge = place.succeed("schedule 1f1b -p 4 -m 10000");
    let start =
        "(a grid shows at most 50000 actions, this schedule has 80000)\n\n1f1b: makespan 40012, ";
    assert!(huge.starts_with(start), "{huge}");
    let csv = place.succeed("schedule pre_recompute_1f1b -p 2 -m 4 --format csv");
    assert_snapshot!(csv, @r#"
    0F0,0F1,0B0,0F2,0B1,0F3,0B2,0R3,0B3
    1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
    "#);
    place.write("given.csv", &csv);
    place.succeed("schedule --check given.csv -p 2 -m 4");
    let document =
        place.document("schedule 1f1b -p 4 -m 8 --format json --costs F=1,I=1,W=1,R=1,C=0");
    assert_eq!(keys(&document), SCHEDULE_KEYS);
    assert_eq!(document["makespan"], 44.0);
    place.succeed("schedule gpipe -p 2 -m 2 --format csv -o out.csv");
    assert_eq!(
        std::fs::read_to_string(place.path("out.csv")).unwrap(),
        place.succeed("schedule gpipe -p 2 -m 2 --format csv")
    );
}

#[test]
fn a_schedule_has_its_own_defaults_and_prints_the_costs_in_use() {
    let place = Workplace::new();
    let costs = |line: &str| {
        let text = place.succeed(line);
        text.lines().last().expect("a line").to_owned()
    };
    for name in ["gpipe", "shifted_critical_path"] {
        let line = format!("schedule {name} -p 2 -m 4");
        assert_eq!(costs(&line), "costs F=1,I=1,W=1,R=1,C=0,O=1");
    }
    for name in [
        "zb_h1",
        "interleaved_1f1b",
        "dualpipe_v",
        "inference",
        "auto",
    ] {
        let line = format!("schedule {name} -p 2 -m 4 --costs W=0.5");
        assert_eq!(costs(&line), "costs F=1,I=1,W=0.5,R=0,C=0,O=1");
    }
    let interleaved = place.document("schedule interleaved_1f1b -p 2 -m 4 --format json");
    assert_eq!(interleaved["chunks"], 2);
    // A schedule that is given as CSV tells its own size; a byte order mark is skipped.
    let csv = place.succeed("schedule dualpipe_v -p 2 -m 4 --format csv");
    assert!(csv.contains("(0F3;3B1)OVERLAP_F_B"), "{csv}");
    place.write("given.csv", &format!("\u{feff}{csv}"));
    let checked = place.document("schedule --check given.csv --format json --costs O=0.75");
    assert_eq!(
        (
            &checked["ranks"],
            &checked["microbatches"],
            &checked["chunks"]
        ),
        (&2.into(), &4.into(), &2.into())
    );
    assert_eq!(checked["costs"]["O"], 0.75);
    let wrong = place.mistake("schedule --check given.csv -p 3");
    assert_eq!(
        wrong,
        "error: given.csv: expected one list of actions for each of 3 ranks, found 2"
    );
    let picture = place.succeed("schedule dualpipe_v -p 2 -m 4 --format svg");
    assert!(
        picture.contains("dualpipe_v under F=1,I=1,W=1,R=0,C=0,O=1<"),
        "{picture}"
    );
}

#[test]
fn costs_and_limits_of_each_stage_and_rank_are_taken_and_memory_is_shown_in_bytes() {
    let place = Workplace::new();
    let line = |text: &str| {
        text.lines()
            .find(|line| line.contains("makespan"))
            .unwrap_or_default()
            .to_owned()
    };
    let even = place.succeed("schedule 1f1b -p 2 -m 3 --costs F=1,I=1,W=1,R=0,C=0");
    let uneven = place.succeed("schedule 1f1b -p 2 -m 3 --costs F=1:2,I=1,W=1:0.5,R=0,C=0");
    assert_ne!(line(&even), line(&uneven));
    place.write("costs.txt", "F=1:2\nI=1\nW=1:0.5\nR=0,C=0\n");
    assert_eq!(
        place.succeed("schedule 1f1b -p 2 -m 3 --costs @costs.txt"),
        uneven
    );

    let searched = place
        .document("schedule auto -p 4 -m 8 --memory 2:1:3:2 --costs F=1,I=1,W=1,R=0 --format json");
    let peaks = searched["peak_activations"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_f64);
    assert!(
        peaks
            .zip([2.0, 1.0, 3.0, 2.0])
            .all(|(peak, limit)| peak <= limit),
        "{searched}"
    );
    for limit in [1, 2, 3] {
        place.succeed(&format!("schedule auto -p 4 -m 8 --memory {limit}"));
    }

    let text = place.succeed("schedule zb_h2 -p 2 -m 4 --bytes I=300,W=100:50");
    assert!(
        text.contains("peak bytes of activations per rank: 1.17 KiB, "),
        "{text}"
    );
    let document = place.document("schedule zb_h2 -p 2 -m 4 --bytes I=300,W=100:50 --format json");
    assert_eq!(
        document["activation_bytes"],
        serde_json::json!({ "I": [300, 300], "W": [100, 50] })
    );
    assert_eq!(document["peak_bytes"][0], 1200);
    assert!(
        text.contains("  of them for I: 900 B, "),
        "what waits for I is told apart: {text}"
    );
    assert_eq!(
        document["peak_bytes_by_grad"][0],
        serde_json::json!({ "I": 900, "W": 300 })
    );
}

#[test]
fn limits_of_memory_are_microbatches_or_bytes_and_the_page_shows_them_with_uneven_costs() {
    let place = Workplace::new();
    let command = "schedule auto -p 4 -m 8 --bytes I=3145728,W=1048576 --memory 8MiB:8M:8MiB:4MiB";
    let searched = place.document(&format!("{command} --format json"));
    let peaks = searched["peak_bytes"].as_array().unwrap().iter();
    let limits = [8 << 20, 8 << 20, 8 << 20, 4 << 20];
    assert!(
        peaks
            .filter_map(Value::as_u64)
            .zip(limits)
            .all(|(peak, limit)| peak <= limit),
        "{searched}"
    );
    let message = |command: &str| place.mistake(command);
    assert_snapshot!(message("schedule auto -p 2 -m 4 --memory 8MiB"), @"error: --memory 8MiB limits bytes: say with --bytes what a microbatch keeps on a stage, as in --bytes I=1MiB,W=512KiB");
    assert_snapshot!(message("schedule auto -p 2 -m 4 --memory 8MiB:4 --bytes I=1"), @r#"error: --memory expects numbers of microbatches such as 4 or 4:3:2:1, or sizes of whole units such as 96MiB:64MiB, found "8MiB:4""#);
    assert_snapshot!(message("schedule auto -p 2 -m 4 --memory 7B --bytes I=8"), @"error: for one microbatch the stages of rank 0 need 8 bytes, found a limit of 7 bytes");

    for command in ["auto", "1f1b --format html"] {
        let message = message(&format!("schedule {command} -p 2 -m 4 --memory 0"));
        assert_eq!(
            message.trim_end(),
            "error: every rank keeps the activations of at least 1 microbatch, found a limit of 0 for rank 0"
        );
    }

    let page = "schedule 1f1b -p 4 -m 8 --costs F=1:1:2:1 --bytes I=300,W=100 --memory 4:3:2:1 --format html";
    let page = place.succeed(page);
    assert!(
        page.contains(r#""F":[1.0,1.0,2.0,1.0]"#),
        "costs of each stage"
    );
    assert!(page.contains(r#""bytes":{"I":[300,300,300,300],"W":[100,100,100,100]}"#));
    assert!(page.contains(r#""peak_activations":[4.0,3.0,2.0,1.0]"#));
}

#[test]
fn entries_of_costs_and_bytes_are_read_by_line_and_faults_name_file_line_and_key() {
    let place = Workplace::new();
    place.write("bytes.txt", "I=1MiB\nW=512KiB\n");
    let text = place.succeed("schedule 1f1b -p 2 -m 4 --bytes @bytes.txt");
    let expected = "peak bytes of activations per rank: 3.00 MiB, 1.50 MiB\n  of them for I: 2.00 MiB, 1.00 MiB\n";
    assert!(text.contains(expected), "{text}");
    place.write("costs.txt", "F=1,\n\nI=x\n");
    place.write("blank.txt", " \n");
    let message = |options: &str| place.mistake(&format!("schedule 1f1b -p 4 -m 8 {options}"));
    assert_snapshot!(message("--costs @costs.txt"), @r#"error: costs.txt: line 3: expected costs such as F=1,I=1,W=1,R=1,C=0,O=1, found "I=x""#);
    assert_snapshot!(message("--costs @blank.txt"), @"error: blank.txt, the file of --costs is empty, expected entries such as F=1,I=1 or I=1MiB,W=512KiB");
    assert_snapshot!(message("--costs F=1:2"), @"error: expected costs F of 4 stages, found 2");
    assert_snapshot!(message("--bytes I=1:2"), @"error: expected bytes I of 4 stages, found 2");
    assert_snapshot!(message("--bytes="), @"error: --bytes is empty, expected entries such as F=1,I=1 or I=1MiB,W=512KiB");
    for costs in [",", "F=1,,I=2", "F=1,"] {
        let message = message(&format!("--costs {costs}"));
        assert!(message.ends_with("found \"\""), "{message}");
    }
    assert_snapshot!(message("--costs F=-1"), @"error: the cost F must be from 0 to 1e15, found -1");
    assert_snapshot!(message("--cores 0"), @"error: ranks share 0.000001 cores or more, found 0");
}

#[test]
fn lines_that_are_blank_or_missing_bytes_beyond_counting_and_tiny_costs_do_not_mislead() {
    let place = Workplace::new();
    place.write("spaced.csv", "0F0,0B0\n\n1F0,1B0\n");
    place.succeed("schedule --check spaced.csv");
    place.write("short.csv", "0F0,0B0\n2F0,2B0\n");
    assert_snapshot!(place.mistake("schedule --check short.csv"), @"error: short.csv: the file names stage 2 but not stage 1: a line is missing (it has 2 with actions, one for each rank), or stages are numbered wrongly");
    assert_snapshot!(place.mistake("schedule 1f1b -p 2 -m 4 --bytes I=18446744073709551615"), @"error: the activations of all stages and microbatches together are more than 18446744073709551615 bytes");
    let tiny = place.succeed("schedule 1f1b -p 1 -m 1 --costs F=1e-320,I=0,W=0,R=0");
    assert!(
        tiny.contains("makespan 1e-320,") && tiny.contains("costs F=1e-320,I=0,"),
        "{tiny}"
    );
    let page =
        |costs: &str| place.succeed(&format!("schedule 1f1b -p 2 -m 4 --format html {costs}"));
    assert!(page("").contains(r#""is_recompute_named":false"#));
    assert!(page("--costs F=2,R=1").contains(r#""is_recompute_named":true"#));
}

#[cfg(unix)]
#[test]
fn a_checked_file_is_named_safely_and_told_what_it_lacks() {
    let place = Workplace::new();
    let name = "a\u{1b}[31mb.csv";
    place.write(name, "0F0,0F1\n1F0,1F1\n");
    for format in ["grid", "svg", "json", "html"] {
        let text = place.succeed(&format!("schedule --check {name} --format {format}"));
        assert!(!text.contains('\u{1b}'), "{format}: {text}");
    }
    let text = place.succeed(&format!("schedule --check {name}"));
    assert!(
        text.contains(r"a\u{1b}[31mb.csv: forwards only, makespan 3,"),
        "{text}"
    );
    place.write("empty.csv", "\n");
    assert_snapshot!(place.mistake("schedule --check empty.csv"), @"error: empty.csv: the file is empty: it has no actions");
}

#[test]
fn writing_csv_says_which_costs_give_its_times_again() {
    let place = Workplace::new();
    let makespan =
        |line: &str| place.document(&format!("{line} --format json"))["makespan"].clone();
    for (schedule, costs) in [
        ("1f1b -p 2 -m 4", Some("R=1")),
        ("gpipe -p 2 -m 4 --costs R=0.5", Some("R=0.5")),
        // The last stage never recomputes.
        ("shifted_critical_path -p 3 -m 6", Some("R=1:1:0")),
        ("zb_h1 -p 2 -m 4", None),
        ("1f1b -p 2 -m 4 --costs R=0", None),
    ] {
        let line = format!("schedule {schedule}");
        let written = place.merak(&format!("{line} --format csv -o given.csv"));
        let advice = costs.map(|costs| format!("need --check FILE --costs {costs}\n"));
        match &advice {
            Some(advice) => assert!(written.stderr.ends_with(advice), "{}", written.stderr),
            None => assert_eq!(written.stderr, ""),
        }
        let given = format!("--costs {}", costs.unwrap_or("R=0"));
        let checked = makespan(&format!("schedule --check given.csv {given}"));
        assert_eq!(checked, makespan(&line), "{schedule}");
    }
}
