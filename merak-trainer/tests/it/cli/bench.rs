//! Measurements, a line of JSON each.

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::{Workplace, keys, launch::end};

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
    place.write("out/checkpoints/latest", "mine");
    let line = format!("bench save out {shape} --steps 2 --dp 2 --zero 1");
    let line: Value = serde_json::from_str(&place.succeed(&line)).expect("one object");
    for figure in ["save_ms", "stall_ms", "stall_share", "step_ms", "bytes"] {
        assert!(line[figure].as_f64() > Some(0.0), "{figure} in {line}");
    }
    assert!(line["steps_meanwhile"].as_f64() >= Some(1.0), "{line}");
    // What is there stays, and nothing else is left.
    let left = super::files(&place.path("out"));
    assert_eq!(left.len(), 1, "{left:?}");
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
    let negative = place.mistake("bench collectives --world -1");
    let told = "invalid value '-1' for '--world <WORLD>': expected a whole number of at least 0";
    assert!(negative.contains(told), "{negative}");
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
