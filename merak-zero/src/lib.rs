//! Sharded optimizers over flat buckets: ZeRO, clipping by the true global norm, loss scaling,
//! learning-rate schedules.
//!
//! In 3D parallelism this is the tail of a step. Each rank holds a tensor-parallel slice of one
//! pipeline stage; ranks that differ in their data or sequence coordinate alone hold the same
//! parameters. Their gradients are averaged here, clipped by the norm of the whole model, and
//! applied.
//!
//! ```
//! use merak_mpu::threads;
//! use merak_zero::{GlobalParams, ParamSpec, ZeroConfig, ZeroGroups, ZeroOptimizer};
//! use std::error::Error;
//!
//! // Two replicas of a model with one weight of four elements, each with gradients of its own.
//! let replicas = threads::run(2, threads::WorldOptions::default(), |member| {
//!     let groups = ZeroGroups {
//!         data_sequence: member.world_group()?,
//!         model: member.group("model", &[member.rank()])?,
//!     };
//!     let model = GlobalParams::new([("weight", 4)]);
//!     let params = vec![ParamSpec::new("weight", &[2, 2], 0)];
//!     let mut optimizer = ZeroOptimizer::new(params, model, ZeroConfig::default(), groups)?;
//!
//!     let mut weights = vec![1.0_f32; optimizer.layout().len()];
//!     let mut grads = vec![member.rank().0 as f32; optimizer.layout().len()];
//!     let report = optimizer.step(&mut weights, &mut grads, 0.1)?;
//!     assert_eq!(report.grad_norm, 1.0); // of four averages of 0.5
//!     Ok::<_, Box<dyn Error + Send + Sync>>(weights)
//! })?;
//! assert_eq!(replicas[0], replicas[1]);
//! assert!((replicas[0][0] - 0.9).abs() < 1e-6);
//! # Ok::<(), Box<dyn Error>>(())
//! ```
//!
//! # Main types
//! - [`ZeroOptimizer`] reduces, clips and steps the flat parameters of one rank, as [`ZeroConfig`]
//!   says.
//! - [`FlatLayout`] says where each [`ParamSpec`] lies, and cuts buckets and parts;
//!   [`GlobalParams`] lists the parameters of the whole model, so that every rank adds the norm in
//!   one order.
//! - [`TensorOptimizer`]: the same over the tensors of another library, each by its name.
//! - [`OptimizerConfig`] chooses the rule; [`adam_update`], [`sgd_update`] and [`lion_update`] are
//!   rules themselves, over plain slices. [`MatrixProducts`] multiplies the matrices of Muon.
//! - [`UpdateRule`] is a rule of another program.
//! - [`MappedFloats`] are numbers in a file that is mapped into memory, as the state is after
//!   [`ZeroOptimizer::on_disk`].
//! - [`StepDevice`] steps buffers in the memory of a device, where the state then lies too.
//! - [`OwnedState`] is what a checkpoint saves, [`StepCounts`] how far the optimizer has come.
//! - [`LossScaler`] is the scale of the loss under f16; the optimizer steps it and divides
//!   gradients by it.
//! - [`LrSchedule`] turns the number of steps done into a learning rate.
//!
//! # One step
//! ```text
//! gradients, flat    | bucket 0          | bucket 1          |     each rank: sum of microbatches
//! stage 0            all-reduce          all-reduce                last bucket first, x 1/N
//! stage 1            reduce-scatter      reduce-scatter            rank r gets part r, x 1/N
//! stages 2, 3        the same for each microbatch, as soon as its bucket is complete
//! norm               sums of squares of whole blocks -> one vector -> model order -> square root
//! not finite         skip: nothing changes but the loss scale, the report names the parameter
//! update             stage 0: all        else: part r              gradient x clip / loss scale
//! stages 1, 2        all-gather of the parts
//! stage 3            all-gather of each bucket before its use, by the caller
//! ```
//!
//! With `L` elements on a rank, `N` ranks in its data x sequence group, `k` state values per
//! element and `M` microbatches of a step; the bytes are those of a rank, with
//! `T = 4 L (N - 1) / N`:
//!
//! | stage | parameters | gradients | state | sent in a step |
//! |---|---|---|---|---|
//! | 0 | `4 L` | `4 L` | `4 k L` | `2 T`: an all-reduce |
//! | 1 | `4 L` | `4 L` | `4 k L / N` | `2 T`: a reduce-scatter and an all-gather |
//! | 2 | `4 L` | `4 L / N` and two buckets | `4 k L / N` | `(M + 1) T` |
//! | 3 | `4 L / N` and buckets in use | as 2 | `4 k L / N` | `3 M T`: gathered twice |
//!
//! # Rules
//! | rule | asks of a parameter | state |
//! |---|---|---|
//! | AdamW, Adam, SGD, Lion | one element after the other | 2, 2, 0 or 1, 1 values per element |
//! | LAMB | norms of the weight and of its update: sums over norm blocks | 2 per element |
//! | Adafactor | means of rows and columns, root mean square of its update | 1 per row and column |
//! | Muon, on hidden matrices | all of the matrix | 1 per element |
//!
//! Under the last two, stages 1 to 3 give a parameter to one rank as a whole, so parts are less
//! equal. Where tensor ranks hold pieces of it ([`ParamSpec::cut`],
//! [`ZeroOptimizer::in_tensor_group`]), they add up their sums in f64; a matrix of Muon is put
//! together on one of them, a different one for each matrix, which makes the step orthogonal and
//! returns the pieces.
//!
//! With [`ZeroConfig::ema_decay`], an exponential moving average of each weight is one more value
//! of the state, under every rule and stage ([`ZeroOptimizer::swap_average`]).
//!
//! Where each tensor rank has a summand of the gradient of a parameter that all of them hold whole
//! ([`ParamSpec::summed`]), what a rank owns of it is summed over the tensor group once per step,
//! after the average over replicas and before the norm.
//!
//! # Guarantees
//! - Stage 1 gives the same bits as stage 0 where the group reduces in a fixed order, as the
//!   threads engine does; so do stages 2 and 3 with one microbatch. With more they add the averages
//!   of microbatches, and differ by rounding.
//! - The norm does not depend on where the pipeline is cut, nor on the stage, bucket sizes or
//!   thread count, in any bit; nor does the update, by any rule.
//! - The norm counts each logical element once: slices of all tensor ranks, replicated parameters
//!   on one, tied weights on one stage.
//! - Either all ranks of the model update or none does, and the loss scale is the same on all.
//!
//! Parameters and gradients are f32. Parameters that nodes read in 16 bits are copies of these
//! masters, which the caller makes.
//!
//! # Features
//! - `candle`: `TensorOptimizer::step` takes the gradients of candle's variables.
//! - `tch`: `TensorOptimizer::step` takes those of libtorch's; needs libtorch 2.11.
//!
//! # Papers
//! [ZeRO](https://arxiv.org/abs/1910.02054) (the stages, section 5),
//! [AdamW](https://arxiv.org/abs/1711.05101), [Adam](https://arxiv.org/abs/1412.6980),
//! [Adafactor](https://arxiv.org/abs/1804.04235), [LAMB](https://arxiv.org/abs/1904.00962),
//! [Lion](https://arxiv.org/abs/2302.06675), [Muon](https://kellerjordan.github.io/posts/muon/),
//! [clipping](https://arxiv.org/abs/1211.5063), [SGDR](https://arxiv.org/abs/1608.03983) (cosine
//! schedules), [WSD](https://arxiv.org/abs/2404.06395). Unlike ZeRO's own code, part borders lie on
//! norm-block borders, so that the norm of divided gradients has the bits of the undivided ones.

mod average;
mod blocks;
#[cfg(feature = "candle")]
mod candle;
mod copies;
mod device;
mod error;
mod exchange;
mod flat;
mod gathering;
mod layout;
mod learning_rate;
mod loss_scaler;
mod mapped;
mod memory;
mod norm;
mod optimizer;
mod params;
mod products;
mod stage;
mod state;
#[cfg(feature = "tch")]
mod tch;
mod tensors;
mod update;
mod update_rule;
mod whole;
mod zero_config;
mod zero_optimizer;

pub use average::EMA;
pub use blocks::{Block, NORM_BLOCK, sum_of_squares};
pub use device::{Step, StepDevice};
pub use error::{DeviceError, Error, Result};
pub use gathering::{Arrivals, Gatherer, PendingBucket};
pub use layout::{Bucket, FlatLayout, Part};
pub use learning_rate::{
    DecayType, LrSchedule, LrSchedulerKwargs, LrSchedulerType, NumberKwarg, warmup_steps,
};
pub use loss_scaler::{DynamicScaling, LossScaler, LossScaling, ScalerState};
pub use mapped::MappedFloats;
pub use memory::{ElementBytes, ExchangeBytes, KeptBytes, MostOwned};
pub use norm::{GradNorm, sums_of_squares};
pub use optimizer::{
    AdamStep, LionStep, OptimizerConfig, OptimizerKind, SgdStep, StateKind, adam_update,
    lion_update, sgd_update,
};
pub use params::{GlobalParams, ParamSpec, TensorCut};
pub use products::{Matrix, MatrixProducts, PlainProducts};
pub use stage::ZeroStage;
pub use state::{OwnedState, StateSlice};
pub use tensors::TensorOptimizer;
pub use update_rule::{RuleStep, UpdateRule};
pub use zero_config::{ZeroConfig, ZeroGroups};
pub use zero_optimizer::{StepCounts, UpdateReport, ZeroOptimizer};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
