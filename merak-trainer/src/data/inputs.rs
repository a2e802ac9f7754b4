//! The inputs that a model reads, and checks that the data have them.

use merak_mpu::DType;
use merak_trace::{
    Graph, ValueId,
    models::{Model, Objective, TraceOptions},
    op::Class,
};

use super::dataset::{IGNORED_LABEL, LABELS, Sample};
use crate::{
    config::SeqLength,
    error::{DataError, Error, Result},
};

/// The name of the tensor that tells tokens (1) from padding (0).
pub(crate) const ATTENTION_MASK: &str = "attention_mask";

/// One tensor that a model reads of each sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInput {
    /// Its name.
    pub name: String,
    /// Its sizes, without the dimension of the samples.
    pub shape: Vec<usize>,
    /// Integers or floats.
    pub dtype: DType,
    /// Exclusive upper bound of its integers, where the model looks something up by them.
    pub limit: Option<usize>,
    /// Whether the model also runs without it.
    pub is_optional: bool,
}

impl ModelInput {
    /// The type and sizes, for messages.
    pub(crate) fn describe(&self) -> String {
        let kind = if self.dtype == DType::I64 {
            "integers"
        } else {
            "floats"
        };
        format!("{kind} of shape {:?} per sample", self.shape)
    }

    /// The first value that the model cannot take.
    fn misfit(&self, values: &[i64]) -> Option<i64> {
        let limit = self.limit?;
        let fits = |value: i64| {
            let is_ignored = value == IGNORED_LABEL && self.name == LABELS;
            is_ignored || usize::try_from(value).is_ok_and(|value| value < limit)
        };
        values.iter().copied().find(|&value| !fits(value))
    }

    /// The range of its values, for messages.
    fn range(&self) -> String {
        let limit = self.limit.unwrap_or(usize::MAX);
        let ignored = if self.name == LABELS {
            format!(", or {IGNORED_LABEL} for none")
        } else {
            String::new()
        };
        format!("0 to {}{ignored}", limit.saturating_sub(1))
    }
}

/// The inputs that a model reads, found by tracing it for one sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInputs {
    /// The model's family.
    pub family: &'static str,
    /// What it learns.
    pub objective: Objective,
    /// Tokens that it knows.
    pub vocab_size: usize,
    /// Token that ends a text, if its configuration names one.
    pub eos_token_id: Option<u32>,
    /// Lengths of the sequences.
    pub lengths: SeqLength,
    /// The tensors.
    pub inputs: Vec<ModelInput>,
}

impl ModelInputs {
    /// Traces a model for sequences of these lengths.
    ///
    /// # Errors
    /// When they are longer than the model allows.
    pub fn of(model: &dyn Model, lengths: SeqLength) -> Result<Self> {
        let graph = model.trace(&TraceOptions {
            target_seq: lengths.target,
            ..TraceOptions::training(1, lengths.input)
        })?;
        let optional = model.optional_inputs();
        let inputs = graph.inputs().iter().map(|port| {
            let ty = graph.ty(port.value);
            ModelInput {
                name: port.name.clone(),
                shape: ty.shape[1..].to_vec(),
                dtype: ty.dtype,
                limit: integer_limit(&graph, &port.name, port.value),
                is_optional: optional.iter().any(|(name, _)| *name == port.name),
            }
        });
        let info = model.info();
        Ok(Self {
            family: info.family,
            objective: model.objective(),
            vocab_size: info.vocab_size,
            eos_token_id: info.eos_token_id,
            lengths,
            inputs: inputs.collect(),
        })
    }

    /// The tensor of this name, if the model reads one.
    pub fn get(&self, name: &str) -> Option<&ModelInput> {
        self.inputs.iter().find(|input| input.name == name)
    }

    /// Length of a decoder's output.
    pub(crate) fn target(&self) -> usize {
        self.lengths.target.unwrap_or(self.lengths.input)
    }

    /// Checks that a sample has what the model reads, and nothing that the model cannot take.
    ///
    /// # Errors
    /// [`DataError::MissingTensor`], [`DataError::TensorType`] or [`DataError::TensorValue`] naming
    /// the tensor.
    pub fn check(&self, index: usize, sample: &Sample) -> Result<()> {
        for input in &self.inputs {
            let Some(tensor) = sample.get(&input.name) else {
                if input.is_optional {
                    continue;
                }
                let given: Vec<_> = sample.keys().map(String::as_str).collect();
                return Err(self.missing(input, &given));
            };
            let fits = (tensor.dtype() == DType::I64) == (input.dtype == DType::I64);
            if !fits || tensor.shape() != input.shape {
                return Err(self.mistyped(input, tensor.describe()));
            }
            self.check_values(input, index, tensor.ints())?;
        }
        Ok(())
    }

    /// Checks the integers of one tensor of a sample.
    pub(crate) fn check_values(
        &self,
        input: &ModelInput,
        sample: usize,
        values: &[i64],
    ) -> Result<()> {
        match input.misfit(values) {
            None => Ok(()),
            Some(found) => Err(Error::Data(DataError::TensorValue {
                name: input.name.clone(),
                sample,
                found,
                family: self.family,
                expected: input.range(),
            })),
        }
    }

    pub(crate) fn missing(&self, input: &ModelInput, given: &[&str]) -> Error {
        Error::Data(DataError::MissingTensor {
            family: self.family,
            objective: self.objective.to_string(),
            name: input.name.clone(),
            expected: input.describe(),
            given: given.join(", "),
        })
    }

    pub(crate) fn mistyped(&self, input: &ModelInput, found: String) -> Error {
        Error::Data(DataError::TensorType {
            family: self.family,
            name: input.name.clone(),
            expected: input.describe(),
            found,
        })
    }
}

/// Exclusive upper bound of an input's integers: the rows of the table, or the classes of the
/// logits, that they choose among.
pub(crate) fn integer_limit(graph: &Graph, name: &str, value: ValueId) -> Option<usize> {
    if name == ATTENTION_MASK {
        return Some(2);
    }
    let limits = graph
        .nodes()
        .iter()
        .filter_map(|node| match node.op.class() {
            Class::Lookup if node.inputs[0] == value => {
                let table = graph.param_of(node.inputs[1])?;
                graph.param(table).full.shape.first().copied()
            }
            Class::Loss(None) if node.inputs[1] == value => {
                graph.ty(node.inputs[0]).shape.last().copied()
            }
            Class::Loss(Some(slice)) if node.inputs[1] == value => Some(slice.full),
            _ => None,
        });
    limits.min()
}
