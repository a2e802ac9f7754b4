//! The inputs that a model reads, and checks that the data have them.

use merak_mpu::DType;
use merak_trace::{
    Graph, Node, ValueId,
    models::{Model, Objective, TraceOptions},
    op::Class,
};

use super::{
    batch::Batch,
    dataset::{IGNORED_LABEL, Sample},
    order::Microbatch,
    sample_tensor::SampleTensor,
};
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
    /// Whether a loss reads it, which takes [`IGNORED_LABEL`] for none.
    pub is_label: bool,
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

    /// Where the first value lies that the model cannot take.
    fn misfit(&self, values: &[i64]) -> Option<usize> {
        let limit = self.limit?;
        let fits = |value: i64| {
            let is_ignored = value == IGNORED_LABEL && self.is_label;
            is_ignored || usize::try_from(value).is_ok_and(|value| value < limit)
        };
        values.iter().position(|&value| !fits(value))
    }

    /// The range of its values, for messages.
    fn range(&self) -> String {
        let limit = self.limit.unwrap_or(usize::MAX);
        let ignored = if self.is_label {
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
                is_label: (graph.nodes().iter()).any(|node| is_label_of(node, port.value)),
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

    /// Checks the integers of a microbatch by which the model looks something up, in the tensors
    /// that are read. A CUDA device would stop for good at one that has no row.
    ///
    /// # Errors
    /// [`DataError::TensorValue`] naming the tensor, the sample and the position.
    pub(crate) fn check_batch(&self, batch: &Batch, is_read: impl Fn(&str) -> bool) -> Result<()> {
        let Microbatch { indices, rows, .. } = &batch.microbatch;
        // A mask only tells 0 from other numbers.
        let is_checked = |input: &&ModelInput| input.name != ATTENTION_MASK && is_read(&input.name);
        for input in self.inputs.iter().filter(is_checked) {
            let tensor = batch.tensors.get(&input.name);
            let values = tensor.map_or(&[][..], SampleTensor::ints);
            let width = values.len() / (*rows).max(1);
            for (row, values) in values.chunks(width.max(1)).enumerate() {
                // Behind the samples are rows that fill the microbatch up.
                let sample = indices.get(row).or(indices.first());
                self.check_values(input, sample.copied().unwrap_or_default(), values)?;
            }
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
            Some(position) => Err(Error::Data(DataError::TensorValue {
                name: input.name.clone(),
                sample,
                found: values[position],
                position: (values.len() > 1).then_some(position),
                family: self.family,
                expected: input.range(),
            })),
        }
    }

    pub(crate) fn missing(&self, input: &ModelInput, given: &[&str]) -> Error {
        // A prediction needs none.
        let unlabelled = if input.is_label {
            ", -100 where there is none"
        } else {
            ""
        };
        Error::Data(DataError::MissingTensor {
            family: self.family,
            objective: self.objective.to_string(),
            name: input.name.clone(),
            expected: input.describe() + unlabelled,
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

/// Whether a node is a loss that reads the value as its labels.
fn is_label_of(node: &Node, value: ValueId) -> bool {
    matches!(node.op.class(), Class::Loss(_)) && node.inputs[1] == value
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
            Class::Loss(None) if is_label_of(node, value) => {
                graph.ty(node.inputs[0]).shape.last().copied()
            }
            Class::Loss(Some(slice)) if is_label_of(node, value) => Some(slice.full),
            _ => None,
        });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::LABELS;
    use insta::assert_snapshot;
    use std::collections::BTreeMap;

    /// Tokens and labels of five kinds, and documents of any number.
    fn model() -> ModelInputs {
        let input = |name: &str, limit| ModelInput {
            name: name.to_owned(),
            shape: vec![2],
            dtype: DType::I64,
            limit,
            is_label: name == LABELS,
            is_optional: false,
        };
        ModelInputs {
            family: "gpt2",
            objective: Objective::CausalLm,
            vocab_size: 5,
            eos_token_id: None,
            lengths: 2.into(),
            inputs: vec![
                input("input_ids", Some(5)),
                input(LABELS, Some(5)),
                input("document_ids", None),
            ],
        }
    }

    /// Two samples and a row that fills up.
    fn batch(name: &str, values: [i64; 6]) -> Batch {
        let tensor = SampleTensor::new(vec![3, 2], values.to_vec()).unwrap();
        Batch {
            microbatch: Microbatch {
                first_position: 0,
                indices: vec![7, 3],
                rows: 3,
                epoch: 0,
            },
            tensors: BTreeMap::from([(name.to_owned(), tensor)]),
        }
    }

    #[test]
    fn an_integer_of_a_batch_that_has_no_row_is_named_by_sample_and_position() {
        let check = |name: &str, values| model().check_batch(&batch(name, values), |_| true);
        let refused = |name: &str, values| check(name, values).unwrap_err();
        assert_snapshot!(refused("input_ids", [0, 4, 1, 5, 0, 0]), @r#""input_ids" of sample 3 has the value 5 at position 1, but this gpt2 model takes 0 to 4"#);
        assert_snapshot!(refused(LABELS, [4, -100, -1, 0, 0, 0]), @r#""labels" of sample 3 has the value -1 at position 0, but this gpt2 model takes 0 to 4, or -100 for none"#);
        assert!(
            refused("input_ids", [0, 0, 0, 0, 0, -100])
                .to_string()
                .contains("-100")
        );
        check(LABELS, [0, 4, -100, 2, -100, -100]).unwrap();
        check("document_ids", [0, 99, 1, 5, 0, 0]).unwrap();
        // Another rank reads it.
        let of_another = batch("input_ids", [9; 6]);
        model()
            .check_batch(&of_another, |name| name == LABELS)
            .unwrap();
    }
}
