//! From the data that a configuration names to the samples of its model.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use merak_trace::models::{Model, Objective};

use super::{
    corpus::Corpus,
    crates::CrateSources,
    dataset::{Dataset, Subset},
    inputs::{ATTENTION_MASK, ModelInputs},
    records::{self, Records},
    samples::{Maker, PAIR_BYTES, TEXT_BYTES, corruption},
    tensor_files::TensorFiles,
    tensors::TensorDataset,
    text::Need,
    tokenizer::Tokenizer,
};
use crate::{
    config::{CheckedArguments, DataArguments, DataFormat, SeqLength, TokenizerSource},
    error::{ConfigError, DataError, Error, Result},
    machine::available_bytes,
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
/// | records | `text` | `text` | `text`, `label` | `source`, `target`; or `text` | |
/// | `tensors` | yes | yes | yes | yes | yes |
///
/// The format is `data.format`; records are `jsonl`, `csv` and `tsv`. Records for text classes may
/// have `text_pair`.
///
/// Each `text` of records is a document of a stream, except where texts have classes.
#[derive(Debug)]
pub struct Source {
    /// The tokenizer; none where there is no text and no tokenizer file.
    pub tokenizer: Option<Tokenizer>,
    /// Where the data came from, for people.
    pub description: String,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Stream(Corpus),
    Records(Records, Tokenizer),
    Tensors(TensorFiles),
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
        let format = arguments.format;
        check_kind(format, model)?;
        let source = match (&arguments.path, format) {
            (_, DataFormat::Text) => Self::of_stream(Corpus::load(arguments, crates)?),
            (None, _) => {
                return Err(Error::Config(ConfigError::MissingKey {
                    key: "data.path",
                    advice: format!("\"data.format\" {format} needs a file or folder"),
                }));
            }
            (Some(path), DataFormat::Tensors) => Self::of_tensors(&path.0, &arguments.tokenizer)?,
            (Some(path), _) => Self::of_records(&path.0, arguments, model.objective())?,
        };
        source.check_vocabulary(model)?;
        Ok(source)
    }

    fn of_stream(corpus: Corpus) -> Self {
        Self {
            tokenizer: Some(corpus.tokenizer.clone()),
            description: corpus.description.clone(),
            content: Content::Stream(corpus),
        }
    }

    fn of_tensors(path: &Path, tokenizer: &TokenizerSource) -> Result<Self> {
        let files = TensorFiles::open(path)?;
        let tokenizer = match tokenizer {
            TokenizerSource::Bytes => None,
            file @ TokenizerSource::File(_) => Some(Tokenizer::load(file)?),
        };
        let names: Vec<_> = files.names().collect();
        let (path, count) = (path.display(), count(files.num_files(), "file"));
        Ok(Self {
            tokenizer,
            description: format!("{path}: {count}, {}", names.join(", ")),
            content: Content::Tensors(files),
        })
    }

    fn of_records(path: &Path, arguments: &DataArguments, objective: Objective) -> Result<Self> {
        let tokenizer = Tokenizer::load(&arguments.tokenizer)?;
        let room = (record_need(&tokenizer, objective), available_bytes());
        let (records, files) = records::read(path, arguments.format, arguments.skip_binary, room)?;
        let described = count(records.len(), "record");
        let description = format!("{}: {files}, {described}", path.display());
        let is_stream = match objective {
            Objective::SequenceToSequence => {
                let first = records.iter().next().transpose()?;
                first.is_some_and(|first| !first.has("source") && first.has("text"))
            }
            Objective::SequenceClassification => false,
            _ => true,
        };
        if !is_stream {
            return Ok(Self {
                tokenizer: Some(tokenizer.clone()),
                description,
                content: Content::Records(records, tokenizer),
            });
        }
        let texts = records.iter().map(|record| {
            let record = record?;
            record.text("text", "need \"text\"").map(str::to_owned)
        });
        let fraction = arguments.validation_fraction;
        let corpus = Corpus::of(tokenizer, texts, fraction, description)?;
        Ok(Self::of_stream(corpus))
    }

    fn check_vocabulary(&self, model: &dyn Model) -> Result<()> {
        let vocab = model.info().vocab_size;
        match &self.tokenizer {
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

    /// Whether padding stands before tokens. A model of the next token must be told of it; to
    /// padding behind them no token attends.
    ///
    /// # Errors
    ///
    /// When a file cannot be read.
    pub fn pads_before_tokens(&self) -> Result<bool> {
        match &self.content {
            Content::Tensors(files) => files.hides_first(ATTENTION_MASK),
            _ => Ok(false),
        }
    }

    /// The lengths of sequences: those of the arguments, else of tensors, else of the model.
    ///
    /// # Errors
    ///
    /// Two lengths for a model that has one, or one that is too short for span corruption.
    pub fn lengths(&self, args: &CheckedArguments, model: &dyn Model) -> Result<SeqLength> {
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
        let stored = |name: &str| match &self.content {
            Content::Tensors(files) => files.shape(name)?.first().copied(),
            _ => None,
        };
        let input = given
            .map(|given| given.input)
            .or_else(|| stored("input_ids"))
            .unwrap_or(model.info().max_seq);
        let mut lengths = SeqLength::from(input);
        if has_two {
            lengths.target = match (given.and_then(|given| given.target), &self.content) {
                (Some(target), _) => Some(target),
                (None, Content::Stream(_)) => {
                    let counts = corruption(&args.data).longest(input);
                    let counts = counts.ok_or(Error::Data(DataError::ShortSpans { input }))?;
                    Some(counts.target())
                }
                (None, _) => stored("labels").or(Some(input)),
            };
        }
        Ok(lengths)
    }

    /// Makes samples for a model: for validation, and for training if `trains` is set. Returns the
    /// stream that they are cut from too, where there is one.
    ///
    /// # Errors
    ///
    /// Too little data, or data that the model cannot take.
    pub fn datasets(
        self,
        model: &ModelInputs,
        args: &CheckedArguments,
        tokens: &DataTokens,
        trains: bool,
    ) -> Result<(Datasets, Option<Corpus>)> {
        let maker = Maker {
            model,
            args,
            tokens,
        };
        let fraction = args.data.validation_fraction;
        let wants_validation = !trains || args.do_eval;
        let (whole, held_bytes): (Arc<dyn Dataset>, _) = match self.content {
            Content::Stream(corpus) => {
                let make = |tokens: &Arc<[u32]>, part| {
                    maker.stream(Arc::clone(tokens), part, &corpus.tokenizer)
                };
                let train = trains
                    .then(|| make(&corpus.train, "training"))
                    .transpose()?;
                let validates = wants_validation || !corpus.validation.is_empty();
                let validation = validates
                    .then(|| make(&corpus.validation, "validation"))
                    .transpose()?;
                let held = size_of_val(&*corpus.train) + size_of_val(&*corpus.validation);
                let datasets = Datasets {
                    train,
                    validation,
                    held_bytes: held,
                };
                return Ok((datasets, Some(corpus)));
            }
            Content::Records(records, tokenizer) => maker.records(&records, &tokenizer)?,
            Content::Tensors(files) => {
                let data = TensorDataset::new(files, model, tokens.decoder_start, tokens.pad)?;
                (Arc::new(data), 0)
            }
        };
        let [train, validation] = Subset::split(&whole, fraction);
        let validates = wants_validation || !validation.is_empty();
        let datasets = Datasets {
            train: trains.then(|| Arc::new(train) as Arc<dyn Dataset>),
            validation: validates.then(|| Arc::new(validation) as Arc<dyn Dataset>),
            held_bytes,
        };
        Ok((datasets, None))
    }
}

/// Checks that files of this format can hold the samples that a model learns from.
fn check_kind(format: DataFormat, model: &dyn Model) -> Result<()> {
    let objective = model.objective();
    let expected = match (objective, format) {
        (_, DataFormat::Tensors)
        | (Objective::CausalLm | Objective::MaskedLm | Objective::SequenceToSequence, _)
        | (
            Objective::SequenceClassification,
            DataFormat::Jsonl | DataFormat::Csv | DataFormat::Tsv,
        ) => return Ok(()),
        (Objective::SequenceClassification, _) => "jsonl, csv, tsv or tensors",
        _ => "tensors",
    };
    Err(Error::Data(DataError::DataKind {
        family: model.info().family,
        objective: objective.to_string(),
        format: format.as_str(),
        expected,
    }))
}

/// The memory of records: their text, and what is made of it meanwhile, a stream or samples.
fn record_need(tokenizer: &Tokenizer, objective: Objective) -> Need {
    let per_line = match objective {
        Objective::SequenceClassification => TEXT_BYTES,
        // With the lengths of both sequences before they are cut.
        Objective::SequenceToSequence => PAIR_BYTES + 2 * size_of::<usize>(),
        // The token behind a text, which takes less than the text's own line end.
        _ => 0,
    };
    Need {
        per_byte: tokenizer.bytes_per_byte(),
        per_line: per_line as u64,
    }
}

pub(super) fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}
