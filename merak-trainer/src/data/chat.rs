//! Chats and instructions as samples of a model of the next token: loss on the answers only.

mod clock;
mod files;
mod methods;
mod operators;
mod printf;
mod prompts;
mod python;
mod source;
mod template;

use std::{collections::BTreeSet, ops::Range};

use merak_ckpt::words::brief;
use merak_mpu::names::{did_you_mean, nearest};
use serde_json::{Map, Value};

use super::{
    dataset::{Dataset, IGNORED_LABEL, LABELS, Sample},
    packed::{DOCUMENT_IDS, sequences},
    records::Record,
    sample_tensor::SampleTensor,
    samples::Told,
    tokenizer::Tokenizer,
    translation::{filled, mask},
};
use crate::error::Result;
pub(super) use files::{PROMPT_FILES, prompt_files, templates_in_use};
pub use prompts::ChatPrompts;
pub(crate) use template::{Chat, ChatTemplate};

/// The fields that records of chats have.
const NEEDS: &str = "of chats need \"messages\", or \"prompt\" and \"completion\"";

/// The roles that chats have.
const ROLES: [&str; 5] = ["system", "user", "assistant", "tool", "developer"];

/// A chat as tokens, with those that a model is to learn.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AnsweredTokens {
    /// The tokens.
    pub ids: Vec<u32>,
    /// Whether each is part of an answer.
    pub is_answer: Vec<bool>,
}

impl AnsweredTokens {
    /// Whether the last answer ends in a special token, which a line end may follow, or there is
    /// none.
    pub(super) fn answer_ends(&self, tokenizer: &Tokenizer) -> bool {
        let Some(last) = self.is_answer.iter().rposition(|&is| is) else {
            return true;
        };
        // They have no text.
        let is_special = |id: &u32| tokenizer.decode(&[*id]).is_ok_and(|text| text.is_empty());
        let end = &self.ids[last.saturating_sub(1)..=last];
        end.iter().any(is_special)
    }
}

/// Chats and instructions, of which the answers are learned.
///
/// # Shapes
///
/// `input_ids: [S]`, the first tokens of a chat, or those of several; `labels: [S]`, the token
/// after each where it is part of an answer, and [`IGNORED_LABEL`] elsewhere. Where several chats
/// make a sample, `document_ids: [S]`: the number of each token's chat, from 1 on, and 0 for
/// padding.
///
/// # Examples
///
/// ```
/// use merak_trainer::data::{AnsweredTokens, ChatDataset, Dataset};
///
/// let chat = AnsweredTokens { ids: vec![7, 8, 9], is_answer: vec![false, true, true] };
/// let data = ChatDataset::new(vec![chat.clone()], 4, 0);
/// assert_eq!(data.get(0)?["input_ids"].ints(), [7, 8, 0, 0]);
/// assert_eq!(data.get(0)?["labels"].ints(), [8, 9, -100, -100]);
/// assert_eq!(data.mask(0)?, Some(vec![1, 1, 0, 0]));
///
/// let data = ChatDataset::packed(vec![chat.clone(), chat], 5, 0);
/// assert_eq!(data.get(0)?["input_ids"].ints(), [7, 8, 7, 8, 0]);
/// assert_eq!(data.get(0)?["document_ids"].ints(), [1, 1, 2, 2, 0]);
/// assert_eq!(data.mask(0)?, Some(vec![1, 1, 1, 1, 0]));
/// # Ok::<(), merak_trainer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ChatDataset {
    chats: Vec<AnsweredTokens>,
    seq_length: usize,
    pad: u32,
    /// The chats of each sample, where there may be several.
    packed: Option<Vec<Vec<usize>>>,
}

impl ChatDataset {
    /// Fills chats up to `seq_length` (S) with `pad`; longer ones are cut.
    pub fn new(chats: Vec<AnsweredTokens>, seq_length: usize, pad: u32) -> Self {
        Self {
            chats,
            seq_length,
            pad,
            packed: None,
        }
    }

    /// As many chats side by side as fit into each sample. The model must be told
    /// ([`models::with_visible`](merak_trace::models::with_visible)), so that none sees another.
    pub fn packed(chats: Vec<AnsweredTokens>, seq_length: usize, pad: u32) -> Self {
        let lengths: Vec<_> = chats.iter().map(AnsweredTokens::inputs).collect();
        Self {
            packed: Some(sequences(&lengths, seq_length)),
            ..Self::new(chats, seq_length, pad)
        }
    }

    /// The chats of a sample.
    fn chats_of(&self, index: usize) -> impl Iterator<Item = &AnsweredTokens> {
        let own = match &self.packed {
            Some(packed) => packed[index].clone(),
            None => vec![index],
        };
        own.into_iter().map(|chat| &self.chats[chat])
    }
}

impl Dataset for ChatDataset {
    fn len(&self) -> usize {
        self.packed.as_ref().map_or(self.chats.len(), Vec::len)
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let seq = self.seq_length;
        let (mut input, mut labels, mut documents) = (Vec::new(), Vec::new(), Vec::new());
        for (number, chat) in (1..).zip(self.chats_of(index)) {
            let shown = chat.inputs().min(seq);
            input.extend_from_slice(&chat.ids[..shown]);
            let next = chat.ids.iter().zip(&chat.is_answer).skip(1).take(shown);
            labels.extend(next.map(|(&id, &is_answer)| {
                if is_answer {
                    i64::from(id)
                } else {
                    IGNORED_LABEL
                }
            }));
            documents.resize(input.len(), number);
        }
        labels.resize(seq, IGNORED_LABEL);
        let input = filled(&input, seq, self.pad.into());
        let mut sample = Sample::from([
            ("input_ids".to_owned(), SampleTensor::vector(input)),
            (LABELS.to_owned(), SampleTensor::vector(labels)),
        ]);
        if self.packed.is_some() {
            documents.resize(seq, 0);
            let documents = SampleTensor::vector(documents);
            sample.insert(DOCUMENT_IDS.to_owned(), documents);
        }
        Ok(sample)
    }

    fn mask(&self, index: usize) -> Result<Option<Vec<i64>>> {
        let chats = self.chats_of(index);
        let shown = chats.map(|chat| chat.inputs().min(self.seq_length));
        Ok(Some(mask(shown.sum(), self.seq_length)))
    }
}

/// How records become chats of tokens.
#[derive(Debug)]
pub(super) struct ChatMaker<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    /// The template; none where no file has one.
    pub(super) template: Option<&'a ChatTemplate>,
    /// The token after a completion of plain text.
    pub(super) end: Option<u32>,
    pub(super) told: &'a Told,
}

/// Whether a record is a chat or an instruction.
pub(super) fn is_chat(record: &Record) -> bool {
    let has_both = record.has("prompt") && record.has("completion");
    record.has("messages") || has_both
}

/// Whether a template makes the text of a chat: it has messages.
pub(super) fn needs_template(record: &Record) -> bool {
    plain_texts(record).is_none()
}

/// The prompt and the completion of a record, where both are plain texts.
fn plain_texts(record: &Record) -> Option<[&str; 2]> {
    if record.has("messages") {
        return None;
    }
    let text = |name| record.field(name)?.as_str();
    Some([text("prompt")?, text("completion")?])
}

impl ChatMaker<'_> {
    /// The tokens of a record.
    ///
    /// # Errors
    ///
    /// A record that has no chat, or one that the template refuses, by its file and line.
    pub(super) fn tokens(&self, record: &Record) -> Result<AnsweredTokens> {
        if let Some([prompt, completion]) = plain_texts(record) {
            return self.plain(prompt, completion);
        }
        let (chat, completion) = chat_of(record)?;
        let template = self.template.ok_or_else(|| {
            record.wrong(
                "a chat needs a template, and none is set or found: set \"data.chat_template\" to the path of a Jinja \
                 file, or put it beside tokenizer.json as chat_template.jinja; where templates there have names, and \
                 none is called \"default\", set \"data.chat_template\" to one of these names"
                    .to_owned(),
            )
        })?;
        let answered = match completion {
            Some(first) => template.completed(&chat, first),
            None => template.answered(&chat),
        };
        let answered = answered.map_err(|reason| record.wrong(reason))?;
        self.warn_of_role(record, &chat.messages, template);
        let pieces = self.tokenizer.encode_pieces(&answered.text, false)?;
        Ok(AnsweredTokens::of(&pieces, &answered.answers))
    }

    /// Warns of the first role that is none of the usual ones, nor one that the template writes in
    /// quotes: few templates refuse it, and the message of an assistant that is mistyped is not
    /// learned.
    fn warn_of_role(&self, record: &Record, messages: &[Value], template: &ChatTemplate) {
        let mut roles = messages
            .iter()
            .filter_map(|message| message["role"].as_str());
        if let Some(role) = roles.find(|role| !ROLES.contains(role) && !template.quotes(role))
            && self.told.is_first("role")
        {
            tracing::warn!(
                place = record.place(),
                role = brief(role),
                "a message has a role that is none of {}, and the chat template takes it{}",
                ROLES.join(", "),
                did_you_mean(nearest(role, ROLES))
            );
        }
    }

    /// A prompt and its completion as they stand, and the token that ends a text.
    fn plain(&self, prompt: &str, completion: &str) -> Result<AnsweredTokens> {
        let text = [prompt, completion].concat();
        let pieces = self.tokenizer.encode_pieces(&text, true)?;
        let answer = prompt.len()..text.len();
        let mut tokens = AnsweredTokens::of(&pieces, std::slice::from_ref(&answer));
        match (self.end, tokens.ids.last()) {
            (Some(end), Some(&last)) if last == end => {
                if let Some(is_answer) = tokens.is_answer.last_mut() {
                    *is_answer = true;
                }
            }
            (Some(end), _) => {
                tokens.ids.push(end);
                tokens.is_answer.push(true);
            }
            (None, _) => {}
        }
        Ok(tokens)
    }
}

impl AnsweredTokens {
    /// Tokens that the model reads: the last one is a target alone.
    pub(super) fn inputs(&self) -> usize {
        self.ids.len().saturating_sub(1)
    }

    /// Tokens that lie at least partly in an answer are part of it.
    fn of(pieces: &[(u32, Range<usize>)], answers: &[Range<usize>]) -> Self {
        let is_answer = |piece: &Range<usize>| {
            let mut answers = answers.iter();
            answers.any(|answer| piece.start.max(answer.start) < piece.end.min(answer.end))
        };
        Self {
            ids: pieces.iter().map(|(id, _)| *id).collect(),
            is_answer: pieces.iter().map(|(_, piece)| is_answer(piece)).collect(),
        }
    }
}

/// The chat of a record, and the number of messages before its completion where it has one.
fn chat_of(record: &Record) -> Result<(Chat, Option<usize>)> {
    let mut chat = Chat {
        tools: tools(record)?,
        kwargs: kwargs(record)?,
        ..Chat::default()
    };
    if record.has("messages") {
        chat.messages = messages(record, "messages")?;
        let roles = chat
            .messages
            .iter()
            .filter_map(|message| message["role"].as_str());
        let roles: BTreeSet<_> = roles.map(brief).collect();
        if !roles.contains("assistant") {
            let roles = Vec::from_iter(roles).join(", ");
            return Err(record.wrong(format!(
                "no message has the role \"assistant\", so that there is no answer to learn; the roles are {roles}"
            )));
        }
        return Ok((chat, None));
    }
    chat.messages = messages(record, "prompt")?;
    let first = chat.messages.len();
    chat.messages.extend(messages(record, "completion")?);
    Ok((chat, Some(first)))
}

/// A field with a list of messages.
fn messages(record: &Record, name: &str) -> Result<Vec<Value>> {
    let found = record.field(name);
    let found = found.ok_or_else(|| record.missing(name, NEEDS))?;
    let list = found.as_array().filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| {
        let expected = "a list of messages such as {\"role\": \"user\", \"content\": \"..\"}";
        record.wrong(format!(
            "the field \"{name}\" is {found}, expected {expected}"
        ))
    })?;
    for (number, message) in (1..).zip(list) {
        if !message["role"].is_string() {
            return Err(record.wrong(format!(
                "message {number} of \"{name}\" is {message}, expected a table with a \"role\", such as \"user\""
            )));
        }
    }
    Ok(list.clone())
}

/// The tools of a record: a list, or the text of one.
fn tools(record: &Record) -> Result<Value> {
    let found = match record.field("tools") {
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or(Value::Null),
        found => found.cloned().unwrap_or(Value::Null),
    };
    let is_given = record.field("tools").is_some_and(|tools| !tools.is_null());
    if is_given && !found.is_array() {
        let reason = "the field \"tools\" is no list of tools, nor the JSON of one";
        return Err(record.wrong(reason.to_owned()));
    }
    Ok(found)
}

/// Further names that the template of a record may use.
fn kwargs(record: &Record) -> Result<Map<String, Value>> {
    match record.field("chat_template_kwargs") {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(names)) => Ok(names.clone()),
        Some(other) => Err(record.wrong(format!(
            "the field \"chat_template_kwargs\" is {other}, expected a table of names and values"
        ))),
    }
}

#[cfg(test)]
mod tests;
