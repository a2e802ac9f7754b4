//! Stages of a model that is written for candle (feature `candle`).
//!
//! ```
//! use candle_core::{Device, Result, Tensor, Var};
//! use merak_pipe::{MicrobatchId, ScheduleKind, Size, StageId, run_threads};
//! use merak_pipe::candle::{CandleModel, CandleStages};
//! use std::{collections::BTreeMap, time::Duration};
//!
//! /// Each stage multiplies by a weight of its own.
//! struct Product(BTreeMap<String, Var>);
//!
//! impl CandleModel for Product {
//!     fn input(&self, microbatch: MicrobatchId) -> Result<Tensor> {
//!         Tensor::new(&[microbatch.0 as f32, 1.0], &Device::Cpu)
//!     }
//!     fn forward(&self, stage: StageId, input: &Tensor) -> Result<Tensor> {
//!         input.broadcast_mul(&self.0[&stage.to_string()])
//!     }
//!     fn loss(&self, output: &Tensor, _: MicrobatchId) -> Result<Tensor> {
//!         output.sqr()?.sum_all()
//!     }
//! }
//!
//! let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 4))?;
//! let mut ranks = Vec::new();
//! for stage in 0..2 {
//!     let weight = Var::new(&[2.0_f32], &Device::Cpu)?;
//!     let vars = BTreeMap::from([(stage.to_string(), weight)]);
//!     ranks.push(CandleStages::new(Product(vars.clone()), 2, vars));
//! }
//! run_threads(&schedule, &mut ranks, Duration::from_secs(10))?;
//! // Each microbatch adds (2 * 2 * m)^2 + (2 * 2)^2.
//! assert_eq!(ranks[1].take_loss(), 16.0 * (0.0 + 1.0 + 4.0 + 9.0) + 4.0 * 16.0);
//! assert!(ranks[0].take_grads().is_some());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::{Action, BoxError, MicrobatchId, StageId, StageModule};
use candle_core::{DType, Tensor, Var, backprop::GradStore};
use merak_mpu::{Message, Packet};
use std::{collections::BTreeMap, fmt};

/// What the stages of a model compute, in candle's operations.
pub trait CandleModel {
    /// The input of the first stage for a microbatch.
    ///
    /// # Errors
    /// The model's own, or candle's.
    fn input(&self, microbatch: MicrobatchId) -> candle_core::Result<Tensor>;

    /// The output of a stage for its input, which is the output of the stage before.
    ///
    /// # Errors
    /// The model's own, or candle's.
    fn forward(&self, stage: StageId, input: &Tensor) -> candle_core::Result<Tensor>;

    /// The part of a microbatch in the step's loss, a scalar, from the output of the last stage.
    ///
    /// # Errors
    /// The model's own, or candle's.
    fn loss(&self, output: &Tensor, microbatch: MicrobatchId) -> candle_core::Result<Tensor>;
}

/// The stages of one rank over a [`CandleModel`]: gradients are candle's, summed over the
/// microbatches of a step.
///
/// Payloads are messages of one tensor. Between threads they share the memory of the sender's
/// tensor; over process groups they are what [`GroupLink`](crate::GroupLink) carries.
///
/// Candle's `backward` walks the graph once and computes the gradients of the weights with that of
/// the input. `I` therefore does the work of `W` as well, and `W` only adds: a schedule that splits
/// backwards gives the same bits, and gains nothing.
pub struct CandleStages<M> {
    model: M,
    num_stages: usize,
    vars: BTreeMap<String, Var>,
    live: BTreeMap<(StageId, MicrobatchId), Live>,
    /// Gradients of the weights that wait for `W`.
    found: BTreeMap<(StageId, MicrobatchId), GradStore>,
    grads: Option<GradStore>,
    loss: f64,
}

/// A forward whose backward has not come.
struct Live {
    /// The stage's input as a variable, where autograd ends; none on the first stage.
    input: Option<Var>,
    /// The output of the stage, or the loss.
    output: Tensor,
}

impl<M: CandleModel> CandleStages<M> {
    /// Makes the stages of one rank.
    ///
    /// `num_stages` are those of the whole pipeline; `vars` are the weights of this rank's stages,
    /// whose gradients are summed.
    pub fn new(model: M, num_stages: usize, vars: BTreeMap<String, Var>) -> Self {
        Self {
            model,
            num_stages,
            vars,
            live: BTreeMap::new(),
            found: BTreeMap::new(),
            grads: None,
            loss: 0.0,
        }
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The weights, by name.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// Takes the sums of the gradients since the last call, if a backward has run.
    pub fn take_grads(&mut self) -> Option<GradStore> {
        self.grads.take()
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
    /// Candle's, where a gradient is no float.
    pub fn results(&self) -> candle_core::Result<Vec<(String, Vec<f64>)>> {
        let mut all = vec![("loss".to_owned(), vec![self.loss])];
        for (name, var) in &self.vars {
            let grad = self.grads.as_ref().and_then(|grads| grads.get(var));
            let values = match grad {
                Some(grad) => grad.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?,
                None => Vec::new(),
            };
            all.push((name.clone(), values));
        }
        Ok(all)
    }
}

impl<M: CandleModel> StageModule for CandleStages<M> {
    type Payload = Message;
    type Error = BoxError;

    fn forward(
        &mut self,
        action: Action,
        input: Option<Message>,
    ) -> Result<Option<Message>, BoxError> {
        let Action {
            stage, microbatch, ..
        } = action;
        let input = input.map(variable_of).transpose()?;
        let mut output = match &input {
            Some(input) => self.model.forward(stage, input)?,
            None => self.model.forward(stage, &self.model.input(microbatch)?)?,
        };
        let sent = if stage.0 + 1 < self.num_stages {
            Some(message_of(&output)?)
        } else {
            output = self.model.loss(&output, microbatch)?;
            self.loss += output.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            None
        };
        self.live
            .insert((stage, microbatch), Live { input, output });
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
            Some(grad) => (output * tensor_of(grad)?)?.sum_all()?,
            None => output,
        };
        let mut grads = scalar.backward()?;
        let sent = match input {
            Some(input) => {
                let grad = grads.remove(&input);
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
        let mut found = found.ok_or("no backward of the input came before")?;
        let Some(sum) = &mut self.grads else {
            self.grads = Some(found);
            return Ok(());
        };
        for var in self.vars.values() {
            let Some(more) = found.remove(var) else {
                continue;
            };
            let both = match sum.get(var) {
                Some(before) => (before + more)?,
                None => more,
            };
            sum.insert(var, both.detach());
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.live.clear();
        self.found.clear();
        self.grads = None;
        self.loss = 0.0;
    }
}

impl<M> fmt::Debug for CandleStages<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CandleStages")
            .field("num_stages", &self.num_stages)
            .field("vars", &self.vars.keys())
            .finish_non_exhaustive()
    }
}

/// A tensor without candle's graph, which belongs to this stage alone.
fn message_of(tensor: &Tensor) -> merak_mpu::Result<Message> {
    Ok(vec![Packet::of_tensor(tensor)?])
}

/// The input of a stage as a variable of its own: autograd ends here and gives its gradient.
fn variable_of(message: Message) -> Result<Var, BoxError> {
    Ok(Var::from_tensor(&tensor_of(message)?)?)
}

fn tensor_of(message: Message) -> Result<Tensor, BoxError> {
    let [packet] = <[Packet; 1]>::try_from(message)
        .map_err(|message| format!("expected one tensor, found {}", message.len()))?;
    Ok(packet.into_tensor()?)
}
