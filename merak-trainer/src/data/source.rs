//! From the data that a configuration names to the samples of its model.

use std::{collections::BTreeMap, sync::Arc};

use merak_trace::models::{Model, Objective, Visible};

use super::{
    chat,
    content::Content,
    corpus::Corpus,
    crates::CrateSources,
    dataset::Dataset,
    input::Input,
    inputs::ModelInputs,
    joined::Joined,
    mixture::MixtureDataset,
    samples::{Maker, corruption},
    tokenize::tokenizer_of,
    tokenizer::Tokenizer,
};
use crate::{
    config::{CheckedArguments, DataArguments, DataFormat, SeqLength, TokenizerSource},
    error::{DataError, Error, Result},
};

/// What a model's configuration says about data besides its sizes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DataTokens {
    /// The token that fills shorter sequences up.
    pub pad: u32,
    /// The token that a decoder starts from.
    pub decoder_start: u32,
    /// The classes by name.
    pub label2id: BTreeMap<String, i64>,
}

/// Data as they were read, before samples are made of them.
///
/// | format | next token | masked token | text class | sequence to sequence | image class |
/// |---|---|---|---|---|---|
/// | `text` | a stream | a stream | | span corruption of a stream | |
/// | records | `text`; chats | `text` | `text`, `label` | `source`, `target`; or `text` | |
/// | `tokens` | a stream | a stream | | span corruption of a stream | |
/// | `tensors` | yes | yes | yes | yes | yes |
/// | `images` | | | | | a folder for each class |
///
/// The format is `data.format`; records are `jsonl`, `csv`, `tsv` and `parquet`. Records for text
/// classes may have `text_pair`; chats are `messages`, or `prompt` and `completion`.
///
/// Each `text` of records is a document of a stream, except where texts have classes.
#[derive(Debug)]
pub struct Source {
    /// The tokenizer; none where there is no text and no tokenizer file.
    pub tokenizer: Option<Tokenizer>,
    /// Where the data came from, for people.
    pub description: String,
    /// The parts to train on, with their weights.
    parts: Vec<(Content, f64)>,
    /// What `data.validation_path` names, all of which is for validation.
    validation: Option<Content>,
}

/// The two parts of the data.
#[derive(Debug, Default, Clone)]
pub struct Datasets {
    /// Samples to train on.
    pub train: Option<Arc<dyn Dataset>>,
    /// Samples to evaluate on.
    pub validation: Option<Arc<dyn Dataset>>,
    /// Bytes of memory that the samples, or the tokens that they are cut from, take; none where
    /// they are read from files as they are asked for.
    pub held_bytes: usize,
}

/// What samples are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Training, with validation where the data have a part for it.
    Training,
    /// Forwards of the validation part.
    Evaluation,
    /// Forwards of all the data in their order, each sample once, as the validation part.
    Prediction,
}

/// What data are read for.
pub(super) struct Reader<'a> {
    pub(super) arguments: &'a DataArguments,
    pub(super) objective: Objective,
    pub(super) crates: &'a CrateSources,
    /// The tokenizer; none where there is no text and no tokenizer file.
    pub(super) tokenizer: Option<Tokenizer>,
}

impl Source {
    /// Reads the data that `arguments` name, for the objective of `model`.
    ///
    /// # Errors
    ///
    /// Data that are missing, cannot be read, or do not have what the model learns from; a
    /// tokenizer that cannot be used or has more tokens than the model.
    pub fn load(
        arguments: &DataArguments,
        model: &dyn Model,
        crates: &CrateSources,
    ) -> Result<Self> {
        check_kind(arguments.format, model)?;
        let reader = Reader {
            arguments,
            objective: model.objective(),
            crates,
            tokenizer: tokenizer_if_any(arguments, crates)?,
        };
        check_vocabulary(reader.tokenizer.as_ref(), model)?;
        let fraction = match arguments.validation_path {
            Some(_) => 0.0,
            None => arguments.validation_fraction,
        };
        let mut parts = Vec::new();
        if let Some(mixture) = &arguments.mixture {
            for part in mixture.parts() {
                let content = reader.read(Some(Input::mixture(&part.path)), fraction)?;
                parts.push((content, part.weight));
            }
        } else {
            let input = arguments.path.as_ref().map(Input::data);
            parts.push((reader.read(input, fraction)?, 1.0));
        }
        let validation = arguments.validation_path.as_ref().map(Input::validation);
        let validation = validation.map(|input| reader.read(Some(input), 1.0));
        let validation = validation.transpose()?;
        let mut contents = parts.iter().map(|(content, _)| content).chain(&validation);
        if arguments.chat_template.is_some() && !contents.any(Content::needs_template) {
            tracing::warn!("\"data.chat_template\" has no effect: the data have no chats for it");
        }
        let described = parts.iter().map(|(content, _)| content.description());
        let mut description = described.collect::<Vec<_>>().join("; ");
        if let Some(validation) = &validation {
            description = format!(
                "{description}; to validate on: {}",
                validation.description()
            );
        }
        Ok(Self {
            tokenizer: reader.tokenizer,
            description,
            parts,
            validation,
        })
    }

    /// The names of files in a model's folder that make prompts: another tokenizer has others.
    pub const PROMPT_FILES: [&'static str; 3] = chat::PROMPT_FILES;

    /// The files beside the tokenizer that chats need, by their names in a model's folder, and
    /// their contents: the templates in use, and the special tokens.
    ///
    /// # Errors
    ///
    /// When one cannot be read.
    pub fn prompt_files(arguments: &DataArguments) -> Result<Vec<(String, Vec<u8>)>> {
        chat::prompt_files(arguments)
    }

    /// The content of the first part, whose kind the others share.
    fn first(&self) -> &Content {
        &self.parts[0].0
    }

    /// Whether samples are cut from a stream of tokens.
    pub fn is_stream(&self) -> bool {
        self.first().is_stream()
    }

    /// Whether the data are chats that a template makes texts of, so that the model is asked as
    /// [`ChatPrompts`](super::ChatPrompts) makes its prompts.
    pub fn is_of_chats(&self) -> bool {
        self.first().needs_template()
    }

    /// The earlier tokens that a token sees in these data, which a model of the next token must be
    /// told ([`models::with_visible`](merak_trace::models::with_visible)): documents may stand side
    /// by side, or padding before the tokens. To padding after them no token attends.
    ///
    /// # Errors
    ///
    /// When a file cannot be read.
    pub fn visible(&self, arguments: &DataArguments) -> Result<Visible> {
        if arguments.packing {
            return Ok(Visible::Document);
        }
        let parts = self.parts.iter().map(|(content, _)| content);
        let mut all = Visible::All;
        for content in parts.chain(&self.validation) {
            match content.visible()? {
                Visible::Document => return Ok(Visible::Document),
                Visible::Unpadded => all = Visible::Unpadded,
                Visible::All => {}
            }
        }
        Ok(all)
    }

    /// The lengths of sequences: those of the arguments, else of tensors, else of the model.
    ///
    /// # Errors
    ///
    /// Two lengths for a model that has one, or one that is too short for span corruption.
    pub fn lengths(&self, args: &CheckedArguments, model: &dyn Model) -> Result<SeqLength> {
        let content = self.first();
        let stored = |name: &str| content.stored_length(name);
        lengths(args, model, content.is_stream(), &stored)
    }

    /// Makes samples for a model. Returns the stream that they are cut from too, where there is
    /// one.
    ///
    /// # Errors
    ///
    /// Too little data, or data that the model cannot take.
    pub fn datasets(
        self,
        model: &ModelInputs,
        args: &CheckedArguments,
        tokens: &DataTokens,
        purpose: Purpose,
    ) -> Result<(Datasets, Option<Corpus>)> {
        let contents = self.parts.iter().map(|(content, _)| content);
        let contents = contents.chain(&self.validation);
        let maker = Maker {
            model,
            args,
            tokens,
            classes: contents.flat_map(Content::classes).collect(),
            told: Arc::default(),
        };
        let reads_all = purpose != Purpose::Evaluation;
        let wants_validation = !reads_all || args.do_eval;
        let has_own = self.validation.is_some();
        let is_mixture = args.data.mixture.is_some();
        let (mut train, mut validation, mut held_bytes) = (Vec::new(), Vec::new(), 0);
        let mut corpus = None;
        for (content, weight) in self.parts {
            let wants = [reads_all, wants_validation && !has_own];
            let (part, stream) = content.datasets(&maker, wants)?;
            let held_out = part.validation.filter(|_| !has_own);
            if purpose == Purpose::Prediction {
                validation.extend(part.train);
            } else {
                train.extend(part.train.map(|data| (data, weight)));
            }
            validation.extend(held_out);
            held_bytes += part.held_bytes;
            corpus = stream.filter(|_| !is_mixture);
        }
        if let Some(content) = self.validation {
            let (part, stream) = content.datasets(&maker, [false, true])?;
            validation.extend(part.validation);
            held_bytes += part.held_bytes;
            if let (Some(corpus), Some(stream)) = (&mut corpus, stream) {
                corpus.validation = stream.validation;
            }
        }
        let train: Option<Arc<dyn Dataset>> = if is_mixture && purpose == Purpose::Training {
            Some(Arc::new(MixtureDataset::new(train, args.data_seed())?))
        } else {
            train.into_iter().next().map(|(data, _)| data)
        };
        let datasets = Datasets {
            train,
            validation: (!validation.is_empty()).then(|| Joined::of(validation)),
            held_bytes,
        };
        Ok((datasets, corpus))
    }
}

/// The tokenizer of the data; none where there is no text and no tokenizer file.
fn tokenizer_if_any(arguments: &DataArguments, crates: &CrateSources) -> Result<Option<Tokenizer>> {
    match (&arguments.tokenizer, arguments.format) {
        (TokenizerSource::Bytes, DataFormat::Tensors | DataFormat::Images) => Ok(None),
        _ => tokenizer_of(arguments, crates).map(Some),
    }
}

fn check_vocabulary(tokenizer: Option<&Tokenizer>, model: &dyn Model) -> Result<()> {
    let vocab = model.info().vocab_size;
    match tokenizer {
        Some(tokenizer) if tokenizer.vocab_size() > vocab => {
            Err(Error::Data(DataError::Vocabulary {
                tokenizer: tokenizer.name(),
                tokens: tokenizer.vocab_size(),
                vocab,
            }))
        }
        _ => Ok(()),
    }
}

/// Checks that files of this format can hold the samples that a model learns from.
fn check_kind(format: DataFormat, model: &dyn Model) -> Result<()> {
    let objective = model.objective();
    let expected = match (objective, format) {
        (_, DataFormat::Tensors) | (Objective::ImageClassification, DataFormat::Images) => {
            return Ok(());
        }
        (Objective::CausalLm | Objective::MaskedLm | Objective::SequenceToSequence, format)
            if format != DataFormat::Images =>
        {
            return Ok(());
        }
        (
            Objective::SequenceClassification,
            DataFormat::Jsonl | DataFormat::Csv | DataFormat::Tsv | DataFormat::Parquet,
        ) => return Ok(()),
        (Objective::SequenceClassification, _) => "jsonl, csv, tsv, parquet or tensors",
        (Objective::ImageClassification, _) => "images or tensors",
        _ => "text, jsonl, csv, tsv, parquet, tokens or tensors",
    };
    Err(Error::Data(DataError::DataKind {
        family: model.info().family,
        objective: objective.to_string(),
        format: format.as_str(),
        expected,
    }))
}

pub(super) fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

/// The lengths of the samples of a run whose data nobody has read: text, where its format is one,
/// and nothing stored that has a length.
///
/// # Errors
///
/// As [`Source::lengths`].
pub fn lengths_without_data(args: &CheckedArguments, model: &dyn Model) -> Result<SeqLength> {
    let is_stream = matches!(args.data.format, DataFormat::Text | DataFormat::Tokens);
    lengths(args, model, is_stream, &|_| None)
}

/// The lengths of samples, which may be cut from a stream; `stored` tells those of data that have
/// one.
fn lengths(
    args: &CheckedArguments,
    model: &dyn Model,
    is_stream: bool,
    stored: &dyn Fn(&str) -> Option<usize>,
) -> Result<SeqLength> {
    let has_two = model.objective() == Objective::SequenceToSequence;
    let given = args.seq_length;
    if let Some(SeqLength {
        target: Some(_), ..
    }) = given
        && !has_two
    {
        return Err(Error::Data(DataError::TwoLengths {
            family: model.info().family,
        }));
    }
    let input = given
        .map(|given| given.input)
        .or_else(|| stored("input_ids"))
        .unwrap_or(model.info().max_seq);
    let mut lengths = SeqLength::from(input);
    if has_two {
        lengths.target = match given.and_then(|given| given.target) {
            Some(target) => Some(target),
            None if is_stream => {
                let counts = corruption(&args.data).longest(input);
                let counts = counts.ok_or(Error::Data(DataError::ShortSpans { input }))?;
                Some(counts.target())
            }
            None => stored("labels").or(Some(input)),
        };
    }
    Ok(lengths)
}
