//! The crate through its public door.
//!
//! - `schedules`: the generated orders, instruction streams and figures, for many sizes.
//! - `validator`: what it proves, and what it refuses.
//! - `render`: what users read.
//! - `engine`: every schedule gives the bits of a plain sequential run, and a fault ends all ranks.

mod engine;
mod render;
mod schedules;
mod validator;
