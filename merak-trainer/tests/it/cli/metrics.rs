//! The records of a run, field by field.

use std::fs;

use serde_json::Value;

use super::{Workplace, families::objects};

/// The records of steps; those of evaluations have no `loss`.
fn records(place: &Workplace) -> Vec<Value> {
    let mut records = objects(place, "run/metrics.jsonl");
    records.retain(|record| record.get("loss").is_some());
    records
}

fn numbers(records: &[Value], field: &str) -> Vec<f64> {
    records
        .iter()
        .map(|record| record[field].as_f64().expect("a number"))
        .collect()
}

/// Whether each number is greater than the one before.
fn rises(numbers: &[f64]) -> bool {
    numbers.is_sorted_by(|a, b| a < b)
}

/// Operations per second follow from tokens per second by one factor.
fn assert_same_work(tflops: &[f64], speeds: &[f64]) {
    let flops = tflops.iter().zip(speeds);
    let flops: Vec<_> = flops.map(|(tflops, speed)| tflops * 1e12 / speed).collect();
    let is_same = |f: &f64| (f / flops[0] - 1.0).abs() < 1e-9 && *f > 0.0;
    assert!(flops.iter().all(is_same), "{flops:?}");
}

#[test]
fn records_say_what_is_documented_and_go_on_in_a_resumed_run() {
    let place = Workplace::new();
    // Five steps of 4 samples of 16 tokens; the learning rate falls by 0.01 / 8 a step.
    let line = "train merak.toml --peak_flops 1e12 --max_steps 8 --save_steps 5 --logging_steps";
    place.succeed(&format!("{line} 1"));
    let each = records(&place);
    assert_eq!(numbers(&each, "step"), [1., 2., 3., 4., 5., 6., 7., 8.]);
    fs::remove_dir_all(place.path("run")).expect("a removable folder");

    place.succeed(&format!("{line} 2"));
    let some = records(&place);
    assert_eq!(numbers(&some, "step"), [1., 2., 4., 6., 8.]);
    assert_eq!(numbers(&some, "tokens"), [64., 128., 256., 384., 512.]);
    for record in &some {
        let step = record["step"].as_u64().expect("a number");
        let same = each.iter().find(|other| other["step"] == step);
        // Figures of the step itself, however often steps are recorded.
        for field in ["loss", "grad_norm", "lr", "tokens"] {
            assert_eq!(
                record[field],
                same.expect("a record")[field],
                "{field} of {step}"
            );
        }
        let lr = 0.01 * (9 - step) as f64 / 8.0;
        assert!((record["lr"].as_f64().expect("a number") - lr).abs() < 1e-12);
        assert!(
            record["memory_bytes"]
                .as_u64()
                .is_none_or(|bytes| bytes > 1 << 20)
        );
        assert!(record["loss_scale"].is_null() && record["skipped_steps"] == 0);
        let number = |field: &str| record[field].as_f64().expect("a number");
        // Four samples of 16 tokens a step; the peak is 1 TFLOP/s.
        assert!((number("tokens_per_s") / number("samples_per_s") - 16.0).abs() < 1e-9);
        assert!((number("samples_per_s") * number("step_time_s") - 4.0).abs() < 1e-9);
        assert!((number("tflops") / number("mfu") - 1.0).abs() < 1e-9);
        assert!((0.0..number("step_time_s")).contains(&number("data_wait_s")));
    }
    let times = numbers(&some, "time_s");
    assert!(rises(&times) && times[0] > 0.0, "{times:?}");
    let (speeds, tokens) = (numbers(&some, "tokens_per_s"), numbers(&some, "tokens"));
    for (n, speed) in speeds.iter().enumerate().skip(1) {
        // The steps since the last record lie between the two.
        let tokens = tokens[n] - tokens[n - 1];
        let most = times[n] - times[n - 1];
        assert!(
            speed * most >= tokens,
            "{tokens} tokens in {most} s at {speed}"
        );
    }
    assert_same_work(&numbers(&some, "tflops"), &speeds);

    // From step 5 on with half the batch: what was counted stays, the rest is of the new size.
    fs::remove_dir_all(place.path("run/checkpoints/step-00000008")).expect("a removable folder");
    let resume = "--resume auto --gradient_accumulation_steps 2";
    place.succeed(&format!("{line} 2 {resume}"));
    let resumed = records(&place);
    assert_eq!(numbers(&resumed, "step"), [1., 2., 4., 6., 8.]);
    assert_eq!(numbers(&resumed, "tokens"), [64., 128., 256., 352., 416.]);
    assert_eq!(resumed[..3], some[..3]);
    assert!(rises(&numbers(&resumed, "time_s")));
}

#[test]
fn the_share_of_the_peak_is_of_products_measured_before_the_run() {
    let place = Workplace::new();
    let said = place.succeed("train merak.toml");
    let share = numbers(&records(&place), "mfu");
    assert!(
        share.iter().all(|share| (0.0..1.5).contains(share)),
        "{share:?}"
    );
    assert!(
        said.contains("the speed of f32 products measured before the run"),
        "{said}"
    );
    let refused = place.mistake("train merak.toml --peak_flops 0");
    insta::assert_snapshot!(refused, @r#"error: "peak_flops" is 0 (command line --peak_flops), but must be more than 0"#);
}

#[cfg(feature = "tch")]
mod tch {
    use super::{Workplace, numbers, records};

    #[test]
    fn records_of_a_run_in_f16_have_the_loss_scale_of_each_step() {
        let place = Workplace::new();
        place.succeed(
            "train merak.toml --compute.backend tch --fp16 --initial_scale_power 8 --loss_scale_window 2 --max_steps 6 \
             --logging_steps 1",
        );
        let records = records(&place);
        let scales = numbers(&records, "loss_scale");
        assert_eq!(scales, [256., 256., 512., 512., 1024., 1024.]);
    }
}

/// The commands take the weights, or with `--ema` the averages, of which a run has recorded this.
fn expect_averages(place: &Workplace, recorded: &Value) {
    for (option, name) in [("", "eval_loss"), ("--ema", "eval_ema_loss")] {
        let recorded = recorded[name].as_f64().expect("a loss");
        for command in [
            "evaluate merak.toml run",
            "predict merak.toml run -o lines.jsonl --part validation",
        ] {
            let found = place.document(&format!("{command} --json {option}"));
            let found = found["eval_loss"].as_f64().expect("a loss");
            assert!(
                (found - recorded).abs() < 1e-6,
                "{command} {option}: {found} {recorded}"
            );
        }
    }
    place.succeed("generate run --prompt-ids 101 --max-new-tokens 2 --ema");
}

#[test]
fn averages_of_the_weights_are_evaluated_recorded_and_judged() {
    let place = Workplace::new();
    let keys = "--do_eval --eval_steps 2 --max_steps 4 --ema_decay 0.5";
    let judged = "--load_best_model_at_end --metric_for_best_model ema_loss";
    let shown = place.merak(&format!("train merak.toml {keys} {judged}"));
    assert_eq!(shown.status, Some(0), "{}", shown.stderr);
    let told = format!("{}{}", shown.stdout, shown.stderr);
    assert_eq!(told.matches(", of the average ").count(), 2, "{told}");
    let text = fs::read_to_string(place.path("run/metrics.jsonl")).expect("the records of a run");
    let records = text.lines().map(serde_json::from_str::<Value>);
    let records = records.map(|record| record.expect("one object a line"));
    let evaluated: Vec<_> = records
        .filter(|record| record.get("eval_loss").is_some())
        .collect();
    assert_eq!(numbers(&evaluated, "step"), [2., 4.]);
    let perplexities = numbers(&evaluated, "eval_ema_perplexity");
    for (loss, perplexity) in numbers(&evaluated, "eval_ema_loss")
        .iter()
        .zip(perplexities)
    {
        assert!((loss.exp() / perplexity - 1.0).abs() < 1e-9, "{text}");
    }
    expect_averages(&place, &evaluated[1]);
    let resume = |keys: &str| {
        let line = format!("train merak.toml --resume latest --max_steps 5 --dry-run {keys}");
        let ended = place.merak(&line);
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        ended.stderr
    };
    let dropped = "the checkpoint's averages of the weights are dropped";
    assert!(resume("").contains(dropped));
    assert!(!resume("--ema_decay 0.9").contains("averages of the weights"));
    let anew = "\"no_load_optim\" leaves the checkpoint's averages of the weights out as well";
    assert!(resume("--ema_decay 0.9 --no_load_optim").contains(anew));
    assert!(!resume("--no_load_optim").contains("averages of the weights"));
    place.succeed("train merak.toml --overwrite_output_dir --max_steps 1");
    for line in [
        "evaluate merak.toml run --ema --tp 2",
        "predict merak.toml run -o never --ema",
        "generate run --prompt-ids 101 --ema",
    ] {
        let told = place.mistake(line);
        assert!(told.contains("it has no averages of its weights"), "{told}");
    }
    assert!(!place.path("never").exists());
    let started = "the checkpoint has no averages of the weights: they start as its weights";
    assert!(resume("--ema_decay 0.9").contains(started));
    let unknown = place.mistake(&format!("train merak.toml --dry-run --do_eval {judged}"));
    let known = "but an evaluation gives eval_loss or eval_perplexity";
    assert!(unknown.contains(known), "{unknown}");
}
