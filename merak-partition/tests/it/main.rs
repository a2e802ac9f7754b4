//! Tests of the public interface:
//! - `models`: segments and stages of real models;
//! - `graphs`: laws over random graphs;
//! - `tensor_parallel`: no cut through a sum over ranks;
//! - `search`: the shortest steps, against trying all partitions and against the simulator of
//!   schedules;
//! - `report`: the table and its figures;
//! - `cluster`: times on described machines;
//! - `errors`: messages that users read.

mod cluster;
mod errors;
mod graphs;
mod models;
mod report;
mod search;
mod tensor_parallel;
