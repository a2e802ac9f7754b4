//! What one part of the data holds.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use merak_ckpt::words::Bytes;
use merak_trace::models::{Objective, Visible};

use super::{
    chat::{self, ChatTemplate},
    corpus::{self, CRATES, Corpus},
    dataset::{Dataset, Subset},
    images::{ImageDataset, ImageFiles},
    input::Input,
    inputs::ATTENTION_MASK,
    loader::AHEAD,
    packed::DOCUMENT_IDS,
    records::{self, FirstRecord, Record, RecordKind, Records},
    samples::{Maker, PAIR_BYTES, TEXT_BYTES},
    source::{Datasets, Reader, count},
    store::Tokens,
    stream::StreamDataset,
    tensor_files::TensorFiles,
    tensors::TensorDataset,
    text::Need,
    text_stream::{StreamFiles, TextStream},
    texts::Texts,
    token_file::TokenFiles,
    tokenizer::Tokenizer,
};
use crate::{
    config::DataFormat,
    error::{ConfigError, DataError, Error, Result},
    machine::available_bytes,
};

/// Data of one kind that were read, and the share of them, at the end, that is for validation.
#[derive(Debug)]
pub(super) struct Content {
    kind: Kind,
    /// Where the data came from, for people.
    description: String,
    validation_fraction: f64,
}

#[derive(Debug)]
enum Kind {
    Stream(Corpus),
    Records(Records, Tokenizer),
    Chats(Records, Tokenizer, Option<Box<ChatTemplate>>),
    Tensors(TensorFiles),
    Images(ImageFiles),
    Streamed(StreamFiles),
}

impl Reader<'_> {
    /// Reads what an input names; without one, the sources of the crates.
    pub(super) fn read(&self, input: Option<Input<'_>>, fraction: f64) -> Result<Content> {
        let format = self.arguments.format;
        if self.arguments.streaming && !input.is_some_and(|input| input.validates()) {
            return self.open_stream(input);
        }
        let Some(input) = input else {
            if format != DataFormat::Text {
                return Err(Error::Config(ConfigError::MissingKey {
                    key: "data.path",
                    advice: format!("\"data.format\" {format} needs a file or folder"),
                }));
            }
            return self.read_text(None, fraction);
        };
        input.blamed(match format {
            DataFormat::Text => self.read_text(Some(input), fraction),
            DataFormat::Tensors => read_tensors(input, fraction),
            DataFormat::Tokens => self.read_tokens(input, fraction),
            DataFormat::Images => list_images(input, fraction),
            DataFormat::Jsonl | DataFormat::Csv | DataFormat::Tsv | DataFormat::Parquet => {
                self.read_records(input, fraction)
            }
        })
    }

    /// The tokenizer of data that are text or tokens.
    fn text_tokenizer(&self) -> Tokenizer {
        let tokenizer = self.tokenizer.clone();
        tokenizer.expect("formats of text and tokens have a tokenizer")
    }

    fn read_tokens(&self, input: Input<'_>, fraction: f64) -> Result<Content> {
        let tokenizer = self.text_tokenizer();
        let files = TokenFiles::open_all(input, &tokenizer)?;
        let (paths, number) = (input.describe(), count(files.num_files(), "token file"));
        let documents = usize::try_from(files.num_documents()).unwrap_or(usize::MAX);
        let description = format!("{paths}: {number}, {}", count(documents, "document"));
        let tokens = Tokens::new(Arc::new(files));
        let corpus = Corpus::split(tokenizer, &tokens, fraction, description);
        Ok(Content::of_stream(corpus, fraction))
    }

    fn read_text(&self, input: Option<Input<'_>>, fraction: f64) -> Result<Content> {
        let tokenizer = self.text_tokenizer();
        input.iter().flat_map(Input::iter).for_each(warn_of_records);
        let (texts, description) = corpus::read(input, self.arguments, self.crates, &tokenizer)?;
        let corpus = Corpus::of_documents(tokenizer, &texts, fraction, description)?;
        Ok(Content::of_stream(corpus, fraction))
    }

    fn read_records(&self, input: Input<'_>, fraction: f64) -> Result<Content> {
        let (arguments, tokenizer) = (self.arguments, self.text_tokenizer());
        let room = (record_need(&tokenizer, self.objective), available_bytes());
        let (format, skips) = (arguments.format, arguments.skip_binary);
        let (records, files) = records::read(input, format, skips, room, self.objective)?;
        let described = count(records.len(), "record");
        let description = format!("{}: {files}, {described}", input.describe());
        let first = records.iter().next().transpose()?;
        let kind = match RecordKind::of(first.as_ref(), self.objective) {
            RecordKind::Text => {
                let corpus = self.corpus_of(&records, fraction, description)?;
                return Ok(Content::of_stream(corpus, fraction));
            }
            RecordKind::Samples => Kind::Records(records, tokenizer),
            RecordKind::Chats => {
                let template = self.chat_template(first.as_ref(), &tokenizer)?;
                Kind::Chats(records, tokenizer, template.map(Box::new))
            }
        };
        Ok(Content {
            kind,
            description,
            validation_fraction: fraction,
        })
    }

    /// The template of chats, with a warning where it is used and names a token that the tokenizer
    /// lacks.
    fn chat_template(
        &self,
        first: Option<&Record>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<ChatTemplate>> {
        let template = ChatTemplate::load(self.arguments)?;
        if let Some(template) = &template
            && first.is_some_and(chat::needs_template)
        {
            for told in template.lacking_tokens(tokenizer) {
                tracing::warn!("{told}");
            }
        }
        Ok(template)
    }

    /// The stream of the texts of records.
    fn corpus_of(&self, records: &Records, fraction: f64, description: String) -> Result<Corpus> {
        let needs = match self.objective {
            Objective::CausalLm => "need \"text\", \"messages\", or \"prompt\" and \"completion\"",
            _ => "need \"text\"",
        };
        let texts = records.iter().map(|record| {
            let record = record?;
            record.text("text", needs).map(str::to_owned)
        });
        Corpus::of(self.text_tokenizer(), texts, fraction, description)
    }

    /// Lists what a stream reads while the run goes on.
    fn open_stream(&self, input: Option<Input<'_>>) -> Result<Content> {
        let (arguments, tokenizer) = (self.arguments, self.text_tokenizer());
        if arguments.format == DataFormat::Text {
            input.iter().flat_map(Input::iter).for_each(warn_of_records);
        }
        let mut texts = Texts::of(arguments, self.crates, tokenizer.text_kind())?;
        let first = match arguments.format {
            DataFormat::Text => None,
            _ => texts.first_record()?,
        };
        let kind = match arguments.format {
            DataFormat::Text => RecordKind::Text,
            _ => RecordKind::of(first.as_ref(), self.objective),
        };
        let template = match kind {
            RecordKind::Chats => self.chat_template(first.as_ref(), &tokenizer)?,
            _ => None,
        };
        texts.first = first.map(|first| FirstRecord::of(&first, self.objective));
        let named = input.map_or_else(|| CRATES.to_owned(), |input| input.describe());
        let files = count(texts.num_files(), "file");
        Ok(Content {
            description: format!("{named}: {files}, {} as a stream", Bytes(texts.bytes())),
            kind: Kind::Streamed(StreamFiles {
                texts,
                kind,
                template: template.map(Box::new),
                tokenizer,
            }),
            validation_fraction: 0.0,
        })
    }
}

/// Warns of a file of records that is read as text.
fn warn_of_records(path: &Path) {
    let end = path.extension().and_then(|end| end.to_str());
    if let Some(format @ ("jsonl" | "csv" | "tsv")) = end {
        let path = path.display();
        tracing::warn!(%path, "the file is read as plain text: \"data.format\" {format} reads its records");
    }
}

fn read_tensors(input: Input<'_>, fraction: f64) -> Result<Content> {
    let files = TensorFiles::open_all(input)?;
    let names: Vec<_> = files.names().collect();
    let (paths, count) = (input.describe(), count(files.num_files(), "file"));
    Ok(Content {
        description: format!("{paths}: {count}, {}", names.join(", ")),
        kind: Kind::Tensors(files),
        validation_fraction: fraction,
    })
}

fn list_images(input: Input<'_>, fraction: f64) -> Result<Content> {
    let files = ImageFiles::list(input)?;
    let number = count(files.len(), "image");
    let classes = count(files.classes().len(), "folder");
    Ok(Content {
        description: format!("{}: {number} in {classes}", input.describe()),
        kind: Kind::Images(files),
        validation_fraction: fraction,
    })
}

impl Content {
    fn of_stream(corpus: Corpus, validation_fraction: f64) -> Self {
        Self {
            description: corpus.description.clone(),
            kind: Kind::Stream(corpus),
            validation_fraction,
        }
    }

    pub(super) fn description(&self) -> &str {
        &self.description
    }

    /// The folders that name classes.
    pub(super) fn classes(&self) -> BTreeSet<String> {
        match &self.kind {
            Kind::Images(files) => files.classes(),
            _ => BTreeSet::new(),
        }
    }

    /// Whether samples are cut from a stream of tokens.
    pub(super) fn is_stream(&self) -> bool {
        match &self.kind {
            Kind::Stream(_) => true,
            Kind::Streamed(files) => files.kind == RecordKind::Text,
            _ => false,
        }
    }

    /// Whether the data are chats that a template makes texts of, as the first record shows.
    pub(super) fn needs_template(&self) -> bool {
        let first = match &self.kind {
            Kind::Chats(records, ..) => records.iter().next(),
            Kind::Streamed(files) if files.kind == RecordKind::Chats => {
                files.texts.first_record().transpose()
            }
            _ => None,
        };
        first.is_some_and(|first| first.is_ok_and(|first| chat::needs_template(&first)))
    }

    /// The length of a sequence that files give.
    pub(super) fn stored_length(&self, name: &str) -> Option<usize> {
        match &self.kind {
            Kind::Tensors(files) => files.shape(name)?.first().copied(),
            _ => None,
        }
    }

    /// The earlier tokens that a token sees: padding may stand before them, or other documents.
    pub(super) fn visible(&self) -> Result<Visible> {
        Ok(match &self.kind {
            Kind::Tensors(files) => {
                let has_documents = files.shape(DOCUMENT_IDS).is_some();
                match (has_documents, files.hides_first(ATTENTION_MASK)?) {
                    (true, true) => return Err(Error::Data(DataError::HiddenDocuments)),
                    (true, false) => Visible::Document,
                    (false, true) => Visible::Unpadded,
                    (false, false) => Visible::All,
                }
            }
            _ => Visible::All,
        })
    }

    /// Makes samples to train on and to validate on where they are wanted, the latter also where
    /// there are some. Returns the stream that they are cut from too, where there is one.
    pub(super) fn datasets(
        self,
        maker: &Maker<'_>,
        [trains, validates]: [bool; 2],
    ) -> Result<(Datasets, Option<Corpus>)> {
        let fraction = self.validation_fraction;
        let split = |whole: Arc<dyn Dataset>| {
            Subset::split(&whole, fraction).map(|part| Arc::new(part) as Arc<dyn Dataset>)
        };
        let ([train, validation], held_bytes) = match self.kind {
            Kind::Stream(corpus) => {
                let make =
                    |tokens: &_, part| maker.stream(Clone::clone(tokens), part, &corpus.tokenizer);
                let train = trains
                    .then(|| make(&corpus.train, "training"))
                    .transpose()?;
                let validates = validates || !corpus.validation.is_empty();
                let validation = validates
                    .then(|| make(&corpus.validation, "validation"))
                    .transpose()?;
                let datasets = Datasets {
                    train,
                    validation,
                    held_bytes: corpus.train.held_bytes() + corpus.validation.held_bytes(),
                };
                return Ok((datasets, Some(corpus)));
            }
            Kind::Streamed(files) => {
                let (data, held_bytes) = streamed(files, maker);
                let datasets = Datasets {
                    train: trains.then_some(data),
                    validation: None,
                    held_bytes,
                };
                return Ok((datasets, None));
            }
            Kind::Records(records, tokenizer) => {
                let (whole, held_bytes) = maker.records(&records, &tokenizer)?;
                (split(whole), held_bytes)
            }
            Kind::Chats(records, tokenizer, template) => {
                maker.chats(&records, &tokenizer, template.as_deref(), fraction)?
            }
            Kind::Tensors(files) => {
                let tokens = maker.tokens;
                let ends = (tokens.decoder_start, tokens.pad);
                let shifts = maker.args.shift_labels;
                let data = TensorDataset::new(files, maker.model, ends, shifts)?;
                (split(Arc::new(data)), 0)
            }
            Kind::Images(files) => {
                let (found, label2id) = (&maker.classes, &maker.tokens.label2id);
                let folder = maker.args.model.hf_dir.as_ref();
                let folder = folder.map(|folder| &*folder.0);
                let data = ImageDataset::new(&files, found, maker.model, label2id, folder)?;
                (split(Arc::new(data)), 0)
            }
        };
        let validates = validates || !validation.is_empty();
        let datasets = Datasets {
            train: trains.then_some(train),
            validation: validates.then_some(validation),
            held_bytes,
        };
        Ok((datasets, None))
    }
}

/// The samples of a stream, some of which wait for slower ranks: those that loaders read ahead, and
/// two steps. Returns the bytes of memory that they take too.
fn streamed(files: StreamFiles, maker: &Maker<'_>) -> (Arc<dyn Dataset>, usize) {
    let args = maker.args;
    let microbatch = args.per_device_train_batch_size * args.dp;
    let ahead = (AHEAD + 2) * args.dataloader_num_workers * microbatch;
    let (buffer, window) = (args.data.shuffle_buffer, 2 * args.global_batch() + ahead);
    let elements = maker.model.inputs.iter().map(|input| input.shape.iter());
    let elements: usize = elements.map(Iterator::product::<usize>).sum();
    let held_bytes = (buffer + window).saturating_mul(elements * size_of::<i64>());
    let stream = TextStream::new(files, maker);
    let data = StreamDataset::new(Arc::new(stream))
        .shuffled(buffer, args.data_seed())
        .with_window(window);
    (Arc::new(data), held_bytes)
}

/// The memory of records: their text, and what is made of it meanwhile, a stream or samples.
fn record_need(tokenizer: &Tokenizer, objective: Objective) -> Need {
    let per_line = match objective {
        Objective::SequenceClassification => TEXT_BYTES,
        // With the lengths of both sequences before they are cut.
        Objective::SequenceToSequence => PAIR_BYTES + 2 * size_of::<usize>(),
        // The token after a text, which takes less than the text's own line end.
        _ => 0,
    };
    Need {
        per_byte: tokenizer.bytes_per_byte(),
        per_line: per_line as u64,
    }
}
