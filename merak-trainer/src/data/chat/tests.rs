//! Chats beside transformers' `apply_chat_template`, and chats that are refused.

mod python;

use serde_json::json;

use super::*;
use crate::{
    config::{DataArguments, TemplateSource, TokenizerSource},
    error::Error,
};

/// Numbers of transformers, which `tests/goldens/chat/make.py` wrote.
const GOLDENS: &str = include_str!("../../../tests/goldens/chat/cases.json");

fn golden_tokenizer() -> Tokenizer {
    let folder = env!("CARGO_MANIFEST_DIR");
    let path = format!("{folder}/tests/goldens/chat/tokenizer.json");
    Tokenizer::from_file(path.as_ref()).unwrap()
}

fn case(name: &str) -> (ChatTemplate, Chat, Value) {
    let cases: Value = serde_json::from_str(GOLDENS).unwrap();
    let mut cases = cases["cases"].as_array().unwrap().iter();
    let case = cases.find(|case| case["name"] == name).unwrap();
    loaded(case)
}

fn loaded(case: &Value) -> (ChatTemplate, Chat, Value) {
    let table = |name: &str| case[name].as_object().unwrap().clone();
    let template = case["template"].as_str().unwrap();
    let template = ChatTemplate::new(template, table("special_tokens")).unwrap();
    let chat = Chat {
        messages: case["messages"].as_array().unwrap().clone(),
        tools: case["tools"].clone(),
        kwargs: table("kwargs"),
    };
    (template, chat, case.clone())
}

#[test]
fn texts_and_tokens_are_those_of_apply_chat_template() {
    let cases: Value = serde_json::from_str(GOLDENS).unwrap();
    let tokenizer = golden_tokenizer();
    let cases = cases["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let (template, chat, expected) = loaded(case);
        for (prompts, field) in [(false, "text"), (true, "prompt")] {
            let found = template.render(&chat, chat.messages.len(), prompts);
            match &expected[field] {
                Value::String(text) => assert_eq!(found.as_ref(), Ok(text), "{}", case["name"]),
                refused => {
                    let message = refused["error"].as_str().unwrap();
                    let expected = format!("the chat template refuses the messages: {message}");
                    assert_eq!(found, Err(expected));
                }
            }
        }
        if let Some(text) = expected["text"].as_str() {
            let pieces = tokenizer.encode_pieces(text, false).unwrap();
            let ids: Vec<_> = pieces.iter().map(|(id, _)| *id).collect();
            assert_eq!(json!(ids), expected["ids"], "{}", case["name"]);
        }
    }
}

#[test]
fn marked_answers_are_the_assistant_tokens_of_transformers() {
    let (template, chat, expected) = case("marked");
    let answered = template.answered(&chat).unwrap();
    let pieces = golden_tokenizer()
        .encode_pieces(&answered.text, false)
        .unwrap();
    let tokens = AnsweredTokens::of(&pieces, &answered.answers);
    let mask: Vec<_> = tokens.is_answer.iter().map(|&is| u8::from(is)).collect();
    assert_eq!(json!(mask), expected["mask"]);
    assert!(mask.contains(&1));
}

#[test]
fn without_marks_answers_are_what_each_message_of_the_assistant_adds() {
    let answers = |name: &str| -> Vec<String> {
        let (template, chat, _) = case(name);
        let found = template.answered(&chat).unwrap();
        let parts = found
            .answers
            .iter()
            .map(|part| found.text[part.clone()].to_owned());
        parts.collect()
    };
    let chatml = ["  Groß: 5 < 6 & 'so'.\n<|im_end|>\n", "It is.<|im_end|>\n"];
    assert_eq!(answers("chatml"), chatml);
    let llama3 = ["Groß: 5 < 6 & 'so'.<|eot_id|>", "It is.<|eot_id|>"];
    assert_eq!(answers("llama3"), llama3);
    let mistral = ["  Groß: 5 < 6 & 'so'.\n</s>", "It is.</s>"];
    assert_eq!(answers("mistral"), mistral);
    // Qwen leaves out the reasoning of earlier turns.
    let (template, mut chat, _) = case("qwen with reasoning");
    chat.messages
        .push(json!({"role": "user", "content": "more"}));
    chat.messages
        .push(json!({"role": "assistant", "content": "no"}));
    let refused = template.answered(&chat).unwrap_err();
    assert!(
        refused.contains("before message 2 otherwise once later messages follow"),
        "{refused}"
    );
    assert!(refused.contains("{% generation %}"), "{refused}");
}

#[test]
fn a_completion_of_messages_is_one_answer() {
    let (template, chat, _) = case("chatml");
    let found = template.completed(&chat, 2).unwrap();
    let answer = &found.text[found.answers[0].clone()];
    assert!(answer.starts_with("  Groß"), "{answer}");
    assert!(answer.ends_with("It is.<|im_end|>\n"), "{answer}");
}

#[test]
fn chats_with_tools_take_the_template_of_that_name() {
    let folder = tempfile::tempdir().unwrap();
    let entry = |name: &str, template: &str| json!({ "name": name, "template": template });
    let write = |templates: Value| {
        let config = json!({ "chat_template": templates, "eos_token": "</s>" });
        std::fs::write(
            folder.path().join("tokenizer_config.json"),
            config.to_string(),
        )
        .unwrap();
        ChatTemplate::beside(folder.path()).unwrap()
    };
    let rendered = |template: &ChatTemplate, tools: Value| {
        let chat = Chat {
            tools,
            ..Chat::default()
        };
        template.render(&chat, 0, false).unwrap()
    };
    let tool_use = "{% generation %}{{ tools[0].name }}{% endgeneration %}{{ eos_token }}";
    let rag = entry("rag", "never");
    let both = write(json!([
        rag,
        entry("tool_use", tool_use),
        entry("default", "plain")
    ]))
    .unwrap();
    let tools = json!([{ "name": "add" }]);
    assert_eq!(rendered(&both, Value::Null), "plain");
    assert_eq!(rendered(&both, tools.clone()), "add</s>");
    let chat = Chat {
        tools: tools.clone(),
        ..Chat::default()
    };
    let answers = both.answered(&chat).unwrap().answers;
    assert_eq!(answers.first(), Some(&(0..3)));
    let one = write(json!([entry("default", "{{ tools | length }}")])).unwrap();
    assert_eq!(rendered(&one, tools), "1");
    assert!(write(json!([entry("tool_use", tool_use)])).is_none());
}

#[test]
fn a_template_is_chosen_by_name_and_files_hide_those_of_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let named = |name: &str| TemplateSource::Name(name.to_owned());
    let rendered = |given: Option<&TemplateSource>| {
        let template = ChatTemplate::of(given, Some(folder.path()))?;
        let chat = Chat {
            tools: json!([{ "name": "add" }]),
            ..Chat::default()
        };
        let rendered = |template: ChatTemplate| template.render(&chat, 0, false).unwrap();
        Ok::<_, Error>(template.map(rendered))
    };
    let text = |given: Option<&str>| rendered(given.map(named).as_ref());
    let found = |given: Option<&str>| text(given).unwrap();
    let config = json!({ "bos_token": "<s>", "chat_template": [
        { "name": "default", "template": "plain" }, { "name": "rag", "template": "{{ bos_token }}" },
    ]});
    write("tokenizer_config.json", &config.to_string());
    assert_eq!(found(None).as_deref(), Some("plain"));
    assert_eq!(found(Some("rag")).as_deref(), Some("<s>"));
    write("additional_chat_templates/tool_use.jinja", "tools");
    write(
        "additional_chat_templates/short.jinja",
        "{{ bos_token }}short",
    );
    write("additional_chat_templates/notes.txt", "no template");
    assert_eq!(found(None), None, "no file has the default");
    let refused = ChatPrompts::of(folder.path()).unwrap_err().to_string();
    let reason = "no template there is called default, but short, tool_use";
    assert!(refused.ends_with(reason), "{refused}");
    write("chat_template.jinja", "file");
    assert_eq!(found(None).as_deref(), Some("tools"));
    assert_eq!(found(Some("short")).as_deref(), Some("<s>short"));
    let lost = TemplateSource::File(folder.path().join("templates/default"));
    let lost = rendered(Some(&lost)).unwrap_err();
    assert!(matches!(lost, Error::ReadInput { .. }), "{lost}");
    insta::assert_snapshot!(text(Some("rag")).unwrap_err(), @"cannot use the chat template of rag: there is no such file, and the tokenizer's templates are called default, short, tool_use");
    let alone = ChatTemplate::of(Some(&named("rag")), None).unwrap_err();
    assert!(matches!(alone, Error::ReadInput { .. }), "{alone}");
}

#[test]
fn a_checkpoint_takes_the_templates_in_use_along() {
    let (folder, saved) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    let arguments = DataArguments {
        tokenizer: TokenizerSource::File(folder.path().join("tokenizer.json")),
        ..DataArguments::default()
    };
    let names = || {
        let files = prompt_files(&arguments).unwrap();
        let names = files.into_iter().map(|(name, bytes)| {
            std::fs::write(saved.path().join(&name), bytes).unwrap();
            name
        });
        names.collect::<Vec<_>>()
    };
    write("tokenizer_config.json", r#"{ "bos_token": "<s>" }"#);
    assert_eq!(names(), ["tokenizer_config.json"]);
    write(
        "additional_chat_templates/tool_use.jinja",
        "{{ bos_token }}tools",
    );
    write("chat_template.jinja", "{{ bos_token }}plain");
    assert_eq!(names(), ["tokenizer_config.json"]);
    let template = ChatTemplate::beside(saved.path()).unwrap().unwrap();
    for (tools, text) in [(Value::Null, "<s>plain"), (json!([]), "<s>tools")] {
        let chat = Chat {
            tools,
            ..Chat::default()
        };
        assert_eq!(template.render(&chat, 0, false).as_deref(), Ok(text));
    }
    std::fs::remove_dir_all(folder.path().join("additional_chat_templates")).unwrap();
    assert_eq!(names(), ["chat_template.jinja", "tokenizer_config.json"]);
}

#[test]
fn a_special_token_that_a_template_names_and_its_tokenizer_lacks_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, golden_tokenizer().to_json().unwrap()).unwrap();
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    let arguments = DataArguments {
        tokenizer: TokenizerSource::File(path),
        ..DataArguments::default()
    };
    let told = |end: &str, template: &str| {
        let config = json!({ "eos_token": end, "chat_template": template });
        let path = folder.path().join("tokenizer_config.json");
        std::fs::write(path, config.to_string()).unwrap();
        let template = ChatTemplate::load(&arguments).unwrap().unwrap();
        template.lacking_tokens(&tokenizer).join("\n")
    };
    let place = format!("{}/", folder.path().display());
    for (end, template) in [
        ("<|im_end|>", "{{ eos_token }}"),
        ("<|im_edn|>", "it names none"),
        ("", "{{ eos_token }}"),
    ] {
        assert_eq!(told(end, template), "");
    }
    let mistyped = told("<|im_edn|>", "{% if tools %}{{ eos_token }}{% endif %}");
    insta::assert_snapshot!(mistyped.replace(&place, ""), @r#"the chat template names "eos_token", which is "<|im_edn|>", and the tokenizer tokenizer.json does not have that token: it becomes those of its text; did you mean "<|im_end|>"?"#);
    let unlike = told("stop", "{{ eos_token }}");
    assert!(unlike.ends_with("those of its text"), "{unlike}");
    let bytes = ChatTemplate::load(&arguments).unwrap().unwrap();
    assert_eq!(bytes.lacking_tokens(&Tokenizer::bytes()).len(), 1);
}

#[test]
fn a_template_quotes_the_roles_that_it_treats() {
    let source =
        r#"{% if messages[0].role == 'critic' or messages[0].role == "judge" %}a{% endif %}"#;
    let template = ChatTemplate::new("{{ 'user' }}", Map::new()).unwrap();
    let tool_use = ChatTemplate::new(source, Map::new()).unwrap();
    let both = template.with_tool_use(Some(tool_use));
    for role in ["user", "critic", "judge"] {
        assert!(both.quotes(role), "{role}");
    }
    assert!(!both.quotes("crit") && !both.quotes("messages"));
}

#[test]
fn templates_that_are_none_or_never_end_are_refused() {
    let none = |source: &str| ChatTemplate::new(source, Map::new()).unwrap_err();
    assert!(none("{% if %}").starts_with("the chat template fails in line"));
    assert!(none("a\n{{ b").starts_with("the chat template fails in line"));
    let fails = |source: &str| {
        let template = ChatTemplate::new(source, Map::new()).unwrap();
        template.render(&Chat::default(), 0, false).unwrap_err()
    };
    assert!(fails("{{ a.b.c }}").starts_with("the chat template fails in line 1: undefined value"));
    assert_eq!(
        fails("{{ raise_exception('no system') }}"),
        "the chat template refuses the messages: no system"
    );
    let endless =
        fails("{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}");
    assert!(endless.contains("out of fuel"), "{endless}");
}

#[test]
fn plain_completions_end_with_the_end_of_a_text() {
    let tokenizer = Tokenizer::bytes();
    let maker = ChatMaker {
        tokenizer: &tokenizer,
        template: None,
        end: Some(256),
        told: &Told::default(),
    };
    let tokens = maker.plain("ab", "c").unwrap();
    assert_eq!(tokens.ids, [97, 98, 99, 256]);
    assert_eq!(tokens.is_answer, [false, false, true, true]);
}
