//! What makes a file no `tokenizer.json`: the library for such files answers some of it with a
//! panic, and some with a syntax error that is none.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use serde::Deserialize;
use serde_json::{Value, error::Category};
use tokenizers::normalizers::Precompiled;

use super::failure;
use crate::error::Result;

/// The kinds of models.
const MODELS: [&str; 4] = ["BPE", "WordPiece", "WordLevel", "Unigram"];

/// A text that each tokenizer reads once when it is loaded.
const TRIAL: &str = "A trial, \u{e9} \u{6a21} 1.";

/// The parts of a `tokenizer.json` that are checked here. Its vocabulary, which may be large, is
/// read over.
#[derive(Deserialize)]
#[serde(expecting = "a table")]
struct Parts {
    model: Option<Model>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    post_processor: Value,
    /// The library panics on errors here, those of texts that are not Unicode among them.
    #[serde(default, rename = "decoder")]
    _decoder: Value,
}

#[derive(Deserialize)]
#[serde(expecting = "a table as \"model\"")]
struct Model {
    #[serde(default, rename = "type")]
    kind: Value,
}

/// Checks what the library does not check itself.
///
/// # Errors
///
/// What is wrong with the file.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let parts: Parts = serde_json::from_slice(bytes).map_err(|error| match error.classify() {
        Category::Data => format!("it is no tokenizer.json: {error}"),
        _ => format!("it is no JSON: {error}"),
    })?;
    let Some(Model { kind }) = parts.model else {
        return Err("it is no tokenizer.json: it has no \"model\"".to_owned());
    };
    if !kind.is_null() && !MODELS.iter().any(|known| kind == *known) {
        let known = MODELS.join(", ");
        return Err(format!(
            "its \"model\" has the type {kind}, expected one of {known}"
        ));
    }
    normalizer(&parts.normalizer)?;
    post_processor(&parts.post_processor)
}

/// Checks a normalizer, and those that it has in a sequence.
fn normalizer(found: &Value) -> Result<(), String> {
    match found["type"].as_str() {
        Some("Sequence") => {
            let parts = found["normalizers"].as_array();
            parts.into_iter().flatten().try_for_each(normalizer)
        }
        Some("Precompiled") => match serde_json::from_str::<Precompiled>(&found.to_string()) {
            Ok(_) => Ok(()),
            Err(_) => Err(
                "the \"precompiled_charsmap\" of its normalizer is no map of characters in base64"
                    .to_owned(),
            ),
        },
        Some("Prepend") if found["prepend"] == "" => {
            Err("its normalizer of the type \"Prepend\" has nothing to prepend".to_owned())
        }
        _ => Ok(()),
    }
}

/// Checks a template of special tokens, and those in a sequence.
fn post_processor(found: &Value) -> Result<(), String> {
    match found["type"].as_str() {
        Some("Sequence") => {
            let parts = found["processors"].as_array();
            parts.into_iter().flatten().try_for_each(post_processor)
        }
        Some("TemplateProcessing") => {
            let tokens = &found["special_tokens"];
            template(&found["single"], "single", tokens)?;
            template(&found["pair"], "pair", tokens)
        }
        _ => Ok(()),
    }
}

/// Checks the pieces around one text or around a pair of texts.
fn template(pieces: &Value, name: &str, tokens: &Value) -> Result<(), String> {
    for piece in pieces.as_array().into_iter().flatten() {
        let id = piece["SpecialToken"]["id"].as_str();
        if let Some(id) = id.filter(|id| tokens.get(id).is_none()) {
            return Err(format!(
                "the template \"{name}\" of its post-processor names the special token {id:?}, \
                 which \"special_tokens\" there lacks"
            ));
        }
        if name == "single" && piece["Sequence"]["id"] == "B" {
            return Err(
                "the template \"single\" of its post-processor names a second text".to_owned(),
            );
        }
    }
    Ok(())
}

/// Reads a text with a tokenizer, so that one which ends in a panic is found before it is used.
pub(super) fn try_out(path: &Path, inner: &tokenizers::Tokenizer) -> Result<()> {
    let read = || {
        // A text may have parts that the vocabulary lacks: an error is an answer too.
        let ids = inner
            .encode(TRIAL, true)
            .map(|read| read.get_ids().to_vec());
        let _ = ids.and_then(|ids| inner.decode(&ids, true));
        Ok(())
    };
    guarded(path, read)
}

/// What the library answers, whose panics become errors of the file.
pub(super) fn guarded<T>(path: &Path, ask: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(ask)) {
        Ok(answer) => answer.map_err(|error| failure(path, &error)),
        Err(panic) => {
            let told = told(&*panic);
            Err(failure(path, &format!("it makes its library fail: {told}")))
        }
    }
}

/// The message of a panic.
fn told(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::{super::Tokenizer, guarded};

    fn refusal(text: &str) -> String {
        let path = Path::new("tokenizer.json");
        let error = Tokenizer::parse(path, text.as_bytes()).unwrap_err();
        let text = error.to_string();
        let reason = text.strip_prefix("cannot use the tokenizer tokenizer.json: ");
        reason.expect("an error of the file").to_owned()
    }

    /// A tokenizer with another part.
    fn with(part: &str, value: Value) -> String {
        let mut file = json!({
            "version": "1.0", "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 1}},
        });
        file[part] = value;
        file.to_string()
    }

    fn parses(text: &str) {
        let read = Tokenizer::parse(Path::new("tokenizer.json"), text.as_bytes());
        assert!(read.is_ok(), "{read:?}");
    }

    #[test]
    fn a_file_that_is_cut_or_lacks_a_comma_is_no_json() {
        let decoder = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        let whole = with("decoder", decoder);
        parses(&whole);
        for cut in 1..whole.len() {
            let told = refusal(&whole[..cut]);
            assert!(
                told.starts_with("it is no JSON: EOF while parsing"),
                "{told}"
            );
        }
        let told = refusal(&whole.replace("false,", "false "));
        assert!(
            told.starts_with("it is no JSON: expected `,` or `}` at line 1"),
            "{told}"
        );
    }

    #[test]
    fn json_that_is_no_tokenizer_is_refused_as_such() {
        let lacks = "it is no tokenizer.json: it has no \"model\"";
        assert_eq!(
            refusal(r#"{"model_type": "llama", "vocab_size": 32000}"#),
            lacks
        );
        assert_eq!(refusal("{}"), lacks);
        assert_eq!(refusal(r#"{"model": null}"#), lacks);
        for (text, expected) in [
            ("[]", "expected a table"),
            ("7", "expected a table"),
            (r#"{"model": "BPE"}"#, "expected a table as \"model\""),
            (
                r#"{"model": {"type": "LLM"}}"#,
                "has the type \"LLM\", expected one of BPE, WordPiece, WordLevel, Unigram",
            ),
        ] {
            let told = refusal(text);
            assert!(told.contains(expected), "{text}: {told}");
        }
    }

    #[test]
    fn parts_that_make_the_library_panic_are_refused() {
        let charsmap = |map: Value| json!({"type": "Precompiled", "precompiled_charsmap": map});
        let prepend = |text: &str| json!({"type": "Prepend", "prepend": text});
        let sequence = |part: Value| json!({"type": "Sequence", "normalizers": [part]});
        for (found, expected) in [
            (charsmap(Value::Null), "\"precompiled_charsmap\""),
            (charsmap(json!("?")), "\"precompiled_charsmap\""),
            (sequence(charsmap(json!("AAA"))), "\"precompiled_charsmap\""),
            (prepend(""), "\"Prepend\" has nothing to prepend"),
            (sequence(prepend("")), "\"Prepend\" has nothing to prepend"),
        ] {
            let told = refusal(&with("normalizer", found));
            assert!(told.contains(expected), "{told}");
        }
        parses(&with("normalizer", sequence(prepend("\u{2581}"))));
    }

    #[test]
    fn a_template_of_tokens_or_texts_that_are_not_there_is_refused() {
        let token = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let defined = json!({"<s>": {"id": "<s>", "ids": [0], "tokens": ["a"]}});
        let template = |single: Value, pair: Value, tokens: &Value| {
            let found = json!({"type": "TemplateProcessing", "single": single, "pair": pair,
                "special_tokens": tokens});
            with(
                "post_processor",
                json!({"type": "Sequence", "processors": [found]}),
            )
        };
        let (one, two) = (
            json!([&token, text("A")]),
            json!([text("A"), text("B"), &token]),
        );
        parses(&template(one.clone(), two.clone(), &defined));
        for (name, file) in [
            ("single", template(one, json!([text("A")]), &json!({}))),
            (
                "pair",
                template(json!([text("A")]), two.clone(), &json!({})),
            ),
        ] {
            let expected = format!(
                "the template \"{name}\" of its post-processor names the special token \"<s>\""
            );
            let told = refusal(&file);
            assert!(told.starts_with(&expected), "{told}");
        }
        let told = refusal(&template(two.clone(), two, &defined));
        assert!(
            told.ends_with("\"single\" of its post-processor names a second text"),
            "{told}"
        );
    }

    #[test]
    fn a_panic_of_the_library_is_an_error_of_the_file() {
        let none: Vec<u32> = Vec::new();
        let answer = guarded(Path::new("t.json"), || Ok(none[0]));
        let told = answer.unwrap_err().to_string();
        assert!(
            told.starts_with(
                "cannot use the tokenizer t.json: it makes its library fail: index out"
            ),
            "{told}"
        );
        // An empty map of characters, which the library reads and then panics on.
        let empty = json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="});
        let told = refusal(&with("normalizer", empty));
        assert!(told.starts_with("it makes its library fail: "), "{told}");
    }
}
