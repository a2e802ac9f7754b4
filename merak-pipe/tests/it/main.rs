//! The crate through its public door.
//!
//! - `engine`: every schedule gives the bits of a plain sequential run, and a fault ends all ranks.

mod engine;
