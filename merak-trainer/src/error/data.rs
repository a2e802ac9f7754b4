//! Errors of data.

use super::words::{
    NO_LENGTH, at_position, of_path, other_share, own_tokenizer, passed_over, purpose_of_samples,
    records_of,
};
use merak_ckpt::words::{Bytes, brief, file, sentence};
use merak_mpu::names::did_you_mean;
use std::{fmt, path::PathBuf};

/// What is wrong with the data, alone or beside the model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// More data than memory has room for.
    #[error(
        "{} has {} of data, which take at least {} of memory, but this process may use {}: give less data, or read a \
         part of text with \"data.max_bytes\"",
        file(path), Bytes(*found), Bytes(*needed), Bytes(*available)
    )]
    DataTooLarge {
        /// The file or folder.
        path: PathBuf,
        /// Bytes of it that would be read.
        found: u64,
        /// Bytes of memory that these take at least.
        needed: u64,
        /// Bytes that the process may use.
        available: u64,
    },
    /// A data path without a byte of text.
    #[error("no text in {}: \"data.path\" needs a file or folder with text{}", file(path), passed_over(*skipped))]
    NoText {
        /// The path.
        path: PathBuf,
        /// Files that were passed over because they are not text.
        skipped: usize,
    },
    /// A file that was to be read as text.
    #[error(
        "cannot read {} as text: {found} (offset {offset}): {instead}, or set \"data.skip_binary\" to true to pass over \
         such files",
        file(path)
    )]
    NotText {
        /// The file.
        path: PathBuf,
        /// The first byte that is not text.
        offset: usize,
        /// What the file is instead.
        found: String,
        /// What to do about it.
        instead: &'static str,
    },
    /// A data path without a record.
    #[error("no records in {}: {format} needs {}", file(path), records_of(format))]
    NoRecords {
        /// The path.
        path: PathBuf,
        /// The format that the files should have.
        format: &'static str,
    },
    /// Samples that a model cannot learn from.
    #[error(
        "none of the {samples} {part} samples{} has a label other than {}: there is nothing to {}",
        of_path(path.as_deref()), ignored, purpose_of_samples(part)
    )]
    NoLabels {
        /// `training` or `evaluation`.
        part: &'static str,
        /// Number of its samples.
        samples: usize,
        /// The label that counts as none.
        ignored: i64,
        /// Where the data are.
        path: Option<PathBuf>,
    },
    /// No data path is given and the sources of the crates cannot be found either.
    #[error("no text to train on, because {reason}: set \"data.path\" to a file or folder of text")]
    NoDefaultText {
        /// What is missing.
        reason: String,
    },
    /// A tokenizer file that cannot be used.
    #[error("cannot use the tokenizer {}: {}", file(path), sentence(message))]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A chat template that cannot be used.
    #[error("cannot use the chat template of {}: {}", file(path), sentence(reason))]
    ChatTemplate {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Less data than one step needs.
    #[error(
        "{samples} {split} samples are fewer than one global batch of {global_batch} \
         ({batch} per microbatch x {microbatches} microbatches x dp {dp}): \
         give more data or a smaller batch"
    )]
    TooFewSamples {
        /// `training` or `evaluation`.
        split: &'static str,
        /// Samples of the data set.
        samples: usize,
        /// Samples of a step.
        global_batch: usize,
        /// Samples of a microbatch.
        batch: usize,
        /// Microbatches of a step and replica.
        microbatches: usize,
        /// Replicas.
        dp: usize,
    },
    /// Fewer tokens than one sample needs.
    #[error(
        "the {part} part of the data has {tokens} tokens, but one sample needs {needed}: \
         give more data or a smaller \"seq_length\"{}",
        other_share(part)
    )]
    TooFewTokens {
        /// `training` or `validation`.
        part: &'static str,
        /// Tokens there are.
        tokens: usize,
        /// Tokens of a sample, `seq_length` + 1.
        needed: usize,
    },
    /// Samples whose tensors cannot be laid side by side.
    #[error(
        "the tensor \"{name}\" of sample {sample} is {found}, but must be {expected} as in the batch's first sample"
    )]
    UnlikeSamples {
        /// The tensor's name.
        name: String,
        /// The sample's index in the data set.
        sample: usize,
        /// Its shape, or that it is absent.
        found: String,
        /// The shape in the first sample.
        expected: String,
    },
    /// Files of a kind that a model cannot learn from.
    #[error(
        "this {family} model is for {objective}, for which \"data.format\" {format} has nothing: choose {expected}"
    )]
    DataKind {
        /// The model's family.
        family: &'static str,
        /// What it learns.
        objective: String,
        /// What the files hold.
        format: &'static str,
        /// The formats that would do.
        expected: &'static str,
    },
    /// A record of a file that is not as it should be.
    #[error("{}:{line}: {}", file(path), sentence(reason))]
    Record {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What was found and expected.
        reason: String,
    },
    /// A file of tensors that cannot be used.
    #[error("cannot use the tensors of {}: {}", file(path), sentence(reason))]
    TensorFile {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A token file that cannot be used.
    #[error("cannot use the tokens of {}: {}", file(path), sentence(reason))]
    TokenFile {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A token file that another tokenizer has made.
    #[error(
        "the tokens of {} were made with another tokenizer ({made_with}) than {} ({found}): {}",
        file(path), brief(given), own_tokenizer(own.as_deref())
    )]
    OtherTokenizer {
        /// The token file.
        path: PathBuf,
        /// The tokenizer that made it.
        made_with: String,
        /// The name of the one that is given.
        given: String,
        /// What that one is.
        found: String,
        /// The file of the tokenizer that made it, where it is there.
        own: Option<PathBuf>,
    },
    /// A place for token files that has something else.
    #[error(
        "{} is no folder of tokens, and is not overwritten: {found}; name a new folder",
        file(path)
    )]
    NoTokenFolder {
        /// The place.
        path: PathBuf,
        /// What is there.
        found: String,
    },
    /// Data without a tensor that the model reads.
    #[error(
        "this {family} model for {objective} reads \"{name}\" ({expected}), but the data give only: {given}"
    )]
    MissingTensor {
        /// The model's family.
        family: &'static str,
        /// What it learns.
        objective: String,
        /// The tensor.
        name: String,
        /// Its type and sizes.
        expected: String,
        /// What is there.
        given: String,
    },
    /// A tensor of another type or size than the model reads.
    #[error("the data give \"{name}\" as {found}, but this {family} model reads {expected}")]
    TensorType {
        /// The model's family.
        family: &'static str,
        /// The tensor.
        name: String,
        /// Its type and sizes in the model.
        expected: String,
        /// Its type and sizes in the data.
        found: String,
    },
    /// An integer that the model cannot look up.
    #[error(
        "\"{name}\" of sample {sample} has the value {found}{}, but this {family} model takes {expected}",
        at_position(*position)
    )]
    TensorValue {
        /// The tensor.
        name: String,
        /// The sample, from 0.
        sample: usize,
        /// The value.
        found: i64,
        /// Its place among those of the sample, from 0, where there are several.
        position: Option<usize>,
        /// The model's family.
        family: &'static str,
        /// The legal values.
        expected: String,
    },
    /// A tensor that no part of the model reads.
    #[error(
        "the data give \"{}\", which this {family} model does not read: leave it out of the files, which may have \
         {read}{}", brief(name), did_you_mean(nearest.as_deref())
    )]
    UnreadTensor {
        /// The tensor.
        name: String,
        /// The model's family.
        family: &'static str,
        /// The tensors that it reads.
        read: String,
        /// The most similar of them.
        nearest: Option<String>,
    },
    /// Labels as Hugging Face has them: each stands at the position of its own token.
    #[error(
        "\"labels\" repeat \"input_ids\", but a label of this {family} model stands at the position that predicts \
         it, one to the left: leave \"labels\" out, and they are made of \"input_ids\", or set \"shift_labels\""
    )]
    UnshiftedLabels {
        /// The model's family.
        family: &'static str,
    },
    /// Labels that are made of tokens stand where they belong.
    #[error(
        "\"shift_labels\" moves the \"labels\" of the data, which have none: leave it out, and labels are made of \"input_ids\""
    )]
    NothingToShift,
    /// A tokenizer without tokens that the task needs, and a model without room for them.
    #[error(
        "the tokenizer has no {what}, and the model's vocabulary of {vocab} leaves no room after its {tokens} \
         tokens: use a tokenizer that has them, or a \"vocab_size\" of at least {needed}"
    )]
    SpareTokens {
        /// What is missing.
        what: String,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Tokens of the model.
        vocab: usize,
        /// Tokens that the model should have.
        needed: usize,
    },
    /// Padding before tokens beside documents.
    #[error(
        "\"attention_mask\" hides tokens before others, which \"document_ids\" do as well: give such padding a number of its \
         own in \"document_ids\", and leave \"attention_mask\" out"
    )]
    HiddenDocuments,
    /// Documents that a model does not read.
    #[error(
        "the data give \"document_ids\", but this {family} model takes each sequence for one document: give the plan \
         `models::with_visible(model, Visible::Document)`, or leave \"document_ids\" out"
    )]
    UnreadDocuments {
        /// The model's family.
        family: &'static str,
    },
    /// Documents that a stream of tokens does not part.
    #[error(
        "\"data.packing\" parts documents by the token that ends one, which {tokenizer} does not have: leave \"data.packing\" \
         out, or add such a token to the tokenizer, such as <|endoftext|>"
    )]
    NoDocumentEnd {
        /// The tokenizer.
        tokenizer: String,
    },
    /// Two lengths for a model with one.
    #[error("\"seq_length\" has two lengths, but this {family} model has no decoder: give one")]
    TwoLengths {
        /// The model's family.
        family: &'static str,
    },
    /// A sequence too short to leave something out.
    #[error("\"seq_length\" is {input}, but span corruption needs at least 3")]
    ShortSpans {
        /// The length.
        input: usize,
    },
    /// A decoder too short for the targets of span corruption.
    #[error(
        "\"seq_length\" gives the decoder {target} positions, but span corruption of an input of {input} needs {needed}"
    )]
    ShortTarget {
        /// Length of the target.
        target: usize,
        /// Length that it needs.
        needed: usize,
        /// Length of the input.
        input: usize,
    },
    /// The model's vocabulary has no room for the tokenizer's.
    #[error(
        "the tokenizer {} has {tokens} tokens, but the model's vocabulary only {vocab}: use a model configuration with \"vocab_size\" of at least {tokens}, or another tokenizer",
        brief(tokenizer)
    )]
    Vocabulary {
        /// The tokenizer.
        tokenizer: String,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
    /// A number of a data set outside its legal range.
    #[error("`{setting}` is {found}, expected {expected}")]
    OutOfRange {
        /// What the number is.
        setting: &'static str,
        /// The number.
        found: String,
        /// The legal ones, in words.
        expected: &'static str,
    },
    /// A part of a mixture that gives no sample.
    #[error(
        "part {number} of the mixture has {samples} samples and the weight {weight}, which makes none of the {all} \
         samples of an epoch: give it more data or a larger weight"
    )]
    NoShare {
        /// The part, from 1.
        number: usize,
        /// Its weight.
        weight: f64,
        /// Its samples.
        samples: usize,
        /// Samples of all parts.
        all: usize,
    },
    /// No image where images should be.
    #[error(
        "no images in {path}: \"data.format\" images needs a folder for each class with files that end in .png, .jpg or .jpeg"
    )]
    NoImages {
        /// The paths.
        path: String,
    },
    /// An image that is not in the folder of a class.
    #[error(
        "{} is in no folder of a class: \"data.format\" images needs a folder for each class in \"data.path\"",
        file(path)
    )]
    ImageWithoutClass {
        /// The image.
        path: PathBuf,
    },
    /// An image that cannot be read.
    #[error("cannot read the image {}: {}", file(path), sentence(reason))]
    Image {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Images that are not prepared here as the model's folder says.
    #[error("cannot prepare images as {path} says: {}", sentence(reason))]
    ImageProcessor {
        /// The file.
        path: String,
        /// What is in the way.
        reason: String,
    },
    /// A model whose pixels are no colours.
    #[error(
        "\"data.format\" images has 3 colours or 1 grey, but this {family} model reads pixels of shape {shape:?}: give it tensors"
    )]
    ImageShape {
        /// The model's family.
        family: &'static str,
        /// Channels, height and width.
        shape: Vec<usize>,
    },
    /// A folder whose name is no class of the model.
    #[error(
        "the folder \"{}\" of \"{key}\" is not among the model's {classes} classes: name it as in \"label2id\" of the model's \
         configuration{}",
        brief(class), did_you_mean(nearest.as_deref())
    )]
    UnknownClass {
        /// The key that names the data.
        key: &'static str,
        /// The folder.
        class: String,
        /// Classes of the model.
        classes: usize,
        /// The most similar class.
        nearest: Option<String>,
    },
    /// Folders without names that the model knows, and not as many as it has classes.
    #[error(
        "\"{key}\" has {} folders ({}), but the model has {classes} classes: give one folder for each class, or name the \
         classes in \"label2id\" of the model's configuration",
        found.len(), brief(&found.join(", "))
    )]
    OtherClasses {
        /// The key that names the data.
        key: &'static str,
        /// The folders.
        found: Vec<String>,
        /// Classes of the model.
        classes: usize,
    },
    /// A stream where the number of samples must be known.
    #[error("{purpose} takes each sample once, but {NO_LENGTH}")]
    Endless {
        /// What is asked for.
        purpose: &'static str,
    },
    /// A stream of samples without a sample.
    #[error("the stream of samples ends before its first one")]
    EmptyStream,
    /// A prefetch thread that ended before its samples were read.
    #[error("a data thread ended before it delivered its samples")]
    DataThread,
}

impl DataError {
    pub(crate) fn out_of_range(
        setting: &'static str,
        found: impl fmt::Display,
        expected: &'static str,
    ) -> Self {
        Self::OutOfRange {
            setting,
            found: found.to_string(),
            expected,
        }
    }
}
