//! The crate through its public door.
//!
//! - `schedules`: the generated orders, instruction streams and figures, for many sizes.
//! - `shapes`: bubbles and memory of split backwards and several stages per rank.
//! - `shared`: ranks that share cores.
//! - `validator`: what it proves, and what it refuses.
//! - `page`: the figures of the HTML page, by running its script.
//! - `render`: what users read.
//! - `auto`: the searched schedule against the named ones.
//! - `engine`: every schedule gives the bits of a plain sequential run, and a fault ends all ranks.
//! - `compare`: the comparison with a step without a pipeline, and the modules that it finds wrong.
//! - `tensors`: stages of a model over any library with autograd: `candle`, `tch`.
//! - `pairs`: forwards and backwards that run at once.
//! - `groups`: the same over process groups of merak-mpu.
//! - `solved`: small pipelines whose shortest schedules a solver has found.
//! - `played`: random schedules of any shape, for the laws of the others.

mod auto;
#[cfg(feature = "candle")]
mod candle;
mod compare;
mod engine;
mod groups;
mod page;
mod pairs;
mod played;
mod render;
mod schedules;
mod shapes;
mod shared;
mod solved;
#[cfg(feature = "tch")]
mod tch;
// `cfg(test)` tells clippy that its functions are bodies of tests.
#[cfg(test)]
#[cfg(any(feature = "candle", feature = "tch"))]
mod tensors;
mod validator;
