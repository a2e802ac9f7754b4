//! Plans without data, for this machine and others, and the degrees that are the fastest.

use std::fs;

use insta::assert_snapshot;
use merak_pipe::ScheduleKind;
use serde_json::Value;

use super::{Workplace, keys};

/// Devices for which a small model is large, two on a host.
const CLUSTER: &str = "ranks_per_host = 2\nmemory_bytes = 1_000_000_000\nflops_per_s = 1e9\nmemory_bytes_per_s = 1e10\n\
                       [inside]\nlatency_s = 1e-6\nbytes_per_s = 1e9\n[between]\nlatency_s = 1e-5\nbytes_per_s = 1e8\n";

fn workplace() -> Workplace {
    let place = Workplace::new();
    place.write("cluster.toml", CLUSTER);
    // A plan needs none of the data.
    fs::remove_dir_all(place.path("text")).expect("the texts are there");
    place
}

#[test]
fn a_plan_is_made_without_data_and_says_where_layers_are_and_how_long_a_step_takes() {
    let place = workplace();
    let counted = place.succeed("plan merak.toml --pp 2 --dp 2");
    for part in [
        "ranks     4 = dp 2 x tp 1 x pp 2, 1 compute threads each",
        "transformer.h.0-",
        " of the pipeline needs most, up to ",
    ] {
        assert!(counted.contains(part), "{part}: {counted}");
    }
    assert!(!counted.contains("ms a step predicted"), "{counted}");
    let elsewhere = place.succeed("plan merak.toml --pp 2 --dp 2 --cluster cluster.toml");
    for part in ["a device each", "ms a step predicted", "of 954 MiB"] {
        assert!(elsewhere.contains(part), "{part}: {elsewhere}");
    }
    let mut measured = place.command("plan merak.toml --pp 2 --cost_cache costs.json");
    measured.env("MERAK_COST_MODEL", "measured");
    let measured = place.ended(&measured.output().expect("the command starts"));
    assert!(
        measured.stdout.contains("by times measured just now"),
        "{} {}",
        measured.stdout,
        measured.stderr
    );
    assert!(place.path("costs.json").is_file());
    assert!(!place.path("run").exists());
}

#[test]
fn a_plan_is_one_document_or_a_page() {
    let place = workplace();
    let plan =
        place.document("plan merak.toml --json --pp 2 --cluster cluster.toml --html plan.html");
    assert_snapshot!(keys(&plan).join(" "), @"family parameters degrees per_device_train_batch_size gradient_accumulation_steps seq_length target_length train_schedule virtual_stages activation_checkpointing partition memory fits step");
    assert_eq!(
        keys(&plan["step"]).join(" "),
        "step_s pipeline_s update_s bubble by"
    );
    assert_eq!(
        plan["partition"]["stages"].as_array().map(Vec::len),
        Some(2)
    );
    assert_eq!(plan["memory"].as_array().map(Vec::len), Some(2));
    let page = fs::read_to_string(place.path("plan.html")).expect("it was written");
    for part in [
        "<h2>Pipeline</h2>",
        "<h2>Plan</h2>",
        "times of the described cluster",
        "transformer.h.0",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    for part in ["Curves", "steps recorded", "follows at the end"] {
        assert!(!page.contains(part), "{part}: {page}");
    }
    let counted = place.document("plan merak.toml --json");
    assert_eq!(counted["step"], Value::Null);
}

/// The steps of every way to share out four ranks, under every schedule, each planned by itself,
/// with eight samples.
fn by_hand(place: &Workplace) -> Vec<(String, f64)> {
    let mut all = Vec::new();
    for [dp, tp, pp, sp] in [
        [4, 1, 1, 1],
        [2, 2, 1, 1],
        [2, 1, 2, 1],
        [2, 1, 1, 2],
        [1, 2, 2, 1],
        [1, 1, 2, 2],
        [1, 1, 4, 1],
    ] {
        let schedules = ScheduleKind::ALL.into_iter();
        let schedules = schedules.filter(|kind| kind.is_training());
        let schedules: Vec<_> = schedules
            .take(if pp == 1 { 1 } else { usize::MAX })
            .collect();
        for (batch, schedule) in [1, 2, 4, 8]
            .into_iter()
            .filter(|batch| batch * dp <= 8)
            .flat_map(|batch| schedules.iter().map(move |schedule| (batch, schedule)))
        {
            let line = format!(
                "--dp {dp} --tp {tp} --pp {pp} --sp {sp} --per_device_train_batch_size {batch} \
                 --gradient_accumulation_steps {} --activation_checkpointing false --train_schedule {schedule}",
                8 / dp / batch
            );
            let ended = place.merak(&format!(
                "plan merak.toml --json --cluster cluster.toml {line}"
            ));
            // Some schedules need other sizes.
            if ended.status == Some(0) {
                let plan: Value = serde_json::from_str(&ended.stdout).expect("one document");
                let step = plan["step"]["step_s"].as_f64();
                all.push((line, step.expect("times are known")));
            }
        }
    }
    all
}

#[test]
fn a_search_finds_the_shortest_step_of_all_ways_to_share_out_the_ranks() {
    let place = workplace();
    // Degrees of the configuration itself count for nothing, except in its samples of a step.
    let text = fs::read_to_string(place.path("merak.toml")).expect("it is there");
    let text = text.replace("_batch_size = 1", "_batch_size = 2");
    place.write("eight.toml", &format!("sp = 2\ntp = 2\n{text}"));
    let line = "plan eight.toml --world 4 --cluster cluster.toml --json";
    let found = place.document(line);
    let fitting = found["search"]["fitting"].as_array().expect("a list");
    let steps: Vec<_> = fitting
        .iter()
        .filter_map(|one| one["step_s"].as_f64())
        .collect();
    assert!(steps.is_sorted(), "{steps:?}");
    let best = found["step"]["step_s"].as_f64().expect("times are known");
    assert_eq!(best.to_bits(), steps[0].to_bits());
    let by_hand = by_hand(&place);
    assert!(by_hand.len() > 100, "{}", by_hand.len());
    for (line, step) in &by_hand {
        assert!(best <= *step, "{line} takes {step}, and {best} was found");
    }
    // Its options give the same plan, and its steps have as many samples.
    let text = place.succeed(&line.replace(" --json", ""));
    let take = text.lines().find_map(|line| line.strip_prefix("take"));
    let take = take.expect("it says what to take").trim();
    let again = format!("plan eight.toml --cluster cluster.toml --json {take}");
    let again = place.document(&again);
    assert_eq!(again["step"], found["step"]);
    let of = |key: &str| again[key].as_u64().expect("a number");
    let dp = again["degrees"]["dp"].as_u64().expect("a number");
    assert_eq!(
        of("per_device_train_batch_size") * of("gradient_accumulation_steps") * dp,
        8
    );
    // A schedule that the user names stays.
    let named = place.document(&format!("{line} --train_schedule gpipe"));
    let named = named["search"]["fitting"]
        .as_array()
        .expect("a list")
        .iter();
    let mut schedules = named.map(|one| &one["train_schedule"]);
    assert!(schedules.all(|schedule| schedule == "gpipe"));
}

#[test]
fn a_search_keeps_the_degrees_of_the_command_line() {
    let place = workplace();
    let line = "plan merak.toml --world 4 --cluster cluster.toml";
    let found = place.document(&format!("{line} --json --tp 2"));
    let fitting = found["search"]["fitting"].as_array().expect("a list");
    assert!(!fitting.is_empty());
    assert!(fitting.iter().all(|one| one["degrees"]["tp"] == 2));
    assert_snapshot!(place.mistake(&format!("{line} --tp 3 --dp 2")), @"error: the model cannot be planned for 4 ranks: no degrees with dp 2 and tp 3, as the command line says, give that number, divide the samples of a step and keep the ranks of tp and sp on a host");
}

#[test]
fn ranks_that_share_a_layer_or_a_sequence_stay_on_a_host() {
    let place = workplace();
    let cluster = CLUSTER.replace("ranks_per_host = 2", "ranks_per_host = 3");
    place.write("odd.toml", &cluster);
    let found = place.document("plan merak.toml --world 4 --cluster odd.toml --json");
    let fitting = found["search"]["fitting"]
        .as_array()
        .expect("a list")
        .iter();
    let shared = fitting.map(|one| (&one["degrees"]["tp"], &one["degrees"]["sp"]));
    // Ranks 2 and 3 would be on two hosts.
    assert!(shared.clone().count() > 0);
    for (tp, sp) in shared {
        assert_eq!((tp.as_u64(), sp.as_u64()), (Some(1), Some(1)));
    }
}

#[test]
fn a_plan_has_the_lengths_of_the_run() {
    let place = Workplace::new();
    place.write(
        "t5.json",
        &serde_json::json!({ "model_type": "t5", "vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
            "num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0 }).to_string(),
    );
    let t5 = "merak.toml --model.config t5.json --seq_length 32";
    let batch = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("batch"));
        line.expect("it tells the batch").to_owned()
    };
    let run = batch(&place.succeed(&format!("train {t5} --dry-run")));
    assert!(run.contains(" to write"), "{run}");
    assert_eq!(batch(&place.succeed(&format!("plan {t5}"))), run);
}

#[test]
fn a_search_recomputes_only_where_memory_is_short() {
    let place = workplace();
    let with_memory = |bytes: u64, more: &str| {
        let cluster = CLUSTER.replace("1_000_000_000", &bytes.to_string());
        place.write("small.toml", &cluster);
        let samples = "--per_device_train_batch_size 32 --gradient_accumulation_steps 1";
        format!("plan merak.toml --world 2 --cluster small.toml --json {samples} {more}")
    };
    let recomputes = |document: &Value| -> Vec<bool> {
        let fitting = document["search"]["fitting"].as_array().expect("a list");
        let each = fitting.iter().map(|one| &one["activation_checkpointing"]);
        each.filter_map(Value::as_bool).collect()
    };
    let roomy = place.document(&with_memory(1 << 30, ""));
    assert!(
        recomputes(&roomy).iter().all(|recomputes| !recomputes),
        "{roomy:#}"
    );
    let bytes = |document: &Value, at: &str| document["search"][at][0]["rank_bytes"].as_u64();
    let least = roomy["search"]["fitting"]
        .as_array()
        .expect("a list")
        .iter();
    let least = least.filter_map(|one| one["rank_bytes"].as_u64()).min();
    let tight = place.document(&with_memory(least.expect("some fit") - 1, ""));
    assert!(
        !recomputes(&tight).is_empty() && recomputes(&tight).iter().all(|recomputes| *recomputes)
    );
    // Set by the user, it stays.
    let set = place.mistake(&with_memory(
        least.expect("some fit") - 1,
        "--activation_checkpointing false",
    ));
    assert!(
        set.contains("no way to share out 2 ranks fits into the "),
        "{set}"
    );
    assert!(bytes(&tight, "fitting") < least);
    // A plan alone is made all the same, and says so.
    let line = with_memory(1000, "").replace("--world 2", "");
    assert_eq!(place.document(&line)["fits"], false);
    let text = place.succeed(&line.replace("--json", ""));
    let warning = "warning: that is more than a device of the cluster has";
    assert!(text.contains(warning), "{text}");
}

#[test]
fn what_a_plan_cannot_use_is_told() {
    let place = workplace();
    assert_snapshot!(place.mistake("plan merak.toml --cluster cluser.toml"), @r#"error: cannot read cluser.toml: No such file or directory (os error 2); did you mean "cluster.toml"?"#);
    place.write("odd.toml", &CLUSTER.replace("flops_per_s", "flop_per_s"));
    assert_snapshot!(place.mistake("plan merak.toml --cluster odd.toml"), @r#"error: odd.toml describes no cluster: a cluster has no flop_per_s; did you mean "flops_per_s"?"#);
    place.write(
        "none.toml",
        &CLUSTER.replace("ranks_per_host = 2", "ranks_per_host = \"two\""),
    );
    assert_snapshot!(place.mistake("plan merak.toml --cluster none.toml"), @r#"error: none.toml describes no cluster: ranks_per_host is "two", expected a number"#);
    assert_snapshot!(place.mistake("plan merak.toml --cluster merak.toml"), @r#"error: merak.toml describes no cluster: output_dir is "run", expected a number"#);
    assert_snapshot!(place.mistake("plan merak.toml --dp 2 --world 0"), @r#"error: --world: "0": expected a whole number of at least 1"#);
    assert_snapshot!(place.mistake("plan merak.toml --world 2"), @r#"error: "cost_model" is counted (in a search on this machine), but must be measured, or a description of a cluster gives the times"#);
    assert_snapshot!(place.mistake("plan merak.toml --world 9973 --cluster cluster.toml"), @r#"error: the model cannot be planned for 9973 ranks: with dp 1 x tp 1 x pp 9973, the model has 4 layers, fewer than the 9973 stages that "pp" asks for: choose at most 4"#);
    // Backends that are not in this build can be planned for elsewhere alone.
    if !cfg!(feature = "tch") {
        let tch = "--compute.backend tch --compute.device cuda";
        assert!(
            place
                .mistake(&format!("plan merak.toml {tch}"))
                .contains("is not in this build")
        );
        place.succeed(&format!("plan merak.toml --cluster cluster.toml {tch}"));
    }
}
