//! Everything that can go wrong in this crate.

mod fault;
mod words;

pub use self::words::StepPart;
use self::words::{
    all_of, blamed, by_auto, did_you_mean, of, of_model_file, other_length, other_share,
    passed_over, purpose, records_of, replaced_run, saved_with, stages_of,
};
use merak_ckpt::words::{Bytes, brief, file, sentence};
use merak_pipe::Action;
use std::{io, path::PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a run could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key that no version knows.
    #[error("unknown key \"{}\" ({place}){}", brief(key), did_you_mean(nearest.as_deref()))]
    UnknownKey {
        /// The key as it was written.
        key: String,
        /// Where it stands.
        place: String,
        /// The most similar known key.
        nearest: Option<String>,
    },
    /// Several keys of a layer that no version knows, each an [`Error::UnknownKey`].
    #[error("{}", all_of(.0))]
    UnknownKeys(Vec<Self>),
    /// A value of another type than its key's.
    #[error(
        "\"{}\" expects {expected}, found {} ({place})",
        brief(key),
        brief(found)
    )]
    WrongType {
        /// The key.
        key: String,
        /// What the key accepts.
        expected: String,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
    },
    /// A name that is none of a key's choices.
    #[error("\"{key}\" expects {choices}, found {} ({place}){}", brief(found), did_you_mean(nearest.as_deref()))]
    UnknownChoice {
        /// The key.
        key: &'static str,
        /// The names it knows.
        choices: String,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
        /// The most similar choice.
        nearest: Option<String>,
    },
    /// A legal value whose feature this version lacks.
    #[error(
        "\"{key}\" {} ({place}) is not available in this version: choose {instead}",
        brief(found)
    )]
    NotAvailable {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
        /// What is available.
        instead: String,
    },
    /// A legal value whose feature this build lacks.
    #[error(
        "\"{key}\" {found} ({place}) is not in this build: build with --features {feature}, or choose {instead}"
    )]
    NotBuilt {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
        /// The feature of the crate that has it.
        feature: &'static str,
        /// What is in this build.
        instead: &'static str,
    },
    /// A Hugging Face training argument that has no meaning here.
    #[error("\"{key}\" ({place}) is a Hugging Face argument without effect here: {advice}")]
    WithoutEffect {
        /// The key.
        key: &'static str,
        /// Where it stands.
        place: String,
        /// What to do instead.
        advice: String,
    },
    /// A value that has the right type, and is not legal by itself or beside the others.
    #[error("\"{key}\" is {} ({place}), but must be {expected}", brief(found))]
    IllegalValue {
        /// The key.
        key: &'static str,
        /// The value.
        found: String,
        /// Where it stands.
        place: String,
        /// The legal values.
        expected: String,
    },
    /// A key that the command needs and no layer sets.
    #[error("\"{key}\" is not set: {advice}")]
    MissingKey {
        /// The key.
        key: &'static str,
        /// How to set it.
        advice: String,
    },
    /// A schedule with fewer microbatches than it needs.
    #[error("{name} needs gradient_accumulation_steps >= {needed} ({why}), got {found}")]
    FewMicrobatches {
        /// The schedule.
        name: &'static str,
        /// The smallest legal number.
        needed: usize,
        /// Where the number comes from.
        why: String,
        /// The number that was asked for.
        found: usize,
    },
    /// A schedule that does not fit the microbatches or stages.
    #[error(transparent)]
    Schedule(Box<merak_pipe::Error>),
    /// An optimizer or learning-rate setting that is not legal.
    #[error(transparent)]
    Optimizer(Box<merak_zero::Error>),
    /// Fewer layers than pipeline stages.
    #[error(
        "the model has {layers} layers, fewer than the {stages} stages that \"pp\" asks for: choose at most {layers}"
    )]
    FewerLayers {
        /// Layers of the model.
        layers: usize,
        /// Stages.
        stages: usize,
    },
    /// More ranks than one process runs as threads.
    #[error(
        "{world} ranks are more than the {limit} that one process runs as threads: choose smaller degrees"
    )]
    TooManyRanks {
        /// Ranks that the degrees ask for.
        world: usize,
        /// The most.
        limit: usize,
    },
    /// An option at the end of the command line.
    #[error("the option {} has no value: write {}", brief(option), brief(example))]
    MissingValue {
        /// The option.
        option: String,
        /// How it is written.
        example: String,
    },
    /// A word on the command line that belongs to no option.
    #[error(
        "unexpected argument \"{}\": keys are given as --KEY VALUE or --set KEY=VALUE",
        brief(argument)
    )]
    UnexpectedArgument {
        /// The word.
        argument: String,
    },
    /// A configuration file whose name tells no format.
    #[error(
        "cannot tell the format of the configuration {}: name it .toml, .yaml, .yml or .json",
        file(path)
    )]
    ConfigFormat {
        /// The file.
        path: PathBuf,
    },
    /// A configuration file that its parser refuses.
    #[error("cannot parse the configuration {}: {}", file(path), sentence(message))]
    ConfigSyntax {
        /// The file.
        path: PathBuf,
        /// What the parser says, with the line where it knows it.
        message: String,
    },
    /// An input file or folder that cannot be read.
    #[error("cannot read {}", file(path))]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// An input that a key names and that cannot be read.
    #[error("cannot read {}, which \"{key}\" names", file(path))]
    ReadInput {
        /// The key.
        key: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
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
    /// An output file or folder that cannot be written.
    #[error("cannot write {}", file(path))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A folder that has a run already.
    #[error(
        "{}, which \"output_dir\" names, has a run already ({found}): {}, replace it by --overwrite_output_dir, or name \
         another folder{}",
        file(folder), by_auto(*has_checkpoint), replaced_run(aside.as_deref())
    )]
    RunExists {
        /// The folder.
        folder: PathBuf,
        /// The signs of the run.
        found: String,
        /// Whether there is a checkpoint to go on from.
        has_checkpoint: bool,
        /// Where the run to be replaced lies, while this one has saved nothing.
        aside: Option<PathBuf>,
    },
    /// An adapter where a run is to write its own.
    #[error(
        "{} has an adapter already, which no run of this folder has trained: move it away, or name another \
         \"output_dir\" or \"adapter_name\"",
        file(path)
    )]
    AdapterExists {
        /// The folder of the adapter.
        path: PathBuf,
    },
    /// A folder that another process writes.
    #[error(
        "{}, which \"output_dir\" names, is in use by {holder}: wait until that has ended, or name another folder",
        file(folder)
    )]
    RunInUse {
        /// The folder.
        folder: PathBuf,
        /// The process.
        holder: String,
    },
    /// A position in a checkpoint's data that the run's data do not have.
    #[error(
        "the checkpoint {} stands at sample {position} of its pass over the data, but there are only {samples} now{}: \
         give the data that it was saved with{}, or set \"ignore_data_skip\" to begin a pass anew",
        file(path), other_length(*length), saved_with(saved.as_deref())
    )]
    PositionBehindEnd {
        /// The checkpoint.
        path: PathBuf,
        /// Samples used in the current pass.
        position: usize,
        /// Samples of the data.
        samples: usize,
        /// The lengths of its sequences and of those now, where they differ.
        length: Option<[u64; 2]>,
        /// The data that it was saved with, where it says so.
        saved: Option<String>,
    },
    /// An output folder that cannot be written.
    #[error("cannot write into {}, which \"output_dir\" names", file(path))]
    OutputDir {
        /// The folder, or what stands in its way.
        path: PathBuf,
        /// The reason.
        source: io::Error,
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
        of(path.as_deref()), ignored, purpose(part)
    )]
    NoLabels {
        /// `training` or `evaluation`.
        part: &'static str,
        /// How many there are.
        samples: usize,
        /// The label that counts as none.
        ignored: i64,
        /// Where the data are.
        path: Option<PathBuf>,
    },
    /// Gradients that are never finite.
    #[error(
        "{steps} steps in a row changed nothing, step {step} because the gradient of \"{param}\" is not finite: look \
         for numbers in the data or the starting weights that are not finite or very large, or choose a smaller \
         \"learning_rate\" (\"max_skipped_steps\" is {limit})"
    )]
    SkippedSteps {
        /// Steps that were skipped.
        steps: u64,
        /// The last of them.
        step: usize,
        /// The first parameter concerned.
        param: String,
        /// How many may be skipped.
        limit: usize,
    },
    /// An evaluation whose result is not a number.
    #[error(
        "the evaluation loss is {loss}: the weights, or samples of the data, have numbers that are not finite or very large"
    )]
    EvaluationLoss {
        /// The loss.
        loss: f64,
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
        "\"{name}\" of sample {sample} has the value {found}, but this {family} model takes {expected}"
    )]
    TensorValue {
        /// The tensor.
        name: String,
        /// The sample, from 0.
        sample: usize,
        /// The value.
        found: i64,
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
         it, one to the left: leave \"labels\" out, and they are made of \"input_ids\""
    )]
    UnshiftedLabels {
        /// The model's family.
        family: &'static str,
    },
    /// A tokenizer without tokens that the task needs, and a model without room for them.
    #[error(
        "the tokenizer has no {what}, and the model's vocabulary of {vocab} leaves no room behind its {tokens} \
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
    /// The model's configuration file is not JSON.
    #[error(
        "cannot parse the model configuration {}: {}",
        file(path),
        sentence(message)
    )]
    ModelSyntax {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        message: String,
    },
    /// The model's configuration file has a field that is missing or cannot be used.
    #[error("{}: {}", file(path), of_model_file(reason))]
    ModelContent {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: Box<merak_trace::Error>,
    },
    /// A variable or argument that is not UTF-8.
    #[error("{place} is no UTF-8 text, found \"{}\"", brief(found))]
    NotUtf8 {
        /// Where it stands.
        place: String,
        /// The value, as far as it is text.
        found: String,
    },
    /// A token of the configuration that the model does not know.
    #[error("\"{key}\" is {token}, but the model knows the tokens 0 to {} only", vocab - 1)]
    UnknownToken {
        /// The key.
        key: &'static str,
        /// The token.
        token: u32,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
    /// There is no checkpoint where a run was to resume.
    #[error(
        "{reason}, expected a checkpoint, an output folder, latest or auto{}",
        did_you_mean(nearest.as_deref())
    )]
    NoCheckpoint {
        /// What is wrong.
        reason: Box<merak_ckpt::Error>,
        /// The most similar word.
        nearest: Option<String>,
    },
    /// A checkpoint holds other tensors than the model.
    #[error("the checkpoint {} is of another model: {difference}", file(path))]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// The first difference.
        difference: String,
    },
    /// The best model cannot be loaded at the end.
    #[error(
        "training is done, and step {last} is saved, but the best model, that of step {step}, cannot be loaded"
    )]
    BestModel {
        /// The best step.
        step: usize,
        /// The last step.
        last: usize,
        /// Why not.
        source: Box<Self>,
    },
    /// A checkpoint lacks a part that was not excused.
    #[error(
        "the checkpoint {} has no {part}: set \"{flag}\" to go on without it",
        file(path)
    )]
    MissingPart {
        /// The checkpoint.
        path: PathBuf,
        /// What is missing.
        part: String,
        /// The key that skips it.
        flag: &'static str,
    },
    /// A checkpoint was saved with another optimizer.
    #[error(
        "the checkpoint {} has the optimizer state of {found}, but \"optim\" is {expected}: choose the same \
         \"optim\", or set \"no_load_optim\" to start with fresh state",
        file(path)
    )]
    OtherOptimizer {
        /// The checkpoint.
        path: PathBuf,
        /// What it was saved with.
        found: String,
        /// What the run uses.
        expected: String,
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
    /// Activations that need more than their budget, even with everything recomputed.
    #[error(
        "\"activation_memory_budget\" is {}, but the activations of pipeline rank {rank} need at least \
         {} ({least} bytes), with every chunk of \"checkpoint_num_layers\" segments recomputed: raise it, or choose a smaller \
         \"per_device_train_batch_size\"",
        Bytes::from(*budget), Bytes::from(*least)
    )]
    ActivationBudget {
        /// The rank of the pipeline.
        rank: usize,
        /// The bytes that it may use.
        budget: usize,
        /// The fewest bytes that it needs.
        least: usize,
    },
    /// Stages that no partition makes small enough for a rank.
    #[error(
        "\"autopipe.memory_limit\" is {}, but under every partition that was tried some rank needs at least \
         {} ({least} bytes): raise it, or choose more ranks or a smaller \"per_device_train_batch_size\"",
        Bytes::from(*limit), Bytes::from(*least)
    )]
    StageMemory {
        /// The bytes that a rank may use.
        limit: usize,
        /// The fewest bytes that the fullest rank needs.
        least: usize,
    },
    /// A limit of memory that no schedule keeps.
    #[error(
        "\"autopipe.memory_limit\" is {}, but no schedule that was tried keeps it, and under interleaved_1f1b the \
         fullest rank needs {} ({needed} bytes): raise it, or choose more ranks or a smaller \
         \"per_device_train_batch_size\"",
        Bytes::from(*limit), Bytes::from(*needed)
    )]
    ScheduleMemory {
        /// The bytes that a rank may use.
        limit: usize,
        /// The bytes that the fullest rank needs under `interleaved_1f1b`.
        needed: usize,
    },
    /// An error that a key is to blame for.
    #[error("{source}{}", blamed(key, place.as_deref(), source))]
    Blamed {
        /// The key.
        key: &'static str,
        /// Where it was set, where that is known.
        place: Option<String>,
        /// What is wrong.
        source: Box<Self>,
    },
    /// A run that this machine's memory cannot hold.
    #[error(transparent)]
    Memory(Box<dyn std::error::Error + Send + Sync>),
    /// The model or its configuration cannot be used, or a node failed.
    #[error(transparent)]
    Model(Box<merak_trace::Error>),
    /// The tensor-parallel rewrite refused.
    #[error(transparent)]
    TensorParallel(Box<merak_tp::Error>),
    /// The model cannot be cut as asked.
    #[error(transparent)]
    Partition(Box<merak_partition::Error>),
    /// A model that has none of the split points of its family.
    #[error("{0}: set \"custom_split_points\", or choose another \"split_method\"")]
    NoSplitPoints(Box<merak_partition::Error>),
    /// A checkpoint could not be read or written, or generation failed.
    #[error(transparent)]
    Checkpoint(Box<merak_ckpt::Error>),
    /// A checkpoint, or the output folder of a run, where a model's folder was to be.
    #[error("{0}, and `merak train --resume DIR` goes on from it")]
    OwnFolder(Box<merak_ckpt::Error>),
    /// A model that cannot take the requested adapter.
    #[error(transparent)]
    Adapter(Box<merak_ckpt::AdaptError>),
    /// The description of an adapter that does not fit the model.
    #[error("{}: {}", file(path), sentence(&reason.to_string()))]
    AdapterFile {
        /// The description.
        path: PathBuf,
        /// What does not fit.
        reason: Box<merak_ckpt::AdaptError>,
    },
    /// A collective or a group failed.
    #[error(transparent)]
    Group(Box<merak_mpu::Error>),
    /// A rank failed, and the run with it.
    #[error("rank {rank} failed: {cause}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// What happened there, with its causes.
        cause: String,
    },
    /// A rank in another process failed, and the run with it.
    #[error("rank {rank} failed: {cause}")]
    OtherRank {
        /// The rank that failed first.
        rank: usize,
        /// What happened there, with its causes.
        cause: String,
    },
    /// Options of a command do not fit together, or lead nowhere.
    #[error("{0}")]
    CommandLine(String),
    /// An error that a lower rank has too, and tells.
    #[error(transparent)]
    Told(Box<Error>),
    /// The processes of a run were started with different things.
    #[error("{what} differs from that of rank 0: here \"{here}\", there \"{there}\"")]
    OtherRun {
        /// What differs.
        what: &'static str,
        /// Its first line that differs.
        here: String,
        /// The line of rank 0.
        there: String,
    },
    /// A rank failed in a training step, or in what belongs to it.
    #[error("rank {rank} ({}) failed {part} step {step}", stages_of(stages))]
    Step {
        /// The rank.
        rank: usize,
        /// The stages of the pipeline that it runs.
        stages: Vec<usize>,
        /// The part of the step.
        part: StepPart,
        /// The step, counted from 1.
        step: usize,
        /// The reason.
        source: Box<Error>,
    },
    /// The code of a rank panicked.
    #[error("panicked: {}", sentence(message))]
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// A stage failed at one of the actions of its schedule.
    #[error("{action} failed (stage {}, microbatch {})", action.stage, action.microbatch)]
    Stage {
        /// The action.
        action: Action,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A prompt with a token that the model does not know.
    #[error("prompt {prompt} has the token {token}, but the model knows 0 to {} only", vocab - 1)]
    PromptToken {
        /// The prompt's number, from 0.
        prompt: usize,
        /// The token.
        token: u32,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
    /// An adapter that would be merged into a weight which several layers share.
    #[error(
        "the adapter changes `{param}`, which {layers} share, for one of them: `merak-ckpt merge-lora` writes a model \
         in which each has its own"
    )]
    SharedTarget {
        /// The weight.
        param: String,
        /// The layers.
        layers: String,
    },
    /// A run in which everything is frozen.
    #[error(
        "every parameter is frozen: `inference_mode` in \"lora_config\" is for adapters that are not trained"
    )]
    NothingTrained,
    /// Text that is not a list of token ids.
    #[error("\"{}\" is no token id: write ids as 5,17,3", brief(found))]
    PromptIds {
        /// What stands where an id should.
        found: String,
    },
    /// A model that was made for another task.
    #[error(
        "{what} needs a model for causal language modelling, but this {family} model is for {objective}"
    )]
    OtherObjective {
        /// The requested task.
        what: &'static str,
        /// The model's family.
        family: &'static str,
        /// What it learns.
        objective: String,
    },
    /// The system gives no thread.
    #[error("cannot start a thread to {task}")]
    NoThread {
        /// The task of the thread.
        task: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A prefetch thread that ended before its samples were read.
    #[error("a data thread ended before it delivered its samples")]
    DataThread,
}

/// The error of a thread that does not start.
pub(crate) fn no_thread(task: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::NoThread { task, source }
}

impl From<merak_pipe::Error> for Error {
    fn from(error: merak_pipe::Error) -> Self {
        match error {
            // The caller that runs the world adds the rank; the pipeline's own numbers count
            // stages.
            merak_pipe::Error::Stage { action, source, .. } => Self::Stage { action, source },
            merak_pipe::Error::TooFewMicrobatches {
                name,
                needed,
                why,
                found,
            } => Self::FewMicrobatches {
                name,
                needed,
                why,
                found,
            },
            other => Self::Schedule(Box::new(other)),
        }
    }
}

impl From<merak_ckpt::Error> for Error {
    fn from(error: merak_ckpt::Error) -> Self {
        match error {
            merak_ckpt::Error::OwnFormat { .. } => Self::OwnFolder(Box::new(error)),
            other => Self::Checkpoint(Box::new(other)),
        }
    }
}

impl From<merak_partition::Error> for Error {
    /// Errors of planning that name no keys become those that do.
    fn from(error: merak_partition::Error) -> Self {
        use merak_partition::Error as E;
        match error {
            E::StageMemory { limit, least } => Self::StageMemory { limit, least },
            E::ScheduleMemory { limit, needed } => Self::ScheduleMemory { limit, needed },
            E::ActivationBudget {
                rank,
                budget,
                least,
            } => Self::ActivationBudget {
                rank,
                budget,
                least,
            },
            E::Schedule(error) => error.into(),
            E::Program { source, .. } => Self::Model(source),
            E::UnknownFamily { .. } | E::NoSplitPoint { .. } => {
                Self::NoSplitPoints(Box::new(error))
            }
            other => Self::Partition(Box::new(other)),
        }
    }
}

/// An error and its causes, outermost first, separated by colons: one line of readable length,
/// without characters that act on a terminal.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = sentence(&error.to_string());
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = sentence(&cause.to_string());
        // A transparent error repeats its source, and one with a place begins with it.
        if !text.ends_with(&cause_text) && !text.starts_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// Errors of the crates below are boxed, so that the results of this one stay small.
macro_rules! from_crates {
    ($($variant:ident: $error:ty),* $(,)?) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$variant(Box::new(error))
            }
        }
    )*};
}
from_crates!(
    Optimizer: merak_zero::Error,
    Model: merak_trace::Error,
    TensorParallel: merak_tp::Error,
    Group: merak_mpu::Error,
    Adapter: merak_ckpt::AdaptError,
);
