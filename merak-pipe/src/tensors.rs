//! Stages over the tensors and the autograd of another library.

use crate::{Action, BoxError, MicrobatchId, StageId, StageModule};
use merak_mpu::{HostTensor, Message, Packet};
use std::{collections::BTreeMap, fmt};

/// A tensor of a library with autograd, as [`TensorStages`] use it.
///
/// The features `candle` and `tch` implement it for the tensors of these libraries; a library of
/// one's own needs these methods and those of [`HostTensor`].
pub trait Autograd: HostTensor {
    /// A tensor to which a gradient belongs.
    type Var;

    /// A variable with these elements, where autograd ends.
    ///
    /// # Errors
    /// The library's.
    fn into_variable(self) -> Result<Self::Var, BoxError>;

    /// The tensor of a variable, as operations take it.
    fn of_variable(var: &Self::Var) -> &Self;

    /// The gradients of this scalar for some variables; none for one on which it does not depend.
    ///
    /// # Errors
    /// The library's.
    fn gradients(&self, vars: &[&Self::Var]) -> Result<Vec<Option<Self>>, BoxError>;

    /// The sum of the products with the elements of a tensor of the same shape, a scalar.
    ///
    /// # Errors
    /// The library's.
    fn product_sum(&self, other: &Self) -> Result<Self, BoxError>;

    /// The sum with a gradient of the same shape, in memory of its own.
    ///
    /// # Errors
    /// The library's.
    fn plus(&self, other: &Self) -> Result<Self, BoxError>;

    /// The elements in row-major order.
    ///
    /// # Errors
    /// The library's, where they are no numbers.
    fn elements(&self) -> Result<Vec<f64>, BoxError>;
}

/// The functions of the stages of a model, in the operations of a tensor library.
pub trait TensorModel {
    /// The library's tensor.
    type Tensor: Autograd;

    /// The model's own error, or the library's.
    type Error: Into<BoxError>;

    /// The input of the first stage for a microbatch.
    ///
    /// # Errors
    /// The model's own, or the library's.
    fn input(&self, microbatch: MicrobatchId) -> Result<Self::Tensor, Self::Error>;

    /// The output of a stage for its input, which is the output of the stage before.
    ///
    /// # Errors
    /// The model's own, or the library's.
    fn forward(&self, stage: StageId, input: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// The part of a microbatch in the step's loss, a scalar, from the output of the last stage.
    ///
    /// # Errors
    /// The model's own, or the library's.
    fn loss(
        &self,
        output: &Self::Tensor,
        microbatch: MicrobatchId,
    ) -> Result<Self::Tensor, Self::Error>;
}

/// A variable of a model's library.
type VarOf<M> = <<M as TensorModel>::Tensor as Autograd>::Var;

/// The stages of one rank over a [`TensorModel`]: gradients are the library's, summed over the
/// microbatches of a step. A schedule without backwards keeps no microbatch, and leaves these sums
/// as they are.
///
/// Payloads are messages of one tensor. Between threads they share the memory of the sender's
/// tensor, so a model changes no tensor in place that it got or gave; over process groups they are
/// what [`GroupLink`](crate::GroupLink) carries.
///
/// The library's backward walks the graph once and computes the gradients of the weights with that
/// of the input. `I` therefore does the work of `W` as well, and `W` only adds: a schedule that
/// splits backwards gives the same bits, and gains nothing.
pub struct TensorStages<M: TensorModel> {
    model: M,
    num_stages: usize,
    vars: BTreeMap<String, VarOf<M>>,
    live: BTreeMap<(StageId, MicrobatchId), Live<M::Tensor>>,
    /// Gradients of `vars` that wait for `W`.
    found: BTreeMap<(StageId, MicrobatchId), Vec<Option<M::Tensor>>>,
    grads: BTreeMap<String, M::Tensor>,
    loss: f64,
}

/// A forward whose backward has not come.
struct Live<T: Autograd> {
    /// The stage's input, where autograd ends; none on the first stage.
    input: Option<T::Var>,
    /// The output of the stage, or the loss.
    output: T,
}

impl<M: TensorModel> TensorStages<M> {
    /// Makes the stages of one rank.
    ///
    /// `num_stages` are those of the whole pipeline; `vars` are the weights of this rank's stages,
    /// whose gradients are summed.
    pub fn new(model: M, num_stages: usize, vars: BTreeMap<String, VarOf<M>>) -> Self {
        Self {
            model,
            num_stages,
            vars,
            live: BTreeMap::new(),
            found: BTreeMap::new(),
            grads: BTreeMap::new(),
            loss: 0.0,
        }
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The weights, by name.
    pub fn vars(&self) -> &BTreeMap<String, VarOf<M>> {
        &self.vars
    }

    /// Takes the sums of the gradients since the last call, by the names of their weights. A weight
    /// that no backward reached has none.
    pub fn take_grads(&mut self) -> BTreeMap<String, M::Tensor> {
        std::mem::take(&mut self.grads)
    }

    /// Takes the sum of the losses since the last call: zero on a rank without the last stage.
    pub fn take_loss(&mut self) -> f64 {
        std::mem::take(&mut self.loss)
    }

    /// The loss and the gradients of all weights by name, for
    /// [`compare_with_unpipelined`](crate::compare_with_unpipelined). A weight that no stage used
    /// has an empty list.
    ///
    /// # Errors
    /// The library's, where a gradient is no float.
    pub fn results(&self) -> Result<Vec<(String, Vec<f64>)>, BoxError> {
        let mut all = vec![("loss".to_owned(), vec![self.loss])];
        for name in self.vars.keys() {
            let values = self.grads.get(name).map(Autograd::elements).transpose()?;
            all.push((name.clone(), values.unwrap_or_default()));
        }
        Ok(all)
    }
}

impl<M: TensorModel> TensorStages<M> {
    /// The output of a stage, or the loss, which is added to the others; and what the next stage
    /// gets. The first stage has no input but the model's.
    fn compute(
        &mut self,
        action: Action,
        input: Option<&M::Tensor>,
    ) -> Result<(M::Tensor, Option<Message>), BoxError> {
        let Action {
            stage, microbatch, ..
        } = action;
        let output = if let Some(input) = input {
            self.model.forward(stage, input)
        } else {
            let input = self.model.input(microbatch).map_err(Into::into)?;
            self.model.forward(stage, &input)
        };
        let output = output.map_err(Into::into)?;
        if stage.0 + 1 < self.num_stages {
            let sent = message_of(&output)?;
            return Ok((output, Some(sent)));
        }
        let loss = self.model.loss(&output, microbatch).map_err(Into::into)?;
        let [value] = loss.elements()?[..] else {
            let found = loss.sizes();
            return Err(format!("the loss is a scalar, found a tensor of {found:?}").into());
        };
        self.loss += value;
        Ok((loss, None))
    }
}

impl<M: TensorModel> StageModule for TensorStages<M> {
    type Payload = Message;
    type Error = BoxError;

    fn forward(
        &mut self,
        action: Action,
        input: Option<Message>,
    ) -> Result<Option<Message>, BoxError> {
        let input = input
            .map(|message| tensor_of::<M::Tensor>(message)?.into_variable())
            .transpose()?;
        let (output, sent) = self.compute(action, input.as_ref().map(Autograd::of_variable))?;
        self.live
            .insert((action.stage, action.microbatch), Live { input, output });
        Ok(sent)
    }

    fn forward_only(
        &mut self,
        action: Action,
        input: Option<Message>,
    ) -> Result<Option<Message>, BoxError> {
        let input = input.map(tensor_of::<M::Tensor>).transpose()?;
        let (_, sent) = self.compute(action, input.as_ref())?;
        Ok(sent)
    }

    fn backward_input(
        &mut self,
        action: Action,
        grad: Option<Message>,
    ) -> Result<Option<Message>, BoxError> {
        let key = (action.stage, action.microbatch);
        let Live { input, output } = self.live.remove(&key).ok_or("no forward came before")?;
        // d sum(y g)/dx is the product of g and dy/dx.
        let scalar = match grad {
            Some(grad) => output.product_sum(&tensor_of(grad)?)?,
            None => output,
        };
        let vars: Vec<_> = self.vars.values().chain(&input).collect();
        let mut grads = scalar.gradients(&vars)?;
        let sent = match input {
            Some(_) => {
                let grad = grads.pop().flatten();
                let grad = grad.ok_or("the output does not depend on the input")?;
                Some(message_of(&grad)?)
            }
            None => None,
        };
        self.found.insert(key, grads);
        Ok(sent)
    }

    fn backward_weight(&mut self, action: Action) -> Result<(), BoxError> {
        let found = self.found.remove(&(action.stage, action.microbatch));
        let found = found.ok_or("no backward of the input came before")?;
        for (name, more) in self.vars.keys().zip(found) {
            let Some(more) = more else {
                continue;
            };
            let sum = match self.grads.get(name) {
                Some(before) => before.plus(&more)?,
                None => more,
            };
            self.grads.insert(name.clone(), sum);
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.live.clear();
        self.found.clear();
        self.grads.clear();
        self.loss = 0.0;
    }
}

impl<M: TensorModel> fmt::Debug for TensorStages<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorStages")
            .field("num_stages", &self.num_stages)
            .field("vars", &self.vars.keys())
            .finish_non_exhaustive()
    }
}

/// A tensor without autograd's graph, which belongs to this stage alone.
fn message_of<T: Autograd>(tensor: &T) -> merak_mpu::Result<Message> {
    Ok(vec![Packet::of_tensor(tensor)?])
}

fn tensor_of<T: Autograd>(message: Message) -> Result<T, BoxError> {
    let [packet] = <[Packet; 1]>::try_from(message)
        .map_err(|message| format!("expected one tensor, found {}", message.len()))?;
    Ok(packet.into_tensor()?)
}
