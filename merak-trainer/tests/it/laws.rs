//! What no topology, schedule or interruption may change.

mod data; // samples and their order
mod pipeline; // L1: the pipeline changes no bit
mod topology; // L2: the degrees change the order of summation only
