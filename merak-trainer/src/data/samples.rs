//! Samples of text, as a model learns from them.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use merak_trace::models::Objective;

use super::{
    chat::{AnsweredTokens, ChatDataset, ChatMaker, ChatTemplate},
    classes::{ClassDataset, LabelledText},
    dataset::{Dataset, IGNORED_LABEL, LABELS, held_out},
    inputs::ModelInputs,
    masked::{MaskedDataset, Masking},
    records::Records,
    source::DataTokens,
    spans::{Corruption, SpanDataset, SpanTokens},
    store::Tokens,
    tokenizer::Tokenizer,
    tokens::TokenDataset,
    translation::{PairDataset, PairShape},
};
use crate::{
    config::{CheckedArguments, DataArguments},
    error::{ConfigError, DataError, Error, Result},
};

/// Chats of which the ends of answers are looked at.
const LOOKED_AT: usize = 32;

/// The token that parts the documents of a stream.
fn end_of_document(tokenizer: &Tokenizer) -> Result<u32> {
    tokenizer.end_of_document().ok_or_else(|| {
        Error::Data(DataError::NoDocumentEnd {
            tokenizer: tokenizer.name(),
        })
    })
}

/// How much of a text span corruption leaves out.
pub(super) fn corruption(data: &DataArguments) -> Corruption {
    Corruption {
        noise_density: data.mlm_probability,
        mean_span_length: data.mean_noise_span_length,
    }
}

/// Bytes that an allocator adds to what it gives.
const ALLOCATION_BYTES: usize = 16;

/// Memory of a text with a class, beside its tokens.
pub(super) const TEXT_BYTES: usize = size_of::<LabelledText>() + 2 * ALLOCATION_BYTES;

/// Memory of a pair of sequences beside their tokens.
pub(super) const PAIR_BYTES: usize = size_of::<[Vec<u32>; 2]>() + 2 * ALLOCATION_BYTES;

/// Memory of a chat beside its tokens.
const CHAT_BYTES: usize = size_of::<AnsweredTokens>() + 2 * ALLOCATION_BYTES;

/// Bytes of the memory in which tokens lie.
fn token_bytes(tokens: &Vec<u32>) -> usize {
    tokens.capacity() * size_of::<u32>()
}

/// How many sequences were longer than a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Cuts {
    cut: usize,
    of: usize,
    /// Tokens of the longest sequence.
    longest: usize,
    limit: usize,
}

impl Cuts {
    /// Counts the sequences of these lengths that have more than `limit` tokens.
    fn of(lengths: impl Iterator<Item = usize>, limit: usize) -> Self {
        let none = Self {
            limit,
            ..Self::default()
        };
        lengths.fold(none, |cuts, length| Self {
            cut: cuts.cut + usize::from(length > limit),
            of: cuts.of + 1,
            longest: cuts.longest.max(length),
            limit,
        })
    }

    /// Warns where sequences were cut.
    fn tell(self, field: &'static str, told: &Told) {
        let Self {
            cut,
            of,
            longest,
            limit,
        } = self;
        if cut > 0 && told.is_first(field) {
            tracing::warn!(
                field,
                cut,
                of,
                longest,
                seq_length = limit,
                "records are longer than seq_length and are cut"
            );
        }
    }
}

/// What was told of the records: a stream of parts tells it of the first part that has it.
#[derive(Debug, Default)]
pub(super) struct Told(Mutex<BTreeSet<&'static str>>);

impl Told {
    /// Whether this is to be told: it was not yet.
    pub(super) fn is_first(&self, what: &'static str) -> bool {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.insert(what)
    }
}

/// Makes samples of text for one model.
pub(super) struct Maker<'a> {
    pub(super) model: &'a ModelInputs,
    pub(super) args: &'a CheckedArguments,
    pub(super) tokens: &'a DataTokens,
    /// The folders of all data that name classes.
    pub(super) classes: BTreeSet<String>,
    pub(super) told: Arc<Told>,
}

impl Maker<'_> {
    /// Samples of a stream of tokens.
    pub(super) fn stream(
        &self,
        tokens: Tokens,
        part: &'static str,
        tokenizer: &Tokenizer,
    ) -> Result<Arc<dyn Dataset>> {
        let (seq, seed) = (self.model.lengths.input, self.args.data_seed());
        Ok(match self.model.objective {
            Objective::MaskedLm => {
                let masking = self.masking(tokenizer)?;
                Arc::new(MaskedDataset::new(tokens, seq, masking, seed, part)?)
            }
            Objective::SequenceToSequence => {
                let shape = self.pair_shape();
                let counts = corruption(&self.args.data).longest(shape.input);
                let counts =
                    counts.ok_or(Error::Data(DataError::ShortSpans { input: shape.input }))?;
                if counts.target() > shape.target {
                    return Err(Error::Data(DataError::ShortTarget {
                        target: shape.target,
                        needed: counts.target(),
                        input: shape.input,
                    }));
                }
                let special = SpanTokens {
                    sentinels: self.sentinels(tokenizer, counts.spans)?,
                    end: self.end(tokenizer)?,
                };
                let data = SpanDataset::new(tokens, counts, shape, special, seed, part)?;
                Arc::new(data)
            }
            _ => {
                let data = TokenDataset::new(tokens, seq, part)?;
                if self.args.data.packing {
                    Arc::new(data.parted_by(end_of_document(tokenizer)?))
                } else {
                    Arc::new(data)
                }
            }
        })
    }

    /// Samples of records, and the bytes of memory that they take.
    pub(super) fn records(
        &self,
        records: &Records,
        tokenizer: &Tokenizer,
    ) -> Result<(Arc<dyn Dataset>, usize)> {
        if self.model.objective == Objective::SequenceClassification {
            self.classes(records, tokenizer)
        } else {
            self.pairs(records, tokenizer)
        }
    }

    /// Samples of chats, those of the last `fraction` apart, and the bytes of memory that they
    /// take.
    pub(super) fn chats(
        &self,
        records: &Records,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        fraction: f64,
    ) -> Result<([Arc<dyn Dataset>; 2], usize)> {
        let maker = ChatMaker {
            tokenizer,
            template,
            end: self.end(tokenizer).ok(),
            told: &self.told,
        };
        let seq = self.model.lengths.input;
        let mut chats = Vec::with_capacity(records.len());
        let mut inputs = Vec::with_capacity(records.len());
        let mut without_end = 0;
        for record in records.iter() {
            let mut chat = maker.tokens(&record?)?;
            inputs.push(chat.inputs());
            let is_looked_at = chats.len() < LOOKED_AT;
            without_end += usize::from(is_looked_at && !chat.answer_ends(tokenizer));
            chat.ids.truncate(seq + 1);
            chat.ids.shrink_to_fit();
            chat.is_answer.truncate(seq + 1);
            chat.is_answer.shrink_to_fit();
            chats.push(chat);
        }
        Cuts::of(inputs.into_iter(), seq).tell("chats", &self.told);
        let looked_at = chats.len().min(LOOKED_AT);
        if looked_at > 0 && without_end == looked_at && self.told.is_first("ends") {
            tracing::warn!(
                "no answer ends in a special token of the tokenizer: the model does not learn where to stop, and its \
                 texts run to \"max_new_tokens\""
            );
        }
        let has_answer = |chat: &&AnsweredTokens| chat.is_answer.iter().skip(1).any(|&is| is);
        let without = chats.len() - chats.iter().filter(has_answer).count();
        if without > 0 && self.told.is_first("answers") {
            let (of, seq_length) = (chats.len(), seq);
            tracing::warn!(
                without,
                of,
                seq_length,
                "chats have no answer within seq_length"
            );
        }
        let bytes =
            |chat: &AnsweredTokens| CHAT_BYTES + token_bytes(&chat.ids) + chat.is_answer.capacity();
        let held = chats.iter().map(bytes).sum();
        let held_out = held_out(chats.len(), fraction);
        let validation = chats.split_off(chats.len() - held_out);
        let parts = [(chats, "training"), (validation, "validation")];
        let parts = parts.map(|(chats, part)| self.samples_of_chats(chats, part));
        Ok((parts, held))
    }

    fn samples_of_chats(&self, chats: Vec<AnsweredTokens>, part: &'static str) -> Arc<dyn Dataset> {
        let (seq, pad) = (self.model.lengths.input, self.tokens.pad);
        if !self.args.data.packing {
            return Arc::new(ChatDataset::new(chats, seq, pad));
        }
        let (tokens, number) = (chats.iter().map(|chat| chat.inputs().min(seq)), chats.len());
        let tokens: usize = tokens.sum();
        let data = ChatDataset::packed(chats, seq, pad);
        let sequences = data.len();
        if sequences > 0 && self.told.is_first(part) {
            let percent = 100 * tokens / (sequences * seq);
            tracing::info!(part, chats = number, sequences, percent, "packed the chats");
        }
        Arc::new(data)
    }

    fn classes(
        &self,
        records: &Records,
        tokenizer: &Tokenizer,
    ) -> Result<(Arc<dyn Dataset>, usize)> {
        let needs =
            "of sequence classification need \"text\" and \"label\" and may have \"text_pair\"";
        let labels = self.model.get(LABELS);
        let classes = labels.and_then(|input| input.limit).unwrap_or_default();
        let seq = self.model.lengths.input;
        let mut texts = Vec::with_capacity(records.len());
        for record in records.iter() {
            let record = record?;
            let pair = record.optional_text("text_pair")?;
            let text = (record.text("text", needs)?, pair);
            let label = if self.args.only_predicts() && record.lacks_label(&self.tokens.label2id) {
                IGNORED_LABEL
            } else {
                record.label(&self.tokens.label2id, classes, needs)?
            };
            let encoded = tokenizer.encode_with_special(&[text], seq)?;
            texts.extend(encoded.into_iter().map(|text| LabelledText { text, label }));
        }
        Cuts::of(texts.iter().map(|text| text.text.uncut), seq).tell("text", &self.told);
        let held = texts
            .iter()
            .map(|LabelledText { text, .. }| {
                TEXT_BYTES + token_bytes(&text.ids) + token_bytes(&text.types)
            })
            .sum();
        let data = ClassDataset::new(texts, seq, self.tokens.pad);
        Ok((Arc::new(data), held))
    }

    fn pairs(&self, records: &Records, tokenizer: &Tokenizer) -> Result<(Arc<dyn Dataset>, usize)> {
        let needs = "of sequence-to-sequence learning need \"source\" and \"target\", or \"text\" for span corruption";
        let (shape, end) = (self.pair_shape(), self.end(tokenizer)?);
        let limits = [("source", shape.input), ("target", shape.target)];
        let mut pairs: Vec<[Vec<u32>; 2]> = Vec::with_capacity(records.len());
        let mut uncut = Vec::with_capacity(2 * records.len());
        for record in records.iter() {
            let record = record?;
            let mut pair = [Vec::new(), Vec::new()];
            for (ids, (field, limit)) in pair.iter_mut().zip(limits) {
                *ids = tokenizer.encode(record.text(field, needs)?.as_bytes())?;
                uncut.push(ids.len() + 1);
                ids.truncate(limit - 1);
                ids.push(end);
                ids.shrink_to_fit();
            }
            pairs.push(pair);
        }
        for (part, (field, limit)) in limits.into_iter().enumerate() {
            let lengths = uncut.iter().skip(part).step_by(2);
            Cuts::of(lengths.copied(), limit).tell(field, &self.told);
        }
        let held = pairs
            .iter()
            .map(|[source, target]| PAIR_BYTES + token_bytes(source) + token_bytes(target))
            .sum();
        Ok((Arc::new(PairDataset::new(pairs, shape)), held))
    }

    fn pair_shape(&self) -> PairShape {
        PairShape {
            input: self.model.lengths.input,
            target: self.model.target(),
            pad: self.tokens.pad,
            start: self.tokens.decoder_start,
        }
    }

    fn masking(&self, tokenizer: &Tokenizer) -> Result<Masking> {
        let data = &self.args.data;
        let mask_token = match tokenizer.mask_token() {
            Some(mask) => mask,
            None => self.spare(tokenizer, 1, "token for what is hidden, [MASK] or <mask>")?[0],
        };
        Ok(Masking {
            mlm_probability: data.mlm_probability,
            mask_replace_prob: data.mask_replace_prob,
            random_replace_prob: data.random_replace_prob,
            mask_token,
            vocab_size: tokenizer.vocab_size(),
            kept: tokenizer.end_of_document(),
        })
    }

    fn sentinels(&self, tokenizer: &Tokenizer, count: usize) -> Result<Vec<u32>> {
        let found = tokenizer.sentinels();
        if found.len() >= count {
            return Ok(found);
        }
        let what = format!("tokens for {count} left-out pieces, <extra_id_0> and so on");
        self.spare(tokenizer, count, &what)
    }

    /// The last tokens of the model's vocabulary, the last one first, for uses that the tokenizer
    /// has no tokens for.
    fn spare(&self, tokenizer: &Tokenizer, count: usize, what: &str) -> Result<Vec<u32>> {
        let (tokens, vocab) = (tokenizer.vocab_size(), self.model.vocab_size);
        if vocab < tokens.saturating_add(count) {
            return Err(Error::Data(DataError::SpareTokens {
                what: what.to_owned(),
                tokens,
                vocab,
                needed: tokens.saturating_add(count),
            }));
        }
        Ok((vocab - count..vocab)
            .rev()
            .map(|token| token as u32)
            .collect())
    }

    /// The token that ends a sequence.
    fn end(&self, tokenizer: &Tokenizer) -> Result<u32> {
        let end = tokenizer.end_of_document();
        let end = end.or_else(|| {
            let named = self.args.eos_token_id.as_ref();
            let named = named.and_then(|ends| ends.0.first().copied());
            let end = named.or(self.model.eos_token_id)?;
            ((end as usize) < tokenizer.vocab_size()).then_some(end)
        });
        end.ok_or(Error::Config(ConfigError::MissingKey {
            key: "eos_token_id",
            advice: "the tokenizer has no token that ends a text".to_owned(),
        }))
    }
}
