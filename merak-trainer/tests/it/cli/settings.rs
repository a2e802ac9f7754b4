//! Settings that would be easy to ignore.

use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
    sync::mpsc,
    thread,
    time::Duration,
};

use serde_json::json;

use super::{Ended, Workplace, model, weights::with_folder};

/// The tokens of each prompt's continuation.
fn generated(place: &Workplace, options: &str, variables: &[(&str, &str)]) -> Vec<u64> {
    let mut command = place.command(&format!("generate run --prompt-ids 101 --json {options}"));
    command.envs(variables.iter().copied());
    let ended = place.ended(&command.output().expect("the command starts"));
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let document: serde_json::Value = serde_json::from_str(&ended.stdout).expect("a document");
    let ids = document[0]["ids"].as_array().expect("a list of tokens");
    ids.iter().map(|id| id.as_u64().expect("a token")).collect()
}

#[test]
fn generation_takes_its_options_from_the_environment_too() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let greedy = generated(&place, "--temperature 0 --max-new-tokens 6", &[]);
    let variables = [("MERAK_TEMPERATURE", "0"), ("MERAK_MAX_NEW_TOKENS", "6")];
    assert_eq!(generated(&place, "", &variables), greedy);
    let drawn = generated(&place, "--max-new-tokens 6", &[("MERAK_SEED", "7")]);
    assert_eq!(drawn, generated(&place, "--max-new-tokens 6 --seed 7", &[]));
    assert_ne!(drawn, greedy);
    assert_eq!(
        drawn,
        generated(
            &place,
            "--seed 7 --max-new-tokens 6",
            &[("MERAK_SEED", "8")]
        )
    );
    let penalised = [
        ("MERAK_REPETITION_PENALTY", "50"),
        ("MERAK_TEMPERATURE", "0"),
    ];
    assert_ne!(generated(&place, "--max-new-tokens 6", &penalised), greedy);
    // The first token of the greedy continuation ends it.
    let end = greedy[0].to_string();
    let variables = [("MERAK_TEMPERATURE", "0"), ("MERAK_EOS_TOKEN_ID", &*end)];
    assert_eq!(generated(&place, "", &variables), greedy[..1]);
}

#[test]
fn a_generation_without_a_limit_goes_on_as_far_as_the_sequence_has_room() {
    let place = Workplace::new();
    let mut long = model();
    long["n_positions"] = 160.into();
    place.write("model.json", &long.to_string());
    place.succeed("train merak.toml --max_steps 1 --seq_length 160 --data.validation_fraction 0.2");
    let tokens = |variables: &_| generated(&place, "--min-new-tokens 159", variables).len();
    assert_eq!(tokens(&[]), 159);
    assert_eq!(tokens(&[("MERAK_OUT_SEQ_LENGTH", "140")]), 140);
}

#[test]
fn special_tokens_are_checked_against_the_vocabulary() {
    let place = Workplace::new();
    insta::assert_snapshot!(place.mistake("train merak.toml --eos_token_id 257"), @r#"error: "eos_token_id" is 257, but the model knows the tokens 0 to 256 only (command line --eos_token_id)"#);
    insta::assert_snapshot!(place.mistake("train merak.toml --pad_token_id 4294967296"), @r#"error: "pad_token_id" expects an integer from 0 to 4294967295 or none, found 4294967296 (command line --pad_token_id)"#);
    let mut json = model();
    json["pad_token_id"] = 300.into();
    json["eos_token_id"] = serde_json::json!([256, 101]);
    place.write("model.json", &json.to_string());
    let ended =
        place.merak("train merak.toml --overwrite_output_dir --max_steps 1 --pad_token_id 0");
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let ended = place.merak("train merak.toml --overwrite_output_dir --max_steps 1");
    assert!(
        ended.stderr.contains("tokens beyond its vocabulary"),
        "{}",
        ended.stderr
    );
}

#[test]
fn the_sample_at_the_end_of_a_training_ends_at_the_given_token() {
    let place = Workplace::new();
    let train =
        "train merak.toml --overwrite_output_dir --max_steps 1 --temperature 0 --max_new_tokens 8";
    let sample = |text: &str| {
        let (_, shown) = text.split_once(">>>\n").expect("a sample");
        let (_, new) = shown
            .split_once(">>>")
            .expect("a prompt and a continuation");
        new.split_once("<<<").expect("an end").0.to_owned()
    };
    let whole = sample(&place.succeed(train));
    assert_eq!(whole.chars().count(), 8, "{whole:?}");
    let first = u32::from(whole.chars().next().expect("a character"));
    let ended = sample(&place.succeed(&format!("{train} --eos_token_id {first}")));
    assert_eq!(ended.chars().count(), 1, "{ended:?}");
    // It also ends at the tokens that the model's folder names for generation; `config.json` counts
    // where it names none.
    let file = "generation_config.json";
    place.write(file, &format!("{{ \"eos_token_id\": [3, {first}] }}"));
    let ended = sample(&place.succeed(train));
    assert_eq!(ended.chars().count(), 1, "{ended:?}");
    place.write(file, "{ \"eos_token_id\": null }");
    assert_eq!(sample(&place.succeed(train)), whole);
}

#[test]
fn generation_follows_the_models_folder_or_says_what_it_leaves_out() {
    let place = with_folder(None);
    let line = "generate hf --prompt-ids 101 --temperature greedy --max-new-tokens 6";
    let generate = |stated: serde_json::Value, options: &str| {
        place.write("hf/generation_config.json", &stated.to_string());
        let document = place.document(&format!("{line} --json {options}"));
        let ids = document[0]["ids"].as_array().expect("a list of tokens");
        ids.iter()
            .map(|id| id.as_u64().expect("a token"))
            .collect::<Vec<_>>()
    };
    let free = generate(json!({}), "");
    let first = free[0];
    assert!(!generate(json!({ "suppress_tokens": [first] }), "").contains(&first));
    assert_eq!(generate(json!({ "eos_token_id": first }), ""), [first]);
    let other = (0..=free.len() as u64)
        .find(|id| !free.contains(id))
        .expect("a token");
    let ends = format!("--eos-token-id {other},{first}");
    assert_eq!(generate(json!({}), &ends), [first]);
    let ends = format!("--eos-token-id {other}");
    assert_eq!(generate(json!({ "eos_token_id": first }), &ends), free);
    let late = generate(json!({ "eos_token_id": first, "min_new_tokens": 3 }), "");
    assert!(late.len() > 3 && !late[..3].contains(&first), "{late:?}");
    let penalty = json!({ "repetition_penalty": 50.0 });
    assert_ne!(generate(penalty.clone(), ""), free);
    assert_eq!(generate(penalty, "--repetition-penalty 1"), free);
    let beams = json!({ "num_beams": 4, "no_repeat_ngram_size": 0, "temperature": 0.5, "top_p": 0.7,
        "bad_words_ids": [[3]], "do_sample": true });
    assert_eq!(generate(beams, ""), free);
    let ended = place.merak(line);
    let told = r#"not applied fields=["num_beams", "top_p", "bad_words_ids"]"#;
    assert!(ended.stderr.contains(told), "{}", ended.stderr);
    place.write("hf/generation_config.json", r#"{ "eos_token_id": "5" }"#);
    insta::assert_snapshot!(place.mistake(line), @r#"error: cannot parse the model configuration hf/generation_config.json: `eos_token_id` is "5", expected a token's number or a list of them ("model.config", command line CHECKPOINT)"#);
    // Without its configuration, it is nevertheless a folder of a model.
    std::fs::remove_file(place.path("hf/config.json")).expect("a removable file");
    insta::assert_snapshot!(place.mistake(line), @"error: cannot read hf/config.json: the file is missing");
}

#[test]
fn what_the_models_folder_says_of_lengths_and_draws_is_applied_or_told() {
    let place = with_folder(None);
    let lengths =
        |draws: bool| json!({ "max_new_tokens": 3, "max_length": 20, "do_sample": draws });
    let greedy = "--temperature greedy --max-new-tokens 6";
    for (stated, options, told) in [
        (lengths(false), greedy, ""),
        (lengths(true), greedy, ""),
        (lengths(false), "", r#"["max_new_tokens", "do_sample"]"#),
        (lengths(true), "", r#"["max_new_tokens"]"#),
        (json!({ "max_length": 20 }), "", r#"["max_length"]"#),
        (
            json!({ "max_new_tokens": 1024, "max_length": null }),
            "",
            "",
        ),
        (
            json!({ "do_sample": true }),
            "--num-beams 2",
            r#"["do_sample"]"#,
        ),
        (json!({ "top_k": "x" }), greedy, r#"["top_k"]"#),
    ] {
        place.write("hf/generation_config.json", &stated.to_string());
        let ended = place.merak(&format!("generate hf --prompt-ids 101 {options}"));
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        let (_, list) = ended
            .stderr
            .split_once("not applied fields=")
            .unwrap_or_default();
        assert_eq!(list.trim_end(), told, "{stated} {options}");
    }
}

#[test]
fn a_wrong_value_in_the_models_folder_is_refused_with_file_and_field() {
    let place = with_folder(None);
    let line = "generate hf --prompt-ids 101 --temperature greedy --max-new-tokens 6";
    let mut said = Vec::new();
    for stated in [
        json!({ "repetition_penalty": -3 }),
        json!({ "repetition_penalty": "x" }),
        json!({ "min_new_tokens": "3" }),
        json!({ "min_new_tokens": 3.5 }),
        json!({ "min_new_tokens": -5 }),
        json!({ "suppress_tokens": "x" }),
        json!({ "suppress_tokens": [5, 2.5] }),
        json!({ "eos_token_id": -1 }),
        json!({ "eos_token_id": [5, -1] }),
        json!([]),
    ] {
        place.write("hf/generation_config.json", &stated.to_string());
        let refused = place.mistake(line);
        let start = "error: cannot parse the model configuration hf/generation_config.json: ";
        let rest = refused.strip_prefix(start).expect("it names the file");
        let end = " (\"model.config\", command line CHECKPOINT)";
        said.push(
            rest.trim_end()
                .strip_suffix(end)
                .expect("and the key")
                .to_owned(),
        );
    }
    insta::assert_snapshot!(said.join("\n"), @r#"
    `repetition_penalty` is -3, expected a number above 0
    `repetition_penalty` is "x", expected a number above 0
    `min_new_tokens` is "3", expected a whole number of at least 0
    `min_new_tokens` is 3.5, expected a whole number of at least 0
    `min_new_tokens` is -5, expected a whole number of at least 0
    `suppress_tokens` is "x", expected a list of tokens' numbers
    `suppress_tokens` is [5,2.5], expected a list of tokens' numbers
    `eos_token_id` is -1, expected a token's number or a list of them
    `eos_token_id` is [5,-1], expected a token's number or a list of them
    it is [], expected an object of fields
    "#);
    // What the user says counts.
    let stated = json!({ "repetition_penalty": -3, "min_new_tokens": -5, "eos_token_id": -1 });
    place.write("hf/generation_config.json", &stated.to_string());
    let own = "--repetition-penalty 2 --min-new-tokens 1 --eos-token-id 3";
    place.succeed(&format!("{line} {own}"));
}

#[test]
fn another_seed_at_a_resume_is_told() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let ended = place.merak("train merak.toml --max_steps 2 --resume latest --seed 7");
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let told = [
        "the run goes on with the checkpoint's seed",
        "given=7",
        "kept=42",
    ];
    assert!(
        told.iter().all(|words| ended.stderr.contains(words)),
        "{}",
        ended.stderr
    );
    let silent = place.merak("train merak.toml --max_steps 3 --resume latest");
    assert!(!silent.stderr.contains("seed"), "{}", silent.stderr);
}

#[test]
fn a_text_ends_after_a_stop_and_may_be_shown_as_it_comes() {
    let place = Workplace::new();
    place.succeed("train merak.toml");
    let line = "generate run --prompt every --temperature 0 --max-new-tokens 12";
    let whole = place.document(&format!("{line} --json"));
    let text = whole[0]["text"].as_str().expect("a text").to_owned();
    assert_eq!(
        place.succeed(&format!("{line} --stream")).trim_end(),
        format!("every{text}").trim_end()
    );
    let stop = text.split_whitespace().next().expect("a word").to_owned();
    let stopped = place.document(&format!("{line} --json --stop {stop}"));
    assert_eq!(stopped[0]["reason"], "stop");
    let shorter = stopped[0]["text"].as_str().expect("a text");
    assert!(shorter.ends_with(&stop) && text.starts_with(shorter));
    insta::assert_snapshot!(place.mistake(&format!("{line} --prompt for --stream")), @"error: --stream prints the text of one prompt, and needs a tokenizer");
}

#[test]
fn a_text_begins_as_its_tokenizer_says_and_goes_on_with_a_space() {
    let place = with_folder(None);
    let name = |id: u32| match id {
        256 => "<s>".to_owned(),
        id => format!("\u{2581}w{id}"),
    };
    let vocab: serde_json::Map<_, _> = (0..257).map(|id| (name(id), id.into())).collect();
    let words = json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true });
    let tokenizer = json!({
        "added_tokens": [{ "id": 256, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true }],
        "pre_tokenizer": words, "decoder": words,
        "post_processor": { "type": "TemplateProcessing",
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [256], "tokens": ["<s>"] } } },
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "<s>" },
    });
    place.write("hf/tokenizer.json", &tokenizer.to_string());
    let line = "generate hf --temperature 0 --max-new-tokens 5";
    let found = place.document(&format!("{line} --json --prompt w7"));
    assert_eq!(found[0]["prompt_ids"], json!([256, 7]));
    let text = found[0]["text"].as_str().expect("a text");
    assert!(text.starts_with(" w"), "{text:?}");
    for option in ["", "--stream"] {
        let shown = place.succeed(&format!("{line} --prompt w7 {option}"));
        assert_eq!(shown.trim_end(), format!("w7{text}").trim_end(), "{option}");
    }
}

#[test]
fn options_of_generate_say_which_tokens_end_a_text_and_when_a_search_ends() {
    let place = with_folder(None);
    let line = "generate hf --prompt-ids 101 --max-new-tokens 2";
    let unknown = place.mistake(&format!("{line} --eos-token-id 3,257"));
    insta::assert_snapshot!(unknown, @r#"error: "eos_token_id" is 257, but the model knows the tokens 0 to 256 only (command line --eos-token-id)"#);
    let unknown = place.mistake(&format!("{line} --num-beams 2 --early-stopping soon"));
    for told in ["command line --early-stopping", r#"true, false or "never""#] {
        assert!(unknown.contains(told), "{unknown}");
    }
    let idle = r#""early_stopping" has no effect: "num_beams" is 1"#;
    for (when, is_idle) in [("true", true), ("never", true), ("false", false)] {
        for beams in [1, 2] {
            let options = format!("--num-beams {beams} --early-stopping {when}");
            let ended = place.merak(&format!("{line} {options}"));
            assert_eq!(ended.status, Some(0), "{options}: {}", ended.stderr);
            let told = ended.stderr.contains(idle);
            assert_eq!(told, is_idle && beams == 1, "{options}: {}", ended.stderr);
        }
    }
}

/// What `train` with `text_generation` prints for some lines of standard input.
fn prompted(place: &Workplace, options: &str, lines: &str) -> String {
    let ended = answered(place, options, lines);
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    ended.stdout
}

/// The same for a command that may fail.
pub(super) fn answered(place: &Workplace, options: &str, lines: impl AsRef<[u8]>) -> Ended {
    let line = format!("train merak.toml --text_generation --temperature 0 {options}");
    let mut command = place.command(&line);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    let mut stdin = child.stdin.take().expect("it was asked for");
    // The command may end before it has read all.
    let _ = stdin.write_all(lines.as_ref());
    drop(stdin);
    place.ended(&child.wait_with_output().expect("it ends"))
}

#[test]
fn text_generation_continues_lines_until_one_says_stop() {
    let place = Workplace::new();
    place.succeed("train merak.toml");
    let resumed = "--resume_from_checkpoint latest --max_new_tokens 9";
    let text = |prompt: &str| {
        let line =
            format!("generate run --prompt {prompt} --temperature 0 --max-new-tokens 9 --json");
        let document = place.document(&line);
        document[0]["text"].as_str().expect("a text").to_owned()
    };
    let expected = format!("{}\n{}\n", text("every"), text("rank"));
    let lines = "every\nrank\nstop\nnever\n";
    assert_eq!(prompted(&place, resumed, lines), expected);
    assert_eq!(
        prompted(&place, &format!("{resumed} --tp 2 --pp 2"), lines),
        expected
    );
    assert_eq!(
        prompted(&place, resumed, "every"),
        format!("{}\n", text("every"))
    );
    // An empty line has an empty answer, and so has a line that cannot be continued, which changes
    // the exit status.
    let answers = format!("\n{}\n", text("every"));
    let options = format!("{resumed} --dp 2");
    assert_eq!(prompted(&place, &options, "\r\nevery\n"), answers);
    let long = "too long ".repeat(9);
    let ended = answered(&place, &options, format!("{long}\nevery\n"));
    assert_eq!((ended.status, ended.stdout), (Some(2), answers));
    let told = "so that there is room for a new one";
    assert!(ended.stderr.contains(told), "{}", ended.stderr);
    // A line that is no text does not change the status.
    let ended = answered(&place, resumed, b"\xff\nevery\n");
    assert_eq!(ended.status, Some(0));
    assert!(ended.stdout.ends_with(&format!("\n{}\n", text("every"))));
    let end: String = text("every").chars().take(3).collect();
    let stopped = prompted(
        &place,
        &format!("{resumed} --stop_strings={end}"),
        "every\n",
    );
    assert_eq!(stopped.trim_end(), end.trim_end());
    insta::assert_snapshot!(place.mistake("train merak.toml --text_generation --stop_strings [\"\"]"), @r#"error: "stop_strings" is an empty string (command line --stop_strings), but must be strings of at least one character: every text ends in an empty one"#);
}

#[test]
fn a_line_is_answered_before_the_next_one_is_written() {
    let place = Workplace::new();
    place.succeed("train merak.toml");
    let resumed = "--resume_from_checkpoint latest --max_new_tokens 9";
    let expected = prompted(&place, resumed, "every\nrank\n");
    assert_eq!(expected.lines().count(), 2, "{expected}");
    let line = format!("train merak.toml --text_generation --temperature 0 {resumed}");
    let mut command = place.command(&line);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().expect("the command starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let (sender, answers) = mpsc::channel();
    thread::spawn(move || {
        stdout
            .split(b'\n')
            .try_for_each(|answer| sender.send(answer))
    });
    for (prompt, expected) in ["every", "rank"].into_iter().zip(expected.lines()) {
        writeln!(stdin, "{prompt}").expect("the command reads");
        let answer = answers.recv_timeout(Duration::from_secs(40));
        if answer.is_err() {
            child.kill().expect("it can be killed");
        }
        let answer = answer.expect("an answer to this line alone");
        let answer = answer.expect("it can be read");
        assert_eq!(String::from_utf8_lossy(&answer), expected);
    }
    drop(stdin);
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn a_training_that_do_train_switches_off_and_a_warmup_beyond_the_run_are_told() {
    let place = Workplace::new();
    let ended = place.merak("train merak.toml --max_steps 1 --do_train false");
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("do_train is false, but this command trains")
            && ended.stderr.contains("--do_train"),
        "{}",
        ended.stderr
    );
    let resolved = std::fs::read_to_string(place.path("run/config.resolved.toml")).unwrap();
    assert!(resolved.contains("do_train = true"), "{resolved}");
    let warning = |keys: &str| {
        let shown = place.succeed(&format!("train merak.toml --dry-run {keys}"));
        let warnings = shown.lines().filter(|line| line.contains("warmup"));
        warnings.map(str::to_owned).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(warning("--warmup_steps 9"), @r#"warning: the warmup takes 9 steps and the run 5: the learning rate never reaches "learning_rate", 0.01"#);
    assert_eq!(warning("--warmup_steps 4"), "");
    assert_eq!(warning("--warmup_steps 9 --lr_scheduler_type constant"), "");
    let ended =
        place.merak("train merak.toml --overwrite_output_dir --max_steps 1 --do_train true");
    assert!(!ended.stderr.contains("do_train"), "{}", ended.stderr);
    // A negative norm clips nothing.
    place.succeed("train merak.toml --overwrite_output_dir --max_steps 1 --max_grad_norm -1");
}

#[test]
fn microbatches_of_one_sample_train_without_overlap_which_a_warning_says() {
    let place = Workplace::new();
    let line =
        "train merak.toml --overwrite_output_dir --max_steps 1 --tp 2 --tp_overlapping_level 2";
    let told = |samples: usize| {
        let ended = place.merak(&format!("{line} --per_device_train_batch_size {samples}"));
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        let warning = "\"tp_overlapping_level\" 0 is used: \"per_device_train_batch_size\" is 1";
        (ended.stderr.matches(warning).count(), ended.stderr)
    };
    for (samples, times) in [(1, 1), (2, 0)] {
        let (count, log) = told(samples);
        assert_eq!(count, times, "{log}");
    }
    let foreseen = place.succeed(&format!("{line} --per_device_train_batch_size 1 --dry-run"));
    let warning = "warning: \"tp_overlapping_level\" 0 is used: ";
    assert!(foreseen.contains(warning), "{foreseen}");
}

#[test]
fn a_target_of_an_adapter_that_no_layer_has_is_told_once() {
    let place = Workplace::new();
    let lora = r#"{"r": 2, "target_modules": ["c_attn", "c_fcc"]}"#;
    place.write("lora.json", lora);
    let line = "train merak.toml --max_steps 1 --tp 2 --lora_config lora.json";
    let warning = "no layer is \"c_fcc\" of the `target_modules`; did you mean \"c_fc\"?";
    let foreseen = place.succeed(&format!("{line} --dry-run"));
    let foretold = format!("warning: {warning}");
    assert_eq!(foreseen.matches(&foretold).count(), 1, "{foreseen}");
    let ended = place.merak(line);
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches(warning).count(), 1, "{}", ended.stderr);
}

#[test]
fn a_split_point_within_a_leaf_module_is_told_with_the_cut_that_is_made() {
    let place = Workplace::new();
    let leaves = "--split_method layer_split --leaf_modules transformer.h.1";
    let warnings = |points: &str| {
        let line =
            format!("train merak.toml --dry-run --pp 2 {leaves} --custom_split_points {points}");
        let shown = place.succeed(&line);
        let warnings = shown.lines().filter(|line| line.contains("split point \""));
        warnings.map(str::to_owned).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(warnings("transformer.h.1.mlp,transformer.h.3"), @r#"warning: the split point "transformer.h.1.mlp" lies within the leaf module "transformer.h.1": the cut is behind it, before "transformer.h.2.ln_1.layer_norm""#);
    assert_eq!(warnings("transformer.h.1,transformer.h.3"), "");
}

#[test]
fn a_plan_names_the_schedule_that_would_be_faster_and_the_key_for_it() {
    let place = Workplace::new();
    let command = "train merak.toml --dry-run --pp 2 --gradient_accumulation_steps 2 --activation_checkpointing false";
    // Weights are most of the memory.
    let mut json = model();
    json["n_embd"] = 64.into();
    place.write("model.json", &json.to_string());
    let faster = |keys: &str| {
        let shown = place.succeed(&format!("{command} {keys}"));
        let lines = shown.lines().filter(|line| line.starts_with("faster"));
        lines.map(str::to_owned).collect::<Vec<_>>().join("\n")
    };
    let line = faster("");
    assert!(
        line.starts_with("faster    zb_h1 would shorten a step by ")
            && line.contains(" %, by operation counts, in at most 10 % more memory (")
            && line
                .contains("): set \"train_schedule\" to \"zb_h1\" (schedules with other numbers")
            && line.ends_with(" of stages per rank are not compared)"),
        "{line}"
    );
    assert_eq!(faster("--train_schedule zb_h1"), "");
    assert_eq!(faster("--train_schedule auto"), "");
    assert_eq!(faster("--pp 1"), "");
}
