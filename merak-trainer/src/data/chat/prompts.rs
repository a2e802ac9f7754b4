//! Questions as prompts of a model that answers.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{Chat, ChatTemplate, Tokenizer};
use crate::error::{DataError, Error, Result};

/// The chat template of a model's folder, which makes prompts of questions.
pub struct ChatPrompts {
    folder: PathBuf,
    template: ChatTemplate,
}

impl fmt::Debug for ChatPrompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("ChatPrompts");
        shown.field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl ChatPrompts {
    /// The default template beside the tokenizer in a model's folder, in a file of its own or in
    /// `tokenizer_config.json`; none where the folder has no template.
    ///
    /// # Errors
    ///
    /// Files that cannot be read, a template that is none, and templates without a default.
    pub fn of(folder: &Path) -> Result<Option<Self>> {
        let template = ChatTemplate::for_prompts(folder)?;
        Ok(template.map(|template| Self {
            folder: folder.to_path_buf(),
            template,
        }))
    }

    /// A sentence for each special token that the template names and the tokenizer lacks.
    pub fn lacking_tokens(&self, tokenizer: &Tokenizer) -> Vec<String> {
        self.template.lacking_tokens(tokenizer)
    }

    /// The text of a chat with a question of the user, perhaps after a `system` message, up to
    /// where the answer begins. The special tokens around it are part of the text.
    ///
    /// # Errors
    ///
    /// What the template refuses.
    pub fn prompt(&self, system: Option<&str>, question: &str) -> Result<String> {
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        let system = system.map(|text| message("system", text));
        let messages: Vec<_> = system
            .into_iter()
            .chain([message("user", question)])
            .collect();
        let count = messages.len();
        let chat = Chat {
            messages,
            ..Chat::default()
        };
        let text = self.template.render(&chat, count, true);
        text.map_err(|reason| {
            Error::Data(DataError::ChatTemplate {
                path: self.folder.clone(),
                reason,
            })
        })
    }
}
