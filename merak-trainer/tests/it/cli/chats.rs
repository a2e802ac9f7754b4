//! Chats and instructions: answers alone are learned, with the tokenizer's own template.

use std::{fs, path::Path};

use merak_ckpt::{Checkpoint, ExportOptions, export_hf};
use serde_json::{Value, json};

use super::{
    Workplace,
    families::{assert_close, bert, gpt2, losses, objects, trained},
};

const TEMPLATE: &str = "{% for message in messages %}\n{% if message.role not in ['user', 'assistant'] %}\n\
{{- raise_exception('the role ' ~ message.role ~ ' is unknown') }}\n{% endif %}\n\
{{- '<' + message.role + '>' + message.content + '\\n' }}\n{% endfor %}\n\
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}";

/// A workplace with chats, a template and a model that knows bytes.
fn place(records: &str) -> Workplace {
    let place = Workplace::new();
    let mut model = gpt2();
    model["vocab_size"] = 258.into();
    place.write("model.json", &model.to_string());
    place.write("chat.jinja", TEMPLATE);
    place.write("chats.jsonl", records);
    place.write(
        "lora.json",
        &json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0 }).to_string(),
    );
    place.write(
        "merak.toml",
        "output_dir = \"run\"\nseq_length = 32\nmax_steps = 3\nper_device_train_batch_size = 1\n\
         gradient_accumulation_steps = 4\nlogging_steps = 1\nlearning_rate = 0.01\nsave = true\n\n\
         [model]\nconfig = \"model.json\"\n\n[data]\npath = \"chats.jsonl\"\nformat = \"jsonl\"\n\
         chat_template = \"chat.jinja\"\nvalidation_fraction = 0.25\n\n[compute]\nthreads_per_rank = 1\n\n\
         [distributed]\ntimeout_s = 20\n",
    );
    place
}

fn lines(record: impl Fn(usize) -> Value) -> String {
    let lines: Vec<_> = (0..16).map(|i| record(i).to_string()).collect();
    lines.join("\n") + "\n"
}

fn talk(i: usize) -> Value {
    let answer = ["yes", "no"][i % 2];
    json!({ "messages": [
        { "role": "user", "content": format!("{i}?") },
        { "role": "assistant", "content": answer },
    ]})
}

#[test]
fn chats_are_learned_alike_on_every_topology_and_by_an_adapter() {
    let place = place(&lines(talk));
    let alone = trained(&place, "");
    assert_eq!(alone.len(), 3);
    assert_eq!(trained(&place, "--pp 2"), alone);
    for ranks in ["--tp 2", "--dp 2 --gradient_accumulation_steps 2"] {
        assert_close(&trained(&place, ranks), &alone, 1e-4, ranks);
    }
    // The checkpoint takes the template along.
    let kept = fs::read_to_string(place.path("run/checkpoints/step-00000003/chat_template.jinja"));
    assert_eq!(kept.ok().as_deref(), Some(TEMPLATE));
    let adapted = trained(&place, "--lora_config lora.json");
    assert!(adapted.iter().all(|loss| loss.is_finite()), "{adapted:?}");
    assert!(place.path("run/adapter/adapter_config.json").is_file());
}

#[test]
fn what_lies_beside_a_tokenizer_goes_with_the_checkpoint() {
    let place = place(&lines(talk));
    trained(&place, "--max_steps 1");
    let saved = place.path("run/checkpoints/step-00000001");
    fs::create_dir(place.path("tok")).expect("a writable folder");
    let copied = fs::copy(
        saved.join("tokenizer.json"),
        place.path("tok/tokenizer.json"),
    );
    copied.expect("the run's tokenizer");
    place.write("tok/chat_template.jinja", TEMPLATE);
    place.write("tok/tokenizer_config.json", r#"{ "eos_token": "<end>" }"#);
    let beside = "--data.tokenizer tok/tokenizer.json --data.chat_template none";
    trained(&place, &format!("--max_steps 1 {beside}"));
    for name in ["chat_template.jinja", "tokenizer_config.json"] {
        let kept = fs::read_to_string(saved.join(name)).expect("it is kept");
        let given = fs::read_to_string(place.path("tok").join(name));
        assert_eq!(kept, given.expect("it was written"), "{name}");
    }
    place.succeed("generate run --chat --prompt hi --max-new-tokens 2");
}

#[test]
fn only_answers_count() {
    let place = place(&lines(talk));
    let first = trained(&place, "--max_steps 1");
    // Other questions, as long as these, are no other targets: of prompts and completions too.
    let pairs = |i: usize| {
        let messages = talk(i);
        json!({ "prompt": [messages["messages"][0]], "completion": [messages["messages"][1]] })
    };
    place.write("chats.jsonl", &lines(pairs));
    assert_eq!(trained(&place, "--max_steps 1"), first);
    let plain = |i: usize| {
        let answer = ["yes", "no"][i % 2];
        json!({ "prompt": format!("<user>{i}?\n<assistant>"), "completion": answer })
    };
    place.write("chats.jsonl", &lines(plain));
    let said = place.succeed("train merak.toml --overwrite_output_dir --max_steps 1");
    assert_ne!(losses(&place), first, "another end");
    // No template, and so no prompt of a chat.
    assert!(said.contains("step-00000001 --prompt TEXT\n"), "{said}");
}

#[test]
fn chats_that_do_not_fit_are_named_by_file_and_line() {
    let refused = |record: Value, keys: &str, words: &[&str]| {
        let place = place(&format!("{}\n{record}\n", talk(1)));
        let message = place.mistake(&format!("train merak.toml {keys}"));
        for word in words {
            assert!(message.contains(word), "{record}: {message} without {word}");
        }
    };
    let line = "chats.jsonl:2: ";
    refused(
        json!({ "text": "a" }),
        "",
        &[line, "is a text", "the first one, chats.jsonl:1, is a chat"],
    );
    let fields = "records of chats need \"messages\", or \"prompt\" and \"completion\"";
    refused(json!({ "txt": "a" }), "", &[line, "has \"txt\"", fields]);
    refused(
        json!({ "messages": "a" }),
        "",
        &[line, "expected a list of messages"],
    );
    refused(
        json!({ "messages": [] }),
        "",
        &[line, "expected a list of messages"],
    );
    let nameless = json!({ "messages": [{ "content": "a" }] });
    refused(
        nameless,
        "",
        &[line, "message 1 of \"messages\"", "a \"role\""],
    );
    let asked = json!({ "messages": [{ "role": "user", "content": "a" }] });
    refused(asked, "", &[line, "\"assistant\"", "the roles are user"]);
    let system = json!({ "messages": [{ "role": "system", "content": "a" }, { "role": "assistant", "content": "b" }] });
    refused(
        system,
        "",
        &[
            line,
            "the chat template refuses the messages: the role system is unknown",
        ],
    );
    let tools = json!({ "messages": talk(1)["messages"], "tools": 3 });
    refused(tools, "", &[line, "\"tools\" is no list of tools"]);
    refused(
        talk(1),
        "--data.chat_template none",
        &[
            "chats.jsonl:1: a chat needs a template, and none is set or found: ",
            "set \"data.chat_template\" to the path of a Jinja file",
            "or put it beside tokenizer.json as chat_template.jinja",
        ],
    );
    refused(
        talk(1),
        "--data.chat_template lost.jinja",
        &["cannot read lost.jinja", "data.chat_template"],
    );
}

#[test]
fn a_role_that_chats_do_not_have_is_told_once_with_its_place() {
    let mistyped = |i: usize| {
        let mut chat = talk(i);
        if i > 1 {
            let more = json!({ "role": "assitant", "content": "!" });
            chat["messages"].as_array_mut().expect("a list").push(more);
        }
        chat
    };
    let place = place(&lines(mistyped));
    let template = TEMPLATE.replace("not in ['user', 'assistant']", "== ''");
    place.write("chat.jinja", &template);
    for keys in ["", "--data.streaming true --do_eval false"] {
        let line = format!("train merak.toml --overwrite_output_dir --max_steps 2 {keys}");
        let ended = place.merak(&line);
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        let told = "a message has a role that is none of system, user, assistant, tool, developer, and the chat \
            template takes it; did you mean \"assistant\"? place=\"chats.jsonl:3\" role=\"assitant\"";
        assert!(ended.stderr.contains(told), "{keys}: {}", ended.stderr);
        assert_eq!(ended.stderr.matches("has a role").count(), 1, "{keys}");
    }
}

#[test]
fn a_template_beside_data_without_chats_is_told() {
    let place = Workplace::new();
    place.write("chat.jinja", TEMPLATE);
    let line = "train merak.toml --dry-run --data.chat_template chat.jinja";
    let ended = place.merak(line);
    let told = "\"data.chat_template\" has no effect: the data have no chats for it";
    assert_eq!(ended.stderr.matches(told).count(), 1, "{}", ended.stderr);
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
}

#[test]
fn a_question_becomes_a_prompt_by_the_template_and_the_answer_alone_is_printed() {
    let place = place(&lines(talk));
    let said = place.succeed("train merak.toml --max_steps 40 --do_eval false");
    let advice = "continue  merak generate run/checkpoints/step-00000040 --chat --prompt TEXT\n";
    assert!(said.contains(advice), "{said}");
    let ask = "generate run --temperature 0 --max-new-tokens 4";
    let chat = place.succeed(&format!("{ask} --chat --prompt 3?"));
    // The template's line breaks after an expression stay.
    let prompt = "<user>3?\n\n<assistant>";
    let ids: Vec<_> = prompt.bytes().map(|byte| byte.to_string()).collect();
    let text = place.succeed(&format!("{ask} --prompt-ids {}", ids.join(",")));
    assert_eq!(text, format!("{prompt}{chat}"));
    let refused = place.mistake(&format!("{ask} --chat --system x --prompt 3?"));
    assert!(refused.contains("the role system is unknown"), "{refused}");
    place.mistake(&format!("{ask} --chat --prompt-ids 1"));
    place.mistake(&format!("{ask} --system x --prompt 3?"));
    let refused = place.mistake(&format!("{ask} --system x --prompt-ids 3"));
    assert!(
        refused.contains("'--system <TEXT>' cannot be used with '--prompt-ids"),
        "{refused}"
    );
}

#[test]
fn the_chats_of_the_readme_are_learned_and_asked_by_its_own_files_and_commands() {
    let place = place(&lines(talk));
    let mut model = gpt2();
    model["vocab_size"] = 258.into();
    model["n_positions"] = 512.into();
    place.write("model.json", &model.to_string());
    place.succeed("train merak.toml --max_steps 1");
    let trained = Checkpoint::open(place.path("run")).expect("it opens");
    export_hf(&trained, place.path("base"), &ExportOptions::default()).expect("it exports");

    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = fs::read_to_string(readme).expect("it is there");
    let parts = readme.split_once("## Your chats, with LoRA");
    let parts = parts.and_then(|(_, section)| section.split_once("```toml\n# chats.toml\n"));
    let (words, rest) = parts.expect("a section with a configuration");
    let (config, rest) = rest.split_once("```").expect("its end");
    let objects: Vec<_> = words
        .split('`')
        .filter(|code| code.starts_with('{'))
        .collect();
    let [chat, lora] = objects[..] else {
        panic!("a chat and an adapter in {words}");
    };
    place.write("chats.jsonl", &format!("{chat}\n").repeat(16));
    place.write("lora.json", lora);
    place.write("chats.toml", config);

    let commands = rest
        .split("```")
        .nth(1)
        .and_then(|block| block.strip_prefix("sh\n"));
    let mut said = Vec::new();
    for line in commands.expect("commands").lines() {
        let line = line.strip_prefix("cargo run --release -- ").expect("merak");
        // What stands between quotes is one word.
        let mut command = place.command("");
        for (number, part) in line.split('"').enumerate() {
            if number % 2 == 1 {
                command.arg(part);
            } else {
                command.args(part.split_whitespace());
            }
        }
        let ended = place.ended(&command.output().expect("the command starts"));
        assert_eq!(ended.status, Some(0), "{line}: {}", ended.stderr);
        said.push(ended.stdout);
    }
    assert_eq!(said.len(), 2);
    assert!(said[0].contains("\ntrained   6 steps"), "{}", said[0]);
    assert!(
        place
            .path("runs/lora/adapter/adapter_config.json")
            .is_file()
    );
}

#[test]
fn the_padding_after_a_chat_is_no_part_of_its_embedding() {
    let place = place(&lines(talk));
    place.succeed("train merak.toml --max_steps 1");
    let embeddings = |keys: &str| {
        place.succeed(&format!(
            "predict merak.toml run --what embeddings -o found.jsonl {keys}"
        ));
        let found = objects(&place, "found.jsonl");
        let values = found.iter().filter_map(|row| row["embedding"].as_array());
        let values = values.flatten().filter_map(Value::as_f64);
        values.collect::<Vec<_>>()
    };
    let (short, long) = (embeddings("--seq_length 28"), embeddings("--seq_length 32"));
    assert_eq!((short.len(), long.len()), (16 * 16, 16 * 16));
    for (short, long) in short.iter().zip(&long) {
        assert!((short - long).abs() < 1e-4, "{short} and {long}");
    }
}

#[test]
fn packed_chats_learn_as_each_on_its_own_on_every_topology() {
    let place = place(&lines(talk));
    let mut model = gpt2();
    model["vocab_size"] = 258.into();
    model["n_positions"] = 80.into();
    for dropout in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        model[dropout] = 0.into();
    }
    place.write("model.json", &model.to_string());
    // Twelve chats for training, all in one step: each alone, or three in a sequence.
    let alone = trained(&place, "--gradient_accumulation_steps 12");
    assert_eq!(alone.len(), 3);
    let packed = "--data.packing true --seq_length 80";
    let near = |keys: &str| assert_close(&trained(&place, keys), &alone, 1e-4, keys);
    near(&format!("{packed} --gradient_accumulation_steps 4"));
    for ranks in [
        "--tp 2",
        "--pp 2",
        "--sp 2",
        "--dp 2 --zero_stage 3",
        "--tp 2 --sequence_parallel true",
    ] {
        let steps = if ranks.contains("dp") { 2 } else { 4 };
        near(&format!(
            "{packed} --gradient_accumulation_steps {steps} {ranks}"
        ));
    }
    // Longer than a sequence: cut as without packing.
    let cut = trained(&place, "--gradient_accumulation_steps 12 --seq_length 24");
    let packed = "--data.packing true --seq_length 24 --gradient_accumulation_steps 12";
    assert_close(&trained(&place, packed), &cut, 1e-5, packed);
}

#[test]
fn packing_parts_the_texts_of_a_stream_and_is_refused_elsewhere() {
    let place = place(&lines(talk));
    let text = |i: usize| json!({ "text": format!("text number {i}") });
    place.write("chats.jsonl", &lines(text));
    let (plain, parted) = (trained(&place, ""), trained(&place, "--data.packing true"));
    assert_ne!(plain, parted);
    assert!(parted.iter().all(|loss| loss.is_finite()), "{parted:?}");
    // A prediction sees the same documents, whose last tokens have no target.
    let ends = |keys: &str| {
        let predicted = place.succeed(&format!("predict merak.toml run -o - {keys}"));
        predicted.matches("null").count()
    };
    assert_eq!(ends(""), 0);
    assert!(ends("--data.packing true") > 0);

    let mistake =
        |keys: &str| place.mistake(&format!("train merak.toml --data.packing true {keys}"));
    place.write("bert.json", &bert("BertForMaskedLM").to_string());
    insta::assert_snapshot!(mistake("--model.config bert.json"), @r#"error: "data.packing" is true (command line --data.packing), but must be false, its default: it does nothing for this bert model for masked language modelling on such data"#);
    let endless = json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": { "text": 0, "[UNK]": 1 }, "unk_token": "[UNK]" } });
    place.write("endless.json", &endless.to_string());
    insta::assert_snapshot!(mistake("--data.tokenizer endless.json --data.chat_template none --seq_length 8"), @r#"error: "data.packing" parts documents by the token that ends one, which endless.json does not have: leave "data.packing" out, or add such a token to the tokenizer, such as <|endoftext|>"#);
}

#[test]
fn answers_in_no_end_are_told() {
    let told = |records: &str| {
        let ended = place(records).merak("train merak.toml --max_steps 1");
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        ended
            .stderr
            .matches("no answer ends in a special token")
            .count()
    };
    assert_eq!(told(&lines(talk)), 1);
    // The token that ends a text follows a completion as it stands.
    let plain = |i| json!({ "prompt": format!("{i}?"), "completion": "yes" });
    assert_eq!(told(&lines(plain)), 0);
}
