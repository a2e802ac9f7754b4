//! Documents and formats on standard output.

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::{Workplace, launch::end, terminal};

fn keys(value: &Value) -> Vec<&str> {
    let object = value.as_object().expect("an object");
    object.keys().map(String::as_str).collect()
}

#[test]
fn a_dry_run_prints_the_plan_and_writes_nothing() {
    let place = Workplace::new();
    let plan = place.succeed("train merak.toml --dry-run --tp 2 --pp 2");
    assert_snapshot!(plan, @r#"
    model     gpt2: 17776 parameters, 4 layers
    data      text: 1 file, 1.91 KiB (1860 training tokens, 97 validation tokens)
    ranks     4 = dp 1 x tp 2 x pp 2, 1 compute threads each
    batch     4 samples of 16 tokens = 1 per microbatch x 4 microbatches x dp 1
    schedule  1f1b

    stage  segments  parameters    forward   backward  sent (act + grad)  received (act + grad)      kept  live   memory  inputs     modules
        0         5      11.2 k  133 kFLOP  352 kFLOP     1.00 KiB + 0 B         0 B + 1.00 KiB  4.25 KiB     2  134 KiB  input_ids  transformer.wte, transformer.wpe, transformer.h.0-1
        1         5      6.59 k  283 kFLOP  635 kFLOP     0 B + 1.00 KiB         1.00 KiB + 0 B  22.4 KiB     1  140 KiB  labels     transformer.h.2-3, transformer.ln_f, lm_head, loss
    memory: weights, gradients, optimizer state and kept values; batches and values within a phase come on top
    segments by farthest_min_deps: 1644 parameters a segment for 8 segments, 11 candidate cuts
    stages by uniform: 10 segments as 5 + 5; the longest forward is 1.36 times the mean
    tied transformer.wte.weight: stage 0 owns it, copies on 1
    memory    at least 2.67 MiB: of all ranks (4) weights take 121 KiB, gradients 121 KiB, optimizer state 242 KiB, activations 453 KiB, threads and programs 1.75 MiB, the data 7.64 KiB
    "#);
    assert!(!place.path("run").exists());
    assert_eq!(
        place.succeed("train merak.toml --tp=2 --pp=2 --dry-run"),
        plan
    );
    let idle = place.succeed("train merak.toml --tp=2 --pp=2 --dry-run --profile_steps 5");
    let warning = "warning: \"profile_steps\" has no effect: \"profile_start_step\" is unset";
    assert!(idle.contains(warning), "{idle}");
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

#[test]
fn lines_of_plans_and_summaries_fit_a_terminal_of_80_columns() {
    let place = Workplace::new();
    let long = "model.hf_dir";
    let lines = [
        "train merak.toml --max_steps 3 --pp 2 --dp 2 --tp 2 --train_schedule auto",
        "train merak.toml --max_steps 3 --resume latest --save false",
        "config merak.toml --model.config model.json --data.path text --tp 2",
    ];
    for line in lines {
        let shown = on_terminal(&place, line, 80);
        // Paths and commands stay whole.
        let is_too_long = |line: &&str| line.chars().count() > 80 && !line.contains('/');
        assert_eq!(shown.lines().find(is_too_long), None, "{line}: {shown}");
        assert!(
            shown.contains("ranks     ") || shown.contains(long),
            "{shown}"
        );
    }
}

/// What a command that succeeds writes to a terminal with that number of columns.
fn on_terminal(place: &Workplace, line: &str, columns: u16) -> String {
    let (ended, shown) = terminal::shown(place.command(line), columns, false);
    assert!(ended.success(), "merak {line}: {shown}");
    shown
}

#[test]
fn events_name_their_rank_step_stage_and_microbatch() {
    let place = Workplace::new();
    let line = "train merak.toml --pp 2 --log merak_trainer=debug,merak_pipe=trace";
    let ended = place.merak(line);
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let event = "rank{rank=1}:step{step=2 part=Train}:microbatch{stage=1 microbatch=3 kind=B}: \
                 merak_pipe::engine: action";
    assert!(ended.stderr.contains(event), "{}", ended.stderr);
}

#[test]
fn lines_of_progress_fit_a_terminal_without_bars() {
    let place = Workplace::new();
    let mut command = place.command("train merak.toml --max_steps 2 --save_steps 1");
    command.env("TERM", "dumb");
    let (ended, shown) = terminal::shown(command, 40, true);
    assert!(ended.success(), "{shown}");
    let is_whole = |line: &str| line.starts_with("step 2/2  loss ") && line.ends_with(" left");
    assert!(!shown.lines().any(is_whole), "{shown}");
    let lines = || {
        shown
            .lines()
            .skip_while(|line| !line.starts_with("step 2/2  loss "))
    };
    assert!(
        lines()
            .next()
            .is_some_and(|line| line.chars().count() <= 40),
        "{shown}"
    );
    assert!(
        lines()
            .nth(1)
            .is_some_and(|line| line.starts_with("          ")),
        "{shown}"
    );
}

#[test]
fn messages_are_folded_on_a_terminal_and_whole_elsewhere() {
    let place = Workplace::new();
    for line in [
        "train merak.toml --dry-run --sgd_momentum 5 --set learning_rate=0.1 --adapter_name a.b",
        "train merak.toml --dry-run --warmup_steps 9 --max_grad_norm -1 --tp 4",
        "schedule 1f1b -p 4 -m 4 --format neither-of-the-formats-that-are-known-to-it",
    ] {
        let whole = place.merak(line).stderr;
        assert!(whole.lines().any(|line| line.len() > 80), "{whole}");
        let mut command = place.command(line);
        command.env("NO_COLOR", "1");
        let (ended, shown) = terminal::shown(command, 80, true);
        assert_eq!(ended.code(), Some(2), "{shown}");
        assert_eq!(shown.lines().find(|line| line.chars().count() > 80), None);
        assert!(shown.contains(&format!("\n{:10}", "")), "{shown}");
        let words = |text: &str| {
            let words = text
                .split_whitespace()
                .filter(|word| !word.starts_with("20"));
            words.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(words(&shown), words(&whole));
    }
}

#[test]
fn graphs_and_configurations_fit_a_terminal() {
    let place = Workplace::new();
    for (line, columns) in [
        ("trace merak.toml --tp 2 --pp 2 --stage 1", 80),
        ("config merak.toml --tp 2", 40),
    ] {
        let shown = on_terminal(&place, line, columns);
        let is_too_long =
            |line: &&str| line.chars().count() > columns.into() && !line.contains('/');
        assert_eq!(shown.lines().find(is_too_long), None, "{line}");
    }
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
fn a_graph_is_printed_in_every_format() {
    let place = Workplace::new();
    let text = place.succeed("trace merak.toml");
    assert!(
        text.contains("transformer.wte.weight") && text.contains("loss"),
        "{text}"
    );
    assert!(!text.contains("all_reduce"));
    let dot = place.succeed("trace model.json --format dot");
    assert!(dot.starts_with("digraph"), "{dot}");
    let whole = place.document("trace model.json --format json");
    assert_eq!(whole["traffic"], json!({}));
    // The last of two stages, with the collectives of two tensor-parallel ranks, backward included.
    let stage = place.succeed("trace merak.toml --tp 2 --pp 2 --stage 1");
    assert!(
        stage.contains("all_reduce") && stage.contains("transformer.h.3"),
        "{stage}"
    );
    assert!(!stage.contains("transformer.h.0"), "{stage}");
    let of_layer = stage
        .lines()
        .find(|line| line.starts_with("# transformer.h.3 "));
    let of_layer = of_layer.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let of_layer = of_layer.expect("a table of what the layers communicate");
    assert_eq!(of_layer[2..4], ["all_reduce", "2"], "{stage}");
    let stage = place.document("trace merak.toml --tp 2 --pp 2 --stage 1 --format json");
    let traffic = &stage["traffic"]["tensor"];
    let rows = |part: &str| traffic[part].as_array().expect("rows").clone();
    let of_layer = rows("layers");
    let of_layer = of_layer
        .iter()
        .find(|row| row["layer"] == "transformer.h.3");
    let of_layer = of_layer.expect("the layer communicates");
    assert_eq!(of_layer["collective"], "all_reduce");
    assert_eq!(of_layer["forward"], 2);
    let bytes = |part: &str| -> u64 {
        let rows = rows(part).into_iter();
        rows.filter_map(|row| row["bytes"].as_u64()).sum()
    };
    assert!(
        bytes("layers") > 0 && bytes("layers") == bytes("total"),
        "{traffic}"
    );
    // Ranks that share sequences, at the default of recomputing each layer.
    let shared = place.succeed("trace merak.toml --sp 2");
    let of_layer = shared
        .lines()
        .find(|line| line.starts_with("# transformer.h.3 "));
    let of_layer = of_layer.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let of_layer = of_layer.expect("a table of what the layers communicate");
    assert_eq!(of_layer[2..6], ["all_to_all", "4", "4", "4"], "{shared}");
    // Any key may follow.
    let shallow = place.succeed("trace merak.toml --num_layers 2 --per_device_train_batch_size 3");
    assert!(
        !shallow.contains("transformer.h.2") && shallow.contains("[3, 16]"),
        "{shallow}"
    );
    let dot = place.succeed("trace merak.toml --virtual_stages 2 --train_schedule interleaved_1f1b --pp 2 --stage 3 --format dot");
    assert!(dot.starts_with("digraph"), "{dot}");
    place.write("hf/config.json", &super::model().to_string());
    assert_eq!(place.succeed("trace hf"), place.succeed("trace model.json"));
}

#[test]
fn a_graph_comes_with_the_reasons_for_layers_that_were_chosen() {
    let place = Workplace::new();
    place.write(
        "encoder.json",
        r#"{ "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 31, "hidden_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24 }"#,
    );
    let line = "trace encoder.json --tp 2";
    let text = place.succeed(&format!("{line} --tp_layer_lists auto"));
    let reasons = text.lines().filter_map(|line| line.strip_prefix("# auto "));
    assert_snapshot!(reasons.collect::<Vec<_>>().join("\n"), @"
    col bert.encoder.layer.{i}.attention.self.query: each rank goes on with its part
    col bert.encoder.layer.{i}.attention.self.key: each rank goes on with its part
    col bert.encoder.layer.{i}.attention.self.value: each rank goes on with its part
    row bert.encoder.layer.{i}.attention.output.dense: its input comes split
    col bert.encoder.layer.{i}.intermediate.dense: each rank goes on with its part
    row bert.encoder.layer.{i}.output.dense: its input comes split
    whole cls.predictions.transform.dense: its parts would be gathered as cls.predictions.transform.gelu for cls.predictions.transform.LayerNorm.layer_norm
    ");
    let document = place.document(&format!("{line} --tp_layer_lists auto --format json"));
    assert_eq!(document["choices"][3]["reason"], "its input comes split");
    // Lists of the family need no reasons.
    assert!(!place.succeed(line).contains("# auto "));
    let listed = place.document(&format!("{line} --format json"));
    assert_eq!(listed["choices"], json!([]));
}

#[test]
fn the_bench_prints_one_line_of_json() {
    let place = Workplace::new();
    let gpt = "bench gpt --layers 2 --hidden 16 --heads 2 --seq 8 --vocab 31 --batch 4 --microbatches 2 \
               --steps 2 --warmup 1 --threads 1";
    let bench = |flags: &str| {
        let text = place.succeed(&format!("{gpt} {flags}"));
        assert_eq!(text.trim_end().lines().count(), 1, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let single = bench("");
    assert_eq!(
        keys(&single),
        [
            "mode",
            "schedule",
            "tokens_per_s",
            "ms_per_step",
            "params",
            "first_loss",
            "last_loss",
            "peak_bytes",
            "device_peak_bytes",
            "state_bytes",
            "planned_state_bytes",
            "exchange_bytes",
            "planned_exchange_bytes",
            "replica_link_ms",
            "replica_wait_ms",
            "tensor_link_ms",
            "tensor_wait_ms"
        ]
    );
    let told = ["mode", "schedule", "device_peak_bytes"].map(|key| &single[key]);
    assert_eq!(told, [&json!("single"), &json!("1f1b"), &Value::Null]);
    let elements = single["params"].as_u64().expect("a number");
    assert_eq!(single["state_bytes"], 16 * elements);
    assert_eq!(single["planned_state_bytes"], 16 * elements);
    assert_eq!(single["planned_exchange_bytes"], 0);
    let slow = bench("--dp 2 --zero 3 --replica-link 10");
    let [held, most] = ["exchange_bytes", "planned_exchange_bytes"].map(|key| slow[key].as_u64());
    assert!(held > Some(0) && held <= most, "{slow}");
    assert_eq!(slow["first_loss"], single["first_loss"]);
    let ms = |key: &str| slow[key].as_f64().expect("a number");
    assert!(ms("replica_link_ms") > 0.0);
    assert!((0.0..=ms("replica_link_ms")).contains(&ms("replica_wait_ms")));
    // A latency is waited for, and the wire is free meanwhile.
    let far = bench("--dp 2 --replica-link 1000 --link-latency 20000");
    let ms = |key: &str| far[key].as_f64().expect("a number");
    assert!(ms("replica_wait_ms") > ms("replica_link_ms"), "{far}");
    assert!(ms("ms_per_step") > 10.0, "{far}");
    let pipelined = bench("--pp 2");
    assert_eq!(pipelined["mode"], "pp2");
    let schedule = pipelined["schedule"].as_str().expect("a name");
    assert!(schedule.starts_with("auto ("), "{schedule}");
    let named = bench("--pp 2 --schedule 1f1b");
    assert_eq!(named["schedule"], "1f1b");
    assert_eq!(named["last_loss"], single["last_loss"]);
    assert_eq!(pipelined["first_loss"], single["first_loss"]);
    assert_eq!(pipelined["last_loss"], single["last_loss"]);
    assert_eq!(bench("--dp 2 --tp 2")["mode"], "dp2xtp2");
}

#[test]
fn the_bench_of_pipelines_prints_a_line_per_schedule() {
    let place = Workplace::new();
    let text = place.succeed(
        "bench pipeline --layers 4 --hidden 16 --heads 2 --seq 8 --vocab 31 --batch 1 --microbatches 4 --steps 2 \
         --schedules 1f1b,zb_v,interleaved_1f1b,auto --recompute",
    );
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("one object a line"))
        .collect();
    let names: Vec<_> = lines
        .iter()
        .filter_map(|line| line["schedule"].as_str())
        .collect();
    assert_eq!(names, ["1f1b", "zb_v", "interleaved_1f1b", "auto"]);
    for line in &lines {
        let chunks = line["chunks"].as_u64().expect("a number");
        let stages = line["stages"].as_array().expect("a list");
        assert_eq!(stages.len() as u64, 2 * chunks);
        for figure in [
            "executed_ms",
            "simulated_ms",
            "executed_by_simulated",
            "step_ms",
            "predicted_ms",
            "step_by_predicted",
        ] {
            assert!(line[figure].as_f64() > Some(0.0), "{figure} in {line}");
        }
    }
    assert_snapshot!(place.mistake("bench pipeline --steps 0"), @"error: --steps and --rounds expect at least 1");
}

#[test]
fn the_bench_of_checkpoints_says_how_long_saving_stops_training() {
    let place = Workplace::new();
    let shape = "--layers 1 --hidden 16 --heads 2 --seq 8 --vocab 31";
    let line = format!("bench save out {shape} --steps 2 --dp 2 --zero 1");
    let line: Value = serde_json::from_str(&place.succeed(&line)).expect("one object");
    for figure in ["save_ms", "stall_ms", "stall_share", "step_ms", "bytes"] {
        assert!(line[figure].as_f64() > Some(0.0), "{figure} in {line}");
    }
    assert!(line["steps_meanwhile"].as_f64() >= Some(1.0), "{line}");
    let saved = merak_ckpt::Checkpoint::open(place.path("out")).expect("the last one");
    assert!(saved.verify().damage.is_empty());
    assert_snapshot!(place.mistake("bench save out --steps 0"), @"error: --steps is 0, expected at least 1");
}

#[test]
fn the_bench_of_collectives_prints_a_line_per_operation_and_size() {
    let place = Workplace::new();
    let text = place.succeed("bench collectives --world 3 --bytes 1000,48 --steps 2");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("one object a line"))
        .collect();
    let operations = |bytes: u64| {
        let of_size = lines.iter().filter(|line| line["bytes"] == bytes);
        let names = of_size.filter_map(|line| line["op"].as_str());
        names.collect::<Vec<_>>()
    };
    // A whole number of elements for each of three ranks.
    assert_eq!(operations(996), operations(48));
    assert_eq!(
        operations(48),
        [
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "all_to_all",
            "send_recv"
        ]
    );
    for line in &lines {
        assert_eq!(
            keys(line),
            ["engine", "world", "op", "bytes", "us", "bus_bytes_per_s"]
        );
        assert!(line["us"].as_f64() > Some(0.0) && line["bus_bytes_per_s"].as_f64() > Some(0.0));
    }
    assert_snapshot!(place.mistake("bench collectives --world 1"), @"error: --world is 1, expected 2 to 256 ranks");
    assert_snapshot!(place.mistake("bench collectives --bytes 7"), @"error: --bytes has 7 B, expected 8 B to 4.00 GiB");
    let message = place.mistake("bench collectives --bytes 1.5M");
    let expected = "expected a whole number of bytes below 2^64 as in 1000000, 64KiB, 256M or 5GB, found `1.5M`";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn the_bench_of_collectives_times_the_engine_that_is_asked_for() {
    let place = Workplace::new();
    let expect = |text: &str, engine: &str| {
        assert_eq!(text.lines().count(), 6, "{text}");
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).expect("one object a line");
            assert_eq!(
                (&line["engine"], &line["world"]),
                (&json!(engine), &json!(3))
            );
        }
    };
    let line = "bench collectives --bytes 48 --steps 1";
    for engine in ["threads", "tcp"] {
        let text = place.succeed(&format!("{line} --world 3 --engine {engine}"));
        expect(&text, engine);
    }
    // Each process is a rank, and the first prints.
    let launched = |line: &str| end(&place, place.command(&format!("launch -n 3 -- {line}")));
    let ended = launched(line);
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    expect(&ended.stdout, "tcp");
    let ended = launched(&format!("{line} --world 2"));
    assert_eq!(ended.status, Some(2));
    assert_eq!(
        ended
            .stderr
            .matches("error: --world is 2, but 3 processes were started: leave it out")
            .count(),
        1,
        "{}",
        ended.stderr
    );
    let unknown = place.mistake("bench collectives --engine gloo");
    assert!(
        unknown.contains("expected one of `auto`, `threads`, `tcp`, `mpi`, `nccl`"),
        "{unknown}"
    );
}

#[test]
fn the_bench_of_collectives_reads_sizes_and_moves_the_bytes_of_messages() {
    let place = Workplace::new();
    let text = place.succeed("bench collectives --bytes 64KiB,16M --steps 5");
    let lines = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("one object a line"));
    let messages: Vec<Value> = lines
        .filter(|line: &Value| line["op"] == "send_recv")
        .collect();
    let sizes: Vec<_> = messages.iter().map(|line| line["bytes"].as_u64()).collect();
    assert_eq!(sizes, [Some(64 << 10), Some(16 << 20)]);
    // A message that is a pointer alone would seem faster than any memory, and take the same time
    // at any size.
    let speed = messages[1]["bus_bytes_per_s"].as_f64().expect("a number");
    assert!(speed < 1e12, "{speed}");
    let times = messages.iter().filter_map(|line| line["us"].as_f64());
    let times: Vec<_> = times.collect();
    assert!(times[1] > times[0], "{times:?}");
}

#[test]
fn the_configuration_tells_where_each_value_came_from() {
    let place = Workplace::new();
    let document = place.document("config merak.toml --json --tp 2");
    assert_eq!(document["tp"]["value"], 2);
    assert_eq!(document["tp"]["origin"], "command line --tp");
    assert_eq!(
        document["seq_length"]["origin"].as_str().unwrap(),
        "merak.toml:2"
    );
    assert_eq!(document["pp"]["origin"], "default");
    assert_eq!(place.document("config merak.toml --tp 2 --json"), document);
    let table = place.succeed("config merak.toml --tp 2");
    let rows: Vec<_> = table
        .lines()
        .filter(|line| line.starts_with("tp ") || line.starts_with("max_steps "))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    assert_snapshot!(rows.join("\n"), @r"
    tp 2 command line --tp
    max_steps 5 merak.toml:3
    ");
}

#[test]
fn the_doctor_tells_what_there_is_and_tries_it() {
    let place = Workplace::new();
    let found = place.document("doctor --json");
    assert_eq!(found["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(found["trial"], "passed");
    assert!(found["cores"].as_u64() >= Some(1) && found["memory_bytes"].as_u64() > Some(1 << 20));
    let names = |key: &str| {
        let names = found[key].as_array().expect("a list").iter();
        names
            .filter_map(|name| name.as_str().map(str::to_owned))
            .collect::<Vec<_>>()
    };
    for (key, name) in [
        ("engines", "threads"),
        ("backends", "candle"),
        ("devices", "cpu"),
        ("optimizers", "adamw_torch"),
        ("schedules", "1f1b"),
        ("schedules", "auto"),
        ("model_types", "gpt2"),
    ] {
        assert!(names(key).contains(&name.to_owned()), "{key}: {found}");
    }
    assert_eq!(found["launcher"], "none: ranks are threads of this process");
    assert_eq!(found["engine"], "threads");
    // Abilities of other builds are not listed.
    let has_nccl = cfg!(feature = "nccl");
    assert_eq!(names("engines").contains(&"nccl".to_owned()), has_nccl);
    assert_eq!(found.get("nccl").is_some(), has_nccl);
    let has_tch = cfg!(feature = "tch");
    assert_eq!(names("backends").contains(&"tch".to_owned()), has_tch);
    assert!(has_tch || !names("devices").contains(&"cuda".to_owned()));
    let table = place.succeed("doctor");
    assert!(
        table.contains("\nengines               auto, threads"),
        "{table}"
    );
    assert!(
        table
            .lines()
            .any(|line| line.starts_with("trial") && line.ends_with("passed"))
    );
}

#[test]
fn the_doctor_tells_what_a_launcher_has_told() {
    let place = Workplace::new();
    let launched = |variables: &[(&str, &str)]| {
        let mut command = place.command("doctor --json");
        command.envs(variables.iter().copied());
        let ended = place.ended(&command.output().expect("the command starts"));
        let found: Value = serde_json::from_str(&ended.stdout).expect("one document");
        let of = |name: &str| found[name].to_string().replace('"', "");
        let trial = of("trial");
        assert_eq!(ended.status, Some(i32::from(trial != "passed")), "{trial}");
        let names = [
            "launcher",
            "engine",
            "rank",
            "world_size",
            "address_of_rank_0",
        ];
        (names.map(of).join("; "), trial)
    };
    let torchrun = [
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "n1"),
        ("MASTER_PORT", "29500"),
    ];
    let (found, trial) = launched(&torchrun);
    assert_eq!(found, "torchrun; tcp; 1; 4; n1:29500");
    assert_eq!(trial, "passed");
    let (pmi, trial) = launched(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]);
    if cfg!(feature = "mpi") {
        assert_eq!(pmi, "MPICH or Intel MPI; mpi; 1; 2; none");
        // No mpirun has started it. Open MPI ends a process that cannot start its helper.
        let told = [
            "MPI says that this process is rank 0 of 1",
            "its process has ended before it was done (",
        ];
        assert!(told.iter().any(|told| trial.contains(told)), "{trial}");
        return;
    }
    assert!(trial.starts_with("the engine tcp does not fit: PMI_SIZE asks"));
    assert!(
        pmi.starts_with("MPICH or Intel MPI; the engine tcp does not fit: PMI_SIZE asks")
            && pmi.ends_with("; 1; 2; none"),
        "{pmi}"
    );
}

#[test]
fn every_key_is_listed_with_its_type_default_and_meaning() {
    let place = Workplace::new();
    let listed = place.succeed("config --help-keys");
    for key in merak_trainer::keys() {
        assert!(
            listed.contains(&format!("\n{} = ", key.name)),
            "{}",
            key.name
        );
        assert!(listed.contains(key.doc), "{}", key.doc);
    }
    assert_eq!(place.succeed("config --help_keys"), listed);
    assert_eq!(
        place.succeed("config merak.toml --tp 2 --help-keys"),
        listed
    );
    let help = place.succeed("train --help");
    assert!(
        help.contains("`merak config --help-keys` lists them all"),
        "{help}"
    );
    assert_eq!(place.merak("config").status, Some(2));
    let narrow = merak_trainer::key_help(Some(80));
    assert!(
        narrow.lines().all(|line| line.chars().count() <= 80),
        "{narrow}"
    );
}

#[test]
fn the_page_of_keys_is_what_the_code_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/KEYS.md");
    let page = merak_trainer::key_page();
    if std::env::var_os("UPDATE_KEYS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap_or_default() == page,
        "run `UPDATE_KEYS=1 cargo test -p merak-trainer --test it the_page_of_keys`"
    );
}

#[test]
fn a_resumed_run_says_from_where_and_sizes_are_for_people() {
    let place = Workplace::new();
    let told = place.succeed("train merak.toml --max_steps 2");
    assert!(
        told.contains("KiB of activations at most on rank 0, predicted "),
        "{told}"
    );
    let resumed = place.merak("train merak.toml --max_steps 3 --resume latest");
    let line = "resumed from step 2 of run/checkpoints/step-00000002\n";
    assert!(resumed.stderr.contains(line), "{}", resumed.stderr);
}

#[test]
fn options_of_every_command_are_taken_with_dashes_and_with_underscores() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let texts = [
        "generate run --prompt-ids 5,6 --max-new-tokens 3 --top-k 1 --json",
        "generate run --prompt_ids 5,6 --max_new_tokens 3 --top_k 1 --json",
        "generate run --prompt_ids=5,6 --max_new_tokens=3 --top_k=1 --json",
    ];
    let texts = texts.map(|line| place.succeed(line));
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let dry = "train merak.toml --max-steps 2 --resume-from-checkpoint latest";
    let plan = place.succeed(&format!("{dry} --dry-run"));
    assert_eq!(place.succeed(&format!("{dry} --dry_run")), plan);
    assert_eq!(
        place.succeed("train merak.toml --dry_run --max_steps 2 --resume latest"),
        plan
    );
    place.succeed("bench gpt --layers 1 --hidden 8 --heads 1 --seq 4 --vocab 16 --steps 1 --batch 8 --virtual_stages 1");
}

#[test]
fn completions_and_help_are_printed() {
    let place = Workplace::new();
    let bash = place.succeed("completions bash");
    assert!(bash.contains("_merak()") && bash.contains("--dry-run"));
    assert_snapshot!(place.succeed("--help"), @r#"
    Trains and fine-tunes transformer models with data, tensor and pipeline parallelism

    Usage: merak [OPTIONS] <COMMAND>

    Commands:
      train        Trains a model
      launch       Starts a command as several processes of this machine, one for each rank
      evaluate     Evaluates a checkpoint on the validation part of the data
      predict      Writes what a checkpoint says of each sample of the data, as JSON lines
      tokenize     Writes the tokens of the data into files that training reads by range
      trace        Prints the graph of a model, as one rank runs it
      schedule     Prints a schedule and its figures, or checks one that is given as CSV
      config       Prints the resolved configuration and where each value came from
      generate     Continues prompts with a trained model
      doctor       Prints what this machine and this build can do, after a trial of two ranks
      bench        Measures this machine
      completions  Prints a completion script
      help         Print this message or the help of the given subcommand(s)

    Options:
          --log <FILTER>  What to log, as a tracing filter: `info`, `merak_trainer=debug` [env:
                          MERAK_LOG=] [default: warn,merak_mpu=error]
      -h, --help          Print help
      -V, --version       Print version
    "#);
}

#[test]
fn encoders_are_traced_split_and_cut_by_their_config_alone() {
    let place = Workplace::new();
    let sizes = r#""hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24"#;
    let bert = format!(r#"{{ "model_type": "bert", "vocab_size": 31, {sizes} }}"#);
    let vit = format!(r#"{{ "model_type": "vit", "image_size": 8, "patch_size": 4, {sizes} }}"#);
    let t5 = r#"{ "model_type": "t5", "vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
        "num_heads": 2 }"#;
    for (config, input) in [
        (&*bert, "attention_mask"),
        (&*vit, "pixel_values"),
        (t5, "decoder_input_ids"),
    ] {
        place.write("encoder.json", config);
        let whole = place.succeed("trace encoder.json --tp 2");
        assert!(whole.contains(&format!("= \"{input}\"")), "{whole}");
        assert!(whole.contains("all_reduce("), "{whole}");
        let stage = place.succeed("trace encoder.json --tp 2 --pp 2 --stage 1");
        assert!(
            stage.contains("cross_entropy(") && stage.contains("recv("),
            "{stage}"
        );
    }
}
