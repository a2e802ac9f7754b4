//! Text as a stream of samples, of which a part at a time is in memory.

use std::{collections::BTreeSet, sync::Arc};

use merak_trace::models::Objective;

use super::{
    chat::ChatTemplate,
    dataset::Dataset,
    inputs::ModelInputs,
    pieces::TextPart,
    records::{Record, RecordKind, Records},
    samples::{Maker, Told, corruption},
    source::DataTokens,
    store::Tokens,
    stream::{SampleStream, Samples},
    texts::{Fields, Texts},
    tokenizer::Tokenizer,
};
use crate::{
    config::CheckedArguments,
    error::{DataError, Error, Result},
};

/// Samples, or records, that become samples together.
const PART_SAMPLES: usize = 64;

/// Files of text that a stream reads.
#[derive(Debug)]
pub(super) struct StreamFiles {
    pub(super) texts: Texts,
    pub(super) kind: RecordKind,
    pub(super) template: Option<Box<ChatTemplate>>,
    pub(super) tokenizer: Tokenizer,
}

/// Samples of text for one model, in the order of the files.
#[derive(Debug, Clone)]
pub(super) struct TextStream(Arc<Inner>);

#[derive(Debug, Clone)]
struct Inner {
    files: Arc<StreamFiles>,
    model: ModelInputs,
    args: CheckedArguments,
    tokens: DataTokens,
    told: Arc<Told>,
}

impl TextStream {
    pub(super) fn new(files: StreamFiles, maker: &Maker<'_>) -> Self {
        Self(Arc::new(Inner {
            files: Arc::new(files),
            model: maker.model.clone(),
            args: maker.args.clone(),
            tokens: maker.tokens.clone(),
            told: Arc::default(),
        }))
    }
}

impl SampleStream for TextStream {
    fn samples(&self, pass: u64) -> Result<Samples> {
        let inner = &self.0;
        let parts: Parts = if inner.files.kind == RecordKind::Text {
            Box::new(TokenParts::new(inner)?)
        } else {
            Box::new(RecordParts::new(inner))
        };
        // What is drawn for a sample differs in each part of each pass.
        let samples = (pass << 32..).zip(parts).flat_map(|(draws, part)| {
            let samples: Samples = match part {
                Ok(data) => {
                    let indices = 0..data.len();
                    let sample = move |index| data.get_in_epoch(index, draws);
                    Box::new(indices.map(sample))
                }
                Err(error) => Box::new([Err(error)].into_iter()),
            };
            samples
        });
        Ok(Box::new(samples))
    }

    fn reseeded(&self, seed: u64) -> Option<Arc<dyn SampleStream>> {
        let inner = &self.0;
        // Masks and spans are drawn, and nothing else.
        let objective = inner.model.objective;
        let draws = inner.files.kind == RecordKind::Text
            && matches!(
                objective,
                Objective::MaskedLm | Objective::SequenceToSequence
            );
        if !draws || seed == inner.args.data_seed() {
            return None;
        }
        let args = inner.args.with_data_seed(seed);
        let inner = Inner::clone(inner);
        Some(Arc::new(Self(Arc::new(Inner { args, ..inner }))))
    }
}

/// The samples of a pass, some at a time.
type Parts = Box<dyn Iterator<Item = Result<Arc<dyn Dataset>>> + Send>;

/// Cuts of the stream of tokens, each with what the one before it left over.
struct TokenParts {
    inner: Arc<Inner>,
    pieces: Box<dyn Iterator<Item = Result<TextPart>> + Send>,
    /// Tokens of no sample yet.
    tokens: Vec<u32>,
    /// Tokens from the beginning of a sample to that of the next one.
    stride: usize,
    is_first: bool,
}

impl TokenParts {
    fn new(inner: &Arc<Inner>) -> Result<Self> {
        let input = inner.model.lengths.input;
        let stride = match inner.model.objective {
            Objective::SequenceToSequence => {
                let counts = corruption(&inner.args.data).longest(input);
                counts
                    .ok_or(Error::Data(DataError::ShortSpans { input }))?
                    .tokens
            }
            _ => input,
        };
        let of_file = {
            let inner = Arc::clone(inner);
            move |file| {
                inner
                    .files
                    .texts
                    .pieces_of(file, Fields::Text, &Arc::default())
            }
        };
        let files = 0..inner.files.texts.num_files();
        Ok(Self {
            inner: Arc::clone(inner),
            pieces: Box::new(files.flat_map(of_file)),
            tokens: Vec::new(),
            stride,
            is_first: true,
        })
    }

    /// Reads more tokens than the samples of a part need, or all that are left.
    fn fill(&mut self) -> Result<()> {
        let tokenizer = &self.inner.files.tokenizer;
        while self.tokens.len() <= PART_SAMPLES * self.stride
            && let Some(piece) = self.pieces.next()
        {
            let piece = piece?;
            tokenizer.encode_into(&piece.text, &mut self.tokens)?;
            if piece.ends {
                self.tokens.extend(tokenizer.end_of_document());
            }
        }
        Ok(())
    }

    fn part(&mut self) -> Result<Option<Arc<dyn Dataset>>> {
        self.fill()?;
        // A sample of next tokens needs one more. Too few for the first sample are an error.
        let is_causal = self.inner.model.objective == Objective::CausalLm;
        let needed = self.stride + usize::from(is_causal);
        if self.tokens.len() < needed && !self.is_first {
            return Ok(None);
        }
        self.is_first = false;
        let tokens = Tokens::from(self.tokens.clone());
        let maker = self.inner.maker();
        let data = maker.stream(tokens, "training", &self.inner.files.tokenizer)?;
        self.tokens.drain(..data.len() * self.stride);
        Ok(Some(data))
    }
}

impl Iterator for TokenParts {
    type Item = Result<Arc<dyn Dataset>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.part().transpose()
    }
}

/// Records, some at a time.
struct RecordParts {
    inner: Arc<Inner>,
    records: Box<dyn Iterator<Item = Result<Record>> + Send>,
}

impl RecordParts {
    fn new(inner: &Arc<Inner>) -> Self {
        let of_file = {
            let inner = Arc::clone(inner);
            move |file| inner.files.texts.records_of(file, &Arc::default())
        };
        let files = 0..inner.files.texts.num_files();
        Self {
            inner: Arc::clone(inner),
            records: Box::new(files.flat_map(of_file)),
        }
    }

    fn part(&mut self) -> Result<Option<Arc<dyn Dataset>>> {
        let records = self.records.by_ref().take(PART_SAMPLES);
        let records = Records::parsed(records.collect::<Result<_>>()?);
        if records.len() == 0 {
            return Ok(None);
        }
        let (maker, files) = (self.inner.maker(), &self.inner.files);
        Ok(Some(match files.kind {
            RecordKind::Chats => {
                let template = files.template.as_deref();
                let ([data, _], _) = maker.chats(&records, &files.tokenizer, template, 0.0)?;
                data
            }
            _ => maker.records(&records, &files.tokenizer)?.0,
        }))
    }
}

impl Iterator for RecordParts {
    type Item = Result<Arc<dyn Dataset>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.part().transpose()
    }
}

impl Inner {
    fn maker(&self) -> Maker<'_> {
        Maker {
            model: &self.model,
            args: &self.args,
            tokens: &self.tokens,
            classes: BTreeSet::new(),
            told: Arc::clone(&self.told),
        }
    }
}
