//! Tests of the public interface:
//! - `models`: segments and stages of real models;
//! - `graphs`: laws over random graphs;
//! - `errors`: messages that users read.

mod errors;
mod graphs;
mod models;
