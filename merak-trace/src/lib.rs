//! A typed graph of a model: symbolic tracing, autodiff, backends and model definitions.

mod autodiff;
pub mod backend;
mod error;
pub mod fx;
mod graph;
mod hash;
mod infer;
mod interpreter;
mod materialise;
pub mod kernels;
pub mod models;
pub mod op;
mod param;
mod program;
pub mod render;
mod types;
mod value;

pub use autodiff::Phase;
pub use backend::{Backend, Call, GradSlot, GradStore, ParamStore, RunContext, SharedBackend};
pub use error::{Error, Result};
pub use graph::{Graph, Node, NodeId, ParamId, Port, Source, ValueId, ValueInfo};
pub use interpreter::{AxisGroups, Batch, Forwarded, Frame, Interpreter, SingleRank};

pub use kernels::KernelError;
pub use materialise::initial_values;
pub use merak_mpu::{Axis, DType};
pub use op::Op;
pub use param::{Init, LocalBox, Param, ParamRole, Placement, Shard};
pub use program::{GradPort, Hop, RecomputePlan, StageCuts, StageProgram, TiedParam};
pub use types::TensorType;
pub use value::{Lease, MemoryMeter, Value};
