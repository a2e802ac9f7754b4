//! What the graph engine promises, tested from outside.
//!
//! - `gradients`: every operation's gradient against finite differences in f64.
//! - `programs`: stage cuts, recomputation and the halves of the backward change no bit.
//! - `support`: small graphs and what runs them.

mod gradients;
mod programs;
mod support;
