//! What can go wrong when a graph is built, differentiated or run.

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed trace, rewrite or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operands of an operation do not fit.
    #[error("{scope}: {op}: {reason}")]
    Operands {
        /// Path of the module that called the operation.
        scope: String,
        /// Name of the operation.
        op: &'static str,
        /// What does not fit, with the types.
        reason: String,
    },
    /// A parameter or value that no memory can hold.
    #[error("{place}: {ty} is larger than any memory: choose smaller sizes")]
    TooLarge {
        /// Name of the parameter, or module path and operation.
        place: String,
        /// The type.
        ty: String,
    },
    /// Two parameters of one name differ.
    #[error("parameter {name} was first {first}, then {second}")]
    ParamConflict {
        /// Name of the parameter.
        name: String,
        /// Its type where it was first used.
        first: String,
        /// Its type where it was used again.
        second: String,
    },
    /// A parameter cannot lie on the ranks of an axis as it should.
    #[error("parameter {param}: {reason}")]
    Placement {
        /// Name of the parameter.
        param: String,
        /// What does not fit, with the type.
        reason: String,
    },
    /// The model's configuration lacks a field or has an unusable one.
    #[error("model configuration: {field}: {reason}")]
    ModelConfig {
        /// Name of the field.
        field: String,
        /// What was found and expected.
        reason: String,
    },
    /// A sequence that is longer than the model takes.
    #[error(
        "\"{field}\" of the model's configuration allows sequences of 1 to {max} tokens, not {found}"
    )]
    SeqLength {
        /// The field that limits the length.
        field: &'static str,
        /// Its value.
        max: usize,
        /// The length that was asked for.
        found: usize,
    },
    /// No builder is registered for a model type.
    #[error("model type \"{found}\" is not known; known are {known}")]
    UnknownModel {
        /// The `model_type` or class name that was asked for.
        found: String,
        /// All known model types.
        known: String,
    },
    /// An operation has no gradient with respect to an operand that needs one.
    #[error("{scope}: {op} has no gradient{}", of_statistic(*result))]
    NoGradient {
        /// Path of the module that called the operation.
        scope: String,
        /// Name of the operation.
        op: &'static str,
        /// The result, counted from 0, on which the loss depends; all but the first are statistics
        /// of the operands.
        result: usize,
    },
    /// A loss that is no single number, or has another element type than its gradient.
    #[error("output \"loss\" should be {expected}, found {found}: end it with `Module::sum`")]
    LossType {
        /// The type of losses.
        expected: String,
        /// The type of the output.
        found: String,
    },
    /// Stage borders do not rise from the first node to the last.
    #[error("stage borders {bounds:?} do not rise from 0 to the {num_nodes} nodes of the model")]
    Cuts {
        /// The borders.
        bounds: Vec<usize>,
        /// Nodes of the model.
        num_nodes: usize,
    },
    /// A program is asked for of a stage that cuts do not make.
    #[error("there is no stage {stage} of {num_stages}")]
    NoStage {
        /// The stage, from 0.
        stage: usize,
        /// Stages of the cuts.
        num_stages: usize,
    },
    /// A node uses a value that the graph does not have: that of another one.
    #[error("{place}: there is no value {id} among the {num_values} of the graph")]
    NoValue {
        /// Scope and operation.
        place: String,
        /// The value.
        id: usize,
        /// Values of the graph.
        num_values: usize,
    },
    /// A node stands before one whose result it uses.
    #[error("{value} is used before it is computed")]
    Order {
        /// Name of the value.
        value: String,
    },
    /// A backend cannot run an operation on these types.
    #[error("backend {backend} cannot run {op} on {types}")]
    Unsupported {
        /// Name of the backend.
        backend: &'static str,
        /// Name of the operation.
        op: &'static str,
        /// Types of the operands.
        types: String,
    },
    /// A kernel refused its operands' values.
    #[error("{node}: {source}")]
    Kernel {
        /// Name of the node.
        node: String,
        /// The cause.
        source: KernelError,
    },
    /// The tensor library failed.
    #[error("{node}: {reason}")]
    Backend {
        /// Name of the node.
        node: String,
        /// The library's message.
        reason: String,
    },
    /// The device that a backend should compute on is not there.
    #[error("device {device} is not available: {reason}")]
    NoDevice {
        /// Name of the device.
        device: String,
        /// What was found instead.
        reason: String,
    },
    /// A value that a program needs was not given.
    #[error("input \"{name}\" of type {expected} was not given; the batch has {given}")]
    MissingInput {
        /// Name of the input.
        name: String,
        /// Its type.
        expected: String,
        /// Names that were given.
        given: String,
    },
    /// A given value has another type than the program expects.
    #[error("\"{name}\" should be {expected}, found {found}")]
    InputType {
        /// Name of the value.
        name: String,
        /// The type that the program was built for.
        expected: String,
        /// The type that was given.
        found: String,
    },
    /// More or fewer values were given than the program has.
    #[error("expected {expected} of the {what}, found {found}")]
    Count {
        /// What was given.
        what: &'static str,
        /// How many the program has.
        expected: usize,
        /// How many were given.
        found: usize,
    },
    /// A program reads a parameter that was not given.
    #[error("the program reads at least {} parameters, found {found}", index + 1)]
    NoParam {
        /// Its position in the program, from 0.
        index: usize,
        /// How many were given.
        found: usize,
    },
    /// The receiver of complete gradients failed.
    #[error("the gradients of a backward could not be passed on")]
    Sink(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The source of a program's parameters failed.
    #[error("the parameters of a stage could not be gathered")]
    Params(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A collective failed.
    #[error("{node}: {source}")]
    Collective {
        /// Name of the node.
        node: String,
        /// The cause.
        source: merak_mpu::Error,
    },
}

impl Error {
    /// The error of a backend at a node, or at another place that has a name.
    pub(crate) fn backend(node: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Backend {
            node: node.into(),
            reason: reason.into(),
        }
    }
}

/// What a missing gradient is of, if it is not that of the first result.
fn of_statistic(result: usize) -> String {
    if result == 0 {
        return String::new();
    }
    format!(
        " of its result {result}, a statistic: compute it from the operands by other operations"
    )
}

/// A kernel's refusal: threads that do not start, or values in the caller's data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The operating system refused to start compute threads.
    #[error("could not start {num_threads} compute threads")]
    StartThreads {
        /// Number of threads asked for.
        num_threads: usize,
        /// Its message.
        source: std::io::Error,
    },
    /// A label is neither a class nor the ignored label.
    #[error(
        "label {label} at position {position} is out of range, expected 0 to {} or {ignored} to ignore it",
        classes.saturating_sub(1)
    )]
    Label {
        /// The label found.
        label: i64,
        /// Its index in the labels.
        position: usize,
        /// Number of classes.
        classes: usize,
        /// The label that is skipped.
        ignored: i64,
    },
    /// A token id has no row in the table.
    #[error(
        "id {id} at position {position} is out of range, expected 0 to {}",
        rows.saturating_sub(1)
    )]
    Id {
        /// The id found.
        id: i64,
        /// Its index in the ids.
        position: usize,
        /// Number of rows of the table.
        rows: usize,
    },
}
