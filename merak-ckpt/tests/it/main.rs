//! The crate from outside.
//!
//! - `support`: a small made-up model, saved by any topology
//! - `topologies`: what any topology saves, any other reads back
//! - `store`: names, `latest`, rotation, leftovers
//! - `damage`: damaged and hostile files give errors that name them
//! - `generation`: the decode loop over toy models

mod damage;
mod generation;
mod store;
mod support;
mod topologies;
