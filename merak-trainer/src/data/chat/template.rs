//! Chat templates: Jinja as `apply_chat_template` of transformers renders it.

use std::{collections::BTreeSet, ops::Range};

use minijinja::{
    Environment, Error, ErrorKind, Template,
    syntax::SyntaxConfig,
    value::{Serde, Value as JinjaValue},
};
use serde_json::{Map, Value};

use super::clock::LocalTime;
use super::{
    methods, operators, printf, python,
    source::{self, Source},
};

/// Around the text of a `{% generation %}` block: characters that no text has, as Unicode keeps
/// them for a program's own use.
const MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Steps after which a template is taken to be without end.
const FUEL: u64 = 50_000_000;

/// A template, with the special tokens that it may name.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Map<String, Value>,
    /// Whether the template says in `{% generation %}` blocks what a model is to learn.
    has_generation: bool,
    /// The template for chats with tools, where they have one of their own.
    tool_use: Option<Box<Self>>,
}

/// What a template is rendered for.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Chat {
    /// The messages, each a table with a `role`.
    pub(crate) messages: Vec<Value>,
    /// The tools that the model may call; null for none.
    pub(crate) tools: Value,
    /// Further names that the template may use.
    pub(crate) kwargs: Map<String, Value>,
}

/// A text, and the parts of it that a model is to learn, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answered {
    pub(crate) text: String,
    pub(crate) answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub(crate) fn new(source: &str, special_tokens: Map<String, Value>) -> Result<Self, String> {
        if source.trim().is_empty() {
            return Err("it is empty".to_owned());
        }
        let Source {
            text,
            has_generation,
        } = Source::of(source);
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(|error| reason(&error))?);
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(methods::call);
        environment.set_formatter(python::print);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("join", python::join);
        environment.add_filter("string", python::string);
        environment.add_filter("format", printf::filter);
        environment.add_function(operators::CONCAT, python::concat);
        environment.add_function(operators::REM, printf::rem);
        environment.add_filter(source::FILTER, |text: String| {
            let [begin, end] = MARKS;
            format!("{begin}{text}{end}")
        });
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("iterable", python::is_sequence);
        environment.add_function("raise_exception", refuse);
        // One moment for all chats of a run.
        let now = LocalTime::now();
        environment.add_function("strftime_now", move |format: String| {
            let text = now.format(&format);
            text.map_err(|error| Error::new(ErrorKind::InvalidOperation, error))
        });
        environment
            .add_template_owned("chat", text)
            .map_err(|error| reason(&error))?;
        Ok(Self {
            environment,
            special_tokens,
            has_generation,
            tool_use: None,
        })
    }

    /// This template with another one for chats with tools.
    pub(super) fn with_tool_use(self, tool_use: Option<Self>) -> Self {
        Self {
            tool_use: tool_use.map(Box::new),
            ..self
        }
    }

    /// The special tokens that this template, or that of chats with tools, names: the name and the
    /// text of each.
    pub(super) fn named_tokens(&self) -> impl Iterator<Item = (&str, &str)> {
        let names = |chat: Template<'_, '_>| chat.undeclared_variables(false);
        let names: BTreeSet<_> = self.parsed().flat_map(names).collect();
        let tokens = self.special_tokens.iter();
        let tokens = tokens.filter(move |(name, _)| names.contains(*name));
        tokens.filter_map(|(name, text)| Some((name.as_str(), text.as_str()?)))
    }

    /// Whether this template, or that of chats with tools, has a text in quotes, such as a role.
    pub(super) fn quotes(&self, text: &str) -> bool {
        let quoted = [format!("'{text}'"), format!("\"{text}\"")];
        self.parsed()
            .any(|chat| quoted.iter().any(|quoted| chat.source().contains(quoted)))
    }

    /// This template and that of chats with tools, parsed.
    fn parsed(&self) -> impl Iterator<Item = Template<'_, '_>> {
        let templates = [Some(self), self.tool_use.as_deref()];
        let all = templates.into_iter().flatten();
        all.filter_map(|template| template.environment.get_template("chat").ok())
    }

    /// The template for a chat.
    fn of_chat(&self, chat: &Chat) -> &Self {
        let own = self.tool_use.as_deref();
        own.filter(|_| !chat.tools.is_null()).unwrap_or(self)
    }

    /// The text of the first `count` messages; with `prompts`, up to where an answer begins.
    ///
    /// # Errors
    ///
    /// What the template refuses, or that it failed.
    pub(crate) fn render(
        &self,
        chat: &Chat,
        count: usize,
        prompts: bool,
    ) -> Result<String, String> {
        self.marked(chat, count, prompts)
            .map(|text| text.replace(MARKS, ""))
    }

    fn marked(&self, chat: &Chat, count: usize, prompts: bool) -> Result<String, String> {
        let messages: Vec<_> = chat.messages[..count].iter().map(normal).collect();
        let mut names = self.special_tokens.clone();
        names.extend(chat.kwargs.clone());
        names.insert("messages".into(), messages.into());
        names.insert("tools".into(), chat.tools.clone());
        names.insert("documents".into(), Value::Null);
        names.insert("add_generation_prompt".into(), prompts.into());
        let template = self.of_chat(chat).environment.get_template("chat");
        let rendered =
            template.and_then(|template| template.render(JinjaValue::from(Serde(&names))));
        rendered.map_err(|error| reason(&error))
    }

    /// The text of a chat and its answers: the `{% generation %}` blocks of the template, else what
    /// each message of the assistant adds to the text before it, without the part that stands in
    /// front of any answer.
    ///
    /// # Errors
    ///
    /// What the template refuses, or that an earlier part of the text changes with a later message,
    /// so that the answers cannot be told.
    pub(crate) fn answered(&self, chat: &Chat) -> Result<Answered, String> {
        if self.of_chat(chat).has_generation {
            let text = self.marked(chat, chat.messages.len(), false)?;
            return Ok(unmarked(&text));
        }
        let text = self.render(chat, chat.messages.len(), false)?;
        let mut answers = Vec::new();
        for (number, message) in chat.messages.iter().enumerate() {
            if message["role"] == "assistant" {
                answers.push(self.answer(chat, &text, number..number + 1)?);
            }
        }
        Ok(Answered { text, answers })
    }

    /// The text of a chat whose messages from `first` on are the one answer.
    ///
    /// # Errors
    ///
    /// As for [`ChatTemplate::answered`].
    pub(crate) fn completed(&self, chat: &Chat, first: usize) -> Result<Answered, String> {
        let text = self.render(chat, chat.messages.len(), false)?;
        let answer = self.answer(chat, &text, first..chat.messages.len())?;
        Ok(Answered {
            text,
            answers: vec![answer],
        })
    }

    /// Where the answer that some messages make stands in the text of the chat.
    fn answer(
        &self,
        chat: &Chat,
        text: &str,
        messages: Range<usize>,
    ) -> Result<Range<usize>, String> {
        let before = self.render(chat, messages.start, true)?;
        let after = self.render(chat, messages.end, false)?;
        if text.starts_with(&after) && after.starts_with(&before) {
            return Ok(before.len()..after.len());
        }
        Err(format!(
            "the chat template writes what stands before message {} otherwise once later messages follow, so that the \
             answers cannot be told from the rest: use a template that marks them with {{% generation %}} and {{% \
             endgeneration %}}, set as \"data.chat_template\"",
            messages.end
        ))
    }
}

/// A message as transformers gives it to templates: without fields that are null, and with its
/// reasoning under each name that templates read.
fn normal(message: &Value) -> Value {
    const NAMES: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
    let Some(fields) = message.as_object() else {
        return message.clone();
    };
    let given = fields.iter().filter(|(_, value)| !value.is_null());
    let given: Map<_, _> = given
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let reasoning = NAMES.iter().find_map(|name| given.get(*name)).cloned();
    let Some(reasoning) = reasoning else {
        return Value::Object(given);
    };
    let mut all = Map::from_iter([("thinking".to_owned(), reasoning.clone())]);
    all.extend(given);
    all.insert("reasoning_content".to_owned(), reasoning);
    Value::Object(all)
}

/// The function `raise_exception` of templates.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the engine gives arguments so"
)]
fn refuse(message: String) -> Result<String, Error> {
    Err(Error::new(
        ErrorKind::InvalidOperation,
        format!("{REFUSAL}{message}"),
    ))
}

/// Begins the message of a refusal, which is no failure of the template.
const REFUSAL: &str = "\u{FDD0}";

/// Why a template gave no text.
fn reason(error: &Error) -> String {
    let mut innermost = error;
    while let Some(source) = std::error::Error::source(innermost).and_then(|s| s.downcast_ref()) {
        innermost = source;
    }
    let detail = innermost.detail().unwrap_or_default();
    if let Some(message) = detail.strip_prefix(REFUSAL) {
        return format!("the chat template refuses the messages: {message}");
    }
    let line = innermost
        .line()
        .map_or(String::new(), |line| format!(" in line {line}"));
    let kind = innermost.kind();
    match detail {
        "" => format!("the chat template fails{line}: {kind}"),
        detail => format!("the chat template fails{line}: {kind}: {detail}"),
    }
}

/// A text without its marks, and the parts between them.
fn unmarked(marked: &str) -> Answered {
    let mut found = Answered {
        text: String::with_capacity(marked.len()),
        answers: Vec::new(),
    };
    let mut begins = Vec::new();
    for c in marked.chars() {
        if c == MARKS[0] {
            begins.push(found.text.len());
        } else if c == MARKS[1] {
            let begin = begins.pop().unwrap_or_default();
            found.answers.push(begin..found.text.len());
        } else {
            found.text.push(c);
        }
    }
    found
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("special_tokens", &self.special_tokens)
            .field("has_generation", &self.has_generation)
            .finish_non_exhaustive()
    }
}
